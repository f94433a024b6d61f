//! The caller's runtime: every model has one.

use crate::sched::wait::timers::Sched;

pub(crate) fn with_sched<T>(f: impl FnOnce(&Sched) -> T) -> T {
    f(&Sched)
}
