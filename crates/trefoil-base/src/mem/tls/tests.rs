//! Every test runs its body on blocks made by each method: by the template and by `pthread_create`.

use super::selftest::on_block;
use super::*;
use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::Instant;

/// Serialises the tests: malloc's counters and the saved libc TLS belong to the process.
static SERIAL: Mutex<()> = Mutex::new(());

fn methods() -> Vec<&'static BlockLayout> {
    static OTHER: OnceLock<BlockLayout> = OnceLock::new();
    let first = init().expect("template");
    assert_eq!(first.fallback_reason, None);
    if crate::sys::test_child::is_emulated() {
        eprintln!("skipped: the pthread method, because qemu-user has no PR_GET_TID_ADDRESS");
        return vec![first];
    }
    vec![first, OTHER.get_or_init(|| pthread("a test").expect("pthread"))]
}

/// A goroutine's memory, with its block.
struct TestBlock {
    layout: &'static BlockLayout,
    block: TlsBlock,
    map: discover::Map,
}

const MEMORY_BYTES: usize = 256 << 10;

impl TestBlock {
    fn new(layout: &'static BlockLayout) -> Self {
        Self::with_bytes(layout, MEMORY_BYTES)
    }

    fn with_bytes(layout: &'static BlockLayout, bytes: usize) -> Self {
        static TID: AtomicU32 = AtomicU32::new(0x2000_0000);
        let map = discover::Map::new(bytes).expect("memory");
        let at = |a: usize| NonNull::new(a as *mut u8).expect("address");
        let tid = TID.fetch_add(1, Ordering::Relaxed);
        // SAFETY: a fresh mapping, kept by the block.
        let block = unsafe { layout.create(at(map.base), at(map.base + bytes), tid) };
        Self { layout, block: block.expect("create"), map }
    }

    fn tp(&self) -> usize {
        self.block.tp.as_ptr() as usize
    }

    fn run(&self, f: impl FnMut()) {
        // SAFETY: the block is complete and only this thread uses it.
        unsafe { on_block(&self.block, f) }
    }

    /// Runs `f` as a goroutine: destroys its locals afterwards, and recycles the block.
    fn goroutine(&self, mut f: impl FnMut()) {
        self.run(|| {
            f();
            // SAFETY: `f` has returned.
            unsafe { run_destructors() }
        });
        // SAFETY: no code runs on the block.
        unsafe { self.layout.recycle(self.tp()) };
    }
}

impl Drop for TestBlock {
    fn drop(&mut self) {
        let _ = &self.map;
        // SAFETY: no code runs on the block, which is unmapped after this.
        unsafe { self.layout.destroy(self.tp()) };
    }
}

/// Returns a number as a key's value.
fn ptr(n: usize) -> *const c_void {
    std::ptr::without_provenance(n)
}

/// Returns the bytes that are allocated by malloc, in all arenas.
fn allocated() -> usize {
    // SAFETY: statistics.
    unsafe { libc::mallinfo2().uordblks }
}

