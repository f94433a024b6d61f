//! Simulation: tests that own the time and the schedule.
//!
//! In a simulation the clock stands still while any goroutine can run, and jumps to the next timer
//! when all of them wait. [`Instant`], [`SystemTime`](std::time::SystemTime),
//! [`time`](crate::time), and the sleeps and timeouts of std, of C libraries and of other crates
//! all use that clock. (Without the feature `std`, only `time` and the waits of this crate do.) So
//! a test with sleeps takes no time and does not depend on the machine's load:
//!
//! ```
//! use std::time::{Duration, Instant};
//! use trefoil::sim;
//!
//! let began = Instant::now();
//! let hour = sim::run(|| {
//!     let begin = Instant::now();
//!     std::thread::sleep(Duration::from_secs(3600));
//!     begin.elapsed()
//! });
//! assert_eq!(hour, Duration::from_secs(3600));
//! assert!(began.elapsed() < Duration::from_secs(60));
//! ```
//!
//! One P runs the goroutines, and a seed makes every decision: which runnable goroutine runs next,
//! whether the running goroutine is preempted at this call of the runtime or of libc, the order of
//! select arms, random numbers and the keys of `HashMap`. [`explore`] tries many seeds and stops at
//! the first that fails. It prints the seed, and `TREFOIL_SEED` repeats that run:
//!
//! ```should_panic
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
//! use trefoil::{go, sim, yield_now};
//!
//! // Two goroutines read, then write: one of the two additions may be lost.
//! sim::explore(1_000, || {
//!     let n = Arc::new(AtomicU32::new(0));
//!     let add = |n: Arc<AtomicU32>| {
//!         let before = n.load(SeqCst);
//!         yield_now();
//!         n.store(before + 1, SeqCst);
//!     };
//!     let other = go({ let n = n.clone(); move || add(n) });
//!     add(n.clone());
//!     other.join().unwrap();
//!     assert_eq!(n.load(SeqCst), 2, "an addition was lost");
//! });
//! ```
//!
//! Threads are simulated, too: a thread that starts in a simulation is a goroutine. So are Internet
//! sockets. [`host`] adds machines with names, addresses and disks to the
//! network, and [`net`] lets a test delay, lose, cut and reset what is between them.
//!
//! # What fails
//! - a panic in any goroutine or task, unless it is caught;
//! - a deadlock: all goroutines wait, no timer is set, and nothing is on its way in the network;
//! - a goroutine or task of the test itself that still waits after the first function has returned.
//!   From then on the time stands still. Goroutines of other hosts do not count: their hosts lose
//!   their power at that moment. Nor do threads of the test: after the function has returned, each
//!   runs until it waits or sleeps (all together at most 10,000 steps), and never again after that;
//! - more steps than [`Builder::max_steps`] allows: an endless loop, if it makes calls or sleeps.
//!
//! # Several simulations
//! The simulations of a process take turns, because they share its statics. Simulations with
//! [`Builder::wait_outside`], and those that a simulation starts, do not take turns. To run long
//! explorations in parallel, give each a process of its own, as `cargo nextest` does.
//!
//! # What is not simulated
//! - A goroutine that would wait for a pipe, a Unix socket, a child process or a `timerfd` gets an
//!   error, because the simulation cannot know when it becomes ready. Internet sockets, epoll
//!   instances and eventfds are simulated.
//!   [`Builder::wait_outside`] lets the time stand still meanwhile; such a run is not repeatable.
//! - Between two calls of the runtime or of libc a goroutine is not preempted. An uncontended lock
//!   of std makes no call. `lock`, `read`, `write` and the unlocks of [`sync`]'s `Mutex`
//!   and `RwLock` are calls, also without contention.
//! - Threads that were started outside, raw system calls, signals, timers of the kernel (`timerfd`,
//!   `alarm`), the CPU's counter (`rdtsc`), CPU-time clocks, and addresses of memory: what depends
//!   on them may differ from run to run. Random numbers in tasks may, too.
//! - A child process that starts outside by `vfork`, `system`, `popen` or a raw system call has the
//!   sockets of the simulation for a moment. A close in that moment takes effect later, and such a
//!   run may not be repeatable. `posix_spawn`, `fork` and std's `Command` do not disturb a run.
//! - A goroutine that blocks its thread (in [`blocking`](crate::blocking()), in the join of a
//!   thread from outside) stops the whole simulation until the call returns.

#[cfg(feature = "std")]
mod net;

