//! `TcpStream`, a TCP connection, and its read and write halves.

use super::std_addr;
use crate::net::fd::Fd;
use crate::net::macros::{async_streams, deadlines, halves, readiness, socket, streams};
use crate::net::resolve::resolve;
use crate::sched::netpoll::pollable::Direction;
use crate::sys::clock::{self, NEVER};
use crate::sys::syscalls;
use std::ffi::c_int;
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A TCP connection, like [`std::net::TcpStream`].
///
/// A stream comes from [`connect`](TcpStream::connect) or from
/// [`TcpListener::accept`](super::TcpListener::accept). Reads and writes park the goroutine until
/// the kernel is ready. Unlike std's, a stream has deadlines for each direction
/// ([`set_read_deadline`](TcpStream::set_read_deadline)), can be closed while other goroutines use
/// it ([`close`](TcpStream::close)), and follows a context ([`cancel_on`](TcpStream::cancel_on)).
///
/// [`Read`] and [`Write`] are also implemented for `&TcpStream`, so that one goroutine can read
/// while another writes.
///
/// # Drop
/// Dropping the stream closes the connection, unless a [`CancelGuard`](crate::net::CancelGuard) or
/// a half of it is alive.
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
/// use std::net::Shutdown;
/// use trefoil::net::{TcpListener, TcpStream};
///
/// trefoil::run(|| {
///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
///     let address = listener.local_addr().unwrap();
///     trefoil::go(move || {
///         let (mut stream, _) = listener.accept().unwrap();
///         let mut request = String::new();
///         stream.read_to_string(&mut request).unwrap();
///         write!(stream, "{} bytes", request.len()).unwrap();
///     });
///
///     let mut stream = TcpStream::connect(address).unwrap();
///     stream.write_all(b"hello").unwrap();
///     stream.shutdown(Shutdown::Write).unwrap();
///     let mut answer = String::new();
///     stream.read_to_string(&mut answer).unwrap();
///     assert_eq!(answer, "5 bytes");
/// });
/// ```
pub struct TcpStream {
    pub(in crate::net) fd: Arc<Fd>,
}

socket!(TcpStream, std::net::TcpStream);
deadlines!(TcpStream);
streams!(TcpStream, &TcpStream);
async_streams!(TcpStream);
readiness!(TcpStream);

