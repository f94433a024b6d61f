//! Nobody stalls: preemption by signal, `no_preempt`. Statements m24 to m26 of those that `mission.rs` begins, and what
//! Go's own tests ask. (Threads that block are in `blocking.rs`.)
//!
//! Blocking calls are made with a bare `syscall` instruction: nothing between the goroutine and the kernel
//! can see them. What looks at the whole process is a child (`common::Child`).

mod common;

use common::raw::{pipe, raw, raw_read, raw_sleep};
use common::{
    MS, child_test, cpu_time, flag, hog, hogs, join_all, median, ms, once_in_five, runtime, spin,
    ticks, watchdog, yield_until,
};
use std::cell::{Cell, RefCell};
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::chan::{bounded, unbounded};
use trefoil::net::UnixStream;
use trefoil::time::{sleep, sleep_until};
use trefoil::{blocking, debug, go, lock_os_thread, no_preempt, yield_now};

/// Never calls anything.
fn endless() -> ! {
    #[allow(clippy::empty_loop)]
    loop {}
}

// ---- Preemption ----

/// m24: channel operations, I/O that waits, sleep, explicit yield and other calls of the runtime are scheduling points,
/// each by itself, also where no signal helps. (A lock that is free, and I/O that need not wait, are none: they cost
/// too little to ask.)
///
/// Broken, the goroutine that waits would never run: a panic after 20 s.
#[test]
fn m24_cooperative_points() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").succeed());
    let (into, _open) = unbounded();
    // Usually more than can be taken before the slice is over; then the end of it.
    let (fill, full) = unbounded();
    (0..200_000).for_each(|_| fill.send(1).unwrap());
    drop(fill);
    let (turn, turned) = bounded(1);
    let (_open, empty) = bounded::<u8>(1);
    // Nobody is at the other end: each call waits, for a moment.
    let moment = Some(Duration::from_micros(1));
    let (socket, _open) = UnixStream::pair().unwrap();
    socket.set_read_timeout(moment).unwrap();
    let (std_socket, _open) = std::os::unix::net::UnixStream::pair().unwrap();
    std_socket.set_read_timeout(moment).unwrap();
    let (stuffed, _open) = UnixStream::pair().unwrap();
    stuffed.set_write_timeout(Some(MS)).unwrap();
    while (&stuffed).write(&[0; 4096]).is_ok() {}
    let timed_out = |result: std::io::Result<usize>| assert!(result.is_err(), "{result:?}");
    let points: &[(&str, &(dyn Fn() + Sync))] = &[
        ("yield", &yield_now),
        ("sleep", &|| sleep(Duration::from_nanos(1))),
        ("send", &|| into.send(1).unwrap()),
        ("receive", &|| _ = full.recv()),
        ("send and receive", &|| {
            turn.send(1).unwrap();
            turned.recv().unwrap();
        }),
        ("a receive that finds nothing", &|| assert!(empty.try_recv().is_err())),
        ("read", &|| timed_out((&socket).read(&mut [0]))),
        ("write", &|| timed_out((&stuffed).write(&[0; 4096]))),
        ("std's read", &|| timed_out((&std_socket).read(&mut [0]))),
        ("spawn", &|| drop(go(|| ()))),
        ("join", &|| go(|| ()).join().unwrap()),
        ("blocking", &|| blocking(|| ())),
    ];
    for (name, point) in points {
        runtime(1).run(|| {
            let ran = flag();
            let ours = ran.clone();
            go(move || ours.store(true, SeqCst));
            let start = Instant::now();
            while !ran.load(SeqCst) {
                point();
                assert!(start.elapsed() < Duration::from_secs(20), "{name} lets nobody run");
            }
            assert_eq!(debug::stats().preempt_signals, 0);
        });
    }
}

#[inline(never)]
fn a_call(n: u64) -> u64 {
    black_box(n) + 1
}

/// Frames of 16 KiB, five deep.
#[inline(never)]
fn big_frames(depth: u32) -> u64 {
    let frame = black_box([u64::from(depth); 2048]);
    if depth == 0 { frame[7] } else { big_frames(depth - 1) + frame[1000] }
}

