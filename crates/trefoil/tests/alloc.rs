//! Allocation on goroutines: libc's functions, and `alloc::Alloc`.
//!
//! `crates/trefoil-allocators` tests other allocators, at length.

mod common;

use common::{child_test, join_all, rss, runtime, watchdog};
use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::{HashMap, HashSet};
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use trefoil::alloc::Alloc;
use trefoil::{chan, go};

/// Sizes around the borders of size classes, and beyond the largest class.
const SIZES: [usize; 16] =
    [1, 8, 16, 24, 25, 40, 120, 121, 128, 129, 1000, 1024, 4097, 32_760, 32_768, 300_000];

/// A block of libc's, filled with a byte that depends on its address and size.
struct Block {
    at: usize,
    size: usize,
}

impl Block {
    fn byte(&self) -> u8 {
        (self.at >> 4) as u8 ^ self.size as u8
    }

    fn fill(at: *mut libc::c_void, size: usize) -> Block {
        assert!(!at.is_null(), "no memory for {size} bytes");
        let block = Block { at: at as usize, size };
        // SAFETY: a fresh block of that size.
        unsafe { at.cast::<u8>().write_bytes(block.byte(), size) };
        block
    }

    fn check(&self) {
        // SAFETY: `fill` has written all bytes of the block, which has no other owner.
        let bytes = unsafe { std::slice::from_raw_parts(self.at as *const u8, self.size) };
        assert!(
            bytes.iter().all(|&b| b == self.byte()),
            "a block of {} was overwritten",
            self.size
        );
    }

    fn free(self) {
        self.check();
        // SAFETY: `self` owns the block, which is freed once.
        unsafe { libc::free(self.at as *mut libc::c_void) };
    }
}

/// Allocates one block by each function of libc.
fn allocate_by_each_function(size: usize) -> Vec<Block> {
    // SAFETY: allocations; sizes are multiples of the alignment where that is required.
    unsafe {
        let mut aligned = std::ptr::null_mut();
        assert_eq!(libc::posix_memalign(&mut aligned, 256, size), 0);
        assert_eq!(aligned as usize % 256, 0);
        let zeroed = libc::calloc(size, 1).cast::<u8>();
        assert!(
            std::slice::from_raw_parts(zeroed, size).iter().all(|&b| b == 0),
            "calloc returned bytes that are not zero"
        );
        let grown = libc::realloc(Block::fill(libc::malloc(size), size).at as *mut _, 3 * size);
        let shrunk = libc::realloc(libc::malloc(3 * size), size);
        let rounded = size.next_multiple_of(64);
        let memalign = libc::memalign(64, rounded);
        let aligned_alloc = libc::aligned_alloc(64, rounded);
        assert_eq!((memalign as usize % 64, aligned_alloc as usize % 64), (0, 0));
        vec![
            Block::fill(libc::malloc(size), size),
            Block::fill(zeroed.cast(), size),
            Block::fill(aligned, size),
            Block::fill(grown, 3 * size),
            Block::fill(shrunk, size),
            Block::fill(memalign, rounded),
            Block::fill(aligned_alloc, rounded),
        ]
    }
}

#[test]
fn blocks_of_every_function_move_between_goroutines_and_threads() {
    let _dog = watchdog();
    let count = common::rounds(20, 50);
    runtime(2).run(|| {
        let (to_thread, from_goroutines) = chan::bounded::<Block>(64);
        let (to_goroutine, from_thread) = chan::bounded::<Block>(64);
        // The thread frees what goroutines have allocated, and vice versa.
        let thread = std::thread::spawn(move || {
            for block in from_goroutines {
                block.free();
                let mine = allocate_by_each_function(SIZES[3]);
                mine.into_iter().for_each(|block| drop(to_goroutine.send(block)));
            }
        });
        let frees = go(move || from_thread.into_iter().map(Block::free).count());
        join_all((0..32).map(|n| {
            let to_thread = to_thread.clone();
            go(move || {
                for i in 0..count {
                    let size = SIZES[(n + i) % SIZES.len()];
                    for (k, block) in allocate_by_each_function(size).into_iter().enumerate() {
                        if k == 0 && i % 10 == 0 {
                            assert!(to_thread.send(block).is_ok());
                        } else {
                            block.free();
                        }
                    }
                }
            })
        }));
        drop(to_thread);
        trefoil::blocking(|| thread.join().unwrap());
        assert_eq!(frees.join().unwrap(), 32 * count / 10 * 7);
    });
}

