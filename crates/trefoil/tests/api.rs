//! The public face: handles, panics, scopes, runtimes, the environment, the attributes.

mod common;

use common::{child_test, hold_until, join_all, mark, runtime, watchdog, yield_until};
use std::cell::RefCell;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trefoil::{Builder, JoinHandle, PanicMode, Runtime};

/// Counts how often it is dropped.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

/// A counter, and the way to make things that it counts.
#[derive(Default, Clone)]
struct Drops(Arc<AtomicUsize>);

impl Drops {
    fn one(&self) -> Counted {
        Counted(self.0.clone())
    }

    fn get(&self) -> usize {
        self.0.load(SeqCst)
    }
}

// --- JoinHandle ----------------------------------------------------------------------------------

#[test]
fn join_gives_the_result() {
    let _w = watchdog();
    trefoil::run(|| {
        assert_eq!(trefoil::go(|| String::from("done")).join().unwrap(), "done");
        // Joined long after its end, and long before.
        let early = trefoil::go(|| 1);
        yield_until("its end", || early.is_finished());
        assert_eq!(early.join().unwrap(), 1);
        let late = trefoil::go(|| {
            (0..50).for_each(|_| trefoil::yield_now());
            2
        });
        assert_eq!(late.join().unwrap(), 2);
    });
}

#[test]
fn is_finished_tells_the_end() {
    let _w = watchdog();
    trefoil::run(|| {
        let gate = Arc::new(AtomicBool::new(false));
        let open = gate.clone();
        let h = trefoil::go(move || yield_until("the gate", || open.load(SeqCst)));
        (0..20).for_each(|_| trefoil::yield_now());
        assert!(!h.is_finished());
        gate.store(true, SeqCst);
        yield_until("its end", || h.is_finished());
        assert!(h.is_finished(), "it stays so");
        h.join().unwrap();
    });
}

#[test]
fn ids_and_names() {
    let _w = watchdog();
    assert_eq!(trefoil::id(), 0, "a plain thread");
    trefoil::run(|| {
        assert_eq!(trefoil::id(), 1, "main");
        let h = Builder::new().name("worker 9").go(trefoil::id).unwrap();
        assert_eq!(h.name(), Some("worker 9"));
        let id = h.id();
        assert!(id > 1);
        yield_until("its end", || h.is_finished());
        assert_eq!((h.id(), h.name()), (id, Some("worker 9")), "also after its end");
        assert!(format!("{h:?}").contains("worker 9"));
        assert_eq!(h.join().unwrap(), id, "id() inside is id() of the handle");

        // The next one in the same memory has no name.
        let plain = trefoil::go(|| ());
        assert_eq!(plain.name(), None);
        plain.join().unwrap();
    });
}

#[test]
fn ids_are_unique() {
    let _w = watchdog();
    const SPAWNERS: usize = 10;
    const EACH: usize = 10_000;
    let ids = runtime(4).run(|| {
        join_all((0..SPAWNERS).map(|_| {
            trefoil::go(|| {
                let mut ids = Vec::with_capacity(EACH);
                for _ in 0..EACH / 100 {
                    let batch: Vec<_> = (0..100).map(|_| trefoil::go(trefoil::id)).collect();
                    for h in batch {
                        let id = h.id();
                        assert_eq!(h.join().unwrap(), id);
                        ids.push(id);
                    }
                }
                ids
            })
        }))
    });
    let unique: HashSet<u64> = ids.iter().flatten().copied().collect();
    assert_eq!(unique.len(), SPAWNERS * EACH);
    assert!(!unique.contains(&0) && !unique.contains(&1));
}

#[test]
fn a_dropped_handle_detaches() {
    let _w = watchdog();
    trefoil::run(|| {
        let ran = Arc::new(AtomicUsize::new(0));
        for _ in 0..100 {
            let ran = ran.clone();
            drop(trefoil::go(move || {
                trefoil::yield_now();
                ran.fetch_add(1, SeqCst);
            }));
        }
        yield_until("all to run", || ran.load(SeqCst) == 100);
        yield_until("all to end", || trefoil::num_goroutines() == 1);
    });
}