/// m25, and Go's: on one P, loops with no calls, with calls, with big frames, with malloc, and the empty one do not
/// keep main from going on; `run` returns while they are left, and then they stop using the CPU.
#[test]
fn m25_endless_loops_starve_nobody() {
    child_test!();
    let kinds: [(&str, fn()); 5] = [
        ("empty", || endless()),
        ("no calls", || {
            let mut n = 0u64;
            loop {
                n = black_box(n.wrapping_mul(3) + 1);
            }
        }),
        ("calls", || {
            let mut n = 0;
            loop {
                n = a_call(n);
            }
        }),
        ("big frames", || {
            loop {
                black_box(big_frames(5));
            }
        }),
        ("malloc", || {
            loop {
                black_box(vec![1u8; black_box(5000)]);
            }
        }),
    ];
    for procs in [1, 2] {
        for (name, body) in kinds {
            runtime(procs).run(|| {
                (0..3).for_each(|_| drop(go(body)));
                let start = Instant::now();
                for _ in 0..5 {
                    sleep(MS);
                    yield_now();
                    assert_eq!(go(|| 7).join().unwrap(), 7);
                }
                let took = start.elapsed();
                assert!(took < Duration::from_secs(5), "{name}, {procs} Ps: {took:?}");
                assert!(debug::stats().preemptions > 0, "{name}: {:?}", debug::stats());
            });
        }
    }
    // Runtimes are gone, goroutines are left: nobody runs them.
    let start = Instant::now();
    while !ms().is_empty() {
        assert!(start.elapsed() < Duration::from_secs(10), "{} threads are left", ms().len());
        std::thread::sleep(10 * MS);
    }
    let before = cpu_time();
    std::thread::sleep(200 * MS);
    let used = cpu_time() - before;
    assert!(used < 20 * MS, "{used:?} of CPU time in 200 ms");
}

/// m25: a turn of a loop that never calls anything is about 10 ms long, when others wait.
///
/// Broken, turns would be far shorter (switches for nothing), or as long as the kernel or a tick of sysmon's allows.
#[test]
fn m25_a_turn_of_an_endless_loop() {
    let _w = watchdog();
    const TURNS: usize = 40;
    runtime(1).run(|| {
        let running = Arc::new(AtomicUsize::new(0));
        let begins: Arc<Vec<AtomicU64>> = Arc::new((0..=TURNS).map(|_| 0.into()).collect());
        let (next, start) = (Arc::new(AtomicUsize::new(0)), Instant::now());
        // Main is among those who wait for them: a wake-up would shorten somebody's turn.
        join_all((1..=3).map(|me| {
            let (running, begins, next) = (running.clone(), begins.clone(), next.clone());
            go(move || {
                while next.load(SeqCst) <= TURNS {
                    // A turn begins where another one ran before, whatever the OS has done with the thread.
                    if running.swap(me, SeqCst) != me
                        && let Some(begin) = begins.get(next.fetch_add(1, SeqCst))
                    {
                        begin.store(start.elapsed().as_nanos() as u64, SeqCst);
                    }
                }
            })
        }));
        let begins = begins.iter().map(|begin| Duration::from_nanos(begin.load(SeqCst)));
        let begins: Vec<_> = begins.collect();
        let mut turns: Vec<_> = begins.windows(2).map(|pair| pair[1] - pair[0]).collect();
        turns.sort();
        let (quarter, middle) = (turns[TURNS / 4], turns[TURNS / 2]);
        println!("a quarter within {quarter:?}, half within {middle:?}");
        // A busy machine makes turns longer, of the loops and of sysmon; not all of them, and none shorter.
        assert!(middle >= 8 * MS && quarter < 30 * MS, "{turns:?}");
    });
}

/// m25: 10,000 endless loops on 2 Ps need no 10,000 threads, and main gets its turns.
#[test]
fn m25_ten_thousand_endless_loops() {
    child_test!();
    runtime(2).run(|| {
        // Else starting them may take a slice, and it queues behind them as one of them.
        let held = trefoil::no_preempt();
        (0..10_000).for_each(|_| drop(go(|| endless())));
        sleep(MS);
        drop(held);
        let mut turns = Vec::new();
        for _ in 0..50 {
            let start = Instant::now();
            sleep(MS);
            turns.push(start.elapsed());
        }
        let threads = ms().len();
        assert!(threads < 20, "{threads} threads");
        let (middle, worst) = (median(turns.clone()), *turns.iter().max().unwrap());
        println!("main's turns of 1 ms: median {middle:?}, worst {worst:?}; {threads} threads");
        assert!(worst < Duration::from_secs(10), "{turns:?}");
        // And each of those that began goes on: a fair round takes 10 ms each.
        assert_eq!(debug::stats().goroutines, 10_001);
    });
}

