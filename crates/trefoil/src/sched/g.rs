//! G: a goroutine.
//!
//! `go` takes a G from a free list. The G gets a stack and thread-local storage when it first runs,
//! and returns to a free list when neither the goroutine nor its handle needs it any more. Its
//! states are in `goroutine/state.rs`.
//!
//! Gs are made in slabs, and there are two levels of free lists: one per P, and one for the
//! process.
//!
//! Invariants:
//! 1. The memory of a G is never freed: a stale `&G` may read its atomics.
//! 2. Everything in a `Cell` belongs to the owner that the table in `goroutine/state.rs` names.
//!    Ownership passes by the Release and Acquire of the queues, of park and notify, and of the
//!    join cell.
//! 3. A name is written by the spawner, and removed by the goroutine at its end if the handle is
//!    gone, or else by the handle. Both hold [`NAMES`], because dumps read names.

use crate::mem::Stack;
use crate::sched::goroutine::body::Body;
use crate::sched::goroutine::join::JoinCell;
use crate::sched::goroutine::state::{GoroutineState, Notify, StateSnapshot};
use crate::sched::labels::LabelWord;
use crate::sched::m::{M, Rt};
use crate::sched::runnable::{RunHead, RunKind, RunList};
use crate::sched::task::Task;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Sched, goroutine::scope::ScopeData};
use crate::sys::lock::Lock;
use crate::sys::syscalls;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, offset_of};
use std::panic::{Location, RefUnwindSafe, UnwindSafe};
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence,
};

/// Bytes of a closure or result that are stored in the G itself; a larger one is boxed.
pub(crate) const INLINE_BYTES: usize = 64;
/// Gs made at once.
const GS_PER_SLAB: usize = 128;
/// Free Gs that a P keeps; above the limit half of them go to the central list. Go keeps 64, but
/// then a batch of a thousand goroutines takes the central lock thirty times.
const LOCAL_FREE_MAX: usize = 512;

/// The place for a closure, then for its result.
#[repr(C, align(16))]
pub(crate) struct Payload(pub(crate) UnsafeCell<[MaybeUninit<u8>; INLINE_BYTES]>);

/// A goroutine.
#[repr(C, align(64))]
pub(crate) struct G {
    // First cache line: what a switch touches.
    /// What run queues touch.
    pub(crate) head: RunHead,
    /// The stack pointer while it is suspended.
    pub(crate) sp: Cell<*mut u8>,
    /// The thread pointer: its TLS block. Null until it has a stack.
    pub(crate) tp: Cell<*mut u8>,
    /// See `goroutine/state.rs`.
    pub(crate) state: GoroutineState,
    /// It was stopped by a signal inside libc or the loader, and may hold one of their locks
    /// (`monitor/preempt.rs`).
    pub(crate) stopped_in_libc: Cell<bool>,
    /// It was stopped by a signal, at any instruction, and may hold locks that the whole process
    /// needs (`shutdown.rs`).
    pub(crate) stopped_by_signal: Cell<bool>,
    /// How many [`NoPreemptGuard`]s are alive. The preemption handler reads it, on the goroutine's
    /// thread.
    pub(crate) no_preempt: Cell<u16>,
    pub(crate) stack: Cell<Option<Stack>>,
    /// Its runtime, which lives at least as long as the goroutine.
    pub(crate) sched: Cell<*const Sched>,
    /// The M that it is locked to (`goroutine/locked.rs`).
    pub(crate) locked: Cell<Option<&'static M>>,
    pub(crate) join: JoinCell,
    /// The functions for the type of closure and result that `payload` holds.
    pub(crate) body: Cell<&'static Body>,
    /// Which of several wakers ends the present wait; see `wait/mod.rs`.
    pub(crate) claim: AtomicU64,
    /// What it waits for, or waited for last (`wait/holder.rs`).
    pub(crate) waits_for: AtomicUsize,

    pub(crate) payload: Payload,

