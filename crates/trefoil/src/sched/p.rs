//! P: the right to run goroutines, with a run queue and caches.
//!
//! A runtime has `procs` Ps. An M must own a P to run goroutines, so at most `procs` goroutines run
//! at the same time, besides those whose P was retaken while they were blocked.
//!
//! | status | owner: the only thread that touches [`Local`] and pushes to the queues |
//! |---|---|
//! | `Running` | the M with `m.p == p`; no thread while the P is being handed to an M |
//! | `Idle` | no thread: the P is in the list of idle Ps, and its queues are empty |
//! | `Retired` | no thread: `set_procs` took it away and moved everything that it had |
//!
//! # Slices and runs
//! `tick` counts time slices. A goroutine that is taken from `runnext` begins a new *run* in the
//! slice of its predecessor; any other goroutine begins a slice and a run. A request for preemption
//! names the slice and the run that it is meant for, so a late request does not stop another
//! goroutine.
//!
//! Goroutines wait in two rings: one for those that were woken, one for those that are *fresh*,
//! that is, were started or have yielded. The woken ones run first; `switch::pop_local` ensures
//! that the fresh ones do not starve. Goroutines that used up their slice (*expired* ones) wait in
//! a global queue.
//!
//! Invariants:
//! 1. `m.p == p` for at most one M whose `hold` is not `RETAKEN` (m.rs). Ownership passes under the
//!    scheduler's lock, or from a waker to the M that it wakes (`m.handed`).
//! 2. A P lives as long as its `Sched`.

use crate::mem::StackCache;
use crate::sched::Sched;
use crate::sched::g::FreeGs;
use crate::sched::latency::PLatencies;
use crate::sched::m::M;
use crate::sched::queues::runq::RunQueue;
use crate::sched::record::RingSlot;
use crate::sched::runnable::{RunHead, RunList, Runnable};
use crate::sched::task::block::FreeTasks;
use crate::sched::wait::timers::Timers;
use crate::shim::full_fence;
use crate::sys::clock::Nanos;
use crate::sys::rng::Rng;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Requests to the owner of a P, one bit each. While any of them is set, a goroutine that stops
/// does not switch to the next one directly: the thread's own context serves the request first.
pub(crate) mod flag {
    /// The running goroutine is to stop: its time slice is over, or another goroutine needs the P.
    /// [`P::ask_to_preempt`](super::P::ask_to_preempt) sets it.
    pub(crate) const PREEMPT: u32 = 1;
    /// `set_procs` retires this P (`procs.rs`).
    pub(crate) const RETIRE: u32 = 2;
    /// The runtime stops.
    pub(crate) const STOP: u32 = 4;
    /// A goroutine has waited in a global queue for a while: take one from there.
    pub(crate) const FAIR: u32 = 8;
    /// A timer of some P is due, and no thread has run it.
    pub(crate) const TIMERS: u32 = 16;
    /// The running goroutine is locked to its M, so it must not switch to another one directly.
    pub(crate) const LOCKED: u32 = 32;
    /// A goroutine that was woken from outside waits in a global queue: it goes first.
    pub(crate) const WOKEN: u32 = 64;
    /// The runtime is simulated: `simulation/` chooses every goroutine that runs.
    pub(crate) const SIMULATED: u32 = 128;
}

/// Goroutine ids that a P takes from the runtime at once. Go's number.
const ID_BATCH: u64 = 16;

