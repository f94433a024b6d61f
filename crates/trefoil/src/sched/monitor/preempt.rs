//! Preemption: a goroutine in an endless loop does not keep its P.
//!
//! sysmon decides ([`request`]). It sets `flag::PREEMPT`, which every runtime call checks when it
//! returns, and, for code that makes no runtime call, sends the thread a signal. The handler
//! ([`on_signal`]) checks whether the goroutine can be stopped where it is, and diverts it into the
//! trampoline (`arch/*/preempt.rs`). The trampoline calls [`preempted`], an ordinary switch. The
//! goroutine enters the expired queue, and is resumed on any M, in the middle of what it was doing.
//!
//! That is sound at any instruction of user code, because a goroutine owns its stack *and its
//! thread-local storage*: malloc's caches, `RefCell`s in thread-locals and a panic in progress move
//! with it. Only the runtime itself must not be interrupted.
//!
//! The handler refuses, and sysmon tries again, if ([`PreemptRefusal`])
//! 1. the thread is inside the runtime, or holds one of its locks, or runs no goroutine;
//! 2. the thread is not on the goroutine's stack (a handler of the program runs on the alternate
//!    stack), or less than [`DIVERT_BYTES`] of the stack is left, or the goroutine is in the
//!    trampoline already, or the preemption handler itself runs on its stack;
//! 3. its signal mask is not the one it began with: a handler of the program may be running, whose
//!    return on another thread would install the wrong mask;
//! 4. the goroutine holds a `no_preempt` guard;
//! 5. the slice has changed since the request: the signal is late;
//! 6. the goroutine is in libc or in the loader, or holds a lock of C code, or no spare M is
//!    available (an idle M, which would take a P at once), until it was found so too often in one
//!    slice (a *deferral* each time; the table below);
//! 7. the runtime shuts down, and the goroutine has grace left or must not be orphaned (below).
//!
//! | spare Ms | in libc, or with a C lock | in other code |
//! |---|---|---|
//! | more than goroutines stopped in libc | [`MAX_DEFERRALS`] | at once |
//! | fewer, but one at least | [`MAX_DEFERRALS_WITHOUT_RESERVE`] | at once |
//! | none, and no M can be started | [`MAX_DEFERRALS`] in [`NANOS_WITHOUT_SPARE`], never with a C lock | [`MAX_DEFERRALS`] |
//! | none at present | never | [`MAX_DEFERRALS`] |
//!
//! Code outside of libc counts as well if there is no spare M, because it may be a callback of a
//! library that holds a lock.
//!
//! # Stopped in libc
//! If a goroutine stops while it holds one of libc's locks, other goroutines wait for the lock in
//! the kernel, with their Ms. Each of these Ms loses its P to a spare M. When no spare M is left,
//! the helper thread must start one, which takes the same locks. Then no M could resume the
//! goroutine that holds the lock. Therefore goroutines that were stopped in libc are counted, and
//! - a goroutine is stopped there only if there are more spare Ms than goroutines stopped there
//!   (*the reserve*);
//! - the helper thread keeps one more spare M than there are such goroutines;
//! - an M that gets a P while there are fewer spare Ms than such goroutines begins with one of them.
//!
//! So before the last spare M is used up, all of these goroutines run, and one of them is the
//! lock's owner. There are exceptions, because loops around `memset` are common and hold no lock.
//! Beyond [`MAX_RESERVE_MS`] only the number of deferrals counts. Below that, a goroutine that was
//! deferred [`MAX_DEFERRALS_WITHOUT_RESERVE`] times needs only one spare M, if it holds no C lock:
//! the helper thread might wait for that lock, and could not start an M.
//!
//! If no more Ms can be started, because the kernel has refused threads for a while or there are as
//! many as the program allows, the last Ms may all run goroutines that are always in libc. They
//! would keep the Ms for ever. So without a spare M a goroutine is stopped there as well if it
//! holds no C lock, but only after [`NANOS_WITHOUT_SPARE`], in which every signal has found it in
//! libc. That it computes for so long under one of libc's locks is improbable. (A number of signals
//! alone would be no measure: a thread that has no CPU gets one at a time.)
//!
//! A goroutine in `dlopen` or `dlclose` holds locks of the loader in whatever code it is. It counts
//! as the holder of a C lock (`interpose/dlopen.rs`).
//!
//! # Shutdown
//! In a runtime that shuts down, a stopped goroutine never goes on. There a signal stops it only
//! after a grace period in which it may reach a runtime call (`shutdown.rs`), and it must be found
//! inside a library far more often before the runtime assumes that it is always there
//! ([`MAX_DEFERRALS_IN_SHUTDOWN`]). The shutdown may begin after the handler has decided, so
//! [`Sched::count_stop`] decides again, under the lock.
//!
//! A thread that sleeps in the kernel is not signalled (`handoff.rs` retakes its P instead), so
//! user code sees no EINTR, except in a call that it enters between sysmon's probe and the signal.

