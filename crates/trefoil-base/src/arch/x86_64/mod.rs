//! x86_64: the switch between goroutines, the FS and GS bases, and system calls.
//!
//! # What a switch does
//! A goroutine is suspended inside [`switch`], called like any function, so only the callee-saved
//! state of the System V ABI needs saving: six registers, and the control bits of MXCSR and x87.
//! The thread pointer moves with the stack: after `wrfsbase` every `thread_local!` of the resumed
//! code belongs to the resumed goroutine.
//!
//! ```text
//!   fresh                        suspended                    running
//!   top ─┬───────────────┐       ┌───────────────┐            ┌───────────────┐
//!        │ 0 (alignment) │       │ caller frames │            │ caller frames │
//!        │ → entry stub  │       │ return address│            │      ...      │ ← rsp
//!        │ rbp = 0       │       │ rbp           │            └───────────────┘
//!        │ rbx r12..r15  │       │ rbx r12..r15  │
//!    sp →│ mxcsr, x87 cw │   sp →│ mxcsr, x87 cw │
//!        └───────────────┘       └───────────────┘
//! ```
//!
//! # Choices, measured
//! 1. `pop rcx; jmp rcx` instead of `ret`: the return predictor never saw the matching call, and a
//!    mispredicted `ret` costs 12.6 ns instead of 2.5.
//! 2. MXCSR and the x87 control word are compared and loaded only when control bits differ: a plain
//!    `ldmxcsr` costs 45 ns when the sticky exception flags differ.
//! 3. `wrfsbase` costs 4.4 ns; `arch_prctl`, for CPUs or kernels without FSGSBASE, 139 ns. [`init`]
//!    chooses once.
//!
//! # The M register
//! The GS base of a runtime thread is the address of its M (`sched::m::M`, whose first word is its
//! own address). It is set once per thread and no compiler caches it, so it is right in every
//! context, signal handlers included. It is **inherited by clone**: a plain thread started on a
//! goroutine has its parent's M there. Hence this invariant:
//!
//! 1. GS may be read only by code that knows that it runs on a runtime thread: after
//!    `sched::current_g()` (a thread-local of the goroutine) returned a goroutine, or on the M's
//!    own context.
//!
//! Rejected: the way of `aarch64/mod.rs`, a word of the TLS block. The words of x86_64's
//! `tcbhead_t` that no glibc uses are reserved to GCC (split stacks, transactional memory), each
//! switch would have to write the word, and entering the runtime would take a load more: GS costs
//! nothing.

pub mod preempt;

use std::arch::{asm, naked_asm};
use std::sync::atomic::{AtomicBool, Ordering};

/// M's alignment. Nothing is stored in the low bits of its address.
pub const M_ALIGN: usize = 8;

/// `e_machine` of ELF files for this CPU.
pub const ELF_MACHINE: u16 = libc::EM_X86_64;
/// The relocation that asks for a place in static TLS (`R_X86_64_TPOFF64`).
pub const ELF_TLS_OFFSET: u64 = 18;

/// Bytes that [`switch`] saves on a suspended stack: control words, six registers, return address.
const FRAME_BYTES: usize = 8 * 8;
/// Where [`switch`] saves the registers, in bytes from the saved stack pointer, for debuggers
/// (`observe/layout.rs`). The stack pointer of the suspended code is above them.
pub const LAYOUT: &[(&str, usize)] = &[
    ("saved.r15", 8),
    ("saved.r14", 16),
    ("saved.r13", 24),
    ("saved.r12", 32),
    ("saved.rbx", 40),
    ("saved.rbp", 48),
    ("saved.rip", 56),
    ("saved.bytes", FRAME_BYTES),
];
/// MXCSR after reset: all exceptions masked, round to nearest.
const MXCSR_INIT: u32 = 0x1f80;
/// x87 control word after `fninit`.
const X87_INIT: u16 = 0x037f;
/// HWCAP2 bit 1: user space may use the FSGSBASE instructions.
const HWCAP2_FSGSBASE: u64 = 1 << 1;

const ARCH_SET_GS: usize = 0x1001;
const ARCH_SET_FS: usize = 0x1002;
const ARCH_GET_GS: usize = 0x1004;

