//! The goroutine profile: what it counts, and that both of its formats can be read.

mod common;

use common::{test_name, watchdog, yield_until};
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;
use trefoil::chan::{Receiver, bounded};
use trefoil::debug::{Profile, profile};
use trefoil::time::sleep;
use trefoil::{Builder, Runtime, go};

// The wait is not the last call in these functions: a tail call leaves no frame.
#[inline(never)]
fn waits_in_here(rx: &Receiver<()>) {
    let _ = black_box(rx.recv());
}

#[inline(never)]
fn alone() {
    sleep(Duration::MAX);
    black_box(());
}

#[inline(never)]
fn spin_until(stop: &AtomicBool) {
    while !stop.load(SeqCst) {
        std::hint::spin_loop();
    }
}

/// Returns the stacks, from the outermost function to the innermost, and their counts.
fn lines(folded: &str) -> Vec<(Vec<&str>, u64)> {
    let line = |line: &'_ str| -> (usize, u64) {
        let at = line.rfind(' ').unwrap_or_else(|| panic!("no count: {line}"));
        (at, line[at + 1..].parse().unwrap_or_else(|e| panic!("{e}: {line}")))
    };
    let all = folded.lines().map(|text| {
        let (at, count) = line(text);
        (text[..at].split(';').collect(), count)
    });
    all.collect()
}

/// Returns the lines that contain a function of that name.
fn with<'a>(folded: &'a str, name: &str) -> Vec<(Vec<&'a str>, u64)> {
    let mut all = lines(folded);
    all.retain(|(stack, _)| stack.iter().any(|function| function.contains(name)));
    all
}

#[test]
fn goroutines_with_the_same_stack_are_one_line() {
    let _watchdog = watchdog();
    Runtime::builder().procs(2).build().unwrap().run(|| {
        let (tx, rx) = bounded::<()>(0);
        for _ in 0..100 {
            let rx = rx.clone();
            go(move || waits_in_here(&rx));
        }
        let one = go(alone);
        let parked = |taken: &Profile| {
            let text = taken.folded();
            with(&text, "waits_in_here").iter().map(|(_, n)| n).sum::<u64>() == 100
                && with(&text, "alone").len() == 1
        };
        // Only a profile shows that they already wait.
        let mut taken = profile();
        yield_until("the goroutines to wait", || {
            taken = profile();
            parked(&taken)
        });
        let text = taken.folded();
        let found = with(&text, "waits_in_here");
        assert_eq!(found.len(), 1, "{text}");
        let (stack, count) = &found[0];
        assert_eq!(*count, 100, "{text}");
        // The closure is the outermost function. (Without full debug information names have no
        // path.)
        assert!(stack[0].contains("closure") && stack[0].contains("profile"), "{text}");
        let place = |name: &str| stack.iter().position(|function| function.contains(name)).unwrap();
        assert!(place("waits_in_here") < place("recv"), "{text}");
        assert_eq!(taken.goroutines(), 102, "{text}");
        assert_eq!(lines(&text).iter().map(|(_, n)| n).sum::<u64>(), 102);

        let decoded = decode(&taken);
        let stands = decoded.with("waits_in_here");
        assert_eq!(stands.len(), 1, "{decoded:#?}");
        assert_eq!(stands[0].value, 100);
        assert_eq!(stands[0].labels, [("state".to_owned(), "chan receive".to_owned())]);
        let alone = decoded.with("alone");
        assert_eq!((alone.len(), alone[0].value), (1, 1), "{decoded:#?}");
        let id = ("id".to_owned(), one.id().to_string());
        assert!(alone[0].labels.contains(&id), "{decoded:#?}");
        assert_eq!(decoded.samples.iter().map(|s| s.value).sum::<u64>(), 102);
        drop(tx);
    });
}

