//! A stack in its slot: the layout, and how stacks are made, trimmed and retired.
//!
//! ```text
//!   base     low                         sp            tp        top          end = base + size
//!   │        │                           │             │         │            │
//!   ├────────┼───────────────────────────┼─────────────┼─────────┼──────────┬─┤
//!   │ guard  │ untouched … ◀─ the stack  │ TLS (or also│ struct  │ StackTop │ │◀─ colour pad:
//!   │ 16 KiB │               grows down  │ the dlopen  │ pthread │ 64 B     │ │   0, 64, 128 … B
//!   │        │                           │ reserve)    │         │          │ │
//!   └────────┴───────────────────────────┴─────────────┴─────────┴──────────┴─┘
//!                                        │◀ block of mem::tls   ▶│
//!                              │◀──────────────── hot pages ─────────────────▶│
//! ```
//!
//! # Colour
//! Slots are powers of two apart, so without a pad the same frame of every goroutine falls into the
//! same set of the L1 cache (64 sets of 64 B, selected by the page offset): a ring of 1,000
//! goroutines took 39.6 ns per hop instead of 11.0. The pad moves each stack by `index % colours`
//! cache lines. It must not cost a page, so it uses exactly the slack of the hot pages of a small
//! parked goroutine:
//!
//! ```text
//!   need    = block (in lines) + StackTop 64 + PARKED_BYTES 896
//!   pages   = need / 4096, rounded up          slack = pages · 4096 − need
//!   colours = slack / 64 + 1, at most 64       (64 lines are a page: more would repeat sets)
//!
//!   by default:      2,768 → 2,816 + 64 + 896 = 3,776 → 1 page,  slack   320 →  6 colours
//!   with the reserve:        4,480 + 64 + 896 = 5,440 → 2 pages, slack 2,752 → 44 colours
//! ```
//! Measured, a walk over nine lines of each of 1,000 stacks: 38 ns per stack with one colour, 15.4
//! with 6, 13.0 with 44. 16 colours that are three lines apart are no better (13.0), so the step is
//! one line. If the slack is less than [`COLOURS_MIN`] lines, conflicts would cost more than a
//! page: then the stack takes one page more.
//!
//! Invariants:
//! 1. A [`Stack`] is the only handle to a live stack: its holder owns slot, block and header. It
//!    ends in a cache, in the pool or in `release`; dropping it leaks the slot.
//! 2. The header is written when the stack is made. Later only its links and flags change.
//! 3. `live` of a slot changes only under [`LIVE_LOCK`] in shared mode, together with `tls::create`
//!    and `tls::destroy`: the holder of the exclusive mode sees every block, and none is made or
//!    destroyed.
//! 4. An unused slot reads as zeroes where `tls::create` will make a block, because that writes
//!    only what is not zero. The rest of the slot above the guard is zero too, unless the kernel
//!    has refused to discard it (`wipe_slow`).

use std::io;
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use super::arena::{self, SlotList, StackSlot};
use super::size_class::SizeClass;
use super::stack_pool::{BatchLinks, BatchNode, StackBatch};
use super::tls;
use crate::sys::lock::{Lock, SharedLock};
use crate::sys::mm::{self, GuardKind, PAGE, Span};

/// A cache line, and the step of the colours.
const LINE: usize = 64;

/// Stack that a small goroutine uses while parked in a channel or timer: measured 0.7–0.9 KiB.
const PARKED_BYTES: usize = 14 * LINE;

/// If there were fewer colours than this, the stack takes one page more.
const COLOURS_MIN: usize = 4;
/// More would fall into the same cache sets again.
const COLOURS_MAX: usize = PAGE / LINE;

/// Bytes that a pooled stack keeps below its end. println!, HashMap, sort and even a panic fit in
/// them.
const KEEP_BYTES: usize = 16 << 10;
/// Bytes that a pooled stack keeps below the page of its first frame, however large its TLS block
/// is.
const KEEP_BELOW_SP_BYTES: usize = 2 * PAGE;

