//! The scheduler: every decision about which goroutine runs on which thread.
//!
//! | file or folder | content |
//! |---|---|
//! | `g.rs` | G: a goroutine |
//! | `m.rs` | M: an OS thread that runs goroutines; `Rt`, the proof of being inside the runtime |
//! | `p.rs` | P: the right to run goroutines, with a run queue and caches |
//! | `runnable.rs` | what run queues hold: goroutines and tasks |
//! | `switch.rs` | park, yield, exit: the switch from one goroutine to the next |
//! | `goroutine/` | the life of a goroutine: spawn, body, states, join, scope, locked Ms |
//! | `task/` | futures that the scheduler polls, on carriers |
//! | `queues/` | where runnable goroutines wait, and which idle M is woken to run them |
//! | `search/` | how an M finds its next goroutine, spins, gives up, and waits for a P |
//! | `wait/` | how everything else blocks and wakes goroutines and plain threads; timers |
//! | `netpoll/` | waiting for descriptors; the idle M that sleeps until the next timer or event |
//! | `monitor/` | sysmon, the helper thread, preemption, retaking Ps from blocked threads |
//! | `calls.rs` | runtime calls that the public functions and `interpose/` share |
//! | `allocator.rs` | the program's allocator, as an M runs it |
//! | `procs.rs` | `set_procs`: more or fewer Ps |
//! | `shutdown.rs` | the end of a runtime |
//! | `latency.rs` | histograms: how long goroutines are runnable, how late timers are |
//! | `p_snapshot.rs` | the state and the counters of a P, for statistics and traces |
//! | `record/` | the flight recorder: what the Ps did last |
//! | `usage.rs` | CPU time and time runnable of goroutines: sysmon's estimate |
//! | `trigger.rs` | incidents that the scheduler notices while the flight recorder is on |
//! | `labels.rs` | keys and values of a goroutine or task, for profiles and dumps |
//! | `sample.rs` | samples for profiles: CPU timers, waits, copies of stacks in a ring |
//! | `simulation/` | a runtime whose clock and schedule belong to a test |
//! | `random.rs` | random numbers inside and outside the runtime |
//!
//! To learn how it works, read `m.rs`, `switch.rs`, `search/find.rs` and `search/idle.rs` first.
//!
//! Rules for all code of the scheduler:
//! 1. A P's own state is touched only with an [`Rt`], which proves that the M owns the P (m.rs,
//!    invariant 4).
//! 2. Code that has an `Rt` does not call malloc, take a lock of std's, or run user code. A
//!    goroutine that was preempted inside malloc holds malloc's lock and needs a P to continue; an
//!    M that owns a P must not wait for that lock. So memory is allocated before the runtime is
//!    entered and freed after it is left, stacks are made while the P may be retaken
//!    ([`m::OwnContext::retakable`]), and the helper thread starts the threads.
//! 3. Locks are taken in this order: a timer's slot (`time/slot.rs`), `Sched::central`, then the
//!    leaf locks (timer heaps, free Gs, the central stack pool).

pub(crate) mod allocator;
pub(crate) mod calls;
pub(crate) mod g;
pub(crate) mod goroutine;
pub(crate) mod labels;
pub(crate) mod latency;
pub(crate) mod m;
pub(crate) mod monitor;
pub(crate) mod netpoll;
pub(crate) mod own_context;
pub(crate) mod p;
pub(crate) mod p_snapshot;
pub(crate) mod procs;
pub(crate) mod queues;
pub(crate) mod random;
pub(crate) mod record;
pub(crate) mod runnable;
pub(crate) mod sample;
pub(crate) mod search;
pub(crate) mod shutdown;
pub(crate) mod simulation;
pub(crate) mod switch;
pub(crate) mod task;
pub(crate) mod trigger;
pub(crate) mod usage;
pub(crate) mod wait;

use crate::arch;
use crate::sys::clock::{self, NEVER, Nanos};
pub(crate) use crate::sys::fatal;
use crate::sys::lock::Lock;
use crate::sys::realtime::Realtime;

