//! The speed of simulations, and that a seed repeats its run on a busy machine.
//!
//! ```sh
//! cargo test --release -p trefoil --test sim -- --ignored --nocapture --test-threads 1 speed::
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use trefoil::sim::{self, Seed};
use trefoil::sync::{Mutex, WaitGroup};
use trefoil::time::Ticker;
use trefoil::{chan, go, yield_now};

/// Ten goroutines, each with ten points at which another one may run.
fn ten_goroutines() {
    let sum = Arc::new(AtomicU64::new(0));
    let group = Arc::new(WaitGroup::new());
    for _ in 0..10 {
        let sum = sum.clone();
        group.go(move || {
            for i in 0..10 {
                sum.fetch_add(i, Ordering::Relaxed);
                yield_now();
            }
        });
    }
    group.wait();
    assert_eq!(sum.load(Ordering::Relaxed), 450);
}

#[test]
#[ignore = "prints timings"]
fn print_timings_of_short_runs() {
    for _ in 0..3 {
        let begin = Instant::now();
        let explored = sim::builder().explore(20_000, ten_goroutines).unwrap();
        let seconds = begin.elapsed().as_secs_f64();
        let (per_second, steps) = (explored.runs as f64 / seconds, explored.steps / explored.runs);
        println!("ten goroutines, {steps} steps: {per_second:.0} schedules per second");
    }
}

#[test]
#[ignore = "prints timings"]
fn print_timings_of_an_hour_of_tickers() {
    const TICKERS: u64 = 1000;
    const HOUR: Duration = Duration::from_secs(3600);
    let begin = Instant::now();
    let ticks = sim::builder().max_steps(u64::MAX).run(|| {
        let end = Instant::now() + HOUR;
        let ticks = Arc::new(AtomicU64::new(0));
        let group = Arc::new(WaitGroup::new());
        for _ in 0..TICKERS {
            let ticks = ticks.clone();
            group.go(move || {
                let ticker = Ticker::new(Duration::from_secs(1));
                while ticker.chan().recv().unwrap() < end {
                    ticks.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        group.wait();
        ticks.load(Ordering::Relaxed)
    });
    assert_eq!(ticks, TICKERS * (HOUR.as_secs() - 1));
    println!("an hour of {TICKERS} tickers: {:.2} s", begin.elapsed().as_secs_f64());
}

/// Channels, locks, sleeps, random numbers, and in some schedules a number that is counted twice.
fn failing_program() {
    let (tx, rx) = chan::bounded::<u64>(16);
    let (count, total) = (Arc::new(Mutex::new(0)), Arc::new(std::sync::Mutex::new(0)));
    let senders = (0..4).map(|i| {
        let (tx, count) = (tx.clone(), count.clone());
        go(move || {
            for _ in 0..3 {
                std::thread::sleep(Duration::from_micros(rand::random_range(0..3)));
                let before = *count.lock();
                tx.send(i + rand::random_range(0..10)).unwrap();
                *count.lock() = before + 1;
            }
        })
    });
    let mut handles: Vec<_> = senders.collect();
    drop(tx);
    let to = total.clone();
    handles.push(go(move || rx.iter().for_each(|value| *to.lock().unwrap() += value)));
    handles.into_iter().for_each(|handle| handle.join().unwrap());
    assert!(*total.lock().unwrap() >= 3 * (1 + 2 + 3));
    assert_eq!(*count.lock(), 12, "a message was not counted");
}

/// Repeats a seed, and checks that each run makes the same decisions and fails alike.
fn replay(seed: &Seed, message: &str, times: u32) {
    for _ in 0..times {
        let again = sim::builder().replay(seed, failing_program).expect_err("it fails again");
        assert!(again.is_repeatable, "{seed}: other decisions");
        assert_eq!(again.message, message);
        assert_eq!(again.seed, *seed);
    }
}

#[test]
#[ignore = "takes long"]
fn a_thousand_replays_are_identical_also_beside_load_and_on_one_cpu() {
    const TIMES: u32 = 1000;
    let failure = sim::builder().explore(1000, failing_program).unwrap_err();
    assert!(failure.is_repeatable && failure.runs > 0, "{failure}");
    println!("{}", failure.seed);
    let repeat = |place: &str| {
        let begin = Instant::now();
        replay(&failure.seed, &failure.message, TIMES);
        println!("{TIMES} replays {place}: {:.1} s", begin.elapsed().as_secs_f64());
    };
    repeat("alone");
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|s| {
        let _ends = SetOnDrop(&has_ended);
        for _ in 0..2 {
            s.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        repeat("beside two busy loops");
    });
    std::thread::scope(|s| {
        s.spawn(|| {
            use_one_cpu();
            repeat("on one CPU");
        });
    });
}

/// Sets a flag when it is dropped, also by a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Binds this thread, and those that it starts, to one CPU.
fn use_one_cpu() {
    // SAFETY: plain calls with a set of CPUs on this stack.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let size = size_of::<libc::cpu_set_t>();
        assert_eq!(libc::sched_getaffinity(0, size, &raw mut set), 0);
        let first = (0..libc::CPU_SETSIZE as usize).find(|&cpu| libc::CPU_ISSET(cpu, &set));
        libc::CPU_ZERO(&mut set);
        libc::CPU_SET(first.expect("a CPU"), &mut set);
        assert_eq!(libc::sched_setaffinity(0, size, &raw const set), 0);
    }
}
