//! The arena: address space for stacks, cut into chunks of slots, and the accounting of how many
//! stacks are reserved.
//!
//! ```text
//!   window (4 TiB below the address that mmap chooses by itself; chunks are mapped upward)
//!   ┌──────────── chunk 0 ────────────┬──────────── chunk 1 ────────────┬── …
//!   │ slot │ slot │ …   256 of 256 KiB│ slot │ slot │ …                 │
//!   └──────┴──────┴───────────────────┴──────┴──────────────────────────┴── …
//! ```
//! Chunks of all size classes follow each other without gaps and with the same flags, so the kernel
//! keeps them as one VMA: with guard markers a million stacks are still one line in
//! /proc/self/maps.
//!
//! A slot is in one of three states:
//!
//! | state | `unused` | `live` | owner | memory |
//! |---|---|---|---|---|
//! | unused | 1 | 0 | the [`ClassPool`] of its class | reads as zero, costs no page |
//! | taken | 0 | 0 | the thread that makes or retires a stack in it | being changed |
//! | stack | 0 | 1 | holder of its [`Stack`](super::Stack): G, cache, pool | header, TLS block |
//!
//! `guarded` tells whether the guard marker is in place. It outlives the stack, so that a slot that
//! is used again does not pay for it again.
//!
//! # Credits
//! A goroutine gets its stack when it first runs, but `go` must fail if there will be none: so `go`
//! reserves a *credit*. Per class:
//!
//! 1. **slots ≥ reserved + `LOCAL_MAX` × caches.** [`reserve`] and [`register_cache`] map a chunk
//!    before they would break it, and nothing else maps. So a refusal of the kernel is always an
//!    error of `go`, never of a goroutine's first run.
//! 2. A stack outside caches and pool is covered by a credit. A cache, together with what its owner
//!    moves to or from the pool, has at most `LOCAL_MAX` stacks. With 1: a thread that has a credit
//!    and finds the stack pool empty finds an unused slot.
//! 3. A chunk is mapped once and stays: descriptors are never freed, so readers need no lock.
//! 4. Lock order: stack pool → class pool → registry.
//!
//! Rejected: mapping in `refill` (the error would occur in the scheduler, which cannot report it to
//! a caller); unmapping empty chunks (other mappings could then be placed into the window; instead
//! [`release_chunk`] returns pages *and* page tables); a free list inside the slots (it would touch
//! them).

use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use super::size_class::{CHUNK_BYTES, CHUNK_SLOTS_MAX, CLASSES, SizeClass};
use crate::sys::lock::Lock;
use crate::sys::mm::{self, GuardKind, Span};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Inaccessible bytes at the low end of a slot. Four pages: Rust probes every page of a large
/// frame, C does not, and a C frame with a buffer of a page or two must not skip the guard.
pub(crate) const GUARD_BYTES: usize = 16 * KIB;

/// Returns the inaccessible bytes at the low end of a slot: [`GUARD_BYTES`], or a page of 64 KiB.
#[inline(always)]
pub(crate) fn guard_bytes() -> usize {
    GUARD_BYTES.max(mm::page())
}

/// Maximum number of chunks in a process: 4 TiB of default stacks, 16 million of them. Bounds the
/// registry.
const CHUNKS_MAX: usize = 1 << 16;

/// Maximum number of slots in a process, and so the bound of [`StackSlot::index`].
pub(crate) const SLOTS_MAX: usize = CHUNKS_MAX * CHUNK_SLOTS_MAX;

/// How far below the address that mmap chooses by itself the window starts: room for every chunk,
/// so that chunks mapped upward meet no other mapping.
const WINDOW_BYTES: usize = CHUNKS_MAX * CHUNK_BYTES;

/// Maximum number of stacks in a P's cache.
pub const LOCAL_MAX: usize = 64;

/// A bit for every slot of a chunk. Atomic, because bits of one word belong to different owners.
/// Every access is Relaxed: the lock that the field names orders what a bit describes.
struct Bits([AtomicU64; CHUNK_SLOTS_MAX / 64]);

