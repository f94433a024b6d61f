//! The goroutine profile: what it counts, and that both of its formats can be read.

use crate::common::{test_name, watchdog, yield_until};
use crate::pprof::decode;
use crate::turn;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use trefoil::chan::{Receiver, bounded};
use trefoil::debug::{Profile, profile};
use trefoil::time::sleep;
use trefoil::{Builder, Runtime, go};

// The wait is not the last call in these functions: a tail call leaves no frame.
#[inline(never)]
fn waits_in_here(rx: &Receiver<()>) {
    let _ = black_box(rx.recv());
}

#[inline(never)]
fn alone() {
    sleep(Duration::MAX);
    black_box(());
}

#[inline(never)]
fn spin_until(stop: &AtomicBool) {
    while !stop.load(SeqCst) {
        std::hint::spin_loop();
    }
}

/// Returns the stacks, from the outermost function to the innermost, and their counts.
fn lines(folded: &str) -> Vec<(Vec<&str>, u64)> {
    let line = |line: &'_ str| -> (usize, u64) {
        let at = line.rfind(' ').unwrap_or_else(|| panic!("no count: {line}"));
        (at, line[at + 1..].parse().unwrap_or_else(|e| panic!("{e}: {line}")))
    };
    let all = folded.lines().map(|text| {
        let (at, count) = line(text);
        (text[..at].split(';').collect(), count)
    });
    all.collect()
}

/// Returns the lines that contain a function of that name.
fn with<'a>(folded: &'a str, name: &str) -> Vec<(Vec<&'a str>, u64)> {
    let mut all = lines(folded);
    all.retain(|(stack, _)| stack.iter().any(|function| function.contains(name)));
    all
}

#[test]
fn goroutines_with_the_same_stack_are_one_line() {
    let (_turn, _watchdog) = (turn(), watchdog());
    Runtime::builder().procs(2).build().unwrap().run(|| {
        let (tx, rx) = bounded::<()>(0);
        for _ in 0..100 {
            let rx = rx.clone();
            // Of closures with the same code the optimiser may keep one: no other has this text.
            let kept = "goroutines with the same stack";
            go(move || waits_in_here(black_box((&rx, kept)).0));
        }
        let closure_line = line!() - 2;
        let one = go(alone);
        let parked = |taken: &Profile| {
            let text = taken.folded();
            with(&text, "waits_in_here").iter().map(|(_, n)| n).sum::<u64>() == 100
                && with(&text, "alone").len() == 1
        };
        // Only a profile shows that they already wait.
        let mut taken = profile();
        yield_until("the goroutines to wait", || {
            taken = profile();
            parked(&taken)
        });
        let text = taken.folded();
        let found = with(&text, "waits_in_here");
        assert_eq!(found.len(), 1, "{text}");
        let (stack, count) = &found[0];
        assert_eq!(*count, 100, "{text}");
        // The closure is the outermost function. If it is inlined, line tables alone have its place
        // and no path.
        let closure_place = format!("(goroutines.rs:{closure_line})");
        let names_it = stack[0].contains("profile::") || stack[0].ends_with(&closure_place);
        assert!(stack[0].contains("closure") && names_it, "{text}");
        let place = |name: &str| stack.iter().position(|function| function.contains(name)).unwrap();
        assert!(place("waits_in_here") < place("recv"), "{text}");
        assert_eq!(taken.goroutines(), 102, "{text}");
        assert_eq!(lines(&text).iter().map(|(_, n)| n).sum::<u64>(), 102);

        let decoded = decode(&taken);
        let stands = decoded.with("waits_in_here");
        assert_eq!(stands.len(), 1, "{decoded:#?}");
        assert_eq!(stands[0].value, 100);
        assert_eq!(decoded.types, [("goroutine".to_owned(), "count".to_owned())]);
        assert_eq!(stands[0].labels, [("state".to_owned(), "chan receive".to_owned())]);
        let alone = decoded.with("alone");
        assert_eq!((alone.len(), alone[0].value), (1, 1), "{decoded:#?}");
        let id = ("id".to_owned(), one.id().to_string());
        assert!(alone[0].labels.contains(&id), "{decoded:#?}");
        assert_eq!(decoded.samples.iter().map(|s| s.value).sum::<u64>(), 102);
        drop(tx);
    });
}

/// A goroutine that runs on another thread is counted at the closure that it was started with.
#[test]
fn a_running_goroutine_is_counted_at_its_closure() {
    let (_turn, _watchdog) = (turn(), watchdog());
    Runtime::builder().procs(2).build().unwrap().run(|| {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let hog = go(move || spin_until(&stopped));
        let running = ("state".to_owned(), "running".to_owned());
        let id = ("id".to_owned(), hog.id().to_string());
        yield_until("the goroutine to run", || {
            let decoded = decode(&profile());
            let found = decoded.samples.iter().find(|s| s.labels.contains(&id));
            let sample = found.unwrap_or_else(|| panic!("not counted: {decoded:#?}"));
            let runs = sample.labels.contains(&running);
            let closure = format!("profile::{}::{{{{closure}}}}::{{{{closure}}}}", test_name!());
            assert!(!runs || sample.stack[0].0 == closure, "{decoded:#?}");
            runs
        });
        stop.store(true, SeqCst);
        hog.join().unwrap();
    });
}

