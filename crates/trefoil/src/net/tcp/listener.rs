//! `TcpListener`: binds an address and accepts connections.

use super::{TcpStream, std_addr};
use crate::net::fd::Fd;
use crate::net::macros::{readiness, socket};
use crate::net::resolve::{no_address, resolve};
use crate::sched::netpoll::pollable::Direction;
#[cfg(feature = "std")]
use crate::simnet;
use crate::sys::syscalls::{self, Errno};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// Connections that may wait to be accepted. std uses the same number.
const BACKLOG: i32 = 4096;

/// Accepts TCP connections, like [`std::net::TcpListener`].
///
/// The usual server is a goroutine that accepts and starts one goroutine for each connection.
/// Several goroutines may accept on one listener at the same time. Unlike std's, a listener has a
/// deadline ([`set_deadline`](TcpListener::set_deadline)) and can be closed while a goroutine waits
/// in [`accept`](TcpListener::accept).
///
/// # Drop
/// Dropping the listener closes it. The kernel resets connections that were not accepted yet.
/// Connections that were accepted stay open.
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
/// use trefoil::net::{TcpListener, TcpStream};
///
/// trefoil::run(|| {
///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
///     let address = listener.local_addr().unwrap();
///     trefoil::go(move || {
///         while let Ok((mut stream, _)) = listener.accept() {
///             trefoil::go(move || stream.write_all(b"welcome").unwrap());
///         }
///     });
///     for _ in 0..3 {
///         let mut text = String::new();
///         TcpStream::connect(address).unwrap().read_to_string(&mut text).unwrap();
///         assert_eq!(text, "welcome");
///     }
/// });
/// ```
pub struct TcpListener {
    fd: Arc<Fd>,
}

socket!(TcpListener, std::net::TcpListener);
readiness!(TcpListener);

