//! Runtimes: `run`, `Runtime`, `RuntimeBuilder`; and functions about the caller's runtime.

use crate::join_handle::{Join, JoinHandle};
use crate::sched::goroutine::spawn::{SpawnOptions, spawn};
use crate::sched::monitor::sysmon::SLICE_NANOS;
use crate::sched::simulation::Outside;
use crate::sched::task::waker::{self, TaskWaiter};
use crate::sched::{self, Config, Hooks, MAX_PROCS, MAX_THREADS, Rt, Sched, calls};
use crate::sys::{cpus, env};
use crate::{arch, interpose, mem, observe};
use std::cell::Cell;
use std::fmt;
use std::io::{self, Write};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Once, OnceLock};

/// Address space of a main goroutine's stack: as much as Linux gives the main thread of a program.
const MAIN_STACK_BYTES: usize = 8 << 20;

/// Runs `f` as the main goroutine of a new runtime and returns its value.
///
/// Use it in `main` or in a test; [`main`](macro@crate::main) and [`test`](macro@crate::test) do it
/// for a whole function. `f` may borrow from the caller, because the caller waits until `f` has
/// returned. The main goroutine has the id 1 and a stack of 8 MiB.
///
/// The runtime is dropped when `f` returns: goroutines that are still alive are not waited for and
/// are never resumed. The [drop of a `Runtime`](Runtime#drop) has the details.
///
/// The number of Ps is `TREFOIL_PROCS`, or else `GOMAXPROCS`, or else the number of CPUs, limited
/// by the CPU quota of the cgroup. Use [`Runtime::builder`] for other settings.
///
/// ```
/// let answer = trefoil::run(|| {
///     let h = trefoil::go(|| 6);
///     h.join().unwrap() * 7
/// });
/// assert_eq!(answer, 42);
/// ```
///
/// # Panics
/// Panics with the payload of `f` if `f` panics. Panics with the reason if the runtime cannot start
/// (the [errors of `build`](RuntimeBuilder::build)).
#[track_caller]
pub fn run<F, T>(f: F) -> T
where
    F: FnOnce() -> T + Send,
    T: Send,
{
    match Runtime::builder().build() {
        Ok(runtime) => runtime.run(f),
        Err(e) => panic!("trefoil cannot start: {e}"),
    }
}

/// A scheduler with its own Ps and threads.
///
/// Most programs do not need this type, because [`run`] makes a runtime. Use it for settings that
/// [`run`] does not have ([`RuntimeBuilder`]), for several runtimes in one process, and to start
/// goroutines of a certain runtime from any thread.
///
/// ```
/// let rt = trefoil::Runtime::builder().procs(2).build().unwrap();
/// let handle = rt.go(|| 6 * 7).unwrap();
/// assert_eq!(rt.run(trefoil::procs), 2);
/// assert_eq!(handle.join().unwrap(), 42);
/// ```
///
/// # Drop
/// Dropping a runtime does not wait for its goroutines. Its threads end at their next scheduling
/// step:
/// - A goroutine that waits is never resumed. A [`join`](crate::JoinHandle::join) of it never
///   returns.
/// - A goroutine that runs continues until its next runtime call, or for 2 ms of CPU time.
/// - A goroutine that panics, prints, allocates or holds a lock of C code continues until it has
///   finished that, because the whole process needs these locks. The drop waits at most one second
///   for standard output and standard error.
///
/// What these goroutines own is leaked, and the locks that they hold stay locked. A goroutine that
/// waits for a lock or a permit of [`sync`](crate::sync) is skipped from then on, so the waiters
/// behind it get their turn. The exception is a goroutine that was handed the lock just before the
/// drop and has not run since: it keeps the lock. A value that is sent to a goroutine that waits at
/// a channel is lost.
///
/// So end goroutines that share locks or channels with other threads or runtimes before their
/// runtime is dropped: join them, use a [`scope`](crate::scope()), close their channel, or cancel
/// their [`Context`](crate::context::Context).
///
/// ```
/// let rt = trefoil::Runtime::builder().build().unwrap();
/// let (tx, rx) = trefoil::chan::unbounded();
/// let worker = rt.go(move || rx.iter().sum::<i32>()).unwrap();
/// tx.send(40).unwrap();
/// tx.send(2).unwrap();
/// drop(tx); // The worker's loop ends,
/// assert_eq!(worker.join().unwrap(), 42); // so the worker ends,
/// drop(rt); // and nothing is left when the runtime ends.
/// ```
pub struct Runtime {
    sched: Arc<Sched>,
}

