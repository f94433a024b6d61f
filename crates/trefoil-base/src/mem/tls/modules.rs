//! The modules (program, shared objects) whose TLS lies in every block, and their initial images.
//!
//! Invariants:
//! 1. A published table is never freed: `create` and `recycle` read it without a lock. A new one is
//!    published only when a `dlopen` or `dlclose` has changed the modules with a fixed place, so
//!    the leak is bounded by that.
//! 2. Images are copies that are never freed: `dlclose` unmaps the loader's image while another
//!    thread may read the table. The copy of a small module includes its zeroes, so that filling it
//!    is one memcpy.
//! 3. libc is in no table: the initial state of its area comes from a real thread (it contains
//!    pointers that no image has), and a recycled block keeps it for malloc's cache.
//! 4. A module that the loader lists may belong to another thread, which is unloading it or has not
//!    relocated it yet. So its image is read only inside `dl_iterate_phdr`, under the lock that
//!    unmapping takes, and its place is asked for only while a reference keeps it loaded
//!    (`ModuleRef`). `__tls_get_addr` inside the callback would take the loader's locks in the
//!    wrong order. (The loader does not tell which modules one dlopen added, so a reference may
//!    keep another thread's module loaded for a moment after its dlclose, as POSIX allows.)
//! 5. Blocks are updated before the lock of `PUBLISHING` is released: a thread that finds its
//!    module in the table may write to it at once.

use super::BlockLayout;
use super::raw::{self, load};
use super::variant;
use crate::sys::mm::{self, PAGE, Span};
use crate::sys::objects;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The DTV entry of a module whose TLS glibc has not allocated yet.
pub(super) const UNALLOCATED: usize = usize::MAX;

/// A module's place in every block, and its initial image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Module {
    /// Index in the DTV, from 1.
    pub(super) id: usize,
    /// The module's area begins at `tp + offset`.
    pub(super) offset: isize,
    /// A copy of the initial image; the rest up to `size` is zero.
    image: &'static [u8],
    /// Bytes of `image` that come from the file.
    filled: usize,
    pub(super) size: usize,
}

/// Up to this size a module's zeroes are part of the image: that is one call fewer, and the image
/// still fits in the first-level cache beside the rest.
const WHOLE_IMAGE_MAX_BYTES: usize = 1024;

/// Up to this size zeroes are written at a goroutine's end, whether it has touched the area or not.
/// Writing eight pages takes 1.5 µs. Discarding them takes 0.3 µs, and 2.5 µs more for the first
/// page that is touched again. At 16 pages both take the same time.
const WRITTEN_ZEROES_MAX: usize = 8 * PAGE;

impl Module {
    pub(super) fn new(s: &Segment, offset: isize) -> Self {
        let mut image = s.image.clone();
        if s.size <= WHOLE_IMAGE_MAX_BYTES {
            image.resize(s.size, 0);
        }
        Self { id: s.id, offset, image: Vec::leak(image), filled: s.image.len(), size: s.size }
    }

    /// Returns the offsets of its area.
    pub(super) fn area(&self) -> Range<isize> {
        self.offset..self.offset + self.size as isize
    }

    /// Returns whether this is the module of that segment.
    fn is_of(&self, s: &Segment) -> bool {
        (self.id, self.size) == (s.id, s.size) && self.image[..self.filled] == s.image[..]
    }

