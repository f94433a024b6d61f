//! Tells whether the running goroutine holds std's lock of standard output or standard error.
//!
//! std has no such function. But `std::io::stdout()` is a reference to a reentrant lock, which
//! stores the `ThreadId` of its owner in one of its first words. A thread that holds the lock finds
//! the word by its own id ([`find_owner_word`]). If no word or several words match (in another
//! version of std), the output counts as unlocked.
//!
//! std stores the owner after it has locked the mutex inside, and removes it before it unlocks. A
//! goroutine that a signal stops in between holds the lock without being its owner. So the mutex is
//! found as well (`find_mutex`): while it is locked and there is no owner, anybody may hold it.
//!
//! A goroutine's own `ThreadId` is recorded when it writes to the descriptor, which std does under
//! the lock ([`note_writer`]). For a goroutine that has never written, any owner may be itself.
//!
//! Rejected: `std::thread::current().id()` at the time of the question (it may allocate, and a
//! signal handler asks).

use std::cell::Cell;
use std::mem::transmute_copy;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::thread::ThreadId;

/// Words of the lock that are searched: all words of standard error's, which is the smaller one.
const WORDS: usize = 3;

struct Output {
    /// The word with the owner's id; null until it was found.
    owner: AtomicPtr<AtomicU64>,
    /// The word of the mutex; 0 in it means unlocked. Null until it was found.
    mutex: AtomicPtr<AtomicU32>,
    /// The `ThreadId` of the runtime's thread that holds the lock during a shutdown
    /// (`sched/shutdown.rs`), or 0.
    holder: AtomicU64,
}

static OUTPUTS: [Output; 2] = [const { Output::new() }; 2];

thread_local! {
    /// The goroutine's `ThreadId`; 0 if it is unknown.
    static WRITER: Cell<u64> = const { Cell::new(0) };
}

/// Finds the owner's word in the lock of standard output (`which` is 0) or standard error (1), and
/// records the caller as the runtime's holder. The caller is a plain thread that holds the lock.
pub fn find_owner_word(which: usize) {
    let lock: *const u64 = match which {
        0 if size_of::<std::io::Stdout>() == size_of::<usize>() => {
            // SAFETY: as large as a pointer, and a reference in every std so far.
            unsafe { transmute_copy(&std::io::stdout()) }
        }
        1 if size_of::<std::io::Stderr>() == size_of::<usize>() => {
            // SAFETY: as above.
            unsafe { transmute_copy(&std::io::stderr()) }
        }
        _ => return,
    };
    if size_of::<ThreadId>() != size_of::<u64>() || !lock.is_aligned() {
        return;
    }
    // SAFETY: as large as a u64, for which every bit pattern is valid.
    let me: u64 = unsafe { transmute_copy(&std::thread::current().id()) };
    let output = &OUTPUTS[which];
    output.holder.store(me, Ordering::Relaxed);
    // SAFETY: the first words of a static of std.
    let matches = |i: &usize| unsafe { lock.add(*i).read_volatile() } == me;
    let mut found = (0..WORDS).filter(matches);
    if let (Some(i), None) = (found.next(), found.next()) {
        output.owner.store(lock.wrapping_add(i).cast_mut().cast(), Ordering::Relaxed);
        if let Some(mutex) = find_mutex(which, lock.cast(), i) {
            output.mutex.store(mutex, Ordering::Relaxed);
        }
    }
}

/// Finds the word of the mutex in the lock at `lock`, which this thread has locked once, and whose
/// owner is its word `owner` of eight bytes. The other word that is not 0 counts how many times the
/// owner has locked it: it becomes 3 here, and a locked mutex is 1 or 2.
fn find_mutex(which: usize, lock: *const u32, owner: usize) -> Option<*mut AtomicU32> {
    let _out: [_; 2] = std::array::from_fn(|_| (which == 0).then(|| std::io::stdout().lock()));
    let _err: [_; 2] = std::array::from_fn(|_| (which == 1).then(|| std::io::stderr().lock()));
    // SAFETY: the first words of a static of std.
    let matches =
        |i: &usize| *i / 2 != owner && matches!(unsafe { lock.add(*i).read_volatile() }, 1 | 2);
    let mut found = (0..2 * WORDS).filter(matches);
    match (found.next(), found.next()) {
        (Some(i), None) => Some(lock.wrapping_add(i).cast_mut().cast()),
        _ => None,
    }
}

