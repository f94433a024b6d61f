//! DTV buffers: malloc's memory for the DTV of a new block, allocated beforehand.
//!
//! A block's DTV must be malloc's memory, because glibc reallocates it. But `create` runs under a
//! lock of the runtime, where it must not wait for malloc's lock: a preempted goroutine may hold
//! that. So `mem::refill_pool` fills a list of free buffers before ([`ensure_dtv_buffers`]), and
//! `create` takes one. malloc inside `create` is the last resort.
//!
//! A free buffer may also contain the **libc TLS of a destroyed block**, which owns the malloc
//! cache of that "thread" (glibc has no function that frees the cache of another thread). The next
//! block inherits it, so there are never more caches than blocks at the peak.
//!
//! ```text
//!   free:        | next | size, flag | libc's TLS …                  |
//!   in a block:  | DTV[-1] (length) | DTV[0] (generation) | DTV[1] … |
//! ```
//!
//! Invariants:
//! 1. A buffer is malloc's memory of `size` bytes, owned by the free list or by one block. Sizes
//!    differ if glibc has enlarged a DTV.
//! 2. Any thread may push at any time, by one compare-and-swap. Takers follow one another
//!    ([`TAKING`]), and only they remove. So the head that a taker has read stays in the list:
//!    there is no ABA, and its `next` may be read.
//!
//! Rejected: the DTV inside the block. It needs no malloc, but the fifteenth dlopen of a library
//! with TLS would make glibc reallocate memory that is not malloc's.

use super::BlockLayout;
use super::raw::{self, load, store};
use crate::sys::lock::Lock;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// The header of a free buffer.
#[repr(C)]
pub(super) struct DtvBuffer {
    next: *mut DtvBuffer,
    /// Bytes, an even number; plus [`HAS_LIBC_TLS`].
    size: usize,
}

/// The buffer contains the libc TLS of a destroyed block.
const HAS_LIBC_TLS: usize = 1;

static FREE_BUFFERS: AtomicPtr<DtvBuffer> = AtomicPtr::new(ptr::null_mut());
/// The approximate length of the list, for [`ensure_dtv_buffers`].
static FREE_COUNT: AtomicUsize = AtomicUsize::new(0);
static TAKING: Lock<()> = Lock::new(());

/// Makes sure that `low` blocks can be made without malloc: one load if they can. Called in user
/// context, because it calls malloc otherwise.
#[inline]
pub fn ensure_dtv_buffers(low: usize) {
    if FREE_COUNT.load(Ordering::Relaxed) < low {
        ensure_dtv_buffers_slow(super::layout(), low);
    }
}

#[cold]
pub(super) fn ensure_dtv_buffers_slow(l: &BlockLayout, low: usize) {
    // Twice as many, so that this happens once per `low` goroutines.
    for _ in FREE_COUNT.load(Ordering::Relaxed)..2 * low {
        let buffer = l.new_dtv_buffer();
        if buffer.is_null() {
            return; // `create` will report it
        }
        // SAFETY: a new buffer that no other thread knows.
        unsafe { push(buffer) };
    }
}

