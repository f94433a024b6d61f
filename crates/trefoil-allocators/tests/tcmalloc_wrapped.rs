//! Google's TCMalloc in trefoil's wrapper.

use std::process::ExitCode;
use trefoil::alloc::Alloc;
use trefoil_allocators::{Limits, Target};

#[global_allocator]
static ALLOCATOR: Alloc<tcmalloc_better::TCMalloc> = Alloc::new(tcmalloc_better::TCMalloc);

fn main() -> ExitCode {
    trefoil_allocators::run(&Target {
        allocator: "tcmalloc, wrapped",
        limits: Limits::SHARED_CACHES,
    })
}
