//! The wait-for graph: which goroutine waits for which, and the cycles in it.
//!
//! `mod.rs` reads the graph, `report.rs` has the public types and their text, `list.rs` lists and
//! groups goroutines, `suspects.rs` guesses at deadlocks over channels, `watch.rs` reports cycles
//! without being asked, and `leaks.rs` finds the goroutines that a test has left.
//!
//! An edge leads from a goroutine that waits for a lock, a goroutine or a scope to the goroutine or
//! task that holds the lock, is joined, or belongs to the scope. Nothing is stopped while the graph
//! is read, so a cycle is *confirmed*: every member is read twice. If each one was in the same wait
//! both times (`sched/wait/holder.rs` counts the waits), none has run in between, so none has
//! unlocked anything in between, and all edges existed at the same time. Such a cycle never ends.
//!
//! Two things can end it all the same, and make it *probable* instead of certain: a deadline of a
//! member, and a guard that was sent to another goroutine, which may unlock. A program that sends
//! guards is known by its first unlock by another goroutine; from then on no cycle over locks is
//! called certain.

pub(crate) mod leaks;
pub(crate) mod list;
pub(crate) mod report;
mod suspects;
pub(crate) mod watch;

use super::snapshot::{self, Subject};
use crate::sched::Sched;
use crate::sched::g::Status;
use crate::sched::runnable::{Runnable, Unpacked};
use crate::sched::wait::holder::{self, HELD_REASONS};
use crate::sched::wait::reason::WaitReason;
use crate::sys::map::Map;
use crate::sys::mm;
use crate::sys::sort::sort_by_key;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

/// A goroutine or task of one of the runtimes.
#[derive(Clone, Copy)]
pub(super) struct Party {
    pub(super) subject: Subject,
    pub(super) id: u64,
    /// The index of its runtime in [`Graph::runtimes`].
    pub(super) runtime: usize,
}

impl Party {
    fn key(&self) -> (usize, u64) {
        (self.runtime, self.id)
    }
}

/// One goroutine that waits for something that goroutines hold.
pub(super) struct Wait {
    pub(super) party: Party,
    pub(super) reason: WaitReason,
    /// The reason as the goroutine has stored it. It differs from `reason` if the goroutine waited
    /// for a condition variable, and was moved to the queue of the mutex.
    pub(super) parked_for: WaitReason,
    /// The object as the goroutine has stored it.
    word: usize,
    pub(super) waited: Duration,
    /// The goroutines and tasks that must continue before this one can. Empty if unknown.
    pub(super) holders: Vec<Party>,
}

impl Wait {
    pub(super) fn address(&self) -> usize {
        holder::parts(self.word).0
    }

    pub(super) fn has_deadline(&self) -> bool {
        holder::parts(self.word).1
    }

    /// Returns whether it is a writer that waits for the active readers of its lock.
    pub(super) fn is_for_readers(&self) -> bool {
        self.reason == WaitReason::RwLockWrite && holder::parts(self.word).2
    }

    fn is_for_lock(&self) -> bool {
        matches!(
            self.reason,
            WaitReason::MutexLock | WaitReason::RwLockRead | WaitReason::RwLockWrite
        )
    }

    /// Returns by what the holder of the lock, or the joined goroutine, is found.
    fn holder_key(&self, runtimes: &[Arc<Sched>]) -> HolderKey {
        let number = match self.reason {
            WaitReason::Join => joined(runtimes, self.address()).unwrap_or(0),
            WaitReason::Scope => 0,
            WaitReason::PthreadMutex => {
                let owner = mm::read_u32(self.address() + PTHREAD_MUTEX_OWNER_OFFSET);
                return owner.filter(|&tid| tid != 0).map_or(HolderKey::Unknown, HolderKey::Tid);
            }
            _ if self.is_for_readers() => 0,
            reason => holder::holder_of(reason, self.address()),
        };
        if number == 0 { HolderKey::Unknown } else { HolderKey::Number(number) }
    }
}

