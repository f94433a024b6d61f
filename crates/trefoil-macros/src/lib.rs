//! The attributes of trefoil: `#[trefoil::main]` and `#[trefoil::test]`.
//!
//! Use them through the `trefoil` crate, which re-exports both.
//!
//! An attribute keeps the function as it was written and puts it inside a plain function of the
//! same name. The outer function starts the runtime and runs the inner function as the main
//! goroutine:
//!
//! ```text
//! #[trefoil::main]                           fn main() -> ::std::process::ExitCode {
//! fn main() -> Result<(), E> {                   fn main() -> Result<(), E> { BODY }
//!     BODY                            =>         ::trefoil::run(|| {
//! }                                                  ::std::process::Termination::report(main())
//!                                                })
//!                                            }
//! ```
//!
//! - The body becomes an inner function, not a closure. So every return type is possible (`impl
//!   Termination` too), inner attributes stay legal, and the compiler's messages point at the
//!   user's own tokens.
//! - `report` runs inside the goroutine, because a `Result<(), Box<dyn Error>>` is not `Send` and
//!   an `ExitCode` is. It prints `Error: …` as std does. The test harness accepts an `ExitCode`,
//!   too.
//! - With the option `tokio` the inner function is `async`, and `main()` above is
//!   `::trefoil::__tokio_main!(WORKERS, main())`: a macro, so that trefoil can say that its feature
//!   is missing.
//! - The attributes are parsed by hand. They accept such a small part of the grammar that `syn`
//!   would cost every user more to build than these lines cost to read.

use std::iter::Peekable;
use std::vec::IntoIter;

use proc_macro::{Delimiter, Group, Ident, Literal, Punct, Spacing, Span, TokenStream, TokenTree};

/// The largest number of Ps; the runtime has the same limit.
const MAX_PROCS: u128 = 1024;
/// The largest number of tokio's workers that the attribute accepts.
const MAX_WORKERS: u128 = 32_768;

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
/// that is about to end has time to do so. The message has the id and the name of each, where it was
/// created, and where it waits.
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
/// `virtual_time` runs the test in a simulation: sleeps and timeouts take no real time, and the test
/// fails if goroutines are left.
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

/// An error in the user's code, with its place.
struct Error {
    span: Span,
    message: String,
}

impl Error {
    fn new(span: Span, message: impl Into<String>) -> Error {
        Error { span, message: message.into() }
    }

    /// Returns `::core::compile_error!("message");` at the span.
    fn into_tokens(self) -> TokenStream {
        let mut text = Literal::string(&self.message);
        text.set_span(self.span);
        let mut out = path(&["core", "compile_error"], self.span);
        out.extend([
            punct('!', Spacing::Alone, self.span),
            group(Delimiter::Parenthesis, TokenStream::from(TokenTree::Literal(text)), self.span),
            punct(';', Spacing::Alone, self.span),
        ]);
        out
    }
}

type Result<T> = std::result::Result<T, Error>;

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

/// Returns the word after the first `fn`.
fn name_of(item: TokenStream) -> Option<Ident> {
    let mut tokens = flat(item);
    tokens.find(|t| is_word(t, "fn"))?;
    match tokens.next() {
        Some(TokenTree::Ident(name)) => Some(name),
        _ => None,
    }
}

// --- Options -----------------------------------------------------------------------------------

/// The options in the parentheses of the attribute.
#[derive(Default)]
struct Options {
    procs: Option<TokenStream>,
    /// Where `tokio` stands, if it is given.
    tokio: Option<Span>,
    workers: Option<(Span, TokenStream)>,
    /// Where `leaks = "deny"` stands, if it is given.
    deny_leaks: Option<Span>,
    /// Where `virtual_time` stands, if it is given.
    virtual_time: Option<Span>,
}

