//! The goroutine profile: the number of goroutines at each stack, as in Go.
//!
//! The goroutines are visited as for a dump (`snapshot.rs`) and grouped twice: first by addresses,
//! so that the stack of a million equal goroutines is resolved once; then by the frames that are
//! shown, because stacks that differ only in frames of the runtime are shown alike.
//!
//! There are two formats: *folded* text for flame graphs, and pprof's protocol buffer. The latter
//! needs seven small messages, which are encoded by hand here. It contains functions, files and
//! lines but no addresses, so pprof does not need the program's binary.
//!
//! Invariants:
//! 1. Every goroutine and task that was visited counts once. A task that waits has no stack, and
//!    counts at its future. A goroutine whose stack cannot be read (it runs
//!    on another thread, has not begun, or was resumed meanwhile) counts at the function that it
//!    was started with.
//! 2. The profile is a value: it refers neither to goroutines nor to loaded objects.
//!
//! Rejected: a crate for protocol buffers or for gzip, because pprof reads plain files too;
//! stopping running goroutines, as Go does, because this module never changes what the scheduler
//! does.

use super::protobuf::Message;
use super::snapshot::{self, Snapshot, StackSnapshot};
use super::symbols::{Frame, SymbolCache};
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

/// Goroutines with the same stack and the same state.
#[derive(Clone, Debug)]
struct Sample {
    /// Innermost first.
    stack: Vec<Arc<Frame>>,
    state: &'static str,
    goroutines: Group,
}

/// A number of goroutines, and the id if there is only one.
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

/// A stack before its addresses are resolved.
#[derive(PartialEq, Eq, Hash)]
struct RawStack {
    /// Empty if the stack could not be read.
    addresses: Vec<u64>,
    /// The closure that the goroutine was started with, and where.
    origin: (&'static str, &'static Location<'static>),
}

impl RawStack {
    fn of(snapshot: Snapshot) -> RawStack {
        let addresses = match snapshot.stack {
            StackSnapshot::Addresses(addresses) => addresses,
            StackSnapshot::Running | StackSnapshot::Unknown | StackSnapshot::None => Vec::new(),
        };
        RawStack { addresses, origin: snapshot.subject.origin() }
    }

    fn frames(&self, symbols: &mut SymbolCache) -> Vec<Arc<Frame>> {
        let mut frames = symbols.frames(&self.addresses);
        if frames.is_empty() {
            let (closure, place) = self.origin;
            let (name, file) = (closure.to_owned(), place.file().to_owned());
            frames.push(Arc::new(Frame { name, file, line: place.line() }));
        }
        frames
    }
}

/// Takes the profile of the goroutines of `sched`.
pub(crate) fn profile(sched: &Sched) -> Profile {
    let taken = SystemTime::now();
    let mut by_address: HashMap<(RawStack, &'static str), Group> = HashMap::new();
    snapshot::for_each(sched, |snapshot| {
        let one = Group { count: 1, id: Some(snapshot.subject.id()) };
        let state = snapshot.state();
        by_address.entry((RawStack::of(snapshot), state)).or_default().add(one);
    });
    let mut symbols = SymbolCache::default();
    let mut by_frames: HashMap<(Vec<Arc<Frame>>, &'static str), Group> = HashMap::new();
    for ((stack, state), group) in by_address {
        by_frames.entry((stack.frames(&mut symbols), state)).or_default().add(group);
    }
    let sample = |((stack, state), goroutines)| Sample { stack, state, goroutines };
    let mut samples: Vec<Sample> = by_frames.into_iter().map(sample).collect();
    samples.sort_by(|a, b| {
        let by_count = b.goroutines.count.cmp(&a.goroutines.count);
        by_count.then_with(|| (&a.stack, a.state).cmp(&(&b.stack, b.state)))
    });
    Profile { taken, samples }
}

impl Profile {
    /// Returns how many goroutines and tasks the profile has counted.
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
        to.write_all(&Encoder::default().profile(self, &program).0)
    }
}

/// Encodes a profile. Strings, functions and locations are numbered in the order of first use.
#[derive(Default)]
struct Encoder<'a> {
    strings: Numbers<&'a str>,
    /// Name and file.
    functions: Numbers<(&'a str, &'a str)>,
    locations: Numbers<&'a Frame>,
}

/// Values and their numbers, from 0.
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
    /// Returns the number of `thing`, which is a new one at first use.
    fn of(&mut self, thing: T) -> u64 {
        *self.known.entry(thing).or_insert_with(|| {
            self.all.push(thing);
            self.all.len() as u64 - 1
        })
    }
}

/// The id of the only mapping (pprof's word for a loaded object): the program.
const PROGRAM: u64 = 1;

/// Field numbers are those of `profile.proto`. Ids of functions and locations begin at 1.
impl<'a> Encoder<'a> {
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

    /// Mapping: id, filename, has_functions, has_filenames, has_line_numbers.
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
