//! A double release: a connection is closed by its client and by the reaper of idle connections.
//! Both find it open, and both release its slot.

use crate::{Bug, Version};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use trefoil::chan::{self, Sender};
use trefoil::go;
use trefoil::sim::FailureKind;

pub(crate) const BUG: Bug = Bug {
    name: "double release",
    program,
    kind: FailureKind::Panic,
    message: "was released twice",
    // Needed with the base seeds: 4 (median), at most 6.
    max_runs: 50,
    max_deviations: 4,
};

/// The slots that are free.
type Slots = Mutex<Vec<usize>>;

struct Connection {
    slot: usize,
    is_open: AtomicBool,
    slots: Arc<Slots>,
    farewells: Sender<usize>,
}

impl Connection {
    fn close(&self, version: Version) {
        let was_open = match version {
            Version::Planted => self.is_open.load(Ordering::SeqCst),
            Version::Repaired => self.is_open.swap(false, Ordering::SeqCst),
        };
        if was_open {
            self.farewells.send(self.slot).unwrap();
            self.is_open.store(false, Ordering::SeqCst);
            let mut free = self.slots.lock().unwrap();
            assert!(!free.contains(&self.slot), "slot {} was released twice", self.slot);
            free.push(self.slot);
        }
    }
}

fn program(version: Version) {
    let slots = Arc::new(Slots::default());
    let (farewells, said) = chan::bounded(8);
    let connections: Vec<_> = (0..3)
        .map(|slot| {
            let (slots, farewells) = (slots.clone(), farewells.clone());
            let is_open = AtomicBool::new(true);
            Arc::new(Connection { slot, is_open, slots, farewells })
        })
        .collect();
    drop(farewells);
    let mut closers = Vec::new();
    for connection in connections.clone() {
        closers.push(go(move || connection.close(version)));
    }
    closers.push(go(move || {
        for connection in &connections {
            connection.close(version);
        }
    }));
    closers.into_iter().for_each(|closer| closer.join().unwrap());
    assert_eq!(said.iter().count(), 3);
    assert_eq!(slots.lock().unwrap().len(), 3);
}

#[test]
fn a_slot_that_is_released_twice_is_found_and_repeated() {
    BUG.check();
}
