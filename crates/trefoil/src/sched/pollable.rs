//! Descriptors: who waits for one to become readable or writable.
//!
//! A [`Pollable`] stands for one open descriptor. Users try their call without blocking first; only when the
//! kernel has nothing do they wait here ([`Pollable::wait`]) and try again:
//!
//! ```text
//!   user                                 poller (some thread without work, or sysmon)
//!   seen = edges                         epoll: fd is readable
//!   read → EAGAIN                        edges + 1, wake all who wait
//!   edges ≠ seen? read again
//!   else sleep in the list
//! ```
//! epoll reports edges, so nobody may sleep through one that came after his own read: neither the only
//! reader, nor a second one while the first was woken for the same edge and left data behind. The
//! comparison and the sleep are under the descriptor's lock, and so is the count.
//!
//! A descriptor is registered with the poller of the runtime whose goroutine first waits for it, both
//! directions at once, for as long as it is open. (Another runtime's goroutine registers it there too: an edge
//! is then reported twice, which does no harm.)
//!
//! Invariants:
//! 1. The memory of a Pollable is never freed, only reused; `tag` is its generation, and every event carries
//!    the tag it was registered with. So a late event finds its Pollable, or another life of it, and is
//!    dropped.
//! 2. Everything in `Inner` is behind the lock. Nobody is woken under it.
//! 3. `waiters` of a [`Poller`] counts goroutines that sleep here: while there are any, somebody polls.

use super::Sched;
use super::m::Rt;
use super::queue::{Batch, List, Node, Slept};
use super::reason::WaitReason;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::epoll::{Epoll, Event};
use crate::sys::lock::Lock;
use std::cell::UnsafeCell;
use std::io;
use std::os::fd::RawFd;
use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Bits of a pointer to a Pollable in an event's data; the tag is above.
const POINTER_BITS: u32 = 48;
/// Pollables allocated at once.
const SLAB: usize = 64;

/// A runtime's poller.
pub(crate) struct Poller {
    pub(crate) epoll: Epoll,
    opening: Lock<()>,
    pub(crate) waiters: AtomicU32,
    /// The keeper is blocked in the kernel there: nobody else needs to look.
    pub(crate) blocked: AtomicBool,
    /// When somebody last looked.
    pub(crate) last: AtomicU64,
}

impl Poller {
    /// A few bytes for each runtime, for ever: Pollables and threads may know it.
    pub(crate) fn leak() -> &'static Poller {
        Box::leak(Box::new(Poller {
            epoll: Epoll::new(),
            opening: Lock::new(()),
            waiters: AtomicU32::new(0),
            blocked: AtomicBool::new(false),
            last: AtomicU64::new(0),
        }))
    }

    /// Whether somebody waits for a descriptor.
    #[inline]
    pub(crate) fn is_wanted(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) != 0
    }

    fn open(&self) -> io::Result<()> {
        if self.epoll.is_open() {
            return Ok(());
        }
        let _one = self.opening.lock();
        self.epoll.open()
    }

    /// Looks, until `deadline` at most (0: does not wait). Who can go on is in the result.
    pub(crate) fn poll(&self, deadline: Nanos) -> Ready {
        let mut ready = Ready(Batch::new());
        if self.epoll.is_open() {
            self.epoll.wait(deadline, |event| Pollable::notify(event, &mut ready.0));
        }
        self.last.store(now(), Ordering::Relaxed);
        ready
    }
}

/// Goroutines that a look has found; they must be woken.
#[must_use = "they wait to be woken"]
pub(crate) struct Ready(Batch);

impl Ready {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.len() == 0
    }

    pub(crate) fn wake(self, here: Option<Rt>) {
        self.0.wake_all(here, LOOK_AGAIN);
    }
}

/// A direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Read = 0,
    Write = 1,
}

/// How a wait ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waited {
    /// Try again.
    Ready,
    TimedOut,
    Closed,
}

/// What a sleeper is told: to look, or that there is nothing to look at any more.
const LOOK_AGAIN: u32 = 0;
const CLOSED: u32 = 1;

fn not_pollable() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "this kind of file cannot be waited for")
}

/// See the head of the file.
#[repr(align(64))]
pub(crate) struct Pollable {
    tag: AtomicU32,
    sides: [SideState; 2],
    inner: Lock<Inner>,
    /// Next in the free list; under its lock.
    next: UnsafeCell<*const Pollable>,
}

// SAFETY: `next` is guarded by the lock of `FREE`.
unsafe impl Sync for Pollable {}

struct Inner {
    /// Who waits, by direction.
    lists: [List; 2],
    closed: bool,
    /// Where it is registered last.
    poller: *const Poller,
    /// How many wait by `wait_armed`, or are about to, by direction.
    #[cfg(feature = "std")]
    armed: [u32; 2],
}

// SAFETY: the pointer is to a Poller, which is Sync and never freed.
unsafe impl Send for Inner {}

/// What belongs to a direction.
struct SideState {
    /// How often the poller has reported it. Changed under the lock.
    edges: AtomicU32,
    /// Until when calls may wait. Changed under the lock.
    deadline: AtomicU64,
}

