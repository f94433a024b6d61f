//! mimalloc 3, or mimalloc 2 with the feature `mimalloc-v2`.

use std::ffi::c_int;
use std::process::ExitCode;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

unsafe extern "C" {
    /// For example 2204 or 30102.
    safe fn mi_version() -> c_int;
}

fn main() -> ExitCode {
    let is_v3 = mi_version() >= 30_000 || mi_version() / 100 == 3;
    assert_eq!(is_v3, cfg!(not(feature = "mimalloc-v2")), "version {}", mi_version());
    let allocator = if is_v3 { "mimalloc 3" } else { "mimalloc 2" };
    trefoil_allocators::run(&Target { allocator, limits: Limits::REPORT })
}
