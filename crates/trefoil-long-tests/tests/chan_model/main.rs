//! Channels and selects against a model: random programs, whose results are known.
//!
//! - [`sequential`] runs one operation after another. An operation that must wait does so on a
//!   goroutine or thread of its own. After every step the test compares the results, which
//!   operations wait, which are woken in which order, and which values are left.
//! - [`concurrent`] runs up to eight goroutines and threads, each with its own operations, at 1, 2,
//!   4 and 16 Ps. The test checks what must hold in any order: each value has one result, values
//!   arrive in order, no operation is left waiting.
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_CHAN_SECS` | how long each of the two runs, 4 by default |
//! | `TREFOIL_CHAN_SEED` | the seed to begin with, printed by every run |
//!
//! A program that fails is made smaller by proptest and printed. The sequential test depends on the
//! seed alone, except for the random choice among ready arms; the concurrent one also on how
//! threads interleave.

mod action;
#[path = "../../../trefoil/tests/common/mod.rs"]
mod common;
mod concurrent;
mod sequential;

use action::{Form, How, Side, Value};
use common::{watchdog_for, yield_until};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use trefoil::chan::{Receiver, Sender, bounded, unbounded};
use trefoil::{Runtime, go};

/// Stands for an unbounded channel among capacities.
const UNBOUNDED: usize = usize::MAX;
/// A timeout that is never reached.
const LONG: Duration = Duration::from_secs(300);
/// Programs between two readings of the clock.
const BATCH: u32 = 16;

/// Channels per program: few, so that operations meet.
const MAX_CHANNELS: usize = 3;

enum Handle<T> {
    Goroutine(trefoil::JoinHandle<T>),
    Thread(std::thread::JoinHandle<T>),
}

impl<T: Send + 'static> Handle<T> {
    fn start_on_thread_if(on_thread: bool, f: impl FnOnce() -> T + Send + 'static) -> Handle<T> {
        if on_thread { Handle::Thread(std::thread::spawn(f)) } else { Handle::Goroutine(go(f)) }
    }

    fn is_finished(&self) -> bool {
        match self {
            Handle::Goroutine(h) => h.is_finished(),
            Handle::Thread(h) => h.is_finished(),
        }
    }

    /// Returns its result. Panics after half of `TOO_LONG`.
    #[track_caller]
    fn join(self, what: &str) -> T {
        yield_until(what, || self.is_finished());
        let result = match self {
            Handle::Goroutine(h) => h.join(),
            Handle::Thread(h) => h.join(),
        };
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn new_channel(cap: usize) -> (Sender<Value>, Receiver<Value>) {
    if cap == UNBOUNDED { unbounded() } else { bounded(cap) }
}

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: expected a number")))
}

/// The sizes of the runtimes that programs run on.
const PROCS: [usize; 4] = [1, 2, 4, 16];

/// Returns the runtime with `PROCS[i]` Ps.
fn runtime(i: usize) -> &'static Runtime {
    static ALL: [OnceLock<Runtime>; PROCS.len()] = [const { OnceLock::new() }; PROCS.len()];
    ALL[i].get_or_init(|| Runtime::builder().procs(PROCS[i]).build().expect("a runtime"))
}

/// Runs random programs for `TREFOIL_CHAN_SECS`. A failure prints the smallest program that fails.
fn run_programs<P: fmt::Debug>(name: &str, programs: impl Strategy<Value = P>, test: impl Fn(&P)) {
    let length = Duration::from_secs(number_from("TREFOIL_CHAN_SECS").unwrap_or(4));
    let _dog = watchdog_for(length + Duration::from_secs(240));
    let seed = number_from("TREFOIL_CHAN_SEED").unwrap_or_else(rand::random);
    eprintln!("{name}: TREFOIL_CHAN_SEED={seed} TREFOIL_CHAN_SECS={}", length.as_secs());
    let start = Instant::now();
    let mut batch = 0;
    while batch == 0 || start.elapsed() < length {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&(seed + batch).to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
        let config = Config {
            cases: BATCH,
            failure_persistence: None,
            max_shrink_time: 20_000,
            max_shrink_iters: 2000,
            ..Config::default()
        };
        let mut runner = TestRunner::new_with_rng(config, rng);
        let result = runner.run(&programs, |program| {
            test(&program);
            Ok(())
        });
        match result {
            Ok(()) => {}
            Err(TestError::Fail(why, program)) => {
                panic!(
                    "{why}\nwith TREFOIL_CHAN_SEED={} and the program\n{program:#?}",
                    seed + batch
                )
            }
            Err(e) => panic!("{e}"),
        }
        batch += 1;
    }
    eprintln!("{name}: {} programs", batch * u64::from(BATCH));
}

fn a_side() -> impl Strategy<Value = Side> + Clone {
    prop_oneof![Just(Side::Send), Just(Side::Recv)]
}

fn a_how() -> impl Strategy<Value = How> {
    prop_oneof![
        6 => Just(How::Block),
        3 => Just(How::LongDeadline),
        1 => Just(How::ShortDeadline),
        3 => Just(How::Try),
    ]
}

fn a_form() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Method), Just(Form::Dynamic), Just(Form::Macro)]
}

fn capacities() -> impl Strategy<Value = Vec<usize>> {
    vec(prop_oneof![4 => Just(0), 3 => 1..4usize, 1 => Just(UNBOUNDED)], 1..=MAX_CHANNELS)
}
