//! x86_64: stopping a goroutine between any two instructions.
//!
//! A signal handler cannot switch stacks itself: its frame would stay on the thread. So it edits
//! the interrupted context ([`divert`]) and returns. The goroutine continues in [`trampoline`], as
//! if it had called it at that place:
//!
//! ```text
//!   rsp as interrupted ─┬───────────────────┐
//!                       │ red zone, 128 B   │  the ABI lets leaf functions write here
//!                       ├───────────────────┤
//!                       │ interrupted pc    │
//!                       │ interrupted flags │
//!                       │ 15 registers      │
//!                 rbp → ├───────────────────┤
//!                       │ extended state    │  x87, SSE, AVX, AVX-512, AMX: what is in use
//!                       └───────────────────┘
//! ```
//!
//! The trampoline saves everything and calls the scheduler like any function. When the goroutine is
//! resumed, maybe on another thread, it restores everything and returns with `ret 128`, over the
//! red zone.
//!
//! Invariants:
//! 1. The handler sets M's byte "in the runtime". The trampoline's last store clears it, through
//!    GS: in the M of the thread that it ends on. A pc in the trampoline is not diverted again
//!    ([`in_trampoline`]).
//! 2. The extended state is saved with XINUSE as the mask and restored with all of XCR0: a
//!    component that was not in use is in its initial state afterwards. Protection keys (PKRU)
//!    belong to the thread.
//! 3. The successor finds the floating-point unit as a function call leaves it: initialised.
//! 4. DF, AC and TF are cleared before Rust code runs: compiled code relies on the first, and the
//!    kernel's return from the handler would restore them. They come back with the saved flags.
//!
//! Rejected: switching inside the handler (the thread keeps a signal frame of 3.5 to 11.6 KiB, and
//! its mask, until the goroutine is resumed *there*); saving only the fxsave part (malloc and
//! memcpy use wide registers; memory is corrupt within seconds).

use super::Registers;
use std::arch::naked_asm;
use std::arch::x86_64::{__cpuid_count, _xgetbv, CpuidResult};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// Bytes below the stack pointer that belong to the interrupted function.
const RED_ZONE_BYTES: usize = 128;
/// Bytes that a diversion needs below the interrupted stack pointer: the largest state is 11 KiB
/// (AMX), and the scheduler's frames are small.
pub const DIVERT_BYTES: usize = 16 << 10;
/// The flags trap, direction and alignment check.
const TRAP_DIRECTION_ALIGNMENT: i64 = (1 << 8) | (1 << 10) | (1 << 18);
/// XCR0 bits: protection keys; AMX tile configuration and data.
const PKRU: u64 = 1 << 9;
const AMX: u64 = (1 << 17) | (1 << 18);

/// The components to save and restore: XCR0 without [`PKRU`], in halves.
static MASK_LOW: AtomicU32 = AtomicU32::new(0);
static MASK_HIGH: AtomicU32 = AtomicU32::new(0);
/// Bytes of the state, with and without AMX.
static SIZE: AtomicUsize = AtomicUsize::new(0);
static SIZE_SMALL: AtomicUsize = AtomicUsize::new(0);
/// 1 if the CPU can save only what is in use, compactly.
static COMPACT: AtomicU8 = AtomicU8::new(0);
/// The function of the scheduler that the trampoline calls.
static PREEMPTED: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());
/// Set when the statics above are stored and preemption by a signal is possible.
static USABLE: AtomicBool = AtomicBool::new(false);

/// The initial state for `xrstor`: control words, and a header without components.
#[repr(C, align(64))]
struct Image([u8; 576]);
static INITIAL: Image = {
    let mut image = [0; 576];
    image[0] = 0x7f; // x87 control word 0x037f
    image[1] = 0x03;
    image[24] = 0x80; // MXCSR 0x1f80
    image[25] = 0x1f;
    Image(image)
};

