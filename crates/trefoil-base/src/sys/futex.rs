//! The futex system calls: sleeping on a word and waking its sleepers.
//!
//! A sleep ends early, and without a reason: callers read the word again.

use super::raw::syscall;
use super::syscalls::{self, checked};
use std::ffi::c_int;
use std::num::NonZeroU32;
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// `FUTEX_WAIT`: the time, if there is one, is relative.
const WAIT: c_int = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
/// `FUTEX_WAIT_BITSET`: the time, if there is one, is a point in time on `CLOCK_MONOTONIC`.
const WAIT_BITSET: c_int = libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG;
const WAKE: c_int = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;

/// Sleeps while the word has this value, until a wake-up, the limit, or a signal. The caller reads
/// the word again.
#[inline]
pub fn futex_wait(word: &AtomicU32, value: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| libc::timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let _ = wait(word, WAIT, value, limit.as_ref(), 0);
}

/// As [`futex_wait`] without a limit, with a bitset that `/proc` shows. A wake-up without a bitset
/// matches every bitset.
pub(super) fn futex_wait_marked(word: &AtomicU32, value: u32, bitset: NonZeroU32) {
    let _ = wait(word, WAIT_BITSET, value, None, bitset.get());
}

/// As [`futex_wait`] without a limit, for a word that the kernel wakes when a thread ends: it wakes
/// without the private flag.
pub fn futex_wait_shared(word: &AtomicU32, value: u32) {
    let _ = wait(word, libc::FUTEX_WAIT, value, None, 0);
}

/// Sleeps while the word has this value, until a wake-up, a signal, or a point in time on
/// `CLOCK_MONOTONIC` or `CLOCK_REALTIME`.
///
/// # Errors
/// `ETIMEDOUT` if the time has come, `EAGAIN` if the word has another value, `EINTR` after a
/// signal.
#[cfg(feature = "std")]
pub(super) fn futex_wait_until(
    word: &AtomicU32,
    value: u32,
    clock: libc::clockid_t,
    limit: Option<&libc::timespec>,
) -> syscalls::Result<()> {
    let realtime = if clock == libc::CLOCK_REALTIME { libc::FUTEX_CLOCK_REALTIME } else { 0 };
    wait(word, WAIT_BITSET | realtime, value, limit, u32::MAX)
}

fn wait(
    word: &AtomicU32,
    operation: c_int,
    value: u32,
    time: Option<&libc::timespec>,
    bitset: u32,
) -> syscalls::Result<()> {
    let time = time.map_or(ptr::null(), ptr::from_ref) as usize;
    let word = word.as_ptr() as usize;
    let args = [word, operation as usize, value as usize, time, 0, bitset as usize];
    // SAFETY: the kernel only reads the word and the time, which are borrowed.
    checked(unsafe { syscall(libc::SYS_futex, args) }).map(drop)
}

/// Wakes up to `how_many` sleepers. The word may be gone already: its address is only a key.
#[inline]
pub fn futex_wake(word: *const AtomicU32, how_many: u32) {
    let args = [word as usize, WAKE as usize, how_many as usize];
    // SAFETY: the kernel does not read the word. It fails only for an address that no word has.
    let _ = unsafe { syscall(libc::SYS_futex, args) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    #[test]
    fn a_limit_is_relative_to_now() {
        let begin = Instant::now();
        futex_wait(&AtomicU32::new(5), 5, Some(Duration::from_millis(20)));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        // The word has another value: it would not end otherwise.
        futex_wait(&AtomicU32::new(5), 6, None);
        futex_wait_marked(&AtomicU32::new(5), 6, NonZeroU32::MIN);
        futex_wait_shared(&AtomicU32::new(5), 6);
    }

    #[cfg(feature = "std")]
    #[test]
    fn a_point_in_time_is_absolute_on_its_clock() {
        use crate::sys::syscalls::Errno;
        use crate::sys::vdso::clock_gettime;
        let word = AtomicU32::new(1);
        for clock in [libc::CLOCK_MONOTONIC, libc::CLOCK_REALTIME] {
            let begin = Instant::now();
            let past = libc::timespec { tv_sec: clock_gettime(clock).tv_sec - 1, tv_nsec: 0 };
            assert_eq!(futex_wait_until(&word, 1, clock, Some(&past)), Err(Errno::TIMEDOUT));
            let mut soon = clock_gettime(clock);
            let nanos = soon.tv_nsec + 20_000_000;
            (soon.tv_sec, soon.tv_nsec) =
                (soon.tv_sec + nanos / 1_000_000_000, nanos % 1_000_000_000);
            assert_eq!(futex_wait_until(&word, 1, clock, Some(&soon)), Err(Errno::TIMEDOUT));
            assert!(begin.elapsed() >= Duration::from_millis(19), "{:?}", begin.elapsed());
            assert_eq!(futex_wait_until(&word, 2, clock, None), Err(Errno::AGAIN));
        }
    }

    #[test]
    fn a_wakeup_ends_every_kind_of_private_sleep() {
        let sleeps: [fn(&AtomicU32); 2] = [
            |word| futex_wait(word, 0, None),
            |word| futex_wait_marked(word, 0, NonZeroU32::new(0x7472_6566).unwrap()),
        ];
        for sleep in sleeps {
            let word = AtomicU32::new(0);
            std::thread::scope(|s| {
                let sleeper = s.spawn(|| {
                    while word.load(Ordering::Acquire) == 0 {
                        sleep(&word);
                    }
                });
                std::thread::sleep(Duration::from_millis(5));
                word.store(1, Ordering::Release);
                futex_wake(&word, 1);
                sleeper.join().unwrap();
            });
        }
    }
}
