//! Runs destructors at a goroutine's end, as glibc does for a thread: of thread-locals, then of
//! pthread keys.
//!
//! glibc stores a key's destructor in a table that is not accessible, so the interposed
//! `pthread_key_create` (interpose/keys.rs) stores it here too.
//!
//! | `DTORS[key]` | meaning |
//! |---|---|
//! | 0 | not a live key, as far as known |
//! | 1 | live, no destructor |
//! | else | live, address of the destructor |

use super::modules::Dtv;
use super::raw::{self, load, store, thread_pointer};
use super::{BlockLayout, fatal, layout};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// glibc's PTHREAD_KEYS_MAX.
const KEYS_MAX: usize = 1024;
/// glibc's PTHREAD_KEY_2NDLEVEL_SIZE: the keys per block of its two-level table. The number of
/// blocks is the same.
const KEYS_SIDE: usize = 32;
/// Rounds after which POSIX allows to stop, if destructors set values again and again.
const DESTRUCTOR_ITERATIONS: usize = 4;
/// The entry of a live key without a destructor.
const LIVE: usize = 1;

/// A key's destructor, as C and Rust pass it.
pub type KeyDtor = unsafe extern "C" fn(*mut c_void);

static DTORS: [AtomicUsize; KEYS_MAX] = [const { AtomicUsize::new(0) }; KEYS_MAX];

/// Where glibc stores a thread's values, as found by the self-test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyPlaces {
    /// The byte that is set when some value was set.
    pub(super) used: isize,
    /// 32 pairs (sequence number, value), then 32 pointers to such blocks; the first points to this
    /// one.
    pub(super) first: isize,
}

/// Records a key that `pthread_key_create` has just made; no other thread knows it yet.
pub fn key_created(key: u32, dtor: Option<KeyDtor>) {
    if let Some(slot) = DTORS.get(key as usize) {
        // Release: the program passes the key to other threads by its own synchronisation; this
        // keeps the store before it. Pairs with the Acquire in `run_keys_slow`.
        slot.store(dtor.map_or(LIVE, |d| d as usize), Ordering::Release);
    }
}

/// Removes a key that `pthread_key_delete` is about to delete.
pub fn key_deleted(key: u32) {
    if let Some(slot) = DTORS.get(key as usize) {
        // Release as in `key_created`; nothing depends on it. A goroutine that still finds the
        // destructor calls it only for a value, and a deleted key has none.
        slot.store(0, Ordering::Release);
    }
}

/// Runs the destructors of the running goroutine, at its end.
///
/// Destructors are user code: they may park, spawn and set new values. What they create is
/// destroyed too, in as many rounds as POSIX requires. Afterwards every key's value is null.
///
/// # Safety
/// The goroutine's function has returned: no references into its TLS are left.
#[inline]
pub unsafe fn run_destructors() {
    let l = layout();
    // SAFETY: the caller's contract. After the destructors no code uses addresses into dynamic TLS.
    // `free` may wait for malloc's lock, so it is called here instead of in the scheduler.
    unsafe {
        run_all(l);
        forget_errors();
        free_buffers(&l.buffers);
        Dtv::of(thread_pointer()).free_dynamic(l);
    }
}

/// Clears the last errors that libc stores per thread: the next goroutine on this block would see
/// them.
fn forget_errors() {
    unsafe extern "C" {
        safe fn __h_errno_location() -> *mut std::ffi::c_int;
    }
    // SAFETY: the errors belong to the running goroutine. The first dlerror returns the error, the
    // second frees it.
    unsafe {
        *__h_errno_location() = 0;
        if !libc::dlerror().is_null() {
            libc::dlerror();
        }
    }
}

