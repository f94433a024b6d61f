//! One wait of one waiter, for models of locks. Restates what `sched/wait/list.rs` does for its users.

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};

use crate::shim::{AtomicU32, Ordering};

/// A waker that leaves a word, or the deadline, ends the wait: the first that claims it.
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

    #[must_use]
    pub(crate) fn claim(&self) -> bool {
        // As in `sched/wait/mod.rs`.
        self.claimed.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn sleep(&self) -> W {
        let mut word = self.word.lock().expect("a panic ends the model");
        loop {
            if let Some(word) = word.take() {
                return word;
            }
            word = self.woken.wait(word).expect("a panic ends the model");
        }
    }

    pub(crate) fn wake(&self, word: W) {
        *self.word.lock().expect("a panic ends the model") = Some(word);
        self.woken.notify_one();
    }
}
