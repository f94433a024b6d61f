//! An echo: what its clients and its server do, and when their time counts.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use crate::{Report, cpu_time, size};

/// The phase of a run: the clients warm up, are measured, end.
pub struct Echo(AtomicU8);

const WARMING_UP: u8 = 0;
const MEASURING: u8 = 1;
const ENDING: u8 = 2;

/// Since when the clients are measured.
pub struct Measuring {
    wall: Instant,
    cpu: Duration,
}

impl Echo {
    #[expect(clippy::new_without_default, reason = "for a static")]
    pub const fn new() -> Echo {
        Echo(AtomicU8::new(WARMING_UP))
    }

    /// Returns whether the next request's time counts; None once the run is over.
    pub fn counts(&self) -> Option<bool> {
        match self.0.load(Ordering::Relaxed) {
            ENDING => None,
            phase => Some(phase == MEASURING),
        }
    }

    pub fn begin(&self) -> Measuring {
        self.0.store(MEASURING, Ordering::Relaxed);
        Measuring { wall: Instant::now(), cpu: cpu_time() }
    }

    /// Returns what makes a report of the times that all clients have measured.
    pub fn end(&self, since: Measuring) -> impl FnOnce(Vec<Duration>) -> Report + use<> {
        self.0.store(ENDING, Ordering::Relaxed);
        let (wall, cpu) = (since.wall.elapsed().as_secs_f64(), cpu_time() - since.cpu);
        move |took| {
            Report::new()
                .with("per_s", took.len() as f64 / wall)
                .with("cores", cpu.as_secs_f64() / wall)
                .with_lateness(took)
        }
    }
}

/// One connection of the server, in runtimes where any call may wait.
pub fn serve(mut stream: impl Read + Write) {
    let mut message = [0; size::ECHO_BYTES];
    while stream.read_exact(&mut message).is_ok() {
        stream.write_all(&message).unwrap();
    }
}

/// Runs one client there; returns how long each of its requests took.
pub fn ask(mut stream: impl Read + Write, echo: &Echo) -> Vec<Duration> {
    let mut message = [0; size::ECHO_BYTES];
    let mut took = Vec::new();
    while let Some(counts) = echo.counts() {
        let start = Instant::now();
        stream.write_all(&message).unwrap();
        stream.read_exact(&mut message).unwrap();
        if counts {
            took.push(start.elapsed());
        }
    }
    took
}

/// One connection of the server of `echo_*_pairs`: echoes as much as has come.
pub fn serve_pair(mut stream: impl Read + Write) {
    let mut bytes = [0; size::PAIRS_BUFFER_BYTES];
    while let Ok(n @ 1..) = stream.read(&mut bytes) {
        stream.write_all(&bytes[..n]).unwrap();
    }
}

/// One client there.
pub fn ask_pair(stream: &mut (impl Read + Write), trips: usize) {
    for _ in 0..trips {
        round_trip(stream);
    }
}

/// Sends a message, and checks what comes back.
pub fn round_trip(stream: &mut (impl Read + Write)) {
    let mut message = [1; size::ECHO_BYTES];
    stream.write_all(&message).unwrap();
    message.fill(0);
    stream.read_exact(&mut message).unwrap();
    assert_eq!(message, [1; size::ECHO_BYTES]);
}

/// Clients for `idle_conns`: plain sockets, each used once, from a thread of their own, so that
/// only the server's side weighs on the runtime.
pub fn idle_clients(address: SocketAddr, n: usize) -> Vec<TcpStream> {
    let client = move |_| {
        let mut stream = TcpStream::connect(address).unwrap();
        round_trip(&mut stream);
        stream
    };
    std::thread::spawn(move || (0..n).map(client).collect()).join().unwrap()
}
