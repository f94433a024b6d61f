//! The algorithm of a select, over [`Arm`]s without types.
//!
//! # Three passes
//! 1. **Poll.** Polls the arms in a random order (as written, if the select is biased) and does the
//!    first operation that is ready. Each channel is probed without its lock first, so an arm that
//!    is not ready costs one read.
//! 2. **Enlist.** In the same order, checks each arm again under its channel's lock. If the arm is
//!    still not ready, its node (a [`Sudog`]) joins the channel's queue. One lock is held at a
//!    time. Then the goroutine parks.
//! 3. **Withdraw.** Another goroutine has claimed the wait for one arm, or the deadline has. The
//!    other nodes are taken out of their queues.
//!
//! # The races of pass 2
//! While the later arms are being enlisted, other goroutines can already find the earlier ones.
//!
//! - *An arm has become ready.* The select claims its own wait for that arm. If the claim is
//!   **lost**, another goroutine has claimed an earlier arm: the select leaves this arm alone and
//!   parks, because the wake-up is on its way. If the claim is **won**, no other goroutine can
//!   claim this wait any more: the select does the operation and withdraws the enlisted nodes.
//! - *The partner is another select.* The select claims its own wait first, then the partner's. The
//!   second claim fails if the partner's node is stale (its wait was claimed through another arm).
//!   If there is no other partner, the select has claimed itself for nothing. It **aborts**:
//!   withdraws everything and starts again.
//! - *The partner is the same select*, through another arm. That node is passed over: a select
//!   never exchanges a value with itself.
//!
//! An abort is harmless if the partner continues. But two selects that enlist in opposite orders
//! may abort each other: each has claimed itself for the arm where it found the other's node. So
//! after an abort a select enlists in the order of the channels' addresses. Suppose that S1 aborts
//! because S2 has claimed itself, S2 because of S3, and so on around a cycle. Each select has
//! enlisted at the channel where its predecessor stands, and stands at a later one itself, so the
//! addresses would have to grow all the way around the cycle. (On one channel two selects cannot
//! abort each other: both claims are made under its lock.) So one of the selects continues, after
//! at most one abort of each.
//!
//! # With `default`, or a deadline
//! "No arm is ready" must be true of all arms at one moment. Polling them one by one does not show
//! that: c1 holds a value; the select finds c2 empty; another goroutine fills c2, then takes the
//! value from c1; the select finds c1 empty. One of the two was ready all the time. So if the poll
//! finds nothing, all channels are locked, in the order of their addresses, and checked once more.
//! A select of one channel needs no lock for that.
//!
//! The same holds for a select whose deadline has passed before it could park. A select that parked
//! and then timed out had such a moment: the claim by the deadline, when all its nodes were in
//! their queues. It polls again before it returns, because it may run long after that claim, and an
//! arm that became ready in between is better than a time-out.
//!
//! # Futures
//! A future is polled in pass 1 when its turn comes in the random order, outside the runtime. If it
//! is ready, it is chosen: its value could not be put back. All futures of a select share one waker
//! ([`SelectFutures`]). After pass 2 the waker is armed: a wake-up claims the wait by the number of
//! the first future arm, and the select starts again. If a wake-up came after the poll and before
//! that, the select claims its own wait and starts again as well.
//!
//! A future's wake-up that loses the claim is not lost to the future: the future is dropped with
//! the select, or it is polled again by its owner.
//!
//! Invariants:
//! 1. From the first enlisting to the last withdrawal the arms do not move: their nodes are in
//!    queues.
//! 2. A wait is claimed for arm i by the number i + 1.
//! 3. An arm is done at most once. When it is chosen, its target becomes [`ArmTarget::Nothing`] and
//!    its [`Outcome`] is stored in the slot that owns the value. No other code writes an outcome,
//!    so a slot can trust it.
//!
//! Rejected: Go's way, which holds all locks for passes 1 and 2 together and again for pass 3. It
//! needs no second claim and no aborts, but a select whose first arm is ready pays for all of them.

