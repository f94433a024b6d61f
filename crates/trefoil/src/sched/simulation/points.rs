//! The calls at which the running goroutine may be preempted.
//!
//! A goroutine that leaves the runtime asks the schedule ([`preempt_at_call`]). A call that does
//! not enter the runtime, but that other goroutines could notice, asks by [`point`]. The number of
//! questions must depend on the run alone; otherwise a seed would not repeat it. [`Undecided`]
//! suppresses the questions in code whose number of calls depends on earlier runs.

use super::{Phase, Simulation, here};
use crate::arch;
use crate::mem::on_own_stack;
use crate::sched::g::{G, NoPreemptGuard};
use crate::sched::m::Rt;
use crate::sched::{current_g, switch};
use crate::sys::clock;
use crate::sys::fork::is_forked;
use crate::sys::lock;
use std::sync::atomic::Ordering;

/// Preempts the running goroutine here if the schedule says so. It may be called anywhere: in a
/// signal handler, in a child of `fork`, inside the runtime. It does nothing there, nor outside a
/// simulation, where it costs one load.
#[inline(always)]
pub(crate) fn point() {
    if clock::has_simulations() {
        point_slow();
    }
}

#[cold]
fn point_slow() {
    // SAFETY: called only on a goroutine.
    let in_runtime = || unsafe { arch::is_in_runtime() };
    if here().is_some()
        && current_g().is_some()
        && !is_forked()
        && on_own_stack()
        && !lock::holds_runtime_lock()
        && !in_runtime()
        && let Some(rt) = Rt::enter()
    {
        rt.leave();
    }
}

/// Until it is dropped, the running goroutine is not preempted at calls. Use it around code whose
/// number of calls depends on earlier runs, for example on what `interpose/fds.rs` knows about a
/// descriptor.
pub(crate) struct Undecided {
    #[expect(dead_code, reason = "dropped at the end")]
    guard: Option<NoPreemptGuard<'static>>,
}

impl Undecided {
    #[inline]
    pub(crate) fn begin() -> Undecided {
        let g = if clock::has_simulations() { current_g() } else { None };
        Undecided { guard: g.map(G::no_preempt_guard) }
    }
}

/// The running goroutine leaves the runtime: asks the schedule whether it is preempted.
#[cold]
pub(crate) fn preempt_at_call(rt: Rt, simulation: &Simulation) {
    let g = rt.g();
    let sched = rt.sched();
    if g.no_preempt.get() != 0 || sched.must_go_on() || sched.stopping.load(Ordering::Relaxed) {
        return rt.leave_without_yield();
    }
    let preempts = {
        let mut state = simulation.state.lock();
        match state.phase {
            Phase::Between => false,
            _ if state.is_driver(g) => false,
            Phase::Over(_) => true,
            Phase::Running | Phase::RootEnded => {
                state.collect(rt);
                state.preempts(simulation, g)
            }
        }
    };
    let rt = if preempts { switch::preempt_in_simulation(rt) } else { rt };
    rt.leave_without_yield();
}
