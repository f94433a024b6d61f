//! tokio's own multi-thread runtime, unmodified, with goroutines as its threads.
//!
//! Crates that are bound to tokio (reqwest, `axum::serve`, tonic, sqlx, tokio-postgres, redis) call
//! `tokio::spawn`, `tokio::net` and `tokio::time`, so they need a tokio runtime. On a [`Runtime`]
//! of this module they run as they are. Each worker of tokio, and each thread of its blocking pool,
//! is a goroutine with a stack of 2 MiB. So a task that blocks (a std `Mutex`,
//! `std::thread::sleep`, a file, C code) parks a goroutine, a task that computes is preempted, and
//! other tasks continue on other workers. There are many workers, because one that is parked costs
//! little.
//!
//! ```
//! use std::time::Duration;
//!
//! #[trefoil::main(tokio)]
//! async fn main() {
//!     // Blocks its worker, which is a goroutine. On tokio's own threads, that many tasks would
//!     // stop every other task.
//!     let blocked: Vec<_> = (0..16)
//!         .map(|_| tokio::spawn(async { std::thread::sleep(Duration::from_millis(20)) }))
//!         .collect();
//!     assert_eq!(tokio::spawn(async { 6 * 7 }).await.unwrap(), 42);
//!     for task in blocked {
//!         task.await.unwrap();
//!     }
//! }
//! ```
//!
//! Needs the feature `tokio`. `--cfg tokio_unstable` is not needed. With it, tokio's LIFO slot is
//! turned off and its driver is handed over eagerly; see the limits.
//!
//! # What is different from tokio on threads
//!
//! - The number of workers defaults to 8 per P, at least 32. It is no measure of parallelism: that
//!   is [`procs`].
//! - `spawn_blocking` and `block_in_place` work, and are rarely needed.
//! - A thread that a task starts with `std::thread` is an OS thread, as everywhere on trefoil.
//! - Goroutines and tasks can wait for each other: a task may call `join`, `recv` and `lock` of
//!   this crate, and a goroutine may call [`Runtime::block_on`] or `Handle::block_on`.
//!
//! # Limits
//!
//! - If as many tasks block as there are workers, all tasks wait for them.
//! - A task that wakes or spawns another task and then blocks *in the same poll* delays that task,
//!   because it waits in tokio's LIFO slot, from which no other worker takes it (tokio issue 4941).
//!   With `--cfg tokio_unstable` there is no LIFO slot.
//! - A task that blocks may delay sockets and timers of tokio: another worker is woken for tokio's
//!   driver after half a millisecond.
//! - `pthread_kill` of a worker sends the signal to the process, and `pthread_cancel` fails.

use crate::goroutine::{Builder as GoroutineBuilder, id};
use crate::interpose::threads::{DriverWatch, announce_thread};
use crate::join_handle::JoinHandle;
use crate::observe::deadlock::runtimes;
use crate::runtime::procs;
use crate::sched::{Sched, calls};
use crate::time::sleep;
use ::tokio::runtime as tokio_runtime;
use ::tokio::task::JoinHandle as TaskHandle;
use std::fmt;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The fewest workers by default.
const MIN_WORKERS: usize = 32;
/// Workers per P by default.
const WORKERS_PER_P: usize = 8;
/// The stack of a worker or of a thread of the blocking pool: std's default.
const STACK_BYTES: usize = 2 << 20;
/// How long tokio's driver may be without a worker before the monitor wakes one.
const UNATTENDED: Duration = Duration::from_micros(500);
/// How long the monitor waits at most while all workers are busy.
const MAX_PAUSE: Duration = Duration::from_millis(20);

