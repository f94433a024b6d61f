//! What lies in a channel: a ring of fixed size, or a chain of blocks that grows.
//!
//! The buffer does not know the type of its elements, only their size; [`Elem`] says how one is
//! moved.
//! The operations of a channel know the type (one move instruction for a small one), a select does
//! not (it handles channels of different types in one loop).
//!
//! ```text
//!   ring     base: . . a b c d . .          at: index of a;  d's successor is (at + len) % cap
//!   chain    base: [. a b c] → [d e . .]    at: index of a in the first block;
//!                                            end: index after e in the last one
//! ```
//!
//! Invariants:
//! 1. Everything here is touched under the channel's lock, except `len`, `cap` and `discarded`,
//!    which are also read without it.
//! 2. `len` is what a look from outside may rely on: it never passes through a wrong value.
//! 3. Nothing here allocates or frees: blocks are brought in by [`Buffer::lend`] and carried out by
//!    [`Buffer::take_discarded`], outside the lock (sched/mod.rs, rule 2).
//! 4. Elements of size zero need no place: their buffer is a ring without memory, also an unbounded
//!    one.
//!
//! Rejected: a ring that doubles for unbounded channels. It moves everything under the lock: a
//! million elements are a millisecond in which nobody sends.

use super::cells::{AtomicPtr, AtomicUsize, Cell, Ordering};
use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::null_mut;

/// Capacity of an unbounded channel.
pub(super) const UNBOUNDED: usize = usize::MAX;
/// Bytes of elements in a block, roughly.
const BLOCK_BYTES: usize = 2048;
/// Elements in a block, at most.
const BLOCK_MAX: usize = 64;

/// How an element is moved.
pub(super) trait Elem: Copy {
    fn size(self) -> usize;
    /// # Safety
    /// `from` is a value of the channel's type, `to` has room for one; `from` is not used as one
    /// again.
    unsafe fn copy(self, from: *const u8, to: *mut u8);
}

/// Elements of a known type.
pub(super) struct Of<T>(PhantomData<T>);

impl<T> Of<T> {
    pub(super) const ELEM: Of<T> = Of(PhantomData);
}

impl<T> Clone for Of<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Of<T> {}

impl<T> Elem for Of<T> {
    #[inline(always)]
    fn size(self) -> usize {
        size_of::<T>()
    }
    #[inline(always)]
    unsafe fn copy(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's; both are aligned for T, as all slots of the channel are.
        unsafe { to.cast::<T>().copy_from_nonoverlapping(from.cast::<T>(), 1) };
    }
}

/// Elements of a known size.
#[derive(Clone, Copy)]
pub(super) struct Bytes(pub(super) usize);

impl Elem for Bytes {
    #[inline(always)]
    fn size(self) -> usize {
        self.0
    }
    #[inline(always)]
    unsafe fn copy(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's. A word is the usual size, and worth the branch.
        unsafe {
            if self.0 == 8 {
                to.copy_from_nonoverlapping(from, 8);
            } else {
                to.copy_from_nonoverlapping(from, self.0);
            }
        }
    }
}

/// The first word of a block; elements follow.
struct Block {
    next: Cell<*mut Block>,
}

/// See the head of the file. Its channel's lock guards it.
#[repr(C)]
pub(super) struct Buffer {
    len: AtomicUsize,
    cap: usize,
    /// Index of the first element, in the ring or in the first block.
    at: Cell<usize>,
    /// The ring, or the first block; null if there is none.
    base: Cell<*mut u8>,
    elem_align: u32,
    // Chains only.
    end: Cell<u32>,
    last: Cell<*mut Block>,
    /// A block in reserve.
    spare: Cell<*mut Block>,
    /// Blocks to be freed.
    discarded: AtomicPtr<Block>,
    elem_size: usize,
}

impl Buffer {
    /// An empty buffer for `cap` elements of type T, with the memory of its ring ([`ring_layout`]), which it does not
    /// own.
    pub(super) fn new<T>(cap: usize, ring: *mut u8) -> Buffer {
        Buffer {
            len: AtomicUsize::new(0),
            cap,
            at: Cell::new(0),
            base: Cell::new(if cap == UNBOUNDED { null_mut() } else { ring }),
            end: Cell::new(0),
            last: Cell::new(null_mut()),
            spare: Cell::new(null_mut()),
            discarded: AtomicPtr::new(null_mut()),
            elem_size: size_of::<T>(),
            elem_align: align_of::<T>() as u32,
        }
    }

    /// The layout of its ring.
    pub(super) fn ring_layout(&self) -> Layout {
        ring_layout(self.cap, self.elem_size, self.elem_align as usize)
    }

    #[inline]
    pub(super) fn elem(&self) -> Bytes {
        Bytes(self.elem_size)
    }

    #[inline]
    pub(super) fn cap(&self) -> usize {
        self.cap
    }

    /// How many lie here. Acquire: what a look without the lock sees next is not older than this.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    #[inline]
    fn set_len(&self, len: usize) {
        // Release: pairs with `len`.
        self.len.store(len, Ordering::Release);
    }

