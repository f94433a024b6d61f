//! The body of a goroutine: its closure until it is called, its result after it has returned.
//!
//! Both use the same memory, one after the other: in the G itself if they fit (then a spawn
//! allocates nothing), otherwise in a box. The runtime does not know their types, and reaches them
//! only through [`Body`], a table of functions.
//!
//! Invariant 1: the memory contains the closure until `run` has begun, and the result from the end
//! of `run` until `take` or `drop_result`. The join cell says which side owns the result
//! (`join.rs`).

use crate::sched::g::{G, INLINE_BYTES};
use std::alloc::Layout;
use std::any::Any;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The operations on a closure and its result, whose types the runtime does not know.
pub(crate) struct Body {
    /// Consumes the closure and stores its result. Returns whether it panicked.
    pub(crate) run: unsafe fn(&G) -> bool,
    /// Drops an unwanted result. Returns whether it was a panic.
    pub(crate) drop_result: unsafe fn(&G) -> bool,
    /// Frees the box, if there is one.
    pub(crate) free: unsafe fn(&G),
    /// The result needs no destructor and is in no box, so dropping it does nothing, unless it is a
    /// panic.
    pub(crate) has_plain_result: bool,
    /// Returns the closure's type name, whose path names the function that contains the closure.
    pub(crate) type_name: fn() -> &'static str,
    /// Closure and result are in a box, whose address is in the G's payload.
    boxed: bool,
}

impl Body {
    /// The body of a G that has never run a closure.
    pub(crate) const NONE: &'static Body = &Body {
        run: |_| false,
        drop_result: |_| false,
        free: |_| (),
        has_plain_result: true,
        type_name: || "",
        boxed: false,
    };

    /// Returns the address of the closure or result.
    fn storage(&self, g: &G) -> *mut u8 {
        let inline = g.payload.0.get().cast::<u8>();
        if !self.boxed {
            return inline;
        }
        // SAFETY: a boxed body keeps its pointer in the payload (see `TypedBody::put`).
        unsafe { inline.cast::<*mut u8>().read() }
    }

    /// Moves the result out.
    ///
    /// # Safety
    /// The caller owns the result (invariant 1), and `T` is its type.
    pub(crate) unsafe fn take<T>(g: &G) -> std::thread::Result<T> {
        let body = g.body.get();
        // SAFETY: the caller's contract.
        unsafe {
            let result = body.storage(g).cast::<std::thread::Result<T>>().read();
            (body.free)(g);
            result
        }
    }
}

union ClosureOrResult<F, T> {
    closure: ManuallyDrop<F>,
    result: ManuallyDrop<std::thread::Result<T>>,
}

/// The functions of a [`Body`] for one closure type.
pub(crate) struct TypedBody<F, T>(PhantomData<(F, T)>);

impl<F: FnOnce() -> T, T> TypedBody<F, T> {
    const LAYOUT: Layout = Layout::new::<ClosureOrResult<F, T>>();
    /// Whether the body is too large for the G.
    pub(crate) const BOXED: bool = Self::LAYOUT.size() > INLINE_BYTES || Self::LAYOUT.align() > 16;
    const BODY: Body = Body {
        run: Self::run,
        drop_result: Self::drop_result,
        free: Self::free,
        has_plain_result: !Self::BOXED && !std::mem::needs_drop::<T>(),
        type_name: std::any::type_name::<F>,
        boxed: Self::BOXED,
    };

    /// Returns memory for a body that is too large for the G, or null if it fits. Allocates, so
    /// callers call it before they enter the runtime.
    #[inline]
    pub(crate) fn reserve() -> *mut u8 {
        if Self::BOXED {
            Box::into_raw(Box::<ClosureOrResult<F, T>>::new_uninit()).cast()
        } else {
            std::ptr::null_mut()
        }
    }

    /// Frees the memory of `reserve`.
    ///
    /// # Safety
    /// `reserved` came from `reserve`, and no G uses it.
    pub(crate) unsafe fn unreserve(reserved: *mut u8) {
        if Self::BOXED {
            // SAFETY: the caller's contract.
            drop(unsafe {
                Box::from_raw(reserved.cast::<std::mem::MaybeUninit<ClosureOrResult<F, T>>>())
            });
        }
    }

    /// Puts the closure into `g`.
    ///
    /// # Safety
    /// `g` is new and owned by the caller. `reserved` came from `reserve`. `F` and `T` may be used
    /// and dropped on other threads for as long as the goroutine lives.
    #[inline]
    pub(crate) unsafe fn put(g: &G, closure: F, reserved: *mut u8) {
        let inline = g.payload.0.get().cast::<u8>();
        // SAFETY: the caller owns the payload, which is `INLINE_BYTES` long and 16-aligned, and the
        // box of `reserve`. `BOXED` chooses the one that is large enough.
        unsafe {
            let storage = if Self::BOXED {
                inline.cast::<*mut u8>().write(reserved);
                reserved
            } else {
                inline
            };
            storage
                .cast::<ClosureOrResult<F, T>>()
                .write(ClosureOrResult { closure: ManuallyDrop::new(closure) });
        }
        g.body.set(&Self::BODY);
    }

    unsafe fn run(g: &G) -> bool {
        let storage = Self::BODY.storage(g).cast::<ClosureOrResult<F, T>>();
        // SAFETY: invariant 1: the closure is stored here, and is moved out first. The result
        // takes its memory after the closure has been consumed.
        unsafe {
            let closure = ManuallyDrop::take(&mut (*storage).closure);
            let result = catch_unwind(AssertUnwindSafe(closure));
            let panicked = result.is_err();
            storage.write(ClosureOrResult { result: ManuallyDrop::new(result) });
            panicked
        }
    }

    unsafe fn drop_result(g: &G) -> bool {
        // SAFETY: the caller owns the result.
        let result = unsafe { Body::take::<T>(g) };
        let panicked = result.is_err();
        // No handle is left that could receive a panic from the result's `drop`. std aborts in
        // this case, too.
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
        // SAFETY: the box of `reserve`, if there is one. Its contents were moved out before.
        unsafe { Self::unreserve(Self::BODY.storage(g)) };
    }
}
