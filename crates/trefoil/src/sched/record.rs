//! The flight recorder: what the Ps did last, in rings of 8-byte words.
//!
//! Each P has a ring, which only the P's owner writes to, so that no lock and no atomic operation
//! is needed. Threads without a P share one more ring under a lock. While nothing is recorded, the
//! pointers to the rings are null, and an event costs one load and a branch.
//!
//! A word is `kind 8 | detail 8 | payload 48`; a clock has a payload of 56 bits. An event that needs
//! more has further words with kinds of their own, so a reader may begin anywhere in a ring:
//!
//! | [`Kind`] | detail | payload |
//! |---|---|---|
//! | `Clock` | – | nanoseconds since the recording began |
//! | `Switch` | why the running one stops ([`Stop`]) | id of the next one, or 0 |
//! | `Create` | goroutine (0) or task (1) | its id |
//! | `Place` | – | the address of the `Location` at which the following `Create`s are |
//! | `Ready` | 1: by whom is not known | id of the one that was woken |
//! | `Thread`, after `Ready` | – | id of the thread that woke it |
//! | `Source` | what wakes the next ones ([`Source`]) | by how many nanoseconds a timer was late |
//! | `Steal` | – | the id of the P that it stole from |
//! | `OnM` | – | id of the M that runs this P from now on |
//! | `Ask` | – | id of the P whose goroutine is asked to stop |
//! | `Refused` | why it did not stop (`PreemptRefusal`) | – |
//! | `Retaken` | – | number of the system call that blocks the M, [`UNKNOWN_CALL`] or [`ANNOUNCED_CALL`] |
//! | `Mark` | – | id of a P in 12 bits, words that its ring had in 36 |
//! | `RegionBegin`, `Log` | bytes of the text | address of the text |
//! | `RegionEnd` | – | – |
//!
//! # Time
//! To read the clock takes longer than to switch. So only the events of slow paths are preceded by a
//! clock, and the first event after [`WORDS_PER_CLOCK`] words without one. sysmon writes marks: which
//! ring had how many words at what time. A reader (`observe/trace/`) concludes for each event between
//! which two times it happened.
//!
//! Invariants:
//! 1. The ring of a P is written to by the thread that owns the P, inside the runtime; by the
//!    preemption handler on that thread, while it is outside of the runtime; and under the
//!    scheduler's lock, while no thread owns the P.
//! 2. Every `Place`, `RegionBegin` and `Log` has the address of something that is never freed.
//! 3. The memory of a ring is never freed, only reused, after its runtime has ended: a thread that
//!    has not noticed the end of a recording may still write.
//!
//! Rejected: a clock with every event (yield took 125 % longer instead of 10 %); addresses of Gs
//! instead of ids (a G is reused, and the order of events on two rings is not always known).

use crate::arch;
use crate::sched::g::G;
use crate::sched::m::Rt;
use crate::sched::p::{P, PStatus};
use crate::sched::runnable::{RunHead, Runnable, Unpacked};
use crate::sched::task::Task;
use crate::sched::trigger::{Incident, Noticed, RunnableTable};
use crate::sched::wait::reason::WaitReason;
use crate::sched::{MAX_PROCS, Sched};
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::free_list::{FreeLink, FreeList, Reusable};
use crate::sys::lock::{self, Lock};
use std::panic::Location;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

/// Memory of the rings together, unless the program says otherwise.
pub(crate) const DEFAULT_BYTES: usize = 8 << 20;
/// The words from one clock to the next, unless a slow path writes one sooner, or the program wants
/// one for each event.
const WORDS_PER_CLOCK: u32 = 128;
/// The words of a cache line.
const WORDS_PER_LINE: usize = 8;
/// Words of the smallest and of the largest ring, as powers of two.
const MIN_WORDS_LOG: u32 = 10;
const MAX_WORDS_LOG: u32 = 30;
/// The time between two marks. They share a ring with the wake-ups by threads without a P.
const MARK_INTERVAL_NANOS: Nanos = 1_000_000;
/// How long a thread waits that finds another one busy with the recording.
const CONTROL_PAUSE: Duration = Duration::from_micros(50);
/// The payload of a word.
const PAYLOAD: u64 = (1 << 48) - 1;
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
pub(crate) struct StopCode(u8);

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
    fn new(kind: Kind, detail: u8, payload: u64) -> Word {
        Word((kind as u64) << 56 | u64::from(detail) << 48 | payload & PAYLOAD)
    }

    fn clock(nanos: u64) -> Word {
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

    /// Returns what identifies the text of a `Place`, `RegionBegin` or `Log`: address and length.
    pub(crate) fn text_key(self) -> u64 {
        self.0 & CLOCK_PAYLOAD
    }
}

