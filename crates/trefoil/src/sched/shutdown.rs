//! The end of a runtime: what becomes of the goroutines that are left.
//!
//! A goroutine that waits when its runtime ends is never resumed, and what it owns is leaked. But the process goes on,
//! and some locks belong to all of it: libc's (malloc's above all), those of std's standard output and error, the panic
//! hook's. With one of them lost, the next `free`, `println!` or `panic!` anywhere waits for ever. Therefore a goroutine
//! that holds such a lock is not left: it goes on until it holds none.
//!
//! | a goroutine that | is left | unless |
//! |---|---|---|
//! | waits in an interposed call | where it is | it holds a C lock or an output, or panics: then it goes on when it is woken; or it was woken for something of the whole process (a futex, a C lock): then it runs to its next runtime call |
//! | waits in a call of this crate | where it is | |
//! | runs, or is queued after a signal has stopped it | at its next runtime call, or by a signal after [`GRACE`] | it holds a C lock or an output, or panics |
//! | is blocked in the kernel, without a P | when its call has returned: as above | |
//!
//! What it holds is known in three ways: C locks are counted (`sys/lock.rs`), std says whether a goroutine panics, and
//! the owner of an output is found in std's lock (`sys/outputs.rs`). A goroutine that a signal stops may be anywhere, so
//! it gets [`GRACE`] first: at a runtime call it hardly ever holds a lock that nobody knows of.
//!
//! A runtime ends in three steps:
//!
//! | step | what happens |
//! |---|---|
//! | parting | two threads take std's outputs; goroutines run as ever, and those that hold an output give it back, also those that wait with it |
//! | stopping | goroutines are left, by the first table |
//! | stopped | threads leave |
//!
//! Each step has a limit: a goroutine may keep standard output for ever, and a loop around `memset` is always inside
//! libc, without a lock. If no goroutine is left there are no such steps.
//!
//! Not cared for: a lock of the program's own, or of std's that is none of the above, in the hands of a goroutine that
//! computes for longer than [`GRACE`] without a runtime call; a goroutine that is stopped in its own code which libc has
//! called, under the loader's lock say (`dl_iterate_phdr`).
//!
//! Invariants:
//! 1. Once the runtime is stopping, no goroutine is stopped inside a library and counted (`preempt.rs`): both are decided
//!    under the scheduler's lock.
//! 2. A thread leaves only after it has set `Ending::stopped`, under that lock, and only while no goroutine is counted that
//!    is to go on, or after the limit. From then on none is counted ([`Sched::promise_run`],
//!    [`Sched::count_waiting_holder`]): its waker passes it over, or it waits in the kernel.
//!
//! Rejected: one thread for both outputs (a goroutine that holds one and wants the other would wait for ever); the
//! helper thread (a P may need a thread meanwhile); waiting for the threads (the runtime may be dropped on one of its own
//! goroutines); unwinding the goroutines that are left (a destructor may wait for another of them; threads are not
//! unwound at exit either); stopping goroutines without a P only while the outputs are held (on a busy machine they are
//! signalled in that time, and run after it: they computed for ever).

use crate::sched::g::G;
use crate::sched::m::M;
#[cfg(feature = "std")]
use crate::sched::m::Rt;
use crate::sched::p::{P, PStatus, flag};
use crate::sched::queues::central::Central;
use crate::sched::switch::pop_local;
use crate::sched::{Sched, current_g};
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::parker::Parker;
use crate::sys::probe::cpu_time;
use crate::sys::raw::syscall;
use crate::sys::{lock, outputs, thread};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// How long the end of a runtime waits for another end, and for goroutines that run to stop: each time.
const PARTING: Nanos = 100_000_000;
/// How long it waits for std's outputs.
const OUTPUT_WAIT: Nanos = 1_000_000_000;
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// How long the threads stay for goroutines that are to go on: enough for a short section on a busy machine.
const DRAINING: Nanos = 10_000_000_000;
/// In a runtime that ends: CPU time that a goroutine may use to reach a runtime call before it is stopped by a signal.
const GRACE: Nanos = 2_000_000;
/// Stack of a thread that holds one of std's locks.
const HOLDER_STACK_BYTES: usize = 128 << 10;

