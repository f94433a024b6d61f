//! Shutdown of a runtime, and what becomes of the goroutines that are left.
//!
//! A goroutine that waits when its runtime ends is never resumed, and what it owns is leaked: it is
//! *orphaned*. But the process goes on, and some locks belong to all of it: libc's (above all
//! malloc's), those of std's standard output and error (the *outputs*), and the panic hook's. If an
//! orphaned goroutine held one of them, the next `free`, `println!` or `panic!` anywhere would wait
//! for ever. Therefore a goroutine that holds such a lock goes on until it holds none.
//!
//! | a goroutine that | is orphaned | unless |
//! |---|---|---|
//! | waits in an interposed call | where it is | (1), (2) |
//! | waits in a call of this crate | where it is | |
//! | runs | at its next runtime call, or by a signal after [`GRACE_NANOS`] | (1) |
//! | is queued after a signal has stopped it | as above | (1) |
//! | is blocked in the kernel, without a P | when its call has returned: as above | (1) |
//!
//! 1. It holds a C lock or an output, or panics. Then it goes on; if it waits, when it is woken.
//! 2. It was woken for something that the whole process shares (a futex, a C lock). Then it runs to
//!    its next runtime call.
//!
//! The runtime knows what a goroutine holds in three ways: C locks are counted (`sys/lock.rs`), std
//! says whether a goroutine panics, and the owner of an output is found in std's lock
//! (`sys/outputs.rs`). A goroutine that a signal stops may be anywhere, so it gets [`GRACE_NANOS`]
//! first: at a runtime call it hardly ever holds a lock that the runtime does not know of.
//!
//! # Protocol
//! 1. The runtime's handle is dropped: [`Sched::shut_down`]. If there are no goroutines or
//!    tasks, it continues with step 5 at once.
//! 2. Tasks are aborted, while everything else goes on ([`Sched::end_tasks`]): their destructors
//!    may need goroutines.
//! 3. Runtimes end one at a time ([`HeldOutputs::wait_for_turn`]).
//! 4. **Quiesce** ([`Sched::quiesce`]): two threads lock std's outputs. Goroutines run as before,
//!    and those that hold an output release it, also those that wait while they hold it.
//! 5. **Shutdown** ([`Sched::begin_shutdown`]): sets `stopping` and `flag::STOP` on every P, and
//!    wakes all Ms. From now on goroutines are orphaned by the table above.
//! 6. The caller waits until no goroutine runs ([`Sched::wait_until_none_runs`]), and releases the
//!    outputs ([`HeldOutputs::release`]).
//! 7. **Drain**: the Ms run the goroutines that must go on ([`Sched::next_to_drain`]), until there
//!    are none left, or until the limit ([`Sched::is_drained`]).
//! 8. Each M ends, after it has recorded that ([`Sched::commit_drained`]). After the last M, sysmon
//!    and the helper thread end ([`Sched::is_terminated`]).
//!
//! Each phase has a limit: a goroutine may hold standard output for ever, and a loop around
//! `memset` is always inside libc, without a lock.
//!
//! Not handled: a lock of the program, or one of std's that is not named above, held by a goroutine
//! that computes for longer than [`GRACE_NANOS`] without a runtime call; and a goroutine that is
//! stopped in a callback that libc has called, for example under the loader's lock
//! (`dl_iterate_phdr`).
//!
//! Invariants:
//! 1. Once `stopping` is set, no more goroutines are counted as stopped inside a library
//!    (`preempt.rs`): `stopping` is set, and checked before they are counted, under the scheduler's
//!    lock.
//! 2. An M ends only after it has set `ShutdownState::drained` under that lock, and only while no
//!    goroutine that must go on is counted, or after the limit. From then on no such goroutine is
//!    counted ([`Sched::promise_run`], [`Sched::count_waiting_holder`]): its waker passes it over,
//!    or it waits in the kernel, with its thread.
//!
//! Rejected: one thread for both outputs (a goroutine that holds one and wants the other would wait
//! for ever); the helper thread (a P may need it to start an M meanwhile); waiting for the Ms to
//! end (the runtime may be dropped on one of its own goroutines); unwinding orphaned goroutines (a
//! destructor may wait for another of them; threads are not unwound at exit either); stopping
//! goroutines without a P only while the outputs are held (on a busy machine the signal was sent in
//! that time, but their threads got a CPU only after it: they computed for ever).