/// Whether a P has an owner; see the head of the file.
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
    /// Bits of [`flag`]. Set by any thread; read by the owner at every scheduling step.
    pub(crate) flags: AtomicU32,
    /// The number of the present time slice. Written by the owner.
    pub(crate) tick: AtomicU32,
    status: AtomicU32,
    /// The next goroutine that is started or woken here is timed (`latency.rs`). sysmon sets it.
    pub(crate) times_next: AtomicBool,
    /// Where its events are recorded.
    pub(crate) ring: RingSlot,
    /// `runnext`, and the ring of fresh goroutines.
    pub(crate) runq: RunQueue<RunHead>,
    /// The ring of woken goroutines. Its `runnext` is not used.
    pub(crate) woken: RunQueue<RunHead>,
    pub(crate) timers: Timers,
    local: UnsafeCell<Local>,
    pub(crate) counters: Counters,
    pub(crate) latencies: PLatencies,
    /// The M that owns it, or null.
    pub(crate) holder: AtomicPtr<M>,
    /// The last slice that an expired goroutine began. Written by the owner.
    expired_tick: AtomicU32,
    /// The last slice that a fresh goroutine began. Written by the owner.
    fresh_tick: AtomicU32,
    /// sysmon's: the slice that sysmon saw last, and when sysmon saw it for the first time.
    seen_tick: AtomicU32,
    slice_since: AtomicU64,
    /// sysmon's: the same for the run.
    seen_run: AtomicU32,
    run_since: AtomicU64,
    /// The run and the slice that `flag::PREEMPT` is meant for.
    preempt_run: AtomicU32,
    preempt_tick: AtomicU32,
    /// The owner's: `RunQueue::nexts_taken` when the slice began.
    nexts_at_tick: Cell<u32>,
    /// The owner's: a fresh goroutine goes next, because woken ones have used up a slice.
    pub(crate) fresh_turn: Cell<bool>,
    /// The owner's: how many times a switch has checked whether a timer is due.
    pub(crate) timer_checks: Cell<u32>,
    /// The owner's: after so many more yields, a goroutine that is alone on this P tries to steal
    /// from other Ps.
    pub(crate) yields_until_steal: Cell<u32>,
    /// The owner's: the number of yields from one such attempt to the next.
    pub(crate) yields_between_steals: Cell<u32>,
    /// The owner's: the last goroutine was taken out of turn (for fairness, or because it was
    /// stopped inside libc), so the next one is not.
    pub(crate) last_was_out_of_turn: Cell<bool>,
    /// The next one in the list of idle Ps or of Ps wanting an M. Under the scheduler's lock.
    pub(crate) idle_link: Cell<Option<&'static P>>,
    /// It is in the list of Ps wanting an M, and a claim on spinning goes with it. Under the
    /// scheduler's lock.
    pub(crate) wants_spinning_m: Cell<bool>,
    /// The owner's: `Rt::with_local` is active.
    #[cfg(debug_assertions)]
    local_is_borrowed: Cell<bool>,
}

/// Where debuggers find the fields of Ps (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("p.id", offset_of!(P, id)),
    ("p.status", offset_of!(P, status)),
    ("p.holder", offset_of!(P, holder)),
    ("p_status.idle", PStatus::Idle as usize),
    ("p_status.running", PStatus::Running as usize),
    ("p_status.retired", PStatus::Retired as usize),
];

// SAFETY: `local` and the cells that are marked as the owner's are touched by the owner alone
// (invariant 1); `idle_link` and `wants_spinning_m` are guarded by the scheduler's lock; the rest
// is atomic.
unsafe impl Sync for P {}
// SAFETY: nothing in it is tied to a thread.
unsafe impl Send for P {}

/// What only the owner touches; see [`Rt::with_local`](crate::sched::Rt::with_local).
pub(crate) struct Local {
    pub(crate) stacks: StackCache,
    pub(crate) free_gs: FreeGs,
    pub(crate) free_tasks: FreeTasks,
    /// Shelved carriers (`task/carrier.rs`).
    pub(crate) carriers: RunList,
    pub(crate) rng: Rng,
    /// The next goroutine id of this P's batch.
    next_id: u64,
    /// The end of that batch.
    end_of_ids: u64,
}

/// How many times something has happened on this P. Written by the owner, read by any thread.
#[derive(Default)]
pub(crate) struct Counters {
    /// Goroutines started here.
    pub(crate) spawned: AtomicU64,
    /// Goroutines that ended here.
    pub(crate) ended: AtomicU64,
    /// Tasks spawned here.
    pub(crate) tasks_spawned: AtomicU64,
    /// Tasks that ended here.
    pub(crate) tasks_ended: AtomicU64,
    /// How many times this P stole from another one.
    pub(crate) steals: AtomicU64,
    /// Goroutines that it stole.
    pub(crate) stolen: AtomicU64,
    /// How many times a ring was full and its older half went to a global queue.
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
            times_next: AtomicBool::new(true),
            ring: RingSlot::new(),
            runq: RunQueue::new(),
            woken: RunQueue::new(),
            timers: Timers::new(),
            local: UnsafeCell::new(Local {
                stacks: StackCache::new()?,
                free_gs: FreeGs::new(),
                free_tasks: FreeTasks::new(),
                carriers: RunList::new(),
                rng: Rng::new(u64::from(id)),
                next_id: 0,
                end_of_ids: 0,
            }),
            counters: Counters::default(),
            latencies: PLatencies::new(),
            holder: AtomicPtr::new(null_mut()),
            expired_tick: AtomicU32::new(u32::MAX),
            fresh_tick: AtomicU32::new(u32::MAX),
            seen_tick: AtomicU32::new(0),
            slice_since: AtomicU64::new(0),
            seen_run: AtomicU32::new(0),
            run_since: AtomicU64::new(0),
            preempt_run: AtomicU32::new(0),
            preempt_tick: AtomicU32::new(0),
            nexts_at_tick: Cell::new(0),
            fresh_turn: Cell::new(false),
            timer_checks: Cell::new(0),
            yields_until_steal: Cell::new(0),
            yields_between_steals: Cell::new(0),
            last_was_out_of_turn: Cell::new(false),
            idle_link: Cell::new(None),
            wants_spinning_m: Cell::new(false),
            #[cfg(debug_assertions)]
            local_is_borrowed: Cell::new(false),
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

