//! System calls by the bare instruction: no interposed function and no part of the runtime sees
//! them.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Makes a system call that cannot be intercepted in user space.
pub(crate) fn raw(number: libc::c_long, args: [usize; 4]) -> isize {
    let result: isize;
    // SAFETY: the callers pass the arguments that the call expects.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") args[0] => result,
            in("x1") args[1], in("x2") args[2], in("x3") args[3],
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2], in("r10") args[3],
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Sleeps in the kernel. Returns 0, or a negative error number.
pub(crate) fn raw_sleep(d: Duration) -> isize {
    let time = libc::timespec { tv_sec: d.as_secs() as i64, tv_nsec: i64::from(d.subsec_nanos()) };
    raw(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0])
}

/// Sleeps in the kernel, as [`raw_sleep`]. A preemption signal interrupts the call if it was sent
/// just before the goroutine entered the kernel; then this sleeps for the rest.
pub(crate) fn raw_sleep_through(d: Duration) -> isize {
    let end = Instant::now() + d;
    loop {
        let result = raw_sleep(end.saturating_duration_since(Instant::now()));
        if result != -(libc::EINTR as isize) {
            return result;
        }
    }
}

/// Reads one byte.
pub(crate) fn raw_read(fd: &OwnedFd) -> isize {
    let mut byte = 0u8;
    raw(libc::SYS_read, [fd.as_raw_fd() as usize, &raw mut byte as usize, 1, 0])
}

/// Writes to the descriptor.
pub(crate) fn raw_write(fd: &OwnedFd, bytes: &[u8]) -> isize {
    raw(libc::SYS_write, [fd.as_raw_fd() as usize, bytes.as_ptr() as usize, bytes.len(), 0])
}

/// Calls `flock` with the operation `how`.
pub(crate) fn raw_lock(fd: &OwnedFd, how: libc::c_int) -> isize {
    raw(libc::SYS_flock, [fd.as_raw_fd() as usize, how as usize, 0, 0])
}

/// Returns the reading and the writing end of a new pipe, both blocking.
pub(crate) fn pipe() -> (OwnedFd, OwnedFd) {
    let mut fds = [0; 2];
    // SAFETY: writes two descriptors, which are ours then.
    unsafe {
        assert_eq!(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))
    }
}
