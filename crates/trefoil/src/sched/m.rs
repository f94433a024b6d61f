//! M: an OS thread that runs goroutines.
//!
//! The thread has a context of its own: its stack and its thread-local storage. On that context it
//! searches for work and makes stacks. Goroutines switch to each other directly; they switch to the
//! thread's own context only if the local queue is empty or a request is pending (`switch.rs`).
//!
//! # Inside the runtime and outside
//! On a goroutine, [`Rt::enter`] and [`Rt::leave`] enclose all code that touches a P. In between,
//! the goroutine is not preempted and does not move to another M. Outside, user code runs. If the
//! thread blocks in the kernel there, sysmon may retake its P (`monitor/handoff.rs`). Three values
//! prove where the code runs:
//!
//! | value | the code runs | P |
//! |---|---|---|
//! | [`Rt`] | inside the runtime, on a goroutine or on the thread's own context | owned |
//! | [`OwnContext`] | inside the runtime, on the thread's own context | maybe |
//! | the M in `own_context::with_m` | on a goroutine that cannot be preempted | maybe retaken |
//!
//! `hold` is the state of the M's ownership of the P in `m.p`:
//!
//! | `hold` | meaning |
//! |---|---|
//! | `OWNED` | the M owns the P |
//! | `PROBING` | sysmon, which holds the scheduler's lock, checks whether the thread is blocked |
//! | `RETAKEN` | sysmon has retaken the P, or `blocking` has given it away |
//!
//! To enter the runtime, the thread stores `in_runtime = 1` and then loads `hold`. There is no
//! barrier in between, so the load may be done first. sysmon, which retakes Ps rarely, pays for the
//! barrier instead (`monitor/handoff.rs`).
//!
//! Invariants:
//! 1. Every context of the thread finds its M through `arch` (the GS base on x86_64, a word of the
//!    TLS block on aarch64). M's first word is its own address, and `in_runtime` follows it.
//! 2. The memory of an M is never freed, only reused (`M::new`): on x86_64, threads that user code
//!    starts on a goroutine inherit the GS base.
//! 3. A `Cell` in M is touched by the M's own thread only, except: `handed`, `listed`, `idle_link`,
//!    `idle_since` and `without_p` are guarded by the scheduler's lock; `spinning` and `chosen` are
//!    set by the thread that hands the M a P, before the M can see that P.
//! 4. `in_runtime` is 1 on the thread's own context, and on a goroutine between [`Rt::enter`] and
//!    [`Rt::leave`]. While it is 1 the goroutine is not preempted and does not move, so its M and P
//!    stay the same.
//! 5. `hold` is written only under the scheduler's lock. It becomes `RETAKEN` only after sysmon has
//!    read 0 from `in_runtime`, or by the M's own thread just before it leaves the runtime. An M
//!    that enters the runtime meanwhile reads `PROBING` and waits for the lock.

use crate::arch;
use crate::mem::Stack;
use crate::mem::magazine::{BlocksOf, Magazines};
use crate::sched::g::G;
use crate::sched::netpoll::poller::{Poller, ReadyBatch};
use crate::sched::p::{Local, P, flag};
use crate::sched::sample::{self, MSample};
use crate::sched::{Sched, current_g, monitor::handoff, simulation, switch};
use crate::shim::full_fence;
use crate::sys::altstack::AlternateStack;
use crate::sys::clock::Nanos;
use crate::sys::epoll::PollSlot;
use crate::sys::free_list::{FreeLink, FreeList, Reusable};
use crate::sys::parker::Parker;
use crate::sys::syscalls;
use crate::sys::thread;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::marker::PhantomData;
use std::mem::offset_of;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// The stack of an M's thread. Only the scheduler and the program's allocator (`allocator.rs`) run
/// on it. `thread::spawn` adds the size of the thread's TLS.
pub(crate) const THREAD_STACK_BYTES: usize = 256 << 10;

