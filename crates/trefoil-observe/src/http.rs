//! As much of HTTP/1.1 as a browser, `curl`, Prometheus and `go tool pprof` need: requests without
//! a body, answers with a length, connections that stay open.
//!
//! A request has limits on its size and time ([`Limits`]), so that a client that sends garbage,
//! sends slowly or does not read costs the goroutine of its connection, for a bounded time, and
//! nothing else. Answers that may be large are made only a few at a time (`large_answer.rs`), and a
//! connection that waits may be closed in favour of a new one (`connection.rs`).

use crate::connection::{Connection, Phase};
use crate::large_answer::Permit;
use std::cell::OnceCell;
use std::io;
use std::time::{Duration, Instant};

/// The bounds of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of a request: its first line and its headers.
    pub(crate) request_bytes: usize,
    /// From the first byte of a request to its last.
    pub(crate) request_time: Duration,
    /// For a connection on which no request has begun.
    pub(crate) idle_time: Duration,
    /// For the answer to be read by the client.
    pub(crate) response_time: Duration,
    /// Connections that are open at the same time.
    pub(crate) connections: usize,
}

impl Limits {
    pub(crate) const DEFAULT: Limits = Limits {
        request_bytes: 8 << 10,
        request_time: Duration::from_secs(10),
        idle_time: Duration::from_secs(60),
        response_time: Duration::from_secs(60),
        connections: 64,
    };
}

/// Headers of a request that are accepted at most.
const HEADERS_MAX: usize = 64;
/// A body up to this size is copied behind its head, and sent together with it.
const SMALL_BODY_BYTES: usize = 16 << 10;
/// Returns the time after `time`; a year from now if it is longer.
fn deadline_after(time: Duration) -> Instant {
    Instant::now() + time.min(Duration::from_secs(365 * 86_400))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Method {
    Get,
    Head,
    Post,
}

/// A request, without a body.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Request {
    pub(crate) method: Method,
    /// Decoded, without the query.
    pub(crate) path: String,
    /// Decoded.
    query: Vec<(String, String)>,
    /// The names are in lower case.
    headers: Vec<(String, String)>,
    /// The client wants another request on this connection.
    pub(crate) keep_alive: bool,
    /// Set by [`Request::allow_large_answer`].
    permit: OnceCell<Permit>,
}

impl Request {
    /// Must be called before a large answer is made. Waits a little if too many exist already, and
    /// then fails with the answer to send instead.
    pub(crate) fn allow_large_answer(&self, client: &Connection) -> Result<(), Response> {
        if self.permit.get().is_some() {
            return Ok(());
        }
        let hung_up = |_| Response::hung_up();
        client.enter(Phase::Waits).map_err(hung_up)?;
        let permit = Permit::take(client);
        client.enter(Phase::Answers).map_err(hung_up)?;
        _ = self.permit.set(permit?);
        Ok(())
    }

    /// Returns the value of a header. None if it is absent, or present more than once.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(other, _)| other == name);
        let value = values.next().map(|(_, value)| value.as_str());
        if values.next().is_some() { None } else { value }
    }

    /// Returns how many times a header is present.
    pub(crate) fn count(&self, name: &str) -> usize {
        self.headers.iter().filter(|(other, _)| other == name).count()
    }

    /// Returns the first value of a name in the query.
    pub(crate) fn query(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) content_type: &'static str,
    pub(crate) body: Vec<u8>,
    /// Besides those that every answer has.
    pub(crate) headers: Vec<(&'static str, String)>,
}

pub(crate) const TEXT: &str = "text/plain; charset=utf-8";

impl Response {
    pub(crate) fn new(content_type: &'static str, body: impl Into<Vec<u8>>) -> Response {
        Response { status: 200, content_type, body: body.into(), headers: Vec::new() }
    }

    /// Returns an error with a sentence for the user.
    pub(crate) fn error(status: u16, text: impl std::fmt::Display) -> Response {
        Response { status, ..Response::new(TEXT, format!("{text}\n")) }
    }

    /// Returns what to answer to a client that has closed its side of the connection. It may still
    /// read, but probably does not.
    pub(crate) fn hung_up() -> Response {
        Response::error(400, "the client has closed its side of the connection")
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Response {
        self.headers.push((name, value.into()));
        self
    }

    /// Makes browsers save it as a file.
    pub(crate) fn saved_as(self, name: &str) -> Response {
        self.with("Content-Disposition", format!("attachment; filename=\"{name}\""))
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        301 => "Moved Permanently",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        _ => "Service Unavailable",
    }
}

/// Serves the requests of one connection, until the client ends it or a limit is reached.
pub(crate) fn serve(
    client: &Connection,
    limits: Limits,
    answer: impl Fn(&Request) -> Response,
) -> io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        client.enter(Phase::Receives)?;
        let received = receive(client, &mut buffer, limits)?;
        client.enter(Phase::Answers)?;
        // The request is dropped after the response, whose permit it has.
        let (mut request, response) = match received {
            Ok(request) => {
                let response = answer(&request);
                (Some(request), response)
            }
            Err(refusal) => (None, Response::error(refusal.status, refusal.why)),
        };
        client.enter(Phase::Waits)?;
        send(client, limits, request.as_mut(), &response)?;
        if !request.is_some_and(|request| request.keep_alive) {
            return Ok(());
        }
        if buffer.is_empty() {
            client.set_idle();
        }
    }
}