/// m26: stopped in the middle of malloc, with a std Mutex in its hands, with a borrowed thread-local, during
/// unwinding: all is as it was when it goes on.
#[test]
fn m26_stopped_in_awkward_places() {
    thread_local!(static OWN: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) });
    struct Slow<'a>(&'a Cell<u32>);
    impl Drop for Slow<'_> {
        fn drop(&mut self) {
            spin(Duration::from_micros(300));
            assert!(std::thread::panicking());
            self.0.set(self.0.get() + 1);
        }
    }
    child_test!(|child| child.env("TREFOIL_DEBUG", "slice=50").succeed());
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let stop = flag();
            let shared = Arc::new(Mutex::new((0u64, 0u64)));
            let work = |i: u64, shared: &Mutex<(u64, u64)>| {
                assert!(!std::thread::panicking(), "another one's panic");
                match i % 4 {
                    0 => OWN.with_borrow_mut(|own| {
                        own.clear();
                        own.extend((0..50).map(|k| k * i));
                        spin(Duration::from_micros(200));
                        assert!(own.iter().enumerate().all(|(k, &n)| n == k as u64 * i));
                    }),
                    1 => {
                        let mut pair = shared.lock().unwrap();
                        pair.0 += 1;
                        spin(Duration::from_micros(100));
                        pair.1 += 1;
                        assert_eq!(pair.0, pair.1);
                        drop(pair);
                        spin(Duration::from_micros(100));
                    }
                    2 => {
                        let drops = Cell::new(0);
                        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                            let _slow = (Slow(&drops), Slow(&drops));
                            std::panic::resume_unwind(Box::new(i));
                        }));
                        assert_eq!(*caught.unwrap_err().downcast::<u64>().unwrap(), i);
                        assert_eq!(drops.get(), 2);
                    }
                    _ => {
                        let blocks: Vec<Vec<u8>> =
                            (1..200).map(|k| vec![k as u8; 37 * k]).collect();
                        for (k, block) in blocks.iter().enumerate() {
                            assert!(block.iter().all(|&b| b == (k + 1) as u8));
                        }
                    }
                }
            };
            let rounds: Arc<[AtomicU64; 12]> = Arc::default();
            let workers: Vec<_> = (0..12)
                .map(|i| {
                    let (stop, shared, rounds) = (stop.clone(), shared.clone(), rounds.clone());
                    go(move || {
                        while !stop.load(SeqCst) {
                            work(i, &shared);
                            rounds[i as usize].fetch_add(1, SeqCst);
                        }
                    })
                })
                .collect();
            sleep(200 * MS);
            let start = Instant::now();
            while rounds.iter().any(|n| n.load(SeqCst) == 0) || debug::stats().preemptions < 50 {
                let late = start.elapsed() > Duration::from_secs(15);
                assert!(!late, "{rounds:?}, {:?}", debug::stats());
                sleep(10 * MS);
            }
            stop.store(true, SeqCst);
            join_all(workers);
        });
    }
}

/// Who waits for a lock of std's gets it, although its holder takes it again at once and uses up every slice
/// with it in hand: threads share it evenly, also on one CPU.
#[test]
fn waiters_for_a_std_mutex_are_not_starved() {
    let _w = watchdog();
    runtime(1).run(|| {
        let (stop, lock) = (flag(), Arc::new(Mutex::new(())));
        let rounds: Arc<[AtomicU64; 3]> = Arc::default();
        let work = |i: usize| {
            let (stop, lock, rounds) = (stop.clone(), lock.clone(), rounds.clone());
            go(move || {
                while !stop.load(SeqCst) {
                    let held = lock.lock().unwrap();
                    spin(MS / 10);
                    drop(held);
                    rounds[i].fetch_add(1, SeqCst);
                }
            })
        };
        let workers: Vec<_> = (0..3).map(work).collect();
        sleep(Duration::from_secs(2));
        stop.store(true, SeqCst);
        join_all(workers);
        let least = rounds.iter().map(|n| n.load(SeqCst)).min().unwrap();
        assert!(least > 50, "{rounds:?}");
    });
}

/// Under the guard a goroutine is not preempted; guards nest; afterwards it is.
#[test]
fn no_preempt_holds_and_nests() {
    let _w = watchdog();
    once_in_five(|| {
        runtime(1).run(|| {
            let ran = flag();
            let ours = ran.clone();
            let outer = no_preempt();
            let other = go(move || ours.store(true, SeqCst));
            spin(15 * MS);
            let inner = no_preempt();
            spin(5 * MS);
            drop(inner);
            // A call of the runtime does not stop it either.
            drop(go(|| ()));
            spin(15 * MS);
            let during = ran.load(SeqCst);
            drop(outer);
            hog(&ran);
            other.join().unwrap();
            if during { Err("it was preempted".into()) } else { Ok(()) }
        })
    });
    // On a plain thread there is nothing to hold.
    drop(no_preempt());
}

