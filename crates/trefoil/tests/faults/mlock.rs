//! Programs that lock their memory (`mlockall`), before the runtime starts or afterwards.

use crate::common::{self, Child, child_test, join_all, page, rss};
use std::hint::black_box;
use std::sync::Arc;
use trefoil::{Builder, Runtime, go, yield_now};

/// The number of goroutines if a page has 4 KiB; fewer if it is larger, because each takes pages.
const GOROUTINES: usize = 10_000;
/// Stacks of the goroutines: three pages each, some more for those that recurse, and the chunks
/// that existed when the program locked its memory (64 MiB each).
const RSS_MAX: u64 = 500 << 20;
/// What the child writes if the kernel does not let it lock.
const REFUSED: &str =
    "mlockall is refused here: this test needs CAP_IPC_LOCK or a larger `ulimit -l`";

/// Locks all memory, present and future. Returns false if the kernel refuses.
fn lock_all() -> bool {
    // SAFETY: no memory is passed.
    let rc = unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) };
    if rc != 0 {
        common::mark(REFUSED);
    }
    rc == 0
}

#[inline(never)]
fn recurse(depth: usize) -> usize {
    let frame = black_box([depth; 64]);
    if depth == 0 { frame[0] } else { recurse(depth - 1) + frame[63] }
}

/// Runs many goroutines at once, again on recycled stacks, and some on stacks of other sizes.
fn work() {
    for _ in 0..2 {
        let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let all: Vec<_> = (0..GOROUTINES * 4096 / page())
            .map(|i| {
                let done = done.clone();
                go(move || {
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        yield_now();
                    }
                    if i % 100 == 0 { recurse(100) } else { 5050 }
                })
            })
            .collect();
        yield_now();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(join_all(all).into_iter().all(|n| n == 5050));
    }
    for kib in [64, 1024, 16 << 10] {
        let deep = Builder::new().stack_size(kib << 10).go(|| recurse(20)).unwrap();
        assert_eq!(deep.join().unwrap(), 210);
    }
    let rss = rss();
    assert!(rss < RSS_MAX, "{} MiB of memory in use", rss >> 20);
}

/// Runs the child, which must succeed. Prints a line if it could not lock memory.
fn succeed(child: &Child) {
    if child.succeed().contains(REFUSED) {
        crate::common::mark(&format!("skipped: {REFUSED}"));
    }
}

#[test]
fn goroutines_run_after_the_program_has_locked_its_memory() {
    child_test!(|child| {
        succeed(child);
        succeed(&child.env("TREFOIL_DEBUG", "guards=mprotect"));
        succeed(&child.env("TREFOIL_DEBUG", "tls=pthread"));
    });
    let rt = Runtime::builder().procs(2).build().unwrap();
    rt.run(|| join_all((0..100).map(|_| go(yield_now))));
    if lock_all() {
        rt.run(work);
    }
}

#[test]
fn a_runtime_starts_after_the_program_has_locked_its_memory() {
    child_test!(|child| {
        succeed(child);
        succeed(&child.env("TREFOIL_DEBUG", "guards=mprotect"));
    });
    if lock_all() {
        Runtime::builder().procs(2).build().unwrap().run(work);
    }
}

/// The guard is still there: no neighbour is overwritten.
#[test]
fn a_stack_overflow_is_reported_in_locked_memory() {
    child_test!(|child| {
        let out = child.output();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(text.contains(REFUSED) || text.contains("overflowed its stack"), "{text}");
    });
    let rt = Runtime::builder().procs(2).build().unwrap();
    rt.run(|| go(yield_now).join().unwrap());
    if lock_all() {
        rt.run(|| {
            join_all((0..300).map(|_| go(yield_now)));
            let _ = go(|| recurse(1 << 30)).join();
        });
    }
}
