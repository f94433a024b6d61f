//! What makes a recording be written or told of: panics, deadlocks, signals, the environment, and
//! limits that something exceeds.

use crate::common::{self, child_test, spin, watchdog};
use crate::{LONG, block, recorded, sleep_and_block, why};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
use trefoil::sync::Mutex;
use trefoil::time::sleep;
use trefoil::trace::{self, Incident, OnTrigger, Recorder, Snapshot, Trigger, Watch};
use trefoil::{Runtime, go};

/// A file is written when a goroutine panics, and the command explains it.
#[test]
fn a_panic_writes_a_file() {
    if std::env::var_os("TREFOIL_TRACE").is_some() {
        let child = || {
            let panics = go(|| {
                sleep(LONG);
                panic!("on purpose");
            });
            assert!(panics.join().is_err());
        };
        return trefoil::run(child);
    }
    let dir = std::env::temp_dir().join(format!("trefoil-panic-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let ran = common::this_program()
        .args(["--exact", "incidents::a_panic_writes_a_file", "--nocapture"])
        .env("TREFOIL_TRACE", format!("on,bytes=1M,dir={}", dir.display()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}");
    assert!(said.contains("trefoil: trace written to "), "{said}");
    let file = std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path();
    let snapshot = Snapshot::read(std::fs::File::open(file).unwrap()).unwrap();
    let texts: Vec<String> = snapshot.goroutines().iter().map(|&id| why(&snapshot, id)).collect();
    assert!(texts.iter().any(|text| text.contains(" in sleep, woken by a timer")), "{texts:?}");
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A folder for the files of one test. It is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("trefoil-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// Returns `child` with a recorder that writes its files here.
    fn recorded(&self, child: &common::Child, settings: &str) -> common::Child {
        child.env("TREFOIL_TRACE", &format!("{settings},dir={}", self.0.display()))
    }

    /// Returns the recordings that are here.
    fn snapshots(&self) -> Vec<Snapshot> {
        let files = std::fs::read_dir(&self.0).unwrap().map(|file| file.unwrap().path());
        files.filter_map(|file| Snapshot::read(std::fs::File::open(file).unwrap()).ok()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Child: waits until its folder has `count` files that are complete.
fn wait_for_files(count: usize) {
    let settings = std::env::var("TREFOIL_TRACE").unwrap();
    let folder = Folder(settings.split("dir=").nth(1).unwrap().into());
    while folder.snapshots().len() < count {
        sleep(Duration::from_millis(5));
    }
    std::mem::forget(folder);
}

#[test]
fn a_deadlock_of_a_part_writes_a_file() {
    child_test!(|child| {
        let folder = Folder::new("part");
        let said = folder.recorded(child, "on").succeed();
        assert!(said.contains("deadlock (certain): 3 goroutines"), "{said}");
        let read_it = "(cargo install trefoil-cli)";
        assert!(said.contains("trefoil: trace written to ") && said.contains(read_it), "{said}");
        let snapshots = folder.snapshots();
        assert_eq!(snapshots.len(), 1, "{said}");
        let texts = snapshots[0].why_all();
        let waits =
            |(_, text): &&(u64, String)| text.contains(" in sync.Mutex.Lock, and still does");
        assert_eq!(texts.iter().filter(waits).count(), 3, "{texts:?}");
    });
    trefoil::run(|| {
        let mutexes: Arc<[Mutex<()>; 3]> = Arc::default();
        let all_locked = Arc::new(trefoil::sync::Barrier::new(3));
        for i in 0..3 {
            let (mutexes, all_locked) = (mutexes.clone(), all_locked.clone());
            drop(go(move || {
                let _mine = mutexes[i].lock();
                all_locked.wait();
                drop(mutexes[(i + 1) % 3].lock());
            }));
        }
        wait_for_files(1);
    });
}

#[test]
fn a_signal_writes_a_file_and_the_program_goes_on() {
    child_test!(|child| {
        let folder = Folder::new("signal");
        let said = folder.recorded(child, "on,on=panic,on=signal:USR1").succeed();
        assert!(said.contains(&format!("signal {} has arrived; trace", libc::SIGUSR1)), "{said}");
        assert_eq!(folder.snapshots().len(), 2, "{said}");
    });
    trefoil::run(|| {
        raise(libc::SIGUSR1);
        wait_for_files(1);
        raise(libc::SIGUSR1);
        wait_for_files(2);
    });
}

fn raise(signal: i32) {
    // SAFETY: the program has a handler for it.
    assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
}

#[test]
fn a_call_that_blocks_for_long_is_named_in_the_line_and_the_file() {
    child_test!(|child| {
        let folder = Folder::new("blocked");
        let said = folder.recorded(child, "on=blocked:50ms").succeed();
        let named = |line: &str| {
            line.contains(" blocked its thread for ")
                && line.contains("ms in nanosleep; trace written")
        };
        assert!(said.lines().any(named), "{said}");
        let texts: Vec<_> = folder.snapshots().iter().flat_map(Snapshot::why_all).collect();
        let blocked = " without a P, blocked in nanosleep";
        assert!(texts.iter().any(|(_, text)| text.contains(blocked)), "{texts:?}");
    });
    let settings = std::env::var("TREFOIL_TRACE").unwrap();
    let folder = PathBuf::from(settings.split("dir=").nth(1).unwrap());
    Runtime::builder().procs(1).build().unwrap().run(move || {
        // On a busy machine sysmon may not find the thread in its call.
        while std::fs::read_dir(&folder).unwrap().next().is_none() {
            sleep_and_block();
        }
        wait_for_files(1);
    });
}

/// The folder may be one in which others can write.
#[test]
fn a_file_is_private_and_no_link_is_followed() {
    child_test!(|child| {
        let folder = Folder::new("private");
        let said = folder.recorded(child, "on,bytes=64K").succeed();
        assert!(said.contains("-2.trace;"), "{said}");
    });
    let settings = std::env::var("TREFOIL_TRACE").unwrap();
    let folder = PathBuf::from(settings.split("dir=").nth(1).unwrap());
    let trace = |number: u32| folder.join(format!("trefoil-{}-{number}.trace", std::process::id()));
    let (target, missing) = (folder.join("target"), folder.join("missing"));
    std::fs::write(&target, "precious").unwrap();
    symlink(&target, trace(0)).unwrap();
    symlink(&missing, trace(1)).unwrap();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        assert!(go(|| panic!("on purpose")).join().is_err());
    });
    assert_eq!(std::fs::read(&target).unwrap(), b"precious");
    assert!(!missing.exists());
    let file = std::fs::File::open(trace(2)).unwrap();
    assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
    Snapshot::read(file).unwrap();
}

/// Names that are all taken end the search.
#[test]
fn no_file_is_written_if_every_name_is_taken() {
    child_test!(|child| {
        let folder = Folder::new("taken");
        let said = folder.recorded(child, "on,bytes=64K").succeed();
        assert_eq!(said.matches("cannot write a trace to ").count(), 2, "{said}");
    });
    let settings = std::env::var("TREFOIL_TRACE").unwrap();
    let folder = PathBuf::from(settings.split("dir=").nth(1).unwrap());
    for number in 0..300 {
        let name = format!("trefoil-{}-{number}.trace", std::process::id());
        std::fs::write(folder.join(name), "").unwrap();
    }
    Runtime::builder().procs(1).build().unwrap().run(|| {
        for _ in 0..2 {
            assert!(go(|| panic!("on purpose")).join().is_err());
        }
    });
    for file in std::fs::read_dir(&folder).unwrap() {
        assert_eq!(file.unwrap().metadata().unwrap().len(), 0);
    }
}

/// A watch, another one, and a channel get the same signal. Without them it ends the process again.
#[test]
fn watches_of_a_signal_and_channels_share_it() {
    child_test!(|child| {
        use std::os::unix::process::ExitStatusExt;
        let out = child.output();
        assert_eq!(out.status.signal(), Some(libc::SIGUSR1), "{out:?}");
        assert!(String::from_utf8_lossy(&out.stderr).contains("all have got it"), "{out:?}");
    });
    trefoil::run(|| {
        let _recorder = Recorder::start().unwrap();
        let on = |signal| watch(trace::on(Trigger::Signal(signal)));
        let (one, of_one) = on(libc::SIGUSR1);
        let (another, of_another) = on(libc::SIGUSR1);
        let (_other, of_other) = on(libc::SIGUSR2);
        let channel = trefoil::signal::notify(&[libc::SIGUSR1]).unwrap();
        for _ in 0..3 {
            raise(libc::SIGUSR1);
            let incidents = [of_one.recv().unwrap(), of_another.recv().unwrap()];
            assert_eq!(incidents.map(|incident| incident.goroutine), [None, None]);
            assert_eq!(channel.recv(), Ok(libc::SIGUSR1));
        }
        // Without the channel, the signal still belongs to the watches.
        drop(channel);
        raise(libc::SIGUSR1);
        of_one.recv().unwrap();
        drop(one);
        raise(libc::SIGUSR1);
        of_another.recv().unwrap();
        of_another.recv().unwrap();
        assert!(of_other.try_recv().is_err());
        let wrong = trace::on(Trigger::Signal(libc::SIGSEGV)).call(|_| ()).err().unwrap();
        assert_eq!(wrong.to_string(), "signal 11 cannot be waited for");
        common::mark("all have got it");
        drop(another);
        raise(libc::SIGUSR1);
        sleep(LONG);
        raise(libc::SIGUSR1);
        sleep(50 * LONG);
    });
}

/// Two runtimes, and incidents of two kinds.
#[test]
fn a_process_writes_at_most_16_files() {
    child_test!(|child| {
        let folder = Folder::new("most");
        let said = folder.recorded(child, "on,bytes=64K,on=signal:USR1").succeed();
        assert!(said.contains("that was the last trace file of this process"), "{said}");
        assert_eq!(folder.snapshots().len(), 16, "{said}");
    });
    for _ in 0..2 {
        Runtime::builder().procs(1).build().unwrap().run(|| {
            for _ in 0..10 {
                assert!(go(|| panic!("on purpose")).join().is_err());
            }
            raise(libc::SIGUSR1);
            sleep(LONG);
        });
    }
}

#[test]
fn the_environment_turns_it_off_and_names_a_wrong_folder() {
    child_test!(|child| {
        for off in ["off", "0"] {
            child.env("TREFOIL_TRACE", off).succeed();
        }
        child.env("TREFOIL_TRACE", "on,dir=/no/such/folder").succeed();
    });
    let built = Runtime::builder().build();
    if std::env::var("TREFOIL_TRACE").unwrap().starts_with("on") {
        let error = built.err().unwrap().to_string();
        assert_eq!(error, "TREFOIL_TRACE=dir=/no/such/folder: there is no such folder");
    } else {
        assert!(built.unwrap().run(trace::snapshot).is_none());
    }
}

/// Watches, and sends what it notices.
fn watch(on: OnTrigger) -> (Watch, mpsc::Receiver<Incident>) {
    let (tx, rx) = mpsc::channel();
    (on.call(move |incident| _ = tx.send(incident)).unwrap(), rx)
}

/// Computes, without preemption.
fn keep_the_p(time: Duration) {
    let _no_preempt = trefoil::no_preempt();
    spin(time);
}

/// Calls `f`, which returns the id of a goroutine that was probably kept waiting, until that is
/// noticed. On a busy machine a thread may lose its CPU at any time.
fn until_noticed(incidents: &mpsc::Receiver<Incident>, f: impl Fn() -> Option<u64>) -> Incident {
    loop {
        let id = f();
        // The goroutine that tells of an incident may be kept waiting too.
        while let Ok(incident) = incidents.recv_timeout(LONG) {
            if incident.goroutine == id {
                return incident;
            }
        }
    }
}

#[test]
fn a_goroutine_that_is_runnable_for_long_is_noticed() {
    let _watchdog = watchdog();
    let incident = recorded(1, || {
        let on = trace::on(Trigger::Runnable(LONG)).cool_down(Duration::ZERO);
        let (_watch, incidents) = watch(on);
        until_noticed(&incidents, || {
            let kept_waiting = go(trefoil::id);
            keep_the_p(3 * LONG);
            kept_waiting.join().ok()
        })
    });
    assert!(incident.lasted >= LONG, "{incident:?}");
    // The snapshot is newer than the end of the wait: it was runnable until main stopped.
    let text = why(&incident.snapshot, incident.goroutine.unwrap());
    assert!(text.contains("behind goroutine 1"), "{text}");
}

#[test]
fn a_goroutine_that_yields_in_vain_and_a_task_are_noticed() {
    let _watchdog = watchdog();
    recorded(1, || {
        let on = trace::on(Trigger::Runnable(LONG)).cool_down(Duration::ZERO);
        let (_watch, incidents) = watch(on);
        until_noticed(&incidents, || {
            let (started, is_started) = mpsc::channel();
            let yields = go(move || {
                started.send(()).unwrap();
                trefoil::yield_now();
                trefoil::id()
            });
            is_started.recv().unwrap();
            keep_the_p(3 * LONG);
            yields.join().ok()
        });
        until_noticed(&incidents, || {
            let task = trefoil::task::spawn(async {});
            let id = task.id();
            keep_the_p(3 * LONG);
            task.join().unwrap();
            Some(id)
        });
    });
}

#[test]
fn goroutines_that_wait_or_run_are_not_noticed() {
    let _watchdog = watchdog();
    recorded(2, || {
        // Longer than any stall of a busy machine in between.
        let on = trace::on(Trigger::Runnable(10 * LONG)).cool_down(Duration::ZERO);
        let (watch, incidents) = watch(on);
        let sleeps = go(|| sleep(12 * LONG));
        let computes = go(|| spin(12 * LONG));
        sleeps.join().unwrap();
        computes.join().unwrap();
        drop(watch);
        assert!(incidents.recv().is_err());
    });
}

#[test]
fn a_late_timer_is_noticed() {
    let _watchdog = watchdog();
    let incident = recorded(1, || {
        let on = trace::on(Trigger::TimerLate(LONG)).cool_down(Duration::ZERO);
        let (_watch, incidents) = watch(on);
        until_noticed(&incidents, || {
            let sleeps = go(|| sleep(Duration::from_millis(5)));
            trefoil::yield_now();
            keep_the_p(3 * LONG);
            sleeps.join().unwrap();
            None
        })
    });
    assert!(incident.lasted >= LONG, "{incident:?}");
}

#[test]
fn a_thread_that_blocks_in_the_kernel_is_noticed() {
    let _watchdog = watchdog();
    let incident = recorded(2, || {
        let on = trace::on(Trigger::Blocked(LONG)).cool_down(Duration::ZERO);
        let (_watch, incidents) = watch(on);
        until_noticed(&incidents, || {
            let blocks = go(|| {
                block(5 * LONG);
                trefoil::id()
            });
            blocks.join().ok()
        })
    });
    assert!(incident.lasted >= LONG, "{incident:?}");
}

#[test]
fn a_watch_tells_as_often_as_it_may() {
    let _watchdog = watchdog();
    let panics = |n: usize| {
        for _ in 0..n {
            let caught = go(|| panic!("on purpose")).join();
            assert!(caught.is_err());
        }
    };
    recorded(2, move || {
        let on = trace::on(Trigger::Panic).cool_down(Duration::ZERO);
        let (one, of_one) = watch(on.at_most(1));
        let (rare, of_rare) = watch(trace::on(Trigger::Panic));
        let (all, of_all) = watch(on.look_forward(Duration::from_millis(1)));
        panics(3);
        assert_eq!(of_all.iter().take(3).count(), 3);
        drop((one, rare, all));
        // Each closure is dropped when its last goroutine has ended.
        assert_eq!((of_one.iter().count(), of_rare.iter().count()), (1, 1));
        assert_eq!(of_all.iter().count(), 0);
        panics(1);
    });
}

#[test]
fn without_a_recording_nothing_is_noticed() {
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(1).build().unwrap();
    rt.run(|| {
        let (watch, incidents) = watch(trace::on(Trigger::Runnable(LONG)));
        let kept_waiting = go(|| ());
        keep_the_p(2 * LONG);
        kept_waiting.join().unwrap();
        drop(watch);
        assert!(incidents.recv().is_err());
    });
}

#[test]
fn an_incident_that_the_environment_names_writes_a_file() {
    let _watchdog = watchdog();
    if let Ok(settings) = std::env::var("TREFOIL_TRACE") {
        let dir = settings.split("dir=").nth(1).unwrap().to_owned();
        // On a busy machine sysmon may not run for as long as main keeps the P.
        return Runtime::builder().procs(1).build().unwrap().run(move || {
            while std::fs::read_dir(&dir).unwrap().next().is_none() {
                // It is alive when the snapshot is made, so that its name is known.
                let waits = || sleep(3 * LONG);
                let kept_waiting = trefoil::Builder::new().name("patient").go(waits).unwrap();
                keep_the_p(3 * LONG);
                kept_waiting.join().unwrap();
                sleep(LONG);
            }
            // Until it is written to the end.
            common::yield_until("the whole file", || {
                let mut files = std::fs::read_dir(&dir).unwrap();
                let file = std::fs::File::open(files.next().unwrap().unwrap().path()).unwrap();
                Snapshot::read(file).is_ok()
            });
        });
    }
    let dir = std::env::temp_dir().join(format!("trefoil-incident-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let ran = common::this_program()
        .args([
            "incidents::an_incident_that_the_environment_names_writes_a_file",
            "--exact",
            "--nocapture",
        ])
        .env("TREFOIL_TRACE", format!("on=runnable:300ms,dir={}", dir.display()))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{errors}");
    assert!(errors.contains("was runnable for"), "{errors}");
    let who = "\"patient\" (started at ";
    assert!(errors.contains(who) && errors.contains("tests/trace/"), "{errors}");
    let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{errors}");
    Snapshot::read(std::fs::File::open(&files[0]).unwrap()).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
}
