//! The flight recorder: what the scheduler did last, for programs that are slow or stuck.
//!
//! A [`Recorder`] keeps the last events of each P in a ring of fixed size: which goroutine ran
//! when, why it stopped, and who woke it. At any time [`snapshot`] copies what the rings hold,
//! while everything goes on. The snapshot says in words why a goroutine waited ([`Snapshot::why`]),
//! or becomes a file for Perfetto ([`Snapshot::write_perfetto`]).
//!
//! Every wait counts, whatever it is for: channels, locks and sockets of std, timers, locks of C
//! code.
//!
//! Without a change to the program, `TREFOIL_TRACE=on` records from its start, and a panic, a
//! deadlock of the program, a certain deadlock of a part of it, or SIGQUIT writes a file
//! (`TREFOIL_TRACE=on,bytes=64M,dir=/tmp`). A process writes at most 16 files, which only its user
//! can read, and replaces none. The command `trefoil trace why FILE ID` reads one, and `trefoil
//! trace perfetto FILE OUT` converts it (`cargo install trefoil-cli`). `on=runnable:10ms`,
//! `on=late:5ms` and `on=blocked:100ms` also write a file when a goroutine is runnable, a timer
//! late, or a thread blocked in the kernel for so long; `on=signal:USR1` writes one when that
//! signal arrives, and the program goes on. A program does the same with [`on`].
//! `TREFOIL_TRACE=off` or `0` records nothing.
//!
//! ```
//! use std::time::Duration;
//! use trefoil::trace::{self, Recorder};
//!
//! trefoil::run(|| {
//!     let recorder = Recorder::start().unwrap();
//!     let (tx, rx) = std::sync::mpsc::channel();
//!     let receiver = trefoil::go(move || {
//!         rx.recv().unwrap();
//!         trefoil::id()
//!     });
//!     trefoil::time::sleep(Duration::from_millis(5));
//!     tx.send(()).unwrap();
//!     let id = receiver.join().unwrap();
//!     // goroutine 2 (started at src/main.rs:8) by goroutine 1 "main"
//!     // ran 7.3 µs ± 427.8 µs, was runnable 348.1 µs ± 229.6 µs, waited 4.9 ms
//!     // longest wait: 5.1 ms ± 213.9 µs, from 214.8 µs to 5.4 ms of the recording
//!     //   4.9 ms in futex wait, woken by goroutine 1 "main" at /srv/program/src/main.rs:13
//!     //   213.9 µs runnable, behind goroutine 1 "main" for 213.9 µs
//!     println!("{}", trace::snapshot().unwrap().why(id).unwrap());
//!     recorder.stop();
//! });
//! ```
//!
//! # Cost
//! While nothing is recorded, an event costs a load and a branch. A recording costs a few
//! nanoseconds per switch: the clock is not read for each event, so the times in a snapshot have an
//! error, which is shown. A goroutine that ends a long wait copies a part of its stack, at most once
//! per millisecond and P in the long run, and a thread finds the callers in it.

use crate::observe::trace::start_recording;
use crate::observe::trace::watches::{self, Settings, Watching};
use crate::runtime::with_sched;
use crate::sched::Sched;
use crate::sched::m::Rt;
use crate::sched::record::{self, DEFAULT_BYTES, Kind};
use crate::sched::trigger::{self, Noticed};
use crate::sys::clock::NEVER;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub use crate::observe::trace::{Snapshot, Times, WatchError};

/// A recording that is on. It ends when this is dropped, or with [`stop`](Recorder::stop).
///
/// ```
/// use trefoil::trace::Recorder;
///
/// trefoil::run(|| {
///     let recorder = Recorder::builder().bytes(1 << 20).start().unwrap();
///     trefoil::go(|| ()).join().unwrap();
///     recorder.stop();
///     // What was recorded stays until the next recording.
///     assert!(trefoil::trace::snapshot().is_some());
/// });
/// ```
#[must_use = "a recording ends when its Recorder is dropped"]
pub struct Recorder {
    /// Not an Arc: a goroutine that owns this must not keep its own runtime alive.
    sched: Weak<Sched>,
}

/// The settings of a [`Recorder`].
///
/// ```
/// trefoil::run(|| {
///     let recorder = trefoil::trace::Recorder::builder().bytes(64 << 20).start().unwrap();
///     recorder.stop();
/// });
/// ```
#[derive(Clone, Debug)]
pub struct RecorderBuilder {
    bytes: usize,
    exact_clock: bool,
}

