//! The scheduler: the one place that decides what runs where.
//!
//! | file | what |
//! |---|---|
//! | `g.rs`, `m.rs`, `p.rs` | the three nouns: goroutine, thread, the right to run |
//! | `state.rs` | what a goroutine is doing: park and its wake-up |
//! | `task.rs`, `join.rs`, `scope.rs` | what a goroutine executes, and who waits for its end |
//! | `runq.rs`, `central.rs`, `idle.rs` | local queues; the global queue and idle lists; who sleeps |
//! | `switch.rs` | park, yield, exit, and the switch between goroutines |
//! | `find.rs` | where the next goroutine comes from |
//! | `wait.rs`, `timers.rs`, `heap.rs` | the narrow waist: block and wake, on goroutines and plain threads; deadlines |
//! | `queue.rs`, `table.rs` | lists of sleepers; lists by address, for locks of one word |
//! | `deferred.rs` | wake-ups that a signal handler leaves to the helper thread |
//! | `pollable.rs` | who waits for a descriptor, and what the poller says about it |
//! | `spawn.rs`, `procs.rs` | new goroutines; `set_procs` |
//! | `sysmon.rs`, `helper.rs` | the thread that watches, and the one that may wait |
//! | `preempt.rs`, `handoff.rs`, `locked.rs` | stopping a goroutine; Ps of blocked threads; goroutines bound to a thread |
//! | `calls.rs` | whole runtime calls (blocking, sleep, yield), for the floors above |
//! | `stop.rs` | the end of a runtime |
//!
//! Rules of the house:
//! 1. State of a P is touched only with an [`Rt`] in hand (m.rs, invariant 4).
//! 2. With an `Rt` in hand nobody calls malloc, takes a std lock, or runs user code. A goroutine that
//!    was preempted inside malloc holds malloc's lock; it needs a P to go on, and it must not be
//!    ours that waits for it. Memory is allocated before, and freed after. Stacks are made where the P may be
//!    taken meanwhile ([`Rt::retakable`]), threads are started by the helper thread.
//! 3. Locks, in order: a timer's slot (`time/slot.rs`), `Sched::central`, then the leaf locks (heaps of timers, free Gs,
//!    stack depot).

pub(crate) mod calls;
pub(crate) mod g;
pub(crate) mod goroutine;
pub(crate) mod m;
pub(crate) mod monitor;
pub(crate) mod netpoll;
pub(crate) mod p;
pub(crate) mod p_snapshot;
pub(crate) mod procs;
pub(crate) mod queues;
pub(crate) mod random;
pub(crate) mod search;
pub(crate) mod shutdown;
pub(crate) mod switch;
pub(crate) mod wait;

use crate::sys::clock::{self, NEVER, Nanos};
pub(crate) use crate::sys::fatal;
use crate::sys::lock::Lock;
use crate::sys::realtime::Realtime;

use g::G;
pub(crate) use m::Rt;
use monitor::{helper, sysmon};
use netpoll::poller;
use p::P;
use queues::central::Central;
use search::idle::Idle;
#[cfg(feature = "std")]
pub(crate) use shutdown::{
    WaitingHolder, holds_lock, holds_lock_of_std, is_runtime_drained, is_to_be_orphaned,
    is_without_p,
};
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The most Ps there can be.
pub(crate) const MAX_PROCS: usize = 1024;
/// The most threads a runtime starts, unless it is told otherwise. Go's number.
pub(crate) const MAX_THREADS: u32 = 10_000;

thread_local! {
    /// The goroutine that runs here; null on a plain thread. It lies in the goroutine's own TLS, so
    /// it never changes while one runs, and a cached address or value stays right.
    static CURRENT: Cell<*const G> = const { Cell::new(std::ptr::null()) };
}

/// The goroutine that runs this code.
#[inline(always)]
pub(crate) fn current_g() -> Option<&'static G> {
    // SAFETY: null, or the running goroutine; the memory of Gs is never freed.
    unsafe { CURRENT.get().as_ref() }
}

/// What a runtime is made with.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) abort_on_panic: bool,
    pub(crate) schedtrace_ms: Option<u64>,
    pub(crate) scheddetail: bool,
    /// What the helper thread calls; the floors above give it.
    pub(crate) hooks: Hooks,
    /// Id of the first goroutine: 1 where it will be a main, 2 where there is none.
    pub(crate) first_id: u64,
    /// The most threads that run goroutines.
    pub(crate) max_threads: u32,
    /// Goroutines are stopped by a signal, not only at their next runtime call.
    pub(crate) async_preempt: bool,
    /// How long a goroutine may run while others wait.
    pub(crate) slice: Nanos,
    /// The number of Ps follows the machine's.
    pub(crate) follow_cpus: bool,
}

