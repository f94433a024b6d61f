//! Selects that wait in the queues of several channels: one arm is served, all queues are left.

use crate::common::{let_others_wait, rss, watchdog};
use crate::{at_all_procs, simulated_and_at_all_procs, start_on_thread_if};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use trefoil::chan::{Receiver, Sender, bounded, never, unbounded};
use trefoil::{go, select, sim};

/// Go: TestSelfSelect.
#[test]
fn a_select_does_not_receive_what_it_sends() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 10] {
            let (tx, rx) = bounded(cap);
            let players: Vec<_> = (0..2)
                .map(|p| {
                    let (tx, rx) = (tx.clone(), rx.clone());
                    start_on_thread_if(cap == 0 && p == 1, move || {
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

/// Go: TestSelectStress.
#[test]
#[ignore = "takes long"]
fn selects_among_busy_channels_pass_every_value() {
    let _dog = watchdog();
    for procs in [1, 2, 4, 16] {
        // Go's count for 4 Ps. For all of them it would take ten seconds more in a debug build.
        let n = if procs == 4 || !cfg!(debug_assertions) { 100_000 } else { 10_000 };
        let runtime = trefoil::Runtime::builder().procs(procs).build().expect("a runtime");
        runtime.run(|| select_among_busy_channels(n));
    }
}

fn select_among_busy_channels(n: usize) {
    let channels: Vec<(Sender<u32>, Receiver<u32>)> =
        [0, 0, 2, 3].into_iter().map(bounded).collect();
    let mut all = Vec::new();
    for (k, (tx, rx)) in channels.iter().cloned().enumerate() {
        all.push(start_on_thread_if(k == 1, move || (0..n).for_each(|_| tx.send(0).unwrap())));
        all.push(start_on_thread_if(k == 2, move || {
            (0..n).for_each(|_| assert!(rx.recv().is_ok()))
        }));
    }
    let (mut t, mut r): (Vec<_>, Vec<_>) = channels.into_iter().map(|(t, r)| (Some(t), r)).unzip();
    // A goroutine that sends n values to each channel by one select …
    all.push(start_on_thread_if(false, move || {
        let mut count = [0; 4];
        while t.iter().any(Option::is_some) {
            // A finished channel is replaced by one without a receiver that waits.
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
    }));
    // … and a goroutine that receives n values from each.
    all.push(start_on_thread_if(false, move || {
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

/// Go: TestSelectDuplicateChannel.
#[test]
fn a_select_with_a_channel_in_two_arms_leaves_its_queue_twice() {
    let _dog = watchdog();
    simulated_and_at_all_procs(|| {
        let kinds = if sim::is_simulated() { &[false][..] } else { &[false, true] };
        for &threads in kinds {
            let ((tc, c), (td, d), (te, e)) = (bounded(0), bounded(0), bounded(0));
            let first = start_on_thread_if(threads, {
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
            let_others_wait();
            let second = start_on_thread_if(threads, move || assert_eq!(c.recv(), Ok(8)));
            let_others_wait();
            td.send(7).unwrap(); // wakes the first goroutine by its third arm
            assert_eq!(e.recv(), Ok(9));
            tc.send(8).unwrap(); // wakes the second: the first is in no queue any more
            second.recv().unwrap();
            first.recv().unwrap();
        }
    });
}

/// Go: test/chan/doubleselect.go.
#[test]
fn a_select_sends_in_exactly_one_arm() {
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
            start_on_thread_if(k == 0, move || {
                for v in c {
                    merged.send(v).unwrap();
                }
            });
        }
        drop(merged);
        let mut got: Vec<i32> = all.iter().collect();
        // Each value arrives once.
        got.sort_unstable();
        assert_eq!(got, (0..20_000).collect::<Vec<_>>());
    });
}

/// Go: test/chan/select2.go.
#[test]
#[ignore = "takes long"]
fn selects_do_not_grow_resident_memory() {
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
        assert!(grown < 8 << 20, "{grown} bytes more are resident");
    });
}

/// Go: test/chan/select6.go.
#[test]
fn a_select_that_leaves_a_queue_does_not_corrupt_it() {
    let _dog = watchdog();
    simulated_and_at_all_procs(|| {
        let ((t1, c1), (t2, c2), (t3, c3), (t4, c4)) =
            (bounded(0), bounded(0), bounded(0), bounded(0));
        let in_between = go({
            let (c1, c2, t3) = (c1.clone(), c2.clone(), t3.clone());
            move || {
                t3.send(true).unwrap();
                // Waits at c1 between the two other goroutines; woken by c2.
                select! {
                    recv(c1) -> v => panic!("{v:?}"),
                    recv(c2) -> v => assert_eq!(v, Ok(true)),
                }
                t3.send(true).unwrap();
            }
        });
        // The first waiter at c1 …
        let first = go({
            let (c1, t4) = (c1.clone(), t4.clone());
            move || t4.send(c1.recv().unwrap()).unwrap()
        });
        let_others_wait();
        c3.recv().unwrap();
        let_others_wait();
        // … and the last, unless the machine was busy in real time. Each gets one of the two
        // values.
        let last = go(move || t4.send(c1.recv().unwrap()).unwrap());
        let_others_wait();
        t2.send(true).unwrap();
        c3.recv().unwrap();
        t1.send(1).unwrap();
        t1.send(2).unwrap();
        assert_eq!(c4.recv().unwrap() + c4.recv().unwrap(), 3);
        [in_between, first, last].into_iter().for_each(|h| h.join().unwrap());
    });
}

/// Many selects over the same channels, with deadlines that expire in the middle.
#[test]
fn selects_on_both_sides_with_deadlines_lose_no_value() {
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
            senders.push(start_on_thread_if(k == 0, move || {
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
            receivers.push(start_on_thread_if(k == 0, move || {
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
