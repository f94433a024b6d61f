//! An HTTP/1.1 server in blocking code: one goroutine per connection.
//!
//! ```sh
//! cargo run --release --example http_server 127.0.0.1:8080
//! curl http://127.0.0.1:8080/ -d 'to be echoed' http://127.0.0.1:8080/echo
//! ```
//! It supports keep-alive, pipelining, bodies with a length or in chunks, and limits for heads,
//! bodies and times. After Ctrl-C it answers open requests, closes idle connections, and ends.

use std::io::{self, ErrorKind, Read, Write};
use std::time::{Duration, Instant};
use trefoil::context::Context;
use trefoil::net::{TcpListener, TcpStream};
use trefoil::signal::{self, SIGINT, SIGTERM};
use trefoil::sync::WaitGroup;
use trefoil::{go, select};

const MAX_HEAD_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;
const MAX_BODY_BYTES: usize = 1 << 20;
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);

struct Request {
    method: String,
    path: String,
    body: Vec<u8>,
    keep_alive: bool,
}

/// Why a request could not be read.
enum Failure {
    /// The request is answered with this status; then the connection is closed.
    Status(&'static str),
    /// The connection is closed or broken.
    Gone,
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            ErrorKind::TimedOut => Failure::Status("408 Request Timeout"),
            _ => Failure::Gone,
        }
    }
}

/// How the head of a request describes its body.
enum Body {
    Length(usize),
    Chunks,
}

struct Answer<'a> {
    status: &'a str,
    body: &'a [u8],
    keep_alive: bool,
    /// The request was HEAD.
    headers_only: bool,
}

struct Connection {
    stream: TcpStream,
    /// Bytes that were received but not parsed yet. They may contain the next requests.
    bytes: Vec<u8>,
}

impl Connection {
    /// Receives more bytes. The end of the stream in the middle of a request is an error.
    fn more(&mut self) -> Result<(), Failure> {
        let mut chunk = [0; 4096];
        match self.stream.read(&mut chunk)? {
            0 => Err(Failure::Gone),
            n => {
                self.bytes.extend_from_slice(&chunk[..n]);
                Ok(())
            }
        }
    }

    fn take(&mut self, n: usize) -> Result<Vec<u8>, Failure> {
        while self.bytes.len() < n {
            self.more()?;
        }
        Ok(self.bytes.drain(..n).collect())
    }

    fn line(&mut self) -> Result<String, Failure> {
        loop {
            if let Some(end) = self.bytes.windows(2).position(|two| two == b"\r\n") {
                let line = self.take(end + 2)?;
                let text =
                    String::from_utf8(line).map_err(|_| Failure::Status("400 Bad Request"))?;
                return Ok(text.trim_end().to_owned());
            }
            if self.bytes.len() > MAX_HEAD_BYTES {
                return Err(Failure::Status("400 Bad Request"));
            }
            self.more()?;
        }
    }

    /// Returns the next request, or `None` if the client has closed the connection or the server
    /// shuts down.
    fn request(&mut self, ctx: &Context) -> Result<Option<Request>, Failure> {
        if self.bytes.is_empty() {
            self.stream.set_read_deadline(Some(Instant::now() + IDLE_TIMEOUT))?;
            // A shutdown closes the connection only before the first byte of a request.
            let _guard = self.stream.cancel_on(ctx);
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) | Err(_) => return Ok(None),
                Ok(n) => self.bytes.extend_from_slice(&chunk[..n]),
            }
        }
        self.stream.set_read_deadline(Some(Instant::now() + REQUEST_TIMEOUT))?;
        let (mut request, body, expects) = self.head()?;
        if expects {
            self.stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        request.body = match body {
            Body::Length(n) => self.take(n)?,
            Body::Chunks => self.chunks()?,
        };
        Ok(Some(request))
    }

    fn head(&mut self) -> Result<(Request, Body, bool), Failure> {
        const BAD: Failure = Failure::Status("400 Bad Request");
        loop {
            let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
            let mut parsed = httparse::Request::new(&mut headers);
            match parsed.parse(&self.bytes) {
                Ok(httparse::Status::Complete(length)) => {
                    let mut keep_alive = parsed.version == Some(1);
                    let (mut body, mut expects) = (Body::Length(0), false);
                    let mut lengths = 0;
                    for header in parsed.headers.iter() {
                        let value = str::from_utf8(header.value).map_err(|_| BAD)?.trim();
                        match header.name.to_ascii_lowercase().as_str() {
                            "connection" if value.eq_ignore_ascii_case("close") => {
                                keep_alive = false
                            }
                            "connection" if value.eq_ignore_ascii_case("keep-alive") => {
                                keep_alive = true;
                            }
                            "content-length" => {
                                body = Body::Length(value.parse().map_err(|_| BAD)?);
                                lengths += 1;
                            }
                            "transfer-encoding" if value.eq_ignore_ascii_case("chunked") => {
                                body = Body::Chunks;
                                lengths += 1;
                            }
                            "transfer-encoding" => {
                                return Err(Failure::Status("501 Not Implemented"));
                            }
                            "expect" => expects = value.eq_ignore_ascii_case("100-continue"),
                            _ => {}
                        }
                    }
                    // A proxy in between may have used the other length.
                    if lengths > 1 {
                        return Err(BAD);
                    }
                    if matches!(body, Body::Length(n) if n > MAX_BODY_BYTES) {
                        return Err(Failure::Status("413 Content Too Large"));
                    }
                    let request = Request {
                        method: parsed.method.unwrap_or_default().to_owned(),
                        path: parsed.path.unwrap_or_default().to_owned(),
                        body: Vec::new(),
                        keep_alive,
                    };
                    self.bytes.drain(..length);
                    return Ok((request, body, expects));
                }
                Ok(httparse::Status::Partial) if self.bytes.len() < MAX_HEAD_BYTES => {
                    self.more()?
                }
                Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                    return Err(Failure::Status("431 Request Header Fields Too Large"));
                }
                Err(_) => return Err(BAD),
            }
        }
    }

    fn chunks(&mut self) -> Result<Vec<u8>, Failure> {
        const BAD: Failure = Failure::Status("400 Bad Request");
        let mut body = Vec::new();
        loop {
            let line = self.line()?;
            let size = line.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(size, 16).map_err(|_| BAD)?;
            if size == 0 {
                // Skips trailers and the empty line.
                while !self.line()?.is_empty() {}
                return Ok(body);
            }
            if size > MAX_BODY_BYTES - body.len() {
                return Err(Failure::Status("413 Content Too Large"));
            }
            body.extend(self.take(size)?);
            if self.take(2)? != b"\r\n" {
                return Err(BAD);
            }
        }
    }

    fn send(&mut self, answer: &Answer<'_>) -> io::Result<()> {
        let Answer { status, body, keep_alive, headers_only } = *answer;
        let connection = if keep_alive { "keep-alive" } else { "close" };
        let mut bytes = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: {connection}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        if !headers_only {
            bytes.extend_from_slice(body);
        }
        self.stream.set_write_deadline(Some(Instant::now() + REQUEST_TIMEOUT))?;
        self.stream.write_all(&bytes)
    }

    /// Sends an answer whose length is not known at its start.
    fn stream_lines(&mut self, keep_alive: bool) -> io::Result<()> {
        let connection = if keep_alive { "keep-alive" } else { "close" };
        self.stream.set_write_deadline(Some(Instant::now() + REQUEST_TIMEOUT))?;
        write!(
            self.stream,
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: {connection}\r\n\r\n"
        )?;
        for i in 0..10 {
            let line = format!("line {i}\n");
            write!(self.stream, "{:x}\r\n{line}\r\n", line.len())?;
            trefoil::time::sleep(Duration::from_millis(1));
        }
        self.stream.write_all(b"0\r\n\r\n")
    }
}

