//! When resources run out: stack overflow, no address space, no mappings.
//!
//! Limits are set in the child only (`case.rs`). Every test requires a message that says what ran
//! out, and that nothing else is lost.

use crate::case::{CASE, DONE, Ended, LIMIT, case, done, limit, no_core_file, run};
use crate::common::{Child, child_test, mark, page};
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;

use trefoil::{Builder, JoinHandle, Runtime, go, yield_now};

/// Returns the address space of this process in bytes.
fn address_space() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

/// Goroutines that yield until they are told to end; each returns its number.
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

#[inline(never)]
fn recurse_for_ever(n: u64) -> u64 {
    // The work after the call prevents a tail call.
    if black_box(n) == u64::MAX { n } else { recurse_for_ever(n + 1) + black_box(1) }
}

#[inline(never)]
fn one_big_frame(n: usize) -> u8 {
    let mut big = [0u8; 2 << 20];
    black_box(&mut big)[n] = 1;
    big[n / 2]
}

/// Asserts a line `goroutine 7 "name" overflowed its stack (256 KiB)` with any number, for a stack
/// for which `kib` were requested. If a page is larger than the ordinary guard of 16 KiB, the
/// difference is added to them.
#[track_caller]
fn has_overflow_line(ended: &Ended, name: &str, kib: usize) {
    let kib = (kib + (page() >> 10).saturating_sub(16)).next_power_of_two();
    let tail = format!("{name} overflowed its stack ({kib} KiB)");
    let found = ended.text.lines().any(|line| {
        let id = line.strip_prefix("goroutine ").and_then(|l| l.strip_suffix(tail.as_str()));
        id.is_some_and(|id| id.parse::<u64>().is_ok_and(|id| id > 0))
    });
    assert!(found, "no `goroutine N{tail}` in\n{}", ended.text);
}

/// Runs a child that calls [`overflow_by_recursion`] in a goroutine with this name and stack size.
fn run_deep_recursion(child: &Child, case: &str, name: &str, kib: usize) {
    let ended = run(child, case, &[]);
    has_overflow_line(ended.ended_by(libc::SIGABRT), name, kib);
    ended.has("recurse_for_ever").has("stack_size");
    // std's message is for plain threads.
    ended.has_not("has overflowed its stack").has_not(DONE);
}

#[test]
fn deep_recursion_reports_a_stack_overflow() {
    child_test!(limit = LIMIT, |child| {
        run_deep_recursion(child, "plain", "", 256);
        run_deep_recursion(child, "main", " \"main\"", 8192);
    });
    overflow_by_recursion();
}

#[test]
#[ignore = "takes long"]
fn the_report_of_a_stack_overflow_has_the_name_and_the_size() {
    child_test!(limit = LIMIT, |child| {
        run_deep_recursion(child, "named", " \"deep\"", 256);
        run_deep_recursion(child, "small", " \"small\"", 64);
        run_deep_recursion(child, "large", " \"large\"", 4096);
    });
    overflow_by_recursion();
}

