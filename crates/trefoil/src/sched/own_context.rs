//! A call on an M's own context: on the stack and the thread-local storage of its thread, for the
//! goroutine that runs there. Go's `systemstack` is the same without the storage.
//!
//! For functions of libraries that hold a lock which other threads need, and call code outside of
//! libc while they hold it: the program's allocator (`allocator.rs`), and libc when it starts or
//! releases a thread (`interpose/threads.rs`).
//!
//! - What the function stores in thread-locals belongs to the thread, not to the goroutine.
//! - The goroutine is not preempted, because the thread pointer is not the goroutine's
//!   (`PreemptRefusal::NoGoroutine` in `monitor/preempt.rs`).
//! - It does not park either: to the interposed functions the caller is a plain thread.
//! - The thread may block. Then its P is retaken.

use crate::arch;
use crate::sched::current_g;
use crate::sched::m::M;
#[cfg(feature = "std")]
use crate::sys::fork::is_forked;
use std::ptr::null_mut;

/// On a goroutine: calls `f` with the M that runs it. Meanwhile the goroutine is not preempted and
/// does not move. Its P may have been retaken, so `f` touches only what belongs to the M.
///
/// Returns None on a plain thread, on an M's own context, inside the runtime, and in a signal
/// handler that interrupted the runtime.
#[inline(always)]
pub(crate) fn with_m<T>(f: impl FnOnce(&'static M) -> T) -> Option<T> {
    current_g()?;
    // SAFETY: on a goroutine the GS base is its M.
    unsafe {
        if arch::is_in_runtime() {
            return None;
        }
        // If the goroutine is preempted between this check and the next store, it continues on an M
        // that is not inside the runtime either.
        arch::set_in_runtime::<1>();
        let result = f(&*arch::current_m::<M>());
        arch::set_in_runtime::<0>();
        Some(result)
    }
}

impl M {
    /// Inside [`with_m`]: calls `f` on the thread's own stack and thread-local storage. `f` does not
    /// unwind.
    #[inline(never)]
    pub(crate) fn on_own_context<T>(&self, f: impl FnOnce() -> T) -> T {
        struct Call<F, T> {
            f: Option<F>,
            result: Option<T>,
        }
        extern "C" fn call<F: FnOnce() -> T, T>(call: *mut ()) {
            // SAFETY: the `Call` below, alive until `call_on` returns.
            let call = unsafe { &mut *call.cast::<Call<F, T>>() };
            // SAFETY: the GS base is the M of this thread, and stays so: the thread's own
            // thread-local storage is in use.
            unsafe { arch::set_in_runtime::<0>() };
            call.result = call.f.take().map(|f| f());
            // SAFETY: as above.
            unsafe { arch::set_in_runtime::<1>() };
        }
        fn entry<F: FnOnce() -> T, T>(_: &Call<F, T>) -> extern "C" fn(*mut ()) {
            call::<F, T>
        }
        let mut call = Call { f: Some(f), result: None };
        let (entry, tp) = (entry(&call), self.tp.get());
        // A signal handler stays on the alternate stack (a null `sp` keeps the present stack): if
        // it left that stack, the next signal would start at its top again and overwrite the
        // handler's frames.
        let here = &raw const call as usize;
        let on_goroutine = self.current.get().is_some_and(|g| g.has_on_stack(here));
        let sp = if on_goroutine { self.sp.get() } else { null_mut() };
        self.sample.own_context_from.set(here);
        // SAFETY: a goroutine runs on this thread, so the thread's own context is suspended at
        // `sp`: the stack below is free, and no other code uses its TLS block. The goroutine stays
        // on this thread until the block is loaded, because it is inside the runtime. `f` does
        // not unwind.
        unsafe { arch::call_on(entry, (&raw mut call).cast(), sp, tp) };
        self.sample.own_context_from.set(0);
        match call.result {
            Some(result) => result,
            None => {
                crate::sched::fatal(format_args!("a call on a thread's own stack did not return"))
            }
        }
    }
}

/// Calls `f`; on a goroutine, on the thread's own context. Not in a child of `fork`: there libc may
/// use the thread's stack for a new thread, because it takes the goroutine for the thread.
#[cfg(feature = "std")]
#[inline]
pub(crate) fn on_thread<T>(f: impl FnOnce() -> T) -> T {
    if current_g().is_none() || is_forked() {
        f()
    } else {
        call_by(f, |m, call| m.on_own_context(call))
    }
}

/// Calls `f`; on a goroutine, by `run`, inside [`with_m`].
#[cold]
#[inline(never)]
pub(super) fn call_by<T>(f: impl FnOnce() -> T, run: impl FnOnce(&M, &mut dyn FnMut())) -> T {
    let (mut f, mut result) = (Some(f), None);
    let mut call = || result = f.take().map(|f| f());
    if with_m(|m| run(m, &mut call)).is_none() {
        call();
    }
    match result {
        Some(result) => result,
        None => unreachable!("`call` runs once: inside `with_m`, or after it returned None"),
    }
}
