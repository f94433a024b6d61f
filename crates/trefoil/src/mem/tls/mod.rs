//! TLS blocks: what makes a goroutine a thread to the compiler, to libc and to every crate.
//!
//! A block is static TLS plus glibc's `struct pthread`. The FS base points between the two (*tp*), the
//! goroutine's stack begins right below, so a small goroutine's hot data is one page:
//!
//! ```text
//!   low …  stack grows down  stack_top | (dlopen reserve) | modules' TLS |tp  struct pthread | top
//!                                      '---- below -------'- below_used -'------ above ------'
//! ```
//!
//! # Two ways to make one
//! - **Template**: a recipe found at start-up from one real thread (`discover`): some forty words, the
//!   modules' images, a DTV. Tens of nanoseconds.
//! - **Pthread** (`fallback`): `pthread_create` on the goroutine's memory; the thread leaves at once by a
//!   raw exit and the goroutine lives on in its skin. Some 30 µs; glibc does all of the work.
//!
//! `init` takes the first unless something in the layout is not as expected or the self-test
//! (`selftest`: a block made by the recipe against one made by glibc, then real code running on it)
//! fails; then the second, with the same running test; then an error that says what was missing.
//!
//! # Invariants
//! 1. A block belongs to one goroutine, or to nobody. Only its owner's thread writes it, except
//!    `dlopen`, which writes areas that no code knew before.
//! 2. The DTV is malloc's: glibc reallocates it. It is got beforehand, and `destroy` keeps it (`kit`).
//! 3. `recycle` leaves libc's TLS and `struct pthread` as they are, but for what a dead goroutine could
//!    save_libc_tls: errno, locale, cancellation state (`Layout::resets`), and the pthread keys, which
//!    `run_destructors` has emptied. So malloc's cache survives; it is worth 100 ns and more.
//! 4. `destroy` bequeaths libc's TLS to the next block that is created (`kit`), because glibc has no door
//!    through which another thread's malloc cache could be freed.
//! 5. `create`, `recycle` and `destroy` are the scheduler's: they do not malloc, except `create` when
//!    `ensure_dtv_buffers` did not keep up, and the pthread method. `free` is called by `run_destructors`, in user
//!    context; `recycle` only finds something to free if code ran in between.
//! 6. The area between `stack_top` and `tp` is zero where no module lies.
//!
//! # Rejected
//! - `_dl_allocate_tls` for each block: 2.1 µs, and `struct pthread` is left to us all the same.
//! - Sharing the thread's TLS and moving goroutines: miscompiled (ARCHITECTURE.md).
//! - Restoring all of `struct pthread` on recycling: 2.3 KiB more of cache for nothing.
//!
//! # Known limits
//! PI mutexes (the tid is made up), code that caches `gettid()`, users of rseq (unregistered here:
//! `sched_getcpu` takes the slower method), shadow stacks, sanitizers with their own thread state; a
//! `setlocale` after `init` is not seen by `isalpha` & co. in goroutines whose block was made later.

mod block;
mod destructors;
mod discover;
mod dtv_buffer;
mod fallback;
mod modules;
mod raw;
mod selftest;

#[cfg(test)]
mod tests;

pub(crate) use destructors::{KeyDtor, key_created, key_deleted, run_destructors};
use discover::{DiscoveredLayout, Word};
pub(crate) use dtv_buffer::ensure_dtv_buffers;
pub(crate) use modules::Loader;
use modules::{Module, ModuleTable};
use std::io;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// How blocks are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// From the recipe.
    Template,
    /// By `pthread_create` on the goroutine's memory.
    Pthread,
}

/// What is known of this process' blocks. Offsets are from tp.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Bytes from tp to the top, 64-aligned.
    pub(crate) above: usize,
    /// Bytes below tp including glibc's reserve for dlopen, 64-aligned.
    pub(crate) below: usize,
    /// The same without the reserve.
    pub(crate) below_used: usize,
    /// How blocks are made.
    pub(crate) method: Method,
    /// Why not by the template, if not.
    pub(crate) fallback_reason: Option<String>,
    align: usize,
    tid: usize,
    errno: isize,
    clear_tid: Option<usize>,
    rseq: Option<isize>,
    recipe: Recipe,
    libc: Module,
    /// DTV of a fresh block, from entry −1, without the fixed modules' addresses: those are in `fixed`.
    dtv: Box<[[usize; 2]]>,
    /// (DTV index, distance below tp) of the modules of start-up.
    fixed: Box<[(usize, usize)]>,
    /// Highest number among them: later entries may be dynamic.
    fixed_last: usize,
    /// The DTV generation in which no dynamic module exists: a block that still has it has none.
    static_generation: Option<usize>,
    resets: Resets,
    /// Where pthread keys' values live, if the self-test could tell.
    keys: Option<destructors::KeyPlaces>,
    /// Words of `struct pthread` that own memory which glibc frees at a thread's end, as far as the self-test could tell.
    buffers: Vec<usize>,
    call_tls_dtors: unsafe extern "C-unwind" fn(),
}

