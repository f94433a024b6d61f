//! The helper thread: a thread without a P for work that may block or allocate.
//!
//! A goroutine may be preempted inside malloc while it holds the lock of an arena, and it needs a P
//! to go on. Therefore neither an M with a P nor sysmon, which hands out the Ps, may wait for that
//! lock. Work that allocates or reads files is done here: starting threads, traces, reports,
//! following the cgroup's CPU limit, releasing stacks, deferred wake-ups.
//!
//! The thread sleeps until another thread wakes it ([`Helper::wake`], [`Helper::request`]).

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

/// What the helper thread is asked to do, as a bit of `Helper::requests`. Other work needs no
/// request: the thread checks for it whenever it is woken.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Request {
    CheckDeadlock = 1,
    CheckCpus = 2,
    /// The watches are told what was noticed.
    Incidents = 4,
}

/// If no thread could be started for so long, that may last.
const REFUSED_NANOS: Nanos = 1_000_000_000;

/// After a thread could not be started, the time until the next attempt doubles with each failure,
/// from the first of these values up to the second. A limit may be raised, or threads of the
/// program may end, and nothing reports that.
const RETRY_FIRST_NANOS: Nanos = 10_000_000;
const RETRY_MAX_NANOS: Nanos = 100_000_000;

/// How long after a wait for a lock the runtime is checked for cycles of waits, at least. A check
/// takes less than a hundredth of the time between two checks.
const WAIT_CHECK_NANOS: Nanos = 4_000_000_000;
const WAIT_CHECK_SHARE: Nanos = 100;

/// The thread's own frames are small, but dumps symbolise stacks on it.
const STACK_BYTES: usize = 1 << 20;

/// The part of a helper thread that other threads use. Its memory is never freed, because a signal
/// handler may refer to it, but a later runtime reuses it.
pub(crate) struct Helper {
    /// Bits of [`Request`].
    requests: AtomicU32,
    parker: Parker,
    /// A runtime uses it.
    in_use: AtomicBool,
    /// The next entry in [`ALL`]. Set before the helper is in that list.
    next: AtomicPtr<Helper>,
    /// Its part in deferred wake-ups.
    #[cfg(feature = "std")]
    pub(crate) deferred: deferred::DeferredService,
}

/// Every helper that was ever made, newest first.
static ALL: AtomicPtr<Helper> = AtomicPtr::new(null_mut());

/// The number of helper threads that have started, or are about to, and will call
/// [`Hooks::serve_signals`](crate::sched::Hooks) once more.
static SERVING: AtomicUsize = AtomicUsize::new(0);

/// Returns every helper that was ever made, used or not.
fn all() -> impl Iterator<Item = &'static Helper> {
    // Acquire: pairs with the Release in `Helper::take`.
    // SAFETY: null, or a Helper, which is never freed.
    let at = |link: &AtomicPtr<Helper>| unsafe { link.load(Ordering::Acquire).as_ref() };
    std::iter::successors(at(&ALL), move |helper| at(&helper.next))
}

/// Wakes every helper thread, so that it calls `Hooks::serve_signals`. Returns false if there is
/// none. Async-signal-safe.
///
/// If it returns true, one of the threads sees what the caller stored before (with SeqCst).
pub(crate) fn wake_all() -> bool {
    all().filter(|helper| helper.in_use.load(Ordering::Relaxed)).for_each(Helper::wake);
    SERVING.load(Ordering::SeqCst) > 0
}

