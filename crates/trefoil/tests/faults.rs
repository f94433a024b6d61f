//! When things run out or go wrong: stack overflow, no address space, no mappings, no threads.
//!
//! Each case runs in a child process: the test re-executes its own binary with [`CASE`] set to the name
//! of the case, and asserts how the child ended and what it wrote. Limits are set in the child only.
//! What is demanded everywhere: a text that says what ran out, and nothing else lost.

use std::hint::black_box;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

mod common;
use common::raw::raw_sleep;

use trefoil::{Builder, JoinHandle, Runtime, go, yield_now};

/// Names the case to the child.
const CASE: &str = "TREFOIL_FAULT_CASE";
/// A child that runs longer hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// What the child writes to stderr when its case went as it should.
const DONE: &str = "the case is done";

/// How a child ended, and all that it wrote.
struct Ended {
    case: String,
    code: Option<i32>,
    signal: Option<i32>,
    text: String,
}

impl Ended {
    #[track_caller]
    fn has(&self, part: &str) -> &Self {
        assert!(
            self.text.contains(part),
            "{}: no `{part}` in what it wrote (code {:?}, signal {:?}):\n{}",
            self.case,
            self.code,
            self.signal,
            self.text
        );
        self
    }

    #[track_caller]
    fn has_not(&self, part: &str) -> &Self {
        let Ended { case, text, .. } = self;
        assert!(!text.contains(part), "{case}: `{part}` in what it wrote:\n{text}");
        self
    }

    #[track_caller]
    fn by_signal(&self, signal: i32) -> &Self {
        let Ended { case, code, text, .. } = self;
        assert_eq!(self.signal, Some(signal), "{case}: code {code:?}, it wrote:\n{text}");
        self
    }

    #[track_caller]
    fn went_well(&self) -> &Self {
        let Ended { case, code, signal, text } = self;
        assert_eq!(*code, Some(0), "{case}: signal {signal:?}, it wrote:\n{text}");
        self.has(DONE)
    }
}

/// The present test, by the name that libtest gives its thread.
fn test_name() -> String {
    thread::current().name().unwrap_or_default().to_owned()
}

/// In the parent: runs this very test in a child, for `case`, with these variables set.
fn child(case: &str, vars: &[(&str, &str)]) -> Ended {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([&test_name(), "--exact", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .env_remove("TREFOIL_DEBUG")
        .env_remove("RUST_BACKTRACE")
        .envs(vars.iter().copied());
    let out = command.output().unwrap();
    let text = String::from_utf8_lossy(&out.stderr) + String::from_utf8_lossy(&out.stdout);
    Ended {
        case: format!("{case} {vars:?}"),
        code: out.status.code(),
        signal: out.status.signal(),
        text: text.into_owned(),
    }
}

/// In the child: the case to run, under a watchdog. None in the parent.
fn case() -> Option<String> {
    let case = std::env::var(CASE).ok()?;
    no_core_file();
    let name = format!("{} ({case})", test_name());
    let (alive, gone) = mpsc::channel::<()>();
    std::mem::forget(alive); // a child has one case: it ends with the process
    thread::spawn(move || {
        if gone.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            say(&format!("watchdog: {name} still runs after {LIMIT:?}: it hangs"));
            std::process::abort();
        }
    });
    Some(case)
}

/// To stderr, past libtest's capture.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn done() {
    say(DONE);
}

fn limit(what: u32, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: passes a struct by reference.
    let rc = unsafe { libc::setrlimit(what, &raw const limit) };
    assert_eq!(rc, 0, "setrlimit: {}", std::io::Error::last_os_error());
}

fn no_core_file() {
    limit(libc::RLIMIT_CORE, 0);
}

/// Address space of this process, in bytes.
fn address_space() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

/// Goroutines that wait, yielding, until told to end; each ends with its number.
#[derive(Clone, Default)]
struct Crowd {
    end: Arc<AtomicBool>,
    running: Arc<AtomicUsize>,
}

impl Crowd {
    fn wait(&self, i: usize) -> usize {
        thread_local!(static MINE: std::cell::Cell<usize> = const { std::cell::Cell::new(0) });
        MINE.set(i + 1);
        self.running.fetch_add(1, SeqCst);
        while !self.end.load(SeqCst) {
            yield_now();
        }
        MINE.get() - 1
    }

