//! Memory of goroutines: stacks, each with its thread-local storage on top.
//!
//! ```text
//!   StackCache (per P)         StackPool (per size)       unused slots (mapped, cost nothing)
//!   ≤ 64 stacks, hot      ⇄    1,024 trimmed to      →    TLS destroyed, pages discarded,
//!   pop/push: 1–2 ns     32    16 KiB, TLS kept;     ←    guard kept; made again in batches of 16
//!                              more after a burst
//! ```
//! A stack moves right when there are too many, and left when a P needs one. So a steady load stays
//! in the caches, and a load that moves between Ps goes through the pool in batches. After a burst
//! of a million goroutines the memory returns to the kernel: not at once, but when it was not
//! needed for half a second ([`Scavenger`]).
//!
//! | file | job |
//! |---|---|
//! | `arena.rs` | address space: chunks, slots, credits |
//! | `size_class.rs` | sizes of slots, and slots per chunk |
//! | `stack.rs` | the layout of a slot; makes and retires stacks |
//! | `stack_pool.rs` | the pool between the caches (checked with loom) |
//! | `scavenger.rs` | retires pooled stacks that were not needed |
//! | `tls/` | TLS blocks |
//! | `magazine.rs` | free blocks of the program's allocator, cached per M |
//! | `mmap_vec.rs` | a vector without malloc |
//!
//! **Credits.** A credit reserves one stack. `go` takes one with `reserve_one`, or with [`acquire`]
//! together with the stack. With a credit, `pop` or `refill` cannot run out of slots (`arena.rs`,
//! invariants 1 and 2). It is returned in one of two ways:
//! - by `unreserve_one`, if the stack goes to `push`. At that moment the stack is in a cache, or
//!   the thread that owns the P has it and will push it or run the next goroutine on it, without
//!   user code in between. Otherwise stacks without a credit would accumulate and break invariant
//!   2.
//! - by [`release`], if the stack came from [`acquire`].
//!
//! Everything here may be called with any FS base. A [`StackCache`] belongs to a P, so its methods
//! are called inside the runtime and do not call malloc. [`refill_pool`], [`acquire`], [`release`]
//! and the scavenger call malloc, for the DTV of a TLS block (`tls/`). They hold no lock of the
//! runtime meanwhile, except `stack::LIVE_LOCK` in shared mode; only [`for_each_block`] waits for
//! its shared holders.

mod arena;
pub mod magazine;
mod mmap_vec;
mod scavenger;
mod size_class;
mod stack;
mod stack_pool;
pub mod tls;

use std::io;
use std::ptr::NonNull;

use self::arena::SlotList;
pub use self::arena::{LOCAL_MAX, ReserveError};
pub use self::mmap_vec::MmapVec;
pub use self::scavenger::{Scavenger, has_surplus};
use self::size_class::{CLASSES, SizeClass};
pub use self::stack::{LAYOUT, Stack};
use self::stack::{StackConfig, StackTop};
use self::stack_pool::{PoolState, StackBatch, StackPool};
use crate::sys::lock::Lock;
use crate::sys::mm;

/// Stacks that move between a cache and the pool at once: half a cache, so that a P that
/// alternately ends and starts goroutines uses the pool once per 32 of them.
const BATCH: usize = LOCAL_MAX / 2;

/// Stacks made at once when the pool is empty. Fewer than a batch: each costs two pages and 2–3 µs,
/// and a program with five goroutines should not pay for 32.
const FRESH_BATCH: usize = 16;

/// Default-size stacks that the pool keeps for good: 16 MiB if each keeps its 16 KiB.
const POOL_MAX: usize = 1024;

/// Stacks of any other size class that their pool keeps.
const POOL_MAX_OTHER: usize = 16;

/// Credits reserved at once: a spawn takes the class pool's lock once per 64.
const CREDIT_BATCH: usize = 64;

/// Credits that a cache may keep. Two batches, so that a P at the limit does not return and reserve
/// a batch over and over.
const CREDITS_MAX: usize = 2 * CREDIT_BATCH;

/// One pool per size class. The stacks in it are initialised and recycled.
static POOLS: [StackPool<StackTop>; CLASSES] =
    [const { StackPool::new(Lock::new(PoolState::new())) }; CLASSES];