impl Bits {
    /// Makes bits of which the first `count` are set.
    fn new(count: usize) -> Bits {
        let bits = Bits([const { AtomicU64::new(0) }; CHUNK_SLOTS_MAX / 64]);
        bits.set_first(count);
        bits
    }
    fn get(&self, nr: usize) -> bool {
        self.0[nr / 64].load(Ordering::Relaxed) & (1 << (nr % 64)) != 0
    }
    fn set(&self, nr: usize) {
        self.0[nr / 64].fetch_or(1 << (nr % 64), Ordering::Relaxed);
    }
    fn clear(&self, nr: usize) {
        self.0[nr / 64].fetch_and(!(1 << (nr % 64)), Ordering::Relaxed);
    }
    /// Sets the first `count` bits.
    fn set_first(&self, count: usize) {
        for (i, word) in self.0.iter().enumerate() {
            let here = count.saturating_sub(i * 64).min(64) as u32;
            let ones = u64::MAX.checked_shr(64 - here).unwrap_or(0);
            word.store(ones, Ordering::Relaxed);
        }
    }
    fn clear_all(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
    fn count(&self) -> usize {
        self.0.iter().map(|w| w.load(Ordering::Relaxed).count_ones() as usize).sum()
    }
    fn first(&self) -> Option<usize> {
        let words = self.0.iter().map(|w| w.load(Ordering::Relaxed)).enumerate();
        let (i, word) = words.into_iter().find(|&(_, w)| w != 0)?;
        Some(i * 64 + word.trailing_zeros() as usize)
    }
}

/// The descriptor of a chunk. It lies in the registry's table and is never freed; zeroed memory
/// until it is published.
#[repr(C, align(64))]
pub(crate) struct Chunk {
    // The first five are written once, before the chunk is published.
    /// Address of the first slot.
    base: usize,
    /// [`StackSlot::index`] of the first slot.
    first_index: u32,
    /// Index in the registry's table.
    id: u16,
    /// Number of slots.
    slots: u16,
    class: SizeClass,
    /// Link of the class pool's list of open chunks: id + 1 of the next one, 0 at the end,
    /// [`NOT_OPEN`] if this chunk is not in the list. Under the class pool's lock.
    next_open: AtomicU32,
    /// Changed under the class pool's lock.
    unused: Bits,
    /// Set by the thread that has taken the slot, and by [`guard_locked`], whose caller has taken
    /// one slot of the chunk; cleared by [`release_chunk`], which has taken all of them. The class
    /// pool's lock orders the threads that take a slot one after the other. A thread that reads an
    /// old 0 installs the guard once more, which is harmless.
    guarded: Bits,
    /// Changed under `stack::LIVE_LOCK` in shared mode.
    live: Bits,
}

/// See [`Chunk::next_open`].
const NOT_OPEN: u32 = u32::MAX;

impl Chunk {
    fn span(&self) -> Span {
        Span { base: self.base, len: self.slots as usize * self.class.slot_bytes() }
    }

    fn slot(&'static self, nr: usize) -> StackSlot {
        debug_assert!(nr < self.slots as usize);
        StackSlot { chunk: self, nr: nr as u16 }
    }

    /// Returns the number of slots with an initialised stack.
    pub(crate) fn live(&self) -> usize {
        self.live.count()
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots as usize
    }

    pub(crate) fn bytes(&self) -> usize {
        self.span().len
    }

    /// Returns the slots with an initialised stack. They do not change while the caller holds
    /// `stack::LIVE_LOCK` in exclusive mode.
    pub(crate) fn live_slots(&'static self) -> impl Iterator<Item = StackSlot> {
        (0..self.slots()).filter(|&nr| self.live.get(nr)).map(|nr| self.slot(nr))
    }
}

/// Identifies a slot; does not own it.
#[derive(Clone, Copy)]
pub(crate) struct StackSlot {
    chunk: &'static Chunk,
    nr: u16,
}

impl StackSlot {
    /// Returns the slot's first byte, which belongs to the guard.
    #[inline]
    pub(crate) fn base(self) -> usize {
        self.chunk.base + self.nr as usize * self.class().slot_bytes()
    }

    /// Returns the first byte above the guard.
    #[inline]
    pub(crate) fn low(self) -> usize {
        self.base() + guard_bytes()
    }

    #[inline]
    pub(crate) fn end(self) -> usize {
        self.base() + self.class().slot_bytes()
    }

    #[inline]
    pub(crate) fn class(self) -> SizeClass {
        self.chunk.class
    }

    /// Returns a number that no other slot of the process has or will have.
    pub(crate) fn index(self) -> u32 {
        self.chunk.first_index + self.nr as u32
    }

