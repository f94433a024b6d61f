//! The options in the parentheses of an attribute: `procs = 4, leaks = "deny"`.

use std::iter::Peekable;

use proc_macro::{Span, TokenStream, TokenTree};

use crate::error::{Error, Result};
use crate::tokens::is_punct;

/// The largest number of Ps; the runtime has the same limit.
const MAX_PROCS: u128 = 1024;
/// The largest number of tokio's workers that the attribute accepts.
const MAX_WORKERS: u128 = 32_768;

/// The options in the parentheses of the attribute.
#[derive(Default)]
pub(crate) struct Options {
    pub(crate) procs: Option<TokenStream>,
    /// Where `tokio` stands, if it is given.
    pub(crate) tokio: Option<Span>,
    pub(crate) workers: Option<(Span, TokenStream)>,
    /// Where `leaks = "deny"` stands, if it is given.
    pub(crate) deny_leaks: Option<Span>,
    /// Where `virtual_time` stands, if it is given.
    pub(crate) virtual_time: Option<Span>,
}

impl Options {
    pub(crate) fn parse(tokens: TokenStream) -> Result<Options> {
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

// All other code of the crate needs the compiler: `tests/attributes.rs` and the examples of the
// attributes test it.
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