/// The offset of the owner's id in glibc's mutexes (`interpose/c_locks/layout.rs`).
const PTHREAD_MUTEX_OWNER_OFFSET: usize = 8;

/// By what a holder is found among the goroutines and tasks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum HolderKey {
    Unknown,
    /// Its number (`sched/wait/holder.rs`).
    Number(u32),
    /// The id by which glibc knows it.
    Tid(u32),
}

/// The waits of all runtimes at about one moment.
pub(super) struct Graph {
    pub(super) runtimes: Vec<Arc<Sched>>,
    pub(super) waits: Vec<Wait>,
    /// The index in `waits`, by the waiting party.
    by_party: Map<(usize, u64), usize>,
}

/// Goroutines that wait for each other, as indices in [`Graph::waits`]; each waits for the next,
/// and the last for the first.
pub(super) type Cycle = Vec<usize>;

impl Graph {
    /// Returns a graph that knows of no wait.
    fn empty() -> Graph {
        Graph { runtimes: Vec::new(), waits: Vec::new(), by_party: Map::new() }
    }

    /// Reads the graph of all runtimes of the process.
    pub(super) fn read() -> Graph {
        Graph::of(super::deadlock::runtimes())
    }

    /// Reads as much of the graph as a dump of `sched` needs. Simulated goroutines wait for each
    /// other only; and a process may have many runtimes of simulations that failed.
    pub(super) fn read_for(sched: &Sched) -> Graph {
        let mut runtimes = super::deadlock::runtimes();
        if sched.simulation.is_some() {
            runtimes.retain(|runtime| std::ptr::eq(&raw const **runtime, sched));
        }
        Graph::of(runtimes)
    }

    fn of(runtimes: Vec<Arc<Sched>>) -> Graph {
        let mut graph = Graph { waits: read_waits(&runtimes), runtimes, by_party: Map::new() };
        graph.find_holders();
        let parties = graph.waits.iter().enumerate().map(|(i, wait)| (wait.party.key(), i));
        graph.by_party = parties.collect();
        graph
    }

    fn find_holders(&mut self) {
        // Many goroutines may wait for one lock.
        let mut keys: Map<(u8, usize), HolderKey> = Map::new();
        let mut wanted: Map<HolderKey, Vec<Party>> = Map::new();
        let mut scopes: Map<usize, Vec<Party>> = Map::new();
        let mut key_of = Vec::with_capacity(self.waits.len());
        for wait in &self.waits {
            if wait.reason == WaitReason::Scope {
                scopes.get_or_default(wait.address());
            }
            let key = (wait.reason as u8 | u8::from(wait.is_for_readers()) << 7, wait.address());
            let key = *keys.get_or_insert_with(key, || wait.holder_key(&self.runtimes));
            if key != HolderKey::Unknown {
                wanted.get_or_default(key);
            }
            key_of.push(key);
        }
        if wanted.is_empty() && scopes.is_empty() {
            return;
        }
        let by_tid = wanted.keys().any(|key| matches!(key, HolderKey::Tid(_)));
        for (runtime, sched) in self.runtimes.iter().enumerate() {
            snapshot::for_each_subject(sched, &mut |id, subject| {
                let party = Party { subject, id, runtime };
                let number = HolderKey::Number(holder::number(sched, id));
                if let Some(found) = wanted.get_mut(&number) {
                    found.push(party);
                }
                if by_tid
                    && let Some(g) = subject.g()
                    && let Some(found) = wanted.get_mut(&HolderKey::Tid(g.tid_hint()))
                {
                    found.push(party);
                }
                if let Subject::Goroutine(g) = subject
                    && !scopes.is_empty()
                    && let Some(found) = scopes.get_mut(&(g.scope_hint() as usize))
                {
                    found.push(party);
                }
            });
        }
        for (wait, key) in self.waits.iter_mut().zip(key_of) {
            if wait.reason == WaitReason::Scope {
                wait.holders = scopes.get(&wait.address()).cloned().unwrap_or_default();
            } else if let Some([holder]) = wanted.get(&key).map(Vec::as_slice) {
                wait.holders = vec![*holder];
            }
        }
    }

