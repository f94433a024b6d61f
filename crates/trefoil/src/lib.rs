//! Goroutines for Rust: Go's scheduler as a library.
//!
//! [`go`] starts a closure as a goroutine, a thread that costs a few hundred nanoseconds and a few
//! kilobytes. Thousands to millions of them run on a few OS threads.
//!
//! ```
//! let total = trefoil::run(|| {
//!     let words = ["to", "be", "or", "not", "to", "be"];
//!     let handles: Vec<_> = words.map(|word| trefoil::go(move || word.len())).into();
//!     handles.into_iter().map(|h| h.join().unwrap()).sum::<usize>()
//! });
//! assert_eq!(total, 13);
//! ```
//!
//! A goroutine owns its stack *and its thread-local storage*: to the compiler and to every crate it is a
//! thread. So [`go`] is safe, with the bounds of [`std::thread::spawn`], and `thread_local!`, `ThreadRng`,
//! `tracing` spans, panics and `errno` are right in it wherever it runs. What is not `Send` cannot cross:
//!
//! ```compile_fail,E0277
//! let shared = std::rc::Rc::new(1);
//! trefoil::go(move || println!("{shared}"));
//! ```
//! ```compile_fail,E0277
//! trefoil::go(|| std::rc::Rc::new(1));
//! ```
//! and what is borrowed needs a [`scope()`]:
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
//! The [`guide`] has pages to read: [from the first goroutine to a tuned server](guide::start), the same
//! [for Go programmers](guide::for_go_programmers) and [for tokio programmers](guide::for_tokio_programmers),
//! [whether this can be sound](guide::is_it_sound), and [where it ends](guide::limits).
//!
//! # Programs
//! [`run`] makes a runtime whose main goroutine is the closure; [`main`](macro@main) does it for a whole
//! program. [`Runtime`] is for several at once. [`go`] on a plain thread starts goroutines in a
//! process-wide default runtime.
//!
//! # Environment
//! | variable | meaning |
//! |---|---|
//! | `TREFOIL_PROCS`, then `GOMAXPROCS` | how many goroutines run at once, 1 to 1024 |
//! | `TREFOIL_DEBUG=schedtrace=1000` | a line about the scheduler on stderr every 1000 ms, in Go's form |
//! | `TREFOIL_DEBUG=schedtrace=1000,scheddetail=1` | and one for each P and goroutine, with fields of our own |
//! | `TREFOIL_DEBUG=asyncpreemptoff=1` | goroutines are stopped only at runtime calls, not by a signal |
//! | `TREFOIL_DEBUG=preemptsignal=34` | another signal than SIGURG |
//! | `TREFOIL_DEBUG=slice=1000` | microseconds that a goroutine may run while others wait; 10,000 by default |
//!
//! # Limits
//! Linux on x86_64 with glibc. std's locks, `sleep`, sockets and pipes park the goroutine (feature `std`, on by
//! default); any other call that blocks keeps its thread, and another thread takes the P. Thread identity
//! (`gettid`, signal masks, affinity, priority-inheriting mutexes) is the OS thread's
//! ([`lock_os_thread`] ties the two together).

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu")))]
compile_error!(
    "trefoil runs on Linux x86_64 with glibc: a goroutine owns its thread-local storage, and that \
     needs `arch/` (switch, FS/GS base) and `mem/tls` (TLS blocks) for the target. Both are missing here."
);

// `gnu` only: on other targets the message above is the one that matters.
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
compile_error!(
    "trefoil needs a dynamically linked glibc: it learns the layout of thread-local storage from the dynamic \
     linker, and finds libc's functions behind its own of the same names. Build without \
     `-C target-feature=+crt-static` (see RUSTFLAGS and .cargo/config.toml)."
);

pub mod alloc;
mod arch;
mod blocking;
pub mod chan;
pub mod context;
pub mod debug;
mod future;
mod goroutine;
pub mod guide;
mod interpose;
mod mem;
pub mod net;
mod observe;
pub mod process;
mod runtime;
mod sched;
mod scope;
mod shim;
pub mod signal;
pub mod sync;
mod sys;
pub mod time;

pub use blocking::{NoPreempt, ThreadLock, blocking, lock_os_thread, no_preempt};
pub use future::{block_on, go_async};
pub use goroutine::{Builder, JoinHandle, PanicMode, go, id, yield_now};
pub use runtime::{Runtime, RuntimeBuilder, num_cpus, num_goroutines, procs, run, set_procs};
pub use scope::{Scope, ScopedJoinHandle, scope};
pub use trefoil_macros::{main, test};
/// What must not compile: the bounds of `go` and `scope` are those of std's threads.
///
/// An `Rc` is not `Send`:
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
/// What `run` runs is sent to another thread, and so is its value:
/// ```compile_fail,E0277
/// let rc = std::rc::Rc::new(1);
/// trefoil::run(|| println!("{rc}"));
/// ```
/// ```compile_fail,E0277
/// let rc = trefoil::run(|| std::rc::Rc::new(1));
/// ```
#[cfg(doctest)]
struct MustNotCompile;
