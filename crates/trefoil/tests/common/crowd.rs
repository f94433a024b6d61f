//! Many goroutines at once, for the tests of thread-local storage.
//!
//! `TREFOIL_PROCS` overrides the number of Ps, so that these tests can run with any number.

use super::{TOO_LONG, this_program, watchdog_for};
use std::sync::Arc;
use std::time::Duration;
use trefoil::{JoinHandle, Runtime, go, yield_now};

/// The number of Ps of a runtime, unless `TREFOIL_PROCS` is set.
pub(crate) const PROCS: usize = 4;
/// A test that runs longer than this hangs.
const LIMIT: Duration = TOO_LONG.saturating_mul(2);

/// Runs `f` as the main goroutine of a new runtime, under a watchdog.
pub(crate) fn on_goroutines<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let _watchdog = watchdog_for(LIMIT);
    let mut builder = Runtime::builder();
    if std::env::var_os("TREFOIL_PROCS").is_none() {
        builder = builder.procs(PROCS);
    }
    builder.build().unwrap().run(f)
}

/// Joins a goroutine and resumes its panic, if any.
pub(crate) fn joined<T>(handle: JoinHandle<T>) -> T {
    handle.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
}

/// Runs `f(0)`, … `f(n - 1)` as goroutines of this runtime.
pub(crate) fn crowd<T: Send + 'static>(
    n: usize,
    f: impl Fn(usize) -> T + Send + Sync + 'static,
) -> Vec<JoinHandle<T>> {
    let f = Arc::new(f);
    (0..n)
        .map(|i| {
            let f = f.clone();
            go(move || f(i))
        })
        .collect()
}

/// Yields `n` times.
pub(crate) fn yields(n: usize) {
    (0..n).for_each(|_| yield_now());
}

/// Runs all tests of this binary once more with TLS blocks from `pthread_create`, as on systems
/// whose TLS layout is not recognised.
pub(crate) fn run_all_with_tls_from_pthread_create() {
    if std::env::var_os("TREFOIL_DEBUG").is_some() {
        super::mark("skipped: TREFOIL_DEBUG is set already");
        return;
    }
    super::skip_if_emulated!("qemu-user has no PR_GET_TID_ADDRESS, which the fallback needs");
    let _watchdog = watchdog_for(LIMIT);
    let out = this_program()
        .arg("--include-ignored")
        .env("TREFOIL_DEBUG", "tls=pthread")
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}\n{}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}
