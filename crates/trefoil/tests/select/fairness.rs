//! The choice among ready arms is random and even.

use crate::at_all_procs;
use crate::common::watchdog;
use trefoil::chan::bounded;
use trefoil::{go, select, yield_now};

/// Go: TestSelectFairness.
#[test]
fn two_ready_arms_are_chosen_about_equally_often() {
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
        // 10 sigma: a chance of one in 10^23.
        let sigma = (TRIALS as f64 * 0.25).sqrt();
        let off = (first as f64 - TRIALS as f64 / 2.0).abs();
        assert!(off < 10.0 * sigma, "{first} of {TRIALS}");
    }
    at_all_procs(check);
    check(); // on this plain thread
}

/// Checks every subset of five arms: a random rotation of the arms would not be even.
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

/// Go: TestPseudoRandomSend.
#[test]
fn two_sends_to_one_channel_are_chosen_at_random() {
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
