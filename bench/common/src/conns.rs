//! `conns_idle_10k`: many connections of which few speak. The client is a process of its own, so
//! that the CPU time and the open files of a worker are its server's alone. It is the same program
//! for all runtimes: the one that `BENCH_CLIENT` names, or else the worker itself, which answers
//! to `conns_client` before it starts its runtime.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio, exit};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use crate::clock::CpuShare;
use crate::echo::{idle_clients, round_trip};
use crate::{Args, Report, SETTLE, allow_many_files, random, size};

const CLIENT: &str = "conns_client";

/// What the client says when all connections have been used once, and what it waits for then.
const READY: &str = "ready";
const BEGIN: &str = "begin";

/// Asks the echo at `address` from a client process. Blocks its thread, so it needs one of its own.
pub fn ask(args: &Args, address: SocketAddr) -> Report {
    let program = env::var_os("BENCH_CLIENT").map_or_else(env::current_exe, |path| Ok(path.into()));
    let mut client = Command::new(program.expect("the client's program"))
        .arg(CLIENT)
        .arg(format!("port={}", address.port()))
        .arg(format!("n={}", args.number("n", size::MOSTLY_IDLE_CONNECTIONS)))
        .arg(format!("ms={}", args.time(size::MOSTLY_IDLE_TIME).as_millis()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a client");
    let mut said = BufReader::new(client.stdout.take().expect("its output")).lines();
    let mut line = || said.next().expect("the client ended early").expect("a line of the client");
    assert_eq!(line(), READY);
    std::thread::sleep(SETTLE);
    let share = CpuShare::new();
    writeln!(client.stdin.take().expect("its input"), "{BEGIN}").expect("it reads");
    let report = line();
    let server = share.report();
    assert!(client.wait().expect("the client's end").success());
    let metrics: Map<String, Value> = serde_json::from_str(&report).expect("a report");
    server.with_all(Report(metrics))
}

/// Where this process was started as the client: runs it and ends the process.
pub fn run_client_if_asked() {
    let mut words = env::args().skip(1);
    if words.next().as_deref() == Some(CLIENT) {
        client(&Args::of(CLIENT.to_owned(), words)).print();
        exit(0);
    }
}

/// Requests on random connections, at random times, one at a time; how long each took.
fn client(args: &Args) -> Report {
    allow_many_files();
    let port = args.number("port", 0).try_into().expect("a port");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut streams = idle_clients(address, args.number("n", size::MOSTLY_IDLE_CONNECTIONS));
    for stream in &streams {
        stream.set_nodelay(true).expect("no delay");
    }
    println!("{READY}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the worker's word");
    assert_eq!(line.trim(), BEGIN);

    let start = Instant::now();
    let requests = args.time(size::MOSTLY_IDLE_TIME).div_duration_f64(size::REQUEST_GAP) as u32;
    let took = (0..requests).map(|i| {
        let [when, which] = [0, 1].map(|k| random(2 * u64::from(i) + k));
        let within_gap = Duration::from_nanos(when % size::REQUEST_GAP.as_nanos() as u64);
        let due = start + size::REQUEST_GAP * i + within_gap;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let stream = which as usize % streams.len();
        let asked = Instant::now();
        round_trip(&mut streams[stream]);
        asked.elapsed()
    });
    let took = took.collect();
    Report::new().with_lateness(took)
}