/// Records the running goroutine's `ThreadId` while it writes to `fd`: std writes under the lock,
/// so the owner is the caller.
#[cfg(feature = "std")]
#[inline]
pub fn note_writer(fd: i32) {
    let Some(output) = usize::try_from(fd - 1).ok().and_then(|which| OUTPUTS.get(which)) else {
        return;
    };
    if let Some(owner) = output.owner() {
        // A write that does not come from std, while another goroutine holds the lock, records a
        // wrong id. It contradicts an earlier record, or a later one contradicts it: then the id is
        // unknown.
        let known = WRITER.get();
        WRITER.set(if known == 0 || known == owner { owner } else { 0 });
    }
}

/// Returns whether the running goroutine holds one of the locks. Safe in a signal handler.
#[inline]
pub fn is_held_here() -> bool {
    let me = WRITER.get();
    OUTPUTS.iter().any(|output| output.owner().is_some_and(|owner| owner == me))
}

/// Returns whether the running goroutine may hold one of the locks: it does, or its id is unknown
/// and one of them is held, or one of them is locked and has no owner. Safe in a signal handler.
#[inline]
pub fn may_be_held_here() -> bool {
    let unknown = WRITER.get() == 0;
    let may_be_held =
        |output: &Output| (unknown && output.owner().is_some()) || output.is_locked_without_owner();
    is_held_here() || OUTPUTS.iter().any(may_be_held)
}

/// Returns the words of the mutexes in the locks that were found. They are std's, and never freed.
pub fn mutexes() -> impl Iterator<Item = &'static AtomicU32> {
    // SAFETY: null, or in a static of std, which changes it only atomically.
    OUTPUTS.iter().filter_map(|output| unsafe { output.mutex.load(Ordering::Relaxed).as_ref() })
}

impl Output {
    const fn new() -> Output {
        Output {
            owner: AtomicPtr::new(null_mut()),
            mutex: AtomicPtr::new(null_mut()),
            holder: AtomicU64::new(0),
        }
    }

    /// Returns whether a thread or goroutine has just locked it, or is about to unlock it.
    fn is_locked_without_owner(&self) -> bool {
        // SAFETY: null, or in a static of std, which changes them only atomically.
        let (mutex, owner) = unsafe {
            (
                self.mutex.load(Ordering::Relaxed).as_ref(),
                self.owner.load(Ordering::Relaxed).as_ref(),
            )
        };
        // If the running goroutine is the one, both words stay as they are meanwhile.
        mutex.is_some_and(|mutex| mutex.load(Ordering::Relaxed) != 0)
            && owner.is_some_and(|owner| owner.load(Ordering::Relaxed) == 0)
    }

    /// Returns the `ThreadId` of the holder, unless that is the runtime's thread.
    fn owner(&self) -> Option<u64> {
        // SAFETY: null, or in a static of std, which changes it only atomically.
        let owner = unsafe { self.owner.load(Ordering::Relaxed).as_ref()? };
        let owner = owner.load(Ordering::Relaxed);
        (owner != 0 && owner != self.holder.load(Ordering::Relaxed)).then_some(owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_word_of_each_output_is_found() {
        std::thread::spawn(|| {
            for which in [0, 1] {
                let _out = (which == 0).then(|| std::io::stdout().lock());
                let _err = (which == 1).then(|| std::io::stderr().lock());
                find_owner_word(which);
                assert!(
                    !OUTPUTS[which].owner.load(Ordering::Relaxed).is_null(),
                    "std keeps the owner elsewhere: see the head of the file"
                );
                // The runtime's own holder does not count.
                assert_eq!(OUTPUTS[which].owner(), None);
                assert!(
                    !OUTPUTS[which].mutex.load(Ordering::Relaxed).is_null(),
                    "std's lock has another form: see the head of the file"
                );
                assert!(!OUTPUTS[which].is_locked_without_owner());
            }
        })
        .join()
        .unwrap();
    }
}
