//! Tells whether another thread of this process runs (or waits for a CPU) or is blocked in the
//! kernel.
//!
//! There are three sources, and the first that can be opened is used:
//! 1. `/proc/self/task/TID/syscall` contains `running`, or the system call that the thread sleeps
//!    in: 0.3 µs for a running thread, 0.6 µs for a blocked one.
//! 2. `/proc/self/task/TID/stat` contains the thread's state, but not the system call: 1 to 2 µs. A
//!    process that was started by root and has changed its user may open this file, and not the
//!    first one.
//! 3. The thread's CPU time (in a sandbox without `/proc`, or if no descriptor is left): if it is
//!    the same in two checks, the thread was not on a CPU. On a busy machine a thread that waits
//!    for a CPU is mistaken for a blocked one.
//!
//! Most sleeps are short if they are for memory (page faults, `mmap` and its relatives wait for
//! each other), for a lock of the runtime, or for a futex. Such a sleep is
//! [`ThreadState::BrieflyBlocked`] until it has lasted a while: until a later check finds the
//! thread asleep, and it has used no CPU time in between. If the system call is unknown, the sleep
//! may be one of these.

use super::clock::{Nanos, now};
use super::lock;
use super::raw::syscall;
use super::syscalls::{self, Errno};
use std::ffi::CStr;
use std::io::Write;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// The result of a check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ThreadState {
    Running,
    /// Asleep in the kernel at some moment of this check; or, judged by its CPU time, not on a CPU
    /// since the last check.
    Blocked,
    /// Asleep for something that usually comes soon. It counts as blocked after this much longer.
    BrieflyBlocked(Nanos),
    /// Unknown before the next check.
    Unknown,
}

/// Checks one thread at a time, and stores what the next check of the same thread needs.
pub struct ThreadProbe {
    /// The thread of the last check; 0 before the first.
    tid: u32,
    /// Where the state of that thread is read, if a file is available.
    file: Option<File>,
    /// CPU time at the last check that needed it, and since when it has not changed.
    cpu: u64,
    since: Nanos,
    /// The system call in which the last check found the thread.
    call: Option<u32>,
}

/// A file of a thread in `/proc`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    Syscall,
    Stat,
}

/// An open file of a thread. It is closed by a raw system call: libc's `close` is an interposed
/// function, which may wake a goroutine that waits for a socket with the same number, and the
/// scheduler's lock is held here.
struct File {
    source: Source,
    fd: ManuallyDrop<OwnedFd>,
    /// Device and inode. The program may close our descriptor, and the number may be another file
    /// then.
    identity: (u64, u64),
}

impl File {
    fn open(source: Source, tid: u32) -> Option<File> {
        let name = match source {
            Source::Syscall => "syscall",
            Source::Stat => "stat",
        };
        let mut path = [0u8; 48];
        write!(&mut path[..], "/proc/self/task/{tid}/{name}\0").ok()?;
        let path = CStr::from_bytes_until_nul(&path).ok()?;
        let fd = ManuallyDrop::new(syscalls::open_to_read(path).ok()?);
        let Ok(identity) = syscalls::identity(fd.as_fd()) else {
            // SAFETY: our own descriptor, which is not used after this.
            unsafe { syscalls::close(fd.as_raw_fd()) };
            return None;
        };
        Some(File { source, fd, identity })
    }

    /// Reads what the file says of its thread. Returns None if it says nothing: it may not be our
    /// file, or the process may not read it.
    fn read(&self) -> Option<Found> {
        let mut text = [0u8; 160];
        let length = match syscalls::pread(self.fd.as_fd(), &mut text, 0) {
            Ok(length) => length,
            Err(Errno::SRCH) => return Some(Found::Ended),
            Err(_) => return None,
        };
        match self.source {
            Source::Syscall => parse_syscall(&text[..length]),
            Source::Stat => parse_stat(&text[..length]),
        }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if syscalls::identity(self.fd.as_fd()) == Ok(self.identity) {
            // SAFETY: our own descriptor, which is not used after this.
            unsafe { syscalls::close(self.fd.as_raw_fd()) };
        }
    }
}

impl ThreadProbe {
    #[inline]
    pub const fn new() -> ThreadProbe {
        ThreadProbe { tid: 0, file: None, cpu: 0, since: 0, call: None }
    }

