//! Tables that are made by hand, and damaged ones.

use super::*;
use crate::symbols::testing::random_below;

/// The address of the made `.eh_frame`.
const SECTION: u64 = 0x1000;
/// The address of the made function, and its size.
const FUNCTION: u64 = 0x8000;
const FUNCTION_BYTES: u64 = 0x100;
/// The address of the made `.eh_frame_hdr`.
const HEADER: u64 = 0x4000;
const BIAS: u64 = 0x5500_0000_0000;
const STACK: Range<u64> = 0x7000_0000..0x7001_0000;
const SP: u64 = STACK.start + 0x1000;
const FP: u64 = SP + 0x800;
const LR: u64 = 0x1234;

/// The word at an address tells the address.
fn saved(address: u64) -> u64 {
    address + 0x10_0000
}

fn word(address: u64) -> Option<u64> {
    STACK.contains(&address).then_some(saved(address))
}

fn registers(cpu: Cpu) -> Registers {
    let lr = if cpu == Cpu::Aarch64 { LR } else { 0 };
    Registers { pc: 0, sp: SP, fp: FP, lr, rbx: RegisterValue::Unknown }
}

/// Returns an entry: its size, and what follows.
fn entry(contents: &[u8]) -> Vec<u8> {
    let mut bytes = (contents.len() as u32).to_le_bytes().to_vec();
    bytes.extend(contents);
    bytes
}

/// Returns a CIE. Its first part is the version, the augmentation and what a version adds; the
/// second what follows the return address column.
fn cie(cpu: Cpu, head: &[u8], tail: &[u8]) -> Vec<u8> {
    let (data_factor, column) = match cpu {
        Cpu::X86_64 => (0x78, 16),
        Cpu::Aarch64 => (0x78, 30),
    };
    entry(&[&[0; 4][..], head, &[1, data_factor, column], tail].concat())
}

/// Returns the usual CIE of a CPU: on x86_64 the return address is above the stack pointer.
fn usual_cie(cpu: Cpu) -> Vec<u8> {
    const POINTERS: &[u8] = &[1, 0x1b];
    let instructions: &[u8] = match cpu {
        Cpu::X86_64 => &[0x0c, 7, 8, 0x80 | 16, 1],
        Cpu::Aarch64 => &[0x0c, 31, 0],
    };
    cie(cpu, b"\x01zR\0", &[POINTERS, instructions].concat())
}

/// Appends the entry of a function, whose CIE is the first entry and has relative pointers of 4
/// bytes.
fn add_function(section: &mut Vec<u8>, start: u64, instructions: &[u8]) {
    let at = section.len() as u64;
    let start = start.wrapping_sub(SECTION + at + 8) as u32;
    let parts = [at as u32 + 4, start, FUNCTION_BYTES as u32].map(u32::to_le_bytes);
    section.extend(entry(&[&parts.concat()[..], &[0], instructions].concat()));
}

/// Returns a section with one function.
fn section(cpu: Cpu, instructions: &[u8]) -> Vec<u8> {
    let mut section = usual_cie(cpu);
    add_function(&mut section, FUNCTION, instructions);
    section
}

fn module(section: Vec<u8>) -> Module {
    Module {
        range: BIAS..BIAS + 0x1_0000,
        bias: BIAS,
        eh_frame: Some((SECTION..SECTION + section.len() as u64, Bytes::Copied(section))),
        eh_frame_hdr: None,
    }
}

fn tables(cpu: Cpu, module: Module) -> UnwindTables {
    let mut tables = UnwindTables::new(cpu);
    tables.add(module);
    tables
}

fn stopped(address: u64) -> CodeAddress {
    CodeAddress::of_instruction(BIAS + address)
}

/// Returns the caller's registers of a function with these instructions that is stopped in its
/// middle.
fn caller(cpu: Cpu, instructions: &[u8]) -> Result<Option<Registers>, NoCaller> {
    let at = stopped(FUNCTION + FUNCTION_BYTES / 2);
    found(&mut tables(cpu, module(section(cpu, instructions))), at, registers(cpu))
}

fn found(
    tables: &mut UnwindTables,
    at: CodeAddress,
    mut registers: Registers,
) -> Result<Option<Registers>, NoCaller> {
    let caller = tables.caller(at, &mut registers, &mut word)?;
    assert_eq!(caller.map_or(0, CodeAddress::address), registers.pc);
    Ok(caller.map(|_| registers))
}

/// Returns the registers of a caller on x86_64.
fn x86(pc: u64, sp: u64, fp: u64) -> Result<Option<Registers>, NoCaller> {
    Ok(Some(Registers { pc, sp, fp, lr: 0, rbx: RegisterValue::Unknown }))
}

