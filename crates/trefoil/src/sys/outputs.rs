//! Which goroutine holds std's lock of standard output or standard error.
//!
//! std does not tell. But `std::io::stdout()` is a reference to a reentrant lock, and that stores the `ThreadId` of its
//! owner in one of its first words. A thread that holds the lock finds the word by its own id ([`find_owner_word`]). If none or
//! several match, in another version of std, the output counts as free.
//!
//! A goroutine's own `ThreadId` is noted when it writes to the descriptor, which std does under the lock ([`note_writer`]).
//! For a goroutine that has never done so every owner may be itself.
//!
//! Rejected: `std::thread::current().id()` where the answer is needed (it may allocate, and a signal handler asks).

use std::cell::Cell;
use std::mem::transmute_copy;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::thread::ThreadId;

/// Words of the lock that are searched: all of standard error's, which is the smaller one.
const WORDS: usize = 3;

struct Output {
    /// Null until it was found.
    owner: AtomicPtr<AtomicU64>,
    /// The thread of ours that holds the lock now and then (`sched/stop.rs`), or 0.
    holder: AtomicU64,
}

static OUTPUTS: [Output; 2] =
    [const { Output { owner: AtomicPtr::new(null_mut()), holder: AtomicU64::new(0) } }; 2];

thread_local! {
    /// The goroutine's `ThreadId`; 0 if it is not known.
    static WRITER: Cell<u64> = const { Cell::new(0) };
}

/// On a plain thread that holds the lock of standard output (0) or error (1): finds the word, and names the caller its
/// holder.
pub(crate) fn find_owner_word(which: usize) {
    let lock: *const u64 = match which {
        0 if size_of::<std::io::Stdout>() == size_of::<usize>() => {
            // SAFETY: as large as a pointer, and a reference in every std so far; a wrong guess is found below.
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
    // SAFETY: as large as a u64, which every bit pattern is.
    let me: u64 = unsafe { transmute_copy(&std::thread::current().id()) };
    let output = &OUTPUTS[which];
    output.holder.store(me, Ordering::Relaxed);
    // SAFETY: the first words of a static of std's.
    let matches = |i: &usize| unsafe { lock.add(*i).read_volatile() } == me;
    let mut found = (0..WORDS).filter(matches);
    if let (Some(i), None) = (found.next(), found.next()) {
        output.owner.store(lock.wrapping_add(i).cast_mut().cast(), Ordering::Relaxed);
    }
}

/// On a goroutine that writes to `fd`: std does that under the lock, so the owner is the caller.
#[cfg(feature = "std")]
pub(crate) fn note_writer(fd: i32) {
    let Some(output) = usize::try_from(fd - 1).ok().and_then(|which| OUTPUTS.get(which)) else {
        return;
    };
    if let Some(owner) = output.owner() {
        // A write that is not std's, while another goroutine holds the output, contradicts an earlier note or will be
        // contradicted by a later one.
        let known = WRITER.get();
        WRITER.set(if known == 0 || known == owner { owner } else { 0 });
    }
}

/// Returns whether the running goroutine holds one of the locks. Safe in a signal handler.
pub(crate) fn is_held_here() -> bool {
    let me = WRITER.get();
    OUTPUTS.iter().any(|output| output.owner().is_some_and(|owner| owner == me))
}

/// The same, but a goroutine that has never written may hold whatever is held.
pub(crate) fn may_be_held_here() -> bool {
    let unknown = WRITER.get() == 0;
    is_held_here() || (unknown && OUTPUTS.iter().any(|output| output.owner().is_some()))
}

impl Output {
    /// Who holds it, except a thread of ours.
    fn owner(&self) -> Option<u64> {
        // SAFETY: null, or in a static of std's, which only changes it atomically.
        let owner = unsafe { self.owner.load(Ordering::Relaxed).as_ref()? };
        let owner = owner.load(Ordering::Relaxed);
        (owner != 0 && owner != self.holder.load(Ordering::Relaxed)).then_some(owner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_owner_of_an_output_is_found() {
        std::thread::spawn(|| {
            for which in [0, 1] {
                let _out = (which == 0).then(|| std::io::stdout().lock());
                let _err = (which == 1).then(|| std::io::stderr().lock());
                find_owner_word(which);
                assert!(
                    !OUTPUTS[which].owner.load(Ordering::Relaxed).is_null(),
                    "std keeps the owner elsewhere: see the head of the file"
                );
                // Its own holder does not count.
                assert_eq!(OUTPUTS[which].owner(), None);
            }
        })
        .join()
        .unwrap();
    }
}
