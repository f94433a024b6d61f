//! Channels: what Go's own tests assert (`chan_test.go`, `test/chan`), and what Rust adds: values
//! that are
//! dropped exactly once, plain threads at either end, errors that give the value back.

mod common;

use common::{change_after_time_out, watchdog, yield_until};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::chan::{
    Receiver, RecvError, RecvTimeoutError, SendError, SendTimeoutError, Sender, TryRecvError,
    TrySendError, bounded, never, unbounded,
};
use trefoil::time::sleep;
use trefoil::{go, yield_now};

/// Runs `f` as the main goroutine of runtimes with 1, 2, 4 and 16 Ps.
fn at_all_procs(f: fn()) {
    for procs in [1, 2, 4, 16] {
        let runtime = trefoil::Runtime::builder().procs(procs).build().expect("a runtime");
        runtime.run(f);
    }
}

/// A goroutine or a plain thread, by turns.
enum Handle {
    Goroutine(trefoil::JoinHandle<()>),
    Thread(std::thread::JoinHandle<()>),
}

fn start(thread: bool, f: impl FnOnce() + Send + 'static) -> Handle {
    if thread { Handle::Thread(std::thread::spawn(f)) } else { Handle::Goroutine(go(f)) }
}

impl Handle {
    fn join(self) {
        let result = match self {
            Handle::Goroutine(h) => h.join(),
            Handle::Thread(h) => {
                // `join` of a thread would hold the P that the thread may be waiting for.
                yield_until("a thread", || h.is_finished());
                h.join()
            }
        };
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    }
}

/// Long enough for others to get where they will wait.
fn a_moment() {
    sleep(Duration::from_micros(300));
}

// ---- Go: TestChan, for capacities 0..199.

#[test]
fn empty_recv_blocks_full_send_blocks_close_drains() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in 0..200 {
            // Receiving from an empty channel blocks.
            let (tx, rx) = bounded::<usize>(cap);
            let received = Arc::new(AtomicUsize::new(0));
            let waiting: Vec<_> = (0..2)
                .map(|_| {
                    let (rx, received) = (rx.clone(), received.clone());
                    go(move || {
                        assert_eq!(rx.recv(), Ok(7));
                        received.fetch_add(1, Ordering::SeqCst);
                    })
                })
                .collect();
            a_moment();
            assert_eq!(received.load(Ordering::SeqCst), 0, "cap {cap}: receive from empty");
            assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
            tx.send(7).unwrap();
            tx.send(7).unwrap();
            waiting.into_iter().for_each(|h| h.join().unwrap());
            assert_eq!(received.load(Ordering::SeqCst), 2);

            // Sending to a full one blocks.
            for i in 0..cap {
                tx.send(i).unwrap();
            }
            assert!(tx.is_full() && rx.is_full() && tx.len() == cap && rx.len() == cap);
            let sent = Arc::new(AtomicBool::new(false));
            let sender = go({
                let (tx, sent) = (tx.clone(), sent.clone());
                move || {
                    tx.send(cap).unwrap();
                    sent.store(true, Ordering::SeqCst);
                }
            });
            a_moment();
            assert!(!sent.load(Ordering::SeqCst), "cap {cap}: send to full");
            assert_eq!(tx.try_send(0), Err(TrySendError::Full(0)));
            for i in 0..=cap {
                assert_eq!(rx.recv(), Ok(i));
            }
            sender.join().unwrap();

            // A closed channel is drained, in order, and then stays closed.
            for i in 0..cap {
                tx.send(i).unwrap();
            }
            tx.close();
            assert_eq!(tx.send(1), Err(SendError(1)));
            assert_eq!(tx.try_send(2), Err(TrySendError::Closed(2)));
            for i in 0..cap {
                assert_eq!(rx.recv(), Ok(i));
            }
            for _ in 0..2 {
                assert_eq!(rx.recv(), Err(RecvError));
                assert_eq!(rx.try_recv(), Err(TryRecvError::Closed));
            }
        }
    });
}

