//! `malloc` and its kin on a goroutine: blocks come from the M's magazines, and glibc's caches are the thread's.
//!
//! glibc keeps a cache of free blocks and the choice of an arena per thread, in thread-local storage. With a cache per
//! goroutine each of them would keep up to 23 KB, and a goroutine could be preempted while it holds an arena's lock.
//! So a goroutine takes a small block from its M's magazines (`mem/magazine.rs`); everything else calls glibc on the
//! M's own stack and thread-local storage (`M::on_own_context`), where the goroutine is not preempted.
//!
//! The real functions are glibc's public `__libc_malloc` and so on: no lookup by `dlsym`, which may itself allocate. An
//! allocator that is loaded with `LD_PRELOAD` is the one that is called: most define those names too (mimalloc,
//! tcmalloc), and one that does not is looked up behind ours ([`preloaded`]). Magazines are then not used, because
//! asking such an allocator for a block's size touches the caller's thread-local storage.
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
use crate::mem::magazine::{self, BlocksOf, Class};
use crate::sched::allocator::with_m;
use crate::sched::m::M;
use std::arch::global_asm;
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

/// glibc's, or those of a preloaded allocator that defines the same names.
static BY_LIBC_NAMES: Real = Real {
    malloc: __libc_malloc,
    calloc: __libc_calloc,
    realloc: __libc_realloc,
    free: __libc_free,
    memalign: __libc_memalign,
    valloc: __libc_valloc,
    pvalloc: __libc_pvalloc,
};

/// Null until the first call. Then it stays: blocks exist that must go back where they came from.
static REAL: AtomicPtr<Real> = AtomicPtr::new(null_mut());

#[inline(always)]
fn real() -> &'static Real {
    // Acquire: pairs with the Release in `choose`.
    // SAFETY: null, or a static that was written before it was published.
    match unsafe { REAL.load(Ordering::Acquire).as_ref() } {
        Some(real) => real,
        None => choose(),
    }
}

/// The first call, while the process has one thread: which functions are the real ones?
///
/// `malloc_usable_size` is the preloaded allocator's if there is one. Where `__libc_malloc` lies in the same library, all
/// of that library's functions can be called by those names.
#[cold]
fn choose() -> &'static Real {
    let of_libc_names = library_of(__libc_malloc as *const ());
    let real = if of_libc_names == library_of(malloc_usable_size as *const ()) {
        &BY_LIBC_NAMES
    } else {
        preloaded::real()
    };
    REAL.store(std::ptr::from_ref(real).cast_mut(), Ordering::Release);
    real
}

/// Where the library begins that an address lies in; null if that is not known. Does not allocate.
fn library_of(address: *const ()) -> *mut c_void {
    // SAFETY: all zeroes is a value of the structure; `dladdr` fills it in if it answers other than 0.
    unsafe {
        let mut info = std::mem::zeroed::<libc::Dl_info>();
        if libc::dladdr(address.cast(), &mut info) == 0 { null_mut() } else { info.dli_fbase }
    }
}

/// An allocator that is loaded with `LD_PRELOAD` and has only the plain names (Debian's jemalloc): looked up behind ours.
mod preloaded {
    use super::Real;
    use std::ffi::{CStr, c_void};
    use std::mem::transmute;
    use std::ptr::null_mut;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Memory for what `dlsym` allocates meanwhile (glibc before 2.34). Never given back.
    const EARLY_BYTES: usize = 8 << 10;
    #[repr(align(16))]
    struct Early(#[allow(dead_code, reason = "read through pointers")] [u8; EARLY_BYTES]);
    static mut EARLY: Early = Early([0; EARLY_BYTES]);
    static EARLY_USED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C" fn early_malloc(size: usize) -> *mut c_void {
        let size = size.next_multiple_of(16);
        let at = EARLY_USED.fetch_add(size, Ordering::Relaxed);
        if at + size > EARLY_BYTES {
            return null_mut();
        }
        // SAFETY: inside the buffer, and nobody else's. It is zeroed, and used once.
        unsafe { (&raw mut EARLY).cast::<u8>().add(at).cast() }
    }
    unsafe extern "C" fn early_calloc(count: usize, size: usize) -> *mut c_void {
        // SAFETY: allocates.
        unsafe { early_malloc(count.saturating_mul(size).min(EARLY_BYTES + 1)) }
    }
    unsafe extern "C" fn early_realloc(block: *mut c_void, size: usize) -> *mut c_void {
        // SAFETY: allocates; the old block's size is not known, but what lies behind it is in the buffer too.
        unsafe {
            let moved = early_malloc(size);
            if !block.is_null() && !moved.is_null() {
                let end = (&raw mut EARLY).cast::<u8>().add(EARLY_BYTES) as usize;
                let bytes = size.min(end - block as usize).min(moved as usize - block as usize);
                moved.cast::<u8>().copy_from_nonoverlapping(block.cast(), bytes);
            }
            moved
        }
    }
    unsafe extern "C" fn early_free(_: *mut c_void) {}
    unsafe extern "C" fn early_aligned(_: usize, _: usize) -> *mut c_void {
        null_mut()
    }

