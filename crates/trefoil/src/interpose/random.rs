//! `getrandom`: on a goroutine the system call, never glibc's per-thread state.
//!
//! From 2.41 on glibc serves `getrandom` from a buffer per thread, which it allocates at the first
//! call and releases at the thread's end. A goroutine ends without a thread's end, and its TLS
//! block may be destroyed: 20,000 goroutines that made a `HashMap` leaked 3.5 MB. The system call
//! costs some 200 ns; `HashMap` makes one per goroutine.
//!
//! In a simulation the numbers come from its seed, so `HashMap` and random generators repeat.

use crate::sched::current_g;
use crate::sched::record;
use crate::sched::simulation::point;
use crate::sched::simulation::{self, Simulation};
use crate::sys::raw;
use std::cell::Cell;
use std::ffi::{c_uint, c_void};

interpose! {
    /// glibc's function.
    fn getrandom(buffer: *mut c_void, length: usize, flags: c_uint) -> isize;
    on_goroutine => match simulation::here() {
        Some(simulation) if flags & !(libc::GRND_NONBLOCK | libc::GRND_RANDOM | libc::GRND_INSECURE) == 0 => {
            simulated(simulation, buffer.cast(), length)
        }
        _ => raw::syscall(libc::SYS_getrandom, [buffer as usize, length, flags as usize]),
    }
}

thread_local! {
    /// How many words this goroutine has drawn.
    static DRAWN: Cell<u64> = const { Cell::new(0) };
}

/// Fills the buffer from the seed of the simulation. Returns its length.
///
/// # Safety
/// `buffer` has `length` writable bytes.
#[cold]
unsafe fn simulated(simulation: &Simulation, buffer: *mut u8, length: usize) -> isize {
    point();
    let id = current_g().map_or(0, record::id_of);
    for at in (0..length).step_by(8) {
        let drawn = DRAWN.replace(DRAWN.get() + 1);
        let word = simulation::random_for(simulation, id, drawn).to_ne_bytes();
        let n = (length - at).min(word.len());
        // SAFETY: inside the caller's buffer.
        unsafe { std::ptr::copy_nonoverlapping(word.as_ptr(), buffer.add(at), n) };
    }
    length as isize
}
