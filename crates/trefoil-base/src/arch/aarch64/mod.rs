//! aarch64: the switch between goroutines, the thread pointer, the M word, and system calls.
//!
//! # What a switch does
//! A goroutine is suspended inside [`switch`], called like any function, so only the callee-saved
//! state of the procedure call standard needs saving: x19 to x30, the low halves of v8 to v15, and
//! FPCR. (Of the SVE registers a normal call preserves no more than that.) The thread pointer
//! TPIDR_EL0 moves with the stack: user code may write it on every aarch64 CPU.
//!
//! ```text
//!   fresh                        suspended                    running
//!   top ─┬───────────────┐       ┌───────────────┐            ┌───────────────┐
//!        │ fpcr, 0       │       │ caller frames │            │ caller frames │
//!        │ d8 … d15      │       │ fpcr, 0       │            │      ...      │ ← sp
//!        │ x19 = main    │       │ d8 … d15      │            └───────────────┘
//!        │ x20 … x28     │       │ x19 … x28     │
//!        │ x30 → stub    │       │ x30 (return)  │
//!    sp →│ x29 = 0       │   sp →│ x29           │
//!        └───────────────┘       └───────────────┘
//! ```
//!
//! FPCR is compared and written only if it differs: the write waits for the floating-point unit.
//!
//! # The M word
//! aarch64 has no second base register that user code can write. So the current M is in the TLS
//! block, in the word at tp + 8 (`tcbhead_t::private`, which no glibc uses; `mem/tls/variant_i.rs`
//! checks that it is zero in a new thread):
//!
//! ```text
//!   bits 63 … 8                         bits 7 … 0
//!   address of the M, 256-aligned       1 if the context is inside the runtime
//! ```
//! To enter the runtime, a goroutine sets the low byte by one `strb` relative to TPIDR_EL0
//! ([`set_in_runtime`]). It may be preempted between reading TPIDR_EL0 and the store, and continue
//! on another thread: TPIDR_EL0 is the same there, because it belongs to the goroutine. From the
//! store on the signal handler refuses, so the M in the word stays right. M's own byte, which
//! sysmon reads, is set next and cleared first.
//!
//! | context | its word |
//! |---|---|
//! | a goroutine that runs | its M; [`switch`] copies the word of the context that it leaves, whose byte is 1 |
//! | a goroutine that is suspended, a pooled block | out of date; no code runs there |
//! | an M's own context | its M, for ever; the byte is 0 only while the program's allocator runs |
//! | a plain thread | zero: a new thread does not inherit it, unlike the GS base of x86_64 |
//! | a signal handler | that of the interrupted context, whose TLS it runs on |
//! | a child of `vfork` | that of its parent, whose TLS it runs on; another thread id |
//!
//! Invariants:
//! 1. The M may be read from the word only inside the runtime, or on the M's own context, or in a
//!    signal handler. Everywhere else the goroutine may move between the load and its use.
//! 2. `recycle` (`mem/tls`) does not write the word: a goroutine that inherits the stack of
//!    another one on the spot begins inside the runtime, on the same M.
//! 3. The store that clears M's byte is a release: sysmon, which reads 0 with Acquire, sees what
//!    the M wrote to its P. On x86_64 every store is one.
//!
//! # Rejected
//! - A Rust `thread_local!` for the word: `recycle` would clear it, and in a library it has no
//!   constant offset.
//! - A reserved register (Go's R28): rustc and C compilers give no such promise for code that is
//!   compiled elsewhere.
//! - TPIDRRO_EL0 and TPIDR2_EL0: the first cannot be written by user code, the second exists only
//!   with SME and belongs to its ABI.
//! - One byte for both readers, in the TLS block: sysmon would have to find the block of a
//!   goroutine that is switching.
//!
//! Tested in qemu, not on silicon: no cost is measured here.

pub mod preempt;

use std::arch::{asm, naked_asm};