use crate::arch::{self, Registers, preempt::DIVERT_BYTES};
use crate::mem;
use crate::sched::Sched;
use crate::sched::g::G;
use crate::sched::m::{EnteredRuntime, M, OWNED, RETAKEN};
use crate::sched::monitor::handoff;
use crate::sched::p::P;
use crate::sched::queues::central::Central;
use crate::sched::record;
use crate::sched::switch;
use crate::sys::clock::{Nanos, now};
use crate::sys::raw::syscall;
use crate::sys::{lock, signal};
use std::ops::Range;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// How many times per slice a preemption is deferred because the goroutine is inside libc: some
/// milliseconds, at sysmon's pace. A goroutine that mostly allocates is outside of libc at one
/// signal in ten; a goroutine that fills large buffers never is.
const MAX_DEFERRALS: u32 = 48;
/// The same, if there are no more spare Ms than goroutines stopped in libc.
const MAX_DEFERRALS_WITHOUT_RESERVE: u32 = 4 * MAX_DEFERRALS;
/// For how long it is deferred at least if there is no spare M, and no M can be started.
const NANOS_WITHOUT_SPARE: Nanos = 500_000_000;
/// The same, in a runtime that shuts down.
const MAX_DEFERRALS_IN_SHUTDOWN: u32 = 1_000;
/// The most spare Ms that are kept for goroutines stopped in libc.
const MAX_RESERVE_MS: u32 = 16;

/// The preemption signal; 0 if goroutines are not preempted by a signal.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Start and end of the libraries whose locks the whole process needs: libc and the loader.
static LIBRARIES: [[AtomicUsize; 2]; 2] = [const { [const { AtomicUsize::new(0) }; 2] }; 2];

/// Why the signal handler did not stop a goroutine. See the list at the head of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PreemptRefusal {
    /// The thread is inside the runtime.
    InRuntime,
    /// The thread holds a lock of the runtime.
    HoldsRuntimeLock,
    /// The M runs no goroutine, or this thread inherited the M from the thread that started it.
    NoGoroutine,
    /// The interrupted code is not on the goroutine's stack.
    ForeignStack,
    /// Less than [`DIVERT_BYTES`] of the stack is left.
    StackNearlyFull,
    /// The goroutine is in the trampoline: it is stopping or resuming.
    InTrampoline,
    /// The handler runs on the goroutine's stack, because the program has removed the alternate
    /// one.
    NoAlternateStack,
    /// The signal mask has changed.
    SignalMaskChanged,
    /// The goroutine holds a `no_preempt` guard.
    NoPreemptGuard,
    /// sysmon's request was for an earlier slice of this P.
    RequestExpired,
    /// In shutdown: the goroutine has grace left.
    InGrace,
    /// In shutdown: the goroutine holds a lock that the whole process needs.
    HoldsProcessLock,
    /// The goroutine is inside libc or the loader, or holds a lock of C code.
    InLibrary,
    /// No spare M is available.
    NoSpareM,
}

