//! Unix domain sockets: `UnixListener`, `UnixStream`, its halves, `UnixDatagram`.
//!
//! Addresses are std's [`SocketAddr`](std::os::unix::net::SocketAddr), which only std can make from the kernel's: the
//! calls about them, which never wait, go through std's types.

use super::fd::{Call, Fd};
use super::{deadlines, halves, socket, streams};
use crate::blocking;
use crate::sched::pollable::{BACK_OFF_MAX_NANOS, BACK_OFF_MIN_NANOS, Side};
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

/// A Unix stream socket, like [`std::os::unix::net::UnixStream`].
///
/// ```
/// use std::io::{Read, Write};
/// use trefoil::net::UnixStream;
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
    /// Connects to a socket in the file system.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect(path: impl AsRef<Path>) -> io::Result<UnixStream> {
        UnixStream::connect_to(&SockAddr::unix(path)?)
    }

    /// Connects to an address, which may be an abstract name.
    ///
    /// # Errors
    /// The kernel's.
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

    /// Two sockets that are connected to each other.
    ///
    /// # Errors
    /// If no descriptors are left.
    pub fn pair() -> io::Result<(UnixStream, UnixStream)> {
        let (one, other) = pair(Type::STREAM)?;
        Ok((UnixStream { fd: one }, UnixStream { fd: other }))
    }

    /// This side's address.
    ///
    /// # Errors
    /// The kernel's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixStream>(&self.fd.call()?).local_addr()
    }

    /// The other side's address.
    ///
    /// # Errors
    /// The kernel's.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixStream>(&self.fd.call()?).peer_addr()
    }

    /// Ends one or both directions of the connection.
    ///
    /// # Errors
    /// The kernel's.
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
}

/// Accepts Unix stream connections, like [`std::os::unix::net::UnixListener`].
///
/// ```
/// use std::io::{Read, Write};
/// use trefoil::net::{UnixListener, UnixStream};
/// trefoil::run(|| {
///     let path = std::env::temp_dir().join(format!("trefoil-doc-{}", std::process::id()));
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
    /// Listens at a path, where there must be nothing yet. The file stays when the listener goes.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bind(path: impl AsRef<Path>) -> io::Result<UnixListener> {
        UnixListener::from_std(std_unix::UnixListener::bind(path)?)
    }

    /// Listens at an address, which may be an abstract name.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bind_addr(addr: &SocketAddr) -> io::Result<UnixListener> {
        UnixListener::from_std(std_unix::UnixListener::bind_addr(addr)?)
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// The kernel's; above all "too many open files", after which accepting may go on.
    pub fn accept(&self) -> io::Result<(UnixStream, SocketAddr)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = self.fd.io(Side::Read, |fd| rustix::net::accept_with(fd, flags))?;
        let stream = UnixStream { fd: Arc::new(Fd::new(fd)) };
        let addr = stream.peer_addr()?;
        Ok((stream, addr))
    }

    /// The connections, one after the other, without end.
    pub fn incoming(&self) -> UnixIncoming<'_> {
        UnixIncoming { listener: self }
    }

    /// The address it listens at.
    ///
    /// # Errors
    /// The kernel's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixListener>(&self.fd.call()?).local_addr()
    }

    /// `accept` fails with `TimedOut` from `deadline` on. None: it waits for ever.
    ///
    /// # Errors
    /// If it is closed.
    pub fn set_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
        self.fd.set_deadline(Side::Read, deadline)
    }
}

/// Connections of a [`UnixListener`]: see [`UnixListener::incoming`].
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
/// ```
/// use trefoil::net::UnixDatagram;
/// trefoil::run(|| {
///     let (one, other) = UnixDatagram::pair().unwrap();
///     trefoil::go(move || one.send(b"hello").unwrap());
///     let mut bytes = [0; 16];
///     assert_eq!(other.recv(&mut bytes).unwrap(), 5);
/// });
/// ```
pub struct UnixDatagram {
    fd: Arc<Fd>,
}

socket!(UnixDatagram, std_unix::UnixDatagram);
deadlines!(UnixDatagram);

