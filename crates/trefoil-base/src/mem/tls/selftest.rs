//! The self-test before the first goroutine: compares a block with one made by glibc, then runs on
//! one.
//!
//! `compare` makes a block by the recipe and one by `_dl_allocate_tls`. `run` switches to a block
//! and does what goroutines will do. From the words that a call changes it also finds out where
//! glibc stores the pthread keys, the buffers of `strerror`, and what the next goroutine on a block
//! would inherit (locale, cancellation).

use super::destructors::{self, KeyPlaces};
use super::discover::{Map, STACK_BYTES};
use super::modules::{Dtv, UNALLOCATED};
use super::raw::{self, load, symbol, thread_pointer};
use super::{BlockLayout, Method, Resets, modules, surplus};
use crate::arch;
use crate::sys::signal::{change_mask, set_mask};
use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{catch_unwind, resume_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A thread id that no thread has (pid_max is at most 2²²) and no goroutine gets.
const TEST_TID: u32 = 0x3fff_fff0;

/// Checks that the recipe's block equals glibc's in every module's area and in the DTV.
pub(super) fn compare(l: &BlockLayout) -> Result<(), String> {
    type Allocate = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
    type Deallocate = unsafe extern "C" fn(*mut c_void, bool);
    let (Some(allocate), Some(deallocate)) =
        (symbol(c"_dl_allocate_tls"), symbol(c"_dl_deallocate_tls"))
    else {
        return Ok(()); // the test run has to suffice
    };
    let room = (l.above + l.below + l.align).next_multiple_of(4096);
    let map = Map::new(2 * room)?;
    let ours = (map.base + room - l.above) & !(l.align - 1);
    let theirs = ours + room;
    if !theirs.is_multiple_of(l.align) {
        // TLS aligned to more than a page: the two blocks would need different offsets.
        return Ok(());
    }
    // SAFETY: two halves of a new mapping, each with room for a block; glibc's functions of these
    // names initialise and free a block (2.1 on); `build` gets zeroed memory.
    unsafe {
        super::block::build(l, ours, map.base, map.base + room, TEST_TID)
            .map_err(|e| e.to_string())?;
        let made = std::mem::transmute::<*mut c_void, Allocate>(allocate)(theirs as *mut c_void);
        if made as usize != theirs {
            libc::free(Dtv::of(ours).start().cast());
            return Err("_dl_allocate_tls did not use the memory it was given".into());
        }
        let same = same_blocks(l, ours, theirs);
        std::mem::transmute::<*mut c_void, Deallocate>(deallocate)(made, false);
        libc::free(Dtv::of(ours).start().cast());
        same
    }
}

/// Compares two blocks.
///
/// # Safety
/// No code runs on the blocks.
unsafe fn same_blocks(l: &BlockLayout, ours: usize, theirs: usize) -> Result<(), String> {
    // SAFETY: areas and DTVs of the two blocks (caller).
    unsafe {
        for m in &modules::table().modules {
            let bytes =
                |tp: usize| std::slice::from_raw_parts(raw::at(tp, m.offset) as *const u8, m.size);
            if bytes(ours) != bytes(theirs) {
                return Err(format!("module {}: the image differs from glibc's", m.id));
            }
        }
        let (a, b) = (Dtv::of(ours), Dtv::of(theirs));
        for i in (0..=l.fixed_last).filter(|&i| !surplus::is_image(i)) {
            let ([va, fa], [vb, fb]): ([usize; 2], [usize; 2]) =
                (load(a.entry(i)), load(b.entry(i)));
            let fixed = l.fixed.iter().any(|f| f.0 == i);
            let dynamic = i > 0 && va == vb && (va == UNALLOCATED || va == 0);
            let agree = if fixed { va + (theirs - ours) == vb } else { va == vb || i == 0 };
            if !agree || (fixed && (fa != 0 || fb != 0)) || (i > 0 && !fixed && !dynamic) {
                return Err(format!("DTV entry {i} differs from glibc's"));
            }
        }
    }
    Ok(())
}

/// Runs a closure on a block and its stack, and returns. It must not be inlined: the compiler
/// assumes that the thread pointer is constant within a function.
///
/// # Safety
/// The block is complete and no code runs on it; `f` does not unwind.
#[inline(never)]
pub(crate) unsafe fn on_block(block: &super::TlsBlock, mut f: impl FnMut()) {
    extern "C" fn call<F: FnMut()>(f: *mut ()) {
        // SAFETY: `on_block` passes its own closure, which lives until `call_on` returns.
        unsafe { (*f.cast::<F>())() }
    }
    fn of<F: FnMut()>(_: &F) -> extern "C" fn(*mut ()) {
        call::<F>
    }
    // All signals are blocked, glibc's 33 included: this thread is no M, so the handler would take
    // the block for the thread's own (interpose/setxid.rs).
    let mask = change_mask(libc::SIG_SETMASK, !0);
    // SAFETY: the caller's contract.
    unsafe {
        arch::call_on(of(&f), (&raw mut f).cast(), block.stack_top.as_ptr(), block.tp.as_ptr());
    }
    set_mask(mask);
}

/// State and results of a run on a block.
struct Run<'a> {
    layout: &'a BlockLayout,
    /// Room for a copy of the block.
    before: Vec<u64>,
    resets: Resets,
    keys: Option<KeyPlaces>,
    buffers: Vec<isize>,
    wrong: Option<&'static str>,
}

