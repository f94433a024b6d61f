//! Threads of `std::thread` and of C that are goroutines. Each test announces its threads as
//! `tokio.rs` does.

use super::{DriverWatch, LINKED, announce_thread};
use crate::goroutine::id;
use crate::runtime::{num_goroutines, run};
use libc::pthread_t;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// The tests compare counts of the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    run(f)
}

/// Starts a thread of std's that is a goroutine.
fn spawn<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> thread::JoinHandle<T> {
    announce_thread("announced", &Arc::new(DriverWatch::default()));
    thread::Builder::new().name("of-std".into()).spawn(f).unwrap()
}

/// Starts a thread by `pthread_create`. Returns its id, or the error number.
fn create(
    attr: *const libc::pthread_attr_t,
    start: extern "C" fn(*mut c_void) -> *mut c_void,
    argument: *mut c_void,
) -> Result<pthread_t, c_int> {
    announce_thread("c-thread", &Arc::new(DriverWatch::default()));
    let mut thread = MaybeUninit::uninit();
    // SAFETY: a place for the id, attributes or null, and a function that takes the argument.
    match unsafe { libc::pthread_create(thread.as_mut_ptr(), attr, start, argument) } {
        // SAFETY: written by the successful call.
        0 => Ok(unsafe { thread.assume_init() }),
        error => Err(error),
    }
}

fn join(thread: pthread_t) -> Result<*mut c_void, c_int> {
    let mut value = null_mut();
    // SAFETY: the id of a thread that is not joined yet.
    match unsafe { libc::pthread_join(thread, &raw mut value) } {
        0 => Ok(value),
        error => Err(error),
    }
}

/// Adds one to the argument.
extern "C" fn add_one(argument: *mut c_void) -> *mut c_void {
    argument.wrapping_byte_add(1)
}

extern "C" fn wait_for_true(flag: *mut c_void) -> *mut c_void {
    // SAFETY: the tests pass a flag that outlives the thread.
    let flag = unsafe { &*flag.cast::<AtomicUsize>() };
    while flag.load(SeqCst) == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    null_mut()
}

#[test]
fn an_announced_thread_is_a_goroutine_and_returns_its_value() {
    alone(|| {
        let (before, own) = (num_goroutines(), id());
        let handle = spawn(|| (id(), thread::current().name().map(str::to_owned)));
        let (other, name) = handle.join().unwrap();
        assert!(other > own, "{other}");
        assert_eq!(name.as_deref(), Some("of-std"));
        assert_eq!(num_goroutines(), before);
    });
}

#[test]
fn a_thread_that_is_not_announced_is_an_os_thread() {
    alone(|| {
        assert_eq!(thread::spawn(id).join().unwrap(), 0);
        // The mark is taken by one call.
        assert_ne!(spawn(id).join().unwrap(), 0);
        assert_eq!(thread::spawn(id).join().unwrap(), 0);
        // A thread that is a goroutine does not hand it on.
        assert_eq!(spawn(|| thread::spawn(id).join().unwrap()).join().unwrap(), 0);
    });
    announce_thread("on a plain thread", &Arc::new(DriverWatch::default()));
    assert_eq!(thread::spawn(id).join().unwrap(), 0);
}

#[test]
fn thread_locals_are_dropped_before_join_returns() {
    struct Dropped(Arc<AtomicUsize>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            thread::sleep(Duration::from_millis(5));
            self.0.fetch_add(1, SeqCst);
        }
    }
    thread_local!(static LOCAL: Cell<Option<Dropped>> = const { Cell::new(None) });
    alone(|| {
        let drops = Arc::new(AtomicUsize::new(0));
        for n in 1..=20 {
            let of_thread = Dropped(drops.clone());
            spawn(move || LOCAL.set(Some(of_thread))).join().unwrap();
            assert_eq!(drops.load(SeqCst), n);
        }
        // Also if no thread joins: here the handle is alive, and nothing has claimed the thread.
        let of_thread = Dropped(drops.clone());
        let handle = spawn(move || LOCAL.set(Some(of_thread)));
        let limit = Instant::now() + Duration::from_secs(10);
        while drops.load(SeqCst) != 21 {
            assert!(Instant::now() < limit, "the destructor did not run");
            thread::sleep(Duration::from_millis(1));
        }
        handle.join().unwrap();
    });
}

