//! aarch64: stopping a goroutine between any two instructions.
//!
//! A signal handler cannot switch stacks itself: its frame would stay on the thread. So it edits
//! the interrupted context ([`divert`]) and returns. The goroutine continues in [`trampoline`], as
//! if it had called it at that place:
//!
//! ```text
//!   sp as interrupted ─┬──────────────────────┐   (the Linux ABI has no red zone)
//!                      │ padding to 16        │
//!                      ├──────────────────────┤
//!                      │ copy of the kernel's │   x0 … x30, sp, pc, NZCV, v0 … v31, FPSR, FPCR;
//!                      │ signal frame         │   SVE and SME state where it is in use
//!                 sp → └──────────────────────┘
//! ```
//!
//! No aarch64 instruction loads the program counter and leaves every register as it was. So the
//! goroutine does not return from the trampoline: it calls `rt_sigreturn` on the copy, and the
//! kernel, which saved the state, restores all of it at once. The trampoline itself saves nothing.
//!
//! Invariants:
//! 1. The handler enters the runtime for the goroutine. The trampoline leaves it, on the M that it
//!    ends on, by the last stores before `rt_sigreturn`. A pc in the trampoline is not diverted
//!    again ([`in_trampoline`]).
//! 2. What belongs to the thread does not come from the copy: the signal mask is read from the
//!    kernel just before the return, and the alternate stack has a mode that the kernel refuses, so
//!    that the thread's stays.
//! 3. The kernel's own frame, by which the handler returns, keeps only the FPSIMD record, with
//!    FPCR 0 (and that of the protection keys). So Rust code in the trampoline finds the
//!    floating-point unit as in a new thread: rounding to nearest, no streaming mode, no ZA.
//! 4. A record of the copy that points into the frame (`extra_context`) points into the copy: the
//!    kernel insists that the records are contiguous.
//! 5. The BTYPE bits are cleared for the trampoline: the interrupted code may have been between an
//!    indirect branch and its target. They come back with the copy.
//!
//! # Rejected
//! - To save the registers here and branch back through x16 or x17: only linker stubs may change
//!   those, and the goroutine may be stopped between two instructions of any function.
//! - Go's way, which branches through R27: Go's compiler leaves that register alone.
//! - To save SVE registers by hand: it needs the vector length, which user code can change.
//! - Switching inside the handler: see `x86_64/preempt.rs`.
//!
//! # Known limits
//! Guarded control stacks (GCS) are not switched. With protection keys (POE) the goroutine takes
//! its thread's rights with it when it is preempted.

use std::arch::naked_asm;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::Registers;

/// Bytes that a diversion needs below the interrupted stack pointer: a frame has 4.6 KiB, 13.5 KiB
/// with the longest SVE vectors; the scheduler's frames are small.
pub const DIVERT_BYTES: usize = 16 << 10;
/// What the scheduler's frames take of [`DIVERT_BYTES`].
const CALL_BYTES: usize = 2 << 10;
/// The auxiliary vector's entry with the size of the largest signal frame of this CPU.
const AT_MINSIGSTKSZ: u64 = 51;

/// The kernel's `struct rt_sigframe`: a `siginfo_t`, then a `struct ucontext`.
const SIGINFO_BYTES: usize = 128;
const FRAME_BYTES: usize = SIGINFO_BYTES + RECORDS + RECORDS_BYTES;
/// Offsets in `struct ucontext`.
const UC_STACK_FLAGS: usize = 24;
const UC_SIGMASK: usize = 40;
const REGISTERS: usize = 184;
const RECORDS: usize = 464;
/// Bytes for records in a frame without an `extra_context`.
const RECORDS_BYTES: usize = 4096;
/// Offsets in the signal frame, for the trampoline.
const FRAME_SIGMASK: usize = SIGINFO_BYTES + UC_SIGMASK;
pub(super) const FRAME_REGISTERS: usize = SIGINFO_BYTES + REGISTERS;

