//! Nobody stalls: preemption by signal, handoff from blocked threads, `blocking`, `lock_os_thread`,
//! `no_preempt`. Statements m18 to m21 and m24 to m26 of those that `mission.rs` begins, and what Go's own tests ask.
//!
//! Blocking calls are made with a bare `syscall` instruction: nothing between the goroutine and the kernel
//! can see them. What looks at the whole process is a child (`common::Child`).

mod common;

use common::{
    Child, cpu_time, hold_until, in_child, ms, once_in_five, spin, tid, watchdog, yield_until,
};
use std::cell::{Cell, RefCell};
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::chan::{bounded, unbounded};
use trefoil::net::UnixStream;
use trefoil::time::{Ticker, sleep, sleep_until};
use trefoil::{JoinHandle, Runtime, blocking, debug, go, lock_os_thread, no_preempt, yield_now};

const MS: Duration = Duration::from_millis(1);

/// A runtime with `n` Ps.
fn runtime(n: usize) -> Runtime {
    Runtime::builder().procs(n).build().unwrap()
}

fn flag() -> Arc<AtomicBool> {
    Arc::default()
}

fn join_all<T>(handles: impl IntoIterator<Item = JoinHandle<T>>) -> Vec<T> {
    let handles: Vec<_> = handles.into_iter().collect();
    handles.into_iter().map(|h| h.join().unwrap()).collect()
}

/// A system call that nobody can intercept.
fn raw(number: libc::c_long, args: [usize; 4]) -> isize {
    let result: isize;
    // SAFETY: the callers pass what the call asks for.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2], in("r10") args[3],
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}

/// Sleeps in the kernel; 0, or an error as a negative number.
fn raw_sleep(d: Duration) -> isize {
    let time = libc::timespec { tv_sec: d.as_secs() as i64, tv_nsec: i64::from(d.subsec_nanos()) };
    raw(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0])
}

/// One byte.
fn raw_read(fd: &OwnedFd) -> isize {
    let mut byte = 0u8;
    raw(libc::SYS_read, [fd.as_raw_fd() as usize, &raw mut byte as usize, 1, 0])
}

fn raw_write(fd: &OwnedFd, bytes: &[u8]) -> isize {
    raw(libc::SYS_write, [fd.as_raw_fd() as usize, bytes.as_ptr() as usize, bytes.len(), 0])
}

fn raw_lock(fd: &OwnedFd, how: libc::c_int) -> isize {
    raw(libc::SYS_flock, [fd.as_raw_fd() as usize, how as usize, 0, 0])
}

fn pipe() -> (OwnedFd, OwnedFd) {
    let mut fds = [0; 2];
    // SAFETY: writes two descriptors, which are ours then.
    unsafe {
        assert_eq!(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1]))
    }
}

/// A file of its own for each call, opened `n` times: the descriptors lock each other out.
fn lock_files(n: usize) -> Vec<OwnedFd> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("trefoil-lock-{}-{}", std::process::id(), NEXT.fetch_add(1, SeqCst));
    let path = std::env::temp_dir().join(name);
    let open = || std::fs::OpenOptions::new().write(true).create(true).truncate(true).open(&path);
    let all = (0..n).map(|_| open().unwrap().into()).collect();
    std::fs::remove_file(&path).unwrap();
    all
}

/// A way to block until someone ends it.
enum Block {
    Read(OwnedFd, OwnedFd),
    Lock(OwnedFd, OwnedFd),
    Sleep(AtomicBool),
}

impl Block {
    fn kinds() -> [Block; 3] {
        let (read, write) = pipe();
        let mut files = lock_files(2);
        assert_eq!(raw_lock(&files[0], libc::LOCK_EX), 0);
        [
            Block::Read(read, write),
            Block::Lock(files.pop().unwrap(), files.pop().unwrap()),
            Block::Sleep(AtomicBool::new(false)),
        ]
    }

