//! System calls about processes and threads.

use super::{Result, call};
use crate::sys::raw::syscall;
use std::time::Duration;

/// Returns the kernel's id of the calling thread.
#[inline]
pub fn gettid() -> u32 {
    // SAFETY: without arguments; it never fails.
    unsafe { syscall(libc::SYS_gettid, []) as u32 }
}

/// Returns the id of this process.
#[inline]
pub fn getpid() -> u32 {
    // SAFETY: without arguments; it never fails.
    unsafe { syscall(libc::SYS_getpid, []) as u32 }
}

/// Returns the effective user id of this process.
#[inline]
pub fn geteuid() -> u32 {
    // SAFETY: without arguments; it never fails.
    unsafe { syscall(libc::SYS_geteuid, []) as u32 }
}

/// The CPUs on which a thread may run, a bit for each.
pub type CpuMask = [u64; 1024 / 64];

/// Returns the CPUs on which a thread may run.
///
/// # Errors
/// `EINVAL` if the kernel supports more CPUs than the mask has bits.
pub fn sched_getaffinity(tid: u32) -> Result<CpuMask> {
    // The kernel fills the part that it has CPUs for, and returns its length.
    let mut mask: CpuMask = [0; 16];
    let args = [tid as usize, size_of_val(&mask), mask.as_mut_ptr() as usize];
    // SAFETY: the kernel writes at most the size of the mask.
    unsafe { call(libc::SYS_sched_getaffinity, args) }.map(|_| mask)
}

/// Sets by how much the kernel may delay the end of a sleep of this thread. Best effort.
pub fn set_timer_slack(nanos: usize) {
    // SAFETY: without a pointer.
    let _ = unsafe { call(libc::SYS_prctl, [libc::PR_SET_TIMERSLACK as usize, nanos]) };
}

/// Sleeps for this long, or until a signal comes.
pub fn nanosleep(time: Duration) {
    let time = libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    // SAFETY: the kernel reads the time only; the time that is left is not asked for.
    let _ = unsafe { call(libc::SYS_nanosleep, [&raw const time as usize, 0]) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn ids_are_those_of_libc() {
        // SAFETY: they only return numbers.
        let (tid, pid, uid) = unsafe { (libc::gettid(), libc::getpid(), libc::geteuid()) };
        assert_eq!((gettid(), getpid(), geteuid()), (tid as u32, pid as u32, uid));
        let other = std::thread::spawn(gettid).join().unwrap();
        assert_ne!(other, gettid());
    }

    #[test]
    fn affinity_is_the_mask_that_was_set() {
        std::thread::spawn(|| {
            let before = sched_getaffinity(gettid()).unwrap();
            let last = (0..1024).rev().find(|cpu| before[cpu / 64] >> (cpu % 64) & 1 != 0).unwrap();
            // SAFETY: a set of libc's own type, for this thread, which ends soon.
            let rc = unsafe {
                let mut set: libc::cpu_set_t = std::mem::zeroed();
                libc::CPU_SET(last, &mut set);
                libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
            };
            assert_eq!(rc, 0);
            let mut expected: CpuMask = [0; 16];
            expected[last / 64] |= 1 << (last % 64);
            assert_eq!(sched_getaffinity(gettid()), Ok(expected));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn nanosleep_sleeps_at_least_the_time() {
        let begin = Instant::now();
        nanosleep(Duration::from_millis(3));
        assert!(begin.elapsed() >= Duration::from_millis(3));
    }

    #[test]
    fn timer_slack_is_set_for_the_thread() {
        std::thread::spawn(|| {
            set_timer_slack(77);
            // SAFETY: without a pointer.
            assert_eq!(unsafe { libc::prctl(libc::PR_GET_TIMERSLACK) }, 77);
        })
        .join()
        .unwrap();
    }
}
