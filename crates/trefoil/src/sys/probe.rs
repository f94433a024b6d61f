//! Whether another thread of this process is on the CPU (or wants to be) or blocked in the kernel.
//!
//! `/proc/self/task/TID/syscall` says `running`, or which call the thread sleeps in: 0.3 µs for a running
//! thread, 0.6 for a blocked one. Where that file is not to be had (a sandbox, no descriptor left) the
//! thread's CPU clock is read: one that has not moved between two looks was not on a CPU.
//!
//! Most sleeps are short if they are for memory (a page fault, `mmap` and its kin wait for one another), for a
//! lock of ours, or for a futex. Such a one is [`ThreadState::BrieflyBlocked`] until it has lasted a while: seen again, and
//! no CPU time was used in between.

use super::clock::{Nanos, now};
use super::lock;
use super::raw::syscall;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags};
use std::ffi::CStr;
use std::io::Write;
use std::mem::ManuallyDrop;

/// What a look found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ThreadState {
    Running,
    /// Asleep in the kernel, at some moment of this look.
    Blocked,
    /// The same, but for something that is usually had soon: it counts when it has lasted this much longer.
    BrieflyBlocked(Nanos),
    /// Not to be said before the next look.
    Unknown,
}

/// Looks at one thread at a time, and remembers what it needs for the next look at the same.
pub(crate) struct ThreadProbe {
    tid: u32,
    file: Option<File>,
    /// CPU time at the last look that needed it, and since when it has not changed.
    cpu: u64,
    since: Nanos,
}

/// Closed by the kernel's call: libc's `close` is one of our doors, and may wake a goroutine that waits for a socket with
/// the same number. Here the scheduler's lock is held.
struct File(ManuallyDrop<OwnedFd>);

impl File {
    fn new(fd: OwnedFd) -> File {
        File(ManuallyDrop::new(fd))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: our own descriptor, for the last time.
        unsafe { rustix::io::close(self.0.as_raw_fd()) };
    }
}

impl ThreadProbe {
    pub(crate) const fn new() -> ThreadProbe {
        ThreadProbe { tid: 0, file: None, cpu: 0, since: 0 }
    }

    /// One look. No allocation, no lock of libc.
    pub(crate) fn check(&mut self, tid: u32) -> ThreadState {
        if self.tid != tid {
            *self = ThreadProbe { tid, file: open(tid).map(File::new), cpu: 0, since: 0 };
        }
        let mut text = [0u8; 160];
        let read = self.file.as_ref().map(|file| rustix::io::pread(&*file.0, &mut text, 0));
        match read {
            Some(Ok(_)) if text.starts_with(b"running") => ThreadState::Running,
            // Anything else is not that file: somebody has closed ours, and the number was given to another.
            Some(Ok(n))
                if n > 0
                    && let Some(call) = Call::read(&text[..n]) =>
            {
                let min_sleep = call.min_sleep();
                if min_sleep == 0 {
                    return ThreadState::Blocked;
                }
                match min_sleep.saturating_sub(self.idle_nanos(tid)) {
                    0 => ThreadState::Blocked,
                    more => ThreadState::BrieflyBlocked(more),
                }
            }
            _ => {
                if self.file.take().is_some() {
                    self.tid = 0;
                }
                self.check_cpu_time(tid)
            }
        }
    }

    /// For how long, as far as we saw, the thread has not been on a CPU.
    fn idle_nanos(&mut self, tid: u32) -> Nanos {
        let (cpu, now) = (cpu_time(tid), now());
        if cpu != std::mem::replace(&mut self.cpu, cpu) {
            self.since = now;
        }
        now.saturating_sub(self.since)
    }

    #[cold]
    fn check_cpu_time(&mut self, tid: u32) -> ThreadState {
        match (self.cpu, self.idle_nanos(tid)) {
            (0, _) => ThreadState::Unknown,
            (_, 0) => ThreadState::Running,
            _ => ThreadState::Blocked,
        }
    }
}