#[test]
fn each_instruction_of_x86_64_does_what_dwarf_says() {
    let caller = |instructions: &[u8]| caller(Cpu::X86_64, instructions);
    let plain = x86(saved(SP), SP + 8, FP);
    assert_eq!(caller(&[]), plain);
    assert_eq!(caller(&[0, 0]), plain, "nop");
    assert_eq!(caller(&[0x0e, 32]), x86(saved(SP + 24), SP + 32, FP), "def_cfa_offset");
    assert_eq!(caller(&[0x13, 0x7c]), x86(saved(SP + 24), SP + 32, FP), "def_cfa_offset_sf");
    assert_eq!(caller(&[0x0d, 6]), x86(saved(FP), FP + 8, FP), "def_cfa_register");
    assert_eq!(caller(&[0x0c, 6, 16]), x86(saved(FP + 8), FP + 16, FP), "def_cfa");
    assert_eq!(caller(&[0x12, 6, 0x7e]), x86(saved(FP + 8), FP + 16, FP), "def_cfa_sf");
    let expression = [0x0f, 3, 0x77, 0x90, 1];
    assert_eq!(caller(&expression), x86(saved(SP + 0x88), SP + 0x90, FP), "def_cfa_expression");

    let at_24 = x86(saved(SP + 24), SP + 32, saved(SP + 8));
    assert_eq!(caller(&[0x0e, 32, 0x86, 3]), at_24, "offset");
    assert_eq!(caller(&[0x0e, 32, 0x05, 6, 3]), at_24, "offset_extended");
    assert_eq!(caller(&[0x0e, 32, 0x11, 6, 3]), at_24, "offset_extended_sf");
    let far_below = [0x0e, 32, 0x86, 0x80, 0x80, 1];
    assert_eq!(caller(&far_below), x86(saved(SP + 24), SP + 32, FP), "popped already");
    let above = x86(saved(SP + 24), SP + 32, saved(SP + 40));
    assert_eq!(caller(&[0x0e, 32, 0x2f, 6, 1]), above, "GNU_negative_offset_extended");
    let value = x86(saved(SP + 24), SP + 32, SP + 8);
    assert_eq!(caller(&[0x0e, 32, 0x14, 6, 3]), value, "val_offset");
    assert_eq!(caller(&[0x0e, 32, 0x15, 6, 3]), value, "val_offset_sf");
    assert_eq!(caller(&[0x09, 6, 7]), x86(saved(SP), SP + 8, SP), "register");
    // The frame address is on the stack of the expression: 16 below it.
    let below = [0x10, 6, 3, 0x08, 16, 0x1c];
    let caller_fp = caller(&below).map(|caller| caller.unwrap().fp);
    assert_eq!(caller_fp, Ok(saved(SP - 8)), "expression");
    let below = [0x16, 6, 3, 0x08, 16, 0x1c];
    assert_eq!(caller(&below), x86(saved(SP), SP + 8, SP - 8), "val_expression");
    assert_eq!(caller(&[0x86, 2, 0xc6]), plain, "restore");
    assert_eq!(caller(&[0x86, 2, 0x06, 6]), plain, "restore_extended");
    assert_eq!(caller(&[0x86, 2, 0x08, 6]), plain, "same_value");
    assert_eq!(caller(&[0x86, 2, 0x07, 6]), plain, "undefined");
    assert_eq!(caller(&[0x2e, 16]), plain, "GNU_args_size");
    assert_eq!(caller(&[0x0a, 0x0e, 32, 0x0b]), plain, "remember_state, restore_state");
    let others = [0x82, 2, 0x8c, 3, 0x08, 12, 0x07, 2, 0x09, 2, 12, 0x10, 2, 1, 0x30, 0xc2];
    assert_eq!(caller(&others), plain, "other registers");
}

#[test]
fn a_row_begins_where_the_location_advances_to() {
    let mut far = vec![0x0e, 16, 0x03, 0x40, 0, 0x0e, 24, 0x04, 0x40, 0, 0, 0, 0x0e, 32];
    far.extend([0x02, 0x3f, 0x0e, 40, 0x41, 0x0e, 48]);
    let mut tables = tables(Cpu::X86_64, module(section(Cpu::X86_64, &far)));
    let mut cfa = |at, is_return: bool| {
        let at = BIAS + FUNCTION + at;
        let at = match is_return {
            true => CodeAddress::of_return(at).unwrap(),
            false => CodeAddress::of_instruction(at),
        };
        found(&mut tables, at, registers(Cpu::X86_64)).unwrap().unwrap().sp - SP
    };
    for (at, expected) in [(0, 16), (0x3f, 16), (0x40, 24), (0x7f, 24), (0x80, 32), (0xbe, 32)] {
        assert_eq!(cfa(at, false), expected, "{at:#x}");
    }
    assert_eq!([cfa(0xbf, false), cfa(0xc0, false), cfa(0xff, false)], [40, 48, 48]);
    // The return address of a call that ends a row, or the function.
    assert_eq!([cfa(0x40, true), cfa(0x41, true), cfa(0x100, true)], [16, 24, 48]);
}

