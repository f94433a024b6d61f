//! A descriptor that goroutines wait for: its edges, its waiters.
//!
//! A [`Pollable`] stands for one open descriptor. epoll reports edges, so no goroutine may sleep
//! through an edge that came after its own `read`: neither the only reader, nor a second reader
//! while the first was woken by the same edge and left data behind. Therefore the poller counts the
//! edges. A goroutine reads the count before its attempt, and sleeps only if it is unchanged. The
//! comparison, the sleep and the count are under the descriptor's lock.
//!
//! A descriptor is registered with the poller of the runtime whose goroutine first waits for it,
//! for both directions at once, for as long as it is open. (If a goroutine of another runtime waits
//! for it, it is registered there, too. Then an edge is reported twice, which does no harm.) The
//! shard is chosen in `registration.rs`.
//!
//! # Drained streams
//! A read of a TCP stream that returns fewer bytes than asked for has emptied the kernel's queue.
//! Bytes that come later cause an edge. So the reader records the number of edges that it had seen
//! before the read ([`Pollable::note_drained`]), and as long as the number is the same, and not for
//! longer than [`DRAINED_NANOS`], the next read waits at once instead of calling the kernel for an
//! `EAGAIN`. (Later there may be bytes that no thread has polled for yet. The kernel would return
//! them at once, while a goroutine that waits comes behind those that run.) This is wrong once the
//! stream has ended or failed, because no edge follows, and once it has had urgent data, at which a
//! read stops early. So epoll reports these, and one report is enough for the rest of the
//! connection (`special`). If the report comes after the read, it is an edge.
//!
//! Invariants:
//! 1. The memory of a Pollable is never freed, only reused. `tag` is its generation, and every
//!    event carries the tag that was current at the registration. So an event that comes late finds
//!    its Pollable, or finds a later generation and is dropped.
//! 2. The lock guards everything in [`PollableState`]. No waiter is woken while it is held.
//! 3. While a goroutine or task is in a list, the registration is in the shard in which it was
//!    counted as a waiter: a registration moves, and a waiter enters a list, under the lock.

use crate::sched::Sched;
#[cfg(feature = "std")]
use crate::sched::m::Rt;
use crate::sched::netpoll::poller::Shard;
use crate::sched::netpoll::task_waiters::TaskWaiters;
use crate::sched::runnable::RunList;
use crate::sched::simulation::WaitOutside;
use crate::sched::task::waker;
use crate::sched::wait::inside;
use crate::sched::wait::list::{Batch, List, Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::epoll::Event;
use crate::sys::free_list::{FreeLink, FreeList, Reusable};
use crate::sys::lock::Lock;
use std::io;
use std::os::fd::RawFd;
#[cfg(feature = "std")]
use std::ptr::null_mut;
#[cfg(feature = "std")]
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The bits of an address in a word. An event's data has the tag in the bits above them.
pub(super) const POINTER_BITS: u32 = 48;
/// Pollables that are allocated at once.
const SLAB_POLLABLES: usize = 64;

/// How long a stream counts as drained: longer than it takes to answer a request.
const DRAINED_NANOS: Nanos = 50_000;

/// A direction of a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Read = 0,
    Write = 1,
}

impl Direction {
    const BOTH: [Direction; 2] = [Direction::Read, Direction::Write];

    /// Returns the event flag of `poll` for this direction.
    #[cfg(feature = "std")]
    pub(crate) fn events(self) -> i16 {
        match self {
            Direction::Read => libc::POLLIN,
            Direction::Write => libc::POLLOUT,
        }
    }
}

/// Pauses between attempts of a call for which no event will come: the first, and the longest.
pub(crate) const BACK_OFF_MIN_NANOS: Nanos = 50_000;
pub(crate) const BACK_OFF_MAX_NANOS: Nanos = 5_000_000;

/// How a wait for a descriptor ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IoWait {
    /// The descriptor may be ready: try again.
    Ready,
    TimedOut,
    Closed,
}

