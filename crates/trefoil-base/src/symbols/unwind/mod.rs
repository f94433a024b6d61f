//! `UnwindTables`: finds the caller of a function by the call frame information of the files that are
//! loaded: their sections `.eh_frame`.
//!
//! - `reader.rs` reads numbers and pointers.
//! - `table.rs` finds the entry of an address, `entry.rs` reads it, and `row.rs` runs its
//!   instructions up to the address. The result is cached.
//! - `caller.rs` finds the caller's registers by that, and `expression.rs` computes the expressions
//!   that it needs.
//!
//! The words of a stack may be those of a thread that runs, or of a damaged core file. Invariants:
//!
//! 1. Every read of a stack goes through the function `word`, which may refuse it.
//! 2. The tables are read within their bounds, and a wrong one costs the caller of a frame, never
//!    more.
//! 3. Every loop ends with the bytes that it reads, or after a fixed number of steps.
//!
//! Both CPUs are compiled for either, because the command reads core files of the other one.
//!
//! Rejected: the crate framehop. It is generic in the CPU, the bytes and the reader of gimli, so
//! that its code was compiled with this crate: 2.7 s of CPU time, and 0.7 s for the crate itself,
//! instead of 0.8 s. `trefoil-long-tests` compares the callers of both.

mod caller;
mod entry;
mod expression;
mod reader;
mod row;
mod table;
#[cfg(test)]
mod tests;

use caller::{Above, FrameState, Memory};
use row::Machine;
use std::ops::{Deref, Range};
use table::{Recipe, Table};

/// The CPU that a stack belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cpu {
    /// x86_64.
    X86_64,
    /// aarch64.
    Aarch64,
}

impl Cpu {
    /// The CPU of this process.
    pub const OWN: Cpu = if cfg!(target_arch = "aarch64") { Cpu::Aarch64 } else { Cpu::X86_64 };

    /// Returns the CPU by the number in an ELF file.
    pub fn of_machine(machine: u16) -> Option<Cpu> {
        match machine {
            62 => Some(Cpu::X86_64),
            183 => Some(Cpu::Aarch64),
            _ => None,
        }
    }
}

/// The registers by which callers are found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registers {
    /// The program counter: rip, or pc.
    pub pc: u64,
    /// The stack pointer.
    pub sp: u64,
    /// The frame pointer: rbp, or x29. 0 if it is unknown.
    pub fp: u64,
    /// x30: the return address of the running function of aarch64, if it calls no other function.
    /// 0 if unknown, and on x86_64.
    pub lr: u64,
    /// rbx, by which a few functions of x86_64 find their frame.
    pub rbx: RegisterValue,
}

/// The value of a register that few functions need to find their caller.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum RegisterValue {
    /// It is lost, or the CPU has no such register.
    #[default]
    Unknown,
    /// It is this value.
    Known(u64),
    /// It is on the stack at this address, from where it is read when it is needed.
    SavedAt(u64),
}

/// A code address on a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CodeAddress {
    address: u64,
    is_return: bool,
}

impl CodeAddress {
    /// Returns the address of an instruction that runs next.
    pub fn of_instruction(pc: u64) -> CodeAddress {
        CodeAddress { address: pc, is_return: false }
    }

    /// Returns a return address: that of the instruction after a call. None if it is 0, which ends
    /// a stack.
    pub fn of_return(address: u64) -> Option<CodeAddress> {
        (address != 0).then_some(CodeAddress { address, is_return: true })
    }

    /// Returns the address itself.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Returns an address inside the instruction that runs, or that has called.
    pub fn to_look_up(self) -> u64 {
        self.address - u64::from(self.is_return)
    }

    fn state(self) -> FrameState {
        if self.is_return { FrameState::Called } else { FrameState::Stopped }
    }
}

/// A part of a file in memory.
pub enum Bytes {
    /// Bytes that stay where they are.
    Static(&'static [u8]),
    /// A copy, because the original may be unmapped at any time.
    Copied(Vec<u8>),
}

impl Default for Bytes {
    fn default() -> Bytes {
        Bytes::Static(&[])
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Static(bytes) => bytes,
            Bytes::Copied(bytes) => bytes,
        }
    }
}

