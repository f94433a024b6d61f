//! Crates that wait for events of the kernel: notify (inotify) and signal-hook.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use trefoil_compat_more::{
    LONG, MANY, TempDir, assert_few_threads, go_each, join_all, run, wait_until,
};

/// notify has a thread of its own that reads from inotify. `watch` sends it a request and waits for
/// the answer.
#[test]
fn notify_reports_the_file_that_each_goroutine_creates() {
    use notify::{EventKind, RecursiveMode, Watcher};
    let dir = TempDir::new("notify");
    let root = dir.path().canonicalize().unwrap();
    run(move || {
        let seen = Arc::new((Mutex::new(HashSet::<PathBuf>::new()), Condvar::new()));
        let reported = seen.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            let event = event.unwrap();
            if matches!(event.kind, EventKind::Create(_)) {
                reported.0.lock().unwrap().extend(event.paths);
                reported.1.notify_all();
            }
        });
        let watcher = Arc::new(Mutex::new(watcher.unwrap()));
        go_each(*MANY, move |i| {
            let folder = root.join(i.to_string());
            std::fs::create_dir(&folder).unwrap();
            watcher.lock().unwrap().watch(&folder, RecursiveMode::NonRecursive).unwrap();
            let file = folder.join("file");
            std::fs::write(&file, "text").unwrap();
            let names = seen.0.lock().unwrap();
            let (names, timeout) =
                seen.1.wait_timeout_while(names, LONG, |names| !names.contains(&file)).unwrap();
            assert!(!timeout.timed_out(), "no event for {file:?}");
            drop(names);
            if i % 2 == 0 {
                watcher.lock().unwrap().unwatch(&folder).unwrap();
            }
        });
        assert_few_threads();
    });
}

fn send_to_this_process(signal: i32) {
    // SAFETY: the signal has a handler.
    assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
}

#[test]
fn signal_hook_iterator_of_every_goroutine_gets_the_signal() {
    use signal_hook::consts::SIGUSR1;
    use signal_hook::iterator::Signals;
    run(|| {
        let ready = Arc::new(AtomicUsize::new(0));
        let wait = |ready: Arc<AtomicUsize>| {
            trefoil::go(move || {
                let mut signals = Signals::new([SIGUSR1]).unwrap();
                ready.fetch_add(1, SeqCst);
                signals.forever().next()
            })
        };
        let waiting: Vec<_> = (0..*MANY).map(|_| wait(ready.clone())).collect();
        wait_until("all iterators", || ready.load(SeqCst) == *MANY);
        assert_few_threads();
        send_to_this_process(SIGUSR1);
        assert!(join_all(waiting).into_iter().all(|signal| signal == Some(SIGUSR1)));
    });
}

#[test]
fn signal_hook_iterator_ends_when_another_goroutine_closes_it() {
    use signal_hook::consts::SIGUSR2;
    use signal_hook::iterator::Signals;
    run(|| {
        let waiting: Vec<_> = (0..*MANY / 4)
            .map(|_| {
                let mut signals = Signals::new([SIGUSR2]).unwrap();
                let handle = signals.handle();
                (trefoil::go(move || signals.forever().count()), handle)
            })
            .collect();
        trefoil::yield_now();
        for (goroutine, handle) in waiting {
            handle.close();
            assert_eq!(goroutine.join().unwrap(), 0);
        }
    });
}

#[test]
fn signal_hook_action_runs_once_for_every_queued_signal() {
    run(|| {
        // Real-time signals are queued, so none is merged with another.
        let signal = libc::SIGRTMIN() + 5;
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        // SAFETY: the action only adds to an atomic, which a signal handler may do.
        let id = unsafe {
            signal_hook::low_level::register(signal, move || {
                counted.fetch_add(1, SeqCst);
            })
        };
        go_each(*MANY, move |_| {
            for _ in 0..5 {
                send_to_this_process(signal);
            }
        });
        wait_until("all signals", || count.load(SeqCst) == 5 * *MANY);
        signal_hook::low_level::unregister(id.unwrap());
    });
}
