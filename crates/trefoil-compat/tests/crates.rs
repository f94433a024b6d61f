//! Unmodified crates in their blocking form, called by goroutines. The tests start the database
//! servers that they need, on a free port with a folder of their own, and end them. If a server is
//! not installed, its test prints that it is skipped, and passes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use trefoil::{JoinHandle, Runtime};

const PROCS: usize = 4;
/// The number of goroutines at once. `TREFOIL_COMPAT_MANY` overrides the default.
static MANY: LazyLock<usize> = LazyLock::new(|| {
    let wanted = std::env::var("TREFOIL_COMPAT_MANY").ok().and_then(|n| n.parse().ok());
    wanted.unwrap_or(if cfg!(debug_assertions) { 100 } else { 1000 })
});
const LONG: Duration = Duration::from_secs(30);

/// Runs `f` as the main goroutine of a new runtime.
fn run<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    Runtime::builder().procs(PROCS).stack_size(512 << 10).build().unwrap().run(f)
}

fn join_all<T>(all: impl IntoIterator<Item = JoinHandle<T>>) -> Vec<T> {
    let all: Vec<_> = all.into_iter().collect();
    all.into_iter().map(|h| h.join().unwrap()).collect()
}

/// Asserts that goroutines park instead of blocking their threads. libc's own locks, in the
/// resolver for example, and files block threads for a moment.
fn assert_few_threads() {
    let n = trefoil::debug::stats().threads;
    println!("{} goroutines, {n} threads", *MANY);
    assert!(n < (8 * (PROCS + 8)).max(*MANY / 4), "{n} threads");
}

/// Starts a server that calls `each` for every connection, on a goroutine of its own.
fn serve(each: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let each = Arc::new(each);
    trefoil::go(move || {
        for stream in listener.incoming() {
            let (each, stream) = (each.clone(), stream.unwrap());
            trefoil::go(move || each(stream));
        }
    });
    addr
}

/// Answers requests with their path until the client closes the connection.
fn serve_http(stream: &mut (impl Read + Write)) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut first = String::new();
        if reader.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        let mut line = String::new();
        while reader.read_line(&mut line).unwrap() > 2 {
            line.clear();
        }
        let path = first.split(' ').nth(1).unwrap().to_owned();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", path.len());
        let stream = reader.get_mut();
        if stream.write_all((head + &path).as_bytes()).and_then(|()| stream.flush()).is_err() {
            return;
        }
    }
}

struct Tls {
    server: Arc<rustls::ServerConfig>,
    client: Arc<rustls::ClientConfig>,
    der: Vec<u8>,
}

fn tls() -> Tls {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let der = made.cert.der().clone();
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let server = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![der.clone()], key.into())
        .unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(der.clone()).unwrap();
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Tls { server: Arc::new(server), client: Arc::new(client), der: der.to_vec() }
}

#[test]
fn ureq_gets_the_answer_to_each_goroutines_request() {
    run(|| {
        let addr = serve(|mut stream| serve_http(&mut stream));
        let agent: ureq::Agent =
            ureq::Agent::config_builder().timeout_global(Some(LONG)).build().into();
        let all = (0..*MANY).map(|i| {
            let agent = agent.clone();
            trefoil::go(move || {
                for turn in 0..2 {
                    let url = format!("http://{addr}/{i}/{turn}");
                    let text = agent.get(&url).call().unwrap().body_mut().read_to_string().unwrap();
                    assert_eq!(text, format!("/{i}/{turn}"));
                }
            })
        });
        join_all(all);
        assert_few_threads();
    });
}

#[test]
fn ureq_gets_answers_over_tls() {
    run(|| {
        let tls = tls();
        let config = tls.server.clone();
        let addr = serve(move |stream| {
            let connection = rustls::ServerConnection::new(config.clone()).unwrap();
            serve_http(&mut rustls::StreamOwned::new(connection, stream));
        });
        let root = ureq::tls::Certificate::from_der(&tls.der).to_owned();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let settings = ureq::tls::TlsConfig::builder()
            .root_certs(ureq::tls::RootCerts::new_with_certs(&[root]))
            .unversioned_rustls_crypto_provider(provider)
            .build();
        let agent: ureq::Agent = ureq::Agent::config_builder()
            .timeout_global(Some(LONG))
            .tls_config(settings)
            .build()
            .into();
        let all = (0..*MANY / 4).map(|i| {
            let agent = agent.clone();
            trefoil::go(move || {
                let url = format!("https://localhost:{}/{i}", addr.port());
                let text = agent.get(&url).call().unwrap().body_mut().read_to_string().unwrap();
                assert_eq!(text, format!("/{i}"));
            })
        });
        join_all(all);
        assert_few_threads();
    });
}

