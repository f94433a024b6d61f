//! System calls on mappings.

use super::{Result, call};
use std::ffi::{c_int, c_void};
use std::ptr;

/// Readable and writable memory.
pub const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Maps `len` zeroed bytes, private to this process, with `flags` besides `MAP_PRIVATE`; at `hint`
/// if that is free. Returns their address.
///
/// # Safety
/// With `MAP_FIXED` the caller owns what the mapping replaces.
#[inline]
pub unsafe fn mmap_anonymous(
    hint: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
) -> Result<*mut c_void> {
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags) as usize;
    let no_file = -1isize as usize;
    let args = [hint as usize, len, prot as usize, flags, no_file, 0];
    // SAFETY: the caller's contract.
    unsafe { call(libc::SYS_mmap, args).map(ptr::with_exposed_provenance_mut) }
}

/// Unmaps `len` bytes.
///
/// # Safety
/// The caller owns them, and no thread uses them any more.
#[inline]
pub unsafe fn munmap(at: *mut c_void, len: usize) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { call(libc::SYS_munmap, [at as usize, len]).map(drop) }
}

/// Changes the size of a mapping, which may move. Returns its new address.
///
/// # Safety
/// The caller owns the mapping, and uses the old address no more.
#[inline]
pub unsafe fn mremap(at: *mut c_void, old_len: usize, new_len: usize) -> Result<*mut c_void> {
    let args = [at as usize, old_len, new_len, libc::MREMAP_MAYMOVE as usize];
    // SAFETY: the caller's contract.
    unsafe { call(libc::SYS_mremap, args).map(ptr::with_exposed_provenance_mut) }
}

/// Sets the access to pages.
///
/// # Safety
/// The caller owns them, and no thread needs the access that they lose.
#[inline]
pub unsafe fn mprotect(at: *mut c_void, len: usize, prot: c_int) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { call(libc::SYS_mprotect, [at as usize, len, prot as usize]).map(drop) }
}

/// Gives the kernel an advice about pages.
///
/// # Safety
/// The caller owns them and accepts what the advice does to them.
#[inline]
pub unsafe fn madvise(at: *mut c_void, len: usize, advice: c_int) -> Result<()> {
    // SAFETY: the caller's contract.
    unsafe { call(libc::SYS_madvise, [at as usize, len, advice as usize]).map(drop) }
}

/// Locks each of the pages in memory when it is first touched (Linux 4.4).
///
/// # Safety
/// The caller owns the pages.
#[inline]
pub unsafe fn mlock_on_fault(at: *mut c_void, len: usize) -> Result<()> {
    let args = [at as usize, len, libc::MLOCK_ONFAULT as usize];
    // SAFETY: the caller's contract; locking changes no contents.
    unsafe { call(libc::SYS_mlock2, args).map(drop) }
}

/// Unlocks pages.
///
/// # Safety
/// The caller owns them.
#[inline]
pub unsafe fn munlock(at: *mut c_void, len: usize) -> Result<()> {
    // SAFETY: the caller's contract; unlocking changes no contents.
    unsafe { call(libc::SYS_munlock, [at as usize, len]).map(drop) }
}

#[cfg(test)]
mod tests {
    use super::super::Errno;
    use super::*;
    use crate::sys::mm::page;

    #[test]
    fn a_mapping_keeps_its_contents_when_it_grows() {
        let len = page();
        // SAFETY: mappings of this function alone.
        unsafe {
            let at = mmap_anonymous(ptr::null_mut(), len, READ_WRITE, 0).unwrap();
            at.cast::<u64>().write(7);
            let at = mremap(at, len, 64 * len).unwrap();
            assert_eq!(at.cast::<u64>().read(), 7);
            assert_eq!(at.byte_add(64 * len - 8).cast::<u64>().read(), 0);
            madvise(at, len, libc::MADV_DONTNEED).unwrap();
            assert_eq!(at.cast::<u64>().read(), 0);
            mprotect(at, len, libc::PROT_READ).unwrap();
            assert_eq!(at.cast::<u64>().read(), 0);
            let second = mmap_anonymous(at, len, READ_WRITE, libc::MAP_FIXED_NOREPLACE);
            // An emulator of user programs may not know the flag.
            let is_emulated = std::env::var_os("TREFOIL_EMULATED").is_some();
            assert!(second.is_err() || is_emulated, "two mappings at one address");
            munmap(at, 64 * len).unwrap();
            assert_eq!(munmap(at.byte_add(1), len), Err(Errno::INVAL), "not a page's address");
        }
    }
}