#[test]
fn a_handle_may_be_joined_anywhere() {
    let _w = watchdog();
    let rt = runtime(2);
    // On a plain thread, on another goroutine, and in another runtime.
    let h = rt.go(|| 1).unwrap();
    assert_eq!(std::thread::spawn(move || h.join().unwrap()).join().unwrap(), 1);
    let h = rt.go(|| 2).unwrap();
    assert_eq!(rt.run(move || trefoil::go(move || h.join().unwrap()).join().unwrap()), 2);
    let h = rt.go(|| 3).unwrap();
    assert_eq!(runtime(1).run(move || h.join().unwrap()), 3);
    // A handle that was read from several threads.
    let h = rt.go(|| 4).unwrap();
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| (h.id(), h.name().is_none(), h.is_finished()));
        }
    });
    assert_eq!(h.join().unwrap(), 4);
}

// --- Results and closures ------------------------------------------------------------------------

#[test]
fn results_are_dropped_once() {
    let _w = watchdog();
    for procs in [1, 3] {
        runtime(procs).run(|| {
            // Joined.
            let drops = Drops::default();
            let one = drops.one();
            let result = trefoil::go(move || one).join().unwrap();
            assert_eq!(drops.get(), 0);
            drop(result);
            assert_eq!(drops.get(), 1);

            // Detached before the end: the goroutine drops it, and what its closure owns.
            let drops = Drops::default();
            let (one, captured) = (drops.one(), drops.one());
            drop(trefoil::go(move || {
                let _captured = captured;
                trefoil::yield_now();
                one
            }));
            yield_until("both drops", || drops.get() == 2);
            yield_until("the end", || trefoil::num_goroutines() == 1);
            assert_eq!(drops.get(), 2);

            // Detached after the end: the handle drops it.
            let drops = Drops::default();
            let one = drops.one();
            let h = trefoil::go(move || one);
            yield_until("the end", || h.is_finished());
            assert_eq!(drops.get(), 0);
            drop(h);
            assert_eq!(drops.get(), 1);

            // A leaked handle leaks the result; the goroutine ends.
            let drops = Drops::default();
            let (one, captured) = (drops.one(), drops.one());
            std::mem::forget(trefoil::go(move || {
                drop(captured);
                one
            }));
            yield_until("the end", || trefoil::num_goroutines() == 1);
            assert_eq!(drops.get(), 1);

            // Panicked: the payload is the result, joined or not.
            let drops = Drops::default();
            let (one, captured) = (drops.one(), drops.one());
            let payload = trefoil::go(move || {
                let _captured = captured;
                resume_unwind(Box::new(one));
            })
            .join()
            .unwrap_err();
            assert_eq!(drops.get(), 1);
            drop(payload);
            assert_eq!(drops.get(), 2);
            let one = drops.one();
            drop(trefoil::go(move || resume_unwind(Box::new(one))));
            yield_until("the payload's drop", || drops.get() == 3);
            yield_until("the end", || trefoil::num_goroutines() == 1);
        });
    }
}

/// The handle is dropped at any moment of the goroutine's end.
#[test]
fn results_are_dropped_once_in_a_race() {
    let _w = watchdog();
    const N: usize = 5_000;
    runtime(2).run(|| {
        let drops = Drops::default();
        for i in 0..N {
            let one = drops.one();
            let h = trefoil::go(move || one);
            for _ in 0..i % 64 {
                std::hint::spin_loop();
            }
            drop(h);
        }
        yield_until("all drops", || drops.get() == N);
        yield_until("all ends", || trefoil::num_goroutines() == 1);
        assert_eq!(drops.get(), N);
    });
}

thread_local! {
    /// Gone, as far as `with` is concerned, once the goroutine's thread-locals are dropped.
    static LAST_WORDS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// As with threads: an unwanted result is dropped by the goroutine while its thread-locals live.
#[test]
fn an_unwanted_result_may_use_thread_locals() {
    child_test!();
    struct Speaks(Arc<AtomicUsize>);
    impl Drop for Speaks {
        fn drop(&mut self) {
            LAST_WORDS.with_borrow_mut(|words| words.push(1));
            self.0.fetch_add(1, SeqCst);
        }
    }
    runtime(1).run(|| {
        let spoke = Arc::new(AtomicUsize::new(0));
        let (first, second) = (Speaks(spoke.clone()), Speaks(spoke.clone()));
        drop(trefoil::go(move || {
            LAST_WORDS.with_borrow_mut(|words| words.push(0));
            first
        }));
        yield_until("the result's drop", || spoke.load(SeqCst) == 1);
        // And one that is the first to touch them: what it makes there is dropped, too.
        drop(trefoil::go(move || second));
        yield_until("the result's drop", || spoke.load(SeqCst) == 2);
    });
}

/// Thread-locals that an unwanted result's drop creates are themselves dropped.
#[test]
fn thread_locals_made_by_an_unwanted_result_are_dropped() {
    let _w = watchdog();
    static DROPPED: AtomicUsize = AtomicUsize::new(0);
    struct Local;
    impl Drop for Local {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, SeqCst);
        }
    }
    thread_local!(static LOCAL: Local = const { Local });
    struct Touches;
    impl Drop for Touches {
        fn drop(&mut self) {
            LOCAL.with(|_| ());
        }
    }
    runtime(1).run(|| {
        for n in 1..=10 {
            drop(trefoil::go(|| Touches));
            yield_until("the end", || trefoil::num_goroutines() == 1);
            trefoil::yield_now();
            assert_eq!(DROPPED.load(SeqCst), n);
        }
    });
}

