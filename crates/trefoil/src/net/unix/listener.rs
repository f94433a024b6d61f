//! `UnixListener` and its iterator.

use super::UnixStream;
use super::with_std;
use crate::net::fd::Fd;
use crate::net::macros::{readiness, socket};
use crate::sched::netpoll::pollable::Direction;
use crate::sys::syscalls;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::{self as std_unix, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

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
readiness!(UnixListener);

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
        let fd = self.fd.io(Direction::Read, syscalls::accept4)?;
        let stream = UnixStream { fd: Arc::new(Fd::new(fd)) };
        let addr = stream.peer_addr()?;
        Ok((stream, addr))
    }

    /// Accepts a connection, in async code. It is [`accept`](UnixListener::accept) for tasks.
    ///
    /// # Errors
    /// As [`accept`](UnixListener::accept).
    ///
    /// # Cancel
    /// Dropping the future loses no connection.
    pub async fn accept_async(&self) -> io::Result<(UnixStream, SocketAddr)> {
        let fd = self.fd.io_async(Direction::Read, syscalls::accept4).await?;
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
        with_std(&self.fd, std_unix::UnixListener::local_addr)
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

impl<'a> IntoIterator for &'a UnixListener {
    type Item = io::Result<UnixStream>;
    type IntoIter = UnixIncoming<'a>;

    fn into_iter(self) -> UnixIncoming<'a> {
        self.incoming()
    }
}
