//! A program that defines `malloc` and `free` itself, as with an allocator that is linked under
//! libc's names. libc calls them too, also while it holds its own locks.

mod common;

use common::{MS, child_test, join_all, runtime, spin, tasks, yield_until};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Instant;
use trefoil::go;

unsafe extern "C" {
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_free(block: *mut c_void);
}

/// What `free` does before it frees, if libc calls it for a goroutine that releases a thread.
#[derive(Clone, Copy, Debug)]
enum Delay {
    /// Computes, and may be preempted.
    Compute,
    /// Sleeps by libc's function, which parks goroutines.
    Sleep,
}

/// How many goroutines release a thread at once.
const COUNT: usize = 8;

/// The OS threads on which goroutines release a thread, as [`releasing`] numbers them. Not in a
/// thread-local: the call may run with the thread-locals of the goroutine or with those of its M.
static RELEASING: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];

/// The id of this OS thread, and a delay.
fn releasing(delay: Delay) -> u64 {
    // SAFETY: no arguments, no conditions.
    let tid = unsafe { libc::gettid() } as u64;
    tid << 1 | u64::from(matches!(delay, Delay::Sleep))
}

/// Returns the delay that a goroutine on this thread has asked for, once.
fn take_delay() -> Option<Delay> {
    [Delay::Compute, Delay::Sleep].into_iter().find(|&delay| {
        let wanted = releasing(delay);
        RELEASING.iter().any(|r| r.compare_exchange(wanted, 0, SeqCst, SeqCst).is_ok())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    // SAFETY: allocates.
    unsafe { __libc_malloc(size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn free(block: *mut c_void) {
    match take_delay() {
        None => (),
        Some(Delay::Compute) => spin(30 * MS),
        Some(Delay::Sleep) => std::thread::sleep(30 * MS),
    }
    // SAFETY: the caller's block.
    unsafe { __libc_free(block) };
}

/// A function that joins or detaches a thread.
type Release = unsafe extern "C" fn(libc::pthread_t) -> i32;

unsafe extern "C" fn pthread_join(thread: libc::pthread_t) -> i32 {
    // SAFETY: the caller's thread.
    unsafe { libc::pthread_join(thread, null_mut()) }
}

unsafe extern "C" fn pthread_tryjoin(thread: libc::pthread_t) -> i32 {
    unsafe extern "C" {
        fn pthread_tryjoin_np(thread: libc::pthread_t, value: *mut *mut c_void) -> i32;
    }
    // SAFETY: the caller's thread.
    unsafe { pthread_tryjoin_np(thread, null_mut()) }
}

unsafe extern "C" {
    fn thrd_detach(thread: libc::pthread_t) -> i32;
}

/// The program's `free` computes or sleeps when libc calls it under the lock that every thread needs
/// to begin and to end. Meanwhile all other goroutines want that lock. The one that holds it goes
/// on.
///
/// Fails if it is preempted or parks there like any other goroutine: then the Ms run out, and the
/// helper thread waits for the lock before it can start another one.
#[test]
fn goroutine_in_free_goes_on_while_libc_holds_the_lock_of_stacks() {
    /// More than all the stacks that libc keeps for later threads, so that it frees each one.
    const STACK_BYTES: usize = 64 << 20;
    const WAYS: [Release; 4] = [libc::pthread_detach, pthread_join, pthread_tryjoin, thrd_detach];
    static NAMED: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn body(_: *mut c_void) -> *mut c_void {
        // SAFETY: a C string.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"short".as_ptr()) };
        NAMED.fetch_add(1, SeqCst);
        null_mut()
    }
    /// Starts a thread.
    fn start() -> libc::pthread_t {
        // SAFETY: the attributes and the thread's id are initialised before they are read.
        unsafe {
            let mut attributes = std::mem::zeroed();
            assert_eq!(libc::pthread_attr_init(&mut attributes), 0);
            assert_eq!(libc::pthread_attr_setstacksize(&mut attributes, STACK_BYTES), 0);
            let mut thread = 0;
            assert_eq!(libc::pthread_create(&mut thread, &attributes, body, null_mut()), 0);
            libc::pthread_attr_destroy(&mut attributes);
            thread
        }
    }

    child_test!();
    runtime(4).run(|| {
        for release in WAYS {
            for delay in [Delay::Compute, Delay::Sleep] {
                NAMED.store(0, SeqCst);
                let threads: Vec<_> = (0..COUNT).map(|_| start()).collect();
                yield_until("the threads begin", || NAMED.load(SeqCst) == COUNT);
                let is_left = || tasks().iter().any(|(_, name)| name == "short");
                yield_until("the threads end", || !is_left());
                let start = Instant::now();
                join_all(threads.into_iter().zip(&RELEASING).map(|(thread, place)| {
                    go(move || {
                        place.store(releasing(delay), SeqCst);
                        // SAFETY: started above, and released once.
                        assert_eq!(unsafe { release(thread) }, 0);
                        place.store(0, SeqCst);
                    })
                }));
                assert!(start.elapsed() > 20 * MS, "no call of `free` was delayed");
            }
        }
    });
}
