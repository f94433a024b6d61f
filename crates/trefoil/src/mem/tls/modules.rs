//! The modules (program, shared objects) whose TLS lies in every block, and their initial images.
//!
//! Invariants:
//! 1. A published table is never freed: `create` and `recycle` read it without a lock. A new one is
//!    published only when a `dlopen`/`dlclose` changed the static set, so the leak is bounded by that.
//! 2. Images are copies of ours, never freed: `dlclose` unmaps the loader's while a reader may hold the
//!    table. The copy of a small module includes its zeroes, so that filling it is one memcpy.
//! 3. libc's area is in no list of images: its initial state comes from a real thread (it holds
//!    pointers that no image has), and a recycled block keeps it for malloc's cache.
//! 4. A module that the loader lists may be another thread's, which unloads it now or has not relocated
//!    it yet. So its image is read only inside `dl_iterate_phdr`, below_tp the lock that unmapping takes,
//!    and it is asked for its place only while it is pinned (`refs`). `__tls_get_addr` inside the
//!    callback would take the loader's locks in the wrong order. (Nobody tells which modules one
//!    dlopen brought, so a pin may hold another's for a moment after its dlclose, as POSIX allows.)
//! 5. Blocks are brought up to date before the lock of `PUBLISHING` is free: who finds its module in
//!    the table may write to it at once.

use super::Layout;
use super::raw::load;
use crate::sys::mm::{self, PAGE, Span};
use crate::sys::objects;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

/// glibc: the DTV entry of a module whose TLS was not asked for yet.
pub(super) const UNALLOCATED: usize = usize::MAX;

/// One module's place in every block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    /// Number in the DTV, from 1.
    pub(super) id: usize,
    /// Begins at `tp - below_tp`.
    pub(super) below_tp: usize,
    /// Our copy of the initial image; what is not in it, up to `size`, is zero.
    image: &'static [u8],
    /// The part of it that the file gave.
    filled: usize,
    pub(super) size: usize,
}

/// Up to this size a module's zeroes are copied rather than written: one call less, and it still fits
/// in the first-level cache beside the rest.
const WHOLE_MAX: usize = 1024;

/// Up to this size zeroes are written at a goroutine's end, whether it has touched them or not. Eight pages
/// take 1.5 µs; giving them back takes 0.3 µs, and 2.5 µs more for the first that is touched again. At 16
/// pages the two are equal.
const WRITTEN_ZEROES_MAX: usize = 8 * PAGE;

impl Module {
    pub(super) fn new(s: &Segment, below_tp: usize) -> Self {
        let mut image = s.image.clone();
        if s.size <= WHOLE_MAX {
            image.resize(s.size, 0);
        }
        Self { id: s.id, below_tp, image: Vec::leak(image), filled: s.image.len(), size: s.size }
    }

    fn is(&self, s: &Segment) -> bool {
        (self.id, self.size) == (s.id, s.size) && self.image[..self.filled] == s.image[..]
    }

    /// Writes the initial image.
    ///
    /// # Safety
    /// The block at `tp` is writable, in private anonymous memory, and reaches down to this module.
    #[inline]
    pub(super) unsafe fn fill(&self, tp: usize) {
        let at = (tp - self.below_tp) as *mut u8;
        // SAFETY: the area is the module's own (caller), of `size` bytes.
        unsafe {
            at.copy_from_nonoverlapping(self.image.as_ptr(), self.image.len());
            if self.image.len() < self.size {
                let (rest, len) = (at.add(self.image.len()), self.size - self.image.len());
                if len <= WRITTEN_ZEROES_MAX {
                    rest.write_bytes(0, len);
                } else {
                    zero_large(rest, len);
                }
            }
        }
    }

    /// As `fill`, where the area reads as zeroes: the rest is not touched, because it may be large.
    ///
    /// # Safety
    /// As for `fill`.
    #[inline]
    pub(super) unsafe fn fill_zeroed(&self, tp: usize) {
        let at = (tp - self.below_tp) as *mut u8;
        // SAFETY: as in `fill`.
        unsafe { at.copy_from_nonoverlapping(self.image.as_ptr(), self.filled) };
    }

