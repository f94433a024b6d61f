//! The network: an echo on loopback, clients and server in this process.

use std::io::{Read, Write};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Instant;

use bench_common::{Args, Report, allow_many_files, cpu_time, size};
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

const MEASURING: u8 = 1;
const ENDING: u8 = 2;

fn measure<S: Read + Write + Send + 'static>(
    args: &Args,
    clients: usize,
    accept: impl Fn() -> S + Send + 'static,
    connect: impl Fn() -> S + Copy + Send + 'static,
) -> Report {
    static PHASE: AtomicU8 = AtomicU8::new(0);
    allow_many_files();
    go(move || {
        loop {
            let mut stream = accept();
            go(move || {
                let mut bytes = [0; size::ECHO_BYTES];
                while stream.read_exact(&mut bytes).is_ok() {
                    stream.write_all(&bytes).unwrap();
                }
            });
        }
    });
    let client = move || {
        let mut stream = connect();
        let mut bytes = [0; size::ECHO_BYTES];
        let mut took = Vec::new();
        loop {
            let phase = PHASE.load(Ordering::Relaxed);
            if phase == ENDING {
                return took;
            }
            let start = Instant::now();
            stream.write_all(&bytes).unwrap();
            stream.read_exact(&mut bytes).unwrap();
            if phase == MEASURING {
                took.push(start.elapsed());
            }
        }
    };
    let clients: Vec<_> = (0..clients).map(|_| go(client)).collect();
    sleep(size::ECHO_WARM_UP);
    PHASE.store(MEASURING, Ordering::Relaxed);
    let (start, cpu) = (Instant::now(), cpu_time());
    sleep(args.time(size::ECHO_TIME));
    PHASE.store(ENDING, Ordering::Relaxed);
    let (wall, cpu) = (start.elapsed().as_secs_f64(), cpu_time() - cpu);
    let took: Vec<_> = clients.into_iter().flat_map(|client| client.join().unwrap()).collect();
    Report::new()
        .with("per_s", took.len() as f64 / wall)
        .with("cores", cpu.as_secs_f64() / wall)
        .with_lateness(took)
}
