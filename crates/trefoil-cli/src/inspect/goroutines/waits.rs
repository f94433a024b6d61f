//! What goroutines wait for, and the goroutines and tasks that hold it.
//!
//! The rules are those of the reports that a program makes of itself (`observe/waits` and
//! `sched/wait/holder.rs` of trefoil). A lock is read by an address that a goroutine has stored, so
//! a wait is read twice: before the holders of all locks, and after. A program counts its waits. A
//! goroutine that was in the same wait both times has borrowed its lock in between, so a holder was
//! read there, and it has unlocked nothing. So all the holders that are kept held their locks at
//! the same time, and a cycle of them is a deadlock.

use std::collections::HashMap;

use super::{Goroutine, Kind, Reader};
use crate::inspect::layout::Layout;
use crate::inspect::memory::u64_at;

/// What a goroutine waits for.
pub(in crate::inspect) struct Wait {
    pub(in crate::inspect) what: What,
    /// The address of the lock, of the scope, or of the G or task that is joined.
    pub(in crate::inspect) address: u64,
    pub(in crate::inspect) has_deadline: bool,
    /// Nothing but its holders can end the wait, if they are known.
    pub(in crate::inspect) is_certain: bool,
    /// The addresses of the goroutines and tasks that must continue first. Empty if unknown.
    pub(in crate::inspect) holders: Vec<u64>,
    /// The address of the G that waits: of a task, the one that polls it.
    g: u64,
    words: WaitWords,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::inspect) enum What {
    Mutex,
    RwLockRead,
    RwLockWrite,
    /// The readers of a read-write lock, for which a writer waits. They are only counted.
    Readers,
    Once,
    Join,
    Scope,
    PthreadMutex,
}

impl What {
    fn is_lock(self) -> bool {
        matches!(self, What::Mutex | What::RwLockRead | What::RwLockWrite | What::Readers)
    }
}

/// The words of a G that tell one wait from another.
#[derive(Clone, Copy, PartialEq, Eq)]
struct WaitWords {
    id: u64,
    task: u64,
    state: u64,
    reason: u64,
    /// What it waits for, with a count.
    object: u64,
}

/// The entries of the table that say how to read a wait. Older programs do not have them.
pub(super) struct WaitOffsets {
    g_waits_for: u64,
    g_scope: u64,
    address_mask: u64,
    has_deadline: u64,
    for_readers: u64,
    salt_factor: u64,
    /// The address of a byte: guards were sent to other goroutines.
    guards_move: u64,
    reasons: [(u64, What); 8],
}

impl WaitOffsets {
    pub(super) fn new(layout: &Layout) -> Option<WaitOffsets> {
        let get = |name| layout.get(name).ok();
        Some(WaitOffsets {
            g_waits_for: get("g.waits_for")?,
            g_scope: get("g.scope")?,
            address_mask: get("object.address_mask")?,
            has_deadline: get("object.has_deadline")?,
            for_readers: get("object.for_readers")?,
            salt_factor: get("holder.salt_factor")?,
            guards_move: get("guards_move")?,
            reasons: [
                (get("reason.mutex")?, What::Mutex),
                // Only if a waker has stored the mutex, to whose queue it has moved the goroutine.
                (get("reason.cond")?, What::Mutex),
                (get("reason.rwlock_read")?, What::RwLockRead),
                (get("reason.rwlock_write")?, What::RwLockWrite),
                (get("reason.once")?, What::Once),
                (get("reason.join")?, What::Join),
                (get("reason.scope")?, What::Scope),
                (get("reason.pthread_mutex")?, What::PthreadMutex),
            ],
        })
    }

    /// Returns the offsets of words in a G.
    pub(super) fn g_words(&self) -> [u64; 2] {
        [self.g_waits_for, self.g_scope]
    }
}

