//! Starvation: a read-write lock that lets readers in while a writer waits. Readers that overlap
//! keep the writer out for longer than it may wait.

use crate::{Bug, Version};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};
use trefoil::go;
use trefoil::sim::FailureKind;

pub(crate) const BUG: Bug = Bug {
    name: "starvation",
    program,
    kind: FailureKind::Panic,
    message: "the writer has waited for",
    // Needed with the base seeds: 5 (median), at most 21.
    max_runs: 100,
    max_deviations: 8,
};

/// How long a reader holds the lock.
const READ: Duration = Duration::from_millis(10);
/// The longest time between two reads.
const MAX_PAUSE_MILLIS: u64 = 6;
/// How long the writer may wait.
const LIMIT: Duration = Duration::from_millis(200);

#[derive(Default)]
struct State {
    readers: u32,
    writer_waits: bool,
}

struct ReadWriteLock {
    state: Mutex<State>,
    changed: Condvar,
    version: Version,
}

impl ReadWriteLock {
    /// Calls `f` with the lock held for reading.
    fn read(&self, f: impl FnOnce()) {
        let mut state = self.state.lock().unwrap();
        while self.version == Version::Repaired && state.writer_waits {
            state = self.changed.wait(state).unwrap();
        }
        state.readers += 1;
        drop(state);
        f();
        self.state.lock().unwrap().readers -= 1;
        self.changed.notify_all();
    }

    /// Calls `f` with the lock held for writing. There is one writer.
    fn write(&self, f: impl FnOnce()) {
        let mut state = self.state.lock().unwrap();
        state.writer_waits = true;
        while state.readers > 0 {
            state = self.changed.wait(state).unwrap();
        }
        f();
        state.writer_waits = false;
        drop(state);
        self.changed.notify_all();
    }
}

fn program(version: Version) {
    let lock = ReadWriteLock { state: Mutex::default(), changed: Condvar::new(), version };
    let lock = Arc::new(lock);
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let lock = lock.clone();
            go(move || {
                sleep(Duration::from_millis(rand::random_range(1..=15)));
                for _ in 0..50 {
                    lock.read(|| sleep(READ));
                    sleep(Duration::from_millis(rand::random_range(1..=MAX_PAUSE_MILLIS)));
                }
            })
        })
        .collect();
    sleep(3 * READ);
    let begin = Instant::now();
    let mut waited = Duration::ZERO;
    lock.write(|| waited = begin.elapsed());
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert!(waited <= LIMIT, "the writer has waited for {waited:?}");
}

#[test]
fn a_starved_writer_is_found_and_repeated() {
    BUG.check();
}
