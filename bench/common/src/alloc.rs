//! Allocation: what one goroutine, task or thread does in the `alloc_*` workloads.

use std::hint::black_box;
use std::ops::RangeInclusive;

use crate::{size, step};

/// Its first byte is 1, so that the blocks can be counted where they are freed.
pub type Block = Vec<u8>;

/// Allocates a block. The compiler cannot remove the allocation, because the address escapes.
#[inline]
fn allocate(bytes: usize) -> Block {
    let mut block = Vec::with_capacity(bytes);
    block.push(1);
    black_box(block.as_mut_ptr());
    block
}

/// Frees a block; returns its first byte.
#[inline]
fn free(block: Block) -> usize {
    usize::from(block[0])
}

/// A size in `range`, from the upper half of a random number.
#[inline]
fn random_bytes(random: u64, range: RangeInclusive<usize>) -> usize {
    let sizes = range.end() - range.start() + 1;
    range.start() + (random >> 32) as usize % sizes
}

/// `alloc_small`: allocates a block and frees it, many times.
pub fn small_pairs() {
    let freed: usize = (0..size::PAIRS_EACH).map(|_| free(allocate(size::SMALL_BYTES))).sum();
    assert_eq!(freed, size::PAIRS_EACH);
}

/// `alloc_mixed`: replaces the block in a random slot, many times.
pub fn mixed_replacements(seed: usize) {
    let mut slots: [Option<Block>; size::KEPT_BLOCKS] = [const { None }; _];
    let mut random = seed as u64 + 1;
    let mut freed = 0;
    for _ in 0..size::REPLACEMENTS_EACH {
        random = step(random);
        let block = allocate(random_bytes(random, size::MIXED_BYTES));
        let slot = &mut slots[random as usize % size::KEPT_BLOCKS];
        freed += slot.replace(block).map_or(0, free);
    }
    freed += slots.into_iter().flatten().map(free).sum::<usize>();
    assert_eq!(freed, size::REPLACEMENTS_EACH);
}

/// `alloc_handoff`: the batches that one producer sends.
pub fn batches(seed: usize) -> impl Iterator<Item = Vec<Block>> {
    let mut random = seed as u64 + 1;
    let mut block = move || {
        random = step(random);
        allocate(random_bytes(random, size::HANDOFF_BYTES))
    };
    (0..size::BATCHES_EACH).map(move |_| (0..size::BATCH_BLOCKS).map(|_| block()).collect())
}

/// Frees a batch; returns how many blocks it held.
pub fn free_batch(batch: Vec<Block>) -> usize {
    batch.into_iter().map(free).sum()
}
