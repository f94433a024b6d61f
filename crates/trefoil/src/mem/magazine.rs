//! Magazines: free blocks of an allocator, by size class, in front of that allocator.
//!
//! An M has them, not a goroutine (Go keeps them per P, as its mcache). A goroutine that allocates takes a block from
//! the M that runs it, while it cannot be preempted: no atomics, no lock, and nothing of the allocator's is left in the
//! goroutine's thread-local storage. Blocks come from the allocator, and go back to it, in batches.
//!
//! ```text
//!   class:     0   1   2   …   39            bytes: 16, 32, … 128, 160, 192, 224, 256, 320, … 32,768
//!   head  ──▶ [block] ─▶ [block] ─▶ null     the first word of a free block points to the next one
//! ```
//!
//! Invariants:
//! 1. A block in class `c` has at least `Class::bytes(c)` usable bytes (what counts as usable is the owner's choice, see
//!    `interpose/malloc.rs`) and is aligned to [`ALIGN`].
//! 2. Blocks of one set of magazines come from one allocator, and go back to that one.
//! 3. A set is touched by the thread of its M alone, while that thread is inside the runtime.
//!
//! A class begins with [`FIRST_CAPACITY`] blocks and doubles at each refill, up to [`MAX_CLASS_BYTES`]: a program that
//! allocates little keeps little. The classes are those of jemalloc and are near those of mimalloc and tcmalloc, so
//! rounding up to them wastes nothing there.
//!
//! Rejected: magazines of the P (a goroutine whose P was retaken allocates as well); calling the allocator each time
//! under the M's thread pointer (44 ns per pair of calls instead of 14).

use std::alloc::Layout;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// How many size classes there are.
pub(crate) const CLASSES: usize = 40;
/// The largest block that magazines keep.
pub(crate) const MAX_BYTES: usize = 32 << 10;
/// The alignment of every block.
pub(crate) const ALIGN: usize = 16;
/// Blocks that a class keeps at first, and at most, and the bytes that it keeps at most.
const FIRST_CAPACITY: u32 = 8;
const MAX_CAPACITY: u32 = 128;
const MAX_CLASS_BYTES: usize = 64 << 10;
/// Classes up to this size are 16 bytes apart, beyond it four per doubling.
const LINEAR_BYTES: usize = 128;

/// A size class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Class(u8);

impl Class {
    /// The smallest class whose blocks have `bytes` bytes. None: too large.
    #[inline(always)]
    pub(crate) fn fitting(bytes: usize) -> Option<Class> {
        if bytes <= LINEAR_BYTES {
            return Some(Class((bytes.saturating_sub(1) >> 4) as u8));
        }
        if bytes > MAX_BYTES {
            return None;
        }
        // The power of two below, and which quarter of the way to the next one.
        let exponent = (bytes - 1).ilog2();
        let quarter = ((bytes - 1) >> (exponent - 2)) & 3;
        Some(Class((8 + (exponent as usize - 7) * 4 + quarter) as u8))
    }

    /// The largest class for which a block of `bytes` bytes is large enough. None: too small, or too large.
    #[cfg_attr(not(feature = "std"), allow(dead_code))]
    #[inline(always)]
    pub(crate) fn filled_by(bytes: usize) -> Option<Class> {
        if !(ALIGN..=MAX_BYTES).contains(&bytes) {
            return None;
        }
        let up = Class::fitting(bytes)?;
        Some(if up.bytes() > bytes { Class(up.0 - 1) } else { up })
    }

    /// The class for a layout. None: larger than magazines keep, or of a special alignment.
    #[inline(always)]
    pub(crate) fn of(layout: Layout) -> Option<Class> {
        if layout.align() > ALIGN { None } else { Class::fitting(layout.size()) }
    }

    /// Bytes of its blocks.
    #[inline(always)]
    pub(crate) const fn bytes(self) -> usize {
        let i = self.0 as usize;
        if i < 8 {
            return (i + 1) << 4;
        }
        let (doubling, quarter) = ((i - 8) / 4, (i - 8) % 4);
        (5 + quarter) << (5 + doubling)
    }

    /// What the allocator is asked for.
    #[inline(always)]
    pub(crate) fn layout(self) -> Layout {
        // SAFETY: the alignment is a power of two, and the size is at most `MAX_BYTES`.
        unsafe { Layout::from_size_align_unchecked(self.bytes(), ALIGN) }
    }

    fn max_capacity(self) -> u32 {
        ((MAX_CLASS_BYTES / self.bytes()) as u32).clamp(2, MAX_CAPACITY)
    }