    static WHILE_LOOKING: Real = Real {
        malloc: early_malloc,
        calloc: early_calloc,
        realloc: early_realloc,
        free: early_free,
        memalign: early_aligned,
        valloc: early_malloc,
        pvalloc: early_malloc,
    };

    static FOUND: OnceLock<Real> = OnceLock::new();
    /// The allocator's own `free` and `realloc`, behind [`free`] and [`realloc`].
    static NEXT_FREE: AtomicUsize = AtomicUsize::new(0);
    static NEXT_REALLOC: AtomicUsize = AtomicUsize::new(0);

    fn is_early(block: *mut c_void) -> bool {
        let start = &raw const EARLY as usize;
        (start..start + EARLY_BYTES).contains(&(block as usize))
    }

    unsafe extern "C" fn free(block: *mut c_void) {
        if !is_early(block) {
            // SAFETY: the allocator's function of that name, and its block.
            unsafe {
                transmute::<usize, unsafe extern "C" fn(*mut c_void)>(
                    NEXT_FREE.load(Ordering::Relaxed),
                )(block)
            }
        }
    }

    unsafe extern "C" fn realloc(block: *mut c_void, size: usize) -> *mut c_void {
        type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
        // SAFETY: the allocator's function of that name.
        let next = unsafe { transmute::<usize, Realloc>(NEXT_REALLOC.load(Ordering::Relaxed)) };
        if !is_early(block) {
            // SAFETY: the allocator's block.
            return unsafe { next(block, size) };
        }
        // SAFETY: allocates; what lies behind an early block is in the buffer too.
        unsafe {
            let moved = next(null_mut(), size);
            if !moved.is_null() {
                let rest = &raw const EARLY as usize + EARLY_BYTES - block as usize;
                moved.cast::<u8>().copy_from_nonoverlapping(block.cast(), size.min(rest));
            }
            moved
        }
    }

    fn look_up(name: &CStr) -> usize {
        // SAFETY: a C string and a pseudo handle.
        unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) as usize }
    }

    /// The allocator's functions. While they are looked up, calls from inside `dlsym` find others.
    pub(super) fn real() -> &'static Real {
        super::REAL.store((&raw const WHILE_LOOKING).cast_mut(), Ordering::Release);
        let needed = |name| match look_up(name) {
            0 => super::missing(name),
            at => at,
        };
        NEXT_FREE.store(needed(c"free"), Ordering::Relaxed);
        NEXT_REALLOC.store(needed(c"realloc"), Ordering::Relaxed);
        let (malloc, memalign) = (needed(c"malloc"), needed(c"memalign"));
        // SAFETY: the allocator's functions of these names; whoever has no `valloc` is asked for a block, which its
        // callers (there are none today) would find not aligned.
        let found = unsafe {
            Real {
                malloc: transmute::<usize, unsafe extern "C" fn(usize) -> *mut c_void>(malloc),
                calloc: transmute::<usize, unsafe extern "C" fn(usize, usize) -> *mut c_void>(
                    needed(c"calloc"),
                ),
                realloc,
                free,
                memalign: transmute::<usize, unsafe extern "C" fn(usize, usize) -> *mut c_void>(
                    memalign,
                ),
                valloc,
                pvalloc: valloc,
            }
        };
        FOUND.get_or_init(|| found)
    }

    /// A whole number of pages, which serves `pvalloc` too.
    unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
        const PAGE: usize = 4096;
        // SAFETY: allocates.
        unsafe { (super::real().memalign)(PAGE, size.next_multiple_of(PAGE)) }
    }
}