impl Runtime {
    /// Returns the default settings for a new runtime.
    ///
    /// ```
    /// let rt = trefoil::Runtime::builder().build().unwrap();
    /// assert_eq!(rt.run(|| 6 * 7), 42);
    /// ```
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder {
            procs: None,
            panic: PanicMode::Unwind,
            stack_size: None,
            dlopen_reserve: None,
            report_deadlocks: None,
            max_threads: None,
            is_system: false,
            simulation: None,
        }
    }

    /// Runs `f` as a main goroutine of this runtime and returns its value.
    ///
    /// `f` may borrow from the caller, because the caller waits until `f` has returned: a goroutine
    /// parks, a plain thread blocks. `run` may be called any number of times, also at the same
    /// time. A main goroutine has a stack of 8 MiB. Other goroutines of the runtime continue after
    /// `f` has returned.
    ///
    /// ```
    /// let rt = trefoil::Runtime::builder().build().unwrap();
    /// let mut names = vec!["b", "a"];
    /// rt.run(|| names.sort());
    /// assert_eq!(names, ["a", "b"]);
    /// ```
    ///
    /// # Panics
    /// Panics with the payload of `f` if `f` panics. Panics if there is no memory or address space
    /// for the stack of the main goroutine.
    #[track_caller]
    pub fn run<F, T>(&self, f: F) -> T
    where
        F: FnOnce() -> T + Send,
        T: Send,
    {
        let options = SpawnOptions {
            name: Some("main".into()),
            tells_std_its_name: true,
            stack_size: Some(MAIN_STACK_BYTES),
            ..SpawnOptions::plain()
        };
        let _wait = self.sched.config.is_system.then(observe::deadlock::SystemRuntimeWait::new);
        // SAFETY: F and T are Send. What they borrow outlives this call, because it returns only
        // after the goroutine has ended.
        let spawned = unsafe { spawn(&self.sched, options, f) };
        let main = match spawned {
            // SAFETY: just spawned with result type T, and this is its only handle.
            Ok(g) => unsafe { Join::new(g) },
            Err(e) => panic!("cannot start the main goroutine: {e}"),
        };
        match main.join() {
            Ok(value) => value,
            Err(payload) => resume_unwind(payload),
        }
    }

    /// Starts `f` as a goroutine of this runtime.
    ///
    /// The caller may be a plain thread, or a goroutine of this or another runtime. On a goroutine
    /// of this runtime it does the same as [`go`](crate::go).
    ///
    /// ```
    /// let io = trefoil::Runtime::builder().procs(1).build().unwrap();
    /// let handle = io.go(trefoil::procs).unwrap();
    /// assert_eq!(handle.join().unwrap(), 1);
    /// ```
    ///
    /// # Errors
    /// [`OutOfMemory`](io::ErrorKind::OutOfMemory) if there is no memory or address space for
    /// another goroutine. The message names the limit to raise.
    #[track_caller]
    pub fn go<F, T>(&self, f: F) -> io::Result<JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        // SAFETY: F and T are Send and 'static. T is the result type, and this is the only handle.
        unsafe {
            let g = spawn(&self.sched, SpawnOptions::plain(), f)?;
            Ok(JoinHandle::from_join(Join::new(g)))
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.sched.shut_down();
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime")
            .field("procs", &self.sched.procs())
            .field("goroutines", &self.sched.num_goroutines())
            .field("threads", &self.sched.threads())
            .finish()
    }
}

/// What a panic in a goroutine does.
///
/// [`RuntimeBuilder::panic`] sets it for a runtime, and [`Builder::panic`](crate::Builder::panic)
/// for one goroutine. Use `Abort` if the program must not continue after a bug in any goroutine.
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
    /// The panic ends the goroutine, and [`JoinHandle::join`](crate::JoinHandle::join) returns its
    /// payload, as in std. This is the default.
    Unwind,
    /// The panic ends the process with exit code 2, as in Go.
    Abort,
}

/// The settings of a new [`Runtime`].
///
/// [`Runtime::builder`] returns it, and [`build`](RuntimeBuilder::build) starts the runtime.
///
/// ```
/// let rt = trefoil::Runtime::builder()
///     .procs(4)
///     .max_threads(64)
///     .build()
///     .expect("the runtime starts");
/// assert_eq!(rt.run(trefoil::procs), 4);
/// ```
#[derive(Clone, Debug)]
#[must_use = "a RuntimeBuilder does nothing until `build`"]
pub struct RuntimeBuilder {
    procs: Option<usize>,
    panic: PanicMode,
    stack_size: Option<usize>,
    dlopen_reserve: Option<bool>,
    report_deadlocks: Option<bool>,
    max_threads: Option<usize>,
    is_system: bool,
    simulation: Option<Outside>,
}

