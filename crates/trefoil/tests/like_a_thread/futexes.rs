//! Futex calls by `syscall`, among goroutines and threads.

use crate::common::{MS, runtime, tid, watchdog, yield_until};
use crate::{NOTHING, check, same_on_both};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

/// Returns whether `wake` ends a private wait. It gets the word that is waited for and a second
/// word, which has no waiters.
fn is_woken_by(wake: fn(&AtomicU32, &AtomicU32) -> i64) -> bool {
    let words = Arc::new([const { AtomicU32::new(0) }; 2]);
    let theirs = words.clone();
    let wait = move || {
        let limit = libc::timespec { tv_sec: 3, tv_nsec: 0 };
        let start = Instant::now();
        while theirs[0].load(SeqCst) == 0 {
            let (at, op) = (theirs[0].as_ptr(), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG);
            // SAFETY: a word that outlives the call, and a local time.
            unsafe { libc::syscall(libc::SYS_futex, at, op, 0, &raw const limit) };
        }
        start.elapsed() < Duration::from_secs(2)
    };
    let waker = move || {
        thread::sleep(20 * MS);
        words[0].store(1, SeqCst);
        wake(&words[0], &words[1])
    };
    let (woken, count) = if trefoil::id() != 0 {
        let waiter = trefoil::go(wait);
        let count = waker();
        (waiter.join().unwrap(), count)
    } else {
        let waiter = thread::spawn(wait);
        let count = waker();
        (waiter.join().unwrap(), count)
    };
    // 0 if the waiter had not begun to wait.
    woken && (0..=1).contains(&count)
}

/// `FUTEX_OP_ADD` of 0 to the second word, and a comparison `== 0` of its old value.
const ADD_0_IF_EQUAL_0: u32 = 1 << 28;
/// The same with a comparison `!= 0`.
const ADD_0_IF_NOT_EQUAL_0: u32 = 1 << 28 | 1 << 24;

/// Calls `FUTEX_WAKE_OP`, which wakes up to `counts` waiters of the first and the second word.
fn wake_op(first: &AtomicU32, second: &AtomicU32, counts: [usize; 2], operation: u32) -> i64 {
    let op = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    let (first, second) = (first.as_ptr(), second.as_ptr());
    // SAFETY: the caller's words.
    unsafe { libc::syscall(libc::SYS_futex, first, op, counts[0], counts[1], second, operation) }
}

/// Since Linux 6.7 each operation on futexes has a system call.
const FUTEX_WAKE: i64 = 454;
const FUTEX_REQUEUE: i64 = 456;
/// A private word of 32 bits: `FUTEX2_SIZE_U32 | FUTEX2_PRIVATE`.
const FLAGS: u32 = 2 | 128;

#[repr(C)]
struct FutexWaitv {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

#[test]
fn every_wake_of_a_futex_ends_a_private_wait() {
    let _w = watchdog();
    let word = AtomicU32::new(0);
    // SAFETY: a local word, which has no waiters.
    let is_new = unsafe { libc::syscall(FUTEX_WAKE, word.as_ptr(), 1u64, 0, FLAGS) } == 0;
    let found = same_on_both(|| {
        [
            is_woken_by(|a, b| wake_op(a, b, [1, 0], ADD_0_IF_NOT_EQUAL_0)),
            // The comparison is with 1: the waiter's word is 1 by now.
            is_woken_by(|a, b| wake_op(b, a, [0, 1], ADD_0_IF_EQUAL_0 | 1)),
        ]
    });
    assert_eq!(found, [true; 2]);
    if !is_new {
        return;
    }
    let found = same_on_both(|| {
        [
            // SAFETY: words that outlive the call, here and below.
            is_woken_by(|a, _| unsafe {
                libc::syscall(FUTEX_WAKE, a.as_ptr(), u64::from(u32::MAX), 1, FLAGS)
            }),
            // SAFETY: as above.
            is_woken_by(|a, _| unsafe { libc::syscall(FUTEX_WAKE, a.as_ptr(), 1u64, 1, FLAGS) }),
            is_woken_by(|a, b| {
                let one = |word: &AtomicU32, value| FutexWaitv {
                    value,
                    address: word.as_ptr() as u64,
                    flags: FLAGS,
                    reserved: 0,
                };
                let both = [one(a, 1), one(b, 0)];
                // SAFETY: as above.
                unsafe { libc::syscall(FUTEX_REQUEUE, both.as_ptr(), 0, 1, 0) }
            }),
        ]
    });
    assert_eq!(found, [true; 3]);
}

const BIT_A: u32 = 1;
const BIT_B: u32 = 2;

/// Waits with these bits while `word` is 0. Returns whether the wait was shorter than its timeout.
fn wait_for_bits(word: &AtomicU32, bits: u32) -> bool {
    const TIMEOUT: Duration = Duration::from_secs(3);
    let start = Instant::now();
    while word.load(SeqCst) == 0 {
        let deadline = deadline_after(TIMEOUT);
        let op = libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the caller's word and a local time.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), op, 0, &raw const deadline, 0usize, bits)
        };
    }
    start.elapsed() < TIMEOUT
}