/// A section: its addresses before relocation, and its bytes.
pub type Part = (Range<u64>, Bytes);

/// A file that is loaded.
#[derive(Default)]
pub struct Module {
    /// Where it is loaded.
    pub range: Range<u64>,
    /// What is added to an address of the file.
    pub bias: u64,
    /// Its section `.eh_frame`, or more than that.
    pub eh_frame: Option<Part>,
    /// Its section `.eh_frame_hdr`.
    pub eh_frame_hdr: Option<Part>,
}

/// A frame whose caller is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoCaller;

/// The unwind tables of all files that a process has loaded.
pub struct UnwindTables {
    cpu: Cpu,
    /// Sorted by address.
    tables: Vec<Table>,
    /// What was found last, by [`slot`] of the address.
    cache: Box<[Cached; CACHE_LEN]>,
}

const CACHE_LEN: usize = 512;

/// What was found for an address.
#[derive(Clone, Copy)]
struct Cached {
    address: u64,
    recipe: Recipe,
    /// The table that has it. Meaningless if none has.
    table: u32,
}

impl Cached {
    /// The entry of an address that no file has.
    const NONE: Cached =
        Cached { address: u64::MAX, recipe: Recipe::FramePointer, table: u32::MAX };
}

/// Returns the place of an address in the cache.
fn slot(address: u64) -> usize {
    const GOLDEN_RATIO: u64 = 0x9e37_79b9_7f4a_7c15;
    (address.wrapping_mul(GOLDEN_RATIO) >> 32) as usize % CACHE_LEN
}

impl UnwindTables {
    /// Returns tables without any file.
    pub fn new(cpu: Cpu) -> UnwindTables {
        UnwindTables { cpu, tables: Vec::new(), cache: Box::new([Cached::NONE; CACHE_LEN]) }
    }

    /// Returns the CPU.
    pub fn cpu(&self) -> Cpu {
        self.cpu
    }

    /// Adds the tables of a file.
    pub fn add(&mut self, module: Module) {
        let at = self.tables.partition_point(|table| table.start() < module.range.start);
        self.tables.insert(at, Table::new(module));
        self.cache.fill(Cached::NONE);
    }

    /// Returns where the caller of the frame at `at` is, whose registers these are, and makes the
    /// registers those of the caller. That is a return address, or the instruction that a signal
    /// has interrupted. Returns None at the end of the stack. `word` returns a word of the stack.
    pub fn caller(
        &mut self,
        at: CodeAddress,
        registers: &mut Registers,
        word: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<Option<CodeAddress>, NoCaller> {
        let address = at.to_look_up();
        let slot = slot(address);
        if self.cache[slot].address != address {
            self.cache[slot] = self.found(address);
        }
        let Cached { recipe, table, .. } = &self.cache[slot];
        let eh_frame = || self.tables.get(*table as usize).map_or(&[][..], Table::eh_frame);
        let mut machine = Machine { cpu: self.cpu, pc: at.address, registers };
        let memory = &mut Memory { word, eh_frame: &eh_frame };
        match machine.enter_caller(recipe, at.state(), memory)? {
            Above::Caller => {
                let is_return = !recipe.is_signal_frame();
                Ok(Some(CodeAddress { address: registers.pc, is_return }))
            }
            Above::End => {
                registers.pc = 0;
                Ok(None)
            }
        }
    }

    /// Returns how the caller of the function at an address is found.
    #[inline(never)]
    fn found(&mut self, address: u64) -> Cached {
        let last = self.tables.partition_point(|table| table.start() <= address).wrapping_sub(1);
        let table = self.tables.get_mut(last).filter(|table| table.contains(address));
        let recipe = table.map_or(Recipe::FramePointer, |table| table.recipe(address, self.cpu));
        Cached { address, recipe, table: last as u32 }
    }
}