/// Values of `hold`; see the head of the file.
pub(crate) const OWNED: u8 = 0;
pub(crate) const PROBING: u8 = 1;
pub(crate) const RETAKEN: u8 = 2;

/// See the head of the file.
#[repr(C, align(256))]
pub(crate) struct M {
    /// The address of this M (invariant 1).
    this: Cell<*const M>,
    pub(crate) in_runtime: AtomicU8,
    pub(crate) hold: AtomicU8,
    /// It searches for work, or was handed a P together with a claim on spinning
    /// (`search/idle.rs`).
    pub(crate) spinning: Cell<bool>,
    /// How many times a preemption was deferred because the goroutine was inside libc.
    pub(crate) preempt_deferrals: AtomicU32,
    /// The slice (`P::tick`) in which `preempt_deferrals` were counted.
    pub(crate) deferrals_tick: Cell<u32>,
    /// When the first of `preempt_deferrals` was counted.
    pub(crate) deferred_since: Cell<Nanos>,
    /// While the runtime stops: when the thread has used this much CPU time, a signal may stop the
    /// running goroutine. 0 until that time is determined (`shutdown.rs`).
    pub(crate) grace_until: Cell<Nanos>,
    /// The thread runs the program's allocator on its own context, for a goroutine. A hint for
    /// sysmon.
    pub(crate) in_allocator: AtomicBool,
    /// Its thread has not asked for a P yet, and is counted in `Central::starting`.
    pub(crate) is_starting: Cell<bool>,
    /// The P that it owns; while `hold` is `RETAKEN`, the P that it owned last.
    pub(crate) p: Cell<Option<&'static P>>,
    /// The goroutine that runs on this M.
    pub(crate) current: Cell<Option<&'static G>>,
    /// What the next context on this M must complete (`switch::finish_switch`).
    pub(crate) unfinished_switch: Cell<UnfinishedSwitch>,
    /// The goroutine to run next, which only the thread's own context can start: it needs a stack,
    /// or is locked to an M.
    pub(crate) chosen: Cell<Option<&'static G>>,
    /// Stack pointer of the thread's own context while a goroutine runs.
    pub(crate) sp: Cell<*mut u8>,
    /// Thread pointer of the thread's own context.
    pub(crate) tp: Cell<*mut u8>,
    sched: Cell<*const Sched>,
    /// The number of this M in its runtime.
    pub(crate) id: AtomicU32,
    /// The kernel's thread id; 0 while no thread uses this M. A thread compares it with its own id
    /// to see whether its GS base is its own or inherited (invariant 2).
    pub(crate) tid: AtomicU32,
    /// The CPU time of the thread at its last sample (`usage.rs`). sysmon's.
    pub(crate) sampled_cpu: AtomicU64,
    /// The signal mask with which the thread started. User code that runs under another mask is not
    /// preempted.
    pub(crate) signal_mask: Cell<u64>,
    /// Where the thread sleeps, except as the idle poller in `epoll_wait`.
    pub(crate) parker: Parker,
    /// Where the thread sleeps while it is the idle poller and goroutines wait for descriptors.
    pub(crate) polling: PollSlot,
    /// The P that a waker hands over.
    pub(crate) handed: Cell<Option<&'static P>>,
    /// The next M in the list of idle or locked Ms.
    pub(crate) idle_link: Cell<Option<&'static M>>,
    /// Its place in `UNUSED_MS`.
    free_link: FreeLink<M>,
    /// It is in the list of idle Ms or of locked Ms.
    pub(crate) listed: Cell<bool>,
    /// When it last went to sleep without a P.
    pub(crate) idle_since: Cell<Nanos>,
    /// Its place in the list of Ms without a P (`monitor/handoff.rs`).
    pub(crate) without_p: handoff::WithoutP,
    /// The goroutine that is locked to this M.
    pub(crate) locked: Cell<Option<&'static G>>,
    /// For profiles.
    pub(crate) sample: MSample,
    /// Free blocks of the program's allocators, indexed by `BlocksOf`.
    pub(super) magazines: [UnsafeCell<Magazines>; 2],
    /// The M that was made before this one, for debuggers. Written once.
    made_before: AtomicPtr<M>,
}