/// Returns the deadline for `FUTEX_WAIT_BITSET` that is `after` from now.
fn deadline_after(after: Duration) -> libc::timespec {
    let mut at = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a local variable.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut at) }, 0);
    at.tv_sec += after.as_secs() as i64;
    at
}

fn futex_call(
    word: &AtomicU32,
    op: c_int,
    value: u32,
    value2: usize,
    word2: &AtomicU32,
    value3: u32,
) -> isize {
    let (op, at) = (op | libc::FUTEX_PRIVATE_FLAG, word.as_ptr());
    // SAFETY: the caller's words.
    check(unsafe {
        libc::syscall(libc::SYS_futex, at, op, value, value2, word2.as_ptr(), value3) as isize
    })
}

/// Returns whether the thread sleeps in a futex call for `word`.
fn sleeps_at(tid: i32, word: &AtomicU32) -> bool {
    // The number of the system call and its arguments, or `running`.
    let call = std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall")).unwrap();
    call.starts_with(&format!("{} {:#x} ", libc::SYS_futex, word.as_ptr() as usize))
}

/// Returns whether the goroutine is parked in a futex call.
fn is_parked(id: u64) -> bool {
    trefoil::debug::goroutines().any(|g| g.who.id == id && g.state == "futex wait")
}

/// Threads wait at a word for bit B, and a goroutine for bit A. When all of them wait, sets the
/// word and calls `wake` with it and with a second word, which has no waiters. Returns whether the
/// waits of all threads ended before their timeout, and whether the goroutine's did.
fn threads_and_a_goroutine(
    threads: usize,
    wake: impl FnOnce(&AtomicU32, &AtomicU32) + Send + 'static,
) -> (bool, bool) {
    runtime(2).run(move || {
        let words = Arc::new([const { AtomicU32::new(0) }; 2]);
        let (tids, started) = channel();
        let on_threads: Vec<_> = (0..threads)
            .map(|_| {
                let (words, tids) = (words.clone(), tids.clone());
                thread::spawn(move || {
                    tids.send(tid()).unwrap();
                    wait_for_bits(&words[0], BIT_B)
                })
            })
            .collect();
        let theirs = words.clone();
        let goroutine = trefoil::go(move || wait_for_bits(&theirs[0], BIT_A));
        for tid in started.iter().take(threads) {
            yield_until("a thread to wait", || sleeps_at(tid, &words[0]));
        }
        yield_until("the goroutine to wait", || is_parked(goroutine.id()));
        words[0].store(1, SeqCst);
        wake(&words[0], &words[1]);
        let all = on_threads.into_iter().map(|one| trefoil::blocking(|| one.join()).unwrap()).min();
        (all.unwrap(), goroutine.join().unwrap())
    })
}

const ALL: usize = i32::MAX as usize;

#[test]
fn requeued_threads_and_goroutines_are_all_woken() {
    let _w = watchdog();
    for threads in [1, 2] {
        let woken = threads_and_a_goroutine(threads, |from, to| {
            let requeue = |value| futex_call(from, libc::FUTEX_CMP_REQUEUE, 1, ALL, to, value);
            // The word has another value: no waiter is woken or moved.
            assert_eq!(requeue(7), NOTHING);
            assert!(requeue(1) >= 1);
            futex_call(to, libc::FUTEX_WAKE, ALL as u32, 0, to, 0);
        });
        assert_eq!(woken, (true, true), "{threads} threads");
        let woken = threads_and_a_goroutine(threads, |from, to| {
            assert!(futex_call(from, libc::FUTEX_REQUEUE, 0, ALL, to, 0) >= 0);
            futex_call(to, libc::FUTEX_WAKE, ALL as u32, 0, to, 0);
        });
        assert_eq!(woken, (true, true), "{threads} threads, all of them moved before one is woken");
    }
}

#[test]
fn wake_of_one_bit_reaches_the_thread_that_waits_for_it() {
    let _w = watchdog();
    // Repeated: at some wake-ups threads are served first in any case.
    for _ in 0..3 {
        let woken = threads_and_a_goroutine(1, |word, other| {
            assert!(futex_call(word, libc::FUTEX_WAKE_BITSET, 1, 0, other, BIT_B) >= 1);
            // Wakes the goroutine, if it was not woken before.
            futex_call(word, libc::FUTEX_WAKE_BITSET, 1, 0, other, BIT_A);
        });
        assert_eq!(woken, (true, true));
    }
}