/// A call that a thread sleeps in: its number (−1 for a page fault), and the last argument.
struct Call {
    number: i64,
    sixth: u64,
}

impl Call {
    /// From the file's text: the number, six arguments, stack pointer and instruction, all but the first
    /// hexadecimal. A page fault has no arguments.
    fn read(text: &[u8]) -> Option<Call> {
        let text = std::str::from_utf8(text).ok()?;
        let mut fields = text.split_ascii_whitespace();
        let number = fields.next()?.parse().ok()?;
        fields.clone().next()?.strip_prefix("0x")?;
        let sixth = fields.nth(5).and_then(|field| field.strip_prefix("0x"));
        Some(Call {
            number,
            sixth: sixth.map_or(0, |hex| u64::from_str_radix(hex, 16).unwrap_or(0)),
        })
    }

    /// How long a sleep in this call must last before it counts.
    fn min_sleep(&self) -> Nanos {
        /// Until the next look.
        const FUTEX: Nanos = 10_000;
        /// Longer than a holder is off the CPU on a busy machine: or whoever gets the P would only wait behind.
        const SHORT: Nanos = 10_000_000;
        match self.number {
            libc::SYS_futex if self.sixth as u32 == lock::LOCK_BITSET.get() => SHORT,
            libc::SYS_futex => FUTEX,
            -1
            | libc::SYS_mmap
            | libc::SYS_mprotect
            | libc::SYS_munmap
            | libc::SYS_brk
            | libc::SYS_mremap
            | libc::SYS_madvise
            | libc::SYS_process_madvise
            // They do not sleep, but the kernel may touch user memory on their way out, which is a page fault.
            | libc::SYS_sched_yield
            | libc::SYS_rt_sigreturn => SHORT,
            _ => 0,
        }
    }
}

fn open(tid: u32) -> Option<OwnedFd> {
    let mut path = [0u8; 48];
    write!(&mut path[..], "/proc/self/task/{tid}/syscall\0").ok()?;
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()
}

/// Nanoseconds that a thread has spent on a CPU; 0 if that cannot be found out.
pub(crate) fn cpu_time(tid: u32) -> u64 {
    /// The kernel's number for "the CPU time of one thread".
    const PER_THREAD_SCHED: i32 = 6;
    let clock = (!(tid as i32) << 3) | PER_THREAD_SCHED;
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec. A raw call: a signal handler asks, and errno is the goroutine's.
    if unsafe { syscall(libc::SYS_clock_gettime, [clock as usize, &raw mut t as usize]) } != 0 {
        return 0;
    }
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    #[test]
    fn tells_a_sleeper_from_a_worker() {
        let (tid, work, stop) = (AtomicU32::new(0), AtomicBool::new(true), AtomicBool::new(false));
        std::thread::scope(|s| {
            s.spawn(|| {
                tid.store(
                    rustix::thread::gettid().as_raw_nonzero().get() as u32,
                    Ordering::Release,
                );
                while work.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                while !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(std::time::Duration::from_millis(50));
                }
            });
            while tid.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
            let tid = tid.load(Ordering::Relaxed);
            let (mut probe, mut by_clock) =
                (ThreadProbe::new(), ThreadProbe { tid, ..ThreadProbe::new() });
            assert_eq!(probe.check(tid), ThreadState::Running);
            assert_eq!(by_clock.check(tid), ThreadState::Unknown);
            std::thread::sleep(std::time::Duration::from_millis(30));
            assert_eq!(by_clock.check(tid), ThreadState::Running);
            work.store(false, Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert_eq!(probe.check(tid), ThreadState::Blocked);
            by_clock.check(tid);
            std::thread::sleep(std::time::Duration::from_millis(5));
            assert_eq!(by_clock.check(tid), ThreadState::Blocked);
            stop.store(true, Ordering::Relaxed);
        });
    }
}