/// Set if `wrfsbase` may be used. False until [`init`].
static FSGSBASE: AtomicBool = AtomicBool::new(false);

/// Finds out whether CPU and kernel allow `wrfsbase`. Call it before the first switch.
pub fn init() {
    // SAFETY: getauxval only reads the auxiliary vector.
    let hwcap2 = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    FSGSBASE.store(hwcap2 & HWCAP2_FSGSBASE != 0, Ordering::Relaxed);
}

/// Defines a naked switch; `$setfs` loads the thread pointer from rdx, on the new stack.
/// `$setfs` may use rax, rcx, rdi, rsi, r10, r11.
macro_rules! define_switch {
    ($name:ident, $($setfs:literal),+) => {
        #[unsafe(naked)]
        unsafe extern "C" fn $name(save: *mut *mut u8, sp: *mut u8, tp: *mut u8) {
            naked_asm!(
                ".cfi_startproc",
                "push rbp",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset rbp, 0",
                "push rbx",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset rbx, 0",
                "push r12",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset r12, 0",
                "push r13",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset r13, 0",
                "push r14",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset r14, 0",
                "push r15",
                ".cfi_adjust_cfa_offset 8",
                ".cfi_rel_offset r15, 0",
                "sub rsp, 8",
                ".cfi_adjust_cfa_offset 8",
                "stmxcsr [rsp]",
                "fnstcw [rsp + 4]",
                // The control words go to r8, r9, to be compared with the successor's.
                "mov r8d, [rsp]",
                "movzx r9d, word ptr [rsp + 4]",
                "mov [rdi], rsp",
                // From here on the other stack. Its frame has the same layout, so the CFI stays
                // true.
                "mov rsp, rsi",
                $($setfs,)+
                "xor r8d, [rsp]",
                "test r8d, 0xffc0", // control bits only; the low six are sticky flags
                "jnz 20f",
                "cmp r9w, [rsp + 4]",
                "jne 20f",
                "21:",
                ".cfi_remember_state",
                "add rsp, 8",
                ".cfi_adjust_cfa_offset -8",
                "pop r15",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_restore r15",
                "pop r14",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_restore r14",
                "pop r13",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_restore r13",
                "pop r12",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_restore r12",
                "pop rbx",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_restore rbx",
                "pop rbp",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_restore rbp",
                "pop rcx",
                ".cfi_adjust_cfa_offset -8",
                ".cfi_register rip, rcx",
                "jmp rcx",
                "20:",
                ".cfi_restore_state",
                "ldmxcsr [rsp]",
                "fldcw [rsp + 4]",
                "jmp 21b",
                ".cfi_endproc",
            )
        }
    };
}

define_switch!(switch_wrfsbase, "wrfsbase rdx");
define_switch!(
    switch_prctl,
    "mov edi, 0x1002", // ARCH_SET_FS
    "mov rsi, rdx",
    "mov eax, 158", // arch_prctl; keeps all but rax, rcx, r11
    "syscall"
);

/// Suspends the running context into `*save` and resumes the context that was suspended at `sp`,
/// with thread pointer `tp`. Returns when the context in `*save` is resumed, maybe on another
/// thread.
///
/// # Safety
/// `sp` came from [`prepare`] or from an earlier switch and is resumed only once; `tp` is its TLS
/// block; no other thread resumes either context meanwhile; `save` stays valid until then.
#[inline(always)]
pub unsafe fn switch(save: *mut *mut u8, sp: *mut u8, tp: *mut u8) {
    if FSGSBASE.load(Ordering::Relaxed) {
        // SAFETY: the caller's contract; the CPU has the instruction.
        unsafe { switch_wrfsbase(save, sp, tp) }
    } else {
        // SAFETY: the caller's contract.
        unsafe { switch_prctl(save, sp, tp) }
    }
}

