//! Google's TCMalloc.

use std::process::ExitCode;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: tcmalloc_better::TCMalloc = tcmalloc_better::TCMalloc;

fn main() -> ExitCode {
    trefoil_allocators::run(&Target { allocator: "tcmalloc", limits: Limits::REPORT })
}
