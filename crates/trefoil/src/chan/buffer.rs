//! The values in a channel: a ring of fixed size, or a chain of blocks that grows.
//!
//! The buffer does not know the type of its elements, only their size; an [`Elem`] moves them. The
//! operations of a channel know the type (one move instruction for a small one). A select does not:
//! it handles channels of different types in one loop.
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
//! 2. A read of `len` without the lock is reliable: `len` never has a wrong value in between.
//! 3. Nothing here allocates or frees under the lock: [`Buffer::add_spare`] brings blocks in and
//!    [`Buffer::take_discarded`] takes them out, and their memory is allocated and freed outside
//!    (sched/mod.rs, rule 2).
//! 4. Elements of size zero need no memory: their buffer is a ring without memory, even if it is
//!    unbounded.
//! 5. A ring may hold *extra* elements, which are given back by receives that were cancelled
//!    ([`Buffer::push_front`]). They are in blocks of one element each, in the list `spare`, and
//!    come before those in the ring. While there are any, the ring is full, and `len` is more than
//!    `cap`.
//!
//! Rejected: for unbounded channels, a ring that doubles. It moves all elements under the lock:
//! with a million elements no goroutine could send for a millisecond.

use super::cells::{AtomicPtr, AtomicUsize, Cell, Ordering};
use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::null_mut;

/// Capacity of an unbounded channel.
pub(super) const UNBOUNDED: usize = usize::MAX;
/// Approximate number of bytes of elements in a block.
const BLOCK_BYTES: usize = 2048;
/// Largest number of elements in a block.
const BLOCK_MAX: usize = 64;

/// Moves elements of one size.
pub(super) trait Elem: Copy {
    fn size(self) -> usize;
    /// # Safety
    /// `from` is a value of the channel's type, and `to` has room for one. The value at `from` is
    /// not used again.
    unsafe fn copy(self, from: *const u8, to: *mut u8);
}

/// Elements of a known type.
pub(super) struct TypedElem<T>(PhantomData<T>);

impl<T> TypedElem<T> {
    pub(super) const ELEM: TypedElem<T> = TypedElem(PhantomData);
}

impl<T> Clone for TypedElem<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for TypedElem<T> {}

impl<T> Elem for TypedElem<T> {
    #[inline(always)]
    fn size(self) -> usize {
        size_of::<T>()
    }
    #[inline(always)]
    unsafe fn copy(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's guarantee; both are aligned for T, as all slots of the channel are.
        unsafe { to.cast::<T>().copy_from_nonoverlapping(from.cast::<T>(), 1) };
    }
}

/// Elements of a known size.
#[derive(Clone, Copy)]
pub(super) struct UntypedElem(pub(super) usize);

impl Elem for UntypedElem {
    #[inline(always)]
    fn size(self) -> usize {
        self.0
    }
    #[inline(always)]
    unsafe fn copy(self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller's guarantee. A word is the usual size, and worth the branch.
        unsafe {
            if self.0 == 8 {
                to.copy_from_nonoverlapping(from, 8);
            } else {
                to.copy_from_nonoverlapping(from, self.0);
            }
        }
    }
}

/// The first word of a block; the elements follow.
struct BlockHeader {
    next: Cell<*mut BlockHeader>,
}

/// See the head of the file. The lock of its channel guards it.
#[repr(C)]
pub(super) struct Buffer {
    len: AtomicUsize,
    cap: usize,
    /// Index of the first element, in the ring or in the first block.
    at: Cell<usize>,
    /// The ring, or the first block; null if there is none.
    base: Cell<*mut u8>,
    elem_size: u32,
    /// The power of two of the elements' alignment.
    elem_align_log2: u8,
    /// In a chain: index after the last element in the last block.
    end: Cell<u8>,
    /// In a chain: the last block.
    last: Cell<*mut BlockHeader>,
    /// In a chain: a block in reserve. In a ring: the extra elements (invariant 5).
    spare: Cell<*mut BlockHeader>,
    /// Blocks that are used up and must be freed.
    discarded: AtomicPtr<BlockHeader>,
}

const _: () = assert!(BLOCK_MAX <= u8::MAX as usize, "`end` must hold the length of a block");

