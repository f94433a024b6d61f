//! TLS blocks: what makes a goroutine a thread to the compiler, to libc and to every crate.
//!
//! A block is static TLS plus glibc's `struct pthread`. The thread pointer (*tp*) points between
//! the two. The goroutine's stack begins right below, so the hot data of a small goroutine is one
//! page:
//!
//! ```text
//!   variant II (x86_64)
//!   low …  stack grows down  stack_top | (dlopen reserve) | modules' TLS |tp  struct pthread | top
//!                                      |                  '- below_used -'------ above ------'
//!                                      '------------- below -------------'
//!   variant I (aarch64)
//!   low …  stack grows down  stack_top | struct pthread |tp header, modules' TLS | (reserve) | top
//!                                      '---- below -----'------ above_used ------'           |
//!                                                       '--------------- above --------------'
//! ```
//! Each block also owns a *DTV* (dynamic thread vector): glibc's table with the address of every
//! module's TLS.
//!
//! # What a port must provide
//! One of the two variants, chosen by the CPU at `mod variant`. A variant is a file with these
//! names; everything else here is the same on all CPUs, and offsets are learnt from a real thread:
//!
//! | name | what it is |
//! |---|---|
//! | `DTV`, `MIN_ALIGN` | the offset of the DTV's address from tp; the least alignment of tp |
//! | `check_header` | whether the words at tp are what glibc has there |
//! | `areas` | where modules with a fixed place, and `struct pthread`, lie in the probe thread |
//! | `extents` | how far a block reaches on both sides of tp, with and without glibc's reserve |
//!
//! # Two methods
//! - **Template**: a recipe that is discovered at start-up from one real thread (`discover`): some
//!   forty words, the modules' images, a DTV. Tens of nanoseconds.
//! - **Pthread** (`fallback`): `pthread_create` on the goroutine's memory. The thread leaves at
//!   once by a raw exit, and the goroutine reuses its descriptor. Some 30 µs; glibc does all of the
//!   work.
//!
//! `init` selects the first, unless the layout is not as expected or the self-test fails
//! (`selftest`: compares a block made by the recipe with one made by glibc, then runs real code on
//! one). Then it selects the second, after the same test run; if that fails too, an error names
//! what is missing.
//!
//! # Invariants
//! 1. A block belongs to one goroutine, or to its pooled stack. Only the thread that runs its owner
//!    writes it, except `dlopen`, which writes areas that no code used before.
//! 2. The DTV is malloc's memory, because glibc reallocates it. It is allocated beforehand, and
//!    `destroy` keeps its memory (`dtv_buffer`).
//! 3. `recycle` leaves libc's TLS and `struct pthread` as they are, except for what the next
//!    goroutine would otherwise inherit: errno, locale, cancellation state (`BlockLayout::resets`),
//!    and the pthread keys, which `run_destructors` has emptied. So malloc's cache survives; that
//!    saves 100 ns and more.
//! 4. `destroy` saves libc's TLS for the next block that is created (`dtv_buffer`), because glibc
//!    has no function that frees the malloc cache of another thread.
//! 5. `recycle` is called inside the runtime: it does not call malloc, and it finds something to
//!    free only if code ran after `run_destructors`, which frees in user context. `create` calls
//!    malloc only if `ensure_dtv_buffers` did not keep up, and by the pthread method. `destroy`
//!    calls it only if glibc has replaced the DTV, and by the pthread method.
//! 6. A block is zero where no module and no word of the recipe lies.
//!
//! # Rejected
//! - `_dl_allocate_tls` for each block: 2.1 µs, and it does not fill in `struct pthread`.
//! - Sharing the thread's TLS and moving goroutines: miscompiled (ARCHITECTURE.md).
//! - Restoring all of `struct pthread` on recycling: 2.3 KiB more of cache without a use.
//!
//! # Known limits
//! PI mutexes (the tid is made up), code that caches `gettid()`, users of rseq (not registered
//! here: `sched_getcpu` asks the kernel), shadow stacks, sanitizers with their own thread state.
//! `isalpha` and its relatives do not see a `setlocale` after `init` in goroutines whose block was
//! made later.