#[test]
fn close_wakes_all() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in 0..200 {
            let (tx, rx) = bounded::<usize>(cap);
            let threads = cap % 50 == 0;
            let receivers: Vec<_> = (0..4)
                .map(|i| {
                    let rx = rx.clone();
                    start(threads && i == 0, move || assert_eq!(rx.recv(), Err(RecvError)))
                })
                .collect();
            a_moment();
            tx.close();
            receivers.into_iter().for_each(Handle::join);

            let (tx, rx) = bounded::<usize>(cap);
            (0..cap).for_each(|i| tx.send(i).unwrap());
            let senders: Vec<_> = (0..4)
                .map(|i| {
                    let tx = tx.clone();
                    start(threads && i == 0, move || {
                        assert_eq!(tx.send(1000 + i).unwrap_err().into_inner(), 1000 + i);
                    })
                })
                .collect();
            a_moment();
            // By an explicit close, or because nobody can receive any more.
            if cap % 2 == 0 {
                tx.close()
            } else {
                drop(rx)
            }
            senders.into_iter().for_each(Handle::join);
        }
    });
}

#[test]
fn a_hundred_in_order() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in 0..200 {
            let (tx, rx) = bounded(cap);
            let sender = start(cap % 40 == 3, move || (0..100).for_each(|i| tx.send(i).unwrap()));
            assert_eq!(rx.iter().collect::<Vec<i32>>(), (0..100).collect::<Vec<_>>());
            sender.join();
        }
    });
}

#[test]
fn four_times_a_thousand_are_a_multiset() {
    const WORKERS: usize = 4;
    const VALUES: usize = 1000;
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in (0..200).step_by(7) {
            let (tx, rx) = bounded(cap);
            let (results, all) = bounded(WORKERS);
            let mut handles = Vec::new();
            for w in 0..WORKERS {
                let tx = tx.clone();
                let thread = w == 0 && cap % 5 == 0;
                handles.push(start(thread, move || (0..VALUES).for_each(|i| tx.send(i).unwrap())));
                let (rx, results) = (rx.clone(), results.clone());
                handles.push(start(thread, move || {
                    let mut seen: HashMap<usize, usize> = HashMap::new();
                    for _ in 0..VALUES {
                        *seen.entry(rx.recv().unwrap()).or_default() += 1;
                    }
                    results.send(seen).unwrap();
                }));
            }
            drop(results);
            let mut seen: HashMap<usize, usize> = HashMap::new();
            for (value, n) in all.iter().flatten() {
                *seen.entry(value).or_default() += n;
            }
            assert_eq!(seen.len(), VALUES);
            assert!(seen.values().all(|&n| n == WORKERS));
            handles.into_iter().for_each(Handle::join);
            assert!(rx.is_empty());
        }
    });
}

#[test]
fn len_and_capacity() {
    let _dog = watchdog();
    for cap in 0..200 {
        let (tx, rx) = bounded(cap);
        assert_eq!((tx.capacity(), rx.capacity()), (Some(cap), Some(cap)));
        assert!(rx.is_empty() && tx.is_empty() && (cap == 0) == tx.is_full());
        for i in 0..cap {
            assert_eq!((tx.len(), rx.len()), (i, i));
            tx.try_send(i).unwrap();
        }
        assert!(tx.is_full() && (cap == 0) == rx.is_empty());
        for i in (0..cap).rev() {
            rx.try_recv().unwrap();
            assert_eq!((tx.len(), rx.len()), (i, i));
        }
    }
    let (tx, rx) = unbounded();
    assert_eq!((tx.capacity(), rx.capacity()), (None, None));
    for i in 0..1000 {
        assert!(!tx.is_full() && tx.len() == i);
        tx.send(i).unwrap();
    }
    assert_eq!(rx.try_iter().count(), 1000);
    let rx = never::<u8>();
    assert!(rx.is_empty() && rx.is_full() && rx.capacity() == Some(0) && !rx.is_closed());
}