/// What `recycle` puts back (invariant 3): (offset, value).
#[derive(Debug, Default)]
struct Resets {
    /// Locale: pointers.
    words: Vec<(isize, u64)>,
    /// Cancellation: ints, whose neighbours are not ours to touch.
    halves: Vec<(isize, u32)>,
}

/// The words of a fresh block, sorted by kind so that `create` has no branches inside its loops.
#[derive(Debug, Default)]
struct Recipe {
    same: Vec<(i32, u64)>,
    tp: Vec<(i32, i32)>,
    low: Vec<i32>,
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

impl Layout {
    /// Bytes of the largest block, with what its alignment may take.
    pub(crate) fn bytes(&self) -> usize {
        self.above + self.align + self.below
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
        let fixed: Box<[_]> = statics().map(|m| (m.id, m.below_tp)).collect();
        modules::publish_first(found.modules.clone());
        Ok(Self {
            above: found.above,
            below: found.below,
            below_used: found.below_used,
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
pub(crate) struct Block {
    /// The FS base.
    pub(crate) tp: NonNull<u8>,
    /// The goroutine's stack grows down from here; 16-aligned.
    pub(crate) stack_top: NonNull<u8>,
    /// The modules it was made with; see `refresh_new_block`.
    made_with: *const ModuleTable,
}

static LAYOUT: OnceLock<Result<Layout, String>> = OnceLock::new();
/// Kits for the first blocks: some batches of stacks for each of a few Ps.
const FIRST_DTV_BUFFERS: usize = 32;

/// There may be blocks. A plain byte, because interpose/dlopen.rs looks at it in assembly.
pub(crate) static READY: AtomicBool = AtomicBool::new(false);
static FORCED: AtomicBool = AtomicBool::new(false);
/// Some block has no room for what dlopen may add.
static WITHOUT_RESERVE: AtomicBool = AtomicBool::new(false);

/// Before `init`: take the pthread method (TREFOIL_DEBUG=tls=pthread).
pub(crate) fn force_fallback() {
    FORCED.store(true, Ordering::Relaxed);
}

/// Learns the layout, once a process, on a plain thread; tests it; decides the method.
pub(crate) fn init() -> io::Result<&'static Layout> {
    let decided = LAYOUT.get_or_init(|| decide(FORCED.load(Ordering::Relaxed)));
    if let Ok(layout) = decided
        && !READY.load(Ordering::Relaxed)
    {
        dtv_buffer::ensure_dtv_buffers_slow(layout, FIRST_DTV_BUFFERS);
    }
    READY.store(decided.is_ok(), Ordering::Relaxed);
    decided.as_ref().map_err(|text| io::Error::new(io::ErrorKind::Unsupported, text.as_str()))
}

fn decide(forced: bool) -> Result<Layout, String> {
    let head = "trefoil cannot give goroutines their own thread-local storage on this system";
    let fallback_reason = match forced.then(|| "asked for".to_string()).map_or_else(template, Err) {
        Ok(layout) => return Ok(layout),
        Err(fallback_reason) => fallback_reason,
    };
    pthread(&fallback_reason)
        .map_err(|text| format!("{head}: {text} (and by template: {fallback_reason})"))
}

fn template() -> Result<Layout, String> {
    let found = discover::discover()?;
    if found.list.is_none() {
        return Err("the links of glibc's list of threads were not found".into());
    }
    let mut layout = Layout::new(found, Method::Template, None)?;
    selftest::compare(&layout)?;
    selftest::run(&mut layout)?;
    Ok(layout)
}

fn pthread(fallback_reason: &str) -> Result<Layout, String> {
    let found = discover::discover()?;
    if found.clear_tid.is_none() {
        return Err("the word that pthread_join waits for was not found".into());
    }
    let mut layout = Layout::new(found, Method::Pthread, Some(fallback_reason.to_string()))?;
    selftest::run(&mut layout)?;
    Ok(layout)
}

/// Whether blocks are made by `pthread_create`, which allocates wherever it is called.
#[cfg(all(debug_assertions, feature = "std"))]
pub(crate) fn is_by_pthread() -> bool {
    matches!(LAYOUT.get(), Some(Ok(layout)) if layout.method == Method::Pthread)
}

/// The layout, after `init`.
#[inline(always)]
fn layout() -> &'static Layout {
    match LAYOUT.get() {
        Some(Ok(layout)) => layout,
        _ => before_init(),
    }
}

#[cold]
fn before_init() -> ! {
    panic!("mem::tls is used before init, or after init failed")
}

/// Builds a block at the top of `[low, top)`. `tid` is a thread id that no thread has and no other
/// block has. Without `reserve` the stack starts right below_tp the TLS in use: 1.7 KiB more of the first
/// page, and a later dlopen of a library with initial-exec TLS is fatal.
///
/// # Safety
/// The memory is private and anonymous, zeroed, writable, `top` 64-aligned, and the block's until `destroy`.
pub(crate) unsafe fn create(
    low: NonNull<u8>,
    top: NonNull<u8>,
    tid: u32,
    reserve: bool,
) -> io::Result<Block> {
    // SAFETY: the caller's promise is the same.
    unsafe { layout().create(low, top, tid, reserve) }
}

/// After the block became visible to `for_each_block`: catches up with a dlopen that ran between.
///
/// # Safety
/// Nobody runs on the block yet.
#[inline]
pub(crate) unsafe fn refresh_new_block(block: &Block) {
    // SAFETY: the caller's promise is the same.
    unsafe { layout().refresh_new_block(block) }
}

/// A clean image for the next goroutine: of every module but libc's.
///
/// # Safety
/// `tp` added from `create`; its goroutine's code is over and `run_destructors` has run. May run on that
/// very block (from runtime code that cannot be preempted), or on another while nobody runs on it.
#[inline]
pub(crate) unsafe fn recycle(tp: NonNull<u8>) {
    // SAFETY: the caller's promise is the same.
    unsafe { layout().recycle(tp.as_ptr() as usize) }
}

/// Frees what hangs on the block, before its memory goes back to the kernel.
///
/// # Safety
/// As for `recycle`, and nobody runs on the block or uses it afterwards.
pub(crate) unsafe fn destroy(tp: NonNull<u8>) {
    // SAFETY: the caller's promise is the same.
    unsafe { layout().destroy(tp.as_ptr() as usize) }
}

impl Layout {
    unsafe fn create(
        &self,
        low: NonNull<u8>,
        top: NonNull<u8>,
        tid: u32,
        reserve: bool,
    ) -> io::Result<Block> {
        let (low, top) = (low.as_ptr() as usize, top.as_ptr() as usize);
        debug_assert!(top.is_multiple_of(64) && low.is_multiple_of(16));
        let tp = (top - self.above) & !(self.align - 1);
        let below =
            if reserve || self.method == Method::Pthread { self.below } else { self.below_used };
        if top <= low || top - low < self.above + self.align + below {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{} bytes cannot hold a TLS block of {}", top - low, self.above + below),
            ));
        }
        if below < self.below {
            // Relaxed: dlopen on another thread sees it through the block's publication.
            WITHOUT_RESERVE.store(true, Ordering::Relaxed);
        }
        let made_with: *const ModuleTable = modules::table();
        // SAFETY: zeroed memory with room for the block (caller, checked above).
        unsafe {
            match self.method {
                Method::Template => block::build(self, tp, low, top, tid)?,
                Method::Pthread => fallback::build(self, tp, low, top, tid)?,
            }
        }
        let at = |a: usize| NonNull::new(a as *mut u8).ok_or(io::ErrorKind::InvalidInput);
        Ok(Block { tp: at(tp)?, stack_top: at(tp - below)?, made_with })
    }