/// Defines a naked call on another stack and thread pointer. `$set_own` loads the thread pointer
/// from rcx, `$set_back` from rbx. Both may use rax, rdi, rsi, rcx, r11; r12 and r13 are taken.
macro_rules! define_call_on {
    ($name:ident, [$($set_own:literal),+], [$($set_back:literal),+]) => {
        #[unsafe(naked)]
        unsafe extern "C" fn $name(
            f: extern "C" fn(*mut ()),
            arg: *mut (),
            sp: *mut u8,
            tp: *mut u8,
        ) {
            naked_asm!(
                ".cfi_startproc",
                "push rbp",
                ".cfi_def_cfa_offset 16",
                ".cfi_offset rbp, -16",
                "mov rbp, rsp",
                // From here on the frame is found through rbp, whichever stack rsp is on: unwinders
                // walk from the called function into the caller's stack.
                ".cfi_def_cfa_register rbp",
                "push rbx",
                ".cfi_offset rbx, -24",
                "push r12",
                ".cfi_offset r12, -32",
                "push r13",
                ".cfi_offset r13, -40",
                "mov rbx, fs:[0]",
                "mov r12, rdi",
                "mov r13, rsi",
                "test rdx, rdx",
                "cmovnz rsp, rdx",
                "and rsp, -16",
                $($set_own,)+
                "mov rdi, r13",
                "call r12",
                $($set_back,)+
                "lea rsp, [rbp - 24]",
                "pop r13",
                "pop r12",
                "pop rbx",
                "pop rbp",
                ".cfi_def_cfa rsp, 8",
                "ret",
                ".cfi_endproc",
            )
        }
    };
}

define_call_on!(call_on_wrfsbase, ["wrfsbase rcx"], ["wrfsbase rbx"]);
define_call_on!(
    call_on_prctl,
    ["mov edi, 0x1002", "mov rsi, rcx", "mov eax, 158", "syscall"],
    ["mov edi, 0x1002", "mov rsi, rbx", "mov eax, 158", "syscall"]
);

/// Calls `f(arg)` on the stack that ends at `sp` (null: on the caller's) with the thread pointer
/// `tp`, then returns with the caller's stack and thread pointer. The compiler cannot see into the
/// call, so it caches no address of a thread-local across it.
///
/// # Safety
/// `sp` is null, or ends writable memory that is large enough for `f` and that no other code uses;
/// `tp` is a complete TLS block that no other code runs on; `f` does not unwind; the caller is not
/// moved to another thread before `tp` is loaded.
#[inline(always)]
pub unsafe fn call_on(f: extern "C" fn(*mut ()), arg: *mut (), sp: *mut u8, tp: *mut u8) {
    if FSGSBASE.load(Ordering::Relaxed) {
        // SAFETY: the caller's contract; the CPU has the instruction.
        unsafe { call_on_wrfsbase(f, arg, sp, tp) }
    } else {
        // SAFETY: the caller's contract.
        unsafe { call_on_prctl(f, arg, sp, tp) }
    }
}

/// Writes a fresh frame below `top`, so that the first switch to the returned `sp` calls `main` on
/// that stack. `main` never returns.
///
/// # Safety
/// `top` is 16-aligned and at least 128 writable bytes lie below it.
pub unsafe fn prepare(top: *mut u8, main: unsafe extern "C" fn() -> !) -> *mut u8 {
    // SAFETY: inside the caller's 128 bytes. One word of padding keeps rsp 16-aligned in the stub.
    unsafe {
        let sp = top.sub(FRAME_BYTES + 16);
        let words = sp.cast::<u64>();
        words.write(u64::from(MXCSR_INIT) | u64::from(X87_INIT) << 32);
        for i in 1..7 {
            words.add(i).write(0);
        }
        words.add(5).write(main as usize as u64); // rbx, see entry_stub
        words.add(7).write(entry_stub as *const () as usize as u64);
        words.add(8).write(0);
        words.add(9).write(0);
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
        ".cfi_undefined rip",
        "xor ebp, ebp",
        "call rbx",
        "ud2",
        ".cfi_endproc",
    )
}