impl PreemptRefusal {
    const COUNT: usize = PreemptRefusal::NoSpareM as usize + 1;
    const ALL: [PreemptRefusal; PreemptRefusal::COUNT] = [
        PreemptRefusal::InRuntime,
        PreemptRefusal::HoldsRuntimeLock,
        PreemptRefusal::NoGoroutine,
        PreemptRefusal::ForeignStack,
        PreemptRefusal::StackNearlyFull,
        PreemptRefusal::InTrampoline,
        PreemptRefusal::NoAlternateStack,
        PreemptRefusal::SignalMaskChanged,
        PreemptRefusal::NoPreemptGuard,
        PreemptRefusal::RequestExpired,
        PreemptRefusal::InGrace,
        PreemptRefusal::HoldsProcessLock,
        PreemptRefusal::InLibrary,
        PreemptRefusal::NoSpareM,
    ];

    /// Returns the reason that a recorder has written as this number.
    pub(crate) fn from_u8(n: u8) -> Option<PreemptRefusal> {
        PreemptRefusal::ALL.get(usize::from(n)).copied()
    }

    /// Returns what traces print.
    pub(crate) fn text(self) -> &'static str {
        match self {
            PreemptRefusal::InRuntime => "in a call of the runtime",
            PreemptRefusal::HoldsRuntimeLock => "holds a lock of the runtime",
            PreemptRefusal::NoGoroutine => "no goroutine ran",
            PreemptRefusal::ForeignStack => "on a stack that is not the goroutine's",
            PreemptRefusal::StackNearlyFull => "its stack is nearly full",
            PreemptRefusal::InTrampoline => "already stopping",
            PreemptRefusal::NoAlternateStack => "no alternate signal stack",
            PreemptRefusal::SignalMaskChanged => "its signal mask has changed",
            PreemptRefusal::NoPreemptGuard => "holds a no_preempt guard",
            PreemptRefusal::RequestExpired => "the request came too late",
            PreemptRefusal::InGrace => "the runtime ends, and it has grace left",
            PreemptRefusal::HoldsProcessLock => "holds a lock that the whole process needs",
            PreemptRefusal::InLibrary => "in libc, or holds a lock of C code",
            PreemptRefusal::NoSpareM => "no spare thread",
        }
    }

    /// Counts this refusal. Async-signal-safe.
    fn count(self) {
        REFUSALS[self as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how often the handlers of this process have refused for this reason.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests"))]
    pub(crate) fn total(self) -> u64 {
        REFUSALS[self as usize].load(Ordering::Relaxed)
    }
}

/// The number of refusals in this process, by reason.
static REFUSALS: [AtomicU64; PreemptRefusal::COUNT] =
    [const { AtomicU64::new(0) }; PreemptRefusal::COUNT];

/// Prepares the trampoline and records `signal`, for which [`on_signal`] is about to be installed.
/// Returns false if this CPU cannot save the state of an interrupted goroutine.
pub(crate) fn init(signal: i32, libraries: [Range<usize>; 2]) -> bool {
    if !arch::preempt::init_preemption(preempted) {
        return false;
    }
    for (known, library) in LIBRARIES.iter().zip(libraries) {
        known[0].store(library.start, Ordering::Relaxed);
        known[1].store(library.end, Ordering::Relaxed);
    }
    // Release: pairs with the Acquire loads of `SIGNAL`, whose threads see the libraries.
    SIGNAL.store(signal, Ordering::Release);
    true
}

/// Unblocks the preemption signal on this thread, which the thread that built the runtime may have
/// blocked, and returns the thread's signal mask.
pub(crate) fn init_signal_mask() -> u64 {
    let signal = SIGNAL.load(Ordering::Acquire);
    if signal != 0 {
        signal::unblock(signal);
    }
    signal::current_mask()
}

/// How sysmon asks a goroutine to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RequestBy {
    /// By `flag::PREEMPT` only: its thread may sleep in the kernel, and must not be disturbed.
    Flag,
    /// By the flag and a signal: its thread is known to be on a CPU.
    FlagAndSignal,
}

/// Asks the goroutine on `p` to stop, if it is still in the slice `tick` and the run `run`. Only
/// for sysmon.
pub(crate) fn request(sched: &Sched, p: &'static P, (tick, run): (u32, u32), by: RequestBy) {
    p.ask_to_preempt(tick, run);
    record::asked_to_stop(sched, p);
    if by == RequestBy::FlagAndSignal
        && sched.config.async_preempt
        && let Some(m) = p.holder()
        && m.in_runtime.load(Ordering::Relaxed) == 0
        && m.hold.load(Ordering::Relaxed) == OWNED
    {
        sched.signals.fetch_add(1, Ordering::Relaxed);
        send_signal(m);
    }
}