    /// Returns the number of the system call in which the last check found the thread asleep, if
    /// that is known.
    #[inline]
    pub fn blocking_call(&self) -> Option<u32> {
        self.call
    }

    /// Checks a thread. Does not allocate and takes no lock of libc.
    pub fn check(&mut self, tid: u32) -> ThreadState {
        if self.tid != tid {
            let file = File::open(Source::Syscall, tid).or_else(|| File::open(Source::Stat, tid));
            *self = ThreadProbe { tid, file, ..ThreadProbe::new() };
        }
        self.call = None;
        let Some(file) = &self.file else { return self.check_cpu_time(tid) };
        match file.read() {
            Some(Found::Running) => ThreadState::Running,
            Some(Found::InCall { number, min_sleep }) => {
                self.call = number;
                self.judge_sleep(tid, min_sleep)
            }
            Some(Found::Asleep { min_sleep }) => self.check_asleep(tid, min_sleep),
            Some(Found::Stopped) => ThreadState::Unknown,
            Some(Found::Ended) => {
                // The number may be that of another thread soon.
                *self = ThreadProbe::new();
                ThreadState::Unknown
            }
            None => self.change_source(tid),
        }
    }

    /// Checks a thread again that sleeps according to `stat`. The kernel sets that state before the
    /// thread leaves its CPU, but sysmon needs a thread that slept after `PROBING` was visible
    /// (`sched/monitor/handoff.rs`): one that has used no CPU time since this check began.
    fn check_asleep(&mut self, tid: u32, min_sleep: Nanos) -> ThreadState {
        let before = cpu_time(tid);
        let again = self.file.as_ref().and_then(File::read);
        let is_asleep = matches!(again, Some(Found::Asleep { .. }));
        if is_asleep && before != 0 && cpu_time(tid) == before {
            self.judge_sleep(tid, min_sleep)
        } else {
            ThreadState::Unknown
        }
    }

    /// Returns `Blocked` if the thread, which sleeps, has used no CPU time for `min_sleep`, and
    /// otherwise `BrieflyBlocked`.
    fn judge_sleep(&mut self, tid: u32, min_sleep: Nanos) -> ThreadState {
        if min_sleep == 0 {
            return ThreadState::Blocked;
        }
        match min_sleep.saturating_sub(self.idle_nanos(tid)) {
            0 => ThreadState::Blocked,
            more => ThreadState::BrieflyBlocked(more),
        }
    }

