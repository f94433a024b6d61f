//! The end of a runtime: what becomes of the goroutines that are left.
//!
//! They are never resumed, and what they own is leaked. But the process goes on, and two kinds of locks belong to all
//! of it: those inside libc (malloc's above all), which a goroutine may hold that was stopped by a signal
//! (`preempt.rs`, 6); and those of std's standard output and error. With one of them lost, the next `free` or
//! `println!` anywhere waits for ever. So a runtime ends in three steps:
//!
//! | step | what happens |
//! |---|---|
//! | parting | two threads take std's locks; goroutines run as ever, and those who have the locks give them back |
//! | stopping | goroutines that run leave at their next runtime call; of those that are queued only the ones are resumed that a signal has stopped, until their next runtime call or for [`GRACE`] |
//! | stopped | threads leave; std's locks are free again |
//!
//! A goroutine that a signal stops may be anywhere: in an allocator that knows nothing of us, in the panic hook, in any
//! section that holds a lock of the whole process. At a runtime call it is hardly ever in one. So in a runtime that ends
//! a goroutine is stopped by a signal only after it had [`GRACE`] to reach a runtime call.
//!
//! A goroutine that holds a lock of C code (an allocator's, say) is not stopped at a runtime call, also while the runtime
//! lives. One that waits for a second such lock, or for a P, is counted, and goes on when the runtime ends, until it holds
//! none.
//!
//! Each step has a limit: somebody may keep standard output for ever, and a loop around `memset` is always inside
//! libc, without a lock. If no goroutine is left there are no such steps.
//!
//! A stray (`handoff.rs`) that computes is stopped while std's locks are held, like those who run. One that is blocked in
//! the kernel is *forsaken*: when its call returns it goes on as a plain thread, whose waits are the kernel's, until it
//! calls the runtime. It may print meanwhile, so it is stopped only while std's locks are held: the aide takes them again,
//! now and then, as long as there are forsaken ones that compute.
//!
//! Not cared for: a goroutine that is stopped in its own code which libc has called, under the loader's lock say
//! (`dl_iterate_phdr`).
//!
//! Invariants:
//! 1. Once the runtime is stopping, nobody stops inside a library and is counted (`preempt.rs`): both are decided under
//!    the scheduler's lock.
//! 2. So `is_stopped` never becomes false again. It is asked under that lock by those who rely on it: threads that
//!    leave, and those who would hand them something.
//!
//! Rejected: one thread for both of std's locks (whoever holds one and wants the other would wait for ever); the
//! aide (somebody may need a thread meanwhile); waiting for the threads (the runtime may be dropped on one of its own
//! goroutines); unwinding the goroutines that are left (a destructor may wait for another of them; threads are not
//! unwound at exit either).

use super::g::G;
use super::m::M;
use super::p::{P, PStatus, flag};
use super::switch::pop_local;
use super::{Sched, current_g};
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::parker::Parker;
use crate::sys::{lock, thread};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

/// How long whoever drops a runtime waits for others that do, for std's locks to be free, and for those who run to
/// stop: each time.
const PARTING: Nanos = 100_000_000;
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// How long goroutines that were stopped inside a library may take to come out.
const DRAINING: Nanos = 1_000_000_000;
/// In a runtime that ends: how long a goroutine may take to reach a runtime call before it is stopped by a signal.
const GRACE: Nanos = 2_000_000;
/// How long goroutines that a signal has stopped may take, all together, to reach a runtime call or to use up their grace.
const GRACE_FOR_ALL: Nanos = 50_000_000;
/// Stack of a thread that holds one of std's locks.
const HOLDER_STACK_BYTES: usize = 128 << 10;

/// A runtime's end.
pub(crate) struct Ending {
    /// Until when strays that compute are stopped: while std's locks are held.
    parting: AtomicU64,
    /// When the threads leave all the same.
    until: AtomicU64,
    /// When goroutines that run, and those that a signal has stopped, have used up their grace.
    grace_until: AtomicU64,
    grace_for_all_until: AtomicU64,
}