    /// All of them.
    fn all() -> impl Iterator<Item = Class> {
        (0..CLASSES as u8).map(Class)
    }
}

/// Whose blocks a set of magazines keeps.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlocksOf {
    /// libc's malloc (`interpose/malloc.rs`).
    #[cfg_attr(not(feature = "std"), allow(dead_code))]
    Libc = 0,
    /// The program's global allocator (`alloc.rs`).
    Wrapped = 1,
}

/// Gives a free block of a class back to its allocator.
pub(crate) type GiveBack = unsafe fn(block: *mut u8, class: Class);

/// The allocators behind the two sets, each named by the function that gives a block back to it; null until there is
/// one. Once set, it stays (invariant 2).
static OWNERS: [AtomicPtr<()>; 2] = [const { AtomicPtr::new(null_mut()) }; 2];

/// Whether `give_back` belongs to the allocator whose blocks this set keeps. The first one that asks gets the set.
#[inline(always)]
pub(crate) fn owns(of: BlocksOf, give_back: GiveBack) -> bool {
    let key = give_back as *mut ();
    // Relaxed: nothing but code is reached through the word.
    OWNERS[of as usize].load(Ordering::Relaxed) == key || claim_slow(of, key)
}

#[cold]
fn claim_slow(of: BlocksOf, key: *mut ()) -> bool {
    let (relaxed, owner) = (Ordering::Relaxed, &OWNERS[of as usize]);
    owner.compare_exchange(null_mut(), key, relaxed, relaxed).is_ok()
}

/// Free blocks of one class.
#[derive(Clone, Copy)]
struct Magazine {
    head: *mut u8,
    len: u32,
    capacity: u32,
}

/// One set: a magazine for every class.
pub(crate) struct Magazines([Magazine; CLASSES]);

/// A chain of free blocks, linked through their first words.
#[must_use = "blocks that are in no magazine belong to nobody"]
pub(crate) struct Chain {
    head: *mut u8,
    len: u32,
}

impl Chain {
    pub(crate) const EMPTY: Chain = Chain { head: null_mut(), len: 0 };

    /// # Safety
    /// The block is the caller's, free, and has room for a pointer.
    #[inline(always)]
    pub(crate) unsafe fn push(&mut self, block: *mut u8) {
        // SAFETY: the caller's. Blocks are aligned to `ALIGN`.
        unsafe { block.cast::<*mut u8>().write(self.head) };
        self.head = block;
        self.len += 1;
    }

    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Option<*mut u8> {
        if self.head.is_null() {
            return None;
        }
        let block = self.head;
        // SAFETY: a free block of the chain holds the next one in its first word.
        self.head = unsafe { block.cast::<*mut u8>().read() };
        self.len -= 1;
        Some(block)
    }
}

impl Magazines {
    pub(crate) const fn new() -> Self {
        Magazines([Magazine { head: null_mut(), len: 0, capacity: FIRST_CAPACITY }; CLASSES])
    }

    /// A block of the class. None: the magazine is empty; see [`Magazines::refill_size`].
    #[inline(always)]
    pub(crate) fn pop(&mut self, class: Class) -> Option<*mut u8> {
        let magazine = &mut self.0[class.0 as usize];
        if magazine.head.is_null() {
            return None;
        }
        let block = magazine.head;
        // SAFETY: a free block in a magazine holds the next one in its first word.
        magazine.head = unsafe { block.cast::<*mut u8>().read() };
        magazine.len -= 1;
        Some(block)
    }

    /// Keeps a free block. False: the magazine was full; see [`Magazines::take_surplus`].
    ///
    /// # Safety
    /// The block is the caller's, free, and one of this class and allocator (invariants 1 and 2).
    #[inline(always)]
    #[must_use]
    pub(crate) unsafe fn push(&mut self, class: Class, block: *mut u8) -> bool {
        let magazine = &mut self.0[class.0 as usize];
        if magazine.head == block {
            freed_twice(block);
        }
        // SAFETY: the caller's.
        unsafe { block.cast::<*mut u8>().write(magazine.head) };
        magazine.head = block;
        magazine.len += 1;
        magazine.len <= magazine.capacity
    }

    /// How many blocks to fetch for an empty magazine: half of what it keeps, which grows.
    #[cold]
    pub(crate) fn refill_size(&mut self, class: Class) -> u32 {
        let magazine = &mut self.0[class.0 as usize];
        let size = (magazine.capacity / 2).max(1);
        magazine.capacity = (magazine.capacity * 2).min(class.max_capacity());
        size
    }