    pub(super) fn sched(&self, party: Party) -> &Sched {
        &self.runtimes[party.runtime]
    }

    /// Returns the wait of the goroutine or task `id` of `sched`.
    pub(super) fn wait_of_id(&self, sched: &Sched, id: u64) -> Option<&Wait> {
        let runtime = self.runtimes.iter().position(|r| std::ptr::eq(Arc::as_ptr(r), sched))?;
        self.by_party.get(&(runtime, id)).map(|&i| &self.waits[i])
    }

    /// Returns the confirmed cycles. Of cycles that have members in common it returns one, if
    /// possible a certain one: they are one deadlock. (Every goroutine of a scope that waits for a
    /// lock of the scope's owner makes a cycle.)
    pub(super) fn cycles(&self) -> Vec<Cycle> {
        #[derive(Clone, Copy, PartialEq)]
        enum Visit {
            New,
            OnPath,
            Done,
        }
        let mut visits = vec![Visit::New; self.waits.len()];
        let mut cycles: Vec<Cycle> = Vec::new();
        for root in 0..self.waits.len() {
            if visits[root] != Visit::New {
                continue;
            }
            visits[root] = Visit::OnPath;
            let mut path = vec![(root, 0)];
            while let Some((at, next)) = path.last_mut() {
                let Some(holder) = self.waits[*at].holders.get(*next) else {
                    visits[*at] = Visit::Done;
                    path.pop();
                    continue;
                };
                *next += 1;
                let Some(&to) = self.by_party.get(&holder.key()) else { continue };
                match visits[to] {
                    Visit::New => {
                        visits[to] = Visit::OnPath;
                        path.push((to, 0));
                    }
                    Visit::OnPath => {
                        let members = path.iter().map(|&(i, _)| i);
                        cycles.push(members.skip_while(|&i| i != to).collect());
                    }
                    Visit::Done => {}
                }
            }
        }
        sort_by_key(&mut cycles, |cycle: &Cycle| !self.is_certain(cycle));
        let mut is_member = vec![false; self.waits.len()];
        cycles.retain(|cycle| {
            let is_new = !cycle.iter().any(|&i| is_member[i]) && self.is_confirmed(cycle);
            if is_new {
                cycle.iter().for_each(|&i| is_member[i] = true);
            }
            is_new
        });
        cycles
    }

    /// Returns whether every member is still in the wait that was read first, and every lock still
    /// has the same holder. See the head of the file.
    fn is_confirmed(&self, cycle: &Cycle) -> bool {
        let waits_still = |i: &usize| {
            let wait = &self.waits[*i];
            let Party { subject, id, .. } = wait.party;
            let Some(g) = subject.g() else { return false };
            subject.is_still(id, self.sched(wait.party))
                && subject.has_still_carrier()
                && g.status() == Status::Waiting(wait.parked_for)
                && g.waits_for.load(Ordering::Relaxed) == wait.word
        };
        let same_holder = |i: usize, next: usize| {
            let (wait, next) = (&self.waits[i], &self.waits[next]);
            match wait.reason {
                WaitReason::Scope => next
                    .party
                    .subject
                    .g()
                    .is_some_and(|g| g.scope_hint() as usize == wait.address()),
                _ => {
                    let number = holder::number(self.sched(next.party), next.party.id);
                    match wait.holder_key(&self.runtimes) {
                        HolderKey::Unknown => false,
                        HolderKey::Number(holder) => holder == number,
                        HolderKey::Tid(tid) => {
                            next.party.subject.g().is_some_and(|g| g.tid_hint() == tid)
                        }
                    }
                }
            }
        };
        let next = |at: usize| cycle[(at + 1) % cycle.len()];
        let same_holders = (0..cycle.len()).all(|at| same_holder(cycle[at], next(at)));
        // The waits are read again after the holders: among other things it is an Acquire fence.
        fence(Ordering::SeqCst);
        same_holders && cycle.iter().all(waits_still)
    }