    pub(crate) fn chunk_id(self) -> u16 {
        self.chunk.id
    }

    pub(crate) fn guard(self) -> Span {
        Span::new(self.base(), self.low())
    }

    pub(crate) fn is_guarded(self) -> bool {
        self.chunk.guarded.get(self.nr as usize)
    }

    pub(crate) fn set_guarded(self) {
        self.chunk.guarded.set(self.nr as usize);
    }

    /// Records that the slot contains a stack. By the thread that has taken the slot, under
    /// `stack::LIVE_LOCK`.
    pub(crate) fn set_live(self) {
        debug_assert!(!self.chunk.live.get(self.nr as usize));
        self.chunk.live.set(self.nr as usize);
    }

    /// Records that the slot contains no stack any more; as `set_live`.
    pub(crate) fn clear_live(self) {
        debug_assert!(self.chunk.live.get(self.nr as usize));
        self.chunk.live.clear(self.nr as usize);
    }

    /// Returns the slot with this index, which lies in this chunk.
    pub(crate) fn find(chunk_id: u16, index: u32) -> StackSlot {
        let chunk = chunk(chunk_id as usize);
        chunk.slot((index - chunk.first_index) as usize)
    }
}

// -------------------------------------------------------------------------------------------------
// The registry: every chunk, readable without a lock, in a signal handler too.

/// The table of descriptors: room for `CHUNKS_MAX` in zeroed memory, 8 MiB of addresses of which
/// only the used pages cost memory. Null until the first chunk.
static TABLE: AtomicPtr<Chunk> = AtomicPtr::new(ptr::null_mut());

/// The number of complete descriptors. Only grows, under [`REGISTRY`].
static PUBLISHED: AtomicUsize = AtomicUsize::new(0);

/// Whether every chunk lies above the one before it. It does while the kernel follows the hints.
/// Cleared under [`REGISTRY`].
static SORTED: AtomicBool = AtomicBool::new(true);

struct Registry {
    /// Where the next chunk should go; 0 before the first.
    next_base: usize,
    /// [`StackSlot::index`] of the next chunk's first slot.
    next_index: u32,
}

static REGISTRY: Lock<Registry> = Lock::new(Registry { next_base: 0, next_index: 0 });

fn chunk(id: usize) -> &'static Chunk {
    assert!(id < PUBLISHED.load(Ordering::Acquire));
    // SAFETY: `id` is published: the table exists and the entry is complete (the Acquire above
    // pairs with the Release in `map_chunk`). Descriptors are never freed, and only their atomics
    // are written later.
    unsafe { &*TABLE.load(Ordering::Relaxed).add(id) }
}

/// Returns every chunk mapped so far. Takes no lock and allocates nothing: for signal handlers too.
pub(crate) fn chunks() -> impl Iterator<Item = &'static Chunk> {
    (0..PUBLISHED.load(Ordering::Acquire)).map(chunk)
}

/// Returns the slot that contains `addr`. For signal handlers and dumps.
pub(crate) fn slot_at(addr: usize) -> Option<StackSlot> {
    let holds = |c: &Chunk| addr.wrapping_sub(c.base) < c.bytes();
    let n = PUBLISHED.load(Ordering::Acquire);
    // Relaxed: cleared before the first chunk that is out of order was published.
    let chunk = if SORTED.load(Ordering::Relaxed) {
        last_below(n, addr).filter(|c| holds(c))?
    } else {
        chunks().find(|c| holds(c))?
    };
    Some(chunk.slot((addr - chunk.base) / chunk.class.slot_bytes()))
}

/// Makes `slot_at` search as if a chunk were out of order.
#[cfg(test)]
pub(crate) fn pretend_unsorted() {
    SORTED.store(false, Ordering::Relaxed);
}

