//! Dumps: what they show of goroutines that wait, run, come and go. (Deadlocks are in `deadlock.rs`.)

mod common;

use common::{watchdog, yield_until};
use std::time::Duration;
use trefoil::chan::bounded;
use trefoil::time::sleep;
use trefoil::{Builder, Runtime, debug, go, run};

#[inline(never)]
fn waits_in_here(rx: &trefoil::chan::Receiver<()>) {
    let _ = rx.recv();
}

#[test]
fn a_dump_shows_states_stacks_and_origins() {
    let _watchdog = watchdog();
    run(|| {
        let (tx, rx) = bounded::<()>(0);
        let receiver = Builder::new().name("receiver").go(move || waits_in_here(&rx)).unwrap();
        // For ever: the first dump reads the debug information, and that may take seconds.
        let sleeper = go(|| sleep(Duration::MAX));
        let joiner = go(move || sleeper.join().unwrap());
        // Nothing tells that they wait already, but a dump.
        yield_until("them to wait", || {
            let text = debug::dump();
            ["[chan receive]:", "[sleep]:", "[join]:"].iter().all(|state| text.contains(state))
        });
        let text = debug::dump();
        assert!(text.starts_with("goroutine 1 \"main\" [running]:"), "{text}");
        let block = |head: &str| {
            let at = text.find(head).unwrap_or_else(|| panic!("no {head} in:\n{text}"));
            text[at..].split("\n\n").next().unwrap().to_owned()
        };
        let shown = block(&format!("goroutine {} \"receiver\" [chan receive]:", receiver.id()));
        assert!(shown.contains("waits_in_here"), "{shown}");
        assert!(shown.contains("in goroutine 1"), "{shown}");
        assert!(shown.contains("dump.rs:"), "{shown}");
        assert!(text.contains("[sleep]:") && text.contains("[join]:"), "{text}");
        assert_eq!(text.matches("goroutine ").count() - text.matches("in goroutine").count(), 4);
        drop(tx);
        receiver.join().unwrap();
        assert!(!joiner.is_finished());
    });
}

#[test]
fn dumps_while_everything_moves() {
    let _watchdog = watchdog();
    Runtime::builder().procs(4).build().unwrap().run(|| {
        let (tx, rx) = bounded::<usize>(1);
        for i in 0..20 {
            let (tx, rx) = (tx.clone(), rx.clone());
            go(move || {
                for k in 0.. {
                    let named = Builder::new().name(format!("child {k}")).go(|| ()).unwrap();
                    if tx.send(i).is_err() || rx.recv().is_err() {
                        break;
                    }
                    named.join().unwrap();
                }
            });
        }
        for _ in 0..100 {
            assert!(debug::dump().contains("goroutine 1 \"main\" [running]:"));
            sleep(Duration::from_micros(200));
        }
        tx.close();
    });
}