mod block;
mod destructors;
mod discover;
mod dtv_buffer;
mod fallback;
mod modules;
mod raw;
mod selftest;
mod surplus;
#[cfg_attr(target_arch = "aarch64", path = "variant_i.rs")]
#[cfg_attr(target_arch = "x86_64", path = "variant_ii.rs")]
mod variant;

#[cfg(test)]
mod tests;

pub use destructors::{KeyDtor, key_created, key_deleted, run_destructors};
use discover::{DiscoveredLayout, Word};
pub use dtv_buffer::ensure_dtv_buffers;
pub use modules::Loader;
use modules::{Module, ModuleTable};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::OnceLock;
#[cfg(feature = "std")]
use std::sync::atomic::AtomicU32;
use std::sync::atomic::{AtomicBool, Ordering};

/// How blocks are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// By the recipe.
    Template,
    /// By `pthread_create` on the goroutine's memory.
    Pthread,
}

/// Whether a block has glibc's reserve, the area below its TLS in which a later dlopen places the
/// initial-exec TLS of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DlopenReserve {
    Keep,
    /// The stack begins right below the TLS in use, so a small goroutine fits in one page. The
    /// loader refuses libraries with initial-exec TLS (`surplus`).
    Omit,
}

/// The layout of this process's blocks. Offsets are relative to tp.
#[derive(Debug)]
pub struct BlockLayout {
    /// Bytes from tp to the top, 16-aligned, including glibc's reserve for dlopen if it is there.
    pub above: usize,
    /// The same without the reserve.
    pub above_used: usize,
    /// Bytes below tp, 16-aligned, including glibc's reserve for dlopen if it is there.
    pub below: usize,
    /// The same without the reserve.
    pub below_used: usize,
    /// Where modules with a fixed place can lie.
    places: Range<isize>,
    /// Where `struct pthread` lies.
    pthread: Range<isize>,
    /// Offset of what `pthread_self` returns.
    pthread_self: isize,
    /// Bytes at the top that every goroutine touches, however large the modules' TLS is.
    always_touched: usize,
    /// Whether blocks have the reserve. Blocks of the pthread method always have.
    pub reserve: DlopenReserve,
    /// Why blocks have the reserve, although [`keep_reserve`] did not ask for it.
    pub reserve_reason: Option<String>,
    /// How blocks are made.
    pub method: Method,
    /// Why blocks are not made by the template, if they are not.
    pub fallback_reason: Option<String>,
    /// The alignment of tp: the largest alignment of a module's TLS, at least `variant::MIN_ALIGN`.
    align: usize,
    /// Offset of the thread id, which lies in `struct pthread`.
    tid: isize,
    /// Offset of errno, which lies in libc's TLS.
    errno: isize,
    /// Offset of the word that the kernel clears when a thread ends; `pthread_join` waits for it.
    clear_tid: Option<isize>,
    /// Offset of the `struct rseq`, if glibc has one.
    rseq: Option<isize>,
    recipe: Recipe,
    /// The module of libc itself (modules.rs, invariant 3).
    libc: Module,
    /// DTV of a fresh block, from entry −1, without the addresses of modules with a fixed place:
    /// those are in `fixed`.
    dtv: Box<[[usize; 2]]>,
    /// (DTV index, offset) of the modules that were loaded at start-up.
    fixed: Box<[(usize, isize)]>,
    /// Highest DTV index in `fixed`: later entries may be dynamic.
    fixed_last: usize,
    /// The DTV generation in which no dynamic module exists: a block with this generation has no
    /// dynamic TLS.
    static_generation: Option<usize>,
    resets: Resets,
    /// Where the values of pthread keys lie, if the self-test found out.
    keys: Option<destructors::KeyPlaces>,
    /// Words of `struct pthread` that own memory which glibc frees at a thread's end, as far as the
    /// self-test found out.
    buffers: Vec<isize>,
    /// glibc's function that runs the destructors of the thread-locals.
    call_tls_dtors: unsafe extern "C-unwind" fn(),
}

