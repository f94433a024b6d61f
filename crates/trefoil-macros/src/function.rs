//! The function under an attribute, in its parts.
//!
//! Any other item is an error, and so is a function that cannot be the main goroutine: one with
//! arguments or generics, `const`, `unsafe` or `extern`.

use proc_macro::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};

use crate::Kind;
use crate::error::{Error, Result};
use crate::tokens::{Tokens, flat, is_group, is_punct, is_word};

/// The parts of `#[…] pub async fn name() -> Ret { … }`.
pub(crate) struct Function {
    pub(crate) attributes: TokenStream,
    pub(crate) visibility: TokenStream,
    /// The word `async`, which the option `tokio` requires.
    pub(crate) asynchronous: Option<TokenTree>,
    pub(crate) keyword: TokenTree,
    pub(crate) name: Ident,
    pub(crate) arguments: Group,
    /// The type after `->`, if there is one.
    pub(crate) output: Option<TokenStream>,
    pub(crate) body: Group,
}

impl Function {
    pub(crate) fn parse(kind: Kind, on_tokio: bool, item: TokenStream) -> Result<Function> {
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

/// Returns the word after the first `fn`.
pub(crate) fn name_of(item: TokenStream) -> Option<Ident> {
    let mut tokens = flat(item);
    tokens.find(|t| is_word(t, "fn"))?;
    match tokens.next() {
        Some(TokenTree::Ident(name)) => Some(name),
        _ => None,
    }
}
