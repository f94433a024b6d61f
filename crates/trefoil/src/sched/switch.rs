//! Park, yield, exit: the switch from one goroutine to the next.
//!
//! A goroutine that stops takes its successor from the local queue and switches to it directly. If
//! the local queue is empty, or a request to the P is pending (`p::flag`), it switches to the
//! thread's own context instead, which does the slow part of the search (`search/find.rs`) on the
//! thread's stack. So goroutine stacks stay shallow, and a small goroutine needs a single page.
//!
//! # Deferred switch completion
//! A goroutine may be resumed on another M only after its registers are saved, that is, after the
//! switch. So it cannot publish its own stop. It stores in `m.unfinished_switch` what is to become
//! of it, and **the next context on the M completes the switch** ([`finish_switch`]): it publishes
//! the goroutine as parked, queues it, or recycles its stack. Every path that continues after a
//! switch begins with that:
//!
//! ```text
//!   G1: store, switch ──▶ G2, resumed in `switch_away`:    finish_switch, continue
//!                     ──▶ G3, new in `goroutine_main`:     finish_switch, run its closure
//!                     ──▶ the thread's own context:        finish_switch, find work
//! ```
//!
//! # The end of a goroutine
//! As at the end of a thread: the result is stored, TLS destructors run, then the join cell is
//! completed. From then on the G belongs to its handle and may be reused, while this code still
//! runs on its stack; therefore the stack is taken out of the G before. If the successor is new and
//! needs a stack of the same size class, it **inherits** this one: the TLS block gets a clean
//! image, and the loop in [`goroutine_main`] runs the successor's closure. That takes neither a
//! switch nor a pool, and halved the time of spawn and join.
//!
//! Invariants:
//! 1. Between a store to `m.unfinished_switch` and the `finish_switch` that takes it, the M stays
//!    inside the runtime and stores no second one.
//! 2. A context is resumed by the one thread that took its goroutine from a queue, or by its own
//!    thread.
//!
//! Rejected: Go's unlock function, which the scheduler calls after the switch. Here a waker that
//! comes too early only leaves a mark (`Notified`, `goroutine/state.rs`). That needs no callback,
//! locks are released before the switch, and a goroutine that was already woken does not switch at
//! all.

use crate::arch;
use crate::mem::{self, Stack};
use crate::sched::g::G;
use crate::sched::goroutine::join::Completed;
use crate::sched::goroutine::state::ParkOutcome;
use crate::sched::latency;
use crate::sched::m::{EnteredRuntime, OwnContext, Rt, UnfinishedSwitch};
use crate::sched::p::{P, bump, flag};
use crate::sched::record::{self, StopCode, WokenBy};
use crate::sched::runnable::{Runnable, Unpacked};
use crate::sched::sample;
use crate::sched::search::{find, steal};
use crate::sched::shutdown::HolderCount;
use crate::sched::task::carrier;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{
    CURRENT, CURRENT_BELOW_TP, Sched, goroutine::locked, goroutine::scope, shutdown, simulation,
    wait,
};
use crate::sys::clock::{NEVER, now};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering;

/// In every 61st tick a goroutine from a global queue goes first. Go's number.
const FAIRNESS_TICKS: u32 = 61;
/// In every 8th tick if at least [`CROWD_LEN`] goroutines wait in the global queues. `yield_now`
/// keeps goroutines local, unlike Go's: of 2,000 goroutines that yield, some would wait for
/// seconds.
const FAIRNESS_TICKS_IN_CROWD: u32 = 8;
const CROWD_LEN: u32 = 256;

/// In every 16th tick a fresh goroutine goes before the woken ones, so that fresh goroutines do not
/// starve.
const FRESH_TICKS: u32 = 16;

/// A P with timers reads the clock once in so many switches: a reading takes 27 ns, and 16 switches
/// take 160 ns.
const SWITCHES_PER_TIMER_CHECK: u32 = 16;

/// How many times a goroutine that is alone on its P yields between two attempts to steal from
/// other Ps. Each failure doubles the number. An attempt takes a microsecond or more for each P
/// where goroutines wait.
const YIELDS_BETWEEN_STEALS_MIN: u32 = 64;
const YIELDS_BETWEEN_STEALS_MAX: u32 = 4096;