/// Maximum number of pages that are populated when a stack is made: what fits in the bits of
/// [`StackConfig`].
const POPULATED_PAGES_MAX: usize = 0x7f;
/// A block with more pages than this has large thread-locals, which a goroutine may never touch:
/// then only the pages of its `struct pthread` are populated at once.
const POPULATED_BLOCK_PAGES_MAX: usize = 8;

/// Default size of a slot.
const DEFAULT_BYTES: usize = 256 << 10;

/// Bytes of a TLS block that are taken from the requested stack size; the rest of a larger block is
/// added to it.
const ORDINARY_BLOCK_BYTES: usize = 8 << 10;

/// First thread id of goroutines: above every kernel tid (2²² at most), below futex's owner-died
/// and waiters bits.
const TID_BASE: u32 = 0x2000_0000;

/// Maximum number of stacks that are made or retired at once; bounds the arrays on the caller's
/// stack.
pub(super) const BATCH_MAX: usize = 64;

/// Held in exclusive mode by a walk over all blocks; see invariant 3.
pub(super) static LIVE_LOCK: SharedLock = SharedLock::new();

// -------------------------------------------------------------------------------------------------

/// The settings that the first stack fixes, packed into a word: bits 0–7 are the class of the
/// default size, bits 16–23 are the number of
/// colours, bits 24–30 are the number of populated pages, and bit 31 is always set.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct StackConfig(u32);

/// 0 until the settings are fixed, then a [`StackConfig`].
static CONFIG: AtomicU32 = AtomicU32::new(0);
/// The default size to fix, in bytes.
static REQUESTED_BYTES: Lock<usize> = Lock::new(DEFAULT_BYTES);

impl StackConfig {
    const FIXED: u32 = 1 << 31;
    const COLOURS_SHIFT: u32 = 16;
    const POPULATED_SHIFT: u32 = 24;

    /// Returns the settings; the first call fixes them.
    #[inline]
    pub(super) fn get() -> io::Result<StackConfig> {
        // Acquire pairs with the Release in `fix_slow`: what tls::init prepared is visible.
        match CONFIG.load(Ordering::Acquire) {
            0 => Self::fix_slow(),
            word => Ok(StackConfig(word)),
        }
    }

    #[cold]
    fn fix_slow() -> io::Result<StackConfig> {
        let layout = tls::init()?;
        let requested = REQUESTED_BYTES.lock();
        let class = class_of(*requested)?;
        let block = layout.used_bytes();
        let touched = layout.always_touched();
        let (colours, populated) = (colours(block), populated_pages(block, touched));
        let word = Self::FIXED
            | class.index() as u32
            | (colours as u32) << Self::COLOURS_SHIFT
            | (populated as u32) << Self::POPULATED_SHIFT;
        // Under the lock of `REQUESTED_BYTES`, so two first calls store the same value.
        CONFIG.store(word, Ordering::Release);
        Ok(StackConfig(word))
    }

    /// Sets what the first stack will fix; see `mem::configure`.
    pub(super) fn configure(default_bytes: usize) -> io::Result<()> {
        let class = class_of(default_bytes)?;
        let mut requested = REQUESTED_BYTES.lock();
        match CONFIG.load(Ordering::Acquire) {
            0 => {
                *requested = default_bytes;
                Ok(())
            }
            word if StackConfig(word).default() == class => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the default stack size can be set only before the first goroutine of the process",
            )),
        }
    }

    #[inline]
    pub(super) fn default(self) -> SizeClass {
        SizeClass::from_index((self.0 & 0xff) as usize)
    }

    fn colours(self) -> usize {
        (self.0 >> Self::COLOURS_SHIFT) as usize & 0xff
    }

    /// Returns the pages of this slot that are populated when its stack is made.
    fn populated(self, slot: StackSlot) -> Span {
        let pages = (self.0 >> Self::POPULATED_SHIFT) as usize & POPULATED_PAGES_MAX;
        let bytes = (pages * PAGE).next_multiple_of(mm::page());
        Span::new((slot.end() - bytes).max(slot.low()), slot.end())
    }

    /// Returns the address of the header in this slot.
    fn top_of(self, slot: StackSlot) -> usize {
        let pad = slot.index() as usize % self.colours() * LINE;
        slot.end() - pad - size_of::<StackTop>()
    }
}

