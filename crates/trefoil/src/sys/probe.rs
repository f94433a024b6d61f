//! Tells whether another thread of this process runs (or waits for a CPU) or is blocked in the
//! kernel.
//!
//! `/proc/self/task/TID/syscall` contains `running`, or the system call that the thread sleeps in:
//! 0.3 µs for a running thread, 0.6 µs for a blocked one. If that file is not available (a sandbox,
//! no descriptor left) the thread's CPU time is read: if it is the same in two checks, the thread
//! was not on a CPU.
//!
//! Most sleeps are short if they are for memory (page faults, `mmap` and its relatives wait for
//! each other), for a lock of the runtime, or for a futex. Such a sleep is
//! [`ThreadState::BrieflyBlocked`] until it has lasted a while: until a later check finds the
//! thread asleep, and it has used no CPU time in between.

use super::clock::{Nanos, now};
use super::lock;
use super::raw::syscall;
use super::syscalls;
use std::ffi::CStr;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ThreadState {
    Running,
    /// Asleep in the kernel, at some moment of this check.
    Blocked,
    /// Asleep for something that usually comes soon. It counts as blocked after this much longer.
    BrieflyBlocked(Nanos),
    /// Unknown before the next check.
    Unknown,
}

/// Checks one thread at a time, and stores what the next check of the same thread needs.
pub(crate) struct ThreadProbe {
    /// The thread of the last check; 0 if its file must be opened again.
    tid: u32,
    /// `/proc/self/task/TID/syscall` of that thread, if it is available.
    file: Option<File>,
    /// CPU time at the last check that needed it, and since when it has not changed.
    cpu: u64,
    since: Nanos,
    /// The system call in which the last check found the thread.
    call: Option<u32>,
}

/// A descriptor that is closed by a raw system call. libc's `close` is an interposed function: it
/// may wake a goroutine that waits for a socket with the same number, and the scheduler's lock is
/// held here.
struct File(ManuallyDrop<OwnedFd>);

impl File {
    fn new(fd: OwnedFd) -> File {
        File(ManuallyDrop::new(fd))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: our own descriptor, which is not used after this.
        unsafe { syscalls::close(self.0.as_raw_fd()) };
    }
}

impl ThreadProbe {
    pub(crate) const fn new() -> ThreadProbe {
        ThreadProbe { tid: 0, file: None, cpu: 0, since: 0, call: None }
    }

    /// Returns the number of the system call in which the last check that said
    /// [`ThreadState::Blocked`] found the thread, if that is known.
    pub(crate) fn blocking_call(&self) -> Option<u32> {
        self.call
    }

    /// Checks a thread. Does not allocate and takes no lock of libc.
    pub(crate) fn check(&mut self, tid: u32) -> ThreadState {
        if self.tid != tid {
            *self = ThreadProbe { tid, file: open(tid).map(File::new), ..ThreadProbe::new() };
        }
        self.call = None;
        let mut text = [0u8; 160];
        let read = self.file.as_ref().map(|file| syscalls::pread(file.0.as_fd(), &mut text, 0));
        let call = match read {
            Some(Ok(_)) if text.starts_with(b"running") => return ThreadState::Running,
            Some(Ok(n)) if n > 0 => BlockedCall::parse(&text[..n]),
            _ => None,
        };
        let Some(call) = call else {
            // Other text: the program has closed our descriptor, and the number is another file
            // now.
            if self.file.take().is_some() {
                self.tid = 0;
            }
            return self.check_cpu_time(tid);
        };
        self.call = u32::try_from(call.number).ok();
        let min_sleep = call.min_sleep();
        if min_sleep == 0 {
            return ThreadState::Blocked;
        }
        match min_sleep.saturating_sub(self.idle_nanos(tid)) {
            0 => ThreadState::Blocked,
            more => ThreadState::BrieflyBlocked(more),
        }
    }

    /// Returns for how long the thread has used no CPU time, as far as the checks have seen.
    fn idle_nanos(&mut self, tid: u32) -> Nanos {
        let (cpu, now) = (cpu_time(tid), now());
        if cpu != std::mem::replace(&mut self.cpu, cpu) {
            self.since = now;
        }
        now.saturating_sub(self.since)
    }

    /// Checks a thread by its CPU time alone.
    #[cold]
    fn check_cpu_time(&mut self, tid: u32) -> ThreadState {
        match (self.cpu, self.idle_nanos(tid)) {
            (0, _) => ThreadState::Unknown,
            (_, 0) => ThreadState::Running,
            _ => ThreadState::Blocked,
        }
    }
}

