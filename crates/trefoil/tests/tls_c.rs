//! A goroutine owns its thread-local storage: what C code sees.
//!
//! errno, pthread keys, `pthread_self`, locale, recursive mutexes, and the calls that look at every
//! thread of the process: setuid, fork, dlopen. The rules that the numbers name are those that each cost
//! a crash before they were known: 10 fork, 11 setuid, 12 keys, 13 `pthread_getattr_np`, 14 dlopen.
//!
//! The libraries for dlopen are compiled here, with `cc`; without one those tests say so and pass.
//!
//! `TREFOIL_PROCS` wins over the number of Ps that a test names, so that the suite runs with any.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{CStr, CString, c_int, c_void};
use std::io::Write;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use trefoil::{JoinHandle, Runtime, go, yield_now};

/// Ps of a runtime here, if `TREFOIL_PROCS` does not say otherwise.
const PROCS: usize = 4;
/// A test that runs longer hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// Runs `f` as the main goroutine of a runtime of its own, under a watchdog.
fn on_goroutines<T: Send>(f: impl FnOnce() -> T + Send) -> T {
    let _watchdog = watchdog();
    let mut builder = Runtime::builder();
    if std::env::var_os("TREFOIL_PROCS").is_none() {
        builder = builder.procs(PROCS);
    }
    builder.build().unwrap().run(f)
}

/// Aborts the process if the result is not dropped in time. A plain thread: it must not depend on what
/// is tested.
fn watchdog() -> mpsc::Sender<()> {
    let name = thread::current().name().unwrap_or("?").to_owned();
    let (alive, gone) = mpsc::channel();
    thread::spawn(move || {
        if gone.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            let line = format!("\nwatchdog: {name} still runs after {LIMIT:?}: it hangs\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            std::process::abort();
        }
    });
    alive
}

/// Joins; a panic in the goroutine becomes one here.
fn joined<T>(handle: JoinHandle<T>) -> T {
    handle.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload))
}

/// Runs `f(0..n)` as goroutines of this runtime.
fn crowd<T: Send + 'static>(
    n: usize,
    f: impl Fn(usize) -> T + Send + Sync + 'static,
) -> Vec<JoinHandle<T>> {
    let f = Arc::new(f);
    (0..n)
        .map(|i| {
            let f = f.clone();
            go(move || f(i))
        })
        .collect()
}

fn yields(n: usize) {
    (0..n).for_each(|_| yield_now());
}

/// Goroutines that keep every P busy, allocate, and check a thread-local, until dropped.
struct Busy {
    stop: Arc<AtomicBool>,
    handles: Vec<JoinHandle<()>>,
}

impl Busy {
    fn start(n: usize) -> Busy {
        thread_local!(static MINE: Cell<usize> = const { Cell::new(0) });
        let stop = Arc::new(AtomicBool::new(false));
        let s = stop.clone();
        let handles = crowd(n, move |i| {
            MINE.set(i + 1);
            while !s.load(SeqCst) {
                let text = format!("{i} {}", "x".repeat(i * 10));
                yield_now();
                assert_eq!(MINE.get(), i + 1);
                assert_eq!(text.len(), i.to_string().len() + 1 + i * 10);
            }
        });
        Busy { stop, handles }
    }

    fn end(self) {
        self.stop.store(true, SeqCst);
        self.handles.into_iter().for_each(joined);
    }
}

// ---- errno and the like ------------------------------------------------------------------------

fn set_errno(value: c_int) {
    // SAFETY: the address of this thread's errno.
    unsafe { *libc::__errno_location() = value };
}

fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}

#[test]
fn errno_is_the_goroutines() {
    on_goroutines(|| {
        for _ in 0..3 {
            let handles = crowd(3000, |i| {
                let mine = i as c_int + 1;
                assert_eq!(errno(), 0, "a fresh goroutine");
                for k in 0..6 {
                    set_errno(mine + k);
                    yields(1 + i % 3);
                    assert_eq!(errno(), mine + k);
                    joined(go(|| set_errno(-1)));
                    assert_eq!(errno(), mine + k, "after a park");
                }
                // SAFETY: fails and changes nothing.
                assert_eq!(unsafe { libc::close(-1) }, -1);
                yield_now();
                assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
            });
            handles.into_iter().for_each(joined);
        }
    });
}

