//! Sockets and pipes that park the goroutine instead of blocking its thread.
//!
//! The types have the names, methods and traits of [`std::net`], [`std::os::unix::net`] and
//! [`std::io::pipe`]. A call that has to wait parks its goroutine in the runtime's poller, so ten
//! thousand connections are ten thousand goroutines of straight-line code on a few threads. On a
//! plain thread the same calls block the thread.
//!
//! ```
//! use std::io::{Read, Write};
//! use trefoil::net::{TcpListener, TcpStream};
//!
//! trefoil::run(|| {
//!     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
//!     let address = listener.local_addr().unwrap();
//!     trefoil::go(move || {
//!         for stream in listener.incoming() {
//!             let mut stream = stream.unwrap();
//!             trefoil::go(move || {
//!                 let mut bytes = [0; 512];
//!                 while let Ok(n @ 1..) = stream.read(&mut bytes) {
//!                     stream.write_all(&bytes[..n]).unwrap();
//!                 }
//!             });
//!         }
//!     });
//!     let mut client = TcpStream::connect(address).unwrap();
//!     client.write_all(b"hello").unwrap();
//!     let mut answer = [0; 5];
//!     client.read_exact(&mut answer).unwrap();
//!     assert_eq!(&answer, b"hello");
//! });
//! ```
//!
//! # Contents
//! | item | purpose |
//! |---|---|
//! | [`TcpListener`], [`Incoming`] | accept TCP connections |
//! | [`TcpStream`], [`ReadHalf`], [`WriteHalf`] | a TCP connection and its halves |
//! | [`UdpSocket`] | send and receive UDP datagrams |
//! | [`UnixListener`], [`UnixIncoming`] | accept Unix stream connections |
//! | [`UnixStream`], [`UnixReadHalf`], [`UnixWriteHalf`] | a Unix connection and its halves |
//! | [`UnixDatagram`] | send and receive Unix datagrams |
//! | [`pipe()`], [`PipeReader`], [`PipeWriter`] | pipes and other pollable descriptors |
//! | [`copy`], [`Transfer`] | move all bytes from one stream to another |
//! | [`CancelGuard`] | ends a socket's calls when a context is done |
//!
//! # Beyond std
//! - Every method takes `&self`, and any number of goroutines may use a socket at the same time:
//!   for example, one goroutine reads while another writes. [`TcpStream::split`] returns two halves
//!   that can be moved to different goroutines.
//! - [`close`](TcpStream::close) ends calls that wait on other goroutines, with an error.
//! - Deadlines are absolute, and each direction has its own:
//!   [`set_read_deadline`](TcpStream::set_read_deadline). After a deadline, calls fail at once,
//!   even if data is available. A deadline may be changed while calls wait.
//! - [`cancel_on`](TcpStream::cancel_on) ends waiting calls when a
//!   [`Context`](crate::context::Context) is done.
//! - [`copy`] lets the kernel move large amounts of data without copying it into the process.
//! - Socket options that have no method here are set with
//!   [`socket2::SockRef::from(&stream)`](https://docs.rs/socket2), which accepts every socket type
//!   of this module.
//!
//! # Errors
//! The types share these errors. The `# Errors` section of a method names the others.
//!
//! | error | when |
//! |---|---|
//! | [`TimedOut`] | the deadline or the timeout of the call has passed |
//! | [`NotConnected`], no OS error code | `close` was called, before the call or while it waited |
//! | [`Other`], wraps [`Canceled`] | the context of a [`CancelGuard`] was cancelled |
//! | [`TimedOut`], wraps [`DeadlineExceeded`] | the deadline of such a context has passed |
//! | OS error `EMFILE`, `ENFILE` | the process or the system has no descriptor left |
//! | OS error `ENOMEM`, `ENOSPC` | `epoll` cannot register the descriptor of a call that waits |
//!
//! Unlike std's sockets, a timeout never yields [`WouldBlock`](std::io::ErrorKind::WouldBlock), and
//! no call yields [`Interrupted`](std::io::ErrorKind::Interrupted).
//!
//! # Files
//! Regular files, terminals and the standard streams have no types here: use std's. A thread that
//! blocks in such a call loses its P, and another thread runs the other goroutines. Inside
//! [`blocking`](crate::blocking()) the goroutine gives up the P before the call instead.
//!
//! [`TimedOut`]: std::io::ErrorKind::TimedOut
//! [`NotConnected`]: std::io::ErrorKind::NotConnected
//! [`Other`]: std::io::ErrorKind::Other
//! [`Canceled`]: crate::context::ContextError::Canceled
//! [`DeadlineExceeded`]: crate::context::ContextError::DeadlineExceeded