/// A runtime's end.
pub(crate) struct Ending {
    /// When the threads leave all the same.
    until: AtomicU64,
    /// A thread has left, so no goroutine is resumed any more. Set under the lock.
    stopped: AtomicBool,
}

impl Ending {
    pub(crate) fn new() -> Ending {
        Ending { until: AtomicU64::new(0), stopped: AtomicBool::new(false) }
    }
}

/// Returns whether the running goroutine holds a lock of std's that the whole process needs: it panics, or holds an
/// output. Safe in a signal handler.
pub(crate) fn holds_lock_of_std() -> bool {
    // The hook runs under a lock, and prints a backtrace under another.
    std::thread::panicking() || outputs::is_held_here()
}

/// Returns whether the running goroutine holds a lock of C code, or one of those.
pub(crate) fn holds_lock() -> bool {
    lock::c_locks_held() != 0 || holds_lock_of_std()
}

/// One at a time: of two that want both outputs, each would get one.
static TURN: Mutex<()> = Mutex::new(());

/// Whether a thread waits for an output.
static WAITING: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];

/// Two threads that hold std's standard output and error, each one of them.
struct Outputs {
    /// How many have their lock, or had it; and how many of those have given it back.
    held: AtomicU32,
    back: AtomicU32,
    /// They are to give them back.
    over: AtomicBool,
    beds: [Parker; 2],
    /// Where the one who wants them held waits.
    bed: Parker,
}

impl Outputs {
    /// Waits for one's turn until `limit`: whoever has it may be a goroutine, left by its own runtime.
    fn turn(limit: Nanos) -> Option<MutexGuard<'static, ()>> {
        loop {
            match TURN.try_lock() {
                Err(TryLockError::WouldBlock) if now() < limit => std::thread::sleep(LOOK_AGAIN),
                Err(TryLockError::WouldBlock) => return None,
                Err(TryLockError::Poisoned(turn)) => return Some(turn.into_inner()),
                Ok(turn) => return Some(turn),
            }
        }
    }

    /// Waits until both are held, or `limit`.
    fn hold(with: fn(usize, &mut dyn FnMut()), limit: Nanos) -> Arc<Outputs> {
        let outputs = Arc::new(Outputs {
            held: AtomicU32::new(0),
            back: AtomicU32::new(0),
            over: AtomicBool::new(false),
            beds: [Parker::new(), Parker::new()],
            bed: Parker::new(),
        });
        for (which, waiting) in WAITING.iter().enumerate() {
            if waiting.swap(true, Ordering::Relaxed) {
                // Somebody has kept it since another runtime's end: one that waits is enough.
                return outputs;
            }
            let these = outputs.clone();
            let hold = move || these.hold_one(which, with);
            if thread::spawn(
                thread::Name::new(format_args!("trefoil-end")),
                HOLDER_STACK_BYTES,
                hold,
            )
            .is_err()
            {
                waiting.store(false, Ordering::Relaxed);
                return outputs;
            }
        }
        while !outputs.are_held() && now() < limit {
            outputs.bed.park_until(limit);
        }
        outputs
    }

    fn are_held(&self) -> bool {
        self.held.load(Ordering::Acquire) == 2
    }

    fn hold_one(&self, which: usize, with: fn(usize, &mut dyn FnMut())) {
        with(which, &mut || {
            outputs::learn(which);
            WAITING[which].store(false, Ordering::Relaxed);
            self.held.fetch_add(1, Ordering::Release);
            self.bed.unpark();
            // Whoever wants it held may be a goroutine that is left itself.
            let limit = now() + OUTPUT_WAIT + 2 * PARTING;
            while !self.over.load(Ordering::Acquire) && now() < limit {
                self.beds[which].park_until(limit);
            }
        });
        self.back.fetch_add(1, Ordering::Release);
        self.bed.unpark();
    }

    /// Gives back what is held, and waits for that: std writes what is buffered at exit only if it finds them free.
    fn give_back(&self) {
        self.over.store(true, Ordering::Release);
        self.beds.iter().for_each(Parker::unpark);
        while self.back.load(Ordering::Acquire) < self.held.load(Ordering::Acquire) {
            self.bed.park_until(NEVER);
        }
    }
}

