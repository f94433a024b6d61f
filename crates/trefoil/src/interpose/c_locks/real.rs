//! glibc's functions: the next definitions after ours, in the loader's order.
//!
//! `dlsym` may allocate and lock, and an allocator that locks a mutex for the first time would wait
//! for itself. So the symbol tables of the loaded objects are read here, for all functions at once,
//! under no lock except the loader's own (which is recursive, and whose functions the loader calls
//! directly).
//!
//! The default version of a symbol is used: `pthread_cond_*` of x86_64 exist twice, and those of
//! before 2.3.2 have another layout.
//!
//! Invariants:
//! 1. An entry is null, or libc's function of that name and type. If several threads look it up at
//!    once, all find the same.
//! 2. Nothing here allocates, unless a function is in no table. Then `dlsym` is called, and if that
//!    does not find it either, the process aborts.
//!
//! Rejected: `__pthread_mutex_lock` and similar names, which glibc exports only as hidden versions
//! since 2.34.

use crate::sys::objects;
use libc::{
    clockid_t, pthread_barrier_t, pthread_cond_t, pthread_mutex_t, pthread_rwlock_t, sem_t,
    timespec,
};
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Defines a function per name that calls libc's function of that name.
macro_rules! real_functions {
    ($($name:ident($($arg:ident: $type:ty),*);)+) => {
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        enum Function { $($name,)+ }

        const NAMES: &[&str] = &[$(concat!(stringify!($name), "\0"),)+];

        $(
            /// libc's own function.
            ///
            /// # Safety
            /// As its manual page says.
            #[inline(always)]
            pub(super) unsafe fn $name($($arg: $type),*) -> c_int {
                type Real = unsafe extern "C-unwind" fn($($type),*) -> c_int;
                // SAFETY: invariant 1, with the caller's arguments.
                unsafe { transmute::<*mut c_void, Real>(address(Function::$name))($($arg),*) }
            }
        )+
    };
}

real_functions! {
    pthread_mutex_lock(mutex: *mut pthread_mutex_t);
    pthread_mutex_trylock(mutex: *mut pthread_mutex_t);
    pthread_mutex_timedlock(mutex: *mut pthread_mutex_t, at: *const timespec);
    pthread_mutex_clocklock(mutex: *mut pthread_mutex_t, clock: clockid_t, at: *const timespec);
    pthread_mutex_unlock(mutex: *mut pthread_mutex_t);
    pthread_rwlock_rdlock(lock: *mut pthread_rwlock_t);
    pthread_rwlock_wrlock(lock: *mut pthread_rwlock_t);
    pthread_rwlock_tryrdlock(lock: *mut pthread_rwlock_t);
    pthread_rwlock_trywrlock(lock: *mut pthread_rwlock_t);
    pthread_rwlock_timedrdlock(lock: *mut pthread_rwlock_t, at: *const timespec);
    pthread_rwlock_timedwrlock(lock: *mut pthread_rwlock_t, at: *const timespec);
    pthread_rwlock_clockrdlock(lock: *mut pthread_rwlock_t, clock: clockid_t, at: *const timespec);
    pthread_rwlock_clockwrlock(lock: *mut pthread_rwlock_t, clock: clockid_t, at: *const timespec);
    pthread_rwlock_unlock(lock: *mut pthread_rwlock_t);
    pthread_cond_wait(cond: *mut pthread_cond_t, mutex: *mut pthread_mutex_t);
    pthread_cond_timedwait(cond: *mut pthread_cond_t, mutex: *mut pthread_mutex_t,
        at: *const timespec);
    pthread_cond_clockwait(cond: *mut pthread_cond_t, mutex: *mut pthread_mutex_t,
        clock: clockid_t, at: *const timespec);
    pthread_cond_signal(cond: *mut pthread_cond_t);
    pthread_cond_broadcast(cond: *mut pthread_cond_t);
    pthread_barrier_wait(barrier: *mut pthread_barrier_t);
    sem_wait(sem: *mut sem_t);
    sem_trywait(sem: *mut sem_t);
    sem_timedwait(sem: *mut sem_t, at: *const timespec);
    sem_clockwait(sem: *mut sem_t, clock: clockid_t, at: *const timespec);
    sem_post(sem: *mut sem_t);
}

/// The addresses of the functions; null until they are looked up (invariant 1).
static FOUND: [AtomicPtr<c_void>; NAMES.len()] =
    [const { AtomicPtr::new(std::ptr::null_mut()) }; NAMES.len()];

/// Returns the address of a function.
#[inline(always)]
fn address(function: Function) -> *mut c_void {
    // Relaxed: only code is read through the address.
    let at = FOUND[function as usize].load(Ordering::Relaxed);
    if at.is_null() { address_slow(function) } else { at }
}

