//! The atomics and capacities that the lock-free protocols are written with.
//!
//! The protocol files (`sched/queues/runq.rs`, `sched/search/idle.rs`,
//! `sched/goroutine/{join,state}.rs`, `sched/task/state.rs`, `sync/*_word.rs`, `sys/parker.rs`) use
//! atomics, fences and spin hints only through this module, and the stack pool
//! (`mem/stack_pool.rs`) uses locks only through `sys::lock`. `crates/trefoil-model` compiles the
//! same files against modules of the same names that are made of loom's types and small capacities.
//! loom explores every interleaving of a small case; for larger cases the number of preemptions is
//! bounded (each check states its bound).
//!
//! This module imports nothing from the crate.

pub use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Slots in a P's local run queue, as in Go.
pub const RING: usize = 256;

/// Executes a full (store-load) barrier.
///
/// On x86 a locked read-modify-write of the stack is such a barrier and takes half the time of
/// `mfence` (7 instead of 14 ns, measured). The memory clobber of the asm block stops the compiler
/// from moving accesses across it. Elsewhere it is the fence of the language (`dmb ish`).
#[inline(always)]
pub fn full_fence() {
    #[cfg(not(target_arch = "x86_64"))]
    std::sync::atomic::fence(Ordering::SeqCst);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: ORs zero into a word of the caller's red zone, which changes nothing.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp - 8], 0")
    }
}

/// Makes the read-modify-write that the caller has just done a full barrier. On x86 it is one (a
/// locked instruction), and this does nothing. On aarch64 a later load may overtake the store of a
/// read-modify-write, whatever its ordering, unless that load is SeqCst itself.
#[inline(always)]
pub fn fence_after_rmw() {
    #[cfg(target_arch = "x86_64")]
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(target_arch = "x86_64"))]
    full_fence();
}

/// Swaps with Acquire and Release ordering, and is a full barrier too.
#[inline(always)]
pub fn swap_full<T>(cell: &AtomicPtr<T>, value: *mut T) -> *mut T {
    let old = cell.swap(value, Ordering::SeqCst);
    fence_after_rmw();
    old
}

/// Tells the CPU that the calling thread spins: call it between two reads of the awaited word.
#[inline(always)]
pub fn spin_hint() {
    std::hint::spin_loop();
}
