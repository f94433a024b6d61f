//! Goroutines that allocate in every way while they are preempted, and sleepers that must wake up
//! in time.

use super::lateness::{Lateness, slowdown};
use super::report;
use crate::block::{self, LARGEST_BYTES};
use crate::work::{Exchange, Worker};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use trefoil::Runtime;
use trefoil::chan::{Receiver, RecvTimeoutError, Sender, bounded};
use trefoil::sync::WaitGroup;

/// Rounds of a goroutine without pauses. Then it ends, and a new one replaces it.
const ROUNDS: u32 = 32;
/// Rounds of a goroutine with pauses.
const ROUNDS_WITH_PAUSES: u32 = 2;
/// Bytes that all goroutines together may keep.
const KEPT_BYTES: usize = 64 << 20;
/// About how many goroutines are in the middle of a round while the others sleep. With thousands of
/// runnable goroutines a sleeper would measure the length of the run queue.
const ACTIVE: u32 = 16;
/// How much later than an OS thread a sleeper may be, on an otherwise idle machine.
const MAX_LATENESS: Duration = Duration::from_millis(30);
/// On a busier machine the limit holds for 99 % of the sleeps only: the OS may suspend any thread
/// for a while.
const MAX_SLOWDOWN: f64 = 1.5;
/// A sleeper must be in time in one of this many attempts.
const ATTEMPTS: u32 = 3;

/// What the goroutines share.
struct Shared {
    stop: AtomicBool,
    /// Closed when the goroutines are to end.
    stopped: Receiver<()>,
    exchange: Arc<Exchange>,
    /// Bytes that each goroutine may keep; also its largest block.
    budget: usize,
    /// Rounds of each goroutine.
    rounds: u32,
    /// How many times as long as a round the pause after it is.
    pause_factor: u32,
    alive: WaitGroup,
    started: AtomicU64,
    /// The number of goroutines that have finished their first round.
    first_rounds: AtomicU64,
}

pub(super) fn run(procs: usize, goroutines: usize, time: Duration) {
    let late = |attempt| match torture(procs, goroutines, time) {
        Ok(()) => false,
        Err(late) => {
            report!("attempt {attempt} of {ATTEMPTS}: {late}");
            true
        }
    };
    assert!(!(1..=ATTEMPTS).all(late), "a sleeper woke up late in every attempt");
}

/// Makes one attempt. Returns a message as an error if the sleeper was late.
fn torture(procs: usize, goroutines: usize, time: Duration) -> Result<(), String> {
    let budget = (KEPT_BYTES / goroutines).next_power_of_two().min(LARGEST_BYTES);
    let has_pauses = goroutines as u32 > 2 * ACTIVE;
    let (stop, stopped): (Sender<()>, _) = bounded(1);
    let shared = Arc::new(Shared {
        stop: AtomicBool::new(false),
        stopped,
        exchange: Exchange::with_plain_threads(budget),
        budget,
        rounds: if has_pauses { ROUNDS_WITH_PAUSES } else { ROUNDS },
        pause_factor: if has_pauses { goroutines as u32 / ACTIVE } else { 0 },
        alive: WaitGroup::new(),
        started: AtomicU64::new(0),
        first_rounds: AtomicU64::new(0),
    });
    let os_sleeper = {
        let shared = shared.clone();
        std::thread::spawn(move || Lateness::of_sleeper(&shared.stop))
    };
    let runtime = Runtime::builder().procs(procs).build().expect("a runtime");
    let (sleeper, allocating_sleeper, stats) = runtime.run(|| {
        let (one, other) = (shared.clone(), shared.clone());
        let sleeper = trefoil::go(move || Lateness::of_sleeper(&one.stop));
        let allocating_sleeper = trefoil::go(move || Lateness::of_allocating_sleeper(&other.stop));
        for i in 1..=goroutines as u64 {
            start_worker(&shared, Instant::now());
            // Not all at once: a sleeper behind them in the run queue would be late.
            while has_pauses && i > shared.first_rounds.load(Relaxed) + u64::from(ACTIVE) {
                trefoil::time::sleep(Duration::from_micros(200));
            }
        }
        let start = Instant::now();
        while start.elapsed() < time {
            trefoil::time::sleep(Duration::from_millis(10));
        }
        shared.stop.store(true, Relaxed);
        // The sleepers end first: they must not measure the wake-up of two thousand goroutines.
        let sleepers = (sleeper.join().unwrap(), allocating_sleeper.join().unwrap());
        stop.close();
        shared.alive.wait();
        (sleepers.0, sleepers.1, trefoil::debug::stats())
    });
    let slowdown = slowdown(procs);
    drop(runtime);
    let os_sleeper = os_sleeper.join().unwrap();
    let started = shared.started.load(Relaxed);
    Arc::into_inner(shared).expect("the goroutines have ended").exchange.close();
    report!(
        "{started} goroutines, {} preemptions, {} retakes, {} threads",
        stats.preemptions,
        stats.retakes,
        stats.threads,
    );
    report!(
        "late: goroutine {sleeper}; OS thread {os_sleeper}; machine {slowdown:.1} times slower"
    );
    report!("late after allocating: goroutine {allocating_sleeper}");
    assert_eq!(block::live(), 0, "blocks were lost");
    let late = if slowdown <= MAX_SLOWDOWN { sleeper.max() } else { sleeper.percentile(99) };
    let limit = MAX_LATENESS.mul_f64(slowdown) + os_sleeper.max();
    // Without optimisation a round is too long for so many goroutines.
    if late <= limit || cfg!(debug_assertions) {
        Ok(())
    } else {
        Err(format!("a sleeper woke up {late:.1?} late, limit {limit:.1?}"))
    }
}

/// Starts a goroutine whose first round is due at `due`.
fn start_worker(shared: &Arc<Shared>, mut due: Instant) {
    let shared = shared.clone();
    shared.started.fetch_add(1, Relaxed);
    shared.alive.add(1);
    trefoil::go(move || {
        let mut worker = Worker::new(shared.budget);
        for round in 0..shared.rounds {
            if shared.stopped.recv_deadline(due) != Err(RecvTimeoutError::Timeout) {
                break;
            }
            worker.round(&shared.exchange);
            if round == 0 {
                shared.first_rounds.fetch_add(1, Relaxed);
            }
            // Since the round was due, not since it began: on a busy machine the pauses become
            // longer.
            due = Instant::now() + due.elapsed() * shared.pause_factor;
        }
        drop(worker);
        if !shared.stopped.is_closed() {
            start_worker(&shared, due);
        }
        let alive = shared.alive.clone();
        drop(shared);
        alive.done();
    });
}
