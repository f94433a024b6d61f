//! A select takes a ready arm if there is one, `default` or `after` otherwise.

use crate::common::{assert_passed, change_after_time_out, let_others_wait, watchdog};
use crate::{at_all_procs, simulated_and_at_all_procs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::chan::{Receiver, RecvError, Select, SendError, Sender, bounded, never, unbounded};
use trefoil::{go, select, yield_now};

/// Go's number, by the number of runtimes; fewer without optimisation.
const ROUNDS: usize = if cfg!(debug_assertions) { 10_000 } else { 100_000 / 4 };

/// Go: TestNonblockSelectRace.
#[test]
fn default_is_not_taken_while_one_channel_is_always_ready() {
    let _dog = watchdog();
    at_all_procs(|| {
        for _ in 0..ROUNDS {
            let ((t1, c1), (t2, c2)) = (bounded(1), bounded(1));
            t1.send(1).unwrap();
            let selector = go({
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
            assert!(selector.join().unwrap(), "one of the channels was ready all the time");
        }
    });
}

/// Go: TestNonblockSelectRace2.
#[test]
fn default_is_not_taken_while_one_is_ready_or_closed() {
    let _dog = watchdog();
    at_all_procs(|| {
        for _ in 0..ROUNDS {
            let ((t1, c1), (t2, c2)) = (bounded(1), bounded::<i32>(0));
            t1.send(1).unwrap();
            let selector = go({
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
            assert!(selector.join().unwrap(), "one of the channels was ready all the time");
        }
    });
}

/// Waits until `turn` is `n`, without parking. The goroutine that changes it runs at the same time
/// if a P is free.
fn spin_until(turn: &AtomicUsize, n: usize) {
    while turn.load(Ordering::Acquire) != n {
        (0..100).for_each(|_| std::hint::spin_loop());
        yield_now();
    }
}

#[test]
#[ignore = "takes long"]
fn a_select_does_not_time_out_while_one_channel_is_always_ready() {
    let _dog = watchdog();
    const SELECTS: usize = 20_000;
    // On one CPU a turn takes as long as the kernel lets the other thread spin.
    const TIME_LIMIT: Duration = Duration::from_secs(2);
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
            if round == SELECTS || start.elapsed() > TIME_LIMIT {
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
        assert_eq!(timed_out, 0, "one of the channels was ready all the time");
    });
}

#[test]
fn a_value_that_comes_before_a_timed_out_select_runs_is_received() {
    let ((t1, c1), (_t2, c2)) = (bounded(1), bounded::<i32>(1));
    let wait = move |limit| {
        select! {
            recv(c1) -> v => v.ok(),
            recv(c2) -> v => v.ok(),
            after(limit) => None,
        }
    };
    assert_eq!(change_after_time_out(wait, move || t1.try_send(7).unwrap()), Some(7));
}

/// Go: test/chan/select3.go. An operation blocks ('b'), moves a value ('v'), or finds the channel
/// closed ('c').
#[test]
fn every_form_of_select_agrees_on_what_is_ready() {
    fn recv(rx: &Receiver<i32>) -> char {
        let name = |v: Result<i32, RecvError>| if v.is_ok() { 'v' } else { 'c' };
        let (_silent, other) = bounded::<i32>(0);
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
    simulated_and_at_all_procs(check);
    check(); // on this plain thread
}

#[test]
fn after_fires_at_the_shortest_duration() {
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
        assert_passed(start, Duration::from_millis(5));
        select! { after(Duration::from_millis(1)) => {} }
        assert_passed(start, Duration::from_millis(6));
        assert_eq!(
            select! { recv(c1) -> _ => 1, recv(c2) -> _ => 2, after(Duration::ZERO) => 3 },
            3
        );
        assert_eq!(select! { recv(c1) -> _ => 1, after(Duration::ZERO) => 3, default => 4 }, 4);
    }
    let _dog = watchdog();
    simulated_and_at_all_procs(check);
    check();
}

#[test]
fn select_without_arms_or_among_never_waits_for_ever() {
    let _dog = watchdog();
    at_all_procs(|| {
        let woke = Arc::new(AtomicBool::new(false));
        let flag = woke.clone();
        let empty = go(move || {
            if flag.load(Ordering::SeqCst) {
                return 1; // `select! {}` takes on the expected type
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
        let_others_wait();
        assert!(!empty.is_finished() && !woke.load(Ordering::SeqCst));
    });
}

#[test]
fn a_loop_of_select_with_default_is_preempted() {
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
