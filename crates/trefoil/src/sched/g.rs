//! G: a goroutine.
//!
//! A G is born when `go` is called, gets a stack and thread-local storage when it first runs, and its
//! memory returns to a free list when both the goroutine and its handle are done with it.
//!
//! Invariants:
//! 1. The memory of a G is never given back to the allocator: a stale `&G` may read its atomics.
//! 2. Everything in a `Cell` belongs to the owner that the table in `state.rs` names. Ownership is
//!    passed by the Release and Acquire of the queues, of park and notify, and of the join cell.
//!
//! Rejected: Go's way of an unlock function run after the switch. Letting the waker leave a note
//! (`Notified`) needs no callback, lets a lock be released before the switch, and lets a goroutine
//! that was already woken skip the switch altogether.

use crate::mem::Stack;
use crate::sched::goroutine::body::Body;
use crate::sched::goroutine::join::JoinCell;
use crate::sched::goroutine::state::{GoroutineState, Notify, StateSnapshot};
use crate::sched::m::{M, Rt};
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Sched, goroutine::scope::ScopeData};
use crate::sys::lock::Lock;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::mem::MaybeUninit;
use std::panic::Location;
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// Bytes of closure or result that live in the G itself; larger ones are boxed.
pub(crate) const INLINE_BYTES: usize = 64;
/// Gs allocated at once.
const SLAB: usize = 128;
/// Free Gs a P keeps; at the limit half go to the central list. Go keeps 64; but a batch of a thousand
/// goroutines then goes through the central lock thirty times.
const LOCAL_FREE_MAX: usize = 512;

/// Room for a closure, then its result.
#[repr(C, align(16))]
pub(crate) struct Payload(pub(crate) UnsafeCell<[MaybeUninit<u8>; INLINE_BYTES]>);

/// A goroutine.
#[repr(C, align(64))]
pub(crate) struct G {
    // First line: what a switch touches.
    /// Stack pointer while suspended.
    pub(crate) sp: Cell<*mut u8>,
    /// Thread pointer: its TLS block.
    pub(crate) tp: Cell<*mut u8>,
    /// What it is doing; see `state.rs`.
    pub(crate) state: GoroutineState,
    reason: AtomicU8,
    pub(crate) abort_on_panic: Cell<bool>,
    /// It was stopped by a signal inside libc or the loader, and may have one of their locks (`stop.rs`).
    pub(crate) stopped_in_libc: Cell<bool>,
    /// It was stopped by a signal, at any instruction, and may hold locks of the whole process (`stop.rs`).
    pub(crate) stopped_by_signal: Cell<bool>,
    /// It waits, for a lock or a P, and may hold a lock of the whole process (`stop.rs`).
    pub(crate) waits_as_holder: AtomicBool,
    /// It was woken by the owner of a lock, and has not run since (`stop.rs`).
    pub(crate) promised: AtomicBool,
    /// It became runnable because it was woken, not because it was started, has yielded or used up its slice.
    pub(crate) woken: Cell<bool>,
    /// How many `no_preempt` guards are alive. Read by the preemption handler on its own thread.
    pub(crate) no_preempt: Cell<u16>,
    /// Next in a queue or free list. Owned by that list.
    pub(crate) link: Cell<*const G>,
    pub(crate) stack: Cell<Option<Stack>>,
    pub(crate) sched: Cell<*const Sched>,
    /// The thread that it is locked to (`locked.rs`).
    pub(crate) locked: Cell<Option<&'static M>>,
    pub(crate) join: JoinCell,
    pub(crate) body: Cell<&'static Body>,
    /// Who ends the present wait; see `wait.rs`.
    pub(crate) claim: AtomicU64,

    pub(crate) payload: Payload,

    // Cold.
    id: AtomicU64,
    parent: AtomicU64,
    pub(crate) lock_depth: Cell<u32>,
    pub(crate) scope: Cell<*const ScopeData>,
    pub(crate) created_at: Cell<&'static Location<'static>>,
    name: UnsafeCell<Option<Box<str>>>,
    /// Milliseconds of the runtime's clock when it began to wait; for dumps.
    pub(crate) waiting_since_ms: AtomicU32,
}

