//! The wait-for graph: which goroutine waits for which, and the cycles in it.
//!
//! `mod.rs` reads the graph, `report.rs` has the public types and their text, `list.rs` lists and
//! groups goroutines, `watch.rs` reports cycles without being asked, and `leaks.rs` finds the
//! goroutines that a test has left.
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
pub(crate) mod watch;

use super::snapshot::{self, Subject};
use crate::sched::Sched;
use crate::sched::g::Status;
use crate::sched::runnable::{Runnable, Unpacked};
use crate::sched::wait::holder::{self, HELD_REASONS};
use crate::sched::wait::reason::WaitReason;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
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

    /// Returns the number of the holder of the lock or of the joined goroutine; 0 if there is none.
    fn holder_number(&self, runtimes: &[Arc<Sched>]) -> u32 {
        match self.reason {
            WaitReason::Join => joined(runtimes, self.address()).unwrap_or(0),
            WaitReason::Scope => 0,
            _ if self.is_for_readers() => 0,
            reason => holder::holder_of(reason, self.address()),
        }
    }
}

/// The waits of all runtimes at about one moment.
pub(super) struct Graph {
    pub(super) runtimes: Vec<Arc<Sched>>,
    pub(super) waits: Vec<Wait>,
    /// The index in `waits`, by the waiting party.
    by_party: HashMap<(usize, u64), usize>,
}

/// Goroutines that wait for each other, as indices in [`Graph::waits`]; each waits for the next, and
/// the last for the first.
pub(super) type Cycle = Vec<usize>;

impl Graph {
    /// Reads the graph of all runtimes of the process.
    pub(super) fn read() -> Graph {
        let runtimes = super::deadlock::runtimes();
        let mut graph = Graph { waits: read_waits(&runtimes), runtimes, by_party: HashMap::new() };
        graph.find_holders();
        let parties = graph.waits.iter().enumerate().map(|(i, wait)| (wait.party.key(), i));
        graph.by_party = parties.collect();
        graph
    }

    fn find_holders(&mut self) {
        // Many goroutines may wait for one lock.
        let mut numbers: HashMap<(u8, usize), u32> = HashMap::new();
        let mut wanted: HashMap<u32, Vec<Party>> = HashMap::new();
        let mut scopes: HashMap<usize, Vec<Party>> = HashMap::new();
        let mut number_of = Vec::with_capacity(self.waits.len());
        for wait in &self.waits {
            if wait.reason == WaitReason::Scope {
                scopes.entry(wait.address()).or_default();
            }
            let key = (wait.reason as u8 | u8::from(wait.is_for_readers()) << 7, wait.address());
            let number = *numbers.entry(key).or_insert_with(|| wait.holder_number(&self.runtimes));
            if number != 0 {
                wanted.entry(number).or_default();
            }
            number_of.push(number);
        }
        if wanted.is_empty() && scopes.is_empty() {
            return;
        }
        for (runtime, sched) in self.runtimes.iter().enumerate() {
            snapshot::for_each_subject(sched, |id, subject| {
                let party = Party { subject, id, runtime };
                if let Some(found) = wanted.get_mut(&holder::number(sched, id)) {
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
        for (wait, number) in self.waits.iter_mut().zip(number_of) {
            if wait.reason == WaitReason::Scope {
                wait.holders = scopes.get(&wait.address()).cloned().unwrap_or_default();
            } else if let Some([holder]) = wanted.get(&number).map(Vec::as_slice) {
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

    /// Returns the cycles, at least one of those that have members in common.
    pub(super) fn cycles(&self) -> Vec<Cycle> {
        #[derive(Clone, Copy, PartialEq)]
        enum Visit {
            New,
            OnPath,
            Done,
        }
        let mut visits = vec![Visit::New; self.waits.len()];
        let mut cycles = Vec::new();
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
        cycles.retain(|cycle| self.is_confirmed(cycle));
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
                && g.status() == Status::Waiting(wait.reason)
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
                    let sched = self.sched(next.party);
                    wait.holder_number(&self.runtimes) == holder::number(sched, next.party.id)
                }
            }
        };
        let next = |at: usize| cycle[(at + 1) % cycle.len()];
        (0..cycle.len()).all(|at| same_holder(cycle[at], next(at))) && cycle.iter().all(waits_still)
    }

    /// Returns whether nothing can end a confirmed cycle. See the head of the file.
    pub(super) fn is_certain(&self, cycle: &Cycle) -> bool {
        let mut members = cycle.iter().map(|&i| &self.waits[i]);
        let over_locks = members.clone().any(Wait::is_for_lock);
        !(over_locks && holder::guards_move()) && members.all(|wait| !wait.has_deadline())
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
    own.filter_map(|cycle| graph.deadlock(cycle, &mut places)).collect()
}

/// Returns the waits, their holders not yet known.
fn read_waits(runtimes: &[Arc<Sched>]) -> Vec<Wait> {
    let mut waits = Vec::new();
    for (runtime, sched) in runtimes.iter().enumerate() {
        snapshot::for_each_subject(sched, |id, subject| {
            let Some(g) = subject.g() else { return };
            let status = g.status();
            let Status::Waiting(reason) = status else { return };
            if !HELD_REASONS.contains(&reason) {
                return;
            }
            let word = g.waits_for.load(Ordering::Relaxed);
            // The word is of this wait if the goroutine has not run in between.
            if g.status() == status && holder::parts(word).0 != 0 && subject.is_still(id, sched) {
                let waited = Duration::from_millis(sched.millis_waited(&g.head).into());
                let party = Party { subject, id, runtime };
                waits.push(Wait { party, reason, word, waited, holders: Vec::new() });
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