/// A guard that was forgotten ends with its goroutine: the next one that gets the same G is preempted.
#[test]
fn a_forgotten_no_preempt_guard_ends_with_its_goroutine() {
    let _w = watchdog();
    runtime(1).run(|| {
        for _ in 0..5 {
            go(|| std::mem::forget(no_preempt())).join().unwrap();
            drop(go(|| std::mem::forget(no_preempt())));
            yield_now();
            let stop = flag();
            let loops = hogs(3, &stop);
            sleep(MS);
            stop.store(true, SeqCst);
            join_all(loops);
        }
    });
}

/// Parking with the guard in hand is allowed, and it still holds afterwards.
#[test]
fn no_preempt_survives_a_park() {
    let _w = watchdog();
    once_in_five(|| {
        runtime(1).run(|| {
            let guard = no_preempt();
            let counter = Arc::new(AtomicU64::new(0));
            let (ours, stop) = (counter.clone(), flag());
            let stopped = stop.clone();
            let other = go(move || {
                while !stopped.load(SeqCst) {
                    ours.fetch_add(1, SeqCst);
                }
            });
            sleep(MS);
            let before = counter.load(SeqCst);
            assert!(before > 0);
            spin(30 * MS);
            let moved = counter.load(SeqCst) - before;
            drop(guard);
            stop.store(true, SeqCst);
            other.join().unwrap();
            if moved == 0 { Ok(()) } else { Err(format!("the other ran {moved} rounds")) }
        })
    });
}

/// Ticks come in time beside hogs that never call the runtime.
#[test]
fn a_ticker_beside_four_hogs() {
    child_test!();
    for procs in [1, 2] {
        once_in_five(|| {
            runtime(procs).run(|| {
                let stop = flag();
                let loops = hogs(4, &stop);
                let late = ticks(300);
                stop.store(true, SeqCst);
                join_all(loops);
                let (middle, worst) = (median(late.clone()), late.iter().max().unwrap());
                println!("{procs} Ps, 4 hogs: median {middle:?}, worst {worst:?}");
                if middle < 5 * MS { Ok(()) } else { Err(format!("median {middle:?}")) }
            })
        });
    }
}

/// Who is inside libc all the time is put off, because it may hold a lock there; but for milliseconds, not for a
/// hundred of them.
#[test]
fn loops_inside_libc_take_turns() {
    child_test!();
    once_in_five(|| {
        runtime(1).run(|| {
            let stop = flag();
            let loops: Vec<_> = (0..2)
                .map(|i| {
                    let stop = stop.clone();
                    go(move || {
                        let mut buffer = vec![0u8; 8 << 20];
                        while !stop.load(SeqCst) {
                            // SAFETY: our own buffer.
                            unsafe { libc::memset(buffer.as_mut_ptr().cast(), i, buffer.len()) };
                        }
                    })
                })
                .collect();
            let mut late = Vec::new();
            for _ in 0..20 {
                let due = Instant::now() + MS;
                sleep_until(due);
                late.push(due.elapsed());
            }
            stop.store(true, SeqCst);
            join_all(loops);
            let middle = median(late);
            println!("median {middle:?}");
            if middle < 25 * MS { Ok(()) } else { Err(format!("median {middle:?}")) }
        })
    });
}

/// `set_procs` shrinks beside endless loops: no more than that many run at once.
#[test]
fn fewer_procs_beside_endless_loops() {
    child_test!();
    runtime(8).run(|| {
        let progress: Vec<_> = (0..8).map(|_| Arc::new(AtomicU64::new(0))).collect();
        for counter in &progress {
            let counter = counter.clone();
            go(move || {
                loop {
                    counter.fetch_add(1, SeqCst);
                }
            });
        }
        yield_until("all to run", || progress.iter().all(|n| n.load(SeqCst) > 0));
        for n in [4, 1, 8, 2, 1] {
            trefoil::set_procs(n);
            // Our own P is one of them; the others are the loops'.
            let start = Instant::now();
            loop {
                sleep(20 * MS);
                let running = running_ms();
                if running <= n {
                    break;
                }
                let waited = start.elapsed();
                assert!(waited < Duration::from_secs(10), "{running} run at once on {n} Ps");
            }
            let samples: Vec<_> = (0..40)
                .map(|_| {
                    spin(MS);
                    running_ms()
                })
                .collect();
            let over = samples.iter().filter(|&&running| running > n).count();
            // A thread that just lost its P may still be on its way to bed.
            assert!(over <= samples.len() / 4, "{n} Ps: {samples:?}");
        }
        // Each of them still gets its turns, on the one P that is left.
        let before: Vec<_> = progress.iter().map(|n| n.load(SeqCst)).collect();
        let start = Instant::now();
        while !progress.iter().zip(&before).all(|(n, &before)| n.load(SeqCst) > before) {
            assert!(start.elapsed() < Duration::from_secs(20), "someone starves");
            sleep(10 * MS);
        }
    });
}