const _: () = assert!(offset_of!(M, in_runtime) == arch::M_IN_RUNTIME);
const _: () = assert!(align_of::<M>().is_multiple_of(arch::M_ALIGN));

// SAFETY: invariant 3.
unsafe impl Sync for M {}
// SAFETY: nothing in it is tied to the thread that made it.
unsafe impl Send for M {}

/// What becomes of the goroutine that the last switch on an M left. The next context on the M
/// completes it (`switch::finish_switch`).
pub(crate) enum UnfinishedSwitch {
    None,
    /// The goroutine waits for a `ready`.
    Parked(&'static G),
    /// The goroutine yielded: it goes to the tail of the local ring of fresh goroutines.
    Yielded(&'static G),
    /// The goroutine's slice is over, but other goroutines used a part of the slice: it goes to the
    /// tail of its local ring, woken or fresh.
    Displaced(&'static G),
    /// The goroutine used up its slice, or yielded while its P had no other goroutine: it goes to
    /// the tail of the expired queue.
    Preempted(&'static G),
    /// The goroutine came back from a blocking call and no P is free: it goes to the tail of a
    /// global queue.
    WithoutP(&'static G),
    /// The goroutine is a carrier without a task: it is shelved (`task/carrier.rs`).
    Shelved(&'static G),
    /// The goroutine ended, and this was its stack. The G may already be reused.
    Dead(Stack),
}

/// Every M that was made, newest first. Debuggers find all threads here.
pub(crate) static MS: AtomicPtr<M> = AtomicPtr::new(null_mut());

/// Where debuggers find the fields of Ms (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("m.next", offset_of!(M, made_before)),
    ("m.id", offset_of!(M, id)),
    ("m.tid", offset_of!(M, tid)),
    ("m.p", offset_of!(M, p)),
    ("m.hold", offset_of!(M, hold)),
    ("m.current", offset_of!(M, current)),
    ("m.sched", offset_of!(M, sched)),
    ("hold.retaken", RETAKEN as usize),
];

/// Ms whose thread has ended (invariant 2).
static UNUSED_MS: FreeList<M> = FreeList::new();

impl Reusable for M {
    fn free_link(&self) -> &FreeLink<M> {
        &self.free_link
    }
}

impl M {
    /// Takes an unused M, or makes one.
    fn new(sched: &Arc<Sched>, id: u32) -> &'static M {
        let m = UNUSED_MS.pop_or_leak(M::blank);
        if m.this.get().is_null() {
            m.link_to_all();
        }
        m.reset();
        m.sched.set(Arc::as_ptr(sched));
        m.id.store(id, Ordering::Relaxed);
        m
    }

    /// Adds a new M to [`MS`].
    fn link_to_all(&'static self) {
        let mut before = MS.load(Ordering::Relaxed);
        loop {
            self.made_before.store(before, Ordering::Relaxed);
            let this = std::ptr::from_ref(self).cast_mut();
            // Release: a reader of the list sees a complete M.
            match MS.compare_exchange_weak(before, this, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => before = now,
            }
        }
    }

    /// Makes an M that no thread uses yet. `reset` completes it.
    fn blank() -> M {
        M {
            this: Cell::new(null()),
            in_runtime: AtomicU8::new(1),
            hold: AtomicU8::new(OWNED),
            spinning: Cell::new(false),
            preempt_deferrals: AtomicU32::new(0),
            deferrals_tick: Cell::new(0),
            deferred_since: Cell::new(0),
            grace_until: Cell::new(0),
            in_allocator: AtomicBool::new(false),
            is_starting: Cell::new(true),
            p: Cell::new(None),
            current: Cell::new(None),
            unfinished_switch: Cell::new(UnfinishedSwitch::None),
            chosen: Cell::new(None),
            sp: Cell::new(null_mut()),
            tp: Cell::new(null_mut()),
            sched: Cell::new(null()),
            id: AtomicU32::new(0),
            tid: AtomicU32::new(0),
            sampled_cpu: AtomicU64::new(0),
            signal_mask: Cell::new(0),
            parker: Parker::new(),
            polling: PollSlot::new(),
            handed: Cell::new(None),
            idle_link: Cell::new(None),
            free_link: FreeLink::new(),
            made_before: AtomicPtr::new(null_mut()),
            listed: Cell::new(false),
            idle_since: Cell::new(0),
            without_p: handoff::WithoutP::new(),
            locked: Cell::new(None),
            sample: MSample::new(),
            magazines: [const { UnsafeCell::new(Magazines::new()) }; 2],
        }
    }

    /// Clears what the last thread that used this M has left behind.
    fn reset(&'static self) {
        self.this.set(self);
        self.in_runtime.store(1, Ordering::Relaxed);
        self.hold.store(OWNED, Ordering::Relaxed);
        self.spinning.set(false);
        self.preempt_deferrals.store(0, Ordering::Relaxed);
        self.grace_until.set(0);
        self.is_starting.set(true);
        self.p.set(None);
        self.current.set(None);
        self.unfinished_switch.set(UnfinishedSwitch::None);
        self.chosen.set(None);
        self.handed.set(None);
        self.listed.set(false);
        self.locked.set(None);
    }

    pub(crate) fn sched(&self) -> &'static Sched {
        // SAFETY: the thread owns an Arc for as long as it runs (`start`), and the reference is
        // used only by that thread, or by threads that own an Arc too.
        unsafe { &*self.sched.get() }
    }

    /// Returns the goroutine that runs on it. For sysmon; the answer may be out of date.
    pub(crate) fn current_hint(&self) -> Option<&'static G> {
        // SAFETY: one aligned word in memory that is never freed; it is null or a G, which is never
        // freed either.
        unsafe { self.current.as_ptr().read_volatile() }
    }

    /// Wakes the thread, whether it sleeps in its parker or in the poller. A superfluous call does
    /// no harm.
    pub(crate) fn wake(&self) {
        self.parker.unpark();
        // Pairs with the barrier in `PollSlot::wait_in`: the M sees the token of this unpark, or
        // this thread sees that the M polls.
        full_fence();
        self.polling.wake();
    }

    /// Sleeps in the poller until the time `until`, until a `wake`, or until a descriptor is ready.
    pub(crate) fn sleep_polling(&self, poller: &'static Poller, until: Nanos) -> ReadyBatch {
        // The deadline 0 means: do not sleep.
        self.polling.wait_in(poller.wakeup_epoll(), || {
            poller.sleep_as_idle_poller(if self.parker.take_token() { 0 } else { until.max(1) })
        })
    }

    /// Replaces the P that the M owns. The caller passes the old one on.
    pub(crate) fn set_p(&'static self, p: Option<&'static P>) {
        if let Some(old) = self.p.get() {
            old.holder.store(null_mut(), Ordering::Relaxed);
        }
        if let Some(new) = p {
            // Release: pairs with the Acquire loads of `holder`, so sysmon sees the M's fields.
            new.holder.store(std::ptr::from_ref(self).cast_mut(), Ordering::Release);
        }
        self.p.set(p);
    }

    /// Starts a thread for `sched` that asks for a P by itself. `id` comes from `register_thread`;
    /// on failure the thread is unregistered again. Until the thread asks for a P it is counted in
    /// `Central::starting`.
    ///
    /// Allocates, so the caller owns no P, and no P waits for the caller (sched/mod.rs, rule 2).
    pub(crate) fn start(sched: &Arc<Sched>, id: u32) -> io::Result<()> {
        let m = M::new(sched, id);
        let owned_by_thread = sched.clone();
        let spawned = thread::spawn(
            thread::Name::new(format_args!("trefoil-m{id}")),
            THREAD_STACK_BYTES,
            move || {
                m.thread_main();
                m.put_unused();
                owned_by_thread.unregister_thread();
            },
        );
        spawned.map_err(|e| {
            m.put_unused();
            let limit = match e.raw_os_error() {
                Some(libc::EAGAIN) => "; the limit on processes may be reached (ulimit -u)",
                _ => "",
            };
            let have = sched.threads() - 1;
            let text = format!("cannot start another thread (have {have}): {e}{limit}");
            sched.unregister_thread();
            io::Error::new(e.kind(), text)
        })
    }

    /// The thread has ended, or was not started: a later thread may use this M.
    fn put_unused(&'static self) {
        self.tid.store(0, Ordering::Relaxed);
        UNUSED_MS.push(self);
    }

    /// The main function of the M's thread.
    fn thread_main(&'static self) {
        self.tp.set(arch::thread_pointer());
        self.signal_mask.set(crate::sched::monitor::preempt::init_signal_mask());
        if let Some(realtime) = self.sched().realtime {
            // The helper thread, which started this one, has a higher priority.
            realtime.apply();
        }
        // Release: a signal handler on this thread that sees the tid also sees `tp`
        // (`thread_fs_base`).
        self.tid.store(syscalls::gettid(), Ordering::Release);
        #[cfg(all(debug_assertions, feature = "std"))]
        crate::sched::allocator::OWN_M.set(self);
        // SAFETY: Ms are never freed (invariant 2), and `this` is set.
        unsafe { arch::set_m(std::ptr::from_ref(self)) };
        // By default the kernel may be 50 µs late with a timer.
        syscalls::set_timer_slack(1);
        let _alternate = AlternateStack::install();
        simulation::attach_thread(self.sched());
        sample::attach(self);
        switch::thread_loop(OwnContext(self, PhantomData));
        sample::detach(self);
        simulation::detach_thread();
        // Before the thread's reference to the Sched, which owns the P, is dropped.
        self.sched().hand_off_p_of(self);
        for of in [BlocksOf::Libc, BlocksOf::Wrapped] {
            // SAFETY: this is the M's thread, and no goroutine runs on it any more.
            unsafe { self.magazines(of) }.drain(of);
        }
        // From here on another thread may use the M.
        #[cfg(all(debug_assertions, feature = "std"))]
        crate::sched::allocator::OWN_M.set(null());
    }

    /// Returns the thread pointer of this thread's own context, if it is an M's thread. Safe in
    /// signal handlers.
    pub(crate) fn thread_fs_base() -> Option<usize> {
        // SAFETY: the GS base is null or an M, which is never freed (invariant 2).
        let m = unsafe { arch::inherited_m::<M>().as_ref()? };
        let tid = syscalls::gettid();
        // With another tid the GS base was inherited from the thread that started this one.
        (m.tid.load(Ordering::Relaxed) == tid).then(|| m.tp.get() as usize)
    }
}

/// Proof that this code is inside the runtime on an M that owns a P: the code cannot be preempted,
/// and its M and P stay the same.
///
/// An `Rt` is valid on one thread only, so it is not `Send` ([`NotSend`]). After a switch the code
/// may run on another M and must get a new one ([`Rt::after_switch`]).
///
/// A goroutine that has entered the runtime but may have lost its P has an [`EnteredRuntime`]; the
/// own context of an M's thread has an [`OwnContext`].
#[derive(Clone, Copy)]
pub(crate) struct Rt(&'static M, NotSend);

/// Makes a type neither `Send` nor `Sync`.
type NotSend = PhantomData<*const ()>;

impl Rt {
    /// Enters the runtime on a goroutine. If the M has lost its P, the goroutine first gets another
    /// one, maybe on another M (`handoff::reacquire_p`). Returns None on a plain thread.
    #[inline(always)]
    pub(crate) fn enter() -> Option<Rt> {
        current_g()?;
        // SAFETY: this is a goroutine. It cannot move to another M between finding what it stores
        // to and the store (`arch`).
        unsafe { arch::set_in_runtime::<1>() };
        let entered = EnteredRuntime::on_this_m();
        match entered.rt() {
            Some(rt) => Some(rt),
            None => Some(handoff::reacquire_p(entered)),
        }
    }

    /// As [`Rt::enter`], if the caller is a goroutine of `sched`. A goroutine of another runtime is
    /// like a plain thread here.
    #[inline]
    pub(crate) fn enter_if_of(sched: &Sched) -> Option<Rt> {
        let rt = Rt::enter()?;
        if !std::ptr::eq(rt.sched(), sched) {
            rt.leave_without_yield();
            return None;
        }
        Some(rt)
    }

    /// Returns the `Rt` of the M on which this goroutine was resumed: that M owns a P.
    #[inline(always)]
    pub(crate) fn after_switch() -> Rt {
        // SAFETY: `in_runtime` is 1 and this is an M's thread; Ms are never freed.
        Rt(unsafe { &*arch::current_m::<M>() }, PhantomData)
    }

    /// Leaves the runtime on a goroutine. If the goroutine was asked to stop (`flag::PREEMPT`), it
    /// yields first.
    #[inline(always)]
    pub(crate) fn leave(self) {
        if self.p().flags.load(Ordering::Relaxed) & flag::PREEMPT != 0 {
            switch::preempt_slow(self);
            return;
        }
        self.leave_without_yield();
    }

    /// Leaves the runtime on a goroutine, even if the goroutine was asked to stop.
    #[inline(always)]
    pub(crate) fn leave_without_yield(self) {
        // SAFETY: as in `enter`.
        unsafe { arch::set_in_runtime::<0>() };
    }

    #[inline(always)]
    pub(crate) fn m(self) -> &'static M {
        self.0
    }

    #[inline(always)]
    pub(crate) fn p(self) -> &'static P {
        match self.0.p.get() {
            Some(p) => p,
            None => no_p(),
        }
    }

    /// Calls `f` with the part of the P that only its owner touches. `f` must not call `with_local`
    /// again; debug builds check that.
    #[inline(always)]
    pub(crate) fn with_local<T>(self, f: impl FnOnce(&mut Local) -> T) -> T {
        let p = self.p();
        #[cfg(debug_assertions)]
        let _only_borrow = p.check_only_borrow();
        // SAFETY: an Rt is proof that this thread owns the P and cannot be preempted, and `f`,
        // which does not call this again, has the only borrow.
        f(unsafe { p.local() })
    }

    /// Returns a pseudo-random number.
    #[inline(always)]
    pub(crate) fn random(self) -> u64 {
        self.with_local(|local| local.rng.next())
    }

    /// Returns the id of the P: its index among the runtime's Ps.
    #[inline(always)]
    pub(crate) fn p_id(self) -> u32 {
        self.p().id
    }

    /// Returns whether no other goroutine is runnable on this P or waits in a global queue.
    #[cfg(feature = "std")]
    #[inline]
    pub(crate) fn is_alone(self) -> bool {
        self.p().is_empty() && !self.sched().has_global()
    }

    /// Returns whether a request to the P is pending (`p::flag`). The flags that a simulated P
    /// always has are none.
    #[inline]
    pub(crate) fn has_request(self) -> bool {
        let flags = self.p().flags.load(Ordering::Relaxed);
        flags != 0 && flags & flag::SIMULATED == 0
    }

    #[inline(always)]
    pub(crate) fn sched(self) -> &'static Sched {
        self.0.sched()
    }