/// Returns, of the first `n` chunks, which are sorted, the last one that begins at or below `addr`.
fn last_below(n: usize, addr: usize) -> Option<&'static Chunk> {
    let (mut low, mut high) = (0, n);
    while low < high {
        let middle = low.midpoint(high);
        if chunk(middle).base <= addr {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low.checked_sub(1).map(chunk)
}

/// Maps a chunk and publishes it. After an error nothing has changed.
fn map_chunk(class: SizeClass) -> Result<&'static Chunk, ReserveError> {
    let mut registry = REGISTRY.lock();
    let id = PUBLISHED.load(Ordering::Relaxed); // only changed under REGISTRY
    if id == CHUNKS_MAX {
        return Err(ReserveError { class, kind: ReserveErrorKind::Chunks });
    }
    let table =
        table(&mut registry).map_err(|e| ReserveError { class, kind: ReserveErrorKind::Map(e) })?;
    let (span, guarded) = map_slots(registry.next_base, class, mm::guard_kind())
        .map_err(|kind| ReserveError { class, kind })?;
    let base = span.base;
    if id > 0 && base < registry.next_base {
        SORTED.store(false, Ordering::Relaxed);
    }
    registry.next_base = base + span.len;
    let new = Chunk {
        base,
        first_index: registry.next_index,
        id: id as u16,
        slots: class.slots() as u16,
        class,
        next_open: AtomicU32::new(NOT_OPEN),
        unused: Bits::new(class.slots()),
        guarded: Bits::new(if guarded { class.slots() } else { 0 }),
        live: Bits::new(0),
    };
    registry.next_index += class.slots() as u32;
    // SAFETY: entry `id` is inside the table and unpublished, so only the holder of the registry's
    // lock uses it.
    unsafe { table.add(id).write(new) };
    // Release pairs with the Acquire in `chunk` and `chunks`: a thread that reads the count sees
    // the entry.
    PUBLISHED.store(id + 1, Ordering::Release);
    Ok(chunk(id))
}

/// Returns the table of descriptors. The first call maps it and places the window below it.
fn table(registry: &mut Registry) -> io::Result<NonNull<Chunk>> {
    if let Some(table) = NonNull::new(TABLE.load(Ordering::Relaxed)) {
        return Ok(table);
    }
    let bytes = CHUNKS_MAX * size_of::<Chunk>();
    let reserved = mm::reserve(0, bytes)?;
    let table = reserved.base.cast::<Chunk>();
    if reserved.wants_lock {
        // SAFETY: mapped above.
        unsafe { mm::lock_on_fault(Span { base: table.as_ptr().expose_provenance(), len: bytes }) };
    }
    // The kernel chose a random address for the table; the window inherits the randomness.
    let huge_page = 2 * MIB;
    let chosen = table.as_ptr().expose_provenance();
    registry.next_base = chosen.saturating_sub(WINDOW_BYTES) & !(huge_page - 1);
    // Published together with the first chunk, by the Release on PUBLISHED.
    TABLE.store(table.as_ptr(), Ordering::Relaxed);
    Ok(table)
}

/// Maps the slots of a chunk. Returns whether their guards are in place already. After an error
/// nothing is mapped.
fn map_slots(
    hint: usize,
    class: SizeClass,
    kind: GuardKind,
) -> Result<(Span, bool), ReserveErrorKind> {
    let reserved = mm::reserve(hint, class.chunk_bytes()).map_err(ReserveErrorKind::Map)?;
    let span = Span { base: reserved.base.as_ptr().expose_provenance(), len: class.chunk_bytes() };
    // Install the guards now if they cannot be installed later, or would cost more then.
    let guarded = kind == GuardKind::Protect || reserved.wants_lock;
    if guarded && let Err(e) = guard_chunk(class, span, kind) {
        // SAFETY: mapped above, and no other thread knows the address. Only here: a second call
        // could unmap what another thread has mapped there since the first.
        let _ = unsafe { mm::unmap(span) };
        return Err(ReserveErrorKind::Guards(e));
    }
    if reserved.wants_lock {
        // SAFETY: mapped above.
        unsafe { mm::lock_on_fault(span) };
    }
    Ok((span, guarded))
}

/// Installs every guard of a new chunk. If guards are mappings of their own, this fails at the map
/// limit. After an error some may be in place: the caller unmaps the chunk.
fn guard_chunk(class: SizeClass, chunk: Span, kind: GuardKind) -> io::Result<()> {
    let guards = (0..class.slots()).map(|nr| {
        let base = chunk.base + nr * class.slot_bytes();
        Span::new(base, base + guard_bytes())
    });
    // SAFETY: a new mapping whose address no other thread knows.
    unsafe {
        match kind {
            GuardKind::Protect => guards.into_iter().try_for_each(|guard| mm::protect(guard)),
            GuardKind::Marker => {
                let mut spans = [Span::EMPTY; CHUNK_SLOTS_MAX];
                spans.iter_mut().zip(guards).for_each(|(span, guard)| *span = guard);
                mm::mark(&spans[..class.slots()])
            }
        }
    }
}

