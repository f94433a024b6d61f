//! The public types of the wait-for graph, and their text.

use super::super::snapshot::{self, Subject};
use super::super::symbols::SymbolCache;
use super::super::unwind::Tables;
use super::{Cycle, Graph, Party, Wait};
use crate::sched::Sched;
use crate::sched::g::Status;
use crate::sched::wait::reason::WaitReason;
use std::fmt;
use std::panic::Location;
use std::time::Duration;
use trefoil_base::symbols::Frame;

/// Bytes of a name that are copied at most.
const NAME_BYTES_MAX: usize = 256;

/// Goroutines of a scope that a text names at most.
const SCOPE_NAMED_MAX: usize = 8;

/// Whether a [`GoroutineName`] or a [`Goroutine`] stands for a goroutine or for a task.
///
/// ```
/// trefoil::run(|| {
///     let kind = trefoil::debug::goroutines().next().unwrap().kind;
///     assert_eq!(kind, trefoil::debug::Kind::Goroutine);
///     assert_eq!(kind.to_string(), "goroutine");
/// });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Kind {
    /// Started by [`go`](crate::go).
    Goroutine,
    /// Started by [`task::spawn`](crate::task::spawn).
    Task,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Goroutine => "goroutine",
            Kind::Task => "task",
        })
    }
}

/// The id and the name of a goroutine or task.
///
/// ```
/// let rt = trefoil::Runtime::builder().build().unwrap();
/// rt.run(|| {
///     let who = trefoil::debug::goroutines().next().unwrap().who;
///     assert_eq!((who.id, who.name.as_deref()), (1, Some("main")));
///     assert_eq!(who.to_string(), "goroutine 1 \"main\"");
/// });
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct GoroutineName {
    /// A goroutine or a task.
    pub kind: Kind,
    /// The id, unique in its runtime.
    pub id: u64,
    /// The name that the program gave it.
    pub name: Option<String>,
}

impl fmt::Display for GoroutineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.id)?;
        match &self.name {
            Some(name) => write!(f, " {name:?}"),
            None => Ok(()),
        }
    }
}

/// What a goroutine waits for, and which goroutine must continue before it can.
///
/// ```
/// use trefoil::sync::Mutex;
/// static M: Mutex<()> = Mutex::new(());
/// trefoil::run(|| {
///     let guard = M.lock();
///     let waiter = trefoil::go(|| drop(M.lock()));
///     let waits_for = loop {
///         let found = trefoil::debug::goroutines().find(|g| g.who.id == waiter.id());
///         match found.and_then(|g| g.waits_for) {
///             Some(waits_for) => break waits_for,
///             None => trefoil::yield_now(),
///         }
///     };
///     assert_eq!(waits_for.what, "Mutex");
///     assert_eq!(waits_for.holders[0].id, trefoil::id());
///     drop(guard);
///     waiter.join().unwrap();
/// });
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct WaitsFor {
    /// `Mutex`, `RwLock (read)`, `RwLock (write)`, `readers of RwLock`, `Once`, `join`, `scope` or
    /// `pthread mutex`. In a probable [`Deadlock`] also `channel (receive)`, `channel (send)` or
    /// `std lock`.
    pub what: &'static str,
    /// The address of the lock. A join has the address of no use to the program.
    pub address: usize,
    /// The goroutine or task that holds the lock, runs the initializer or is joined, or the
    /// goroutines of the scope. Empty if unknown: readers are only counted, and a plain thread may
    /// hold a lock. For a channel, a std lock and readers they are guessed from what is on stacks.
    pub holders: Vec<GoroutineName>,
    /// The wait ends at a deadline.
    pub has_deadline: bool,
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, holder) = (self.address, self.holders.first());
        let verb = match self.what {
            "join" => {
                return match holder {
                    Some(joined) => write!(f, "joins {joined}"),
                    None => f.write_str("joins a goroutine that has ended"),
                };
            }
            "scope" => {
                write!(f, "waits for {} goroutines of its scope", self.holders.len())?;
                for (i, who) in self.holders.iter().take(SCOPE_NAMED_MAX).enumerate() {
                    write!(f, "{} {who}", if i == 0 { ":" } else { "," })?;
                }
                return if self.holders.len() > SCOPE_NAMED_MAX {
                    f.write_str(", …")
                } else {
                    Ok(())
                };
            }
            "Once" => "run",
            "channel (receive)" | "channel (send)" => "also used",
            "std lock" | "readers of RwLock" => "probably held",
            _ => "held",
        };
        write!(f, "waits for {} {address:#x}", self.what)?;
        match holder {
            Some(holder) => write!(f, " {verb} by {holder}")?,
            None => f.write_str(" (holder unknown)")?,
        }
        if self.has_deadline { f.write_str(", with a deadline") } else { Ok(()) }
    }
}

