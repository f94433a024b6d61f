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
//! | [`Received`], [`UCred`] | descriptors and credentials that came over a Unix socket |
//! | [`pipe()`], [`PipeReader`], [`PipeWriter`] | pipes and other pollable descriptors |
//! | [`copy`], [`Transfer`] | move all bytes from one stream to another |
//! | [`AsyncFd`], [`AsyncFdReadyGuard`] | await the readiness of any pollable descriptor |
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
//!   of this module. It borrows the descriptor (`as_fd`), so a later `close` of that socket also
//!   ends its clones, and its address becomes free when it is dropped.
//!
//! # Async code
//! Every call that may wait has a form for tasks: [`TcpStream::connect_async`],
//! [`TcpListener::accept_async`], [`TcpStream::read_async`], [`UdpSocket::recv_from_async`] and so
//! on. They return futures that any executor may poll, and goroutines, threads and tasks may use a
//! socket at the same time. Deadlines, timeouts, `close` and contexts apply to them as well. (The
//! other forms may be called in tasks too: then the task's carrier parks, and other tasks run on.)
//!
//! The poll traits of other crates are behind features, for the streams, references to them, their
//! halves, and pipes:
//!
//! | feature | traits |
//! |---|---|
//! | `tokio-io` | `tokio::io::AsyncRead`, `tokio::io::AsyncWrite`; no tokio runtime is needed |
//! | `futures-io` | `futures_io::AsyncRead`, `futures_io::AsyncWrite` |
//! | `hyper` | `hyper::rt::Read`, `hyper::rt::Write` |
//!
//! As these traits define it, only the task that polled last for a direction of a socket is woken.
//! If several tasks read one socket, use [`TcpStream::read_async`], which has no such limit.
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
//! | [`WouldBlock`] | the call would wait, and [`set_nonblocking`] forbids that |
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
//! [`WouldBlock`]: std::io::ErrorKind::WouldBlock
//! [`set_nonblocking`]: TcpStream::set_nonblocking
//! [`Other`]: std::io::ErrorKind::Other
//! [`Canceled`]: crate::context::ContextError::Canceled
//! [`DeadlineExceeded`]: crate::context::ContextError::DeadlineExceeded

mod async_fd;
mod async_io;
mod cancel;
mod copy;
pub(crate) mod fd;
mod macros;
mod pipe;
mod poll_traits;
mod resolve;
mod tcp;
mod udp;
mod unix;

pub use async_fd::{AsyncFd, AsyncFdReadyGuard, TryIoError};
pub use cancel::CancelGuard;
pub use copy::{Transfer, copy};
pub use pipe::{PipeReader, PipeWriter, pipe};
pub use tcp::{Incoming, ReadHalf, TcpListener, TcpStream, WriteHalf};
pub use udp::UdpSocket;
pub use unix::{
    Received, UCred, UnixDatagram, UnixIncoming, UnixListener, UnixReadHalf, UnixStream,
    UnixWriteHalf,
};
