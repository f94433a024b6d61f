//! Goroutines for Rust.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu")))]
compile_error!(
    "trefoil runs on Linux x86_64 with glibc: a goroutine owns its thread-local storage, and that \
     needs `arch/` (switch, FS/GS base) and `mem/tls` (TLS blocks) for the target. Both are missing here."
);

mod shim;