#[repr(align(64))]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Aligned([u8; 64]);

#[repr(align(4096))]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Page([u8; 4096]);

#[test]
fn closures_and_results_of_any_size() {
    let _w = watchdog();
    fn aligned<T>(value: &T) -> bool {
        (std::ptr::from_ref(value) as usize).is_multiple_of(align_of::<T>())
    }
    trefoil::run(|| {
        for n in 0..50u8 {
            // At the edge of what fits into the goroutine itself, and around it.
            assert_eq!(trefoil::go(move || [n; 55]).join().unwrap(), [n; 55]);
            assert_eq!(trefoil::go(move || [n; 56]).join().unwrap(), [n; 56]);
            assert_eq!(trefoil::go(move || [n; 64]).join().unwrap(), [n; 64]);
            assert_eq!(trefoil::go(move || [n; 65]).join().unwrap(), [n; 65]);
            let large = [n; 4096];
            assert_eq!(trefoil::go(move || large.map(|b| b ^ 1)).join().unwrap(), [n ^ 1; 4096]);
            assert_eq!(trefoil::go(move || large[4095]).join().unwrap(), n);
            let (line, page) = (Aligned([n; 64]), Page([n; 4096]));
            let h = trefoil::go(move || {
                assert!(aligned(&line) && aligned(&page));
                (line, page)
            });
            assert_eq!(h.join().unwrap(), (line, page));
            trefoil::go(|| ()).join().unwrap();
            let fits_exactly = [u64::from(n); 8];
            let sum = trefoil::go(move || fits_exactly.iter().sum::<u64>()).join().unwrap();
            assert_eq!(sum, 8 * u64::from(n));
        }
        // Large ones that nobody takes.
        let drops = Drops::default();
        for i in 0..100 {
            let (one, ballast) = (drops.one(), [i; 100]);
            let h = trefoil::go(move || (one, ballast));
            if i % 2 == 0 {
                yield_until("the end", || h.is_finished());
            }
        }
        yield_until("all drops", || drops.get() == 100);
    });
}

#[test]
fn builder_checks_the_stack_size() {
    let _w = watchdog();
    trefoil::run(|| {
        for bytes in [1, 32 << 10, 100_000, 1 << 20, 64 << 20] {
            let h = Builder::new().stack_size(bytes).go(move || bytes).unwrap();
            assert_eq!(h.join().unwrap(), bytes);
        }
        let drops = Drops::default();
        let one = drops.one();
        let error = Builder::new().stack_size(usize::MAX).go(move || drop(one)).unwrap_err();
        assert!(!error.to_string().is_empty());
        assert_eq!(drops.get(), 1, "the closure that never ran was dropped");
        assert_eq!(trefoil::num_goroutines(), 1);
    });
}

// --- Panics --------------------------------------------------------------------------------------

#[test]
fn a_panic_comes_out_of_join() {
    let _w = watchdog();
    trefoil::run(|| {
        let text = trefoil::go(|| resume_unwind(Box::new("a word"))).join().unwrap_err();
        assert_eq!(text.downcast_ref(), Some(&"a word"));
        let three = std::hint::black_box(3);
        let formatted = trefoil::go(move || -> () { panic!("expected: number {three}") }).join();
        assert_eq!(
            formatted.unwrap_err().downcast_ref(),
            Some(&String::from("expected: number 3"))
        );
        let any = trefoil::go(|| panic_any(17u64)).join().unwrap_err();
        assert_eq!(any.downcast_ref(), Some(&17u64));
        // Others are not touched, and neither is the next one on the same stack.
        assert!(!std::thread::panicking());
        assert!(!trefoil::go(std::thread::panicking).join().unwrap());
    });
}

