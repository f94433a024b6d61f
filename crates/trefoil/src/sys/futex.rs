//! The futex system calls: sleeping on a word and waking its sleepers.

use rustix::thread::futex;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while the word has this value, until a wake-up, the limit, or a signal. The caller reads
/// the word again.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| futex::Timespec {
        tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let _ = futex::wait(word, futex::Flags::PRIVATE, value, limit.as_ref());
}

/// Wakes up to `how_many` sleepers. The word may be gone already: its address is only a key.
pub(crate) fn futex_wake(word: &AtomicU32, how_many: u32) {
    let _ = futex::wake(word, futex::Flags::PRIVATE, how_many);
}