    /// Adds blocks that were fetched for an empty magazine.
    pub(crate) fn add(&mut self, class: Class, mut chain: Chain) {
        let magazine = &mut self.0[class.0 as usize];
        if magazine.head.is_null() {
            (magazine.head, magazine.len) = (chain.head, chain.len);
            return;
        }
        while let Some(block) = chain.pop() {
            // SAFETY: a block of the chain is free and of the class (the caller fetched it for it).
            unsafe { block.cast::<*mut u8>().write(magazine.head) };
            magazine.head = block;
            magazine.len += 1;
        }
    }

    /// Of a magazine that is over its capacity: the half that was freed longest ago, to go back to the allocator. (The
    /// most recently freed blocks are in the CPU's cache.)
    #[cold]
    pub(crate) fn take_surplus(&mut self, class: Class) -> Chain {
        let magazine = &mut self.0[class.0 as usize];
        let keep = magazine.len.div_ceil(2);
        let mut last = magazine.head;
        for _ in 1..keep {
            // SAFETY: the magazine has `len` blocks, and `keep` is at most that.
            last = unsafe { last.cast::<*mut u8>().read() };
        }
        if last.is_null() {
            return Chain::EMPTY;
        }
        // SAFETY: as above.
        let rest = unsafe { last.cast::<*mut u8>().replace(null_mut()) };
        let len = magazine.len - keep;
        magazine.len = keep;
        Chain { head: rest, len }
    }

    /// Gives everything back to the allocator: the thread ends.
    pub(crate) fn drain(&mut self, of: BlocksOf) {
        let owner = OWNERS[of as usize].load(Ordering::Relaxed);
        if owner.is_null() {
            return; // nobody has put a block in
        }
        // SAFETY: only `owns` stores there, and only such functions.
        let give_back = unsafe { std::mem::transmute::<*mut (), GiveBack>(owner) };
        for class in Class::all() {
            let magazine = &mut self.0[class.0 as usize];
            let mut chain = Chain { head: magazine.head, len: magazine.len };
            *magazine = Magazine { head: null_mut(), len: 0, capacity: FIRST_CAPACITY };
            while let Some(block) = chain.pop() {
                // SAFETY: a free block of that class and allocator (invariants 1 and 2).
                unsafe { give_back(block, class) };
            }
        }
    }
}

#[cold]
fn freed_twice(block: *mut u8) -> ! {
    crate::sys::fatal(format_args!("double free of the block at {block:p}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_grow_and_fit_every_size() {
        let bytes: Vec<_> = Class::all().map(Class::bytes).collect();
        assert!(bytes.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!((bytes[0], bytes[7], bytes[8], bytes[39]), (16, 128, 160, MAX_BYTES));
        for size in 0..=MAX_BYTES {
            let class = Class::fitting(size).unwrap();
            assert!(class.bytes() >= size, "{size} does not fit its class of {}", class.bytes());
            assert!(
                class.0 == 0 || Class(class.0 - 1).bytes() < size,
                "{size} fits a smaller class"
            );
            let filled = Class::filled_by(size);
            assert_eq!(filled.is_some(), size >= ALIGN);
            if let Some(filled) = filled {
                assert!(filled.bytes() <= size);
                assert!(filled.0 as usize == CLASSES - 1 || Class(filled.0 + 1).bytes() > size);
            }
        }
        assert!(Class::fitting(MAX_BYTES + 1).is_none());
        assert!(Class::of(Layout::from_size_align(8, 32).unwrap()).is_none());
    }

    #[test]
    fn surplus_is_what_was_freed_first() {
        let mut blocks = [[0u128; 2]; 20];
        let class = Class::fitting(32).unwrap();
        let mut magazines = Magazines::new();
        assert_eq!(magazines.refill_size(class), FIRST_CAPACITY / 2);
        let all: Vec<*mut u8> = blocks.iter_mut().map(|b| b.as_mut_ptr().cast()).collect();
        let mut full = 0;
        for &block in &all[..17] {
            // SAFETY: memory of this test's own.
            full += u32::from(!unsafe { magazines.push(class, block) });
        }
        assert_eq!(full, 1, "the capacity has doubled to 16");
        let mut surplus = magazines.take_surplus(class);
        let mut given: Vec<_> = std::iter::from_fn(|| surplus.pop()).collect();
        given.reverse();
        assert_eq!(given, all[..8]);
        let kept: Vec<_> = std::iter::from_fn(|| magazines.pop(class)).collect();
        assert_eq!(kept, all[8..17].iter().rev().copied().collect::<Vec<_>>());
    }
}
