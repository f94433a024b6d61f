//! The attributes, expanded by the compiler and run.
//!
//! `extern crate self as trefoil` makes this file the `::trefoil` that the expansion names, with a
//! runtime over one OS thread: the macro crate sits below trefoil and cannot depend on it.

extern crate self as trefoil;

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

use trefoil_macros as attributes;

/// The `procs` of the last runtime that was built. Only one test builds a runtime with `procs`.
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

/// Polls the future once, and returns its value. `__tokio_main` has no runtime of tokio's here.
fn poll_once<F: Future>(future: F) -> F::Output {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match std::pin::pin!(future).poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("the future waits"),
    }
}

thread_local! {
    /// The `workers` of the last function with the option `tokio` on this thread.
    static WORKERS: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// Stands for trefoil's macro of that name.
#[macro_export]
macro_rules! __tokio_main {
    ($workers:expr, $future:expr) => {{
        $crate::WORKERS.set($workers);
        $crate::poll_once($future)
    }};
}

/// Returns true on the thread that stands for a goroutine, and false on the thread of the harness.
fn on_goroutine() -> bool {
    std::thread::current().name() == Some("goroutine")
}

#[attributes::test]
fn a_test_without_a_result_runs_on_a_goroutine() {
    assert!(on_goroutine());
}

/// A doc comment is an attribute, too.
#[attributes::test]
#[allow(unused_variables)]
pub(crate) fn attributes_and_visibility_are_kept() {
    #![allow(unused_mut)]
    let mut unused = 1;
    assert!(on_goroutine());
}

#[attributes::test]
fn the_result_need_not_be_send() -> Result<(), Box<dyn std::error::Error>> {
    assert!(on_goroutine());
    let n: u32 = "42".parse()?;
    assert_eq!(n, 42);
    Ok(())
}

#[attributes::test]
fn the_result_may_be_an_impl_trait() -> impl std::process::Termination {
    assert!(on_goroutine());
    ExitCode::SUCCESS
}

#[attributes::test]
#[should_panic(expected = "off the end")]
fn a_panic_fails_the_test() {
    panic!("off the end");
}

#[attributes::test]
#[ignore = "checks that the attribute is kept"]
fn an_ignored_test_does_not_run() {
    unreachable!();
}

const THREE: usize = 3;

#[attributes::test(procs = THREE)]
fn procs_may_be_an_expression() {
    assert!(on_goroutine());
    assert_eq!(PROCS.load(Ordering::Relaxed), 3);
}

#[attributes::test(tokio)]
async fn an_async_test_runs_on_a_goroutine() {
    assert!(on_goroutine());
    assert_eq!(WORKERS.get(), None);
    std::future::ready(()).await;
}

#[attributes::test(procs = THREE, tokio, workers = 2 * THREE)]
pub(crate) async fn an_async_test_takes_workers_and_returns_a_result() -> Result<(), String> {
    assert!(on_goroutine());
    assert_eq!(WORKERS.get(), Some(6));
    "42".parse::<u32>().map_err(|e| e.to_string())?;
    Ok(())
}

// The test below calls these functions, because a test that fails would fail the harness.
mod called {
    #[super::attributes::main]
    pub(super) fn fails() -> Result<(), String> {
        Err("as it should".into())
    }

    #[super::attributes::main(tokio)]
    pub(super) async fn fails_on_tokio() -> Result<(), String> {
        Err("as it should".into())
    }

    #[super::attributes::main]
    pub(super) fn early() -> Result<(), Box<dyn std::error::Error>> {
        assert!(super::on_goroutine());
        if super::on_goroutine() {
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
    assert_eq!(called::fails_on_tokio(), ExitCode::FAILURE);
    assert_eq!(called::early(), ExitCode::SUCCESS);
    assert_eq!(called::code(), ExitCode::from(7));
    assert!(std::panic::catch_unwind(|| called::never()).is_err());
}

// Tokens that come from a macro are in invisible groups.
macro_rules! tests {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident() -> $ty:ty $body:block)*) => {
        $(#[attributes::test] $(#[$meta])* $vis fn $name() -> $ty $body)*
    };
    ($item:item) => { #[attributes::test] $item };
}

tests! {
    /// Documented.
    pub fn from_a_macro() -> Result<(), String> { Ok(()) }
    fn from_a_macro_without_visibility() -> () { assert!(on_goroutine()) }
}
tests! { fn from_an_item() { assert!(on_goroutine()) } }
