//! Checks of the wake/sleep protocol (`sched/idle.rs`): nobody sleeps while work waits.
//!
//! A small scheduler around the real counters and the real run queue: what `find.rs` and
//! `central.rs` do, step for step and with the same orderings, without the goroutines. Every P has
//! a worker. Work that a submitter publishes must be done by a worker; the worker that does the last
//! one sends the others home. So a lost wake-up leaves a worker asleep for ever, which loom reports
//! as a deadlock.

use std::ptr::NonNull;
use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::idle_rs::Idle;
use crate::runq_rs::RunQueue;
use crate::shim::{AtomicU32, Mutation, Ordering, full_fence};

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// A worker goes to bed without a second look.
    NoSecondLook,
    /// A worker looks again before it has given up.
    LooksTooEarly,
    /// A worker that has found work looks for more without a barrier.
    NoBarrierAfterFind,
    /// It does not look at all.
    FindsAndIsGone,
    /// A submitter has no barrier after it moved the displaced `runnext` to the ring.
    DisplacedAfterBarrier,
}

/// Behind the scheduler's lock.
struct Central {
    idle_ps: u32,
    /// Workers in bed.
    idle_ms: Vec<usize>,
    /// Who was handed a P.
    handed: [bool; 2],
    /// P's for whom no worker was in bed. The runtime starts a thread for each; here a worker that
    /// is on its way to bed plays the new thread.
    new_threads: u32,
    /// Work not done yet.
    left: u32,
}

struct World {
    idle: Idle,
    /// The global queue's length, one for each submitter: written by one, so that it can be a plain
    /// store as in the runtime.
    global: [AtomicU32; 2],
    /// The queue of a P whose goroutine submits and never ends.
    busy: RunQueue<u8>,
    central: Mutex<Central>,
    beds: [Condvar; 2],
    flaw: Flaw,
    /// Work never ends: who took some is gone.
    endless: bool,
}

impl World {
    /// Workers own a P each and search.
    fn new(workers: usize, work: u32, flaw: Flaw, endless: bool) -> Arc<World> {
        let idle = Idle::new();
        for _ in 0..workers {
            idle.start_spinning();
        }
        Arc::new(World {
            idle,
            global: [AtomicU32::new(0), AtomicU32::new(0)],
            busy: RunQueue::new(),
            central: Mutex::new(Central {
                idle_ps: 0,
                idle_ms: Vec::new(),
                handed: [false; 2],
                new_threads: 0,
                left: work,
            }),
            beds: [Condvar::new(), Condvar::new()],
            flaw,
            endless,
        })
    }

    /// A plain thread submits: `push_global`, `wake_after_push`.
    fn submit(&self, who: usize) {
        // Relaxed: as `publish_global_len`.
        self.global[who].store(1, Ordering::Relaxed);
        self.wake_after_push();
    }

    /// The busy goroutine submits: `P::push_next`, `wake`. Items are only counted here.
    fn submit_next(&self) {
        if let Some(displaced) = self.busy.push_next(NonNull::dangling()) {
            assert!(self.busy.push_back(displaced).is_ok());
            // The swap's barrier was before this publication.
            if self.flaw != Flaw::DisplacedAfterBarrier {
                full_fence();
            }
        }
        self.wake();
    }

    fn wake_after_push(&self) {
        full_fence();
        self.wake();
    }

    fn wake(&self) {
        if self.idle.claim_wake() {
            self.wake_slow();
        }
    }

    fn wake_slow(&self) {
        let mut central = self.central.lock().unwrap();
        if central.idle_ps == 0 {
            self.idle.stop_spinning();
            return;
        }
        self.take_p(&mut central);
        match central.idle_ms.pop() {
            Some(m) => {
                central.handed[m] = true;
                self.beds[m].notify_one();
            }
            None => central.new_threads += 1,
        }
    }

    fn take_p(&self, central: &mut Central) {
        central.idle_ps -= 1;
        self.idle.p_taken();
    }