impl Options {
    fn parse(tokens: TokenStream) -> Result<Options> {
        let mut options = Options::default();
        let mut tokens = tokens.into_iter().peekable();
        while let Some(key) = tokens.next() {
            let (span, word) = (key.span(), key.to_string());
            let is_twice = match word.as_str() {
                "procs" => options.procs.is_some(),
                "tokio" => options.tokio.is_some(),
                "workers" => options.workers.is_some(),
                "leaks" => options.deny_leaks.is_some(),
                "virtual_time" => options.virtual_time.is_some(),
                _ => {
                    let known = "the options are `procs = N`, `tokio`, `workers = N`, and \
                                 `leaks = \"deny\"` or `virtual_time` for a test";
                    return Err(Error::new(span, format!("unknown option `{word}`: {known}")));
                }
            };
            if is_twice {
                return Err(Error::new(span, format!("`{word}` is given twice")));
            }
            match word.as_str() {
                "procs" => options.procs = Some(Self::value(&word, span, &mut tokens)?),
                "workers" => {
                    options.workers = Some((span, Self::value(&word, span, &mut tokens)?));
                }
                "leaks" => {
                    let message = "`leaks` takes one value: `leaks = \"deny\"`";
                    let is_assigned = tokens.next_if(|t| is_punct(t, '=')).is_some();
                    let value = tokens.next().map(|t| t.to_string());
                    let is_end = tokens.next().is_none_or(|t| is_punct(&t, ','));
                    if !is_assigned || value.as_deref() != Some("\"deny\"") || !is_end {
                        return Err(Error::new(span, message));
                    }
                    options.deny_leaks = Some(span);
                }
                _ => {
                    let option = match word.as_str() {
                        "tokio" => &mut options.tokio,
                        _ => &mut options.virtual_time,
                    };
                    *option = Some(span);
                    if tokens.next().is_some_and(|t| !is_punct(&t, ',')) {
                        return Err(Error::new(span, format!("`{word}` takes no value")));
                    }
                }
            }
        }
        if let (Some((span, _)), None) = (&options.workers, options.tokio) {
            let message = "`workers` is a setting of tokio's runtime: add the option `tokio`";
            return Err(Error::new(*span, message));
        }
        if let (Some(span), Some(_)) = (options.deny_leaks, options.tokio) {
            let message = "`leaks` does not know the tasks of tokio: remove `tokio` or `leaks`";
            return Err(Error::new(span, message));
        }
        if let Some(span) = options.virtual_time {
            let other = [
                (options.procs.is_some(), "`procs`: a simulation has one P"),
                (options.tokio.is_some(), "`tokio`: its own timers are not simulated"),
                (options.deny_leaks.is_some(), "`leaks`: a simulation always reports them"),
            ];
            if let Some((_, why)) = other.into_iter().find(|(is_given, _)| *is_given) {
                let message = format!("`virtual_time` cannot be used with {why}");
                return Err(Error::new(span, message));
            }
        }
        Ok(options)
    }

    /// Takes `=` and the tokens up to the next comma: any expression. A number is checked.
    fn value(
        word: &str,
        key: Span,
        tokens: &mut Peekable<impl Iterator<Item = TokenTree>>,
    ) -> Result<TokenStream> {
        let missing = || Error::new(key, format!("`{word}` needs a value: `{word} = 4`"));
        if tokens.next_if(|t| is_punct(t, '=')).is_none() {
            return Err(missing());
        }
        let mut value = Vec::new();
        while let Some(token) = tokens.next_if(|t| !is_punct(t, ',')) {
            value.push(token);
        }
        tokens.next();
        match value.as_slice() {
            [] => return Err(missing()),
            [TokenTree::Literal(number)] if !is_in_range(word, &number.to_string()) => {
                let most = if word == "procs" { MAX_PROCS } else { MAX_WORKERS };
                let message = format!("`{word}` takes a whole number from 1 to {most}");
                return Err(Error::new(number.span(), message));
            }
            _ => {}
        }
        Ok(value.into_iter().collect())
    }
}

/// Returns whether a literal is a valid value of the option `word`.
fn is_in_range(word: &str, literal: &str) -> bool {
    let most = if word == "procs" { MAX_PROCS } else { MAX_WORKERS };
    number_of(literal).is_some_and(|n| (1..=most).contains(&n))
}

/// Returns the value of a literal of type `usize`, as written in the source.
fn number_of(literal: &str) -> Option<u128> {
    let digits = literal.replace('_', "");
    let digits = digits.strip_suffix("usize").unwrap_or(&digits);
    let value = match digits.get(..2) {
        Some("0x") => u128::from_str_radix(&digits[2..], 16),
        Some("0o") => u128::from_str_radix(&digits[2..], 8),
        Some("0b") => u128::from_str_radix(&digits[2..], 2),
        _ => digits.parse(),
    };
    value.ok()
}

// --- The function ------------------------------------------------------------------------------

/// The parts of `#[…] pub async fn name() -> Ret { … }`.
struct Function {
    attributes: TokenStream,
    visibility: TokenStream,
    /// The word `async`, which the option `tokio` requires.
    asynchronous: Option<TokenTree>,
    keyword: TokenTree,
    name: Ident,
    arguments: Group,
    /// The type after `->`, if there is one.
    output: Option<TokenStream>,
    body: Group,
}

