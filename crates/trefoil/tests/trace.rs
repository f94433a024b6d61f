//! The flight recorder: what a snapshot says of programs whose order of events is known.

mod common;

use common::{child_test, spin, watchdog};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use trefoil::sync::Mutex;
use trefoil::time::sleep;
use trefoil::trace::{self, Incident, OnTrigger, Recorder, Snapshot, Trigger, Watch};
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
    assert!(text.contains("tests/trace.rs:"), "{text}");
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

/// Returns a snapshot of a short recording, and the file that is written from it.
fn brief_recording() -> (Snapshot, Vec<u8>) {
    let snapshot = recorded(2, || {
        go(|| sleep(Duration::from_millis(1))).join().unwrap();
        snapshot()
    });
    let mut file = Vec::new();
    snapshot.write(&mut file).unwrap();
    (snapshot, file)
}

/// A file says the same as the snapshot that it was written from.
#[test]
fn a_file_is_read_as_it_was_written() {
    let _watchdog = watchdog();
    let (snapshot, file) = brief_recording();
    let read = Snapshot::read(&file[..]).unwrap();
    for id in snapshot.goroutines() {
        assert_eq!(why(&read, id), why(&snapshot, id));
    }
    assert_eq!(read.pid(), Some(std::process::id()));
    assert_eq!((read.program(), read.taken_at()), (snapshot.program(), snapshot.taken_at()));
    assert!(read.program().unwrap().starts_with("trace"), "{:?}", read.program());
    for len in [0, 10, 40, file.len() - 1] {
        let error = Snapshot::read(&file[..len]).err().unwrap();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{len} bytes: {error}");
    }
}

/// A file of the first version says the same, except of which process it is.
#[test]
fn files_of_the_first_version_are_read() {
    let _watchdog = watchdog();
    let (snapshot, mut file) = brief_recording();
    let program = snapshot.program().unwrap().len();
    let mut first = file.clone();
    first.truncate(file.len() - 8 - program);
    first.drain(16..32);
    first[14] = b'1';
    let read = Snapshot::read(&first[..]).unwrap();
    assert_eq!((read.pid(), read.program(), read.taken_at()), (None, None, None));
    assert_eq!(read.why_all(), snapshot.why_all());
    let mut again = Vec::new();
    read.write(&mut again).unwrap();
    assert_eq!(again.len(), first.len());
    file[14] = b'3';
    let error = Snapshot::read(&file[..]).err().unwrap();
    assert!(error.to_string().contains("another version"), "{error}");
}