#[cfg(feature = "std")]
pub use net::{Host, Link, Net, disk, host, net};

use crate::debug;
use crate::goroutine::{Builder as GoBuilder, id};
use crate::interpose::EnterAtWakes;
use crate::runtime::Runtime;
use crate::sched::simulation::schedule::{Deviation, MAX_PREEMPTIONS, Strategy, scramble};
use crate::sched::simulation::{self, Counts, End, Outside, Plan, Simulation};
#[cfg(feature = "std")]
use crate::simnet::Network;
use crate::sync;
use crate::sys::clock::{self, NEVER, Nanos};
use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The stack of a simulated function: that of a main goroutine.
const ROOT_STACK_BYTES: usize = 8 << 20;
/// The default of [`Builder::max_steps`].
const MAX_STEPS: u64 = 1_000_000;
/// The most runs that are spent on shrinking a schedule.
const SHRINK_RUNS: u32 = 400;
/// The default of [`Builder::max_shrink_time`].
const MAX_SHRINK_TIME: Duration = Duration::from_secs(10);
/// A run is repeated so often before two in a row must be alike: it may change statics, such as a
/// table that grows with the number of goroutines.
const REPEATS: u32 = 3;
/// A schedule that could not be shrunk is shown if it has at most so many deviations.
const SHOWN_DEVIATIONS: usize = 1000;
/// The environment variable with the seed of a run to repeat.
const SEED_VARIABLE: &str = "TREFOIL_SEED";

/// Held by the simulation that runs. Simulations of one process share its statics, and a lock that
/// another simulation holds for a moment must not let the time jump.
static ONE_AT_A_TIME: sync::Mutex<()> = sync::Mutex::new(());
/// How long the runs of [`Builder::explore`] continue before another simulation gets its turn.
const TURN_NANOS: Nanos = 200_000_000;

/// Runs `f` in a simulation and returns its value.
///
/// The goroutines run in an order that does not change from run to run, without preemption:
/// [`explore`] tries other orders. If `TREFOIL_SEED` is set, it chooses the order.
///
/// ```
/// use trefoil::{chan, go, sim, time};
/// use std::time::Duration;
///
/// let late = sim::run(|| {
///     let (tx, rx) = chan::bounded::<()>(1);
///     let other = go(move || { time::sleep(Duration::from_secs(60)); drop(tx) });
///     let late = rx.recv_timeout(Duration::from_secs(59)).is_err();
///     other.join().unwrap();
///     late
/// });
/// assert!(late);
/// ```
///
/// # Panics
/// Panics with the payload of `f` if `f` panics. Panics with a report if the simulation fails; see
/// the [module](self).
#[track_caller]
pub fn run<F, T>(f: F) -> T
where
    F: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    builder().run(f)
}

/// Runs `f` in `runs` simulations, each with another schedule. Stops at the first that fails.
///
/// If `TREFOIL_SEED` is set, only that run is made, after some whose panics are not printed: they
/// initialise statics.
///
/// ```
/// use trefoil::{chan, go, sim};
///
/// sim::explore(100, || {
///     let (tx, rx) = chan::bounded(1);
///     for i in 0..3 {
///         let tx = tx.clone();
///         go(move || tx.send(i).unwrap());
///     }
///     drop(tx);
///     assert_eq!(rx.iter().sum::<i32>(), 3);
/// });
/// ```
///
/// # Panics
/// Panics with a report if a run fails: how it failed, its seed, and the fewest deviations from the
/// ordinary schedule that were found to fail.
#[track_caller]
pub fn explore<F>(runs: u64, f: F)
where
    F: Fn() + Send + Sync + 'static,
{
    if let Err(failure) = builder().explore(runs, f) {
        panic!("{failure}");
    }
}

/// Waits until all other goroutines of the simulation wait for something that only another
/// goroutine or a timer can bring. Go's `synctest.Wait`.
///
/// The time does not pass meanwhile.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
/// use trefoil::{go, sim};
///
/// sim::run(|| {
///     let done = Arc::new(AtomicBool::new(false));
///     let flag = done.clone();
///     let handle = go(move || flag.store(true, SeqCst));
///     sim::settle();
///     assert!(done.load(SeqCst));
///     handle.join().unwrap();
/// });
/// ```
///
/// # Panics
/// Panics outside a simulation.
#[track_caller]
pub fn settle() {
    match simulation::here() {
        Some(simulation) => simulation::settle(simulation),
        None => panic!("sim::settle: the caller is not in a simulation (sim::run)"),
    }
}

