//! `pthread_create` that starts a goroutine instead of an OS thread: in simulations, and for
//! tokio's worker threads (`tokio.rs`).
//!
//! In a simulation every thread is a goroutine, so the clock and the schedule are the test's there,
//! too. Elsewhere only a thread that was announced becomes one: [`announce_thread`] marks the
//! calling goroutine, and the goroutine's next `pthread_create` takes the mark. Every other call,
//! and every call on a plain thread, is libc's; on a goroutine it runs on the M's own context
//! (`os_threads.rs`). `std::thread` needs no changes: it sees a thread.
//!
//! | function | on such a thread |
//! |---|---|
//! | `pthread_create` | a goroutine with a stack of the size in the attributes; `EAGAIN` if there is no memory |
//! | `pthread_self` | the thread pointer of the goroutine, as for every goroutine |
//! | `pthread_join`, `pthread_detach` | as POSIX has it; `pthread_join` parks a goroutine |
//! | `pthread_setname_np`, `pthread_getname_np` | the name is stored here, and no OS thread is renamed |
//! | `pthread_kill` | the signal goes to the process: the goroutine may have no OS thread just now |
//! | `pthread_cancel` | `ENOSYS` |
//! | `pthread_exit`, `pthread_timedjoin_np` | libc's, which do not know such a thread: not supported |
//!
//! A thread that is left when its simulation ends never runs again. `pthread_join` on it returns
//! `ESRCH`, unless its start routine has returned.
//!
//! # The life of a thread
//! A thread's id is the address of its `struct pthread`. It must not be given to another thread
//! before the first one is joined or detached, so an ended goroutine keeps its stack until then:
//!
//! 1. The creator spawns the goroutine, which waits until the creator has linked the [`Thread`].
//! 2. The goroutine runs the start routine, then the destructors of its thread-locals.
//! 3. It waits for its *claim*: `pthread_join` or `pthread_detach`, which may have come before.
//! 4. It unlinks the `Thread` and ends. `pthread_join` waits for that by the goroutine's handle.
//!
//! # Invariants
//! 1. [`Guarded`] is read and written only under the lock of [`THREADS`].
//! 2. A linked `Thread` is alive: its goroutine owns it, and unlinks it before it drops it.
//! 3. Nothing is allocated or freed under the lock (`sys/lock.rs`, rule 2).
//!
//! A goroutine that has a name gets std's handle of a thread by `pthread_create`, too, without any
//! thread: `threads/std_name.rs`. Threads of simulations wait for a lock of std at their start and
//! end, which threads outside may hold: `threads/std_lock.rs`.
//!
//! Rejected: every `pthread_create` on tokio's goroutines starts a goroutine. A library that
//! tokio's tasks call may need the identity of an OS thread (affinity, a signal mask, `gettid`).

#[cfg(feature = "tokio")]
pub(super) mod driver_watch;
pub(super) mod std_lock;
pub(crate) mod std_name;
#[cfg(all(test, feature = "tokio"))]
mod tests;

use super::os_threads::join;
use super::park::may_park;
use super::symbol::NextSymbol;
use crate::join_handle::Join;
use crate::sched::calls::current_sched;
use crate::sched::goroutine::spawn::{SpawnOptions, spawn};
use crate::sched::own_context::on_thread;
use crate::sched::simulation;
use crate::sched::wait::{self, reason::WaitReason};
use crate::sys::clock::NEVER;
use crate::sys::fork::is_forked;
use crate::sys::lock::{self, Lock};
use crate::sys::thread::starts_os_threads;
#[cfg(feature = "tokio")]
pub(crate) use driver_watch::{DriverWatch, announce_thread};
use libc::{pthread_attr_t, pthread_t};
use std::cell::{Cell, UnsafeCell};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The stack of a thread that is created without attributes: std's default.
const DEFAULT_STACK_BYTES: usize = 2 << 20;
/// A guard and thread-local storage take about so much of a goroutine's memory, whose size is a
/// power of two. They count only beside a stack that is so small: a larger one would take twice the
/// memory.
const SLOT_OVERHEAD_BYTES: usize = 32 << 10;
const SMALL_STACK_BYTES: usize = 256 << 10;
/// The bytes of a thread's name, with the zero at its end.
const NAME_BYTES: usize = 16;

