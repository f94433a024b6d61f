//! What happens after an incident that `sched/trigger.rs` has noticed: a goroutine takes a snapshot
//! of the recording and passes it on.

use super::Snapshot;
use crate::join_handle::Join;
use crate::observe::deadlock;
use crate::observe::signals::{SignalWatch, take_arrived};
use crate::sched::goroutine::spawn::{SpawnOptions, spawn};
use crate::sched::trigger::{Incident, Noticed, WATCHES_MAX, Watch};
use crate::sched::{Sched, calls};
use crate::sys::clock::{self, NEVER, Nanos};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use std::{fmt, io};

/// The name of the goroutine that takes the snapshot.
const NAME: &str = "trefoil trace";

/// Why [`OnTrigger::call`](crate::trace::OnTrigger::call) has failed. Kinds may be added in later
/// versions.
///
/// ```
/// use trefoil::trace::{self, Trigger, WatchError};
///
/// trefoil::run(|| {
///     let on = trace::on(Trigger::Panic);
///     let watches: Vec<_> = (0..16).map(|_| on.call(|_| ()).unwrap()).collect();
///     let error = on.call(|_| ()).err().unwrap();
///     assert!(matches!(error, WatchError::TooMany));
///     assert_eq!(error.to_string(), "this runtime has 16 watches already, the most that are possible");
///     drop(watches);
/// });
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum WatchError {
    /// A runtime has at most 16 watches at the same time.
    TooMany,
    /// The signal cannot be watched: [`signal::notify`](crate::signal::notify) says which ones can.
    Signal(io::Error),
}

impl fmt::Display for WatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WatchError::TooMany => write!(
                f,
                "this runtime has {} watches already, the most that are possible",
                WATCHES_MAX
            ),
            WatchError::Signal(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for WatchError {}

/// The settings of a watch.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) incident: Incident,
    /// The number of the signal, if it is about one.
    pub(crate) signal: Option<i32>,
    pub(crate) limit: Duration,
    /// The time from the incident to the snapshot.
    pub(crate) look_forward: Duration,
    pub(crate) cool_down: Duration,
    pub(crate) at_most: u32,
}

/// A watch and the program's function. The owner of this drops the function, or a goroutine that
/// calls it does: not the helper thread, because a destructor may block.
pub(crate) struct Watching {
    watch: Arc<Watch>,
    _function: Arc<dyn Any + Send + Sync>,
    _signal: Option<SignalWatch>,
}

/// Watches `sched`: after an incident, a goroutine calls `f`.
pub(crate) fn watch(
    sched: &Sched,
    settings: Settings,
    f: impl Fn(Noticed, Snapshot) + Send + Sync + 'static,
) -> Result<Watching, WatchError> {
    let signal = settings.signal.map(SignalWatch::begin).transpose().map_err(WatchError::Signal)?;
    let function = Arc::new(f);
    let f = Arc::downgrade(&function);
    let look_forward = settings.look_forward;
    let watch = Arc::new(Watch {
        incident: settings.incident,
        signal: settings.signal,
        limit: nanos(settings.limit),
        cool_down: nanos(settings.cool_down),
        left: AtomicU32::new(settings.at_most),
        quiet_until: AtomicU64::new(0),
        tell: Box::new(move |sched, noticed| {
            let Some(f) = f.upgrade() else { return };
            let take = move || {
                if !look_forward.is_zero() {
                    calls::sleep_until(clock::after(look_forward));
                }
                let snapshot =
                    calls::current_sched().and_then(|sched| super::snapshot(sched, NEVER));
                if let Some(snapshot) = snapshot {
                    f(noticed, snapshot);
                }
            };
            let options = SpawnOptions { name: Some(NAME.into()), ..SpawnOptions::plain() };
            // SAFETY: the closure is Send and borrows nothing; its result is `()`, and this is its
            // only handle. Without memory for a stack there is no snapshot.
            unsafe {
                if let Ok(g) = spawn(sched, options, take) {
                    drop(Join::<()>::new(g));
                }
            }
        }),
    });
    sched.triggers.add(watch.clone()).map_err(|_| WatchError::TooMany)?;
    sched.watch_runnable();
    Ok(Watching { watch, _function: function, _signal: signal })
}

/// Tells the watches of all runtimes which signals have arrived. Helper threads call it.
pub(crate) fn tell_signals() {
    for signal in take_arrived() {
        // A goroutine of a runtime that stops would never run.
        let records =
            |sched: &&Arc<Sched>| sched.record.is_on() && !sched.stopping.load(Ordering::Relaxed);
        for sched in deadlock::runtimes().iter().filter(records) {
            sched.tell(Incident::Signal, Noticed { id: signal as u64, nanos: 0 });
        }
    }
}

/// Ends a watch. A goroutine that it has started may still call the function.
pub(crate) fn unwatch(sched: &Sched, watching: &Watching) {
    sched.triggers.remove(&watching.watch);
    sched.watch_runnable();
}

fn nanos(duration: Duration) -> Nanos {
    Nanos::try_from(duration.as_nanos()).unwrap_or(NEVER - 1)
}