    /// Returns the running goroutine. Ends the process on the thread's own context.
    #[inline(always)]
    pub(crate) fn g(self) -> &'static G {
        match self.0.current.get() {
            Some(g) => g,
            None => no_g(),
        }
    }
}

/// Proof that a goroutine is inside the runtime, on an M whose P may have been retaken. It cannot
/// be preempted, and its M stays the same.
#[derive(Clone, Copy)]
pub(crate) struct EnteredRuntime(&'static M, NotSend);

impl EnteredRuntime {
    /// Returns the proof of a goroutine that has just set `in_runtime`.
    #[inline(always)]
    pub(crate) fn on_this_m() -> EnteredRuntime {
        // SAFETY: as in `Rt::after_switch`.
        EnteredRuntime(unsafe { &*arch::current_m::<M>() }, PhantomData)
    }

    #[inline(always)]
    pub(crate) fn m(self) -> &'static M {
        self.0
    }

    pub(crate) fn sched(self) -> &'static Sched {
        self.0.sched()
    }

    /// Returns the running goroutine.
    pub(crate) fn g(self) -> &'static G {
        self.0.current.get().unwrap_or_else(|| no_g())
    }

    /// Returns the `Rt` of this M, if sysmon has not probed or retaken its P.
    #[inline(always)]
    pub(crate) fn rt(self) -> Option<Rt> {
        (self.0.hold.load(Ordering::Relaxed) == OWNED).then_some(Rt(self.0, PhantomData))
    }

    /// Returns the `Rt` after the scheduler's lock has shown that the M owns its P, or has given it
    /// another one.
    pub(crate) fn into_rt(self) -> Rt {
        debug_assert!(self.0.p.get().is_some());
        Rt(self.0, PhantomData)
    }
}

