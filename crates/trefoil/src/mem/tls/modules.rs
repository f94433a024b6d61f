//! The modules (program, shared objects) whose TLS lies in every block, and their initial images.
//!
//! Invariants:
//! 1. A published table is never freed: `create` and `recycle` read it without a lock. A new one is
//!    published only when a `dlopen`/`dlclose` changed the static set, so the leak is bounded by that.
//! 2. Images are copies of ours, never freed: `dlclose` unmaps the loader's while a reader may hold the
//!    table. The copy of a small module includes its zeroes, so that filling it is one memcpy.
//! 3. libc's area is in no list of images: its initial state comes from a real thread (it holds
//!    pointers that no image has), and a recycled block keeps it for malloc's cache.

use super::Layout;
use super::raw::load;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

/// glibc: the DTV entry of a module whose TLS was not asked for yet.
pub(super) const UNALLOCATED: usize = usize::MAX;

/// One module's place in every block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    /// Number in the DTV, from 1.
    pub(super) id: usize,
    /// Begins at `tp - under`.
    pub(super) under: usize,
    /// Our copy of the initial image; what is not in it, up to `size`, is zero.
    image: &'static [u8],
    /// The part of it that the file gave.
    filled: usize,
    pub(super) size: usize,
}

/// Up to this size a module's zeroes are copied rather than written: one call less, and it still fits
/// in the first-level cache beside the rest.
const WHOLE_MAX: usize = 1024;

impl Module {
    /// # Safety
    /// The segment is loaded.
    pub(super) unsafe fn new(s: &Segment, under: usize) -> Self {
        // SAFETY: a loaded module's image is readable.
        let mut image = unsafe { s.bytes() }.to_vec();
        if s.size <= WHOLE_MAX {
            image.resize(s.size, 0);
        }
        Self { id: s.id, under, image: Vec::leak(image), filled: s.filled, size: s.size }
    }

    /// # Safety
    /// The segment is loaded.
    unsafe fn is(&self, s: &Segment) -> bool {
        // SAFETY: the caller's.
        (self.id, self.size, self.filled) == (s.id, s.size, s.filled)
            && unsafe { s.bytes() } == &self.image[..s.filled]
    }

    /// # Safety
    /// The block at `tp` is writable and reaches down to this module.
    #[inline]
    pub(super) unsafe fn fill(&self, tp: usize) {
        let at = (tp - self.under) as *mut u8;
        // SAFETY: the area is the module's own (caller), of `size` bytes.
        unsafe {
            at.copy_from_nonoverlapping(self.image.as_ptr(), self.image.len());
            if self.image.len() < self.size {
                at.add(self.image.len()).write_bytes(0, self.size - self.image.len());
            }
        }
    }

    /// As `fill`, for a block whose goroutine has been inside `dlopen`: the module's constructors may
    /// have written variables already. A byte that is still zero has not been written.
    ///
    /// # Safety
    /// As for `fill`.
    pub(super) unsafe fn fill_untouched(&self, tp: usize) {
        for (i, &byte) in self.image[..self.filled].iter().enumerate() {
            let at = (tp - self.under + i) as *mut u8;
            // SAFETY: as in `fill`.
            unsafe {
                if *at == 0 {
                    *at = byte;
                }
            }
        }
    }

    /// # Safety
    /// As for `fill`.
    pub(super) unsafe fn clear(&self, tp: usize) {
        // SAFETY: as in `fill`.
        unsafe { ((tp - self.under) as *mut u8).write_bytes(0, self.size) };
    }
}

/// A PT_TLS segment as the loader reports it.
pub(super) struct Segment {
    pub(super) id: usize,
    pub(super) image: usize,
    pub(super) filled: usize,
    pub(super) size: usize,
    pub(super) align: usize,
}

impl Segment {
    /// # Safety
    /// The module is loaded.
    unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the loader keeps the image in the module's read-only data.
        unsafe { std::slice::from_raw_parts(self.image as *const u8, self.filled) }
    }
}

/// Every module with TLS, static or not.
pub(super) fn segments() -> Vec<Segment> {
    unsafe extern "C" fn each(
        info: *mut libc::dl_phdr_info,
        size: usize,
        out: *mut c_void,
    ) -> c_int {
        // SAFETY: dl_iterate_phdr passes a valid record; `out` is the vector below.
        let (info, out) = unsafe { (&*info, &mut *out.cast::<Vec<Segment>>()) };
        if size < size_of::<libc::dl_phdr_info>() || info.dlpi_tls_modid == 0 {
            return 0;
        }
        // SAFETY: the loader's own table of `dlpi_phnum` headers.
        let headers =
            unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        out.extend(headers.iter().filter(|h| h.p_type == libc::PT_TLS).map(|h| Segment {
            id: info.dlpi_tls_modid,
            image: (info.dlpi_addr + h.p_vaddr) as usize,
            filled: h.p_filesz as usize,
            size: h.p_memsz as usize,
            align: h.p_align as usize,
        }));
        0
    }
    let mut all = Vec::<Segment>::new();
    // SAFETY: `each` matches the callback's type and uses `all` only during the call.
    unsafe { libc::dl_iterate_phdr(Some(each), (&raw mut all).cast()) };
    all
}

/// What `recycle` walks. Small and flat: it is on the path of every goroutine's end.
pub(crate) struct Table {
    pub(super) modules: Box<[Module]>,
}

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());
/// One publisher at a time (`init`, `dlopen`, `dlclose`), with the (number, image) of the modules that
/// have no fixed place: they are asked once.
static PUBLISHING: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