impl Function {
    fn parse(kind: Kind, on_tokio: bool, item: TokenStream) -> Result<Function> {
        let mut tokens = flat(item);
        let attributes = Self::attributes(kind, &mut tokens)?;
        let visibility = Self::visibility(&mut tokens);
        let asynchronous = if on_tokio { tokens.next_if(|t| is_word(t, "async")) } else { None };
        let keyword = Self::keyword(kind, &mut tokens)?;
        if on_tokio && asynchronous.is_none() {
            let message = "the option `tokio` needs an `async fn`: add `async`, or remove `tokio`";
            return Err(Error::new(keyword.span(), message));
        }
        let name = match tokens.next() {
            Some(TokenTree::Ident(name)) => name,
            _ => return Err(not_a_function(kind, keyword.span())),
        };
        if let Some(angle) = tokens.next_if(|t| is_punct(t, '<')) {
            return Err(Error::new(angle.span(), format!("{} takes no generics", kind.name())));
        }
        let arguments = match tokens.next() {
            Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Parenthesis => g,
            _ => return Err(not_a_function(kind, name.span())),
        };
        if !arguments.stream().is_empty() {
            let message = format!("the function of {} takes no arguments", kind.name());
            return Err(Error::new(arguments.span(), message));
        }
        let (output, body) = Self::output_and_body(kind, &name, tokens)?;
        Ok(Function {
            attributes,
            visibility,
            asynchronous,
            keyword,
            name,
            arguments,
            output,
            body,
        })
    }

    fn attributes(kind: Kind, tokens: &mut Tokens) -> Result<TokenStream> {
        let mut attributes = TokenStream::new();
        while let Some(hash) = tokens.next_if(|t| is_punct(t, '#')) {
            let Some(TokenTree::Group(meta)) = tokens.next() else {
                return Err(not_a_function(kind, hash.span()));
            };
            let mut words = flat(meta.stream());
            if kind == Kind::Test
                && words.next().is_some_and(|t| is_word(&t, "test"))
                && words.next().is_none()
            {
                let message = "remove this: `#[trefoil::test]` makes the function a test already";
                return Err(Error::new(meta.span(), message));
            }
            attributes.extend([hash, TokenTree::Group(meta)]);
        }
        Ok(attributes)
    }

    fn visibility(tokens: &mut Tokens) -> TokenStream {
        let mut visibility = TokenStream::new();
        // The `$vis` of a macro comes in an invisible group, which may be empty.
        if let Some(group) = tokens.next_if(|t| is_group(t, Delimiter::None)) {
            visibility.extend([group]);
        } else if let Some(word) = tokens.next_if(|t| is_word(t, "pub")) {
            visibility.extend([word]);
            visibility.extend(tokens.next_if(|t| is_group(t, Delimiter::Parenthesis)));
        }
        visibility
    }

    /// Takes `fn`. Any keyword before it is an error.
    fn keyword(kind: Kind, tokens: &mut Tokens) -> Result<TokenTree> {
        let Some(token) = tokens.next() else {
            return Err(not_a_function(kind, Span::call_site()));
        };
        let TokenTree::Ident(word) = &token else {
            return Err(not_a_function(kind, token.span()));
        };
        let refused = match word.to_string().as_str() {
            "fn" => return Ok(token),
            "async" => {
                "goroutines need no async: remove it, or add the option `tokio` to run the \
                 function on tokio's runtime"
            }
            // `const X: …` and `unsafe impl …` begin other items.
            "const" | "unsafe" | "extern" if tokens.clone().any(|t| is_word(&t, "fn")) => {
                "a plain `fn` is needed here: remove this word"
            }
            _ => return Err(not_a_function(kind, token.span())),
        };
        Err(Error::new(token.span(), refused))
    }

    fn output_and_body(
        kind: Kind,
        name: &Ident,
        mut tokens: Tokens,
    ) -> Result<(Option<TokenStream>, Group)> {
        let arrow = tokens.next_if(|t| is_punct(t, '-')).and_then(|_| tokens.next());
        let mut rest: Vec<TokenTree> = tokens.collect();
        let body = match rest.pop() {
            Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Brace => Some(g),
            // The `$body:block` of a macro comes in an invisible group.
            Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::None => {
                match flat(g.stream()).next() {
                    Some(TokenTree::Group(g)) if g.delimiter() == Delimiter::Brace => Some(g),
                    _ => None,
                }
            }
            _ => None,
        };
        let Some(body) = body else {
            return Err(Error::new(name.span(), "the function needs a body"));
        };
        if let Some(bounds) = rest.iter().find(|t| is_word(t, "where")) {
            return Err(Error::new(bounds.span(), format!("{} takes no generics", kind.name())));
        }
        Ok((arrow.map(|_| rest.into_iter().collect()), body))
    }
}

