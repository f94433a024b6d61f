//! Kits: what a new block needs from malloc, got beforehand.
//!
//! A block's DTV must be malloc's, because glibc reallocates it. But blocks are made inside the scheduler,
//! which must not wait for an arena lock: its holder may be a preempted goroutine that waits for this
//! very P. So user code (`provide`, at a goroutine's start or in `go`) keeps a stock of pieces, and
//! `create` only takes one; malloc inside `create` is the last resort.
//!
//! A piece also carries the **estate** of a destroyed block: its libc TLS, which owns malloc's cache of
//! that "thread" (glibc has no door through which somebody else could free it). The next block
//! inherits it, so there are never more caches than there were blocks at once.
//!
//! ```text
//!   in stock:    | next | size, estate or not | libc's TLS …         |
//!   in a block:  | DTV[-1] (length) | DTV[0] (generation) | DTV[1] … |
//! ```
//!
//! Invariants:
//! 1. A kit is malloc's memory of `size` bytes, owned by the stock or by one block. Sizes may differ:
//!    glibc may have enlarged the DTV.
//! 2. Anybody pushes, at any time: one CAS. Only runtime code that cannot be preempted takes, and one
//!    at a time (`TAKING`). So nobody else removes the head that a taker looks at: no ABA, and its
//!    `next` may be read.
//!
//! Rejected: the DTV inside the block. No malloc at all, but the fifteenth dlopen of a library with TLS
//! would make glibc reallocate our memory.

use super::Layout;
use super::raw::{load, store};
use crate::sys::lock::Lock;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

#[repr(C)]
pub(super) struct Kit {
    next: *mut Kit,
    /// Bytes, even; bit 0 says that there is an estate.
    size: usize,
}

const ESTATE: usize = 1;

static STOCK: AtomicPtr<Kit> = AtomicPtr::new(ptr::null_mut());
/// About how many; only for `provide`.
static COUNT: AtomicUsize = AtomicUsize::new(0);
static TAKING: Lock<()> = Lock::new(());

/// In user context: sees to it that `low` blocks can be made without malloc. One load if so.
#[inline]
pub(crate) fn provide(low: usize) {
    if COUNT.load(Ordering::Relaxed) < low {
        provide_slow(super::layout(), low);
    }
}

#[cold]
pub(super) fn provide_slow(l: &Layout, low: usize) {
    // Twice as many, so that this is paid once in `low` goroutines.
    for _ in COUNT.load(Ordering::Relaxed)..2 * low {
        // SAFETY: a kit of our own, in nobody's hands.
        unsafe {
            let kit = l.new_kit();
            if kit.is_null() {
                return; // `create` will say so
            }
            push(kit);
        }
    }
}

/// # Safety
/// The kit is the caller's.
unsafe fn push(kit: *mut Kit) {
    let mut head = STOCK.load(Ordering::Relaxed);
    loop {
        // SAFETY: ours until the exchange succeeds.
        unsafe { (*kit).next = head };
        // Release pairs with the Acquire of `take`: it must see `next` and the estate.
        match STOCK.compare_exchange_weak(head, kit, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => break,
            Err(now) => head = now,
        }
    }
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// From the stock; null if there is none.
fn take() -> *mut Kit {
    if STOCK.load(Ordering::Relaxed).is_null() {
        return ptr::null_mut();
    }
    // Takers follow one another, so that each sees the last one's removal. Not a spin: the kernel may preempt the taker
    // for a real-time thread on the same CPU, which would spin for ever.
    let taking = TAKING.lock();
    let mut head = STOCK.load(Ordering::Acquire);
    while !head.is_null() {
        // SAFETY: only takers remove, and we are the only one (invariant 2).
        let next = unsafe { (*head).next };
        match STOCK.compare_exchange_weak(head, next, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => break,
            Err(now) => head = now,
        }
    }
    drop(taking);
    if !head.is_null() {
        COUNT.fetch_sub(1, Ordering::Relaxed);
    }
    head
}

impl Layout {
    fn kit_size(&self) -> usize {
        size_of_val(&*self.dtv).max(size_of::<Kit>() + self.libc.size).next_multiple_of(16)
    }

    /// Fresh from malloc; null if that has none.
    fn new_kit(&self) -> *mut Kit {
        // SAFETY: allocates; a kit without an estate is two words.
        unsafe {
            let kit = libc::malloc(self.kit_size()).cast::<Kit>();
            if !kit.is_null() {
                kit.write(Kit { next: ptr::null_mut(), size: self.kit_size() });
            }
            kit
        }
    }

    /// A kit for the block at `tp`, whose libc TLS is complete: an estate, if the kit has one, replaces
    /// it. Null if there is no memory.
    ///
    /// # Safety
    /// Nobody runs on the block yet; the caller cannot be preempted.
    #[inline]
    pub(super) unsafe fn take_kit(&self, tp: usize) -> *mut Kit {
        let kit = take();
        if kit.is_null() {
            return self.new_kit();
        }
        // SAFETY: the kit is ours; its estate is `libc.size` bytes; libc's area is the block's (caller).
        unsafe {
            let size = (*kit).size;
            if size & ESTATE != 0 {
                let to = (tp - self.libc.under) as *mut u8;
                to.copy_from_nonoverlapping(kit.add(1).cast(), self.libc.size);
                // The dead block's pointers into itself (`__resp`).
                for &(off, n) in self.recipe.tp.iter().filter(|w| w.0 < 0) {
                    store(tp.wrapping_add_signed(off as isize), tp.wrapping_add_signed(n as isize));
                }
            }
            if size & !ESTATE < self.kit_size() {
                return libc::realloc(kit.cast(), self.kit_size()).cast();
            }
        }
        kit
    }

    /// Turns the DTV of a dead block, or null, into a kit with the block's estate.
    ///
    /// # Safety
    /// Nobody runs on the block or will; `dtv` (entry −1) is malloc's and the block's own.
    pub(super) unsafe fn bequeath(&self, tp: usize, dtv: *mut [usize; 2]) {
        // SAFETY: the caller's. glibc may have reallocated the DTV: then only its length says how big
        // it is, and an estate might not fit.
        unsafe {
            let entries = if dtv.is_null() { 0 } else { load::<usize>(dtv as usize) + 2 };
            let ours = entries == self.dtv.len();
            let mut size = if ours { self.kit_size() } else { entries * 16 };
            let mut kit = dtv.cast::<Kit>();
            if size < self.kit_size() {
                size = self.kit_size();
                kit = libc::realloc(dtv.cast(), size).cast();
            }
            if !kit.is_null() {
                kit.write(Kit { next: ptr::null_mut(), size: size | ESTATE });
                let from = (tp - self.libc.under) as *const u8;
                kit.add(1).cast::<u8>().copy_from_nonoverlapping(from, self.libc.size);
                push(kit);
            }
        }
    }
}
