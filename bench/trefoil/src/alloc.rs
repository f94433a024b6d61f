//! Allocation.

use bench_common::alloc::{batches, free_batch, mixed_replacements, small_pairs};
use bench_common::{Args, Meter, Report, size};
use trefoil::chan::bounded;
use trefoil::go;

pub fn small(args: &Args) -> Report {
    allocators(args, size::PAIRS_EACH, |_| small_pairs())
}

pub fn mixed(args: &Args) -> Report {
    allocators(args, size::REPLACEMENTS_EACH, mixed_replacements)
}

fn allocators(args: &Args, ops_each: usize, work: fn(usize)) -> Report {
    let mut meter = Meter::new(args, size::ALLOCATORS * ops_each);
    while meter.another_round() {
        let handles: [_; size::ALLOCATORS] = std::array::from_fn(|i| go(move || work(i)));
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}

pub fn handoff(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::HANDOFF_BLOCKS);
    while meter.another_round() {
        let consumers: [_; size::PARTIES] = std::array::from_fn(|i| {
            let (send, receive) = bounded(size::BATCH_SLOTS);
            go(move || batches(i).for_each(|batch| send.send(batch).unwrap()));
            go(move || receive.into_iter().map(free_batch).sum::<usize>())
        });
        let freed = consumers.into_iter().map(|consumer| consumer.join().unwrap());
        assert_eq!(freed.sum::<usize>(), size::HANDOFF_BLOCKS);
    }
    meter.report()
}
