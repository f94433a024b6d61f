//! The lock of std's information about threads.
//!
//! std stores where the stack of a thread is when the thread starts, and removes that when it ends,
//! under a lock of the whole process. In a simulation threads are goroutines, but a thread outside
//! may hold the lock. A goroutine that parked for it would resume at a moment that no seed decides.
//! And if all others wait too, the simulation would take it for a deadlock. So a goroutine of a
//! simulation waits for this lock in the kernel, inside the runtime: no simulated time passes, and
//! the schedule is not asked. The owner is in a few instructions of std, and frees a name.
//!
//! If the owner is a goroutine of the same simulation, which parked or yielded in the program's
//! allocator while it freed the name, it needs the P of the waiter. So that one parks after all if
//! the lock is not free after [`KERNEL_WAIT`].
//!
//! # How the lock is found
//! std has no name for it. Before the first simulation, two OS threads find it:
//!
//! 1. The *holder* ends. std removes its information, and with it a copy of the thread's name, under
//!    the lock. So the lock is held when that copy is freed, and `free` is interposed.
//! 2. Meanwhile the *waiter* ends. The first futex that it waits for is the lock, or one that the
//!    program's allocator holds while it calls `free`.
//! 3. A third thread, the *checker*, calls `free` without std's lock. If the word is never 0 then,
//!    it is the allocator's.
//!
//! If the program has an allocator that does not call `free`, or that holds a lock while it does, or
//! another version of std frees the name elsewhere, the lock is not found, and goroutines park for
//! it.

use crate::sched::simulation;
use crate::sys::clock;
use crate::sys::mm;
use crate::sys::thread::spawn_std;
use std::cell::Cell;
use std::ffi::c_void;
use std::hint::black_box;
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// No other block that the holder frees begins like this.
const HOLDER_NAME: &str = "trefoil-holder";
const WAITER_NAME: &str = "trefoil-waiter";
const CHECKER_NAME: &str = "trefoil-checker";
const PAUSE: Duration = Duration::from_micros(20);
/// How long the holder waits for the waiter, which may have to wait for a CPU.
const LIMIT: Duration = Duration::from_millis(200);
/// How often the checker looks at the word: at some moments another thread holds std's lock.
const CHECKS: u32 = 10;
/// How long a goroutine waits for the lock in the kernel. A thread outside that holds it may have to
/// wait for a CPU.
pub(in crate::interpose) const KERNEL_WAIT: libc::timespec =
    libc::timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// The word of the lock; null until it is found. It is not read without a system call: before it is
/// checked it may be in memory that is not mapped any more.
static LOCK: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());
/// The threads run. `free` reads it.
static IS_SEARCHING: AtomicBool = AtomicBool::new(false);

/// Values of [`STAGE`]: the waiter has not yet started, which takes the lock, too; it has started;
/// the holder holds the lock; the holder has ended.
const STARTING: u8 = 0;
const STARTED: u8 = 1;
const HELD: u8 = 2;
const OVER: u8 = 3;
static STAGE: AtomicU8 = AtomicU8::new(STARTING);
/// The checker has seen that nobody held the lock.
static WAS_FREE: AtomicBool = AtomicBool::new(false);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    None,
    Holder,
    Waiter,
    Checker,
}

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::None) };
}

/// Finds the lock, if that was not tried before. Takes about 0.3 ms.
pub(in crate::interpose) fn find() {
    static FIND: Once = Once::new();
    FIND.call_once(|| {
        let Ok(waiter) = spawn_std(WAITER_NAME, None, Box::new(wait_for_holder)) else { return };
        while STAGE.load(Ordering::Acquire) == STARTING {
            sleep(PAUSE);
        }
        IS_SEARCHING.store(true, Ordering::Relaxed);
        let holder = spawn_std(HOLDER_NAME, None, Box::new(|| ROLE.set(Role::Holder)));
        // The handle owns another copy of the name until the thread has ended.
        let _ = holder.map(|thread| thread.join());
        STAGE.store(OVER, Ordering::Release);
        let _ = waiter.join();
        let checker = spawn_std(CHECKER_NAME, None, Box::new(check));
        let _ = checker.map(|thread| thread.join());
        IS_SEARCHING.store(false, Ordering::Relaxed);
        if !WAS_FREE.load(Ordering::Relaxed) {
            LOCK.store(null_mut(), Ordering::Relaxed);
        }
    });
}

fn wait_for_holder() {
    STAGE.store(STARTED, Ordering::Release);
    while STAGE.load(Ordering::Acquire) == STARTED {
        sleep(PAUSE);
    }
    if STAGE.load(Ordering::Acquire) == HELD {
        ROLE.set(Role::Waiter);
    }
}

fn check() {
    ROLE.set(Role::Checker);
    for _ in 0..CHECKS {
        // `black_box`: the compiler may leave out a block that nobody uses.
        drop(black_box(String::from(HOLDER_NAME)));
        if WAS_FREE.load(Ordering::Relaxed) {
            break;
        }
        sleep(PAUSE);
    }
    ROLE.set(Role::None);
}

/// Returns whether [`before_free`] must be called.
#[inline(always)]
pub(in crate::interpose) fn is_searching() -> bool {
    IS_SEARCHING.load(Ordering::Relaxed)
}

/// The calling thread is about to free a block of `size` bytes.
///
/// # Safety
/// The block is the caller's, and so large.
#[cold]
pub(in crate::interpose) unsafe fn before_free(block: *const c_void, size: usize) {
    let role = ROLE.get();
    if !matches!(role, Role::Holder | Role::Checker) || size < HOLDER_NAME.len() {
        return;
    }
    // SAFETY: the caller's contract. A byte that was never written may have any value.
    let is_name = (0..HOLDER_NAME.len())
        .all(|i| unsafe { block.cast::<u8>().add(i).read_volatile() } == HOLDER_NAME.as_bytes()[i]);
    if !is_name {
        return;
    }
    if role == Role::Checker {
        if mm::read_u32(LOCK.load(Ordering::Relaxed).addr()) == Some(0) {
            WAS_FREE.store(true, Ordering::Relaxed);
        }
        return;
    }
    ROLE.set(Role::None);
    STAGE.store(HELD, Ordering::Release);
    let begin = Instant::now();
    while LOCK.load(Ordering::Relaxed).is_null() && begin.elapsed() < LIMIT {
        sleep(PAUSE);
    }
}

/// The calling thread is about to wait in the kernel for a futex.
pub(in crate::interpose) fn note_wait(word: *const AtomicU32) {
    if ROLE.get() == Role::Waiter {
        ROLE.set(Role::None);
        LOCK.store(word.cast_mut(), Ordering::Relaxed);
    }
}

/// Returns whether `word` is the lock, and the caller is simulated.
pub(in crate::interpose) fn is_waited_for_in_kernel(word: *const AtomicU32) -> bool {
    clock::has_simulations()
        && std::ptr::eq(LOCK.load(Ordering::Relaxed), word)
        && simulation::here().is_some()
}
