//! A runtime's poller: several epoll instances, and the threads that wait in them.
//!
//! # Shards
//! A poller consists of several epoll instances, its shards. A descriptor is registered in the
//! shard of the P on which a goroutine first waited for it, and may move later (`pollable.rs`). A P
//! without work polls its own shard, so the goroutines, their stacks and the kernel's sockets stay
//! on one CPU. It polls other Ps' shards only in the last round of a search for work (`find.rs`),
//! or if they are neglected. With one instance for all Ps, the first P to poll took the goroutines
//! of all others: an echo on two Ps was 1.3 times as fast as on one, not 1.7 times. The idle poller
//! and sysmon wait for all shards at once.
//!
//! A P that serves a thousand connections does not poll for milliseconds, and still needs no help:
//! an M that took over its goroutines would only move them to another CPU. So a shard is neglected
//! if its P also runs the same goroutine all the time.
//!
//! # Idle poller
//! The idle poller is the one idle M that blocks in the kernel, for all shards, until the next
//! timer. `blocked` says which shards it watches.
//!
//! Invariants:
//! 1. `waiters` of a [`Shard`] counts the goroutines that sleep for its descriptors. While there
//!    are any and a P is idle, the idle poller is blocked in that shard, or an M was woken that
//!    becomes it: by the first goroutine that waits; or, if no P was idle then, by the thread that
//!    makes a P idle (`Sched::enter_idle`, `Sched::hand_off`).
//! 2. The memory of a Poller is never freed, only reused, because Pollables and threads may refer
//!    to it. A reference to a Shard carries the shard's generation ([`Shard::handle`]).

use crate::sched::Sched;
use crate::sched::latency::LatencyHistogram;
use crate::sched::m::Rt;
use crate::sched::monitor::sysmon::Sysmon;
use crate::sched::netpoll::pollable::{POINTER_BITS, Pollable, RETRY};
use crate::sched::record;
use crate::sched::runnable::RunList;
use crate::sched::task::waker;
use crate::sched::wait::list::Batch;
use crate::shim::fence_after_rmw;
use crate::sys::clock::{Nanos, now};
use crate::sys::epoll::{self, Epoll};
use crate::sys::free_list::{FreeLink, FreeList, Reusable};
use crate::sys::lock::Lock;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Epoll instances per runtime: one bit each in `Poller::blocked`. If there are more Ps, several Ps
/// share a shard.
const SHARDS: usize = 16;

/// A shard whose P works, but does not poll, counts as neglected after so many times the usual age.
const MAX_NEGLECT: Nanos = 10;

/// How long a shard that is not polled counts as the shard of some CPU. It is longer than it
/// takes to serve a thousand descriptors.
const CPU_KNOWN_NANOS: Nanos = 10_000_000;

/// A runtime's poller. See the head of the file.
pub(crate) struct Poller {
    shards: [Shard; SHARDS],
    /// The sysmon of the same runtime.
    sysmon: OnceLock<&'static Sysmon>,
    /// Its place in [`UNUSED`].
    free_link: FreeLink<Poller>,
    /// Held while a shard is opened.
    opening: Lock<()>,
    /// The shards in which the idle poller is blocked, one bit each. No other M needs to poll them.
    blocked: AtomicU32,
    /// When a poll has found ready descriptors: how long before it the shard was last polled, or
    /// got its first waiter. No descriptor was ready for longer.
    pub(crate) delays: LatencyHistogram,
}

/// One epoll instance. It has cache lines of its own, because mostly the threads of one P use it.
#[repr(align(128))]
pub(crate) struct Shard {
    pub(super) epoll: Epoll,
    /// The number of goroutines and tasks that wait for one of its descriptors; above it, in the
    /// upper 32 bits, the generation: the number of runtimes that have used the shard before. One
    /// word, so that a task that outlives its runtime is not uncounted in the next one.
    waiters: AtomicU64,
    /// When it was last polled.
    last_poll: AtomicU64,
    /// When it last got a waiter while it had none.
    waited_since: AtomicU64,
    /// The run number of its P that an M of another P saw last, and when it was first seen.
    seen_run: AtomicU32,
    run_since: AtomicU64,
    /// The CPU on which the owner of its P last polled it, or −1.
    cpu: AtomicI32,
}