/// The word with which a waiter is woken: try again, or fail because the descriptor is closed.
pub(super) const RETRY: u32 = 0;
const CLOSED: u32 = 1;

/// See the head of the file.
#[repr(align(64))]
pub(crate) struct Pollable {
    /// The generation (invariant 1), 16 bits. Changed under the lock.
    tag: AtomicU32,
    directions: [DirectionState; 2],
    /// The shard in which it is registered (the last one, if it is registered with several
    /// runtimes): [`Shard::handle`], or 0.
    pub(super) shard: AtomicU64,
    /// When a reader found the stream drained, in units of 2¹⁰ ns and modulo 2³², above the number
    /// of edges before.
    drained: AtomicU64,
    /// The stream has ended or failed, or has had urgent data. Set under the lock.
    special: AtomicBool,
    /// It is an accepted connection.
    pub(super) is_accepted: AtomicBool,
    /// How often a reader of an accepted connection has waited; of any other descriptor, how many
    /// times in a row on another P than that of the shard. Two readers may overwrite each other's
    /// number.
    pub(super) reader_waits: AtomicU32,
    pub(super) inner: Lock<PollableState>,
    /// The next entry in [`FREE`]. Under that list's lock.
    free_link: FreeLink<Pollable>,
    /// It is in [`DEFERRED`].
    #[cfg(feature = "std")]
    is_deferred: AtomicBool,
    /// The next entry in [`DEFERRED`].
    #[cfg(feature = "std")]
    next_deferred: AtomicPtr<Pollable>,
}

/// The Pollables whose waits a helper thread is to end ([`Pollable::interrupt_later`]).
#[cfg(feature = "std")]
static DEFERRED: AtomicPtr<Pollable> = AtomicPtr::new(null_mut());

/// Why the waits for a descriptor are ended.
#[cfg(feature = "std")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// The descriptor is about to be closed: the calls fail.
    Closed,
    /// The descriptor may be another file by now: the calls are tried again.
    Retry,
}

impl Reusable for Pollable {
    fn free_link(&self) -> &FreeLink<Pollable> {
        &self.free_link
    }
}

/// What the lock of a Pollable guards.
pub(super) struct PollableState {
    /// The waiters, by direction.
    lists: [List; 2],
    /// The tasks that wait, by direction.
    pub(super) tasks: [TaskWaiters; 2],
    pub(super) closed: bool,
    /// The number of `wait_armed` calls that wait or are about to, by direction.
    #[cfg(feature = "std")]
    pub(super) armed: [u32; 2],
}

impl PollableState {
    /// Returns whether no goroutine or task is in a list, or has armed the descriptor.
    pub(super) fn is_unused(&self) -> bool {
        #[cfg(feature = "std")]
        if self.armed != [0; 2] {
            return false;
        }
        self.lists.iter().all(List::is_empty) && self.tasks.iter().all(TaskWaiters::is_empty)
    }
}

/// The state of one direction.
struct DirectionState {
    /// The number of edges that the poller has reported. Changed under the lock.
    edges: AtomicU32,
    /// The time until which calls may wait. Changed under the lock.
    deadline: AtomicU64,
}

impl DirectionState {
    const fn new() -> DirectionState {
        DirectionState { edges: AtomicU32::new(0), deadline: AtomicU64::new(NEVER) }
    }

    fn deadline(&self) -> Nanos {
        self.deadline.load(Ordering::Relaxed)
    }
}

/// Pollables without a descriptor.
static FREE: FreeList<Pollable> = FreeList::new();

