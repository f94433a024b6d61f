//! Blocking code on sockets, one goroutine at each end of every connection.

use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::Instant;

use trefoil::sync::{Semaphore, WaitGroup};

use super::{at_rest, join, promise_few_threads, wait_until};
use crate::proc;
use crate::report::{Report, each, grouped};

/// Connections that are opened at a time: a listener's queue is short.
const OPENING: usize = 64;

/// Some connections through `std::net`.
pub(crate) fn network(report: &Report) -> Result<(), String> {
    let plan = Plan { connections: 400.min(affordable()?), rounds: 50 };
    plan.announce(report, "std::net");
    let played = trefoil::run(|| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        trefoil::go(move || serve(|| Ok(listener.accept()?.0)));
        plan.play(report, move || std::net::TcpStream::connect(address))
    });
    played.map_err(|e| e.to_string())
}

/// As many as the descriptors allow, up to ten thousand, through `trefoil::net`.
pub(crate) fn connections(report: &Report) -> Result<(), String> {
    const WANTED: u64 = 10_000;
    let affordable = affordable()?;
    let plan = Plan { connections: WANTED.min(affordable), rounds: 3 };
    plan.announce(report, "trefoil::net");
    if affordable < WANTED {
        report.fact("descriptors are short", format_args!("{} are wanted", grouped(WANTED)));
    }
    let played = trefoil::run(|| {
        let listener = trefoil::net::TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        trefoil::go(move || serve(|| Ok(listener.accept()?.0)));
        plan.play(report, move || trefoil::net::TcpStream::connect(address))
    });
    played.map_err(|e| e.to_string())
}

/// Returns how many connections the limit of open descriptors allows: two each, and some for the
/// rest.
fn affordable() -> Result<u64, String> {
    const REST: u64 = 200;
    let files = proc::allow_files();
    match files.saturating_sub(REST) / 2 {
        0 => Err(format!("only {files} descriptors may be open: ulimit -n {} is needed", REST + 2)),
        n => Ok(n),
    }
}

/// Echoes on every connection.
fn serve<S: Read + Write + Send + 'static>(accept: impl Fn() -> io::Result<S>) {
    while let Ok(mut stream) = accept() {
        trefoil::go(move || {
            let mut bytes = [0; 8];
            while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok() {}
        });
    }
}

/// Returns whether the answer equals what was sent.
fn round_trip(stream: &mut (impl Read + Write), number: u64) -> io::Result<bool> {
    let mut bytes = number.to_ne_bytes();
    stream.write_all(&bytes)?;
    stream.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes) == number)
}

#[derive(Clone, Copy)]
struct Plan {
    connections: u64,
    rounds: u64,
}

impl Plan {
    fn announce(self, report: &Report, through: &str) {
        report.part(format_args!(
            "{} connections through {through} on loopback, a goroutine at each end, {} round trips each",
            grouped(self.connections),
            self.rounds
        ));
    }

    /// Opens all connections, measures while they are idle, and then uses them.
    fn play<S, C>(self, report: &Report, connect: C) -> io::Result<()>
    where
        S: Read + Write + Send + 'static,
        C: Fn() -> io::Result<S> + Send + Sync + 'static,
    {
        let start = Instant::now();
        let (connect, opening) = (Arc::new(connect), Arc::new(Semaphore::new(OPENING)));
        let (opened, start_use) = (Arc::new(WaitGroup::new()), Arc::new(WaitGroup::new()));
        opened.add(self.connections as usize);
        start_use.add(1);
        let clients: Vec<_> = (0..self.connections)
            .map(|i| {
                let (connect, opening) = (connect.clone(), opening.clone());
                let (opened, start_use) = (opened.clone(), start_use.clone());
                trefoil::go(move || -> io::Result<u64> {
                    // A connection counts as open after one answer: the kernel connects before the
                    // server accepts.
                    let answered = || -> io::Result<S> {
                        let _turn = opening.acquire();
                        let mut stream = connect()?;
                        round_trip(&mut stream, i)?;
                        Ok(stream)
                    };
                    let stream = answered();
                    opened.done();
                    let mut stream = stream?;
                    start_use.wait();
                    let mut right = 0;
                    for round in 0..self.rounds {
                        right += u64::from(round_trip(&mut stream, i << 8 | round)?);
                    }
                    Ok(right)
                })
            })
            .collect();
        opened.wait();
        let time = start.elapsed();
        report.fact("all open after", format_args!("{time:.2?}, {}", each(time, self.connections)));

        // Every client waits for `start_use`, every server for its client.
        let (stats, threads) = (at_rest(), proc::status().threads);
        report.fact("goroutines", grouped(stats.goroutines as u64));
        let open = stats.io_waiters.saturating_sub(1) as u64; // The listener waits as well.
        let n = self.connections;
        report.promise("open at once", grouped(open), grouped(n), open == n);
        promise_few_threads(report, threads, trefoil::procs());

        let start = Instant::now();
        start_use.done();
        let mut right = 0;
        for client in clients {
            right += join(client)?;
        }
        let (time, all) = (start.elapsed(), n * self.rounds);
        report.fact("used", format_args!("{time:.2?}, {}", each(time, all)));
        report.promise("right answers", grouped(right), grouped(all), right == all);
        // Servers end with their clients. A server that outlives the runtime would keep its
        // descriptor.
        wait_until(|| trefoil::num_goroutines() <= 2);
        let left = trefoil::num_goroutines().saturating_sub(2);
        report.promise("servers left over", left, 0, left == 0);
        Ok(())
    }
}