    /// Returns the M that owns it.
    pub(crate) fn holder(&self) -> Option<&'static M> {
        // Acquire: pairs with `M::set_p`.
        // SAFETY: null or an M; Ms are never freed.
        unsafe { self.holder.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the part of the P that only its owner touches.
    ///
    /// # Safety
    /// The caller owns the P (invariant 1) and cannot be preempted; or no thread owns the P, and
    /// none can take it, because the caller holds the scheduler's lock or no other thread knows the
    /// P. No other borrow is alive.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn local(&self) -> &mut Local {
        // SAFETY: the caller's contract.
        unsafe { &mut *self.local.get() }
    }

    /// Ends the process if a borrow from `Rt::with_local` is alive. Otherwise records a borrow
    /// until the result is dropped.
    #[cfg(debug_assertions)]
    pub(crate) fn check_only_borrow(&self) -> OnlyBorrow<'_> {
        if self.local_is_borrowed.replace(true) {
            crate::sched::fatal(format_args!("P {}: with_local was nested", self.id));
        }
        OnlyBorrow(&self.local_is_borrowed)
    }
}

/// See [`P::check_only_borrow`].
#[cfg(debug_assertions)]
pub(crate) struct OnlyBorrow<'a>(&'a Cell<bool>);

#[cfg(debug_assertions)]
impl Drop for OnlyBorrow<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// The queues. "Owner" in front of a description means that only the owner may call the function.
impl P {
    /// Returns the ring for `g`: woken or fresh. The caller puts neither a goroutine that runs next
    /// nor an expired one into a ring.
    #[inline]
    pub(crate) fn ring_for(&self, g: Runnable) -> &RunQueue<RunHead> {
        if g.head().woken.get() { &self.woken } else { &self.runq }
    }

    /// Owner: appends to a ring. If the ring is full, half of it moves to a global queue.
    #[inline]
    pub(crate) fn push_back(&self, sched: &Sched, g: impl Into<Runnable>) {
        let g = g.into();
        if let Err(overflow) = self.ring_for(g).push_back(g.as_item()) {
            bump(&self.counters.overflows, 1);
            sched.overflow_slow(overflow, g);
        }
    }

    /// Owner: makes `g` the next to run. The goroutine that was next goes to the tail of a ring.
    /// The call is a full barrier, so [`Sched::wake`] may follow.
    #[inline]
    pub(crate) fn push_next(&self, sched: &Sched, g: impl Into<Runnable>) {
        if let Some(displaced) = self.runq.push_next(g.into().as_item()) {
            // SAFETY: what the queue holds came from `as_item`.
            self.push_back(sched, unsafe { Runnable::from_item(displaced) });
            // The swap was a barrier for `g` only. Without a second barrier, the last spinning M
            // may miss the displaced goroutine, while another spinning M steals `g`.
            full_fence();
        }
    }

    /// Returns whether no goroutine waits here. A goroutine that the owner moves from `runnext` to
    /// a ring meanwhile is not missed: the move changes a tail, and then the queues are read again.
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

    /// Returns approximately how many goroutines wait here.
    pub(crate) fn queued(&self) -> usize {
        self.woken.len() + self.runq.len()
    }

    /// Returns approximately how many goroutines wait in the rings, without `runnext`.
    pub(crate) fn ring_len(&self) -> u32 {
        self.woken.ring_len() + self.runq.ring_len()
    }

    /// Returns how many goroutines were taken from here, modulo 2³²: by the owner from `runnext`
    /// and the rings, and by thieves from the rings.
    pub(crate) fn taken(&self) -> u32 {
        self.woken.taken().wrapping_add(self.runq.taken())
    }

    /// Owner of this P, whose rings are empty, as a thief: takes half of the woken ring of
    /// `victim`, or else half of its fresh ring. Returns one of the goroutines to run; the others
    /// are in the rings of this P.
    pub(crate) fn steal_from(&self, victim: &P) -> Option<Runnable> {
        let woken = victim.woken.steal_into(&self.woken);
        let item = woken.or_else(|| victim.runq.steal_into(&self.runq))?;
        // SAFETY: what the queue holds came from `as_item`.
        Some(unsafe { Runnable::from_item(item) })
    }
}

