//! M: an OS thread that runs goroutines.
//!
//! The thread has a context of its own (its stack and TLS): there it searches for work and makes stacks.
//! Goroutines switch among themselves directly and come back to that context only when nothing is at
//! hand (`switch.rs`).
//!
//! # In the runtime, and out of it
//! On a goroutine, [`Rt::enter`] and [`Rt::leave`] enclose everything that touches a P. Between them the
//! goroutine is not preempted and does not move. Outside of them user code runs, and the P may be
//! taken away from a thread that blocks in the kernel (`handoff.rs`). `hold` says so:
//!
//! | `hold` | meaning |
//! |---|---|
//! | `OWNED` | the P in `m.p` is ours |
//! | `PROBING` | sysmon looks whether we are blocked; it holds the scheduler's lock meanwhile |
//! | `RETAKEN` | it was taken, or given away by `blocking` |
//!
//! The fast way in is a store and a load: `in_runtime = 1`, `hold == OWNED`? The two may change places; it is
//! the rare taker who sees to it that this does no harm (`handoff.rs`, "the look").
//!
//! Invariants:
//! 1. The GS base of the thread is its M, M's first word is its own address, and `in_runtime` comes right
//!    after it (`arch`).
//! 2. An M's memory is never freed (`new` reuses it): threads started on a goroutine inherit GS.
//! 3. Cells are touched by the M's own thread only, except `handed`, `listed`, the links (under the
//!    scheduler's lock), and `spinning`, `chosen` (by who hands it a P, together with that).
//! 4. `in_runtime` is 1 on the thread's own context, and on a goroutine from [`Rt::enter`] to
//!    [`Rt::leave`]. Then the goroutine is not preempted and does not move, so its M and P stay.
//! 5. `hold` leaves `OWNED` only while `in_runtime` is 0, and only under the scheduler's lock.

use crate::arch;
use crate::mem::Stack;
use crate::mem::magazine::{BlocksOf, Chain, Class, GiveBack, Magazines};
use crate::sched::g::G;
use crate::sched::netpoll::poller::{Poller, ReadyBatch};
use crate::sched::p::{P, flag};
use crate::sched::{Sched, current_g, monitor::handoff, switch};
use crate::shim::full_fence;
use crate::sys::altstack::AlternateStack;
use crate::sys::clock::Nanos;
use crate::sys::epoll::PollSlot;
use crate::sys::lock::Lock;
use crate::sys::parker::Parker;
use crate::sys::thread;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::mem::offset_of;
use std::num::NonZeroU64;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

/// Stack of a runtime thread: it runs only the scheduler and makes stacks. `thread::spawn` adds its TLS.
const THREAD_STACK_BYTES: usize = 256 << 10;

/// Values of `hold`; see the head of the file.
pub(crate) const OWNED: u8 = 0;
pub(crate) const PROBING: u8 = 1;
pub(crate) const RETAKEN: u8 = 2;

/// See the head of the file.
#[repr(C)]
pub(crate) struct M {
    this: Cell<*const M>,
    pub(crate) in_runtime: AtomicU8,
    pub(crate) hold: AtomicU8,
    pub(crate) spinning: Cell<bool>,
    /// How often a preemption was put off because the goroutine was inside libc.
    pub(crate) preempt_deferrals: AtomicU32,
    /// The tick of those.
    pub(crate) deferrals_tick: Cell<u32>,
    /// In a runtime that ends: the thread's CPU time from which on the running goroutine may be stopped by a signal, 0 at
    /// first (`stop.rs`).
    pub(crate) grace_until: Cell<Nanos>,
    /// It runs the program's allocator on its own context, for a goroutine.
    pub(crate) in_allocator: AtomicBool,
    /// Its thread has not asked for a P yet: it is among `Central::starting`.
    pub(crate) arriving: Cell<bool>,
    pub(crate) p: Cell<Option<&'static P>>,
    pub(crate) current: Cell<Option<&'static G>>,
    /// Who was left by the last switch; its successor settles it (`switch::finish_switch`).
    pub(crate) leaving: Cell<Leaving>,
    /// Chosen to run, but only the thread's own context can start it: it needs a stack, or is locked to
    /// a thread.
    pub(crate) chosen: Cell<Option<&'static G>>,
    /// The thread's own context while a goroutine runs.
    pub(crate) sp: Cell<*mut u8>,
    pub(crate) tp: Cell<*mut u8>,
    sched: Cell<*const Sched>,
    pub(crate) id: AtomicU32,
    /// The kernel's id; tells an inherited GS from one's own. 0 when no thread uses this M.
    pub(crate) tid: AtomicU32,
    /// The thread's signal mask when it started: user code that runs under another one is not preempted.
    pub(crate) signal_mask: Cell<u64>,
    pub(crate) parker: Parker,
    /// Where it sleeps in its runtime's poller, instead of in its parker.
    pub(crate) polling: PollSlot,
    /// The P that a waker hands over.
    pub(crate) handed: Cell<Option<&'static P>>,
    pub(crate) idle_link: Cell<Option<&'static M>>,
    /// In the list of idle Ms. Under the scheduler's lock.
    pub(crate) listed: Cell<bool>,
    /// Neighbours in the list of strays (`handoff.rs`), and the CPU time it had used when it was last looked
    /// at. Under the scheduler's lock.
    pub(crate) without_p: handoff::WithoutP,
    /// The goroutine that is locked to this thread.
    pub(crate) locked: Cell<Option<&'static G>>,
    /// Free blocks of the program's allocators, indexed by `BlocksOf`.
    magazines: [UnsafeCell<Magazines>; 2],
}

