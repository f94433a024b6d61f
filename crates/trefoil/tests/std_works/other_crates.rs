//! Locks and channels of other crates, which use the same system calls.

use super::common::{MS, TOO_LONG, watchdog};
use super::{Started, every_pair};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

#[test]
fn parking_lot_locks_exclude_notify_and_time_out() {
    let _w = watchdog();
    every_pair(|a, b| {
        let n = Arc::new((parking_lot::Mutex::new(0u64), parking_lot::Condvar::new()));
        let rw = Arc::new(parking_lot::RwLock::new((0u64, 0u64)));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .map(|actor| {
                let (n, rw) = (n.clone(), rw.clone());
                actor.start(move || {
                    for i in 0..200 {
                        let mut n = n.0.lock();
                        let was = *n;
                        if i % 16 == 0 {
                            thread::yield_now();
                        }
                        *n = was + 1;
                        drop(n);
                        if i % 4 == 0 {
                            let mut both = rw.write();
                            both.0 += 1;
                            both.1 += 1;
                        } else {
                            let both = rw.read();
                            assert_eq!(both.0, both.1);
                        }
                    }
                    n.1.notify_all();
                })
            })
            .collect();
        let mut done = n.0.lock();
        while *done < 800 {
            n.1.wait_for(&mut done, 50 * MS);
        }
        drop(done);
        all.into_iter().for_each(Started::join);
        assert_eq!(rw.read().0, 200);
        let start = Instant::now();
        let held = n.0.lock();
        let n = n.clone();
        let late = b.start(move || n.0.try_lock_for(10 * MS).is_none());
        assert!(late.join() && start.elapsed() >= 10 * MS);
        drop(held);
    });
}

#[test]
fn crossbeam_and_flume_channels_pass_every_value_and_time_out() {
    let _w = watchdog();
    every_pair(|a, b| {
        for room in [0, 1, 16] {
            let (tx, rx) = crossbeam_channel::bounded(room);
            let (back, results) = crossbeam_channel::unbounded();
            let s = a.start(move || (0..150).for_each(|i| tx.send(i).unwrap()));
            let r = b.start(move || {
                let never = crossbeam_channel::never::<u32>();
                loop {
                    crossbeam_channel::select! {
                        recv(rx) -> i => {
                            let Ok(i) = i else { break };
                            back.send(i).unwrap();
                        }
                        recv(never) -> _ => unreachable!(),
                        default(TOO_LONG) => panic!("no value arrived"),
                    }
                }
            });
            s.join();
            r.join();
            assert_eq!(results.iter().sum::<u32>(), 150 * 149 / 2);
            let (tx, rx) = flume::bounded(room);
            let s = a.start(move || (0..150).for_each(|i| tx.send(i).unwrap()));
            let r = b.start(move || rx.iter().sum::<u32>());
            s.join();
            assert_eq!(r.join(), 150 * 149 / 2);
        }
        let (tx, rx) = crossbeam_channel::bounded::<()>(0);
        let (ftx, frx) = flume::bounded::<()>(0);
        let late = b.start(move || {
            let start = Instant::now();
            assert!(rx.recv_timeout(5 * MS).unwrap_err().is_timeout());
            assert_eq!(frx.recv_timeout(5 * MS), Err(flume::RecvTimeoutError::Timeout));
            start.elapsed()
        });
        assert!(late.join() >= 10 * MS);
        drop((tx, ftx));
        let tick = crossbeam_channel::after(5 * MS);
        a.start(move || tick.recv().unwrap()).join();
    });
}