/// Resets the floating-point control words to those of a fresh goroutine, if they differ.
#[inline]
pub fn reset_float_control() {
    let (mut mxcsr, mut x87) = (0u32, 0u16);
    // SAFETY: stores the two control words.
    unsafe {
        asm!("stmxcsr [{}]", "fnstcw [{}]", in(reg) &raw mut mxcsr, in(reg) &raw mut x87,
            options(nostack, preserves_flags));
    }
    if (mxcsr ^ MXCSR_INIT) & 0xffc0 != 0 || x87 != X87_INIT {
        let (mxcsr, x87) = (MXCSR_INIT, X87_INIT);
        // SAFETY: the state that every thread starts with.
        unsafe {
            asm!("ldmxcsr [{}]", "fldcw [{}]", in(reg) &raw const mxcsr, in(reg) &raw const x87,
                options(nostack, preserves_flags));
        }
    }
}

/// Returns the thread pointer (the FS base): the first word of every TLS block is its own address.
#[inline(always)]
pub fn thread_pointer() -> *mut u8 {
    let tp: *mut u8;
    // SAFETY: every glibc thread and every goroutine has its own address at fs:0.
    unsafe { asm!("mov {}, fs:[0]", out(reg) tp, options(nostack, preserves_flags, readonly)) }
    tp
}

/// Sets the thread pointer by a system call: 139 ns, but it works on every machine. For rare paths.
///
/// # Safety
/// `tp` is a complete TLS block, and the code that follows may run on it.
#[inline]
pub unsafe fn set_thread_pointer(tp: *mut u8) {
    // SAFETY: the caller's contract.
    unsafe { syscall(libc::SYS_arch_prctl, [ARCH_SET_FS, tp as usize]) };
}

/// Makes `m` this thread's M.
///
/// # Safety
/// `m` outlives the thread, and its first word is its own address.
pub unsafe fn set_m<M>(m: *const M) {
    // SAFETY: user space does not use GS for anything else.
    unsafe { syscall(libc::SYS_arch_prctl, [ARCH_SET_GS, m as usize]) };
}

/// Returns the GS base: null if this thread never had an M. For code that does not know on which
/// thread it runs; the value may be the M of the parent thread (see the head).
pub fn inherited_m<M>() -> *const M {
    let mut base = 0usize;
    if FSGSBASE.load(Ordering::Relaxed) {
        // SAFETY: the CPU has the instruction.
        unsafe { asm!("rdgsbase {}", out(reg) base, options(nostack, nomem, preserves_flags)) }
        return base as *const M;
    }
    // SAFETY: the kernel writes one word.
    unsafe { syscall(libc::SYS_arch_prctl, [ARCH_GET_GS, &raw mut base as usize]) };
    base as *const M
}

/// Returns the M of the running thread.
///
/// # Safety
/// Invariant 1 of the head: this is a runtime thread, and the caller cannot be preempted while it
/// uses the result.
#[inline(always)]
pub unsafe fn current_m<M>() -> *const M {
    let m: *const M;
    // SAFETY: GS is the M by the contract. Not `pure`: a later call may run on another thread.
    unsafe { asm!("mov {}, gs:[0]", out(reg) m, options(nostack, preserves_flags, readonly)) }
    m
}

/// Returns whether the running thread's byte "in the runtime" is set. One instruction.
///
/// # Safety
/// As [`current_m`], but the caller may be preempted: wherever user code runs, the byte is 0.
#[inline(always)]
pub unsafe fn is_in_runtime() -> bool {
    let value: u8;
    // SAFETY: the caller's contract.
    unsafe {
        asm!("mov {v}, byte ptr gs:[{off}]", off = const super::M_IN_RUNTIME,
            v = out(reg_byte) value, options(nostack, preserves_flags, readonly))
    }
    value != 0
}

/// Sets the running thread's byte "in the runtime" by one instruction: between finding M and
/// writing to it there is no moment at which the goroutine could move to another thread.
///
/// # Safety
/// As [`current_m`].
#[inline(always)]
pub unsafe fn set_in_runtime<const VALUE: u8>() {
    // SAFETY: the caller's contract. No `nomem`: it orders the compiler's accesses around it.
    unsafe {
        asm!("mov byte ptr gs:[{off}], {v}", off = const super::M_IN_RUNTIME, v = const VALUE,
            options(nostack, preserves_flags))
    }
}

/// The registers from which an unwinder starts.
#[derive(Clone, Copy, Default)]
pub struct Registers {
    pub pc: u64,
    pub sp: u64,
    /// The frame pointer, rbp.
    pub fp: u64,
    /// x86_64 has no link register: 0.
    pub lr: u64,
    /// A few functions find their frame by it.
    pub rbx: u64,
}

