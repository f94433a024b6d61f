//! HTTP under `wrk`, a load generator that reports rates and latencies.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Args, Report, cpu_time, size};

/// The time of a [`Load`] that nobody has dropped.
const LONG: Duration = Duration::from_secs(600);

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

/// A load on a server, until it is dropped.
pub struct Load(Child);

impl Load {
    pub fn new(address: SocketAddr, connections: usize) -> Load {
        let child = wrk_command(address, connections, LONG).stdout(Stdio::null()).spawn();
        Load(child.expect("wrk"))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.kill().expect("wrk runs");
        self.0.wait().expect("wrk ends");
    }
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
    let done = wrk_command(address, connections, time).output().expect("wrk");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).expect("wrk prints UTF-8")
}

fn wrk_command(address: SocketAddr, connections: usize, time: Duration) -> Command {
    // wrk takes whole seconds.
    let seconds = time.as_secs().max(1);
    let threads = format!("-t{}", size::HTTP_THREADS);
    let mut command = Command::new("wrk");
    command
        .args(["--latency", &threads, &format!("-c{connections}"), &format!("-d{seconds}")])
        .arg(format!("http://{address}/"));
    command
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
