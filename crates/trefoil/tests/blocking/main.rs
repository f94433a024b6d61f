//! Goroutines that block their threads: handoff of the P, `blocking`, the return, `lock_os_thread`.
//! Statements 18 to 21 of the table in `mission/main.rs`, and what Go's own tests assert.
//!
//! Blocking calls are made by the bare `syscall` instruction, so that neither an interposed
//! function nor the runtime sees them.

#[path = "../common/mod.rs"]
mod common;
mod handoff;
mod locked;
mod returning;
mod threads;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Opens a new file `n` times: the descriptors exclude each other when locked.
fn lock_files(n: usize) -> Vec<OwnedFd> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("trefoil-lock-{}-{}", std::process::id(), NEXT.fetch_add(1, SeqCst));
    let path = std::env::temp_dir().join(name);
    let open = || std::fs::OpenOptions::new().write(true).create(true).truncate(true).open(&path);
    let all = (0..n).map(|_| open().unwrap().into()).collect();
    std::fs::remove_file(&path).unwrap();
    all
}

/// Waits without any call of the runtime: inside `blocking` such a call would reacquire a P.
fn outside_until(done: impl Fn() -> bool) {
    while !done() {
        common::pause();
    }
}