impl Registers {
    /// Returns the registers at one instruction of the caller.
    #[inline(always)]
    pub fn here() -> Registers {
        let (pc, sp, fp, rbx): (u64, u64, u64, u64);
        // SAFETY: reads registers.
        unsafe {
            asm!("lea {pc}, [rip]", "mov {sp}, rsp", "mov {fp}, rbp", "mov {base}, rbx",
                pc = out(reg) pc, sp = out(reg) sp, fp = out(reg) fp, base = out(reg) rbx,
                options(nomem, nostack, preserves_flags))
        }
        Registers { pc, sp, fp, lr: 0, rbx }
    }

    /// Returns the registers that a signal has interrupted.
    #[inline]
    pub fn interrupted(context: &libc::ucontext_t) -> Registers {
        let register = |which: libc::c_int| context.uc_mcontext.gregs[which as usize] as u64;
        Registers {
            pc: register(libc::REG_RIP),
            sp: register(libc::REG_RSP),
            fp: register(libc::REG_RBP),
            lr: 0,
            rbx: register(libc::REG_RBX),
        }
    }

    /// Returns the registers of the code that is suspended in [`switch`] at `sp`.
    #[inline]
    pub fn suspended(sp: u64, mut read: impl FnMut(u64) -> Option<u64>) -> Option<Registers> {
        let (rbx, fp, pc) = (read(sp + 40)?, read(sp + 48)?, read(sp + 56)?);
        Some(Registers { pc, sp: sp + FRAME_BYTES as u64, fp, lr: 0, rbx })
    }
}

/// Bytes above a suspended stack pointer that [`Registers::suspended`] reads or skips.
pub const SUSPENDED_BYTES: usize = FRAME_BYTES;

/// Loads the cache line at this address in the background, if it is mapped. It never faults.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: a hint to the CPU.
    unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast()) }
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
    // SAFETY: the caller's contract. The kernel changes rcx and r11 only. Memory is not declared
    // untouched, so the compiler caches no contents across the call.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") all[0], in("rsi") all[1], in("rdx") all[2],
            in("r10") all[3], in("r8") all[4], in("r9") all[5],
            lateout("rcx") _, lateout("r11") _,
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
            "cmp byte ptr [rip + {ready}], 0",
            "jne {after}",
            // Three pushes also align the stack for the call.
            "push rdi",
            "push rsi",
            "push rdx",
            "call {real}",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp rax",
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
            "cmp rdi, {n0}",
            "je {f0}",
            "cmp rdi, {n1}",
            "je {f1}",
            "cmp rdi, {n2}",
            "je {f2}",
            "mov rax, [rip + {real}]",
            "test rax, rax",
            "jz 2f",
            "jmp rax",
            "2:",
            "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "sub rsp, 8",
            "call {resolve}",
            "add rsp, 8", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
            "jmp rax",
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
        "jmp"
    };
}
#[cfg(feature = "std")]
pub use crate::jump_instruction;

#[cfg(test)]
pub(super) mod test_support {
    use super::*;

    /// MXCSR with rounding towards plus infinity and all exceptions masked.
    pub(in super::super) const ROUND_UP: u64 = 0x5f80;

    /// Returns the floating-point control bits.
    pub(in super::super) fn float_control() -> u64 {
        let mut mxcsr = 0u32;
        // SAFETY: stores the control word.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr) };
        u64::from(mxcsr & 0xffc0)
    }

    /// Sets the floating-point control bits.
    pub(in super::super) fn set_float_control(mxcsr: u64) {
        let mxcsr = mxcsr as u32;
        // SAFETY: tests pass valid values, and restore the old one.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const mxcsr) };
    }

    /// Calls `f` with each way of setting the thread pointer that this machine has.
    pub(in super::super) fn with_each_way(mut f: impl FnMut()) {
        init();
        if FSGSBASE.load(Ordering::Relaxed) {
            f();
        }
        FSGSBASE.store(false, Ordering::Relaxed);
        f();
        init();
    }
}