/// The `siginfo_t` of a signal that was queued with a value.
#[repr(C)]
struct QueuedSiginfo {
    signal: i32,
    error: i32,
    code: i32,
    padding: i32,
    pid: i32,
    uid: u32,
    value: *const u8,
    unused: [u64; 12],
}

const _: () = assert!(size_of::<QueuedSiginfo>() == size_of::<libc::siginfo_t>());

/// The address of this byte is the value of the runtime's own signals.
static SIGNAL_COOKIE: u8 = 0;

/// Returns whether the runtime itself has sent a signal ([`send_signal`]).
pub(crate) fn is_own_signal(info: &libc::siginfo_t) -> bool {
    // SAFETY: a signal with that code has a value.
    info.si_code == libc::SI_QUEUE
        && unsafe { info.si_value().sival_ptr }.cast_const().cast() == &raw const SIGNAL_COOKIE
}

/// Sends the preemption signal to the thread of `m`.
pub(crate) fn send_signal(m: &M) {
    let (signal, tid) = (SIGNAL.load(Ordering::Acquire), m.tid.load(Ordering::Relaxed));
    if signal == 0 || tid == 0 {
        return;
    }
    let info = QueuedSiginfo {
        signal,
        error: 0,
        code: libc::SI_QUEUE,
        padding: 0,
        // SAFETY: no arguments, touches no memory.
        pid: unsafe { libc::getpid() },
        uid: 0,
        value: &raw const SIGNAL_COOKIE,
        unused: [0; 12],
    };
    // SAFETY: the kernel reads `info`, which is as long as its own type. If the thread has ended,
    // the tid does not exist, or is another thread of this process, whose handler refuses.
    unsafe {
        let [pid, tid, signal] = [info.pid as usize, tid as usize, signal as usize];
        let at = &raw const info as usize;
        if syscall(libc::SYS_rt_tgsigqueueinfo, [pid, tid, signal, at]) != 0 {
            // A sandbox does not allow the call. Then a handler of the program gets these signals,
            // too, as in Go.
            syscall(libc::SYS_tgkill, [pid, tid, signal]);
        }
    }
}

/// Diverts the interrupted goroutine into the trampoline, if it is to stop and can be stopped here.
/// Runs in the signal handler.
///
/// # Safety
/// Called on the alternate stack with the context that the kernel passed.
pub(crate) unsafe fn on_signal(context: &mut libc::ucontext_t) {
    // SAFETY: null, or an M: this thread's, or that of the thread which started this one. Ms are
    // never freed.
    let Some(m) = (unsafe { arch::inherited_m::<M>().as_ref() }) else { return };
    match may_stop(m, context) {
        Ok(()) => {
            // SAFETY: `may_stop` has checked the requirements; it has found a goroutine, which runs
            // on `m`.
            unsafe {
                arch::set_in_runtime::<1>();
                arch::preempt::divert(context);
            }
        }
        Err(refusal) => {
            refusal.count();
            record_refusal(m, refusal);
        }
    }
}

/// Records a refusal in the ring of this thread's P, if it has one.
fn record_refusal(m: &M, refusal: PreemptRefusal) {
    // Then `m` may be the M of another thread, or the thread may be writing to the ring.
    if matches!(refusal, PreemptRefusal::NoGoroutine | PreemptRefusal::InRuntime) {
        return;
    }
    // As a runtime call does, so that sysmon does not retake the P meanwhile.
    // SAFETY: the signal has interrupted a goroutine, which runs on `m`.
    unsafe { arch::set_in_runtime::<1>() };
    if m.hold.load(Ordering::Relaxed) == OWNED
        && let Some(p) = m.p.get()
    {
        record::refused_to_stop(p, refusal as u8);
    }
    // SAFETY: as above.
    unsafe { arch::set_in_runtime::<0>() };
}

