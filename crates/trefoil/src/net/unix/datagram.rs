//! `UnixDatagram`.

use super::ancillary::{Received, ancillary, recv_message, send_message};
use super::{pair, raw_addr, unnamed_addr, with_std};
use crate::net::fd::Fd;
use crate::net::macros::{deadlines, readiness, socket};
use crate::sched::netpoll::pollable::{BACK_OFF_MAX_NANOS, BACK_OFF_MIN_NANOS, Direction};
use crate::sys::clock::NEVER;
use crate::sys::syscalls::{self, Errno};
use crate::time::{sleep, sleep_async};
use socket2::{SockAddr, Type};
use std::ffi::c_int;
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::{self as std_unix, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

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
readiness!(UnixDatagram);
ancillary!(UnixDatagram);

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
        Ok(UnixDatagram { fd: Arc::new(Fd::new(OwnedFd::from(super::new_socket(Type::DGRAM)?))) })
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
        self.fd.with(|s| s.connect(&raw_addr(addr)?))
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
        self.fd.io(Direction::Write, |fd| syscalls::send(fd, buf))
    }

    /// Sends a datagram to the socket at a path, and returns its length.
    ///
    /// The goroutine waits while the queue of that socket is full. The kernel has no event for
    /// that, so the goroutine tries again at intervals of up to 5 ms. It checks the write deadline,
    /// `close` and contexts before each attempt.
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
        self.send_to_addr(buf, &SocketAddr::from_pathname(path)?)
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
        self.send_with_pauses(buf, &raw_addr(addr)?)
    }

    /// Sends, with pauses while the queue of the receiver is full. The kernel reports room only in
    /// the queue of the connected socket.
    fn send_with_pauses(&self, buf: &[u8], to: &SockAddr) -> io::Result<usize> {
        let call = self.fd.call()?;
        let mut limit = NEVER;
        let mut pause = BACK_OFF_MIN_NANOS;
        loop {
            self.fd.check(Direction::Write, limit)?;
            match syscalls::sendto(call.fd(), buf, to) {
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                result => return Ok(result?),
            }
            if self.fd.refuses_to_wait() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            if limit == NEVER {
                limit = self.fd.limit(Direction::Write);
            }
            sleep(Duration::from_nanos(pause));
            pause = (pause * 2).min(BACK_OFF_MAX_NANOS);
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
        self.receive(buf, 0)
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
        self.receive(buf, libc::MSG_PEEK)
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
        self.receive_with_address(|fd| recv_from(fd, buf))
    }

    /// Waits for a datagram as [`recv_from`](UnixDatagram::recv_from) does, and leaves it for the
    /// next receive.
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
    ///     let (n, from) = other.peek_from(&mut [0; 16]).unwrap();
    ///     assert_eq!((n, from.is_unnamed()), (5, true));
    ///     assert_eq!(other.recv(&mut [0; 16]).unwrap(), 5);
    /// });
    /// ```
    pub fn peek_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_with_address(|fd| peek_from(fd, buf))
    }

    fn receive_with_address(
        &self,
        attempt: impl FnMut(BorrowedFd<'_>) -> Result<(usize, SocketAddr), Errno>,
    ) -> io::Result<(usize, SocketAddr)> {
        match self.receive_unless_shut(attempt)? {
            Some(received) => Ok(received),
            None => Ok((0, unnamed_addr()?)),
        }
    }

    /// Sends a datagram to the connected address, in async code.
    ///
    /// # Errors
    /// As [`send`](UnixDatagram::send).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was sent.
    pub async fn send_async(&self, buf: &[u8]) -> io::Result<usize> {
        let send = |fd: BorrowedFd<'_>| syscalls::send(fd, buf);
        self.fd.io_async(Direction::Write, send).await
    }

    /// Sends a datagram to the socket at `path`, in async code.
    ///
    /// # Errors
    /// As [`send_to`](UnixDatagram::send_to).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was sent.
    pub async fn send_to_async(&self, buf: &[u8], path: impl AsRef<Path>) -> io::Result<usize> {
        let to = raw_addr(&SocketAddr::from_pathname(path)?)?;
        let mut limit = NEVER;
        let mut pause = BACK_OFF_MIN_NANOS;
        loop {
            {
                let call = self.fd.call()?;
                self.fd.check(Direction::Write, limit)?;
                match syscalls::sendto(call.fd(), buf, &to) {
                    Err(Errno::AGAIN) => {}
                    Err(Errno::INTR) => continue,
                    result => return Ok(result?),
                }
            }
            if limit == NEVER {
                limit = self.fd.limit(Direction::Write);
            }
            // As in `send_with_pauses`: no event follows.
            sleep_async(Duration::from_nanos(pause)).await;
            pause = (pause * 2).min(BACK_OFF_MAX_NANOS);
        }
    }

    /// Receives a datagram, in async code.
    ///
    /// # Errors
    /// As [`recv`](UnixDatagram::recv).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was received.
    pub async fn recv_async(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.receive_async(buf, 0).await
    }

    /// As [`recv_async`](UnixDatagram::recv_async), and leaves the datagram for the next call.
    ///
    /// # Errors
    /// As [`peek`](UnixDatagram::peek).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was received.
    pub async fn peek_async(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.receive_async(buf, libc::MSG_PEEK).await
    }

    /// Receives a datagram and its sender's address, in async code.
    ///
    /// # Errors
    /// As [`recv_from`](UnixDatagram::recv_from).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was received.
    pub async fn recv_from_async(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_with_address_async(|fd| recv_from(fd, buf)).await
    }

    /// As [`recv_from_async`](UnixDatagram::recv_from_async), and leaves the datagram for the next
    /// call.
    ///
    /// # Errors
    /// As [`peek_from`](UnixDatagram::peek_from).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was received.
    pub async fn peek_from_async(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_with_address_async(|fd| peek_from(fd, buf)).await
    }

    async fn receive_async(&self, buf: &mut [u8], flags: c_int) -> io::Result<usize> {
        let receive =
            |fd: BorrowedFd<'_>| unless_shut(fd, |fd| syscalls::recv(fd, &mut *buf, flags));
        Ok(self.fd.io_async(Direction::Read, receive).await?.unwrap_or(0))
    }

    async fn receive_with_address_async(
        &self,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> Result<(usize, SocketAddr), Errno>,
    ) -> io::Result<(usize, SocketAddr)> {
        let receive = |fd: BorrowedFd<'_>| unless_shut(fd, &mut attempt);
        match self.fd.io_async(Direction::Read, receive).await? {
            Some(received) => Ok(received),
            None => Ok((0, unnamed_addr()?)),
        }
    }

    fn receive(&self, buf: &mut [u8], flags: c_int) -> io::Result<usize> {
        let received = self.receive_unless_shut(|fd| syscalls::recv(fd, &mut *buf, flags))?;
        Ok(received.unwrap_or(0))
    }

    /// Waits for a datagram. Returns `None` if there is none and the direction was shut down.
    ///
    /// A blocking receive returns 0 then; a non-blocking one would block, as before the shutdown.
    fn receive_unless_shut<T>(
        &self,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> Result<T, Errno>,
    ) -> io::Result<Option<T>> {
        self.fd.io(Direction::Read, |fd| unless_shut(fd, &mut attempt))
    }

    /// Makes an attempt to receive. It ends without a datagram if the direction was shut down.
    fn recv_message(
        &self,
        fd: BorrowedFd<'_>,
        bufs: &mut [IoSliceMut<'_>],
        max_fds: usize,
    ) -> Result<Received, Errno> {
        let received = unless_shut(fd, |fd| recv_message(fd, bufs, max_fds, 0))?;
        Ok(received.unwrap_or_default())
    }

    /// Makes an attempt to send.
    fn send_message(
        &self,
        fd: BorrowedFd<'_>,
        bufs: &[IoSlice<'_>],
        fds: &[BorrowedFd<'_>],
    ) -> Result<usize, Errno> {
        send_message(fd, bufs, fds)
    }

    /// Ends one or both directions of the socket.
    ///
    /// After [`Shutdown::Write`] sends fail with [`BrokenPipe`](io::ErrorKind::BrokenPipe). After
    /// [`Shutdown::Read`] sends of the other side fail with `BrokenPipe`, and receives return 0
    /// when they have received the datagrams that arrived before. Receives that wait end as well.
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
        with_std(&self.fd, std_unix::UnixDatagram::local_addr)
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
        with_std(&self.fd, std_unix::UnixDatagram::peer_addr)
    }
}

/// Makes an attempt to receive. Returns None if there is no datagram and the direction has ended.
fn unless_shut<T>(
    fd: BorrowedFd<'_>,
    mut attempt: impl FnMut(BorrowedFd<'_>) -> Result<T, Errno>,
) -> Result<Option<T>, Errno> {
    match attempt(fd) {
        // A datagram may have come between the attempt and the shutdown: try once more.
        Err(Errno::AGAIN) if is_read_shut(fd) => match attempt(fd) {
            Err(Errno::AGAIN) => Ok(None),
            result => result.map(Some),
        },
        result => result.map(Some),
    }
}

/// Receives a datagram and its sender's address.
fn recv_from(fd: BorrowedFd<'_>, buf: &mut [u8]) -> Result<(usize, SocketAddr), Errno> {
    super::borrow_as_std(fd, |socket: &std_unix::UnixDatagram| socket.recv_from(buf))
        .map_err(|e| Errno::of_io_error(&e).unwrap_or(Errno::INVAL))
}

/// As [`recv_from`], and leaves the datagram in the queue.
fn peek_from(fd: BorrowedFd<'_>, buf: &mut [u8]) -> Result<(usize, SocketAddr), Errno> {
    let bufs = &mut [IoSliceMut::new(buf)];
    let received = recv_message(fd, bufs, 0, libc::MSG_PEEK)?;
    Ok((received.len, received.address()?))
}

/// Returns whether this side has ended the direction in which it receives.
fn is_read_shut(fd: BorrowedFd<'_>) -> bool {
    let mut list = [libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 }];
    syscalls::poll_now(&mut list) == Ok(1) && list[0].revents & libc::POLLRDHUP != 0
}