impl Buffer {
    /// Creates an empty buffer for `cap` elements, each of the layout `elem` and below 4 GiB. `ring`
    /// is the memory of its ring ([`ring_layout`]), which it does not own.
    pub(super) fn new(cap: usize, elem: Layout, ring: *mut u8) -> Buffer {
        debug_assert!(u32::try_from(elem.size()).is_ok(), "`elem_size` must hold the size");
        Buffer {
            len: AtomicUsize::new(0),
            cap,
            at: Cell::new(0),
            base: Cell::new(if cap == UNBOUNDED { null_mut() } else { ring }),
            end: Cell::new(0),
            last: Cell::new(null_mut()),
            spare: Cell::new(null_mut()),
            discarded: AtomicPtr::new(null_mut()),
            elem_size: elem.size() as u32,
            elem_align_log2: elem.align().trailing_zeros() as u8,
        }
    }

    /// Returns the layout of its ring.
    pub(super) fn ring_layout(&self) -> Layout {
        ring_layout(self.cap, self.elem_size(), self.elem_align())
    }

    #[inline]
    fn elem_size(&self) -> usize {
        self.elem_size as usize
    }

    #[inline]
    fn elem_align(&self) -> usize {
        1 << self.elem_align_log2
    }

    #[inline]
    pub(super) fn elem(&self) -> UntypedElem {
        UntypedElem(self.elem_size())
    }

    #[inline]
    pub(super) fn cap(&self) -> usize {
        self.cap
    }

    /// Returns the number of elements. Acquire: what a thread without the lock reads next is not
    /// older than this.
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

    /// Returns the index in the ring for `i`, which is below twice the capacity.
    #[inline]
    fn wrap(&self, i: usize) -> usize {
        if i >= self.cap { i - self.cap } else { i }
    }

    /// Appends the value at `from`; `len` is below `cap`. Returns false if the chain needs a block
    /// first.
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
                    // This is the only block, because others would contain elements: reuse it.
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

    /// Puts the value at `from` before all others, also if the ring is full. Returns false if it
    /// needs a block first, and `block` has none.
    ///
    /// # Safety
    /// The lock is held; `elem` is this channel's; `from` is a value, which moves if the result is
    /// true.
    pub(super) unsafe fn push_front<E: Elem>(
        &self,
        elem: E,
        from: *const u8,
        block: &mut Blocks,
    ) -> bool {
        let (len, at) = (self.len(), self.at.get());
        // SAFETY: the slot is inside the ring or block, and free.
        unsafe {
            if elem.size() == 0 {
                // Only the number of elements counts.
            } else if self.cap == UNBOUNDED {
                if len == 0 {
                    self.add_spare(block);
                    return self.push(elem, from);
                }
                let at = match at {
                    0 if block.first.is_null() => return false,
                    0 => {
                        let first = block.take();
                        (*first).next.set(self.base.get().cast());
                        self.base.set(first.cast());
                        self.block_len() - 1
                    }
                    at => at - 1,
                };
                elem.copy(from, self.slot_in(self.base.get().cast(), at));
                self.at.set(at);
            } else if len < self.cap {
                let at = if at == 0 { self.cap - 1 } else { at - 1 };
                elem.copy(from, self.ring_slot(elem, at));
                self.at.set(at);
            } else {
                if block.first.is_null() {
                    return false;
                }
                let first = block.take();
                (*first).next.set(self.spare.get());
                elem.copy(from, self.slot_in(first, 0));
                self.spare.set(first);
            }
        }
        self.set_len(len + 1);
        true
    }

    /// Moves the first value to `to`; `len` is more than `cap` (invariant 5).
    ///
    /// # Safety
    /// As for `pop`.
    #[cold]
    pub(super) unsafe fn pop_extra<E: Elem>(&self, elem: E, to: *mut u8) {
        debug_assert!(self.len() > self.cap);
        if elem.size() == 0 {
            // SAFETY: the caller's guarantee.
            return unsafe { self.pop(elem, to) };
        }
        let block = self.spare.get();
        // SAFETY: the first block of the list of extra elements; it holds one.
        unsafe {
            elem.copy(self.slot_in(block, 0), to);
            self.spare.set((*block).next.get());
            self.discard(block);
        }
        self.set_len(self.len() - 1);
    }

