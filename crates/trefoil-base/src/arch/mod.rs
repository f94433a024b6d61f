//! What depends on the CPU: how one execution context becomes another.
//!
//! # What a port must provide
//! A port is a directory with two files, `mod.rs` and `preempt.rs`, and a line here. Each has these
//! names; their contracts are on the items of `x86_64/`:
//!
//! | name | what it is |
//! |---|---|
//! | `init`, `switch`, `call_on`, `prepare`, `entry_stub` | suspends one context and resumes another, with its thread pointer; calls a function on another stack; the first frame of a stack |
//! | `LAYOUT`, `SUSPENDED_BYTES` | where `switch` saves the registers |
//! | `reset_float_control` | the floating-point control of a new thread |
//! | `thread_pointer`, `set_thread_pointer` | the register that selects the thread-local storage |
//! | `set_m`, `inherited_m`, `current_m`, `M_ALIGN` | the M of the running thread, readable without thread-locals that a compiler may cache |
//! | `is_in_runtime`, `set_in_runtime` | the byte "in the runtime": right at every instruction at which the goroutine may be preempted. Storing 0 to M's byte ([`M_IN_RUNTIME`]) is a release |
//! | `Registers` | what an unwinder starts from: here, in a signal handler, in `switch` |
//! | `prefetch`, `syscall` | a hint; a raw system call |
//! | `jump_before_start!`, `jump_by_number!`, `jump_instruction!` | bodies of interposed functions that must keep the caller's registers and return address |
//! | `ELF_MACHINE`, `ELF_TLS_OFFSET` | for the image that takes glibc's surplus of static TLS (`mem/tls/surplus.rs`) |
//! | `preempt::{init_preemption, divert, DIVERT_BYTES}` | makes an interrupted goroutine continue in the trampoline |
//! | `preempt::{trampoline, trefoil_trampoline_end, in_trampoline, trampoline_caller}` | calls the scheduler; when the goroutine is resumed, every register is as it was |
//! | `test_support` | the floating-point control, for the tests of this file |
//!
//! The layout of thread-local storage is in `mem/tls`: variant I or II, chosen by the CPU. System
//! calls that newer CPUs do not have (`poll`, `epoll_wait`) are not used anywhere.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

/// Offset in M of its byte "in the runtime": right after M's own address (`sched::m::M`).
pub const M_IN_RUNTIME: usize = 8;

#[cfg(test)]
mod tests {
    use super::test_support::{ROUND_UP, float_control, set_float_control, with_each_way};
    use super::*;
    use std::cell::Cell;

    struct Pair {
        here: Cell<*mut u8>,
        there: Cell<*mut u8>,
        tp: *mut u8,
        count: Cell<u32>,
    }
    thread_local!(static PAIR: Cell<*const Pair> = const { Cell::new(std::ptr::null()) });

    impl Pair {
        /// Prepares `main` on `stack`.
        fn new(stack: &mut [u128], main: unsafe extern "C" fn() -> !) -> Pair {
            let top = stack.as_mut_ptr_range().end.cast::<u8>();
            Pair {
                here: Cell::new(std::ptr::null_mut()),
                // SAFETY: the test's own memory, larger than a frame.
                there: Cell::new(unsafe { prepare(top, main) }),
                tp: thread_pointer(),
                count: Cell::new(0),
            }
        }

        /// Switches to the partner, until it switches back.
        fn go(&self) {
            // SAFETY: the partner is suspended, on its own stack, with our TLS.
            unsafe { switch(self.here.as_ptr(), self.there.get(), self.tp) };
        }
    }

    unsafe extern "C" fn partner() -> ! {
        let pair = PAIR.get();
        loop {
            // SAFETY: the test keeps the pair alive, and it alone resumes this context.
            unsafe {
                (*pair).count.set((*pair).count.get() + 1);
                switch((*pair).there.as_ptr(), (*pair).here.get(), (*pair).tp);
            }
        }
    }

    #[test]
    fn switches_there_and_back_with_each_way_of_setting_the_thread_pointer() {
        with_each_way(|| {
            let mut stack = vec![0u128; 4096];
            let pair = Pair::new(&mut stack, partner);
            PAIR.set(&pair);
            for i in 1..=100_000 {
                pair.go();
                assert_eq!(pair.count.get(), i);
            }
        });
    }

    #[test]
    fn each_context_keeps_its_rounding_mode() {
        init();
        let before = float_control();
        let mut stack = vec![0u128; 4096];
        let pair = Pair::new(&mut stack, partner);
        PAIR.set(&pair);
        set_float_control(ROUND_UP);
        pair.go();
        let after = float_control();
        set_float_control(before);
        assert_eq!(after, ROUND_UP);
        assert_ne!(before, after);
    }

    /// Changes as many floating-point and integer registers as the compiler has, and switches back.
    unsafe extern "C" fn clobber() -> ! {
        let pair = PAIR.get();
        loop {
            let mut floats = [0.0f64; 24];
            let mut words = [0u64; 24];
            for i in 0..24 {
                floats[i] = std::hint::black_box(i as f64 * 1.5);
                words[i] = std::hint::black_box(i as u64 * 7);
            }
            let sum: f64 = floats.iter().sum::<f64>() + words.iter().sum::<u64>() as f64;
            std::hint::black_box(sum);
            // SAFETY: as in `partner`.
            unsafe { switch((*pair).there.as_ptr(), (*pair).here.get(), (*pair).tp) };
        }
    }

    #[test]
    fn registers_survive_a_switch() {
        init();
        let mut stack = vec![0u128; 4096];
        let pair = Pair::new(&mut stack, clobber);
        PAIR.set(&pair);
        for i in 0..1000u64 {
            let value = |n: u64| std::hint::black_box(i * 31 + n);
            let (words, floats): ([u64; 12], [f64; 12]) = (
                std::array::from_fn(|n| value(n as u64)),
                std::array::from_fn(|n| value(n as u64) as f64),
            );
            let [a, b, c, d, e, f, g, h, j, k, l, m] = words;
            let [fa, fb, fc, fd, fe, ff, fg, fh, fj, fk, fl, fm] = floats;
            pair.go();
            assert_eq!(
                [a, b, c, d, e, f, g, h, j, k, l, m],
                std::array::from_fn(|n| i * 31 + n as u64)
            );
            let want: [f64; 12] = std::array::from_fn(|n| (i * 31 + n as u64) as f64);
            assert_eq!([fa, fb, fc, fd, fe, ff, fg, fh, fj, fk, fl, fm], want);
        }
    }

    #[test]
    fn call_on_runs_on_the_other_stack_and_returns() {
        extern "C" fn note(at: *mut ()) {
            let here = 0u8;
            // SAFETY: the word that the test passes.
            unsafe { *at.cast::<usize>() = &raw const here as usize };
        }
        init();
        let mut stack = vec![0u128; 4096];
        let range = stack.as_mut_ptr_range();
        let mut at = 0usize;
        // SAFETY: the test's own memory and thread pointer.
        unsafe { call_on(note, (&raw mut at).cast(), range.end.cast(), thread_pointer()) };
        assert!((range.start as usize..range.end as usize).contains(&at));
        // SAFETY: on the present stack.
        unsafe { call_on(note, (&raw mut at).cast(), std::ptr::null_mut(), thread_pointer()) };
        assert!(!(range.start as usize..range.end as usize).contains(&at));
    }
}
