//! Park, yield, exit: leaving one goroutine for the next.
//!
//! A goroutine that stops takes its successor from the local queue and switches to it directly. Only
//! when none is at hand, or something is asked of the P, it switches to the thread's own context,
//! which does the slow part of the search (`find.rs`) on the thread's stack: goroutine stacks stay
//! shallow, and a small one needs a single page.
//!
//! # Settling
//! A goroutine may be resumed elsewhere only when its registers are saved, so it cannot announce its
//! own stop. It leaves a note (`m.leaving`) and **whoever runs next on the thread settles it**
//! ([`finish_switch`]): publishes it as parked, queues it, or recycles its stack. Every path that
//! arrives from a switch settles before anything else:
//!
//! ```text
//!   G1: leave note, switch ──▶ G2, resumed in `leave`:   finish_switch, go on
//!                          ──▶ G3, fresh in `main`:       finish_switch, run the closure
//!                          ──▶ the thread's context:     finish_switch, find work
//! ```
//!
//! # The end of a goroutine
//! In the order of a thread's end: result stored, TLS destructors, then the join cell. After the join
//! cell the G belongs to its handle and may be reused at once, while we still stand on its stack: the
//! stack was taken out of the G before. If the successor is fresh and wants a stack of the same
//! kind, it **inherits** this one on the spot: the TLS gets a clean image and the loop in
//! [`goroutine_main`] goes round. Neither a switch nor a pool is involved.

use crate::arch;
use crate::mem::{self, Stack};
use crate::sched::g::G;
use crate::sched::goroutine::join::Completed;
use crate::sched::goroutine::state::ParkOutcome;
use crate::sched::m::{Leaving, Rt};
use crate::sched::p::{P, bump, flag};
use crate::sched::shutdown::HolderCount;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{
    CURRENT, Sched, goroutine::locked, goroutine::scope, search::find, shutdown, wait,
};
use crate::sys::clock::{NEVER, now};
use std::sync::atomic::Ordering;

/// Every how many ticks a goroutine from the global queue goes first. Go's number; and for a queue of at least
/// [`CROWD`] goroutines, because `yield_now` keeps goroutines local (Go's does not): with 2,000 that yield, some would
/// wait for seconds.
const FAIRNESS_TICKS: u32 = 61;
const FAIRNESS_TICKS_IN_CROWD: u32 = 8;
const CROWD: u32 = 256;

/// Every how many ticks goroutines that were started, or have yielded, go before those that were woken: so that they do
/// not starve.
const FRESH_TICKS: u32 = 16;

/// A P that has timers looks at the clock once in so many switches: 27 ns against 16 × 10.
const TIMER_LOOKS: u32 = 16;

/// How often one who is alone yields before it looks at other Ps, at first and at most: a look takes a microsecond or
/// more for each P where somebody waits.
const YIELDS_ALONE: u32 = 64;
const YIELDS_ALONE_MAX: u32 = 4096;

/// The running goroutine waits until someone calls `ready` for it (maybe that has happened already).
/// The result is the runtime where it wakes up.
#[inline]
pub(crate) fn park(rt: Rt, reason: WaitReason) -> Rt {
    let g = rt.g();
    if g.state.take_notification() {
        return rt;
    }
    g.set_reason(reason, rt.sched().coarse_ms.load(Ordering::Relaxed));
    leave(rt, g, Leaving::Parked(g))
}

/// The running goroutine lets others run.
#[inline]
pub(crate) fn yield_now(rt: Rt) -> Rt {
    let p = rt.p();
    // Alone here, and nothing asked of us: go on.
    if p.is_empty()
        && !rt.sched().has_global()
        && p.flags.load(Ordering::Relaxed) & !flag::LOCKED == 0
        && !timer_due(p)
        && !fetches(rt, p)
    {
        return rt;
    }
    let g = rt.g();
    // Alone here, while others wait in a global queue: behind all of them.
    let note = if p.is_empty() { Leaving::Preempted(g) } else { Leaving::Yielded(g) };
    leave(rt, g, note)
}

/// Whether one who yields, and is alone on its P, has fetched somebody who waits on another: it is as good as idle,
/// but no thread will be woken for them, and whoever runs there may refuse to be preempted. Once in
/// [`YIELDS_ALONE`] times, and the more rarely the less there is to fetch.
#[inline]
fn fetches(rt: Rt, p: &P) -> bool {
    let left = p.yields.get();
    if left > 0 {
        p.yields.set(left - 1);
        return false;
    }
    let found = find::fetch(rt);
    let pause = if found { 0 } else { 2 * p.yields_pause.get() };
    let pause = pause.clamp(YIELDS_ALONE, YIELDS_ALONE_MAX);
    p.yields_pause.set(pause);
    p.yields.set(pause);
    found
}