/// What the helper thread calls from the floors above.
#[derive(Clone, Copy)]
pub(crate) struct Hooks {
    /// It is time for a trace.
    pub(crate) trace: fn(&Sched),
    /// Every P is idle, no timer is set, and goroutines are left. Called again, ever more rarely, while
    /// that lasts.
    pub(crate) all_asleep: fn(&Sched),
    /// A signal asked for something: looked at whenever the helper thread is woken.
    pub(crate) asked: fn(),
    /// Calls its argument while nobody else has std's standard output (0), or error (1).
    pub(crate) with_output: fn(usize, &mut dyn FnMut()),
}

/// See [`Sched::runtime_id`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct RuntimeId(u64);

impl RuntimeId {
    fn new() -> RuntimeId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        RuntimeId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// One scheduler: a runtime.
pub(crate) struct Sched {
    id: RuntimeId,
    pub(crate) central: Lock<Central>,
    /// Length of the global queue, for a look without the lock. Written under it.
    pub(crate) global_len: AtomicU32,
    pub(crate) idle: Idle,
    /// Ps by id; the first `made` exist. They live as long as the Sched.
    ps: Box<[AtomicPtr<P>]>,
    /// How many Ps were ever made. Grows under the lock.
    made: AtomicU32,
    /// How many may run: ids below it.
    procs: AtomicU32,
    /// Until when the idle poller sleeps (`find.rs`); `NEVER` if there is none, so that a new timer calls for
    /// one. Written under the lock.
    pub(crate) idle_poller_until: AtomicU64,
    /// The runtime ends; the rest of it is in `ending` (`stop.rs`).
    pub(crate) stopping: AtomicBool,
    pub(crate) ending: shutdown::ShutdownState,
    next_id: AtomicU64,
    /// Goroutines started and ended on no P (by plain threads).
    pub(crate) spawned_outside: AtomicU64,
    threads: AtomicU32,
    /// The goroutines' reference to this Sched was given back.
    released: AtomicBool,
    next_m: AtomicU32,
    /// Idle threads, for a look without the lock. Written under it.
    pub(crate) spares: AtomicU32,
    /// Goroutines that were stopped inside a library (`preempt.rs`). Written under the lock.
    pub(crate) stopped_in_libc: AtomicU32,
    /// Goroutines that were stopped by a signal and have not gone on since. Raised under the lock.
    pub(crate) stopped_by_signal: AtomicU32,
    /// Goroutines that wait and may hold a lock of the whole process. Raised under the lock.
    pub(crate) waiting_holders: AtomicU32,
    /// Goroutines that were woken by the owner of a lock, and have not run since.
    pub(crate) promised: AtomicU32,
    /// Threads that run a goroutine without a P.
    pub(crate) ms_without_p: AtomicU32,
    /// Whether the number of Ps still follows the machine's: `set_procs` ends that.
    pub(crate) follows_cpus: AtomicBool,
    /// Goroutines stopped by a signal, signals sent for that, and Ps taken from blocked threads.
    pub(crate) preemptions: AtomicU64,
    pub(crate) signals: AtomicU64,
    pub(crate) retakes: AtomicU64,
    pub(crate) sysmon: &'static sysmon::Sysmon,
    pub(crate) poller: &'static poller::Poller,
    /// Never freed, but given back: a signal handler may know it.
    pub(crate) helper: &'static helper::Helper,
    /// If its threads are real-time ones (`sys/realtime.rs`).
    pub(crate) realtime: Option<Realtime>,
    /// It was said that no thread can be had.
    said_no_threads: AtomicBool,
    pub(crate) config: Config,
    /// When it was started, on two clocks that are one.
    pub(crate) started: Instant,
    started_at: Nanos,
    /// Milliseconds since `started`, refreshed by sysmon: how long goroutines wait, for dumps.
    pub(crate) coarse_ms: AtomicU32,
}

impl Sched {
    /// A scheduler with `procs` Ps and its first thread.
    pub(crate) fn start(procs: usize, config: Config) -> io::Result<Arc<Sched>> {
        let poller = poller::Poller::take();
        let (started, started_at) = clock::now_on_both();
        let sched = Arc::new(Sched {
            id: RuntimeId::new(),
            central: Lock::new(Central::new()),
            global_len: AtomicU32::new(0),
            idle: Idle::new(),
            ps: (0..MAX_PROCS).map(|_| AtomicPtr::default()).collect(),
            made: AtomicU32::new(0),
            procs: AtomicU32::new(0),
            idle_poller_until: AtomicU64::new(NEVER),
            stopping: AtomicBool::new(false),
            ending: shutdown::ShutdownState::new(),
            next_id: AtomicU64::new(config.first_id),
            spawned_outside: AtomicU64::new(0),
            threads: AtomicU32::new(0),
            released: AtomicBool::new(false),
            next_m: AtomicU32::new(0),
            spares: AtomicU32::new(0),
            stopped_in_libc: AtomicU32::new(0),
            stopped_by_signal: AtomicU32::new(0),
            promised: AtomicU32::new(0),
            waiting_holders: AtomicU32::new(0),
            ms_without_p: AtomicU32::new(0),
            follows_cpus: AtomicBool::new(config.follow_cpus),
            preemptions: AtomicU64::new(0),
            signals: AtomicU64::new(0),
            retakes: AtomicU64::new(0),
            sysmon: poller.sysmon(),
            helper: helper::Helper::take(),
            poller,
            realtime: Realtime::of_this_thread(),
            said_no_threads: AtomicBool::new(false),
            config,
            started,
            started_at,
            coarse_ms: AtomicU32::new(0),
        });
        sched.resize(procs)?;
        // The first thread must start; later ones may fail, and the work is done by those there are.
        helper::start_thread(&sched, sched.central.lock())?;
        // And one to spare, before any goroutine runs: see `helper.rs`.
        let _ = helper::start_thread(&sched, sched.central.lock());
        // Goroutines as a group own one reference; the last thread gives it back if none is left
        // alive. Otherwise it stays: a goroutine that is never resumed keeps its runtime.
        std::mem::forget(sched.clone());
        if let Err(e) = helper::start(&sched).and_then(|()| sysmon::start(&sched)) {
            sched.begin_shutdown();
            return Err(e);
        }
        sched.helper.wake();
        Ok(sched)
    }

