//! Runtimes: `run`, `Runtime`, and the questions one asks of the runtime one is in.

use crate::goroutine::{Join, PanicMode};
use crate::sched::goroutine::spawn::{Place, Spec, spawn};
use crate::sched::monitor::sysmon::SLICE;
use crate::sched::{Config, Hooks, MAX_THREADS, Rt, Sched, current_g, switch};
use crate::sys::{cpus, env};
use crate::{arch, interpose, mem, observe};
use std::fmt;
use std::io;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Once, OnceLock};

/// Virtual stack of a goroutine, guard and thread-locals included.
pub(crate) const DEFAULT_STACK_BYTES: usize = 256 << 10;
/// Virtual stack of a main goroutine: as much as Linux gives a program's main thread.
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
/// The number of Ps is `TREFOIL_PROCS`, else `GOMAXPROCS`, else the number of CPUs and the CPU
/// quota of the cgroup decide. Use [`Runtime::builder`] for other settings.
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
            reserve: None,
            max_threads: None,
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
        let spec =
            Spec { name: Some("main".into()), stack_size: Some(MAIN_STACK_BYTES), ..Spec::plain() };
        // SAFETY: F and T are Send; what they borrow outlives this call, which returns only after the
        // goroutine has ended.
        let spawned = unsafe { spawn(Place::In(&self.sched), spec, f) };
        let main = match spawned {
            // SAFETY: just spawned, with result type T.
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
    pub fn go<F, T>(&self, f: F) -> io::Result<crate::JoinHandle<T>>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        // SAFETY: F and T are Send and 'static; and T is the result's type.
        unsafe {
            let g = spawn(Place::In(&self.sched), Spec::plain(), f)?;
            Ok(crate::JoinHandle::from_join(Join::new(g)))
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        self.sched.part();
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
    reserve: Option<bool>,
    max_threads: Option<usize>,
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
    /// libraries that are loaded later with `dlopen` and need static TLS. Defaults to `true`.
    ///
    /// Without the reserve, a small parked goroutine fits in one page instead of two. Loading a
    /// library that needs the reserve then ends the process with a message that gives the reason.
    /// All runtimes of a process share it, and the first goroutine of the process fixes it.
    ///
    /// ```
    /// let rt = trefoil::Runtime::builder().dlopen_reserve(false).build().unwrap();
    /// assert_eq!(rt.run(|| 6 * 7), 42);
    /// ```
    pub fn dlopen_reserve(mut self, keep: bool) -> Self {
        self.reserve = Some(keep);
        self
    }

    /// Sets the largest number of threads that run goroutines, at least 2. Defaults to 10,000.
    ///
    /// Each goroutine in a call that blocks its thread keeps one. When the limit is reached, the
    /// runtime prints one line on stderr, and goroutines wait until a thread is free.
    pub fn max_threads(mut self, n: usize) -> Self {
        self.max_threads = Some(n);
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
    ///   `GOMAXPROCS` or `TREFOIL_DEBUG` has a value that is not valid.
    /// - [`AlreadyExists`](io::ErrorKind::AlreadyExists): `stack_size` or `dlopen_reserve` was set
    ///   to another value than the first goroutine of the process has fixed. A builder that sets
    ///   one of the two sets the other to its default.
    /// - [`Unsupported`](io::ErrorKind::Unsupported): the thread-local storage of this glibc has a
    ///   layout that the runtime does not know.
    /// - Other kinds: the kernel refused memory or a thread, for example
    ///   [`WouldBlock`](io::ErrorKind::WouldBlock) when the limit of threads is reached.
    pub fn build(self) -> io::Result<Runtime> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        let env = env::read().map_err(invalid)?;
        if let Some(n) = self.procs
            && !(1..=crate::sched::MAX_PROCS).contains(&n)
        {
            return Err(invalid(format!("procs({n}): expected a number from 1 to 1024")));
        }
        let said = self.procs.or(env.procs);
        let procs = said.unwrap_or_else(cpus::default_procs);
        let max_threads = match self.max_threads {
            Some(n @ 0..2) => {
                let text =
                    format!("max_threads({n}): at least 2 are needed, because one may block");
                return Err(invalid(text));
            }
            Some(n) => u32::try_from(n).unwrap_or(u32::MAX),
            None => MAX_THREADS,
        };
        let signal = process_init(&env)?;
        if self.stack_size.is_some() || self.reserve.is_some() {
            let size = self.stack_size.unwrap_or(DEFAULT_STACK_BYTES);
            mem::configure(size, self.reserve.unwrap_or(true))?;
        }
        let config = Config {
            abort_on_panic: self.panic == PanicMode::Abort,
            schedtrace_ms: env.schedtrace_ms,
            scheddetail: env.scheddetail,
            first_id: 1,
            max_threads,
            async_preempt: signal,
            slice: env.slice_us.map_or(SLICE, |us| us * 1_000),
            follow_cpus: said.is_none(),
            hooks: Hooks {
                trace: observe::schedtrace::print,
                all_asleep: observe::deadlock::check,
                asked: observe::quit::asked,
                with_output: interpose::with_output,
            },
        };
        let sched = Sched::start(procs, config)?;
        observe::deadlock::register(&sched);
        observe::quit::install();
        Ok(Runtime { sched })
    }
}

/// What a process needs once, before its first goroutine. Whether goroutines can be preempted by a signal.
fn process_init(env: &env::Env) -> io::Result<bool> {
    static ONCE: Once = Once::new();
    static SIGNAL: AtomicBool = AtomicBool::new(false);
    ONCE.call_once(|| {
        arch::init();
        interpose::linked();
        if env.guards_mprotect {
            mem::force_mprotect_guards();
        }
        if env.tls_pthread {
            mem::tls::force_fallback();
        }
        observe::fault::install_handler();
        observe::panics::install_hook();
        if !env.asyncpreemptoff {
            SIGNAL.store(interpose::signals::install_preemption(env.preempt_signal), Relaxed);
        }
    });
    let layout = mem::tls::init()?;
    if let Some(why) = &layout.why
        && !env.tls_pthread
    {
        static SAY_ONCE: Once = Once::new();
        SAY_ONCE.call_once(|| {
            eprintln!(
                "trefoil: new goroutines are slow here (their TLS needs a thread each): {why}"
            );
        });
    }
    // It has made a thread, so glibc's handler is there to be wrapped.
    interpose::setxid::install();
    Ok(SIGNAL.load(Relaxed))
}

/// The runtime of goroutines that plain threads start with `go`. It lives as long as the process.
pub(crate) fn default_sched() -> io::Result<&'static Sched> {
    static DEFAULT: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = DEFAULT.get() {
        return Ok(&runtime.sched);
    }
    let runtime = Runtime::builder().build()?;
    // There is no main goroutine: its id stays unused.
    runtime.sched.take_ids(1);
    Ok(&DEFAULT.get_or_init(|| runtime).sched)
}

