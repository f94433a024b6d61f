//! `select!` and `Select`: what Go's own tests assert (`chan_test.go`, `test/chan/select*.go`,
//! `doubleselect.go`), and what the macro promises.

mod common;

use common::{change_after_time_out, rss, watchdog, yield_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::chan::{
    Receiver, RecvError, Select, SendError, Sender, TrySelectError, bounded, never, unbounded,
};
use trefoil::time::sleep;
use trefoil::{go, select, yield_now};

/// Runs `f` as the main goroutine of runtimes with 1, 2, 4 and 16 Ps.
fn at_all_procs(f: fn()) {
    for procs in [1, 2, 4, 16] {
        let runtime = trefoil::Runtime::builder().procs(procs).build().expect("a runtime");
        runtime.run(f);
    }
}

fn start(thread: bool, f: impl FnOnce() + Send + 'static) -> Receiver<()> {
    let (done, ended) = bounded(1);
    let run = move || {
        f();
        let _ = done.send(());
    };
    if thread {
        std::thread::spawn(run);
    } else {
        go(run);
    }
    ended
}

/// Long enough for others to get where they will wait.
fn a_moment() {
    sleep(Duration::from_micros(500));
}

// ---- Go: TestNonblockSelectRace, TestNonblockSelectRace2.

#[test]
fn default_is_not_taken_while_one_channel_is_always_ready() {
    let _dog = watchdog();
    at_all_procs(|| {
        for _ in 0..100_000 / 4 {
            let ((t1, c1), (t2, c2)) = (bounded(1), bounded(1));
            t1.send(1).unwrap();
            let looker = go({
                let (c1, c2) = (c1.clone(), c2.clone());
                move || {
                    select! {
                        recv(c1) -> _ => true,
                        recv(c2) -> _ => true,
                        default => false,
                    }
                }
            });
            t2.send(1).unwrap();
            select! {
                recv(c1) -> _ => {}
                default => {}
            }
            assert!(looker.join().unwrap(), "one of them was ready all the time");
        }
    });
}

#[test]
fn default_is_not_taken_while_one_is_ready_or_closed() {
    let _dog = watchdog();
    at_all_procs(|| {
        for _ in 0..100_000 / 4 {
            let ((t1, c1), (t2, c2)) = (bounded(1), bounded::<i32>(0));
            t1.send(1).unwrap();
            let looker = go({
                let (c1, c2) = (c1.clone(), c2.clone());
                move || {
                    select! {
                        recv(c1) -> _ => true,
                        recv(c2) -> _ => true,
                        default => false,
                    }
                }
            });
            t2.close();
            select! {
                recv(c1) -> _ => {}
                default => {}
            }
            assert!(looker.join().unwrap(), "one of them was ready all the time");
        }
    });
}

/// Waits until `turn` is `n`, without parking: whoever changes it runs at the same time, if there is a P for it.
fn spin_until(turn: &AtomicUsize, n: usize) {
    while turn.load(Ordering::Acquire) != n {
        (0..100).for_each(|_| std::hint::spin_loop());
        yield_now();
    }
}

#[test]
fn a_select_does_not_time_out_while_one_channel_is_always_ready() {
    let _dog = watchdog();
    const ROUNDS: usize = 20_000;
    // On one CPU a turn takes as long as the kernel lets the other thread spin.
    const LONG_ENOUGH: Duration = Duration::from_secs(2);
    at_all_procs(|| {
        let ((t1, r1), (t2, r2)) = (bounded(1), bounded(1));
        let idle: Vec<_> = (0..6).map(|_| bounded::<i32>(1)).collect();
        let (turn, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let changer = go({
            let (r1, turn, over) = (r1.clone(), turn.clone(), over.clone());
            move || {
                for round in 0.. {
                    spin_until(&turn, 2 * round + 1);
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                    t2.send(1).unwrap();
                    let _ = r1.try_recv();
                    turn.store(2 * round + 2, Ordering::Release);
                }
            }
        });
        let mut timed_out = 0;
        let start = Instant::now();
        for round in 0.. {
            if round == ROUNDS || start.elapsed() > LONG_ENOUGH {
                over.store(true, Ordering::Relaxed);
                turn.store(2 * round + 1, Ordering::Release);
                break;
            }
            t1.send(1).unwrap();
            let mut select = Select::new();
            select.recv(&r1);
            idle.iter().for_each(|(_, rx)| _ = select.recv(rx));
            select.recv(&r2);
            turn.store(2 * round + 1, Ordering::Release);
            timed_out += usize::from(select.select_timeout(Duration::ZERO).is_err());
            spin_until(&turn, 2 * round + 2);
            let _ = (r1.try_recv(), r2.try_recv());
        }
        changer.join().unwrap();
        assert_eq!(timed_out, 0, "one of them was ready all the time");
    });
}

#[test]
fn a_value_that_comes_before_a_timed_out_select_runs_is_received() {
    let _dog = watchdog();
    let ((t1, c1), (_t2, c2)) = (bounded(1), bounded::<i32>(1));
    let wait = move |limit| {
        select! {
            recv(c1) -> v => v.ok(),
            recv(c2) -> v => v.ok(),
            after(limit) => None,
        }
    };
    assert_eq!(change_after_time_out(wait, || t1.try_send(7).unwrap()), Some(7));
}

// ---- Go: TestSelfSelect.

#[test]
fn a_select_never_meets_itself() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 10] {
            let (tx, rx) = bounded(cap);
            let players: Vec<_> = (0..2)
                .map(|p| {
                    let (tx, rx) = (tx.clone(), rx.clone());
                    start(cap == 0 && p == 1, move || {
                        for i in 0..1000 {
                            let got = if p == 0 || i % 2 == 0 {
                                select! {
                                    send(tx, p) -> _ => None,
                                    recv(rx) -> v => v.ok(),
                                }
                            } else {
                                select! {
                                    recv(rx) -> v => v.ok(),
                                    send(tx, p) -> _ => None,
                                }
                            };
                            assert!(cap != 0 || got != Some(p), "received its own value");
                        }
                    })
                })
                .collect();
            players.iter().for_each(|p| p.recv().unwrap());
        }
    });
}