/// How many of the runtime's threads want a CPU.
fn running_ms() -> usize {
    let wants_cpu = |tid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat"));
        stat.is_ok_and(|s| s.rsplit(')').next().unwrap_or("").trim_start().starts_with('R'))
    };
    ms().iter().filter(|tid| wants_cpu(tid)).count()
}

#[inline(never)]
fn spin_in_here(stop: &AtomicBool, begun: &AtomicBool) {
    begun.store(true, SeqCst);
    hog(stop);
    black_box(stop);
}

/// A dump shows where a preempted goroutine was stopped.
#[test]
fn a_dump_shows_where_a_preempted_goroutine_is() {
    let _w = watchdog();
    runtime(1).run(|| {
        let (stop, begun) = (flag(), flag());
        let (ours, started) = (stop.clone(), begun.clone());
        let spinner = go(move || spin_in_here(&ours, &started));
        // We run, on the only P: so it was stopped.
        while !begun.load(SeqCst) {
            sleep(MS);
        }
        // A dump reads files: it blocks, and the other runs meanwhile.
        let start = Instant::now();
        loop {
            let text = debug::dump();
            let head = format!("goroutine {} [runnable]:", spinner.id());
            let shown = text.find(&head).and_then(|at| text[at..].split("\n\n").next());
            if shown.is_some_and(|shown| shown.contains("spin_in_here")) {
                break;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{text}");
        }
        stop.store(true, SeqCst);
        spinner.join().unwrap();
    });
}

/// `TREFOIL_DEBUG=asyncpreemptoff=1`: a loop without calls keeps its P, as in Go.
#[test]
fn asyncpreemptoff_leaves_loops_alone() {
    child_test!(|child| {
        // A page that the kernel must wait for blocks the loop, and it loses its P.
        once_in_five(|| {
            let out = child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").output();
            if out.status.success() { Ok(()) } else { Err(format!("{out:?}")) }
        });
    });
    let (stop, began, other) = (flag(), flag(), flag());
    let seen = std::thread::scope(|s| {
        let watcher = s.spawn(|| {
            while !began.load(SeqCst) {
                std::thread::yield_now();
            }
            std::thread::sleep(100 * MS);
            let seen = other.load(SeqCst);
            stop.store(true, SeqCst);
            seen
        });
        runtime(1).run(|| {
            let ours = other.clone();
            let second = go(move || ours.store(true, SeqCst));
            began.store(true, SeqCst);
            hog(&stop);
            assert!(!other.load(SeqCst));
            second.join().unwrap();
            assert_eq!(debug::stats().preemptions, 0);
            assert_eq!(debug::stats().preempt_signals, 0);
        });
        watcher.join().unwrap()
    });
    assert!(!seen, "it was preempted");
}

// ---- Signals ----

static URGENT: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_urgent(signal: libc::c_int) {
    URGENT.fetch_add(usize::from(signal == libc::SIGURG), SeqCst);
}

extern "C" fn on_urgent_with_info(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel's information.
    let number = unsafe { (*info).si_signo };
    let right = signal == libc::SIGURG && number == signal && !context.is_null();
    URGENT.fetch_add(usize::from(right), SeqCst);
}

/// Installs a handler for SIGURG; returns its address.
fn install(by_signal: bool) -> usize {
    // SAFETY: handlers of the right types, that only count.
    unsafe {
        if by_signal {
            let handler = on_urgent as *const () as usize;
            assert_ne!(libc::signal(libc::SIGURG, handler), libc::SIG_ERR);
            return handler;
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_urgent_with_info as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGURG, &action, std::ptr::null_mut()), 0);
        action.sa_sigaction
    }
}