/// A recording of the same runtime is on already.
///
/// ```
/// use trefoil::trace::Recorder;
///
/// trefoil::run(|| {
///     let _recorder = Recorder::start().unwrap();
///     let error = Recorder::start().err().unwrap();
///     assert_eq!(error.to_string(), "this runtime is being recorded already");
/// });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AlreadyRecording;

impl fmt::Display for AlreadyRecording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this runtime is being recorded already")
    }
}

impl std::error::Error for AlreadyRecording {}

impl Recorder {
    /// Records the caller's runtime, or the default runtime on a plain thread, in 8 MiB.
    ///
    /// ```
    /// trefoil::run(|| trefoil::trace::Recorder::start().unwrap().stop());
    /// ```
    ///
    /// # Errors
    /// If a recording is on already.
    ///
    /// # Panics
    /// Panics on a plain thread if the default runtime cannot start.
    pub fn start() -> Result<Recorder, AlreadyRecording> {
        Recorder::builder().start()
    }

    /// Returns the settings, to change them.
    ///
    /// ```
    /// let settings = trefoil::trace::Recorder::builder();
    /// trefoil::run(move || settings.start().unwrap().stop());
    /// ```
    pub fn builder() -> RecorderBuilder {
        RecorderBuilder { bytes: DEFAULT_BYTES, exact_clock: false }
    }

    /// Ends the recording. What was recorded stays until the next one begins.
    ///
    /// ```
    /// use trefoil::trace::Recorder;
    ///
    /// trefoil::run(|| {
    ///     Recorder::start().unwrap().stop();
    ///     Recorder::start().unwrap().stop();
    /// });
    /// ```
    pub fn stop(self) {}
}

impl Drop for Recorder {
    fn drop(&mut self) {
        if let Some(sched) = self.sched.upgrade() {
            sched.stop_recording();
        }
    }
}

impl RecorderBuilder {
    /// Sets how much memory the rings may take together. Each P has one, and the threads without a
    /// P share one; none is smaller than 8 KiB.
    ///
    /// A switch takes 8 bytes, and a wake-up as many. With 8 MiB and two Ps each ring has room for
    /// 262,144 of them.
    ///
    /// The Ps that exist at the start have rings of the same size. Ps that are made later
    /// ([`set_procs`](crate::set_procs)) share half of what is left, so their rings are smaller.
    /// The rings of an earlier recording of the same runtime are used again, also if they are
    /// larger.
    ///
    /// ```
    /// let settings = trefoil::trace::Recorder::builder().bytes(1 << 20);
    /// trefoil::run(move || settings.start().unwrap().stop());
    /// ```
    pub fn bytes(mut self, bytes: usize) -> RecorderBuilder {
        self.bytes = bytes;
        self
    }

    /// Reads the clock for each event, so that times have no error. Otherwise it is read at least
    /// once per 128 events, and about once per millisecond. A switch takes more than twice as long,
    /// and a ring holds half as many events. Use it for short recordings.
    ///
    /// ```
    /// let settings = trefoil::trace::Recorder::builder().exact_clock(true);
    /// trefoil::run(move || {
    ///     let recorder = settings.start().unwrap();
    ///     let id = trefoil::go(trefoil::id).join().unwrap();
    ///     let times = trefoil::trace::snapshot().unwrap().times(id).unwrap();
    ///     println!("it ran for {:?}", times.running);
    ///     recorder.stop();
    /// });
    /// ```
    pub fn exact_clock(mut self, exact: bool) -> RecorderBuilder {
        self.exact_clock = exact;
        self
    }

    /// Begins to record, as [`Recorder::start`].
    ///
    /// ```
    /// trefoil::run(|| trefoil::trace::Recorder::builder().start().unwrap().stop());
    /// ```
    ///
    /// # Errors
    /// If a recording is on already.
    ///
    /// # Panics
    /// Panics on a plain thread if the default runtime cannot start.
    pub fn start(self) -> Result<Recorder, AlreadyRecording> {
        with_sched(|sched| {
            if !start_recording(sched, self.bytes, self.exact_clock) {
                return Err(AlreadyRecording);
            }
            if let Some(rt) = Rt::enter() {
                if std::ptr::eq(rt.sched(), sched) {
                    record::runs_here(rt);
                }
                rt.leave();
            }
            Ok(Recorder { sched: downgrade(sched) })
        })
    }
}

fn downgrade(sched: &Sched) -> Weak<Sched> {
    let sched = std::ptr::from_ref(sched);
    // SAFETY: every Sched is in an Arc (`Sched::start`), and the caller's is alive.
    let sched = unsafe {
        Arc::increment_strong_count(sched);
        Arc::from_raw(sched)
    };
    Arc::downgrade(&sched)
}

