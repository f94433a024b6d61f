//! `malloc` and its kin on a goroutine: blocks come from the M's magazines, and glibc's caches are the thread's.
//!
//! glibc keeps a cache of free blocks and the choice of an arena per thread, in thread-local storage. With a cache per
//! goroutine each of them would keep up to 23 KB, and a goroutine could be preempted while it holds an arena's lock.
//! So a goroutine takes a small block from its M's magazines (`mem/magazine.rs`); everything else calls glibc on the
//! M's own stack and thread-local storage (`M::on_own_context`), where the goroutine is not preempted.
//!
//! The real functions are glibc's public `__libc_malloc` and so on: no lookup by `dlsym`, which may itself allocate. An
//! allocator that is loaded with `LD_PRELOAD` defines those names too (jemalloc, mimalloc and tcmalloc do), so it is
//! the one that is called; magazines are then not used, because asking such an allocator for a block's size touches the
//! caller's thread-local storage.
//!
//! The symbols are weak: a program that brings a `malloc` of its own (an allocator linked with unprefixed names, a
//! sanitizer) keeps it, and nothing here is called.
//!
//! # Size classes
//! A glibc block of `c` bytes has `c - 8` for its user. So the class of a request is that of its size plus 8, and a free
//! block's class follows from `malloc_usable_size`; wherever the block came from (`memalign`, a plain thread), it is
//! large enough for its class.
//!
//! Invariants:
//! 1. All functions that return a block, and the one that frees it, are here: none of them bypasses the others.
//! 2. Debug builds end the process where the runtime allocates with a P in hand (`assert_may_allocate`).
//! 3. On a plain thread, in a signal handler that interrupted the runtime, and inside the runtime, a call goes straight
//!    to the real function.

use crate::alloc::on_thread;
use crate::mem::magazine::{self, BlocksOf, Chain, Class};
use crate::sched::m::{M, with_m};
use std::arch::global_asm;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// Bytes of a block that glibc keeps for itself.
const OVERHEAD: usize = 8;

/// The real functions are glibc's own, so magazines may be used. Set before the first goroutine.
static MAGAZINES: AtomicBool = AtomicBool::new(false);

/// Before the first goroutine.
pub(super) fn init() {
    let address = __libc_malloc as *const ();
    // SAFETY: all zeroes is a value of the structure; `dladdr` fills it in if it answers other than 0.
    let object = unsafe {
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        let known = libc::dladdr(address.cast(), &mut info) != 0 && !info.dli_fname.is_null();
        known.then(|| std::ffi::CStr::from_ptr(info.dli_fname).to_bytes().to_vec())
    };
    let is_glibc = object.is_some_and(|path| {
        path.rsplit(|&byte| byte == b'/').next().is_some_and(|name| name.starts_with(b"libc.so"))
    });
    MAGAZINES.store(is_glibc && magazine::owns(BlocksOf::Libc, give_back), Ordering::Relaxed);
}

/// [`magazine::GiveBack`].
unsafe fn give_back(block: *mut u8, _: Class) {
    // SAFETY: a free block of glibc's.
    unsafe { __libc_free(block.cast()) };
}

/// A request's class. None: too large, or magazines are not used.
#[inline(always)]
fn class_for(size: usize) -> Option<Class> {
    if !MAGAZINES.load(Ordering::Relaxed) {
        return None;
    }
    Class::fitting(size.checked_add(OVERHEAD)?)
}

/// A block for a request of this class; None if this is not a goroutine's code.
#[inline(always)]
fn take(class: Class) -> Option<*mut c_void> {
    // SAFETY: inside `with_m`, of the M that it gave.
    match with_m(|m: &'static M| unsafe { m.magazines(BlocksOf::Libc) }.pop(class))? {
        Some(block) => Some(block.cast()),
        None => Some(refill(class)),
    }
}

/// Fills the M's magazine, and returns one more block.
#[cold]
#[inline(never)]
fn refill(class: Class) -> *mut c_void {
    let size = class.bytes() - OVERHEAD;
    let refilled = with_m(|m| {
        // SAFETY: inside `with_m`, of the M that it gave.
        let n = unsafe { m.magazines(BlocksOf::Libc) }.refill_size(class);
        let (first, chain) = m.on_own_context(|| {
            let mut chain = Chain::EMPTY;
            for _ in 1..n {
                // SAFETY: allocates.
                let block = unsafe { __libc_malloc(size) };
                if block.is_null() {
                    break;
                }
                // SAFETY: ours, and no glibc block is smaller than 24 bytes.
                unsafe { chain.push(block.cast()) };
            }
            // SAFETY: allocates.
            (unsafe { __libc_malloc(size) }, chain)
        });
        // SAFETY: as above.
        let magazines = unsafe { m.magazines(BlocksOf::Libc) };
        magazines.add(class, chain);
        // There may be no memory left for one more, but for those.
        if first.is_null() {
            magazines.pop(class).map_or(null_mut(), <*mut u8>::cast)
        } else {
            first
        }
    });
    // SAFETY: allocates.
    or_no_memory(refilled.unwrap_or_else(|| unsafe { __libc_malloc(size) }))
}