use super::super::core::{ChanSide, Core, NO_SLEEPER, Step};
use super::super::queue::{Sudog, SudogState};
use super::futures::{ClaimedBy, SelectFutures};
use crate::sched::Rt;
use crate::sched::random;
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::{self, Waiter};
use crate::sys::clock::{NEVER, Nanos, now};
use std::cell::Cell;
use std::pin::Pin;
use std::task::Context;

/// The largest number of arms of one select: as many as the claim word can name. Go allows two
/// more.
const MAX_ARMS: usize = Waiter::TIMED_OUT as usize - 1;
/// Choices made from one random number. Eight arms have 40,320 orders, so 64 bits leave no visible
/// bias.
const CHOICES_PER_NUMBER: usize = 8;

/// One operation of a select, without its type.
pub struct Arm<'a> {
    target: ArmTarget<'a>,
    /// Where the outcome is stored if this arm is chosen.
    outcome: Option<&'a Cell<Outcome>>,
    pub(super) node: Sudog,
}

pub(super) enum ArmTarget<'a> {
    /// `never()`, an operation that was removed, or one that is done.
    Nothing,
    Channel(&'a Core, ChanSide),
    After(Nanos),
    Future(Pin<&'a mut (dyn ArmFuture + 'a)>),
}

/// The future of an arm, with room for its value.
pub(super) trait ArmFuture {
    /// Polls the future. Returns true if it is ready: then its value is stored.
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> bool;

    /// Drops the future. Its value stays.
    fn clear(self: Pin<&mut Self>);
}

/// How a select waits for the futures among its arms.
pub(super) trait FutureWaits {
    /// Whether there are futures among the arms.
    const ANY: bool;

