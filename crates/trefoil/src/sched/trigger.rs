//! Triggers: incidents that the scheduler notices by itself while it is recorded.
//!
//! | [`Incident`] | noticed by |
//! |---|---|
//! | `Runnable`: a goroutine is runnable for too long | sysmon, by [`RunnableTable`] |
//! | `TimerLate`: a timer runs too late | the M that runs it |
//! | `Blocked`: a thread is blocked in the kernel for too long | sysmon; or the M, when it is back |
//! | `Panic`: a goroutine panics | the panic hook |
//! | `Signal`: a signal arrives | its handler (`observe/signals.rs`), which wakes the helper threads |
//!
//! The thread that notices an incident stores it in the one place for its kind ([`Sched::notice`])
//! and asks the helper thread for the rest, which allocates. Further incidents of that kind are
//! dropped until the place is free again and the pause that a [`Watch`] asks for is over.
//!
//! Rejected: to read the clock for every goroutine that becomes runnable (a switch takes half as
//! long again); to look for the times in the rings (millions of words per second).

use crate::sched::Sched;
use crate::sched::monitor::helper::Request;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::free_list::{FreeLink, FreeList, Reusable};
use crate::sys::lock::Lock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The most watches that a runtime has.
pub(crate) const WATCHES_MAX: usize = 16;
/// Entries of a [`RunnableTable`].
const ENTRIES: usize = 4096;
/// How many scans sysmon remembers. Older entries have been noticed, or are dropped.
const SCANS: usize = 64;
/// The shortest time between two scans.
const MIN_SCAN_NANOS: Nanos = 1_000_000;

/// What may happen; see the head of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Incident {
    Runnable,
    TimerLate,
    Blocked,
    Panic,
    Signal,
}

impl Incident {
    pub(crate) const ALL: [Incident; 5] = [
        Incident::Runnable,
        Incident::TimerLate,
        Incident::Blocked,
        Incident::Panic,
        Incident::Signal,
    ];
}

/// An incident that was noticed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Noticed {
    /// The id of the goroutine or task (0 if unknown). For `Incident::Signal`: the signal's number.
    pub(crate) id: u64,
    /// How long it lasted so far.
    pub(crate) nanos: Nanos,
}

impl Noticed {
    /// Returns the goroutine or task, if it is known.
    pub(crate) fn goroutine(self, incident: Incident) -> Option<u64> {
        Some(self.id).filter(|&id| id != 0 && incident != Incident::Signal)
    }
}

/// Tells of an incident.
type Tell = Box<dyn Fn(&Sched, Noticed) + Send + Sync>;

/// A request to be told of incidents of one kind.
pub(crate) struct Watch {
    pub(crate) incident: Incident,
    /// The signal to wait for, if `incident` is `Signal`.
    pub(crate) signal: Option<i32>,
    /// Shorter ones do not count.
    pub(crate) limit: Nanos,
    /// The pause after an incident that was told.
    pub(crate) cool_down: Nanos,
    /// How many incidents will be told.
    pub(crate) left: AtomicU32,
    /// The end of the pause.
    pub(crate) quiet_until: AtomicU64,
    /// Called with each incident, outside the runtime, on any thread. It must not block, nor may
    /// its destructor: the helper thread may be the last to drop it.
    pub(crate) tell: Tell,
}

/// The state of one kind of incident.
struct Kind {
    /// The smallest limit of all watches; `NEVER` without a watch.
    limit: AtomicU64,
    /// Until then incidents are dropped.
    quiet_until: AtomicU64,
    /// The place for one incident. `nanos` is 0 while it is free, and [`RESERVED`] while `id` is
    /// being written.
    nanos: AtomicU64,
    id: AtomicU64,
}

const RESERVED: Nanos = Nanos::MAX;

/// A runtime's triggers.
pub(crate) struct Triggers {
    kinds: [Kind; Incident::ALL.len()],
    watches: [Lock<Option<Arc<Watch>>>; WATCHES_MAX],
    /// Held while the limits are computed from the watches. Taken before the locks of `watches`.
    updating: Lock<()>,
    /// Exists since the first watch for `Runnable`.
    table: Lock<Option<&'static RunnableTable>>,
}