/// Runs `body` in a process of its own, in which no other test runs.
fn alone(test: &str, body: impl FnOnce()) {
    const CHILD: &str = "TREFOIL_TLS_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let path = module_path!().split_once("::").unwrap().1;
    let child = crate::sys::test_child::this_program()
        .args([&format!("{path}::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success(), "{text}");
    assert!(String::from_utf8_lossy(&child.stdout).contains("1 passed"), "{text}");
}

/// Asserts that `work` leaks less than `bytes`, in a process in which nothing else allocates.
fn assert_leaks_less_than(bytes: usize, work: impl FnOnce()) {
    let before = allocated();
    work();
    let leaked = allocated().saturating_sub(before);
    assert!(leaked < bytes, "{leaked} bytes");
}

#[test]
fn discovered_layout_has_the_known_shape() {
    let l = methods()[0];
    eprintln!("{l:#?}");
    let pthread_bytes = l.pthread.len();
    assert!((1600..4096).contains(&pthread_bytes) && pthread_bytes.is_multiple_of(16));
    assert!(l.above.is_multiple_of(16) && l.above_used.is_multiple_of(16));
    assert!(l.below_used <= l.below && l.below < 64 << 10);
    assert!(l.above_used <= l.above && l.above < 64 << 10);
    assert!(l.used_bytes() < l.above + l.below, "the reserve is omitted");
    assert_eq!((l.reserve, l.reserve_reason.as_deref()), (DlopenReserve::Omit, None));
    assert_eq!((l.below_tp(), l.above_tp()), (l.below_used, l.above_used));
    assert!(l.keys.is_some(), "places of pthread keys");
    assert_eq!(l.resets.words.len(), 4, "locale and three tables of ctype");
    assert!(!l.resets.halves.is_empty(), "cancellation");
}

#[test]
fn thread_locals_belong_to_the_block() {
    thread_local! {
        static PLAIN: Cell<u32> = const { Cell::new(5) };
        static LAZY: RefCell<Vec<u32>> = RefCell::new(vec![1]);
    }
    let _serial = SERIAL.lock();
    PLAIN.set(99);
    for l in methods() {
        let (a, b) = (TestBlock::new(l), TestBlock::new(l));
        for block in [&a, &b] {
            block.run(|| {
                assert_eq!(PLAIN.replace(6), 5);
                LAZY.with_borrow_mut(|v| v.push(block.tp() as u32));
                // SAFETY: fails with EBADF, which sets errno.
                unsafe { libc::close(-1) };
            });
        }
        for block in [&a, &b] {
            block.goroutine(|| {
                assert_eq!(PLAIN.get(), 6);
                LAZY.with_borrow(|v| assert_eq!(v[..], [1, block.tp() as u32]));
                assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
            });
            block.goroutine(|| {
                assert_eq!(PLAIN.get(), 5, "a clean image");
                LAZY.with_borrow(|v| assert_eq!(v[..], [1]));
                assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(0));
            });
        }
    }
    assert_eq!(PLAIN.get(), 99);
}

#[test]
fn destructors_run_once_and_may_set_new_values() {
    static DROPPED: AtomicUsize = AtomicUsize::new(0);
    static BY_KEY: AtomicUsize = AtomicUsize::new(0);
    static KEYS: Mutex<Vec<u32>> = Mutex::new(Vec::new());
    struct Noisy;
    impl Drop for Noisy {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
    }
    thread_local! {
        static NOISY: Noisy = const { Noisy };
        static LATE: Noisy = const { Noisy };
    }
    unsafe extern "C" fn by_key(value: *mut c_void) {
        BY_KEY.fetch_add(value as usize, Ordering::Relaxed);
        let _ = LATE.try_with(|_| {}); // a TLS destructor made by a key's destructor
        if value as usize > 1 {
            let key = KEYS.lock().unwrap()[0];
            // SAFETY: a live key.
            unsafe { libc::pthread_setspecific(key, ptr(value as usize - 1)) };
        }
    }
    let _serial = SERIAL.lock();
    {
        let mut keys = KEYS.lock().unwrap();
        // More than 32, so that the second level is used; every third one has no destructor.
        for i in 0..80 {
            let (mut key, dtor) = (0, (i % 3 != 1).then_some(by_key as KeyDtor));
            // SAFETY: keys of our own.
            assert_eq!(unsafe { libc::pthread_key_create(&mut key, dtor) }, 0);
            // As trefoil's own `pthread_key_create` does, which is not linked here.
            key_created(key, dtor);
            keys.push(key);
        }
    }
    let keys: Vec<u32> = KEYS.lock().unwrap().clone();
    for l in methods() {
        let block = TestBlock::new(l);
        for _ in 0..3 {
            DROPPED.store(0, Ordering::Relaxed);
            BY_KEY.store(0, Ordering::Relaxed);
            block.goroutine(|| {
                for k in &keys {
                    // SAFETY: live keys.
                    unsafe {
                        assert!(libc::pthread_getspecific(*k).is_null(), "a clean table");
                        assert_eq!(libc::pthread_setspecific(*k, ptr(1)), 0);
                    }
                }
                NOISY.with(|_| {});
            });
            assert_eq!(BY_KEY.load(Ordering::Relaxed), 53, "two of three keys");
            assert_eq!(DROPPED.load(Ordering::Relaxed), 2, "NOISY and LATE, once each");
            // 9 → 8 → 7 → 6: POSIX requires four rounds.
            BY_KEY.store(0, Ordering::Relaxed);
            block.goroutine(|| {
                // SAFETY: a live key.
                unsafe { libc::pthread_setspecific(keys[0], ptr(9)) };
            });
            assert_eq!(BY_KEY.load(Ordering::Relaxed), 9 + 8 + 7 + 6);
        }
    }
    for k in keys {
        key_deleted(k);
        // SAFETY: our own keys.
        assert_eq!(unsafe { libc::pthread_key_delete(k) }, 0);
    }
}

#[test]
fn recycle_resets_locale_and_cancellation_state() {
    let _serial = SERIAL.lock();
    unsafe extern "C" {
        fn pthread_setcancelstate(state: i32, old: *mut i32) -> i32;
    }
    for l in methods() {
        let block = TestBlock::new(l);
        let mut was = [std::ptr::null_mut(); 2];
        let mut states = [7; 2];
        for i in 0..2 {
            block.goroutine(|| {
                // SAFETY: a valid locale and a valid state.
                unsafe {
                    let c = libc::newlocale(libc::LC_ALL_MASK, c"C".as_ptr(), std::ptr::null_mut());
                    was[i] = libc::uselocale(c);
                    pthread_setcancelstate(1, &mut states[i]);
                }
            });
        }
        assert_eq!(was[0], was[1], "locale");
        assert_eq!(states, [0, 0], "cancellation state");
    }
}

#[test]
fn ten_thousand_blocks_leak_no_memory() {
    alone("ten_thousand_blocks_leak_no_memory", || {
        for l in methods() {
            let rounds = if l.method == Method::Template { 10_000 } else { 1_000 };
            let life = || {
                let block = TestBlock::new(l);
                block.goroutine(|| drop(std::hint::black_box(vec![1u8; 100])));
                block.goroutine(|| drop(std::hint::black_box(format!("{:?}", Some(1)))));
            };
            for _ in 0..10 {
                life();
            }
            assert_leaks_less_than(16 << 10, || (0..rounds).for_each(|_| life()));
        }
    });
}

#[test]
fn blocks_run_on_many_threads() {
    let _serial = SERIAL.lock();
    for l in methods() {
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for i in 0..200 {
                        let block = TestBlock::new(l);
                        block.goroutine(|| {
                            let text: Vec<String> = (0..20).map(|n| format!("{n}{i}")).collect();
                            assert_eq!(text[19], format!("19{i}"));
                            let caught = std::panic::catch_unwind(|| {
                                std::panic::resume_unwind(Box::new(i));
                            });
                            assert!(caught.is_err());
                        });
                    }
                });
            }
        });
    }
}

