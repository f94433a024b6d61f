//! `Profile`: values by stack and labels, in pprof's format and as text.
//!
//! There are three formats: *folded* text for flame graphs, pprof's protocol buffer, and a text for
//! people. The second needs seven small messages, which are encoded by hand here. It contains
//! functions, files and lines but no addresses, so pprof does not need the program's binary.
//!
//! Invariants:
//! 1. The profile is a value: it refers neither to goroutines nor to loaded objects.
//! 2. Samples with the same frames, labels and state are one sample: stacks that differ only in
//!    frames of the runtime are shown alike.
//!
//! Rejected: a crate for protocol buffers or for gzip, because pprof reads plain files too.

use super::protobuf::Message;
use super::symbols::own_file;
use crate::sched::labels::LabelSet;
use crate::sys::map::Map;
use crate::sys::sort::{sort_by, sort_by_key};
use std::fmt::Write as _;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use trefoil_base::symbols::Frame;

/// How many values a sample has at most.
pub(super) const VALUES_MAX: usize = 3;

/// What the values of a sample are, by the kind of the profile. Those that a kind does not have are
/// zero.
pub(super) type Values = [u64; VALUES_MAX];

/// A type of values, and its unit.
type ValueType = (&'static str, &'static str);

/// What a profile shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ProfileKind {
    /// Goroutines that are alive: their number.
    Goroutines,
    /// Goroutines that wait: their number, how long they have waited together, and the longest.
    Waits,
    /// Goroutines that wait for ever, as far as is known: the same values.
    Leaks,
    /// CPU time: the number of periods, and nanoseconds.
    Cpu,
    /// Waits that have ended, and waits for locks at the unlocker: their number, and nanoseconds.
    Block,
    Mutex,
}

impl ProfileKind {
    fn name(self) -> &'static str {
        match self {
            ProfileKind::Goroutines => "goroutine",
            ProfileKind::Waits => "wait",
            ProfileKind::Leaks => "leak",
            ProfileKind::Cpu => "cpu",
            ProfileKind::Block => "block",
            ProfileKind::Mutex => "mutex",
        }
    }

    /// Returns the types of the values, in Go's words where Go has them.
    fn values(self) -> &'static [ValueType] {
        match self {
            ProfileKind::Goroutines => &[("goroutine", "count")],
            ProfileKind::Waits | ProfileKind::Leaks => {
                &[("goroutine", "count"), ("age", "nanoseconds"), ("longest", "nanoseconds")]
            }
            ProfileKind::Cpu => &[("samples", "count"), ("cpu", "nanoseconds")],
            ProfileKind::Block | ProfileKind::Mutex => {
                &[("contentions", "count"), ("delay", "nanoseconds")]
            }
        }
    }

    /// Returns which value is shown unless another one is asked for.
    fn main_value(self) -> usize {
        match self {
            ProfileKind::Goroutines | ProfileKind::Waits | ProfileKind::Leaks => 0,
            ProfileKind::Cpu | ProfileKind::Block | ProfileKind::Mutex => 1,
        }
    }

    fn period_type(self) -> ValueType {
        match self {
            ProfileKind::Goroutines | ProfileKind::Waits | ProfileKind::Leaks => {
                ("goroutine", "count")
            }
            ProfileKind::Cpu => ("cpu", "nanoseconds"),
            ProfileKind::Block | ProfileKind::Mutex => ("contentions", "count"),
        }
    }

    fn add(self, to: &mut Values, more: Values) {
        for (i, (value, more)) in to.iter_mut().zip(more).enumerate() {
            let is_longest = i == 2;
            *value = if is_longest { more.max(*value) } else { *value + more };
        }
    }
}

/// Values by stack: how many goroutines stand where, where CPU time was used, or where goroutines
/// waited. [`debug::profile`](crate::debug::profile) and the functions of
/// [`profile`](mod@crate::profile) return it.
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
    kind: ProfileKind,
    taken: SystemTime,
    /// How long it took to take the profile, for kinds where that matters.
    duration: Duration,
    /// The unit in which values are counted, in the unit of the kind's `period_type`.
    period: u64,
    lost: u64,
    /// The largest first.
    samples: Vec<Sample>,
}

/// What samples of the same kind are grouped by.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct SampleKey {
    /// Innermost first.
    pub(super) stack: Vec<Arc<Frame>>,
    /// The state of a goroutine, or why it waited.
    pub(super) state: Option<&'static str>,
    pub(super) labels: Option<Arc<LabelSet>>,
}

/// The values of a group, and the id of the goroutine if there is only one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Group {
    pub(super) values: Values,
    pub(super) id: Option<u64>,
}

impl Group {
    pub(super) fn add(&mut self, kind: ProfileKind, more: Group) {
        let is_first = self.values == Values::default();
        self.id = if is_first || self.id == more.id { more.id } else { None };
        kind.add(&mut self.values, more.values);
    }
}

/// The groups of a profile. Groups with different ids of goroutines are different samples.
pub(super) type GroupsByFrames = Map<(SampleKey, Option<u64>), Group>;

