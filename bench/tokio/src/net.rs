//! The network: an echo on loopback, clients and server in this process.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bench_common::echo::{Echo, idle_clients};
use bench_common::{Args, Memory, Meter, Report, SETTLE, allow_many_files, conns, size};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{spawn, spawn_blocking};
use tokio::time::sleep;

pub async fn echo(args: &Args, clients: usize) -> Report {
    static ECHO: Echo = Echo::new();
    allow_many_files();
    let address = server().await;
    let clients: Vec<_> = (0..clients).map(|_| spawn(ask(address, &ECHO))).collect();
    sleep(size::ECHO_WARM_UP).await;
    let measuring = ECHO.begin();
    sleep(args.time(size::ECHO_TIME)).await;
    let report = ECHO.end(measuring);
    let mut took = Vec::new();
    for client in clients {
        took.extend(client.await.unwrap());
    }
    report(took)
}

/// Each pair makes its round trips, then the next round begins.
pub async fn echo_pairs(args: &Args, pairs: usize) -> Report {
    allow_many_files();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().unwrap();
    let mut streams = Vec::with_capacity(pairs);
    for _ in 0..pairs {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (served, _) = listener.accept().await.unwrap();
        served.set_nodelay(true).unwrap();
        spawn(serve_pair(served));
        streams.push(stream);
    }
    let trips = size::PAIRS_TRIPS / pairs;
    let mut meter = Meter::new(args, trips * pairs);
    while meter.another_round() {
        let clients: Vec<_> =
            streams.drain(..).map(|stream| spawn(ask_pair(stream, trips))).collect();
        for client in clients {
            streams.push(client.await.unwrap());
        }
    }
    meter.report()
}

async fn serve_pair(mut stream: TcpStream) {
    let mut bytes = [0; size::PAIRS_BUFFER_BYTES];
    while let Ok(n @ 1..) = stream.read(&mut bytes).await {
        stream.write_all(&bytes[..n]).await.unwrap();
    }
}

async fn ask_pair(mut stream: TcpStream, trips: usize) -> TcpStream {
    for _ in 0..trips {
        let mut message = [1; size::ECHO_BYTES];
        stream.write_all(&message).await.unwrap();
        message.fill(0);
        stream.read_exact(&mut message).await.unwrap();
        assert_eq!(message, [1; size::ECHO_BYTES]);
    }
    stream
}

/// Connections of which few speak.
pub async fn mostly_idle(args: &Args) -> Report {
    allow_many_files();
    let address = server().await;
    let args = args.clone();
    spawn_blocking(move || conns::ask(&args, address)).await.unwrap()
}

/// Connections that wait for their clients.
pub async fn idle(args: &Args) -> Report {
    let n = args.number("n", size::IDLE_CONNECTIONS);
    allow_many_files();
    let before = Memory::now();
    let address = server().await;
    let clients = spawn_blocking(move || idle_clients(address, n)).await.unwrap();
    sleep(SETTLE).await;
    let full = Memory::now();
    drop(clients);
    Report::new().with_memory(n, before, full)
}

async fn server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().unwrap();
    spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            spawn(serve(stream));
        }
    });
    address
}

async fn serve(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut message = [0; size::ECHO_BYTES];
    while stream.read_exact(&mut message).await.is_ok() {
        stream.write_all(&message).await.unwrap();
    }
}

async fn ask(address: SocketAddr, echo: &Echo) -> Vec<Duration> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut message = [0; size::ECHO_BYTES];
    let mut took = Vec::new();
    while let Some(counts) = echo.counts() {
        let start = Instant::now();
        stream.write_all(&message).await.unwrap();
        stream.read_exact(&mut message).await.unwrap();
        if counts {
            took.push(start.elapsed());
        }
    }
    took
}
