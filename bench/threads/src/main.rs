//! The worker of plain OS threads, for the workloads that they can bear. `worker WORKLOAD
//! [KEY=VALUE …]`, one JSON line; see bench/README.md.

mod wait;

use std::sync::mpsc::sync_channel;
use std::thread::{sleep, spawn, yield_now};

use bench_common::alloc::{batches, free_batch, mixed_replacements, small_pairs};
use bench_common::{Args, CHUNKS_RESULT, Meter, Report, chunk, size};

fn main() {
    let args = Args::parse();
    let report = match args.workload.as_str() {
        "spawn_join" => spawn_join(&args),
        "yield" => yields(&args),
        "forkjoin" => fork_join(&args),
        "alloc_small" => allocators(&args, size::PAIRS_EACH, |_| small_pairs()),
        "alloc_mixed" => allocators(&args, size::REPLACEMENTS_EACH, mixed_replacements),
        "alloc_handoff" => handoff(&args),
        "block_std" => block_std(&args),
        "sleep_short" => wait::sleep_short(&args),
        "tickers_1000" => wait::tickers(&args),
        "conns_idle_10k" => wait::mostly_idle(&args),
        _ => args.unknown(),
    };
    report.print();
}

fn spawn_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SPAWN_BATCH);
    while meter.another_round() {
        let handles: Vec<_> = (0..size::SPAWN_BATCH).map(|_| spawn(|| {})).collect();
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}

fn yields(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::YIELDERS * size::YIELDS_EACH);
    while meter.another_round() {
        let handles: Vec<_> = (0..size::YIELDERS)
            .map(|_| {
                spawn(|| {
                    for _ in 0..size::YIELDS_EACH {
                        yield_now();
                    }
                })
            })
            .collect();
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}

fn fork_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::CHUNKS as usize);
    while meter.another_round() {
        let handles: Vec<_> = (0..size::CHUNKS).map(|i| spawn(move || chunk(i))).collect();
        let sum = handles.into_iter().map(|handle| handle.join().unwrap());
        assert_eq!(sum.fold(0, u64::wrapping_add), CHUNKS_RESULT);
    }
    meter.report()
}

fn allocators(args: &Args, ops_each: usize, work: fn(usize)) -> Report {
    let mut meter = Meter::new(args, size::ALLOCATORS * ops_each);
    while meter.another_round() {
        let handles: [_; size::ALLOCATORS] = std::array::from_fn(|i| spawn(move || work(i)));
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}

fn handoff(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::HANDOFF_BLOCKS);
    while meter.another_round() {
        let consumers: [_; size::PARTIES] = std::array::from_fn(|i| {
            let (send, receive) = sync_channel(size::BATCH_SLOTS);
            spawn(move || batches(i).for_each(|batch| send.send(batch).unwrap()));
            spawn(move || receive.into_iter().map(free_batch).sum::<usize>())
        });
        let freed = consumers.into_iter().map(|consumer| consumer.join().unwrap());
        assert_eq!(freed.sum::<usize>(), size::HANDOFF_BLOCKS);
    }
    meter.report()
}

fn block_std(args: &Args) -> Report {
    let blocker = || {
        for _ in 0..size::BLOCKS_EACH {
            sleep(size::BLOCK);
        }
    };
    let mut meter = Meter::new(args, size::BLOCKERS * size::BLOCKS_EACH);
    while meter.another_round() {
        let handles: [_; size::BLOCKERS] = std::array::from_fn(|_| spawn(blocker));
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}
