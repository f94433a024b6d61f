//! The handles of a channel: senders and receivers are counted separately, and the last handle of
//! all frees the channel.
//!
//! | event | effect |
//! |---|---|
//! | the last sender is dropped | the channel is closed; receivers get the values that are left |
//! | the last sender calls [`Handle::drop_keep_open`] | receivers get them, then wait forever |
//! | the last receiver is dropped | the channel is closed, and the values in it are dropped |
//! | the second side is gone | the channel is freed |
//!
//! A channel is one allocation: the `Core`, followed by the ring. It is allocated without an
//! alignment, and the Core begins at the first whole cache line in it: an aligned malloc takes
//! three times as long.
//!
//! Invariants:
//! 1. A `Core` is alive while a handle of either side exists. A handle is the right to use it.
//! 2. When the last receiver is gone, the buffer stays empty: the channel is closed, so no sender
//!    can fill it, and the values in it were taken out. So freeing a channel runs no user code.

use super::buffer::{Contents, ring_layout};
use super::cells::{AtomicU32, Ordering};
use super::core::{ChanSide, Core};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::NonNull;

/// A larger number of handles can only be a leak in a loop.
const MAX_HANDLES: u32 = 1 << 31;

/// A counted reference to one side of a channel of Ts: to its senders if `SENDER`, else to its
/// receivers.
///
/// Invariant in T: a `Sender<&'static str>` must not become a `Sender<&'short str>`.
pub(super) struct Handle<T, const SENDER: bool> {
    core: NonNull<Core>,
    _values: PhantomData<Cell<T>>,
}

pub(super) type SenderHandle<T> = Handle<T, true>;
pub(super) type ReceiverHandle<T> = Handle<T, false>;

/// Creates a channel, and returns a handle of each side.
pub(super) fn new<T>(cap: usize) -> (SenderHandle<T>, ReceiverHandle<T>) {
    const { assert!(size_of::<T>() <= u32::MAX as usize, "a value of 4 GiB or more") };
    let core = allocate(cap, Layout::new::<T>());
    (Handle { core, _values: PhantomData }, Handle { core, _values: PhantomData })
}

/// Creates a channel for elements of this layout.
fn allocate(cap: usize, elem: Layout) -> NonNull<Core> {
    let layout = ChanLayout::of(ring_layout(cap, elem.size(), elem.align()));
    // SAFETY: the size is not zero.
    let start = unsafe { alloc(layout.whole) };
    if start.is_null() {
        handle_alloc_error(layout.whole);
    }
    let offset = start.align_offset(layout.align);
    // SAFETY: by `ChanLayout::of` the Core and its ring fit behind `offset`, aligned. The memory is
    // new, so no other thread can reach it.
    unsafe {
        let core = NonNull::new_unchecked(start.add(offset).cast::<Core>());
        core.write(Core::new(cap, elem, start.add(offset + layout.ring), offset as u32));
        core
    }
}

/// The alignment of everything that malloc returns, in bytes.
const MALLOC_ALIGN: usize = 16;

/// The layout of a channel.
struct ChanLayout {
    whole: Layout,
    /// The alignment of the Core in it.
    align: usize,
    /// The offset of the ring from the beginning of the Core.
    ring: usize,
}

impl ChanLayout {
    fn of(ring: Layout) -> ChanLayout {
        let both = Layout::new::<Core>().extend(ring).and_then(|(both, ring)| {
            let align = both.align();
            let whole = if align > align_of::<Core>() {
                both
            } else {
                Layout::from_size_align(both.size() + align - MALLOC_ALIGN, MALLOC_ALIGN)?
            };
            Ok(ChanLayout { whole, align, ring })
        });
        match both {
            Ok(layout) => layout,
            Err(_) => panic!("a channel of {} bytes does not fit into memory", ring.size()),
        }
    }
}

/// Frees a channel.
///
/// # Safety
/// `core` was made by [`new`], and no handle of it exists any more.
unsafe fn free(core: NonNull<Core>) {
    // SAFETY: the caller's guarantee. The layout is that of `new`, because the values from which it
    // is computed never change.
    unsafe {
        let layout = ChanLayout::of(core.as_ref().buffer.ring_layout());
        let start = core.cast::<u8>().sub(core.as_ref().alloc_offset as usize);
        core.drop_in_place();
        dealloc(start.as_ptr(), layout.whole);
    }
}

