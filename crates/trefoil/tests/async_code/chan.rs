//! Sends and receives of async code: tasks, `block_on`, and an executor of this file.

use crate::common::watchdog;
use crate::executor::{Parking, at_each_procs, await_or_give_up, pending, poll_once};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};
use trefoil::chan::{Receiver, RecvError, Sender, TrySendError, bounded, never, unbounded};
use trefoil::{block_on, go, select, task};

/// The kind of caller that sends or receives.
#[derive(Clone, Copy, Debug)]
enum Party {
    Goroutine,
    Task,
    BlockOnGoroutine,
    BlockOnThread,
    OtherExecutor,
}

const PARTIES: [Party; 5] = [
    Party::Goroutine,
    Party::Task,
    Party::BlockOnGoroutine,
    Party::BlockOnThread,
    Party::OtherExecutor,
];

/// Runs `blocking` or `future` as this party. The result is sent to the returned channel.
fn start<T: Send + 'static>(
    party: Party,
    blocking: impl FnOnce() -> T + Send + 'static,
    future: impl Future<Output = T> + Send + 'static,
) -> Receiver<T> {
    let (tx, rx) = bounded(1);
    match party {
        Party::Goroutine => drop(go(move || tx.send(blocking()))),
        Party::Task => drop(task::spawn(async move { tx.send(future.await) })),
        Party::BlockOnGoroutine => drop(go(move || tx.send(block_on(future)))),
        Party::BlockOnThread => drop(std::thread::spawn(move || tx.send(block_on(future)))),
        Party::OtherExecutor => {
            drop(std::thread::spawn(move || tx.send(Parking::block_on(future))))
        }
    }
    rx
}

/// Waits until so many operations wait to send and to receive.
fn wait_for_waiters<T>(rx: &Receiver<T>, waiters: (usize, usize)) {
    while rx.waiters() != waiters {
        trefoil::yield_now();
    }
}

fn channel_of<T>(cap: Option<usize>) -> (Sender<T>, Receiver<T>) {
    cap.map_or_else(unbounded, bounded)
}

#[test]
fn values_arrive_in_order_between_all_kinds_of_parties() {
    const N: u32 = 100;
    at_each_procs(|| {
        for cap in [Some(0), Some(1), Some(4), None] {
            for from in PARTIES {
                for to in PARTIES {
                    let (tx, rx) = channel_of(cap);
                    let (tx2, rx2) = (tx.clone(), rx.clone());
                    let sent =
                        start(from, move || (0..N).for_each(|n| tx.send(n).unwrap()), async move {
                            for n in 0..N {
                                tx2.send_async(n).await.unwrap();
                            }
                        });
                    let got = start(to, move || rx.iter().collect::<Vec<_>>(), async move {
                        let mut got = Vec::new();
                        while let Ok(n) = rx2.recv_async().await {
                            got.push(n);
                        }
                        got
                    });
                    assert_eq!(got.recv().unwrap(), (0..N).collect::<Vec<_>>(), "{from:?} {to:?}");
                    sent.recv().unwrap();
                }
            }
        }
    });
}

