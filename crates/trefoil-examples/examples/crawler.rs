//! A crawler over loopback: a small web site, and goroutines that follow its links, at most eight
//! requests at once. Each page is fetched once. Plain `std::net` on both sides: a goroutine that
//! waits needs no thread.
//!
//! `cargo run --release --example crawler`

use std::collections::HashSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use trefoil::sync::{ErrGroup, Semaphore};

const PAGES: usize = 200;
const MAX_REQUESTS: usize = 8;

/// Page `n` links to `2n` and `2n + 1`, and back to the first.
fn page(n: usize) -> String {
    let links = [2 * n, 2 * n + 1, 1].map(|m| format!("<a href=\"/{m}\">{m}</a>"));
    format!("<h1>page {n}</h1>{}", links.concat())
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    let mut request = String::new();
    BufReader::new(&stream).read_line(&mut request)?;
    let path = request.split(' ').nth(1).unwrap_or("/");
    let n = path.trim_start_matches('/').parse().unwrap_or(0);
    let (status, body) = match n {
        1..=PAGES => ("200 OK", page(n)),
        _ => ("404 Not Found", String::new()),
    };
    let length = body.len();
    write!(stream, "HTTP/1.0 {status}\r\nContent-Length: {length}\r\n\r\n{body}")
}

fn fetch(addr: SocketAddr, path: &str) -> std::io::Result<Option<String>> {
    let mut stream = TcpStream::connect(addr)?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned());
    Ok(body.filter(|_| answer.starts_with("HTTP/1.0 200")))
}

struct Crawl {
    addr: SocketAddr,
    seen: Mutex<HashSet<String>>,
    slots: Semaphore,
    group: ErrGroup<std::io::Error>,
}

/// Fetches a page and starts a goroutine for every link that is new.
fn visit(crawl: Arc<Crawl>, path: String) -> std::io::Result<()> {
    let body = {
        let _slot = crawl.slots.acquire();
        fetch(crawl.addr, &path)?
    };
    for link in body.iter().flat_map(|body| body.split("href=\"").skip(1)) {
        let link = link.split('"').next().unwrap_or_default().to_owned();
        if crawl.seen.lock().unwrap().insert(link.clone()) {
            let next = crawl.clone();
            crawl.group.go(move || visit(next, link));
        }
    }
    Ok(())
}

#[trefoil::main]
fn main() -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    trefoil::go(move || {
        for stream in listener.incoming().flatten() {
            trefoil::go(move || serve(stream));
        }
    });
    let crawl = Arc::new(Crawl {
        addr,
        seen: Mutex::new(HashSet::from(["/1".to_owned()])),
        slots: Semaphore::new(MAX_REQUESTS),
        group: ErrGroup::new(),
    });
    visit(crawl.clone(), "/1".to_owned())?;
    crawl.group.wait()?;
    let seen = crawl.seen.lock().unwrap().len();
    println!("{seen} links found, {PAGES} pages, on {} threads", trefoil::debug::stats().threads);
    Ok(())
}
