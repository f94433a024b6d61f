//! Memory of goroutines: stacks, each with its thread-local storage on top.
//!
//! ```text
//!   StackCache (one a P)       StackPool (one a size)        unused slots (mapped, cost nothing)
//!   ≤ 64 stacks, hot      ⇄    1,024 trimmed to      →   TLS destroyed, pages given back,
//!   pop/push: 1–2 ns     32    16 KiB, TLS kept      ←   guard kept; made anew in batches of 16
//!                              more after a burst
//! ```
//! A stack moves right when there are too many of them, and left when a P needs one. So a steady
//! load stays in the caches, a load that moves between Ps goes through the pool in batches, and
//! after a burst of a million goroutines the memory goes back to the kernel: not at once, but when it was not needed
//! for half a second ([`Scavenger`]).
//!
//! | file | job |
//! |---|---|
//! | `arena.rs` | address space: chunks, slots, size classes, credits |
//! | `stack.rs` | what lies in a slot; making and retiring stacks |
//! | `pool.rs` | the bounded pool between the caches (checked with loom) |
//! | `tls/` | the TLS block |
//! | `magazine.rs` | free blocks of the program's allocator, kept by an M |
//!
//! **Credits.** `go` takes one with `reserve_one`, or with [`acquire`] together with the stack;
//! with it, `pop` or `refill` cannot run out of slots (`arena.rs`, invariants 1 and 2). It is given
//! back in one of two ways:
//! - `unreserve_one`, if the stack goes to `push`. At that moment the stack is in a cache, or in the
//!   hands of a P's owner who will push it or run the next goroutine on it, without user code in
//!   between: else stacks without a credit pile up, and invariant 2 is broken.
//! - [`release`] does it, if the stack came from [`acquire`].
//!
//! Everything here may be called with any FS base. A [`StackCache`] belongs to a P, so its methods are called
//! inside the runtime; they do not call malloc (but for a DTV that glibc has enlarged). [`refill_pool`] and
//! [`acquire`] do, for what hangs on a block: never with one of our locks held, but for the gate, which
//! only [`for_each_block`] waits at.

mod arena;
pub(crate) mod magazine;
mod mmap_vec;
mod stack;
mod stack_pool;
pub(crate) mod tls;

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};

use self::arena::{CLASSES, SizeClass, SlotList};
pub(crate) use self::arena::{LOCAL_MAX, ReserveError};
pub(crate) use self::mmap_vec::MmapVec;
pub(crate) use self::stack::Stack;
use self::stack::{StackConfig, StackTop};
use self::stack_pool::{Batch, PoolState, StackPool};
use crate::sys::clock::{NEVER, Nanos};
use crate::sys::lock::Lock;
use crate::sys::mm;

/// Stacks that move between a cache and the pool at once: half a cache, so that a P which
/// alternates between ends and starts of goroutines meets the pool once in 32 of them.
const BATCH: usize = LOCAL_MAX / 2;

/// Stacks made at once when the pool is empty. Fewer than a batch: each costs two pages and 2–3
/// µs, and a program of five goroutines should not pay for 32.
const FRESH_BATCH: usize = 16;

/// Default-size stacks that the pool keeps for good: 16 MiB if every one of them keeps its 16 KiB.
const POOL_MAX: usize = 1024;

/// Stacks of any other size in their pool.
const POOL_MAX_OTHER: usize = 16;

/// Credits taken from the class_stats at once: a spawn pays for the lock once in 64.
const CREDIT_BATCH: usize = 64;

/// Credits a cache may keep. Two batches, so that a P at the edge does not go back and forth.
const CREDITS_MAX: usize = 2 * CREDIT_BATCH;

/// One a size class; what lies in it is initialised and recycled.
static POOLS: [StackPool<StackTop>; CLASSES] =
    [const { StackPool::new(Lock::new(PoolState::new())) }; CLASSES];

