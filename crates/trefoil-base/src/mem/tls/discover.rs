//! Discovers glibc's layout of a thread's block **by value**, from one real thread: the *probe
//! thread*.
//!
//! ```text
//!   low                                 tp - below        tp - below_used      tp             top
//!    | stack of the probe … entry_sp ->  | dlopen reserve  | modules' TLS       | struct pthread |
//! ```
//! (variant II; what differs in variant I is in `variant_i.rs`.)
//!
//! The probe thread runs on memory that is allocated here, of a size that no other value equals.
//! Before anything else it copies everything above its stack pointer. Later the copy is read, and
//! each word is classified by its value. Symbols do not help: glibc 2.31 does not export those of
//! thread_db, and offsets differ between versions (2.31, 2.36, 2.41 and 2.43 differ in size, in
//! rseq's place and in the join protocol).
//!
//! Rejected: `_dl_allocate_tls` for each block (2.1 µs, and it knows nothing of `struct pthread`);
//! a table of offsets per glibc version (breaks on the next one, silently).

use super::modules::{self, Module, Segment, UNALLOCATED, segments};
use super::raw::{self, load, symbol, thread_pointer};
use super::{surplus, variant};
use crate::arch::Registers;
use crate::sys::mm::PAGE;
use crate::sys::raw::syscall;
use crate::sys::signal::{change_mask, set_mask};
use crate::sys::syscalls;
use crate::sys::thread::describe_stack;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ops::Range;

/// One word of a fresh block. Words that are zero, or that an image brings, are not listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The same in every block.
    Same(u64),
    /// `tp + n`.
    Tp(isize),
    /// The lowest address of the memory that the block lies in (`stackblock`).
    Low,
    /// The size of that memory (`stackblock_size`).
    Size,
}

/// What was read from the probe thread. Offsets are relative to tp. Fields without a comment mean
/// what they mean in `BlockLayout`.
#[derive(Debug)]
pub(super) struct DiscoveredLayout {
    pub(super) extents: Extents,
    pub(super) align: usize,
    pub(super) tid: isize,
    pub(super) errno: isize,
    pub(super) clear_tid: Option<isize>,
    pub(super) rseq: Option<isize>,
    /// (offset, word), ascending; complete only if `list` was found.
    pub(super) words: Vec<(isize, Word)>,
    /// Offset of the node in glibc's list of threads.
    pub(super) list: Option<isize>,
    /// The modules with a fixed place, except libc.
    pub(super) modules: Vec<Module>,
    pub(super) libc: Module,
    /// There are modules with a fixed place that the loader does not list.
    pub(super) has_hidden_modules: bool,
    /// The DTV's generation, if every loaded module has a fixed place.
    pub(super) static_generation: Option<usize>,
    /// DTV entries from −1 on, as in the probe thread, as pairs of words.
    pub(super) dtv: Vec<[usize; 2]>,
}

/// How far a block reaches, and where its parts lie. Offsets are relative to tp. Fields without a
/// comment mean what they mean in `BlockLayout`.
#[derive(Debug)]
pub(super) struct Extents {
    pub(super) above: usize,
    pub(super) above_used: usize,
    pub(super) below: usize,
    pub(super) below_used: usize,
    /// Where modules with a fixed place can lie.
    pub(super) modules: Range<isize>,
    pub(super) pthread: Range<isize>,
    pub(super) pthread_self: isize,
    pub(super) always_touched: usize,
}

/// Addresses of the probe thread that a variant needs.
pub(super) struct ProbeFacts {
    pub(super) tp: usize,
    pub(super) top: usize,
    /// The stack pointer of the thread's first function.
    pub(super) entry_sp: usize,
    pub(super) pthread_self: usize,
    pub(super) align: usize,
}

/// Anonymous zeroed memory, unmapped on drop.
pub(super) struct Map {
    pub(super) base: usize,
    len: usize,
}

