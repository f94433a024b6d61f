//! The beginning and the end of a recording, and its copy.

use super::ring::{MAX_WORDS_LOG, MIN_WORDS_LOG, Ring, RingCopy, RingSlot, Start, WORDS_PER_CLOCK};
use crate::sched::Sched;
use crate::sched::sample;
use crate::sched::trigger::Incident;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::lock::{self, Lock};
use std::io;
use std::num::NonZeroU16;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// How long a thread sleeps before it tries again to take the [`Control`].
const CONTROL_PAUSE: Duration = Duration::from_micros(50);

/// A runtime's recorder.
pub(crate) struct Record {
    /// Held while a recording begins, ends or is copied: [`Control`]. Not a lock: memory is
    /// allocated meanwhile.
    is_controlled: AtomicBool,
    /// The memory that the rings of the present or last recording may take together.
    bytes: AtomicUsize,
    /// Held by the writer of the ring of threads without a P.
    writing_outside: Lock<()>,
    outside: RingSlot,
    /// When the last recording ended; [`NEVER`] while one is on, and before the first.
    ended: AtomicU64,
    /// sysmon's: when it made the last marks.
    pub(super) last_mark: AtomicU64,
    /// The number under which wakers of the present or last recording are sampled; 0 if they are
    /// not.
    waker_samples: AtomicU16,
    /// [`sample::end_wakers`] has to be called.
    samples_wakers: AtomicBool,
}

impl Record {
    pub(crate) const fn new() -> Record {
        Record {
            is_controlled: AtomicBool::new(false),
            bytes: AtomicUsize::new(0),
            writing_outside: Lock::new(()),
            outside: RingSlot::new(),
            ended: AtomicU64::new(NEVER),
            last_mark: AtomicU64::new(0),
            waker_samples: AtomicU16::new(0),
            samples_wakers: AtomicBool::new(false),
        }
    }

    /// Samples no wakers any more.
    pub(crate) fn end_waker_samples(&self) {
        if self.samples_wakers.swap(false, Ordering::Relaxed) {
            sample::end_wakers();
        }
    }

    /// Returns the number under which wakers of the present or last recording are sampled.
    pub(super) fn waker_samples(&self) -> Option<NonZeroU16> {
        NonZeroU16::new(self.waker_samples.load(Ordering::Relaxed))
    }

    /// Returns whether events are recorded.
    pub(crate) fn is_on(&self) -> bool {
        self.outside.active().is_some()
    }

    /// Records an event of a thread without a P.
    #[inline]
    pub(super) fn write_outside(&self, f: impl FnOnce(&Ring)) {
        if let Some(ring) = self.outside.active() {
            let _writing = self.writing_outside.lock();
            f(ring);
        }
    }