/// A P's refill_pool of stacks and credits. Only the P's owner touches it.
///
/// Enrolled (`limit == LOCAL_MAX`): entitled to `LOCAL_MAX` stacks in the class_stats. Dismissed (`limit
/// == 0`, after [`StackCache::drain`]): holds nothing; `refill` and `reserve_one` register it again,
/// and a stack pushed meanwhile goes straight to the pool.
///
/// `stacks.len() < LOCAL_MAX` between calls: the one that its owner holds in hand fits too.
pub(crate) struct StackCache {
    stacks: Batch<StackTop>,
    limit: u32,
    credits: u32,
    class: SizeClass,
}

impl StackCache {
    /// An empty cache, enrolled. The first one fixes what [`configure`] set.
    pub(crate) fn new() -> io::Result<Self> {
        let class = StackConfig::get()?.default();
        let mut cache = StackCache { stacks: Batch::new(), limit: 0, credits: 0, class };
        cache.register()?;
        Ok(cache)
    }

    /// The stack that was pushed last, its cache lines warm. None: `refill`.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Stack> {
        // SAFETY: a node of our batch is a stack that nobody else holds; the handle takes it over.
        self.stacks.pop().map(|top| unsafe { Stack::from_top(top) })
    }

    /// Fetches stacks from the pool when `pop` had none, and returns one. None: the pool is empty, and
    /// [`refill_pool`] fills it.
    #[cold]
    pub(crate) fn refill(&mut self) -> io::Result<Option<Stack>> {
        debug_assert!(self.stacks.is_empty());
        self.register()?;
        if let Ok(batch) = POOLS[self.class.index()].take_or_else(BATCH, || ()) {
            debug_assert!(batch.len() <= LOCAL_MAX);
            self.stacks = batch;
        }
        Ok(self.pop())
    }

    /// Takes back a default-size stack, recycled; its credit is `unreserve_one`'s. Nobody runs on
    /// it any more: a full cache gives stacks on, and their deep pages away.
    #[inline]
    pub(crate) fn push(&mut self, mut stack: Stack) {
        debug_assert!(stack.class() == self.class, "other sizes go to release()");
        stack.take_own_credit(); // of `acquire`; from here on it is one like any other
        // SAFETY: the handle owned the stack; the batch does now.
        unsafe { self.stacks.push(stack.into_top()) };
        if self.stacks.len() >= self.limit as usize {
            self.push_slow();
        }
    }

    /// Full: the older half goes to the pool. Dismissed: everything does.
    #[cold]
    fn push_slow(&mut self) {
        let spill = if self.limit == 0 {
            std::mem::replace(&mut self.stacks, Batch::new())
        } else {
            self.stacks.split_off(LOCAL_MAX - BATCH)
        };
        deposit(self.class, POOL_MAX, spill);
    }

    /// Takes a credit: one stack will be there when it is needed. An error is the answer to `go`.
    #[inline]
    pub(crate) fn reserve_one(&mut self) -> Result<(), ReserveError> {
        if self.credits == 0 {
            return self.reserve_slow();
        }
        self.credits -= 1;
        Ok(())
    }

    #[cold]
    fn reserve_slow(&mut self) -> Result<(), ReserveError> {
        self.register()?;
        // At the edge of what can be had a whole batch may be too much and one not.
        if arena::reserve(self.class, CREDIT_BATCH).is_ok() {
            self.credits = CREDIT_BATCH as u32 - 1;
            return Ok(());
        }
        arena::reserve(self.class, 1)
    }

    /// Returns a credit, after the stack it stood for.
    #[inline]
    pub(crate) fn unreserve_one(&mut self) {
        self.credits += 1;
        if self.credits as usize > CREDITS_MAX {
            self.credits -= CREDIT_BATCH as u32;
            arena::unreserve(self.class, CREDIT_BATCH);
        }
    }

    /// Gives up everything: stacks to the pool, credits to the class_stats, and the entitlement. For a P
    /// that retires; the cache may be used again.
    #[cold]
    pub(crate) fn drain(&mut self) {
        while !self.stacks.is_empty() {
            let rest = self.stacks.split_off(BATCH);
            deposit(self.class, POOL_MAX, std::mem::replace(&mut self.stacks, rest));
        }
        arena::unreserve(self.class, std::mem::take(&mut self.credits) as usize);
        if std::mem::take(&mut self.limit) != 0 {
            arena::unregister_cache(self.class);
        }
    }

    fn register(&mut self) -> Result<(), ReserveError> {
        if self.limit == 0 {
            arena::register_cache(self.class)?;
            self.limit = LOCAL_MAX as u32;
        }
        Ok(())
    }
}

