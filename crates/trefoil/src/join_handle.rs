//! `JoinHandle`: waits for a goroutine and takes its result.

use crate::sched::g::G;
use crate::sched::goroutine::body::Body;
use crate::sched::goroutine::join::Detached;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Rt, switch, wait};
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;

/// The handle's side of a join cell (`sched/goroutine/join.rs`): the right to a goroutine's result.
/// `JoinHandle` and `ScopedJoinHandle` wrap it.
pub(crate) struct Join<T> {
    g: &'static G,
    result: PhantomData<T>,
}

// SAFETY: it is the right to take a T that another thread made. The other fields of the G are
// atomic, or do not change while a handle exists.
unsafe impl<T: Send> Send for Join<T> {}
// SAFETY: through `&Join` only the id, the name and `is_finished` are reachable.
unsafe impl<T> Sync for Join<T> {}

impl<T> Join<T> {
    /// # Safety
    /// `g` was just spawned with result type `T`, and this is its only handle.
    pub(crate) unsafe fn new(g: &'static G) -> Self {
        Join { g, result: PhantomData }
    }

    /// Waits for the goroutine to end. Returns its result, or the payload of its panic, and frees
    /// the G.
    pub(crate) fn join(self) -> std::thread::Result<T> {
        let g = ManuallyDrop::new(self).g;
        if !g.join.is_done() {
            wait::block(WaitReason::Join, |waiter| g.join.wait(waiter));
        }
        // SAFETY: the goroutine has ended, so the handle owns the result and the G (join.rs,
        // invariant 1).
        let result = unsafe { Body::take::<T>(g) };
        free(g);
        result
    }

    pub(crate) fn g(&self) -> &'static G {
        self.g
    }

    /// Gives up the handle. Returns None if the closure has not returned yet: then the goroutine
    /// drops its own result. Otherwise drops the result and returns whether the closure panicked.
    pub(crate) fn detach(self) -> Option<bool> {
        let g = ManuallyDrop::new(self).g;
        detach(g)
    }
}

/// See [`Join::detach`].
fn detach(g: &'static G) -> Option<bool> {
    let detached = g.join.detach();
    if detached == Detached::Running {
        return None;
    }
    // SAFETY: the closure has returned, so the handle owns the result (join.rs, invariant 1).
    let panicked = unsafe { (g.body.get().drop_result)(g) };
    // If the goroutine has not ended yet, it frees the G itself.
    if detached == Detached::Done || !g.join.emptied() {
        free(g);
    }
    Some(panicked)
}

impl<T> Drop for Join<T> {
    fn drop(&mut self) {
        let _ = detach(self.g);
    }
}

/// Frees the name of the goroutine, which has ended, and puts its G into a free list.
fn free(g: &'static G) {
    g.clear_name();
    match Rt::enter() {
        Some(rt) => {
            switch::free_g(rt, g);
            rt.leave();
        }
        None => switch::free_g_outside(g),
    }
}

/// The right to wait for a goroutine and to take its result.
///
/// [`go`](crate::go) returns it. It can be sent to other goroutines and threads, also of other
/// runtimes.
///
/// ```
/// trefoil::run(|| {
///     let handle = trefoil::go(|| "done");
///     assert_eq!(handle.join().unwrap(), "done");
/// });
/// ```
///
/// # Drop
/// Dropping the handle detaches the goroutine: it continues to run, and its result, or the payload
/// of its panic, is dropped.
///
/// ```
/// trefoil::run(|| {
///     let (tx, rx) = trefoil::chan::bounded(1);
///     drop(trefoil::go(move || tx.send(42)));
///     assert_eq!(rx.recv(), Ok(42)); // The goroutine has run nevertheless.
/// });
/// ```
pub struct JoinHandle<T> {
    inner: Join<T>,
}

impl<T> JoinHandle<T> {
    /// Waits for the goroutine to end and returns its result.
    ///
    /// A caller that is a goroutine parks; a plain thread blocks. The thread-locals of the
    /// goroutine have been dropped when `join` returns.
    ///
    /// If the runtime of the goroutine was [dropped](crate::Runtime#drop) before the goroutine
    /// ended, `join` may never return.
    ///
    /// ```
    /// let h = trefoil::go(|| -> i32 { panic!("no luck") });
    /// let payload = h.join().unwrap_err();
    /// assert_eq!(payload.downcast_ref(), Some(&"no luck"));
    /// ```
    ///
    /// # Errors
    /// Returns the payload of the panic if the goroutine panicked.
    pub fn join(self) -> std::thread::Result<T> {
        self.inner.join()
    }

    /// Returns true if the goroutine has ended, so that [`join`](Self::join) returns at once.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let h = trefoil::go(|| ());
    ///     while !h.is_finished() {
    ///         trefoil::yield_now();
    ///     }
    /// });
    /// ```
    pub fn is_finished(&self) -> bool {
        self.inner.g().join.is_done()
    }

    /// Returns the goroutine's id. A runtime never uses an id twice.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let handle = trefoil::go(trefoil::id);
    ///     let id = handle.id();
    ///     assert_eq!(handle.join().unwrap(), id);
    /// });
    /// ```
    pub fn id(&self) -> u64 {
        self.inner.g().id()
    }

    /// Returns the name that [`Builder::name`](crate::Builder::name) has set.
    pub fn name(&self) -> Option<&str> {
        self.inner.g().name()
    }
}

impl<T> JoinHandle<T> {
    pub(crate) fn from_join(inner: Join<T>) -> Self {
        JoinHandle { inner }
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").field("id", &self.id()).field("name", &self.name()).finish()
    }
}
