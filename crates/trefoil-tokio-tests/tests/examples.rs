//! The examples that serve, end to end: each is started on a free loopback port, used, and ended.

use futures::{SinkExt, StreamExt};
use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use trefoil_tokio_tests::{programs, within};

/// Returns the path of an example, which `cargo test` has built. Builds it if only this test was
/// requested.
fn program(name: &str) -> PathBuf {
    let me = std::env::current_exe().unwrap();
    let profile = me.parent().and_then(Path::parent).unwrap();
    let path = profile.join("examples").join(name);
    if !path.exists() {
        let kind = profile.file_name().unwrap().to_str().unwrap();
        let status = std::process::Command::new(env!("CARGO"))
            .args(["build", "--example", name, "--profile"])
            .arg(if kind == "debug" { "dev" } else { kind })
            .arg("--target-dir")
            .arg(profile.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .unwrap();
        assert!(status.success());
    }
    path
}

/// A running example. It is killed if it is dropped before [`Example::end`].
struct Example {
    child: Child,
    addr: SocketAddr,
}

impl Example {
    /// Starts an example. The first line that it prints ends with its address.
    async fn start(name: &str, args: &[&str], database: Option<&str>) -> Example {
        let mut command = Command::new(program(name));
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        if let Some(url) = database {
            command.env("DATABASE_URL", url);
        }
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        within(out.read_line(&mut line)).await.unwrap();
        let addr = line.trim_end().rsplit(' ').next().unwrap();
        Example { addr: addr.parse().unwrap_or_else(|_| panic!("an address in {line:?}")), child }
    }

    /// Interrupts the example as Ctrl-C does. Returns whether it ended by itself, and not by the
    /// signal.
    async fn end(mut self) -> bool {
        let id = self.child.id().expect("it is running") as i32;
        // SAFETY: signals a child process that was not waited for yet.
        unsafe { libc::kill(id, libc::SIGINT) };
        within(self.child.wait()).await.unwrap().success()
    }
}

async fn body(request: reqwest::RequestBuilder) -> String {
    let response = request.send().await.unwrap().error_for_status().unwrap();
    response.text().await.unwrap()
}

#[trefoil::test(tokio)]
async fn axum_postgres_answers_while_reports_block() {
    const REPORTS: u32 = 8;
    const REPORT_TIME: Duration = Duration::from_millis(200);

    let Some(server) = programs::postgres() else { return };
    let url = format!("postgres://test@127.0.0.1:{}/postgres?sslmode=disable", server.port);
    let example = Example::start("axum_postgres", &["127.0.0.1:0"], Some(&url)).await;
    let client = reqwest::Client::new();
    let notes = format!("http://{}/notes", example.addr);
    let report = format!("http://{}/report", example.addr);
    assert_eq!(within(body(client.get(&notes))).await, "");
    assert_eq!(within(body(client.post(&notes).body("first"))).await, "1\n");

    // The reports wait for one lock; each holds it while it sleeps. There are more of them than
    // connections to the database.
    let begin = Instant::now();
    let mut reports = JoinSet::new();
    for _ in 0..REPORTS {
        reports.spawn(body(client.post(&report)));
    }
    let first = within(reports.join_next()).await.unwrap().unwrap();
    assert_eq!(first, "1 notes\n");
    for n in 2..=10 {
        let note = format!("note {n}");
        assert_eq!(within(body(client.post(&notes).body(note))).await, format!("{n}\n"));
        let list = within(body(client.get(&notes))).await;
        assert_eq!(list.lines().count(), n, "{list:?}");
    }
    let answered = begin.elapsed();
    while let Some(report) = within(reports.join_next()).await {
        assert!(report.unwrap().ends_with(" notes\n"));
    }
    // If the handlers of other requests waited for the reports, they would take this long, too.
    let all = begin.elapsed();
    assert!(all >= REPORTS * REPORT_TIME, "{all:?}");
    assert!(answered + 2 * REPORT_TIME < all, "{answered:?} of {all:?}");
    // The next report has the notes that were added meanwhile. Ctrl-C does not interrupt it.
    let last = tokio::spawn(body(client.post(&report)));
    tokio::time::sleep(REPORT_TIME / 2).await;
    assert!(example.end().await, "it ends without an error");
    assert_eq!(within(last).await.unwrap(), "10 notes\n");
}

/// Runs the example's client. Returns what it prints, or its error.
async fn read(addr: SocketAddr, file: &str) -> Result<String, String> {
    let mut command = Command::new(program("grpc"));
    command.args(["read", &addr.to_string(), file]).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(String::from_utf8(output.stderr).unwrap()),
    }
}

