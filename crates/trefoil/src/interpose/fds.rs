//! What is known about descriptors by their number: their kind, and who waits for them.
//!
//! The numbers are the program's, and any thread may close one and open another at any time. So what is
//! kept here is only a hint: a wait arms the poller anew each time (`Pollable::wait_armed`), and a wrong
//! kind costs a system call. `close`, `dup2` and `dup3` forget what was known, and end waits; so do the calls
//! that make sockets, because libc itself closes without our door.
//!
//! # Calm descriptors
//! Before a goroutine waits, two questions: is the descriptor a blocking one, and is there a time limit? The answer
//! "blocks, without a limit" is kept (`calm`), with the number of closes of this slot and with `EPOCH`, which
//! counts all calls in the process that make any descriptor non-blocking or set a limit: those are properties of the
//! open file, which other descriptors (and slots) may share.
//!
//! Invariants:
//! 1. A slot, once made, stays: pages of the table are never freed.
//! 2. Slots are found, and made, in signal handlers too: no malloc.

use super::waking::WakeContext;
use crate::sched::netpoll::pollable::{Interrupt, Pollable};
use crate::sched::wait::list;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Descriptors in one page of the table, and pages: a million and more, the kernel's usual limit.
const PAGE: usize = 1024;
const PAGES: usize = 1024;

pub(super) const UNKNOWN: u8 = 0;
/// Nothing to wait for: a regular file, a directory.
pub(super) const PLAIN: u8 = 1;
pub(super) const SOCKET: u8 = 2;
/// A pipe, a terminal, an eventfd…
pub(super) const STREAM: u8 = 3;

/// Calls that made a descriptor non-blocking, or gave it a limit. From 1 on: 0 in `calm` is "not known".
static EPOCH: AtomicU32 = AtomicU32::new(1);

/// A page of zeros is a page of slots.
pub(super) struct Slot {
    kind: AtomicU8,
    /// Counts up before and after each close.
    closes: AtomicU32,
    /// `closes` and `EPOCH` when it was found calm.
    calm: AtomicU64,
    pollable: AtomicPtr<Pollable>,
}

type Page = [Slot; PAGE];

static TABLE: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(null_mut()) }; PAGES];

/// The slot of a descriptor, if it was ever asked for.
fn known(fd: RawFd) -> Option<&'static Slot> {
    let n = usize::try_from(fd).ok()?;
    // SAFETY: null, or a page that is never freed (invariant 1).
    let page = unsafe { TABLE.get(n / PAGE)?.load(Ordering::Acquire).as_ref()? };
    Some(&page[n % PAGE])
}

/// The slot of a descriptor. None: its number is out of bounds.
pub(super) fn slot(fd: RawFd) -> Option<&'static Slot> {
    known(fd).or_else(|| make_slow(fd))
}

#[cold]
fn make_slow(fd: RawFd) -> Option<&'static Slot> {
    let place = TABLE.get(usize::try_from(fd).ok()? / PAGE)?;
    let len = size_of::<Page>();
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: memory of our own, anywhere.
    let fresh = unsafe {
        let args = [0, len, protection as usize, flags as usize, usize::MAX, 0];
        crate::sys::raw::syscall(libc::SYS_mmap, args)
    };
    if (-4095..0).contains(&fresh) {
        return None;
    }
    let fresh = std::ptr::with_exposed_provenance_mut::<Page>(fresh as usize);
    // Release: who finds the page sees it made.
    if place.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: ours, never shared.
        unsafe {
            crate::sys::raw::syscall(libc::SYS_munmap, [fresh.addr(), len]);
        }
    }
    known(fd)
}

impl Slot {
    /// How often it was closed: to be asked before an attempt, for a wait after it.
    #[inline]
    pub(super) fn closes(&self) -> u32 {
        self.closes.load(Ordering::Acquire)
    }

    /// What `calm` must be.
    fn calm_now(&self) -> u64 {
        u64::from(self.closes()) << 32 | u64::from(EPOCH.load(Ordering::Acquire))
    }

    /// Whether it blocks, without a limit, as far as is known; else `ask`s. (It may know better.)
    pub(super) fn is_calm(&self, ask: impl FnOnce() -> bool) -> bool {
        let now = self.calm_now();
        if self.calm.load(Ordering::Relaxed) == now {
            return true;
        }
        let calm = ask();
        if calm {
            // With what was before the question: if anything changed since, it counts for nothing.
            self.calm.store(now, Ordering::Relaxed);
        }
        calm
    }

