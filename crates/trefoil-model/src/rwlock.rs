//! Checks of the read-write lock's word (`sync/rwlock_word.rs`).
//!
//! The queues, their locks and the mutex of the writers are loom's; the steps between them restate
//! `sync/rwlock.rs`. What the lock guards is a loom cell: loom reports a writer beside another
//! holder, or a holder that does not see the last holder's work, as a data race. A forgotten waiter
//! is a deadlock.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Mutex, MutexGuard};
use loom::thread;

use crate::explore::{Bound, explore, must_fail, sweep};
use crate::queued_waiter::QueuedWaiter;
use crate::rwlock_word_rs::{ReadUnlock, RwLockWord};
use crate::shim::{AtomicU32, Half, Mutation, Op};

type Queue = Mutex<Vec<Arc<QueuedWaiter<()>>>>;

/// The step that a mutation check leaves out.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StepMutation {
    None,
    /// The last reader does not wake the writer.
    SilentReader,
    /// A writer whose deadline passes leaves the lock closed for readers.
    StaysClosed,
}

/// Whether the caller has a deadline.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Deadline {
    Never,
    /// It passes as soon as the caller is in the queue.
    Passed,
}

/// What a writer does after its work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// Unlocks.
    Leaves,
    /// Goes on as a reader, and must see its own work.
    Reads,
}

struct Model {
    word: RwLockWord,
    /// The mutex of the writers.
    writers: Mutex<()>,
    /// Readers that wait for the writer.
    readers: Queue,
    /// The writer that waits for the readers, if there is one.
    writer: Queue,
    data: UnsafeCell<u32>,
    mutation: StepMutation,
}

// SAFETY: loom checks that accesses to the cell are ordered; that is the point.
unsafe impl Sync for Model {}
// SAFETY: as above.
unsafe impl Send for Model {}

fn queue(of: &Queue) -> MutexGuard<'_, Vec<Arc<QueuedWaiter<()>>>> {
    of.lock().expect("a panic ends the model")
}

fn withdraw(from: &Queue, waiter: &Arc<QueuedWaiter<()>>) {
    queue(from).retain(|other| !Arc::ptr_eq(other, waiter));
}

impl Model {
    fn new(mutation: StepMutation) -> Arc<Model> {
        Arc::new(Model {
            word: RwLockWord(AtomicU32::new(0)),
            writers: Mutex::new(()),
            readers: Mutex::new(Vec::new()),
            writer: Mutex::new(Vec::new()),
            data: UnsafeCell::new(0),
            mutation,
        })
    }

    /// Enters as a reader. Returns false if the deadline passed.
    fn read(&self, deadline: Deadline) -> bool {
        while !self.word.try_read() {
            let waiter = QueuedWaiter::new();
            {
                let mut queue = queue(&self.readers);
                if !self.word.queue_reader() {
                    continue;
                }
                queue.push(waiter.clone());
            }
            if deadline == Deadline::Passed && waiter.claim() {
                withdraw(&self.readers, &waiter);
                return false;
            }
            waiter.sleep();
            return true; // The writer that opened the lock has counted this reader.
        }
        true
    }

    /// Leaves as a reader. The last one wakes the writer.
    fn read_end(&self) {
        if self.word.read_unlock() == ReadUnlock::Done
            || self.mutation == StepMutation::SilentReader
        {
            return;
        }
        let writer = {
            let mut queue = queue(&self.writer);
            let take = !self.word.has_readers();
            take.then(|| queue.drain(..).find(|waiter| waiter.claim())).flatten()
        };
        if let Some(writer) = writer {
            writer.wake(());
        }
    }

    /// Enters as a writer, which holds the mutex of the writers. Returns None if the deadline
    /// passed.
    fn write(&self, deadline: Deadline) -> Option<MutexGuard<'_, ()>> {
        let guard = self.writers.lock().expect("a panic ends the model");
        if self.word.exclude_readers() {
            return Some(guard);
        }
        let waiter = QueuedWaiter::new();
        {
            let mut queue = queue(&self.writer);
            if !self.word.has_readers() {
                return Some(guard);
            }
            queue.push(waiter.clone());
        }
        if deadline == Deadline::Passed && waiter.claim() {
            withdraw(&self.writer, &waiter);
            if self.mutation != StepMutation::StaysClosed {
                self.open_slow(0);
            }
            return None;
        }
        waiter.sleep();
        assert!(!self.word.has_readers(), "a writer woken among readers");
        Some(guard)
    }

    /// Leaves as a writer. `stay` readers remain: 1 if the writer itself becomes one.
    fn write_end(&self, guard: MutexGuard<'_, ()>, stay: u32) {
        if !self.word.try_write_unlock(stay) {
            self.open_slow(stay);
        }
        drop(guard);
    }

    /// Opens the lock for `stay` readers and all that wait, and wakes these.
    fn open_slow(&self, stay: u32) {
        let readers: Vec<_> = {
            let mut queue = queue(&self.readers);
            let readers: Vec<_> = queue.drain(..).filter(|waiter| waiter.claim()).collect();
            self.word.write_unlock(stay + readers.len() as u32);
            readers
        };
        readers.iter().for_each(|reader| reader.wake(()));
    }

    fn value(&self) -> u32 {
        // SAFETY: loom reports any concurrent write.
        self.data.with(|n| unsafe { *n })
    }

    fn reader(&self, deadline: Deadline) {
        if self.read(deadline) {
            self.value();
            self.read_end();
        }
    }

    /// Writes once. Returns false if the deadline passed.
    fn writer(&self, deadline: Deadline, then: Then) -> bool {
        let Some(guard) = self.write(deadline) else { return false };
        // SAFETY: loom reports any concurrent access.
        let mine = self.data.with_mut(|n| unsafe {
            *n += 1;
            *n
        });
        self.write_end(guard, u32::from(then == Then::Reads));
        if then == Then::Reads {
            assert_eq!(self.value(), mine, "a writer beside a reader");
            self.read_end();
        }
        true
    }
}