    // Rarely used.
    /// It waits for a lock or a P, and may hold a lock that the whole process needs
    /// (`shutdown.rs`).
    pub(crate) waits_as_holder: AtomicBool,
    /// It was woken by the owner of a lock and has not run since (`shutdown.rs`).
    pub(crate) promised: AtomicBool,
    /// A panic in it ends the process.
    pub(crate) abort_on_panic: Cell<bool>,
    /// It tells std its name before it runs its closure.
    pub(crate) tells_std_its_name: Cell<bool>,
    /// If it is a carrier: its task yields when the poll returns `Pending`.
    pub(crate) task_yields: Cell<bool>,
    /// If it is a carrier: the task that it polls, or polls next.
    pub(crate) task: Cell<Option<&'static Task>>,
    id: AtomicU64,
    /// The id of the goroutine that started it, or 0.
    parent: AtomicU64,
    /// How many `lock_os_thread` guards it holds (`goroutine/locked.rs`).
    pub(crate) lock_depth: Cell<u32>,
    /// The number by which locks know it, or the task that it polls (`wait/holder.rs`).
    pub(crate) holder_number: AtomicU32,
    /// The scope that waits for it, or null.
    pub(crate) scope: Cell<*const ScopeData>,
    /// Where it was started.
    pub(crate) created_at: Cell<&'static Location<'static>>,
    name: UnsafeCell<Option<Box<str>>>,
    /// Its labels, if it is not a carrier.
    pub(crate) labels: LabelWord,
    /// While it is parked and waits are sampled: since when. Otherwise 0 (`sample.rs`).
    pub(crate) parked_at: AtomicU64,
}

const _: () = assert!(offset_of!(G, locked) == 56, "a switch touches one cache line");
const _: () = assert!(size_of::<G>() == 256, "a goroutine that has not run costs its G alone");

// SAFETY: invariant 2 says which thread may touch which cell; the rest are atomics.
unsafe impl Sync for G {}
// SAFETY: nothing in it is tied to a thread.
unsafe impl Send for G {}

/// The state that traces and dumps show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Status {
    Dead,
    Runnable,
    Running,
    Waiting(WaitReason),
}

impl G {
    fn new() -> G {
        G {
            sp: Cell::new(null_mut()),
            tp: Cell::new(null_mut()),
            state: GoroutineState::new(),
            head: RunHead::new(RunKind::Goroutine),
            task: Cell::new(None),
            task_yields: Cell::new(false),
            abort_on_panic: Cell::new(false),
            tells_std_its_name: Cell::new(false),
            labels: LabelWord::new(),
            stopped_in_libc: Cell::new(false),
            stopped_by_signal: Cell::new(false),
            waits_as_holder: AtomicBool::new(false),
            promised: AtomicBool::new(false),
            no_preempt: Cell::new(0),
            locked: Cell::new(None),
            lock_depth: Cell::new(0),
            holder_number: AtomicU32::new(0),
            stack: Cell::new(None),
            sched: Cell::new(null()),
            join: JoinCell::new(),
            body: Cell::new(Body::NONE),
            claim: AtomicU64::new(0),
            waits_for: AtomicUsize::new(0),
            parked_at: AtomicU64::new(0),
            payload: Payload(UnsafeCell::new([MaybeUninit::uninit(); INLINE_BYTES])),
            id: AtomicU64::new(0),
            parent: AtomicU64::new(0),
            scope: Cell::new(null()),
            created_at: Cell::new(Location::caller()),
            name: UnsafeCell::new(None),
        }
    }

    #[inline]
    pub(crate) fn id(&self) -> u64 {
        self.id.load(Ordering::Relaxed)
    }

    pub(crate) fn parent(&self) -> u64 {
        self.parent.load(Ordering::Relaxed)
    }

    /// Returns the name, which does not change during the goroutine's life.
    pub(crate) fn name(&self) -> Option<&str> {
        // SAFETY: `init_identity` wrote it before the G was shared. `clear_name` removes it when
        // neither the goroutine nor its handle can call this any more, and dumps call it under
        // `NAMES`.
        unsafe { (*self.name.get()).as_deref() }
    }

