//! `syscall(SYS_futex, …)`: std's locks, and those of most crates, park the goroutine.
//!
//! std's Mutex, RwLock, Condvar, Once, Barrier, mpsc and `thread::park` wait by this one call;
//! parking_lot and crossbeam too. On a goroutine a wait parks in the runtime's table of queues by
//! address (`sched/wait/table.rs`). A wake, from any thread, first wakes goroutines there; the
//! kernel then wakes threads with what is left of the count.
//!
//! A wait may end spuriously, as the kernel's may. So a wake with a bitset, a requeue, or an
//! operation whose result only the kernel knows (`FUTEX_WAKE_OP`) wakes all goroutines at the word.
//!
//! # Starvation
//! std's locks are not fair: a thread that unlocks may lock again before the waiter that it woke
//! has run. Threads run on different CPUs, which gives each of them a chance; goroutines on one P
//! do not. So a goroutine that waits again at the same word after [`FAIRNESS_INTERVAL`] waits in a
//! row there is *starved*: its waker yields to it. And a thread that sleeps in the kernel would
//! never be woken while every wake finds a goroutine: while there are such threads, every
//! [`FAIRNESS_INTERVAL`]th wake wakes one of them first.
//!
//! Left to the kernel: futexes shared with other processes, and priority inheritance. (The thread
//! then blocks, and loses its P.) In a simulation also short waits for one lock of std
//! (`threads/std_lock.rs`), and there the thread keeps its P. libc's own locks make the system call directly, not through
//! `syscall`.

use super::park::{begin_wait, may_park};
use super::sleep::nanos;
use super::symbol::NextSymbol;
use super::threads::std_lock;
use super::waking::WakeContext;
use crate::arch;
use crate::sched::Rt;
use crate::sched::calls;
use crate::sched::is_to_be_orphaned;
use crate::sched::simulation::{Undecided, WaitOutside};
use crate::sched::wait;
use crate::sched::wait::deferred::{key_of, wake_later};
use crate::sched::wait::holder::note_object;
use crate::sched::wait::list::{Batch, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::table::FOREIGN;
use crate::sys::clock::{self, LATEST, NEVER, Nanos};
use crate::sys::fork::is_forked;
use crate::sys::{outputs, raw};
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
/// The bitset that matches every waiter.
const MATCH_ANY: u32 = u32::MAX;

/// The newer system calls, one per operation (Linux 6.7). Waits by them are left to the kernel;
/// wakes wake goroutines too.
const SYS_FUTEX_WAKE: c_long = 454;
const SYS_FUTEX_REQUEUE: c_long = 456;
/// Their flags for a word of 32 bits that only this process uses.
const SIZE_U32_PRIVATE: u32 = 2 | PRIVATE as u32;

/// `futex_requeue` takes two of these.
#[repr(C)]
struct FutexWaitv {
    value: u64,
    address: u64,
    flags: u32,
    reserved: u32,
}

/// The tag of a futex word's key (`sched/wait/deferred.rs`). The tags of C's locks are in
/// `c_locks/mod.rs`.
const FUTEX: usize = 0;

/// How many goroutines sleep here. While there are none, a wake only makes the system call.
static SLEEPING_GOROUTINES: AtomicUsize = AtomicUsize::new(0);

/// How many threads sleep in the kernel by a call of ours, and how many wakes of one waiter there
/// were meanwhile.
static SLEEPING_THREADS: AtomicUsize = AtomicUsize::new(0);
static WAKES_WITH_THREADS: AtomicU32 = AtomicU32::new(0);

/// A goroutine is starved after this many waits in a row at the same word. One wake in this many
/// wakes a thread before goroutines. A goroutine that waits for something else each time (at a
/// parker's word) cannot be told from a starved one: one in this many of its waits costs its waker
/// a yield.
const FAIRNESS_INTERVAL: u32 = 32;

/// The words at which threads with priority wait ([`with_priority`]). Only compared.
static PRIORITY_WORDS: [AtomicPtr<AtomicU32>; 2] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; 2];

