//! Libraries with thread-local variables that are loaded while goroutines run.

use crate::common::crowd::{PROCS, crowd, joined, on_goroutines, yields};
use crate::common::{child_test, is_emulated, rounds, skip_if_emulated};
use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use trefoil::{go, yield_now};

const SOURCE: &str = r#"
__thread int with_image __attribute__((tls_model(MODEL))) = 42;
__thread long zeroed[8] __attribute__((tls_model(MODEL)));
int value(void) { return with_image; }
void set(int v) { with_image = v; zeroed[7] = v; }
long zero(void) { return zeroed[0] + zeroed[7]; }
/* The C shape of two accesses around a park. */
int bump_twice(void (*park)(void)) { with_image++; park(); with_image++; return with_image; }
"#;

/// Compiles [`SOURCE`] for a TLS model. Prints a line and returns `None` without a compiler.
fn library(dir: &Path, name: &str, model: &str) -> Option<CString> {
    compile(dir, name, SOURCE, &[&format!("-DMODEL=\"{model}\"")])
}

/// Compiles a library. Prints a line and returns `None` without a compiler.
fn compile(dir: &Path, name: &str, text: &str, options: &[&str]) -> Option<CString> {
    let (source, out) = (dir.join(format!("{name}.c")), dir.join(format!("lib{name}.so")));
    std::fs::write(&source, text).unwrap();
    let cc = Command::new(std::env::var("CC").as_deref().unwrap_or("cc"))
        .args(["-O2", "-fPIC", "-shared", "-o"])
        .args([&out, &source])
        .args(options)
        .output();
    match cc {
        Err(e) => {
            crate::common::mark(&format!("skipped: no C compiler ({e})"));
            None
        }
        Ok(cc) => {
            assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
            Some(CString::new(out.to_str().unwrap()).unwrap())
        }
    }
}

/// A temporary folder that is removed when it is dropped.
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
        // SAFETY: the library has no constructors, and the functions have these types.
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
        // SAFETY: the library is no longer called.
        assert_eq!(unsafe { libc::dlclose(self.handle as *mut c_void) }, 0);
    }

    /// Checks that a goroutine that has not used the library sees initial values and keeps its own.
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

/// Where a library is loaded.
#[derive(Debug, PartialEq)]
enum Loader {
    Goroutine,
    Thread,
}

/// Uses a library on goroutines that live when it is loaded and on later ones.
fn dlopen_with(model: &str, loader: &Loader) {
    const OLD: usize = 300;
    let scratch = Scratch::new(&format!("{model}-{loader:?}"));
    let Some(file) = library(&scratch.0, "one", model) else { return };
    on_goroutines(|| {
        // Loaded, unloaded and loaded again: the place in the static block is reused.
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
            let lib = if *loader == Loader::Goroutine {
                let file = file.clone();
                joined(go(move || Lib::open(&file)))
            } else {
                thread::scope(|s| s.spawn(|| Lib::open(&file)).join().unwrap())
            };
            assert!(loaded.set(lib).is_ok());
            old.into_iter().for_each(joined);
            // On the stacks of the old goroutines and on new stacks.
            let new = crowd(2 * OLD, move |i| lib.check(i as c_int + 5000));
            new.into_iter().for_each(joined);
            thread::spawn(move || lib.check(round)).join().unwrap();
            lib.close();
        }
    });
}

#[test]
fn libraries_with_general_dynamic_tls_load_beside_goroutines() {
    dlopen_with("global-dynamic", &Loader::Goroutine);
    dlopen_with("global-dynamic", &Loader::Thread);
}

#[test]
fn libraries_with_initial_exec_tls_load_beside_goroutines_with_the_reserve() {
    child_test!(|child| {
        child.env("TREFOIL_DLOPEN_RESERVE", "1").succeed();
        // qemu-user has no PR_GET_TID_ADDRESS, which the fallback needs.
        if !is_emulated() {
            child.tls_from_pthread_create().succeed();
        }
    });
    dlopen_with("initial-exec", &Loader::Goroutine);
    dlopen_with("initial-exec", &Loader::Thread);
}

/// Returns the loader's error for a library, or `None` if it loads.
fn refusal(file: &CStr) -> Option<String> {
    // SAFETY: a library without constructors; the error is read on the thread that made it.
    unsafe {
        if libc::dlopen(file.as_ptr(), libc::RTLD_NOW).is_null() {
            return Some(CStr::from_ptr(libc::dlerror()).to_string_lossy().into_owned());
        }
    }
    None
}