#[test]
fn pthread_self_is_the_goroutines() {
    on_goroutines(|| {
        let come = Arc::new(AtomicUsize::new(0));
        let handles = crowd(2000, move |_| {
            // SAFETY: no arguments, no conditions.
            let me = unsafe { libc::pthread_self() };
            come.fetch_add(1, SeqCst);
            // All of them alive at the same time.
            while come.load(SeqCst) < 2000 {
                yield_now();
                // SAFETY: as above.
                assert_eq!(unsafe { libc::pthread_self() }, me);
            }
            me
        });
        let all: HashSet<_> = handles.into_iter().map(joined).collect();
        assert_eq!(all.len(), 2000);
    });
}

unsafe extern "C" {
    fn uselocale(locale: libc::locale_t) -> libc::locale_t;
    fn __h_errno_location() -> *mut c_int;
}

#[test]
fn the_locale_is_the_goroutines() {
    /// `LC_GLOBAL_LOCALE`: what a new thread has.
    const GLOBAL: isize = -1;
    on_goroutines(|| {
        for _ in 0..20 {
            let handles = crowd(100, |i| {
                // SAFETY: asks; sets to a locale that is freed after the old one is back.
                unsafe {
                    assert_eq!(uselocale(null_mut()) as isize, GLOBAL, "a fresh goroutine");
                    let mine = libc::newlocale(libc::LC_ALL_MASK, c"C".as_ptr(), null_mut());
                    uselocale(mine);
                    yields(4);
                    assert_eq!(uselocale(null_mut()), mine);
                    assert_eq!(libc::toupper(c_int::from(b'q')), c_int::from(b'Q'));
                    // The others leave it to their heirs, who must not see it.
                    if i % 2 == 0 {
                        uselocale(GLOBAL as libc::locale_t);
                        libc::freelocale(mine);
                    }
                }
            });
            handles.into_iter().for_each(joined);
        }
    });
}

#[test]
fn dlerror_is_the_goroutines() {
    on_goroutines(|| {
        let fresh_ones_error = Arc::new(AtomicUsize::new(0));
        for _ in 0..20 {
            let errors = fresh_ones_error.clone();
            let handles = crowd(100, move |i| {
                // SAFETY: dlopen of a file that does not exist; dlerror's text is copied at once.
                unsafe {
                    if !libc::dlerror().is_null() {
                        errors.fetch_add(1, SeqCst);
                    }
                    let file = CString::new(format!("/no/such/lib{i}.so")).unwrap();
                    assert!(libc::dlopen(file.as_ptr(), libc::RTLD_NOW).is_null());
                    yields(4);
                    let error = CStr::from_ptr(libc::dlerror()).to_string_lossy().into_owned();
                    assert!(error.contains(&format!("/no/such/lib{i}.so:")), "{error}");
                    assert!(libc::dlopen(file.as_ptr(), libc::RTLD_NOW).is_null());
                }
            });
            handles.into_iter().for_each(joined);
        }
        let seen = fresh_ones_error.load(SeqCst);
        assert_eq!(seen, 0, "fresh goroutines that saw a dead one's dlerror");
    });
}

#[test]
fn h_errno_is_the_goroutines() {
    on_goroutines(|| {
        let fresh_ones_value = Arc::new(AtomicUsize::new(0));
        for _ in 0..20 {
            let values = fresh_ones_value.clone();
            let handles = crowd(100, move |i| {
                // SAFETY: the address of this thread's h_errno.
                let h_errno = unsafe { &mut *__h_errno_location() };
                values.fetch_add(usize::from(*h_errno != 0), SeqCst);
                *h_errno = i as c_int + 1;
                yields(4);
                assert_eq!(*h_errno, i as c_int + 1);
            });
            handles.into_iter().for_each(joined);
        }
        let seen = fresh_ones_value.load(SeqCst);
        assert_eq!(seen, 0, "fresh goroutines that saw a dead one's h_errno");
    });
}