/// reqwest's blocking client has a thread of its own that runs tokio. Goroutines wait for it by
/// std's `park`.
#[test]
fn reqwests_blocking_client_serves_every_goroutine() {
    run(|| {
        let addr = serve(|mut stream| serve_http(&mut stream));
        let client = reqwest::blocking::Client::builder().no_proxy().timeout(LONG).build().unwrap();
        let all = (0..*MANY).map(|i| {
            let client = client.clone();
            trefoil::go(move || {
                for turn in 0..2 {
                    let url = format!("http://{addr}/{i}/{turn}");
                    let text = client.get(&url).send().unwrap().text().unwrap();
                    assert_eq!(text, format!("/{i}/{turn}"));
                }
            })
        });
        join_all(all);
        assert_few_threads();
    });
}

/// A goroutine that has entered a tokio runtime stays in it on every thread that it runs on.
#[test]
fn tokio_timers_and_sockets_wake_block_on_of_goroutines() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    run(|| {
        let addr = serve(|mut stream| {
            let mut buf = [0; 64];
            while let Ok(n @ 1..) = stream.read(&mut buf) {
                stream.write_all(&buf[..n]).unwrap();
            }
        });
        let tokio = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let tokio = Arc::new(tokio);
        let all = (0..*MANY / 4).map(|i| {
            let tokio = tokio.clone();
            trefoil::go(move || {
                let _entered = tokio.enter();
                trefoil::block_on(tokio::time::sleep(Duration::from_millis(1 + i as u64 % 5)));
                trefoil::yield_now();
                trefoil::block_on(async move {
                    let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
                    let mut buf = [0; 8];
                    for turn in 0..3 {
                        let sent = (i as u64 + turn).to_ne_bytes();
                        stream.write_all(&sent).await.unwrap();
                        stream.read_exact(&mut buf).await.unwrap();
                        assert_eq!(buf, sent);
                    }
                });
            })
        });
        join_all(all);
        assert_few_threads();
    });
}

#[test]
fn rustls_streams_echo_what_each_goroutine_sent() {
    run(|| {
        let tls = tls();
        let config = tls.server.clone();
        let addr = serve(move |stream| {
            let connection = rustls::ServerConnection::new(config.clone()).unwrap();
            let mut stream = rustls::StreamOwned::new(connection, stream);
            let mut buf = [0; 500];
            while let Ok(n @ 1..) = stream.read(&mut buf) {
                stream.write_all(&buf[..n]).unwrap();
            }
        });
        let all = (0..*MANY / 4).map(|i| {
            let config = tls.client.clone();
            trefoil::go(move || {
                let name = "localhost".try_into().unwrap();
                let connection = rustls::ClientConnection::new(config, name).unwrap();
                let socket = TcpStream::connect(addr).unwrap();
                let mut stream = rustls::StreamOwned::new(connection, socket);
                let mut buf = [0; 300];
                for turn in 0..3 {
                    stream.write_all(&[(i + turn) as u8; 300]).unwrap();
                    stream.read_exact(&mut buf).unwrap();
                    assert_eq!(buf, [(i + turn) as u8; 300]);
                }
            })
        });
        join_all(all);
        assert_few_threads();
    });
}

#[test]
fn tungstenite_sockets_echo_what_each_goroutine_sent() {
    run(|| {
        let addr = serve(|stream| {
            let mut socket = tungstenite::accept(stream).unwrap();
            while let Ok(message) = socket.read() {
                if message.is_text() {
                    socket.send(message).unwrap();
                }
            }
        });
        let all = (0..*MANY).map(|i| {
            trefoil::go(move || {
                let stream = TcpStream::connect(addr).unwrap();
                let (mut socket, _) = tungstenite::client(format!("ws://{addr}/"), stream).unwrap();
                for turn in 0..3 {
                    let text = format!("{i} {turn}");
                    socket.send(tungstenite::Message::text(text.clone())).unwrap();
                    assert_eq!(socket.read().unwrap().into_text().unwrap().as_str(), text);
                }
                socket.close(None).unwrap();
            })
        });
        join_all(all);
        assert_few_threads();
    });
}