#[test]
fn mains_panic_comes_out_of_run() {
    let _w = watchdog();
    let rt = runtime(2);
    let caught = catch_unwind(AssertUnwindSafe(|| rt.run(|| resume_unwind(Box::new(5u8)))));
    assert_eq!(caught.unwrap_err().downcast_ref(), Some(&5u8));
    assert_eq!(rt.run(|| 6), 6, "the runtime lives on");
}

#[test]
fn the_message_names_the_goroutine() {
    child_test!(|child| {
        let stderr = child.succeed();
        let id = |what| stderr.lines().find_map(|l| l.strip_prefix(what)).unwrap();
        for (head, message) in [
            (format!("goroutine {} \"sorter\" panicked at ", id("named ")), "out of order"),
            (format!("goroutine {} panicked at ", id("unnamed ")), "no name"),
            ("goroutine 1 \"main\" panicked at ".to_owned(), "in main"),
        ] {
            let mut lines = stderr.lines().skip_while(|line| !line.starts_with(&head));
            let first = lines.next().unwrap_or_else(|| panic!("no {head:?} in:\n{stderr}"));
            assert!(first.contains("tests/api.rs:") && first.ends_with(':'), "{first}");
            assert_eq!(lines.next(), Some(message));
        }
        assert!(!stderr.contains("thread '<unnamed>'"), "{stderr}");
    });
    trefoil::run(|| {
        let h = Builder::new().name("sorter").go(|| panic!("out of order")).unwrap();
        mark(&format!("named {}", h.id()));
        h.join().unwrap_err();
        let h = trefoil::go(|| panic!("no {}", "name"));
        mark(&format!("unnamed {}", h.id()));
        h.join().unwrap_err();
    });
    let _ = catch_unwind(|| trefoil::run(|| panic!("in main")));
}

#[test]
fn abort_mode_ends_the_process_with_2() {
    const MODE: &str = "TREFOIL_TEST_MODE";
    child_test!(|child| {
        for mode in ["runtime", "goroutine"] {
            let stderr = child.env(MODE, mode).fail(2);
            assert!(stderr.contains("still here\n"), "{stderr}");
            assert!(stderr.contains("panicked at") && stderr.contains("the end\n"), "{stderr}");
        }
    });
    let whole = std::env::var(MODE).unwrap() == "runtime";
    let mode = if whole { PanicMode::Abort } else { PanicMode::Unwind };
    Runtime::builder().panic(mode).build().unwrap().run(|| {
        // The other way round for one goroutine.
        let gentle = Builder::new().panic(PanicMode::Unwind).go(|| panic!("gently")).unwrap();
        gentle.join().unwrap_err();
        mark("still here");
        let h = if whole {
            trefoil::go(|| panic!("the end"))
        } else {
            Builder::new().panic(PanicMode::Abort).go(|| panic!("the end")).unwrap()
        };
        let _ = h.join();
        unreachable!("the process has ended");
    });
}

/// Joins its goroutine when it is dropped: also in the middle of an unwinding.
struct JoinOnDrop(Option<JoinHandle<bool>>, Arc<Mutex<Vec<bool>>>);

impl Drop for JoinOnDrop {
    fn drop(&mut self) {
        assert!(std::thread::panicking());
        let inner = self.0.take().unwrap().join().unwrap();
        self.1.lock().unwrap().push(inner);
        assert!(std::thread::panicking());
    }
}

#[test]
fn parking_while_unwinding() {
    let _w = watchdog();
    for procs in [1, 3] {
        runtime(procs).run(|| {
            let inner: Arc<Mutex<Vec<bool>>> = Arc::default();
            let handles: Vec<_> = (0..20u32)
                .map(|i| {
                    let inner = inner.clone();
                    trefoil::go(move || {
                        // What is joined while the outer one unwinds, panics and catches on its
                        // own, yields, and is not `panicking`.
                        let worker = trefoil::go(|| {
                            for _ in 0..5 {
                                trefoil::yield_now();
                                let caught = catch_unwind(|| resume_unwind(Box::new(1u8)));
                                assert!(caught.is_err());
                            }
                            std::thread::panicking()
                        });
                        let _join = JoinOnDrop(Some(worker), inner);
                        resume_unwind(Box::new(i));
                    })
                })
                .collect();
            for (i, h) in handles.into_iter().enumerate() {
                let h: JoinHandle<()> = h;
                assert_eq!(h.join().unwrap_err().downcast_ref(), Some(&(i as u32)));
            }
            assert_eq!(*inner.lock().unwrap(), [false; 20]);
        });
    }
}

// --- Scopes --------------------------------------------------------------------------------------