/// Returns the size class for a requested size. It includes guard and TLS block, except the parts
/// of a large guard and of a large TLS block that [`class_with`] adds.
pub(super) fn class_of(bytes: usize) -> io::Result<SizeClass> {
    let asked = SizeClass::of(bytes)?;
    Ok(class_with(asked, bytes, arena::guard_bytes(), tls::init()?.bytes()))
}

/// Returns the size class for a requested size, of which the class is `asked`. What the guard and
/// the TLS block take beyond [`arena::GUARD_BYTES`] and [`ORDINARY_BLOCK_BYTES`] is added to it; to
/// the smallest class if less was asked for, because that is what a small stack gets elsewhere.
fn class_with(asked: SizeClass, bytes: usize, guard_bytes: usize, block_bytes: usize) -> SizeClass {
    let beyond = guard_bytes.saturating_sub(arena::GUARD_BYTES)
        + block_bytes.saturating_sub(ORDINARY_BLOCK_BYTES);
    if beyond == 0 {
        return asked;
    }
    let smallest = SizeClass::from_index(0).slot_bytes();
    // The largest class is large enough for both.
    SizeClass::of(bytes.max(smallest) + beyond).unwrap_or(asked)
}

/// Returns the number of colours; see the head of the file.
fn colours(block_bytes: usize) -> usize {
    let slack = hot_pages(block_bytes) * PAGE - need_bytes(block_bytes);
    (slack / LINE + 1).min(COLOURS_MAX)
}

/// Returns the pages that a small parked goroutine uses, whatever its colour.
fn hot_pages(block_bytes: usize) -> usize {
    (need_bytes(block_bytes) + (COLOURS_MIN - 1) * LINE).div_ceil(PAGE)
}

/// Returns the pages at the end of a slot that are populated when its stack is made.
fn populated_pages(block_bytes: usize, touched_bytes: usize) -> usize {
    let pages = match hot_pages(block_bytes) {
        pages @ 0..=POPULATED_BLOCK_PAGES_MAX => pages,
        _ => hot_pages(touched_bytes),
    };
    pages.min(POPULATED_PAGES_MAX)
}

/// Returns the bytes that a small parked goroutine uses at the end of its slot, without a pad.
fn need_bytes(block_bytes: usize) -> usize {
    block_bytes.next_multiple_of(LINE) + size_of::<StackTop>() + PARKED_BYTES
}

// -------------------------------------------------------------------------------------------------

/// The header of a stack, above its TLS block. One cache line.
#[repr(C, align(64))]
pub(crate) struct StackTop {
    /// Link in a cache, a batch or the pool.
    next: Option<NonNull<StackTop>>,
    /// Valid in the first header of a batch in the pool.
    batch: Option<BatchLinks<StackTop>>,
    /// First byte of the slot.
    base: usize,
    /// The thread pointer of the TLS block.
    tp: NonNull<u8>,
    /// [`StackSlot::index`].
    index: u32,
    /// Distance from the header down to the first frame.
    sp_below: u32,
    /// The id of the slot's chunk.
    chunk: u16,
    class: SizeClass,
    /// 0 or [`OWN_CREDIT`].
    flags: u8,
}

/// Where debuggers find the fields of the header (`observe/layout.rs`).
pub const LAYOUT: &[(&str, usize)] = &[
    ("stack_top.base", offset_of!(StackTop, base)),
    ("stack_top.sp_below", offset_of!(StackTop, sp_below)),
    ("stack.guard_bytes", arena::GUARD_BYTES),
];