    unsafe fn refresh_new_block(&self, block: &Block) {
        let now = modules::table();
        if self.method == Method::Template && !std::ptr::eq(now, block.made_with) {
            for m in &now.modules {
                // SAFETY: nobody runs on the block (caller): images may be written again.
                unsafe { m.fill(block.tp.as_ptr() as usize) };
            }
        }
    }
}

/// After a successful dlopen (with the `loader` that did it) or dlclose (None) on this thread: gives every
/// block the images of new modules that have a fixed place. `each` visits every block: running, parked, and pooled ones.
pub(crate) fn modules_changed(loader: Option<Loader>, each: impl Fn(&mut dyn FnMut(NonNull<u8>))) {
    let Some(Ok(layout)) = LAYOUT.get() else { return };
    modules::refresh(layout.below, layout.libc.id, loader, |change| update(layout, change, &each));
}

fn update(layout: &Layout, change: &modules::Change, each: impl Fn(&mut dyn FnMut(NonNull<u8>))) {
    if change.added.iter().any(|m| m.below_tp > layout.below_used)
        && WITHOUT_RESERVE.load(Ordering::Relaxed)
    {
        fatal(
            "dlopen of a library with initial-exec TLS, but goroutines were made without room for it",
        );
    }
    // glibc knows the blocks of the pthread method: they are in its list of threads.
    if layout.method == Method::Pthread {
        return;
    }
    let me = raw::thread_pointer();
    each(&mut |tp| {
        let tp = tp.as_ptr() as usize;
        // SAFETY: areas of modules that were not loaded before, or are not any more: nobody's code
        // uses them but the constructors that ran on this goroutine inside dlopen.
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
