//! System calls on files, pipes and descriptors of any kind.

use super::{Result, call, checked};
use crate::sys::raw::poll_ms;
use std::ffi::{CStr, c_int};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Returns the owner of the descriptor that a call has just made.
///
/// # Safety
/// The result of a call that makes a descriptor, which has no other owner.
#[inline]
pub(super) unsafe fn owned(fd: usize) -> OwnedFd {
    // SAFETY: the caller's contract.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}

/// Reads into `buf`. Returns how many bytes were read.
#[inline]
pub fn read(fd: BorrowedFd<'_>, buf: &mut [u8]) -> Result<usize> {
    let args = [fd.as_raw_fd() as usize, buf.as_mut_ptr() as usize, buf.len()];
    // SAFETY: the kernel writes to the borrowed buffer, at most its length.
    unsafe { call(libc::SYS_read, args) }
}

/// Reads into memory that need not be initialised. The first bytes, as many as it returns, are
/// initialised then.
#[inline]
pub fn read_uninit(fd: BorrowedFd<'_>, buf: &mut [MaybeUninit<u8>]) -> Result<usize> {
    let args = [fd.as_raw_fd() as usize, buf.as_mut_ptr() as usize, buf.len()];
    // SAFETY: as in `read`; the kernel reads nothing from the buffer.
    unsafe { call(libc::SYS_read, args) }
}

/// Reads into `buf` from `offset` on. The file's own position does not change.
#[inline]
pub fn pread(fd: BorrowedFd<'_>, buf: &mut [u8], offset: u64) -> Result<usize> {
    let args = [fd.as_raw_fd() as usize, buf.as_mut_ptr() as usize, buf.len(), offset as usize];
    // SAFETY: as in `read`.
    unsafe { call(libc::SYS_pread64, args) }
}

/// Returns the device and the inode of an open file.
pub fn identity(fd: BorrowedFd<'_>) -> Result<(u64, u64)> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    let args = [fd.as_raw_fd() as usize, stat.as_mut_ptr() as usize];
    // SAFETY: the kernel writes a `stat`, which is valid with any bytes.
    let stat = unsafe {
        call(libc::SYS_fstat, args)?;
        stat.assume_init()
    };
    Ok((stat.st_dev, stat.st_ino))
}

/// Writes `buf`. Returns how many bytes the kernel has taken.
#[inline]
pub fn write(fd: BorrowedFd<'_>, buf: &[u8]) -> Result<usize> {
    let args = [fd.as_raw_fd() as usize, buf.as_ptr() as usize, buf.len()];
    // SAFETY: the kernel reads the borrowed buffer only.
    unsafe { call(libc::SYS_write, args) }
}

/// Reads into several buffers. Those beyond the kernel's limit (`UIO_MAXIOV`) stay empty.
#[inline]
pub fn readv(fd: BorrowedFd<'_>, bufs: &mut [IoSliceMut<'_>]) -> Result<usize> {
    let count = bufs.len().min(libc::UIO_MAXIOV as usize);
    let args = [fd.as_raw_fd() as usize, bufs.as_mut_ptr() as usize, count];
    // SAFETY: `IoSliceMut` is an `iovec`, and its buffer is borrowed exclusively.
    unsafe { call(libc::SYS_readv, args) }
}

/// Writes several buffers. Those beyond the kernel's limit (`UIO_MAXIOV`) are not written.
#[inline]
pub fn writev(fd: BorrowedFd<'_>, bufs: &[IoSlice<'_>]) -> Result<usize> {
    let count = bufs.len().min(libc::UIO_MAXIOV as usize);
    let args = [fd.as_raw_fd() as usize, bufs.as_ptr() as usize, count];
    // SAFETY: `IoSlice` is an `iovec`; the kernel only reads the buffers.
    unsafe { call(libc::SYS_writev, args) }
}

/// Closes a descriptor. The number is free afterwards, also if the kernel reports an error.
///
/// # Safety
/// The caller owns the descriptor and does not use it any more.
#[inline]
pub unsafe fn close(fd: RawFd) {
    // SAFETY: the caller's contract.
    let _ = unsafe { call(libc::SYS_close, [fd as usize]) };
}

/// Opens a file for reading, with `O_CLOEXEC`.
#[inline]
pub fn open_to_read(path: &CStr) -> Result<OwnedFd> {
    let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
    let args = [libc::AT_FDCWD as usize, path.as_ptr() as usize, flags, 0];
    // SAFETY: the path ends with a zero byte; the descriptor is new.
    unsafe { call(libc::SYS_openat, args).map(|fd| owned(fd)) }
}

