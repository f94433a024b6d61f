//! `copy`: bytes from one descriptor to another.
//!
//! It begins with reads and writes. When so much has gone through that a pipe pays ([`MUCH`]), the kernel moves the
//! pages itself (`splice`), and the bytes are never in this process.

use super::fd::Fd;
use super::{PipeReader, PipeWriter, TcpStream, UnixStream};
use crate::sched::pollable::Side;
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

/// What [`copy`] reads from and writes to: streams and pipes.
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

/// Copies everything from `from` to `to`, until `from` ends, and says how many bytes that were. Deadlines of both
/// hold.
///
/// ```
/// use std::io::{Read, Write};
/// use std::net::Shutdown;
/// use trefoil::net::{UnixStream, copy};
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
///
/// # Errors
/// Of reading or writing. Bytes that were read, and could not be written, are lost.
pub fn copy(from: &impl Transfer, to: &impl Transfer) -> io::Result<u64> {
    let (from, to) = (from.descriptor().0, to.descriptor().0);
    let mut buffer = vec![0; BUFFER];
    let mut total = 0;
    while total < MUCH {
        let n = from.io(Side::Read, |fd| rustix::io::read(fd, &mut buffer[..]))?;
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
        let n = to.io(Side::Write, |fd| rustix::io::write(fd, bytes))?;
        bytes = &bytes[n..];
    }
    Ok(())
}

fn splice_all(from: &Fd, to: &Fd, buffer: &mut [u8]) -> io::Result<u64> {
    let pipe = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
    let mut total = 0;
    loop {
        let n = match &pipe {
            Ok((out, into)) => match from.io(Side::Read, |fd| pull(fd, into.as_fd(), PIPE)) {
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => relay(from, to, buffer)?,
                Err(e) => return Err(e),
                Ok(n) => {
                    let mut left = n;
                    while left != 0 {
                        left -= to.io(Side::Write, |fd| pull(out.as_fd(), fd, left))?;
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
    let n = from.io(Side::Read, |fd| rustix::io::read(fd, &mut *buffer))?;
    write_all(to, &buffer[..n])?;
    Ok(n)
}