use crate::sched::g::G;
use crate::sched::m::M;
#[cfg(feature = "std")]
use crate::sched::m::Rt;
use crate::sched::p::{P, PStatus, flag};
use crate::sched::queues::central::Central;
use crate::sched::runnable::Runnable;
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

/// How long a shutdown waits for that of another runtime, and for running goroutines to stop: each
/// time.
const STOP_WAIT_NANOS: Nanos = 100_000_000;
/// How long it waits for std's outputs.
const OUTPUT_WAIT_NANOS: Nanos = 1_000_000_000;
/// The pause between two checks of a condition that no wake-up reports.
const RECHECK_INTERVAL: Duration = Duration::from_micros(50);
/// After how many pauses the end of the tasks looks for tasks that have begun meanwhile.
const ROUNDS_PER_SCAN: u32 = 100;
/// `end_tasks` gives up only after this many pauses in a row without a change.
const UNCHANGED_ROUNDS: u32 = 500;
/// For how long `end_tasks` also goes on because new tasks begin.
const NEW_TASKS_LIMIT_NANOS: Nanos = 10_000_000_000;
/// How long the Ms stay for goroutines that must go on: enough for a short critical section on a
/// busy machine.
const DRAIN_LIMIT_NANOS: Nanos = 10_000_000_000;
/// CPU time that a goroutine may use to reach a runtime call before a signal stops it for ever.
const GRACE_NANOS: Nanos = 2_000_000;
/// Stack of a thread of [`spawn_shutdown_thread`].
const SHUTDOWN_STACK_BYTES: usize = 128 << 10;

/// The state of a runtime's shutdown.
pub(crate) struct ShutdownState {
    /// When the Ms end, even if goroutines must go on.
    drain_until: AtomicU64,
    /// An M has ended, so no goroutine is resumed any more. Set under the scheduler's lock.
    drained: AtomicBool,
}

impl ShutdownState {
    pub(crate) fn new() -> ShutdownState {
        ShutdownState { drain_until: AtomicU64::new(0), drained: AtomicBool::new(false) }
    }
}

/// Returns whether the running goroutine holds a lock of std that the whole process needs: it
/// panics, or holds an output. Async-signal-safe.
pub(crate) fn holds_lock_of_std() -> bool {
    // The panic hook runs under a lock, and prints a backtrace under another.
    std::thread::panicking() || outputs::is_held_here()
}

/// Returns whether the running goroutine holds a lock of C code, or one of std that the whole
/// process needs.
pub(crate) fn holds_lock() -> bool {
    lock::c_locks_held() != 0 || holds_lock_of_std()
}

/// Held while a runtime holds the outputs: if two runtimes locked them, each could get one.
static TURN: Mutex<()> = Mutex::new(());

/// True while a thread waits for the output.
static HAS_WAITER: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];

/// Two threads that hold std's standard output and standard error, one each.
struct HeldOutputs {
    /// The number of threads that have locked their output, whether or not they have released it.
    locked: AtomicU32,
    /// The number of threads that have released their output.
    released: AtomicU32,
    /// The threads must release their outputs.
    release: AtomicBool,
    /// Where each of the two threads waits.
    holders: [Parker; 2],
    /// Where the thread that shuts the runtime down waits.
    owner: Parker,
}

