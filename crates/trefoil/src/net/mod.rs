//! Sockets that read like std's, and park the goroutine.
//!
//! The types have the names, methods and traits of [`std::net`] and [`std::os::unix::net`]; a call that would
//! block waits in the runtime's poller, so ten thousand connections are ten thousand goroutines written as
//! straight code on a few threads. On a plain thread the same calls block the thread.
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
//! # Beyond std
//! - Every method takes `&self`, and any number of goroutines may use a socket at once: one reads, another
//!   writes. [`TcpStream::split`] gives halves that can be moved apart.
//! - [`close`](TcpStream::close) ends calls that wait on other goroutines, with an error.
//! - Deadlines are per direction, and absolute: [`set_read_deadline`](TcpStream::set_read_deadline). A past one
//!   fails at once, even if data waits. They may be changed while calls wait.
//! - [`cancel_on`](TcpStream::cancel_on) ends waiting calls when a [`Context`](crate::context::Context) is done.
//! - [`copy`] moves bytes from one to another without copying them, where that pays.
//! - Socket options: [`socket2::SockRef::from(&stream)`](https://docs.rs/socket2) works on every type here.
//!
//! # Files
//! Regular files, terminals and the standard streams have no types here: use std's. A thread that blocks in
//! them loses its P (see [`blocking`](crate::blocking()), which hands it on at once).

mod cancel;
mod copy;
mod fd;
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
            /// Ends calls that wait on this socket, on all goroutines, with an error; later ones fail too. The
            /// descriptor is closed when the last of them has left.
            ///
            /// # Errors
            /// If it is closed already.
            pub fn close(&self) -> io::Result<()> {
                self.fd.close()
            }

            /// When `ctx` is done, calls on this socket end with an error (its source is the
            /// [`ContextError`](crate::context::ContextError); the kind of a passed deadline is `TimedOut`):
            /// those that wait, and later ones, until the guard is dropped.
            ///
            /// ```
            /// use std::io::Read;
            /// use trefoil::context::Context;
            /// use trefoil::net::UnixStream;
            /// trefoil::run(|| {
            ///     let (mut one, _other) = UnixStream::pair().unwrap();
            ///     let (ctx, cancel) = Context::background().with_cancel();
            ///     let _guard = one.cancel_on(&ctx);
            ///     trefoil::go(move || cancel.cancel());
            ///     let e = one.read(&mut [0; 8]).unwrap_err();
            ///     assert_eq!(e.to_string(), "context canceled");
            /// });
            /// ```
            pub fn cancel_on(&self, ctx: &crate::context::Context) -> super::CancelGuard {
                super::CancelGuard::new(self.fd.clone(), ctx)
            }

            /// Another handle of the same socket, with deadlines of its own.
            ///
            /// # Errors
            /// If no descriptor is left.
            pub fn try_clone(&self) -> io::Result<$name> {
                Ok($name { fd: Arc::new(self.fd.try_clone()?) })
            }

            /// The error that is pending on the socket, and clears it.
            ///
            /// # Errors
            /// The kernel's.
            pub fn take_error(&self) -> io::Result<Option<io::Error>> {
                self.fd.with(|s| s.take_error())
            }

            /// Converts std's socket, which becomes non-blocking.
            ///
            /// # Errors
            /// If the descriptor cannot be made non-blocking.
            pub fn from_std(socket: $std) -> io::Result<$name> {
                socket.set_nonblocking(true)?;
                Ok($name { fd: Arc::new(Fd::new(socket.into())) })
            }

            /// Converts into std's socket, which blocks again.
            ///
            /// # Errors
            /// If it was closed, or another half or clone of it is alive.
            pub fn into_std(self) -> io::Result<$std> {
                let fd = Arc::into_inner(self.fd).ok_or_else(|| {
                    io::Error::new(io::ErrorKind::ResourceBusy, "another half of it is in use")
                })?;
                let socket = <$std>::from(fd.into_owned()?);
                socket.set_nonblocking(false)?;
                Ok(socket)
            }
        }

        /// # Panics
        /// If the descriptor cannot be made non-blocking; `from_std` returns that as an error.
        impl From<$std> for $name {
            fn from(socket: $std) -> $name {
                $name::from_std(socket).expect("a socket can be made non-blocking")
            }
        }

        impl AsFd for $name {
            fn as_fd(&self) -> BorrowedFd<'_> {
                // SAFETY: open for as long as it is not closed, which is the user's to know.
                unsafe { BorrowedFd::borrow_raw(self.fd.as_raw_fd()) }
            }
        }

        impl AsRawFd for $name {
            fn as_raw_fd(&self) -> RawFd {
                self.fd.as_raw_fd()
            }
        }

        /// # Panics
        /// If it was closed, or another half of it is alive; `into_std` returns that as an error.
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
            /// Reads that are not done at `deadline` fail with `TimedOut`: those that wait now, and later ones.
            /// None: they wait for ever. A past deadline fails at once.
            ///
            /// # Errors
            /// If it is closed.
            pub fn set_read_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
                self.fd.set_deadline(Side::Read, deadline)
            }

            /// As [`set_read_deadline`](Self::set_read_deadline), for writes.
            ///
            /// # Errors
            /// If it is closed.
            pub fn set_write_deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
                self.fd.set_deadline(Side::Write, deadline)
            }

            /// As std's: each read may wait this long. (The error is `TimedOut`.)
            ///
            /// # Errors
            /// If it is closed; a timeout of zero.
            pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
                self.fd.set_timeout(Side::Read, timeout)
            }

            /// As std's: each write may wait this long. (The error is `TimedOut`.)
            ///
            /// # Errors
            /// If it is closed; a timeout of zero.
            pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
                self.fd.set_timeout(Side::Write, timeout)
            }

            /// What [`set_read_timeout`](Self::set_read_timeout) has set.
            ///
            /// # Errors
            /// None; the signature is std's.
            pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
                Ok(self.fd.timeout(Side::Read))
            }

            /// What [`set_write_timeout`](Self::set_write_timeout) has set.
            ///
            /// # Errors
            /// None; the signature is std's.
            pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
                Ok(self.fd.timeout(Side::Write))
            }
        }
    };
}
use deadlines;

/// `Read` and `Write` for a stream and references to it.
macro_rules! streams {
    ($($name:ty),+) => {
        $(
            impl Read for $name {
                fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                    self.fd.io(Side::Read, |fd| rustix::io::read(fd, &mut *buf))
                }

                fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                    self.fd.io(Side::Read, |fd| rustix::io::readv(fd, bufs))
                }
            }

            impl Write for $name {
                fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                    self.fd.io(Side::Write, |fd| {
                        rustix::net::send(fd, buf, rustix::net::SendFlags::NOSIGNAL)
                    })
                }

                fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                    self.fd.io(Side::Write, |fd| {
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
            /// Two halves of the same connection, which can be moved to different goroutines. (Any number of
            /// goroutines may use a reference as well.) Dropping the writing half ends that direction.
            pub fn split(self) -> ($read, $write) {
                ($read { stream: $stream { fd: self.fd.clone() } }, $write { stream: self })
            }
        }

        #[doc = concat!("The reading half of a [`", stringify!($stream), "`].")]
        #[derive(Debug)]
        pub struct $read {
            stream: $stream,
        }

        impl $read {
            /// The whole connection.
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

        #[doc = concat!("The writing half of a [`", stringify!($stream), "`].")]
        #[derive(Debug)]
        pub struct $write {
            stream: $stream,
        }

        impl $write {
            /// The whole connection.
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