impl Helper {
    /// Returns a helper for a new runtime: an unused one, or a new one.
    pub(crate) fn take() -> &'static Helper {
        let (acquire, relaxed) = (Ordering::Acquire, Ordering::Relaxed);
        let mut unused = all()
            .filter(|helper| helper.in_use.compare_exchange(false, true, acquire, relaxed).is_ok());
        if let Some(helper) = unused.next() {
            helper.requests.store(0, Ordering::Relaxed);
            return helper;
        }
        let helper: &'static Helper = Box::leak(Box::new(Helper {
            requests: AtomicU32::new(0),
            parker: Parker::new(),
            in_use: AtomicBool::new(true),
            next: AtomicPtr::new(null_mut()),
            #[cfg(feature = "std")]
            deferred: deferred::DeferredService::new(),
        }));
        let this = std::ptr::from_ref(helper).cast_mut();
        // Release: a thread that finds the helper in the list sees its `next`.
        let _ = ALL.fetch_update(Ordering::Release, Ordering::Relaxed, |first| {
            helper.next.store(first, Ordering::Relaxed);
            Some(this)
        });
        helper
    }

    /// Makes it available to a later runtime. Its runtime and its thread have ended.
    pub(crate) fn give_back(&self) {
        // Release: pairs with the Acquire in `take`. The next user sees what this one did.
        self.in_use.store(false, Ordering::Release);
    }

    /// Wakes the thread, which checks for all kinds of work. Async-signal-safe.
    pub(crate) fn wake(&self) {
        self.parker.unpark();
    }

    /// Makes a request, and wakes the thread. Async-signal-safe.
    pub(crate) fn request(&self, request: Request) {
        // Release: pairs with the Acquire in `helper_main`.
        self.requests.fetch_or(request as u32, Ordering::Release);
        self.wake();
    }
}

/// Starts the runtime's helper thread.
pub(crate) fn start(sched: &Arc<Sched>) -> io::Result<()> {
    SERVING.fetch_add(1, Ordering::SeqCst);
    start_service_thread(sched, "helper", STACK_BYTES, helper_main)
        .inspect_err(|_| _ = SERVING.fetch_sub(1, Ordering::SeqCst))
}

/// Counts a thread as one that wakes no goroutine by itself, until it is dropped.
pub(crate) struct ServiceWait(());

impl ServiceWait {
    pub(crate) fn begin() -> ServiceWait {
        SERVICE_THREADS.fetch_add(1, Ordering::Relaxed);
        ServiceWait(())
    }
}

