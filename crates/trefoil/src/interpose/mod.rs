//! Functions of libc that are interposed: the linker finds a symbol that is defined here before
//! libc's own.
//!
//! | file | what |
//! |---|---|
//! | `symbol.rs` | how an interposed function is defined: `interpose!` |
//! | `park.rs`, `waking.rs` | whether the caller may park; how it wakes goroutines |
//! | `futex.rs`, `c_locks/` | locks of Rust code; locks of C and C++ code |
//! | `io/`, `polls.rs`, `fds.rs` | calls on one descriptor; on several; a table of descriptors |
//! | `clock.rs` | clocks, which a simulation replaces |
//! | `children.rs` | calls that start a child process |
//! | `sleep.rs`, `blocking_calls.rs` | sleep and yield; calls that can only block their thread |
//! | `malloc/`, `random.rs` | functions with caches per thread |
//! | `keys.rs`, `dlopen.rs`, `setxid.rs` | functions that know a thread by its TLS |
//! | `attr.rs`, `signals.rs` | functions that know a thread by its id or stack |
//! | `threads.rs` | threads that are goroutines: in simulations, and those of tokio; names of goroutines as std knows them |
//! | `os_threads.rs` | starting and releasing other threads |
//!
//! Rules for every interposed function:
//! 1. On a plain thread, before the runtime starts and before `main`, a call only calls the real
//!    function and leaves errno as that left it.
//! 2. The real function is the next definition after ours, looked up once.
//! 3. "On a goroutine" is decided by the goroutine's own TLS variable, never by the GS base alone:
//!    a `std::thread` that a goroutine started inherits the GS base.
//!
//! The linker takes an object of an rlib only if one of its symbols is needed. rustc requires every
//! `no_mangle` function when it links a program, so the interposed functions are always linked;
//! `install` names them for other linkers too.

#[macro_use]
mod symbol;

mod attr;
#[cfg(feature = "std")]
mod blocking_calls;
#[cfg(feature = "std")]
pub(crate) mod c_locks;
#[cfg(feature = "std")]
mod children;
#[cfg(feature = "std")]
mod clock;
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
mod os_threads;
mod park;
#[cfg(feature = "std")]
mod polls;
#[cfg(feature = "std")]
mod random;
pub(crate) mod setxid;
pub(crate) mod signals;
#[cfg(feature = "std")]
mod sleep;
#[cfg(feature = "std")]
pub(crate) mod threads;
#[cfg(feature = "std")]
mod waking;

use crate::sched::Rt;
#[cfg(feature = "std")]
use crate::simnet;
use crate::sys::{fork, outputs, raw};
use std::io::Write;

#[cfg(feature = "std")]
use futex::with_priority;

/// On a plain thread: calls `f` while this thread holds std's lock of standard output (`which` is
/// 0) or of standard error (1).
pub(crate) fn with_output(which: usize, f: &mut dyn FnMut()) {
    if which == 0 {
        let mut out = with_priority(which, || std::io::stdout().lock());
        // The process may exit while this thread holds the lock. std would then not write the rest
        // of the buffer.
        let _ = out.flush();
        f();
    } else {
        let _err = with_priority(which, || std::io::stderr().lock());
        f();
    }
}

/// Wakes a thread and a goroutine that wait for each of std's outputs. Superfluous wake-ups do no
/// harm: std looks at its mutex again. Inside the runtime; `here` is None without a P.
///
/// For a goroutine that is stopped for ever: it may have unlocked an output, and not have woken the
/// next one yet.
pub(crate) fn wake_for_outputs(here: Option<Rt>) {
    for mutex in outputs::mutexes() {
        let word = std::ptr::from_ref(mutex) as usize;
        let op = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;
        // SAFETY: the kernel only looks for threads that wait at this address.
        unsafe { raw::syscall(libc::SYS_futex, [word, op, 1]) };
        #[cfg(feature = "std")]
        futex::wake_goroutine_at(here, mutex);
        #[cfg(not(feature = "std"))]
        let _ = here;
    }
}

/// While one exists, each wake of a lock of std or of C code enters the runtime, as if a goroutine
/// slept: in a simulation it is a call at which the goroutine may be preempted. Whether goroutines
/// of other runtimes sleep must not decide that.
pub(crate) struct EnterAtWakes(());

impl EnterAtWakes {
    pub(crate) fn new() -> EnterAtWakes {
        #[cfg(feature = "std")]
        {
            futex::add_sleeper();
            c_locks::add_sleepers();
        }
        EnterAtWakes(())
    }
}

impl Drop for EnterAtWakes {
    fn drop(&mut self) {
        #[cfg(feature = "std")]
        {
            futex::remove_sleeper();
            c_locks::remove_sleepers();
        }
    }
}

/// Calls `f`. Without the interposed functions every waiter sleeps in the kernel, and none of them
/// can be given priority.
#[cfg(not(feature = "std"))]
fn with_priority<T>(_: usize, f: impl FnOnce() -> T) -> T {
    f()
}

/// Tells std the name of the calling goroutine, which has not run its closure yet. Does nothing
/// without the interposed functions.
pub(crate) fn tell_std_name() {
    #[cfg(feature = "std")]
    threads::std_name::adopt();
}

/// Finds the lock of std's information about threads, for simulations that come later. Called after
/// the start of a runtime.
#[cfg(feature = "std")]
pub(crate) fn find_std_lock() {
    threads::std_lock::find();
}

/// Names the interposed functions, so that the linker keeps them, and prepares those that need it.
/// Called once, when the runtime starts.
pub(crate) fn install() {
    fork::watch();
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
    {
        fds::note_process();
        simnet::children::watch();
        malloc::init();
        c_locks::keep_symbols();
        std::hint::black_box([
            malloc::kept_symbol(),
            futex::syscall as *const (),
            clock::kept_symbol(),
            sleep::nanosleep as *const (),
            sleep::clock_nanosleep as *const (),
            io::read_write::read as *const (),
            io::sockets::recv as *const (),
            io::connect::connect as *const (),
            io::simulated::bind as *const (),
            io::descriptors::close as *const (),
            polls::poll as *const (),
            random::getrandom as *const (),
            blocking_calls::getaddrinfo as *const (),
            children::posix_spawn as *const (),
            children::posix_spawnp as *const (),
            threads::kept_symbol(),
            threads::pthread_join as *const (),
            threads::pthread_detach as *const (),
            os_threads::kept_symbol(),
        ]);
    }
}