/// Life: allocation, reuse, events.
impl Pollable {
    /// Returns a Pollable for a descriptor that was just opened. Allocates, so it must not be
    /// called inside the runtime.
    pub(crate) fn new() -> &'static Pollable {
        loop {
            if let Some(free) = FREE.pop() {
                return free;
            }
            let slab: Vec<Pollable> = (0..SLAB_POLLABLES).map(|_| Pollable::unused()).collect();
            slab.leak().iter().for_each(|pollable| FREE.push(pollable));
        }
    }

    fn unused() -> Pollable {
        Pollable {
            tag: AtomicU32::new(0),
            directions: [const { DirectionState::new() }; 2],
            shard: AtomicU64::new(0),
            drained: AtomicU64::new(0),
            special: AtomicBool::new(false),
            is_accepted: AtomicBool::new(false),
            reader_waits: AtomicU32::new(0),
            inner: Lock::new(PollableState {
                lists: [List::new(); 2],
                tasks: [const { TaskWaiters::new() }; 2],
                closed: false,
                #[cfg(feature = "std")]
                armed: [0; 2],
            }),
            free_link: FreeLink::new(),
            #[cfg(feature = "std")]
            is_deferred: AtomicBool::new(false),
            #[cfg(feature = "std")]
            next_deferred: AtomicPtr::new(null_mut()),
        }
    }

    /// Ends this generation. The descriptor is closed, or its owner is about to close it, and no
    /// goroutine waits for it.
    pub(crate) fn free(&'static self) {
        {
            let mut inner = self.inner.lock();
            // The lists may still contain orphaned goroutines, which are never resumed.
            inner.lists = [List::new(); 2];
            // And a poll trait may have left a word in a slot.
            inner.tasks.iter_mut().for_each(TaskWaiters::clear);
            for direction in &self.directions {
                direction.deadline.store(NEVER, Ordering::Relaxed);
            }
            inner.closed = false;
            self.drained.store(0, Ordering::Relaxed);
            self.special.store(false, Ordering::Relaxed);
            self.set_accepted(false);
            self.shard.store(0, Ordering::Relaxed);
            self.begin_generation();
        }
        FREE.push(self);
    }

    /// Under the lock: makes [`Pollable::notify`] drop the events of registrations so far.
    fn begin_generation(&self) {
        let next = self.tag.load(Ordering::Relaxed).wrapping_add(1) & 0xffff;
        self.tag.store(next, Ordering::Relaxed);
    }

    /// Returns the data for its events: its address and its tag.
    pub(super) fn event_data(&'static self) -> u64 {
        let address = std::ptr::from_ref(self).expose_provenance() as u64;
        debug_assert!(address >> POINTER_BITS == 0);
        address | u64::from(self.tag.load(Ordering::Relaxed)) << POINTER_BITS
    }

    /// Counts the edges of `event`, and moves the waiters to `woken` and to `tasks`.
    pub(super) fn notify(event: Event, woken: &mut Batch, tasks: &mut RunList) {
        let address = (event.data & ((1 << POINTER_BITS) - 1)) as usize;
        // SAFETY: made by `event_data` from a Pollable, which is never freed (invariant 1).
        let this = unsafe { &*std::ptr::with_exposed_provenance::<Pollable>(address) };
        let mut inner = this.inner.lock();
        if u64::from(this.tag.load(Ordering::Relaxed)) != event.data >> POINTER_BITS {
            return;
        }
        if event.special {
            // Before the edge: a goroutine that sees the edge sees this too.
            this.special.store(true, Ordering::Relaxed);
        }
        for (i, is_ready) in [event.readable, event.writable].into_iter().enumerate() {
            if is_ready {
                // Release: a goroutine that sees the count finds what the kernel has reported.
                this.directions[i].edges.fetch_add(1, Ordering::Release);
                while let Some(taken) = inner.lists[i].take_first() {
                    woken.push(taken);
                }
                inner.tasks[i].take_all(tasks);
            }
        }
    }
}

/// Waiting.
impl Pollable {
    /// Returns the number of edges so far. A goroutine calls it before its attempt, and passes the
    /// number to [`Pollable::wait`] if the attempt fails.
    #[inline]
    pub(crate) fn edges(&self, direction: Direction) -> u32 {
        // Acquire: pairs with the Release of each increment.
        self.directions[direction as usize].edges.load(Ordering::Acquire)
    }

