//! Tests of trefoil with every common allocator.
//!
//! A goroutine has its own thread-local storage, so an allocator treats every goroutine as a
//! thread: it may give each of them a cache, and the goroutine may be preempted while it holds one
//! of the allocator's locks. These tests check that no allocator hangs, returns a block twice,
//! delays other goroutines or costs more than its limits allow.
//!
//! `#[global_allocator]` is per binary. Each allocator has a test target of its own
//! (`tests/jemalloc.rs` …), which sets the allocator and calls [`run`]; the rest is here.
//! `tests/jemalloc_wrapped.rs` has the same allocator in `trefoil::alloc::Alloc`. A target runs
//! each [`Scene`] in a process of its own, so that a crash or hang of one does not hide the others.
//! `tests/preloaded.rs` does the same with `LD_PRELOAD`.
//!
//! ```text
//! cargo test --release -p trefoil-allocators --features all
//! cargo test --release -p trefoil-allocators --features mimalloc-v2 --test mimalloc_wrapped
//! cargo test --release -p trefoil-allocators --features rpmalloc --test rpmalloc_wrapped -- memory
//! cargo test --release -p trefoil-allocators --test preloaded -- libjemalloc memory
//! ```
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_ALLOC_SECS` | seconds of torture per allocator, 9 by default |
//! | `TREFOIL_ALLOC_STRICT` | `1`: also assert the time per allocation (on a quiet machine) |
//! | `TREFOIL_TEST_GDB` | `1`: show the stacks of a process that hangs (needs gdb) |

mod block;
mod rng;
mod runner;
mod scenes;
mod watchdog;
mod work;

pub use runner::{Library, run, run_preloaded};
pub use scenes::Scene;

/// An allocator under test, and what it may cost.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name in reports.
    pub allocator: &'static str,
    /// What the scenes assert.
    pub limits: Limits,
}

/// What an allocator may cost on goroutines. A scene reports a cost without a limit.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Resident bytes that a live goroutine keeps after it has allocated and freed.
    pub bytes_per_goroutine: Option<f64>,
    /// Percentage of the memory of goroutines that returns to the kernel within three seconds after
    /// their end.
    pub percent_given_back: Option<f64>,
    /// Time per allocation on a goroutine, divided by the time on a plain thread. Asserted only
    /// with `TREFOIL_ALLOC_STRICT=1`.
    pub time_ratio: Option<f64>,
}

impl Limits {
    /// Reports every cost and asserts none.
    pub const REPORT: Limits =
        Limits { bytes_per_goroutine: None, percent_given_back: None, time_ratio: None };

    /// Limits for goroutines that share the allocator's caches instead of having their own.
    pub const SHARED_CACHES: Limits = Limits {
        bytes_per_goroutine: Some(1024.0),
        percent_given_back: Some(90.0),
        time_ratio: Some(1.15),
    };
}