impl HeldOutputs {
    /// Waits for the turn of this runtime until `limit`. Without a limit it could wait for ever:
    /// the thread that has the turn may be a goroutine that was orphaned by its own runtime.
    fn wait_for_turn(limit: Nanos) -> Option<MutexGuard<'static, ()>> {
        loop {
            match TURN.try_lock() {
                Err(TryLockError::WouldBlock) if now() < limit => {
                    std::thread::sleep(RECHECK_INTERVAL);
                }
                Err(TryLockError::WouldBlock) => return None,
                Err(TryLockError::Poisoned(turn)) => return Some(turn.into_inner()),
                Ok(turn) => return Some(turn),
            }
        }
    }

    /// Locks both outputs, each on a thread of its own with `with_output`. Waits until both are
    /// locked, or until `limit`.
    fn lock(with_output: fn(usize, &mut dyn FnMut()), limit: Nanos) -> Arc<HeldOutputs> {
        let outputs = Arc::new(HeldOutputs {
            locked: AtomicU32::new(0),
            released: AtomicU32::new(0),
            release: AtomicBool::new(false),
            holders: [Parker::new(), Parker::new()],
            owner: Parker::new(),
        });
        for (which, has_waiter) in HAS_WAITER.iter().enumerate() {
            if has_waiter.swap(true, Ordering::Relaxed) {
                // A goroutine has held the output since another runtime's shutdown, whose thread
                // still waits for it. One waiting thread is enough.
                return outputs;
            }
            let shared = outputs.clone();
            if spawn_shutdown_thread(move || shared.hold(which, with_output)).is_err() {
                has_waiter.store(false, Ordering::Relaxed);
                return outputs;
            }
        }
        while !outputs.are_locked() && now() < limit {
            outputs.owner.park_until(limit);
        }
        outputs
    }

    fn are_locked(&self) -> bool {
        // Acquire: pairs with the Release in `hold`. The caller sees what `find_owner_word` found.
        self.locked.load(Ordering::Acquire) == 2
    }

    /// Holds the output `which` until it is to be released. Runs on a thread of its own.
    fn hold(&self, which: usize, with_output: fn(usize, &mut dyn FnMut())) {
        with_output(which, &mut || {
            outputs::find_owner_word(which);
            HAS_WAITER[which].store(false, Ordering::Relaxed);
            self.locked.fetch_add(1, Ordering::Release);
            self.owner.unpark();
            // The owner may be a goroutine that is orphaned itself: do not wait for ever.
            let limit = now() + OUTPUT_WAIT_NANOS + 2 * STOP_WAIT_NANOS;
            // Acquire: pairs with the Release in `release`.
            while !self.release.load(Ordering::Acquire) && now() < limit {
                self.holders[which].park_until(limit);
            }
        });
        self.released.fetch_add(1, Ordering::Release);
        self.owner.unpark();
    }

    /// Releases the outputs, and waits until that is done: at exit, std writes buffered output only
    /// if it finds the locks free.
    fn release(&self) {
        self.release.store(true, Ordering::Release);
        self.holders.iter().for_each(Parker::unpark);
        // Acquire: pairs with the Release in `hold`.
        while self.released.load(Ordering::Acquire) < self.locked.load(Ordering::Acquire) {
            self.owner.park_until(NEVER);
        }
    }
}

/// Starts a thread that takes part in a shutdown.
fn spawn_shutdown_thread(f: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    thread::spawn(thread::Name::new(format_args!("trefoil-end")), SHUTDOWN_STACK_BYTES, f)
}

/// Returns whether the running goroutine's runtime shuts down.
#[cfg(feature = "std")]
#[inline]
fn is_stopping() -> bool {
    // SAFETY: a goroutine that runs keeps its runtime.
    let stopping = |g: &'static G| unsafe { (*g.sched.get()).stopping.load(Ordering::Relaxed) };
    current_g().is_some_and(stopping)
}

/// Returns whether the running goroutine, which has no P, is to be orphaned here. Its wake-ups are
/// made from outside the runtime, so they do not stop it, and it may never wait.
#[cfg(feature = "std")]
pub(crate) fn is_to_be_orphaned() -> bool {
    is_stopping() && is_without_p() && !holds_lock()
}

/// Returns whether this code runs on a goroutine that has lost its P.
#[cfg(feature = "std")]
pub(crate) fn is_without_p() -> bool {
    use crate::sched::m::RETAKEN;
    // SAFETY: on a goroutine GS is an M, which is never freed.
    let m = current_g().and_then(|_| unsafe { crate::arch::inherited_m::<M>().as_ref() });
    m.is_some_and(|m| m.hold.load(Ordering::Relaxed) == RETAKEN)
}

/// Marks the running goroutine, which holds a lock of the whole process, as waiting. While it is
/// marked, it goes on if its runtime shuts down.
#[cfg(feature = "std")]
pub(crate) struct WaitingHolder {
    /// An outer `WaitingHolder` counts the goroutine already.
    nested: bool,
}