impl Reader<'_> {
    fn wait_words(&self, at: &WaitOffsets, g: &[u8]) -> WaitWords {
        let word = |offset: u64| u64_at(g, offset as usize);
        WaitWords {
            id: word(self.at.g_id),
            task: word(self.at.g_task),
            state: self.state(g),
            reason: self.head_byte(g, self.at.g_head + self.at.head_reason),
            object: word(at.g_waits_for),
        }
    }

    /// Returns what the goroutine with this G, which waits, waits for. Its holders are not yet
    /// known.
    pub(super) fn wait(&self, g: u64, bytes: &[u8]) -> Option<Wait> {
        let at = self.at.waits.as_ref()?;
        let words = self.wait_words(at, bytes);
        let address = words.object & at.address_mask;
        let (_, what) = at.reasons.iter().find(|(reason, _)| *reason == words.reason)?;
        let what = match what {
            What::RwLockWrite if words.object & at.for_readers != 0 => What::Readers,
            what => *what,
        };
        let has_deadline = words.object & at.has_deadline != 0;
        let wait =
            Wait { what, address, has_deadline, is_certain: false, holders: Vec::new(), g, words };
        (address != 0).then_some(wait)
    }

    /// Finds the holders of what the goroutines wait for. Forgets the waits that have ended.
    pub(super) fn find_holders(&self, all: &mut [Goroutine]) {
        let Some(at) = self.at.waits.as_ref() else { return };
        if all.iter().all(|g| g.wait.is_none()) {
            return;
        }
        let guards_move = self.byte(at.guards_move, 0).map_or(true, |byte| byte != 0);
        let by_address: HashMap<u64, &Goroutine> = all.iter().map(|g| (g.address, g)).collect();
        let by_number = self.by_number(at, all);
        let by_scope = self.by_scope(at, all);
        let holders_of = |wait: &Wait| match wait.what {
            What::Join => {
                let joined = by_address.get(&wait.address).filter(|g| self.is_still(g));
                joined.map(|g| g.address).into_iter().collect()
            }
            What::Scope => by_scope.get(&wait.address).cloned().unwrap_or_default(),
            What::Readers | What::PthreadMutex => Vec::new(),
            What::Mutex | What::RwLockRead | What::RwLockWrite | What::Once => {
                // The holder is the first word of every lock.
                let number = self.half_word(wait.address, 0).unwrap_or(0);
                by_number.get(&number).copied().flatten().into_iter().collect()
            }
        };
        let holders: Vec<_> = all.iter().map(|g| g.wait.as_ref().map(holders_of)).collect();
        let mut bytes = vec![0; self.at.g_size as usize];
        for (g, holders) in all.iter_mut().zip(holders) {
            let still = |wait: &Wait| {
                let is_read = self.process.read(wait.g, &mut bytes).is_ok();
                is_read && self.wait_words(at, &bytes) == wait.words
            };
            g.wait = g.wait.take().filter(still);
            if let (Some(wait), Some(holders)) = (&mut g.wait, holders) {
                wait.holders = holders;
                wait.is_certain = !wait.has_deadline
                    && wait.what != What::PthreadMutex
                    && !(wait.what.is_lock() && guards_move);
            }
        }
    }

    /// Returns the goroutines and tasks by the number with which locks know them; None if several
    /// have the same. 0 is the number of no holder.
    fn by_number(&self, at: &WaitOffsets, all: &[Goroutine]) -> HashMap<u32, Option<u64>> {
        let mut salts: HashMap<u64, Option<u32>> = HashMap::new();
        let mut found = HashMap::with_capacity(all.len());
        for g in all {
            let salt = salts.entry(g.sched).or_insert_with(|| {
                let id = self.word(g.sched, self.at.sched_id).ok()?;
                Some((id as u32).wrapping_mul(at.salt_factor as u32))
            });
            let Some(salt) = *salt else { continue };
            let number = g.id as u32 ^ salt;
            found.entry(number).and_modify(|g| *g = None).or_insert(Some(g.address));
        }
        found.remove(&0);
        found
    }

    /// Returns the goroutines of the scopes that goroutines wait for, by the address of the scope.
    fn by_scope(&self, at: &WaitOffsets, all: &[Goroutine]) -> HashMap<u64, Vec<u64>> {
        let waits = all.iter().filter_map(|g| g.wait.as_ref());
        let scopes = waits.filter(|wait| wait.what == What::Scope);
        let mut found: HashMap<_, _> = scopes.map(|wait| (wait.address, Vec::new())).collect();
        if found.is_empty() {
            return found;
        }
        for g in all.iter().filter(|g| g.kind == Kind::Goroutine) {
            let scope = self.word(g.address, at.g_scope).unwrap_or(0);
            if let Some(members) = found.get_mut(&scope)
                && self.is_still(g)
            {
                members.push(g.address);
            }
        }
        found
    }

    /// Returns whether the memory of a goroutine or task has not been reused for another one.
    fn is_still(&self, g: &Goroutine) -> bool {
        let id_at = match g.kind {
            Kind::Goroutine => self.at.g_id,
            Kind::Task => self.at.task_id,
        };
        self.word(g.address, id_at).is_ok_and(|id| id == g.id)
    }
}