#[test]
fn set_loc_moves_to_an_address() {
    // Its pointer is 10 bytes behind the beginning of the instructions.
    let at = SECTION + usual_cie(Cpu::X86_64).len() as u64 + 17 + 3;
    let to = |address: u64| (address.wrapping_sub(at) as u32).to_le_bytes();
    let middle = FUNCTION + FUNCTION_BYTES / 2;
    let set =
        |address| caller(Cpu::X86_64, &[&[0x0e, 16, 0x01], &to(address)[..], &[0x0e, 24]].concat());
    assert_eq!(set(middle), x86(saved(SP + 16), SP + 24, FP));
    assert_eq!(set(middle + 1), x86(saved(SP + 8), SP + 16, FP));
}

#[test]
fn the_stack_ends_where_the_return_address_is_undefined_or_0() {
    assert_eq!(caller(Cpu::X86_64, &[0x07, 16]), Ok(None));
    assert_eq!(caller(Cpu::Aarch64, &[0x07, 30]), Ok(None));
    for cpu in [Cpu::X86_64, Cpu::Aarch64] {
        let mut tables = tables(cpu, module(section(cpu, &[0x0e, 16])));
        let mut registers = Registers { lr: 0, ..registers(cpu) };
        let before = registers;
        assert_eq!(tables.caller(stopped(FUNCTION), &mut registers, &mut |_| Some(0)), Ok(None));
        assert_eq!(registers, before);
    }
}

#[test]
fn no_caller_is_found_by_an_unknown_register_or_an_unreadable_word() {
    let caller = |instructions: &[u8]| caller(Cpu::X86_64, instructions);
    assert_eq!(caller(&[0x0f, 2, 0x7a, 0]), Err(NoCaller), "a frame address computed from r10");
    assert_eq!(caller(&[0x09, 16, 1]), Err(NoCaller), "a return address in rdx");
    assert_eq!(caller(&[0x0e, 0xff, 0xff, 0xff, 0x0f]), Err(NoCaller), "outside the stack");
    assert_eq!(caller(&[0x0e, 0]), Err(NoCaller), "a stack pointer that stays");
    assert_eq!(caller(&[0x12, 7, 1]), Err(NoCaller), "a stack pointer that shrinks");
}

#[test]
fn a_frame_in_an_unknown_register_is_left_by_the_frame_pointer() {
    for cpu in [Cpu::X86_64, Cpu::Aarch64] {
        let caller = caller(cpu, &[0x0c, 10, 8]).unwrap().unwrap();
        assert_eq!((caller.pc, caller.sp, caller.fp), (saved(FP + 8), FP + 16, saved(FP)));
    }
    // The frame pointer itself in rdx, in a function that has called another.
    let called = CodeAddress::of_return(BIAS + FUNCTION + 8).unwrap();
    let mut tables = tables(Cpu::X86_64, module(section(Cpu::X86_64, &[0x0e, 16, 0x09, 6, 1])));
    assert_eq!(found(&mut tables, called, registers(Cpu::X86_64)), x86(saved(SP + 8), SP + 16, FP));
}

#[test]
fn a_function_of_aarch64_returns_by_its_register_only_while_it_is_stopped() {
    let caller_of = |instructions: &[u8]| caller(Cpu::Aarch64, instructions);
    let arm = |pc, sp, fp| Ok(Some(Registers { pc, lr: pc, sp, fp, rbx: RegisterValue::Unknown }));
    assert_eq!(caller_of(&[]), arm(LR, SP, FP));
    assert_eq!(caller_of(&[0x0e, 32]), arm(LR, SP + 32, FP));
    assert_eq!(caller_of(&[0x2d, 0x2c]), arm(LR, SP, FP), "signed return addresses");
    let saved_pair = [0x0e, 32, 0x9d, 4, 0x9e, 3];
    assert_eq!(caller_of(&saved_pair), arm(saved(SP + 8), SP + 32, saved(SP)));
    let by_fp = [&saved_pair[..], &[0x0c, 29, 32]].concat();
    assert_eq!(caller_of(&by_fp), arm(saved(FP + 8), FP + 32, saved(FP)));

    let called = CodeAddress::of_return(BIAS + FUNCTION + 8).unwrap();
    let mut tables = tables(Cpu::Aarch64, module(section(Cpu::Aarch64, &[0x0e, 32])));
    assert_eq!(found(&mut tables, called, registers(Cpu::Aarch64)), Err(NoCaller));
}

#[test]
fn a_return_address_of_aarch64_loses_its_signature() {
    let mut tables = tables(Cpu::Aarch64, module(section(Cpu::Aarch64, &[0x2d])));
    let mut pc = |lr| {
        let registers = Registers { lr, ..registers(Cpu::Aarch64) };
        found(&mut tables, stopped(FUNCTION), registers).unwrap().unwrap().pc
    };
    assert_eq!(pc(0xff7f_7fff_1234_5678), 0x7fff_1234_5678);
    assert_eq!(pc(0xffff_8000_1234_5678), 0xffff_8000_1234_5678, "an address of the kernel");
}

#[test]
fn x86_64_has_no_instructions_of_aarch64() {
    // What cannot be run is as if the table did not have the address.
    assert_eq!(caller(Cpu::X86_64, &[0x0e, 32, 0x2d]), x86(saved(SP), SP + 8, FP));
}

