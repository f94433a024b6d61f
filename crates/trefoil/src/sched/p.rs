//! P: the right to run goroutines, and what belongs to whoever holds it.
//!
//! There are `procs` of them. An M needs one to run goroutines; so at most `procs` run at once.
//!
//! | status | who may touch [`Local`] and push to `runq` |
//! |---|---|
//! | `Running` | the M that holds it (`m.p`) |
//! | `Idle` | nobody; it is in the scheduler's idle list, its queue empty |
//! | `Retired` | nobody; `set_procs` took it away, everything it had was moved |
//!
//! Invariant 1: `m.p == p` for at most one M that has not lost it (`handoff.rs`). It changes hands under the
//! scheduler's lock, or from a waker to the M it wakes.

use crate::mem::StackCache;
use crate::sched::g::{FreeGs, G};
use crate::sched::m::M;
use crate::sched::queues::runq::RunQueue;
use crate::sched::wait::timers::Timers;
use crate::sys::clock::Nanos;
use crate::sys::rng::Rng;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// A request is on: the fast path must not be taken. One bit each.
pub(crate) mod flag {
    /// The running goroutine has used up its time slice.
    pub(crate) const PREEMPT: u32 = 1;
    /// `set_procs` wants this P back.
    pub(crate) const RETIRE: u32 = 2;
    /// The runtime ends.
    pub(crate) const STOP: u32 = 4;
    /// Somebody waits in a global queue for a while now.
    pub(crate) const FAIR: u32 = 8;
    /// A timer is due, on some P, and nobody has looked.
    pub(crate) const TIMERS: u32 = 16;
    /// The running goroutine is locked to its thread: it switches to no other directly.
    pub(crate) const LOCKED: u32 = 32;
    /// Somebody was woken from outside and waits in a global queue.
    pub(crate) const WOKEN: u32 = 64;
}

/// Goroutine ids taken from the runtime at once. Go's number.
const ID_BATCH: u64 = 16;

/// The status, for lists and traces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum PStatus {
    Idle = 0,
    Running = 1,
    Retired = 2,
}

/// See the head of the file.
#[repr(align(128))]
pub(crate) struct P {
    pub(crate) id: u32,
    /// `flag`s. Written by anyone, read by the owner at every scheduling step.
    pub(crate) flags: AtomicU32,
    /// Scheduling steps: grows when a goroutine begins a time slice. Written by the owner.
    pub(crate) tick: AtomicU32,
    status: AtomicU32,
    /// `runnext`, and the ring of goroutines that were started or have yielded.
    pub(crate) runq: RunQueue<G>,
    /// The ring of goroutines that were woken: they run before those in `runq`'s ring (its `runnext` is not used).
    pub(crate) woken: RunQueue<G>,
    pub(crate) timers: Timers,
    local: UnsafeCell<Local>,
    pub(crate) counters: Counters,
    /// The M that holds it; null if none, or on the way to one.
    pub(crate) holder: AtomicPtr<M>,
    /// The tick at which it last took one that had used up its slice. Written by the owner.
    pub(crate) expired_tick: AtomicU32,
    /// The tick at which it last took one that was started or had yielded. Written by the owner.
    fresh_tick: AtomicU32,
    /// The tick that sysmon last saw, and since when: how long a time slice lasts.
    seen_tick: AtomicU32,
    seen_since: AtomicU64,
    /// The same for the goroutine that runs in that slice: `runnext` begins a run, but no slice.
    seen_run: AtomicU32,
    run_since: AtomicU64,
    /// The run and the slice that `flag::PREEMPT` is meant for.
    preempt_run: AtomicU32,
    preempt_tick: AtomicU32,
    /// `RunQueue::nexts_taken` when the slice began; the owner's.
    nexts_at_tick: Cell<u32>,
    /// A goroutine that was started or has yielded goes next, because woken ones have used up a slice; the owner's.
    pub(crate) fresh_turn: Cell<bool>,
    /// Looks for due timers; the owner's.
    pub(crate) looks: Cell<u32>,
    /// How many more yields of one who is alone until it looks at other Ps, and from one look to the next; the
    /// owner's.
    pub(crate) yields: Cell<u32>,
    pub(crate) yields_pause: Cell<u32>,
    /// The last one to run was taken because of `FAIR`; the owner's.
    pub(crate) was_fair: Cell<bool>,
    /// Next in the idle list, or among the ps_wanting_m; under the scheduler's lock.
    pub(crate) idle_link: Cell<Option<&'static P>>,
    /// An orphan with a claim on spinning; under the scheduler's lock.
    pub(crate) wanted_m_spins: Cell<bool>,
}