/// Where the generation begins in `Shard::waiters`.
const GENERATION_SHIFT: u32 = 32;

/// The bits of a word above an address; and those below, which are zero in a Shard's address.
const HIGH_BITS: u32 = u64::BITS - POINTER_BITS;
const LOW_BITS: u32 = align_of::<Shard>().trailing_zeros();

impl Shard {
    fn new() -> Shard {
        Shard {
            epoll: Epoll::new(),
            waiters: AtomicU64::new(0),
            last_poll: AtomicU64::new(0),
            waited_since: AtomicU64::new(0),
            seen_run: AtomicU32::new(0),
            run_since: AtomicU64::new(0),
            cpu: AtomicI32::new(-1),
        }
    }

    /// Returns a word, never 0, for this shard in its present generation: its address, with the
    /// generation in the bits above and below the address. The words repeat after eight million
    /// runtimes.
    pub(super) fn handle(&self) -> u64 {
        self.handle_in(self.waiters.load(Ordering::Relaxed) >> GENERATION_SHIFT)
    }

    fn handle_in(&self, generation: u64) -> u64 {
        let address = std::ptr::from_ref(self).expose_provenance() as u64;
        debug_assert!(address >> POINTER_BITS == 0 && address.trailing_zeros() >= LOW_BITS);
        let high = generation >> LOW_BITS & ((1 << HIGH_BITS) - 1);
        address | generation & ((1 << LOW_BITS) - 1) | high << POINTER_BITS
    }

    /// Returns the shard of a handle, if the same runtime still uses it. `handle` may be 0.
    pub(super) fn from_handle(handle: u64) -> Option<&'static Shard> {
        let address = handle & ((1 << POINTER_BITS) - 1) & !((1 << LOW_BITS) - 1);
        // SAFETY: 0, or the address of a Shard, which is never freed (invariant 2).
        let shard = unsafe {
            std::ptr::with_exposed_provenance::<Shard>(address as usize).as_ref::<'static>()?
        };
        (shard.handle() == handle).then_some(shard)
    }

    /// Returns the number of goroutines and tasks that wait for one of its descriptors.
    fn waiters(&self) -> u32 {
        self.waiters.load(Ordering::Relaxed) as u32
    }

    fn has_waiters(&self) -> bool {
        self.waiters() != 0
    }

    /// Counts a goroutine of `sched` that is about to wait for one of the descriptors.
    pub(super) fn count_waiter(&self, sched: &Sched) {
        // SeqCst, and a full barrier before `is_watched` reads. Pairs with the swap at the end of
        // `Poller::sleep_as_idle_poller`.
        if self.waiters.fetch_add(1, Ordering::SeqCst) as u32 == 0 {
            fence_after_rmw();
            self.waited_since.store(now(), Ordering::Relaxed);
            if !sched.poller.is_watched(self) {
                sched.ensure_idle_poller();
            }
        }
    }

    /// Counts the end of a goroutine's wait. The goroutine's runtime has not ended.
    pub(super) fn uncount_waiter(&self) {
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts the end of a task's wait in the shard of `handle`, unless the runtime that used the
    /// shard then has ended.
    pub(super) fn uncount_waiter_of(handle: u64) {
        if let Some(shard) = Shard::from_handle(handle) {
            let uncount = |waiters: u64| {
                let is_same = shard.handle_in(waiters >> GENERATION_SHIFT) == handle;
                is_same.then(|| waiters - 1)
            };
            _ = shard.waiters.fetch_update(Ordering::Relaxed, Ordering::Relaxed, uncount);
        }
    }

    /// Begins the next generation, without waiters. No runtime uses the shard.
    fn begin_generation(&self) {
        let next = |waiters: u64| Some(((waiters >> GENERATION_SHIFT) + 1) << GENERATION_SHIFT);
        _ = self.waiters.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
    }

    /// Returns whether no thread has polled it for `age`.
    fn is_unpolled_for(&self, age: Nanos) -> bool {
        now().saturating_sub(self.last_poll.load(Ordering::Relaxed)) >= age
    }

    /// Returns whether its P, whose run number is `run`, had that number for `age`, as far as the
    /// callers of this function have noticed.
    fn is_stuck(&self, run: Option<u32>, age: Nanos) -> bool {
        let Some(run) = run else { return true };
        if self.seen_run.swap(run, Ordering::Relaxed) != run {
            self.run_since.store(now(), Ordering::Relaxed);
        }
        now().saturating_sub(self.run_since.load(Ordering::Relaxed)) >= age
    }

    /// Waits for events until `deadline` (0: not at all), and adds the goroutines that they wake to
    /// `ready`.
    fn poll(&self, deadline: Nanos, ready: &mut ReadyBatch) {
        if self.epoll.is_open() {
            self.epoll.wait(deadline, |event| Pollable::notify(event, &mut ready.0, &mut ready.1));
        }
        self.last_poll.store(now(), Ordering::Relaxed);
    }
}

