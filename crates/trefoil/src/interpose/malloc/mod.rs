//! `malloc` and related functions on a goroutine: small blocks come from the M's magazines, and
//! glibc's caches stay per thread.
//!
//! glibc keeps a cache of free blocks and its choice of an arena per thread, in thread-local
//! storage. With a cache per goroutine each goroutine would keep up to 23 KB, and a goroutine could
//! be preempted while it holds an arena's lock. So a goroutine takes a small block from its M's
//! magazines (`mem/magazine.rs`). Everything else calls glibc on the M's own stack and thread-local
//! storage (`M::on_own_context`), where the goroutine is not preempted.
//!
//! The real functions are glibc's public `__libc_malloc` and so on: no lookup by `dlsym`, which may
//! itself allocate. If an allocator is loaded with `LD_PRELOAD`, that one is called. Most of them
//! define those names too (mimalloc, tcmalloc); the functions of one that does not are looked up by
//! their plain names (`preloaded.rs`). Magazines are then not used, because asking such an
//! allocator for a block's size touches the caller's thread-local storage.
//!
//! The symbols are weak: a program that defines `malloc` itself (an allocator linked with
//! unprefixed names, a sanitizer) uses its own, and no function here is called.
//!
//! # Size classes
//! A glibc block of `c` bytes has `c - 8` usable bytes. So the class of a request is that of its
//! size plus 8, and a free block's class follows from `malloc_usable_size`. A block is large enough
//! for its class wherever it came from (`memalign`, a plain thread).
//!
//! Invariants:
//! 1. All functions that allocate a block, and the one that frees it, are interposed: a block never
//!    reaches a function that does not know where it came from.
//! 2. Debug builds abort if the runtime calls any of these functions while it uses a P
//!    (`assert_may_allocate`).
//! 3. On a plain thread, in a signal handler that interrupted the runtime, and inside the runtime,
//!    a call only calls the real function.

mod preloaded;
#[cfg(all(test, debug_assertions))]
mod tests;

use crate::interpose::threads::std_lock;
use crate::mem::magazine::{self, BlocksOf, Class};
use crate::sched::allocator::in_allocator;
use crate::sched::m::M;
use crate::sched::own_context::with_m;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

unsafe extern "C" {
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
    fn __libc_realloc(block: *mut c_void, size: usize) -> *mut c_void;
    fn __libc_free(block: *mut c_void);
    fn __libc_memalign(align: usize, size: usize) -> *mut c_void;
    fn __libc_valloc(size: usize) -> *mut c_void;
    fn __libc_pvalloc(size: usize) -> *mut c_void;
    fn malloc_usable_size(block: *mut c_void) -> usize;
}

/// The real functions.
struct Real {
    malloc: unsafe extern "C" fn(usize) -> *mut c_void,
    calloc: unsafe extern "C" fn(usize, usize) -> *mut c_void,
    realloc: unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void),
    memalign: unsafe extern "C" fn(usize, usize) -> *mut c_void,
    valloc: unsafe extern "C" fn(usize) -> *mut c_void,
    pvalloc: unsafe extern "C" fn(usize) -> *mut c_void,
}

/// glibc's functions, or those of a preloaded allocator that defines the same names.
static BY_LIBC_NAMES: Real = Real {
    malloc: __libc_malloc,
    calloc: __libc_calloc,
    realloc: __libc_realloc,
    free: __libc_free,
    memalign: __libc_memalign,
    valloc: __libc_valloc,
    pvalloc: __libc_pvalloc,
};

/// The functions that [`choose`] has found; null until the first call. Not changed afterwards: a
/// block must be freed by the allocator that allocated it.
static REAL: AtomicPtr<Real> = AtomicPtr::new(null_mut());

/// Returns the real functions.
#[inline(always)]
fn real() -> &'static Real {
    // Acquire: pairs with the Release in `choose`.
    // SAFETY: null, or a static that was written before it was published.
    match unsafe { REAL.load(Ordering::Acquire).as_ref() } {
        Some(real) => real,
        None => choose(),
    }
}

