//! The ground of the crate `trefoil`: what knows no scheduler.
//!
//! | room | what is in it |
//! |---|---|
//! | [`arch`] | what depends on the CPU: how one execution context becomes another |
//! | [`mem`] | stacks with their thread-local storage, and the memory for them |
//! | [`symbols`] | from code addresses to callers, names and lines, by what ELF files say |
//! | [`sys`] | system calls, and what is built on them alone: locks, clocks, the environment |
//! | [`shim`] | the atomics that the lock-free protocols are written with |
//!
//! It is a crate of its own so that the optimiser works on it while the compiler still checks the
//! scheduler, and so that it is not compiled again when the scheduler changes. Small functions on hot
//! paths are `#[inline]`: otherwise they would be calls from trefoil.
//!
//! Rejected: [`symbols`] as another crate. With two CPUs, Cargo begins with trefoil only when the
//! optimiser has ended with one of the two: a program with trefoil took 4 to 5 s longer to build.
//!
//! Its interface may change with any version: depend on the crate `trefoil`.

// What a field, a variant or a small method is, its name says.
#![allow(missing_docs)]
// Nothing is made by default here.
#![allow(clippy::new_without_default)]

#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64"),
    target_env = "gnu"
)))]
compile_error!(
    "trefoil runs on Linux with glibc, on x86_64 and aarch64: a goroutine owns its thread-local \
     storage, and that needs a port. In the crate trefoil-base, `arch/mod.rs` lists what a port of \
     a CPU provides (switch, thread pointer, preemption), and `mem/tls/mod.rs` lists what it says \
     about TLS blocks."
);

// On `gnu` only: any other target gets the message above.
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
compile_error!(
    "trefoil needs a dynamically linked glibc: it reads the layout of thread-local storage from \
     the dynamic linker, and its own versions of libc functions call those of libc. Build without \
     `-C target-feature=+crt-static` (see RUSTFLAGS and .cargo/config.toml)."
);

pub mod arch;
pub mod mem;
pub mod shim;
pub mod symbols;
pub mod sys;
