//! Looking into the runtime from inside the program: numbers, a dump of every goroutine, a profile of all.

use crate::mem;
use crate::runtime::with_sched;
use crate::sched::p::{P, PStatus};
use std::sync::atomic::{AtomicU64, Ordering};

pub use crate::observe::pprof::Profile;

/// What the scheduler has done so far, and what it holds. See [`stats`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// One entry for each P that was ever made; their number never shrinks.
    pub procs: Vec<ProcStats>,
    /// OS threads that run goroutines, idle ones included. The runtime has two more, without goroutines: sysmon,
    /// which watches the others, and the aide, which does what may wait.
    pub threads: usize,
    /// Of those, threads whose goroutine runs without a P: they block in some call, or just came back.
    pub threads_without_p: usize,
    /// Goroutines alive.
    pub goroutines: usize,
    /// Goroutines, and plain threads served by this runtime, that wait for a descriptor.
    pub io_waiters: usize,
    /// Goroutines waiting in the global queue.
    pub global_queue: usize,
    /// Address space set aside for stacks in this process, in bytes. Only what was touched is memory.
    pub stack_bytes_mapped: usize,
    /// Stacks in use in this process, those kept ready by a P included.
    pub stacks_live: usize,
    /// Stacks kept for reuse in the process-wide pool.
    pub stacks_pooled: usize,
    /// Goroutines stopped by a signal.
    pub preemptions: u64,
    /// Signals sent for that; some come when the goroutine cannot be stopped.
    pub preempt_signals: u64,
    /// Ps taken from threads that blocked.
    pub retakes: u64,
}

/// One P's part of [`Stats`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProcStats {
    /// `idle`, `running`, or `retired` by a smaller `set_procs`.
    pub status: &'static str,
    /// Time slices begun.
    pub ticks: u64,
    /// Goroutines waiting in its queue.
    pub queue: usize,
    /// Goroutines started from here.
    pub spawned: u64,
    /// Goroutines that ended here.
    pub ended: u64,
    /// Times it stole from another P.
    pub steals: u64,
    /// Goroutines that it stole.
    pub stolen: u64,
    /// Times its queue was full and half of it went to the global queue.
    pub overflows: u64,
}

/// Numbers of the runtime that the caller is in. Cheap: it reads counters, and stops nobody.
///
/// ```
/// trefoil::run(|| {
///     trefoil::go(|| ()).join().unwrap();
///     let stats = trefoil::debug::stats();
///     assert_eq!(stats.goroutines, 1);
///     assert_eq!(stats.procs.iter().map(|p| p.ended).sum::<u64>(), 1);
/// });
/// ```
pub fn stats() -> Stats {
    let memory = mem::stats();
    with_sched(|sched| Stats {
        procs: sched.all_ps().map(proc_stats).collect(),
        threads: sched.threads() as usize,
        goroutines: sched.num_goroutines() as usize,
        io_waiters: sched.poller.waiters(),
        global_queue: sched.global_len.load(Ordering::Relaxed) as usize,
        stack_bytes_mapped: memory.mapped_bytes,
        stacks_live: memory.live,
        stacks_pooled: memory.pooled,
        threads_without_p: sched.astray.load(Ordering::Relaxed) as usize,
        preemptions: sched.preemptions.load(Ordering::Relaxed),
        preempt_signals: sched.signals.load(Ordering::Relaxed),
        retakes: sched.retakes.load(Ordering::Relaxed),
    })
}

fn proc_stats(p: &P) -> ProcStats {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    ProcStats {
        status: match p.status() {
            PStatus::Idle => "idle",
            PStatus::Running => "running",
            PStatus::Retired => "retired",
        },
        ticks: p.tick.load(Ordering::Relaxed).into(),
        queue: p.queued(),
        spawned: read(&p.counters.spawned),
        ended: read(&p.counters.ended),
        steals: read(&p.counters.steals),
        stolen: read(&p.counters.stolen),
        overflows: read(&p.counters.overflows),
    }
}

/// Every goroutine of the caller's runtime as text, in Go's form: id, name, state, how long it waits, its
/// stack, and where it was created. Stops nobody, so it is a look in passing: goroutines that run on other threads
/// meanwhile have no stack in it.
///
/// ```
/// trefoil::run(|| {
///     let text = trefoil::debug::dump();
///     assert!(text.starts_with("goroutine 1 \"main\" [running]:"));
/// });
/// ```
pub fn dump() -> String {
    with_sched(crate::observe::dump::dump)
}

/// How many goroutines of the caller's runtime stand where: Go's goroutine profile. The same look in passing as
/// [`dump`], grouped by stack, so it stays short however many goroutines there are. One that runs on another thread
/// meanwhile, or has not begun, counts at the closure that it was started with.
///
/// [`Profile::folded`] is text for flame graphs, [`Profile::write_pprof`] a file for `go tool pprof`.
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
///     sleep(Duration::from_millis(50)); // they begin to wait
///     let profile = trefoil::debug::profile();
///     assert_eq!(profile.goroutines(), 1001);
///     print!("{}", profile.folded()); // …serve;trefoil::time::sleep 1000
///     let mut file = Vec::new(); // or std::fs::File::create("goroutines.pb")?
///     profile.write_pprof(&mut file).unwrap();
///     assert!(!file.is_empty());
/// });
/// ```
pub fn profile() -> Profile {
    with_sched(crate::observe::pprof::profile)
}
