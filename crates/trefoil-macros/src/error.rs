//! Errors in the user's code, which the compiler reports at their place.

use proc_macro::{Delimiter, Literal, Spacing, Span, TokenStream, TokenTree};

use crate::tokens::{group, path, punct};

/// An error in the user's code, with its place.
pub(crate) struct Error {
    span: Span,
    message: String,
}

impl Error {
    pub(crate) fn new(span: Span, message: impl Into<String>) -> Error {
        Error { span, message: message.into() }
    }

    /// Returns `::core::compile_error!("message");` at the span.
    pub(crate) fn into_tokens(self) -> TokenStream {
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

pub(crate) type Result<T> = std::result::Result<T, Error>;
