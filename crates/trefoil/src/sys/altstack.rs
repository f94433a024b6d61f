//! The alternate signal stack of a runtime thread: handlers must not run on a goroutine's stack, which
//! may be small, or full.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// Alternate stack of a runtime thread. A signal frame takes 3.5 KiB, 11.6 KiB with AMX; a symbolised
/// backtrace 21 KiB; only what is touched costs memory.
const ALTERNATE_BYTES: usize = 256 << 10;
/// This thread's alternate signal stack, while it lives.
pub(crate) struct AlternateStack {
    memory: *mut c_void,
    before: libc::stack_t,
}

impl AlternateStack {
    /// None if there is no memory: then an overflow kills the process without a message.
    pub(crate) fn install() -> Option<AlternateStack> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, anywhere; then handed to this thread alone.
        unsafe {
            let memory = mmap_anonymous(null_mut(), ALTERNATE_BYTES, prot, flags).ok()?;
            let stack = libc::stack_t { ss_sp: memory, ss_flags: 0, ss_size: ALTERNATE_BYTES };
            let mut before = MaybeUninit::uninit();
            if libc::sigaltstack(&raw const stack, before.as_mut_ptr()) != 0 {
                let _ = rustix::mm::munmap(memory, ALTERNATE_BYTES);
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
            let _ = rustix::mm::munmap(self.memory, ALTERNATE_BYTES);
        }
    }
}
