//! `thread_local!` belongs to the goroutine, whichever thread runs it.

use std::cell::RefCell;
use std::hint::black_box;

use super::join;
use crate::report::{Report, grouped};

const GOROUTINES: u64 = 1_000;
const NOTES_EACH: usize = 100;
/// Steps between two yields, about a microsecond: the other Ps need time to steal.
const STEPS: u64 = 1_000;

pub(crate) fn play(report: &Report) -> Result<(), String> {
    report.part(format_args!(
        "{GOROUTINES} goroutines on four Ps, each with a thread_local! of its own, held over {NOTES_EACH} yields"
    ));
    let runtime = trefoil::Runtime::builder().procs(4).build().map_err(|e| e.to_string())?;
    let (right, moved) = runtime.run(|| {
        let all: Vec<_> = (0..GOROUTINES).map(|_| trefoil::go(take_notes)).collect();
        all.into_iter()
            .map(join)
            .fold((0, 0), |sums, (mine, moved)| (sums.0 + u64::from(mine), sums.1 + moved))
    });
    report.promise("moved", format_args!("{} times", grouped(moved)), "at least once", moved > 0);
    report.promise("kept their notes", grouped(right), grouped(GOROUTINES), right == GOROUTINES);
    Ok(())
}

/// Returns whether all notes were the goroutine's own, and how often it had moved to another
/// thread.
fn take_notes() -> (bool, u64) {
    thread_local!(static NOTES: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) });
    // SAFETY: no arguments, touches no memory.
    let tid = || unsafe { libc::gettid() };
    let (mut moved, mut last) = (0, tid());
    for _ in 0..NOTES_EACH {
        NOTES.with_borrow_mut(|notes| {
            notes.push(trefoil::id());
            (0..STEPS).for_each(|step| _ = black_box(step));
            trefoil::yield_now(); // with the RefCell borrowed
        });
        moved += u64::from(std::mem::replace(&mut last, tid()) != last);
    }
    let own = |notes: &Vec<u64>| notes.iter().all(|&id| id == trefoil::id());
    (NOTES.with_borrow(|notes| notes.len() == NOTES_EACH && own(notes)), moved)
}