use g::G;
pub(crate) use m::Rt;
use monitor::{helper, sysmon};
use netpoll::idle_poller::Vacancy;
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
use std::fmt;
use std::io;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The largest number of Ps.
pub(crate) const MAX_PROCS: usize = 1024;
/// The default limit on threads for Ms. Go's number.
pub(crate) const MAX_THREADS: u32 = 10_000;

thread_local! {
    /// The goroutine that runs here; null on a plain thread. It is in the goroutine's own TLS, so
    /// it does not change while a goroutine runs, and the compiler may cache its address or value.
    static CURRENT: Cell<*const G> = const { Cell::new(std::ptr::null()) };
}

/// Distance of [`CURRENT`] below the thread pointer: the same in every TLS block. A hint for the
/// cache; 0 until the first scheduler starts.
static CURRENT_BELOW_TP: AtomicUsize = AtomicUsize::new(0);

/// Returns the goroutine that runs this code.
#[inline(always)]
pub(crate) fn current_g() -> Option<&'static G> {
    // SAFETY: null or the running goroutine; the memory of Gs is never freed.
    unsafe { CURRENT.get().as_ref() }
}

/// The settings of a runtime.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    /// A panic in a goroutine ends the process (`PanicMode::Abort`).
    pub(crate) abort_on_panic: bool,
    /// The time between two traces on stderr. None means no traces.
    pub(crate) schedtrace_ms: Option<u64>,
    /// A trace also has a line per P and goroutine.
    pub(crate) scheddetail: bool,
    pub(crate) hooks: Hooks,
    /// The largest number of threads for Ms.
    pub(crate) max_threads: u32,
    /// Goroutines are preempted by a signal, not only at their next runtime call.
    pub(crate) async_preempt: bool,
    /// The time slice: how long a goroutine may run while others wait.
    pub(crate) slice: Nanos,
    /// The number of Ps follows the number of CPUs that the process may use.
    pub(crate) follow_cpus: bool,
    /// The runtime serves the runtime library, not the program: dumps and the deadlock check leave
    /// it out.
    pub(crate) is_system: bool,
    /// The clock and the schedule are simulated.
    pub(crate) simulation: Option<simulation::Outside>,
}

/// Functions of the modules above the scheduler. The helper thread calls the first four, a goroutine
/// the fifth, and the end of a runtime (`shutdown.rs`, `monitor/preempt.rs`) the others.
#[derive(Clone, Copy)]
pub(crate) struct Hooks {
    /// Prints a trace. Called when the next trace is due.
    pub(crate) trace: fn(&Sched),
    /// Reports a possible deadlock: every P is idle, no timer is set, and goroutines are alive.
    /// Called again, at ever longer intervals, while that lasts.
    pub(crate) all_asleep: fn(&Sched),
    /// Reports goroutines that wait for each other. Called a while after goroutines have begun to
    /// wait for locks. Returns when it wants to be called again at the latest. None: not to be
    /// called.
    pub(crate) check_waits: Option<fn(&Sched) -> Nanos>,
    /// Serves requests of signal handlers. Called whenever the helper thread is woken.
    pub(crate) serve_signals: fn(),
    /// Tells std the name of the calling goroutine, which has not run its closure yet.
    pub(crate) tell_std_name: fn(),
    /// Calls the function while this thread holds std's lock of standard output (0) or of standard
    /// error (1).
    pub(crate) with_output: fn(usize, &mut dyn FnMut()),
    /// Wakes the goroutines that wait for std's outputs, inside the runtime. Called for a goroutine
    /// that is stopped for ever, and may have unlocked an output without waking the next one.
    pub(crate) wake_for_outputs: fn(Option<Rt>),
}

/// Identifies a runtime; see [`Sched::runtime_id`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct RuntimeId(u64);

