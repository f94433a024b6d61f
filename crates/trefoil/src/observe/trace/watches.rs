//! What happens after an incident that `sched/trigger.rs` has noticed: a goroutine takes a snapshot of
//! the recording and passes it on.

use super::Snapshot;
use crate::join_handle::Join;
use crate::sched::goroutine::spawn::{SpawnOptions, SpawnTarget, spawn};
use crate::sched::trigger::{Incident, Noticed, Watch};
use crate::sched::{Sched, calls};
use crate::sys::clock::{self, NEVER, Nanos};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// The name of the goroutine that takes the snapshot.
const NAME: &str = "trefoil trace";

/// The settings of a watch.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) incident: Incident,
    pub(crate) limit: Duration,
    /// The time from the incident to the snapshot.
    pub(crate) look_forward: Duration,
    pub(crate) cool_down: Duration,
    pub(crate) at_most: u32,
}

/// A watch and the program's function. The owner of this drops the function, or a goroutine that calls
/// it does: not the helper thread, because a destructor may block.
pub(crate) struct Watching {
    watch: Arc<Watch>,
    _function: Arc<dyn Any + Send + Sync>,
}

/// Watches `sched`: after an incident, a goroutine calls `f`. None if there are too many watches.
pub(crate) fn watch(
    sched: &Sched,
    settings: Settings,
    f: impl Fn(Noticed, Snapshot) + Send + Sync + 'static,
) -> Option<Watching> {
    let function = Arc::new(f);
    let f = Arc::downgrade(&function);
    let look_forward = settings.look_forward;
    let watch = Arc::new(Watch {
        incident: settings.incident,
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
                let snapshot = calls::current_sched().and_then(super::snapshot);
                if let Some(snapshot) = snapshot {
                    f(noticed, snapshot);
                }
            };
            let options = SpawnOptions { name: Some(NAME.into()), ..SpawnOptions::plain() };
            // SAFETY: the closure is Send and borrows nothing; its result is `()`, and this is its
            // only handle. Without memory for a stack there is no snapshot.
            unsafe {
                if let Ok(g) = spawn(SpawnTarget::Runtime(sched), options, take) {
                    drop(Join::<()>::new(g));
                }
            }
        }),
    });
    sched.triggers.add(watch.clone()).ok()?;
    sched.watch_runnable();
    Some(Watching { watch, _function: function })
}

/// Ends a watch. A goroutine that it has started may still call the function.
pub(crate) fn unwatch(sched: &Sched, watching: &Watching) {
    sched.triggers.remove(&watching.watch);
    sched.watch_runnable();
}

fn nanos(duration: Duration) -> Nanos {
    Nanos::try_from(duration.as_nanos()).unwrap_or(NEVER - 1)
}