thread_local! {
    /// The number of the lock that this thread takes with priority.
    static PRIORITY_LOCK: Cell<Option<usize>> = const { Cell::new(None) };
}

/// On a plain thread: calls `f`, which takes a lock of std. The thread gets the lock before all
/// goroutines that wait for it. `which` is the lock's number in [`PRIORITY_WORDS`].
pub(super) fn with_priority<T>(which: usize, f: impl FnOnce() -> T) -> T {
    PRIORITY_LOCK.set(Some(which));
    let held = f();
    PRIORITY_LOCK.set(None);
    PRIORITY_WORDS[which].store(std::ptr::null_mut(), Ordering::Relaxed);
    held
}

/// Returns whether a thread with priority waits at `word`.
fn is_priority_word(word: *const AtomicU32) -> bool {
    PRIORITY_WORDS.iter().any(|wanted| std::ptr::eq(wanted.load(Ordering::Relaxed), word))
}

/// Sleeps after the caller has woken a thread with priority. Otherwise the caller would take the
/// lock again before that thread has run, and might hold it for long.
#[cold]
fn back_off() {
    std::thread::sleep(Duration::from_micros(100));
}

static SYSCALL: NextSymbol = NextSymbol::new(c"syscall");
/// The real function, for the assembler; null until it was looked up.
static REAL_SYSCALL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// libc's function. Every call except a futex call jumps to the real function.
///
/// # Safety
/// As its manual page says.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn syscall(number: c_long) -> c_long {
    arch::jump_by_number!(
        libc::SYS_futex => on_futex,
        SYS_FUTEX_WAKE => on_futex_wake,
        SYS_FUTEX_REQUEUE => on_futex_requeue,
        else REAL_SYSCALL or resolve_syscall
    )
}

extern "C" fn resolve_syscall() -> *mut c_void {
    let real = SYSCALL.address();
    REAL_SYSCALL.store(real, Ordering::Relaxed);
    real
}

/// `futex`, with the arguments in the registers of `syscall`.
unsafe extern "C" fn on_futex(
    number: c_long,
    word: *const AtomicU32,
    op: usize,
    value: usize,
    timeout: *const libc::timespec,
    word2: usize,
    value3: usize,
) -> c_long {
    // The kernel reads `op` and the values as 32 bits.
    let (op, value3) = (op & 0xffff_ffff, value3 as u32);
    let call = FutexCall { number, word, op, timeout, word2, value3 };
    // SAFETY: the caller's arguments, by the rules of the call.
    raw::to_libc(unsafe { call.dispatch(value as u32) }) as c_long
}

/// The arguments of a futex call, except for the value, which is a count in some operations.
struct FutexCall {
    number: c_long,
    word: *const AtomicU32,
    op: usize,
    timeout: *const libc::timespec,
    word2: usize,
    value3: u32,
}

impl FutexCall {
    /// Makes the system call.
    ///
    /// # Safety
    /// The arguments follow the rules of the call. The same holds for the functions below.
    #[inline(always)]
    unsafe fn in_kernel(&self, value: u32) -> isize {
        let FutexCall { number, word, op, timeout, word2, value3 } = *self;
        let args = [word as usize, op, value as usize, timeout as usize, word2, value3 as usize];
        // SAFETY: the caller's contract.
        unsafe { raw::syscall(number, args) }
    }

    /// Returns the operation without its flags.
    fn command(&self) -> usize {
        self.op & !(PRIVATE | REALTIME)
    }

    fn is_private(&self) -> bool {
        self.op & PRIVATE != 0
    }

    /// Makes the call, by its operation.
    #[inline(always)]
    unsafe fn dispatch(&self, value: u32) -> isize {
        // SAFETY: the caller's contract.
        unsafe {
            match self.command() {
                // An empty bitset is an error.
                WAIT_BITSET | WAKE_BITSET if self.value3 == 0 => self.in_kernel(value),
                WAIT | WAIT_BITSET => self.wait(value),
                _ if !self.is_private() => self.in_kernel(value),
                WAKE => self.wake(value),
                WAKE_BITSET if self.value3 == MATCH_ANY => self.wake(value),
                REQUEUE | CMP_REQUEUE | WAKE_BITSET => self.wake_every_goroutine(value),
                WAKE_OP => self.wake_op(value),
                _ => self.in_kernel(value),
            }
        }
    }

