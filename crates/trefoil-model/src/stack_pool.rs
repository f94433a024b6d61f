//! Checks of the pool of stacks (`mem/stack_pool.rs`).
//!
//! A stack and its links are loom cells: loom reports a data race if two threads believe that they
//! own a stack.

use std::ptr::NonNull;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use crate::explore::{Bound, explore, must_fail};
use crate::shim::{Lock, Mutation};
use crate::stack_pool_rs::{BatchLinks, BatchNode, PoolState, StackBatch, StackPool};

/// A stack.
struct Stack {
    number: usize,
    next: UnsafeCell<Option<NonNull<Stack>>>,
    batch: UnsafeCell<Option<BatchLinks<Stack>>>,
    /// Memory that a goroutine writes to.
    memory: UnsafeCell<usize>,
}

// SAFETY: loom checks that accesses to the cells are ordered; that is the point.
unsafe impl Sync for Stack {}
// SAFETY: as above.
unsafe impl Send for Stack {}

// SAFETY: getters return what setters stored.
unsafe impl BatchNode for Stack {
    unsafe fn next(this: NonNull<Self>) -> Option<NonNull<Self>> {
        // SAFETY: stacks live in a Model that every thread keeps; loom checks the access.
        unsafe { this.as_ref().next.with(|next| *next) }
    }
    unsafe fn set_next(this: NonNull<Self>, next: Option<NonNull<Self>>) {
        // SAFETY: as above.
        unsafe { this.as_ref().next.with_mut(|link| *link = next) }
    }
    unsafe fn batch(this: NonNull<Self>) -> BatchLinks<Self> {
        // SAFETY: as above.
        unsafe { this.as_ref().batch.with(|links| *links) }.expect("no batch begins here")
    }
    unsafe fn set_batch(this: NonNull<Self>, links: BatchLinks<Self>) {
        // SAFETY: as above.
        unsafe { this.as_ref().batch.with_mut(|batch| *batch = Some(links)) }
    }
}

/// The number of stacks that the pool may hold.
const MAX: usize = 3;

struct Model {
    pool: StackPool<Stack>,
    stacks: Vec<Stack>,
    /// Stacks from this number on were never used. They are taken if the pool is empty.
    fresh: AtomicUsize,
}

impl Model {
    fn new(stacks: usize) -> Arc<Model> {
        Arc::new(Model {
            pool: StackPool::new(Lock::new(PoolState::new())),
            stacks: (0..stacks)
                .map(|number| Stack {
                    number,
                    next: UnsafeCell::new(None),
                    batch: UnsafeCell::new(None),
                    memory: UnsafeCell::new(0),
                })
                .collect(),
            fresh: AtomicUsize::new(0),
        })
    }

    /// Returns a batch of these stacks, which the caller owns.
    fn batch(&self, numbers: impl IntoIterator<Item = usize>) -> StackBatch<Stack> {
        let mut batch = StackBatch::new();
        for number in numbers {
            // SAFETY: the caller owns these stacks; loom checks it.
            unsafe { batch.push(NonNull::from(&self.stacks[number])) };
        }
        batch
    }

    /// Takes a stack that was never used, if one is left.
    fn fresh(&self) -> Option<NonNull<Stack>> {
        let take = |n: usize| (n < self.stacks.len()).then_some(n + 1);
        let n = self.fresh.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        Some(NonNull::from(&self.stacks[n]))
    }

    /// Gives a batch to the pool within its bound; returns what did not fit.
    fn give(&self, batch: StackBatch<Stack>) -> StackBatch<Stack> {
        let back = self.pool.put(batch, MAX).unwrap_or(StackBatch::new());
        assert!(self.pool.len() <= MAX, "over the bound");
        back
    }
}

/// Writes to the stack's memory, as its goroutine would. Returns its number.
fn run_on(stack: NonNull<Stack>) -> usize {
    // SAFETY: stacks live in a Model that every thread keeps.
    let stack = unsafe { stack.as_ref() };
    // SAFETY: loom reports any concurrent access.
    stack.memory.with_mut(|memory| unsafe { *memory += 1 });
    stack.number
}