mod cancel;
mod copy;
pub(crate) mod fd;
mod pipe;
mod tcp;
mod udp;
mod unix;

pub use cancel::CancelGuard;
pub use copy::{Transfer, copy};
pub use pipe::{PipeReader, PipeWriter, pipe};
pub use tcp::{Incoming, ReadHalf, TcpListener, TcpStream, WriteHalf};
pub use udp::UdpSocket;
pub use unix::{UnixDatagram, UnixIncoming, UnixListener, UnixReadHalf, UnixStream, UnixWriteHalf};

use crate::blocking;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

/// The addresses that a name stands for. Looking one up blocks, so it is done without a P.
fn resolve(addr: impl ToSocketAddrs) -> io::Result<Vec<SocketAddr>> {
    blocking(|| addr.to_socket_addrs().map(Iterator::collect))
}

fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "could not resolve to any addresses")
}

/// What a socket type has, being an `Fd` in an `Arc`: std's conversions, closing, deadlines.
macro_rules! socket {
    ($name:ident, $std:ty) => {
        impl $name {
            /// Closes the socket for all goroutines that use it.
            ///
            /// Calls that wait on this socket end with an error, and later calls fail. The
            /// descriptor is closed when the last call has returned. Halves of the same stream are
            /// closed too; sockets made by [`try_clone`](Self::try_clone) stay open.
            ///
            /// std has no such method: there, a thread that waits in a read or an accept can only
            /// be ended through the other side.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) if the socket is closed already.
            ///
            /// # Examples
            /// The example uses a `UnixStream`. Every socket type behaves the same.
            /// ```
            /// use std::io::{ErrorKind, Read};
            /// use std::sync::Arc;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (one, _other) = UnixStream::pair().unwrap();
            ///     let one = Arc::new(one);
            ///     let reader = one.clone();
            ///     let read = trefoil::go(move || (&*reader).read(&mut [0; 8]));
            ///     one.close().unwrap();
            ///     let error = read.join().unwrap().unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::NotConnected);
            ///     assert!(one.close().is_err(), "it is closed already");
            /// });
            /// ```
            pub fn close(&self) -> io::Result<()> {
                self.fd.close()
            }

            /// Ends calls on this socket with an error when `ctx` is done.
            ///
            /// This applies to calls that wait at that moment and to later calls, until the caller
            /// drops the guard. Then the socket can be used as before. If `ctx` is done already,
            /// calls fail from now on.
            ///
            /// The error wraps the [`ContextError`](crate::context::ContextError), which
            /// [`io::Error::get_ref`] returns. Its kind is [`TimedOut`](io::ErrorKind::TimedOut) if
            /// the context's deadline has passed and [`Other`](io::ErrorKind::Other) if the context
            /// was cancelled.
            ///
            /// Each guard costs a goroutine, which waits for the context.
            ///
            /// # Panics
            /// Panics if no memory is left for that goroutine.
            ///
            /// # Examples
            /// ```
            /// use std::io::Read;
            /// use trefoil::context::Context;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     let (ctx, cancel) = Context::background().with_cancel();
            ///     let _guard = one.cancel_on(&ctx);
            ///     trefoil::go(move || cancel.cancel());
            ///     let error = one.read(&mut [0; 8]).unwrap_err();
            ///     assert_eq!(error.to_string(), "context canceled");
            /// });
            /// ```
            pub fn cancel_on(&self, ctx: &crate::context::Context) -> super::CancelGuard {
                super::CancelGuard::new(self.fd.clone(), ctx)
            }

            /// Returns another handle to the same socket.
            ///
            /// The clone has a descriptor of its own: it has its own deadlines and timeouts, and it
            /// stays open when this handle is closed. To share one handle, use a reference or an
            /// `Arc`.
            ///
            /// # Errors
            /// The OS error `EMFILE` or `ENFILE` if no descriptor is left, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{Read, Write};
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (one, mut other) = UnixStream::pair().unwrap();
            ///     let mut clone = one.try_clone().unwrap();
            ///     one.close().unwrap();
            ///     clone.write_all(b"open").unwrap();
            ///     let mut bytes = [0; 4];
            ///     other.read_exact(&mut bytes).unwrap();
            ///     assert_eq!(&bytes, b"open");
            /// });
            /// ```
            pub fn try_clone(&self) -> io::Result<$name> {
                Ok($name { fd: Arc::new(self.fd.try_clone()?) })
            }

            /// Returns the error that is pending on the socket (`SO_ERROR`) and clears it.
            ///
            /// A pending error is one that the kernel received outside of a call, such as a reset
            /// by the other side.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use trefoil::net::UdpSocket;
            ///
            /// trefoil::run(|| {
            ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            ///     assert!(socket.take_error().unwrap().is_none());
            /// });
            /// ```
            pub fn take_error(&self) -> io::Result<Option<io::Error>> {
                self.fd.with(|s| s.take_error())
            }

            /// Converts std's socket into one that parks the goroutine.
            ///
            /// The descriptor becomes non-blocking. That also holds for clones of the std socket,
            /// because they share the open file description.
            ///
            /// # Errors
            /// The OS error of `ioctl(FIONBIO)` if the descriptor cannot be made non-blocking,
            /// which does not happen with sockets.
            ///
            /// # Examples
            /// ```
            /// use trefoil::net::UdpSocket;
            ///
            /// let plain = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            /// let address = plain.local_addr().unwrap();
            /// trefoil::run(move || {
            ///     let socket = UdpSocket::from_std(plain).unwrap();
            ///     socket.send_to(b"to itself", address).unwrap();
            ///     assert_eq!(socket.recv(&mut [0; 16]).unwrap(), 9);
            /// });
            /// ```
            pub fn from_std(socket: $std) -> io::Result<$name> {
                socket.set_nonblocking(true)?;
                Ok($name { fd: Arc::new(Fd::new(socket.into())) })
            }

            /// Converts the socket into std's, which blocks its thread again.
            ///
            /// The descriptor becomes blocking. That also holds for sockets made by
            /// [`try_clone`](Self::try_clone), because they share the open file description: drop
            /// them first.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) if the socket was closed, and
            /// [`ResourceBusy`](io::ErrorKind::ResourceBusy) if another half of it or a
            /// [`CancelGuard`](crate::net::CancelGuard) is alive. The socket is dropped then.
            ///
            /// # Examples
            /// ```
            /// use trefoil::net::UdpSocket;
            ///
            /// let plain: std::net::UdpSocket = trefoil::run(|| {
            ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            ///     socket.into_std().unwrap()
            /// });
            /// assert!(plain.local_addr().unwrap().ip().is_loopback());
            /// ```
            pub fn into_std(self) -> io::Result<$std> {
                let fd = Arc::into_inner(self.fd).ok_or_else(|| {
                    io::Error::new(io::ErrorKind::ResourceBusy, "another half of it is in use")
                })?;
                let socket = <$std>::from(fd.into_owned()?);
                socket.set_nonblocking(false)?;
                Ok(socket)
            }
        }

        /// Converts as `from_std` does.
        ///
        /// # Panics
        /// Panics if the descriptor cannot be made non-blocking. `from_std` returns an error
        /// instead.
        impl From<$std> for $name {
            fn from(socket: $std) -> $name {
                $name::from_std(socket).expect("a socket can be made non-blocking")
            }
        }

        /// Borrows the descriptor, which is non-blocking.
        ///
        /// The caller must not use it after `close`: by then its number may belong to another file.
        impl AsFd for $name {
            fn as_fd(&self) -> BorrowedFd<'_> {
                // SAFETY: open for as long as it is not closed, which is the user's to know.
                unsafe { BorrowedFd::borrow_raw(self.fd.as_raw_fd()) }
            }
        }

        /// Returns the number of the descriptor, which is non-blocking and stays open until `close`
        /// or the drop of the socket.
        impl AsRawFd for $name {
            fn as_raw_fd(&self) -> RawFd {
                self.fd.as_raw_fd()
            }
        }

        /// Converts as `into_std` does: the descriptor becomes blocking, and the caller has to
        /// close it.
        ///
        /// # Panics
        /// Panics if the socket was closed, or if another half of it or a `CancelGuard` is alive.
        /// `into_std` returns an error instead.
        impl IntoRawFd for $name {
            fn into_raw_fd(self) -> RawFd {
                self.into_std().expect("an open socket without other halves").into_raw_fd()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("fd", &self.fd.as_raw_fd()).finish()
            }
        }
    };
}
use socket;

