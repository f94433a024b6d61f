//! Blocks of the global allocator whose contents are checked.
//!
//! Each block is filled with words that are computed from its unique number and their offset. If
//! the allocator returns a block twice or damages its contents, the next check aborts the process.

use crate::rng::{Rng, mix};
use crate::watchdog::abort_with;
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, realloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The size of the largest block.
pub(crate) const LARGEST_BYTES: usize = 256 << 10;
const WORD_BYTES: usize = size_of::<u64>();

static ALLOCATED: AtomicU64 = AtomicU64::new(0);
static FREED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of blocks that exist.
pub(crate) fn live() -> u64 {
    let freed = FREED.load(Relaxed);
    ALLOCATED.load(Relaxed) - freed
}

/// A block of memory with known contents. Checked and freed on drop.
pub(crate) struct Block {
    start: NonNull<u8>,
    layout: Layout,
    number: u64,
}

// SAFETY: a block owns its memory, as a Box does.
unsafe impl Send for Block {}

impl Block {
    /// Allocates `size` bytes, a multiple of 8, and fills them.
    pub(crate) fn new(size: usize, align: usize) -> Block {
        let layout = Layout::from_size_align(size, align).expect("a valid layout");
        // SAFETY: the size is not zero.
        let block = Block::at(unsafe { alloc(layout) }, layout);
        block.fill();
        block
    }

    /// Like [`Block::new`], with `alloc_zeroed`, whose zeros it checks first.
    fn new_zeroed(size: usize, align: usize) -> Block {
        let layout = Layout::from_size_align(size, align).expect("a valid layout");
        // SAFETY: the size is not zero.
        let block = Block::at(unsafe { alloc_zeroed(layout) }, layout);
        if let Some(offset) = block.offsets().find(|&offset| block.read(offset) != 0) {
            abort_with("alloc_zeroed: not zero", block.address(), offset);
        }
        block.fill();
        block
    }

    /// Takes ownership of a new allocation, and checks its address.
    fn at(start: *mut u8, layout: Layout) -> Block {
        let (size, align) = (layout.size(), layout.align());
        let Some(start) = NonNull::new(start) else { abort_with("out of memory", size, 0) };
        if !(start.as_ptr() as usize).is_multiple_of(align) {
            abort_with("a misaligned block", start.as_ptr() as usize, align);
        }
        Block { start, layout, number: ALLOCATED.fetch_add(1, Relaxed) }
    }

    /// Returns a block of random size and alignment, of at most `largest` bytes (a power of two).
    pub(crate) fn random(rng: &mut Rng, largest: usize) -> Block {
        let size = random_size(rng, largest);
        let align = match rng.below(32) {
            0 if largest >= 4096 => 4096,
            1..=3 => 64,
            4..=7 => 16,
            _ => 8,
        };
        if rng.one_in(4) { Block::new_zeroed(size, align) } else { Block::new(size, align) }
    }

    pub(crate) fn size(&self) -> usize {
        self.layout.size()
    }

    /// Reallocates to `size` bytes, a multiple of 8, and checks that the contents were kept.
    pub(crate) fn resize(&mut self, size: usize) {
        self.check();
        let kept = size.min(self.size());
        // SAFETY: this block and its layout; the size is neither zero nor too large for a Layout.
        let start = unsafe { realloc(self.start.as_ptr(), self.layout, size) };
        let Some(start) = NonNull::new(start) else { abort_with("out of memory", size, 0) };
        let written = self.offsets();
        self.start = start;
        for offset in written.take_while(|offset| offset + WORD_BYTES <= kept) {
            self.check_word(offset);
        }
        self.layout = Layout::from_size_align(size, self.layout.align()).expect("a valid layout");
        self.fill();
    }

    /// Aborts the process if the contents have changed.
    pub(crate) fn check(&self) {
        self.offsets().for_each(|offset| self.check_word(offset));
    }

    fn fill(&self) {
        for offset in self.offsets() {
            // SAFETY: a multiple of 8 within the block, which begins at a multiple of 8.
            unsafe { self.start.as_ptr().add(offset).cast::<u64>().write(self.word(offset)) };
        }
    }

    fn check_word(&self, offset: usize) {
        if self.read(offset) != self.word(offset) {
            abort_with("a damaged block", self.address(), offset);
        }
    }

    fn read(&self, offset: usize) -> u64 {
        // SAFETY: as in `fill`; every bit pattern is a u64.
        unsafe { self.start.as_ptr().add(offset).cast::<u64>().read_volatile() }
    }

    fn word(&self, offset: usize) -> u64 {
        mix(self.number << 20 ^ offset as u64)
    }

    /// Returns the offsets of the words that are written, ascending: all in a small block, some in
    /// a large one, always the last.
    fn offsets(&self) -> impl Iterator<Item = usize> + use<> {
        let size = self.size();
        let stride = match size {
            ..=512 => WORD_BYTES,
            513..=16_384 => 8 * WORD_BYTES,
            _ => 64 * WORD_BYTES,
        };
        let last = size - WORD_BYTES;
        (0..last).step_by(stride).chain([last])
    }

    fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.check();
        FREED.fetch_add(1, Relaxed);
        // SAFETY: allocated with this layout; `self` is the only owner.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Returns a multiple of 8 from 8 to `largest`. Each power of two is equally likely.
pub(crate) fn random_size(rng: &mut Rng, largest: usize) -> usize {
    let powers = (largest / WORD_BYTES).ilog2() as usize;
    let power = WORD_BYTES << rng.below(powers + 1);
    (power + rng.below(power) / WORD_BYTES * WORD_BYTES).min(largest)
}
