//! A merge sort that starts a goroutine for every left half, down to a few thousand elements.
//! Goroutines are cheap enough for this, and work stealing spreads them over the Ps.
//!
//! `cargo run --release --example parallel_sort`

use rand::Rng;
use std::time::Instant;

/// Parts of at most this length are sorted without another goroutine.
const MAX_SEQUENTIAL: usize = 4_096;

fn sort<T: Ord + Copy + Send>(data: &mut [T], spare: &mut [T]) {
    if data.len() <= MAX_SEQUENTIAL {
        data.sort_unstable();
        return;
    }
    let half = data.len() / 2;
    let (left, right) = data.split_at_mut(half);
    let (left_spare, right_spare) = spare.split_at_mut(half);
    trefoil::scope(|s| {
        s.go(|| sort(left, left_spare));
        sort(right, right_spare);
    });
    merge(left, right, spare);
    data.copy_from_slice(spare);
}

fn merge<'a, T: Ord + Copy>(mut left: &'a [T], mut right: &'a [T], out: &mut [T]) {
    for slot in out {
        let from_left = match (left.first(), right.first()) {
            (Some(l), Some(r)) => l <= r,
            (l, _) => l.is_some(),
        };
        let from = if from_left { &mut left } else { &mut right };
        (*slot, *from) = (from[0], &from[1..]);
    }
}

#[trefoil::main]
fn main() {
    let mut rng = rand::rng();
    let mut data: Vec<u64> = (0..1_000_000).map(|_| rng.random()).collect();
    let mut expected = data.clone();

    let start = Instant::now();
    let mut spare = vec![0; data.len()];
    sort(&mut data, &mut spare);
    let took = start.elapsed();

    expected.sort_unstable();
    assert!(data == expected);
    println!("{} numbers sorted on {} Ps in {took:.1?}", data.len(), trefoil::procs());
}