#[test]
fn a_recursive_mutex_knows_its_owner() {
    struct Recursive(std::cell::UnsafeCell<libc::pthread_mutex_t>);
    // SAFETY: a pthread mutex is for sharing.
    unsafe impl Sync for Recursive {}
    // SAFETY: it is not moved while in use: it stays in its Arc.
    unsafe impl Send for Recursive {}

    on_goroutines(|| {
        let mutex = Arc::new(Recursive(libc::PTHREAD_MUTEX_INITIALIZER.into()));
        // SAFETY: the mutex is initialised before anybody sees it.
        unsafe {
            let mut attr = MaybeUninit::uninit();
            libc::pthread_mutexattr_init(attr.as_mut_ptr());
            libc::pthread_mutexattr_settype(attr.as_mut_ptr(), libc::PTHREAD_MUTEX_RECURSIVE);
            libc::pthread_mutex_init(mutex.0.get(), attr.as_ptr());
        }
        let inside = Arc::new(AtomicUsize::new(0));
        let handles = crowd(200, move |i| {
            for _ in 0..5 {
                // `trylock` does not block: waiting is not what is tested here.
                // SAFETY: an initialised mutex that the Arc keeps.
                while unsafe { libc::pthread_mutex_trylock(mutex.0.get()) } != 0 {
                    yield_now();
                }
                assert_eq!(inside.swap(i + 1, SeqCst), 0, "two owners");
                yields(2);
                // SAFETY: as above; taken twice and released twice by its owner.
                unsafe {
                    assert_eq!(libc::pthread_mutex_trylock(mutex.0.get()), 0, "not recursive");
                    yield_now();
                    assert_eq!(libc::pthread_mutex_unlock(mutex.0.get()), 0);
                    yield_now();
                    assert_eq!(inside.swap(0, SeqCst), i + 1);
                    assert_eq!(libc::pthread_mutex_unlock(mutex.0.get()), 0);
                }
                yield_now();
            }
        });
        handles.into_iter().for_each(joined);
    });
}

#[test]
fn a_raised_signal_comes_back_here() {
    static RAISED: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn note(_: c_int) {
        RAISED.fetch_add(1, SeqCst);
    }
    on_goroutines(|| {
        // SAFETY: the handler only counts.
        unsafe { libc::signal(libc::SIGUSR2, note as *const () as usize) };
        let handles = crowd(200, |_| {
            for _ in 0..3 {
                yield_now();
                // SAFETY: there is a handler; pthread_kill to oneself names a living "thread".
                unsafe {
                    assert_eq!(libc::raise(libc::SIGUSR2), 0);
                    assert_eq!(libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2), 0);
                }
            }
        });
        handles.into_iter().for_each(joined);
        assert_eq!(RAISED.load(SeqCst), 1200);
    });
}

// ---- pthread keys ------------------------------------------------------------------------------

/// What a key's destructor may need to know: values are pointers to these.
struct Value {
    owner: usize,
    rounds: u32,
    dropped: AtomicU32,
}

static AGAIN: AtomicU32 = AtomicU32::new(u32::MAX);
static MISMATCHES: AtomicUsize = AtomicUsize::new(0);

thread_local!(static KEY_OWNER: Cell<usize> = const { Cell::new(0) });

unsafe extern "C" fn count_drop(value: *mut c_void) {
    // SAFETY: values of this key are leaked `Value`s.
    let value = unsafe { &*value.cast::<Value>() };
    if KEY_OWNER.get() != value.owner {
        MISMATCHES.fetch_add(1, SeqCst);
    }
    yield_now();
    if value.dropped.fetch_add(1, SeqCst) + 1 < value.rounds {
        // Set anew: asks for another round.
        // SAFETY: a live key.
        unsafe { libc::pthread_setspecific(AGAIN.load(SeqCst), std::ptr::from_ref(value).cast()) };
    }
}