const _: () = assert!(offset_of!(M, in_runtime) == arch::M_IN_RUNTIME);

// SAFETY: invariant 3.
unsafe impl Sync for M {}
// SAFETY: nothing in it is tied to the thread that made it.
unsafe impl Send for M {}

/// What became of the goroutine that a switch left.
pub(crate) enum Leaving {
    Nobody,
    /// It waits for a `ready`.
    Parked(&'static G),
    /// It goes to the tail of the local queue.
    Yielded(&'static G),
    /// Its slice was used up, but not by itself alone: the tail of the local ring for goroutines like it.
    Displaced(&'static G),
    /// It used up its slice, or gives way to those who did: behind them.
    Preempted(&'static G),
    /// It came back from a blocking call and there is no P for it: the tail of the global queue.
    WithoutP(&'static G),
    /// It ended; this was its stack. The G itself may already live another life.
    Dead(Stack),
}

/// Ms whose thread has ended (invariant 2).
static UNUSED: Lock<Option<&'static M>> = Lock::new(None);

impl M {
    fn new(sched: &Arc<Sched>, id: u32) -> &'static M {
        let reused = {
            let mut unused = UNUSED.lock();
            let m = *unused;
            if let Some(m) = m {
                *unused = m.idle_link.take();
            }
            m
        };
        let m: &'static M = reused.unwrap_or_else(|| {
            Box::leak(Box::new(M {
                this: Cell::new(std::ptr::null()),
                in_runtime: AtomicU8::new(1),
                hold: AtomicU8::new(OWNED),
                spinning: Cell::new(false),
                preempt_deferrals: AtomicU32::new(0),
                deferrals_tick: Cell::new(0),
                grace_until: Cell::new(0),
                in_allocator: AtomicBool::new(false),
                arriving: Cell::new(true),
                p: Cell::new(None),
                current: Cell::new(None),
                leaving: Cell::new(Leaving::Nobody),
                chosen: Cell::new(None),
                sp: Cell::new(null_mut()),
                tp: Cell::new(null_mut()),
                sched: Cell::new(std::ptr::null()),
                id: AtomicU32::new(0),
                tid: AtomicU32::new(0),
                signal_mask: Cell::new(0),
                parker: Parker::new(),
                polling: PollSlot::new(),
                handed: Cell::new(None),
                idle_link: Cell::new(None),
                listed: Cell::new(false),
                without_p: handoff::WithoutP::new(),
                locked: Cell::new(None),
                magazines: [const { UnsafeCell::new(Magazines::new()) }; 2],
            }))
        });
        m.this.set(m);
        m.in_runtime.store(1, Ordering::Relaxed);
        m.hold.store(OWNED, Ordering::Relaxed);
        m.spinning.set(false);
        m.preempt_deferrals.store(0, Ordering::Relaxed);
        m.grace_until.set(0);
        m.arriving.set(true);
        m.p.set(None);
        m.current.set(None);
        m.leaving.set(Leaving::Nobody);
        m.chosen.set(None);
        m.handed.set(None);
        m.listed.set(false);
        m.locked.set(None);
        m.sched.set(Arc::as_ptr(sched));
        m.id.store(id, Ordering::Relaxed);
        m
    }

    pub(crate) fn sched(&self) -> &'static Sched {
        // SAFETY: the thread keeps an Arc for as long as it runs (`start`), and nobody keeps the
        // reference longer than the thread's own work.
        unsafe { &*self.sched.get() }
    }

    /// Wakes the thread, wherever it sleeps. It may be for nothing.
    pub(crate) fn wake(&self) {
        self.parker.unpark();
        // The thread sees the note, or we see where it sleeps (`sleep_polling`).
        full_fence();
        self.polling.wake();
    }

    /// Sleeps until `until`, a wake, or until descriptors are ready.
    pub(crate) fn sleep_polling(&self, poller: &'static Poller, until: Nanos) -> ReadyBatch {
        self.polling.wait_in(poller.wakeup_epoll(), || {
            poller.sleep_as_idle_poller(if self.parker.take_token() { 0 } else { until.max(1) })
        })
    }

    pub(crate) fn set_p(&'static self, p: Option<&'static P>) {
        if let Some(old) = self.p.get() {
            old.holder.store(null_mut(), Ordering::Relaxed);
        }
        if let Some(new) = p {
            // Release: sysmon, which finds this M here, sees it as it is.
            new.holder.store(std::ptr::from_ref(self).cast_mut(), Ordering::Release);
        }
        self.p.set(p);
    }

    /// Starts a thread for `sched`, which looks for a P by itself. It was admitted as number `id`, and is
    /// dismissed again on failure. Allocates: not with a P in hand, nor with one waiting for it.
    /// It is among `Central::starting` until it asks for a P.
    pub(crate) fn start(sched: &Arc<Sched>, id: u32) -> io::Result<()> {
        let m = M::new(sched, id);
        let keep = sched.clone();
        let spawned = thread::spawn(
            thread::Name::new(format_args!("trefoil-m{id}")),
            THREAD_STACK_BYTES,
            move || {
                m.thread_main();
                m.retire();
                keep.dismiss_thread();
            },
        );
        match spawned {
            Ok(()) => Ok(()),
            Err(e) => {
                m.retire();
                let limit = match e.raw_os_error() {
                    Some(libc::EAGAIN) => "; the limit on processes may be reached (ulimit -u)",
                    _ => "",
                };
                let have = sched.threads() - 1;
                let text = format!("cannot start another thread (have {have}): {e}{limit}");
                sched.dismiss_thread();
                Err(io::Error::new(e.kind(), text))
            }
        }
    }

    /// The thread is done with this M.
    fn retire(&'static self) {
        self.tid.store(0, Ordering::Relaxed);
        let mut unused = UNUSED.lock();
        self.idle_link.set(unused.take());
        *unused = Some(self);
    }

    fn thread_main(&'static self) {
        self.tp.set(arch::thread_pointer());
        self.signal_mask.set(crate::sched::monitor::preempt::init_signal_mask());
        if let Some(realtime) = self.sched().realtime {
            // The helper thread that started it is above it.
            realtime.apply();
        }
        self.tid.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Release);
        #[cfg(all(debug_assertions, feature = "std"))]
        OWN_M.set(self);
        // SAFETY: Ms are never freed (invariant 2), and `this` is set.
        unsafe { arch::set_m(std::ptr::from_ref(self)) };
        // Timers are precise: by default the kernel may be 50 µs late.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let _alternate = AlternateStack::install();
        switch::thread_loop(Rt(self));
        // Not later: our reference to the Sched, which owns the P, goes next.
        self.sched().leave_p(self);
        for of in [BlocksOf::Libc, BlocksOf::Wrapped] {
            // SAFETY: this is the M's thread, and no goroutine runs on it any more.
            unsafe { self.magazines(of) }.drain(of);
        }
        // Another thread may use the M from here on.
        #[cfg(all(debug_assertions, feature = "std"))]
        OWN_M.set(std::ptr::null());
    }