    /// Records that a read, before which there were `seen` edges, has emptied a TCP stream.
    #[inline]
    pub(crate) fn note_drained(&self, seen: u32) {
        self.drained.store((now() >> 10) << 32 | u64::from(seen), Ordering::Relaxed);
    }

    /// Returns whether a read would find nothing: a reader has emptied the stream a moment ago, and
    /// there were no edges since then. `seen` is the result of [`Pollable::edges`].
    #[inline]
    pub(crate) fn is_drained(&self, seen: u32) -> bool {
        let drained = self.drained.load(Ordering::Relaxed);
        drained as u32 == seen
            && !self.special.load(Ordering::Relaxed)
            && ((now() >> 10) as u32).wrapping_sub((drained >> 32) as u32)
                <= (DRAINED_NANOS >> 10) as u32
    }

    /// Waits until there are more edges than the `seen` ones, until `limit`, or until the
    /// descriptor's deadline for `direction`. `sched` is the caller's runtime, or the runtime that
    /// polls for a plain thread.
    ///
    /// # Errors
    /// Fails if the descriptor cannot be polled: it is a regular file, or memory or epoll watches
    /// are exhausted.
    pub(crate) fn wait(
        &'static self,
        sched: &Sched,
        fd: RawFd,
        direction: Direction,
        limit: Nanos,
        seen: u32,
    ) -> io::Result<IoWait> {
        let _outside = WaitOutside::begin(fd)?;
        let shard = self.register(sched, fd, direction)?;
        Ok(self.wait_in(sched, shard, direction, limit, seen))
    }

    /// As [`Pollable::wait`], for a descriptor that is registered in `shard`.
    fn wait_in(
        &'static self,
        sched: &Sched,
        shard: &'static Shard,
        direction: Direction,
        limit: Nanos,
        seen: u32,
    ) -> IoWait {
        let state = &self.directions[direction as usize];
        let deadline = state.deadline().min(limit);
        if deadline != NEVER {
            return self.wait_until(sched, shard, direction, limit, deadline, seen);
        }
        let node = Node::new(0);
        shard.count_waiter(sched);
        let slept = node.sleep_without_deadline(WaitReason::IoWait, |_| {
            let mut inner = self.inner.lock();
            state.deadline() == NEVER
                && self.enqueue_in(&mut inner, sched, shard, direction, seen, &node)
        });
        shard.uncount_waiter();
        match slept {
            WaitResult::Woken(CLOSED) => IoWait::Closed,
            WaitResult::Woken(_) => IoWait::Ready,
            _ => self.or_closed(IoWait::Ready),
        }
    }

    /// [`Pollable::wait_in`] with a deadline, which is that of the descriptor or `limit`. Not
    /// inlined, so that a goroutine without a deadline needs only one page.
    #[inline(never)]
    fn wait_until(
        &'static self,
        sched: &Sched,
        shard: &'static Shard,
        direction: Direction,
        limit: Nanos,
        deadline: Nanos,
        seen: u32,
    ) -> IoWait {
        if deadline <= now() {
            return self.or_closed(IoWait::TimedOut);
        }
        let state = &self.directions[direction as usize];
        let node = Node::new(0);
        shard.count_waiter(sched);
        let slept = node.sleep_until(
            WaitReason::IoWait,
            deadline,
            |_| {
                let mut inner = self.inner.lock();
                state.deadline().min(limit) == deadline
                    && self.enqueue_in(&mut inner, sched, shard, direction, seen, &node)
            },
            |_| {
                self.inner.lock().lists[direction as usize].remove(&node);
            },
        );
        shard.uncount_waiter();
        match slept {
            WaitResult::Woken(CLOSED) => IoWait::Closed,
            WaitResult::Woken(_) => IoWait::Ready,
            WaitResult::NotQueued => self.or_closed(IoWait::Ready),
            // `set_deadline` has moved the deadline meanwhile.
            WaitResult::TimedOut if state.deadline().min(limit) > now() => IoWait::Ready,
            WaitResult::TimedOut => self.or_closed(IoWait::TimedOut),
        }
    }

