//! Magazines: a cache of free blocks in front of an allocator, by size class.
//!
//! Magazines belong to an M, not to a goroutine (Go's mcache belongs to a P). A goroutine that
//! allocates takes a block from its M while it cannot be preempted: no atomics, no lock, and no
//! state of the allocator in the goroutine's thread-local storage. Blocks come from the allocator,
//! and return to it, in batches.
//!
//! ```text
//!   class:     0   1   2   …   39           bytes: 16, 32, … 128, 160, 192, 224, 256, 320, … 32768
//!   head  ──▶ [block] ─▶ [block] ─▶ null     the first word of a free block points to the next one
//! ```
//!
//! Invariants:
//! 1. A block in class `c` has at least `Class::bytes(c)` usable bytes (its allocator defines what
//!    is usable, see `interpose/malloc/`) and is aligned to [`ALIGN`].
//! 2. Blocks of one set of magazines come from one allocator, and return to that one.
//! 3. Only the thread of its M uses a set, while that thread is inside the runtime.
//!
//! The capacity of a class starts at `FIRST_CAPACITY` blocks and doubles at each refill, up to
//! `MAX_CLASS_BYTES`: a program that allocates little keeps little. The classes are those of
//! jemalloc and close to those of mimalloc and tcmalloc, so rounding up to them wastes nothing
//! there.
//!
//! Rejected: magazines per P (a goroutine whose P was retaken allocates too); calling the allocator
//! each time under the M's thread pointer (44 ns per pair of calls instead of 14).

use std::alloc::Layout;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The number of size classes.
pub const CLASSES: usize = 40;
/// The size of the largest class.
pub const MAX_BYTES: usize = 32 << 10;
/// The alignment of every block.
pub const ALIGN: usize = 16;
/// The initial and the maximum capacity of a class in blocks, and its maximum in bytes.
const FIRST_CAPACITY: u32 = 8;
const MAX_CAPACITY: u32 = 128;
const MAX_CLASS_BYTES: usize = 64 << 10;
/// Classes up to this size are 16 bytes apart. Beyond it there are four classes per doubling.
const LINEAR_BYTES: usize = 128;

/// A size class.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Class(u8);

impl Class {
    /// Returns the smallest class whose blocks have at least `bytes`; None if `bytes` is too large.
    #[inline(always)]
    pub fn fitting(bytes: usize) -> Option<Class> {
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

    /// Returns the largest class for which a block of `bytes` is large enough; None if `bytes` is
    /// too small or too large.
    #[cfg_attr(not(feature = "std"), allow(dead_code))]
    #[inline(always)]
    pub fn filled_by(bytes: usize) -> Option<Class> {
        if !(ALIGN..=MAX_BYTES).contains(&bytes) {
            return None;
        }
        let up = Class::fitting(bytes)?;
        Some(if up.bytes() > bytes { Class(up.0 - 1) } else { up })
    }

    /// Returns the class for a layout; None if its size or its alignment is too large.
    #[inline(always)]
    pub fn of(layout: Layout) -> Option<Class> {
        if layout.align() > ALIGN { None } else { Class::fitting(layout.size()) }
    }

    /// Returns the size of its blocks.
    #[inline(always)]
    pub const fn bytes(self) -> usize {
        let i = self.0 as usize;
        if i < 8 {
            return (i + 1) << 4;
        }
        let (doubling, quarter) = ((i - 8) / 4, (i - 8) % 4);
        (5 + quarter) << (5 + doubling)
    }

    /// Returns the layout that is requested from the allocator.
    #[inline(always)]
    pub fn layout(self) -> Layout {
        // SAFETY: the alignment is a power of two, and the size is at most `MAX_BYTES`.
        unsafe { Layout::from_size_align_unchecked(self.bytes(), ALIGN) }
    }

    fn max_capacity(self) -> u32 {
        ((MAX_CLASS_BYTES / self.bytes()) as u32).clamp(2, MAX_CAPACITY)
    }

    /// Returns all classes.
    fn all() -> impl Iterator<Item = Class> {
        (0..CLASSES as u8).map(Class)
    }
}

/// The allocator whose blocks a set of magazines keeps.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum BlocksOf {
    /// libc's malloc (`interpose/malloc/`).
    #[cfg_attr(not(feature = "std"), allow(dead_code))]
    Libc = 0,
    /// The program's global allocator (`alloc.rs`).
    Wrapped = 1,
}

/// Returns a free block of a class to its allocator.
pub type GiveBack = unsafe fn(block: *mut u8, class: Class);

/// The allocators of the two sets, identified by the function that returns a block to them; null
/// until there is one. Once set, it stays (invariant 2).
static OWNERS: [AtomicPtr<()>; 2] = [const { AtomicPtr::new(null_mut()) }; 2];

/// Returns whether `give_back` belongs to the allocator of this set. The first allocator that calls
/// this gets the set.
#[inline(always)]
pub fn owns(of: BlocksOf, give_back: GiveBack) -> bool {
    let key = give_back as *mut ();
    // Relaxed: the word leads only to code.
    OWNERS[of as usize].load(Ordering::Relaxed) == key || claim_slow(of, key)
}

