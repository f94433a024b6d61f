//! The flight recorder: what a snapshot says of programs whose order of events is known.

#[path = "../common/mod.rs"]
mod common;
mod files;
mod incidents;
mod wakes;

use common::{spin, watchdog};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use trefoil::time::sleep;
use trefoil::trace::{self, Recorder, Snapshot};
use trefoil::{Runtime, go};

/// Runs `f` on a runtime with `procs` Ps, while everything is recorded.
fn recorded<T: Send + 'static>(procs: usize, f: impl FnOnce() -> T + Send + 'static) -> T {
    let rt = Runtime::builder().procs(procs).build().unwrap();
    let run = move || {
        let recorder = Recorder::start().unwrap();
        let value = f();
        recorder.stop();
        value
    };
    rt.go(run).unwrap().join().unwrap()
}

/// A wait that is longer than any other of its goroutine, also on a busy machine.
const LONG: Duration = Duration::from_millis(200);

fn snapshot() -> Snapshot {
    trace::snapshot().unwrap()
}

/// Blocks the thread. A raw call: the runtime does not know of it.
fn block(time: Duration) {
    let (tv_sec, tv_nsec) = (time.as_secs() as i64, time.subsec_nanos().into());
    let pause = libc::timespec { tv_sec, tv_nsec };
    // SAFETY: the kernel reads `pause` only.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const pause, 0) };
}

fn why(snapshot: &Snapshot, id: u64) -> String {
    let known = || snapshot.goroutines();
    snapshot.why(id).unwrap_or_else(|| panic!("{id} is not in {:?}", known()))
}

#[test]
fn a_wait_for_a_channel_of_std_names_the_sender() {
    let _watchdog = watchdog();
    let (text, sender) = recorded(2, || {
        let (tx, rx) = mpsc::channel();
        let receiver = go(move || {
            rx.recv().unwrap();
            trefoil::id()
        });
        let sender = go(move || {
            sleep(LONG);
            tx.send(()).unwrap();
            trefoil::id()
        });
        let (receiver, sender) = (receiver.join().unwrap(), sender.join().unwrap());
        (why(&snapshot(), receiver), sender)
    });
    assert!(text.contains(" in futex wait, woken by goroutine "), "{text}");
    assert!(text.contains(&format!("woken by goroutine {sender} ")), "{text}");
    assert!(text.contains("tests/trace/"), "{text}");
}

#[test]
fn a_sleep_is_ended_by_a_timer() {
    let _watchdog = watchdog();
    let text = recorded(1, || {
        let sleeper = go(|| {
            sleep(LONG);
            trefoil::id()
        });
        let id = sleeper.join().unwrap();
        why(&snapshot(), id)
    });
    assert!(text.contains(" in sleep, woken by a timer"), "{text}");
}

#[test]
fn main_is_queued_behind_a_goroutine_that_computes() {
    let _watchdog = watchdog();
    let (text, hog) = recorded(1, || {
        let main = trefoil::id();
        let over = Arc::new(AtomicBool::new(false));
        let stop = over.clone();
        let hog = go(move || {
            while !stop.load(Ordering::Relaxed) {
                std::hint::black_box(());
            }
            trefoil::id()
        });
        for _ in 0..3 {
            trefoil::yield_now();
        }
        over.store(true, Ordering::Relaxed);
        let hog = hog.join().unwrap();
        (why(&snapshot(), main), hog)
    });
    assert!(text.contains(&format!(" runnable, behind goroutine {hog} ")), "hog {hog}: {text}");
}

#[test]
fn a_blocking_call_is_named() {
    let _watchdog = watchdog();
    let text = recorded(1, || {
        let blocked = go(|| {
            block(LONG);
            trefoil::id()
        });
        let worker = go(|| {
            for _ in 0..20 {
                spin(Duration::from_millis(1));
                trefoil::yield_now();
            }
        });
        worker.join().unwrap();
        let id = blocked.join().unwrap();
        why(&snapshot(), id)
    });
    assert!(text.contains(" without a P, blocked in "), "{text}");
    assert!(text.contains("nanosleep"), "{text}");
}