/// Returns whether the caller runs in a simulation.
///
/// ```
/// use trefoil::sim;
/// assert!(!sim::is_simulated());
/// assert!(sim::run(sim::is_simulated));
/// ```
pub fn is_simulated() -> bool {
    simulation::here().is_some()
}

/// Returns the default settings of a simulation.
///
/// ```
/// let explored = trefoil::sim::builder().seed(7).explore(10, || ()).unwrap();
/// assert_eq!(explored.runs, 10);
/// ```
pub fn builder() -> Builder {
    Builder {
        seed: 0,
        max_steps: MAX_STEPS,
        outside: Outside::Refuse,
        max_shrink_time: MAX_SHRINK_TIME,
    }
}

/// The settings of a simulation. See [`builder`].
///
/// ```
/// let settings = trefoil::sim::builder().seed(3).max_steps(10_000);
/// settings.explore(5, || ()).unwrap();
/// ```
#[derive(Clone, Debug)]
#[must_use = "settings do nothing until `run` or `explore`"]
pub struct Builder {
    seed: u64,
    max_steps: u64,
    outside: Outside,
    max_shrink_time: Duration,
}

/// What [`Builder::explore`] has run without a failure.
///
/// ```
/// use std::time::Duration;
///
/// let sleep = || trefoil::time::sleep(Duration::from_secs(60));
/// let explored = trefoil::sim::builder().explore(10, sleep).unwrap();
/// assert_eq!(explored.simulated, Duration::from_secs(600));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Explored {
    /// The number of runs.
    pub runs: u64,
    /// The steps of all runs: goroutines that were chosen, and calls at which the running one could
    /// be preempted.
    pub steps: u64,
    /// The simulated time of all runs.
    pub simulated: Duration,
}

/// How a run has failed. Its `Display` is the report.
///
/// ```
/// let (tx, rx) = trefoil::chan::bounded::<()>(0);
/// let program = move || drop((&tx, rx.recv()));
/// let failure = trefoil::sim::builder().explore(1, program).unwrap_err();
/// assert!(failure.to_string().contains("deadlock"));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The kind of failure.
    pub kind: FailureKind,
    /// The panic message, or which goroutines wait, and where.
    pub message: String,
    /// What `TREFOIL_SEED` must be to repeat the run.
    pub seed: Seed,
    /// The same failure with fewer deviations from the ordinary schedule, if one was found.
    pub shrunk: Option<Seed>,
    /// The number of runs before this one.
    pub runs: u64,
    /// Whether a second run with the same seed made the same decisions and failed alike.
    pub is_repeatable: bool,
}

/// The ways in which a run fails.
///
/// ```
/// use trefoil::sim::FailureKind;
/// assert!(FailureKind::Panic.to_string().contains("panicked"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FailureKind {
    /// A goroutine or task panicked.
    Panic,
    /// All goroutines wait, no timer is set, and nothing is on its way in the network.
    Deadlock,
    /// Goroutines or tasks of the test itself wait after the first function has returned.
    Outlived,
    /// The run took more steps than [`Builder::max_steps`] allows.
    TooManySteps,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FailureKind::Panic => "a goroutine panicked",
            FailureKind::Deadlock => "deadlock: all goroutines wait, and no timer is set",
            FailureKind::Outlived => "goroutines are left after the first function has returned",
            FailureKind::TooManySteps => "the run takes more steps than allowed",
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "simulation failed after {} runs: {}", self.runs, self.kind)?;
        for line in self.message.lines() {
            writeln!(f, "  {line}")?;
        }
        writeln!(f, "to repeat this run: {SEED_VARIABLE}={}", self.seed)?;
        if let Some(shrunk) = &self.shrunk {
            let n = shrunk.deviations.len();
            writeln!(
                f,
                "with {n} deviations from the ordinary schedule: {SEED_VARIABLE}={shrunk}"
            )?;
        }
        if !self.is_repeatable {
            writeln!(
                f,
                "a second run with this seed differed: the program depends on something that is not \
                 simulated, such as a thread, an address, or state from earlier runs"
            )?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// What determines a run: printed after a failure, and read from `TREFOIL_SEED`.
///
/// ```
/// use trefoil::sim::Seed;
///
/// let seed: Seed = "uniform:2a".parse().unwrap();
/// assert_eq!(seed.to_string(), "uniform:2a");
/// assert!("nonsense".parse::<Seed>().is_err());
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Seed {
    number: u64,
    strategy: Strategy,
    /// For `Strategy::Replay`.
    deviations: Arc<[Deviation]>,
    /// Over the events of the run that it was made for.
    hash: Option<u64>,
}

impl fmt::Display for Seed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.strategy {
            Strategy::Ordinary => f.write_str("ordinary")?,
            Strategy::Uniform => f.write_str("uniform")?,
            Strategy::Starve => f.write_str("starve")?,
            Strategy::Priorities { preemptions, within } => {
                write!(f, "priorities-{preemptions}-{within}")?;
            }
            Strategy::Replay => {
                f.write_str("replay")?;
                for Deviation { step, answer } in self.deviations.iter() {
                    write!(f, "-{step}.{answer}")?;
                }
            }
        }
        write!(f, ":{:x}", self.number)?;
        self.hash.map_or(Ok(()), |hash| write!(f, ":{hash:x}"))
    }
}

