//! A recording as a file for Perfetto: a track per P, a slice for each time that something ran
//! there, and a flow from each wake-up to what it woke.
//!
//! Field numbers are those of Perfetto's `trace_packet.proto`, `track_descriptor.proto` and
//! `track_event.proto`.

use super::decode::{Call, Cause, Event, Trace, What};
use crate::observe::protobuf::Message;
use crate::sched::record::Stop;
use std::collections::HashMap;

/// The id of the only packet sequence.
const SEQUENCE: u64 = 1;
/// The track of the process. The tracks of the Ps follow, and then that of threads without a P.
const PROCESS_TRACK: u64 = 1;
/// Values of `TrackEvent.type`.
const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const INSTANT: u64 = 3;

/// Encodes a recording.
pub(super) fn encode(trace: &Trace<'_>) -> Vec<u8> {
    Encoder { trace, out: Message::default(), flows: HashMap::new(), next_flow: 1 }.encode()
}

struct Encoder<'a> {
    trace: &'a Trace<'a>,
    out: Message,
    /// The flow of the last wake-up of a goroutine that has not run since.
    flows: HashMap<u64, u64>,
    next_flow: u64,
}

impl Encoder<'_> {
    fn encode(mut self) -> Vec<u8> {
        let process = Message::default().number(1, std::process::id().into()).bytes(6, b"trefoil");
        self.descriptor(Message::default().number(1, PROCESS_TRACK).message(3, process), true);
        let rings: Vec<&[Event]> = self.trace.rings().collect();
        let outside = rings.len() - 1;
        for ring in 0..rings.len() {
            let name =
                if ring == outside { "threads without a P".into() } else { format!("P{ring}") };
            let track = Message::default().number(1, track_of(ring)).bytes(2, name.as_bytes());
            self.descriptor(track.number(5, PROCESS_TRACK), false);
        }
        let mut all: Vec<(u64, usize, Event)> = Vec::new();
        for (ring, events) in rings.into_iter().enumerate() {
            all.extend(times(events).into_iter().zip(events).map(|(at, &event)| (at, ring, event)));
        }
        // Stable: events of one ring stay in their order.
        all.sort_by_key(|&(at, ..)| at);
        for (at, ring, event) in all {
            self.event(at, ring, event.what);
        }
        self.out.0
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

    fn event(&mut self, at: u64, ring: usize, what: What) {
        let event = match what {
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
                begin(INSTANT, &format!("wake {}", self.title(id)))
                    .message(4, number("goroutine", id))
                    .message(4, text("by", &cause_text(by)))
                    .fixed(47, flow)
            }
            What::Steal { victim } => {
                begin(INSTANT, "steal").message(4, number("from P", victim.into()))
            }
            What::OnM { m } => begin(INSTANT, "M").message(4, number("M", m)),
            What::Ask { p } => begin(INSTANT, "ask to stop").message(4, number("P", p.into())),
            What::Refused { why, .. } => {
                begin(INSTANT, "preemption refused").message(4, text("why", why.text()))
            }
            What::RegionBegin { text, .. } => begin(INSTANT, self.trace.text(text)),
            What::RegionEnd { .. } => begin(INSTANT, "end of region"),
            What::Log { text, .. } => begin(INSTANT, self.trace.text(text)),
        };
        let event = event.number(11, track_of(ring));
        self.packet(Message::default().number(8, at).number(10, SEQUENCE).message(11, event));
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

/// DebugAnnotation: name, string_value.
fn text(name: &str, text: &str) -> Message {
    Message::default().bytes(10, name.as_bytes()).bytes(6, text.as_bytes())
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
    let mut last = 0;
    for time in &mut times {
        last = last.max(*time);
        *time = last;
    }
    times
}