#[inline(always)]
pub(super) fn table() -> &'static Table {
    // Acquire pairs with `publish`: without it a reader could see the pointer before the list.
    let table = TABLE.load(Ordering::Acquire);
    debug_assert!(!table.is_null(), "tls::init comes first");
    // SAFETY: published after `init`, never freed (invariant 1).
    unsafe { &*table }
}

fn publish(modules: Vec<Module>) {
    let table = Box::leak(Box::new(Table { modules: modules.into() }));
    TABLE.store(table, Ordering::Release);
}

/// The table of start-up; a second call (tests learn the layout twice) changes nothing.
pub(super) fn publish_first(modules: Vec<Module>) {
    let _one = PUBLISHING.lock().unwrap_or_else(|e| e.into_inner());
    if TABLE.load(Ordering::Acquire).is_null() {
        publish(modules);
    }
}

/// What one pass over the loader's list found.
#[derive(Default)]
pub(crate) struct Change {
    pub(crate) came: Vec<Module>,
    pub(crate) went: Vec<Module>,
}

/// Looks at the loader's list again and publishes the new table if the static set changed. `below`
/// bounds the static area, `libc` is libc's module number. Runs on the thread that loaded.
pub(super) fn refresh(below: usize, libc: usize) -> Change {
    /// What the compiler passes for a general-dynamic variable.
    #[repr(C)]
    struct Index {
        module: usize,
        offset: usize,
    }
    unsafe extern "C" {
        fn __tls_get_addr(index: *const Index) -> *mut c_void;
    }
    let mut dynamic = PUBLISHING.lock().unwrap_or_else(|e| e.into_inner());
    if TABLE.load(Ordering::Acquire).is_null() {
        return Change::default();
    }
    let tp = super::raw::thread_pointer();
    let (old, mut now, mut change) = (table(), Vec::new(), Change::default());
    let segments = segments();
    dynamic.retain(|d| segments.iter().any(|s| *d == (s.id, s.image)));
    for s in segments.into_iter().filter(|s| s.id != libc) {
        if dynamic.contains(&(s.id, s.image)) {
            continue;
        }
        // SAFETY: the loader has just listed it, and dlopen's caller keeps it loaded.
        if let Some(known) = old.modules.iter().find(|m| unsafe { m.is(&s) }) {
            now.push(*known);
            continue;
        }
        // Nothing but the address tells whether a module has a fixed place: DF_STATIC_TLS is not set
        // for TLS descriptors that glibc resolved statically. A dynamic module is allocated by the
        // question, for this goroutine only; `recycle` gives that back.
        // SAFETY: the module is loaded: its number is valid.
        let at = unsafe { __tls_get_addr(&Index { module: s.id, offset: 0 }) } as usize;
        if !(tp - below..tp).contains(&at) {
            dynamic.push((s.id, s.image));
            continue;
        }
        // SAFETY: as above.
        let new = unsafe { Module::new(&s, tp - at) };
        change.came.push(new);
        now.push(new);
    }
    change.went = old.modules.iter().filter(|m| !now.contains(m)).copied().collect();
    if !change.came.is_empty() || !change.went.is_empty() {
        publish(now);
    }
    change
}

/// A goroutine's dynamic thread vector: `[-1]` length, `[0]` generation, then (address, to free).
pub(super) struct Dtv(usize);

impl Dtv {
    /// # Safety
    /// `tp` is a complete block.
    #[inline(always)]
    pub(super) unsafe fn of(tp: usize) -> Self {
        // SAFETY: tcbhead_t: the second word is the DTV, on every glibc for x86_64.
        Self(unsafe { load(tp + 8) })
    }

    #[inline(always)]
    pub(super) fn entry(&self, i: usize) -> usize {
        self.0 + i * 16
    }

    /// # Safety
    /// The DTV is alive and nobody else uses it.
    #[inline(always)]
    pub(super) unsafe fn len(&self) -> usize {
        // SAFETY: entry −1 holds the length.
        unsafe { load(self.0 - 16) }
    }

    /// Gives the TLS that `__tls_get_addr` allocated back.
    ///
    /// # Safety
    /// As for `len`; the goroutine's code no longer holds addresses of these variables.
    #[inline]
    pub(super) unsafe fn free_dynamic(&self, l: &Layout) {
        // SAFETY: the caller's; entry 0 holds the generation.
        if l.quiet != Some(unsafe { load(self.0) }) {
            // SAFETY: the caller's.
            unsafe { self.free_dynamic_slow(l.fixed_last) };
        }
    }

    #[cold]
    unsafe fn free_dynamic_slow(&self, fixed: usize) {
        // SAFETY: the caller's; entries up to the length exist.
        for i in fixed + 1..=unsafe { self.len() } {
            // SAFETY: as above; `to_free` is malloc's (glibc took it from there) or null.
            unsafe {
                let to_free: *mut c_void = load(self.entry(i) + 8);
                if !to_free.is_null() {
                    super::raw::store(self.entry(i), [UNALLOCATED, 0]);
                    libc::free(to_free);
                }
            }
        }
    }

    /// Entry −1: where malloc's memory begins.
    pub(super) fn start(&self) -> *mut [usize; 2] {
        (self.0 - 16) as *mut [usize; 2]
    }
}