// ---- Go: TestNonblockRecvRace.

#[test]
fn try_recv_beside_close_finds_the_value() {
    let _dog = watchdog();
    at_all_procs(|| {
        for _ in 0..10_000 {
            let (tx, rx) = bounded(1);
            tx.send(1).unwrap();
            let looker = go({
                let rx = rx.clone();
                move || assert_ne!(rx.try_recv(), Err(TryRecvError::Empty), "ready all the time")
            });
            tx.close();
            let _ = rx.recv();
            looker.join().unwrap();
        }
    });
}

// ---- Go: TestMultiConsumer.

#[test]
fn multi_consumer() {
    const WORKERS: usize = 23;
    const ITEMS: usize = 271_828;
    const PRIMES: [usize; 8] = [2, 3, 7, 11, 13, 17, 19, 23];
    let _dog = watchdog();
    at_all_procs(|| {
        let (queue, work) = bounded(WORKERS * 3);
        let (results, done) = bounded(WORKERS * 3);
        for w in 0..WORKERS {
            let (work, results) = (work.clone(), results.clone());
            go(move || {
                for v in work {
                    // Mess with the order, deterministically.
                    if PRIMES[w % PRIMES.len()] == v {
                        yield_now();
                    }
                    results.send(v).unwrap();
                }
            });
        }
        drop((work, results));
        let feeder = go(move || {
            let mut sum = 0;
            for i in 0..ITEMS {
                let v = PRIMES[i % PRIMES.len()];
                sum += v;
                queue.send(v).unwrap();
            }
            sum
        });
        let (mut n, mut sum) = (0, 0);
        for v in done {
            n += 1;
            sum += v;
        }
        assert_eq!((n, sum), (ITEMS, feeder.join().unwrap()));
    });
}

// ---- Go: test/chan.

#[test]
fn waiters_are_served_in_their_order() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1, 5] {
            // Receivers: each waits before the next comes.
            let (tx, rx) = bounded::<usize>(cap);
            let receivers: Vec<_> = (0..10)
                .map(|i| {
                    let receiver = rx.clone();
                    let h = go(move || assert_eq!(receiver.recv(), Ok(i)));
                    yield_until("a receiver to wait", || rx.waiters() == (0, i + 1));
                    h
                })
                .collect();
            (0..10).for_each(|i| tx.send(i).unwrap());
            receivers.into_iter().for_each(|h| h.join().unwrap());
            // Senders.
            (0..cap).for_each(|i| tx.send(i).unwrap());
            for i in 0..10 {
                let sender = tx.clone();
                go(move || sender.send(cap + i).unwrap());
                yield_until("a sender to wait", || rx.waiters() == (i + 1, 0));
            }
            (0..cap + 10).for_each(|i| assert_eq!(rx.recv(), Ok(i)));
            assert_eq!(rx.waiters(), (0, 0));
        }
    });
}

#[test]
fn a_chain_of_ten_thousand() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (leftmost, mut right) = bounded::<u32>(0);
        for _ in 0..10_000 {
            let (tx, rx) = bounded(0);
            let from = std::mem::replace(&mut right, rx);
            go(move || tx.send(from.recv().unwrap() + 1).unwrap());
        }
        go(move || leftmost.send(0).unwrap());
        assert_eq!(right.recv(), Ok(10_000));
    });
}

