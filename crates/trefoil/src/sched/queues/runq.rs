//! A P's local run queue: a ring and one `runnext` slot, after Go's.
//!
//! The **owner** is the M that owns the P. It alone pushes. The owner and **thieves**, Ms that own
//! other Ps, take from the head by compare-and-swap: the owner one item, a thief half of the ring.
//!
//! ```text
//!   next: [ G ]          `runnext`: runs first, and inherits the running goroutine's time slice
//!   ring: . . a b c d . .     head ≤ index < tail, both count up for ever, slot = index % RING
//!             ^head   ^tail
//! ```
//!
//! Invariants:
//! 1. Only the owner writes `tail` and the slots. So a slot that the owner itself consumed keeps
//!    its value until the owner's next push; a thief must copy a slot *before* its CAS on `head`.
//! 2. `tail - head ≤ RING` in wrapping arithmetic.
//! 3. A slot in `head..tail` was written before the `tail` that covers it was published (Release),
//!    and is read after that tail was loaded (Acquire).
//! 4. Each pushed item is returned exactly once, by one pop, steal or overflow.
//!
//! `crates/trefoil-model` explores the interleavings of this file.
//!
//! Rejected: crossbeam-deque (no runnext, no overflow by half, a growing buffer); a ring of plain
//! cells for the owner with a fence on the thieves' side (saves 5 ns per pop and costs an IPI per
//! steal).

use crate::shim::{AtomicPtr, AtomicU32, Ordering, RING, swap_full};
use std::ptr::{NonNull, null_mut};

const MASK: u32 = RING as u32 - 1;
const _: () = assert!(RING.is_power_of_two());

/// The queue. `T` is a goroutine; model checks use a smaller type.
pub(crate) struct RunQueue<T> {
    next: AtomicPtr<T>,
    /// How many times the owner has taken from `next`. Thieves read it to see whether the owner is
    /// about to take the next one. Written by the owner.
    nexts_taken: AtomicU32,
    head: AtomicU32,
    tail: AtomicU32,
    ring: Box<[AtomicPtr<T>]>,
}

/// The older half of a full ring: taken from it, but still stored in its slots (invariant 1).
#[must_use = "these goroutines are in no queue now"]
pub(crate) struct Overflow<'q, T> {
    queue: &'q RunQueue<T>,
    /// The index of the next item to return.
    at: u32,
    /// How many items are still to return.
    left: u32,
}

impl<T> Iterator for Overflow<'_, T> {
    type Item = NonNull<T>;

    fn next(&mut self) -> Option<NonNull<T>> {
        self.left = self.left.checked_sub(1)?;
        // Relaxed: this thread, the owner, wrote the slot itself (invariant 1).
        let item = self.queue.slot(self.at).load(Ordering::Relaxed);
        self.at = self.at.wrapping_add(1);
        NonNull::new(item)
    }
}

impl<T> RunQueue<T> {
    pub(crate) fn new() -> Self {
        RunQueue {
            next: AtomicPtr::new(null_mut()),
            nexts_taken: AtomicU32::new(0),
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
            ring: (0..RING).map(|_| AtomicPtr::new(null_mut())).collect(),
        }
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> &AtomicPtr<T> {
        &self.ring[(index & MASK) as usize]
    }

    /// Owner: makes `item` the next to run. Returns the item that it displaced, which the owner
    /// must push back. A full barrier: the check for idle Ps that follows is not done before it.
    #[inline]
    #[must_use]
    pub(crate) fn push_next(&self, item: NonNull<T>) -> Option<NonNull<T>> {
        // Release for a thief's Acquire on `next`; a full barrier for the protocol of
        // `search/idle.rs`.
        NonNull::new(swap_full(&self.next, item.as_ptr()))
    }

    /// Owner: appends. If the ring is full, takes the older half out and returns it: the caller
    /// moves it *and* `item` to a global queue.
    #[inline]
    pub(crate) fn push_back(&self, item: NonNull<T>) -> Result<(), Overflow<'_, T>> {
        loop {
            // Acquire: pairs with the Release of the thread that took the slot's last item, so that
            // thread has read the slot.
            let head = self.head.load(Ordering::Acquire);
            let tail = self.tail.load(Ordering::Relaxed); // Written by this thread.
            if tail.wrapping_sub(head) < RING as u32 {
                self.slot(tail).store(item.as_ptr(), Ordering::Relaxed);
                // Release: publishes the slot (invariant 3).
                self.tail.store(tail.wrapping_add(1), Ordering::Release);
                return Ok(());
            }
            if let Some(overflow) = self.take_half_slow(head) {
                return Err(overflow);
            }
            // Thieves have made room meanwhile.
        }
    }

