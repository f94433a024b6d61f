//! Serving axum routers over loopback: HTTP/1 and HTTP/2, shutdown, handlers that block, clients
//! that are slow or go away.

#[path = "../../trefoil/tests/common/mod.rs"]
mod common;

use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use bytes::Bytes;
use common::{once_in_five, spin};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::{Request, Response, StatusCode, Version};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::JoinHandle;
use trefoil::context::{Cancel, Context};
use trefoil::net::{TcpListener, TcpStream};
use trefoil::task;
use trefoil::time::sleep_async;
use trefoil_hyper::TrefoilExecutor;

const MS: Duration = Duration::from_millis(1);

fn router() -> Router {
    router_with(Arc::default())
}

fn router_with(gate: Arc<Gate>) -> Router {
    Router::new()
        .route("/", get(|| async { "hello" }))
        .route("/echo", post(|body: Bytes| async move { body }))
        .route("/gate", get(move || pass(gate.clone())))
        .route("/block", get(|| async { std::thread::sleep(50 * MS) }))
        .route("/spin", get(|| async { spin(50 * MS) }))
        .route("/large", get(|| async { vec![7_u8; 16 << 20] }))
}

/// Holds the requests for `/gate` in their handlers until the test opens it.
#[derive(Default)]
struct Gate {
    arrived: AtomicUsize,
    open: AtomicBool,
}

impl Gate {
    /// Waits until `n` requests have reached their handlers.
    async fn wait_for(&self, n: usize) {
        until("the requests reach their handlers", || self.arrived.load(Ordering::SeqCst) == n)
            .await;
    }

    fn open(&self) {
        self.open.store(true, Ordering::SeqCst);
    }
}

async fn pass(gate: Arc<Gate>) -> &'static str {
    gate.arrived.fetch_add(1, Ordering::SeqCst);
    until("the test opens the gate", || gate.open.load(Ordering::SeqCst)).await;
    "passed"
}

/// Waits for a condition. Panics if it does not hold after a minute.
async fn until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "did not happen: {what}");
        sleep_async(MS).await;
    }
}

/// A server of [`router`], which ends with `cancel`.
struct Server {
    address: SocketAddr,
    gate: Arc<Gate>,
    cancel: Cancel,
    handle: JoinHandle<std::io::Result<()>>,
}

impl Server {
    fn start() -> Server {
        Server::start_with(Duration::from_secs(30))
    }

    fn start_with(header_read_timeout: Duration) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (ctx, cancel) = Context::background().with_cancel();
        let gate = Arc::<Gate>::default();
        let router = router_with(gate.clone());
        let handle = trefoil::go(move || {
            trefoil_hyper::serve(listener, router)
                .header_read_timeout(header_read_timeout)
                .shutdown_on(&ctx)
                .run()
        });
        Server { address, gate, cancel, handle }
    }

    /// Ends it, and waits for all its connections.
    fn stop(self) {
        self.cancel.cancel();
        self.handle.join().unwrap().unwrap();
    }

    async fn connect<B>(&self) -> http1::SendRequest<B>
    where
        B: hyper::body::Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>>
            + Send
            + 'static,
    {
        let stream = TcpStream::connect_async(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (sender, connection) = http1::handshake(stream).await.unwrap();
        drop(task::spawn(connection));
        sender
    }
}

fn request(path: &str) -> Request<Empty<Bytes>> {
    Request::get(format!("http://localhost{path}"))
        .header("host", "localhost")
        .body(Empty::new())
        .unwrap()
}