/// Asks the CPU, once, how to save its state, and stores the function that a stopped goroutine
/// calls. Returns false if there is no `xsave`, or the state is too large for [`DIVERT_BYTES`]:
/// then goroutines cannot be preempted by a signal.
pub fn init_preemption(preempted: unsafe extern "C" fn()) -> bool {
    PREEMPTED.store(preempted as *mut (), Ordering::Relaxed);
    // Acquire pairs with the Release below: the size and the masks are stored.
    if USABLE.load(Ordering::Acquire) {
        return true;
    }
    let features = cpuid(1, 0);
    const OSXSAVE: u32 = 1 << 27;
    if features.ecx & OSXSAVE == 0 {
        return false;
    }
    // SAFETY: the system uses xsave, so xgetbv(0) is allowed.
    let xcr0 = unsafe { xcr0() };
    let (whole, details) = (cpuid(0xd, 0), cpuid(0xd, 1));
    const XSAVEC: u32 = 1 << 1;
    const XGETBV1: u32 = 1 << 2;
    let compact = details.eax & (XSAVEC | XGETBV1) == XSAVEC | XGETBV1;
    // Without XINUSE, AMX would cost 8 KiB each time; such CPUs do not have AMX.
    let mask = xcr0 & !PKRU & if compact { !0 } else { !AMX };
    let tiles = if xcr0 & AMX != 0 { cpuid(0xd, 18).eax as usize + 64 } else { 0 };
    let size = whole.ecx.max(whole.ebx).max(if compact { details.ebx } else { 0 }) as usize;
    SIZE.store(size, Ordering::Relaxed);
    SIZE_SMALL.store(size - tiles.min(size), Ordering::Relaxed);
    MASK_LOW.store(mask as u32, Ordering::Relaxed);
    MASK_HIGH.store((mask >> 32) as u32, Ordering::Relaxed);
    COMPACT.store(compact.into(), Ordering::Relaxed);
    let usable = size > 0 && size + 2048 < DIVERT_BYTES;
    USABLE.store(usable, Ordering::Release);
    usable
}

/// Returns what the CPU says about itself.
#[allow(unused_unsafe)] // The oldest Rust needs `unsafe`; the newest does not.
fn cpuid(leaf: u32, subleaf: u32) -> CpuidResult {
    // SAFETY: every x86_64 CPU has the instruction.
    unsafe { __cpuid_count(leaf, subleaf) }
}

#[target_feature(enable = "xsave")]
fn xcr0() -> u64 {
    // SAFETY: register 0 always exists where xgetbv does.
    unsafe { _xgetbv(0) }
}

/// Returns whether `pc` lies in the trampoline.
#[inline]
pub fn in_trampoline(pc: usize) -> bool {
    (trampoline as *const () as usize..&raw const trefoil_trampoline_end as usize).contains(&pc)
}

/// Returns None: the unwind tables describe the trampoline completely.
pub fn trampoline_caller(_: u64, _: impl FnMut(u64) -> Option<u64>) -> Option<Registers> {
    None
}

/// Makes the interrupted goroutine continue in the trampoline.
///
/// # Safety
/// Called in a signal handler that is not on the goroutine's stack, which has [`DIVERT_BYTES`]
/// below the interrupted stack pointer; M's byte is set (invariant 1); [`init_preemption`] returned
/// true.
pub unsafe fn divert(context: &mut libc::ucontext_t) {
    let regs = &mut context.uc_mcontext.gregs;
    let frame = (regs[libc::REG_RSP as usize] as usize - RED_ZONE_BYTES) as *mut i64;
    // SAFETY: below the red zone, inside the goroutine's stack.
    unsafe {
        frame.sub(1).write(regs[libc::REG_RIP as usize]);
        frame.sub(2).write(regs[libc::REG_EFL as usize]);
        regs[libc::REG_RSP as usize] = frame.sub(2) as i64;
    }
    regs[libc::REG_RIP as usize] = trampoline as *const () as i64;
    regs[libc::REG_EFL as usize] &= !TRAP_DIRECTION_ALIGNMENT;
}