#[test]
fn an_expression_computes_what_dwarf_says() {
    // The frame address is what the expression computes from the stack pointer.
    let cfa = |operations: &[u8]| {
        let size = u8::try_from(operations.len() + 2).unwrap();
        let instructions = [&[0x0f, size, 0x77, 0], operations].concat();
        Some(caller(Cpu::X86_64, &instructions).ok()??.sp - SP)
    };
    assert_eq!(cfa(&[0x23, 16]), Some(16), "plus_uconst");
    assert_eq!(cfa(&[0x48, 0x22]), Some(24), "lit24, plus");
    assert_eq!(cfa(&[0x08, 8, 0x22]), Some(8), "const1u");
    assert_eq!(cfa(&[0x09, 0xf8, 0x1c]), Some(8), "const1s, minus");
    assert_eq!(cfa(&[0x0a, 0, 1, 0x22]), Some(256), "const2u");
    assert_eq!(cfa(&[0x0b, 0xf8, 0xff, 0x1c]), Some(8), "const2s");
    assert_eq!(cfa(&[0x0c, 0, 1, 0, 0, 0x22]), Some(256), "const4u");
    assert_eq!(cfa(&[0x0d, 0xf8, 0xff, 0xff, 0xff, 0x1c]), Some(8), "const4s");
    assert_eq!(cfa(&[0x0e, 8, 0, 0, 0, 0, 0, 0, 0, 0x22]), Some(8), "const8u");
    assert_eq!(cfa(&[0x10, 0x80, 1, 0x22]), Some(128), "constu");
    assert_eq!(cfa(&[0x11, 0x78, 0x1c]), Some(8), "consts");
    assert_eq!(cfa(&[0x06, 0x0c, 0, 0, 0x10, 0, 0x1c, 0x38, 0x22]), Some(8), "deref");
    assert_eq!(cfa(&[0x12, 0x13, 0x23, 8]), Some(8), "dup, drop");
    assert_eq!(cfa(&[0x38, 0x14, 0x22]), Some(8), "over");
    assert_eq!(cfa(&[0x38, 0x15, 1, 0x22]), Some(8), "pick");
    assert_eq!(cfa(&[0x38, 0x16, 0x22]), Some(8), "swap");
    assert_eq!(cfa(&[0x38, 0x31, 0x17, 0x13, 0x22, 0x23, 7]), Some(8), "rot");
    assert_eq!(cfa(&[0x3c, 0x3a, 0x1a, 0x22]), Some(8), "and");
    assert_eq!(cfa(&[0x38, 0x30, 0x21, 0x22]), Some(8), "or");
    assert_eq!(cfa(&[0x31, 0x33, 0x24, 0x22]), Some(8), "shl");
    assert_eq!(cfa(&[0x4f, 0x31, 0x25, 0x32, 0x25, 0x08, 5, 0x22, 0x22]), Some(8), "shr");
    assert_eq!(cfa(&[0x31, 0x10, 64, 0x24, 0x22, 0x23, 8]), Some(8), "a shift by 64");
    assert_eq!(cfa(&[0x38, 0x31, 0x1e, 0x22]), Some(8), "mul");
    assert_eq!(cfa(&[0x48, 0x33, 0x1b, 0x22]), Some(8), "div");
    assert_eq!(cfa(&[0x31, 0x30, 0x1b, 0x22]), None, "div by 0");
    assert_eq!(cfa(&[0x92, 6, 0, 0x13, 0x23, 8]), Some(8), "bregx");
    for (operation, expected) in [
        (0x29, [0, 1, 0]),
        (0x2a, [0, 1, 1]),
        (0x2b, [0, 0, 1]),
        (0x2c, [1, 1, 0]),
        (0x2d, [1, 0, 0]),
        (0x2e, [1, 0, 1]),
    ] {
        // A comparison of -1, 2 and 5 with 2.
        for (left, expected) in [0xff, 2, 5].into_iter().zip(expected) {
            let operations = [0x09, left, 0x32, operation, 0x33, 0x24, 0x22, 0x23, 8];
            assert_eq!(cfa(&operations), Some(8 + 8 * expected), "{operation:#x}");
        }
    }
    assert_eq!(cfa(&[0x2f, 2, 0, 0x23, 8, 0x23, 16]), Some(16), "skip");
    assert_eq!(cfa(&[0x31, 0x28, 2, 0, 0x23, 8, 0x23, 16]), Some(16), "bra");
    assert_eq!(cfa(&[0x30, 0x28, 2, 0, 0x23, 8, 0x23, 16]), Some(24), "bra that is not taken");
    assert_eq!(cfa(&[0x2f, 0xfd, 0xff]), None, "an endless loop");
    assert_eq!(cfa(&[0x12, 0x2f, 0xfc, 0xff]), None, "a stack without end");
    assert_eq!(cfa(&[0x2f, 0, 0x80]), None, "a jump to before the beginning");
    assert_eq!(cfa(&[0x13, 0x13]), None, "an empty stack");
    assert_eq!(cfa(&[0xe0]), None, "an unknown operation");
}