/// Adds a buffer to the free list.
///
/// # Safety
/// The caller owns the buffer.
unsafe fn push(buffer: *mut DtvBuffer) {
    let mut head = FREE_BUFFERS.load(Ordering::Relaxed);
    loop {
        // SAFETY: owned by the caller until the exchange succeeds.
        unsafe { (*buffer).next = head };
        // Release pairs with the Acquire of `take`, which must see `next` and the contents.
        match FREE_BUFFERS.compare_exchange_weak(head, buffer, Ordering::Release, Ordering::Relaxed)
        {
            Ok(_) => break,
            Err(now) => head = now,
        }
    }
    FREE_COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Takes a buffer from the free list; null if it is empty.
fn take() -> *mut DtvBuffer {
    if FREE_BUFFERS.load(Ordering::Relaxed).is_null() {
        return ptr::null_mut();
    }
    // A lock instead of a spin: the kernel may preempt the taker for a real-time thread on the same
    // CPU, which would spin for ever.
    let taking = TAKING.lock();
    let mut head = FREE_BUFFERS.load(Ordering::Acquire);
    while !head.is_null() {
        // SAFETY: only takers remove, and this is the only one (invariant 2).
        let next = unsafe { (*head).next };
        // Acquire pairs with the Release in `push`: a newer head's `next` and contents are visible.
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

impl BlockLayout {
    fn dtv_buffer_bytes(&self) -> usize {
        size_of_val(&*self.dtv).max(size_of::<DtvBuffer>() + self.libc.size).next_multiple_of(16)
    }

    /// Allocates a buffer without libc TLS; null if malloc has no memory.
    fn new_dtv_buffer(&self) -> *mut DtvBuffer {
        // SAFETY: allocates; the header is two words.
        unsafe {
            let buffer = libc::malloc(self.dtv_buffer_bytes()).cast::<DtvBuffer>();
            if !buffer.is_null() {
                buffer.write(DtvBuffer { next: ptr::null_mut(), size: self.dtv_buffer_bytes() });
            }
            buffer
        }
    }

    /// Takes a buffer for the block at `tp`, whose libc TLS is complete. If the buffer contains the
    /// libc TLS of a destroyed block, the block inherits that. Returns null if there is no memory.
    ///
    /// # Safety
    /// No code runs on the block yet; the caller cannot be preempted.
    #[inline]
    pub(super) unsafe fn take_dtv_buffer(&self, tp: usize) -> *mut DtvBuffer {
        let buffer = take();
        if buffer.is_null() {
            return self.new_dtv_buffer();
        }
        // SAFETY: this thread owns the buffer; the block's libc TLS may be written (caller).
        unsafe {
            let size = (*buffer).size;
            if size & HAS_LIBC_TLS != 0 {
                self.inherit_libc_tls(tp, buffer);
            }
            if size & !HAS_LIBC_TLS < self.dtv_buffer_bytes() {
                return libc::realloc(buffer.cast(), self.dtv_buffer_bytes()).cast();
            }
        }
        buffer
    }

    /// Copies the libc TLS in the buffer to the block at `tp`.
    ///
    /// # Safety
    /// The buffer contains `libc.size` bytes of libc TLS; no code runs on the block.
    unsafe fn inherit_libc_tls(&self, tp: usize, buffer: *mut DtvBuffer) {
        // SAFETY: the caller's contract.
        unsafe {
            let to = raw::at(tp, self.libc.offset) as *mut u8;
            to.copy_from_nonoverlapping(buffer.add(1).cast(), self.libc.size);
            // The destroyed block's pointers into itself (`__resp`).
            let area = self.libc.area();
            for &(off, n) in self.recipe.tp.iter().filter(|w| area.contains(&(w.0 as isize))) {
                store(tp.wrapping_add_signed(off as isize), tp.wrapping_add_signed(n as isize));
            }
        }
    }

    /// Turns the DTV of a block (or null) into a free buffer that contains the block's libc TLS.
    ///
    /// # Safety
    /// No code runs on the block any more; `dtv` (entry −1) is malloc's memory and belongs to the
    /// block.
    pub(super) unsafe fn save_libc_tls(&self, tp: usize, dtv: *mut [usize; 2]) {
        // SAFETY: the caller's contract. If glibc has reallocated the DTV, only its length tells
        // how large it is, and libc's TLS might not fit.
        unsafe {
            let entries = if dtv.is_null() { 0 } else { load::<usize>(dtv as usize) + 2 };
            let is_original = entries == self.dtv.len();
            let mut size = if is_original { self.dtv_buffer_bytes() } else { entries * 16 };
            let mut buffer = dtv.cast::<DtvBuffer>();
            if size < self.dtv_buffer_bytes() {
                size = self.dtv_buffer_bytes();
                buffer = libc::realloc(dtv.cast(), size).cast();
            }
            if !buffer.is_null() {
                buffer.write(DtvBuffer { next: ptr::null_mut(), size: size | HAS_LIBC_TLS });
                let from = raw::at(tp, self.libc.offset) as *const u8;
                buffer.add(1).cast::<u8>().copy_from_nonoverlapping(from, self.libc.size);
                push(buffer);
            }
        }
    }
}
