//! Tasks: the rows of tokio's worker, with futures on trefoil's scheduler.

use std::pin::Pin;
use std::time::Duration;

use bench_common::{Args, Meter, Report, size};
use trefoil::task::{spawn, yield_now};

/// Runs a workload as a task, so that it spawns and awaits from inside a task, as tokio's does.
fn in_task(workload: impl Future<Output = Report> + Send + 'static) -> Report {
    spawn(workload).join().unwrap()
}

pub fn spawn_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SPAWN_BATCH);
    in_task(async move {
        while meter.another_round() {
            let handles: Vec<_> = (0..size::SPAWN_BATCH).map(|_| spawn(async {})).collect();
            for handle in handles {
                handle.await.unwrap();
            }
        }
        meter.report()
    })
}

pub fn yields(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::YIELDERS * size::YIELDS_EACH);
    in_task(async move {
        while meter.another_round() {
            let handles: Vec<_> = (0..size::YIELDERS)
                .map(|_| {
                    spawn(async {
                        for _ in 0..size::YIELDS_EACH {
                            yield_now().await;
                        }
                    })
                })
                .collect();
            for handle in handles {
                handle.await.unwrap();
            }
        }
        meter.report()
    })
}

/// A future that awaits itself has to be boxed.
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

fn fib_node(n: u64) -> Boxed<u64> {
    Box::pin(async move {
        if n < 2 {
            return n;
        }
        let left = spawn(fib_node(n - 1));
        let right = fib_node(n - 2).await;
        left.await.unwrap() + right
    })
}

pub fn fib(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::FIB_SPAWNS);
    in_task(async move {
        while meter.another_round() {
            assert_eq!(fib_node(size::FIB_N).await, size::FIB_RESULT);
        }
        meter.report()
    })
}

/// 64 tasks whose polls block in `std::thread::sleep`.
pub fn block_std(args: &Args) -> Report {
    const TASKS: usize = 64;
    let mut meter = Meter::new(args, 1);
    while meter.another_round() {
        let handles: Vec<_> = (0..TASKS)
            .map(|_| spawn(async { std::thread::sleep(Duration::from_millis(20)) }))
            .collect();
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}
