//! A goroutine has std's handle with its name although the program's allocator asks for the handle
//! at each allocation. A program of its own, because a program has one allocator.
#![cfg(feature = "std")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::thread;
use trefoil::{Builder, go};

struct AsksForTheThread;

thread_local! {
    static IS_ASKING: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: passes everything to the system's allocator.
unsafe impl GlobalAlloc for AsksForTheThread {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // The first question allocates the handle.
        if !IS_ASKING.replace(true) {
            black_box(thread::current().id());
            IS_ASKING.set(false);
        }
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: AsksForTheThread = AsksForTheThread;

#[test]
fn an_allocator_may_ask_for_the_thread_when_a_goroutine_gets_its_name() {
    let own_name = || thread::current().name().map(str::to_owned);
    trefoil::run(|| {
        assert_eq!(own_name().as_deref(), Some("main"));
        for i in 0..200 {
            let name = format!("goroutine {i}");
            let found = Builder::new().name(name.clone()).go(own_name).unwrap().join().unwrap();
            assert_eq!(found, Some(name));
            assert_eq!(go(own_name).join().unwrap(), None);
        }
    });
}
