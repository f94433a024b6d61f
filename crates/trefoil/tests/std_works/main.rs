//! std just works: its locks, its sleep, its sockets and its pipes, used by goroutines as if they were threads,
//! and together with threads.
#![cfg(feature = "std")]

#[path = "../common/mod.rs"]
mod common;
mod locks;
mod many;
mod misuse;
mod others;
mod polls;
mod processes;
mod sockets;

use common::{MS, TOO_LONG, runtime};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Instant;
use trefoil::JoinHandle;

/// Fewer where everything is slower.
const fn size(release: usize, debug: usize) -> usize {
    if cfg!(debug_assertions) { debug } else { release }
}

/// Runs `f` as a goroutine beside 1, 2 and 8 Ps.
fn everywhere(f: impl Fn() + Send + Sync + Copy + 'static) {
    for n in [1, 2, 8] {
        runtime(n).run(f);
    }
}

/// Who does a part of a test.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Who {
    Goroutine,
    Thread,
}

enum Started<T> {
    Goroutine(JoinHandle<T>),
    Thread(thread::JoinHandle<T>),
}

impl Who {
    fn start<T: Send + 'static>(self, f: impl FnOnce() -> T + Send + 'static) -> Started<T> {
        match self {
            Who::Goroutine => Started::Goroutine(trefoil::go(f)),
            Who::Thread => Started::Thread(thread::spawn(f)),
        }
    }
}

impl<T> Started<T> {
    fn result(self) -> thread::Result<T> {
        match self {
            Started::Goroutine(h) => h.join(),
            Started::Thread(h) => trefoil::blocking(|| h.join()),
        }
    }

    fn join(self) -> T {
        self.result().unwrap()
    }
}

/// Goroutines with goroutines, and with threads in both directions.
fn pairs(f: impl Fn(Who, Who) + Send + Sync + Copy + 'static) {
    everywhere(move || {
        f(Who::Goroutine, Who::Goroutine);
        f(Who::Goroutine, Who::Thread);
        f(Who::Thread, Who::Goroutine);
    });
}

/// Waits until `done`, by std's means.
#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TOO_LONG / 2, "waited too long for {what}");
        thread::sleep(MS / 4);
    }
}

fn blocks(fd: &impl AsRawFd) -> bool {
    // SAFETY: a question.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    assert!(flags >= 0);
    flags & libc::O_NONBLOCK == 0
}
