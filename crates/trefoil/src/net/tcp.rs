//! TCP: `TcpListener`, `TcpStream`, its halves.

use super::fd::Fd;
use super::{deadlines, halves, no_address, resolve, socket, streams};
use crate::chan;
use crate::sched::current_g;
use crate::sched::pollable::Side;
use crate::sys::clock::{self, NEVER, Nanos};
use rustix::net::{RecvFlags, SocketFlags};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Connections that wait to be accepted. std's number.
const BACKLOG: i32 = 4096;
/// How long one address may keep the next one waiting. RFC 8305's number.
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

/// A TCP connection, like [`std::net::TcpStream`].
pub struct TcpStream {
    pub(super) fd: Arc<Fd>,
}

socket!(TcpStream, std::net::TcpStream);
deadlines!(TcpStream);
streams!(TcpStream, &TcpStream);

pub(super) fn std_addr(addr: socket2::SockAddr) -> io::Result<SocketAddr> {
    addr.as_socket().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not an IP address"))
}

impl TcpStream {
    /// Connects. If the name has several addresses they are tried in order, each with a head start of 250 ms
    /// before the next; the first that answers is taken.
    ///
    /// # Errors
    /// Of the last address tried; or if the name cannot be resolved.
    pub fn connect(addr: impl ToSocketAddrs) -> io::Result<TcpStream> {
        TcpStream::connect_until(resolve(addr)?, NEVER)
    }

    /// As [`connect`](TcpStream::connect), for at most `timeout`, which includes looking up the name's
    /// addresses only in so far as less is left afterwards.
    ///
    /// # Errors
    /// As `connect`; `TimedOut`.
    pub fn connect_timeout(addr: impl ToSocketAddrs, timeout: Duration) -> io::Result<TcpStream> {
        let deadline = clock::after(timeout);
        TcpStream::connect_until(resolve(addr)?, deadline)
    }

    fn connect_until(addrs: Vec<SocketAddr>, deadline: Nanos) -> io::Result<TcpStream> {
        match addrs[..] {
            [] => Err(no_address()),
            [one] => TcpStream::connect_one(one, deadline),
            _ if current_g().is_none() => {
                let mut last = no_address();
                for addr in addrs {
                    match TcpStream::connect_one(addr, deadline) {
                        Ok(stream) => return Ok(stream),
                        Err(e) => last = e,
                    }
                }
                Err(last)
            }
            _ => TcpStream::race(addrs, deadline),
        }
    }

    /// Each address has a goroutine, which begins a while after the one before.
    fn race(addrs: Vec<SocketAddr>, deadline: Nanos) -> io::Result<TcpStream> {
        let (tx, rx) = chan::bounded(addrs.len());
        let mut waiting = addrs.into_iter();
        let mut running = 0;
        let mut last = no_address();
        loop {
            if let Some(addr) = waiting.next() {
                let tx = tx.clone();
                crate::go(move || {
                    let _ = tx.send(TcpStream::connect_one(addr, deadline));
                });
                running += 1;
            } else if running == 0 {
                return Err(last);
            }
            let patience = if waiting.len() > 0 { NEXT_ADDRESS_AFTER } else { Duration::MAX };
            match rx.recv_timeout(patience) {
                // Those that come later are dropped with the channel, and so closed.
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(e)) => {
                    last = e;
                    running -= 1;
                }
                Err(_) => {} // the next one
            }
        }
    }

    fn connect_one(addr: SocketAddr, deadline: Nanos) -> io::Result<TcpStream> {
        let socket = Socket::new(
            Domain::for_address(addr),
            Type::STREAM.nonblocking().cloexec(),
            Some(Protocol::TCP),
        )?;
        let started = socket.connect(&addr.into());
        let stream = TcpStream { fd: Arc::new(Fd::new(OwnedFd::from(socket))) };
        match started {
            Ok(()) => return Ok(stream),
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(e) => return Err(e),
        }
        {
            let call = stream.fd.call()?;
            loop {
                let seen = stream.fd.edges(Side::Write);
                let socket = SockRef::from(&stream);
                if let Some(e) = socket.take_error()? {
                    return Err(e);
                }
                match socket.peer_addr() {
                    Ok(_) => break,
                    Err(e) if e.kind() == io::ErrorKind::NotConnected => {}
                    Err(e) => return Err(e),
                }
                stream.fd.wait_for(&call, Side::Write, deadline, seen)?;
            }
        }
        Ok(stream)
    }

    /// The other side's address.
    ///
    /// # Errors
    /// If it is not connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.peer_addr()).and_then(std_addr)
    }

    /// This side's address.
    ///
    /// # Errors
    /// The kernel's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.local_addr()).and_then(std_addr)
    }

    /// Ends one or both directions of the connection.
    ///
    /// # Errors
    /// If it is not connected.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.fd.with(|s| s.shutdown(how))
    }

    /// Reads without taking the bytes out.
    ///
    /// # Errors
    /// As `read`.
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.fd
            .io(Side::Read, |fd| rustix::net::recv(fd, &mut *buf, RecvFlags::PEEK).map(|(n, _)| n))
    }

    /// Whether small writes are sent at once.
    ///
    /// # Errors
    /// The kernel's.
    pub fn nodelay(&self) -> io::Result<bool> {
        self.fd.with(|s| s.tcp_nodelay())
    }

    /// Sends small writes at once (no Nagle's algorithm).
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.fd.with(|s| s.set_tcp_nodelay(nodelay))
    }

    /// The time to live of its packets.
    ///
    /// # Errors
    /// The kernel's.
    pub fn ttl(&self) -> io::Result<u32> {
        self.fd.with(|s| s.ttl_v4())
    }

    /// Sets the time to live of its packets.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        self.fd.with(|s| s.set_ttl_v4(ttl))
    }
}