/// The time slice is over, noticed at the end of a runtime call.
#[cold]
pub(crate) fn preempt_slow(rt: Rt) {
    let p = rt.p();
    if !p.is_asked_to_preempt() {
        // The request came too late for the goroutine that it was meant for.
        p.flags.fetch_and(!flag::PREEMPT, Ordering::Relaxed);
        return rt.leave_now();
    }
    let stays = rt.g().no_preempt.get() != 0 || rt.sched().must_go_on();
    let rt = if stays { rt } else { preempt(rt) };
    rt.leave_now();
}

/// The time slice is used up. If the running goroutine came from `runnext`, others have used the slice too, and it may
/// have run for a moment only: it keeps its place before those that have used up a slice by themselves.
pub(crate) fn preempt(rt: Rt) -> Rt {
    let g = rt.g();
    rt.m().preempt_deferrals.store(0, Ordering::Relaxed);
    let inherited = rt.p().runs_inherited() && !g.stopped_in_libc.get();
    leave(rt, g, if inherited { Leaving::Displaced(g) } else { Leaving::Preempted(g) })
}

/// The running goroutine has no P, and there is none for it: it queues, and its thread looks for another.
pub(crate) fn requeue_without_p(rt: Rt) -> Rt {
    let (m, g) = (rt.m(), rt.g());
    let counted =
        shutdown::holds_lock() && rt.sched().count_waiting_holder(g) == HolderCount::Counted;
    m.leaving.set(Leaving::WithoutP(g));
    m.current.set(None);
    // SAFETY: as in `leave`, to the thread's own context.
    unsafe { arch::switch(g.sp.as_ptr(), m.sp.get(), m.tp.get()) };
    let rt = Rt::after_switch();
    finish_switch(rt);
    if counted {
        rt.sched().uncount_waiting_holder(g);
    }
    rt
}

/// Makes a goroutine runnable that parked, or is about to. Exactly once for each park.
#[inline]
pub(crate) fn ready(rt: Rt, g: &'static G) {
    if !g.notify() {
        return; // it has not parked yet, and will not
    }
    g.woken.set(true);
    let sched = rt.sched();
    if std::ptr::eq(g.sched.get(), sched) {
        let p = rt.p();
        p.push_next(sched, g);
        // Alone, it is probably about to run here (`idle.rs`).
        if !sched.idle.is_suppressed() || p.ring_len() != 0 {
            sched.wake();
        }
    } else {
        enqueue_outside(g);
    }
}

/// `ready` from a plain thread, or from another runtime's goroutine.
pub(crate) fn ready_outside(g: &'static G) {
    if g.notify() {
        g.woken.set(true);
        enqueue_outside(g);
    }
}

#[cold]
fn enqueue_outside(g: &'static G) {
    // SAFETY: a goroutine that is alive keeps its runtime (`Sched::start`), and it is alive until it runs.
    unsafe { &*g.sched.get() }.push_from_outside(g, false);
}

/// Leaves `g`, the running goroutine, with a note of what it is to become. Returns when it is resumed.
#[inline]
fn leave(rt: Rt, g: &'static G, note: Leaving) -> Rt {
    let m = rt.m();
    m.leaving.set(note);
    // SAFETY: `g` is running here, so its context is ours to save; the target is suspended and was
    // taken from a queue (a goroutine), or is the thread's own context.
    unsafe {
        match next_at_hand(rt) {
            Some(next) => {
                next.state.set_running();
                m.current.set(Some(next));
                arch::switch(g.sp.as_ptr(), next.sp.get(), next.tp.get());
            }
            None => {
                m.current.set(None);
                arch::switch(g.sp.as_ptr(), m.sp.get(), m.tp.get());
            }
        }
    }
    let rt = Rt::after_switch();
    finish_switch(rt);
    rt
}

