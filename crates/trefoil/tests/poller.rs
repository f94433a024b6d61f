//! The poller: who waits for a descriptor occupies no thread and is always found. It is in shards: descriptors are at
//! home with the P that first waited for them, and are seen to whatever becomes of that P.

mod common;

use common::{MS, child_test, hold_until, join_all, runtime, watchdog, yield_until};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use trefoil::net::{TcpStream, UnixStream};
use trefoil::time::sleep;
use trefoil::{JoinHandle, debug, go};

/// Whoever gets no answer for so long has missed a wake-up.
const LOST: Duration = Duration::from_secs(10);

/// One test at a time: 64 Ps take the CPUs from those who measure.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// The median is soon enough.
fn assert_soon(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let (middle, worst) = (times[times.len() / 2], times[times.len() - 1]);
    println!("{what}: median {middle:?}, worst {worst:?}");
    assert!(middle < 100 * MS, "{what}: {times:?}");
}

/// Sends back what comes, until the other end is closed.
fn echo(mut stream: impl Read + Write) -> io::Result<()> {
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
    }
    Ok(())
}

/// One byte there and back.
fn ask(mut stream: impl Read + Write, byte: u8) -> io::Result<()> {
    stream.write_all(&[byte])?;
    let mut answer = [!byte];
    stream.read_exact(&mut answer)?;
    assert_eq!(answer, [byte]);
    Ok(())
}

/// `n` goroutines that all execute at once, each on a P of its own, and then echo: each one's socket is at home
/// there. The other ends, and the goroutines.
fn echo_on_each_p(n: usize) -> (Vec<UnixStream>, Vec<JoinHandle<io::Result<()>>>) {
    let here = Arc::new(AtomicUsize::new(0));
    let (ours, theirs): (Vec<_>, Vec<_>) = (0..n).map(|_| UnixStream::pair().unwrap()).unzip();
    let start = |stream: UnixStream| {
        let here = here.clone();
        go(move || {
            // Held until it waits: who is stopped in between goes on elsewhere.
            let held = trefoil::no_preempt();
            here.fetch_add(1, SeqCst);
            hold_until("the others to run", || here.load(SeqCst) == n);
            let mut byte = [0];
            (&stream).read_exact(&mut byte)?;
            drop(held);
            (&stream).write_all(&byte)?;
            echo(stream)
        })
    };
    let handles: Vec<_> = theirs.into_iter().map(start).collect();
    let began = Instant::now();
    while debug::stats().io_waiters != n {
        assert!(began.elapsed() < common::TOO_LONG / 2, "{:?}", debug::stats());
        // Not a yield: alone on its P this goroutine would keep it, and each of those needs one.
        sleep(MS);
    }
    for stream in &ours {
        stream.set_read_deadline(Some(Instant::now() + LOST)).unwrap();
    }
    (ours, handles)
}

/// Lost wake-ups would show as answers that do not come: the deadline tells, or the watchdog.
#[test]
fn every_echo_answers_while_procs_change() {
    let (_alone, _watchdog) = (alone(), watchdog());
    const TIME: Duration = Duration::from_millis(1500);
    runtime(1).run(|| {
        let stop = Arc::new(AtomicBool::new(false));
        let answers = Arc::new(AtomicU64::new(0));
        let clients: Vec<_> = (0..24u8)
            .map(|i| {
                let (stop, answers) = (stop.clone(), answers.clone());
                let pause = Duration::from_micros(u64::from(i) * 40);
                // std's sockets go the other way into the poller: armed for each wait.
                let turns = move |mut turn: Box<dyn FnMut(u8) -> io::Result<()> + Send>| {
                    let mut n = 0u8;
                    while !stop.load(SeqCst) {
                        turn(n).unwrap();
                        answers.fetch_add(1, SeqCst);
                        n = n.wrapping_add(1);
                        // Some talk without a break, others let every P go to sleep in between.
                        if !pause.is_zero() {
                            sleep(pause);
                        }
                    }
                };
                if i % 2 == 0 {
                    let (here, there) = UnixStream::pair().unwrap();
                    let server = go(move || echo(there).unwrap());
                    let client = go(move || {
                        turns(Box::new(move |n| {
                            here.set_read_deadline(Some(Instant::now() + LOST))?;
                            ask(&here, n)
                        }));
                    });
                    [server, client]
                } else {
                    let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
                    here.set_read_timeout(Some(LOST)).unwrap();
                    let server = go(move || echo(there).unwrap());
                    [server, go(move || turns(Box::new(move |n| ask(&here, n))))]
                }
            })
            .collect();
        let seed: u64 = rand::random();
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let start = Instant::now();
        let mut changes = 0;
        while start.elapsed() < TIME {
            trefoil::set_procs(rng.random_range(1..=8));
            changes += 1;
            // Everyone is to be served between two changes, now and then.
            let before = answers.load(SeqCst);
            if changes % 8 == 0 {
                yield_until("answers", || answers.load(SeqCst) >= before + 100);
            }
            sleep(Duration::from_micros(rng.random_range(0..4000)));
        }
        stop.store(true, SeqCst);
        join_all(clients.into_iter().flatten());
        println!("{changes} changes, {answers:?} answers");
        assert!(changes >= 20, "only {changes} changes");
        yield_until("the goroutines to end", || trefoil::num_goroutines() == 1);
        assert_eq!(debug::stats().io_waiters, 0);
    });
}