    /// Starts goroutines with `builder` until that fails, at most `most`.
    fn fill(
        &self,
        most: usize,
        builder: impl Fn() -> Builder,
    ) -> (Vec<JoinHandle<usize>>, Option<std::io::Error>) {
        let mut handles = Vec::new();
        while handles.len() < most {
            let (crowd, i) = (self.clone(), handles.len());
            match builder().go(move || crowd.wait(i)) {
                Ok(handle) => handles.push(handle),
                Err(e) => return (handles, Some(e)),
            }
            if handles.len() % 100 == 0 {
                yield_now();
            }
        }
        (handles, None)
    }

    fn end(&self, handles: Vec<JoinHandle<usize>>) {
        self.end.store(true, SeqCst);
        for (i, handle) in handles.into_iter().enumerate() {
            assert_eq!(handle.join().unwrap(), i, "a goroutine was lost");
        }
    }
}

// ---- stacks ------------------------------------------------------------------------------------

#[inline(never)]
fn recurse_for_ever(n: u64) -> u64 {
    // The work after the call keeps it from being a jump.
    if black_box(n) == u64::MAX { n } else { recurse_for_ever(n + 1) + black_box(1) }
}

#[inline(never)]
fn one_big_frame(n: usize) -> u8 {
    let mut big = [0u8; 2 << 20];
    black_box(&mut big)[n] = 1;
    big[n / 2]
}

/// `goroutine 7 "name" overflowed its stack (256 KiB)`, whatever the number.
#[track_caller]
fn has_overflow_line(ended: &Ended, name: &str, kib: usize) {
    let tail = format!("{name} overflowed its stack ({kib} KiB)");
    let found = ended.text.lines().any(|line| {
        let id = line.strip_prefix("goroutine ").and_then(|l| l.strip_suffix(tail.as_str()));
        id.is_some_and(|id| id.parse::<u64>().is_ok_and(|id| id > 0))
    });
    assert!(found, "no `goroutine N{tail}` in\n{}", ended.text);
}

#[test]
fn overflow_by_recursion() {
    let Some(case) = case() else {
        for (case, name, kib) in [
            ("plain", "", 256),
            ("named", " \"deep\"", 256),
            ("small", " \"small\"", 64),
            ("large", " \"large\"", 4096),
            ("main", " \"main\"", 8192),
        ] {
            let ended = child(case, &[]);
            has_overflow_line(ended.by_signal(libc::SIGABRT), name, kib);
            ended.has("recurse_for_ever").has("stack_size");
            // std's words are for std's threads.
            ended.has_not("has overflowed its stack").has_not(DONE);
        }
        return;
    };
    trefoil::run(move || {
        let f = || recurse_for_ever(0);
        let handle = match case.as_str() {
            "plain" => go(f),
            "named" => Builder::new().name("deep").go(f).unwrap(),
            "small" => Builder::new().name("small").stack_size(64 << 10).go(f).unwrap(),
            "large" => Builder::new().name("large").stack_size(4 << 20).go(f).unwrap(),
            _ => {
                black_box(f());
                return;
            }
        };
        let _ = handle.join();
        done();
    });
}

#[test]
fn overflow_with_the_fallbacks() {
    let Some(_) = case() else {
        for debug in ["guards=mprotect", "tls=pthread", "guards=mprotect,tls=pthread"] {
            let ended = child("deep", &[("TREFOIL_DEBUG", debug)]);
            has_overflow_line(ended.by_signal(libc::SIGABRT), " \"deep\"", 256);
            ended.has("recurse_for_ever");
        }
        return;
    };
    trefoil::run(|| {
        let handle = Builder::new().name("deep").go(|| recurse_for_ever(0)).unwrap();
        let _ = handle.join();
        done();
    });
}

#[test]
fn overflow_after_migrating_and_on_a_recycled_stack() {
    let Some(_) = case() else {
        let ended = child("recycled", &[]);
        has_overflow_line(ended.by_signal(libc::SIGABRT), " \"deep\"", 256);
        ended.has("recurse_for_ever");
        return;
    };
    trefoil::run(|| {
        for _ in 0..10 {
            let handles: Vec<_> = (0..100).map(|_| go(yield_now)).collect();
            handles.into_iter().for_each(|h| h.join().unwrap());
        }
        let busy: Vec<_> = (0..50).map(|_| go(|| (0..1000).for_each(|_| yield_now()))).collect();
        let f = || {
            (0..100).for_each(|_| yield_now());
            recurse_for_ever(0)
        };
        let _ = Builder::new().name("deep").go(f).unwrap().join();
        drop(busy);
        done();
    });
}