/// Checks whether the goroutine that the signal interrupted may be stopped here. If so, records in
/// the G whether it stops inside a library.
fn may_stop(m: &M, context: &libc::ucontext_t) -> Result<(), PreemptRefusal> {
    // M's byte, and that of the interrupted context, if it has its own: a goroutine that enters
    // the runtime may have set one of the two.
    // SAFETY: this is a signal handler.
    if m.in_runtime.load(Ordering::Relaxed) != 0 || unsafe { arch::is_in_runtime() } {
        return Err(PreemptRefusal::InRuntime);
    }
    let Registers { pc, sp, .. } = Registers::interrupted(context);
    let (pc, sp) = (pc as usize, sp as usize);
    let g = interrupted_goroutine(m)?;
    check_stack(pc, sp)?;
    check_interruptible(m, g, context)?;
    let stopping = m.sched().stopping.load(Ordering::Relaxed);
    check_request(m, stopping)?;
    let site = StopSite {
        // A lock of C code counts like libc's own: other goroutines may wait for it with their Ms
        // (an allocator's lock, for example).
        in_library: is_in_library(pc) || lock::c_locks_held() != 0,
        spares: m.sched().spares_for_goroutine(),
        stopping,
    };
    // User code that libc has called may hold libc's locks as well. Then a spare M is needed.
    if site.in_library || (site.spares < Spares::Few && !stopping) {
        site.check_deferrals(count_deferral(m))?;
    }
    g.stopped_in_libc.set(site.in_library && !stopping);
    Ok(())
}

/// Returns the goroutine that runs on this thread.
fn interrupted_goroutine(m: &M) -> Result<&'static G, PreemptRefusal> {
    // A thread that a goroutine started inherits the M. But then its thread-local storage is not
    // the goroutine's.
    let is_here = |g: &&G| g.tp.get() == arch::thread_pointer();
    m.current.get().filter(is_here).ok_or(PreemptRefusal::NoGoroutine)
}

/// Checks that the code at `pc` runs on the goroutine's stack, which has room for the trampoline.
fn check_stack(pc: usize, sp: usize) -> Result<(), PreemptRefusal> {
    let tp = arch::thread_pointer() as usize;
    let slot = mem::slot_at(sp).filter(|slot| (slot.low..slot.high).contains(&tp));
    let Some(slot) = slot else { return Err(PreemptRefusal::ForeignStack) };
    if sp < slot.low + DIVERT_BYTES {
        return Err(PreemptRefusal::StackNearlyFull);
    }
    if arch::preempt::in_trampoline(pc) {
        return Err(PreemptRefusal::InTrampoline);
    }
    let own_frame = &raw const tp as usize;
    if (slot.low..slot.high).contains(&own_frame) {
        return Err(PreemptRefusal::NoAlternateStack);
    }
    Ok(())
}

/// Checks the signal mask, guards and locks of the interrupted code.
fn check_interruptible(m: &M, g: &G, context: &libc::ucontext_t) -> Result<(), PreemptRefusal> {
    // The kernel's set is one word.
    // SAFETY: `sigset_t` is longer than a word.
    let mask = unsafe { (&raw const context.uc_sigmask).cast::<u64>().read() };
    if mask != m.signal_mask.get() {
        return Err(PreemptRefusal::SignalMaskChanged);
    }
    if g.no_preempt.get() != 0 {
        return Err(PreemptRefusal::NoPreemptGuard);
    }
    if lock::holds_runtime_lock() {
        return Err(PreemptRefusal::HoldsRuntimeLock);
    }
    Ok(())
}

/// Checks that sysmon has asked the goroutine that runs on `m` to stop; and, in a runtime that
/// shuts down, that the goroutine may stop for ever.
fn check_request(m: &M, stopping: bool) -> Result<(), PreemptRefusal> {
    // Acquire: pairs with the Release in `release_p`.
    let is_asked = match m.hold.load(Ordering::Acquire) {
        // Not inside `blocking`, for example.
        RETAKEN => m.without_p.is_asked_to_preempt(),
        _ => m.p.get().is_some_and(P::is_asked_to_preempt),
    };
    if !is_asked {
        return Err(PreemptRefusal::RequestExpired);
    }
    if stopping { may_stop_for_ever(m) } else { Ok(()) }
}