fn not_a_function(kind: Kind, span: Span) -> Error {
    Error::new(span, format!("{} must be on a function: `fn name() {{ … }}`", kind.name()))
}

// --- The expansion -----------------------------------------------------------------------------

/// Returns the outer function that the head of the file shows.
fn expand(kind: Kind, options: Options, function: Function) -> TokenStream {
    let Function { attributes, visibility, asynchronous, keyword, name, arguments, output, body } =
        function;
    let first = output.clone().and_then(|output| output.into_iter().next());
    // The new tokens get the span of the return type, or of the name: errors about them ("`E`
    // doesn't implement `Debug`") have to point there.
    let site = first.as_ref().map_or(name.span(), TokenTree::span);
    let span = Span::mixed_site().located_at(site);
    // `()` and `!` are returned unchanged.
    let result_kind = match first {
        Some(token) if !is_punct(&token, '!') => ResultKind::Reported,
        _ => ResultKind::Plain,
    };

    let header = [keyword, TokenTree::Ident(name.clone()), TokenTree::Group(arguments)];
    let result = |output: Option<TokenStream>| {
        let arrow = output.is_some().then(|| arrow(span)).into_iter().flatten();
        arrow.chain(output.into_iter().flatten())
    };
    let mut inner: TokenStream = asynchronous.into_iter().chain(header.iter().cloned()).collect();
    inner.extend(result(output.clone()));
    inner.extend([TokenTree::Group(body)]);
    let entry = entry(&options, name, result_kind, span);
    inner.extend(start(options, span));
    inner.extend([group(Delimiter::Parenthesis, entry, span)]);

    let mut out = TokenStream::new();
    if kind == Kind::Test {
        let test = path(&["core", "prelude", "v1", "test"], span);
        out.extend([punct('#', Spacing::Alone, span), group(Delimiter::Bracket, test, span)]);
    }
    out.extend(attributes);
    out.extend(visibility);
    out.extend(header);
    out.extend(result(match result_kind {
        ResultKind::Reported => Some(path(&["std", "process", "ExitCode"], span)),
        ResultKind::Plain => output,
    }));
    out.extend([group(Delimiter::Brace, inner, span)]);
    out
}

/// How the outer function returns the result of the inner one.
#[derive(Clone, Copy, PartialEq)]
enum ResultKind {
    /// Unchanged.
    Plain,
    /// As the `ExitCode` that `Termination::report` returns.
    Reported,
}

/// Returns the closure for the runtime: `main`, or `||
/// ::std::process::Termination::report(main())`. With the option `tokio`, the call `main()` is
/// `::trefoil::__tokio_main!(WORKERS, main())`. With `leaks = "deny"`, the closure is
/// `|| ::trefoil::debug::deny_leaks(closure)`.
fn entry(options: &Options, name: Ident, result: ResultKind, span: Span) -> TokenStream {
    let plain = entry_without_leaks(options, name, result, span);
    let Some(at) = options.deny_leaks else { return plain };
    let span = span.located_at(at);
    let mut entry = TokenStream::new();
    entry.extend([punct('|', Spacing::Alone, span), punct('|', Spacing::Alone, span)]);
    entry.extend(path(&["trefoil", "debug", "deny_leaks"], span));
    entry.extend([group(Delimiter::Parenthesis, plain, span)]);
    entry
}

/// As [`entry`], without `leaks = "deny"`.
fn entry_without_leaks(
    options: &Options,
    name: Ident,
    result: ResultKind,
    span: Span,
) -> TokenStream {
    let name = TokenTree::Ident(name);
    if result == ResultKind::Plain && options.tokio.is_none() {
        return TokenStream::from(name);
    }
    let mut call =
        TokenStream::from_iter([name, group(Delimiter::Parenthesis, TokenStream::new(), span)]);
    if let Some(at) = options.tokio {
        call = on_tokio(options, call, span.located_at(at));
    }
    let mut entry = TokenStream::new();
    entry.extend([punct('|', Spacing::Alone, span), punct('|', Spacing::Alone, span)]);
    if result == ResultKind::Plain {
        entry.extend(call);
    } else {
        entry.extend(path(&["std", "process", "Termination", "report"], span));
        entry.extend([group(Delimiter::Parenthesis, call, span)]);
    }
    entry
}

