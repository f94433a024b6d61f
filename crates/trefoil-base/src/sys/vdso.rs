//! Clocks from the vDSO: the object that the kernel maps into every process, with functions that
//! read the time without a system call.
//!
//! libc's `clock_gettime` reads the same clocks in the same way. It is not called, because it is an
//! interposed function, and because a lookup of the original could allocate, and allocators read
//! clocks.
//!
//! The function is looked up in the object's symbol table by the first call. Any number of threads
//! may do that at the same time: all of them find the same. A process without a vDSO (`vdso=0`,
//! some emulators) makes system calls.

use super::raw::syscall;
use libc::{clockid_t, timespec};
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

type ClockGettime = unsafe extern "C" fn(clockid_t, *mut timespec) -> c_int;

/// The function's name. Each kernel has one version of it.
const NAME: &CStr =
    if cfg!(target_arch = "x86_64") { c"__vdso_clock_gettime" } else { c"__kernel_clock_gettime" };

/// A [`ClockGettime`]: [`resolve_slow`] until the first call. Relaxed: the code and data behind it
/// were there before the process began.
static CLOCK_GETTIME: AtomicPtr<c_void> = AtomicPtr::new(resolve_slow as *mut c_void);

/// Returns the time of a clock that exists on every kernel. Async-signal-safe.
#[inline]
pub fn clock_gettime(clock: clockid_t) -> timespec {
    let mut time = timespec { tv_sec: 0, tv_nsec: 0 };
    let read = CLOCK_GETTIME.load(Ordering::Relaxed);
    // SAFETY: the pointer is always a `ClockGettime`. The function writes one timespec.
    let result =
        unsafe { std::mem::transmute::<*mut c_void, ClockGettime>(read)(clock, &raw mut time) };
    debug_assert_eq!(result, 0, "clock {clock} does not exist");
    time
}

/// Finds the function, reads the clock with it, and stores it for later calls.
#[cold]
unsafe extern "C" fn resolve_slow(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: errno of the running thread or goroutine, which `getauxval` changes if the process
    // has no vDSO. The kernel's object is never unmapped by it.
    let found = unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let base = libc::getauxval(libc::AT_SYSINFO_EHDR) as *const u8;
        *errno = before;
        if base.is_null() { None } else { find(base) }
    };
    let read: ClockGettime = match found {
        // SAFETY: the kernel's function has this type.
        Some(address) => unsafe { std::mem::transmute::<*const u8, ClockGettime>(address) },
        None => by_system_call,
    };
    CLOCK_GETTIME.store(read as *mut c_void, Ordering::Relaxed);
    // SAFETY: the caller's timespec.
    unsafe { read(clock, time) }
}

/// Reads a clock by a system call.
unsafe extern "C" fn by_system_call(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: the caller's timespec.
    unsafe { syscall(libc::SYS_clock_gettime, [clock as usize, time as usize]) as c_int }
}

/// An entry of the dynamic section.
#[repr(C)]
struct Dyn {
    tag: i64,
    value: u64,
}

const DT_NULL: i64 = 0;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// Returns the address of the function [`NAME`] in the object at `base`.
///
/// # Safety
/// A loaded ELF object of this machine begins there, and stays mapped.
unsafe fn find(base: *const u8) -> Option<*const u8> {
    // SAFETY: the object's own tables, at the places that it names itself.
    unsafe {
        let tables = Tables::of(base)?;
        let count = match (tables.hash, tables.gnu_hash) {
            (Some(hash), _) => *hash.add(1) as usize,
            (None, Some(hash)) => count_by_gnu_hash(hash),
            (None, None) => return None,
        };
        let symbols = std::slice::from_raw_parts(tables.symbols, count);
        let symbol = symbols.iter().find(|symbol| {
            // A symbol without a section is one that the object needs.
            symbol.st_shndx != 0
                && CStr::from_ptr(tables.strings.add(symbol.st_name as usize).cast()) == NAME
        })?;
        Some(tables.bias.wrapping_add(symbol.st_value as usize))
    }
}

/// Where an object's tables are.
struct Tables {
    /// The difference between addresses in memory and in the object.
    bias: *const u8,
    symbols: *const libc::Elf64_Sym,
    strings: *const u8,
    hash: Option<*const u32>,
    gnu_hash: Option<*const u32>,
}

