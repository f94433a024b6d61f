//! Locks that several runtimes share, and waiters whose runtime has been dropped.

use super::PROCS;
use super::common::{MS, join_all, watchdog, yield_until};
use std::sync::Arc;
use std::time::Duration;
use trefoil::sync::{Condvar, Mutex, RwLock, Semaphore};
use trefoil::{Runtime, debug, go};

/// 2,000 numbers pass a queue under one mutex and one condition variable.
#[test]
fn two_runtimes_and_threads_share_locks_and_a_condvar() {
    let _w = watchdog();
    static QUEUE: Mutex<Vec<u64>> = Mutex::new(Vec::new());
    static CHANGED: Condvar = Condvar::new();
    static SUM: RwLock<u64> = RwLock::new(0);
    static SLOTS: Semaphore = Semaphore::new(4);
    const EACH: u64 = 500;
    fn produce() {
        for n in 1..=EACH {
            let _slot = SLOTS.acquire();
            QUEUE.lock().push(n);
            CHANGED.notify_one();
        }
    }
    fn consume() {
        for _ in 0..EACH {
            let mut queue = QUEUE.lock();
            CHANGED.wait_while(&mut queue, |queue| queue.is_empty());
            let n = queue.pop().unwrap();
            drop(queue);
            *SUM.write() += n;
            let _ = *SUM.read();
        }
    }
    for procs in PROCS {
        *SUM.write() = 0;
        let (one, two) = [1, procs].map(|n| Runtime::builder().procs(n).build().unwrap()).into();
        std::thread::scope(|s| {
            s.spawn(|| one.run(|| join_all([go(produce), go(consume)])));
            s.spawn(|| two.run(|| join_all([go(produce), go(consume), go(produce), go(consume)])));
            s.spawn(produce);
            s.spawn(consume);
        });
        assert_eq!(*SUM.read(), 4 * EACH * (EACH + 1) / 2);
        assert!(QUEUE.lock().is_empty());
    }
}

/// Starts a goroutine that waits for ever in a runtime of its own, and drops the runtime.
fn orphan_a_waiter(reason: &str, wait: impl FnOnce() + Send + 'static) {
    let runtime = Runtime::builder().procs(1).build().unwrap();
    drop(runtime.go(wait).unwrap());
    let shown = format!("[{reason}]:");
    yield_until("the goroutine to wait", || runtime.run(|| debug::dump().contains(&shown)));
}

/// A waiter behind an orphaned goroutine is woken, and the lock, permit or notification that the
/// orphaned goroutine would have received is not lost.
#[test]
fn waiters_of_a_dropped_runtime_are_passed_over() {
    let _w = watchdog();
    let in_time = Duration::from_secs(20);

    // In normal mode, and in starvation mode.
    for starving in [false, true] {
        let mutex = Arc::new(Mutex::new(0));
        let held = mutex.lock();
        let lock = |m: &Arc<Mutex<i32>>| {
            let m = m.clone();
            move || *m.lock() += 1
        };
        orphan_a_waiter("sync.Mutex.Lock", lock(&mutex));
        if starving {
            std::thread::sleep(2 * MS);
        }
        let behind = std::thread::spawn({
            let mutex = mutex.clone();
            move || *mutex.try_lock_for(in_time).expect("the waiter behind was not woken") += 10
        });
        std::thread::sleep(5 * MS);
        orphan_a_waiter("sync.Mutex.Lock", lock(&mutex));
        drop(held);
        behind.join().unwrap();
        assert_eq!(*mutex.try_lock_for(in_time).expect("the mutex stayed locked"), 10);
        assert_eq!(*mutex.try_lock_for(in_time).expect("the mutex stayed locked"), 10);
    }

    let lock = Arc::new(RwLock::new(()));
    let held = lock.write();
    let l = lock.clone();
    orphan_a_waiter("sync.RWMutex.RLock", move || std::mem::forget(l.read()));
    drop(held);
    assert!(lock.try_write_for(in_time).is_some(), "the lock was given to an orphaned reader");
    let held = lock.write();
    let l = lock.clone();
    orphan_a_waiter("sync.RWMutex.Lock", move || std::mem::forget(l.write()));
    drop(held);
    assert!(lock.try_read_for(in_time).is_some(), "the lock was given to an orphaned writer");

    let semaphore = Arc::new(Semaphore::new(0));
    let s = semaphore.clone();
    orphan_a_waiter("semacquire", move || s.acquire_many(2).forget());
    let s = semaphore.clone();
    let behind = std::thread::spawn(move || {
        s.acquire_timeout(in_time).expect("the waiter behind was not woken").forget()
    });
    std::thread::sleep(2 * MS);
    semaphore.add_permits(1);
    behind.join().unwrap();
    semaphore.add_permits(1);
    assert!(semaphore.try_acquire().is_some(), "a permit was given to an orphaned goroutine");
    let s = semaphore.clone();
    orphan_a_waiter("semacquire", move || s.acquire_many(2).forget());
    assert!(semaphore.acquire_timeout(in_time).is_some(), "waits behind an orphaned goroutine");

    let pair = Arc::new((Mutex::new(0), Condvar::new()));
    let p = pair.clone();
    orphan_a_waiter("sync.Cond.Wait", move || p.1.wait(&mut p.0.lock()));
    let p = pair.clone();
    let behind = std::thread::spawn(move || {
        let mut guard = p.0.lock();
        *guard = 1;
        assert!(
            !p.1.wait_for(&mut guard, in_time).timed_out(),
            "the notification went to an orphaned goroutine"
        );
    });
    while *pair.0.lock() == 0 {
        std::thread::sleep(MS);
    }
    assert!(pair.1.notify_one());
    behind.join().unwrap();
    assert!(!pair.1.notify_one());
}