impl SideState {
    const fn new() -> SideState {
        SideState { edges: AtomicU32::new(0), deadline: AtomicU64::new(NEVER) }
    }

    fn deadline(&self) -> Nanos {
        self.deadline.load(Ordering::Relaxed)
    }
}

struct Free(*const Pollable);
// SAFETY: a list of Pollables that nobody uses.
unsafe impl Send for Free {}
static FREE: Lock<Free> = Lock::new(Free(null()));

impl Pollable {
    /// One for a descriptor that was just opened. Allocates: not inside the runtime.
    pub(crate) fn new() -> &'static Pollable {
        loop {
            {
                let mut free = FREE.lock();
                // SAFETY: null, or a Pollable in the list; never freed.
                if let Some(first) = unsafe { free.0.as_ref() } {
                    // SAFETY: under the list's lock.
                    free.0 = unsafe { *first.next.get() };
                    return first;
                }
            }
            let slab: Vec<Pollable> = (0..SLAB)
                .map(|_| Pollable {
                    tag: AtomicU32::new(0),
                    sides: [const { SideState::new() }; 2],
                    inner: Lock::new(Inner {
                        lists: [List::new(); 2],
                        closed: false,
                        poller: null(),
                        #[cfg(feature = "std")]
                        armed: [0; 2],
                    }),
                    next: UnsafeCell::new(null()),
                })
                .collect();
            for one in slab.leak() {
                one.give_back();
            }
        }
    }

    fn give_back(&'static self) {
        let mut free = FREE.lock();
        // SAFETY: under the list's lock.
        unsafe { *self.next.get() = free.0 };
        free.0 = self;
    }

    /// The descriptor is closed (or about to be, by its owner) and nobody waits. Ends this life.
    pub(crate) fn free(&'static self) {
        {
            let mut inner = self.inner.lock();
            // Only those may be left in there that are never resumed.
            inner.lists = [List::new(); 2];
            for side in &self.sides {
                side.deadline.store(NEVER, Ordering::Relaxed);
            }
            inner.closed = false;
            inner.poller = null();
            self.tag.store(
                self.tag.load(Ordering::Relaxed).wrapping_add(1) & 0xffff,
                Ordering::Relaxed,
            );
        }
        self.give_back();
    }

    fn data(&'static self) -> u64 {
        let address = std::ptr::from_ref(self).expose_provenance() as u64;
        debug_assert!(address >> POINTER_BITS == 0);
        address | u64::from(self.tag.load(Ordering::Relaxed)) << POINTER_BITS
    }

    /// An edge: counts it, and takes those who wait.
    fn notify(event: Event, woken: &mut Batch) {
        let address = (event.data & ((1 << POINTER_BITS) - 1)) as usize;
        // SAFETY: made by `data` from a Pollable; never freed (invariant 1).
        let this = unsafe { &*std::ptr::with_exposed_provenance::<Pollable>(address) };
        let mut inner = this.inner.lock();
        if u64::from(this.tag.load(Ordering::Relaxed)) != event.data >> POINTER_BITS {
            return;
        }
        for (side, is) in [event.readable, event.writable].into_iter().enumerate() {
            if is {
                // Release: who sees the count finds what the kernel has reported.
                this.sides[side].edges.fetch_add(1, Ordering::Release);
                while let Some(taken) = inner.lists[side].take_first() {
                    woken.push(taken);
                }
            }
        }
    }

    /// As [`Pollable::wait`], for a descriptor that may have been closed and opened anew without our knowledge: it
    /// is registered each time, and reported if it is ready now. Only for the directions that are waited for: a
    /// socket is nearly always writable, and each report costs.
    #[cfg(feature = "std")]
    pub(crate) fn wait_armed(
        &'static self,
        sched: &Sched,
        fd: RawFd,
        side: Side,
        limit: Nanos,
        seen: u32,
    ) -> io::Result<Waited> {
        let poller = sched.poller;
        poller.open()?;
        super::queue::inside(|_| {
            // Under the lock: of two who arm, the second one knows of the first.
            let mut inner = self.inner.lock();
            inner.armed[side as usize] += 1;
            let [read, write] = inner.armed.map(|n| n > 0);
            let done = poller.epoll.arm(fd, self.data(), read, write);
            match done {
                Ok(true) => inner.poller = poller,
                _ => inner.armed[side as usize] -= 1,
            }
            done
        })
        .and_then(|known| if known { Ok(()) } else { Err(not_pollable()) })?;
        let waited = self.wait(sched, fd, side, limit, seen);
        super::queue::inside(|_| self.inner.lock().armed[side as usize] -= 1);
        waited
    }

    /// The descriptor is closed: everybody who waits looks again, or is told so.
    #[cfg(feature = "std")]
    pub(crate) fn interrupt(&self, fd: RawFd, tell: bool) {
        super::queue::inside(|here| {
            let (readers, writers, poller) = {
                let mut inner = self.inner.lock();
                let poller = inner.poller;
                // Release: who is about to wait sees the count, and looks again.
                self.sides.iter().for_each(|side| _ = side.edges.fetch_add(1, Ordering::Release));
                let [read, write] = &mut inner.lists;
                (read.take_all(), write.take_all(), poller)
            };
            // SAFETY: null, or a Poller; those are never freed.
            if let Some(poller) = unsafe { poller.as_ref() }
                && (readers.len() > 0 || writers.len() > 0)
            {
                poller.epoll.remove(fd);
            }
            let word = if tell { CLOSED } else { LOOK_AGAIN };
            readers.wake_all(here, word);
            writers.wake_all(here, word);
        });
    }

    /// How many edges there have been: to be asked before an attempt, for [`Pollable::wait`] after it.
    #[inline]
    pub(crate) fn edges(&self, side: Side) -> u32 {
        self.sides[side as usize].edges.load(Ordering::Acquire)
    }

    /// Waits until there are more than the edges `seen`, until `limit`, or its own deadline for that side.
    /// `sched` is the caller's runtime, or the one that polls for a plain thread.
    ///
    /// # Errors
    /// When it cannot be polled: out of memory or of watches; regular files.
    pub(crate) fn wait(
        &'static self,
        sched: &Sched,
        fd: RawFd,
        side: Side,
        limit: Nanos,
        seen: u32,
    ) -> io::Result<Waited> {
        let poller = self.register(sched, fd)?;
        let state = &self.sides[side as usize];
        let deadline = {
            let inner = self.inner.lock();
            if inner.closed {
                return Ok(Waited::Closed);
            }
            let deadline = state.deadline().min(limit);
            if deadline != NEVER && deadline <= now() {
                return Ok(Waited::TimedOut);
            }
            if self.edges(side) != seen {
                return Ok(Waited::Ready);
            }
            deadline
        };
        let node = Node::new(0);
        let first = poller.waiters.fetch_add(1, Ordering::SeqCst) == 0;
        if first {
            sched.want_poller();
        }
        let slept = node.sleep(
            WaitReason::IoWait,
            deadline,
            |_| {
                let mut inner = self.inner.lock();
                // Anything that changed since we looked: look again.
                let moved = state.deadline().min(limit) != deadline;
                if inner.closed || moved || self.edges(side) != seen {
                    return false;
                }
                inner.lists[side as usize].push_back(&node);
                true
            },
            |_| {
                self.inner.lock().lists[side as usize].remove(&node);
            },
        );
        poller.waiters.fetch_sub(1, Ordering::SeqCst);
        let inner = self.inner.lock();
        let over = state.deadline().min(limit);
        Ok(if inner.closed || slept == Slept::Woken(CLOSED) {
            Waited::Closed
        } else if slept == Slept::TimedOut && over <= now() {
            Waited::TimedOut
        } else {
            Waited::Ready
        })
    }

    /// Sees to it that the poller knows the descriptor.
    fn register(&'static self, sched: &Sched, fd: RawFd) -> io::Result<&'static Poller> {
        let poller = sched.poller;
        if std::ptr::eq(self.inner.lock().poller, poller) {
            return Ok(poller);
        }
        poller.open()?;
        if !poller.epoll.add(fd, self.data())? {
            return Err(not_pollable());
        }
        self.inner.lock().poller = poller;
        Ok(poller)
    }

    /// Whether calls on this side are too late already.
    pub(crate) fn is_late(&self, side: Side) -> bool {
        let deadline = self.sides[side as usize].deadline();
        deadline != NEVER && deadline <= now()
    }

    /// Until when calls on this side may wait; those who wait look again.
    pub(crate) fn set_deadline(&self, side: Side, deadline: Nanos) {
        super::queue::inside(|here| {
            let woken = {
                let mut inner = self.inner.lock();
                self.sides[side as usize].deadline.store(deadline, Ordering::Relaxed);
                inner.lists[side as usize].take_all()
            };
            woken.wake_all(here, LOOK_AGAIN);
        });
    }

    /// Those who wait look again.
    pub(crate) fn nudge(&self) {
        super::queue::inside(|here| {
            for side in [Side::Read, Side::Write] {
                let woken = {
                    let mut inner = self.inner.lock();
                    // Release: who sees the count sees why.
                    self.sides[side as usize].edges.fetch_add(1, Ordering::Release);
                    inner.lists[side as usize].take_all()
                };
                woken.wake_all(here, LOOK_AGAIN);
            }
        });
    }

    /// The descriptor goes elsewhere: the poller is not to know it any more.
    pub(crate) fn forget(&self, fd: RawFd) {
        let poller = self.inner.lock().poller;
        // SAFETY: null, or a Poller; those are never freed.
        if let Some(poller) = unsafe { poller.as_ref() } {
            poller.epoll.remove(fd);
        }
    }

    /// Everybody who waits gives up, now and in future.
    pub(crate) fn close(&self) {
        super::queue::inside(|here| {
            let (readers, writers) = {
                let mut inner = self.inner.lock();
                inner.closed = true;
                let [read, write] = &mut inner.lists;
                (read.take_all(), write.take_all())
            };
            readers.wake_all(here, LOOK_AGAIN);
            writers.wake_all(here, LOOK_AGAIN);
        });
    }
}
