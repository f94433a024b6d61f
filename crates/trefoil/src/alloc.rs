//! A global allocator whose caches belong to threads, not to goroutines.
//!
//! Allocators keep a cache per thread, and to a library a goroutine *is* a thread: 80 KB per
//! goroutine with jemalloc, 540 KB with mimalloc. [`Alloc`] wraps any allocator so that a goroutine
//! costs it nothing:
//!
//! ```
//! use std::alloc::System; // or tikv_jemallocator::Jemalloc, mimalloc::MiMalloc, …
//!
//! #[global_allocator]
//! static ALLOC: trefoil::alloc::Alloc<System> = trefoil::alloc::Alloc::new(System);
//!
//! let lengths = trefoil::run(|| {
//!     let handles: Vec<_> = (0..100).map(|n| trefoil::go(move || vec![0u8; n].len())).collect();
//!     handles.into_iter().map(|h| h.join().unwrap()).sum::<usize>()
//! });
//! assert_eq!(lengths, 4950);
//! ```
//!
//! The system allocator needs no wrapper: with the feature `std`, which is on by default, `malloc`
//! and the other functions of libc's allocator are served in the same way (see [the
//! limits](crate::guide::limits)).
//!
//! # How it works
//! Blocks of up to 32 KiB come from *magazines*. A magazine is a list of free blocks of one size
//! class, and belongs to the OS thread that runs the goroutine. Larger blocks, blocks with an
//! alignment above 16, and the batches that fill the magazines come from the wrapped allocator,
//! which is called on the OS thread's own stack and thread-local storage. So the allocator sees a
//! few threads, and a goroutine is never preempted while it holds one of the allocator's locks.
//!
//! On a plain thread a call goes straight to the wrapped allocator, with the size rounded up to its
//! class.

use crate::mem::magazine::{self, BlocksOf, Class};
use crate::sched::allocator::in_allocator;
use crate::sched::current_g;
use crate::sched::m::M;
use crate::sched::own_context::with_m;
use std::alloc::{GlobalAlloc, Layout};

/// Wraps a [`GlobalAlloc`] so that goroutines use the caches of the threads on which they run.
///
/// Declare it as the `#[global_allocator]` of a program that uses an allocator other than the
/// system's. The [module](self) has an example of that and says how it works.
///
/// Magazines serve the first type of allocator without fields that the program wraps (jemalloc,
/// mimalloc and most others have none). A second type, or a type with fields, works too: each of
/// its calls runs on the OS thread's own stack, which costs some 15 ns more.
///
/// # Examples
/// ```
/// use std::alloc::{GlobalAlloc, Layout, System};
/// use trefoil::alloc::Alloc;
///
/// static ALLOC: Alloc<System> = Alloc::new(System);
///
/// let layout = Layout::new::<[u64; 4]>();
/// // The wrapper is an allocator like any other.
/// let block = unsafe { ALLOC.alloc(layout) };
/// assert!(!block.is_null());
/// unsafe { ALLOC.dealloc(block, layout) };
/// ```
#[derive(Debug, Default)]
pub struct Alloc<A> {
    inner: A,
}

impl<A> Alloc<A> {
    /// Wraps `inner`.
    ///
    /// ```
    /// # use std::alloc::System;
    /// static ALLOC: trefoil::alloc::Alloc<System> = trefoil::alloc::Alloc::new(System);
    /// ```
    pub const fn new(inner: A) -> Self {
        Alloc { inner }
    }

    /// Returns the wrapped allocator, for functions that it offers beyond [`GlobalAlloc`], such as
    /// statistics.
    ///
    /// ```
    /// # use std::alloc::System;
    /// static ALLOC: trefoil::alloc::Alloc<System> = trefoil::alloc::Alloc::new(System);
    /// let _system: &System = ALLOC.inner();
    /// ```
    pub const fn inner(&self) -> &A {
        &self.inner
    }
}

impl<A: GlobalAlloc> Alloc<A> {
    /// Returns whether the magazines keep blocks of this type of allocator.
    #[inline(always)]
    fn owns_magazines() -> bool {
        // With fields, two values of one type may be two heaps.
        size_of::<A>() == 0 && magazine::owns(BlocksOf::Wrapped, Self::free_block)
    }

    /// Returns a block to the wrapped allocator: [`magazine::GiveBack`].
    unsafe fn free_block(block: *mut u8, class: Class) {
        // SAFETY: a value without fields needs no memory, and one exists: the block was put into a
        // magazine through it.
        let inner = unsafe { std::ptr::NonNull::<A>::dangling().as_ref() };
        // SAFETY: a free block, with the layout that it was allocated with.
        unsafe { inner.dealloc(block, class.layout()) };
    }

