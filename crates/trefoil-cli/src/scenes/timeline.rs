//! Which goroutine runs where: a lane per OS thread, a column per few milliseconds.
//!
//! Each goroutine computes and writes its letter into its thread's lane; a plain thread samples the
//! lanes at intervals. So the picture shows what ran, not what the scheduler reports. The loops
//! also measure the length of a turn: a loop that finds another letter in its lane records the
//! time.

use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::stalls::wait_of_busiest;
use crate::proc;
use crate::report::Report;

/// More threads than Ps may appear: a thread may lose its P and go on without one.
const LANES: usize = 16;
const COLUMNS: usize = 60;
/// Sampling ends then, even if a letter is missing.
const LIMIT: Duration = Duration::from_secs(5);
const EVERY: Duration = Duration::from_millis(4);
const NONE: u8 = b'.';
const LETTERS: [u8; 5] = *b"ABCDE";
/// Steps between two letters, about ten microseconds. A loop that is preempted between finding its
/// lane and writing there writes into the lane of a thread that it has left; long pauses make that
/// rare.
const STEPS: u32 = 10_000;

/// A slice is 10 ms, measured by sysmon, which may be a little late.
const SHORTEST_TURN: Duration = Duration::from_millis(5);
const LONGEST_TURN: Duration = Duration::from_millis(40);

/// One thread: its id, and the goroutines that ran there.
struct Lane {
    tid: AtomicI32,
    /// The last letter since the last sample.
    letter: AtomicU8,
    /// The last letter.
    owner: AtomicU8,
    /// When each turn began, in nanoseconds; 0 if it has not.
    turns: [AtomicU64; 256],
    turn: AtomicUsize,
}

impl Lane {
    fn new() -> Lane {
        Lane {
            tid: AtomicI32::new(0),
            letter: AtomicU8::new(NONE),
            owner: AtomicU8::new(NONE),
            turns: [const { AtomicU64::new(0) }; 256],
            turn: AtomicUsize::new(0),
        }
    }

    /// Returns the lane of this thread; takes the first free one if it has none yet.
    fn mine(lanes: &[Lane]) -> Option<&Lane> {
        // SAFETY: no arguments, touches no memory.
        let tid = unsafe { libc::gettid() };
        lanes.iter().find(|lane| {
            let taken = lane.tid.compare_exchange(0, tid, Ordering::Relaxed, Ordering::Relaxed);
            taken.is_ok() || taken == Err(tid)
        })
    }

    fn sign(&self, letter: u8, start: Instant) {
        self.letter.store(letter, Ordering::Relaxed);
        if self.owner.load(Ordering::Relaxed) != letter {
            self.owner.store(letter, Ordering::Relaxed);
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            if let Some(began) = self.turns.get(turn) {
                began.store(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            }
        }
    }

    /// Returns the lengths of the completed turns.
    fn turns(&self) -> Vec<Duration> {
        let begun = self.turns.iter().map(|began| began.load(Ordering::Relaxed));
        let begun: Vec<u64> = begun.take_while(|&began| began > 0).collect();
        begun.windows(2).map(|two| Duration::from_nanos(two[1].saturating_sub(two[0]))).collect()
    }
}

/// Five goroutines that never pause, on two Ps.
pub(crate) fn play(report: &Report) -> Result<(), String> {
    report
        .part(format_args!("five endless loops on two Ps; a column is {EVERY:?}, a line a thread"));
    let lanes: Arc<[Lane]> = (0..LANES).map(|_| Lane::new()).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = trefoil::Runtime::builder().procs(2).build().map_err(|e| e.to_string())?;
    let start = Instant::now();
    let before = proc::thread_times();
    for letter in LETTERS {
        let (lanes, stop) = (lanes.clone(), stop.clone());
        let hog = move || {
            while !stop.load(Ordering::Relaxed) {
                (0..STEPS).for_each(|step| _ = black_box(step));
                if let Some(lane) = Lane::mine(&lanes) {
                    lane.sign(letter, start);
                }
            }
        };
        runtime.go(hog).map_err(|e| e.to_string())?;
    }
    let mut pictures = Vec::new();
    let mut seen = BTreeSet::new();
    // Longer if other processes use the CPUs and a loop has had no turn yet.
    while pictures.len() < COLUMNS || (seen.len() < LETTERS.len() && start.elapsed() < LIMIT) {
        lanes.iter().for_each(|lane| lane.letter.store(NONE, Ordering::Relaxed));
        std::thread::sleep(EVERY);
        let picture: Vec<u8> =
            lanes.iter().map(|lane| lane.letter.load(Ordering::Relaxed)).collect();
        seen.extend(picture.iter().copied().filter(|&letter| letter != NONE));
        pictures.push(picture);
    }
    // A thread that waits for a CPU cannot switch goroutines.
    let wait = wait_of_busiest(&before);
    stop.store(true, Ordering::Relaxed);

    let last = &pictures[pictures.len() - COLUMNS..];
    for (i, lane) in lanes.iter().enumerate() {
        let line: Vec<u8> = last.iter().map(|picture| picture[i]).collect();
        if line.iter().any(|&letter| letter != NONE) {
            let tid = lane.tid.load(Ordering::Relaxed);
            report.fact(&format!("thread {tid}"), String::from_utf8_lossy(&line));
        }
    }
    report.promise("had turns", seen.len(), LETTERS.len(), seen.len() == LETTERS.len());
    let mut turns: Vec<Duration> = lanes.iter().flat_map(Lane::turns).collect();
    turns.sort_unstable();
    let median = turns.get(turns.len() / 2).copied().unwrap_or_default();
    report.promise(
        "a turn",
        format_args!("{median:.1?} (median of {})", turns.len()),
        format_args!("{SHORTEST_TURN:?} to {LONGEST_TURN:?}, and 4 × {wait:.2?} waiting for a CPU"),
        (SHORTEST_TURN..=LONGEST_TURN + 4 * wait).contains(&median),
    );
    Ok(())
}