// SAFETY: `local`, `looks`, `yields`, `yields_pause`, `was_fair`, `nexts_at_tick` and `fresh_turn` are the owner's (invariant 1), `idle_link` and
// `wanted_m_spins` are guarded by the scheduler's lock, the rest is atomic.
unsafe impl Sync for P {}
// SAFETY: nothing in it is tied to a thread.
unsafe impl Send for P {}

/// What only the owner touches.
pub(crate) struct Local {
    pub(crate) stacks: StackCache,
    pub(crate) free_gs: FreeGs,
    pub(crate) rng: Rng,
    next_id: u64,
    last_id: u64,
}

/// What happened here; each is written by the owner and read by anyone.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) spawned: AtomicU64,
    pub(crate) ended: AtomicU64,
    pub(crate) steals: AtomicU64,
    pub(crate) stolen: AtomicU64,
    pub(crate) overflows: AtomicU64,
}

/// Adds to a counter that only one thread writes: a plain load and store.
#[inline(always)]
pub(crate) fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed) + by, Ordering::Relaxed);
}

impl P {
    pub(crate) fn new(id: u32) -> io::Result<P> {
        Ok(P {
            id,
            flags: AtomicU32::new(0),
            tick: AtomicU32::new(0),
            status: AtomicU32::new(PStatus::Retired as u32),
            runq: RunQueue::new(),
            woken: RunQueue::new(),
            timers: Timers::new(),
            local: UnsafeCell::new(Local {
                stacks: StackCache::new()?,
                free_gs: FreeGs::new(),
                rng: Rng::new(u64::from(id)),
                next_id: 0,
                last_id: 0,
            }),
            counters: Counters::default(),
            holder: AtomicPtr::new(null_mut()),
            expired_tick: AtomicU32::new(u32::MAX),
            fresh_tick: AtomicU32::new(u32::MAX),
            seen_tick: AtomicU32::new(0),
            seen_since: AtomicU64::new(0),
            seen_run: AtomicU32::new(0),
            run_since: AtomicU64::new(0),
            preempt_run: AtomicU32::new(0),
            preempt_tick: AtomicU32::new(0),
            nexts_at_tick: Cell::new(0),
            fresh_turn: Cell::new(false),
            wanted_m_spins: Cell::new(false),
            looks: Cell::new(0),
            yields: Cell::new(0),
            yields_pause: Cell::new(0),
            was_fair: Cell::new(false),
            idle_link: Cell::new(None),
        })
    }

    pub(crate) fn status(&self) -> PStatus {
        match self.status.load(Ordering::Relaxed) {
            0 => PStatus::Idle,
            1 => PStatus::Running,
            _ => PStatus::Retired,
        }
    }

    pub(crate) fn set_status(&self, status: PStatus) {
        self.status.store(status as u32, Ordering::Relaxed);
    }

