//! Goroutines for Rust: Go's scheduler as a library.
//!
//! [`go`] starts a closure as a goroutine: a thread that costs a few hundred nanoseconds and a few
//! kilobytes. Thousands to millions of goroutines run on a few OS threads. A goroutine is straight
//! code that blocks, so it needs no `async` and no `.await`. Futures run beside goroutines
//! ([`task`]).
//!
//! # Quick start
//!
//! ```toml
//! [dependencies]
//! trefoil = "0.1"
//! ```
//!
//! ```
//! #[trefoil::main]
//! fn main() {
//!     let (tx, rx) = trefoil::chan::bounded(0);
//!     for word in ["to", "be", "or", "not"] {
//!         let tx = tx.clone();
//!         trefoil::go(move || tx.send(word.len()).unwrap());
//!     }
//!     drop(tx); // The receiver's loop ends when the last sender is dropped.
//!     assert_eq!(rx.iter().sum::<usize>(), 9);
//! }
//! ```
//!
//! # Guides
//!
//! - [From the first goroutine to a tuned server](guide::start)
//! - [A program is slow, stuck, or grows](guide::find_out_why): which tool shows why
//! - [Beyond one machine](guide::beyond_one_machine): several processes that share work
//! - [Beside other runtimes](guide::beside_others): a comparison, and when not to use trefoil
//! - [For Go programmers](guide::for_go_programmers) and
//!   [for tokio programmers](guide::for_tokio_programmers)
//! - [Why it is sound](guide::is_it_sound) to move a goroutine from thread to thread
//! - [Limits](guide::limits): platforms, which calls park a goroutine, and which block its thread
//!
//! # What is in the crate
//!
//! | task | items |
//! |---|---|
//! | start goroutines and wait for them | [`go`], [`JoinHandle`], [`scope()`], [`Builder`] |
//! | start a runtime | [`main`](macro@main), [`test`](macro@test), [`run`], [`Runtime`] |
//! | communicate and synchronise | [`chan`], [`select!`], [`sync`], [`context`] |
//! | wait for time, sockets, processes, signals | [`time`], [`net`], [`process`], [`signal`] |
//! | control the thread of a goroutine | [`blocking()`], [`lock_os_thread`], [`no_preempt`] |
//! | run futures | [`task`], [`block_on`], [`go_async`], the module `tokio` (with the feature) |
//! | test with a clock and a schedule of your own | [`sim`] |
//! | find out what happens | [`debug`], [`trace`], [`profile`], [`labels!`] |
//! | ask the scheduler, and tune it | [`yield_now`], [`id`], [`num_goroutines`], [`procs`], [`set_procs`], [`alloc`] |
//!
//! [`run`] starts a runtime whose main goroutine is the closure, and [`main`](macro@main) does that
//! for a whole program. [`Runtime`] is for several runtimes in one process. If a plain thread calls
//! [`go`], the goroutine runs in a default runtime that lives as long as the process.
//!
//! # A goroutine is a thread to its code
//!
//! A goroutine owns its stack *and its thread-local storage*. To the compiler and to every crate it
//! is a thread. So [`go`] is safe, with the bounds of [`std::thread::spawn`], and `thread_local!`,
//! `ThreadRng`, `tracing` spans, panics and `errno` are correct on whichever OS thread the
//! goroutine runs. A value that is not `Send` cannot enter or leave a goroutine:
//!
//! ```compile_fail,E0277
//! let shared = std::rc::Rc::new(1);
//! trefoil::go(move || println!("{shared}"));
//! ```
//! ```compile_fail,E0277
//! trefoil::go(|| std::rc::Rc::new(1));
//! ```
//! A goroutine that borrows needs a [`scope()`]:
//! ```compile_fail,E0373
//! let local = vec![1, 2, 3];
//! trefoil::go(|| println!("{}", local.len()));
//! ```
//! ```
//! let local = vec![1, 2, 3];
//! trefoil::scope(|s| {
//!     s.go(|| println!("{}", local.len()));
//! });
//! ```
//!
//! # What a goroutine costs
//!
//! | | |
//! |---|---|
//! | start and join, in batches of 1000 | 240 ns |
//! | [`yield_now`] among four goroutines | 7.3 ns per yield |
//! | round trip over unbuffered channels, 1 P / 2 Ps | 202 ns / 201 ns |
//! | memory while it waits, with a million goroutines alive | 4,561 bytes |
//! | the same with [`dlopen_reserve`](RuntimeBuilder::dlopen_reserve) | 8,657 bytes |
//! | address space of its stack | 256 KiB, see [`Builder::stack_size`] |
//!
//! The figures are medians on a virtual machine with two cores of an Intel Xeon and Linux 6.18, on
//! 2 Ps. `bench/RESULTS.md` in the repository has all of them, beside Go, tokio and other runtimes.
//!
//! # Scheduling
//!
//! A *P* is the right to run goroutines, as in Go: their number ([`procs`]) is the largest number
//! of goroutines that run at the same time, except those that come back from a blocking call. A goroutine that computes while other goroutines wait is
//! preempted after 10 ms, and after 1 ms if another goroutine was woken meanwhile. If a goroutine
//! blocks its thread in the kernel, another thread takes over the P.
//!
//! # Failures
//!
//! - A panic ends its goroutine and is returned by [`JoinHandle::join`]. [`PanicMode`] changes
//!   that.
//! - A stack overflow ends the process with a message that names the goroutine.
//! - If no goroutine can ever run again, the process ends with the stack of every goroutine and
//!   Go's words: `fatal error: all goroutines are asleep - deadlock!`
//! - SIGQUIT prints the stack of every goroutine and ends the process.
//!
//! # Cargo features
//!
//! - `std` (on by default): std's locks, `sleep`, sockets and pipes park the goroutine, not its OS
//!   thread. The same holds for crates that use them, and for locks of C code. The system's
//!   `malloc` keeps its caches per OS thread, not per goroutine.
//! - `tokio` (off by default, includes `std`): the module `tokio`, tokio's own runtime with
//!   goroutines as its threads, and the option `tokio` of [`main`](macro@main) and
//!   [`test`](macro@test).
//! - `futures`, `futures-io`, `tokio-io`, `hyper` (off by default): the traits of these crates for
//!   channels, streams and pipes.
//! - `tracing` (off by default): spans of `tracing` in the flight recorder.
//!
//! Without `std`, these calls block their thread, and another thread takes over the P. The types of
//! [`sync`], [`chan`], [`time`] and [`net`] always park the goroutine.
//!
//! # Environment
//!
//! The runtime reads these variables when it starts, except in a setuid program. A value that is
//! not valid is an error of [`RuntimeBuilder::build`].
//!
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_PROCS`, then `GOMAXPROCS` | the number of Ps, 1 to 1024 |
//! | `TREFOIL_DLOPEN_RESERVE=1` | goroutines keep room for [libraries](RuntimeBuilder::dlopen_reserve) that are loaded later |
//! | `TREFOIL_DEBUG=schedtrace=1000` | print Go's line about the scheduler every 1000 ms |
//! | `TREFOIL_DEBUG=schedtrace=1000,scheddetail=1` | also print a line per P and goroutine |
//! | `TREFOIL_DEBUG=asyncpreemptoff=1` | preempt only at runtime calls, not by a signal |
//! | `TREFOIL_DEBUG=preemptsignal=34` | preempt by this signal instead of SIGURG |
//! | `TREFOIL_DEBUG=deadlockreport=0` | do not [report](RuntimeBuilder::report_deadlocks) goroutines that wait for each other |
//! | `TREFOIL_DEBUG=slice=1000` | the time slice in microseconds; defaults to 10,000 |
//! | `TREFOIL_TRACE=on` | record what the scheduler does ([`trace`]) |
//! | `TREFOIL_SEED` | the seed of a [simulation](sim) that is to be repeated |
//!
//! The crate `trefoil-observe` reads `TREFOIL_OBSERVE`.
//!
//! # Platforms and Rust version
//!
//! trefoil needs Rust 1.88 or later and Linux on x86_64 or aarch64 with a dynamically linked glibc:
//! the targets `x86_64-unknown-linux-gnu` and `aarch64-unknown-linux-gnu` without `+crt-static`.
//! Any other target is a compile error. The port to aarch64 was tested under emulation (qemu) only,
//! not on silicon: with glibc 2.36 and pages of 4 KiB, and parts of the tests with glibc 2.41 and
//! pages of 16 and 64 KiB. On x86_64 the thread-local tests pass with glibc 2.36, 2.41 and 2.43.
//! Linux 6.13 or later is best; before that, `vm.max_map_count` limits a process to about 32,000
//! goroutines unless it is raised.
//!
//! The identity of a thread (`gettid`, signal masks, affinity, priority-inheriting mutexes) is the
//! OS thread's. [`lock_os_thread`] binds a goroutine to its OS thread. The [limits](guide::limits)
//! page has the full list.

// gdb's commands for goroutines, embedded into every program (`observe/layout.rs`).
#![debugger_visualizer(gdb_script_file = "observe/goroutines.py")]

pub mod alloc;
mod blocking;
pub mod chan;
pub mod context;
pub mod debug;
mod future;
mod goroutine;
pub mod guide;
mod interpose;
mod join_handle;
pub mod labels;
pub mod net;
mod observe;
#[doc(hidden)]
pub mod observer;
pub mod process;
pub mod profile;
mod runtime;
mod sched;
mod scope;
pub mod signal;
pub mod sim;
#[cfg(feature = "std")]
mod simnet;
pub mod sync;
pub mod task;
pub mod time;
#[cfg(feature = "tokio")]
pub mod tokio;
pub mod trace;

// The ground, a crate of its own: its rooms have the same paths as this crate's.
use trefoil_base::{arch, mem, shim, sys};

pub use blocking::{NoPreempt, ThreadLock, blocking, lock_os_thread, no_preempt};
pub use future::{block_on, go_async};
pub use goroutine::{Builder, go, id, yield_now};
pub use join_handle::JoinHandle;
pub use runtime::{
    PanicMode, Runtime, RuntimeBuilder, num_cpus, num_goroutines, procs, run, set_procs,
};
pub use scope::{Scope, ScopedJoinHandle, scope};
pub use trefoil_macros::{main, test};

/// Runs a future on a new tokio runtime: `#[trefoil::main(tokio)]` expands to it.
#[cfg(feature = "tokio")]
#[doc(hidden)]
#[macro_export]
macro_rules! __tokio_main {
    ($workers:expr, $future:expr) => {
        $crate::tokio::run_main($workers, $future)
    };
}