/// A system call that a thread sleeps in: its number (−1 for a page fault) and its last argument.
struct BlockedCall {
    number: i64,
    sixth: u64,
}

impl BlockedCall {
    /// Parses the file's text: the number, six arguments, stack pointer and instruction pointer,
    /// all except the first in hexadecimal. A page fault has no arguments.
    fn parse(text: &[u8]) -> Option<BlockedCall> {
        let text = std::str::from_utf8(text).ok()?;
        let mut fields = text.split_ascii_whitespace();
        let number = fields.next()?.parse().ok()?;
        fields.clone().next()?.strip_prefix("0x")?;
        let sixth = fields.nth(5).and_then(|field| field.strip_prefix("0x"));
        Some(BlockedCall {
            number,
            sixth: sixth.map_or(0, |hex| u64::from_str_radix(hex, 16).unwrap_or(0)),
        })
    }

    /// Returns how long a sleep in this call must last before the thread counts as blocked.
    fn min_sleep(&self) -> Nanos {
        /// A thread that still sleeps at a check this much later counts as blocked.
        const FUTEX_NANOS: Nanos = 10_000;
        /// Longer than a lock holder is off the CPU on a busy machine: an M that got the P earlier
        /// would only wait for the same lock.
        const SHORT_NANOS: Nanos = 10_000_000;
        match self.number {
            libc::SYS_futex if self.sixth as u32 == lock::LOCK_BITSET.get() => SHORT_NANOS,
            libc::SYS_futex => FUTEX_NANOS,
            -1
            | libc::SYS_mmap
            | libc::SYS_mprotect
            | libc::SYS_munmap
            | libc::SYS_brk
            | libc::SYS_mremap
            | libc::SYS_madvise
            | libc::SYS_process_madvise
            // They do not sleep, but on return the kernel may touch user memory: a page fault.
            | libc::SYS_sched_yield
            | libc::SYS_rt_sigreturn => SHORT_NANOS,
            _ => 0,
        }
    }
}

/// Opens the file that tells which system call the thread sleeps in.
fn open(tid: u32) -> Option<OwnedFd> {
    let mut path = [0u8; 48];
    write!(&mut path[..], "/proc/self/task/{tid}/syscall\0").ok()?;
    let path = CStr::from_bytes_until_nul(&path).ok()?;
    syscalls::open_to_read(path).ok()
}

/// Returns the nanoseconds that a thread has spent on a CPU; 0 if that cannot be found out.
pub(crate) fn cpu_time(tid: u32) -> u64 {
    /// The kernel's clock type for the CPU time of one thread.
    const PER_THREAD_SCHED: i32 = 6;
    let clock = (!(tid as i32) << 3) | PER_THREAD_SCHED;
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec. A raw call: a signal handler calls this, and errno belongs to
    // the goroutine.
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
    fn a_sleeping_thread_is_blocked_and_a_spinning_one_runs() {
        let (tid, work, stop) = (AtomicU32::new(0), AtomicBool::new(true), AtomicBool::new(false));
        /// Ends the thread, also after a failed assertion: the scope waits for it.
        struct End<'a>(&'a AtomicBool, &'a AtomicBool, std::thread::Thread);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Relaxed);
                self.1.store(true, Ordering::Relaxed);
                self.2.unpark();
            }
        }
        std::thread::scope(|s| {
            let thread = s.spawn(|| {
                tid.store(syscalls::gettid(), Ordering::Release);
                while work.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
                while !stop.load(Ordering::Relaxed) {
                    std::thread::park();
                }
            });
            let _end = End(&work, &stop, thread.thread().clone());
            while tid.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
            let tid = tid.load(Ordering::Relaxed);
            let (mut probe, mut by_clock) =
                (ThreadProbe::new(), ThreadProbe { tid, ..ThreadProbe::new() });
            assert_eq!(probe.check(tid), ThreadState::Running);
            assert_eq!(by_clock.check(tid), ThreadState::Unknown);
            // On a busy machine it may not get a CPU for a while.
            let runs = (0..200).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(30));
                by_clock.check(tid) == ThreadState::Running
            });
            assert!(runs, "a thread that spins never counts as running");
            work.store(false, Ordering::Relaxed);
            for probe in [&mut probe, &mut by_clock] {
                let is_blocked = (0..1_000).any(|_| {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    probe.check(tid) == ThreadState::Blocked
                });
                assert!(is_blocked, "a thread that waits never counts as blocked");
            }
        });
    }
}
