//! snmalloc in trefoil's wrapper.

use std::process::ExitCode;
use trefoil::alloc::Alloc;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: Alloc<snmalloc_rs::SnMalloc> = Alloc::new(snmalloc_rs::SnMalloc);

fn main() -> ExitCode {
    trefoil_allocators::run(&Target {
        allocator: "snmalloc, wrapped",
        limits: Limits::SHARED_CACHES,
    })
}
