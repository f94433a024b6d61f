//! A sort for lists that are not on a hot path.
//!
//! A stable sort of std is 3,000 lines of LLVM IR, an unstable one 1,500, and each is compiled anew
//! for every type and every comparison. Here a function that is compiled once sorts indices; a loop
//! then moves the items to their places.

use std::cmp::Ordering;

/// Sorts items. Equal ones keep their order. The sort costs one indirect call per comparison, and a
/// word of memory per item.
pub fn sort_by<T>(items: &mut [T], compare: impl Fn(&T, &T) -> Ordering) {
    let mut order = sorted_indices(items.len(), &|a, b| compare(&items[a], &items[b]));
    // Follows each cycle of the permutation. What was at `start` moves along, to its own place.
    for start in 0..items.len() {
        let mut to = start;
        loop {
            let from = std::mem::replace(&mut order[to], to);
            if from == start {
                break;
            }
            items.swap(to, from);
            to = from;
        }
    }
}

/// As [`sort_by`], in the order of keys.
pub fn sort_by_key<T, K: Ord>(items: &mut [T], key: impl Fn(&T) -> K) {
    sort_by(items, |a, b| key(a).cmp(&key(b)));
}

/// Returns for each place the index of the item that belongs there.
fn sorted_indices(len: usize, compare: &dyn Fn(usize, usize) -> Ordering) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    order.sort_unstable_by(|&a, &b| compare(a, b).then(a.cmp(&b)));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::rng::Rng;

    #[test]
    fn sort_by_orders_items_as_a_stable_sort_does() {
        let mut rng = Rng::from_seed(1);
        for len in (0..50).chain([1000]) {
            let mut items: Vec<(u64, usize)> = (0..len).map(|i| (rng.next() % 20, i)).collect();
            let mut model = items.clone();
            model.sort_by_key(|item| item.0);
            sort_by_key(&mut items, |item| item.0);
            assert_eq!(items, model);
            model.sort_by_key(|item| std::cmp::Reverse(item.0));
            sort_by(&mut items, |a, b| b.0.cmp(&a.0));
            assert_eq!(items, model);
        }
    }
}
