//! The worker of plain OS threads, for the workloads that they can bear. `worker WORKLOAD
//! [KEY=VALUE …]`, one JSON line; see bench/README.md.

use std::thread::{sleep, spawn, yield_now};

use bench_common::{Args, CHUNKS_RESULT, Meter, Report, chunk, size};

fn main() {
    let args = Args::parse();
    let report = match args.workload.as_str() {
        "spawn_join" => spawn_join(&args),
        "yield" => yields(&args),
        "forkjoin" => fork_join(&args),
        "block_std" => block_std(&args),
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