/// Parks the running goroutine until a waker calls [`ready`] for it. Returns at once if a waker has
/// done so already. Returns the [`Rt`] of the M on which the goroutine is resumed.
#[inline]
pub(crate) fn park(rt: Rt, reason: WaitReason) -> Rt {
    let g = rt.g();
    if g.state.take_notification() {
        return rt;
    }
    g.head.set_reason(reason, rt.sched().coarse_ms.load(Ordering::Relaxed));
    if sample::are_waits_on() {
        return park_sampled(rt, g, reason);
    }
    switch_away(rt, g, UnfinishedSwitch::Parked(g))
}

/// The end of [`park`] while waits are sampled.
#[cold]
#[inline(never)]
fn park_sampled(rt: Rt, g: &'static G, reason: WaitReason) -> Rt {
    let since = now();
    g.parked_at.store(since, Ordering::Relaxed);
    let rt = switch_away(rt, g, UnfinishedSwitch::Parked(g));
    g.parked_at.store(0, Ordering::Relaxed);
    sample::waited(rt, g, reason, now().saturating_sub(since));
    rt
}

/// Lets other goroutines run before the running one continues.
#[inline]
pub(crate) fn yield_now(rt: Rt) -> Rt {
    let p = rt.p();
    // Alone on this P, and no request is pending: continue.
    if p.is_empty()
        && !rt.sched().has_global()
        && p.flags.load(Ordering::Relaxed) & !flag::LOCKED == 0
        && !is_timer_due(p)
        && !try_steal_while_alone(rt, p)
    {
        return rt;
    }
    let g = rt.g();
    // Alone on this P, but a request is pending, a timer is due, or goroutines wait in a global
    // queue: the goroutine goes behind all of those.
    let becomes =
        if p.is_empty() { UnfinishedSwitch::Preempted(g) } else { UnfinishedSwitch::Yielded(g) };
    switch_away(rt, g, becomes)
}

/// For a goroutine that yields and is alone on its P: tries to steal goroutines for the local
/// queue. Returns whether it stole any.
///
/// This P has no useful work, but it is not idle, so no waker assigns it to an M for the goroutines
/// that wait on other Ps; and the goroutine that runs there may refuse to be preempted. The attempt
/// is made once in [`YIELDS_BETWEEN_STEALS_MIN`] yields, and more rarely after each failure.
#[inline]
fn try_steal_while_alone(rt: Rt, p: &P) -> bool {
    let left = p.yields_until_steal.get();
    if left > 0 {
        p.yields_until_steal.set(left - 1);
        return false;
    }
    let found = steal::steal_for_yield(rt);
    let pause = if found { 0 } else { 2 * p.yields_between_steals.get() };
    let pause = pause.clamp(YIELDS_BETWEEN_STEALS_MIN, YIELDS_BETWEEN_STEALS_MAX);
    p.yields_between_steals.set(pause);
    p.yields_until_steal.set(pause);
    found
}

/// [`Rt::leave`] has found `flag::PREEMPT`: preempts the running goroutine if the request is meant
/// for it and it may stop here. Then leaves the runtime.
#[cold]
pub(crate) fn preempt_slow(rt: Rt) {
    let p = rt.p();
    if let Some(simulation) = &rt.sched().simulation {
        return simulation::preempt_at_call(rt, simulation);
    }
    if !p.is_asked_to_preempt() {
        // The request came too late for the goroutine that it was meant for.
        p.flags.fetch_and(!flag::PREEMPT, Ordering::Relaxed);
        return rt.leave_without_yield();
    }
    let must_continue = rt.g().no_preempt.get() != 0 || rt.sched().must_go_on();
    let rt = if must_continue { rt } else { preempt(rt) };
    rt.leave_without_yield();
}

/// Ends the time slice of the running goroutine.
///
/// If the goroutine came from `runnext`, other goroutines used a part of the slice, and this one
/// may have run for a moment only. Then it stays in a local ring, ahead of the expired goroutines.
pub(crate) fn preempt(rt: Rt) -> Rt {
    let g = rt.g();
    rt.m().preempt_deferrals.store(0, Ordering::Relaxed);
    let inherited = rt.p().runs_inherited() && !g.stopped_in_libc.get();
    let becomes =
        if inherited { UnfinishedSwitch::Displaced(g) } else { UnfinishedSwitch::Preempted(g) };
    switch_away(rt, g, becomes)
}