    /// A thread was needed and could not be had: said once. The work waits for those there are.
    #[cold]
    pub(crate) fn say_no_threads(&self, e: &io::Error) {
        if self.said_no_threads.swap(true, Ordering::Relaxed) {
            return;
        }
        let n = self.threads();
        let wait = format_args!("goroutines wait until one of the {n} threads is free\n");
        if e.kind() == io::ErrorKind::QuotaExceeded && e.get_ref().is_none() {
            let max = self.config.max_threads;
            crate::sys::stderr::write_stderr(format_args!(
                "trefoil: program exceeds {max}-thread limit (RuntimeBuilder::max_threads); {wait}"
            ));
        } else {
            crate::sys::stderr::write_stderr(format_args!("trefoil: {e}; {wait}"));
        }
    }

    /// Counts one more thread and gives it a number. Under the lock, or before the runtime is known: while
    /// a thread is being started the count must not reach zero.
    fn admit_thread(&self) -> io::Result<u32> {
        let before = self.threads.fetch_add(1, Ordering::AcqRel);
        if before >= self.config.max_threads {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            // In words where no lock is held: `say_no_threads`.
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Ok(self.next_m.fetch_add(1, Ordering::Relaxed))
    }

    /// A thread has ended, or could not start. The last one of a runtime that stops gives back the
    /// goroutines' reference, if none of them is left. The caller keeps one of its own.
    fn dismiss_thread(&self) {
        // AcqRel: the last thread sees what the others did.
        let last = self.threads.fetch_sub(1, Ordering::AcqRel) == 1;
        if last {
            self.sysmon.wake();
            self.helper.wake();
        }
        if last
            && self.stopping.load(Ordering::Acquire)
            && self.num_goroutines() == 0
            && !self.released.swap(true, Ordering::AcqRel)
        {
            // SAFETY: the reference forgotten in `start`, given back once.
            unsafe { Arc::decrement_strong_count(std::ptr::from_ref(self)) };
        }
    }

    pub(crate) fn threads(&self) -> u32 {
        self.threads.load(Ordering::Relaxed)
    }

    pub(crate) fn procs(&self) -> u32 {
        self.procs.load(Ordering::Relaxed)
    }

    /// The P with this id, if it was ever made.
    pub(crate) fn p(&self, id: u32) -> Option<&'static P> {
        // Acquire: pairs with the Release in `resize`.
        // SAFETY: Ps are freed with the Sched, and whoever asks keeps the Sched.
        unsafe { self.ps.get(id as usize)?.load(Ordering::Acquire).as_ref() }
    }

