//! HTTP/1.1 in plain, blocking code: a goroutine for each connection.

use std::io::{self, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bench_common::clock::Hogs;
use bench_common::http::{Load, ask, body};
use bench_common::{Args, Report, size};
use trefoil::go;
use trefoil::net::{TcpListener, TcpStream};
use trefoil::time::sleep;

pub fn hello(args: &Args, connections: usize) -> Report {
    let address = listen(args, None);
    let args = args.clone();
    std::thread::spawn(move || ask(&args, address, connections)).join().unwrap()
}

/// Calls `f` under a load: its argument returns how many requests were answered in a short time.
pub fn with_wrk(
    args: &Args,
    connections: usize,
    f: impl FnOnce(&mut dyn FnMut() -> usize) -> Report,
) -> Report {
    static ANSWERED: AtomicUsize = AtomicUsize::new(0);
    let address = listen(args, Some(&ANSWERED));
    let _load = Load::new(address, connections);
    let mut before = 0;
    f(&mut || {
        sleep(size::HTTP_MOMENT);
        let answered = ANSWERED.load(Ordering::Relaxed);
        answered - std::mem::replace(&mut before, answered)
    })
}

/// Starts a server, which counts its answers if it is told where. Returns its address.
fn listen(args: &Args, answered: Option<&'static AtomicUsize>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    let body = body(args);
    go(move || {
        loop {
            let (stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            go(move || serve(stream, body, answered));
        }
    });
    address
}

pub fn hello_hogs(args: &Args, connections: usize) -> Report {
    let hogs: Arc<Hogs> = Arc::default();
    let handles: [_; size::HTTP_HOGS] = std::array::from_fn(|hog| {
        let hogs = hogs.clone();
        go(move || hogs.compute(hog))
    });
    let report = hello(args, connections);
    hogs.stop();
    for handle in handles {
        handle.join().unwrap();
    }
    report
}

/// Answers until the client leaves or asks for the last time.
fn serve(mut stream: TcpStream, body: &str, answered: Option<&AtomicUsize>) {
    let mut bytes = [0; 4096];
    let mut filled = 0;
    let mut last = false;
    while !last {
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(&bytes[..filled]).expect("HTTP") {
            httparse::Status::Complete(length) => {
                assert_eq!((request.method, request.path), (Some("GET"), Some("/")));
                last = request.headers.iter().any(is_close);
                bytes.copy_within(length..filled, 0);
                filled -= length;
                if answer(&mut stream, body).is_err() {
                    return;
                }
                if let Some(answered) = answered {
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            }
            httparse::Status::Partial => match stream.read(&mut bytes[filled..]) {
                Ok(0) | Err(_) => return,
                Ok(more) => filled += more,
            },
        }
    }
}

fn is_close(header: &httparse::Header) -> bool {
    header.name.eq_ignore_ascii_case("connection") && header.value.eq_ignore_ascii_case(b"close")
}

/// Bodies up to this are copied behind the head; larger ones are sent from where they are.
const COPIED_BYTES: usize = 4_096;

fn answer(stream: &mut TcpStream, body: &str) -> io::Result<()> {
    let length = body.len();
    let copied = if length <= COPIED_BYTES { body } else { "" };
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n\r\n{copied}"
    );
    if length <= COPIED_BYTES {
        return stream.write_all(head.as_bytes());
    }
    let sent =
        stream.write_vectored(&[IoSlice::new(head.as_bytes()), IoSlice::new(body.as_bytes())])?;
    match sent.checked_sub(head.len()) {
        Some(sent) => stream.write_all(&body.as_bytes()[sent..]),
        None => {
            stream.write_all(&head.as_bytes()[sent..])?;
            stream.write_all(body.as_bytes())
        }
    }
}