impl Map {
    pub(super) fn new(len: usize) -> Result<Self, String> {
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let base = unsafe {
            let (anywhere, prot) = (std::ptr::null_mut(), syscalls::READ_WRITE);
            syscalls::mmap_anonymous(anywhere, len, prot, libc::MAP_NORESERVE)
        };
        base.map(|b| Self { base: b as usize, len })
            .map_err(|e| format!("mmap of {len} bytes: {e}"))
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: its users (the joined probe thread, the self-test) have ended.
        let _ = unsafe { syscalls::munmap(self.base as *mut c_void, self.len) };
    }
}

/// Stack of the probe thread and of the self-test. It is committed lazily, so its size costs
/// nothing. The unwinder in a debug build takes some 20 KiB.
pub(super) const STACK_BYTES: usize = 256 << 10;
/// Makes the probe thread's stack size a number that no other field has.
const ODD_BYTES: usize = 0x12c0;
/// glibc's PTHREAD_STACK_MIN, part of the result of `__pthread_get_minstack`.
const STACK_MIN_BYTES: usize = 16384;
/// Limit for the frames of clone and start_thread, between the static TLS and the probe thread's
/// first frame: 0.2–0.5 KiB were seen. More would mean that something was misread.
const ENTRY_FRAMES_MAX_BYTES: usize = 4096;
const DTV_ENTRIES_MAX: usize = 4096;
const PR_GET_TID_ADDRESS: usize = 40;

/// The argument of the probe thread: `discover` sets `low`, `top` and `copy`, the thread the rest.
/// These are addresses, except `tid` and `list`.
struct ProbeThread {
    low: usize,
    top: usize,
    /// The copy of address `a` is at `a + copy`.
    copy: usize,
    tp: usize,
    pthread_self: usize,
    tid: u32,
    entry_sp: usize,
    errno_at: usize,
    clear_tid_at: usize,
    /// Offset of the node in glibc's list of threads.
    list: Option<isize>,
    /// DTV entries from −1 on, as pairs of words.
    dtv: Vec<[usize; 2]>,
}

impl ProbeThread {
    fn facts(&self, align: usize) -> ProbeFacts {
        let ProbeThread { tp, top, entry_sp, pthread_self, .. } = *self;
        ProbeFacts { tp, top, entry_sp, pthread_self, align }
    }
}

/// The probe thread's main function. It must not allocate before the copy is made: malloc writes
/// libc's TLS.
extern "C" fn probe_main(arg: *mut c_void) -> *mut c_void {
    let sp = Registers::here().sp as usize;
    // SAFETY: `discover` waits in pthread_join and does not use the record meanwhile.
    let p = unsafe { &mut *arg.cast::<ProbeThread>() };
    p.tp = thread_pointer();
    // SAFETY: returns an address.
    p.pthread_self = unsafe { libc::pthread_self() } as usize;
    p.entry_sp = sp & !15;
    if !(p.low..p.top).contains(&p.tp) || !(p.low..p.tp).contains(&p.entry_sp) {
        return std::ptr::null_mut(); // `discover` sees that `tid` is 0
    }
    // SAFETY: [sp, top) is this thread's stack and block; the copy's half of the mapping has the
    // same size; a DTV has its length in front (entry −1), bounded here by the allocated capacity.
    unsafe {
        let from = p.entry_sp as *const u8;
        ((p.entry_sp + p.copy) as *mut u8).copy_from_nonoverlapping(from, p.top - p.entry_sp);
        let dtv: usize = load(p.tp + variant::DTV);
        let len: usize = load(dtv - 16);
        if (1..DTV_ENTRIES_MAX).contains(&len) {
            p.dtv.as_mut_ptr().copy_from_nonoverlapping((dtv - 16) as *const [usize; 2], len + 2);
            p.dtv.set_len(len + 2);
        }
        p.errno_at = libc::__errno_location() as usize;
        syscall(libc::SYS_prctl, [PR_GET_TID_ADDRESS, (&raw mut p.clear_tid_at) as usize, 0, 0]);
    }
    p.tid = syscalls::gettid();
    p.list = find_list(p);
    std::ptr::null_mut()
}

