//! ABA: a lock-free list of free slots compares only the index at its head. Between a goroutine's
//! read of the head and its exchange, another one takes the first two slots and returns the first.

use crate::{Bug, Version};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use trefoil::go;
use trefoil::sim::FailureKind;

pub(crate) const BUG: Bug = Bug {
    name: "ABA",
    program,
    kind: FailureKind::Panic,
    message: "has two owners",
    // Needed with the base seeds: 24 (median), at most 79.
    max_runs: 400,
    max_deviations: 12,
};

const SLOTS: usize = 3;
/// The end of the list.
const NONE: u64 = SLOTS as u64;
/// The bits of the index in a head. The repaired version counts the changes above them.
const INDEX_MASK: u64 = 0xff;
const ONE_CHANGE: u64 = INDEX_MASK + 1;

struct FreeList {
    head: AtomicU64,
    next: [AtomicU64; SLOTS],
    is_owned: [AtomicBool; SLOTS],
    version: Version,
}

impl FreeList {
    fn new(version: Version) -> FreeList {
        FreeList {
            head: AtomicU64::new(0),
            next: std::array::from_fn(|i| AtomicU64::new(i as u64 + 1)),
            is_owned: Default::default(),
            version,
        }
    }

    /// Exchanges the head, if it is still `head`, for the slot `index`.
    fn exchange(&self, head: u64, index: u64) -> bool {
        let tag = match self.version {
            Version::Planted => 0,
            Version::Repaired => (head & !INDEX_MASK) + ONE_CHANGE,
        };
        self.head.compare_exchange(head, tag | index, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Takes a free slot. Returns it, and how long that took.
    fn pop(&self) -> Option<(usize, u128)> {
        let begin = Instant::now();
        loop {
            let head = self.head.load(Ordering::SeqCst);
            let index = head & INDEX_MASK;
            if index == NONE {
                return None;
            }
            let next = self.next[index as usize].load(Ordering::SeqCst);
            let nanos = begin.elapsed().as_nanos();
            if self.exchange(head, next) {
                let was_owned = self.is_owned[index as usize].swap(true, Ordering::SeqCst);
                assert!(!was_owned, "slot {index} has two owners");
                return Some((index as usize, nanos));
            }
        }
    }

    fn push(&self, index: usize) {
        self.is_owned[index].store(false, Ordering::SeqCst);
        loop {
            let head = self.head.load(Ordering::SeqCst);
            self.next[index].store(head & INDEX_MASK, Ordering::SeqCst);
            if self.exchange(head, index as u64) {
                return;
            }
            std::thread::yield_now();
        }
    }
}

fn program(version: Version) {
    let list = Arc::new(FreeList::new(version));
    let users: Vec<_> = (0..2)
        .map(|_| {
            let list = list.clone();
            go(move || {
                for _ in 0..3 {
                    let (first, second) = (list.pop(), list.pop());
                    // In the order in which they were taken.
                    for (slot, _) in [first, second].into_iter().flatten() {
                        list.push(slot);
                        std::thread::yield_now();
                    }
                }
            })
        })
        .collect();
    users.into_iter().for_each(|user| user.join().unwrap());
}

#[test]
fn an_aba_exchange_is_found_and_repeated() {
    BUG.check();
}