/// Why a request was not understood.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) why: &'static str,
}

/// Reads one request. `buffer` has what was received after the last one. An error means that there
/// is no request to answer.
fn receive(
    client: &Connection,
    buffer: &mut Vec<u8>,
    limits: Limits,
) -> io::Result<Result<Request, Refusal>> {
    let mut deadline = None;
    loop {
        let mut chunk = [0; 2048];
        let room = (limits.request_bytes - buffer.len()).min(chunk.len());
        let received = if buffer.is_empty() {
            client.receive(&mut chunk[..room], deadline_after(limits.idle_time))
        } else {
            match parse(buffer) {
                Ok(Some((request, len))) => {
                    buffer.drain(..len);
                    return Ok(Ok(request));
                }
                Ok(None) if room == 0 => {
                    return Ok(Err(Refusal { status: 431, why: "the request is too long" }));
                }
                Ok(None) => {}
                Err(refusal) => return Ok(Err(refusal)),
            }
            // One deadline for the whole request: a client that sends it byte by byte gets no more.
            let until = *deadline.get_or_insert_with(|| deadline_after(limits.request_time));
            client.receive(&mut chunk[..room], until)
        };
        match received {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => buffer.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::TimedOut && !buffer.is_empty() => {
                return Ok(Err(Refusal { status: 408, why: "the request took too long" }));
            }
            Err(e) => return Err(e),
        }
    }
}

/// Parses a request at the start of `bytes`. Returns it and its length; None if it is not complete.
pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Request, usize)>, Refusal> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut headers);
    let len = match parsed.parse(bytes) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => {
            return Err(Refusal { status: 431, why: "too many headers" });
        }
        Err(_) => return Err(Refusal { status: 400, why: "this is not HTTP" }),
    };
    let method = match parsed.method {
        Some("GET") => Method::Get,
        Some("HEAD") => Method::Head,
        Some("POST") => Method::Post,
        _ => return Err(Refusal { status: 501, why: "only GET, HEAD and POST are known here" }),
    };
    let mut all = Vec::with_capacity(parsed.headers.len());
    for header in parsed.headers.iter() {
        let Ok(value) = std::str::from_utf8(header.value) else {
            return Err(Refusal { status: 400, why: "a header is not UTF-8" });
        };
        all.push((header.name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    // A browser or a proxy may send an absolute URL: not here.
    let target = parsed.path.unwrap_or_default();
    if !target.starts_with('/') {
        return Err(Refusal { status: 400, why: "the path must begin with /" });
    }
    let target = target.split('#').next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (Some(path), Some(query)) = (decode(path, Plus::IsPlus), parse_query(query)) else {
        return Err(Refusal { status: 400, why: "the URL is not well encoded" });
    };
    let mut request =
        Request { method, path, query, headers: all, keep_alive: false, permit: OnceCell::new() };
    let no_body = request.count("transfer-encoding") == 0
        && request.headers.iter().all(|(name, value)| name != "content-length" || value == "0");
    if !no_body {
        return Err(Refusal { status: 413, why: "a request has no body here" });
    }
    let connection = request.header("connection").unwrap_or_default().to_ascii_lowercase();
    let asks = |word: &str| connection.split(',').any(|part| part.trim() == word);
    request.keep_alive =
        if parsed.version == Some(1) { !asks("close") } else { asks("keep-alive") };
    Ok(Some((request, len)))
}

fn parse_query(text: &str) -> Option<Vec<(String, String)>> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((decode(name, Plus::IsSpace)?, decode(value, Plus::IsSpace)?))
        })
        .collect()
}

/// What a `+` stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plus {
    IsPlus,
    IsSpace,
}

/// Replaces `%41` by `A`. None if it is not well formed, or not UTF-8.
fn decode(text: &str, plus: Plus) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => {
                let high = char::from(bytes.next()?).to_digit(16)?;
                let low = char::from(bytes.next()?).to_digit(16)?;
                (high * 16 + low) as u8
            }
            b'+' if plus == Plus::IsSpace => b' ',
            _ => byte,
        });
    }
    String::from_utf8(out).ok()
}