// ---- Go: TestSelectStress.

#[test]
fn stress() {
    let _dog = watchdog();
    for procs in [1, 2, 4, 16] {
        // Go's number at Go's size; ten seconds more in a debug build, at all sizes.
        let n = if procs == 4 || !cfg!(debug_assertions) { 100_000 } else { 10_000 };
        let runtime = trefoil::Runtime::builder().procs(procs).build().expect("a runtime");
        runtime.run(|| stress_with(n));
    }
}

fn stress_with(n: usize) {
    let channels: Vec<(Sender<u32>, Receiver<u32>)> =
        [0, 0, 2, 3].into_iter().map(bounded).collect();
    let mut all = Vec::new();
    for (k, (tx, rx)) in channels.iter().cloned().enumerate() {
        all.push(start(k == 1, move || (0..n).for_each(|_| tx.send(0).unwrap())));
        all.push(start(k == 2, move || (0..n).for_each(|_| assert!(rx.recv().is_ok()))));
    }
    let (mut t, mut r): (Vec<_>, Vec<_>) = channels.into_iter().map(|(t, r)| (Some(t), r)).unzip();
    // One that sends n to each in a single select …
    all.push(start(false, move || {
        let closed = bounded::<u32>(0).0; // a sender that is not chosen while others are there
        let mut count = [0; 4];
        while t.iter().any(Option::is_some) {
            // A spent channel is replaced by one that nobody receives from.
            let (spare, _keep) = bounded(0);
            let tx: Vec<&Sender<u32>> = t.iter().map(|t| t.as_ref().unwrap_or(&spare)).collect();
            let i = select! {
                send(tx[3], 0) -> r => { r.unwrap(); 3 }
                send(tx[2], 0) -> r => { r.unwrap(); 2 }
                send(tx[0], 0) -> r => { r.unwrap(); 0 }
                send(tx[1], 0) -> r => { r.unwrap(); 1 }
            };
            count[i] += 1;
            if count[i] == n {
                t[i] = None;
            }
        }
        drop(closed);
    }));
    // … and one that receives n from each.
    all.push(start(false, move || {
        let mut count = [0; 4];
        for _ in 0..4 * n {
            let i = select! {
                recv(r[0]) -> v => { v.unwrap(); 0 }
                recv(r[1]) -> v => { v.unwrap(); 1 }
                recv(&r[2]) -> v => { v.unwrap(); 2 }
                recv(&r[3]) -> v => { v.unwrap(); 3 }
            };
            count[i] += 1;
            if count[i] == n {
                r[i] = never();
            }
        }
        assert_eq!(count, [n; 4]);
    }));
    all.iter().for_each(|done| done.recv().unwrap());
}

// ---- Go: TestSelectFairness, TestPseudoRandomSend.

