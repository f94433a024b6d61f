//! Send, receive and close, blocking and not.

use crate::common::{let_others_wait, watchdog, yield_until};
use crate::{
    Handle, at_all_procs, capacities, simulated_and_at_all_procs, size, start_on_thread_if,
};
use std::collections::HashMap;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use trefoil::chan::{
    RecvError, SendError, SendTimeoutError, TryRecvError, TrySendError, bounded, never, nil,
    unbounded,
};
use trefoil::{go, sim};

/// Go: TestChan, for capacities 0 to 199, as the following tests.
#[test]
fn recv_blocks_when_empty_send_blocks_when_full_close_drains() {
    let _dog = watchdog();
    simulated_and_at_all_procs(|| {
        for cap in capacities() {
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
            let_others_wait();
            assert_eq!(
                received.load(Ordering::SeqCst),
                0,
                "cap {cap}: received from an empty channel"
            );
            assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
            tx.send(7).unwrap();
            tx.send(7).unwrap();
            waiting.into_iter().for_each(|h| h.join().unwrap());
            assert_eq!(received.load(Ordering::SeqCst), 2);

            // Sending to a full channel blocks.
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
            let_others_wait();
            assert!(!sent.load(Ordering::SeqCst), "cap {cap}: sent to a full channel");
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
fn close_wakes_all_receivers_and_senders() {
    let _dog = watchdog();
    simulated_and_at_all_procs(|| {
        for cap in capacities() {
            let (tx, rx) = bounded::<usize>(cap);
            let threads = !sim::is_simulated() && cap % 4 == 0;
            let receivers: Vec<_> = (0..4)
                .map(|i| {
                    let rx = rx.clone();
                    start_on_thread_if(threads && i == 0, move || {
                        assert_eq!(rx.recv(), Err(RecvError))
                    })
                })
                .collect();
            let_others_wait();
            tx.close();
            receivers.into_iter().for_each(Handle::join);

            let (tx, rx) = bounded::<usize>(cap);
            (0..cap).for_each(|i| tx.send(i).unwrap());
            let senders: Vec<_> = (0..4)
                .map(|i| {
                    let tx = tx.clone();
                    start_on_thread_if(threads && i == 0, move || {
                        assert_eq!(tx.send(1000 + i).unwrap_err().into_inner(), 1000 + i);
                    })
                })
                .collect();
            let_others_wait();
            // By an explicit close, or because the last receiver is dropped.
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
fn values_are_received_in_the_order_of_sending() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in 0..200 {
            let (tx, rx) = bounded(cap);
            let sender = start_on_thread_if(cap % 40 == 3, move || {
                (0..100).for_each(|i| tx.send(i).unwrap())
            });
            assert_eq!(rx.iter().collect::<Vec<i32>>(), (0..100).collect::<Vec<_>>());
            sender.join();
        }
    });
}

#[test]
fn four_senders_and_four_receivers_pass_every_value_once() {
    const WORKERS: usize = 4;
    const VALUES: usize = 1000;
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in (0..200).step_by(size(7, 19)) {
            let (tx, rx) = bounded(cap);
            let (results, all) = bounded(WORKERS);
            let mut handles = Vec::new();
            for w in 0..WORKERS {
                let tx = tx.clone();
                let thread = w == 0 && cap % 5 == 0;
                handles.push(start_on_thread_if(thread, move || {
                    (0..VALUES).for_each(|i| tx.send(i).unwrap())
                }));
                let (rx, results) = (rx.clone(), results.clone());
                handles.push(start_on_thread_if(thread, move || {
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
fn len_and_capacity_follow_the_buffered_values() {
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

/// Go: TestNonblockRecvRace.
#[test]
fn try_recv_never_reports_empty_while_a_filled_channel_is_closed() {
    let _dog = watchdog();
    at_all_procs(|| {
        for _ in 0..size(10_000, 3_000) {
            let (tx, rx) = bounded(1);
            tx.send(1).unwrap();
            let receiver = go({
                let rx = rx.clone();
                move || {
                    assert_ne!(
                        rx.try_recv(),
                        Err(TryRecvError::Empty),
                        "the channel always had a value or was closed"
                    )
                }
            });
            tx.close();
            let _ = rx.recv();
            receiver.join().unwrap();
        }
    });
}

#[test]
fn waiters_are_served_in_fifo_order() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1, 5] {
            // Each receiver waits before the next one starts.
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
            // The same for senders.
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
fn try_send_and_try_recv_never_wait() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1] {
            let (tx, rx) = bounded::<String>(cap);
            assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
            if cap == 0 {
                assert!(tx.try_send("x".into()).unwrap_err().is_full());
            }
            // They succeed once the other side waits, which needs the scheduler to run it.
            let receiver = go(move || rx.recv().unwrap());
            let mut value = Some("hello".to_string());
            yield_until("a receiver to wait", || match tx.try_send(value.take().unwrap()) {
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
            yield_until("a sender to wait", || {
                got = rx.try_recv().ok();
                got.is_some()
            });
            assert_eq!(got, Some(5));
        }
    });
}

#[test]
fn a_loop_of_try_recv_is_preempted() {
    let _dog = watchdog();
    let runtime = trefoil::Runtime::builder().procs(1).build().unwrap();
    runtime.run(|| {
        let (tx, rx) = bounded(1);
        go(move || tx.send(1));
        while rx.try_recv().is_err() {} // preempted at the end of its slice
    });
}

#[test]
fn values_of_any_size_and_alignment_pass_unchanged() {
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
fn a_capacity_beyond_the_address_space_panics() {
    assert!(catch_unwind(|| bounded::<u8>(usize::MAX)).is_err());
    assert!(catch_unwind(|| bounded::<u64>(usize::MAX / 8)).is_err());
}

#[test]
fn an_unbounded_channel_keeps_every_value_in_order() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (tx, rx) = unbounded();
        let values = size(1_000_000, 50_000);
        (0..values).for_each(|i| tx.send(i).unwrap());
        assert_eq!(rx.len(), values);
        assert!(rx.iter().take(values).enumerate().all(|(i, v)| i == v));
        // Fill levels that begin, end and straddle blocks.
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
        // Several senders and receivers.
        let (tx, rx) = unbounded::<usize>();
        for s in 0..4 {
            let tx = tx.clone();
            start_on_thread_if(s == 0, move || (0..20_000).for_each(|i| tx.send(i).unwrap()));
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

#[test]
fn recv_from_never_waits_for_ever() {
    let _dog = watchdog();
    at_all_procs(|| {
        let rx = never::<i32>();
        assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
        assert!(rx.same_channel(&rx.clone()));
        let h = go(move || rx.recv());
        let_others_wait();
        assert!(!h.is_finished());
    });
}

#[test]
fn the_ends_of_nil_wait_for_ever_and_are_never_closed() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (tx, rx) = nil::<Box<i32>>();
        tx.close();
        assert!(!tx.is_closed() && !rx.is_closed());
        assert!(
            tx.is_full() && tx.is_empty() && tx.capacity() == Some(0) && tx.waiters() == (0, 0)
        );
        assert_eq!(tx.try_send(Box::new(1)), Err(TrySendError::Full(Box::new(1))));
        assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
        let limit = Duration::from_millis(1);
        let late = tx.send_timeout(Box::new(2), limit);
        assert_eq!(late, Err(SendTimeoutError::Timeout(Box::new(2))));
        let past = tx.send_deadline(Box::new(2), Instant::now());
        assert_eq!(past, Err(SendTimeoutError::Timeout(Box::new(2))));
        assert!(tx.same_channel(&nil().0) && !tx.same_channel(&bounded(1).0));
        assert!(rx.same_channel(&never()));
        let sent =
            trefoil::block_on(trefoil::time::timeout_async(limit, tx.send_async(Box::new(3))));
        assert!(sent.is_err());
        let sender = go(move || tx.clone().send(Box::new(4)));
        trefoil::time::sleep(limit);
        assert!(!sender.is_finished());
    });
}
