//! Reads JSON, and nothing else.

use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    Number(f64),
    String(String),
    List(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl Json {
    pub(crate) fn parse(text: &str) -> Json {
        let mut reader = Reader { text: text.as_bytes(), at: 0 };
        let value = reader.value();
        reader.space();
        assert_eq!(reader.at, text.len(), "something follows the value");
        value
    }

    pub(crate) fn get(&self, name: &str) -> &Json {
        match self {
            Json::Object(members) => {
                members.get(name).unwrap_or_else(|| panic!("no {name:?} in {members:?}"))
            }
            other => panic!("no object: {other:?}"),
        }
    }

    pub(crate) fn number(&self) -> u64 {
        match self {
            Json::Number(n) => *n as u64,
            other => panic!("no number: {other:?}"),
        }
    }

    pub(crate) fn string(&self) -> &str {
        match self {
            Json::String(text) => text,
            other => panic!("no string: {other:?}"),
        }
    }

    pub(crate) fn list(&self) -> &[Json] {
        match self {
            Json::List(list) => list,
            other => panic!("no list: {other:?}"),
        }
    }
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> u8 {
        *self.text.get(self.at).expect("the text ends too early")
    }

    fn next(&mut self) -> u8 {
        self.at += 1;
        self.text[self.at - 1]
    }

    fn space(&mut self) {
        while self.text.get(self.at).is_some_and(|b| b" \t\r\n".contains(b)) {
            self.at += 1;
        }
    }

    fn expect(&mut self, word: &str) {
        assert!(self.text[self.at..].starts_with(word.as_bytes()), "expected {word}");
        self.at += word.len();
    }

    fn value(&mut self) -> Json {
        self.space();
        match self.peek() {
            b'n' => {
                self.expect("null");
                Json::Null
            }
            b't' => {
                self.expect("true");
                Json::Bool(true)
            }
            b'f' => {
                self.expect("false");
                Json::Bool(false)
            }
            b'"' => Json::String(self.string()),
            b'[' => {
                let mut list = Vec::new();
                self.sequence(b']', |reader| list.push(reader.value()));
                Json::List(list)
            }
            b'{' => {
                let mut members = BTreeMap::new();
                self.sequence(b'}', |reader| {
                    reader.space();
                    let name = reader.string();
                    reader.space();
                    reader.expect(":");
                    assert!(members.insert(name.clone(), reader.value()).is_none(), "{name} twice");
                });
                Json::Object(members)
            }
            _ => {
                let start = self.at;
                while self.text.get(self.at).is_some_and(|b| b"+-.eE0123456789".contains(b)) {
                    self.at += 1;
                }
                let text = std::str::from_utf8(&self.text[start..self.at]).unwrap();
                Json::Number(text.parse().unwrap_or_else(|_| panic!("no number: {text:?}")))
            }
        }
    }

    fn sequence(&mut self, close: u8, mut item: impl FnMut(&mut Self)) {
        self.at += 1;
        self.space();
        if self.peek() == close {
            self.at += 1;
            return;
        }
        loop {
            item(self);
            self.space();
            match self.next() {
                b',' => {}
                byte if byte == close => return,
                byte => panic!("{:?} after a value", char::from(byte)),
            }
        }
    }

    fn string(&mut self) -> String {
        self.expect("\"");
        let mut out = Vec::new();
        loop {
            match self.next() {
                b'"' => return String::from_utf8(out).unwrap(),
                b'\\' => match self.next() {
                    b'n' => out.push(b'\n'),
                    b't' => out.push(b'\t'),
                    b'u' => {
                        let digits = std::str::from_utf8(&self.text[self.at..self.at + 4]).unwrap();
                        let c = u32::from_str_radix(digits, 16).unwrap();
                        self.at += 4;
                        let c = char::from_u32(c).unwrap();
                        out.extend(c.encode_utf8(&mut [0; 4]).bytes());
                    }
                    byte @ (b'"' | b'\\' | b'/') => out.push(byte),
                    byte => panic!("\\{}", char::from(byte)),
                },
                byte => {
                    assert!(byte >= b' ', "a control character in a string");
                    out.push(byte);
                }
            }
        }
    }
}