/// If the node of a block in glibc's list of threads were wrong, every fork would crash.
#[test]
fn fork_works_on_a_block() {
    let _serial = SERIAL.lock();
    for l in methods() {
        let block = TestBlock::new(l);
        block.goroutine(|| {
            // SAFETY: the child only allocates and exits.
            unsafe {
                let child = libc::fork();
                if child == 0 {
                    let m = libc::malloc(100_000);
                    libc::free(m);
                    libc::_exit(if m.is_null() { 1 } else { 7 });
                }
                let mut status = 0;
                assert_eq!(libc::waitpid(child, &mut status, 0), child);
                assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7, "{status:#x}");
            }
        });
    }
}

#[test]
fn std_works_on_a_block() {
    let _serial = SERIAL.lock();
    for l in methods() {
        let block = TestBlock::new(l);
        block.goroutine(|| {
            let ids: Vec<_> =
                (0..3).map(|_| std::thread::spawn(|| std::thread::current().id())).collect();
            let ids: Vec<_> = ids.into_iter().map(|t| t.join().unwrap()).collect();
            assert!(ids[0] != ids[1] && ids.iter().all(|i| *i != std::thread::current().id()));
            let map: std::collections::HashMap<_, _> =
                (0..100).map(|i| (i, i.to_string())).collect();
            assert_eq!(map[&42], "42");
            // SAFETY: asks for the CPU; rseq is not registered here.
            assert!(unsafe { libc::sched_getcpu() } >= 0);
        });
    }
}

/// On aarch64 that is less than `PTHREAD_STACK_MIN`.
#[test]
fn the_smallest_stack_has_room_for_a_block_of_either_method() {
    let _serial = SERIAL.lock();
    for l in methods() {
        let block = TestBlock::with_bytes(l, 48 << 10);
        block.goroutine(|| assert_eq!("7".parse(), Ok(7)));
    }
}

