//! From words to events: what happened on each P, and between which two times.
//!
//! The time of an event is an interval ([`When`]): it happened after the clock before it and before
//! the clock behind it in its ring. One directly behind a clock happened at that time. Marks narrow
//! it down: if sysmon has found n words in a ring at a time, the first n were written before that
//! time, and the others after it.

use super::Snapshot;
use crate::sched::monitor::preempt::PreemptRefusal;
use crate::sched::record::{ANNOUNCED_CALL, Kind, RingCopy, Source, Stop, UNKNOWN_CALL, Word};

/// An interval of time in which something happened, in nanoseconds since the recording began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct When {
    pub(super) earliest: u64,
    pub(super) latest: u64,
}

impl When {
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
    /// By the id of the P.
    pub(super) ps: Vec<Vec<Event>>,
    /// Of threads without a P.
    pub(super) outside: Vec<Event>,
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
        let ps = record.ps.iter().enumerate().map(|(p, ring)| {
            let mut events = Decoder::new(ring, record.copied).decode();
            narrow(&mut events, &marks_of(&record.outside, p as u32, ring.first));
            events.into_iter().map(|(_, event)| event).collect()
        });
        let outside = Decoder::new(&record.outside, record.copied).decode();
        Trace {
            snapshot,
            ps: ps.collect(),
            outside: outside.into_iter().map(|(_, event)| event).collect(),
        }
    }

    /// Returns the events by ring: those of the Ps, then those of threads without a P.
    pub(super) fn rings(&self) -> impl Iterator<Item = &[Event]> {
        self.ps.iter().chain([&self.outside]).map(Vec::as_slice)
    }

    /// Returns whether a goroutine or task is a task, and the address of the place where it was
    /// started, if its start was recorded.
    pub(super) fn creation(&self, of: u64) -> Option<(bool, u64)> {
        self.rings().flatten().find_map(|event| match event.what {
            What::Create { id, is_task, place, .. } if id == of => Some((is_task, place)),
            _ => None,
        })
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

/// Returns the marks of the ring of `p`, in their order. The numbers of its words are near `near`.
fn marks_of(outside: &RingCopy, p: u32, near: u64) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    let (mut clock, mut complete) = (None, 0);
    for word in &outside.words {
        match word.kind() {
            Kind::Clock => {
                clock = Some(word.nanos());
                for mark in &mut marks[complete..] {
                    mark.when.latest = word.nanos();
                }
                complete = marks.len();
            }
            Kind::Mark if word.marked_p() == p => {
                if let Some(earliest) = clock {
                    let when = When { earliest, latest: u64::MAX };
                    marks.push(Mark { when, written: word.marked_words(near) });
                }
            }
            _ => {}
        }
    }
    marks.truncate(complete);
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
