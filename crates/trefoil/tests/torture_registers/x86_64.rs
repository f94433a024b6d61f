//! Work that keeps values in the registers and flags of x86_64, and below the stack pointer.

use crate::{Shared, Work};
use std::hint::black_box;
use std::sync::Arc;

/// The kinds of work of this CPU.
pub(crate) const KINDS: &[(&str, Work)] = &[
    ("avx2", avx2),
    ("avx512", avx512),
    ("x87", x87),
    ("string instructions", string_instructions),
    ("red zone", red_zone),
];

/// Keeps vectors in registers all the time: a wrong restore changes the sum.
fn avx2(_: &Arc<Shared>, id: usize) {
    #[target_feature(enable = "avx2")]
    fn run(id: i64) -> i64 {
        use std::arch::x86_64::*;
        let mut sums = [_mm256_setzero_si256(); 12];
        let one = _mm256_set1_epi64x(id + 1);
        for _ in 0..3000 {
            for sum in &mut sums {
                *sum = _mm256_add_epi64(*sum, one);
            }
        }
        let total = sums.into_iter().reduce(|a, b| _mm256_add_epi64(a, b)).unwrap();
        let mut out = [0i64; 4];
        // SAFETY: an array of 32 bytes.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), total) };
        out.iter().sum()
    }
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has it.
        let sum = unsafe { run(id as i64) };
        assert_eq!(sum, 12 * 4 * 3000 * (id as i64 + 1));
    }
}

fn avx512(_: &Arc<Shared>, id: usize) {
    #[target_feature(enable = "avx512f")]
    fn run(id: i64) -> i64 {
        use std::arch::x86_64::*;
        let mut sums = [_mm512_setzero_si512(); 24];
        let one = _mm512_set1_epi64(id + 1);
        let mut mask: __mmask8 = 0b1010_1010;
        for _ in 0..3000 {
            for sum in &mut sums {
                // The mask is in a k register.
                *sum = _mm512_mask_add_epi64(*sum, mask, *sum, one);
            }
            mask = black_box(mask);
        }
        sums.into_iter().map(|sum| _mm512_reduce_add_epi64(sum)).sum()
    }
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has it.
        let sum = unsafe { run(id as i64) };
        assert_eq!(sum, 24 * 4 * 3000 * (id as i64 + 1));
    }
}

/// Keeps the x87 stack full for a while.
fn x87(_: &Arc<Shared>, id: usize) {
    let mut out = [0f64; 8];
    let start = id as f64 + 0.5;
    // SAFETY: fills the x87 stack, spins, and empties it again.
    unsafe {
        std::arch::asm!(
            "fld qword ptr [{start}]", "fld1", "fadd st, st(1)", "fld1", "fadd st, st(1)",
            "fld1", "fadd st, st(1)", "fld1", "fadd st, st(1)", "fld1", "fadd st, st(1)",
            "fld1", "fadd st, st(1)", "fld1", "fadd st, st(1)",
            "2:", "dec {n}", "jnz 2b",
            "fstp qword ptr [{out}]", "fstp qword ptr [{out} + 8]",
            "fstp qword ptr [{out} + 16]", "fstp qword ptr [{out} + 24]",
            "fstp qword ptr [{out} + 32]", "fstp qword ptr [{out} + 40]",
            "fstp qword ptr [{out} + 48]", "fstp qword ptr [{out} + 56]",
            start = in(reg) &start,
            out = in(reg) out.as_mut_ptr(),
            n = inout(reg) 30_000u64 => _,
            out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
            out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
        );
    }
    for (i, &x) in out.iter().rev().enumerate() {
        assert_eq!(x, start + i as f64);
    }
}

/// Copies with a repeated instruction, forwards, and backwards with the direction flag set.
fn string_instructions(_: &Arc<Shared>, id: usize) {
    let from: Vec<u8> = (0..40_000u32).map(|i| (i as usize * 31 + id) as u8).collect();
    let mut to = vec![0u8; from.len()];
    for backwards in [false, true] {
        to.fill(0);
        let last = if backwards { from.len() - 1 } else { 0 };
        // SAFETY: copies `len` bytes from one vector to the other, and clears the flag again.
        unsafe {
            let (mut source, mut target) = (from.as_ptr().add(last), to.as_mut_ptr().add(last));
            if backwards {
                std::arch::asm!("std", "rep movsb", "cld", inout("rsi") source,
                    inout("rdi") target, inout("rcx") from.len() => _);
            } else {
                std::arch::asm!("rep movsb", inout("rsi") source, inout("rdi") target,
                    inout("rcx") from.len() => _);
            }
            black_box((&mut source, &mut target));
        }
        assert!(from == to);
    }
}

/// Checks that data of a leaf function below the stack pointer, and its flags, are unchanged.
fn red_zone(_: &Arc<Shared>, id: usize) {
    let wanted = id as u64 * 0x0101_0101 + 7;
    let mut wrong = 0u64;
    // SAFETY: writes only the 128 bytes below the stack pointer, which belong to a leaf function.
    unsafe {
        std::arch::asm!(
            "mov [rsp - 8], {v}", "mov [rsp - 64], {v}", "mov [rsp - 128], {v}",
            "2:",
            "cmp [rsp - 8], {v}", "jne 3f",
            "cmp [rsp - 64], {v}", "jne 3f",
            "cmp [rsp - 128], {v}", "jne 3f",
            "stc", "dec {n}", "jnc 3f", "jnz 2b", // dec keeps the carry
            "jmp 4f",
            "3:", "inc {wrong}",
            "4:",
            v = in(reg) wanted,
            n = inout(reg) 20_000u64 => _,
            wrong = inout(reg) wrong,
        );
    }
    assert_eq!(wrong, 0);
}
