//! The clock, which stands still; locks and futexes come from `crate::shim`.

pub(crate) mod lock {
    pub(crate) use crate::shim::Lock;
}

pub(crate) mod free_list {
    //! The models reuse no timer slots.

    use std::marker::PhantomData;

    pub(crate) struct FreeLink<T>(PhantomData<fn(T)>);

    impl<T> FreeLink<T> {
        pub(crate) fn new() -> FreeLink<T> {
            FreeLink(PhantomData)
        }
    }

    pub(crate) trait Reusable: Sized {
        fn free_link(&self) -> &FreeLink<Self>;
    }
}

pub(crate) mod futex {
    pub(crate) use crate::shim::{futex_wait, futex_wake};
}

pub(crate) mod clock {
    use std::time::{Duration, Instant};

    pub(crate) type Nanos = u64;
    pub(crate) const NEVER: Nanos = u64::MAX;
    pub(crate) const LATEST: Nanos = NEVER - 1;

    pub(crate) fn now() -> Nanos {
        0
    }

    /// Returns the time `d` from now.
    pub(crate) fn after(d: Duration) -> Nanos {
        d.as_nanos() as Nanos
    }

    /// Returns the current time: the models use no `Instant`.
    pub(crate) fn at(_: Instant) -> Nanos {
        now()
    }
}
