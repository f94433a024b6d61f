//! The goroutine profile: how many goroutines stand where. Go's, in its two usual forms.
//!
//! Taken like a dump (`census.rs`) and grouped: first by addresses, so that a million goroutines in one place are
//! named once; then by what is shown, because different ways through the runtime look the same from outside.
//!
//! Two forms: *folded* text for flame graphs, and pprof's protocol buffer. Of the latter we need seven small
//! messages, so they are encoded by hand here. It says functions, files and lines and no addresses: everything has its
//! name already, and pprof needs no binary for it.
//!
//! Invariants:
//! 1. Every goroutine that was seen counts once. One whose stack cannot be read (it runs elsewhere, has not begun, or
//!    went on meanwhile) counts at the function that it was started with: there it is, in any case.
//! 2. The profile is a value: nothing in it points to goroutines or loaded objects.
//!
//! Rejected: a crate for protocol buffers or for gzip (pprof reads plain files too); stopping those who run, as Go
//! does (reads, never steers).

use super::census::{self, Seen, Stack};
use super::symbols::{Frame, Symbols};
use crate::sched::Sched;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::panic::Location;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A goroutine profile: how many goroutines of a runtime stand at which stack.
/// [`profile`](crate::debug::profile) returns it.
///
/// A profile is a plain value. It can be kept and written after the goroutines have ended.
///
/// ```
/// let profile = trefoil::run(|| {
///     let (tx, rx) = trefoil::chan::bounded::<()>(0);
///     for _ in 0..10 {
///         let rx = rx.clone();
///         trefoil::go(move || rx.recv());
///     }
///     let profile = trefoil::debug::profile();
///     drop(tx); // The receivers end only now.
///     profile
/// });
/// assert_eq!(profile.goroutines(), 11); // ten receivers and main
/// ```
#[derive(Clone, Debug)]
pub struct Profile {
    taken: SystemTime,
    /// Most goroutines first.
    samples: Vec<Sample>,
}

/// Goroutines that stand in the same place for the same reason.
#[derive(Clone, Debug)]
struct Sample {
    /// Innermost first.
    stack: Vec<Arc<Frame>>,
    state: &'static str,
    goroutines: Group,
}

/// How many, and who, if there is only one.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    count: u64,
    id: Option<u64>,
}

impl Group {
    fn add(&mut self, more: Group) {
        self.id = if self.count == 0 { more.id } else { None };
        self.count += more.count;
    }
}

/// A place before it has names.
#[derive(PartialEq, Eq, Hash)]
struct Place {
    /// None if they could not be had.
    addresses: Vec<u64>,
    /// The closure that it was started with, and where.
    origin: (&'static str, &'static Location<'static>),
}

impl Place {
    fn of(seen: Seen) -> Place {
        let addresses = match seen.stack {
            Stack::At(addresses) => addresses,
            Stack::Elsewhere | Stack::Unknown => Vec::new(),
        };
        Place { addresses, origin: seen.g.origin() }
    }