#[test]
fn try_operations_never_wait() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1] {
            let (tx, rx) = bounded::<String>(cap);
            assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
            if cap == 0 {
                assert!(tx.try_send("x".into()).unwrap_err().is_full());
            }
            // To one who waits; the loops need the scheduler to run the other.
            let receiver = go(move || rx.recv().unwrap());
            let mut value = Some("hello".to_string());
            yield_until("a receiver", || match tx.try_send(value.take().unwrap()) {
                Ok(()) => true,
                Err(e) => {
                    value = Some(e.into_inner());
                    false
                }
            });
            assert_eq!(receiver.join().unwrap(), "hello");

            let (tx, rx) = bounded(cap);
            go(move || tx.send(5));
            let mut got = None;
            yield_until("a sender", || {
                got = rx.try_recv().ok();
                got.is_some()
            });
            assert_eq!(got, Some(5));
        }
    });
}

#[test]
fn a_loop_of_try_recv_lets_others_run() {
    let _dog = watchdog();
    let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
    runtime.run(|| {
        let (tx, rx) = bounded(1);
        go(move || tx.send(1));
        while rx.try_recv().is_err() {} // preempted at the end of its slice
    });
}

#[test]
fn prime_sieve() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (tx, mut numbers) = bounded(0);
        go(move || (2..).take_while(|&n| tx.send(n).is_ok()).count());
        let mut primes = Vec::new();
        for _ in 0..100 {
            let prime: u64 = numbers.recv().unwrap();
            primes.push(prime);
            let (tx, rx) = bounded(0);
            let from = std::mem::replace(&mut numbers, rx);
            go(move || from.iter().filter(|n| n % prime != 0).all(|n| tx.send(n).is_ok()));
        }
        assert_eq!((primes[0], primes[24], primes[99]), (2, 97, 541));
    });
}

/// Go: test/chan/powser1.go, in small: lazy power series, every coefficient a goroutine's work.
#[test]
fn power_series() {
    fn series(f: impl FnOnce(Sender<i64>) + Send + 'static) -> Receiver<i64> {
        let (tx, rx) = bounded(0);
        go(move || f(tx));
        rx
    }
    fn ones() -> Receiver<i64> {
        series(|tx| while tx.send(1).is_ok() {})
    }
    fn split(from: Receiver<i64>) -> (Receiver<i64>, Receiver<i64>) {
        let ((ta, ra), (tb, rb)) = (unbounded(), bounded(0));
        go(move || {
            for v in from {
                let _ = ta.send(v);
                if tb.send(v).is_err() {
                    break;
                }
            }
        });
        (ra, rb)
    }
    fn mul(f: Receiver<i64>, g: Receiver<i64>) -> Receiver<i64> {
        series(move |tx| {
            let (mut fs, mut gs) = (Vec::new(), Vec::new());
            loop {
                fs.push(f.recv().unwrap());
                gs.push(g.recv().unwrap());
                let coefficient = fs.iter().zip(gs.iter().rev()).map(|(a, b)| a * b).sum();
                if tx.send(coefficient).is_err() {
                    break;
                }
            }
        })
    }
    let _dog = watchdog();
    at_all_procs(|| {
        // 1/(1-x)² = Σ (n+1) xⁿ; its square Σ C(n+3, 3) xⁿ.
        let (a, b) = split(mul(ones(), ones()));
        let fourth = mul(a, b);
        let got: Vec<i64> = fourth.iter().take(12).collect();
        let expected: Vec<i64> = (0..12).map(|n| (n + 1) * (n + 2) * (n + 3) / 6).collect();
        assert_eq!(got, expected);
    });
}