/// The last words of one writer at a time.
///
/// The alignment keeps the rings of two Ps on different cache lines, and on different pairs of
/// lines, which CPUs fetch together: each event writes to its ring.
#[repr(C, align(128))]
pub(crate) struct Ring {
    // First cache line: what an event touches. An event of a fast path touches the first two.
    /// A power of two of them.
    words: Box<[AtomicU64]>,
    /// How many words were ever written.
    written: AtomicU64,
    /// The writer's: an event of a fast path at this number of words, or later, is not fast:
    /// [`Ring::rare_event`]. Not above `clock_at`, and 0 while there is a table of runnable
    /// goroutines.
    rare_at: AtomicU64,
    /// The writer's: an event at this number of words, or later, has a clock.
    clock_at: AtomicU64,
    /// Which goroutines are runnable since when, or null (`trigger.rs`).
    runnable: AtomicPtr<RunnableTable>,
    /// When the recording began.
    began: AtomicU64,
    /// From one clock to the next there are so many words, unless a slow path writes one sooner.
    words_per_clock: AtomicU32,
    /// The writer's: the M of the last `OnM`, plus one.
    last_m: AtomicU32,
    /// The writer's: the payload of the last `Place`, if no clock has followed it.
    last_place: AtomicU64,

    // Rarely used.
    /// How many words had been written when the recording began.
    from: AtomicU64,
    /// A smaller ring of the same P from an earlier recording.
    older: AtomicPtr<Ring>,
    /// Its place in [`UNUSED`].
    free_link: FreeLink<Ring>,
}

/// Rings of runtimes that have ended, by the logarithm of their words.
static UNUSED: [FreeList<Ring>; MAX_WORDS_LOG as usize + 1] =
    [const { FreeList::new() }; MAX_WORDS_LOG as usize + 1];

impl Reusable for Ring {
    fn free_link(&self) -> &FreeLink<Ring> {
        &self.free_link
    }
}

/// Makes words from memory that the system has cleared: a page takes no memory until it is used.
fn zeroed(words: usize) -> Box<[AtomicU64]> {
    let plain = Box::into_raw(vec![0u64; words].into_boxed_slice());
    // SAFETY: an AtomicU64 has the size, the alignment and the values of a u64, on x86_64 and aarch64.
    unsafe { Box::from_raw(plain as *mut [AtomicU64]) }
}