/// Serialises [`guard_locked`]: a thread that has unlocked a chunk for its guards must not meet
/// another thread that locks it again.
static RELOCKING: Lock<()> = Lock::new(());

/// Installs the guard of `slot`, which the caller has taken, in a chunk that `mlockall` may have
/// locked after it was mapped. If it has, installs the guards of all other slots of the chunk too,
/// because the unlocking walks over all pages of the chunk.
#[cold]
pub(crate) fn guard_locked(slot: StackSlot) -> io::Result<()> {
    let chunk = slot.chunk;
    let _one = RELOCKING.lock();
    if slot.is_guarded() {
        return Ok(());
    }
    // A chunk that the program has not locked must not become locked here.
    // SAFETY: the caller has taken the slot, and no code touches a guard.
    match unsafe { mm::mark(&[slot.guard()]) } {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
        marked => return marked.map(|()| slot.set_guarded()),
    }
    let mut spans = [Span::EMPTY; CHUNK_SLOTS_MAX];
    let mut n = 0;
    for nr in (0..chunk.slots()).filter(|&nr| !chunk.guarded.get(nr)) {
        spans[n] = chunk.slot(nr).guard();
        n += 1;
    }
    // SAFETY: no code touches a guard, whichever thread owns its slot. None is removed meanwhile:
    // `release_chunk` needs all slots of the chunk, and the caller has one.
    unsafe { mm::mark_locked(chunk.span(), &spans[..n]) }?;
    chunk.guarded.set_first(chunk.slots());
    Ok(())
}

// -------------------------------------------------------------------------------------------------
// The class pools: the slots of each class, and how many are reserved.

/// The unused slots and the accounting of one class. Under its lock.
struct ClassPool {
    /// Mapped slots, in any state.
    slots: usize,
    /// Unused slots: the sum over the chunks' `unused` bits.
    unused: usize,
    /// Reserved credits: in caches or held by goroutines.
    reserved: usize,
    /// Registered caches; each reserves `LOCAL_MAX` stacks.
    caches: usize,
    /// id + 1 of the first open chunk; 0 if there is none. Every chunk with unused slots is open.
    /// An open chunk without unused slots is removed from the list when `take` finds it.
    open: u32,
}

static CLASS_POOLS: [Lock<ClassPool>; CLASSES] =
    [const { Lock::new(ClassPool { slots: 0, unused: 0, reserved: 0, caches: 0, open: 0 }) };
        CLASSES];

/// The accounting of a class.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ClassStats {
    pub slots: usize,
    pub unused: usize,
    pub reserved: usize,
    pub caches: usize,
}

impl ClassPool {
    /// Returns the number of slots that are reserved by credits and by caches.
    fn total_reserved(&self) -> usize {
        self.reserved + LOCAL_MAX * self.caches
    }

    /// Maps chunks until `more` can be reserved (invariant 1).
    fn make_room(&mut self, class: SizeClass, more: usize) -> Result<(), ReserveError> {
        while self.slots < self.total_reserved() + more {
            let chunk = map_chunk(class)?;
            self.slots += chunk.slots();
            self.unused += chunk.slots();
            self.open(chunk);
        }
        Ok(())
    }

    /// Adds the chunk to the list of open chunks, unless it is in the list.
    fn open(&mut self, chunk: &'static Chunk) {
        if chunk.next_open.load(Ordering::Relaxed) == NOT_OPEN {
            chunk.next_open.store(self.open, Ordering::Relaxed);
            self.open = chunk.id as u32 + 1;
        }
    }

    /// Takes an unused slot of an open chunk.
    fn take(&mut self) -> Option<StackSlot> {
        loop {
            let chunk = chunk(self.open.checked_sub(1)? as usize);
            if let Some(nr) = chunk.unused.first() {
                chunk.unused.clear(nr);
                self.unused -= 1;
                return Some(chunk.slot(nr));
            }
            self.open = chunk.next_open.swap(NOT_OPEN, Ordering::Relaxed);
        }
    }

    /// Makes a taken slot unused again.
    fn give(&mut self, slot: StackSlot) {
        debug_assert!(!slot.chunk.unused.get(slot.nr as usize));
        slot.chunk.unused.set(slot.nr as usize);
        self.unused += 1;
        self.open(slot.chunk);
    }