/// Sets the goroutine's errno if there was no memory: the real function has set the thread's.
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
    crate::sched::m::assert_may_allocate();
    if let Some(class) = class_for(size)
        && let Some(block) = take(class)
    {
        return block;
    }
    // SAFETY: allocates.
    or_no_memory(on_thread(|| unsafe { __libc_malloc(size) }))
}

unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::m::assert_may_allocate();
    if let Some(bytes) = count.checked_mul(size)
        && let Some(class) = class_for(bytes)
        && let Some(block) = take(class)
    {
        if !block.is_null() {
            // SAFETY: a fresh block of at least that many bytes.
            unsafe { block.cast::<u8>().write_bytes(0, bytes) };
        }
        return block;
    }
    // SAFETY: allocates; it checks the product.
    or_no_memory(on_thread(|| unsafe { __libc_calloc(count, size) }))
}

unsafe extern "C" fn free(block: *mut c_void) {
    if block.is_null() {
        return;
    }
    #[cfg(debug_assertions)]
    crate::sched::m::assert_may_allocate();
    if MAGAZINES.load(Ordering::Relaxed) {
        let push = |m: &'static M| {
            // SAFETY: glibc's block, which the caller frees; reads its header.
            let size = unsafe { malloc_usable_size(block) } + OVERHEAD;
            let Some(class) = Class::filled_by(size) else {
                // SAFETY: the caller's block.
                return m.on_own_context(|| unsafe { __libc_free(block) });
            };
            // SAFETY: inside `with_m`, of the M that it gave; the block is free, and large enough for the class.
            let kept = unsafe { m.magazines(BlocksOf::Libc).push(class, block.cast()) };
            if !kept {
                give_back_surplus(m, class);
            }
        };
        if with_m(push).is_some() {
            return;
        }
    }
    // SAFETY: the caller's block.
    on_thread(|| unsafe { __libc_free(block) });
}

#[cold]
#[inline(never)]
fn give_back_surplus(m: &'static M, class: Class) {
    // SAFETY: inside `with_m`, of the M that it gave.
    let mut surplus = unsafe { m.magazines(BlocksOf::Libc) }.take_surplus(class);
    m.on_own_context(|| {
        while let Some(block) = surplus.pop() {
            // SAFETY: a free block of this class.
            unsafe { give_back(block, class) };
        }
    });
}

unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::m::assert_may_allocate();
    if !block.is_null()
        && size != 0
        && let Some(class) = class_for(size)
    {
        // SAFETY: glibc's block, which is the caller's; reads its header.
        let usable = unsafe { malloc_usable_size(block) };
        if size <= usable && Class::filled_by(usable + OVERHEAD) == Some(class) {
            return block;
        }
        if Class::filled_by(usable + OVERHEAD).is_some()
            && let Some(moved) = take(class)
        {
            if !moved.is_null() {
                // SAFETY: both blocks have that many bytes, and they do not overlap; the old one is the caller's.
                unsafe {
                    moved.cast::<u8>().copy_from_nonoverlapping(block.cast(), size.min(usable));
                    free(block);
                }
            }
            return moved;
        }
    }
    // SAFETY: the caller's block.
    let moved = on_thread(|| unsafe { __libc_realloc(block, size) });
    // A size of 0 frees the block, and null is no error.
    if size == 0 { moved } else { or_no_memory(moved) }
}

unsafe extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::m::assert_may_allocate();
    // SAFETY: allocates.
    or_no_memory(on_thread(|| unsafe { __libc_memalign(align, size) }))
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
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<usize>()) {
        return libc::EINVAL;
    }
    // SAFETY: allocates; `out` is the caller's, and errno is left as it was (POSIX).
    unsafe {
        let errno = *libc::__errno_location();
        let block = on_thread(|| __libc_memalign(align, size));
        *libc::__errno_location() = errno;
        if block.is_null() {
            return libc::ENOMEM;
        }
        *out = block;
    }
    0
}

unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    // SAFETY: allocates.
    or_no_memory(on_thread(|| unsafe { __libc_valloc(size) }))
}

unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    // SAFETY: allocates.
    or_no_memory(on_thread(|| unsafe { __libc_pvalloc(size) }))
}

/// Defines weak symbols with libc's names.
macro_rules! weak {
    ($($name:ident)+) => {
        global_asm!(
            ".pushsection .text.trefoil_malloc,\"ax\",@progbits",
            $(
                concat!(".weak ", stringify!($name)),
                concat!(".type ", stringify!($name), ",@function"),
                ".p2align 4",
                concat!(stringify!($name), ": jmp {", stringify!($name), "}"),
                concat!(".size ", stringify!($name), ", .-", stringify!($name)),
            )+
            ".popsection",
            $($name = sym $name,)+
        );
    };
}

weak!(malloc calloc realloc free memalign aligned_alloc posix_memalign valloc pvalloc);

/// Something that the linker must keep, so that the symbols above are in the program.
pub(super) fn linked() -> *const () {
    unsafe extern "C" {
        #[link_name = "malloc"]
        fn weak_malloc(size: usize) -> *mut c_void;
    }
    weak_malloc as *const ()
}
