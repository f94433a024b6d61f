//! Blocks by `pthread_create` on the goroutine's memory: slow, but glibc fills in everything.
//!
//! The thread leaves at once by a raw exit, so to glibc it lives for ever: its block stays in glibc's
//! list of threads (fork, setxid and dlopen treat it as any other), and the goroutine runs in its skin.
//!
//! Invariants:
//! 1. The kernel's thread is gone before `build` returns: it reports to a word of ours
//!    (`set_tid_address`), which the kernel clears after its last touch of user memory. Waiting for
//!    glibc's own word hangs on 2.43, where that is no longer `tid`.
//! 2. `bury` ends the life that glibc still sees: with the word that `pthread_join` waits for cleared,
//!    a join unlinks the block below_tp glibc's own lock and frees the DTV. Nothing is left behind.
//!
//! Known limit: a setuid that has read the thread's id but sends its signal only when the thread is
//! inside exit(2) waits for ever. 8 of 100 runs of 400 setuid calls beside 800 births hung before
//! `leave` put the made-up id in place itself; none of 60 since. The window is narrower, not closed.
//!
//! Rejected: unlinking the node ourselves (glibc's lock for it cannot be reached).

use super::Layout;
use super::discover::thread_on;
use super::raw::{store, thread_pointer};
use crate::sys::raw::syscall;
use rustix::thread::futex;
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

struct Leaver {
    tp: AtomicUsize,
    /// The thread id to leave behind, and its place.
    tid: u32,
    tid_at: usize,
    /// 1 while the kernel's thread exists; the kernel clears it.
    alive: AtomicU32,
}

extern "C" fn leave(arg: *mut c_void) -> *mut c_void {
    // SAFETY: `build` keeps the record until `alive` is cleared.
    let me = unsafe { &*arg.cast::<Leaver>() };
    me.tp.store(thread_pointer(), Ordering::Relaxed);
    // SAFETY: the tid's place in our own block. Then this ends the kernel's thread only; no code runs on
    // its stack afterwards. Clearing `alive` is the kernel's last write (invariant 1).
    unsafe {
        // Before leaving: a setuid elsewhere signals the threads in glibc's list, and would wait for
        // an answer to a signal that died with us. From here on it finds that there is no such thread;
        // the yield lets one that has read the old id deliver its signal.
        store(thread_pointer() + me.tid_at, me.tid);
        fence(Ordering::SeqCst);
        syscall(libc::SYS_sched_yield, [0; 4]);
        syscall(libc::SYS_set_tid_address, [me.alive.as_ptr() as usize, 0, 0, 0]);
        syscall(libc::SYS_exit, [0, 0, 0, 0]);
    }
    unreachable!("exit(2) returned")
}

/// # Safety
/// As for `block::build`.
pub(super) unsafe fn build(
    l: &Layout,
    tp: usize,
    low: usize,
    top: usize,
    tid: u32,
) -> io::Result<()> {
    let leaver = Leaver { tp: 0.into(), tid, tid_at: l.tid, alive: 1.into() };
    // SAFETY: the memory is the block's (caller), the record outlives the kernel's thread (below).
    unsafe { thread_on(low, top, leave, (&raw const leaver) as *mut c_void) }
        .map_err(io::Error::other)?;
    // Acquire: what the thread wrote to its block comes before the kernel's clearing of the word.
    while leaver.alive.load(Ordering::Acquire) != 0 {
        // The kernel wakes without the private flag: the word is a "shared" futex.
        let _ = futex::wait(&leaver.alive, futex::Flags::empty(), 1, None);
    }
    if leaver.tp.load(Ordering::Relaxed) != tp {
        // Cannot be undone here (the block is not where we would look for its words): leave it whole.
        return Err(io::Error::other("pthread_create put the thread pointer elsewhere"));
    }
    // SAFETY: the thread is gone, the block is ours.
    unsafe {
        super::block::unregister_rseq(l, tp);
        libc::free(l.take_dtv_buffer(tp).cast()); // glibc made the DTV; only an estate is of use
    }
    Ok(())
}

/// # Safety
/// Nobody runs on the block or uses it afterwards.
pub(super) unsafe fn reap_thread(l: &Layout, tp: usize) {
    let Some(word) = l.clear_tid else { return };
    // SAFETY: the word's place was found from a real thread; clearing it is what the kernel does at a
    // thread's end. glibc takes the block for an ended, joinable thread (invariant 2).
    unsafe {
        store(tp + l.tid, 0u32);
        store(tp + word, 0u32);
        if libc::pthread_join(tp as libc::pthread_t, std::ptr::null_mut()) != 0 {
            super::fatal("glibc does not let go of a goroutine's block");
        }
    }
}