/// Copies what was recorded of the caller's runtime, or of the default runtime on a plain thread.
/// None if nothing was ever recorded. No goroutine is stopped.
///
/// ```
/// trefoil::run(|| {
///     assert!(trefoil::trace::snapshot().is_none());
///     let _recorder = trefoil::trace::Recorder::start().unwrap();
///     assert!(trefoil::trace::snapshot().is_some());
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn snapshot() -> Option<Snapshot> {
    with_sched(|sched| crate::observe::trace::snapshot(sched, NEVER))
}

/// What [`on`] waits for. Kinds may be added in later versions.
///
/// ```
/// use std::time::Duration;
/// use trefoil::trace::{self, Recorder, Trigger};
///
/// trefoil::run(|| {
///     let _recorder = Recorder::start().unwrap();
///     let watch = trace::on(Trigger::Blocked(Duration::from_millis(100)));
///     let _watch = watch.call(|incident| eprintln!("{incident:?}")).unwrap();
/// });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Trigger {
    /// A goroutine or task is runnable for so long, and does not run. It is noticed a quarter of
    /// the time later, or a millisecond, whichever is more.
    Runnable(Duration),
    /// A timer runs so late.
    TimerLate(Duration),
    /// A thread with a goroutine is blocked in the kernel for so long, without having announced it
    /// by [`blocking`](fn@crate::blocking). Calls that park the goroutine, as most calls of std do,
    /// do not count.
    Blocked(Duration),
    /// A goroutine or task panics.
    Panic,
    /// The signal with this number arrives. It loses its previous effect until the [`Watch`] is
    /// dropped. Channels of [`signal::notify`](crate::signal::notify) receive it too.
    ///
    /// ```
    /// use trefoil::signal::SIGUSR1;
    /// use trefoil::trace::{self, Recorder, Trigger};
    ///
    /// trefoil::run(|| {
    ///     let _recorder = Recorder::start().unwrap();
    ///     let (tx, rx) = std::sync::mpsc::channel();
    ///     let tell = move |incident| tx.send(incident).unwrap();
    ///     let _watch = trace::on(Trigger::Signal(SIGUSR1)).call(tell).unwrap();
    ///     unsafe { libc::kill(libc::getpid(), SIGUSR1) };
    ///     assert_eq!(rx.recv().unwrap().trigger, Trigger::Signal(SIGUSR1));
    /// });
    /// ```
    Signal(i32),
}

/// What a [`Trigger`] has waited for, and the recording that shows it.
///
/// ```
/// use trefoil::trace::{self, Recorder, Trigger};
///
/// trefoil::run(|| {
///     let _recorder = Recorder::start().unwrap();
///     let (tx, rx) = std::sync::mpsc::channel();
///     let tell = move |incident| tx.send(incident).unwrap();
///     let _watch = trace::on(Trigger::Panic).call(tell).unwrap();
///     let id = trefoil::go(|| {
///         let id = trefoil::id();
///         let _ = std::panic::catch_unwind(|| panic!("no luck"));
///         id
///     });
///     let id = id.join().unwrap();
///     let incident = rx.recv().unwrap();
///     assert_eq!(incident.goroutine, Some(id));
///     println!("{}", incident.snapshot.why(id).unwrap());
/// });
/// ```
#[non_exhaustive]
pub struct Incident {
    /// What it is.
    pub trigger: Trigger,
    /// The goroutine or task, if it is known. A late timer and a signal have none.
    pub goroutine: Option<u64>,
    /// How long it had lasted when it was noticed. It may last on. Zero for a panic and a signal.
    pub lasted: Duration,
    /// The recording, up to the end of the time that [`OnTrigger::look_forward`] has set.
    pub snapshot: Snapshot,
}

impl fmt::Debug for Incident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Incident")
            .field("trigger", &self.trigger)
            .field("goroutine", &self.goroutine)
            .field("lasted", &self.lasted)
            .finish_non_exhaustive()
    }
}

/// The settings of a [`Watch`]. [`on`] returns it.
///
/// ```
/// use std::time::Duration;
/// use trefoil::trace::{self, Trigger};
///
/// trefoil::run(|| {
///     let _watch = trace::on(Trigger::TimerLate(Duration::from_millis(5)))
///         .look_forward(Duration::from_millis(50))
///         .cool_down(Duration::from_secs(60))
///         .at_most(10)
///         .call(|incident| eprintln!("{incident:?}"))
///         .unwrap();
/// });
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use = "it does nothing until `call`"]
pub struct OnTrigger {
    trigger: Trigger,
    look_forward: Duration,
    cool_down: Duration,
    at_most: u32,
}