/// A value that counts its drops.
struct Counted(u32, Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn a_dropped_receive_gives_its_value_back_to_the_front() {
    let _w = watchdog();
    for cap in [Some(0), Some(1), Some(3), None] {
        let drops = Arc::new(AtomicUsize::new(0));
        let (tx, rx) = channel_of(cap);
        let future = pending(rx.recv_async());
        assert!(tx.try_send(Counted(1, drops.clone())).is_ok(), "a task waits: {cap:?}");
        assert_eq!(rx.len(), 0, "the value is in the future");
        let more = cap.unwrap_or(3).min(3) as u32;
        for n in 0..more {
            assert!(tx.try_send(Counted(n + 2, drops.clone())).is_ok());
        }
        drop(future);
        assert_eq!(rx.len(), more as usize + 1);
        if cap.is_some() {
            assert!(rx.is_full() && tx.is_full());
            let full = tx.try_send(Counted(9, drops.clone()));
            assert!(matches!(full, Err(TrySendError::Full(_))));
            drop(full);
            drops.fetch_sub(1, Ordering::Relaxed);
        }
        for n in 1..=more + 1 {
            assert_eq!(rx.recv().unwrap().0, n, "{cap:?}");
        }
        assert!(rx.is_empty() && rx.try_recv().is_err());
        assert_eq!(drops.load(Ordering::Relaxed), more as usize + 1);
        // The channel works as before.
        if cap != Some(0) {
            assert!(tx.try_send(Counted(7, drops.clone())).is_ok());
            assert_eq!(rx.recv().unwrap().0, 7);
        }
    }
}

#[test]
fn values_without_a_size_are_given_back_too() {
    let _w = watchdog();
    for cap in [Some(0), Some(2), None] {
        let (tx, rx) = channel_of::<()>(cap);
        let futures: Vec<_> = (0..3).map(|_| pending(rx.recv_async())).collect();
        (0..3).for_each(|_| tx.try_send(()).unwrap());
        drop(futures);
        assert_eq!(rx.len(), 3);
        assert_eq!(rx.try_iter().count(), 3);
        assert!(rx.try_recv().is_err());
    }
}

#[test]
fn many_values_are_given_back_to_an_unbounded_channel() {
    let _w = watchdog();
    // The first block of the chain is full from its first element on, so blocks are put before it.
    let (tx, rx) = unbounded();
    let mut futures: Vec<_> = (0..200).map(|_| pending(rx.recv_async())).collect();
    (0..300).for_each(|n| tx.send(n).unwrap());
    assert_eq!(rx.len(), 100);
    while let Some(last) = futures.pop() {
        drop(last);
    }
    assert_eq!(rx.try_iter().collect::<Vec<_>>(), (0..300).collect::<Vec<_>>());
    tx.send(1).unwrap();
    assert_eq!(rx.recv(), Ok(1));
}

#[test]
fn a_value_given_back_goes_to_the_next_receiver() {
    at_each_procs(|| {
        for cap in [0, 1] {
            let (tx, rx) = bounded(cap);
            let future = pending(rx.recv_async());
            tx.send(5).unwrap();
            let second = rx.clone();
            let goroutine = go(move || second.recv());
            wait_for_waiters(&rx, (0, 1));
            drop(future);
            assert_eq!(goroutine.join().unwrap(), Ok(5));
        }
    });
}

#[test]
fn values_given_back_outlive_the_senders_and_are_dropped_with_the_receivers() {
    let _w = watchdog();
    for cap in [Some(0), Some(1), None] {
        for take in [false, true] {
            let drops = Arc::new(AtomicUsize::new(0));
            let (tx, rx) = channel_of(cap);
            let futures: Vec<_> = (0..3).map(|_| pending(rx.recv_async())).collect();
            for n in 0..3 {
                assert!(tx.try_send(Counted(n, drops.clone())).is_ok());
            }
            drop(tx);
            drop(futures);
            if take {
                assert_eq!(rx.iter().count(), 3);
            }
            drop(rx);
            assert_eq!(drops.load(Ordering::Relaxed), 3);
        }
    }
}

#[test]
fn a_dropped_send_sends_or_drops_its_value() {
    let _w = watchdog();
    let drops = Arc::new(AtomicUsize::new(0));
    let (tx, rx) = bounded(0);
    // Never polled.
    drop(tx.send_async(Counted(1, drops.clone())));
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    // Polled, and no receiver came.
    let send = pending(tx.send_async(Counted(2, drops.clone())));
    assert_eq!(rx.waiters(), (1, 0));
    drop(send);
    assert_eq!((rx.waiters(), drops.load(Ordering::Relaxed)), ((0, 0), 2));
    // Received before the drop.
    let send = pending(tx.send_async(Counted(3, drops.clone())));
    let got = rx.try_recv().unwrap();
    drop(send);
    assert_eq!((got.0, drops.load(Ordering::Relaxed)), (3, 2));
}

#[test]
fn a_close_wakes_tasks_and_goroutines_on_both_sides() {
    at_each_procs(|| {
        for senders in [false, true] {
            let (tx, rx) = bounded(0);
            let tasks: Vec<_> = (0..50)
                .map(|n| {
                    let (tx, rx) = (tx.clone(), rx.clone());
                    task::spawn(async move {
                        if senders {
                            assert_eq!(tx.send_async(n).await.unwrap_err().into_inner(), n);
                        } else {
                            assert_eq!(rx.recv_async().await, Err(RecvError));
                        }
                    })
                })
                .collect();
            let goroutines: Vec<_> = (0..10)
                .map(|n| {
                    let (tx, rx) = (tx.clone(), rx.clone());
                    go(move || if senders { tx.send(n).is_err() } else { rx.recv().is_err() })
                })
                .collect();
            wait_for_waiters(&rx, if senders { (60, 0) } else { (0, 60) });
            tx.close();
            tasks.into_iter().for_each(|t| t.join().unwrap());
            assert!(goroutines.into_iter().all(|g| g.join().unwrap()));
            assert_eq!(rx.waiters(), (0, 0));
        }
    });
}

#[test]
fn waiters_are_served_in_the_order_in_which_they_came() {
    at_each_procs(|| {
        let (tx, rx) = bounded(0);
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut handles = Vec::new();
        for n in 0..10 {
            let (rx2, order) = (rx.clone(), order.clone());
            handles.push(if n % 2 == 0 {
                task::spawn(async move {
                    let value = rx2.recv_async().await.unwrap();
                    order.lock().unwrap().push((n, value));
                })
            } else {
                go(move || {
                    let value = rx2.recv().unwrap();
                    order.lock().unwrap().push((n, value));
                })
            });
            wait_for_waiters(&rx, (0, n + 1));
        }
        (0..10).for_each(|n| tx.try_send(n).unwrap());
        handles.into_iter().for_each(|h| h.join().unwrap());
        assert!(order.lock().unwrap().iter().all(|&(n, value)| n == value));
    });
}

#[test]
fn a_select_exchanges_values_with_tasks() {
    at_each_procs(|| {
        let (to_task, from_select) = bounded(0);
        let (to_select, from_task) = bounded(0);
        let echo = task::spawn(async move {
            while let Ok(n) = from_select.recv_async().await {
                to_select.send_async(n).await.unwrap();
            }
        });
        let (mut sent, mut got) = (0, 0);
        while got < 1000 {
            if sent == got {
                select! {
                    send(to_task, sent) -> result => {
                        result.unwrap();
                        sent += 1;
                    },
                    recv(from_task) -> _ => unreachable!("nothing was sent"),
                }
            } else {
                select! {
                    recv(from_task) -> n => {
                        assert_eq!(n, Ok(got));
                        got += 1;
                    },
                    recv(never::<()>()) -> _ => {}
                }
            }
        }
        drop(to_task);
        echo.join().unwrap();
    });
}

/// A waker that counts its wake-ups.
#[derive(Default)]
struct CountWakes(AtomicUsize);

impl Wake for CountWakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl CountWakes {
    fn wait_for_one(&self) {
        while self.0.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn the_waker_of_the_last_poll_is_woken() {
    let _w = watchdog();
    let (tx, rx) = bounded(0);
    let mut future = pin!(rx.recv_async());
    let (first, second) = (Arc::new(CountWakes::default()), Arc::new(CountWakes::default()));
    for counter in [&first, &second] {
        let waker = Waker::from(counter.clone());
        let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
    }
    tx.send(1).unwrap();
    second.wait_for_one();
    assert_eq!(first.0.load(Ordering::SeqCst), 0);
    assert_eq!(poll_once(future), Poll::Ready(Ok(1)));
}

#[test]
fn never_is_pending_for_ever() {
    let rx = never::<u32>();
    drop(pending(rx.recv_async()));
    let mut stream = Box::pin(rx.stream());
    let mut context = Context::from_waker(Waker::noop());
    assert!(stream.as_mut().poll_next(&mut context).is_pending());
}

#[test]
fn a_stream_ends_with_the_channel_and_loses_nothing_when_dropped() {
    at_each_procs(|| {
        let (tx, rx) = bounded(1);
        let sum = task::spawn({
            let rx = rx.clone();
            async move {
                let mut stream = pin!(rx.stream());
                let mut sum = 0;
                while let Some(n) = poll_fn(|cx| stream.as_mut().poll_next(cx)).await {
                    sum += n;
                }
                // It stays at its end.
                assert!(poll_fn(|cx| stream.as_mut().poll_next(cx)).await.is_none());
                sum
            }
        });
        for n in 0..=1000 {
            tx.send(n).unwrap();
        }
        tx.close();
        assert_eq!(sum.join().unwrap(), 500_500);

        let (tx, rx) = bounded(0);
        let mut stream = Box::pin(rx.stream());
        let mut context = Context::from_waker(Waker::noop());
        assert!(stream.as_mut().poll_next(&mut context).is_pending());
        tx.send(3).unwrap();
        drop(stream);
        assert_eq!(rx.try_recv(), Ok(3));
    });
}

#[test]
fn a_sink_sends_in_order_and_reports_a_closed_channel() {
    at_each_procs(|| {
        for cap in [0, 1, 3] {
            let (tx, rx) = bounded(cap);
            let task = task::spawn(async move {
                let mut sink = pin!(tx.sink());
                drop(tx);
                for n in 0..100 {
                    poll_fn(|cx| sink.as_mut().poll_ready(cx)).await?;
                    sink.as_mut().start_send(n)?;
                }
                poll_fn(|cx| sink.as_mut().poll_close(cx)).await
            });
            assert_eq!(rx.iter().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
            assert_eq!(task.join().unwrap(), Ok(()));
        }
        let (tx, rx) = bounded(1);
        let mut sink = Box::pin(tx.sink());
        let mut context = Context::from_waker(Waker::noop());
        assert!(sink.as_mut().poll_ready(&mut context).is_ready());
        sink.as_mut().start_send(1).unwrap();
        assert!(sink.as_mut().poll_ready(&mut context).is_ready());
        sink.as_mut().start_send(2).unwrap();
        assert!(sink.as_mut().poll_ready(&mut context).is_pending(), "the channel is full");
        drop(rx);
        let Poll::Ready(Err(error)) = sink.as_mut().poll_flush(&mut context) else {
            panic!("the channel is closed")
        };
        assert_eq!(error.into_inner(), 2);
        assert_eq!(sink.as_mut().start_send(3).unwrap_err().into_inner(), 3);
    });
}

#[test]
fn a_task_that_is_aborted_gives_its_value_back() {
    at_each_procs(|| {
        for _ in 0..200 {
            let (tx, rx) = bounded(0);
            let second = rx.clone();
            let task = task::spawn(async move { second.recv_async().await });
            wait_for_waiters(&rx, (0, 1));
            let abort = task.abort_handle();
            let sender = go(move || tx.try_send(1).is_ok());
            abort.abort();
            let got = task.join();
            let sent = sender.join().unwrap();
            let in_task = usize::from(matches!(got, Ok(Ok(1))));
            assert_eq!(in_task + rx.try_iter().count(), usize::from(sent));
        }
    });
}

/// Tasks, goroutines and threads send and receive; futures are dropped at random moments. Every
/// value that was sent arrives once.
#[test]
fn dropped_futures_lose_no_value_and_no_wake_up() {
    at_each_procs(|| {
        for (seed, cap) in [(1, Some(0)), (2, Some(1)), (3, Some(3)), (4, None)] {
            let (tx, rx) = channel_of(cap);
            let stop = Arc::new(AtomicBool::new(false));
            let next = Arc::new(AtomicUsize::new(0));
            let all_sent = Arc::new(AtomicUsize::new(0));
            let mut senders = Vec::new();
            for s in 0..4 {
                let (tx, stop, next) = (tx.clone(), stop.clone(), next.clone());
                let all_sent = all_sent.clone();
                let mut rng = SmallRng::seed_from_u64(seed * 100 + s);
                senders.push(match s {
                    0 => go(move || {
                        let mut sent = Vec::new();
                        while !stop.load(Ordering::Relaxed) {
                            let n = next.fetch_add(1, Ordering::Relaxed);
                            tx.send(Box::new(n)).unwrap();
                            sent.push(n);
                            all_sent.fetch_add(1, Ordering::Relaxed);
                            if cap.is_none() && tx.len() > 1000 {
                                trefoil::time::sleep(Duration::from_millis(1));
                            }
                        }
                        sent
                    }),
                    _ => task::spawn(async move {
                        // Values of cancelled sends may or may not have been sent: they are not
                        // numbers of `sent`, and the receivers may ignore them.
                        let mut sent = Vec::new();
                        while !stop.load(Ordering::Relaxed) {
                            let n = next.fetch_add(1, Ordering::Relaxed);
                            let send = tx.send_async(Box::new(n));
                            if let Some(result) = await_or_give_up(&mut rng, send).await {
                                result.unwrap();
                                sent.push(n);
                                all_sent.fetch_add(1, Ordering::Relaxed);
                            }
                            if cap.is_none() && tx.len() > 1000 {
                                trefoil::time::sleep(Duration::from_millis(1));
                            }
                        }
                        sent
                    }),
                });
            }
            drop(tx);
            let mut receivers = Vec::new();
            for r in 0..4 {
                let rx = rx.clone();
                let mut rng = SmallRng::seed_from_u64(seed * 100 + 50 + r);
                receivers.push(match r {
                    0 => go(move || rx.iter().map(|n| *n).collect::<Vec<_>>()),
                    _ => task::spawn(async move {
                        let mut got = Vec::new();
                        loop {
                            match await_or_give_up(&mut rng, rx.recv_async()).await {
                                Some(Ok(n)) => got.push(*n),
                                Some(Err(RecvError)) => return got,
                                None => {}
                            }
                        }
                    }),
                });
            }
            let end = Instant::now() + Duration::from_millis(60);
            // Longer on a busy machine.
            while Instant::now() < end || all_sent.load(Ordering::Relaxed) <= 50 {
                trefoil::time::sleep(Duration::from_millis(5));
            }
            stop.store(true, Ordering::Relaxed);
            let mut sent: Vec<_> = senders.into_iter().flat_map(|s| s.join().unwrap()).collect();
            let mut got: Vec<_> = receivers.into_iter().flat_map(|r| r.join().unwrap()).collect();
            got.extend(rx.try_iter().map(|n| *n)); // given back after a receiver found the end
            sent.sort_unstable();
            got.sort_unstable();
            assert!(got.windows(2).all(|pair| pair[0] != pair[1]), "a value arrived twice");
            let missing: Vec<_> = sent.iter().filter(|n| got.binary_search(n).is_err()).collect();
            assert!(missing.is_empty(), "{} values were lost: {cap:?}", missing.len());
            assert!(got.len() > 50);
        }
    });
}