async fn text(response: Response<Incoming>) -> String {
    assert_eq!(response.status(), StatusCode::OK);
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[test]
fn http1_keeps_a_connection_for_many_requests() {
    trefoil::run(|| {
        let server = Server::start();
        trefoil::block_on(async {
            let mut client = server.connect().await;
            for i in 0..200 {
                let body = "x".repeat(i * 31);
                let request = Request::post("/echo").header("host", "localhost");
                let request = request.body(Full::new(Bytes::from(body.clone()))).unwrap();
                let response = client.send_request(request).await.unwrap();
                assert_eq!(response.version(), Version::HTTP_11);
                assert_eq!(text(response).await, body);
                client.ready().await.unwrap();
            }
        });
        server.stop();
    });
}

#[test]
fn http2_serves_many_streams_of_a_connection_at_once() {
    trefoil::run(|| {
        let server = Server::start();
        trefoil::block_on(async {
            let stream = TcpStream::connect_async(server.address).await.unwrap();
            let (client, connection) = http2::handshake(TrefoilExecutor, stream).await.unwrap();
            let connection = task::spawn(connection);
            let requests: Vec<_> = (0..50)
                .map(|_| {
                    let mut client = client.clone();
                    task::spawn(async move {
                        let response = client.send_request(request("/gate")).await.unwrap();
                        assert_eq!(response.version(), Version::HTTP_2);
                        assert_eq!(text(response).await, "passed");
                    })
                })
                .collect();
            // No handler returns before all have begun.
            server.gate.wait_for(50).await;
            server.gate.open();
            for request in requests {
                request.await.unwrap();
            }
            drop(client);
            connection.await.unwrap().unwrap();
        });
        server.stop();
    });
}

#[test]
fn a_unix_socket_is_served() {
    trefoil::run(|| {
        let path = std::env::temp_dir().join(format!("trefoil-hyper-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let listener = trefoil::net::UnixListener::bind(&path).unwrap();
        let (ctx, cancel) = Context::background().with_cancel();
        let server =
            task::spawn(trefoil_hyper::serve(listener, router()).shutdown_on(&ctx).into_future());
        trefoil::block_on(async {
            let stream = trefoil::net::UnixStream::connect_async(&path).await.unwrap();
            let (mut client, connection) = http1::handshake(stream).await.unwrap();
            drop(task::spawn(connection));
            assert_eq!(text(client.send_request(request("/")).await.unwrap()).await, "hello");
        });
        std::fs::remove_file(&path).unwrap();
        cancel.cancel();
        server.join().unwrap().unwrap();
    });
}

#[test]
fn shutdown_finishes_requests_in_flight_and_closes_idle_connections() {
    trefoil::run(|| {
        let server = Server::start();
        let address = server.address;
        trefoil::block_on(async {
            let mut idle = server.connect().await;
            assert_eq!(text(idle.send_request(request("/")).await.unwrap()).await, "hello");
            let mut busy: Vec<_> = Vec::new();
            for _ in 0..4 {
                let mut client = server.connect().await;
                busy.push(task::spawn(async move {
                    text(client.send_request(request("/gate")).await.unwrap()).await
                }));
            }
            let stream = TcpStream::connect_async(address).await.unwrap();
            let (mut h2, connection) = http2::handshake(TrefoilExecutor, stream).await.unwrap();
            drop(task::spawn(connection));
            busy.push(task::spawn(async move {
                text(h2.send_request(request("/gate")).await.unwrap()).await
            }));
            server.gate.wait_for(5).await;
            let Server { gate, cancel, handle, .. } = server;
            cancel.cancel();
            // Until the server has seen it: then it accepts no connection.
            until("new connections are refused", || TcpStream::connect(address).is_err()).await;
            assert!(!handle.is_finished(), "the server waits for its requests");
            gate.open();
            handle.await.unwrap().unwrap();
            for task in busy {
                assert_eq!(task.await.unwrap(), "passed");
            }
            assert!(
                idle.send_request(request("/")).await.is_err(),
                "the idle connection is closed"
            );
            let refused = TcpStream::connect_async(address).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        });
    });
}

/// Returns the latency of fast requests, sorted, while 8 clients request `path` again and again.
fn latencies_beside(path: &'static str) -> Vec<Duration> {
    trefoil::run(move || {
        let server = Arc::new(Server::start());
        let stop = Arc::new(AtomicBool::new(false));
        let served = Arc::new(AtomicUsize::new(0));
        let slow: Vec<_> = (0..8)
            .map(|_| {
                let (server, stop, served) = (server.clone(), stop.clone(), served.clone());
                task::spawn(async move {
                    let mut client = server.connect().await;
                    while !stop.load(Ordering::Relaxed) {
                        client.ready().await.unwrap();
                        text(client.send_request(request(path)).await.unwrap()).await;
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let mut latencies = trefoil::block_on(async {
            let mut client = server.connect().await;
            until("each slow client is served", || served.load(Ordering::Relaxed) >= 8).await;
            let before = served.load(Ordering::Relaxed);
            let mut latencies = Vec::new();
            let end = Instant::now() + Duration::from_millis(1000);
            while Instant::now() < end {
                client.ready().await.unwrap();
                let start = Instant::now();
                text(client.send_request(request("/")).await.unwrap()).await;
                latencies.push(start.elapsed());
            }
            let after = served.load(Ordering::Relaxed);
            assert!(after > before, "the slow requests are served too");
            latencies
        });
        stop.store(true, Ordering::Relaxed);
        slow.into_iter().for_each(|task| task.join().unwrap());
        Arc::into_inner(server).unwrap().stop();
        latencies.sort();
        latencies
    })
}

fn report(name: &str, latencies: &[Duration]) -> Duration {
    let p99 = latencies[latencies.len() * 99 / 100];
    let median = latencies[latencies.len() / 2];
    println!("{name}: {} fast requests, median {median:?}, p99 {p99:?}", latencies.len());
    p99
}

#[test]
fn handlers_that_block_their_thread_stall_no_other_request() {
    once_in_five(|| {
        let latencies = latencies_beside("/block");
        let p99 = report("beside 8 handlers that sleep 50 ms", &latencies);
        // On a quiet machine below 2 ms. If the handlers stalled others, 50 ms and more.
        if p99 < 25 * MS { Ok(()) } else { Err(format!("p99 {p99:?}")) }
    });
}

#[test]
fn handlers_that_compute_stall_no_other_request() {
    once_in_five(|| {
        let latencies = latencies_beside("/spin");
        let p99 = report("beside 8 handlers that spin 50 ms", &latencies);
        // Each P divides its time among the handlers in slices of 10 ms. Without preemption, a
        // request would wait for several handlers of 50 ms.
        if p99 < 200 * MS { Ok(()) } else { Err(format!("p99 {p99:?}")) }
    });
}

#[test]
fn clients_that_go_away_leave_nothing_behind() {
    trefoil::run(|| {
        let server = Server::start();
        let requests: [&[u8]; 4] = [
            b"",
            b"GET / HTTP/1.1\r\nHo",
            b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc",
            b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n",
        ];
        for i in 0..80 {
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.write_all(requests[i % requests.len()]).unwrap();
            if i % 3 == 0 {
                trefoil::time::sleep(MS);
            }
        }
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.ends_with("hello"), "{answer}");
        // It waits for all connections, so none is left.
        server.stop();
    });
}

#[test]
fn a_client_that_sends_its_request_too_slowly_is_disconnected() {
    trefoil::run(|| {
        let server = Server::start_with(50 * MS);
        // Before the connection exists: the server may measure from then on.
        let start = Instant::now();
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(b"GET / HT").unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let elapsed = start.elapsed();
        assert!(elapsed >= 50 * MS && elapsed < Duration::from_secs(10), "{elapsed:?}");
        server.stop();
    });
}

/// What a client of HTTP/2 sends first, and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: &[u8] = &[0, 0, 0, 4, 0, 0, 0, 0, 0];

/// Starts a server with a limit for reading a head, and an interval of HTTP/2 pings.
fn start_with_limits(head: Option<Duration>, ping: Option<Duration>) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (ctx, cancel) = Context::background().with_cancel();
    let gate = Arc::<Gate>::default();
    let server = trefoil_hyper::serve(listener, router_with(gate.clone()))
        .header_read_timeout(head)
        .http2_keep_alive(ping, 500 * MS)
        .shutdown_on(&ctx);
    Server { address, gate, cancel, handle: trefoil::go(move || server.run()) }
}

#[test]
fn a_client_that_stops_sending_is_disconnected() {
    let first_bytes: [&[u8]; 8] = [
        b"",
        b"G",
        b"P",
        b"PO",
        b"PRI * HT",
        PREFACE,
        &[PREFACE, SETTINGS].concat(),
        // A HEADERS frame of 16 bytes, of which two come.
        &[PREFACE, SETTINGS, &[0, 0, 16, 1, 4, 0, 0, 0, 1, 0x82, 0x86]].concat(),
    ];
    let first_bytes = first_bytes.map(<[u8]>::to_vec);
    trefoil::run(move || {
        let server = start_with_limits(Some(50 * MS), Some(50 * MS));
        let clients = first_bytes.map(|bytes| {
            let start = Instant::now();
            let mut stream = TcpStream::connect(server.address).unwrap();
            trefoil::go(move || {
                stream.write_all(&bytes).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                let mut answer = Vec::new();
                // A reset is an end, too: the server has not read all.
                let end = stream.read_to_end(&mut answer).map_err(|e| e.kind());
                assert!(
                    matches!(end, Ok(_) | Err(ErrorKind::ConnectionReset)),
                    "{bytes:?} {end:?}"
                );
                assert!(start.elapsed() >= 50 * MS, "{bytes:?} {:?}", start.elapsed());
            })
        });
        clients.into_iter().for_each(|client| client.join().unwrap());
        server.stop();
    });
}

#[test]
fn a_client_of_http1_may_begin_like_http2_and_pause_in_its_body() {
    trefoil::run(|| {
        let server = start_with_limits(Some(2000 * MS), Some(2000 * MS));
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.set_nodelay(true).unwrap();
        let head =
            "POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3\r\n\r\n";
        let (first, rest) = head.as_bytes().split_at(1);
        stream.write_all(first).unwrap();
        trefoil::time::sleep(5 * MS);
        stream.write_all(rest).unwrap();
        // Longer than the limit, which does not concern the body.
        trefoil::time::sleep(2500 * MS);
        stream.write_all(b"abc").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("abc"), "{answer}");
        server.stop();
    });
}

#[test]
fn a_client_that_answers_pings_keeps_its_idle_connection() {
    trefoil::run(|| {
        let server = start_with_limits(Some(Duration::from_secs(30)), Some(50 * MS));
        trefoil::block_on(async {
            let stream = TcpStream::connect_async(server.address).await.unwrap();
            let (mut client, connection) = http2::handshake(TrefoilExecutor, stream).await.unwrap();
            drop(task::spawn(connection));
            sleep_async(500 * MS).await;
            assert_eq!(text(client.send_request(request("/")).await.unwrap()).await, "hello");
        });
        server.stop();
    });
}

#[test]
fn silent_clients_are_kept_without_time_limits_and_end_with_the_server() {
    trefoil::run(|| {
        let server = start_with_limits(None, None);
        for bytes in [&b""[..], b"G", b"PRI * HT"] {
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.write_all(bytes).unwrap();
            stream.set_read_timeout(Some(200 * MS)).unwrap();
            let end = stream.read(&mut [0; 100]).unwrap_err();
            assert_eq!(end.kind(), ErrorKind::TimedOut, "{bytes:?}");
        }
        let silent = TcpStream::connect(server.address).unwrap();
        trefoil::time::sleep(10 * MS);
        server.stop();
        drop(silent);
    });
}

/// A listener for which the process has no descriptors left.
struct Exhausted(Arc<AtomicUsize>);

impl trefoil_hyper::Listener for Exhausted {
    type Stream = TcpStream;

    async fn accept(&self) -> std::io::Result<TcpStream> {
        const EMFILE: i32 = 24;
        self.0.fetch_add(1, Ordering::Relaxed);
        Err(std::io::Error::from_raw_os_error(EMFILE))
    }
}

#[test]
fn shutdown_does_not_wait_for_the_pause_after_a_failed_accept() {
    trefoil::run(|| {
        let attempts = Arc::new(AtomicUsize::new(0));
        let listener = Exhausted(attempts.clone());
        let (ctx, cancel) = Context::background().with_cancel();
        let server =
            trefoil::go(move || trefoil_hyper::serve(listener, router()).shutdown_on(&ctx).run());
        // The pauses double from 5 ms to 1 s, which is the ninth.
        while attempts.load(Ordering::Relaxed) < 9 {
            trefoil::time::sleep(MS);
        }
        let start = Instant::now();
        cancel.cancel();
        server.join().unwrap().unwrap();
        assert!(start.elapsed() < 500 * MS, "{:?}", start.elapsed());
        assert_eq!(attempts.load(Ordering::Relaxed), 9, "no attempt after the stop");
    });
}

#[test]
fn a_client_that_reads_slowly_gets_its_answer_and_delays_no_other() {
    trefoil::run(|| {
        let server = Server::start();
        let mut stream = TcpStream::connect(server.address).unwrap();
        stream.write_all(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        trefoil::block_on(async {
            let mut client = server.connect().await;
            for _ in 0..50 {
                client.ready().await.unwrap();
                assert_eq!(text(client.send_request(request("/")).await.unwrap()).await, "hello");
                let mut bytes = vec![0; 1000];
                stream.read_exact(&mut bytes).unwrap();
            }
        });
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        assert!(rest.len() > (16 << 20) - 50_000 && rest.ends_with(&[7; 100]));
        server.stop();
    });
}

#[test]
fn a_response_may_be_streamed() {
    struct Ticks(u32, trefoil::time::Interval);
    impl hyper::body::Body for Ticks {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            context: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, Self::Error>>> {
            if self.0 == 0 {
                return std::task::Poll::Ready(None);
            }
            std::task::ready!(self.1.poll_tick(context));
            self.0 -= 1;
            let frame = hyper::body::Frame::data(Bytes::from_static(b"tick "));
            std::task::Poll::Ready(Some(Ok(frame)))
        }
    }
    trefoil::run(|| {
        let router = Router::new()
            .route("/", get(|| async { Body::new(Ticks(3, trefoil::time::interval(2 * MS))) }));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (ctx, cancel) = Context::background().with_cancel();
        let server =
            trefoil::go(move || trefoil_hyper::serve(listener, router).shutdown_on(&ctx).run());
        trefoil::block_on(async {
            let stream = TcpStream::connect_async(address).await.unwrap();
            let (mut client, connection) = http1::handshake(stream).await.unwrap();
            drop(task::spawn(connection));
            let answer = text(client.send_request(request("/")).await.unwrap()).await;
            assert_eq!(answer, "tick tick tick ");
        });
        cancel.cancel();
        server.join().unwrap().unwrap();
    });
}