impl Tables {
    /// Returns None if one is missing.
    ///
    /// # Safety
    /// As [`find`].
    unsafe fn of(base: *const u8) -> Option<Tables> {
        // SAFETY: the caller's contract: the header, the program headers and the dynamic section
        // are where the object says, and its section ends with a null entry.
        unsafe {
            let header = &*base.cast::<libc::Elf64_Ehdr>();
            let segments = std::slice::from_raw_parts(
                base.add(header.e_phoff as usize).cast::<libc::Elf64_Phdr>(),
                header.e_phnum.into(),
            );
            let of_type = |wanted| segments.iter().find(|segment| segment.p_type == wanted);
            let load = of_type(libc::PT_LOAD)?;
            let bias =
                base.wrapping_add(load.p_offset as usize).wrapping_sub(load.p_vaddr as usize);
            let at = |address: u64| bias.wrapping_add(address as usize);
            let (mut symbols, mut strings, mut hash, mut gnu_hash) = (None, None, None, None);
            let mut entry = at(of_type(libc::PT_DYNAMIC)?.p_vaddr).cast::<Dyn>();
            loop {
                let Dyn { tag, value } = *entry;
                match tag {
                    DT_NULL => break,
                    DT_SYMTAB => symbols = Some(at(value).cast()),
                    DT_STRTAB => strings = Some(at(value)),
                    DT_HASH => hash = Some(at(value).cast()),
                    DT_GNU_HASH => gnu_hash = Some(at(value).cast()),
                    _ => {}
                }
                entry = entry.add(1);
            }
            Some(Tables { bias, symbols: symbols?, strings: strings?, hash, gnu_hash })
        }
    }
}

/// Returns the number of symbols of an object whose hash table is of GNU's kind: the table does not
/// contain it, but the last symbol ends the last chain.
///
/// # Safety
/// `hash` is such a table.
unsafe fn count_by_gnu_hash(hash: *const u32) -> usize {
    // SAFETY: four words, a filter of 64-bit words, the buckets, and the chains.
    unsafe {
        let [buckets, first, filter, _] = *hash.cast::<[u32; 4]>();
        let bucket = hash.add(4 + 2 * filter as usize);
        let chain = bucket.add(buckets as usize);
        let last = std::slice::from_raw_parts(bucket, buckets as usize).iter().copied().max();
        let mut last = last.unwrap_or(0);
        if last < first {
            return first as usize;
        }
        // The lowest bit marks the end of a chain.
        while *chain.add((last - first) as usize) & 1 == 0 {
            last += 1;
        }
        last as usize + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nanos(time: timespec) -> i64 {
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    }

    #[test]
    fn clocks_agree_with_system_calls() {
        for clock in [
            libc::CLOCK_MONOTONIC,
            libc::CLOCK_REALTIME,
            libc::CLOCK_BOOTTIME,
            libc::CLOCK_MONOTONIC_RAW,
            libc::CLOCK_MONOTONIC_COARSE,
            libc::CLOCK_REALTIME_COARSE,
        ] {
            let by_call = || {
                let mut time = timespec { tv_sec: 0, tv_nsec: 0 };
                // SAFETY: a local.
                assert_eq!(unsafe { by_system_call(clock, &raw mut time) }, 0);
                nanos(time)
            };
            let (before, now, after) = (by_call(), nanos(clock_gettime(clock)), by_call());
            // The wall clock may be set meanwhile, and a coarse clock may be a tick behind.
            let is_wall = matches!(clock, libc::CLOCK_REALTIME | libc::CLOCK_REALTIME_COARSE);
            let slack = if is_wall { 1_000_000_000 } else { 20_000_000 };
            assert!((before - slack..=after + slack).contains(&now), "{before} {now} {after}");
        }
    }

    #[test]
    fn the_function_is_found_where_the_kernel_has_a_vdso() {
        // SAFETY: it only reads the auxiliary vector.
        let base = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) } as *const u8;
        if base.is_null() {
            return;
        }
        // SAFETY: the kernel's object, which stays mapped.
        unsafe {
            let address = find(base).expect("the function is in the vDSO");
            clock_gettime(libc::CLOCK_MONOTONIC);
            assert_eq!(CLOCK_GETTIME.load(Ordering::Relaxed).cast_const().cast(), address);
            let tables = Tables::of(base).unwrap();
            if let (Some(hash), Some(gnu_hash)) = (tables.hash, tables.gnu_hash) {
                assert_eq!(*hash.add(1) as usize, count_by_gnu_hash(gnu_hash));
            }
        }
    }
}