/// rustc probes every page of a big frame, so that it meets the guard however large it is.
#[test]
fn overflow_by_one_big_frame() {
    let Some(_) = case() else {
        let ended = child("big", &[]);
        has_overflow_line(ended.by_signal(libc::SIGABRT), " \"big\"", 256);
        ended.has("one_big_frame");
        return;
    };
    trefoil::run(|| {
        let _ = Builder::new().name("big").go(|| one_big_frame(1000)).unwrap().join();
        done();
    });
}

#[test]
fn a_null_dereference_is_still_a_segmentation_fault() {
    let Some(case) = case() else {
        for case in ["goroutine", "thread"] {
            let ended = child(case, &[]);
            ended.by_signal(libc::SIGSEGV).has_not("overflowed").has_not(DONE);
        }
        return;
    };
    let fault = || {
        // SAFETY: it is not: the fault is what is tested. Volatile, so that it is not optimised away.
        unsafe { black_box(std::ptr::dangling_mut::<u64>().wrapping_sub(1)).write_volatile(1) }
    };
    trefoil::run(move || {
        if case == "goroutine" {
            let _ = go(fault).join();
        } else {
            let _ = thread::spawn(fault).join();
        }
        done();
    });
}

#[test]
fn a_plain_threads_overflow_is_stds() {
    let Some(case) = case() else {
        for case in ["outside", "inside"] {
            let ended = child(case, &[]);
            ended.by_signal(libc::SIGABRT).has("thread 'plain'").has("has overflowed its stack");
            ended.has_not("goroutine ").has_not(DONE);
        }
        return;
    };
    let overflow = || {
        let thread = thread::Builder::new().name("plain".into());
        let _ = thread.spawn(|| recurse_for_ever(0)).unwrap().join();
    };
    trefoil::run(|| go(yield_now).join().unwrap());
    if case == "outside" {
        overflow();
    } else {
        trefoil::run(|| go(overflow).join().unwrap());
    }
    done();
}

#[test]
fn absurd_stack_sizes_are_refused() {
    let Some(_) = case() else {
        child("sizes", &[]).went_well();
        return;
    };
    trefoil::run(|| {
        for (size, part) in [
            (0, "0 bytes"),
            ((1 << 30) + 1, "at most 1 GiB"),
            (1 << 40, "at most 1 GiB"),
            (usize::MAX, "at most 1 GiB"),
            (usize::MAX / 2 + 2, "at most 1 GiB"),
        ] {
            let e = Builder::new().stack_size(size).go(|| 1).unwrap_err();
            assert_eq!(e.kind(), std::io::ErrorKind::InvalidInput);
            assert!(e.to_string().contains(part), "{size}: {e}");
        }
        // Small ones are rounded up, large ones are only address space.
        for size in [1, 4096, 32 << 10, (32 << 10) + 1, 1 << 20, 1 << 30] {
            assert_eq!(Builder::new().stack_size(size).go(|| 7).unwrap().join().unwrap(), 7);
        }
    });
    let e = Runtime::builder().stack_size(usize::MAX).build().unwrap_err();
    assert!(!e.to_string().is_empty());
    done();
}

// ---- memory ------------------------------------------------------------------------------------

/// Ps of the runtimes that run out.
const PROCS: usize = 4;
/// Goroutines that a P keeps room for, where others cannot have it: its stock of credits and stacks
/// (`mem`: CREDITS_MAX and LOCAL_MAX). Nothing else may be missing after everybody has ended.
const KEPT_BY_A_P: usize = 128 + 64;

/// Settings of glibc: 64 MiB for malloc from the start, which it keeps. Where address space runs out, a
/// malloc that finds none ends a Rust program, and that is not what is tested.
const MALLOCS_OWN: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_TOP_PAD_", "67108864"),
    ("MALLOC_TRIM_THRESHOLD_", "1073741824"),
];