    /// Polls a future. Returns true if it is ready. Called outside the runtime.
    fn poll(&self, future: Pin<&mut (dyn ArmFuture + '_)>) -> bool;

    /// Returns the number by which a wake-up of a future claims the wait.
    fn winner(&self) -> u16;

    /// Makes a wake-up of a future claim `waiter`. Returns false if a wake-up came during the
    /// polls: then no later one claims.
    fn arm(&self, waiter: Waiter) -> bool;

    /// Ends what [`FutureWaits::arm`] began, after the wait. Called outside the runtime.
    fn disarm(&self, by: ClaimedBy);

    /// Lets others run before the next polls, because a wake-up came during the last ones.
    fn yield_now(&self);
}

/// A select without futures.
struct NoFutures;

impl FutureWaits for NoFutures {
    const ANY: bool = false;

    fn poll(&self, _: Pin<&mut (dyn ArmFuture + '_)>) -> bool {
        false
    }

    fn winner(&self) -> u16 {
        Waiter::TIMED_OUT
    }

    fn arm(&self, _: Waiter) -> bool {
        true
    }

    fn disarm(&self, _: ClaimedBy) {}

    fn yield_now(&self) {}
}

/// The result of an arm, and what became of the value in its slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// No operation was done, because the arm was not chosen or is an `after`: the slot is as it
    /// was.
    NotDone,
    /// The arm was chosen, and the value has moved out of the slot, or into it.
    Moved,
    /// The arm was chosen, and the channel is closed: the slot is as it was.
    Closed,
}

impl<'a> Arm<'a> {
    pub(super) fn new(target: ArmTarget<'a>, slot: *mut u8) -> Arm<'a> {
        Arm { target, outcome: None, node: Sudog::new(slot) }
    }

    /// Returns an arm for an operation on `core`, or one that is never ready if that is None.
    ///
    /// # Safety
    /// For 'a, `slot` is a value to send to the channel, or room for one to receive. The value
    /// moves if this arm is chosen with [`Outcome::Moved`].
    #[inline]
    pub(super) unsafe fn channel(core: Option<&'a Core>, side: ChanSide, slot: *mut u8) -> Arm<'a> {
        Arm::new(core.map_or(ArmTarget::Nothing, |core| ArmTarget::Channel(core, side)), slot)
    }

    /// Makes the select store the arm's outcome in `outcome`.
    #[inline]
    pub(super) fn reports_to(mut self, outcome: &'a Cell<Outcome>) -> Arm<'a> {
        self.outcome = Some(outcome);
        self
    }

    #[inline]
    pub(super) fn core(&self) -> Option<(&'a Core, ChanSide)> {
        match self.target {
            ArmTarget::Channel(core, side) => Some((core, side)),
            _ => None,
        }
    }

    /// Returns the sort key that brings the arms of each channel together, those without one first.
    pub(super) fn address(&self) -> usize {
        self.core().map_or(0, |(core, _)| std::ptr::from_ref(core) as usize)
    }

    /// Ends the arm after its operation (invariant 3).
    #[inline]
    fn end(&mut self, outcome: Outcome) {
        self.target = ArmTarget::Nothing;
        if let Some(report) = self.outcome {
            report.set(outcome);
        }
    }
}

/// The result of a select: which arm was chosen.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    pub(super) index: usize,
    pub(super) outcome: Outcome,
}

impl Chosen {
    /// The result if `default` was chosen.
    const DEFAULT: Chosen = Chosen { index: usize::MAX, outcome: Outcome::NotDone };

    /// Returns the index of the arm.
    #[inline]
    pub fn index(self) -> usize {
        self.index
    }

    /// Returns the result of the chosen arm, which its `finish` returned.
    #[inline]
    pub fn take<R>(self, result: Option<R>) -> R {
        match result {
            Some(result) => result,
            None => unchosen(),
        }
    }
}

/// Stands for the impossible case of a `match` that has an arm for every choice.
#[cold]
pub fn unchosen() -> ! {
    unreachable!("select: the chosen arm has a result")
}

/// `select! {}`: waits forever.
pub fn no_cases() -> ! {
    loop {
        wait::block(WaitReason::SelectNoCases, |_| true);
    }
}

/// Waits for one of the arms.
pub fn choose(arms: &mut [Arm<'_>]) -> Chosen {
    match select(arms, NEVER, Preference::None) {
        Some(chosen) => chosen,
        None => unchosen(),
    }
}

/// Does one of the arms if that needs no waiting.
pub fn choose_or_default(arms: &mut [Arm<'_>]) -> Chosen {
    poll(arms, Preference::None).unwrap_or(Chosen::DEFAULT)
}

/// As [`choose`], but takes the first of the arms that are ready.
pub fn choose_first(arms: &mut [Arm<'_>]) -> Chosen {
    match select(arms, NEVER, Preference::First) {
        Some(chosen) => chosen,
        None => unchosen(),
    }
}

/// As [`choose_or_default`], but takes the first of the arms that are ready.
pub fn choose_first_or_default(arms: &mut [Arm<'_>]) -> Chosen {
    poll(arms, Preference::First).unwrap_or(Chosen::DEFAULT)
}

/// Which of several ready arms a select takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Preference {
    /// Any, with the same probability.
    None,
    /// The arm that is written first.
    First,
}

/// The order in which the arms are polled: a random one, made while it is being used (Fisher and
/// Yates), or that of their numbers.
pub(super) struct Shuffle {
    bits: u64,
    used: usize,
    /// 0 if the order is not random: then every choice is made from the same bits, which are 0, and
    /// the order stays as it is.
    step: usize,
}

impl Shuffle {
    /// Starts from the order in which the arms lie, or from that of their numbers.
    #[inline]
    pub(super) fn start(arms: &[Arm<'_>], preference: Preference) -> Shuffle {
        match preference {
            Preference::None => {
                as_they_lie(arms);
                Shuffle { bits: 0, used: 0, step: 1 }
            }
            Preference::First => {
                for (i, arm) in arms.iter().enumerate() {
                    arms[usize::from(arm.node.arm.get())].node.order.set(i as u16);
                }
                Shuffle { bits: 0, used: 1, step: 0 }
            }
        }
    }

    /// Returns a random number below `n`: the upper half of a product. The lower half keeps the
    /// randomness that is left.
    #[inline]
    fn below(&mut self, here: Option<Rt>, n: usize) -> usize {
        if self.used.is_multiple_of(CHOICES_PER_NUMBER) {
            self.bits = random::random(here);
        }
        self.used += self.step;
        let product = u128::from(self.bits) * n as u128;
        self.bits = product as u64;
        (product >> 64) as usize
    }

    /// Chooses the arm at position `k`. The positions before it are chosen already.
    #[inline]
    pub(super) fn place(&mut self, here: Option<Rt>, arms: &[Arm<'_>], k: usize) -> usize {
        let other = k + self.below(here, arms.len() - k);
        arms[k].node.order.swap(&arms[other].node.order);
        usize::from(arms[k].node.order.get())
    }
}

/// Makes the order of the arms that in which they lie.
#[inline]
fn as_they_lie(arms: &[Arm<'_>]) {
    for (i, arm) in arms.iter().enumerate() {
        arm.node.order.set(i as u16);
    }
}

/// What a pass found.
#[derive(Clone, Copy)]
enum Found {
    Nothing,
    /// The operation of this arm is done.
    Chosen(usize, Outcome),
    /// The channel of this arm needs a block; then the select starts again.
    NoBlock(usize),
}

impl Found {
    /// Returns what `step` of arm `i` means, and wakes the partner.
    #[inline]
    fn of(here: Option<Rt>, i: usize, step: Step) -> Found {
        match step {
            Step::Done(sleeper) => {
                if sleeper != NO_SLEEPER {
                    wait::wake_here(here, sleeper);
                }
                Found::Chosen(i, Outcome::Moved)
            }
            Step::Closed => Found::Chosen(i, Outcome::Closed),
            Step::Wait => Found::Nothing,
            Step::NoBlock => Found::NoBlock(i),
        }
    }
}

/// The order in which the arms lie in their slice.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ArmOrder {
    AsWritten,
    /// By the address of their channel: after an abort.
    ByAddress,
}

/// Gives the arms their numbers. Returns the number of the first future, if there is one.
pub(super) fn number(arms: &[Arm<'_>]) -> Option<u16> {
    assert!(arms.len() <= MAX_ARMS, "select: more than {MAX_ARMS} arms");
    let mut first_future = None;
    for (i, arm) in arms.iter().enumerate() {
        arm.node.arm.set(i as u16);
        if let ArmTarget::Future(_) = arm.target {
            first_future = first_future.or(Some(i as u16));
        }
    }
    first_future
}

/// Returns the position of the arm with this number.
#[inline]
fn position_of(arms: &[Arm<'_>], number: u16, order: ArmOrder) -> usize {
    let is_it = |arm: &Arm<'_>| arm.node.arm.get() == number;
    match order {
        ArmOrder::AsWritten => usize::from(number),
        ArmOrder::ByAddress => arms.iter().position(is_it).unwrap_or_else(|| unchosen()),
    }
}

/// Ends the select with arm `i`, whose operation is done. Called outside the runtime.
fn finish(arms: &mut [Arm<'_>], i: usize, outcome: Outcome) -> Chosen {
    let core = arms[i].core();
    arms[i].end(outcome);
    if let Some((core, _)) = core {
        core.free_blocks();
    }
    Chosen { index: usize::from(arms[i].node.arm.get()), outcome }
}

/// Adds a block to the channel of arm `i`. Called outside the runtime.
fn grow(arms: &[Arm<'_>], i: usize) {
    if let Some((core, _)) = arms[i].core() {
        core.grow_slow();
    }
}

/// The earliest deadline of a select.
#[derive(Clone, Copy)]
struct Deadline {
    when: Nanos,
    /// The number of its `after` arm; None if it is the deadline of the whole select.
    arm: Option<usize>,
}

impl Deadline {
    /// Returns the earliest of `when` and the times of the `after` arms.
    fn earliest(arms: &[Arm<'_>], when: Nanos) -> Deadline {
        let mut first = Deadline { when, arm: None };
        for (i, arm) in arms.iter().enumerate() {
            if let ArmTarget::After(when) = arm.target
                && when < first.when
            {
                first = Deadline { when, arm: Some(i) };
            }
        }
        first
    }

    fn has_passed(self) -> bool {
        self.when != NEVER && self.when <= now()
    }

    /// Ends a select whose deadline has passed: an arm that is ready now still wins.
    fn expire(
        self,
        arms: &mut [Arm<'_>],
        preference: Preference,
        futures: &impl FutureWaits,
    ) -> Option<Chosen> {
        let after = |index| Chosen { index, outcome: Outcome::NotDone };
        poll_numbered(arms, preference, futures).or_else(|| self.arm.map(after))
    }
}

/// Waits for one of the arms, or until `deadline`: then returns None.
pub(super) fn select(
    arms: &mut [Arm<'_>],
    deadline: Nanos,
    preference: Preference,
) -> Option<Chosen> {
    match number(arms) {
        None => select_numbered(arms, deadline, preference, &NoFutures),
        Some(future) => select_futures(arms, deadline, preference, future),
    }
}

/// [`select`] with futures among the arms; `first` is the number of the first one.
#[inline(never)]
fn select_futures(
    arms: &mut [Arm<'_>],
    deadline: Nanos,
    preference: Preference,
    first: u16,
) -> Option<Chosen> {
    let futures = SelectFutures::new(first + 1);
    let arms = ClearFutures(arms);
    select_numbered(arms.0, deadline, preference, &futures)
}

/// Drops the futures of the arms at the end of a select, while their waker still exists. A future
/// in the queue of a lock would otherwise be handed the lock after its goroutine was orphaned,
/// because only the waker tells whose it is.
struct ClearFutures<'a, 'b>(&'a mut [Arm<'b>]);

impl Drop for ClearFutures<'_, '_> {
    fn drop(&mut self) {
        for arm in &mut *self.0 {
            if let ArmTarget::Future(future) = &mut arm.target {
                future.as_mut().clear();
            }
        }
    }
}

/// [`select`] for arms that have their numbers.
#[inline]
fn select_numbered<F: FutureWaits>(
    arms: &mut [Arm<'_>],
    deadline: Nanos,
    preference: Preference,
    futures: &F,
) -> Option<Chosen> {
    let deadline = Deadline::earliest(arms, deadline);
    let mut order = ArmOrder::AsWritten;
    loop {
        let (mut found, here) = poll_pass(Rt::enter(), arms, preference, futures);
        if let Found::Nothing = found {
            if deadline.has_passed() {
                wait::leave(here);
                return deadline.expire(arms, preference, futures);
            }
            match enlist_and_park(here, arms, deadline.when, order, futures) {
                Parked::Claimed(i) => {
                    let moved = arms[i].node.state() == SudogState::Moved;
                    let outcome = if moved { Outcome::Moved } else { Outcome::Closed };
                    return Some(finish(arms, i, outcome));
                }
                Parked::TimedOut => return deadline.expire(arms, preference, futures),
                Parked::FutureWoken => continue,
                Parked::FutureWasWoken => {
                    futures.yield_now();
                    continue;
                }
                Parked::No(late) => found = late,
            }
        } else {
            wait::leave(here);
        }
        match found {
            Found::Chosen(i, outcome) => return Some(finish(arms, i, outcome)),
            Found::NoBlock(i) => grow(arms, i),
            Found::Nothing if order == ArmOrder::ByAddress => {} // aborted again
            Found::Nothing => {
                arms.sort_unstable_by_key(Arm::address);
                order = ArmOrder::ByAddress;
            }
        }
    }
}

/// How passes 2 and 3 ended.
enum Parked {
    /// Another goroutine has done the operation of this arm, or closed its channel.
    Claimed(usize),
    TimedOut,
    /// A future was woken.
    FutureWoken,
    /// The select did not park, because a future was woken during its poll or after it.
    FutureWasWoken,
    /// The select did not park. `Found::Nothing` means that it aborted.
    No(Found),
}

/// Passes 2 and 3, and the park between them. Leaves the runtime.
#[inline]
fn enlist_and_park<F: FutureWaits>(
    here: Option<Rt>,
    arms: &[Arm<'_>],
    deadline: Nanos,
    order: ArmOrder,
    futures: &F,
) -> Parked {
    if order == ArmOrder::ByAddress {
        // Enlist the arms as they lie, not in the random order of pass 1.
        as_they_lie(arms);
    }
    let mut found = Found::Nothing;
    let mut enlisted = 0;
    let (mut is_armed, mut was_woken) = (false, false);
    let (winner, here) = wait::wait_in(here, WaitReason::Select, deadline, |waiter| {
        let mut park = enlist_pass(here, arms, waiter, &mut enlisted, &mut found);
        if F::ANY && park {
            is_armed = futures.arm(waiter);
            // If this claim is lost, the wake-up of another party is on its way.
            was_woken = !is_armed && waiter.claim(futures.winner());
            park = !was_woken;
        }
        if !park {
            withdraw_pass(arms, enlisted, None);
        }
        park
    });
    let Some(winner) = winner else {
        wait::leave(here);
        return if was_woken { Parked::FutureWasWoken } else { Parked::No(found) };
    };
    let by_future = F::ANY && winner == futures.winner();
    let by_arm = winner != Waiter::TIMED_OUT && !by_future;
    let won = by_arm.then(|| position_of(arms, winner - 1, order));
    withdraw_pass(arms, enlisted, won);
    wait::leave(here);
    if is_armed {
        futures.disarm(if by_future { ClaimedBy::Wakeup } else { ClaimedBy::Other });
    }
    if by_future {
        return Parked::FutureWoken;
    }
    won.map_or(Parked::TimedOut, Parked::Claimed)
}

/// Pass 1. If it finds nothing, the `order` of the arms is complete for pass 2. Polls futures
/// outside the runtime, and enters it again.
#[inline]
fn poll_pass<F: FutureWaits>(
    mut here: Option<Rt>,
    arms: &mut [Arm<'_>],
    preference: Preference,
    futures: &F,
) -> (Found, Option<Rt>) {
    let mut shuffle = Shuffle::start(arms, preference);
    for k in 0..arms.len() {
        let i = shuffle.place(here, arms, k);
        if F::ANY
            && let ArmTarget::Future(future) = &mut arms[i].target
        {
            wait::leave(here);
            let is_ready = futures.poll(future.as_mut());
            here = Rt::enter();
            if is_ready {
                return (Found::Chosen(i, Outcome::Moved), here);
            }
            continue;
        }
        let Some((core, side)) = arms[i].core() else { continue };
        if !core.probe_ready(side) {
            continue;
        }
        core.lock();
        // SAFETY: the lock is held; the slot is as `Arm::channel` demands.
        let step =
            unsafe { core.step(side, core.buffer.elem(), arms[i].node.slot.get(), NO_SLEEPER) };
        core.unlock();
        match Found::of(here, i, step) {
            Found::Nothing => {}
            found => return (found, here),
        }
    }
    (Found::Nothing, here)
}

/// Pass 2. Returns true if the select must park. Otherwise `found` says what it found, and
/// `Found::Nothing` means that it aborted. The first `enlisted` arms of the order are in queues.
#[inline]
fn enlist_pass(
    here: Option<Rt>,
    arms: &[Arm<'_>],
    waiter: Waiter,
    enlisted: &mut usize,
    found: &mut Found,
) -> bool {
    let me = waiter.sleeper();
    for k in 0..arms.len() {
        let i = usize::from(arms[k].node.order.get());
        let node = &arms[i].node;
        if let Some((core, side)) = arms[i].core() {
            core.lock();
            // SAFETY: the lock is held; the node is withdrawn before it moves (invariant 1); the
            // slot is as `Arm::channel` demands.
            unsafe {
                if core.is_ready(side, me) {
                    if !waiter.claim(node.arm.get() + 1) {
                        core.unlock();
                        return true;
                    }
                    let step = core.step(side, core.buffer.elem(), node.slot.get(), me);
                    core.unlock();
                    *found = Found::of(here, i, step);
                    return false;
                }
                node.waiter.set(waiter);
                let watcher = core.enlist(side, node);
                core.unlock();
                if watcher != NO_SLEEPER {
                    wait::wake_here(here, watcher);
                }
            }
        }
        *enlisted = k + 1;
    }
    true
}

/// Pass 3: withdraws the first `enlisted` arms of the order, except the one that won.
#[inline]
pub(super) fn withdraw_pass(arms: &[Arm<'_>], enlisted: usize, won: Option<usize>) {
    for arm in &arms[..enlisted] {
        let i = usize::from(arm.node.order.get());
        if Some(i) != won
            && let Some((core, side)) = arms[i].core()
        {
            // SAFETY: inside the runtime or on a plain thread; the node was enlisted there.
            unsafe { core.withdraw(side, &arms[i].node) };
        }
    }
}

/// Does one of the arms if that needs no waiting. Sorts the arms.
pub(super) fn poll(arms: &mut [Arm<'_>], preference: Preference) -> Option<Chosen> {
    match number(arms) {
        None => poll_numbered(arms, preference, &NoFutures),
        Some(future) => poll_futures(arms, preference, future),
    }
}

/// [`poll`] with futures among the arms; `first` is the number of the first one.
#[inline(never)]
fn poll_futures(arms: &mut [Arm<'_>], preference: Preference, first: u16) -> Option<Chosen> {
    let futures = SelectFutures::new(first + 1);
    let arms = ClearFutures(arms);
    poll_numbered(arms.0, preference, &futures)
}

/// [`poll`] for arms that have their numbers. None of them may be in a queue.
fn poll_numbered<F: FutureWaits>(
    arms: &mut [Arm<'_>],
    preference: Preference,
    futures: &F,
) -> Option<Chosen> {
    loop {
        let (mut found, here) = poll_pass(Rt::enter(), arms, preference, futures);
        if let Found::Nothing = found {
            arms.sort_unstable_by_key(Arm::address);
            found = poll_all_locked(here, arms, preference);
        }
        wait::leave(here);
        match found {
            Found::Chosen(i, outcome) => return Some(finish(arms, i, outcome)),
            Found::NoBlock(i) => grow(arms, i),
            Found::Nothing => return None,
        }
    }
}

/// Returns each channel of the arms once. The arms are sorted by address.
pub(super) fn cores_of<'a>(arms: &'a [Arm<'_>]) -> impl Iterator<Item = &'a Core> {
    let channels = arms.chunk_by(|a, b| a.address() == b.address());
    channels.filter_map(|same| Some(same.first()?.core()?.0))
}

/// Polls all channels at one moment. The arms are sorted by address.
fn poll_all_locked(here: Option<Rt>, arms: &[Arm<'_>], preference: Preference) -> Found {
    if arms.iter().filter(|arm| arm.core().is_some()).count() < 2 {
        return Found::Nothing;
    }
    cores_of(arms).for_each(Core::lock);
    let mut shuffle = Shuffle::start(arms, preference);
    let mut found = None;
    for k in 0..arms.len() {
        let i = shuffle.place(here, arms, k);
        let Some((core, side)) = arms[i].core() else { continue };
        // SAFETY: the lock is held; the slot is as `Arm::channel` demands.
        let step =
            unsafe { core.step(side, core.buffer.elem(), arms[i].node.slot.get(), NO_SLEEPER) };
        if step != Step::Wait {
            found = Some((i, step));
            break;
        }
    }
    cores_of(arms).for_each(Core::unlock);
    found.map_or(Found::Nothing, |(i, step)| Found::of(here, i, step))
}