type StartRoutine = extern "C" fn(*mut c_void) -> *mut c_void;

/// A thread that is to be a goroutine.
struct NewThread {
    name: Box<str>,
    /// Of the tokio runtime that it is a thread of.
    #[cfg(feature = "tokio")]
    watch: Option<Arc<DriverWatch>>,
}

impl NewThread {
    /// Returns the thread that the caller is about to create, if it is to be a goroutine.
    fn for_caller() -> Option<NewThread> {
        #[cfg(feature = "tokio")]
        if let Some(announced) = driver_watch::take_announced() {
            return Some(announced);
        }
        let is_simulated = !starts_os_threads() && may_park() && simulation::simulates_threads();
        is_simulated.then(|| NewThread {
            name: "thread".into(),
            #[cfg(feature = "tokio")]
            watch: None,
        })
    }
}

/// Which call will end, or has ended, the thread's id.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    None,
    Join,
    Detach,
}

/// A thread that is a goroutine.
struct Thread {
    guarded: UnsafeCell<Guarded>,
    /// What the start routine has returned. Written before the goroutine's end, and read after it.
    value: Cell<*mut c_void>,
    #[cfg(feature = "tokio")]
    watch: Option<Arc<DriverWatch>>,
}

/// See invariant 1.
struct Guarded {
    /// The `pthread_t`; 0 until the thread is linked.
    id: pthread_t,
    claim: Claim,
    /// The start routine has returned.
    has_returned: bool,
    /// The goroutine, while it waits until it is linked, and later for its claim; 0 otherwise.
    sleeper: usize,
    /// The handle of the goroutine, until it is claimed.
    handle: Option<Join<()>>,
    name: [u8; NAME_BYTES],
    next: *const Thread,
}

// SAFETY: `guarded` is protected by the lock, and `value` by the goroutine's end.
unsafe impl Sync for Thread {}
// SAFETY: nothing in it is tied to an OS thread.
unsafe impl Send for Thread {}

/// Every thread that is a goroutine, newest first.
struct ThreadList {
    first: *const Thread,
}

// SAFETY: the pointers are used only under the lock (invariant 2).
unsafe impl Send for ThreadList {}

static THREADS: Lock<ThreadList> = Lock::new(ThreadList { first: null() });
/// How many threads are linked. Checked without the lock.
static LINKED: AtomicUsize = AtomicUsize::new(0);

impl Thread {
    /// Returns the guarded part. The list is proof of the lock.
    #[allow(clippy::mut_from_ref)]
    fn guarded<'a>(&'a self, _: &'a mut ThreadList) -> &'a mut Guarded {
        // SAFETY: invariant 1, and the borrow of the list excludes a second one.
        unsafe { &mut *self.guarded.get() }
    }
}

