//! What is known of descriptors by their number: their kind, and the goroutines that wait for them.
//!
//! The numbers are the program's, and any thread may close one and open another at any time. So
//! everything here is only a hint: a wait registers with the poller anew each time
//! (`Pollable::wait_armed`), and a wrong kind costs a system call. `close`, `close_range`, `dup2` and
//! `dup3` reset an entry and end its waits. The calls that make sockets reset it too, because libc itself closes
//! descriptors without calling the interposed `close`.
//!
//! # The mode cache
//! Before a goroutine waits for a descriptor, two things must be known: whether it is a blocking
//! one, and whether a timeout is set for it. The answer "blocking, without a timeout" is cached
//! (`known_blocking`), together with the entry's number of closes and with `MODE_EPOCH`. That
//! counts all calls of the process that make any descriptor non-blocking or set a timeout: those
//! are properties of the open file, which other descriptors (and entries) may share.
//!
//! Invariants:
//! 1. An entry is never freed: pages of the table stay mapped.
//! 2. Entries are found, and made, in signal handlers too: no malloc.

use super::waking::WakeContext;
use crate::sched::netpoll::pollable::{Interrupt, Pollable};
use crate::sched::simulation::Undecided;
use crate::sched::wait;
use crate::sys::fork::is_forked;
use crate::sys::raw::syscall;
use std::ffi::c_uint;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering,
};

/// Descriptors per page of the table, and pages. Together a million and more, the kernel's usual
/// limit.
const PAGE_FDS: usize = 1024;
const PAGES: usize = 1024;

/// What a descriptor refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum FileKind {
    /// A regular file or a directory, which is always ready.
    Regular = 1,
    Socket = 2,
    /// A pipe, a terminal, an eventfd…
    Stream = 3,
}

/// The value of `kind` before it was asked for.
const UNKNOWN: u8 = 0;

/// How many calls made a descriptor non-blocking, or set a timeout for it. Begins with 1: 0 in
/// `known_blocking` means "not known".
static MODE_EPOCH: AtomicU32 = AtomicU32::new(1);

/// What is known of a descriptor. A page of zeros is a page of entries.
pub(super) struct FdEntry {
    /// [`UNKNOWN`], or a [`FileKind`].
    kind: AtomicU8,
    /// `accept` has returned it.
    is_accepted: AtomicBool,
    /// Incremented before and after each close.
    closes: AtomicU32,
    /// `closes` and `MODE_EPOCH` when the descriptor was found to block without a timeout.
    known_blocking: AtomicU64,
    /// Null until a goroutine waits for the descriptor; never freed.
    pollable: AtomicPtr<Pollable>,
}

type Page = [FdEntry; PAGE_FDS];

static TABLE: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(null_mut()) }; PAGES];

/// Returns the entry of a descriptor, if its page exists.
fn existing(fd: RawFd) -> Option<&'static FdEntry> {
    let n = usize::try_from(fd).ok()?;
    // SAFETY: null, or a page that is never freed (invariant 1).
    let page = unsafe { TABLE.get(n / PAGE_FDS)?.load(Ordering::Acquire).as_ref()? };
    Some(&page[n % PAGE_FDS])
}

/// Returns the entry of a descriptor; None if its number is out of bounds, or no memory is left.
pub(super) fn entry(fd: RawFd) -> Option<&'static FdEntry> {
    existing(fd).or_else(|| entry_slow(fd))
}

#[cold]
fn entry_slow(fd: RawFd) -> Option<&'static FdEntry> {
    let place = TABLE.get(usize::try_from(fd).ok()? / PAGE_FDS)?;
    let len = size_of::<Page>();
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: new memory, at any address.
    let fresh = unsafe {
        let args = [0, len, protection as usize, flags as usize, usize::MAX, 0];
        syscall(libc::SYS_mmap, args)
    };
    if (-4095..0).contains(&fresh) {
        return None;
    }
    let fresh = std::ptr::with_exposed_provenance_mut::<Page>(fresh as usize);
    // Release pairs with the Acquire in `existing`: a thread that finds the page sees its zeros.
    if place.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: our own mapping, which no other thread has seen.
        unsafe {
            syscall(libc::SYS_munmap, [fresh.addr(), len]);
        }
    }
    existing(fd)
}