/// Uses every stack of a batch and returns their numbers.
fn numbers(batch: &mut StackBatch<Stack>) -> Vec<usize> {
    let len = batch.len();
    let numbers: Vec<_> = std::iter::from_fn(|| batch.pop()).map(run_on).collect();
    assert_eq!(numbers.len(), len, "a batch is as long as it says");
    numbers
}

/// Two caches spill half of their stacks and refill; the pool is too small for both.
///
/// Race: both put, both take, and a batch of one cache returns through the other. No stack is
/// handed out twice (data race on its memory), none is lost, the bound holds at every moment.
pub fn two_caches_trade_batches() {
    explore(Bound::All, || {
        let model = Model::new(6);
        let trader = |model: &Model, first: usize| {
            let mut cache = model.batch(first..first + 3);
            let spilled = cache.split_off(1);
            cache.append(model.give(spilled));
            if let Ok(batch) = model.pool.take_or_else(2, || ()) {
                cache.append(batch);
            }
            numbers(&mut cache)
        };
        let other = thread::spawn({
            let model = model.clone();
            move || trader(&model, 3)
        });
        let mut all = trader(&model, 0);
        all.extend(other.join().unwrap());
        if let Ok(mut rest) = model.pool.take_or_else(usize::MAX, || ()) {
            all.extend(numbers(&mut rest));
        }
        assert_eq!(model.pool.len(), 0);
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4, 5], "lost or handed out twice");
    });
}

/// One thread takes single stacks out of a batch while the other takes and gives whole batches.
///
/// Race: `take_one_or_else` takes the head of a batch, and with it the batch's links, which move to
/// the next stack.
pub fn single_stacks_and_batches() {
    explore(Bound::All, || {
        let model = Model::new(5);
        let left = model.give(model.batch(0..3));
        assert!(left.is_empty());
        let other = thread::spawn({
            let model = model.clone();
            move || {
                let mut taken = Vec::new();
                for _ in 0..2 {
                    taken.extend(model.pool.take_one_or_else(|| ()).ok().map(run_on));
                }
                taken
            }
        });
        let mut cache = model.batch(3..5);
        if let Ok(batch) = model.pool.take_or_else(2, || ()) {
            cache.append(batch);
        }
        let spilled = cache.split_off(1);
        let mut back = model.give(spilled);
        let mut all = numbers(&mut cache);
        all.extend(numbers(&mut back));
        all.extend(other.join().unwrap());
        if let Ok(mut rest) = model.pool.take_or_else(usize::MAX, || ()) {
            all.extend(numbers(&mut rest));
        }
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4], "lost or handed out twice");
    });
}

/// Uses a stack and gives it back. There are as many stacks as users, so one is available.
fn use_one(model: &Model) {
    let got = model.pool.take_one_or_else(|| model.fresh()).map_or_else(|fresh| fresh, Some);
    let stack = got.expect("as many stacks as users, but none is available");
    run_on(stack);
    let mut batch = StackBatch::new();
    // SAFETY: taken above, so this thread owns it.
    unsafe { batch.push(stack) };
    assert!(model.give(batch).is_empty());
}

/// A thread that checks the pool and the fresh stacks finds one (`stack_pool.rs`, invariant 4).
///
/// Race: a thread finds the pool empty; then another takes the last fresh stack, uses it and puts
/// it into the pool; then no fresh stack is left. Each thread has reserved a stack, so each must
/// find one.
pub fn reserved_stack_is_always_found() {
    explore(Bound::All, || {
        let model = Model::new(2);
        let other = thread::spawn({
            let model = model.clone();
            move || {
                use_one(&model);
                use_one(&model);
            }
        });
        use_one(&model);
        other.join().unwrap();
    });
}

/// Mutation check: a batch that is used after it was given away.
pub fn detects_use_after_give() {
    let broken = || {
        explore(Bound::All, || {
            let model = Model::new(1);
            let other = thread::spawn({
                let model = model.clone();
                move || model.pool.take_one_or_else(|| ()).ok().map(run_on)
            });
            assert!(model.give(model.batch([0])).is_empty());
            run_on(NonNull::from(&model.stacks[0]));
            other.join().unwrap();
        });
    };
    must_fail(Mutation::None, broken);
}