#[test]
fn scoped_goroutines_borrow() {
    let _w = watchdog();
    trefoil::run(|| {
        let mut numbers: Vec<u64> = (0..1000).collect();
        let total = AtomicUsize::new(0);
        trefoil::scope(|s| {
            for part in numbers.chunks_mut(100) {
                s.go(|| {
                    trefoil::yield_now();
                    part.iter_mut().for_each(|n| *n += 1);
                    total.fetch_add(part.len(), SeqCst);
                });
            }
        });
        assert_eq!(total.load(SeqCst), 1000);
        assert_eq!(numbers.iter().sum::<u64>(), 500_500);
    });
}

#[test]
fn scoped_handles_join() {
    let _w = watchdog();
    trefoil::run(|| {
        let text = String::from("borrowed");
        let lens = trefoil::scope(|s| {
            let a = s.go(|| text.len());
            let b = Builder::new().name("b").go_scoped(s, || &text[..3]).unwrap();
            assert_eq!(b.name(), Some("b"));
            assert_ne!(a.id(), b.id());
            yield_until("b", || b.is_finished());
            (a.join().unwrap(), b.join().unwrap())
        });
        assert_eq!(lens, (8, "bor"));
        let caught = trefoil::scope(|s| s.go(|| resume_unwind(Box::new(3u8))).join());
        let caught: std::thread::Result<()> = caught;
        assert_eq!(caught.unwrap_err().downcast_ref(), Some(&3u8), "joined: no panic of scope");
    });
}

#[test]
fn scope_waits_for_all() {
    let _w = watchdog();
    // On a goroutine and on a plain thread.
    let body = || {
        for _ in 0..50 {
            let ended = AtomicUsize::new(0);
            let ended = &ended;
            trefoil::scope(|s| {
                for i in 0..10 {
                    s.go(move || {
                        (0..i).for_each(|_| trefoil::yield_now());
                        ended.fetch_add(1, SeqCst);
                    });
                }
            });
            assert_eq!(ended.load(SeqCst), 10);
        }
    };
    trefoil::run(body);
    body();
}

#[test]
fn scopes_nest() {
    let _w = watchdog();
    fn tree(depth: u32) -> u32 {
        if depth == 0 {
            return 1;
        }
        trefoil::scope(|s| {
            let left = s.go(move || tree(depth - 1));
            let right = s.go(move || tree(depth - 1));
            left.join().unwrap() + right.join().unwrap()
        })
    }
    assert_eq!(trefoil::run(|| tree(8)), 256);
    assert_eq!(tree(6), 64, "from a plain thread");
    trefoil::run(|| {
        // A goroutine of the scope starts others in the same scope.
        let count = AtomicUsize::new(0);
        let count = &count;
        trefoil::scope(|s| {
            s.go(move || {
                for _ in 0..10 {
                    s.go(move || {
                        trefoil::yield_now();
                        s.go(move || count.fetch_add(1, SeqCst));
                    });
                }
            });
        });
        assert_eq!(count.load(SeqCst), 10);
    });
}

#[test]
fn scope_waits_when_its_closure_panics() {
    let _w = watchdog();
    let body = || {
        let ended = AtomicUsize::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            trefoil::scope(|s| {
                for i in 0..10 {
                    let ended = &ended;
                    s.go(move || {
                        (0..i).for_each(|_| trefoil::yield_now());
                        ended.fetch_add(1, SeqCst);
                    });
                }
                resume_unwind(Box::new("of the closure"));
            })
        }));
        assert_eq!(ended.load(SeqCst), 10);
        let caught: std::thread::Result<()> = caught;
        assert_eq!(caught.unwrap_err().downcast_ref(), Some(&"of the closure"));
    };
    trefoil::run(body);
    body();
}

#[test]
fn an_unjoined_panic_comes_out_of_scope() {
    let _w = watchdog();
    let body = || {
        for how in 0..3 {
            let ended = AtomicUsize::new(0);
            let caught = catch_unwind(AssertUnwindSafe(|| {
                trefoil::scope(|s| {
                    let unhappy = s.go(|| {
                        (0..how).for_each(|_| trefoil::yield_now());
                        resume_unwind(Box::new("unseen"))
                    });
                    if how == 2 {
                        // Dropped after its end.
                        yield_until("its end", || unhappy.is_finished());
                    }
                    drop::<trefoil::ScopedJoinHandle<'_, ()>>(unhappy);
                    s.go(|| {
                        (0..10).for_each(|_| trefoil::yield_now());
                        ended.fetch_add(1, SeqCst);
                    });
                })
            }));
            assert_eq!(ended.load(SeqCst), 1, "the others were waited for");
            let payload = caught.unwrap_err();
            assert_eq!(payload.downcast_ref(), Some(&"a scoped goroutine panicked"));
        }
    };
    trefoil::run(body);
    body();
}

