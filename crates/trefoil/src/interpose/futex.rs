//! `syscall(SYS_futex, …)`: std's locks, and those of most crates, park the goroutine.
//!
//! std's Mutex, RwLock, Condvar, Once, Barrier, mpsc and `thread::park` wait by this one call; parking_lot and
//! crossbeam too. On a goroutine a wait sleeps in the runtime's table of queues by address
//! (`sched/table.rs`); a wake, from anywhere, serves the goroutines there first, and the kernel's sleepers
//! with what is left.
//!
//! A wait may end for no reason, as the kernel's may: so a wake with a bitset, a requeue, or an operation whose result
//! only the kernel knows (`FUTEX_WAKE_OP`), wakes all of them.
//!
//! # Who comes too late again and again
//! std's locks are not fair: who unlocks may lock again before the one it woke has run. Threads are torn apart by
//! their CPUs; goroutines on one P are not. So one that waits at the same word for the [`PATIENCE`]th time in a row is
//! *starved*: who wakes it lets it run at once. And a thread that sleeps in the kernel would never be served while
//! there is a goroutine at every wake: while there are such threads, they come first at every [`PATIENCE`]th wake.
//!
//! Left to the kernel: futexes shared with other processes, and priority inheritance. (Then the thread
//! blocks, and loses its P.) libc's own locks call the kernel directly and never come here.