/// tokio's multi-thread runtime, with goroutines as its threads.
///
/// Use it to run crates that need a tokio runtime. [`main`](macro@crate::main) and
/// [`test`](macro@crate::test) with the option `tokio` make one for a whole function. It must be
/// made on a goroutine, and its threads are goroutines of that goroutine's runtime. I/O and time
/// are enabled as far as the program has enabled tokio's features `net` and `time`.
///
/// ```
/// trefoil::run(|| {
///     let rt = trefoil::tokio::Runtime::new().unwrap();
///     let task = rt.spawn(async { 6 });
///     assert_eq!(rt.block_on(async { task.await.unwrap() * 7 }), 42);
/// });
/// ```
///
/// # Drop
/// As tokio's: the drop waits until every worker has finished its present poll, and until every
/// closure of `spawn_blocking` has returned. Drop it before the trefoil runtime of its goroutines:
/// afterwards they never run again, and the drop leaks what they own.
pub struct Runtime {
    /// None when it is being dropped.
    inner: Option<tokio_runtime::Runtime>,
    monitor: DriverMonitor,
    sched: Weak<Sched>,
}

impl Runtime {
    /// Makes a runtime with the default settings.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn new() -> io::Result<Runtime> {
        Runtime::builder().build()
    }

    /// Returns the default settings for a new runtime.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let rt = trefoil::tokio::Runtime::builder().workers(4).build().unwrap();
    ///     assert_eq!(rt.handle().metrics().num_workers(), 4);
    /// });
    /// ```
    pub fn builder() -> Builder {
        Builder { workers: None, max_blocking_threads: None, stack_bytes: STACK_BYTES }
    }

    /// Runs a future to its end on the calling goroutine or plain thread, and returns its value.
    ///
    /// # Panics
    /// Panics if the future panics, and if the caller is itself a task of a tokio runtime.
    #[track_caller]
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.inner().block_on(future)
    }

    /// Starts a future as a task of tokio, like `tokio::spawn`.
    #[track_caller]
    pub fn spawn<F>(&self, future: F) -> TaskHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.inner().spawn(future)
    }

    /// Runs `f` on a thread of tokio's blocking pool, like `tokio::task::spawn_blocking`. If the
    /// caller is a goroutine, so is that thread.
    #[track_caller]
    pub fn spawn_blocking<F, T>(&self, f: F) -> TaskHandle<T>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        self.inner().spawn_blocking(f)
    }

    /// Returns tokio's handle to this runtime, which any goroutine or thread may use.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let rt = trefoil::tokio::Runtime::new().unwrap();
    ///     let handle = rt.handle().clone();
    ///     let goroutine = trefoil::go(move || handle.block_on(async { 42 }));
    ///     assert_eq!(goroutine.join().unwrap(), 42);
    /// });
    /// ```
    pub fn handle(&self) -> &tokio_runtime::Handle {
        self.inner().handle()
    }

    /// Enters the runtime on the calling goroutine: until the guard is dropped, `tokio::spawn` and
    /// tokio's sockets and timers use this runtime there. The goroutine owns its thread-locals, so
    /// it stays inside on whichever OS thread it runs.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let rt = trefoil::tokio::Runtime::new().unwrap();
    ///     let _inside = rt.enter();
    ///     let task = tokio::spawn(async { 42 });
    ///     assert_eq!(trefoil::block_on(task).unwrap(), 42);
    /// });
    /// ```
    pub fn enter(&self) -> tokio_runtime::EnterGuard<'_> {
        self.inner().enter()
    }

    /// Shuts the runtime down, and waits at most `timeout` for closures of `spawn_blocking`.
    /// Closures that are left continue, as goroutines.
    pub fn shutdown_timeout(mut self, timeout: Duration) {
        if let Some(inner) = self.inner.take() {
            inner.shutdown_timeout(timeout);
        }
    }

    /// Shuts the runtime down without waiting. It may be called inside a task.
    pub fn shutdown_background(mut self) {
        if let Some(inner) = self.inner.take() {
            inner.shutdown_background();
        }
    }

    fn inner(&self) -> &tokio_runtime::Runtime {
        self.inner.as_ref().expect("it is taken out only at the end")
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        let has_ended = self.sched.upgrade().is_none_or(|s| s.stopping.load(Ordering::Acquire));
        if has_ended {
            // No goroutine of that runtime runs again, so tokio would wait for ever.
            std::mem::forget(self.inner.take());
            self.monitor.abandon();
            return;
        }
        // The monitor serves the tasks that are left until tokio has shut down. tokio panics if it
        // may not wait here.
        struct StopAtEnd<'a>(&'a mut DriverMonitor);
        impl Drop for StopAtEnd<'_> {
            fn drop(&mut self) {
                self.0.stop();
            }
        }
        let _stop = StopAtEnd(&mut self.monitor);
        drop(self.inner.take());
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("tokio", &self.inner).finish_non_exhaustive()
    }
}