#[test]
fn scoped_results_are_dropped_before_scope_returns() {
    let _w = watchdog();
    runtime(3).run(|| {
        for round in 0..200 {
            let drops = Drops::default();
            let leaked = trefoil::scope(|s| {
                for i in 0..5 {
                    let one = drops.one();
                    let h = s.go(move || one);
                    if (i + round) % 3 == 0 {
                        drop(h.join().unwrap());
                    }
                }
                let one = drops.one();
                std::mem::forget(s.go(move || one));
                1
            });
            assert_eq!(drops.get(), 6 - leaked);
        }
    });
}

/// A scoped handle may be joined, or dropped, by another goroutine of the scope.
#[test]
fn scoped_handles_move_between_goroutines() {
    let _w = watchdog();
    runtime(2).run(|| {
        for _ in 0..200 {
            let value = 5;
            let caught = catch_unwind(|| {
                trefoil::scope(|s| {
                    let a = s.go(|| value);
                    let b = s.go(move || a.join().unwrap() + 1);
                    let unhappy = s.go(|| resume_unwind(Box::new(())));
                    s.go(move || drop::<trefoil::ScopedJoinHandle<'_, ()>>(unhappy));
                    assert_eq!(b.join().unwrap(), 6);
                });
            });
            let payload = caught.unwrap_err();
            assert_eq!(payload.downcast_ref(), Some(&"a scoped goroutine panicked"));
        }
    });
}

// --- Plain threads and runtimes ------------------------------------------------------------------

#[test]
fn go_from_plain_threads() {
    let _w = watchdog();
    let sum = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                for i in 0..200 {
                    assert_eq!(trefoil::id(), 0);
                    let h = trefoil::go(move || {
                        assert!(trefoil::id() > 1);
                        i + trefoil::go(|| 1).join().unwrap()
                    });
                    sum.fetch_add(h.join().unwrap(), SeqCst);
                }
            });
        }
    });
    assert_eq!(sum.load(SeqCst), 8 * (199 * 200 / 2 + 200));
    trefoil::yield_now();
}

#[test]
fn run_inside_a_goroutine() {
    let _w = watchdog();
    let value = trefoil::run(|| {
        let outer = trefoil::procs();
        let inner = join_all((0..4).map(|i| {
            trefoil::go(move || {
                let mine = trefoil::id();
                let inner = runtime(3).run(|| {
                    assert_eq!((trefoil::id(), trefoil::procs()), (1, 3));
                    trefoil::go(move || i * 10).join().unwrap()
                });
                assert_eq!(trefoil::id(), mine);
                inner
            })
        }));
        assert_eq!(trefoil::procs(), outer);
        inner
    });
    assert_eq!(value, [0, 10, 20, 30]);
    // Three deep, and the same runtime from inside itself.
    assert_eq!(
        trefoil::run(|| trefoil::run(|| trefoil::run(|| trefoil::go(|| 3).join().unwrap()))),
        3
    );
    let rt = runtime(1);
    assert_eq!(rt.run(|| rt.run(|| rt.run(|| 4))), 4);
}

#[test]
fn run_borrows() {
    let _w = watchdog();
    let mut text = String::from("a");
    runtime(2).run(|| text.push('b'));
    trefoil::run(|| text.push('c'));
    assert_eq!(text, "abc");
}

#[test]
fn several_runtimes_at_once() {
    let _w = watchdog();
    std::thread::scope(|s| {
        for n in 1..=4 {
            s.spawn(move || {
                let rt = runtime(n);
                for _ in 0..20 {
                    rt.run(|| {
                        assert_eq!(trefoil::procs(), n);
                        assert_eq!(trefoil::num_goroutines(), 1);
                        let all = join_all((0..100u64).map(|i| {
                            trefoil::go(move || {
                                trefoil::yield_now();
                                i
                            })
                        }));
                        assert_eq!(all.iter().sum::<u64>(), 4950);
                    });
                }
            });
        }
    });
}