    /// Opens another file for the next check: this one cannot be read, or is not ours any more.
    #[cold]
    fn change_source(&mut self, tid: u32) -> ThreadState {
        let other = match self.file.take() {
            Some(File { source: Source::Syscall, .. }) => Source::Stat,
            _ => Source::Syscall,
        };
        self.file = File::open(other, tid);
        self.check_cpu_time(tid)
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

/// What a file says of its thread.
#[derive(PartialEq, Eq, Debug)]
enum Found {
    Running,
    /// Asleep in a system call, or in a page fault, which has no number. The thread is blocked when
    /// it has slept for `min_sleep`.
    InCall {
        number: Option<u32>,
        min_sleep: Nanos,
    },
    /// As `InCall`, but why it sleeps is unknown.
    Asleep {
        min_sleep: Nanos,
    },
    /// By a debugger, for example; or about to end.
    Stopped,
    Ended,
}

/// A thread that waits for a futex and still sleeps at a check this much later counts as blocked.
const FUTEX_NANOS: Nanos = 10_000;
/// The same for a thread that waits for memory or for a lock of the runtime. Longer than a lock
/// holder is off the CPU on a busy machine: an M that got the P earlier would only wait for the
/// same lock.
const MEMORY_NANOS: Nanos = 10_000_000;

/// Parses [`Source::Syscall`]: the number of the system call (−1 for a page fault), six arguments,
/// stack pointer and instruction pointer, all except the first in hexadecimal. A page fault has no
/// arguments.
fn parse_syscall(text: &[u8]) -> Option<Found> {
    if text.starts_with(b"running") {
        return Some(Found::Running);
    }
    let text = std::str::from_utf8(text).ok()?;
    let mut fields = text.split_ascii_whitespace();
    let number = fields.next()?.parse().ok()?;
    fields.clone().next()?.strip_prefix("0x")?;
    let sixth = fields.nth(5).and_then(|field| field.strip_prefix("0x"));
    let sixth = sixth.map_or(0, |hex| u64::from_str_radix(hex, 16).unwrap_or(0));
    let min_sleep = match number {
        libc::SYS_futex if sixth as u32 == lock::LOCK_BITSET.get() => MEMORY_NANOS,
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
        | libc::SYS_rt_sigreturn => MEMORY_NANOS,
        _ => 0,
    };
    Some(Found::InCall { number: u32::try_from(number).ok(), min_sleep })
}

/// Parses [`Source::Stat`]: thread id, name in parentheses, state, and more numbers.
fn parse_stat(text: &[u8]) -> Option<Found> {
    let name_end = text.iter().rposition(|&byte| byte == b')')?;
    match text.get(name_end + 1..name_end + 4)? {
        b" R " => Some(Found::Running),
        // Maybe for a futex.
        b" S " => Some(Found::Asleep { min_sleep: FUTEX_NANOS }),
        // Uninterruptible: for memory, or for a disk.
        b" D " => Some(Found::Asleep { min_sleep: MEMORY_NANOS }),
        [b' ', _, b' '] => Some(Found::Stopped),
        _ => None,
    }
}

/// Returns the nanoseconds that a thread has spent on a CPU; 0 if that cannot be found out.
pub fn cpu_time(tid: u32) -> u64 {
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
    use std::os::fd::FromRawFd;
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
            let mut by_call = ThreadProbe::new();
            let stat = File::open(Source::Stat, tid);
            assert!(stat.is_some(), "every process has this file");
            let mut by_state = ThreadProbe { tid, file: stat, ..ThreadProbe::new() };
            let mut by_clock = ThreadProbe { tid, ..ThreadProbe::new() };
            // At once, and whether or not it has a CPU.
            assert_eq!(by_call.check(tid), ThreadState::Running);
            assert_eq!(by_state.check(tid), ThreadState::Running);
            assert_eq!(by_clock.check(tid), ThreadState::Unknown);
            // On a busy machine it may not get a CPU for a while.
            let runs = (0..200).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(30));
                by_clock.check(tid) == ThreadState::Running
            });
            assert!(runs, "a thread that spins never counts as running");
            work.store(false, Ordering::Relaxed);
            for probe in [&mut by_call, &mut by_state, &mut by_clock] {
                let is_blocked = (0..1_000).any(|_| {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                    probe.check(tid) == ThreadState::Blocked
                });
                assert!(is_blocked, "a thread that waits never counts as blocked");
            }
        });
    }

    #[test]
    fn a_state_is_found_behind_any_name() {
        let asleep = |min_sleep| Some(Found::Asleep { min_sleep });
        assert_eq!(parse_stat(b"17 (worker) R 1 17 17 0"), Some(Found::Running));
        assert_eq!(parse_stat(b"17 (a) R (b)) S 1 17 17 0"), asleep(FUTEX_NANOS));
        assert_eq!(parse_stat(b"17 (worker) D 1 17 17 0"), asleep(MEMORY_NANOS));
        assert_eq!(parse_stat(b"17 (worker) t 1 17 17 0"), Some(Found::Stopped));
        for other in [&b"17 (worker)"[..], b"17 (worker) ", b"17 (worker) R", b"running", b""] {
            assert_eq!(parse_stat(other), None);
        }
    }

    /// The runtime closed the file that the program had opened under the number of ours.
    #[test]
    fn another_file_in_place_of_ours_stays_open() {
        let tid = syscalls::gettid();
        let theirs = syscalls::open_to_read(c"/proc/self/comm").unwrap();
        let number = theirs.as_raw_fd();
        let identity = (0, 0);
        let file = File { source: Source::Syscall, fd: ManuallyDrop::new(theirs), identity };
        let mut probe = ThreadProbe { tid, file: Some(file), ..ThreadProbe::new() };
        probe.check(tid);
        assert_eq!(probe.file.as_ref().map(|file| file.source), Some(Source::Stat));
        assert_eq!(probe.check(tid), ThreadState::Running);
        // SAFETY: it is still open, and closed here.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }
}