/// The settings of a new [`Runtime`].
///
/// [`Runtime::builder`] returns it, and [`build`](Builder::build) makes the runtime.
///
/// ```
/// trefoil::run(|| {
///     let rt = trefoil::tokio::Runtime::builder()
///         .workers(64)
///         .max_blocking_threads(16)
///         .build()
///         .unwrap();
///     assert_eq!(rt.block_on(async { 42 }), 42);
/// });
/// ```
#[derive(Clone, Debug)]
#[must_use = "a Builder does nothing until `build`"]
pub struct Builder {
    workers: Option<usize>,
    max_blocking_threads: Option<usize>,
    stack_bytes: usize,
}

impl Builder {
    /// Sets how many workers poll tasks. Defaults to 8 per P, at least 32.
    ///
    /// Each task that blocks holds a worker, so this is the number of tasks that may block at the
    /// same time while others continue. A worker is a goroutine with a stack of its own.
    pub fn workers(mut self, n: usize) -> Builder {
        self.workers = Some(n);
        self
    }

    /// Sets the most threads of tokio's blocking pool, as
    /// `tokio::runtime::Builder::max_blocking_threads`. Defaults to 512.
    pub fn max_blocking_threads(mut self, n: usize) -> Builder {
        self.max_blocking_threads = Some(n);
        self
    }

    /// Sets the size of each worker's stack in bytes, rounded up to a power of two, 64 KiB to 1
    /// GiB. Defaults to 2 MiB.
    pub fn stack_size(mut self, bytes: usize) -> Builder {
        self.stack_bytes = bytes;
        self
    }

    /// Makes the runtime and starts its workers.
    ///
    /// ```
    /// // Not on a goroutine.
    /// let error = trefoil::tokio::Runtime::new().unwrap_err();
    /// assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
    /// ```
    ///
    /// # Errors
    /// - [`Unsupported`](io::ErrorKind::Unsupported): the caller is not a goroutine; or this
    ///   version of tokio starts its workers in a way that this crate does not know.
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput): the number of workers or of blocking
    ///   threads is 0, or the stack size is 0 or more than 1 GiB.
    /// - Other kinds: the kernel refused the descriptors of tokio's driver, or memory.
    pub fn build(self) -> io::Result<Runtime> {
        // A task may lock on one worker and unlock on another.
        crate::sched::wait::holder::assume_guards_move();
        let Some(sched) = calls::current_sched() else {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "trefoil::tokio::Runtime must be made on a goroutine: call it inside \
                 `trefoil::run`, or use `#[trefoil::main(tokio)]`",
            ));
        };
        let workers = self.workers.unwrap_or_else(|| MIN_WORKERS.max(WORKERS_PER_P * procs()));
        let max_blocking_threads = self.max_blocking_threads.unwrap_or(512);
        if workers == 0 || max_blocking_threads == 0 {
            return Err(invalid("tokio needs at least one worker and one blocking thread"));
        }
        if !(1..=1 << 30).contains(&self.stack_bytes) {
            return Err(invalid("the stack size of tokio's workers is 0 or more than 1 GiB"));
        }
        let watch = Arc::new(DriverWatch::default());
        let of_threads = watch.clone();
        let mut builder = tokio_runtime::Builder::new_multi_thread();
        #[cfg(tokio_unstable)]
        builder.disable_lifo_slot().enable_eager_driver_handoff();
        builder
            .enable_all()
            .worker_threads(workers)
            .max_blocking_threads(max_blocking_threads)
            .thread_stack_size(self.stack_bytes)
            // tokio calls this right before it starts a thread, on the thread that starts it.
            .thread_name_fn(move || {
                announce_thread(THREAD_NAME, &of_threads);
                THREAD_NAME.into()
            });
        let inner = builder.build()?;
        if watch.threads() == 0 {
            // The workers are OS threads: they end, and the caller learns why.
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this version of tokio starts its workers in a way that trefoil does not know",
            ));
        }
        let monitor = DriverMonitor::start(watch, inner.handle().clone())?;
        let sched =
            runtimes().iter().find(|s| std::ptr::eq(&raw const ***s, sched)).map(Arc::downgrade);
        Ok(Runtime { inner: Some(inner), monitor, sched: sched.unwrap_or_default() })
    }
}