    /// This thread's own thread pointer, if it is a runtime thread. Safe in signal handlers.
    pub(crate) fn thread_fs_base() -> Option<usize> {
        // SAFETY: GS is null or an M, which is never freed (invariant 2); its tid tells whether it
        // is ours.
        let m = unsafe { arch::inherited_m::<M>().as_ref()? };
        let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
        (m.tid.load(Ordering::Relaxed) == tid).then(|| m.tp.get() as usize)
    }
}

#[cfg(all(debug_assertions, feature = "std"))]
thread_local! {
    /// In a runtime thread's own thread-local storage: its M. Null elsewhere.
    static OWN_M: Cell<*const M> = const { Cell::new(std::ptr::null()) };
}

/// Debug builds: ends the process if the runtime allocates where it must not (`sched/mod.rs`, rule 2): on a goroutine
/// inside the runtime, or on a thread's own context with a P in hand that cannot be retaken.
#[cfg(all(debug_assertions, feature = "std"))]
pub(crate) fn assert_may_allocate() {
    let here = 0u8;
    let inside = match current_g() {
        Some(g) => {
            // SAFETY: on a goroutine GS is its M.
            let in_runtime = unsafe { arch::is_in_runtime() };
            // A signal handler, on another stack, may have interrupted the runtime.
            in_runtime && g.has_on_stack(&raw const here as usize)
        }
        None => {
            // SAFETY: null or the running thread's own M; Ms are never freed.
            let own = unsafe { OWN_M.get().as_ref() };
            own.is_some_and(|m| m.in_runtime.load(Ordering::Relaxed) != 0 && m.p.get().is_some())
        }
    };
    // Where each block takes a thread of glibc's, the rule is not kept.
    if inside && !crate::mem::tls::is_by_pthread() {
        crate::sched::fatal(format_args!(
            "the runtime allocates while it holds a P: a bug in trefoil"
        ));
    }
}