fn pool_of(class: SizeClass) -> &'static StackPool<StackTop> {
    &POOLS[class.index()]
}

/// The stacks and credits that a P keeps. Only the thread that owns the P uses it.
///
/// | `limit` | meaning |
/// |---|---|
/// | `LOCAL_MAX` | registered with the arena, which reserves `LOCAL_MAX` stacks for it |
/// | 0 | not registered (after [`StackCache::drain`]) and empty |
///
/// `refill` and `reserve_one` register it again. A stack pushed while it is not registered goes to
/// the pool at once.
///
/// Between calls `stacks.len() < LOCAL_MAX`: so the stack that the P's owner has taken out fits
/// too.
pub struct StackCache {
    stacks: StackBatch<StackTop>,
    /// See the table.
    limit: u32,
    /// Credits that are reserved and that no goroutine has taken.
    credits: u32,
    /// The class of the default size.
    class: SizeClass,
}

impl StackCache {
    /// Makes an empty, registered cache. The first one fixes the settings of [`configure`].
    pub fn new() -> io::Result<Self> {
        let class = StackConfig::get()?.default();
        let mut cache = StackCache { stacks: StackBatch::new(), limit: 0, credits: 0, class };
        cache.register()?;
        Ok(cache)
    }

    /// Takes the stack that was pushed last: its cache lines are warm. If it returns None, call
    /// `refill`.
    #[inline]
    pub fn pop(&mut self) -> Option<Stack> {
        // SAFETY: the batch owned the stack of the node; the handle owns it now.
        self.stacks.pop().map(|top| unsafe { Stack::from_top(top) })
    }

    /// Fetches stacks from the pool after `pop` returned None, and takes one. If it returns None
    /// the pool is empty: call [`refill_pool`].
    #[cold]
    pub fn refill(&mut self) -> io::Result<Option<Stack>> {
        debug_assert!(self.stacks.is_empty());
        self.register()?;
        if let Ok(batch) = pool_of(self.class).take_or_else(BATCH, || ()) {
            debug_assert!(batch.len() <= LOCAL_MAX);
            self.stacks = batch;
        }
        Ok(self.pop())
    }

    /// Takes back a recycled stack of the default size; its credit is returned by `unreserve_one`.
    /// No code runs on the stack any more: a full cache gives stacks to the pool, which discards
    /// their deep pages.
    #[inline]
    pub fn push(&mut self, mut stack: Stack) {
        debug_assert!(stack.class() == self.class, "other sizes go to release()");
        stack.take_own_credit(); // of `acquire`; from here on it is a stack like any other
        // SAFETY: the handle owned the stack; the batch owns it now.
        unsafe { self.stacks.push(stack.into_top()) };
        if self.stacks.len() >= self.limit as usize {
            self.push_slow();
        }
    }

    /// Moves the older half to the pool if the cache is full, and all stacks if it is not
    /// registered.
    #[cold]
    fn push_slow(&mut self) {
        let surplus = if self.limit == 0 {
            std::mem::replace(&mut self.stacks, StackBatch::new())
        } else {
            self.stacks.split_off(LOCAL_MAX - BATCH)
        };
        deposit_default(self.class, surplus);
    }

    /// Takes a credit: a stack will be available when it is needed. An error becomes the error of
    /// `go`.
    pub fn reserve_one(&mut self) -> Result<(), ReserveError> {
        if self.credits == 0 {
            return self.reserve_slow();
        }
        self.credits -= 1;
        Ok(())
    }

    /// Reserves a batch of credits and takes one of them.
    #[cold]
    fn reserve_slow(&mut self) -> Result<(), ReserveError> {
        self.register()?;
        // Close to the limit a whole batch may be too much where a single credit is not.
        if arena::reserve(self.class, CREDIT_BATCH).is_ok() {
            self.credits = CREDIT_BATCH as u32 - 1;
            return Ok(());
        }
        arena::reserve(self.class, 1)
    }

    /// Returns a credit, after its stack was returned.
    #[inline]
    pub fn unreserve_one(&mut self) {
        self.credits += 1;
        if self.credits as usize > CREDITS_MAX {
            self.credits -= CREDIT_BATCH as u32;
            arena::unreserve(self.class, CREDIT_BATCH);
        }
    }