/// Offset of the M word from the thread pointer.
pub const M_WORD: usize = 8;
/// M's alignment: the low byte of the M word is the byte "in the runtime".
pub const M_ALIGN: usize = 256;

/// `e_machine` of ELF files for this CPU.
pub const ELF_MACHINE: u16 = libc::EM_AARCH64;
/// The relocation that asks for a place in static TLS (`R_AARCH64_TLS_TPREL64`).
pub const ELF_TLS_OFFSET: u64 = 1030;

/// Bytes that [`switch`] saves on a suspended stack.
const FRAME_BYTES: usize = 176;
/// Where [`switch`] saves the registers, in bytes from the saved stack pointer, for debuggers
/// (`observe/layout.rs`). The stack pointer of the suspended code is above them.
pub const LAYOUT: &[(&str, usize)] = &[
    ("saved.x29", 0),
    ("saved.x30", 8),
    ("saved.x19", 16),
    ("saved.x20", 24),
    ("saved.x21", 32),
    ("saved.x22", 40),
    ("saved.x23", 48),
    ("saved.x24", 56),
    ("saved.x25", 64),
    ("saved.x26", 72),
    ("saved.x27", 80),
    ("saved.x28", 88),
    ("saved.bytes", FRAME_BYTES),
    ("trampoline.registers", preempt::FRAME_REGISTERS),
];

/// FPCR of a new thread: round to nearest, no traps.
const FPCR_INIT: u64 = 0;

/// Prepares the switch. TPIDR_EL0 can be written everywhere.
pub fn init() {}

/// Suspends the running context into `*save` and resumes the context that was suspended at `sp`,
/// with thread pointer `tp`. Returns when the context in `*save` is resumed, maybe on another
/// thread.
///
/// # Safety
/// `sp` came from [`prepare`] or from an earlier switch and is resumed only once; `tp` is its TLS
/// block; no other thread resumes either context meanwhile; `save` stays valid until then.
#[unsafe(naked)]
pub unsafe extern "C" fn switch(save: *mut *mut u8, sp: *mut u8, tp: *mut u8) {
    naked_asm!(
        ".cfi_startproc",
        "hint #34", // bti c
        "sub sp, sp, {frame}",
        ".cfi_def_cfa_offset {frame}",
        "stp x29, x30, [sp]",
        ".cfi_rel_offset x29, 0",
        ".cfi_rel_offset x30, 8",
        "stp x19, x20, [sp, #16]",
        ".cfi_rel_offset x19, 16",
        ".cfi_rel_offset x20, 24",
        "stp x21, x22, [sp, #32]",
        ".cfi_rel_offset x21, 32",
        ".cfi_rel_offset x22, 40",
        "stp x23, x24, [sp, #48]",
        ".cfi_rel_offset x23, 48",
        ".cfi_rel_offset x24, 56",
        "stp x25, x26, [sp, #64]",
        ".cfi_rel_offset x25, 64",
        ".cfi_rel_offset x26, 72",
        "stp x27, x28, [sp, #80]",
        ".cfi_rel_offset x27, 80",
        ".cfi_rel_offset x28, 88",
        "stp d8, d9, [sp, #96]",
        "stp d10, d11, [sp, #112]",
        "stp d12, d13, [sp, #128]",
        "stp d14, d15, [sp, #144]",
        "mrs x9, fpcr",
        "str x9, [sp, #160]",
        "mov x10, sp",
        "str x10, [x0]",
        // The successor gets the M of this thread, and begins inside the runtime.
        "mrs x11, tpidr_el0",
        "ldr x12, [x11, {m_word}]",
        "str x12, [x2, {m_word}]",
        // From here on the other stack. Its frame has the same layout, so the CFI stays true.
        "mov sp, x1",
        "msr tpidr_el0, x2",
        "ldr x10, [sp, #160]",
        "cmp x9, x10",
        "b.eq 21f",
        "msr fpcr, x10",
        "21:",
        "ldp d8, d9, [sp, #96]",
        "ldp d10, d11, [sp, #112]",
        "ldp d12, d13, [sp, #128]",
        "ldp d14, d15, [sp, #144]",
        "ldp x19, x20, [sp, #16]",
        "ldp x21, x22, [sp, #32]",
        "ldp x23, x24, [sp, #48]",
        "ldp x25, x26, [sp, #64]",
        "ldp x27, x28, [sp, #80]",
        "ldp x29, x30, [sp]",
        "add sp, sp, {frame}",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        ".cfi_restore x19",
        ".cfi_restore x20",
        ".cfi_restore x21",
        ".cfi_restore x22",
        ".cfi_restore x23",
        ".cfi_restore x24",
        ".cfi_restore x25",
        ".cfi_restore x26",
        ".cfi_restore x27",
        ".cfi_restore x28",
        // Not `br`: with branch target identification the place after a call is no target of one.
        "ret",
        ".cfi_endproc",
        frame = const FRAME_BYTES,
        m_word = const M_WORD,
    )
}