impl Triggers {
    pub(crate) const fn new() -> Triggers {
        Triggers {
            kinds: [const {
                Kind {
                    limit: AtomicU64::new(NEVER),
                    quiet_until: AtomicU64::new(0),
                    nanos: AtomicU64::new(0),
                    id: AtomicU64::new(0),
                }
            }; Incident::ALL.len()],
            watches: [const { Lock::new(None) }; WATCHES_MAX],
            updating: Lock::new(()),
            table: Lock::new(None),
        }
    }

    /// Returns how long such an incident must last to be noticed.
    #[inline]
    pub(crate) fn limit(&self, incident: Incident) -> Nanos {
        self.kinds[incident as usize].limit.load(Ordering::Relaxed)
    }

    /// Gives the table back. No thread of the runtime is left.
    pub(crate) fn give_back(&self) {
        if let Some(table) = self.table.lock().take() {
            UNUSED.push(table);
        }
    }

    /// Adds a watch. Returns it back if there are too many. Outside the runtime: allocates.
    pub(crate) fn add(&self, watch: Arc<Watch>) -> Result<(), Arc<Watch>> {
        let incident = watch.incident;
        let mut watch = Some(watch);
        for place in &self.watches {
            let mut place = place.lock();
            if place.is_none() {
                *place = watch.take();
                break;
            }
        }
        match watch {
            Some(watch) => Err(watch),
            None => {
                self.update(incident);
                Ok(())
            }
        }
    }

    pub(crate) fn remove(&self, watch: &Arc<Watch>) {
        for place in &self.watches {
            let mut place = place.lock();
            let removed = match &*place {
                Some(other) if Arc::ptr_eq(other, watch) => place.take(),
                _ => None,
            };
            // Its destructor may run code of the program.
            drop(place);
            drop(removed);
        }
        self.update(watch.incident);
    }

    /// Returns the watches for such incidents.
    fn watches(&self, incident: Incident) -> Vec<Arc<Watch>> {
        let mut all = Vec::with_capacity(WATCHES_MAX);
        for place in &self.watches {
            all.extend(place.lock().iter().filter(|watch| watch.incident == incident).cloned());
        }
        all
    }

    /// Computes the limit and the end of the pause again.
    fn update(&self, incident: Incident) {
        // Otherwise a thread could store later what it has computed from older watches.
        let _updating = self.updating.lock();
        let (mut limit, mut quiet_until) = (NEVER, NEVER);
        for place in &self.watches {
            let place = place.lock();
            let is_open = |watch: &&Arc<Watch>| {
                watch.incident == incident && watch.left.load(Ordering::Relaxed) != 0
            };
            if let Some(watch) = place.as_ref().filter(is_open) {
                limit = limit.min(watch.limit);
                quiet_until = quiet_until.min(watch.quiet_until.load(Ordering::Relaxed));
            }
        }
        let kind = &self.kinds[incident as usize];
        kind.limit.store(limit, Ordering::Relaxed);
        kind.quiet_until.store(quiet_until, Ordering::Relaxed);
    }

    /// Takes the incident that was noticed.
    fn take(&self, incident: Incident) -> Option<Noticed> {
        let kind = &self.kinds[incident as usize];
        // Acquire: pairs with the Release in `notice`, so that `id` is that of this incident.
        match kind.nanos.load(Ordering::Acquire) {
            0 | RESERVED => None,
            nanos => {
                let id = kind.id.load(Ordering::Relaxed);
                // Release: pairs with the Acquire in `notice`: the next `id` is stored after this
                // one was read. Only the helper thread takes.
                kind.nanos.store(0, Ordering::Release);
                Some(Noticed { id, nanos })
            }
        }
    }
}

impl Sched {
    /// An incident of at least its kind's limit has happened. Neither allocates nor blocks.
    #[cold]
    pub(crate) fn notice(&self, incident: Incident, noticed: Noticed) {
        let kind = &self.triggers.kinds[incident as usize];
        if !self.record.is_on() || now() < kind.quiet_until.load(Ordering::Relaxed) {
            return;
        }
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        if kind.nanos.compare_exchange(0, RESERVED, acquire, relaxed).is_ok() {
            kind.id.store(noticed.id, Ordering::Relaxed);
            kind.nanos.store(noticed.nanos.clamp(1, RESERVED - 1), Ordering::Release);
            self.helper.request(Request::Incidents);
        }
    }