/// More Ps than shards: several share one.
#[test]
fn sixty_four_ps() {
    let (_alone, _watchdog) = (alone(), watchdog());
    const PROCS: usize = 64;
    runtime(PROCS).run(|| {
        let (ours, servers) = echo_on_each_p(PROCS);
        // One after the other, every P idle in between; and all at once.
        for (i, stream) in ours.iter().enumerate() {
            ask(stream, i as u8).unwrap();
        }
        let asking = ours.into_iter().map(|stream| {
            go(move || {
                for turn in 0..50 {
                    stream.set_read_deadline(Some(Instant::now() + LOST)).unwrap();
                    ask(&stream, turn).unwrap();
                }
            })
        });
        join_all(asking);
        join_all(servers).into_iter().for_each(|done| done.unwrap());
    });
}

/// Their Ps are gone, and nobody looks into these shards as his own.
#[test]
fn sockets_of_retired_ps_are_seen_to() {
    let (_alone, _watchdog) = (alone(), watchdog());
    const PROCS: usize = 8;
    runtime(PROCS).run(|| {
        let (ours, servers) = echo_on_each_p(PROCS);
        let retired = |n: usize| {
            let count = || debug::stats().procs.iter().filter(|p| p.status == "retired").count();
            yield_until("the Ps to go", || count() == n);
        };
        trefoil::set_procs(1);
        retired(PROCS - 1);
        let soon = |what: &str| {
            let time = |stream: &UnixStream| {
                stream.set_read_deadline(Some(Instant::now() + LOST)).unwrap();
                let start = Instant::now();
                ask(stream, 7).unwrap();
                start.elapsed()
            };
            assert_soon(what, ours.iter().map(time).collect());
        };
        soon("the P left is idle");
        // Somebody is always runnable: the P never runs out of work, and does not sleep in the poller.
        let stop = Arc::new(AtomicBool::new(false));
        let busy = (0..2).map(|_| {
            let stop = stop.clone();
            go(move || yield_until("the end", || stop.load(SeqCst)))
        });
        let busy: Vec<_> = busy.collect();
        soon("the P left is busy");
        stop.store(true, SeqCst);
        join_all(busy);
        // And with the Ps back.
        trefoil::set_procs(PROCS);
        retired(0);
        soon("all are back");
        drop(ours);
        join_all(servers).into_iter().for_each(|done| done.unwrap());
    });
}

/// Nobody runs out of work, so no P polls; whoever is ready is served nevertheless, within a slice or so. Asked from
/// outside, by a plain thread.
#[test]
fn answers_come_while_every_p_computes() {
    let (_alone, _watchdog) = (alone(), watchdog());
    for procs in [1, 2, 4] {
        runtime(procs).run(|| {
            let (ours, servers) = echo_on_each_p(procs);
            let stop = Arc::new(AtomicBool::new(false));
            let hogs = (0..2 * procs).map(|_| {
                let stop = stop.clone();
                go(move || {
                    while !stop.load(SeqCst) {
                        std::hint::spin_loop();
                    }
                })
            });
            let hogs: Vec<_> = hogs.collect();
            let ours: Vec<std::os::unix::net::UnixStream> =
                ours.into_iter().map(|stream| stream.into_std().unwrap()).collect();
            let (told, tell) = trefoil::chan::bounded(1);
            std::thread::spawn(move || {
                let mut times = Vec::new();
                for turn in 0..40 {
                    let stream = &ours[turn % ours.len()];
                    stream.set_read_timeout(Some(LOST)).unwrap();
                    // So that the server waits again: else it finds the next question without the poller.
                    std::thread::sleep(3 * MS);
                    let start = Instant::now();
                    ask(stream, turn as u8).unwrap();
                    times.push(start.elapsed());
                }
                told.send(times).unwrap();
            });
            let times = tell.recv().unwrap();
            stop.store(true, SeqCst);
            join_all(hogs);
            join_all(servers).into_iter().for_each(|done| done.unwrap());
            assert_soon(&format!("{procs} Ps"), times);
        });
    }
}