#[test]
fn fairness() {
    const TRIALS: usize = 10_000;
    let _dog = watchdog();
    fn check() {
        let ((t1, c1), (t2, c2)) = (bounded(TRIALS + 1), bounded(TRIALS + 1));
        for _ in 0..=TRIALS {
            t1.send(1).unwrap();
            t2.send(2).unwrap();
        }
        let (_t3, c3) = bounded::<i32>(0);
        let (_t4, c4) = bounded::<i32>(0);
        let mut first = 0;
        for _ in 0..TRIALS {
            first += select! {
                recv(c3) -> _ => unreachable!(),
                recv(c4) -> _ => unreachable!(),
                recv(c1) -> v => usize::from(v == Ok(1)),
                recv(c2) -> v => usize::from(v == Ok(1)),
            };
        }
        // 10 sigma: once in 10^23 by chance.
        let sigma = (TRIALS as f64 * 0.25).sqrt();
        let off = (first as f64 - TRIALS as f64 / 2.0).abs();
        assert!(off < 10.0 * sigma, "{first} of {TRIALS}");
    }
    at_all_procs(check);
    check(); // on this plain thread
}

/// Every subset of five arms is chosen from evenly: a random rotation would not do.
#[test]
fn every_ready_arm_has_the_same_chance() {
    const TRIALS: usize = 3000;
    let _dog = watchdog();
    at_all_procs(|| {
        let channels: Vec<_> = (0..5).map(|_| bounded::<()>(1)).collect();
        for ready in 1..32usize {
            let mut chosen = [0usize; 5];
            for (i, (tx, _)) in channels.iter().enumerate() {
                if ready >> i & 1 == 1 {
                    tx.send(()).unwrap();
                }
            }
            let [c0, c1, c2, c3, c4] = [0, 1, 2, 3, 4].map(|i: usize| &channels[i].1);
            for _ in 0..TRIALS {
                let i = select! {
                    recv(c0) -> _ => 0,
                    recv(c1) -> _ => 1,
                    recv(c2) -> _ => 2,
                    recv(c3) -> _ => 3,
                    recv(c4) -> _ => 4,
                };
                chosen[i] += 1;
                channels[i].0.send(()).unwrap();
            }
            let n = ready.count_ones() as f64;
            for (i, &count) in chosen.iter().enumerate() {
                let p = if ready >> i & 1 == 1 { 1.0 / n } else { 0.0 };
                let sigma = (TRIALS as f64 * p * (1.0 - p)).sqrt();
                let off = (count as f64 - TRIALS as f64 * p).abs();
                assert!(off <= 8.0 * sigma, "ready {ready:05b}: {chosen:?}");
            }
            for (i, (_, rx)) in channels.iter().enumerate() {
                assert_eq!(rx.try_recv().is_ok(), ready >> i & 1 == 1);
            }
        }
    });
}

#[test]
fn pseudo_random_send() {
    const N: usize = 100;
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, N] {
            let (tx, rx) = bounded(cap);
            let receiver = go(move || rx.iter().inspect(|_| yield_now()).collect::<Vec<i32>>());
            for _ in 0..N {
                select! {
                    send(tx, 0) -> r => r.unwrap(),
                    send(tx, 1) -> r => r.unwrap(),
                }
            }
            drop(tx);
            let got = receiver.join().unwrap();
            let ones = got.iter().filter(|&&v| v == 1).count();
            assert!(got.len() == N && ones > N / 10 && N - ones > N / 10, "{ones} ones");
        }
    });
}

// ---- Go: TestSelectDuplicateChannel.

#[test]
fn the_same_channel_twice() {
    let _dog = watchdog();
    at_all_procs(|| {
        for threads in [false, true] {
            let ((tc, c), (td, d), (te, e)) = (bounded(0), bounded(0), bounded(0));
            let first = start(threads, {
                let c = c.clone();
                move || {
                    select! {
                        recv(c) -> _ => {}
                        recv(c) -> _ => {}
                        recv(d) -> v => assert_eq!(v, Ok(7)),
                    }
                    te.send(9).unwrap();
                }
            });
            sleep(Duration::from_millis(1));
            let second = start(threads, move || assert_eq!(c.recv(), Ok(8)));
            sleep(Duration::from_millis(1));
            td.send(7).unwrap(); // wakes the first by its third arm
            assert_eq!(e.recv(), Ok(9));
            tc.send(8).unwrap(); // wakes the second: the first left nothing behind
            second.recv().unwrap();
            first.recv().unwrap();
        }
    });
}

// ---- Go: test/chan/doubleselect.go.