/// Makes a batch of default-size stacks for the pool. It may wait for malloc's locks, whose holders may be
/// goroutines: not with a P in hand. Who holds a credit calls this until the pool has a stack: there is a
/// slot for it, but it may pass through other hands. An error is the kernel's (no page for the guard's
/// table) or that of `tls::create`.
#[cold]
pub(crate) fn refill_pool() -> io::Result<()> {
    let class = StackConfig::get()?.default();
    tls::ensure_dtv_buffers(FRESH_BATCH);
    let slots = arena::take_unused::<FRESH_BATCH>(class, FRESH_BATCH);
    if slots.len() > 0 {
        // Not `deposit`: there is nothing to trim, and somebody wants them.
        let rejected = POOLS[class.index()].put(make(&slots)?, usize::MAX);
        debug_assert!(rejected.is_none());
    }
    Ok(())
}

/// A stack of at least `size` bytes (guard and TLS block included: `stack::class_of`), with its own credit. For sizes
/// other than the default, and for threads without a P.
pub(crate) fn acquire(size: usize) -> io::Result<Stack> {
    let class = stack::class_of(size)?;
    StackConfig::get()?;
    arena::reserve(class, 1)?;
    let got = POOLS[class.index()].take_one_or_else(|| arena::take_unused::<1>(class, 1));
    let top = match got {
        Ok(top) => Ok(top),
        Err(slots) => make(&slots).and_then(|mut batch| batch.pop().ok_or_else(no_slot)),
    };
    match top {
        Ok(top) => {
            // SAFETY: taken out of the pool or just made: ours alone.
            let mut stack = unsafe { Stack::from_top(top) };
            stack.set_own_credit();
            Ok(stack)
        }
        Err(e) => {
            arena::unreserve(class, 1);
            Err(e)
        }
    }
}

/// Takes back a stack of any size, and recycles it; takes the credit too, if the stack carries one.
/// Nobody runs on the stack.
pub(crate) fn release(mut stack: Stack) {
    stack.recycle();
    let class = stack.class();
    let max = if stack.is_default_size() { POOL_MAX } else { POOL_MAX_OTHER };
    let credit = stack.take_own_credit();
    let mut batch = Batch::new();
    // SAFETY: the handle owned the stack; the batch does now.
    unsafe { batch.push(stack.into_top()) };
    deposit(class, max, batch);
    // After the slot is to be had again, or the promise would be larger than the refill_pool.
    if credit {
        arena::unreserve(class, 1);
    }
}

/// [`StackCache::reserve_one`] for a thread without a P.
pub(crate) fn reserve_one() -> io::Result<()> {
    Ok(arena::reserve(StackConfig::get()?.default(), 1)?)
}

/// [`StackCache::unreserve_one`] for a thread without a P.
#[cfg(test)]
pub(crate) fn unreserve_one() {
    if let Ok(config) = StackConfig::get() {
        arena::unreserve(config.default(), 1);
    }
}

/// Sets the default stack size (rounded up to a power of two) and whether TLS blocks keep glibc's
/// reserve for dlopen. Before the first stack; afterwards an error, unless it changes nothing.
pub(crate) fn configure(default_size: usize, reserve: bool) -> io::Result<()> {
    StackConfig::configure(default_size, reserve)
}

/// Guards by mprotect whatever the kernel can: to test what an older one would do. Before the first
/// stack.
pub(crate) fn force_mprotect_guards() {
    mm::force_mprotect_guards();
}

