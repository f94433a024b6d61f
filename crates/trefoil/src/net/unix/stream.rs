//! `UnixStream` and its halves.

use super::ancillary::{Received, UCred, ancillary, recv_message, send_message};
use super::{pair, raw_addr, with_std};
use crate::blocking::blocking;
use crate::net::fd::Fd;
use crate::net::macros::{async_streams, deadlines, halves, readiness, socket, streams};
use crate::sched::netpoll::pollable::Direction;
use crate::sys::syscalls::{self, Errno};
use socket2::{SockAddr, Type};
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::{self as std_unix, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A Unix stream connection, like [`std::os::unix::net::UnixStream`].
///
/// A stream comes from [`connect`](UnixStream::connect), from
/// [`UnixListener::accept`](crate::net::UnixListener::accept), or from
/// [`pair`](UnixStream::pair). Reads and writes park the goroutine until the kernel is ready.
/// Unlike std's, a stream has deadlines for each direction
/// ([`set_read_deadline`](UnixStream::set_read_deadline)), can be closed while other goroutines use
/// it ([`close`](UnixStream::close)), and follows a context ([`cancel_on`](UnixStream::cancel_on)).
///
/// [`Read`] and [`Write`] are also implemented for `&UnixStream`, so that one goroutine can read
/// while another writes.
///
/// # Drop
/// Dropping the stream closes the connection, unless a [`CancelGuard`](crate::net::CancelGuard) or
/// a half of it is alive.
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
    pub(in crate::net) fd: Arc<Fd>,
}

socket!(UnixStream, std_unix::UnixStream);
deadlines!(UnixStream);
streams!(UnixStream, &UnixStream);
async_streams!(UnixStream);
readiness!(UnixStream);
ancillary!(UnixStream);
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
        UnixStream::connect_to(&raw_addr(addr)?)
    }

    /// Connects to the listener at `path`, in async code.
    ///
    /// The kernel has no event for a listener whose queue is full. In that case the poll blocks
    /// until there is room; other tasks run on meanwhile.
    ///
    /// # Errors
    /// As [`connect`](UnixStream::connect).
    ///
    /// # Cancel
    /// Dropping the future closes the connection.
    pub async fn connect_async(path: impl AsRef<Path>) -> io::Result<UnixStream> {
        UnixStream::connect(path)
    }

    fn connect_to(addr: &SockAddr) -> io::Result<UnixStream> {
        let socket = super::new_socket(Type::STREAM)?;
        match socket.connect(addr) {
            Ok(()) => {}
            // The listener's queue is full, and the kernel has no event for that.
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
        with_std(&self.fd, std_unix::UnixStream::local_addr)
    }

    /// Returns the address of the other side. It is unnamed if the other side connected.
    ///
    /// The example of [`local_addr`](UnixStream::local_addr) shows both.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UnixStream::close).
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        with_std(&self.fd, std_unix::UnixStream::peer_addr)
    }

    /// Ends one or both directions of the connection, for all handles of it.
    ///
    /// After [`Shutdown::Write`] the other side reads end-of-file. After [`Shutdown::Read`] reads
    /// on this side return 0 once they have read the data that arrived before. Calls that wait in
    /// such a direction end as well. The descriptor stays open until the stream is dropped.
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
        self.fd.io(Direction::Read, |fd| syscalls::recv(fd, &mut *buf, libc::MSG_PEEK))
    }

    /// Returns the user, group and process of the other side, as they were when it connected or
    /// made the pair (`SO_PEERCRED`).
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
    ///     let peer = one.peer_cred().unwrap();
    ///     assert_eq!(peer.pid, Some(std::process::id() as i32));
    /// });
    /// ```
    pub fn peer_cred(&self) -> io::Result<UCred> {
        UCred::of_peer(self.fd.call()?.fd())
    }

    /// Makes an attempt to receive.
    fn recv_message(
        &self,
        fd: BorrowedFd<'_>,
        bufs: &mut [IoSliceMut<'_>],
        max_fds: usize,
    ) -> Result<Received, Errno> {
        recv_message(fd, bufs, max_fds, 0)
    }

    /// Makes an attempt to send. A stream has no place for descriptors without a byte.
    fn send_message(
        &self,
        fd: BorrowedFd<'_>,
        bufs: &[IoSlice<'_>],
        fds: &[BorrowedFd<'_>],
    ) -> Result<usize, Errno> {
        if !fds.is_empty() && bufs.iter().all(|buf| buf.is_empty()) {
            return Err(Errno::INVAL);
        }
        send_message(fd, bufs, fds)
    }
}
