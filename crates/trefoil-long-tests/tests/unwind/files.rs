//! Compares callers with framehop's at many addresses of files, with all its stacks made up.
//!
//! Where the two differ, and why:
//!
//! - The return address is in a register that is not known: `longjmp`. framehop reads the word below
//!   the frame. Ours finds no caller.
//! - A row needs a word of the stack: the frame of a signal handler. framehop goes on by the frame
//!   pointer. Ours reads the word.
//! - A CIE names another register for the return address than the usual one: `rawmemchr` of
//!   aarch64. framehop uses x30, ours the frame pointer.
//! - The return address of a function of aarch64 is undefined, and the function is stopped: the
//!   start of a thread. framehop uses x30. For ours the stack ends.

use super::File;
use super::reference::Reference;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use trefoil_base::symbols::{CodeAddress, Cpu, NoCaller, RegisterValue, Registers, UnwindTables};

const BIAS: u64 = 0x7f12_0000_0000;
const STACK: Range<u64> = 0x7ffd_0000_0000..0x7ffd_0010_0000;
const SP: u64 = STACK.start + 0x1_0000;

/// Returns a word of a stack of addresses, each of which is above its own place.
fn word(address: u64) -> Option<u64> {
    let is_readable = STACK.contains(&address) && address.is_multiple_of(8);
    let number = address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    is_readable.then_some(address + 8 + 8 * (number % 64))
}

type Found = Result<Option<Registers>, NoCaller>;

/// How two unwinders differ at an address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Difference {
    /// Neither finds a caller, but only one says that the stack ends.
    End,
    /// Only framehop finds a caller.
    OnlyOther,
    /// Only ours finds a caller.
    OnlyOwn,
    /// Both find one, and one of them does by the frame pointer.
    FramePointer,
    /// Both find one.
    Callers,
}

fn difference(own: Found, other: Found, fp: u64) -> Option<Difference> {
    let by_frame_pointer = |caller: Registers| caller.sp == fp + 16;
    match (own, other) {
        _ if own == other => None,
        (Ok(Some(own)), Ok(Some(other))) => {
            let is_one = by_frame_pointer(own) != by_frame_pointer(other);
            Some(if is_one { Difference::FramePointer } else { Difference::Callers })
        }
        (Ok(Some(_)), _) => Some(Difference::OnlyOwn),
        (_, Ok(Some(_))) => Some(Difference::OnlyOther),
        _ => Some(Difference::End),
    }
}

/// Compares at every `step`-th address. Returns how often both find the same, and the differences.
fn compare(path: &str, cpu: Cpu, step: usize) -> Option<(usize, BTreeMap<Difference, usize>)> {
    let Some(file) = File::read(Path::new(path)) else {
        println!("{path} is not installed");
        return None;
    };
    let mut reference = Reference::new(cpu);
    reference.add(&file, BIAS);
    let (mut tables, mut indexed) = (UnwindTables::new(cpu), UnwindTables::new(cpu));
    tables.add(file.module(BIAS));
    indexed.add(file.module_without_header(BIAS));
    // A debug build is slow. Functions begin at multiples of 16: those are not to be all that is compared.
    let step = if cfg!(debug_assertions) { 15 * step } else { step };
    let (mut same, mut differences) = (0, BTreeMap::new());
    for address in file.code.iter().flat_map(|range| range.clone().step_by(step)) {
        let pc = BIAS + address;
        for at in [CodeAddress::of_instruction(pc), CodeAddress::of_return(pc + 1).unwrap()] {
            for fp in [SP + 0x400, 0, SP - 0x80, 0x1234] {
                let (pc, lr, rbx) = (at.address(), BIAS + 0x4321, RegisterValue::Unknown);
                let before = Registers { pc, sp: SP, fp, lr, rbx };
                // framehop does not follow rbx.
                let registers = |found: Result<Option<CodeAddress>, NoCaller>, after: Registers| {
                    found.map(|caller| caller.map(|_| Registers { rbx, ..after }))
                };
                let mut after = before;
                let own = registers(tables.caller(at, &mut after, &mut word), after);
                let mut after = before;
                let own_indexed = registers(indexed.caller(at, &mut after, &mut word), after);
                assert_eq!(own, own_indexed, "{path} {address:#x}, without a header");
                reference.forget();
                let mut after = before;
                let other = registers(reference.caller(at, &mut after, &mut word), after);
                match difference(own, other, fp) {
                    None => same += 1,
                    Some(difference) => {
                        let count = differences.entry(difference).or_insert(0);
                        if *count < 3 {
                            println!("{address:#x} fp {fp:#x}: {own:x?}, framehop {other:x?}");
                        }
                        *count += 1;
                    }
                }
            }
        }
    }
    println!("{path}: {same} the same, {differences:?}");
    Some((same, differences))
}

/// Compares, and asserts how many differences of each kind there are at most, of a million.
fn assert_same(path: &str, cpu: Cpu, step: usize) {
    let Some((same, differences)) = compare(path, cpu, step) else { return };
    assert!(same > 2000, "{path}: {same}");
    let of_million = |kind| differences.get(&kind).unwrap_or(&0) * 1_000_000 / same;
    assert!(of_million(Difference::OnlyOther) <= 200, "{path}: {differences:?}");
    assert!(of_million(Difference::OnlyOwn) <= 100, "{path}: {differences:?}");
    assert!(of_million(Difference::FramePointer) <= 100, "{path}: {differences:?}");
    assert!(of_million(Difference::Callers) == 0, "{path}: {differences:?}");
    // Code without tables, and no frame pointer: for ours the stack ends.
    assert!(of_million(Difference::End) <= 5000, "{path}: {differences:?}");
}

const LIBRARIES: &str = "/lib/x86_64-linux-gnu";

#[test]
fn callers_in_the_test_itself_are_those_of_framehop() {
    let own = std::env::current_exe().unwrap();
    assert_same(own.to_str().unwrap(), Cpu::OWN, 13);
}

#[test]
fn callers_in_libc_are_those_of_framehop() {
    assert_same(&format!("{LIBRARIES}/libc.so.6"), Cpu::X86_64, 7);
}

#[test]
fn callers_in_libm_are_those_of_framehop() {
    assert_same(&format!("{LIBRARIES}/libm.so.6"), Cpu::X86_64, 7);
}

#[test]
fn callers_in_libgcc_are_those_of_framehop() {
    assert_same(&format!("{LIBRARIES}/libgcc_s.so.1"), Cpu::X86_64, 1);
}

#[test]
fn callers_in_the_loader_are_those_of_framehop() {
    assert_same("/lib64/ld-linux-x86-64.so.2", Cpu::X86_64, 1);
}

#[test]
fn callers_in_libc_of_aarch64_are_those_of_framehop() {
    assert_same("/usr/aarch64-linux-gnu/lib/libc.so.6", Cpu::Aarch64, 4);
}
