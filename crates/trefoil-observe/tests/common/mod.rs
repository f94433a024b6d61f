//! What the tests share: a client by raw sockets, and readers of JSON and of OpenMetrics that
//! accept nothing but the standard.

#![allow(dead_code, reason = "no test needs all of it")]

pub(crate) mod json;
pub(crate) mod openmetrics;
pub(crate) mod pprof;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trefoil_observe::{Server, ServerBuilder};

/// How long a test waits for what must happen.
pub(crate) const LONG: Duration = Duration::from_secs(60);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Tests run one after the other: each has the only runtime of the program.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `f` in a program that has a server with these settings.
pub(crate) fn with_server(settings: ServerBuilder, f: impl FnOnce(SocketAddr) + Send) {
    let _alone = alone();
    trefoil::run(|| {
        let server = settings.address("127.0.0.1:0").start().unwrap();
        f(server.local_addr().unwrap());
        server.stop();
    });
}

pub(crate) fn settings() -> ServerBuilder {
    Server::builder()
}

/// An answer, as it was received.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name));
        found.next().map(|(_, value)| value.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

/// Opens a connection.
pub(crate) fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

/// Sends a GET request, and returns the answer.
pub(crate) fn get(address: SocketAddr, target: &str) -> Answer {
    ask(address, &format!("GET {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"))
}

/// Sends `request` on a new connection, and returns the answer.
pub(crate) fn ask(address: SocketAddr, request: &str) -> Answer {
    let mut stream = connect(address);
    stream.write_all(request.as_bytes()).unwrap();
    let body = if request.starts_with("HEAD") { WithBody::No } else { WithBody::Yes };
    read_answer(&mut stream, body).expect("an answer")
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WithBody {
    Yes,
    No,
}

/// Reads one answer. None if the connection was closed before it.
pub(crate) fn read_answer(stream: &mut impl Read, with_body: WithBody) -> Option<Answer> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            _ if head.is_empty() => return None,
            other => panic!("{other:?} after {:?}", String::from_utf8_lossy(&head)),
        }
    }
    let head = String::from_utf8(head).unwrap();
    let mut lines = head.trim_end().split("\r\n");
    let status = lines.next().unwrap().strip_prefix("HTTP/1.1 ").unwrap();
    let status = status.split(' ').next().unwrap().parse().unwrap();
    let headers: Vec<(String, String)> = lines
        .map(|line| line.split_once(": ").unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let mut answer = Answer { status, headers, body: Vec::new() };
    let len = answer.header("content-length").unwrap().parse().unwrap();
    if with_body == WithBody::Yes {
        answer.body = vec![0; len];
        stream.read_exact(&mut answer.body).unwrap();
    }
    Some(answer)
}

/// Waits until `f` returns something.
pub(crate) fn until<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = f() {
            return found;
        }
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