/// Returns whether the running goroutine's runtime ends.
#[cfg(feature = "std")]
#[inline]
fn is_ending() -> bool {
    // SAFETY: a goroutine that runs keeps its runtime.
    let ends = |g: &'static G| unsafe { (*g.sched.get()).stopping.load(Ordering::Relaxed) };
    current_g().is_some_and(ends)
}

/// Returns whether the running goroutine, without a P, is to be left here: its wake-ups are made from outside the
/// runtime, so they do not stop it, and it may never wait.
#[cfg(feature = "std")]
pub(crate) fn is_to_be_left() -> bool {
    is_ending() && is_without_p() && !holds_lock()
}

/// Whether this code runs on a goroutine that has lost its P.
#[cfg(feature = "std")]
pub(crate) fn is_without_p() -> bool {
    use crate::sched::m::RETAKEN;
    // SAFETY: on a goroutine GS is an M, which is never freed.
    let m = current_g().and_then(|_| unsafe { crate::arch::inherited_m::<M>().as_ref() });
    m.is_some_and(|m| m.hold.load(Ordering::Relaxed) == RETAKEN)
}

/// A goroutine that holds a lock waits: while this lives it is counted, and goes on if its runtime ends.
#[cfg(feature = "std")]
pub(crate) struct WaitingHolder {
    /// Another one counts it.
    nested: bool,
}

#[cfg(feature = "std")]
impl WaitingHolder {
    /// On a goroutine that may park. Returns None if its runtime has ended: it would be left with its lock.
    pub(crate) fn new() -> Option<WaitingHolder> {
        let rt = Rt::enter()?;
        let counted = rt.sched().count_waiting_holder(rt.g());
        rt.leave_without_yield();
        match counted {
            Counted::Now => Some(WaitingHolder { nested: false }),
            Counted::Before => Some(WaitingHolder { nested: true }),
            Counted::TooLate => None,
        }
    }
}

#[cfg(feature = "std")]
impl Drop for WaitingHolder {
    fn drop(&mut self) {
        if !self.nested
            && let Some(g) = current_g()
        {
            // SAFETY: a goroutine that runs keeps its runtime.
            unsafe { &*g.sched.get() }.uncount_waiting_holder(g);
        }
    }
}

/// See [`Sched::count_waiting_holder`].
#[derive(PartialEq, Eq)]
pub(crate) enum Counted {
    Now,
    Before,
    /// The runtime has ended.
    TooLate,
}

/// Returns whether no goroutine of the running one's runtime is resumed any more.
#[cfg(feature = "std")]
#[cold]
pub(crate) fn has_runtime_ended() -> bool {
    // SAFETY: a goroutine that runs keeps its runtime.
    current_g().is_some_and(|g| unsafe { &*g.sched.get() }.is_stopped())
}

/// CPU time of `m`'s thread; time as such where a sandbox does not tell.
fn time_used_by(m: &M) -> Nanos {
    match cpu_time(m.tid.load(Ordering::Relaxed)) {
        0 => now(),
        used => used,
    }
}

impl G {
    /// In a runtime that ends, taken from a queue: whether it is resumed once more.
    fn goes_on_at_the_end(&self) -> bool {
        self.stopped_in_libc.get()
            || self.stopped_by_signal.get()
            || self.waits_as_holder.load(Ordering::Relaxed)
            || self.promised.load(Ordering::Relaxed)
    }
}

impl Sched {
    /// The runtime's handle is gone. Waits a moment for the first two steps, unless nobody is left, or it is one of
    /// those who are left that calls: then a thread does.
    pub(crate) fn part(self: &Arc<Sched>) {
        if self.num_goroutines() == 0 {
            self.stop();
            return;
        }
        let sched = self.clone();
        let end = move || {
            let _turn = Outputs::turn(now() + PARTING);
            sched.stop_quietly();
        };
        if current_g().is_none_or(|g| !std::ptr::eq(g.sched.get(), Arc::as_ptr(self))) {
            end();
        } else if thread::spawn(
            thread::Name::new(format_args!("trefoil-end")),
            HOLDER_STACK_BYTES,
            end,
        )
        .is_err()
        {
            self.stop();
        }
    }