impl Ring {
    /// Takes an unused ring of 2^`log` words, or makes one.
    fn take(log: u32) -> &'static Ring {
        UNUSED[log as usize].pop_or_leak(|| Ring {
            words: zeroed(1 << log),
            written: AtomicU64::new(0),
            rare_at: AtomicU64::new(0),
            clock_at: AtomicU64::new(0),
            runnable: AtomicPtr::new(null_mut()),
            began: AtomicU64::new(0),
            words_per_clock: AtomicU32::new(WORDS_PER_CLOCK),
            last_m: AtomicU32::new(0),
            last_place: AtomicU64::new(0),
            from: AtomicU64::new(0),
            older: AtomicPtr::new(null_mut()),
            free_link: FreeLink::new(),
        })
    }

    /// Begins a recording. A writer of the last one may still add a word.
    fn begin(&self, Start { now, words_per_clock, .. }: Start) {
        self.words_per_clock.store(words_per_clock, Ordering::Relaxed);
        self.runnable.store(null_mut(), Ordering::Relaxed);
        self.began.store(now, Ordering::Relaxed);
        self.last_m.store(0, Ordering::Relaxed);
        self.clock_at.store(0, Ordering::Relaxed);
        self.rare_at.store(0, Ordering::Relaxed);
        self.from.store(self.written.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Writer: appends a word.
    #[inline]
    fn push(&self, word: Word) {
        self.push_at(self.written.load(Ordering::Relaxed), word);
    }

    /// Writer: appends a word to the `written` ones.
    #[inline]
    fn push_at(&self, written: u64, word: Word) {
        // Pairs with the fence in `copy`: who has read this word also reads `written` as it is now.
        fence(Ordering::Release);
        let at = written as usize & (self.words.len() - 1);
        // SAFETY: below the length, which is a power of two.
        unsafe { self.words.get_unchecked(at) }.store(word.0, Ordering::Relaxed);
        // Release: pairs with the Acquire in `copy`.
        self.written.store(written + 1, Ordering::Release);
    }

    /// Writer: appends an event of a fast path. The payload fits into its bits.
    #[inline(always)]
    fn event(&self, kind: Kind, detail: u8, payload: u64) {
        let word = Word::new(kind, detail, payload);
        let written = self.written.load(Ordering::Relaxed);
        if written < self.rare_at.load(Ordering::Relaxed) {
            self.push_at(written, word);
        } else {
            self.rare_event(word);
        }
    }

    /// Writer: appends an event of a fast path, after a clock if one is due. Keeps the table of
    /// runnable goroutines, if there is one.
    #[cold]
    #[inline(never)]
    fn rare_event(&self, word: Word) {
        match word.kind() {
            Kind::Create | Kind::Ready => self.runnable_begins(word.payload()),
            Kind::Switch => self.runnable_ends(word.payload()),
            _ => (),
        }
        self.clock_if_due();
        self.push(word);
        if self.runnable().is_none() {
            self.rare_at.store(self.clock_at.load(Ordering::Relaxed), Ordering::Relaxed);
            // Pairs with the fence in `use_table`: either the table is seen here, or the 0 that is
            // stored there follows what was stored here.
            fence(Ordering::SeqCst);
            if self.runnable().is_some() {
                self.rare_at.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Writer: appends the current time, if the last clock is too far back.
    #[inline]
    fn clock_if_due(&self) {
        if self.written.load(Ordering::Relaxed) >= self.clock_at.load(Ordering::Relaxed) {
            self.clock_now();
        }
    }

    /// Returns the table of runnable goroutines, if a watch asks for it.
    #[inline]
    fn runnable(&self) -> Option<&'static RunnableTable> {
        // Acquire: pairs with the Release in `watch_runnable`.
        // SAFETY: null, or a table, which is never freed.
        unsafe { self.runnable.load(Ordering::Acquire).as_ref() }
    }

    /// Makes the writer keep a table of runnable goroutines from now on, or none if null.
    fn use_table(&self, table: *mut RunnableTable) {
        // Release: pairs with the Acquire in `Ring::runnable`.
        self.runnable.store(table, Ordering::Release);
        // Pairs with the fence in `rare_event`.
        fence(Ordering::SeqCst);
        self.rare_at.store(0, Ordering::Relaxed);
    }

    /// `id` is runnable from now on.
    #[inline]
    fn runnable_begins(&self, id: u64) {
        if let Some(table) = self.runnable() {
            table.begin(id);
        }
    }

    /// `id` runs.
    #[inline]
    fn runnable_ends(&self, id: u64) {
        if let Some(table) = self.runnable() {
            table.end(id);
        }
    }

    /// Writer: appends an event of a slow path, with the time.
    fn timed_event(&self, kind: Kind, detail: u8, payload: u64) {
        self.clock(now());
        self.push(Word::new(kind, detail, payload));
    }

    /// Writer: appends the current time.
    #[cold]
    #[inline(never)]
    fn clock_now(&self) {
        self.clock(now());
        self.prefetch_until_clock();
    }

    /// Writer: loads the memory of the words until the next clock. Otherwise the first word of each
    /// cache line would be a miss, for which the next locked instruction waits, and a switch has
    /// several of them. Beyond the end it loads nothing that matters.
    fn prefetch_until_clock(&self) {
        let at = self.written.load(Ordering::Relaxed) as usize & (self.words.len() - 1);
        let words = self.words_per_clock.load(Ordering::Relaxed) as usize;
        for line in 1..=words / WORDS_PER_LINE {
            let word = self.words.as_ptr().wrapping_add(at + line * WORDS_PER_LINE);
            arch::prefetch(word.cast());
        }
    }

    /// Writer: the next event has a clock.
    fn clock_next(&self) {
        self.clock_at.store(0, Ordering::Relaxed);
        self.rare_at.store(0, Ordering::Relaxed);
    }

    /// Writer: appends the time `now`.
    fn clock(&self, now: Nanos) {
        self.push(Word::clock(now.saturating_sub(self.began.load(Ordering::Relaxed))));
        let words = u64::from(self.words_per_clock.load(Ordering::Relaxed));
        self.clock_at.store(self.written.load(Ordering::Relaxed) + words, Ordering::Relaxed);
        // A reader that starts in the middle of the ring finds a `Place` soon after a clock.
        self.last_place.store(0, Ordering::Relaxed);
    }

    /// Copies what the present recording has written, while the writer goes on.
    fn copy(&self) -> RingCopy {
        let len = self.words.len() as u64;
        let end = self.written.load(Ordering::Acquire);
        let first = end.saturating_sub(len).max(self.from.load(Ordering::Relaxed)).min(end);
        let mut words: Vec<Word> = (first..end)
            .map(|i| Word(self.words[(i & (len - 1)) as usize].load(Ordering::Relaxed)))
            .collect();
        // Pairs with the fence in `push`.
        fence(Ordering::Acquire);
        // The writer may have written one word more than it has counted.
        let written = self.written.load(Ordering::Relaxed) + 1;
        let lost = written.saturating_sub(len).saturating_sub(first).min(end - first);
        words.drain(..lost as usize);
        RingCopy { first: first + lost, from: self.from.load(Ordering::Relaxed), words }
    }

    /// Gives it back, with the rings that it replaced. No thread of its runtime is left.
    fn give_back(&'static self) {
        let mut next = Some(self);
        while let Some(ring) = next {
            // SAFETY: null, or a ring (invariant 3).
            next = unsafe { ring.older.swap(null_mut(), Ordering::Relaxed).as_ref() };
            UNUSED[ring.words.len().ilog2() as usize].push(ring);
        }
    }
}

/// What a ring held at one moment.
pub(crate) struct RingCopy {
    /// The number of the first word since the ring was made.
    pub(crate) first: u64,
    /// The number of the first word of the recording: below `first` if words were overwritten.
    pub(crate) from: u64,
    pub(crate) words: Vec<Word>,
}

/// What was recorded, up to one moment.
pub(crate) struct RecordCopy {
    /// When the copy was made, in nanoseconds since the recording began.
    pub(crate) copied: u64,
    /// By the id of the P.
    pub(crate) ps: Vec<RingCopy>,
    /// By threads without a P.
    pub(crate) outside: RingCopy,
}

/// How a recording begins.
#[derive(Clone, Copy)]
struct Start {
    /// The words of each ring, at least, as a power of two.
    log: u32,
    now: Nanos,
    words_per_clock: u32,
}

/// The place of a ring.
pub(crate) struct RingSlot {
    /// The ring to write to; null while nothing is recorded.
    active: AtomicPtr<Ring>,
    /// The ring of the present or last recording.
    last: AtomicPtr<Ring>,
}

impl RingSlot {
    pub(crate) const fn new() -> RingSlot {
        RingSlot { active: AtomicPtr::new(null_mut()), last: AtomicPtr::new(null_mut()) }
    }

    /// Returns the ring to write to.
    #[inline(always)]
    pub(crate) fn active(&self) -> Option<&'static Ring> {
        // Acquire: pairs with the Release in `begin`.
        // SAFETY: null, or a ring (invariant 3).
        unsafe { self.active.load(Ordering::Acquire).as_ref() }
    }

    fn last(&self) -> Option<&'static Ring> {
        // Acquire, SAFETY: as above.
        unsafe { self.last.load(Ordering::Acquire).as_ref() }
    }

    /// Begins a recording. One caller at a time.
    fn begin(&self, start: Start) {
        let ring = match self.last() {
            Some(ring) if ring.words.len() >= 1 << start.log => ring,
            older => {
                let ring = Ring::take(start.log);
                let older = older.map_or(null_mut(), |ring| std::ptr::from_ref(ring).cast_mut());
                ring.older.store(older, Ordering::Relaxed);
                ring
            }
        };
        ring.begin(start);
        let ring = std::ptr::from_ref(ring).cast_mut();
        self.last.store(ring, Ordering::Release);
        self.active.store(ring, Ordering::Release);
    }

    fn end(&self) {
        self.active.store(null_mut(), Ordering::Relaxed);
    }

    /// Gives the rings back. No thread of the runtime is left.
    pub(crate) fn give_back(&self) {
        if let Some(ring) = self.last() {
            ring.give_back();
        }
    }
}

/// A runtime's recorder.
pub(crate) struct Record {
    /// Held while a recording begins, ends or is copied: [`Control`]. Not a lock: memory is
    /// allocated meanwhile.
    is_controlled: AtomicBool,
    /// The words of each ring, as a power of two; 0 before the first recording.
    log: AtomicU32,
    /// Held by the writer of the ring of threads without a P.
    writing_outside: Lock<()>,
    outside: RingSlot,
    /// sysmon's: when it made the last marks.
    last_mark: AtomicU64,
}

impl Record {
    pub(crate) const fn new() -> Record {
        Record {
            is_controlled: AtomicBool::new(false),
            log: AtomicU32::new(0),
            writing_outside: Lock::new(()),
            outside: RingSlot::new(),
            last_mark: AtomicU64::new(0),
        }
    }

    /// Returns whether events are recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.outside.active().is_some()
    }

    /// Records an event of a thread without a P.
    #[inline]
    fn write_outside(&self, f: impl FnOnce(&Ring)) {
        if let Some(ring) = self.outside.active() {
            let _writing = self.writing_outside.lock();
            f(ring);
        }
    }

    /// Gives the rings back. No thread of the runtime is left.
    pub(crate) fn give_back(&self) {
        self.outside.give_back();
    }
}

