//! Thread-local storage belongs to the goroutine: what Rust code sees.
//!
//! Every promise is that of a thread: a value never belongs to another goroutine, it survives every
//! yield and park on whatever thread the goroutine continues, a new goroutine sees initial values,
//! and every destructor runs exactly once, before `join` returns. What C code sees is in `tls_c`.
//!
//! Errors in thread-local storage appear in optimised builds first, so run it in all of them:
//! `cargo test -p trefoil --test tls`, the same with `--release`, and with `--profile lto`.
//!
//! `TREFOIL_PROCS` overrides the number of Ps, so that the tests can run with any number.

#[path = "../common/mod.rs"]
mod common;
mod crates;
mod destructors;
mod library;
mod panics;
mod values;

use common::crowd::{self};
use std::any::Any;
use std::panic::{self};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Once};
use trefoil::yield_now;

/// The number of goroutines of the big tests.
const MANY: usize = 10_000;

/// Panics whose message begins with it are part of a test and print nothing.
const EXPECTED: &str = "expected";

/// Runs `f` as the main goroutine of a new runtime. Expected panics print nothing.
fn on_goroutines<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let loud = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !text(info.payload()).starts_with(EXPECTED) {
                loud(info);
            }
        }));
    });
    crowd::on_goroutines(f)
}

fn text(payload: &(dyn Any + Send)) -> &str {
    let owned = payload.downcast_ref::<String>().map(String::as_str);
    owned.or(payload.downcast_ref::<&str>().copied()).unwrap_or("")
}

/// Keeps goroutines, yielding, until all of them have arrived: then all live at the same time.
struct Gate(AtomicUsize);

impl Gate {
    fn new(n: usize) -> Arc<Gate> {
        Arc::new(Gate(AtomicUsize::new(n)))
    }

    fn pass(&self) {
        self.0.fetch_sub(1, SeqCst);
        while self.0.load(SeqCst) != 0 {
            yield_now();
        }
    }
}

/// Returns the kernel's id of the current thread; it changes when the goroutine moves.
#[inline(never)]
fn tid() -> i64 {
    // SAFETY: a system call without arguments.
    unsafe { libc::syscall(libc::SYS_gettid) }
}

fn counters(n: usize) -> Arc<[AtomicU32]> {
    (0..n).map(|_| AtomicU32::new(0)).collect()
}

#[test]
#[ignore = "takes long"]
fn rust_tests_pass_with_tls_from_pthread_create() {
    crowd::run_all_with_tls_from_pthread_create();
}