/// On a goroutine: calls `f` with the M that runs it. Meanwhile the goroutine is not preempted and does not move; but
/// its P may have been retaken, so `f` touches only what belongs to the M.
///
/// None: this is a plain thread, an M's own context, the runtime itself, or a signal handler that interrupted it.
#[inline(always)]
pub(crate) fn with_m<T>(f: impl FnOnce(&'static M) -> T) -> Option<T> {
    current_g()?;
    // SAFETY: on a goroutine, so GS is its M.
    unsafe {
        if arch::is_in_runtime() {
            return None;
        }
        // Preempted between the two instructions the goroutine finds another M, which is not in the runtime either.
        arch::set_in_runtime::<1>();
        let result = f(&*arch::current_m::<M>());
        arch::set_in_runtime::<0>();
        Some(result)
    }
}

impl M {
    /// One set of its magazines.
    ///
    /// # Safety
    /// Called inside [`with_m`], for the M that it gave, or by the M's thread on its own context; no other borrow of the
    /// set is alive.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn magazines(&self, of: BlocksOf) -> &mut Magazines {
        // SAFETY: the caller's: only the M's thread comes here, one at a time (magazine.rs, invariant 3).
        unsafe { &mut *self.magazines[of as usize].get() }
    }

    /// Inside [`with_m`], where a magazine is empty: fills it with blocks that `alloc` makes on the thread's own context, and
    /// returns one more; null if there is no memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn refill(
        &self,
        of: BlocksOf,
        class: Class,
        alloc: impl Fn() -> *mut u8,
    ) -> *mut u8 {
        // SAFETY: inside `with_m` (the caller's), and the borrow ends here.
        let n = unsafe { self.magazines(of) }.refill_size(class);
        let (first, chain) = self.on_own_context(|| {
            let mut chain = Chain::EMPTY;
            for _ in 1..n {
                let block = alloc();
                if block.is_null() {
                    break;
                }
                // SAFETY: ours, of at least 16 bytes.
                unsafe { chain.push(block) };
            }
            (alloc(), chain)
        });
        // SAFETY: as above.
        let magazines = unsafe { self.magazines(of) };
        magazines.add(class, chain);
        // There may be no memory left for one more, but for those.
        if first.is_null() { magazines.pop(class).unwrap_or(null_mut()) } else { first }
    }

    /// Inside [`with_m`], where a magazine is over its capacity: gives the older half back to the allocator.
    #[cold]
    #[inline(never)]
    pub(crate) fn give_back_surplus(&self, of: BlocksOf, class: Class, give_back: GiveBack) {
        // SAFETY: inside `with_m` (the caller's), and the borrow ends here.
        let mut surplus = unsafe { self.magazines(of) }.take_surplus(class);
        self.on_own_context(|| {
            while let Some(block) = surplus.pop() {
                // SAFETY: a free block of this class and allocator (magazine.rs, invariants 1 and 2).
                unsafe { give_back(block, class) };
            }
        });
    }

    /// Inside [`with_m`]: calls `f` on the thread's own stack and thread-local storage, as Go calls its allocator on the
    /// system stack. What `f` leaves in thread-locals is the thread's, not the goroutine's.
    ///
    /// Meanwhile the goroutine is not preempted, because its thread-local storage is not the one in use
    /// (`preempt.rs`, 2); but the thread may block, and its P may be retaken.
    #[inline(never)]
    pub(crate) fn on_own_context<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Call<F, T> {
            f: Option<F>,
            result: Option<T>,
        }
        extern "sysv64" fn call<F: FnOnce() -> T, T>(call: *mut ()) {
            // SAFETY: the `Call` below, alive until `call_on` returns.
            let call = unsafe { &mut *call.cast::<Call<F, T>>() };
            // SAFETY: GS is the M of this thread, which stays: its own thread-local storage is in use.
            unsafe { arch::set_in_runtime::<0>() };
            call.result = call.f.take().map(|f| f());
            // SAFETY: as above.
            unsafe { arch::set_in_runtime::<1>() };
        }
        fn entry<F: FnOnce() -> T, T>(_: &Call<F, T>) -> extern "sysv64" fn(*mut ()) {
            call::<F, T>
        }
        let mut call = Call { f: Some(f), result: None };
        let (entry, tp) = (entry(&call), self.tp.get());
        // A signal handler stays on the alternate stack: if it left it, the next signal would begin there anew, over it.
        let here = &raw const call as usize;
        let on_goroutine = self.current.get().is_some_and(|g| g.has_on_stack(here));
        let sp = if on_goroutine { self.sp.get() } else { null_mut() };
        // Relaxed: a hint for sysmon.
        self.in_allocator.store(true, Ordering::Relaxed);
        // SAFETY: a goroutine runs on this thread, so the thread's own context is suspended at `sp`: the stack below is
        // free, and its TLS block is in nobody's use. The goroutine stays on this thread until the block is loaded,
        // because it is inside the runtime. Allocators do not unwind.
        unsafe { arch::call_on(entry, (&raw mut call).cast(), sp, tp) };
        self.in_allocator.store(false, Ordering::Relaxed);
        match call.result {
            Some(result) => result,
            None => {
                crate::sched::fatal(format_args!("a call on a thread's own stack did not return"))
            }
        }
    }
}