    /// Parks the goroutine, or lets the thread wait in the kernel.
    unsafe fn wait(&self, value: u32) -> isize {
        if self.is_private()
            && self.timeout.is_null()
            && std_lock::is_waited_for_in_kernel(self.word)
            && may_park()
        {
            // Threads outside decide how often this happens.
            let _undecided = Undecided::begin();
            let limit = std_lock::KERNEL_WAIT;
            let call = FutexCall { op: WAIT | PRIVATE, timeout: &raw const limit, ..*self };
            // SAFETY: the caller's contract; the kernel reads `limit` during the call.
            let result = wait::inside(|_| unsafe { call.wait_in_kernel(value) });
            if result != -(libc::ETIMEDOUT as isize) {
                return result;
            }
            // The owner may need this P.
        }
        if self.is_private()
            && let Some(_wait) = begin_wait()
        {
            let is_output =
                || outputs::mutexes().any(|mutex| std::ptr::eq(mutex, self.word.cast()));
            let _outside = WaitOutside::for_shared_lock(is_output);
            // SAFETY: the caller's contract.
            return match unsafe { self.deadline() } {
                Some(deadline) => {
                    let deadline = clock::deadline_after_now(deadline);
                    // SAFETY: the caller's word.
                    park(unsafe { &*self.word }, value, deadline)
                }
                None => -libc::EINVAL as isize,
            };
        }
        // SAFETY: the caller's contract.
        unsafe { self.wait_in_kernel(value) }
    }

    /// Lets the thread wait in the kernel.
    unsafe fn wait_in_kernel(&self, value: u32) -> isize {
        std_lock::note_wait(self.word);
        if let Some(which) = PRIORITY_LOCK.get() {
            PRIORITY_WORDS[which].store(self.word.cast_mut(), Ordering::Relaxed);
        }
        SLEEPING_THREADS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        let result = unsafe { self.in_kernel(value) };
        SLEEPING_THREADS.fetch_sub(1, Ordering::Relaxed);
        result
    }

    /// Returns when the wait times out, on the runtime's clock; None if the kernel rejects the
    /// timeout as invalid. `WAIT` takes a relative timeout, `WAIT_BITSET` an absolute one.
    unsafe fn deadline(&self) -> Option<Nanos> {
        // SAFETY: null or a timespec, by the rules of the call.
        let Some(timeout) = (unsafe { self.timeout.as_ref() }) else { return Some(NEVER) };
        let nanos = nanos(timeout)?;
        if self.command() == WAIT {
            return Some(clock::after_nanos(nanos));
        }
        if self.op & REALTIME == 0 {
            return Some(nanos.min(LATEST));
        }
        Some(clock::from_wall(nanos))
    }

    /// Wakes up to `count` waiters.
    unsafe fn wake(&self, count: u32) -> isize {
        // Threads outside decide whether there are waiters for that lock.
        let _undecided = std_lock::is_waited_for_in_kernel(self.word).then(Undecided::begin);
        // SAFETY: the caller's contract.
        let kernel = |count| unsafe { self.in_kernel(count) };
        // Pairs with the count in `park`: this thread sees the sleeper, or the sleeper sees the new
        // value.
        crate::shim::full_fence();
        let has_priority = count == 1 && is_priority_word(self.word);
        let woken = if !has_sleeping_goroutines() {
            kernel(count)
        } else if is_turn_of_threads(count, has_priority) && kernel(1) == 1 {
            1
        } else {
            wake_goroutines_first(self.word, count, count, kernel)
        };
        if has_priority && woken == 1 {
            back_off();
        }
        woken
    }

