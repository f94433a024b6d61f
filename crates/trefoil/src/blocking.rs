//! The thread beneath a goroutine: `blocking`, `lock_os_thread`, `no_preempt`.

use crate::sched::{Rt, current_g, handoff, locked};
use std::fmt;
use std::marker::PhantomData;

/// Runs `f`, which is known to block its thread for long, without keeping a P: another thread goes on with
/// the other goroutines at once.
///
/// It is never *needed*: when a goroutine blocks in any call of any crate, the runtime notices within some
/// tens of microseconds and does the same. This saves those. `f` stays on the goroutine: same stack, same
/// thread-locals. Code that computes belongs elsewhere: here it would be one more than
/// [`procs`](crate::procs) say.
///
/// On a plain thread it just calls `f`.
///
/// ```
/// trefoil::run(|| {
///     let text = trefoil::blocking(|| std::fs::read_to_string("/proc/self/comm")).unwrap();
///     assert!(!text.is_empty());
/// });
/// ```
pub fn blocking<T>(f: impl FnOnce() -> T) -> T {
    /// Comes back also when `f` panics.
    struct Back;
    impl Drop for Back {
        fn drop(&mut self) {
            if let Some(rt) = Rt::enter() {
                rt.leave();
            }
        }
    }
    match Rt::enter() {
        Some(rt) => {
            handoff::give_p_away(rt);
            let _back = Back;
            f()
        }
        None => f(),
    }
}

/// Ties this goroutine and the OS thread it runs on together until the guard is dropped: it runs on no other
/// thread, and the thread runs nothing else. For libraries that keep state by thread (OpenGL contexts, some
/// C libraries) and for calls that change the thread itself (namespaces, priorities).
///
/// Locks nest. While the goroutine waits, its P serves others, but each of its wake-ups is a switch of
/// threads: microseconds instead of nanoseconds. A goroutine that ends while it is locked (its guard was
/// forgotten) takes its thread with it.
///
/// On a plain thread there is nothing to do.
///
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

/// The guard of [`lock_os_thread`].
pub struct ThreadLock {
    /// It is about the goroutine that made it.
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

/// Until the guard is dropped this goroutine is not preempted: for short stretches of code that must not be
/// interrupted by others. It may still park, and its thread is still the kernel's to schedule.
///
/// A goroutine that computes for long under such a guard keeps its P from the others.
///
/// ```
/// trefoil::run(|| {
///     let _guard = trefoil::no_preempt();
///     // every few microseconds count here
/// });
/// ```
#[must_use = "preemption is allowed again when the guard is dropped"]
pub fn no_preempt() -> NoPreempt {
    if let Some(g) = current_g() {
        g.no_preempt.set(g.no_preempt.get() + 1);
    }
    NoPreempt { not_send: PhantomData }
}

/// The guard of [`no_preempt`].
pub struct NoPreempt {
    /// It is about the goroutine that made it.
    not_send: PhantomData<*const ()>,
}

impl Drop for NoPreempt {
    fn drop(&mut self) {
        if let Some(g) = current_g() {
            g.no_preempt.set(g.no_preempt.get() - 1);
            if g.no_preempt.get() == 0
                && let Some(rt) = Rt::enter()
            {
                // What was put off.
                rt.leave();
            }
        }
    }
}

impl fmt::Debug for NoPreempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NoPreempt")
    }
}
