//! Preemption at any instruction of user code, and as soon as possible in other code.
//!
//! Goroutines do what programs do (allocate, print, hash, panic, lock, recurse, compute with every
//! kind of register) and check every result, while they are stopped every 50 µs and continue on
//! other Ms.
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_TORTURE_SECS` | the duration in seconds, 6 by default |

// AVX-512 is newer than the oldest compiler that builds the crate; this test needs the newest.
#![allow(clippy::incompatible_msrv)]

mod common;

use common::child_test;
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

/// The number of goroutines of each kind.
const EACH: usize = 3;
/// How much longer a run may last until each worker has finished a round.
const PATIENCE: Duration = Duration::from_secs(15);

fn seconds() -> u64 {
    match std::env::var("TREFOIL_TORTURE_SECS") {
        Ok(text) => text.parse().expect("TREFOIL_TORTURE_SECS is a number"),
        Err(_) => 6,
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

/// The kinds of work; each is called in a loop.
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
    ("avx2", avx2),
    ("avx512", avx512),
    ("x87", x87),
    ("string instructions", string_instructions),
    ("red zone", red_zone),
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
    let (rounds, stats) = rt.run(|| {
        let start = Instant::now();
        let workers: Vec<_> = (0..KINDS.len() * EACH)
            .map(|i| {
                let (name, work) = KINDS[i % KINDS.len()];
                let shared = shared.clone();
                let run = move || {
                    let mut rounds = 0u64;
                    while !shared.stop.load(SeqCst) {
                        work(&shared, i / KINDS.len());
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
        let all_progressed = || shared.progressed.load(SeqCst) == KINDS.len() * EACH;
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
        assert!(n > 0, "{} {i} never finished a round ({rounds:?})", KINDS[i % KINDS.len()].0);
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
    for i in 0..200u32 {
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
    for i in 0..20 {
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
    *turn = (id + 1) % EACH;
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

/// Keeps vectors in registers all the time: a wrong restore changes the sum.
fn avx2(_: &Arc<Shared>, id: usize) {
    #[target_feature(enable = "avx2")]
    fn run(id: i64) -> i64 {
        use std::arch::x86_64::*;
        let mut sums = [_mm256_setzero_si256(); 12];
        let one = _mm256_set1_epi64x(id + 1);
        for _ in 0..3000 {
            for sum in &mut sums {
                *sum = _mm256_add_epi64(*sum, one);
            }
        }
        let total = sums.into_iter().reduce(|a, b| _mm256_add_epi64(a, b)).unwrap();
        let mut out = [0i64; 4];
        // SAFETY: an array of 32 bytes.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), total) };
        out.iter().sum()
    }
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has it.
        let sum = unsafe { run(id as i64) };
        assert_eq!(sum, 12 * 4 * 3000 * (id as i64 + 1));
    }
}

fn avx512(_: &Arc<Shared>, id: usize) {
    #[target_feature(enable = "avx512f")]
    fn run(id: i64) -> i64 {
        use std::arch::x86_64::*;
        let mut sums = [_mm512_setzero_si512(); 24];
        let one = _mm512_set1_epi64(id + 1);
        let mut mask: __mmask8 = 0b1010_1010;
        for _ in 0..3000 {
            for sum in &mut sums {
                // The mask is in a k register.
                *sum = _mm512_mask_add_epi64(*sum, mask, *sum, one);
            }
            mask = black_box(mask);
        }
        sums.into_iter().map(|sum| _mm512_reduce_add_epi64(sum)).sum()
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has it.
        let sum = unsafe { run(id as i64) };
        assert_eq!(sum, 24 * 4 * 3000 * (id as i64 + 1));
    }
}

/// Keeps the x87 stack full for a while.
fn x87(_: &Arc<Shared>, id: usize) {
    let mut out = [0f64; 8];
    let start = id as f64 + 0.5;
    // SAFETY: fills the x87 stack, spins, and empties it again.
    unsafe {
        std::arch::asm!(
            "fld qword ptr [{start}]", "fld1", "fadd st, st(1)", "fld1", "fadd st, st(1)",
            "fld1", "fadd st, st(1)", "fld1", "fadd st, st(1)", "fld1", "fadd st, st(1)",
            "fld1", "fadd st, st(1)", "fld1", "fadd st, st(1)",
            "2:", "dec {n}", "jnz 2b",
            "fstp qword ptr [{out}]", "fstp qword ptr [{out} + 8]",
            "fstp qword ptr [{out} + 16]", "fstp qword ptr [{out} + 24]",
            "fstp qword ptr [{out} + 32]", "fstp qword ptr [{out} + 40]",
            "fstp qword ptr [{out} + 48]", "fstp qword ptr [{out} + 56]",
            start = in(reg) &start,
            out = in(reg) out.as_mut_ptr(),
            n = inout(reg) 30_000u64 => _,
            out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
            out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
        );
    }
    for (i, &x) in out.iter().rev().enumerate() {
        assert_eq!(x, start + i as f64);
    }
}

/// Copies with a repeated instruction, forwards, and backwards with the direction flag set.
fn string_instructions(_: &Arc<Shared>, id: usize) {
    let from: Vec<u8> = (0..40_000u32).map(|i| (i as usize * 31 + id) as u8).collect();
    let mut to = vec![0u8; from.len()];
    for backwards in [false, true] {
        to.fill(0);
        let last = if backwards { from.len() - 1 } else { 0 };
        // SAFETY: copies `len` bytes from one vector to the other, and clears the flag again.
        unsafe {
            let (mut source, mut target) = (from.as_ptr().add(last), to.as_mut_ptr().add(last));
            if backwards {
                std::arch::asm!("std", "rep movsb", "cld", inout("rsi") source,
                    inout("rdi") target, inout("rcx") from.len() => _);
            } else {
                std::arch::asm!("rep movsb", inout("rsi") source, inout("rdi") target,
                    inout("rcx") from.len() => _);
            }
            black_box((&mut source, &mut target));
        }
        assert!(from == to);
    }
}

/// Checks that data of a leaf function below the stack pointer, and its flags, are unchanged.
fn red_zone(_: &Arc<Shared>, id: usize) {
    let wanted = id as u64 * 0x0101_0101 + 7;
    let mut wrong = 0u64;
    // SAFETY: writes only the 128 bytes below the stack pointer, which belong to a leaf function.
    unsafe {
        std::arch::asm!(
            "mov [rsp - 8], {v}", "mov [rsp - 64], {v}", "mov [rsp - 128], {v}",
            "2:",
            "cmp [rsp - 8], {v}", "jne 3f",
            "cmp [rsp - 64], {v}", "jne 3f",
            "cmp [rsp - 128], {v}", "jne 3f",
            "stc", "dec {n}", "jnc 3f", "jnz 2b", // dec keeps the carry
            "jmp 4f",
            "3:", "inc {wrong}",
            "4:",
            v = in(reg) wanted,
            n = inout(reg) 20_000u64 => _,
            wrong = inout(reg) wrong,
        );
    }
    assert_eq!(wrong, 0);
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
/// Tasks that compute, yield, block, are awaited, aborted and dropped: polls are preempted anywhere.
fn tasks(shared: &Arc<Shared>, id: usize) {
    let run = |n: u64| {
        let shared = shared.clone();
        async move {
            let mut sum = 0u64;
            for i in 0..40 {
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