/// Calls `f(arg)` on the stack that ends at `sp` (null: on the caller's) with the thread pointer
/// `tp`, then returns with the caller's stack and thread pointer. The compiler cannot see into the
/// call, so it caches no address of a thread-local across it.
///
/// # Safety
/// `sp` is null, or ends writable memory that is large enough for `f` and that no other code uses;
/// `tp` is a complete TLS block that no other code runs on; `f` does not unwind; the caller is not
/// moved to another thread before `tp` is loaded.
#[unsafe(naked)]
pub unsafe extern "C" fn call_on(
    f: extern "C" fn(*mut ()),
    arg: *mut (),
    sp: *mut u8,
    tp: *mut u8,
) {
    naked_asm!(
        ".cfi_startproc",
        "hint #34", // bti c
        "stp x29, x30, [sp, #-32]!",
        ".cfi_def_cfa_offset 32",
        ".cfi_offset x29, -32",
        ".cfi_offset x30, -24",
        "mov x29, sp",
        // From here on the frame is found through x29, whichever stack sp is on: unwinders walk
        // from the called function into the caller's stack.
        ".cfi_def_cfa x29, 32",
        "str x19, [sp, #16]",
        ".cfi_offset x19, -16",
        "mrs x19, tpidr_el0",
        "mov x9, x0",
        "mov x0, x1",
        "and x2, x2, #-16",
        "cbz x2, 22f",
        "mov sp, x2",
        "22:",
        "msr tpidr_el0, x3",
        "blr x9",
        "msr tpidr_el0, x19",
        "mov sp, x29",
        "ldr x19, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        ".cfi_def_cfa sp, 0",
        ".cfi_restore x19",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "ret",
        ".cfi_endproc",
    )
}

/// Writes a fresh frame below `top`, so that the first switch to the returned `sp` calls `main` on
/// that stack. `main` never returns.
///
/// # Safety
/// `top` is 16-aligned and at least 256 writable bytes lie below it.
pub unsafe fn prepare(top: *mut u8, main: unsafe extern "C" fn() -> !) -> *mut u8 {
    // SAFETY: inside the caller's 256 bytes.
    unsafe {
        let sp = top.sub(FRAME_BYTES);
        let words = sp.cast::<u64>();
        words.write_bytes(0, FRAME_BYTES / 8);
        words.add(1).write(entry_stub as *const () as usize as u64); // x30
        words.add(2).write(main as usize as u64); // x19, see entry_stub
        words.add(20).write(FPCR_INIT);
        sp
    }
}

/// The bottom frame of every goroutine. Unwinders stop here: its return address is undefined.
///
/// # Safety
/// Only a context of [`prepare`] begins here.
#[unsafe(naked)]
pub unsafe extern "C" fn entry_stub() -> ! {
    naked_asm!(
        ".cfi_startproc",
        ".cfi_undefined x30",
        "mov x29, xzr",
        "mov x30, xzr",
        "blr x19",
        "brk #1",
        ".cfi_endproc",
    )
}

