//! Goroutines that compute for long take turns, with and without calls of the runtime.

use crate::common::{
    self, MS, child_test, cpu_time, flag, hog, hogs, join_all, median, ms, once_in_five, rounds,
    runtime, skip_if_emulated, spin, wake_up_delays, watchdog, yield_until,
};
use crate::endless;
use std::hint::black_box;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil::chan::{bounded, unbounded};
use trefoil::net::UnixStream;
use trefoil::time::{sleep, sleep_until};
use trefoil::{blocking, debug, go, yield_now};

/// Channel operations, I/O that waits, sleep, explicit yield and other calls of the runtime are
/// scheduling points, each by itself, also without preemption signals. (Locking a free lock and I/O
/// that need not wait are not: a check would cost too much there.)
///
/// Fails if the goroutine that waits never runs: a panic after 20 s.
#[test]
fn each_call_of_the_runtime_lets_others_run() {
    child_test!(|child| child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").succeed());
    let (into, _open) = unbounded();
    // Usually more than can be received in one time slice; after them, a closed channel.
    let (fill, full) = unbounded();
    (0..200_000).for_each(|_| fill.send(1).unwrap());
    drop(fill);
    let (turn, turned) = bounded(1);
    let (_open, empty) = bounded::<u8>(1);
    // Nothing is sent from the other ends: each call waits until its short limit.
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
                assert!(
                    start.elapsed() < Duration::from_secs(20),
                    "{name} lets no other goroutine run"
                );
            }
            assert_eq!(debug::stats().preempt_signals, 0);
        });
    }
}

#[inline(never)]
fn a_call(n: u64) -> u64 {
    black_box(n) + 1
}

/// Uses frames of 16 KiB, one per level.
#[inline(never)]
fn big_frames(depth: u32) -> u64 {
    let frame = black_box([u64::from(depth); 2048]);
    if depth == 0 { frame[7] } else { big_frames(depth - 1) + frame[1000] }
}

