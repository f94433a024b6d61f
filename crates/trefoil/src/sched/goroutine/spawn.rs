//! `go`: from a closure to a runnable goroutine.
//!
//! On a goroutine: takes a G from the P's free list, puts the closure into it, and pushes it to
//! `runnext`. Nothing is allocated unless the closure is large. On a plain thread: takes the G from
//! the central lists and pushes it to the global queue.

use crate::mem::{self, Stack};
use crate::sched::g::{self, G};
use crate::sched::goroutine::body::TypedBody;
use crate::sched::goroutine::join::Detached;
use crate::sched::goroutine::scope::ScopeData;
use crate::sched::labels::{self, LabelRef};
use crate::sched::latency;
use crate::sched::m::Rt;
use crate::sched::p::bump;
use crate::sched::record;
use crate::sched::runnable::RunKind;
use crate::sched::simulation;
use crate::sched::switch;
use crate::sched::wait::holder;
use crate::sched::{Sched, current_g};
use std::io;
use std::panic::Location;
use std::sync::atomic::Ordering;

/// The properties of a goroutine to be spawned.
pub(crate) struct SpawnOptions {
    pub(crate) name: Option<Box<str>>,
    /// None means the default size.
    pub(crate) stack_size: Option<usize>,
    pub(crate) abort_on_panic: Option<bool>,
    /// `std::thread::current()` is to have the name as well. Not for a goroutine whose closure
    /// makes std's handle itself.
    pub(crate) tells_std_its_name: bool,
    pub(crate) scope: *const ScopeData,
    pub(crate) created_at: &'static Location<'static>,
}

impl SpawnOptions {
    /// Returns the defaults, with the caller's location.
    #[track_caller]
    #[inline]
    pub(crate) fn plain() -> SpawnOptions {
        SpawnOptions {
            name: None,
            stack_size: None,
            abort_on_panic: None,
            tells_std_its_name: false,
            scope: std::ptr::null(),
            created_at: Location::caller(),
        }
    }
}

/// Starts a goroutine of `sched` and returns its G. The caller may be any thread or goroutine, and
/// owns the handle's side of the join cell.
///
/// # Safety
/// `F` and `T` may be sent to other threads, and what they borrow lives until the goroutine has
/// ended.
#[inline]
pub(crate) unsafe fn spawn<F: FnOnce() -> T, T>(
    sched: &Sched,
    options: SpawnOptions,
    closure: F,
) -> io::Result<&'static G> {
    // The compiler makes this function again for each closure of the program that is spawned. So
    // only what needs the closure's type is in it.
    let reserved = TypedBody::<F, T>::reserve();
    let new = match NewGoroutine::make(sched, options) {
        Ok(new) => new,
        Err(e) => {
            // SAFETY: `reserve` returned it, and no G uses it.
            unsafe { TypedBody::<F, T>::unreserve(reserved) };
            return Err(e);
        }
    };
    // SAFETY: `new` owns the G; the caller's contract covers F and T.
    unsafe { TypedBody::<F, T>::put(new.g, closure, reserved) };
    Ok(new.start(sched))
}

/// A goroutine that has everything but its closure. It fits into two registers.
struct NewGoroutine {
    g: &'static G,
    /// The caller is inside the runtime until [`NewGoroutine::start`]. None on a plain thread, and
    /// on a goroutine of another runtime.
    rt: Option<Rt>,
}

