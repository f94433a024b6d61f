//! Starting goroutines and waiting for them: `go`, `Builder`, `JoinHandle`.

use crate::runtime;
use crate::sched::g::G;
use crate::sched::join::Detached;
use crate::sched::reason::WaitReason;
use crate::sched::spawn::{Place, Spec, spawn};
use crate::sched::task::Body;
use crate::sched::{Rt, current_g, switch, wait};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::panic::Location;

/// Starts `f` as a goroutine.
///
/// The bounds are those of [`std::thread::spawn`], and the goroutine is to its code what a thread is: it
/// has a stack and thread-locals of its own. It costs a few hundred nanoseconds and, once it has run, two
/// pages of memory.
///
/// Called outside of any runtime, it starts the process-wide default one.
///
/// ```
/// trefoil::run(|| {
///     let handles: Vec<_> = (0..1000u64).map(|i| trefoil::go(move || i * i)).collect();
///     let sum: u64 = handles.into_iter().map(|h| h.join().unwrap()).sum();
///     assert_eq!(sum, 332_833_500);
/// });
/// ```
///
/// # Panics
/// When no memory is left for another goroutine. [`Builder::go`] returns an error instead.
#[track_caller]
#[inline]
pub fn go<F, T>(f: F) -> JoinHandle<T>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    match start(Spec::plain(), f) {
        Ok(handle) => handle,
        Err(e) => cannot_start(&e),
    }
}

#[cold]
#[track_caller]
fn cannot_start(e: &io::Error) -> ! {
    panic!("cannot start a goroutine: {e}")
}

#[inline]
fn start<F, T>(spec: Spec, f: F) -> io::Result<JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    // SAFETY: F and T are Send and 'static.
    let g = unsafe {
        if current_g().is_some() {
            spawn(Place::Here, spec, f)?
        } else {
            spawn(Place::In(runtime::default_sched()?), spec, f)?
        }
    };
    // SAFETY: the fresh goroutine's join cell has one side for a handle, and T is its result.
    Ok(JoinHandle { inner: unsafe { Join::new(g) } })
}

/// What a panic in a goroutine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanicMode {
    /// It stays in the goroutine and comes out of [`JoinHandle::join`], as in std. The default.
    Unwind,
    /// It ends the process with exit code 2, as in Go.
    Abort,
}

/// A goroutine's settings, like [`std::thread::Builder`].
///
/// ```
/// trefoil::run(|| {
///     let h = trefoil::Builder::new().name("deep").stack_size(4 << 20).go(|| 7).unwrap();
///     assert_eq!(h.name(), Some("deep"));
///     assert_eq!(h.join().unwrap(), 7);
/// });
/// ```
#[derive(Debug, Default)]
#[must_use = "a Builder does nothing until `go`"]
pub struct Builder {
    name: Option<Box<str>>,
    stack_size: Option<usize>,
    panic: Option<PanicMode>,
}

impl Builder {
    /// The defaults: no name, the runtime's stack size and panic mode.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// A name for panics, overflows and dumps.
    pub fn name(mut self, name: impl Into<String>) -> Builder {
        self.name = Some(name.into().into_boxed_str());
        self
    }

    /// Virtual size of the stack in bytes, rounded up to a power of two, 64 KiB to 1 GiB. Only what is
    /// used takes memory.
    pub fn stack_size(mut self, bytes: usize) -> Builder {
        self.stack_size = Some(bytes);
        self
    }

    /// What a panic in this goroutine does.
    pub fn panic(mut self, mode: PanicMode) -> Builder {
        self.panic = Some(mode);
        self
    }

    fn spec(self, created_at: &'static Location<'static>) -> Spec {
        Spec {
            name: self.name,
            stack_size: self.stack_size,
            abort_on_panic: self.panic.map(|p| p == PanicMode::Abort),
            created_at,
            ..Spec::plain()
        }
    }

    /// Starts `f` with these settings.
    ///
    /// # Errors
    /// When no memory or address space is left for a stack, or its size is out of range. The message
    /// says what to do.
    #[track_caller]
    pub fn go<F, T>(self, f: F) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        start(self.spec(Location::caller()), f)
    }

    /// Starts `f` with these settings in a [`scope`](crate::scope()).
    ///
    /// # Errors
    /// As [`Builder::go`].
    #[track_caller]
    pub fn go_scoped<'scope, 'env, F, T>(
        self,
        scope: &'scope crate::Scope<'scope, 'env>,
        f: F,
    ) -> io::Result<crate::ScopedJoinHandle<'scope, T>>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        scope.start(self.spec(Location::caller()), f)
    }
}