#[test]
fn out_of_address_space() {
    let Some(case) = case() else {
        for debug in ["", "guards=mprotect", "tls=pthread"] {
            for case in ["default", "large", "outside"] {
                let mut vars = vec![("TREFOIL_DEBUG", debug)];
                vars.extend(MALLOCS_OWN);
                child(case, &vars).went_well();
            }
        }
        return;
    };
    let builder = || match case.as_str() {
        "large" => Builder::new().stack_size(8 << 20),
        _ => Builder::new(),
    };
    let before = |rt: &Runtime| rt.run(|| (0..100).for_each(|_| go(|| ()).join().unwrap()));
    let runtime = Runtime::builder().procs(PROCS).build().unwrap();
    before(&runtime);
    // Room for some chunks of stacks, and for malloc.
    limit(libc::RLIMIT_AS, address_space() + (1 << 30));
    let body = || {
        let crowd = Crowd::default();
        let (mut handles, error) = crowd.fill(1_000_000, builder);
        let error = error.expect("a million goroutines in 1 GiB of address space");
        assert!(handles.len() > 50, "only {}: {error}", handles.len());
        assert_eq!(error.kind(), std::io::ErrorKind::OutOfMemory, "{error}");
        let text = error.to_string();
        assert!(text.contains("address space") && text.contains("ulimit -v"), "{text}");
        if case == "default" {
            let payload = catch_unwind(AssertUnwindSafe(|| drop(go(|| ())))).unwrap_err();
            let text = payload.downcast_ref::<String>().unwrap();
            assert!(text.starts_with("cannot start a goroutine: "), "{text}");
            assert!(text.contains("address space"), "{text}");
        }
        // Those alive go on; when some end, there is room again.
        while crowd.running.load(SeqCst) < handles.len() {
            yield_now();
        }
        let some = Crowd::default();
        let last = handles.len();
        crowd.end(handles);
        handles = some.fill(last, builder).0;
        assert!(handles.len() + PROCS * KEPT_BY_A_P >= last, "only {} of {last}", handles.len());
        some.end(handles);
    };
    if case == "outside" {
        // `go` on a plain thread, in the default runtime.
        body();
    } else {
        runtime.run(body);
    }
    done();
}

#[test]
fn out_of_mappings() {
    let Some(_) = case() else {
        let ended = child("maps", &[("TREFOIL_DEBUG", "guards=mprotect")]);
        ended.went_well().has("vm.max_map_count");
        return;
    };
    Runtime::builder().procs(PROCS).build().unwrap().run(|| {
        let crowd = Crowd::default();
        // Two mappings a stack; the usual limit is 65,530.
        let (handles, error) = crowd.fill(600_000, Builder::new);
        match error {
            None => say("this kernel's vm.max_map_count is too large to be reached here"),
            Some(error) => {
                let text = error.to_string();
                assert_eq!(error.kind(), std::io::ErrorKind::OutOfMemory, "{text}");
                assert!(text.contains("vm.max_map_count"), "{text}");
                say(&text);
            }
        }
        let n = handles.len();
        crowd.end(handles);
        let again = Crowd::default();
        let (handles, error) = again.fill(n / 2, Builder::new);
        assert!(error.is_none(), "after {n} ended: {error:?}");
        again.end(handles);
    });
    done();
}

// ---- threads -----------------------------------------------------------------------------------

/// From here on this process gets no more threads. The limit is a user's, and root has none: so it
/// becomes somebody who has no processes.
fn no_more_threads() {
    const NOBODY_AT_ALL: u32 = 64_999;
    limit_threads(1);
    // SAFETY: plain system calls.
    unsafe {
        if libc::getuid() == 0 {
            assert_eq!(libc::setuid(NOBODY_AT_ALL), 0);
        }
    }
    assert!(thread::Builder::new().spawn(|| ()).is_err(), "the limit does not bind");
}

/// Sets the soft limit, so that it can be raised again.
fn limit_threads(threads: u64) {
    let limit = libc::rlimit { rlim_cur: threads, rlim_max: 1000 };
    // SAFETY: passes a struct by reference.
    let rc = unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) };
    assert_eq!(rc, 0, "setrlimit: {}", std::io::Error::last_os_error());
}

/// A thread that could not be started was not tried again: goroutines waited, with idle Ps, until a blocked call returned.
#[test]
fn threads_are_started_when_the_limit_is_lifted() {
    const BLOCKED: Duration = Duration::from_secs(10);
    const LIFTED: Duration = Duration::from_millis(300);
    if case().is_none() {
        child("lifted", &[]).went_well().has("goroutines wait until one of");
        return;
    }
    let runtime = Runtime::builder().procs(2).build().unwrap();
    runtime.run(|| go(yield_now).join().unwrap());
    let start = Instant::now();
    let lift = thread::spawn(move || {
        thread::sleep(LIFTED);
        limit_threads(1000);
    });
    no_more_threads();
    // More than there are threads: they keep all of them.
    let blocked: Vec<_> = (0..20).map(|_| runtime.go(|| raw_sleep(BLOCKED)).unwrap()).collect();
    while start.elapsed() < LIFTED / 2 {
        std::hint::spin_loop();
    }
    let late = runtime.go(|| trefoil::time::sleep(Duration::from_millis(50))).unwrap();
    late.join().unwrap();
    assert!(start.elapsed() > LIFTED, "there were threads enough all along");
    assert!(start.elapsed() < BLOCKED - LIFTED, "took {:?}", start.elapsed());
    lift.join().unwrap();
    drop(blocked);
    done();
}