/// The name of each thread, for dumps and panic messages.
const THREAD_NAME: &str = "tokio-worker";

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// The goroutine that wakes a worker if none has served tokio's driver for [`UNATTENDED`].
struct DriverMonitor {
    shared: Arc<MonitorShared>,
    goroutine: Option<JoinHandle<()>>,
}

struct MonitorShared {
    watch: Arc<DriverWatch>,
    stopped: AtomicBool,
}

impl DriverMonitor {
    fn start(watch: Arc<DriverWatch>, handle: tokio_runtime::Handle) -> io::Result<DriverMonitor> {
        let shared = Arc::new(MonitorShared { watch, stopped: AtomicBool::new(false) });
        let of_goroutine = shared.clone();
        let goroutine = GoroutineBuilder::new()
            .name("tokio-monitor")
            .go(move || keep_driver_attended(&of_goroutine, &handle))?;
        Ok(DriverMonitor { shared, goroutine: Some(goroutine) })
    }

    /// Ends the goroutine and waits for it.
    fn stop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        self.shared.watch.wake_monitor();
        if let Some(goroutine) = self.goroutine.take() {
            let _ = goroutine.join();
        }
    }

    /// Gives the goroutine up: its runtime has ended.
    fn abandon(&mut self) {
        drop(self.goroutine.take());
    }
}

/// The monitor's loop. It sleeps while a worker is in the driver. When all workers have left it, it
/// waits a moment. If no worker has entered the driver since, it spawns an empty task. tokio wakes
/// an idle worker for that, which then serves the driver.
fn keep_driver_attended(shared: &MonitorShared, handle: &tokio_runtime::Handle) {
    let watch = &shared.watch;
    let is_stopped = || shared.stopped.load(Ordering::SeqCst);
    let mut last: Option<TaskHandle<()>> = None;
    let mut pause = UNATTENDED;
    while !is_stopped() {
        watch.sleep_while_attended(is_stopped);
        let before = watch.unattended();
        sleep(pause);
        let is_unattended = before.is_some() && watch.unattended() == before;
        // If the last one has not run, no worker is idle. A worker that becomes idle serves the
        // driver by itself.
        let is_any_idle = last.as_ref().is_none_or(TaskHandle::is_finished);
        if is_unattended && is_any_idle {
            last = Some(handle.spawn(std::future::ready(())));
        }
        pause = if is_any_idle { UNATTENDED } else { MAX_PAUSE.min(2 * pause) };
    }
}

/// Makes a runtime and runs `future` on it: what `#[trefoil::main(tokio)]` does.
#[doc(hidden)]
#[track_caller]
pub fn run_main<F: Future>(workers: Option<usize>, future: F) -> F::Output {
    debug_assert_ne!(id(), 0, "the attribute calls it on a goroutine");
    let mut builder = Runtime::builder();
    builder.workers = workers;
    match builder.build() {
        Ok(runtime) => runtime.block_on(future),
        Err(e) => panic!("trefoil cannot start tokio: {e}"),
    }
}