    /// Gives up everything: stacks to the pool, credits and registration to the arena. For a P that
    /// is removed; the cache may be used again.
    #[cold]
    pub fn drain(&mut self) {
        while !self.stacks.is_empty() {
            let rest = self.stacks.split_off(BATCH);
            deposit_default(self.class, std::mem::replace(&mut self.stacks, rest));
        }
        arena::unreserve(self.class, std::mem::take(&mut self.credits) as usize);
        if std::mem::take(&mut self.limit) != 0 {
            arena::unregister_cache(self.class);
        }
    }

    /// Registers the cache with the arena, unless it is registered.
    fn register(&mut self) -> Result<(), ReserveError> {
        if self.limit == 0 {
            arena::register_cache(self.class)?;
            self.limit = LOCAL_MAX as u32;
        }
        Ok(())
    }
}

/// Makes a batch of default-size stacks for the pool. The holder of a credit calls this until it
/// gets a stack: there is a slot for it, but other threads may take the stack first.
///
/// It may wait for malloc's locks, which goroutines may hold: so the caller must not own a P.
///
/// # Errors
/// `ENOMEM` if the kernel has no memory for the page table of a guard; the errors of `tls::create`.
#[cold]
pub fn refill_pool() -> io::Result<()> {
    let class = StackConfig::get()?.default();
    tls::ensure_dtv_buffers(FRESH_BATCH);
    let slots = arena::take_unused::<FRESH_BATCH>(class, FRESH_BATCH);
    if slots.len() > 0 {
        // Not `deposit_default`: there is nothing to trim, and a goroutine waits for a stack.
        put(class, make(&slots)?);
    }
    Ok(())
}