/// What `recycle` resets (invariant 3): (offset, value).
#[derive(Debug, Default)]
struct Resets {
    /// Locale: pointers.
    words: Vec<(isize, u64)>,
    /// Cancellation: 32-bit words, whose neighbours must not change.
    halves: Vec<(isize, u32)>,
}

/// The words of a fresh block, sorted by kind, so that `create` has no branches inside its loops.
#[derive(Debug, Default)]
struct Recipe {
    /// (offset, value) of [`Word::Same`].
    same: Vec<(i32, u64)>,
    /// (offset, n) of [`Word::Tp`].
    tp: Vec<(i32, i32)>,
    /// Offsets of [`Word::Low`].
    low: Vec<i32>,
    /// Offsets of [`Word::Size`].
    size: Vec<i32>,
}

impl Recipe {
    fn new(words: &[(isize, Word)]) -> Self {
        let mut recipe = Self::default();
        for &(off, word) in words {
            let off = off as i32;
            match word {
                Word::Same(v) => recipe.same.push((off, v)),
                Word::Tp(n) => recipe.tp.push((off, n as i32)),
                Word::Low => recipe.low.push(off),
                Word::Size => recipe.size.push(off),
            }
        }
        recipe
    }
}

impl BlockLayout {
    /// Returns the bytes between tp and the first frame of the stack.
    pub fn below_tp(&self) -> usize {
        match self.reserve {
            DlopenReserve::Keep => self.below,
            DlopenReserve::Omit => self.below_used,
        }
    }

    /// Returns the bytes between tp and the top.
    pub fn above_tp(&self) -> usize {
        match self.reserve {
            DlopenReserve::Keep => self.above,
            DlopenReserve::Omit => self.above_used,
        }
    }

    /// Returns the bytes of a block without what its alignment may take.
    pub fn used_bytes(&self) -> usize {
        self.above_tp() + self.below_tp()
    }

    /// Returns the bytes of a block, including what its alignment may take.
    pub fn bytes(&self) -> usize {
        self.used_bytes() + self.align
    }

    /// Returns the bytes at the top of a block that every goroutine touches.
    pub fn always_touched(&self) -> usize {
        self.always_touched
    }

    /// Returns whether the module lies inside a block.
    fn has_room_for(&self, module: &Module) -> bool {
        module.area().start >= -(self.below_tp() as isize)
            && module.area().end <= self.above_tp() as isize
    }

    /// Returns the `pthread_t` of the block at `tp`.
    fn pthread_at(&self, tp: usize) -> usize {
        raw::at(tp, self.pthread_self)
    }

    fn new(
        found: DiscoveredLayout,
        method: Method,
        fallback_reason: Option<String>,
    ) -> Result<Self, String> {
        let f = discover::required(c"__call_tls_dtors")?;
        // SAFETY: glibc's function of that name (2.18 on) takes and returns nothing.
        let call_tls_dtors =
            unsafe { std::mem::transmute::<usize, unsafe extern "C-unwind" fn()>(f) };
        let statics = || found.modules.iter().chain([&found.libc]);
        let fixed: Box<[_]> = statics().map(|m| (m.id, m.offset)).collect();
        modules::publish_first(found.modules.clone());
        Ok(Self {
            above: found.extents.above,
            above_used: found.extents.above_used,
            below: found.extents.below,
            below_used: found.extents.below_used,
            places: found.extents.modules.clone(),
            pthread: found.extents.pthread.clone(),
            pthread_self: found.extents.pthread_self,
            always_touched: found.extents.always_touched,
            reserve: DlopenReserve::Keep,
            reserve_reason: None,
            method,
            fallback_reason,
            align: found.align,
            tid: found.tid,
            errno: found.errno,
            clear_tid: found.clear_tid,
            rseq: found.rseq,
            recipe: Recipe::new(&found.words),
            libc: found.libc,
            static_generation: found.static_generation,
            fixed_last: fixed.iter().map(|f| f.0).max().unwrap_or(0),
            fixed,
            dtv: found.dtv.into(),
            resets: Resets::default(),
            keys: None,
            buffers: Vec::new(),
            call_tls_dtors,
        })
    }
}

