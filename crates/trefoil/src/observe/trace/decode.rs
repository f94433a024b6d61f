//! From words to events: what happened on each P, and between which two times.
//!
//! The time of an event is an interval ([`When`]): it happened after the clock before it and before
//! the clock behind it in its ring. One directly behind a clock happened at that time. Marks narrow
//! it down: if sysmon has found n words in a ring at a time, the first n were written before that
//! time, and the others after it.

use super::Snapshot;
use crate::sched::monitor::preempt::PreemptRefusal;
use crate::sched::record::{
    ANNOUNCED_CALL, Kind, RecordCopy, RingCopy, Source, Stop, UNKNOWN_CALL, Word,
};

/// An interval of time in which something happened, in nanoseconds since the recording began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct When {
    pub(super) earliest: u64,
    pub(super) latest: u64,
}

impl When {
    /// Returns the time if it is known exactly.
    pub(super) fn exact(self) -> Option<u64> {
        (self.earliest == self.latest).then_some(self.latest)
    }

    /// Returns the middle.
    pub(super) fn middle(self) -> u64 {
        self.earliest + self.latest.saturating_sub(self.earliest) / 2
    }

    /// Returns by how much the middle may be wrong.
    pub(super) fn error(self) -> u64 {
        self.latest.saturating_sub(self.earliest).div_ceil(2)
    }
}

/// Who has started or woken a goroutine or task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    /// A goroutine or task.
    Goroutine(u64),
    /// A timer that was late by so many nanoseconds.
    Timer(u64),
    /// A descriptor became ready.
    Poller,
    /// A thread without a P.
    Thread(u64),
    Unknown,
}

/// The call in which a goroutine has no P.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Call {
    /// The function `blocking`.
    Blocking,
    /// A system call, by its number.
    Number(u32),
    Unknown,
}

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// It begins to run.
    Run {
        id: u64,
    },
    /// It stops.
    Stop {
        id: u64,
        stop: Stop,
    },
    /// It goes on without the P, in a call.
    Retaken {
        id: u64,
        call: Call,
    },
    /// It was started, at the place that the address stands for.
    Create {
        id: u64,
        is_task: bool,
        place: u64,
        by: Cause,
    },
    /// It was woken.
    Ready {
        id: u64,
        by: Cause,
    },
    /// The P stole from another one.
    Steal {
        victim: u32,
    },
    /// An M took the P.
    OnM {
        m: u64,
    },
    /// sysmon asked what runs on a P to stop.
    Ask {
        p: u32,
    },
    /// It was asked to stop, and did not.
    Refused {
        id: u64,
        why: PreemptRefusal,
    },
    /// It entered a region; the address stands for its name.
    RegionBegin {
        id: u64,
        text: u64,
    },
    RegionEnd {
        id: u64,
    },
    /// It left a message; the address stands for it.
    Log {
        id: u64,
        text: u64,
    },
}

impl What {
    /// Returns the goroutine or task whose state changes.
    pub(super) fn subject(self) -> Option<u64> {
        match self {
            What::Run { id }
            | What::Stop { id, .. }
            | What::Retaken { id, .. }
            | What::Create { id, .. }
            | What::Ready { id, .. } => Some(id),
            _ => None,
        }
    }
}

/// Something that happened at some time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) when: When,
    pub(super) what: What,
}

/// The events of all rings.
pub(super) struct Trace<'a> {
    pub(super) snapshot: &'a Snapshot,
    /// Those of the Ps, by id, then those of threads without a P.
    pub(super) rings: Vec<Vec<Event>>,
}

/// A mark of one ring.
struct Mark {
    /// When sysmon read the ring.
    when: When,
    written: u64,
}

impl<'a> Trace<'a> {
    pub(super) fn new(snapshot: &'a Snapshot) -> Trace<'a> {
        let record = &snapshot.record;
        let marks = marks(record);
        let mut rings = Vec::new();
        for (i, ring) in record.rings().enumerate() {
            let mut events = Decoder::new(ring, record.copied).decode();
            // Threads without a P have no marks.
            if let Some(marks) = marks.get(i) {
                narrow(&mut events, marks);
            }
            let mut ring = Vec::with_capacity(events.len());
            ring.extend(events.iter().map(|&(_, event)| event));
            rings.push(ring);
        }
        Trace { snapshot, rings }
    }

    /// Returns whether a goroutine or task is a task, and the address of the place where it was
    /// started, if its start was recorded.
    pub(super) fn creation(&self, of: u64) -> Option<(bool, u64)> {
        for event in self.rings.iter().flatten() {
            match event.what {
                What::Create { id, is_task, place, .. } if id == of => {
                    return Some((is_task, place));
                }
                _ => {}
            }
        }
        None
    }

    /// Returns what an address in an event stands for.
    pub(super) fn text(&self, address: u64) -> &str {
        self.snapshot.texts().get(&address).map_or("?", |text| text)
    }

    /// Returns the name of a goroutine or task that was alive when the snapshot was made.
    pub(super) fn name(&self, id: u64) -> Option<&str> {
        self.snapshot.names.get(&id).map(|name| &**name)
    }
}

/// Decodes one ring.
struct Decoder<'a> {
    ring: &'a RingCopy,
    /// When the ring was copied.
    copied: u64,
    /// What runs on the P. None: not known, because the words before are lost.
    current: Option<u64>,
    source: Cause,
    /// The place of the `Create`s that follow; 0 if it is not known.
    place: u64,
    /// The events, each with the number of its word.
    events: Vec<(u64, Event)>,
    /// The first event that is not followed by a clock yet.
    without_latest: usize,
    earliest: Option<u64>,
    /// The last word was a clock.
    exact: bool,
}

