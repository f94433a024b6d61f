//! What run queues hold: goroutines and tasks.
//!
//! A G and a `Task` begin with the same [`RunHead`], and a [`Runnable`] is the address of one of
//! them. Queues and the search for work handle Runnables alike; they differ only where one is about
//! to run: a goroutine is switched to, a task needs a carrier (`task/carrier.rs`).
//!
//! Invariants:
//! 1. A RunHead is the first field of a G or of a `Task`, as its `kind` says. Neither is ever
//!    freed.
//! 2. A Runnable has the provenance of the whole G or `Task`.
//! 3. The queue or list that contains a Runnable owns `link`, `woken` and `stopwatch`; outside of
//!    queues, its owner by `goroutine/state.rs` or `task/state.rs` does.

use crate::sched::g::G;
use crate::sched::task::Task;
use crate::sched::wait::reason::WaitReason;
use std::cell::Cell;
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// What a head belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum RunKind {
    Goroutine,
    /// A goroutine that polls tasks (`task/carrier.rs`).
    Carrier,
    Task,
}

/// The common beginning of a G and a `Task`.
#[repr(C)]
pub(crate) struct RunHead {
    /// The next one in the [`RunList`] that contains it.
    link: Cell<Option<Runnable>>,
    /// The runtime's coarse time, in milliseconds, when it began to wait. For dumps
    /// and the flight recorder.
    pub(crate) waiting_since_ms: AtomicU32,
    /// Why it waits: a [`WaitReason`]. For dumps.
    reason: AtomicU8,
    /// `Task` never changes; a G may be a carrier in one of its lives.
    kind: Cell<RunKind>,
    /// It became runnable because it was woken, not because it was started, yielded, or used up its
    /// slice.
    pub(crate) woken: Cell<bool>,
    /// The number of the stopwatch that runs until it runs, or 0 (`latency.rs`).
    pub(crate) stopwatch: Cell<u8>,
}

impl RunHead {
    pub(crate) fn new(kind: RunKind) -> RunHead {
        RunHead {
            link: Cell::new(None),
            waiting_since_ms: AtomicU32::new(0),
            reason: AtomicU8::new(0),
            kind: Cell::new(kind),
            woken: Cell::new(false),
            stopwatch: Cell::new(0),
        }
    }

    /// By the owner of a G that is about to begin a life: as `Goroutine` or as `Carrier`.
    #[inline(always)]
    pub(crate) fn set_kind(&self, kind: RunKind) {
        debug_assert!(kind != RunKind::Task && self.kind.get() != RunKind::Task);
        self.kind.set(kind);
    }

    #[inline(always)]
    pub(crate) fn is_carrier(&self) -> bool {
        self.kind.get() == RunKind::Carrier
    }

    pub(crate) fn reason(&self) -> WaitReason {
        WaitReason::from_u8(self.reason_code())
    }

    /// Returns the [`WaitReason`] as a number.
    #[inline(always)]
    pub(crate) fn reason_code(&self) -> u8 {
        self.reason.load(Ordering::Relaxed)
    }

    /// Stores why the goroutine or task is about to wait, and when, in the runtime's coarse time.
    #[inline]
    pub(crate) fn set_reason(&self, reason: WaitReason, coarse_ms: u32) {
        self.reason.store(reason as u8, Ordering::Relaxed);
        self.waiting_since_ms.store(coarse_ms, Ordering::Relaxed);
    }
}

/// Where debuggers find the fields of a head (`observe/layout.rs`).
pub(crate) const LAYOUT: &[(&str, usize)] = &[
    ("head.since_ms", offset_of!(RunHead, waiting_since_ms)),
    ("head.reason", offset_of!(RunHead, reason)),
    ("head.kind", offset_of!(RunHead, kind)),
    ("kind.carrier", RunKind::Carrier as usize),
];

/// A goroutine or a task, as queues see it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Runnable(NonNull<RunHead>);

/// A [`Runnable`] with its type.
pub(crate) enum Unpacked {
    Goroutine(&'static G),
    Task(&'static Task),
}

impl From<&'static G> for Runnable {
    #[inline(always)]
    fn from(g: &'static G) -> Runnable {
        Runnable(NonNull::from(g).cast())
    }
}

impl From<&'static Task> for Runnable {
    #[inline(always)]
    fn from(task: &'static Task) -> Runnable {
        Runnable(NonNull::from(task).cast())
    }
}