#[test]
fn m22_waiting_occupies_no_thread() {
    child_test!();
    common::raise_fd_limit();
    for procs in [1, 2, 8] {
        runtime(procs).run(|| {
            const WAITING: usize = 400;
            let pairs: Vec<_> = (0..WAITING).map(|_| UnixStream::pair().unwrap()).collect();
            let (readers, mut writers): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
            let handles: Vec<_> = readers
                .into_iter()
                .map(|mut stream| go(move || stream.read(&mut [0; 8]).unwrap()))
                .collect();
            yield_until("all to wait", || trefoil::debug::stats().io_waiters == WAITING);
            let threads = common::ms().len();
            assert!(threads <= procs + 3, "{threads} threads for {procs} Ps");
            for writer in &mut writers {
                writer.write_all(b"x").unwrap();
            }
            assert!(handles.into_iter().all(|h| h.join().unwrap() == 1));
            assert_eq!(trefoil::debug::stats().io_waiters, 0);
        });
    }
}

/// Each turn needs the poller, and there is nobody else to look: if the P did not, sysmon would, 10 ms later.
#[test]
fn m23_a_p_without_work_polls_the_network() {
    let _watchdog = watchdog();
    for procs in [1, 2, 8] {
        common::once_in_five(|| {
            runtime(procs).run(|| {
                const TURNS: u32 = 300;
                let (mut here, mut there) = UnixStream::pair().unwrap();
                let echo = go(move || {
                    let mut byte = [0];
                    while there.read(&mut byte).unwrap() == 1 {
                        there.write_all(&byte).unwrap();
                    }
                });
                let start = Instant::now();
                for _ in 0..TURNS {
                    here.write_all(b"x").unwrap();
                    here.read_exact(&mut [0]).unwrap();
                }
                let each = start.elapsed() / TURNS;
                drop(here);
                echo.join().unwrap();
                if each < 2 * MS { Ok(()) } else { Err(format!("{each:?} with {procs} Ps")) }
            })
        });
    }
}

/// The thread that keeps the timers lay down when every P was busy and nobody waited for a descriptor. It must be
/// told when that changes.
#[test]
fn a_keeper_that_sleeps_for_a_timer_learns_of_the_network() {
    let _watchdog = watchdog();
    runtime(1).run(|| {
        let _timer = trefoil::time::Timer::new(Duration::from_secs(20));
        let (mut here, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut stream = UnixStream::from_std(here.try_clone().unwrap()).unwrap();
        let (began, end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let blocked = {
            let (began, end) = (began.clone(), end.clone());
            go(move || {
                trefoil::blocking(|| {
                    began.store(true, SeqCst);
                    while !end.load(SeqCst) {
                        common::pause();
                    }
                });
            })
        };
        yield_until("the other to block", || began.load(SeqCst));
        // It comes back while we hold the P, and its thread lies down.
        end.store(true, SeqCst);
        let guard = trefoil::no_preempt();
        common::spin(20 * MS);
        drop(guard);
        let writer = std::thread::spawn(move || {
            std::thread::sleep(50 * MS);
            there.write_all(b"x").unwrap();
            there
        });
        let start = Instant::now();
        stream.read_exact(&mut [0]).unwrap();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        writer.join().unwrap();
        blocked.join().unwrap();
        here.flush().unwrap();
    });
}

#[test]
fn no_deadlock_is_reported_while_a_socket_is_waited_for() {
    child_test!(|child| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            std::thread::sleep(400 * MS);
            stream.write_all(b"x").unwrap();
        });
        child.env("TREFOIL_TEST_ADDR", &addr).succeed();
        peer.join().unwrap();
    });
    let addr = std::env::var("TREFOIL_TEST_ADDR").unwrap();
    trefoil::run(move || {
        let reader = go(move || TcpStream::connect(addr).unwrap().read(&mut [0; 8]).unwrap());
        assert_eq!(reader.join().unwrap(), 1);
    });
}