#[test]
fn only_one_case_fires() {
    let _dog = watchdog();
    at_all_procs(|| {
        let ((t1, c1), (t2, c2), (t3, c3), (t4, c4)) =
            (bounded(0), bounded(0), bounded(0), bounded(0));
        go(move || {
            for i in 0..20_000 {
                select! {
                    send(t1, i) -> r => r.unwrap(),
                    send(t2, i) -> r => r.unwrap(),
                    send(t3, i) -> r => r.unwrap(),
                    send(t4, i) -> r => r.unwrap(),
                }
            }
        });
        let (merged, all) = bounded(0);
        for (k, c) in [c1, c2, c3, c4].into_iter().enumerate() {
            let merged = merged.clone();
            start(k == 0, move || {
                for v in c {
                    merged.send(v).unwrap();
                }
            });
        }
        drop(merged);
        let mut got: Vec<i32> = all.iter().collect();
        // Each reader is in order; together each value comes once.
        got.sort_unstable();
        assert_eq!(got, (0..20_000).collect::<Vec<_>>());
    });
}

// ---- Go: test/chan/select2.go: no memory is left behind.

#[test]
fn selects_leak_nothing() {
    let _dog = watchdog();
    at_all_procs(|| {
        fn rounds(n: usize) {
            let ((t1, c1), (_t2, c2)) = (bounded(0), bounded::<usize>(0));
            let sender = go(move || (0..n).for_each(|i| t1.send(i).unwrap()));
            for _ in 0..n {
                select! {
                    recv(c1) -> v => assert!(v.is_ok()),
                    recv(c2) -> _ => unreachable!(),
                }
            }
            sender.join().unwrap();
        }
        rounds(1000);
        let before = rss();
        rounds(100_000);
        let grown = rss().saturating_sub(before);
        assert!(grown < 8 << 20, "{grown} bytes more");
    });
}

// ---- Go: test/chan/select3.go: never, closed, ready, in every position.

/// What one operation does, alone, in a select: 'b' blocks, 'v' a value moves, 'c' closed.
#[test]
fn matrix_of_never_closed_and_ready() {
    fn recv(rx: &Receiver<i32>) -> char {
        let name = |v: Result<i32, RecvError>| if v.is_ok() { 'v' } else { 'c' };
        let (_silent, other) = bounded::<i32>(0);
        // One arm with default, two arms with default, dynamic: the same answer; then with a limit.
        let limited = rx.recv_timeout(Duration::from_millis(1));
        match limited {
            Ok(_) => return 'v',
            Err(e) if e.is_timeout() => {}
            Err(_) => {
                assert_eq!('c', select! { recv(rx) -> v => name(v), default => 'b' });
                assert_eq!('c', select! { recv(rx) -> v => name(v) });
            }
        }
        let one = select! { recv(rx) -> v => name(v), default => 'b' };
        let two = select! { recv(other) -> _ => 'x', recv(rx) -> v => name(v), default => 'b' };
        let after = select! {
            recv(rx) -> v => name(v),
            after(Duration::from_millis(1)) => 'b',
        };
        let after_two = select! {
            recv(rx) -> v => name(v),
            recv(other) -> _ => 'x',
            after(Duration::from_millis(1)) => 'b',
        };
        let mut dynamic = Select::new();
        dynamic.recv(&other);
        dynamic.recv(rx);
        let dynamic = dynamic.try_select().map_or('b', |op| name(op.recv(rx)));
        assert!([one, two, after, after_two, dynamic].iter().all(|&c| c == one));
        one
    }
    fn send(tx: &Sender<i32>) -> char {
        let name = |r: Result<(), SendError<i32>>| if r.is_ok() { 'v' } else { 'c' };
        let one = select! { send(tx, 1) -> r => name(r), default => 'b' };
        if one == 'v' {
            return one;
        }
        let (_silent, other) = bounded::<i32>(0);
        let two = select! { recv(other) -> _ => 'x', send(tx, 1) -> r => name(r), default => 'b' };
        let after = select! {
            send(tx, 1) -> r => name(r),
            after(Duration::from_millis(1)) => 'b',
        };
        let mut dynamic = Select::new();
        dynamic.send(tx, 1);
        let dynamic = dynamic.try_select().map_or('b', |op| name(op.send(tx)));
        assert!([two, after, dynamic].iter().all(|&c| c == one));
        one
    }
    fn check() {
        assert_eq!(recv(&never()), 'b');
        for cap in [0, 1, 10] {
            let (tx, rx) = bounded(cap);
            assert_eq!(recv(&rx), 'b', "empty");
            assert_eq!(send(&tx), if cap == 0 { 'b' } else { 'v' }, "room");
            (tx.len()..cap).for_each(|i| tx.send(i as i32).unwrap());
            assert_eq!(send(&tx), 'b', "full");
            if cap > 0 {
                assert_eq!(recv(&rx), 'v', "full");
            }
            tx.close();
            (1..cap).for_each(|_| assert_eq!(recv(&rx), 'v', "draining"));
            assert_eq!(recv(&rx), 'c', "drained");
            assert_eq!(send(&tx), 'c', "closed");
            let (tx, rx) = bounded(cap);
            drop(rx);
            assert_eq!(send(&tx), 'c', "no receivers");
        }
        let (tx, rx) = unbounded();
        assert_eq!(recv(&rx), 'b');
        assert_eq!(send(&tx), 'v');
        assert_eq!(recv(&rx), 'v');
    }
    let _dog = watchdog();
    at_all_procs(check);
    check(); // on this plain thread
}

