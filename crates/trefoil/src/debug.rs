//! Inspects the runtime from inside the program: counters, a dump of every goroutine, and a profile
//! of where goroutines stand.
//!
//! | function | answers | cost |
//! |---|---|---|
//! | [`stats`] | How many threads, goroutines, steals and preemptions are there? | reads counters |
//! | [`metrics`] | How long do goroutines, timers and descriptors wait for a thread? | reads counters |
//! | [`dump`] | What does each goroutine wait for, and where? | reads every stack |
//! | [`profile`] | How many goroutines stand at the same place? | reads every stack |
//! | [`usage`] | Who uses the CPUs, and who waits for them? | reads a table |
//! | [`goroutines`] | Which goroutines and tasks are there, in which state? | reads every G |
//! | [`groups`] | How many stand at the same place, and for how long? | reads every G, and a stack per group |
//! | [`deadlocks`] | Which goroutines wait for each other? | reads every G, and every stack if goroutines wait for channels |
//!
//! None of them stops a goroutine. From outside the program, SIGQUIT prints the dump and ends the
//! process, and `TREFOIL_DEBUG=schedtrace=1000` prints a line about the scheduler every second.
//!
//! ```
//! trefoil::run(|| {
//!     let stats = trefoil::debug::stats();
//!     println!("{} goroutines on {} threads", stats.goroutines, stats.threads);
//!     println!("{}", trefoil::debug::dump());
//! });
//! ```

use crate::mem;
use crate::runtime::with_sched;
use crate::sched::p_snapshot::PSnapshot;
use crate::sys::sort::sort_by_key;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub use crate::observe::metrics::Histogram;
pub use crate::observe::pprof::Profile;
pub use crate::observe::waits::list::GoroutineGroup;
pub use crate::observe::waits::report::{
    Deadlock, DeadlockMember, Goroutine, GoroutineName, Kind, Place, WaitsFor,
};

/// Counters of a runtime: what the scheduler has done so far, and what it holds. [`stats`] returns
/// it.
///
/// The fields are read one after the other while goroutines run, so they need not belong to the
/// same moment. Fields may be added in later versions.
///
/// ```
/// trefoil::run(|| {
///     let stats = trefoil::debug::stats();
///     let queued: usize = stats.procs.iter().map(|p| p.queue).sum();
///     assert_eq!(queued + stats.global_queue, 0); // Only main is alive, and it runs.
///     assert!(stats.threads >= 1);
/// });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// One entry for each P that was ever made. The number of entries never shrinks.
    pub procs: Vec<ProcStats>,
    /// OS threads that run goroutines, idle threads included. The runtime has two more threads,
    /// which run no goroutines: sysmon, which watches the others, and a helper thread, which may
    /// block.
    pub threads: usize,
    /// Threads among these whose goroutine has no P, because it blocks in a call or has just
    /// returned from it.
    pub threads_without_p: usize,
    /// Goroutines that are alive.
    pub goroutines: usize,
    /// [Tasks](crate::task) that are alive.
    pub tasks: usize,
    /// Goroutines that poll tasks, not counted in `goroutines`. There are more of them than a few
    /// per P if polls block.
    pub carriers: usize,
    /// How many carriers were ever started.
    pub carriers_started: u64,
    /// Goroutines, and plain threads that this runtime serves, that wait for a file descriptor.
    pub io_waiters: usize,
    /// Goroutines that are runnable and wait in a global queue, not in that of a P.
    pub global_queue: usize,
    /// Address space that is reserved for stacks in this process, in bytes. Only touched pages take
    /// memory.
    pub stack_bytes_mapped: usize,
    /// Stacks in use in this process, including the free stacks that Ps keep ready.
    pub stacks_live: usize,
    /// Free stacks in the process-wide pool.
    pub stacks_pooled: usize,
    /// How many times a goroutine was preempted by a signal.
    pub preemptions: u64,
    /// Signals that were sent to preempt. Some arrive when the goroutine cannot be stopped.
    pub preempt_signals: u64,
    /// How many times a P was taken from a thread that blocked.
    pub retakes: u64,
}