/// The right to begin, end or copy a recording.
struct Control<'a>(&'a Record);

impl<'a> Control<'a> {
    fn try_take(record: &'a Record) -> Option<Control<'a>> {
        // A goroutine that has it must not be stopped for ever by the end of its runtime: it counts
        // like a lock of C code.
        lock::count_c_lock();
        // Acquire: pairs with the Release in `drop`.
        if record.is_controlled.swap(true, Ordering::Acquire) {
            lock::uncount_c_lock();
            return None;
        }
        Some(Control(record))
    }

    fn take(record: &'a Record) -> Control<'a> {
        loop {
            if let Some(control) = Control::try_take(record) {
                return control;
            }
            std::thread::sleep(CONTROL_PAUSE);
        }
    }
}

impl Drop for Control<'_> {
    fn drop(&mut self) {
        self.0.is_controlled.store(false, Ordering::Release);
        lock::uncount_c_lock();
    }
}

/// The beginning and the end of a recording, and its copy. All allocate: outside the runtime.
impl Sched {
    /// Begins to record, in rings that together take at most `bytes`, or what the smallest rings
    /// take. Returns false if a recording is on.
    ///
    /// With `exact_clock`, each event has a clock.
    pub(crate) fn start_recording(&self, bytes: usize, exact_clock: bool) -> bool {
        let _control = Control::take(&self.record);
        if self.record.is_on() {
            return false;
        }
        let words = bytes / size_of::<u64>() / (self.ps_made() as usize + 1);
        let log = words.max(1).ilog2().clamp(MIN_WORDS_LOG, MAX_WORDS_LOG);
        self.record.log.store(log, Ordering::Relaxed);
        let words_per_clock = if exact_clock { 1 } else { WORDS_PER_CLOCK };
        let start = Start { log, now: now(), words_per_clock };
        for p in self.all_ps() {
            p.ring.begin(start);
        }
        self.record.outside.begin(start);
        self.attach_rings();
        true
    }