    /// Moves the first value of a full ring to `to`, and puts the value at `from` into its place,
    /// as the last one. A thread without the lock never sees the ring less than full (invariant 2).
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
            // Any aligned address is valid.
            return std::ptr::without_provenance_mut(self.elem_align());
        }
        debug_assert!(i < self.cap);
        // SAFETY: below the capacity, so inside the ring.
        unsafe { self.base.get().add(i * elem.size()) }
    }

    #[inline]
    fn block_len(&self) -> usize {
        (BLOCK_BYTES / self.elem_size().max(1)).clamp(1, BLOCK_MAX)
    }

    /// Returns the layout of a block, and the offset of its elements.
    fn block_layout(&self) -> (Layout, usize) {
        let elements = self.elem_size() * self.block_len();
        let elements = Layout::from_size_align(elements, self.elem_align());
        match elements.and_then(|elements| Layout::new::<BlockHeader>().extend(elements)) {
            Ok(layout) => layout,
            Err(_) => panic!("elements of {} bytes are too large", self.elem_size()),
        }
    }

    #[inline]
    unsafe fn slot_in(&self, block: *mut BlockHeader, i: usize) -> *mut u8 {
        debug_assert!(i < self.block_len());
        let first = size_of::<BlockHeader>().next_multiple_of(self.elem_align());
        // SAFETY: inside the block, by its layout.
        unsafe { block.cast::<u8>().add(first + i * self.elem_size()) }
    }

    /// Makes the spare block the last one of the chain.
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

    /// Removes the first block, which is used up and has a successor: it becomes the spare one, or
    /// is discarded.
    unsafe fn drop_first_block(&self) {
        let block: *mut BlockHeader = self.base.get().cast();
        // SAFETY: the chain's first block.
        let block_ref = unsafe { &*block };
        self.base.set(block_ref.next.replace(null_mut()).cast());
        self.at.set(0);
        if self.spare.get().is_null() {
            self.spare.set(block);
        } else {
            self.discard(block);
        }
    }

    /// Puts a block into the list of blocks to free.
    fn discard(&self, block: *mut BlockHeader) {
        // SAFETY: the block belongs to this buffer, whose lock is held.
        unsafe { (*block).next.set(self.discarded.load(Ordering::Relaxed)) };
        self.discarded.store(block, Ordering::Relaxed);
    }

    /// Allocates a block for [`Buffer::add_spare`]. Called without the lock.
    pub(super) fn allocate(&self) -> Blocks {
        let layout = self.block_layout().0;
        // SAFETY: the size is not zero, because of the header.
        let block: *mut BlockHeader = unsafe { std::alloc::alloc(layout) }.cast();
        if block.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: newly allocated, and large enough.
        unsafe { block.write(BlockHeader { next: Cell::new(null_mut()) }) };
        Blocks { first: block, layout }
    }

    /// Keeps `block` for the next push that needs one, unless there is a spare block already.
    /// Called under the lock.
    pub(super) fn add_spare(&self, block: &mut Blocks) {
        if self.spare.get().is_null() {
            self.spare.set(std::mem::replace(&mut block.first, null_mut()));
        }
    }

    /// Returns, without the lock, whether there are blocks to free.
    #[inline]
    pub(super) fn has_discarded(&self) -> bool {
        !self.discarded.load(Ordering::Relaxed).is_null()
    }

    /// Takes out the used-up blocks. Called under the lock; the caller drops them outside.
    pub(super) fn take_discarded(&self) -> Blocks {
        let first = self.discarded.swap(null_mut(), Ordering::Relaxed);
        Blocks { first, layout: self.block_layout().0 }
    }

    /// Takes out all elements, and leaves the buffer empty. Called under the lock; the caller drops
    /// the elements outside.
    pub(super) fn take_all(&self) -> Contents {
        let is_ring = self.cap != UNBOUNDED;
        let extra = if is_ring { self.spare.replace(null_mut()) } else { null_mut() };
        let (len, at, base) = (self.len(), self.at.replace(0), self.base.get());
        let contents = Contents { len, at, base, extra };
        if self.cap == UNBOUNDED && self.elem_size() != 0 {
            self.base.set(null_mut());
            self.last.set(null_mut());
            self.end.set(0);
        }
        self.set_len(0);
        contents
    }

    /// Moves the next element of `contents`, which was taken from this buffer, to `to`. Returns
    /// false at the end. Frees the blocks of a chain that it has used up.
    ///
    /// # Safety
    /// No thread pushes to this buffer any more (the contents of a ring are still in it); `to` has
    /// room for an element.
    pub(super) unsafe fn pop_of(&self, contents: &mut Contents, to: *mut u8) -> bool {
        let elem = self.elem();
        let chain = self.is_chain(elem);
        if contents.len == 0 {
            if chain && !contents.base.is_null() {
                let first = std::mem::replace(&mut contents.base, null_mut()).cast();
                drop(Blocks { first, layout: self.block_layout().0 });
            }
            return false;
        }
        let at = contents.at;
        contents.len -= 1;
        // SAFETY: as in `pop`; the contents belong to the caller alone.
        unsafe {
            if !contents.extra.is_null() {
                let block = contents.extra;
                contents.extra = (*block).next.replace(null_mut());
                elem.copy(self.slot_in(block, 0), to);
                drop(Blocks { first: block, layout: self.block_layout().0 });
                return true;
            }
            if !chain {
                contents.at = self.wrap(at + 1);
                elem.copy(self.ring_slot(elem, at), to);
                return true;
            }
            let block: *mut BlockHeader = contents.base.cast();
            elem.copy(self.slot_in(block, at), to);
            contents.at = at + 1;
            if contents.at == self.block_len() && contents.len > 0 {
                contents.at = 0;
                contents.base = (*block).next.replace(null_mut()).cast();
                drop(Blocks { first: block, layout: self.block_layout().0 });
            }
        }
        true
    }
}

