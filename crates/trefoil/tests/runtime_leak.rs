//! What a runtime leaves behind when it is dropped. In children, because the tests count threads.

mod common;

use common::{child_test, join_all, tasks};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};
use std::time::Duration;
use trefoil::{Runtime, go, yield_now};

/// Bytes in use through Rust's allocator.
static IN_USE: AtomicIsize = AtomicIsize::new(0);

struct Counting;

// SAFETY: the system's allocator; only counts in addition.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size() as isize, Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size() as isize, Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Waits until all threads of dropped runtimes have ended.
fn wait_for_threads_to_end(threads: usize) {
    while tasks().len() > threads {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Makes a runtime, uses goroutines, a timer and a socket, and drops it.
fn use_a_runtime() {
    let rt = Runtime::builder().procs(2).build().unwrap();
    rt.run(|| {
        join_all((0..4).map(|_| go(yield_now)));
        trefoil::time::sleep(Duration::from_micros(10));
        let (mut a, mut b) = std::os::unix::net::UnixStream::pair().unwrap();
        let reader = go(move || std::io::Read::read(&mut b, &mut [0; 1]).unwrap());
        yield_now();
        std::io::Write::write_all(&mut a, b"x").unwrap();
        assert_eq!(reader.join().unwrap(), 1);
    });
}

#[test]
fn a_dropped_runtime_leaves_no_memory_behind() {
    child_test!();
    let threads = tasks().len();
    let use_runtimes = |n: usize| {
        for _ in 0..n {
            use_a_runtime();
            wait_for_threads_to_end(threads);
        }
        IN_USE.load(Relaxed)
    };
    // What libc itself allocates too.
    // SAFETY: no arguments, answers a struct.
    let of_malloc = || unsafe { libc::mallinfo2() }.uordblks as isize;
    let (before, malloc_before) = (use_runtimes(50), of_malloc());
    let (after, malloc_after) = (use_runtimes(300), of_malloc());
    let (each, malloc_each) = ((after - before) / 300, (malloc_after - malloc_before) / 300);
    assert!(each < 64, "{each} bytes for each runtime");
    assert!(malloc_each < 512, "{malloc_each} bytes of malloc's for each runtime");
}

/// The next runtime reuses the memory of the last one's poller, and must register the descriptor
/// again.
#[test]
fn a_socket_works_after_its_runtime_was_dropped() {
    child_test!();
    let threads = tasks().len();
    let (mut a, mut b) = trefoil::net::UnixStream::pair().unwrap();
    for _ in 0..10 {
        let rt = Runtime::builder().procs(1).build().unwrap();
        rt.run(|| {
            trefoil::scope(|s| {
                s.go(|| assert_eq!(std::io::Read::read(&mut b, &mut [0; 1]).unwrap(), 1));
                // The reader waits by now.
                trefoil::time::sleep(Duration::from_millis(1));
                std::io::Write::write_all(&mut a, b"x").unwrap();
            });
        });
        drop(rt);
        // The poller is given back by the last of its threads.
        wait_for_threads_to_end(threads);
    }
}