/// Returns `::trefoil::__tokio_main!(WORKERS, future)`. The macro is an error that names the feature
/// if trefoil is built without it.
fn on_tokio(options: &Options, future: TokenStream, span: Span) -> TokenStream {
    let mut arguments = match &options.workers {
        None => path(&["core", "option", "Option", "None"], span),
        Some((_, workers)) => {
            let mut some = path(&["core", "option", "Option", "Some"], span);
            some.extend([group(Delimiter::Parenthesis, workers.clone(), span)]);
            some
        }
    };
    arguments.extend([punct(',', Spacing::Alone, span)]);
    arguments.extend(future);
    let mut out = path(&["trefoil", "__tokio_main"], span);
    out.extend([punct('!', Spacing::Alone, span), group(Delimiter::Parenthesis, arguments, span)]);
    out
}

/// Returns `::trefoil::run`, or `::trefoil::sim::run`, or
/// `::trefoil::Runtime::builder().procs(N).build().expect("…").run`.
fn start(options: Options, span: Span) -> TokenStream {
    if options.virtual_time.is_some() {
        return path(&["trefoil", "sim", "run"], span);
    }
    let Some(procs) = options.procs else {
        return path(&["trefoil", "run"], span);
    };
    let mut why = Literal::string("trefoil: the runtime did not start");
    why.set_span(span);
    let mut out = path(&["trefoil", "Runtime", "builder"], span);
    out.extend([group(Delimiter::Parenthesis, TokenStream::new(), span)]);
    for (method, argument) in [
        ("procs", procs),
        ("build", TokenStream::new()),
        ("expect", TokenStream::from(TokenTree::Literal(why))),
    ] {
        out.extend([punct('.', Spacing::Alone, span), ident(method, span)]);
        out.extend([group(Delimiter::Parenthesis, argument, span)]);
    }
    out.extend([punct('.', Spacing::Alone, span), ident("run", span)]);
    out
}

// --- Tokens ------------------------------------------------------------------------------------

type Tokens = Peekable<IntoIter<TokenTree>>;

/// Returns the tokens, without the invisible group around the `$item` of a macro.
fn flat(stream: TokenStream) -> Tokens {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    match tokens.as_slice() {
        [TokenTree::Group(g)] if g.delimiter() == Delimiter::None => flat(g.stream()),
        _ => tokens.into_iter().peekable(),
    }
}

fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(i) if i.to_string() == word)
}

fn is_punct(token: &TokenTree, c: char) -> bool {
    matches!(token, TokenTree::Punct(p) if p.as_char() == c)
}

fn is_group(token: &TokenTree, delimiter: Delimiter) -> bool {
    matches!(token, TokenTree::Group(g) if g.delimiter() == delimiter)
}

fn ident(word: &str, span: Span) -> TokenTree {
    TokenTree::Ident(Ident::new(word, span))
}

fn punct(c: char, spacing: Spacing, span: Span) -> TokenTree {
    let mut punct = Punct::new(c, spacing);
    punct.set_span(span);
    TokenTree::Punct(punct)
}

fn group(delimiter: Delimiter, stream: TokenStream, span: Span) -> TokenTree {
    let mut group = Group::new(delimiter, stream);
    group.set_span(span);
    TokenTree::Group(group)
}

/// Returns `->`.
fn arrow(span: Span) -> [TokenTree; 2] {
    [punct('-', Spacing::Joint, span), punct('>', Spacing::Alone, span)]
}

/// Returns `::a::b`.
fn path(words: &[&str], span: Span) -> TokenStream {
    words
        .iter()
        .flat_map(|word| {
            let colons = [Spacing::Joint, Spacing::Alone].map(|s| punct(':', s, span));
            colons.into_iter().chain([ident(word, span)])
        })
        .collect()
}

// All other code needs the compiler: `tests/attributes.rs` and the examples above test it.
#[cfg(test)]
mod tests {
    use super::is_in_range;

    #[test]
    fn procs_accepts_literals_from_1_to_1024() {
        for good in ["1", "4", "1024", "1_024", "4usize", "0x10", "0b11", "0o17", "0x4_00usize"] {
            assert!(is_in_range("procs", good), "{good}");
        }
        for bad in ["0", "1025", "4u8", "4.0", "\"4\"", "0x", "'4'", "", "é", "1e3", "0x401"] {
            assert!(!is_in_range("procs", bad), "{bad}");
        }
    }
}