/// A user's handler for SIGURG, installed before or after the runtime starts, by `sigaction` or `signal`, is
/// called when somebody sends that signal, and not for the runtime's own; and the runtime's work.
#[test]
fn a_users_handler_for_the_preemption_signal() {
    const VARIANT: &str = "TREFOIL_TEST_VARIANT";
    child_test!(|child| {
        for variant in ["before sigaction", "before signal", "after sigaction", "after signal"] {
            child.env(VARIANT, variant).succeed();
        }
    });
    let variant = std::env::var(VARIANT).unwrap();
    let (before, by_signal) = (variant.contains("before"), variant.ends_with("signal"));
    let mut installed = if before { install(by_signal) } else { 0 };
    let rt = runtime(2);
    if !before {
        installed = install(by_signal);
    }
    rt.run(|| {
        let stop = flag();
        let loops = hogs(4, &stop);
        let send = |how: &str, send: &dyn Fn()| {
            // Two that are on their way at once are one: so each is waited for.
            for i in 0..20 {
                let seen = URGENT.load(SeqCst);
                send();
                let start = Instant::now();
                while URGENT.load(SeqCst) == seen {
                    assert!(start.elapsed() < Duration::from_secs(5), "{how} {i} was lost");
                    sleep(MS / 4);
                    // One that meets a request of the runtime's is swallowed with it.
                    if start.elapsed() > Duration::from_secs(1) {
                        send();
                    }
                }
            }
        };
        // SAFETY: sends a signal that has a handler.
        unsafe {
            send("kill", &|| assert_eq!(libc::kill(libc::getpid(), libc::SIGURG), 0));
            send("raise", &|| assert_eq!(libc::raise(libc::SIGURG), 0));
        }
        let preempted = debug::stats().preemptions;
        let seen = URGENT.load(SeqCst);
        sleep(100 * MS);
        assert!(debug::stats().preemptions > preempted, "no preemption any more");
        assert_eq!(URGENT.load(SeqCst), seen, "called for the runtime's own signals");
        // What is asked for is the user's, not ours.
        // SAFETY: reads an action.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            assert_eq!(libc::sigaction(libc::SIGURG, std::ptr::null(), &mut action), 0);
            assert_eq!(action.sa_sigaction, installed);
            assert_eq!(libc::signal(libc::SIGURG, libc::SIG_IGN), installed);
            libc::kill(libc::getpid(), libc::SIGURG);
        }
        sleep(5 * MS);
        assert_eq!(URGENT.load(SeqCst), seen, "called while ignored");
        stop.store(true, SeqCst);
        join_all(loops);
    });
}

static USER1: AtomicUsize = AtomicUsize::new(0);
static DEEPEST: AtomicUsize = AtomicUsize::new(0);
static DEPTH: AtomicUsize = AtomicUsize::new(0);

extern "C" fn on_user1(_: libc::c_int) {
    let depth = DEPTH.fetch_add(1, SeqCst) + 1;
    DEEPEST.fetch_max(depth, SeqCst);
    spin(Duration::from_micros(30));
    USER1.fetch_add(1, SeqCst);
    DEPTH.fetch_sub(1, SeqCst);
}

/// Handlers of other signals run on goroutines' threads, one inside the other (SA_NODEFER), while the goroutines
/// are preempted.
#[test]
fn handlers_of_other_signals_under_preemption() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "slice=50").succeed());
    // SAFETY: a handler of the right type.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_user1 as *const () as usize;
        action.sa_flags = libc::SA_NODEFER | libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let stop = flag();
            let work = |i: u64| {
                let stop = stop.clone();
                go(move || {
                    let mut sum = 0u64;
                    while !stop.load(SeqCst) {
                        let list: Vec<u64> = (0..100).map(|k| k ^ i).collect();
                        sum = sum.wrapping_add(black_box(list).into_iter().sum());
                    }
                    sum
                })
            };
            let workers: Vec<_> = (0..6).map(work).collect();
            for round in 0..150 {
                let tids = ms();
                for &tid in tids.iter().take(4) {
                    // SAFETY: sends a signal that has a handler to a thread of this process.
                    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), tid, libc::SIGUSR1) };
                }
                // SAFETY: as above, to ourselves.
                unsafe { libc::raise(libc::SIGUSR1) };
                if round % 4 == 0 {
                    sleep(MS / 2);
                }
            }
            stop.store(true, SeqCst);
            join_all(workers);
            if procs < 8 {
                assert!(debug::stats().preemptions > 10, "{:?}", debug::stats());
            }
        });
    }
    assert!(USER1.load(SeqCst) >= 3 * 150, "{} calls", USER1.load(SeqCst));
    assert_eq!(DEPTH.load(SeqCst), 0);
}

/// `TREFOIL_DEBUG=preemptsignal=34`: another signal does it; SIGURG is then nobody's.
#[test]
fn another_preemption_signal() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "preemptsignal=34").succeed());
    let caught = || {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find_map(|l| l.strip_prefix("SigCgt:")).unwrap().trim().to_owned();
        u64::from_str_radix(&line, 16).unwrap()
    };
    runtime(1).run(|| {
        let stop = flag();
        let loops = hogs(3, &stop);
        for _ in 0..5 {
            sleep(MS);
        }
        assert!(debug::stats().preemptions > 0);
        assert_eq!(caught() >> (34 - 1) & 1, 1, "{:x}", caught());
        assert_eq!(caught() >> (libc::SIGURG - 1) & 1, 0, "{:x}", caught());
        install(true);
        assert_eq!(caught() >> (libc::SIGURG - 1) & 1, 1, "{:x}", caught());
        stop.store(true, SeqCst);
        join_all(loops);
    });
}

