//! Everything at once, for as long as you say.
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_SOAK_SECS` | how long `everything_at_once` goes on, 3 by default |
//! | `TREFOIL_SOAK_SEED` | the seed to begin with, printed by every run |
//!
//! A seed fixes what is done, not how the threads interleave: a failure that depends on both shows
//! again with some patience.

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

/// One at a time: both look at the memory of the process.
static ALONE: Mutex<()> = Mutex::new(());

/// Memory may grow this much over the whole soak: caches, and what the allocator keeps.
const MAY_GROW: u64 = 400 << 20;

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: expected a number")))
}

// --- Everything at once --------------------------------------------------------------------------

/// What a panic in the soak carries: how many goroutines had run in the branch that panics.
struct Expected(u64);

/// Counts what must come out right.
#[derive(Default)]
struct Books {
    /// Goroutines whose count is returned to whoever started them.
    counted: AtomicU64,
    detached: AtomicUsize,
    detached_ended: AtomicUsize,
}

/// A goroutine's life: random work and children, by the seed. Returns how many goroutines ran in this
/// branch, itself included.
fn live(seed: u64, depth: u32, books: &Arc<Books>) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    books.counted.fetch_add(1, SeqCst);
    let mut ran = 1;
    if rng.random_bool(0.02) {
        trefoil::set_procs(rng.random_range(1..=16));
    }
    for _ in 0..rng.random_range(0..4) {
        trefoil::yield_now();
    }
    errand(&mut rng);
    if depth > 0 {
        match rng.random_range(0..6) {
            0..=2 => ran += children(&mut rng, depth, books),
            3 => ran += scoped(&mut rng, depth, books),
            4 => detached(&mut rng, depth, books),
            _ => {
                ran += children(&mut rng, depth, books);
                ran += scoped(&mut rng, depth, books);
            }
        }
    }
    if rng.random_bool(0.1) {
        yield_some(&mut rng);
        panic_any(Expected(ran));
    }
    ran
}

/// Something to wait for, now and then: a channel, a timer, a socket, a call that blocks its thread.
fn errand(rng: &mut StdRng) {
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
                    after(common::TOO_LONG) => panic!("nothing came"),
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
        4 => blocking(|| nap(one)),
        5 => nap(other),
        _ => {}
    }
}

/// Bytes there and back. Without a descriptor to be had, none.
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

/// Sleeps in the kernel, unseen by the runtime.
fn nap(time: Duration) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    // SAFETY: reads one timespec, ours.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0) };
}

fn yield_some(rng: &mut StdRng) {
    for _ in 0..rng.random_range(0..8) {
        trefoil::yield_now();
    }
}

/// What a branch returned, or carried out in its panic.
fn settle(result: std::thread::Result<u64>) -> u64 {
    match result {
        Ok(ran) => ran,
        Err(payload) => match payload.downcast::<Expected>() {
            Ok(expected) => expected.0,
            Err(payload) => std::panic::resume_unwind(payload),
        },
    }
}

fn start(rng: &mut StdRng, depth: u32, books: &Arc<Books>) -> JoinHandle<u64> {
    let (seed, books) = (rng.random(), books.clone());
    let body = move || live(seed, depth - 1, &books);
    match rng.random_range(0..12) {
        0 => Builder::new().stack_size(128 << 10 << rng.random_range(0..6)).go(body).unwrap(),
        1 => Builder::new().name(format!("soak {seed:x}")).go(body).unwrap(),
        2 => {
            // Too large for the goroutine itself.
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

fn children(rng: &mut StdRng, depth: u32, books: &Arc<Books>) -> u64 {
    let n = if rng.random_bool(0.01) { 400 } else { rng.random_range(1..8) };
    // A storm has no grandchildren: there are enough.
    let depth = if n == 400 { 1 } else { depth };
    let handles: Vec<_> = (0..n).map(|_| start(rng, depth, books)).collect();
    yield_some(rng);
    handles.into_iter().map(|h| settle(h.join())).sum()
}

fn scoped(rng: &mut StdRng, depth: u32, books: &Arc<Books>) -> u64 {
    let seeds: Vec<u64> = (0..rng.random_range(1..6)).map(|_| rng.random()).collect();
    let sum = AtomicU64::new(0);
    let unjoined_panic = rng.random_bool(0.2);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        trefoil::scope(|s| {
            let handles: Vec<_> = seeds
                .iter()
                .map(|&seed| (seed % 3 == 0, s.go(move || live(seed, depth - 1, books))))
                .collect();
            for &seed in &seeds {
                let sum = &sum;
                // Dropped at once: only the scope waits for it.
                s.go(move || {
                    books.counted.fetch_add(1, SeqCst);
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
                    s.go(move || sum.fetch_add(settle(h.join()), SeqCst));
                } else {
                    sum.fetch_add(settle(h.join()), SeqCst);
                }
            }
        });
    }));
    assert_eq!(result.is_err(), unjoined_panic);
    sum.load(SeqCst)
}

fn detached(rng: &mut StdRng, depth: u32, books: &Arc<Books>) {
    for _ in 0..rng.random_range(1..5) {
        books.detached.fetch_add(1, SeqCst);
        let (seed, books) = (rng.random(), books.clone());
        let h = trefoil::go(move || {
            // Its own books: nobody adds up what runs below it.
            let own = Arc::default();
            let h = trefoil::go(move || live(seed, depth.saturating_sub(2), &own));
            let ran = settle(h.join());
            books.detached_ended.fetch_add(1, SeqCst);
            vec![ran; 3]
        });
        if rng.random_bool(0.5) {
            trefoil::yield_now();
        }
        drop(h);
    }
}

/// One tree of goroutines, and what must hold after it.
fn round(seed: u64, rt: &Runtime) {
    let books = Arc::new(Books::default());
    let ran = rt.run(|| {
        let ours = books.clone();
        settle(trefoil::go(move || live(seed, 4, &ours)).join())
    });
    assert_eq!(ran, books.counted.load(SeqCst), "goroutines that ran, seed {seed}");
    hold_until("the detached ones", || {
        books.detached.load(SeqCst) == books.detached_ended.load(SeqCst)
    });
}

/// Two kinds of storms on several runtimes, by plain threads that spawn and join at the same time.
#[test]
fn everything_at_once() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let length = Duration::from_secs(number_from("TREFOIL_SOAK_SECS").unwrap_or(3));
    let _w = watchdog_for(length + common::TOO_LONG);
    let seed = number_from("TREFOIL_SOAK_SEED").unwrap_or_else(rand::random);
    eprintln!("soak: TREFOIL_SOAK_SEED={seed} TREFOIL_SOAK_SECS={}", length.as_secs());
    quiet_panics();

    let end = Instant::now() + length;
    let mut rng = StdRng::seed_from_u64(seed);
    let shared: Vec<_> = [1, 2, 5]
        .map(|n| Arc::new(Runtime::builder().procs(n).build().unwrap()))
        .into_iter()
        .collect();
    // Caches fill in the first rounds; growth counts from then on.
    (0..20).for_each(|_| round(rng.random(), &shared[1]));
    let rss = common::rss();
    let rounds = Arc::new(AtomicU64::new(0));

    std::thread::scope(|s| {
        for (i, rt) in shared.iter().enumerate() {
            let seed: u64 = rng.random();
            // A tree at a time on each …
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
            // … and from outside goroutines into it, and into the next one.
            let next = &shared[(i + 1) % shared.len()];
            let seed: u64 = rng.random();
            s.spawn(move || outsider(seed, rt, next, end));
        }
        // Short-lived runtimes beside them, some dropped in the middle of their work.
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

fn outsider(seed: u64, rt: &Arc<Runtime>, next: &Arc<Runtime>, end: Instant) {
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
        // Whole rounds leave nothing behind; the others leak a little, so they are small and few.
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

/// The panics of the soak are part of it; any other is shown.
fn quiet_panics() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let scope = info.payload().downcast_ref() == Some(&"a scoped goroutine panicked");
        if !scope && !info.payload().is::<Expected>() {
            default(info);
        }
    }));
}

// --- Alive at once -------------------------------------------------------------------------------

/// Memory to have at hand for a million.
const FOR_A_MILLION: u64 = 14 << 30;

#[test]
fn million_alive() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let _w = watchdog_for(Duration::from_secs(180));
    let available = common::proc_number("/proc/meminfo", "MemAvailable") << 10;
    let n: u64 = match (cfg!(debug_assertions), available >= FOR_A_MILLION) {
        (false, true) => 1_000_000,
        (true, _) => {
            eprintln!("million_alive: 100,000 in a debug build");
            100_000
        }
        (false, false) => {
            let gib = available >> 30;
            eprintln!("million_alive: only {gib} GiB of memory available, so 100,000 instead");
            100_000
        }
    };
    trefoil::run(|| {
        let (gate, running) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(1)));
        let open = gate.clone();
        // The first waits for the gate, each other one for its predecessor.
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
        // Started is not enough: a goroutine has its stack only once it runs.
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