/// Counters of one P, in [`Stats::procs`].
///
/// Use them to find an imbalance: a P with a long `queue` beside idle Ps, or many `overflows`.
///
/// ```
/// let rt = trefoil::Runtime::builder().procs(1).build().unwrap();
/// rt.run(|| {
///     trefoil::go(|| ()).join().unwrap();
///     let p = &trefoil::debug::stats().procs[0];
///     assert_eq!((p.spawned, p.steals), (1, 0));
/// });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcStats {
    /// `idle`, `running`, or `retired` if a smaller [`set_procs`](crate::set_procs) has removed the
    /// P.
    pub status: &'static str,
    /// How many time slices have begun on this P. The counter wraps around at 2^32.
    pub ticks: u64,
    /// Goroutines that wait in the P's queue.
    pub queue: usize,
    /// Goroutines that goroutines on this P have started. A goroutine that a plain thread has
    /// started is not in the count of any P.
    pub spawned: u64,
    /// Goroutines that ended on this P.
    pub ended: u64,
    /// How many times this P stole from another P.
    pub steals: u64,
    /// How many goroutines this P stole.
    pub stolen: u64,
    /// How many times the P's queue was full and half of it moved to the global queue.
    pub overflows: u64,
}

/// Returns the counters of the caller's runtime, or of the default runtime on a plain thread.
///
/// It reads counters and stops no goroutine, so it is cheap enough to call every second for a
/// metrics system.
///
/// ```
/// trefoil::run(|| {
///     trefoil::go(|| ()).join().unwrap();
///     let stats = trefoil::debug::stats();
///     assert_eq!(stats.goroutines, 1);
///     assert_eq!(stats.procs.iter().map(|p| p.ended).sum::<u64>(), 1);
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn stats() -> Stats {
    let memory = mem::stats();
    with_sched(|sched| Stats {
        procs: sched.p_snapshots().into_iter().map(proc_stats).collect(),
        threads: sched.threads() as usize,
        goroutines: sched.num_goroutines() as usize,
        tasks: sched.num_tasks() as usize,
        carriers: sched.tasks.carriers() as usize,
        carriers_started: sched.tasks.carriers_started(),
        io_waiters: sched.poller.waiters(),
        global_queue: sched.global_len.load(Ordering::Relaxed) as usize,
        stack_bytes_mapped: memory.mapped_bytes,
        stacks_live: memory.live,
        stacks_pooled: memory.pooled,
        threads_without_p: sched.ms_without_p.load(Ordering::Relaxed) as usize,
        preemptions: sched.preemptions.load(Ordering::Relaxed),
        preempt_signals: sched.signals.load(Ordering::Relaxed),
        retakes: sched.retakes.load(Ordering::Relaxed),
    })
}

fn proc_stats(p: PSnapshot) -> ProcStats {
    ProcStats {
        status: p.status_text(),
        ticks: p.ticks.into(),
        queue: p.queued,
        spawned: p.spawned,
        ended: p.ended,
        steals: p.steals,
        stolen: p.stolen,
        overflows: p.overflows,
    }
}

/// The counters of a runtime, and how long things have waited in it. [`metrics`] returns it.
///
/// The four [`Histogram`]s are always on and count from the start of the runtime. Fields may be
/// added in later versions.
///
/// ```
/// trefoil::run(|| {
///     let metrics = trefoil::debug::metrics();
///     let p99 = metrics.scheduling.quantile(0.99);
///     println!("{} goroutines, p99 {p99:?}", metrics.stats.goroutines);
/// });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Metrics {
    /// The counters.
    pub stats: Stats,
    /// How long ago the runtime was started.
    pub uptime: Duration,
    /// Threads that search for a goroutine to run.
    pub spinning_threads: usize,
    /// Threads that sleep and wait for work.
    pub idle_threads: usize,
    /// The time from the start or wake-up of a goroutine until it runs. It is sampled: at most one
    /// goroutine per P in 20 µs, and in a busy program one in 2 ms. Tasks are not timed.
    pub scheduling: Histogram,
    /// How long after its time a timer has fired.
    pub timers: Histogram,
    /// When a poll has found descriptors that are ready: how long before it the same poller was
    /// last asked, so that they were not ready for longer. A thread that sleeps in the poller
    /// notices them at once, and is not counted.
    pub poll: Histogram,
    /// How long threads were without a P because their goroutine was in a call that blocks: from
    /// the time when sysmon noticed it, or [`blocking`](crate::blocking) announced it, until the
    /// goroutine called the runtime again.
    pub kernel: Histogram,
}