fn new_key(dtor: Option<unsafe extern "C" fn(*mut c_void)>) -> libc::pthread_key_t {
    let mut key = 0;
    // SAFETY: the destructor, if any, takes the values that we set.
    assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, dtor) }, 0);
    key
}

#[test]
fn key_values_and_destructors() {
    const N: usize = 1000;
    /// What POSIX grants: PTHREAD_DESTRUCTOR_ITERATIONS.
    const ROUNDS: u32 = 4;
    let values: Vec<&'static Value> = (0..N)
        .map(|i| {
            let rounds = [1, 2, ROUNDS, 100][i % 4];
            &*Box::leak(Box::new(Value { owner: i + 1, rounds, dropped: AtomicU32::new(0) }))
        })
        .collect();
    let all = values.clone();
    on_goroutines(move || {
        let key = new_key(Some(count_drop));
        AGAIN.store(key, SeqCst);
        let plain = new_key(None);
        let v = values.clone();
        let handles = crowd(N, move |i| {
            KEY_OWNER.set(i + 1);
            // SAFETY: live keys; the value lives for ever.
            unsafe {
                assert!(libc::pthread_getspecific(key).is_null());
                assert!(libc::pthread_getspecific(plain).is_null(), "on a recycled stack");
                libc::pthread_setspecific(key, std::ptr::from_ref(v[i]).cast());
                libc::pthread_setspecific(plain, (i + 1) as *const c_void);
                yields(3);
                assert_eq!(libc::pthread_getspecific(key), std::ptr::from_ref(v[i]) as *mut _);
                assert_eq!(libc::pthread_getspecific(plain) as usize, i + 1);
            }
        });
        for (i, handle) in handles.into_iter().enumerate() {
            joined(handle);
            let expected = values[i].rounds.min(ROUNDS);
            assert_eq!(values[i].dropped.load(SeqCst), expected, "goroutine {i} at join");
        }
        // Heirs of all those stacks.
        let handles = crowd(N, move |_| {
            // SAFETY: live keys.
            unsafe {
                assert!(libc::pthread_getspecific(key).is_null(), "given up, but still there");
                assert!(libc::pthread_getspecific(plain).is_null());
            }
        });
        handles.into_iter().for_each(joined);
        // SAFETY: nobody uses them any more.
        unsafe {
            libc::pthread_key_delete(key);
            libc::pthread_key_delete(plain);
        }
    });
    for (i, value) in all.iter().enumerate() {
        assert_eq!(value.dropped.load(SeqCst), value.rounds.min(ROUNDS), "goroutine {i}");
    }
    assert_eq!(MISMATCHES.load(SeqCst), 0);
}

