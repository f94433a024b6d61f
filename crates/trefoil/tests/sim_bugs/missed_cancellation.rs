//! A missed cancellation: an uploader checks its context before each chunk, but not while it tries
//! again. If the store is closed in between, the uploader outlives the shutdown.

use crate::{Bug, Version};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::chan::{self, Receiver, Sender};
use trefoil::context::Context;
use trefoil::sim::FailureKind;
use trefoil::{go, select, time};

pub(crate) const BUG: Bug = Bug {
    name: "missed cancellation",
    program,
    kind: FailureKind::Outlived,
    message: "sleep",
    // Needed with the base seeds: 13 (median), at most 70.
    max_runs: 300,
    max_deviations: 5,
};

/// Chunks with their times; None after the store was closed.
struct Store(Mutex<Option<Vec<(Instant, u32)>>>);

impl Store {
    /// Returns false if the store is closed.
    fn put(&self, chunk: u32) -> bool {
        let now = Instant::now();
        match &mut *self.0.lock().unwrap() {
            Some(chunks) => {
                chunks.push((now, chunk));
                true
            }
            None => false,
        }
    }

    fn close(&self) {
        *self.0.lock().unwrap() = None;
    }
}

/// Puts the chunks into the store, and reports each.
fn upload(
    context: &Context,
    store: &Store,
    chunks: &Receiver<u32>,
    done: &Sender<u32>,
    version: Version,
) {
    for chunk in chunks.iter() {
        if context.err().is_some() {
            return;
        }
        let mut pause = Duration::from_millis(10);
        while !store.put(chunk) {
            if version == Version::Planted {
                time::sleep(pause);
            } else {
                select! {
                    recv(context.done()) -> _ => return,
                    after(pause) => {}
                }
            }
            pause *= 2;
        }
        if done.send(chunk).is_err() {
            return;
        }
    }
}

fn program(version: Version) {
    let (context, cancel) = Context::background().with_cancel();
    let store = Arc::new(Store(Mutex::new(Some(Vec::new()))));
    let (tx, chunks) = chan::bounded(3);
    let (done_tx, done) = chan::bounded(3);
    let to = store.clone();
    go(move || upload(&context, &to, &chunks, &done_tx, version));
    for chunk in 0..3 {
        tx.send(chunk).unwrap();
    }
    drop(tx);
    // The first chunk is enough: shuts down without waiting for the uploader.
    assert_eq!(done.recv(), Ok(0));
    store.close();
    cancel.cancel();
}

#[test]
fn a_goroutine_that_misses_its_cancellation_is_found_and_repeated() {
    BUG.check();
}