/// Sends the answer to a request, or to something that is none.
fn send(
    client: &Connection,
    limits: Limits,
    request: Option<&mut Request>,
    response: &Response,
) -> io::Result<()> {
    let mut head = format!(
        "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n",
        response.status,
        reason(response.status),
        response.content_type,
        response.body.len(),
    );
    // No cache keeps it, no other site may embed or read it, and it names no other site.
    head.push_str(
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\n\
         Cross-Origin-Resource-Policy: same-origin\r\nReferrer-Policy: no-referrer\r\n",
    );
    for (name, value) in &response.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let keep_alive = request.as_ref().is_some_and(|request| request.keep_alive);
    head.push_str(if keep_alive { "\r\n" } else { "Connection: close\r\n\r\n" });
    let deadline = deadline_after(limits.response_time);
    let mut head = head.into_bytes();
    let body = match &request {
        Some(request) if request.method == Method::Head => &[],
        _ => &response.body[..],
    };
    if body.len() <= SMALL_BODY_BYTES {
        // It is not a large answer after all.
        drop(request.and_then(|request| request.permit.take()));
        head.extend_from_slice(body);
        return client.send_all(&head, deadline);
    }
    match request.as_ref().and_then(|request| request.permit.get()) {
        Some(permit) => {
            client.send_large(&head, deadline, permit)?;
            client.send_large(body, deadline, permit)
        }
        None => {
            client.send_all(&head, deadline)?;
            client.send_all(body, deadline)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> Result<Option<Request>, u16> {
        match parse(text.as_bytes()) {
            Ok(found) => Ok(found.map(|(request, _)| request)),
            Err(refusal) => Err(refusal.status),
        }
    }

    #[test]
    fn a_request_is_split_into_path_query_and_headers() {
        let text =
            "GET /a%20b+c?seconds=3&x=%2F+y&z HTTP/1.1\r\nHost: localhost\r\nX: 1\r\nX: 2\r\n\r\n";
        let request = request(text).unwrap().unwrap();
        assert_eq!(request.path, "/a b+c");
        assert_eq!(request.query("seconds"), Some("3"));
        assert_eq!(request.query("x"), Some("/ y"));
        assert_eq!(request.query("z"), Some(""));
        assert_eq!(request.query("none"), None);
        assert_eq!(request.header("host"), Some("localhost"));
        assert_eq!((request.header("x"), request.count("x")), (None, 2));
        assert!(request.keep_alive);
    }

    #[test]
    fn a_connection_stays_open_as_the_version_and_the_header_say() {
        let open = |version: &str, header: &str| {
            let text = format!("GET / HTTP/{version}\r\n{header}\r\n");
            request(&text).unwrap().unwrap().keep_alive
        };
        assert!(open("1.1", ""));
        assert!(!open("1.1", "Connection: Close\r\n"));
        assert!(!open("1.0", ""));
        assert!(open("1.0", "Connection: keep-alive\r\n"));
    }

    /// Half a million requests that were changed at random places: no panic, and what is accepted
    /// has the form that the rest relies on.
    #[test]
    fn the_parser_survives_mutated_requests() {
        let seeds: [&[u8]; 3] = [
            b"GET /api/state?runtime=1&x=%41+%zz HTTP/1.1\r\nHost: [::1]:6060\r\nX-Y: z\r\n\r\n",
            b"POST /a/../b?on=1#f HTTP/1.1\r\nContent-Length: 0\r\nConnection: close, x\r\n\r\n",
            b"HEAD / HTTP/1.0\r\nAuthorization: Basic eDp5\r\nConnection: keep-alive\r\n\r\n",
        ];
        let mut x = 0x2545_f491_4f6c_dd1d_u64;
        let mut below = |n: usize| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 11) as usize % n
        };
        let (mut accepted, mut refused) = (0, 0);
        for _ in 0..500_000 {
            let mut bytes = seeds[below(seeds.len())].to_vec();
            for _ in 0..below(4) {
                let at = below(bytes.len());
                match below(4) {
                    0 => bytes[at] = below(256) as u8,
                    1 => bytes[at] ^= 1 << below(8),
                    2 => bytes.insert(at, below(256) as u8),
                    _ => bytes.truncate(at.max(1)),
                }
            }
            match parse(&bytes) {
                Ok(Some((request, len))) => {
                    accepted += 1;
                    assert!(len <= bytes.len() && request.path.starts_with('/'));
                    assert!(request.headers.iter().all(|(name, _)| *name == name.to_lowercase()));
                }
                Ok(None) => assert!(!bytes.ends_with(b"\r\n\r\n")),
                Err(refusal) => {
                    refused += 1;
                    assert!((400..=501).contains(&refusal.status));
                }
            }
        }
        assert!(accepted > 10_000 && refused > 10_000, "{accepted} {refused}");
    }

    #[test]
    fn a_request_with_a_body_or_a_bad_encoding_is_refused() {
        assert_eq!(request("POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\nx"), Err(413));
        assert_eq!(request("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"), Err(413));
        let twice = "POST / HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n";
        assert_eq!(request(twice), Err(413));
        assert!(request("POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n").is_ok());
        assert_eq!(request("GET /%zz HTTP/1.1\r\n\r\n"), Err(400));
        assert_eq!(request("GET /%ff HTTP/1.1\r\n\r\n"), Err(400));
        assert_eq!(request("GET /%4 HTTP/1.1\r\n\r\n"), Err(400));
        assert_eq!(request("GET http://a/ HTTP/1.1\r\n\r\n"), Err(400));
        assert_eq!(request("BREW / HTTP/1.1\r\n\r\n"), Err(501));
        assert_eq!(request("GET / HTTP/1.1\r\nHost"), Ok(None));
    }
}
