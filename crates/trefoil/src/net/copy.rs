//! `copy`: moves bytes from one descriptor to another.
//!
//! It begins with reads and writes. After [`SPLICE_FROM_BYTES`] the kernel moves the pages itself
//! (`splice`), and the bytes are never in this process.
//!
//! `splice` into a socket has no flag against SIGPIPE, so a program in which that signal would end
//! the process gets reads and writes only.

use super::fd::Fd;
use super::{PipeReader, PipeWriter, TcpStream, UnixStream};
use crate::sched::netpoll::pollable::Direction;
use crate::sys::syscalls;
use sealed::{Descriptor, FileKind};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

/// Size of one read.
const BUFFER_BYTES: usize = 16 << 10;
/// Bytes after which `splice` pays: it costs two descriptors and two system calls to make the pipe.
const SPLICE_FROM_BYTES: u64 = 64 << 10;
/// Capacity of the pipe between the two descriptors: Linux's default.
const PIPE_BYTES: usize = 64 << 10;

pub(super) mod sealed {
    /// Keeps other crates from implementing `Transfer`.
    pub trait Sealed {
        #[doc(hidden)]
        fn descriptor(&self) -> Descriptor<'_>;
    }

    /// A public type that other crates cannot name.
    #[allow(missing_debug_implementations)]
    #[derive(Clone, Copy)]
    pub struct Descriptor<'a> {
        pub(in crate::net) fd: &'a super::Fd,
        pub(in crate::net) kind: FileKind,
    }

    /// Decides how bytes are written without SIGPIPE.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub(in crate::net) enum FileKind {
        Socket,
        Pipe,
    }
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
pub trait Transfer: sealed::Sealed {}

macro_rules! transfer {
    ($($name:ty: $kind:ident),+) => {
        $(
            impl sealed::Sealed for $name {
                fn descriptor(&self) -> Descriptor<'_> {
                    Descriptor { fd: &self.fd, kind: FileKind::$kind }
                }
            }

            impl Transfer for $name {}
        )+
    };
}

transfer!(TcpStream: Socket, UnixStream: Socket, PipeReader: Pipe, PipeWriter: Pipe);

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
/// were read and could not be written are lost. If `to` is a socket, no SIGPIPE ends the process.
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
    let (from, to) = (from.descriptor().fd, to.descriptor());
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut total = 0;
    while total < SPLICE_FROM_BYTES {
        match relay(from, to, &mut buffer)? {
            0 => return Ok(total),
            n => total += n as u64,
        }
    }
    let mut pipe = if can_splice_into(to) { new_pipe() } else { None };
    loop {
        let spliced = match &pipe {
            Some(ends) => splice_once(from, to.fd, ends)?,
            None => None,
        };
        let n = match spliced {
            Some(n) => n,
            None => {
                pipe = None;
                relay(from, to, &mut buffer)?
            }
        };
        if n == 0 {
            return Ok(total);
        }
        total += n as u64;
    }
}

/// Returns the ends of a new pipe, or `None` if no descriptors are left.
fn new_pipe() -> Option<(OwnedFd, OwnedFd)> {
    syscalls::pipe2(libc::O_NONBLOCK).ok()
}

/// Returns false if a broken connection would end the process: `splice` raises SIGPIPE.
fn can_splice_into(to: Descriptor<'_>) -> bool {
    if to.kind == FileKind::Pipe {
        // Writes to a pipe raise the signal as well.
        return true;
    }
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the kernel fills the structure, which is in this frame.
    let action = unsafe {
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction != libc::SIG_DFL
}

/// Moves at most [`PIPE_BYTES`] and returns their number, or `None` if the kernel cannot splice
/// from this kind of file.
fn splice_once(from: &Fd, to: &Fd, (out, into): &(OwnedFd, OwnedFd)) -> io::Result<Option<usize>> {
    let n = match from.io(Direction::Read, |fd| syscalls::splice(fd, into.as_fd(), PIPE_BYTES)) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
        result => result?,
    };
    let mut left = n;
    while left != 0 {
        left -= to.io(Direction::Write, |fd| syscalls::splice(out.as_fd(), fd, left))?;
    }
    Ok(Some(n))
}

/// Reads once and writes what was read. Returns its length.
fn relay(from: &Fd, to: Descriptor<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    let n = from.io(Direction::Read, |fd| syscalls::read(fd, &mut *buffer))?;
    let mut bytes = &buffer[..n];
    while !bytes.is_empty() {
        let written = to.fd.io(Direction::Write, |fd| match to.kind {
            FileKind::Socket => syscalls::send(fd, bytes),
            FileKind::Pipe => syscalls::write(fd, bytes),
        })?;
        bytes = &bytes[written..];
    }
    Ok(n)
}
