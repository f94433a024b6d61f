//! Descriptors of goroutines and tasks that never run again.
//!
//! A host that loses its power loses its open files. But the numbers of their descriptors still
//! belong to values that it owns, such as a `TcpStream`. If such a number were free, another thread
//! could get it, and a destructor that runs after all (tasks are aborted when their runtime ends)
//! would close that thread's file. So a file is closed by putting another one in its place
//! (`dup3`): the number is *retired*. When the runtime has ended, the numbers that no destructor
//! has closed become free.
//!
//! A test must not return a value that owns a host's descriptor, such as its socket. After the run
//! the number may belong to another file.
//!
//! Invariant: a retired number is closed by the thread that takes it out of `RETIRED`, and only
//! once.

use super::sockets::{mark, replace_marked};
use super::{Network, unix_socket};
use crate::mem::MmapVec;
use crate::sys::lock::Lock;
use libc::c_uint;
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The retired numbers of the process.
static RETIRED: Lock<MmapVec<RawFd>> = Lock::new(MmapVec::new());

/// The length of `RETIRED`, for readers without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The file that takes the place of closed ones. None if the process could not open it.
static PLACEHOLDER: OnceLock<Option<RawFd>> = OnceLock::new();

/// Returns a socket that is not connected.
fn placeholder() -> Option<RawFd> {
    *PLACEHOLDER.get_or_init(|| {
        let socket = unix_socket(libc::SOCK_STREAM).ok()?;
        // It is never closed.
        let fd = super::duplicate(&socket)?;
        Some(OwnedFd::into_raw_fd(fd))
    })
}

/// Takes a number out of the list. Returns whether it was in it.
fn take(fd: RawFd) -> bool {
    let mut retired = RETIRED.lock();
    let place = retired.iter().position(|other| *other == fd);
    if let Some(place) = place {
        retired.remove_at(place);
        COUNT.store(retired.len(), Ordering::Relaxed);
    }
    place.is_some()
}

/// Returns whether any number is retired.
#[inline(always)]
pub(crate) fn has_any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Notes that a destructor closes a descriptor, which may be retired.
pub(crate) fn note_close(fd: RawFd) {
    if has_any() {
        take(fd);
    }
}

/// As [`note_close`], for the descriptors from `first` to `last`.
pub(crate) fn note_close_range(first: c_uint, last: c_uint) {
    if has_any() {
        let mut retired = RETIRED.lock();
        for place in (0..retired.len()).rev() {
            if (first..=last).contains(&(retired[place] as c_uint)) {
                retired.remove_at(place);
            }
        }
        COUNT.store(retired.len(), Ordering::Relaxed);
    }
}

impl Network {
    /// Closes the file of a descriptor whose owners never run again, and retires its number.
    pub(super) fn retire(&self, fd: RawFd) {
        let Some(placeholder) = placeholder() else { return };
        {
            let mut retired = RETIRED.lock();
            retired.push(fd);
            COUNT.store(retired.len(), Ordering::Relaxed);
        }
        self.lock().retired.push(fd);
        replace_marked(placeholder, fd, libc::O_CLOEXEC);
        // Once more by libc's function, so that the interposed calls learn of it.
        // SAFETY: the owners of the number never use it again, except to close it.
        unsafe { libc::dup3(placeholder, fd, libc::O_CLOEXEC) };
    }

    /// The runtime has ended: frees the numbers that no destructor has closed.
    pub(crate) fn release_retired(&self) {
        let retired = std::mem::take(&mut self.lock().retired);
        for fd in retired {
            if take(fd) {
                mark(fd, false);
                // SAFETY: retired, and its owners never run again.
                unsafe { libc::close(fd) };
            }
        }
    }
}