    /// Returns whether all slots of the chunk are unused and not needed soon. Another chunk's worth
    /// of unused slots stays ready, so that an oscillating load does not release and guard one
    /// chunk over and over.
    fn may_release(&self, chunk: &Chunk) -> bool {
        let n = chunk.slots();
        self.unused >= 2 * n && self.slots >= self.total_reserved() + n && chunk.unused.count() == n
    }

    /// Takes all slots of an unused chunk out of the accounting, so that no reservation relies on
    /// them.
    fn withdraw(&mut self, chunk: &Chunk) {
        chunk.unused.clear_all();
        self.unused -= chunk.slots();
        self.slots -= chunk.slots();
    }

    /// Reverses `withdraw`.
    fn restore(&mut self, chunk: &'static Chunk) {
        chunk.unused.set_first(chunk.slots());
        self.unused += chunk.slots();
        self.slots += chunk.slots();
        self.open(chunk);
    }
}

/// Reserves `n` credits: from then on `n` more stacks are available, whatever happens.
pub(crate) fn reserve(class: SizeClass, n: usize) -> Result<(), ReserveError> {
    let mut pool = CLASS_POOLS[class.index()].lock();
    pool.make_room(class, n)?;
    pool.reserved += n;
    Ok(())
}

/// Returns `n` credits.
pub(crate) fn unreserve(class: SizeClass, n: usize) {
    let mut pool = CLASS_POOLS[class.index()].lock();
    debug_assert!(pool.reserved >= n, "more credits returned than reserved");
    // Wrapping would reserve the whole address space. If too few are reserved, `acquire` reports it
    // (`mem::no_slot`).
    pool.reserved = pool.reserved.saturating_sub(n);
}

/// Reserves `LOCAL_MAX` stacks for one more cache.
pub(crate) fn register_cache(class: SizeClass) -> Result<(), ReserveError> {
    let mut pool = CLASS_POOLS[class.index()].lock();
    pool.make_room(class, LOCAL_MAX)?;
    pool.caches += 1;
    Ok(())
}

/// Ends the reservation of a cache, which is empty and stays empty.
pub(crate) fn unregister_cache(class: SizeClass) {
    let mut pool = CLASS_POOLS[class.index()].lock();
    debug_assert!(pool.caches > 0);
    pool.caches -= 1;
}

/// Takes at most `want` (and at most `N`) unused slots for the caller.
pub(crate) fn take_unused<const N: usize>(class: SizeClass, want: usize) -> SlotList<N> {
    let mut pool = CLASS_POOLS[class.index()].lock();
    let mut list = SlotList::new();
    while list.len < want.min(N) {
        let Some(slot) = pool.take() else { break };
        list.push(slot);
    }
    list
}

/// Returns slots that the caller has taken. Their memory has been discarded.
pub(crate) fn return_unused(class: SizeClass, slots: impl Iterator<Item = StackSlot>) {
    let mut pool = CLASS_POOLS[class.index()].lock();
    for slot in slots {
        debug_assert!(slot.class() == class);
        pool.give(slot);
        if pool.may_release(slot.chunk) {
            pool.withdraw(slot.chunk);
            drop(pool);
            release_chunk(slot.chunk);
            pool = CLASS_POOLS[class.index()].lock();
            pool.restore(slot.chunk);
        }
    }
}

pub(crate) fn class_stats(class: SizeClass) -> ClassStats {
    let pool = CLASS_POOLS[class.index()].lock();
    let ClassPool { slots, unused, reserved, caches, .. } = *pool;
    ClassStats { slots, unused, reserved, caches }
}

/// Returns the page tables of a chunk without used slots to the kernel: they are 128 KiB, half a
/// KiB per slot, and would stay as long as a guard marker is in them. (Since 6.14 the kernel frees
/// a table that a discard leaves empty; before that they stay.) It takes 50–100 µs, so the caller
/// does not hold the class pool's lock, and the chunk is withdrawn from the accounting.
#[cold]
fn release_chunk(chunk: &Chunk) {
    if mm::guard_kind() != GuardKind::Marker {
        return;
    }
    // SAFETY: every slot was unused, so the class pool owned all of the chunk, and it was
    // withdrawn: only this thread uses it, and no stack relies on its guards or contents.
    unsafe {
        if mm::unmark(chunk.span()).is_ok() {
            chunk.guarded.clear_all();
            let _ = mm::discard(&[chunk.span()]);
        }
    }
}