impl RuntimeBuilder {
    /// Sets the number of Ps: how many goroutines run at the same time, 1 to 1024.
    ///
    /// It overrides the environment (`TREFOIL_PROCS`, `GOMAXPROCS`). If neither sets the number, it
    /// is the number of CPUs, limited by the CPU quota of the cgroup, and it follows changes of
    /// both.
    pub fn procs(mut self, n: usize) -> Self {
        self.procs = Some(n);
        self
    }

    /// Sets what a panic in a goroutine does. Defaults to [`PanicMode::Unwind`].
    ///
    /// [`Builder::panic`](crate::Builder::panic) overrides it for a single goroutine.
    ///
    /// ```no_run
    /// use trefoil::{PanicMode, Runtime};
    ///
    /// let rt = Runtime::builder().panic(PanicMode::Abort).build().unwrap();
    /// rt.run(|| {
    ///     trefoil::go(|| panic!("the process exits with code 2"));
    /// });
    /// ```
    pub fn panic(mut self, mode: PanicMode) -> Self {
        self.panic = mode;
        self
    }

    /// Sets the default stack size in bytes, rounded up to a power of two, 64 KiB to 1 GiB.
    /// Defaults to 256 KiB.
    ///
    /// The size is address space; only pages that the goroutine touches take memory. All runtimes
    /// of a process share this setting, and the first goroutine of the process fixes it: set it
    /// when the first runtime is built. [`Builder::stack_size`](crate::Builder::stack_size) sets
    /// the size for a single goroutine at any time.
    ///
    /// ```
    /// let rt = trefoil::Runtime::builder().stack_size(1 << 20).build().unwrap();
    /// let h = rt.go(|| [1u8; 300 << 10].iter().map(|&n| n as usize).sum::<usize>()).unwrap();
    /// assert_eq!(h.join().unwrap(), 300 << 10);
    /// ```
    pub fn stack_size(mut self, bytes: usize) -> Self {
        self.stack_size = Some(bytes);
        self
    }

    /// Sets whether the thread-local storage of each goroutine keeps glibc's reserve (1.7 KiB) for
    /// libraries that are loaded later with `dlopen` and have initial-exec TLS. Defaults to
    /// `false`.
    ///
    /// Few libraries need it (some OpenGL drivers, OpenMP runtimes and memory allocators, if they
    /// are loaded at run time). Without the reserve a small parked goroutine takes one page instead
    /// of two, and `dlopen` of such a library fails with an error; all other libraries load as
    /// usual, and so do those that the program is linked with. `dlmopen` into a new namespace fails
    /// for all that need libc. `TREFOIL_DLOPEN_RESERVE=1` in the environment sets the default to
    /// `true`.
    ///
    /// All runtimes of a process share this setting, and the first `build` fixes it.
    ///
    /// ```
    /// let rt = trefoil::Runtime::builder().dlopen_reserve(true).build().unwrap();
    /// assert_eq!(rt.run(|| 6 * 7), 42);
    /// ```
    pub fn dlopen_reserve(mut self, keep: bool) -> Self {
        self.dlopen_reserve = Some(keep);
        self
    }

    /// Sets whether the runtime reports goroutines that wait for each other for ever, while others
    /// still run. Defaults to `true`.
    ///
    /// The report is printed on stderr, once, some seconds after the deadlock has occurred; see
    /// [`deadlocks`](crate::debug::deadlocks). Only deadlocks that are certain are reported.
    /// `TREFOIL_DEBUG=deadlockreport=0` in the environment sets the default to `false`. The error
    /// that ends the process when *all* goroutines are asleep is not affected.
    ///
    /// ```
    /// let rt = trefoil::Runtime::builder().report_deadlocks(false).build().unwrap();
    /// assert_eq!(rt.run(|| 6 * 7), 42);
    /// ```
    pub fn report_deadlocks(mut self, report: bool) -> Self {
        self.report_deadlocks = Some(report);
        self
    }

    /// Sets the largest number of threads that run goroutines, at least 2. Defaults to 10,000.
    ///
    /// Each goroutine in a call that blocks its thread keeps a thread. When the limit is reached,
    /// the runtime prints one line on stderr, and goroutines wait until a thread is free.
    pub fn max_threads(mut self, n: usize) -> Self {
        self.max_threads = Some(n);
        self
    }