/// Opens a named pipe for writing, as soon as the server has opened it for reading.
async fn open_pipe(path: &Path) -> File {
    let mut options = File::options();
    options.write(true).custom_flags(libc::O_NONBLOCK);
    loop {
        match options.open(path) {
            Ok(pipe) => return pipe,
            Err(e) if e.raw_os_error() == Some(libc::ENXIO) => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(e) => panic!("{e}"),
        }
    }
}

#[trefoil::test(tokio)]
async fn grpc_answers_while_calls_wait_for_pipes() {
    const PIPES: usize = 8;

    let folder = std::env::temp_dir().join(format!("trefoil-grpc-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("file"), "a text\n").unwrap();
    let args = ["serve", "127.0.0.1:0", folder.to_str().unwrap()];
    let example = Example::start("grpc", &args, None).await;
    let addr = example.addr;

    // Each call waits in `read`, because its pipe is open for writing.
    let (mut calls, mut pipes) = (Vec::new(), Vec::new());
    for n in 0..PIPES {
        let name = format!("pipe{n}");
        let path = folder.join(&name);
        assert!(Command::new("mkfifo").arg(&path).status().await.unwrap().success());
        calls.push(tokio::spawn(async move { read(addr, &name).await }));
        pipes.push(within(open_pipe(&path)).await);
    }
    assert_eq!(within(read(addr, "file")).await.unwrap(), "a text\n");
    let error = within(read(addr, "none")).await.unwrap_err();
    assert!(error.contains("No such file"), "{error}");
    let error = within(read(addr, "../file")).await.unwrap_err();
    assert!(error.contains("has no '/'"), "{error}");
    assert!(calls.iter().all(|call| !call.is_finished()), "a call ends before its pipe");
    for (n, (call, mut pipe)) in calls.into_iter().zip(pipes).enumerate() {
        pipe.write_all(format!("text {n}").as_bytes()).unwrap();
        drop(pipe);
        assert_eq!(within(call).await.unwrap().unwrap(), format!("text {n}"));
    }
    assert!(!example.end().await, "it has no handler for SIGINT");
    std::fs::remove_dir_all(folder).unwrap();
}

type Client = WebSocketStream<TcpStream>;

async fn join(addr: SocketAddr) -> Client {
    let stream = TcpStream::connect(addr).await.unwrap();
    tokio_tungstenite::client_async(format!("ws://{addr}/"), stream).await.unwrap().0
}

/// Returns the next `count` messages of a client.
async fn hear(client: &mut Client, count: usize) -> Vec<String> {
    let mut heard = Vec::new();
    while heard.len() < count {
        match within(client.next()).await.unwrap().unwrap() {
            Message::Text(text) => heard.push(text.to_string()),
            Message::Ping(_) | Message::Pong(_) => {}
            other => panic!("{other:?} after {heard:?}"),
        }
    }
    heard
}

#[trefoil::test(tokio)]
async fn chat_async_sends_every_message_to_all_clients_in_one_order() {
    const CLIENTS: usize = 8;
    const MESSAGES: usize = 20;

    let example = Example::start("chat_async", &["127.0.0.1:0"], None).await;
    let mut clients = Vec::new();
    for id in 1..=CLIENTS {
        let mut client = within(join(example.addr)).await;
        assert_eq!(hear(&mut client, 1).await, [format!("{id}: has joined")]);
        clients.push(client);
    }
    let mut all = JoinSet::new();
    for (n, mut client) in clients.into_iter().enumerate() {
        all.spawn(async move {
            for i in 0..MESSAGES {
                client.send(Message::text(format!("message {i}"))).await.unwrap();
            }
            let joined = hear(&mut client, CLIENTS - 1 - n).await;
            assert!(joined.iter().all(|text| text.ends_with("has joined")), "{joined:?}");
            let heard = hear(&mut client, CLIENTS * MESSAGES).await;
            (client, heard)
        });
    }
    let mut heard = Vec::new();
    let mut clients = Vec::new();
    while let Some(ended) = within(all.join_next()).await {
        let (client, messages) = ended.unwrap();
        clients.push(client);
        heard.push(messages);
    }
    for id in 1..=CLIENTS {
        let own = heard[0].iter().filter_map(|text| text.strip_prefix(&format!("{id}: ")));
        let expected = (0..MESSAGES).map(|i| format!("message {i}"));
        assert!(own.eq(expected), "client {id} in {:?}", heard[0]);
    }
    assert!(heard.iter().all(|messages| *messages == heard[0]), "{heard:?}");

    // A client that leaves with and one that leaves without a farewell.
    within(clients.pop().unwrap().close(None)).await.unwrap();
    let left = hear(&mut clients[0], 1).await;
    assert!(left[0].ends_with(": has left"), "{left:?}");
    drop(clients.pop());
    let left = hear(&mut clients[0], 1).await;
    assert!(left[0].ends_with(": has left"), "{left:?}");
    assert!(!example.end().await, "it has no handler for SIGINT");
}