    /// Gives Ps that were made during a recording their rings. Does not wait, because the helper
    /// thread calls it: another thread that is busy with the recording does it when it is done.
    pub(crate) fn record_new_ps(&self) {
        if let Some(_control) = Control::try_take(&self.record) {
            self.attach_rings();
        }
    }

    /// Gives Ps without a ring one, if something is recorded. The caller has the `Control`.
    fn attach_rings(&self) {
        let Some(outside) = self.record.outside.active() else { return };
        let table = match self.triggers.limit(Incident::Runnable) {
            NEVER => null_mut(),
            _ => std::ptr::from_ref(self.runnable_table()).cast_mut(),
        };
        for p in self.all_ps().filter(|p| p.ring.active().is_none()) {
            p.ring.begin(Start {
                log: self.record.log.load(Ordering::Relaxed),
                now: outside.began.load(Ordering::Relaxed),
                words_per_clock: outside.words_per_clock.load(Ordering::Relaxed),
            });
        }
        let rings = self.all_ps().filter_map(|p| p.ring.active()).chain([outside]);
        for ring in rings {
            // What is in the table is out of date if the rings did not use it.
            if !table.is_null() && ring.runnable().is_none() {
                self.runnable_table().clear();
            }
            ring.use_table(table);
        }
    }