#[test]
fn elements_of_any_shape() {
    #[repr(align(256))]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Aligned(u8);
    fn all<T: Clone + PartialEq + std::fmt::Debug + Send + 'static>(value: T) {
        for (tx, rx) in
            [0, 1, 3].into_iter().map(bounded::<T>).chain(std::iter::once_with(unbounded::<T>))
        {
            let h = go({
                let value = value.clone();
                move || (0..200).for_each(|_| tx.send(value.clone()).unwrap())
            });
            let mut n = 0;
            for v in &rx {
                assert_eq!(v, value);
                n += 1;
            }
            assert_eq!(n, 200);
            h.join().unwrap();
        }
    }
    let _dog = watchdog();
    at_all_procs(|| {
        all(());
        all([0u8; 0]);
        all(Aligned(7));
        all(true);
        all((1u8, 2u16, 3u8));
        all([9u64; 512]); // 4 KiB
        all(vec![1, 2, 3]);
        all(Some(Box::new("boxed")));
        let (tx, rx) = bounded::<()>(usize::MAX);
        assert!(tx.capacity().is_some() && !tx.is_full());
        tx.send(()).unwrap();
        assert_eq!(rx.recv(), Ok(()));
        let (tx, rx) = unbounded::<Aligned>();
        (0..100).for_each(|i| tx.send(Aligned(i)).unwrap());
        assert!(
            rx.iter()
                .take(100)
                .enumerate()
                .all(|(i, v)| { (&raw const v).is_aligned() && usize::from(v.0) == i })
        );
    });
}

#[test]
fn too_large_a_channel_panics() {
    assert!(catch_unwind(|| bounded::<u8>(usize::MAX)).is_err());
    assert!(catch_unwind(|| bounded::<u64>(usize::MAX / 8)).is_err());
}

#[test]
fn unbounded_keeps_everything() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (tx, rx) = unbounded();
        (0..1_000_000).for_each(|i| tx.send(i).unwrap());
        assert_eq!(rx.len(), 1_000_000);
        assert!(rx.iter().take(1_000_000).enumerate().all(|(i, v)| i == v));
        // Fill levels that begin, end and straddle blocks, over and over.
        let mut next = 0;
        let mut expected = 0;
        for n in [1, 63, 64, 65, 127, 128, 129, 7, 1000].into_iter().cycle().take(200) {
            (0..n).for_each(|_| {
                tx.send(next).unwrap();
                next += 1;
            });
            for _ in 0..n.min(rx.len() - rx.len() / 3) {
                assert_eq!(rx.recv(), Ok(expected));
                expected += 1;
            }
        }
        drop(tx);
        rx.iter().for_each(|v| {
            assert_eq!(v, expected);
            expected += 1;
        });
        assert_eq!(next, expected);
        // Several at both ends.
        let (tx, rx) = unbounded::<usize>();
        for s in 0..4 {
            let tx = tx.clone();
            start(s == 0, move || (0..20_000).for_each(|i| tx.send(i).unwrap()));
        }
        drop(tx);
        let sums: Vec<_> = (0..4)
            .map(|_| {
                go({
                    let rx = rx.clone();
                    move || rx.iter().sum::<usize>()
                })
            })
            .collect();
        let sum: usize = sums.into_iter().map(|h| h.join().unwrap()).sum();
        assert_eq!(sum, 4 * 20_000 * 19_999 / 2);
    });
}

// ---- Time.

