//! Starts the threads of the runtime, by `pthread_create`.
//!
//! Invariants:
//! 1. Everything that can fail fails before the thread exists.
//! 2. A new thread neither allocates nor frees before its body has returned: the allocator's lock
//!    may be held by a preempted goroutine, and this thread may be the one that has to resume it.
//!
//! Rejected: `std::thread`. A std thread maps an alternate signal stack when it starts, and aborts
//! the process if there is no address space for it.

use super::mm::PAGE;
use super::objects;
use std::alloc::{Layout, dealloc};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fmt::{self, Write};
use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A thread's name, as the kernel stores it: 15 bytes and a zero.
#[derive(Clone, Copy)]
pub struct Name {
    bytes: [u8; 16],
    len: usize,
}

impl Name {
    /// Formats a name; what is beyond 15 bytes is cut off.
    pub fn new(text: fmt::Arguments<'_>) -> Name {
        let mut name = Name { bytes: [0; 16], len: 0 };
        let _ = name.write_fmt(text);
        name
    }
}

impl Write for Name {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - 1 - self.len;
        let n = text.len().min(room);
        self.bytes[self.len..self.len + n].copy_from_slice(&text.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}

/// The argument of a new thread, which owns the memory.
struct Start<F> {
    name: Name,
    body: F,
}

/// Returns the bytes of thread-local storage that glibc takes from a thread's stack, beyond what
/// every program has. Computed once: what is loaded later has no fixed place there, or one in
/// glibc's small reserve.
fn static_tls_bytes() -> usize {
    static BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);
    let known = BYTES.load(Ordering::Relaxed);
    if known != usize::MAX {
        return known;
    }
    let mut bytes = 0;
    objects::for_each(|_, headers| {
        for tls in headers.iter().filter(|h| h.p_type == libc::PT_TLS) {
            bytes += (tls.p_memsz + tls.p_align) as usize;
        }
    });
    let bytes = bytes.next_multiple_of(PAGE);
    BYTES.store(bytes, Ordering::Relaxed);
    bytes
}

thread_local! {
    static STARTS_OS_THREADS: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the caller is inside [`with_os_threads`].
#[cfg(feature = "std")]
#[inline]
pub fn starts_os_threads() -> bool {
    STARTS_OS_THREADS.get()
}

/// Calls `f`. The threads that it starts are OS threads, also in a simulation, where those of the
/// program are goroutines.
pub fn with_os_threads<T>(f: impl FnOnce() -> T) -> T {
    let before = STARTS_OS_THREADS.replace(true);
    let value = f();
    STARTS_OS_THREADS.set(before);
    value
}

/// Starts a thread of std for code of the runtime that may call the program and all of std. It is
/// an OS thread, also in a simulation. One function for all: each closure of its own would cost
/// 1,500 lines of LLVM IR.
pub fn spawn_std(
    name: &str,
    stack_bytes: Option<usize>,
    body: Box<dyn FnOnce() + Send>,
) -> io::Result<std::thread::JoinHandle<()>> {
    let mut thread = std::thread::Builder::new().name(name.into());
    if let Some(bytes) = stack_bytes {
        thread = thread.stack_size(bytes);
    }
    with_os_threads(|| thread.spawn(body))
}

/// A stack size that glibc accepts on every CPU, and that no other field of an attribute object
/// has.
const ACCEPTED_BYTES: usize = (1 << 20) + 0x12c0;

/// Initialises `attr` with the bounds of a stack. As with `pthread_getattr_np`, the caller must
/// destroy it. Returns an error number.
///
/// glibc refuses to describe a stack below its `PTHREAD_STACK_MIN`: 16 KiB on x86_64, but 128 KiB
/// on aarch64, where a goroutine may have less. Then `attr` gets a size that glibc accepts, and the
/// only word with that value is replaced.
///
/// # Safety
/// `attr` is writable.
pub unsafe fn describe_stack(attr: *mut libc::pthread_attr_t, low: usize, high: usize) -> c_int {
    const WORDS: usize = size_of::<libc::pthread_attr_t>() / size_of::<usize>();
    let size = high - low;
    // SAFETY: the caller's contract. glibc stores the bounds, and accesses nothing there.
    unsafe {
        let error = libc::pthread_attr_init(attr);
        if error != 0 {
            return error;
        }
        let error = libc::pthread_attr_setstack(attr, low as *mut c_void, size);
        if error != libc::EINVAL {
            return error;
        }
        let larger = high.wrapping_sub(ACCEPTED_BYTES) as *mut c_void;
        if libc::pthread_attr_setstack(attr, larger, ACCEPTED_BYTES) == 0 {
            let words = &mut *attr.cast::<[usize; WORDS]>();
            let mut same = words.iter_mut().filter(|word| **word == ACCEPTED_BYTES);
            if let (Some(word), None) = (same.next(), same.next()) {
                *word = size;
            }
            let (mut got_low, mut got_size) = (null_mut(), 0);
            libc::pthread_attr_getstack(attr, &raw mut got_low, &raw mut got_size);
            if (got_low.addr(), got_size) == (low, size) {
                return 0;
            }
        }
        libc::pthread_attr_destroy(attr);
        libc::EINVAL
    }
}

/// Starts a detached thread with `stack_bytes` of stack besides its thread-local storage, which
/// glibc takes from the stack too. A panic in `body` aborts the process.
pub fn spawn<F: FnOnce() + Send + 'static>(
    name: Name,
    stack_bytes: usize,
    body: F,
) -> io::Result<()> {
    let start = Box::into_raw(Box::new(Start { name, body }));
    let mut attr = MaybeUninit::uninit();
    let mut thread = MaybeUninit::uninit();
    // SAFETY: the attribute object is initialised and destroyed here; the thread owns `start`.
    let rc = unsafe {
        libc::pthread_attr_init(attr.as_mut_ptr());
        // glibc refuses less than the minimum: the thread would get the default of 8 MiB.
        let bytes = (stack_bytes + static_tls_bytes()).max(libc::PTHREAD_STACK_MIN);
        libc::pthread_attr_setstacksize(attr.as_mut_ptr(), bytes);
        libc::pthread_attr_setdetachstate(attr.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        let rc = with_os_threads(|| {
            libc::pthread_create(thread.as_mut_ptr(), attr.as_ptr(), run::<F>, start.cast())
        });
        libc::pthread_attr_destroy(attr.as_mut_ptr());
        rc
    };
    if rc == 0 {
        return Ok(());
    }
    // SAFETY: no thread was started, so `start` is still owned here.
    drop(unsafe { Box::from_raw(start) });
    Err(io::Error::from_raw_os_error(rc))
}

extern "C" fn run<F: FnOnce()>(start: *mut c_void) -> *mut c_void {
    let start = start.cast::<Start<F>>();
    // SAFETY: `spawn` passed ownership once: the value is moved out, and the memory is freed after
    // the body.
    unsafe {
        let Start { name, body } = start.read();
        libc::prctl(libc::PR_SET_NAME, name.bytes.as_ptr());
        body();
        dealloc(start.cast(), Layout::new::<Start<F>>());
    }
    null_mut()
}