    /// As `fill`, for a block whose goroutine has been inside `dlopen`: the module's constructors may
    /// have written variables already. A byte that is still zero has not been written.
    ///
    /// # Safety
    /// As for `fill`.
    pub(super) unsafe fn fill_untouched(&self, tp: usize) {
        for (i, &byte) in self.image[..self.filled].iter().enumerate() {
            let at = (tp - self.below_tp + i) as *mut u8;
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
        unsafe { ((tp - self.below_tp) as *mut u8).write_bytes(0, self.size) };
    }
}

/// Zeroes a large area: gives its whole pages back to the kernel. So a page that no goroutine has written
/// stays without memory, and a page that one has written is not kept for the next, which may not need it.
///
/// # Safety
/// The area is the caller's, in private anonymous memory.
#[cold]
unsafe fn zero_large(at: *mut u8, len: usize) {
    let (low, high) = (at.addr(), at.addr() + len);
    let pages = Span::new(low.next_multiple_of(PAGE), high & !(PAGE - 1));
    // SAFETY: inside the area (caller), whose contents are not needed.
    unsafe {
        if mm::discard(&[pages]).is_err() {
            // The memory is locked, on Linux before 5.18.
            return at.write_bytes(0, len);
        }
        let end = pages.base + pages.len;
        at.write_bytes(0, pages.base - low);
        at.add(end - low).write_bytes(0, high - end);
    }
}

/// A PT_TLS segment as the loader reports it.
pub(super) struct Segment {
    pub(super) id: usize,
    /// Of the module, as the loader knows it.
    name: CString,
    /// The loader's image lies here, as long as the module is loaded.
    at: usize,
    /// A copy of it.
    image: Vec<u8>,
    pub(super) size: usize,
    pub(super) align: usize,
}

impl Segment {
    fn key(&self) -> Key {
        (self.id, self.at, self.name.clone())
    }
}

/// A module with TLS: its number, where its image lies, its name. Numbers and addresses are used again.
type Key = (usize, usize, CString);

/// Every module with TLS, static or not.
pub(super) fn segments() -> Vec<Segment> {
    let mut all = Vec::new();
    objects::for_each(|info, headers| {
        if info.dlpi_tls_modid == 0 {
            return;
        }
        // SAFETY: the loader's string.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) };
        all.extend(headers.iter().filter(|h| h.p_type == libc::PT_TLS).map(|h| {
            let at = (info.dlpi_addr + h.p_vaddr) as usize;
            // SAFETY: in the module's data, which stays mapped during this call (invariant 4).
            let image = unsafe { std::slice::from_raw_parts(at as *const u8, h.p_filesz as usize) };
            Segment {
                id: info.dlpi_tls_modid,
                name: name.into(),
                at,
                image: image.to_vec(),
                size: h.p_memsz as usize,
                align: h.p_align as usize,
            }
        }));
    });
    all
}

/// What `recycle` walks. Small and flat: it is on the path of every goroutine's end.
pub(crate) struct ModuleTable {
    pub(super) modules: Box<[Module]>,
}

static TABLE: AtomicPtr<ModuleTable> = AtomicPtr::new(std::ptr::null_mut());
/// One publisher at a time (`init`, `dlopen`, `dlclose`), with the modules that have no fixed place:
/// they are asked once.
static PUBLISHING: Mutex<Vec<Key>> = Mutex::new(Vec::new());

#[inline(always)]
pub(super) fn table() -> &'static ModuleTable {
    // Acquire pairs with `publish`: without it a reader could see the pointer before the list.
    let table = TABLE.load(Ordering::Acquire);
    debug_assert!(!table.is_null(), "tls::init comes first");
    // SAFETY: published after `init`, never freed (invariant 1).
    unsafe { &*table }
}

fn publish(modules: Vec<Module>) {
    let table = Box::leak(Box::new(ModuleTable { modules: modules.into() }));
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
    pub(crate) added: Vec<Module>,
    pub(crate) removed: Vec<Module>,
}

/// The loader's own dlopen and dlclose, behind our doors.
#[derive(Clone, Copy)]
pub(crate) struct Loader {
    pub(crate) open: unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void,
    pub(crate) close: unsafe extern "C" fn(*mut c_void) -> c_int,
}

/// A reference that keeps a module loaded.
struct ModuleRef {
    key: Key,
    handle: *mut c_void,
    loader: Loader,
}

impl Drop for ModuleRef {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, from `refs`.
        unsafe { (self.loader.close)(self.handle) };
    }
}