#[test]
fn timeouts() {
    const SHORT: Duration = Duration::from_millis(5);
    fn check() {
        let (tx, rx) = bounded::<i32>(0);
        let start = Instant::now();
        assert_eq!(rx.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
        assert_eq!(tx.send_timeout(1, SHORT), Err(SendTimeoutError::Timeout(1)));
        assert!(start.elapsed() >= 2 * SHORT);
        assert_eq!(rx.recv_deadline(start), Err(RecvTimeoutError::Timeout));
        assert_eq!(tx.send_deadline(1, start), Err(SendTimeoutError::Timeout(1)));
        assert_eq!(rx.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Timeout));
        assert_eq!(never::<u8>().recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
        // In time, with a far deadline.
        for limit in [Duration::from_secs(50), Duration::MAX] {
            let h = go({
                let rx = rx.clone();
                move || rx.recv_timeout(limit)
            });
            tx.send_timeout(5, limit).unwrap();
            assert_eq!(h.join().unwrap(), Ok(5));
        }
        // Closed while it waits.
        let h = go({
            let rx = rx.clone();
            move || rx.recv_timeout(Duration::from_secs(50))
        });
        let g = go({
            let rx = rx.clone();
            move || rx.recv()
        });
        sleep(SHORT);
        tx.close();
        assert_eq!(h.join().unwrap(), Err(RecvTimeoutError::Closed));
        assert_eq!(g.join().unwrap(), Err(RecvError));
        assert_eq!(tx.send_timeout(9, SHORT), Err(SendTimeoutError::Closed(9)));
        // A value in the buffer is had also when it is late.
        let (tx, rx) = bounded(1);
        assert_eq!(tx.send_deadline(3, start), Ok(()));
        assert_eq!(rx.recv_deadline(start), Ok(3));
    }
    let _dog = watchdog();
    at_all_procs(check);
    check(); // on this plain thread
}

/// A value sent while the receiver times out is either received or still there: never lost.
#[test]
fn a_timeout_loses_nothing() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1] {
            let (tx, rx) = bounded::<u32>(cap);
            let threads: Vec<_> = (0..4u32)
                .map(|i| {
                    let rx = rx.clone();
                    let (sum, summed) = bounded(1);
                    start(i == 0, move || {
                        let mut got = 0;
                        loop {
                            match rx.recv_timeout(Duration::from_micros(u64::from(i) * 20)) {
                                Ok(n) => got += u64::from(n),
                                Err(RecvTimeoutError::Timeout) => yield_now(),
                                Err(RecvTimeoutError::Closed) => break,
                            }
                        }
                        sum.send(got).unwrap();
                    });
                    summed
                })
                .collect();
            let mut sent = 0;
            for n in 0..2000u32 {
                let mut value = n;
                loop {
                    match tx.send_timeout(value, Duration::from_micros(u64::from(n % 50))) {
                        Ok(()) => break,
                        Err(SendTimeoutError::Timeout(back)) => value = back,
                        Err(SendTimeoutError::Closed(_)) => panic!("closed"),
                    }
                }
                sent += u64::from(n);
            }
            drop(tx);
            let got: u64 = threads.into_iter().map(|rx| rx.recv().unwrap()).sum();
            assert_eq!(got, sent);
        }
    });
}

#[test]
fn never_is_never() {
    let _dog = watchdog();
    at_all_procs(|| {
        let rx = never::<i32>();
        assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
        assert!(rx.same_channel(&rx.clone()));
        let h = go(move || rx.recv());
        a_moment();
        assert!(!h.is_finished());
    });
}

// ---- Plain threads.

#[test]
fn threads_and_goroutines_in_every_combination() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1, 64] {
            for kinds in 0..4 {
                let (tx, rx) = bounded(cap);
                let (back, echoed) = bounded(cap);
                let echo = start(kinds & 1 != 0, move || {
                    for v in rx {
                        back.send(v).unwrap();
                    }
                });
                let sender = start(kinds & 2 != 0, move || {
                    for i in 0..300 {
                        tx.send(i).unwrap();
                        assert_eq!(echoed.recv(), Ok(i));
                    }
                });
                sender.join();
                echo.join();
            }
        }
    });
}

#[test]
fn goroutines_of_two_runtimes() {
    let _dog = watchdog();
    let (tx, rx) = bounded(0);
    let (back, echoed) = bounded(0);
    let other = std::thread::spawn(move || {
        let runtime = trefoil::Runtime::builder().procs(2).build().unwrap();
        runtime.run(move || rx.iter().for_each(|v: u32| back.send(v + 1).unwrap()));
    });
    let runtime = trefoil::Runtime::builder().procs(2).build().unwrap();
    runtime.run(move || {
        for i in 0..2000 {
            tx.send(i).unwrap();
            assert_eq!(echoed.recv(), Ok(i + 1));
        }
    });
    other.join().unwrap();
}

// ---- Values are dropped exactly once.

/// Counts how many exist.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(alive: &Arc<AtomicUsize>) -> Counted {
        alive.fetch_add(1, Ordering::SeqCst);
        Counted(alive.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        assert_ne!(self.0.fetch_sub(1, Ordering::SeqCst), 0, "dropped twice");
    }
}