    /// Makes the rings keep the table of runnable goroutines up to date, or not any more. Called when
    /// the watches have changed.
    pub(crate) fn watch_runnable(&self) {
        let _control = Control::take(&self.record);
        self.attach_rings();
    }

    /// Ends the recording. What was recorded stays until the next one begins.
    pub(crate) fn stop_recording(&self) {
        let _control = Control::take(&self.record);
        self.all_ps().for_each(|p| p.ring.end());
        self.record.outside.end();
    }

    /// Returns what was recorded, up to now. None if nothing was ever recorded.
    pub(crate) fn copy_record(&self) -> Option<RecordCopy> {
        let _control = Control::take(&self.record);
        let outside = self.record.outside.last()?;
        // The rings of the Ps first: their marks in the other ring may be newer, not older.
        let ps = self.all_ps().filter_map(|p| p.ring.last()).map(Ring::copy).collect();
        let began = outside.began.load(Ordering::Relaxed);
        let outside = outside.copy();
        self.attach_rings();
        Some(RecordCopy { copied: now().saturating_sub(began), ps, outside })
    }
}

impl RecordCopy {
    pub(crate) fn rings(&self) -> impl Iterator<Item = &RingCopy> {
        self.ps.iter().chain([&self.outside])
    }
}

/// Returns the id of what `g` runs: itself, or the task that it carries.
#[inline]
pub(crate) fn id_of(g: &G) -> u64 {
    if g.head.is_carrier()
        && let Some(task) = g.task.get()
    {
        return task.id();
    }
    g.id()
}

/// The events, in the order in which they appear in the life of a goroutine or task.
#[inline(always)]
pub(crate) fn created(rt: Rt, item: Runnable, at: &'static Location<'static>) {
    if let Some(ring) = rt.p().ring.active() {
        record_created(ring, item, at);
    }
}

/// As [`created`], on a thread without a P.
#[inline]
pub(crate) fn created_outside(sched: &Sched, item: Runnable, at: &'static Location<'static>) {
    if sched.record.is_on() {
        let tid = this_thread();
        sched.record.write_outside(|ring| {
            ring.clock(now());
            record_created(ring, item, at);
            ring.push(Word::new(Kind::Thread, 0, tid));
        });
    }
}

#[inline(never)]
fn record_created(ring: &Ring, item: Runnable, at: &'static Location<'static>) {
    let (id, is_task) = match item.unpack() {
        Unpacked::Goroutine(g) => (g.id(), 0),
        Unpacked::Task(task) => (task.id(), 1),
    };
    let place = std::ptr::from_ref(at) as u64;
    // A loop creates many at the same place.
    if ring.last_place.load(Ordering::Relaxed) == place {
        ring.event(Kind::Create, is_task, id);
    } else {
        record_first_at_place(ring, is_task, id, place);
    }
}

#[cold]
#[inline(never)]
fn record_first_at_place(ring: &Ring, is_task: u8, id: u64, place: u64) {
    ring.clock_if_due();
    ring.push(Word::new(Kind::Place, 0, place));
    ring.last_place.store(place, Ordering::Relaxed);
    ring.event(Kind::Create, is_task, id);
}

/// Returns the kernel's id of this thread.
fn this_thread() -> u64 {
    rustix::thread::gettid().as_raw_nonzero().get() as u64
}

/// The goroutine that runs on `rt`'s P stops, and the next one runs; None: the thread searches.
#[inline(always)]
pub(crate) fn switched(rt: Rt, stop: StopCode, next: Option<&G>) {
    if let Some(ring) = rt.p().ring.active() {
        record_switch(ring, rt, stop, next);
    }
}

/// As [`switched`]. `g` stops, but stays runnable if `stop` says so.
#[inline(always)]
pub(crate) fn switched_from(
    rt: Rt,
    g: &G,
    stop: impl FnOnce(&G) -> StopCode,
    next: Option<&G>,
) {
    if let Some(ring) = rt.p().ring.active() {
        let stop = stop(g);
        if matches!(stop, StopCode::YIELDED | StopCode::PREEMPTED) {
            ring.runnable_begins(id_of(g));
        }
        record_switch(ring, rt, stop, next);
    }
}

#[inline(never)]
fn record_switch(ring: &Ring, rt: Rt, stop: StopCode, next: Option<&G>) {
    match next {
        Some(next) => ring.event(Kind::Switch, stop.0, id_of(next)),
        None => record_search(ring, rt, stop),
    }
}

#[cold]
#[inline(never)]
fn record_search(ring: &Ring, rt: Rt, stop: StopCode) {
    // The end of a slice is rare, and tells for how long the goroutine ran. Otherwise, if there is
    // work, the search ends in a moment.
    if stop != StopCode::PREEMPTED && has_work(rt) {
        ring.event(Kind::Switch, stop.0, 0);
    } else {
        ring.timed_event(Kind::Switch, stop.0, 0);
        ring.clock_next();
    }
}

/// Returns whether a search on this P finds something at once.
fn has_work(rt: Rt) -> bool {
    rt.m().chosen.get().is_some() || rt.sched().has_global() || !rt.p().is_empty()
}

/// The thread's own context has found `g`, which runs now.
#[inline(always)]
pub(crate) fn found(rt: Rt, g: &G) {
    if let Some(ring) = rt.p().ring.active() {
        record_found(ring, rt, g);
    }
}

#[cold]
fn record_found(ring: &Ring, rt: Rt, g: &G) {
    let m = rt.m().id.load(Ordering::Relaxed);
    if ring.last_m.load(Ordering::Relaxed) != m + 1 {
        ring.last_m.store(m + 1, Ordering::Relaxed);
        ring.timed_event(Kind::OnM, 0, m.into());
    }
    ring.event(Kind::Switch, StopCode::NOTHING.0, id_of(g));
}

/// The P becomes idle: what ran last on it has stopped before now.
pub(crate) fn becomes_idle(p: &P) {
    if let Some(ring) = p.ring.active() {
        ring.clock(now());
        ring.clock_next();
    }
}

/// The running goroutine has got a P again; or the recording begins while it runs.
#[cold]
pub(crate) fn runs_here(rt: Rt) {
    if let Some(ring) = rt.p().ring.active() {
        ring.clock_next();
        record_found(ring, rt, rt.g());
    }
}

/// A carrier begins to poll a task.
#[inline(always)]
pub(crate) fn poll_began(p: &P, id: impl FnOnce() -> u64) {
    if let Some(ring) = p.ring.active() {
        ring.event(Kind::Switch, StopCode::NOTHING.0, id());
    }
}

/// A poll of `task`, which has not ended, has returned.
#[inline(always)]
pub(crate) fn poll_ended(rt: Rt, task: &Task, stop: impl FnOnce() -> StopCode) {
    if let Some(ring) = rt.p().ring.active() {
        let stop = stop();
        if stop == StopCode::YIELDED {
            ring.runnable_begins(task.id());
        }
        ring.event(Kind::Switch, stop.0, 0);
    }
}

/// The task that was polled has ended.
#[inline(always)]
pub(crate) fn task_ended(rt: Rt) {
    if let Some(ring) = rt.p().ring.active() {
        ring.event(Kind::Switch, StopCode::ENDED.0, 0);
    }
}

/// Who has woken a goroutine or task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waker {
    /// What runs on this P, or the last [`Source`]; or this thread, if it has no P.
    Here,
    /// Somebody earlier: the wake-up takes effect only now.
    Unknown,
}

