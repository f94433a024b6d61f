//! How much memory a connection takes whose goroutine waits to read. In release builds only: frames
//! are larger in debug builds.
#![cfg(not(debug_assertions))]

mod common;

use common::{raise_fd_limit, rss, watchdog};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;
use trefoil::net::TcpListener;
use trefoil::{debug, go};

/// Or fewer, if the process may not have so many descriptors, two per connection.
const CONNECTIONS: usize = 2_000;
/// Connections that pay for what is made once.
const FIRST_CONNECTIONS: usize = 50;
/// A page for the stack and the thread-local storage, and 1.3 KB for all the rest. Of that, 0.8 KB
/// are used: it is too little for a second page for one connection in six, which is what frames
/// that are a line too deep cost.
const BYTES_EACH: u64 = 5_400;

/// Makes `n` connections to `address`; each has had one echo.
fn clients(address: SocketAddr, n: usize) -> Vec<std::net::TcpStream> {
    let client = move |_| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let mut bytes = [1; 64];
        stream.write_all(&bytes).unwrap();
        stream.read_exact(&mut bytes).unwrap();
        stream
    };
    std::thread::spawn(move || (0..n).map(client).collect()).join().unwrap()
}

/// Returns the resident memory when `n` goroutines wait for descriptors.
fn resident_with(n: usize) -> u64 {
    while debug::stats().io_waiters != n {
        trefoil::time::sleep(Duration::from_millis(1));
    }
    rss()
}

#[trefoil::test]
fn an_idle_connection_needs_one_page_and_little_more() {
    let _watchdog = watchdog();
    let connections = CONNECTIONS.min(raise_fd_limit() as usize / 2 - 2 * FIRST_CONNECTIONS);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    go(move || {
        loop {
            let (mut stream, _) = listener.accept().unwrap();
            go(move || {
                let mut bytes = [0; 64];
                while stream.read_exact(&mut bytes).is_ok() {
                    stream.write_all(&bytes).unwrap();
                }
            });
        }
    });
    // One more goroutine waits: the one that accepts.
    let first = clients(address, FIRST_CONNECTIONS);
    let before = resident_with(FIRST_CONNECTIONS + 1);
    let rest = clients(address, connections);
    let after = resident_with(FIRST_CONNECTIONS + connections + 1);
    let each = after.saturating_sub(before) / connections as u64;
    assert!(each <= BYTES_EACH, "{each} bytes per idle connection");
    drop((first, rest));
}