#[test]
fn every_value_is_dropped_exactly_once() {
    let _dog = watchdog();
    at_all_procs(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let new = || Counted::new(&alive);
        let channels = || {
            [0, 1, 3, 100]
                .into_iter()
                .map(bounded::<Counted>)
                .chain(std::iter::once_with(unbounded::<Counted>))
        };
        for (tx, rx) in channels() {
            // Received, refused, timed out.
            let receiver = go({
                let rx = rx.clone();
                move || rx.iter().take(150).count()
            });
            (0..150).for_each(|_| tx.send(new()).unwrap());
            assert_eq!(receiver.join().unwrap(), 150);
            assert_eq!(alive.load(Ordering::SeqCst), 0);
            if let Some(cap) = tx.capacity() {
                (0..cap).for_each(|_| tx.try_send(new()).unwrap());
                assert!(tx.try_send(new()).is_err());
                assert!(tx.send_timeout(new(), Duration::from_micros(50)).is_err());
                assert_eq!(alive.load(Ordering::SeqCst), cap);
            }
            // Left in the channel: dropped with the last receiver, though a sender exists.
            let waiting = go({
                let (tx, value) = (tx.clone(), new());
                move || tx.send(value)
            });
            a_moment();
            drop(rx);
            // Where there is always room it was sent, unless it came too late.
            let sent = waiting.join().unwrap();
            assert!(sent.is_err() || tx.capacity().is_none());
            drop(sent);
            assert_eq!(alive.load(Ordering::SeqCst), 0);
            assert!(tx.send(new()).is_err());
            assert_eq!(alive.load(Ordering::SeqCst), 0);
        }
        // Left in the channel, the receiver goes last.
        for (tx, rx) in channels() {
            let n = tx.capacity().unwrap_or(1000);
            (0..n).for_each(|_| tx.send(new()).unwrap());
            drop(tx);
            assert_eq!(alive.load(Ordering::SeqCst), n);
            if n > 0 {
                drop(rx.recv());
            }
            drop(rx);
            assert_eq!(alive.load(Ordering::SeqCst), 0);
        }
    });
}

#[test]
fn handles_come_and_go_in_any_order() {
    let _dog = watchdog();
    at_all_procs(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        for round in 0..2000 {
            let (tx, rx) = bounded(round % 3);
            let alive = alive.clone();
            let a = start(round % 100 == 0, move || {
                let tx2 = tx.clone();
                drop(tx);
                while tx2.send(Counted::new(&alive)).is_ok() {}
            });
            let b = go(move || {
                let rx2 = rx.clone();
                drop(rx);
                rx2.iter().take(round % 7).count()
            });
            b.join().unwrap();
            a.join();
        }
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn drops_that_panic_or_park() {
    struct Rude {
        _counted: Counted,
        panics: bool,
    }
    impl Drop for Rude {
        fn drop(&mut self) {
            sleep(Duration::from_micros(50));
            yield_now();
            if self.panics {
                panic!("on purpose");
            }
        }
    }
    let _dog = watchdog();
    std::panic::set_hook(Box::new(|info| {
        if info.payload().downcast_ref::<&str>().is_none_or(|s| *s != "on purpose") {
            eprintln!("{info}");
        }
    }));
    at_all_procs(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        for (tx, rx) in [bounded(100), unbounded()] {
            for i in 0..100 {
                tx.send(Rude { _counted: Counted::new(&alive), panics: i == 3 }).unwrap();
            }
            // The panic comes out, and the others are dropped all the same.
            assert!(catch_unwind(AssertUnwindSafe(|| drop(rx))).is_err());
            assert_eq!(alive.load(Ordering::SeqCst), 0);
            assert!(tx.is_closed());
            drop(tx.send(Rude { _counted: Counted::new(&alive), panics: false }));
        }
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    });
}

/// A channel of channels of …: dropping the outermost drops all.
#[test]
fn channels_through_channels() {
    let _dog = watchdog();
    at_all_procs(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let (tx, rx) = bounded(4);
        for _ in 0..4 {
            let (inner, received) = unbounded();
            (0..10).for_each(|_| inner.send(Counted::new(&alive)).unwrap());
            tx.send((inner, received)).unwrap();
        }
        assert_eq!(alive.load(Ordering::SeqCst), 40);
        drop(rx);
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    });
}

