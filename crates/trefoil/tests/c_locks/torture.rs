//! Mutexes and condition variables under contention.

use super::cond::{Cond, broadcast, cond, signal, wait};
use super::mutex::{Mutex, lock, normal, unlock};
use super::*;

/// A bounded queue, as C code implements it.
#[derive(Clone, Copy)]
struct Queue {
    mutex: Mutex,
    not_empty: Cond,
    not_full: Cond,
    items: Object<Vec<u64>>,
}

const CAPACITY: usize = 4;

impl Queue {
    fn new() -> Queue {
        Queue {
            mutex: normal(),
            not_empty: cond(),
            not_full: cond(),
            items: Object::new(Vec::new()),
        }
    }

    fn push(self, item: u64) {
        lock(self.mutex);
        // SAFETY: under the mutex; the same below.
        unsafe {
            while (*self.items.at()).len() == CAPACITY {
                wait(self.not_full, self.mutex);
            }
            (*self.items.at()).push(item);
        }
        if item.is_multiple_of(16) {
            broadcast(self.not_empty)
        } else {
            signal(self.not_empty)
        }
        unlock(self.mutex);
    }

    fn pop(self) -> u64 {
        lock(self.mutex);
        // SAFETY: as above.
        let item = unsafe {
            loop {
                match (*self.items.at()).pop() {
                    Some(item) => break item,
                    None => wait(self.not_empty, self.mutex),
                }
            }
        };
        unlock(self.mutex);
        signal(self.not_full);
        item
    }
}

fn produce_and_consume(actor: impl Fn(usize) -> Actor) {
    const EACH: usize = 4;
    let n = size(2_000, 300);
    let queue = Queue::new();
    let producing: Vec<_> = (0..EACH)
        .map(|i| actor(i).start(move || (1..=n as u64).for_each(|item| queue.push(item))))
        .collect();
    let consuming: Vec<_> = (0..EACH)
        .map(|i| actor(i + 1).start(move || (0..n).map(|_| queue.pop()).sum::<u64>()))
        .collect();
    producing.into_iter().for_each(Started::join);
    let sum: u64 = consuming.into_iter().map(Started::join).sum();
    assert_eq!(sum, EACH as u64 * (n * (n + 1) / 2) as u64);
}

#[test]
fn producers_and_consumers_lose_no_item() {
    everywhere(|| {
        produce_and_consume(|_| Actor::Goroutine);
        produce_and_consume(Actor::nth);
        produce_and_consume(|i| Actor::nth(i / 2));
        produce_and_consume(|_| Actor::Thread);
    });
}

#[test]
fn goroutines_preempted_while_they_hold_a_lock_make_progress() {
    everywhere(|| {
        let (mutex, total) = (normal(), Object::new(0u64));
        let one = |i: usize| {
            Actor::nth(i / 4).start(move || {
                for _ in 0..10 {
                    lock(mutex);
                    // Often longer than the rest of the time slice.
                    common::spin(Duration::from_micros(500));
                    // SAFETY: under the mutex.
                    unsafe { *total.at() += 1 };
                    unlock(mutex);
                    common::spin(Duration::from_micros(50));
                }
            })
        };
        let stop = common::flag();
        let hogs = common::hogs(2, &stop);
        let parts: Vec<_> = (0..8).map(one).collect();
        parts.into_iter().for_each(Started::join);
        stop.store(true, Ordering::SeqCst);
        common::join_all(hogs);
        // SAFETY: all actors have ended.
        assert_eq!(unsafe { *total.at() }, 80);
    });
}