/// A successor that can be switched to at once. None: the thread's own context decides.
#[inline]
fn next_at_hand(rt: Rt) -> Option<&'static G> {
    let g = pop_at_hand(rt)?;
    if g.locked.get().is_some() {
        rt.m().chosen.set(Some(g));
        return None;
    }
    if has_stack(g) {
        return Some(g);
    }
    let p = rt.p();
    // SAFETY: we own the P, and hold no other borrow of its local state.
    match unsafe { p.local() }.stacks.pop() {
        Some(stack) => {
            attach(g, stack);
            Some(g)
        }
        None => {
            rt.m().chosen.set(Some(g));
            None
        }
    }
}

/// The next goroutine of the local queues: `runnext`, which inherits its predecessor's slice; those that were woken; the
/// others. Counts a tick unless it inherits.
#[inline]
pub(crate) fn pop_local(p: &P) -> Option<&'static G> {
    if let Some(next) = p.runq.pop_next() {
        // SAFETY: taken from the queue, so ours; Gs are never freed.
        return Some(unsafe { &*next.as_ptr() });
    }
    let tick = p.tick.load(Ordering::Relaxed);
    let woken_first = !p.fresh_turn.replace(false) && !tick.is_multiple_of(FRESH_TICKS);
    let item = if woken_first {
        p.woken.pop_ring().or_else(|| p.runq.pop_ring())
    } else {
        p.runq.pop_ring().or_else(|| p.woken.pop_ring())
    }?;
    // SAFETY: as above.
    let g: &'static G = unsafe { &*item.as_ptr() };
    if g.woken.get() {
        p.next_tick()
    } else {
        p.next_fresh_tick()
    }
    Some(g)
}

#[inline]
fn has_stack(g: &G) -> bool {
    !g.tp.get().is_null()
}

/// Gives a goroutine that is about to run for the first time its stack.
pub(crate) fn attach(g: &'static G, stack: Stack) {
    // SAFETY: the stack is ours, unused, and far larger than the first frame.
    g.sp.set(unsafe { arch::prepare(stack.sp(), goroutine_main) });
    g.tp.set(stack.tp());
    g.stack.set(Some(stack));
}

/// Settles the goroutine that the last switch on this thread left.
#[inline]
fn finish_switch(rt: Rt) {
    let sched = rt.sched();
    match rt.m().leaving.replace(Leaving::Nobody) {
        Leaving::Nobody => {}
        Leaving::Parked(g) => {
            if let ParkOutcome::AlreadyNotified = g.state.commit_park() {
                // Its waker only left a note, and woke nobody.
                g.woken.set(true);
                rt.p().push_next(sched, g);
                sched.wake();
            }
        }
        Leaving::Yielded(g) => {
            g.state.set_runnable();
            g.woken.set(false);
            rt.p().push_back(sched, g);
            sched.wake_after_push();
        }
        Leaving::Displaced(g) => {
            g.state.set_runnable();
            rt.p().push_back(sched, g);
            sched.wake_after_push();
        }
        Leaving::Preempted(g) => {
            g.state.set_runnable();
            g.woken.set(false);
            sched.push_expired(g);
            sched.wake_after_push();
        }
        Leaving::WithoutP(g) => {
            g.state.set_runnable();
            g.woken.set(true);
            if g.stopped_in_libc.get() {
                sched.push_expired(g);
                sched.wake_after_push();
            } else {
                // As one that was woken: it does not wait behind those who compute.
                sched.push_from_outside(g, false);
            }
        }
        Leaving::Dead(stack) => recycle(rt.p(), stack),
    }
}

fn recycle(p: &P, stack: Stack) {
    if stack.is_default_size() {
        stack.recycle();
        // SAFETY: we own the P, and hold no other borrow of its local state.
        unsafe { p.local() }.stacks.push(stack);
    } else {
        mem::release(stack);
    }
}

/// The bottom of every goroutine's stack.
unsafe extern "sysv64" fn goroutine_main() -> ! {
    loop {
        let rt = Rt::after_switch();
        let g = rt.g();
        CURRENT.set(g);
        finish_switch(rt);
        rt.leave_now();
        run_to_the_end(g);
        if !exit(enter_again(g), g) {
            crate::sched::fatal(format_args!("a dead goroutine was resumed: a bug in trefoil"));
        }
        // Another goroutine goes on here, on the same stack.
    }
}

fn enter_again(g: &G) -> Rt {
    match Rt::enter() {
        Some(rt) => rt,
        None => {
            crate::sched::fatal(format_args!("goroutine {} lost its thread-local storage", g.id()))
        }
    }
}