impl Drop for ServiceWait {
    fn drop(&mut self) {
        SERVICE_THREADS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The number of helper and sysmon threads in the process.
static SERVICE_THREADS: AtomicUsize = AtomicUsize::new(0);

/// Returns the number of threads of all runtimes that never have a P.
pub(crate) fn service_threads() -> usize {
    SERVICE_THREADS.load(Ordering::Relaxed)
}

/// Starts a thread that runs `serve` and never has a P: sysmon, or the helper thread.
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
    // Until its priority is above that of the Ms, the thread could wait for a CPU behind goroutines
    // that compute.
    if let Some(started) = started {
        started.park();
    }
    Ok(())
}

/// Starts a thread that belongs to no runtime, for the collector of profiles.
pub(crate) fn start_process_thread(
    role: &str,
    stack_bytes: usize,
    serve: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    SERVICE_THREADS.fetch_add(1, Ordering::Relaxed);
    let serving = move || {
        serve();
        SERVICE_THREADS.fetch_sub(1, Ordering::Relaxed);
    };
    let name = thread::Name::new(format_args!("trefoil-{role}"));
    thread::spawn(name, stack_bytes, serving).map_err(|e| {
        SERVICE_THREADS.fetch_sub(1, Ordering::Relaxed);
        io::Error::new(e.kind(), format!("cannot start the {role} thread: {e}"))
    })
}

/// The helper thread: works, sleeps, and ends when the runtime has terminated.
fn helper_main(sched: &Arc<Sched>) {
    let hooks = sched.config.hooks;
    let trace_interval = sched.config.schedtrace_ms.map(|ms| ms.max(1) * 1_000_000);
    let mut next_trace: Nanos = trace_interval.map_or(NEVER, |interval| now() + interval);
    let mut next_wait_check = NEVER;
    let mut wait_check_delay = WAIT_CHECK_NANOS;
    let mut procs = sched.procs() as usize;
    let mut scavenger = mem::Scavenger::new();
    let mut refusals = None;
    #[cfg(feature = "std")]
    deferred::start_serving(sched.helper);
    while !sched.is_terminated() {
        #[cfg(feature = "std")]
        deferred::deliver();
        (hooks.serve_signals)();
        let next_start = start_threads(sched, &mut refusals);
        let requests = sched.helper.requests.swap(0, Ordering::Acquire);
        if requests & Request::CheckDeadlock as u32 != 0 {
            (hooks.all_asleep)(sched);
        }
        if requests & Request::CheckCpus as u32 != 0 && sched.follows_cpus.load(Ordering::Relaxed) {
            follow_cpus(sched, &mut procs);
        }
        if requests & Request::Incidents as u32 != 0 {
            sched.tell_incidents();
        }
        if now() >= next_trace {
            (hooks.trace)(sched);
            next_trace += trace_interval.unwrap_or(NEVER);
        }
        if let Some(check_waits) = hooks.check_waits {
            let begun = now();
            if begun >= next_wait_check {
                next_wait_check = check_waits(sched);
                wait_check_delay = WAIT_CHECK_NANOS.max(WAIT_CHECK_SHARE * (now() - begun));
            }
            if next_wait_check == NEVER && sched.wait_check.take_note() {
                next_wait_check = begun + wait_check_delay;
            }
        }
        let next_scavenge = scavenger.run_due(now);
        let next = next_trace.min(next_scavenge).min(next_start).min(next_wait_check);
        sched.helper.parker.park_until(next);
    }
    #[cfg(feature = "std")]
    deferred::stop_serving(sched.helper);
    scavenger.finish();
    // In this order: a caller of `wake_all` that still saw this thread in `SERVING` is served by
    // the last call.
    SERVING.fetch_sub(1, Ordering::SeqCst);
    (hooks.serve_signals)();
}

/// Starts an M for `sched`. Takes the scheduler's lock from the caller, and releases it.
pub(crate) fn start_thread(
    sched: &Arc<Sched>,
    mut central: impl DerefMut<Target = Central>,
) -> io::Result<()> {
    let id = sched.register_thread()?;
    central.starting += 1;
    drop(central);
    M::start(sched, id).inspect_err(|_| sched.central.lock().starting -= 1)
}

/// A thread could not be started, and since then never all that were wanted.
struct Refusals {
    first: Nanos,
    last: io::Error,
    /// When the next attempt may be made.
    next: Nanos,
    /// How long the pause before that is.
    pause: Nanos,
}

/// Starts the threads that are wanted, unless the kernel has refused one a moment ago. Returns when
/// to try again.
fn start_threads(sched: &Arc<Sched>, refusals: &mut Option<Refusals>) -> Nanos {
    let begun = now();
    if let Some(Refusals { next, last, .. }) = refusals
        && begun < *next
        // That limit is the runtime's own, and to try costs nothing.
        && !Sched::is_thread_limit(last)
    {
        give_up_threads(sched, last);
        return *next;
    }
    let Err(last) = try_start_threads(sched) else {
        *refusals = None;
        sched.threads_refused.store(false, Ordering::Relaxed);
        return NEVER;
    };
    give_up_threads(sched, &last);
    let (first, pause) = match refusals {
        Some(before) => (before.first, (2 * before.pause).min(RETRY_MAX_NANOS)),
        None => (begun, RETRY_FIRST_NANOS),
    };
    let next = now() + pause;
    *refusals = Some(Refusals { first, last, next, pause });
    sched.threads_refused.store(begun - first >= REFUSED_NANOS, Ordering::Relaxed);
    next
}

/// Starts an M for every P that wants one, and one spare M. The spare is needed because a P must
/// never wait for the helper thread: starting a thread allocates, and the allocator's lock may be
/// held by a goroutine that waits for that P.
fn try_start_threads(sched: &Arc<Sched>) -> io::Result<()> {
    loop {
        let central = sched.central.lock();
        if sched.is_drained() || !sched.wants_thread(&central) {
            return Ok(());
        }
        start_thread(sched, central)?;
    }
}

/// No more threads can be started, because of `e`. The running Ms will do the work of the Ps that
/// want one; or an M that becomes idle later, which takes an idle P if there is work.
fn give_up_threads(sched: &Sched, e: &io::Error) {
    let mut central = sched.central.lock();
    // One for each M that is on its way.
    let kept = central.starting;
    let was_needed = sched.return_ps_wanting_m(&mut central, kept);
    drop(central);
    if was_needed {
        sched.report_no_threads(e);
    }
}

/// Adapts the number of Ps to the cgroup's CPU limit and the process's affinity, if they have
/// changed. Only if the program has not set the number of Ps.
fn follow_cpus(sched: &Sched, last: &mut usize) {
    let now = cpus::default_procs();
    if now != *last && sched.resize(now).is_ok() {
        *last = now;
        sched.wake_after_push();
    }
}