/// Reads words at any address, through a pipe: a bad address is EFAULT instead of a crash (other
/// threads may unmap their stacks meanwhile).
struct SafeReader([c_int; 2]);

impl SafeReader {
    fn new() -> Option<Self> {
        let mut fds = [0; 2];
        // SAFETY: the kernel writes two descriptors.
        let done = unsafe {
            syscall(libc::SYS_pipe2, [fds.as_mut_ptr() as usize, libc::O_CLOEXEC as usize, 0, 0])
        };
        (done == 0).then_some(Self(fds))
    }

    fn word(&self, at: usize) -> Option<usize> {
        let mut word = 0usize;
        // SAFETY: the kernel checks `at`; the word is read back into a local of the same size.
        unsafe {
            if syscall(libc::SYS_write, [self.0[1] as usize, at, 8, 0]) != 8 {
                return None;
            }
            syscall(libc::SYS_read, [self.0[0] as usize, (&raw mut word) as usize, 8, 0]);
        }
        Some(word)
    }
}

impl Drop for SafeReader {
    fn drop(&mut self) {
        for fd in self.0 {
            // SAFETY: the descriptors of this pipe.
            unsafe { syscall(libc::SYS_close, [fd as usize, 0, 0, 0]) };
        }
    }
}

/// Finds the node of glibc's list of threads: the pair (next, prev), both outside of this block,
/// whose neighbours point back. Runs on the probe thread, which is in the list only while it runs.
fn find_list(p: &ProbeThread) -> Option<isize> {
    let reader = SafeReader::new()?;
    let own = p.low..p.top;
    let outside =
        |a: usize| (PAGE..1 << 52).contains(&a) && a.is_multiple_of(8) && !own.contains(&a);
    // Another thread may start or end between two reads: then no pair fits, so try again.
    for _ in 0..8 {
        let mut found = None;
        let [_, pthread] = variant::areas(&p.facts(1));
        for at in (pthread.start..pthread.end - 16).step_by(8) {
            // SAFETY: the block of the running thread.
            let [next, prev]: [usize; 2] = unsafe { load(at) };
            if outside(next)
                && outside(prev)
                && reader.word(next + 8) == Some(at)
                && reader.word(prev) == Some(at)
            {
                if found.is_some() {
                    return None; // two candidates: better none than the wrong one
                }
                found = Some(at.wrapping_sub(p.tp) as isize);
            }
        }
        if found.is_some() {
            return found;
        }
    }
    None
}

/// Turns an error number into a text that begins with `what`.
fn check(rc: c_int, what: &str) -> Result<(), String> {
    match rc {
        0 => Ok(()),
        e => Err(format!("{what}: {}", std::io::Error::from_raw_os_error(e))),
    }
}

/// Every signal except glibc's own two (32, 33). A handler of the program must not run on the
/// threads made here; on the probe thread it would change what is about to be copied.
const USER_SIGNALS: u64 = !(0b11 << 31);

/// Starts a thread on `[low, top)` by `pthread_create`, with the program's signals blocked.
///
/// # Safety
/// The thread owns the memory until it has ended; `main(arg)` may run on it.
pub(super) unsafe fn thread_on(
    low: usize,
    top: usize,
    main: extern "C" fn(*mut c_void) -> *mut c_void,
    arg: *mut c_void,
) -> Result<libc::pthread_t, String> {
    let mut attr = MaybeUninit::uninit();
    let mut thread = MaybeUninit::uninit();
    // SAFETY: attr is initialised first and destroyed last; the memory is the caller's contract.
    unsafe {
        check(describe_stack(attr.as_mut_ptr(), low, top), "the stack of a new thread")?;
        let mask = change_mask(libc::SIG_BLOCK, USER_SIGNALS);
        let rc = libc::pthread_create(thread.as_mut_ptr(), attr.as_ptr(), main, arg);
        set_mask(mask);
        libc::pthread_attr_destroy(attr.as_mut_ptr());
        check(rc, "pthread_create").map(|()| thread.assume_init())
    }
}