impl FdEntry {
    /// Returns how often the descriptor was closed: read before an attempt, for a wait after it.
    #[inline]
    pub(super) fn closes(&self) -> u32 {
        self.closes.load(Ordering::Acquire)
    }

    /// Returns whether the descriptor is cached as blocking without a timeout; otherwise whether
    /// `ask` says so, whose answer is cached.
    pub(super) fn is_known_blocking(&self, ask: impl FnOnce() -> bool) -> bool {
        let (closes, epoch) = (self.closes(), MODE_EPOCH.load(Ordering::Acquire));
        let now = u64::from(closes) << 32 | u64::from(epoch);
        if self.known_blocking.load(Ordering::Relaxed) == now {
            return true;
        }
        let is_blocking = ask();
        if is_blocking {
            // With the numbers of before the question: a change since then makes the entry invalid.
            self.known_blocking.store(now, Ordering::Relaxed);
        }
        is_blocking
    }

    /// Resets the entry: the number refers to another file, or to none.
    fn reset(&self) {
        self.kind.store(UNKNOWN, Ordering::Relaxed);
        self.set_accepted(false);
        // Release pairs with the Acquire in `closes`: a thread that sees the count sees the kind
        // reset.
        self.closes.fetch_add(1, Ordering::Release);
    }

    fn set_accepted(&self, is_accepted: bool) {
        self.is_accepted.store(is_accepted, Ordering::Relaxed);
        if let Some(pollable) = self.existing_pollable() {
            pollable.set_accepted(is_accepted);
        }
    }

    /// Returns what the descriptor refers to.
    pub(super) fn kind(&self, fd: RawFd) -> FileKind {
        const REGULAR: u8 = FileKind::Regular as u8;
        const SOCKET: u8 = FileKind::Socket as u8;
        const STREAM: u8 = FileKind::Stream as u8;
        match self.kind.load(Ordering::Relaxed) {
            REGULAR => FileKind::Regular,
            SOCKET => FileKind::Socket,
            STREAM => FileKind::Stream,
            _ => self.kind_slow(fd),
        }
    }

    #[cold]
    fn kind_slow(&self, fd: RawFd) -> FileKind {
        let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: the kernel fills the structure, which has the kernel's layout on the 64-bit
        // targets.
        let rc = unsafe { syscall(libc::SYS_fstat, [fd as usize, stat.as_mut_ptr() as usize]) };
        if rc != 0 {
            // The real call will return the error.
            return FileKind::Regular;
        }
        // SAFETY: zeroed, then filled.
        let kind = match unsafe { stat.assume_init() }.st_mode & libc::S_IFMT {
            libc::S_IFSOCK => FileKind::Socket,
            libc::S_IFREG | libc::S_IFDIR | libc::S_IFBLK | libc::S_IFLNK => FileKind::Regular,
            _ => FileKind::Stream,
        };
        self.kind.store(kind as u8, Ordering::Relaxed);
        kind
    }

    /// Returns the pollable in which goroutines wait for the descriptor.
    pub(super) fn pollable(&self) -> &'static Pollable {
        if let Some(pollable) = self.existing_pollable() {
            return pollable;
        }
        let fresh = Pollable::new();
        fresh.set_accepted(self.is_accepted.load(Ordering::Relaxed));
        let raw = std::ptr::from_ref(fresh).cast_mut();
        // Release pairs with the Acquire in `existing_pollable`: the pollable is initialised.
        match self.pollable.compare_exchange(null_mut(), raw, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                fresh.free();
                // SAFETY: a Pollable; those are never freed.
                unsafe { &*other }
            }
        }
    }

    /// As [`FdEntry::pollable`]; None if no goroutine has ever waited for the descriptor.
    fn existing_pollable(&self) -> Option<&'static Pollable> {
        // SAFETY: null, or a Pollable; those are never freed.
        unsafe { self.pollable.load(Ordering::Acquire).as_ref() }
    }
}

/// The id of this process when the runtime started; 0 before that.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Records the id of this process.
pub(super) fn note_process() {
    PROCESS.store(process_id(), Ordering::Relaxed);
}

