//! Pipes: `pipe`, `PipeReader`, `PipeWriter`.

use super::fd::Fd;
use crate::sched::netpoll::pollable::Direction;
use crate::sys::syscalls;
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// Makes a pipe, like [`std::io::pipe`]: what is written to the writer is read from the reader.
///
/// Use it for bytes that cross a process boundary or that [`copy`](super::copy()) moves. For values
/// within the process, use a channel ([`chan`](crate::chan)).
///
/// # Errors
/// The OS error `EMFILE` or `ENFILE` if no descriptor is left.
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
///
/// trefoil::run(|| {
///     let (mut reader, mut writer) = trefoil::net::pipe().unwrap();
///     trefoil::go(move || writer.write_all(b"through the pipe").unwrap());
///     let mut text = String::new();
///     reader.read_to_string(&mut text).unwrap();
///     assert_eq!(text, "through the pipe");
/// });
/// ```
pub fn pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = syscalls::pipe2(libc::O_NONBLOCK)?;
    let wrap = |fd| Arc::new(Fd::new(fd));
    Ok((PipeReader { fd: wrap(reader) }, PipeWriter { fd: wrap(writer) }))
}

/// The reading end of a [`pipe()`], like [`std::io::PipeReader`].
///
/// With `PipeReader::try_from(owned_fd)` it reads from any descriptor that `epoll` accepts, such as
/// the output of a child process. Reads park the goroutine until data arrives.
///
/// # Drop
/// Dropping the last reader closes the pipe: writes fail with
/// [`BrokenPipe`](io::ErrorKind::BrokenPipe).
///
/// # Examples
/// ```
/// use std::io::Read;
/// use std::os::fd::OwnedFd;
/// use std::process::{Command, Stdio};
/// use trefoil::net::PipeReader;
///
/// trefoil::run(|| {
///     let mut child = Command::new("echo").arg("hello").stdout(Stdio::piped()).spawn().unwrap();
///     let stdout = OwnedFd::from(child.stdout.take().unwrap());
///     let mut text = String::new();
///     PipeReader::try_from(stdout).unwrap().read_to_string(&mut text).unwrap();
///     assert_eq!(text, "hello\n");
///     trefoil::process::wait(&mut child).unwrap();
/// });
/// ```
pub struct PipeReader {
    pub(super) fd: Arc<Fd>,
}

/// The writing end of a [`pipe()`], like [`std::io::PipeWriter`].
///
/// With `PipeWriter::try_from(owned_fd)` it writes to any descriptor that `epoll` accepts, such as
/// the input of a child process. Writes park the goroutine while the pipe is full.
///
/// # Drop
/// Dropping the last writer ends the pipe: the reader reads the data that is left, and then
/// end-of-file.
///
/// # Examples
/// ```
/// use std::io::{ErrorKind, Write};
///
/// trefoil::run(|| {
///     let (reader, mut writer) = trefoil::net::pipe().unwrap();
///     writer.write_all(b"into the pipe").unwrap();
///     drop(reader);
///     let error = writer.write(b"more").unwrap_err();
///     assert_eq!(error.kind(), ErrorKind::BrokenPipe);
/// });
/// ```
pub struct PipeWriter {
    pub(super) fd: Arc<Fd>,
}