/// Pins the modules that are not known yet. Waits for loads and unloads in progress: nobody may hold
/// `PUBLISHING` here, because constructors run inside those, and may dlopen.
fn refs(loader: Loader, libc: usize) -> Vec<ModuleRef> {
    let mut unknown = segments();
    {
        let dynamic = PUBLISHING.lock().unwrap_or_else(|e| e.into_inner());
        let known = &table().modules;
        unknown.retain(|s| {
            s.id != libc && !dynamic.contains(&s.key()) && !known.iter().any(|m| m.is(s))
        });
    }
    let pin = |s: Segment| {
        // SAFETY: a reference to what is loaded already, or null.
        let handle = unsafe { (loader.open)(s.name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then(|| ModuleRef { key: s.key(), handle, loader })
    };
    unknown.into_iter().filter_map(pin).collect()
}

/// Looks at the loader's list again, publishes the new table if the static set changed, and has
/// `update` bring the blocks up to date. `below` bounds the static area, `libc` is libc's module number.
/// Runs on the thread that loaded; `loader` is None on one that unloaded.
pub(super) fn refresh(
    below: usize,
    libc: usize,
    loader: Option<Loader>,
    mut update: impl FnMut(&Change),
) {
    if TABLE.load(Ordering::Acquire).is_null() {
        return;
    }
    let refs = loader.map_or(Vec::new(), |loader| refs(loader, libc));
    rescan(below, libc, &refs, &mut update);
    if !refs.is_empty() {
        // If its owner has closed one meanwhile, it removed only now.
        drop(refs);
        rescan(below, libc, &[], &mut update);
    }
}

fn rescan(below: usize, libc: usize, refs: &[ModuleRef], update: &mut impl FnMut(&Change)) {
    /// What the compiler passes for a general-dynamic variable.
    #[repr(C)]
    struct Index {
        module: usize,
        offset: usize,
    }
    unsafe extern "C" {
        #[allow(clashing_extern_declarations)]
        fn __tls_get_addr(index: *const Index) -> *mut c_void;
    }
    let mut dynamic = PUBLISHING.lock().unwrap_or_else(|e| e.into_inner());
    let tp = super::raw::thread_pointer();
    let (old, mut now, mut change) = (table(), Vec::new(), Change::default());
    let segments = segments();
    dynamic.retain(|d| segments.iter().any(|s| *d == s.key()));
    for s in segments.into_iter().filter(|s| s.id != libc) {
        if dynamic.contains(&s.key()) {
            continue;
        }
        if let Some(known) = old.modules.iter().find(|m| m.is(&s)) {
            now.push(*known);
            continue;
        }
        // Another thread's, which added just now: that thread looks when it has loaded it.
        if !refs.iter().any(|p| p.key == s.key()) {
            continue;
        }
        // Nothing but the address tells whether a module has a fixed place: DF_STATIC_TLS is not set
        // for TLS descriptors that glibc resolved statically. A dynamic module is allocated by the
        // question, for this goroutine only; `recycle` gives that back.
        // SAFETY: the module is pinned: its number is valid.
        let at = unsafe { __tls_get_addr(&Index { module: s.id, offset: 0 }) } as usize;
        if !(tp - below..tp).contains(&at) {
            dynamic.push(s.key());
            continue;
        }
        let new = Module::new(&s, tp - at);
        change.added.push(new);
        now.push(new);
    }
    change.removed = old.modules.iter().filter(|m| !now.contains(m)).copied().collect();
    if !change.added.is_empty() || !change.removed.is_empty() {
        publish(now);
        update(&change);
    }
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
        if l.static_generation != Some(unsafe { load(self.0) }) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::tls::discover::Map;

    const SEVENS: usize = 5_000;
    static IMAGE: [u8; SEVENS] = [7; SEVENS];
    const PAGES: usize = 40;

    fn resident_pages(map: &Map) -> usize {
        let mut resident = [0u8; PAGES];
        // SAFETY: asks about our mapping, and writes a byte for each of its pages.
        let asked =
            unsafe { libc::mincore(map.base as *mut c_void, PAGES * PAGE, resident.as_mut_ptr()) };
        assert_eq!(asked, 0);
        resident.iter().filter(|&&page| page & 1 != 0).count()
    }

    /// A module of `size` bytes that begins `offset` bytes into a mapping full of ones is filled, and
    /// nothing beside it is changed. Returns the pages of the mapping that are in memory then.
    fn filled(offset: usize, size: usize) -> usize {
        let map = Map::new(PAGES * PAGE).unwrap();
        let module = Module { id: 1, below_tp: size, image: &IMAGE, filled: SEVENS, size };
        // SAFETY: a mapping of our own, large enough for the module.
        let (resident, all) = unsafe {
            (map.base as *mut u8).write_bytes(1, PAGES * PAGE);
            module.fill(map.base + offset + size);
            let all = std::slice::from_raw_parts(map.base as *const u8, PAGES * PAGE);
            (resident_pages(&map), all)
        };
        let (before, rest) = all.split_at(offset);
        let (own, after) = rest.split_at(size);
        assert!(before.iter().chain(after).all(|&b| b == 1), "beside {size} at {offset}");
        assert!(own[..SEVENS].iter().all(|&b| b == 7), "the image of {size} at {offset}");
        assert!(own[SEVENS..].iter().all(|&b| b == 0), "the zeroes of {size} at {offset}");
        resident
    }

    #[test]
    fn fill_changes_the_module_and_nothing_beside_it() {
        for offset in [0, 64, PAGE - 64, PAGE] {
            for edge in [SEVENS, SEVENS + WRITTEN_ZEROES_MAX, 20 * PAGE, 30 * PAGE] {
                for size in [edge, edge + 1, edge + 64, edge + PAGE - 8] {
                    let resident = filled(offset, size);
                    mm::test_hooks::FAIL_DISCARD.set(true);
                    assert_eq!(filled(offset, size), PAGES, "nothing can be given back");
                    mm::test_hooks::FAIL_DISCARD.set(false);
                    if size - SEVENS <= WRITTEN_ZEROES_MAX {
                        assert_eq!(resident, PAGES, "{size} at {offset}");
                    } else {
                        let given = (size - SEVENS) / PAGE - 1;
                        assert!(resident <= PAGES - given, "{resident} of {size} at {offset}");
                    }
                }
            }
        }
    }
}