#[derive(Clone, Debug)]
struct Sample {
    key: SampleKey,
    group: Group,
}

impl Profile {
    /// Makes a profile that was taken from `taken` to now.
    pub(super) fn new(
        kind: ProfileKind,
        taken: SystemTime,
        period: u64,
        lost: u64,
        groups: GroupsByFrames,
    ) -> Profile {
        let samples = groups.into_iter().map(|((key, _), group)| Sample { key, group });
        let mut samples: Vec<Sample> = samples.collect();
        let value = |sample: &Sample| sample.group.values[kind.main_value()];
        sort_by(&mut samples, |a, b| value(b).cmp(&value(a)).then_with(|| a.key.cmp(&b.key)));
        let duration = taken.elapsed().unwrap_or_default();
        Profile { kind, taken, duration, period, lost, samples }
    }

    /// Returns how many goroutines and tasks the profile has counted; 0 if it counts something
    /// else.
    ///
    /// ```
    /// assert_eq!(trefoil::run(trefoil::debug::profile).goroutines(), 1);
    /// ```
    pub fn goroutines(&self) -> u64 {
        match self.kind {
            ProfileKind::Goroutines | ProfileKind::Waits | ProfileKind::Leaks => self.sum(0),
            ProfileKind::Cpu | ProfileKind::Block | ProfileKind::Mutex => 0,
        }
    }

    /// Returns the sum of all samples: goroutines, or nanoseconds of CPU time or of waiting.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// trefoil::run(|| {
    ///     let profile = trefoil::profile::cpu(Duration::from_millis(50)).unwrap();
    ///     println!("{:?} of CPU time", Duration::from_nanos(profile.total()));
    /// });
    /// ```
    pub fn total(&self) -> u64 {
        self.sum(self.kind.main_value())
    }

    fn sum(&self, value: usize) -> u64 {
        self.samples.iter().map(|sample| sample.group.values[value]).sum()
    }

    /// Returns how much of [`total`](Profile::total) is missing because the buffer for samples,
    /// whose size is fixed, was full. For waits it counts only the samples that were lost, not the
    /// shorter waits that those stand for.
    ///
    /// ```
    /// assert_eq!(trefoil::run(trefoil::debug::profile).lost(), 0);
    /// ```
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Returns the [`total`](Profile::total) of each value of a [label](mod@crate::labels), the
    /// largest first. None stands for goroutines without that label.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let _labels = trefoil::labels! { "user" => "ann" };
    ///     let by_user = trefoil::debug::profile().by_label("user");
    ///     assert_eq!(by_user, [(Some("ann".to_owned()), 1)]);
    /// });
    /// ```
    pub fn by_label(&self, key: &str) -> Vec<(Option<String>, u64)> {
        let mut sums = self.sum_by(|sample| {
            let labels = sample.key.labels.as_deref().unwrap_or_default();
            let label = labels.iter().find(|(known, _)| **known == *key);
            label.map(|(_, value)| (**value).to_owned())
        });
        sort_by_key(&mut sums, |&(_, sum)| std::cmp::Reverse(sum));
        sums
    }

    /// Returns the profile as folded stacks, the text that flame graph tools read.
    ///
    /// Each distinct stack is one line: its functions from the outermost to the innermost,
    /// separated by `;`, then a space and the number of goroutines, or of nanoseconds. The names
    /// have paths if the program has full debug information. With line tables only, the file and
    /// line follow the name.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let text = trefoil::debug::profile().folded();
    ///     assert_eq!(text.lines().count(), 1); // Only main is alive.
    ///     assert!(text.ends_with(" 1\n"));
    /// });
    /// ```
    pub fn folded(&self) -> String {
        let lines = self.sum_by(|sample| {
            // A name may have the separator in it: `<[u8; 4] as T>::f`.
            let stack = sample.key.stack.iter().rev();
            let titles = stack.map(|frame| frame.title().replace(';', ","));
            Some(titles.collect::<Vec<_>>().join(";"))
        });
        let mut text = String::new();
        for (line, count) in lines {
            let _ = writeln!(text, "{} {count}", line.unwrap_or_default());
        }
        text
    }

    /// Returns the sum of the samples of each value of `text_of`, in the order of the texts.
    fn sum_by(&self, text_of: impl Fn(&Sample) -> Option<String>) -> Vec<(Option<String>, u64)> {
        let value = |sample: &Sample| sample.group.values[self.kind.main_value()];
        let mut sums: Vec<_> = self.samples.iter().map(|s| (text_of(s), value(s))).collect();
        sort_by(&mut sums, |a, b| a.0.cmp(&b.0));
        sums.dedup_by(|next, first| {
            let is_same = next.0 == first.0;
            first.1 += if is_same { next.1 } else { 0 };
            is_same
        });
        sums
    }