/// Closure, then destructors of its thread-locals. Both are the user's code.
fn run_to_the_end(g: &'static G) {
    // SAFETY: this is the goroutine's one run (task.rs, invariant 1).
    let panicked = unsafe { (g.body.get().run)(g) };
    if panicked && g.abort_on_panic.get() {
        // The panic's own message is out already (hook). Go's exit code.
        crate::sys::stderr::write_stderr(format_args!(
            "\ngoroutine {} panicked, and panics end the process (PanicMode::Abort)\n",
            g.id()
        ));
        // SAFETY: ends the process at once, as Go does: no destructors, no atexit.
        unsafe { libc::_exit(2) };
    }
    // Without a handle the result is dropped as a thread's is: before its thread-locals.
    let has_more_than_bits = panicked || !g.body.get().has_plain_result || g.name().is_some();
    if has_more_than_bits && !g.join.store_result() {
        drop_result(g);
        g.forget_name();
    }
    // SAFETY: at the end of the goroutine, on it.
    unsafe { mem::tls::run_destructors() };
}

/// Drops the result as the user's code.
fn drop_result(g: &'static G) {
    // SAFETY: nobody else will take it (join.rs, invariant 1).
    let panicked = unsafe { (g.body.get().drop_result)(g) };
    // SAFETY: null, or the scope that waits for us.
    if panicked && let Some(scope) = unsafe { g.scope.get().as_ref() } {
        scope.note_panic();
    }
}

/// Ends the running goroutine. True: another one has taken over its stack and is `rt.g()` now.
fn exit(rt: Rt, g: &'static G) -> bool {
    let mut stack = take_stack(g);
    let scope = g.scope.get();
    if g.locked.get().is_some() {
        locked::unlock_at_end(g);
    }
    bump(&rt.p().counters.ended, 1);
    g.state.set_dead();
    CURRENT.set(std::ptr::null());
    let completed = g.join.complete();
    // From here on `g` is not ours, but for `Unwanted`.
    let rt = match completed {
        Completed::Kept => rt,
        Completed::Wake(waiter) => {
            wait::wake_in(rt, waiter);
            rt
        }
        Completed::Unwanted => {
            let mut rt = rt;
            if g.name().is_some() {
                g.stack.set(Some(stack));
                rt = forget_name_late(rt, g);
                stack = take_stack(g);
            }
            free(rt, g);
            rt
        }
    };
    if !scope.is_null() {
        // SAFETY: the scope waits for us; this is our last access to it.
        unsafe { scope::ScopeData::finish_one(scope, rt) };
    }
    if stack.is_default_size() {
        // The credit of its spawn. The last user code has run, so the stack itself is in our hands
        // until the successor shelves it.
        // SAFETY: we own the P, and hold no other borrow of its local state.
        unsafe { rt.p().local() }.stacks.unreserve_one();
    }

    let m = rt.m();
    let next = next_at_hand_or_fresh(rt, &stack);
    match next {
        Some(next) if !has_stack(next) => {
            stack.recycle();
            arch::reset_float_control();
            next.sp.set(std::ptr::null_mut());
            next.tp.set(stack.tp());
            next.stack.set(Some(stack));
            next.state.set_running();
            m.current.set(Some(next));
            return true;
        }
        _ => {}
    }
    m.leaving.set(Leaving::Dead(stack));
    let mut nowhere = std::ptr::null_mut();
    // SAFETY: as in `leave`; nobody will resume `nowhere`.
    unsafe {
        match next {
            Some(next) => {
                next.state.set_running();
                m.current.set(Some(next));
                arch::switch(&raw mut nowhere, next.sp.get(), next.tp.get());
            }
            None => {
                m.current.set(None);
                arch::switch(&raw mut nowhere, m.sp.get(), m.tp.get());
            }
        }
    }
    false
}

/// As [`next_at_hand`], but a fresh goroutine is as good as a suspended one if it can inherit `stack`.
#[inline]
fn next_at_hand_or_fresh(rt: Rt, stack: &Stack) -> Option<&'static G> {
    if !stack.is_default_size() {
        return next_at_hand(rt);
    }
    let g = pop_at_hand(rt)?;
    if g.locked.get().is_some() {
        rt.m().chosen.set(Some(g));
        return None;
    }
    Some(g)
}

/// The head of the local queue, unless something else must be looked at first.
#[inline]
fn pop_at_hand(rt: Rt) -> Option<&'static G> {
    let p = rt.p();
    let tick = p.tick.load(Ordering::Relaxed);
    if p.flags.load(Ordering::Relaxed) != 0 || is_global_turn(rt.sched(), tick) || timer_due(p) {
        return None;
    }
    pop_local(p)
}