    /// Spawner: gives a dead G the id, parent, name and join cell of a new goroutine.
    pub(crate) fn init_identity(&self, id: u64, parent: u64, name: Option<Box<str>>) {
        debug_assert_eq!(self.state.snapshot(), StateSnapshot::Dead);
        self.id.store(id, Ordering::Relaxed);
        self.parent.store(parent, Ordering::Relaxed);
        if name.is_some() {
            let _names = NAMES.lock();
            // SAFETY: the spawner took this G from a free list and owns it (invariants 2 and 3).
            unsafe { *self.name.get() = name };
        }
        self.join.reset();
    }

    /// Frees the name, after the goroutine's closure has returned. The caller is outside the
    /// runtime, because this calls the allocator.
    pub(crate) fn clear_name(&self) {
        // SAFETY: the caller is the only thread that may write the name (invariant 3). A dump may
        // read the name at the same time.
        if unsafe { (*self.name.get()).is_none() } {
            return;
        }
        let name = with_names(|| {
            // SAFETY: as above, and no dump reads it meanwhile, because `NAMES` is locked.
            unsafe { (*self.name.get()).take() }
        });
        drop(name);
    }

    pub(crate) fn status(&self) -> Status {
        match self.state.snapshot() {
            StateSnapshot::Dead => Status::Dead,
            StateSnapshot::Runnable => Status::Runnable,
            StateSnapshot::Running => Status::Running,
            StateSnapshot::Waiting => Status::Waiting(self.reason()),
        }
    }

    pub(crate) fn reason(&self) -> WaitReason {
        self.head.reason()
    }

    /// Waiting → Runnable, or Running → Notified. Called by the waker, once per park. Returns true
    /// if the caller must queue the goroutine.
    #[inline]
    #[must_use]
    pub(crate) fn notify(&self) -> bool {
        match self.state.notify() {
            Notify::Enqueue => true,
            Notify::Noted => false,
            Notify::Twice(state) => crate::sched::fatal(format_args!(
                "goroutine {} woken twice (state {state}): a bug in trefoil",
                self.id()
            )),
        }
    }

    /// On the running goroutine: keeps it from being preempted until the guard is dropped.
    #[inline]
    #[must_use = "preemption is allowed again when the guard is dropped"]
    pub(crate) fn no_preempt_guard(&self) -> NoPreemptGuard<'_> {
        self.no_preempt.set(self.no_preempt.get() + 1);
        // The handler of the preemption signal reads it, so it is stored before what follows.
        compiler_fence(Ordering::SeqCst);
        NoPreemptGuard { g: self, not_send: PhantomData }
    }

    /// On the thread that runs the goroutine: returns whether the address is on its stack.
    pub(crate) fn has_on_stack(&self, address: usize) -> bool {
        // SAFETY: the running goroutine owns its cells, and only this thread, which runs it,
        // replaces the stack (invariant 2).
        let stack = unsafe { (*self.stack.as_ptr()).as_ref() };
        stack.is_some_and(|stack| {
            let (low, high) = stack.bounds();
            (low..high).contains(&address)
        })
    }
}

/// Keeps a goroutine from being preempted; made by [`G::no_preempt_guard`].
///
/// Guards nest. The drop of the last one does not yield, even if the time slice has expired.
pub(crate) struct NoPreemptGuard<'a> {
    g: &'a G,
    /// Keeps the guard on the goroutine that made it, which alone may touch the count.
    not_send: PhantomData<*const ()>,
}

impl<'a> NoPreemptGuard<'a> {
    /// Returns the goroutine that made it.
    pub(crate) fn g(&self) -> &'a G {
        self.g
    }
}

impl Drop for NoPreemptGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        // What precedes it stays before the store.
        compiler_fence(Ordering::SeqCst);
        self.g.no_preempt.set(self.g.no_preempt.get() - 1);
    }
}

