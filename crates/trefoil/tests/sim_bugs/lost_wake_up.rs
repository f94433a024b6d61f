//! A lost wake-up: workers check a flag before they lock, and the flag is set without the lock. A
//! worker that was about to wait misses the notification.

use crate::{Bug, Version};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use trefoil::sim::FailureKind;
use trefoil::{chan, go};

pub(crate) const BUG: Bug = Bug {
    name: "lost wake-up",
    program,
    kind: FailureKind::Deadlock,
    message: "futex wait",
    // Needed with the base seeds: 14 (median), at most 26.
    max_runs: 150,
    max_deviations: 4,
};

/// A queue of jobs. `close` ends the workers; the jobs that are left are dropped.
#[derive(Default)]
struct Jobs {
    queue: Mutex<VecDeque<u32>>,
    is_closed: AtomicBool,
    changed: Condvar,
    /// How long workers have waited.
    idle: Mutex<Duration>,
}

impl Jobs {
    fn push(&self, job: u32) {
        self.queue.lock().unwrap().push_back(job);
        self.changed.notify_one();
    }

    fn close(&self, version: Version) {
        // The repaired version holds the lock, so that no worker is between its check and its wait.
        let _queue = (version == Version::Repaired).then(|| self.queue.lock().unwrap());
        self.is_closed.store(true, Ordering::SeqCst);
        self.changed.notify_all();
    }

    fn pop(&self, version: Version) -> Option<u32> {
        while !self.is_closed.load(Ordering::SeqCst) {
            let idle_since = Instant::now();
            let mut queue = self.queue.lock().unwrap();
            if let Some(job) = queue.pop_front() {
                return Some(job);
            }
            if version == Version::Repaired && self.is_closed.load(Ordering::SeqCst) {
                break;
            }
            drop(self.changed.wait(queue).unwrap());
            *self.idle.lock().unwrap() += idle_since.elapsed();
        }
        None
    }
}

fn program(version: Version) {
    let jobs = Arc::new(Jobs::default());
    let (tx, done) = chan::bounded(3);
    let workers: Vec<_> = (0..2)
        .map(|_| {
            let (jobs, tx) = (jobs.clone(), tx.clone());
            go(move || {
                while let Some(job) = jobs.pop(version) {
                    std::thread::sleep(Duration::from_millis(job.into()));
                    tx.send(job).unwrap();
                }
            })
        })
        .collect();
    for job in 1..=3 {
        jobs.push(job);
    }
    assert_eq!(done.iter().take(3).sum::<u32>(), 6);
    jobs.close(version);
    for worker in workers {
        worker.join().unwrap();
    }
}

#[test]
fn a_lost_wake_up_is_found_and_repeated() {
    BUG.check();
}
