//! Where in the program a waker was: for waits that lasted some milliseconds and were ended by a
//! goroutine or task.

use super::{LONG, recorded, snapshot, why};
use crate::common::watchdog;
use std::sync::{Arc, mpsc};
use std::thread::sleep;
use std::time::Duration;
use trefoil::chan::bounded;
use trefoil::go;
use trefoil::sync::Mutex;
use trefoil::trace::Snapshot;

/// Asserts that the longest wait of `id` was ended at `line` of this file.
fn assert_woken_at(text: &str, line: u32) {
    let place = format!("trace/wakes.rs:{line}\n");
    let of_waker = text.lines().find(|line| line.contains(", woken by "));
    let of_waker = of_waker.map(|line| format!("{line}\n"));
    assert!(of_waker.is_some_and(|said| said.ends_with(&place)), "not {place}{text}");
}

#[test]
fn the_place_of_a_send_through_a_channel_of_std_is_named() {
    let _watchdog = watchdog();
    let text = recorded(2, || {
        let (tx, rx) = mpsc::channel();
        let receiver = go(move || {
            rx.recv().unwrap();
            trefoil::id()
        });
        sleep(LONG);
        tx.send(()).unwrap();
        let receiver = receiver.join().unwrap();
        why(&snapshot(), receiver)
    });
    assert_woken_at(&text, line!() - 4);
}

#[test]
fn the_place_of_an_unlock_is_named_after_a_file_was_written_and_read() {
    let _watchdog = watchdog();
    let text = recorded(1, || {
        let mutex = Arc::new(Mutex::new(()));
        let guard = mutex.lock();
        let waiter = {
            let mutex = mutex.clone();
            go(move || {
                drop(mutex.lock());
                trefoil::id()
            })
        };
        sleep(LONG);
        drop(guard);
        let waiter = waiter.join().unwrap();
        let mut file = Vec::new();
        snapshot().write(&mut file).unwrap();
        why(&Snapshot::read(&file[..]).unwrap(), waiter)
    });
    assert_woken_at(&text, line!() - 6);
}

#[test]
fn the_place_where_a_task_was_woken_is_named() {
    let _watchdog = watchdog();
    let text = recorded(2, || {
        let (tx, rx) = bounded::<()>(0);
        let task = trefoil::task::spawn(async move { rx.recv_async().await.unwrap() });
        let id = task.id();
        sleep(LONG);
        tx.send(()).unwrap();
        task.join().unwrap();
        why(&snapshot(), id)
    });
    assert_woken_at(&text, line!() - 4);
}

/// The wakers' samples are limited in the long run, not one after the other.
#[test]
fn the_place_is_named_for_each_of_many_that_are_woken_at_once() {
    const MANY: usize = 50;
    let _watchdog = watchdog();
    let texts = recorded(1, || {
        let (tx, rx) = bounded::<()>(0);
        let wait = || {
            let rx = rx.clone();
            go(move || {
                rx.recv().unwrap_err();
                trefoil::id()
            })
        };
        let waiters: Vec<_> = (0..MANY).map(|_| wait()).collect();
        sleep(LONG);
        tx.close();
        let ids: Vec<u64> = waiters.into_iter().map(|waiter| waiter.join().unwrap()).collect();
        let snapshot = snapshot();
        ids.into_iter().map(|id| why(&snapshot, id)).collect::<Vec<_>>()
    });
    texts.iter().for_each(|text| assert_woken_at(text, line!() - 5));
}

/// The waker of a short wait has no place, and no wrong one.
#[test]
fn no_place_is_named_that_is_not_known() {
    let _watchdog = watchdog();
    let text = recorded(1, || {
        let (tx, rx) = bounded::<()>(0);
        let receiver = go(move || {
            rx.recv().unwrap();
            trefoil::id()
        });
        trefoil::yield_now();
        tx.send(()).unwrap();
        let receiver = receiver.join().unwrap();
        why(&snapshot(), receiver)
    });
    // On a busy machine the wait may have been long, or the sender was first.
    let place = format!("trace/wakes.rs:{}", line!() - 5);
    let mut of_waker = text.lines().filter(|line| line.contains(", woken by "));
    let is_right = |line: &str| line.ends_with("woken by goroutine 1") || line.ends_with(&place);
    assert!(of_waker.all(is_right), "{text}");
}

/// The place of one wake-up is not taken for that of the next one, which has no sample.
#[test]
fn a_place_is_named_only_for_the_wake_up_that_was_there() {
    let _watchdog = watchdog();
    let file = recorded(1, || {
        let (tx, rx) = bounded::<()>(0);
        let receiver = go(move || rx.into_iter().count());
        sleep(LONG);
        tx.send(()).unwrap();
        trefoil::yield_now();
        tx.send(()).unwrap();
        trefoil::yield_now();
        drop(tx);
        receiver.join().unwrap();
        let mut file = Vec::new();
        snapshot().write_perfetto(&mut file).unwrap();
        file
    });
    let first = format!("trace/wakes.rs:{}", line!() - 10);
    let count = file.windows(first.len()).filter(|part| *part == first.as_bytes()).count();
    assert_eq!(count, 1);
}

fn has_thread() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    threads.flatten().any(|thread| {
        std::fs::read_to_string(thread.path().join("comm"))
            .is_ok_and(|name| name.trim_end() == "trefoil-profile")
    })
}

/// Waits until the thread is there, or is not there. A new thread gives itself its name.
fn wait_for_thread(is_there: bool) {
    while has_thread() != is_there {
        sleep(Duration::from_millis(20));
    }
}

/// While nothing is recorded there is no thread for the samples, soon after a recording has ended.
#[test]
fn the_thread_that_unwinds_ends_with_the_last_recording() {
    let _watchdog = watchdog();
    recorded(1, || wait_for_thread(true));
    // Other tests of this process may record.
    wait_for_thread(false);
}

/// A goroutine that waits for ever keeps its runtime, and a recording may never be stopped.
#[test]
fn the_thread_that_unwinds_ends_with_the_last_runtime_that_records() {
    let _watchdog = watchdog();
    let rt = trefoil::Runtime::builder().procs(1).build().unwrap();
    let run = || {
        std::mem::forget(trefoil::trace::Recorder::start().unwrap());
        let (tx, rx) = bounded::<()>(0);
        std::mem::forget(tx);
        go(move || rx.recv());
        trefoil::yield_now();
        wait_for_thread(true);
    };
    rt.go(run).unwrap().join().unwrap();
    drop(rt);
    wait_for_thread(false);
}
