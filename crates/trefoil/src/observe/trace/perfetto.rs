//! A recording as a file for Perfetto.
//!
//! | track | slices |
//! |---|---|
//! | one per P | each time that something ran there; a flow leads from each wake-up to what it woke |
//! | one per goroutine, for the [`GOROUTINE_TRACKS`] that waited longest | its states, one after the other |
//! | one per goroutine with regions | the regions |
//!
//! More tracks would make the viewer slow, and nobody could find theirs.
//!
//! Field numbers are those of Perfetto's `trace_packet.proto`, `track_descriptor.proto` and
//! `track_event.proto`.

use super::decode::{Call, Cause, Event, Trace, What, When};
use super::lives::{Life, State};
use crate::observe::protobuf::Message;
use crate::sched::record::Stop;
use crate::sys::map::Map;
use crate::sys::sort::{sort_by, sort_by_key};
use std::borrow::Cow;

/// The id of the only packet sequence.
const SEQUENCE: u64 = 1;
/// The track of the process. The tracks of the Ps follow, and then that of threads without a P.
const PROCESS_TRACK: u64 = 1;
/// Goroutines and tasks that have a track of their own, at most; the same for regions.
const GOROUTINE_TRACKS: usize = 100;
/// The first track of a goroutine, and the first one with regions.
const FIRST_GOROUTINE_TRACK: u64 = 1 << 32;
const FIRST_REGION_TRACK: u64 = 2 << 32;
/// Values of `TrackEvent.type`.
const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const INSTANT: u64 = 3;
/// Perfetto's numbers of clocks: that of packets which name none, and the wall clock.
const CLOCK_BOOTTIME: u64 = 6;
const CLOCK_REALTIME: u64 = 1;

/// Encodes a recording.
pub(super) fn encode(trace: &Trace<'_>) -> Vec<u8> {
    let (flows, regions) = (Map::new(), Vec::new());
    Encoder { trace, out: Message::default(), flows, next_flow: 1, regions }.encode()
}

struct Encoder<'a> {
    trace: &'a Trace<'a>,
    out: Message,
    /// The flow of the last wake-up of a goroutine that has not run since.
    flows: Map<u64, u64>,
    next_flow: u64,
    /// The region tracks, at most [`GOROUTINE_TRACKS`].
    regions: Vec<RegionTrack>,
}

/// The track with the regions of a goroutine.
struct RegionTrack {
    goroutine: u64,
    track: u64,
    /// How many of its regions are open.
    open: u32,
}