#[test]
fn many_keys_and_keys_made_anew() {
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn ended(_: *mut c_void) {
        ENDED.fetch_add(1, SeqCst);
    }
    on_goroutines(|| {
        // Keys of 32 and more live in glibc's second level, which is allocated on demand.
        let keys: Vec<_> = (0..100).map(|_| new_key(Some(ended))).collect();
        let k = keys.clone();
        let handles = crowd(300, move |i| {
            for (n, &key) in k.iter().enumerate() {
                // SAFETY: a live key.
                unsafe {
                    assert!(libc::pthread_getspecific(key).is_null());
                    libc::pthread_setspecific(key, (i * 1000 + n + 1) as *const c_void);
                }
            }
            yields(2);
            for (n, &key) in k.iter().enumerate() {
                // SAFETY: a live key.
                let value = unsafe { libc::pthread_getspecific(key) };
                assert_eq!(value as usize, i * 1000 + n + 1);
            }
        });
        handles.into_iter().for_each(joined);
        assert_eq!(ENDED.load(SeqCst), 300 * 100);
        // A value of a deleted key is nobody's, also when the number is given out again.
        let holder_may_end = Arc::new(AtomicBool::new(false));
        let (first, may_end) = (keys[0], holder_may_end.clone());
        let set = Arc::new(AtomicBool::new(false));
        let s = set.clone();
        let holder = go(move || {
            // SAFETY: a live key; later one that may be dead, for which the answer is null.
            unsafe {
                libc::pthread_setspecific(first, 5 as *const c_void);
                s.store(true, SeqCst);
                while !may_end.load(SeqCst) {
                    yield_now();
                }
                assert!(libc::pthread_getspecific(first).is_null(), "a dead key's value");
            }
        });
        while !set.load(SeqCst) {
            yield_now();
        }
        // SAFETY: nobody sets it from here on.
        keys.iter().for_each(|&key| assert_eq!(unsafe { libc::pthread_key_delete(key) }, 0));
        let anew: Vec<_> = (0..100).map(|_| new_key(Some(ended))).collect();
        holder_may_end.store(true, SeqCst);
        joined(holder);
        assert_eq!(ENDED.load(SeqCst), 300 * 100, "a destructor for a dead key's value");
        // SAFETY: as above.
        anew.iter().for_each(|&key| assert_eq!(unsafe { libc::pthread_key_delete(key) }, 0));
    });
}

// ---- calls that look at every thread -----------------------------------------------------------

/// Glibc sends a signal to every thread and waits for all of them.
#[test]
fn setuid_and_setgid_return() {
    fn set_ids(i: usize) {
        // SAFETY: sets what is set already.
        let rc = unsafe {
            match i % 4 {
                0 => libc::setuid(libc::getuid()),
                1 => libc::setgid(libc::getgid()),
                2 => libc::seteuid(libc::geteuid()),
                _ => libc::setegid(libc::getegid()),
            }
        };
        assert_eq!(rc, 0);
    }
    on_goroutines(|| {
        let busy = Busy::start(16);
        // Off goroutines and on them, at the same time.
        let outside = thread::spawn(|| (0..100).for_each(set_ids));
        let inside = crowd(4, |i| {
            for k in 0..25 {
                set_ids(i + k);
                yields(2);
            }
        });
        inside.into_iter().for_each(joined);
        outside.join().unwrap();
        busy.end();
    });
}

/// The child of a fork on a goroutine is that goroutine alone.
#[test]
fn fork_on_a_goroutine() {
    thread_local!(static MINE: Cell<usize> = const { Cell::new(0) });
    on_goroutines(|| {
        let busy = Busy::start(8);
        let handles = crowd(24, |i| {
            MINE.set(i + 1);
            yields(i % 3);
            // SAFETY: the child calls malloc (glibc makes that work after a fork) and _exit.
            unsafe {
                let pid = libc::fork();
                assert!(pid >= 0);
                if pid == 0 {
                    let lists: Vec<Vec<usize>> = (0..200).map(|n| vec![n; n]).collect();
                    let sum: usize = lists.iter().flatten().sum();
                    set_errno(7);
                    let right = sum == 2_646_700 && MINE.get() == i + 1 && errno() == 7;
                    libc::_exit(if right { 0 } else { 1 });
                }
                let mut status = 0;
                while libc::waitpid(pid, &raw mut status, 0) < 0 && errno() == libc::EINTR {}
                assert!(libc::WIFEXITED(status), "the child died of {}", libc::WTERMSIG(status));
                assert_eq!(libc::WEXITSTATUS(status), 0);
            }
            assert_eq!(MINE.get(), i + 1);
        });
        handles.into_iter().for_each(joined);
        busy.end();
    });
}

