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
//! - The attributes are parsed by hand. They accept such a small part of the grammar that `syn`
//!   would cost every user more to build than these lines cost to read.

use std::iter::Peekable;
use std::vec::IntoIter;

use proc_macro::{Delimiter, Group, Ident, Literal, Punct, Spacing, Span, TokenStream, TokenTree};

/// The largest number of Ps; the runtime has the same limit.
const MAX_PROCS: u128 = 1024;

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
/// # Panics
///
/// The outer function panics if the function panics, and if the runtime cannot start.
///
/// # Errors
///
/// The compiler reports an error if the attribute is not on a function, if the function has
/// arguments or generics, if it is `async`, `const`, `unsafe` or `extern`, or if an option is
/// unknown or out of range. An `async` function is not needed: a goroutine may block, so there is
/// nothing to await.
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
/// The options and the compile errors are the same as for [`main`][macro@main].
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
    match Options::parse(options).and_then(|o| Ok(expand(kind, o, Function::parse(kind, item)?))) {
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
}

impl Options {
    fn parse(tokens: TokenStream) -> Result<Options> {
        let mut options = Options::default();
        let mut tokens = tokens.into_iter().peekable();
        while let Some(key) = tokens.next() {
            let span = key.span();
            if !is_word(&key, "procs") {
                return Err(Error::new(
                    span,
                    format!("unknown option `{key}`: the only option is `procs = N`"),
                ));
            }
            if options.procs.is_some() {
                return Err(Error::new(span, "`procs` is given twice"));
            }
            if tokens.next_if(|t| is_punct(t, '=')).is_none() {
                return Err(Error::new(span, "`procs` needs a value: `procs = 4`"));
            }
            options.procs = Some(Self::value(span, &mut tokens)?);
        }
        Ok(options)
    }

    /// Takes the tokens up to the next comma: any expression. A number is checked.
    fn value(
        key: Span,
        tokens: &mut Peekable<impl Iterator<Item = TokenTree>>,
    ) -> Result<TokenStream> {
        let mut value = Vec::new();
        while let Some(token) = tokens.next_if(|t| !is_punct(t, ',')) {
            value.push(token);
        }
        tokens.next();
        match value.as_slice() {
            [] => return Err(Error::new(key, "`procs` needs a value: `procs = 4`")),
            [TokenTree::Literal(number)] if !procs_in_range(&number.to_string()) => {
                let message = format!("`procs` takes a whole number from 1 to {MAX_PROCS}");
                return Err(Error::new(number.span(), message));
            }
            _ => {}
        }
        Ok(value.into_iter().collect())
    }
}

/// Returns whether a literal, as written in the source, is a valid number of Ps.
fn procs_in_range(literal: &str) -> bool {
    let digits = literal.replace('_', "");
    let digits = digits.strip_suffix("usize").unwrap_or(&digits);
    let value = match digits.get(..2) {
        Some("0x") => u128::from_str_radix(&digits[2..], 16),
        Some("0o") => u128::from_str_radix(&digits[2..], 8),
        Some("0b") => u128::from_str_radix(&digits[2..], 2),
        _ => digits.parse(),
    };
    value.is_ok_and(|n| (1..=MAX_PROCS).contains(&n))
}

// --- The function ------------------------------------------------------------------------------

/// The parts of `#[…] pub fn name() -> Ret { … }`.
struct Function {
    attributes: TokenStream,
    visibility: TokenStream,
    keyword: TokenTree,
    name: Ident,
    arguments: Group,
    /// The type after `->`, if there is one.
    output: Option<TokenStream>,
    body: Group,
}

impl Function {
    fn parse(kind: Kind, item: TokenStream) -> Result<Function> {
        let mut tokens = flat(item);
        let attributes = Self::attributes(kind, &mut tokens)?;
        let visibility = Self::visibility(&mut tokens);
        let keyword = Self::keyword(kind, &mut tokens)?;
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
        Ok(Function { attributes, visibility, keyword, name, arguments, output, body })
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
            "async" => "goroutines need no async: remove it",
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
    let Function { attributes, visibility, keyword, name, arguments, output, body } = function;
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
    let mut inner: TokenStream = header.iter().cloned().collect();
    inner.extend(result(output.clone()));
    inner.extend([TokenTree::Group(body)]);
    inner.extend(start(options, span));
    inner.extend([group(Delimiter::Parenthesis, entry(name, result_kind, span), span)]);

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
/// ::std::process::Termination::report(main())`.
fn entry(name: Ident, result: ResultKind, span: Span) -> TokenStream {
    let name = TokenTree::Ident(name);
    if result == ResultKind::Plain {
        return TokenStream::from(name);
    }
    let call = [name, group(Delimiter::Parenthesis, TokenStream::new(), span)];
    let mut entry = TokenStream::new();
    entry.extend([punct('|', Spacing::Alone, span), punct('|', Spacing::Alone, span)]);
    entry.extend(path(&["std", "process", "Termination", "report"], span));
    entry.extend([group(Delimiter::Parenthesis, call.into_iter().collect(), span)]);
    entry
}

/// Returns `::trefoil::run`, or `::trefoil::Runtime::builder().procs(N).build().expect("…").run`.
fn start(options: Options, span: Span) -> TokenStream {
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
    use super::procs_in_range;

    #[test]
    fn procs_accepts_literals_from_1_to_1024() {
        for good in ["1", "4", "1024", "1_024", "4usize", "0x10", "0b11", "0o17", "0x4_00usize"] {
            assert!(procs_in_range(good), "{good}");
        }
        for bad in ["0", "1025", "4u8", "4.0", "\"4\"", "0x", "'4'", "", "é", "1e3", "0x401"] {
            assert!(!procs_in_range(bad), "{bad}");
        }
    }
}
