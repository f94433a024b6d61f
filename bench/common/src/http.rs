//! HTTP under `wrk`, a load generator that reports rates and latencies.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::{Args, Report, cpu_time, size};

/// What the servers answer: `hello`, or as many bytes as `body=` says.
pub fn body(args: &Args) -> &'static str {
    match args.number("body", 0) {
        0 => "hello",
        bytes => "x".repeat(bytes).leak(),
    }
}

/// Loads the server at `address` for as long as the arguments say. Blocks its thread, so it needs
/// one of its own.
pub fn ask(args: &Args, address: SocketAddr, connections: usize) -> Report {
    check(address, body(args));
    wrk(address, connections, size::HTTP_WARM_UP);
    let (wall, cpu) = (Instant::now(), cpu_time());
    let said = wrk(address, connections, args.time(size::HTTP_TIME));
    let cores = (cpu_time() - cpu).as_secs_f64() / wall.elapsed().as_secs_f64();
    report(&said).expect(&said).with("cores", cores)
}

/// Loads the server at `address` for a second. Returns how many requests it has answered.
pub fn ask_for_a_second(address: SocketAddr, connections: usize) -> usize {
    let said = wrk(address, connections, Duration::from_secs(1));
    let line = said.lines().find(|line| line.contains(" requests in "));
    let count = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    count.expect(&said)
}

fn check(address: SocketAddr, body: &str) {
    let mut stream = TcpStream::connect(address).expect("the server");
    let head = "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (head, rest) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && rest == body, "{answer}");
}

fn wrk(address: SocketAddr, connections: usize, time: Duration) -> String {
    // wrk takes whole seconds.
    let seconds = time.as_secs().max(1);
    let threads = format!("-t{}", size::HTTP_THREADS);
    let done = Command::new("wrk")
        .args(["--latency", &threads, &format!("-c{connections}"), &format!("-d{seconds}")])
        .arg(format!("http://{address}/"))
        .output()
        .expect("wrk");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("wrk prints UTF-8")
}

/// Reads wrk's figures; none where they are missing or requests failed.
fn report(said: &str) -> Option<Report> {
    let word = |label: &str| {
        let line = said.lines().find_map(|line| line.trim().strip_prefix(label))?;
        line.split_whitespace().next()
    };
    if word("Socket errors:").or(word("Non-2xx or 3xx responses:")).is_some() {
        return None;
    }
    Some(
        Report::new()
            .with("per_s", word("Requests/sec:")?.parse().ok()?)
            .with("p50_us", micros(word("50%")?)?)
            .with("p99_us", micros(word("99%")?)?),
    )
}

/// `1.23ms` and the like.
fn micros(text: &str) -> Option<f64> {
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    let (number, unit) =
        units.iter().find_map(|(name, us)| Some((text.strip_suffix(name)?, us)))?;
    Some(number.parse::<f64>().ok()? * unit)
}
