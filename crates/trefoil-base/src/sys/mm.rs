//! Memory mappings: reserve, discard, guard.
//!
//! Guards come in two kinds; which one is used depends on the kernel ([`guard_kind`] finds out
//! once):
//!
//! | kind | how | cost |
//! |---|---|---|
//! | [`GuardKind::Marker`] | `MADV_GUARD_INSTALL` (Linux ≥ 6.13): a page-table marker | none |
//! | [`GuardKind::Protect`] | `mprotect(PROT_NONE)` | two VMAs of `vm.max_map_count` |
//!
//! A marker survives `MADV_DONTNEED` over it (by design, tested in `mem`). `MADV_GUARD_REMOVE` and
//! `munmap` remove it.
//!
//! # Locked memory
//! After `mlockall` the kernel refuses `MADV_GUARD_INSTALL` and `MADV_DONTNEED` on locked memory,
//! and with `MCL_FUTURE` it populates every new writable mapping. So:
//! - [`reserve`] maps without access, unlocks the mapping if the kernel has locked it, and only
//!   then makes it writable. The caller installs its guards and calls [`lock_on_fault`]: a page is
//!   locked when it is first touched, as the program asked for, and an unused stack costs nothing.
//! - A marker that was installed before the lock stays. [`mark_locked`] unlocks for a moment.
//! - [`discard`] uses `MADV_DONTNEED_LOCKED` (Linux 5.18).
//!
//! Everything here is a raw system call, without errno and without libc: it runs with a goroutine's
//! TLS, inside the runtime, where interposed functions must not be called.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use super::raw::syscall;
use super::syscalls::{self, Errno};

/// Bytes in the smallest page of the supported CPUs: the unit in which memory is counted. What is
/// passed to the kernel is rounded to [`page`].
pub const PAGE: usize = 4096;

/// Returns the bytes in a page of this kernel: 4 KiB on x86_64; 4, 16 or 64 KiB on aarch64. The
/// kernel rounds lengths up to it, so a span that begins or ends inside a page would hit its
/// neighbours.
#[inline(always)]
pub fn page() -> usize {
    if cfg!(target_arch = "x86_64") {
        return PAGE;
    }
    match PAGE_BYTES.load(Ordering::Relaxed) {
        0 => ask_page_slow(),
        bytes => bytes,
    }
}

/// 0 until [`page`] has asked. A fact, as [`KIND`].
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

#[cold]
fn ask_page_slow() -> usize {
    // SAFETY: getauxval only reads the auxiliary vector, which always has this entry.
    let bytes = unsafe { libc::getauxval(libc::AT_PAGESZ) } as usize;
    PAGE_BYTES.store(bytes, Ordering::Relaxed);
    bytes
}

const MADV_POPULATE_WRITE: c_int = 23;
const MADV_DONTNEED_LOCKED: c_int = 24;
const MADV_GUARD_INSTALL: c_int = 102;
const MADV_GUARD_REMOVE: c_int = 103;

/// The calling process, as a pidfd (Linux ≥ 6.15); unlike a descriptor it stays right after fork.
const PIDFD_SELF_THREAD_GROUP: isize = -10_001;

/// A range of addresses, laid out as the kernel's `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub base: usize,
    pub len: usize,
}

impl Span {
    pub const EMPTY: Span = Span { base: 0, len: 0 };

    /// Returns the bytes `low..high`.
    pub const fn new(low: usize, high: usize) -> Span {
        Span { base: low, len: high - low }
    }
}

/// How a page is made inaccessible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum GuardKind {
    Marker = 1,
    Protect = 2,
}

/// A new mapping, made by [`reserve`].
#[derive(Clone, Copy)]
pub struct Reserved {
    pub base: NonNull<u8>,
    /// The process locks its memory (`mlockall` with `MCL_FUTURE`): call [`lock_on_fault`] later.
    pub wants_lock: bool,
}

