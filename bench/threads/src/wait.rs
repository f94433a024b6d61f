//! The clock, and connections of which few speak.

use std::net::TcpListener;
use std::thread::{Builder, sleep, spawn};
use std::time::Instant;

use bench_common::clock::{CpuShare, Tickers, short_time};
use bench_common::echo::serve;
use bench_common::{Args, Report, allow_many_files, conns, cpu_time, size};

/// Enough for `serve`, where threads are many.
const STACK_BYTES: usize = 64 << 10;

pub fn sleep_short(args: &Args) -> Report {
    let cpu = cpu_time();
    let sleeper = |i| {
        spawn(move || {
            let sleep_once = |k| {
                let duration = short_time(i, k);
                let start = Instant::now();
                sleep(duration);
                start.elapsed() - duration
            };
            (0..size::SHORT_SLEEPS_EACH).map(sleep_once).collect::<Vec<_>>()
        })
    };
    let handles: Vec<_> = (0..args.number("n", size::SLEEPERS)).map(sleeper).collect();
    let late = handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect();
    Report::new().with("cpu_s", (cpu_time() - cpu).as_secs_f64()).with_lateness(late)
}

pub fn tickers(args: &Args) -> Report {
    let tickers = Tickers::new(args);
    let ticking = |i| {
        spawn(move || {
            sleep_until(tickers.phase(i));
            let mut log = tickers.log();
            while let Some(next) = log.next() {
                sleep_until(next);
                log.woke();
            }
            log.late()
        })
    };
    let handles: Vec<_> = (0..args.number("n", size::TICKERS)).map(ticking).collect();
    let (begin, end) = tickers.counted();
    sleep_until(begin);
    let share = CpuShare::new();
    sleep_until(end);
    let report = share.report();
    report.with_lateness(handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect())
}

fn sleep_until(when: Instant) {
    sleep(when.saturating_duration_since(Instant::now()));
}

pub fn mostly_idle(args: &Args) -> Report {
    allow_many_files();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    spawn(move || {
        loop {
            let (stream, _) = listener.accept().unwrap();
            let thread = Builder::new().stack_size(STACK_BYTES);
            thread.spawn(move || serve(stream)).expect("a thread");
        }
    });
    conns::ask(args, address)
}