#[test]
fn libraries_with_initial_exec_tls_are_refused_without_the_reserve() {
    child_test!(|child| {
        let stderr = child.succeed();
        let lines = stderr.lines().filter(|l| l.contains("TREFOIL_DLOPEN_RESERVE=1")).count();
        assert_eq!(lines, 1, "one line, however often it fails: {stderr}");
    });
    let scratch = Scratch::new("refused");
    let Some(file) = library(&scratch.0, "refused", "initial-exec") else {
        // What the parent expects.
        return eprintln!("TREFOIL_DLOPEN_RESERVE=1");
    };
    on_goroutines(|| {
        let missing = refusal(c"/no/libTLS.so").expect("there is no such file");
        assert!(missing.contains("No such file"), "{missing}");
        for _ in 0..3 {
            let (on_goroutine, on_thread) =
                (refusal(&file), thread::scope(|s| s.spawn(|| refusal(&file)).join().unwrap()));
            for refused in [on_goroutine, on_thread] {
                let text = refused.expect("the library needs static TLS");
                assert!(text.contains("static TLS block"), "{text}");
            }
        }
    });
}

const DESCRIPTORS: &str = r#"
__thread char area[SIZE] = { 42 };
void *place(void) { return area; }
"#;

type Place = extern "C" fn() -> *mut u8;

/// The options by which a C compiler calls TLS descriptors, and `__tls_get_addr`.
const DIALECTS: [&str; 2] = if cfg!(target_arch = "x86_64") {
    ["-mtls-dialect=gnu2", "-mtls-dialect=gnu"]
} else {
    ["-mtls-dialect=desc", "-mtls-dialect=trad"]
};

/// Loads libraries of every TLS model and many sizes, whether they load or not, and checks that the
/// TLS of those that do lies outside of the goroutines' stacks and static blocks.
#[test]
fn no_stack_lies_over_the_tls_of_a_library() {
    child_test!();
    let scratch = Scratch::new("places");
    let mut files = Vec::new();
    let sizes = rounds(&[8, 200, 1500][..], &[1, 8, 64, 200, 512, 1500]);
    for size in sizes {
        for (kind, option) in [
            ("descriptor", DIALECTS[0]),
            ("dynamic", DIALECTS[1]),
            ("exec", "-ftls-model=initial-exec"),
        ] {
            let name = format!("{kind}{size}");
            let options = [&format!("-DSIZE={size}"), option];
            match compile(&scratch.0, &name, DESCRIPTORS, &options) {
                Some(file) => files.push(file),
                None => return,
            }
        }
    }
    on_goroutines(|| {
        let old = crowd(100, |_| yields(100));
        let mut places: Vec<Place> = Vec::new();
        for file in &files {
            // SAFETY: the libraries have no constructors, and the function has this type.
            unsafe {
                let handle = libc::dlopen(file.as_ptr(), libc::RTLD_NOW);
                let is_exec = file.to_str().unwrap().contains("exec");
                assert_eq!(handle.is_null(), is_exec, "{file:?}");
                if !handle.is_null() {
                    let place = libc::dlsym(handle, c"place".as_ptr());
                    places.push(std::mem::transmute::<*mut c_void, Place>(place));
                }
            }
        }
        assert_eq!(places.len(), 2 * sizes.len());
        let places = Arc::new(places);
        let new = crowd(300, move |i| {
            let here = 0u8;
            for place in places.iter() {
                let at = place();
                // The stack and its block lie within 256 KiB around a local variable.
                let distance = (&raw const here).addr().abs_diff(at.addr());
                assert!(distance > 256 << 10, "{distance} bytes from the stack");
                // SAFETY: the caller's own variable.
                unsafe {
                    assert_eq!(*at, 42);
                    *at = i as u8;
                }
                yields(1);
                assert_eq!(place(), at);
                // SAFETY: as above.
                assert_eq!(unsafe { *at }, i as u8);
            }
        });
        old.into_iter().chain(new).for_each(joined);
    });
}

/// glibc enlarges a DTV at about the fifteenth library with TLS: in every goroutine, when it first
/// accesses a later one.
#[test]
#[ignore = "takes long"]
fn forty_libraries_with_tls_load_beside_goroutines() {
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
            // Some goroutines use only a few libraries.
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
        // Without the libraries.
        crowd(100, |_| yields(2)).into_iter().for_each(joined);
    });
}