/// Returns the counters and the latencies of the caller's runtime, or of the default runtime on a
/// plain thread. It stops no goroutine.
///
/// ```
/// use std::time::Duration;
///
/// trefoil::run(|| {
///     for _ in 0..10 {
///         trefoil::time::sleep(Duration::from_millis(1));
///     }
///     let metrics = trefoil::debug::metrics();
///     assert!(metrics.timers.count() > 0);
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn metrics() -> Metrics {
    let stats = stats();
    with_sched(|sched| {
        let latencies = crate::observe::metrics::latencies(sched);
        Metrics {
            stats,
            uptime: sched.started.elapsed(),
            spinning_threads: sched.idle.spinning() as usize,
            idle_threads: sched.spares.load(Ordering::Relaxed) as usize,
            scheduling: latencies.scheduling,
            timers: latencies.timers,
            poll: latencies.poll,
            kernel: latencies.kernel,
        }
    })
}

/// Returns every goroutine and task of the caller's runtime as text, in Go's form: id, name, state,
/// how long it has waited, its stack, and where it was created. On a plain thread it is the default
/// runtime.
///
/// Use it to find out what a program waits for. No goroutine is stopped, so a goroutine that runs
/// on another thread at that time has no stack in the text.
///
/// ```
/// trefoil::run(|| {
///     let text = trefoil::debug::dump();
///     assert!(text.starts_with("goroutine 1 \"main\" [running]:"));
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn dump() -> String {
    with_sched(crate::observe::dump::dump)
}

/// Counts the goroutines and tasks of the caller's runtime by stack, like Go's goroutine profile.
/// On a plain thread it is the default runtime.
///
/// It has the goroutines of a [`dump`], grouped by stack, so it is short even for a million
/// goroutines. No goroutine is stopped: a goroutine that runs on another thread at that time, or
/// has not begun to run, is counted at the closure that it was started with.
///
/// [`Profile::folded`] returns text for flame graphs, and [`Profile::write_pprof`] writes a file
/// for `go tool pprof`.
///
/// ```
/// use std::time::Duration;
/// use trefoil::time::sleep;
///
/// fn serve() {
///     sleep(Duration::from_secs(3600));
/// }
///
/// trefoil::run(|| {
///     for _ in 0..1000 {
///         trefoil::go(serve);
///     }
///     sleep(Duration::from_millis(50)); // The goroutines begin to wait.
///     let profile = trefoil::debug::profile();
///     assert_eq!(profile.goroutines(), 1001);
///     print!("{}", profile.folded()); // …serve;trefoil::time::sleep 1000
///     let mut file = Vec::new(); // or std::fs::File::create("goroutines.pb")?
///     profile.write_pprof(&mut file).unwrap();
///     assert!(!file.is_empty());
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn profile() -> Profile {
    with_sched(crate::observe::profile::goroutines)
}

/// Returns the goroutines and tasks of the caller's runtime, the caller first, then by id. On a
/// plain thread it is the default runtime.
///
/// They are read one after the other while they run, so they need not belong to the same moment. No
/// stack is read.
///
/// ```
/// trefoil::run(|| {
///     let waiter = trefoil::Builder::new().name("waiter").go(|| {
///         trefoil::time::sleep(std::time::Duration::from_secs(3600))
///     }).unwrap();
///     let found = trefoil::debug::goroutines().find(|g| g.who.id == waiter.id()).unwrap();
///     assert_eq!(found.who.name.as_deref(), Some("waiter"));
///     println!("{} is {}, created at {}", found.who, found.state, found.created_at);
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn goroutines() -> impl Iterator<Item = Goroutine> {
    with_sched(crate::observe::waits::list::goroutines).into_iter()
}

/// Returns the goroutines and tasks of the caller's runtime in groups of those that run the same
/// closure, were created at the same place, are in the same state and wait at the same place; the
/// largest group first. On a plain thread it is the default runtime.
///
/// A group that only grows from call to call is a suspect: its goroutines probably never end. One
/// stack is read per group, not per goroutine, so a million goroutines take a tenth of a second.
/// Goroutines whose stacks have the same size are taken to wait at the same place.
///
/// ```
/// trefoil::run(|| {
///     for group in trefoil::debug::groups() {
///         println!("{group}"); // 1000 [chan receive] created at src/main.rs:12, waiting at …
///     }
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn groups() -> Vec<GoroutineGroup> {
    with_sched(crate::observe::waits::list::groups)
}