/// Maps `len` zeroed, writable bytes that cost nothing until touched, at `hint` if that is free.
///
/// The mapping is not backed by huge pages: a stack of one page must cost one page.
pub fn reserve(hint: usize, len: usize) -> io::Result<Reserved> {
    let (prot, flags) = (libc::PROT_NONE, libc::MAP_NORESERVE);
    let hint = ptr::without_provenance_mut::<c_void>(hint);
    // Without access at first: under `MCL_FUTURE` the kernel would populate all of it at once.
    // SAFETY: without MAP_FIXED a mapping never replaces another one; the hint is not binding.
    let at = unsafe { syscalls::mmap_anonymous(hint, len, prot, flags) }?;
    let span = Span { base: at.expose_provenance(), len };
    // SAFETY: a new mapping without contents, whose address no other thread knows.
    let made = unsafe {
        // On every kernel this is the only way to find out whether a mapping is locked.
        let refused = advise(span, libc::MADV_DONTNEED).is_err();
        let wants_lock = refused && syscalls::munlock(at, len).is_ok();
        syscalls::mprotect(at, len, syscalls::READ_WRITE).map(|()| wants_lock)
    };
    match made {
        Ok(wants_lock) => {
            // A kernel without huge pages refuses the advice and needs none.
            // SAFETY: advice about our new mapping; changes no contents.
            let _ = unsafe { syscalls::madvise(at, len, libc::MADV_NOHUGEPAGE) };
            let base = NonNull::new(at.cast()).expect("mmap never returns null");
            Ok(Reserved { base, wants_lock })
        }
        Err(e) => {
            // SAFETY: mapped above; no other thread knows the address.
            let _ = unsafe { unmap(span) };
            Err(e.into())
        }
    }
}

/// Locks each page of `span` in memory when it is first touched. Best effort: a kernel before 4.4,
/// or `RLIMIT_MEMLOCK`, leaves it unlocked.
///
/// # Safety
/// `span` was made by [`reserve`].
pub unsafe fn lock_on_fault(span: Span) {
    let at = ptr::with_exposed_provenance_mut(span.base);
    // SAFETY: a mapping of ours; locking changes no contents.
    let _ = unsafe { syscalls::mlock_on_fault(at, span.len) };
}

/// Does what [`mark`] does in memory that `mlockall` has locked: unlocks `whole`, which contains
/// the spans, marks them, and locks `whole` again, on fault. Resident pages stay. One call at a
/// time for one `whole`.
///
/// # Safety
/// As [`mark`]; and `whole` was made by [`reserve`].
pub unsafe fn mark_locked(whole: Span, spans: &[Span]) -> io::Result<()> {
    let at = ptr::with_exposed_provenance_mut(whole.base);
    // SAFETY: unlocking and locking change no contents; the caller's contract covers the rest.
    unsafe {
        syscalls::munlock(at, whole.len)?;
        let marked = mark(spans);
        lock_on_fault(whole);
        marked
    }
}

/// Unmaps a span.
///
/// # Safety
/// `span` was made by [`reserve`], and no thread uses it now or later.
pub unsafe fn unmap(span: Span) -> io::Result<()> {
    // SAFETY: by the contract no pointer into the span is used any more.
    unsafe { syscalls::munmap(ptr::with_exposed_provenance_mut(span.base), span.len) }?;
    #[cfg(test)]
    test_hooks::unmapped(span);
    Ok(())
}

/// Returns the pages to the kernel: the spans read as zeroes afterwards. Guard markers in them
/// stay.
///
/// # Safety
/// The caller owns the spans (page-aligned, private anonymous memory) and loses their contents.
pub unsafe fn discard(spans: &[Span]) -> io::Result<()> {
    #[cfg(test)]
    if test_hooks::FAIL_DISCARD.get() {
        return Err(Errno::INVAL.into());
    }
    // SAFETY: the caller's contract.
    unsafe {
        let done = advise_all(spans, libc::MADV_DONTNEED);
        if done.is_ok() { done } else { advise_all(spans, MADV_DONTNEED_LOCKED) }
    }
}

/// Populates the spans now, in one call instead of one page fault per page. Best effort: a kernel
/// before 5.14 does not support it, and then the pages fault.
///
/// # Safety
/// The caller owns the spans (page-aligned, mapped writable).
pub unsafe fn populate(spans: &[Span]) {
    // SAFETY: the caller's contract; contents do not change.
    let _ = unsafe { advise_all(spans, MADV_POPULATE_WRITE) };
}

