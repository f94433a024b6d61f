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
//! # Shards
//! A poller is several epoll instances, and a descriptor is at home in the one of the P on which it was first waited
//! for. A P without work looks into its own shard, so goroutines, their stacks and the kernel's sockets stay with
//! one CPU; into others' shards only in a thief's last sweep (`find.rs`). With one instance for all, whoever looked
//! first took everybody's goroutines: an echo on two Ps was 1.3 times as fast as on one, not 1.7 times.
//! The idle poller and sysmon wait for all shards at once.
//!
//! Invariants:
//! 1. The memory of a Pollable is never freed, only reused; `tag` is its generation, and every event carries
//!    the tag it was registered with. So a late event finds its Pollable, or another life of it, and is
//!    dropped.
//! 2. Everything in `Inner` is behind the lock. Nobody is woken under it.
//! 3. `waiters` of a [`Shard`] counts goroutines that sleep for its descriptors. While there are any and a P is idle,
//!    the idle poller is blocked there, or was called: by the first who waits, or, if no P was idle then, by whoever makes
//!    one idle (`Sched::enter_idle`, `Sched::hand_off`).

use crate::sched::Sched;
use crate::sched::m::Rt;
use crate::sched::monitor::sysmon::Sysmon;
use crate::sched::wait::list::{Batch, List, Node, Slept};
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::{NEVER, Nanos, now};
use crate::sys::epoll::{self, Epoll, Event};
use crate::sys::lock::Lock;
use std::cell::UnsafeCell;
use std::io;
use std::os::fd::RawFd;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
#[cfg(feature = "std")]
use std::sync::atomic::AtomicBool;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Bits of a pointer to a Pollable in an event's data; the tag is above.
const POINTER_BITS: u32 = 48;
/// Pollables allocated at once.
const SLAB: usize = 64;

/// Epoll instances of a runtime, at most: a bit each in `Poller::blocked`. More Ps than these share them.
const SHARDS: usize = 16;

/// A runtime's poller. Its memory is never freed, because Pollables and threads may know it, but a later
/// runtime uses it again.
pub(crate) struct Poller {
    shards: [Shard; SHARDS],
    /// How the sysmon thread of the same runtime is reached.
    sysmon: OnceLock<&'static Sysmon>,
    /// Next in [`UNUSED`], under its lock.
    next_unused: AtomicPtr<Poller>,
    opening: Lock<()>,
    /// The shards where the idle poller is blocked in the kernel, a bit each: nobody else needs to look there.
    blocked: AtomicU32,
}

/// The descriptors that are at home with a P. Lines of its own: the threads of other Ps rarely look.
#[repr(align(128))]
pub(crate) struct Shard {
    epoll: Epoll,
    /// Goroutines that wait for one of its descriptors.
    waiters: AtomicU32,
    /// When somebody last looked.
    last: AtomicU64,
    /// How many runtimes have had it before. Changed while no runtime has it.
    generation: AtomicU32,
}

/// Bits of an address above a pointer's; and those below, which are zero in a Shard's.
const HIGH_BITS: u32 = u64::BITS - POINTER_BITS;
const LOW_BITS: u32 = align_of::<Shard>().trailing_zeros();

impl Shard {
    /// This shard in its present generation, in a word that is not 0: an address, with the generation in the
    /// bits above and below it. It comes again after eight million runtimes.
    fn mark(&self) -> u64 {
        let generation = u64::from(self.generation.load(Ordering::Relaxed));
        let address = std::ptr::from_ref(self).expose_provenance() as u64;
        debug_assert!(address >> POINTER_BITS == 0 && address.trailing_zeros() >= LOW_BITS);
        let high = generation >> LOW_BITS & ((1 << HIGH_BITS) - 1);
        address | generation & ((1 << LOW_BITS) - 1) | high << POINTER_BITS
    }