/// Calls that a signal would interrupt: reads with a timeout, polls, sleeps. Beside hogs, which are signalled
/// all the time, (almost) nobody sees EINTR.
#[test]
fn users_see_no_eintr() {
    child_test!();
    let (calls, interrupted) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let run = |yields: bool, time: Duration| {
        calls.store(0, SeqCst);
        interrupted.store(0, SeqCst);
        runtime(2).run(|| {
            let stop = flag();
            let loops = hogs(2, &stop);
            let work = |i: usize| {
                let (stop, calls, interrupted) = (stop.clone(), calls.clone(), interrupted.clone());
                go(move || {
                    let wait = Duration::from_micros(1000 + 300 * i as u64);
                    let (ours, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
                    ours.set_read_timeout(Some(wait)).unwrap();
                    let fd: OwnedFd = ours.into();
                    while !stop.load(SeqCst) {
                        let result = match i % 3 {
                            0 => raw_sleep(wait),
                            1 => raw_read(&fd),
                            _ => {
                                let mut poll =
                                    libc::pollfd { fd: fd.as_raw_fd(), events: 1, revents: 0 };
                                raw(libc::SYS_poll, [&raw mut poll as usize, 1, 1 + i / 3, 0])
                            }
                        };
                        calls.fetch_add(1, SeqCst);
                        interrupted
                            .fetch_add(usize::from(result == -(libc::EINTR as isize)), SeqCst);
                        spin(Duration::from_micros(50));
                        if yields {
                            yield_now();
                        }
                    }
                    drop(theirs);
                })
            };
            let workers: Vec<_> = (0..9).map(work).collect();
            sleep(time);
            stop.store(true, SeqCst);
            join_all(workers);
            join_all(loops);
            assert!(debug::stats().preemptions > 0);
        });
        let (calls, interrupted) = (calls.load(SeqCst), interrupted.load(SeqCst));
        println!("{calls} calls, {interrupted} of them interrupted (yielding: {yields})");
        (calls, interrupted)
    };
    let (calls, interrupted) = run(true, Duration::from_secs(1));
    // sysmon looks whether a thread sleeps before it sends; where it is not run in between (a busy machine), the
    // thread may have gone to sleep. On a quiet one there is none.
    assert!(calls > 50 && interrupted * 20 <= calls, "{interrupted} of {calls} calls");
    // Who never calls the runtime, and computes more than it sleeps, is called back by a signal, which may
    // come in the moment it goes to sleep.
    let (calls, interrupted) = run(false, Duration::from_secs(1));
    assert!(calls > 50 && interrupted * 20 <= calls, "{interrupted} of {calls} calls");
}

/// fork in a goroutine, under preemption.
#[test]
fn fork_in_a_goroutine() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "slice=200").succeed());
    for procs in [1, 2] {
        runtime(procs).run(|| {
            let stop = flag();
            let loops = hogs(2, &stop);
            join_all((0..2).map(|_| {
                go(|| {
                    for i in 0..50 {
                        // SAFETY: the child only ends.
                        unsafe {
                            match libc::fork() {
                                0 => libc::_exit(i),
                                -1 => panic!("fork: {}", std::io::Error::last_os_error()),
                                pid => {
                                    let mut status = 0;
                                    assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
                                    assert!(libc::WIFEXITED(status), "{status:x}");
                                    assert_eq!(libc::WEXITSTATUS(status), i);
                                }
                            }
                        }
                    }
                })
            }));
            stop.store(true, SeqCst);
            join_all(loops);
        });
    }
}

// ---- The end, and the cost ----

/// A runtime is dropped while goroutines block, are locked, hold guards, or never end: nothing hangs or crashes, and
/// its threads end as soon as they can.
#[test]
fn a_runtime_dropped_in_the_middle() {
    child_test!();
    let (read, write) = pipe();
    let read = Arc::new(read);
    for round in 0..100 {
        let rt = runtime([1, 2, 8][round % 3]);
        let (tx, rx) = bounded::<u32>(0);
        rt.run(|| {
            let (in_pipe, in_blocking) = (read.clone(), read.clone());
            go(move || raw_read(&in_pipe));
            go(move || blocking(|| raw_read(&in_blocking)));
            go(|| endless());
            go(|| {
                std::mem::forget(lock_os_thread());
                endless();
            });
            go(|| {
                let _guard = lock_os_thread();
                blocking(|| raw_sleep(MS));
                sleep(Duration::MAX);
            });
            for _ in 0..2 {
                let (tx, rx) = (tx.clone(), rx.clone());
                go(move || {
                    let _guard = lock_os_thread();
                    while tx.send(1).is_ok() && rx.recv().is_ok() {}
                });
            }
            go(|| {
                let _guard = no_preempt();
                sleep(Duration::from_micros(300));
                spin(MS);
                yield_now();
            });
            if round % 2 == 0 {
                sleep(Duration::from_micros(30 * round as u64));
            }
        });
        drop(rt);
    }
    drop(write);
    yield_until("the threads to end", || ms().is_empty());
    let before = cpu_time();
    std::thread::sleep(100 * MS);
    let used = cpu_time() - before;
    assert!(used < 20 * MS, "{used:?} of CPU time in 100 ms");
}

