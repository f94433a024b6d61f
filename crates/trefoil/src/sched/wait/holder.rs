//! The holder of what a goroutine waits for: the two words from which the wait-for graph is made.
//!
//! - A lock has a [`Holder`], the number of the goroutine or task that holds it.
//! - A goroutine has the *object* that it waits for ([`note_object`]), the address of a lock, a
//!   goroutine or a scope.
//!
//! `observe/waits/` reads both while nothing is stopped. `trefoil dump` and `why` read them from
//! outside the process.
//!
//! Invariants:
//! 1. Only the owner of a lock writes its [`Holder`]: after it has locked, and, to clear it, before
//!    it unlocks. So the word is 0 or names the present owner, never a former one.
//! 2. A goroutine that waits for one of [`HELD_REASONS`] or [`GUESSED_REASONS`] has stored the
//!    object before it parks. So has one that waits for a condition variable: 0, or the mutex to
//!    whose queue a waker has moved it. For other reasons the object is that of an earlier wait,
//!    and means nothing.
//! 3. A lock is read by address only while a sleeper is in its queue (`table.rs`): the sleeper
//!    borrows the lock, so the memory is valid.
//!
//! Rejected: the holder inside the lock word (5 ns per lock); its G's address (a G is reused, so a
//! leaked guard would name a stranger).

use crate::sched::Rt;
use crate::sched::g::G;
use crate::sched::monitor::helper::Helper;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Sched, current_g};
use crate::sys::clock::{NEVER, Nanos};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The waits whose holder may be known.
pub(crate) const HELD_REASONS: [WaitReason; 7] = [
    WaitReason::MutexLock,
    WaitReason::RwLockRead,
    WaitReason::RwLockWrite,
    WaitReason::Once,
    WaitReason::Join,
    WaitReason::Scope,
    WaitReason::PthreadMutex,
];

/// The waits whose object is an address, and whose holder can only be guessed (invariant 2).
pub(crate) const GUESSED_REASONS: [WaitReason; 3] =
    [WaitReason::ChanReceive, WaitReason::ChanSend, WaitReason::Futex];

/// Set in an object: the wait has a deadline.
pub(crate) const HAS_DEADLINE: usize = 1;
/// Set in the object of a writer that holds a read-write lock against new readers, and waits for
/// the active ones. They are only counted.
pub(crate) const FOR_READERS: usize = 2;
const TAGS: usize = HAS_DEADLINE | FOR_READERS;
/// The bits above an address count the waits of the goroutine, so that two waits for the same
/// object differ.
const COUNT_SHIFT: u32 = 48;
const ADDRESS_MASK: usize = ((1 << COUNT_SHIFT) - 1) & !TAGS;

/// The keys of the queues of a lock (`table.rs`) are its address, where its [`Holder`] is, and a
/// tag. A mutex has none. No two types of locks have the same tag, so a sleeper in a queue of a key
/// borrows a lock of this type at the address.
pub(crate) const READERS_TAG: usize = 1;
pub(crate) const WRITER_TAG: usize = 2;
pub(crate) const ONCE_TAG: usize = 3;

/// Returns the key of a queue of `lock`. Its [`Holder`], the first field, is at its address.
pub(crate) fn tagged_key<T>(lock: *const T, tag: usize) -> usize {
    // Else a key could be that of a neighbour.
    const { assert!(align_of::<T>() > ONCE_TAG) };
    lock.addr() + tag
}

/// How to read [`G::waits_for`], and the reasons for which it means something.
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("object.address_mask", ADDRESS_MASK),
    ("object.has_deadline", HAS_DEADLINE),
    ("object.for_readers", FOR_READERS),
    ("reason.mutex", WaitReason::MutexLock as usize),
    ("reason.rwlock_read", WaitReason::RwLockRead as usize),
    ("reason.rwlock_write", WaitReason::RwLockWrite as usize),
    ("reason.cond", WaitReason::CondWait as usize),
    ("reason.once", WaitReason::Once as usize),
    ("reason.join", WaitReason::Join as usize),
    ("reason.scope", WaitReason::Scope as usize),
    ("reason.pthread_mutex", WaitReason::PthreadMutex as usize),
];