use super::sleep::nanos;
use super::waking::WakeContext;
use super::{FORKED, Next, begin_wait};
use crate::sched::deferred::{key_of, wake_later};
use crate::sched::is_to_be_left;
use crate::sched::queue::{self, Batch, Node, WaitResult};
use crate::sched::reason::WaitReason;
use crate::sched::table::FOREIGN;
use crate::sys::clock::{self, LATEST, NEVER, Nanos};
use crate::sys::raw;
use std::arch::naked_asm;
use std::cell::Cell;
use std::ffi::{c_long, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

const WAIT: usize = 0;
const WAKE: usize = 1;
const REQUEUE: usize = 3;
const CMP_REQUEUE: usize = 4;
const WAKE_OP: usize = 5;
const WAIT_BITSET: usize = 9;
const WAKE_BITSET: usize = 10;
const PRIVATE: usize = 128;
const REALTIME: usize = 256;

/// The newer calls, one for each operation (Linux 6.7). A wait by them is the kernel's, a wake serves goroutines as well.
const SYS_FUTEX_WAKE: c_long = 454;
const SYS_FUTEX_REQUEUE: c_long = 456;
/// Their flags for a word of 32 bits that only this process uses.
const SIZE_U32_PRIVATE: u32 = 2 | PRIVATE as u32;

/// What `futex_requeue` takes two of.
#[repr(C)]
struct FutexWaitv {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// The tag of keys (`sched/deferred.rs`); those of C's locks are in `c_locks/mod.rs`.
const FUTEX: usize = 0;

/// Goroutines that sleep here. While there are none a wake goes straight to the kernel.
static SLEEPERS: AtomicUsize = AtomicUsize::new(0);

/// Threads that sleep in the kernel, of those that came through here; and wakes of one while there were any.
static THREADS: AtomicUsize = AtomicUsize::new(0);
static TURNS: AtomicU32 = AtomicU32::new(0);

/// Where threads wait that come first at every wake ([`hurried`]). Only compared.
static WANTED: [AtomicPtr<AtomicU32>; 2] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 2];

thread_local! {
    static HURRIED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// On a plain thread: `f` takes the lock number `which`, one of std's, before all goroutines that wait for it.
pub(super) fn hurried<T>(which: usize, f: impl FnOnce() -> T) -> T {
    HURRIED.set(Some(which));
    let held = f();
    HURRIED.set(None);
    WANTED[which].store(std::ptr::null_mut(), Ordering::Relaxed);
    held
}

/// The caller has woken such a thread. It would have the lock again, and hold it for long maybe, before that one has run.
#[cold]
fn give_way() {
    std::thread::sleep(Duration::from_micros(100));
}

/// Whether such a thread waits at `word`.
fn is_wanted(word: *const AtomicU32) -> bool {
    WANTED.iter().any(|wanted| std::ptr::eq(wanted.load(Ordering::Relaxed), word))
}

static SYSCALL: Next = Next::new(c"syscall");
/// The real function, for the assembler; null until it was looked up.
static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// libc's function. Everything but a futex call jumps on.
///
/// # Safety
/// As its manual page says.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn syscall(number: c_long) -> c_long {
    naked_asm!(
        "cmp rdi, {futex}",
        "je {door}",
        "cmp rdi, {futex_wake}",
        "je {wake_door}",
        "cmp rdi, {futex_requeue}",
        "je {requeue_door}",
        "mov rax, [rip + {real}]",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        // The first call looks the function up; all its arguments are kept.
        "2:",
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "sub rsp, 8",
        "call {look_up}",
        "add rsp, 8", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "jmp rax",
        futex = const libc::SYS_futex,
        door = sym door,
        futex_wake = const SYS_FUTEX_WAKE,
        wake_door = sym wake_door,
        futex_requeue = const SYS_FUTEX_REQUEUE,
        requeue_door = sym requeue_door,
        real = sym REAL,
        look_up = sym look_up,
    )
}

extern "C" fn look_up() -> *mut c_void {
    let real = SYSCALL.get();
    REAL.store(real, Ordering::Relaxed);
    real
}

/// A futex call, with the arguments where `syscall` has them.
unsafe extern "C" fn door(
    number: c_long,
    word: *const AtomicU32,
    op: usize,
    value: usize,
    timeout: *const libc::timespec,
    word2: usize,
    value3: usize,
) -> c_long {
    // The kernel takes ints.
    let (op, value) = (op & 0xffff_ffff, value as u32);
    let command = op & !(PRIVATE | REALTIME);
    let is_bitset = matches!(command, WAIT_BITSET | WAKE_BITSET);
    // SAFETY: the caller's arguments, by the rules of the call; passed on as they came.
    unsafe {
        let kernel = |value: u32| {
            let args =
                [word as usize, op, value as usize, timeout as usize, word2, value3 & 0xffff_ffff];
            raw::syscall(number, args)
        };
        let result = match command {
            // No bits: its own error.
            _ if is_bitset && value3 as u32 == 0 => kernel(value),
            WAIT | WAIT_BITSET => {
                if op & PRIVATE != 0
                    && let Some(_wait) = begin_wait()
                {
                    let until = deadline(timeout, command == WAIT_BITSET, op & REALTIME != 0);
                    let waited = until.map(|until| wait(&*word, value, until));
                    return raw::to_libc(waited.unwrap_or(-libc::EINVAL as isize)) as c_long;
                }
                if let Some(which) = HURRIED.get() {
                    WANTED[which].store(word.cast_mut(), Ordering::Relaxed);
                }
                THREADS.fetch_add(1, Ordering::Relaxed);
                let result = kernel(value);
                THREADS.fetch_sub(1, Ordering::Relaxed);
                result
            }
            // Those at the word are not alike (bits), or some of them move on: the kernel serves the threads, and all
            // goroutines look for themselves.
            REQUEUE | CMP_REQUEUE | WAKE_BITSET
                if op & PRIVATE != 0 && (!is_bitset || value3 as u32 != u32::MAX) =>
            {
                match kernel(value) {
                    woken @ 0.. => woken + wake_after(word, u32::MAX),
                    error => error,
                }
            }
            WAKE | WAKE_BITSET if op & PRIVATE != 0 => {
                // Pairs with the count in `wait`: a sleeper is seen here, or it sees the new value.
                crate::shim::full_fence();
                let hurried = value == 1 && is_wanted(word);
                let woken =
                    if SLEEPERS.load(Ordering::Relaxed) == 0 || FORKED.load(Ordering::Relaxed) {
                        kernel(value)
                    } else {
                        // Only for one: a call that wakes all serves everybody anyway.
                        let threads_first = value == 1
                            && THREADS.load(Ordering::Relaxed) != 0
                            && (TURNS.fetch_add(1, Ordering::Relaxed).is_multiple_of(PATIENCE)
                                || hurried);
                        match if threads_first { kernel(1) } else { 0 } {
                            1 => 1,
                            _ => wake(word, value, value, kernel),
                        }
                    };
                if hurried && woken == 1 {
                    give_way();
                }
                woken
            }
            WAKE_OP if op & PRIVATE != 0 => {
                let word2 = std::ptr::with_exposed_provenance(word2);
                match kernel(value) {
                    // Whether those at the second word are to be woken depended on its value before.
                    woken @ 0.. => woken + wake_after(word, value) + wake_after(word2, u32::MAX),
                    error => error,
                }
            }
            _ => kernel(value),
        };
        raw::to_libc(result) as c_long
    }
}

/// `futex_wake`, with the arguments where `syscall` has them.
unsafe extern "C" fn wake_door(
    number: c_long,
    word: *const AtomicU32,
    mask: usize,
    count: usize,
    flags: usize,
) -> c_long {
    // SAFETY: the caller's arguments, by the rules of the call.
    let kernel =
        |count: u32| unsafe { raw::syscall(number, [word as usize, mask, count as usize, flags]) };
    let result = match kernel(count as u32) {
        woken @ 0.. if flags as u32 == SIZE_U32_PRIVATE => {
            let left = (count as u32).saturating_sub(woken as u32);
            // One bit of many: who waits for it is not known.
            let most = if mask as u32 == u32::MAX { left } else { u32::MAX };
            woken + wake_after(word, most)
        }
        result => result,
    };
    raw::to_libc(result) as c_long
}

/// `futex_requeue`, with the arguments where `syscall` has them.
unsafe extern "C" fn requeue_door(
    number: c_long,
    words: *const FutexWaitv,
    flags: usize,
    wakes: usize,
    moves: usize,
) -> c_long {
    // SAFETY: the caller's arguments, by the rules of the call.
    let result = match unsafe { raw::syscall(number, [words as usize, flags, wakes, moves]) } {
        woken @ 0.. => {
            // SAFETY: the kernel has read them.
            let from = unsafe { &*words };
            if from.flags == SIZE_U32_PRIVATE {
                let word = std::ptr::with_exposed_provenance(from.address as usize);
                woken + wake_after(word, u32::MAX)
            } else {
                woken
            }
        }
        result => result,
    };
    raw::to_libc(result) as c_long
}

/// After the kernel's part: wakes up to `most` goroutines at a word that is there.
fn wake_after(word: *const AtomicU32, most: u32) -> isize {
    // Pairs with the count in `wait`: a sleeper is seen here, or it sees the new value.
    crate::shim::full_fence();
    if most == 0 || SLEEPERS.load(Ordering::Relaxed) == 0 || FORKED.load(Ordering::Relaxed) {
        return 0;
    }
    wake(word, most, 0, |_| 0)
}

/// The point in time that a timeout means; `WAIT`'s is relative. None: the kernel refuses it.
///
/// # Safety
/// Null or a timespec.
unsafe fn deadline(
    timeout: *const libc::timespec,
    absolute: bool,
    realtime: bool,
) -> Option<Nanos> {
    // SAFETY: the caller's.
    let Some(t) = (unsafe { timeout.as_ref() }) else { return Some(NEVER) };
    let nanos = nanos(t)?;
    if !absolute {
        return Some(clock::after_nanos(nanos));
    }
    if !realtime {
        return Some(nanos.min(LATEST));
    }
    let wall = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    let wall = wall.tv_sec as u64 * 1_000_000_000 + wall.tv_nsec as u64;
    Some(clock::after_nanos(nanos.saturating_sub(wall)))
}

/// Waits at the same word in a row after which a goroutine is starved. It cannot be told from one that waits for
/// something else each time (a parker's word), so this is the price of a yield once in so many.
const PATIENCE: u32 = 32;

thread_local! {
    /// The word that this goroutine last waited at, and how often in a row.
    static LAST: Cell<(usize, u32)> = const { Cell::new((0, 0)) };
}

fn wait(word: &AtomicU32, value: u32, deadline: Nanos) -> isize {
    let key = key_of(std::ptr::from_ref(word) as usize, FUTEX);
    let (last, times) = LAST.get();
    let times = if last == key { times + 1 } else { 0 };
    LAST.set((key, times % PATIENCE));
    let node = Node::of_process(usize::from(times == PATIENCE));
    // Before the look at the word: pairs with the barrier in `door`.
    SLEEPERS.fetch_add(1, Ordering::SeqCst);
    let slept = node.sleep(
        WaitReason::Futex,
        deadline,
        |_| {
            FOREIGN.with_queue(key, |queue| {
                // Under the queue's lock: who changes the word and then wakes finds us.
                let wanted = word.load(Ordering::SeqCst) == value;
                if wanted {
                    queue.push_back(&node);
                }
                wanted
            })
        },
        |_| {
            FOREIGN.with_queue(key, |queue| queue.remove(&node));
        },
    );
    SLEEPERS.fetch_sub(1, Ordering::Relaxed);
    match slept {
        WaitResult::NotQueued => -libc::EAGAIN as isize,
        WaitResult::Woken(_) => 0,
        WaitResult::TimedOut => -libc::ETIMEDOUT as isize,
    }
}

/// Wakes up to `most` goroutines, then lets the kernel wake the rest of `wanted`.
fn wake(word: *const AtomicU32, most: u32, wanted: u32, kernel: impl Fn(u32) -> isize) -> isize {
    let key = key_of(word as usize, FUTEX);
    let mut starved = false;
    let mut serve = |here| {
        let mut batch = Batch::new();
        FOREIGN.with_queue(key, |queue| {
            while (batch.len() as u32) < most
                && let Some(taken) = queue.take_first()
            {
                starved |= taken.node().weight != 0;
                batch.push(taken);
            }
        });
        let n = batch.len() as u32;
        batch.wake_all(here, 0);
        if n >= wanted {
            return n as isize;
        }
        // Still inside: a goroutine that is stopped for ever on its way out has woken all whom it had to wake.
        match kernel(wanted - n) {
            more @ 0.. => more + n as isize,
            _ if n > 0 => n as isize,
            e => e,
        }
    };
    let woken = match WakeContext::current() {
        WakeContext::Runtime => queue::inside(serve),
        WakeContext::Outside => serve(None),
        WakeContext::Deferred => {
            // In a signal handler: how many goroutines the helper thread will wake is not known.
            wake_later(key);
            kernel(wanted)
        }
    };
    if (starved || is_to_be_left())
        && let Some(_wait) = begin_wait()
    {
        crate::yield_now();
    }
    woken
}
