//! Who holds a channel: senders and receivers are counted apart, and the last of all frees it.
//!
//! | event | what happens |
//! |---|---|
//! | the last sender goes | the channel is closed; receivers drain it |
//! | the last sender leaves it open ([`Handle::leave_open`]) | receivers drain it, and wait for ever |
//! | the last receiver goes | the channel is closed, and what lies in it is dropped |
//! | the second side goes | the channel is freed |
//!
//! A channel is one piece of memory: the `Core`, and after it the ring. It is asked for without an alignment, and the
//! Core begins at its first whole line: malloc's way for aligned memory takes three times as long.
//!
//! Invariants:
//! 1. A `Core` is alive while a handle of either side exists; a handle is the right to use it.
//! 2. When the last receiver is gone the buffer is empty for ever: nobody can send (closed), and
//!    what lay in it was taken out. So freeing a channel runs nobody's code.

use super::buffer::{Contents, ring_layout};
use super::cells::{AtomicU32, Ordering};
use super::core::{Core, Side};
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

/// More handles than this are a leak in a loop.
const MAX_HANDLES: u32 = 1 << 31;

/// A counted reference to a channel of T's, of one side.
///
/// Invariant in T: a `Sender<&'static str>` must not become a `Sender<&'short str>`.
pub(super) struct Handle<T, const SENDER: bool> {
    core: NonNull<Core>,
    _values: PhantomData<Cell<T>>,
}

/// Both sides of a new channel.
pub(super) fn new<T>(cap: usize) -> (Handle<T, true>, Handle<T, false>) {
    let memory = Memory::of(ring_layout(cap, size_of::<T>(), align_of::<T>()));
    // SAFETY: the size is not zero.
    let start = unsafe { alloc(memory.whole) };
    if start.is_null() {
        handle_alloc_error(memory.whole);
    }
    let shift = start.align_offset(memory.align);
    // SAFETY: by `Memory::of` the Core and its ring lie inside, aligned, from `shift` on; fresh, and ours.
    let core = unsafe {
        let core = NonNull::new_unchecked(start.add(shift).cast::<Core>());
        core.write(Core::new::<T>(cap, start.add(shift + memory.ring), shift as u32));
        core
    };
    (Handle { core, _values: PhantomData }, Handle { core, _values: PhantomData })
}

/// What malloc aligns everything to.
const USUAL_ALIGN: usize = 16;

/// A channel's memory.
struct Memory {
    whole: Layout,
    /// Of the Core in it.
    align: usize,
    /// Where the ring begins, after the Core's beginning.
    ring: usize,
}

impl Memory {
    fn of(ring: Layout) -> Memory {
        let both = Layout::new::<Core>().extend(ring).and_then(|(both, ring)| {
            let align = both.align();
            let whole = if align > align_of::<Core>() {
                both
            } else {
                Layout::from_size_align(both.size() + align - USUAL_ALIGN, USUAL_ALIGN)?
            };
            Ok(Memory { whole, align, ring })
        });
        match both {
            Ok(memory) => memory,
            Err(_) => panic!("a channel of {} bytes does not fit into memory", ring.size()),
        }
    }
}

/// # Safety
/// Made by [`new`], and nobody uses it any more.
unsafe fn free(core: NonNull<Core>) {
    // SAFETY: the caller's; the layout is that of `new`, because nothing that it follows from ever changes.
    unsafe {
        let memory = Memory::of(core.as_ref().buffer.ring_layout());
        let start = core.cast::<u8>().sub(core.as_ref().shift as usize);
        core.drop_in_place();
        dealloc(start.as_ptr(), memory.whole);
    }
}

impl<T, const SENDER: bool> Handle<T, SENDER> {
    #[inline(always)]
    pub(super) fn core(&self) -> &Core {
        // SAFETY: invariant 1.
        unsafe { self.core.as_ref() }
    }

    /// Which side this is.
    pub(super) const SIDE: Side = if SENDER { Side::Send } else { Side::Recv };

    fn count(&self) -> &AtomicU32 {
        match Self::SIDE {
            Side::Send => &self.core().sender_count,
            Side::Recv => &self.core().receiver_count,
        }
    }
}

impl<T, const SENDER: bool> Clone for Handle<T, SENDER> {
    fn clone(&self) -> Self {
        // Relaxed: the handle that is cloned keeps the channel.
        if self.count().fetch_add(1, Ordering::Relaxed) >= MAX_HANDLES {
            crate::sched::fatal(format_args!("too many handles of a channel"));
        }
        Handle { core: self.core, _values: PhantomData }
    }
}

impl<T, const SENDER: bool> Drop for Handle<T, SENDER> {
    fn drop(&mut self) {
        // AcqRel: the last one sees what the others did.
        if self.count().fetch_sub(1, Ordering::AcqRel) == 1 {
            self.last_of_side_slow();
        }
    }
}

/// What the last handle of a side does at its end.
struct FreeIfSecond(NonNull<Core>);

impl Drop for FreeIfSecond {
    fn drop(&mut self) {
        // SAFETY: invariant 1: the other side's last handle has been here, or will be.
        // AcqRel: the second sees what the first did.
        unsafe {
            if self.0.as_ref().half_dead.swap(true, Ordering::AcqRel) {
                free(self.0);
            }
        }
    }
}

impl<T> Handle<T, true> {
    /// Drops a sender. If it is the last, the channel is not closed: nothing more comes, and
    /// receivers wait for ever.
    pub(super) fn leave_open(self) {
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
        // Also if dropping a value panics.
        let _free = FreeIfSecond(self.core);
        // Acquire: the other side's last handle has closed it and gone. We are alone, and need no lock.
        let alone = self.core().half_dead.load(Ordering::Acquire);
        if !alone {
            self.core().close();
        }
        // Nobody sends to a closed channel: what is empty stays so.
        if !SENDER && self.core().buffer.len() != 0 {
            self.discard_values(alone);
        }
    }

    /// Drops what lies in the channel; there are no receivers any more.
    fn discard_values(&self, alone: bool) {
        let core = self.core();
        let mut contents = None;
        if alone {
            contents = Some(core.buffer.take_all());
        } else {
            core.locked(|| contents = Some(core.buffer.take_all()));
        }
        if let Some(contents) = contents {
            drop(Discard::<T> { core, contents, _values: PhantomData });
        }
    }
}

/// Drops values one by one, and goes on if one of them panics.
struct Discard<'a, T> {
    core: &'a Core,
    contents: Contents,
    _values: PhantomData<T>,
}

impl<T> Discard<'_, T> {
    fn next(&mut self) -> Option<T> {
        // SAFETY: taken from this buffer, whose type is T; it is closed, so nobody pushes.
        unsafe { self.core.buffer.next_of::<T>(&mut self.contents) }
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
            // After a panic the rest is dropped while it unwinds; a second one aborts, as in a Vec.
            let rest = Rest(self);
            drop(value);
            std::mem::forget(rest);
        }
    }
}