/// The offsets of the numbers of handles in a channel.
pub(crate) const CHAN_SENDERS_OFFSET: usize = 116;
pub(crate) const CHAN_RECEIVERS_OFFSET: usize = 120;

/// A lock was unlocked by another goroutine or task than the one that locked it: guards are sent.
pub(crate) static GUARDS_MOVE: AtomicBool = AtomicBool::new(false);

/// The number of the goroutine or task that holds a lock: [`number`]. 0 if the lock is free, or its
/// holder is a plain thread, or the holder has only just locked it.
#[repr(transparent)]
pub(crate) struct Holder(AtomicU32);

impl Holder {
    #[allow(clippy::declare_interior_mutable_const)]
    pub(crate) const NEW: Holder = Holder(AtomicU32::new(0));

    /// Stores the caller, which has just locked the lock.
    #[inline(always)]
    pub(crate) fn set(&self) {
        // Relaxed: a hint. The lock orders the stores of its owners.
        self.0.store(caller(), Ordering::Relaxed);
    }

    /// Returns the number that is stored. For the owner of the lock.
    pub(crate) fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Forgets the holder, which is about to unlock. Returns the number that was stored.
    #[inline(always)]
    pub(crate) fn clear(&self) -> u32 {
        let holder = self.0.load(Ordering::Relaxed);
        self.0.store(0, Ordering::Relaxed);
        holder
    }
}

/// Called by the unlocker of a lock that is waited for: notes if another goroutine has locked it.
pub(crate) fn note_unlock(holder: u32) {
    if holder != 0 && holder != caller() {
        GUARDS_MOVE.store(true, Ordering::Relaxed);
    }
}

/// Notes that guards may be dropped by other goroutines than those that locked: futures that hold
/// guards go from goroutine to goroutine, on an executor that is not the runtime's.
#[cfg(feature = "tokio")]
pub(crate) fn assume_guards_move() {
    GUARDS_MOVE.store(true, Ordering::Relaxed);
}

/// Returns whether a guard was ever dropped by another goroutine than the one that locked. Then a
/// [`Holder`] need not be the goroutine that will unlock.
pub(crate) fn guards_move() -> bool {
    GUARDS_MOVE.load(Ordering::Relaxed)
}

/// Returns the number of the running goroutine, or of the task that it polls; 0 on a plain thread.
#[inline(always)]
fn caller() -> u32 {
    current_g().map_or(0, |g| g.holder_number.load(Ordering::Relaxed))
}

/// Returns the number by which locks know the goroutine or task with this id. It is unique in a
/// runtime for 2³² ids, and in the process as far as a hash can be.
#[inline(always)]
pub(crate) fn number(sched: &Sched, id: u64) -> u32 {
    id as u32 ^ sched.holder_salt()
}

/// Stores what the running goroutine is about to wait for.
pub(crate) fn note_object(object: usize, deadline: Nanos) {
    debug_assert!(object & HAS_DEADLINE == 0);
    if let Some(g) = current_g() {
        let limited = if deadline == NEVER { 0 } else { HAS_DEADLINE };
        let count = (g.waits_for.load(Ordering::Relaxed) >> COUNT_SHIFT).wrapping_add(1);
        g.waits_for.store(count << COUNT_SHIFT | object | limited, Ordering::Relaxed);
    }
}

/// Stores that the sleeping goroutine `g`, which a waker has taken, waits for the mutex at `object`
/// from now on instead of a condition variable. [`note_wait`] follows.
pub(crate) fn note_moved(g: &G, object: usize) {
    // Not lost: `g` stores nothing until its waker wakes it.
    let count = (g.waits_for.load(Ordering::Relaxed) >> COUNT_SHIFT).wrapping_add(1);
    g.waits_for.store(count << COUNT_SHIFT | object, Ordering::Relaxed);
}