/// Makes the spans inaccessible with page-table markers. Doing it twice is harmless.
///
/// # Safety
/// As [`discard`]; and the spans must not be touched until [`unmark`].
pub unsafe fn mark(spans: &[Span]) -> io::Result<()> {
    // SAFETY: the caller's contract.
    unsafe { advise_all(spans, MADV_GUARD_INSTALL) }
}

/// Removes every guard marker from `span`; its other pages do not change.
///
/// # Safety
/// The caller owns the span and no stack in it relies on its guard any more.
pub unsafe fn unmark(span: Span) -> io::Result<()> {
    // SAFETY: the caller's contract.
    unsafe { advise(span, MADV_GUARD_REMOVE) }
}

/// Makes `span` inaccessible for good, as a VMA of its own.
///
/// # Errors
/// `ENOMEM` if the process has as many mappings as `vm.max_map_count` allows.
///
/// # Safety
/// The caller owns the span and no thread touches it again.
pub unsafe fn protect(span: Span) -> io::Result<()> {
    #[cfg(test)]
    if test_hooks::FAIL_PROTECT.get() {
        return Err(Errno::NOMEM.into());
    }
    let at = ptr::with_exposed_provenance_mut(span.base);
    // SAFETY: the caller's contract.
    unsafe { syscalls::mprotect(at, span.len, libc::PROT_NONE) }?;
    Ok(())
}

/// Returns the kind of guard that this process uses; the first call tries it on a scratch page.
pub fn guard_kind() -> GuardKind {
    match KIND.load(Ordering::Relaxed) {
        k if k == GuardKind::Marker as u8 => GuardKind::Marker,
        k if k == GuardKind::Protect as u8 => GuardKind::Protect,
        _ => probe_slow(),
    }
}

/// Selects mprotect guards, whatever the kernel supports. Call it before the first stack.
pub fn force_mprotect_guards() {
    KIND.store(GuardKind::Protect as u8, Ordering::Relaxed);
}

/// 0 if it is unknown, else a [`GuardKind`]. It is a fact about the kernel: all threads write the
/// same value and nothing else depends on it, so every access is Relaxed.
static KIND: AtomicU8 = AtomicU8::new(0);

/// Tries whether the kernel installs a guard marker.
#[cold]
fn probe_slow() -> GuardKind {
    let marker = reserve(0, page()).is_ok_and(|scratch| {
        let span = Span { base: scratch.base.as_ptr().expose_provenance(), len: page() };
        // SAFETY: a scratch page of our own, never touched, unmapped here.
        unsafe {
            let ok = advise(span, MADV_GUARD_INSTALL).is_ok() && is_inaccessible(span.base);
            let _ = unmap(span);
            ok
        }
    });
    let kind = if marker { GuardKind::Marker } else { GuardKind::Protect };
    // Not a plain store: `force_mprotect_guards` may have been called meanwhile, and it wins.
    match KIND.compare_exchange(0, kind as u8, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => kind,
        Err(_) => guard_kind(),
    }
}

/// Returns whether the kernel cannot read the word at `address`. (qemu-user accepts every advice,
/// and does nothing.)
fn is_inaccessible(address: usize) -> bool {
    const EFAULT: isize = -(libc::EFAULT as isize);
    let how = libc::SIG_BLOCK as usize;
    // SAFETY: the kernel checks the address. A readable page of zeroes blocks no signal.
    unsafe { syscall(libc::SYS_rt_sigprocmask, [how, address, 0, 8]) == EFAULT }
}

/// The kernel's limit of spans per call (`UIO_MAXIOV`); batches here are far smaller.
const SPANS_MAX: usize = 1024;

/// 0: untried, 1: `process_madvise` on this process works, 2: it does not. A fact, as [`KIND`].
static BATCHED: AtomicU8 = AtomicU8::new(0);

