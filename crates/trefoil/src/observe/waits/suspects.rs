//! Probable deadlocks: goroutines that wait for each other over channels, std's mutexes and
//! readers, whose holders are not stored anywhere.
//!
//! The holders are guessed by a scan of all suspended stacks: a goroutine that has the address of a
//! channel or of a lock on its stack is taken to have a handle, or a guard. The guess may be wrong
//! in both directions: an address may be left over from an earlier call, and a handle may be on the
//! heap, in a static, or with a plain thread. So a goroutine counts as stuck only if
//!
//! - it has waited for [`WAITED_MIN`], without a deadline and not in a select;
//! - every goroutine that could end its wait is known, and is stuck itself. For a channel, at least
//!   as many goroutines as the other side has handles must have been found.
//!
//! The stuck goroutines are what is left when all others are removed, again and again.
//!
//! A goroutine's own handle is no edge to itself: the bytes of a handle that was moved stay on the
//! stack. A goroutine that has sent a sender to a server, and waits for the reply, would look like
//! one that has forgotten to drop its sender.

use super::report::{Deadlock, Places, WaitsFor, name_of};
use super::{Graph, Party, Wait};
use crate::sched::g::Status;
use crate::sched::wait::holder::{
    self, CHAN_RECEIVERS_OFFSET, CHAN_SENDERS_OFFSET, GUESSED_REASONS,
};
use crate::sched::wait::reason::WaitReason;
use crate::sched::{Sched, g::G};
use crate::sys::map::{Map, Set};
use crate::sys::mm;
use crate::sys::sort::sort_by;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Shorter waits are no sign of a deadlock.
const WAITED_MIN: Duration = Duration::from_secs(1);

/// The value of the futex of a std mutex that is locked and waited for.
const STD_MUTEX_CONTENDED: u32 = 2;

/// Bits of the filter that most words of a stack do not pass.
const FILTER_BITS: usize = 1 << 16;

/// A goroutine that may be stuck.
struct Suspect {
    party: Party,
    reason: WaitReason,
    word: usize,
    since_ms: u32,
    /// The goroutines that could end its wait.
    wakers: Vec<Party>,
    /// Its wakers are guessed, by this address.
    guessed: Option<usize>,
}

/// Returns the probable deadlocks in which goroutines of `sched` are, without those that have a
/// member in `known`.
pub(super) fn find(
    graph: &Graph,
    sched: &Sched,
    known: &Set<(usize, u64)>,
    places: &mut Places,
) -> Vec<Deadlock> {
    let mut suspects = read(graph);
    if !suspects.values().any(|suspect| suspect.guessed.is_some()) {
        return Vec::new();
    }
    guess_wakers(graph, &mut suspects);
    remove_the_free(&mut suspects);
    suspects.retain(|_, suspect| is_unchanged(graph, suspect));
    remove_the_free(&mut suspects);
    let sets = components(&suspects);
    let own = |set: &Vec<(usize, u64)>| {
        let is_new = !set.iter().any(|key| known.contains(key));
        let guessed = set.iter().any(|key| suspects[key].guessed.is_some());
        let of_sched = |key: &(usize, u64)| std::ptr::eq(&raw const *graph.runtimes[key.0], sched);
        is_new && guessed && set.iter().any(of_sched)
    };
    sets.into_iter()
        .filter(own)
        .filter_map(|set| deadlock(graph, &suspects, &set, places))
        .collect()
}

type Suspects = Map<(usize, u64), Suspect>;