#[test]
fn the_frame_of_a_signal_handler_is_passed() {
    // The form that glibc's __restore_rt has: the registers are on the stack.
    let mut section = cie(Cpu::X86_64, b"\x01zRS\0", &[1, 0x1b]);
    let cfa = [0x0f, 4, 0x77, 0xa0, 1, 0x06];
    let registers_at = [0x10, 16, 3, 0x77, 0xa8, 1, 0x10, 6, 3, 0x77, 0xf8, 0];
    add_function(&mut section, FUNCTION, &[&cfa[..], &registers_at].concat());
    let found =
        found(&mut tables(Cpu::X86_64, module(section)), stopped(FUNCTION), registers(Cpu::X86_64));
    assert_eq!(found, x86(saved(SP + 0xa8), saved(SP + 0xa0), saved(SP + 0x78)));
}

#[test]
fn the_caller_of_a_signal_frame_is_the_interrupted_instruction() {
    for cpu in [Cpu::X86_64, Cpu::Aarch64] {
        let (cfa, at_cfa): (&[u8], &[u8]) = match cpu {
            Cpu::X86_64 => (&[0x0c, 7, 64], &[0x80 | 16, 1]),
            Cpu::Aarch64 => (&[0x0c, 31, 64], &[0x80 | 30, 1]),
        };
        let interrupted = |augmentation: &[u8]| {
            let mut section = cie(cpu, augmentation, &[1, 0x1b]);
            let instructions = [cfa, at_cfa].concat();
            add_function(&mut section, FUNCTION, &instructions);
            let mut tables = tables(cpu, module(section));
            let at = CodeAddress::of_return(BIAS + FUNCTION + 8).unwrap();
            let mut after = registers(cpu);
            (tables.caller(at, &mut after, &mut word).unwrap().unwrap(), after)
        };
        let (at, after) = interrupted(b"\x01zRS\0");
        assert_eq!(at, CodeAddress::of_instruction(saved(SP + 56)));
        assert_eq!((at.to_look_up(), at.address()), (after.pc, after.pc));
        assert_eq!((after.sp, after.lr), (SP + 64, 0), "the link register is unknown");
        let (at, after) = interrupted(b"\x01zR\0");
        assert_eq!(at, CodeAddress::of_return(saved(SP + 56)).unwrap());
        assert_eq!(at.to_look_up(), after.pc - 1);
        // Such an instruction may be the first of a function: its row counts, not the one before.
        let mut section = usual_cie(cpu);
        add_function(&mut section, FUNCTION, &[0x0e, 32]);
        add_function(&mut section, FUNCTION + FUNCTION_BYTES, &[0x0e, 48]);
        let mut tables = UnwindTables::new(cpu);
        tables.add(module(section));
        let mut sp = |at| found(&mut tables, at, registers(cpu)).unwrap().unwrap().sp - SP;
        assert_eq!(sp(stopped(FUNCTION + FUNCTION_BYTES)), 48);
    }
}

/// The caller's rbx, and its value, in a function that has called.
fn caller_rbx(instructions: &[u8], rbx: RegisterValue) -> RegisterValue {
    let at = CodeAddress::of_return(BIAS + FUNCTION + FUNCTION_BYTES / 2).unwrap();
    let mut tables = tables(Cpu::X86_64, module(section(Cpu::X86_64, instructions)));
    found(&mut tables, at, Registers { rbx, ..registers(Cpu::X86_64) }).unwrap().unwrap().rbx
}

#[test]
fn rbx_is_found_by_each_rule() {
    use RegisterValue::{Known, SavedAt, Unknown};
    for rbx in [Unknown, Known(7), SavedAt(SP + 0x40)] {
        assert_eq!(caller_rbx(&[0x0e, 32], rbx), rbx, "unset");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x08, 3], rbx), rbx, "same_value");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x83, 2, 0xc3], rbx), rbx, "restore");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x83, 2, 0x06, 3], rbx), rbx, "restore_extended");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x83, 5], rbx), rbx, "popped already");
        let remembered = [0x0a, 0x83, 2, 0x0b, 0x0e, 32];
        assert_eq!(caller_rbx(&remembered, rbx), rbx, "remember_state, restore_state");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x83, 3], rbx), SavedAt(SP + 8), "offset");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x07, 3], rbx), Unknown, "undefined");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x14, 3, 1], rbx), Known(SP + 24), "val_offset");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x09, 3, 6], rbx), Known(FP), "register");
        assert_eq!(caller_rbx(&[0x0e, 32, 0x09, 3, 12], rbx), Unknown, "an unknown register");
        let expression = [0x0e, 32, 0x10, 3, 2, 0x77, 0x10];
        assert_eq!(caller_rbx(&expression, rbx), Known(saved(SP + 16)), "expression");
        let expression = [0x0e, 32, 0x16, 3, 2, 0x77, 0x10];
        assert_eq!(caller_rbx(&expression, rbx), Known(SP + 16), "val_expression");
        let unreadable = [0x0e, 32, 0x10, 3, 2, 0x30, 0x96];
        assert_eq!(caller_rbx(&unreadable, rbx), Unknown, "outside the stack");
    }
}

