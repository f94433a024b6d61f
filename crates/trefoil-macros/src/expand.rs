//! The expansion: the function that takes the place of the one under the attribute.
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

use proc_macro::{Delimiter, Ident, Literal, Spacing, Span, TokenStream, TokenTree};

use crate::Kind;
use crate::function::Function;
use crate::options::Options;
use crate::tokens::{arrow, group, ident, is_punct, path, punct};

/// Returns the outer function that the head of the file shows.
pub(crate) fn expand(kind: Kind, options: Options, function: Function) -> TokenStream {
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

/// Returns `::trefoil::__tokio_main!(WORKERS, future)`. The macro is an error that names the
/// feature if trefoil is built without it.
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
