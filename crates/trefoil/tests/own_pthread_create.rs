//! A program that defines `pthread_create` itself, as with an allocator that is linked to it.
#![cfg(feature = "std")]

mod common;

use common::{runtime, watchdog};
use libc::{pthread_attr_t, pthread_t};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

type Start = extern "C" fn(*mut c_void) -> *mut c_void;
type Create =
    unsafe extern "C" fn(*mut pthread_t, *const pthread_attr_t, Start, *mut c_void) -> c_int;

/// The stack of std's threads, and the larger one that they get instead: glibc keeps none of that
/// size for another thread.
const STD_STACK_BYTES: usize = 2 << 20;
const LARGE_STACK_BYTES: usize = 300 << 20;

/// Threads of std get a large stack.
static IS_ENLARGING: AtomicBool = AtomicBool::new(false);
static ENLARGED: AtomicUsize = AtomicUsize::new(0);

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut pthread_t,
    attr: *const pthread_attr_t,
    start: Start,
    argument: *mut c_void,
) -> c_int {
    // SAFETY: libc's function of that name and type, and the caller's arguments. The attributes of
    // std are a local of its own.
    unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr());
        let next: Create = std::mem::transmute(next);
        let mut size = 0;
        if IS_ENLARGING.load(SeqCst)
            && !attr.is_null()
            && libc::pthread_attr_getstacksize(attr, &raw mut size) == 0
            && size == STD_STACK_BYTES
        {
            assert_eq!(libc::pthread_attr_setstacksize(attr.cast_mut(), LARGE_STACK_BYTES), 0);
            ENLARGED.fetch_add(1, SeqCst);
        }
        next(thread, attr, start, argument)
    }
}

/// Returns whether a mapping has the size of a large stack.
fn has_large_stack() -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let bytes = |line: &str| {
        let (range, _) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let hex = |text| usize::from_str_radix(text, 16).ok();
        Some(hex(end)? - hex(start)?)
    };
    let stack = LARGE_STACK_BYTES - (1 << 20)..LARGE_STACK_BYTES + (1 << 20);
    maps.lines().filter_map(bytes).any(|bytes| stack.contains(&bytes))
}

#[test]
fn a_thread_that_was_started_for_a_name_is_detached() {
    let _w = watchdog();
    IS_ENLARGING.store(true, SeqCst);
    // Its first goroutine has a name.
    runtime(1).run(|| ());
    IS_ENLARGING.store(false, SeqCst);
    assert_ne!(ENLARGED.load(SeqCst), 0);
    while has_large_stack() {
        // glibc unmaps the stack of a detached thread when another thread ends.
        thread::spawn(|| ()).join().unwrap();
    }
}
