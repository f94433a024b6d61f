//! tokio's own runtime in simulations: its threads are goroutines there, its sockets belong to the
//! simulated network, and its clock is the test's. Nothing here is written for a simulation, except
//! the hosts.

use axum::Router;
use axum::routing::get;
use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::runtime;
use tokio::time::{Instant, sleep, timeout};
use trefoil::sim;

const SECOND: Duration = Duration::from_secs(1);

/// Runs a future on a new runtime of tokio's, with several workers.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build();
    runtime.unwrap().block_on(future)
}

/// Runs a future on a new runtime of tokio's with one thread. Its runs can be repeated exactly:
/// between several workers, tokio chooses by random numbers that depend on how many runtimes the
/// process has had.
fn block_on_one<T>(future: impl Future<Output = T>) -> T {
    let runtime = runtime::Builder::new_current_thread().enable_all().build();
    runtime.unwrap().block_on(future)
}

/// Returns every five bytes to their sender, after `delay`.
async fn echo(delay: Duration) {
    let listener = TcpListener::bind("0.0.0.0:80").await.unwrap();
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let mut bytes = [0; 5];
            while stream.read_exact(&mut bytes).await.is_ok() {
                sleep(delay).await;
                stream.write_all(&bytes).await.unwrap();
            }
        });
    }
}

/// Sends five bytes to the host `server`, and waits for the answer.
async fn call(stream: &mut TcpStream) {
    let mut bytes = [0; 5];
    stream.write_all(b"hello").await.unwrap();
    stream.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"hello");
}

#[test]
fn a_server_and_its_clients_run_in_virtual_time() {
    let begin = std::time::Instant::now();
    sim::explore(20, || {
        sim::host("server", || block_on(echo(60 * SECOND)));
        sim::settle();
        block_on(async {
            let begin = Instant::now();
            let mut clients = tokio::task::JoinSet::new();
            for _ in 0..5 {
                clients.spawn(async {
                    let mut stream = TcpStream::connect("server:80").await.unwrap();
                    for _ in 0..3 {
                        call(&mut stream).await;
                    }
                });
            }
            while let Some(client) = clients.join_next().await {
                client.unwrap();
            }
            assert_eq!(begin.elapsed().as_secs(), 180);
        });
    });
    assert!(begin.elapsed() < 60 * SECOND, "an hour took {:?}", begin.elapsed());
}

#[test]
fn a_runtime_with_one_thread_sleeps_for_a_day() {
    sim::run(|| {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let begin = Instant::now();
            let sleeps = (1..=24).map(|hour| tokio::spawn(sleep(hour * 3600 * SECOND)));
            for each in sleeps.collect::<Vec<_>>() {
                each.await.unwrap();
            }
            assert_eq!(begin.elapsed().as_secs(), 24 * 3600);
        });
    });
}

#[test]
fn a_partition_ends_calls_by_their_timeout() {
    sim::run(|| {
        sim::host("server", || block_on(echo(Duration::ZERO)));
        sim::settle();
        block_on(async {
            let mut stream = TcpStream::connect("server:80").await.unwrap();
            call(&mut stream).await;
            sim::net().partition("test", "server");
            let begin = Instant::now();
            assert!(timeout(30 * SECOND, call(&mut stream)).await.is_err());
            assert_eq!(begin.elapsed().as_secs(), 30);
            sim::net().heal("test", "server");
            let mut another = TcpStream::connect("server:80").await.unwrap();
            call(&mut another).await;
        });
    });
}

#[test]
fn the_order_of_answers_depends_on_the_seed_and_is_replayed() {
    let program = || {
        sim::host("server", || block_on_one(echo(SECOND)));
        sim::settle();
        let order = Arc::new(Mutex::new(Vec::new()));
        let of_clients = order.clone();
        block_on_one(async move {
            let clients = (0..4).map(|i| {
                let order = of_clients.clone();
                tokio::spawn(async move {
                    let mut stream = TcpStream::connect("server:80").await.unwrap();
                    call(&mut stream).await;
                    order.lock().unwrap().push(i);
                })
            });
            for client in clients.collect::<Vec<_>>() {
                client.await.unwrap();
            }
        });
        assert_ne!(*order.lock().unwrap(), [2, 0, 3, 1], "the order that is sought");
    };
    let failure = sim::builder().explore(2_000, program).unwrap_err();
    assert!(failure.is_repeatable, "{failure}");
    let again = sim::builder().replay(&failure.seed, program).unwrap_err();
    assert_eq!(again.message, failure.message);
}

#[test]
fn datagrams_and_blocking_tasks_work() {
    sim::run(|| {
        sim::host("server", || {
            block_on(async {
                let socket = UdpSocket::bind("0.0.0.0:53").await.unwrap();
                let mut bytes = [0; 16];
                loop {
                    let (n, from) = socket.recv_from(&mut bytes).await.unwrap();
                    socket.send_to(&bytes[..n], from).await.unwrap();
                }
            });
        });
        sim::settle();
        block_on(async {
            let socket = UdpSocket::bind("0.0.0.0:0").await.unwrap();
            socket.send_to(b"name", "server:53").await.unwrap();
            let mut bytes = [0; 16];
            assert_eq!(socket.recv(&mut bytes).await.unwrap(), 4);
            let begin = Instant::now();
            let blocking = tokio::task::spawn_blocking(|| std::thread::sleep(3600 * SECOND));
            blocking.await.unwrap();
            assert_eq!(begin.elapsed().as_secs(), 3600);
        });
    });
}

#[test]
fn axum_serves_reqwest_until_its_host_crashes() {
    static SERVED: AtomicU32 = AtomicU32::new(0);
    sim::explore(5, || {
        SERVED.store(0, SeqCst);
        let server = sim::host("server", || {
            block_on(async {
                let answer = || async {
                    sleep(5 * SECOND).await;
                    SERVED.fetch_add(1, SeqCst).to_string()
                };
                let listener = TcpListener::bind("0.0.0.0:80").await.unwrap();
                axum::serve(listener, Router::new().route("/", get(answer))).await.unwrap();
            });
        });
        sim::settle();
        block_on(async {
            let client = reqwest::Client::builder().timeout(30 * SECOND).build().unwrap();
            let get = || async { client.get("http://server/").send().await?.text().await };
            let begin = Instant::now();
            assert_eq!(get().await.unwrap(), "0");
            assert_eq!(get().await.unwrap(), "1");
            assert_eq!(begin.elapsed().as_secs(), 10);
            server.crash();
            let begin = Instant::now();
            assert!(get().await.unwrap_err().is_timeout());
            assert_eq!(begin.elapsed().as_secs(), 30);
            server.restart();
            sleep(SECOND).await;
            // A connection that the client has kept from before is reset.
            let (first, second) = (get().await, get().await);
            assert_eq!(first.or(second).unwrap(), "2");
        });
    });
}