/// Queues the running goroutine of a simulation behind all others.
pub(crate) fn preempt_in_simulation(rt: Rt) -> Rt {
    let g = rt.g();
    switch_away(rt, g, UnfinishedSwitch::Preempted(g))
}

/// Queues the running goroutine, whose M has no P and found none. The M waits for a P on its own
/// context. Returns when the goroutine is resumed, maybe on another M.
pub(crate) fn requeue_without_p(entered: EnteredRuntime) -> Rt {
    let (m, g) = (entered.m(), entered.g());
    let counted =
        shutdown::holds_lock() && entered.sched().count_waiting_holder(g) == HolderCount::Counted;
    record::woken_outside(entered.sched(), || record::id_of(g), WokenBy::Unknown);
    m.unfinished_switch.set(UnfinishedSwitch::WithoutP(g));
    m.current.set(None);
    // SAFETY: as in `switch_away`, to the thread's own context.
    unsafe { arch::switch(g.sp.as_ptr(), m.sp.get(), m.tp.get()) };
    let rt = Rt::after_switch();
    finish_switch(rt);
    if counted {
        rt.sched().uncount_waiting_holder(g);
    }
    rt
}

/// Makes a goroutine runnable that has parked or is about to park. The waker calls it exactly once
/// per park.
#[inline]
pub(crate) fn ready(rt: Rt, g: &'static G) {
    if !g.notify() {
        return; // The goroutine has not parked yet, and now will not.
    }
    if sample::are_waits_on() {
        sample::sample_unlock(rt, g);
    }
    g.head.woken.set(true);
    if std::ptr::eq(g.sched.get(), rt.sched()) {
        record::woken(rt, &g.head, || record::id_of(g), WokenBy::Here);
        latency::becomes_runnable(rt, g);
        prefetch_context(g);
        push_woken(rt, g.into());
    } else {
        enqueue_outside(g);
    }
}

/// Queues a goroutine or task of this runtime that was just woken: it runs next.
#[inline]
pub(crate) fn push_woken(rt: Rt, item: Runnable) {
    let (p, sched) = (rt.p(), rt.sched());
    p.push_next(sched, item);
    // If it is alone in the local queue, it will probably run here in a moment (`search/idle.rs`,
    // wake-up suppression).
    if !sched.idle.is_suppressed() || p.ring_len() != 0 {
        sched.wake();
    }
}

/// Loads what the goroutine needs first when it is resumed, in the background: its saved registers
/// with the frames above them, and the line of its TLS with `CURRENT`. If it has waited for long,
/// these are cache misses, and each would wait for the one before.
#[inline(always)]
fn prefetch_context(g: &G) {
    let sp = g.sp.get();
    for line in 0..4 {
        arch::prefetch(sp.wrapping_add(64 * line));
    }
    arch::prefetch(g.tp.get().wrapping_sub(CURRENT_BELOW_TP.load(Ordering::Relaxed)));
}

/// As [`ready`], for a waker that is a plain thread or a goroutine of another runtime.
pub(crate) fn ready_outside(g: &'static G) {
    if g.notify() {
        g.head.woken.set(true);
        enqueue_outside(g);
    }
}

#[cold]
fn enqueue_outside(g: &'static G) {
    // SAFETY: a live goroutine keeps its runtime alive (`Sched::start`), and `g` is alive until it
    // has been queued and has run.
    let sched = unsafe { &*g.sched.get() };
    record::woken_outside(sched, || record::id_of(g), WokenBy::Here);
    sched.stopwatches.start(&g.head);
    sched.push_woken_from_outside(g);
}

/// Switches away from `g`, the running goroutine; `becomes` says what is to become of it. Returns
/// when it is resumed.
#[inline]
fn switch_away(rt: Rt, g: &'static G, becomes: UnfinishedSwitch) -> Rt {
    // The task of a carrier that stops inside a poll is not lost: the carrier keeps it.
    let stop = stop_of(&becomes);
    rt.m().unfinished_switch.set(becomes);
    let next = next_for_direct_switch(rt);
    record::switched_from(rt, g, stop, next);
    switch_to(rt, g, next)
}