/// Makes a file in memory, with `FD_CLOEXEC`. The name is for `/proc` only.
#[inline]
pub fn memfd_create(name: &CStr) -> Result<OwnedFd> {
    let args = [name.as_ptr() as usize, libc::MFD_CLOEXEC as usize];
    // SAFETY: the name ends with a zero byte; the descriptor is new.
    unsafe { call(libc::SYS_memfd_create, args).map(|fd| owned(fd)) }
}

/// Makes a pipe with `FD_CLOEXEC`, and with the flags `flags` (`O_NONBLOCK`) at both ends. Returns
/// the end to read from and the end to write to.
#[inline]
pub fn pipe2(flags: c_int) -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0 as RawFd; 2];
    let flags = (flags | libc::O_CLOEXEC) as usize;
    // SAFETY: the kernel writes two descriptors, which are new.
    unsafe {
        call(libc::SYS_pipe2, [ends.as_mut_ptr() as usize, flags])?;
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

/// Moves at most `max_bytes` from one descriptor to the other, of which one is a pipe. Returns how
/// many were moved. It does not wait for the pipe.
#[inline]
pub fn splice(from: BorrowedFd<'_>, to: BorrowedFd<'_>, max_bytes: usize) -> Result<usize> {
    let flags = (libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK) as usize;
    let (from, to) = (from.as_raw_fd() as usize, to.as_raw_fd() as usize);
    // SAFETY: without offsets the kernel uses no memory of this process.
    unsafe { call(libc::SYS_splice, [from, 0, to, 0, max_bytes, flags]) }
}

/// Returns the status flags of an open file description, `O_NONBLOCK` among them.
#[inline]
pub fn fcntl_getfl(fd: BorrowedFd<'_>) -> Result<c_int> {
    let args = [fd.as_raw_fd() as usize, libc::F_GETFL as usize];
    // SAFETY: without a pointer.
    unsafe { call(libc::SYS_fcntl, args).map(|flags| flags as c_int) }
}

/// Sets the status flags of an open file description.
#[inline]
pub fn fcntl_setfl(fd: BorrowedFd<'_>, flags: c_int) -> Result<()> {
    let args = [fd.as_raw_fd() as usize, libc::F_SETFL as usize, flags as usize];
    // SAFETY: without a pointer.
    unsafe { call(libc::SYS_fcntl, args).map(drop) }
}

/// Sets the mode of a file.
#[inline]
pub fn fchmod(fd: BorrowedFd<'_>, mode: libc::mode_t) -> Result<()> {
    // SAFETY: without a pointer.
    unsafe { call(libc::SYS_fchmod, [fd.as_raw_fd() as usize, mode as usize]).map(drop) }
}

/// Asks which descriptors are ready now. Returns their number; their `revents` are set.
#[inline]
pub fn poll_now(list: &mut [libc::pollfd]) -> Result<usize> {
    // SAFETY: the list is borrowed exclusively.
    checked(unsafe { poll_ms(list.as_mut_ptr(), list.len(), 0) })
}

/// Returns a descriptor of a process, which becomes readable when the process ends (Linux 5.3). It
/// has `FD_CLOEXEC`.
#[inline]
pub fn pidfd_open(pid: u32) -> Result<OwnedFd> {
    // SAFETY: the descriptor is new.
    unsafe { call(libc::SYS_pidfd_open, [pid as usize, 0]).map(|fd| owned(fd)) }
}

#[cfg(test)]
mod tests {
    use super::super::Errno;
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_pipe_has_the_flags_that_were_asked_for() {
        for flags in [0, libc::O_NONBLOCK] {
            let (reader, writer) = pipe2(flags).unwrap();
            for end in [&reader, &writer] {
                assert_eq!(fcntl_getfl(end.as_fd()).unwrap() & libc::O_NONBLOCK, flags);
                // SAFETY: asks about a descriptor of this function.
                let bits = unsafe { libc::fcntl(end.as_raw_fd(), libc::F_GETFD) };
                assert_eq!(bits, libc::FD_CLOEXEC);
            }
            assert_eq!(write(writer.as_fd(), b"x"), Ok(1));
            assert_eq!(read(reader.as_fd(), &mut [0; 4]), Ok(1));
        }
    }

    #[test]
    fn status_flags_are_set_and_cleared() {
        let (reader, _writer) = pipe2(0).unwrap();
        let before = fcntl_getfl(reader.as_fd()).unwrap();
        fcntl_setfl(reader.as_fd(), before | libc::O_NONBLOCK).unwrap();
        assert_eq!(read(reader.as_fd(), &mut [0; 4]), Err(Errno::AGAIN));
        fcntl_setfl(reader.as_fd(), before).unwrap();
        assert_eq!(fcntl_getfl(reader.as_fd()), Ok(before));
    }

    #[test]
    fn vectored_calls_keep_the_order_and_the_limit() {
        let (reader, writer) = pipe2(libc::O_NONBLOCK).unwrap();
        let bytes: Vec<u8> = (0..1100u32).map(|i| i as u8).collect();
        let out: Vec<_> = bytes.chunks(1).map(IoSlice::new).collect();
        assert_eq!(writev(writer.as_fd(), &out), Ok(1024), "the kernel takes 1024 buffers");
        assert_eq!(write(writer.as_fd(), &bytes[1024..]), Ok(76));
        let mut got = vec![0; 1100];
        let mut into: Vec<_> = got.chunks_mut(1).map(IoSliceMut::new).collect();
        assert_eq!(readv(reader.as_fd(), &mut into), Ok(1024));
        let mut rest = [MaybeUninit::uninit(); 100];
        assert_eq!(read_uninit(reader.as_fd(), &mut rest), Ok(76));
        // SAFETY: the kernel has written the first 76 bytes.
        let rest: Vec<u8> = rest[..76].iter().map(|b| unsafe { b.assume_init() }).collect();
        assert_eq!((&got[..1024], &rest[..]), (&bytes[..1024], &bytes[1024..]));
    }

    #[test]
    fn splice_moves_at_most_the_limit_and_does_not_wait() {
        let (reader, into) = pipe2(0).unwrap();
        let (out, writer) = pipe2(0).unwrap();
        assert_eq!(splice(reader.as_fd(), writer.as_fd(), 8), Err(Errno::AGAIN));
        write(into.as_fd(), b"0123456789").unwrap();
        assert_eq!(splice(reader.as_fd(), writer.as_fd(), 4), Ok(4));
        assert_eq!(splice(reader.as_fd(), writer.as_fd(), 100), Ok(6));
        let mut got = [0; 16];
        assert_eq!(read(out.as_fd(), &mut got), Ok(10));
        assert_eq!(&got[..10], b"0123456789");
        drop(into);
        assert_eq!(splice(reader.as_fd(), writer.as_fd(), 8), Ok(0), "end-of-file");
        let (memory, other) = (memfd_create(c"a").unwrap(), memfd_create(c"b").unwrap());
        assert_eq!(splice(memory.as_fd(), other.as_fd(), 8), Err(Errno::INVAL), "no pipe");
    }

    #[test]
    fn pread_begins_at_its_offset_and_keeps_the_position() {
        let file = memfd_create(c"pread").unwrap();
        write(file.as_fd(), b"0123456789").unwrap();
        let mut got = [0; 4];
        assert_eq!(pread(file.as_fd(), &mut got, 3), Ok(4));
        assert_eq!(&got, b"3456");
        assert_eq!(pread(file.as_fd(), &mut got, 8), Ok(2));
        assert_eq!(read(file.as_fd(), &mut got), Ok(0), "the position is at the end");
        fchmod(file.as_fd(), 0o640).unwrap();
        let mode = std::fs::File::from(file).metadata().unwrap();
        assert_eq!(std::os::unix::fs::MetadataExt::mode(&mode) & 0o777, 0o640);
    }

    #[test]
    fn open_to_read_opens_a_file_that_exists() {
        let file = open_to_read(c"/proc/self/stat").unwrap();
        assert!(read(file.as_fd(), &mut [0; 64]).unwrap() > 0);
        let error = std::io::Error::from(open_to_read(c"/proc/self/none").unwrap_err());
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }

    #[test]
    fn poll_now_counts_the_ready_descriptors() {
        let (reader, writer) = pipe2(0).unwrap();
        let entry = |fd: &OwnedFd, events| libc::pollfd { fd: fd.as_raw_fd(), events, revents: 0 };
        let mut list = [entry(&reader, libc::POLLIN), entry(&writer, libc::POLLOUT)];
        assert_eq!(poll_now(&mut list), Ok(1));
        assert_eq!((list[0].revents, list[1].revents), (0, libc::POLLOUT));
        write(writer.as_fd(), b"x").unwrap();
        assert_eq!(poll_now(&mut list), Ok(2));
    }

    #[test]
    fn a_pidfd_is_readable_when_the_process_has_ended() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        // Old kernels have no pidfd, and qemu-user may not.
        let pidfd = pidfd_open(child.id());
        let mut list = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }];
        if let Ok(pidfd) = &pidfd {
            list[0].fd = pidfd.as_raw_fd();
            assert_eq!(poll_now(&mut list), Ok(0));
        }
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(poll_now(&mut list), Ok(usize::from(pidfd.is_ok())));
    }
}