/// Methods and traits that both ends have.
macro_rules! pipe_end {
    ($name:ident, $direction:expr, $deadline:ident) => {
        impl $name {
            /// Closes this end for all goroutines that use it.
            ///
            /// Calls that wait on this end fail, and later calls fail with the same error. When the
            /// last call has returned, the other side sees that this end is gone. Handles made by
            /// [`try_clone`](Self::try_clone) stay open.
            ///
            /// The number of the descriptor stays in use until this end is dropped. If the
            /// descriptor was borrowed before (`as_fd`), `close` must not take it away from the
            /// borrower: the other side sees the end only when this handle is dropped.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) if this end is closed already.
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Read};
            ///
            /// trefoil::run(|| {
            ///     let (mut reader, writer) = trefoil::net::pipe().unwrap();
            ///     writer.close().unwrap();
            ///     assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0, "end-of-file");
            ///     reader.close().unwrap();
            ///     let error = reader.read(&mut [0; 8]).unwrap_err();
            ///     assert_eq!(error.kind(), ErrorKind::NotConnected);
            /// });
            /// ```
            pub fn close(&self) -> io::Result<()> {
                self.fd.close()
            }

            /// Sets the time at which calls on this end fail.
            ///
            /// A call that is not done at `deadline` fails with
            /// [`TimedOut`](io::ErrorKind::TimedOut). This applies to calls that wait now and to
            /// later calls, until the caller sets another deadline. After the deadline calls fail
            /// at once. With `None`, the default, there is no deadline.
            ///
            /// # Errors
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{ErrorKind, Read, Write};
            /// use std::time::{Duration, Instant};
            ///
            /// trefoil::run(|| {
            ///     let (mut reader, mut writer) = trefoil::net::pipe().unwrap();
            ///     let soon = Instant::now() + Duration::from_millis(2);
            ///     reader.set_read_deadline(Some(soon)).unwrap();
            ///     assert_eq!(reader.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::TimedOut);
            ///     writer.set_write_deadline(Some(Instant::now())).unwrap();
            ///     assert_eq!(writer.write(b"late").unwrap_err().kind(), ErrorKind::TimedOut);
            /// });
            /// ```
            pub fn $deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
                self.fd.set_deadline($direction, deadline)
            }

            /// Returns another handle to the same end of the pipe, with a deadline of its own.
            ///
            /// # Errors
            /// The OS error `EMFILE` or `ENFILE` if no descriptor is left, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](Self::close).
            ///
            /// # Examples
            /// ```
            /// use std::io::{Read, Write};
            ///
            /// trefoil::run(|| {
            ///     let (mut reader, mut writer) = trefoil::net::pipe().unwrap();
            ///     let mut clone = writer.try_clone().unwrap();
            ///     trefoil::go(move || writer.write_all(b"one").unwrap());
            ///     trefoil::go(move || clone.write_all(b"two").unwrap());
            ///     let mut bytes = Vec::new();
            ///     reader.read_to_end(&mut bytes).unwrap();
            ///     assert_eq!(bytes.len(), 6, "the end comes when both writers are dropped");
            /// });
            /// ```
            pub fn try_clone(&self) -> io::Result<$name> {
                Ok($name { fd: Arc::new(self.fd.try_clone()?) })
            }
        }

        /// Makes the descriptor non-blocking. That also holds for its duplicates, in this process
        /// and in others, because they share the open file description.
        ///
        /// # Errors
        /// The OS error of `fcntl`, which does not happen with an open descriptor. A descriptor
        /// that `epoll` does not accept fails later, in the first call that has to wait, with
        /// [`Unsupported`](io::ErrorKind::Unsupported).
        impl TryFrom<OwnedFd> for $name {
            type Error = io::Error;

            fn try_from(fd: OwnedFd) -> io::Result<$name> {
                let flags = syscalls::fcntl_getfl(fd.as_fd())?;
                syscalls::fcntl_setfl(fd.as_fd(), flags | libc::O_NONBLOCK)?;
                Ok($name { fd: Arc::new(Fd::new(fd)) })
            }
        }

        /// Returns the descriptor, which becomes blocking again.
        ///
        /// # Errors
        /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`, and
        /// [`ResourceBusy`](io::ErrorKind::ResourceBusy) if a handle made by `try_clone` is alive,
        /// which would become blocking, too.
        impl TryFrom<$name> for OwnedFd {
            type Error = io::Error;

            fn try_from(end: $name) -> io::Result<OwnedFd> {
                let fd =
                    Arc::into_inner(end.fd).ok_or(io::ErrorKind::ResourceBusy)?.into_owned()?;
                let flags = syscalls::fcntl_getfl(fd.as_fd())?;
                syscalls::fcntl_setfl(fd.as_fd(), flags & !libc::O_NONBLOCK)?;
                Ok(fd)
            }
        }

        /// Borrows the descriptor, which is non-blocking.
        ///
        /// It is valid until this end is dropped, also after `close`. From the first borrow on, the
        /// other side sees a `close` only when this end is dropped.
        impl AsFd for $name {
            fn as_fd(&self) -> BorrowedFd<'_> {
                self.fd.borrow()
            }
        }

        /// Returns the number of the descriptor, which is non-blocking.
        ///
        /// The number is valid until this end is dropped. After `close` it may refer to a socket
        /// that is not connected.
        impl AsRawFd for $name {
            fn as_raw_fd(&self) -> RawFd {
                self.fd.as_raw_fd()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("fd", &self.fd.as_raw_fd()).finish()
            }
        }
    };
}

pipe_end!(PipeReader, Direction::Read, set_read_deadline);
pipe_end!(PipeWriter, Direction::Write, set_write_deadline);

macro_rules! read {
    ($($name:ty),+) => {
        $(
            /// Reads park the goroutine until data arrives. They return 0 when all writers are
            /// gone.
            ///
            /// # Errors
            /// [`TimedOut`](io::ErrorKind::TimedOut) after the deadline, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`.
            impl Read for $name {
                fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
                    self.fd.io(Direction::Read, |fd| syscalls::read(fd, &mut *buf))
                }

                fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                    self.fd.io(Direction::Read, |fd| syscalls::readv(fd, bufs))
                }
            }
        )+
    };
}