/// Shelves `g`, the carrier that runs here, and runs `next`, or whatever the search finds. Returns
/// when the carrier is resumed, with a task or to end.
pub(crate) fn shelve(rt: Rt, g: &'static G, next: Option<&'static G>) -> Rt {
    let next = next.and_then(|next| prepare_direct_switch(rt, next));
    rt.m().unfinished_switch.set(UnfinishedSwitch::Shelved(g));
    record::switched(rt, StopCode::NOTHING, next);
    switch_to(rt, g, next)
}

/// Returns a function that computes, only while something is recorded, why the goroutine stops.
#[inline(always)]
fn stop_of(becomes: &UnfinishedSwitch) -> impl FnOnce(&G) -> StopCode + use<> {
    let parks = matches!(becomes, UnfinishedSwitch::Parked(_));
    let yields = matches!(becomes, UnfinishedSwitch::Yielded(_));
    move |g| match (parks, yields) {
        (true, _) => StopCode::parked(&g.head),
        (_, true) => StopCode::YIELDED,
        _ => StopCode::PREEMPTED,
    }
}

/// Switches from `g`, the running goroutine, to `next`, or to the thread's own context. The caller
/// has stored what becomes of `g`. Returns when `g` is resumed.
#[inline]
fn switch_to(rt: Rt, g: &'static G, next: Option<&'static G>) -> Rt {
    let m = rt.m();
    // SAFETY: `g` runs here, so this thread may save its context. The target is suspended: a
    // goroutine that was taken from a queue, or the thread's own context (invariant 2).
    unsafe {
        match next {
            Some(next) => {
                latency::runs(rt, next);
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

/// Takes a successor that can be switched to directly. Returns None if the thread's own context
/// must decide.
#[inline]
fn next_for_direct_switch(rt: Rt) -> Option<&'static G> {
    let g = pop_g_unless_requested(rt)?;
    prepare_direct_switch(rt, g)
}

/// Returns `g`, which was taken from a queue, if it can be switched to directly. Otherwise leaves
/// it to the thread's own context.
#[inline]
fn prepare_direct_switch(rt: Rt, g: &'static G) -> Option<&'static G> {
    if g.locked.get().is_some() {
        rt.m().chosen.set(Some(g));
        return None;
    }
    if has_stack(g) {
        return Some(g);
    }
    if g.head.is_carrier() {
        // Its stack is not of the default size.
        rt.m().chosen.set(Some(g));
        return None;
    }
    match rt.with_local(|local| local.stacks.pop()) {
        Some(stack) => {
            attach_stack(g, stack);
            Some(g)
        }
        None => {
            rt.m().chosen.set(Some(g));
            None
        }
    }
}

/// As [`next_for_direct_switch`], for a goroutine that ends. If `stack` has the default size, it
/// may also return a successor without a stack, which inherits `stack`.
#[inline]
fn next_for_exit(rt: Rt, stack: &Stack) -> Option<&'static G> {
    if !stack.is_default_size() {
        return next_for_direct_switch(rt);
    }
    let g = pop_g_unless_requested(rt)?;
    if g.locked.get().is_some() || (g.head.is_carrier() && !has_stack(g)) {
        rt.m().chosen.set(Some(g));
        return None;
    }
    Some(g)
}

/// As [`pop_unless_requested`]. Returns a carrier for a task. Returns None if there is none: then
/// the task waits for one.
#[inline]
fn pop_g_unless_requested(rt: Rt) -> Option<&'static G> {
    match pop_unless_requested(rt)?.unpack() {
        Unpacked::Goroutine(g) => Some(g),
        Unpacked::Task(task) => carrier::carrier_for(rt, task),
    }
}

/// Takes the next goroutine or task of the local queues, unless a request to the P, a global queue
/// or a timer comes first.
#[inline]
pub(crate) fn pop_unless_requested(rt: Rt) -> Option<Runnable> {
    let p = rt.p();
    let tick = p.tick.load(Ordering::Relaxed);
    if p.flags.load(Ordering::Relaxed) != 0 || is_global_turn(rt.sched(), tick) || is_timer_due(p) {
        return None;
    }
    pop_local(p)
}

/// Takes the next goroutine of the local queues: `runnext`, which inherits its predecessor's slice;
/// or else a woken one; or else a fresh one. Begins a slice unless the goroutine inherits one.
#[inline]
pub(crate) fn pop_local(p: &P) -> Option<Runnable> {
    if let Some(next) = p.runq.pop_next() {
        // SAFETY: what the queue holds came from `as_item`.
        return Some(unsafe { Runnable::from_item(next) });
    }
    let tick = p.tick.load(Ordering::Relaxed);
    let woken_first = !p.fresh_turn.replace(false) && !tick.is_multiple_of(FRESH_TICKS);
    let item = if woken_first {
        p.woken.pop_ring().or_else(|| p.runq.pop_ring())
    } else {
        p.runq.pop_ring().or_else(|| p.woken.pop_ring())
    }?;
    // SAFETY: as above.
    let item = unsafe { Runnable::from_item(item) };
    if item.head().woken.get() {
        p.begin_slice()
    } else {
        p.begin_fresh_slice()
    }
    Some(item)
}

/// Returns whether a goroutine from a global queue goes first in this tick.
#[inline]
pub(crate) fn is_global_turn(sched: &Sched, tick: u32) -> bool {
    (tick.is_multiple_of(FAIRNESS_TICKS) && sched.has_global())
        || (tick.is_multiple_of(FAIRNESS_TICKS_IN_CROWD) && sched.global_len() >= CROWD_LEN)
}

/// Returns whether a timer of this P is due. Reads the clock only once in
/// [`SWITCHES_PER_TIMER_CHECK`] calls, because that takes longer than a switch.
#[inline]
fn is_timer_due(p: &P) -> bool {
    let next = p.timers.next();
    if next == NEVER {
        return false;
    }
    let checks = p.timer_checks.get().wrapping_add(1);
    p.timer_checks.set(checks);
    checks.is_multiple_of(SWITCHES_PER_TIMER_CHECK) && next <= now()
}

#[inline]
fn has_stack(g: &G) -> bool {
    !g.tp.get().is_null()
}

/// Gives a goroutine that is about to run for the first time its stack.
pub(crate) fn attach_stack(g: &'static G, stack: Stack) {
    // SAFETY: this thread owns the stack, which is unused and far larger than the first frame.
    g.sp.set(unsafe { arch::prepare(stack.sp(), goroutine_main) });
    g.tp.set(stack.tp());
    g.stack.set(Some(stack));
}

/// Completes the last switch on this M; see the head of the file.
#[inline]
fn finish_switch(rt: Rt) {
    let sched = rt.sched();
    match rt.m().unfinished_switch.replace(UnfinishedSwitch::None) {
        UnfinishedSwitch::None => {}
        UnfinishedSwitch::Parked(g) => {
            if let ParkOutcome::AlreadyNotified = g.state.commit_park() {
                // The waker came before the park was complete, so the waker neither queued the
                // goroutine nor woke an M.
                g.head.woken.set(true);
                record::woken(rt, &g.head, || record::id_of(g), WokenBy::Unknown);
                rt.p().push_next(sched, g);
                sched.wake();
            }
        }
        UnfinishedSwitch::Yielded(g) => {
            g.state.set_runnable();
            g.head.woken.set(false);
            rt.p().push_back(sched, g);
            sched.wake_after_push();
        }
        UnfinishedSwitch::Displaced(g) => {
            g.state.set_runnable();
            rt.p().push_back(sched, g);
            sched.wake_after_push();
        }
        UnfinishedSwitch::Preempted(g) => {
            g.state.set_runnable();
            g.head.woken.set(false);
            sched.push_expired(g);
            sched.wake_after_push();
        }
        UnfinishedSwitch::WithoutP(g) => push_without_p(sched, g),
        UnfinishedSwitch::Dead(stack) => recycle_stack(rt, stack),
        UnfinishedSwitch::Shelved(g) => carrier::finish_shelving(rt, g),
    }
}

/// Completes the switch from a goroutine to the thread's own context, whose M may have no P.
/// Returns the goroutine if it goes on at once.
fn finish_switch_to_own_context(own: OwnContext) -> Option<&'static G> {
    if let Some(rt) = own.rt() {
        let kept = locked::keep_without_spare(rt);
        if kept.is_none() {
            finish_switch(rt);
        }
        return kept;
    }
    match own.m().unfinished_switch.replace(UnfinishedSwitch::None) {
        UnfinishedSwitch::WithoutP(g) => push_without_p(own.sched(), g),
        _ => crate::sched::fatal(format_args!(
            "M {}: a switch without a P",
            own.m().id.load(Ordering::Relaxed)
        )),
    }
    None
}

/// Queues a goroutine that came back from a blocking call and found no P.
fn push_without_p(sched: &Sched, g: &'static G) {
    g.state.set_runnable();
    g.head.woken.set(true);
    if g.stopped_in_libc.get() {
        sched.push_expired(g);
        sched.wake_after_push();
    } else {
        // Queued as woken, it does not wait behind goroutines that compute.
        sched.push_woken_from_outside(g);
    }
}

/// Puts the stack of a goroutine that has ended into the P's cache, or frees it if it has a size of
/// its own.
fn recycle_stack(rt: Rt, stack: Stack) {
    if stack.is_default_size() {
        stack.recycle();
        rt.with_local(|local| local.stacks.push(stack));
    } else {
        mem::release(stack);
    }
}

/// The first function on every goroutine stack. Each round of the loop is the life of one goroutine
/// on this stack.
///
/// Its frame lies above those of every parked goroutine, in the one page of a small one. So what
/// happens before and after the closure is in functions of their own: inlined, they made the frame
/// 100 bytes larger.
///
/// # Safety
/// Only a switch to a stack that [`attach_stack`] has prepared may enter it, inside the runtime.
unsafe extern "C" fn goroutine_main() -> ! {
    loop {
        let g = begin();
        if g.tells_std_its_name.get() {
            tell_std_name(g);
        }
        // SAFETY: this is the goroutine's one run (goroutine/body.rs, invariant 1).
        let panicked = unsafe { (g.body.get().run)(g) };
        match end(g, panicked) {
            Exited::StackInherited => {} // The next round runs the goroutine that inherited it.
            Exited::Resumed => {
                crate::sched::fatal(format_args!("a dead goroutine was resumed: a bug in trefoil"))
            }
        }
    }
}

/// Begins the life of a goroutine, on its stack. Not inlined; see [`goroutine_main`].
#[inline(never)]
fn begin() -> &'static G {
    let rt = Rt::after_switch();
    let g = rt.g();
    CURRENT.set(g);
    finish_switch(rt);
    rt.leave_without_yield();
    g
}