/// Returns the sets of goroutines and tasks of the caller's runtime that wait for each other. On a
/// plain thread it is the default runtime.
///
/// A deadlock is *certain* if it is a cycle of waits for `Mutex`, `RwLock`, `Once`, `join` and
/// `scope`, without a deadline: each member waits for something that the next one holds, so none
/// ever continues, whatever the rest of the program does. The runtime also
/// [reports](crate::RuntimeBuilder::report_deadlocks) those by itself. Other deadlocks are
/// *probable*.
///
/// A guard that was sent to another goroutine may be dropped there, although the goroutine that
/// locked waits; so may a guard in a future that another executor polls. After the runtime has seen
/// a goroutine unlock what another has locked, it calls no cycle over locks certain any more. The
/// readers of a `RwLock` are only counted, so a cycle over readers is not found.
///
/// ```
/// use trefoil::sync::Mutex;
/// static M: Mutex<()> = Mutex::new(());
/// trefoil::run(|| {
///     assert!(trefoil::debug::deadlocks().is_empty());
///     let stuck = trefoil::go(|| {
///         let _first = M.lock();
///         let _second = M.lock(); // waits for itself
///     });
///     let deadlock = loop {
///         match trefoil::debug::deadlocks().pop() {
///             Some(deadlock) => break deadlock,
///             None => trefoil::yield_now(),
///         }
///     };
///     assert!(deadlock.certain);
///     assert_eq!(deadlock.members[0].goroutine.who.id, stuck.id());
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn deadlocks() -> Vec<Deadlock> {
    with_sched(crate::observe::waits::deadlocks)
}

/// Calls `f`, then panics if goroutines or tasks are left: `#[trefoil::test(leaks = "deny")]`.
#[doc(hidden)]
#[track_caller]
pub fn deny_leaks<T>(f: impl FnOnce() -> T) -> T {
    let result = f();
    if let Some(message) = with_sched(crate::observe::waits::leaks::find) {
        panic!("{message}");
    }
    result
}

/// How much CPU time a goroutine or task has used, and how long it was runnable without running:
/// an estimate. [`usage`] returns it.
///
/// ```
/// trefoil::run(|| {
///     for used in trefoil::debug::usage().iter().take(10) {
///         println!("{}: {:?} running, {:?} runnable", used.id, used.running, used.runnable);
///     }
/// });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// The goroutine or task. It may have ended.
    pub id: u64,
    /// The time for which it ran on a P.
    pub running: Duration,
    /// The time for which it was in a run queue.
    pub runnable: Duration,
}

/// Returns the goroutines and tasks that used the CPUs of the caller's runtime most, or of the
/// default runtime on a plain thread, in descending order.
///
/// The times are an estimate, from samples that are taken about every millisecond while goroutines
/// run: good for goroutines that use much, zero or nothing for those that use little. The table has
/// room for 2,048 goroutines and tasks. Those that used least are replaced first, so some of those
/// that matter have ended. For exact times of a short while, record it with
/// [`exact_clock`](crate::trace::RecorderBuilder::exact_clock) and call
/// [`Snapshot::times`](crate::trace::Snapshot::times).
///
/// ```
/// use std::time::{Duration, Instant};
///
/// trefoil::run(|| {
///     let begin = Instant::now();
///     while begin.elapsed() < Duration::from_millis(200) {}
///     let usage = trefoil::debug::usage();
///     let mine = usage.iter().find(|used| used.id == trefoil::id());
///     assert!(mine.is_some_and(|mine| mine.running > Duration::from_millis(20)), "{usage:?}");
/// });
/// ```
///
/// # Panics
/// Panics on a plain thread if the default runtime cannot start.
pub fn usage() -> Vec<Usage> {
    let nanos = Duration::from_nanos;
    let mut all: Vec<Usage> = with_sched(|sched| sched.usage.all())
        .into_iter()
        .map(|(id, used)| Usage {
            id,
            running: nanos(used.running),
            runnable: nanos(used.runnable),
        })
        .collect();
    sort_by_key(&mut all, |used| std::cmp::Reverse((used.running, used.runnable)));
    all
}