    /// Tells the watches what was noticed. For the helper thread alone.
    pub(crate) fn tell_incidents(&self) {
        for incident in Incident::ALL {
            if let Some(noticed) = self.triggers.take(incident) {
                self.tell(incident, noticed);
            }
        }
    }

    /// Tells the watches of an incident. Outside the runtime: allocates.
    pub(crate) fn tell(&self, incident: Incident, noticed: Noticed) {
        let now = now();
        for watch in self.triggers.watches(incident) {
            let relaxed = Ordering::Relaxed;
            if watch.signal.is_some_and(|signal| signal as u64 != noticed.id)
                || noticed.nanos < watch.limit
                || now < watch.quiet_until.load(relaxed)
            {
                continue;
            }
            if watch.left.fetch_update(relaxed, relaxed, |left| left.checked_sub(1)).is_ok() {
                watch.quiet_until.store(now.saturating_add(watch.cool_down), relaxed);
                (watch.tell)(self, noticed);
            }
        }
        self.triggers.update(incident);
    }

    /// Returns the table, and makes one at first use. Outside the runtime: allocates.
    pub(crate) fn runnable_table(&self) -> &'static RunnableTable {
        if let Some(table) = *self.triggers.table.lock() {
            return table;
        }
        let new = UNUSED.pop_or_leak(RunnableTable::new);
        new.clear();
        let mut place = self.triggers.table.lock();
        let table = *place.get_or_insert(new);
        drop(place);
        if !std::ptr::eq(table, new) {
            UNUSED.push(new);
        }
        table
    }

    /// Looks for goroutines that are runnable for too long. Returns when to look again. For sysmon.
    pub(crate) fn scan_runnable(&self, now: Nanos) -> Nanos {
        let limit = self.triggers.limit(Incident::Runnable);
        if limit == NEVER || !self.record.is_on() {
            return NEVER;
        }
        let Some(table) = *self.triggers.table.lock() else { return NEVER };
        let pause = (limit / 4).max(MIN_SCAN_NANOS);
        let due = table.last_scan.load(Ordering::Relaxed).saturating_add(pause);
        if now < due {
            return due;
        }
        if let Some(noticed) = table.scan(now, limit) {
            self.notice(Incident::Runnable, noticed);
        }
        now + pause
    }
}

/// Since which of sysmon's scans goroutines and tasks are runnable: by the lower bits of their ids.
///
/// An entry is `id 48 | number of the last scan 16`, or 0. The spawner or waker of a goroutine
/// writes its entry, and the M that runs it clears it. If two share an entry, the earlier one is
/// not noticed. No clock is needed: what became runnable after a scan has been runnable since the
/// next one, at least.
pub(crate) struct RunnableTable {
    entries: Box<[AtomicU64]>,
    /// The number of the last scan.
    scan: AtomicU32,
    /// When it was.
    last_scan: AtomicU64,
    /// When the last scans were, by the lower bits of their numbers.
    times: [AtomicU64; SCANS],
    free_link: FreeLink<RunnableTable>,
}

/// Tables of runtimes that have ended. A thread may still write to a table that it has seen.
static UNUSED: FreeList<RunnableTable> = FreeList::new();

impl Reusable for RunnableTable {
    fn free_link(&self) -> &FreeLink<RunnableTable> {
        &self.free_link
    }
}

impl RunnableTable {
    fn new() -> RunnableTable {
        RunnableTable {
            entries: std::iter::repeat_with(|| AtomicU64::new(0)).take(ENTRIES).collect(),
            scan: AtomicU32::new(0),
            last_scan: AtomicU64::new(0),
            times: [const { AtomicU64::new(0) }; SCANS],
            free_link: FreeLink::new(),
        }
    }

    /// Forgets all entries.
    pub(crate) fn clear(&self) {
        self.entries.iter().for_each(|entry| entry.store(0, Ordering::Relaxed));
    }

    fn entry(&self, id: u64) -> &AtomicU64 {
        &self.entries[id as usize % ENTRIES]
    }

    /// `id` is runnable from now on.
    pub(crate) fn begin(&self, id: u64) {
        let scan = self.scan.load(Ordering::Relaxed);
        self.entry(id).store(id << 16 | u64::from(scan as u16), Ordering::Relaxed);
    }

