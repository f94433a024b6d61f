//! Allocation.

use bench_common::alloc::{batches, free_batch, mixed_replacements, small_pairs};
use bench_common::{Args, Meter, Report, size};
use tokio::sync::mpsc;
use tokio::task::spawn;

pub async fn small(args: &Args) -> Report {
    allocators(args, size::PAIRS_EACH, |_| small_pairs()).await
}

pub async fn mixed(args: &Args) -> Report {
    allocators(args, size::REPLACEMENTS_EACH, mixed_replacements).await
}

async fn allocators(args: &Args, ops_each: usize, work: fn(usize)) -> Report {
    let mut meter = Meter::new(args, size::ALLOCATORS * ops_each);
    while meter.another_round() {
        let handles: [_; size::ALLOCATORS] = std::array::from_fn(|i| spawn(async move { work(i) }));
        for handle in handles {
            handle.await.unwrap();
        }
    }
    meter.report()
}

pub async fn handoff(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::HANDOFF_BLOCKS);
    while meter.another_round() {
        let consumers: [_; size::PARTIES] = std::array::from_fn(|i| {
            let (send, mut receive) = mpsc::channel(size::BATCH_SLOTS);
            spawn(async move {
                for batch in batches(i) {
                    send.send(batch).await.unwrap();
                }
            });
            spawn(async move {
                let mut freed = 0;
                while let Some(batch) = receive.recv().await {
                    freed += free_batch(batch);
                }
                freed
            })
        });
        let mut freed = 0;
        for consumer in consumers {
            freed += consumer.await.unwrap();
        }
        assert_eq!(freed, size::HANDOFF_BLOCKS);
    }
    meter.report()
}