/// Checks that the goroutine that runs on `m`, in a runtime that shuts down, has used up its grace
/// and holds no lock of the whole process.
fn may_stop_for_ever(m: &M) -> Result<(), PreemptRefusal> {
    if !Sched::grace_is_over(m) {
        return Err(PreemptRefusal::InGrace);
    }
    if m.sched().must_go_on() {
        return Err(PreemptRefusal::HoldsProcessLock);
    }
    Ok(())
}

/// Returns whether the code at `pc` is libc's or the loader's.
fn is_in_library(pc: usize) -> bool {
    LIBRARIES.iter().any(|[start, end]| {
        (start.load(Ordering::Relaxed)..end.load(Ordering::Relaxed)).contains(&pc)
    })
}

/// The deferrals in a slice.
#[derive(Clone, Copy)]
struct Deferrals {
    count: u32,
    /// The time since the first one.
    nanos: Nanos,
}

impl Deferrals {
    /// Returns those of the goroutine that runs on `m`.
    fn of(m: &M) -> Deferrals {
        let count = m.preempt_deferrals.load(Ordering::Relaxed);
        Deferrals { count, nanos: now().saturating_sub(m.deferred_since.get()) }
    }

    /// Returns whether the goroutine was in libc for so long that it may stop without a spare M.
    fn are_for_long(self) -> bool {
        self.count >= MAX_DEFERRALS && self.nanos >= NANOS_WITHOUT_SPARE
    }
}

/// Counts a deferral in the present slice. All that the goroutine computes without a P counts as
/// one slice.
fn count_deferral(m: &M) -> Deferrals {
    // Relaxed: written by this thread, and by sysmon while this thread is blocked.
    let p = m.p.get().filter(|_| m.hold.load(Ordering::Relaxed) != RETAKEN);
    let tick = p.map_or(m.deferrals_tick.get(), |p| p.tick.load(Ordering::Relaxed));
    let same_slice = m.deferrals_tick.replace(tick) == tick;
    let before = if same_slice { m.preempt_deferrals.load(Ordering::Relaxed) } else { 0 };
    if before == 0 {
        m.deferred_since.set(now());
    }
    m.preempt_deferrals.store(before.saturating_add(1), Ordering::Relaxed);
    Deferrals::of(m)
}

/// The spare Ms, if one more goroutine stops in libc.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Spares {
    /// None. The goroutine must wait for one.
    None,
    /// None, and no M can be started. The goroutine, which holds no C lock, may stop in the end.
    NoneForLong,
    /// Not more than there are goroutines that were stopped in libc.
    Few,
    Enough,
}

/// Where a goroutine would stop, and what is known of the runtime.
#[derive(Clone, Copy)]
struct StopSite {
    in_library: bool,
    spares: Spares,
    /// The runtime shuts down.
    stopping: bool,
}

impl StopSite {
    /// Checks whether the goroutine, which is in a library or without a spare M, was deferred often
    /// enough in this slice to be stopped all the same.
    fn check_deferrals(self, deferrals: Deferrals) -> Result<(), PreemptRefusal> {
        let is_enough = match self.spares {
            _ if self.stopping => deferrals.count >= MAX_DEFERRALS_IN_SHUTDOWN,
            _ if !self.in_library => deferrals.count >= MAX_DEFERRALS,
            Spares::Enough => deferrals.count >= MAX_DEFERRALS,
            Spares::Few => deferrals.count >= MAX_DEFERRALS_WITHOUT_RESERVE,
            Spares::NoneForLong => deferrals.are_for_long(),
            Spares::None => false,
        };
        if is_enough {
            return Ok(());
        }
        Err(if self.in_library { PreemptRefusal::InLibrary } else { PreemptRefusal::NoSpareM })
    }
}

