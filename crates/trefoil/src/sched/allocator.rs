//! The program's allocator, as an M runs it.
//!
//! An M keeps free blocks of the program's allocators in magazines (`mem/magazine.rs`). Go's mcache
//! is the same per P; here it is per M, so that a goroutine whose P was retaken can allocate too.
//! If a magazine is empty or full, the allocator itself runs on the thread's own stack and
//! thread-local storage. So no preempted goroutine holds an allocator's lock, and what the
//! allocator stores in thread-locals belongs to the thread.
//!
//! Invariant 1: the magazines of an M are touched by its thread only: by a goroutine inside
//! `with_m`, or on the thread's own context while no goroutine runs on the M.

#[cfg(all(debug_assertions, feature = "std"))]
use crate::arch;
use crate::mem::magazine::{BlocksOf, Chain, Class, GiveBack, Magazines};
use crate::sched::current_g;
use crate::sched::m::M;
use crate::sched::own_context::call_by;
#[cfg(all(debug_assertions, feature = "std"))]
use std::cell::Cell;
#[cfg(all(debug_assertions, feature = "std"))]
use std::ptr::null;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

impl M {
    /// Returns one set of its magazines.
    ///
    /// # Safety
    /// The caller is inside `with_m` and this is the M that it passed, or the caller is the M's
    /// thread on its own context; no other borrow of the set is alive.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn magazines(&self, of: BlocksOf) -> &mut Magazines {
        // SAFETY: only the M's thread comes here, and has one borrow at a time: the caller's
        // contract (magazine.rs, invariant 3).
        unsafe { &mut *self.magazines[of as usize].get() }
    }

    /// Inside `with_m`, if a magazine is empty: fills it with blocks that `alloc` makes on the
    /// thread's own context, and returns one more. Returns null if there is no memory.
    #[cold]
    #[inline(never)]
    pub(crate) fn refill(
        &self,
        of: BlocksOf,
        class: Class,
        alloc: impl Fn() -> *mut u8,
    ) -> *mut u8 {
        // SAFETY: the caller is inside `with_m`, and the borrow ends here.
        let n = unsafe { self.magazines(of) }.refill_size(class);
        let (first, chain) = self.in_allocator(|| {
            let mut chain = Chain::EMPTY;
            for _ in 1..n {
                let block = alloc();
                if block.is_null() {
                    break;
                }
                // SAFETY: allocated just now, with at least 16 bytes.
                unsafe { chain.push(block) };
            }
            (alloc(), chain)
        });
        // SAFETY: as above.
        let magazines = unsafe { self.magazines(of) };
        magazines.add(class, chain);
        // If the allocator had memory only for the chain, one block of the chain is returned.
        if first.is_null() { magazines.pop(class).unwrap_or(null_mut()) } else { first }
    }

    /// Inside `with_m`, if a magazine exceeds its capacity: gives its older half back to the
    /// allocator, block by block with `give_back`.
    #[cold]
    #[inline(never)]
    pub(crate) fn give_back_surplus(&self, of: BlocksOf, class: Class, give_back: GiveBack) {
        // SAFETY: the caller is inside `with_m`, and the borrow ends here.
        let mut surplus = unsafe { self.magazines(of) }.take_surplus(class);
        self.in_allocator(|| {
            while let Some(block) = surplus.pop() {
                // SAFETY: a free block of this class and allocator (magazine.rs, invariants 1 and
                // 2).
                unsafe { give_back(block, class) };
            }
        });
    }

    /// As [`M::on_own_context`], for a function of the program's allocator.
    pub(crate) fn in_allocator<T>(&self, f: impl FnOnce() -> T) -> T {
        // Relaxed: a hint for sysmon.
        self.in_allocator.store(true, Ordering::Relaxed);
        let result = self.on_own_context(f);
        self.in_allocator.store(false, Ordering::Relaxed);
        result
    }
}

/// Calls `f`, a function of the program's allocator; on a goroutine, on the thread's own context.
#[inline]
pub(crate) fn in_allocator<T>(f: impl FnOnce() -> T) -> T {
    if current_g().is_none() { f() } else { call_by(f, |m, call| m.in_allocator(call)) }
}

#[cfg(all(debug_assertions, feature = "std"))]
thread_local! {
    /// In the thread-local storage of an M's thread: its M. Null elsewhere.
    pub(super) static OWN_M: Cell<*const M> = const { Cell::new(null()) };
}

/// In debug builds: ends the process if the runtime allocates where it must not (sched/mod.rs, rule
/// 2): on a goroutine inside the runtime, or on the own context of an M that owns a P which sysmon
/// cannot retake.
#[cfg(all(debug_assertions, feature = "std"))]
pub(crate) fn assert_may_allocate() {
    let here = 0u8;
    let is_forbidden = match current_g() {
        Some(g) => {
            // SAFETY: on a goroutine the GS base is its M.
            let in_runtime = unsafe { arch::is_in_runtime() };
            // On another stack this is a signal handler, which may have interrupted the runtime.
            in_runtime && g.has_on_stack(&raw const here as usize)
        }
        None => {
            // SAFETY: null or the running thread's own M; Ms are never freed.
            let own = unsafe { OWN_M.get().as_ref() };
            own.is_some_and(|m| m.in_runtime.load(Ordering::Relaxed) != 0 && m.p.get().is_some())
        }
    };
    // If every TLS block needs a thread of glibc's (`mem/tls/fallback.rs`), making a stack
    // allocates wherever it is done.
    if is_forbidden && !crate::mem::tls::is_by_pthread() {
        crate::sched::fatal(format_args!(
            "the runtime allocates while it holds a P: a bug in trefoil"
        ));
    }
}
