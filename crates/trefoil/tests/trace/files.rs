//! Recordings in memory and in files: they are complete, read as they were written, and read by
//! Perfetto.

use crate::common::{self, watchdog};
use crate::{LONG, recorded, snapshot, why};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trefoil::time::sleep;
use trefoil::trace::{self, Recorder, Snapshot};
use trefoil::{Runtime, go};

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
}

/// What follows the program is optional: where wakers were.
#[test]
fn a_file_that_is_cut_off_is_read_if_it_has_the_program() {
    let _watchdog = watchdog();
    let (snapshot, file) = brief_recording();
    let program = snapshot.program().unwrap().as_bytes();
    let at = file.windows(program.len()).rposition(|part| part == program).unwrap();
    let needed = at + program.len();
    for len in 0..needed {
        let error = Snapshot::read(&file[..len]).err().unwrap();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{len} bytes: {error}");
        assert!(error.to_string().contains("cut off"), "{len} bytes: {error}");
    }
    for len in needed..=file.len() {
        let read = Snapshot::read(&file[..len]).unwrap();
        assert_eq!(read.goroutines(), snapshot.goroutines(), "{len} bytes");
        assert_eq!(read.why_all().len(), snapshot.why_all().len(), "{len} bytes");
    }
}

/// Files of the first two versions say the same, except where wakers were, and the first does not
/// say of which process it is.
#[test]
fn files_of_earlier_versions_are_read() {
    let _watchdog = watchdog();
    let (snapshot, mut file) = brief_recording();
    let program = snapshot.program().unwrap().as_bytes();
    let at = file.windows(program.len()).rposition(|part| part == program).unwrap();
    // On a busy machine a wait may have been so long that the place of its waker is known.
    let without_places = |all: Vec<(u64, String)>| {
        let line = |line: &str| match line.rsplit_once(" at ") {
            // The place where a goroutine was started is in brackets.
            Some((before, place)) if place.contains(file!()) && !place.ends_with(')') => {
                before.to_owned()
            }
            _ => line.to_owned(),
        };
        let text = |(id, text): (u64, String)| (id, text.lines().map(line).collect::<Vec<_>>());
        all.into_iter().map(text).collect::<Vec<_>>()
    };
    let mut second = file.clone();
    second.truncate(at + program.len());
    // The same of this version, because its process had ended too early, has no places either.
    assert_eq!(Snapshot::read(&second[..]).unwrap().program(), snapshot.program());
    second[14] = b'2';
    let read = Snapshot::read(&second[..]).unwrap();
    assert_eq!((read.pid(), read.program()), (snapshot.pid(), snapshot.program()));
    assert_eq!(without_places(read.why_all()), without_places(snapshot.why_all()));
    let mut first = second;
    first.truncate(at - 8);
    first.drain(16..32);
    first[14] = b'1';
    let read = Snapshot::read(&first[..]).unwrap();
    assert_eq!((read.pid(), read.program(), read.taken_at()), (None, None, None));
    assert_eq!(without_places(read.why_all()), without_places(snapshot.why_all()));
    let mut again = Vec::new();
    read.write(&mut again).unwrap();
    assert_eq!(again.len(), first.len());
    file[14] = b'4';
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
        // A file with the place of a waker.
        let (tx, rx) = trefoil::chan::bounded(0);
        let receiver = go(move || rx.recv().unwrap());
        sleep(LONG);
        tx.send(()).unwrap();
        receiver.join().unwrap();
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
    CREATE TABLE instant (track, name, ts, goroutine, woken_by, place, flow);
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
        db.execute("INSERT INTO instant VALUES (?, ?, ?, ?, ?, ?, ?)",
            (track, event.name, ts, notes.get("goroutine"), notes.get("by"), notes.get("place"), flow[0] if flow else None))
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
print("woken by the sender at", one("""
    SELECT group_concat(instant.place) FROM instant JOIN slice ON slice.flow = instant.flow
    WHERE instant.goroutine = ? AND instant.woken_by = ? AND slice.goroutine = ?""", receiver, f"G{sender}", receiver)[0])
print("region", one("SELECT goroutine = ? AND dur > 0 FROM slice WHERE name = 'sending'", sender)[0])
"#;
    let _watchdog = watchdog();
    let (file, snapshot, sender, receiver, line) = recorded(2, || {
        let (tx, rx) = trefoil::chan::bounded(0);
        let receiver = go(move || {
            rx.recv().unwrap();
            trefoil::id()
        });
        let sender = go(move || {
            let _sending = trace::region("sending");
            sleep(LONG);
            let line = line!() + 1;
            tx.send(()).unwrap();
            (trefoil::id(), line)
        });
        let ids = (sender.join().unwrap(), receiver.join().unwrap());
        for _ in 0..100 {
            go(|| ()).join().unwrap();
        }
        let (mut file, snapshot) = (Vec::new(), snapshot());
        snapshot.write_perfetto(&mut file).unwrap();
        let ((sender, line), receiver) = ids;
        (file, snapshot, sender, receiver, line)
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
    let folder = env!("CARGO_MANIFEST_DIR");
    let expected = format!(
        "tracks ['P0', 'P1']\ntwo at once on one P 0\nwaited for chan receive\n\
         woken by the sender at {folder}/tests/trace/files.rs:{line}\nregion 1\n"
    );
    assert_eq!(said, expected, "{}", String::from_utf8_lossy(&ran.stderr));
}