/// Calls `f` with the thread pointer of every initialised stack: in use, cached or pooled. No stack
/// is made or retired meanwhile, so `f` must not spawn, and should be short.
pub(crate) fn for_each_block(f: &mut dyn FnMut(NonNull<u8>)) {
    stack::for_each_block(f);
}

/// A slot, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotInfo {
    /// First byte above the guard.
    pub(crate) low: usize,
    /// End of the slot.
    pub(crate) high: usize,
    /// Bytes of the slot, guard included.
    pub(crate) size: usize,
    /// [`Stack::index`] of its stack.
    pub(crate) index: u32,
}

/// Whether a fault at `addr` hit the guard of a stack. Async-signal-safe: reads the registry, no
/// lock.
pub(crate) fn guard_hit(addr: usize) -> Option<SlotInfo> {
    slot_at(addr).filter(|slot| addr < slot.low)
}

/// The slot that `addr` lies in, guard or not. Lock-free.
pub(crate) fn slot_at(addr: usize) -> Option<SlotInfo> {
    let slot = arena::slot_at(addr)?;
    let (low, high, size) = (slot.low(), slot.end(), slot.class().slot_bytes());
    Some(SlotInfo { low, high, size, index: slot.index() })
}

/// What the arena has, all sizes together. Each number is right, but not all at the same instant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArenaStats {
    /// Address space of slots, in bytes.
    pub(crate) mapped_bytes: usize,
    /// Chunks mapped.
    pub(crate) chunks: usize,
    /// Slots mapped.
    pub(crate) slots: usize,
    /// Slots with an initialised stack: running, cached or pooled.
    pub(crate) live: usize,
    /// Of those, stacks in the depots.
    pub(crate) pooled: usize,
    /// Slots that cost nothing.
    pub(crate) unused: usize,
    /// Credits out.
    pub(crate) reserved: usize,
    /// Caches enrolled.
    pub(crate) caches: usize,
}

/// Reads the class_stats.
pub(crate) fn stats() -> ArenaStats {
    let mut s = ArenaStats::default();
    for chunk in arena::chunks() {
        s.chunks += 1;
        s.mapped_bytes += chunk.bytes();
        s.live += chunk.live();
    }
    for (i, pool) in POOLS.iter().enumerate() {
        let class_stats = arena::class_stats(SizeClass::from_index(i));
        s.slots += class_stats.slots;
        s.unused += class_stats.unused;
        s.reserved += class_stats.reserved;
        s.caches += class_stats.caches;
        s.pooled += pool.len();
    }
    s
}

/// Makes stacks in slots in hand.
fn make<const N: usize>(slots: &SlotList<N>) -> io::Result<Batch<StackTop>> {
    stack::make(slots, StackConfig::get()?)
}

/// Puts stacks into their pool, trimmed. If that is full: those of the default size all the same, untrimmed, because
/// giving memory back takes longer than a goroutine lives, and whoever ends one is in a hurry; [`Scavenger`] sees to
/// them. Others are retired.
fn deposit(class: SizeClass, max: usize, batch: Batch<StackTop>) {
    let pool = &POOLS[class.index()];
    if pool.has_room(batch.len(), max) {
        // Trimmed before it is put, so that nobody takes it out in between.
        stack::trim(&batch);
    } else if max != POOL_MAX {
        return stack::retire(class, batch);
    } else if SURPLUS.load(Ordering::Relaxed) == NONE {
        // Not over a scavenger's answer. Nothing is published with it.
        let (relaxed, told) = (Ordering::Relaxed, UNATTENDED);
        let _ = SURPLUS.compare_exchange(NONE, told, relaxed, relaxed);
    }
    let rejected = pool.put(batch, usize::MAX);
    debug_assert!(rejected.is_none());
}

/// Whether there may be more unused stacks than are kept for good, and whether a scavenger knows. A hint.
static SURPLUS: AtomicU8 = AtomicU8::new(NONE);
const NONE: u8 = 0;
const UNATTENDED: u8 = 1;
const ATTENDED: u8 = 2;

