//! A ring: the last words of one writer. Any thread may copy them while the writer goes on.
//!
//! To read the clock takes longer than to switch. So only the events of slow paths are preceded by
//! a clock, and the first event after [`WORDS_PER_CLOCK`] words without one. An event of a fast
//! path compares two numbers, and writes two words; everything else is behind that comparison.
//!
//! Invariants:
//! 1. A ring has one writer at a time (invariant 1 of `record/mod.rs`).
//! 2. The memory of a ring is never freed, only reused, after its runtime has ended: a thread that
//!    has not noticed the end of a recording may still write.
//!
//! Rejected: a prefetch of the word two cache lines ahead at each event (an event took a third
//! longer): the memory until the next clock is loaded at once. A load of the table of runnable
//! goroutines at each event: a ring that keeps one has no fast events instead. Functions for events
//! that are not inlined (a round trip of a ping-pong took 6 ns longer for its four events).

use super::words::{Kind, Word};
use crate::arch;
use crate::sched::trigger::RunnableTable;
use crate::sys::clock::{Nanos, now};
use crate::sys::free_list::{FreeLink, FreeList, Reusable};
use crate::sys::mm;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

/// The words from one clock to the next, unless a slow path writes one sooner, or the program wants
/// one for each event.
pub(super) const WORDS_PER_CLOCK: u32 = 128;
/// The words of a cache line.
const WORDS_PER_LINE: usize = 8;
/// A copy loads the memory so many bytes ahead: CPUs do not look beyond a page by themselves.
const COPY_AHEAD: usize = 2048;
/// In the long run, wakers that end long waits take one sample per so many nanoseconds, because
/// unwinding it takes some microseconds. After a pause they take up to [`SAMPLES_AT_ONCE`].
const NANOS_PER_SAMPLE: Nanos = 1_000_000;
const SAMPLES_AT_ONCE: u64 = 64;
/// Base-2 logarithms of the words of the smallest and of the largest ring.
pub(super) const MIN_WORDS_LOG: u32 = 10;
pub(super) const MAX_WORDS_LOG: u32 = 30;

/// The last words of one writer at a time.
///
/// The alignment keeps the rings of two Ps on different cache lines, and on different pairs of
/// lines, which CPUs fetch together: each event writes to its ring.
#[repr(C, align(128))]
pub(crate) struct Ring {
    // First cache line. An event of a fast path touches only the first four fields.
    /// A power of two of them.
    words: Box<[AtomicU64]>,
    /// One less than there are words.
    mask: u64,
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
    // Second cache line. A `Create` reads `last_place`.
    /// From one clock to the next there are so many words, unless a slow path writes one sooner.
    words_per_clock: AtomicU32,
    /// The writer's: the M of the last `OnM`, plus one.
    last_m: AtomicU32,
    /// The writer's: the payload of the last `Place`, if no clock has followed it.
    last_place: AtomicU64,
    /// How many words had been written when the recording began.
    from: AtomicU64,
    /// The writer's: no waker takes a sample before this time.
    next_sample: AtomicU64,
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
    // SAFETY: an AtomicU64 has the size, the alignment and the values of a u64, on x86_64 and
    // aarch64.
    unsafe { Box::from_raw(plain as *mut [AtomicU64]) }
}