impl TcpListener {
    /// Makes a listener at an address.
    ///
    /// With port 0 the kernel chooses a free port, which [`local_addr`](TcpListener::local_addr)
    /// returns. If `addr` has several addresses, the first one that can be bound is used. As in
    /// std, `SO_REUSEADDR` is set, so that a restarted server gets its port back at once.
    ///
    /// # Errors
    /// If no address can be bound, the error of the last one:
    /// - [`AddrInUse`](io::ErrorKind::AddrInUse) if another socket listens there,
    /// - [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable) if the address is not one of this
    ///   machine,
    /// - [`PermissionDenied`](io::ErrorKind::PermissionDenied) for a privileged port (below 1024),
    /// - the OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// If `addr` is a name, the error of [`ToSocketAddrs`] when the lookup fails, and
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) when the name has no address.
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::TcpListener;
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let address = listener.local_addr().unwrap();
    ///     assert_ne!(address.port(), 0);
    ///     let error = TcpListener::bind(address).unwrap_err();
    ///     assert_eq!(error.kind(), ErrorKind::AddrInUse);
    /// });
    /// ```
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
        // As in std: a restarted server gets its port back at once.
        socket.set_reuse_address(true)?;
        socket.bind(&addr.into())?;
        socket.listen(BACKLOG)?;
        Ok(TcpListener { fd: Arc::new(Fd::new_tcp(OwnedFd::from(socket))) })
    }

    /// Waits for a connection and returns it with the address of the other side.
    ///
    /// Connections that the other side has given up before they were accepted (`ECONNABORTED`) are
    /// skipped.
    ///
    /// # Errors
    /// - [`TimedOut`](io::ErrorKind::TimedOut) after the deadline
    ///   ([`set_deadline`](TcpListener::set_deadline)),
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpListener::close),
    /// - the error of a done context ([`cancel_on`](TcpListener::cancel_on)),
    /// - the OS error `EMFILE` or `ENFILE` if no descriptor is left. The connection stays in the
    ///   queue: a server can wait a little and go on to accept.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     let (_stream, address) = listener.accept().unwrap();
    ///     assert_eq!(address, client.local_addr().unwrap());
    /// });
    /// ```
    pub fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        self.accepted(self.fd.io(Direction::Read, TcpListener::attempt_accept)?)
    }

    /// Accepts a connection, in async code. It is [`accept`](TcpListener::accept) for tasks.
    ///
    /// Any number of tasks, goroutines and threads may accept at the same time.
    ///
    /// # Errors
    /// As [`accept`](TcpListener::accept).
    ///
    /// # Cancel
    /// Dropping the future loses no connection.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let address = listener.local_addr().unwrap();
    ///     let accept = async move { listener.accept_async().await.unwrap().1 };
    ///     let server = trefoil::task::spawn(accept);
    ///     let client = TcpStream::connect(address).unwrap();
    ///     assert_eq!(server.join().unwrap(), client.local_addr().unwrap());
    /// });
    /// ```
    pub async fn accept_async(&self) -> io::Result<(TcpStream, SocketAddr)> {
        self.accepted(self.fd.io_async(Direction::Read, TcpListener::attempt_accept).await?)
    }

    fn attempt_accept(fd: BorrowedFd<'_>) -> syscalls::Result<(OwnedFd, SockAddr)> {
        loop {
            match syscalls::accept_from(fd) {
                // The other side has given up. Take the next connection.
                Err(Errno::CONNABORTED) => {}
                result => return result,
            }
        }
    }

    fn accepted(&self, (fd, addr): (OwnedFd, SockAddr)) -> io::Result<(TcpStream, SocketAddr)> {
        #[cfg(feature = "std")]
        if let Some(network) = simnet::here()
            && let Some(addr) = network.accepted(fd.as_raw_fd())
        {
            return Ok((TcpStream { fd: Arc::new(Fd::new_accepted(fd, &self.fd)) }, addr));
        }
        let addr = std_addr(addr)?;
        Ok((TcpStream { fd: Arc::new(Fd::new_accepted(fd, &self.fd)) }, addr))
    }

    /// Returns an iterator over the connections, which calls [`accept`](TcpListener::accept) for
    /// each.
    ///
    /// The iterator never ends: it yields the errors of `accept` too. A loop over it has to return
    /// at an error that persists, such as [`NotConnected`](io::ErrorKind::NotConnected) after
    /// [`close`](TcpListener::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let address = listener.local_addr().unwrap();
    ///     let clients: Vec<_> = (0..3).map(|_| TcpStream::connect(address).unwrap()).collect();
    ///     for (client, stream) in clients.iter().zip(listener.incoming()) {
    ///         assert_eq!(stream.unwrap().peer_addr().unwrap(), client.local_addr().unwrap());
    ///     }
    /// });
    /// ```
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming { listener: self }
    }

    /// Returns the address at which it listens.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpListener::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::TcpListener;
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     assert!(listener.local_addr().unwrap().ip().is_loopback());
    /// });
    /// ```
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.local_addr()).and_then(std_addr)
    }

    /// Returns the time to live of the IPv4 packets that the listener and accepted connections send
    /// (`IP_TTL`).
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpListener::close).
    pub fn ttl(&self) -> io::Result<u32> {
        self.fd.with(|s| s.ttl_v4())
    }

    /// Sets the time to live of the IPv4 packets that the listener and accepted connections send
    /// (`IP_TTL`), from 1 to 255.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) if `ttl` is out of range, and
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpListener::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     listener.set_ttl(100).unwrap();
    ///     let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     let (server, _) = listener.accept().unwrap();
    ///     assert_eq!((listener.ttl().unwrap(), server.ttl().unwrap()), (100, 100));
    /// });
    /// ```
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        self.fd.with(|s| s.set_ttl_v4(ttl))
    }

    /// Sets the time at which [`accept`](TcpListener::accept) fails.
    ///
    /// An `accept` that is not done at `deadline` fails with [`TimedOut`](io::ErrorKind::TimedOut).
    /// This applies to calls that wait now and to later calls, until the caller sets another
    /// deadline. After the deadline calls fail at once, even if a connection is in the queue. With
    /// `None`, the default, there is no deadline.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpListener::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use std::time::{Duration, Instant};
    /// use trefoil::net::TcpListener;
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     listener.set_deadline(Some(Instant::now() + Duration::from_millis(2))).unwrap();
    ///     assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::TimedOut);
    /// });
    /// ```
    pub fn set_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
        self.fd.set_deadline(Direction::Read, deadline)
    }
}

/// An iterator over the connections of a [`TcpListener`], made by [`TcpListener::incoming`].
///
/// It never ends. Its items are the results of [`TcpListener::accept`] without the address.
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
/// use trefoil::net::{Incoming, TcpListener, TcpStream};
///
/// fn greet(connections: Incoming<'_>) {
///     for stream in connections.map_while(Result::ok) {
///         (&stream).write_all(b"welcome").unwrap();
///     }
/// }
///
/// trefoil::run(|| {
///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
///     let address = listener.local_addr().unwrap();
///     trefoil::go(move || greet(listener.incoming()));
///     let mut text = String::new();
///     TcpStream::connect(address).unwrap().read_to_string(&mut text).unwrap();
///     assert_eq!(text, "welcome");
/// });
/// ```
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
