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

use super::g::G;
use super::join::Completed;
use super::m::{Leaving, Rt};
use super::p::{P, bump};
use super::reason::WaitReason;
use super::runq::Popped;
use super::state::ParkOutcome;
use super::{CURRENT, find, scope, wait};
use crate::arch;
use crate::mem::{self, Stack};
use crate::sys::clock::{NEVER, now};
use std::io;
use std::sync::atomic::Ordering;

/// Every how many ticks the global queue is looked at first. Go's number.
pub(crate) const FAIRNESS_TICKS: u32 = 61;

/// A P that has timers looks at the clock once in so many switches: 27 ns against 16 × 10.
const TIMER_LOOKS: u32 = 16;

/// Pieces for new TLS blocks that are kept in stock: two batches of new stacks for each of two Ps.
const TLS_KITS_LOW: usize = 64;

/// The running goroutine waits until someone calls `ready` for it (maybe that has happened already).
/// The result is the runtime where it wakes up.
#[inline]
pub(crate) fn park(rt: Rt, reason: WaitReason) -> Rt {
    let g = rt.g();
    if g.state.take_notice() {
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
    if p.runq.is_empty()
        && !rt.sched().has_global()
        && p.flags.load(Ordering::Relaxed) == 0
        && !timer_due(p)
    {
        return rt;
    }
    let g = rt.g();
    leave(rt, g, Leaving::Yielded(g))
}

/// The time slice is over, noticed at the end of a runtime call.
#[cold]
pub(crate) fn preempt_slow(rt: Rt) {
    let g = rt.g();
    leave(rt, g, Leaving::Preempted(g)).leave_now();
}

/// Makes a goroutine runnable that parked, or is about to. Exactly once for each park.
#[inline]
pub(crate) fn ready(rt: Rt, g: &'static G) {
    if !g.notify() {
        return; // it has not parked yet, and will not
    }
    if std::ptr::eq(g.sched.get(), rt.sched()) {
        rt.p().push_next(rt.sched(), g);
        rt.sched().wake(Some(rt));
    } else {
        enqueue_outside(g, Some(rt));
    }
}

/// `ready` from a plain thread, or from another runtime's goroutine.
pub(crate) fn ready_outside(g: &'static G) {
    if g.notify() {
        enqueue_outside(g, None);
    }
}

fn enqueue_outside(g: &'static G, rt: Option<Rt>) {
    // Kept, because `g` may run, end, and its runtime be dropped before we are done with it.
    // SAFETY: a goroutine that is alive keeps its runtime (`Sched::start`).
    let sched = unsafe {
        std::sync::Arc::increment_strong_count(g.sched.get());
        std::sync::Arc::from_raw(g.sched.get())
    };
    sched.push_global(g);
    sched.wake_after_push(rt);
    match rt {
        // Dropping may free the scheduler: not on a goroutine's stack with a P in hand.
        Some(rt) => rt.on_thread_stack(|| drop(sched)),
        None => drop(sched),
    }
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

/// The head of the local queue; counts a tick unless it inherits its predecessor's slice.
#[inline]
pub(crate) fn pop_local(p: &P) -> Option<&'static G> {
    let Popped { item, inherits } = p.runq.pop()?;
    if !inherits {
        p.tick.store(p.tick.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
    // SAFETY: taken from the queue, so ours; Gs are never freed.
    Some(unsafe { &*item.as_ptr() })
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
    let (p, sched) = (rt.p(), rt.sched());
    match rt.m().leaving.replace(Leaving::Nobody) {
        Leaving::Nobody => {}
        Leaving::Parked(g) => {
            if let ParkOutcome::AlreadyNotified = g.state.commit_park() {
                // Its waker only left a note, and woke nobody.
                p.push_next(sched, g);
                sched.wake(Some(rt));
            }
        }
        Leaving::Yielded(g) => {
            g.state.set_runnable();
            p.push_back(sched, g);
            sched.wake_after_push(Some(rt));
        }
        Leaving::Preempted(g) => {
            g.state.set_runnable();
            sched.push_global(g);
            sched.wake_after_push(Some(rt));
        }
        Leaving::Dead(stack) => recycle(p, stack),
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
        let dropped = run_to_the_end(g);
        if !exit(enter_again(g), g, dropped) {
            super::fatal(format_args!("a dead goroutine was resumed: a bug in trefoil"));
        }
        // Another goroutine goes on here, on the same stack.
    }
}

fn enter_again(g: &G) -> Rt {
    match Rt::enter() {
        Some(rt) => rt,
        None => super::fatal(format_args!("goroutine {} lost its thread-local storage", g.id())),
    }
}

/// Closure, then destructors of its thread-locals. Both are the user's code. Returns whether the result
/// is dropped already: nobody wanted it.
fn run_to_the_end(g: &'static G) -> bool {
    // Here malloc is allowed; where the next stacks are made it is not.
    mem::tls::provide(TLS_KITS_LOW);
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
    // Detached stays detached. So the result is dropped as a thread's is: before its thread-locals.
    let unwanted = g.join.is_detached();
    if unwanted {
        drop_result(g);
        g.forget_name();
    }
    // SAFETY: at the end of the goroutine, on it.
    unsafe { mem::tls::run_destructors() };
    unwanted
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
fn exit(rt: Rt, g: &'static G, dropped: bool) -> bool {
    let mut stack = take_stack(g);
    let scope = g.scope.get();
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
            if !dropped {
                g.stack.set(Some(stack));
                rt = discard_late(rt, g);
                stack = take_stack(g);
            }
            free(rt, g);
            rt
        }
    };
    if !scope.is_null() {
        // SAFETY: the scope waits for us; this is our last access to it.
        unsafe { scope::ScopeData::one_ended(scope, rt) };
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
    if stack.is_default_size() { pop_at_hand(rt) } else { next_at_hand(rt) }
}

/// The head of the local queue, unless something else must be looked at first.
#[inline]
fn pop_at_hand(rt: Rt) -> Option<&'static G> {
    let p = rt.p();
    let tick = p.tick.load(Ordering::Relaxed);
    if p.flags.load(Ordering::Relaxed) != 0
        || (tick.is_multiple_of(FAIRNESS_TICKS) && rt.sched().has_global())
        || timer_due(p)
    {
        return None;
    }
    pop_local(p)
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
        None => super::fatal(format_args!("goroutine {} has no stack", g.id())),
    }
}

/// The handle was dropped in the last moment, when the thread-locals were gone already: drops the result
/// as the user's code, which may bring some of them back.
#[cold]
fn discard_late(rt: Rt, g: &'static G) -> Rt {
    // It lives again, for the count too: its runtime must not go.
    bump(&rt.p().counters.spawned, 1);
    g.state.set_running_again();
    CURRENT.set(g);
    rt.leave_now();
    drop_result(g);
    g.forget_name();
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
    super::g::give_central(g);
}

fn retire_g(g: &'static G) {
    g.state.set_dead();
    g.tp.set(std::ptr::null_mut());
}

/// The thread's own context: finds work, runs it, until the runtime stops.
pub(crate) fn thread_loop(rt: Rt) {
    let m = rt.m();
    loop {
        let g = match m.chosen.take() {
            Some(g) => g,
            None => match find::find_work(rt) {
                Some(g) => g,
                None => return,
            },
        };
        if !has_stack(g)
            && let Err(e) = give_stack(rt.p(), g)
        {
            super::fatal(format_args!("goroutine {}: cannot make its stack: {e}", g.id()));
        }
        g.state.set_running();
        m.current.set(Some(g));
        // SAFETY: as in `leave`, seen from the thread's side.
        unsafe { arch::switch(m.sp.as_ptr(), g.sp.get(), g.tp.get()) };
        finish_switch(rt);
    }
}

fn give_stack(p: &P, g: &'static G) -> io::Result<()> {
    // SAFETY: we own the P, and hold no other borrow of its local state.
    let stacks = unsafe { &mut p.local().stacks };
    let stack = match stacks.pop() {
        Some(stack) => stack,
        None => stacks.refill()?,
    };
    attach(g, stack);
    Ok(())
}
