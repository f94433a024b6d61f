//! Checks of the wake/sleep protocol (`sched/search/idle.rs`): no worker sleeps while work waits.
//!
//! The counters and the run queue are the real files. Around them is a small scheduler that
//! restates the steps of `sched/search/find.rs` and `sched/queues/`, with the same orderings and
//! without goroutines. A *worker* is an M; it begins with a P. A worker must run what a submitter
//! publishes; the worker that runs the last item lets the others end. A lost wake-up leaves a
//! worker asleep for ever, which loom reports as a deadlock.

use std::ptr::NonNull;
use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::idle_rs::Idle;
use crate::runq_rs::RunQueue;
use crate::shim::{AtomicU32, Mutation, Ordering, full_fence};

/// The step that a mutation check leaves out or moves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StepMutation {
    None,
    /// A worker sleeps without checking the queues again.
    NoRecheck,
    /// A worker checks the queues again before it has given its P back.
    RecheckTooEarly,
    /// A worker that has found work checks for more without a barrier.
    NoBarrierAfterFind,
    /// A worker that has found work does not check for more.
    NoRecheckAfterFind,
    /// A submitter has no barrier after it moved the displaced `runnext` to the ring.
    DisplacedAfterBarrier,
    /// A P that is handed off becomes idle without a check of the queues.
    NoRecheckAfterHandOff,
}

/// Behind the scheduler's lock.
struct Central {
    idle_ps: u32,
    /// Sleeping workers.
    idle_ms: Vec<usize>,
    /// Whether each worker was handed a P.
    handed: [bool; 2],
    /// Ps for which no worker was asleep. The runtime starts a thread for each; here a worker that
    /// is about to sleep takes the part of the new thread.
    new_threads: u32,
    /// Items that no worker has run yet.
    left: u32,
}

/// How long an item runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Items {
    End,
    /// A worker that takes an item runs it for ever.
    NeverEnd,
}

struct Model {
    idle: Idle,
    /// The length of the global queue, divided by submitter: each part has one writer, so a plain
    /// store suffices, as in the runtime.
    global: [AtomicU32; 2],
    /// The queue of a P whose goroutine submits and never ends.
    busy: RunQueue<u8>,
    central: Mutex<Central>,
    woken: [Condvar; 2],
    mutation: StepMutation,
    items: Items,
}

impl Model {
    /// Each worker has a P and spins. `work` items will be submitted.
    fn new(workers: usize, work: u32, mutation: StepMutation, items: Items) -> Arc<Model> {
        let idle = Idle::new();
        for _ in 0..workers {
            idle.start_spinning();
        }
        Arc::new(Model {
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
            woken: [Condvar::new(), Condvar::new()],
            mutation,
            items,
        })
    }

    /// A plain thread submits: `push_global`, `wake_after_push`.
    fn submit(&self, submitter: usize) {
        // Relaxed: as `publish_global_len`.
        self.global[submitter].store(1, Ordering::Relaxed);
        self.wake_after_push();
    }

    /// The busy goroutine submits: `P::push_next`, `wake`. Items are only counted here.
    fn submit_next(&self) {
        if let Some(displaced) = self.busy.push_next(NonNull::dangling()) {
            assert!(self.busy.push_back(displaced).is_ok());
            // The swap's barrier was before this publication.
            if self.mutation != StepMutation::DisplacedAfterBarrier {
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
                self.woken[m].notify_one();
            }
            None => central.new_threads += 1,
        }
    }

    fn take_p(&self, central: &mut Central) {
        central.idle_ps -= 1;
        self.idle.p_taken();
    }

    /// Runs a worker from its first search to the end. Returns the number of items that it ran.
    fn work(&self, me: usize) -> u32 {
        let mut done = 0;
        let mut spinning = true;
        loop {
            if self.search() {
                if std::mem::take(&mut spinning) && self.idle.stop_spinning() {
                    self.check_for_more();
                }
                done += 1;
                if self.did_one() || self.items == Items::NeverEnd {
                    return done;
                }
            } else if self.give_up(&mut spinning) {
                continue;
            } else if !self.wait_for_p(me) {
                return done;
            } else {
                spinning = true; // counted by the waker
            }
        }
    }