// SAFETY: invariant 2 says who may touch which cell; the rest are atomics.
unsafe impl Sync for G {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for G {}

/// A state as traces and dumps show it.
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
            reason: AtomicU8::new(0),
            abort_on_panic: Cell::new(false),
            stopped_in_libc: Cell::new(false),
            stopped_by_signal: Cell::new(false),
            waits_as_holder: AtomicBool::new(false),
            promised: AtomicBool::new(false),
            woken: Cell::new(false),
            no_preempt: Cell::new(0),
            locked: Cell::new(None),
            lock_depth: Cell::new(0),
            link: Cell::new(null()),
            stack: Cell::new(None),
            sched: Cell::new(null()),
            join: JoinCell::new(),
            body: Cell::new(Body::NONE),
            claim: AtomicU64::new(0),
            payload: Payload(UnsafeCell::new([MaybeUninit::uninit(); INLINE_BYTES])),
            id: AtomicU64::new(0),
            parent: AtomicU64::new(0),
            scope: Cell::new(null()),
            created_at: Cell::new(Location::caller()),
            name: UnsafeCell::new(None),
            waiting_since_ms: AtomicU32::new(0),
        }
    }

    pub(crate) fn id(&self) -> u64 {
        self.id.load(Ordering::Relaxed)
    }

    pub(crate) fn parent(&self) -> u64 {
        self.parent.load(Ordering::Relaxed)
    }

    /// The name, which never changes during the goroutine's life.
    pub(crate) fn name(&self) -> Option<&str> {
        // SAFETY: written by `init_identity` before the G is shared, cleared by `forget_name` after everyone
        // who could call this (the goroutine, its handle, a dump under the lock) is gone.
        unsafe { (*self.name.get()).as_deref() }
    }

    /// Dead → owned by a spawner: identity for a new life.
    pub(crate) fn init_identity(&self, id: u64, parent: u64, name: Option<Box<str>>) {
        debug_assert_eq!(self.state.snapshot(), StateSnapshot::Dead);
        self.id.store(id, Ordering::Relaxed);
        self.parent.store(parent, Ordering::Relaxed);
        // SAFETY: the spawner took this G from a free list and owns it (invariant 2). A dump skips dead
        // Gs, and names come and go under the lock.
        unsafe {
            if name.is_some() {
                let _reading = NAMES.lock();
                *self.name.get() = name;
            }
        }
        self.join.reset();
    }

    /// The last owner clears what the life left behind, outside the runtime (it frees memory).
    pub(crate) fn forget_name(&self) {
        // SAFETY: the last owner: only a dump may still read it, under the lock.
        if unsafe { (*self.name.get()).is_none() } {
            return;
        }
        let rt = Rt::enter();
        let reading = NAMES.lock();
        // SAFETY: as above, and we hold the lock.
        let name = unsafe { (*self.name.get()).take() };
        drop(reading);
        if let Some(rt) = rt {
            rt.leave_now();
        }
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
        WaitReason::from_u8(self.reason.load(Ordering::Relaxed))
    }

    /// Running: says why it is about to park, and when (in the runtime's coarse time).
    #[inline]
    pub(crate) fn set_reason(&self, reason: WaitReason, coarse_ms: u32) {
        self.reason.store(reason as u8, Ordering::Relaxed);
        self.waiting_since_ms.store(coarse_ms, Ordering::Relaxed);
    }

    /// Waiting → Runnable, or Running → Notified, by the one waker. True: enqueue it.
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
}

/// What a dump reads of a goroutine that it does not own: copies that may be out of date.
impl G {
    pub(crate) fn sp_hint(&self) -> usize {
        // SAFETY: one aligned word of memory that is never freed.
        unsafe { self.sp.as_ptr().read_volatile() as usize }
    }

    /// On the goroutine's thread: whether the address lies on its stack.
    pub(crate) fn has_on_stack(&self, address: usize) -> bool {
        // SAFETY: the handle is read in place; only the goroutine's own thread replaces it.
        let stack = unsafe { (*self.stack.as_ptr()).as_ref() };
        stack.is_some_and(|stack| {
            let (low, high) = stack.bounds();
            (low..high).contains(&address)
        })
    }