/// Returns the goroutines that have waited for long, without a deadline, for something that
/// goroutines hold or may hold.
fn read(graph: &Graph) -> Suspects {
    let mut suspects = Map::new();
    let mut add = |suspect: Suspect| {
        suspects.insert(suspect.party.key(), suspect);
    };
    for wait in graph.waits.iter().filter(|w| w.waited >= WAITED_MIN && !w.has_deadline()) {
        let guessed = wait.is_for_readers().then(|| wait.address());
        let since_ms = since(wait.party);
        let Wait { party, parked_for: reason, word, ref holders, .. } = *wait;
        add(Suspect { party, reason, word, since_ms, wakers: holders.clone(), guessed });
    }
    for (runtime, sched) in graph.runtimes.iter().enumerate() {
        super::snapshot::for_each_subject(sched, &mut |id, subject| {
            let Some(g) = subject.g() else { return };
            let Status::Waiting(reason) = g.status() else { return };
            if !GUESSED_REASONS.contains(&reason) {
                return;
            }
            let word = g.waits_for.load(Ordering::Relaxed);
            let (address, has_deadline, _) = holder::parts(word);
            let waited = Duration::from_millis(sched.millis_waited(&g.head).into());
            if address == 0 || has_deadline || waited < WAITED_MIN {
                return;
            }
            let party = Party { subject, id, runtime };
            let since_ms = since(party);
            let guessed = Some(address);
            add(Suspect { party, reason, word, since_ms, wakers: Vec::new(), guessed });
        });
    }
    suspects
}

fn since(party: Party) -> u32 {
    let since = |g: &G| g.head.waiting_since_ms.load(Ordering::Relaxed);
    party.subject.g().map_or(0, since)
}

/// Scans all suspended stacks for the addresses of `suspects`, and stores who has them. Suspects
/// whose wakers remain unknown get none.
fn guess_wakers(graph: &Graph, suspects: &mut Suspects) {
    let wanted: Set<usize> = suspects.values().filter_map(|s| s.guessed).collect();
    let bit = |address: usize| (address >> 3 ^ address >> 19) % FILTER_BITS;
    let mut filter = vec![false; FILTER_BITS];
    wanted.iter().for_each(|&address| filter[bit(address)] = true);
    let mut found: Map<usize, Vec<Party>> = Map::new();
    // By runtime.
    let mut all_scanned = vec![true; graph.runtimes.len()];
    for (runtime, sched) in graph.runtimes.iter().enumerate() {
        super::snapshot::for_each_subject(sched, &mut |id, subject| {
            let Some(g) = subject.g() else { return };
            let mut here = Set::new();
            let suspended = g.scan_stack(|word| {
                if filter[bit(word)] && wanted.contains(&word) {
                    here.insert(word);
                }
            });
            if suspended {
                let party = Party { subject, id, runtime };
                here.iter().for_each(|&address| found.get_or_default(address).push(party));
            } else if g.status() != Status::Dead && !subject.is_caller() {
                all_scanned[runtime] = false;
            }
        });
    }
    // Which goroutines wait for what, on which side.
    let waits: Map<_, _> =
        suspects.values().map(|s| (s.party.key(), (holder::parts(s.word).0, s.reason))).collect();
    for suspect in suspects.values_mut() {
        let Some(address) = suspect.guessed else { continue };
        let others = found.get(&address).map_or(&[][..], Vec::as_slice);
        let key = suspect.party.key();
        let is_waker = |party: &&Party| {
            let waits_too = match waits.get(&party.key()) {
                // A reader may wait for a lock that it has locked for reading before. But if a
                // goroutine runs, that one may be the reader.
                Some(&(at, WaitReason::RwLockRead)) => {
                    at == address && !all_scanned[suspect.party.runtime]
                }
                // Another one that waits in the same way does not end the wait.
                wait => wait == Some(&(address, suspect.reason)),
            };
            party.key() != key && !waits_too
        };
        let wakers: Vec<Party> = others.iter().filter(is_waker).copied().collect();
        let needed = match suspect.reason {
            WaitReason::ChanReceive => mm::read_u32(address + CHAN_SENDERS_OFFSET),
            WaitReason::ChanSend => mm::read_u32(address + CHAN_RECEIVERS_OFFSET),
            WaitReason::Futex if mm::read_u32(address) != Some(STD_MUTEX_CONTENDED) => None,
            _ => Some(1),
        };
        suspect.wakers = match needed {
            Some(needed @ 1..) if wakers.len() >= needed as usize => wakers,
            _ => Vec::new(),
        };
    }
}