/// As [`note_object`], inside the runtime, for a channel: a wait that is never part of a certain
/// cycle, and frequent, is not counted.
#[inline(always)]
pub(crate) fn note_chan(rt: Rt, object: usize, deadline: Nanos) {
    let g = rt.g();
    let limited = if deadline == NEVER { 0 } else { HAS_DEADLINE };
    let count = g.waits_for.load(Ordering::Relaxed) & !((1 << COUNT_SHIFT) - 1);
    g.waits_for.store(count | object | limited, Ordering::Relaxed);
}

/// As [`note_object`], for a wait that can be part of a cycle: has the helper thread check for
/// cycles after a while.
pub(crate) fn note_held_object(object: usize, deadline: Nanos) {
    note_object(object, deadline);
    if deadline == NEVER {
        note_wait();
    }
}

/// Has the helper thread of the running goroutine's runtime check for cycles after a while.
pub(crate) fn note_wait() {
    if let Some(g) = current_g() {
        // SAFETY: a goroutine that runs keeps its runtime.
        unsafe { &*g.sched.get() }.wait_check.note_wait();
    }
}

/// Returns the address, and whether [`HAS_DEADLINE`] and [`FOR_READERS`] are set.
pub(crate) fn parts(object: usize) -> (usize, bool, bool) {
    (object & ADDRESS_MASK, object & HAS_DEADLINE != 0, object & FOR_READERS != 0)
}

/// Returns the number of the holder of the lock at `address`, for which a goroutine waits for this
/// reason; 0 if it is not known, or no goroutine waits there any more.
pub(crate) fn holder_of(reason: WaitReason, address: usize) -> u32 {
    let key = match reason {
        WaitReason::MutexLock | WaitReason::RwLockWrite => address,
        WaitReason::RwLockRead => address + READERS_TAG,
        WaitReason::Once => address + ONCE_TAG,
        _ => return 0,
    };
    super::table::with_queue(key, |queue| {
        if queue.is_empty() {
            return 0;
        }
        // SAFETY: invariant 3: a sleeper is in the queue, and the queue's lock keeps it there. It
        // borrows a lock at `address`, whichever of the key's type it is, and that begins with its
        // holder.
        unsafe { &*(address as *const Holder) }.0.load(Ordering::Relaxed)
    })
}

/// The part of a runtime that has its helper thread check for cycles.
pub(crate) struct WaitCheck {
    /// Goroutines have begun to wait for locks since [`WaitCheck::take_note`].
    noted: AtomicBool,
    helper: &'static Helper,
    /// The results of the checks. Only the helper thread uses it.
    pub(crate) memory: Mutex<CheckMemory>,
}

/// Which cycles the helper thread has found, as numbers that stand for them.
#[derive(Default)]
pub(crate) struct CheckMemory {
    /// Found by the last check, and not reported.
    pub(crate) found: Vec<u64>,
}

impl WaitCheck {
    pub(crate) fn new(helper: &'static Helper) -> WaitCheck {
        WaitCheck { noted: AtomicBool::new(false), helper, memory: Mutex::default() }
    }

    /// Notes a wait, and wakes the helper thread if it is the first since
    /// [`WaitCheck::take_note`].
    #[inline]
    fn note_wait(&self) {
        if !self.noted.load(Ordering::Relaxed) && !self.noted.swap(true, Ordering::Relaxed) {
            self.helper.wake();
        }
    }

    /// Returns whether a wait was noted since the last call. The caller checks later: a goroutine
    /// notes its wait before it parks, and a wait that is noted meanwhile needs another check.
    pub(crate) fn take_note(&self) -> bool {
        self.noted.load(Ordering::Relaxed) && self.noted.swap(false, Ordering::Relaxed)
    }
}
