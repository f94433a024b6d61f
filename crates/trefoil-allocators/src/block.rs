//! Blocks of the global allocator whose contents are checked.
//!
//! Each block is filled with words that follow from its unique number and their offset. A block that the
//! allocator hands out twice, or whose contents it damages, is found at the next check, which aborts the process.

use crate::rng::{Rng, mix};
use crate::watchdog::abort_with;
use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, realloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes in the largest block.
pub(crate) const LARGEST: usize = 256 << 10;
const WORD: usize = size_of::<u64>();

static MADE: AtomicU64 = AtomicU64::new(0);
static FREED: AtomicU64 = AtomicU64::new(0);

/// Blocks that exist now.
pub(crate) fn live() -> u64 {
    let freed = FREED.load(Relaxed);
    MADE.load(Relaxed) - freed
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
    pub(crate) fn new(size: usize, align: usize, zeroed: bool) -> Block {
        let layout = Layout::from_size_align(size, align).expect("a valid layout");
        // SAFETY: the size is not zero.
        let start = unsafe { if zeroed { alloc_zeroed(layout) } else { alloc(layout) } };
        let Some(start) = NonNull::new(start) else { abort_with("out of memory", size, 0) };
        if !(start.as_ptr() as usize).is_multiple_of(align) {
            abort_with("a misaligned block", start.as_ptr() as usize, align);
        }
        let block = Block { start, layout, number: MADE.fetch_add(1, Relaxed) };
        if zeroed && let Some(offset) = block.offsets().find(|&offset| block.read(offset) != 0) {
            abort_with("alloc_zeroed: not zero", block.address(), offset);
        }
        block.fill();
        block
    }

    /// A block of random size and alignment, at most `largest` bytes (a power of two).
    pub(crate) fn random(rng: &mut Rng, largest: usize) -> Block {
        let size = random_size(rng, largest);
        let align = match rng.below(32) {
            0 if largest >= 4096 => 4096,
            1..=3 => 64,
            4..=7 => 16,
            _ => 8,
        };
        Block::new(size, align, rng.one_in(4))
    }

    pub(crate) fn size(&self) -> usize {
        self.layout.size()
    }

    /// Reallocates to `size` bytes, a multiple of 8, and checks that the contents came along.
    pub(crate) fn resize(&mut self, size: usize) {
        self.check();
        let kept = size.min(self.size());
        // SAFETY: our block and its layout; the size is neither zero nor too large for a Layout.
        let start = unsafe { realloc(self.start.as_ptr(), self.layout, size) };
        let Some(start) = NonNull::new(start) else { abort_with("out of memory", size, 0) };
        let written = self.offsets();
        self.start = start;
        for offset in written.take_while(|offset| offset + WORD <= kept) {
            self.check_word(offset);
        }
        self.layout = Layout::from_size_align(size, self.layout.align()).expect("a valid layout");
        self.fill();
    }

    /// Aborts the process if the contents are not what was written.
    pub(crate) fn check(&self) {
        self.offsets().for_each(|offset| self.check_word(offset));
    }

    fn fill(&self) {
        for offset in self.offsets() {
            // SAFETY: a multiple of 8 within our block, which begins at a multiple of 8.
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

    /// Where words are written, ascending: everywhere in a small block, sparsely in a large one, and at its end.
    fn offsets(&self) -> impl Iterator<Item = usize> + use<> {
        let size = self.size();
        let stride = match size {
            ..=512 => WORD,
            513..=16_384 => 8 * WORD,
            _ => 64 * WORD,
        };
        let last = size - WORD;
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
        // SAFETY: allocated by us with this layout, and nobody else has it.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// A multiple of 8 from 8 to `largest`: each power of two is as likely as the next.
pub(crate) fn random_size(rng: &mut Rng, largest: usize) -> usize {
    let powers = (largest / WORD).ilog2() as usize;
    let power = WORD << rng.below(powers + 1);
    (power + rng.below(power) / WORD * WORD).min(largest)
}
