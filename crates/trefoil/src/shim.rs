//! The atomics that the lock-free protocols are written with.
//!
//! The protocol files (`sched/{runq,idle,join,state}.rs`, `sync/*_word.rs`, `sys/parker.rs`, `mem/depot.rs`) name only
//! this module. `crates/trefoil-model` compiles the same files against a shim of the same shape made of
//! loom's types and tiny capacities, and explores every interleaving. So what is checked is what runs.

pub(crate) use crate::sys::futex::{futex_wait, futex_wake};
pub(crate) use crate::sys::lock::Lock;
pub(crate) use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Slots in a P's local run queue. Go's number.
pub(crate) const RING: usize = 256;

/// A full (store-load) barrier.
///
/// x86: a locked read-modify-write of the stack is such a barrier and costs half of `mfence`
/// (7 against 14 ns measured); the compiler is held by the asm block's memory clobber.
#[inline(always)]
pub(crate) fn full_fence() {
    // SAFETY: adds zero to a word in our own red zone; changes nothing.
    unsafe { std::arch::asm!("lock or dword ptr [rsp - 8], 0") }
}

/// A swap (Release and Acquire) that is also a full barrier. On x86 a locked instruction is both.
#[inline(always)]
pub(crate) fn swap_full<T>(cell: &AtomicPtr<T>, value: *mut T) -> *mut T {
    let old = cell.swap(value, Ordering::SeqCst);
    std::sync::atomic::compiler_fence(Ordering::SeqCst);
    old
}

/// What a spinning thread does between two looks.
#[inline(always)]
pub(crate) fn spin_hint() {
    std::hint::spin_loop();
}
