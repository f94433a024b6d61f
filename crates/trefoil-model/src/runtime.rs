//! The runtime that one is in.

use crate::sched::wait::timers::Sched;

pub(crate) fn with_sched<T>(f: impl FnOnce(&Sched) -> T) -> T {
    f(&Sched)
}