    /// The last spinning worker has found work: `find::finish_search`.
    fn check_for_more(&self) {
        if self.mutation == StepMutation::NoRecheckAfterFind {
            return;
        }
        if self.mutation != StepMutation::NoBarrierAfterFind {
            self.idle.before_recheck();
        }
        if self.idle.idle_ps() != 0 && self.has_work() {
            self.wake();
        }
    }

    /// Takes one item from any queue.
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

    /// Returns true if that was the last item; then all workers end.
    fn did_one(&self) -> bool {
        let mut central = self.central.lock().unwrap();
        central.left -= 1;
        if central.left == 0 {
            for worker in &self.woken {
                worker.notify_one();
            }
        }
        central.left == 0
    }

    /// Gives the P back and checks the queues again. Returns true if there is work and the worker
    /// has taken a P again.
    fn give_up(&self, spinning: &mut bool) -> bool {
        let early = self.mutation == StepMutation::RecheckTooEarly && self.has_work();
        {
            let mut central = self.central.lock().unwrap();
            central.idle_ps += 1;
            self.idle.p_idle();
        }
        if std::mem::take(spinning) {
            self.idle.stop_spinning();
        }
        let found = match self.mutation {
            StepMutation::NoRecheck => false,
            StepMutation::RecheckTooEarly => early,
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

    /// Sleeps until a waker hands over a P. Returns false if all items were run.
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
            central = self.woken[me].wait(central).unwrap();
        }
    }
}

/// Plain threads submit to the global queue while `workers` workers search.
fn submit_to_workers(bound: Bound, workers: usize, submitters: usize, mutation: StepMutation) {
    explore(bound, move || {
        let model = Model::new(workers, submitters as u32, mutation, Items::End);
        let mut threads: Vec<_> = (0..workers)
            .map(|me| {
                let model = model.clone();
                thread::spawn(move || model.work(me))
            })
            .collect();
        for submitter in 1..submitters {
            let model = model.clone();
            threads.push(thread::spawn(move || {
                model.submit(submitter);
                0
            }));
        }
        model.submit(0);
        let done: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(done, submitters as u32);
    });
}

/// A worker goes to sleep while a plain thread submits.
///
/// Race: the submitter sees no idle P (or a spinning worker), the worker sees no work.
pub fn one_submitter_one_worker() {
    submit_to_workers(Bound::All, 1, 1, StepMutation::None);
}

/// Two workers go to sleep while a plain thread submits.
///
/// Race: the submitter relies on a spinning worker that is about to stop; the first worker to give
/// up relies on the second. Bounded to three preemptions.
pub fn one_submitter_two_workers() {
    submit_to_workers(Bound::Preemptions(3), 2, 1, StepMutation::None);
}

/// A worker goes to sleep while two plain threads submit.
///
/// Race: the second submitter relies on the first one's claim, which may end without a wake-up
/// because the P was taken meanwhile. Bounded to three preemptions.
pub fn two_submitters_one_worker() {
    submit_to_workers(Bound::Preemptions(3), 1, 2, StepMutation::None);
}

/// A goroutine that never ends submits `work` items to its P's queue while `workers` workers
/// search.
fn submit_next_to_workers(bound: Bound, workers: usize, work: u32, mutation: StepMutation) {
    explore(bound, move || {
        let model = Model::new(workers, work, mutation, Items::NeverEnd);
        // All but the last are there when the workers begin to search: fewer interleavings.
        for _ in 1..work {
            model.submit_next();
        }
        let threads: Vec<_> = (0..workers)
            .map(|me| {
                let model = model.clone();
                thread::spawn(move || model.work(me))
            })
            .collect();
        model.submit_next();
        let done: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(done, work);
    });
}

/// A goroutine that never ends starts another; the only other worker goes to sleep.
///
/// Race: as [`one_submitter_one_worker`], with the barrier that is part of `push_next`'s swap.
pub fn goroutine_submits_to_its_own_queue() {
    submit_next_to_workers(Bound::All, 1, 1, StepMutation::None);
}