/// Kinds of records.
const FPSIMD_MAGIC: u32 = 0x4650_8001;
const EXTRA_MAGIC: u32 = 0x4558_5401;
const POE_MAGIC: u32 = 0x504f_4530;
/// Offset of FPCR in the FPSIMD record.
const FPSIMD_FPCR: usize = 12;
/// The last record: a head of zeroes, with padding.
const TERMINATOR_BYTES: usize = 16;

/// A mode of an alternate stack that the kernel refuses (invariant 2).
const NO_SUCH_MODE: u32 = 0x4000_0000;
/// PSTATE's BTYPE bits (invariant 5).
const BTYPE: u64 = 0b11 << 10;

/// The function of the scheduler that the trampoline calls.
static PREEMPTED: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// Stores the function that a stopped goroutine calls. Returns false if this CPU's signal frames
/// are too large for [`DIVERT_BYTES`]: then goroutines cannot be preempted by a signal.
pub fn init_preemption(preempted: unsafe extern "C" fn()) -> bool {
    PREEMPTED.store(preempted as *mut (), Ordering::Release);
    // SAFETY: getauxval only reads the auxiliary vector. 0 on CPUs and kernels without SVE.
    let largest = unsafe { libc::getauxval(AT_MINSIGSTKSZ) } as usize;
    largest.max(FRAME_BYTES) + CALL_BYTES < DIVERT_BYTES
}

/// Returns whether `pc` lies in the trampoline.
#[inline]
pub fn in_trampoline(pc: usize) -> bool {
    (trampoline as *const () as usize..&raw const trefoil_trampoline_end as usize).contains(&pc)
}

/// Returns the registers of the goroutine whose trampoline has the stack pointer `sp`: unwind
/// tables cannot describe a caller whose return address is not in its link register.
pub fn trampoline_caller(sp: u64, mut read: impl FnMut(u64) -> Option<u64>) -> Option<Registers> {
    let mut register = |n: u64| read(sp + FRAME_REGISTERS as u64 + 8 * n);
    let [fp, lr, sp, pc] = [register(29)?, register(30)?, register(31)?, register(32)?];
    Some(Registers { pc, sp, fp, lr, rbx: 0 })
}

/// One record of a signal frame.
#[derive(Clone, Copy)]
struct Record {
    at: *mut u8,
    magic: u32,
    bytes: usize,
}

/// Calls `f` with each record from `at` on. Returns the address of the terminator.
///
/// # Safety
/// The kernel has written records there.
unsafe fn for_each_record(mut at: *mut u8, mut f: impl FnMut(Record)) -> *mut u8 {
    loop {
        // SAFETY: every record begins with its magic and its size; the last one is zero.
        let [magic, bytes] = unsafe { at.cast::<[u32; 2]>().read() };
        if magic == 0 {
            return at;
        }
        f(Record { at, magic, bytes: bytes as usize });
        // SAFETY: the next record follows.
        at = unsafe { at.add(bytes as usize) };
    }
}

/// Makes the interrupted goroutine continue in the trampoline.
///
/// # Safety
/// Called in a signal handler that is not on the goroutine's stack, which has [`DIVERT_BYTES`]
/// below the interrupted stack pointer; the goroutine is inside the runtime (invariant 1);
/// [`init_preemption`] returned true; the kernel made `context` for this handler.
pub unsafe fn divert(context: &mut libc::ucontext_t) {
    let (interrupted, from) = (context.uc_mcontext.sp as usize, (&raw mut *context).cast::<u8>());
    // SAFETY: the kernel's frame; and below the interrupted stack pointer is room for a copy.
    unsafe {
        let records = from.add(RECORDS);
        // The kernel puts what does not fit right behind the terminator.
        let (mut extra, mut extra_bytes) = (None, 0);
        let end = for_each_record(records, |record| {
            if record.magic == EXTRA_MAGIC {
                extra = Some(record.at.add(8));
                extra_bytes = record.at.add(16).cast::<u32>().read() as usize;
            }
        });
        let used = end.addr() - from.addr() + TERMINATOR_BYTES + extra_bytes;
        let frame = (interrupted - FRAME_BYTES.max(SIGINFO_BYTES + used)) & !15;
        let copy = (frame + SIGINFO_BYTES) as *mut u8;
        copy.copy_from_nonoverlapping(from, used);
        copy.add(UC_STACK_FLAGS).cast::<u32>().write(NO_SUCH_MODE);
        if let Some(pointer) = extra {
            // Invariant 4.
            let pointer = copy.add(pointer.addr() - from.addr()).cast::<usize>();
            pointer.write(pointer.read() - from.addr() + copy.addr());
        }
        keep_plain_records(records);
        context.uc_mcontext.pc = trampoline as *const () as u64;
        context.uc_mcontext.sp = frame as u64;
        context.uc_mcontext.pstate &= !BTYPE;
    }
}