#[cold]
fn missing(name: &std::ffi::CStr) -> ! {
    crate::sys::fatal(format_args!("the preloaded allocator has no {}", name.to_string_lossy()))
}

/// Bytes of a block that glibc keeps for itself, and of its smallest block.
const OVERHEAD: usize = 8;
const SMALLEST: usize = 32;

/// The real functions are glibc's own, so magazines may be used. Set before the first goroutine.
static MAGAZINES: AtomicBool = AtomicBool::new(false);

/// Before the first goroutine.
pub(super) fn init() {
    let by_libc_names = std::ptr::eq(real(), &BY_LIBC_NAMES);
    // `gnu_get_libc_version` is glibc's in any case.
    let glibc = library_of(libc::gnu_get_libc_version as *const ());
    let is_glibc = by_libc_names && library_of(__libc_malloc as *const ()) == glibc;
    MAGAZINES.store(is_glibc && magazine::owns(BlocksOf::Libc, give_back), Ordering::Relaxed);
}

/// [`magazine::GiveBack`].
unsafe fn give_back(block: *mut u8, _: Class) {
    // SAFETY: a free block of glibc's.
    unsafe { (real().free)(block.cast()) };
}

/// A request's class. None: too large, or magazines are not used.
#[inline(always)]
fn class_for(size: usize) -> Option<Class> {
    if !MAGAZINES.load(Ordering::Relaxed) {
        return None;
    }
    Class::fitting(size.checked_add(OVERHEAD)?.max(SMALLEST))
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
    // SAFETY: allocates.
    let alloc = || unsafe { (real().malloc)(class.bytes() - OVERHEAD) }.cast::<u8>();
    let block = with_m(|m| m.refill(BlocksOf::Libc, class, alloc)).unwrap_or_else(alloc);
    or_no_memory(block.cast())
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
    crate::sched::allocator::assert_may_allocate();
    if let Some(class) = class_for(size)
        && let Some(block) = take(class)
    {
        return block;
    }
    // SAFETY: allocates.
    or_no_memory(on_thread(|| unsafe { (real().malloc)(size) }))
}

unsafe extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
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
    or_no_memory(on_thread(|| unsafe { (real().calloc)(count, size) }))
}

unsafe extern "C" fn free(block: *mut c_void) {
    if block.is_null() {
        return;
    }
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    if MAGAZINES.load(Ordering::Relaxed) {
        let push = |m: &'static M| {
            // SAFETY: glibc's block, which the caller frees; reads its header.
            let size = unsafe { malloc_usable_size(block) } + OVERHEAD;
            let Some(class) = Class::filled_by(size) else {
                // SAFETY: the caller's block.
                return m.on_own_context(|| unsafe { (real().free)(block) });
            };
            // SAFETY: inside `with_m`, of the M that it gave; the block is free, and large enough for the class.
            let kept = unsafe { m.magazines(BlocksOf::Libc).push(class, block.cast()) };
            if !kept {
                m.give_back_surplus(BlocksOf::Libc, class, give_back);
            }
        };
        if with_m(push).is_some() {
            return;
        }
    }
    // SAFETY: the caller's block.
    on_thread(|| unsafe { (real().free)(block) });
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
    let moved = on_thread(|| unsafe { (real().realloc)(block, size) });
    // A size of 0 frees the block, and null is no error.
    if size == 0 { moved } else { or_no_memory(moved) }
}

unsafe extern "C" fn memalign(align: usize, size: usize) -> *mut c_void {
    #[cfg(debug_assertions)]
    crate::sched::allocator::assert_may_allocate();
    // SAFETY: allocates.
    or_no_memory(on_thread(|| unsafe { (real().memalign)(align, size) }))
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
        let block = on_thread(|| (real().memalign)(align, size));
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
    or_no_memory(on_thread(|| unsafe { (real().valloc)(size) }))
}

unsafe extern "C" fn pvalloc(size: usize) -> *mut c_void {
    // SAFETY: allocates.
    or_no_memory(on_thread(|| unsafe { (real().pvalloc)(size) }))
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
