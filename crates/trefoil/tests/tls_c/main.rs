//! Thread-local storage belongs to the goroutine: what C code sees.
//!
//! errno, pthread keys, `pthread_self`, locale, recursive mutexes, and the calls that concern every
//! thread of the process: setuid, fork, dlopen. Fork, setuid, keys, `pthread_getattr_np` and dlopen
//! each caused a crash before their rules were known.
//!
//! The libraries for dlopen are compiled here with `cc`; without it those tests print a line and
//! pass.
//!
//! `TREFOIL_PROCS` overrides the number of Ps, so that the tests can run with any number.

#[path = "../common/mod.rs"]
mod common;
mod identity;
mod keys;
mod libraries;
mod process;

use common::crowd::{crowd, joined, run_all_with_tls_from_pthread_create};
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use trefoil::{JoinHandle, yield_now};

/// Goroutines that keep every P busy, allocate, and check a thread-local, until `end`.
struct Busy {
    stop: Arc<AtomicBool>,
    handles: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start(n: usize) -> Busy {
        thread_local!(static MINE: Cell<usize> = const { Cell::new(0) });
        let stop = Arc::new(AtomicBool::new(false));
        let s = stop.clone();
        let handles = crowd(n, move |i| {
            MINE.set(i + 1);
            while !s.load(SeqCst) {
                let text = format!("{i} {}", "x".repeat(i * 10));
                yield_now();
                assert_eq!(MINE.get(), i + 1);
                assert_eq!(text.len(), i.to_string().len() + 1 + i * 10);
            }
        });
        Busy { stop, handles }
    }

    fn end(self) {
        self.stop.store(true, SeqCst);
        self.handles.into_iter().for_each(joined);
    }
}

fn set_errno(value: c_int) {
    // SAFETY: the address of the caller's errno.
    unsafe { *libc::__errno_location() = value };
}

fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

#[test]
#[ignore = "takes long"]
fn c_tests_pass_with_tls_from_pthread_create() {
    run_all_with_tls_from_pthread_create();
}