/// Goroutines of two runtimes wait for each other's.
#[test]
fn runtimes_join_each_other() {
    let _w = watchdog();
    let (a, b) = (Arc::new(runtime(2)), Arc::new(runtime(2)));
    fn ping(left: u32, here: Arc<Runtime>, there: Arc<Runtime>) -> u32 {
        if left == 0 {
            return 0;
        }
        let (h, t) = (there.clone(), here.clone());
        there.go(move || ping(left - 1, h, t)).unwrap().join().unwrap() + 1
    }
    let handles: Vec<_> = (0..10)
        .map(|_| {
            let (here, there) = (a.clone(), b.clone());
            a.go(move || ping(50, here, there)).unwrap()
        })
        .collect();
    assert_eq!(join_all(handles), [50; 10]);
}

#[test]
fn two_hundred_runtimes_in_a_row() {
    child_test!();
    let ours = || common::tasks().iter().filter(|(_, n)| n.starts_with("trefoil")).count();
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let round = |i: usize| {
        let rt = runtime(1 + i % 4);
        let sum: usize = rt.run(|| join_all((0..20).map(|n| trefoil::go(move || n))).iter().sum());
        assert_eq!(sum, 190);
    };
    (0..20).for_each(round);
    hold_until("the first threads to end", || ours() == 0);
    let (files_before, rss_before) = (files(), common::rss());
    (0..200).for_each(round);
    hold_until("all threads to end", || ours() == 0);
    assert_eq!(files(), files_before);
    let grown = common::rss().saturating_sub(rss_before);
    assert!(grown < 16 << 20, "200 runtimes left {grown} bytes");
}

/// Threads that begin while those of the runtime before them still end: what one leaves for the next
/// to use again must not point into memory that is freed with its runtime.
#[test]
fn runtimes_come_and_go_quickly() {
    child_test!();
    for i in 0..300 {
        let rt = runtime(1 + i % 4);
        if i % 3 == 0 {
            rt.run(|| trefoil::go(|| ()).join().unwrap());
        }
        drop(rt);
        // The allocator notices a stray write.
        drop(std::hint::black_box(vec![vec![1u8; 700]; 20]));
    }
}

#[test]
fn a_runtime_is_dropped_with_live_goroutines() {
    let _w = watchdog();
    for round in 0..20 {
        let rt = runtime(1 + round % 3);
        let drops = Drops::default();
        let alive = Arc::new(AtomicUsize::new(0));
        let mut handles = Vec::new();
        for _ in 0..3 {
            // Yielding for ever.
            let (here, one) = (alive.clone(), drops.one());
            handles.push(
                rt.go(move || {
                    let _one = one;
                    here.fetch_add(1, SeqCst);
                    loop {
                        trefoil::yield_now();
                    }
                })
                .unwrap(),
            );
            // Parked for ever, behind one that yields.
            let (here, one) = (alive.clone(), drops.one());
            handles.push(
                rt.go(move || {
                    let _one = one;
                    here.fetch_add(1, SeqCst);
                    let endless = trefoil::go(|| {
                        loop {
                            trefoil::yield_now();
                        }
                    });
                    let _: std::thread::Result<()> = endless.join();
                })
                .unwrap(),
            );
        }
        hold_until("all to run", || alive.load(SeqCst) == 6);
        // And some that may never start.
        for _ in 0..300 {
            let one = drops.one();
            handles.push(rt.go(move || drop(one)).unwrap());
        }
        let ended = rt.go(|| ()).unwrap();
        hold_until("one that ended", || ended.is_finished());
        drop(rt);
        // The handles are as good as ever, but for joining what will never end.
        for h in &handles[..6] {
            assert!(!h.is_finished());
            assert!(h.id() > 0);
            assert_eq!(h.name(), None);
        }
        ended.join().unwrap();
        drop(handles);
        assert!(drops.get() <= 300, "what was alive is leaked, not dropped: {}", drops.get());
    }
}

#[test]
fn a_runtime_is_dropped_by_its_own_goroutine() {
    let _w = watchdog();
    for procs in [1, 2, 3] {
        let rt = Arc::new(runtime(procs));
        let gone = Arc::new(AtomicBool::new(false));
        let (own, weak, told) = (rt.clone(), Arc::downgrade(&rt), gone.clone());
        let h = rt
            .go(move || {
                hold_until("the last reference", || Arc::strong_count(&own) == 1);
                drop(own);
                // It goes on until its next scheduling step.
                told.store(weak.upgrade().is_none(), SeqCst);
            })
            .unwrap();
        drop(rt);
        hold_until("the drop", || gone.load(SeqCst));
        drop(h);
    }
}

