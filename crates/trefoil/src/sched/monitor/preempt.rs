//! Preemption: an endless loop does not keep its P.
//!
//! sysmon decides ([`request`]): it sets `flag::PREEMPT`, which every runtime call looks at on its way out,
//! and, for code that makes none, sends the thread a signal. The handler ([`on_signal`]) checks whether the
//! goroutine can be stopped where it is, and diverts it into the trampoline (`arch/preempt.rs`), which
//! calls [`preempted`]: an ordinary switch. The goroutine goes to the end of the queue of those who used
//! up their slice, and is resumed on any thread, in the middle of whatever it was doing.
//!
//! Sound at any instruction of user code, because a goroutine owns its stack *and its thread-local storage*:
//! malloc's caches, `RefCell`s in thread-locals, a panic under way, all move along. What must not be
//! interrupted is the runtime itself.
//!
//! The handler refuses, and sysmon tries again, when
//! 1. the thread is inside the runtime, or holds one of its locks;
//! 2. it is not on a goroutine's stack (a user's signal handler on the alternate stack), or less than
//!    [`ROOM`] of it is left;
//! 3. its signal mask is not the one it began with: a user's handler may be running, whose return on another
//!    thread would install the wrong mask;
//! 4. the goroutine holds a `no_preempt` guard;
//! 5. the slice has changed since: the signal is late;
//! 6. it is in libc or in the loader, or holds a lock of C code, and has not been found so
//!    [`PUT_OFF_MAX`] times in a slice;
//! 7. no thread is to spare, for as long: it may be in a callback of theirs.
//!
//! # Inside a library
//! Who holds one of libc's locks and stops makes others wait, in the kernel, with their threads. Each of them loses its
//! P to a thread that was to spare; and when none is, the helper thread must start one, which takes the same locks. So nobody
//! could resume the holder any more. Therefore those who were stopped there are counted, and
//! 1. nobody is stopped there unless more threads are to spare than were stopped there already;
//! 2. the helper thread keeps as many, and one more;
//! 3. a thread that gets a P while fewer are to spare than were stopped there begins with one of those.
//!
//! So before the last thread is gone, all of them run, and one of them is the holder. Beyond [`RESERVE`] it is a matter
//! of patience: loops around `memset` are many, and have no lock.
//!
//! In a runtime that ends, a goroutine that stops never goes on. There it is stopped by a signal only after a grace in
//! which it may reach a runtime call (`stop.rs`), and it must be found inside a library far more often before it is
//! taken for one that is always there ([`PUT_OFF_LAST`]).
//!
//! A thread that sleeps in the kernel is not signalled (`handoff.rs` takes its P instead), so users see no EINTR; but for
//! a call that is entered between sysmon's look and its signal.

use crate::arch::{self, preempt::ROOM};
use crate::mem;
use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::{M, OWNED, RETAKEN, Rt};
use crate::sched::monitor::handoff;
use crate::sched::p::P;
use crate::sched::switch;
use crate::sys::raw::syscall;
use crate::sys::{lock, signal};
use std::ops::Range;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// How often a preemption is put off because the goroutine is inside libc: for some milliseconds, at sysmon's pace.
/// Who mostly allocates is outside of it once in ten looks; who fills large buffers never is.
const PUT_OFF_MAX: u32 = 48;
/// The same, when there are no more threads in reserve than were stopped so, and when the runtime ends.
const PUT_OFF_LONG: u32 = 4 * PUT_OFF_MAX;
const PUT_OFF_LAST: u32 = 1_000;
/// Threads in reserve for those that were stopped inside a library, at most.
const RESERVE: u32 = 16;

/// The signal; 0 if goroutines are not preempted by one.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Start and end of the libraries whose locks everybody needs: libc, and the loader.
static LIBRARIES: [[AtomicUsize; 2]; 2] = [const { [const { AtomicUsize::new(0) }; 2] }; 2];

/// Readies the machine and takes note of `signal`, for which [`on_signal`] is about to be installed. False:
/// this CPU cannot do it.
pub(crate) fn init(signal: i32, libraries: [Range<usize>; 2]) -> bool {
    if !arch::preempt::init_preemption(preempted) {
        return false;
    }
    for (known, library) in LIBRARIES.iter().zip(libraries) {
        known[0].store(library.start, Ordering::Relaxed);
        known[1].store(library.end, Ordering::Relaxed);
    }
    SIGNAL.store(signal, Ordering::Release);
    true
}

