//! The algorithm of a select, over [`Arm`]s without types.
//!
//! # Three passes
//! 1. **Poll.** The arms in a random order; the first that can go on is done, and that is all. A
//!    look without the lock comes first, so arms that cannot go on cost a read.
//! 2. **Enlist.** In the same order: under the channel's lock the arm is looked at again; if it
//!    still cannot go on its node joins the channel's list. One lock at a time. Then the goroutine
//!    parks.
//! 3. **Withdraw.** Someone has claimed the wait for one arm (or the deadline has); the other nodes
//!    are taken out of their lists.
//!
//! # The races of pass 2
//! While the later arms are being enlisted, the earlier ones are already in sight.
//!
//! - *An arm can go on after all.* We claim our own wait for it. **Lost**: someone has claimed an
//!   earlier arm; we leave this one alone and go to sleep, the wake-up is on its way. **Won**:
//!   nobody else can have us any more; we do the operation and withdraw what was enlisted.
//! - *The partner is another select.* Our own wait is claimed first, then its. If that fails (it
//!   was claimed elsewhere: a stale node) and there is no other partner, we are claimed for
//!   nothing: **aborted**; withdraw everything and begin again.
//! - *The partner is ourselves*, by another arm: passed over. A select never meets itself.
//!
//! An abort is harmless if the partner got on. But two selects that enlist in opposite orders may
//! abort each other: each has claimed itself for the arm where it has seen the other one. So after
//! an abort a select enlists in the order of the channels' addresses. Let S1 abort because S2 has
//! claimed itself, S2 because of S3, and so on round a circle of such selects: each has enlisted at
//! the channel where its predecessor stands, and stands at a later one itself, so the addresses
//! would grow all the way round. (On one channel they cannot abort each other: there both claims are
//! made under its lock.) So of those who are there one gets on, after one abort each at most.
//!
//! # With `default`, or a deadline
//! "Nothing can go on" must be true of all arms at one moment; polling them one by one is not
//! enough (c1 has a value; we look at c2: empty; now someone fills c2, then takes from c1; we look
//! at c1: empty. One of them was ready all the time). So if the poll finds nothing, all channels
//! are locked, in the order of their addresses, and looked at once more. A single channel is its
//! own moment, and needs no lock.
//!
//! The same holds for a select whose deadline has passed before it could park. One that parked and
//! then timed out had such a moment: the claim by the deadline, when all its nodes were in their
//! lists. It polls all the same before it returns: it may run long after that claim, and an arm that
//! became ready meanwhile is better than a time-out.
//!
//! Invariants:
//! 1. From the first enlisting to the last withdrawal the arms do not move: their nodes are in
//!    lists.
//! 2. A wait is claimed for arm i by the number i + 1.
//!
//! Rejected: Go's way, all locks for pass 1 and 2 together and again for pass 3. It needs no second
//! claim and no aborts, but a select whose first arm is ready pays for all of them.

use super::super::core::{Core, NOBODY, Side, Step};
use super::super::queue::Node;
use crate::sched::Rt;
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::{self, Waiter};
use crate::sys::clock::{NEVER, Nanos, now};
use std::cell::Cell;

/// The most arms of one select; the claim word has room for so many. Go's limit is the same but for
/// two.
const MAX_ARMS: usize = Waiter::TIMED_OUT as usize - 1;
/// Choices from one random number: 8 arms are 40 320 orders, so 64 bits leave no visible bias.
const CHOICES_PER_NUMBER: usize = 8;

/// One operation of a select, without its type.
pub struct Arm<'a> {
    target: Target<'a>,
    node: Node,
}

pub(super) enum Target<'a> {
    /// `never()`, or an operation that was taken out.
    Nothing,
    Channel(&'a Core, Side),
    After(Nanos),
}

