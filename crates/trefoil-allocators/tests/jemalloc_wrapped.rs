//! jemalloc in trefoil's wrapper.

use std::process::ExitCode;
use trefoil::alloc::Alloc;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: Alloc<tikv_jemallocator::Jemalloc> = Alloc::new(tikv_jemallocator::Jemalloc);

fn main() -> ExitCode {
    trefoil_allocators::run(&Target {
        allocator: "jemalloc, wrapped",
        limits: Limits::SHARED_CACHES,
    })
}