    /// The runtime is no part of the program: dumps and the deadlock check leave it out, and it is
    /// neither traced nor recorded. For `observer.rs`.
    pub(crate) fn system(mut self) -> Self {
        self.is_system = true;
        self
    }

    /// The clock and the schedule are simulated. For `sim.rs`.
    pub(crate) fn simulated(mut self, outside: Outside) -> Self {
        self.simulation = Some(outside);
        self.procs = Some(1);
        self
    }

    /// Starts the runtime.
    ///
    /// ```
    /// use std::io::ErrorKind;
    ///
    /// let error = trefoil::Runtime::builder().procs(0).build().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::InvalidInput);
    /// ```
    ///
    /// # Errors
    /// The message names the setting and the reason.
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput): `procs` is not from 1 to 1024,
    ///   `max_threads` is less than 2, `stack_size` is 0 or more than 1 GiB, or `TREFOIL_PROCS`,
    ///   `GOMAXPROCS`, `TREFOIL_DLOPEN_RESERVE`, `TREFOIL_DEBUG` or `TREFOIL_TRACE` has a value
    ///   that is not valid.
    /// - [`AlreadyExists`](io::ErrorKind::AlreadyExists): `stack_size` was set to another value
    ///   than the first goroutine of the process has fixed, or `dlopen_reserve` to another value
    ///   than the first runtime has fixed.
    /// - [`Unsupported`](io::ErrorKind::Unsupported): the thread-local storage of this glibc has a
    ///   layout that the runtime does not know.
    /// - Other kinds: the kernel refused memory or a thread, for example
    ///   [`WouldBlock`](io::ErrorKind::WouldBlock) when the limit of threads is reached.
    pub fn build(self) -> io::Result<Runtime> {
        let env = env::read().map_err(invalid)?;
        let explicit_procs = self.checked_procs()?.or(env.procs);
        let max_threads = self.checked_max_threads()?;
        fix_dlopen_reserve(self.dlopen_reserve, env.dlopen_reserve)?;
        let async_preempt = process_init(&env)?;
        if let Some(bytes) = self.stack_size {
            mem::configure(bytes)?;
        }
        let check_waits = self.report_deadlocks.or(env.deadlockreport).unwrap_or(true);
        let is_simulated = self.simulation.is_some();
        let config = Config {
            abort_on_panic: self.panic == PanicMode::Abort,
            schedtrace_ms: env.schedtrace_ms.filter(|_| !self.is_system),
            scheddetail: env.scheddetail,
            max_threads,
            async_preempt,
            slice: env.slice_us.map_or(SLICE_NANOS, |us| us * 1_000),
            follow_cpus: explicit_procs.is_none(),
            is_system: self.is_system,
            simulation: self.simulation,
            hooks: Hooks {
                trace: observe::schedtrace::print,
                // A simulation notices by itself that all goroutines wait.
                all_asleep: if is_simulated { |_| {} } else { observe::deadlock::check },
                check_waits: (check_waits && !is_simulated).then_some(observe::waits::watch::check),
                serve_signals: observe::quit::serve_signals,
                tell_std_name: interpose::tell_std_name,
                with_output: interpose::with_output,
                wake_for_outputs: interpose::wake_for_outputs,
            },
        };
        let procs = explicit_procs.unwrap_or_else(cpus::default_procs);
        // Dropped if what follows fails.
        let runtime = Runtime { sched: Sched::start(procs, config)? };
        let sched = &runtime.sched;
        let _ = waker::FIND_SCHED.set(find_sched);
        if let Some(trace) = env.trace.filter(|_| !self.is_system && !is_simulated) {
            observe::trace::record_from_start(sched, trace)?;
        }
        observe::layout::keep_in_program();
        observe::deadlock::register(sched);
        observe::quit::install();
        if !self.is_system {
            call_start_hook()?;
        }
        Ok(runtime)
    }

    /// Returns the number of Ps that the program has set, if it is valid.
    fn checked_procs(&self) -> io::Result<Option<usize>> {
        match self.procs {
            Some(n) if !(1..=MAX_PROCS).contains(&n) => {
                Err(invalid(format!("procs({n}): expected a number from 1 to {MAX_PROCS}")))
            }
            procs => Ok(procs),
        }
    }

    /// Returns the limit on threads, if it is valid.
    fn checked_max_threads(&self) -> io::Result<u32> {
        match self.max_threads {
            Some(n @ 0..2) => {
                let text = format!("max_threads({n}): expected at least 2, because one may block");
                Err(invalid(text))
            }
            Some(n) => Ok(u32::try_from(n).unwrap_or(u32::MAX)),
            None => Ok(MAX_THREADS),
        }
    }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Fixes whether goroutines keep glibc's reserve: the first call decides for the process, by its
