//! Profiles: where CPU time goes, where goroutines wait and whom they wait for.
//!
//! | function | answers | cost |
//! |---|---|---|
//! | [`cpu`], [`Cpu`] | Which functions use CPU time, for which labels? | at 100 Hz a signal per 10 ms of CPU time |
//! | [`waits`] | What does each goroutine wait for now, and since when? | reads every stack |
//! | [`block`] | Where did goroutines wait, and how long? | while it is on, two clocks per wait |
//! | [`mutex`] | Who held the locks that goroutines waited for? | as `block` |
//! | [`debug::profile`](crate::debug::profile) | How many goroutines stand where? | reads every stack |
//!
//! All return a [`Profile`], which becomes a file for `go tool pprof` and other tools
//! ([`Profile::write_pprof`]), text for flame graphs ([`Profile::folded`]), or text to read
//! ([`Profile::text`]). [Labels](mod@crate::labels) of goroutines and tasks are in all of them.
//!
//! ```
//! use std::time::Duration;
//! use trefoil::profile::Cpu;
//!
//! fn work() -> u64 {
//!     (0..30_000_000u64).map(std::hint::black_box).sum()
//! }
//!
//! trefoil::run(|| {
//!     let cpu = Cpu::start(100).unwrap();
//!     let ann = trefoil::labels!("user" => "ann"; || trefoil::go(work));
//!     ann.join().unwrap();
//!     let profile = cpu.stop();
//!     for (user, nanos) in profile.by_label("user") {
//!         println!("{user:?}: {:?}", Duration::from_nanos(nanos));
//!     }
//!     let mut file = Vec::new(); // or std::fs::File::create("cpu.pb")?
//!     profile.write_pprof(&mut file).unwrap(); // go tool pprof -top cpu.pb
//! });
//! ```

use crate::observe::profile::cpu::{self, CpuError};
use crate::observe::profile::{self, collector};
use crate::runtime::with_sched;
use crate::sched::sample::SampleKind;
use std::fmt;
use std::io;
use std::time::Duration;

pub use crate::observe::pprof::Profile;

/// The most samples per second of CPU time.
const HZ_MAX: u32 = 1000;

/// A CPU profile that is being taken. It ends with [`stop`](Cpu::stop), or when this is dropped.
///
/// The profile covers all goroutines and tasks of all runtimes in the process, and the scheduler
/// itself. It does not cover plain threads, or the runtime's two threads that run no goroutines.
///
/// Each thread of a runtime is interrupted by a signal, `SIGPROF`, after every period of CPU time
/// that it has used. The handler copies the stack, and the profile counts the function, all its
/// callers, and the labels of the goroutine.
///
/// ```
/// use trefoil::profile::Cpu;
///
/// trefoil::run(|| {
///     let cpu = Cpu::start(100).unwrap();
///     // … what is to be measured …
///     let profile = cpu.stop();
///     print!("{}", profile.folded());
/// });
/// ```
#[must_use = "the profile ends when this is dropped"]
#[derive(Debug)]
pub struct Cpu(());

/// The settings of a [`Cpu`] profile.
///
/// ```
/// trefoil::run(|| {
///     let cpu = trefoil::profile::Cpu::builder().hz(250).goroutine_ids(true).start().unwrap();
///     drop(cpu);
/// });
/// ```
#[derive(Clone, Debug)]
pub struct CpuBuilder {
    hz: u32,
    ids: bool,
}

impl Cpu {
    /// Starts to profile, with `hz` samples per second of CPU time, 1 to 1000. Go's number is 100.
    ///
    /// Works on a goroutine and on a plain thread.
    ///
    /// ```
    /// use trefoil::profile::{Cpu, Error};
    ///
    /// let cpu = Cpu::start(100).unwrap();
    /// assert!(matches!(Cpu::start(100), Err(Error::AlreadyRunning)));
    /// drop(cpu);
    /// ```
    ///
    /// # Errors
    /// - [`Error::InvalidRate`] if `hz` is not from 1 to 1000;
    /// - [`Error::AlreadyRunning`] if a CPU profile is being taken: there is one per process;
    /// - [`Error::SignalInUse`] if the program has a handler for `SIGPROF`;
    /// - [`Error::SignalBlocked`] if the runtime was started on a thread that blocks `SIGPROF`;
    /// - [`Error::Os`] if the kernel has no timer or no memory.
    pub fn start(hz: u32) -> Result<Cpu, Error> {
        Cpu::builder().hz(hz).start()
    }

    /// Returns the settings, to change them: 100 Hz, without the ids of goroutines.
    ///
    /// ```
    /// let settings = trefoil::profile::Cpu::builder();
    /// drop(settings.start().unwrap());
    /// ```
    pub fn builder() -> CpuBuilder {
        CpuBuilder { hz: 100, ids: false }
    }