impl Ring {
    /// Takes an unused ring of 2^`log` words, or makes one.
    fn take(log: u32) -> &'static Ring {
        UNUSED[log as usize].pop_or_leak(|| Ring {
            words: zeroed(1 << log),
            mask: (1 << log) - 1,
            written: AtomicU64::new(0),
            rare_at: AtomicU64::new(0),
            clock_at: AtomicU64::new(0),
            runnable: AtomicPtr::new(null_mut()),
            began: AtomicU64::new(0),
            words_per_clock: AtomicU32::new(WORDS_PER_CLOCK),
            last_m: AtomicU32::new(0),
            last_place: AtomicU64::new(0),
            from: AtomicU64::new(0),
            next_sample: AtomicU64::new(0),
            older: AtomicPtr::new(null_mut()),
            free_link: FreeLink::new(),
        })
    }

    /// Begins a recording. A writer of the last one may still add a word.
    pub(super) fn begin(&self, Start { now, words_per_clock, .. }: Start) {
        self.words_per_clock.store(words_per_clock, Ordering::Relaxed);
        self.runnable.store(null_mut(), Ordering::Relaxed);
        self.began.store(now, Ordering::Relaxed);
        self.last_m.store(0, Ordering::Relaxed);
        self.last_place.store(0, Ordering::Relaxed);
        self.next_sample.store(0, Ordering::Relaxed);
        self.clock_at.store(0, Ordering::Relaxed);
        self.rare_at.store(0, Ordering::Relaxed);
        self.from.store(self.written.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns how the present recording began, for a ring of 2^`log` words.
    pub(super) fn start(&self, log: u32) -> Start {
        Start {
            log,
            now: self.began.load(Ordering::Relaxed),
            words_per_clock: self.words_per_clock.load(Ordering::Relaxed),
        }
    }

    /// Returns the memory of its words.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.words)
    }

    /// Returns how many words were ever written.
    pub(super) fn words_written(&self) -> u64 {
        // Acquire: pairs with the Release in `push_at`.
        self.written.load(Ordering::Acquire)
    }

    /// Writer: returns whether a `Create` needs no other `Place`.
    #[inline]
    pub(super) fn is_last_place(&self, place: u64) -> bool {
        self.last_place.load(Ordering::Relaxed) == place
    }

    /// Writer: the next `Create` is at that place.
    pub(super) fn place(&self, place: u64) {
        self.clock_if_due();
        self.push(Word::new(Kind::Place, 0, place));
        self.last_place.store(place, Ordering::Relaxed);
    }

    /// Writer: the M `m` runs the P.
    pub(super) fn on_m(&self, m: u32) {
        if self.last_m.load(Ordering::Relaxed) != m + 1 {
            self.last_m.store(m + 1, Ordering::Relaxed);
            self.timed_event(Kind::OnM, 0, m.into());
        }
    }

    /// Writer: appends a word.
    #[inline]
    pub(super) fn push(&self, word: Word) {
        self.push_at(self.written.load(Ordering::Relaxed), word);
    }

    /// Writer: appends a word to the `written` ones.
    #[inline]
    fn push_at(&self, written: u64, word: Word) {
        // Pairs with the fence in `copy`: a thread that reads this word then reads at least this
        // `written`.
        fence(Ordering::Release);
        let at = (written & self.mask) as usize;
        // SAFETY: below the length, which is a power of two.
        unsafe { self.words.get_unchecked(at) }.store(word.0, Ordering::Relaxed);
        // Release: pairs with the Acquire in `copy`.
        self.written.store(written + 1, Ordering::Release);
    }

    /// Writer: appends an event of a fast path. The payload is an id, or 0.
    #[inline(always)]
    pub(super) fn event(&self, kind: Kind, detail: u8, id: u64) {
        let word = Word::with_id(kind, detail, id);
        let written = self.written.load(Ordering::Relaxed);
        if written < self.rare_at.load(Ordering::Relaxed) {
            self.push_at(written, word);
        } else {
            self.rare_event(word);
        }
    }

    /// Writer: appends an event of a fast path, after a clock if one is due.
    #[cold]
    #[inline(never)]
    fn rare_event(&self, word: Word) {
        self.keep_table(word);
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

    /// Writer: as [`event`](Ring::event), for one that happened at `now`.
    pub(super) fn event_at(&self, now: Nanos, kind: Kind, detail: u8, id: u64) {
        let word = Word::with_id(kind, detail, id);
        self.keep_table(word);
        self.clock(now);
        self.push(word);
    }

    /// Writer: keeps the table of runnable goroutines, if there is one.
    fn keep_table(&self, word: Word) {
        if let Some(table) = self.runnable() {
            match word.kind() {
                Kind::Create | Kind::Ready => table.begin(word.payload()),
                Kind::Switch if word.payload() != 0 => table.end(word.payload()),
                _ => (),
            }
        }
    }

    /// Writer: appends the current time, if the last clock is too far back.
    #[inline]
    pub(super) fn clock_if_due(&self) {
        if self.written.load(Ordering::Relaxed) >= self.clock_at.load(Ordering::Relaxed) {
            self.clock_now();
        }
    }

    /// Returns the table of runnable goroutines, if a watch asks for it.
    #[inline]
    pub(super) fn runnable(&self) -> Option<&'static RunnableTable> {
        // Acquire: pairs with the Release in `use_table`.
        // SAFETY: null, or a table, which is never freed.
        unsafe { self.runnable.load(Ordering::Acquire).as_ref() }
    }

    /// Makes the writer keep a table of runnable goroutines from now on, or none if null.
    pub(super) fn use_table(&self, table: *mut RunnableTable) {
        // Release: pairs with the Acquire in `Ring::runnable`.
        self.runnable.store(table, Ordering::Release);
        // Pairs with the fence in `rare_event`.
        fence(Ordering::SeqCst);
        self.rare_at.store(0, Ordering::Relaxed);
    }

    /// Writer: appends an event of a slow path, with the time.
    pub(super) fn timed_event(&self, kind: Kind, detail: u8, payload: u64) {
        self.clock(now());
        self.push(Word::new(kind, detail, payload));
    }

    /// Writer: appends an event of a slow path, with the time; the next event has a clock, too.
    pub(super) fn event_between_clocks(&self, kind: Kind, detail: u8, payload: u64) {
        self.timed_event(kind, detail, payload);
        self.clock_next();
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

    /// The next event has a clock. Also for sysmon: if the writer overwrites what it stores,
    /// because it has just written a clock, the next mark tries again.
    pub(super) fn clock_next(&self) {
        self.clock_at.store(0, Ordering::Relaxed);
        self.rare_at.store(0, Ordering::Relaxed);
    }

    /// Writer: appends the time `now`.
    pub(super) fn clock(&self, now: Nanos) {
        self.push(Word::clock(self.since_began(now)));
        let words = u64::from(self.words_per_clock.load(Ordering::Relaxed));
        self.clock_at.store(self.written.load(Ordering::Relaxed) + words, Ordering::Relaxed);
        // A reader that starts in the middle of the ring finds a `Place` soon after a clock.
        self.last_place.store(0, Ordering::Relaxed);
    }

    /// Returns the time from the beginning of the recording to `now`.
    pub(super) fn since_began(&self, now: Nanos) -> Nanos {
        now.saturating_sub(self.began.load(Ordering::Relaxed))
    }

    /// Writer: returns whether a waker may take a sample now. It does so then.
    pub(super) fn may_sample(&self, now: Nanos) -> bool {
        let next = self.next_sample.load(Ordering::Relaxed);
        let next = next.max(now.saturating_sub(SAMPLES_AT_ONCE * NANOS_PER_SAMPLE));
        if next > now {
            return false;
        }
        self.next_sample.store(next + NANOS_PER_SAMPLE, Ordering::Relaxed);
        true
    }

    /// Copies what the present recording has written, while the writer goes on.
    pub(super) fn copy(&self) -> RingCopy {
        let len = self.words.len() as u64;
        let from = self.from.load(Ordering::Relaxed);
        // The writer goes on meanwhile.
        let room = self.words_written().saturating_sub(from) + len / 8;
        let mut words: Vec<Word> = Vec::with_capacity(room.min(len) as usize);
        // First of all: what the writer overwrites in the meantime is lost.
        mm::provide(words.spare_capacity_mut());
        let end = self.words_written();
        let first = end.saturating_sub(len).max(from).min(end);
        // The older words go to the end of the memory, and the newer ones begin at its start.
        let at = (first & (len - 1)) as usize;
        let (newer, older) = self.words.split_at(at);
        let count = (end - first) as usize;
        let older = &older[..older.len().min(count)];
        for part in [older, &newer[..count - older.len()]] {
            for line in part.chunks(WORDS_PER_LINE) {
                arch::prefetch(line.as_ptr().wrapping_byte_add(COPY_AHEAD).cast());
                arch::prefetch(words.as_ptr_range().end.wrapping_byte_add(COPY_AHEAD).cast());
                words.extend(line.iter().map(|word| Word(word.load(Ordering::Relaxed))));
            }
        }
        // Pairs with the fence in `push_at`.
        fence(Ordering::Acquire);
        // The writer may have written one word more than it has counted.
        let written = self.written.load(Ordering::Relaxed) + 1;
        let lost = written.saturating_sub(len).saturating_sub(first).min(end - first);
        words.drain(..lost as usize);
        RingCopy { first: first + lost, from, words }
    }

    /// Gives it back, with the rings that it replaced. No thread of its runtime is left.
    fn give_back(&'static self) {
        let mut next = Some(self);
        while let Some(ring) = next {
            // SAFETY: null, or a ring (invariant 2).
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

/// How a recording begins.
#[derive(Clone, Copy)]
pub(super) struct Start {
    /// The words of each ring, at least, as a power of two.
    pub(super) log: u32,
    pub(super) now: Nanos,
    pub(super) words_per_clock: u32,
}

/// A writer's ring: the one to write to now, and that of the last recording.
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

    /// Returns the ring to write to. What the caller does with it is compiled as rare code, beside
    /// the path of a program that records nothing.
    #[inline(always)]
    pub(crate) fn active(&self) -> Option<&'static Ring> {
        #[cold]
        #[inline(always)]
        fn records() {}

        // Acquire: pairs with the Release in `begin`.
        // SAFETY: null, or a ring (invariant 2).
        let ring = unsafe { self.active.load(Ordering::Acquire).as_ref() };
        if ring.is_some() {
            records();
        }
        ring
    }

    pub(super) fn last(&self) -> Option<&'static Ring> {
        // Acquire, SAFETY: as above.
        unsafe { self.last.load(Ordering::Acquire).as_ref() }
    }

    /// Begins a recording. One caller at a time.
    pub(super) fn begin(&self, start: Start) {
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

    pub(super) fn end(&self) {
        self.active.store(null_mut(), Ordering::Relaxed);
    }

    /// Gives the rings back. No thread of the runtime is left.
    pub(crate) fn give_back(&self) {
        if let Some(ring) = self.last() {
            ring.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    #[test]
    fn samples_are_rare_in_the_long_run_and_many_at_once() {
        let ring = Ring::take(MIN_WORDS_LOG);
        let now = 10 * SAMPLES_AT_ONCE * NANOS_PER_SAMPLE;
        let sampled = |now| (0..1_000).filter(|_| ring.may_sample(now)).count() as u64;
        assert_eq!(sampled(now), SAMPLES_AT_ONCE + 1);
        assert_eq!(sampled(now + NANOS_PER_SAMPLE - 1), 0);
        assert_eq!(sampled(now + NANOS_PER_SAMPLE), 1);
        assert_eq!(sampled(now + 4 * NANOS_PER_SAMPLE), 3);
        assert_eq!(sampled(2 * now), SAMPLES_AT_ONCE + 1);
    }

    /// Copies a ring while its writer overwrites it all the time. Each word is its own number, so
    /// that a word that is torn, too old or too new is seen.
    #[test]
    fn a_copy_has_each_word_as_it_was_written() {
        let (ring, over) = (Ring::take(MIN_WORDS_LOG), AtomicBool::new(false));
        let from = ring.words_written();
        ring.begin(Start { log: MIN_WORDS_LOG, now: 0, words_per_clock: WORDS_PER_CLOCK });
        let (copies, overtaken, wrong) = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = from;
                while !over.load(Ordering::Relaxed) {
                    ring.push(Word::new(Kind::Switch, 7, number));
                    number += 1;
                }
            });
            let (start, mut copies, mut overtaken, mut wrong) = (Instant::now(), 0, 0, 0);
            while start.elapsed() < Duration::from_millis(300) {
                let copy = ring.copy();
                let numbers = copy.first..copy.first + copy.words.len() as u64;
                let expected = numbers.map(|n| Word::new(Kind::Switch, 7, n).0);
                wrong += usize::from(!copy.words.iter().map(|word| word.0).eq(expected));
                copies += 1;
                overtaken += usize::from(copy.words.len() + 1 < ring.words.len());
            }
            over.store(true, Ordering::Relaxed);
            (copies, overtaken, wrong)
        });
        println!("{copies} copies, {overtaken} of them overtaken by the writer");
        assert!(copies > 0 && wrong == 0, "{wrong} of {copies} copies are wrong");
        UNUSED[MIN_WORDS_LOG as usize].push(ring);
    }
}
