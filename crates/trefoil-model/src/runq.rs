//! Checks of the local run queue (`sched/queues/runq.rs`).
//!
//! Every taker writes to the item that it took, in a loom cell. So loom reports a data race if an
//! item was given to two takers, or if its contents were not published to its taker. At the end all
//! takers together must have exactly the pushed items.

use std::ptr::NonNull;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::runq_rs::RunQueue;
use crate::shim::{Half, Mutation, Op, RING};

/// A goroutine: a number that its maker writes and its taker reads.
struct Item(UnsafeCell<usize>);

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for Item {}
// SAFETY: as above.
unsafe impl Send for Item {}

const UNMADE: usize = usize::MAX;
const TAKEN: usize = usize::MAX - 1;

/// The queue under test and the items that go through it.
struct Model {
    queue: RunQueue<Item>,
    /// The queues that the thieves steal into.
    thieves: [RunQueue<Item>; 2],
    items: Vec<Item>,
}

impl Model {
    fn new(items: usize) -> Arc<Model> {
        Arc::new(Model {
            queue: RunQueue::new(),
            thieves: [RunQueue::new(), RunQueue::new()],
            items: (0..items).map(|_| Item(UnsafeCell::new(UNMADE))).collect(),
        })
    }

    /// Writes item `n`, as a spawner does before it pushes.
    fn make(&self, n: usize) -> NonNull<Item> {
        let item = &self.items[n];
        // SAFETY: loom reports any concurrent access.
        item.0.with_mut(|value| unsafe { *value = n });
        NonNull::from(item)
    }

    /// Owner: makes and appends item `n`; a full ring's older half goes to `global`.
    fn push(&self, n: usize, global: &mut Vec<usize>) {
        let item = self.make(n);
        self.push_item(item, global);
    }

    /// Owner: appends an item, as [`push`](Model::push).
    fn push_item(&self, item: NonNull<Item>, global: &mut Vec<usize>) {
        if let Err(overflow) = self.queue.push_back(item) {
            let half: Vec<_> = overflow.map(take).collect();
            assert_eq!(half.len(), RING / 2, "an overflow is half a ring");
            assert!(half.is_sorted(), "the older half, in order");
            global.extend(half);
            global.push(take(item));
        }
    }

    /// Owner: as `P::push_next`.
    fn push_next(&self, n: usize, global: &mut Vec<usize>) {
        if let Some(displaced) = self.queue.push_next(self.make(n)) {
            self.push_item(displaced, global);
        }
    }

    /// Owner: pops until the queue is empty.
    fn pop_all(&self) -> Vec<usize> {
        std::iter::from_fn(|| self.queue.pop()).map(take).collect()
    }

    /// Thief `t`: steals once and runs what it got.
    fn steal(&self, t: usize) -> Vec<usize> {
        let mine = &self.thieves[t];
        let Some(first) = self.queue.steal_into(mine) else { return Vec::new() };
        // `steal_into` returns the newest item and leaves the older ones in the thief's ring.
        let mut taken: Vec<_> = std::iter::from_fn(|| mine.pop_ring()).map(take).collect();
        taken.push(take(first));
        taken
    }
}

/// Writes to the item, as its taker. Returns the item's number.
fn take(item: NonNull<Item>) -> usize {
    // SAFETY: items live in a Model that every thread keeps.
    let cell = unsafe { &item.as_ref().0 };
    // SAFETY: loom reports any concurrent access.
    let number = cell.with_mut(|value| unsafe { std::mem::replace(&mut *value, TAKEN) });
    assert!(number < TAKEN, "an item without contents, or taken twice");
    number
}

/// Asserts that the lists are the numbers below `n`, each once.
fn assert_all_once(n: usize, lists: &[&[usize]]) {
    let mut all = lists.concat();
    all.sort_unstable();
    assert_eq!(all, (0..n).collect::<Vec<_>>(), "lost or returned twice");
}

/// The owner pushes and pops while a thief takes half: both may want the same head.
///
/// Race: pop's CAS on `head` against the thief's, and the thief's copy of slots against the push
/// that publishes them. Each side's items are in order (FIFO).
pub fn owner_against_one_thief() {
    explore(Bound::All, || {
        let model = Model::new(3);
        let thief = thread::spawn({
            let model = model.clone();
            move || model.steal(0)
        });
        let mut owner = Vec::new();
        model.push(0, &mut owner);
        model.push(1, &mut owner);
        owner.extend(model.queue.pop().map(take));
        model.push(2, &mut owner);
        owner.extend(model.pop_all());
        let stolen = thief.join().unwrap();
        assert!(owner.is_sorted() && stolen.is_sorted(), "FIFO: {owner:?} {stolen:?}");
        assert_all_once(3, &[&owner, &stolen]);
    });
}