// ---- Go: test/chan/select6.go: a select that leaves a queue does not damage it.

#[test]
fn leaving_a_queue_does_not_corrupt_it() {
    let _dog = watchdog();
    at_all_procs(|| {
        let ((t1, c1), (t2, c2), (t3, c3), (t4, c4)) =
            (bounded(0), bounded(0), bounded(0), bounded(0));
        let in_between = go({
            let (c1, c2, t3) = (c1.clone(), c2.clone(), t3.clone());
            move || {
                t3.send(true).unwrap();
                // Enlisted at c1 between the two others; woken by c2.
                select! {
                    recv(c1) -> v => panic!("{v:?}"),
                    recv(c2) -> v => assert_eq!(v, Ok(true)),
                }
                t3.send(true).unwrap();
            }
        });
        // The first at c1 …
        let first = go({
            let (c1, t4) = (c1.clone(), t4.clone());
            move || t4.send(c1.recv().unwrap()).unwrap()
        });
        a_moment();
        c3.recv().unwrap();
        a_moment();
        // … and the last, unless the machine was busy: each gets one, whichever.
        let last = go(move || t4.send(c1.recv().unwrap()).unwrap());
        a_moment();
        t2.send(true).unwrap();
        c3.recv().unwrap();
        t1.send(1).unwrap();
        t1.send(2).unwrap();
        assert_eq!(c4.recv().unwrap() + c4.recv().unwrap(), 3);
        [in_between, first, last].into_iter().for_each(|h| h.join().unwrap());
    });
}

/// Many selects over the same channels, with deadlines that fall in the middle: nothing is lost.
#[test]
fn selects_against_selects_lose_nothing() {
    let _dog = watchdog();
    at_all_procs(|| {
        const PAIRS: usize = 4;
        const N: u64 = 3000;
        let (ta, a) = bounded::<u64>(0);
        let (tb, b) = bounded::<u64>(0);
        let (tc, c) = bounded::<u64>(1);
        let (td, d) = unbounded::<u64>();
        let received = Arc::new(AtomicUsize::new(0));
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        for k in 0..PAIRS {
            let (ta, tb, tc, td) = (ta.clone(), tb.clone(), tc.clone(), td.clone());
            senders.push(start(k == 0, move || {
                for i in 0..N {
                    loop {
                        let sent = select! {
                            send(ta, i) -> r => { r.unwrap(); true }
                            send(tb, i) -> r => { r.unwrap(); true }
                            send(tc, i) -> r => { r.unwrap(); true }
                            after(Duration::from_micros(i % 40)) => {
                                select! {
                                    send(td, i) -> r => { r.unwrap(); true }
                                    send(ta, i) -> r => { r.unwrap(); true }
                                    default => false,
                                }
                            }
                        };
                        if sent {
                            break;
                        }
                    }
                }
            }));
            let (mut a, mut b, mut c, mut d) = (a.clone(), b.clone(), c.clone(), d.clone());
            let received = received.clone();
            receivers.push(start(k == 0, move || {
                let mut open = 4;
                while open > 0 {
                    let value = select! {
                        recv(a) -> v => v.map_err(|_| a = never()),
                        recv(b) -> v => v.map_err(|_| b = never()),
                        recv(c) -> v => v.map_err(|_| c = never()),
                        recv(d) -> v => v.map_err(|_| d = never()),
                        after(Duration::from_micros(30)) => continue,
                    };
                    match value {
                        Ok(v) => {
                            received.fetch_add(v as usize + 1, Ordering::Relaxed);
                        }
                        Err(()) => open -= 1,
                    }
                }
            }));
        }
        drop((ta, tb, tc, td));
        senders.iter().chain(&receivers).for_each(|done| done.recv().unwrap());
        let expected = PAIRS as u64 * N * (N + 1) / 2;
        assert_eq!(received.load(Ordering::Relaxed) as u64, expected);
    });
}