    /// Under the lock: links `node` into the list of `direction`, unless anything has changed since
    /// the caller's attempt. Returns whether it did; if not, the caller tries again.
    #[inline]
    fn enqueue_in(
        &self,
        inner: &mut PollableState,
        sched: &Sched,
        shard: &Shard,
        direction: Direction,
        seen: u32,
        node: &Node,
    ) -> bool {
        let moved =
            self.registered_shard(sched.poller).is_some_and(|other| !std::ptr::eq(other, shard));
        if inner.closed || moved || self.edges(direction) != seen {
            return false;
        }
        inner.lists[direction as usize].push_back(node);
        true
    }

    /// Returns `Closed` if the descriptor is closed, otherwise `result`.
    fn or_closed(&self, result: IoWait) -> IoWait {
        if self.inner.lock().closed { IoWait::Closed } else { result }
    }

    /// Links `node` into the list of `direction`, unless the descriptor is closed or has had more
    /// edges than the `seen` ones. Returns whether it did.
    #[cfg(feature = "std")]
    pub(super) fn enqueue_if_unchanged(
        &self,
        direction: Direction,
        seen: u32,
        node: &Node,
    ) -> bool {
        let mut inner = self.inner.lock();
        let unchanged = !inner.closed && self.edges(direction) == seen;
        if unchanged {
            inner.lists[direction as usize].push_back(node);
        }
        unchanged
    }

    /// Takes `node` out of the list of `direction`, if it is still in it.
    #[cfg(feature = "std")]
    pub(super) fn dequeue(&self, direction: Direction, node: &Node) {
        self.inner.lock().lists[direction as usize].remove(node);
    }

    /// As [`Pollable::wait`], for a descriptor that may have been closed and opened anew without
    /// the runtime's knowledge: each call registers it anew, and epoll reports it if it is ready
    /// now. It is registered only for the directions that are waited for: a socket is nearly always
    /// writable, and each report costs.
    #[cfg(feature = "std")]
    pub(crate) fn wait_armed(
        &'static self,
        sched: &Sched,
        fd: RawFd,
        direction: Direction,
        limit: Nanos,
        seen: u32,
    ) -> io::Result<IoWait> {
        let _outside = WaitOutside::begin(fd)?;
        let shard = self.arm(sched, fd, direction)?;
        let result = self.wait_in(sched, shard, direction, limit, seen);
        self.disarm(direction);
        Ok(result)
    }
}

/// Ending waits.
impl Pollable {
    /// Returns the time until which calls in this direction may wait.
    #[inline]
    pub(crate) fn deadline(&self, direction: Direction) -> Nanos {
        self.directions[direction as usize].deadline()
    }

    /// Returns whether the deadline of this direction has passed.
    pub(crate) fn is_past_deadline(&self, direction: Direction) -> bool {
        let deadline = self.directions[direction as usize].deadline();
        deadline != NEVER && deadline <= now()
    }

    /// Sets the time until which calls in this direction may wait. Its waiters try again.
    pub(crate) fn set_deadline(&self, direction: Direction, deadline: Nanos) {
        inside(|here| {
            let mut tasks = RunList::new();
            let woken = {
                let mut inner = self.inner.lock();
                self.directions[direction as usize].deadline.store(deadline, Ordering::Relaxed);
                inner.tasks[direction as usize].take_all(&mut tasks);
                inner.lists[direction as usize].take_all()
            };
            woken.wake_all(here, RETRY);
            waker::wake_all(here, tasks);
        });
    }

