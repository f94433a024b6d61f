//! Checks of the read-write lock's word (`sync/rwlock_word.rs`).
//!
//! The queues, their locks and the mutex of the writers are loom's; the steps between them are those of `sync/rwlock.rs`.
//! What the lock guards is a loom cell: a writer beside anybody, or somebody who does not see what the last one did, is
//! reported as a data race. A sleeper that is forgotten is a deadlock.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Mutex, MutexGuard};
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::nap::Nap;
use crate::rwlock_word_rs::{ReadUnlock, RwLockWord};
use crate::shim::{AtomicU32, Half, Mutation, Op};

type Queue = Mutex<Vec<Arc<Nap<()>>>>;

/// What is done wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    /// The last reader does not wake the writer.
    SilentReader,
    /// A writer that gives up leaves the door closed.
    LockedOut,
}

struct World {
    word: RwLockWord,
    writers: Mutex<()>,
    at_door: Queue,
    writer: Queue,
    data: UnsafeCell<u32>,
    flaw: Flaw,
}

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for World {}
// SAFETY: as above.
unsafe impl Send for World {}

fn queue(of: &Queue) -> MutexGuard<'_, Vec<Arc<Nap<()>>>> {
    of.lock().expect("a panic ends the model")
}

fn withdraw(from: &Queue, nap: &Arc<Nap<()>>) {
    queue(from).retain(|other| !Arc::ptr_eq(other, nap));
}

impl World {
    fn new(flaw: Flaw) -> Arc<World> {
        Arc::new(World {
            word: RwLockWord(AtomicU32::new(0)),
            writers: Mutex::new(()),
            at_door: Mutex::new(Vec::new()),
            writer: Mutex::new(Vec::new()),
            data: UnsafeCell::new(0),
            flaw,
        })
    }

    /// `patient`: waits for as long as it takes. Else it gives up as soon as it is in the queue.
    fn read(&self, patient: bool) -> bool {
        while !self.word.try_read() {
            let nap = Nap::new();
            {
                let mut queue = queue(&self.at_door);
                if !self.word.queue_reader() {
                    continue;
                }
                queue.push(nap.clone());
            }
            if !patient && nap.claim() {
                withdraw(&self.at_door, &nap);
                return false;
            }
            nap.sleep();
            return true; // counted by who opened
        }
        true
    }

    fn read_end(&self) {
        if self.word.read_unlock() == ReadUnlock::Done || self.flaw == Flaw::SilentReader {
            return;
        }
        let writer = {
            let mut queue = queue(&self.writer);
            let take = !self.word.has_readers();
            take.then(|| queue.drain(..).find(|nap| nap.claim())).flatten()
        };
        if let Some(writer) = writer {
            writer.wake(());
        }
    }

    /// As `read`. With success the mutex of the writers is held.
    fn write(&self, patient: bool) -> Option<MutexGuard<'_, ()>> {
        let guard = self.writers.lock().expect("a panic ends the model");
        if self.word.exclude_readers() {
            return Some(guard);
        }
        let nap = Nap::new();
        {
            let mut queue = queue(&self.writer);
            if !self.word.has_readers() {
                return Some(guard);
            }
            queue.push(nap.clone());
        }
        if !patient && nap.claim() {
            withdraw(&self.writer, &nap);
            if self.flaw != Flaw::LockedOut {
                self.open_slow(0);
            }
            return None;
        }
        nap.sleep();
        assert!(!self.word.has_readers(), "a writer woken among readers");
        Some(guard)
    }

    fn write_end(&self, guard: MutexGuard<'_, ()>, stay: u32) {
        if !self.word.try_write_unlock(stay) {
            self.open_slow(stay);
        }
        drop(guard);
    }

    fn open_slow(&self, stay: u32) {
        let readers: Vec<_> = {
            let mut queue = queue(&self.at_door);
            let readers: Vec<_> = queue.drain(..).filter(|nap| nap.claim()).collect();
            self.word.write_unlock(stay + readers.len() as u32);
            readers
        };
        readers.iter().for_each(|reader| reader.wake(()));
    }

    fn look(&self) -> u32 {
        // SAFETY: loom checks that nobody writes now.
        self.data.with(|n| unsafe { *n })
    }

    fn reader(&self, patient: bool) {
        if self.read(patient) {
            self.look();
            self.read_end();
        }
    }

    /// Whether it was in. `stay`: it goes on as a reader, and sees its own work.
    fn writer(&self, patient: bool, stay: bool) -> bool {
        let Some(guard) = self.write(patient) else { return false };
        // SAFETY: loom checks that nobody else accesses it now.
        let mine = self.data.with_mut(|n| unsafe {
            *n += 1;
            *n
        });
        self.write_end(guard, stay.into());
        if stay {
            assert_eq!(self.look(), mine, "a writer beside a reader");
            self.read_end();
        }
        true
    }
}

