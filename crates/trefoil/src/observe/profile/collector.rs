//! Gathers the samples that `sched/sample.rs` takes, and makes profiles of them.
//!
//! While a profile or a flight recorder runs, a thread of its own takes the samples from the ring
//! every [`PAUSE`], unwinds the copies of their stacks, and counts them by addresses; the latest
//! wake-ups it remembers one by one. Names are found only when they are wanted.
//!
//! The thread does not belong to a runtime, and takes no part in scheduling: it also works while
//! every P computes.

use crate::observe::pprof::{Group, GroupsByFrames, Profile, ProfileKind, SampleKey, Values};
use crate::observe::process_lock::{ProcessGuard, ProcessLock};
use crate::observe::symbols::SymbolCache;
use crate::observe::unwind::Tables;
use crate::sched::Sched;
use crate::sched::labels::LabelSet;
use crate::sched::monitor::helper;
use crate::sched::sample::{self, Sample, SampleKind};
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{Nanos, now};
use crate::sys::map::Map;
use crate::sys::realtime;
use crate::sys::syscalls;
use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use trefoil_base::symbols::Frame;

/// The time between two visits of the ring.
const PAUSE: Duration = Duration::from_millis(20);
/// The same while only wake-ups are sampled.
const PAUSE_FOR_WAKES: Duration = Duration::from_millis(100);
/// Wake-ups that are remembered at most: the latest, of all recordings, until the process ends. They
/// take some megabytes.
const WAKES_MAX: usize = 1 << 14;
/// Frames of a waker that are remembered.
const WAKER_FRAMES_MAX: usize = 32;
/// How long [`wakes`] sleeps before it tries again to take the lock, or the next sample.
const LOCK_PAUSE: Duration = Duration::from_micros(50);
/// How long [`wakes`] waits for a sample that is not complete. A busy machine may have stopped its
/// writer; in a process that was forked, the writer may be gone.
const WRITER_PATIENCE_NANOS: Nanos = 20_000_000;
/// Samples that are taken while the lock is held.
const BATCH: u32 = 100;
/// The stack of the collector's thread.
const STACK_BYTES: usize = 512 << 10;
/// Different stacks that a profile counts at most. The samples of further ones are lost.
const STACKS_MAX: usize = 1 << 16;
/// How long the end of a CPU profile waits for samples that are being written.
const LATE_MAX: Duration = Duration::from_millis(100);

/// What samples are counted by.
#[derive(Clone, PartialEq, Eq, Hash)]
struct RawKey {
    addresses: Vec<u64>,
    is_cut: bool,
    state: Option<&'static str>,
    labels: Option<Arc<LabelSet>>,
    id: Option<u64>,
}

/// Samples of one kind.
struct Run {
    began: SystemTime,
    counts: Map<RawKey, Values>,
    /// The counter of the ring when the run began.
    lost_before: u64,
    /// Values of samples beyond [`STACKS_MAX`].
    dropped: u64,
}

impl Run {
    fn new(kind: SampleKind) -> Run {
        Run {
            began: SystemTime::now(),
            counts: Map::new(),
            lost_before: sample::lost(kind),
            dropped: 0,
        }
    }

    fn lost(&self, kind: SampleKind) -> u64 {
        self.dropped + sample::lost(kind) - self.lost_before
    }

    fn add(&mut self, key: RawKey, values: Values, value: u64) {
        if self.counts.len() >= STACKS_MAX && !self.counts.contains_key(&key) {
            self.dropped += value;
            return;
        }
        let sum = self.counts.get_or_default(key);
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum = sum.saturating_add(value));
    }
}

/// The settings of a CPU profile.
#[derive(Clone, Copy)]
pub(super) struct CpuSettings {
    pub(super) session: u8,
    pub(super) period: Nanos,
    pub(super) by_id: bool,
}

/// What was gathered.
struct Collected {
    has_thread: bool,
    tables: Option<Tables>,
    cpu: Option<(CpuSettings, Run)>,
    /// Waits and waits for locks. They stay when sampling ends.
    waits: Option<Run>,
    unlocks: Option<Run>,
    wakes: VecDeque<Wake>,
}

/// Where a goroutine was when it ended the long wait of another one.
#[derive(Clone)]
pub(crate) struct Wake {
    /// The number of the recording (`sched/record/control.rs`).
    recording: u16,
    pub(crate) woken: u64,
    pub(crate) waker: u64,
    /// Since the recording began.
    pub(crate) at: Nanos,
    /// The stack of the waker.
    pub(crate) addresses: Arc<[u64]>,
}

static COLLECTED: ProcessLock<Collected> = ProcessLock::new(Collected {
    has_thread: false,
    tables: None,
    cpu: None,
    waits: None,
    unlocks: None,
    wakes: VecDeque::new(),
});