/// A goroutine that runs on another thread is counted at the closure that it was started with.
#[test]
fn a_running_goroutine_is_counted_at_its_closure() {
    let _watchdog = watchdog();
    Runtime::builder().procs(2).build().unwrap().run(|| {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let hog = go(move || spin_until(&stopped));
        let running = ("state".to_owned(), "running".to_owned());
        let id = ("id".to_owned(), hog.id().to_string());
        yield_until("the goroutine to run", || {
            let decoded = decode(&profile());
            let found = decoded.samples.iter().find(|s| s.labels.contains(&id));
            let sample = found.unwrap_or_else(|| panic!("not counted: {decoded:#?}"));
            let runs = sample.labels.contains(&running);
            let closure = format!("profile::{}::{{{{closure}}}}::{{{{closure}}}}", test_name!());
            assert!(!runs || sample.stack[0].0 == closure, "{decoded:#?}");
            runs
        });
        stop.store(true, SeqCst);
        hog.join().unwrap();
    });
}

/// With one P none begins, unless this goroutine waits for another test in the lock of backtrace.
#[test]
fn goroutines_that_have_not_begun_are_counted() {
    let _watchdog = watchdog();
    Runtime::builder().procs(1).build().unwrap().run(|| {
        let held = trefoil::no_preempt();
        (0..10).for_each(|_| drop(go(|| sleep(Duration::MAX))));
        let taken = profile();
        drop(held);
        let text = taken.folded();
        assert_eq!(taken.goroutines(), 11, "{text}");
        assert_eq!(lines(&text).iter().map(|(_, n)| n).sum::<u64>(), 11, "{text}");
    });
}

#[test]
fn profiles_are_consistent_while_goroutines_start_and_end() {
    let _watchdog = watchdog();
    Runtime::builder().procs(4).build().unwrap().run(|| {
        let (tx, rx) = bounded::<usize>(1);
        for i in 0..20 {
            let (tx, rx) = (tx.clone(), rx.clone());
            go(move || {
                loop {
                    let child = Builder::new().go(|| ()).unwrap();
                    if tx.send(i).is_err() || rx.recv().is_err() {
                        break;
                    }
                    child.join().unwrap();
                }
            });
        }
        for _ in 0..100 {
            let taken = profile();
            let text = taken.folded();
            assert!(taken.goroutines() >= 1, "{text}");
            let sum: u64 = lines(&text).iter().map(|(_, n)| n).sum();
            assert_eq!(sum, taken.goroutines(), "{text}");
            let decoded = decode(&taken);
            assert_eq!(decoded.samples.iter().map(|s| s.value).sum::<u64>(), sum);
            assert!(decoded.samples.iter().all(|s| !s.stack.is_empty()), "{text}");
            sleep(Duration::from_micros(200));
        }
        tx.close();
    });
}

// A small decoder of profile.proto.

#[derive(Debug)]
struct Decoded {
    samples: Vec<Sample>,
}

#[derive(Debug)]
struct Sample {
    /// Innermost first: function, file, line.
    stack: Vec<(String, String, u64)>,
    value: u64,
    labels: Vec<(String, String)>,
}

impl Decoded {
    fn with(&self, name: &str) -> Vec<&Sample> {
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
fn decode(profile: &Profile) -> Decoded {
    let mut file = Vec::new();
    profile.write_pprof(&mut file).unwrap();
    let top = fields(&file);
    let text = |value: &Value| String::from_utf8(value.bytes().to_vec()).unwrap();
    let strings: Vec<String> = top[&6].iter().map(text).collect();
    assert_eq!(strings[0], "");
    let string = |n: u64| strings[n as usize].clone();
    let all = |field: u64| top.get(&field).into_iter().flatten().map(|m| fields(m.bytes()));
    let one = |message: &HashMap<u64, Vec<Value>>, field: u64| message[&field][0].number();

    for field in [1, 11] {
        let kind = all(field).next().unwrap();
        assert_eq!(string(one(&kind, 1)), "goroutine");
        assert_eq!(string(one(&kind, 2)), "count");
    }
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
        assert_eq!(values.len(), 1);
        Sample {
            stack: packed(&message[&1][0]).iter().map(|id| locations[id].clone()).collect(),
            value: values[0],
            labels: message[&3].iter().map(label).collect(),
        }
    };
    Decoded { samples: all(2).map(sample).collect() }
}