// The cells of the G do not matter: a panic cannot leave the count wrong, because unwinding drops
// the guard.
impl UnwindSafe for NoPreemptGuard<'_> {}
impl RefUnwindSafe for NoPreemptGuard<'_> {}

/// What a dump reads of a goroutine that it does not own. The results may be out of date.
impl G {
    /// Returns the stack pointer of the last suspension.
    pub(crate) fn sp_hint(&self) -> usize {
        // SAFETY: an aligned word in memory that is never freed.
        unsafe { self.sp.as_ptr().read_volatile() as usize }
    }

    /// Returns whether it has a stack: before it first runs it has none, unless its stack is of a
    /// size of its own.
    pub(crate) fn has_stack_hint(&self) -> bool {
        // SAFETY: as in `sp_hint`.
        unsafe { !self.tp.as_ptr().read_volatile().is_null() }
    }

    pub(crate) fn sched_hint(&self) -> *const Sched {
        // SAFETY: as in `sp_hint`.
        unsafe { self.sched.as_ptr().read_volatile() }
    }

    /// Returns the id by which glibc knows it, or 0 if it has no stack.
    pub(crate) fn tid_hint(&self) -> u32 {
        // SAFETY: as in `sp_hint`; null or a TLS block.
        unsafe {
            let tp = self.tp.as_ptr().read_volatile() as usize;
            if tp == 0 { 0 } else { crate::mem::tls::tid_of(tp) }
        }
    }

    /// Returns the scope that waits for it, or null.
    pub(crate) fn scope_hint(&self) -> *const ScopeData {
        // SAFETY: as in `sp_hint`.
        unsafe { self.scope.as_ptr().read_volatile() }
    }

    /// Returns how many bytes of its stack were in use at the last suspension. Its thread pointer
    /// is at the top of the stack.
    pub(crate) fn stack_depth_hint(&self) -> usize {
        // SAFETY: as in `sp_hint`.
        let top = unsafe { self.tp.as_ptr().read_volatile() as usize };
        top.wrapping_sub(self.sp_hint())
    }

    /// Calls `f` with every word of its stack that was in use at the last suspension. Returns false
    /// if it has not been suspended all the time: then the words mean nothing.
    pub(crate) fn scan_stack(&self, mut f: impl FnMut(usize)) -> bool {
        let (id, status) = (self.id(), self.status());
        if !matches!(status, Status::Waiting(_) | Status::Runnable) || !self.has_stack_hint() {
            return false;
        }
        let Some((low, high)) = self.stack_bounds() else { return false };
        let sp = self.sp_hint();
        // The TLS block is at the top.
        let end = sp.wrapping_add(self.stack_depth_hint());
        if !sp.is_multiple_of(8) || sp < low || end > high || end < sp {
            return false;
        }
        for address in (sp..end & !7).step_by(8) {
            // SAFETY: inside the stack's mapping, which is never unmapped. If the goroutine runs
            // meanwhile, the value may be torn, and the caller learns that from the result.
            f(unsafe { (address as *const usize).read_volatile() });
        }
        // A goroutine that has begun to run meanwhile is seen; on aarch64 perhaps a moment too late,
        // because a barrier at each switch would cost more than a wrong word in a report.
        std::sync::atomic::fence(Ordering::Acquire);
        self.status() == status && self.sp_hint() == sp && self.id() == id
    }

    /// Returns whether it is a carrier of tasks.
    pub(crate) fn is_carrier_hint(&self) -> bool {
        self.head.is_carrier()
    }

