//! Unix domain sockets: `UnixListener`, `UnixStream`, its halves, `UnixDatagram`.
//!
//! Addresses are std's [`SocketAddr`](std::os::unix::net::SocketAddr), which only std can make from the kernel's: the
//! calls about them, which never wait, go through std's types.

use super::fd::{Call, Fd};
use super::{deadlines, halves, socket, streams};
use crate::blocking;
use crate::sched::netpoll::pollable::{BACK_OFF_MAX_NANOS, BACK_OFF_MIN_NANOS, Direction};
use rustix::net::{RecvFlags, SendFlags, SocketAddrUnix, SocketFlags};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::ManuallyDrop;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::{self as std_unix, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// std's socket with our descriptor, for a call that does not wait.
fn as_std<T: FromRawFd>(call: &Call<'_>) -> ManuallyDrop<T> {
    // SAFETY: open while the call is under way (the caller keeps it longer), and never closed by this.
    ManuallyDrop::new(unsafe { T::from_raw_fd(call.fd().as_raw_fd()) })
}

fn path_of(addr: &SocketAddr) -> io::Result<SocketAddrUnix> {
    use std::os::linux::net::SocketAddrExt;
    if let Some(path) = addr.as_pathname() {
        return Ok(SocketAddrUnix::new(path)?);
    }
    if let Some(name) = addr.as_abstract_name() {
        return Ok(SocketAddrUnix::new_abstract_name(name)?);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "an unnamed socket has no address"))
}

fn sock_addr(addr: &SocketAddr) -> io::Result<SockAddr> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    if let Some(path) = addr.as_pathname() {
        return SockAddr::unix(path);
    }
    match addr.as_abstract_name() {
        // socket2 takes a leading zero for an abstract name.
        Some(name) => SockAddr::unix(std::ffi::OsStr::from_bytes(&[b"\0", name].concat())),
        None => path_of(addr).map(|_| unreachable!("an unnamed one is an error")),
    }
}

fn new_socket(kind: Type) -> io::Result<Socket> {
    Socket::new(Domain::UNIX, kind.nonblocking().cloexec(), None)
}

fn pair(kind: Type) -> io::Result<(Arc<Fd>, Arc<Fd>)> {
    let (one, other) = Socket::pair(Domain::UNIX, kind.nonblocking().cloexec(), None)?;
    let wrap = |socket| Arc::new(Fd::new(OwnedFd::from(socket)));
    Ok((wrap(one), wrap(other)))
}

/// A Unix stream connection, like [`std::os::unix::net::UnixStream`].
///
/// A stream comes from [`connect`](UnixStream::connect), from [`UnixListener::accept`], or from
/// [`pair`](UnixStream::pair). Reads and writes park the goroutine until the kernel is ready.
/// Unlike std's, a stream has deadlines for each direction
/// ([`set_read_deadline`](UnixStream::set_read_deadline)), can be closed while other goroutines use
/// it ([`close`](UnixStream::close)), and follows a context ([`cancel_on`](UnixStream::cancel_on)).
///
/// [`Read`] and [`Write`] are also implemented for `&UnixStream`, so that one goroutine can read
/// while another writes.
///
/// # Drop
/// Dropping the stream closes the connection, unless a [`CancelGuard`](super::CancelGuard) or a
/// half of it is alive.
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
/// use trefoil::net::UnixStream;
///
/// trefoil::run(|| {
///     let (mut one, mut other) = UnixStream::pair().unwrap();
///     trefoil::go(move || one.write_all(b"hello").unwrap());
///     let mut text = String::new();
///     other.read_to_string(&mut text).unwrap();
///     assert_eq!(text, "hello");
/// });
/// ```
pub struct UnixStream {
    pub(super) fd: Arc<Fd>,
}

socket!(UnixStream, std_unix::UnixStream);
deadlines!(UnixStream);
streams!(UnixStream, &UnixStream);
halves!(UnixStream, UnixReadHalf, UnixWriteHalf);

