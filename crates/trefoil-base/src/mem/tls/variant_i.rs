//! TLS variant I (aarch64): thread-local storage above the thread pointer, `struct pthread` below.
//!
//! ```text
//!   stack ▶ | struct pthread |tp  dtv, M word | modules' TLS | (dlopen reserve) | top
//!           '---- below -----'-------------------- above ----------------------'
//! ```
//! `pthread_self()` is the address of `struct pthread`, whose size differs between versions of
//! glibc: the probe thread calls it. glibc places the block from the top of the stack that it is
//! given, so the distance from tp to that top is all of the static TLS with its reserve.
//!
//! The second word of the header (`tcbhead_t::private`) belongs to the runtime: it is the M word of
//! `arch`. No glibc uses it; if it is not zero in a new thread, some other code does, and
//! [`check_header`] fails.

use super::discover::{Extents, ProbeFacts};

/// Offset of the DTV's address from the thread pointer (`tcbhead_t`).
pub(super) const DTV: usize = 0;
/// The least alignment of tp: that of the static TLS of a program without thread-locals.
pub(super) const MIN_ALIGN: usize = 16;
/// The header at tp: the DTV's address and the M word.
const HEADER_BYTES: usize = 16;

/// Checks that the block begins with glibc's header: a DTV, and a word that no code uses.
pub(super) fn check_header(tp: usize, word: impl Fn(usize) -> usize) -> Result<(), String> {
    if word(tp) == 0 || !word(tp).is_multiple_of(8) {
        return Err("the block does not begin with glibc's header (DTV)".into());
    }
    if word(tp + crate::arch::M_WORD) != 0 {
        return Err("the second word of the thread's header is in use".into());
    }
    Ok(())
}

/// Returns the addresses where modules with a fixed place can lie, and `struct pthread` lies.
pub(super) fn areas(p: &ProbeFacts) -> [std::ops::Range<usize>; 2] {
    [p.tp + HEADER_BYTES..p.top, p.pthread_self..p.tp]
}

/// Returns what a block has on both sides of tp. `lowest` and `highest` bound what modules and rseq
/// use.
pub(super) fn extents(p: &ProbeFacts, lowest: isize, highest: isize) -> Result<Extents, String> {
    let below = p.tp.checked_sub(p.pthread_self).filter(|below| below.is_multiple_of(16));
    let Some(below) = below.filter(|_| p.pthread_self > p.entry_sp) else {
        return Err("pthread_self() does not lie between a thread's stack and its TLS".into());
    };
    let above = p.top - p.tp;
    let above_used = (highest.max(0) as usize).max(HEADER_BYTES).next_multiple_of(64);
    if above < above_used || lowest < -(below as isize) {
        return Err(format!("static TLS of {above} bytes cannot hold the {above_used} in use"));
    }
    Ok(Extents {
        above,
        above_used,
        below,
        below_used: below,
        modules: HEADER_BYTES as isize..above as isize,
        pthread: -(below as isize)..0,
        pthread_self: -(below as isize),
        always_touched: 0,
    })
}