// ---- What the macro promises.

#[test]
fn everything_is_evaluated_once_and_in_order() {
    let _dog = watchdog();
    at_all_procs(|| {
        let log = std::cell::RefCell::new(Vec::new());
        let note = |what: &'static str| log.borrow_mut().push(what);
        let (t1, c1) = bounded::<i32>(0);
        let (t2, _c2) = bounded::<&str>(1);
        let chosen = select! {
            recv({ note("c1"); &c1 }) -> _ => "c1",
            send({ note("t2"); &t2 }, { note("v2"); "v" }) -> r => {
                note("body");
                r.unwrap();
                "t2"
            }
            send({ note("t1"); t1.clone() }, { note("v1"); 1 }) -> _ => "t1",
            after({ note("after"); Duration::from_secs(50) }) => "after",
        };
        assert_eq!(chosen, "t2");
        assert_eq!(*log.borrow(), ["c1", "t2", "v2", "t1", "v1", "after", "body"]);
    });
}

#[test]
fn values_of_other_arms_are_dropped_before_the_body() {
    struct Noisy<'a>(&'a AtomicUsize);
    impl Drop for Noisy<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let _dog = watchdog();
    let dropped = AtomicUsize::new(0);
    let (full, _rx) = bounded(0);
    let (closed, gone) = bounded(1);
    drop(gone);
    select! {
        send(full, Noisy(&dropped)) -> _ => unreachable!(),
        send(full, Noisy(&dropped)) -> _ => unreachable!(),
        send(closed, Noisy(&dropped)) -> r => {
            assert_eq!(dropped.load(Ordering::SeqCst), 2);
            assert!(r.is_err());
        }
    }
    assert_eq!(dropped.load(Ordering::SeqCst), 3);
    select! {
        send(full, Noisy(&dropped)) -> _ => unreachable!(),
        default => assert_eq!(dropped.load(Ordering::SeqCst), 4),
    }
    select! {
        send(full, Noisy(&dropped)) -> _ => unreachable!(),
        after(Duration::from_millis(1)) => assert_eq!(dropped.load(Ordering::SeqCst), 5),
    }
    // A panic while the arms are evaluated drops what was there.
    let (tx, _rx) = bounded(1);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        select! {
            send(full, Noisy(&dropped)) -> _ => {}
            send(tx, if dropped.load(Ordering::SeqCst) > 0 { panic!("on purpose") } else { 1 }) -> _ => {}
        }
    }));
    assert!(panicked.is_err());
    assert_eq!(dropped.load(Ordering::SeqCst), 6);
    assert!(tx.is_empty());
}

#[test]
fn bodies_are_ordinary_code() {
    fn first_or(rx: &Receiver<i32>, otherwise: i32) -> Result<i32, RecvError> {
        let mut rounds = 0;
        let doubled = loop {
            rounds += 1;
            select! {
                recv(rx) -> v => break v? * 2,
                default => {
                    if rounds == 3 {
                        return Ok(otherwise);
                    }
                    continue;
                }
            }
        };
        Ok(doubled)
    }
    let _dog = watchdog();
    let (tx, rx) = bounded(1);
    assert_eq!(first_or(&rx, 7), Ok(7));
    tx.send(4).unwrap();
    assert_eq!(first_or(&rx, 7), Ok(8));
    drop(tx);
    assert_eq!(first_or(&rx, 7), Err(RecvError));
}

#[test]
fn arms_may_reassign_the_channel_variable() {
    let _dog = watchdog();
    let (t1, mut c1) = bounded(3);
    let (t2, c2) = bounded(3);
    let mut c2 = Some(c2);
    for i in 0..3 {
        t1.send(i).unwrap();
        t2.send(i + 10).unwrap();
    }
    drop((t1, t2));
    let mut got = Vec::new();
    while !(c1.same_channel(&never()) && c2.is_none()) {
        let off = never();
        select! {
            recv(c1) -> v => match v {
                Ok(v) => got.push(v),
                Err(RecvError) => c1 = never(),
            },
            recv(c2.as_ref().unwrap_or(&off)) -> v => {
                if let Ok(v) = v { got.push(v) } else { c2 = None }
            }
        }
    }
    got.sort_unstable();
    assert_eq!(got, [0, 1, 2, 10, 11, 12]);
}

