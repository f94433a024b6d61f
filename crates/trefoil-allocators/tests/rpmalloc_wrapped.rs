//! rpmalloc in trefoil's wrapper.

use std::process::ExitCode;
use trefoil::alloc::Alloc;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: Alloc<rpmalloc::RpMalloc> = Alloc::new(rpmalloc::RpMalloc);

fn main() -> ExitCode {
    trefoil_allocators::run(&Target {
        allocator: "rpmalloc, wrapped",
        limits: Limits::SHARED_CACHES,
    })
}