    #[inline]
    fn is_chain<E: Elem>(&self, elem: E) -> bool {
        self.cap == UNBOUNDED && elem.size() != 0
    }

    /// Index `i` of the ring, for `i` below twice the capacity.
    #[inline]
    fn wrap(&self, i: usize) -> usize {
        if i >= self.cap { i - self.cap } else { i }
    }

    /// Appends the value at `from`; there is room by `cap`. False: the chain needs a block first.
    ///
    /// # Safety
    /// The lock is held; `elem` is this channel's; `from` is a value, which moves.
    #[inline]
    #[must_use]
    pub(super) unsafe fn push<E: Elem>(&self, elem: E, from: *const u8) -> bool {
        let len = self.len();
        debug_assert!(len < self.cap);
        // SAFETY: the slot is inside the ring or block, and free.
        unsafe {
            if self.is_chain(elem) {
                if self.base.get().is_null() || self.end.get() as usize == self.block_len() {
                    if self.spare.get().is_null() {
                        return false;
                    }
                    self.append_spare();
                }
                let i = self.end.get();
                elem.copy(from, self.slot_in(self.last.get(), i as usize));
                self.end.set(i + 1);
            } else {
                elem.copy(from, self.ring_slot(elem, self.wrap(self.at.get() + len)));
            }
        }
        self.set_len(len + 1);
        true
    }

    /// Moves the first value to `to`; there is one.
    ///
    /// # Safety
    /// The lock is held; `elem` is this channel's; `to` has room.
    #[inline]
    pub(super) unsafe fn pop<E: Elem>(&self, elem: E, to: *mut u8) {
        let len = self.len();
        debug_assert!(len > 0);
        let at = self.at.get();
        // SAFETY: the slot is inside the ring or block, and holds a value.
        unsafe {
            if self.is_chain(elem) {
                elem.copy(self.slot_in(self.base.get().cast(), at), to);
                self.at.set(at + 1);
                if len == 1 {
                    // The only block (others would hold something): begin it again.
                    self.at.set(0);
                    self.end.set(0);
                } else if at + 1 == self.block_len() {
                    self.drop_first_block();
                }
            } else {
                elem.copy(self.ring_slot(elem, at), to);
                self.at.set(self.wrap(at + 1));
            }
        }
        self.set_len(len - 1);
    }

    /// Moves the first value to `to` and appends the one at `from`, in a full ring: it takes the
    /// first one's place. Outside nobody sees the ring less than full (invariant 2).
    ///
    /// # Safety
    /// As for `push` and `pop`; the ring is full.
    #[inline]
    pub(super) unsafe fn rotate<E: Elem>(&self, elem: E, from: *const u8, to: *mut u8) {
        debug_assert!(self.len() == self.cap);
        let at = self.at.get();
        // SAFETY: the slot is inside the ring and holds a value.
        unsafe {
            let slot = self.ring_slot(elem, at);
            elem.copy(slot, to);
            elem.copy(from, slot);
        }
        self.at.set(self.wrap(at + 1));
    }

    #[inline]
    unsafe fn ring_slot<E: Elem>(&self, elem: E, i: usize) -> *mut u8 {
        if elem.size() == 0 {
            // Any aligned address will do.
            return std::ptr::without_provenance_mut(self.elem_align as usize);
        }
        debug_assert!(i < self.cap);
        // SAFETY: below the capacity, so inside the ring.
        unsafe { self.base.get().add(i * elem.size()) }
    }

    #[inline]
    fn block_len(&self) -> usize {
        (BLOCK_BYTES / self.elem_size.max(1)).clamp(1, BLOCK_MAX)
    }

    /// Layout of a block, and where its elements begin.
    fn block_layout(&self) -> (Layout, usize) {
        let elements = self.elem_size * self.block_len();
        let elements = Layout::from_size_align(elements, self.elem_align as usize);
        match elements.and_then(|elements| Layout::new::<Block>().extend(elements)) {
            Ok(layout) => layout,
            Err(_) => panic!("elements of {} bytes are too large", self.elem_size),
        }
    }

    #[inline]
    unsafe fn slot_in(&self, block: *mut Block, i: usize) -> *mut u8 {
        debug_assert!(i < self.block_len());
        let first = size_of::<Block>().next_multiple_of(self.elem_align as usize);
        // SAFETY: inside the block, by its layout.
        unsafe { block.cast::<u8>().add(first + i * self.elem_size) }
    }

    /// The spare block becomes the last one.
    unsafe fn append_spare(&self) {
        let block = self.spare.replace(null_mut());
        if self.base.get().is_null() {
            self.base.set(block.cast());
            self.at.set(0);
        } else {
            // SAFETY: the chain's last block.
            unsafe { (*self.last.get()).next.set(block) };
        }
        self.last.set(block);
        self.end.set(0);
    }