#[test]
fn places_and_references_of_every_kind() {
    struct Holder {
        rx: Receiver<i32>,
        tx: Sender<i32>,
    }
    let _dog = watchdog();
    let (tx, rx) = bounded(10);
    let holder = Arc::new(Holder { rx: rx.clone(), tx: tx.clone() });
    let boxed = Box::new(rx.clone());
    let shared = Arc::new(tx.clone());
    let array = [rx.clone()];
    let (_t, quiet) = bounded::<i32>(0);
    select! { send(holder.tx, 1) -> r => r.unwrap(), recv(quiet) -> _ => {} }
    select! { send(&holder.tx, 2) -> r => r.unwrap(), recv(&quiet) -> _ => {} }
    select! { send(shared, 3) -> r => r.unwrap(), recv(&&quiet) -> _ => {} }
    select! { send(*shared, 4) -> r => r.unwrap(), recv(quiet.clone()) -> _ => {} }
    select! { send({ tx.clone() }, 5) -> r => { r.unwrap() } recv(quiet,) -> _ => {} }
    select! { send(tx, 6,) -> r => r.unwrap() }
    let mut sum = 0;
    sum += select! { recv(holder.rx) -> v => v.unwrap(), recv(quiet) -> v => v.unwrap() };
    sum += select! { recv(boxed) -> v => v.unwrap(), recv(quiet) -> v => v.unwrap() };
    sum += select! { recv(array[0]) -> v => v.unwrap(), recv(quiet) -> v => v.unwrap(), };
    sum += select! { recv(&*boxed) -> v => { v.unwrap() } recv(quiet) -> v => { v.unwrap() } };
    sum += select! { recv(rx) -> v => v.unwrap() };
    sum += select! { recv(&rx) -> v => v.unwrap(), default => 0 };
    assert_eq!(sum, 21);
    assert_eq!(select! { default => 5 }, 5);
    assert_eq!(select! { default => { 6 } }, 6);
    let all_four = select! {
        recv(quiet) -> v => v.unwrap_or(0),
        send(tx, 7) -> r => { r.unwrap(); 7 }
        after(Duration::from_secs(50)) => 8,
        default => 9,
    };
    assert_eq!(all_four, 7);
}

#[test]
fn after() {
    fn check() {
        let (_t1, c1) = bounded::<i32>(0);
        let (_t2, c2) = bounded::<i32>(0);
        let start = Instant::now();
        let late = select! {
            recv(c1) -> _ => 1,
            recv(c2) -> _ => 2,
            after(Duration::from_secs(20)) => 3,
            after(Duration::from_millis(5)) => 4,
            after(Duration::MAX) => 5,
        };
        assert_eq!(late, 4);
        assert!(start.elapsed() >= Duration::from_millis(5));
        select! { after(Duration::from_millis(1)) => {} }
        assert_eq!(
            select! { recv(c1) -> _ => 1, recv(c2) -> _ => 2, after(Duration::ZERO) => 3 },
            3
        );
        assert_eq!(select! { recv(c1) -> _ => 1, after(Duration::ZERO) => 3, default => 4 }, 4);
    }
    let _dog = watchdog();
    at_all_procs(check);
    check();
}

#[test]
fn nothing_to_select_waits_for_ever() {
    let _dog = watchdog();
    at_all_procs(|| {
        let woke = Arc::new(AtomicBool::new(false));
        let flag = woke.clone();
        let empty = go(move || {
            if flag.load(Ordering::SeqCst) {
                return 1; // the type of the select is that of its place
            }
            select! {}
        });
        let flag = woke.clone();
        go(move || {
            select! {
                recv(never::<i32>()) -> _ => flag.store(true, Ordering::SeqCst),
                recv(never::<u8>()) -> _ => flag.store(true, Ordering::SeqCst),
            }
        });
        a_moment();
        assert!(!empty.is_finished() && !woke.load(Ordering::SeqCst));
    });
}

#[test]
fn a_loop_of_defaults_lets_others_run() {
    let _dog = watchdog();
    let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
    runtime.run(|| {
        let (tx, rx) = bounded(1);
        let (_t2, c2) = bounded::<i32>(1);
        go(move || tx.send(1));
        let mut done = false;
        while !done {
            select! {
                recv(rx) -> _ => done = true,
                recv(c2) -> _ => {}
                default => {}
            }
        }
    });
}