    /// Stops the runtime while nobody holds an output, and waits a moment for the goroutines that run to stop.
    fn stop_quietly(&self) {
        let outputs = Outputs::hold(self.config.hooks.with_output, now() + OUTPUT_WAIT);
        let limit = now() + PARTING;
        self.stop();
        self.sysmon.wake();
        let runs = |p: &P| p.status() == PStatus::Running;
        // Without preemption nothing stops a goroutine that makes no call.
        let stops_all = self.config.async_preempt;
        while now() < limit
            && (self.all_ps().any(runs) || (stops_all && self.has_computing_m_without_p()))
        {
            self.sysmon.wake();
            std::thread::sleep(LOOK_AGAIN);
        }
        outputs.give_back();
    }

    /// Goroutines stop at their next scheduling step, and threads leave as soon as they may.
    pub(crate) fn stop(&self) {
        let mut central = self.central.lock();
        if self.stopping.load(Ordering::Relaxed) {
            return;
        }
        self.ending.until.store(now() + DRAINING, Ordering::Relaxed);
        // Release: a thread that sees it sees the time. SeqCst: see `promise_run`.
        self.stopping.store(true, Ordering::SeqCst);
        for p in self.all_ps() {
            p.flags.fetch_or(flag::STOP, Ordering::Relaxed);
        }
        // A P that waits for a thread would wait for ever.
        self.return_ps_wanting_m(&mut central);
        while let Some(m) = central.pop_any_m() {
            m.wake();
        }
        self.publish_spares(&central);
        drop(central);
        self.sysmon.wake();
        self.helper.call(0);
    }

    /// Returns whether the runtime ends, and no goroutine is to be resumed. Until a thread has left for that reason a waker
    /// may change it once more.
    pub(crate) fn is_stopped(&self) -> bool {
        let to_go_on =
            [&self.stopped_in_libc, &self.waiting_holders, &self.stopped_by_signal, &self.promised];
        self.stopping.load(Ordering::Acquire)
            && (self.ending.stopped.load(Ordering::Relaxed)
                || to_go_on.iter().all(|count| count.load(Ordering::SeqCst) == 0)
                || now() >= self.ending.until.load(Ordering::Relaxed))
    }

    /// Under the lock, by a thread that leaves if this is true: as [`is_stopped`](Sched::is_stopped), for ever.
    pub(crate) fn is_stopped_for_good(&self, _central: &mut Central) -> bool {
        let stopped = self.is_stopped();
        if stopped {
            self.ending.stopped.store(true, Ordering::Relaxed);
        }
        stopped
    }

    /// `g` waits for something of the whole process, and is about to be woken: it runs once more, even if its runtime ends
    /// before. Returns false if the runtime has ended already: it never runs again.
    #[cfg(feature = "std")]
    pub(crate) fn promise_run(&self, g: &G) -> bool {
        // SeqCst, with `stop`: a thread that leaves sees the promise, or we see that the runtime ends.
        g.promised.store(true, Ordering::Relaxed);
        self.promised.fetch_add(1, Ordering::SeqCst);
        if !self.stopping.load(Ordering::SeqCst) {
            return true;
        }
        let _deciding = self.central.lock();
        let too_late = self.ending.stopped.load(Ordering::Relaxed);
        if too_late {
            self.promised.fetch_sub(1, Ordering::Relaxed);
            g.promised.store(false, Ordering::Relaxed);
        }
        !too_late
    }

    /// The running goroutine has waited. Returns whether it was promised that it runs: then it must not be stopped before it
    /// is out of the runtime.
    #[cfg(feature = "std")]
    pub(crate) fn keep_promise(&self, g: &G) -> bool {
        let promised = g.promised.load(Ordering::Relaxed);
        if promised {
            g.promised.store(false, Ordering::Relaxed);
            self.promised.fetch_sub(1, Ordering::Relaxed);
        }
        promised
    }