impl RuntimeId {
    fn new() -> RuntimeId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        RuntimeId(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn number(self) -> u64 {
        self.0
    }
}

/// The scheduler of one runtime.
pub(crate) struct Sched {
    id: RuntimeId,
    /// Comments in `sched/` call it "the lock" or "the scheduler's lock".
    pub(crate) central: Lock<Central>,
    /// Length of the global queues, for readers without the lock. Written under the lock.
    pub(crate) global_len: AtomicU32,
    pub(crate) idle: Idle,
    /// Ps by id; the first `ps_made` exist. They live as long as the Sched.
    ps: Box<[AtomicPtr<P>]>,
    /// How many Ps were made. Grows under the lock, and never shrinks.
    ps_made: AtomicU32,
    /// How many Ps may run goroutines: the Ps with ids below this number.
    procs: AtomicU32,
    /// Until when the idle poller sleeps (`netpoll/idle_poller.rs`). `NEVER` if there is no idle
    /// poller, so any new timer is earlier. Written under the lock.
    pub(crate) idle_poller_until: AtomicU64,
    /// Whether the place of the idle poller is vacant.
    pub(crate) vacancy: Vacancy,
    /// The runtime stops (`shutdown.rs`); `ending` has the details.
    pub(crate) stopping: AtomicBool,
    pub(crate) ending: shutdown::ShutdownState,
    /// The next goroutine id that no P has reserved.
    next_id: AtomicU64,
    /// Goroutines that were started outside the runtime, so that no P counts them.
    pub(crate) spawned_outside: AtomicU64,
    pub(crate) tasks: task::carrier::Tasks,
    /// Threads for Ms that run or are being started.
    threads: AtomicU32,
    /// The reference that the goroutines together own was released (`start`).
    released: AtomicBool,
    /// The id of the next M.
    next_m: AtomicU32,
    /// How many Ms are idle, the idle poller included, for readers without the lock. Written under
    /// the lock.
    pub(crate) spares: AtomicU32,
    /// Goroutines that were stopped inside libc or the loader (`monitor/preempt.rs`). Written under
    /// the lock.
    pub(crate) stopped_in_libc: AtomicU32,
    /// Goroutines that were stopped by a signal and have not run since. Raised under the lock.
    pub(crate) stopped_by_signal: AtomicU32,
    /// Goroutines that wait, and may hold a lock that the whole process needs. Raised under the
    /// lock.
    pub(crate) waiting_holders: AtomicU32,
    /// Goroutines that were woken by the owner of a lock and have not run since.
    pub(crate) promised: AtomicU32,
    /// Ms that run a goroutine without a P.
    pub(crate) ms_without_p: AtomicU32,
    /// Goroutines that are locked to an M.
    pub(crate) locked_goroutines: AtomicU32,
    /// The number of Ps follows the number of CPUs. `set_procs` clears it.
    pub(crate) follows_cpus: AtomicBool,
    /// How many times a signal has stopped a goroutine.
    pub(crate) preemptions: AtomicU64,
    /// How many signals were sent to stop a goroutine.
    pub(crate) signals: AtomicU64,
    /// How many Ps were retaken from blocked threads.
    pub(crate) retakes: AtomicU64,
    pub(crate) sysmon: &'static sysmon::Sysmon,
    pub(crate) poller: &'static poller::Poller,
    /// Never freed, only reused: a signal handler may still have its address.
    pub(crate) helper: &'static helper::Helper,
    /// Whether the helper thread is to check for cycles of waits.
    pub(crate) wait_check: wait::holder::WaitCheck,
    /// Set if the threads of this runtime have a real-time policy (`sys/realtime.rs`).
    pub(crate) realtime: Option<Realtime>,
    /// The kernel has refused to start threads for a while, and may go on to do so.
    pub(crate) threads_refused: AtomicBool,
    /// The message that no thread can be started was printed.
    no_threads_reported: AtomicBool,
    pub(crate) config: Config,
    pub(crate) simulation: Option<Box<simulation::Simulation>>,
    /// When the runtime was started.
    pub(crate) started: Instant,
    /// The same time in the form of `sys::clock`.
    started_at: Nanos,
    /// Milliseconds since `started`, refreshed by sysmon. A goroutine that parks stores it, so that
    /// dumps show how long the goroutine has waited, and the flight recorder knows a long wait.
    pub(crate) coarse_ms: AtomicU32,
    pub(crate) record: record::Record,
    pub(crate) triggers: trigger::Triggers,
    pub(crate) usage: usage::Usage,
    pub(crate) stopwatches: latency::Stopwatches,
    /// From the time when an M lost its P in a blocking call until it needed a P again.
    pub(crate) time_without_p: latency::LatencyHistogram,
}

/// Where debuggers find the fields of a runtime (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("sched.id", offset_of!(Sched, id)),
    ("sched.ps", offset_of!(Sched, ps)),
    ("sched.ps_made", offset_of!(Sched, ps_made)),
    ("sched.started_at", offset_of!(Sched, started_at)),
    ("sched.coarse_ms", offset_of!(Sched, coarse_ms)),
    ("holder.salt_factor", HOLDER_SALT_FACTOR as usize),
];

