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
//! - Socket options: [`socket2::SockRef::from(&stream)`](https://docs.rs/socket2) works on every type here.
//!
//! # Files
//! Regular files, terminals and the standard streams have no types here: use std's. A thread that blocks in
//! them loses its P (see [`blocking`](crate::blocking()), which hands it on at once).

mod fd;
mod tcp;

pub use tcp::{Incoming, ReadHalf, TcpListener, TcpStream, WriteHalf};

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
        }
    };
}
use deadlines;

/// `Read` and `Write` for a type and references to it, from its own `recv`, `recv_vectored`, `transmit`,
/// `transmit_vectored`.
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