/// A goroutine or task at one moment, as [`goroutines`](crate::debug::goroutines) returns it.
///
/// ```
/// let rt = trefoil::Runtime::builder().build().unwrap();
/// rt.run(|| {
///     let main = trefoil::debug::goroutines().next().unwrap();
///     assert_eq!((main.who.id, main.state), (1, "running"));
///     assert!(main.waited.is_none() && main.waits_for.is_none());
/// });
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Goroutine {
    /// A goroutine or a task; the same as `who.kind`.
    pub kind: Kind,
    /// Its id and name.
    pub who: GoroutineName,
    /// `running`, `runnable`, or why it waits, in Go's words: `chan receive`, `sync.Mutex.Lock`, …
    pub state: &'static str,
    /// How long it has waited, to about ten milliseconds. `None` if it does not wait.
    pub waited: Option<Duration>,
    /// What it waits for, if that is a lock, a goroutine or a scope.
    pub waits_for: Option<WaitsFor>,
    /// Where it was started.
    pub created_at: &'static Location<'static>,
    /// The id of the goroutine that started it. `None` if it was started outside the runtime, and
    /// for tasks.
    pub created_by: Option<u64>,
    /// The name of the type of its closure or future.
    pub function: &'static str,
    /// The time for which it ran on a P: an estimate, as that of [`usage`](crate::debug::usage).
    pub running: Duration,
    /// The time for which it was in a run queue: an estimate.
    pub runnable: Duration,
    /// Its [labels](mod@crate::labels), sorted by key.
    pub labels: Vec<(String, String)>,
}

impl Goroutine {
    /// Reads a goroutine. Returns None if it has ended.
    pub(super) fn read(
        graph: &Graph,
        sched: &Sched,
        id: u64,
        subject: Subject,
    ) -> Option<Goroutine> {
        let status = subject.status();
        let (function, created_at) = subject.origin();
        let who = name_of(subject, id);
        let created_by = match subject {
            Subject::Goroutine(g) => Some(g.parent()).filter(|&parent| parent != 0),
            Subject::Task { .. } => None,
        };
        let waits = matches!(status, Status::Waiting(_));
        let waited =
            waits.then(|| Duration::from_millis(sched.millis_waited(subject.head()).into()));
        let waits_for = graph.wait_of_id(sched, id).filter(|_| waits).map(waits_for);
        let labels = subject.labels();
        let labels = labels.as_deref().unwrap_or_default().iter();
        let labels = labels.map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let used = sched.usage.of(id);
        if status == Status::Dead || !subject.is_still(id, sched) {
            return None;
        }
        let state = snapshot::text_of(status);
        let kind = who.kind;
        Some(Goroutine {
            kind,
            who,
            state,
            waited,
            waits_for,
            created_at,
            created_by,
            function,
            running: Duration::from_nanos(used.running),
            runnable: Duration::from_nanos(used.runnable),
            labels,
        })
    }
}

/// A place in the source.
///
/// ```
/// trefoil::run(|| {
///     // The caller runs, so it waits nowhere.
///     assert!(trefoil::debug::groups()[0].waits_at.is_none());
/// });
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub struct Place {
    /// The function.
    pub function: String,
    /// The file; empty if unknown.
    pub file: String,
    /// The line; 0 if unknown.
    pub line: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.function),
            line => write!(f, "{} ({}:{line})", self.function, self.file),
        }
    }
}

/// Goroutines that wait for each other, returned by [`deadlocks`](crate::debug::deadlocks).
///
/// ```
/// trefoil::run(|| {
///     for deadlock in trefoil::debug::deadlocks() {
///         eprintln!("{deadlock}");
///     }
/// });
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Deadlock {
    /// True if the members can never continue. False if that is only probable: a wait has a
    /// deadline, a holder is only guessed, or a guard may be with another goroutine.
    pub certain: bool,
    /// The members. In a certain deadlock each waits for the next, and the last for the first.
    pub members: Vec<DeadlockMember>,
}

/// A goroutine or task in a [`Deadlock`].
///
/// ```
/// trefoil::run(|| {
///     for member in trefoil::debug::deadlocks().iter().flat_map(|d| &d.members) {
///         println!("{}: {}", member.goroutine.who, member.goroutine.state);
///     }
/// });
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeadlockMember {
    /// What it is, and what it waits for.
    pub goroutine: Goroutine,
    /// Where it waits.
    pub waits_at: Option<Place>,
    /// The address of its runtime, only to be compared: ids of two runtimes may be equal.
    pub(crate) runtime: usize,
}

