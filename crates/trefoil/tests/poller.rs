//! The poller: a goroutine that waits for a descriptor occupies no thread and is always woken. The
//! poller has shards: a descriptor belongs to the shard of the P on which a goroutine first waited
//! for it, and is polled whatever becomes of that P. Statements 22 and 23 of the table in
//! `mission/main.rs`.

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

/// After this time without an answer, a wake-up was lost.
const LOST: Duration = Duration::from_secs(10);

/// Lets one test run at a time: 64 Ps would disturb the tests that measure times.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

/// Asserts that the median is below 100 ms.
fn assert_soon(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let (middle, worst) = (times[times.len() / 2], times[times.len() - 1]);
    println!("{what}: median {middle:?}, worst {worst:?}");
    assert!(middle < 100 * MS, "{what}: {times:?}");
}

/// Sends every byte back until the other end is closed.
fn echo(mut stream: impl Read + Write) -> io::Result<()> {
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 {
        stream.write_all(&byte)?;
    }
    Ok(())
}

/// Sends one byte and expects it back.
fn ask(mut stream: impl Read + Write, byte: u8) -> io::Result<()> {
    stream.write_all(&[byte])?;
    let mut answer = [!byte];
    stream.read_exact(&mut answer)?;
    assert_eq!(answer, [byte]);
    Ok(())
}

/// Starts `n` goroutines that run at once, each on its own P, and then echo, so that each socket
/// belongs to another shard. Returns the other ends and the goroutines.
fn echo_on_each_p(n: usize) -> (Vec<UnixStream>, Vec<JoinHandle<io::Result<()>>>) {
    let here = Arc::new(AtomicUsize::new(0));
    let (ours, theirs): (Vec<_>, Vec<_>) = (0..n).map(|_| UnixStream::pair().unwrap()).unzip();
    let start = |stream: UnixStream| {
        let here = here.clone();
        go(move || {
            // Until it waits: a goroutine that is preempted may continue on another P.
            let held = trefoil::no_preempt();
            here.fetch_add(1, SeqCst);
            hold_until("the other goroutines to run", || here.load(SeqCst) == n);
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
        // Not a yield: alone on its P this goroutine would keep it, and every echo needs one.
        sleep(MS);
    }
    for stream in &ours {
        stream.set_read_deadline(Some(Instant::now() + LOST)).unwrap();
    }
    (ours, handles)
}

/// A lost wake-up shows as an answer that does not come before the deadline or the watchdog.
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
                // Sockets of std use the poller differently: they are armed for each wait.
                let turns = move |mut turn: Box<dyn FnMut(u8) -> io::Result<()> + Send>| {
                    let mut n = 0u8;
                    while !stop.load(SeqCst) {
                        turn(n).unwrap();
                        answers.fetch_add(1, SeqCst);
                        n = n.wrapping_add(1);
                        // Some talk without a break, others let every P become idle in between.
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
            // Now and then wait for answers between two changes.
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

/// Several Ps share a shard.
#[test]
fn echoes_answer_with_more_ps_than_shards() {
    let (_alone, _watchdog) = (alone(), watchdog());
    const PROCS: usize = 64;
    runtime(PROCS).run(|| {
        let (ours, servers) = echo_on_each_p(PROCS);
        // First one after the other, with every P idle in between, then all at once.
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

/// After `set_procs(1)` no P polls the other shards as its own.
#[test]
fn sockets_of_retired_ps_are_still_polled() {
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
        // Always a runnable goroutine: the P never becomes idle and does not block in the poller.
        let stop = Arc::new(AtomicBool::new(false));
        let busy = (0..2).map(|_| {
            let stop = stop.clone();
            go(move || yield_until("the end", || stop.load(SeqCst)))
        });
        let busy: Vec<_> = busy.collect();
        soon("the P left is busy");
        stop.store(true, SeqCst);
        join_all(busy);
        // The same after the Ps have returned.
        trefoil::set_procs(PROCS);
        retired(0);
        soon("all Ps are back");
        drop(ours);
        join_all(servers).into_iter().for_each(|done| done.unwrap());
    });
}

/// No P is idle, so that none polls; ready goroutines run nevertheless, within about a time slice.
/// A plain thread asks.
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
                    // Let the server wait again: otherwise it reads the byte without the poller.
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
fn goroutines_that_wait_for_sockets_occupy_no_threads() {
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
            yield_until("all goroutines to wait", || trefoil::debug::stats().io_waiters == WAITING);
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

/// Each turn needs the poller. If the idle P did not poll, sysmon would do it 10 ms later.
#[test]
fn an_idle_p_polls_the_network_at_once() {
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

/// The idle poller began to wait for a timer when every P was busy and no goroutine waited for a
/// descriptor. It must be woken when one does.
#[test]
fn an_idle_poller_that_waits_for_a_timer_notices_a_new_socket() {
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
        yield_until("the other goroutine to block", || began.load(SeqCst));
        // It returns while this goroutine keeps the P, and its M becomes idle.
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
fn waiting_for_a_socket_is_no_deadlock() {
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
