//! Blocks by `pthread_create` on the goroutine's memory: slow, but glibc fills in everything.
//!
//! The thread leaves at once by a raw exit, so for glibc it never ends: its block stays in glibc's
//! list of threads (fork, setxid and dlopen treat it like any other), and the goroutine reuses its
//! descriptor.
//!
//! Invariants:
//! 1. The kernel's thread has ended before `build` returns: the kernel clears a word of `build`
//!    (`set_tid_address`) after its last access to user memory. Waiting for glibc's own word hangs
//!    on 2.43, where that is no longer `tid`.
//! 2. `reap_thread` ends the thread for glibc too: it clears the word that `pthread_join` waits
//!    for, and then a join unlinks the block under glibc's own lock and frees the DTV. Nothing is
//!    left.
//!
//! Known limit: a setuid that has read the thread's id but sends its signal only when the thread is
//! inside exit(2) waits for ever. 8 of 100 runs of 400 setuid calls beside 800 thread starts hung
//! before `leave` stored the made-up id itself; none of 60 since. The window is narrower, not
//! closed.
//!
//! Rejected: unlinking the node here (glibc's lock for it is not accessible).

use super::BlockLayout;
use super::discover::thread_on;
use super::raw::{self, store, thread_pointer};
use crate::sys::futex::futex_wait_shared;
use crate::sys::raw::syscall;
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, fence};

/// The argument of a thread that leaves at once.
struct Leaver {
    tp: AtomicUsize,
    /// The thread id to store, and its offset in the block.
    tid: u32,
    tid_at: isize,
    /// 1 while the kernel's thread exists; the kernel clears it.
    alive: AtomicU32,
}

/// The main function of a [`Leaver`]'s thread: stores the made-up id and exits.
extern "C" fn leave(arg: *mut c_void) -> *mut c_void {
    // SAFETY: `build` keeps the record until `alive` is cleared.
    let me = unsafe { &*arg.cast::<Leaver>() };
    me.tp.store(thread_pointer(), Ordering::Relaxed);
    // SAFETY: the tid's place is in this thread's block. SYS_exit ends only the kernel's thread; no
    // code runs on its stack afterwards. Clearing `alive` is the kernel's last write (invariant 1).
    unsafe {
        // A setuid on another thread signals the threads in glibc's list, and would wait for an
        // answer to a signal that was lost with this thread. From here on it finds that there is no
        // such thread; the yield lets a setuid that has read the old id deliver its signal.
        store(raw::at(thread_pointer(), me.tid_at), me.tid);
        fence(Ordering::SeqCst);
        syscall(libc::SYS_sched_yield, [0; 4]);
        syscall(libc::SYS_set_tid_address, [me.alive.as_ptr() as usize, 0, 0, 0]);
        syscall(libc::SYS_exit, [0, 0, 0, 0]);
    }
    unreachable!("exit(2) returned")
}

/// Makes a block at `tp` by `pthread_create`.
///
/// # Safety
/// As for `block::build`.
pub(super) unsafe fn build(
    l: &BlockLayout,
    tp: usize,
    low: usize,
    top: usize,
    tid: u32,
) -> io::Result<()> {
    let leaver = Leaver { tp: 0.into(), tid, tid_at: l.tid, alive: 1.into() };
    // SAFETY: the block owns the memory (caller); the record outlives the kernel's thread (below).
    unsafe { thread_on(low, top, leave, (&raw const leaver) as *mut c_void) }
        .map_err(io::Error::other)?;
    // Acquire: what the thread wrote to its block is visible after the kernel has cleared the word.
    while leaver.alive.load(Ordering::Acquire) != 0 {
        // The kernel wakes without the private flag, so this wait is on a shared futex.
        futex_wait_shared(&leaver.alive, 1);
    }
    if leaver.tp.load(Ordering::Relaxed) != tp {
        // It cannot be undone, because the words of the block are not where they should be.
        return Err(io::Error::other("pthread_create put the thread pointer elsewhere"));
    }
    // SAFETY: the thread has ended, and no other code uses the block.
    unsafe {
        super::block::unregister_rseq(l, tp);
        // glibc has made a DTV. The buffer is taken only for the libc TLS that it may contain.
        libc::free(l.take_dtv_buffer(tp).cast());
    }
    Ok(())
}

/// Ends the thread of a block for glibc (invariant 2).
///
/// # Safety
/// No code runs on the block or uses it afterwards.
pub(super) unsafe fn reap_thread(l: &BlockLayout, tp: usize) {
    let Some(word) = l.clear_tid else { return };
    // SAFETY: the word's place was discovered from a real thread; the kernel clears it at a
    // thread's end. So for glibc this is an ended, joinable thread (invariant 2).
    unsafe {
        store(raw::at(tp, l.tid), 0u32);
        store(raw::at(tp, word), 0u32);
        if libc::pthread_join(l.pthread_at(tp) as libc::pthread_t, std::ptr::null_mut()) != 0 {
            super::fatal("pthread_join failed for a goroutine's TLS block");
        }
    }
}
