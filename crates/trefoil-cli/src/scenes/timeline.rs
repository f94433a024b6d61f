//! Who runs where: a lane for each OS thread, a column for every few milliseconds.
//!
//! Each goroutine computes and leaves its letter in its thread's lane; a plain thread takes a picture of the lanes
//! at intervals. So what is shown is what really ran, not what the scheduler says.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::time::Duration;

use crate::stage::Stage;

/// More threads than Ps may appear: one may lose its P and come back without.
const LANES: usize = 16;
const COLUMNS: usize = 60;
const EVERY: Duration = Duration::from_millis(4);
const NOBODY: u8 = b'.';

/// One thread: its id, and who ran there last.
struct Lane {
    tid: AtomicI32,
    letter: AtomicU8,
}

/// The lane of this thread; the first free one if it has none yet.
fn lane(lanes: &[Lane]) -> Option<&Lane> {
    // SAFETY: no arguments, touches no memory.
    let tid = unsafe { libc::gettid() };
    lanes.iter().find(|lane| {
        let taken = lane.tid.compare_exchange(0, tid, Ordering::Relaxed, Ordering::Relaxed);
        taken.is_ok() || taken == Err(tid)
    })
}

/// Five goroutines that never pause, on two Ps.
pub(crate) fn play(stage: &Stage) -> Result<(), String> {
    const LETTERS: [u8; 5] = *b"ABCDE";
    stage
        .part(format_args!("five endless loops on two Ps; a column is {EVERY:?}, a line a thread"));
    let lanes: Arc<Vec<Lane>> = Arc::new(
        (0..LANES)
            .map(|_| Lane { tid: AtomicI32::new(0), letter: AtomicU8::new(NOBODY) })
            .collect(),
    );
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = trefoil::Runtime::builder().procs(2).build().map_err(|e| e.to_string())?;
    for letter in LETTERS {
        let (lanes, stop) = (lanes.clone(), stop.clone());
        let hog = move || {
            while !stop.load(Ordering::Relaxed) {
                if let Some(lane) = lane(&lanes) {
                    lane.letter.store(letter, Ordering::Relaxed);
                }
            }
        };
        runtime.go(hog).map_err(|e| e.to_string())?;
    }
    let mut pictures = Vec::new();
    for _ in 0..COLUMNS {
        lanes.iter().for_each(|lane| lane.letter.store(NOBODY, Ordering::Relaxed));
        std::thread::sleep(EVERY);
        let picture: Vec<u8> =
            lanes.iter().map(|lane| lane.letter.load(Ordering::Relaxed)).collect();
        pictures.push(picture);
    }
    stop.store(true, Ordering::Relaxed);
    let mut seen = BTreeSet::new();
    for i in 0..LANES {
        let line: Vec<u8> = pictures.iter().map(|picture| picture[i]).collect();
        seen.extend(line.iter().copied().filter(|&letter| letter != NOBODY));
        if line.iter().any(|&letter| letter != NOBODY) {
            let tid = lanes[i].tid.load(Ordering::Relaxed);
            stage.fact(&format!("thread {tid}"), String::from_utf8_lossy(&line));
        }
    }
    if seen.len() < LETTERS.len() {
        return Err(format!("only {} of {} had a turn", seen.len(), LETTERS.len()));
    }
    Ok(())
}