#[test]
fn create_fails_if_the_memory_is_too_small() {
    let l = methods()[0];
    let map = discover::Map::new(4096).unwrap();
    let at = |a: usize| NonNull::new(a as *mut u8).unwrap();
    // SAFETY: refused before anything is written.
    let made = unsafe { l.create(at(map.base), at(map.base + 1024), 1) };
    assert_eq!(made.err().map(|e| e.kind()), Some(io::ErrorKind::InvalidInput));
}

/// Prints timings and asserts nothing: `cargo test --release -- --nocapture print_timings`.
#[test]
fn print_timings() {
    let _serial = SERIAL.lock();
    let clock = |name: &str, n: u32, f: &mut dyn FnMut()| {
        let best = (0..20).map(|_| {
            let start = Instant::now();
            (0..n).for_each(|_| f());
            start.elapsed() / n
        });
        eprintln!("{name}: {:?}", best.min().unwrap());
    };
    clock("init by template", 1, &mut || drop(template(DlopenReserve::Omit).unwrap()));
    if methods().len() > 1 {
        clock("init by pthread", 1, &mut || drop(pthread("a test").unwrap()));
    }
    for l in methods() {
        let n = if l.method == Method::Template { 1000 } else { 20 };
        let map = discover::Map::new(MEMORY_BYTES).unwrap();
        let at = |a: usize| NonNull::new(a as *mut u8).unwrap();
        // SAFETY: memory of our own; what create writes is zeroed again by the loop.
        unsafe {
            let make = || l.create(at(map.base), at(map.base + MEMORY_BYTES), 1).unwrap();
            let wipe = |b: &TlsBlock| {
                let from = (b.tp.as_ptr() as usize - l.below_tp()) as *mut u8;
                from.write_bytes(0, l.used_bytes());
            };
            // A block that is not destroyed would stay in glibc's list of threads (pthread method).
            let end = |b: &TlsBlock| {
                l.destroy(b.tp.as_ptr() as usize);
                wipe(b);
            };
            end(&make());
            clock(&format!("{}: create + destroy + wipe", l.method), n, &mut || end(&make()));
            let b = make();
            clock(&format!("{}: recycle", l.method), 1000, &mut || {
                l.recycle(b.tp.as_ptr() as usize)
            });
            on_block(&b, || {
                clock("run_destructors, nothing to do", 1000, &mut || run_destructors());
                // Printing has registered a destructor, which the next block would inherit.
                run_destructors();
            });
            end(&b);
            clock(&format!("{}: wipe", l.method), n, &mut || wipe(&b));
        }
    }
}

/// Builds a shared object from C; returns None if there is no C compiler.
fn library(name: &str, source: &str) -> Option<std::ffi::CString> {
    let dir = std::env::temp_dir().join(format!("trefoil-tls-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (c, so) = (dir.join(format!("{name}.c")), dir.join(format!("lib{name}.so")));
    std::fs::write(&c, source).unwrap();
    let built = std::process::Command::new(std::env::var("CC").as_deref().unwrap_or("cc"))
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&so, &c])
        .status();
    built
        .is_ok_and(|s| s.success())
        .then(|| std::ffi::CString::new(so.into_os_string().into_encoded_bytes()).unwrap())
}

/// Returns libc's own dlopen and dlclose. The interposed functions would update the runtime's
/// blocks; the blocks of these tests are not among them.
fn loader() -> Loader {
    type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
    type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
    // SAFETY: libc's functions of these names have these types.
    unsafe {
        let open = libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr());
        let close = libc::dlsym(libc::RTLD_NEXT, c"dlclose".as_ptr());
        assert!(!open.is_null() && !close.is_null());
        Loader {
            open: std::mem::transmute::<*mut c_void, Open>(open),
            close: std::mem::transmute::<*mut c_void, Close>(close),
        }
    }
}

/// A library of the test, loaded by [`loader`].
struct Library {
    handle: *mut c_void,
    get: extern "C" fn() -> i32,
    set: extern "C" fn(i32),
}

impl Library {
    fn open(path: &std::ffi::CStr) -> Self {
        type Get = extern "C" fn() -> i32;
        type Set = extern "C" fn(i32);
        // SAFETY: the library is made by the test and exports these two functions.
        unsafe {
            let handle = (loader().open)(path.as_ptr(), libc::RTLD_NOW);
            assert!(!handle.is_null());
            let (get, set) =
                (libc::dlsym(handle, c"get".as_ptr()), libc::dlsym(handle, c"set".as_ptr()));
            Self {
                handle,
                get: std::mem::transmute::<*mut c_void, Get>(get),
                set: std::mem::transmute::<*mut c_void, Set>(set),
            }
        }
    }

