//! The environment, the builder and the attributes.

use crate::common::{child_test, mark, watchdog};
use std::panic::catch_unwind;
use std::process::ExitCode;
use trefoil::Runtime;

#[test]
fn invalid_environment_variables_are_reported() {
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
fn builder_rejects_an_invalid_number_of_procs() {
    let _watchdog = watchdog();
    for n in [0, 1025, usize::MAX] {
        let error = Runtime::builder().procs(n).build().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        assert_eq!(error.to_string(), format!("procs({n}): expected a number from 1 to 1024"));
    }
}

#[trefoil::test]
fn test_attribute_runs_the_test_as_the_main_goroutine() {
    assert_eq!(trefoil::id(), 1);
}

#[trefoil::test(procs = 3)]
fn test_attribute_sets_procs_and_returns_errors() -> Result<(), Box<dyn std::error::Error>> {
    assert_eq!(trefoil::procs(), 3);
    let n: u32 = trefoil::go(|| "42").join().unwrap().parse()?;
    assert_eq!(n, 42);
    Ok(())
}

#[trefoil::test]
#[should_panic(expected = "off the end")]
fn test_attribute_passes_panics_on() {
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
fn main_attribute_returns_exit_codes() {
    child_test!(|child| {
        let stderr = child.succeed();
        assert!(stderr.contains("Error: \"with 2 procs\""), "{stderr}");
    });
    assert_eq!(mains::good(), ExitCode::SUCCESS);
    assert_eq!(mains::bad(), ExitCode::FAILURE);
}

#[test]
fn stack_size_and_dlopen_reserve_are_independent_settings() {
    child_test!();
    let build = |builder: trefoil::RuntimeBuilder| builder.build().map(|rt| rt.run(|| ()));
    build(Runtime::builder().stack_size(1 << 20)).unwrap();
    // Each of these sets one value, which is the one that is in force.
    build(Runtime::builder().dlopen_reserve(false)).unwrap();
    build(Runtime::builder().stack_size(1 << 20)).unwrap();
    for other in [Runtime::builder().dlopen_reserve(true), Runtime::builder().stack_size(1 << 21)] {
        assert_eq!(build(other).unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
    }
    build(Runtime::builder().stack_size(1 << 20).dlopen_reserve(false)).unwrap();
}

#[test]
fn environment_sets_the_dlopen_reserve_that_builders_leave_out() {
    child_test!(|child| {
        child.env("TREFOIL_DLOPEN_RESERVE", "1").succeed();
        let error = child.env("TREFOIL_DLOPEN_RESERVE", "maybe").fail(101);
        assert!(error.contains("TREFOIL_DLOPEN_RESERVE=maybe: expected 0 or 1"), "{error}");
    });
    Runtime::builder().build().unwrap().run(|| ());
    Runtime::builder().dlopen_reserve(true).build().unwrap().run(|| ());
    let error = Runtime::builder().dlopen_reserve(false).build().unwrap_err();
    assert!(error.to_string().contains("on the first runtime"), "{error}");
}