/// The stack came from `acquire` with a credit, which `release` returns. `push` clears the flag,
/// because its caller returns credits itself.
const OWN_CREDIT: u8 = 1;

const _: () = assert!(size_of::<StackTop>() == LINE && size_of::<Option<Stack>>() == 8);
const _: () =
    assert!(arena::SLOTS_MAX <= TID_BASE as usize, "an index must not reach the tid's base");

// SAFETY: next and batch are plain fields that only these functions touch.
unsafe impl BatchNode for StackTop {
    #[inline]
    unsafe fn next(this: NonNull<Self>) -> Option<NonNull<Self>> {
        // SAFETY: the caller owns the stack, so its header exists and no other thread writes it.
        unsafe { (*this.as_ptr()).next }
    }
    #[inline]
    unsafe fn set_next(this: NonNull<Self>, next: Option<NonNull<Self>>) {
        // SAFETY: the caller owns the stack.
        unsafe { (*this.as_ptr()).next = next }
    }
    #[inline]
    unsafe fn batch(this: NonNull<Self>) -> BatchLinks<Self> {
        // SAFETY: the caller owns the stack.
        unsafe { (*this.as_ptr()).batch }.expect("a batch head in the pool has its links")
    }
    #[inline]
    unsafe fn set_batch(this: NonNull<Self>, links: BatchLinks<Self>) {
        // SAFETY: the caller owns the stack.
        unsafe { (*this.as_ptr()).batch = Some(links) }
    }
}

// SAFETY: a header is reached only through the handle or chain that owns it, and contains nothing
// that belongs to a thread.
unsafe impl Send for StackTop {}

/// The only handle to an initialised stack with its TLS block (invariant 1).
#[must_use = "dropping a stack leaks it: pass it to a cache or to release()"]
#[repr(transparent)]
pub struct Stack(NonNull<StackTop>);

// SAFETY: the handle owns the memory, on whichever thread it is.
unsafe impl Send for Stack {}

impl Stack {
    /// Makes the handle of a stack.
    ///
    /// # Safety
    /// The caller owns this stack; from then on the handle does.
    #[inline]
    pub(super) unsafe fn from_top(top: NonNull<StackTop>) -> Stack {
        Stack(top)
    }

    #[inline]
    pub(super) fn into_top(self) -> NonNull<StackTop> {
        self.0
    }

    #[inline]
    fn top(&self) -> &StackTop {
        // SAFETY: the handle owns a live stack (invariant 1), so its header is initialised and
        // stays.
        unsafe { self.0.as_ref() }
    }

    /// Returns the initial stack pointer: 16-aligned, just below the TLS block.
    #[inline]
    pub fn sp(&self) -> *mut u8 {
        // Made from the header's pointer, whose provenance is the whole slot.
        self.0.as_ptr().cast::<u8>().wrapping_sub(self.top().sp_below as usize)
    }

    /// Returns the thread pointer: the FS base while code runs on this stack.
    #[inline]
    pub fn tp(&self) -> *mut u8 {
        self.top().tp.as_ptr()
    }

    /// Returns the range of valid stack pointers: above the guard, up to [`Stack::sp`].
    #[inline]
    pub fn bounds(&self) -> (usize, usize) {
        (self.top().base + arena::guard_bytes(), self.sp().addr())
    }

    /// Returns the bytes of address space, guard and TLS block included.
    #[cfg(test)]
    pub fn size(&self) -> usize {
        self.top().class.slot_bytes()
    }

    /// Returns a number that no other slot of the process has; also the low bits of its tid.
    #[cfg(test)]
    pub fn index(&self) -> u32 {
        self.top().index
    }

    /// Prepares the TLS block for the next goroutine. The last goroutine has run its TLS
    /// destructors.
    #[inline]
    pub fn recycle(&self) {
        // SAFETY: the block was made by `tls::create`, the handle owns it, and no goroutine runs on
        // it.
        unsafe { tls::recycle(self.top().tp) }
    }