/// Returns whether the caller is a child of `fork` or `vfork`, whose descriptors are its own. A child
/// of `vfork` shares its parent's memory.
pub(super) fn is_child() -> bool {
    is_forked() || PROCESS.load(Ordering::Relaxed) != process_id()
}

fn process_id() -> i32 {
    // SAFETY: no arguments.
    unsafe { syscall(libc::SYS_getpid, []) as i32 }
}

/// Called before the descriptor is closed: ends its waits with an error, and resets its entry.
/// Returns whether [`after_close`] must be called.
///
/// Ends no wait in a child of `fork` or `vfork` ([`is_child`]).
pub(super) fn before_close(fd: RawFd) -> bool {
    if is_forked() {
        return false;
    }
    let Some(entry) = existing(fd) else { return false };
    let pollable = entry.existing_pollable();
    // Last, because `is_child` makes a system call.
    if pollable.is_some() && is_child() {
        return false;
    }
    entry.reset();
    if let Some(pollable) = pollable {
        interrupt(pollable, fd, Interrupt::Closed);
    }
    pollable.is_some()
}

/// Called after the descriptor is closed: goroutines that began to wait during the close retry
/// their call. One that is the first ever to wait for this number is not known to the close.
pub(super) fn after_close(fd: RawFd) {
    let Some(entry) = existing(fd) else { return };
    entry.reset();
    if let Some(pollable) = entry.existing_pollable() {
        interrupt(pollable, fd, Interrupt::Retry);
    }
}

/// Ends the waits of a pollable. `close` is async-signal-safe: in a handler it neither enters the
/// runtime nor waits for a lock that its thread holds.
fn interrupt(pollable: &'static Pollable, fd: RawFd, why: Interrupt) {
    let _undecided = Undecided::begin();
    match WakeContext::current() {
        WakeContext::Runtime => wait::inside(|here| pollable.interrupt(here, fd, why)),
        WakeContext::Outside => pollable.interrupt(None, fd, why),
        WakeContext::Deferred => pollable.interrupt_later(),
    }
}

/// Calls `f` with each descriptor from `first` to `last` that has an entry.
fn for_each_existing(first: c_uint, last: c_uint, mut f: impl FnMut(RawFd)) {
    let end = (last as usize).saturating_add(1).min(PAGES * PAGE_FDS);
    let mut fd = first as usize;
    while fd < end {
        if existing(fd as RawFd).is_some() {
            f(fd as RawFd);
            fd += 1;
        } else {
            // The whole page is missing.
            fd = (fd / PAGE_FDS + 1) * PAGE_FDS;
        }
    }
}

/// As [`before_close`], for the descriptors from `first` to `last`. Returns whether
/// [`after_close_range`] must be called.
pub(super) fn before_close_range(first: c_uint, last: c_uint) -> bool {
    let mut is_waited_for = false;
    for_each_existing(first, last, |fd| is_waited_for |= before_close(fd));
    is_waited_for
}

/// As [`after_close`], for the descriptors from `first` to `last`.
pub(super) fn after_close_range(first: c_uint, last: c_uint) {
    for_each_existing(first, last, after_close);
}

/// Resets the entry of a new descriptor: libc may have closed the former one without calling the
/// interposed `close`.
pub(super) fn after_open(fd: RawFd) {
    if let Some(entry) = existing(fd) {
        entry.reset();
    }
}

/// As [`after_open`], for a descriptor that `accept` has returned.
pub(super) fn after_accept(fd: RawFd) {
    // An error is not a descriptor, and has no entry.
    if let Some(entry) = entry(fd) {
        entry.reset();
        entry.set_accepted(true);
    }
}

/// Invalidates the mode cache of all descriptors, after one was made non-blocking or got a timeout.
pub(super) fn invalidate_mode_cache() {
    // Release pairs with the Acquire in `is_known_blocking`: a thread that reads the new number
    // asks the kernel after the change.
    if MODE_EPOCH.fetch_add(1, Ordering::Release) == u32::MAX {
        MODE_EPOCH.store(1, Ordering::Release);
    }
}