/// Gives one advice for many spans: one call if the kernel accepts a vector, else one call per
/// span.
///
/// # Safety
/// The caller owns the spans and accepts what the advice does to them, once or twice.
unsafe fn advise_all(spans: &[Span], advice: c_int) -> io::Result<()> {
    if spans.len() > 1 && spans.len() <= SPANS_MAX && BATCHED.load(Ordering::Relaxed) != 2 {
        // SAFETY: the caller's contract.
        if unsafe { advise_vector(spans, advice) } {
            return Ok(());
        }
    }
    for &span in spans {
        // If the vector call stopped half-way, all spans are advised again: the advices are
        // idempotent.
        // SAFETY: the caller's contract.
        unsafe { advise(span, advice) }?;
    }
    Ok(())
}

/// Gives the advice by one `process_madvise`. Returns whether all spans were advised.
///
/// # Safety
/// As [`advise_all`].
unsafe fn advise_vector(spans: &[Span], advice: c_int) -> bool {
    let want: usize = spans.iter().map(|s| s.len).sum();
    let vector = spans.as_ptr().expose_provenance();
    let args = [PIDFD_SELF_THREAD_GROUP as usize, vector, spans.len(), advice as usize, 0];
    // SAFETY: the vector is borrowed for the call; the spans are the caller's contract.
    let got = unsafe { syscall(libc::SYS_process_madvise, args) };
    if got < 0 && BATCHED.load(Ordering::Relaxed) == 0 {
        BATCHED.store(2, Ordering::Relaxed);
    } else if got >= 0 {
        BATCHED.store(1, Ordering::Relaxed);
    }
    got >= 0 && got as usize == want
}

/// Gives the advice for one span.
///
/// # Safety
/// As [`advise_all`].
unsafe fn advise(span: Span, advice: c_int) -> io::Result<()> {
    let at = ptr::with_exposed_provenance_mut(span.base);
    loop {
        // SAFETY: the caller's contract.
        match unsafe { syscalls::madvise(at, span.len, advice) } {
            // `MADV_GUARD_INSTALL` stops for a pending signal.
            Err(Errno::INTR | Errno::AGAIN) => {}
            result => return Ok(result?),
        }
    }
}

/// The size of a huge page, if pages have 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Has the kernel provide the memory that is about to be filled at once, in huge pages if it can:
/// 16 MiB are 4096 page faults otherwise, which take longer than to fill it.
pub fn provide<T>(memory: &mut [MaybeUninit<T>]) {
    let range = memory.as_mut_ptr_range();
    let start = range.start.addr().next_multiple_of(page());
    let end = range.end.addr() & !(page() - 1);
    if start < end {
        let at = range.start.with_addr(start).cast();
        // The advice stays with the addresses, which the allocator uses again: not for less than
        // a huge page.
        let huge = (end - start > HUGE_PAGE).then_some(libc::MADV_HUGEPAGE);
        // Older kernels refuse one or both, and the pages come one by one.
        for advice in huge.into_iter().chain([MADV_POPULATE_WRITE]) {
            // SAFETY: whole pages of memory that the caller owns; neither advice changes contents.
            let _ = unsafe { syscalls::madvise(at, end - start, advice) };
        }
    }
}

/// Reads a word of this process that may not be mapped any more. Returns None if it is not, or if
/// the kernel allows no such reads.
pub fn read_u32(address: usize) -> Option<u32> {
    static IS_REFUSED: AtomicBool = AtomicBool::new(false);
    if IS_REFUSED.load(Ordering::Relaxed) {
        return read_u32_from_file(address);
    }
    let mut word = [0u8; 4];
    let local = libc::iovec { iov_base: word.as_mut_ptr().cast(), iov_len: word.len() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: word.len() };
    let (local, remote) = (&raw const local as usize, &raw const remote as usize);
    // By the id of this thread: the main thread, whose id is that of the process, has no memory
    // once it has ended.
    let tid = syscalls::gettid() as usize;
    // SAFETY: writes to `word` only; the kernel checks the address that it reads.
    let read = unsafe { syscall(libc::SYS_process_vm_readv, [tid, local, 1, remote, 1, 0]) };
    match syscalls::checked(read) {
        Ok(4) => Some(u32::from_ne_bytes(word)),
        Ok(_) | Err(Errno::FAULT) => None,
        Err(_) => {
            IS_REFUSED.store(true, Ordering::Relaxed);
            read_u32_from_file(address)
        }
    }
}

