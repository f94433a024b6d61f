//! `go`: from a closure to a runnable goroutine.
//!
//! On a goroutine: a G from the P's free list, the closure into it, and into `runnext`. Nothing is
//! allocated unless the closure is large. On a plain thread: the same through the central lists, and
//! into the global queue.

use crate::mem::{self, Stack};
use crate::sched::g::{self, G};
use crate::sched::goroutine::body::Typed;
use crate::sched::goroutine::join::Detached;
use crate::sched::goroutine::scope::ScopeData;
use crate::sched::m::Rt;
use crate::sched::p::bump;
use crate::sched::switch;
use crate::sched::{Sched, current_g};
use std::io;
use std::panic::Location;
use std::sync::atomic::Ordering;

/// What a goroutine is to be like.
pub(crate) struct Spec {
    pub(crate) name: Option<Box<str>>,
    /// None: the default.
    pub(crate) stack_size: Option<usize>,
    pub(crate) abort_on_panic: Option<bool>,
    pub(crate) scope: *const ScopeData,
    pub(crate) created_at: &'static Location<'static>,
}

impl Spec {
    #[track_caller]
    #[inline]
    pub(crate) fn plain() -> Spec {
        Spec {
            name: None,
            stack_size: None,
            abort_on_panic: None,
            scope: std::ptr::null(),
            created_at: Location::caller(),
        }
    }
}

/// Where a new goroutine goes.
pub(crate) enum Place<'a> {
    /// The runtime of the goroutine that spawns.
    Here,
    /// That runtime, whoever spawns.
    In(&'a Sched),
}

/// Starts a goroutine and returns its G, whose join cell the caller owns one side of.
///
/// # Safety
/// `F` and `T` may be sent to other threads, and what they borrow lives until the goroutine has ended.
#[inline]
pub(crate) unsafe fn spawn<F: FnOnce() -> T, T>(
    place: Place<'_>,
    spec: Spec,
    closure: F,
) -> io::Result<&'static G> {
    // Memory before the runtime is entered (sched/mod.rs, rule 2).
    let own_stack = match spec.stack_size {
        None => None,
        Some(size) => Some(acquire_slow(size)?),
    };
    let reserved = Typed::<F, T>::reserve();
    let rt = Rt::enter().filter(|rt| match place {
        Place::Here => true,
        Place::In(sched) => {
            let same = std::ptr::eq(rt.sched(), sched);
            if !same {
                rt.leave_without_yield();
            }
            same
        }
    });
    let taken = match (rt, &place) {
        (Some(rt), _) => take_g(rt, own_stack.is_none()),
        (None, Place::In(sched)) => take_g_outside(sched, own_stack.is_none()).map_err(NoG::Memory),
        (None, Place::Here) => unreachable!("Place::Here is for goroutines"),
    };
    let (g, id, sched) = match taken {
        Ok(taken) => taken,
        Err(e) => {
            if let Some(rt) = rt {
                rt.leave();
            }
            // SAFETY: never used.
            unsafe { Typed::<F, T>::unreserve(reserved) };
            if let Some(stack) = own_stack {
                mem::release(stack);
            }
            return Err(explain(e.into()));
        }
    };
    // SAFETY: the G is ours; the caller's contract on F and T.
    unsafe { Typed::<F, T>::put(g, closure, reserved) };
    init_g(g, id, sched, spec, own_stack);
    match rt {
        Some(rt) => {
            rt.p().push_next(rt.sched(), g);
            rt.sched().wake();
            rt.leave();
        }
        None => {
            sched.push_fresh_from_outside(g);
        }
    }
    Ok(g)
}

/// Starts a goroutine from inside the runtime (a timer's function), detached.
pub(crate) fn spawn_in(
    rt: Rt,
    f: Box<dyn FnOnce() + Send>,
    created_at: &'static Location<'static>,
) {
    type Boxed = Typed<Box<dyn FnOnce() + Send>, ()>;
    let (g, id, sched) = match take_g(rt, true) {
        Ok(taken) => taken,
        Err(e) => crate::sched::fatal(format_args!(
            "no stack for the function of a timer: {}",
            io::Error::from(e)
        )),
    };
    // SAFETY: the G is ours, the closure is Send and 'static, and fits into it.
    unsafe { Boxed::put(g, f, std::ptr::null_mut()) };
    let spec = Spec {
        name: None,
        stack_size: None,
        abort_on_panic: None,
        scope: std::ptr::null(),
        created_at,
    };
    init_g(g, id, sched, spec, None);
    let detached = g.join.detach();
    debug_assert_eq!(detached, Detached::Running, "it has not even started");
    rt.p().push_next(sched, g);
    sched.wake();
}

/// The kernel's bare error, which the runtime could not put into words where it came up.
#[cold]
fn explain(e: io::Error) -> io::Error {
    if e.get_ref().is_some() {
        return e;
    }
    let text = format!(
        "no address space for another goroutine: {e}; raise the limit (ulimit -v), or run fewer at once"
    );
    io::Error::new(e.kind(), text)
}

#[cold]
fn acquire_slow(size: usize) -> io::Result<Stack> {
    mem::acquire(size)
}

/// Why there is no G, or no stack for it. Not an `io::Error` yet: its text allocates, and this comes up inside the runtime.
enum NoG {
    Memory(io::Error),
    Stack(mem::Refusal),
}

impl From<NoG> for io::Error {
    fn from(no: NoG) -> io::Error {
        match no {
            NoG::Memory(e) => e,
            NoG::Stack(refusal) => refusal.into(),
        }
    }
}

fn take_g(rt: Rt, default_stack: bool) -> Result<(&'static G, u64, &'static Sched), NoG> {
    let (p, sched) = (rt.p(), rt.sched());
    // SAFETY: we own the P, and hold no other borrow of its local state.
    let local = unsafe { p.local() };
    let g = local.free_gs.take().map_err(NoG::Memory)?;
    if default_stack && let Err(refusal) = local.stacks.reserve_one() {
        local.free_gs.put(g);
        return Err(NoG::Stack(refusal));
    }
    let id = local.next_id(|n| sched.take_ids(n));
    bump(&p.counters.spawned, 1);
    Ok((g, id, sched))
}

#[cold]
fn take_g_outside(sched: &Sched, default_stack: bool) -> io::Result<(&'static G, u64, &Sched)> {
    let g = g::take_central()?;
    if default_stack && let Err(e) = mem::reserve_one() {
        g::put_central(g);
        return Err(e);
    }
    sched.spawned_outside.fetch_add(1, Ordering::AcqRel);
    Ok((g, sched.take_ids(1), sched))
}

/// Gives a G everything but its closure, and makes it runnable.
fn init_g(g: &'static G, id: u64, sched: &Sched, spec: Spec, own_stack: Option<Stack>) {
    let parent = current_g().map_or(0, G::id);
    g.init_identity(id, parent, spec.name);
    g.sched.set(sched);
    g.scope.set(spec.scope);
    g.created_at.set(spec.created_at);
    g.abort_on_panic.set(spec.abort_on_panic.unwrap_or(sched.config.abort_on_panic));
    // A forgotten guard of its last life.
    g.no_preempt.set(0);
    g.locked.set(None);
    g.woken.set(false);
    g.lock_depth.set(0);
    g.state.set_runnable();
    if let Some(stack) = own_stack {
        switch::attach_stack(g, stack);
    }
}