#[cold]
#[inline(never)]
fn tell_std_name(g: &G) {
    // SAFETY: a goroutine that runs keeps its runtime.
    let sched = unsafe { &*g.sched.get() };
    (sched.config.hooks.tell_std_name)();
}

/// Enters the runtime at the end of `g`, which must still be current.
fn enter_again(g: &G) -> Rt {
    match Rt::enter() {
        Some(rt) => rt,
        None => {
            crate::sched::fatal(format_args!("goroutine {} lost its thread-local storage", g.id()))
        }
    }
}

/// Ends the life of a goroutine whose closure has returned or panicked. Not inlined; see
/// [`goroutine_main`].
#[inline(never)]
fn end(g: &'static G, panicked: bool) -> Exited {
    run_destructors(g, panicked);
    exit(enter_again(g), g)
}

/// Drops the result that no handle wants, and runs the destructors of the thread-locals. Both are
/// user code.
fn run_destructors(g: &'static G, panicked: bool) {
    if panicked {
        // SAFETY: a goroutine that runs keeps its runtime.
        let sched = unsafe { &*g.sched.get() };
        if let Some(simulation) = &sched.simulation {
            simulation.count_panic(g.id());
        }
    }
    if panicked && g.abort_on_panic.get() {
        // The panic hook has already printed the panic's own message. The exit code is Go's.
        crate::sys::stderr::write_stderr(format_args!(
            "\ngoroutine {} panicked, and panics end the process (PanicMode::Abort)\n",
            g.id()
        ));
        // SAFETY: ends the process at once, as Go does: no destructors, no atexit.
        unsafe { libc::_exit(2) };
    }
    // Without a handle, the result is dropped before the thread-locals, as at the end of a thread.
    let has_something_to_free = panicked || !g.body.get().has_plain_result || g.name().is_some();
    if has_something_to_free && !g.join.store_result() {
        drop_result(g);
        g.clear_name();
    }
    g.labels.end();
    // SAFETY: at the end of the goroutine, on it.
    unsafe { mem::tls::run_destructors() };
}