/// The factor of [`Sched::holder_salt`].
const HOLDER_SALT_FACTOR: u32 = 0x9E37_79B9;

/// The Ps that were made, by id. A type of its own, because the adapters of std are compiled anew for
/// each of thirty users.
pub(crate) struct AllPs<'a> {
    sched: &'a Sched,
    next: u32,
    made: u32,
}

impl Iterator for AllPs<'_> {
    type Item = &'static P;

    fn next(&mut self) -> Option<&'static P> {
        while self.next < self.made {
            self.next += 1;
            if let Some(p) = self.sched.p(self.next - 1) {
                return Some(p);
            }
        }
        None
    }
}

impl Sched {
    /// Starts a scheduler with `procs` Ps and its first threads.
    pub(crate) fn start(procs: usize, config: Config) -> io::Result<Arc<Sched>> {
        // In a library that was loaded at run time it has no fixed distance: prefetches are
        // harmless.
        let current = CURRENT.with(|current| std::ptr::from_ref(current).addr());
        let below_tp = arch::thread_pointer().addr().wrapping_sub(current);
        CURRENT_BELOW_TP.store(below_tp, Ordering::Relaxed);
        let poller = poller::Poller::take();
        let (started, started_at) = clock::now_on_both();
        let helper = helper::Helper::take();
        let sched = Arc::new(Sched {
            id: RuntimeId::new(),
            central: Lock::new(Central::new()),
            global_len: AtomicU32::new(0),
            idle: Idle::new(),
            ps: (0..MAX_PROCS).map(|_| AtomicPtr::default()).collect(),
            ps_made: AtomicU32::new(0),
            procs: AtomicU32::new(0),
            idle_poller_until: AtomicU64::new(NEVER),
            vacancy: Vacancy::new(),
            stopping: AtomicBool::new(false),
            ending: shutdown::ShutdownState::new(),
            next_id: AtomicU64::new(1),
            spawned_outside: AtomicU64::new(0),
            tasks: task::carrier::Tasks::new(),
            threads: AtomicU32::new(0),
            released: AtomicBool::new(false),
            next_m: AtomicU32::new(0),
            spares: AtomicU32::new(0),
            stopped_in_libc: AtomicU32::new(0),
            stopped_by_signal: AtomicU32::new(0),
            promised: AtomicU32::new(0),
            waiting_holders: AtomicU32::new(0),
            ms_without_p: AtomicU32::new(0),
            locked_goroutines: AtomicU32::new(0),
            follows_cpus: AtomicBool::new(config.follow_cpus),
            preemptions: AtomicU64::new(0),
            signals: AtomicU64::new(0),
            retakes: AtomicU64::new(0),
            sysmon: poller.sysmon(),
            helper,
            wait_check: wait::holder::WaitCheck::new(helper),
            poller,
            realtime: Realtime::of_this_thread(),
            threads_refused: AtomicBool::new(false),
            no_threads_reported: AtomicBool::new(false),
            config,
            simulation: config.simulation.map(|o| Box::new(simulation::Simulation::new(o))),
            started,
            started_at,
            coarse_ms: AtomicU32::new(0),
            record: record::Record::new(),
            triggers: trigger::Triggers::new(),
            usage: usage::Usage::new(),
            stopwatches: latency::Stopwatches::new(),
            time_without_p: latency::LatencyHistogram::new(),
        });
        sched.resize(procs)?;
        // The first thread must start. If a later one does not, the existing threads do the work.
        helper::start_thread(&sched, sched.central.lock())?;
        // A spare thread, before any goroutine runs (`monitor/helper.rs`).
        let _ = helper::start_thread(&sched, sched.central.lock());
        // The goroutines together own one reference. The last thread releases it
        // (`unregister_thread`), unless a goroutine is still alive: a goroutine that is never
        // resumed keeps its runtime's memory.
        std::mem::forget(sched.clone());
        if let Err(e) = helper::start(&sched).and_then(|()| sysmon::start(&sched)) {
            sched.begin_shutdown();
            return Err(e);
        }
        sched.helper.wake();
        Ok(sched)
    }