    /// The M that holds it.
    pub(crate) fn holder(&self) -> Option<&'static M> {
        // Acquire: pairs with `M::set_p`.
        // SAFETY: null or an M; those are never freed.
        unsafe { self.holder.load(Ordering::Acquire).as_ref() }
    }

    /// Owner: a goroutine begins a time slice.
    #[inline]
    pub(crate) fn next_tick(&self) {
        self.tick.store(self.tick.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.nexts_at_tick.set(self.runq.nexts_taken());
    }

    /// Owner: whether the running goroutine came from `runnext`, into a slice that others have begun.
    pub(crate) fn runs_inherited(&self) -> bool {
        self.runq.nexts_taken() != self.nexts_at_tick.get()
    }

    /// Owner: a goroutine that had used up its slice begins another.
    pub(crate) fn next_expired_tick(&self) {
        self.next_tick();
        self.expired_tick.store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Onlooker: whether such a one runs now.
    pub(crate) fn runs_expired(&self) -> bool {
        self.expired_tick.load(Ordering::Relaxed) == self.tick.load(Ordering::Relaxed)
    }

    /// Owner: a goroutine that was started, or had yielded, begins a time slice.
    #[inline]
    pub(crate) fn next_fresh_tick(&self) {
        self.next_tick();
        self.fresh_tick.store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Onlooker: whether such a goroutine runs now.
    pub(crate) fn runs_fresh(&self) -> bool {
        self.fresh_tick.load(Ordering::Relaxed) == self.tick.load(Ordering::Relaxed)
    }

    /// Onlooker: whether no goroutine waits here. Never says so falsely while the owner moves a goroutine from `runnext`
    /// to a ring: then a tail changes, and the queues are read again.
    pub(crate) fn is_empty(&self) -> bool {
        loop {
            let pushed = self.woken.pushed();
            if self.woken.ring_len() != 0 || !self.runq.is_empty() {
                return false;
            }
            if self.woken.pushed() == pushed {
                return true;
            }
        }
    }

    /// How many goroutines wait here, roughly.
    pub(crate) fn queued(&self) -> usize {
        self.woken.len() + self.runq.len()
    }

    /// How many goroutines wait in the rings, `runnext` not counted. A look from outside.
    pub(crate) fn ring_len(&self) -> u32 {
        self.woken.ring_len() + self.runq.ring_len()
    }

    /// How many goroutines were taken from here, by the owner or by thieves. A look from outside.
    pub(crate) fn taken(&self) -> u32 {
        self.woken.taken().wrapping_add(self.runq.taken())
    }

    /// Thief (the owner of `self`, whose rings are empty): takes half of a ring of `victim`, that of woken goroutines
    /// first, and returns one of them to run.
    pub(crate) fn steal_from(&self, victim: &P) -> Option<NonNull<G>> {
        let woken = victim.woken.steal_into(&self.woken);
        woken.or_else(|| victim.runq.steal_into(&self.runq))
    }

    /// The number of the present run: another one for each goroutine that begins or goes on here.
    pub(crate) fn run(&self) -> u32 {
        self.tick.load(Ordering::Relaxed).wrapping_add(self.runq.nexts_taken())
    }

    /// Asks the goroutine of that run, in the slice `tick`, to stop. If another one runs by then it goes on; but the slice
    /// ends at the next switch if it is still the same.
    pub(crate) fn ask_to_preempt(&self, tick: u32, run: u32) {
        self.preempt_tick.store(tick, Ordering::Relaxed);
        self.preempt_run.store(run, Ordering::Relaxed);
        // Release: pairs with `is_asked_to_preempt`; the run that the flag is meant for is seen with the flag.
        self.flags.fetch_or(flag::PREEMPT, Ordering::Release);
    }

    /// Owner: whether the running goroutine is the one that was asked to stop.
    pub(crate) fn is_asked_to_preempt(&self) -> bool {
        self.flags.load(Ordering::Acquire) & flag::PREEMPT != 0
            && self.preempt_run.load(Ordering::Relaxed) == self.run()
    }

    /// Owner, between two goroutines: whether the slice is one that was asked to end.
    pub(crate) fn is_asked_to_end_slice(&self) -> bool {
        self.flags.load(Ordering::Acquire) & flag::PREEMPT != 0
            && self.preempt_tick.load(Ordering::Relaxed) == self.tick.load(Ordering::Relaxed)
    }

    /// sysmon: since when the present slice lasts, and since when the running goroutine runs, as far as is known.
    pub(crate) fn running_since(&self, now: Nanos) -> (Nanos, Nanos) {
        let (tick, run) = (self.tick.load(Ordering::Relaxed), self.run());
        let slice_is_new = self.seen_tick.load(Ordering::Relaxed) != tick;
        if slice_is_new {
            self.seen_tick.store(tick, Ordering::Relaxed);
            self.seen_since.store(now, Ordering::Relaxed);
        }
        if slice_is_new || self.seen_run.load(Ordering::Relaxed) != run {
            self.seen_run.store(run, Ordering::Relaxed);
            self.run_since.store(now, Ordering::Relaxed);
        }
        (self.seen_since.load(Ordering::Relaxed), self.run_since.load(Ordering::Relaxed))
    }

    /// The owner's things.
    ///
    /// # Safety
    /// The caller is the owner (invariant 1), not preemptible, and holds no other borrow of it.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn local(&self) -> &mut Local {
        // SAFETY: the caller's contract.
        unsafe { &mut *self.local.get() }
    }
}

impl Local {
    /// Caches to the depots, credits to the pool: this P retires.
    pub(crate) fn give_all_back(&mut self) {
        self.stacks.drain();
        self.free_gs.spill_slow(0);
    }

    /// The next goroutine id; `more` hands out the first of a batch of the given size.
    #[inline]
    pub(crate) fn next_id(&mut self, more: impl FnOnce(u64) -> u64) -> u64 {
        if self.next_id == self.last_id {
            self.next_id = more(ID_BATCH);
            self.last_id = self.next_id + ID_BATCH;
        }
        let id = self.next_id;
        self.next_id += 1;
        id
    }
}