/// Notices incidents until it is dropped. [`OnTrigger::call`] returns it.
///
/// ```
/// use trefoil::trace::{self, Trigger};
///
/// trefoil::run(|| {
///     let watch = trace::on(Trigger::Panic).call(|_| ()).unwrap();
///     drop(watch);
/// });
/// ```
#[must_use = "a watch ends when it is dropped"]
pub struct Watch {
    /// Not an Arc, as in [`Recorder`].
    sched: Weak<Sched>,
    watching: Watching,
}

/// Waits, without a goroutine, for an incident in the caller's runtime, or in the default runtime
/// on a plain thread: [`OnTrigger::call`] says what happens then.
///
/// Incidents are noticed while the runtime is recorded: by a [`Recorder`], or because
/// `TREFOIL_TRACE=on` is set.
///
/// ```
/// use std::time::Duration;
/// use trefoil::trace::{self, Recorder, Trigger};
///
/// let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
/// runtime.run(|| {
///     let _recorder = Recorder::start().unwrap();
///     let (tx, rx) = std::sync::mpsc::channel();
///     let watch = trace::on(Trigger::Runnable(Duration::from_millis(20)))
///         .call(move |incident| _ = tx.send(incident))
///         .unwrap();
///     // On a busy machine it may take more than one attempt.
///     let incident = loop {
///         let kept_waiting = trefoil::go(|| ());
///         {
///             let _no_preempt = trefoil::no_preempt();
///             let begin = std::time::Instant::now();
///             while begin.elapsed() < Duration::from_millis(100) {}
///         }
///         kept_waiting.join().unwrap();
///         if let Ok(incident) = rx.recv_timeout(Duration::from_millis(100)) {
///             break incident;
///         }
///     };
///     assert!(incident.lasted >= Duration::from_millis(20));
///     // …
///     //   102.5 ms runnable, behind goroutine 1 "main" for 102.4 ms (preemption refused: holds a no_preempt guard, 102 times)
///     println!("{}", incident.snapshot.why(incident.goroutine.unwrap()).unwrap());
///     drop(watch);
/// });
/// ```
pub fn on(trigger: Trigger) -> OnTrigger {
    OnTrigger {
        trigger,
        look_forward: Duration::ZERO,
        cool_down: match trigger {
            // The sender decides how often.
            Trigger::Signal(_) => Duration::ZERO,
            _ => Duration::from_secs(10),
        },
        at_most: u32::MAX,
    }
}

impl OnTrigger {
    /// Sets the time from the incident to the snapshot, so that it shows what followed. Without
    /// this setting there is none.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use trefoil::trace::{self, Trigger};
    /// let on = trace::on(Trigger::Panic).look_forward(Duration::from_millis(50));
    /// trefoil::run(move || drop(on.call(|_| ()).unwrap()));
    /// ```
    pub fn look_forward(mut self, time: Duration) -> OnTrigger {
        self.look_forward = time;
        self
    }

    /// Sets how long no further incident is noticed after one. Without this setting it is 10
    /// seconds, and nothing for a signal.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use trefoil::trace::{self, Trigger};
    /// let on = trace::on(Trigger::Panic).cool_down(Duration::from_secs(60));
    /// trefoil::run(move || drop(on.call(|_| ()).unwrap()));
    /// ```
    pub fn cool_down(mut self, time: Duration) -> OnTrigger {
        self.cool_down = time;
        self
    }

    /// Sets how many incidents are noticed. Without this setting there is no limit.
    ///
    /// ```
    /// # use trefoil::trace::{self, Trigger};
    /// let on = trace::on(Trigger::Panic).at_most(1);
    /// trefoil::run(move || drop(on.call(|_| ()).unwrap()));
    /// ```
    pub fn at_most(mut self, incidents: u32) -> OnTrigger {
        self.at_most = incidents;
        self
    }

