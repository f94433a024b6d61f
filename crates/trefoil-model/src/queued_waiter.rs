//! One wait of one waiter, for models of locks. Restates what `sched/wait/list.rs` does for its
//! users.

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};

use crate::shim::{AtomicU32, Ordering};

/// One wait. A waker or the deadline ends it, whichever claims it first. The waker leaves a word.
pub(crate) struct QueuedWaiter<W> {
    claimed: AtomicU32,
    word: Mutex<Option<W>>,
    woken: Condvar,
}

impl<W> QueuedWaiter<W> {
    pub(crate) fn new() -> Arc<QueuedWaiter<W>> {
        Arc::new(QueuedWaiter {
            claimed: AtomicU32::new(0),
            word: Mutex::new(None),
            woken: Condvar::new(),
        })
    }

    /// Tries to win the right to end the wait.
    #[must_use]
    pub(crate) fn claim(&self) -> bool {
        // As in `sched/wait/mod.rs`.
        self.claimed.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Sleeps until the waker has left its word.
    pub(crate) fn sleep(&self) -> W {
        let mut word = self.word.lock().expect("a panic ends the model");
        loop {
            if let Some(word) = word.take() {
                return word;
            }
            word = self.woken.wait(word).expect("a panic ends the model");
        }
    }

    /// Ends the wait. Only after a successful [`claim`](QueuedWaiter::claim).
    pub(crate) fn wake(&self, word: W) {
        *self.word.lock().expect("a panic ends the model") = Some(word);
        self.woken.notify_one();
    }
}
