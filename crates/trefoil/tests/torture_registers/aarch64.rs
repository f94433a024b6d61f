//! Work that keeps values in the registers and flags of aarch64.

use crate::{Shared, Work};
use std::sync::Arc;

/// The kinds of work of this CPU.
pub(crate) const KINDS: &[(&str, Work)] =
    &[("integers", integers), ("flags", flags), ("vectors", vectors), ("sve", sve)];

/// How often the loops below go round: some tens of microseconds.
const ROUNDS: u64 = 30_000;

/// Keeps a value of its own in every integer register that inline assembly may use, x30 included.
fn integers(_: &Arc<Shared>, id: usize) {
    let mut out = [0u64; 25];
    let start = id as u64 * 1000;
    // SAFETY: changes the registers that are listed, and stores them.
    unsafe {
        std::arch::asm!(
            "add x3, x0, #1",
            "add x4, x0, #2",
            "add x5, x0, #3",
            "add x6, x0, #4",
            "add x7, x0, #5",
            "add x8, x0, #6",
            "add x9, x0, #7",
            "add x10, x0, #8",
            "add x11, x0, #9",
            "add x12, x0, #10",
            "add x13, x0, #11",
            "add x14, x0, #12",
            "add x15, x0, #13",
            "add x16, x0, #14",
            "add x17, x0, #15",
            "add x20, x0, #16",
            "add x21, x0, #17",
            "add x22, x0, #18",
            "add x23, x0, #19",
            "add x24, x0, #20",
            "add x25, x0, #21",
            "add x26, x0, #22",
            "add x27, x0, #23",
            "add x28, x0, #24",
            "add x30, x0, #25",
            "2:", "subs x1, x1, #1", "b.ne 2b",
            "str x3, [x2, #0]",
            "str x4, [x2, #8]",
            "str x5, [x2, #16]",
            "str x6, [x2, #24]",
            "str x7, [x2, #32]",
            "str x8, [x2, #40]",
            "str x9, [x2, #48]",
            "str x10, [x2, #56]",
            "str x11, [x2, #64]",
            "str x12, [x2, #72]",
            "str x13, [x2, #80]",
            "str x14, [x2, #88]",
            "str x15, [x2, #96]",
            "str x16, [x2, #104]",
            "str x17, [x2, #112]",
            "str x20, [x2, #120]",
            "str x21, [x2, #128]",
            "str x22, [x2, #136]",
            "str x23, [x2, #144]",
            "str x24, [x2, #152]",
            "str x25, [x2, #160]",
            "str x26, [x2, #168]",
            "str x27, [x2, #176]",
            "str x28, [x2, #184]",
            "str x30, [x2, #192]",
            inout("x0") start => _, inout("x1") ROUNDS => _, in("x2") out.as_mut_ptr(),
            out("x3") _, out("x4") _, out("x5") _, out("x6") _, out("x7") _, out("x8") _, out("x9") _, out("x10") _, out("x11") _, out("x12") _, out("x13") _, out("x14") _, out("x15") _, out("x16") _, out("x17") _, out("x20") _, out("x21") _, out("x22") _, out("x23") _, out("x24") _, out("x25") _, out("x26") _, out("x27") _, out("x28") _, out("x30") _,
        );
    }
    for (i, &x) in out.iter().enumerate() {
        assert_eq!(x, start + i as u64 + 1);
    }
}

/// Checks that all four flags stay, set and clear.
fn flags(_: &Arc<Shared>, _: usize) {
    for wanted in 0..16u64 {
        let wrong: u64;
        // SAFETY: sets the flags, spins without changing them, and reads them again.
        unsafe {
            std::arch::asm!(
                "mov {wrong}, #0",
                "msr nzcv, {flags}",
                "2:",
                "mrs {now}, nzcv",
                "eor {now}, {now}, {flags}",
                "orr {wrong}, {wrong}, {now}",
                "sub {n}, {n}, #1",
                "cbnz {n}, 2b",
                flags = in(reg) wanted << 28,
                n = inout(reg) ROUNDS / 16 => _,
                now = out(reg) _,
                wrong = out(reg) wrong,
            );
        }
        assert_eq!(wrong, 0);
    }
}