impl NewGoroutine {
    /// Takes a G and its stack, and enters the runtime.
    #[inline(never)]
    fn make(sched: &Sched, options: SpawnOptions) -> io::Result<NewGoroutine> {
        // Allocate before entering the runtime (sched/mod.rs, rule 2).
        let own_stack = match options.stack_size {
            None => None,
            Some(size) => Some(acquire_slow(size)?),
        };
        let labels = labels::current();
        let stack = if own_stack.is_some() { StackKind::Own } else { StackKind::Default };
        let rt = Rt::enter_if_of(sched);
        let taken = match rt {
            Some(rt) => take_g(rt, stack),
            None => take_g_outside(sched, stack).map_err(NoG::Memory),
        };
        match taken {
            Ok((g, id, sched)) => {
                init_g(g, id, sched, options, own_stack, labels);
                Ok(NewGoroutine { g, rt })
            }
            Err(e) => {
                if let Some(rt) = rt {
                    rt.leave();
                }
                if let Some(stack) = own_stack {
                    mem::release(stack);
                }
                Err(explain_no_memory(e.into()))
            }
        }
    }

    /// Makes it runnable in its runtime, `sched`. Its closure is in its place.
    #[inline(never)]
    fn start(self, sched: &Sched) -> &'static G {
        let NewGoroutine { g, rt } = self;
        g.state.set_runnable();
        let created_at = g.created_at.get();
        match rt {
            Some(rt) => {
                record::created(rt, g.into(), created_at);
                latency::becomes_runnable(rt, g);
                rt.p().push_next(sched, g);
                sched.wake();
                rt.leave();
            }
            None => {
                record::created_outside(sched, g.into(), created_at);
                sched.stopwatches.start(&g.head);
                sched.push_fresh_from_outside(g);
            }
        }
        g
    }
}

/// Starts a detached goroutine from inside the runtime, for the function of a timer that fires. The
/// closure must fit into the G: a box or a counted reference does.
pub(crate) fn spawn_in<F: FnOnce() + Send + 'static>(
    rt: Rt,
    f: F,
    created_at: &'static Location<'static>,
) {
    const { assert!(!TypedBody::<F, ()>::BOXED, "no memory can be reserved inside the runtime") };
    let (g, id, sched) = match take_g(rt, StackKind::Default) {
        Ok(taken) => taken,
        Err(e) => crate::sched::fatal(format_args!(
            "no stack for the function of a timer: {}",
            io::Error::from(e)
        )),
    };
    // SAFETY: this function owns the G. The closure is Send and 'static, and fits into the G, so no
    // memory was reserved.
    unsafe { TypedBody::<F, ()>::put(g, f, std::ptr::null_mut()) };
    init_g(g, id, sched, SpawnOptions { created_at, ..SpawnOptions::plain() }, None, None);
    g.state.set_runnable();
    let detached = g.join.detach(0);
    debug_assert_eq!(detached, Detached::Running, "the goroutine has not started yet");
    record::created(rt, g.into(), created_at);
    rt.p().push_next(sched, g);
    sched.wake();
}

/// Makes a carrier, a detached goroutine that calls `f`, from inside the runtime. The caller
/// switches to it. It gets its stack when it first runs (`switch::provide_stack`).
pub(crate) fn new_carrier(rt: Rt, f: fn()) -> Result<&'static G, NoG> {
    let (g, id, sched) = take_g(rt, StackKind::Own)?;
    let id = if sched.simulation.is_some() { id_in_simulation(rt) } else { id };
    // SAFETY: this function owns the G, and a function pointer fits into it.
    unsafe { TypedBody::<fn(), ()>::put(g, f, std::ptr::null_mut()) };
    init_g(g, id, sched, SpawnOptions::plain(), None, None);
    g.state.set_runnable();
    g.head.set_kind(RunKind::Carrier);
    let detached = g.join.detach(0);
    debug_assert_eq!(detached, Detached::Running, "the goroutine has not started yet");
    Ok(g)
}

/// The ids of carriers in a simulation begin here.
const CARRIERS_IN_SIMULATION: u64 = 1 << 48;

/// Returns the id of a new carrier in a simulation, and gives its ordinary id back. Carriers
/// outlive the runs, so the ids of a run's goroutines must not depend on how many there are.
#[cold]
fn id_in_simulation(rt: Rt) -> u64 {
    rt.with_local(|local| local.give_back_last_id());
    CARRIERS_IN_SIMULATION + u64::from(rt.sched().tasks.carriers())
}

