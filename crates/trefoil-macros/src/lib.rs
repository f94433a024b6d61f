//! The attributes of trefoil: `#[trefoil::main]` and `#[trefoil::test]`.
//!
//! Use them through the `trefoil` crate, which re-exports both.
//!
//! | file | content |
//! |---|---|
//! | `lib.rs` | the two attributes |
//! | `options.rs` | parses the options in their parentheses |
//! | `function.rs` | the function under an attribute, in its parts |
//! | `expand.rs` | the function that takes its place |
//! | `error.rs` | errors in the user's code |
//! | `tokens.rs` | recognises and makes tokens |
//!
//! The attributes are parsed by hand. They accept such a small part of the grammar that `syn` would
//! cost every user more to build than these lines cost to read.

mod error;
mod expand;
mod function;
mod options;
mod tokens;

use proc_macro::{Delimiter, TokenStream, TokenTree};

use error::Error;
use expand::expand;
use function::{Function, name_of};
use options::Options;
use tokens::{group, ident};

/// Runs the function as the main goroutine of a new runtime. Put it on `main`.
///
/// The program ends when the function returns; other goroutines are not waited for, as in Go. The
/// function may have every return type of a plain `main`. An `Err` is printed as `Error: …`, and
/// the process exits with code 1. The error need not be `Send` (`Box<dyn Error>`).
///
/// ```standalone_crate
/// # extern crate self as trefoil;
/// # pub use trefoil_macros::main;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T {
/// #     std::thread::scope(|s| s.spawn(f).join().unwrap())
/// # }
/// #[trefoil::main]
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let n: u32 = "42".parse()?;
///     println!("{n}");
///     Ok(())
/// }
/// ```
///
/// # Options
///
/// `procs = N` sets how many goroutines run at the same time, 1 to 1024. `N` may be any expression
/// of type `usize`. Without the option, the number is `TREFOIL_PROCS`, else `GOMAXPROCS`, else the
/// number of CPUs and the CPU quota of the cgroup decide.
///
/// ```standalone_crate
/// # extern crate self as trefoil;
/// # pub use trefoil_macros::main;
/// # pub struct Runtime(usize);
/// # impl Runtime {
/// #     pub fn builder() -> Runtime { Runtime(0) }
/// #     pub fn procs(self, n: usize) -> Runtime { Runtime(n) }
/// #     pub fn build(self) -> std::io::Result<Runtime> { Ok(self) }
/// #     pub fn run<T: Send>(self, f: impl FnOnce() -> T + Send) -> T { f() }
/// # }
/// #[trefoil::main(procs = 4)]
/// fn main() {
///     println!("on four Ps");
/// }
/// ```
///
/// `tokio` runs an `async` function on tokio's own runtime, whose threads are goroutines. It needs
/// the feature `tokio` of trefoil. `workers = N` sets how many of those goroutines poll tasks;
/// without it, there are 8 per P, at least 32.
///
/// ```standalone_crate
/// # extern crate self as trefoil;
/// # pub use trefoil_macros::main;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// # #[macro_export]
/// # macro_rules! __tokio_main { ($w:expr, $f:expr) => {{ let _: Option<usize> = $w; drop($f) }} }
/// #[trefoil::main(tokio, workers = 64)]
/// async fn main() {
///     println!("tokio::spawn, reqwest and axum::serve work here");
/// }
/// ```
///
/// # Panics
///
/// The outer function panics if the function panics, and if the runtime cannot start.
///
/// # Errors
///
/// The compiler reports an error if the attribute is not on a function, if the function has
/// arguments or generics, if it is `const`, `unsafe` or `extern`, or if an option is unknown or out
/// of range. The function is `async` if and only if the option `tokio` is given: a goroutine may
/// block, so it has nothing to await.
///
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// #[trefoil_macros::main]
/// async fn main() {}
/// ```
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// # #[macro_export]
/// # macro_rules! __tokio_main { ($w:expr, $f:expr) => { drop($f) } }
/// #[trefoil_macros::main(tokio)]
/// fn main() {}
/// ```
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// #[trefoil_macros::main]
/// fn main(args: Vec<String>) {}
/// ```
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// # pub struct Runtime;
/// # impl Runtime {
/// #     pub fn builder() -> Runtime { Runtime }
/// #     pub fn procs(self, _: usize) -> Runtime { self }
/// #     pub fn build(self) -> std::io::Result<Runtime> { Ok(self) }
/// #     pub fn run<T: Send>(self, f: impl FnOnce() -> T + Send) -> T { f() }
/// # }
/// #[trefoil_macros::main(procs = 0)]
/// fn main() {}
/// ```
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// #[trefoil_macros::main(threads = 4)]
/// fn main() {}
/// ```
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// #[trefoil_macros::main]
/// struct Main;
/// # fn main() {}
/// ```
#[proc_macro_attribute]
pub fn main(options: TokenStream, item: TokenStream) -> TokenStream {
    attribute(Kind::Main, options, item)
}