/// A block at the top of a goroutine's memory.
#[derive(Clone, Copy)]
pub struct TlsBlock {
    /// The thread pointer.
    pub tp: NonNull<u8>,
    /// The goroutine's stack grows down from here; 16-aligned.
    pub stack_top: NonNull<u8>,
    /// The modules that it was made with; see `refresh_new_block`.
    made_with: *const ModuleTable,
}

static LAYOUT: OnceLock<Result<BlockLayout, String>> = OnceLock::new();
/// What `init` passes to `ensure_dtv_buffers_slow`, which allocates twice as many: enough for four
/// batches of new stacks.
const FIRST_DTV_BUFFERS: usize = 32;

/// Set when blocks may exist. A plain byte, because interpose/dlopen.rs reads it in assembly.
pub static READY: AtomicBool = AtomicBool::new(false);
/// Set by [`force_fallback`].
static FORCED: AtomicBool = AtomicBool::new(false);
/// Set by [`keep_reserve`].
static KEEP_RESERVE: AtomicBool = AtomicBool::new(false);

/// Selects the pthread method (TREFOIL_DEBUG=tls=pthread). Call it before `init`.
pub fn force_fallback() {
    FORCED.store(true, Ordering::Relaxed);
}

/// Keeps glibc's reserve in every block. Call it before `init`.
pub fn keep_reserve() {
    KEEP_RESERVE.store(true, Ordering::Relaxed);
}

/// Returns whether the loader refuses libraries with initial-exec TLS, because goroutines have no
/// room for it.
pub fn refuses_static_tls() -> bool {
    surplus::is_taken()
}

/// Discovers the layout, once per process and on a plain thread, tests it, and selects the method.
///
/// # Errors
/// `Unsupported`, with the reason, if neither method works on this system.
pub fn init() -> io::Result<&'static BlockLayout> {
    let selected = LAYOUT.get_or_init(select);
    if let Ok(layout) = selected
        && !READY.load(Ordering::Relaxed)
    {
        dtv_buffer::ensure_dtv_buffers_slow(layout, FIRST_DTV_BUFFERS);
    }
    READY.store(selected.is_ok(), Ordering::Relaxed);
    selected.as_ref().map_err(|text| io::Error::new(io::ErrorKind::Unsupported, text.as_str()))
}

/// Returns the layout of the template method, or else of the pthread method.
fn select() -> Result<BlockLayout, String> {
    let head = "trefoil cannot give goroutines their own thread-local storage on this system";
    let reason = if FORCED.load(Ordering::Relaxed) {
        "asked for".to_string()
    } else {
        let reserve = match KEEP_RESERVE.load(Ordering::Relaxed) {
            true => DlopenReserve::Keep,
            false => DlopenReserve::Omit,
        };
        match template(reserve) {
            Ok(layout) => return Ok(layout),
            Err(reason) => reason,
        }
    };
    pthread(&reason).map_err(|text| format!("{head}: {text} (and by template: {reason})"))
}

/// Discovers and tests the layout for the template method. If the surplus cannot be taken, blocks
/// keep the reserve.
fn template(reserve: DlopenReserve) -> Result<BlockLayout, String> {
    // Before `discover`: it reads the loader's state with the images in it.
    let omitted = match reserve {
        DlopenReserve::Keep => Err(None),
        DlopenReserve::Omit => surplus::take_all().map_err(Some),
    };
    let found = discover::discover()?;
    if found.list.is_none() {
        return Err("the links of glibc's list of threads were not found".into());
    }
    if found.has_hidden_modules {
        // Only glibc knows their images.
        return Err("a library in another namespace has static TLS".into());
    }
    let mut layout = BlockLayout::new(found, Method::Template, None)?;
    match omitted {
        Ok(()) => layout.reserve = DlopenReserve::Omit,
        Err(reason) => layout.reserve_reason = reason,
    }
    selftest::compare(&layout)?;
    selftest::run(&mut layout)?;
    Ok(layout)
}