/// Whatever is in a file, it is read or refused, and explained without a panic.
#[test]
#[ignore = "takes long"]
fn any_file_is_read_or_refused() {
    let _watchdog = watchdog();
    let snapshot = recorded(2, || {
        for _ in 0..20 {
            go(|| sleep(Duration::from_micros(10))).join().unwrap();
        }
        snapshot()
    });
    let mut file = Vec::new();
    snapshot.write(&mut file).unwrap();
    let mut random = 12345_u64;
    let mut next = |below: usize| {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (random >> 33) as usize % below
    };
    let words = file.len() / 8;
    for _ in 0..2_000 {
        let mut broken = file.clone();
        for _ in 0..=next(6) {
            let at = 16 + 8 * next(words - 2);
            let value = match next(5) {
                0 => u64::MAX,
                1 => (next(256) as u64) << 56 | next(1 << 30) as u64,
                2 => 1 << 56 | ((1 << 56) - 1),
                3 => next(1 << 16) as u64,
                _ => u64::from_le_bytes(broken[at..at + 8].try_into().unwrap()) ^ (1 << next(64)),
            };
            broken[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        if let Ok(snapshot) = Snapshot::read(&broken[..]) {
            snapshot.why_all();
            snapshot.write_perfetto(std::io::sink()).unwrap();
        }
    }
}

/// Snapshots of small rings while their writers overwrite them all the time.
#[test]
#[ignore = "takes long"]
fn snapshots_beside_busy_writers_are_consistent() {
    let _watchdog = watchdog();
    let rt = Runtime::builder().procs(2).build().unwrap();
    let run = || {
        let recorder = Recorder::builder().bytes(0).start().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let pairs: Vec<_> = (0..4)
            .map(|_| {
                let over = over.clone();
                let (tx, rx) = trefoil::chan::bounded(0);
                let echo = go(move || rx.into_iter().count());
                go(move || {
                    while !over.load(Ordering::Relaxed) {
                        tx.send(()).unwrap();
                    }
                    drop(tx);
                    echo.join().unwrap();
                })
            })
            .collect();
        for _ in 0..40 {
            let snapshot = snapshot();
            let ids = snapshot.goroutines();
            assert!(ids.iter().all(|&id| id < 100), "an id that never was: {ids:?}");
            let mut file = Vec::new();
            snapshot.write_perfetto(&mut file).unwrap();
        }
        over.store(true, Ordering::Relaxed);
        pairs.into_iter().for_each(|pair| pair.join().unwrap());
        recorder.stop();
    };
    rt.go(run).unwrap().join().unwrap();
}

/// A snapshot takes not much longer than to copy its memory: 16 MiB in 4 to 5 ms.
#[test]
#[ignore = "measures time"]
fn a_snapshot_is_as_fast_as_a_copy() {
    let _watchdog = watchdog();
    const BYTES: usize = 16 << 20;
    let rt = Runtime::builder().procs(1).build().unwrap();
    let run = || {
        let recorder = Recorder::builder().bytes(2 * BYTES).start().unwrap();
        // Each goroutine is at least four words, so that the ring of the P is full.
        for _ in 0..BYTES / 8 / 200 {
            let waits: Vec<_> = (0..50).map(|_| go(trefoil::yield_now)).collect();
            waits.into_iter().for_each(|wait| wait.join().unwrap());
        }
        let times = (0..20)
            .map(|_| {
                let start = Instant::now();
                let snapshot = snapshot();
                let took = start.elapsed();
                let mut file = Vec::new();
                snapshot.write(&mut file).unwrap();
                assert!(file.len() >= BYTES, "only {} bytes", file.len());
                let start = Instant::now();
                std::hint::black_box(file[..BYTES].to_vec());
                (took, start.elapsed())
            })
            .collect();
        recorder.stop();
        times
    };
    let (mut snapshots, mut copies): (Vec<_>, Vec<_>) = rt.go(run).unwrap().join().unwrap();
    snapshots.sort();
    copies.sort();
    println!("snapshots: {snapshots:?}\ncopies: {copies:?}");
    // In a debug build each word is several calls.
    let slower = if cfg!(debug_assertions) { 100 } else { 3 };
    assert!(snapshots[0] <= slower * copies[0]);
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

/// Perfetto's own description of the format reads the file. SQL over what it contains answers who
/// waited, who ran, and who woke whom. (Perfetto's own SQL engine is not in its Python package.)
#[test]
fn perfetto_reads_the_file() {
    const SCRIPT: &str = r#"
import sqlite3, sys
try:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
except ImportError:
    print("no package")
    sys.exit()
trace = Trace()
trace.ParseFromString(open(sys.argv[1], "rb").read())
assert trace.packet[0].sequence_flags == 1
db = sqlite3.connect(":memory:")
db.executescript("""
    CREATE TABLE track (id, name, parent);
    CREATE TABLE slice (track, name, ts, dur, goroutine, flow);
    CREATE TABLE instant (track, name, ts, goroutine, woken_by, flow);
""")
last, open_slices, uncertain = {}, {}, 0
assert trace.packet[0].track_descriptor.process.pid == int(sys.argv[2]), "another process"
assert trace.packet[0].track_descriptor.process.process_name == sys.argv[3], "another program"
clocks = {c.clock_id: c.timestamp for p in trace.packet if p.HasField("clock_snapshot") for c in p.clock_snapshot.clocks}
assert abs(clocks[1] / 1e9 - int(sys.argv[4])) < 3600 and clocks[6] > 0, "no wall clock"
for packet in trace.packet:
    if packet.HasField("track_descriptor"):
        track = packet.track_descriptor
        db.execute("INSERT INTO track VALUES (?, ?, ?)", (track.uuid, track.name, track.parent_uuid))
    if not packet.HasField("track_event"):
        continue
    event, track, ts = packet.track_event, packet.track_event.track_uuid, packet.timestamp
    assert ts >= last.get(track, 0), "time goes backwards"
    last[track] = ts
    notes = {a.name: a.string_value or a.uint_value for a in event.debug_annotations}
    uncertain += notes.get("time ± ns", 0) > 0
    if event.type == TrackEvent.TYPE_SLICE_BEGIN:
        flow = list(event.terminating_flow_ids)
        row = (track, event.name, ts, notes.get("goroutine"), flow[0] if flow else None)
        open_slices.setdefault(track, []).append(row)
    elif event.type == TrackEvent.TYPE_SLICE_END:
        track, name, begin, goroutine, flow = open_slices[track].pop()
        db.execute("INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?)", (track, name, begin, ts - begin, goroutine, flow))
    else:
        flow = list(event.flow_ids)
        db.execute("INSERT INTO instant VALUES (?, ?, ?, ?, ?, ?)",
            (track, event.name, ts, notes.get("goroutine"), notes.get("by"), flow[0] if flow else None))
assert uncertain > 0, "no event has an error"
sender, receiver = map(int, sys.argv[5:])
def one(sql, *values): return db.execute(sql, values).fetchone()
assert one("SELECT count(*) FROM track WHERE parent != 0 AND parent NOT IN (SELECT id FROM track)") == (0,)
assert one("SELECT count(*) FROM slice WHERE track NOT IN (SELECT id FROM track)") == (0,)
print("tracks", [name for name, in db.execute("SELECT name FROM track WHERE name LIKE 'P_' ORDER BY name")])
print("two at once on one P", one("""
    SELECT count(*) FROM slice a JOIN slice b ON a.track = b.track AND a.rowid < b.rowid JOIN track ON track.id = a.track
    WHERE track.name LIKE 'P_' AND a.ts < b.ts + b.dur AND b.ts < a.ts + a.dur""")[0])
print("waited for", one("""
    SELECT slice.name FROM slice JOIN track ON track.id = slice.track
    WHERE track.name LIKE 'G% states' AND goroutine = ? AND slice.name NOT LIKE 'running%'
    ORDER BY dur DESC""", receiver)[0])
print("woken by the sender", one("""
    SELECT count(*) > 0 FROM instant JOIN slice ON slice.flow = instant.flow
    WHERE instant.goroutine = ? AND instant.woken_by = ? AND slice.goroutine = ?""", receiver, f"G{sender}", receiver)[0])
print("region", one("SELECT goroutine = ? AND dur > 0 FROM slice WHERE name = 'sending'", sender)[0])
"#;
    let _watchdog = watchdog();
    let (file, snapshot, sender, receiver) = recorded(2, || {
        let (tx, rx) = trefoil::chan::bounded(0);
        let receiver = go(move || {
            rx.recv().unwrap();
            trefoil::id()
        });
        let sender = go(move || {
            let _sending = trace::region("sending");
            sleep(LONG);
            tx.send(()).unwrap();
            trefoil::id()
        });
        let ids = (sender.join().unwrap(), receiver.join().unwrap());
        for _ in 0..100 {
            go(|| ()).join().unwrap();
        }
        let (mut file, snapshot) = (Vec::new(), snapshot());
        snapshot.write_perfetto(&mut file).unwrap();
        (file, snapshot, ids.0, ids.1)
    });
    let name = format!("trefoil-{}.pftrace", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::write(&path, file).unwrap();
    let mut python = std::process::Command::new("python3");
    let since = snapshot.taken_at().unwrap().duration_since(std::time::UNIX_EPOCH).unwrap();
    let (pid, seconds) = (std::process::id().to_string(), since.as_secs().to_string());
    python.args(["-c", SCRIPT]).arg(&path).args([&pid, snapshot.program().unwrap(), &seconds]);
    python.args([sender.to_string(), receiver.to_string()]);
    let ran = python.output();
    std::fs::remove_file(&path).unwrap();
    let Ok(ran) = ran else { return common::mark("skipped: python3 is not available") };
    let said = String::from_utf8_lossy(&ran.stdout);
    if said.starts_with("no package") {
        return common::mark("skipped: Python has no package perfetto");
    }
    let expected = "tracks ['P0', 'P1']\ntwo at once on one P 0\nwaited for chan receive\n\
                    woken by the sender 1\nregion 1\n";
    assert_eq!(said, expected, "{}", String::from_utf8_lossy(&ran.stderr));
}

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
        .args(["--exact", "a_panic_writes_a_file", "--nocapture"])
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
        .args(["an_incident_that_the_environment_names_writes_a_file", "--exact", "--nocapture"])
        .env("TREFOIL_TRACE", format!("on=runnable:300ms,dir={}", dir.display()))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{errors}");
    assert!(errors.contains("was runnable for"), "{errors}");
    let who = "\"patient\" (started at ";
    assert!(errors.contains(who) && errors.contains("tests/trace.rs:"), "{errors}");
    let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|file| file.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{errors}");
    Snapshot::read(std::fs::File::open(&files[0]).unwrap()).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
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
    // A sleep begins a little before the goroutine stops.
    let nearly = 2 * LONG - LONG / 10;
    assert!(times.running >= nearly && times.waiting >= nearly, "{times:?}");
    // Each moment belongs to one state. Its end is recorded a little after main was woken.
    let sum = times.running + times.waiting + times.runnable + times.without_p;
    assert!(sum <= lasted + LONG, "{times:?} in {lasted:?}");
    let errors = [times.running_error, times.waiting_error, times.runnable_error];
    assert_eq!(errors, [Duration::ZERO; 3]);
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
            // thread does not run all the time, nor does sysmon.
            assert!(used.running >= LONG && used.runnable >= LONG, "{used:?}");
        }
        assert!(of(idle).is_none_or(|used| used.running < LONG), "{usage:?}");
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
