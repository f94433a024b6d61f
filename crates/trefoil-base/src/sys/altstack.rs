//! The alternate signal stack of a runtime thread: handlers must not run on a goroutine's stack,
//! which may be small or full.

use super::mm::PAGE;
use super::syscalls;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// Size of the alternate stack. A signal frame takes 3.5 KiB, 11.6 KiB with AMX; a symbolised
/// backtrace 21 KiB. Libraries that install their own alternate stack get by with 64 KiB. Only
/// touched pages cost memory.
const ALTERNATE_BYTES: usize = 256 << 10;
/// Inaccessible bytes below it: a multiple of every kernel's page.
const GUARD_BYTES: usize = if cfg!(target_arch = "x86_64") { 4 * PAGE } else { 64 << 10 };
const MAPPED_BYTES: usize = GUARD_BYTES + ALTERNATE_BYTES;

/// The alternate signal stack of the thread that made it, until it is dropped.
pub struct AlternateStack {
    /// The guard, and the stack above it.
    memory: *mut c_void,
    /// The alternate stack that the thread had before.
    before: libc::stack_t,
}

impl AlternateStack {
    /// Installs one for the calling thread. Returns None if there is no memory: then a stack
    /// overflow kills the process without a message.
    pub fn install() -> Option<AlternateStack> {
        let (prot, flags) = (syscalls::READ_WRITE, libc::MAP_NORESERVE);
        // SAFETY: a new mapping that only this thread uses.
        unsafe {
            let memory = syscalls::mmap_anonymous(null_mut(), MAPPED_BYTES, prot, flags).ok()?;
            // If no mapping is left for the guard, a stack without a guard is better than none.
            let _ = syscalls::mprotect(memory, GUARD_BYTES, libc::PROT_NONE);
            let low = memory.byte_add(GUARD_BYTES);
            let stack = libc::stack_t { ss_sp: low, ss_flags: 0, ss_size: ALTERNATE_BYTES };
            let mut before = MaybeUninit::uninit();
            if libc::sigaltstack(&raw const stack, before.as_mut_ptr()) != 0 {
                let _ = syscalls::munmap(memory, MAPPED_BYTES);
                return None;
            }
            Some(AlternateStack { memory, before: before.assume_init() })
        }
    }
}

impl Drop for AlternateStack {
    fn drop(&mut self) {
        // SAFETY: our mapping, which is no longer in use after the first call. That call restores
        // the stack that std installed; std removes it itself.
        unsafe {
            libc::sigaltstack(&raw const self.before, null_mut());
            let _ = syscalls::munmap(self.memory, MAPPED_BYTES);
        }
    }
}