/// With one P none begins, unless this goroutine waits while another test resolves
/// addresses.
#[test]
fn goroutines_that_have_not_begun_are_counted() {
    let (_turn, _watchdog) = (turn(), watchdog());
    Runtime::builder().procs(1).build().unwrap().run(|| {
        let held = trefoil::no_preempt();
        (0..10).for_each(|_| drop(go(|| sleep(Duration::MAX))));
        let taken = profile();
        drop(held);
        let text = taken.folded();
        assert_eq!(taken.goroutines(), 11, "{text}");
        assert_eq!(lines(&text).iter().map(|(_, n)| n).sum::<u64>(), 11, "{text}");
    });
}

#[test]
fn profiles_are_consistent_while_goroutines_start_and_end() {
    let (_turn, _watchdog) = (turn(), watchdog());
    Runtime::builder().procs(4).build().unwrap().run(|| {
        let (tx, rx) = bounded::<usize>(1);
        for i in 0..20 {
            let (tx, rx) = (tx.clone(), rx.clone());
            go(move || {
                loop {
                    let child = Builder::new().go(|| ()).unwrap();
                    if tx.send(i).is_err() || rx.recv().is_err() {
                        break;
                    }
                    child.join().unwrap();
                }
            });
        }
        for _ in 0..100 {
            let taken = profile();
            let text = taken.folded();
            assert!(taken.goroutines() >= 1, "{text}");
            let sum: u64 = lines(&text).iter().map(|(_, n)| n).sum();
            assert_eq!(sum, taken.goroutines(), "{text}");
            let decoded = decode(&taken);
            assert_eq!(decoded.samples.iter().map(|s| s.value).sum::<u64>(), sum);
            assert!(decoded.samples.iter().all(|s| !s.stack.is_empty()), "{text}");
            sleep(Duration::from_micros(200));
        }
        tx.close();
    });
}

#[test]
fn goroutines_with_different_labels_are_different_samples() {
    let (_turn, _watchdog) = (turn(), watchdog());
    Runtime::builder().procs(2).build().unwrap().run(|| {
        let (tx, rx) = bounded::<()>(0);
        for i in 0..30 {
            let rx = rx.clone();
            trefoil::labels!("parity" => i % 2; || go(move || waits_in_here(&rx)));
        }
        let mut taken = profile();
        yield_until("the goroutines to wait", || {
            taken = profile();
            let text = taken.folded();
            with(&text, "waits_in_here").iter().map(|(_, n)| n).sum::<u64>() == 30
        });
        let decoded = decode(&taken);
        let samples = decoded.with("waits_in_here");
        assert_eq!(samples.iter().map(|s| s.value).collect::<Vec<_>>(), [15, 15]);
        for parity in ["0", "1"] {
            let label = ("parity".to_owned(), parity.to_owned());
            assert!(samples.iter().any(|s| s.labels.contains(&label)), "{decoded:#?}");
        }
        let by_label = taken.by_label("parity");
        let of = |value: Option<&str>| {
            by_label.iter().find(|(known, _)| known.as_deref() == value).unwrap().1
        };
        assert_eq!((of(Some("0")), of(Some("1")), of(None)), (15, 15, 1));
        let text = taken.text();
        assert!(text.starts_with("goroutine profile: total 31\n"), "{text}");
        assert!(text.contains("\n15 @\n# state: chan receive\n# labels: {\"parity\":\"0\"}\n#\t"));
        drop(tx);
    });
}

#[test]
fn waits_have_the_age_of_goroutines_and_tasks_that_wait_now() {
    let (_turn, _watchdog) = (turn(), watchdog());
    Runtime::builder().procs(2).build().unwrap().run(|| {
        let (tx, rx) = bounded::<()>(0);
        for _ in 0..10 {
            let rx = rx.clone();
            go(move || waits_in_here(&rx));
        }
        let waiting_task = trefoil::task::spawn({
            let rx = rx.clone();
            async move { rx.recv_async().await }
        });
        sleep(Duration::from_millis(100));
        let young = go(alone);
        let mut taken = trefoil::profile::waits();
        yield_until("the goroutines to wait", || {
            taken = trefoil::profile::waits();
            let decoded = decode(&taken);
            let mut waits = decoded.with("waits_in_here").into_iter();
            taken.goroutines() == 12 && waits.all(|wait| wait.values[1] >= 10 * 50_000_000)
        });
        let decoded = decode(&taken);
        let unit = |name: &str| (name.to_owned(), "nanoseconds".to_owned());
        let count = ("goroutine".to_owned(), "count".to_owned());
        assert_eq!(decoded.types, [count, unit("age"), unit("longest")]);
        let waits = decoded.with("waits_in_here");
        assert_eq!(waits.len(), 1, "{decoded:#?}");
        // The ages are read from a clock that sysmon updates every 10 ms, or later.
        let [count, sum, longest] = waits[0].values[..] else { panic!("{decoded:#?}") };
        assert_eq!(count, 10);
        assert!(longest >= 50_000_000 && sum >= 10 * 50_000_000, "{decoded:#?}");
        assert!(sum <= 10 * longest, "{decoded:#?}");
        let id = ("id".to_owned(), young.id().to_string());
        assert!(decoded.with("alone")[0].labels.contains(&id), "{decoded:#?}");
        // Main runs, and is not there.
        assert!(decoded.samples.iter().all(|s| s.labels.iter().all(|(_, v)| v != "running")));
        drop(tx);
        waiting_task.abort();
    });
}
