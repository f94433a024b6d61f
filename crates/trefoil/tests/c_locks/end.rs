//! A runtime is dropped while its goroutines wait for locks of C.

use super::cond::{cond, signal, wait as wait_for_signal};
use super::mutex::{lock, normal, unlock};
use super::semaphore::{post, semaphore, wait};
use super::*;
use std::sync::Arc;

#[test]
fn locks_permits_and_signals_pass_over_goroutines_of_a_dropped_runtime() {
    let _watchdog = common::watchdog();
    for procs in [1, 2, 8] {
        let (mutex, other_mutex, cond) = (normal(), normal(), cond());
        let sem = semaphore(0);
        lock(mutex);
        let old = runtime(procs);
        let arrived = Arc::new(AtomicUsize::new(0));
        for i in 0..30 {
            let arrived = arrived.clone();
            let _ = old.go(move || {
                arrived.fetch_add(1, Ordering::SeqCst);
                match i % 3 {
                    0 => lock(mutex),
                    1 => wait(sem),
                    _ => {
                        lock(other_mutex);
                        wait_for_signal(cond, other_mutex);
                    }
                }
                unreachable!("an orphaned goroutine got a lock");
            });
        }
        while arrived.load(Ordering::SeqCst) < 30 {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(20));
        drop(old);
        // One lock, permit and signal, for a goroutine of another runtime, then for a thread.
        for actor in [Actor::Goroutine, Actor::Thread] {
            runtime(procs).run(move || {
                let passes = actor.start(move || {
                    wait(sem);
                    lock(mutex);
                    unlock(mutex);
                    lock(other_mutex);
                    wait_for_signal(cond, other_mutex);
                    unlock(other_mutex);
                });
                post(sem);
                thread::sleep(Duration::from_millis(2));
                unlock(mutex);
                // The actor may not wait yet: repeats the signal until it has passed.
                let done = Arc::new(AtomicUsize::new(0));
                let d = done.clone();
                let signals = trefoil::go(move || {
                    while d.load(Ordering::SeqCst) == 0 {
                        signal(cond);
                        thread::sleep(Duration::from_micros(200));
                    }
                });
                passes.join();
                done.store(1, Ordering::SeqCst);
                signals.join().unwrap();
                lock(mutex);
            });
        }
    }
}