/// Handles outlive their runtime: results that nobody took yet are taken, or dropped, later.
#[test]
fn handles_outlive_their_runtime() {
    let _w = watchdog();
    let drops = Drops::default();
    let rt = runtime(2);
    let handles: Vec<_> = (0..100)
        .map(|i| {
            let one = drops.one();
            let builder = Builder::new().name(format!("n{i}"));
            rt.run(move || builder.go(move || (i, one)).unwrap())
        })
        .collect();
    hold_until("their end", || handles.iter().all(JoinHandle::is_finished));
    drop(rt);
    std::thread::sleep(Duration::from_millis(5));
    for (i, h) in handles.into_iter().enumerate() {
        assert_eq!(h.name(), Some(&*format!("n{i}")));
        if i % 2 == 0 {
            assert_eq!(h.join().unwrap().0, i);
        }
    }
    assert_eq!(drops.get(), 100);
}

/// `go` on a goroutine uses that goroutine's runtime, not the default one.
#[test]
fn go_stays_in_its_runtime() {
    let _w = watchdog();
    let rt = runtime(3);
    let h = rt.go(|| trefoil::go(|| trefoil::go(trefoil::procs))).unwrap();
    assert_eq!(h.join().unwrap().join().unwrap().join().unwrap(), 3);
    assert!(format!("{rt:?}").contains("procs: 3"), "{rt:?}");
}

// --- The environment -----------------------------------------------------------------------------

#[test]
fn nonsense_in_the_environment_is_named() {
    child_test!(|child| {
        for (name, value, expected) in [
            ("TREFOIL_PROCS", "4x", "TREFOIL_PROCS=4x: expected a whole number from 1 to 1024"),
            ("TREFOIL_PROCS", "-1", "TREFOIL_PROCS=-1: expected a whole number from 1 to 1024"),
            ("GOMAXPROCS", "0", "GOMAXPROCS=0: expected a whole number from 1 to 1024"),
            ("GOMAXPROCS", "1025", "GOMAXPROCS=1025: expected a whole number from 1 to 1024"),
            (
                "TREFOIL_DEBUG",
                "schedtrace=often",
                "TREFOIL_DEBUG=schedtrace=often: expected schedtrace=MILLISECONDS",
            ),
            ("TREFOIL_DEBUG", "colour=red", "unknown key colour"),
        ] {
            let stderr = child.env(name, value).succeed();
            let line = |start| stderr.lines().find(|line| line.starts_with(start)).unwrap_or("");
            assert!(line("build: ").contains(expected), "{name}={value}:\n{stderr}");
            assert!(line("run: trefoil cannot start: ").contains(expected), "{stderr}");
        }
    });
    let error = Runtime::builder().build().unwrap_err();
    mark(&format!("build: {error}"));
    let panic = catch_unwind(|| trefoil::run(|| ())).unwrap_err();
    mark(&format!("run: {}", panic.downcast_ref::<String>().unwrap()));
}

#[test]
fn nonsense_in_the_builder_is_an_error() {
    let _w = watchdog();
    for n in [0, 1025, usize::MAX] {
        let error = Runtime::builder().procs(n).build().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        assert_eq!(error.to_string(), format!("procs({n}): expected a number from 1 to 1024"));
    }
}

// --- The attributes ------------------------------------------------------------------------------

#[trefoil::test]
fn attribute_test() {
    assert_eq!(trefoil::id(), 1);
}

#[trefoil::test(procs = 3)]
fn attribute_test_with_procs() -> Result<(), Box<dyn std::error::Error>> {
    assert_eq!(trefoil::procs(), 3);
    let n: u32 = trefoil::go(|| "42").join().unwrap().parse()?;
    assert_eq!(n, 42);
    Ok(())
}

#[trefoil::test]
#[should_panic(expected = "off the end")]
fn attribute_test_that_panics() {
    panic!("off the end");
}

mod mains {
    #[trefoil::main]
    pub(super) fn good() -> Result<(), Box<dyn std::error::Error>> {
        assert_eq!(trefoil::id(), 1);
        Ok(())
    }

    #[trefoil::main(procs = 2)]
    pub(super) fn bad() -> Result<(), String> {
        Err(format!("with {} procs", trefoil::procs()))
    }
}

#[test]
fn attribute_main_returns_exit_codes() {
    child_test!(|child| {
        let stderr = child.succeed();
        assert!(stderr.contains("Error: \"with 2 procs\""), "{stderr}");
    });
    assert_eq!(mains::good(), ExitCode::SUCCESS);
    assert_eq!(mains::bad(), ExitCode::FAILURE);
}
