//! Tests of trefoil under every common allocator.
//!
//! A goroutine owns its thread-local storage, so an allocator takes every goroutine for a thread: it may give
//! each of them a cache, and the goroutine may be preempted while it holds one of the allocator's locks. These
//! tests check that no allocator hangs, hands out a block twice, delays other goroutines or costs more than it should.
//!
//! `#[global_allocator]` is per binary. Each allocator is a test target of its own (`tests/jemalloc.rs` …), which
//! sets the allocator and calls [`run`]; everything else is here. `tests/jemalloc_wrapped.rs` has the same allocator in
//! `trefoil::alloc::Alloc`. The target runs each [`Scene`] in a
//! process of its own, so that a crash or hang of one does not hide the others. `tests/preloaded.rs` does the same
//! under `LD_PRELOAD`.
//!
//! ```text
//! cargo test --release -p trefoil-allocators --features all
//! cargo test --release -p trefoil-allocators --features mimalloc-v2 --test mimalloc_wrapped
//! cargo test --release -p trefoil-allocators --features jemalloc --test jemalloc_wrapped -- torture-p2
//! cargo test --release -p trefoil-allocators --test preloaded -- libjemalloc memory
//! ```
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_ALLOC_SECS` | seconds of torture per allocator, 9 by default |
//! | `TREFOIL_ALLOC_STRICT` | `1`: also assert the limits of time per allocation, which need a quiet machine |
//! | `TREFOIL_TEST_GDB` | `1`: show the stacks of all threads of a process that hangs (needs gdb) |

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
    /// Percentage of their memory that is given back to the kernel within three seconds after goroutines ended.
    pub percent_given_back: Option<f64>,
    /// Time per allocation on a goroutine, divided by the time on a plain thread. Asserted only with
    /// `TREFOIL_ALLOC_STRICT=1`.
    pub time_ratio: Option<f64>,
}

impl Limits {
    /// Reports every cost and asserts none.
    pub const REPORT: Limits =
        Limits { bytes_per_goroutine: None, percent_given_back: None, time_ratio: None };

    /// What holds where goroutines share the allocator's caches instead of having their own.
    pub const SHARED_CACHES: Limits = Limits {
        bytes_per_goroutine: Some(1024.0),
        percent_given_back: Some(90.0),
        time_ratio: Some(1.15),
    };
}