impl UnixStream {
    /// Connects to the listener at a path.
    ///
    /// While the listener's queue is full the call waits. The kernel has no event for that, so an
    /// OS thread waits without a P, and no deadline ends the wait.
    ///
    /// # Errors
    /// - [`NotFound`](io::ErrorKind::NotFound) if there is no file at the path,
    /// - [`ConnectionRefused`](io::ErrorKind::ConnectionRefused) if no socket listens there,
    /// - [`PermissionDenied`](io::ErrorKind::PermissionDenied) if the process may not write to the
    ///   file,
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput) if the path is longer than 107 bytes,
    /// - the OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::{UnixListener, UnixStream};
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-connect-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     let error = UnixStream::connect(&path).unwrap_err();
    ///     assert_eq!(error.kind(), ErrorKind::NotFound);
    ///
    ///     let listener = UnixListener::bind(&path).unwrap();
    ///     let stream = UnixStream::connect(&path).unwrap();
    ///     assert_eq!(stream.peer_addr().unwrap().as_pathname(), Some(&*path));
    ///
    ///     drop(listener);
    ///     let error = UnixStream::connect(&path).unwrap_err();
    ///     assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn connect(path: impl AsRef<Path>) -> io::Result<UnixStream> {
        UnixStream::connect_to(&SockAddr::unix(path)?)
    }

    /// Connects to the listener at an address, which may be an abstract name.
    ///
    /// It waits as [`connect`](UnixStream::connect) does.
    ///
    /// # Errors
    /// As [`connect`](UnixStream::connect), except that an abstract name without a listener is
    /// [`ConnectionRefused`](io::ErrorKind::ConnectionRefused), and an unnamed address is
    /// [`InvalidInput`](io::ErrorKind::InvalidInput).
    ///
    /// # Examples
    /// ```
    /// use std::os::linux::net::SocketAddrExt;
    /// use std::os::unix::net::SocketAddr;
    /// use trefoil::net::{UnixListener, UnixStream};
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-connect-addr-{}", std::process::id());
    ///     let address = SocketAddr::from_abstract_name(&name).unwrap();
    ///     let listener = UnixListener::bind_addr(&address).unwrap();
    ///     let _client = UnixStream::connect_addr(&address).unwrap();
    ///     assert!(listener.accept().is_ok());
    /// });
    /// ```
    pub fn connect_addr(addr: &SocketAddr) -> io::Result<UnixStream> {
        UnixStream::connect_to(&sock_addr(addr)?)
    }

    fn connect_to(addr: &SockAddr) -> io::Result<UnixStream> {
        let socket = new_socket(Type::STREAM)?;
        match socket.connect(addr) {
            Ok(()) => {}
            // The listener's queue is full. The kernel has no event for that: a thread waits.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                socket.set_nonblocking(false)?;
                blocking(|| socket.connect(addr))?;
                socket.set_nonblocking(true)?;
            }
            Err(e) => return Err(e),
        }
        Ok(UnixStream { fd: Arc::new(Fd::new(OwnedFd::from(socket))) })
    }

    /// Makes two streams that are connected to each other.
    ///
    /// # Errors
    /// The OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// # Examples
    /// ```
    /// use std::io::{Read, Write};
    /// use trefoil::net::UnixStream;
    ///
    /// trefoil::run(|| {
    ///     let (mut one, mut other) = UnixStream::pair().unwrap();
    ///     one.write_all(b"ping").unwrap();
    ///     let mut bytes = [0; 4];
    ///     other.read_exact(&mut bytes).unwrap();
    ///     assert_eq!(&bytes, b"ping");
    /// });
    /// ```
    pub fn pair() -> io::Result<(UnixStream, UnixStream)> {
        let (one, other) = pair(Type::STREAM)?;
        Ok((UnixStream { fd: one }, UnixStream { fd: other }))
    }

    /// Returns the address of this side. It is unnamed on the side that connected.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixStream::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixStream;
    ///
    /// trefoil::run(|| {
    ///     let (one, _other) = UnixStream::pair().unwrap();
    ///     assert!(one.local_addr().unwrap().is_unnamed());
    ///     assert!(one.peer_addr().unwrap().is_unnamed());
    /// });
    /// ```
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixStream>(&self.fd.call()?).local_addr()
    }

    /// Returns the address of the other side. It is unnamed if the other side connected.
    ///
    /// The example of [`local_addr`](UnixStream::local_addr) shows both.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixStream::close).
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixStream>(&self.fd.call()?).peer_addr()
    }

    /// Ends one or both directions of the connection, for all handles of it.
    ///
    /// After [`Shutdown::Write`] the other side reads end-of-file. After [`Shutdown::Read`] reads
    /// on this side return 0 once they have read the data that arrived before. Calls that wait in
    /// such a direction end as well. The descriptor stays open until the stream is dropped or
    /// closed.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixStream::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::Read;
    /// use std::net::Shutdown;
    /// use trefoil::net::UnixStream;
    ///
    /// trefoil::run(|| {
    ///     let (one, mut other) = UnixStream::pair().unwrap();
    ///     one.shutdown(Shutdown::Write).unwrap();
    ///     assert_eq!(other.read(&mut [0; 8]).unwrap(), 0, "end-of-file");
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
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixStream::close), the error
    /// of a done context ([`cancel_on`](UnixStream::cancel_on)), and
    /// [`ConnectionReset`](io::ErrorKind::ConnectionReset) if the other side was closed before it
    /// had read everything.
    ///
    /// # Examples
    /// ```
    /// use std::io::{Read, Write};
    /// use trefoil::net::UnixStream;
    ///
    /// trefoil::run(|| {
    ///     let (mut one, mut other) = UnixStream::pair().unwrap();
    ///     one.write_all(b"hello").unwrap();
    ///     let mut bytes = [0; 5];
    ///     assert_eq!(other.peek(&mut bytes).unwrap(), 5);
    ///     assert_eq!(other.read(&mut bytes).unwrap(), 5);
    /// });
    /// ```
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.fd.io(Direction::Read, |fd| {
            rustix::net::recv(fd, &mut *buf, RecvFlags::PEEK).map(|(n, _)| n)
        })
    }
}