/// Who asks for the end of the stack gets the goroutine's.
#[test]
fn stack_bounds_are_the_goroutines() {
    fn self_bounds() -> Result<(usize, usize), c_int> {
        let mut attr = MaybeUninit::uninit();
        let (mut low, mut size) = (null_mut(), 0);
        // SAFETY: getattr initialises `attr` if it answers 0, destroy ends it.
        unsafe {
            match libc::pthread_getattr_np(libc::pthread_self(), attr.as_mut_ptr()) {
                0 => {}
                error => return Err(error),
            }
            libc::pthread_attr_getstack(attr.as_ptr(), &raw mut low, &raw mut size);
            libc::pthread_attr_destroy(attr.as_mut_ptr());
        }
        Ok((low as usize, low as usize + size))
    }
    /// What a goroutine finds; judged by its parent, because a failed assertion would overflow the
    /// smallest stacks.
    struct Found {
        here: usize,
        bounds: Result<(usize, usize), c_int>,
        later: Result<(usize, usize), c_int>,
    }
    fn look() -> Found {
        let here = 0u8;
        let here = (&raw const here) as usize;
        let first = self_bounds();
        yield_now();
        if let Ok((low, _)) = first {
            // All of it is writable: the lowest byte is above the guard.
            // SAFETY: our own stack, far below anything alive.
            unsafe { (low as *mut u8).write_volatile(1) };
        }
        Found { here, bounds: first, later: self_bounds() }
    }
    fn check(found: Found, size: usize) -> (usize, usize) {
        let (low, high) =
            found.bounds.unwrap_or_else(|e| panic!("error {e} on a stack of {} KiB", size >> 10));
        assert!((low..high).contains(&found.here), "{:x} not in {low:x}..{high:x}", found.here);
        assert!(high - low <= size && high - low >= size / 2, "{} of {size}", high - low);
        assert_eq!(found.later, Ok((low, high)));
        (low, high)
    }
    on_goroutines(|| {
        let come = Arc::new(AtomicUsize::new(0));
        let handles = crowd(100, move |_| {
            let found = look();
            come.fetch_add(1, SeqCst);
            while come.load(SeqCst) < 100 {
                yield_now();
            }
            found
        });
        let mut all: Vec<_> = handles.into_iter().map(|h| check(joined(h), 256 << 10)).collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|w| w[0].1 <= w[1].0), "stacks overlap: {all:x?}");
        for size in [16 << 20, 1 << 20, 64 << 10] {
            let found = trefoil::Builder::new().stack_size(size).go(look).unwrap();
            check(joined(found), size);
        }
        check(look(), 8 << 20);
        let plain = thread::spawn(self_bounds).join().unwrap().unwrap();
        assert!(plain.1 - plain.0 >= 1 << 20, "a plain thread's own answer");
    });
}

// ---- C libraries -------------------------------------------------------------------------------

const SOURCE: &str = r#"
__thread int with_image __attribute__((tls_model(MODEL))) = 42;
__thread long zeroed[8] __attribute__((tls_model(MODEL)));
int value(void) { return with_image; }
void set(int v) { with_image = v; zeroed[7] = v; }
long zero(void) { return zeroed[0] + zeroed[7]; }
/* The C shape of two accesses around a park. */
int bump_twice(void (*park)(void)) { with_image++; park(); with_image++; return with_image; }
"#;

/// Compiles [`SOURCE`] for a TLS model. None, and a line, if there is no compiler.
fn library(dir: &Path, name: &str, model: &str) -> Option<CString> {
    let (source, out) = (dir.join(format!("{name}.c")), dir.join(format!("lib{name}.so")));
    std::fs::write(&source, SOURCE).unwrap();
    let cc = Command::new("cc")
        .args(["-O2", "-fPIC", "-shared", &format!("-DMODEL=\"{model}\""), "-o"])
        .args([&out, &source])
        .output();
    match cc {
        Err(e) => {
            println!("skipped: no C compiler ({e})");
            None
        }
        Ok(cc) => {
            assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
            Some(CString::new(out.to_str().unwrap()).unwrap())
        }
    }
}

/// A folder of its own that goes with the test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let dir = std::env::temp_dir().join(format!("trefoil-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Scratch(dir)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The functions of one loaded library.
#[derive(Clone, Copy)]
struct Lib {
    handle: usize,
    value: Value42,
    set: Set,
    zero: Zero,
    bump_twice: BumpTwice,
}