    /// Allocates a block of the class; on a goroutine from the M's magazine.
    #[inline(always)]
    fn alloc_class(&self, class: Class) -> *mut u8 {
        if current_g().is_none() {
            // SAFETY: a class is never empty.
            return unsafe { self.inner.alloc(class.layout()) };
        }
        if Self::owns_magazines() {
            // SAFETY: inside `with_m`, and the magazines of its M.
            let pop = |m: &'static M| unsafe { m.magazines(BlocksOf::Wrapped) }.pop(class);
            match with_m(pop) {
                Some(Some(block)) => return block,
                Some(None) => return self.refill(class),
                None => {}
            }
        }
        // SAFETY: a class is never empty.
        self.on_thread(|a| unsafe { a.alloc(class.layout()) })
    }

    /// Frees a block of the class; on a goroutine into the M's magazine.
    ///
    /// # Safety
    /// The block came from [`Alloc::alloc_class`] for this class, and the caller owns it.
    #[inline(always)]
    unsafe fn dealloc_class(&self, class: Class, block: *mut u8) {
        if current_g().is_none() {
            // SAFETY: the caller's block, with the layout that it was allocated with.
            return unsafe { self.inner.dealloc(block, class.layout()) };
        }
        if Self::owns_magazines() {
            let push = |m: &'static M| {
                // SAFETY: inside `with_m`, and the magazines of its M; the caller owned the block.
                let kept = unsafe { m.magazines(BlocksOf::Wrapped).push(class, block) };
                if !kept {
                    m.give_back_surplus(BlocksOf::Wrapped, class, Self::free_block);
                }
            };
            if with_m(push).is_some() {
                return;
            }
        }
        // SAFETY: the caller's block, with the layout that it was allocated with.
        self.on_thread(|a| unsafe { a.dealloc(block, class.layout()) });
    }

    /// Fills the M's magazine, and returns one more block.
    #[cold]
    #[inline(never)]
    fn refill(&self, class: Class) -> *mut u8 {
        // SAFETY: a class is never empty.
        let alloc = || unsafe { self.inner.alloc(class.layout()) };
        // Still on a goroutine, unless this is a signal handler that interrupted the runtime.
        with_m(|m| m.refill(BlocksOf::Wrapped, class, alloc)).unwrap_or_else(alloc)
    }

    /// Calls the wrapped allocator; on a goroutine, on the thread's own stack and thread-local
    /// storage.
    #[inline]
    fn on_thread<T>(&self, f: impl FnOnce(&A) -> T) -> T {
        in_allocator(|| f(&self.inner))
    }
}

// SAFETY: blocks come from the wrapped allocator, with at least the size and alignment asked for. A
// block is freed with the layout that it was allocated with, because both are computed from the
// caller's in the same way. Nothing here unwinds or allocates by itself.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Alloc<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match Class::of(layout) {
            Some(class) => self.alloc_class(class),
            // SAFETY: the caller's layout.
            None => self.on_thread(|a| unsafe { a.alloc(layout) }),
        }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match Class::of(layout) {
            // SAFETY: the caller's block, and the class that its layout had in `alloc`.
            Some(class) => unsafe { self.dealloc_class(class, block) },
            // SAFETY: the caller's.
            None => self.on_thread(|a| unsafe { a.dealloc(block, layout) }),
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match Class::of(layout) {
            Some(class) => {
                let block = self.alloc_class(class);
                if !block.is_null() {
                    // SAFETY: a fresh block of at least that size.
                    unsafe { block.write_bytes(0, layout.size()) };
                }
                block
            }
            // SAFETY: the caller's layout.
            None => self.on_thread(|a| unsafe { a.alloc_zeroed(layout) }),
        }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller promises that the size, rounded up to the alignment, is valid.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        match (Class::of(layout), Class::of(new)) {
            (None, None) => {
                // SAFETY: the caller's; the block has this layout at the wrapped allocator too.
                self.on_thread(|a| unsafe { a.realloc(block, layout, new_size) })
            }
            (Some(old), Some(new)) if old == new => block,
            // SAFETY: the caller's block and sizes; the two blocks do not overlap.
            _ => unsafe {
                let moved = self.alloc(new);
                if !moved.is_null() {
                    moved.copy_from_nonoverlapping(block, layout.size().min(new_size));
                    self.dealloc(block, layout);
                }
                moved
            },
        }
    }
}