    /// The shard that was marked, if the same runtime still has it.
    fn marked(mark: u64) -> Option<&'static Shard> {
        let address = mark & ((1 << POINTER_BITS) - 1) & !((1 << LOW_BITS) - 1);
        // SAFETY: 0, or the address of a Shard; those are never freed.
        let shard = unsafe {
            std::ptr::with_exposed_provenance::<Shard>(address as usize).as_ref::<'static>()?
        };
        (shard.mark() == mark).then_some(shard)
    }

    fn is_wanted(&self) -> bool {
        self.waiters.load(Ordering::Relaxed) != 0
    }

    /// A goroutine of `sched` is about to wait for one of its descriptors.
    fn count_waiter(&self, sched: &Sched) {
        // SeqCst: pairs with the end of `Poller::keep`.
        if self.waiters.fetch_add(1, Ordering::SeqCst) == 0 && !sched.poller.is_kept(self) {
            sched.ensure_idle_poller();
        }
    }

    /// Hands what is ready now to `ready`.
    fn look(&self, deadline: Nanos, ready: &mut Ready) {
        if self.epoll.is_open() {
            self.epoll.wait(deadline, |event| Pollable::notify(event, &mut ready.0));
        }
        self.last.store(now(), Ordering::Relaxed);
    }
}

/// Pollers that no runtime has.
static UNUSED: Lock<AtomicPtr<Poller>> = Lock::new(AtomicPtr::new(null_mut()));