impl Ending {
    pub(crate) fn new() -> Ending {
        Ending {
            parting: AtomicU64::new(0),
            until: AtomicU64::new(0),
            grace_until: AtomicU64::new(0),
            grace_for_all_until: AtomicU64::new(0),
        }
    }
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
            WAITING[which].store(false, Ordering::Relaxed);
            self.held.fetch_add(1, Ordering::Release);
            self.bed.unpark();
            // Whoever wants it held may be a goroutine that is left itself.
            let limit = now() + 4 * PARTING;
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

/// Whether the running goroutine was left behind in a call that blocked. See the head of the file.
#[cfg(feature = "std")]
#[inline]
pub(crate) fn is_forsaken() -> bool {
    // SAFETY: a goroutine that runs keeps its runtime.
    let ends = |g: &'static G| unsafe { (*g.sched.get()).stopping.load(Ordering::Relaxed) };
    current_g().is_some_and(ends) && is_astray()
}

/// Whether this code runs on a goroutine that has lost its P.
#[cfg(feature = "std")]
pub(crate) fn is_astray() -> bool {
    use super::m::LOST;
    // SAFETY: on a goroutine GS is an M, which is never freed.
    let m = current_g().and_then(|_| unsafe { crate::arch::inherited_m::<M>().as_ref() });
    m.is_some_and(|m| m.hold.load(Ordering::Relaxed) == LOST)
}

impl G {
    /// In a runtime that ends, taken from a queue: whether it is resumed once more.
    fn goes_on_at_the_end(&self) -> bool {
        self.inside.get()
            || self.stopped_by_signal.get()
            || self.waits_as_holder.load(Ordering::Relaxed)
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

    /// The aide of a runtime that has ended: stops forsaken ones that compute; another time if somebody else is at it.
    pub(super) fn stop_forsaken(&self) {
        if self.has_busy_strays(now())
            && let Some(_one) = Outputs::turn(0)
        {
            self.stop_quietly();
        }
    }

    /// Stops the runtime, or the strays of one that has ended, while nobody has std's locks.
    fn stop_quietly(&self) {
        let outputs = Outputs::hold(self.config.hooks.with_output, now() + PARTING);
        let limit = now() + PARTING;
        // Without preemption nobody comes back from a call that he does not make.
        let both = outputs.are_held() && self.config.async_preempt;
        if both {
            self.ending.parting.store(limit, Ordering::Relaxed);
        }
        self.stop();
        self.sysmon.wake();
        let runs = |p: &P| p.status() == PStatus::Running;
        while now() < limit && (self.all_ps().any(runs) || (both && self.has_busy_strays(limit))) {
            self.sysmon.wake();
            std::thread::sleep(LOOK_AGAIN);
        }
        self.ending.parting.store(0, Ordering::Relaxed);
        outputs.give_back();
    }

    /// Until when strays that compute are to be stopped, because nobody can have one of std's locks; if it is so now.
    pub(super) fn parting(&self) -> Option<Nanos> {
        // Relaxed: who takes one of the locks afterwards sees that it is over, because it was before they were given back.
        let until = self.ending.parting.load(Ordering::Relaxed);
        (now() < until).then_some(until)
    }

    /// Goroutines stop at their next scheduling step, and threads leave as soon as they may.
    pub(crate) fn stop(&self) {
        let mut central = self.central.lock();
        if self.stopping.load(Ordering::Relaxed) {
            return;
        }
        let ending = &self.ending;
        ending.until.store(now() + DRAINING, Ordering::Relaxed);
        ending.grace_until.store(now() + GRACE, Ordering::Relaxed);
        ending.grace_for_all_until.store(now() + GRACE_FOR_ALL, Ordering::Relaxed);
        // Release: who sees it sees the time.
        self.stopping.store(true, Ordering::Release);
        for p in self.all_ps() {
            p.flags.fetch_or(flag::STOP, Ordering::Relaxed);
        }
        // A P that waits for a thread would wait for ever.
        self.adopt_none(&mut central);
        while let Some(m) = central.pop_any_m() {
            m.rouse();
        }
        self.publish_spares(&central);
        drop(central);
        self.sysmon.wake();
        self.aide.call(0);
    }

    /// It is stopping, and nobody is resumed any more.
    pub(crate) fn is_stopped(&self) -> bool {
        let over = |left: &AtomicU32, until: &AtomicU64| {
            left.load(Ordering::Relaxed) == 0 || now() >= until.load(Ordering::Relaxed)
        };
        self.stopping.load(Ordering::Acquire)
            && over(&self.inside, &self.ending.until)
            && over(&self.waiting_holders, &self.ending.until)
            && over(&self.stopped_by_signal, &self.ending.grace_for_all_until)
    }

    /// The running goroutine is about to wait, for another lock of C code than it holds, or for a P: counts it, unless it
    /// is counted already or the runtime has ended. Returns whether it did.
    pub(crate) fn count_waiting_holder(&self, g: &G) -> bool {
        let _deciding = self.central.lock();
        let counts = !self.is_stopped() && !g.waits_as_holder.swap(true, Ordering::Relaxed);
        if counts {
            self.waiting_holders.fetch_add(1, Ordering::Relaxed);
        }
        counts
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

    /// Whether the running goroutine holds a lock of C code, and is not stopped at a runtime call for that reason. In a
    /// runtime that ends there is a limit.
    pub(super) fn must_go_on(&self) -> bool {
        lock::c_locks_held() != 0
            && (!self.stopping.load(Ordering::Relaxed)
                || now() < self.ending.until.load(Ordering::Relaxed))
    }

    /// In a runtime that ends, in a signal handler: whether the goroutine that runs on `m` may be stopped by a signal.
    pub(super) fn grace_is_over(&self, m: &M) -> bool {
        now() >= m.grace_until.get().max(self.ending.grace_until.load(Ordering::Relaxed))
    }

    /// It was dropped, and all its threads have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.stopping.load(Ordering::Relaxed) && self.threads() == 0
    }

    /// While the runtime is stopping: the next goroutine that was stopped by a signal. The others are taken out of their
    /// queues on the way, and that is the last of them.
    pub(super) fn take_last(&self, m: &M, p: &'static P) -> Option<&'static G> {
        if self.is_stopped() {
            return None;
        }
        let local = || pop_local(p);
        let global = || self.pop_tired().or_else(|| self.pop_global());
        let g = std::iter::from_fn(|| local().or_else(global)).find(|g| g.goes_on_at_the_end())?;
        p.next_tick();
        m.grace_until.set(now() + GRACE);
        // It stops at its next call, or when its grace is over and sysmon finds it outside a library.
        p.ask_to_preempt(p.tick.load(Ordering::Relaxed), p.run());
        self.sysmon.wake();
        Some(g)
    }
}