/// As in Go, loops without calls, with calls, with big frames, with malloc, and the empty one do
/// not keep main from going on, even on one P. `run` returns while they are left, and then they no
/// longer use the CPU.
#[test]
fn endless_loops_starve_no_goroutine_and_end_with_their_runtime() {
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
                for _ in 0..rounds(2, 5) {
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
    // The runtimes are dropped; goroutines that are left must not run.
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

/// A turn of a loop without calls is about 10 ms long if other goroutines wait.
///
/// Fails if turns are far shorter (needless switches), or as long as the kernel or a tick of sysmon
/// allows.
#[test]
fn endless_loops_take_turns_of_ten_milliseconds() {
    let _watchdog = watchdog();
    const TURNS: usize = 40;
    runtime(1).run(|| {
        let running = Arc::new(AtomicUsize::new(0));
        let begins: Arc<Vec<AtomicU64>> = Arc::new((0..=TURNS).map(|_| 0.into()).collect());
        let (next, start) = (Arc::new(AtomicUsize::new(0)), Instant::now());
        // Main waits in join and does not wake up meanwhile: that would shorten a turn.
        join_all((1..=3).map(|me| {
            let (running, begins, next) = (running.clone(), begins.clone(), next.clone());
            go(move || {
                while next.load(SeqCst) <= TURNS {
                    // A turn begins when another goroutine ran before, whatever the OS does.
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
        let (tenth, middle) = (turns[TURNS / 10], turns[TURNS / 2]);
        println!("a tenth within {tenth:?}, half within {middle:?}");
        // A busy machine makes most turns longer, but none shorter.
        assert!(middle >= 8 * MS && tenth < 30 * MS, "{turns:?}");
    });
}

/// 10,000 endless loops on 2 Ps need few threads, and main gets its turns.
#[test]
fn ten_thousand_endless_loops_need_few_threads() {
    skip_if_emulated!("if main uses up its slice, it waits behind all of them, for minutes there");
    child_test!();
    runtime(2).run(|| {
        // Otherwise main may use up its time slice and queue behind all of them.
        let _held = trefoil::no_preempt();
        (0..10_000).for_each(|_| drop(go(|| endless())));
        sleep(MS);
        let mut turns = Vec::new();
        for _ in 0..50 {
            let start = Instant::now();
            sleep(MS);
            turns.push(start.elapsed());
        }
        let threads = ms().len();
        assert!(threads < 20, "{threads} threads");
        let (middle, worst) = (median(turns.clone()), *turns.iter().max().unwrap());
        println!("main's sleeps of 1 ms: median {middle:?}, worst {worst:?}; {threads} threads");
        assert!(worst < Duration::from_secs(10), "{turns:?}");
        // No loop has ended: a fair round takes 10 ms for each.
        assert_eq!(debug::stats().goroutines, 10_001);
    });
}

/// Ticks come in time beside goroutines that never call the runtime.
#[test]
#[ignore = "measures delays"]
fn a_ticker_keeps_time_beside_four_hogs() {
    skip_if_emulated!("it measures delays, and the emulator's are longer than its limit");
    child_test!();
    for procs in [1, 2] {
        once_in_five(|| {
            runtime(procs).run(|| {
                let stop = flag();
                let loops = hogs(4, &stop);
                let late = wake_up_delays(rounds(100, 300));
                stop.store(true, SeqCst);
                join_all(loops);
                let (middle, worst) = (median(late.clone()), late.iter().max().unwrap());
                println!("{procs} Ps, 4 hogs: median {middle:?}, worst {worst:?}");
                if middle < 5 * MS { Ok(()) } else { Err(format!("median {middle:?}")) }
            })
        });
    }
}

/// A goroutine that computes and calls the runtime all the time, but never waits, stops at one of its
/// calls when a timer is due. No signal reaches it inside the runtime.
#[test]
fn a_timer_is_in_time_beside_a_goroutine_that_is_always_inside_the_runtime() {
    const INTERVAL: Duration = Duration::from_millis(4);
    child_test!();
    once_in_five(|| {
        runtime(1).run(|| {
            let stop = flag();
            let stopped = stop.clone();
            let busy = go(move || {
                let (sender, receiver) = bounded(1);
                while !stopped.load(SeqCst) {
                    let _ = (sender.try_send(()), receiver.try_recv());
                }
            });
            let start = Instant::now();
            let late = (1..=50u32).map(|i| {
                let due = start + i * INTERVAL;
                sleep_until(due);
                due.elapsed()
            });
            let middle = median(late.collect());
            stop.store(true, SeqCst);
            busy.join().unwrap();
            println!("median {middle:?}");
            // The end of its slice would be 5 ms later in the median.
            if middle < 3 * MS { Ok(()) } else { Err(format!("median {middle:?}")) }
        })
    });
}

/// Preemption of a goroutine that is always inside libc is deferred, because it may hold a lock
/// there, but only by some milliseconds.
#[test]
#[ignore = "measures delays"]
fn loops_inside_libc_take_turns() {
    skip_if_emulated!("it measures delays, and the emulator's are longer than its limit");
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

/// After `set_procs(n)` at most `n` of the endless loops run at once.
#[test]
fn set_procs_limits_endless_loops() {
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
        yield_until("all goroutines to run", || progress.iter().all(|n| n.load(SeqCst) > 0));
        for n in [4, 1, 8, 2, 1] {
            trefoil::set_procs(n);
            // Main has one of the Ps, the loops have the others.
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
            let samples: Vec<_> = (0..rounds(16, 40))
                .map(|_| {
                    spin(MS);
                    running_ms()
                })
                .collect();
            let over = samples.iter().filter(|&&running| running > n).count();
            // A thread that has just lost its P may not have parked yet.
            assert!(over <= samples.len() / 4, "{n} Ps: {samples:?}");
        }
        // Each loop still gets its turns on the one P that is left.
        let before: Vec<_> = progress.iter().map(|n| n.load(SeqCst)).collect();
        let start = Instant::now();
        while !progress.iter().zip(&before).all(|(n, &before)| n.load(SeqCst) > before) {
            assert!(start.elapsed() < Duration::from_secs(20), "a goroutine starves");
            sleep(10 * MS);
        }
    });
}

/// Returns the number of Ms that are running or waiting for a CPU.
fn running_ms() -> usize {
    let wants_cpu = |tid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat"));
        stat.is_ok_and(|s| s.rsplit(')').next().unwrap_or("").trim_start().starts_with('R'))
    };
    ms().iter().filter(|tid| wants_cpu(tid)).count()
}

/// `TREFOIL_DEBUG=asyncpreemptoff=1`: a loop without calls keeps its P, as in Go.
#[test]
fn asyncpreemptoff_prevents_preemption_of_loops() {
    child_test!(|child| {
        // A page fault with I/O may block the loop, so that it loses its P: hence five attempts.
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

/// All threads of a real-time process have the same priority. Beside an endless loop on one CPU,
/// sysmon and the thread that waits for the runtime still run.
#[test]
#[ignore = "takes long"]
fn real_time_threads_are_preempted_on_one_cpu() {
    child_test!();
    let policies = [libc::SCHED_FIFO, libc::SCHED_RR];
    // Microseconds of CPU time without a wait, after which the kernel ends the process.
    let limit = libc::rlimit { rlim_cur: 20_000_000, rlim_max: 20_000_000 };
    common::run_on_one_cpu();
    // SAFETY: of this process; passes a structure by reference.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_RTTIME, &raw const limit) }, 0);
    for policy in policies {
        let param = libc::sched_param { sched_priority: 1 };
        // SAFETY: of this thread; passes a structure by reference.
        if unsafe { libc::sched_setscheduler(0, policy, &raw const param) } != 0 {
            crate::common::mark("skipped: no right to real-time priorities");
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
