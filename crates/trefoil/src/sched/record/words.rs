//! The words of a ring: one event, or a part of one, in 8 bytes.
//!
//! A word is `kind 8 | detail 8 | payload 48`; a clock has a payload of 56 bits. An event that
//! needs more has further words with kinds of their own, so a reader may begin anywhere in a ring:
//!
//! | [`Kind`] | detail | payload |
//! |---|---|---|
//! | `Clock` | – | nanoseconds since the recording began |
//! | `Switch` | why the running one stops ([`Stop`]) | id of the next one, or 0 |
//! | `Create` | goroutine (0) or task (1) | its id |
//! | `Place` | – | the address of the `Location` at which the following `Create`s are |
//! | `Ready` | 1: the waker is not known | id of the goroutine or task that was woken |
//! | `Thread`, after `Ready` or `Create` | – | id of the thread that woke or started it |
//! | `Source` | what wakes the next ones ([`Source`]) | by how many nanoseconds a timer was late |
//! | `Steal` | – | the id of the P that it stole from |
//! | `OnM` | – | id of the M that runs this P from now on |
//! | `Ask` | – | id of the P whose goroutine is asked to stop |
//! | `Refused` | why it did not stop (`PreemptRefusal`) | – |
//! | `Retaken` | – | number of the system call that blocks the M, [`UNKNOWN_CALL`] or [`ANNOUNCED_CALL`] |
//! | `Mark` | – | id of a P in 12 bits, words that its ring had in 36 |
//! | `RegionBegin`, `Log` | bytes of the text | address of the text |
//! | `RegionEnd` | – | – |

use crate::sched::MAX_PROCS;
use crate::sched::runnable::RunHead;
use crate::sched::wait::reason::WaitReason;

/// The payload of a word.
pub(super) const PAYLOAD: u64 = (1 << 48) - 1;
/// The payload of a clock.
const CLOCK_PAYLOAD: u64 = (1 << 56) - 1;
/// Bits of a mark that count words. The others are the P's id.
const MARK_BITS: u32 = 36;
/// The payload of `Retaken` if the call is not known.
pub(crate) const UNKNOWN_CALL: u64 = PAYLOAD;
/// The payload of `Retaken` if the goroutine has announced that it will block.
pub(crate) const ANNOUNCED_CALL: u64 = PAYLOAD - 1;

const _: () = assert!(MAX_PROCS <= 1 << (48 - MARK_BITS));

macro_rules! kinds {
    ($($name:ident,)+) => {
        /// The kind of a word; see the head of the file.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u8)]
        pub(crate) enum Kind { Empty, $($name,)+ }

        impl Kind {
            const ALL: &[Kind] = &[Kind::Empty, $(Kind::$name,)+];
        }
    };
}

kinds! {
    Clock, Switch, Create, Place, Ready, Thread, Source, Steal, OnM, Ask, Refused, Retaken, Mark,
    RegionBegin, RegionEnd, Log,
}

/// Why a goroutine or task stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stop {
    /// None ran.
    Nothing,
    Yielded,
    /// Its slice is over.
    Preempted,
    Ended,
    Parked(WaitReason),
}

/// A [`Stop`] as a word has it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct StopCode(pub(super) u8);

impl StopCode {
    pub(crate) const NOTHING: StopCode = StopCode(0);
    pub(crate) const YIELDED: StopCode = StopCode(1);
    pub(crate) const PREEMPTED: StopCode = StopCode(2);
    pub(crate) const ENDED: StopCode = StopCode(3);
    /// The code of a wait is this and the number of its reason.
    const PARKED: u8 = 16;

    /// Returns the code of what waits for the reason in its head.
    #[inline(always)]
    pub(crate) fn parked(head: &RunHead) -> StopCode {
        StopCode(StopCode::PARKED + head.reason_code())
    }
}

impl Stop {
    pub(crate) fn from_code(code: u8) -> Stop {
        match StopCode(code) {
            StopCode::YIELDED => Stop::Yielded,
            StopCode::PREEMPTED => Stop::Preempted,
            StopCode::ENDED => Stop::Ended,
            StopCode(StopCode::PARKED..) => {
                Stop::Parked(WaitReason::from_u8(code - StopCode::PARKED))
            }
            _ => Stop::Nothing,
        }
    }
}

/// What wakes goroutines while none runs on the P.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Source {
    Timer = 1,
    Poller = 2,
}

/// A word of a ring.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u64);

impl Word {
    #[inline(always)]
    pub(super) fn new(kind: Kind, detail: u8, payload: u64) -> Word {
        Word((kind as u64) << 56 | u64::from(detail) << 48 | payload & PAYLOAD)
    }

    /// As [`Word::new`], for a payload that fits into its bits, as ids do.
    #[inline(always)]
    pub(super) fn with_id(kind: Kind, detail: u8, id: u64) -> Word {
        debug_assert!(id <= PAYLOAD, "an id does not fit into a word: {id}");
        Word((kind as u64) << 56 | u64::from(detail) << 48 | id)
    }

    pub(super) fn clock(nanos: u64) -> Word {
        Word((Kind::Clock as u64) << 56 | nanos & CLOCK_PAYLOAD)
    }

    pub(crate) fn kind(self) -> Kind {
        Kind::ALL.get((self.0 >> 56) as usize).copied().unwrap_or(Kind::Empty)
    }

    pub(crate) fn detail(self) -> u8 {
        (self.0 >> 48) as u8
    }

    pub(crate) fn payload(self) -> u64 {
        self.0 & PAYLOAD
    }

    /// Returns the nanoseconds of a clock.
    pub(crate) fn nanos(self) -> u64 {
        self.0 & CLOCK_PAYLOAD
    }

    /// Returns a mark: the ring of the P with this id has so many words.
    pub(super) fn mark(p: u32, words: u64) -> Word {
        let words = words & ((1 << MARK_BITS) - 1);
        Word::new(Kind::Mark, 0, u64::from(p) << MARK_BITS | words)
    }

    /// Returns the P of a mark.
    pub(crate) fn marked_p(self) -> u32 {
        (self.payload() >> MARK_BITS) as u32
    }

    /// Returns how many words the ring of a mark had. `near` is a number that is not far from it:
    /// the mark has only its lower bits.
    pub(crate) fn marked_words(self, near: u64) -> u64 {
        let bits = u64::BITS - MARK_BITS;
        let difference = self.payload().wrapping_sub(near) << bits;
        near.wrapping_add_signed(difference.cast_signed() >> bits)
    }

    /// Returns whether its payload is the address of a text.
    pub(crate) fn has_text(self) -> bool {
        matches!(self.kind(), Kind::Place | Kind::RegionBegin | Kind::Log)
    }

    /// Returns what identifies the text of a `Place`, `RegionBegin` or `Log`: address and length.
    pub(crate) fn text_key(self) -> u64 {
        self.0 & CLOCK_PAYLOAD
    }
}
