//! The attributes, expanded by the compiler and run.
//!
//! `extern crate self as trefoil` makes this file the `::trefoil` that the expansion names, with a
//! runtime over one OS thread: the macro crate sits below trefoil and cannot depend on it.

extern crate self as trefoil;

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

use trefoil_macros as attributes;

/// The `procs` of the last runtime that was built; each test that looks is the only one to build.
static PROCS: AtomicUsize = AtomicUsize::new(0);

fn run<F: FnOnce() -> T + Send, T: Send>(f: F) -> T {
    std::thread::scope(|s| {
        let thread = std::thread::Builder::new().name("goroutine".into());
        match thread.spawn_scoped(s, f).unwrap().join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

struct Runtime;

impl Runtime {
    fn builder() -> Runtime {
        Runtime
    }
    fn procs(self, n: usize) -> Runtime {
        PROCS.store(n, Ordering::Relaxed);
        self
    }
    fn build(self) -> std::io::Result<Runtime> {
        Ok(self)
    }
    fn run<F: FnOnce() -> T + Send, T: Send>(self, f: F) -> T {
        run(f)
    }
}

/// True in the stand-in's goroutine, false in the harness's thread.
fn inside() -> bool {
    std::thread::current().name() == Some("goroutine")
}

#[attributes::test]
fn unit() {
    assert!(inside());
}

/// A doc comment is an attribute, too.
#[attributes::test]
#[allow(unused_variables)]
pub(crate) fn with_attributes_and_visibility() {
    #![allow(unused_mut)]
    let mut unused = 1;
    assert!(inside());
}

#[attributes::test]
fn ok_that_is_not_send() -> Result<(), Box<dyn std::error::Error>> {
    assert!(inside());
    let n: u32 = "42".parse()?;
    assert_eq!(n, 42);
    Ok(())
}

#[attributes::test]
fn impl_termination() -> impl std::process::Termination {
    assert!(inside());
    ExitCode::SUCCESS
}

#[attributes::test]
#[should_panic(expected = "off the end")]
fn panics() {
    panic!("off the end");
}

#[attributes::test]
#[ignore = "is there to be ignored"]
fn ignored() {
    unreachable!();
}

const THREE: usize = 3;

#[attributes::test(procs = THREE)]
fn options() {
    assert!(inside());
    assert_eq!(PROCS.load(Ordering::Relaxed), 3);
}

// What the harness gets from a test that fails is not a test of its own: call it.
mod called {
    #[super::attributes::main]
    pub(super) fn fails() -> Result<(), String> {
        Err("as it should".into())
    }

    #[super::attributes::main]
    pub(super) fn early() -> Result<(), Box<dyn std::error::Error>> {
        assert!(super::inside());
        if super::inside() {
            return Ok(());
        }
        Err("not here".into())
    }

    #[super::attributes::main]
    pub(super) fn code() -> std::process::ExitCode {
        std::process::ExitCode::from(7)
    }

    #[super::attributes::main]
    pub(super) fn never() -> ! {
        panic!("never")
    }
}

#[test]
fn results_become_exit_codes() {
    assert_eq!(called::fails(), ExitCode::FAILURE);
    assert_eq!(called::early(), ExitCode::SUCCESS);
    assert_eq!(called::code(), ExitCode::from(7));
    assert!(std::panic::catch_unwind(|| called::never()).is_err());
}

// Tokens that went through a macro come in invisible groups.
macro_rules! tests {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident() -> $ty:ty $body:block)*) => {
        $(#[attributes::test] $(#[$meta])* $vis fn $name() -> $ty $body)*
    };
    ($item:item) => { #[attributes::test] $item };
}

tests! {
    /// Documented.
    pub fn from_a_macro() -> Result<(), String> { Ok(()) }
    fn from_a_macro_without_visibility() -> () { assert!(inside()) }
}
tests! { fn from_an_item() { assert!(inside()) } }