/// Finds the real functions, at the first call, while the process has one thread.
///
/// `malloc_usable_size` is the preloaded allocator's if there is one. If `__libc_malloc` lies in
/// the same library, all functions of that library can be called by those names.
#[cold]
fn choose() -> &'static Real {
    let libc_names = library_of(__libc_malloc as *const ());
    let real = if libc_names == library_of(malloc_usable_size as *const ()) {
        &BY_LIBC_NAMES
    } else {
        preloaded::real()
    };
    REAL.store(std::ptr::from_ref(real).cast_mut(), Ordering::Release);
    real
}

/// Returns where the library begins in which an address lies; null if that is not known. Does not
/// allocate.
fn library_of(address: *const ()) -> *mut c_void {
    // SAFETY: all zeros is a value of the structure; `dladdr` fills it if it does not return 0.
    unsafe {
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        if libc::dladdr(address.cast(), &mut info) == 0 { null_mut() } else { info.dli_fbase }
    }
}

/// Bytes of a block that glibc uses itself.
const OVERHEAD_BYTES: usize = 8;
/// The size of glibc's smallest block.
const MIN_BLOCK_BYTES: usize = 32;

/// Whether magazines are used: the real functions are glibc's own. Set before the first goroutine.
static USES_MAGAZINES: AtomicBool = AtomicBool::new(false);

/// Decides whether magazines are used. Called before the first goroutine.
pub(super) fn init() {
    let by_libc_names = std::ptr::eq(real(), &BY_LIBC_NAMES);
    // `gnu_get_libc_version` is never a preloaded allocator's.
    let glibc = library_of(libc::gnu_get_libc_version as *const ());
    let is_glibc = by_libc_names && library_of(__libc_malloc as *const ()) == glibc;
    USES_MAGAZINES.store(is_glibc && magazine::owns(BlocksOf::Libc, free_block), Ordering::Relaxed);
}

/// Returns a block to glibc: [`magazine::GiveBack`].
unsafe fn free_block(block: *mut u8, _: Class) {
    // SAFETY: a free block of glibc's.
    unsafe { (real().free)(block.cast()) };
}

/// Returns a request's class; None if it is too large, or magazines are not used.
#[inline(always)]
fn class_for(size: usize) -> Option<Class> {
    if !USES_MAGAZINES.load(Ordering::Relaxed) {
        return None;
    }
    Class::fitting(size.checked_add(OVERHEAD_BYTES)?.max(MIN_BLOCK_BYTES))
}

/// Returns a block of this class; None if the caller is not a goroutine outside the runtime.
#[inline(always)]
fn take_block(class: Class) -> Option<*mut c_void> {
    // SAFETY: inside `with_m`, and the magazines of its M.
    match with_m(|m: &'static M| unsafe { m.magazines(BlocksOf::Libc) }.pop(class))? {
        Some(block) => Some(block.cast()),
        None => Some(refill(class)),
    }
}

/// Fills the M's magazine, and returns one more block.
#[cold]
#[inline(never)]
fn refill(class: Class) -> *mut c_void {
    // SAFETY: allocates.
    let alloc = || unsafe { (real().malloc)(class.bytes() - OVERHEAD_BYTES) }.cast::<u8>();
    let block = with_m(|m| m.refill(BlocksOf::Libc, class, alloc)).unwrap_or_else(alloc);
    or_no_memory(block.cast())
}

/// Sets the goroutine's errno if there was no memory: the real function has set the thread's errno.
#[inline]
fn or_no_memory(block: *mut c_void) -> *mut c_void {
    if block.is_null() {
        // SAFETY: errno of the running thread or goroutine.
        unsafe { *libc::__errno_location() = libc::ENOMEM };
    }
    block
}

unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    if let Some(class) = class_for(size)
        && let Some(block) = take_block(class)
    {
        return block;
    }
    // SAFETY: allocates.
    or_no_memory(in_allocator(|| unsafe { (real().malloc)(size) }))
}

unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    if let Some(bytes) = count.checked_mul(size)
        && let Some(class) = class_for(bytes)
        && let Some(block) = take_block(class)
    {
        if !block.is_null() {
            // SAFETY: a fresh block of at least that many bytes.
            unsafe { block.cast::<u8>().write_bytes(0, bytes) };
        }
        return block;
    }
    // SAFETY: allocates; it checks the product.
    or_no_memory(in_allocator(|| unsafe { (real().calloc)(count, size) }))
}

unsafe extern "C" fn free(block: *mut c_void) {
    if block.is_null() {
        return;
    }
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    if USES_MAGAZINES.load(Ordering::Relaxed) {
        let push = |m: &'static M| {
            // SAFETY: glibc's block, which the caller frees; reads its header.
            let size = unsafe { malloc_usable_size(block) } + OVERHEAD_BYTES;
            let Some(class) = Class::filled_by(size) else {
                // SAFETY: the caller's block.
                return m.in_allocator(|| unsafe { (real().free)(block) });
            };
            // SAFETY: inside `with_m`, and the magazines of its M; the block is free, and large
            // enough for the class.
            let kept = unsafe { m.magazines(BlocksOf::Libc).push(class, block.cast()) };
            if !kept {
                m.give_back_surplus(BlocksOf::Libc, class, free_block);
            }
        };
        if with_m(push).is_some() {
            return;
        }
        if std_lock::is_searching() {
            // SAFETY: glibc's block, which the caller frees.
            unsafe { std_lock::before_free(block, malloc_usable_size(block)) };
        }
    }
    // SAFETY: the caller's block.
    in_allocator(|| unsafe { (real().free)(block) });
}

unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    if !block.is_null()
        && size != 0
        && let Some(class) = class_for(size)
    {
        // SAFETY: glibc's block, which is the caller's; reads its header.
        let usable = unsafe { malloc_usable_size(block) };
        if size <= usable && Class::filled_by(usable + OVERHEAD_BYTES) == Some(class) {
            return block;
        }
        if Class::filled_by(usable + OVERHEAD_BYTES).is_some()
            && let Some(moved) = take_block(class)
        {
            if !moved.is_null() {
                // SAFETY: both blocks have that many bytes, and they do not overlap; the old one is
                // the caller's.
                unsafe {
                    moved.cast::<u8>().copy_from_nonoverlapping(block.cast(), size.min(usable));
                    free(block);
                }
            }
            return moved;
        }
    }
    // SAFETY: the caller's block.
    let moved = in_allocator(|| unsafe { (real().realloc)(block, size) });
    // A size of 0 frees the block, and null is then no error.
    if size == 0 { moved } else { or_no_memory(moved) }
}

unsafe extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    // SAFETY: allocates.
    or_no_memory(in_allocator(|| unsafe { (real().memalign)(align, size) }))
}

unsafe extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        // SAFETY: errno of the running thread or goroutine.
        unsafe { *libc::__errno_location() = libc::EINVAL };
        return null_mut();
    }
    // SAFETY: the same call.
    unsafe { memalign(align, size) }
}

unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<usize>()) {
        return libc::EINVAL;
    }
    // SAFETY: allocates; `out` is the caller's, and errno is left as it was (POSIX).
    unsafe {
        let errno = *libc::__errno_location();
        let block = in_allocator(|| (real().memalign)(align, size));
        *libc::__errno_location() = errno;
        if block.is_null() {
            return libc::ENOMEM;
        }
        *out = block;
    }
    0
}

unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    // SAFETY: allocates.
    or_no_memory(in_allocator(|| unsafe { (real().valloc)(size) }))
}

unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    // SAFETY: allocates.
    or_no_memory(in_allocator(|| unsafe { (real().pvalloc)(size) }))
}

weak_symbols!(malloc calloc realloc free memalign aligned_alloc posix_memalign valloc pvalloc);

/// Returns the address of a weak symbol: if the linker keeps one, it keeps all.
pub(super) fn kept_symbol() -> *const () {
    unsafe extern "C" {
        #[link_name = "malloc"]
        fn weak_malloc(size: usize) -> *mut c_void;
    }
    weak_malloc as *const ()
}
