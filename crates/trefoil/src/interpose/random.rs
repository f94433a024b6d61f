//! `getrandom`: on a goroutine the system call, never glibc's per-thread state.
//!
//! From 2.41 on glibc serves `getrandom` from a buffer per thread, which it allocates at the first
//! call and releases at the thread's end. A goroutine ends without a thread's end, and its TLS
//! block may be destroyed: 20,000 goroutines that made a `HashMap` leaked 3.5 MB. The system call
//! costs some 200 ns; `HashMap` makes one per goroutine.

use crate::sys::raw;
use std::ffi::{c_uint, c_void};

interpose! {
    /// glibc's function.
    fn getrandom(buffer: *mut c_void, length: usize, flags: c_uint) -> isize;
    on_goroutine => raw::syscall(libc::SYS_getrandom, [buffer as usize, length, flags as usize])
}