    /// Returns the profile as text, in the form of Go's `debug=1`: for each stack its values, its
    /// labels, and its functions from the innermost to the outermost.
    ///
    /// ```
    /// trefoil::run(|| {
    ///     let text = trefoil::debug::profile().text();
    ///     assert!(text.starts_with("goroutine profile: total 1\n"));
    /// });
    /// ```
    pub fn text(&self) -> String {
        let mut out = format!("{} profile: total {}\n", self.kind.name(), self.total());
        if self.lost > 0 {
            let _ = writeln!(out, "# lost: {}", self.lost);
        }
        let types = self.kind.values().iter().map(|(name, unit)| format!("{name}/{unit}"));
        let _ = writeln!(out, "# values: {}", types.collect::<Vec<_>>().join(" "));
        for Sample { key, group } in &self.samples {
            out.push('\n');
            for value in &group.values[..self.kind.values().len()] {
                let _ = write!(out, "{value} ");
            }
            out.push_str("@\n");
            if let Some(state) = key.state {
                let _ = writeln!(out, "# state: {state}");
            }
            if let Some(labels) = &key.labels {
                out.push_str("# labels: ");
                let _ = super::dump::write_labels(&mut out, labels);
                out.push('\n');
            }
            for frame in &key.stack {
                let _ = writeln!(out, "#\t{}\t{}:{}", frame.name, frame.file, frame.line);
            }
        }
        out
    }

    /// Writes the profile in pprof's format (`profile.proto`, not compressed), for `go tool pprof`
    /// and other tools that read it.
    ///
    /// A sample has the [labels](mod@crate::labels) of its goroutine. A goroutine that waits has
    /// the label `state`, with the same words as a [`dump`](crate::debug::dump), and `id` if it is
    /// the only one of its sample.
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
        let program = std::fs::read_link(own_file("exe")).unwrap_or_default();
        let program = program.to_string_lossy();
        let comment = if self.lost > 0 { format!("lost: {}", self.lost) } else { String::new() };
        to.write_all(&Encoder::default().profile(self, &program, &comment).0)
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
    known: Map<T, u64>,
    all: Vec<T>,
}

impl<T> Default for Numbers<T> {
    fn default() -> Self {
        Numbers { known: Map::new(), all: Vec::new() }
    }
}

impl<T: Copy + Eq + std::hash::Hash> Numbers<T> {
    /// Returns the number of `thing`, which is a new one at first use.
    fn of(&mut self, thing: T) -> u64 {
        *self.known.get_or_insert_with(thing, || {
            self.all.push(thing);
            self.all.len() as u64 - 1
        })
    }
}

/// The id of the only mapping (pprof's word for a loaded object): the program.
const PROGRAM: u64 = 1;

/// Field numbers are those of `profile.proto`. Ids of functions and locations begin at 1.
impl<'a> Encoder<'a> {
    fn profile(mut self, profile: &'a Profile, program: &'a str, comment: &'a str) -> Message {
        // The first string must be empty.
        self.strings.of("");
        let since = profile.taken.duration_since(UNIX_EPOCH).unwrap_or_default();
        let kind = profile.kind;
        let mut out = Message::default()
            .number(9, since.as_nanos() as u64) // time_nanos
            .number(10, profile.duration.as_nanos() as u64) // duration_nanos
            .message(11, self.value_type(kind.period_type())) // period_type
            .number(12, profile.period)
            .message(3, self.mapping(program))
            .number(14, self.strings.of(kind.values()[kind.main_value()].0)); // default_sample_type
        for &value in kind.values() {
            out = out.message(1, self.value_type(value)); // sample_type
        }
        // There is no field for what is lost; `go tool pprof -comments` prints it.
        if !comment.is_empty() {
            out = out.number(13, self.strings.of(comment)); // comment
        }
        for sample in &profile.samples {
            out = out.message(2, self.sample(kind, sample));
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
    fn value_type(&mut self, (kind, unit): ValueType) -> Message {
        let (kind, unit) = (self.strings.of(kind), self.strings.of(unit));
        Message::default().number(1, kind).number(2, unit)
    }

    /// Mapping: id, filename, has_functions, has_filenames, has_line_numbers.
    fn mapping(&mut self, program: &'a str) -> Message {
        let known = [7, 8, 9].into_iter();
        let mapping = Message::default().number(1, PROGRAM).number(5, self.strings.of(program));
        known.fold(mapping, |mapping, field| mapping.number(field, 1))
    }

    /// Sample: location_id, value, label.
    fn sample(&mut self, kind: ProfileKind, Sample { key, group }: &'a Sample) -> Message {
        let ids = key.stack.iter().map(|frame| self.locations.of(frame) + 1);
        let values = group.values.into_iter().take(kind.values().len());
        let mut out = Message::default().numbers(1, ids).numbers(2, values);
        // Label: key, str; or key, num.
        let own = key.state.map(|state| ("state", state));
        let labels = key.labels.as_deref().unwrap_or_default();
        let labels = labels.iter().map(|(key, value)| (&**key, &**value));
        for (key, value) in own.into_iter().chain(labels) {
            let (key, value) = (self.strings.of(key), self.strings.of(value));
            out = out.message(3, Message::default().number(1, key).number(2, value));
        }
        if let Some(id) = group.id {
            out = out.message(3, Message::default().number(1, self.strings.of("id")).number(3, id));
        }
        out
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