    /// Returns whether nothing can end a cycle, if it is confirmed. See the head of the file.
    pub(super) fn is_certain(&self, cycle: &Cycle) -> bool {
        let mut members = cycle.iter().map(|&i| &self.waits[i]);
        let over_locks = members.clone().any(Wait::is_for_lock);
        // The words of C's mutexes are read by address alone.
        let is_certain =
            |wait: &Wait| !wait.has_deadline() && wait.reason != WaitReason::PthreadMutex;
        !(over_locks && holder::guards_move()) && members.all(is_certain)
    }

    /// Returns whether a member of the cycle is of `sched`.
    pub(super) fn has_member_of(&self, cycle: &Cycle, sched: &Sched) -> bool {
        cycle.iter().any(|&i| std::ptr::eq(self.sched(self.waits[i].party), sched))
    }
}

/// Returns the deadlocks in which goroutines of `sched` are.
pub(crate) fn deadlocks(sched: &Sched) -> Vec<report::Deadlock> {
    let graph = Graph::read();
    let mut places = report::Places::new();
    let cycles = graph.cycles();
    let own = cycles.iter().filter(|cycle| graph.has_member_of(cycle, sched));
    let mut found: Vec<_> = own.filter_map(|cycle| graph.deadlock(cycle, &mut places)).collect();
    let known = cycles.iter().flatten().map(|&i| graph.waits[i].party.key()).collect();
    found.extend(suspects::find(&graph, sched, &known, &mut places));
    found
}

/// As [`deadlocks`], without those that are found by a scan of stacks.
pub(crate) fn deadlocks_without_guesses(sched: &Sched) -> Vec<report::Deadlock> {
    let graph = Graph::read();
    let mut places = report::Places::new();
    let cycles = graph.cycles();
    let own = cycles.iter().filter(|cycle| graph.has_member_of(cycle, sched));
    own.filter_map(|cycle| graph.deadlock(cycle, &mut places)).collect()
}

/// Returns the waits, their holders not yet known.
fn read_waits(runtimes: &[Arc<Sched>]) -> Vec<Wait> {
    let mut waits = Vec::new();
    for (runtime, sched) in runtimes.iter().enumerate() {
        snapshot::for_each_subject(sched, &mut |id, subject| {
            let Some(g) = subject.g() else { return };
            let status = g.status();
            let Status::Waiting(parked_for) = status else { return };
            let reason = match parked_for {
                // Only if the object, the mutex, is stored.
                WaitReason::CondWait => WaitReason::MutexLock,
                reason if HELD_REASONS.contains(&reason) => reason,
                _ => return,
            };
            let word = g.waits_for.load(Ordering::Relaxed);
            // The word is of this wait if the goroutine has not run in between.
            let is_same =
                g.status() == status && subject.is_still(id, sched) && subject.has_still_carrier();
            if is_same && holder::parts(word).0 != 0 {
                let waited = Duration::from_millis(sched.millis_waited(&g.head).into());
                let party = Party { subject, id, runtime };
                waits.push(Wait { party, reason, parked_for, word, waited, holders: Vec::new() });
            }
        });
    }
    waits
}

/// Returns the number of the goroutine or task at `address`, which a goroutine joins.
fn joined(runtimes: &[Arc<Sched>], address: usize) -> Option<u32> {
    let item = NonNull::new(address as *mut _)?;
    // SAFETY: stored by `Join::wait` from a Runnable. Gs and tasks are never freed.
    let (sched, id) = match unsafe { Runnable::from_item(item) }.unpack() {
        Unpacked::Goroutine(g) => (g.sched_hint(), g.id()),
        Unpacked::Task(task) => (task.sched_hint(), task.id()),
    };
    // Not dereferenced before it is known to be a runtime that is alive.
    let sched = runtimes.iter().find(|r| std::ptr::eq(Arc::as_ptr(r), sched))?;
    Some(holder::number(sched, id))
}