    /// Prints, once per runtime, that a thread was needed and could not be started. The work waits
    /// for the existing threads.
    #[cold]
    pub(crate) fn report_no_threads(&self, e: &io::Error) {
        if self.no_threads_reported.swap(true, Ordering::Relaxed) {
            return;
        }
        let report = |reason: fmt::Arguments<'_>| {
            let n = self.threads();
            crate::sys::stderr::write_stderr(format_args!(
                "trefoil: {reason}; goroutines wait until one of the {n} threads is free\n"
            ));
        };
        if Sched::is_thread_limit(e) {
            let max = self.config.max_threads;
            report(format_args!(
                "program exceeds {max}-thread limit (RuntimeBuilder::max_threads)"
            ));
        } else {
            report(format_args!("{e}"));
        }
    }

    /// Returns whether `e` is the error of [`Sched::register_thread`], and not one of the kernel.
    fn is_thread_limit(e: &io::Error) -> bool {
        let is_bare = e.get_ref().is_none() && e.raw_os_error().is_none();
        e.kind() == io::ErrorKind::QuotaExceeded && is_bare
    }

    /// Counts one more thread. Returns the id of its M. The caller holds the lock, or no other
    /// thread knows the runtime yet: while a thread is being started, the count must not reach
    /// zero.
    fn register_thread(&self) -> io::Result<u32> {
        // Not added and taken back: others would count one too many for a moment, and the last
        // thread would not see that it is the last.
        let one_more = |threads| (threads < self.config.max_threads).then_some(threads + 1);
        if self.threads.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).is_err() {
            // Without a text, which would be allocated under the lock. `report_no_threads` prints
            // it.
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        Ok(self.next_m.fetch_add(1, Ordering::Relaxed))
    }

    /// Counts one thread less: it has ended, or could not be started. The last thread of a runtime
    /// that stops releases the goroutines' reference if no goroutine is alive. The caller owns
    /// another reference.
    fn unregister_thread(&self) {
        // AcqRel: the last thread sees what the other threads did.
        let last = self.threads.fetch_sub(1, Ordering::AcqRel) == 1;
        if last {
            // Their threads end too if the runtime stops.
            self.sysmon.wake();
            self.helper.wake();
        }
        if last
            && self.stopping.load(Ordering::Acquire)
            && self.num_alive() == 0
            && !self.released.swap(true, Ordering::AcqRel)
        {
            // SAFETY: the reference that `start` forgot; `released` lets this happen once.
            unsafe { Arc::decrement_strong_count(std::ptr::from_ref(self)) };
        }
    }

    pub(crate) fn threads(&self) -> u32 {
        self.threads.load(Ordering::Relaxed)
    }

    pub(crate) fn procs(&self) -> u32 {
        self.procs.load(Ordering::Relaxed)
    }

    /// Returns the P with this id, if it was made.
    pub(crate) fn p(&self, id: u32) -> Option<&'static P> {
        // Acquire: pairs with the Release in `resize`.
        // SAFETY: Ps are freed with the Sched, and the caller keeps the Sched alive while it uses
        // the P.
        unsafe { self.ps.get(id as usize)?.load(Ordering::Acquire).as_ref() }
    }

    /// Returns how many Ps were made. A P with an id of `procs` or above is retired, or will be at
    /// its owner's next scheduling step.
    pub(crate) fn ps_made(&self) -> u32 {
        self.ps_made.load(Ordering::Acquire)
    }

    pub(crate) fn all_ps(&self) -> AllPs<'_> {
        AllPs { sched: self, next: 0, made: self.ps_made() }
    }

    /// Returns whether no goroutine runs or is runnable, and no timer, descriptor or signal handler
    /// will change that.
    pub(crate) fn is_asleep(&self) -> bool {
        self.idle.idle_ps() >= self.procs()
            && self.ms_without_p.load(Ordering::Relaxed) == 0
            && !self.has_global()
            && !self.poller.has_waiters()
            && self.next_timer() == NEVER
            && !signal_may_wake()
    }

    /// If [`is_asleep`](Sched::is_asleep): returns how many times the Ps have begun to run a
    /// goroutine. Two equal results show the deadlock check that no goroutine ran in between.
    pub(crate) fn runs_if_asleep(&self) -> Option<u64> {
        // Ps become idle, and are taken, only under the lock.
        let _no_changes = self.central.lock();
        let runs =
            |p: &P| u64::from(p.tick.load(Ordering::Relaxed)) + u64::from(p.runq.nexts_taken());
        self.is_asleep().then(|| self.all_ps().map(runs).sum())
    }

    /// Returns the id of this runtime, which no other runtime ever has.
    pub(crate) fn runtime_id(&self) -> RuntimeId {
        self.id
    }

    /// Returns what makes the numbers of goroutines differ between runtimes (`wait/holder.rs`).
    #[inline(always)]
    pub(crate) fn holder_salt(&self) -> u32 {
        (self.id.0 as u32).wrapping_mul(HOLDER_SALT_FACTOR)
    }

    /// Converts a time to std's form without reading the clock. The result is never later than `t`,
    /// and at most some tens of nanoseconds earlier.
    pub(crate) fn instant(&self, t: Nanos) -> Instant {
        if self.simulation.is_some() {
            // Both are simulated, and neither passes meanwhile.
            let (now, instant) = (clock::now(), Instant::now());
            let before = Duration::from_nanos(now.saturating_sub(t));
            return instant.checked_sub(before).unwrap_or(instant);
        }
        self.started + Duration::from_nanos(t.saturating_sub(self.started_at))
    }

    /// Returns whether it is a simulated runtime that stops or has ended.
    #[cfg(feature = "std")]
    pub(crate) fn is_ended_simulation(&self) -> bool {
        self.simulation.is_some() && self.stopping.load(Ordering::Relaxed)
    }

    /// Updates the coarse time.
    pub(crate) fn refresh_coarse(&self) {
        let millis = self.millis();
        // Every park reads it: its cache line stays with all CPUs as long as nothing changes.
        if self.coarse_ms.load(Ordering::Relaxed) != millis {
            self.coarse_ms.store(millis, Ordering::Relaxed);
        }
    }

    /// Returns for how many minutes a goroutine or task has waited.
    pub(crate) fn minutes_waited(&self, head: &runnable::RunHead) -> u32 {
        self.millis_waited(head) / 60_000
    }

    /// Returns for how many milliseconds a goroutine or task has waited, if it waits. The clock of
    /// its beginning is coarse.
    pub(crate) fn millis_waited(&self, head: &runnable::RunHead) -> u32 {
        Self::millis_waited_at(self.millis(), head)
    }

    /// Returns the time since the runtime started; in a simulation, since the run began.
    pub(crate) fn millis(&self) -> u32 {
        match &self.simulation {
            Some(simulation) => simulation.elapsed().as_millis() as u32,
            None => self.started.elapsed().as_millis() as u32,
        }
    }

    /// As [`Sched::millis_waited`], at a time that [`Sched::millis`] has returned.
    pub(crate) fn millis_waited_at(millis: u32, head: &runnable::RunHead) -> u32 {
        let since = head.waiting_since_ms.load(Ordering::Relaxed);
        let waited = millis.wrapping_sub(since);
        // The coarse clock of `since` may be a little ahead.
        if waited > u32::MAX / 2 { 0 } else { waited }
    }

    /// Reserves `n` goroutine ids. Returns the first.
    pub(crate) fn take_ids(&self, n: u64) -> u64 {
        self.next_id.fetch_add(n, Ordering::Relaxed)
    }

    /// Makes the id after `last` the next one, for another run of a simulation. Returns `last`.
    pub(crate) fn restart_ids_after(&self, last: u64) -> u64 {
        self.next_id.store(last + 1, Ordering::Relaxed);
        last
    }

    /// Returns how many goroutines and tasks of a run are alive, without the driver.
    pub(crate) fn num_alive_in_simulation(&self) -> u64 {
        (self.num_goroutines() + self.num_tasks()).saturating_sub(1)
    }

    /// Returns how many goroutines are alive, without the carriers of tasks.
    pub(crate) fn num_goroutines(&self) -> u64 {
        // The carriers are counted first: a carrier is started before it is counted.
        let carriers = self.tasks.carriers();
        self.num_goroutines_and_carriers().saturating_sub(u64::from(carriers))
    }

    /// Returns how many goroutines and tasks are alive. Each keeps the runtime's memory.
    pub(crate) fn num_alive(&self) -> u64 {
        self.num_goroutines_and_carriers() + self.num_tasks()
    }

    /// Returns how many goroutines are alive: started and not ended.
    fn num_goroutines_and_carriers(&self) -> u64 {
        // Ends are summed before starts, so a goroutine that starts and ends in between does not
        // make the difference negative. Acquire keeps the loads in this order.
        let ended: u64 = self.all_ps().map(|p| p.counters.ended.load(Ordering::Acquire)).sum();
        let spawned: u64 = self.all_ps().map(|p| p.counters.spawned.load(Ordering::Acquire)).sum();
        // `spawned_outside` may be below zero: a carrier that got no stack is subtracted there.
        spawned.wrapping_add(self.spawned_outside.load(Ordering::Acquire)).saturating_sub(ended)
    }
}