    /// Makes the system call, and wakes all goroutines at the word: the waiters differ (by their
    /// bitset), or some of them are moved to another word. Each goroutine checks its own condition.
    unsafe fn wake_every_goroutine(&self, value: u32) -> isize {
        // SAFETY: the caller's contract.
        match unsafe { self.in_kernel(value) } {
            woken @ 0.. => woken + wake_goroutines(self.word, u32::MAX),
            error => error,
        }
    }

    /// Makes the system call, and wakes goroutines at both words. Whether those at the second word
    /// should be woken depended on the value that it had before the call, so all of them are.
    unsafe fn wake_op(&self, count: u32) -> isize {
        let word2 = std::ptr::with_exposed_provenance(self.word2);
        // SAFETY: the caller's contract.
        match unsafe { self.in_kernel(count) } {
            woken @ 0.. => {
                woken + wake_goroutines(self.word, count) + wake_goroutines(word2, u32::MAX)
            }
            error => error,
        }
    }
}

/// `futex_wake`, with the arguments in the registers of `syscall`.
unsafe extern "C" fn on_futex_wake(
    number: c_long,
    word: *const AtomicU32,
    mask: usize,
    count: usize,
    flags: usize,
) -> c_long {
    let args = [word as usize, mask, (count as u32) as usize, flags];
    // SAFETY: the caller's arguments, by the rules of the call.
    let result = match unsafe { raw::syscall(number, args) } {
        woken @ 0.. if flags as u32 == SIZE_U32_PRIVATE => {
            let left = (count as u32).saturating_sub(woken as u32);
            // With another mask it is not known which goroutines it matches.
            let max = if mask as u32 == MATCH_ANY { left } else { u32::MAX };
            woken + wake_goroutines(word, max)
        }
        result => result,
    };
    raw::to_libc(result) as c_long
}

/// `futex_requeue`, with the arguments in the registers of `syscall`.
unsafe extern "C" fn on_futex_requeue(
    number: c_long,
    words: *const FutexWaitv,
    flags: usize,
    wakes: usize,
    moves: usize,
) -> c_long {
    // SAFETY: the caller's arguments, by the rules of the call.
    let result = match unsafe { raw::syscall(number, [words as usize, flags, wakes, moves]) } {
        woken @ 0.. => {
            // SAFETY: the kernel has read it.
            let from = unsafe { &*words };
            if from.flags == SIZE_U32_PRIVATE {
                let word = std::ptr::with_exposed_provenance(from.address as usize);
                woken + wake_goroutines(word, u32::MAX)
            } else {
                woken
            }
        }
        result => result,
    };
    raw::to_libc(result) as c_long
}

thread_local! {
    /// The key of the word that this goroutine last waited at, and how often in a row.
    static LAST_WAIT: Cell<(usize, u32)> = const { Cell::new((0, 0)) };
}

/// Counts a wait of this goroutine at the word of `key`. Returns whether the goroutine is starved.
fn count_wait(key: usize) -> bool {
    let (last, times) = LAST_WAIT.get();
    let times = if last == key { times + 1 } else { 0 };
    LAST_WAIT.set((key, times % FAIRNESS_INTERVAL));
    times == FAIRNESS_INTERVAL
}

/// Parks the goroutine until it is woken or `deadline` passes, if the word has the value `value`.
/// Returns the system call's result.
fn park(word: &AtomicU32, value: u32, deadline: Nanos) -> isize {
    let key = key_of(std::ptr::from_ref(word) as usize, FUTEX);
    // The node's weight is 1 if the goroutine is starved.
    let node = Node::of_process(usize::from(count_wait(key)));
    // Before the word is read: pairs with the fence in `FutexCall::wake`.
    SLEEPING_GOROUTINES.fetch_add(1, Ordering::SeqCst);
    note_object(std::ptr::from_ref(word) as usize, deadline);
    let slept = node.sleep(
        WaitReason::Futex,
        deadline,
        |_| {
            FOREIGN.with_queue(key, |queue| {
                // Under the queue's lock: a thread that changes the word and then wakes finds the
                // node.
                let waits = word.load(Ordering::SeqCst) == value;
                if waits {
                    queue.push_back(&node);
                }
                waits
            })
        },
        |_| {
            FOREIGN.with_queue(key, |queue| queue.remove(&node));
        },
    );
    SLEEPING_GOROUTINES.fetch_sub(1, Ordering::Relaxed);
    match slept {
        WaitResult::NotQueued => -libc::EAGAIN as isize,
        WaitResult::Woken(_) => 0,
        WaitResult::TimedOut => -libc::ETIMEDOUT as isize,
    }
}