impl<'a> Decoder<'a> {
    fn new(ring: &'a RingCopy, copied: u64) -> Decoder<'a> {
        let complete = ring.first == ring.from;
        Decoder {
            ring,
            copied,
            current: complete.then_some(0),
            source: Cause::Unknown,
            place: 0,
            events: Vec::new(),
            without_latest: 0,
            earliest: None,
            exact: false,
        }
    }

    /// Returns the events, each with the number of its word.
    fn decode(mut self) -> Vec<(u64, Event)> {
        for (i, &word) in self.ring.words.iter().enumerate() {
            // Numbers in a file may be anything.
            self.word(self.ring.first.wrapping_add(i as u64), word);
        }
        self.clock(self.copied);
        self.events
    }

    fn word(&mut self, number: u64, word: Word) {
        self.one_word(number, word);
        // `OnM` and `Place` stand between a clock and its event.
        self.exact &= matches!(word.kind(), Kind::Clock | Kind::OnM | Kind::Place);
    }

    fn one_word(&mut self, number: u64, word: Word) {
        let current = self.current.unwrap_or(0);
        let by = if current != 0 { Cause::Goroutine(current) } else { self.source };
        let (detail, payload) = (word.detail(), word.payload());
        match word.kind() {
            // A later one is of the recording before: its writer was stopped before it wrote it.
            Kind::Clock if word.nanos() > self.copied => {}
            Kind::Clock => self.clock(word.nanos()),
            Kind::Switch => self.switch(number, Stop::from_code(detail), payload),
            Kind::Create => {
                let is_task = detail == 1;
                let place = self.place;
                self.push(number, What::Create { id: payload, is_task, place, by });
            }
            Kind::Place => self.place = word.text_key(),
            Kind::Ready if detail != 0 => {
                self.push(number, What::Ready { id: payload, by: Cause::Unknown });
            }
            Kind::Ready => self.push(number, What::Ready { id: payload, by }),
            Kind::Thread => {
                if let Some(What::Create { by, .. } | What::Ready { by, .. }) = self.last() {
                    *by = Cause::Thread(payload);
                }
            }
            Kind::Source if detail == Source::Timer as u8 => self.source = Cause::Timer(payload),
            Kind::Source => self.source = Cause::Poller,
            Kind::Steal => self.push(number, What::Steal { victim: payload as u32 }),
            Kind::OnM => self.push(number, What::OnM { m: payload }),
            Kind::Ask => self.push(number, What::Ask { p: payload as u32 }),
            Kind::Refused => {
                if let Some(why) = PreemptRefusal::from_u8(detail) {
                    self.push(number, What::Refused { id: current, why });
                }
            }
            Kind::Retaken => {
                self.current = Some(0);
                if current != 0 {
                    let call = match payload {
                        ANNOUNCED_CALL => Call::Blocking,
                        UNKNOWN_CALL => Call::Unknown,
                        number => Call::Number(number as u32),
                    };
                    self.push(number, What::Retaken { id: current, call });
                }
            }
            Kind::RegionBegin => {
                self.push(number, What::RegionBegin { id: current, text: word.text_key() });
            }
            Kind::RegionEnd => self.push(number, What::RegionEnd { id: current }),
            Kind::Log => self.push(number, What::Log { id: current, text: word.text_key() }),
            Kind::Mark | Kind::Empty => {}
        }
    }

    fn switch(&mut self, number: u64, stop: Stop, next: u64) {
        let before = self.current.replace(next).unwrap_or(0);
        if next != 0 {
            self.source = Cause::Unknown;
        }
        if before == next && stop == Stop::Nothing {
            return; // A carrier that goes on with its task.
        }
        if before != 0 {
            self.push(number, What::Stop { id: before, stop });
        }
        if next != 0 {
            self.push(number, What::Run { id: next });
        }
    }

    fn clock(&mut self, nanos: u64) {
        // A file may have clocks that go backwards.
        let nanos = self.earliest.map_or(nanos, |earliest| earliest.max(nanos));
        for (_, event) in &mut self.events[self.without_latest..] {
            event.when.latest = nanos;
        }
        self.without_latest = self.events.len();
        self.earliest = Some(nanos);
        self.exact = true;
    }

    /// Adds an event. One before the first clock is dropped: nothing is known of its time.
    fn push(&mut self, number: u64, what: What) {
        let Some(earliest) = self.earliest else { return };
        // What comes directly behind a clock was written at that time.
        let latest = if self.exact { earliest } else { u64::MAX };
        self.events.push((number, Event { when: When { earliest, latest }, what }));
        if self.exact {
            self.without_latest = self.events.len();
        }
    }

    /// Returns the last event, which a further word completes.
    fn last(&mut self) -> Option<&mut What> {
        self.events.last_mut().map(|(_, event)| &mut event.what)
    }
}

/// Returns the marks of each P's ring, in the order in which they were made.
fn marks(record: &RecordCopy) -> Vec<Vec<Mark>> {
    let mut words: Vec<Vec<(When, Word)>> = record.ps.iter().map(|_| Vec::new()).collect();
    // Those that are not followed by a clock yet, by P and place.
    let mut without_latest: Vec<(usize, usize)> = Vec::new();
    let mut earliest = None;
    for &word in &record.outside.words {
        match word.kind() {
            Kind::Clock if word.nanos() <= record.copied => {
                earliest = Some(word.nanos());
                for (p, at) in without_latest.drain(..) {
                    words[p][at].0.latest = word.nanos();
                }
            }
            Kind::Mark => {
                let p = word.marked_p() as usize;
                if let (Some(earliest), Some(of_p)) = (earliest, words.get_mut(p)) {
                    without_latest.push((p, of_p.len()));
                    of_p.push((When { earliest, latest: u64::MAX }, word));
                }
            }
            _ => {}
        }
    }
    // At the end of the recording there may be marks without a clock behind them.
    for (p, at) in without_latest.into_iter().rev() {
        words[p].truncate(at);
    }
    words.into_iter().zip(&record.ps).map(|(of_p, ring)| with_numbers(of_p, ring)).collect()
}

/// Decodes the numbers of a ring's marks, the last one first: each has only its lower bits, and is
/// near the one behind it.
fn with_numbers(words: Vec<(When, Word)>, ring: &RingCopy) -> Vec<Mark> {
    let mut near = ring.first.wrapping_add(ring.words.len() as u64);
    let mut marks = Vec::new();
    for (when, word) in words.into_iter().rev() {
        near = word.marked_words(near);
        marks.push(Mark { when, written: near });
    }
    marks.reverse();
    marks
}

/// Narrows the times of events by marks. Both are in the order in which they were made.
fn narrow(events: &mut [(u64, Event)], marks: &[Mark]) {
    let mut next = 0;
    for (number, event) in events {
        // The first mark that counts this word.
        while next < marks.len() && marks[next].written <= *number {
            next += 1;
        }
        if let Some(mark) = marks.get(next) {
            let latest = event.when.latest.min(mark.when.latest);
            event.when.latest = latest.max(event.when.earliest);
        }
        if let Some(mark) = next.checked_sub(1).and_then(|last| marks.get(last)) {
            let earliest = event.when.earliest.max(mark.when.earliest);
            event.when.earliest = earliest.min(event.when.latest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(kind: Kind, detail: u8, payload: u64) -> Word {
        Word((kind as u64) << 56 | u64::from(detail) << 48 | payload)
    }

    /// A writer may be stopped before it writes a clock of the recording before.
    #[test]
    fn a_clock_after_the_end_of_the_recording_is_ignored() {
        let words = vec![
            word(Kind::Clock, 0, 3_600_000_000_000),
            word(Kind::Clock, 0, 10),
            word(Kind::Switch, 0, 1),
            word(Kind::Clock, 0, 20),
            word(Kind::Switch, 3, 0),
        ];
        let ring = RingCopy { first: 0, from: 0, words };
        let events = Decoder::new(&ring, 100).decode();
        let times: Vec<_> = events.iter().map(|(_, event)| event.when.middle()).collect();
        assert_eq!(times, [10, 20]);
    }

    /// A mark has the lower 36 bits of a number only.
    #[test]
    fn marks_far_from_each_other_have_their_numbers() {
        let ring = |first, words| RingCopy { first, from: 0, words };
        let numbers = [5, 1 << 34, 3 << 34, 5 << 34, (7 << 34) - 1];
        let mut outside = vec![word(Kind::Clock, 0, 1)];
        for number in numbers {
            outside.push(word(Kind::Mark, 0, number & ((1 << 36) - 1)));
            outside.push(word(Kind::Clock, 0, 2));
        }
        // Without a clock behind it, and of a P that is not there.
        outside.extend([word(Kind::Mark, 0, 9), word(Kind::Mark, 0, 1 << 36 | 9)]);
        let record = RecordCopy {
            copied: 100,
            since_end: 0,
            waker_samples: None,
            ps: vec![ring(7 << 34, Vec::new())],
            outside: ring(0, outside),
        };
        let marks = marks(&record);
        let found: Vec<u64> = marks[0].iter().map(|mark| mark.written).collect();
        assert_eq!(found, numbers);
    }
}