/// Keeps a value of its own in each of the 32 vector registers.
fn vectors(_: &Arc<Shared>, id: usize) {
    let mut out = [[0u64; 2]; 32];
    let start = id as u64 * 1000;
    // SAFETY: changes the registers that are listed, and stores them.
    unsafe {
        std::arch::asm!(
            "dup v0.2d, x0", "add x0, x0, #1",
            "dup v1.2d, x0", "add x0, x0, #1",
            "dup v2.2d, x0", "add x0, x0, #1",
            "dup v3.2d, x0", "add x0, x0, #1",
            "dup v4.2d, x0", "add x0, x0, #1",
            "dup v5.2d, x0", "add x0, x0, #1",
            "dup v6.2d, x0", "add x0, x0, #1",
            "dup v7.2d, x0", "add x0, x0, #1",
            "dup v8.2d, x0", "add x0, x0, #1",
            "dup v9.2d, x0", "add x0, x0, #1",
            "dup v10.2d, x0", "add x0, x0, #1",
            "dup v11.2d, x0", "add x0, x0, #1",
            "dup v12.2d, x0", "add x0, x0, #1",
            "dup v13.2d, x0", "add x0, x0, #1",
            "dup v14.2d, x0", "add x0, x0, #1",
            "dup v15.2d, x0", "add x0, x0, #1",
            "dup v16.2d, x0", "add x0, x0, #1",
            "dup v17.2d, x0", "add x0, x0, #1",
            "dup v18.2d, x0", "add x0, x0, #1",
            "dup v19.2d, x0", "add x0, x0, #1",
            "dup v20.2d, x0", "add x0, x0, #1",
            "dup v21.2d, x0", "add x0, x0, #1",
            "dup v22.2d, x0", "add x0, x0, #1",
            "dup v23.2d, x0", "add x0, x0, #1",
            "dup v24.2d, x0", "add x0, x0, #1",
            "dup v25.2d, x0", "add x0, x0, #1",
            "dup v26.2d, x0", "add x0, x0, #1",
            "dup v27.2d, x0", "add x0, x0, #1",
            "dup v28.2d, x0", "add x0, x0, #1",
            "dup v29.2d, x0", "add x0, x0, #1",
            "dup v30.2d, x0", "add x0, x0, #1",
            "dup v31.2d, x0", "add x0, x0, #1",
            "2:", "subs x1, x1, #1", "b.ne 2b",
            "stp q0, q1, [x2, #0]",
            "stp q2, q3, [x2, #32]",
            "stp q4, q5, [x2, #64]",
            "stp q6, q7, [x2, #96]",
            "stp q8, q9, [x2, #128]",
            "stp q10, q11, [x2, #160]",
            "stp q12, q13, [x2, #192]",
            "stp q14, q15, [x2, #224]",
            "stp q16, q17, [x2, #256]",
            "stp q18, q19, [x2, #288]",
            "stp q20, q21, [x2, #320]",
            "stp q22, q23, [x2, #352]",
            "stp q24, q25, [x2, #384]",
            "stp q26, q27, [x2, #416]",
            "stp q28, q29, [x2, #448]",
            "stp q30, q31, [x2, #480]",
            inout("x0") start => _, inout("x1") ROUNDS => _, in("x2") out.as_mut_ptr(),
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            out("v4") _, out("v5") _, out("v6") _, out("v7") _,
            out("v8") _, out("v9") _, out("v10") _, out("v11") _,
            out("v12") _, out("v13") _, out("v14") _, out("v15") _,
            out("v16") _, out("v17") _, out("v18") _, out("v19") _,
            out("v20") _, out("v21") _, out("v22") _, out("v23") _,
            out("v24") _, out("v25") _, out("v26") _, out("v27") _,
            out("v28") _, out("v29") _, out("v30") _, out("v31") _,
        );
    }
    for (i, &x) in out.iter().enumerate() {
        assert_eq!(x, [start + i as u64; 2]);
    }
}

