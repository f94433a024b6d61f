//! A small decoder of profile.proto.

#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::HashMap;
use trefoil::debug::Profile;

#[derive(Debug)]
pub(crate) struct Decoded {
    /// The types of the values, with their units.
    pub(crate) types: Vec<(String, String)>,
    pub(crate) period: u64,
    pub(crate) samples: Vec<Sample>,
}

#[derive(Debug)]
pub(crate) struct Sample {
    /// Innermost first: function, file, line.
    pub(crate) stack: Vec<(String, String, u64)>,
    /// The first value.
    pub(crate) value: u64,
    pub(crate) values: Vec<u64>,
    pub(crate) labels: Vec<(String, String)>,
}

impl Decoded {
    pub(crate) fn with(&self, name: &str) -> Vec<&Sample> {
        let has_function =
            |s: &&Sample| s.stack.iter().any(|(function, ..)| function.contains(name));
        self.samples.iter().filter(has_function).collect()
    }
}

#[derive(Clone, Debug)]
enum Value {
    Number(u64),
    Bytes(Vec<u8>),
}

impl Value {
    fn number(&self) -> u64 {
        match self {
            Value::Number(n) => *n,
            Value::Bytes(bytes) => panic!("a number is expected: {bytes:?}"),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Value::Bytes(bytes) => bytes,
            Value::Number(n) => panic!("bytes are expected: {n}"),
        }
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut n = 0;
    for shift in (0..).step_by(7) {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        n |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    n
}

/// Returns the fields of a message by number.
fn fields(mut bytes: &[u8]) -> HashMap<u64, Vec<Value>> {
    let mut fields: HashMap<u64, Vec<Value>> = HashMap::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => Value::Number(varint(&mut bytes)),
            2 => {
                let len = varint(&mut bytes) as usize;
                let (value, rest) = bytes.split_at(len);
                bytes = rest;
                Value::Bytes(value.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        fields.entry(key >> 3).or_default().push(value);
    }
    fields
}

fn packed(value: &Value) -> Vec<u64> {
    let mut bytes = value.bytes();
    let mut all = Vec::new();
    while !bytes.is_empty() {
        all.push(varint(&mut bytes));
    }
    all
}

/// Decodes what `write_pprof` writes and checks, as pprof does, that every reference is valid.
pub(crate) fn decode(profile: &Profile) -> Decoded {
    let mut file = Vec::new();
    profile.write_pprof(&mut file).unwrap();
    let top = fields(&file);
    let text = |value: &Value| String::from_utf8(value.bytes().to_vec()).unwrap();
    let strings: Vec<String> = top[&6].iter().map(text).collect();
    assert_eq!(strings[0], "");
    let string = |n: u64| strings[n as usize].clone();
    let all = |field: u64| top.get(&field).into_iter().flatten().map(|m| fields(m.bytes()));
    let one = |message: &HashMap<u64, Vec<Value>>, field: u64| message[&field][0].number();

    let types: Vec<_> = all(1).map(|kind| (string(one(&kind, 1)), string(one(&kind, 2)))).collect();
    let main_type = string(top[&14][0].number());
    assert!(types.iter().any(|(name, _)| *name == main_type), "{types:?}, {main_type}");
    let mappings: Vec<u64> = all(3).map(|m| one(&m, 1)).collect();
    let functions: HashMap<u64, (String, String)> =
        all(5).map(|f| (one(&f, 1), (string(one(&f, 2)), string(one(&f, 4))))).collect();
    let location = |message: HashMap<u64, Vec<Value>>| {
        assert!(mappings.contains(&one(&message, 2)));
        let line = fields(message[&4][0].bytes());
        let (function, file) = functions[&one(&line, 1)].clone();
        (one(&message, 1), (function, file, one(&line, 2)))
    };
    let locations: HashMap<u64, (String, String, u64)> = all(4).map(location).collect();
    assert!(!locations.contains_key(&0) && !functions.contains_key(&0));
    let sample = |message: HashMap<u64, Vec<Value>>| {
        let label = |value: &Value| {
            let label = fields(value.bytes());
            let text_of_label = label.get(&2).map(|text| string(text[0].number()));
            (string(one(&label, 1)), text_of_label.unwrap_or_else(|| one(&label, 3).to_string()))
        };
        let values = packed(&message[&2][0]);
        assert_eq!(values.len(), types.len());
        Sample {
            stack: packed(&message[&1][0]).iter().map(|id| locations[id].clone()).collect(),
            value: values[0],
            values,
            labels: message.get(&3).into_iter().flatten().map(label).collect(),
        }
    };
    let samples = all(2).map(sample).collect();
    Decoded { types: types.clone(), period: top[&12][0].number(), samples }
}