impl TcpStream {
    /// Connects to an address.
    ///
    /// If `addr` has several addresses, a goroutine tries them in order. Each address has a head
    /// start of 250 ms before the next, or less if it fails sooner, and the first connection that
    /// succeeds is returned (RFC 8305 calls this "happy eyeballs"). On a plain thread the addresses
    /// are tried one after the other, as in std.
    ///
    /// # Errors
    /// If no address accepts the connection, the error of the last address that failed:
    /// - [`ConnectionRefused`](io::ErrorKind::ConnectionRefused) if nothing listens at the port,
    /// - [`TimedOut`](io::ErrorKind::TimedOut) if the kernel has sent its last SYN without an
    ///   answer,
    /// - [`HostUnreachable`](io::ErrorKind::HostUnreachable) or
    ///   [`NetworkUnreachable`](io::ErrorKind::NetworkUnreachable) if there is no route,
    /// - the OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// If `addr` is a name, the error of [`ToSocketAddrs`] when the lookup fails, and
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) when the name has no address.
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let address = listener.local_addr().unwrap();
    ///     let stream = TcpStream::connect(address).unwrap();
    ///     assert_eq!(stream.peer_addr().unwrap(), address);
    ///
    ///     drop(listener);
    ///     let error = TcpStream::connect(address).unwrap_err();
    ///     assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    /// });
    /// ```
    pub fn connect(addr: impl ToSocketAddrs) -> io::Result<TcpStream> {
        TcpStream::connect_until(resolve(addr)?, NEVER)
    }

    /// Connects as [`connect`](TcpStream::connect) does, for at most `timeout`.
    ///
    /// Unlike std's method, it takes names and lists of addresses too. The timeout covers all
    /// addresses together. It does not interrupt the lookup of a name, but the time that the lookup
    /// takes counts.
    ///
    /// # Errors
    /// [`TimedOut`](io::ErrorKind::TimedOut) if there is no connection when `timeout` has passed;
    /// otherwise as [`connect`](TcpStream::connect). A `timeout` of zero is not refused as in std:
    /// it fails with `TimedOut`, unless the connection is there at once.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let address = listener.local_addr().unwrap();
    ///     let stream = TcpStream::connect_timeout(address, Duration::from_secs(5)).unwrap();
    ///     assert_eq!(stream.peer_addr().unwrap(), address);
    /// });
    /// ```
    pub fn connect_timeout(addr: impl ToSocketAddrs, timeout: Duration) -> io::Result<TcpStream> {
        let deadline = clock::after(timeout);
        TcpStream::connect_until(resolve(addr)?, deadline)
    }

    /// Connects to an address, in async code.
    ///
    /// It is [`connect`](TcpStream::connect), with the same head start for each address. If `addr`
    /// is a name, the poll that looks it up blocks; other tasks run on meanwhile.
    ///
    /// # Errors
    /// As [`connect`](TcpStream::connect).
    ///
    /// # Cancel
    /// Dropping the future closes the connections that have begun. For a time limit use
    /// [`timeout_async`](crate::time::timeout_async).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let address = listener.local_addr().unwrap();
    ///     let server = trefoil::task::spawn(async move {
    ///         let (stream, _) = listener.accept_async().await.unwrap();
    ///         stream.write_async(b"hello").await.unwrap();
    ///     });
    ///     trefoil::block_on(async {
    ///         let stream = TcpStream::connect_async(address).await.unwrap();
    ///         let mut buf = [0; 8];
    ///         let n = stream.read_async(&mut buf).await.unwrap();
    ///         assert_eq!(&buf[..n], b"hello");
    ///         server.await.unwrap();
    ///     });
    /// });
    /// ```
    pub async fn connect_async(addr: impl ToSocketAddrs) -> io::Result<TcpStream> {
        TcpStream::connect_any_async(resolve(addr)?).await
    }

    /// Returns the address of the other side.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) if both directions have ended, if the other
    /// side has reset the connection, and after [`close`](TcpStream::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     let (server, _) = listener.accept().unwrap();
    ///     assert_eq!(client.peer_addr().unwrap(), server.local_addr().unwrap());
    ///     assert_eq!(client.local_addr().unwrap(), server.peer_addr().unwrap());
    /// });
    /// ```
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.peer_addr()).and_then(std_addr)
    }

    /// Returns the address of this side.
    ///
    /// The example of [`peer_addr`](TcpStream::peer_addr) shows both.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.local_addr()).and_then(std_addr)
    }

    /// Ends one or both directions of the connection, for all handles of it.
    ///
    /// After [`Shutdown::Write`] the other side reads end-of-file. After [`Shutdown::Read`] reads
    /// on this side return 0 once they have read the data that arrived before. Calls that wait in
    /// such a direction end as well. The descriptor stays open until the stream is dropped.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) if both directions have ended, if the other
    /// side has reset the connection, and after [`close`](TcpStream::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::Read;
    /// use std::net::Shutdown;
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     let (mut server, _) = listener.accept().unwrap();
    ///     client.shutdown(Shutdown::Write).unwrap();
    ///     assert_eq!(server.read(&mut [0; 8]).unwrap(), 0, "end-of-file");
    /// });
    /// ```
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.fd.with(|s| s.shutdown(how))
    }

    /// Reads data, and leaves it in the kernel's buffer for the next read.
    ///
    /// The goroutine waits if there is no data. A result of 0 means end-of-file.
    ///
    /// # Errors
    /// As for reads: [`TimedOut`](io::ErrorKind::TimedOut) after the read deadline or timeout,
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close), the error
    /// of a done context ([`cancel_on`](TcpStream::cancel_on)), and
    /// [`ConnectionReset`](io::ErrorKind::ConnectionReset) if the other side has reset the
    /// connection.
    ///
    /// # Examples
    /// ```
    /// use std::io::{Read, Write};
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     let (mut server, _) = listener.accept().unwrap();
    ///     client.write_all(b"GET /").unwrap();
    ///     let mut first = [0; 1];
    ///     assert_eq!(server.peek(&mut first).unwrap(), 1);
    ///     let mut all = [0; 5];
    ///     server.read_exact(&mut all).unwrap();
    ///     assert_eq!((&first, &all), (b"G", b"GET /"));
    /// });
    /// ```
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.fd.io(Direction::Read, |fd| syscalls::recv(fd, &mut *buf, libc::MSG_PEEK))
    }

    /// Returns whether small writes are sent at once (`TCP_NODELAY`). The default is `false`.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    pub fn nodelay(&self) -> io::Result<bool> {
        self.fd.with(|s| s.tcp_nodelay())
    }

    /// Sets whether small writes are sent at once (`TCP_NODELAY`).
    ///
    /// With `false`, the default as in std, the kernel may hold small writes back until the other
    /// side has acknowledged earlier ones (Nagle's algorithm). Go's default is `true`.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     assert!(!stream.nodelay().unwrap());
    ///     stream.set_nodelay(true).unwrap();
    ///     assert!(stream.nodelay().unwrap());
    /// });
    /// ```
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.fd.with(|s| s.set_tcp_nodelay(nodelay))
    }

    /// Returns the time to live of the IPv4 packets that this socket sends (`IP_TTL`).
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    pub fn ttl(&self) -> io::Result<u32> {
        self.fd.with(|s| s.ttl_v4())
    }

    /// Sets the time to live of the IPv4 packets that this socket sends (`IP_TTL`), from 1 to 255.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) if `ttl` is out of range, and
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     stream.set_ttl(100).unwrap();
    ///     assert_eq!(stream.ttl().unwrap(), 100);
    ///     assert_eq!(stream.set_ttl(0).unwrap_err().kind(), ErrorKind::InvalidInput);
    /// });
    /// ```
    pub fn set_ttl(&self, ttl: u32) -> io::Result<()> {
        self.fd.with(|s| s.set_ttl_v4(ttl))
    }

    /// Returns how long closing the connection waits for data that was not sent (`SO_LINGER`). The
    /// default is `None`.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    pub fn linger(&self) -> io::Result<Option<Duration>> {
        self.fd.with(|s| s.linger())
    }

    /// Sets how long closing the connection waits for data that was not sent (`SO_LINGER`), in
    /// whole seconds: a time between two of them is rounded up.
    ///
    /// With `None`, the default, closing returns at once and the kernel sends what is left. With
    /// `Some(Duration::ZERO)` what is left is lost and the other side gets a reset. With another
    /// time, [`close`](TcpStream::close) or the drop of the last handle blocks its thread until the
    /// data is acknowledged or the time has passed; other goroutines run on meanwhile.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::{ErrorKind, Read};
    /// use std::time::Duration;
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     let (mut server, _) = listener.accept().unwrap();
    ///     client.set_linger(Some(Duration::ZERO)).unwrap();
    ///     drop(client);
    ///     let error = server.read(&mut [0; 8]).unwrap_err();
    ///     assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    /// });
    /// ```
    pub fn set_linger(&self, linger: Option<Duration>) -> io::Result<()> {
        // Not down: less than a second would be 0, which loses what is left.
        let round_up = |time: Duration| {
            let seconds = time.as_secs().saturating_add(u64::from(time.subsec_nanos() != 0));
            Duration::from_secs(seconds.min(c_int::MAX as u64))
        };
        self.fd.with(|s| s.set_linger(linger.map(round_up)))
    }

    /// Returns whether this side acknowledges data at once (`TCP_QUICKACK`). std has it in
    /// [`TcpStreamExt`](std::os::linux::net::TcpStreamExt).
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    pub fn quickack(&self) -> io::Result<bool> {
        self.fd.with(|s| s.tcp_quickack())
    }

    /// Sets whether this side acknowledges data at once (`TCP_QUICKACK`). The kernel may change it
    /// back later.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](TcpStream::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{TcpListener, TcpStream};
    ///
    /// trefoil::run(|| {
    ///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    ///     let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    ///     stream.set_quickack(false).unwrap();
    ///     assert!(!stream.quickack().unwrap());
    /// });
    /// ```
    pub fn set_quickack(&self, quickack: bool) -> io::Result<()> {
        self.fd.with(|s| s.set_tcp_quickack(quickack))
    }
}

halves!(TcpStream, ReadHalf, WriteHalf);