    fn block(&self) {
        match self {
            Block::Read(read, _) => assert_eq!(raw_read(read), 1),
            Block::Lock(wanted, _) => {
                assert_eq!(raw_lock(wanted, libc::LOCK_EX), 0);
                assert_eq!(raw_lock(wanted, libc::LOCK_UN), 0);
            }
            Block::Sleep(over) => {
                while !over.load(SeqCst) {
                    assert_eq!(raw_sleep(20 * MS), 0);
                }
            }
        }
    }

    fn end(&self) {
        match self {
            Block::Read(_, write) => assert_eq!(raw_write(write, b"x"), 1),
            Block::Lock(_, held) => assert_eq!(raw_lock(held, libc::LOCK_UN), 0),
            Block::Sleep(over) => over.store(true, SeqCst),
        }
    }
}

/// Never calls anything.
fn endless() -> ! {
    #[allow(clippy::empty_loop)]
    loop {}
}

/// Runs until it is told to stop; never calls the runtime.
fn hog(stop: &AtomicBool) {
    while !stop.load(SeqCst) {
        std::hint::spin_loop();
    }
}

fn hogs(n: usize, stop: &Arc<AtomicBool>) -> Vec<JoinHandle<()>> {
    let one = |_| {
        let stop = stop.clone();
        go(move || hog(&stop))
    };
    (0..n).map(one).collect()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

// ---- Blocking system calls ----

/// m18: a goroutine in a blocking call keeps its thread; its P is served by another one; the rest of its queue runs
/// on. Every P is blocked at once.
///
/// Broken, the children behind the blocked goroutines would not run, and main would not either: a hang.
#[test]
fn m18_a_blocked_goroutine_keeps_its_thread_and_its_queue_runs_on() {
    let _w = watchdog();
    const CHILDREN: usize = 50;
    for procs in [1, 2, 8] {
        for kind in 0..3 {
            runtime(procs).run(|| {
                let ran = Arc::new(AtomicUsize::new(0));
                let blocks: Vec<_> = (0..procs)
                    .map(|_| {
                        let kind = Block::kinds().into_iter().nth(kind).unwrap();
                        (Arc::new(kind), Arc::new(AtomicI32::new(0)))
                    })
                    .collect();
                let blocked: Vec<_> = blocks
                    .iter()
                    .map(|(block, at)| {
                        let (block, at, ran) = (block.clone(), at.clone(), ran.clone());
                        go(move || {
                            for _ in 0..CHILDREN {
                                let ran = ran.clone();
                                go(move || ran.fetch_add(1, SeqCst));
                            }
                            // From here to the comparison there is no call of the runtime.
                            let before = tid();
                            at.store(before, SeqCst);
                            block.block();
                            before == tid()
                        })
                    })
                    .collect();
                yield_until("the rest of their queues", || {
                    ran.load(SeqCst) == procs * CHILDREN
                        && blocks.iter().all(|(_, at)| at.load(SeqCst) != 0)
                });
                // The threads are theirs: nobody else runs there.
                let theirs: Vec<_> = blocks.iter().map(|(_, at)| at.load(SeqCst)).collect();
                for other in join_all((0..100).map(|_| go(tid))) {
                    assert!(!theirs.contains(&other), "{other} is blocked, and runs another");
                }
                for (block, _) in &blocks {
                    block.end();
                }
                assert!(join_all(blocked).into_iter().all(|same| same), "moved during a call");
            });
        }
    }
}

/// m19: with `blocking`, the handoff is immediate: no sysmon and no signal is needed.
#[test]
fn m19_blocking_hands_off_at_once() {
    let _w = watchdog();
    once_in_five(|| {
        runtime(1).run(|| {
            let (ran, before) = (flag(), debug::stats());
            let ours = ran.clone();
            go(move || ours.store(true, SeqCst));
            let start = Instant::now();
            // It computes, and would have to be preempted; but it has no P to lose.
            blocking(|| hold_until("the other", || ran.load(SeqCst)));
            let (took, after) = (start.elapsed(), debug::stats());
            let found = (after.retakes - before.retakes, after.preemptions - before.preemptions);
            if found != (0, 0) || took > 8 * MS {
                return Err(format!("retaken, preempted: {found:?}; after {took:?}"));
            }
            Ok(())
        })
    });
}

/// m19: unannounced, sysmon takes the P, if the call lasts and somebody waits.
#[test]
fn m19_unannounced_blocking_is_noticed() {
    let _w = watchdog();
    const CALL: Duration = Duration::from_millis(200);
    once_in_five(|| {
        runtime(1).run(|| {
            let before = debug::stats().retakes;
            let start = Instant::now();
            let other = go(move || start.elapsed());
            raw_sleep(CALL);
            let (after, waited) = (debug::stats().retakes, other.join().unwrap());
            if after == before || waited > CALL / 4 {
                return Err(format!("{} retaken, the other ran after {waited:?}", after - before));
            }
            Ok(())
        })
    });
}

/// m19: short calls keep their P, however many there are and whoever waits: no handoff, no other thread.
#[test]
fn m19_short_calls_keep_their_p() {
    let _w = watchdog();
    runtime(1).run(|| {
        let (read, write) = pipe();
        let ran = flag();
        let (ours, before) = (ran.clone(), debug::stats().retakes);
        let other = go(move || ours.store(true, SeqCst));
        // The slice must not end it: only the calls are to be seen.
        let held = no_preempt();
        let (start, at) = (Instant::now(), tid());
        let mut calls = 0;
        while start.elapsed() < 30 * MS {
            assert_eq!(raw_write(&write, b"x"), 1);
            assert_eq!(raw_read(&read), 1);
            calls += 2;
        }
        let retaken = debug::stats().retakes - before;
        assert_eq!((ran.load(SeqCst), retaken, tid()), (false, 0, at), "in {calls} calls");
        drop(held);
        other.join().unwrap();
    });
}

/// m20: on return it gets a P, or queues. Results are right, nobody is lost or runs twice.
#[test]
fn m20_back_from_a_call() {
    let _w = watchdog();
    for procs in [1, 2, 8, 64] {
        runtime(procs).run(|| {
            let done = Arc::new(AtomicUsize::new(0));
            let results = join_all((0..100usize).map(|i| {
                let done = done.clone();
                go(move || {
                    let mut sum = 0;
                    for k in 0..10 {
                        sum += match k % 3 {
                            0 => blocking(|| {
                                raw_sleep(Duration::from_micros(i as u64));
                                i
                            }),
                            1 => {
                                raw_sleep(Duration::from_micros(100));
                                i
                            }
                            // Nested, and with calls of the runtime inside.
                            _ => blocking(|| {
                                yield_now();
                                blocking(|| go(move || i).join().unwrap())
                            }),
                        };
                    }
                    done.fetch_add(1, SeqCst);
                    sum
                })
            }));
            assert_eq!(results, (0..100).map(|i| 10 * i).collect::<Vec<_>>());
            assert_eq!(done.load(SeqCst), 100);
            assert_eq!(debug::stats().threads_without_p, 0);
        });
    }
}

/// The number of the P that runs this goroutine: where a goroutine that it starts is counted. Nobody else may start one
/// meanwhile.
fn my_p() -> usize {
    let _held = no_preempt();
    let spawned = || debug::stats().procs.into_iter().map(|p| p.spawned);
    let before: Vec<_> = spawned().collect();
    go(|| ());
    let mut counts = spawned().zip(before);
    counts.position(|(now, before)| now != before).expect("a P that started one")
}

/// Waits without any call of the runtime: in `blocking` that would be the way back.
fn outside_until(done: impl Fn() -> bool) {
    while !done() {
        common::pause();
    }
}

/// m20: on return the old P, if it is free.
///
/// Broken, it would take whichever P became idle last: others did after its own.
#[test]
fn m20_back_to_its_own_p() {
    let _w = watchdog();
    const ROUNDS: usize = 40;
    let rt = runtime(4);
    let (away, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (says, sees) = (away.clone(), over.clone());
    let goroutine = rt.go(move || {
        let round = |n: usize| {
            // Whoever the OS leaves waiting for long would be preempted, and move.
            let _held = no_preempt();
            let before = (my_p(), tid());
            blocking(|| {
                says.store(n, SeqCst);
                outside_until(|| sees.load(SeqCst) == n);
                outside_until(|| debug::stats().procs.iter().all(|p| p.status == "idle"));
            });
            (before, (my_p(), tid()))
        };
        (1..=ROUNDS).map(round).collect::<Vec<_>>()
    });
    for round in 1..=ROUNDS {
        outside_until(|| away.load(SeqCst) == round);
        // Two others at once use its P and another one, and leave them in any order.
        let here = Arc::new(AtomicUsize::new(0));
        let other = || {
            let here = here.clone();
            rt.go(move || {
                here.fetch_add(1, SeqCst);
                hold_until("the other", || here.load(SeqCst) == 2);
            })
        };
        join_all([other().unwrap(), other().unwrap()]);
        over.store(round, SeqCst);
    }
    for (before, after) in goroutine.unwrap().join().unwrap() {
        assert_eq!(before, after, "P and thread");
    }
}

/// m20: … else another idle P.
///
/// Broken, it would wait for its own, which is taken for as long as it waits: a hang.
#[test]
fn m20_back_to_another_p() {
    let _w = watchdog();
    const ROUNDS: usize = 40;
    let elsewhere = runtime(2).run(|| {
        let round = || {
            let _held = no_preempt();
            let (taken, end) = (Arc::new(AtomicUsize::new(usize::MAX)), flag());
            let (says, sees) = (taken.clone(), end.clone());
            let (p, thread) = (my_p(), tid());
            let squatter = go(move || {
                let _held = no_preempt();
                says.store(my_p(), SeqCst);
                hold_until("its end", || sees.load(SeqCst));
            });
            blocking(|| {
                outside_until(|| taken.load(SeqCst) != usize::MAX);
                // Not in the hands of a thread that searches.
                let other = 1 - taken.load(SeqCst);
                outside_until(|| debug::stats().procs[other].status == "idle");
            });
            let now = my_p();
            assert_eq!((now, tid()), (1 - taken.load(SeqCst), thread), "P and thread");
            end.store(true, SeqCst);
            squatter.join().unwrap();
            now != p
        };
        (0..ROUNDS).filter(|_| round()).count()
    });
    // A thief may take the squatter to the other P, and then its own is free.
    println!("{elsewhere} of {ROUNDS} times elsewhere");
    assert!(elsewhere > 0, "always back to its own");
}

/// m20: … else the global queue.
///
/// Broken, it would go on beside the goroutine that has the only P, and that one would not see it queue.
#[test]
fn m20_back_to_the_global_queue() {
    let _w = watchdog();
    runtime(1).run(|| {
        for _ in 0..20 {
            let (taken, seen) = (flag(), flag());
            let (says, sees) = (taken.clone(), seen.clone());
            let squatter = go(move || {
                let _held = no_preempt();
                says.store(true, SeqCst);
                hold_until("the other to queue", || {
                    let stats = debug::stats();
                    (stats.global_queue, stats.threads_without_p) == (1, 0)
                });
                sees.store(true, SeqCst);
            });
            blocking(|| outside_until(|| taken.load(SeqCst)));
            assert!(seen.load(SeqCst), "went on without a P");
            squatter.join().unwrap();
        }
    });
}

/// A panic out of `blocking` comes back with a P too.
#[test]
fn m20_a_panic_in_blocking() {
    let _w = watchdog();
    runtime(1).run(|| {
        let failed =
            std::panic::catch_unwind(|| blocking(|| std::panic::resume_unwind(Box::new("out"))));
        assert_eq!(*failed.unwrap_err().downcast::<&str>().unwrap(), "out");
        assert_eq!(go(|| 5).join().unwrap(), 5);
        assert_eq!(debug::stats().threads_without_p, 0);
    });
    assert_eq!(blocking(|| 3), 3, "on a plain thread");
}

/// Go's test of preemption after system calls: 8 goroutines on 2 Ps in calls of 10, 100 and 1000 µs, started and
/// stopped ten times, in less than 5 s.
#[test]
fn m20_go_preemption_after_syscall() {
    let _w = watchdog();
    for micros in [10, 100, 1000] {
        runtime(2).run(|| {
            let start = Instant::now();
            for _ in 0..10 {
                let stop = flag();
                let (tx, rx) = bounded(8);
                for _ in 0..8 {
                    let (stop, tx) = (stop.clone(), tx.clone());
                    go(move || {
                        tx.send(()).unwrap();
                        while !stop.load(SeqCst) {
                            raw_sleep(Duration::from_micros(micros));
                        }
                        tx.send(()).unwrap();
                    });
                }
                (0..8).for_each(|_| rx.recv().unwrap());
                stop.store(true, SeqCst);
                (0..8).for_each(|_| rx.recv().unwrap());
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{micros} µs: {:?}", start.elapsed());
        });
    }
}

/// m21: the extra threads are bounded and visible. Everything is done nevertheless, and one line tells why it
/// takes longer.
#[test]
fn m21_threads_are_bounded_and_visible() {
    let _w = watchdog();
    const LIMIT: usize = 8;
    if !in_child() {
        let stderr = Child::of("m21_threads_are_bounded_and_visible").succeed();
        let said = stderr.matches("program exceeds 8-thread limit").count();
        assert_eq!(said, 1, "{stderr}");
        return;
    }
    for procs in [1, 2, 8] {
        // The line comes once for each runtime: only the first is to say it.
        let limit = if procs == 2 { LIMIT } else { 100 };
        let rt = Runtime::builder().procs(procs).max_threads(limit).build().unwrap();
        let over = AtomicBool::new(false);
        let (most, without) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|s| {
            s.spawn(|| {
                while !over.load(SeqCst) {
                    most.fetch_max(ms().len(), SeqCst);
                    std::thread::sleep(MS);
                }
            });
            rt.run(|| {
                let done = join_all((0..50).map(|i| {
                    go(move || {
                        for _ in 0..3 {
                            if i % 2 == 0 {
                                blocking(|| raw_sleep(2 * MS));
                            } else {
                                raw_sleep(2 * MS);
                            }
                        }
                        let stats = debug::stats();
                        assert!(stats.threads <= limit, "{stats:?}");
                        (i, stats.threads_without_p)
                    })
                }));
                assert!(done.iter().enumerate().all(|(k, &(i, _))| k == i));
                without.store(done.iter().map(|&(_, n)| n).max().unwrap(), SeqCst);
            });
            over.store(true, SeqCst);
        });
        let most = most.load(SeqCst);
        assert!(most <= limit, "{most} threads");
        assert!(without.load(SeqCst) > 0, "nobody was seen without a P");
        drop(rt);
        yield_until("the threads to end", || ms().is_empty());
    }
}

/// m21: threads that nobody needs any more end after some seconds.
#[test]
fn m21_spare_threads_end() {
    let _w = watchdog();
    if !in_child() {
        Child::of("m21_spare_threads_end").succeed();
        return;
    }
    const BLOCKED: usize = 40;
    runtime(2).run(|| {
        let (read, write) = pipe();
        let (read, at) = (Arc::new(read), Arc::new(AtomicUsize::new(0)));
        let readers: Vec<_> = (0..BLOCKED)
            .map(|_| {
                let (read, at) = (read.clone(), at.clone());
                go(move || {
                    at.fetch_add(1, SeqCst);
                    assert_eq!(raw_read(&read), 1);
                })
            })
            .collect();
        yield_until("all to block", || {
            at.load(SeqCst) == BLOCKED && debug::stats().threads >= BLOCKED
        });
        assert_eq!(raw_write(&write, &[0; BLOCKED]), BLOCKED as isize);
        join_all(readers);
        let start = Instant::now();
        assert!(debug::stats().threads >= BLOCKED);
        while debug::stats().threads > 2 + 2 {
            assert!(start.elapsed() < Duration::from_secs(15), "{:?}", debug::stats());
            sleep(50 * MS);
        }
        assert!(start.elapsed() > Duration::from_secs(3), "after {:?}", start.elapsed());
        assert!(ms().len() <= 4);
        // And new ones come when they are needed.
        join_all((0..10).map(|_| go(|| raw_sleep(MS))));
    });
}

/// A P that is taken away or given away may have timers: someone is awake for them.
#[test]
fn timers_of_a_p_that_was_given_away() {
    let _w = watchdog();
    const CALL: Duration = Duration::from_millis(600);
    once_in_five(|| {
        for procs in [1, 2, 8] {
            let rt = runtime(procs);
            let slept = rt.run(|| {
                let start = Instant::now();
                go(|| blocking(|| raw_sleep(CALL)));
                go(|| {
                    sleep(5 * MS);
                    raw_sleep(CALL);
                });
                go(|| {
                    let _guard = lock_os_thread();
                    sleep(5 * MS);
                    blocking(|| raw_sleep(CALL));
                });
                (0..10).for_each(|_| sleep(5 * MS));
                start.elapsed()
            });
            if slept > CALL / 2 {
                return Err(format!("{procs} Ps: 50 ms took {slept:?}"));
            }
        }
        Ok(())
    });
}

/// 64 goroutines block unannounced, in files, locks and sleeps; a ticker keeps its time.
#[test]
fn a_ticker_beside_64_blocked_goroutines() {
    let _w = watchdog();
    if !in_child() {
        Child::of("a_ticker_beside_64_blocked_goroutines").succeed();
        return;
    }
    for procs in [1, 2] {
        once_in_five(|| {
            runtime(procs).run(|| {
                let stop = flag();
                let mut files = lock_files(17);
                let (held, (read, write)) = (files.pop().unwrap(), pipe());
                assert_eq!(raw_lock(&held, libc::LOCK_EX), 0);
                let read = Arc::new(read);
                let readers = (0..24).map(|_| {
                    let read = read.clone();
                    go(move || {
                        raw_read(&read);
                    })
                });
                let readers: Vec<_> = readers.collect();
                let lockers = files.into_iter().map(|file| {
                    go(move || {
                        raw_lock(&file, libc::LOCK_SH);
                    })
                });
                let lockers: Vec<_> = lockers.collect();
                let sleepers = (0..24).map(|_| {
                    let stop = stop.clone();
                    go(move || {
                        while !stop.load(SeqCst) {
                            raw_sleep(5 * MS);
                            yield_now();
                        }
                    })
                });
                let sleepers: Vec<_> = sleepers.collect();
                let late = ticks(500);
                stop.store(true, SeqCst);
                drop(write);
                drop(held);
                for handles in [readers, lockers, sleepers] {
                    join_all(handles);
                }
                let (middle, worst) = (median(late.clone()), late.iter().max().unwrap());
                println!("{procs} Ps, 64 blocked: median {middle:?}, worst {worst:?}");
                if middle < 2 * MS { Ok(()) } else { Err(format!("median {middle:?}")) }
            })
        });
    }
}

/// How late one runs who wants to every millisecond.
fn ticks(n: u32) -> Vec<Duration> {
    let start = Instant::now();
    let mut late = Vec::new();
    for i in 1..=n {
        let due = start + i * MS;
        sleep_until(due);
        late.push(due.elapsed());
    }
    // And a ticker, which leaves out what nobody receives.
    let (ticker, start) = (Ticker::new(MS), Instant::now());
    for _ in 0..20 {
        ticker.chan().recv().unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(5), "20 ticks took {:?}", start.elapsed());
    late
}

// ---- Preemption ----

/// m24: channel operations, I/O that waits, sleep, explicit yield and other calls of the runtime are scheduling points,
/// each by itself, also where no signal helps. (A lock that is free, and I/O that need not wait, are none: they cost
/// too little to ask.)
///
/// Broken, the goroutine that waits would never run: a panic after 20 s.
#[test]
fn m24_cooperative_points() {
    let _w = watchdog();
    if !in_child() {
        Child::of("m24_cooperative_points").env("TREFOIL_DEBUG", "asyncpreemptoff=1").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("m25_endless_loops_starve_nobody").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("m25_ten_thousand_endless_loops").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        let child = Child::of("m26_stopped_in_awkward_places");
        child.env("TREFOIL_DEBUG", "slice=50").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("a_ticker_beside_four_hogs").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("loops_inside_libc_take_turns").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("fewer_procs_beside_endless_loops").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        // A page that the kernel must wait for blocks the loop, and it loses its P.
        once_in_five(|| {
            let child = Child::of("asyncpreemptoff_leaves_loops_alone");
            let out = child.env("TREFOIL_DEBUG", "asyncpreemptoff=1").output();
            if out.status.success() { Ok(()) } else { Err(format!("{out:?}")) }
        });
        return;
    }
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
    let _w = watchdog();
    const VARIANT: &str = "TREFOIL_TEST_VARIANT";
    let Ok(variant) = std::env::var(VARIANT) else {
        for variant in ["before sigaction", "before signal", "after sigaction", "after signal"] {
            let child = Child::of("a_users_handler_for_the_preemption_signal");
            child.env(VARIANT, variant).succeed();
        }
        return;
    };
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
    let _w = watchdog();
    if !in_child() {
        let child = Child::of("handlers_of_other_signals_under_preemption");
        child.env("TREFOIL_DEBUG", "slice=50").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        let child = Child::of("another_preemption_signal");
        child.env("TREFOIL_DEBUG", "preemptsignal=34").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("users_see_no_eintr").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("fork_in_a_goroutine").env("TREFOIL_DEBUG", "slice=200").succeed();
        return;
    }
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

// ---- lock_os_thread ----

/// A locked goroutine stays on its thread through sleeps, channels, preemption, blocking and yields, and nobody else
/// runs there; locks nest; at 1, 2, 8 and 64 Ps.
#[test]
fn a_locked_goroutine_stays_on_its_thread() {
    let _w = watchdog();
    for procs in [1, 2, 8, 64] {
        runtime(procs).run(|| {
            let stop = flag();
            let loops = hogs(2, &stop);
            let (tx, rx) = bounded::<i32>(0);
            let echo = go(move || rx.iter().map(i64::from).sum::<i64>());
            let locked = go(move || {
                let outer = lock_os_thread();
                let here = tid();
                for round in 0..5 {
                    let inner = lock_os_thread();
                    sleep(MS);
                    assert_eq!(tid(), here, "after a sleep");
                    tx.send(round).unwrap();
                    assert_eq!(tid(), here, "after a send");
                    spin(12 * MS);
                    assert_eq!(tid(), here, "after preemption");
                    blocking(|| raw_sleep(MS));
                    assert_eq!(tid(), here, "after blocking");
                    raw_sleep(MS);
                    drop(inner);
                    yield_now();
                    assert_eq!(tid(), here, "after a yield, with the outer lock");
                    let other = go(tid).join().unwrap();
                    assert_ne!(other, here, "somebody else ran on our thread");
                }
                drop(outer);
                drop(tx);
                here
            });
            locked.join().unwrap();
            assert_eq!(echo.join().unwrap(), 10);
            stop.store(true, SeqCst);
            join_all(loops);
        });
    }
    drop(lock_os_thread());
}

fn exists(tid: i32) -> bool {
    std::path::Path::new(&format!("/proc/self/task/{tid}")).exists()
}

/// Go's: a goroutine that ends while it is locked takes its thread with it; one that unlocked does not.
#[test]
fn exit_while_locked_ends_the_thread() {
    let _w = watchdog();
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            for nesting in 1..4 {
                let gone = go(move || {
                    for _ in 0..nesting {
                        std::mem::forget(lock_os_thread());
                    }
                    drop(lock_os_thread());
                    sleep(MS / 10);
                    tid()
                });
                let gone = gone.join().unwrap();
                yield_until("the thread to end", || !exists(gone));
                // Its handle may also be dropped, or it may panic.
                let at = Arc::new(AtomicI32::new(0));
                let ours = at.clone();
                drop(go(move || {
                    std::mem::forget(lock_os_thread());
                    ours.store(tid(), SeqCst);
                    std::panic::resume_unwind(Box::new(()));
                }));
                yield_until("the thread to end", || {
                    at.load(SeqCst) != 0 && !exists(at.load(SeqCst))
                });
            }
            let kept = go(|| {
                drop((lock_os_thread(), lock_os_thread()));
                tid()
            });
            let kept = kept.join().unwrap();
            sleep(5 * MS);
            assert!(exists(kept));
            assert_eq!(go(|| 3).join().unwrap(), 3);
        });
    }
}

