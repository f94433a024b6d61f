//! The alternate signal stack of a runtime thread: handlers must not run on a goroutine's stack, which
//! may be small, or full.

use super::mm::PAGE;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// Alternate stack of a runtime thread. A signal frame takes 3.5 KiB, 11.6 KiB with AMX; a symbolised
/// backtrace 21 KiB; only what is touched costs memory.
/// More than the 64 KiB with which libraries are content that bring an alternate stack of their own.
const ALTERNATE_BYTES: usize = 256 << 10;
/// Inaccessible bytes below it.
const GUARD_BYTES: usize = 4 * PAGE;
const MAPPED_BYTES: usize = GUARD_BYTES + ALTERNATE_BYTES;

/// This thread's alternate signal stack, while it lives.
pub(crate) struct AlternateStack {
    /// The guard, and the stack above it.
    memory: *mut c_void,
    before: libc::stack_t,
}

impl AlternateStack {
    /// None if there is no memory: then an overflow kills the process without a message.
    pub(crate) fn install() -> Option<AlternateStack> {
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, anywhere; then handed to this thread alone.
        unsafe {
            let memory = mmap_anonymous(null_mut(), MAPPED_BYTES, prot, flags).ok()?;
            // If there are no mappings left for a guard, the stack is better than none.
            let _ = mprotect(memory, GUARD_BYTES, MprotectFlags::empty());
            let low = memory.byte_add(GUARD_BYTES);
            let stack = libc::stack_t { ss_sp: low, ss_flags: 0, ss_size: ALTERNATE_BYTES };
            let mut before = MaybeUninit::uninit();
            if libc::sigaltstack(&raw const stack, before.as_mut_ptr()) != 0 {
                let _ = rustix::mm::munmap(memory, MAPPED_BYTES);
                return None;
            }
            Some(AlternateStack { memory, before: before.assume_init() })
        }
    }
}

impl Drop for AlternateStack {
    fn drop(&mut self) {
        // SAFETY: ours, and after the first call no longer in use. std's own goes back in place: it
        // takes that down itself.
        unsafe {
            libc::sigaltstack(&raw const self.before, null_mut());
            let _ = rustix::mm::munmap(self.memory, MAPPED_BYTES);
        }
    }
}
