//! The helper thread: a thread without a P for everything that may wait.
//!
//! A goroutine may be preempted inside malloc, with an arena's lock in its hands, and needs a P to go on. So
//! nobody who holds a P, nor sysmon, which gives the Ps out, may wait for that lock. What allocates or
//! reads files is done here: starting threads, traces, reports, the cgroup's limit, giving back stacks.
//!
//! It sleeps until someone leaves a note ([`Helper::call`]).

use crate::mem;
use crate::sched::Sched;
use crate::sched::m::M;
use crate::sched::queues::central::Central;
#[cfg(feature = "std")]
use crate::sched::wait::deferred;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::parker::Parker;
use crate::sys::{cpus, thread};
use std::io;
use std::ops::DerefMut;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

/// Notes: what it is asked to do. Starting threads needs none, it looks for that each time.
pub(crate) const CHECK_DEADLOCK: u32 = 1;
pub(crate) const CHECK_CPUS: u32 = 2;

/// After a thread could not be started: when to try again, at first and at most. A limit may be lifted, or threads of
/// others may end, and nothing tells us.
const RETRY_FIRST_NANOS: Nanos = 10_000_000;
const RETRY_MAX_NANOS: Nanos = 500_000_000;

/// Its own frames are small; dumps symbolise stacks on it.
const STACK_BYTES: usize = 1 << 20;

/// How others reach the helper thread. Its memory is never freed, because a signal handler may know it, but a
/// later runtime uses it again.
pub(crate) struct Helper {
    notes: AtomicU32,
    bed: Parker,
    /// A runtime has it.
    in_use: AtomicBool,
    /// The next one in [`ALL`]. Set before it is in that list.
    next: AtomicPtr<Helper>,
    /// Its place in the list of `deferred.rs`.
    #[cfg(feature = "std")]
    pub(crate) deferred: deferred::Member,
}

/// Every helper ever made, newest first.
static ALL: AtomicPtr<Helper> = AtomicPtr::new(null_mut());

/// Helper threads that have started, or are about to, and will call [`Hooks::asked`](crate::sched::Hooks) once more.
static SERVING: AtomicUsize = AtomicUsize::new(0);

fn all() -> impl Iterator<Item = &'static Helper> {
    // SAFETY: null, or an Helper; never freed.
    let at = |link: &AtomicPtr<Helper>| unsafe { link.load(Ordering::Acquire).as_ref() };
    std::iter::successors(at(&ALL), move |helper| at(&helper.next))
}

/// Wakes every helper, so that it calls `Hooks::asked`; returns false if there is none. Safe in a signal
/// handler.
///
/// What the caller has stored before (sequentially consistent) is seen by one of them if this returns true.
pub(crate) fn call_all() -> bool {
    all().filter(|helper| helper.in_use.load(Ordering::Relaxed)).for_each(|helper| helper.call(0));
    SERVING.load(Ordering::SeqCst) > 0
}

impl Helper {
    /// One for a new runtime: one that a runtime has given back, or a new one.
    pub(crate) fn take() -> &'static Helper {
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        let mut unused = all()
            .filter(|helper| helper.in_use.compare_exchange(false, true, acquire, relaxed).is_ok());
        if let Some(helper) = unused.next() {
            helper.notes.store(0, Ordering::Relaxed);
            return helper;
        }
        let helper: &'static Helper = Box::leak(Box::new(Helper {
            notes: AtomicU32::new(0),
            bed: Parker::new(),
            in_use: AtomicBool::new(true),
            next: AtomicPtr::new(null_mut()),
            #[cfg(feature = "std")]
            deferred: deferred::Member::new(),
        }));
        let this = std::ptr::from_ref(helper).cast_mut();
        // Release: who finds it sees its `next`.
        let _ = ALL.fetch_update(Ordering::Release, Ordering::Relaxed, |first| {
            helper.next.store(first, Ordering::Relaxed);
            Some(this)
        });
        helper
    }

    /// Its runtime is gone, and its thread too.
    pub(crate) fn give_back(&self) {
        self.in_use.store(false, Ordering::Release);
    }

    /// Leaves a note. Safe in a signal handler.
    pub(crate) fn call(&self, notes: u32) {
        self.notes.fetch_or(notes, Ordering::Release);
        self.bed.unpark();
    }
}

pub(crate) fn start(sched: &Arc<Sched>) -> io::Result<()> {
    SERVING.fetch_add(1, Ordering::SeqCst);
    start_service_thread(sched, "helper", STACK_BYTES, help)
        .inspect_err(|_| _ = SERVING.fetch_sub(1, Ordering::SeqCst))
}

/// Helper threads and sysmons in the process.
static SERVICE_THREADS: AtomicUsize = AtomicUsize::new(0);