    /// Calls `f` with each incident, on a goroutine of its own, until the [`Watch`] is dropped.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use trefoil::trace::{self, Recorder, Trigger};
    /// trefoil::run(|| {
    ///     let _recorder = Recorder::start().unwrap();
    ///     let watch = trace::on(Trigger::Runnable(Duration::from_millis(10)))
    ///         .call(|incident| {
    ///             let file = std::fs::File::create("slow.trace").unwrap();
    ///             incident.snapshot.write(file).unwrap();
    ///         })
    ///         .unwrap();
    ///     // …
    ///     drop(watch);
    /// });
    /// ```
    ///
    /// # Errors
    /// [`WatchError::TooMany`] if the runtime has 16 watches already, and [`WatchError::Signal`] if
    /// the signal of a [`Trigger::Signal`] cannot be watched.
    ///
    /// # Panics
    /// Panics on a plain thread if the default runtime cannot start.
    pub fn call(self, f: impl Fn(Incident) + Send + Sync + 'static) -> Result<Watch, WatchError> {
        let trigger = self.trigger;
        let (incident, limit) = match trigger {
            Trigger::Signal(_) => (trigger::Incident::Signal, Duration::ZERO),
            Trigger::Runnable(limit) => (trigger::Incident::Runnable, limit),
            Trigger::TimerLate(limit) => (trigger::Incident::TimerLate, limit),
            Trigger::Blocked(limit) => (trigger::Incident::Blocked, limit),
            Trigger::Panic => (trigger::Incident::Panic, Duration::ZERO),
        };
        let settings = Settings {
            incident,
            signal: match trigger {
                Trigger::Signal(signal) => Some(signal),
                _ => None,
            },
            limit,
            look_forward: self.look_forward,
            cool_down: self.cool_down,
            at_most: self.at_most,
        };
        let tell = move |noticed: Noticed, snapshot| {
            f(Incident {
                trigger,
                goroutine: noticed.goroutine(incident),
                lasted: Duration::from_nanos(noticed.nanos),
                snapshot,
            });
        };
        with_sched(|sched| {
            let watching = watches::watch(sched, settings, tell)?;
            Ok(Watch { sched: downgrade(sched), watching })
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(sched) = self.sched.upgrade() {
            watches::unwatch(&sched, &self.watching);
        }
    }
}

/// A part of a goroutine's work that has a name. It ends when this is dropped.
///
/// ```
/// trefoil::run(|| {
///     let _parsing = trefoil::trace::region("parse");
///     // …
/// });
/// ```
#[must_use = "a region ends when it is dropped"]
pub struct Region(());

/// Names what the running goroutine does from now on, for the recording. On a plain thread, or
/// while nothing is recorded, it does nothing. At most 255 bytes of the name are kept.
///
/// ```
/// use trefoil::trace;
///
/// trefoil::run(|| {
///     let region = trace::region("request");
///     // …
///     drop(region);
/// });
/// ```
pub fn region(name: &'static str) -> Region {
    note(Kind::RegionBegin, name);
    Region(())
}

/// Leaves a message of the running goroutine in the recording. On a plain thread, or while nothing
/// is recorded, it does nothing. At most 255 bytes are kept.
///
/// ```
/// trefoil::run(|| trefoil::trace::log("cache miss"));
/// ```
pub fn log(message: &'static str) {
    note(Kind::Log, message);
}

impl Drop for Region {
    fn drop(&mut self) {
        note(Kind::RegionEnd, "");
    }
}

fn note(kind: Kind, text: &'static str) {
    if let Some(rt) = Rt::enter() {
        record::note(rt, kind, text);
        rt.leave();
    }
}

/// Shows the spans of the crate [`tracing`](https://docs.rs/tracing) as regions of the recording,
/// and its events as messages (feature `tracing`). Add it to a `tracing_subscriber` registry.
///
/// A span is a region while it is entered. Only names appear in the recording, not fields: both are
/// kept as addresses, so that a span costs no more than a region.
///
/// ```
/// use tracing_subscriber::prelude::*;
/// use trefoil::trace::{self, Recorder, TracingLayer};
///
/// let subscriber = tracing_subscriber::registry().with(TracingLayer);
/// tracing::subscriber::set_global_default(subscriber).unwrap();
/// trefoil::run(|| {
///     let recorder = Recorder::start().unwrap();
///     tracing::info_span!("parse").in_scope(|| trefoil::yield_now());
///     let mut file = Vec::new();
///     trace::snapshot().unwrap().write_perfetto(&mut file).unwrap();
///     assert!(file.windows(5).any(|name| name == b"parse"));
///     recorder.stop();
/// });
/// ```
#[cfg(feature = "tracing")]
#[derive(Clone, Copy, Default, Debug)]
pub struct TracingLayer;

#[cfg(feature = "tracing")]
impl<S> tracing_subscriber::Layer<S> for TracingLayer
where
    S: tracing_core::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
{
    fn on_enter(
        &self,
        id: &tracing_core::span::Id,
        context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        if let Some(metadata) = context.metadata(id) {
            note(Kind::RegionBegin, metadata.name());
        }
    }

    fn on_exit(
        &self,
        _id: &tracing_core::span::Id,
        _context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        note(Kind::RegionEnd, "");
    }

    fn on_event(
        &self,
        event: &tracing_core::Event<'_>,
        _context: tracing_subscriber::layer::Context<'_, S>,
    ) {
        note(Kind::Log, event.metadata().name());
    }
}