    /// Writes the initial image.
    ///
    /// # Safety
    /// The block at `tp` is writable, in private anonymous memory, and this module lies in it.
    #[inline]
    pub(super) unsafe fn fill(&self, tp: usize) {
        let at = raw::at(tp, self.offset) as *mut u8;
        // SAFETY: the module's area (caller), of `size` bytes.
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

    /// Writes the image as `fill` does, into an area that reads as zeroes: the rest, which may be
    /// large, is not touched.
    ///
    /// # Safety
    /// As for `fill`.
    #[inline]
    pub(super) unsafe fn fill_zeroed(&self, tp: usize) {
        let at = raw::at(tp, self.offset) as *mut u8;
        // SAFETY: as in `fill`.
        unsafe { at.copy_from_nonoverlapping(self.image.as_ptr(), self.filled) };
    }

    /// Writes the image as `fill` does, for a block whose goroutine has called `dlopen`: the
    /// module's constructors may have written variables already. Only bytes that are still zero are
    /// written.
    ///
    /// # Safety
    /// As for `fill`.
    pub(super) unsafe fn fill_untouched(&self, tp: usize) {
        for (i, &byte) in self.image[..self.filled].iter().enumerate() {
            let at = (raw::at(tp, self.offset) + i) as *mut u8;
            // SAFETY: as in `fill`.
            unsafe {
                if *at == 0 {
                    *at = byte;
                }
            }
        }
    }

    /// Zeroes the area of a module that was unloaded.
    ///
    /// # Safety
    /// As for `fill`.
    pub(super) unsafe fn clear(&self, tp: usize) {
        // SAFETY: as in `fill`.
        unsafe { (raw::at(tp, self.offset) as *mut u8).write_bytes(0, self.size) };
    }
}

/// Zeroes a large area by discarding its whole pages. So a page that no goroutine has written takes
/// no memory, and a page that one has written is not kept for the next, which may not need it.
///
/// # Safety
/// The caller owns the area, which is private anonymous memory.
#[cold]
unsafe fn zero_large(at: *mut u8, len: usize) {
    let (low, high) = (at.addr(), at.addr() + len);
    let page = mm::page();
    if len < 2 * page {
        // SAFETY: the caller's area. It may have no whole page.
        return unsafe { at.write_bytes(0, len) };
    }
    let pages = Span::new(low.next_multiple_of(page), high & !(page - 1));
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
    /// The module's name in the loader.
    name: CString,
    /// Address of the loader's image while the module is loaded.
    at: usize,
    /// A copy of that image.
    image: Vec<u8>,
    pub(super) size: usize,
    pub(super) align: usize,
}

impl Segment {
    fn key(&self) -> Key {
        (self.id, self.at, self.name.clone())
    }
}

/// Identifies a loaded module with TLS: DTV index, address of its image, name. Indices and
/// addresses are reused.
type Key = (usize, usize, CString);

/// Returns the TLS segment of every loaded module, whether its place is fixed or not.
pub(super) fn segments() -> Vec<Segment> {
    let mut all = Vec::new();
    objects::for_each(|info, headers| {
        if info.dlpi_tls_modid == 0 {
            return;
        }
        // SAFETY: a string of the loader, valid during the call.
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

/// Returns whether two lists of segments are those of the same modules.
pub(super) fn same(a: &[Segment], b: &[Segment]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.key() == b.key())
}

/// The modules with a fixed place. Small and flat, because `recycle` walks it at every goroutine's
/// end.
pub(crate) struct ModuleTable {
    pub(super) modules: Box<[Module]>,
}

static TABLE: AtomicPtr<ModuleTable> = AtomicPtr::new(std::ptr::null_mut());
/// Serialises publishers (`init`, `dlopen`, `dlclose`). Its value is the modules that are known to
/// have no fixed place: the place of each is asked for once.
static PUBLISHING: Mutex<Vec<Key>> = Mutex::new(Vec::new());

/// Returns the published table.
#[inline(always)]
pub(super) fn table() -> &'static ModuleTable {
    // Acquire pairs with the Release in `publish`: the table is complete.
    let table = TABLE.load(Ordering::Acquire);
    debug_assert!(!table.is_null(), "tls::init was not called");
    // SAFETY: published after `init`, never freed (invariant 1).
    unsafe { &*table }
}

fn publish(modules: Vec<Module>) {
    let table = Box::leak(Box::new(ModuleTable { modules: modules.into() }));
    TABLE.store(table, Ordering::Release);
}

/// Publishes the modules of start-up. A second call (tests discover the layout twice) does nothing.
pub(super) fn publish_first(modules: Vec<Module>) {
    let _one = PUBLISHING.lock().unwrap_or_else(|e| e.into_inner());
    if TABLE.load(Ordering::Acquire).is_null() {
        publish(modules);
    }
}

/// The difference between two tables.
#[derive(Default)]
pub(crate) struct Change {
    pub added: Vec<Module>,
    pub removed: Vec<Module>,
}

/// The loader's own dlopen and dlclose, behind the interposed functions.
#[derive(Clone, Copy)]
pub struct Loader {
    pub open: unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void,
    pub close: unsafe extern "C" fn(*mut c_void) -> c_int,
}

/// A reference that keeps a module loaded.
struct ModuleRef {
    key: Key,
    handle: *mut c_void,
    loader: Loader,
}

impl Drop for ModuleRef {
    fn drop(&mut self) {
        // SAFETY: a handle of `reference_new_modules`, closed once.
        unsafe { (self.loader.close)(self.handle) };
    }
}

/// Takes a reference to each module that is not known yet. Waits for loads and unloads in progress:
/// so the caller must not hold `PUBLISHING`, because constructors run inside those, and may call
/// dlopen.
fn reference_new_modules(loader: Loader, libc: usize) -> Vec<ModuleRef> {
    let mut unknown = segments();
    {
        let dynamic = PUBLISHING.lock().unwrap_or_else(|e| e.into_inner());
        let known = &table().modules;
        unknown.retain(|s| {
            s.id != libc && !dynamic.contains(&s.key()) && !known.iter().any(|m| m.is_of(s))
        });
    }
    let reference = |s: Segment| {
        // SAFETY: returns a handle of a loaded module, or null.
        let handle = unsafe { (loader.open)(s.name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        (!handle.is_null()).then(|| ModuleRef { key: s.key(), handle, loader })
    };
    unknown.into_iter().filter_map(reference).collect()
}

/// Reads the loader's list again. If the modules with a fixed place have changed, publishes a new
/// table and calls `update`, which updates the blocks. `places` are the offsets of the static area,
/// `libc` is libc's DTV index. Runs on the thread that loaded (with its `loader`) or unloaded
/// (None).
pub(super) fn refresh(
    places: &Range<isize>,
    libc: usize,
    loader: Option<Loader>,
    mut update: impl FnMut(&Change),
) {
    if TABLE.load(Ordering::Acquire).is_null() {
        return;
    }
    let refs = loader.map_or(Vec::new(), |loader| reference_new_modules(loader, libc));
    rescan(places, libc, &refs, &mut update);
    if !refs.is_empty() {
        // If a module was closed meanwhile, dropping the reference has unloaded it.
        drop(refs);
        rescan(places, libc, &[], &mut update);
    }
}

/// One pass over the loader's list; see `refresh`.
fn rescan(
    places: &Range<isize>,
    libc: usize,
    refs: &[ModuleRef],
    update: &mut impl FnMut(&Change),
) {
    let mut dynamic = PUBLISHING.lock().unwrap_or_else(|e| e.into_inner());
    let tp = super::raw::thread_pointer();
    let (old, mut now, mut change) = (table(), Vec::new(), Change::default());
    let segments = segments();
    dynamic.retain(|d| segments.iter().any(|s| *d == s.key()));
    for s in segments.into_iter().filter(|s| s.id != libc) {
        if dynamic.contains(&s.key()) {
            continue;
        }
        if let Some(known) = old.modules.iter().find(|m| m.is_of(&s)) {
            now.push(*known);
            continue;
        }
        // Without a reference another thread is loading it; that thread will rescan when it has.
        if !refs.iter().any(|r| r.key == s.key()) {
            continue;
        }
        // SAFETY: a reference keeps the module loaded, so its index is valid.
        let at = unsafe { tls_address(s.id) };
        // Only the address tells whether a module has a fixed place: DF_STATIC_TLS is not set for
        // TLS descriptors that glibc resolved statically.
        let offset = at.wrapping_sub(tp) as isize;
        if !places.contains(&offset) {
            dynamic.push(s.key());
            continue;
        }
        let new = Module::new(&s, offset);
        change.added.push(new);
        now.push(new);
    }
    change.removed = old.modules.iter().filter(|m| !now.contains(m)).copied().collect();
    if !change.added.is_empty() || !change.removed.is_empty() {
        publish(now);
        update(&change);
    }
}

/// Returns the address of a module's TLS in the running block. If the module has no fixed place,
/// this allocates its TLS for the running goroutine; `recycle` frees that.
///
/// # Safety
/// The module with this DTV index stays loaded during the call.
unsafe fn tls_address(module: usize) -> usize {
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
    // SAFETY: the caller's contract.
    unsafe { __tls_get_addr(&Index { module, offset: 0 }) as usize }
}

/// A block's dynamic thread vector: `[-1]` length, `[0]` generation, then (address, to free).
pub(super) struct Dtv(usize);

impl Dtv {
    /// Returns the DTV of a block.
    ///
    /// # Safety
    /// `tp` is a complete block.
    #[inline(always)]
    pub(super) unsafe fn of(tp: usize) -> Self {
        // SAFETY: the word of tcbhead_t that holds the DTV.
        Self(unsafe { load(tp + variant::DTV) })
    }

    #[inline(always)]
    pub(super) fn entry(&self, i: usize) -> usize {
        self.0 + i * 16
    }

    /// Returns the highest index of its entries.
    ///
    /// # Safety
    /// The DTV exists and no other thread uses it.
    #[inline(always)]
    pub(super) unsafe fn len(&self) -> usize {
        // SAFETY: entry −1 holds the length.
        unsafe { load(self.0 - 16) }
    }

    /// Frees the TLS that `__tls_get_addr` has allocated.
    ///
    /// # Safety
    /// As for `len`; no code uses addresses of these variables any more.
    #[inline]
    pub(super) unsafe fn free_dynamic(&self, l: &BlockLayout) {
        // SAFETY: the caller's contract; entry 0 holds the generation.
        if l.static_generation != Some(unsafe { load(self.0) }) {
            // SAFETY: the caller's contract.
            unsafe { self.free_dynamic_slow(l.fixed_last) };
        }
    }

    #[cold]
    unsafe fn free_dynamic_slow(&self, fixed: usize) {
        // SAFETY: the caller's contract; entries up to the length exist.
        for i in fixed + 1..=unsafe { self.len() } {
            // SAFETY: as above; `to_free` is null or memory that glibc got from malloc.
            unsafe {
                let to_free: *mut c_void = load(self.entry(i) + 8);
                if !to_free.is_null() {
                    super::raw::store(self.entry(i), [UNALLOCATED, 0]);
                    libc::free(to_free);
                }
            }
        }
    }

    /// Returns the address of entry −1, where malloc's memory begins.
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
        let page = mm::page();
        // SAFETY: asks about a mapping of this test, and writes a byte for each of its pages.
        let asked =
            unsafe { libc::mincore(map.base as *mut c_void, PAGES * page, resident.as_mut_ptr()) };
        assert_eq!(asked, 0);
        resident.iter().filter(|&&page| page & 1 != 0).count()
    }

    /// Fills a module of `size` bytes that begins `offset` bytes into a mapping full of ones, and
    /// checks that nothing beside it changes. Returns how many pages of the mapping are resident
    /// then.
    fn filled(offset: usize, size: usize) -> usize {
        let bytes = PAGES * mm::page();
        let map = Map::new(bytes).unwrap();
        let module = Module { id: 1, offset: 0, image: &IMAGE, filled: SEVENS, size };
        // SAFETY: a mapping of this test, large enough for the module.
        let (resident, all) = unsafe {
            (map.base as *mut u8).write_bytes(1, bytes);
            module.fill(map.base + offset);
            let all = std::slice::from_raw_parts(map.base as *const u8, bytes);
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
        let page = mm::page();
        for offset in [0, 64, page - 64, page] {
            for edge in [SEVENS, SEVENS + WRITTEN_ZEROES_MAX, 20 * page, 30 * page] {
                for size in [edge, edge + 1, edge + 64, edge + page - 8] {
                    let resident = filled(offset, size);
                    mm::test_hooks::FAIL_DISCARD.set(true);
                    assert_eq!(filled(offset, size), PAGES, "nothing can be discarded");
                    mm::test_hooks::FAIL_DISCARD.set(false);
                    if size - SEVENS <= WRITTEN_ZEROES_MAX.max(2 * page - 1) {
                        assert_eq!(resident, PAGES, "{size} at {offset}");
                    } else {
                        let given = (size - SEVENS) / page - 1;
                        assert!(resident <= PAGES - given, "{resident} of {size} at {offset}");
                    }
                }
            }
        }
    }
}