    /// The running goroutine holds a lock, and is about to wait: counts it.
    pub(crate) fn count_waiting_holder(&self, g: &G) -> Counted {
        let _deciding = self.central.lock();
        if self.ending.stopped.load(Ordering::Relaxed) {
            return Counted::TooLate;
        }
        if g.waits_as_holder.swap(true, Ordering::Relaxed) {
            return Counted::Before;
        }
        self.waiting_holders.fetch_add(1, Ordering::Relaxed);
        Counted::Now
    }

    /// Its wait is over.
    pub(crate) fn uncount_waiting_holder(&self, g: &G) {
        if g.waits_as_holder.swap(false, Ordering::Relaxed) {
            self.waiting_holders.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether the goroutine, which waits, never runs again.
    pub(crate) fn has_abandoned(&self, g: &G) -> bool {
        self.stopping.load(Ordering::Relaxed)
            && (!g.waits_as_holder.load(Ordering::Relaxed) || self.is_stopped())
    }

    /// Returns whether the running goroutine holds a lock, and is not stopped at a runtime call for that reason.
    pub(crate) fn must_go_on(&self) -> bool {
        if !self.stopping.load(Ordering::Relaxed) {
            // An output is waited for when the runtime ends.
            return lock::c_locks_held() != 0 || std::thread::panicking();
        }
        (lock::c_locks_held() != 0 && self.may_take_its_time()) || self.must_not_be_left()
    }

    /// In a runtime that ends, in a signal handler too: returns whether the running goroutine holds a lock of std's. For a
    /// goroutine of which that is not known there is a limit.
    pub(crate) fn must_not_be_left(&self) -> bool {
        holds_lock_of_std() || (outputs::may_be_held_here() && self.may_take_its_time())
    }

    /// There is a limit for locks that a goroutine may hold for as long as it runs, or may not hold at all.
    fn may_take_its_time(&self) -> bool {
        now() < self.ending.until.load(Ordering::Relaxed)
    }

    /// On a goroutine without a P, in a runtime that ends: a P, with which it goes on until it holds no lock. None if it
    /// holds none, or there is no P within the limit.
    #[cold]
    pub(crate) fn p_for_holder(&self) -> Option<&'static P> {
        while holds_lock() && self.may_take_its_time() {
            let p = self.take_idle_p(&mut self.central.lock());
            if p.is_some() {
                return p;
            }
            // All of them run goroutines that are about to stop. Not std's sleep: it would enter the runtime again.
            let pause = libc::timespec { tv_sec: 0, tv_nsec: LOOK_AGAIN.as_nanos() as i64 };
            // SAFETY: reads a time of our own.
            unsafe { syscall(libc::SYS_nanosleep, [&raw const pause as usize, 0]) };
        }
        None
    }

    /// In a runtime that ends, in a signal handler: returns whether the goroutine that runs on `m` has used up its grace.
    /// The first call begins it, unless `take_last` has.
    pub(crate) fn grace_is_over(m: &M) -> bool {
        let used = time_used_by(m);
        if m.grace_until.get() == 0 {
            m.grace_until.set(used + GRACE);
        }
        used >= m.grace_until.get()
    }

    /// It was dropped, and all its threads have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.stopping.load(Ordering::Relaxed) && self.threads() == 0
    }

    /// While the runtime is stopping: the next goroutine that was stopped by a signal. The others are taken out of their
    /// queues on the way, and that is the last of them.
    pub(crate) fn take_last(&self, m: &M, p: &'static P) -> Option<&'static G> {
        if self.is_stopped() {
            return None;
        }
        let local = || pop_local(p);
        let global = || self.pop_expired().or_else(|| self.pop_global());
        let g = std::iter::from_fn(|| local().or_else(global)).find(|g| g.goes_on_at_the_end())?;
        p.begin_slice();
        m.grace_until.set(time_used_by(m) + GRACE);
        // It stops at its next call, or when its grace is over and sysmon finds it outside a library.
        p.ask_to_preempt(p.tick.load(Ordering::Relaxed), p.run_number());
        self.sysmon.wake();
        Some(g)
    }
}