impl Seed {
    /// Returns whether `run` made the decisions of the run that the seed was made for.
    fn is_of(&self, run: &Run) -> bool {
        self.hash.is_none_or(|hash| hash == run.counts.hash)
    }

    /// As [`Seed::is_of`]. Prints a line if the decisions differ.
    fn compare(&self, run: &Run) -> bool {
        let is_same = self.is_of(run);
        if !is_same {
            eprintln!(
                "trefoil: {SEED_VARIABLE}={self}: this run differs from the one that printed the seed"
            );
        }
        is_same
    }
}

/// `TREFOIL_SEED`, or another text, is not a [`Seed`].
///
/// ```
/// let error = "x".parse::<trefoil::sim::Seed>().unwrap_err();
/// assert!(error.to_string().contains("is not a seed"));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseSeedError(String);

impl fmt::Display for ParseSeedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.0;
        write!(f, "{text:?} is not a seed: expected what a failed simulation has printed")
    }
}

impl std::error::Error for ParseSeedError {}

impl FromStr for Seed {
    type Err = ParseSeedError;

    fn from_str(text: &str) -> Result<Seed, ParseSeedError> {
        let parse = || {
            let mut parts = text.trim().split(':');
            let mut words = parts.next()?.split('-');
            let mut deviations = Vec::new();
            let strategy = match words.next()? {
                "ordinary" => Strategy::Ordinary,
                "uniform" => Strategy::Uniform,
                "starve" => Strategy::Starve,
                "priorities" => Strategy::Priorities {
                    preemptions: words.next()?.parse().ok().filter(|&n| n <= MAX_PREEMPTIONS)?,
                    within: words.next()?.parse().ok()?,
                },
                "replay" => {
                    for word in words.by_ref() {
                        let (step, answer) = word.split_once('.')?;
                        let (step, answer) = (step.parse().ok()?, answer.parse().ok()?);
                        deviations.push(Deviation { step, answer });
                    }
                    let begins = deviations.first().is_none_or(|d: &Deviation| d.step > 0);
                    let ascends = deviations.is_sorted_by(|a, b| a.step < b.step);
                    (begins && ascends).then_some(Strategy::Replay)?
                }
                _ => return None,
            };
            let hex = |text| u64::from_str_radix(text, 16).ok();
            let number = hex(parts.next()?)?;
            let hash = match parts.next() {
                Some(text) => Some(hex(text)?),
                None => None,
            };
            let is_whole = words.next().is_none() && parts.next().is_none();
            is_whole.then(|| Seed { number, strategy, deviations: deviations.into(), hash })
        };
        parse().ok_or_else(|| ParseSeedError(text.to_owned()))
    }
}

impl Builder {
    /// Sets the number from which the seeds of all runs are made. Defaults to 0, so that a test
    /// tries the same schedules each time.
    ///
    /// ```
    /// trefoil::sim::builder().seed(1).explore(10, || ()).unwrap();
    /// ```
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the most steps of a run: goroutines that are chosen, and calls at which the running one
    /// may be preempted. Defaults to a million.
    ///
    /// ```
    /// use trefoil::sim::{self, FailureKind};
    ///
    /// let endless = || loop { trefoil::yield_now() };
    /// let failure = sim::builder().max_steps(1_000).explore(1, endless).unwrap_err();
    /// assert_eq!(failure.kind, FailureKind::TooManySteps);
    /// ```
    pub fn max_steps(mut self, steps: u64) -> Self {
        self.max_steps = steps;
        self
    }

