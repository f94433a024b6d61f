//! Planted bugs of known kinds: a simulation finds each of them within a bounded number of runs,
//! and its seed repeats it.
//!
//! Each module is a small piece of ordinary code with one bug, and the same code without it. The
//! numbers of runs in the modules are those of
//! [`each_bug_is_found_in_a_quarter_of_the_allowed_runs`].

mod aba;
mod check_then_act;
mod double_release;
mod duplicating_retry;
mod forgotten_timeout;
mod lock_order;
mod lost_wake_up;
mod missed_cancellation;
mod starvation;

use std::time::Duration;
use trefoil::sim::{self, Failure, FailureKind, Seed};

/// Which version of a program runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    Planted,
    Repaired,
}

/// A program with a bug.
struct Bug {
    name: &'static str,
    program: fn(Version),
    /// How a run with the bug fails.
    kind: FailureKind,
    /// A part of the report.
    message: &'static str,
    /// The most runs in which the bug must be found: at least four times the most that any of
    /// [`BASE_SEEDS`] needs. The repaired version passes as many.
    max_runs: u64,
    /// The most deviations of the shrunk schedule.
    max_deviations: usize,
}

const BUGS: [&Bug; 9] = [
    &aba::BUG,
    &check_then_act::BUG,
    &double_release::BUG,
    &duplicating_retry::BUG,
    &forgotten_timeout::BUG,
    &lock_order::BUG,
    &lost_wake_up::BUG,
    &missed_cancellation::BUG,
    &starvation::BUG,
];

/// The seeds with which the numbers of runs are measured.
const BASE_SEEDS: std::ops::Range<u64> = 0..20;
/// How often each seed that was found is repeated.
const REPLAYS: u32 = 20;

impl Bug {
    /// Searches the bug, and returns the failure.
    fn find(&self, base_seed: u64, max_shrink_time: Duration) -> Box<Failure> {
        let program = self.program;
        let found = sim::builder()
            .seed(base_seed)
            .max_shrink_time(max_shrink_time)
            .explore(self.max_runs, move || program(Version::Planted));
        match found {
            Ok(_) => panic!("{}: not found in {} runs", self.name, self.max_runs),
            Err(failure) => failure,
        }
    }

    /// Checks that the bug is found, reported, shrunk and repeated, and that the repaired version
    /// passes.
    fn check(&self) {
        let failure = self.find(0, Duration::from_secs(60));
        self.check_report(&failure);
        assert!(failure.is_repeatable, "{failure}");
        let shrunk = failure.shrunk.clone().expect("a seed of few deviations");
        assert!(deviations(&shrunk) <= self.max_deviations, "{failure}");
        let program = self.program;
        for seed in [&failure.seed, &shrunk] {
            for _ in 0..REPLAYS {
                let again = sim::builder().replay(seed, move || program(Version::Planted));
                let again = again.expect_err("the seed fails again");
                self.check_report(&again);
                assert!(again.is_repeatable, "{seed} made other decisions: {again}");
                assert_eq!(again.seed, *seed);
            }
        }
        sim::builder()
            .explore(self.max_runs, move || program(Version::Repaired))
            .unwrap_or_else(|failure| panic!("{}, repaired: {failure}", self.name));
    }

    fn check_report(&self, failure: &Failure) {
        assert_eq!(failure.kind, self.kind, "{failure}");
        assert!(failure.message.contains(self.message), "{failure}");
    }
}

/// Returns how many deviations a shrunk seed lists.
fn deviations(seed: &Seed) -> usize {
    seed.to_string().matches('.').count()
}

#[test]
#[ignore = "takes long"]
fn each_bug_is_found_in_a_quarter_of_the_allowed_runs() {
    let mut late = Vec::new();
    for bug in BUGS {
        let mut needed = Vec::new();
        for base_seed in BASE_SEEDS {
            let failure = bug.find(base_seed, Duration::ZERO);
            bug.check_report(&failure);
            assert!(failure.is_repeatable, "{failure}");
            needed.push(failure.runs + 1);
        }
        needed.sort_unstable();
        let (median, most) = (needed[needed.len() / 2], needed[needed.len() - 1]);
        let Bug { name, max_runs, .. } = bug;
        println!("{name}: median {median}, most {most} of {max_runs} runs");
        if 4 * most > *max_runs {
            late.push(name);
        }
    }
    assert!(late.is_empty(), "{late:?}");
}