type Value42 = extern "C" fn() -> c_int;
type Set = extern "C" fn(c_int);
type Zero = extern "C" fn() -> libc::c_long;
type BumpTwice = extern "C" fn(extern "C" fn()) -> c_int;

impl Lib {
    fn open(file: &CStr) -> Lib {
        // SAFETY: our own library: no constructors, and the functions have these types.
        unsafe {
            let handle = libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            assert!(!handle.is_null(), "{:?}", CStr::from_ptr(libc::dlerror()));
            let symbol = |name: &CStr| {
                let at = libc::dlsym(handle, name.as_ptr());
                assert_ne!(at, null_mut());
                at
            };
            Lib {
                handle: handle as usize,
                value: std::mem::transmute::<*mut c_void, Value42>(symbol(c"value")),
                set: std::mem::transmute::<*mut c_void, Set>(symbol(c"set")),
                zero: std::mem::transmute::<*mut c_void, Zero>(symbol(c"zero")),
                bump_twice: std::mem::transmute::<*mut c_void, BumpTwice>(symbol(c"bump_twice")),
            }
        }
    }

    fn close(self) {
        // SAFETY: nobody calls into it any more.
        assert_eq!(unsafe { libc::dlclose(self.handle as *mut c_void) }, 0);
    }

    /// A goroutine that has not used the library finds initial values, and keeps its own.
    fn check(self, mine: c_int) {
        extern "C" fn park() {
            joined(go(|| yields(2)));
        }
        assert_eq!((self.value)(), 42, "the initial value");
        assert_eq!((self.zero)(), 0);
        assert_eq!((self.bump_twice)(park), 44);
        yield_now();
        (self.set)(mine);
        yields(3);
        assert_eq!((self.value)(), mine);
        assert_eq!((self.zero)(), mine.into());
    }
}

/// Goroutines that are alive when a library is loaded, and those that come later.
fn dlopen_with(model: &str, on_goroutine: bool) {
    const OLD: usize = 300;
    let scratch = Scratch::new(&format!("{model}-{on_goroutine}"));
    let Some(file) = library(&scratch.0, "one", model) else { return };
    on_goroutines(|| {
        // Loaded, unloaded and loaded again: the place in the static block is used anew.
        for round in 0..4 {
            let loaded = Arc::new(std::sync::OnceLock::<Lib>::new());
            let alive = Arc::new(AtomicUsize::new(0));
            let (l, a) = (loaded.clone(), alive.clone());
            let old = crowd(OLD, move |i| {
                a.fetch_add(1, SeqCst);
                let lib = loop {
                    match l.get() {
                        Some(lib) => break *lib,
                        None => yield_now(),
                    }
                };
                lib.check(i as c_int + 1000);
            });
            while alive.load(SeqCst) < OLD {
                yield_now();
            }
            let lib = if on_goroutine {
                let file = file.clone();
                joined(go(move || Lib::open(&file)))
            } else {
                thread::scope(|s| s.spawn(|| Lib::open(&file)).join().unwrap())
            };
            assert!(loaded.set(lib).is_ok());
            old.into_iter().for_each(joined);
            // On the stacks of those, and on new ones.
            let new = crowd(2 * OLD, move |i| lib.check(i as c_int + 5000));
            new.into_iter().for_each(joined);
            thread::spawn(move || lib.check(round)).join().unwrap();
            lib.close();
        }
    });
}

#[test]
fn dlopen_of_general_dynamic_tls() {
    dlopen_with("global-dynamic", true);
    dlopen_with("global-dynamic", false);
}

#[test]
fn dlopen_of_initial_exec_tls() {
    dlopen_with("initial-exec", true);
    dlopen_with("initial-exec", false);
}