    #[inline]
    pub fn is_default_size(&self) -> bool {
        StackConfig::get().is_ok_and(|s| s.default() == self.class())
    }

    #[inline]
    pub(super) fn class(&self) -> SizeClass {
        self.top().class
    }

    pub(super) fn set_own_credit(&mut self) {
        // SAFETY: the handle owns the header, and `&mut self` excludes other borrows of it.
        unsafe { (*self.0.as_ptr()).flags |= OWN_CREDIT }
    }

    /// Takes the stack's own credit. Returns whether it had one.
    #[inline]
    pub(super) fn take_own_credit(&mut self) -> bool {
        let had = self.top().flags & OWN_CREDIT != 0;
        if had {
            // SAFETY: as in `set_own_credit`.
            unsafe { (*self.0.as_ptr()).flags &= !OWN_CREDIT }
        }
        had
    }
}

// -------------------------------------------------------------------------------------------------

/// Makes stacks in slots that the caller has taken. Slots that failed return to their class pool.
/// Fails only if all of them failed.
#[cold]
pub(super) fn make<const N: usize>(
    slots: &SlotList<N>,
    config: StackConfig,
) -> io::Result<StackBatch<StackTop>> {
    let mut made = StackBatch::new();
    let mut failed = SlotList::<N>::new();
    let mut error = None;
    if let Err(e) = guard_all(slots) {
        slots.iter().for_each(|slot| failed.push(slot));
        error = Some(e);
    } else {
        populate_all(slots, config);
        LIVE_LOCK.shared(|| {
            for slot in slots.iter() {
                // SAFETY: the caller has taken the slot, which was unused, so zeroed (invariant 4).
                match unsafe { make_one(slot, config) } {
                    // SAFETY: just made, so no other handle to it exists.
                    Ok(top) => unsafe { made.push(top) },
                    Err(e) => {
                        failed.push(slot);
                        error = Some(e);
                    }
                }
            }
        });
    }
    if failed.len() > 0 {
        return_slots(&failed);
    }
    match error {
        Some(e) if made.is_empty() => Err(e),
        _ => Ok(made),
    }
}

/// Installs the missing guards in one call. (With mprotect guards none is missing.)
fn guard_all<const N: usize>(slots: &SlotList<N>) -> io::Result<()> {
    let mut spans = [Span::EMPTY; N];
    let mut n = 0;
    for slot in slots.iter().filter(|s| !s.is_guarded()) {
        spans[n] = slot.guard();
        n += 1;
    }
    if n == 0 {
        return Ok(());
    }
    debug_assert!(mm::guard_kind() == GuardKind::Marker);
    // SAFETY: this thread has taken the slots, and no code touches a guard.
    let marked = match unsafe { mm::mark(&spans[..n]) } {
        // The kernel installs none in memory that `mlockall` has locked; some slots may lie in it.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            slots.iter().try_for_each(arena::guard_locked)
        }
        marked => marked.map(|()| slots.iter().for_each(StackSlot::set_guarded)),
    };
    marked.map_err(|e| {
        io::Error::new(e.kind(), format!("the guard of a goroutine stack cannot be installed: {e}"))
    })
}

/// Populates the hot pages of all slots in one call. This saves two page faults per stack, and
/// halves the cost of making it (5.5 → 2.7 µs on a virtual machine).
fn populate_all<const N: usize>(slots: &SlotList<N>, config: StackConfig) {
    let mut spans = [Span::EMPTY; N];
    for (slot, span) in slots.iter().zip(&mut spans) {
        *span = config.populated(slot);
    }
    // SAFETY: the tops of slots that this thread has taken.
    unsafe { mm::populate(&spans[..slots.len()]) };
}