#[test]
fn destructors_of_keys_run_at_the_end() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn destructor(value: *mut c_void) {
        RUNS.fetch_add(value as usize, SeqCst);
    }
    extern "C" fn set(key: *mut c_void) -> *mut c_void {
        // SAFETY: the key of the test.
        unsafe { libc::pthread_setspecific(key as u32, 5 as *const c_void) };
        null_mut()
    }
    alone(|| {
        let mut key = 0;
        // SAFETY: a place for the key; its destructor takes any value.
        assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, Some(destructor)) }, 0);
        let thread = create(null(), set, key as usize as *mut c_void).unwrap();
        join(thread).unwrap();
        assert_eq!(RUNS.load(SeqCst), 5);
        // SAFETY: no thread uses it any more.
        unsafe { libc::pthread_key_delete(key) };
    });
}

#[test]
fn a_panic_comes_out_of_join() {
    alone(|| {
        let payload = spawn(|| panic!("of the thread")).join().unwrap_err();
        assert_eq!(payload.downcast_ref(), Some(&"of the thread"));
    });
}

#[test]
fn park_and_unpark_work_between_threads_that_are_goroutines() {
    alone(|| {
        let parked = spawn(|| {
            for _ in 0..1000 {
                thread::park();
            }
        });
        while !parked.is_finished() {
            parked.thread().unpark();
            thread::yield_now();
        }
        parked.join().unwrap();
    });
}