/// The caller's runtime, or the one that serves plain threads.
pub(crate) fn current_sched() -> io::Result<&'static Sched> {
    match current_g() {
        // SAFETY: a goroutine that runs keeps its runtime alive.
        Some(g) => Ok(unsafe { &*g.sched.get() }),
        None => default_sched(),
    }
}

/// Calls `f` with the runtime that the caller is in: its goroutine's, or the default one.
#[track_caller]
pub(crate) fn with_sched<T>(f: impl FnOnce(&Sched) -> T) -> T {
    match current_g() {
        // SAFETY: a goroutine that runs keeps its runtime alive.
        Some(g) => f(unsafe { &*g.sched.get() }),
        None => match default_sched() {
            Ok(sched) => f(sched),
            Err(e) => panic!("trefoil cannot start: {e}"),
        },
    }
}

/// Returns the number of goroutines that are alive in the caller's runtime, the caller included.
///
/// On a plain thread it is the default runtime's number. A goroutine that was joined is not
/// counted.
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
        Some(rt) => {
            rt.sched().wake_after_push();
            // If our own P is to go, let it.
            let asked = rt.has_request();
            if asked { switch::yield_now(rt).leave() } else { rt.leave() }
        }
        None => with_sched(Sched::wake_after_push),
    }
    before
}