/// Runs code on a block made by `l`'s method, and completes `l` with what it found.
///
/// # Errors
/// A text that names what failed.
pub(super) fn run(l: &mut BlockLayout) -> Result<(), String> {
    let room = (l.above + l.below + l.align + STACK_BYTES).next_multiple_of(4096);
    let map = Map::new(room)?;
    let (resets, keys, buffers) = {
        let l = &*l;
        let at = |a: usize| NonNull::new(a as *mut u8).ok_or("null mapping");
        // SAFETY: a new mapping; no other thread knows the block; it is destroyed before the
        // unmapping.
        unsafe {
            let block = l
                .create(at(map.base)?, at(map.base + room)?, TEST_TID)
                .map_err(|e| e.to_string())?;
            let mut run = Run {
                layout: l,
                before: Vec::with_capacity((l.below_used + l.above_used) / 8),
                resets: Resets::default(),
                keys: None,
                buffers: Vec::with_capacity(2),
                wrong: None,
            };
            on_block(&block, || run.wrong = run.check_all().err());
            // After a failed run the block may be in any state: so it is leaked, not destroyed.
            if let Some(wrong) = run.wrong {
                std::mem::forget(map);
                return Err(format!("self-test on a block by {}: {wrong}", l.method));
            }
            l.recycle(block.tp.as_ptr() as usize);
            l.destroy(block.tp.as_ptr() as usize);
            (run.resets, run.keys, run.buffers)
        }
    };
    l.resets = resets;
    l.keys = keys;
    l.buffers = buffers;
    Ok(())
}