/// As [`read_u32`], where a sandbox refuses `process_vm_readv`, or an emulator does not have it.
#[cold]
fn read_u32_from_file(address: usize) -> Option<u32> {
    let memory = syscalls::open_to_read(c"/proc/thread-self/mem").ok()?;
    let mut word = [0u8; 4];
    let read = syscalls::pread(memory.as_fd(), &mut word, address as u64);
    (read == Ok(4)).then(|| u32::from_ne_bytes(word))
}

/// Simulates refusals of the kernel.
#[cfg(test)]
pub mod test_hooks {
    use super::{Span, page, ptr, syscalls};
    use std::cell::Cell;

    thread_local! {
        /// On this thread [`protect`](super::protect) fails, and the first span that is unmapped is
        /// replaced at once by a page of another owner.
        pub static FAIL_PROTECT: Cell<bool> = const { Cell::new(false) };
        /// On this thread [`discard`](super::discard) fails.
        pub static FAIL_DISCARD: Cell<bool> = const { Cell::new(false) };
        /// The page that has replaced an unmapped span.
        pub static NEIGHBOUR: Cell<Option<usize>> = const { Cell::new(None) };
    }

    pub(super) fn unmapped(span: Span) {
        if !FAIL_PROTECT.get() || NEIGHBOUR.get().is_some() {
            return;
        }
        let (prot, flags) = (libc::PROT_READ, libc::MAP_FIXED_NOREPLACE);
        let at = ptr::with_exposed_provenance_mut(span.base);
        // SAFETY: a new mapping that replaces none.
        let made = unsafe { syscalls::mmap_anonymous(at, page(), prot, flags) };
        NEIGHBOUR.set(made.ok().map(|at| at.expose_provenance()));
    }

    pub fn is_mapped(address: usize) -> bool {
        let mut resident = 0;
        let at = ptr::with_exposed_provenance_mut(address);
        // SAFETY: asks about one page, and writes one byte of a local.
        unsafe { libc::mincore(at, page(), &raw mut resident) == 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::{c_int, c_void};

    /// On a thread of a child process: the child succeeds if a word is read in both ways after its
    /// main thread has ended.
    extern "C" fn read_after_the_main_thread(word: *mut c_void) -> *mut c_void {
        let (path, mut buffer) = (c"/proc/self/cwd".as_ptr() as usize, [0u8; 64]);
        let args = [libc::AT_FDCWD as usize, path, buffer.as_mut_ptr() as usize, buffer.len()];
        // SAFETY: a path that ends with a zero, and a buffer of this length.
        while unsafe { syscall(libc::SYS_readlinkat, args) } >= 0 {
            std::thread::yield_now();
        }
        // SAFETY: the word of the test.
        let expected = Some(unsafe { *word.cast::<u32>() });
        let address = word as usize;
        let found = [read_u32(address), read_u32_from_file(address)];
        // SAFETY: ends the process.
        unsafe { libc::_exit(c_int::from(found != [expected; 2])) }
    }

    #[test]
    fn a_word_is_read_when_the_main_thread_has_ended() {
        let mut word = 0x1234_5678_u32;
        let mut status = 0;
        // SAFETY: the child calls only functions that are safe in a child of `fork`, and does not
        // return. Its main thread ends by the system call, which runs no other code.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::alarm(20);
                let (mut thread, argument) = (0, (&raw mut word).cast());
                let (none, body) = (ptr::null(), read_after_the_main_thread);
                assert_eq!(libc::pthread_create(&raw mut thread, none, body, argument), 0);
                syscall(libc::SYS_exit, [0]);
            }
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        }
        assert_eq!(status, 0, "the word was not read");
    }

    #[test]
    fn a_word_is_read_unless_it_is_not_mapped() {
        let word = 0x1234_5678_u32;
        let address = &raw const word as usize;
        // The first page is never mapped.
        for (address, expected) in [(address, Some(word)), (16, None)] {
            assert_eq!(read_u32(address), expected);
            assert_eq!(read_u32_from_file(address), expected);
        }
    }
}