    /// Gives the rings back. No thread of the runtime is left.
    pub(crate) fn give_back(&self) {
        self.end_waker_samples();
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
            if let Some(control) = Control::take_until(record, NEVER) {
                return control;
            }
        }
    }

    /// Returns None if another thread or goroutine still has it at that time.
    fn take_until(record: &'a Record, deadline: Nanos) -> Option<Control<'a>> {
        loop {
            if let Some(control) = Control::try_take(record) {
                return Some(control);
            }
            if now() >= deadline {
                return None;
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

/// Returns the base-2 logarithm of the words per ring, so that `rings` rings take at most `bytes`
/// together; or that of the smallest ring.
fn ring_log(bytes: usize, rings: usize) -> u32 {
    let words = bytes / size_of::<u64>() / rings;
    words.max(1).ilog2().clamp(MIN_WORDS_LOG, MAX_WORDS_LOG)
}

/// These functions allocate, so they are called outside the runtime.
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
        self.record.waker_samples.store(0, Ordering::Relaxed);
        let log = ring_log(bytes, self.ps_made() as usize + 1);
        self.record.bytes.store(bytes, Ordering::Relaxed);
        let words_per_clock = if exact_clock { 1 } else { WORDS_PER_CLOCK };
        let start = Start { log, now: now(), words_per_clock };
        for p in self.all_ps() {
            p.ring.begin(start);
        }
        self.record.ended.store(NEVER, Ordering::Relaxed);
        self.record.outside.begin(start);
        self.attach_rings();
        true
    }

    /// Samples the wakers that end long waits from now on, until the recording ends. Returns the
    /// number of the samples, or None if nothing was changed: the runtime is stopping, or another
    /// thread has ended the recording meanwhile, and may have begun another one.
    pub(crate) fn sample_wakers(&self) -> io::Result<Option<NonZeroU16>> {
        let _control = Control::take(&self.record);
        let is_sampled = self.record.samples_wakers.load(Ordering::Relaxed);
        if !self.record.is_on() || is_sampled || self.stopping.load(Ordering::Acquire) {
            return Ok(None);
        }
        let number = sample::begin_wakers()?;
        self.record.waker_samples.store(number.get(), Ordering::Relaxed);
        self.record.samples_wakers.store(true, Ordering::Relaxed);
        Ok(Some(number))
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
        let without_ring = self.all_ps().filter(|p| p.ring.active().is_none()).count();
        if without_ring != 0 {
            // Half of what is left: the other half is for Ps that are made later.
            let budget = self.record.bytes.load(Ordering::Relaxed);
            let log = ring_log(budget.saturating_sub(self.ring_bytes()) / 2, without_ring);
            for p in self.all_ps().filter(|p| p.ring.active().is_none()) {
                p.ring.begin(outside.start(log));
            }
        }
        let rings = || self.all_ps().filter_map(|p| p.ring.active()).chain([outside]);
        // What is in the table is out of date if no ring has used it.
        if !table.is_null() && rings().all(|ring| ring.runnable().is_none()) {
            self.runnable_table().clear();
        }
        rings().for_each(|ring| ring.use_table(table));
    }

    /// Returns the memory of the rings that are written to.
    fn ring_bytes(&self) -> usize {
        let rings = self.all_ps().map(|p| &p.ring).chain([&self.record.outside]);
        rings.filter_map(RingSlot::active).map(Ring::bytes).sum()
    }

    /// Makes the rings keep the table of runnable goroutines up to date, or not any more. Called
    /// when the watches have changed.
    pub(crate) fn watch_runnable(&self) {
        let _control = Control::take(&self.record);
        self.attach_rings();
    }

    /// Ends the recording. What was recorded stays until the next one begins.
    pub(crate) fn stop_recording(&self) {
        let _control = Control::take(&self.record);
        self.all_ps().for_each(|p| p.ring.end());
        if self.record.is_on() {
            self.record.end_waker_samples();
            self.record.outside.end();
            self.record.ended.store(now(), Ordering::Relaxed);
        }
    }

    /// Returns what was recorded, up to now. None if nothing was ever recorded, or if the recording
    /// is still being begun, ended or copied by another at `deadline`: that may be a goroutine
    /// which does not get a P.
    pub(crate) fn copy_record(&self, deadline: Nanos) -> Option<RecordCopy> {
        let _control = Control::take_until(&self.record, deadline)?;
        let outside = self.record.outside.last()?;
        // The rings of the Ps first: their marks in the other ring may be newer, not older.
        let ps = self.all_ps().filter_map(|p| p.ring.last()).map(Ring::copy).collect();
        let began = outside.start(0).now;
        let outside = outside.copy();
        self.attach_rings();
        let (ended, now) = (self.record.ended.load(Ordering::Relaxed), now());
        let until = ended.min(now);
        Some(RecordCopy {
            copied: until.saturating_sub(began),
            since_end: now - until,
            waker_samples: self.record.waker_samples(),
            ps,
            outside,
        })
    }
}

impl RecordCopy {
    pub(crate) fn rings(&self) -> impl Iterator<Item = &RingCopy> {
        self.ps.iter().chain([&self.outside])
    }
}

/// What was recorded, up to one moment.
pub(crate) struct RecordCopy {
    /// Until when it was recorded, in nanoseconds since the recording began: until the copy was
    /// made, or until the recording had ended.
    pub(crate) copied: u64,
    /// The nanoseconds from then until the copy was made.
    pub(crate) since_end: u64,
    /// The number of the samples of wakers, if there are any in this process.
    pub(crate) waker_samples: Option<NonZeroU16>,
    /// By the id of the P.
    pub(crate) ps: Vec<RingCopy>,
    /// By threads without a P.
    pub(crate) outside: RingCopy,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Runtime, set_procs, trace};

    const BYTES: usize = 8 << 20;

    #[test]
    fn rings_of_later_ps_stay_within_the_memory_of_the_recording() {
        let runtime = Runtime::builder().procs(2).build().unwrap();
        let run = || {
            let recorder = trace::Recorder::builder().bytes(BYTES).start().unwrap();
            let taken = crate::runtime::with_sched(Sched::ring_bytes);
            assert!(taken > BYTES / 2 && taken <= BYTES, "{taken} bytes at the start");
            for procs in [3, 64] {
                set_procs(procs);
                let taken = crate::runtime::with_sched(|sched| {
                    assert!(sched.all_ps().all(|p| p.ring.active().is_some()));
                    sched.ring_bytes()
                });
                assert!(taken <= BYTES, "{taken} bytes with {procs} Ps");
            }
            recorder.stop();
        };
        runtime.run(run);
    }

    #[test]
    fn a_ring_has_at_least_the_smallest_size() {
        assert_eq!(ring_log(0, 3), MIN_WORDS_LOG);
        assert_eq!(ring_log(8 << 20, 3), 18);
        assert_eq!(ring_log(usize::MAX, 1), MAX_WORDS_LOG);
    }
}