/// Go's, a hundred times: locked goroutines end, locked or not, while the number of Ps changes.
#[test]
fn locked_goroutines_end_while_procs_change() {
    let _w = watchdog();
    runtime(2).run(|| {
        for round in 0..100usize {
            let ended = (0..6).map(|i| {
                go(move || {
                    let guard = lock_os_thread();
                    if i % 3 == 0 {
                        sleep(Duration::from_micros(50 * i));
                    }
                    if i % 2 == 0 {
                        std::mem::forget(guard)
                    } else {
                        drop(guard)
                    }
                    i
                })
            });
            let ended: Vec<_> = ended.collect();
            trefoil::set_procs(1 + round % 5);
            if round % 3 == 0 {
                blocking(|| raw_sleep(Duration::from_micros(100)));
            }
            trefoil::set_procs(1 + round % 3);
            assert_eq!(join_all(ended).iter().sum::<u64>(), 15);
        }
    });
}

/// Two locked goroutines hand a ball to each other.
#[test]
fn locked_goroutines_play_ping_pong() {
    let _w = watchdog();
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            let (ping, pinged) = bounded::<u32>(0);
            let (pong, ponged) = bounded::<u32>(0);
            let other = go(move || {
                let _guard = lock_os_thread();
                let here = tid();
                for ball in pinged.iter() {
                    pong.send(ball + 1).unwrap();
                }
                assert_eq!(tid(), here);
            });
            let _guard = lock_os_thread();
            let mut ball = 0;
            for _ in 0..500 {
                ping.send(ball).unwrap();
                ball = ponged.recv().unwrap();
            }
            assert_eq!(ball, 500);
            drop(ping);
            other.join().unwrap();
        });
    }
}

