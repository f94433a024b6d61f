//! Blocks by the recipe: create, recycle, destroy.

use super::modules::{Dtv, table};
use super::raw::store;
use super::{Layout, Way, fallback};
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// rseq(2): "not registered, and do not try": glibc then asks the kernel for the CPU.
const RSEQ_CPU_ID_REGISTRATION_FAILED: i32 = -2;
/// Between `cpu_id_start` and `cpu_id` in `struct rseq`.
const RSEQ_CPU_ID: isize = 4;

/// Writes a whole block at `tp`.
///
/// # Safety
/// `[low, top)` is zeroed, writable and nobody else's; `tp` fits in it with its surroundings.
pub(super) unsafe fn build(
    l: &Layout,
    tp: usize,
    low: usize,
    top: usize,
    tid: u32,
) -> io::Result<()> {
    let at = |off: i32| tp.wrapping_add_signed(off as isize);
    // SAFETY: every offset was learnt inside [-below_used, above) (discover::words), and that range
    // of this block is ours (caller). malloc's memory is uninitialised but wholly copied over.
    unsafe {
        let size = size_of_val(&*l.dtv);
        let dtv = libc::malloc(size).cast::<[usize; 2]>();
        if dtv.is_null() {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        dtv.copy_from_nonoverlapping(l.dtv.as_ptr(), l.dtv.len());
        for &(id, under) in &l.fixed {
            (*dtv.add(id + 1))[0] = tp - under;
        }
        for &(off, value) in &l.recipe.same {
            store(at(off), value);
        }
        for &(off, n) in &l.recipe.tp {
            store(at(off), at(n));
        }
        inherit(l, tp);
        l.recipe.low.iter().for_each(|&off| store(at(off), low));
        l.recipe.size.iter().for_each(|&off| store(at(off), top - low));
        store(tp + 8, dtv.add(1));
        store(tp + l.tid, tid);
        unregister_rseq(l, tp);
        table().modules.iter().for_each(|m| m.fill(tp));
    }
    Ok(())
}

/// # Safety
/// `tp` is a block that no thread registered with the kernel.
pub(super) unsafe fn unregister_rseq(l: &Layout, tp: usize) {
    if let Some(rseq) = l.rseq {
        // SAFETY: glibc's own place for it, inside the block.
        unsafe {
            let at = tp.wrapping_add_signed(rseq);
            store(at, [0u32; 5]);
            store(at.wrapping_add_signed(RSEQ_CPU_ID), RSEQ_CPU_ID_REGISTRATION_FAILED);
        }
    }
}

impl Layout {
    #[inline]
    pub(super) unsafe fn recycle(&self, tp: usize) {
        // SAFETY: the goroutine is over (caller): nobody holds addresses into its TLS.
        unsafe {
            for m in &table().modules {
                m.fill(tp);
            }
            Dtv::of(tp).free_dynamic(self.fixed_last);
            self.reset(tp);
        }
    }

    /// What a dead goroutine could bequeath through libc's TLS and struct pthread.
    #[inline]
    unsafe fn reset(&self, tp: usize) {
        // SAFETY: offsets inside the block, learnt from one (selftest::probe).
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

    pub(super) unsafe fn destroy(&self, tp: usize) {
        // SAFETY: nobody runs on the block and nobody will (caller).
        unsafe {
            self.reset(tp);
            Dtv::of(tp).free_dynamic(self.fixed_last);
            bequeath(self, tp);
            match self.way {
                Way::Template => Dtv::of(tp).free(),
                Way::Pthread => fallback::bury(self, tp),
            }
        }
    }
}

// ---- the estate -----------------------------------------------------------------------------------
//
// libc's TLS of destroyed blocks, for the next ones: it owns malloc's per-thread cache. So there are
// never more caches than there were blocks at once.

/// In malloc's memory, followed by libc's TLS.
#[repr(C)]
struct Estate {
    next: *mut Estate,
}

/// Null: empty. `TAKEN`: somebody changes the list (two stores long, hence a spin and no lock: the
/// runtime's locks are a floor above, and a goroutine's end must not sleep here).
static ESTATES: AtomicPtr<Estate> = AtomicPtr::new(ptr::null_mut());
const TAKEN: *mut Estate = ptr::dangling_mut();

/// Takes the list; the store that puts a list back ends the exclusion.
fn take() -> *mut Estate {
    loop {
        // Acquire pairs with `put_back`: the taker must see the estates' bytes.
        let first = ESTATES.swap(TAKEN, Ordering::Acquire);
        if first != TAKEN {
            return first;
        }
        std::hint::spin_loop();
    }
}

fn put_back(first: *mut Estate) {
    ESTATES.store(first, Ordering::Release);
}

/// # Safety
/// `tp` is a block that nobody runs on or will run on.
unsafe fn bequeath(l: &Layout, tp: usize) {
    // SAFETY: the allocation has room for both parts; libc's area is in the block (caller).
    unsafe {
        let estate = libc::malloc(size_of::<Estate>() + l.libc.size).cast::<Estate>();
        if !estate.is_null() {
            let from = (tp - l.libc.under) as *const u8;
            estate.add(1).cast::<u8>().copy_from_nonoverlapping(from, l.libc.size);
            (*estate).next = take();
            put_back(estate);
        }
    }
}

/// Overwrites libc's area with that of a destroyed block, if there is one.
///
/// # Safety
/// Nobody runs on the block yet.
#[inline]
pub(super) unsafe fn inherit(l: &Layout, tp: usize) {
    if !ESTATES.load(Ordering::Relaxed).is_null() {
        // SAFETY: the caller's.
        unsafe { inherit_slow(l, tp) };
    }
}

#[cold]
unsafe fn inherit_slow(l: &Layout, tp: usize) {
    let estate = take();
    if estate.is_null() {
        return put_back(estate);
    }
    // SAFETY: the list is ours between `take` and `put_back`, the first one for good.
    unsafe {
        put_back((*estate).next);
        let to = (tp - l.libc.under) as *mut u8;
        to.copy_from_nonoverlapping(estate.add(1).cast(), l.libc.size);
        libc::free(estate.cast());
        // The dead block's pointers into itself (`__resp`).
        for &(off, n) in l.recipe.tp.iter().filter(|w| w.0 < 0) {
            store(tp.wrapping_add_signed(off as isize), tp.wrapping_add_signed(n as isize));
        }
    }
}