/// Whether a [`Scavenger`] should be put to work.
pub(crate) fn has_surplus() -> bool {
    SURPLUS.load(Ordering::Relaxed) == UNATTENDED
}

/// Gives the memory of stacks back that nobody needed for a while: after a burst, not in it.
///
/// Every [`Scavenger::PERIOD`] it learns how few stacks lay in the pool at one moment of the period: so many were not
/// needed, and go, but for [`POOL_MAX`]. A little at a time, half of a CPU at most. On a thread without a P.
pub(crate) struct Scavenger {
    /// When to go on; `NEVER` if there is nothing to do.
    next: Nanos,
    /// Of those that were not needed, how many are still here.
    to_retire: usize,
}

impl Scavenger {
    const PERIOD: Nanos = 500_000_000;
    /// Stacks at a time, and the pause after it: they take about as long.
    const STEP: usize = 512;
    const PAUSE: Nanos = 1_000_000;

    pub(crate) const fn new() -> Scavenger {
        Scavenger { next: NEVER, to_retire: 0 }
    }

    /// Does what is due by the clock, and says when there will be more to do.
    pub(crate) fn run_due(&mut self, clock: impl Fn() -> Nanos) -> Nanos {
        let Ok(config) = StackConfig::get() else { return NEVER };
        let class = config.default();
        let pool = &POOLS[class.index()];
        if has_surplus() {
            SURPLUS.store(ATTENDED, Ordering::Relaxed);
            // What it will have in hand counts in the class_stats, as a cache's stacks do.
            if self.next == NEVER {
                if arena::register_cache(class).is_err() {
                    // The next stack that comes is another chance.
                    SURPLUS.store(NONE, Ordering::Relaxed);
                    return NEVER;
                }
                pool.unneeded();
                self.next = clock() + Self::PERIOD;
            }
        }
        if clock() < self.next {
            return self.next;
        }
        if self.to_retire == 0 {
            self.to_retire = pool.unneeded();
        }
        // Some may have been needed since.
        self.to_retire = self.to_retire.min(pool.len().saturating_sub(POOL_MAX));
        let step = self.to_retire.min(Self::STEP);
        self.to_retire -= retire_pooled(class, step).min(self.to_retire);
        if self.to_retire > 0 {
            self.next = clock() + Self::PAUSE;
            return self.next;
        }
        // In this order: what comes later is noticed there or here.
        SURPLUS.store(NONE, Ordering::SeqCst);
        if pool.has_room(0, POOL_MAX) {
            self.next = NEVER;
            arena::unregister_cache(class);
        } else {
            SURPLUS.store(ATTENDED, Ordering::Relaxed);
            self.next = clock() + Self::PERIOD;
        }
        self.next
    }

    /// All of it, at once: nobody will come again. (Or somebody of another runtime does.)
    pub(crate) fn finish(mut self) {
        let Ok(config) = StackConfig::get() else { return };
        let class = config.default();
        let attended = std::mem::replace(&mut self.next, NEVER) != NEVER;
        if attended || arena::register_cache(class).is_ok() {
            retire_pooled(class, POOLS[class.index()].len().saturating_sub(POOL_MAX));
            arena::unregister_cache(class);
        }
        if attended {
            SURPLUS.store(UNATTENDED, Ordering::Relaxed);
        }
    }
}

/// Retires about so many default-size stacks of the pool; how many it were.
fn retire_pooled(class: SizeClass, most: usize) -> usize {
    let mut given = 0;
    while given < most
        && let Ok(batch) = POOLS[class.index()].take_or_else(BATCH, || ())
    {
        given += batch.len();
        stack::retire(class, batch);
    }
    given
}

/// Invariant 2 of the arena is broken: someone took a stack without a credit.
#[cold]
fn no_slot() -> io::Error {
    debug_assert!(false, "a stack was asked for without a credit");
    io::Error::new(
        io::ErrorKind::OutOfMemory,
        "no goroutine stack is left (trefoil bug: no credit)",
    )
}

#[cfg(test)]
mod tests;