impl Run<'_> {
    /// Runs all checks and discoveries, on the block.
    fn check_all(&mut self) -> Result<(), &'static str> {
        let tp = thread_pointer();
        // SAFETY: the running block, which is complete if the recipe is right.
        unsafe {
            if load::<u32>(raw::at(tp, self.layout.tid)) != TEST_TID {
                return Err("the thread id is not the one that was set");
            }
            if libc::__errno_location() as isize != tp as isize + self.layout.errno {
                return Err("errno is not in the block");
            }
        }
        self.discover_locale();
        self.discover_cancellation();
        self.discover_keys();
        self.discover_buffers();
        self.check_code()
    }

    /// Copies the block, runs `f`, and returns the words that changed: (offset, word before).
    fn changed(&mut self, f: impl FnOnce()) -> Vec<(isize, u64)> {
        let l = self.layout;
        let words = (l.below_used + l.above_used) / 8;
        let from = (thread_pointer() - l.below_used) as *const u64;
        let mut out = Vec::with_capacity(16); // before the copy: malloc changes the block
        // SAFETY: words of the running block; `before` has the capacity.
        unsafe {
            self.before.as_mut_ptr().copy_from_nonoverlapping(from, words);
            self.before.set_len(words);
            f();
            for i in 0..words {
                if from.add(i).read_volatile() != self.before[i] && out.len() < 16 {
                    out.push((i as isize * 8 - l.below_used as isize, self.before[i]));
                }
            }
        }
        out
    }

    /// Finds the words of the locale, by a call of `uselocale`.
    fn discover_locale(&mut self) {
        let none: libc::locale_t = std::ptr::null_mut();
        // SAFETY: the "C" locale always exists; newlocale returns a constant for it.
        let c = unsafe { libc::newlocale(libc::LC_ALL_MASK, c"C".as_ptr(), none) };
        let mut old = none;
        // SAFETY: a valid locale; the old one is restored below.
        let words = self.changed(|| unsafe { old = libc::uselocale(c) });
        // SAFETY: the locale that was in use before.
        unsafe { libc::uselocale(old) };
        self.resets.words.extend(words);
        unsafe extern "C" {
            fn __ctype_b_loc() -> *const u64;
            fn __ctype_tolower_loc() -> *const u64;
            fn __ctype_toupper_loc() -> *const u64;
        }
        // SAFETY: they return the addresses of three words in libc's TLS (LSB).
        let tables = unsafe { [__ctype_b_loc(), __ctype_tolower_loc(), __ctype_toupper_loc()] };
        for at in tables {
            let off = at as isize - thread_pointer() as isize;
            if self.resets.words.iter().all(|r| r.0 != off) {
                // SAFETY: one of the three words.
                self.resets.words.push((off, unsafe { *at }));
            }
        }
    }

    /// Finds the words of the cancellation state and type.
    fn discover_cancellation(&mut self) {
        const DISABLE: i32 = 1;
        const ASYNCHRONOUS: i32 = 1;
        unsafe extern "C" {
            fn pthread_setcancelstate(state: i32, old: *mut i32) -> i32;
            fn pthread_setcanceltype(kind: i32, old: *mut i32) -> i32;
        }
        let (mut state, mut kind) = (0, 0);
        // SAFETY: no thread cancels this block; both are restored below.
        let words = self.changed(|| unsafe {
            pthread_setcancelstate(DISABLE, &mut state);
            pthread_setcanceltype(ASYNCHRONOUS, &mut kind);
        });
        let tp = thread_pointer();
        for (off, before) in words {
            for (off, before) in [(off, before as u32), (off + 4, (before >> 32) as u32)] {
                // SAFETY: a word of this block.
                if unsafe { load::<u32>(tp.wrapping_add_signed(off)) } != before {
                    self.resets.halves.push((off, before));
                }
            }
        }
        // SAFETY: as above.
        unsafe {
            pthread_setcanceltype(kind, &mut kind);
            pthread_setcancelstate(state, &mut state);
        }
    }

    /// Finds the places of pthread keys. Two words must change: the key's value, and the word with
    /// the byte that tells that some value was set.
    fn discover_keys(&mut self) {
        const MARK: usize = 0x5eed_c0de;
        let mut key = 0;
        // SAFETY: a new key, deleted below.
        if unsafe { libc::pthread_key_create(&mut key, None) } != 0 {
            return;
        }
        let words = self.changed(|| {
            // SAFETY: as above.
            unsafe { libc::pthread_setspecific(key, MARK as *const c_void) };
        });
        let tp = thread_pointer();
        // SAFETY: words of this block.
        let now = |off: isize| unsafe { load::<usize>(tp.wrapping_add_signed(off)) };
        let value = words.iter().find(|w| now(w.0) == MARK).map(|w| w.0);
        let pair = |off: isize| value.is_some_and(|v| off == v || off == v - 8);
        let others: Vec<_> = words.iter().filter(|w| !pair(w.0)).collect();
        if let (Some(value), [(off, before)], true) = (value, &others[..], key < 32) {
            // The byte that changed from 0 to 1.
            let used = (0..8).find(|&b| {
                let byte = |w: u64| (w >> (b * 8)) as u8;
                byte(*before) == 0 && byte(now(*off) as u64) == 1
            });
            let first = value - (key as isize * 16 + 8);
            let in_pthread = |off: isize| self.layout.pthread.contains(&off);
            if let (Some(b), true) = (used, in_pthread(*off) && in_pthread(first)) {
                // The first of the 32 pointers must point to the first block.
                if now(first + 512) == raw::at(tp, first) {
                    self.keys = Some(KeyPlaces { used: *off + b, first });
                }
            }
        }
        // SAFETY: the new key; and the byte is cleared so that the end of this run finds no values.
        unsafe {
            libc::pthread_setspecific(key, std::ptr::null());
            libc::pthread_key_delete(key);
            if let Some(k) = self.keys {
                raw::store(raw::at(tp, k.used), 0u8);
            }
        }
    }

    /// Finds the words of `struct pthread` with the buffers that `strerror` and `strsignal`
    /// allocate for a number without a text: the word that contains what the call has returned.
    fn discover_buffers(&mut self) {
        const NO_SUCH_NUMBER: i32 = 99_999;
        unsafe extern "C" {
            fn strsignal(signal: i32) -> *mut std::ffi::c_char;
        }
        let calls: [fn() -> usize; 2] = [
            // SAFETY: returns a text for any number.
            || unsafe { libc::strerror(NO_SUCH_NUMBER) as usize },
            // SAFETY: as above.
            || unsafe { strsignal(NO_SUCH_NUMBER) as usize },
        ];
        let tp = thread_pointer();
        for call in calls {
            let mut text = 0;
            let words = self.changed(|| text = call());
            for (off, _) in words {
                let in_pthread = self.layout.pthread.contains(&off);
                // SAFETY: a word of this block.
                if in_pthread && text != 0 && unsafe { load::<usize>(raw::at(tp, off)) } == text {
                    self.buffers.push(off);
                }
            }
        }
        // SAFETY: buffers of the running block; the texts are not used any more.
        unsafe { destructors::free_buffers(&self.buffers) };
    }

    /// Does what goroutines do: thread-locals, errno, malloc, formatting, a panic, destructors.
    fn check_code(&self) -> Result<(), &'static str> {
        static DROPPED: AtomicUsize = AtomicUsize::new(0);
        struct Dropped(Cell<u32>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                DROPPED.fetch_add(1, Ordering::Relaxed);
            }
        }
        thread_local! { static LOCAL: Dropped = const { Dropped(Cell::new(7)) } }

        let before = DROPPED.load(Ordering::Relaxed);
        let fresh = LOCAL.with(|l| l.0.replace(8)) == 7;
        if !fresh || LOCAL.with(|l| l.0.get()) != 8 {
            return Err("a thread_local did not have its initial value");
        }
        // SAFETY: plain libc calls; the memory is checked and freed.
        unsafe {
            libc::close(-1);
            if *libc::__errno_location() != libc::EBADF {
                return Err("errno was not set in the block");
            }
            let m = libc::malloc(4000).cast::<u8>();
            if m.is_null() {
                return Err("malloc failed");
            }
            m.write_bytes(1, 4000);
            libc::free(m.cast());
        }
        if format!("{}-{:?}", std::hint::black_box(7), Some("block")) != "7-Some(\"block\")" {
            return Err("format! returned a wrong text");
        }
        // resume_unwind calls no panic hook, so nothing is written to stderr.
        if cfg!(panic = "unwind")
            && catch_unwind(|| resume_unwind(Box::new(TEST_TID)))
                .err()
                .and_then(|e| e.downcast::<u32>().ok())
                .is_none_or(|e| *e != TEST_TID)
        {
            return Err("a panic was not caught");
        }
        // Runs the destructors of pthread keys too: an allocator may have one, and would otherwise
        // keep a pointer to the block after its end.
        // SAFETY: no other code runs on this block; LOCAL is not used any more.
        unsafe { destructors::run_all(self.layout) };
        if DROPPED.load(Ordering::Relaxed) != before + 1 {
            return Err("the destructor of a thread_local did not run once");
        }
        Ok(())
    }
}

/// The method is part of an error's text.
impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Template => "template",
            Self::Pthread => "pthread",
        })
    }
}
