//! Checks of a thread's parker (`sys/parker.rs`), with a stand-in for the kernel's futex.
//!
//! A lost token leaves the sleeper asleep for ever, which loom reports as a deadlock.

use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::parker_rs::Parker;
use crate::shim::{AtomicU32, Half, Mutation, Op, Ordering, futex_wait, futex_wake};

struct Model {
    parker: Parker,
    /// What the waker hands over.
    handed: UnsafeCell<u32>,
    /// What two wakers announce.
    news: [AtomicU32; 2],
}

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

impl Model {
    fn new() -> Arc<Model> {
        Arc::new(Model {
            parker: Parker::new(),
            handed: UnsafeCell::new(0),
            news: [AtomicU32::new(0), AtomicU32::new(0)],
        })
    }

    fn hand_over(&self) {
        // SAFETY: loom reports any concurrent access.
        self.handed.with_mut(|h| unsafe { *h = 1 });
        self.parker.unpark();
    }

    fn take(&self) {
        // SAFETY: loom reports any concurrent access.
        let handed = self.handed.with_mut(|h| unsafe { std::mem::take(&mut *h) });
        assert_eq!(handed, 1, "woken before anything was handed over");
    }
}

/// A thread parks while its waker unparks it, as an idle M does.
///
/// Race: the token arrives before, between and after the steps into the kernel. The woken thread
/// sees what the waker handed over.
pub fn park_against_unpark() {
    explore(Bound::All, || {
        let model = Model::new();
        let waker = thread::spawn({
            let model = model.clone();
            move || model.hand_over()
        });
        model.parker.park();
        model.take();
        waker.join().unwrap();
    });
}

/// The thread parks twice; the first time the token arrives when the limit has passed.
///
/// Race: the token is either reported or kept for the next `park`.
pub fn token_at_the_deadline_is_kept() {
    explore(Bound::All, || {
        let model = Model::new();
        let waker = thread::spawn({
            let model = model.clone();
            move || model.hand_over()
        });
        if !model.parker.park_timeout(Duration::ZERO) {
            model.parker.park();
        }
        model.take();
        waker.join().unwrap();
    });
}

/// Two wakers, and a sleeper that parks until it has seen the news of both: sysmon, woken because a
/// P was taken and because the runtime ends.
///
/// Race: the second token arrives while the first is being consumed. Its news must be seen.
/// Bounded to three preemptions.
pub fn both_wakers_are_seen() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new();
        let wakers = [0, 1].map(|w| {
            let model = model.clone();
            thread::spawn(move || {
                model.news[w].store(1, Ordering::Relaxed);
                model.parker.unpark();
            })
        });
        while model.news.iter().any(|news| news.load(Ordering::Relaxed) == 0) {
            model.parker.park();
        }
        for waker in wakers {
            waker.join().unwrap();
        }
    });
}

/// Mutation check: without Release in `unpark` the woken thread does not see what was handed over.
pub fn detects_unpublished_token() {
    must_fail(Mutation::Everywhere("parker.rs", Op::Change, Half::Release), park_against_unpark);
}

/// Mutation check: without Acquire in `park` the news of a consumed token is not seen.
pub fn detects_unacquired_token() {
    must_fail(Mutation::Everywhere("parker.rs", Op::Change, Half::Acquire), both_wakers_are_seen);
}

/// Mutation check: a parker that consumes its token with a plain store.
pub fn detects_overwritten_token() {
    const EMPTY: u32 = 0;
    const TOKEN: u32 = 1;
    const ASLEEP: u32 = 2;
    let broken = || {
        explore(Bound::Preemptions(3), || {
            let word = Arc::new([0; 3].map(AtomicU32::new));
            let wakers = [0, 1].map(|w| {
                let word = word.clone();
                thread::spawn(move || {
                    word[w].store(1, Ordering::Relaxed);
                    if word[2].swap(TOKEN, Ordering::Release) == ASLEEP {
                        futex_wake(&word[2], 1);
                    }
                })
            });
            while word[..2].iter().any(|news| news.load(Ordering::Relaxed) == 0) {
                if word[2].swap(ASLEEP, Ordering::Acquire) == TOKEN {
                    word[2].store(EMPTY, Ordering::Relaxed);
                    continue;
                }
                loop {
                    futex_wait(&word[2], ASLEEP, None);
                    let taken = word[2].compare_exchange(
                        TOKEN,
                        EMPTY,
                        Ordering::Acquire,
                        Ordering::Relaxed,
                    );
                    if taken.is_ok() {
                        break;
                    }
                }
            }
            for waker in wakers {
                waker.join().unwrap();
            }
        });
    };
    must_fail(Mutation::None, broken);
}

/// Which orderings of `parker.rs` do the checks need? Prints a table.
pub fn sweep_orderings() {
    for check in [park_against_unpark, token_at_the_deadline_is_kept, both_wakers_are_seen] {
        sweep(check);
    }
}