#[cfg(feature = "std")]
impl WaitingHolder {
    /// Counts the running goroutine, which may park. Returns None if its runtime is drained: then
    /// the goroutine would be orphaned while it holds its lock.
    pub(crate) fn new() -> Option<WaitingHolder> {
        let rt = Rt::enter()?;
        let counted = rt.sched().count_waiting_holder(rt.g());
        rt.leave_without_yield();
        match counted {
            HolderCount::Counted => Some(WaitingHolder { nested: false }),
            HolderCount::AlreadyCounted => Some(WaitingHolder { nested: true }),
            HolderCount::Drained => None,
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

/// The result of [`Sched::count_waiting_holder`].
#[derive(PartialEq, Eq)]
pub(crate) enum HolderCount {
    Counted,
    AlreadyCounted,
    /// The runtime is drained.
    Drained,
}

/// Returns whether the running goroutine's runtime resumes no goroutine any more.
#[cfg(feature = "std")]
#[cold]
pub(crate) fn is_runtime_drained() -> bool {
    // SAFETY: a goroutine that runs keeps its runtime.
    current_g().is_some_and(|g| unsafe { &*g.sched.get() }.is_drained())
}

/// Returns the CPU time that `m`'s thread has used, or the present time if a sandbox does not allow
/// to ask. Only differences of two results mean anything.
fn time_used_by(m: &M) -> Nanos {
    match cpu_time(m.tid.load(Ordering::Relaxed)) {
        0 => now(),
        used => used,
    }
}

impl G {
    /// Returns whether the goroutine, taken from a queue of a runtime that shuts down, must go on.
    pub(crate) fn must_be_drained(&self) -> bool {
        self.stopped_in_libc.get()
            || self.stopped_by_signal.get()
            || self.waits_as_holder.load(Ordering::Relaxed)
            || self.promised.load(Ordering::Relaxed)
    }
}

/// The phases, in their order.
impl Sched {
    /// Ends the runtime, because its handle was dropped. Waits until no goroutine runs, or until
    /// the limits. Does not wait if there are no goroutines, or if the caller is one of them: then
    /// a new thread waits.
    pub(crate) fn shut_down(self: &Arc<Sched>) {
        if self.num_alive() == 0 {
            self.begin_shutdown();
            return;
        }
        let sched = self.clone();
        let end = move || sched.shut_down_in_phases();
        let is_own_goroutine =
            current_g().is_some_and(|g| std::ptr::eq(g.sched.get(), Arc::as_ptr(self)));
        if !is_own_goroutine {
            end();
        } else if spawn_shutdown_thread(end).is_err() {
            self.begin_shutdown();
        }
    }

    /// Quiesces the runtime and shuts it down. The Ms drain it by themselves.
    fn shut_down_in_phases(&self) {
        self.end_tasks();
        let _turn = HeldOutputs::wait_for_turn(now() + STOP_WAIT_NANOS);
        let outputs = self.quiesce();
        let limit = now() + STOP_WAIT_NANOS;
        self.begin_shutdown();
        self.wait_until_none_runs(limit);
        outputs.release();
    }

    /// Aborts all tasks. Waits until their futures are dropped and their carriers have ended, for
    /// as long as their number falls; for [`NEW_TASKS_LIMIT_NANOS`] also while it changes
    /// otherwise, because a task may spawn others until it is aborted. A task whose poll blocks is
    /// left.
    fn end_tasks(&self) {
        self.close_tasks();
        let may_begin_until = now() + NEW_TASKS_LIMIT_NANOS;
        let (mut fewest, mut left) = (u64::MAX, u64::MAX);
        let (mut limit, mut unchanged_rounds) = (0, 0);
        for round in 1.. {
            self.end_shelved_carriers();
            if round % ROUNDS_PER_SCAN == 0 {
                self.cancel_all_tasks();
            }
            let now_left = self.num_tasks() + u64::from(self.tasks.carriers());
            if now_left < fewest || (now_left != left && now() < may_begin_until) {
                (limit, unchanged_rounds) = (now() + STOP_WAIT_NANOS, 0);
            }
            (fewest, left) = (fewest.min(now_left), now_left);
            unchanged_rounds += 1;
            // The rounds count, too: on a busy machine the time may pass while no M has run.
            if left == 0 || (now() >= limit && unchanged_rounds >= UNCHANGED_ROUNDS) {
                return;
            }
            std::thread::sleep(RECHECK_INTERVAL);
        }
    }

    /// Locks std's outputs: waits until no goroutine holds one of them, or until the limit.
    fn quiesce(&self) -> Arc<HeldOutputs> {
        HeldOutputs::lock(self.config.hooks.with_output, now() + OUTPUT_WAIT_NANOS)
    }

    /// Makes goroutines stop at their next scheduling step, and Ms end when the runtime is drained.
    pub(crate) fn begin_shutdown(&self) {
        let mut central = self.central.lock();
        if self.stopping.load(Ordering::Relaxed) {
            return;
        }
        self.ending.drain_until.store(now() + DRAIN_LIMIT_NANOS, Ordering::Relaxed);
        // Release: a thread that sees it sees `drain_until`. SeqCst: see `promise_run`.
        self.stopping.store(true, Ordering::SeqCst);
        for p in self.all_ps() {
            p.flags.fetch_or(flag::STOP, Ordering::Relaxed);
        }
        // A P that wants an M would wait for ever.
        self.return_ps_wanting_m(&mut central, 0);
        while let Some(m) = central.pop_any_m() {
            m.wake();
        }
        self.publish_spares(&central);
        drop(central);
        self.sysmon.wake();
        self.helper.wake();
    }

    /// Waits until no goroutine runs, or until `limit`. sysmon preempts those that do.
    fn wait_until_none_runs(&self, limit: Nanos) {
        self.sysmon.wake();
        let runs = |p: &P| p.status() == PStatus::Running;
        // Without preemption by signals, nothing stops a goroutine that makes no runtime call.
        let stops_all = self.config.async_preempt;
        while now() < limit
            && (self.all_ps().any(runs) || (stops_all && self.has_computing_m_without_p()))
        {
            self.sysmon.wake();
            std::thread::sleep(RECHECK_INTERVAL);
        }
    }

    /// Returns, while the runtime is stopping, the next goroutine that must go on. The others in
    /// the queues before it are taken out, and are orphaned.
    pub(crate) fn next_to_drain(&self, m: &M, p: &'static P) -> Option<Runnable> {
        if self.is_drained() {
            return None;
        }
        let local = || pop_local(p);
        let global = || self.pop_expired().or_else(|| self.pop_global());
        let g = std::iter::from_fn(|| local().or_else(global))
            .find(|item| item.goroutine().is_some_and(G::must_be_drained))?;
        self.begin_slice(p);
        m.grace_until.set(time_used_by(m) + GRACE_NANOS);
        self.sysmon.wake();
        Some(g)
    }

    /// A goroutine from a queue is about to run on `p`. In a shutdown it is asked to stop: it does
    /// so at its next runtime call, or by sysmon's signal when its grace is over and it is outside
    /// of a library.
    pub(crate) fn begin_slice(&self, p: &P) {
        p.begin_slice();
        if self.stopping.load(Ordering::Relaxed) {
            p.ask_to_preempt(p.tick.load(Ordering::Relaxed), p.run_number());
        }
    }

    /// Returns whether the runtime shuts down and no goroutine must go on. Until an M has ended for
    /// that reason ([`Sched::commit_drained`]), a waker may make it false again.
    pub(crate) fn is_drained(&self) -> bool {
        let to_drain =
            [&self.stopped_in_libc, &self.waiting_holders, &self.stopped_by_signal, &self.promised];
        // Acquire: pairs with `begin_shutdown`. SeqCst: pairs with `promise_run`.
        self.stopping.load(Ordering::Acquire)
            && (self.ending.drained.load(Ordering::Relaxed)
                || to_drain.iter().all(|count| count.load(Ordering::SeqCst) == 0)
                || !self.is_before_drain_limit())
    }

    /// As [`Sched::is_drained`], under the lock, for an M that ends if this returns true: then it
    /// is true for ever.
    pub(crate) fn commit_drained(&self, _central: &mut Central) -> bool {
        let drained = self.is_drained();
        if drained {
            self.ending.drained.store(true, Ordering::Relaxed);
        }
        drained
    }

    /// Returns whether the runtime has shut down and all its Ms have ended.
    pub(crate) fn is_terminated(&self) -> bool {
        self.stopping.load(Ordering::Relaxed) && self.threads() == 0
    }

    /// Returns whether the limit of the drain is not reached. Until then a goroutine goes on that
    /// may hold its lock for as long as it runs, or of which the runtime does not know whether it
    /// holds one.
    fn is_before_drain_limit(&self) -> bool {
        now() < self.ending.drain_until.load(Ordering::Relaxed)
    }
}

/// Goroutines that must go on.
impl Sched {
    /// Promises `g`, which waits for something that the whole process shares and is about to be
    /// woken, that it runs once more, even if its runtime shuts down before. Returns false if the
    /// runtime is drained: then `g` never runs again.
    #[cfg(feature = "std")]
    pub(crate) fn promise_run(&self, g: &G) -> bool {
        // SeqCst, with `begin_shutdown`: either an M that ends sees the promise, or this thread
        // sees that the runtime is stopping.
        g.promised.store(true, Ordering::Relaxed);
        self.promised.fetch_add(1, Ordering::SeqCst);
        if !self.stopping.load(Ordering::SeqCst) {
            return true;
        }
        let _deciding = self.central.lock();
        let drained = self.ending.drained.load(Ordering::Relaxed);
        if drained {
            self.promised.fetch_sub(1, Ordering::Relaxed);
            g.promised.store(false, Ordering::Relaxed);
        }
        !drained
    }

    /// Clears the promise to the running goroutine, whose wait is over. Returns whether there was
    /// one: then the goroutine must not be stopped before it has left the runtime.
    #[cfg(feature = "std")]
    pub(crate) fn keep_promise(&self, g: &G) -> bool {
        let promised = g.promised.load(Ordering::Relaxed);
        if promised {
            g.promised.store(false, Ordering::Relaxed);
            self.promised.fetch_sub(1, Ordering::Relaxed);
        }
        promised
    }

    /// Counts the running goroutine, which holds a lock and is about to wait.
    pub(crate) fn count_waiting_holder(&self, g: &G) -> HolderCount {
        let _deciding = self.central.lock();
        if self.ending.drained.load(Ordering::Relaxed) {
            return HolderCount::Drained;
        }
        if g.waits_as_holder.swap(true, Ordering::Relaxed) {
            return HolderCount::AlreadyCounted;
        }
        self.waiting_holders.fetch_add(1, Ordering::Relaxed);
        HolderCount::Counted
    }

    /// Undoes [`Sched::count_waiting_holder`] after the wait.
    pub(crate) fn uncount_waiting_holder(&self, g: &G) {
        if g.waits_as_holder.swap(false, Ordering::Relaxed) {
            self.waiting_holders.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns whether `g`, which waits, never runs again.
    pub(crate) fn has_orphaned(&self, g: &G) -> bool {
        self.stopping.load(Ordering::Relaxed)
            && (!g.waits_as_holder.load(Ordering::Relaxed) || self.is_drained())
    }

    /// Returns whether the running goroutine must not be stopped at a runtime call, or for ever,
    /// because it holds a lock. Async-signal-safe.
    pub(crate) fn must_go_on(&self) -> bool {
        if !self.stopping.load(Ordering::Relaxed) {
            // A goroutine may stop while it holds an output: the quiesce phase waits for it.
            return lock::c_locks_held() != 0 || std::thread::panicking();
        }
        (lock::c_locks_held() != 0 && self.is_before_drain_limit()) || self.must_not_be_orphaned()
    }

    /// Returns whether the running goroutine, in a runtime that shuts down, holds a lock of std. If
    /// that is unknown, it returns true until the limit of the drain. Async-signal-safe.
    pub(crate) fn must_not_be_orphaned(&self) -> bool {
        holds_lock_of_std() || (outputs::may_be_held_here() && self.is_before_drain_limit())
    }

    /// Returns a P for the running goroutine, which has none, in a runtime that shuts down: with it
    /// the goroutine goes on until it holds no lock. Returns None if it holds none, or if no P
    /// becomes idle before the limit of the drain.
    #[cold]
    pub(crate) fn p_for_lock_holder(&self) -> Option<&'static P> {
        while holds_lock() && self.is_before_drain_limit() {
            let p = self.take_idle_p(&mut self.central.lock());
            if p.is_some() {
                return p;
            }
            // All Ps run goroutines that are about to stop. std's sleep would enter the runtime
            // again.
            let pause = libc::timespec { tv_sec: 0, tv_nsec: RECHECK_INTERVAL.as_nanos() as i64 };
            // SAFETY: the kernel reads `pause` only.
            unsafe { syscall(libc::SYS_nanosleep, [&raw const pause as usize, 0]) };
        }
        None
    }

    /// Returns whether the goroutine that runs on `m`, in a runtime that shuts down, has used up
    /// its grace. The first call begins the grace, unless `next_to_drain` has. Async-signal-safe.
    pub(crate) fn grace_is_over(m: &M) -> bool {
        let used = time_used_by(m);
        if m.grace_until.get() == 0 {
            m.grace_until.set(used + GRACE_NANOS);
        }
        used >= m.grace_until.get()
    }
}