halves!(TcpStream, ReadHalf, WriteHalf);

/// Accepts TCP connections, like [`std::net::TcpListener`].
pub struct TcpListener {
    fd: Arc<Fd>,
}

socket!(TcpListener, std::net::TcpListener);

impl TcpListener {
    /// Listens at an address. Port 0 lets the system choose one.
    ///
    /// # Errors
    /// Of the last address tried; or if the name cannot be resolved.
    pub fn bind(addr: impl ToSocketAddrs) -> io::Result<TcpListener> {
        let mut last = no_address();
        for addr in resolve(addr)? {
            match TcpListener::bind_one(addr) {
                Ok(listener) => return Ok(listener),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    fn bind_one(addr: SocketAddr) -> io::Result<TcpListener> {
        let socket = Socket::new(
            Domain::for_address(addr),
            Type::STREAM.nonblocking().cloexec(),
            Some(Protocol::TCP),
        )?;
        // As std: a server that is started again gets its port back at once.
        socket.set_reuse_address(true)?;
        socket.bind(&addr.into())?;
        socket.listen(BACKLOG)?;
        Ok(TcpListener { fd: Arc::new(Fd::new(OwnedFd::from(socket))) })
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// The kernel's; above all "too many open files", after which accepting may go on.
    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (fd, addr) = self.fd.io(Side::Read, |fd| {
            loop {
                match rustix::net::acceptfrom_with(fd, flags) {
                    // The other side is gone already: the next one.
                    Err(rustix::io::Errno::CONNABORTED) => {}
                    result => return result,
                }
            }
        })?;
        let addr = addr
            .ok_or_else(|| io::Error::other("a connection without an address"))?
            .try_into()
            .map_err(io::Error::from)?;
        Ok((TcpStream { fd: Arc::new(Fd::new(fd)) }, addr))
    }

    /// The connections, one after the other, without end.
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming { listener: self }
    }

    /// The address it listens at.
    ///
    /// # Errors
    /// The kernel's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.local_addr()).and_then(std_addr)
    }

    /// `accept` fails with `TimedOut` from `deadline` on. None: it waits for ever.
    ///
    /// # Errors
    /// If it is closed.
    pub fn set_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
        self.fd.set_deadline(Side::Read, deadline)
    }
}

/// Connections of a [`TcpListener`]: see [`TcpListener::incoming`].
#[derive(Debug)]
pub struct Incoming<'a> {
    listener: &'a TcpListener,
}

impl Iterator for Incoming<'_> {
    type Item = io::Result<TcpStream>;

    fn next(&mut self) -> Option<io::Result<TcpStream>> {
        Some(self.listener.accept().map(|(stream, _)| stream))
    }
}