/// How many times the probe thread is run, if libraries are loaded or closed meanwhile.
const ATTEMPTS: usize = 20;

/// Runs the probe thread and reads its copy.
///
/// # Errors
/// A text that names what is not as expected.
pub(super) fn discover() -> Result<DiscoveredLayout, String> {
    for _ in 0..ATTEMPTS {
        if let Some(found) = try_to_discover()? {
            return Ok(found);
        }
    }
    Err("other threads load or close libraries all the time".into())
}

/// As [`discover`], but returns None if libraries were loaded or closed meanwhile.
fn try_to_discover() -> Result<Option<DiscoveredLayout>, String> {
    let segments = segments();
    let tls: usize = segments.iter().map(|s| s.size + s.align).sum();
    let span = tls.next_multiple_of(PAGE) + STACK_BYTES + ODD_BYTES;
    let half = span.next_multiple_of(PAGE);
    let map = Map::new(2 * half)?;
    let mut p = ProbeThread {
        low: map.base,
        top: map.base + span,
        copy: half,
        tp: 0,
        pthread_self: 0,
        tid: 0,
        entry_sp: 0,
        errno_at: 0,
        clear_tid_at: 0,
        list: None,
        dtv: Vec::with_capacity(DTV_ENTRIES_MAX + 2),
    };
    // SAFETY: the mapping outlives the join; only the probe thread uses `p` until then.
    unsafe {
        let thread = thread_on(p.low, p.top, probe_main, (&raw mut p).cast())?;
        check(libc::pthread_join(thread, std::ptr::null_mut()), "pthread_join")?;
    }
    if p.tid == 0 {
        return Err("the thread pointer of a new thread is not in the stack it was given".into());
    }
    if !modules::same(&segments, &modules::segments()) {
        return Ok(None);
    }
    read_copy(&p, &segments).map(Some)
}

/// Reads the probe thread's copy: sizes, places and the recipe.
fn read_copy(p: &ProbeThread, segments: &[Segment]) -> Result<DiscoveredLayout, String> {
    // SAFETY: [entry_sp, top) was copied, and every caller stays in it.
    let word = |at: usize| -> usize { unsafe { load(at + p.copy) } };
    let tp = p.tp;
    variant::check_header(tp, word)?;
    let align = segments.iter().map(|s| s.align).max().unwrap_or(1).max(variant::MIN_ALIGN);
    let facts = p.facts(align);
    let modules = static_modules(p, segments)?;
    let errno = p.errno_at as isize - tp as isize;
    let libc = *modules
        .iter()
        .find(|m| m.area().contains(&errno))
        .ok_or("errno lies in no module's TLS")?;
    if libc.id == 1 && segments.len() == 1 {
        return Err("libc is linked statically: its TLS cannot be told from the program's".into());
    }
    let rseq = rseq_offset();
    let used = modules.iter().map(Module::area).chain(rseq.map(|r| r..r + RSEQ_SIZE));
    let lowest = used.clone().map(|area| area.start).min().unwrap_or(0);
    let highest = used.map(|area| area.end).max().unwrap_or(0);
    let extents = variant::extents(&facts, lowest, highest)?;
    let tid = find_tid(p, &extents.pthread, rseq)?;
    let clear_tid = p.clear_tid_at.wrapping_sub(tp) as isize;
    let clear_tid = extents.pthread.contains(&clear_tid).then_some(clear_tid);

    let static_generation = (modules.len() == segments.len()).then(|| p.dtv[1][0]);
    let mut found = DiscoveredLayout {
        static_generation,
        has_hidden_modules: has_hidden_modules(p, segments),
        extents,
        align,
        tid,
        errno,
        clear_tid,
        rseq,
        words: Vec::new(),
        list: p.list,
        modules: modules.into_iter().filter(|m| m.id != libc.id).collect(),
        libc,
        dtv: dtv_of_a_fresh_block(p, segments),
    };
    found.words = words(p, &found);
    Ok(found)
}