    /// Returns the task of a carrier.
    pub(crate) fn task_hint(&self) -> Option<&'static Task> {
        // SAFETY: as in `sp_hint`; null or a task, which is never freed.
        unsafe { self.task.as_ptr().read_volatile() }
    }

    /// Returns the stack pointer with which it began, on the thread that runs it.
    pub(crate) fn stack_top_hint(&self) -> Option<usize> {
        // SAFETY: only the thread that runs the goroutine replaces the stack. A signal handler may
        // interrupt that; the stack is one word, and its memory is never unmapped.
        let stack = unsafe { (*self.stack.as_ptr()).as_ref() };
        stack.map(|stack| stack.bounds().1)
    }

    /// Returns the bounds of its stack: the slot of the stack arena that contains its stack
    /// pointer.
    pub(crate) fn stack_bounds(&self) -> Option<(usize, usize)> {
        crate::mem::slot_at(self.sp_hint()).map(|slot| (slot.low, slot.high))
    }

    /// Copies its name into `buffer`, as far as it fits. Returns the number of bytes copied, or
    /// None if it has no name.
    pub(crate) fn copy_name(&self, buffer: &mut [u8]) -> Option<usize> {
        with_names(|| {
            let name = self.name()?;
            let len = name.len().min(buffer.len());
            buffer[..len].copy_from_slice(&name.as_bytes()[..len]);
            Some(len)
        })
    }

    /// Returns the name of its closure's type, and where it was started.
    pub(crate) fn origin(&self) -> (&'static str, &'static Location<'static>) {
        // SAFETY: as in `sp_hint`; both are references to statics, one word each.
        unsafe {
            let body = self.body.as_ptr().read_volatile();
            ((body.type_name)(), self.created_at.as_ptr().read_volatile())
        }
    }
}

/// Dead Gs that no P keeps. One list for the process, because a G may serve any runtime.
static CENTRAL_FREE: Lock<RunList> = Lock::new(RunList::new());

/// Held by a dump while it reads a name, and by a thread that writes or removes one. The goroutine
/// and its handle read the name without it: while they exist, it is not removed.
static NAMES: Lock<()> = Lock::new(());

/// Calls `f` with [`NAMES`] locked. A goroutine enters the runtime for that, so it is not preempted
/// while it holds the lock.
pub(crate) fn with_names<T>(f: impl FnOnce() -> T) -> T {
    let rt = Rt::enter();
    let names = NAMES.lock();
    let result = f();
    drop(names);
    if let Some(rt) = rt {
        rt.leave_without_yield();
    }
    result
}

/// Every slab that was made, newest first. A dump finds all goroutines here.
pub(crate) static SLABS: AtomicPtr<Slab> = AtomicPtr::new(null_mut());

/// Gs that were made together. Never unmapped (invariant 1).
pub(crate) struct Slab {
    gs: [G; GS_PER_SLAB],
    /// The slab that was made before this one, or null.
    next: *mut Slab,
}

/// A P's list of dead Gs.
pub(crate) struct FreeGs(RunList);

impl FreeGs {
    pub(crate) const fn new() -> Self {
        FreeGs(RunList::new())
    }

    /// Takes a dead G from this list, or else from the central list, or else from a new slab.
    #[inline]
    pub(crate) fn take(&mut self) -> io::Result<&'static G> {
        match self.0.pop_g() {
            Some(g) => Ok(g),
            None => self.take_slow(),
        }
    }

    #[cold]
    fn take_slow(&mut self) -> io::Result<&'static G> {
        let mut central = CENTRAL_FREE.lock();
        for _ in 0..LOCAL_FREE_MAX / 2 {
            let Some(g) = central.pop_g() else { break };
            self.0.push_front(g);
        }
        drop(central);
        if self.0.is_empty() {
            grow(&mut self.0)?;
        }
        Ok(self.0.pop_g().expect("grown just now"))
    }

    /// Puts back a G that is dead, has no name and no handle.
    #[inline]
    pub(crate) fn put(&mut self, g: &'static G) {
        self.0.push_front(g);
        if self.0.len() > LOCAL_FREE_MAX {
            self.spill_slow(LOCAL_FREE_MAX / 2);
        }
    }

    /// Moves all Gs except `keep` of them to the central list.
    #[cold]
    pub(crate) fn spill_slow(&mut self, keep: usize) {
        let mut spilled = RunList::new();
        while self.0.len() > keep {
            let Some(g) = self.0.pop_g() else { break };
            spilled.push_back(g);
        }
        CENTRAL_FREE.lock().append(&mut spilled);
    }
}