/// Takes a stack of at least `size` bytes (guard and TLS block included: `stack::class_of`) with a
/// credit of its own. For sizes other than the default, and for threads without a P.
pub fn acquire(size: usize) -> io::Result<Stack> {
    let class = stack::class_of(size)?;
    StackConfig::get()?;
    arena::reserve(class, 1)?;
    let taken = pool_of(class).take_one_or_else(|| arena::take_unused::<1>(class, 1));
    let top = match taken {
        Ok(top) => Ok(top),
        Err(slots) => make(&slots).and_then(|mut batch| batch.pop().ok_or_else(no_slot)),
    };
    match top {
        Ok(top) => {
            // SAFETY: taken from the pool or just made, so no other handle to it exists.
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

/// Takes back a stack of any size, recycles it, and returns its credit if it has one of its own. No
/// code runs on the stack any more.
pub fn release(mut stack: Stack) {
    stack.recycle();
    let (class, is_default) = (stack.class(), stack.is_default_size());
    let has_credit = stack.take_own_credit();
    let mut batch = StackBatch::new();
    // SAFETY: the handle owned the stack; the batch owns it now.
    unsafe { batch.push(stack.into_top()) };
    if is_default {
        deposit_default(class, batch)
    } else {
        deposit_other(class, batch)
    }
    // Only after the slot is available again; otherwise credits could exceed slots.
    if has_credit {
        arena::unreserve(class, 1);
    }
}

/// Does what [`StackCache::reserve_one`] does, for a thread without a P.
pub fn reserve_one() -> io::Result<()> {
    Ok(arena::reserve(StackConfig::get()?.default(), 1)?)
}

/// Does what [`StackCache::unreserve_one`] does, for a thread without a P.
#[cfg(test)]
pub fn unreserve_one() {
    if let Ok(config) = StackConfig::get() {
        arena::unreserve(config.default(), 1);
    }
}

/// Sets the default stack size (rounded up to a power of two).
///
/// # Errors
/// `InvalidInput` for a size of 0 or above 1 GiB; `AlreadyExists` if stacks of another size exist
/// already; the errors of `tls::init`.
pub fn configure(default_size: usize) -> io::Result<()> {
    StackConfig::configure(default_size)
}

/// Selects mprotect guards, as on kernels before 6.13. Call it before the first stack.
pub fn force_mprotect_guards() {
    mm::force_mprotect_guards();
}

/// Calls `f` with the thread pointer of every initialised stack: running, cached or pooled. No
/// stack is made or retired meanwhile, so `f` must not spawn, and should be short.
pub fn for_each_block(f: &mut dyn FnMut(NonNull<u8>)) {
    stack::for_each_block(f);
}

/// A slot, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotInfo {
    /// First byte above the guard.
    pub low: usize,
    /// End of the slot.
    pub high: usize,
    /// Bytes of the slot, guard included.
    pub size: usize,
    /// The number of the slot; see `StackSlot::index`.
    pub index: u32,
}

/// Returns the slot whose guard contains `addr`. Async-signal-safe.
pub fn guard_hit(addr: usize) -> Option<SlotInfo> {
    slot_at(addr).filter(|slot| addr < slot.low)
}

/// On a goroutine: returns whether this code runs on its stack. Returns false in a signal handler,
/// which runs on the thread's alternate stack.
pub fn on_own_stack() -> bool {
    let here = 0u8;
    let tp = crate::arch::thread_pointer() as usize;
    slot_at(&raw const here as usize).is_some_and(|slot| (slot.low..slot.high).contains(&tp))
}

/// Returns the slot that contains `addr`, guard included. Takes no lock; async-signal-safe.
pub fn slot_at(addr: usize) -> Option<SlotInfo> {
    let slot = arena::slot_at(addr)?;
    let (low, high, size) = (slot.low(), slot.end(), slot.class().slot_bytes());
    Some(SlotInfo { low, high, size, index: slot.index() })
}

/// Counters of the arena, for all sizes together. They are not read at the same instant.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArenaStats {
    /// Address space of slots, in bytes.
    pub mapped_bytes: usize,
    /// Mapped chunks.
    pub chunks: usize,
    /// Mapped slots.
    pub slots: usize,
    /// Slots with an initialised stack: running, cached or pooled.
    pub live: usize,
    /// Live stacks that are in the pools.
    pub pooled: usize,
    /// Slots without a stack, which cost nothing.
    pub unused: usize,
    /// Reserved credits.
    pub reserved: usize,
    /// Registered caches.
    pub caches: usize,
}

/// Returns the counters of the arena.
pub fn stats() -> ArenaStats {
    let mut s = ArenaStats::default();
    for chunk in arena::chunks() {
        s.chunks += 1;
        s.mapped_bytes += chunk.bytes();
        s.live += chunk.live();
    }
    for (i, pool) in POOLS.iter().enumerate() {
        let class = arena::class_stats(SizeClass::from_index(i));
        s.slots += class.slots;
        s.unused += class.unused;
        s.reserved += class.reserved;
        s.caches += class.caches;
        s.pooled += pool.len();
    }
    s
}

/// Makes stacks in slots that the caller has taken.
fn make<const N: usize>(slots: &SlotList<N>) -> io::Result<StackBatch<StackTop>> {
    stack::make(slots, StackConfig::get()?)
}

/// Puts default-size stacks into the pool. If the pool is full they are not trimmed: discarding
/// memory takes longer than a short goroutine lives, so that is left to the [`Scavenger`].
fn deposit_default(class: SizeClass, batch: StackBatch<StackTop>) {
    if pool_of(class).has_room(batch.len(), POOL_MAX) {
        deposit_trimmed(class, batch);
    } else {
        scavenger::note_surplus();
        put(class, batch);
    }
}

/// Puts stacks of another size into their pool, or retires them if it is full.
fn deposit_other(class: SizeClass, batch: StackBatch<StackTop>) {
    if pool_of(class).has_room(batch.len(), POOL_MAX_OTHER) {
        deposit_trimmed(class, batch);
    } else {
        stack::retire(class, batch);
    }
}

fn deposit_trimmed(class: SizeClass, batch: StackBatch<StackTop>) {
    // Before `put`: afterwards another thread may take the stacks.
    stack::trim(&batch);
    put(class, batch);
}

fn put(class: SizeClass, batch: StackBatch<StackTop>) {
    let rejected = pool_of(class).put(batch, usize::MAX);
    debug_assert!(rejected.is_none());
}

/// Makes the error for a stack that was taken without a credit (invariant 2 of the arena is
/// broken).
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