/// Makes a stack in a slot.
///
/// # Safety
/// The caller has taken the slot, which is guarded and zeroed (invariant 4), and holds
/// [`LIVE_LOCK`] in shared mode.
unsafe fn make_one(slot: StackSlot, config: StackConfig) -> io::Result<NonNull<StackTop>> {
    let at = |addr| NonNull::new(ptr::with_exposed_provenance_mut::<u8>(addr)).expect("mapped");
    let top = at(config.top_of(slot));
    let tid = TID_BASE | slot.index();
    // SAFETY: [low, top) is part of the slot, and zeroed where the block will be (caller).
    let block = unsafe { tls::create(at(slot.low()), top, tid) }?;
    // The ABI requires 16; in practice the block's own alignment is at least that.
    let sp = block.stack_top.as_ptr().addr() & !15;
    let top = top.cast::<StackTop>();
    let header = StackTop {
        next: None,
        batch: None,
        base: slot.base(),
        tp: block.tp,
        index: slot.index(),
        sp_below: (top.as_ptr().addr() - sp) as u32,
        chunk: slot.chunk_id(),
        class: slot.class(),
        flags: 0,
    };
    // SAFETY: [top, top + 64) lies in the slot and is aligned: a slot's end and the pad are
    // multiples of 64.
    unsafe { top.write(header) };
    slot.set_live();
    // SAFETY: no code runs on the block yet.
    unsafe { tls::refresh_new_block(&block) };
    Ok(top)
}

/// Returns the slot of a stack.
fn slot_of(top: NonNull<StackTop>) -> StackSlot {
    // SAFETY: the caller owns the batch, so the stack too; the fields are written once (invariant
    // 2).
    let top = unsafe { top.as_ref() };
    StackSlot::find(top.chunk, top.index)
}

/// Discards the pages of pooled stacks that lie deeper than what the next goroutine will likely
/// use.
pub(super) fn trim(batch: &StackBatch<StackTop>) {
    debug_assert!(batch.len() <= BATCH_MAX);
    let mut spans = [Span::EMPTY; BATCH_MAX];
    let mut n = 0;
    batch.for_each(|top| {
        let slot = slot_of(top);
        // SAFETY: the caller owns the batch; the field is written once.
        let sp = top.as_ptr().addr() - unsafe { top.as_ref() }.sp_below as usize;
        let mark = (slot.end() - KEEP_BYTES).min((sp & !(mm::page() - 1)) - KEEP_BELOW_SP_BYTES);
        let mark = mark & !(mm::page() - 1);
        if mark > slot.low() {
            spans[n] = Span::new(slot.low(), mark);
            n += 1;
        }
    });
    // If the kernel refuses (mlockall before Linux 5.18), the pages stay.
    // SAFETY: the caller owns the stacks, and no code runs on them; below the mark nothing is in
    // use.
    let _ = unsafe { mm::discard(&spans[..n]) };
}

/// Turns stacks, at most [`BATCH_MAX`], back into unused slots of their class.
#[cold]
pub(super) fn retire(class: SizeClass, mut batch: StackBatch<StackTop>) {
    let mut slots = SlotList::<BATCH_MAX>::new();
    LIVE_LOCK.shared(|| {
        while let Some(top) = batch.pop() {
            let slot = slot_of(top);
            debug_assert!(slot.class() == class);
            slot.clear_live();
            // SAFETY: the batch owned the stack; after this only its slot is used.
            unsafe { tls::destroy(top.as_ref().tp) };
            slots.push(slot);
        }
    });
    return_slots(&slots);
}

/// Zeroes slots that this thread has taken, and returns them to their class pool.
fn return_slots<const N: usize>(slots: &SlotList<N>) {
    let mut spans = [Span::EMPTY; N];
    let mut class = None;
    for (slot, span) in slots.iter().zip(&mut spans) {
        *span = Span::new(slot.low(), slot.end());
        class = Some(slot.class());
    }
    let (Some(class), spans) = (class, &spans[..slots.len()]) else { return };
    // SAFETY: this thread has taken the slots, and nothing in them is in use.
    if unsafe { mm::discard(spans) }.is_err() {
        spans.iter().for_each(|&span| wipe_slow(span));
    }
    arena::return_unused(class, slots.iter());
}