/// Counts a sleeping goroutine for a simulation: [`super::EnterAtWakes`].
pub(super) fn add_sleeper() {
    SLEEPING_GOROUTINES.fetch_add(1, Ordering::SeqCst);
}

/// Uncounts a sleeping goroutine that [`add_sleeper`] has counted.
pub(super) fn remove_sleeper() {
    SLEEPING_GOROUTINES.fetch_sub(1, Ordering::Relaxed);
}

/// Returns whether a goroutine may have to be woken, after a fence that pairs with [`park`].
#[inline(always)]
fn has_sleeping_goroutines() -> bool {
    SLEEPING_GOROUTINES.load(Ordering::Relaxed) != 0 && !is_forked()
}

/// Returns whether a wake of one waiter is to wake a thread before goroutines. (A wake of all
/// waiters serves both anyway.)
fn is_turn_of_threads(count: u32, has_priority: bool) -> bool {
    count == 1
        && SLEEPING_THREADS.load(Ordering::Relaxed) != 0
        && (WAKES_WITH_THREADS.fetch_add(1, Ordering::Relaxed).is_multiple_of(FAIRNESS_INTERVAL)
            || has_priority)
}

/// Wakes up to `max` goroutines at a word. Called after the system call, which has woken threads.
fn wake_goroutines(word: *const AtomicU32, max: u32) -> isize {
    // Pairs with the count in `park`: this thread sees the sleeper, or the sleeper sees the new
    // value.
    crate::shim::full_fence();
    if max == 0 || !has_sleeping_goroutines() {
        return 0;
    }
    wake_goroutines_first(word, max, 0, |_| 0)
}

/// Wakes a goroutine at a word, inside the runtime. `here` is None without a P.
pub(super) fn wake_goroutine_at(here: Option<Rt>, word: &AtomicU32) {
    if !has_sleeping_goroutines() {
        return;
    }
    let mut batch = Batch::new();
    FOREIGN.with_queue(key_of(std::ptr::from_ref(word) as usize, FUTEX), |queue| {
        if let Some(taken) = queue.take_first() {
            batch.push(taken);
        }
    });
    batch.wake_all(here, 0);
}

/// Wakes up to `max` goroutines, then lets the kernel wake the rest of `count` waiters.
fn wake_goroutines_first(
    word: *const AtomicU32,
    max: u32,
    count: u32,
    kernel: impl Fn(u32) -> isize,
) -> isize {
    let key = key_of(word as usize, FUTEX);
    let mut has_starved = false;
    let mut wake_both = |here| {
        let mut batch = Batch::new();
        FOREIGN.with_queue(key, |queue| {
            while (batch.len() as u32) < max
                && let Some(taken) = queue.take_first()
            {
                has_starved |= taken.node().weight != 0;
                batch.push(taken);
            }
        });
        let n = batch.len() as u32;
        batch.wake_all(here, 0);
        if n >= count {
            return n as isize;
        }
        // Before the runtime is left: a goroutine whose runtime ends may never return from there,
        // and must have woken all waiters by then.
        match kernel(count - n) {
            more @ 0.. => more + n as isize,
            _ if n > 0 => n as isize,
            error => error,
        }
    };
    let woken = match WakeContext::current() {
        WakeContext::Runtime => wait::inside(wake_both),
        WakeContext::Outside => wake_both(None),
        WakeContext::Deferred => {
            // In a signal handler: how many goroutines the helper thread will wake is not known.
            wake_later(key);
            kernel(count)
        }
    };
    if (has_starved || is_to_be_orphaned())
        && let Some(_wait) = begin_wait()
    {
        calls::yield_now();
    }
    woken
}