/// Removes all records except those of invariant 3.
///
/// # Safety
/// `records` are those of the running handler's frame.
unsafe fn keep_plain_records(records: *mut u8) {
    let mut to = records;
    // SAFETY: records only move down, over records that were read before; the list gets shorter by
    // at least nothing, so its terminator has room.
    unsafe {
        for_each_record(records, |Record { at, magic, bytes }| {
            if magic == FPSIMD_MAGIC || magic == POE_MAGIC {
                to.copy_from(at, bytes);
                if magic == FPSIMD_MAGIC {
                    to.add(FPSIMD_FPCR).cast::<u32>().write(0);
                }
                to = to.add(bytes);
            }
        });
        to.cast::<u64>().write(0);
    }
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
        ".cfi_signal_frame",
        // For debuggers: the CFA is the interrupted sp, and the "return address" the interrupted
        // pc. The interrupted link register, which a leaf function needs, cannot be described
        // beside it (see `trampoline_caller`).
        ".cfi_escape 0x0f, 4, 0x8f, ({sp} & 0x7f) | 0x80, {sp} >> 7, 6",
        ".cfi_escape 0x10, 29, 3, 0x8f, ({x29} & 0x7f) | 0x80, {x29} >> 7",
        ".cfi_escape 0x10, 30, 3, 0x8f, ({pc} & 0x7f) | 0x80, {pc} >> 7",
        // Code that maintains caches may be between that and its own barrier, which on another CPU
        // would not complete it. (The kernel has this barrier where it switches threads.)
        "dsb ish",
        "adrp x9, {preempted}",
        "ldr x9, [x9, :lo12:{preempted}]",
        "blr x9",
        // Resumed, maybe on another thread, whose signal mask stays (invariant 2).
        "mov x0, #0",
        "mov x1, #0",
        "add x2, sp, {sigmask}",
        "mov x3, #8",
        "mov x8, {rt_sigprocmask}",
        "svc #0",
        // Leaves the runtime, as `set_in_runtime::<0>` does.
        "mrs x9, tpidr_el0",
        "ldr x10, [x9, {m_word}]",
        "and x10, x10, #-{m_align}",
        "add x10, x10, {in_runtime}",
        "stlrb wzr, [x10]",
        "strb wzr, [x9, {m_word}]",
        "mov x8, {rt_sigreturn}",
        "svc #0",
        "brk #1",
        ".globl trefoil_trampoline_end",
        ".hidden trefoil_trampoline_end",
        "trefoil_trampoline_end:",
        ".cfi_endproc",
        preempted = sym PREEMPTED,
        sigmask = const FRAME_SIGMASK,
        x29 = const FRAME_REGISTERS + 29 * 8,
        sp = const FRAME_REGISTERS + 31 * 8,
        pc = const FRAME_REGISTERS + 32 * 8,
        rt_sigprocmask = const libc::SYS_rt_sigprocmask,
        rt_sigreturn = const libc::SYS_rt_sigreturn,
        m_word = const super::M_WORD,
        m_align = const super::M_ALIGN,
        in_runtime = const super::super::M_IN_RUNTIME,
    )
}

unsafe extern "C" {
    /// The first byte after the trampoline.
    pub static trefoil_trampoline_end: u8;
}