/// Zeroes the top of a slot, which `tls::create` expects to be zero (invariant 4), if the kernel
/// refuses to discard: under `mlockall` before Linux 5.18. Those pages are resident anyway.
#[cold]
fn wipe_slow(slot: Span) {
    let block = tls::init().map_or(0, tls::BlockLayout::bytes).next_multiple_of(PAGE);
    let len = slot.len.min(POPULATED_PAGES_MAX * PAGE + block);
    let at = ptr::with_exposed_provenance_mut::<u8>(slot.base + slot.len - len);
    // SAFETY: the top of a slot that this thread has taken.
    unsafe { at.write_bytes(0, len) };
}

/// Calls `f` with the thread pointer of every live stack. No stack is made or retired meanwhile;
/// `f` must not do so either.
pub(super) fn for_each_block(f: &mut dyn FnMut(NonNull<u8>)) {
    let Ok(config) = StackConfig::get() else { return };
    LIVE_LOCK.exclusive(|| {
        for slot in arena::chunks().flat_map(arena::Chunk::live_slots) {
            let top = ptr::with_exposed_provenance::<StackTop>(config.top_of(slot));
            // SAFETY: the slot is live and the lock is held, so the header is complete and stays;
            // `tp` is never written again (invariant 2), so the goroutine on it may continue to
            // run.
            f(unsafe { (*top).tp });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_leaves_as_much_stack_with_any_page_and_block() {
        const KIB: usize = 1 << 10;
        let slot = |asked: usize, page: usize, block: usize| {
            let guard = arena::GUARD_BYTES.max(page);
            let class = class_with(SizeClass::of(asked).unwrap(), asked, guard, block);
            assert!(guard.is_multiple_of(page) && class.slot_bytes().is_multiple_of(page));
            (class.slot_bytes(), class.slot_bytes() - guard - block.next_multiple_of(LINE))
        };
        for asked in [1, 4, 16, 17, 48, 64, 65, 100, 256, 300, 1024, 3000, 1 << 19] {
            let asked = asked * KIB;
            let (ordinary, _) = slot(asked, 4 * KIB, 2_768);
            assert_eq!(ordinary, asked.next_power_of_two().max(64 * KIB));
            for page in [4 * KIB, 16 * KIB, 64 * KIB] {
                for block in [2_768, 8 * KIB, 20 * KIB, 48 * KIB, 64 * KIB, 1 << 20] {
                    let (_, here) = slot(asked, page, block);
                    let least = asked.max(64 * KIB) - arena::GUARD_BYTES - ORDINARY_BLOCK_BYTES;
                    assert!(here >= least, "{asked} with pages of {page}, block {block}: {here}");
                }
            }
            assert_eq!(slot(asked, 16 * KIB, 2_768).0, ordinary);
        }
        assert_eq!(slot(256 * KIB, 64 * KIB, 2_768).0, 512 * KIB);
        assert_eq!(slot(1 << 30, 64 * KIB, 2_768).0, 1 << 30);
    }

    #[test]
    fn colours_use_the_slack_and_cost_no_page() {
        assert_eq!(colours(4_480), 44); // glibc 2.36 with its dlopen reserve: two pages
        assert_eq!(colours(2_768), 6); // without: one page
        assert_eq!((hot_pages(4_480), hot_pages(2_768)), (2, 1));
        assert_eq!(colours(4_096 - 64 - PARKED_BYTES), COLOURS_MAX); // none left: a page more
        for block in (64usize..20_000).step_by(16) {
            let worst = need_bytes(block) + (colours(block) - 1) * LINE;
            assert!(worst <= hot_pages(block) * PAGE, "{block}");
            assert!(hot_pages(block) <= need_bytes(block).div_ceil(PAGE) + 1);
            assert!((COLOURS_MIN..=COLOURS_MAX).contains(&colours(block)));
        }
    }
}