impl<'a> Arm<'a> {
    pub(super) fn new(target: Target<'a>, slot: *mut u8) -> Arm<'a> {
        Arm { target, node: Node::new(slot) }
    }

    /// # Safety
    /// For 'a, `slot` is a value to be sent to the channel, or room for one to be received. It
    /// moves if this arm is chosen, and `done`.
    #[inline]
    pub(super) unsafe fn channel(core: Option<&'a Core>, side: Side, slot: *mut u8) -> Arm<'a> {
        Arm::new(core.map_or(Target::Nothing, |core| Target::Channel(core, side)), slot)
    }

    #[inline]
    fn core(&self) -> Option<(&'a Core, Side)> {
        match self.target {
            Target::Channel(core, side) => Some((core, side)),
            _ => None,
        }
    }

    /// For sorting: all operations of a channel together, those without one first.
    fn address(&self) -> usize {
        self.core().map_or(0, |(core, _)| std::ptr::from_ref(core) as usize)
    }
}

/// What a select came to.
///
/// Only `select` makes one, and only the macro and `Select` use it, once, with the arms it was
/// made from:
/// what lies in a slot is known by nothing else.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    pub(super) index: usize,
    /// The value has moved. Else the channel is closed.
    pub(super) done: bool,
}

impl Chosen {
    /// No arm: `default`, or the time was up.
    const NONE: usize = usize::MAX;

    fn of(index: usize, done: bool) -> Chosen {
        Chosen { index, done }
    }

    /// Which arm.
    #[inline]
    pub fn index(self) -> usize {
        self.index
    }

