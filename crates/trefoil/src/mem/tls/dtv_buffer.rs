//! Kits: what a new block needs from malloc, got beforehand.
//!
//! A block's DTV must be malloc's, because glibc reallocates it. But blocks are made inside the scheduler,
//! which must not wait for an arena lock: its holder may be a preempted goroutine that waits for this
//! very P. So user code (`ensure_dtv_buffers`, at a goroutine's start or in `go`) keeps a stock of pieces, and
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
//! 1. A buffer is malloc's memory of `size` bytes, owned by the stock or by one block. Sizes may differ:
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
pub(super) struct DtvBuffer {
    next: *mut DtvBuffer,
    /// Bytes, even; bit 0 says that there is an estate.
    size: usize,
}

const HAS_LIBC_TLS: usize = 1;

static FREE_BUFFERS: AtomicPtr<DtvBuffer> = AtomicPtr::new(ptr::null_mut());
/// About how many; only for `ensure_dtv_buffers`.
static FREE_COUNT: AtomicUsize = AtomicUsize::new(0);
static TAKING: Lock<()> = Lock::new(());

/// In user context: sees to it that `low` blocks can be made without malloc. One load if so.
#[inline]
pub(crate) fn ensure_dtv_buffers(low: usize) {
    if FREE_COUNT.load(Ordering::Relaxed) < low {
        ensure_dtv_buffers_slow(super::layout(), low);
    }
}

#[cold]
pub(super) fn ensure_dtv_buffers_slow(l: &Layout, low: usize) {
    // Twice as many, so that this is paid once in `low` goroutines.
    for _ in FREE_COUNT.load(Ordering::Relaxed)..2 * low {
        // SAFETY: a buffer of our own, in nobody's hands.
        unsafe {
            let buffer = l.new_dtv_buffer();
            if buffer.is_null() {
                return; // `create` will say so
            }
            push(buffer);
        }
    }
}

/// # Safety
/// The buffer is the caller's.
unsafe fn push(buffer: *mut DtvBuffer) {
    let mut head = FREE_BUFFERS.load(Ordering::Relaxed);
    loop {
        // SAFETY: ours until the exchange succeeds.
        unsafe { (*buffer).next = head };
        // Release pairs with the Acquire of `take`: it must see `next` and the estate.
        match FREE_BUFFERS.compare_exchange_weak(head, buffer, Ordering::Release, Ordering::Relaxed)
        {
            Ok(_) => break,
            Err(now) => head = now,
        }
    }
    FREE_COUNT.fetch_add(1, Ordering::Relaxed);
}

/// From the stock; null if there is none.
fn take() -> *mut DtvBuffer {
    if FREE_BUFFERS.load(Ordering::Relaxed).is_null() {
        return ptr::null_mut();
    }
    // Takers follow one another, so that each sees the last one's removal. Not a spin: the kernel may preempt the taker
    // for a real-time thread on the same CPU, which would spin for ever.
    let taking = TAKING.lock();
    let mut head = FREE_BUFFERS.load(Ordering::Acquire);
    while !head.is_null() {
        // SAFETY: only takers remove, and we are the only one (invariant 2).
        let next = unsafe { (*head).next };
        match FREE_BUFFERS.compare_exchange_weak(head, next, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => break,
            Err(now) => head = now,
        }
    }
    drop(taking);
    if !head.is_null() {
        FREE_COUNT.fetch_sub(1, Ordering::Relaxed);
    }
    head
}

impl Layout {
    fn dtv_buffer_bytes(&self) -> usize {
        size_of_val(&*self.dtv).max(size_of::<DtvBuffer>() + self.libc.size).next_multiple_of(16)
    }

    /// Fresh from malloc; null if that has none.
    fn new_dtv_buffer(&self) -> *mut DtvBuffer {
        // SAFETY: allocates; a buffer without an estate is two words.
        unsafe {
            let buffer = libc::malloc(self.dtv_buffer_bytes()).cast::<DtvBuffer>();
            if !buffer.is_null() {
                buffer.write(DtvBuffer { next: ptr::null_mut(), size: self.dtv_buffer_bytes() });
            }
            buffer
        }
    }

    /// A buffer for the block at `tp`, whose libc TLS is complete: an estate, if the buffer has one, replaces
    /// it. Null if there is no memory.
    ///
    /// # Safety
    /// Nobody runs on the block yet; the caller cannot be preempted.
    #[inline]
    pub(super) unsafe fn take_dtv_buffer(&self, tp: usize) -> *mut DtvBuffer {
        let buffer = take();
        if buffer.is_null() {
            return self.new_dtv_buffer();
        }
        // SAFETY: the buffer is ours; its estate is `libc.size` bytes; libc's area is the block's (caller).
        unsafe {
            let size = (*buffer).size;
            if size & HAS_LIBC_TLS != 0 {
                let to = (tp - self.libc.below_tp) as *mut u8;
                to.copy_from_nonoverlapping(buffer.add(1).cast(), self.libc.size);
                // The dead block's pointers into itself (`__resp`).
                for &(off, n) in self.recipe.tp.iter().filter(|w| w.0 < 0) {
                    store(tp.wrapping_add_signed(off as isize), tp.wrapping_add_signed(n as isize));
                }
            }
            if size & !HAS_LIBC_TLS < self.dtv_buffer_bytes() {
                return libc::realloc(buffer.cast(), self.dtv_buffer_bytes()).cast();
            }
        }
        buffer
    }

    /// Turns the DTV of a dead block, or null, into a buffer with the block's estate.
    ///
    /// # Safety
    /// Nobody runs on the block or will; `dtv` (entry −1) is malloc's and the block's own.
    pub(super) unsafe fn save_libc_tls(&self, tp: usize, dtv: *mut [usize; 2]) {
        // SAFETY: the caller's. glibc may have reallocated the DTV: then only its length says how big
        // it is, and an estate might not fit.
        unsafe {
            let entries = if dtv.is_null() { 0 } else { load::<usize>(dtv as usize) + 2 };
            let ours = entries == self.dtv.len();
            let mut size = if ours { self.dtv_buffer_bytes() } else { entries * 16 };
            let mut buffer = dtv.cast::<DtvBuffer>();
            if size < self.dtv_buffer_bytes() {
                size = self.dtv_buffer_bytes();
                buffer = libc::realloc(dtv.cast(), size).cast();
            }
            if !buffer.is_null() {
                buffer.write(DtvBuffer { next: ptr::null_mut(), size: size | HAS_LIBC_TLS });
                let from = (tp - self.libc.below_tp) as *const u8;
                buffer.add(1).cast::<u8>().copy_from_nonoverlapping(from, self.libc.size);
                push(buffer);
            }
        }
    }
}