/// Slices and runs.
impl P {
    /// Owner: a goroutine begins a time slice.
    #[inline]
    pub(crate) fn begin_slice(&self) {
        self.tick.store(self.tick.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.nexts_at_tick.set(self.runq.nexts_taken());
    }

    /// Owner: an expired goroutine begins a time slice.
    pub(crate) fn begin_expired_slice(&self) {
        self.begin_slice();
        self.expired_tick.store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Owner: a fresh goroutine begins a time slice.
    #[inline]
    pub(crate) fn begin_fresh_slice(&self) {
        self.begin_slice();
        self.fresh_tick.store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns whether an expired goroutine began the present slice. For any thread.
    pub(crate) fn runs_expired(&self) -> bool {
        self.expired_tick.load(Ordering::Relaxed) == self.tick.load(Ordering::Relaxed)
    }

    /// Returns whether a fresh goroutine began the present slice. For any thread.
    pub(crate) fn runs_fresh(&self) -> bool {
        self.fresh_tick.load(Ordering::Relaxed) == self.tick.load(Ordering::Relaxed)
    }

    /// Owner: returns whether the running goroutine came from `runnext`, into a slice that another
    /// goroutine began.
    pub(crate) fn runs_inherited(&self) -> bool {
        self.runq.nexts_taken() != self.nexts_at_tick.get()
    }

    /// Returns the number of the present run: it changes with every goroutine that begins or
    /// continues here.
    pub(crate) fn run_number(&self) -> u32 {
        self.tick.load(Ordering::Relaxed).wrapping_add(self.runq.nexts_taken())
    }

    /// Asks the goroutine of the run numbered `run`, in the slice `tick`, to stop. If another
    /// goroutine runs by then, that goroutine is not stopped; but if the slice is still the same,
    /// the slice ends at the next switch.
    pub(crate) fn ask_to_preempt(&self, tick: u32, run: u32) {
        self.preempt_tick.store(tick, Ordering::Relaxed);
        self.preempt_run.store(run, Ordering::Relaxed);
        // Release: pairs with `is_asked_to_preempt`, which sees the run together with the flag.
        self.flags.fetch_or(flag::PREEMPT, Ordering::Release);
    }

    /// Owner: returns whether the running goroutine is the one that was asked to stop.
    pub(crate) fn is_asked_to_preempt(&self) -> bool {
        // Acquire: pairs with `ask_to_preempt`, so the run is the one of this request.
        self.flags.load(Ordering::Acquire) & flag::PREEMPT != 0
            && self.preempt_run.load(Ordering::Relaxed) == self.run_number()
    }

    /// Owner, between two goroutines: returns whether the present slice was asked to end.
    pub(crate) fn is_asked_to_end_slice(&self) -> bool {
        // Acquire: as in `is_asked_to_preempt`.
        self.flags.load(Ordering::Acquire) & flag::PREEMPT != 0
            && self.preempt_tick.load(Ordering::Relaxed) == self.tick.load(Ordering::Relaxed)
    }

    /// sysmon: returns when sysmon first saw the present slice, and when it first saw the present
    /// run. That is `now` for a slice or run that it has not seen before.
    pub(crate) fn running_since(&self, now: Nanos) -> (Nanos, Nanos) {
        let (tick, run) = (self.tick.load(Ordering::Relaxed), self.run_number());
        let slice_is_new = self.seen_tick.load(Ordering::Relaxed) != tick;
        if slice_is_new {
            self.seen_tick.store(tick, Ordering::Relaxed);
            self.slice_since.store(now, Ordering::Relaxed);
        }
        if slice_is_new || self.seen_run.load(Ordering::Relaxed) != run {
            self.seen_run.store(run, Ordering::Relaxed);
            self.run_since.store(now, Ordering::Relaxed);
        }
        (self.slice_since.load(Ordering::Relaxed), self.run_since.load(Ordering::Relaxed))
    }
}

impl Local {
    /// Empties the caches and returns the credits for stacks, because this P retires or is freed.
    pub(crate) fn drain(&mut self) {
        self.stacks.drain();
        self.free_gs.spill_slow(0);
        self.free_tasks.drain();
    }

    /// Gives up the ids that were reserved, for another run of a simulation.
    pub(crate) fn restart_ids(&mut self) {
        self.end_of_ids = self.next_id;
    }

    /// Makes the last id the next one again.
    pub(crate) fn give_back_last_id(&mut self) {
        self.next_id -= 1;
    }

    /// Returns the next goroutine id. `take_batch` reserves a batch of the given size and returns
    /// its first id.
    #[inline]
    pub(crate) fn next_id(&mut self, take_batch: impl FnOnce(u64) -> u64) -> u64 {
        if self.next_id == self.end_of_ids {
            self.next_id = take_batch(ID_BATCH);
            self.end_of_ids = self.next_id + ID_BATCH;
        }
        let id = self.next_id;
        self.next_id += 1;
        id
    }
}
