//! mimalloc 3, or mimalloc 2 with the feature `mimalloc-v2`, in trefoil's wrapper.

use std::process::ExitCode;
use trefoil::alloc::Alloc;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: Alloc<mimalloc::MiMalloc> = Alloc::new(mimalloc::MiMalloc);

fn main() -> ExitCode {
    trefoil_allocators::run(&Target {
        allocator: "mimalloc, wrapped",
        limits: Limits::SHARED_CACHES,
    })
}