    fn frames(&self, symbols: &mut Symbols) -> Vec<Arc<Frame>> {
        let mut frames = symbols.frames(&self.addresses);
        if frames.is_empty() {
            let (closure, place) = self.origin;
            let (name, file) = (closure.to_owned(), place.file().to_owned());
            frames.push(Arc::new(Frame { name, file, line: place.line() }));
        }
        frames
    }
}

/// Where the goroutines of `sched` stand.
pub(crate) fn profile(sched: &Sched) -> Profile {
    let taken = SystemTime::now();
    let mut places: HashMap<(Place, &'static str), Group> = HashMap::new();
    census::for_each(sched, |seen| {
        let one = Group { count: 1, id: Some(seen.g.id()) };
        let state = seen.state();
        places.entry((Place::of(seen), state)).or_default().add(one);
    });
    let mut symbols = Symbols::default();
    let mut shown: HashMap<(Vec<Arc<Frame>>, &'static str), Group> = HashMap::new();
    for ((place, state), group) in places {
        shown.entry((place.frames(&mut symbols), state)).or_default().add(group);
    }
    let sample = |((stack, state), goroutines)| Sample { stack, state, goroutines };
    let mut samples: Vec<Sample> = shown.into_iter().map(sample).collect();
    samples.sort_by(|a, b| {
        let by_count = b.goroutines.count.cmp(&a.goroutines.count);
        by_count.then_with(|| (&a.stack, a.state).cmp(&(&b.stack, b.state)))
    });
    Profile { taken, samples }
}

impl Profile {
    /// Returns how many goroutines the profile has counted.
    pub fn goroutines(&self) -> u64 {
        self.samples.iter().map(|sample| sample.goroutines.count).sum()
    }

    /// Returns the profile as folded stacks, the text that flame graph tools read.
    ///
    /// Each distinct stack is one line: its functions from the outermost to the innermost,
    /// separated by `;`, then a space and the number of goroutines. The names have paths if the
    /// program has full debug information. With line tables only, the file and line follow the
    /// name.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let text = trefoil::debug::profile().folded();
    ///     assert_eq!(text.lines().count(), 1); // Only main is alive.
    ///     assert!(text.ends_with(" 1\n"));
    /// });
    /// ```
    pub fn folded(&self) -> String {
        let mut lines: BTreeMap<String, u64> = BTreeMap::new();
        for sample in &self.samples {
            // A name may have the separator in it: `<[u8; 4] as T>::f`.
            let titles = sample.stack.iter().rev().map(|frame| frame.title().replace(';', ","));
            let line = titles.collect::<Vec<_>>().join(";");
            *lines.entry(line).or_default() += sample.goroutines.count;
        }
        lines.into_iter().map(|(line, count)| format!("{line} {count}\n")).collect()
    }

    /// Writes the profile in pprof's format (`profile.proto`, not compressed), for `go tool pprof`
    /// and other tools that read it.
    ///
    /// A sample has the label `state`, with the same words as a [`dump`](crate::debug::dump). It
    /// has the label `id` if it counts a single goroutine.
    ///
    /// ```no_run
    /// # fn main() -> std::io::Result<()> {
    /// let file = std::fs::File::create("goroutines.pb")?;
    /// trefoil::run(|| trefoil::debug::profile().write_pprof(file))?;
    /// // Then: go tool pprof -top goroutines.pb
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Returns the error of the writer `to`, if it has one.
    pub fn write_pprof(&self, mut to: impl Write) -> io::Result<()> {
        let program = std::env::current_exe().unwrap_or_default();
        let program = program.to_string_lossy();
        to.write_all(&Book::default().profile(self, &program).0)
    }
}

/// A message of protocol buffers: its fields, one after the other.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// Seven bits a byte, the lowest first; the eighth says that more follow.
    fn varint(mut self, mut n: u64) -> Message {
        while n >= 0x80 {
            self.0.push(n as u8 | 0x80);
            n >>= 7;
        }
        self.0.push(n as u8);
        self
    }

    fn number(self, field: u64, n: u64) -> Message {
        self.varint(field << 3).varint(n)
    }

    fn bytes(self, field: u64, bytes: &[u8]) -> Message {
        let mut message = self.varint(field << 3 | 2).varint(bytes.len() as u64);
        message.0.extend_from_slice(bytes);
        message
    }

    fn message(self, field: u64, inner: Message) -> Message {
        self.bytes(field, &inner.0)
    }

    /// A repeated number, packed.
    fn numbers(self, field: u64, all: impl IntoIterator<Item = u64>) -> Message {
        self.message(field, all.into_iter().fold(Message::default(), Message::varint))
    }
}

/// What a profile names by number: each thing once, in the order of first use.
#[derive(Default)]
struct Book<'a> {
    strings: Numbers<&'a str>,
    /// Name and file.
    functions: Numbers<(&'a str, &'a str)>,
    locations: Numbers<&'a Frame>,
}

/// Things and their numbers, from 0.
struct Numbers<T> {
    known: HashMap<T, u64>,
    all: Vec<T>,
}

impl<T> Default for Numbers<T> {
    fn default() -> Self {
        Numbers { known: HashMap::new(), all: Vec::new() }
    }
}

impl<T: Copy + Eq + std::hash::Hash> Numbers<T> {
    fn of(&mut self, thing: T) -> u64 {
        *self.known.entry(thing).or_insert_with(|| {
            self.all.push(thing);
            self.all.len() as u64 - 1
        })
    }
}

/// The only mapping.
const PROGRAM: u64 = 1;

/// Field numbers are those of `profile.proto`; ids of functions and locations begin at 1.
impl<'a> Book<'a> {
    fn profile(mut self, profile: &'a Profile, program: &'a str) -> Message {
        // The first string must be empty.
        self.strings.of("");
        let since = profile.taken.duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut out = Message::default()
            .message(1, self.goroutine_count()) // sample_type
            .number(9, since.as_nanos() as u64) // time_nanos
            .message(11, self.goroutine_count()) // period_type
            .number(12, 1) // period
            .message(3, self.mapping(program));
        for sample in &profile.samples {
            out = out.message(2, self.sample(sample));
        }
        for i in 0..self.locations.all.len() {
            out = out.message(4, self.location(i));
        }
        for i in 0..self.functions.all.len() {
            out = out.message(5, self.function(i));
        }
        self.strings.all.iter().fold(out, |out, string| out.bytes(6, string.as_bytes()))
    }

    /// ValueType: type, unit.
    fn goroutine_count(&mut self) -> Message {
        let (kind, unit) = (self.strings.of("goroutine"), self.strings.of("count"));
        Message::default().number(1, kind).number(2, unit)
    }

    /// Mapping: id, filename; has_functions, has_filenames, has_line_numbers: there is nothing left to find out.
    fn mapping(&mut self, program: &'a str) -> Message {
        let known = [7, 8, 9].into_iter();
        let mapping = Message::default().number(1, PROGRAM).number(5, self.strings.of(program));
        known.fold(mapping, |mapping, field| mapping.number(field, 1))
    }

    /// Sample: location_id, value, label.
    fn sample(&mut self, sample: &'a Sample) -> Message {
        let ids = sample.stack.iter().map(|frame| self.locations.of(frame) + 1);
        let out = Message::default().numbers(1, ids).numbers(2, [sample.goroutines.count]);
        // Label: key, str; or key, num.
        let state = Message::default()
            .number(1, self.strings.of("state"))
            .number(2, self.strings.of(sample.state));
        let out = out.message(3, state);
        match sample.goroutines.id {
            Some(id) => {
                out.message(3, Message::default().number(1, self.strings.of("id")).number(3, id))
            }
            None => out,
        }
    }

    /// Location: id, mapping_id, line.
    fn location(&mut self, i: usize) -> Message {
        let frame = self.locations.all[i];
        // Line: function_id, line.
        let function = self.functions.of((&frame.name, &frame.file)) + 1;
        let line = Message::default().number(1, function).number(2, frame.line.into());
        Message::default().number(1, i as u64 + 1).number(2, PROGRAM).message(4, line)
    }

    /// Function: id, name, system_name, filename.
    fn function(&mut self, i: usize) -> Message {
        let (name, file) = self.functions.all[i];
        let (name, file) = (self.strings.of(name), self.strings.of(file));
        Message::default().number(1, i as u64 + 1).number(2, name).number(3, name).number(4, file)
    }
}