impl Encoder<'_> {
    fn encode(mut self) -> Vec<u8> {
        let origin = &self.trace.snapshot.origin;
        let (pid, program) = origin.as_ref().map_or((1, "trefoil"), |at| (at.pid, &at.program));
        let process = Message::default().number(1, pid.into()).bytes(6, program.as_bytes());
        let wall_clock = origin.as_ref().map(|at| at.taken);
        self.descriptor(Message::default().number(1, PROCESS_TRACK).message(3, process), true);
        if let Some(nanos) = wall_clock {
            self.wall_clock(nanos);
        }
        let rings = &self.trace.rings;
        let outside = rings.len() - 1;
        for ring in 0..rings.len() {
            let name =
                if ring == outside { "threads without a P".into() } else { format!("P{ring}") };
            self.track(track_of(ring), &name);
        }
        for (at, ring, event) in in_order(rings) {
            match event.what {
                What::RegionBegin { id, text } => self.region_begins(at, id, text),
                What::RegionEnd { id } => self.region_ends(at, id),
                _ => self.event(at, ring, event),
            }
        }
        self.goroutine_tracks();
        self.out.0
    }

    /// Says what the wall clock showed when the recording was copied.
    fn wall_clock(&mut self, nanos: u64) {
        let clock = |id, time| Message::default().number(1, id).number(2, time);
        let copied = self.trace.snapshot.record.copied;
        let clocks = Message::default()
            .message(1, clock(CLOCK_BOOTTIME, copied))
            .message(1, clock(CLOCK_REALTIME, nanos));
        self.packet(Message::default().number(10, SEQUENCE).message(6, clocks));
    }

    /// Adds the states of those that waited longest.
    fn goroutine_tracks(&mut self) {
        let lives = self.trace.lives();
        let waited = |life: &Life| {
            let times = life.times();
            times.waiting.saturating_add(times.runnable).saturating_add(times.without_p)
        };
        let mut longest: Vec<_> =
            lives.entries().iter().map(|(id, life)| (waited(life), *id)).collect();
        sort_by(&mut longest, |a, b| b.cmp(a));
        for (i, (_, id)) in longest.into_iter().take(GOROUTINE_TRACKS).enumerate() {
            let track = FIRST_GOROUTINE_TRACK + i as u64;
            self.track(track, &format!("{}: states", self.title(id)));
            let mut last = 0;
            for span in &lives[&id].spans {
                // Two intervals may overlap.
                last = span.begin.middle().max(last);
                let state = begin(SLICE_BEGIN, &state_text(span.state));
                let state = match span.state {
                    State::Runnable(by) => state.message(4, text("by", &cause_text(by))),
                    _ => state,
                };
                let state = state.message(4, number("goroutine", id));
                self.on_track(last, track, with_error(state, span.begin));
                last = span.end.middle().max(last);
                self.on_track(last, track, Message::default().number(9, SLICE_END));
            }
        }
    }

    fn region_begins(&mut self, at: u64, id: u64, text: u64) {
        if self.region_track(id).is_none() {
            if self.regions.len() == GOROUTINE_TRACKS {
                return;
            }
            let track = FIRST_REGION_TRACK + self.regions.len() as u64;
            self.track(track, &format!("{}: regions", self.title(id)));
            self.regions.push(RegionTrack { goroutine: id, track, open: 0 });
        }
        let region = begin(SLICE_BEGIN, self.trace.text(text)).message(4, number("goroutine", id));
        if let Some(of) = self.region_track(id) {
            of.open += 1;
            let track = of.track;
            self.on_track(at, track, region);
        }
    }

    fn region_track(&mut self, id: u64) -> Option<&mut RegionTrack> {
        self.regions.iter_mut().find(|of| of.goroutine == id)
    }

    fn region_ends(&mut self, at: u64, id: u64) {
        // Its beginning may be lost.
        if let Some(of @ RegionTrack { open: 1.., .. }) = self.region_track(id) {
            of.open -= 1;
            let track = of.track;
            self.on_track(at, track, Message::default().number(9, SLICE_END));
        }
    }

    /// Adds a track of the process.
    fn track(&mut self, id: u64, name: &str) {
        let track = Message::default().number(1, id).bytes(2, name.as_bytes());
        self.descriptor(track.number(5, PROCESS_TRACK), false);
    }

    fn on_track(&mut self, at: u64, track: u64, event: Message) {
        let event = event.number(11, track);
        self.packet(Message::default().number(8, at).number(10, SEQUENCE).message(11, event));
    }

    /// Adds a packet with a track. The first packet clears what a reader knows of the sequence.
    fn descriptor(&mut self, track: Message, is_first: bool) {
        let mut packet = Message::default().number(10, SEQUENCE).message(60, track);
        if is_first {
            packet = packet.number(13, 1); // SEQ_INCREMENTAL_STATE_CLEARED
        }
        self.packet(packet);
    }

    fn packet(&mut self, packet: Message) {
        self.out = std::mem::take(&mut self.out).message(1, packet);
    }

    fn event(&mut self, at: u64, ring: usize, event: Event) {
        let message = match event.what {
            What::Run { id } => {
                let begin = begin(SLICE_BEGIN, &self.title(id)).message(4, number("goroutine", id));
                match self.flows.remove(&id) {
                    Some(flow) => begin.fixed(48, flow), // terminating_flow_ids
                    None => begin,
                }
            }
            What::Stop { stop, .. } => {
                Message::default().number(9, SLICE_END).message(4, text("stopped", stop_text(stop)))
            }
            What::Retaken { call, .. } => {
                let end = Message::default().number(9, SLICE_END);
                let end = end.message(4, text("stopped", "without a P"));
                match call {
                    Call::Number(n) => end.message(4, number("system call", n.into())),
                    Call::Blocking | Call::Unknown => end,
                }
            }
            What::Create { id, place, .. } => {
                let flow = self.begin_flow(id);
                begin(INSTANT, &format!("start {}", self.title(id)))
                    .message(4, number("goroutine", id))
                    .message(4, text("place", self.trace.text(place)))
                    .fixed(47, flow) // flow_ids
            }
            What::Ready { id, by } => {
                let flow = self.begin_flow(id);
                let wake = begin(INSTANT, &format!("wake {}", self.title(id)))
                    .message(4, number("goroutine", id))
                    .message(4, text("by", &cause_text(by)))
                    .fixed(47, flow);
                let place = match by {
                    Cause::Goroutine(by) => self.trace.snapshot.wakes.place(id, by, event.when),
                    _ => None,
                };
                match place {
                    Some(place) => wake.message(4, text("place", place)),
                    None => wake,
                }
            }
            What::Steal { victim } => {
                begin(INSTANT, "steal").message(4, number("from P", victim.into()))
            }
            What::OnM { m } => begin(INSTANT, "M").message(4, number("M", m)),
            What::Ask { p } => begin(INSTANT, "ask to stop").message(4, number("P", p.into())),
            What::Refused { why, .. } => {
                begin(INSTANT, "preemption refused").message(4, text("why", why.text()))
            }
            What::RegionBegin { text, .. } | What::Log { text, .. } => {
                begin(INSTANT, self.trace.text(text))
            }
            What::RegionEnd { .. } => begin(INSTANT, "end of region"),
        };
        self.on_track(at, track_of(ring), with_error(message, event.when));
    }

    fn title(&self, id: u64) -> String {
        match self.trace.name(id) {
            Some(name) => format!("G{id} {name}"),
            None => format!("G{id}"),
        }
    }

    /// Returns the number of a new flow, which ends when `id` runs.
    fn begin_flow(&mut self, id: u64) -> u64 {
        let flow = self.next_flow;
        self.next_flow += 1;
        self.flows.insert(id, flow);
        flow
    }
}

