//! A goroutine's end, as glibc does it for a thread: TLS destructors, then pthread keys' destructors.
//!
//! glibc keeps a key's destructor in a table that cannot be read, so the interposed
//! `pthread_key_create` (interpose/keys.rs) writes it down here too.
//!
//! | `DTORS[key]` | meaning |
//! |---|---|
//! | 0 | not a live key, as far as we know |
//! | 1 | live, no destructor |
//! | else | live, address of the destructor |

use super::modules::Dtv;
use super::raw::{load, store, thread_pointer};
use super::{Layout, fatal, layout};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// glibc's PTHREAD_KEYS_MAX.
const KEYS_MAX: usize = 1024;
/// Keys in a block of the first level, and such blocks: glibc's PTHREAD_KEY_2NDLEVEL_SIZE.
const KEYS_SIDE: usize = 32;
/// POSIX: rounds before a destructor that sets values again and again is given up.
const DESTRUCTOR_ITERATIONS: usize = 4;
const LIVE: usize = 1;

/// A key's destructor, as C and Rust give it.
pub(crate) type KeyDtor = unsafe extern "C" fn(*mut c_void);

static DTORS: [AtomicUsize; KEYS_MAX] = [const { AtomicUsize::new(0) }; KEYS_MAX];

/// Where glibc keeps a thread's values, as the self-test saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyPlaces {
    /// The byte that says "some value was set".
    pub(super) used: usize,
    /// 32 pairs (sequence number, value), then 32 pointers to such blocks; the first to this one.
    pub(super) first: usize,
}

/// pthread_key_create made `key`; nobody else knows it yet.
pub(crate) fn key_created(key: u32, dtor: Option<KeyDtor>) {
    if let Some(slot) = DTORS.get(key as usize) {
        // Release: the key reaches other threads by the program's own means; this only keeps our
        // store before those. Pairs with the Acquire in `run_keys`.
        slot.store(dtor.map_or(LIVE, |d| d as usize), Ordering::Release);
    }
}

/// pthread_key_delete is about to end `key`.
pub(crate) fn key_deleted(key: u32) {
    if let Some(slot) = DTORS.get(key as usize) {
        slot.store(0, Ordering::Release);
    }
}

/// On the goroutine itself, at its end.
///
/// Destructors are user code: they may park, spawn, set new values; what they make anew is destroyed
/// too, in as many rounds as POSIX grants. Afterwards every key's value is null.
///
/// # Safety
/// The goroutine's function has returned: nobody holds references into its TLS.
pub(crate) unsafe fn run_destructors() {
    let l = layout();
    // SAFETY: the caller's. After the destructors nobody holds addresses into dynamic TLS; free may
    // wait for an arena's lock, so it is called here rather than in the scheduler.
    unsafe {
        run_all(l);
        forget_errors();
        free_buffers(&l.buffers);
        Dtv::of(thread_pointer()).free_dynamic(l);
    }
}

/// What libc keeps of a thread's last failures, and a recycled block would show to the next goroutine.
fn forget_errors() {
    unsafe extern "C" {
        safe fn __h_errno_location() -> *mut std::ffi::c_int;
    }
    // SAFETY: this goroutine's own. The first dlerror says the error, the second frees it.
    unsafe {
        *__h_errno_location() = 0;
        if !libc::dlerror().is_null() {
            libc::dlerror();
        }
    }
}

/// Frees what glibc frees at a thread's end: a block that is destroyed would take it along.
///
/// # Safety
/// Offsets of words in the running block that are null or own memory of malloc's, which nobody uses any more.
pub(super) unsafe fn free_buffers(buffers: &[usize]) {
    for &off in buffers {
        let at = thread_pointer() + off;
        // SAFETY: the caller's.
        unsafe {
            let buffer = load::<*mut c_void>(at);
            if !buffer.is_null() {
                store(at, 0usize);
                libc::free(buffer);
            }
        }
    }
}

#[inline]
pub(super) unsafe fn run_all(l: &Layout) {
    for _ in 0..DESTRUCTOR_ITERATIONS {
        call_tls_dtors(l);
        // SAFETY: the caller's.
        if !unsafe { run_keys(l) } {
            return;
        }
    }
    call_tls_dtors(l);
    // SAFETY: the caller's.
    unsafe { forget_keys(l) };
}