/// Whether a goroutine from the global queue goes first in this tick.
#[inline]
pub(crate) fn is_global_turn(sched: &Sched, tick: u32) -> bool {
    (tick.is_multiple_of(FAIRNESS_TICKS) && sched.has_global())
        || (tick.is_multiple_of(FAIRNESS_TICKS_IN_CROWD) && sched.global_len() >= CROWD)
}

/// Whether a timer of this P is due: looked at once in [`TIMER_LOOKS`] switches, because the clock costs
/// more than a switch.
#[inline]
fn timer_due(p: &P) -> bool {
    let next = p.timers.next();
    if next == NEVER {
        return false;
    }
    let looks = p.looks.get().wrapping_add(1);
    p.looks.set(looks);
    looks.is_multiple_of(TIMER_LOOKS) && next <= now()
}

fn take_stack(g: &G) -> Stack {
    match g.stack.take() {
        Some(stack) => stack,
        None => crate::sched::fatal(format_args!("goroutine {} has no stack", g.id())),
    }
}

/// The handle was dropped while the destructors of the thread-locals ran, and left the name to the goroutine: frees it
/// outside the runtime.
#[cold]
fn forget_name_late(rt: Rt, g: &'static G) -> Rt {
    // It lives again, for the count too: its runtime must not go.
    bump(&rt.p().counters.spawned, 1);
    g.state.set_running_again();
    CURRENT.set(g);
    rt.leave_now();
    g.forget_name();
    // An allocator may have used thread-locals.
    // SAFETY: at the end of the goroutine, on it.
    unsafe { mem::tls::run_destructors() };
    let rt = enter_again(g);
    bump(&rt.p().counters.ended, 1);
    CURRENT.set(std::ptr::null());
    rt
}

/// A dead G without a handle returns to the free list.
pub(crate) fn free(rt: Rt, g: &'static G) {
    retire_g(g);
    // SAFETY: we own the P, and hold no other borrow of its local state.
    let local = unsafe { rt.p().local() };
    local.free_gs.give(g);
}

/// As [`free`], on a plain thread.
pub(crate) fn free_outside(g: &'static G) {
    retire_g(g);
    crate::sched::g::give_central(g);
}

fn retire_g(g: &'static G) {
    g.state.set_dead();
    // Guards that it forgot are not its successor's.
    g.no_preempt.set(0);
    g.tp.set(std::ptr::null_mut());
}

/// The thread's own context: finds work, runs it, until the runtime stops.
pub(crate) fn thread_loop(rt: Rt) {
    let m = rt.m();
    loop {
        if let Some(g) = m.locked.get()
            && !locked::wait_for_g(rt, g)
        {
            return;
        }
        let g = match m.chosen.take() {
            Some(g) => g,
            None => match find::find_work(rt) {
                Some(g) => g,
                None => return,
            },
        };
        if let Some(home) = rt.sched().locked_m_of(g, m) {
            locked::hand_to_locked_m(rt, g, home);
            continue;
        }
        if !has_stack(g) && !give_stack(rt, g) {
            continue;
        }
        g.state.set_running();
        m.current.set(Some(g));
        // SAFETY: as in `leave`, seen from the thread's side.
        unsafe { arch::switch(m.sp.as_ptr(), g.sp.get(), g.tp.get()) };
        finish_switch(rt);
    }
}

/// Gives a fresh goroutine its stack. False: the P was lost meanwhile, and the goroutine is in a queue again.
fn give_stack(rt: Rt, g: &'static G) -> bool {
    loop {
        // SAFETY: we own the P, and hold no other borrow of its local state.
        let stacks = unsafe { &mut rt.p().local().stacks };
        let made = match stacks.pop() {
            Some(stack) => Ok(Some(stack)),
            None => stacks.refill(),
        };
        let made = match made {
            Ok(Some(stack)) => {
                attach(g, stack);
                return true;
            }
            // It allocates, so it may have to wait for a goroutine that was preempted inside malloc.
            Ok(None) => rt.retakable(mem::refill_pool),
            Err(e) => Err(e),
        };
        if let Err(e) = made {
            crate::sched::fatal(format_args!("goroutine {}: cannot make its stack: {e}", g.id()));
        }
        if rt.m().p.get().is_none() {
            rt.sched().push_global(g);
            rt.sched().wake_after_push();
            return false;
        }
    }
}