impl Drop for Buffer {
    /// Frees the memory of a chain. The values are gone already (`take_all`), and the memory of a
    /// ring belongs to the channel.
    fn drop(&mut self) {
        let base: *mut BlockHeader =
            if self.cap == UNBOUNDED { self.base.get().cast() } else { null_mut() };
        let discarded = self.discarded.load(Ordering::Relaxed);
        if base.is_null() && self.spare.get().is_null() && discarded.is_null() {
            return;
        }
        let layout = self.block_layout().0;
        for first in [base, self.spare.get(), discarded] {
            drop(Blocks { first, layout });
        }
    }
}

/// Returns the layout of a ring. Its size is 0 for a channel without one.
pub(super) fn ring_layout(cap: usize, elem_size: usize, elem_align: usize) -> Layout {
    let cap = if cap == UNBOUNDED { 0 } else { cap };
    let layout = cap.checked_mul(elem_size).map(|size| Layout::from_size_align(size, elem_align));
    match layout {
        Some(Ok(layout)) => layout,
        _ => panic!("a channel of {cap} elements does not fit into memory"),
    }
}

/// Blocks that belong to no channel.
///
/// # Drop
/// Frees them.
pub(super) struct Blocks {
    first: *mut BlockHeader,
    layout: Layout,
}

impl Blocks {
    /// Returns an empty list.
    pub(super) fn none() -> Blocks {
        Blocks { first: null_mut(), layout: Layout::new::<BlockHeader>() }
    }

    /// Takes out the only block.
    fn take(&mut self) -> *mut BlockHeader {
        std::mem::replace(&mut self.first, null_mut())
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        let mut block = self.first;
        while !block.is_null() {
            // SAFETY: `allocate` made it with this layout, and no channel contains it any more.
            unsafe {
                let next = (*block).next.get();
                std::alloc::dealloc(block.cast(), self.layout);
                block = next;
            }
        }
    }
}

/// The elements that [`Buffer::take_all`] took out.
pub(super) struct Contents {
    len: usize,
    at: usize,
    base: *mut u8,
    /// The extra elements of a ring (invariant 5).
    extra: *mut BlockHeader,
}