/// Keeps values in the whole of the scalable vector, predicate and first-fault registers.
fn sve(_: &Arc<Shared>, id: usize) {
    /// The longest vectors of the architecture, in words.
    const WORDS_MAX: usize = 32;
    if !std::arch::is_aarch64_feature_detected!("sve") {
        return;
    }
    let mut out = [0u64; 32 * WORDS_MAX];
    let mut predicates = [0u8; 4 * WORDS_MAX];
    let start = id as u64 * 1000;
    let (bytes, ffr): (usize, u64);
    // SAFETY: the CPU has these registers; those that change are listed, and stored to arrays that
    // are long enough for the longest vectors.
    unsafe {
        std::arch::asm!(
            ".arch_extension sve",
            "rdvl {bytes}, #1",
            "ptrue p0.d", "ptrue p1.b, vl1", "pfalse p2.b", "wrffr p1.b",
            "dup z0.d, x0", "add x0, x0, #1",
            "dup z1.d, x0", "add x0, x0, #1",
            "dup z2.d, x0", "add x0, x0, #1",
            "dup z3.d, x0", "add x0, x0, #1",
            "dup z4.d, x0", "add x0, x0, #1",
            "dup z5.d, x0", "add x0, x0, #1",
            "dup z6.d, x0", "add x0, x0, #1",
            "dup z7.d, x0", "add x0, x0, #1",
            "dup z8.d, x0", "add x0, x0, #1",
            "dup z9.d, x0", "add x0, x0, #1",
            "dup z10.d, x0", "add x0, x0, #1",
            "dup z11.d, x0", "add x0, x0, #1",
            "dup z12.d, x0", "add x0, x0, #1",
            "dup z13.d, x0", "add x0, x0, #1",
            "dup z14.d, x0", "add x0, x0, #1",
            "dup z15.d, x0", "add x0, x0, #1",
            "dup z16.d, x0", "add x0, x0, #1",
            "dup z17.d, x0", "add x0, x0, #1",
            "dup z18.d, x0", "add x0, x0, #1",
            "dup z19.d, x0", "add x0, x0, #1",
            "dup z20.d, x0", "add x0, x0, #1",
            "dup z21.d, x0", "add x0, x0, #1",
            "dup z22.d, x0", "add x0, x0, #1",
            "dup z23.d, x0", "add x0, x0, #1",
            "dup z24.d, x0", "add x0, x0, #1",
            "dup z25.d, x0", "add x0, x0, #1",
            "dup z26.d, x0", "add x0, x0, #1",
            "dup z27.d, x0", "add x0, x0, #1",
            "dup z28.d, x0", "add x0, x0, #1",
            "dup z29.d, x0", "add x0, x0, #1",
            "dup z30.d, x0", "add x0, x0, #1",
            "dup z31.d, x0", "add x0, x0, #1",
            "2:", "subs x1, x1, #1", "b.ne 2b",
            "str z0, [x2, #0, mul vl]",
            "str z1, [x2, #1, mul vl]",
            "str z2, [x2, #2, mul vl]",
            "str z3, [x2, #3, mul vl]",
            "str z4, [x2, #4, mul vl]",
            "str z5, [x2, #5, mul vl]",
            "str z6, [x2, #6, mul vl]",
            "str z7, [x2, #7, mul vl]",
            "str z8, [x2, #8, mul vl]",
            "str z9, [x2, #9, mul vl]",
            "str z10, [x2, #10, mul vl]",
            "str z11, [x2, #11, mul vl]",
            "str z12, [x2, #12, mul vl]",
            "str z13, [x2, #13, mul vl]",
            "str z14, [x2, #14, mul vl]",
            "str z15, [x2, #15, mul vl]",
            "str z16, [x2, #16, mul vl]",
            "str z17, [x2, #17, mul vl]",
            "str z18, [x2, #18, mul vl]",
            "str z19, [x2, #19, mul vl]",
            "str z20, [x2, #20, mul vl]",
            "str z21, [x2, #21, mul vl]",
            "str z22, [x2, #22, mul vl]",
            "str z23, [x2, #23, mul vl]",
            "str z24, [x2, #24, mul vl]",
            "str z25, [x2, #25, mul vl]",
            "str z26, [x2, #26, mul vl]",
            "str z27, [x2, #27, mul vl]",
            "str z28, [x2, #28, mul vl]",
            "str z29, [x2, #29, mul vl]",
            "str z30, [x2, #30, mul vl]",
            "str z31, [x2, #31, mul vl]",
            "str p0, [x3]", "str p1, [x3, #1, mul vl]", "str p2, [x3, #2, mul vl]",
            "rdffr p3.b", "cntp {ffr}, p3, p3.b",
            ".arch_extension nosve",
            bytes = out(reg) bytes, ffr = out(reg) ffr,
            inout("x0") start => _, inout("x1") ROUNDS => _, in("x2") out.as_mut_ptr(),
            in("x3") predicates.as_mut_ptr(),
            out("p0") _, out("p1") _, out("p2") _, out("p3") _, out("ffr") _,
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            out("v4") _, out("v5") _, out("v6") _, out("v7") _,
            out("v8") _, out("v9") _, out("v10") _, out("v11") _,
            out("v12") _, out("v13") _, out("v14") _, out("v15") _,
            out("v16") _, out("v17") _, out("v18") _, out("v19") _,
            out("v20") _, out("v21") _, out("v22") _, out("v23") _,
            out("v24") _, out("v25") _, out("v26") _, out("v27") _,
            out("v28") _, out("v29") _, out("v30") _, out("v31") _,
        );
    }
    let words = bytes / 8;
    for (i, vector) in out[..32 * words].chunks(words).enumerate() {
        assert!(vector.iter().all(|&x| x == start + i as u64), "z{i}: {vector:?}");
    }
    assert!(predicates[..words].iter().all(|&bits| bits == 1), "p0");
    assert!(predicates[words] == 1 && predicates[words + 1..3 * words].iter().all(|&b| b == 0));
    assert_eq!(ffr, 1);
}