    /// How many Ps were ever made.
    pub(crate) fn made(&self) -> u32 {
        self.made.load(Ordering::Acquire)
    }

    pub(crate) fn all_ps(&self) -> impl Iterator<Item = &'static P> + '_ {
        (0..self.made()).filter_map(|id| self.p(id))
    }

    /// Nothing runs, nothing waits in a queue, and no timer will change that.
    pub(crate) fn is_asleep(&self) -> bool {
        self.idle.idle_ps() >= self.procs()
            && self.ms_without_p.load(Ordering::Relaxed) == 0
            && !self.has_global()
            && !self.poller.has_waiters()
            && self.next_timer() == NEVER
            && !signal_may_wake()
    }

    /// How often its Ps have begun to run a goroutine, if [`is_asleep`](Sched::is_asleep); None otherwise. For the deadlock
    /// check.
    pub(crate) fn runs_if_asleep(&self) -> Option<u64> {
        // Ps become idle, and are taken, under the lock.
        let _no_changes = self.central.lock();
        let runs =
            |p: &P| u64::from(p.tick.load(Ordering::Relaxed)) + u64::from(p.runq.nexts_taken());
        self.is_asleep().then(|| self.all_ps().map(runs).sum())
    }

    /// Which runtime this is: no other one ever has the same, not even later.
    pub(crate) fn runtime_id(&self) -> RuntimeId {
        self.id
    }

    /// A point in time as std has it, never later; up to some tens of nanoseconds earlier. Without reading the clock.
    pub(crate) fn instant(&self, t: Nanos) -> Instant {
        self.started + Duration::from_nanos(t.saturating_sub(self.started_at))
    }

    /// Brings the coarse time up to date.
    pub(crate) fn refresh_coarse(&self) {
        self.coarse_ms.store(self.started.elapsed().as_millis() as u32, Ordering::Relaxed);
    }

    /// How long a waiting goroutine has waited.
    pub(crate) fn minutes_since(&self, g: &G) -> u32 {
        let since = g.waiting_since_ms.load(Ordering::Relaxed);
        (self.started.elapsed().as_millis() as u32).saturating_sub(since) / 60_000
    }

    /// Hands out `n` goroutine ids, never again used; returns the first.
    pub(crate) fn take_ids(&self, n: u64) -> u64 {
        self.next_id.fetch_add(n, Ordering::Relaxed)
    }

    /// Goroutines alive: started and not ended.
    pub(crate) fn num_goroutines(&self) -> u64 {
        // Ends are summed before starts: a goroutine that starts and ends in between does not make
        // the difference negative.
        let ended: u64 = self.all_ps().map(|p| p.counters.ended.load(Ordering::Acquire)).sum();
        let spawned: u64 = self.all_ps().map(|p| p.counters.spawned.load(Ordering::Acquire)).sum();
        (spawned + self.spawned_outside.load(Ordering::Acquire)).saturating_sub(ended)
    }
}

impl Drop for Sched {
    fn drop(&mut self) {
        self.poller.give_back();
        self.helper.give_back();
        for p in &mut self.ps {
            let p = *p.get_mut();
            if !p.is_null() {
                // SAFETY: made by Box in `resize`; no thread is left that could hold it.
                let p = unsafe { Box::from_raw(p) };
                // SAFETY: nobody holds the P.
                unsafe { p.local() }.give_all_back();
            }
        }
    }
}

/// Whether a goroutine waits for what a signal handler may do. Such a wait is no deadlock.
fn signal_may_wake() -> bool {
    #[cfg(feature = "std")]
    return wait::deferred::SIGNAL_WAITS.load(Ordering::Relaxed) != 0;
    #[cfg(not(feature = "std"))]
    false
}

/// The stack of the goroutine that runs this code: lowest and highest address.
pub(crate) fn current_stack_bounds() -> Option<(usize, usize)> {
    let g = current_g()?;
    let stack = g.stack.take()?;
    let bounds = stack.bounds();
    g.stack.set(Some(stack));
    Some(bounds)
}

/// This thread's own FS base, if it is a runtime thread.
pub(crate) fn thread_fs_base() -> Option<usize> {
    m::M::thread_fs_base()
}
