//! Pipes: `PipeReader`, `PipeWriter`, as std's.

use super::fd::Fd;
use crate::sched::pollable::Side;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pipe::{PipeFlags, pipe_with};
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// A pipe: what is written to the one end is read at the other. As [`std::io::pipe`].
///
/// ```
/// use std::io::{Read, Write};
/// trefoil::run(|| {
///     let (mut reader, mut writer) = trefoil::net::pipe().unwrap();
///     trefoil::go(move || writer.write_all(b"through the pipe").unwrap());
///     let mut text = String::new();
///     reader.read_to_string(&mut text).unwrap();
///     assert_eq!(text, "through the pipe");
/// });
/// ```
///
/// # Errors
/// If no descriptors are left.
pub fn pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    let wrap = |fd| Arc::new(Fd::new(fd));
    Ok((PipeReader { fd: wrap(reader) }, PipeWriter { fd: wrap(writer) }))
}

/// The end of a [`pipe()`] that is read; or any descriptor that can be polled and read, such as a child's
/// output: `PipeReader::try_from(OwnedFd::from(child.stdout.take().unwrap()))`.
pub struct PipeReader {
    pub(super) fd: Arc<Fd>,
}

/// The end of a [`pipe()`] that is written; or any descriptor that can be polled and written.
pub struct PipeWriter {
    pub(super) fd: Arc<Fd>,
}

macro_rules! pipe_end {
    ($name:ident, $side:expr, $deadline:ident) => {
        impl $name {
            /// Ends calls that wait here, on all goroutines, with an error; later ones fail too.
            ///
            /// # Errors
            /// If it is closed already.
            pub fn close(&self) -> io::Result<()> {
                self.fd.close()
            }

            /// Calls that are not done at `deadline` fail with `TimedOut`. None: they wait for ever.
            ///
            /// # Errors
            /// If it is closed.
            pub fn $deadline(&self, deadline: Option<Instant>) -> io::Result<()> {
                self.fd.set_deadline($side, deadline)
            }

            /// Another handle of the same end.
            ///
            /// # Errors
            /// If no descriptor is left.
            pub fn try_clone(&self) -> io::Result<$name> {
                Ok($name { fd: Arc::new(self.fd.try_clone()?) })
            }
        }

        /// The descriptor becomes non-blocking, and so do its duplicates elsewhere.
        impl TryFrom<OwnedFd> for $name {
            type Error = io::Error;

            fn try_from(fd: OwnedFd) -> io::Result<$name> {
                let flags = fcntl_getfl(&fd)?;
                fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
                Ok($name { fd: Arc::new(Fd::new(fd)) })
            }
        }

        /// The descriptor blocks again. An error if it was closed.
        impl TryFrom<$name> for OwnedFd {
            type Error = io::Error;

            fn try_from(end: $name) -> io::Result<OwnedFd> {
                let fd =
                    Arc::into_inner(end.fd).ok_or(io::ErrorKind::ResourceBusy)?.into_owned()?;
                let flags = fcntl_getfl(&fd)?;
                fcntl_setfl(&fd, flags - OFlags::NONBLOCK)?;
                Ok(fd)
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

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name)).field("fd", &self.fd.as_raw_fd()).finish()
            }
        }
    };
}

pipe_end!(PipeReader, Side::Read, set_read_deadline);
pipe_end!(PipeWriter, Side::Write, set_write_deadline);

macro_rules! read {
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
        )+
    };
}

macro_rules! write {
    ($($name:ty),+) => {
        $(
            impl Write for $name {
                fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
                    self.fd.io(Side::Write, |fd| rustix::io::write(fd, buf))
                }

                fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
                    self.fd.io(Side::Write, |fd| rustix::io::writev(fd, bufs))
                }

                fn flush(&mut self) -> io::Result<()> {
                    Ok(())
                }
            }
        )+
    };
}

read!(PipeReader, &PipeReader);
write!(PipeWriter, &PipeWriter);