fn collected() -> ProcessGuard<'static, Collected> {
    COLLECTED.lock()
}

impl Collected {
    /// Returns whether samples are being taken.
    fn is_sampling(&self) -> bool {
        self.cpu.is_some()
            || sample::wait_rate(SampleKind::Wait) != 0
            || sample::wait_rate(SampleKind::Unlock) != 0
            || sample::are_wakers_on()
    }

    /// Returns how long the collector sleeps. Wake-ups are sampled rarely.
    fn pause(&self) -> Duration {
        let counts = self.cpu.is_some() || sample::are_waits_on();
        if counts { PAUSE } else { PAUSE_FOR_WAKES }
    }

    fn run(&mut self, kind: SampleKind) -> &mut Option<Run> {
        if kind == SampleKind::Unlock { &mut self.unlocks } else { &mut self.waits }
    }

    fn start_thread(&mut self) -> io::Result<()> {
        if !self.has_thread {
            helper::start_process_thread("profile", STACK_BYTES, collect)?;
            self.has_thread = true;
        }
        Ok(())
    }

    /// Takes samples that were begun before `end`, but not more than [`BATCH`]. Returns whether all
    /// of those that are complete were taken.
    fn drain_batch(&mut self, end: u64) -> bool {
        let mut is_checked = false;
        for _ in 0..BATCH {
            if sample::taken() >= end {
                return true;
            }
            let Some(sample) = sample::take() else { return true };
            if !is_checked && self.tables.as_ref().is_none_or(|tables| !tables.are_current()) {
                self.tables = Some(Tables::load());
            }
            is_checked = true;
            self.add(sample);
        }
        false
    }

    fn add(&mut self, sample: Sample) {
        let Some(tables) = self.tables.as_mut() else { return };
        let (values, by_id) = match sample.kind {
            SampleKind::Waker => {
                let (recording, woken) = sample.recording_and_woken();
                let mut addresses = unwind(tables, &sample);
                addresses.truncate(WAKER_FRAMES_MAX);
                let addresses = addresses.into();
                let (waker, at) = (sample.id, sample.nanos);
                return self.add_wake(Wake { recording, woken, waker, at, addresses });
            }
            SampleKind::Cpu => match &self.cpu {
                Some((cpu, _)) if cpu.session == sample.session => {
                    ([sample.value, sample.value * cpu.period, 0], cpu.by_id)
                }
                // A signal that came after the end of its profile.
                _ => return,
            },
            SampleKind::Wait | SampleKind::Unlock => (estimate(sample.value, sample.nanos), false),
        };
        let key = RawKey {
            addresses: unwind(tables, &sample),
            is_cut: sample.is_cut,
            state: (sample.kind != SampleKind::Cpu).then(|| WaitReason::text(sample.reason)),
            labels: sample.labels.as_ref().map(|labels| labels.set().clone()),
            id: (by_id && sample.id != 0).then_some(sample.id),
        };
        let run = match sample.kind {
            SampleKind::Cpu => self.cpu.as_mut().map(|(_, run)| run),
            kind => self.run(kind).as_mut(),
        };
        if let Some(run) = run {
            run.add(key, values, sample.value);
        }
    }

    fn add_wake(&mut self, wake: Wake) {
        if self.wakes.len() == WAKES_MAX {
            self.wakes.pop_front();
        }
        self.wakes.push_back(wake);
    }
}

/// Returns how many waits, and how much time, the sample of a wait stands for: a wait that is
/// shorter than the rate was sampled with the probability `nanos / rate`.
fn estimate(nanos: Nanos, rate: Nanos) -> Values {
    if nanos >= rate {
        [1, nanos, 0]
    } else {
        [rate.saturating_add(nanos / 2) / nanos.max(1), rate, 0]
    }
}

fn unwind(tables: &mut Tables, sample: &Sample) -> Vec<u64> {
    let (start, words) = &sample.stack[1];
    let caller = *start..*start + 8 * words.len() as u64;
    tables.unwind(sample.registers, caller, &mut |address| {
        let word = |(start, words): &(u64, Vec<u64>)| {
            let offset = address.checked_sub(*start)?;
            let at = usize::try_from(offset / 8).ok()?;
            if offset % 8 == 0 { words.get(at).copied() } else { None }
        };
        sample.stack.iter().find_map(word)
    })
}

/// Takes the samples that are complete now. Those that come meanwhile are left: they may come
/// faster than they are unwound. The lock is released now and then.
fn drain() -> ProcessGuard<'static, Collected> {
    let end = sample::written();
    loop {
        let mut collected = collected();
        if collected.drain_batch(end) {
            return collected;
        }
    }
}

/// The collector's thread.
fn collect() {
    realtime::leave();
    let mut pause = PAUSE;
    loop {
        std::thread::sleep(pause);
        let mut collected = drain();
        if !collected.is_sampling() {
            collected.has_thread = false;
            collected.tables = None;
            sample::trim();
            return;
        }
        pause = collected.pause();
    }
}

