//! Panics of goroutines: where they end up, and what is printed.

use crate::common::{child_test, mark, runtime, watchdog};
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any, resume_unwind};
use std::sync::{Arc, Mutex};
use trefoil::{Builder, JoinHandle, PanicMode, Runtime};

#[test]
fn join_returns_the_panic_payload() {
    let _watchdog = watchdog();
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
        // Neither this goroutine nor the next one on the same stack is panicking.
        assert!(!std::thread::panicking());
        assert!(!trefoil::go(std::thread::panicking).join().unwrap());
    });
}

#[test]
fn run_resumes_the_panic_of_the_main_goroutine() {
    let _watchdog = watchdog();
    let rt = runtime(2);
    let caught = catch_unwind(AssertUnwindSafe(|| rt.run(|| resume_unwind(Box::new(5u8)))));
    assert_eq!(caught.unwrap_err().downcast_ref(), Some(&5u8));
    assert_eq!(rt.run(|| 6), 6, "the runtime must still work");
}

#[test]
fn panic_messages_name_the_goroutine() {
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
            assert!(first.contains("tests/api/panics.rs:") && first.ends_with(':'), "{first}");
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
fn a_panic_in_abort_mode_exits_with_2() {
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
        // One goroutine with the other mode.
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

/// Joins its goroutine when it is dropped during unwinding.
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
fn a_goroutine_may_park_while_it_unwinds() {
    let _watchdog = watchdog();
    for procs in [1, 3] {
        runtime(procs).run(|| {
            let inner: Arc<Mutex<Vec<bool>>> = Arc::default();
            let handles: Vec<_> = (0..20u32)
                .map(|i| {
                    let inner = inner.clone();
                    trefoil::go(move || {
                        // The goroutine that is joined during unwinding panics and catches by
                        // itself, yields, and is not `panicking`.
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
