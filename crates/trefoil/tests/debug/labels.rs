//! Labels: who has them, who inherits them, and that reading them from other threads is sound.

use crate::common::{watchdog, yield_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use trefoil::debug::dump;
use trefoil::{Runtime, go, labels, task};

fn label(key: &str) -> Option<String> {
    labels::get(key)
}

#[test]
fn an_inner_scope_adds_labels_and_hides_those_with_the_same_key() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        assert_eq!(label("a"), None);
        let outer = labels! { "b" => 1, "a" => "x" };
        let inside = labels!("a" => "y", "c" => 'z'; || (label("a"), label("b"), label("c")));
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(inside, (some("y"), some("1"), some("z")));
        assert_eq!((label("a"), label("c")), (some("x"), None));
        drop(outer);
        assert_eq!((label("a"), label("b")), (None, None));
    });
}

#[test]
fn a_panic_removes_the_labels_of_the_scopes_that_it_leaves() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        let panicked = std::panic::catch_unwind(|| {
            let _labels = labels! { "a" => 1 };
            panic!("on purpose");
        });
        assert!(panicked.is_err());
        assert_eq!(label("a"), None);
    });
}

#[test]
fn goroutines_and_tasks_inherit_labels_and_keep_them_after_the_scope() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        let (tx, rx) = trefoil::chan::bounded::<()>(0);
        let guard = labels! { "a" => 1 };
        let rx2 = rx.clone();
        let goroutine = go(move || {
            let _ = rx.recv();
            // A grandchild inherits them as well.
            go(|| label("a")).join().unwrap()
        });
        let in_task = task::spawn(async move {
            let _ = rx2.recv_async().await;
            let child = task::spawn(async { label("a") });
            (go(|| label("a")).join().unwrap(), child.await.unwrap())
        });
        drop(guard);
        let later = go(|| label("a"));
        drop(tx);
        let one = Some("1".to_owned());
        assert_eq!(goroutine.join().unwrap(), one);
        assert_eq!(in_task.join().unwrap(), (one.clone(), one));
        assert_eq!(later.join().unwrap(), None);
    });
}

#[test]
fn labels_of_tasks_stay_with_the_task_from_poll_to_poll() {
    let _watchdog = watchdog();
    Runtime::builder().procs(4).build().unwrap().run(|| {
        let all: Vec<_> = (0..200)
            .map(|i| {
                task::spawn(async move {
                    let _labels = labels! { "task" => i };
                    for _ in 0..50 {
                        assert_eq!(label("task"), Some(i.to_string()));
                        task::yield_now().await;
                    }
                })
            })
            .collect();
        all.into_iter().for_each(|task| task.join().unwrap());
        assert_eq!(label("task"), None);
    });
}

#[test]
fn a_dump_shows_the_labels_of_goroutines_and_tasks() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        let (tx, rx) = trefoil::chan::bounded::<()>(0);
        let rx2 = rx.clone();
        go(move || labels!("who" => "goroutine", "n" => 7; || rx.recv()));
        task::spawn(async move {
            let _labels = labels! { "who" => "task" };
            rx2.recv_async().await
        });
        yield_until("both to wait", || {
            let text = dump();
            let has = |start: &str, labels: &str| {
                text.lines().any(|line| line.starts_with(start) && line.contains(labels))
            };
            has("goroutine", r#"[chan receive, labels: {"n":"7", "who":"goroutine"}]"#)
                && has("task", r#", labels: {"who":"task"}]"#)
        });
        // The place where a task was spawned is stored in the same word as its labels.
        let here = format!("\n\t{}:", file!());
        let text = dump();
        let task = text.split("\n\n").find(|part| part.starts_with("task")).unwrap();
        assert!(task.contains(&here), "{text}");
        drop(tx);
    });
}

#[test]
fn a_guard_that_is_dropped_elsewhere_changes_nothing() {
    let _watchdog = watchdog();
    trefoil::run(|| {
        let guard = labels! { "a" => 1 };
        go(move || {
            let _own = labels! { "a" => 2 };
            drop(guard);
            assert_eq!(label("a"), Some("2".to_owned()));
        })
        .join()
        .unwrap();
        assert_eq!(label("a"), Some("1".to_owned()));
    });
}

#[test]
fn a_destructor_at_the_end_of_a_goroutine_cannot_leave_labels_behind() {
    struct Sets;
    impl Drop for Sets {
        fn drop(&mut self) {
            std::mem::forget(labels! { "late" => 1 });
        }
    }
    thread_local! {
        static SETS: Sets = const { Sets };
    }
    let _watchdog = watchdog();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        for _ in 0..100 {
            go(|| SETS.with(|_| ())).join().unwrap();
            assert_eq!(go(|| label("late")).join().unwrap(), None);
        }
    });
}

#[test]
fn labels_are_ignored_on_a_plain_thread() {
    let _labels = labels! { "a" => 1 };
    assert_eq!(label("a"), None);
}

/// Dumps read labels of goroutines and tasks that replace them and end. A key's value is always the
/// one that belongs to the other key.
#[test]
fn dumps_read_whole_sets_while_goroutines_and_tasks_replace_them_and_end() {
    let _watchdog = watchdog();
    let seconds = std::env::var("TREFOIL_TORTURE_SECONDS").ok().and_then(|s| s.parse().ok());
    let time = Duration::from_secs(seconds.unwrap_or(1));
    Runtime::builder().procs(4).build().unwrap().run(move || {
        let stop = Arc::new(AtomicBool::new(false));
        let workers: Vec<_> = (0..4u64)
            .map(|worker| {
                let stop = stop.clone();
                go(move || {
                    let mut n = worker;
                    while !stop.load(SeqCst) {
                        n += 4;
                        let _labels = labels! { "left" => n, "right" => n };
                        let child = go(trefoil::yield_now);
                        let task = task::spawn(async move {
                            let _inner = labels! { "left" => n + 1, "right" => n + 1 };
                            task::yield_now().await;
                        });
                        child.join().unwrap();
                        task.join().unwrap();
                    }
                })
            })
            .collect();
        let until = std::time::Instant::now() + time;
        let mut seen = 0;
        // On a busy machine a dump may come when all are between two sets.
        while std::time::Instant::now() < until || seen == 0 {
            for line in dump().lines().filter(|line| line.contains("labels: {")) {
                let value = |key: &str| {
                    let (_, rest) = line.split_once(&format!("{key:?}:\"")).expect(line);
                    rest.split('"').next().unwrap().to_owned()
                };
                assert_eq!(value("left"), value("right"), "{line}");
                seen += 1;
            }
        }
        stop.store(true, SeqCst);
        workers.into_iter().for_each(|worker| worker.join().unwrap());
    });
}