/// Frees the buffers that glibc frees at a thread's end: destroying the block would leak them.
///
/// # Safety
/// The words at these offsets of the running block are null or own malloc's memory, which no code
/// uses any more.
pub(super) unsafe fn free_buffers(buffers: &[isize]) {
    for &off in buffers {
        let at = raw::at(thread_pointer(), off);
        // SAFETY: the caller's contract.
        unsafe {
            let buffer = load::<*mut c_void>(at);
            if !buffer.is_null() {
                store(at, 0usize);
                libc::free(buffer);
            }
        }
    }
}

/// Runs rounds of destructors until no key has a value, at most [`DESTRUCTOR_ITERATIONS`].
///
/// # Safety
/// As for [`run_destructors`].
#[inline]
pub(super) unsafe fn run_all(l: &BlockLayout) {
    for _ in 0..DESTRUCTOR_ITERATIONS {
        call_tls_dtors(l);
        // SAFETY: the caller's contract.
        if !unsafe { run_keys(l) } {
            return;
        }
    }
    call_tls_dtors(l);
    // SAFETY: the caller's contract.
    unsafe { forget_keys(l) };
}

fn call_tls_dtors(l: &BlockLayout) {
    // SAFETY: at the end of a goroutine its TLS destructors are due, each of them once.
    guard(|| unsafe { (l.call_tls_dtors)() });
}

/// Runs a destructor. A panic aborts: no code above it could handle it.
#[inline]
fn guard(f: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(f)).is_err() {
        fatal("a goroutine's thread local panicked on drop");
    }
}

/// Runs one round of key destructors. Returns false if no destructor ran; then all values are null.
#[inline]
unsafe fn run_keys(l: &BlockLayout) -> bool {
    match l.keys {
        // SAFETY: the running block. Only calls of this goroutine write the byte.
        Some(places) if unsafe { load::<u8>(raw::at(thread_pointer(), places.used)) } == 0 => false,
        // SAFETY: the caller's contract.
        _ => unsafe { run_keys_slow(l) },
    }
}

#[cold]
unsafe fn run_keys_slow(l: &BlockLayout) -> bool {
    let tp = thread_pointer();
    let mut ran = false;
    if let Some(places) = l.keys {
        // SAFETY: the running block; a value set from here on sets the byte again.
        unsafe { store(raw::at(tp, places.used), 0u8) };
    }
    // SAFETY: the running block (caller). A destructor runs once per value, because the value is
    // taken out first. `getspecific` returns null for a value of a deleted key.
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
    // Second-level blocks (of keys from 32 on) are freed at a thread's end, after the last round.
    if !ran {
        // SAFETY: the caller's contract.
        unsafe { forget_keys(l) };
    }
    ran
}

/// Calls `f` for every key with a value that is not null, with the value's address if it is known.
unsafe fn each_value(l: &BlockLayout, tp: usize, mut f: impl FnMut(u32, Option<usize>)) {
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
    let blocks = raw::at(tp, places.first) + KEYS_SIDE * 16;
    for b in 0..KEYS_SIDE {
        for i in 0..KEYS_SIDE {
            // SAFETY: glibc's table in the running block. The pointers are read again after each
            // destructor, which may have made a block. Blocks are freed only in `forget_keys`.
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

/// Sets every value to null without running destructors, and frees the second-level blocks.
#[cold]
unsafe fn forget_keys(l: &BlockLayout) {
    let tp = thread_pointer();
    // SAFETY: the running block, at the goroutine's end (caller). The second-level blocks are
    // calloc's; glibc makes new ones on demand.
    unsafe {
        each_value(l, tp, |key, slot| match slot {
            Some(slot) => store(slot, 0usize),
            None => _ = libc::pthread_setspecific(key, std::ptr::null()),
        });
        let Some(places) = l.keys else { return };
        for b in 1..KEYS_SIDE {
            let at = raw::at(tp, places.first) + KEYS_SIDE * 16 + b * 8;
            libc::free(load::<*mut c_void>(at));
            store(at, 0usize);
        }
        store(raw::at(tp, places.used), 0u8);
    }
}