impl UnixDatagram {
    /// A socket at a path, where there must be nothing yet.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bind(path: impl AsRef<Path>) -> io::Result<UnixDatagram> {
        UnixDatagram::from_std(std_unix::UnixDatagram::bind(path)?)
    }

    /// A socket at an address, which may be an abstract name.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bind_addr(addr: &SocketAddr) -> io::Result<UnixDatagram> {
        UnixDatagram::from_std(std_unix::UnixDatagram::bind_addr(addr)?)
    }

    /// A socket without an address.
    ///
    /// # Errors
    /// If no descriptor is left.
    pub fn unbound() -> io::Result<UnixDatagram> {
        Ok(UnixDatagram { fd: Arc::new(Fd::new(OwnedFd::from(new_socket(Type::DGRAM)?))) })
    }

    /// Two sockets that are connected to each other.
    ///
    /// # Errors
    /// If no descriptors are left.
    pub fn pair() -> io::Result<(UnixDatagram, UnixDatagram)> {
        let (one, other) = pair(Type::DGRAM)?;
        Ok((UnixDatagram { fd: one }, UnixDatagram { fd: other }))
    }

    /// From now on it sends to this path, and receives from it alone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect(&self, path: impl AsRef<Path>) -> io::Result<()> {
        self.fd.with(|s| s.connect(&SockAddr::unix(path)?))
    }

    /// From now on it sends to this address, and receives from it alone.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connect_addr(&self, addr: &SocketAddr) -> io::Result<()> {
        self.fd.with(|s| s.connect(&sock_addr(addr)?))
    }

    /// Sends a datagram to the socket it is connected to. Waits while that one's queue is full.
    ///
    /// # Errors
    /// The kernel's.
    pub fn send(&self, buf: &[u8]) -> io::Result<usize> {
        self.fd.io(Side::Write, |fd| rustix::net::send(fd, buf, SendFlags::NOSIGNAL))
    }

    /// Sends a datagram to the socket at a path. Waits while that one's queue is full.
    ///
    /// # Errors
    /// The kernel's.
    pub fn send_to(&self, buf: &[u8], path: impl AsRef<Path>) -> io::Result<usize> {
        self.transmit(buf, &SocketAddrUnix::new(path.as_ref())?)
    }

    /// Sends a datagram to the socket at an address. Waits while that one's queue is full.
    ///
    /// # Errors
    /// The kernel's.
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
        let limit = self.fd.limit(Side::Write);
        let mut pause = BACK_OFF_MIN_NANOS;
        loop {
            crate::time::sleep(Duration::from_nanos(pause));
            pause = (pause * 2).min(BACK_OFF_MAX_NANOS);
            self.fd.check(Side::Write, limit)?;
            match rustix::net::sendto(call.fd(), buf, SendFlags::NOSIGNAL, to) {
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }

    /// Receives a datagram. What does not fit is lost.
    ///
    /// # Errors
    /// The kernel's.
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.fd.io(Side::Read, |fd| {
            rustix::net::recv(fd, &mut *buf, RecvFlags::empty()).map(|(n, _)| n)
        })
    }

    /// As [`recv`](UnixDatagram::recv), and leaves the datagram there.
    ///
    /// # Errors
    /// The kernel's.
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.fd
            .io(Side::Read, |fd| rustix::net::recv(fd, &mut *buf, RecvFlags::PEEK).map(|(n, _)| n))
    }

    /// Receives a datagram, and says from where. What does not fit is lost.
    ///
    /// # Errors
    /// The kernel's.
    pub fn recv_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let call = self.fd.call()?;
        let socket = as_std::<std_unix::UnixDatagram>(&call);
        self.fd.io(Side::Read, |_| {
            socket.recv_from(buf).map_err(|e| {
                rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::INVAL)
            })
        })
    }

    /// Ends one or both directions.
    ///
    /// # Errors
    /// The kernel's.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.fd.with(|s| s.shutdown(how))
    }

    /// Its own address.
    ///
    /// # Errors
    /// The kernel's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixDatagram>(&self.fd.call()?).local_addr()
    }

    /// The address it is connected to.
    ///
    /// # Errors
    /// If it is not connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        as_std::<std_unix::UnixDatagram>(&self.fd.call()?).peer_addr()
    }
}