/// The running thread's signal mask, after it has let the preemption signal through: whoever built the runtime may
/// have blocked all of them.
pub(crate) fn ready_thread() -> u64 {
    let signal = SIGNAL.load(Ordering::Acquire);
    if signal != 0 {
        signal::unblock(signal);
    }
    signal::current_mask()
}

/// sysmon: the goroutine of that slice and run on `p` is to stop; by a signal too, if it is known to be on a CPU.
pub(crate) fn request(sched: &Sched, p: &'static P, (tick, run): (u32, u32), on_cpu: bool) {
    p.ask_to_preempt(tick, run);
    if on_cpu
        && sched.config.async_preempt
        && let Some(m) = p.holder()
        && m.in_runtime.load(Ordering::Relaxed) == 0
        && m.hold.load(Ordering::Relaxed) == OWNED
    {
        sched.signals.fetch_add(1, Ordering::Relaxed);
        send(m);
    }
}

/// What the kernel passes on to the handler (`siginfo_t`): a signal with a value.
#[repr(C)]
struct Info {
    signal: i32,
    error: i32,
    code: i32,
    unused_too: i32,
    pid: i32,
    uid: u32,
    value: *const u8,
    unused: [u64; 12],
}

const _: () = assert!(size_of::<Info>() == size_of::<libc::siginfo_t>());

/// Its address is the value: this signal is one of ours.
static MARK: u8 = 0;

/// Whether a signal is a request of the runtime's own.
pub(crate) fn is_ours(info: &libc::siginfo_t) -> bool {
    // SAFETY: a signal with that code has a value.
    info.si_code == libc::SI_QUEUE
        && unsafe { info.si_value().sival_ptr }.cast_const().cast() == &raw const MARK
}

/// Sends the signal to the thread of `m`.
pub(crate) fn send(m: &M) {
    let (signal, tid) = (SIGNAL.load(Ordering::Acquire), m.tid.load(Ordering::Relaxed));
    if signal == 0 || tid == 0 {
        return;
    }
    let info = Info {
        signal,
        error: 0,
        code: libc::SI_QUEUE,
        unused_too: 0,
        // SAFETY: no arguments, touches no memory.
        pid: unsafe { libc::getpid() },
        uid: 0,
        value: &raw const MARK,
        unused: [0; 12],
    };
    // SAFETY: reads the information, which is as long as the kernel's. A thread that has ended is not there, or is
    // one of ours, whose handler finds nothing to do.
    unsafe {
        let [pid, tid, signal] = [info.pid as usize, tid as usize, signal as usize];
        let at = &raw const info as usize;
        if syscall(libc::SYS_rt_tgsigqueueinfo, [pid, tid, signal, at]) != 0 {
            // A sandbox that does not know it; then a user's handler gets our signals too, as in Go.
            syscall(libc::SYS_tgkill, [pid, tid, signal]);
        }
    }
}

/// In the signal's handler: diverts the interrupted goroutine if it is to stop and can be stopped here.
///
/// # Safety
/// Called on the alternate stack with the context that the kernel passed.
pub(crate) unsafe fn on_signal(context: &mut libc::ucontext_t) {
    // SAFETY: null, or an M: ours, or that of the thread which started this one. Never freed.
    let Some(m) = (unsafe { arch::inherited_m::<M>().as_ref() }) else { return };
    if m.in_runtime.load(Ordering::Relaxed) == 0 && may_stop(m, context) {
        m.in_runtime.store(1, Ordering::Relaxed);
        // SAFETY: `may_stop` has checked what it asks for.
        unsafe { arch::preempt::divert(context) };
    }
}

