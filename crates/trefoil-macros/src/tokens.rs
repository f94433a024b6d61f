//! Tokens: how they are recognised, and how new ones are made.

use std::iter::Peekable;
use std::vec::IntoIter;

use proc_macro::{Delimiter, Group, Ident, Punct, Spacing, Span, TokenStream, TokenTree};

pub(crate) type Tokens = Peekable<IntoIter<TokenTree>>;

/// Returns the tokens, without the invisible group around the `$item` of a macro.
pub(crate) fn flat(stream: TokenStream) -> Tokens {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    match tokens.as_slice() {
        [TokenTree::Group(g)] if g.delimiter() == Delimiter::None => flat(g.stream()),
        _ => tokens.into_iter().peekable(),
    }
}

pub(crate) fn is_word(token: &TokenTree, word: &str) -> bool {
    matches!(token, TokenTree::Ident(i) if i.to_string() == word)
}

pub(crate) fn is_punct(token: &TokenTree, c: char) -> bool {
    matches!(token, TokenTree::Punct(p) if p.as_char() == c)
}

pub(crate) fn is_group(token: &TokenTree, delimiter: Delimiter) -> bool {
    matches!(token, TokenTree::Group(g) if g.delimiter() == delimiter)
}

pub(crate) fn ident(word: &str, span: Span) -> TokenTree {
    TokenTree::Ident(Ident::new(word, span))
}

pub(crate) fn punct(c: char, spacing: Spacing, span: Span) -> TokenTree {
    let mut punct = Punct::new(c, spacing);
    punct.set_span(span);
    TokenTree::Punct(punct)
}

pub(crate) fn group(delimiter: Delimiter, stream: TokenStream, span: Span) -> TokenTree {
    let mut group = Group::new(delimiter, stream);
    group.set_span(span);
    TokenTree::Group(group)
}

/// Returns `->`.
pub(crate) fn arrow(span: Span) -> [TokenTree; 2] {
    [punct('-', Spacing::Joint, span), punct('>', Spacing::Alone, span)]
}

/// Returns `::a::b`.
pub(crate) fn path(words: &[&str], span: Span) -> TokenStream {
    words
        .iter()
        .flat_map(|word| {
            let colons = [Spacing::Joint, Spacing::Alone].map(|s| punct(':', s, span));
            colons.into_iter().chain([ident(word, span)])
        })
        .collect()
}