/// Removes the goroutines whose wait may end: no waker is known, or a waker is not stuck.
fn remove_the_free(suspects: &mut Suspects) {
    loop {
        let is_stuck = |suspect: &Suspect| {
            let mut wakers = suspect.wakers.iter();
            // A scope waits for all, so one that is stuck suffices; a join and a lock have one.
            match suspect.reason {
                WaitReason::Scope => wakers.any(|waker| suspects.contains_key(&waker.key())),
                _ => wakers.len() > 0 && wakers.all(|waker| suspects.contains_key(&waker.key())),
            }
        };
        let free: Vec<_> =
            suspects.values().filter(|s| !is_stuck(s)).map(|s| s.party.key()).collect();
        if free.is_empty() {
            return;
        }
        free.iter().for_each(|key| _ = suspects.remove(key));
    }
}

/// Returns whether a suspect is still in the wait that was read first.
fn is_unchanged(graph: &Graph, suspect: &Suspect) -> bool {
    let Party { subject, id, .. } = suspect.party;
    let Some(g) = subject.g() else { return false };
    subject.is_still(id, graph.sched(suspect.party))
        && subject.has_still_carrier()
        && g.status() == Status::Waiting(suspect.reason)
        && g.waits_for.load(Ordering::Relaxed) == suspect.word
        && since(suspect.party) == suspect.since_ms
}

/// Returns the sets of suspects that wait for each other, directly or not: the strongly connected
/// components of the graph, by Kosaraju's algorithm. A leftover address on a stack adds an edge,
/// but rarely one that leads back.
fn components(suspects: &Suspects) -> Vec<Vec<(usize, u64)>> {
    let mut keys: Vec<_> = suspects.keys().copied().collect();
    sort_by(&mut keys, Ord::cmp);
    let mut wakers: Edges = Map::new();
    let mut waiters: Edges = Map::new();
    for &(key, ref suspect) in suspects.entries() {
        for waker in suspect.wakers.iter().filter(|w| suspects.contains_key(&w.key())) {
            wakers.get_or_default(key).push(waker.key());
            waiters.get_or_default(waker.key()).push(key);
        }
    }
    let mut seen = Set::new();
    let mut order = Vec::new();
    for &key in &keys {
        visit(key, &wakers, &mut seen, &mut order);
    }
    seen.clear();
    let mut sets = Vec::new();
    for &key in order.iter().rev() {
        let mut set = Vec::new();
        visit(key, &waiters, &mut seen, &mut set);
        if set.len() > 1 {
            sort_by(&mut set, Ord::cmp);
            sets.push(set);
        }
    }
    sets
}

type Edges = Map<(usize, u64), Vec<(usize, u64)>>;

/// Visits what can be reached from `root` and was not `seen`, depth first. Adds each key to
/// `visited` after all that can be reached from it.
fn visit(
    root: (usize, u64),
    edges: &Edges,
    seen: &mut Set<(usize, u64)>,
    visited: &mut Vec<(usize, u64)>,
) {
    if !seen.insert(root) {
        return;
    }
    let mut path = vec![(root, 0)];
    while let Some((key, next)) = path.last_mut() {
        let to = edges.get(key).and_then(|to| to.get(*next)).copied();
        *next += 1;
        match to {
            Some(to) if seen.insert(to) => path.push((to, 0)),
            Some(_) => {}
            None => {
                visited.push(*key);
                path.pop();
            }
        }
    }
}

/// Returns the public form of a set.
fn deadlock(
    graph: &Graph,
    suspects: &Suspects,
    set: &[(usize, u64)],
    places: &mut Places,
) -> Option<Deadlock> {
    let member = |key: &(usize, u64)| {
        let suspect = &suspects[key];
        let mut member = graph.member(suspect.party, places)?;
        if let Some(address) = suspect.guessed {
            let what = match suspect.reason {
                WaitReason::ChanReceive => "channel (receive)",
                WaitReason::ChanSend => "channel (send)",
                WaitReason::Futex => "std lock",
                _ => "readers of RwLock",
            };
            let holders = suspect.wakers.iter().map(|w| name_of(w.subject, w.id)).collect();
            member.goroutine.waits_for =
                Some(WaitsFor { what, address, holders, has_deadline: false });
        }
        Some(member)
    };
    let members: Option<Vec<_>> = set.iter().map(member).collect();
    Some(Deadlock { certain: false, members: members? })
}
