//! Starting goroutines and waiting for them: `go`, `Builder`, `JoinHandle`.

use crate::runtime;
use crate::sched::g::G;
use crate::sched::goroutine::body::Body;
use crate::sched::goroutine::join::Detached;
use crate::sched::goroutine::spawn::{Place, Spec, spawn};
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Rt, current_g, switch, wait};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::panic::Location;

/// Starts `f` as a goroutine and returns a handle to wait for its result.
///
/// `f` and its result have the bounds of [`std::thread::spawn`]. To its code a goroutine is a
/// thread: it has its own stack and its own thread-locals. Start and end cost a few hundred
/// nanoseconds. Once the goroutine has run, it takes two pages of memory.
///
/// The goroutine runs in the caller's runtime. If the caller is a plain thread, it runs in the
/// default runtime, which the first such call starts and which lives as long as the process. Use
/// [`Builder`] for a name or another stack size, and [`scope`](crate::scope()) if `f` borrows.
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
/// Panics if there is no memory or address space for another goroutine; [`Builder::go`] returns an
/// error instead. Panics on a plain thread if the default runtime cannot start.
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
///
/// [`RuntimeBuilder::panic`](crate::RuntimeBuilder::panic) sets it for a runtime, and
/// [`Builder::panic`] for one goroutine. Use `Abort` if the program must not continue after a bug
/// in any goroutine.
///
/// ```
/// use trefoil::{Builder, PanicMode};
///
/// trefoil::run(|| {
///     let careful = Builder::new().panic(PanicMode::Unwind);
///     let handle = careful.go(|| panic!("no luck")).unwrap();
///     assert!(handle.join().is_err()); // The program continues.
/// });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PanicMode {
    /// The panic ends the goroutine, and [`JoinHandle::join`] returns its payload, as in std. This
    /// is the default.
    Unwind,
    /// The panic ends the process with exit code 2, as in Go.
    Abort,
}

/// The settings of a new goroutine, like [`std::thread::Builder`].
///
/// Use it to name a goroutine, to give it a larger stack, and to get an error instead of a panic if
/// it cannot be started.
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
    /// Returns the default settings: no name, the default stack size, and the runtime's panic mode.
    pub fn new() -> Builder {
        Builder::default()
    }

    /// Sets the goroutine's name. Panic messages, stack overflow reports and
    /// [dumps](crate::debug::dump) print it.
    pub fn name(mut self, name: impl Into<String>) -> Builder {
        self.name = Some(name.into().into_boxed_str());
        self
    }

    /// Sets the size of the stack in bytes, rounded up to a power of two, 64 KiB to 1 GiB. Defaults
    /// to 256 KiB.
    ///
    /// The size is address space; only pages that the goroutine touches take memory. Use a larger
    /// stack for deep recursion and large local variables.
    ///
    /// ```
    /// fn depth(n: u32) -> u32 {
    ///     let frame = std::hint::black_box([0u8; 1024]);
    ///     if n == 0 { frame[0].into() } else { 1 + depth(n - 1) }
    /// }
    ///
    /// trefoil::run(|| {
    ///     let handle = trefoil::Builder::new().stack_size(16 << 20).go(|| depth(1000)).unwrap();
    ///     assert_eq!(handle.join().unwrap(), 1000);
    /// });
    /// ```
    pub fn stack_size(mut self, bytes: usize) -> Builder {
        self.stack_size = Some(bytes);
        self
    }

    /// Sets what a panic in this goroutine does. Defaults to the panic mode of the runtime.
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

    /// Starts `f` as a goroutine with these settings, in the runtime that [`go`](crate::go) uses.
    ///
    /// ```
    /// use std::io::ErrorKind;
    ///
    /// trefoil::run(|| {
    ///     let error = trefoil::Builder::new().stack_size(2 << 30).go(|| ()).unwrap_err();
    ///     assert_eq!(error.kind(), ErrorKind::InvalidInput); // The limit is 1 GiB.
    /// });
    /// ```
    ///
    /// # Errors
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput): the stack size is 0 or more than 1 GiB.
    /// - [`OutOfMemory`](io::ErrorKind::OutOfMemory): there is no memory or address space for
    ///   another goroutine. The message names the limit to raise.
    /// - The [errors of `build`](crate::RuntimeBuilder::build), if the caller is a plain thread and
    ///   the default runtime cannot start.
    #[track_caller]
    pub fn go<F, T>(self, f: F) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        start(self.spec(Location::caller()), f)
    }

    /// Starts `f` as a goroutine with these settings in a [`scope`](crate::scope()), so that `f`
    /// may borrow.
    ///
    /// ```
    /// let words = ["to", "be"];
    /// let count = trefoil::scope(|s| {
    ///     let counter = trefoil::Builder::new().name("counter");
    ///     let handle = counter.go_scoped(s, || words.len()).unwrap();
    ///     assert_eq!(handle.name(), Some("counter"));
    ///     handle.join().unwrap()
    /// });
    /// assert_eq!(count, 2);
    /// ```
    ///
    /// # Errors
    /// The errors of [`Builder::go`].
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
/// [`go`] returns it. It can be sent to other goroutines and threads, also of other runtimes.
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

    /// Returns the name that [`Builder::name`] has set.
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

/// Lets other goroutines run, like Go's `Gosched`. On a plain thread it is
/// [`std::thread::yield_now`].
///
/// It is rarely needed, because a goroutine that computes for long is preempted. Use it in a long
/// loop if other goroutines must not wait until then, and in a loop that waits for another
/// goroutine.
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

/// Returns the id of the calling goroutine, or 0 on a plain thread.
///
/// Dumps and panic messages name goroutines by this number. A runtime never uses an id twice; the
/// main goroutine of [`run`](crate::run) has the id 1.
///
/// ```
/// assert_eq!(trefoil::id(), 0);
/// assert_eq!(trefoil::run(trefoil::id), 1);
/// ```
pub fn id() -> u64 {
    current_g().map_or(0, G::id)
}