/// A goroutine or task was woken, on this P.
#[inline(always)]
pub(crate) fn woken(rt: Rt, item: Runnable, by: Waker) {
    if let Some(ring) = rt.p().ring.active() {
        record_woken(ring, item, by);
    }
}

#[inline(never)]
fn record_woken(ring: &Ring, item: Runnable, by: Waker) {
    let id = match item.unpack() {
        Unpacked::Goroutine(g) => id_of(g),
        Unpacked::Task(task) => task.id(),
    };
    ring.event(Kind::Ready, u8::from(by == Waker::Unknown), id);
}

/// As [`woken`], on a thread without a P.
#[inline]
pub(crate) fn woken_outside(sched: &Sched, item: Runnable, by: Waker) {
    if sched.record.is_on() {
        record_woken_outside(sched, item, by);
    }
}

#[cold]
fn record_woken_outside(sched: &Sched, item: Runnable, by: Waker) {
    let tid = this_thread();
    sched.record.write_outside(|ring| {
        ring.clock(now());
        record_woken(ring, item, by);
        if by == Waker::Here {
            ring.push(Word::new(Kind::Thread, 0, tid));
        }
    });
}

/// What is woken next on this P was not woken by a goroutine.
#[inline(always)]
pub(crate) fn source(rt: Rt, source: Source, late: Nanos) {
    if let Some(ring) = rt.p().ring.active() {
        ring.timed_event(Kind::Source, source as u8, late.min(PAYLOAD));
        if source == Source::Timer && late >= rt.sched().triggers.limit(Incident::TimerLate) {
            rt.sched().notice(Incident::TimerLate, Noticed { id: 0, nanos: late });
        }
    }
}