#[cold]
fn address_slow(function: Function) -> *mut c_void {
    look_up_all();
    let at = FOUND[function as usize].load(Ordering::Relaxed);
    if !at.is_null() {
        return at;
    }
    let name = CStr::from_bytes_with_nul(NAMES[function as usize].as_bytes()).unwrap_or_default();
    // SAFETY: a C string and a pseudo handle.
    let at = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    if at.is_null() {
        crate::sys::fatal(format_args!("trefoil: libc has no {}", name.to_string_lossy()));
    }
    FOUND[function as usize].store(at, Ordering::Relaxed);
    at
}

/// Reads the symbol tables of all objects after ours.
fn look_up_all() {
    let own = look_up_all as *const () as usize;
    let mut is_after_own = false;
    objects::for_each(|info, headers| {
        let base = info.dlpi_addr as usize;
        if !is_after_own {
            is_after_own = headers.iter().filter(|h| h.p_type == libc::PT_LOAD).any(|h| {
                let start = base.wrapping_add(h.p_vaddr as usize);
                (start..start + h.p_memsz as usize).contains(&own)
            });
            return;
        }
        let Some(dynamic) = headers.iter().find(|h| h.p_type == libc::PT_DYNAMIC) else { return };
        // SAFETY: the dynamic section of an object that is loaded, and stays so during the call.
        let Some(symbols) = (unsafe { Symbols::of(base, base + dynamic.p_vaddr as usize) }) else {
            return;
        };
        for (name, found) in NAMES.iter().zip(&FOUND) {
            let name = name.trim_end_matches('\0').as_bytes();
            if found.load(Ordering::Relaxed).is_null()
                // SAFETY: as above.
                && let Some(at) = unsafe { symbols.function(name) }
            {
                found.store(at as *mut c_void, Ordering::Relaxed);
            }
        }
    });
}

const DT_NULL: u64 = 0;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const DT_VERSYM: u64 = 0x6fff_fff0;

/// The dynamic symbols of an object, with the GNU hash table
/// (<https://sourceware.org/gnu-gabi/program-loading-and-dynamic-linking.txt>).
struct Symbols {
    base: usize,
    symbols: *const libc::Elf64_Sym,
    names: *const u8,
    hash: *const u32,
    /// Null if the symbols have no versions.
    versions: *const u16,
}

impl Symbols {
    /// Returns None if one of the tables is missing.
    ///
    /// # Safety
    /// `dynamic` is the dynamic section of the object at `base`.
    unsafe fn of(base: usize, dynamic: usize) -> Option<Symbols> {
        let [mut symbols, mut names, mut hash, mut versions] = [0; 4];
        let mut entry = dynamic as *const [u64; 2];
        loop {
            // SAFETY: entries up to `DT_NULL`.
            let [tag, value] = unsafe { *entry };
            // The loader adds the base in place, except where it cannot write (the vdso).
            let value = value as usize;
            let at = if value < base { value + base } else { value };
            match tag {
                DT_NULL => break,
                DT_SYMTAB => symbols = at,
                DT_STRTAB => names = at,
                DT_GNU_HASH => hash = at,
                DT_VERSYM => versions = at,
                _ => {}
            }
            // SAFETY: it was not the last entry.
            entry = unsafe { entry.add(1) };
        }
        (symbols != 0 && names != 0 && hash != 0).then_some(Symbols {
            base,
            symbols: symbols as *const _,
            names: names as *const _,
            hash: hash as *const _,
            versions: versions as *const _,
        })
    }

    /// Returns the address of a function that the object defines, in its default version.
    ///
    /// # Safety
    /// The object is loaded.
    unsafe fn function(&self, name: &[u8]) -> Option<usize> {
        let hash = name.iter().fold(5381u32, |h, &b| h.wrapping_mul(33).wrapping_add(b.into()));
        // SAFETY: the table has the documented format: four numbers, a filter of words, buckets,
        // chains.
        unsafe {
            let [buckets, first, filter_words] = [0, 1, 2].map(|i| *self.hash.add(i));
            if buckets == 0 {
                return None;
            }
            let bucket_at = self.hash.add(4 + 2 * filter_words as usize);
            let mut index = *bucket_at.add((hash % buckets) as usize);
            if index < first {
                return None;
            }
            let chain = bucket_at.add(buckets as usize);
            loop {
                let link = *chain.add((index - first) as usize);
                if link | 1 == hash | 1 && self.is_default_function(index as usize, name) {
                    return Some(self.base + (*self.symbols.add(index as usize)).st_value as usize);
                }
                if link & 1 != 0 {
                    return None;
                }
                index += 1;
            }
        }
    }

    /// Returns whether the symbol is a function of that name that the object defines, in its
    /// default version.
    unsafe fn is_default_function(&self, index: usize, name: &[u8]) -> bool {
        const FUNCTION: u8 = 2;
        const HIDDEN: u16 = 0x8000;
        // SAFETY: a symbol of the table; its name ends with a zero.
        unsafe {
            let symbol = &*self.symbols.add(index);
            symbol.st_info & 15 == FUNCTION
                && symbol.st_shndx != 0
                && (self.versions.is_null() || *self.versions.add(index) & HIDDEN == 0)
                && CStr::from_ptr(self.names.add(symbol.st_name as usize).cast()).to_bytes() == name
        }
    }
}