/// What the trampoline calls on a diverted goroutine. It runs inside the runtime, which the handler
/// has entered and the trampoline leaves.
unsafe extern "C" fn preempted() {
    let entered = EnteredRuntime::on_this_m();
    let (sched, m, g) = (entered.sched(), entered.m(), entered.g());
    let in_libc = g.stopped_in_libc.get();
    if !sched.count_stop(m, g) {
        g.stopped_in_libc.set(false);
        return;
    }
    if !g.stopped_by_signal.get() {
        (sched.config.hooks.wake_for_outputs)(entered.rt());
    }
    sched.preemptions.fetch_add(1, Ordering::Relaxed);
    match entered.rt() {
        Some(rt) => switch::preempt(rt),
        None => handoff::preempt_without_p(entered),
    };
    if g.stopped_by_signal.replace(false) {
        sched.stopped_by_signal.fetch_sub(1, Ordering::Relaxed);
    }
    if in_libc {
        g.stopped_in_libc.set(false);
        let _counting = sched.central.lock();
        sched.stopped_in_libc.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Sched {
    /// Returns how many spare Ms are kept for goroutines that were stopped in libc.
    pub(crate) fn reserve(&self) -> u32 {
        self.stopped_in_libc.load(Ordering::Relaxed).min(MAX_RESERVE_MS)
    }

    /// Returns the spare Ms for the running goroutine. Without the lock, so the answer is a hint.
    fn spares_for_goroutine(&self) -> Spares {
        match self.spares.load(Ordering::Relaxed) {
            0 if self.may_stop_without_spare() => Spares::NoneForLong,
            0 => Spares::None,
            n if n > self.stopped_in_libc.load(Ordering::Relaxed) => Spares::Enough,
            _ => Spares::Few,
        }
    }

    /// Returns whether the running goroutine may stop in libc without a spare M, after a long time.
    fn may_stop_without_spare(&self) -> bool {
        self.has_all_threads() && lock::c_locks_held() == 0
    }

    /// Returns whether there are as many Ms as allowed, or as the kernel allows at present. Then a
    /// shortage of Ms may last, and goroutines that were stopped in libc alternate with others.
    pub(crate) fn has_all_threads(&self) -> bool {
        self.threads_refused.load(Ordering::Relaxed) || self.threads() >= self.config.max_threads
    }

    /// Returns whether an M that gets a P must begin with a goroutine that was stopped in libc.
    pub(crate) fn is_short_of_threads(&self) -> bool {
        self.spares.load(Ordering::Relaxed) < self.reserve()
    }

    /// Counts the running goroutine, which the handler has diverted to stop it. Returns false if it
    /// must not stop now. It is not counted if it stops for ever.
    fn count_stop(&self, m: &M, g: &G) -> bool {
        let central = self.central.lock();
        if self.stopping.load(Ordering::Relaxed) {
            // The handler may have decided before the shutdown began, when a stop was not for ever:
            // then the goroutine may be anywhere, and gets its grace first.
            return !g.stopped_in_libc.get() && may_stop_for_ever(m).is_ok();
        }
        let in_libc = g.stopped_in_libc.get();
        if in_libc && !self.count_stop_in_libc(&central, m) {
            return false;
        }
        g.stopped_by_signal.set(true);
        self.stopped_by_signal.fetch_add(1, Ordering::Relaxed);
        let wants_thread = in_libc && self.wants_thread(&central);
        drop(central);
        if wants_thread {
            self.helper.wake();
        }
        true
    }

    /// Counts a goroutine that is about to stop in libc. Returns false if it must not stop now.
    fn count_stop_in_libc(&self, central: &Central, m: &M) -> bool {
        let deferrals = Deferrals::of(m);
        let stopped = self.stopped_in_libc.load(Ordering::Relaxed);
        let may_grow = stopped < MAX_RESERVE_MS && !self.has_all_threads();
        let awaits_reserve = lock::c_locks_held() != 0 && may_grow;
        let may_stop = reserve_suffices(central.spares(), stopped, deferrals.count, awaits_reserve)
            || (deferrals.are_for_long() && self.may_stop_without_spare());
        if may_stop {
            self.stopped_in_libc.fetch_add(1, Ordering::Relaxed);
        }
        may_stop
    }
}

/// Returns whether one more goroutine may stop in libc. If it was deferred very often, any spare M
/// suffices, unless it `awaits_reserve`: it holds a C lock, and the helper thread may still start
/// more Ms, maybe after the goroutine has released the lock.
fn reserve_suffices(spares: u32, stopped: u32, deferrals: u32, awaits_reserve: bool) -> bool {
    let often = deferrals >= MAX_DEFERRALS_WITHOUT_RESERVE;
    spares > stopped || (often && spares > 0 && !awaits_reserve)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IN_LIBC: StopSite =
        StopSite { in_library: true, spares: Spares::Enough, stopping: false };

    /// So many deferrals in a short time.
    fn quickly(count: u32) -> Deferrals {
        Deferrals { count, nanos: 0 }
    }

    #[test]
    fn goroutine_in_libc_is_stopped_after_the_deferral_limit() {
        let refused = Err(PreemptRefusal::InLibrary);
        assert_eq!(IN_LIBC.check_deferrals(quickly(1)), refused);
        assert_eq!(IN_LIBC.check_deferrals(quickly(MAX_DEFERRALS - 1)), refused);
        assert_eq!(IN_LIBC.check_deferrals(quickly(MAX_DEFERRALS)), Ok(()));
    }

    #[test]
    fn goroutine_in_libc_is_deferred_longer_without_a_reserve() {
        let (refused, limit) = (Err(PreemptRefusal::InLibrary), MAX_DEFERRALS_WITHOUT_RESERVE);
        let site = StopSite { spares: Spares::Few, ..IN_LIBC };
        assert_eq!(site.check_deferrals(quickly(MAX_DEFERRALS)), refused);
        assert_eq!(site.check_deferrals(quickly(limit)), Ok(()));
        let stopping = StopSite { stopping: true, ..site };
        assert_eq!(stopping.check_deferrals(quickly(limit)), refused);
        assert_eq!(stopping.check_deferrals(quickly(MAX_DEFERRALS_IN_SHUTDOWN)), Ok(()));
    }

    #[test]
    fn goroutine_in_libc_is_stopped_without_a_spare_m_only_after_a_long_time() {
        let refused = Err(PreemptRefusal::InLibrary);
        let (often, long) = (MAX_DEFERRALS, NANOS_WITHOUT_SPARE);
        let site = StopSite { spares: Spares::None, ..IN_LIBC };
        assert_eq!(site.check_deferrals(Deferrals { count: u32::MAX, nanos: Nanos::MAX }), refused);
        let for_long = StopSite { spares: Spares::NoneForLong, ..IN_LIBC };
        assert_eq!(for_long.check_deferrals(quickly(u32::MAX)), refused);
        assert_eq!(for_long.check_deferrals(Deferrals { count: often - 1, nanos: long }), refused);
        let (last, ok) = (Deferrals { count: often, nanos: long }, Ok(()));
        assert_eq!(for_long.check_deferrals(last), ok, "others would never run again");
        let user_code = StopSite { in_library: false, ..site };
        assert_eq!(user_code.check_deferrals(quickly(1)), Err(PreemptRefusal::NoSpareM));
        assert_eq!(user_code.check_deferrals(quickly(MAX_DEFERRALS)), Ok(()));
    }

    #[test]
    fn goroutine_with_a_c_lock_is_stopped_only_with_a_reserve() {
        let often = MAX_DEFERRALS_WITHOUT_RESERVE;
        assert!(reserve_suffices(2, 1, MAX_DEFERRALS, true));
        assert!(!reserve_suffices(1, 1, often, true), "the helper thread may wait for its lock");
        assert!(reserve_suffices(1, 1, often, false));
        assert!(!reserve_suffices(1, 1, often - 1, false));
        assert!(!reserve_suffices(0, 0, often, false));
    }

    #[test]
    fn a_refusal_raises_only_the_counter_of_its_reason() {
        // `NoAlternateStack` occurs in no other test of this program.
        let before = PreemptRefusal::NoAlternateStack.total();
        PreemptRefusal::NoSpareM.count();
        assert_eq!(PreemptRefusal::NoAlternateStack.total(), before);
        PreemptRefusal::NoAlternateStack.count();
        assert_eq!(PreemptRefusal::NoAlternateStack.total(), before + 1);
    }
}