/// A goroutine that never ends has started one that never ends either, starts another, and two
/// workers search or go to sleep.
///
/// Race: the second `push_next` moves the first goroutine from `runnext` to the ring *after* the
/// swap that is its barrier. One worker takes the new `runnext` and is gone; the other finds
/// `runnext` empty and the ring not filled yet. So a displacing push needs a barrier of its own.
/// Bounded to three preemptions.
pub fn displaced_runnext_is_found() {
    submit_next_to_workers(Bound::Preemptions(3), 2, 2, StepMutation::None);
}

/// Mutation check: without the two barriers each side may miss the other's store.
pub fn detects_missing_barrier() {
    must_fail(Mutation::NoFullFence, one_submitter_one_worker);
}

/// Mutation check: a displaced `runnext` that is published after the only barrier.
pub fn detects_displaced_runnext_after_barrier() {
    must_fail(Mutation::None, || {
        submit_next_to_workers(Bound::Preemptions(3), 2, 2, StepMutation::DisplacedAfterBarrier);
    });
}

/// Mutation check: a worker that does not check the queues again.
pub fn detects_missing_recheck() {
    must_fail(Mutation::None, || submit_to_workers(Bound::All, 1, 1, StepMutation::NoRecheck));
}

/// Mutation check: a worker that checks the queues again before others see its P as idle.
pub fn detects_recheck_before_idle() {
    must_fail(Mutation::None, || {
        submit_to_workers(Bound::All, 1, 1, StepMutation::RecheckTooEarly)
    });
}

/// A worker takes an item that never ends, another worker goes to sleep, and a plain thread submits
/// a second item.
///
/// Race: the submitter relies on the worker that has just found the first item, whose check for
/// more comes too early. Bounded to three preemptions.
pub fn finder_checks_for_more_work() {
    submit_endless(StepMutation::None);
}

fn submit_endless(mutation: StepMutation) {
    explore(Bound::Preemptions(3), move || {
        let model = Model::new(2, 2, mutation, Items::NeverEnd);
        let threads = [0, 1].map(|me| {
            let model = model.clone();
            thread::spawn(move || model.work(me))
        });
        model.submit(0);
        model.submit(1);
        let done: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(done, 2);
    });
}

/// Mutation check: a worker that has found work checks for more without a barrier.
pub fn detects_missing_barrier_after_find() {
    must_fail(Mutation::None, || submit_endless(StepMutation::NoBarrierAfterFind));
}

/// Mutation check: a worker that has found work does not check for more.
pub fn detects_missing_recheck_after_find() {
    must_fail(Mutation::None, || submit_endless(StepMutation::NoRecheckAfterFind));
}

/// A P whose M is blocked is handed off (`monitor/handoff.rs`), while the only worker that spins
/// finds something to do, and a submitter publishes an item. Another worker must be woken for it,
/// or search with the P.
pub fn hand_off_against_submit() {
    hand_off(StepMutation::None);
}

fn hand_off(mutation: StepMutation) {
    explore(Bound::Preemptions(3), move || {
        let shared = Arc::new((Idle::new(), AtomicU32::new(0)));
        shared.0.start_spinning();
        let finder = thread::spawn({
            let shared = shared.clone();
            move || {
                let (idle, work) = &*shared;
                // As `finish_search`.
                if !idle.stop_spinning() {
                    return false;
                }
                idle.before_recheck();
                idle.idle_ps() != 0 && work.load(Ordering::Acquire) != 0 && idle.claim_wake()
            }
        });
        let submitter = thread::spawn({
            let shared = shared.clone();
            move || {
                let (idle, work) = &*shared;
                work.store(1, Ordering::Release);
                full_fence();
                idle.claim_wake()
            }
        });
        let (idle, work) = &*shared;
        let is_searched = if idle.idle_ps() == 0 && idle.spinning() == 0 {
            idle.start_spinning();
            true
        } else {
            idle.p_idle();
            idle.before_recheck();
            mutation != StepMutation::NoRecheckAfterHandOff
                && work.load(Ordering::Acquire) != 0
                && idle.claim_wake()
        };
        let others = [finder, submitter].map(|thread| thread.join().expect("a panic ends it"));
        assert!(is_searched || others.contains(&true), "nobody searches");
    });
}

/// Mutation check: the worker that spun, the submitter and the P that is handed off miss each other.
pub fn detects_missing_recheck_after_hand_off() {
    must_fail(Mutation::None, || hand_off(StepMutation::NoRecheckAfterHandOff));
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