/// builder or else by the environment.
fn fix_dlopen_reserve(builder: Option<bool>, env: Option<bool>) -> io::Result<()> {
    static KEEP: OnceLock<bool> = OnceLock::new();
    let keep = *KEEP.get_or_init(|| {
        let keep = builder.or(env).unwrap_or(false);
        if keep {
            mem::tls::keep_reserve();
        }
        keep
    });
    if builder.is_some_and(|asked| asked != keep) {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "dlopen_reserve can be set only on the first runtime of the process, or for all of \
             them by TREFOIL_DLOPEN_RESERVE=1",
        ));
    }
    Ok(())
}

/// Prepares the process for its first goroutine, once. Returns whether goroutines can be preempted
/// by a signal.
fn process_init(env: &env::Env) -> io::Result<bool> {
    static ONCE: Once = Once::new();
    static ASYNC_PREEMPT: AtomicBool = AtomicBool::new(false);
    ONCE.call_once(|| {
        arch::init();
        interpose::install();
        if env.guards_mprotect {
            mem::force_mprotect_guards();
        }
        if env.tls_pthread {
            mem::tls::force_fallback();
        }
        observe::fault::install_handler();
        observe::panics::install_hook();
        if !env.asyncpreemptoff {
            let installed = interpose::signals::install_preemption(env.preempt_signal);
            ASYNC_PREEMPT.store(installed, Relaxed);
        }
    });
    let layout = mem::tls::init()?;
    // Not `eprintln!`, which panics if nobody reads standard error.
    if let Some(why) = &layout.fallback_reason
        && !env.tls_pthread
    {
        static WARN_ONCE: Once = Once::new();
        WARN_ONCE.call_once(|| {
            _ = writeln!(
                io::stderr(),
                "trefoil: new goroutines are slow here (their TLS needs a thread each): {why}"
            );
        });
    }
    if let Some(why) = &layout.reserve_reason {
        static WARN_ONCE: Once = Once::new();
        WARN_ONCE.call_once(|| {
            _ = writeln!(io::stderr(), "trefoil: goroutines take two pages each here: {why}");
        });
    }
    // After `mem::tls::init`: it has made a thread, so glibc has installed the handler to wrap.
    interpose::setxid::install();
    Ok(ASYNC_PREEMPT.load(Relaxed))
}

/// What [`set_start_hook`] has stored.
static START_HOOK: OnceLock<fn() -> io::Result<()>> = OnceLock::new();

/// Sets a function that is called once, after the first runtime of the process has started. If it
/// fails, so does the start of that runtime. The first call of this function counts.
pub(crate) fn set_start_hook(hook: fn() -> io::Result<()>) {
    let _ = START_HOOK.set(hook);
}

fn call_start_hook() -> io::Result<()> {
    static CALLED: AtomicBool = AtomicBool::new(false);
    if CALLED.swap(true, Relaxed) {
        return Ok(());
    }
    match START_HOOK.get() {
        Some(hook) => hook(),
        None => {
            if std::env::var_os("TREFOIL_OBSERVE").is_some_and(|value| !value.is_empty()) {
                _ = writeln!(
                    io::stderr(),
                    "trefoil: TREFOIL_OBSERVE has no effect, because the program is built without \
                     the crate trefoil-observe (`use trefoil_observe as _;`)"
                );
            }
            Ok(())
        }
    }
}

thread_local! {
    /// The runtime that the caller observes instead of its own; see [`observe_runtime`].
    static OBSERVED: Cell<Option<&'static Sched>> = const { Cell::new(None) };
}