fn track_of(ring: usize) -> u64 {
    PROCESS_TRACK + 1 + ring as u64
}

/// TrackEvent: type, name.
fn begin(kind: u64, name: &str) -> Message {
    Message::default().number(9, kind).bytes(23, name.as_bytes())
}

/// DebugAnnotation: name, uint_value.
fn number(name: &str, n: u64) -> Message {
    Message::default().bytes(10, name.as_bytes()).number(3, n)
}

/// Adds by how much the time of an event may be wrong, if it may.
fn with_error(event: Message, when: When) -> Message {
    match when.error() {
        0 => event,
        error => event.message(4, number("time ± ns", error)),
    }
}

/// DebugAnnotation: name, string_value.
fn text(name: &str, text: &str) -> Message {
    Message::default().bytes(10, name.as_bytes()).bytes(6, text.as_bytes())
}

fn state_text(state: State) -> Cow<'static, str> {
    match state {
        State::Unknown => "unknown".into(),
        State::Runnable(_) => "runnable".into(),
        State::Running(p) => format!("running on P{p}").into(),
        State::WithoutP(_) => "without a P".into(),
        State::Waiting(stop) => stop_text(stop).into(),
        State::Ended => "ended".into(),
    }
}

fn stop_text(stop: Stop) -> &'static str {
    match stop {
        Stop::Nothing => "",
        Stop::Yielded => "yield",
        Stop::Preempted => "preempted",
        Stop::Ended => "end",
        Stop::Parked(reason) => reason.text(),
    }
}

fn cause_text(by: Cause) -> String {
    match by {
        Cause::Goroutine(id) => format!("G{id}"),
        Cause::Timer(_) => "timer".into(),
        Cause::Poller => "poller".into(),
        Cause::Thread(tid) => format!("thread {tid}"),
        Cause::Unknown => "unknown".into(),
    }
}

/// Returns all events, each with a time and its ring, by time. What was woken runs later than its
/// wake-up: the flow would be lost otherwise.
fn in_order(rings: &[Vec<Event>]) -> Vec<(u64, usize, Event)> {
    let mut at: Vec<Vec<u64>> = rings.iter().map(|events| times(events)).collect();
    // The wake-ups and the runs of each goroutine.
    let mut steps: Map<u64, [Vec<(usize, usize)>; 2]> = Map::new();
    for (ring, i) in by_time(rings, &at) {
        match rings[ring][i].what {
            What::Create { id, .. } | What::Ready { id, .. } => {
                steps.get_or_default(id)[0].push((ring, i));
            }
            What::Run { id } => steps.get_or_default(id)[1].push((ring, i)),
            _ => {}
        }
    }
    for (_, [wakes, runs]) in steps {
        let mut wakes = wakes.into_iter().peekable();
        for (ring, i) in runs {
            let latest = rings[ring][i].when.latest;
            let is_before = |&(ring, i): &(usize, usize)| rings[ring][i].when.earliest <= latest;
            // Not every run follows a wake-up: it may have yielded.
            let Some((wake_ring, wake)) = wakes.next_if(is_before) else { continue };
            let woken = at[wake_ring][wake];
            at[ring][i] = at[ring][i].max(woken.saturating_add(1).min(latest));
            at[wake_ring][wake] = woken.min(at[ring][i].saturating_sub(1));
        }
    }
    at.iter_mut().for_each(|times| never_backwards(times));
    let order = by_time(rings, &at);
    order.into_iter().map(|(ring, i)| (at[ring][i], ring, rings[ring][i])).collect()
}

/// Returns the ring and the index of every event, by time. Events of one ring stay in their order.
fn by_time(rings: &[Vec<Event>], at: &[Vec<u64>]) -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    for (ring, events) in rings.iter().enumerate() {
        all.extend((0..events.len()).map(|i| (ring, i)));
    }
    sort_by_key(&mut all, |&(ring, i)| at[ring][i]);
    all
}

fn never_backwards(times: &mut [u64]) {
    let mut last = 0;
    for time in times {
        last = last.max(*time);
        *time = last;
    }
}

/// Returns a time for each event of a ring: those whose times are the same interval are spread
/// over it.
fn times(events: &[Event]) -> Vec<u64> {
    let mut times = Vec::with_capacity(events.len());
    for group in events.chunk_by(|a, b| a.when == b.when) {
        let when = group[0].when;
        let span = u128::from(when.latest.saturating_sub(when.earliest));
        let steps = group.len() as u64 + 1;
        let part = |i: u64| (span * u128::from(i) / u128::from(steps)) as u64;
        times.extend((1..steps).map(|i| when.earliest.saturating_add(part(i))));
    }
    // Two intervals may overlap.
    never_backwards(&mut times);
    times
}