/// Nothing to do costs nothing: less than 0.1 % of a CPU.
#[test]
fn an_idle_runtime_uses_no_cpu() {
    child_test!();
    let used = runtime(2).run(|| {
        go(|| bounded::<u8>(0).1.recv());
        // Blocked threads, too.
        let (read, _write) = pipe();
        go(move || raw_read(&read));
        sleep(100 * MS);
        let before = cpu_time();
        sleep(Duration::from_secs(3));
        cpu_time() - before
    });
    println!("{used:?} in 3 s");
    assert!(used < 3 * MS, "{used:?} of CPU time in 3 s");
}

/// What is done under `LOCKS` shared locks in the given time.
fn contended(stop: &AtomicBool, locks: &[Mutex<Vec<u64>>], seed: usize) -> u64 {
    let mut rounds = 0u64;
    while !stop.load(SeqCst) {
        let mut list = locks[(seed + rounds as usize) % locks.len()].lock().unwrap();
        list.clear();
        list.extend((0..20).map(|k| k ^ rounds));
        drop(list);
        black_box(vec![rounds as u8; 100 + (rounds % 2000) as usize]);
        rounds += 1;
    }
    rounds
}

/// Preempted holders of std's and malloc's locks do not cost much: 100 goroutines do at least 60 % of what
/// two threads do.
#[test]
fn lock_holders_are_preempted_without_a_convoy() {
    child_test!();
    const TIME: Duration = Duration::from_millis(500);
    once_in_five(|| {
        let locks: Arc<Vec<_>> = Arc::new((0..8).map(|_| Mutex::new(Vec::new())).collect());
        let stop = flag();
        let threads: Vec<_> = (0..2)
            .map(|i| {
                let (stop, locks) = (stop.clone(), locks.clone());
                std::thread::spawn(move || contended(&stop, &locks, i))
            })
            .collect();
        std::thread::sleep(TIME);
        stop.store(true, SeqCst);
        let by_threads: u64 = threads.into_iter().map(|t| t.join().unwrap()).sum();
        let by_goroutines: u64 = runtime(2).run(|| {
            let stop = flag();
            let work = |i| {
                let (stop, locks) = (stop.clone(), locks.clone());
                go(move || contended(&stop, &locks, i))
            };
            let all: Vec<_> = (0..100).map(work).collect();
            sleep(TIME);
            stop.store(true, SeqCst);
            join_all(all).iter().sum()
        });
        let share = by_goroutines * 100 / by_threads.max(1);
        println!("{share} % ({by_goroutines} rounds, {by_threads} by threads)");
        if share >= 60 { Ok(()) } else { Err(format!("{share} %")) }
    });
}

/// All threads of a real-time process have one priority: sysmon never ran beside an endless loop on one CPU, nor did the
/// thread that waits for the runtime.
#[test]
fn real_time_threads_are_preempted_on_one_cpu() {
    child_test!();
    let policies = [libc::SCHED_FIFO, libc::SCHED_RR];
    // Seconds of CPU time without a wait, after which the kernel ends the process.
    let limit = libc::rlimit { rlim_cur: 20_000_000, rlim_max: 20_000_000 };
    common::run_on_one_cpu();
    // SAFETY: of this process; passes a structure by reference.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_RTTIME, &raw const limit) }, 0);
    for policy in policies {
        let param = libc::sched_param { sched_priority: 1 };
        // SAFETY: of this thread; passes a structure by reference.
        if unsafe { libc::sched_setscheduler(0, policy, &raw const param) } != 0 {
            eprintln!("skipped: no right to real-time priorities");
            return;
        }
        let rt = trefoil::Runtime::builder().procs(1).build().unwrap();
        let ticks = rt.run(|| {
            for _ in 0..2 {
                go(|| {
                    loop {
                        std::hint::spin_loop();
                    }
                });
            }
            let start = Instant::now();
            let mut ticks = 0;
            while start.elapsed() < Duration::from_millis(500) {
                trefoil::time::sleep(Duration::from_millis(1));
                ticks += 1;
            }
            ticks
        });
        assert!(ticks >= 10, "{ticks} ticks in half a second");
    }
}