/// Makes the function a test that runs as the main goroutine of its own runtime.
///
/// Do not add `#[test]`: the attribute adds it. `#[ignore]`, `#[should_panic]` and other attributes
/// keep their meaning. A test may return a `Result`, and fails if it returns an `Err`.
///
/// ```no_run
/// # extern crate self as trefoil;
/// # pub use trefoil_macros::test;
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// # pub struct Runtime;
/// # impl Runtime {
/// #     pub fn builder() -> Runtime { Runtime }
/// #     pub fn procs(self, _: usize) -> Runtime { self }
/// #     pub fn build(self) -> std::io::Result<Runtime> { Ok(self) }
/// #     pub fn run<T: Send>(self, f: impl FnOnce() -> T + Send) -> T { f() }
/// # }
/// #[trefoil::test]
/// fn parses() -> Result<(), std::num::ParseIntError> {
///     assert_eq!("42".parse::<u32>()?, 42);
///     Ok(())
/// }
///
/// #[trefoil::test(procs = 1)]
/// #[should_panic(expected = "off the end")]
/// fn on_one_p() {
///     panic!("off the end");
/// }
/// # fn main() {}
/// ```
///
/// `leaks = "deny"` makes the test fail if goroutines or tasks are left when it returns: each test
/// has a runtime of its own, so other tests that run at the same time do not matter. A goroutine
/// that is about to end has time to do so. The message has the id and the name of each, where it
/// was created, and where it waits.
///
/// ```no_run
/// # extern crate self as trefoil;
/// # pub use trefoil_macros::test;
/// # pub mod debug { pub fn deny_leaks<T>(f: impl FnOnce() -> T) -> T { f() } }
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// #[trefoil::test(leaks = "deny")]
/// fn ends_what_it_starts() {
///     assert_eq!(6 * 7, 42);
/// }
/// # fn main() {}
/// ```
///
/// `virtual_time` runs the test in a simulation: sleeps and timeouts take no real time, and the
/// test fails if goroutines are left.
///
/// ```no_run
/// # extern crate self as trefoil;
/// # pub use trefoil_macros::test;
/// # pub mod sim { pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() } }
/// use std::time::{Duration, Instant};
///
/// #[trefoil::test(virtual_time)]
/// fn an_hour_takes_no_time() {
///     let begin = Instant::now();
///     std::thread::sleep(Duration::from_secs(3600));
///     assert_eq!(begin.elapsed(), Duration::from_secs(3600));
/// }
/// # fn main() {}
/// ```
///
/// The other options and the compile errors are the same as for [`main`][macro@main].
///
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub mod sim { pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() } }
/// #[trefoil_macros::test(virtual_time, procs = 2)] // a simulation has one P
/// fn on_two() {}
/// # fn main() {}
/// ```
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub mod debug { pub fn deny_leaks<T>(f: impl FnOnce() -> T) -> T { f() } }
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// #[trefoil_macros::main(leaks = "deny")] // an option of tests only
/// fn main() {}
/// ```
/// ```compile_fail,standalone_crate
/// # extern crate self as trefoil;
/// # pub mod debug { pub fn deny_leaks<T>(f: impl FnOnce() -> T) -> T { f() } }
/// # pub fn run<T: Send>(f: impl FnOnce() -> T + Send) -> T { f() }
/// #[trefoil_macros::test(leaks = "allow")] // unknown value
/// fn leaks() {}
/// # fn main() {}
/// ```
#[proc_macro_attribute]
pub fn test(options: TokenStream, item: TokenStream) -> TokenStream {
    attribute(Kind::Test, options, item)
}

/// One of the two attributes.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Main,
    Test,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Main => "#[trefoil::main]",
            Kind::Test => "#[trefoil::test]",
        }
    }
}

fn attribute(kind: Kind, options: TokenStream, item: TokenStream) -> TokenStream {
    let name = name_of(item.clone());
    let expanded = Options::parse(options).and_then(|options| {
        if let (Some(span), true) = (options.deny_leaks, kind == Kind::Main) {
            return Err(Error::new(span, "`leaks` is an option of `#[trefoil::test]`"));
        }
        if let (Some(span), true) = (options.virtual_time, kind == Kind::Main) {
            return Err(Error::new(span, "`virtual_time` is an option of `#[trefoil::test]`"));
        }
        let function = Function::parse(kind, options.tokio.is_some(), item)?;
        Ok(expand(kind, options, function))
    });
    match expanded {
        Ok(tokens) => tokens,
        Err(error) => {
            // An empty function of that name avoids a second error, "`main` function not found".
            let mut out = error.into_tokens();
            if let (Kind::Main, Some(name)) = (kind, name) {
                let span = name.span();
                out.extend([
                    ident("fn", span),
                    TokenTree::Ident(name),
                    group(Delimiter::Parenthesis, TokenStream::new(), span),
                    group(Delimiter::Brace, TokenStream::new(), span),
                ]);
            }
            out
        }
    }
}
