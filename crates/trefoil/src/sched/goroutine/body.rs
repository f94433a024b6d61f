//! The body of a goroutine: its closure before the end, its result after it.
//!
//! Both live in one place, one after the other, in the G itself if they fit (a spawn then allocates
//! nothing) or else in a box. The G knows them only through [`Body`], a table of functions.
//!
//! Invariant 1: the place holds the closure until `run` has begun, and the result from the end of
//! `run` until `take` or `drop_result`. The join cell says whose it is.

use crate::sched::g::{G, INLINE_BYTES};
use std::alloc::Layout;
use std::any::Any;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What the runtime can do with a body whose types it does not know.
pub(crate) struct Body {
    /// Consumes the closure, leaves the result. Returns whether it panicked.
    pub(crate) run: unsafe fn(&G) -> bool,
    /// Drops an unwanted result. Returns whether it was a panic.
    pub(crate) drop_result: unsafe fn(&G) -> bool,
    /// Frees the box, if there is one.
    pub(crate) free: unsafe fn(&G),
    /// Dropping the result does nothing, unless it is a panic.
    pub(crate) has_plain_result: bool,
    /// The closure's type, whose path names the function that contains it.
    pub(crate) type_name: fn() -> &'static str,
    boxed: bool,
}

impl Body {
    /// For a G that has never run anything.
    pub(crate) const NONE: &'static Body = &Body {
        run: |_| false,
        drop_result: |_| false,
        free: |_| (),
        has_plain_result: true,
        type_name: || "",
        boxed: false,
    };

    /// Where the result is.
    fn place(&self, g: &G) -> *mut u8 {
        let inline = g.payload.0.get().cast::<u8>();
        if !self.boxed {
            return inline;
        }
        // SAFETY: a boxed body keeps its pointer in the payload (see `Typed::put`).
        unsafe { inline.cast::<*mut u8>().read() }
    }

    /// The result, leaving the place empty.
    ///
    /// # Safety
    /// The caller owns the result (invariant 1), and `T` is its type.
    pub(crate) unsafe fn take<T>(g: &G) -> std::thread::Result<T> {
        let body = g.body.get();
        // SAFETY: the caller's contract.
        unsafe {
            let result = body.place(g).cast::<std::thread::Result<T>>().read();
            (body.free)(g);
            result
        }
    }
}

union Stage<F, T> {
    closure: ManuallyDrop<F>,
    result: ManuallyDrop<std::thread::Result<T>>,
}

/// The functions behind a [`Body`] for one closure type.
pub(crate) struct Typed<F, T>(PhantomData<(F, T)>);

impl<F: FnOnce() -> T, T> Typed<F, T> {
    const LAYOUT: Layout = Layout::new::<Stage<F, T>>();
    const BOXED: bool = Self::LAYOUT.size() > INLINE_BYTES || Self::LAYOUT.align() > 16;
    const BODY: Body = Body {
        run: Self::run,
        drop_result: Self::drop_result,
        free: Self::free,
        has_plain_result: !Self::BOXED && !std::mem::needs_drop::<T>(),
        type_name: std::any::type_name::<F>,
        boxed: Self::BOXED,
    };

    /// Memory for a body too large for the G; null if it fits. Allocates, so it is called before the
    /// runtime is entered.
    #[inline]
    pub(crate) fn reserve() -> *mut u8 {
        if Self::BOXED {
            Box::into_raw(Box::<Stage<F, T>>::new_uninit()).cast()
        } else {
            std::ptr::null_mut()
        }
    }

    /// Takes back what `reserve` gave.
    ///
    /// # Safety
    /// It came from `reserve` and was not put into a G.
    pub(crate) unsafe fn unreserve(reserved: *mut u8) {
        if Self::BOXED {
            // SAFETY: the caller's contract.
            drop(unsafe { Box::from_raw(reserved.cast::<std::mem::MaybeUninit<Stage<F, T>>>()) });
        }
    }

    /// Puts the closure into `g`.
    ///
    /// # Safety
    /// `g` is the caller's, fresh; `reserved` came from `reserve`; both `F` and `T` may be used (and
    /// dropped) on other threads for as long as the goroutine lives.
    #[inline]
    pub(crate) unsafe fn put(g: &G, closure: F, reserved: *mut u8) {
        let inline = g.payload.0.get().cast::<u8>();
        // SAFETY: the payload is 64 bytes, 16-aligned, and ours.
        unsafe {
            let place = if Self::BOXED {
                inline.cast::<*mut u8>().write(reserved);
                reserved
            } else {
                inline
            };
            place.cast::<Stage<F, T>>().write(Stage { closure: ManuallyDrop::new(closure) });
        }
        g.body.set(&Self::BODY);
    }

    unsafe fn run(g: &G) -> bool {
        let stage = Self::BODY.place(g).cast::<Stage<F, T>>();
        // SAFETY: invariant 1: the closure is there and we take it. The result goes to the same
        // place after the closure has been consumed.
        unsafe {
            let closure = ManuallyDrop::take(&mut (*stage).closure);
            let result = catch_unwind(AssertUnwindSafe(closure));
            let panicked = result.is_err();
            stage.write(Stage { result: ManuallyDrop::new(result) });
            panicked
        }
    }

    unsafe fn drop_result(g: &G) -> bool {
        // SAFETY: the caller owns the result.
        let result = unsafe { Body::take::<T>(g) };
        let panicked = result.is_err();
        // A result whose drop panics has nobody to tell: std aborts there too.
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(result))) {
            std::mem::forget::<Box<dyn Any + Send>>(payload);
            crate::sched::fatal(format_args!(
                "goroutine {}: its result panicked while it was dropped",
                g.id()
            ));
        }
        panicked
    }

    unsafe fn free(g: &G) {
        // SAFETY: the box of `reserve`, if there is one, its contents already moved out.
        unsafe { Self::unreserve(Self::BODY.place(g)) };
    }
}
