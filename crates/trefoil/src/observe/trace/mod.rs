//! What the flight recorder (`sched/record/`) has recorded: read, explained, and exported.
//!
//! | file | job |
//! |---|---|
//! | `mod.rs` | `Snapshot`: the words of all rings, and the texts that their addresses stand for |
//! | `decode.rs` | from words to events, each with the interval of time in which it happened |
//! | `lives.rs` | from events to lives: when a goroutine ran, was runnable, waited, and who woke it |
//! | `turns.rs` | who ran when, on which P |
//! | `wakes.rs` | where in the program wakers were |
//! | `why.rs` | a life in words |
//! | `perfetto.rs` | all of it as a file for Perfetto |
//! | `file.rs` | a snapshot as a file, to be read later or elsewhere |
//! | `watches.rs` | what happens after an incident that was noticed |
//! | `automatic.rs` | files that are written when a program panics, is stuck, or after an incident |

mod automatic;
mod decode;
mod file;
mod lives;
mod perfetto;
mod turns;
mod wakes;
pub(crate) mod watches;
mod why;

pub(crate) use automatic::{record_from_start, write_after_panic, write_automatically};

use super::profile::collector;
use super::snapshot;
use crate::sched::Sched;
use crate::sched::record::{Kind, RecordCopy, Word};
use crate::sys::clock::Nanos;
pub use lives::Times;
pub use watches::WatchError;

use crate::sys::map::Map;
use decode::Trace;
use std::io::{self, Read, Write};
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};
use wakes::Wakes;
use why::Explainer;

/// What was recorded up to one moment. [`trace::snapshot`](crate::trace::snapshot) returns it.
///
/// ```
/// use trefoil::trace::{self, Recorder};
///
/// trefoil::run(|| {
///     let recorder = Recorder::start().unwrap();
///     trefoil::go(|| println!("hello")).join().unwrap();
///     let snapshot = trace::snapshot().unwrap();
///     assert!(snapshot.goroutines().len() >= 2);
///     recorder.stop();
/// });
/// ```
pub struct Snapshot {
    record: RecordCopy,
    /// What addresses in words stand for: a place, or a text of the program. Collected when it is
    /// first asked for, or read from a file.
    texts: OnceLock<Map<u64, Box<str>>>,
    /// The names of goroutines and tasks that were alive, by id.
    names: Map<u64, Box<str>>,
    /// Empty if it was read from a file of version 1 or 2.
    wakes: Wakes,
    /// None if it was read from a file of version 1.
    origin: Option<Origin>,
}

/// Where a recording was made, and until when.
struct Origin {
    pid: u32,
    /// What the wall clock showed, in nanoseconds since 1970.
    taken: u64,
    /// The file name of the program.
    program: Box<str>,
}

impl Origin {
    /// Returns that of a recording that is copied now, in this process, and has ended so many
    /// nanoseconds ago.
    fn here(since_end: u64) -> Origin {
        let end = SystemTime::now() - Duration::from_nanos(since_end);
        let since = end.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let taken = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        Origin { pid: std::process::id(), taken, program: program_name() }
    }
}

/// Returns the file name of this program: as it was called, or as the system knows it.
fn program_name() -> Box<str> {
    let path =
        std::env::args_os().next().map(PathBuf::from).or_else(|| std::env::current_exe().ok());
    let name = path.as_deref().and_then(Path::file_name).unwrap_or_default();
    name.to_string_lossy().into()
}

/// Copies what `sched` has recorded. None if it never recorded, or if another has not finished its
/// copy at `deadline`.
pub(crate) fn snapshot(sched: &Sched, deadline: Nanos) -> Option<Snapshot> {
    let record = sched.copy_record(deadline)?;
    let wakes = Wakes::of(record.waker_samples, deadline);
    let mut names = Map::new();
    snapshot::for_each_name(sched, |id, name| _ = names.insert(id, name.into()));
    let origin = Some(Origin::here(record.since_end));
    Some(Snapshot { record, texts: OnceLock::new(), names, wakes, origin })
}

/// Begins to record `sched`, in rings that together take at most `bytes`. Returns false if a
/// recording is on.
pub(crate) fn start_recording(sched: &Sched, bytes: usize, exact_clock: bool) -> bool {
    let has_begun = sched.start_recording(bytes, exact_clock);
    // The schedule of a simulation must not depend on the time that samples take.
    if has_begun && sched.simulation.is_none() {
        // Without the thread or the memory, the recording says less of wake-ups.
        let _ = collector::begin_wakers(sched);
    }
    has_begun
}