/// What one thread does; how often it wrote.
type Part = fn(&World) -> u32;

fn check(bound: Bound, flaw: Flaw, parts: &'static [Part]) {
    explore(bound, move || {
        let world = World::new(flaw);
        let threads: Vec<_> = parts[1..]
            .iter()
            .map(|part| {
                let world = world.clone();
                thread::spawn(move || part(&world))
            })
            .collect();
        let mut wrote = parts[0](&world);
        for thread in threads {
            wrote += thread.join().expect("a panic ends the model");
        }
        // Free, nobody queued, everybody's work seen.
        assert_eq!(world.word.snapshot(), (0, false));
        assert!(queue(&world.at_door).is_empty() && queue(&world.writer).is_empty());
        assert!(world.word.try_write());
        assert_eq!(world.look(), wrote);
    });
}

fn reads(world: &World) -> u32 {
    world.reader(true);
    0
}

fn reads_twice(world: &World) -> u32 {
    world.reader(true);
    world.reader(true);
    0
}

fn reads_or_not(world: &World) -> u32 {
    world.reader(false);
    0
}

fn writes(world: &World) -> u32 {
    world.writer(true, false).into()
}

fn writes_and_stays(world: &World) -> u32 {
    world.writer(true, true).into()
}

fn writes_or_not(world: &World) -> u32 {
    world.writer(false, false).into()
}

/// A reader meets a writer, twice: at the door and on the way out.
pub fn reader_against_writer() {
    check(Bound::All, Flaw::None, &[reads_twice, writes]);
}

/// Two readers: the last of them wakes the writer, and one may come back before that. Bounded to three preemptions.
pub fn two_readers_against_a_writer() {
    check(Bound::Preemptions(3), Flaw::None, &[reads_twice, reads, writes]);
}

/// Two writers: a late wake-up by a reader meets the next one. Bounded to three preemptions.
pub fn reader_against_two_writers() {
    check(Bound::Preemptions(3), Flaw::None, &[reads_twice, writes, writes]);
}

/// The writer becomes a reader when it opens the door. Bounded to three preemptions.
pub fn writer_that_stays() {
    check(Bound::Preemptions(3), Flaw::None, &[writes_and_stays, reads, writes]);
}

/// Deadlines of both sides pass at the worst moments. Bounded to three preemptions.
pub fn impatient_ones() {
    check(Bound::Preemptions(3), Flaw::None, &[reads, writes_or_not, reads_or_not]);
}

/// A writer gives up while a reader waits behind it. Bounded to three preemptions.
pub fn writer_gives_up_before_a_reader() {
    check(Bound::Preemptions(3), Flaw::None, &[reads, reads, writes_or_not]);
}

/// Teeth: a reader's end, or a writer's, that publishes nothing.
pub fn teeth_unreleased() {
    let mutation = Mutation::Everywhere("rwlock_word.rs", Op::Change, Half::Release);
    must_fail(mutation, reader_against_writer);
}

/// Teeth: who comes in does not see what was done before.
pub fn teeth_unacquired() {
    let mutation = Mutation::Everywhere("rwlock_word.rs", Op::Change, Half::Acquire);
    must_fail(mutation, reader_against_writer);
}

/// Teeth: the writer that waited does not see what the readers did.
pub fn teeth_unacquired_look() {
    let mutation = Mutation::Everywhere("rwlock_word.rs", Op::Load, Half::Acquire);
    must_fail(mutation, reader_against_writer);
}

/// Teeth: the last reader goes without a word.
pub fn teeth_silent_reader() {
    must_fail(Mutation::None, || check(Bound::All, Flaw::SilentReader, &[reads, writes]));
}

/// Teeth: a writer that gives up and leaves the door closed.
pub fn teeth_locked_out() {
    must_fail(Mutation::None, || {
        check(Bound::Preemptions(3), Flaw::LockedOut, &[reads, reads, writes_or_not]);
    });
}

/// Which orderings of the word do the checks need? Prints a table.
pub fn sweep_orderings() {
    sweep(reader_against_writer);
}