impl fmt::Display for Deadlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.members.len();
        let certainty = if self.certain { "certain" } else { "probable" };
        match (number, self.certain) {
            (1, true) => writeln!(f, "deadlock ({certainty}): a goroutine waits for itself")?,
            (1, false) => writeln!(f, "deadlock ({certainty}): a goroutine waits for ever")?,
            _ => writeln!(f, "deadlock ({certainty}): {number} goroutines wait for each other")?,
        }
        for member in &self.members {
            let goroutine = &member.goroutine;
            write!(f, "  {} ", goroutine.who)?;
            match &goroutine.waits_for {
                Some(waits_for) => write!(f, "{waits_for}")?,
                None => write!(f, "waits: {}", goroutine.state)?,
            }
            if let Some(waited) = goroutine.waited {
                write!(f, ", for {:.1} s", waited.as_secs_f64())?;
            }
            if let Some(place) = &member.waits_at {
                write!(f, "\n    at {place}")?;
            }
            let place = goroutine.created_at;
            writeln!(f, "\n    created at {}:{}", place.file(), place.line())?;
        }
        Ok(())
    }
}

/// Returns the id and the name of a goroutine or task.
pub(super) fn name_of(subject: Subject, id: u64) -> GoroutineName {
    let mut buffer = [0; NAME_BYTES_MAX];
    let name = subject
        .copy_name(&mut buffer)
        .map(|len| String::from_utf8_lossy(&buffer[..len]).into_owned());
    let kind = match subject {
        Subject::Goroutine(_) => Kind::Goroutine,
        Subject::Task { .. } => Kind::Task,
    };
    GoroutineName { kind, id, name }
}

/// Returns the public form of a wait.
pub(in super::super) fn waits_for(wait: &Wait) -> WaitsFor {
    let what = match wait.reason {
        WaitReason::MutexLock => "Mutex",
        WaitReason::RwLockRead => "RwLock (read)",
        WaitReason::RwLockWrite if wait.is_for_readers() => "readers of RwLock",
        WaitReason::RwLockWrite => "RwLock (write)",
        WaitReason::Once => "Once",
        WaitReason::Join => "join",
        WaitReason::PthreadMutex => "pthread mutex",
        _ => "scope",
    };
    let name = |party: &Party| name_of(party.subject, party.id);
    WaitsFor {
        what,
        address: wait.address(),
        holders: wait.holders.iter().map(name).collect(),
        has_deadline: wait.has_deadline(),
    }
}

/// Finds the places where suspended goroutines wait.
pub(in super::super) struct Places {
    tables: Tables,
    symbols: SymbolCache,
}

impl Places {
    pub(in super::super) fn new() -> Places {
        Places { tables: Tables::load(), symbols: SymbolCache::default() }
    }

    /// Returns the innermost frame of the program's own code. Returns None if the goroutine runs,
    /// or has no stack.
    pub(super) fn of(&mut self, subject: Subject) -> Option<Place> {
        let addresses = self.tables.frames(subject.g()?)?;
        let frames = self.symbols.frames(&addresses);
        let own = frames.iter().find(|frame| is_of_program(frame)).or(frames.first())?;
        let Frame { name, file, line } = (**own).clone();
        Some(Place { function: name, file, line })
    }
}

/// Returns whether a frame is neither of this crate, nor of std or `lock_api`.
fn is_of_program(frame: &Frame) -> bool {
    let here = file!().strip_suffix("observe/waits/report.rs").unwrap_or("trefoil/src/");
    !frame.file.contains(here)
        && !frame.file.contains("/lock_api-")
        && !frame.file.contains("/rustc/")
        && !frame.file.contains("/library/")
}

impl Graph {
    /// Returns the public form of a confirmed cycle, or None if a member has ended.
    pub(in super::super) fn deadlock(
        &self,
        cycle: &Cycle,
        places: &mut Places,
    ) -> Option<Deadlock> {
        let member = |&i: &usize| self.member(self.waits[i].party, places);
        let members: Option<Vec<_>> = cycle.iter().map(member).collect();
        Some(Deadlock { certain: self.is_certain(cycle), members: members? })
    }

    /// Returns a party as a member of a deadlock.
    pub(super) fn member(&self, party: Party, places: &mut Places) -> Option<DeadlockMember> {
        let sched = self.sched(party);
        let goroutine = Goroutine::read(self, sched, party.id, party.subject)?;
        let runtime = std::ptr::from_ref(sched).addr();
        Some(DeadlockMember { goroutine, waits_at: places.of(party.subject), runtime })
    }
}