/// Proof that the code runs on a runtime thread, cannot be preempted, and holds a P (on the thread's own
/// context: maybe).
///
/// Not `Send`: it is about here and now. After a switch it must be asked for again
/// ([`Rt::after_switch`]).
#[derive(Clone, Copy)]
pub(crate) struct Rt(&'static M);

impl Rt {
    /// Goroutine → runtime. None on a plain thread.
    #[inline(always)]
    pub(crate) fn enter() -> Option<Rt> {
        current_g()?;
        // SAFETY: on a goroutine, so GS is the M. One instruction: no preemption in between.
        unsafe { arch::set_in_runtime::<1>() };
        let rt = Rt::after_switch();
        if rt.0.hold.load(Ordering::Relaxed) != OWNED {
            return Some(handoff::reacquire_p(rt));
        }
        Some(rt)
    }

    /// The runtime, on whatever thread this context was resumed.
    #[inline(always)]
    pub(crate) fn after_switch() -> Rt {
        // SAFETY: `in_runtime` is set and we are on a runtime thread; Ms are never freed.
        Rt(unsafe { &*arch::current_m::<M>() })
    }

    /// Runtime → goroutine. Yields if the time slice is used up.
    #[inline(always)]
    pub(crate) fn leave(self) {
        if self.p().flags.load(Ordering::Relaxed) & flag::PREEMPT != 0 {
            switch::preempt_slow(self);
            return;
        }
        self.leave_now();
    }

    /// Runtime → goroutine, whatever was asked.
    #[inline(always)]
    pub(crate) fn leave_now(self) {
        // SAFETY: as in `enter`.
        unsafe { arch::set_in_runtime::<0>() };
    }

    /// On the thread's own context: `f` may wait for goroutines (for malloc's locks), so the P may be
    /// taken meanwhile. Afterwards it may be gone.
    pub(crate) fn retakable<T>(self, f: impl FnOnce() -> T) -> T {
        debug_assert!(self.0.current.get().is_none());
        self.leave_now();
        let value = f();
        // SAFETY: a runtime thread's own context never moves.
        unsafe { arch::set_in_runtime::<1>() };
        if self.0.hold.load(Ordering::Relaxed) != OWNED {
            handoff::ack_retake(self);
        }
        value
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

    /// Returns the number of the P, for callers above `sched` that keep a shard per P.
    #[inline]
    pub(crate) fn p_id(self) -> u32 {
        self.p().id
    }

    #[inline(always)]
    pub(crate) fn sched(self) -> &'static Sched {
        self.0.sched()
    }

    /// The running goroutine. Only on one.
    #[inline(always)]
    pub(crate) fn g(self) -> &'static G {
        match self.0.current.get() {
            Some(g) => g,
            None => no_p(),
        }
    }
}

#[cold]
fn no_p() -> ! {
    crate::sched::fatal(format_args!("runtime entered without a P: a bug in trefoil"))
}