#[test]
fn realloc_keeps_the_contents_through_every_size() {
    let _dog = watchdog();
    runtime(1).run(|| {
        for up in [true, false] {
            let sizes = if up { SIZES.to_vec() } else { SIZES.iter().rev().copied().collect() };
            // SAFETY: a local block, written and read within its size.
            unsafe {
                let mut at = libc::malloc(sizes[0]).cast::<u8>();
                let mut size = sizes[0];
                at.write_bytes(7, size);
                for next in sizes {
                    at = libc::realloc(at.cast(), next).cast();
                    let kept = std::slice::from_raw_parts(at, size.min(next));
                    assert!(
                        kept.iter().all(|&b| b == 7),
                        "contents lost from {size} to {next} bytes"
                    );
                    size = next;
                    at.write_bytes(7, size);
                }
                libc::free(at.cast());
            }
        }
    });
}

#[test]
fn a_failed_allocation_sets_the_goroutines_errno() {
    let _dog = watchdog();
    runtime(1).run(|| {
        // SAFETY: requests more than is available; nothing is written.
        unsafe {
            *libc::__errno_location() = 0;
            // `black_box`, because the compiler assumes that an unused allocation succeeds.
            assert!(black_box(libc::malloc(black_box(isize::MAX as usize))).is_null());
            assert_eq!(*libc::__errno_location(), libc::ENOMEM);
            *libc::__errno_location() = 0;
            assert!(black_box(libc::calloc(black_box(usize::MAX / 2), 4)).is_null());
            assert_eq!(*libc::__errno_location(), libc::ENOMEM);
            let mut out = std::ptr::null_mut();
            assert_eq!(libc::posix_memalign(&mut out, 3, 8), libc::EINVAL);
            assert_eq!(libc::posix_memalign(&mut out, 64, isize::MAX as usize), libc::ENOMEM);
        }
    });
}

/// Fills glibc's cache of the calling thread: seven blocks of each of eight sizes.
fn fill_thread_cache() {
    for size in [16, 32, 64, 128, 256, 512, 768, 1000] {
        let blocks: Vec<Vec<u8>> = (0..7).map(|_| vec![1u8; size]).collect();
        drop(black_box(blocks));
    }
}

#[test]
fn a_goroutine_that_has_allocated_keeps_at_most_1_kib_more() {
    child_test!();
    const GOROUTINES: usize = 4_000;
    runtime(2).run(move || {
        // Returns the resident memory of parked goroutines that have done `work`.
        let parked = |work: fn()| {
            let before = rss();
            let (stay, stays) = chan::bounded::<()>(0);
            let (ready, are_ready) = chan::unbounded();
            let handles: Vec<_> = (0..GOROUTINES)
                .map(|_| {
                    let (stays, ready) = (stays.clone(), ready.clone());
                    go(move || {
                        work();
                        ready.send(()).unwrap();
                        let _ = stays.recv();
                    })
                })
                .collect();
            (0..GOROUTINES).for_each(|_| are_ready.recv().unwrap());
            let used = rss().saturating_sub(before);
            drop(stay);
            join_all(handles);
            used
        };
        parked(fill_thread_cache); // creates stacks and arenas, which stay resident
        let (without, with) = (parked(|| {}), parked(fill_thread_cache));
        let more = with.saturating_sub(without) / GOROUTINES as u64;
        assert!(more <= 1024, "{more} bytes more per goroutine that has allocated");
    });
}

/// glibc keeps buffers per thread that it frees when the thread ends: that of `strerror`, and since
/// 2.41 the state of `getrandom`, which every `HashMap` calls. They must not leak with a
/// goroutine's TLS block.
#[test]
#[ignore = "takes long"]
fn libcs_buffers_per_thread_are_freed_with_the_goroutine() {
    child_test!();
    const GOROUTINES: usize = 4_000;
    const ROUNDS: usize = 5;
    let round = || {
        let (stay, stays) = chan::bounded::<()>(0);
        let (ready, are_ready) = chan::unbounded();
        let handles: Vec<_> = (0..GOROUTINES)
            .map(|n| {
                let (stays, ready) = (stays.clone(), ready.clone());
                go(move || {
                    let map = HashMap::from([(n, n)]);
                    // SAFETY: valid for any number.
                    assert!(!unsafe { libc::strerror(99_999) }.is_null());
                    ready.send(()).unwrap();
                    let _ = stays.recv();
                    map.len()
                })
            })
            .collect();
        // All exist at once, so that there are more stacks than are kept.
        (0..GOROUTINES).for_each(|_| are_ready.recv().unwrap());
        drop(stay);
        join_all(handles);
        // Longer than unused stacks are kept.
        trefoil::time::sleep(std::time::Duration::from_millis(700));
        // SAFETY: reads malloc's statistics.
        unsafe { libc::mallinfo2() }.uordblks
    };
    let grown = runtime(2).run(move || {
        round();
        let (before, mut after) = (round(), 0);
        (0..ROUNDS).for_each(|_| after = round());
        after.saturating_sub(before)
    });
    let limit = ROUNDS * GOROUTINES * 8;
    assert!(grown < limit, "{grown} bytes more after {ROUNDS} rounds of {GOROUTINES} goroutines");
}

