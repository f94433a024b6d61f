//! Runs a check through its interleavings, until the first that fails.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::shim::{Half, Mutation, Site, mutated, sites_of};

/// Which interleavings are explored.
#[derive(Clone, Copy)]
pub(crate) enum Bound {
    /// Every interleaving.
    All,
    /// Those with at most this number of preemptions.
    Preemptions(usize),
}

/// Runs `model` in every interleaving within the bound; panics in the first that fails.
pub(crate) fn explore(bound: Bound, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // Do not read loom's environment variables: a run must mean the same everywhere.
    builder.preemption_bound = match bound {
        Bound::All => None,
        Bound::Preemptions(n) => Some(n),
    };
    builder.max_branches = 5_000;
    builder.max_duration = None;
    builder.max_permutations = None;
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    let start = std::time::Instant::now();
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let runs = runs.load(Ordering::Relaxed);
    println!("{runs} interleavings in {:.1?}", start.elapsed());
    assert!(runs > 1, "nothing was concurrent");
}

/// Runs a check with a mutation, and panics unless loom finds the defect.
///
/// # Panics
/// If the broken variant passes, or merely runs too long.
pub(crate) fn must_fail(mutation: Mutation, check: impl FnOnce()) {
    match outcome(mutation, check) {
        Ok(()) => panic!("{mutation:?} was not detected"),
        Err(why) => {
            println!("detected: {why}");
            assert!(!why.contains("exceeded"), "ran too long instead of failing: {why}");
        }
    }
}

/// Runs a check with a mutation. Returns the message of its panic.
fn outcome(mutation: Mutation, check: impl FnOnce()) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| mutated(mutation, check))).map_err(|why| text(&*why))
}

/// Takes away half of each ordering in turn, and prints whether `check` detects it.
///
/// An ordering that survives is stronger than this check needs. Another check may need it.
pub(crate) fn sweep(check: fn()) {
    for site in sites_of(check) {
        for half in [Half::Acquire, Half::Release] {
            let Site { file, line, op, order } = site;
            if !has(order, half) || !file.contains("trefoil/src") {
                continue;
            }
            let outcome = outcome(Mutation::At(site, half), check);
            let verdict = if outcome.is_err() { "DETECTED" } else { "survives" };
            eprintln!("{verdict} {file}:{line} {op:?} {order:?} without {half:?}");
        }
    }
}

/// Returns whether `order` has this half.
fn has(order: std::sync::atomic::Ordering, half: Half) -> bool {
    match order {
        Ordering::Acquire => half == Half::Acquire,
        Ordering::Release => half == Half::Release,
        Ordering::Relaxed => false,
        _ => true,
    }
}

/// Returns the message of a panic.
fn text(why: &(dyn Any + Send)) -> String {
    why.downcast_ref::<String>()
        .cloned()
        .or_else(|| why.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_default()
}