/// Go's: yield loops and locked goroutines let others progress.
#[test]
fn yielding_locked_goroutines_let_others_run() {
    let _w = watchdog();
    for procs in [1, 2] {
        runtime(procs).run(|| {
            let (stop, turns) = (flag(), Arc::<[AtomicU64; 4]>::default());
            let locked = (0..4).map(|i: usize| {
                let (stop, turns) = (stop.clone(), turns.clone());
                go(move || {
                    let _guard = lock_os_thread();
                    while !stop.load(SeqCst) {
                        yield_now();
                        turns[i].fetch_add(1, SeqCst);
                    }
                })
            });
            let locked: Vec<_> = locked.collect();
            for i in 0..200 {
                assert_eq!(go(move || i).join().unwrap(), i);
            }
            yield_until("each to have turns", || turns.iter().all(|n| n.load(SeqCst) > 10));
            stop.store(true, SeqCst);
            join_all(locked);
        });
    }
}

/// No P is lost between a locked goroutine's thread and those who send it home.
#[test]
fn locked_goroutines_lose_no_p() {
    let _w = watchdog();
    for procs in [2, 4] {
        runtime(procs).run(|| {
            for _ in 0..5 {
                join_all((0..6).map(|i| {
                    go(move || {
                        let _guard = (i % 2 == 0).then(lock_os_thread);
                        (0..300).for_each(|_| yield_now());
                    })
                }));
            }
            let running = || debug::stats().procs.iter().filter(|p| p.status == "running").count();
            let start = Instant::now();
            while running() > 1 {
                assert!(start.elapsed() < Duration::from_secs(5), "{:?}", debug::stats());
                sleep(MS);
            }
        });
    }
}

// ---- The end, and the cost ----

/// A runtime is dropped while goroutines block, are locked, hold guards, or never end: nothing hangs or crashes, and
/// its threads end as soon as they can.
#[test]
fn a_runtime_dropped_in_the_middle() {
    let _w = watchdog();
    if !in_child() {
        Child::of("a_runtime_dropped_in_the_middle").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("an_idle_runtime_uses_no_cpu").succeed();
        return;
    }
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
    let _w = watchdog();
    if !in_child() {
        Child::of("lock_holders_are_preempted_without_a_convoy").succeed();
        return;
    }
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
