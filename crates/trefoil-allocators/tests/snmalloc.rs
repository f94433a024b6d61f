//! snmalloc.

use std::process::ExitCode;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: snmalloc_rs::SnMalloc = snmalloc_rs::SnMalloc;

fn main() -> ExitCode {
    trefoil_allocators::run(&Target { allocator: "snmalloc", limits: Limits::REPORT })
}