    /// Sets the longest time that is spent on shrinking the schedule of a run that failed. Defaults
    /// to ten seconds. This is real time, not simulated time.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// let settings = trefoil::sim::builder().max_shrink_time(Duration::ZERO);
    /// assert!(settings.explore(1, || panic!("at once")).is_err());
    /// ```
    pub fn max_shrink_time(mut self, limit: Duration) -> Self {
        self.max_shrink_time = limit;
        self
    }

    /// Allows goroutines to wait for descriptors outside the simulation: pipes, Unix sockets, child
    /// processes. The time stands still meanwhile, and such a run is not repeatable.
    ///
    /// There is no simulated network then: Internet sockets are real ones, and `sim::host`,
    /// `sim::net` and `sim::disk` panic.
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use std::os::unix::net::UnixStream;
    ///
    /// trefoil::sim::builder().wait_outside().run(|| {
    ///     let (mut a, mut b) = UnixStream::pair().unwrap();
    ///     let other = trefoil::go(move || b.write_all(b"!").unwrap());
    ///     let mut byte = [0];
    ///     a.read_exact(&mut byte).unwrap();
    ///     assert_eq!(byte, *b"!");
    ///     other.join().unwrap();
    /// });
    /// ```
    pub fn wait_outside(mut self) -> Self {
        self.outside = Outside::Wait;
        self
    }

