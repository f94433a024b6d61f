//! One typed function for each system call that the crate makes itself.
//!
//! | file | content |
//! |---|---|
//! | `errno.rs` | the error of a system call |
//! | `descriptors.rs` | files and pipes: read, write, open, poll, splice |
//! | `sockets.rs` | send, receive, accept, connect |
//! | `memory.rs` | mappings |
//! | `threads.rs` | ids, affinity, sleep |
//!
//! Futexes are in `sys/futex.rs`; clocks, which need no system call, in `sys/vdso.rs`.
//!
//! Invariants:
//! 1. A function makes one system call and retries nothing: `EINTR` and `EAGAIN` are the caller's.
//! 2. No function of libc is on the way: no errno, no cancellation point, no interposed function.
//!    So the scheduler, signal handlers and the holder of a runtime lock may call them.
//! 3. Every call exists on both CPUs: `ppoll`, `pipe2`, `accept4`, `openat`.
//!
//! Structures and constants are those of `libc`; addresses of sockets are socket2's.
//!
//! Rejected: rustix. It makes the same calls in the same way, but is a second way beside
//! [`raw::syscall`](super::raw::syscall), which is needed for calls that it lacks, and with
//! `linux-raw-sys` it took 14 s of CPU time to build: a tenth of a program that uses this crate.

mod descriptors;
mod errno;
mod memory;
mod sockets;
mod threads;

pub use descriptors::*;
pub use errno::{Errno, Result, checked};
pub use memory::*;
pub use sockets::*;
pub use threads::*;

use super::raw::syscall;
use std::ffi::c_long;

/// Makes a system call. Returns its result, or the error.
///
/// # Safety
/// That of the system call.
#[inline(always)]
unsafe fn call<const N: usize>(number: c_long, args: [usize; N]) -> Result<usize> {
    // SAFETY: the caller's contract.
    checked(unsafe { syscall(number, args) })
}