/// Discovers and tests the layout for the pthread method.
fn pthread(fallback_reason: &str) -> Result<BlockLayout, String> {
    let found = discover::discover()?;
    if found.clear_tid.is_none() {
        return Err("the word that pthread_join waits for was not found".into());
    }
    let mut layout = BlockLayout::new(found, Method::Pthread, Some(fallback_reason.to_string()))?;
    selftest::run(&mut layout)?;
    Ok(layout)
}

/// Returns whether blocks are made by `pthread_create`, which always allocates.
#[cfg(all(debug_assertions, feature = "std"))]
pub fn is_by_pthread() -> bool {
    matches!(LAYOUT.get(), Some(Ok(layout)) if layout.method == Method::Pthread)
}

/// Returns the id by which glibc knows the goroutine with the block at `tp`: the owner of the C
/// mutexes that it holds. For dumps: the block may be in use.
///
/// # Safety
/// `tp` is or was a block. (The memory of blocks is never unmapped.)
pub unsafe fn tid_of(tp: usize) -> u32 {
    // SAFETY: the caller's contract; an aligned word of the block.
    unsafe { (raw::at(tp, layout().tid) as *const u32).read_volatile() }
}

/// Returns the `pthread_t` of the goroutine with the block at `tp`.
#[cfg(feature = "std")]
pub fn pthread_of(tp: usize) -> libc::pthread_t {
    layout().pthread_at(tp) as libc::pthread_t
}

/// Returns the word of an OS thread that the kernel clears when the thread ends. Then it wakes
/// those that sleep on the word. Returns None if the kernel does not tell where the word is.
///
/// # Safety
/// `thread` has not been joined or detached, and is not while the word is used.
#[cfg(feature = "std")]
pub unsafe fn cleared_at_end<'a>(thread: libc::pthread_t) -> Option<&'a AtomicU32> {
    let layout = layout();
    // The inverse of `pthread_at`.
    let tp = raw::at(thread as usize, -layout.pthread_self);
    // SAFETY: the caller's contract; an aligned word of the thread's `struct pthread`.
    Some(unsafe { AtomicU32::from_ptr(raw::at(tp, layout.clear_tid?) as *mut u32) })
}

/// Returns the layout. `init` was called before.
#[inline(always)]
fn layout() -> &'static BlockLayout {
    match LAYOUT.get() {
        Some(Ok(layout)) => layout,
        _ => before_init(),
    }
}

#[cold]
fn before_init() -> ! {
    panic!("mem::tls is used before init, or after init failed")
}

/// Makes a block at the top of `[low, top)`. `tid` is a thread id that no thread and no other block
/// has.
///
/// # Errors
/// `InvalidInput` if the memory is too small; `OutOfMemory` if malloc has none for the DTV; the
/// errors of `pthread_create` by that method.
///
/// # Safety
/// The memory is private, anonymous and writable, and zeroed where the block will be. `top` is
/// 64-aligned. The block owns the memory until `destroy`.
pub unsafe fn create(low: NonNull<u8>, top: NonNull<u8>, tid: u32) -> io::Result<TlsBlock> {
    // SAFETY: the caller's contract is the same.
    unsafe { layout().create(low, top, tid) }
}

/// Writes the images of modules that a dlopen has added since the block was made. Called after the
/// block became visible to `for_each_block`.
///
/// # Safety
/// No code runs on the block yet.
#[inline]
pub unsafe fn refresh_new_block(block: &TlsBlock) {
    // SAFETY: the caller's contract is the same.
    unsafe { layout().refresh_new_block(block) }
}