/// glibc makes a DTV longer at about the fifteenth library with TLS: in every goroutine, when it first
/// touches a later one.
#[test]
fn dlopen_of_many_libraries() {
    let scratch = Scratch::new("many");
    let mut files = Vec::new();
    for i in 0..40 {
        match library(&scratch.0, &format!("n{i}"), "global-dynamic") {
            Some(file) => files.push(file),
            None => return,
        }
    }
    on_goroutines(|| {
        let ready = Arc::new(std::sync::OnceLock::<Vec<Lib>>::new());
        let r = ready.clone();
        let old = crowd(50, move |i| {
            let libs = loop {
                match r.get() {
                    Some(libs) => break libs.clone(),
                    None => yield_now(),
                }
            };
            // Some touch few of them.
            for (n, lib) in libs.iter().enumerate().skip(i % 30) {
                lib.check((100 * i + n) as c_int);
            }
        });
        let libs: Vec<Lib> = files.iter().map(|f| Lib::open(f)).collect();
        assert!(ready.set(libs.clone()).is_ok());
        old.into_iter().for_each(joined);
        let l = libs.clone();
        let new = crowd(100, move |i| l.iter().skip(i % 35).for_each(|lib| lib.check(i as c_int)));
        new.into_iter().for_each(joined);
        libs.into_iter().for_each(Lib::close);
        // And without them.
        crowd(100, |_| yields(2)).into_iter().for_each(joined);
    });
}

/// Several load and unload at once: who looks at the loader's list finds modules there that another is
/// just unmapping. That was read, and crashed in one of ten runs of the tests above at once.
///
/// No initial-exec ones: glibc leaks the place of those that are not closed in the reverse order.
#[test]
fn libraries_come_and_go_at_once() {
    let scratch = Scratch::new("traffic");
    let mut files = Vec::new();
    for i in 0..PROCS {
        match library(&scratch.0, &format!("t{i}"), "global-dynamic") {
            Some(file) => files.push(file),
            None => return,
        }
    }
    on_goroutines(|| {
        let handles = crowd(files.len(), move |i| {
            for round in 0..300 {
                let lib = Lib::open(&files[i]);
                joined(go(move || lib.check(round)));
                lib.close();
            }
        });
        handles.into_iter().for_each(joined);
    });
}

/// The whole suite once more with TLS blocks by `pthread_create`, as where the template is not trusted.
#[test]
fn all_of_it_on_the_fallback() {
    if std::env::var_os("TREFOIL_DEBUG").is_some() {
        println!("skipped: TREFOIL_DEBUG is set already");
        return;
    }
    let _watchdog = watchdog();
    let out = Command::new(std::env::current_exe().unwrap())
        .env("TREFOIL_DEBUG", "tls=pthread")
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}\n{}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
}

/// Values of C11's `tss_t` are destroyed at a goroutine's end, as those of pthread keys are.
#[test]
fn destructors_of_c11_keys_run_at_a_goroutines_end() {
    type Destructor = unsafe extern "C" fn(*mut c_void);
    unsafe extern "C" {
        fn tss_create(key: *mut u32, destructor: Option<Destructor>) -> c_int;
        fn tss_set(key: u32, value: *mut c_void) -> c_int;
        fn tss_get(key: u32) -> *mut c_void;
        fn tss_delete(key: u32);
    }
    static SUM: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn destroy(value: *mut c_void) {
        SUM.fetch_add(value as usize, SeqCst);
    }
    let mut key = 0;
    // SAFETY: a key of our own; its values are numbers.
    assert_eq!(unsafe { tss_create(&raw mut key, Some(destroy)) }, 0);
    trefoil::run(move || {
        for n in 1..=100 {
            // SAFETY: as above.
            let set = move || unsafe {
                assert!(tss_get(key).is_null(), "a value of another goroutine");
                assert_eq!(tss_set(key, n as *mut c_void), 0);
            };
            trefoil::go(set).join().unwrap();
        }
    });
    assert_eq!(SUM.load(SeqCst), 5050);
    // SAFETY: nobody uses it any more.
    unsafe { tss_delete(key) };
}
