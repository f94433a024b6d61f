//! One sleep of one who waits, for models of locks: `sched/queue.rs` as seen from outside.

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};

use crate::shim::{AtomicU32, Ordering};

/// It ends by a taker, who leaves a word, or by its deadline, whoever claims it first.
pub(crate) struct Nap<W> {
    claimed: AtomicU32,
    word: Mutex<Option<W>>,
    woken: Condvar,
}

impl<W> Nap<W> {
    pub(crate) fn new() -> Arc<Nap<W>> {
        Arc::new(Nap { claimed: AtomicU32::new(0), word: Mutex::new(None), woken: Condvar::new() })
    }

    #[must_use]
    pub(crate) fn claim(&self) -> bool {
        // As in `sched/wait.rs`.
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
