//! What the tests of several files need.

use crate::sys::rng::Rng;

/// Returns a function that returns the same random numbers in each run, below its argument.
pub(crate) fn random_below() -> impl FnMut(usize) -> usize {
    let mut rng = Rng::from_seed(1);
    move |below| rng.next() as usize % below
}

/// Returns the vdso: a small ELF file in memory. Empty in an emulator of user programs, which has
/// none.
pub(crate) fn vdso() -> &'static [u8] {
    // SAFETY: reads the auxiliary vector.
    let vdso = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    if vdso == 0 {
        return &[];
    }
    // SAFETY: the vdso is mapped in whole pages, and never unmapped.
    let header = unsafe { std::slice::from_raw_parts(vdso as *const u8, 4096) };
    let sections_at = u64::from_le_bytes(*header[40..].first_chunk().unwrap()) as usize;
    // SAFETY: as above; the table of sections is the end of it.
    unsafe {
        std::slice::from_raw_parts(vdso as *const u8, sections_at + 64 * usize::from(header[60]))
    }
}