impl Drop for Sched {
    fn drop(&mut self) {
        self.poller.give_back();
        self.helper.give_back();
        self.record.give_back();
        self.triggers.give_back();
        for p in &mut self.ps {
            let p = *p.get_mut();
            if !p.is_null() {
                // SAFETY: made by Box in `resize`; no thread is left that could own the P or read
                // it.
                let p = unsafe { Box::from_raw(p) };
                // SAFETY: as above.
                unsafe { p.local() }.drain();
                p.ring.give_back();
            }
        }
    }
}

/// Returns whether a goroutine waits for a wake-up that a signal handler may make. Such a wait is
/// no deadlock.
fn signal_may_wake() -> bool {
    #[cfg(feature = "std")]
    return wait::deferred::SIGNAL_WAITS.load(Ordering::Relaxed) != 0;
    #[cfg(not(feature = "std"))]
    false
}

/// Returns the bounds of the stack of the goroutine that runs this code: its lowest address, and
/// the address above its highest. None on a plain thread.
pub(crate) fn current_stack_bounds() -> Option<(usize, usize)> {
    let g = current_g()?;
    let stack = g.stack.take()?;
    let bounds = stack.bounds();
    g.stack.set(Some(stack));
    Some(bounds)
}

/// Returns the FS base (thread pointer) of this thread's own context, if it is an M's thread.
pub(crate) fn thread_fs_base() -> Option<usize> {
    m::M::thread_fs_base()
}
