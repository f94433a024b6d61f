//! Writes JSON: objects and lists are written as they are made, in one text.

use std::fmt::Write;

/// A text in JSON that is not yet complete.
#[derive(Default)]
pub(crate) struct Json {
    text: String,
    /// A comma is needed before the next value.
    needs_comma: bool,
}

impl Json {
    pub(crate) fn into_text(self) -> String {
        self.text
    }

    fn separate(&mut self) {
        if self.needs_comma {
            self.text.push(',');
        }
        self.needs_comma = true;
    }

    /// Writes an object, whose members `f` writes.
    pub(crate) fn object(&mut self, f: impl FnOnce(&mut Json)) {
        self.enclosed('{', '}', f);
    }

    /// Writes a list, whose values `f` writes.
    pub(crate) fn list(&mut self, f: impl FnOnce(&mut Json)) {
        self.enclosed('[', ']', f);
    }

    fn enclosed(&mut self, open: char, close: char, f: impl FnOnce(&mut Json)) {
        self.separate();
        self.text.push(open);
        self.needs_comma = false;
        f(self);
        self.text.push(close);
        self.needs_comma = true;
    }

    /// Writes the name of the member whose value comes next.
    pub(crate) fn name(&mut self, name: &str) -> &mut Json {
        self.string(name);
        self.text.push(':');
        self.needs_comma = false;
        self
    }

    pub(crate) fn string(&mut self, value: &str) {
        self.separate();
        self.text.push('"');
        for c in value.chars() {
            match c {
                '"' | '\\' => self.text.extend(['\\', c]),
                '\n' => self.text.push_str("\\n"),
                '\t' => self.text.push_str("\\t"),
                // Also what would end a script in HTML.
                '\0'..' ' | '<' | '\u{2028}' | '\u{2029}' => {
                    _ = write!(self.text, "\\u{:04x}", u32::from(c));
                }
                _ => self.text.push(c),
            }
        }
        self.text.push('"');
    }

    pub(crate) fn number(&mut self, value: impl Into<u64>) {
        self.separate();
        _ = write!(self.text, "{}", value.into());
    }

    pub(crate) fn bool(&mut self, value: bool) {
        self.separate();
        self.text.push_str(if value { "true" } else { "false" });
    }

    pub(crate) fn null(&mut self) {
        self.separate();
        self.text.push_str("null");
    }

    /// Writes a text, or null.
    pub(crate) fn optional_string(&mut self, value: Option<&str>) {
        match value {
            Some(value) => self.string(value),
            None => self.null(),
        }
    }

    /// Writes a number, or null.
    pub(crate) fn optional(&mut self, value: Option<impl Into<u64>>) {
        match value {
            Some(value) => self.number(value),
            None => self.null(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_separated_and_texts_escaped() {
        let mut json = Json::default();
        json.object(|json| {
            json.name("a").list(|json| {
                json.number(1_u64);
                json.string("\"\\\n\u{1}</script>é");
                json.list(|_| ());
            });
            json.name("b").object(|json| json.name("c").null());
            json.name("d").bool(true);
        });
        let expected =
            "{\"a\":[1,\"\\\"\\\\\\n\\u0001\\u003c/script>é\",[]],\"b\":{\"c\":null},\"d\":true}";
        assert_eq!(json.into_text(), expected);
    }
}
