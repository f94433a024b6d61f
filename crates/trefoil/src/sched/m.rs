//! M: an OS thread that runs goroutines.
//!
//! The thread has a context of its own (its stack and TLS): there it searches for work, makes stacks,
//! starts other threads. Goroutines switch among themselves directly and come back to that context
//! only when nothing is at hand (`switch.rs`).
//!
//! Invariants:
//! 1. The GS base of the thread is its M, and M's first word is its own address (`arch`).
//! 2. An M's memory is never freed (`new` reuses it): threads started on a goroutine inherit GS.
//! 3. Cells are touched by the M's own thread only, except `handed`, `listed`, `idle_link` (under the
//!    scheduler's lock) and `spinning` (by who hands it a P, together with that).
//! 4. `in_runtime` is 1 on the thread's own context, and on a goroutine from [`Rt::enter`] to
//!    [`Rt::leave`]. Then the goroutine is not preempted and does not move, so its M and P stay.

use super::g::G;
use super::p::{P, flag};
use super::{Sched, current_g, switch};
use crate::arch;
use crate::mem::Stack;
use crate::sys::altstack::AlternateStack;
use crate::sys::lock::Lock;
use crate::sys::parker::Parker;
use crate::sys::thread;
use std::cell::Cell;
use std::io;
use std::mem::offset_of;
use std::num::NonZeroU64;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Stack of a runtime thread: it runs only the scheduler and thread creation. glibc adds its TLS.
const THREAD_STACK_BYTES: usize = 256 << 10;