    /// Runs `f` in a simulation with these settings. See [`run`].
    ///
    /// ```
    /// assert_eq!(trefoil::sim::builder().run(|| 6 * 7), 42);
    /// ```
    ///
    /// # Panics
    /// As [`run`].
    #[track_caller]
    pub fn run<F, T>(self, f: F) -> T
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        let seed = seed_of_environment().unwrap_or_else(|| Seed {
            number: self.seed,
            strategy: Strategy::Ordinary,
            deviations: Arc::default(),
            hash: None,
        });
        let (value, run) = self.run_once(&seed, Output::Shown, f);
        seed.compare(&run);
        match (run.failure(), value) {
            (None, Some(Ok(value))) => value,
            (Some((FailureKind::Panic, _)), Some(Err(payload))) => resume_unwind(payload),
            (Some((kind, message)), _) => {
                let seed = Seed { hash: Some(run.counts.hash), ..seed };
                panic!("simulation failed: {kind}\n{message}\n{SEED_VARIABLE}={seed}")
            }
            (None, _) => unreachable!("a run without a failure has a value"),
        }
    }

    /// Runs `f` in `runs` simulations with these settings, each with another schedule. See
    /// [`explore`].
    ///
    /// ```
    /// use trefoil::sim::{self, FailureKind};
    ///
    /// let failure = sim::builder().explore(10, || panic!("oh")).unwrap_err();
    /// assert_eq!(failure.kind, FailureKind::Panic);
    /// assert!(failure.message.contains("oh"));
    /// ```
    ///
    /// # Errors
    /// The first failure.
    ///
    /// # Panics
    /// Panics if the runtime cannot start, or if `TREFOIL_SEED` is not a [`Seed`].
    pub fn explore<F>(self, runs: u64, f: F) -> Result<Explored, Box<Failure>>
    where
        F: Fn() + Send + Sync + 'static,
    {
        let f = Arc::new(f);
        if let Some(seed) = seed_of_environment() {
            return self.repeat(&seed, Output::Shown, &f);
        }
        let mut explored = Explored { runs: 0, steps: 0, simulated: Duration::ZERO };
        let failed = self.run_many(runs, &f, &mut explored);
        let Some((seed, run)) = failed else { return Ok(explored) };
        let (kind, message) = run.failure().unwrap_or((FailureKind::Panic, String::new()));
        let mut run = run;
        let mut is_repeatable = false;
        for _ in 0..REPEATS {
            let again = self.run_quietly(&seed, &f);
            if !again.is_like(&run) {
                break;
            }
            is_repeatable = again.counts.hash == run.counts.hash;
            run = again;
            if is_repeatable {
                break;
            }
        }
        let shrunk = if is_repeatable { self.shrink(&seed, &run, &f) } else { None };
        let seed = Seed { hash: Some(run.counts.hash), ..seed };
        Err(Box::new(Failure { kind, message, seed, shrunk, runs: explored.runs, is_repeatable }))
    }

    /// Repeats the run of a seed that a [`Failure`] has reported, and prints nothing.
    /// `TREFOIL_SEED` is not read.
    ///
    /// As in [`Builder::explore`], an ordinary run comes first, which may initialise statics. If
    /// the run does not make the decisions of the seed, up to three more follow: earlier runs may
    /// have changed statics.
    ///
    /// ```
    /// use trefoil::{chan, go, sim};
    ///
    /// let program = || {
    ///     let (tx, rx) = chan::bounded(2);
    ///     let other = tx.clone();
    ///     let handle = go(move || other.send(1).unwrap());
    ///     tx.send(2).unwrap();
    ///     handle.join().unwrap();
    ///     assert_eq!(rx.recv(), Ok(2), "the other goroutine was faster");
    /// };
    /// let failure = sim::builder().explore(1_000, program).unwrap_err();
    /// let again = sim::builder().replay(&failure.seed, program).unwrap_err();
    /// assert_eq!(again.message, failure.message);
    /// assert!(again.is_repeatable);
    /// ```
    ///
    /// # Errors
    /// The failure of the run. Its `is_repeatable` is whether the run made the decisions of the one
    /// that the seed was made for.
    ///
    /// # Panics
    /// Panics if the runtime cannot start.
    pub fn replay<F>(self, seed: &Seed, f: F) -> Result<Explored, Box<Failure>>
    where
        F: Fn() + Send + Sync + 'static,
    {
        self.repeat(seed, Output::Reported, &Arc::new(f))
    }

    /// Makes one run again, after an ordinary one, which [`Builder::run_many`] has made first, too.
    fn repeat<F>(&self, seed: &Seed, output: Output, f: &Arc<F>) -> Result<Explored, Box<Failure>>
    where
        F: Fn() + Send + Sync + 'static,
    {
        if seed.strategy != Strategy::Ordinary {
            self.run_quietly(&self.seed_of_run(0, 0), f);
        }
        if seed.hash.is_some() {
            // As `explore` did before it reported the seed.
            let _ = (0..REPEATS).any(|_| seed.is_of(&self.run_quietly(seed, f)));
        }
        let f = f.clone();
        let (_, run) = self.run_once(seed, output, move || f());
        let is_repeatable = match output {
            Output::Shown => seed.compare(&run),
            Output::Reported | Output::Silenced => seed.is_of(&run),
        };
        match run.failure() {
            None => Ok(Explored {
                runs: 1,
                steps: run.counts.steps,
                simulated: Duration::from_nanos(run.counts.elapsed),
            }),
            Some((kind, message)) => {
                let seed = Seed { hash: Some(run.counts.hash), ..seed.clone() };
                Err(Box::new(Failure { kind, message, seed, shrunk: None, runs: 0, is_repeatable }))
            }
        }
    }

    /// Makes runs until one fails, and returns that one.
    fn run_many<F>(&self, runs: u64, f: &Arc<F>, explored: &mut Explored) -> Option<(Seed, Run)>
    where
        F: Fn() + Send + Sync + 'static,
    {
        let (mut i, mut longest) = (0, 0);
        while i < runs {
            let failed = self.run_some(runs, f, &mut i, &mut longest, explored);
            if failed.is_some() {
                return failed;
            }
        }
        None
    }

    /// Makes runs from number `next` on in one runtime, until one fails or leaves goroutines of
    /// hosts, or the turn of this simulation is over. Returns the one that has failed.
    fn run_some<F>(
        &self,
        runs: u64,
        f: &Arc<F>,
        next: &mut u64,
        longest: &mut u64,
        explored: &mut Explored,
    ) -> Option<(Seed, Run)>
    where
        F: Fn() + Send + Sync + 'static,
    {
        self.with_runtime(|simulation| {
            let turn_ends = clock::real_now() + TURN_NANOS;
            while *next < runs && clock::real_now() < turn_ends {
                let i = *next;
                *next += 1;
                let seed = self.seed_of_run(i, *longest);
                let f = f.clone();
                let (_, run) = self.one_run(simulation, &seed, Output::Shown, move || f());
                if run.failure().is_some() {
                    return Some((seed, run));
                }
                // The first run may initialise statics, and so make calls that later runs do not.
                if i > 0 {
                    *longest = (*longest).max(run.counts.decisions);
                }
                explored.runs += 1;
                explored.steps += run.counts.steps;
                explored.simulated += Duration::from_nanos(run.counts.elapsed);
                if !run.may_go_on {
                    break;
                }
            }
            None
        })
    }

    /// Returns the seed of the run numbered `i`. The longest run before had `steps` steps.
    fn seed_of_run(&self, i: u64, steps: u64) -> Seed {
        let within = steps.max(1);
        let strategy = match i {
            0 => Strategy::Ordinary,
            _ => match i % 6 {
                2 => Strategy::Priorities { preemptions: 1, within },
                3 => Strategy::Priorities { preemptions: 2, within },
                5 => Strategy::Priorities { preemptions: 3 + (i / 6 % 4) as u32, within },
                4 => Strategy::Starve,
                _ => Strategy::Uniform,
            },
        };
        let number = scramble(scramble(self.seed) ^ i);
        Seed { number, strategy, deviations: Arc::default(), hash: None }
    }

    /// Makes one run in a runtime of its own, and prints nothing.
    fn run_quietly<F>(&self, seed: &Seed, f: &Arc<F>) -> Run
    where
        F: Fn() + Send + Sync + 'static,
    {
        let f = f.clone();
        self.with_runtime(|simulation| {
            self.one_run(simulation, seed, Output::Silenced, move || f()).1
        })
    }

    /// Makes one run in a runtime of its own.
    fn run_once<F, T>(&self, seed: &Seed, output: Output, f: F) -> (Option<Returned<T>>, Run)
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        self.with_runtime(|simulation| self.one_run(simulation, seed, output, f))
    }

    /// Calls `f` as the driver of a new simulated runtime.
    fn with_runtime<T: Send>(&self, f: impl FnOnce(&'static Simulation) -> T + Send) -> T {
        // A simulation inside another one has no turn; nor one that may wait for another one.
        let is_alone = self.outside == Outside::Refuse && !is_simulated();
        let _turn = is_alone.then(|| ONE_AT_A_TIME.lock());
        let runtime = match Runtime::builder().simulated(self.outside).build() {
            Ok(runtime) => runtime,
            Err(e) => panic!("cannot start a simulation: {e}"),
        };
        #[cfg(feature = "std")]
        crate::interpose::find_std_lock();
        let _enter = EnterAtWakes::new();
        let drive = || match simulation::here() {
            Some(simulation) => {
                let value = f(simulation);
                (value, simulation.world())
            }
            None => unreachable!("the runtime is simulated"),
        };
        let (value, _world) = runtime.run(drive);
        drop(runtime);
        #[cfg(feature = "std")]
        if let Some(network) = _world.and_then(Network::from_world) {
            network.release_retired();
        }
        value
    }

    /// Makes one run. The caller is the driver.
    fn one_run<F, T>(
        &self,
        simulation: &'static Simulation,
        seed: &Seed,
        output: Output,
        f: F,
    ) -> (Option<Returned<T>>, Run)
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        simulation.silence(output != Output::Shown);
        let plan = Plan {
            seed: seed.number,
            strategy: seed.strategy,
            deviations: &seed.deviations,
            max_steps: self.max_steps,
        };
        #[cfg(feature = "std")]
        let network = self.surround(simulation, seed);
        simulation::begin(simulation, &plan);
        let returned = Arc::new(Mutex::new(None));
        let to = returned.clone();
        let root = move || {
            let value = catch_unwind(AssertUnwindSafe(f));
            if value.is_err() {
                simulation.count_panic(id());
            }
            *to.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
            simulation::root_ended(simulation);
        };
        let root = GoBuilder::new().name("root").stack_size(ROOT_STACK_BYTES).go(root);
        let root = root.unwrap_or_else(|e| panic!("cannot start a simulation: {e}"));
        drop(root);
        #[cfg(feature = "std")]
        let advance = || network.as_ref().map_or(NEVER, |network| network.advance());
        #[cfg(not(feature = "std"))]
        let advance = || NEVER;
        let (end, counts) = simulation::wait_for_end(simulation, advance);
        let waiting = match end {
            End::Ended => String::new(),
            End::Deadlock | End::Outlived | End::Steps if output == Output::Silenced => {
                String::new()
            }
            End::Deadlock | End::Outlived | End::Steps => dump_without_driver(),
        };
        let deviations = simulation.deviations();
        let panicked = simulation.take_panic_message();
        #[cfg(feature = "std")]
        if let Some(network) = network {
            network.end(end != End::Ended, &simulation.waited_by_threads());
        }
        let may_go_on = simulation::finish(simulation);
        if may_go_on {
            simulation.set_world(None);
        }
        let value = returned.lock().unwrap_or_else(PoisonError::into_inner).take();
        (value, Run { end, counts, deviations, panicked, waiting, may_go_on })
    }

    /// Gives the next run a network, unless its sockets are real ones.
    #[cfg(feature = "std")]
    fn surround(&self, simulation: &Simulation, seed: &Seed) -> Option<Arc<Network>> {
        if self.outside == Outside::Wait {
            return None;
        }
        let network = Arc::new(Network::new(scramble(scramble(seed.number))));
        simulation.set_world(Some(network.clone()));
        Some(network)
    }

    /// Searches a run with fewer deviations that fails alike.
    fn shrink<F>(&self, seed: &Seed, failed: &Run, f: &Arc<F>) -> Option<Seed>
    where
        F: Fn() + Send + Sync + 'static,
    {
        let begin = Instant::now();
        let runs = Cell::new(0);
        let has_time = || runs.get() < SHRINK_RUNS && begin.elapsed() < self.max_shrink_time;
        let attempt = |deviations: &[Deviation]| {
            runs.set(runs.get() + 1);
            let seed = Seed {
                number: seed.number,
                strategy: Strategy::Replay,
                deviations: deviations.into(),
                hash: None,
            };
            let run = self.run_quietly(&seed, f);
            let is_alike = run.is_like(failed);
            is_alike.then_some(Seed { hash: Some(run.counts.hash), ..seed })
        };
        let mut best = attempt(&failed.deviations)?;
        // Delta debugging: parts are removed, ever smaller ones.
        let mut parts = 2;
        while !best.deviations.is_empty() && has_time() {
            let all = best.deviations.clone();
            let size = all.len().div_ceil(parts);
            let smaller = (0..all.len()).step_by(size).find_map(|at| {
                if !has_time() {
                    return None;
                }
                let (before, after) = (&all[..at], &all[(at + size).min(all.len())..]);
                attempt(&[before, after].concat())
            });
            match smaller {
                Some(smaller) => {
                    best = smaller;
                    parts = parts.saturating_sub(1).max(2);
                }
                None if size == 1 => break,
                None => parts = (parts * 2).min(all.len()),
            }
        }
        let is_shorter = best.deviations.len() < failed.deviations.len().max(1);
        (is_shorter || best.deviations.len() <= SHOWN_DEVIATIONS).then_some(best)
    }
}