    /// Ends the profile and returns it.
    ///
    /// ```
    /// let profile = trefoil::profile::Cpu::start(100).unwrap().stop();
    /// assert_eq!(profile.lost(), 0);
    /// ```
    pub fn stop(self) -> Profile {
        std::mem::forget(self);
        match cpu::stop() {
            Some(profile) => profile,
            None => unreachable!("only the one Cpu stops the profile"),
        }
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        cpu::stop();
    }
}

impl CpuBuilder {
    /// Sets the number of samples per second of CPU time, 1 to 1000.
    pub fn hz(mut self, hz: u32) -> CpuBuilder {
        self.hz = hz;
        self
    }

    /// Sets whether the time is divided by goroutine and task, too: in pprof's format each sample
    /// has the label `id`. Defaults to false, because a program may start millions of them.
    pub fn goroutine_ids(mut self, ids: bool) -> CpuBuilder {
        self.ids = ids;
        self
    }

    /// Starts to profile, as [`Cpu::start`].
    ///
    /// # Errors
    /// As [`Cpu::start`].
    pub fn start(self) -> Result<Cpu, Error> {
        if !(1..=HZ_MAX).contains(&self.hz) {
            return Err(Error::InvalidRate);
        }
        cpu::start(self.hz, self.ids)?;
        Ok(Cpu(()))
    }
}

/// Profiles CPU time for `duration`, with 100 samples per second, and returns the profile.
///
/// Works on a goroutine, which sleeps meanwhile, and on a plain thread.
///
/// ```
/// use std::time::Duration;
///
/// let profile = trefoil::profile::cpu(Duration::from_millis(20)).unwrap();
/// print!("{}", profile.text());
/// ```
///
/// # Errors
/// As [`Cpu::start`].
pub fn cpu(duration: Duration) -> Result<Profile, Error> {
    let cpu = Cpu::start(100)?;
    crate::time::sleep(duration);
    Ok(cpu.stop())
}

/// Why a profile was not started.
///
/// ```
/// use trefoil::profile::{Cpu, Error};
///
/// let error = Cpu::start(0).unwrap_err();
/// assert!(matches!(error, Error::InvalidRate));
/// assert_eq!(error.to_string(), "the rate must be 1 to 1000 samples per second");
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The rate is not from 1 to 1000 samples per second.
    InvalidRate,
    /// Another CPU profile is being taken.
    AlreadyRunning,
    /// The program has a handler for `SIGPROF`.
    SignalInUse,
    /// The threads of the runtime block `SIGPROF`, because the thread that started it did.
    SignalBlocked,
    /// The kernel refused.
    Os(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::InvalidRate => f.write_str("the rate must be 1 to 1000 samples per second"),
            Error::AlreadyRunning => f.write_str("a CPU profile is being taken already"),
            Error::SignalInUse => {
                f.write_str("the program has a handler for SIGPROF, which the CPU profile needs")
            }
            Error::SignalBlocked => {
                f.write_str("the threads of the runtime block SIGPROF, which the CPU profile needs")
            }
            Error::Os(e) => write!(f, "cannot take a profile: {e}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Os(e) => Some(e),
            _ => None,
        }
    }
}

impl From<CpuError> for Error {
    fn from(e: CpuError) -> Error {
        match e {
            CpuError::AlreadyRunning => Error::AlreadyRunning,
            CpuError::SignalInUse => Error::SignalInUse,
            CpuError::SignalBlocked => Error::SignalBlocked,
            CpuError::Kernel(e) => Error::Os(e),
        }
    }
}

/// Returns every goroutine and task of the caller's runtime that waits now, grouped by stack, with
/// the time that it has waited. On a plain thread it is the default runtime.
///
/// The values of a sample are the number of goroutines, the sum of their waiting times, and the
/// longest of them, in steps of some milliseconds. Unlike [`block`] it shows waits that have not
/// ended, and needs not be turned on before. No goroutine is stopped.
///
/// ```
/// use std::time::Duration;
///
/// trefoil::run(|| {
///     let (tx, rx) = trefoil::chan::bounded::<()>(0);
///     trefoil::go(move || rx.recv());
///     while trefoil::profile::waits().goroutines() == 0 {
///         trefoil::time::sleep(Duration::from_millis(50));
///     }
///     let waits = trefoil::profile::waits();
///     assert_eq!(waits.goroutines(), 1); // main runs
///     println!("{}", waits.text());
///     drop(tx);
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn waits() -> Profile {
    with_sched(profile::waits)
}