#[test]
fn a_frame_in_rbx_is_left_by_it() {
    use RegisterValue::{Known, SavedAt, Unknown};
    let by_rbx: &[u8] = &[0x0c, 3, 16];
    let by_expression: &[u8] = &[0x0f, 4, 0x73, 0, 0x23, 16];
    for instructions in [by_rbx, by_expression] {
        let mut tables = tables(Cpu::X86_64, module(section(Cpu::X86_64, instructions)));
        let mut by = |rbx, word: &mut dyn FnMut(u64) -> Option<u64>| {
            let mut after = Registers { rbx, ..registers(Cpu::X86_64) };
            tables.caller(stopped(FUNCTION), &mut after, word).ok()?.map(|_| after)
        };
        let rbx = SP + 0x100;
        let expected = |rbx_after| {
            let after = x86(saved(rbx_after + 8), rbx_after + 16, FP).unwrap().unwrap();
            move |rbx| Some(Registers { rbx, ..after })
        };
        assert_eq!(by(Known(rbx), &mut word), expected(rbx)(Known(rbx)));
        // The word at an address tells the address, so rbx is made to point into the stack.
        let mut with_rbx = |address| if address == SP + 8 { Some(rbx) } else { word(address) };
        assert_eq!(by(SavedAt(SP + 8), &mut with_rbx), expected(rbx)(SavedAt(SP + 8)));
        let unknown = [by(Unknown, &mut word), by(SavedAt(8), &mut word)];
        let by_frame_pointer = (instructions == by_rbx).then_some(FP + 16);
        assert_eq!(unknown.map(|after| after.map(|after| after.sp)), [by_frame_pointer; 2]);
        let fits = by(Known(u64::MAX), &mut word);
        assert_eq!(fits, None, "outside the stack");
    }
}

#[test]
fn rbx_is_unknown_above_a_frame_that_is_left_by_the_frame_pointer() {
    let mut tables = UnwindTables::new(Cpu::X86_64);
    let before = Registers { rbx: RegisterValue::Known(7), ..registers(Cpu::X86_64) };
    let after = found(&mut tables, stopped(FUNCTION), before).unwrap().unwrap();
    assert_eq!((after.sp, after.rbx), (FP + 16, RegisterValue::Unknown));
    // Code that has no frame yet has not saved it.
    tables.add(module(section(Cpu::X86_64, &[])));
    let after = found(&mut tables, stopped(FUNCTION + FUNCTION_BYTES), before).unwrap().unwrap();
    assert_eq!((after.sp, after.rbx), (SP + 8, before.rbx));
}

#[test]
fn entries_of_each_version_and_augmentation_are_read() {
    const INSTRUCTIONS: &[u8] = &[0x0c, 7, 8, 0x80 | 16, 1];
    let with = |head: &[u8], data: &[u8]| {
        let mut section = cie(Cpu::X86_64, head, &[data, INSTRUCTIONS].concat());
        add_function(&mut section, FUNCTION, &[0x0e, 32]);
        found(&mut tables(Cpu::X86_64, module(section)), stopped(FUNCTION), registers(Cpu::X86_64))
    };
    let read = x86(saved(SP + 24), SP + 32, FP);
    assert_eq!(with(b"\x01zR\0", &[1, 0x1b]), read);
    assert_eq!(with(b"\x03zR\0", &[1, 0x1b]), read);
    assert_eq!(with(b"\x04zR\0\x08\0", &[1, 0x1b]), read);
    assert_eq!(with(b"\x01zPLR\0", &[7, 0x9b, 1, 2, 3, 4, 0x1b, 0x1b]), read);
    assert_eq!(with(b"\x01zRSBG\0", &[1, 0x1b]), read);
    assert_eq!(with(b"\x01zRX\0", &[3, 0x1b, 1, 2]), read, "an unknown letter");

    let by_frame_pointer = x86(saved(FP + 8), FP + 16, saved(FP));
    for (head, data) in [
        (&b"\x02zR\0"[..], &[1, 0x1b][..]),
        (b"\x04zR\0\x04\0", &[1, 0x1b]),
        (b"\x01x\0", &[]),
        (b"\x01zR\0", &[1, 0x9b]),
        (b"\x01zR\0", &[200, 0x1b]),
    ] {
        assert_eq!(with(head, data), by_frame_pointer, "{head:?}");
    }
}