/// The error for a program that uses `#[trefoil::main(tokio)]` without the feature.
#[cfg(not(feature = "tokio"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __tokio_main {
    ($workers:expr, $future:expr) => {
        ::core::compile_error!(
            "the option `tokio` needs the feature `tokio` of trefoil: \
             `trefoil = { version = \"…\", features = [\"tokio\"] }`"
        )
    };
}

/// Programs that must not compile, because `go` and `scope` have the bounds of std's threads.
///
/// A closure that is not `Send`, because it owns an `Rc`:
/// ```compile_fail,E0277
/// let rc = std::rc::Rc::new(1);
/// trefoil::go(move || println!("{rc}"));
/// ```
/// A result that is not `Send`:
/// ```compile_fail,E0277
/// trefoil::go(|| std::rc::Rc::new(1));
/// ```
/// A goroutine may outlive the caller's variables:
/// ```compile_fail,E0373
/// let text = String::from("local");
/// trefoil::go(|| println!("{text}"));
/// ```
/// ```compile_fail,E0597
/// let text = String::from("local");
/// let borrowed = &text;
/// trefoil::go(move || println!("{borrowed}"));
/// ```
/// A scoped handle does not leave its scope:
/// ```compile_fail,E0521
/// let mut kept = None;
/// trefoil::scope(|s| kept = Some(s.go(|| 1)));
/// ```
/// A scoped goroutine does not borrow from inside the scope's closure:
/// ```compile_fail,E0373
/// trefoil::scope(|s| {
///     let local = 1;
///     s.go(|| println!("{local}"));
/// });
/// ```
/// Two scoped goroutines do not write to one variable:
/// ```compile_fail,E0499
/// let mut n = 0;
/// trefoil::scope(|s| {
///     s.go(|| n += 1);
///     s.go(|| n += 1);
/// });
/// ```
/// The closure of `run` is sent to another thread, and so is its value:
/// ```compile_fail,E0277
/// let rc = std::rc::Rc::new(1);
/// trefoil::run(|| println!("{rc}"));
/// ```
/// ```compile_fail,E0277
/// let rc = trefoil::run(|| std::rc::Rc::new(1));
/// ```
#[cfg(doctest)]
struct MustNotCompile;
