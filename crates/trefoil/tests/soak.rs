//! All features at once, for a given time.
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_SOAK_SECS` | the duration in seconds, by default 3, in debug builds 1 |
//! | `TREFOIL_SOAK_SEED` | the first seed; every run prints it |
//!
//! A seed fixes what is done, not how the threads interleave: a failure that depends on both needs
//! several runs to show again.

mod common;

use common::{hold_until, watchdog_for, yield_until};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{Read, Write};
use std::panic::panic_any;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::chan::bounded;
use trefoil::net::UnixStream;
use trefoil::time::sleep;
use trefoil::{Builder, JoinHandle, Runtime, blocking, select};

/// Lets one test run at a time: both measure the memory of the process.
static ALONE: Mutex<()> = Mutex::new(());

/// Memory may grow this much over the whole soak, for caches and what the allocator keeps.
const MAY_GROW: u64 = 400 << 20;

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: expected a number")))
}

/// The payload of a panic in the soak: how many goroutines had run in the branch that panics.
struct Expected(u64);

/// Numbers that must be equal at the end.
#[derive(Default)]
struct Counts {
    /// Goroutines whose count is returned to the goroutine that started them.
    counted: AtomicU64,
    detached: AtomicUsize,
    detached_ended: AtomicUsize,
}

/// Does random work and starts children, by the seed. Returns how many goroutines ran in this
/// branch, itself included.
fn run_branch(seed: u64, depth: u32, counts: &Arc<Counts>) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    counts.counted.fetch_add(1, SeqCst);
    let mut ran = 1;
    if rng.random_bool(0.02) {
        trefoil::set_procs(rng.random_range(1..=16));
    }
    for _ in 0..rng.random_range(0..4) {
        trefoil::yield_now();
    }
    wait_for_something(&mut rng);
    if depth > 0 {
        match rng.random_range(0..6) {
            0..=2 => ran += children(&mut rng, depth, counts),
            3 => ran += scoped(&mut rng, depth, counts),
            4 => detached(&mut rng, depth, counts),
            _ => {
                ran += children(&mut rng, depth, counts);
                ran += scoped(&mut rng, depth, counts);
            }
        }
    }
    if rng.random_bool(0.1) {
        yield_some(&mut rng);
        panic_any(Expected(ran));
    }
    ran
}

/// Waits now and then: for a channel, a timer, a socket, or a call that blocks its thread.
fn wait_for_something(rng: &mut StdRng) {
    let mut moment = || Duration::from_micros(rng.random_range(0..1500));
    let (one, other) = (moment(), moment());
    let n = rng.random_range(1..20u8);
    match rng.random_range(0..16) {
        0 => {
            let (tx, rx) = bounded(usize::from(n % 3));
            let sender = trefoil::go(move || (0..n).for_each(|i| tx.send(i).unwrap()));
            let mut got = Vec::new();
            loop {
                select! {
                    recv(rx) -> value => match value { Ok(i) => got.push(i), Err(_) => break },
                    after(common::TOO_LONG) => panic!("no value came"),
                }
            }
            assert_eq!(got, (0..n).collect::<Vec<_>>());
            sender.join().unwrap();
        }
        1 => {
            let start = Instant::now();
            sleep(one);
            let (_open, rx) = bounded::<()>(0);
            assert!(rx.recv_timeout(other).is_err());
            assert!(start.elapsed() >= one + other);
        }
        2 => echo(n, UnixStream::pair()),
        3 => echo(n, std::os::unix::net::UnixStream::pair()),
        4 => blocking(|| sleep_in_kernel(one)),
        5 => sleep_in_kernel(other),
        _ => {}
    }
}

/// Sends bytes and expects them back. Does nothing if no descriptor is available.
fn echo<S: Read + Write + Send + 'static>(n: u8, pair: std::io::Result<(S, S)>) {
    let Ok((mut here, mut there)) = pair else { return };
    let server = trefoil::go(move || {
        let mut byte = [0];
        while there.read(&mut byte).unwrap() == 1 {
            there.write_all(&byte).unwrap();
        }
    });
    for i in 0..n {
        here.write_all(&[i]).unwrap();
        let mut byte = [!i];
        here.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [i]);
    }
    drop(here);
    server.join().unwrap();
}

/// Sleeps in the kernel, unnoticed by the runtime.
fn sleep_in_kernel(time: Duration) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    // SAFETY: reads one timespec.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0) };
}

fn yield_some(rng: &mut StdRng) {
    for _ in 0..rng.random_range(0..8) {
        trefoil::yield_now();
    }
}

/// Returns the count that a branch returned or that its panic carries.
fn count_of(result: std::thread::Result<u64>) -> u64 {
    match result {
        Ok(ran) => ran,
        Err(payload) => match payload.downcast::<Expected>() {
            Ok(expected) => expected.0,
            Err(payload) => std::panic::resume_unwind(payload),
        },
    }
}

fn start(rng: &mut StdRng, depth: u32, counts: &Arc<Counts>) -> JoinHandle<u64> {
    let (seed, counts) = (rng.random(), counts.clone());
    let body = move || run_branch(seed, depth - 1, &counts);
    match rng.random_range(0..12) {
        0 => Builder::new().stack_size(128 << 10 << rng.random_range(0..6)).go(body).unwrap(),
        1 => Builder::new().name(format!("soak {seed:x}")).go(body).unwrap(),
        2 => {
            // Too large to fit into the goroutine itself.
            let ballast = [seed; 40];
            trefoil::go(move || {
                let ran = body();
                assert_eq!(ballast, [seed; 40]);
                ran
            })
        }
        _ => trefoil::go(body),
    }
}

fn children(rng: &mut StdRng, depth: u32, counts: &Arc<Counts>) -> u64 {
    let n = if rng.random_bool(0.01) { 400 } else { rng.random_range(1..8) };
    // So many children have no children of their own.
    let depth = if n == 400 { 1 } else { depth };
    let handles: Vec<_> = (0..n).map(|_| start(rng, depth, counts)).collect();
    yield_some(rng);
    handles.into_iter().map(|h| count_of(h.join())).sum()
}

fn scoped(rng: &mut StdRng, depth: u32, counts: &Arc<Counts>) -> u64 {
    let seeds: Vec<u64> = (0..rng.random_range(1..6)).map(|_| rng.random()).collect();
    let sum = AtomicU64::new(0);
    let unjoined_panic = rng.random_bool(0.2);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        trefoil::scope(|s| {
            let handles: Vec<_> = seeds
                .iter()
                .map(|&seed| (seed % 3 == 0, s.go(move || run_branch(seed, depth - 1, counts))))
                .collect();
            for &seed in &seeds {
                let sum = &sum;
                // The handle is dropped at once: only the scope waits for it.
                s.go(move || {
                    counts.counted.fetch_add(1, SeqCst);
                    (0..seed % 4).for_each(|_| trefoil::yield_now());
                    sum.fetch_add(1, SeqCst);
                });
            }
            if unjoined_panic {
                s.go(|| panic_any(Expected(0)));
            }
            for (in_a_goroutine, h) in handles {
                if in_a_goroutine {
                    let sum = &sum;
                    s.go(move || sum.fetch_add(count_of(h.join()), SeqCst));
                } else {
                    sum.fetch_add(count_of(h.join()), SeqCst);
                }
            }
        });
    }));
    assert_eq!(result.is_err(), unjoined_panic);
    sum.load(SeqCst)
}

fn detached(rng: &mut StdRng, depth: u32, counts: &Arc<Counts>) {
    for _ in 0..rng.random_range(1..5) {
        counts.detached.fetch_add(1, SeqCst);
        let (seed, counts) = (rng.random(), counts.clone());
        let h = trefoil::go(move || {
            // Its own counts: no other goroutine adds up what runs below it.
            let own = Arc::default();
            let h = trefoil::go(move || run_branch(seed, depth.saturating_sub(2), &own));
            let ran = count_of(h.join());
            counts.detached_ended.fetch_add(1, SeqCst);
            vec![ran; 3]
        });
        if rng.random_bool(0.5) {
            trefoil::yield_now();
        }
        drop(h);
    }
}

/// Runs one tree of goroutines and checks the counts.
fn round(seed: u64, rt: &Runtime) {
    let counts = Arc::new(Counts::default());
    let ran = rt.run(|| {
        let ours = counts.clone();
        count_of(trefoil::go(move || run_branch(seed, 4, &ours)).join())
    });
    assert_eq!(ran, counts.counted.load(SeqCst), "goroutines that ran, seed {seed}");
    hold_until("the detached goroutines", || {
        counts.detached.load(SeqCst) == counts.detached_ended.load(SeqCst)
    });
}

/// Plain threads start trees of goroutines and single ones on several runtimes at the same time.
#[test]
fn random_goroutine_trees_return_right_results_and_leave_no_memory() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let length =
        Duration::from_secs(number_from("TREFOIL_SOAK_SECS").unwrap_or(common::rounds(1, 3)));
    let _watchdog = watchdog_for(length + common::TOO_LONG);
    let seed = number_from("TREFOIL_SOAK_SEED").unwrap_or_else(rand::random);
    eprintln!("soak: TREFOIL_SOAK_SEED={seed} TREFOIL_SOAK_SECS={}", length.as_secs());
    quiet_panics();

    let end = Instant::now() + length;
    let mut rng = StdRng::seed_from_u64(seed);
    let shared: Vec<_> = [1, 2, 5]
        .map(|n| Arc::new(Runtime::builder().procs(n).build().unwrap()))
        .into_iter()
        .collect();
    // Caches fill in the first rounds; growth counts after them.
    (0..20).for_each(|_| round(rng.random(), &shared[1]));
    let rss = common::rss();
    let rounds = Arc::new(AtomicU64::new(0));

    std::thread::scope(|s| {
        for (i, rt) in shared.iter().enumerate() {
            let seed: u64 = rng.random();
            // One tree at a time on each runtime.
            s.spawn({
                let rounds = rounds.clone();
                move || {
                    let mut rng = StdRng::seed_from_u64(seed);
                    while Instant::now() < end {
                        round(rng.random(), rt);
                        rounds.fetch_add(1, SeqCst);
                    }
                }
            });
            // Goroutines that a thread starts in it and in the next runtime.
            let next = &shared[(i + 1) % shared.len()];
            let seed: u64 = rng.random();
            s.spawn(move || start_from_outside(seed, rt, next, end));
        }
        // Short-lived runtimes, some dropped while they work.
        let seed: u64 = rng.random();
        s.spawn(move || short_lived(seed, end));
    });

    for rt in &shared {
        rt.run(|| {
            yield_until("all goroutines to end", || trefoil::num_goroutines() == 1);
            let stats = trefoil::debug::stats();
            assert_eq!((stats.io_waiters, stats.threads_without_p), (0, 0), "{stats:?}");
        });
    }
    let grown = common::rss().saturating_sub(rss);
    eprintln!("soak: {} rounds, memory grew by {} MiB", rounds.load(SeqCst), grown >> 20);
    assert!(grown < MAY_GROW, "memory grew by {grown} bytes, seed {seed}");
}

fn start_from_outside(seed: u64, rt: &Arc<Runtime>, next: &Arc<Runtime>, end: Instant) {
    let mut rng = StdRng::seed_from_u64(seed);
    while Instant::now() < end {
        let n = rng.random_range(1..40u64);
        let handles: Vec<_> = (0..n)
            .map(|i| {
                let next = next.clone();
                let cross = rng.random_bool(0.2);
                rt.go(move || {
                    trefoil::yield_now();
                    if cross { next.go(move || i).unwrap().join().unwrap() } else { i }
                })
                .unwrap()
            })
            .collect();
        let mut sum = 0;
        for (i, h) in handles.into_iter().enumerate() {
            if i % 5 == 4 {
                drop(h);
                sum += i as u64;
            } else {
                sum += h.join().unwrap();
            }
        }
        assert_eq!(sum, n * (n - 1) / 2);
    }
}

fn short_lived(seed: u64, end: Instant) {
    let mut rng = StdRng::seed_from_u64(seed);
    while Instant::now() < end {
        let rt = Runtime::builder().procs(rng.random_range(1..8)).build().unwrap();
        // Whole rounds leave nothing behind. The others leak a little, so they are small and few.
        if rng.random_bool(0.9) {
            round(rng.random(), &rt);
        } else {
            for _ in 0..rng.random_range(1..4) {
                drop(rt.go(|| {
                    loop {
                        trefoil::yield_now();
                    }
                }));
            }
            rt.run(|| (0..10).for_each(|_| trefoil::yield_now()));
        }
        drop(rt);
        std::thread::sleep(Duration::from_millis(rng.random_range(0..10)));
    }
}

/// Hides the panics that are part of the soak.
fn quiet_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let scope = info.payload().downcast_ref() == Some(&"a scoped goroutine panicked");
        if !scope && !info.payload().is::<Expected>() {
            default(info);
        }
    }));
}

/// The memory that a million goroutines need.
const FOR_A_MILLION: u64 = 14 << 30;

#[test]
fn a_million_goroutines_live_at_once() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let _watchdog = watchdog_for(Duration::from_secs(180));
    let available = common::proc_number("/proc/meminfo", "MemAvailable") << 10;
    let n: u64 = match (cfg!(debug_assertions), available >= FOR_A_MILLION) {
        (false, true) => 1_000_000,
        (true, _) => {
            let n = common::rounds(30_000, 100_000);
            eprintln!("soak: {n} goroutines in a debug build");
            n
        }
        (false, false) => {
            let gib = available >> 30;
            eprintln!("soak: only {gib} GiB of memory available, so 100,000 instead");
            100_000
        }
    };
    trefoil::run(|| {
        let (gate, running) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(1)));
        let open = gate.clone();
        // The first waits for the gate, each other goroutine for its predecessor.
        let mut last = trefoil::go(move || {
            yield_until_open(&open);
            1
        });
        for _ in 1..n {
            let (previous, running) = (last, running.clone());
            last = trefoil::go(move || {
                running.fetch_add(1, SeqCst);
                previous.join().unwrap() + 1
            });
        }
        // Wait until all run: a goroutine gets its stack when it first runs.
        while running.load(SeqCst) < n {
            trefoil::yield_now();
        }
        assert_eq!(trefoil::num_goroutines() as u64, n + 1);
        gate.store(true, SeqCst);
        assert_eq!(last.join().unwrap(), n);
        assert_eq!(trefoil::num_goroutines(), 1);
    });
}

fn yield_until_open(gate: &AtomicBool) {
    while !gate.load(SeqCst) {
        trefoil::yield_now();
        common::pause();
    }
}