impl ThreadList {
    /// Returns the thread with this id.
    fn find(&mut self, id: pthread_t) -> Option<&'static Thread> {
        let mut next = self.first;
        // SAFETY: invariant 2. The reference is used only under the lock, or with a count of its
        // own.
        while let Some(thread) = unsafe { next.as_ref() } {
            let guarded = thread.guarded(self);
            if guarded.id == id {
                return Some(thread);
            }
            next = guarded.next;
        }
        None
    }

    fn link(&mut self, thread: &Arc<Thread>) {
        let first = self.first;
        thread.guarded(self).next = first;
        self.first = Arc::as_ptr(thread);
        LINKED.fetch_add(1, Ordering::Relaxed);
    }

    fn unlink(&mut self, thread: &Thread) {
        let after = thread.guarded(self).next;
        if std::ptr::eq(self.first, thread) {
            self.first = after;
        } else {
            let mut at = self.first;
            // SAFETY: invariant 2.
            while let Some(before) = unsafe { at.as_ref() } {
                let guarded = before.guarded(self);
                at = guarded.next;
                if std::ptr::eq(at, thread) {
                    guarded.next = after;
                    break;
                }
            }
        }
        LINKED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Calls `f` with the thread of this id, under the lock. Returns None if the id is that of an OS
/// thread, or of a goroutine that was not created as a thread.
fn with_thread<T>(
    id: pthread_t,
    f: impl FnOnce(&mut ThreadList, &'static Thread) -> T,
) -> Option<T> {
    // An id outside every stack slot is an OS thread's. This check avoids a search of the list,
    // which is long if simulations have left threads.
    if LINKED.load(Ordering::Relaxed) != 0 && crate::mem::slot_at(id as usize).is_none() {
        return None;
    }
    // A signal handler may have interrupted the owner of the lock.
    // In a child of fork the owner of the lock may not exist.
    if LINKED.load(Ordering::Relaxed) == 0 || lock::holds_runtime_lock() || is_forked() {
        return None;
    }
    let mut list = THREADS.lock();
    let thread = list.find(id)?;
    Some(f(&mut list, thread))
}

fn wake(sleeper: usize) {
    if sleeper != 0 {
        wait::inside(|here| wait::wake_here(here, sleeper));
    }
}

/// The goroutine of `thread` waits until `is_over` returns true; [`wake`] makes it check again.
fn wait_until(thread: &Thread, is_over: impl Fn(&Guarded) -> bool) {
    wait::holder::note_object(0, NEVER);
    wait::block(WaitReason::Join, |sleeper| {
        let mut list = THREADS.lock();
        let guarded = thread.guarded(&mut list);
        let waits = !is_over(guarded);
        guarded.sleeper = if waits { sleeper } else { 0 };
        waits
    });
}

/// The whole life of a thread, on its goroutine.
fn run_thread(thread: Arc<Thread>, start: StartRoutine, argument: *mut c_void) {
    wait_until(&thread, |guarded| guarded.id != 0);
    simulation::move_to_test_threads();
    #[cfg(feature = "tokio")]
    driver_watch::set_watch(thread.watch.as_ref());
    thread.value.set(start(argument));
    // SAFETY: the start routine has returned, and this function uses no thread-local with a
    // destructor. What the functions below might create is destroyed when the goroutine ends.
    unsafe { crate::mem::tls::run_destructors() };
    #[cfg(feature = "tokio")]
    driver_watch::set_watch(None);
    thread.guarded(&mut THREADS.lock()).has_returned = true;
    wait_until(&thread, |guarded| guarded.claim != Claim::None);
    THREADS.lock().unlink(&thread);
}

unsafe extern "C" {
    /// POSIX's function, which the crate `libc` does not have.
    fn pthread_attr_getdetachstate(attr: *const pthread_attr_t, state: *mut c_int) -> c_int;
}

/// The attributes that matter to a goroutine.
struct Attributes {
    stack_bytes: usize,
    detached: bool,
}

impl Attributes {
    /// Returns the memory of a goroutine with a stack of this size.
    fn slot_bytes(&self) -> usize {
        let is_small = self.stack_bytes < SMALL_STACK_BYTES;
        self.stack_bytes + if is_small { SLOT_OVERHEAD_BYTES } else { 0 }
    }

    /// Returns None if the caller has provided the stack: then an OS thread uses it.
    ///
    /// # Safety
    /// `attr` is null or initialised.
    unsafe fn read(attr: *const pthread_attr_t) -> Option<Attributes> {
        let mut found = Attributes { stack_bytes: DEFAULT_STACK_BYTES, detached: false };
        if attr.is_null() {
            return Some(found);
        }
        let (mut state, mut size, mut stack) = (0, 0, null_mut());
        // SAFETY: the caller's contract. Without a stack of the caller's, glibc returns the
        // address 0 minus the size.
        unsafe {
            pthread_attr_getdetachstate(attr, &raw mut state);
            libc::pthread_attr_getstacksize(attr, &raw mut found.stack_bytes);
            libc::pthread_attr_getstack(attr, &raw mut stack, &raw mut size);
        }
        found.detached = state == libc::PTHREAD_CREATE_DETACHED;
        let has_stack = !stack.is_null() && (stack as usize).wrapping_add(size) != 0;
        (!has_stack).then_some(found)
    }
}

/// Starts a thread as a goroutine and returns its id, or an error number.
fn create(
    new: NewThread,
    attributes: &Attributes,
    start: StartRoutine,
    argument: *mut c_void,
    created: *mut pthread_t,
) -> c_int {
    /// An argument that C code passes to its thread.
    struct Argument(*mut c_void);
    // SAFETY: `pthread_create` sends it to another thread by contract.
    unsafe impl Send for Argument {}
    impl Argument {
        fn into_inner(self) -> *mut c_void {
            self.0
        }
    }

    let claim = if attributes.detached { Claim::Detach } else { Claim::None };
    let guarded = Guarded {
        id: 0,
        claim,
        has_returned: false,
        sleeper: 0,
        handle: None,
        name: name_bytes(new.name.as_bytes()),
        next: null(),
    };
    let thread = Arc::new(Thread {
        guarded: UnsafeCell::new(guarded),
        value: Cell::new(null_mut()),
        #[cfg(feature = "tokio")]
        watch: new.watch,
    });
    let options = SpawnOptions {
        name: Some(new.name),
        stack_size: Some(attributes.slot_bytes()),
        ..SpawnOptions::plain()
    };
    let (of_goroutine, argument) = (thread.clone(), Argument(argument));
    let body = move || run_thread(of_goroutine, start, argument.into_inner());
    let Some(sched) = current_sched() else {
        unreachable!("only a thread that a goroutine starts becomes a goroutine")
    };
    // SAFETY: everything that the closure owns is Send and 'static.
    let g = match unsafe { spawn(sched, options, body) } {
        Ok(g) => g,
        Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => return libc::EINVAL,
        Err(_) => return libc::EAGAIN,
    };
    // SAFETY: just spawned with result type `()`, and this is its only handle.
    let mut handle = Some(unsafe { Join::new(g) });
    // A goroutine with a stack of its own size has its thread pointer from the start, and this one
    // keeps it, because it waits until it is linked.
    let id = crate::mem::tls::pthread_of(g.tp.get() as usize);
    #[cfg(feature = "tokio")]
    thread.watch.iter().for_each(|watch| watch.count_thread());
    // SAFETY: where the caller wants the id. POSIX lets the new thread run before it is there.
    unsafe { created.write(id) };
    let mut list = THREADS.lock();
    list.link(&thread);
    let guarded = thread.guarded(&mut list);
    guarded.id = id;
    if claim == Claim::None {
        guarded.handle = handle.take();
    }
    let sleeper = std::mem::take(&mut guarded.sleeper);
    drop(list);
    wake(sleeper);
    drop(handle);
    0
}

fn name_bytes(name: &[u8]) -> [u8; NAME_BYTES] {
    let mut bytes = [0; NAME_BYTES];
    let len = name.len().min(NAME_BYTES - 1);
    bytes[..len].copy_from_slice(&name[..len]);
    bytes
}

/// What a claim gives to its caller.
struct Claimed {
    handle: Join<()>,
    thread: Arc<Thread>,
    has_returned: bool,
}

/// Claims the thread. Returns None if it is not a goroutine; an error number if it is claimed
/// already, or if it would wait for itself.
fn claim(id: pthread_t, claim: Claim) -> Option<Result<Claimed, c_int>> {
    let claimed = with_thread(id, |list, thread| {
        let guarded = thread.guarded(list);
        // SAFETY: no arguments, no conditions.
        if claim == Claim::Join && id == unsafe { libc::pthread_self() } {
            return Err(libc::EDEADLK);
        }
        if guarded.claim != Claim::None {
            return Err(libc::EINVAL);
        }
        let handle = guarded.handle.take().ok_or(libc::EINVAL)?;
        guarded.claim = claim;
        let has_returned = guarded.has_returned;
        let sleeper = std::mem::take(&mut guarded.sleeper);
        // SAFETY: a linked thread is in an Arc and alive (invariant 2).
        let thread = unsafe {
            Arc::increment_strong_count(thread);
            Arc::from_raw(thread)
        };
        Ok((sleeper, Claimed { handle, thread, has_returned }))
    })?;
    Some(claimed.map(|(sleeper, claimed)| {
        wake(sleeper);
        claimed
    }))
}

/// POSIX's function. A weak symbol: an allocator that is linked to the program may define it, too,
/// as rpmalloc does. Then threads are OS threads also in simulations.
unsafe extern "C" fn pthread_create(
    thread: *mut pthread_t,
    attr: *const pthread_attr_t,
    start: StartRoutine,
    argument: *mut c_void,
) -> c_int {
    type Real = unsafe extern "C" fn(
        *mut pthread_t,
        *const pthread_attr_t,
        StartRoutine,
        *mut c_void,
    ) -> c_int;
    static NEXT: NextSymbol = NextSymbol::of_c_name("pthread_create\0");
    // SAFETY: the caller's arguments; and libc's function of that name and type.
    unsafe {
        if let Some(result) = std_name::create(thread, start, argument) {
            return result;
        }
        if let Some(new) = NewThread::for_caller()
            && let Some(attributes) = Attributes::read(attr)
            && may_park()
        {
            return create(new, &attributes, start, argument, thread);
        }
        on_thread(|| NEXT.function::<Real>()(thread, attr, start, argument))
    }
}

weak_symbols!(pthread_create);

/// Returns the address of the weak symbol, so that the linker keeps it.
pub(super) fn kept_symbol() -> *const () {
    libc::pthread_create as *const ()
}

interpose! {
    /// POSIX's function.
    fn pthread_join(thread: pthread_t, value: *mut *mut c_void) -> c_int;
    with real => match claim(thread, Claim::Join) {
        None => join(thread, value, real),
        Some(Err(error)) => error,
        Some(Ok(Claimed { handle, thread, has_returned })) => {
            if handle.never_ends() {
                std::mem::forget(handle);
                if !has_returned {
                    return libc::ESRCH;
                }
            } else {
                // The closure does not panic: a panic in a start routine ends the process.
                let _ = handle.join();
            }
            if !value.is_null() {
                value.write(thread.value.get());
            }
            0
        }
    }
}

interpose! {
    /// POSIX's function.
    fn pthread_detach(thread: pthread_t) -> c_int;
    with real => match claim(thread, Claim::Detach) {
        None if std_name::has_caught() => 0,
        None => on_thread(|| real(thread)),
        Some(Err(error)) => error,
        Some(Ok(_)) => 0,
    }
}

interpose! {
    /// glibc's function; `ERANGE` for a name of more than 15 bytes.
    fn pthread_setname_np(thread: pthread_t, name: *const c_char) -> c_int;
    with real => {
        if std_name::is_adopting() {
            return 0;
        }
        let bytes = CStr::from_ptr(name).to_bytes();
        let set = with_thread(thread, |list, thread| {
            if bytes.len() >= NAME_BYTES {
                return libc::ERANGE;
            }
            thread.guarded(list).name = name_bytes(bytes);
            0
        });
        set.unwrap_or_else(|| real(thread, name))
    }
}

interpose! {
    /// glibc's function; `ERANGE` if the name does not fit.
    fn pthread_getname_np(thread: pthread_t, name: *mut c_char, size: usize) -> c_int;
    with real => {
        let found = with_thread(thread, |list, thread| thread.guarded(list).name);
        match found {
            None => real(thread, name, size),
            Some(_) if size < NAME_BYTES => libc::ERANGE,
            Some(bytes) => {
                name.cast::<[u8; NAME_BYTES]>().write(bytes);
                0
            }
        }
    }
}

interpose! {
    /// POSIX's function.
    fn pthread_kill(thread: pthread_t, signal: c_int) -> c_int;
    with real => {
        let is_other = thread != libc::pthread_self() && with_thread(thread, |_, _| ()).is_some();
        if !is_other {
            return real(thread, signal);
        }
        // Signal 0 only checks that the thread exists.
        let args = [std::process::id() as usize, signal as usize];
        -crate::sys::raw::syscall(libc::SYS_kill, args) as c_int
    }
}

interpose! {
    /// POSIX's function. A goroutine cannot be cancelled.
    fn pthread_cancel(thread: pthread_t) -> c_int;
    with real => match with_thread(thread, |_, _| ()) {
        Some(()) => libc::ENOSYS,
        None => real(thread),
    }
}