/// Returns the goroutines and tasks of the caller's runtime that wait forever, certainly or
/// probably: the members of [`deadlocks`](crate::debug::deadlocks), grouped by stack, with the
/// values of [`waits`]. It is Go's `goroutineleak` profile. (`#[trefoil::test(leaks = "deny")]`
/// counts differently: every goroutine that is left at the end of the test.) On a plain thread it
/// is the default runtime.
///
/// Go's collector knows everything that can reach a channel; here only stacks are read. So these
/// are not found, although they may wait forever:
/// - a goroutine that receives from a channel whose only [`Sender`](crate::chan::Sender) it holds
///   itself, because a `drop(tx)` was forgotten. It looks like a goroutine that has sent its sender
///   to another one and waits for the reply: the bytes of a value that was moved stay on the stack;
/// - a goroutine that waits for a channel whose other handles are on the heap, in a static, or with
///   a plain thread;
/// - a goroutine that waits in a `select!`, and a task that waits for a channel;
/// - a goroutine that waits for one that runs or waits for something else, and never sends.
///
/// A group of [`debug::groups`](crate::debug::groups) that only grows, and old waits in [`waits`],
/// show those.
///
/// ```
/// use trefoil::sync::Mutex;
/// static M: Mutex<()> = Mutex::new(());
/// trefoil::run(|| {
///     trefoil::go(|| {
///         let _first = M.lock();
///         let _second = M.lock(); // waits for itself
///     });
///     while trefoil::profile::leaks().goroutines() == 0 {
///         trefoil::yield_now();
///     }
///     println!("{}", trefoil::profile::leaks().text());
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn leaks() -> Profile {
    with_sched(profile::leaks)
}

/// Begins to sample waits for [`block`], in all runtimes of the process; zero ends it.
///
/// A wait that is longer than `rate` is always counted. Of shorter ones a part is, in proportion to
/// their length, and counted accordingly more often: as Go's `SetBlockProfileRate`. With
/// `Duration::from_nanos(1)` every wait is counted. While it is off, it costs the load of one word
/// where a goroutine parks.
///
/// ```
/// use std::time::Duration;
///
/// trefoil::profile::set_block_rate(Duration::from_micros(10)).unwrap();
/// // …
/// trefoil::profile::set_block_rate(Duration::ZERO).unwrap();
/// ```
///
/// # Errors
/// [`Error::Os`] if there is no memory or no thread for it.
pub fn set_block_rate(rate: Duration) -> Result<(), Error> {
    set_rate(SampleKind::Wait, rate)
}

/// Begins to sample waits for locks, for [`mutex`]; zero ends it. As [`set_block_rate`].
///
/// ```
/// use std::time::Duration;
///
/// trefoil::profile::set_mutex_rate(Duration::from_micros(10)).unwrap();
/// // …
/// trefoil::profile::set_mutex_rate(Duration::ZERO).unwrap();
/// ```
///
/// # Errors
/// As [`set_block_rate`].
pub fn set_mutex_rate(rate: Duration) -> Result<(), Error> {
    set_rate(SampleKind::Unlock, rate)
}

fn set_rate(kind: SampleKind, rate: Duration) -> Result<(), Error> {
    let rate = u64::try_from(rate.as_nanos()).unwrap_or(u64::MAX);
    collector::set_wait_rate(kind, rate).map_err(Error::Os)
}

/// Returns where goroutines have waited, and how long, since [`set_block_rate`] was called: for
/// channels, locks, sockets, other goroutines; those of std and of C code too. Sleeping does not
/// count.
///
/// A sample has the label `state`, which says what the goroutine waited for. The time ends when the
/// goroutine runs again. Tasks that wait have no stack, and are not in this profile; see [`waits`].
///
/// ```
/// use std::time::Duration;
/// use trefoil::profile;
///
/// trefoil::run(|| {
///     profile::set_block_rate(Duration::from_nanos(1)).unwrap();
///     let (tx, rx) = trefoil::chan::bounded(0);
///     let receiver = trefoil::go(move || rx.recv());
///     trefoil::time::sleep(Duration::from_millis(20));
///     tx.send(1).unwrap();
///     receiver.join().unwrap().unwrap();
///     profile::set_block_rate(Duration::ZERO).unwrap();
///     assert!(profile::block().total() > 0);
/// });
/// ```
pub fn block() -> Profile {
    collector::waits(SampleKind::Wait)
}

/// Returns which goroutines have unlocked the locks that other goroutines waited for, and how long
/// those had waited, since [`set_mutex_rate`] was called.
///
/// The stack is that of the goroutine that unlocked: it kept the others waiting. Locks are those of
/// [`sync`](crate::sync), of std, of crates that are built on them, and of C code. The label
/// `state` says what the goroutine waited for. std's condition variables and `thread::park` wait by
/// the same call as std's locks (`futex wait`), so goroutines that notify are in this profile, too.
/// Plain threads that unlock are not.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
/// use trefoil::profile;
///
/// trefoil::run(|| {
///     profile::set_mutex_rate(Duration::from_nanos(1)).unwrap();
///     let shared = Arc::new(Mutex::new(0));
///     let locked = shared.lock().unwrap();
///     let other = shared.clone();
///     let waiter = trefoil::go(move || *other.lock().unwrap() += 1);
///     trefoil::time::sleep(Duration::from_millis(20));
///     drop(locked);
///     waiter.join().unwrap();
///     profile::set_mutex_rate(Duration::ZERO).unwrap();
///     print!("{}", profile::mutex().text());
/// });
/// ```
pub fn mutex() -> Profile {
    collector::waits(SampleKind::Unlock)
}