#[test]
fn no_threads_to_be_had() {
    let Some(case) = case() else {
        for case in ["later", "more Ps", "at the start"] {
            child(case, &[]).went_well();
        }
        return;
    };
    if case == "at the start" {
        no_more_threads();
        let text = Runtime::builder().procs(PROCS).build().unwrap_err().to_string();
        assert!(text.contains("thread"), "{text}");
        let payload = catch_unwind(|| drop(go(|| ()))).unwrap_err();
        let text = payload.downcast_ref::<String>().unwrap();
        assert!(text.contains("thread"), "{text}");
        return done();
    }
    let runtime = Runtime::builder().procs(16).build().unwrap();
    runtime.run(|| go(yield_now).join().unwrap());
    no_more_threads();
    // The work is done by the threads that there are.
    let sum: usize = runtime.run(|| {
        if case == "more Ps" {
            trefoil::set_procs(64);
        }
        let handles: Vec<_> = (0..5000usize)
            .map(|i| {
                go(move || {
                    (0..5).for_each(|_| yield_now());
                    go(move || i).join().unwrap()
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).sum()
    });
    assert_eq!(sum, 5000 * 4999 / 2);
    done();
}

#[test]
fn few_and_many_ps() {
    let Some(case) = case() else {
        for procs in ["1", "64", "1024"] {
            child("builder", &[("PROCS", procs)]).went_well();
            child("environment", &[("TREFOIL_PROCS", procs)]).went_well();
        }
        for procs in ["0", "1025", "four", "-1"] {
            child("refused", &[("TREFOIL_PROCS", procs)]).went_well().has("TREFOIL_PROCS");
        }
        return;
    };
    let mut builder = Runtime::builder();
    if let Ok(procs) = std::env::var("PROCS") {
        builder = builder.procs(procs.parse().unwrap());
    }
    if case == "refused" {
        say(&builder.build().unwrap_err().to_string());
        return done();
    }
    let runtime = builder.build().unwrap();
    let sum: usize = runtime.run(|| {
        let handles: Vec<_> = (0..4000usize)
            .map(|i| {
                go(move || {
                    (0..10).for_each(|_| yield_now());
                    i
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).sum()
    });
    assert_eq!(sum, 4000 * 3999 / 2);
    done();
}

// ---- a debugger --------------------------------------------------------------------------------

/// Where gdb stops.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn trefoil_test_gdb_stops_here(n: u64) -> u64 {
    black_box(n) + 1
}

#[inline(never)]
fn frame_above_the_stop(n: u64) -> u64 {
    trefoil_test_gdb_stops_here(n) + black_box(1)
}

#[test]
fn gdb_walks_a_goroutines_stack_to_its_end() {
    let Some(_) = case() else {
        let me = std::env::current_exe().unwrap();
        let gdb = Command::new("gdb")
            .args(["-batch", "-nx", "-ex", "set debuginfod enabled off"])
            .args(["-ex", "handle SIGURG nostop noprint pass"])
            .args(["-ex", "break trefoil_test_gdb_stops_here", "-ex", "run", "-ex", "bt"])
            .args(["-ex", "kill", "--args"])
            .arg(me)
            .args([&test_name(), "--exact", "--nocapture", "--test-threads=1"])
            .env(CASE, "gdb")
            .env_remove("TREFOIL_DEBUG")
            .output();
        let out = match gdb {
            Ok(out) => out,
            Err(e) => return println!("skipped: no gdb ({e})"),
        };
        let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
        if text.contains("ptrace: Operation not permitted") {
            return println!("skipped: gdb may not trace here");
        }
        let trace: Vec<&str> = text.lines().filter(|l| l.starts_with('#')).collect();
        let all = trace.join("\n");
        assert!(all.contains("trefoil_test_gdb_stops_here"), "{text}");
        assert!(all.contains("frame_above_the_stop"), "{text}");
        assert!(trace.len() < 60, "{text}");
        for bad in ["Backtrace stopped", "corrupt", "start_thread", "clone3"] {
            assert!(!text.contains(bad), "{bad} in\n{text}");
        }
        assert!(!all.contains("??"), "{text}");
        assert!(trace.last().is_some_and(|l| l.contains("trefoil")), "{text}");
        return;
    };
    trefoil::run(|| {
        let f = || {
            (0..10).for_each(|_| yield_now());
            frame_above_the_stop(1)
        };
        assert_eq!(Builder::new().name("stops").go(f).unwrap().join().unwrap(), 3);
    });
    done();
}