/// Accepts Unix stream connections, like [`std::os::unix::net::UnixListener`].
///
/// The usual server is a goroutine that accepts and starts one goroutine for each connection.
/// Unlike std's, a listener has a deadline ([`set_deadline`](UnixListener::set_deadline)) and can
/// be closed while a goroutine waits in [`accept`](UnixListener::accept).
///
/// # Drop
/// Dropping the listener closes it. As in std, the file stays: remove it before the next
/// [`bind`](UnixListener::bind).
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
/// use trefoil::net::{UnixListener, UnixStream};
///
/// trefoil::run(|| {
///     let name = format!("trefoil-listener-{}", std::process::id());
///     let path = std::env::temp_dir().join(name);
///     let listener = UnixListener::bind(&path).unwrap();
///     trefoil::go(move || listener.accept().unwrap().0.write_all(b"hello").unwrap());
///     let mut text = String::new();
///     UnixStream::connect(&path).unwrap().read_to_string(&mut text).unwrap();
///     assert_eq!(text, "hello");
///     std::fs::remove_file(&path).unwrap();
/// });
/// ```
pub struct UnixListener {
    fd: Arc<Fd>,
}

socket!(UnixListener, std_unix::UnixListener);

impl UnixListener {
    /// Makes a listener at a path, where no file may exist yet.
    ///
    /// # Errors
    /// - [`AddrInUse`](io::ErrorKind::AddrInUse) if there is a file at the path, even one that a
    ///   listener has left behind,
    /// - [`NotFound`](io::ErrorKind::NotFound) if the directory does not exist,
    /// - [`PermissionDenied`](io::ErrorKind::PermissionDenied) if the process may not write to the
    ///   directory,
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput) if the path is longer than 107 bytes,
    /// - the OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::UnixListener;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-bind-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     drop(UnixListener::bind(&path).unwrap());
    ///     let error = UnixListener::bind(&path).unwrap_err();
    ///     assert_eq!(error.kind(), ErrorKind::AddrInUse, "the file stays");
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn bind(path: impl AsRef<Path>) -> io::Result<UnixListener> {
        UnixListener::from_std(std_unix::UnixListener::bind(path)?)
    }

    /// Makes a listener at an address, which may be an abstract name.
    ///
    /// An abstract name has no file: it is free again when the listener is dropped.
    ///
    /// # Errors
    /// As [`bind`](UnixListener::bind).
    ///
    /// # Examples
    /// ```
    /// use std::os::linux::net::SocketAddrExt;
    /// use std::os::unix::net::SocketAddr;
    /// use trefoil::net::UnixListener;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-bind-addr-{}", std::process::id());
    ///     let address = SocketAddr::from_abstract_name(&name).unwrap();
    ///     let listener = UnixListener::bind_addr(&address).unwrap();
    ///     assert_eq!(listener.local_addr().unwrap().as_abstract_name(), Some(name.as_bytes()));
    /// });
    /// ```
    pub fn bind_addr(addr: &SocketAddr) -> io::Result<UnixListener> {
        UnixListener::from_std(std_unix::UnixListener::bind_addr(addr)?)
    }

    /// Waits for a connection and returns it with the address of the other side, which is usually
    /// unnamed.
    ///
    /// # Errors
    /// - [`TimedOut`](io::ErrorKind::TimedOut) after the deadline
    ///   ([`set_deadline`](UnixListener::set_deadline)),
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixListener::close),
    /// - the error of a done context ([`cancel_on`](UnixListener::cancel_on)),
    /// - the OS error `EMFILE` or `ENFILE` if no descriptor is left. The connection stays in the
    ///   queue: a server can wait a little and go on to accept.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{UnixListener, UnixStream};
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-accept-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     let listener = UnixListener::bind(&path).unwrap();
    ///     let _client = UnixStream::connect(&path).unwrap();
    ///     let (_stream, address) = listener.accept().unwrap();
    ///     assert!(address.is_unnamed());
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn accept(&self) -> io::Result<(UnixStream, SocketAddr)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = self.fd.io(Direction::Read, |fd| rustix::net::accept_with(fd, flags))?;
        let stream = UnixStream { fd: Arc::new(Fd::new(fd)) };
        let addr = stream.peer_addr()?;
        Ok((stream, addr))
    }

    /// Returns an iterator over the connections, which calls [`accept`](UnixListener::accept) for
    /// each.
    ///
    /// The iterator never ends: it yields the errors of `accept` too. A loop over it has to return
    /// at an error that persists, such as [`NotConnected`](io::ErrorKind::NotConnected) after
    /// [`close`](UnixListener::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::{UnixListener, UnixStream};
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-incoming-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     let listener = UnixListener::bind(&path).unwrap();
    ///     let clients: Vec<_> = (0..3).map(|_| UnixStream::connect(&path).unwrap()).collect();
    ///     let accepted = listener.incoming().take(clients.len());
    ///     assert_eq!(accepted.filter(Result::is_ok).count(), 3);
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn incoming(&self) -> UnixIncoming<'_> {
        UnixIncoming { listener: self }
    }

    /// Returns the address at which it listens.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixListener::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixListener;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-local-addr-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     let listener = UnixListener::bind(&path).unwrap();
    ///     assert_eq!(listener.local_addr().unwrap().as_pathname(), Some(&*path));
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixListener>(&self.fd.call()?).local_addr()
    }

    /// Sets the time at which [`accept`](UnixListener::accept) fails.
    ///
    /// An `accept` that is not done at `deadline` fails with [`TimedOut`](io::ErrorKind::TimedOut).
    /// This applies to calls that wait now and to later calls, until the caller sets another
    /// deadline. After the deadline calls fail at once, even if a connection is in the queue. With
    /// `None`, the default, there is no deadline.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixListener::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use std::time::{Duration, Instant};
    /// use trefoil::net::UnixListener;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-deadline-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     let listener = UnixListener::bind(&path).unwrap();
    ///     listener.set_deadline(Some(Instant::now() + Duration::from_millis(2))).unwrap();
    ///     assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::TimedOut);
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn set_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
        self.fd.set_deadline(Direction::Read, deadline)
    }
}

