//! Checks of a thread's bed (`sys/parker.rs`), with a stand-in for the kernel's futex.
//!
//! A lost note leaves the sleeper in bed for ever, which loom reports as a deadlock.

use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::parker_rs::Parker;
use crate::shim::{AtomicU32, Half, Mutation, Op, Ordering, futex_wait, futex_wake};

struct World {
    parker: Parker,
    /// What the waker hands over.
    handed: UnsafeCell<u32>,
    /// What two wakers announce.
    news: [AtomicU32; 2],
}

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

impl World {
    fn new() -> Arc<World> {
        Arc::new(World {
            parker: Parker::new(),
            handed: UnsafeCell::new(0),
            news: [AtomicU32::new(0), AtomicU32::new(0)],
        })
    }

    fn hand_over(&self) {
        // SAFETY: loom checks that nobody else accesses it now.
        self.handed.with_mut(|h| unsafe { *h = 1 });
        self.parker.unpark();
    }

    fn take(&self) {
        // SAFETY: loom checks that nobody else accesses it now.
        let handed = self.handed.with_mut(|h| unsafe { std::mem::take(&mut *h) });
        assert_eq!(handed, 1, "woken with nothing in hand");
    }
}

/// A thread goes to bed while its waker comes, as an idle M does.
///
/// Race: the note comes before, between and after the steps into the kernel. What the waker handed
/// over is visible to the woken.
pub fn park_against_unpark() {
    explore(Bound::All, || {
        let world = World::new();
        let waker = thread::spawn({
            let world = world.clone();
            move || world.hand_over()
        });
        world.parker.park();
        world.take();
        waker.join().unwrap();
    });
}

/// The bed is used twice, first by one whose note comes when its time is up.
///
/// Race: the note at the last moment is either reported or kept for the next `park`.
pub fn note_at_the_last_moment() {
    explore(Bound::All, || {
        let world = World::new();
        let waker = thread::spawn({
            let world = world.clone();
            move || world.hand_over()
        });
        if !world.parker.park_timeout(Duration::ZERO) {
            world.parker.park();
        }
        world.take();
        waker.join().unwrap();
    });
}

/// Two wakers, and a sleeper that goes back to bed until it has seen the news of both: sysmon, woken
/// because a P was taken and because the runtime stops.
///
/// Race: the second note comes while the first is being consumed. Then its news must be seen.
/// Bounded to three preemptions.
pub fn two_wakers() {
    explore(Bound::Preemptions(3), || {
        let world = World::new();
        let wakers = [0, 1].map(|w| {
            let world = world.clone();
            thread::spawn(move || {
                world.news[w].store(1, Ordering::Relaxed);
                world.parker.unpark();
            })
        });
        while world.news.iter().any(|news| news.load(Ordering::Relaxed) == 0) {
            world.parker.park();
        }
        for waker in wakers {
            waker.join().unwrap();
        }
    });
}

/// Teeth: without Release in `unpark` the woken one has nothing in hand.
pub fn teeth_unpublished_note() {
    must_fail(Mutation::Everywhere("parker.rs", Op::Change, Half::Release), park_against_unpark);
}

/// Teeth: without Acquire in `park`, a consumed note's news is not seen.
pub fn teeth_unacquired_note() {
    must_fail(Mutation::Everywhere("parker.rs", Op::Change, Half::Acquire), two_wakers);
}

/// Teeth: a bed that consumes its note with a plain store.
pub fn teeth_note_overwritten() {
    const EMPTY: u32 = 0;
    const NOTED: u32 = 1;
    const ASLEEP: u32 = 2;
    let broken = || {
        explore(Bound::Preemptions(3), || {
            let word = Arc::new([0; 3].map(AtomicU32::new));
            let wakers = [0, 1].map(|w| {
                let word = word.clone();
                thread::spawn(move || {
                    word[w].store(1, Ordering::Relaxed);
                    if word[2].swap(NOTED, Ordering::Release) == ASLEEP {
                        futex_wake(&word[2], 1);
                    }
                })
            });
            while word[..2].iter().any(|news| news.load(Ordering::Relaxed) == 0) {
                if word[2].swap(ASLEEP, Ordering::Acquire) == NOTED {
                    word[2].store(EMPTY, Ordering::Relaxed);
                    continue;
                }
                loop {
                    futex_wait(&word[2], ASLEEP, None);
                    let taken = word[2].compare_exchange(
                        NOTED,
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
    for check in [park_against_unpark, note_at_the_last_moment, two_wakers] {
        sweep(check);
    }
}