/// See the head of the file.
///
/// # Safety
/// Only a context that [`divert`] has changed continues here.
#[unsafe(naked)]
#[allow(named_asm_labels)] // A naked function is emitted once.
pub unsafe extern "C" fn trampoline() {
    naked_asm!(
        ".cfi_startproc",
        // Unwinders must not take the pc for a return address: it may be the first instruction of a
        // function.
        ".cfi_signal_frame",
        ".cfi_def_cfa rsp, 144",
        ".cfi_offset rip, -136",
        "push rax",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset rax, 0",
        "push rcx",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset rcx, 0",
        "push rdx",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset rdx, 0",
        "push rbx",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset rbx, 0",
        "push rsi",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset rsi, 0",
        "push rdi",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset rdi, 0",
        "push r8",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset r8, 0",
        "push r9",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset r9, 0",
        "push r10",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset r10, 0",
        "push r11",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset r11, 0",
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
        "push rbp",
        ".cfi_adjust_cfa_offset 8",
        ".cfi_rel_offset rbp, 0",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        // Which components to save, and their size.
        "mov rbx, [rip + {size_small}]",
        "cmp byte ptr [rip + {compact}], 0",
        "je 30f",
        "mov ecx, 1",
        "xgetbv", // XINUSE
        "and eax, [rip + {mask_low}]",
        "and edx, [rip + {mask_high}]",
        "or eax, 3", // always x87 and SSE
        "test eax, {amx}",
        "jz 31f",
        "mov rbx, [rip + {size}]",
        "jmp 31f",
        "30:",
        "mov eax, [rip + {mask_low}]",
        "mov edx, [rip + {mask_high}]",
        "31:",
        // The interrupted stack pointer may have any alignment.
        "sub rsp, rbx",
        "and rsp, -64",
        // The header must be zero: xsave writes only a part of it, and xrstor checks the rest.
        "xor ecx, ecx",
        "mov [rsp + 512], rcx",
        "mov [rsp + 520], rcx",
        "mov [rsp + 528], rcx",
        "mov [rsp + 536], rcx",
        "mov [rsp + 544], rcx",
        "mov [rsp + 552], rcx",
        "mov [rsp + 560], rcx",
        "mov [rsp + 568], rcx",
        "cmp byte ptr [rip + {compact}], 0",
        "je 32f",
        "xsavec64 [rsp]",
        "jmp 33f",
        "32:",
        "xsave64 [rsp]",
        "33:",
        // Invariant 3.
        "mov eax, [rip + {mask_low}]",
        "mov edx, [rip + {mask_high}]",
        "xrstor64 [rip + {initial}]",
        "call [rip + {preempted}]",
        // Resumed, maybe on another thread (invariant 2).
        "mov eax, [rip + {mask_low}]",
        "mov edx, [rip + {mask_high}]",
        "xrstor64 [rsp]",
        "mov rsp, rbp",
        ".cfi_def_cfa_register rsp",
        "pop rbp",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore rbp",
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
        "pop r11",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore r11",
        "pop r10",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore r10",
        "pop r9",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore r9",
        "pop r8",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore r8",
        "pop rdi",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore rdi",
        "pop rsi",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore rsi",
        "pop rbx",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore rbx",
        "pop rdx",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore rdx",
        "pop rcx",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore rcx",
        "pop rax",
        ".cfi_adjust_cfa_offset -8",
        ".cfi_restore rax",
        "mov byte ptr gs:[{in_runtime}], 0", // changes no flags
        "popfq",
        ".cfi_adjust_cfa_offset -8",
        "ret 128",
        ".globl trefoil_trampoline_end",
        ".hidden trefoil_trampoline_end",
        "trefoil_trampoline_end:",
        ".cfi_endproc",
        size = sym SIZE,
        size_small = sym SIZE_SMALL,
        mask_low = sym MASK_LOW,
        mask_high = sym MASK_HIGH,
        compact = sym COMPACT,
        initial = sym INITIAL,
        amx = const AMX,
        preempted = sym PREEMPTED,
        in_runtime = const super::super::M_IN_RUNTIME,
    )
}

unsafe extern "C" {
    /// The first byte after the trampoline.
    pub static trefoil_trampoline_end: u8;
}