#[test]
fn large_and_aligned_values() {
    #[repr(align(128))]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Big([u64; 64]);
    let _dog = watchdog();
    at_all_procs(|| {
        let ((t1, c1), (t2, c2), (t3, c3)) = (bounded(0), bounded(2), unbounded());
        let sender = go(move || {
            for i in 0..500u64 {
                select! {
                    send(t1, Big([i; 64])) -> r => r.unwrap(),
                    send(t2, i as u8) -> r => r.unwrap(),
                    send(t3, ()) -> r => r.unwrap(),
                }
            }
        });
        let (mut n, mut open) = (0, [true; 3]);
        while open.contains(&true) {
            let (i, ok) = select! {
                recv(if open[0] { c1.clone() } else { never() }) -> v => {
                    let ok = v.is_ok();
                    if let Ok(v) = v {
                        assert!((&raw const v).is_aligned() && v.0.iter().all(|&x| x == v.0[0]));
                    }
                    (0, ok)
                }
                recv(if open[1] { c2.clone() } else { never() }) -> v => (1, v.is_ok()),
                recv(if open[2] { c3.clone() } else { never() }) -> v => (2, v.is_ok()),
            };
            open[i] = ok;
            n += usize::from(ok);
        }
        assert_eq!(n, 500);
        sender.join().unwrap();
    });
}

// ---- `Select`.

#[test]
fn dynamic_over_many_channels() {
    let _dog = watchdog();
    at_all_procs(|| {
        const CHANNELS: usize = 1000;
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..CHANNELS).map(bounded).unzip();
        for (i, tx) in senders.into_iter().enumerate() {
            go(move || tx.send(i).unwrap());
        }
        let mut select = Select::new();
        for rx in &receivers {
            select.recv(rx);
        }
        let mut seen = vec![false; CHANNELS];
        let mut closed = 0;
        while closed < CHANNELS {
            let op = select.select();
            let i = op.index();
            match op.recv(&receivers[i]) {
                Ok(v) => {
                    assert!(v == i && !seen[i]);
                    seen[i] = true;
                }
                Err(RecvError) => {
                    closed += 1;
                    select.remove(i);
                }
            }
        }
        assert!(seen.iter().all(|&s| s));
        assert_eq!(select.try_select().map(|op| op.index()).unwrap_err(), TrySelectError);
        assert!(select.select_timeout(Duration::from_millis(1)).is_err());
        assert!(select.select_deadline(Instant::now()).is_err());
    });
}

#[test]
fn dynamic_values_are_dropped_exactly_once() {
    let _dog = watchdog();
    at_all_procs(|| {
        let alive = Arc::new(());
        let (tx, rx) = bounded(1);
        let (closed, gone) = bounded(1);
        drop(gone);
        {
            let mut select = Select::new();
            select.send(&tx, alive.clone());
            select.send(&tx, alive.clone());
            select.recv(&rx);
            assert_eq!(Arc::strong_count(&alive), 3);
            let _ = select.try_select().unwrap(); // a send
            let op = select.select(); // the receive: there is no room for the second send
            assert_eq!(op.index(), 2);
            drop(op); // and with it what was received
            assert_eq!(Arc::strong_count(&alive), 2);
            let op = select.select(); // the second send
            op.send(&tx).unwrap();
            let last = select.send(&closed, alive.clone());
            let mut back = 0;
            for _ in 0..2 {
                let op = select.select();
                if op.index() == last {
                    back += Arc::strong_count(&op.send(&closed).unwrap_err().0);
                } else {
                    assert!(op.recv(&rx).is_ok());
                }
            }
            assert!(back > 0);
        }
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}

#[test]
#[should_panic(expected = "not a receive from this channel")]
fn dynamic_with_the_wrong_channel_panics() {
    let ((tx, rx), (_t2, r2)) = (bounded(1), bounded::<i32>(1));
    tx.send(1).unwrap();
    let mut select = Select::new();
    select.recv(&rx);
    let _ = select.select().recv(&r2);
}

#[test]
fn sixty_four_arms() {
    macro_rules! select_all {
        ($rx:ident, $($i:literal)+) => { select! { $(recv($rx[$i]) -> v => ($i, v),)+ } };
    }
    let _dog = watchdog();
    at_all_procs(|| {
        let (senders, rx): (Vec<_>, Vec<_>) = (0..64).map(|_| bounded(0)).unzip();
        for (i, tx) in senders.iter().cloned().enumerate() {
            go(move || tx.send(i).unwrap());
        }
        let mut seen = [0; 64];
        for _ in 0..64 {
            let (i, v) = select_all!(rx,
                0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
                32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59
                60 61 62 63);
            assert_eq!(v, Ok(i));
            seen[i] += 1;
        }
        assert_eq!(seen, [1; 64]);
        drop(senders);
        yield_until("all closed", || rx.iter().all(Receiver::is_closed));
    });
}

// ---- What the compiler says.

#[test]
fn mistakes_are_explained() {
    trybuild::TestCases::new().compile_fail("tests/ui/select_*.rs");
}
