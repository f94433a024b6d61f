//! Writes blocks by the template method; recycles and destroys the blocks of both methods.

use super::modules::{Dtv, table};
use super::raw::{self, store};
use super::{BlockLayout, Method, fallback, variant};
use std::io;
use std::ptr;

/// rseq(2): registration failed. glibc then asks the kernel for the CPU number.
const RSEQ_CPU_ID_REGISTRATION_FAILED: i32 = -2;
/// Offset of `cpu_id` in `struct rseq`.
const RSEQ_CPU_ID: isize = 4;

/// Writes a whole block at `tp`.
///
/// # Safety
/// `[low, top)` is writable and used by no other thread. The block around `tp` fits in it, and its
/// part of the memory is zeroed.
pub(super) unsafe fn build(
    l: &BlockLayout,
    tp: usize,
    low: usize,
    top: usize,
    tid: u32,
) -> io::Result<()> {
    let at = |off: i32| tp.wrapping_add_signed(off as isize);
    // SAFETY: every offset was found inside [-below_used, above_used) (discover::words), and the
    // caller owns that range. A buffer has room for the DTV (dtv_buffer, invariant 1).
    unsafe {
        for &(off, value) in &l.recipe.same {
            store(at(off), value);
        }
        for &(off, n) in &l.recipe.tp {
            store(at(off), at(n));
        }
        l.recipe.low.iter().for_each(|&off| store(at(off), low));
        l.recipe.size.iter().for_each(|&off| store(at(off), top - low));
        let dtv = l.take_dtv_buffer(tp).cast::<[usize; 2]>();
        if dtv.is_null() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        dtv.copy_from_nonoverlapping(l.dtv.as_ptr(), l.dtv.len());
        for &(id, offset) in &l.fixed {
            (*dtv.add(id + 1))[0] = raw::at(tp, offset);
        }
        store(tp + variant::DTV, dtv.add(1));
        store(raw::at(tp, l.tid), tid);
        unregister_rseq(l, tp);
        table().modules.iter().for_each(|m| m.fill_zeroed(tp));
    }
    Ok(())
}

/// Marks the block's rseq area as not registered.
///
/// # Safety
/// `tp` is a block that no thread has registered with the kernel.
pub(super) unsafe fn unregister_rseq(l: &BlockLayout, tp: usize) {
    if let Some(rseq) = l.rseq {
        // SAFETY: glibc's place for it, inside the block.
        unsafe {
            let at = tp.wrapping_add_signed(rseq);
            store(at, [0u32; 5]);
            store(at.wrapping_add_signed(RSEQ_CPU_ID), RSEQ_CPU_ID_REGISTRATION_FAILED);
        }
    }
}

impl BlockLayout {
    /// See [`recycle`](super::recycle).
    #[inline]
    pub(super) unsafe fn recycle(&self, tp: usize) {
        // SAFETY: the goroutine has ended (caller): no code uses addresses into its TLS.
        unsafe {
            for m in &table().modules {
                m.fill(tp);
            }
            Dtv::of(tp).free_dynamic(self);
            self.reset(tp);
        }
    }

    /// Resets what the next goroutine would inherit through libc's TLS and `struct pthread`.
    #[inline]
    unsafe fn reset(&self, tp: usize) {
        // SAFETY: offsets inside the block, found by the self-test.
        unsafe {
            for &(off, value) in &self.resets.words {
                store(tp.wrapping_add_signed(off), value);
            }
            for &(off, value) in &self.resets.halves {
                store(tp.wrapping_add_signed(off), value);
            }
            store(tp.wrapping_add_signed(self.errno), 0i32);
        }
    }

    /// See [`destroy`](super::destroy).
    pub(super) unsafe fn destroy(&self, tp: usize) {
        // SAFETY: no code runs on the block now or later (caller).
        unsafe {
            self.reset(tp);
            Dtv::of(tp).free_dynamic(self);
            match self.method {
                Method::Template => self.save_libc_tls(tp, Dtv::of(tp).start()),
                Method::Pthread => {
                    self.save_libc_tls(tp, ptr::null_mut());
                    fallback::reap_thread(self, tp);
                }
            }
        }
    }
}