/// See the list at the head of the file.
fn may_stop(m: &M, context: &libc::ucontext_t) -> bool {
    // Whose M it is: the running goroutine's thread-local storage tells.
    let Some(g) = m.current.get() else { return false };
    let tp = arch::thread_pointer();
    if g.tp.get() != tp {
        return false;
    }
    let (pc, sp) = arch::preempt::interrupted(context);
    let here = mem::slot_at(sp).filter(|slot| (slot.low..slot.high).contains(&(tp as usize)));
    let Some(slot) = here else { return false };
    // Without an alternate stack (somebody has taken it away) we stand on the goroutine's own.
    let own = &raw const pc as usize;
    if sp < slot.low + ROOM || arch::preempt::inside(pc) || (slot.low..slot.high).contains(&own) {
        return false;
    }
    // The kernel's set is one word.
    // SAFETY: the set is longer than a word.
    let mask = unsafe { (&raw const context.uc_sigmask).cast::<u64>().read() };
    if mask != m.signal_mask.get() || g.no_preempt.get() != 0 || lock::pinned() {
        return false;
    }
    let ends = m.sched().stopping.load(Ordering::Relaxed);
    let lost = m.hold.load(Ordering::Relaxed) == RETAKEN;
    let asked = lost || m.p.get().is_some_and(P::is_asked_to_preempt);
    if !asked {
        return false;
    }
    // It would never go on.
    if ends && (!Sched::grace_is_over(m) || m.sched().must_not_be_left()) {
        return false;
    }
    let in_library = LIBRARIES.iter().any(|[start, end]| {
        (start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed)).contains(&pc)
    });
    // A lock of C code is as good as one of libc's own: others may wait for it with their threads (an allocator's, say).
    let in_library = in_library || lock::c_locks_held() != 0;
    // In user code that libc has called it may have libc's locks as well.
    let alone = !ends && m.sched().has_no_spare();
    if in_library || alone {
        // Relaxed: the thread's own; sysmon only looks.
        let tick = m.p.get().map_or(0, |p| p.tick.load(Ordering::Relaxed));
        let same = m.deferrals_tick.replace(tick) == tick;
        let put_off =
            if same { m.preempt_deferrals.load(Ordering::Relaxed).saturating_add(1) } else { 1 };
        m.preempt_deferrals.store(put_off, Ordering::Relaxed);
        let limit = match () {
            () if ends => PUT_OFF_LAST,
            () if in_library && !m.sched().has_reserve() => PUT_OFF_LONG,
            () => PUT_OFF_MAX,
        };
        if put_off < limit || (in_library && alone) {
            return false;
        }
    }
    g.stopped_in_libc.set(in_library && !ends);
    true
}

/// What a diverted goroutine calls. Inside the runtime (the handler saw to that); the trampoline leaves it.
unsafe extern "sysv64" fn preempted() {
    let rt = Rt::after_switch();
    let (sched, g) = (rt.sched(), rt.g());
    let inside = g.stopped_in_libc.get();
    let patient = rt.m().preempt_deferrals.load(Ordering::Relaxed) >= PUT_OFF_LONG;
    if inside && !sched.stop_inside(patient) {
        g.stopped_in_libc.set(false);
        return;
    }
    sched.count_stop_by_signal(g);
    if rt.m().hold.load(Ordering::Relaxed) == OWNED {
        sched.preemptions.fetch_add(1, Ordering::Relaxed);
        switch::preempt(rt);
    } else {
        rt.m().preempt_deferrals.store(0, Ordering::Relaxed);
        handoff::reacquire_p(rt);
    }
    if g.stopped_by_signal.replace(false) {
        sched.stopped_by_signal.fetch_sub(1, Ordering::Relaxed);
    }
    if inside {
        g.stopped_in_libc.set(false);
        let _counting = sched.central.lock();
        sched.stopped_in_libc.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Sched {
    /// Threads that are kept for those who were stopped inside a library.
    pub(crate) fn reserve(&self) -> u32 {
        self.stopped_in_libc.load(Ordering::Relaxed).min(RESERVE)
    }

    /// Whether there is a thread in reserve for one more. For a look without the lock.
    fn has_reserve(&self) -> bool {
        self.spares.load(Ordering::Relaxed) > self.stopped_in_libc.load(Ordering::Relaxed)
    }

    /// Whether there are as many threads as there may be. Then being short of them may last, and those who were stopped
    /// inside a library take turns with others.
    pub(crate) fn has_all_threads(&self) -> bool {
        self.threads() >= self.config.max_threads
    }

    /// Whether a thread that gets a P must begin with those.
    pub(crate) fn is_short_of_threads(&self) -> bool {
        self.spares.load(Ordering::Relaxed) < self.reserve()
    }

    /// The running goroutine is about to stop, because a signal came: counts it, unless the runtime ends.
    fn count_stop_by_signal(&self, g: &G) {
        let _deciding = self.central.lock();
        if !self.stopping.load(Ordering::Relaxed) {
            g.stopped_by_signal.set(true);
            self.stopped_by_signal.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The running goroutine is about to stop inside a library: counts it. False: not now. `patient`: it has been put
    /// off for long.
    fn stop_inside(&self, patient: bool) -> bool {
        let central = self.central.lock();
        let (spares, inside) = (central.spares(), self.stopped_in_libc.load(Ordering::Relaxed));
        let may = spares > inside || (patient && spares > 0);
        if self.stopping.load(Ordering::Relaxed) || !may {
            return false;
        }
        self.stopped_in_libc.fetch_add(1, Ordering::Relaxed);
        let wants_thread = self.wants_thread(&central);
        drop(central);
        if wants_thread {
            self.helper.call(0);
        }
        true
    }
}