/// What one thread does. Returns how often it wrote.
type ThreadBody = fn(&Model) -> u32;

/// Runs one thread per body, and checks the lock when all have ended.
fn check(bound: Bound, mutation: StepMutation, bodies: &'static [ThreadBody]) {
    explore(bound, move || {
        let model = Model::new(mutation);
        let threads: Vec<_> = bodies[1..]
            .iter()
            .map(|body| {
                let model = model.clone();
                thread::spawn(move || body(&model))
            })
            .collect();
        let mut wrote = bodies[0](&model);
        for thread in threads {
            wrote += thread.join().expect("a panic ends the model");
        }
        // The lock is free, the queues are empty, all work is visible.
        assert_eq!(model.word.snapshot(), (0, false));
        assert!(queue(&model.readers).is_empty() && queue(&model.writer).is_empty());
        assert!(model.word.try_write());
        assert_eq!(model.value(), wrote);
    });
}

fn reads(model: &Model) -> u32 {
    model.reader(Deadline::Never);
    0
}

fn reads_twice(model: &Model) -> u32 {
    model.reader(Deadline::Never);
    model.reader(Deadline::Never);
    0
}

fn reads_or_not(model: &Model) -> u32 {
    model.reader(Deadline::Passed);
    0
}

fn writes(model: &Model) -> u32 {
    model.writer(Deadline::Never, Then::Leaves).into()
}

fn writes_and_stays(model: &Model) -> u32 {
    model.writer(Deadline::Never, Then::Reads).into()
}

fn writes_or_not(model: &Model) -> u32 {
    model.writer(Deadline::Passed, Then::Leaves).into()
}

/// A reader meets a writer twice: when it enters and when it leaves.
pub fn reader_against_writer() {
    check(Bound::All, StepMutation::None, &[reads_twice, writes]);
}

/// Two readers: the last of them wakes the writer, and one may come back before that. Bounded to
/// three preemptions.
pub fn two_readers_against_a_writer() {
    check(Bound::Preemptions(3), StepMutation::None, &[reads_twice, reads, writes]);
}

/// Two writers: a late wake-up by a reader meets the next one. Bounded to three preemptions.
pub fn reader_against_two_writers() {
    check(Bound::Preemptions(3), StepMutation::None, &[reads_twice, writes, writes]);
}

/// The writer becomes a reader when it opens the lock. Bounded to three preemptions.
pub fn writer_downgrades_to_reader() {
    check(Bound::Preemptions(3), StepMutation::None, &[writes_and_stays, reads, writes]);
}

/// Deadlines of both sides pass at the worst moments. Bounded to three preemptions.
pub fn deadlines_on_both_sides() {
    check(Bound::Preemptions(3), StepMutation::None, &[reads, writes_or_not, reads_or_not]);
}

/// A writer's deadline passes while a reader waits for it. Bounded to three preemptions.
pub fn writer_gives_up_before_a_reader() {
    check(Bound::Preemptions(3), StepMutation::None, &[reads, reads, writes_or_not]);
}

/// Mutation check: without Release, an unlock publishes nothing.
pub fn detects_unreleased_change() {
    let mutation = Mutation::Everywhere("rwlock_word.rs", Op::Change, Half::Release);
    must_fail(mutation, reader_against_writer);
}

/// Mutation check: without Acquire, a holder does not see the work of the last one.
pub fn detects_unacquired_change() {
    let mutation = Mutation::Everywhere("rwlock_word.rs", Op::Change, Half::Acquire);
    must_fail(mutation, reader_against_writer);
}

/// Mutation check: the writer that waited does not see what the readers did.
pub fn detects_unacquired_load() {
    let mutation = Mutation::Everywhere("rwlock_word.rs", Op::Load, Half::Acquire);
    must_fail(mutation, reader_against_writer);
}

/// Mutation check: the last reader does not wake the writer.
pub fn detects_last_reader_not_waking() {
    must_fail(Mutation::None, || check(Bound::All, StepMutation::SilentReader, &[reads, writes]));
}

/// Mutation check: a writer whose deadline passes leaves the lock closed.
pub fn detects_writer_leaving_lock_closed() {
    must_fail(Mutation::None, || {
        check(Bound::Preemptions(3), StepMutation::StaysClosed, &[reads, reads, writes_or_not]);
    });
}

/// Which orderings of the word do the checks need? Prints a table.
pub fn sweep_orderings() {
    sweep(reader_against_writer);
}