    /// Owner: takes the older half of the full ring. Returns None if a thief has moved `head`.
    #[cold]
    fn take_half_slow(&self, head: u32) -> Option<Overflow<'_, T>> {
        let half = RING as u32 / 2;
        self.head
            .compare_exchange(head, head.wrapping_add(half), Ordering::AcqRel, Ordering::Relaxed)
            .ok()
            .map(|_| Overflow { queue: self, at: head, left: half })
    }

    /// Owner: takes the next item to run, from `runnext` or else from the ring.
    #[inline]
    pub(crate) fn pop(&self) -> Option<NonNull<T>> {
        self.pop_next().or_else(|| self.pop_ring())
    }

    /// Owner: takes `runnext`, which runs in the time slice of the goroutine before it.
    #[inline]
    pub(crate) fn pop_next(&self) -> Option<NonNull<T>> {
        let next = self.next.load(Ordering::Relaxed);
        // Only the owner fills `next`, so a failed exchange means that a thief emptied it. Release:
        // a thread that sees the null also sees the tail that was stored before, as `is_empty`
        // needs.
        if !next.is_null()
            && self
                .next
                .compare_exchange(next, null_mut(), Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        {
            let taken = self.nexts_taken.load(Ordering::Relaxed).wrapping_add(1);
            self.nexts_taken.store(taken, Ordering::Relaxed);
            return NonNull::new(next);
        }
        None
    }

    /// Owner: takes the head of the ring; `runnext` stays.
    #[inline]
    pub(crate) fn pop_ring(&self) -> Option<NonNull<T>> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            if head == self.tail.load(Ordering::Relaxed) {
                return None;
            }
            let item = self.slot(head).load(Ordering::Relaxed);
            // Release: pairs with the Acquire in `push_back`, after which the slot may be reused.
            match self.head.compare_exchange_weak(
                head,
                head.wrapping_add(1),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return NonNull::new(item),
                Err(now) => head = now,
            }
        }
    }

    /// Thief, the owner of `thief`, whose ring is empty: takes half of this ring, rounded up.
    /// Returns the last of the items to run; the others are in the ring of `thief`.
    pub(crate) fn steal_into(&self, thief: &RunQueue<T>) -> Option<NonNull<T>> {
        let to = thief.tail.load(Ordering::Relaxed); // Written by this thread.
        let stolen = self.grab_half(thief, to);
        let n = stolen.checked_sub(1)?;
        let last = thief.slot(to.wrapping_add(n)).load(Ordering::Relaxed);
        if n > 0 {
            // Release: publishes the slots that `grab_half` has filled (invariant 3).
            thief.tail.store(to.wrapping_add(n), Ordering::Release);
        }
        NonNull::new(last)
    }

    /// Thief: takes half of this ring, rounded up, and copies it to the slots of `thief` from the
    /// index `to` on. Returns how many items it took.
    fn grab_half(&self, thief: &RunQueue<T>, to: u32) -> u32 {
        loop {
            // Acquire: `tail` is read later, so it is never behind this `head`.
            let head = self.head.load(Ordering::Acquire);
            let tail = self.tail.load(Ordering::Acquire); // Invariant 3.
            let len = tail.wrapping_sub(head);
            let n = len - len / 2;
            if n == 0 {
                return 0;
            }
            if n > RING as u32 / 2 {
                continue; // `head` and `tail` were read at different times.
            }
            for i in 0..n {
                let item = self.slot(head.wrapping_add(i)).load(Ordering::Relaxed);
                thief.slot(to.wrapping_add(i)).store(item, Ordering::Relaxed);
            }
            // Release: pairs with the Acquire in `push_back`; the slots are read before the owner
            // reuses them.
            if self
                .head
                .compare_exchange(head, head.wrapping_add(n), Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return n;
            }
        }
    }

    /// Returns approximately how many items are in the ring. For any thread.
    pub(crate) fn ring_len(&self) -> u32 {
        let head = self.head.load(Ordering::Relaxed);
        self.tail.load(Ordering::Relaxed).wrapping_sub(head)
    }

    /// Returns the first item of the ring, which may be out of date. For any thread.
    pub(crate) fn first_hint(&self) -> Option<NonNull<T>> {
        let head = self.head.load(Ordering::Relaxed);
        // Acquire: pairs with the Release of the owner, which has written the slot before.
        let len = self.tail.load(Ordering::Acquire).wrapping_sub(head);
        if len == 0 { None } else { NonNull::new(self.slot(head).load(Ordering::Relaxed)) }
    }

    /// Returns how many items were ever appended to the ring, modulo 2³². For any thread.
    pub(crate) fn pushed(&self) -> u32 {
        self.tail.load(Ordering::Acquire)
    }

    /// Returns how many items were taken from the ring, or by the owner from `runnext`, modulo 2³².
    /// For any thread.
    pub(crate) fn taken(&self) -> u32 {
        self.head.load(Ordering::Relaxed).wrapping_add(self.nexts_taken())
    }

    /// Returns how many times the owner has taken an item from `runnext`. For any thread.
    pub(crate) fn nexts_taken(&self) -> u32 {
        self.nexts_taken.load(Ordering::Relaxed)
    }

    /// Returns the address of the item in `runnext`, or 0. For any thread.
    pub(crate) fn next_hint(&self) -> usize {
        self.next.load(Ordering::Relaxed) as usize
    }

    /// Returns whether there is an item in `runnext`. For any thread.
    #[inline]
    pub(crate) fn has_next(&self) -> bool {
        !self.next.load(Ordering::Relaxed).is_null()
    }

    /// Thief: takes `runnext`, as the last resort.
    pub(crate) fn steal_next(&self) -> Option<NonNull<T>> {
        let next = self.next.load(Ordering::Acquire);
        if next.is_null() {
            return None;
        }
        // Acquire: pairs with `push_next`; the goroutine's fields were written before that swap.
        self.next
            .compare_exchange(next, null_mut(), Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .and_then(NonNull::new)
    }

    /// Returns whether there is no item. An item that the owner moves from `runnext` to the ring
    /// meanwhile is not missed: the move changes `tail`, and then everything is read again.
    pub(crate) fn is_empty(&self) -> bool {
        loop {
            let head = self.head.load(Ordering::Acquire);
            let tail = self.tail.load(Ordering::Acquire);
            let next = self.next.load(Ordering::Acquire);
            if tail == self.tail.load(Ordering::Acquire) {
                return head == tail && next.is_null();
            }
        }
    }

    /// Returns approximately how many items there are. For any thread.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        let head = self.head.load(Ordering::Relaxed);
        let tail = self.tail.load(Ordering::Relaxed);
        let ring = (tail.wrapping_sub(head) as usize).min(RING);
        ring + usize::from(self.has_next())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize};

    fn item(n: usize) -> NonNull<usize> {
        NonNull::new((n * 8 + 8) as *mut usize).unwrap()
    }
    fn number(p: NonNull<usize>) -> usize {
        (p.as_ptr() as usize - 8) / 8
    }

    #[test]
    fn local_queue_is_fifo_and_runnext_goes_first() {
        let q = RunQueue::new();
        for i in 0..RING {
            assert!(q.push_back(item(i)).is_ok());
        }
        assert!(q.push_next(item(1000)).is_none());
        assert_eq!(number(q.pop_next().unwrap()), 1000);
        assert!(q.pop_next().is_none());
        for i in 0..RING {
            assert_eq!(number(q.pop().unwrap()), i);
        }
        assert!(q.pop().is_none() && q.is_empty());
    }

    #[test]
    fn overflow_takes_the_older_half() {
        let q = RunQueue::new();
        for i in 0..RING {
            assert!(q.push_back(item(i)).is_ok());
        }
        let moved: Vec<_> = match q.push_back(item(RING)) {
            Ok(()) => panic!("the ring must be full"),
            Err(overflow) => overflow.map(number).collect(),
        };
        assert_eq!(moved, (0..RING / 2).collect::<Vec<_>>());
        assert_eq!(number(q.pop().unwrap()), RING / 2);
    }

    #[test]
    fn steal_takes_half_and_each_item_exactly_once() {
        for i in 0..RING {
            let (victim, thief) = (RunQueue::new(), RunQueue::new());
            for n in 0..i {
                assert!(victim.push_back(item(n)).is_ok());
            }
            let mut seen = vec![0; i];
            let mut stolen = 0;
            if let Some(last) = victim.steal_into(&thief) {
                seen[number(last)] += 1;
                stolen += 1;
                while let Some(p) = thief.pop() {
                    seen[number(p)] += 1;
                    stolen += 1;
                }
            }
            while let Some(p) = victim.pop() {
                seen[number(p)] += 1;
            }
            assert!(stolen == i / 2 || stolen == i / 2 + 1, "stole {stolen} of {i}");
            assert!(seen.iter().all(|&n| n == 1));
        }
    }

    #[test]
    fn is_empty_never_misses_an_item_that_moves_to_the_ring() {
        let q = RunQueue::new();
        let done = AtomicBool::new(false);
        let wrong = AtomicUsize::new(0);
        // There is always one item: it moves from `runnext` to the ring and back.
        assert!(q.push_next(item(0)).is_none());
        std::thread::scope(|s| {
            s.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    if q.is_empty() {
                        wrong.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
            for i in 0..100_000 {
                let old = q.push_next(item(i + 1)).unwrap();
                assert!(q.push_back(old).is_ok());
                assert!(q.pop_ring().is_some());
            }
            done.store(true, Ordering::Relaxed);
        });
        assert_eq!(wrong.into_inner(), 0);
    }
}