    /// The result of the chosen arm, from its `finish`.
    #[inline]
    pub fn take<R>(self, result: Option<R>) -> R {
        match result {
            Some(result) => result,
            None => unchosen(),
        }
    }
}

/// For a `match` that has an arm for every choice.
#[cold]
pub fn unchosen() -> ! {
    unreachable!("select: the chosen arm has a result")
}

/// `select! {}`: waits for ever.
pub fn no_cases() -> ! {
    loop {
        wait::block(WaitReason::SelectNoCases, |_| true);
    }
}

/// Waits for one of the arms.
pub fn choose(arms: &mut [Arm<'_>]) -> Chosen {
    match select(arms, NEVER) {
        Some(chosen) => chosen,
        None => unchosen(),
    }
}

/// Does one of the arms if that needs no waiting.
pub fn choose_or_default(arms: &mut [Arm<'_>]) -> Chosen {
    poll(arms).unwrap_or(Chosen::of(Chosen::NONE, false))
}

/// A random order over the arms, made while it is being used (Fisher and Yates).
struct Shuffle {
    bits: u64,
    used: usize,
}

impl Shuffle {
    /// A number below `n`, by the upper half of a product; the lower half is the randomness that is
    /// left.
    #[inline]
    fn below(&mut self, here: Option<Rt>, n: usize) -> usize {
        if self.used.is_multiple_of(CHOICES_PER_NUMBER) {
            self.bits = random(here);
        }
        self.used += 1;
        let product = u128::from(self.bits) * n as u128;
        self.bits = product as u64;
        (product >> 64) as usize
    }

    /// The arm at place `k`; places before it are settled.
    #[inline]
    fn place(&mut self, here: Option<Rt>, arms: &[Arm<'_>], k: usize) -> usize {
        let other = k + self.below(here, arms.len() - k);
        arms[k].node.order.swap(&arms[other].node.order);
        usize::from(arms[k].node.order.get())
    }

    /// From the order in which the arms lie.
    fn start(arms: &[Arm<'_>]) -> Shuffle {
        for (i, arm) in arms.iter().enumerate() {
            arm.node.order.set(i as u16);
        }
        Shuffle { bits: 0, used: 0 }
    }
}

/// A random number: the P's generator, or the thread's.
#[inline]
fn random(here: Option<Rt>) -> u64 {
    match here {
        Some(rt) => rt.random(),
        None => random_on_thread(),
    }
}

fn random_on_thread() -> u64 {
    thread_local! {
        static STATE: Cell<u64> = const { Cell::new(0) };
    }
    // SplitMix64, from the clock and the address of the thread's own state.
    let mut z = STATE.with(|state| {
        if state.get() == 0 {
            state.set(now() ^ (std::ptr::from_ref(state) as u64).rotate_left(32));
        }
        state.set(state.get().wrapping_add(0x9e37_79b9_7f4a_7c15));
        state.get()
    });
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// What a pass found.
#[derive(Clone, Copy)]
enum Found {
    Nothing,
    Chosen(usize, bool),
    /// This arm's channel needs a block; then begin again.
    NoBlock(usize),
}

impl Found {
    /// The outcome of arm `i`.
    #[inline]
    fn of(here: Option<Rt>, i: usize, step: Step) -> Found {
        match step {
            Step::Done(sleeper) => {
                if sleeper != NOBODY {
                    wait::wake_here(here, sleeper);
                }
                Found::Chosen(i, true)
            }
            Step::Closed => Found::Chosen(i, false),
            Step::Wait => Found::Nothing,
            Step::NoBlock => Found::NoBlock(i),
        }
    }
}

/// Gives the arms their numbers.
fn number(arms: &[Arm<'_>]) {
    assert!(arms.len() <= MAX_ARMS, "select: more than {MAX_ARMS} arms");
    for (i, arm) in arms.iter().enumerate() {
        arm.node.arm.set(i as u16);
    }
}

/// After a choice, outside the runtime.
fn finish(arms: &[Arm<'_>], i: usize, done: bool) -> Chosen {
    if let Some((core, _)) = arms[i].core() {
        core.tidy();
    }
    Chosen::of(usize::from(arms[i].node.arm.get()), done)
}

fn grow(arms: &[Arm<'_>], i: usize) {
    if let Some((core, _)) = arms[i].core() {
        core.grow_slow();
    }
}

/// Waits for one of the arms, or until `deadline`: None.
pub(super) fn select(arms: &mut [Arm<'_>], deadline: Nanos) -> Option<Chosen> {
    number(arms);
    // The first of the deadlines, and its arm.
    let mut deadline = (deadline, None);
    for (i, arm) in arms.iter().enumerate() {
        if let Target::After(when) = arm.target
            && when < deadline.0
        {
            deadline = (when, Some(i));
        }
    }
    let (deadline, after) = deadline;
    let timed_out = || after.map(|i| Chosen::of(i, false));
    // After an abort the arms are sorted by address.
    let mut sorted = false;
    loop {
        let here = Rt::enter();
        match poll_pass(here, arms) {
            Found::Chosen(i, done) => {
                wait::leave(here);
                return Some(finish(arms, i, done));
            }
            Found::NoBlock(i) => {
                wait::leave(here);
                grow(arms, i);
                continue;
            }
            Found::Nothing => {}
        }
        if deadline != NEVER && deadline <= now() {
            wait::leave(here);
            return poll_numbered(arms).or_else(timed_out);
        }
        if sorted {
            Shuffle::start(arms);
        }
        let mut found = Found::Nothing;
        let mut enlisted = 0;
        let (winner, here) = wait::wait_in(here, WaitReason::Select, deadline, |waiter| {
            let sleep = enlist_pass(here, arms, waiter, &mut enlisted, &mut found);
            if !sleep {
                withdraw_pass(arms, enlisted, None);
            }
            sleep
        });
        if let Some(winner) = winner {
            let won = (winner != Waiter::TIMED_OUT).then(|| numbered(arms, winner - 1, sorted));
            withdraw_pass(arms, enlisted, won);
            wait::leave(here);
            return match won {
                Some(i) => Some(finish(arms, i, arms[i].node.done.get())),
                None => poll_numbered(arms).or_else(timed_out),
            };
        }
        wait::leave(here);
        match found {
            Found::Chosen(i, done) => return Some(finish(arms, i, done)),
            Found::NoBlock(i) => grow(arms, i),
            Found::Nothing if sorted => {} // aborted
            Found::Nothing => {
                arms.sort_unstable_by_key(Arm::address);
                sorted = true;
            }
        }
    }
}

/// Where the arm with this number is.
#[inline]
fn numbered(arms: &[Arm<'_>], number: u16, sorted: bool) -> usize {
    let is_it = |arm: &Arm<'_>| arm.node.arm.get() == number;
    match sorted {
        false => usize::from(number),
        true => arms.iter().position(is_it).unwrap_or_else(|| unchosen()),
    }
}

/// Pass 1. Leaves a whole order behind if it finds nothing.
#[inline]
fn poll_pass(here: Option<Rt>, arms: &[Arm<'_>]) -> Found {
    let mut shuffle = Shuffle::start(arms);
    for k in 0..arms.len() {
        let i = shuffle.place(here, arms, k);
        let Some((core, side)) = arms[i].core() else { continue };
        if !core.looks_ready(side) {
            continue;
        }
        core.lock();
        // SAFETY: locked; the slot is as `Arm::channel` demands.
        let step = unsafe { core.step(side, core.buffer.elem(), arms[i].node.slot.get(), NOBODY) };
        core.unlock();
        match Found::of(here, i, step) {
            Found::Nothing => {}
            found => return found,
        }
    }
    Found::Nothing
}

/// Pass 2. True: sleep. False: `found` tells what was found (nothing: aborted). The first
/// `enlisted` arms of the order are in lists.
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
            // SAFETY: locked; the node is withdrawn before it moves (invariant 1); the slot is as
            // `Arm::channel` demands.
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
                core.enlist(side, node);
            }
            core.unlock();
        }
        *enlisted = k + 1;
    }
    true
}

/// Pass 3: the first `enlisted` arms of the order, but not the one that won.
#[inline]
fn withdraw_pass(arms: &[Arm<'_>], enlisted: usize, won: Option<usize>) {
    for arm in &arms[..enlisted] {
        let i = usize::from(arm.node.order.get());
        if Some(i) != won
            && let Some((core, side)) = arms[i].core()
        {
            // SAFETY: inside the runtime or on a plain thread; enlisted there.
            unsafe { core.withdraw(side, &arms[i].node) };
        }
    }
}

/// Does one of the arms if that needs no waiting. Sorts them.
pub(super) fn poll(arms: &mut [Arm<'_>]) -> Option<Chosen> {
    number(arms);
    poll_numbered(arms)
}

/// [`poll`], for arms that have their numbers. None of them may be in a list.
fn poll_numbered(arms: &mut [Arm<'_>]) -> Option<Chosen> {
    loop {
        let here = Rt::enter();
        let mut found = poll_pass(here, arms);
        if let Found::Nothing = found {
            arms.sort_unstable_by_key(Arm::address);
            found = poll_all_locked(here, arms);
        }
        wait::leave(here);
        match found {
            Found::Chosen(i, done) => return Some(finish(arms, i, done)),
            Found::NoBlock(i) => grow(arms, i),
            Found::Nothing => return None,
        }
    }
}

/// All channels at one moment. The arms are sorted by address.
fn poll_all_locked(here: Option<Rt>, arms: &[Arm<'_>]) -> Found {
    let channels = arms.chunk_by(|a, b| a.address() == b.address());
    let mut cores = channels.filter_map(|same| Some(same.first()?.core()?.0));
    if arms.iter().filter(|arm| arm.core().is_some()).count() < 2 {
        return Found::Nothing;
    }
    cores.clone().for_each(Core::lock);
    let mut shuffle = Shuffle::start(arms);
    let mut outcome = None;
    for k in 0..arms.len() {
        let i = shuffle.place(here, arms, k);
        let Some((core, side)) = arms[i].core() else { continue };
        // SAFETY: locked; the slot is as `Arm::channel` demands.
        let step = unsafe { core.step(side, core.buffer.elem(), arms[i].node.slot.get(), NOBODY) };
        if step != Step::Wait {
            outcome = Some((i, step));
            break;
        }
    }
    cores.by_ref().for_each(Core::unlock);
    outcome.map_or(Found::Nothing, |(i, step)| Found::of(here, i, step))
}