/// Drops the result; its destructor is user code.
fn drop_result(g: &'static G) {
    // SAFETY: there is no handle that could take it (goroutine/join.rs, invariant 1).
    let panicked = unsafe { (g.body.get().drop_result)(g) };
    // SAFETY: null, or the scope, which waits for this goroutine.
    if panicked && let Some(scope) = unsafe { g.scope.get().as_ref() } {
        scope.note_panic();
    }
}

/// How [`exit`] ended.
enum Exited {
    /// A new goroutine, which is now the running one, has inherited the stack.
    StackInherited,
    /// The dead goroutine was resumed: a bug.
    Resumed,
}

/// Ends the running goroutine.
fn exit(rt: Rt, g: &'static G) -> Exited {
    let scope = g.scope.get();
    let (rt, stack) = complete_join(rt, g);
    if !scope.is_null() {
        // SAFETY: the scope waits for this goroutine; this is the last access to it.
        unsafe { scope::ScopeData::finish_one(scope, rt) };
    }
    if stack.is_default_size() {
        // Returns the credit that the spawn took. The last user code has run, so the stack itself
        // is in use only until the successor puts it into the cache.
        rt.with_local(|local| local.stacks.unreserve_one());
    }
    match next_for_exit(rt, &stack) {
        Some(next) if !has_stack(next) => {
            inherit_stack(rt, next, stack);
            Exited::StackInherited
        }
        next => {
            switch_from_dead(rt, next, stack);
            Exited::Resumed
        }
    }
}

