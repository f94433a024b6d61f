//! HTTP/1.1 in plain, blocking code: a goroutine for each connection.

use std::io::{Read, Write};
use std::sync::Arc;

use bench_common::clock::Hogs;
use bench_common::http::{HELLO, ask};
use bench_common::{Args, Report, size};
use trefoil::go;
use trefoil::net::{TcpListener, TcpStream};

pub fn hello(args: &Args, connections: usize) -> Report {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    go(move || {
        loop {
            let (stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            go(move || serve(stream));
        }
    });
    let args = args.clone();
    std::thread::spawn(move || ask(&args, address, connections)).join().unwrap()
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
fn serve(mut stream: TcpStream) {
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
                if stream.write_all(answer().as_bytes()).is_err() {
                    return;
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

fn answer() -> String {
    let length = HELLO.len();
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n\r\n{HELLO}"
    )
}