    /// Whether it has begun to run. A look in passing.
    pub(crate) fn has_stack_hint(&self) -> bool {
        // SAFETY: as sp_hint.
        unsafe { !self.tp.as_ptr().read_volatile().is_null() }
    }

    pub(crate) fn sched_hint(&self) -> *const Sched {
        // SAFETY: as sp_hint.
        unsafe { self.sched.as_ptr().read_volatile() }
    }

    /// Bounds of its stack, from the arena: the slot that its stack pointer lies in.
    pub(crate) fn stack_bounds(&self) -> Option<(usize, usize)> {
        crate::mem::slot_at(self.sp_hint()).map(|slot| (slot.low, slot.high))
    }

    /// Copies its name into `buffer`; the length, if it has one.
    pub(crate) fn copy_name(&self, buffer: &mut [u8]) -> Option<usize> {
        let rt = Rt::enter();
        let reading = NAMES.lock();
        let copied = self.name().map(|name| {
            let len = name.len().min(buffer.len());
            buffer[..len].copy_from_slice(&name.as_bytes()[..len]);
            len
        });
        drop(reading);
        if let Some(rt) = rt {
            rt.leave_now();
        }
        copied
    }

    /// The function whose closure it runs, and where it was started.
    pub(crate) fn origin(&self) -> (&'static str, &'static Location<'static>) {
        // SAFETY: as sp_hint; both are references to statics, whole words.
        unsafe {
            let body = self.body.as_ptr().read_volatile();
            ((body.type_name)(), self.created_at.as_ptr().read_volatile())
        }
    }
}

/// An intrusive first-in first-out list of Gs, through `link`.
pub(crate) struct GList {
    head: *const G,
    tail: *const G,
    len: usize,
}

// SAFETY: the list owns the Gs in it (invariant 2).
unsafe impl Send for GList {}

impl GList {
    pub(crate) const fn new() -> Self {
        GList { head: null(), tail: null(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn push_back(&mut self, g: &'static G) {
        g.link.set(null());
        // SAFETY: tail is in this list, so it is ours and alive (invariants 1, 2).
        match unsafe { self.tail.as_ref() } {
            Some(tail) => tail.link.set(g),
            None => self.head = g,
        }
        self.tail = g;
        self.len += 1;
    }

    pub(crate) fn push_front(&mut self, g: &'static G) {
        g.link.set(self.head);
        if self.head.is_null() {
            self.tail = g;
        }
        self.head = g;
        self.len += 1;
    }

    pub(crate) fn pop_front(&mut self) -> Option<&'static G> {
        // SAFETY: as push_back.
        let g: &'static G = unsafe { self.head.as_ref()? };
        self.head = g.link.get();
        if self.head.is_null() {
            self.tail = null();
        }
        self.len -= 1;
        Some(g)
    }

    /// Takes out the first that is `wanted`; looks at those before it.
    pub(crate) fn remove_first(&mut self, wanted: impl Fn(&G) -> bool) -> Option<&'static G> {
        let mut before = GList::new();
        let mut found = None;
        while let Some(g) = self.pop_front() {
            if wanted(g) {
                found = Some(g);
                break;
            }
            before.push_back(g);
        }
        self.prepend(&mut before);
        found
    }

    /// Moves all of `other` behind our own.
    pub(crate) fn append(&mut self, other: &mut GList) {
        if other.is_empty() {
            return;
        }
        // SAFETY: as push_back.
        match unsafe { self.tail.as_ref() } {
            Some(tail) => tail.link.set(other.head),
            None => self.head = other.head,
        }
        self.tail = other.tail;
        self.len += other.len;
        *other = GList::new();
    }

    /// Moves all of `other` before our own.
    pub(crate) fn prepend(&mut self, other: &mut GList) {
        std::mem::swap(self, other);
        self.append(other);
    }
}

/// Dead Gs that no P keeps. One list for the process: a G serves any runtime.
static CENTRAL_FREE: Lock<GList> = Lock::new(GList::new());

/// Held by a dump while it reads a name, and by who takes one away. (`name` itself needs no lock: who
/// calls it keeps the goroutine's identity alive.)
static NAMES: Lock<()> = Lock::new(());

/// Every slab ever made, newest first: how a dump finds all goroutines.
static SLABS: AtomicPtr<Slab> = AtomicPtr::new(null_mut());

struct Slab {
    gs: [G; SLAB],
    next: *mut Slab,
}

/// A P's dead Gs.
pub(crate) struct FreeGs(GList);

impl FreeGs {
    pub(crate) const fn new() -> Self {
        FreeGs(GList::new())
    }