    /// The first block is used up and another follows: it becomes the spare one, or is discarded.
    unsafe fn drop_first_block(&self) {
        let block: *mut Block = self.base.get().cast();
        // SAFETY: the chain's first block.
        let block_ref = unsafe { &*block };
        self.base.set(block_ref.next.replace(null_mut()).cast());
        self.at.set(0);
        if self.spare.get().is_null() {
            self.spare.set(block);
        } else {
            block_ref.next.set(self.discarded.load(Ordering::Relaxed));
            self.discarded.store(block, Ordering::Relaxed);
        }
    }

    /// Outside the lock: a block for [`Buffer::lend`].
    pub(super) fn allocate(&self) -> Lent {
        let layout = self.block_layout().0;
        // SAFETY: the size is not zero: it has at least the header.
        let block: *mut Block = unsafe { std::alloc::alloc(layout) }.cast();
        if block.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: fresh, and large enough.
        unsafe { block.write(Block { next: Cell::new(null_mut()) }) };
        Lent { block, layout }
    }

    /// Under the lock: keeps `lent` for the next push that needs it, if there is none in reserve.
    pub(super) fn lend(&self, lent: &mut Lent) {
        if self.spare.get().is_null() {
            self.spare.set(std::mem::replace(&mut lent.block, null_mut()));
        }
    }

    /// Without the lock: are there blocks to be freed?
    #[inline]
    pub(super) fn has_discarded(&self) -> bool {
        !self.discarded.load(Ordering::Relaxed).is_null()
    }

    /// Under the lock: takes them out, to be dropped outside.
    pub(super) fn take_discarded(&self) -> Lent {
        let block = self.discarded.swap(null_mut(), Ordering::Relaxed);
        Lent { block, layout: self.block_layout().0 }
    }

    /// Under the lock: takes everything out, to be dropped outside, and leaves the buffer empty.
    pub(super) fn take_all(&self) -> Contents {
        let contents = Contents { len: self.len(), at: self.at.replace(0), base: self.base.get() };
        if self.cap == UNBOUNDED && self.elem_size != 0 {
            self.base.set(null_mut());
            self.last.set(null_mut());
            self.end.set(0);
        }
        self.set_len(0);
        contents
    }

    /// The next of `contents`, which was taken from this buffer; None at the end. A chain's blocks
    /// are freed on the way.
    ///
    /// # Safety
    /// Nobody pushes to this buffer any more (a ring's contents still lie in it), and T is its
    /// type.
    pub(super) unsafe fn next_of<T>(&self, contents: &mut Contents) -> Option<T> {
        let chain = self.is_chain(Of::<T>::ELEM);
        if contents.len == 0 {
            if chain && !contents.base.is_null() {
                let block = std::mem::replace(&mut contents.base, null_mut()).cast();
                drop(Lent { block, layout: self.block_layout().0 });
            }
            return None;
        }
        let at = contents.at;
        contents.len -= 1;
        // SAFETY: as in `pop`; the contents are the caller's alone.
        unsafe {
            if !chain {
                contents.at = self.wrap(at + 1);
                return Some(self.ring_slot(Of::<T>::ELEM, at).cast::<T>().read());
            }
            let block: *mut Block = contents.base.cast();
            let value = self.slot_in(block, at).cast::<T>().read();
            contents.at = at + 1;
            if contents.at == self.block_len() && contents.len > 0 {
                contents.at = 0;
                contents.base = (*block).next.replace(null_mut()).cast();
                drop(Lent { block, layout: self.block_layout().0 });
            }
            Some(value)
        }
    }
}

impl Drop for Buffer {
    /// The values are gone already (`take_all`); this is the memory of a chain. A ring's is the channel's.
    fn drop(&mut self) {
        let base = self.base.get();
        if self.cap != UNBOUNDED {
            return;
        }
        let layout = self.block_layout().0;
        for block in [base.cast(), self.spare.get(), self.discarded.load(Ordering::Relaxed)] {
            drop(Lent { block, layout });
        }
    }
}

/// The layout of a ring: nothing for channels without one.
pub(super) fn ring_layout(cap: usize, elem_size: usize, elem_align: usize) -> Layout {
    let cap = if cap == UNBOUNDED { 0 } else { cap };
    let layout = cap.checked_mul(elem_size).map(|size| Layout::from_size_align(size, elem_align));
    match layout {
        Some(Ok(layout)) => layout,
        _ => panic!("a channel of {cap} elements does not fit into memory"),
    }
}

/// Blocks outside of any channel: freed when dropped.
pub(super) struct Lent {
    block: *mut Block,
    layout: Layout,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut block = self.block;
        while !block.is_null() {
            // SAFETY: made by `allocate` with this layout, and in nobody else's hands.
            unsafe {
                let next = (*block).next.get();
                std::alloc::dealloc(block.cast(), self.layout);
                block = next;
            }
        }
    }
}

/// What [`Buffer::take_all`] took.
pub(super) struct Contents {
    len: usize,
    at: usize,
    base: *mut u8,
}