/// Several goroutines load and unload at once: a reader of the loader's list finds modules there
/// that another thread is unmapping. Reading them crashed one in ten runs of these tests.
///
/// No initial-exec libraries: glibc leaks the place of those that are not closed in reverse order.
#[test]
fn goroutines_load_and_unload_libraries_at_once() {
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

/// Loads a library into a namespace of its own, or into that of the program, with the functions of
/// [`DESCRIPTORS`].
fn load(file: &CStr, namespace: libc::Lmid_t) -> (*mut c_void, Place) {
    // SAFETY: the library has no constructors, and the function has this type.
    unsafe {
        let handle = libc::dlmopen(namespace, file.as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null(), "{:?}", CStr::from_ptr(libc::dlerror()));
        let place = libc::dlsym(handle, c"place".as_ptr());
        (handle, std::mem::transmute::<*mut c_void, Place>(place))
    }
}

/// A library that was loaded into another namespace before the runtime was started has a place in
/// static TLS that the loader does not tell. Goroutines must have it too.
#[test]
fn static_tls_of_another_namespace_belongs_to_goroutines() {
    skip_if_emulated!("qemu-user has no PR_GET_TID_ADDRESS, which the fallback needs");
    child_test!();
    let scratch = Scratch::new("namespace");
    let options = ["-DSIZE=300", "-ftls-model=initial-exec"];
    let Some(file) = compile(&scratch.0, "hidden", DESCRIPTORS, &options) else { return };
    let (_, place) = load(&file, libc::LM_ID_NEWLM);
    on_goroutines(|| {
        let all = crowd(200, move |i| {
            let at = place();
            // SAFETY: the caller's own variable, of 300 bytes.
            unsafe { at.write_bytes(i as u8, 300) };
            yields(3);
            // SAFETY: as above.
            assert_eq!(unsafe { (*at, *at.add(299)) }, (i as u8, i as u8));
        });
        all.into_iter().for_each(joined);
    });
}

/// A library that was closed before the runtime was started leaves a free number among the modules.
/// That does not make goroutines slow.
#[test]
fn a_library_that_was_closed_before_leaves_no_trace() {
    child_test!(|child| {
        let stderr = child.succeed();
        assert!(!stderr.contains("trefoil:"), "{stderr}");
    });
    let scratch = Scratch::new("gap");
    let options = ["-DSIZE=8", "-ftls-model=initial-exec"];
    let (Some(first), Some(second)) = (
        compile(&scratch.0, "first", DESCRIPTORS, &options),
        compile(&scratch.0, "second", DESCRIPTORS, &options),
    ) else {
        return;
    };
    let (closed, _) = load(&first, libc::LM_ID_BASE);
    let (_, place) = load(&second, libc::LM_ID_BASE);
    // SAFETY: the library is not used.
    assert_eq!(unsafe { libc::dlclose(closed) }, 0);
    on_goroutines(|| {
        // SAFETY: the caller's own variable.
        let all = crowd(100, move |_| assert_eq!(unsafe { *place() }, 42));
        all.into_iter().for_each(joined);
    });
}

/// A library whose IFUNC resolver computes for tens of milliseconds. The loader calls it in
/// `dlopen` while it holds its locks, among them one that `pthread_create` needs.
const SLOW_RESOLVER: &str = r#"
static int seven(void) { return 7; }
static int (*resolve(void))(void) {
    for (volatile long i = 0; i < TURNS; i++) {}
    return seven;
}
int resolved(void) __attribute__((ifunc("resolve")));
int (*const through_pointer)(void) = resolved;
"#;

/// A goroutine that is preempted inside `dlopen`, but in code that is neither libc's nor the
/// loader's, is resumed although all other goroutines block their Ms in `dlopen`.
///
/// Fails if it is stopped like user code: then the Ms run out, and the helper thread waits for a
/// lock of the loader before it can start another one.
#[test]
fn goroutine_preempted_by_way_of_the_loader_is_resumed() {
    child_test!();
    let scratch = Scratch::new("resolver");
    let turns = format!("-DTURNS={}", if is_emulated() { 4_000_000 } else { 20_000_000 });
    let Some(file) = compile(&scratch.0, "resolver", SLOW_RESOLVER, &[&turns]) else { return };
    let file = Arc::new(file);
    on_goroutines(|| {
        for _ in 0..rounds(3, 10) {
            let file = file.clone();
            let handles = crowd(64, move |_| {
                // SAFETY: the library has no constructors and is not used.
                let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
                assert!(!handle.is_null());
                handle as usize
            });
            for handle in handles.into_iter().map(joined) {
                // SAFETY: from `dlopen`, closed once.
                assert_eq!(unsafe { libc::dlclose(handle as *mut c_void) }, 0);
            }
        }
    });
}