impl Runnable {
    /// Takes back what [`Runnable::as_item`] gave to a queue.
    ///
    /// # Safety
    /// `item` came from [`Runnable::as_item`].
    #[inline(always)]
    pub(crate) unsafe fn from_item(item: NonNull<RunHead>) -> Runnable {
        Runnable(item)
    }

    /// Returns the form in which a `RunQueue` holds it.
    #[inline(always)]
    pub(crate) fn as_item(self) -> NonNull<RunHead> {
        self.0
    }

    #[inline(always)]
    pub(crate) fn head(self) -> &'static RunHead {
        // SAFETY: invariant 1.
        unsafe { self.0.as_ref() }
    }

    #[inline(always)]
    pub(crate) fn unpack(self) -> Unpacked {
        // SAFETY: invariants 1 and 2.
        unsafe {
            match self.head().kind.get() {
                RunKind::Task => Unpacked::Task(self.0.cast::<Task>().as_ref()),
                RunKind::Goroutine | RunKind::Carrier => {
                    Unpacked::Goroutine(self.0.cast::<G>().as_ref())
                }
            }
        }
    }

    /// Returns the goroutine, or None if it is a task.
    #[inline(always)]
    pub(crate) fn goroutine(self) -> Option<&'static G> {
        match self.unpack() {
            Unpacked::Goroutine(g) => Some(g),
            Unpacked::Task(_) => None,
        }
    }
}

/// A first-in, first-out list, linked through the heads.
pub(crate) struct RunList {
    head: Option<Runnable>,
    tail: Option<Runnable>,
    len: usize,
}

// SAFETY: the list owns what is in it (invariant 3).
unsafe impl Send for RunList {}

impl RunList {
    pub(crate) const fn new() -> Self {
        RunList { head: None, tail: None, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn first(&self) -> Option<Runnable> {
        self.head
    }

    pub(crate) fn push_back(&mut self, item: impl Into<Runnable>) {
        let item = item.into();
        item.head().link.set(None);
        match self.tail {
            Some(tail) => tail.head().link.set(Some(item)),
            None => self.head = Some(item),
        }
        self.tail = Some(item);
        self.len += 1;
    }

    pub(crate) fn push_front(&mut self, item: impl Into<Runnable>) {
        let item = item.into();
        item.head().link.set(self.head);
        if self.head.is_none() {
            self.tail = Some(item);
        }
        self.head = Some(item);
        self.len += 1;
    }

    pub(crate) fn pop_front(&mut self) -> Option<Runnable> {
        let item = self.head?;
        self.head = item.head().link.get();
        if self.head.is_none() {
            self.tail = None;
        }
        self.len -= 1;
        Some(item)
    }

    /// As [`RunList::pop_front`], for a list that contains only goroutines.
    pub(crate) fn pop_g(&mut self) -> Option<&'static G> {
        self.pop_front()?.goroutine()
    }

    /// Returns whether `wanted` returns true for any of them.
    pub(crate) fn any(&self, wanted: impl Fn(Runnable) -> bool) -> bool {
        std::iter::successors(self.head, |item| item.head().link.get()).any(wanted)
    }

    /// Takes out the first one for which `wanted` returns true.
    pub(crate) fn remove_first(&mut self, wanted: impl Fn(Runnable) -> bool) -> Option<Runnable> {
        let mut before = RunList::new();
        let mut found = None;
        while let Some(item) = self.pop_front() {
            if wanted(item) {
                found = Some(item);
                break;
            }
            before.push_back(item);
        }
        self.prepend(&mut before);
        found
    }

    /// Moves all of `other` to the tail.
    pub(crate) fn append(&mut self, other: &mut RunList) {
        if other.is_empty() {
            return;
        }
        match self.tail {
            Some(tail) => tail.head().link.set(other.head),
            None => self.head = other.head,
        }
        self.tail = other.tail;
        self.len += other.len;
        *other = RunList::new();
    }

    /// Moves all of `other` to the head.
    pub(crate) fn prepend(&mut self, other: &mut RunList) {
        std::mem::swap(self, other);
        self.append(other);
    }
}
