//! glibc's malloc in trefoil's wrapper.

use std::process::ExitCode;
use trefoil::alloc::Alloc;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: Alloc<std::alloc::System> = Alloc::new(std::alloc::System);

fn main() -> ExitCode {
    trefoil_allocators::run(&Target { allocator: "glibc, wrapped", limits: Limits::SHARED_CACHES })
}
