//! The flight recorder: what the scheduler did last, for programs that are slow or stuck.
//!
//! A [`Recorder`] keeps the last events of each P in a ring of fixed size: which goroutine ran when,
//! why it stopped, and who woke it. At any time [`snapshot`] copies what the rings hold, while
//! everything goes on. The snapshot says in words why a goroutine waited ([`Snapshot::why`]), or
//! becomes a file for Perfetto ([`Snapshot::write_perfetto`]).
//!
//! Every wait counts, whatever it is for: channels, locks and sockets of std, timers, locks of C
//! code.
//!
//! Without a change to the program, `TREFOIL_TRACE=on` records from its start, and a panic, a deadlock
//! or SIGQUIT writes a file (at most 16; `TREFOIL_TRACE=on,bytes=64M,dir=/tmp`). The command
//! `trefoil trace why FILE ID` reads it, and `trefoil trace perfetto FILE OUT` converts it.
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
//!     trefoil::time::sleep(Duration::from_millis(2));
//!     tx.send(()).unwrap();
//!     let id = receiver.join().unwrap();
//!     // goroutine 2 (started at src/main.rs:7) by goroutine 1 "main"
//!     // ran 20.1 µs, was runnable 1.3 µs, waited 2.1 ms
//!     // longest wait: 2.1 ms ± 0.4 µs, from 11.0 µs to 2.1 ms of the recording
//!     //   2.1 ms in futex wait, woken by goroutine 1 "main"
//!     //   1.0 µs runnable
//!     println!("{}", trace::snapshot().unwrap().why(id).unwrap());
//!     recorder.stop();
//! });
//! ```
//!
//! # Cost
//! While nothing is recorded, an event costs a load and a branch. A recording costs a few
//! nanoseconds per switch: the clock is not read for each event, so the times in a snapshot have an
//! error, which is shown.

use crate::runtime::with_sched;
use crate::sched::Sched;
use crate::sched::m::Rt;
use crate::sched::record::{self, DEFAULT_BYTES, Kind};
use std::fmt;
use std::sync::{Arc, Weak};

pub use crate::observe::trace::Snapshot;

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
        RecorderBuilder { bytes: DEFAULT_BYTES }
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
    /// ```
    /// let settings = trefoil::trace::Recorder::builder().bytes(1 << 20);
    /// trefoil::run(move || settings.start().unwrap().stop());
    /// ```
    pub fn bytes(mut self, bytes: usize) -> RecorderBuilder {
        self.bytes = bytes;
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
            if !sched.start_recording(self.bytes) {
                return Err(AlreadyRecording);
            }
            if let Some(rt) = Rt::enter() {
                if std::ptr::eq(rt.sched(), sched) {
                    record::runs_here(rt);
                }
                rt.leave();
            }
            let sched = std::ptr::from_ref(sched);
            // SAFETY: every Sched is in an Arc (`Sched::start`), and the caller's is alive.
            let sched = unsafe {
                Arc::increment_strong_count(sched);
                Arc::from_raw(sched)
            };
            Ok(Recorder { sched: Arc::downgrade(&sched) })
        })
    }
}

/// Copies what was recorded of the caller's runtime, or of the default runtime on a plain thread. None
/// if nothing was ever recorded. No goroutine is stopped.
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
    with_sched(crate::observe::trace::snapshot)
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