/// Runs a goroutine that sleeps for long, and then blocks its thread for a shorter time, while
/// others need the P. Returns its id.
fn sleep_and_block() -> u64 {
    let blocked = go(|| {
        sleep(3 * LONG);
        block(LONG);
        trefoil::id()
    });
    let over = Arc::new(AtomicBool::new(false));
    let stop = over.clone();
    let worker = go(move || {
        while !stop.load(Ordering::Relaxed) {
            spin(Duration::from_millis(1));
            trefoil::yield_now();
        }
    });
    let id = blocked.join().unwrap();
    over.store(true, Ordering::Relaxed);
    worker.join().unwrap();
    id
}

#[test]
fn a_blocking_call_is_named_beside_a_longer_wait() {
    let _watchdog = watchdog();
    let text = recorded(1, || {
        let id = sleep_and_block();
        why(&snapshot(), id)
    });
    let (wait, without_p) = text.split_once("longest time without a P: ").expect(&text);
    assert!(wait.contains("longest wait: ") && wait.contains(" in sleep, woken by"), "{text}");
    assert!(without_p.contains(" without a P, blocked in nanosleep"), "{text}");
}

#[test]
fn a_call_of_blocking_is_named() {
    let _watchdog = watchdog();
    let text = recorded(1, || {
        let id = go(|| {
            trefoil::blocking(|| block(LONG));
            trefoil::id()
        });
        let id = id.join().unwrap();
        why(&snapshot(), id)
    });
    assert!(text.contains(" without a P, in blocking"), "{text}");
    assert!(!text.contains("longest time without a P"), "it is the longest wait: {text}");
}

/// The goroutine that starts the recorder, and what it wakes before its first switch.
#[test]
fn the_goroutine_that_records_appears_itself() {
    let _watchdog = watchdog();
    let (text, main) = recorded(1, || {
        let main = trefoil::id();
        let child = go(|| {
            sleep(LONG);
            trefoil::id()
        });
        let child = child.join().unwrap();
        (why(&snapshot(), main) + &why(&snapshot(), child), main)
    });
    assert!(text.contains("in join"), "{text}");
    assert!(text.contains(&format!(" by goroutine {main}\n")), "{text}");
}

#[test]
fn one_of_several_recorders_wins() {
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(2).build().unwrap();
    let run = || {
        for _ in 0..100 {
            let starts: Vec<_> = (0..4).map(|_| go(|| Recorder::start().ok())).collect();
            let started: Vec<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
            assert_eq!(started.iter().flatten().count(), 1);
        }
    };
    rt.go(run).unwrap().join().unwrap();
}

/// A snapshot that the end of the runtime interrupts does not keep others from recording.
#[test]
fn a_recorder_is_dropped_after_its_runtime() {
    let _watchdog = watchdog();
    for _ in 0..5 {
        let rt = Runtime::builder().procs(2).build().unwrap();
        let start = || Recorder::builder().bytes(16 << 20).start().unwrap();
        let recorder = rt.go(start).unwrap().join().unwrap();
        let busy = || {
            loop {
                let _ = trace::snapshot();
            }
        };
        drop(rt.go(busy).unwrap());
        std::thread::sleep(Duration::from_millis(5));
        drop(rt);
        drop(recorder);
    }
}

#[test]
fn a_task_has_a_life_like_a_goroutine() {
    let _watchdog = watchdog();
    let text = recorded(2, || {
        let task = trefoil::task::spawn(async {
            trefoil::time::sleep_async(LONG).await;
            trefoil::task::id()
        });
        let id = task.join().unwrap();
        why(&snapshot(), id)
    });
    assert!(text.starts_with("task "), "{text}");
    assert!(text.contains(", woken by a timer"), "{text}");
}

#[test]
fn a_wake_up_from_a_plain_thread_names_the_thread() {
    let _watchdog = watchdog();
    let text = recorded(1, || {
        let (tx, rx) = trefoil::chan::bounded(0);
        let receiver = go(move || {
            rx.recv().unwrap();
            trefoil::id()
        });
        // A goroutine that is a thread to std would not do: the test needs a plain one.
        let sender = trefoil::blocking(move || {
            sleep(LONG);
            std::thread::spawn(move || tx.send(()).unwrap())
        });
        let id = receiver.join().unwrap();
        sender.join().unwrap();
        why(&snapshot(), id)
    });
    assert!(text.contains("in chan receive, woken by thread "), "{text}");
}

