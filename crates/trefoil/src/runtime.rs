//! Runtimes: `run`, `Runtime`, and the questions one asks of the runtime one is in.

use crate::goroutine::{Join, PanicMode};
use crate::sched::spawn::{Place, Spec, spawn};
use crate::sched::sysmon::SLICE;
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

/// Runs `f` as the main goroutine (id 1) of a new runtime and returns its value. Goroutines that are left
/// when `f` returns are not waited for and are never resumed.
///
/// The number of Ps is `TREFOIL_PROCS`, or `GOMAXPROCS`, or what the machine has.
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
/// With `f`'s panic, if it panics; or when the runtime cannot start, saying why.
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

/// A scheduler of its own, with its own Ps and threads. Most programs need none: [`run`] makes one.
///
/// # Drop
/// Dropping it ends its threads at their next scheduling step, without waiting for them. A goroutine that
/// waits then is never resumed; one that runs goes on to its next runtime call, or for 2 ms of CPU time. What
/// they own is leaked, and a lock that one of them holds stays locked. But not those that the whole process
/// needs: a goroutine that panics, prints, allocates or holds a lock of C code goes on until it is out of it. (The
/// drop waits for standard output and error, for a second at most.) A goroutine that waits in line for a lock
/// or a permit of [`sync`](crate::sync) is passed over from then on, so those behind it get their turn; but if
/// it was handed the lock a moment before the drop, and had no time to run, then it holds it. A value that is
/// sent to a goroutine that waits at a channel is lost. So end goroutines that share such things with others
/// (a `scope`, a closed channel, a [`Context`](crate::context::Context)) before their runtime is dropped.
///
/// ```
/// let rt = trefoil::Runtime::builder().procs(2).build().unwrap();
/// assert_eq!(rt.run(trefoil::procs), 2);
/// assert_eq!(rt.run(|| 1) + rt.run(|| 2), 3);
/// ```
pub struct Runtime {
    sched: Arc<Sched>,
}

impl Runtime {
    /// Settings for a new runtime.
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder {
            procs: None,
            panic: PanicMode::Unwind,
            stack_size: None,
            reserve: None,
            max_threads: None,
        }
    }

    /// Runs `f` as a main goroutine and returns its value. `f` may borrow: the caller waits.
    ///
    /// # Panics
    /// With `f`'s panic, if it panics.
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

    /// Starts `f` as a goroutine of this runtime, from anywhere.
    ///
    /// # Errors
    /// As [`Builder::go`](crate::Builder::go).
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

/// Settings of a [`Runtime`].
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
    /// How many goroutines run at once: 1 to 1024. Wins over the environment.
    pub fn procs(mut self, n: usize) -> Self {
        self.procs = Some(n);
        self
    }

    /// What a panic in a goroutine does, unless its [`Builder`](crate::Builder) says otherwise.
    pub fn panic(mut self, mode: PanicMode) -> Self {
        self.panic = mode;
        self
    }

    /// Default stack size in bytes, rounded up to a power of two. One for the whole process: it can be set
    /// only before the first goroutine.
    pub fn stack_size(mut self, bytes: usize) -> Self {
        self.stack_size = Some(bytes);
        self
    }

    /// Whether every goroutine's thread-local storage keeps glibc's reserve (1.7 KiB) for libraries that are
    /// loaded later with `dlopen` and insist on static TLS. Without it a small parked goroutine fits in one
    /// page instead of two; loading such a library is then a fatal error that says so. One for the whole
    /// process: it can be set only before the first goroutine.
    pub fn dlopen_reserve(mut self, keep: bool) -> Self {
        self.reserve = Some(keep);
        self
    }

    /// The most threads that run goroutines; 10,000 unless it is said. Each goroutine in a blocking call
    /// keeps one. When there are so many, one line on stderr says so, and goroutines wait for a thread.
    pub fn max_threads(mut self, n: usize) -> Self {
        self.max_threads = Some(n);
        self
    }

    /// Starts the runtime.
    ///
    /// # Errors
    /// When a setting or an environment variable makes no sense, when threads or memory are not to be had,
    /// or when this glibc's thread-local storage is not understood. The message says which.
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
        observe::deadlock::enrol(&sched);
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

/// Goroutines alive in this runtime, the caller included.
///
/// ```
/// assert_eq!(trefoil::run(trefoil::num_goroutines), 1);
/// ```
pub fn num_goroutines() -> usize {
    with_sched(Sched::num_goroutines) as usize
}

/// CPUs this process may use.
pub fn num_cpus() -> usize {
    cpus::num_cpus()
}

/// How many goroutines may run at once in this runtime (Go's `GOMAXPROCS`).
pub fn procs() -> usize {
    with_sched(Sched::procs) as usize
}

/// Changes how many goroutines may run at once, to 1 to 1024 (larger and smaller values are taken as
/// these), and returns what it was. May be called at any time: where a goroutine runs on a P that is to
/// go, it goes on until its next scheduling step.
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
/// When there is no memory for more Ps.
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
            let asked = rt.p().flags.load(std::sync::atomic::Ordering::Relaxed) != 0;
            if asked { switch::yield_now(rt).leave() } else { rt.leave() }
        }
        None => with_sched(Sched::wake_after_push),
    }
    before
}
