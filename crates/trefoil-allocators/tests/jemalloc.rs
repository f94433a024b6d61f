//! jemalloc.

use std::process::ExitCode;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    trefoil_allocators::run(&Target { allocator: "jemalloc", limits: Limits::REPORT })
}