/// Takes a dead G from the central list or a new slab, for a thread without a P.
pub(crate) fn take_central() -> io::Result<&'static G> {
    let mut free = CENTRAL_FREE.lock();
    if free.is_empty() {
        let mut fresh = RunList::new();
        drop(free);
        grow(&mut fresh)?;
        free = CENTRAL_FREE.lock();
        free.append(&mut fresh);
    }
    Ok(free.pop_g().expect("not empty, or grown just now"))
}

/// Puts a dead G into the central list, for a thread without a P.
pub(crate) fn put_central(g: &'static G) {
    CENTRAL_FREE.lock().push_front(g);
}

/// Makes a slab and appends its Gs to `free`. The memory comes from mmap, not from malloc: a
/// goroutine that was preempted inside malloc may hold malloc's lock and need the P that this
/// thread owns (sched/mod.rs, rule 2).
#[cold]
fn grow(free: &mut RunList) -> io::Result<()> {
    // SAFETY: a new private mapping, anywhere.
    let memory =
        unsafe { syscalls::mmap_anonymous(null_mut(), size_of::<Slab>(), syscalls::READ_WRITE, 0) };
    // The error has no text of its own, because that would be allocated.
    let slab: *mut Slab = memory?.cast();
    for i in 0..GS_PER_SLAB {
        // SAFETY: inside new memory of the size of a Slab, page-aligned and not yet shared.
        unsafe { (&raw mut (*slab).gs[i]).write(G::new()) };
    }
    let mut head = SLABS.load(Ordering::Relaxed);
    loop {
        // SAFETY: not yet shared.
        unsafe { (*slab).next = head };
        // Release: pairs with the Acquire in `for_each`.
        match SLABS.compare_exchange_weak(head, slab, Ordering::Release, Ordering::Relaxed) {
            Ok(_) => break,
            Err(now) => head = now,
        }
    }
    // SAFETY: never unmapped (invariant 1).
    for g in unsafe { &(*slab).gs } {
        free.push_back(g);
    }
    Ok(())
}

/// Where debuggers find the fields of Gs (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("slab.gs", offset_of!(Slab, gs)),
    ("slab.next", offset_of!(Slab, next)),
    ("slab.count", GS_PER_SLAB),
    ("g.size", size_of::<G>()),
    ("g.head", offset_of!(G, head)),
    ("g.sp", offset_of!(G, sp)),
    ("g.tp", offset_of!(G, tp)),
    ("g.state", offset_of!(G, state)),
    ("g.stopped_by_signal", offset_of!(G, stopped_by_signal)),
    ("g.stack", offset_of!(G, stack)),
    ("g.sched", offset_of!(G, sched)),
    ("g.body", offset_of!(G, body)),
    ("g.task", offset_of!(G, task)),
    ("g.id", offset_of!(G, id)),
    ("g.parent", offset_of!(G, parent)),
    ("g.join", offset_of!(G, join)),
    ("g.created_at", offset_of!(G, created_at)),
    ("g.name", offset_of!(G, name)),
    ("g.scope", offset_of!(G, scope)),
    ("g.waits_for", offset_of!(G, waits_for)),
    ("body.type_name", offset_of!(Body, type_name)),
];

/// Calls `f` with every G that was ever made, dead ones included. Of a G that it does not own, `f`
/// may read only the atomics and what the functions for dumps return.
pub(crate) fn for_each(f: &mut dyn FnMut(&'static G)) {
    // Acquire: pairs with the Release in `grow`, so the slab's Gs are initialised.
    let mut slab = SLABS.load(Ordering::Acquire);
    // SAFETY: slabs are never unmapped, and except for the Gs' own cells they do not change.
    while let Some(s) = unsafe { NonNull::new(slab).map(|s| s.as_ref()) } {
        s.gs.iter().for_each(&mut *f);
        slab = s.next;
    }
}