/// Two thieves and the owner take the same items.
///
/// Race: thieves' CAS against each other, each having copied the same slots into its own ring.
/// Bounded to three preemptions.
pub fn owner_against_two_thieves() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new(3);
        let mut owner = Vec::new();
        model.push(0, &mut owner);
        model.push(1, &mut owner);
        let thieves = [0, 1].map(|t| {
            let model = model.clone();
            thread::spawn(move || model.steal(t))
        });
        model.push(2, &mut owner);
        owner.extend(model.pop_all());
        let [a, b] = thieves.map(|thief| thief.join().unwrap());
        assert!(owner.is_sorted() && a.is_sorted() && b.is_sorted());
        assert_all_once(3, &[&owner, &a, &b]);
    });
}

/// `runnext` is filled, displaced by the next one and popped while a thief tries to take it.
///
/// Race: the exchanges of `next` by pop and push_next against the thief's; and (ABA) the thief must
/// not take a `next` that was emptied and filled again with another item than the one it saw.
pub fn runnext_pushed_displaced_and_stolen() {
    explore(Bound::All, || {
        let model = Model::new(3);
        let thief = thread::spawn({
            let model = model.clone();
            move || {
                let mut taken = model.steal(0);
                if model.queue.has_next() {
                    taken.extend(model.queue.steal_next().map(take));
                }
                taken
            }
        });
        let mut owner = Vec::new();
        model.push_next(0, &mut owner);
        model.push_next(1, &mut owner);
        owner.extend(model.queue.pop().map(take));
        model.push_next(2, &mut owner);
        owner.extend(model.pop_all());
        let stolen = thief.join().unwrap();
        assert_all_once(3, &[&owner, &stolen]);
    });
}

/// Two thieves try to take the same `runnext`, which the owner replaces.
///
/// Race: two exchanges of one item; and a thief's exchange that meets the *next* runnext. Bounded
/// to three preemptions.
pub fn runnext_against_two_thieves() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new(2);
        let mut owner = Vec::new();
        model.push_next(0, &mut owner);
        let thieves = [0, 1].map(|_| {
            let model = model.clone();
            thread::spawn(move || model.queue.steal_next().map(take))
        });
        model.push_next(1, &mut owner);
        owner.extend(model.pop_all());
        let [a, b] = thieves.map(|thief| thief.join().unwrap());
        assert_all_once(2, &[&owner, a.as_slice(), b.as_slice()]);
    });
}

/// The ring is full and the owner takes the older half out, while thieves take from it too.
///
/// Race: take_half's CAS against the thieves'; and the owner reading consumed slots (`Overflow`)
/// while a thief that lost still copies them. Bounded to three preemptions.
pub fn overflow_against_thieves() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new(RING + 1);
        let mut owner = Vec::new();
        for n in 0..RING {
            model.push(n, &mut owner);
        }
        let thieves = [0, 1].map(|t| {
            let model = model.clone();
            thread::spawn(move || model.steal(t))
        });
        model.push(RING, &mut owner);
        owner.extend(model.pop_all());
        let [a, b] = thieves.map(|thief| thief.join().unwrap());
        assert!(a.is_sorted() && b.is_sorted());
        assert_all_once(RING + 1, &[&owner, &a, &b]);
    });
}

/// The owner goes round the ring while a thief copies slots that are being reused.
///
/// Race: a thief reads `head`, the owner consumes and overwrites that slot, the thief copies the
/// new value: then its CAS must fail. Bounded to three preemptions.
pub fn wrap_around_under_a_thief() {
    explore(Bound::Preemptions(3), || {
        let model = Model::new(RING + 2);
        let mut owner = Vec::new();
        for n in 0..RING {
            model.push(n, &mut owner);
        }
        let thief = thread::spawn({
            let model = model.clone();
            move || model.steal(0)
        });
        // Both slots that the thief copies are given new contents.
        owner.extend(model.queue.pop_ring().map(take));
        owner.extend(model.queue.pop_ring().map(take));
        model.push(RING, &mut owner);
        model.push(RING + 1, &mut owner);
        owner.extend(model.pop_all());
        let stolen = thief.join().unwrap();
        assert!(stolen.is_sorted());
        assert_all_once(RING + 2, &[&owner, &stolen]);
    });
}