#[test]
fn an_entry_of_64_bits_with_absolute_pointers_is_read() {
    let long = |contents: &[u8]| {
        let size = (contents.len() as u64).to_le_bytes();
        [&[0xff; 4][..], &size, contents].concat()
    };
    let mut section = long(b"\0\0\0\0\x01\0\x01\x78\x10\x0c\x07\x08\x90\x01");
    let distance = (section.len() as u32 + 12).to_le_bytes();
    let range = [FUNCTION, FUNCTION_BYTES].map(u64::to_le_bytes);
    section.extend(long(&[&distance[..], &range.concat(), &[0x0e, 32]].concat()));
    let found =
        found(&mut tables(Cpu::X86_64, module(section)), stopped(FUNCTION), registers(Cpu::X86_64));
    assert_eq!(found, x86(saved(SP + 24), SP + 32, FP));
}

/// Returns a section with functions of different frames, and a table of it whose pointers have an
/// encoding.
fn with_header(encoding: u8) -> (Vec<u8>, Vec<u8>) {
    const FUNCTIONS: u64 = 7;
    let mut section = usual_cie(Cpu::X86_64);
    let mut header = vec![1, 0x1b, 0x03, encoding, 0, 0, 0, 0, FUNCTIONS as u8, 0, 0, 0];
    for number in 0..FUNCTIONS {
        // A gap is between two functions.
        let start = FUNCTION + 2 * FUNCTION_BYTES * number;
        for pointer in [start, SECTION + section.len() as u64] {
            let base = match encoding & 0x70 {
                0 => 0,
                0x10 => HEADER + header.len() as u64,
                _ => HEADER,
            };
            let size = super::reader::Encoding(encoding).size().unwrap();
            header.extend(&pointer.wrapping_sub(base).to_le_bytes()[..size]);
        }
        add_function(&mut section, start, &[0x0e, 16 + 8 * number as u8]);
    }
    (section, header)
}

#[test]
fn the_entry_of_each_address_is_found_with_and_without_a_header() {
    for encoding in
        [None, Some(0x3b), Some(0x1b), Some(0x03), Some(0x04), Some(0x3c), Some(0x00), Some(0x02)]
    {
        let (section, header) = with_header(encoding.unwrap_or(0));
        let header =
            encoding.map(|_| (HEADER..HEADER + header.len() as u64, Bytes::Copied(header)));
        let mut tables = tables(Cpu::X86_64, Module { eh_frame_hdr: header, ..module(section) });
        let mut at = |address| {
            found(&mut tables, stopped(address), registers(Cpu::X86_64)).unwrap().unwrap().sp - SP
        };
        for number in 0..7 {
            let start = FUNCTION + 2 * FUNCTION_BYTES * number;
            let expected = 16 + 8 * number;
            assert_eq!([at(start), at(start + FUNCTION_BYTES - 1)], [expected; 2], "{encoding:?}");
            assert_eq!([at(start - 1), at(start + FUNCTION_BYTES)], [8; 2], "{encoding:?}");
        }
    }
}

#[test]
fn a_header_that_cannot_be_searched_is_replaced_by_an_index() {
    let (section, header) = with_header(0x3b);
    for (at, wrong) in [(0, 2), (2, 0xff), (3, 0xff), (3, 0x39), (8, 0), (8, 200), (11, 0xff)] {
        let mut header = header.clone();
        header[at] = wrong;
        let header = Some((HEADER..HEADER + header.len() as u64, Bytes::Copied(header)));
        let mut tables =
            tables(Cpu::X86_64, Module { eh_frame_hdr: header, ..module(section.clone()) });
        let found = found(&mut tables, stopped(FUNCTION), registers(Cpu::X86_64));
        assert_eq!(found, x86(saved(SP + 8), SP + 16, FP), "byte {at} is {wrong}");
    }
}

#[test]
fn without_a_table_the_caller_is_found_by_the_frame_pointer() {
    for cpu in [Cpu::X86_64, Cpu::Aarch64] {
        let mut tables = UnwindTables::new(cpu);
        let caller = found(&mut tables, stopped(FUNCTION), registers(cpu)).unwrap().unwrap();
        assert_eq!((caller.pc, caller.sp, caller.fp), (saved(FP + 8), FP + 16, saved(FP)));
        let fp = |fp| Registers { fp, ..registers(cpu) };
        assert_eq!(found(&mut tables, stopped(FUNCTION), fp(SP - 16)), Err(NoCaller));
        assert_eq!(found(&mut tables, stopped(FUNCTION), fp(u64::MAX - 7)), Err(NoCaller));
        let at_0 = found(&mut tables, stopped(FUNCTION), fp(0));
        assert_eq!(at_0, if cpu == Cpu::X86_64 { Ok(None) } else { Err(NoCaller) });
    }
}

#[test]
fn the_frame_record_that_ends_a_chain_of_aarch64_has_no_caller() {
    let mut tables = UnwindTables::new(Cpu::Aarch64);
    let mut registers = registers(Cpu::Aarch64);
    let mut last = |address| Some(if address == FP { 0 } else { 0x4000 });
    assert_eq!(tables.caller(stopped(FUNCTION), &mut registers, &mut last), Ok(None));
}

