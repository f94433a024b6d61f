//! What is known about descriptors by their number: their kind, and who waits for them.
//!
//! The numbers are the program's, and any thread may close one and open another at any time. So what is
//! kept here is only a hint: a wait arms the poller anew each time (`Pollable::wait_armed`), and a wrong
//! kind costs a system call. `close`, `dup2` and `dup3` forget what was known, and end waits.
//!
//! Invariant 1: a slot, once made, stays: pages of the table are never freed.

use crate::sched::pollable::Pollable;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

/// Descriptors in one page of the table, and pages: a million and more, the kernel's usual limit.
const PAGE: usize = 1024;
const PAGES: usize = 1024;

pub(super) const UNKNOWN: u8 = 0;
/// Nothing to wait for: a regular file, a directory.
pub(super) const PLAIN: u8 = 1;
pub(super) const SOCKET: u8 = 2;
/// A pipe, a terminal, an eventfd…
pub(super) const STREAM: u8 = 3;

pub(super) struct Slot {
    kind: AtomicU8,
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
    let fresh: Box<Page> = Box::new(
        [const { Slot { kind: AtomicU8::new(UNKNOWN), pollable: AtomicPtr::new(null_mut()) } };
            PAGE],
    );
    let fresh = Box::into_raw(fresh);
    // Release: who finds the page sees it made.
    if place.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: ours, never shared.
        drop(unsafe { Box::from_raw(fresh) });
    }
    known(fd)
}

impl Slot {
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
            let args = [fd as usize, stat.as_mut_ptr() as usize, 0, 0, 0, 0];
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

/// The descriptor is about to be closed: those who wait for it give up, and nothing is known any more. False: nothing
/// was known.
pub(super) fn closing(fd: RawFd) -> bool {
    if super::FORKED.load(Ordering::Relaxed) {
        return false;
    }
    let Some(slot) = known(fd) else { return false };
    slot.kind.store(UNKNOWN, Ordering::Relaxed);
    // SAFETY: null, or a Pollable; those are never freed.
    let Some(pollable) = (unsafe { slot.pollable.load(Ordering::Acquire).as_ref() }) else {
        return false;
    };
    pollable.interrupt(fd, true);
    true
}

/// It is closed: who began to wait in the last moment looks again.
pub(super) fn closed(fd: RawFd) {
    let Some(slot) = known(fd) else { return };
    // SAFETY: as above.
    if let Some(pollable) = unsafe { slot.pollable.load(Ordering::Acquire).as_ref() } {
        pollable.interrupt(fd, false);
    }
}
