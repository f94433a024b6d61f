//! Doors of libc that we stand in: a symbol defined here is found before libc's own.
//!
//! Rules for every door:
//! 1. On a plain thread, before the runtime starts and before `main`, a call goes straight to the real
//!    function and leaves errno as that left it.
//! 2. The real function is the next definition after ours (`Next`), looked up once.
//! 3. "On a goroutine" is decided by the goroutine's own TLS variable, never by the GS base alone: a
//!    std::thread that a goroutine started inherits that.
//!
//! The linker takes an object of an rlib only if somebody asks for one of its symbols. rustc asks for
//! every `no_mangle` function when it links a program, so the doors are always there; `linked` says so
//! to other linkers too.

/// A door: on a plain thread the real function, on a goroutine `$body`, whose result is the kernel's.
#[cfg(feature = "std")]
macro_rules! door {
    ($(#[$doc:meta])* $static:ident = $name:ident($($arg:ident: $type:ty),*) -> $ret:ty, $body:expr) => {
        static $static: $crate::interpose::Next = {
            // SAFETY: a literal with its end.
            let name = unsafe {
                std::ffi::CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes())
            };
            $crate::interpose::Next::new(name)
        };

        $(#[$doc])*
        ///
        /// # Safety
        /// As its manual page says.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> $ret {
            if !$crate::interpose::on_goroutine() {
                type Real = unsafe extern "C" fn($($type),*) -> $ret;
                // SAFETY: libc's function of that name and type, with the caller's arguments.
                return unsafe { std::mem::transmute::<*mut std::ffi::c_void, Real>($static.get())($($arg),*) };
            }
            // SAFETY: the caller's arguments, by the rules of the call.
            $crate::sys::raw::to_libc(unsafe { $body }) as $ret
        }
    };
}

mod attr;
#[cfg(feature = "std")]
pub(crate) mod c_locks;
pub(crate) mod dlopen;
#[cfg(feature = "std")]
mod fds;
#[cfg(feature = "std")]
mod futex;
#[cfg(feature = "std")]
mod io;
mod keys;
#[cfg(feature = "std")]
mod malloc;
#[cfg(feature = "std")]
mod polls;
#[cfg(feature = "std")]
mod random;
#[cfg(feature = "std")]
mod regions;
pub(crate) mod setxid;
pub(crate) mod signals;
#[cfg(feature = "std")]
mod sleep;
#[cfg(feature = "std")]
mod waking;

use std::ffi::{CStr, c_void};
use std::io::Write;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The real function behind a door.
pub(crate) struct Next {
    name: &'static CStr,
    at: AtomicPtr<c_void>,
}

impl Next {
    pub(crate) const fn new(name: &'static CStr) -> Self {
        Self { name, at: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address. Two threads may look it up at the same time: both find the same.
    #[inline]
    pub(crate) fn get(&self) -> *mut c_void {
        // Relaxed: the address is all there is, nothing is read through it but code.
        let at = self.at.load(Ordering::Relaxed);
        if at.is_null() { self.get_slow() } else { at }
    }

    #[cold]
    fn get_slow(&self) -> *mut c_void {
        // SAFETY: a C string and a pseudo handle.
        let at = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if at.is_null() {
            eprintln!("fatal error: trefoil: libc has no {}", self.name.to_string_lossy());
            std::process::abort();
        }
        self.at.store(at, Ordering::Relaxed);
        at
    }
}

/// Set in a child of `fork`: it has one thread, and locks may be held by those it has not. Doors stay open.
#[cfg(feature = "std")]
static FORKED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

#[cfg(feature = "std")]
unsafe extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Whether a door has anything to do: on a goroutine, of this process.
#[cfg(feature = "std")]
#[inline(always)]
fn on_goroutine() -> bool {
    crate::sched::current_g().is_some() && !FORKED.load(Ordering::Relaxed)
}

/// Whether the goroutine may park here: not in a signal handler, which runs on the thread's alternate stack.
#[cfg(feature = "std")]
fn may_park() -> bool {
    on_goroutine() && on_own_stack()
}

/// A goroutine is about to park, or to yield; kept until it goes on.
#[cfg(feature = "std")]
struct Wait {
    _holder: Option<crate::sched::WaitingHolder>,
}

/// Begins a wait. None if the caller must wait in the kernel: it may not park, or would be left with a lock of the whole
/// process (`sched/stop.rs`).
#[cfg(feature = "std")]
fn begin_wait() -> Option<Wait> {
    begin_wait_as(crate::sched::holds_lock)
}

/// The same, where the caller knows whether it holds a lock.
#[cfg(feature = "std")]
fn begin_wait_as(holds_lock: impl FnOnce() -> bool) -> Option<Wait> {
    if !may_park() {
        return None;
    }
    let holder = if holds_lock() { Some(crate::sched::WaitingHolder::new()?) } else { None };
    Some(Wait { _holder: holder })
}

/// On a goroutine: whether this code runs on its stack. Returns false in a signal handler, which runs on the thread's
/// alternate stack.
fn on_own_stack() -> bool {
    let here = 0u8;
    let tp = crate::arch::thread_pointer() as usize;
    crate::mem::slot_at(&raw const here as usize)
        .is_some_and(|slot| (slot.low..slot.high).contains(&tp))
}

/// On a plain thread: calls `f` while nobody else has std's standard output (0), or error (1).
pub(crate) fn with_output(which: usize, f: &mut dyn FnMut()) {
    if which == 0 {
        let mut out = hurried(which, || std::io::stdout().lock());
        // The process may end while we hold it: std would not write what is left in it.
        let _ = out.flush();
        f();
    } else {
        let _err = hurried(which, || std::io::stderr().lock());
        f();
    }
}

#[cfg(feature = "std")]
use futex::hurried;

/// Without our doors everybody waits in the kernel, and nobody can be preferred.
#[cfg(not(feature = "std"))]
fn hurried<T>(_: usize, f: impl FnOnce() -> T) -> T {
    f()
}

/// Names every door, so that none is left out of the program. Called once at the runtime's start.
pub(crate) fn linked() {
    std::hint::black_box([
        keys::pthread_key_create as *const (),
        keys::pthread_key_delete as *const (),
        keys::tss_create as *const (),
        keys::tss_delete as *const (),
        attr::pthread_getattr_np as *const (),
        attr::pthread_getaffinity_np as *const (),
        dlopen::dlopen as *const (),
        dlopen::dlmopen as *const (),
        dlopen::dlclose as *const (),
        signals::sigaction as *const (),
        signals::signal as *const (),
        signals::sigaltstack as *const (),
    ]);
    #[cfg(feature = "std")]
    // SAFETY: a function that stores a flag.
    unsafe {
        libc::pthread_atfork(None, None, Some(forked));
    }
    #[cfg(feature = "std")]
    {
        fds::note_process();
        malloc::init();
        c_locks::linked();
    }
    #[cfg(feature = "std")]
    std::hint::black_box([
        malloc::linked(),
        futex::syscall as *const (),
        sleep::nanosleep as *const (),
        sleep::clock_nanosleep as *const (),
        io::recv as *const (),
        io::close as *const (),
        polls::poll as *const (),
        random::getrandom as *const (),
        regions::getaddrinfo as *const (),
    ]);
}