/// Whether a run prints panic messages, and whether it dumps the goroutines that are left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Output {
    /// Both.
    Shown,
    /// Only the dump, which is part of the failure.
    Reported,
    /// Neither.
    Silenced,
}

/// What the function of a run has returned, or its panic.
type Returned<T> = Result<T, Box<dyn Any + Send>>;

/// What happened in a run.
struct Run {
    end: End,
    counts: Counts,
    deviations: Vec<Deviation>,
    /// The message of the first panic.
    panicked: Option<String>,
    /// The dump, if goroutines are left.
    waiting: String,
    /// Another run may follow in the same runtime.
    may_go_on: bool,
}

impl Run {
    /// Returns how the run has failed, and the message. None if it has not.
    fn failure(&self) -> Option<(FailureKind, String)> {
        if self.counts.panics > 0 {
            let unknown = || "(its message is not known)".to_owned();
            return Some((FailureKind::Panic, self.panicked.clone().unwrap_or_else(unknown)));
        }
        let kind = match self.end {
            End::Ended => return None,
            End::Deadlock => FailureKind::Deadlock,
            End::Outlived => FailureKind::Outlived,
            End::Steps => FailureKind::TooManySteps,
        };
        Some((kind, self.waiting.clone()))
    }

    /// Returns whether the other run failed in the same way, with the same panic message.
    fn is_like(&self, other: &Run) -> bool {
        let kind = |run: &Run| run.failure().map(|(kind, _)| kind);
        kind(self) == kind(other) && self.panicked == other.panicked
    }
}

/// Returns a dump of the goroutines of the simulation, without the caller.
fn dump_without_driver() -> String {
    let driver = format!("goroutine {} ", id());
    let dump = debug::dump();
    let others = dump.split("\n\n").filter(|part| !part.starts_with(&driver));
    others.map(str::to_owned).collect::<Vec<_>>().join("\n\n")
}

/// Returns the seed in `TREFOIL_SEED`.
#[track_caller]
fn seed_of_environment() -> Option<Seed> {
    let text = std::env::var(SEED_VARIABLE).ok()?;
    match text.parse() {
        Ok(seed) => Some(seed),
        Err(e) => panic!("{SEED_VARIABLE}: {e}"),
    }
}