impl<T, const SENDER: bool> Handle<T, SENDER> {
    #[inline(always)]
    pub(super) fn core(&self) -> &Core {
        // SAFETY: invariant 1.
        unsafe { self.core.as_ref() }
    }

    /// The side of the handle.
    pub(super) const SIDE: ChanSide = if SENDER { ChanSide::Send } else { ChanSide::Recv };

    fn count(&self) -> &AtomicU32 {
        match Self::SIDE {
            ChanSide::Send => &self.core().sender_count,
            ChanSide::Recv => &self.core().receiver_count,
        }
    }
}

impl<T, const SENDER: bool> Clone for Handle<T, SENDER> {
    fn clone(&self) -> Self {
        // Relaxed: the handle that is cloned keeps the channel alive.
        if self.count().fetch_add(1, Ordering::Relaxed) >= MAX_HANDLES {
            crate::sched::fatal(format_args!("too many handles of a channel"));
        }
        Handle { core: self.core, _values: PhantomData }
    }
}

impl<T, const SENDER: bool> Drop for Handle<T, SENDER> {
    fn drop(&mut self) {
        // AcqRel: the last handle sees what the others did.
        if self.count().fetch_sub(1, Ordering::AcqRel) == 1 {
            self.last_of_side_slow();
        }
    }
}

/// Frees the channel when it is dropped, if the other side is gone already. The last handle of each
/// side drops one.
struct FreeIfSecond(NonNull<Core>);

impl Drop for FreeIfSecond {
    fn drop(&mut self) {
        // SAFETY: invariant 1: the channel is freed only by the second of the two.
        // AcqRel: the second sees what the first did.
        unsafe {
            if self.0.as_ref().one_side_gone.swap(true, Ordering::AcqRel) {
                free(self.0);
            }
        }
    }
}

impl<T> SenderHandle<T> {
    /// Drops a sender. If it is the last, the channel is not closed: no further value comes, and
    /// receivers wait forever.
    pub(super) fn drop_keep_open(self) {
        let this = ManuallyDrop::new(self);
        // AcqRel: as in `drop`.
        if this.count().fetch_sub(1, Ordering::AcqRel) == 1 {
            drop(FreeIfSecond(this.core));
        }
    }
}

impl<T, const SENDER: bool> Handle<T, SENDER> {
    #[inline(never)]
    fn last_of_side_slow(&self) {
        // Frees the channel even if dropping a value panics.
        let _free = FreeIfSecond(self.core);
        let core = self.core();
        if let Some(contents) = core.close_side(Self::SIDE) {
            drop(Discard::<T> { core, contents, _values: PhantomData });
        }
    }
}

impl Core {
    /// Closes the channel, because a side has no handle any more. Returns the values that nobody
    /// will receive.
    fn close_side(&self, side: ChanSide) -> Option<Contents> {
        // Acquire: if the last handle of the other side is gone, no other thread can reach the
        // channel, and no lock is needed.
        let alone = self.one_side_gone.load(Ordering::Acquire);
        if !alone {
            self.close();
        }
        // A closed channel that is empty stays empty.
        if side == ChanSide::Send || self.buffer.len() == 0 {
            return None;
        }
        if alone {
            return Some(self.buffer.take_all());
        }
        let mut contents = None;
        self.locked(|| contents = Some(self.buffer.take_all()));
        contents
    }
}

/// Drops values one by one, and continues if a drop panics.
struct Discard<'a, T> {
    core: &'a Core,
    contents: Contents,
    _values: PhantomData<T>,
}

impl<T> Discard<'_, T> {
    fn next(&mut self) -> Option<T> {
        let mut value = MaybeUninit::<T>::uninit();
        // SAFETY: taken from this buffer, whose type is T. The channel is closed, so no thread
        // pushes. There is a value if the result is true.
        unsafe {
            let found = self.core.buffer.pop_of(&mut self.contents, value.as_mut_ptr().cast());
            found.then(|| value.assume_init())
        }
    }
}

impl<T> Drop for Discard<'_, T> {
    fn drop(&mut self) {
        struct Rest<'r, 'a, T>(&'r mut Discard<'a, T>);
        impl<T> Drop for Rest<'_, '_, T> {
            fn drop(&mut self) {
                while self.0.next().is_some() {}
            }
        }
        while let Some(value) = self.next() {
            // If this drop panics, the rest is dropped while it unwinds. A second panic aborts, as
            // in a Vec.
            let rest = Rest(self);
            drop(value);
            std::mem::forget(rest);
        }
    }
}