/// One side of a join cell: the right to a goroutine's result. `JoinHandle` and `ScopedJoinHandle` are
/// faces of it.
pub(crate) struct Join<T> {
    g: &'static G,
    result: PhantomData<T>,
}

// SAFETY: it is the right to take a T that another thread made; the rest of the G is atomic or immutable
// while a handle exists.
unsafe impl<T: Send> Send for Join<T> {}
// SAFETY: `&Join` gives only id, name and is_finished.
unsafe impl<T> Sync for Join<T> {}

impl<T> Join<T> {
    /// # Safety
    /// `g` was just spawned with result type `T`, and this is its only handle.
    pub(crate) unsafe fn new(g: &'static G) -> Self {
        Join { g, result: PhantomData }
    }

    pub(crate) fn join(self) -> std::thread::Result<T> {
        let g = ManuallyDrop::new(self).g;
        if !g.join.is_done() {
            wait::block(WaitReason::Join, |waiter| g.join.wait(waiter));
        }
        // SAFETY: done, so result and G are the handle's: ours (join.rs, invariant 1).
        let result = unsafe { Body::take::<T>(g) };
        free(g);
        result
    }

    pub(crate) fn g(&self) -> &'static G {
        self.g
    }

    /// Gives up the handle. Returns whether the goroutine panicked, if its closure has returned: then the result is dropped.
    pub(crate) fn detach(self) -> Option<bool> {
        let g = ManuallyDrop::new(self).g;
        detach(g)
    }
}

fn detach(g: &'static G) -> Option<bool> {
    let detached = g.join.detach();
    if detached == Detached::Running {
        return None;
    }
    // SAFETY: its closure has returned, so the result is the handle's: ours (join.rs, invariant 1).
    let panicked = unsafe { (g.body.get().drop_result)(g) };
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

fn free(g: &'static G) {
    g.forget_name();
    match Rt::enter() {
        Some(rt) => {
            switch::free(rt, g);
            rt.leave();
        }
        None => switch::free_outside(g),
    }
}

/// Waits for a goroutine's end and takes its result. Dropping it detaches the goroutine, which runs on.
pub struct JoinHandle<T> {
    inner: Join<T>,
}

impl<T> JoinHandle<T> {
    /// Waits for the goroutine to end. On a goroutine this parks the goroutine; on a plain thread it
    /// blocks the thread. The goroutine's thread-locals have been dropped when it returns.
    ///
    /// # Errors
    /// The payload, if the goroutine panicked.
    ///
    /// ```
    /// let h = trefoil::go(|| -> i32 { panic!("no luck") });
    /// let payload = h.join().unwrap_err();
    /// assert_eq!(payload.downcast_ref(), Some(&"no luck"));
    /// ```
    pub fn join(self) -> std::thread::Result<T> {
        self.inner.join()
    }

    /// Whether the goroutine has ended, so that `join` would not wait.
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

    /// The goroutine's id. Ids are never used twice in a runtime; the main goroutine's is 1.
    pub fn id(&self) -> u64 {
        self.inner.g().id()
    }

    /// The name given with [`Builder::name`].
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

/// Lets other goroutines run; Go's `Gosched`. On a plain thread it is [`std::thread::yield_now`].
///
/// ```
/// trefoil::run(|| {
///     let h = trefoil::go(|| println!("while main yields"));
///     trefoil::yield_now();
///     h.join().unwrap();
/// });
/// ```
#[inline]
pub fn yield_now() {
    match Rt::enter() {
        Some(rt) => switch::yield_now(rt).leave(),
        None => std::thread::yield_now(),
    }
}

/// The id of the goroutine that calls it; 0 on a plain thread.
///
/// ```
/// assert_eq!(trefoil::id(), 0);
/// assert_eq!(trefoil::run(trefoil::id), 1);
/// ```
pub fn id() -> u64 {
    current_g().map_or(0, G::id)
}