/// Recurses for ever in a goroutine that the case chooses.
fn overflow_by_recursion() {
    let case = case();
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
#[ignore = "takes long"]
fn stack_overflow_is_reported_with_other_guards_and_tls_blocks() {
    child_test!(limit = LIMIT, |child| {
        for debug in ["guards=mprotect", "tls=pthread", "guards=mprotect,tls=pthread"] {
            let ended = run(child, "deep", &[("TREFOIL_DEBUG", debug)]);
            has_overflow_line(ended.ended_by(libc::SIGABRT), " \"deep\"", 256);
            ended.has("recurse_for_ever");
        }
    });
    no_core_file();
    trefoil::run(|| {
        let handle = Builder::new().name("deep").go(|| recurse_for_ever(0)).unwrap();
        let _ = handle.join();
        done();
    });
}

#[test]
fn overflow_of_a_recycled_stack_is_reported() {
    child_test!(limit = LIMIT, |child| {
        let ended = run(child, "recycled", &[]);
        has_overflow_line(ended.ended_by(libc::SIGABRT), " \"deep\"", 256);
        ended.has("recurse_for_ever");
    });
    no_core_file();
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

/// rustc probes every page of a big frame, so that it touches the guard whatever its size.
#[test]
fn one_big_frame_reports_a_stack_overflow() {
    child_test!(limit = LIMIT, |child| {
        let ended = run(child, "big", &[]);
        has_overflow_line(ended.ended_by(libc::SIGABRT), " \"big\"", 256);
        ended.has("one_big_frame");
    });
    no_core_file();
    trefoil::run(|| {
        let _ = Builder::new().name("big").go(|| one_big_frame(1000)).unwrap().join();
        done();
    });
}

#[test]
fn a_null_dereference_is_still_a_segmentation_fault() {
    child_test!(limit = LIMIT, |child| {
        for case in ["goroutine", "thread"] {
            let ended = run(child, case, &[]);
            ended.ended_by(libc::SIGSEGV).has_not("overflowed").has_not(DONE);
        }
    });
    let case = case();
    let fault = || {
        // SAFETY: none: the fault is tested. Volatile, so that it is not optimised away.
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
fn std_reports_the_stack_overflow_of_a_plain_thread() {
    child_test!(limit = LIMIT, |child| {
        for case in ["outside", "inside"] {
            let ended = run(child, case, &[]);
            ended.ended_by(libc::SIGABRT).has("thread 'plain'").has("has overflowed its stack");
            ended.has_not("goroutine ").has_not(DONE);
        }
    });
    let case = case();
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
fn impossible_stack_sizes_are_refused() {
    child_test!(limit = LIMIT, |child| {
        run(child, "sizes", &[]).succeeded();
    });
    no_core_file();
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
        // Small sizes are rounded up; large ones only use address space.
        for size in [1, 4096, 32 << 10, (32 << 10) + 1, 1 << 20, 1 << 30] {
            assert_eq!(Builder::new().stack_size(size).go(|| 7).unwrap().join().unwrap(), 7);
        }
    });
    let e = Runtime::builder().stack_size(usize::MAX).build().unwrap_err();
    assert!(!e.to_string().is_empty());
    done();
}

/// The number of Ps of the runtimes whose resources run out.
const PROCS: usize = 4;
/// The number of goroutines for which a P keeps credits and stacks that other Ps cannot use (`mem`:
/// CREDITS_MAX and LOCAL_MAX). Nothing else may be missing after all goroutines have ended.
const KEPT_PER_P: usize = 128 + 64;

/// Settings of glibc that let malloc keep 64 MiB from the start. A Rust program aborts if malloc
/// finds no address space, and that is not tested here.
const MALLOC_RESERVE: [(&str, &str); 3] = [
    ("MALLOC_ARENA_MAX", "1"),
    ("MALLOC_TOP_PAD_", "67108864"),
    ("MALLOC_TRIM_THRESHOLD_", "1073741824"),
];

/// Runs a child that calls [`exhaust_address_space`], in all cases.
fn run_without_address_space(child: &Child, debug: &str) {
    for case in ["default", "large", "outside"] {
        let mut vars = vec![("TREFOIL_DEBUG", debug)];
        vars.extend(MALLOC_RESERVE);
        run(child, case, &vars).succeeded();
    }
}

#[test]
fn go_fails_without_address_space_and_works_again_later() {
    child_test!(limit = LIMIT, |child| run_without_address_space(child, ""));
    exhaust_address_space();
}

#[test]
#[ignore = "takes long"]
fn go_fails_without_address_space_with_other_guards_and_tls_blocks() {
    child_test!(limit = LIMIT, |child| {
        for debug in ["guards=mprotect", "tls=pthread"] {
            run_without_address_space(child, debug);
        }
    });
    exhaust_address_space();
}

/// Starts goroutines until there is no address space, and again after some have ended.
fn exhaust_address_space() {
    let case = case();
    let builder = || match case.as_str() {
        "large" => Builder::new().stack_size(8 << 20),
        _ => Builder::new(),
    };
    let before = |rt: &Runtime| rt.run(|| (0..100).for_each(|_| go(|| ()).join().unwrap()));
    let runtime = Runtime::builder().procs(PROCS).build().unwrap();
    before(&runtime);
    // Room for some chunks of stacks and for malloc.
    limit(libc::RLIMIT_AS, address_space() + (1 << 30));
    let body = || {
        let crowd = Crowd::default();
        let (mut handles, error) = crowd.fill(1_000_000, builder);
        let error = error.expect("a million goroutines in 1 GiB of address space");
        let mut more = Vec::new();
        // Large stacks have 8 MiB; 16 if a page is larger than the ordinary guard.
        assert!(handles.len() > 25, "only {}: {error}", handles.len());
        assert_eq!(error.kind(), std::io::ErrorKind::OutOfMemory, "{error}");
        let text = error.to_string();
        assert!(text.contains("address space") && text.contains("ulimit -v"), "{text}");
        if case == "default" {
            // A preemption may have moved this goroutine to a P that has credits left: use them up.
            let payload = (0..100).find_map(|_| {
                more.push(crowd.fill(1_000_000, builder).0);
                catch_unwind(AssertUnwindSafe(|| drop(go(|| ())))).err()
            });
            let payload = payload.expect("an error of `go` without address space");
            let text = payload.downcast_ref::<String>().unwrap();
            assert!(text.starts_with("cannot start a goroutine: "), "{text}");
            assert!(text.contains("address space"), "{text}");
        }
        // Live goroutines go on. When some have ended, new ones can start.
        while crowd.running.load(SeqCst) < handles.len() {
            yield_now();
        }
        let some = Crowd::default();
        let last = handles.len();
        crowd.end(handles);
        more.into_iter().for_each(|handles| crowd.end(handles));
        handles = some.fill(last, builder).0;
        assert!(handles.len() + PROCS * KEPT_PER_P >= last, "only {} of {last}", handles.len());
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
#[ignore = "takes long"]
fn go_fails_without_mappings_and_works_again_later() {
    child_test!(limit = LIMIT, |child| {
        let ended = run(child, "maps", &[("TREFOIL_DEBUG", "guards=mprotect")]);
        ended.succeeded().has("vm.max_map_count");
    });
    no_core_file();
    Runtime::builder().procs(PROCS).build().unwrap().run(|| {
        let crowd = Crowd::default();
        // Two mappings per stack; the usual limit is 65,530.
        let (handles, error) = crowd.fill(600_000, Builder::new);
        match error {
            None => mark("this kernel's vm.max_map_count is too large to be reached here"),
            Some(error) => {
                let text = error.to_string();
                assert_eq!(error.kind(), std::io::ErrorKind::OutOfMemory, "{text}");
                assert!(text.contains("vm.max_map_count"), "{text}");
                mark(&text);
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

#[test]
#[ignore = "takes long"]
fn runtimes_work_with_1_to_1024_ps() {
    child_test!(limit = LIMIT, |child| {
        for procs in ["1", "64", "1024"] {
            run(child, "builder", &[("PROCS", procs)]).succeeded();
            run(child, "environment", &[("TREFOIL_PROCS", procs)]).succeeded();
        }
        for procs in ["0", "1025", "four", "-1"] {
            run(child, "refused", &[("TREFOIL_PROCS", procs)]).succeeded().has("TREFOIL_PROCS");
        }
    });
    let case = case();
    let mut builder = Runtime::builder();
    if let Ok(procs) = std::env::var("PROCS") {
        builder = builder.procs(procs.parse().unwrap());
    }
    if case == "refused" {
        mark(&builder.build().unwrap_err().to_string());
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
    child_test!(limit = LIMIT, |child| {
        let program = child.env(CASE, "gdb").command();
        let gdb = Command::new("gdb")
            .args(["-batch", "-nx", "-ex", "set debuginfod enabled off"])
            .args(["-ex", "handle SIGURG nostop noprint pass"])
            .args(["-ex", "break trefoil_test_gdb_stops_here", "-ex", "run", "-ex", "bt"])
            .args(["-ex", "kill", "--args"])
            .arg(program.get_program())
            .args(program.get_args())
            .env_remove("TREFOIL_DEBUG")
            .envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))))
            .output();
        let out = match gdb {
            Ok(out) => out,
            Err(e) => return crate::common::mark(&format!("skipped: no gdb ({e})")),
        };
        let text = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
        if text.contains("ptrace: Operation not permitted") {
            return crate::common::mark("skipped: gdb may not trace here");
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
    });
    no_core_file();
    trefoil::run(|| {
        let f = || {
            (0..10).for_each(|_| yield_now());
            frame_above_the_stop(1)
        };
        assert_eq!(Builder::new().name("stops").go(f).unwrap().join().unwrap(), 3);
    });
    done();
}