/// Adds the cause and a remedy to an error that is only an error number of the kernel; one with a
/// text stays as it is. Code inside the runtime cannot do that where the error occurs, because the
/// text allocates.
#[cold]
fn explain_no_memory(e: io::Error) -> io::Error {
    if e.get_ref().is_some() {
        return e;
    }
    let text = format!(
        "no address space for another goroutine: {e}; \
         raise the limit (ulimit -v), or run fewer at once"
    );
    io::Error::new(e.kind(), text)
}

/// Makes a stack of a goroutine's own size.
#[cold]
fn acquire_slow(size: usize) -> io::Result<Stack> {
    mem::acquire(size)
}

/// Why no G, or no stack for it, is available. It becomes an `io::Error` only outside the runtime,
/// because the error's text allocates.
pub(crate) enum NoG {
    Memory(io::Error),
    Stack(mem::ReserveError),
}

impl From<NoG> for io::Error {
    fn from(why: NoG) -> io::Error {
        match why {
            NoG::Memory(e) => e,
            NoG::Stack(refusal) => refusal.into(),
        }
    }
}

/// The stack of a new goroutine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StackKind {
    /// Of the default size: it is only reserved now, and taken when the goroutine first runs.
    Default,
    /// Of a size of its own, acquired by the caller.
    Own,
}

/// Takes a G, and reserves a default stack for it, from the P's free lists. Returns the G, its new
/// id, and its runtime.
fn take_g(rt: Rt, stack: StackKind) -> Result<(&'static G, u64, &'static Sched), NoG> {
    let sched = rt.sched();
    let (g, id) = rt.with_local(|local| {
        let g = local.free_gs.take().map_err(NoG::Memory)?;
        if stack == StackKind::Default
            && let Err(refusal) = local.stacks.reserve_one()
        {
            local.free_gs.put(g);
            return Err(NoG::Stack(refusal));
        }
        Ok((g, local.next_id(|n| sched.take_ids(n))))
    })?;
    bump(&rt.p().counters.spawned, 1);
    Ok((g, id, sched))
}

/// As [`take_g`], on a thread without a P of `sched`.
#[cold]
fn take_g_outside(sched: &Sched, stack: StackKind) -> io::Result<(&'static G, u64, &Sched)> {
    let g = g::take_central()?;
    if stack == StackKind::Default
        && let Err(e) = mem::reserve_one()
    {
        g::put_central(g);
        return Err(e);
    }
    // Release: pairs with the Acquire in `Sched::num_goroutines`.
    sched.spawned_outside.fetch_add(1, Ordering::AcqRel);
    Ok((g, sched.take_ids(1), sched))
}

/// Sets every field of a new G except its closure and its state.
fn init_g(
    g: &'static G,
    id: u64,
    sched: &Sched,
    options: SpawnOptions,
    own_stack: Option<Stack>,
    labels: Option<LabelRef>,
) {
    let parent = current_g().map_or(0, G::id);
    g.init_identity(id, parent, options.name);
    g.sched.set(sched);
    g.holder_number.store(holder::number(sched, id), Ordering::Relaxed);
    g.scope.set(options.scope);
    g.created_at.set(options.created_at);
    g.abort_on_panic.set(options.abort_on_panic.unwrap_or(sched.config.abort_on_panic));
    g.tells_std_its_name.set(options.tells_std_its_name);
    // The G's previous goroutine may have leaked a guard.
    g.no_preempt.set(0);
    g.locked.set(None);
    g.head.woken.set(false);
    g.head.set_kind(RunKind::Goroutine);
    g.task.set(None);
    g.lock_depth.set(0);
    g.labels.begin(labels);
    if let Some(simulation) = &sched.simulation {
        simulation::note_start(simulation, id);
    }
    if let Some(stack) = own_stack {
        switch::attach_stack(g, stack);
    }
}