    /// `id` runs.
    pub(crate) fn end(&self, id: u64) {
        let entry = self.entry(id);
        if entry.load(Ordering::Relaxed) >> 16 == id & (u64::MAX >> 16) {
            entry.store(0, Ordering::Relaxed);
        }
    }

    /// sysmon: returns the goroutine that has been runnable longest, if that is at least `limit`,
    /// and clears the entries of all that have been runnable for so long: each is noticed once.
    fn scan(&self, now: Nanos, limit: Nanos) -> Option<Noticed> {
        let mut longest: Option<Noticed> = None;
        let scan = self.scan.load(Ordering::Relaxed);
        for entry in &self.entries {
            let value = entry.load(Ordering::Relaxed);
            if value == 0 {
                continue;
            }
            // How many scans were since.
            let scans = u32::from((scan as u16).wrapping_sub(value as u16));
            if scans == 0 {
                continue;
            }
            // The oldest one that is remembered is late enough: entries that are older are kept.
            let first = scan - (scans - 1).min(SCANS as u32 - 1).min(scan);
            let since = self.times[first as usize % SCANS].load(Ordering::Relaxed);
            let nanos = now.saturating_sub(since);
            if nanos >= limit {
                let relaxed = Ordering::Relaxed;
                if entry.compare_exchange(value, 0, relaxed, relaxed).is_ok()
                    && longest.is_none_or(|longest| longest.nanos < nanos)
                {
                    longest = Some(Noticed { id: value >> 16, nanos });
                }
            }
        }
        let next = scan.wrapping_add(1);
        self.times[next as usize % SCANS].store(now, Ordering::Relaxed);
        self.last_scan.store(now, Ordering::Relaxed);
        self.scan.store(next, Ordering::Relaxed);
        longest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Nanos = 1_000_000;

    fn id(noticed: Option<Noticed>) -> Option<u64> {
        noticed.map(|noticed| noticed.id)
    }

    #[test]
    fn a_goroutine_is_runnable_at_least_since_the_scan_after_it_became_so() {
        let table = RunnableTable::new();
        assert_eq!(id(table.scan(100 * MS, 10 * MS)), None);
        table.begin(7);
        assert_eq!(id(table.scan(105 * MS, 10 * MS)), None);
        assert_eq!(id(table.scan(114 * MS, 10 * MS)), None);
        let noticed = table.scan(115 * MS, 10 * MS).unwrap();
        assert_eq!((noticed.id, noticed.nanos), (7, 10 * MS));
        // Once.
        assert_eq!(id(table.scan(120 * MS, 10 * MS)), None);
    }

    #[test]
    fn one_that_ran_meanwhile_is_not_noticed() {
        let table = RunnableTable::new();
        table.begin(7);
        table.begin(8);
        table.scan(100 * MS, 10 * MS);
        table.end(7);
        // The entry of another one with the same lower bits stays.
        table.end(8 + ENTRIES as u64);
        assert_eq!(id(table.scan(120 * MS, 10 * MS)), Some(8));
    }

    #[test]
    fn what_waits_for_more_scans_than_are_remembered_is_noticed() {
        let table = RunnableTable::new();
        table.begin(7);
        let scans = 3 * SCANS as u64;
        for i in 0..scans {
            assert_eq!(id(table.scan((100 + i) * MS, 1000 * MS)), None);
        }
        let noticed = table.scan((2000 + scans) * MS, 1000 * MS).unwrap();
        assert_eq!(noticed.id, 7);
        assert!(noticed.nanos >= 1900 * MS);
    }

    #[test]
    fn the_longest_of_several_is_named() {
        let table = RunnableTable::new();
        table.begin(1);
        table.scan(100 * MS, 10 * MS);
        table.begin(2);
        table.scan(105 * MS, 10 * MS);
        assert_eq!(id(table.scan(130 * MS, 10 * MS)), Some(1));
    }

    #[test]
    fn the_number_of_scans_may_wrap() {
        let table = RunnableTable::new();
        table.scan.store(u32::from(u16::MAX), Ordering::Relaxed);
        table.begin(9);
        table.scan(100 * MS, 10 * MS);
        assert_eq!(id(table.scan(110 * MS, 10 * MS)), Some(9));
    }
}