/// Entries of a new DTV beyond the highest index in use, in every glibc.
const DTV_SURPLUS: usize = 14;

/// Returns whether there are modules with a fixed place that the loader does not list: those of
/// other namespaces (`dlmopen` before the runtime was started).
fn has_hidden_modules(p: &ProbeThread, segments: &[Segment]) -> bool {
    let is_known = |id| surplus::is_image(id) || segments.iter().any(|s| s.id == id);
    let mut entries = p.dtv.iter().enumerate().skip(2);
    let [places, _] = variant::areas(&p.facts(1));
    entries.any(|(i, entry)| places.contains(&entry[0]) && !is_known(i - 1))
}

/// Returns the probe thread's DTV without addresses of its block, which are written for each block,
/// and without the entries that glibc leaves for later modules: each takes 16 bytes of every
/// goroutine. glibc makes the DTV of a goroutine longer when it first accesses such a module. It
/// must have an entry for every module of its generation, also in other namespaces: glibc does not
/// check the length for those.
fn dtv_of_a_fresh_block(p: &ProbeThread, segments: &[Segment]) -> Vec<[usize; 2]> {
    let mut dtv = p.dtv.clone();
    // Entries −1 and 0 are the length and the generation.
    let len = dtv.len() - 2;
    let last = segments.iter().map(|s| s.id).max().unwrap_or(0);
    let last = last.max(len.saturating_sub(DTV_SURPLUS)).min(len);
    dtv.truncate(last + 2);
    dtv[0][0] = last;
    for entry in dtv.iter_mut().skip(2).filter(|entry| (p.low..p.top).contains(&entry[0])) {
        *entry = [UNALLOCATED, 0];
    }
    dtv
}

/// Classifies each word of the copy: the recipe.
fn words(p: &ProbeThread, l: &DiscoveredLayout) -> Vec<(isize, Word)> {
    let mut out = Vec::new();
    let block = &l.extents;
    let bottom = p.tp - block.below;
    for off in (-(block.below_used as isize)..block.above_used as isize).step_by(8) {
        let at = p.tp.wrapping_add_signed(off);
        // Part of an image, which is written after the words.
        if l.modules.iter().any(|m| m.area().start <= off && off + 8 <= m.area().end) {
            continue;
        }
        // SAFETY: inside the copy.
        let mut value: usize = unsafe { load(at + p.copy) };
        if off == l.tid & !7 {
            value &= !(0xffff_ffff << ((l.tid & 7) * 8)); // written for each block
        }
        if l.errno & !7 == off {
            value &= !(0xffff_ffff << ((l.errno & 7) * 8));
        }
        let in_rseq = l.rseq.is_some_and(|r| (r..r + RSEQ_SIZE).contains(&off));
        let list = l.list.is_some_and(|n| off == n || off == n + 8);
        let dtv = off == variant::DTV as isize;
        let word = match value {
            _ if dtv || in_rseq => continue, // the DTV and rseq: made for each block
            _ if list => Word::Tp(l.list.unwrap_or(0)), // alone in its own list
            0 => continue,
            v if v == p.low => Word::Low,
            v if v == p.top - p.low => Word::Size,
            v if (bottom..=p.top).contains(&v) => Word::Tp(v as isize - p.tp as isize),
            // Points into the probe thread's frames (where pthread_exit would unwind to):
            // goroutines have no such frame.
            v if (p.low..bottom).contains(&v) => continue,
            v if v == probe_main as *const () as usize || v == (&raw const *p) as usize => continue,
            v => Word::Same(v as u64),
        };
        out.push((off, word));
    }
    out
}

/// The part of `struct rseq` that the kernel writes; later fields are zero in an unregistered area.
const RSEQ_SIZE: isize = 32;

/// Returns the offset of glibc's `struct rseq`, if it has one, whether it is registered or not:
/// glibc reads it in any case.
fn rseq_offset() -> Option<isize> {
    // SAFETY: a constant of glibc ≥ 2.35, a ptrdiff_t.
    Some(unsafe { load(symbol(c"__rseq_offset")? as usize) })
}