// ---- The face.

#[test]
fn iterators() {
    let (tx, rx) = bounded(10);
    (0..6).for_each(|i| tx.send(i).unwrap());
    assert_eq!(rx.try_iter().take(2).collect::<Vec<_>>(), [0, 1]);
    drop(tx);
    let mut n = 2;
    for v in &rx {
        assert_eq!(v, n);
        n += 1;
        if n == 4 {
            break;
        }
    }
    assert_eq!(rx.into_iter().collect::<Vec<_>>(), [4, 5]);
}

#[test]
fn errors_say_what_and_give_back() {
    use std::error::Error;
    struct Opaque; // neither Debug nor Clone
    fn text<E: Error>(e: E) -> (String, String) {
        (e.to_string(), format!("{e:?}"))
    }
    let (tx, rx) = bounded(0);
    assert!(text(tx.try_send(Opaque).unwrap_err()).0.contains("full"));
    assert!(text(tx.send_timeout(Opaque, Duration::ZERO).unwrap_err()).0.contains("timed out"));
    assert!(text(rx.try_recv().map(|_| ()).unwrap_err()).0.contains("empty"));
    tx.close();
    let closed = text(tx.send(Opaque).unwrap_err());
    assert_eq!(closed, ("sending on a closed channel".into(), "SendError(..)".into()));
    assert!(text(rx.recv().map(|_| ()).unwrap_err()).0.contains("closed"));
    let Opaque = tx.send(Opaque).unwrap_err().into_inner();
    let Opaque = tx.try_send(Opaque).unwrap_err().into_inner();
    assert_eq!(TryRecvError::from(RecvError), TryRecvError::Closed);
    assert_eq!(RecvTimeoutError::from(RecvError), RecvTimeoutError::Closed);
    assert!(TrySendError::from(SendError(1)).is_closed());
    assert_eq!(format!("{tx:?} {rx:?}"), "Sender { .. } Receiver { .. }");
}

#[test]
fn handles_are_send_and_sync_for_values_that_are_send() {
    fn check<T: Send + Sync + std::panic::UnwindSafe>() {}
    check::<Sender<std::cell::Cell<i32>>>();
    check::<Receiver<std::cell::Cell<i32>>>();
}

#[test]
fn same_channel() {
    let ((a, ra), (b, rb)) = (bounded::<i32>(0), bounded::<i32>(0));
    assert!(a.same_channel(&a.clone()) && !a.same_channel(&b));
    assert!(ra.same_channel(&ra.clone()) && !ra.same_channel(&rb) && !ra.same_channel(&never()));
}

#[test]
fn a_value_that_comes_before_a_timed_out_receiver_runs_is_received() {
    let _dog = watchdog();
    let (tx, rx) = bounded(1);
    let wait = move |limit| rx.recv_timeout(limit);
    assert_eq!(change_after_time_out(wait, || tx.try_send(7).unwrap()), Ok(7));
}

#[test]
fn a_value_is_sent_if_room_comes_before_a_timed_out_sender_runs() {
    let _dog = watchdog();
    let (tx, rx) = bounded(1);
    tx.send(1).unwrap();
    let wait = move |limit| tx.send_timeout(2, limit);
    assert_eq!(change_after_time_out(wait, || assert_eq!(rx.try_recv(), Ok(1))), Ok(()));
    assert_eq!(rx.recv(), Ok(2));
}