/// How many threads of all runtimes never have a P.
pub(crate) fn service_threads() -> usize {
    SERVICE_THREADS.load(Ordering::Relaxed)
}

/// Starts a thread that serves the runtime and never has a P.
pub(crate) fn start_service_thread(
    sched: &Arc<Sched>,
    role: &str,
    stack_bytes: usize,
    serve: fn(&Arc<Sched>),
) -> io::Result<()> {
    let sched = sched.clone();
    SERVICE_THREADS.fetch_add(1, Ordering::Relaxed);
    let realtime = sched.realtime.map(|realtime| (realtime, Arc::new(Parker::new())));
    let started = realtime.clone().map(|(_, started)| started);
    let serving = move || {
        if let Some((realtime, started)) = realtime {
            realtime.above().apply();
            started.unpark();
        }
        serve(&sched);
        drop(sched);
        SERVICE_THREADS.fetch_sub(1, Ordering::Relaxed);
    };
    let name = thread::Name::new(format_args!("trefoil-{role}"));
    thread::spawn(name, stack_bytes, serving).map_err(|e| {
        SERVICE_THREADS.fetch_sub(1, Ordering::Relaxed);
        io::Error::new(e.kind(), format!("cannot start the {role} thread: {e}"))
    })?;
    // Until it is above them, it would wait for goroutines that compute.
    if let Some(started) = started {
        started.park();
    }
    Ok(())
}

fn help(sched: &Arc<Sched>) {
    let hooks = sched.config.hooks;
    let every = sched.config.schedtrace_ms.map(|ms| ms.max(1) * 1_000_000);
    let mut next_trace: Nanos = every.map_or(NEVER, |every| now() + every);
    let mut procs = sched.procs() as usize;
    let mut scavenger = mem::Scavenger::new();
    let mut retry_nanos = RETRY_FIRST_NANOS;
    #[cfg(feature = "std")]
    deferred::join(sched.helper);
    while !sched.is_over() {
        #[cfg(feature = "std")]
        deferred::deliver();
        (hooks.asked)();
        let next_start = if start_threads(sched) {
            retry_nanos = RETRY_FIRST_NANOS;
            NEVER
        } else {
            retry_nanos = (2 * retry_nanos).min(RETRY_MAX_NANOS);
            now() + retry_nanos
        };
        let notes = sched.helper.notes.swap(0, Ordering::Acquire);
        if notes & CHECK_DEADLOCK != 0 {
            (hooks.all_asleep)(sched);
        }
        if notes & CHECK_CPUS != 0 && sched.follows_cpus.load(Ordering::Relaxed) {
            follow_cpus(sched, &mut procs);
        }
        if now() >= next_trace {
            (hooks.trace)(sched);
            next_trace += every.unwrap_or(NEVER);
        }
        let next_stacks = scavenger.work(now);
        let next = next_trace.min(next_stacks).min(next_start);
        sched.helper.bed.park_until(next);
    }
    #[cfg(feature = "std")]
    deferred::leave(sched.helper);
    scavenger.finish();
    // In this order: see `call_all`.
    SERVING.fetch_sub(1, Ordering::SeqCst);
    (hooks.asked)();
}

/// Starts a thread for `sched`, whose lock the caller gives back with this.
pub(crate) fn start_thread(
    sched: &Arc<Sched>,
    mut central: impl DerefMut<Target = Central>,
) -> io::Result<()> {
    let id = sched.register_thread()?;
    central.starting += 1;
    drop(central);
    M::start(sched, id).inspect_err(|_| sched.central.lock().starting -= 1)
}

/// Starts a thread for every P that waits for one, and one to spare: a P must never wait for *us*, because starting a
/// thread allocates, and the lock that takes may be in the hands of a goroutine that waits for that P. Returns false if
/// there should be more threads than could be started.
fn start_threads(sched: &Arc<Sched>) -> bool {
    loop {
        let central = sched.central.lock();
        if sched.is_stopped() || !sched.wants_thread(&central) {
            return true;
        }
        if let Err(e) = start_thread(sched, central) {
            let mut central = sched.central.lock();
            let needed = central.has_ps_wanting_m();
            // The Ms that run will do the work; or one that starts later, which takes an idle P if there is work.
            sched.return_ps_wanting_m(&mut central);
            drop(central);
            if needed {
                sched.report_no_threads(&e);
            }
            return false;
        }
    }
}

/// Somebody may have changed the cgroup's limit or our affinity, and nobody has said how many Ps there are to
/// be.
fn follow_cpus(sched: &Sched, last: &mut usize) {
    let now = cpus::default_procs();
    if now != *last && sched.resize(now).is_ok() {
        *last = now;
        sched.wake_after_push();
    }
}