/// Resets the floating-point control word to that of a fresh goroutine, if it differs.
#[inline]
pub fn reset_float_control() {
    let fpcr: u64;
    // SAFETY: reads the control register.
    unsafe { asm!("mrs {}, fpcr", out(reg) fpcr, options(nomem, nostack, preserves_flags)) };
    if fpcr != FPCR_INIT {
        // SAFETY: the state that every thread starts with.
        unsafe {
            asm!("msr fpcr, {}", in(reg) FPCR_INIT, options(nomem, nostack, preserves_flags));
        }
    }
}

/// Returns the thread pointer. One instruction.
#[inline(always)]
pub fn thread_pointer() -> *mut u8 {
    let tp: *mut u8;
    // SAFETY: reads a register. Not `pure`: `call_on` may lie between two calls.
    unsafe { asm!("mrs {}, tpidr_el0", out(reg) tp, options(nostack, preserves_flags, readonly)) }
    tp
}

/// Sets the thread pointer.
///
/// # Safety
/// `tp` is a complete TLS block, and the code that follows may run on it.
#[inline]
pub unsafe fn set_thread_pointer(tp: *mut u8) {
    // SAFETY: the caller's contract. No `nomem`: thread-locals change.
    unsafe { asm!("msr tpidr_el0, {}", in(reg) tp, options(nostack, preserves_flags)) };
}

/// Makes `m` this thread's M. The thread is inside the runtime from now on.
///
/// # Safety
/// `m` is [`M_ALIGN`]-aligned and never freed; this is the thread's own context.
pub unsafe fn set_m<M>(m: *const M) {
    // SAFETY: the M word of the running block (the head).
    unsafe { thread_pointer().add(M_WORD).cast::<usize>().write_volatile(m.addr() | 1) };
}

/// Returns the M of the running context: null on a plain thread. For code that does not know on
/// which thread it runs: a signal handler. In a child of `vfork` it is the parent's M.
pub fn inherited_m<M>() -> *const M {
    // SAFETY: reads the M word, which every block has.
    unsafe { current_m() }
}

/// Returns the M of the running thread.
///
/// # Safety
/// Invariant 1 of the head; and the caller cannot be preempted while it uses the result.
#[inline(always)]
pub unsafe fn current_m<M>() -> *const M {
    let m: *const M;
    // SAFETY: reads the M word. Not `pure`: a later call may run on another thread.
    unsafe {
        asm!("mrs {m}, tpidr_el0", "ldr {m}, [{m}, {word}]", "and {m}, {m}, #-{align}",
            m = out(reg) m, word = const M_WORD, align = const M_ALIGN,
            options(nostack, preserves_flags, readonly))
    }
    m
}

/// Returns whether the running context is inside the runtime: the byte of its M word.
///
/// # Safety
/// The caller runs on a goroutine, or in a signal handler. It may be preempted: wherever user code
/// runs, the byte is 0.
#[inline(always)]
pub unsafe fn is_in_runtime() -> bool {
    let value: u32;
    // SAFETY: reads the M word.
    unsafe {
        asm!("mrs {x}, tpidr_el0", "ldrb {v:w}, [{x}, {word}]",
            x = out(reg) _, v = out(reg) value, word = const M_WORD,
            options(nostack, preserves_flags, readonly))
    }
    value != 0
}