/// Slots that a thread has taken: an array with a length, so that batches need no malloc.
pub(crate) struct SlotList<const N: usize> {
    slots: [Option<StackSlot>; N],
    len: usize,
}

impl<const N: usize> SlotList<N> {
    pub(crate) fn new() -> Self {
        SlotList { slots: [None; N], len: 0 }
    }
    pub(crate) fn push(&mut self, slot: StackSlot) {
        self.slots[self.len] = Some(slot);
        self.len += 1;
    }
    pub(crate) fn len(&self) -> usize {
        self.len
    }
    pub(crate) fn iter(&self) -> impl Iterator<Item = StackSlot> {
        self.slots[..self.len].iter().flatten().copied()
    }
}

// -------------------------------------------------------------------------------------------------

/// The reason why no more slots can be mapped. Its text, which allocates, is made outside the
/// runtime, when no lock is held.
#[derive(Debug)]
pub struct ReserveError {
    class: SizeClass,
    kind: ReserveErrorKind,
}

#[derive(Debug)]
enum ReserveErrorKind {
    /// The kernel refused the mapping.
    Map(io::Error),
    /// Guards failed: most likely the limit of VMAs is reached.
    Guards(io::Error),
    /// [`CHUNKS_MAX`] is reached.
    Chunks,
}

impl From<ReserveError> for io::Error {
    #[cold]
    fn from(error: ReserveError) -> io::Error {
        let ReserveError { class, kind } = error;
        let have: usize = chunks().map(Chunk::slots).sum();
        let kib = class.slot_bytes() / KIB;
        let text = match kind {
            ReserveErrorKind::Map(e) => format!(
                "no address space for more goroutine stacks: the kernel refused {} MiB for {} \
                 stacks of {kib} KiB ({e}); there are {have}. Check `ulimit -v`, the \
                 cgroup's memory limit, `ulimit -l` if the program has called mlockall, and \
                 vm.overcommit_memory (2 counts stacks in full), or use smaller stacks",
                class.chunk_bytes() / MIB,
                class.slots(),
            ),
            ReserveErrorKind::Guards(e) => format!(
                "no more goroutine stacks: guarding {} stacks of {kib} KiB failed ({e}); there are \
                 {have}. This kernel has no MADV_GUARD_INSTALL (Linux 6.13), so each stack takes \
                 two memory mappings of the {} that vm.max_map_count allows. Raise it: \
                 `sysctl -w vm.max_map_count=2000000`",
                class.slots(),
                max_map_count().unwrap_or_else(|| "65530".into()),
            ),
            ReserveErrorKind::Chunks => format!(
                "no more goroutine stacks: there are {have} in {CHUNKS_MAX} chunks, which is the \
                 most that trefoil keeps"
            ),
        };
        io::Error::new(io::ErrorKind::OutOfMemory, text)
    }
}

fn max_map_count() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok()?;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_that_cannot_be_guarded_is_unmapped_once() {
        use crate::sys::mm::test_hooks;
        let class = SizeClass::of(64 * KIB).unwrap();
        test_hooks::FAIL_PROTECT.set(true);
        let refused = map_slots(0, class, GuardKind::Protect);
        test_hooks::FAIL_PROTECT.set(false);
        assert!(matches!(refused, Err(ReserveErrorKind::Guards(_))));
        // The hook has mapped a page at the same place right after the first unmapping.
        let page = test_hooks::NEIGHBOUR.take().expect("the chunk was not unmapped");
        assert!(test_hooks::is_mapped(page), "the mapping of another owner is gone");
        // SAFETY: the page of the hook, which no code uses.
        unsafe { mm::unmap(Span { base: page, len: mm::page() }) }.unwrap();
    }

    #[test]
    fn chunks_are_about_64_mib_or_one_slot() {
        let shape = |n| {
            let c = SizeClass::of(n).unwrap();
            (c.slots(), c.chunk_bytes())
        };
        assert_eq!(shape(256 * KIB), (256, 64 * MIB));
        assert_eq!(shape(64 * KIB), (256, 16 * MIB));
        assert_eq!(shape(MIB), (64, 64 * MIB));
        assert_eq!(shape(1 << 30), (1, 1 << 30));
    }
}