/// Returns what the address in a word of this process stands for.
fn text_of(word: Word) -> Box<str> {
    if word.kind() == Kind::Place {
        // SAFETY: `record::created` has written a reference that is valid for ever, and a word is
        // read as it was written, or not at all.
        let at = unsafe { &*(word.payload() as *const Location<'static>) };
        return format!("{}:{}", at.file(), at.line()).into();
    }
    debug_assert!(word.has_text());
    let (start, len) = (word.payload() as *const u8, usize::from(word.detail()));
    // SAFETY: `record::note` has written the start of a static text, and its length up to the end
    // of a character.
    unsafe { std::str::from_utf8_unchecked(std::slice::from_raw_parts(start, len)) }.into()
}

impl Snapshot {
    /// Returns what the addresses in words stand for.
    fn texts(&self) -> &Map<u64, Box<str>> {
        self.texts.get_or_init(|| {
            let mut texts = Map::new();
            let words = self.record.rings().flat_map(|ring| &ring.words);
            for word in words.filter(|word| word.has_text()) {
                texts.get_or_insert_with(word.text_key(), || text_of(*word));
            }
            texts
        })
    }

    /// Returns the ids of the goroutines and tasks that appear in the recording, in ascending
    /// order.
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder};
    /// trefoil::run(|| {
    ///     let recorder = Recorder::start().unwrap();
    ///     let id = trefoil::go(|| trefoil::id()).join().unwrap();
    ///     let snapshot = trace::snapshot().unwrap();
    ///     assert!(snapshot.goroutines().contains(&id));
    ///     recorder.stop();
    /// });
    /// ```
    pub fn goroutines(&self) -> Vec<u64> {
        let trace = Trace::new(self);
        lives::ids(&trace.lives())
    }

    /// Returns how long a goroutine or task ran, was runnable and waited, as far as it was
    /// recorded. None if it does not appear in the recording.
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder};
    /// trefoil::run(|| {
    ///     let recorder = Recorder::builder().exact_clock(true).start().unwrap();
    ///     let id = trefoil::go(trefoil::id).join().unwrap();
    ///     let times = trace::snapshot().unwrap().times(id).unwrap();
    ///     println!("{:?} running, {:?} runnable", times.running, times.runnable);
    ///     recorder.stop();
    /// });
    /// ```
    pub fn times(&self, goroutine: u64) -> Option<Times> {
        Trace::new(self).lives().get(&goroutine).map(lives::Life::times)
    }

    /// Returns the call in which a goroutine blocked its thread, as [`why::blocked_in`].
    fn blocked_in(&self, id: u64, nanos: Nanos) -> Option<String> {
        Trace::new(self).lives().get(&id).and_then(|life| why::blocked_in(life, nanos))
    }

    /// Says in words what a goroutine or task did: when it ran, its longest wait, who woke it and
    /// where, and behind whom it was queued; and in which call it was longest without a P. None if it
    /// does not appear in the recording.
    ///
    /// Where the waker was is known for most waits of more than a few milliseconds that a goroutine or
    /// task of this runtime has ended: not for those of a simulation, nor if the program's code is
    /// more than 8 KiB up the waker's stack, nor for each of many at once. In the long run it is known for one per
    /// millisecond and P. The last 16,384 of the process are remembered.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use trefoil::trace::{self, Recorder};
    /// trefoil::run(|| {
    ///     let recorder = Recorder::start().unwrap();
    ///     let sleeper = trefoil::go(|| {
    ///         trefoil::time::sleep(Duration::from_millis(3));
    ///         trefoil::id()
    ///     });
    ///     let id = sleeper.join().unwrap();
    ///     let why = trace::snapshot().unwrap().why(id).unwrap();
    ///     assert!(why.starts_with(&format!("goroutine {id}")), "{why}");
    ///     // … 3.1 ms in sleep, woken by a timer
    ///     // A goroutine that had ended the wait would be named, and the line at which it was.
    ///     recorder.stop();
    /// });
    /// ```
    pub fn why(&self, goroutine: u64) -> Option<String> {
        let trace = Trace::new(self);
        why::why(&Explainer::new(&trace, &trace.lives()), goroutine)
    }

    /// Returns a goroutine's kind, id, name, and where it was started, as far as they are known.
    fn describe(&self, id: u64) -> String {
        let trace = Trace::new(self);
        why::title(&trace, trace.creation(id), id)
    }

    /// As [`why`](Snapshot::why), for every goroutine and task, in the order of their ids.
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder};
    /// trefoil::run(|| {
    ///     let recorder = Recorder::start().unwrap();
    ///     trefoil::go(|| ()).join().unwrap();
    ///     for (id, text) in trace::snapshot().unwrap().why_all() {
    ///         assert!(text.starts_with(&format!("goroutine {id}")));
    ///     }
    ///     recorder.stop();
    /// });
    /// ```
    pub fn why_all(&self) -> Vec<(u64, String)> {
        let trace = Trace::new(self);
        let lives = trace.lives();
        let explainer = Explainer::new(&trace, &lives);
        let text = |id| why::why(&explainer, id).map(|text| (id, text));
        lives::ids(&lives).into_iter().filter_map(text).collect()
    }

    /// Returns the id of the process that was recorded. None if it was read from a file of the
    /// first version, which does not say it.
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder};
    /// trefoil::run(|| {
    ///     let _recorder = Recorder::start().unwrap();
    ///     assert_eq!(trace::snapshot().unwrap().pid(), Some(std::process::id()));
    /// });
    /// ```
    pub fn pid(&self) -> Option<u32> {
        self.origin.as_ref().map(|origin| origin.pid)
    }

    /// Returns the file name of the program that was recorded, without its folder. None as for
    /// [`pid`](Snapshot::pid).
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder};
    /// trefoil::run(|| {
    ///     let _recorder = Recorder::start().unwrap();
    ///     println!("a recording of {}", trace::snapshot().unwrap().program().unwrap());
    /// });
    /// ```
    pub fn program(&self) -> Option<&str> {
        self.origin.as_ref().map(|origin| &*origin.program)
    }

    /// Returns what the wall clock showed when the snapshot was made. None as for
    /// [`pid`](Snapshot::pid).
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder};
    /// trefoil::run(|| {
    ///     let _recorder = Recorder::start().unwrap();
    ///     let taken = trace::snapshot().unwrap().taken_at().unwrap();
    ///     assert!(taken <= std::time::SystemTime::now());
    /// });
    /// ```
    pub fn taken_at(&self) -> Option<SystemTime> {
        let origin = self.origin.as_ref()?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_nanos(origin.taken))
    }

    /// Returns how long was recorded until the snapshot was made. The rings may hold less.
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder};
    /// trefoil::run(|| {
    ///     let _recorder = Recorder::start().unwrap();
    ///     println!("recorded for {:?}", trace::snapshot().unwrap().recorded_for());
    /// });
    /// ```
    pub fn recorded_for(&self) -> Duration {
        Duration::from_nanos(self.record.copied)
    }

    /// Writes the recording for [Perfetto](https://ui.perfetto.dev): a track per P with what ran
    /// there, arrows from each goroutine to those that it woke, the states of the 100 goroutines
    /// that waited longest, and regions.
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder};
    /// # fn main() -> std::io::Result<()> {
    /// # trefoil::run(|| {
    /// let recorder = Recorder::start().unwrap();
    /// trefoil::go(|| ()).join().unwrap();
    /// let mut file = Vec::new(); // or std::fs::File::create("trace.pftrace")?
    /// trace::snapshot().unwrap().write_perfetto(&mut file)?;
    /// assert!(!file.is_empty());
    /// recorder.stop();
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn write_perfetto(&self, mut to: impl Write) -> io::Result<()> {
        to.write_all(&perfetto::encode(&Trace::new(self)))
    }

    /// Writes the recording in a form that [`Snapshot::read`] and the command `trefoil trace` read.
    ///
    /// ```
    /// # use trefoil::trace::{self, Recorder, Snapshot};
    /// # fn main() -> std::io::Result<()> {
    /// # trefoil::run(|| {
    /// let recorder = Recorder::start().unwrap();
    /// trefoil::go(|| ()).join().unwrap();
    /// let snapshot = trace::snapshot().unwrap();
    /// let mut file = Vec::new(); // or std::fs::File::create("program.trefoil")?
    /// snapshot.write(&mut file)?;
    /// assert_eq!(Snapshot::read(&file[..])?.goroutines(), snapshot.goroutines());
    /// recorder.stop();
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    pub fn write(&self, to: impl Write) -> io::Result<()> {
        file::write(self, to, |_| ())
    }

    /// Reads what [`Snapshot::write`] has written.
    ///
    /// ```
    /// use trefoil::trace::Snapshot;
    ///
    /// let error = Snapshot::read(&b"something else"[..]).err().unwrap();
    /// assert_eq!(error.to_string(), "not a trace of trefoil");
    /// ```
    ///
    /// # Errors
    /// An error of `from`, or [`io::ErrorKind::InvalidData`] if it is not such a file.
    pub fn read(from: impl Read) -> io::Result<Snapshot> {
        file::read(from)
    }
}