/// Enters (1) or leaves (0) the runtime: writes the byte of the M word, and M's own, in the order
/// of the head.
///
/// # Safety
/// The caller runs on a goroutine or on an M's own context.
#[inline(always)]
pub unsafe fn set_in_runtime<const VALUE: u8>() {
    // SAFETY: the caller's contract. No `nomem`: it orders the compiler's accesses around it.
    unsafe {
        if VALUE == 0 {
            asm!(
                "mrs {x}, tpidr_el0",
                "ldr {m}, [{x}, {word}]",
                "and {m}, {m}, #-{align}",
                "add {m}, {m}, {byte}",
                "stlrb wzr, [{m}]", // invariant 3
                "strb wzr, [{x}, {word}]",
                x = out(reg) _, m = out(reg) _,
                word = const M_WORD, align = const M_ALIGN, byte = const super::M_IN_RUNTIME,
                options(nostack, preserves_flags))
        } else {
            asm!(
                "mrs {x}, tpidr_el0",
                "strb {one:w}, [{x}, {word}]",
                "ldr {m}, [{x}, {word}]",
                "and {m}, {m}, #-{align}",
                "strb {one:w}, [{m}, {byte}]",
                x = out(reg) _, m = out(reg) _, one = in(reg) 1,
                word = const M_WORD, align = const M_ALIGN, byte = const super::M_IN_RUNTIME,
                options(nostack, preserves_flags))
        }
    }
}

/// The registers from which an unwinder starts.
#[derive(Clone, Copy, Default)]
pub struct Registers {
    pub pc: u64,
    pub sp: u64,
    /// The frame pointer, x29.
    pub fp: u64,
    /// The link register, x30.
    pub lr: u64,
    /// aarch64 has no rbx: 0.
    pub rbx: u64,
}

impl Registers {
    /// Returns the registers at one instruction of the caller.
    #[inline(always)]
    pub fn here() -> Registers {
        let (pc, sp, fp, lr): (u64, u64, u64, u64);
        // SAFETY: reads registers.
        unsafe {
            asm!("adr {pc}, .", "mov {sp}, sp", "mov {fp}, x29", "mov {lr}, x30",
                pc = out(reg) pc, sp = out(reg) sp, fp = out(reg) fp, lr = out(reg) lr,
                options(nomem, nostack, preserves_flags))
        }
        Registers { pc, sp, fp, lr, rbx: 0 }
    }

    /// Returns the registers that a signal has interrupted.
    #[inline]
    pub fn interrupted(context: &libc::ucontext_t) -> Registers {
        let m = &context.uc_mcontext;
        Registers { pc: m.pc, sp: m.sp, fp: m.regs[29], lr: m.regs[30], rbx: 0 }
    }

    /// Returns the registers of the code that is suspended in [`switch`] at `sp`.
    #[inline]
    pub fn suspended(sp: u64, mut read: impl FnMut(u64) -> Option<u64>) -> Option<Registers> {
        let (fp, lr) = (read(sp)?, read(sp + 8)?);
        Some(Registers { pc: lr, sp: sp + FRAME_BYTES as u64, fp, lr, rbx: 0 })
    }
}

/// Bytes above a suspended stack pointer that [`Registers::suspended`] reads or skips.
pub const SUSPENDED_BYTES: usize = FRAME_BYTES;

/// Loads the cache line at this address in the background, if it is mapped. It never faults.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: a hint to the CPU.
    unsafe {
        asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
}

/// Makes a system call without libc. Returns the kernel's result: a negative one is minus the error
/// number.
///
/// # Safety
/// That of the system call.
#[inline(always)]
pub unsafe fn syscall<const N: usize>(number: libc::c_long, args: [usize; N]) -> isize {
    const { assert!(N <= 6, "a system call has six arguments at most") };
    let mut all = [0; 6];
    all[..N].copy_from_slice(&args);
    let result: isize;
    // SAFETY: the caller's contract. The kernel changes x0 only. Memory is not declared untouched,
    // so the compiler caches no contents across the call.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") all[0] => result,
            in("x1") all[1], in("x2") all[2], in("x3") all[3], in("x4") all[4], in("x5") all[5],
            options(nostack),
        );
    }
    result
}