    /// Makes all waiters try again.
    pub(crate) fn wake_all_to_retry(&self) {
        inside(|here| {
            for direction in Direction::BOTH {
                let mut tasks = RunList::new();
                let woken = {
                    let mut inner = self.inner.lock();
                    // Release: a goroutine that sees the count sees what the caller did before.
                    self.directions[direction as usize].edges.fetch_add(1, Ordering::Release);
                    inner.tasks[direction as usize].take_all(&mut tasks);
                    inner.lists[direction as usize].take_all()
                };
                woken.wake_all(here, RETRY);
                waker::wake_all(here, tasks);
            }
        });
    }

    /// Makes all waits fail with [`IoWait::Closed`], now and in future.
    pub(crate) fn close(&self) {
        inside(|here| {
            let mut tasks = RunList::new();
            let (readers, writers) = {
                let mut inner = self.inner.lock();
                inner.closed = true;
                inner.tasks.iter_mut().for_each(|waiters| waiters.take_all(&mut tasks));
                let [read, write] = &mut inner.lists;
                (read.take_all(), write.take_all())
            };
            readers.wake_all(here, CLOSED);
            writers.wake_all(here, CLOSED);
            waker::wake_all(here, tasks);
        });
    }

    /// Ends all waits, because the descriptor is closed or about to be. `here` is the result of the
    /// caller's `Rt::enter()`.
    #[cfg(feature = "std")]
    pub(crate) fn interrupt(&self, here: Option<Rt>, fd: RawFd, why: Interrupt) {
        let (readers, writers) = {
            let mut inner = self.inner.lock();
            for direction in &self.directions {
                // Release: a goroutine that is about to wait sees the count, and tries again.
                direction.edges.fetch_add(1, Ordering::Release);
            }
            // If the file has another descriptor, epoll still reports its events with this data:
            // `notify` must drop them. The next file with this number is armed before a goroutine
            // waits for it, so none of its events is lost.
            self.begin_generation();
            let [read, write] = &mut inner.lists;
            let (readers, writers) = (read.take_all(), write.take_all());
            if readers.len() > 0 || writers.len() > 0 {
                // Under the lock: a goroutine that later arms the next file with this number keeps
                // its registration.
                self.unregister(fd);
            }
            (readers, writers)
        };
        let word = match why {
            Interrupt::Closed => CLOSED,
            Interrupt::Retry => RETRY,
        };
        readers.wake_all(here, word);
        writers.wake_all(here, word);
    }

    /// Makes a helper thread call [`Pollable::interrupt`] with [`Interrupt::Retry`].
    /// Async-signal-safe, also in a handler that interrupted the runtime: it takes no lock.
    #[cfg(feature = "std")]
    pub(crate) fn interrupt_later(&'static self) {
        // If it is in the list already, its interruption is still to come: `deliver_interrupts`
        // stores false, also with SeqCst, before it interrupts.
        if !self.is_deferred.swap(true, Ordering::SeqCst) {
            let this = std::ptr::from_ref(self).cast_mut();
            let push = |first| {
                self.next_deferred.store(first, Ordering::Relaxed);
                Some(this)
            };
            // Release: the helper thread that takes it sees its `next_deferred`.
            _ = DEFERRED.fetch_update(Ordering::Release, Ordering::Relaxed, push);
        }
        crate::sched::wait::deferred::wake_helper();
    }

    /// Interrupts the waits for all deferred Pollables. Runs on a helper thread.
    #[cfg(feature = "std")]
    pub(crate) fn deliver_interrupts() {
        if DEFERRED.load(Ordering::Relaxed).is_null() {
            return;
        }
        // Acquire: pairs with the Release in `interrupt_later`.
        let mut next = DEFERRED.swap(null_mut(), Ordering::Acquire);
        // SAFETY: Pollables are never freed (invariant 1).
        while let Some(one) = unsafe { next.as_ref() } {
            next = one.next_deferred.load(Ordering::Relaxed);
            // Before the interruption, so that a request that comes later enters the list again.
            one.is_deferred.store(false, Ordering::SeqCst);
            // epoll forgets a closed file by itself, so no descriptor is needed.
            one.interrupt(None, -1, Interrupt::Retry);
        }
    }
}
