//! `copy`: bytes from one descriptor to another.
//!
//! It begins with reads and writes. When so much has gone through that a pipe pays ([`MUCH`]), the kernel moves the
//! pages itself (`splice`), and the bytes are never in this process.

use super::fd::Fd;
use super::{PipeReader, PipeWriter, TcpStream, UnixStream};
use crate::sched::netpoll::pollable::Direction;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags, pipe_with, splice};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// Read at once.
const BUFFER: usize = 16 << 10;
/// From here on by `splice`: two more descriptors and two system calls to make the pipe.
const MUCH: u64 = 64 << 10;
/// What a pipe holds.
const PIPE: usize = 64 << 10;

pub(super) mod sealed {
    /// What only this crate knows.
    pub trait Descriptor {
        #[doc(hidden)]
        fn descriptor(&self) -> Private<'_>;
    }

    /// Not to be named outside.
    #[allow(missing_debug_implementations)]
    pub struct Private<'a>(pub(in crate::net) &'a super::Fd);
}

/// The types that [`copy`] reads from and writes to: streams and pipes.
///
/// It is implemented for [`TcpStream`], [`UnixStream`], [`PipeReader`] and [`PipeWriter`], and
/// cannot be implemented outside of this crate. Use it as a bound for functions that call [`copy`].
///
/// # Examples
/// ```
/// use std::io::{self, Read, Write};
/// use trefoil::net::{Transfer, copy, pipe};
///
/// /// Copies, and reports the number of KiB.
/// fn forward(from: &impl Transfer, to: &impl Transfer) -> io::Result<u64> {
///     Ok(copy(from, to)? / 1024)
/// }
///
/// trefoil::run(|| {
///     let (reader, mut writer) = pipe().unwrap();
///     let (mut end, middle) = pipe().unwrap();
///     trefoil::go(move || writer.write_all(&[7; 4096]).unwrap());
///     assert_eq!(forward(&reader, &middle).unwrap(), 4);
///     drop(middle);
///     assert_eq!(end.read_to_end(&mut Vec::new()).unwrap(), 4096);
/// });
/// ```
pub trait Transfer: sealed::Descriptor {}

macro_rules! transfer {
    ($($name:ty),+) => {
        $(
            impl sealed::Descriptor for $name {
                fn descriptor(&self) -> sealed::Private<'_> {
                    sealed::Private(&self.fd)
                }
            }

            impl Transfer for $name {}
        )+
    };
}

transfer!(TcpStream, UnixStream, PipeReader, PipeWriter);

/// Copies all bytes from `from` to `to` until `from` is at its end, and returns their number.
///
/// Use it for proxies. Unlike [`std::io::copy`], it takes references only, and after the first 64
/// KiB the kernel moves the data between the descriptors (`splice`), where it can, without copying
/// it into the process. The deadlines and timeouts of both sides apply. When it returns, `to` is
/// still open: the caller may end its direction with `shutdown`.
///
/// # Errors
/// The errors of reading from `from` and of writing to `to`: [`TimedOut`](io::ErrorKind::TimedOut)
/// after a deadline or timeout, [`NotConnected`](io::ErrorKind::NotConnected) after `close`, the
/// error of a done context, [`ConnectionReset`](io::ErrorKind::ConnectionReset) if a connection was
/// reset, and [`BrokenPipe`](io::ErrorKind::BrokenPipe) if the reader of `to` is gone. Bytes that
/// were read and could not be written are lost.
///
/// # Examples
/// ```
/// use std::io::{Read, Write};
/// use std::net::Shutdown;
/// use trefoil::net::{UnixStream, copy};
///
/// trefoil::run(|| {
///     let (mut client, inner) = UnixStream::pair().unwrap();
///     let (outer, mut server) = UnixStream::pair().unwrap();
///     let forwarder = trefoil::go(move || copy(&inner, &outer));
///     client.write_all(b"through the middle").unwrap();
///     client.shutdown(Shutdown::Write).unwrap();
///     let mut text = String::new();
///     server.read_to_string(&mut text).unwrap();
///     assert_eq!(text, "through the middle");
///     assert_eq!(forwarder.join().unwrap().unwrap(), 18);
/// });
/// ```
pub fn copy(from: &impl Transfer, to: &impl Transfer) -> io::Result<u64> {
    let (from, to) = (from.descriptor().0, to.descriptor().0);
    let mut buffer = vec![0; BUFFER];
    let mut total = 0;
    while total < MUCH {
        let n = from.io(Direction::Read, |fd| rustix::io::read(fd, &mut buffer[..]))?;
        if n == 0 {
            return Ok(total);
        }
        write_all(to, &buffer[..n])?;
        total += n as u64;
    }
    Ok(total + splice_all(from, to, &mut buffer)?)
}

fn write_all(to: &Fd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let n = to.io(Direction::Write, |fd| rustix::io::write(fd, bytes))?;
        bytes = &bytes[n..];
    }
    Ok(())
}

fn splice_all(from: &Fd, to: &Fd, buffer: &mut [u8]) -> io::Result<u64> {
    let pipe = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
    let mut total = 0;
    loop {
        let n = match &pipe {
            Ok((out, into)) => match from.io(Direction::Read, |fd| pull(fd, into.as_fd(), PIPE)) {
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => relay(from, to, buffer)?,
                Err(e) => return Err(e),
                Ok(n) => {
                    let mut left = n;
                    while left != 0 {
                        left -= to.io(Direction::Write, |fd| pull(out.as_fd(), fd, left))?;
                    }
                    n
                }
            },
            // No descriptors left for a pipe.
            Err(_) => relay(from, to, buffer)?,
        };
        if n == 0 {
            return Ok(total);
        }
        total += n as u64;
    }
}

fn pull(from: BorrowedFd<'_>, to: BorrowedFd<'_>, most: usize) -> Result<usize, Errno> {
    splice(from, None, to, None, most, SpliceFlags::MOVE | SpliceFlags::NONBLOCK)
}

/// One read, written. The kernel cannot splice these two.
fn relay(from: &Fd, to: &Fd, buffer: &mut [u8]) -> io::Result<usize> {
    let n = from.io(Direction::Read, |fd| rustix::io::read(fd, &mut *buffer))?;
    write_all(to, &buffer[..n])?;
    Ok(n)
}