/// What a thief stole is stolen from it.
///
/// Race: items travel through two rings; the second thief's only link to their maker is the chain
/// of Releases: `tail`, the first thief's copy, its own `tail`.
pub fn stolen_from_a_thief() {
    explore(Bound::All, || {
        let model = Model::new(RING);
        let mut owner = Vec::new();
        for n in 0..RING {
            model.push(n, &mut owner);
        }
        let [first, second] = [0, 1].map(|t| {
            let model = model.clone();
            thread::spawn(move || match t {
                0 => model.steal(0),
                _ => model.thieves[0].steal_into(&model.thieves[1]).map(take).into_iter().collect(),
            })
        });
        let (first, second) = (first.join().unwrap(), second.join().unwrap());
        owner.extend(model.pop_all());
        assert_all_once(RING, &[&owner, &first, &second]);
    });
}

/// `is_empty` while the owner kicks an item from `runnext` to the ring and empties `runnext`.
///
/// Race (Go's, in runqempty): the check finds an empty ring; then A moves there and B leaves
/// `runnext`; then the check finds no `runnext`. There was an item all the time.
pub fn never_falsely_empty_when_runnext_is_kicked() {
    explore(Bound::All, || {
        let model = Model::new(2);
        let mut owner = Vec::new();
        model.push_next(0, &mut owner);
        let other = thread::spawn({
            let model = model.clone();
            move || assert!(!model.queue.is_empty(), "item 0 was there all the time")
        });
        model.push_next(1, &mut owner);
        owner.extend(model.queue.pop().map(take));
        assert_eq!(owner, [1]);
        other.join().unwrap();
    });
}

/// `is_empty` while the owner kicks an item to the ring and takes it from there.
///
/// Race: the ring fills and empties again during the check, which must then see `runnext`.
pub fn never_falsely_empty_when_the_ring_is_popped() {
    explore(Bound::All, || {
        let model = Model::new(2);
        let mut owner = Vec::new();
        model.push_next(0, &mut owner);
        let other = thread::spawn({
            let model = model.clone();
            move || assert!(!model.queue.is_empty(), "runnext was there all the time")
        });
        model.push_next(1, &mut owner);
        owner.extend(model.queue.pop_ring().map(take));
        assert_eq!(owner, [0]);
        other.join().unwrap();
    });
}

/// Mutation check: without Release on `tail` a thief takes an item whose contents it does not see.
pub fn detects_unpublished_tail() {
    must_fail(Mutation::Everywhere("runq.rs", Op::Store, Half::Release), owner_against_one_thief);
}

/// Mutation check: without Acquire on the loads of `tail` and `next`, a check misses an item that
/// moves.
pub fn detects_unacquired_loads() {
    must_fail(
        Mutation::Everywhere("runq.rs", Op::Load, Half::Acquire),
        never_falsely_empty_when_runnext_is_kicked,
    );
}

/// Mutation check: without Release on the exchange that empties `runnext`, a check that sees it
/// empty may miss what was moved to the ring before.
pub fn detects_unreleased_pop() {
    must_fail(
        Mutation::Everywhere("runq.rs", Op::Change, Half::Release),
        never_falsely_empty_when_runnext_is_kicked,
    );
}

/// Mutation check: without Release on the change of `runnext`, its taker does not see the item's
/// contents.
pub fn detects_unpublished_runnext() {
    must_fail(
        Mutation::Everywhere("runq.rs", Op::Change, Half::Release),
        runnext_pushed_displaced_and_stolen,
    );
}

/// Which orderings of `runq.rs` do the checks need? Prints a table; slow.
pub fn sweep_orderings() {
    for check in [
        owner_against_one_thief,
        runnext_pushed_displaced_and_stolen,
        runnext_against_two_thieves,
        wrap_around_under_a_thief,
        stolen_from_a_thief,
        overflow_against_thieves,
        never_falsely_empty_when_runnext_is_kicked,
        never_falsely_empty_when_the_ring_is_popped,
    ] {
        sweep(check);
    }
}