/// Proof that this code runs on the own context of an M's thread. The M may have a P or not.
#[derive(Clone, Copy)]
pub(crate) struct OwnContext(&'static M, NotSend);

impl OwnContext {
    pub(crate) fn m(self) -> &'static M {
        self.0
    }

    pub(crate) fn sched(self) -> &'static Sched {
        self.0.sched()
    }

    /// Returns the `Rt` of this M, if the M owns a P.
    pub(crate) fn rt(self) -> Option<Rt> {
        self.0.p.get().map(|_| Rt(self.0, PhantomData))
    }

    /// As [`OwnContext::rt`], for callers that know that the M owns a P.
    pub(crate) fn expect_rt(self) -> Rt {
        match self.rt() {
            Some(rt) => rt,
            None => no_p(),
        }
    }

    /// Makes the M the owner of `p`.
    pub(crate) fn set_p(self, p: &'static P) -> Rt {
        self.0.set_p(Some(p));
        Rt(self.0, PhantomData)
    }

    /// Counts the M, which owns a P and begins to search for work, as spinning. No waker has made a
    /// claim on spinning for it (`queues/assign.rs`).
    pub(crate) fn start_spinning(self) {
        self.0.spinning.set(true);
        self.sched().idle.start_spinning();
    }

    /// Calls `f`, which may wait for a lock of malloc that a preempted goroutine holds. sysmon may
    /// retake the P meanwhile, so afterwards the M may have no P.
    pub(crate) fn retakable<T>(self, f: impl FnOnce() -> T) -> T {
        debug_assert!(self.0.current.get().is_none());
        // SAFETY: an M's own context never moves to another thread.
        unsafe { arch::set_in_runtime::<0>() };
        let value = f();
        // SAFETY: as above.
        unsafe { arch::set_in_runtime::<1>() };
        if self.0.hold.load(Ordering::Relaxed) != OWNED {
            handoff::ack_retake(self);
        }
        value
    }
}

#[cold]
fn no_p() -> ! {
    crate::sched::fatal(format_args!("runtime entered without a P: a bug in trefoil"))
}

#[cold]
fn no_g() -> ! {
    crate::sched::fatal(format_args!("no goroutine runs on this thread: a bug in trefoil"))
}