/// This P has stolen from `victim`.
pub(crate) fn stolen(p: &P, victim: &P) {
    if let Some(ring) = p.ring.active() {
        ring.timed_event(Kind::Steal, 0, victim.id.into());
    }
}

/// sysmon asks the goroutine on `p` to stop.
pub(crate) fn asked_to_stop(sched: &Sched, p: &P) {
    sched.record.write_outside(|ring| ring.timed_event(Kind::Ask, 0, p.id.into()));
}

/// A goroutine was asked to stop, and does not. For the preemption handler (invariant 1).
pub(crate) fn refused_to_stop(p: &P, why: u8) {
    if let Some(ring) = p.ring.active() {
        ring.timed_event(Kind::Refused, why, 0);
    }
}

/// The M that had `p` is blocked in a system call, and has lost it. Under the scheduler's lock.
pub(crate) fn retaken(p: &P, call: Option<u32>) {
    if let Some(ring) = p.ring.active() {
        ring.timed_event(Kind::Retaken, 0, call.map_or(UNKNOWN_CALL, u64::from));
        ring.clock_next();
    }
}

/// The M gives up its P, because the goroutine is about to block.
pub(crate) fn released(rt: Rt) {
    if let Some(ring) = rt.p().ring.active() {
        ring.timed_event(Kind::Retaken, 0, ANNOUNCED_CALL);
        ring.clock_next();
    }
}

/// Records how many words the ring of each P in use has, at this time; not too often. For sysmon.
pub(crate) fn mark(sched: &Sched, now_about: Nanos) {
    let record = &sched.record;
    let last = record.last_mark.load(Ordering::Relaxed);
    // A simulation has one P, and a clock of its own.
    if !record.is_on()
        || sched.simulation.is_some()
        || now_about.saturating_sub(last) < MARK_INTERVAL_NANOS
    {
        return;
    }
    record.last_mark.store(now_about, Ordering::Relaxed);
    record.write_outside(|outside| {
        outside.clock(now());
        for p in sched.all_ps().filter(|p| p.status() == PStatus::Running) {
            if let Some(ring) = p.ring.active() {
                let written = ring.written.load(Ordering::Acquire) & ((1 << MARK_BITS) - 1);
                let mark = u64::from(p.id) << MARK_BITS | written;
                outside.push(Word::new(Kind::Mark, 0, mark));
            }
        }
        outside.clock(now());
    });
}

/// Records a region or a message of the program, on a goroutine.
pub(crate) fn note(rt: Rt, kind: Kind, text: &'static str) {
    if let Some(ring) = rt.p().ring.active() {
        // A longer text is cut; not within a character.
        let max = text.len().min(usize::from(u8::MAX));
        let len = (0..=max).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        ring.timed_event(kind, len as u8, text.as_ptr() as u64);
    }
}