#[test]
fn many_threads_start_and_end_and_leave_nothing() {
    alone(|| {
        let before = num_goroutines();
        for round in 0..20 {
            let handles: Vec<_> = (0..50).map(|n| spawn(move || n * round)).collect();
            for (n, handle) in handles.into_iter().enumerate() {
                if n % 3 != 0 {
                    assert_eq!(handle.join().unwrap(), n * round);
                } // The others are detached.
            }
        }
        let limit = Instant::now() + Duration::from_secs(10);
        while num_goroutines() != before || LINKED.load(SeqCst) != 0 {
            assert!(Instant::now() < limit, "{} goroutines are left", num_goroutines());
            thread::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn ids_differ_until_they_are_joined() {
    extern "C" fn own_id(_: *mut c_void) -> *mut c_void {
        // SAFETY: no arguments, no conditions.
        unsafe { libc::pthread_self() as *mut c_void }
    }
    alone(|| {
        let threads: Vec<_> =
            (0..40).map(|_| create(null(), own_id, null_mut()).unwrap()).collect();
        // All have ended, probably, and none is joined.
        thread::sleep(Duration::from_millis(20));
        let mut sorted = threads.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 40);
        for thread in threads {
            assert_eq!(join(thread).unwrap() as pthread_t, thread);
        }
    });
}

#[test]
fn a_plain_thread_joins_a_thread_that_is_a_goroutine() {
    alone(|| {
        let handle = spawn(|| {
            thread::sleep(Duration::from_millis(10));
            7
        });
        // An OS thread: it is not announced.
        assert_eq!(thread::spawn(|| handle.join().unwrap()).join().unwrap(), 7);
    });
}

#[test]
fn a_detached_thread_cannot_be_joined() {
    alone(|| {
        let flag = AtomicUsize::new(0);
        let argument = (&raw const flag).cast_mut().cast();
        let mut attr = MaybeUninit::uninit();
        // SAFETY: attributes of the test's own.
        let attr = unsafe {
            libc::pthread_attr_init(attr.as_mut_ptr());
            libc::pthread_attr_setdetachstate(attr.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
            attr.assume_init()
        };
        let detached = create(&raw const attr, wait_for_true, argument).unwrap();
        assert_eq!(join(detached), Err(libc::EINVAL));
        let later = create(null(), wait_for_true, argument).unwrap();
        // SAFETY: the ids of threads that run.
        unsafe {
            assert_eq!(libc::pthread_detach(later), 0);
            assert_eq!(libc::pthread_detach(later), libc::EINVAL);
        }
        assert_eq!(join(later), Err(libc::EINVAL));
        flag.store(1, SeqCst);
        while LINKED.load(SeqCst) != 0 {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn a_thread_cannot_join_itself() {
    extern "C" fn join_itself(_: *mut c_void) -> *mut c_void {
        // SAFETY: no arguments, no conditions.
        let error = join(unsafe { libc::pthread_self() }).unwrap_err();
        error as usize as *mut c_void
    }
    alone(|| {
        let thread = create(null(), join_itself, null_mut()).unwrap();
        assert_eq!(join(thread).unwrap() as usize, libc::EDEADLK as usize);
    });
}

/// Calls `f` with attributes that have this stack size.
fn with_stack_size<T>(bytes: usize, f: impl FnOnce(*const libc::pthread_attr_t) -> T) -> T {
    let mut attr = MaybeUninit::uninit();
    // SAFETY: attributes of the test's own.
    unsafe {
        libc::pthread_attr_init(attr.as_mut_ptr());
        libc::pthread_attr_setstacksize(attr.as_mut_ptr(), bytes);
        let result = f(attr.as_ptr());
        libc::pthread_attr_destroy(attr.as_mut_ptr());
        result
    }
}

#[test]
fn the_stack_has_the_size_in_the_attributes() {
    extern "C" fn own_stack(_: *mut c_void) -> *mut c_void {
        let mut attr = MaybeUninit::uninit();
        let (mut low, mut size) = (null_mut(), 0);
        // SAFETY: this thread asks about itself.
        unsafe {
            assert_eq!(libc::pthread_getattr_np(libc::pthread_self(), attr.as_mut_ptr()), 0);
            libc::pthread_attr_getstack(attr.as_ptr(), &raw mut low, &raw mut size);
            libc::pthread_attr_destroy(attr.as_mut_ptr());
        }
        size as *mut c_void
    }
    alone(|| {
        for bytes in [1 << 20, 4 << 20] {
            let size = with_stack_size(bytes, |attr| {
                join(create(attr, own_stack, null_mut()).unwrap()).unwrap() as usize
            });
            // Thread-local storage and guard pages are taken from it.
            assert!((bytes - (64 << 10)..=bytes).contains(&size), "{size} of {bytes}");
        }
    });
}

#[test]
fn a_stack_that_is_not_available_is_an_error() {
    alone(|| {
        let too_large = with_stack_size(4 << 30, |attr| create(attr, add_one, null_mut()));
        assert_eq!(too_large, Err(libc::EINVAL));
        let error = {
            announce_thread("too large", &Arc::new(DriverWatch::default()));
            thread::Builder::new().stack_size(4 << 30).spawn(|| ()).unwrap_err()
        };
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        // The next thread starts.
        assert_eq!(join(create(null(), add_one, 4 as *mut c_void).unwrap()).unwrap() as usize, 5);
    });
}

#[test]
fn a_stack_of_the_callers_makes_an_os_thread() {
    extern "C" fn goroutine_id(_: *mut c_void) -> *mut c_void {
        id() as usize as *mut c_void
    }
    alone(|| {
        let bytes = 1 << 20;
        let mut memory = vec![0u8; bytes + 64];
        let low = memory.as_mut_ptr().wrapping_add(memory.as_ptr().align_offset(64));
        let mut attr = MaybeUninit::uninit();
        // SAFETY: attributes of the test's own; the memory outlives the thread.
        let attr = unsafe {
            libc::pthread_attr_init(attr.as_mut_ptr());
            libc::pthread_attr_setstack(attr.as_mut_ptr(), low.cast(), bytes);
            attr.assume_init()
        };
        let thread = create(&raw const attr, goroutine_id, null_mut()).unwrap();
        assert_eq!(join(thread).unwrap() as usize, 0);
    });
}

#[test]
fn names_belong_to_the_thread_and_not_to_its_os_thread() {
    fn name(thread: pthread_t) -> String {
        let mut bytes = [0u8; 16];
        // SAFETY: room for a name, and the id of a thread that runs.
        let rc = unsafe { libc::pthread_getname_np(thread, bytes.as_mut_ptr().cast(), 16) };
        assert_eq!(rc, 0);
        bytes.iter().take_while(|&&b| b != 0).map(|&b| b as char).collect()
    }
    alone(|| {
        let flag = AtomicUsize::new(0);
        let thread = create(null(), wait_for_true, (&raw const flag).cast_mut().cast()).unwrap();
        assert_eq!(name(thread), "c-thread");
        // SAFETY: names that end with a zero, and the id of a thread that runs.
        unsafe {
            assert_eq!(libc::pthread_setname_np(thread, c"renamed".as_ptr()), 0);
            let long = c"sixteen letters!";
            assert_eq!(libc::pthread_setname_np(thread, long.as_ptr()), libc::ERANGE);
            let mut short = [0u8; 4];
            let rc = libc::pthread_getname_np(thread, short.as_mut_ptr().cast(), 4);
            assert_eq!(rc, libc::ERANGE);
        }
        assert_eq!(name(thread), "renamed");
        flag.store(1, SeqCst);
        join(thread).unwrap();
        // std names the thread on itself.
        // SAFETY: no arguments, no conditions.
        assert_eq!(spawn(|| name(unsafe { libc::pthread_self() })).join().unwrap(), "of-std");
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            let comm = std::fs::read_to_string(task.unwrap().path().join("comm"));
            assert!(!comm.unwrap_or_default().contains("of-std"));
        }
    });
}

#[test]
fn pthread_kill_finds_the_thread_and_signals_the_process() {
    static SIGNALS: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn on_signal(_: c_int) {
        SIGNALS.fetch_add(1, SeqCst);
    }
    alone(|| {
        let handler = on_signal as *const () as libc::sighandler_t;
        // SAFETY: a handler that adds to a counter, for a signal that nothing else uses.
        unsafe { libc::signal(libc::SIGUSR2, handler) };
        let flag = AtomicUsize::new(0);
        let thread = create(null(), wait_for_true, (&raw const flag).cast_mut().cast()).unwrap();
        // SAFETY: the id of a thread that runs.
        unsafe {
            assert_eq!(libc::pthread_kill(thread, 0), 0);
            assert_eq!(libc::pthread_kill(thread, 1000), libc::EINVAL);
            assert_eq!(libc::pthread_kill(thread, libc::SIGUSR2), 0);
            assert_eq!(libc::pthread_cancel(thread), libc::ENOSYS);
        }
        let limit = Instant::now() + Duration::from_secs(10);
        while SIGNALS.load(SeqCst) == 0 {
            assert!(Instant::now() < limit, "the handler did not run");
            thread::sleep(Duration::from_millis(1));
        }
        flag.store(1, SeqCst);
        join(thread).unwrap();
    });
}

#[test]
fn a_thread_may_be_joined_by_a_thread_that_it_has_told_its_id() {
    extern "C" fn tell_id(sender: *mut c_void) -> *mut c_void {
        // SAFETY: the test's sender, which outlives the thread.
        let sender = unsafe { &*sender.cast::<mpsc::Sender<pthread_t>>() };
        // SAFETY: no arguments, no conditions.
        sender.send(unsafe { libc::pthread_self() }).unwrap();
        9 as *mut c_void
    }
    alone(|| {
        for _ in 0..200 {
            let (sender, receiver) = mpsc::channel::<pthread_t>();
            let joiner =
                crate::goroutine::go(move || join(receiver.recv().unwrap()).unwrap() as usize);
            create(null(), tell_id, (&raw const sender).cast_mut().cast()).unwrap();
            assert_eq!(joiner.join().unwrap(), 9);
        }
    });
}