/// An allocator that checks its calls. It has no fields, so goroutines use magazines.
struct Checking;

static LIVE: Mutex<Option<HashMap<usize, Layout>>> = Mutex::new(None);
static CALLS: AtomicUsize = AtomicUsize::new(0);
static THREADS: Mutex<Option<HashSet<usize>>> = Mutex::new(None);

thread_local! {
    static HERE: u8 = const { 0 };
}

/// Records an allocation, and the thread that made it.
fn record(block: *mut u8, layout: Layout) -> *mut u8 {
    CALLS.fetch_add(1, Ordering::Relaxed);
    let here = HERE.with(|here| std::ptr::from_ref(here) as usize);
    THREADS.lock().unwrap().get_or_insert_default().insert(here);
    let twice = LIVE.lock().unwrap().get_or_insert_default().insert(block as usize, layout);
    assert!(twice.is_none(), "a block was allocated twice");
    block
}

/// Removes the record of an allocation, which must have the same layout.
fn remove_record(block: *mut u8, layout: Layout) {
    let known = LIVE.lock().unwrap().get_or_insert_default().remove(&(block as usize));
    assert_eq!(known, Some(layout), "freed with another layout than it was allocated with");
}

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Checking {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's obligations are those of `System`.
        record(unsafe { System.alloc(layout) }, layout)
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        remove_record(block, layout);
        // SAFETY: the caller's obligations are those of `System`.
        unsafe { System.dealloc(block, layout) }
    }
}

static WRAPPED: Alloc<Checking> = Alloc::new(Checking);

/// Allocates, reallocates and frees, and checks what is in the blocks.
fn use_allocator(alloc: &impl GlobalAlloc, rounds: usize) {
    for round in 0..rounds {
        for (i, &size) in SIZES.iter().enumerate() {
            let align = [1, 8, 16, 64][(i + round) % 4];
            let layout = Layout::from_size_align(size, align).unwrap();
            // SAFETY: local blocks, used within their sizes, freed once with their layouts.
            unsafe {
                let block = alloc.alloc_zeroed(layout);
                assert_eq!(block as usize % align, 0);
                assert!(std::slice::from_raw_parts(block, size).iter().all(|&b| b == 0));
                block.write_bytes(9, size);
                let larger = size * 2 + 3;
                let block = alloc.realloc(block, layout, larger);
                assert!(std::slice::from_raw_parts(block, size).iter().all(|&b| b == 9));
                alloc.dealloc(block, Layout::from_size_align(larger, align).unwrap());
            }
        }
    }
}

#[test]
#[ignore = "takes long"]
fn the_wrapper_frees_with_the_layout_it_allocated_with_and_sees_few_threads() {
    let _dog = watchdog();
    runtime(2).run(|| {
        join_all((0..200).map(|_| go(|| use_allocator(&WRAPPED, 4))));
    });
    std::thread::spawn(|| use_allocator(&WRAPPED, 4)).join().unwrap();
    let threads = THREADS.lock().unwrap().as_ref().map_or(0, HashSet::len);
    assert!(threads < 20, "the allocator saw {threads} threads for 200 goroutines");
    // Each round allocates and reallocates 16 sizes: most of the calls must not reach the
    // allocator.
    let (calls, requests) = (CALLS.load(Ordering::Relaxed), 201 * 4 * 16 * 2);
    assert!(calls < requests / 2, "{calls} of {requests} requests reached the allocator");
}

/// An allocator with a field: two instances may be two heaps, so their blocks must not mix.
struct Counting(AtomicUsize);

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's obligations are those of `System`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.0.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the caller's obligations are those of `System`.
        unsafe { System.dealloc(block, layout) }
    }
}

#[test]
fn allocators_with_fields_keep_their_blocks_apart() {
    let _dog = watchdog();
    static ONE: Alloc<Counting> = Alloc::new(Counting(AtomicUsize::new(0)));
    static TWO: Alloc<Counting> = Alloc::new(Counting(AtomicUsize::new(0)));
    runtime(2).run(|| {
        join_all((0..50).map(|n| {
            go(move || {
                use_allocator(&ONE, 1);
                if n % 2 == 0 {
                    use_allocator(&TWO, 1);
                }
            })
        }));
    });
    assert_eq!(ONE.inner().0.load(Ordering::Relaxed), 0);
    assert_eq!(TWO.inner().0.load(Ordering::Relaxed), 0);
}