#[test]
fn code_between_functions_with_tables_has_no_frame_where_it_is_stopped() {
    let after = FUNCTION + FUNCTION_BYTES;
    let found = |cpu, at| {
        let mut tables = tables(cpu, module(section(cpu, &[])));
        found(&mut tables, at, registers(cpu)).unwrap().unwrap()
    };
    let called = CodeAddress::of_return(BIAS + after + 1).unwrap();
    assert_eq!(found(Cpu::X86_64, stopped(after)).sp, SP + 8);
    assert_eq!(found(Cpu::X86_64, called).sp, FP + 16);
    assert_eq!(found(Cpu::Aarch64, stopped(after)).pc, LR);
    assert_eq!(found(Cpu::Aarch64, called).sp, FP + 16);
}

#[test]
fn a_file_that_is_added_is_used_for_addresses_that_were_looked_up_before() {
    let mut tables = UnwindTables::new(Cpu::X86_64);
    let before = found(&mut tables, stopped(FUNCTION), registers(Cpu::X86_64));
    assert_eq!(before, x86(saved(FP + 8), FP + 16, saved(FP)));
    tables.add(module(section(Cpu::X86_64, &[0x0e, 32])));
    let after = found(&mut tables, stopped(FUNCTION), registers(Cpu::X86_64));
    assert_eq!(after, x86(saved(SP + 24), SP + 32, FP));
}

#[test]
fn the_file_of_an_address_is_found_among_several() {
    let mut tables = UnwindTables::new(Cpu::X86_64);
    for number in [3, 0, 4, 1, 2] {
        let bias = BIAS + 0x10_0000 * number;
        let made = module(section(Cpu::X86_64, &[0x0e, 16 + 8 * number as u8]));
        tables.add(Module { range: bias..bias + 0x1_0000, bias, ..made });
    }
    for number in 0..5 {
        let at = stopped(0x10_0000 * number + FUNCTION);
        let caller = found(&mut tables, at, registers(Cpu::X86_64)).unwrap().unwrap();
        assert_eq!(caller.sp - SP, 16 + 8 * number);
        let outside = stopped(0x10_0000 * number + 0x1_0000);
        assert_eq!(
            found(&mut tables, outside, registers(Cpu::X86_64)).unwrap().unwrap().sp,
            FP + 16
        );
    }
}

#[test]
fn an_address_that_wraps_around_is_not_in_any_file() {
    for address in [0, 1, BIAS, BIAS - 1, u64::MAX] {
        let mut tables = tables(Cpu::X86_64, module(section(Cpu::X86_64, &[])));
        for at in [Some(CodeAddress::of_instruction(address)), CodeAddress::of_return(address)] {
            let _ = at.map(|at| found(&mut tables, at, registers(Cpu::X86_64)));
        }
    }
}

#[test]
fn damaged_tables_and_stacks_cost_callers_only() {
    let mut random = random_below();
    for round in 0..20_000 {
        let cpu = if round % 2 == 0 { Cpu::X86_64 } else { Cpu::Aarch64 };
        let (mut section, mut header) = with_header([0x3b, 0x1b, 0x03, 0x0c][random(4)]);
        if cpu == Cpu::Aarch64 {
            section = usual_cie(cpu);
        }
        let instructions: Vec<u8> = (0..random(60)).map(|_| random(256) as u8).collect();
        add_function(&mut section, FUNCTION, &instructions);
        for bytes in [&mut section, &mut header] {
            for _ in 0..random(4) {
                let at = random(bytes.len());
                match random(3) {
                    0 => bytes[at] ^= 1 << random(8),
                    1 => bytes[at] = random(256) as u8,
                    _ => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff),
                }
            }
        }
        if random(4) == 0 {
            section.truncate(random(section.len() + 1));
        }
        let header = (HEADER..HEADER + header.len() as u64, Bytes::Copied(header));
        let header = (random(2) == 0).then_some(header);
        let mut tables = tables(cpu, Module { eh_frame_hdr: header, ..module(section) });
        for _ in 0..8 {
            let at = BIAS + FUNCTION + random(0x1000) as u64;
            let mut any = || [0, 8, SP, FP, STACK.end, 1 << 63, u64::MAX, u64::MAX - 7][random(8)];
            let rbx = match any() {
                0 => RegisterValue::Unknown,
                value if value % 16 == 8 => RegisterValue::Known(value),
                address => RegisterValue::SavedAt(address),
            };
            let mut registers = Registers { pc: any(), sp: any(), fp: any(), lr: any(), rbx };
            let at = match registers.pc % 16 {
                0 => CodeAddress::of_instruction(at),
                _ => CodeAddress::of_return(at).unwrap(),
            };
            let (before, values) = (registers, [any(), any(), any()]);
            let mut word = |address: u64| match address % 4 {
                3 => None,
                number => Some(values[number as usize]),
            };
            match tables.caller(at, &mut registers, &mut word) {
                Ok(Some(next)) => {
                    assert!(next.address() == registers.pc && registers.sp >= before.sp);
                }
                Ok(None) => assert_eq!(registers, Registers { pc: 0, ..before }),
                Err(NoCaller) => assert_eq!(registers, before),
            }
        }
    }
}