/// See the head of the file.
#[repr(C)]
pub(crate) struct M {
    this: Cell<*const M>,
    in_runtime: Cell<u8>,
    pub(crate) spinning: Cell<bool>,
    pub(crate) p: Cell<Option<&'static P>>,
    pub(crate) current: Cell<Option<&'static G>>,
    /// Who was left by the last switch; its successor settles it (`switch::finish_switch`).
    pub(crate) leaving: Cell<Leaving>,
    /// Chosen to run, but it needs a stack that the P's cache did not have.
    pub(crate) chosen: Cell<Option<&'static G>>,
    /// The thread's own context while a goroutine runs.
    pub(crate) sp: Cell<*mut u8>,
    pub(crate) tp: Cell<*mut u8>,
    sched: Cell<*const Sched>,
    pub(crate) id: AtomicU32,
    /// The kernel's id; tells an inherited GS from one's own. 0 when no thread uses this M.
    tid: AtomicU32,
    pub(crate) parker: Parker,
    /// The P that a waker hands over.
    pub(crate) handed: Cell<Option<&'static P>>,
    pub(crate) idle_link: Cell<Option<&'static M>>,
    /// In the list of idle Ms. Under the scheduler's lock.
    pub(crate) listed: Cell<bool>,
}

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
    /// It used up its slice: the tail of the global queue.
    Preempted(&'static G),
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
                in_runtime: Cell::new(1),
                spinning: Cell::new(false),
                p: Cell::new(None),
                current: Cell::new(None),
                leaving: Cell::new(Leaving::Nobody),
                chosen: Cell::new(None),
                sp: Cell::new(null_mut()),
                tp: Cell::new(null_mut()),
                sched: Cell::new(std::ptr::null()),
                id: AtomicU32::new(0),
                tid: AtomicU32::new(0),
                parker: Parker::new(),
                handed: Cell::new(None),
                idle_link: Cell::new(None),
                listed: Cell::new(false),
            }))
        });
        m.this.set(m);
        m.in_runtime.set(1);
        m.spinning.set(false);
        m.p.set(None);
        m.current.set(None);
        m.leaving.set(Leaving::Nobody);
        m.chosen.set(None);
        m.handed.set(None);
        m.listed.set(false);
        m.sched.set(Arc::as_ptr(sched));
        m.id.store(id, Ordering::Relaxed);
        m
    }

    pub(crate) fn sched(&self) -> &'static Sched {
        // SAFETY: the thread keeps an Arc for as long as it runs (`start`), and nobody keeps the
        // reference longer than the thread's own work.
        unsafe { &*self.sched.get() }
    }

    pub(crate) fn set_p(&self, p: Option<&'static P>) {
        if let Some(old) = self.p.get() {
            old.held_by.store(0, Ordering::Relaxed);
        }
        if let Some(new) = p {
            new.held_by.store(self.id.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        }
        self.p.set(p);
    }

    /// Starts a thread for `sched` that begins with `p`. On failure the P is the caller's again.
    /// The thread was admitted as number `id`, and is dismissed again on failure.
    pub(crate) fn start(
        sched: &Arc<Sched>,
        id: u32,
        p: &'static P,
        spinning: bool,
    ) -> io::Result<()> {
        let m = M::new(sched, id);
        m.handed.set(Some(p));
        m.spinning.set(spinning);
        let keep = sched.clone();
        let spawned = thread::spawn(format!("trefoil-m{id}"), THREAD_STACK_BYTES, move || {
            m.thread_main();
            m.retire();
            keep.dismiss_thread();
        });
        match spawned {
            Ok(()) => Ok(()),
            Err(e) => {
                m.handed.set(None);
                m.retire();
                let text = format!(
                    "cannot start another thread (have {}): {e}; \
                     the limit on processes may be reached (ulimit -u)",
                    sched.threads() - 1
                );
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
        self.tid.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Relaxed);
        self.tp.set(arch::thread_pointer());
        // SAFETY: Ms are never freed (invariant 2), and `this` is set.
        unsafe { arch::set_m(std::ptr::from_ref(self)) };
        // Timers are precise: by default the kernel may be 50 µs late.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let _alternate = AlternateStack::install();
        self.set_p(self.handed.take());
        switch::thread_loop(Rt(self));
        // Not later: our reference to the Sched, which owns the P, goes next.
        self.set_p(None);
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

/// Proof that the code runs on a runtime thread, cannot be preempted, and holds a P.
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
        unsafe { arch::store_m_byte::<{ offset_of!(M, in_runtime) }>(1) };
        Some(Rt::after_switch())
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
        unsafe { arch::store_m_byte::<{ offset_of!(M, in_runtime) }>(0) };
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

    /// Calls `f` on the thread's own stack and TLS: for what needs a deep stack (starting a thread).
    /// On that context already, just calls it.
    pub(crate) fn on_thread_stack<T>(self, f: impl FnOnce() -> T) -> T {
        if self.0.current.get().is_none() {
            return f();
        }
        struct Call<F, T>(Option<F>, Option<T>);
        unsafe extern "sysv64" fn call<F: FnOnce() -> T, T>(arg: *mut ()) {
            // SAFETY: the Call below, alive until we return.
            let call = unsafe { &mut *arg.cast::<Call<F, T>>() };
            call.1 = call.0.take().map(|f| f());
        }
        fn entry<F: FnOnce() -> T, T>(_: &Call<F, T>) -> unsafe extern "sysv64" fn(*mut ()) {
            call::<F, T>
        }
        let mut c = Call(Some(f), None);
        let f = entry(&c);
        // A frame below the suspended context of the thread.
        let sp = (self.0.sp.get() as usize & !15) as *mut u8;
        // SAFETY: the thread's context is suspended in `switch` while a goroutine runs on it, and
        // cannot be resumed before we return: we are not preemptible.
        unsafe {
            // Our own thread pointer as it is, not the G's: an ending goroutine's G may be reused.
            let own = arch::thread_pointer();
            arch::call_on(sp, self.0.tp.get(), own, f, (&raw mut c).cast());
        }
        match c.1 {
            Some(value) => value,
            None => unreachable!("the call returned"),
        }
    }
}

#[cold]
fn no_p() -> ! {
    super::fatal(format_args!("runtime entered without a P: a bug in trefoil"))
}
