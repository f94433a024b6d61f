//! The corosensei worker: a bare context switch without a scheduler, the reference for `switch`.
//! `worker WORKLOAD [KEY=VALUE …]`, one JSON line; see bench/README.md.

use bench_common::{Args, Meter, Report, size};
use corosensei::{Coroutine, CoroutineResult};

fn main() {
    let args = Args::parse();
    let report = match args.workload.as_str() {
        "switch" => switch(&args),
        _ => args.unknown(),
    };
    report.print();
}

/// Two coroutines, resumed in turn. From one to the next it takes a suspend and a resume: such a
/// pair counts as one switch.
fn switch(args: &Args) -> Report {
    let mut meter = Meter::new(args, 2 * size::YIELDS_EACH);
    let coroutine = || {
        Coroutine::new(|yielder, ()| {
            loop {
                yielder.suspend(());
            }
        })
    };
    let mut pair: [Coroutine<(), (), ()>; 2] = [coroutine(), coroutine()];
    while meter.another_round() {
        for _ in 0..size::YIELDS_EACH {
            for one in &mut pair {
                assert!(matches!(one.resume(()), CoroutineResult::Yield(())));
            }
        }
    }
    let report = meter.report();
    // They never return: leave without unwinding their stacks.
    pair.into_iter().for_each(std::mem::forget);
    report
}