/// An iterator over the connections of a [`UnixListener`], made by [`UnixListener::incoming`].
///
/// It never ends. Its items are the results of [`UnixListener::accept`] without the address.
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
/// use trefoil::net::{UnixIncoming, UnixListener, UnixStream};
///
/// fn greet(connections: UnixIncoming<'_>) {
///     for stream in connections.map_while(Result::ok) {
///         (&stream).write_all(b"welcome").unwrap();
///     }
/// }
///
/// trefoil::run(|| {
///     let name = format!("trefoil-greet-{}", std::process::id());
///     let path = std::env::temp_dir().join(name);
///     let listener = UnixListener::bind(&path).unwrap();
///     trefoil::go(move || greet(listener.incoming()));
///     let mut text = String::new();
///     UnixStream::connect(&path).unwrap().read_to_string(&mut text).unwrap();
///     assert_eq!(text, "welcome");
///     std::fs::remove_file(&path).unwrap();
/// });
/// ```
#[derive(Debug)]
pub struct UnixIncoming<'a> {
    listener: &'a UnixListener,
}

impl Iterator for UnixIncoming<'_> {
    type Item = io::Result<UnixStream>;

    fn next(&mut self) -> Option<io::Result<UnixStream>> {
        Some(self.listener.accept().map(|(stream, _)| stream))
    }
}