/// Marks the goroutine as dead and completes its join cell. Returns its stack, and the [`Rt`] on
/// which it runs then. Afterwards `g` belongs to its handle, or to a free list.
#[inline]
fn complete_join(rt: Rt, g: &'static G) -> (Rt, Stack) {
    let stack = take_stack(g);
    if g.locked.get().is_some() {
        locked::unlock_at_end(rt.sched(), g);
    }
    bump(&rt.p().counters.ended, 1);
    if let Some(simulation) = &rt.sched().simulation {
        simulation::note_end(simulation, g.id());
    }
    g.state.set_dead();
    CURRENT.set(null());
    match g.join.complete() {
        Completed::Kept => (rt, stack),
        Completed::Wake(waiter) => {
            wait::wake_in(rt, waiter);
            (rt, stack)
        }
        Completed::Unwanted => {
            let (rt, stack) =
                if g.name().is_some() { clear_name_late(rt, g, stack) } else { (rt, stack) };
            free_g(rt, g);
            (rt, stack)
        }
    }
}

/// Makes `next`, which is new, the running goroutine, on the stack of the goroutine that has ended.
#[inline]
fn inherit_stack(rt: Rt, next: &'static G, stack: Stack) {
    stack.recycle();
    record::switched(rt, StopCode::ENDED, Some(next));
    latency::runs(rt, next);
    arch::reset_float_control();
    next.sp.set(null_mut());
    next.tp.set(stack.tp());
    next.stack.set(Some(stack));
    next.state.set_running();
    rt.m().current.set(Some(next));
}

/// Switches from a goroutine that has ended to `next`, or to the thread's own context.
#[inline]
fn switch_from_dead(rt: Rt, next: Option<&'static G>, stack: Stack) {
    let m = rt.m();
    m.unfinished_switch.set(UnfinishedSwitch::Dead(stack));
    record::switched(rt, StopCode::ENDED, next);
    let mut never_resumed = null_mut();
    // SAFETY: as in `switch_away`; the saved context is not in any queue, so no thread resumes it.
    unsafe {
        match next {
            Some(next) => {
                latency::runs(rt, next);
                next.state.set_running();
                m.current.set(Some(next));
                arch::switch(&raw mut never_resumed, next.sp.get(), next.tp.get());
            }
            None => {
                m.current.set(None);
                arch::switch(&raw mut never_resumed, m.sp.get(), m.tp.get());
            }
        }
    }
}

