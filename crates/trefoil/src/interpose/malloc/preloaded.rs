//! An allocator that is loaded with `LD_PRELOAD` and defines only the plain names (Debian's
//! jemalloc). Its functions are looked up by `dlsym`, as the next definitions after ours.
//!
//! While they are looked up, `dlsym` may itself allocate (glibc before 2.34). Those calls get
//! memory from a small buffer, which is never freed.

use super::Real;
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The size of the buffer for what `dlsym` allocates.
const EARLY_BYTES: usize = 8 << 10;
/// That buffer. A block in it is called *early*.
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
    // SAFETY: inside the buffer, and only this call has these bytes. They are zero, and used once.
    unsafe { (&raw mut EARLY).cast::<u8>().add(at).cast() }
}

unsafe extern "C" fn early_calloc(count: usize, size: usize) -> *mut c_void {
    // SAFETY: allocates.
    unsafe { early_malloc(count.saturating_mul(size).min(EARLY_BYTES + 1)) }
}

unsafe extern "C" fn early_realloc(block: *mut c_void, size: usize) -> *mut c_void {
    // SAFETY: allocates. The old block's size is not known, but the bytes after it are in the
    // buffer too.
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

/// The functions that are used while the allocator's are looked up.
static DURING_LOOKUP: Real = Real {
    malloc: early_malloc,
    calloc: early_calloc,
    realloc: early_realloc,
    free: early_free,
    memalign: early_aligned,
    valloc: early_malloc,
    pvalloc: early_malloc,
};

static FOUND: OnceLock<Real> = OnceLock::new();
/// The allocator's own `free` and `realloc`, which [`free`] and [`realloc`] call.
static NEXT_FREE: AtomicUsize = AtomicUsize::new(0);
static NEXT_REALLOC: AtomicUsize = AtomicUsize::new(0);

/// Returns whether a block lies in the buffer.
fn is_early(block: *mut c_void) -> bool {
    let start = &raw const EARLY as usize;
    (start..start + EARLY_BYTES).contains(&(block as usize))
}

unsafe extern "C" fn free(block: *mut c_void) {
    if !is_early(block) {
        type Free = unsafe extern "C" fn(*mut c_void);
        // SAFETY: the allocator's function of that name, and its block.
        unsafe { transmute::<usize, Free>(NEXT_FREE.load(Ordering::Relaxed))(block) }
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
    // SAFETY: allocates; the bytes after an early block are in the buffer too.
    unsafe {
        let moved = next(null_mut(), size);
        if !moved.is_null() {
            let rest = &raw const EARLY as usize + EARLY_BYTES - block as usize;
            moved.cast::<u8>().copy_from_nonoverlapping(block.cast(), size.min(rest));
        }
        moved
    }
}

/// Returns the address of the next definition after ours, which every allocator must have.
fn next_symbol(name: &CStr) -> usize {
    // SAFETY: a C string and a pseudo handle.
    let address = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) as usize };
    if address == 0 {
        let name = name.to_string_lossy();
        crate::sys::fatal(format_args!("the preloaded allocator has no {name}"));
    }
    address
}

/// Returns the allocator's functions. Calls from inside `dlsym` meanwhile use [`DURING_LOOKUP`].
pub(super) fn real() -> &'static Real {
    type Allocate = unsafe extern "C" fn(usize) -> *mut c_void;
    type AllocateTwo = unsafe extern "C" fn(usize, usize) -> *mut c_void;
    super::REAL.store((&raw const DURING_LOOKUP).cast_mut(), Ordering::Release);
    NEXT_FREE.store(next_symbol(c"free"), Ordering::Relaxed);
    NEXT_REALLOC.store(next_symbol(c"realloc"), Ordering::Relaxed);
    let (malloc, memalign) = (next_symbol(c"malloc"), next_symbol(c"memalign"));
    // SAFETY: the allocator's functions of these names and types.
    let found = unsafe {
        Real {
            malloc: transmute::<usize, Allocate>(malloc),
            calloc: transmute::<usize, AllocateTwo>(next_symbol(c"calloc")),
            realloc,
            free,
            memalign: transmute::<usize, AllocateTwo>(memalign),
            valloc,
            pvalloc: valloc,
        }
    };
    FOUND.get_or_init(|| found)
}

/// Allocates whole pages. Serves as `pvalloc` too, which must round up the size.
unsafe extern "C" fn valloc(size: usize) -> *mut c_void {
    let page = crate::sys::mm::page();
    // SAFETY: allocates.
    unsafe { (super::real().memalign)(page, size.next_multiple_of(page)) }
}