/// Pollers that no runtime uses.
static UNUSED: FreeList<Poller> = FreeList::new();

impl Reusable for Poller {
    fn free_link(&self) -> &FreeLink<Poller> {
        &self.free_link
    }
}

impl Poller {
    /// Returns a poller for a new runtime: an unused one, or a new one.
    pub(crate) fn take() -> &'static Poller {
        UNUSED.pop_or_leak(|| Poller {
            shards: std::array::from_fn(|_| Shard::new()),
            sysmon: OnceLock::new(),
            free_link: FreeLink::new(),
            opening: Lock::new(()),
            blocked: AtomicU32::new(0),
            delays: LatencyHistogram::new(),
        })
    }

    /// Returns the poller's sysmon, in the state that it has before its thread starts.
    pub(crate) fn sysmon(&'static self) -> &'static Sysmon {
        let sysmon = *self.sysmon.get_or_init(|| Sysmon::leak(self));
        sysmon.reset();
        sysmon
    }

    /// Closes the epoll instances. All threads that poll have ended.
    pub(crate) fn close(&self) {
        for shard in &self.shards {
            shard.epoll.close();
            shard.begin_generation();
        }
    }

    /// Closes the epoll instances and makes the memory available to a later runtime. The poller's
    /// runtime and all its threads have ended.
    pub(crate) fn give_back(&'static self) {
        self.blocked.store(0, Ordering::Relaxed);
        self.delays.clear();
        self.close();
        for shard in &self.shards {
            shard.last_poll.store(0, Ordering::Relaxed);
            shard.cpu.store(-1, Ordering::Relaxed);
        }
        UNUSED.push(self);
    }

    /// Returns the number of goroutines that wait for a descriptor.
    pub(crate) fn waiters(&self) -> usize {
        self.shards.iter().map(|shard| shard.waiters() as usize).sum()
    }

    /// Returns whether any goroutine waits for a descriptor.
    pub(crate) fn has_waiters(&self) -> bool {
        self.shards.iter().any(Shard::has_waiters)
    }

    /// Returns the instance with the eventfd, through which a thread that sleeps in the poller is
    /// woken.
    pub(crate) fn wakeup_epoll(&self) -> &Epoll {
        &self.shards[0].epoll
    }

    /// Returns the shard of the P with id `p`.
    pub(super) fn shard_of(&'static self, p: u32) -> &'static Shard {
        &self.shards[p as usize % SHARDS]
    }

    /// As [`Poller::shard_of`], and opens the shard if needed.
    pub(super) fn open_shard(&'static self, p: u32) -> io::Result<&'static Shard> {
        let shard = self.shard_of(p);
        if !shard.epoll.is_open() {
            let _one_at_a_time = self.opening.lock();
            self.wakeup_epoll().open_with_breaks()?;
            shard.epoll.open()?;
        }
        Ok(shard)
    }

    /// Returns whether `shard` is one of this poller's.
    pub(super) fn owns(&self, shard: &Shard) -> bool {
        self.shards.as_ptr_range().contains(&std::ptr::from_ref(shard))
    }

    /// Returns the bit of `shard`, which is one of this poller's.
    pub(super) fn bit_of(&self, shard: &Shard) -> u32 {
        debug_assert!(self.owns(shard));
        // SAFETY: both pointers are into `shards`.
        let i = unsafe { std::ptr::from_ref(shard).offset_from(self.shards.as_ptr()) };
        1 << i
    }

    /// Returns the shards whose bits are set.
    pub(super) fn shards_of(&self, bits: u32) -> impl Iterator<Item = &Shard> {
        self.shards.iter().enumerate().filter(move |(i, _)| bits & 1 << i != 0).map(|(_, s)| s)
    }

    /// Returns the bits of the shards that are open.
    fn open_bits(&self) -> u32 {
        let open = |i: &usize| self.shards[*i].epoll.is_open();
        (0..SHARDS).filter(open).fold(0, |bits, i| bits | 1 << i)
    }

    /// Returns whether the idle poller is blocked in any shard.
    pub(crate) fn has_blocked_idle_poller(&self) -> bool {
        self.blocked.load(Ordering::Relaxed) != 0
    }

    /// Polls, without waiting, the shards of the P with id `p`, and those that were neglected for
    /// `age`: no thread has polled them for so long, and their P has run the same goroutine all the
    /// time. `run_of` returns the run number of the P with some id. The shards of Ps that have
    /// retired (`procs` is the number of Ps now) are divided among the others.
    pub(crate) fn poll(
        &self,
        p: u32,
        procs: u32,
        age: Nanos,
        run_of: impl Fn(u32) -> Option<u32>,
    ) -> ReadyBatch {
        let own = p % SHARDS as u32;
        // SAFETY: no arguments.
        let cpu = unsafe { libc::sched_getcpu() };
        self.shards[own as usize].cpu.store(cpu, Ordering::Relaxed);
        self.poll_where(|i, shard| {
            i % procs.min(SHARDS as u32) == own
                || shard.is_unpolled_for(age)
                    && (shard.is_unpolled_for(age.saturating_mul(MAX_NEGLECT))
                        || shard.is_stuck(run_of(i), age))
        })
    }

    /// Returns an open shard whose P runs on `cpu`: the last poll by the P's owner was there, and a
    /// thread has polled it within [`CPU_KNOWN_NANOS`]. A hint: the P may have moved or retired.
    pub(super) fn shard_on_cpu(&'static self, cpu: i32) -> Option<&'static Shard> {
        let since = now().saturating_sub(CPU_KNOWN_NANOS);
        self.shards.iter().find(|shard| {
            shard.cpu.load(Ordering::Relaxed) == cpu
                && shard.last_poll.load(Ordering::Relaxed) >= since
                && shard.epoll.is_open()
        })
    }

    /// Polls, without waiting, the shards that were not polled for `age`.
    pub(crate) fn poll_neglected(&self, age: Nanos) -> ReadyBatch {
        self.poll_where(|_, shard| shard.is_unpolled_for(age))
    }

    /// Polls the shards that have waiters, that the idle poller does not watch, and that are
    /// `wanted`, by their index.
    fn poll_where(&self, wanted: impl Fn(u32, &Shard) -> bool) -> ReadyBatch {
        let mut ready = ReadyBatch(Batch::new(), RunList::new());
        let blocked = self.blocked.load(Ordering::Relaxed);
        for (i, shard) in self.shards.iter().enumerate() {
            let unwatched = blocked & 1 << i == 0;
            if shard.has_waiters() && unwatched && wanted(i as u32, shard) {
                let unpolled_since = shard
                    .last_poll
                    .load(Ordering::Relaxed)
                    .max(shard.waited_since.load(Ordering::Relaxed));
                let found = ready.len();
                shard.poll(0, &mut ready);
                if ready.len() > found {
                    let polled = shard.last_poll.load(Ordering::Relaxed);
                    self.delays.add(polled.saturating_sub(unpolled_since));
                }
            }
        }
        ready
    }

    /// Sleeps until a descriptor is ready, at most until `deadline`.
    pub(crate) fn sleep(&self, deadline: Nanos) -> ReadyBatch {
        let mut ready = ReadyBatch(Batch::new(), RunList::new());
        match self.open_bits() {
            0 | 1 => self.shards[0].poll(deadline, &mut ready),
            _ => {
                let bits = epoll::wait_any(self.shards.iter().map(|s| &s.epoll), deadline);
                self.shards_of(bits).for_each(|shard| shard.poll(0, &mut ready));
            }
        }
        ready
    }

    /// As [`Poller::sleep`], for the idle poller: other Ms rely on it, and do not poll meanwhile.
    pub(crate) fn sleep_as_idle_poller(&self, deadline: Nanos) -> ReadyBatch {
        self.blocked.store(self.open_bits(), Ordering::Relaxed);
        let ready = self.sleep(deadline);
        // SeqCst, with `Shard::count_waiter`: either a goroutine that begins to wait sees that the
        // idle poller is gone, or this M sees the goroutine before it does anything else.
        self.blocked.swap(0, Ordering::SeqCst);
        fence_after_rmw();
        ready
    }

    /// Returns whether a goroutine waits in a shard that the idle poller does not watch, because
    /// the shard was opened after the idle poller fell asleep.
    pub(crate) fn has_unwatched_shard(&self) -> bool {
        self.shards.iter().any(|shard| shard.has_waiters() && !self.is_watched(shard))
    }

    /// Returns whether the idle poller will see events of `shard`.
    fn is_watched(&self, shard: &Shard) -> bool {
        self.blocked.load(Ordering::Relaxed) & self.bit_of(shard) != 0
    }
}

/// Goroutines and tasks whose descriptors are ready. The caller must wake them.
#[must_use = "the goroutines and tasks must be woken"]
pub(crate) struct ReadyBatch(Batch, RunList);

impl ReadyBatch {
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.0.len() + self.1.len()
    }

    /// Wakes them. `here` is the result of the caller's `Rt::enter()`.
    pub(crate) fn wake(self, here: Option<Rt>) {
        if let Some(rt) = here.filter(|_| !self.is_empty()) {
            record::source(rt, record::Source::Poller, 0);
        }
        self.0.wake_all(here, RETRY);
        waker::wake_all(here, self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    #[test]
    fn a_task_that_outlives_its_runtime_is_not_uncounted_in_the_next() {
        let shard: &'static Shard = Box::leak(Box::new(Shard::new()));
        // 0: nothing to do. 1: the thread is about to uncount the waiter of the last handle.
        const BUSY: u64 = 1;
        let (handle, done) = (AtomicU64::new(0), AtomicBool::new(false));
        let wait_while = |condition: &dyn Fn(u64) -> bool| {
            while condition(handle.load(Ordering::Acquire)) {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    let taken = handle.load(Ordering::Acquire);
                    if taken > BUSY {
                        handle.store(BUSY, Ordering::Release);
                        Shard::uncount_waiter_of(taken);
                        handle.store(0, Ordering::Release);
                    } else {
                        std::thread::yield_now();
                    }
                }
            });
            let (mut wrong, began) = (None, Instant::now());
            // On a busy machine each hand-over between the threads takes a slice of the kernel's.
            for i in (0..50_000_u32).take_while(|_| began.elapsed() < Duration::from_secs(2)) {
                shard.waiters.fetch_add(1, Ordering::Relaxed);
                handle.store(shard.handle(), Ordering::Release);
                wait_while(&|handle| handle > BUSY);
                // At different moments of the other thread's call.
                (0..i % 32).for_each(|_| std::hint::spin_loop());
                shard.begin_generation();
                wait_while(&|handle| handle != 0);
                if shard.waiters() != 0 {
                    wrong = Some((i, shard.waiters()));
                    break;
                }
            }
            done.store(true, Ordering::Release);
            assert_eq!(wrong, None, "a waiter of the last generation was uncounted in this one");
        });
    }
}