fn take_stack(g: &G) -> Stack {
    match g.stack.take() {
        Some(stack) => stack,
        None => crate::sched::fatal(format_args!("goroutine {} has no stack", g.id())),
    }
}

/// Frees the name outside the runtime: the handle was dropped while the destructors of the
/// thread-locals ran, and left the name to the goroutine. The goroutine may continue on another M,
/// with the same stack.
#[cold]
fn clear_name_late(rt: Rt, g: &'static G, stack: Stack) -> (Rt, Stack) {
    g.stack.set(Some(stack));
    // The goroutine counts as alive again, so that its runtime is not dropped.
    bump(&rt.p().counters.spawned, 1);
    g.state.set_running_again();
    CURRENT.set(g);
    rt.leave_without_yield();
    g.clear_name();
    // The allocator may have used thread-locals.
    // SAFETY: at the end of the goroutine, on it.
    unsafe { mem::tls::run_destructors() };
    let rt = enter_again(g);
    bump(&rt.p().counters.ended, 1);
    CURRENT.set(null());
    (rt, take_stack(g))
}

/// Puts a dead G, which has neither a name nor a handle any more, into the P's free list.
pub(crate) fn free_g(rt: Rt, g: &'static G) {
    reset_dead(g);
    rt.with_local(|local| local.free_gs.put(g));
}

/// As [`free_g`], on a plain thread: puts the G into the central free list.
pub(crate) fn free_g_outside(g: &'static G) {
    reset_dead(g);
    crate::sched::g::put_central(g);
}

fn reset_dead(g: &'static G) {
    g.state.set_dead();
    // `no_preempt` guards that the goroutine forgot must not count for the next one in this G.
    g.no_preempt.set(0);
    g.tp.set(null_mut());
}

/// The loop of the thread's own context: finds a goroutine and switches to it. Returns when the
/// thread must end: the runtime has stopped, the thread is not needed any more, or the goroutine
/// that was locked to it has ended.
pub(crate) fn thread_loop(own: OwnContext) {
    let m = own.m();
    let mut kept = None;
    loop {
        if let Some(g) = m.locked.get()
            && kept.is_none()
            && !locked::wait_for_g(own, g)
        {
            return;
        }
        let g = match kept.take().or_else(|| m.chosen.take()) {
            Some(g) => g,
            None => match find::find_work(own).map(Runnable::unpack) {
                Some(Unpacked::Goroutine(g)) => g,
                Some(Unpacked::Task(task)) => match carrier::carrier_for(own.expect_rt(), task) {
                    Some(g) => g,
                    None => continue,
                },
                None => return,
            },
        };
        if let Some(other_m) = own.sched().locked_m_of(g, m) {
            locked::hand_to_locked_m(own.expect_rt(), g, other_m);
            continue;
        }
        if !has_stack(g) && !provide_stack(own, g) {
            continue;
        }
        g.state.set_running();
        m.current.set(Some(g));
        latency::runs(own.expect_rt(), g);
        record::found(own.expect_rt(), g);
        // SAFETY: as in `switch_away`, in the other direction.
        unsafe { arch::switch(m.sp.as_ptr(), g.sp.get(), g.tp.get()) };
        kept = finish_switch_to_own_context(own);
    }
}

/// Gives `g`, which is new, a stack. Returns false if sysmon has retaken the P meanwhile: then `g`
/// is in a global queue again.
fn provide_stack(own: OwnContext, g: &'static G) -> bool {
    if g.head.is_carrier() {
        return carrier::provide_stack(own, g);
    }
    while let Some(rt) = own.rt() {
        let cached = rt.with_local(|local| match local.stacks.pop() {
            Some(stack) => Ok(Some(stack)),
            None => local.stacks.refill(),
        });
        let made = match cached {
            Ok(Some(stack)) => {
                attach_stack(g, stack);
                return true;
            }
            // `refill_pool` allocates, so it may have to wait for a goroutine that was preempted
            // inside malloc.
            Ok(None) => own.retakable(mem::refill_pool),
            Err(e) => Err(e),
        };
        if let Err(e) = made {
            crate::sched::fatal(format_args!("goroutine {}: cannot make its stack: {e}", g.id()));
        }
    }
    own.sched().push_global(g);
    own.sched().wake_after_push();
    false
}
