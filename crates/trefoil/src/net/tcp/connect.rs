//! How a [`TcpStream`] is connected.
//!
//! A connect of one address begins without blocking ([`TcpStream::begin_connect`]) and is complete
//! when the socket is writable. Several addresses compete by Happy Eyeballs (RFC 8305): each has a
//! head start of [`NEXT_ADDRESS_AFTER`] before the next one is tried. Goroutines do it with a
//! goroutine per address, tasks with a future per address; a plain thread has no goroutines to
//! start and tries one after the other.

use super::TcpStream;
use crate::chan;
use crate::goroutine::go;
use crate::net::fd::Fd;
use crate::net::resolve::no_address;
use crate::sched::current_g;
use crate::sched::netpoll::pollable::Direction;
use crate::sys::clock::Nanos;
use crate::sys::syscalls::Errno;
use crate::time::sleep_async;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Head start of an address before the next one is tried, as RFC 8305 recommends.
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

/// Returns whether a connect that has begun has succeeded.
///
/// # Errors
/// Returns the error with which it has failed.
fn is_connected_now(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let socket = SockRef::from(&fd);
    if let Some(e) = socket.take_error()? {
        return Err(e);
    }
    match socket.peer_addr() {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(e) => Err(e),
    }
}

impl TcpStream {
    /// Connects to the first of several addresses that accepts, in async code.
    pub(super) async fn connect_any_async(addrs: Vec<SocketAddr>) -> io::Result<TcpStream> {
        match addrs[..] {
            [] => Err(no_address()),
            [one] => TcpStream::connect_one_async(one).await,
            _ => TcpStream::connect_staggered_async(addrs).await,
        }
    }

    /// As [`TcpStream::connect_staggered`], in one task.
    async fn connect_staggered_async(addrs: Vec<SocketAddr>) -> io::Result<TcpStream> {
        let mut untried = addrs.into_iter();
        let mut running: Vec<Pin<Box<dyn Future<Output = _> + Send>>> = Vec::new();
        let mut last = no_address();
        let mut head_start = sleep_async(Duration::ZERO);
        poll_fn(|context| {
            loop {
                let mut failed = false;
                let mut i = 0;
                while i < running.len() {
                    match running[i].as_mut().poll(context) {
                        Poll::Ready(Ok(stream)) => return Poll::Ready(Ok(stream)),
                        Poll::Ready(Err(e)) => {
                            (last, failed) = (e, true);
                            drop(running.swap_remove(i));
                        }
                        Poll::Pending => i += 1,
                    }
                }
                if untried.len() == 0 && running.is_empty() {
                    return Poll::Ready(Err(std::mem::replace(&mut last, no_address())));
                }
                let is_next = failed || Pin::new(&mut head_start).poll(context).is_ready();
                match if is_next { untried.next() } else { None } {
                    Some(addr) => running.push(Box::pin(TcpStream::connect_one_async(addr))),
                    None => return Poll::Pending,
                }
                head_start = sleep_async(NEXT_ADDRESS_AFTER);
            }
        })
        .await
    }

    /// As [`TcpStream::connect_one`].
    async fn connect_one_async(addr: SocketAddr) -> io::Result<TcpStream> {
        let (stream, is_connected) = TcpStream::begin_connect(addr)?;
        if !is_connected {
            let mut failed = None;
            let outcome = stream.fd.io_async(Direction::Write, |fd: BorrowedFd<'_>| {
                match is_connected_now(fd) {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(Errno::AGAIN),
                    Err(e) => {
                        failed = Some(e);
                        Ok(())
                    }
                }
            });
            outcome.await?;
            if let Some(e) = failed {
                return Err(e);
            }
        }
        Ok(stream)
    }

    /// Connects to the first of several addresses that accepts, until `deadline`.
    pub(super) fn connect_until(addrs: Vec<SocketAddr>, deadline: Nanos) -> io::Result<TcpStream> {
        match addrs[..] {
            [] => Err(no_address()),
            [one] => TcpStream::connect_one(one, deadline),
            _ if current_g().is_none() => TcpStream::connect_in_turn(addrs, deadline),
            _ => TcpStream::connect_staggered(addrs, deadline),
        }
    }

    /// Tries the addresses one after the other.
    fn connect_in_turn(addrs: Vec<SocketAddr>, deadline: Nanos) -> io::Result<TcpStream> {
        let mut last = no_address();
        for addr in addrs {
            match TcpStream::connect_one(addr, deadline) {
                Ok(stream) => return Ok(stream),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Tries the addresses, each on a goroutine of its own that starts [`NEXT_ADDRESS_AFTER`] later
    /// than the one before, or when that one has failed.
    fn connect_staggered(addrs: Vec<SocketAddr>, deadline: Nanos) -> io::Result<TcpStream> {
        let (tx, rx) = chan::bounded(addrs.len());
        let mut untried = addrs.into_iter();
        let mut running = 0;
        let mut last = no_address();
        loop {
            if let Some(addr) = untried.next() {
                let tx = tx.clone();
                go(move || {
                    let _ = tx.send(TcpStream::connect_one(addr, deadline));
                });
                running += 1;
            } else if running == 0 {
                return Err(last);
            }
            let head_start = if untried.len() > 0 { NEXT_ADDRESS_AFTER } else { Duration::MAX };
            match rx.recv_timeout(head_start) {
                // Connections that succeed later are dropped with the channel.
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(e)) => {
                    last = e;
                    running -= 1;
                }
                Err(_) => {} // Start the next address.
            }
        }
    }

    /// Connects to one address, until `deadline`.
    fn connect_one(addr: SocketAddr, deadline: Nanos) -> io::Result<TcpStream> {
        let (stream, is_connected) = TcpStream::begin_connect(addr)?;
        if !is_connected {
            stream.wait_until_connected(deadline)?;
        }
        Ok(stream)
    }

    /// Begins to connect to one address. Returns whether the connection is there already.
    fn begin_connect(addr: SocketAddr) -> io::Result<(TcpStream, bool)> {
        let socket = Socket::new(
            Domain::for_address(addr),
            Type::STREAM.nonblocking().cloexec(),
            Some(Protocol::TCP),
        )?;
        let started = socket.connect(&addr.into());
        let stream = TcpStream { fd: Arc::new(Fd::new_tcp(OwnedFd::from(socket))) };
        match started {
            Ok(()) => Ok((stream, true)),
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok((stream, false)),
            Err(e) => Err(e),
        }
    }

    /// Waits until a connect that has begun succeeds or fails.
    fn wait_until_connected(&self, deadline: Nanos) -> io::Result<()> {
        let call = self.fd.call()?;
        loop {
            let seen = self.fd.edges(Direction::Write);
            if is_connected_now(call.fd())? {
                return Ok(());
            }
            self.fd.wait_for(&call, Direction::Write, deadline, seen)?;
        }
    }
}