/// Every life is complete if nothing was overwritten: it is one chain of states that fit.
#[test]
fn nothing_is_lost_in_a_ring_that_is_large_enough() {
    let _watchdog = watchdog();
    let count = common::rounds(20, 50);
    let snapshot = recorded(2, move || {
        let workers: Vec<_> = (0..count)
            .map(|_| {
                go(|| {
                    let (tx, rx) = trefoil::chan::bounded(1);
                    let inner = go(move || (0..20).for_each(|i| tx.send(i).unwrap()));
                    assert_eq!(rx.into_iter().sum::<u32>(), 190);
                    inner.join().unwrap();
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        snapshot()
    });
    // Two goroutines per worker, and main.
    assert_eq!(snapshot.goroutines().len(), 2 * count + 1, "{:?}", snapshot.goroutines());
    for id in snapshot.goroutines() {
        let text = why(&snapshot, id);
        assert!(!text.contains("unknown"), "{text}");
    }
}

#[test]
fn ps_that_are_made_during_a_recording_are_recorded() {
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(1).build().unwrap();
    let run = || {
        let recorder = Recorder::start().unwrap();
        trefoil::set_procs(4);
        let workers: Vec<_> = (0..64).map(|_| go(|| spin(Duration::from_millis(1)))).collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        let snapshot = snapshot();
        recorder.stop();
        snapshot.goroutines().len()
    };
    assert_eq!(rt.go(run).unwrap().join().unwrap(), 65);
}

#[test]
fn a_second_recording_forgets_the_first() {
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(2).build().unwrap();
    let run = || {
        let record = |bytes| {
            let recorder = Recorder::builder().bytes(bytes).start().unwrap();
            let id = go(trefoil::id).join().unwrap();
            recorder.stop();
            (id, snapshot().goroutines())
        };
        let (first, in_first) = record(1 << 20);
        let (second, in_second) = record(1 << 16);
        let (_, in_third) = record(1 << 22);
        assert!(in_first.contains(&first));
        assert!(in_second.contains(&second) && !in_second.contains(&first));
        assert!(!in_third.contains(&second));
    };
    rt.go(run).unwrap().join().unwrap();
}

#[test]
fn an_exact_clock_gives_exact_times() {
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(2).build().unwrap();
    let (times, lasted) = rt.run(|| {
        let recorder = Recorder::builder().exact_clock(true).start().unwrap();
        let begin = std::time::Instant::now();
        let works = go(|| {
            spin(LONG);
            sleep(2 * LONG);
            spin(LONG);
            trefoil::id()
        });
        let id = works.join().unwrap();
        let lasted = begin.elapsed();
        let times = snapshot().times(id).unwrap();
        recorder.stop();
        (times, lasted)
    });
    let nearly = 2 * LONG - LONG / 10;
    assert!(times.running >= nearly && times.waiting >= LONG, "{times:?}");
    // A sleep begins before the goroutine stops. On a busy machine its thread may lose the CPU
    // between, which is time that it runs.
    assert!(times.running + times.waiting >= 2 * nearly, "{times:?}");
    // Each moment belongs to one state. Its end is recorded a little after main was woken.
    let sum = times.running + times.waiting + times.runnable + times.without_p;
    assert!(sum <= lasted + LONG, "{times:?} in {lasted:?}");
    let errors = [times.running_error, times.waiting_error, times.runnable_error];
    assert_eq!(errors, [Duration::ZERO; 3]);
}

/// The time after a recording had ended was counted: for what ran or waited at its end.
#[test]
fn a_recording_ends_when_it_is_stopped() {
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(2).build().unwrap();
    let (times, lasted) = rt.run(|| {
        let begin = std::time::Instant::now();
        let recorder = Recorder::builder().exact_clock(true).start().unwrap();
        go(|| ()).join().unwrap();
        recorder.stop();
        let lasted = begin.elapsed();
        sleep(LONG);
        (snapshot().times(trefoil::id()).unwrap(), lasted)
    });
    let sum = times.running + times.waiting + times.runnable + times.without_p;
    assert!(sum <= lasted, "{times:?} in {lasted:?}");
}

/// Each of many goroutines was queued while all the others ran: to compare each with all of them
/// takes minutes.
#[test]
fn many_lives_are_explained_in_a_moment() {
    let _watchdog = watchdog();
    const GOROUTINES: usize = 30_000;
    let texts = recorded(1, || {
        let group = Arc::new(trefoil::sync::WaitGroup::new());
        group.add(GOROUTINES);
        for _ in 0..GOROUTINES {
            let group = group.clone();
            go(move || group.done());
        }
        group.wait();
        snapshot().why_all()
    });
    assert!(texts.len() >= GOROUTINES, "{} lives", texts.len());
    let queued = texts.iter().filter(|(_, text)| text.contains(", behind goroutine ")).count();
    assert!(queued >= GOROUTINES / 2, "{queued} were queued");
}

/// Fails if a search, an idle P or the end of a slice has no clock: then it is not known how long a
/// goroutine ran, or its time ends with the next event.
#[test]
fn sparse_clocks_tell_who_used_the_time_of_a_p() {
    let _watchdog = watchdog();
    let (busy, computed, brief, lasted) = recorded(1, || {
        let begin = std::time::Instant::now();
        let busy = [go(compute), go(compute)].map(|g| g.join().unwrap());
        let computed = begin.elapsed();
        let begin = std::time::Instant::now();
        let brief = go(move || (trefoil::id(), begin.elapsed()));
        let (brief, lasted) = brief.join().unwrap();
        sleep(5 * LONG);
        let snapshot = snapshot();
        let running = |id| snapshot.times(id).unwrap().running;
        (busy.map(running), computed, running(brief), lasted)
    });
    let sum = busy[0] + busy[1];
    // On a busy machine the thread may be kept from running between the two.
    assert!(sum >= computed / 2, "{busy:?} of {computed:?}");
    assert!(sum <= computed + LONG / 10, "{busy:?} of {computed:?}");
    // The P was idle afterwards.
    assert!(brief <= lasted + 2 * LONG, "{brief:?} instead of {lasted:?}");
}

/// Fails if nothing is known of a goroutine that has computed, or if much is known of one that has
/// waited.
#[test]
fn usage_shows_who_computes_and_who_is_kept_waiting() {
    let _watchdog = watchdog();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        let busy = [go(compute), go(compute)].map(|g| g.join().unwrap());
        let idle = go(|| {
            sleep(4 * LONG);
            trefoil::id()
        });
        let idle = idle.join().unwrap();
        let usage = trefoil::debug::usage();
        let of = |id| usage.iter().find(|used| used.id == id).copied();
        for id in busy {
            let used = of(id).unwrap_or_else(|| panic!("{id} is not in {usage:?}"));
            // Each computes for half of 800 ms, and is queued for as long. On a busy machine the
            // thread has a CPU for a part of that.
            assert!(used.running >= LONG / 5 && used.runnable >= LONG / 5, "{used:?}");
        }
        assert!(of(idle).is_none_or(|used| used.running < LONG / 5), "{usage:?}");
    });
}

fn compute() -> u64 {
    spin(4 * LONG);
    trefoil::id()
}

#[cfg(feature = "tracing")]
#[test]
fn spans_and_events_of_tracing_are_recorded() {
    use tracing_subscriber::prelude::*;
    let _watchdog = watchdog();
    let file = recorded(2, || {
        let subscriber = tracing_subscriber::registry().with(trace::TracingLayer);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info_span!("a_span_of_tracing").in_scope(|| {
                trefoil::yield_now();
                tracing::info!(name: "an_event_of_tracing", "text");
            });
        });
        let mut file = Vec::new();
        snapshot().write_perfetto(&mut file).unwrap();
        file
    });
    for name in ["a_span_of_tracing", "an_event_of_tracing"] {
        assert!(file.windows(name.len()).any(|at| at == name.as_bytes()), "{name}");
    }
}