    /// It is not what it was thought to be.
    pub(super) fn forget(&self) {
        self.kind.store(UNKNOWN, Ordering::Relaxed);
        // Release: who sees the count sees the rest forgotten.
        self.closes.fetch_add(1, Ordering::Release);
    }

    /// What kind of file it is.
    pub(super) fn kind(&self, fd: RawFd) -> u8 {
        match self.kind.load(Ordering::Relaxed) {
            UNKNOWN => self.look_slow(fd),
            kind => kind,
        }
    }

    #[cold]
    fn look_slow(&self, fd: RawFd) -> u8 {
        let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: the kernel fills the structure, which has its layout on x86_64.
        let rc = unsafe {
            let args = [fd as usize, stat.as_mut_ptr() as usize];
            crate::sys::raw::syscall(libc::SYS_fstat, args)
        };
        if rc != 0 {
            return PLAIN; // the real call will say what is wrong
        }
        // SAFETY: zeroed, then filled.
        let kind = match unsafe { stat.assume_init() }.st_mode & libc::S_IFMT {
            libc::S_IFSOCK => SOCKET,
            libc::S_IFREG | libc::S_IFDIR | libc::S_IFBLK | libc::S_IFLNK => PLAIN,
            _ => STREAM,
        };
        self.kind.store(kind, Ordering::Relaxed);
        kind
    }

    /// Where goroutines wait for it.
    pub(super) fn pollable(&self) -> &'static Pollable {
        let at = self.pollable.load(Ordering::Acquire);
        // SAFETY: null, or a Pollable; those are never freed.
        if let Some(pollable) = unsafe { at.as_ref() } {
            return pollable;
        }
        let fresh = Pollable::new();
        let raw = std::ptr::from_ref(fresh).cast_mut();
        match self.pollable.compare_exchange(null_mut(), raw, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => {
                fresh.free();
                // SAFETY: as above.
                unsafe { &*other }
            }
        }
    }
}

/// This process, as it was when the runtime started. 0: it has not.
static PROCESS: AtomicI32 = AtomicI32::new(0);

/// Notes which process this is.
pub(super) fn note_process() {
    PROCESS.store(process(), Ordering::Relaxed);
}

fn process() -> i32 {
    // SAFETY: no arguments.
    unsafe { crate::sys::raw::syscall(libc::SYS_getpid, []) as i32 }
}

/// The descriptor is about to be closed: those who wait for it give up, and nothing is known any more. Returns false if
/// nothing was known, and in another process: the descriptors of a child of `vfork` are its own, but its memory is
/// its parent's.
pub(super) fn closing(fd: RawFd) -> bool {
    if super::FORKED.load(Ordering::Relaxed) {
        return false;
    }
    let Some(slot) = known(fd) else { return false };
    // SAFETY: null, or a Pollable; those are never freed.
    let pollable = unsafe { slot.pollable.load(Ordering::Acquire).as_ref() };
    if pollable.is_some() && PROCESS.load(Ordering::Relaxed) != process() {
        return false;
    }
    slot.forget();
    if let Some(pollable) = pollable {
        interrupt(pollable, fd, Interrupt::Closed);
    }
    pollable.is_some()
}

/// It is closed: who began to wait in the last moment looks again.
pub(super) fn closed(fd: RawFd) {
    let Some(slot) = known(fd) else { return };
    slot.forget();
    // SAFETY: as above.
    if let Some(pollable) = unsafe { slot.pollable.load(Ordering::Acquire).as_ref() } {
        interrupt(pollable, fd, Interrupt::Retry);
    }
}

/// `close` is async-signal-safe: in a handler it neither enters the runtime nor waits for a lock that its thread holds.
fn interrupt(pollable: &'static Pollable, fd: RawFd, why: Interrupt) {
    match WakeContext::current() {
        WakeContext::Runtime => list::inside(|here| pollable.interrupt(here, fd, why)),
        WakeContext::Outside => pollable.interrupt(None, fd, why),
        WakeContext::Deferred => pollable.interrupt_later(),
    }
}

/// The descriptor was just made: what is known is about one that libc closed behind our back.
pub(super) fn opened(fd: RawFd) {
    if let Some(slot) = known(fd) {
        slot.forget();
    }
}

/// Some descriptor does not block any more, or has a limit.
pub(super) fn no_longer_calm() {
    // Release: the change was made before.
    if EPOCH.fetch_add(1, Ordering::Release) == u32::MAX {
        EPOCH.store(1, Ordering::Release);
    }
}