/// Writes a clean image of every module except libc, for the next goroutine.
///
/// # Safety
/// `tp` is the result of `create`; the goroutine's code has returned and `run_destructors` has run.
/// The caller runs on that block (as runtime code that cannot be preempted), or no code runs on it.
#[inline]
pub unsafe fn recycle(tp: NonNull<u8>) {
    // SAFETY: the caller's contract is the same.
    unsafe { layout().recycle(tp.as_ptr() as usize) }
}

/// Frees or saves what the block owns, before its memory is discarded.
///
/// # Safety
/// As for `recycle`, and no code runs on the block or uses it afterwards.
pub unsafe fn destroy(tp: NonNull<u8>) {
    // SAFETY: the caller's contract is the same.
    unsafe { layout().destroy(tp.as_ptr() as usize) }
}

impl BlockLayout {
    unsafe fn create(&self, low: NonNull<u8>, top: NonNull<u8>, tid: u32) -> io::Result<TlsBlock> {
        let (low, top) = (low.as_ptr() as usize, top.as_ptr() as usize);
        debug_assert!(top.is_multiple_of(64) && low.is_multiple_of(16));
        if top <= low || top - low < self.bytes() {
            let (have, need) = (top.saturating_sub(low), self.used_bytes());
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{have} bytes cannot hold a TLS block of {need}"),
            ));
        }
        let tp = (top - self.above_tp()) & !(self.align - 1);
        let below = self.below_tp();
        let made_with: *const ModuleTable = modules::table();
        // SAFETY: zeroed memory with room for the block (caller, checked above).
        unsafe {
            match self.method {
                Method::Template => block::build(self, tp, low, top, tid)?,
                Method::Pthread => fallback::build(self, tp, low, top, tid)?,
            }
        }
        let at = |a: usize| NonNull::new(a as *mut u8).ok_or(io::ErrorKind::InvalidInput);
        Ok(TlsBlock { tp: at(tp)?, stack_top: at(tp - below)?, made_with })
    }

    unsafe fn refresh_new_block(&self, block: &TlsBlock) {
        let now = modules::table();
        if self.method == Method::Template && !std::ptr::eq(now, block.made_with) {
            for m in &now.modules {
                // SAFETY: no code runs on the block (caller): images may be written again.
                unsafe { m.fill(block.tp.as_ptr() as usize) };
            }
        }
    }
}

/// Updates every block after a successful dlopen (with the `loader` that did it) or dlclose (None)
/// on this thread: writes the images of new modules that have a fixed place. `each` visits every
/// block, whether running, parked or pooled.
pub fn modules_changed(loader: Option<Loader>, each: impl Fn(&mut dyn FnMut(NonNull<u8>))) {
    let Some(Ok(layout)) = LAYOUT.get() else { return };
    modules::refresh(&layout.places, layout.libc.id, loader, |change| {
        update(layout, change, &each)
    });
}

/// Writes a change of the modules into every block.
fn update(
    layout: &BlockLayout,
    change: &modules::Change,
    each: impl Fn(&mut dyn FnMut(NonNull<u8>)),
) {
    if change.added.iter().any(|m| !layout.has_room_for(m)) {
        fatal("dlopen placed a library's TLS outside of the blocks of goroutines (trefoil bug)");
    }
    // glibc updates the blocks of the pthread method: they are in its list of threads.
    if layout.method == Method::Pthread {
        return;
    }
    let me = raw::thread_pointer();
    each(&mut |tp| {
        let tp = tp.as_ptr() as usize;
        // SAFETY: areas of modules that were not loaded before, or are not any more: no code uses
        // them except constructors that ran on this goroutine inside dlopen.
        unsafe {
            change.removed.iter().for_each(|m| m.clear(tp));
            for m in &change.added {
                if tp == me { m.fill_untouched(tp) } else { m.fill(tp) }
            }
        }
    });
}

/// Aborts the process with a message. Does not allocate.
#[cold]
fn fatal(text: &str) -> ! {
    crate::sys::fatal(format_args!("trefoil: {text}"))
}