fn serve(stream: TcpStream, ctx: &Context) {
    let mut connection = Connection { stream, bytes: Vec::new() };
    loop {
        let request = match connection.request(ctx) {
            Ok(Some(request)) => request,
            Ok(None) | Err(Failure::Gone) => return,
            Err(Failure::Status(status)) => {
                let body = status.as_bytes();
                let _ = connection.send(&Answer {
                    status,
                    body,
                    keep_alive: false,
                    headers_only: false,
                });
                // Closing with unread bytes would reset the connection before the client has the
                // answer: read the rest for at most a second.
                let _ = connection.stream.shutdown(std::net::Shutdown::Write);
                let until = Instant::now() + Duration::from_secs(1);
                let _ = connection.stream.set_read_deadline(Some(until));
                let _ = io::copy(&mut connection.stream, &mut io::sink());
                return;
            }
        };
        let keep_alive = request.keep_alive && ctx.err().is_none();
        let headers_only = request.method == "HEAD";
        let answer = |status, body| Answer { status, body, keep_alive, headers_only };
        let sent = match (request.method.as_str(), request.path.as_str()) {
            ("GET" | "HEAD", "/") => {
                connection.send(&answer("200 OK", b"hello from a goroutine\n"))
            }
            ("POST" | "PUT", "/echo") => connection.send(&answer("200 OK", &request.body)),
            ("GET", "/stream") => connection.stream_lines(keep_alive),
            ("GET", "/slow") => {
                trefoil::time::sleep(Duration::from_millis(300));
                connection.send(&answer("200 OK", b"a slow answer\n"))
            }
            (_, "/" | "/echo" | "/stream" | "/slow") => {
                connection.send(&answer("405 Method Not Allowed", b"method not allowed\n"))
            }
            _ => connection.send(&answer("404 Not Found", b"not found\n")),
        };
        if sent.is_err() || !keep_alive {
            return;
        }
    }
}

#[trefoil::main]
fn main() -> io::Result<()> {
    let addr = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8080".into());
    let signals = signal::notify(&[SIGINT, SIGTERM])?;
    let listener = TcpListener::bind(addr)?;
    println!("listening on {}", listener.local_addr()?);
    let (ctx, cancel) = Context::background().with_cancel();
    let open = WaitGroup::new();
    let accepting = {
        let (ctx, open) = (ctx.clone(), open.clone());
        go(move || {
            let _guard = listener.cancel_on(&ctx);
            while ctx.err().is_none() {
                match listener.accept() {
                    Ok((stream, _)) => {
                        let _ = stream.set_nodelay(true);
                        let ctx = ctx.clone();
                        open.go(move || serve(stream, &ctx));
                    }
                    // Out of descriptors, for example: connections that end make room.
                    Err(_) => trefoil::time::sleep(Duration::from_millis(5)),
                }
            }
        })
    };
    let _ = signals.recv();
    println!("shutting down");
    cancel.cancel();
    let _ = accepting.join();
    let (done, all) = trefoil::chan::bounded(1);
    go(move || {
        open.wait();
        let _ = done.send(());
    });
    select! {
        recv(all) -> _ => println!("all done"),
        recv(signals) -> _ => println!("stopped without waiting"),
        after(SHUTDOWN_TIMEOUT) => println!("some requests took too long"),
    }
    Ok(())
}