/// Deadlines of a socket that reads and writes.
macro_rules! deadlines {
    ($name:ident) => {
        impl $name {
            /// Sets the time at which reads and receives fail.
            ///
            /// A call that is not done at `deadline` fails with
            /// [`TimedOut`](io::ErrorKind::TimedOut). This applies to calls that wait now and to
            /// later calls, until the caller sets another deadline. After the deadline calls fail
            /// at once, even if data is available. With `None`, the default, there is no deadline.
            ///
            /// This is Go's `SetReadDeadline`. Use it to limit a whole exchange; use
            /// [`set_read_timeout`](Self::set_read_timeout) to limit each call.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Read, Write};
            /// use std::time::{Duration, Instant};
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, mut other) = UnixStream::pair().unwrap();
            ///     one.set_read_deadline(Some(Instant::now() + Duration::from_millis(2))).unwrap();
            ///     let error = one.read(&mut [0; 8]).unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
            ///
            ///     one.set_read_deadline(None).unwrap();
            ///     other.write_all(b"late").unwrap();
            ///     assert_eq!(one.read(&mut [0; 8]).unwrap(), 4);
            /// });
            /// ```
            pub fn set_read_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
                self.fd.set_deadline(Direction::Read, deadline)
            }

            /// Sets the time at which writes and sends fail.
            ///
            /// Everything that [`set_read_deadline`](Self::set_read_deadline) says about reads
            /// holds here for writes.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Write};
            /// use std::time::Instant;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     one.set_write_deadline(Some(Instant::now())).unwrap();
            ///     let error = one.write(b"too late").unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
            /// });
            /// ```
            pub fn set_write_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
                self.fd.set_deadline(Direction::Write, deadline)
            }

            /// Sets how long each read or receive may wait.
            ///
            /// The timeout starts when a call begins to wait; a call that need not wait never fails
            /// by it. With `None`, the default, calls wait without a limit. A new timeout applies
            /// to calls that begin later.
            ///
            /// Unlike std's method, it belongs to this handle, not to the kernel's socket. After
            /// the timeout the error is always [`TimedOut`](io::ErrorKind::TimedOut), never
            /// [`WouldBlock`](io::ErrorKind::WouldBlock).
            ///
            /// # Errors
            /// [`InvalidInput`](io::ErrorKind::InvalidInput) if the timeout is zero, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Read};
            /// use std::time::Duration;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     one.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
            ///     let error = one.read(&mut [0; 8]).unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
            /// });
            /// ```
            pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
                self.fd.set_timeout(Direction::Read, timeout)
            }

            /// Sets how long each write or send may wait.
            ///
            /// Everything that [`set_read_timeout`](Self::set_read_timeout) says about reads holds
            /// here for writes.
            ///
            /// # Errors
            /// [`InvalidInput`](io::ErrorKind::InvalidInput) if the timeout is zero, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Write};
            /// use std::time::Duration;
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     one.set_write_timeout(Some(Duration::from_millis(2))).unwrap();
            ///     // The other side does not read: the buffer fills up, and then a write waits.
            ///     let error = loop {
            ///         if let Err(error) = one.write(&[0; 4096]) {
            ///             break error;
            ///         }
            ///     };
            ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
            /// });
            /// ```
            pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
                self.fd.set_timeout(Direction::Write, timeout)
            }

            /// Returns the timeout that [`set_read_timeout`](Self::set_read_timeout) has set.
            ///
            /// # Errors
            /// Never fails; the signature is std's.
            pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
                Ok(self.fd.timeout(Direction::Read))
            }

            /// Returns the timeout that [`set_write_timeout`](Self::set_write_timeout) has set.
            ///
            /// # Errors
            /// Never fails; the signature is std's.
            pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
                Ok(self.fd.timeout(Direction::Write))
            }
        }
    };
}
use deadlines;