/// Calls `f`, in which [`with_sched`] finds `sched` instead of the caller's own runtime.
pub(crate) fn observe_runtime<T>(sched: &Arc<Sched>, f: impl FnOnce() -> T) -> T {
    struct Restore(Option<&'static Sched>);
    impl Drop for Restore {
        fn drop(&mut self) {
            OBSERVED.set(self.0);
        }
    }
    // SAFETY: the caller's reference keeps it alive until `f` has returned and `Restore` has
    // removed it from `OBSERVED`.
    let sched = unsafe { &*Arc::as_ptr(sched) };
    let _restore = Restore(OBSERVED.replace(Some(sched)));
    f()
}

/// Returns the runtime of goroutines that plain threads start with `go`. It lives as long as the
/// process.
pub(crate) fn default_sched() -> io::Result<&'static Sched> {
    static DEFAULT: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = DEFAULT.get() {
        return Ok(&runtime.sched);
    }
    let runtime = Runtime::builder().build()?;
    // There is no main goroutine, so the id 1 stays unused.
    runtime.sched.take_ids(1);
    // If another thread was faster, this runtime is dropped.
    Ok(&DEFAULT.get_or_init(|| runtime).sched)
}

/// Returns the caller's runtime, or the default runtime on a plain thread.
#[inline]
pub(crate) fn current_sched() -> io::Result<&'static Sched> {
    calls::current_sched().map_or_else(default_sched, Ok)
}

/// See [`waker::FIND_SCHED`].
#[track_caller]
fn find_sched() -> &'static Sched {
    if let Some(sched) = OBSERVED.get() {
        return sched;
    }
    match current_sched() {
        Ok(sched) => sched,
        Err(e) => panic!("trefoil cannot start: {e}"),
    }
}

/// Returns a new [`TaskWaiter`], for a future that may be polled before any runtime was started.
pub(crate) fn task_waiter() -> TaskWaiter {
    let _ = waker::FIND_SCHED.set(find_sched);
    TaskWaiter::new()
}

/// Calls `f` with the caller's runtime, or with the default runtime on a plain thread.
#[track_caller]
pub(crate) fn with_sched<T>(f: impl FnOnce(&Sched) -> T) -> T {
    f(find_sched())
}

/// Returns the number of goroutines that are alive in the caller's runtime, the caller included.
///
/// On a plain thread it is the default runtime's number. A goroutine that has ended is not counted.
///
/// ```
/// assert_eq!(trefoil::run(trefoil::num_goroutines), 1);
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn num_goroutines() -> usize {
    with_sched(Sched::num_goroutines) as usize
}

/// Returns the number of CPUs that the process may use: its affinity mask.
///
/// A CPU quota of the cgroup does not change it. [`procs`] is the number of goroutines that run at
/// the same time.
///
/// ```
/// assert!(trefoil::num_cpus() >= 1);
/// ```
pub fn num_cpus() -> usize {
    cpus::num_cpus()
}

/// Returns the number of Ps of the caller's runtime: how many goroutines may run at the same time.
/// It is Go's `GOMAXPROCS(0)`.
///
/// On a plain thread it is the default runtime's number. Use it to decide into how many parts
/// CPU-bound work is split.
///
/// ```
/// trefoil::run(|| {
///     let numbers: Vec<u64> = (1..=1000).collect();
///     let part = numbers.len().div_ceil(trefoil::procs());
///     let sum: u64 = trefoil::scope(|s| {
///         let parts: Vec<_> =
///             numbers.chunks(part).map(|part| s.go(|| part.iter().sum::<u64>())).collect();
///         parts.into_iter().map(|h| h.join().unwrap()).sum()
///     });
///     assert_eq!(sum, 500_500);
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn procs() -> usize {
    with_sched(Sched::procs) as usize
}

/// Changes the number of Ps of the caller's runtime and returns the previous number. It is Go's
/// `GOMAXPROCS(n)`.
///
/// On a plain thread it changes the default runtime. `n` is clamped to 1..=1024. The call is
/// possible at any time. A goroutine that runs on a P that is removed continues until its next
/// scheduling step. After the call, the number no longer follows the CPUs and the cgroup.
///
/// ```
/// trefoil::run(|| {
///     trefoil::set_procs(3);
///     assert_eq!(trefoil::set_procs(1), 3);
///     assert_eq!(trefoil::procs(), 1);
/// });
/// ```
///
/// # Panics
/// Panics if there is no memory for more Ps, and on a plain thread if the default runtime cannot
/// start.
#[track_caller]
pub fn set_procs(n: usize) -> usize {
    let resize = |sched: &Sched| {
        sched.follows_cpus.store(false, Relaxed);
        sched.resize(n).inspect(|_| sched.sysmon.wake())
    };
    let before = match with_sched(resize) {
        Ok(before) => before,
        Err(e) => panic!("set_procs({n}): {e}"),
    };
    match Rt::enter() {
        Some(rt) => sched::procs::after_resize(rt),
        None => with_sched(Sched::wake_after_push),
    }
    before
}