    #[inline]
    pub(crate) fn take(&mut self) -> io::Result<&'static G> {
        match self.0.pop_front() {
            Some(g) => Ok(g),
            None => self.take_slow(),
        }
    }

    #[cold]
    fn take_slow(&mut self) -> io::Result<&'static G> {
        let mut central = CENTRAL_FREE.lock();
        for _ in 0..LOCAL_FREE_MAX / 2 {
            let Some(g) = central.pop_front() else { break };
            self.0.push_front(g);
        }
        drop(central);
        if self.0.is_empty() {
            grow(&mut self.0)?;
        }
        Ok(self.0.pop_front().expect("grown just now"))
    }

    /// Takes back a G that is dead, nameless, and that nobody refers to.
    #[inline]
    pub(crate) fn give(&mut self, g: &'static G) {
        self.0.push_front(g);
        if self.0.len() > LOCAL_FREE_MAX {
            self.spill_slow(LOCAL_FREE_MAX / 2);
        }
    }

    #[cold]
    pub(crate) fn spill_slow(&mut self, keep: usize) {
        let mut spilled = GList::new();
        while self.0.len() > keep {
            let Some(g) = self.0.pop_front() else { break };
            spilled.push_back(g);
        }
        CENTRAL_FREE.lock().append(&mut spilled);
    }
}

/// For threads without a P.
pub(crate) fn take_central() -> io::Result<&'static G> {
    let mut free = CENTRAL_FREE.lock();
    if free.is_empty() {
        let mut fresh = GList::new();
        drop(free);
        grow(&mut fresh)?;
        free = CENTRAL_FREE.lock();
        free.append(&mut fresh);
    }
    Ok(free.pop_front().expect("grown just now, or others gave back"))
}

/// For threads without a P.
pub(crate) fn give_central(g: &'static G) {
    CENTRAL_FREE.lock().push_front(g);
}

/// From mmap, not malloc: a goroutine preempted inside malloc may hold malloc's lock, and we hold a P
/// that it needs to go on (sched/mod.rs, rule 2).
#[cold]
fn grow(free: &mut GList) -> io::Result<()> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    // SAFETY: a new private mapping, anywhere.
    let memory = unsafe {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        mmap_anonymous(null_mut(), size_of::<Slab>(), prot, MapFlags::PRIVATE)
    };
    // An error without a text of its own: nothing is allocated here.
    let slab: *mut Slab = memory?.cast();
    for i in 0..SLAB {
        // SAFETY: inside fresh memory of the size of a Slab, page-aligned; not yet shared.
        unsafe { (&raw mut (*slab).gs[i]).write(G::new()) };
    }
    let mut head = SLABS.load(Ordering::Relaxed);
    loop {
        // SAFETY: not yet shared.
        unsafe { (*slab).next = head };
        // Release: pairs with for_each's Acquire.
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

/// Every G there ever was, dead ones included. Only atomics may be read of those one does not own.
pub(crate) fn for_each(f: &mut dyn FnMut(&'static G)) {
    let mut slab = SLABS.load(Ordering::Acquire);
    // SAFETY: slabs are leaked and immutable but for the Gs' own cells.
    while let Some(s) = unsafe { NonNull::new(slab).map(|s| s.as_ref()) } {
        s.gs.iter().for_each(&mut *f);
        slab = s.next;
    }
}
