//! Operations with a deadline.

use crate::common::{assert_passed, change_after_time_out, let_others_wait, watchdog};
use crate::{at_all_procs, simulated_and_at_all_procs, start_on_thread_if};
use std::time::{Duration, Instant};
use trefoil::chan::{RecvError, RecvTimeoutError, SendTimeoutError, bounded, never};
use trefoil::{go, yield_now};

#[test]
fn send_and_recv_time_out_at_their_deadline() {
    const SHORT: Duration = Duration::from_millis(5);
    fn check() {
        let (tx, rx) = bounded::<i32>(0);
        let start = Instant::now();
        assert_eq!(rx.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
        assert_eq!(tx.send_timeout(1, SHORT), Err(SendTimeoutError::Timeout(1)));
        assert_passed(start, 2 * SHORT);
        assert_eq!(rx.recv_deadline(start), Err(RecvTimeoutError::Timeout));
        assert_eq!(tx.send_deadline(1, start), Err(SendTimeoutError::Timeout(1)));
        assert_eq!(rx.recv_timeout(Duration::ZERO), Err(RecvTimeoutError::Timeout));
        assert_passed(start, 2 * SHORT);
        assert_eq!(never::<u8>().recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
        assert_passed(start, 3 * SHORT);
        // A partner comes long before the deadline.
        for limit in [Duration::from_secs(50), Duration::MAX] {
            let h = go({
                let rx = rx.clone();
                move || rx.recv_timeout(limit)
            });
            tx.send_timeout(5, limit).unwrap();
            assert_eq!(h.join().unwrap(), Ok(5));
        }
        // The channel is closed during the wait.
        let h = go({
            let rx = rx.clone();
            move || rx.recv_timeout(Duration::from_secs(50))
        });
        let g = go({
            let rx = rx.clone();
            move || rx.recv()
        });
        let_others_wait();
        tx.close();
        assert_eq!(h.join().unwrap(), Err(RecvTimeoutError::Closed));
        assert_eq!(g.join().unwrap(), Err(RecvError));
        assert_eq!(tx.send_timeout(9, SHORT), Err(SendTimeoutError::Closed(9)));
        // A past deadline does not matter if the operation need not wait.
        let (tx, rx) = bounded(1);
        assert_eq!(tx.send_deadline(3, start), Ok(()));
        assert_eq!(rx.recv_deadline(start), Ok(3));
        assert_passed(start, 3 * SHORT);
    }
    let _dog = watchdog();
    simulated_and_at_all_procs(check);
    check(); // on this plain thread
}

/// A value that is sent while the receiver times out is received or stays in the channel.
#[test]
fn timeouts_lose_no_value() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1] {
            let (tx, rx) = bounded::<u32>(cap);
            let threads: Vec<_> = (0..4u32)
                .map(|i| {
                    let rx = rx.clone();
                    let (sum, summed) = bounded(1);
                    start_on_thread_if(i == 0, move || {
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
fn a_value_that_comes_before_a_timed_out_receiver_runs_is_received() {
    let (tx, rx) = bounded(1);
    let wait = move |limit| rx.recv_timeout(limit);
    assert_eq!(change_after_time_out(wait, move || tx.try_send(7).unwrap()), Ok(7));
}

#[test]
fn a_value_is_sent_if_room_comes_before_a_timed_out_sender_runs() {
    let (tx, rx) = bounded(1);
    tx.send(1).unwrap();
    let wait = move |limit| tx.send_timeout(2, limit);
    let other = rx.clone();
    assert_eq!(change_after_time_out(wait, move || assert_eq!(other.try_recv(), Ok(1))), Ok(()));
    assert_eq!(rx.recv(), Ok(2));
}