/// Makes `key` the owner of the set, if the set has none. Returns whether this call did so.
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

/// A set: one magazine per class.
pub struct Magazines([Magazine; CLASSES]);

/// A chain of free blocks, linked through their first words.
#[must_use = "dropping a chain leaks its blocks"]
pub struct Chain {
    head: *mut u8,
    len: u32,
}

impl Chain {
    pub const EMPTY: Chain = Chain { head: null_mut(), len: 0 };

    /// Adds a block.
    ///
    /// # Safety
    /// The caller owns the block, which is free and has room for a pointer.
    #[inline(always)]
    pub unsafe fn push(&mut self, block: *mut u8) {
        // SAFETY: the caller's contract. Blocks are aligned to `ALIGN`.
        unsafe { block.cast::<*mut u8>().write(self.head) };
        self.head = block;
        self.len += 1;
    }

    #[inline(always)]
    pub fn pop(&mut self) -> Option<*mut u8> {
        if self.head.is_null() {
            return None;
        }
        let block = self.head;
        // SAFETY: the first word of a free block in the chain points to the next one.
        self.head = unsafe { block.cast::<*mut u8>().read() };
        self.len -= 1;
        Some(block)
    }
}

impl Magazines {
    #[inline]
    pub const fn new() -> Self {
        Magazines([Magazine { head: null_mut(), len: 0, capacity: FIRST_CAPACITY }; CLASSES])
    }

    /// Takes a block of the class. Returns None if the magazine is empty; see
    /// [`Magazines::refill_size`].
    #[inline(always)]
    pub fn pop(&mut self, class: Class) -> Option<*mut u8> {
        let magazine = &mut self.0[class.0 as usize];
        if magazine.head.is_null() {
            return None;
        }
        let block = magazine.head;
        // SAFETY: the first word of a free block in a magazine points to the next one.
        magazine.head = unsafe { block.cast::<*mut u8>().read() };
        magazine.len -= 1;
        Some(block)
    }

    /// Adds a free block. Returns false if the magazine is over its capacity; see
    /// [`Magazines::take_surplus`].
    ///
    /// # Safety
    /// The caller owns the block, which is free and of this class and allocator (invariants 1 and
    /// 2).
    #[inline(always)]
    #[must_use]
    pub unsafe fn push(&mut self, class: Class, block: *mut u8) -> bool {
        let magazine = &mut self.0[class.0 as usize];
        if magazine.head == block {
            freed_twice(block);
        }
        // SAFETY: the caller's contract.
        unsafe { block.cast::<*mut u8>().write(magazine.head) };
        magazine.head = block;
        magazine.len += 1;
        magazine.len <= magazine.capacity
    }

    /// Returns how many blocks to fetch for an empty magazine: half of its capacity, which doubles.
    #[cold]
    pub fn refill_size(&mut self, class: Class) -> u32 {
        let magazine = &mut self.0[class.0 as usize];
        let size = (magazine.capacity / 2).max(1);
        magazine.capacity = (magazine.capacity * 2).min(class.max_capacity());
        size
    }

    /// Adds blocks that were fetched for an empty magazine. If the magazine is not empty any more,
    /// they are added one by one.
    #[inline]
    pub fn add(&mut self, class: Class, mut chain: Chain) {
        let magazine = &mut self.0[class.0 as usize];
        if magazine.head.is_null() {
            (magazine.head, magazine.len) = (chain.head, chain.len);
            return;
        }
        while let Some(block) = chain.pop() {
            // SAFETY: a block of the chain is free and of this class.
            unsafe { block.cast::<*mut u8>().write(magazine.head) };
            magazine.head = block;
            magazine.len += 1;
        }
    }

    /// Takes out of a magazine over its capacity the half that was freed longest ago, to return it
    /// to the allocator. (The most recently freed blocks are in the CPU's cache.)
    #[cold]
    pub fn take_surplus(&mut self, class: Class) -> Chain {
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

    /// Returns all blocks to the allocator, when the thread ends.
    pub fn drain(&mut self, of: BlocksOf) {
        let owner = OWNERS[of as usize].load(Ordering::Relaxed);
        if owner.is_null() {
            return; // no block was ever added
        }
        // SAFETY: only `claim_slow` stores there, and only functions of this type.
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
    fn every_size_fits_its_class_and_no_smaller_one() {
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
    fn take_surplus_returns_the_blocks_that_were_freed_first() {
        let mut blocks = [[0u128; 2]; 20];
        let class = Class::fitting(32).unwrap();
        let mut magazines = Magazines::new();
        assert_eq!(magazines.refill_size(class), FIRST_CAPACITY / 2);
        let all: Vec<*mut u8> = blocks.iter_mut().map(|b| b.as_mut_ptr().cast()).collect();
        let mut full = 0;
        for &block in &all[..17] {
            // SAFETY: blocks of this test.
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
