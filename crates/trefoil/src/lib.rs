//! Goroutines for Rust.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu")))]
compile_error!(
    "trefoil runs on Linux x86_64 with glibc: a goroutine owns its thread-local storage, and that \
     needs `arch/` (switch, FS/GS base) and `mem/tls` (TLS blocks) for the target. Both are missing here."
);

mod arch;
mod goroutine;
mod interpose;
mod mem;
mod observe;
mod runtime;
mod sched;
mod scope;
mod shim;
mod sys;

pub use goroutine::{Builder, JoinHandle, PanicMode, go, id, yield_now};
pub use runtime::{
    Runtime, RuntimeBuilder, num_cpus, num_goroutines, procs, run, set_procs,
};
pub use scope::{Scope, ScopedJoinHandle, scope};
pub use trefoil_macros::{main, test};
