//! Functions about the OS thread that runs a goroutine: `blocking`, `lock_os_thread`, `no_preempt`.

use crate::sched::g::{G, NoPreemptGuard};
use crate::sched::{Rt, calls, current_g, goroutine::locked};
use std::fmt;
use std::marker::PhantomData;

/// Runs `f`, which blocks its thread for long, without a P.
///
/// The goroutine releases its P to another thread before it calls `f`, so the other goroutines
/// keep running. It acquires a P again when `f` returns or panics. `f` runs on the same goroutine:
/// it has the same stack and the same thread-locals.
///
/// It is never *needed*. When a goroutine blocks in any call of any crate, the runtime notices
/// within some tens of microseconds and takes the P. Use `blocking` around calls that are known to
/// block for long, such as a read from a slow disk, to save that time. Do not run CPU-bound code in
/// it: it runs without a P, beyond the limit of [`procs`](crate::procs). tokio's `spawn_blocking`
/// is different: it moves the closure to another thread, so it needs `Send + 'static`.
///
/// On a plain thread it only calls `f`.
///
/// # Examples
/// ```
/// trefoil::run(|| {
///     let text = trefoil::blocking(|| std::fs::read_to_string("/proc/self/comm")).unwrap();
///     assert!(!text.is_empty());
/// });
/// ```
pub fn blocking<T>(f: impl FnOnce() -> T) -> T {
    calls::blocking(f)
}

/// Locks this goroutine to the OS thread on which it runs, until the guard is dropped, like Go's
/// `runtime.LockOSThread`.
///
/// The goroutine runs on no other thread, and the thread runs no other goroutine. Use it for
/// libraries that keep state per OS thread (OpenGL contexts, some C libraries), and for calls that
/// change the thread itself (namespaces, priorities). Rust's `thread_local!` does not need it: it
/// belongs to the goroutine.
///
/// Locks nest: the goroutine is unlocked when its last guard is dropped. While the goroutine waits,
/// its P runs other goroutines, but each of its wake-ups is a switch between threads: microseconds
/// instead of nanoseconds. If a goroutine ends while it is locked, because its guard was forgotten,
/// its thread ends too.
///
/// On a plain thread it does nothing.
///
/// # Examples
/// ```
/// trefoil::run(|| {
///     let tid = || unsafe { libc::gettid() };
///     let _guard = trefoil::lock_os_thread();
///     let before = tid();
///     trefoil::time::sleep(std::time::Duration::from_millis(1));
///     assert_eq!(before, tid());
/// });
/// ```
#[must_use = "the thread is unlocked when the guard is dropped"]
pub fn lock_os_thread() -> ThreadLock {
    if let Some(rt) = Rt::enter() {
        locked::lock(rt);
        rt.leave();
    }
    ThreadLock { not_send: PhantomData }
}

/// Keeps a goroutine locked to its OS thread; made by [`lock_os_thread`].
///
/// It is not `Send`, because it belongs to the goroutine that made it.
///
/// # Drop
/// Dropping the last guard unlocks the goroutine: it may run on any thread again.
///
/// # Examples
/// ```
/// use trefoil::ThreadLock;
///
/// /// A library that keeps state per OS thread.
/// struct Renderer {
///     _thread: ThreadLock,
/// }
///
/// trefoil::run(|| {
///     let renderer = Renderer { _thread: trefoil::lock_os_thread() };
///     trefoil::yield_now(); // comes back on the same thread
///     drop(renderer);
/// });
/// ```
pub struct ThreadLock {
    /// Keeps the guard on the goroutine that made it.
    not_send: PhantomData<*const ()>,
}

impl Drop for ThreadLock {
    fn drop(&mut self) {
        if let Some(rt) = Rt::enter() {
            locked::unlock(rt);
            rt.leave();
        }
    }
}

impl fmt::Debug for ThreadLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ThreadLock")
    }
}

/// Keeps the runtime from preempting this goroutine, until the guard is dropped.
///
/// Use it for short stretches of code in which a pause of some milliseconds would hurt, such as a
/// spin lock that other goroutines wait for. The goroutine may still park, and the kernel may still
/// preempt its thread. Guards nest. A goroutine that computes for long under such a guard keeps its
/// P from the others.
///
/// On a plain thread it does nothing.
///
/// # Examples
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
///
/// static LOCK: AtomicBool = AtomicBool::new(false);
///
/// trefoil::run(|| {
///     let _guard = trefoil::no_preempt();
///     while LOCK.swap(true, Ordering::Acquire) {
///         std::hint::spin_loop();
///     }
///     // A few instructions: no other goroutine spins for a whole time slice.
///     LOCK.store(false, Ordering::Release);
/// });
/// ```
#[must_use = "preemption is allowed again when the guard is dropped"]
pub fn no_preempt() -> NoPreempt {
    NoPreempt { guard: current_g().map(G::no_preempt_guard) }
}

/// Keeps a goroutine from being preempted; made by [`no_preempt`].
///
/// It is not `Send`, because it belongs to the goroutine that made it.
///
/// # Drop
/// Dropping the last guard allows preemption again. If the time slice of the goroutine has expired
/// meanwhile, the goroutine yields at the drop.
///
/// # Examples
/// ```
/// trefoil::run(|| {
///     let outer = trefoil::no_preempt();
///     let inner = trefoil::no_preempt();
///     drop(outer); // still not preempted
///     drop(inner);
/// });
/// ```
pub struct NoPreempt {
    /// None on a plain thread.
    guard: Option<NoPreemptGuard<'static>>,
}

impl Drop for NoPreempt {
    fn drop(&mut self) {
        let Some(guard) = self.guard.take() else { return };
        let g = guard.g();
        drop(guard);
        if g.no_preempt.get() == 0
            && let Some(rt) = Rt::enter()
        {
            // Yields if the time slice expired under the guard.
            rt.leave();
        }
    }
}

impl fmt::Debug for NoPreempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NoPreempt")
    }
}