/// `Read` and `Write` for a stream and references to it.
macro_rules! streams {
    ($($name:ty),+) => {
        $(
            /// Reads park the goroutine until data arrives. They return 0 when the other side has
            /// ended its direction of the connection.
            ///
            /// # Errors
            /// [`TimedOut`](io::ErrorKind::TimedOut) after the read deadline or timeout,
            /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`, the error of a done
            /// context (`cancel_on`), and [`ConnectionReset`](io::ErrorKind::ConnectionReset) if
            /// the other side has reset the connection.
            impl Read for $name {
                fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                    self.fd.io(Direction::Read, |fd| rustix::io::read(fd, &mut *buf))
                }

                fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                    self.fd.io(Direction::Read, |fd| rustix::io::readv(fd, bufs))
                }
            }

            /// Writes park the goroutine until the kernel's buffer has room, and may write less
            /// than the whole buffer. `flush` does nothing, because there is no buffer in this
            /// process.
            ///
            /// # Errors
            /// [`TimedOut`](io::ErrorKind::TimedOut) after the write deadline or timeout,
            /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`, the error of a done
            /// context (`cancel_on`), and [`BrokenPipe`](io::ErrorKind::BrokenPipe) or
            /// [`ConnectionReset`](io::ErrorKind::ConnectionReset) if the other side does not read
            /// any more. No write raises SIGPIPE.
            impl Write for $name {
                fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                    self.fd.io(Direction::Write, |fd| {
                        rustix::net::send(fd, buf, rustix::net::SendFlags::NOSIGNAL)
                    })
                }

                fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                    self.fd.io(Direction::Write, |fd| {
                        let mut nothing = rustix::net::SendAncillaryBuffer::default();
                        let flags = rustix::net::SendFlags::NOSIGNAL;
                        rustix::net::sendmsg(fd, bufs, &mut nothing, flags)
                    })
                }

                fn flush(&mut self) -> io::Result<()> {
                    Ok(())
                }
            }
        )+
    };
}
use streams;

