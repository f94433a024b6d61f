//! Allocators that replace glibc's malloc by `LD_PRELOAD`.

use std::process::ExitCode;
use trefoil_allocators::{Library, Limits, Target};

#[global_allocator]
static ALLOCATOR: std::alloc::System = std::alloc::System;

const LIBRARIES: &[Library] = &[
    Library { file: "libjemalloc.so.2", package: "libjemalloc2" },
    Library { file: "libmimalloc.so.2", package: "libmimalloc2.0" },
    Library { file: "libtcmalloc_minimal.so.4", package: "libtcmalloc-minimal4" },
];

fn main() -> ExitCode {
    let target = Target { allocator: "preloaded", limits: Limits::REPORT };
    trefoil_allocators::run_preloaded(&target, LIBRARIES)
}
