//! glibc's malloc, which trefoil interposes.

use std::process::ExitCode;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: std::alloc::System = std::alloc::System;

fn main() -> ExitCode {
    trefoil_allocators::run(&Target { allocator: "glibc", limits: Limits::SHARED_CACHES })
}