/// The body of a function with up to three arguments that jumps to `$real()` while the byte
/// `$ready` is 0, and to `$after` from then on. The arguments and the return address are kept.
#[doc(hidden)]
#[macro_export]
macro_rules! jump_before_start {
    ($ready:ident, $real:ident, $after:ident) => {
        std::arch::naked_asm!(
            "hint #34", // bti c
            "adrp x16, {ready}",
            "ldrb w16, [x16, :lo12:{ready}]",
            "cbz w16, 23f",
            "b {after}",
            "23:",
            "stp x0, x1, [sp, #-32]!",
            "stp x2, x30, [sp, #16]",
            "bl {real}",
            "mov x16, x0",
            "ldp x2, x30, [sp, #16]",
            "ldp x0, x1, [sp], #32",
            "br x16",
            ready = sym $ready,
            after = sym $after,
            real = sym $real,
        )
    };
}
pub use crate::jump_before_start;

/// The body of `syscall`: jumps to the function beside the first argument's value, and otherwise
/// to the address in `$real`. While that is null, `$resolve()` returns it. All arguments are kept.
#[cfg(feature = "std")]
#[doc(hidden)]
#[macro_export]
macro_rules! jump_by_number {
    (
        $n0:expr => $f0:ident, $n1:expr => $f1:ident, $n2:expr => $f2:ident,
        else $real:ident or $resolve:ident
    ) => {
        std::arch::naked_asm!(
            "hint #34", // bti c
            "cmp x0, {n0}",
            "b.ne 24f",
            "b {f0}",
            "24:",
            "cmp x0, {n1}",
            "b.ne 25f",
            "b {f1}",
            "25:",
            "cmp x0, {n2}",
            "b.ne 26f",
            "b {f2}",
            "26:",
            "adrp x16, {real}",
            "ldr x16, [x16, :lo12:{real}]",
            "cbz x16, 27f",
            "br x16",
            "27:",
            "stp x0, x1, [sp, #-64]!",
            "stp x2, x3, [sp, #16]",
            "stp x4, x5, [sp, #32]",
            "stp x6, x30, [sp, #48]",
            "bl {resolve}",
            "mov x16, x0",
            "ldp x6, x30, [sp, #48]",
            "ldp x4, x5, [sp, #32]",
            "ldp x2, x3, [sp, #16]",
            "ldp x0, x1, [sp], #64",
            "br x16",
            n0 = const $n0,
            f0 = sym $f0,
            n1 = const $n1,
            f1 = sym $f1,
            n2 = const $n2,
            f2 = sym $f2,
            real = sym $real,
            resolve = sym $resolve,
        )
    };
}
#[cfg(feature = "std")]
pub use crate::jump_by_number;

/// The instruction that jumps to a function, for `global_asm!`.
#[cfg(feature = "std")]
#[doc(hidden)]
#[macro_export]
macro_rules! jump_instruction {
    () => {
        "b"
    };
}
#[cfg(feature = "std")]
pub use crate::jump_instruction;

#[cfg(test)]
pub(super) mod test_support {
    use super::*;

    /// FPCR with rounding towards plus infinity.
    pub(in super::super) const ROUND_UP: u64 = 1 << 22;

    /// Returns the floating-point control bits.
    pub(in super::super) fn float_control() -> u64 {
        let fpcr: u64;
        // SAFETY: reads the control register.
        unsafe { asm!("mrs {}, fpcr", out(reg) fpcr) };
        fpcr
    }

    /// Sets the floating-point control bits.
    pub(in super::super) fn set_float_control(fpcr: u64) {
        // SAFETY: tests pass valid values, and restore the old one.
        unsafe { asm!("msr fpcr, {}", in(reg) fpcr) };
    }

    /// Calls `f` with each way of setting the thread pointer that this machine has: one.
    pub(in super::super) fn with_each_way(mut f: impl FnMut()) {
        f();
    }
}