impl Poller {
    /// One for a new runtime: one that a runtime has given back, or a new one.
    pub(crate) fn take() -> &'static Poller {
        {
            let unused = UNUSED.lock();
            // SAFETY: null, or a Poller, which is never freed.
            if let Some(first) = unsafe { unused.load(Ordering::Relaxed).as_ref() } {
                unused.store(first.next_unused.load(Ordering::Relaxed), Ordering::Relaxed);
                return first;
            }
        }
        let shard = || Shard {
            epoll: Epoll::new(),
            waiters: AtomicU32::new(0),
            last: AtomicU64::new(0),
            generation: AtomicU32::new(0),
        };
        Box::leak(Box::new(Poller {
            shards: std::array::from_fn(|_| shard()),
            sysmon: OnceLock::new(),
            next_unused: AtomicPtr::default(),
            opening: Lock::new(()),
            blocked: AtomicU32::new(0),
        }))
    }

    /// The sysmon that goes with it, as it is before its thread starts.
    pub(crate) fn sysmon(&'static self) -> &'static Sysmon {
        let sysmon = *self.sysmon.get_or_init(|| Sysmon::leak(self));
        sysmon.reset();
        sysmon
    }

    /// Its runtime is gone, with all its threads: closes the descriptors and leaves the memory to the next one.
    pub(crate) fn give_back(&'static self) {
        self.blocked.store(0, Ordering::Relaxed);
        for shard in &self.shards {
            shard.epoll.close();
            shard.waiters.store(0, Ordering::Relaxed);
            shard.last.store(0, Ordering::Relaxed);
            shard.generation.fetch_add(1, Ordering::Relaxed);
        }
        let unused = UNUSED.lock();
        self.next_unused.store(unused.load(Ordering::Relaxed), Ordering::Relaxed);
        unused.store(std::ptr::from_ref(self).cast_mut(), Ordering::Relaxed);
    }

    /// How many wait for a descriptor.
    pub(crate) fn waiters(&self) -> usize {
        self.shards.iter().map(|shard| shard.waiters.load(Ordering::Relaxed) as usize).sum()
    }

    /// Whether somebody waits for a descriptor.
    pub(crate) fn is_wanted(&self) -> bool {
        self.shards.iter().any(Shard::is_wanted)
    }

    /// The instance with the eventfd: where a thread that sleeps in the poller is called.
    pub(crate) fn door(&self) -> &Epoll {
        &self.shards[0].epoll
    }

    /// The shard of a P, open.
    fn open(&'static self, p: u32) -> io::Result<&'static Shard> {
        let shard = &self.shards[p as usize % SHARDS];
        if !shard.epoll.is_open() {
            let _one = self.opening.lock();
            self.door().open(true)?;
            shard.epoll.open(false)?;
        }
        Ok(shard)
    }

    fn owns(&self, shard: &Shard) -> bool {
        self.shards.as_ptr_range().contains(&std::ptr::from_ref(shard))
    }

    /// The bit of one of its shards.
    fn bit_of(&self, shard: &Shard) -> u32 {
        // SAFETY: one of ours (caller).
        let i = unsafe { std::ptr::from_ref(shard).offset_from(self.shards.as_ptr()) };
        1 << i
    }

    /// The bits of those that are open.
    fn open_bits(&self) -> u32 {
        let open = |i: &usize| self.shards[*i].epoll.is_open();
        (0..SHARDS).filter(open).fold(0, |bits, i| bits | 1 << i)
    }

    /// Whether the idle poller is blocked in the kernel here.
    pub(crate) fn is_slept_in(&self) -> bool {
        self.blocked.load(Ordering::Relaxed) != 0
    }

    /// Looks, without waiting, at what belongs to P number `p` of `procs`, and at what nobody has looked at for `age`.
    pub(crate) fn poll(&self, p: u32, procs: u32, age: Nanos) -> Ready {
        let own = p % SHARDS as u32;
        self.look_where(age, |i| i % procs.min(SHARDS as u32) == own)
    }

    /// Looks, without waiting, at what nobody has looked at for `age`.
    pub(crate) fn poll_neglected(&self, age: Nanos) -> Ready {
        self.look_where(age, |_| false)
    }

    fn look_where(&self, age: Nanos, is_own: impl Fn(u32) -> bool) -> Ready {
        let mut ready = Ready(Batch::new());
        let blocked = self.blocked.load(Ordering::Relaxed);
        let is_neglected = |s: &Shard| now().saturating_sub(s.last.load(Ordering::Relaxed)) >= age;
        for (i, shard) in self.shards.iter().enumerate() {
            let free = blocked & 1 << i == 0;
            if shard.is_wanted() && free && (is_own(i as u32) || is_neglected(shard)) {
                shard.look(0, &mut ready);
            }
        }
        ready
    }

    /// Sleeps until something is ready, until `deadline` at most.
    pub(crate) fn sleep(&self, deadline: Nanos) -> Ready {
        let mut ready = Ready(Batch::new());
        match self.open_bits() {
            0 | 1 => self.shards[0].look(deadline, &mut ready),
            _ => {
                let bits = epoll::wait_any(self.shards.iter().map(|s| &s.epoll), deadline);
                for (i, shard) in self.shards.iter().enumerate() {
                    if bits & 1 << i != 0 {
                        shard.look(0, &mut ready);
                    }
                }
            }
        }
        ready
    }

    /// As [`Poller::sleep`], for the one that others rely on.
    pub(crate) fn keep(&self, deadline: Nanos) -> Ready {
        self.blocked.store(self.open_bits(), Ordering::Relaxed);
        let ready = self.sleep(deadline);
        // Who begins to wait sees that we are gone, or we see him before we do something else (`Pollable::wait`).
        self.blocked.swap(0, Ordering::SeqCst);
        ready
    }

    /// Whether somebody waits in a shard where the idle poller does not: it was opened after he fell asleep.
    pub(crate) fn has_unwatched_shard(&self) -> bool {
        self.shards.iter().any(|shard| shard.is_wanted() && !self.is_kept(shard))
    }

    /// Whether the idle poller will see what comes into `shard`.
    fn is_kept(&self, shard: &Shard) -> bool {
        self.blocked.load(Ordering::Relaxed) & self.bit_of(shard) != 0
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

impl Side {
    /// What `poll` is asked for.
    #[cfg(feature = "std")]
    pub(crate) fn events(self) -> i16 {
        match self {
            Side::Read => libc::POLLIN,
            Side::Write => libc::POLLOUT,
        }
    }
}

/// Pauses between attempts of a call for which no event will come, the first one and the longest.
pub(crate) const BACK_OFF_MIN_NANOS: Nanos = 50_000;
pub(crate) const BACK_OFF_MAX_NANOS: Nanos = 5_000_000;

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
    /// Where it is registered; the last one, if with several runtimes: [`Shard::mark`], or 0.
    home: AtomicU64,
    inner: Lock<Inner>,
    /// Next in the free list; under its lock.
    next: UnsafeCell<*const Pollable>,
    /// Whether it is in [`NOTED`], and the next one there.
    #[cfg(feature = "std")]
    is_noted: AtomicBool,
    #[cfg(feature = "std")]
    noted_next: AtomicPtr<Pollable>,
}

/// Those whose waits a helper thread is to end ([`Pollable::interrupt_later`]).
#[cfg(feature = "std")]
static NOTED: AtomicPtr<Pollable> = AtomicPtr::new(null_mut());

/// Why waits for a descriptor are ended.
#[cfg(feature = "std")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// It is about to be closed: the calls fail.
    Closed,
    /// It may be another file by now: the calls are tried again.
    LookAgain,
}

// SAFETY: `next` is guarded by the lock of `FREE`.
unsafe impl Sync for Pollable {}

struct Inner {
    /// Who waits, by direction.
    lists: [List; 2],
    closed: bool,
    /// How many wait by `wait_armed`, or are about to, by direction.
    #[cfg(feature = "std")]
    armed: [u32; 2],
}

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
                    home: AtomicU64::new(0),
                    inner: Lock::new(Inner {
                        lists: [List::new(); 2],
                        closed: false,
                        #[cfg(feature = "std")]
                        armed: [0; 2],
                    }),
                    next: UnsafeCell::new(null()),
                    #[cfg(feature = "std")]
                    is_noted: AtomicBool::new(false),
                    #[cfg(feature = "std")]
                    noted_next: AtomicPtr::new(null_mut()),
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
            self.home.store(0, Ordering::Relaxed);
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
        self.arm(sched, fd, side)?;
        let waited = self.wait(sched, fd, side, limit, seen);
        self.disarm(side);
        waited
    }

    /// Registers it for `side` and what others wait for. To be undone by [`Pollable::disarm`].
    #[cfg(feature = "std")]
    fn arm(&'static self, sched: &Sched, fd: RawFd, side: Side) -> io::Result<&'static Shard> {
        let shard = self.home_in(sched)?;
        let known = crate::sched::wait::list::inside(|_| {
            // Under the lock: of two who arm, the second one knows of the first.
            let mut inner = self.inner.lock();
            inner.armed[side as usize] += 1;
            let [read, write] = inner.armed.map(|n| n > 0);
            let done = shard.epoll.arm(fd, self.data(), read, write);
            match done {
                Ok(true) => self.settle(shard),
                _ => inner.armed[side as usize] -= 1,
            }
            done
        })?;
        if known { Ok(shard) } else { Err(not_pollable()) }
    }

    #[cfg(feature = "std")]
    fn disarm(&self, side: Side) {
        crate::sched::wait::list::inside(|_| self.inner.lock().armed[side as usize] -= 1);
    }

    /// The descriptor is about to be closed, or is closed: ends all waits. `here` is where the caller is.
    #[cfg(feature = "std")]
    pub(crate) fn interrupt(&self, here: Option<Rt>, fd: RawFd, why: Interrupt) {
        let (readers, writers) = {
            let mut inner = self.inner.lock();
            // Release: who is about to wait sees the count, and looks again.
            self.sides.iter().for_each(|side| _ = side.edges.fetch_add(1, Ordering::Release));
            let [read, write] = &mut inner.lists;
            let (readers, writers) = (read.take_all(), write.take_all());
            if readers.len() > 0 || writers.len() > 0 {
                // Under the lock: a goroutine that arms the number's next file later keeps that registration.
                self.forget(fd);
            }
            (readers, writers)
        };
        let word = match why {
            Interrupt::Closed => CLOSED,
            Interrupt::LookAgain => LOOK_AGAIN,
        };
        readers.wake_all(here, word);
        writers.wake_all(here, word);
    }

    /// As [`Pollable::interrupt`], by a helper thread, and those who wait look again. Safe in a signal handler that
    /// interrupted the runtime: nothing is locked.
    #[cfg(feature = "std")]
    pub(crate) fn interrupt_later(&'static self) {
        // Whoever finds it noted leaves it to the delivery that is still to come.
        if !self.is_noted.swap(true, Ordering::SeqCst) {
            let this = std::ptr::from_ref(self).cast_mut();
            let push = |first| {
                self.noted_next.store(first, Ordering::Relaxed);
                Some(this)
            };
            // Release: who takes it sees its `noted_next`.
            _ = NOTED.fetch_update(Ordering::Release, Ordering::Relaxed, push);
        }
        crate::sched::wait::deferred::call_helper();
    }

    /// On a helper thread: interrupts those that were noted.
    #[cfg(feature = "std")]
    pub(crate) fn deliver_interrupts() {
        if NOTED.load(Ordering::Relaxed).is_null() {
            return;
        }
        let mut next = NOTED.swap(null_mut(), Ordering::Acquire);
        // SAFETY: Pollables are never freed (invariant 1).
        while let Some(one) = unsafe { next.as_ref() } {
            next = one.noted_next.load(Ordering::Relaxed);
            // Before the interruption: a note that comes later is another one.
            one.is_noted.store(false, Ordering::SeqCst);
            // The poller forgets a closed file by itself.
            one.interrupt(None, -1, Interrupt::LookAgain);
        }
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
        let shard = self.register(sched, fd)?;
        let state = &self.sides[side as usize];
        let deadline = state.deadline().min(limit);
        if deadline != NEVER && deadline <= now() {
            return Ok(self.or_closed(Waited::TimedOut));
        }
        let node = Node::new(0);
        shard.count_waiter(sched);
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
        shard.waiters.fetch_sub(1, Ordering::Relaxed);
        Ok(match slept {
            Slept::Woken(CLOSED) => Waited::Closed,
            Slept::Woken(_) => Waited::Ready,
            Slept::No => self.or_closed(Waited::Ready),
            Slept::TimedOut if state.deadline().min(limit) > now() => Waited::Ready,
            Slept::TimedOut => self.or_closed(Waited::TimedOut),
        })
    }

    fn or_closed(&self, waited: Waited) -> Waited {
        if self.inner.lock().closed { Waited::Closed } else { waited }
    }

    /// Where it is registered with this runtime.
    fn home_of(&self, poller: &Poller) -> Option<&'static Shard> {
        // Acquire: pairs with the Release in `settle`.
        Shard::marked(self.home.load(Ordering::Acquire)).filter(|shard| poller.owns(shard))
    }

    fn settle(&self, shard: &'static Shard) {
        // Release: who finds it there finds it registered.
        self.home.store(shard.mark(), Ordering::Release);
    }

    /// Where it is registered with this runtime, or is to be: in the shard of the P that asks.
    fn home_in(&self, sched: &Sched) -> io::Result<&'static Shard> {
        let poller = sched.poller;
        match self.home_of(poller) {
            Some(shard) => Ok(shard),
            None => {
                poller.open(crate::sched::wait::list::inside(|here| here.map_or(0, |rt| rt.p().id)))
            }
        }
    }

    /// Sees to it that the poller knows the descriptor.
    fn register(&'static self, sched: &Sched, fd: RawFd) -> io::Result<&'static Shard> {
        if let Some(shard) = self.home_of(sched.poller) {
            return Ok(shard);
        }
        let shard = self.home_in(sched)?;
        if !shard.epoll.add(fd, self.data())? {
            return Err(not_pollable());
        }
        self.settle(shard);
        Ok(shard)
    }

    /// Whether calls on this side are too late already.
    pub(crate) fn is_late(&self, side: Side) -> bool {
        let deadline = self.sides[side as usize].deadline();
        deadline != NEVER && deadline <= now()
    }

    /// Until when calls on this side may wait; those who wait look again.
    pub(crate) fn set_deadline(&self, side: Side, deadline: Nanos) {
        crate::sched::wait::list::inside(|here| {
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
        crate::sched::wait::list::inside(|here| {
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
        if let Some(shard) = Shard::marked(self.home.load(Ordering::Acquire)) {
            shard.epoll.remove(fd);
        }
    }

    /// Everybody who waits gives up, now and in future.
    pub(crate) fn close(&self) {
        crate::sched::wait::list::inside(|here| {
            let (readers, writers) = {
                let mut inner = self.inner.lock();
                inner.closed = true;
                let [read, write] = &mut inner.lists;
                (read.take_all(), write.take_all())
            };
            readers.wake_all(here, CLOSED);
            writers.wake_all(here, CLOSED);
        });
    }
}

/// A direction of a descriptor, one of several that a goroutine waits for at once ([`wait_for_any`]).
#[cfg(feature = "std")]
pub(crate) struct Watched {
    pub(crate) pollable: &'static Pollable,
    pub(crate) fd: RawFd,
    pub(crate) side: Side,
}

/// Waits until one of `all` may be ready, or until `limit`. As [`Pollable::wait_armed`] each is registered, and reported
/// if it is ready now.
///
/// An epoll instance for each such wait would do as well, but the kernel allows no more than 500 ways from a file
/// through one instance into another: a descriptor that more goroutines wait for, each beside one of its own, would
/// block their threads.
///
/// # Errors
/// When one of them cannot be polled: it is closed, or a regular file; out of memory or of watches.
#[cfg(feature = "std")]
pub(crate) fn wait_for_any(sched: &Sched, all: &[Watched], limit: Nanos) -> io::Result<()> {
    let seen: Vec<u32> = all.iter().map(|one| one.pollable.edges(one.side)).collect();
    let mut armed = Armed { all, count: 0 };
    let mut shards = 0;
    for one in all {
        let shard = one.pollable.arm(sched, one.fd, one.side)?;
        armed.count += 1;
        shards |= sched.poller.bit_of(shard);
    }
    let nodes: Vec<Node> = all.iter().map(|_| Node::new(0)).collect();
    let each_shard = |f: &dyn Fn(&Shard)| {
        let used = sched.poller.shards.iter().enumerate().filter(|(i, _)| shards & 1 << i != 0);
        used.for_each(|(_, shard)| f(shard));
    };
    each_shard(&|shard| shard.count_waiter(sched));
    crate::sched::wait::list::sleep_in_any(
        &nodes,
        WaitReason::IoWait,
        limit,
        |i, node| {
            let Watched { pollable, side, .. } = all[i];
            let mut inner = pollable.inner.lock();
            let unchanged = !inner.closed && pollable.edges(side) == seen[i];
            if unchanged {
                inner.lists[side as usize].push_back(node);
            }
            unchanged
        },
        |i, node| {
            let Watched { pollable, side, .. } = all[i];
            pollable.inner.lock().lists[side as usize].remove(node);
        },
    );
    each_shard(&|shard| _ = shard.waiters.fetch_sub(1, Ordering::Relaxed));
    drop(armed);
    Ok(())
}

/// The first `count` of `all` are armed.
#[cfg(feature = "std")]
struct Armed<'a> {
    all: &'a [Watched],
    count: usize,
}

#[cfg(feature = "std")]
impl Drop for Armed<'_> {
    fn drop(&mut self) {
        self.all[..self.count].iter().for_each(|one| one.pollable.disarm(one.side));
    }
}
