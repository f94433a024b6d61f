//! TLS variant II (x86_64): thread-local storage below the thread pointer, `struct pthread` above.
//!
//! ```text
//!   stack ▶ | (dlopen reserve) | modules' TLS |tp  self, dtv, self, … struct pthread | top
//!           '-------------- below ------------'------------------ above -------------'
//! ```
//! `pthread_self()` is the thread pointer.

use super::discover::{Extents, ProbeFacts, static_size};

/// Offset of the DTV's address from the thread pointer (`tcbhead_t`).
pub(super) const DTV: usize = 8;

/// The least alignment of tp: that of `struct pthread`.
pub(super) const MIN_ALIGN: usize = 64;

/// Checks that the block begins with glibc's header: self pointers at its first and third word.
pub(super) fn check_header(tp: usize, word: impl Fn(usize) -> usize) -> Result<(), String> {
    if word(tp) != tp || word(tp + 16) != tp {
        return Err("the block does not begin with glibc's header (self pointers)".into());
    }
    Ok(())
}

/// Returns the addresses where modules with a fixed place can lie, and `struct pthread` lies.
pub(super) fn areas(p: &ProbeFacts) -> [std::ops::Range<usize>; 2] {
    [p.entry_sp..p.tp, p.tp + 16..p.top]
}

/// Returns what a block has on both sides of tp. `lowest` and `highest` bound what modules and rseq
/// use.
pub(super) fn extents(p: &ProbeFacts, lowest: isize, _highest: isize) -> Result<Extents, String> {
    if p.pthread_self != p.tp {
        return Err("pthread_self() is not the thread pointer".into());
    }
    let above = p.top - p.tp;
    let below_used = lowest.min(0).unsigned_abs().next_multiple_of(64);
    let below = static_size(p, above).unwrap_or_else(|| (p.tp - p.entry_sp).next_multiple_of(64));
    if below < below_used {
        return Err(format!("static TLS of {below} bytes cannot hold the {below_used} in use"));
    }
    Ok(Extents {
        above,
        above_used: above,
        below,
        below_used,
        modules: -(below as isize)..0,
        pthread: 0..above as isize,
        pthread_self: 0,
        always_touched: above,
    })
}
