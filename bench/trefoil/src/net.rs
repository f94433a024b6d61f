//! The network: an echo on loopback, clients and server in this process.

use std::io::{Read, Write};

use bench_common::echo::{Echo, ask, ask_pair, idle_clients, serve, serve_pair};
use bench_common::{Args, Memory, Meter, Report, SETTLE, allow_many_files, conns, size};
use trefoil::time::sleep;
use trefoil::{go, net};

pub fn echo(args: &Args, clients: usize) -> Report {
    let listener = net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    let prompt = |stream: net::TcpStream| {
        stream.set_nodelay(true).unwrap();
        stream
    };
    measure(
        args,
        clients,
        move || prompt(listener.accept().unwrap().0),
        move || prompt(net::TcpStream::connect(address).unwrap()),
    )
}

/// The same by std's sockets.
pub fn echo_std(args: &Args, clients: usize) -> Report {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    let prompt = |stream: std::net::TcpStream| {
        stream.set_nodelay(true).unwrap();
        stream
    };
    measure(
        args,
        clients,
        move || prompt(listener.accept().unwrap().0),
        move || prompt(std::net::TcpStream::connect(address).unwrap()),
    )
}

/// Each pair makes its round trips, then the next round begins.
pub fn echo_pairs(args: &Args, pairs: usize) -> Report {
    with_pairs(pairs, size::PAIRS_TRIPS, |trips| {
        let mut meter = Meter::new(args, size::PAIRS_TRIPS / pairs * pairs);
        while meter.another_round() {
            trips();
        }
        meter.report()
    })
}

/// Calls `f` with connections to an echo: in each call of its argument every client makes as many
/// round trips, `trips` together; it returns how many all have made.
pub fn with_pairs(
    pairs: usize,
    trips: usize,
    f: impl FnOnce(&mut dyn FnMut() -> usize) -> Report,
) -> Report {
    allow_many_files();
    let listener = net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    let connect = |_| {
        let stream = net::TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        let (served, _) = listener.accept().unwrap();
        served.set_nodelay(true).unwrap();
        go(move || serve_pair(served));
        stream
    };
    let mut streams: Vec<_> = (0..pairs).map(connect).collect();
    let trips = trips / pairs;
    f(&mut || {
        let client = |mut stream| {
            go(move || {
                ask_pair(&mut stream, trips);
                stream
            })
        };
        let clients: Vec<_> = streams.drain(..).map(client).collect();
        streams.extend(clients.into_iter().map(|client| client.join().unwrap()));
        trips * pairs
    })
}

/// Connections that wait for their clients.
pub fn idle(args: &Args) -> Report {
    let n = args.number("n", size::IDLE_CONNECTIONS);
    allow_many_files();
    let listener = net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    let before = Memory::now();
    server(move || listener.accept().unwrap().0);
    let clients = idle_clients(address, n);
    sleep(SETTLE);
    let full = Memory::now();
    drop(clients);
    Report::new().with_memory(n, before, full)
}

/// Connections of which few speak.
pub fn mostly_idle(args: &Args) -> Report {
    allow_many_files();
    let listener = net::TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    server(move || listener.accept().unwrap().0);
    let args = args.clone();
    std::thread::spawn(move || conns::ask(&args, address)).join().unwrap()
}

fn server<S: Read + Write + Send + 'static>(accept: impl Fn() -> S + Send + 'static) {
    go(move || {
        loop {
            let stream = accept();
            go(move || serve(stream));
        }
    });
}

fn measure<S: Read + Write + Send + 'static>(
    args: &Args,
    clients: usize,
    accept: impl Fn() -> S + Send + 'static,
    connect: impl Fn() -> S + Copy + Send + 'static,
) -> Report {
    static ECHO: Echo = Echo::new();
    allow_many_files();
    server(accept);
    let clients: Vec<_> = (0..clients).map(|_| go(move || ask(connect(), &ECHO))).collect();
    sleep(size::ECHO_WARM_UP);
    let measuring = ECHO.begin();
    sleep(args.time(size::ECHO_TIME));
    let report = ECHO.end(measuring);
    report(clients.into_iter().flat_map(|client| client.join().unwrap()).collect())
}
