//! Preemption at any instruction of user code, and as soon as possible in other code.
//!
//! Goroutines do what programs do (allocate, print, hash, panic, lock, recurse, compute with every
//! kind of register) and check every result, while they are stopped every 50 µs and continue on
//! other Ms.
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_TORTURE_SECS` | the duration in seconds, by default 3, in debug builds 1 |

// AVX-512 is newer than the oldest compiler that builds the crate; this test needs the newest.
#![allow(clippy::incompatible_msrv)]

mod common;
#[cfg_attr(target_arch = "aarch64", path = "torture_registers/aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "torture_registers/x86_64.rs")]
mod registers;

use common::{child_test, rounds};
use rand::Rng;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::hint::black_box;
use std::panic::catch_unwind;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use trefoil::task;
use trefoil::{Builder, Runtime};

/// The number of goroutines of each kind. At least two: some take turns.
fn each() -> usize {
    rounds(2, 3)
}

/// How much longer a run may last until each worker has finished a round.
const PATIENCE: Duration = Duration::from_secs(15);

fn seconds() -> u64 {
    match std::env::var("TREFOIL_TORTURE_SECS") {
        Ok(text) => text.parse().expect("TREFOIL_TORTURE_SECS is a number"),
        Err(_) => rounds(1, 3),
    }
}

/// What the workers share.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Workers that have finished their first round.
    progressed: AtomicUsize,
    counter: Mutex<u64>,
    increments: AtomicU64,
    turn: Mutex<usize>,
    turned: Condvar,
    turns: AtomicUsize,
    /// Thread-locals that were made and dropped.
    made: AtomicUsize,
    dropped: AtomicUsize,
}

type Work = fn(&Arc<Shared>, usize);

/// The kinds of work, besides those of `registers`; each is called in a loop.
const KINDS: &[(&str, Work)] = &[
    ("malloc", malloc),
    ("print", print),
    ("hash", hash),
    ("panic", panic),
    ("thread-local", thread_local),
    ("random", random),
    ("mutex", mutex),
    ("condvar", condvar),
    ("float", float),
    ("C", c_library),
    ("recursion", recursion),
    ("channel", channel),
    ("children", children),
    ("tasks", tasks),
];

#[test]
fn results_are_right_under_preemption_at_any_instruction() {
    let limit = Duration::from_secs(seconds() + 60);
    child_test!(limit = limit, |child| {
        let text = child.env("TREFOIL_DEBUG", "slice=50").env("RUST_BACKTRACE", "0").succeed();
        let tail: Vec<&str> = text.lines().filter(|line| line.starts_with("torture:")).collect();
        println!("{}", tail.join("\n"));
        assert_eq!(tail.len(), 3, "{text}");
    });
    for procs in [2, 1, 8] {
        torture(procs, Duration::from_secs(seconds()) / 3);
    }
}

fn torture(procs: usize, time: Duration) {
    let rt = Runtime::builder().procs(procs).build().unwrap();
    let shared = Arc::new(Shared::default());
    let kinds: Vec<_> = KINDS.iter().chain(registers::KINDS).copied().collect();
    let (rounds, stats) = rt.run(|| {
        let start = Instant::now();
        let workers: Vec<_> = (0..kinds.len() * each())
            .map(|i| {
                let (name, work) = kinds[i % kinds.len()];
                let id = i / kinds.len();
                let shared = shared.clone();
                let run = move || {
                    let mut rounds = 0u64;
                    while !shared.stop.load(SeqCst) {
                        work(&shared, id);
                        rounds += 1;
                        if rounds == 1 {
                            shared.progressed.fetch_add(1, SeqCst);
                        }
                    }
                    shared.turned.notify_all();
                    rounds
                };
                Builder::new().name(name).go(run).unwrap()
            })
            .collect();
        // On a busy machine, the first round of each worker may take longer than `time`.
        let all_progressed = || shared.progressed.load(SeqCst) == workers.len();
        while start.elapsed() < time || (!all_progressed() && start.elapsed() < time + PATIENCE) {
            trefoil::time::sleep(Duration::from_millis(20));
        }
        shared.stop.store(true, SeqCst);
        shared.turned.notify_all();
        let rounds: Vec<u64> = workers.into_iter().map(|w| w.join().unwrap()).collect();
        (rounds, trefoil::debug::stats())
    });
    assert_eq!(*shared.counter.lock().unwrap(), shared.increments.load(SeqCst));
    assert_eq!(shared.made.load(SeqCst), shared.dropped.load(SeqCst));
    // Each goroutine made progress.
    for (i, &n) in rounds.iter().enumerate() {
        assert!(n > 0, "{} {i} never finished a round ({rounds:?})", kinds[i % kinds.len()].0);
    }
    let preempted = stats.preemptions;
    common::mark(&format!(
        "torture: {procs} procs, {preempted} preempted, {} signals, {} retaken, {} threads, \
         {} rounds",
        stats.preempt_signals,
        stats.retakes,
        stats.threads,
        rounds.iter().sum::<u64>(),
    ));
    // More than one P has with a time slice of 10 ms on a machine that is ten times overloaded.
    assert!(preempted > 20 * time.as_secs().max(1), "only {preempted} preemptions");
}

fn malloc(_: &Arc<Shared>, _: usize) {
    let mut rng = rand::rng();
    let mut blocks: Vec<Vec<u8>> = Vec::new();
    for i in 0..rounds(50, 200u32) {
        let size = 1 << rng.random_range(0..15);
        blocks.push(vec![i as u8; size + i as usize % 7]);
        if blocks.len() > 20 {
            let gone = blocks.swap_remove(rng.random_range(0..blocks.len()));
            assert!(gone.iter().all(|&b| b == gone[0]));
        }
    }
    assert!(blocks.iter().all(|block| block.iter().all(|&b| b == block[0])));
}

fn print(_: &Arc<Shared>, id: usize) {
    // Few lines: all workers share the lock of standard output, which is not fair.
    for i in 0..4 {
        println!("worker {id} line {i} {:>10.3} {:?}", i as f64 / 7.0, "text");
    }
}

fn hash(_: &Arc<Shared>, id: usize) {
    let mut map = HashMap::new();
    for i in 0..500u64 {
        map.insert(format!("key {}", i * 7919 % 500), i + id as u64);
    }
    assert_eq!(map.len(), 500);
    assert_eq!(map.values().sum::<u64>(), 500 * 499 / 2 + 500 * id as u64);
}

fn panic(_: &Arc<Shared>, id: usize) {
    struct Count<'a>(&'a Cell<u32>);
    impl Drop for Count<'_> {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    fn deep(n: u32, drops: &Cell<u32>, id: usize) {
        let _count = Count(drops);
        if n == 0 {
            std::panic::resume_unwind(Box::new(id));
        }
        deep(n - 1, drops, id);
        black_box(n);
    }
    let drops = Cell::new(0);
    let caught = catch_unwind(std::panic::AssertUnwindSafe(|| deep(20, &drops, id)));
    assert_eq!(*caught.unwrap_err().downcast::<usize>().unwrap(), id);
    assert_eq!(drops.get(), 21);
    let trace = std::backtrace::Backtrace::force_capture();
    black_box(&trace);
}

fn thread_local(shared: &Arc<Shared>, _: usize) {
    struct Record(Vec<u64>, Arc<Shared>);
    impl Drop for Record {
        fn drop(&mut self) {
            self.1.dropped.fetch_add(1, SeqCst);
        }
    }
    thread_local! {
        static DEPTH: Cell<u32> = const { Cell::new(0) };
        static RECORD: RefCell<Option<Record>> = const { RefCell::new(None) };
    }
    let shared = shared.clone();
    let one = move || {
        RECORD
            .with_borrow_mut(|record| *record = Some(Record(vec![trefoil::id()], shared.clone())));
        shared.made.fetch_add(1, SeqCst);
        for i in 0..100 {
            DEPTH.set(DEPTH.get() + 1);
            RECORD.with_borrow_mut(|record| record.as_mut().unwrap().0.push(i));
            if i % 10 == 0 {
                trefoil::yield_now();
            }
            assert_eq!(RECORD.with_borrow(|record| record.as_ref().unwrap().0[0]), trefoil::id());
            DEPTH.set(DEPTH.get() - 1);
        }
        assert_eq!(DEPTH.get(), 0);
    };
    trefoil::go(one).join().unwrap();
}

fn random(_: &Arc<Shared>, _: usize) {
    let mut rng = rand::rng();
    let mut sum = 0u64;
    for _ in 0..2000 {
        sum += u64::from(rng.random_range(0..1000u32));
    }
    assert!((600_000..1_400_000).contains(&sum), "{sum}");
}

fn mutex(shared: &Arc<Shared>, _: usize) {
    for _ in 0..50 {
        let mut counter = shared.counter.lock().unwrap();
        let before = *counter;
        black_box(&before);
        *counter = before + 1;
        drop(counter);
        shared.increments.fetch_add(1, SeqCst);
    }
}

fn condvar(shared: &Arc<Shared>, id: usize) {
    let mut turn = shared.turn.lock().unwrap();
    while *turn != id {
        if shared.stop.load(SeqCst) {
            return;
        }
        turn = shared.turned.wait_timeout(turn, Duration::from_millis(100)).unwrap().0;
    }
    *turn = (id + 1) % each();
    shared.turns.fetch_add(1, SeqCst);
    shared.turned.notify_all();
}

fn float(_: &Arc<Shared>, id: usize) {
    let start = id as f64 + 1.0;
    let (mut a, mut b, mut c, mut d) = (start, start + 1.0, start + 2.0, start + 3.0);
    for _ in 0..20_000 {
        a = black_box(a) * 1.5 - a * 0.5;
        b = black_box(b) + 0.25 - 0.25;
        c = black_box(c) * 2.0 / 2.0;
        d = -(-black_box(d));
    }
    assert_eq!((a, b, c, d), (start, start + 1.0, start + 2.0, start + 3.0));
}

fn c_library(_: &Arc<Shared>, id: usize) {
    unsafe extern "C" fn compare(a: *const libc::c_void, b: *const libc::c_void) -> libc::c_int {
        // SAFETY: qsort passes elements.
        unsafe { (*a.cast::<u32>()).cmp(&*b.cast::<u32>()) as libc::c_int }
    }
    let mut numbers: Vec<u32> = (0..3000).map(|i| (i * 7919 + id as u32) % 3001).collect();
    // SAFETY: an array with a matching comparison.
    unsafe { libc::qsort(numbers.as_mut_ptr().cast(), numbers.len(), 4, Some(compare)) };
    assert!(numbers.is_sorted());
    let mut text = [0u8; 64];
    // SAFETY: formats into the buffer, within its length.
    let n =
        unsafe { libc::snprintf(text.as_mut_ptr().cast(), 64, c"%d %.3f".as_ptr(), 42, 1.5f64) };
    assert_eq!(&text[..n as usize], b"42 1.500");
}

/// Recurses to where too little stack is left for the preemption handler, and back.
fn recursion(_: &Arc<Shared>, _: usize) {
    fn down(depth: u32) -> u64 {
        let frame = [black_box(u64::from(depth)); 32];
        if depth == 0 { frame[5] } else { down(depth - 1) + frame[7] }
    }
    let depth = if cfg!(debug_assertions) { 250 } else { 600 };
    assert_eq!(down(depth), u64::from(depth) * u64::from(depth + 1) / 2);
}

fn channel(_: &Arc<Shared>, _: usize) {
    let (tx, rx) = trefoil::chan::bounded::<u64>(3);
    let sender = trefoil::go(move || (0..200).for_each(|i| tx.send(i).unwrap()));
    assert_eq!(rx.iter().sum::<u64>(), 199 * 200 / 2);
    sender.join().unwrap();
}

/// Starts processes and threads.
/// Tasks that compute, yield, block, are awaited, aborted and dropped: polls are preempted
/// anywhere.
fn tasks(shared: &Arc<Shared>, id: usize) {
    let run = |n: u64| {
        let shared = shared.clone();
        async move {
            let mut sum = 0u64;
            for i in 0..rounds(12, 40) {
                sum = (0..500).fold(sum, |sum, j| sum.wrapping_mul(31).wrapping_add(n ^ i ^ j));
                match i % 4 {
                    0 => task::yield_now().await,
                    1 => drop(shared.counter.lock().unwrap()),
                    _ => {}
                }
            }
            sum
        }
    };
    let expected = trefoil::block_on(run(id as u64));
    let mut set = task::JoinSet::new();
    for _ in 0..6 {
        set.spawn(run(id as u64));
    }
    let [aborted, detached] = [task::spawn(run(1)), task::spawn(run(2))];
    let awaits = task::spawn(async move {
        let mut sums = Vec::new();
        while let Some(sum) = set.join_next().await {
            sums.push(sum.unwrap());
        }
        sums
    });
    aborted.abort();
    drop(detached);
    assert_eq!(awaits.join().unwrap(), [expected; 6]);
    let _ = trefoil::block_on(aborted);
}

fn children(shared: &Arc<Shared>, id: usize) {
    let double = std::thread::spawn(move || id * 2);
    assert_eq!(double.join().unwrap(), id * 2);
    if id == 0 && !shared.stop.load(SeqCst) {
        let status = Command::new("true").stdin(Stdio::null()).status().unwrap();
        assert!(status.success());
    }
    std::thread::sleep(Duration::from_millis(2));
}