/// Begins to gather CPU samples.
pub(super) fn begin_cpu(settings: CpuSettings) -> io::Result<()> {
    let mut collected = collected();
    collected.start_thread()?;
    collected.cpu = Some((settings, Run::new(SampleKind::Cpu)));
    Ok(())
}

/// Ends it, and returns the profile. The timers have been stopped.
pub(super) fn end_cpu() -> Option<Profile> {
    let late_until = std::time::Instant::now() + LATE_MAX;
    let end = sample::written();
    loop {
        drop(drain());
        // A handler may be writing a sample.
        if sample::taken() >= end || std::time::Instant::now() > late_until {
            break;
        }
        // Not by std: a goroutine that waits when its runtime ends never goes on, and the caller
        // has a lock.
        syscalls::nanosleep(std::time::Duration::from_micros(100));
    }
    let (settings, run) = collected().cpu.take()?;
    let lost = run.lost(SampleKind::Cpu) * settings.period;
    Some(profile(ProfileKind::Cpu, settings.period, lost, run.began, run.counts))
}

/// Sets the rate at which waits are sampled; 0 ends it. If they were not sampled before, forgets
/// what was gathered earlier.
pub(crate) fn set_wait_rate(kind: SampleKind, rate: Nanos) -> io::Result<()> {
    let mut collected = drain();
    if rate != 0 {
        collected.start_thread()?;
        if sample::wait_rate(kind) == 0 {
            *collected.run(kind) = Some(Run::new(kind));
        }
    }
    sample::set_wait_rate(kind, rate)
}

/// Returns the profile of waits, or of waits for locks.
pub(crate) fn waits(kind: SampleKind) -> Profile {
    let profile_kind = match kind {
        SampleKind::Unlock => ProfileKind::Mutex,
        SampleKind::Cpu | SampleKind::Wait | SampleKind::Waker => ProfileKind::Block,
    };
    let mut collected = drain();
    // Copied, because it takes long to find the names, and the ring must be emptied meanwhile.
    let (lost, began, counts) = match collected.run(kind) {
        Some(run) => (run.lost(kind), run.began, run.counts.clone()),
        None => (0, SystemTime::now(), Map::new()),
    };
    drop(collected);
    profile(profile_kind, 1, lost, began, counts)
}

/// Begins to gather where the wakers of `sched` are; its recording has just begun. Without that a
/// recording says only which goroutine has woken another.
///
/// # Errors
/// If the thread cannot be started, or if there is no memory.
pub(crate) fn begin_wakers(sched: &Sched) -> io::Result<()> {
    let mut collected = collected();
    collected.start_thread()?;
    if let Some(number) = sched.sample_wakers()? {
        // The number may have been that of an earlier recording.
        collected.wakes.retain(|wake| wake.recording != number.get());
    }
    Ok(())
}

/// Returns the wake-ups of the recording with this number, as far as they are remembered. Not all
/// of them, or none, if they are not available at `deadline`.
pub(crate) fn wakes(recording: NonZeroU16, deadline: Nanos) -> Vec<Wake> {
    let end = sample::written();
    let patience = deadline.min(now() + WRITER_PATIENCE_NANOS);
    loop {
        if let Some(mut collected) = COLLECTED.try_lock() {
            let took_all = collected.drain_batch(end);
            let now = now();
            let is_over = took_all && (sample::taken() >= end || now >= patience);
            if is_over || now >= deadline {
                let is_of = |wake: &&Wake| wake.recording == recording.get();
                return collected.wakes.iter().filter(is_of).cloned().collect();
            }
            if !took_all {
                continue;
            }
        } else if now() >= deadline {
            return Vec::new();
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// Makes a profile of what was counted.
fn profile(
    kind: ProfileKind,
    period: u64,
    lost: u64,
    began: SystemTime,
    counts: Map<RawKey, Values>,
) -> Profile {
    let mut symbols = SymbolCache::default();
    let mut by_frames = GroupsByFrames::new();
    for (raw, values) in counts {
        let mut stack = match kind {
            ProfileKind::Cpu => symbols.frames_of_running(&raw.addresses),
            _ => symbols.frames(&raw.addresses),
        };
        if raw.is_cut || stack.is_empty() {
            let name = if raw.is_cut { "[deeper than the copied stack]" } else { "[unknown]" };
            stack.push(Arc::new(Frame { name: name.to_owned(), file: String::new(), line: 0 }));
        }
        let key = SampleKey { stack, state: raw.state, labels: raw.labels };
        let group = Group { values, id: raw.id };
        by_frames.get_or_default((key, raw.id)).add(kind, group);
    }
    Profile::new(kind, began, period, lost, by_frames)
}
