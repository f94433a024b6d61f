//! `UnwindTables`: finds the caller of a function by the unwind tables of the files that are loaded
//! (framehop).
//!
//! The words of a stack may be those of a thread that runs, or of a damaged core file. Invariants:
//!
//! 1. Every read of a stack goes through the caller's function, which may refuse it.
//! 2. The tables are read within their bounds, and a wrong one costs the caller of a frame, never
//!    more.
//!
//! Both CPUs are compiled for either, because the command reads core files of the other one.

use framehop::aarch64::{CacheAarch64, UnwindRegsAarch64, UnwinderAarch64};
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, FrameAddress, Unwinder as _};
use std::ops::{Deref, Range};

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
}

/// A code address on a stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CodeAddress(FrameAddress);

impl CodeAddress {
    /// Returns the address of an instruction that runs next.
    pub fn of_instruction(pc: u64) -> CodeAddress {
        CodeAddress(FrameAddress::from_instruction_pointer(pc))
    }

    /// Returns a return address: that of the instruction after a call. None if it is 0, which ends
    /// a stack.
    pub fn of_return(address: u64) -> Option<CodeAddress> {
        FrameAddress::from_return_address(address).map(CodeAddress)
    }

    /// Returns the address itself.
    pub fn address(self) -> u64 {
        self.0.address()
    }

    /// Returns an address inside the instruction that runs, or that has called.
    pub fn to_look_up(self) -> u64 {
        self.0.address_for_lookup()
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
    /// Where its code is, before relocation.
    pub text: Option<Range<u64>>,
    /// The bytes of its code. They help in the first and last instructions of functions.
    pub code: Option<Bytes>,
    /// Its section `.eh_frame`, or more than that.
    pub eh_frame: Option<Part>,
    /// Its section `.eh_frame_hdr`.
    pub eh_frame_hdr: Option<Part>,
}

/// A frame whose caller is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoCaller;

/// The unwind tables of all files that a process has loaded.
pub struct UnwindTables(Tables);

enum Tables {
    X86_64(UnwinderX86_64<Bytes>, CacheX86_64),
    Aarch64(UnwinderAarch64<Bytes>, CacheAarch64),
}

impl UnwindTables {
    /// Returns tables without any file.
    pub fn new(cpu: Cpu) -> UnwindTables {
        UnwindTables(match cpu {
            Cpu::X86_64 => Tables::X86_64(UnwinderX86_64::new(), CacheX86_64::new()),
            Cpu::Aarch64 => Tables::Aarch64(UnwinderAarch64::new(), CacheAarch64::new()),
        })
    }

    /// Returns the CPU.
    pub fn cpu(&self) -> Cpu {
        match self.0 {
            Tables::X86_64(..) => Cpu::X86_64,
            Tables::Aarch64(..) => Cpu::Aarch64,
        }
    }

    /// Adds the tables of a file.
    pub fn add(&mut self, module: Module) {
        let Module { range, bias, text, code, eh_frame, eh_frame_hdr } = module;
        let (eh_frame_svma, eh_frame) = eh_frame.unzip();
        let (eh_frame_hdr_svma, eh_frame_hdr) = eh_frame_hdr.unzip();
        // An `svma` (stated virtual memory address) is framehop's name for an address before
        // relocation.
        let sections = ExplicitModuleSectionInfo {
            base_svma: 0,
            text_svma: text,
            text: code,
            eh_frame_svma,
            eh_frame,
            eh_frame_hdr_svma,
            eh_frame_hdr,
            ..Default::default()
        };
        let module = framehop::Module::new(String::new(), range, bias, sections);
        match &mut self.0 {
            Tables::X86_64(unwinder, _) => unwinder.add_module(module),
            Tables::Aarch64(unwinder, _) => unwinder.add_module(module),
        }
    }

    /// Returns the return address of the frame at `at`, whose registers these are, and makes the
    /// registers those of its caller. Returns None at the end of the stack. `word` returns a word
    /// of the stack.
    pub fn caller(
        &mut self,
        at: CodeAddress,
        registers: &mut Registers,
        word: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<Option<u64>, NoCaller> {
        let Registers { pc, sp, fp, lr } = *registers;
        let mut read = |address| word(address).ok_or(());
        let caller = match &mut self.0 {
            Tables::X86_64(unwinder, cache) => {
                let mut own = UnwindRegsX86_64::new(pc, sp, fp);
                let caller = unwinder.unwind_frame(at.0, &mut own, cache, &mut read);
                (registers.sp, registers.fp) = (own.sp(), own.bp());
                caller
            }
            Tables::Aarch64(unwinder, cache) => {
                let mut own = UnwindRegsAarch64::new(lr, sp, fp);
                let caller = unwinder.unwind_frame(at.0, &mut own, cache, &mut read);
                (registers.sp, registers.fp, registers.lr) = (own.sp(), own.fp(), own.lr());
                caller
            }
        };
        let caller = caller.map_err(|_| NoCaller)?;
        registers.pc = caller.unwrap_or(0);
        Ok(caller)
    }
}