fn call_tls_dtors(l: &Layout) {
    // SAFETY: at the end of a goroutine its TLS destructors are due, each of them once.
    guard(|| unsafe { (l.call_tls_dtors)() });
}

/// Nobody above a destructor can make use of its panic.
#[inline]
fn guard(f: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(f)).is_err() {
        fatal("a goroutine's thread local panicked on drop");
    }
}

/// One round; false if no destructor ran (then all values are null).
#[inline]
unsafe fn run_keys(l: &Layout) -> bool {
    match l.keys {
        // SAFETY: our own block. The byte is glibc's, written by this goroutine's calls only.
        Some(places) if unsafe { load::<u8>(thread_pointer() + places.used) } == 0 => false,
        // SAFETY: the caller's.
        _ => unsafe { run_keys_slow(l) },
    }
}

#[cold]
unsafe fn run_keys_slow(l: &Layout) -> bool {
    let tp = thread_pointer();
    let mut ran = false;
    if let Some(places) = l.keys {
        // SAFETY: our own block; a value set from here on sets the byte again.
        unsafe { store(tp + places.used, 0u8) };
    }
    // SAFETY: our own block (caller); a destructor runs for the value it was made for, once, because
    // the value is taken out first. `getspecific` answers null for a value of a deleted key.
    unsafe {
        each_value(l, tp, |key, slot| {
            let value = libc::pthread_getspecific(key);
            match slot {
                Some(slot) => store(slot, 0usize),
                None => _ = libc::pthread_setspecific(key, std::ptr::null()),
            }
            // Acquire pairs with `key_created`.
            let dtor = DTORS[key as usize].load(Ordering::Acquire);
            if !value.is_null() && dtor > LIVE {
                ran = true;
                let dtor =
                    std::mem::transmute::<usize, unsafe extern "C-unwind" fn(*mut c_void)>(dtor);
                guard(|| dtor(value));
            }
        });
    }
    // Blocks for keys of 32 and more: glibc frees them at a thread's end. Not before the last round.
    if !ran {
        // SAFETY: the caller's.
        unsafe { forget_keys(l) };
    }
    ran
}

/// Calls `f` for every key with a value that is not null; with the value's place if we know it.
unsafe fn each_value(l: &Layout, tp: usize, mut f: impl FnMut(u32, Option<usize>)) {
    let Some(places) = l.keys else {
        for key in 0..KEYS_MAX as u32 {
            let live = DTORS[key as usize].load(Ordering::Acquire) != 0;
            // SAFETY: a live key; glibc checks it again.
            if live && !unsafe { libc::pthread_getspecific(key) }.is_null() {
                f(key, None);
            }
        }
        return;
    };
    let blocks = tp + places.first + KEYS_SIDE * 16;
    for b in 0..KEYS_SIDE {
        for i in 0..KEYS_SIDE {
            // SAFETY: glibc's table in our own block; blocks are read again after each destructor,
            // which may have made one. They are freed only in `forget_keys`.
            unsafe {
                let block: usize = load(blocks + b * 8);
                if block == 0 {
                    break;
                }
                let slot = block + i * 16 + 8;
                if load::<usize>(slot) != 0 {
                    f((b * KEYS_SIDE + i) as u32, Some(slot));
                }
            }
        }
    }
}

/// Makes every value null without asking a destructor, and frees the blocks of high keys.
#[cold]
unsafe fn forget_keys(l: &Layout) {
    let tp = thread_pointer();
    // SAFETY: our own block, at the goroutine's end (caller). The blocks are calloc's; glibc makes new
    // ones on demand.
    unsafe {
        each_value(l, tp, |key, slot| match slot {
            Some(slot) => store(slot, 0usize),
            None => _ = libc::pthread_setspecific(key, std::ptr::null()),
        });
        let Some(places) = l.keys else { return };
        for b in 1..KEYS_SIDE {
            let at = tp + places.first + KEYS_SIDE * 16 + b * 8;
            libc::free(load::<*mut c_void>(at));
            store(at, 0usize);
        }
        store(tp + places.used, 0u8);
    }
}
