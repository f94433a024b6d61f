//! Goroutines use std as threads do: its locks, its sleep, its sockets and its pipes, alone and
//! together with threads.
#![cfg(feature = "std")]

#[path = "../common/mod.rs"]
mod common;
mod hazards;
mod locks;
mod many;
mod other_crates;
mod polls;
mod processes;
mod sockets;

use common::{MS, TOO_LONG, runtime};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Instant;
use trefoil::JoinHandle;

/// Returns the size of a test in this build.
const fn size(release: usize, debug: usize) -> usize {
    if cfg!(debug_assertions) { debug } else { release }
}

/// Runs `f` as the main goroutine of runtimes with 1, 2 and 8 Ps.
fn everywhere(f: impl Fn() + Send + Sync + Copy + 'static) {
    for n in [1, 2, 8] {
        runtime(n).run(f);
    }
}

/// What runs a part of a test.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Actor {
    Goroutine,
    Thread,
}

enum Started<T> {
    Goroutine(JoinHandle<T>),
    Thread(thread::JoinHandle<T>),
}

impl Actor {
    fn start<T: Send + 'static>(self, f: impl FnOnce() -> T + Send + 'static) -> Started<T> {
        match self {
            Actor::Goroutine => Started::Goroutine(trefoil::go(f)),
            Actor::Thread => Started::Thread(thread::spawn(f)),
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

/// Runs `f` for two goroutines, and for a goroutine and a thread in both roles.
fn every_pair(f: impl Fn(Actor, Actor) + Send + Sync + Copy + 'static) {
    everywhere(move || {
        f(Actor::Goroutine, Actor::Goroutine);
        f(Actor::Goroutine, Actor::Thread);
        f(Actor::Thread, Actor::Goroutine);
    });
}

/// Waits until `done`, by std's sleep.
#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TOO_LONG / 2, "waited too long for {what}");
        thread::sleep(MS / 4);
    }
}

/// Returns whether the descriptor is in blocking mode.
fn is_blocking(fd: &impl AsRawFd) -> bool {
    // SAFETY: no pointers.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    assert!(flags >= 0);
    flags & libc::O_NONBLOCK == 0
}