/// A Unix datagram socket, like [`std::os::unix::net::UnixDatagram`].
///
/// Unix datagrams arrive in order, and none are lost: a send parks the goroutine while the queue of
/// the receiving socket is full, and a receive parks it until a datagram arrives. Unlike std's, a
/// socket has deadlines, can be closed by another goroutine, and follows a context.
///
/// # Drop
/// Dropping the socket closes it. As in std, the file of a bound socket stays.
///
/// # Examples
/// ```
/// use trefoil::net::UnixDatagram;
///
/// trefoil::run(|| {
///     let (one, other) = UnixDatagram::pair().unwrap();
///     trefoil::go(move || one.send(b"hello").unwrap());
///     let mut bytes = [0; 16];
///     let n = other.recv(&mut bytes).unwrap();
///     assert_eq!(&bytes[..n], b"hello");
/// });
/// ```
pub struct UnixDatagram {
    fd: Arc<Fd>,
}

socket!(UnixDatagram, std_unix::UnixDatagram);
deadlines!(UnixDatagram);

impl UnixDatagram {
    /// Makes a socket at a path, where no file may exist yet.
    ///
    /// # Errors
    /// - [`AddrInUse`](io::ErrorKind::AddrInUse) if there is a file at the path, even one that a
    ///   socket has left behind,
    /// - [`NotFound`](io::ErrorKind::NotFound) if the directory does not exist,
    /// - [`PermissionDenied`](io::ErrorKind::PermissionDenied) if the process may not write to the
    ///   directory,
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput) if the path is longer than 107 bytes,
    /// - the OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-dgram-bind-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     let socket = UnixDatagram::bind(&path).unwrap();
    ///     assert_eq!(socket.local_addr().unwrap().as_pathname(), Some(&*path));
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn bind(path: impl AsRef<Path>) -> io::Result<UnixDatagram> {
        UnixDatagram::from_std(std_unix::UnixDatagram::bind(path)?)
    }

    /// Makes a socket at an address, which may be an abstract name.
    ///
    /// # Errors
    /// As [`bind`](UnixDatagram::bind).
    ///
    /// # Examples
    /// ```
    /// use std::os::linux::net::SocketAddrExt;
    /// use std::os::unix::net::SocketAddr;
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-dgram-bind-addr-{}", std::process::id());
    ///     let address = SocketAddr::from_abstract_name(&name).unwrap();
    ///     let server = UnixDatagram::bind_addr(&address).unwrap();
    ///     let client = UnixDatagram::unbound().unwrap();
    ///     client.send_to_addr(b"hello", &address).unwrap();
    ///     assert_eq!(server.recv(&mut [0; 16]).unwrap(), 5);
    /// });
    /// ```
    pub fn bind_addr(addr: &SocketAddr) -> io::Result<UnixDatagram> {
        UnixDatagram::from_std(std_unix::UnixDatagram::bind_addr(addr)?)
    }

    /// Makes a socket without an address. It can send, but other sockets cannot send to it.
    ///
    /// # Errors
    /// The OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let socket = UnixDatagram::unbound().unwrap();
    ///     assert!(socket.local_addr().unwrap().is_unnamed());
    /// });
    /// ```
    pub fn unbound() -> io::Result<UnixDatagram> {
        Ok(UnixDatagram { fd: Arc::new(Fd::new(OwnedFd::from(new_socket(Type::DGRAM)?))) })
    }

    /// Makes two sockets that are connected to each other.
    ///
    /// # Errors
    /// The OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let (one, other) = UnixDatagram::pair().unwrap();
    ///     one.send(b"ping").unwrap();
    ///     assert_eq!(other.recv(&mut [0; 16]).unwrap(), 4);
    /// });
    /// ```
    pub fn pair() -> io::Result<(UnixDatagram, UnixDatagram)> {
        let (one, other) = pair(Type::DGRAM)?;
        Ok((UnixDatagram { fd: one }, UnixDatagram { fd: other }))
    }

    /// Sets the path to which [`send`](UnixDatagram::send) sends.
    ///
    /// From now on the socket receives datagrams from that socket only. The call does not wait.
    ///
    /// # Errors
    /// - [`NotFound`](io::ErrorKind::NotFound) if there is no file at the path,
    /// - [`ConnectionRefused`](io::ErrorKind::ConnectionRefused) if no socket is bound to the file,
    /// - [`PermissionDenied`](io::ErrorKind::PermissionDenied) if the process may not write to the
    ///   file, or if the socket there is connected to another one,
    /// - the OS error `EPROTOTYPE` if the socket there is not a datagram socket,
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput) if the path is longer than 107 bytes,
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixDatagram::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-dgram-connect-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     let client = UnixDatagram::unbound().unwrap();
    ///     assert_eq!(client.connect(&path).unwrap_err().kind(), ErrorKind::NotFound);
    ///
    ///     let server = UnixDatagram::bind(&path).unwrap();
    ///     client.connect(&path).unwrap();
    ///     client.send(b"hello").unwrap();
    ///     assert_eq!(server.recv(&mut [0; 16]).unwrap(), 5);
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn connect(&self, path: impl AsRef<Path>) -> io::Result<()> {
        self.fd.with(|s| s.connect(&SockAddr::unix(path)?))
    }

    /// Sets the address to which [`send`](UnixDatagram::send) sends. It may be an abstract name.
    ///
    /// From now on the socket receives datagrams from that socket only. The call does not wait.
    ///
    /// # Errors
    /// As [`connect`](UnixDatagram::connect), except that an abstract name without a socket is
    /// [`ConnectionRefused`](io::ErrorKind::ConnectionRefused), and an unnamed address is
    /// [`InvalidInput`](io::ErrorKind::InvalidInput).
    ///
    /// # Examples
    /// ```
    /// use std::os::linux::net::SocketAddrExt;
    /// use std::os::unix::net::SocketAddr;
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-dgram-connect-addr-{}", std::process::id());
    ///     let address = SocketAddr::from_abstract_name(&name).unwrap();
    ///     let server = UnixDatagram::bind_addr(&address).unwrap();
    ///     let client = UnixDatagram::unbound().unwrap();
    ///     client.connect_addr(&address).unwrap();
    ///     client.send(b"hello").unwrap();
    ///     assert_eq!(server.recv(&mut [0; 16]).unwrap(), 5);
    /// });
    /// ```
    pub fn connect_addr(&self, addr: &SocketAddr) -> io::Result<()> {
        self.fd.with(|s| s.connect(&sock_addr(addr)?))
    }

    /// Sends a datagram to the connected socket, and returns its length.
    ///
    /// The goroutine waits while the queue of that socket is full.
    ///
    /// # Errors
    /// - [`NotConnected`](io::ErrorKind::NotConnected) if the socket is not
    ///   [connected](UnixDatagram::connect), and after [`close`](UnixDatagram::close),
    /// - [`ConnectionRefused`](io::ErrorKind::ConnectionRefused) if the connected socket was
    ///   closed,
    /// - the OS error `EMSGSIZE` if the datagram is larger than the send buffer,
    /// - [`TimedOut`](io::ErrorKind::TimedOut) after the write deadline or timeout,
    /// - the error of a done context ([`cancel_on`](UnixDatagram::cancel_on)).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use std::time::Duration;
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let (one, _other) = UnixDatagram::pair().unwrap();
    ///     assert_eq!(one.send(b"hello").unwrap(), 5);
    ///
    ///     // The other side does not receive: its queue fills up, and then a send waits.
    ///     one.set_write_timeout(Some(Duration::from_millis(2))).unwrap();
    ///     let error = loop {
    ///         if let Err(error) = one.send(b"hello") {
    ///             break error;
    ///         }
    ///     };
    ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
    /// });
    /// ```
    pub fn send(&self, buf: &[u8]) -> io::Result<usize> {
        self.fd.io(Direction::Write, |fd| rustix::net::send(fd, buf, SendFlags::NOSIGNAL))
    }

    /// Sends a datagram to the socket at a path, and returns its length.
    ///
    /// The goroutine waits while the queue of that socket is full. The kernel has no event for
    /// that, so the goroutine tries again at intervals of up to 5 ms. It checks the write deadline,
    /// `close` and contexts only when it has to wait: a send that succeeds at once is not refused
    /// after the deadline.
    ///
    /// # Errors
    /// - [`NotFound`](io::ErrorKind::NotFound) if there is no file at the path,
    /// - [`ConnectionRefused`](io::ErrorKind::ConnectionRefused) if no socket is bound to the file,
    /// - [`PermissionDenied`](io::ErrorKind::PermissionDenied) if the process may not write to the
    ///   file, or if the socket there is connected to another one,
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput) if the path is too long for an address,
    /// - the OS error `EMSGSIZE` if the datagram is larger than the send buffer,
    /// - [`TimedOut`](io::ErrorKind::TimedOut) after the write deadline or timeout,
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixDatagram::close), and
    ///   the error of a done context ([`cancel_on`](UnixDatagram::cancel_on)).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let name = format!("trefoil-send-to-{}", std::process::id());
    ///     let path = std::env::temp_dir().join(name);
    ///     let server = UnixDatagram::bind(&path).unwrap();
    ///     let client = UnixDatagram::unbound().unwrap();
    ///     assert_eq!(client.send_to(b"hello", &path).unwrap(), 5);
    ///     assert_eq!(server.recv(&mut [0; 16]).unwrap(), 5);
    ///     std::fs::remove_file(&path).unwrap();
    /// });
    /// ```
    pub fn send_to(&self, buf: &[u8], path: impl AsRef<Path>) -> io::Result<usize> {
        self.transmit(buf, &SocketAddrUnix::new(path.as_ref())?)
    }

    /// Sends a datagram to the socket at an address, which may be an abstract name, and returns its
    /// length.
    ///
    /// It waits as [`send_to`](UnixDatagram::send_to) does. Use it to answer the sender that
    /// [`recv_from`](UnixDatagram::recv_from) returned.
    ///
    /// # Errors
    /// As [`send_to`](UnixDatagram::send_to), except that an abstract name without a socket is
    /// [`ConnectionRefused`](io::ErrorKind::ConnectionRefused), and an unnamed address is
    /// [`InvalidInput`](io::ErrorKind::InvalidInput).
    ///
    /// # Examples
    /// ```
    /// use std::os::linux::net::SocketAddrExt;
    /// use std::os::unix::net::SocketAddr;
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let address = |side| {
    ///         let name = format!("trefoil-{side}-{}", std::process::id());
    ///         SocketAddr::from_abstract_name(name).unwrap()
    ///     };
    ///     let server = UnixDatagram::bind_addr(&address("server")).unwrap();
    ///     let client = UnixDatagram::bind_addr(&address("client")).unwrap();
    ///     client.send_to_addr(b"ping", &address("server")).unwrap();
    ///     let (_, from) = server.recv_from(&mut [0; 16]).unwrap();
    ///     server.send_to_addr(b"pong", &from).unwrap();
    ///     assert_eq!(client.recv(&mut [0; 16]).unwrap(), 4);
    /// });
    /// ```
    pub fn send_to_addr(&self, buf: &[u8], addr: &SocketAddr) -> io::Result<usize> {
        self.transmit(buf, &path_of(addr)?)
    }

    /// The kernel reports room only in the queue of the socket that this one is connected to. For any other it
    /// is asked again and again.
    fn transmit(&self, buf: &[u8], to: &SocketAddrUnix) -> io::Result<usize> {
        let call = self.fd.call()?;
        match rustix::net::sendto(call.fd(), buf, SendFlags::NOSIGNAL, to) {
            Err(rustix::io::Errno::AGAIN) => {}
            result => return Ok(result?),
        }
        let limit = self.fd.limit(Direction::Write);
        let mut pause = BACK_OFF_MIN_NANOS;
        loop {
            crate::time::sleep(Duration::from_nanos(pause));
            pause = (pause * 2).min(BACK_OFF_MAX_NANOS);
            self.fd.check(Direction::Write, limit)?;
            match rustix::net::sendto(call.fd(), buf, SendFlags::NOSIGNAL, to) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// Waits for a datagram and returns its length.
    ///
    /// The part of a datagram that does not fit into `buf` is lost.
    ///
    /// # Errors
    /// [`TimedOut`](io::ErrorKind::TimedOut) after the read deadline or timeout,
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixDatagram::close), and the
    /// error of a done context ([`cancel_on`](UnixDatagram::cancel_on)).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let (one, other) = UnixDatagram::pair().unwrap();
    ///     one.send(b"a long datagram").unwrap();
    ///     let mut bytes = [0; 6];
    ///     assert_eq!(other.recv(&mut bytes).unwrap(), 6);
    ///     assert_eq!(&bytes, b"a long", "the rest is lost");
    /// });
    /// ```
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.fd.io(Direction::Read, |fd| {
            rustix::net::recv(fd, &mut *buf, RecvFlags::empty()).map(|(n, _)| n)
        })
    }

    /// Waits for a datagram as [`recv`](UnixDatagram::recv) does, and leaves it for the next
    /// receive.
    ///
    /// # Errors
    /// As [`recv`](UnixDatagram::recv).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let (one, other) = UnixDatagram::pair().unwrap();
    ///     one.send(b"hello").unwrap();
    ///     assert_eq!(other.peek(&mut [0; 16]).unwrap(), 5);
    ///     assert_eq!(other.recv(&mut [0; 16]).unwrap(), 5);
    /// });
    /// ```
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.fd.io(Direction::Read, |fd| {
            rustix::net::recv(fd, &mut *buf, RecvFlags::PEEK).map(|(n, _)| n)
        })
    }

    /// Waits for a datagram and returns its length and the address of its sender.
    ///
    /// The address is unnamed if the sender is not bound. The part of a datagram that does not fit
    /// into `buf` is lost.
    ///
    /// # Errors
    /// As [`recv`](UnixDatagram::recv).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let (one, other) = UnixDatagram::pair().unwrap();
    ///     one.send(b"hello").unwrap();
    ///     let (n, from) = other.recv_from(&mut [0; 16]).unwrap();
    ///     assert_eq!(n, 5);
    ///     assert!(from.is_unnamed());
    /// });
    /// ```
    pub fn recv_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let call = self.fd.call()?;
        let socket = as_std::<std_unix::UnixDatagram>(&call);
        self.fd.io(Direction::Read, |_| {
            socket.recv_from(buf).map_err(|e| {
                rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::INVAL)
            })
        })
    }

    /// Ends one or both directions of the socket.
    ///
    /// After [`Shutdown::Write`] sends fail with [`BrokenPipe`](io::ErrorKind::BrokenPipe). After
    /// [`Shutdown::Read`] sends of the other side fail with `BrokenPipe`. Unlike in std, a receive
    /// that finds no datagram still waits after [`Shutdown::Read`]: use
    /// [`close`](UnixDatagram::close) to end it.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixDatagram::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use std::net::Shutdown;
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let (one, _other) = UnixDatagram::pair().unwrap();
    ///     one.shutdown(Shutdown::Write).unwrap();
    ///     assert_eq!(one.send(b"late").unwrap_err().kind(), ErrorKind::BrokenPipe);
    /// });
    /// ```
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.fd.with(|s| s.shutdown(how))
    }

    /// Returns the address of this socket. It is unnamed if the socket is not bound.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixDatagram::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let socket = UnixDatagram::unbound().unwrap();
    ///     assert!(socket.local_addr().unwrap().is_unnamed());
    /// });
    /// ```
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixDatagram>(&self.fd.call()?).local_addr()
    }

    /// Returns the address of the connected socket.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) if the socket is not
    /// [connected](UnixDatagram::connect), and after [`close`](UnixDatagram::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::UnixDatagram;
    ///
    /// trefoil::run(|| {
    ///     let socket = UnixDatagram::unbound().unwrap();
    ///     assert_eq!(socket.peer_addr().unwrap_err().kind(), ErrorKind::NotConnected);
    /// });
    /// ```
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixDatagram>(&self.fd.call()?).peer_addr()
    }
}