/// Finds the tid: the 32-bit word that equals gettid() in the probe thread *and* in the calling
/// thread, so that another small number is not mistaken for a small tid (7 in a container).
fn find_tid(p: &ProbeThread, pthread: &Range<isize>, rseq: Option<isize>) -> Result<isize, String> {
    let (me, mine) = (thread_pointer(), syscalls::gettid());
    let mut found = pthread.clone().step_by(4).filter(|&off| {
        // SAFETY: inside the copy; and the calling thread is a real thread with a block of the same
        // size. (rseq, which the kernel may write meanwhile, is excluded.)
        !rseq.is_some_and(|r| (r..r + RSEQ_SIZE).contains(&off))
            && unsafe {
                load::<u32>(raw::at(p.tp, off) + p.copy) == p.tid
                    && load::<u32>(raw::at(me, off)) == mine
            }
    });
    match (found.next(), found.next()) {
        (Some(off), None) => Ok(off),
        (None, _) => Err("no word of struct pthread holds the thread's id".into()),
        _ => Err("more than one word of struct pthread holds the thread's id".into()),
    }
}

/// Returns the modules with a fixed place, by the probe thread's DTV.
fn static_modules(p: &ProbeThread, segments: &[Segment]) -> Result<Vec<Module>, String> {
    if p.dtv.is_empty() {
        return Err("the DTV's length is out of bounds".into());
    }
    let mut modules = Vec::new();
    let [places, _] = variant::areas(&p.facts(1));
    for s in segments {
        let Some(&[at, to_free]) = p.dtv.get(s.id + 1) else { continue };
        if !places.contains(&at) {
            continue; // dynamic: glibc allocates it on first use
        }
        if to_free != 0 || at + s.size > places.end {
            return Err(format!("module {} has an unexpected DTV entry", s.id));
        }
        modules.push(Module::new(s, at.wrapping_sub(p.tp) as isize));
    }
    Ok(modules)
}

/// Returns the bytes below tp including glibc's reserve for dlopen, if glibc exports them and they
/// are consistent with the probe thread's frames.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "variant I needs no such sum"))]
pub(super) fn static_size(p: &ProbeFacts, above: usize) -> Option<usize> {
    type MinStack = unsafe extern "C" fn(*const libc::pthread_attr_t) -> usize;
    type StaticInfo = unsafe extern "C" fn(*mut usize, *mut usize);
    let fits = |total: usize| {
        let below = total.checked_sub(above)?.next_multiple_of(64.min(p.align));
        let frames = (p.tp - below).checked_sub(p.entry_sp)?;
        (frames < ENTRY_FRAMES_MAX_BYTES).then_some(below)
    };
    let min_stack = symbol(c"__pthread_get_minstack").and_then(|f: *mut c_void| {
        let mut attr = MaybeUninit::uninit();
        // SAFETY: glibc's function of that name (2.15 on) takes an initialised attr, and ignores
        // it.
        let total = unsafe {
            libc::pthread_attr_init(attr.as_mut_ptr());
            let total = std::mem::transmute::<*mut c_void, MinStack>(f)(attr.as_ptr());
            libc::pthread_attr_destroy(attr.as_mut_ptr());
            total
        };
        fits(total.checked_sub(PAGE + STACK_MIN_BYTES)?)
    });
    min_stack.or_else(|| {
        let (mut size, mut align) = (0, 0);
        let f = symbol(c"_dl_get_tls_static_info")?;
        // SAFETY: the loader's function of that name (up to 2.33) writes two sizes.
        unsafe { std::mem::transmute::<*mut c_void, StaticInfo>(f)(&mut size, &mut align) };
        fits(size)
    })
}

/// Returns the address of a function that must exist.
pub(super) fn required(name: &CStr) -> Result<usize, String> {
    symbol(name)
        .map(|f| f as usize)
        .ok_or_else(|| format!("glibc does not export {}", name.to_string_lossy()))
}