    fn close(self) {
        // SAFETY: a handle of `open`; the functions are not called any more.
        assert_eq!(unsafe { (loader().close)(self.handle) }, 0);
    }
}

const FUNCTIONS: &str =
    "int get(void) { return v + pad[50]; } void set(int n) { v = n; pad[50] = 0; }";

/// Existing, recycled and new blocks get the image. In a child process, whose blocks keep glibc's
/// reserve.
#[test]
fn dlopen_of_initial_exec_tls_updates_every_block() {
    alone("dlopen_of_initial_exec_tls_updates_every_block", update_every_block);
}

fn update_every_block() {
    keep_reserve();
    let source = format!(
        "#define IE __attribute__((tls_model(\"initial-exec\")))\n\
         IE __thread int v = 42; IE __thread int byctor = 1; IE __thread char pad[100];\n\
         __attribute__((constructor)) static void c(void) {{ byctor = 9; }}\n\
         int by(void) {{ return byctor; }} {FUNCTIONS}"
    );
    let _serial = SERIAL.lock();
    let Some(path) = library("ie", &source) else { return eprintln!("no C compiler") };
    for l in methods() {
        let (a, b) = (TestBlock::new(l), TestBlock::new(l));
        let known = modules::table().modules.len();
        for _ in 0..2 {
            let mut lib = None;
            let changed = || {
                modules_changed(Some(loader()), |visit| {
                    // `modules_changed` checks the method of the process; glibc updates the blocks
                    // of the pthread method.
                    if l.method == Method::Template {
                        [&a, &b].iter().for_each(|r| visit(r.block.tp));
                    }
                });
            };
            a.run(|| {
                lib = Some(Library::open(&path));
                changed();
            });
            let lib = lib.unwrap();
            // SAFETY: exported above.
            let by: extern "C" fn() -> i32 =
                unsafe { std::mem::transmute(libc::dlsym(lib.handle, c"by".as_ptr())) };
            assert_eq!((lib.get)(), 42);
            let c = TestBlock::new(l);
            a.run(|| assert_eq!(by(), 9, "the constructor's value stays"));
            b.run(|| assert_eq!(by(), 1));
            for block in [&a, &b, &c] {
                block.goroutine(|| {
                    assert_eq!((lib.get)(), 42);
                    (lib.set)(7);
                    assert_eq!((lib.get)(), 7);
                });
                block.goroutine(|| assert_eq!((lib.get)(), 42, "recycled"));
            }
            lib.close();
            changed();
            assert_eq!(modules::table().modules.len(), known);
        }
    }
}

/// General-dynamic TLS is allocated at first use, and freed at the goroutine's end.
#[test]
fn dynamic_tls_is_freed_at_the_end_of_a_goroutine() {
    alone("dynamic_tls_is_freed_at_the_end_of_a_goroutine", use_dynamic_tls);
}

fn use_dynamic_tls() {
    let source = format!("__thread int v = 17; __thread char pad[10000]; {FUNCTIONS}");
    let Some(path) = library("gd", &source) else { return eprintln!("no C compiler") };
    for l in methods() {
        let block = TestBlock::new(l);
        let lib = Library::open(&path);
        let life = || {
            block.goroutine(|| {
                assert_eq!((lib.get)(), 17);
                (lib.set)(3);
                assert_eq!((lib.get)(), 3);
            });
        };
        life();
        assert_leaks_less_than(20_000, || (0..1000).for_each(|_| life()));
        // More modules than glibc left room for in the DTV: it reallocates the DTV.
        let path = path.to_str().unwrap();
        let copies: Vec<_> = (0..20)
            .map(|i| {
                let copy = format!("{path}.{i}");
                std::fs::copy(path, &copy).unwrap();
                Library::open(&std::ffi::CString::new(copy).unwrap())
            })
            .collect();
        let lives_with_copies = || {
            let block = TestBlock::new(l);
            for _ in 0..3 {
                block.goroutine(|| {
                    for lib in &copies {
                        assert_eq!((lib.get)(), 17);
                        (lib.set)(3);
                        assert_eq!((lib.get)(), 3);
                    }
                });
            }
        };
        assert_leaks_less_than(20_000, || (0..100).for_each(|_| lives_with_copies()));
        copies.into_iter().for_each(Library::close);
        life();
        lib.close();
    }
}
