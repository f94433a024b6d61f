//! Sockets for tests: pairs on loopback, deadlines, runtimes of several sizes.

pub(crate) use crate::common::MS;
use crate::common::{runtime, watchdog, yield_until};
use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use trefoil::net::{TcpListener, TcpStream};

/// Runs `f` with one, two and eight Ps. Afterwards no goroutine may wait for a descriptor.
pub(crate) fn at_each(f: impl Fn() + Sync) {
    let _watchdog = watchdog();
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            f();
            yield_until("the goroutines to end", || trefoil::num_goroutines() == 1);
            assert_eq!(trefoil::debug::stats().io_waiters, 0, "with {procs} Ps");
        });
    }
}

/// Returns a listener on loopback, and its address.
pub(crate) fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    (listener, addr)
}

/// Returns both sides of a connection on loopback.
pub(crate) fn tcp_pair() -> (TcpStream, TcpStream) {
    let (listener, addr) = listen();
    let client = TcpStream::connect(addr).unwrap();
    (client, listener.accept().unwrap().0)
}

/// Returns a deadline that passes after `d`.
pub(crate) fn soon(d: Duration) -> Option<Instant> {
    Some(Instant::now() + d)
}

/// Returns a deadline that has passed.
pub(crate) fn past() -> Option<Instant> {
    Some(Instant::now().checked_sub(MS).unwrap())
}

/// Writes until the socket buffers are full. Returns the number of bytes.
pub(crate) fn fill(stream: &TcpStream) -> usize {
    let chunk = vec![7; 64 << 10];
    let mut total = 0;
    loop {
        stream.set_write_deadline(soon(20 * MS)).unwrap();
        match (&mut &*stream).write(&chunk) {
            Ok(n) => total += n,
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::TimedOut);
                stream.set_write_deadline(None).unwrap();
                return total;
            }
        }
    }
}