/// A stream's halves.
macro_rules! halves {
    ($stream:ident, $read:ident, $write:ident) => {
        impl $stream {
            /// Splits the connection into a reading and a writing half, which can be moved to
            /// different goroutines.
            ///
            /// A half is needed only for ownership: any number of goroutines may also use one
            /// stream through a reference.
            ///
            /// # Drop
            /// Dropping the writing half ends its direction, so that the other side reads
            /// end-of-file. The descriptor is closed when both halves are dropped.
            ///
            /// # Examples
            /// ```
            /// use std::io::{Read, Write};
            /// use trefoil::net::UnixStream;
            ///
            /// trefoil::run(|| {
            ///     let (client, mut server) = UnixStream::pair().unwrap();
            ///     trefoil::go(move || {
            ///         let mut request = String::new();
            ///         server.read_to_string(&mut request).unwrap();
            ///         server.write_all(request.to_uppercase().as_bytes()).unwrap();
            ///     });
            ///     let (mut reader, mut writer) = client.split();
            ///     trefoil::go(move || writer.write_all(b"hello").unwrap());
            ///     let mut answer = String::new();
            ///     reader.read_to_string(&mut answer).unwrap();
            ///     assert_eq!(answer, "HELLO");
            /// });
            /// ```
            pub fn split(self) -> ($read, $write) {
                ($read { stream: $stream { fd: self.fd.clone() } }, $write { stream: self })
            }
        }

        #[doc = concat!("The reading half of a [`", stringify!($stream), "`], made by its `split`.")]
        ///
        /// It implements [`Read`]. The methods of the whole connection, such as deadlines, are
        /// available through [`stream`](Self::stream).
        ///
        /// # Drop
        /// Dropping this half does not end a direction. The descriptor is closed when both halves
        /// are dropped.
        ///
        /// # Examples
        /// ```
        /// use std::io::{ErrorKind, Read};
        /// use std::time::{Duration, Instant};
        /// use trefoil::net::UnixStream;
        ///
        /// trefoil::run(|| {
        ///     let (one, _other) = UnixStream::pair().unwrap();
        ///     let (mut reader, _writer) = one.split();
        ///     let deadline = Instant::now() + Duration::from_millis(2);
        ///     reader.stream().set_read_deadline(Some(deadline)).unwrap();
        ///     let error = reader.read(&mut [0; 8]).unwrap_err();
        ///     assert_eq!(error.kind(), ErrorKind::TimedOut);
        /// });
        /// ```
        #[derive(Debug)]
        pub struct $read {
            stream: $stream,
        }

        impl $read {
            /// Returns the whole connection, both directions.
            pub fn stream(&self) -> &$stream {
                &self.stream
            }
        }

        impl Read for $read {
            fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                self.stream.read(buf)
            }

            fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                self.stream.read_vectored(bufs)
            }
        }

        #[doc = concat!("The writing half of a [`", stringify!($stream), "`], made by its `split`.")]
        ///
        /// It implements [`Write`]. The methods of the whole connection, such as deadlines, are
        /// available through [`stream`](Self::stream).
        ///
        /// # Drop
        /// Dropping this half ends its direction (`shutdown(Shutdown::Write)`), so that the other
        /// side reads end-of-file. The descriptor is closed when both halves are dropped.
        ///
        /// # Examples
        /// ```
        /// use std::io::{Read, Write};
        /// use trefoil::net::UnixStream;
        ///
        /// trefoil::run(|| {
        ///     let (one, mut other) = UnixStream::pair().unwrap();
        ///     let (_reader, mut writer) = one.split();
        ///     writer.write_all(b"the end").unwrap();
        ///     drop(writer);
        ///     let mut text = String::new();
        ///     other.read_to_string(&mut text).unwrap();
        ///     assert_eq!(text, "the end");
        /// });
        /// ```
        #[derive(Debug)]
        pub struct $write {
            stream: $stream,
        }

        impl $write {
            /// Returns the whole connection, both directions.
            pub fn stream(&self) -> &$stream {
                &self.stream
            }
        }

        impl Write for $write {
            fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                self.stream.write(buf)
            }

            fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                self.stream.write_vectored(bufs)
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        impl Drop for $write {
            fn drop(&mut self) {
                let _ = self.stream.shutdown(Shutdown::Write);
            }
        }
    };
}
use halves;
