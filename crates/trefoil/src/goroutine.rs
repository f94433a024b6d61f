//! Starting goroutines: `go`, `Builder`; and `yield_now`, `id`.

use crate::join_handle::{Join, JoinHandle};
use crate::runtime::{PanicMode, current_sched};
use crate::sched::calls;
use crate::sched::current_g;
use crate::sched::g::G;
use crate::sched::goroutine::spawn::{SpawnOptions, spawn};
use std::io;
use std::panic::Location;

/// Starts `f` as a goroutine and returns a handle to wait for its result.
///
/// `f` and its result have the bounds of [`std::thread::spawn`]. To its code a goroutine is a
/// thread: it has its own stack and its own thread-locals. Start and end cost a few hundred
/// nanoseconds. Once the goroutine has run, it takes a page of memory.
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
    match start(SpawnOptions::plain(), f) {
        Ok(handle) => handle,
        Err(e) => cannot_start(&e),
    }
}

#[cold]
#[track_caller]
fn cannot_start(e: &io::Error) -> ! {
    panic!("cannot start a goroutine: {e}")
}

/// Starts `f` in the caller's runtime, or in the default runtime on a plain thread.
#[inline]
fn start<F, T>(options: SpawnOptions, f: F) -> io::Result<JoinHandle<T>>
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    // SAFETY: F and T are Send and 'static.
    let g = unsafe { spawn(current_sched()?, options, f)? };
    // SAFETY: just spawned with result type T, and this is its only handle.
    Ok(JoinHandle::from_join(unsafe { Join::new(g) }))
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
    /// [dumps](crate::debug::dump) print it, and the handle returns it. In the goroutine
    /// `std::thread::current().name()` returns it too, unless it contains a zero byte or the crate
    /// is built without its feature `std`.
    ///
    /// std's part takes 1 to 1.5 µs and about a kilobyte.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let named = trefoil::Builder::new().name("worker 7").go(|| {
    ///         assert_eq!(std::thread::current().name(), Some("worker 7"));
    ///     });
    ///     named.unwrap().join().unwrap();
    /// });
    /// ```
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

    /// Returns the settings in the form that the scheduler takes. `created_at` is where the caller
    /// of the public function starts the goroutine.
    pub(crate) fn into_options(self, created_at: &'static Location<'static>) -> SpawnOptions {
        SpawnOptions {
            tells_std_its_name: self.name.is_some(),
            name: self.name,
            stack_size: self.stack_size,
            abort_on_panic: self.panic.map(|p| p == PanicMode::Abort),
            created_at,
            ..SpawnOptions::plain()
        }
    }

    /// Starts `f` as a goroutine with these settings, in the runtime that [`go`] uses.
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
        self.go_at(Location::caller(), f)
    }

    /// As [`Builder::go`], with the place that dumps say it was created at.
    pub(crate) fn go_at<F, T>(
        self,
        created_at: &'static Location<'static>,
        f: F,
    ) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        start(self.into_options(created_at), f)
    }
}

/// Lets other goroutines run, like Go's `Gosched`. On a plain thread it is
/// [`std::thread::yield_now`].
///
/// It is rarely needed, because a goroutine that computes for long is preempted. Use it in a long
/// loop if other goroutines must not wait for the preemption, and in a loop that waits for another
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
    if !calls::yield_now() {
        std::thread::yield_now();
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