macro_rules! write {
    ($($name:ty),+) => {
        $(
            /// Writes park the goroutine while the pipe is full, and may write less than the whole
            /// buffer. `flush` does nothing, because there is no buffer in this process.
            ///
            /// # Errors
            /// [`BrokenPipe`](io::ErrorKind::BrokenPipe) if all readers are gone,
            /// [`TimedOut`](io::ErrorKind::TimedOut) after the deadline, and
            /// [`NotConnected`](io::ErrorKind::NotConnected) after `close`. The kernel also raises
            /// SIGPIPE when all readers are gone; Rust programs ignore that signal by default.
            impl Write for $name {
                fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                    self.fd.io(Direction::Write, |fd| syscalls::write(fd, buf))
                }

                fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                    self.fd.io(Direction::Write, |fd| syscalls::writev(fd, bufs))
                }

                fn flush(&mut self) -> io::Result<()> {
                    Ok(())
                }
            }
        )+
    };
}

impl PipeReader {
    /// Reads data, in async code. A result of 0 means end-of-file.
    ///
    /// # Errors
    /// As [`Read::read`]: [`TimedOut`](io::ErrorKind::TimedOut) after the deadline, and
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](PipeReader::close).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no data was read.
    pub async fn read_async(&self, buf: &mut [u8]) -> io::Result<usize> {
        let read = |fd: BorrowedFd<'_>| syscalls::read(fd, &mut *buf);
        self.fd.io_async(Direction::Read, read).await
    }
}

impl PipeWriter {
    /// Writes data, in async code. Returns how many bytes the kernel has taken.
    ///
    /// # Errors
    /// As [`Write::write`]: [`BrokenPipe`](io::ErrorKind::BrokenPipe) if there is no reader,
    /// [`TimedOut`](io::ErrorKind::TimedOut) after the deadline, and
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](PipeWriter::close).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no data was written.
    pub async fn write_async(&self, buf: &[u8]) -> io::Result<usize> {
        let write = |fd: BorrowedFd<'_>| syscalls::write(fd, buf);
        self.fd.io_async(Direction::Write, write).await
    }
}

read!(PipeReader, &PipeReader);
write!(PipeWriter, &PipeWriter);
