//! TCP: `TcpListener`, `TcpStream` and its halves.

use super::fd::Fd;
use super::macros::{async_streams, deadlines, halves, readiness, socket, streams};
use super::resolve::{no_address, resolve};
use crate::chan;
use crate::goroutine::go;
use crate::sched::current_g;
use crate::sched::netpoll::pollable::Direction;
#[cfg(feature = "std")]
use crate::simnet;
use crate::sys::clock::{self, NEVER, Nanos};
use crate::time::sleep_async;
use rustix::net::{RecvFlags, SocketAddrAny, SocketFlags};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use std::fmt;
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

/// Connections that may wait to be accepted. std uses the same number.
const BACKLOG: i32 = 4096;
/// Head start of an address before the next one is tried, as RFC 8305 recommends.
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

/// A TCP connection, like [`std::net::TcpStream`].
///
/// A stream comes from [`connect`](TcpStream::connect) or from [`TcpListener::accept`]. Reads and
/// writes park the goroutine until the kernel is ready. Unlike std's, a stream has deadlines for
/// each direction ([`set_read_deadline`](TcpStream::set_read_deadline)), can be closed while other
/// goroutines use it ([`close`](TcpStream::close)), and follows a context
/// ([`cancel_on`](TcpStream::cancel_on)).
///
/// [`Read`] and [`Write`] are also implemented for `&TcpStream`, so that one goroutine can read
/// while another writes.
///
/// # Drop
/// Dropping the stream closes the connection, unless a [`CancelGuard`](super::CancelGuard) or a
/// half of it is alive.
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
    pub(super) fd: Arc<Fd>,
}

socket!(TcpStream, std::net::TcpStream);
deadlines!(TcpStream);
streams!(TcpStream, &TcpStream);
async_streams!(TcpStream);
readiness!(TcpStream);

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

/// Converts socket2's address.
pub(super) fn std_addr(addr: socket2::SockAddr) -> io::Result<SocketAddr> {
    addr.as_socket().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not an IP address"))
}

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
        let addrs = resolve(addr)?;
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
                    Ok(false) => Err(rustix::io::Errno::AGAIN),
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

    fn connect_until(addrs: Vec<SocketAddr>, deadline: Nanos) -> io::Result<TcpStream> {
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
        self.fd.io(Direction::Read, |fd| {
            rustix::net::recv(fd, &mut *buf, RecvFlags::PEEK).map(|(n, _)| n)
        })
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
    /// whole seconds.
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
        self.fd.with(|s| s.set_linger(linger))
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
    ///     let server = trefoil::task::spawn(async move { listener.accept_async().await.unwrap().1 });
    ///     let client = TcpStream::connect(address).unwrap();
    ///     assert_eq!(server.join().unwrap(), client.local_addr().unwrap());
    /// });
    /// ```
    pub async fn accept_async(&self) -> io::Result<(TcpStream, SocketAddr)> {
        self.accepted(self.fd.io_async(Direction::Read, TcpListener::attempt_accept).await?)
    }

    fn attempt_accept(fd: BorrowedFd<'_>) -> rustix::io::Result<(OwnedFd, Option<SocketAddrAny>)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        loop {
            match rustix::net::acceptfrom_with(fd, flags) {
                // The other side has given up. Take the next connection.
                Err(rustix::io::Errno::CONNABORTED) => {}
                result => return result,
            }
        }
    }

    fn accepted(
        &self,
        (fd, addr): (OwnedFd, Option<SocketAddrAny>),
    ) -> io::Result<(TcpStream, SocketAddr)> {
        #[cfg(feature = "std")]
        if let Some(network) = simnet::here()
            && let Some(addr) = network.accepted(fd.as_raw_fd())
        {
            return Ok((TcpStream { fd: Arc::new(Fd::new_accepted(fd, &self.fd)) }, addr));
        }
        let addr = addr
            .ok_or_else(|| io::Error::other("a connection without an address"))?
            .try_into()
            .map_err(io::Error::from)?;
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