/// A server process and its folder. Dropping it ends the process and removes the folder.
struct Server {
    process: Child,
    dir: PathBuf,
    port: u16,
    /// The signal that ends it.
    signal: i32,
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: signals a child process that was not waited for yet.
        unsafe { libc::kill(self.process.id() as i32, self.signal) };
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port()
}

/// Creates a folder for this process.
fn folder(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("trefoil-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

/// Polls until `done` returns true. Panics after [`LONG`].
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{what} does not answer");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the path of a program: in `PATH`, or in `bin` of a folder in `versions_dir`.
fn program(name: &str, versions_dir: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let versions = std::fs::read_dir(versions_dir).into_iter().flatten().flatten();
    let dirs = std::env::split_paths(&path).chain(versions.map(|v| v.path().join("bin")));
    let found = dirs.map(|dir| dir.join(name)).find(|file| file.is_file());
    if found.is_none() {
        // Past libtest's capture.
        let _ = writeln!(std::io::stderr(), "skipped: {name} is not installed");
    }
    found
}

fn redis_server() -> Option<Server> {
    let file = program("redis-server", "/none")?;
    let (dir, port) = (folder("redis"), free_port());
    let process = Command::new(file)
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxclients", "4000"])
        .args(["--port", &port.to_string(), "--dir"])
        .arg(&dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server { process, dir, port, signal: libc::SIGTERM };
    wait_until("redis", || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok());
    Some(server)
}

#[test]
fn redis_executes_the_commands_of_every_goroutine() {
    let Some(server) = redis_server() else { return };
    let port = server.port;
    run(move || {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}/")).unwrap();
        let all = (0..*MANY).map(|i| {
            let client = client.clone();
            trefoil::go(move || {
                let mut c = client.get_connection().unwrap();
                redis::cmd("SET").arg(format!("k{i}")).arg(i).exec(&mut c).unwrap();
                for _ in 0..3 {
                    redis::cmd("INCR").arg("all").exec(&mut c).unwrap();
                }
                let back: usize = redis::cmd("GET").arg(format!("k{i}")).query(&mut c).unwrap();
                assert_eq!(back, i);
            })
        });
        join_all(all);
        let mut c = client.get_connection().unwrap();
        assert_eq!(redis::cmd("GET").arg("all").query::<usize>(&mut c).unwrap(), 3 * *MANY);
        // The list stays empty: the call times out.
        let start = Instant::now();
        c.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        redis::cmd("BLPOP").arg("nothing").arg(0).exec(&mut c).unwrap_err();
        assert!(start.elapsed() >= Duration::from_millis(49));
        assert_few_threads();
    });
}

/// Returns a command that runs `file`, as the user `nobody` if this process runs as root:
/// PostgreSQL refuses to run as root.
fn command_as_nobody(file: &Path) -> Command {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return Command::new(file);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(file);
    command
}

fn postgres_server() -> Option<Server> {
    let server = program("postgres", "/usr/lib/postgresql")?;
    let (dir, port) = (folder("postgres"), free_port());
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } == 0 {
        std::os::unix::fs::chown(&dir, Some(65534), Some(65534)).unwrap();
    }
    let data = dir.join("data");
    let made = command_as_nobody(&server.with_file_name("initdb"))
        .args(["-U", "test", "-A", "trust", "--no-sync", "-D"])
        .arg(&data)
        .current_dir(&dir)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let process = command_as_nobody(&server)
        .arg("-D")
        .arg(&data)
        .args(["-F", "-h", "127.0.0.1", "-p", &port.to_string(), "-N", "60", "-k"])
        .arg(&dir)
        .current_dir(&dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let server = Server { process, dir, port, signal: libc::SIGINT };
    let config = format!("host=127.0.0.1 port={port} user=test dbname=postgres");
    wait_until("postgres", || postgres::Client::connect(&config, postgres::NoTls).is_ok());
    Some(server)
}

#[test]
fn postgres_answers_the_query_of_every_goroutine() {
    let Some(server) = postgres_server() else { return };
    let config = format!("host=127.0.0.1 port={} user=test dbname=postgres", server.port);
    run(move || {
        // A channel serves as a pool: goroutines wait for a connection.
        let (give, take) = crossbeam_channel::unbounded();
        let connect = |config: String| {
            trefoil::go(move || postgres::Client::connect(&config, postgres::NoTls).unwrap())
        };
        for mut client in join_all((0..20).map(|_| connect(config.clone()))) {
            client.batch_execute("create temp table t (n bigint)").unwrap();
            give.send(client).unwrap();
        }
        let all = (0..*MANY).map(|i| {
            let (give, take) = (give.clone(), take.clone());
            trefoil::go(move || {
                let (mut client, i) = (take.recv().unwrap(), i as i64);
                client.execute("insert into t values ($1)", &[&i]).unwrap();
                let row = client.query_one("select max(n), $1::bigint from t", &[&i]).unwrap();
                // The table belongs to the connection, which other goroutines have used before.
                assert!(row.get::<_, i64>(0) >= i, "{row:?}");
                assert_eq!(row.get::<_, i64>(1), i);
                give.send(client).unwrap();
            })
        });
        join_all(all);
        drop(give);
        let counts = take.iter().map(|mut client| {
            client.query_one("select count(*) from t", &[]).unwrap().get::<_, i64>(0)
        });
        assert_eq!(counts.sum::<i64>(), *MANY as i64);
        assert_few_threads();
    });
}

#[test]
fn rayon_computes_for_every_goroutine() {
    use rayon::prelude::*;
    // A worker that waits for a part of its job runs another goroutine's job meanwhile, on top of
    // its stack. With a thousand jobs rayon's default of 2 MiB is too small in a debug build.
    rayon::ThreadPoolBuilder::new().stack_size(64 << 20).build_global().unwrap();
    run(|| {
        let all = (0..*MANY as u64).map(|i| {
            trefoil::go(move || {
                let sum: u64 = (0..1000u64).into_par_iter().map(|n| n * i).sum();
                let (a, b) = rayon::join(|| i + 1, || i + 2);
                assert_eq!((sum, a, b), (499_500 * i, i + 1, i + 2));
            })
        });
        join_all(all);
    });
}

#[test]
fn rusqlite_keeps_the_rows_of_every_goroutine() {
    let dir = folder("sqlite");
    let file = dir.join("db");
    run(move || {
        let open = |file: &Path| {
            let db = rusqlite::Connection::open(file).unwrap();
            db.busy_timeout(LONG).unwrap();
            db
        };
        let db = open(&file);
        db.execute_batch(
            "pragma journal_mode = wal; pragma synchronous = off; create table t (n integer)",
        )
        .unwrap();
        // All goroutines share a connection behind a lock; some have a connection of their own,
        // too.
        let shared = Arc::new(std::sync::Mutex::new(db));
        let all = (0..*MANY).map(|i| {
            let (file, shared) = (file.clone(), shared.clone());
            trefoil::go(move || {
                shared.lock().unwrap().execute("insert into t values (?1)", [i as i64]).unwrap();
                if i % 20 == 0 {
                    let own = open(&file);
                    own.execute("insert into t values (?1)", [i as i64]).unwrap();
                    let n: i64 = own.query_row("select count(*) from t", [], |r| r.get(0)).unwrap();
                    assert!(n >= 2);
                }
            })
        });
        join_all(all);
        let db = shared.lock().unwrap();
        let n: i64 = db.query_row("select count(*) from t", [], |r| r.get(0)).unwrap();
        assert_eq!(n as usize, *MANY + MANY.div_ceil(20));
    });
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn tracing_parking_lot_and_flume_lose_no_line_count_or_value() {
    run(|| {
        let lines = Arc::new(AtomicUsize::new(0));
        struct Count(Arc<AtomicUsize>);
        impl Write for Count {
            fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
                self.0.fetch_add(buf.iter().filter(|b| **b == b'\n').count(), SeqCst);
                Ok(buf.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let counted = lines.clone();
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || Count(counted.clone())).finish();
        let dispatch = tracing::Dispatch::new(subscriber);
        let (lock, (tx, rx)) = (Arc::new(parking_lot::Mutex::new(0u64)), flume::bounded(10));
        let all: Vec<_> = (0..*MANY)
            .map(|i| {
                let (dispatch, lock, tx) = (dispatch.clone(), lock.clone(), tx.clone());
                trefoil::go(move || {
                    tracing::dispatcher::with_default(&dispatch, || {
                        let span = tracing::info_span!("one", i);
                        let _entered = span.enter();
                        std::thread::sleep(Duration::from_millis(1));
                        *lock.lock() += rand::random_range(1..2u64);
                        tracing::info!("done");
                    });
                    tx.send(i).unwrap();
                })
            })
            .collect();
        drop(tx);
        assert_eq!(rx.iter().sum::<usize>(), *MANY * (*MANY - 1) / 2);
        join_all(all);
        assert_eq!((*lock.lock(), lines.load(SeqCst)), (*MANY as u64, *MANY));
        assert_few_threads();
    });
}
