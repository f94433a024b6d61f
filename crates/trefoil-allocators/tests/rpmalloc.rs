//! rpmalloc.

use std::process::ExitCode;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: rpmalloc::RpMalloc = rpmalloc::RpMalloc;

fn main() -> ExitCode {
    trefoil_allocators::run(&Target { allocator: "rpmalloc", limits: Limits::REPORT })
}