    /// A worker, from its first search to the end. Returns how much it did.
    fn work(&self, me: usize) -> u32 {
        let mut done = 0;
        let mut spinning = true;
        loop {
            if self.search() {
                if std::mem::take(&mut spinning) && self.idle.stop_spinning() {
                    self.look_for_more();
                }
                done += 1;
                if self.did_one() || self.endless {
                    return done;
                }
            } else if self.give_up(&mut spinning) {
                continue;
            } else if !self.wait_for_p(me) {
                return done;
            } else {
                spinning = true; // the waker's claim
            }
        }
    }

    /// The last who searched has found work: `find::stop_spinning`.
    fn look_for_more(&self) {
        if self.flaw == Flaw::FindsAndIsGone {
            return;
        }
        if self.flaw != Flaw::NoBarrierAfterFind {
            self.idle.before_recheck();
        }
        if self.idle.idle_ps() != 0 && self.has_work() {
            self.wake();
        }
    }

    /// Takes one piece of work, wherever it is.
    fn search(&self) -> bool {
        let global = self.global.iter().any(|g| {
            // The runtime takes under the lock; here it is an exchange.
            g.load(Ordering::Relaxed) != 0
                && g.compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        global || {
            // A thief's ring of its own; with so little work it stays empty.
            let mine = RunQueue::new();
            self.busy.steal_into(&mine).is_some() || self.busy.steal_next().is_some()
        }
    }

    fn has_work(&self) -> bool {
        self.global.iter().any(|g| g.load(Ordering::Relaxed) != 0) || !self.busy.is_empty()
    }

    /// True: that was the last, and everybody goes home.
    fn did_one(&self) -> bool {
        let mut central = self.central.lock().unwrap();
        central.left -= 1;
        if central.left == 0 {
            for bed in &self.beds {
                bed.notify_one();
            }
        }
        central.left == 0
    }

    /// Gives the P back and looks again. True: there is work, and it has a P again.
    fn give_up(&self, spinning: &mut bool) -> bool {
        let early = self.flaw == Flaw::LooksTooEarly && self.has_work();
        {
            let mut central = self.central.lock().unwrap();
            central.idle_ps += 1;
            self.idle.p_idle();
        }
        if std::mem::take(spinning) {
            self.idle.stop_spinning();
        }
        let found = match self.flaw {
            Flaw::NoSecondLook => false,
            Flaw::LooksTooEarly => early,
            _ => {
                self.idle.before_recheck();
                self.has_work()
            }
        };
        if found {
            let mut central = self.central.lock().unwrap();
            if central.idle_ps > 0 {
                self.take_p(&mut central);
                *spinning = true;
                self.idle.start_spinning();
                return true;
            }
        }
        false
    }

    /// Sleeps until someone hands over a P. False: all work is done.
    fn wait_for_p(&self, me: usize) -> bool {
        let mut central = self.central.lock().unwrap();
        if central.new_threads > 0 {
            central.new_threads -= 1;
            return true;
        }
        central.idle_ms.push(me);
        loop {
            if std::mem::take(&mut central.handed[me]) {
                return true;
            }
            if central.left == 0 {
                return false;
            }
            central = self.beds[me].wait(central).unwrap();
        }
    }
}

/// One submitter of the global queue, and so many workers.
fn submit_to_workers(bound: Bound, workers: usize, submitters: usize, flaw: Flaw) {
    explore(bound, move || {
        let world = World::new(workers, submitters as u32, flaw, false);
        let mut threads: Vec<_> = (0..workers)
            .map(|me| {
                let world = world.clone();
                thread::spawn(move || world.work(me))
            })
            .collect();
        for who in 1..submitters {
            let world = world.clone();
            threads.push(thread::spawn(move || {
                world.submit(who);
                0
            }));
        }
        world.submit(0);
        let done: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(done, submitters as u32);
    });
}

/// A worker goes to sleep while a plain thread submits.
///
/// Race: the submitter sees nobody idle (or somebody who spins), the worker sees no work.
pub fn one_submitter_one_worker() {
    submit_to_workers(Bound::All, 1, 1, Flaw::None);
}

/// Two workers go to sleep while a plain thread submits.
///
/// Race: the submitter relies on the spinner that is about to stop; the first to give up leaves it
/// to the second. Bounded to three preemptions.
pub fn one_submitter_two_workers() {
    submit_to_workers(Bound::Preemptions(3), 2, 1, Flaw::None);
}

/// A worker goes to sleep while two plain threads submit.
///
/// Race: the second submitter relies on the first one's claim, which may end without a wake-up
/// because the P was taken meanwhile. Bounded to three preemptions.
pub fn two_submitters_one_worker() {
    submit_to_workers(Bound::Preemptions(3), 1, 2, Flaw::None);
}

fn submit_next_to_workers(bound: Bound, workers: usize, work: u32, flaw: Flaw) {
    explore(bound, move || {
        let world = World::new(workers, work, flaw, true);
        // All but the last are there when the workers begin to search: fewer interleavings.
        for _ in 1..work {
            world.submit_next();
        }
        let threads: Vec<_> = (0..workers)
            .map(|me| {
                let world = world.clone();
                thread::spawn(move || world.work(me))
            })
            .collect();
        world.submit_next();
        let done: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(done, work);
    });
}

/// A goroutine that never ends starts another; the only other worker goes to sleep.
///
/// Race: as [`one_submitter_one_worker`], with the barrier that is part of `push_next`'s swap.
pub fn goroutine_submits_to_its_own_queue() {
    submit_next_to_workers(Bound::All, 1, 1, Flaw::None);
}

/// A goroutine that never ends has started one that never ends either, starts another, and two
/// workers search or go to sleep.
///
/// Race: the second `push_next` moves the first goroutine from `runnext` to the ring *after* the
/// swap that is its barrier. One worker takes the new `runnext` and is gone; the other finds
/// `runnext` empty and the ring not filled yet. So a displacing push needs a barrier of its own.
/// Bounded to three preemptions.
pub fn displaced_runnext_is_found() {
    submit_next_to_workers(Bound::Preemptions(3), 2, 2, Flaw::None);
}

/// Teeth: without the two barriers each side may miss the other.
pub fn teeth_no_barrier() {
    must_fail(Mutation::NoFullFence, one_submitter_one_worker);
}

/// Teeth: a displaced `runnext` that is published after the only barrier.
pub fn teeth_displaced_after_the_barrier() {
    must_fail(Mutation::None, || {
        submit_next_to_workers(Bound::Preemptions(3), 2, 2, Flaw::DisplacedAfterBarrier);
    });
}

/// Teeth: a worker that does not look again.
pub fn teeth_no_second_look() {
    must_fail(Mutation::None, || submit_to_workers(Bound::All, 1, 1, Flaw::NoSecondLook));
}

/// Teeth: a worker that looks again before it is seen to be idle.
pub fn teeth_second_look_too_early() {
    must_fail(Mutation::None, || submit_to_workers(Bound::All, 1, 1, Flaw::LooksTooEarly));
}

/// A worker takes what one plain thread submits and never ends; another worker goes to sleep; a second thread submits.
///
/// Race: the second submitter relies on the worker that has just found something, and whose second look comes too
/// early. Bounded to three preemptions.
pub fn the_one_who_finds_looks_for_more() {
    submit_endless(Flaw::None);
}

fn submit_endless(flaw: Flaw) {
    explore(Bound::Preemptions(3), move || {
        let world = World::new(2, 2, flaw, true);
        let threads = [0, 1].map(|me| {
            let world = world.clone();
            thread::spawn(move || world.work(me))
        });
        world.submit(0);
        world.submit(1);
        let done: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(done, 2);
    });
}

/// Teeth: who has found something looks for more without a barrier.
pub fn teeth_no_barrier_after_a_find() {
    must_fail(Mutation::None, || submit_endless(Flaw::NoBarrierAfterFind));
}

/// Teeth: or does not look at all.
pub fn teeth_finds_and_is_gone() {
    must_fail(Mutation::None, || submit_endless(Flaw::FindsAndIsGone));
}

/// Which orderings of `idle.rs` do the checks need? Prints a table.
pub fn sweep_orderings() {
    for check in [
        one_submitter_one_worker,
        one_submitter_two_workers,
        two_submitters_one_worker,
        goroutine_submits_to_its_own_queue,
    ] {
        sweep(check);
    }
}
