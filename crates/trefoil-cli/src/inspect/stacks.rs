//! Finds the callers on a stack, and the names and lines of code addresses, from the files of the
//! process.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use trefoil_base::symbols::{
    Bytes, CodeAddress, Cpu, Frame, RegisterValue, Registers, Resolved, SymbolFile, UnwindTables,
    demangle, shown,
};

use super::files::{LoadedFile, LoadedFiles};
use super::images::Image;

/// Frames that are followed at most, the runtime's own included.
const FRAMES_MAX: usize = 256;
/// How far above a frame its frame record is searched for, if no register tells.
const RECORD_SEARCH_BYTES: u64 = 16 << 10;
/// The bytes of the code that calls a goroutine's first function.
const ENTRY_BYTES: u64 = 16;

/// The unwind tables of all files of a process.
pub(super) struct Unwinder {
    tables: UnwindTables,
    modules: Vec<Module>,
    resolved: HashMap<u64, Vec<Resolved>>,
}

/// A place where a file is loaded.
struct Module {
    range: Range<u64>,
    /// What is added to an address of the file.
    bias: u64,
    path: PathBuf,
    bytes: &'static [u8],
    /// Its code, and the address in the file where that begins.
    text: Option<(u64, &'static [u8])>,
    /// Read when a first address is looked up.
    symbols: Option<SymbolFile>,
}

/// The parts of the runtime's code that the unwind tables do not suffice for.
pub(super) struct SpecialCode {
    /// What calls a goroutine's first function: the end of each stack.
    pub(super) entry: u64,
    pub(super) trampoline: Trampoline,
}

/// The code in which a goroutine is that was stopped by a signal.
pub(super) struct Trampoline {
    pub(super) code: Range<u64>,
    /// Where its frame has the registers of the goroutine on aarch64, counted from its stack
    /// pointer: x0 to x30, sp, pc. Unwind tables cannot describe a caller whose return address is
    /// not in x30.
    pub(super) registers: Option<u64>,
}

/// What the innermost address of a stack is.
#[derive(Clone, Copy)]
pub(super) enum Innermost {
    /// The instruction after a call.
    Call,
    /// The instruction that the thread is at.
    Instruction,
}

impl Unwinder {
    pub(super) fn new(cpu: Cpu, loaded: &LoadedFiles) -> Unwinder {
        let mut this = Unwinder {
            tables: UnwindTables::new(cpu),
            modules: Vec::new(),
            resolved: HashMap::new(),
        };
        loaded.files.iter().for_each(|file| this.add(file));
        this
    }

    /// Changes the files to those that are loaded now. Keeps the symbols of those that were before.
    pub(super) fn update(&mut self, loaded: &LoadedFiles) {
        let mut before = std::mem::replace(self, Unwinder::new(self.tables.cpu(), loaded)).modules;
        for module in &mut self.modules {
            let same = before.iter_mut().find(|old| std::ptr::eq(old.bytes, module.bytes));
            module.symbols = same.and_then(|old| old.symbols.take());
        }
    }

    fn add(&mut self, file: &LoadedFile) {
        let LoadedFile { path, bytes, elf, images } = file;
        let section = |name: &str| {
            let section = elf.section(name)?;
            let range = section.address..section.address.saturating_add(section.size);
            Some((range, section.bytes))
        };
        let part = |name: &str| section(name).map(|(range, bytes)| (range, Bytes::Static(bytes)));
        let text = section(".text").map(|(range, bytes)| (range.start, bytes));
        for Image { bias, range } in images.iter().cloned() {
            self.tables.add(trefoil_base::symbols::Module {
                range: range.clone(),
                bias,
                eh_frame: part(".eh_frame"),
                eh_frame_hdr: part(".eh_frame_hdr"),
            });
            let path = path.clone();
            self.modules.push(Module { range, bias, path, bytes, text, symbols: None });
        }
    }

    /// Returns the code addresses of the calls on a stack, innermost first.
    ///
    /// Of a live thread only the stack pointer and the program counter are known. std's functions
    /// find their callers by the frame pointer, and so do all on aarch64. Then the frame record, a
    /// pair of the caller's frame pointer and the return address, is searched for on the stack. The
    /// first one counts from which the calls lead to the end of the stack.
    pub(super) fn unwind(
        &mut self,
        registers: Registers,
        innermost: Innermost,
        code: &SpecialCode,
        mut word: impl FnMut(u64) -> Option<u64>,
    ) -> Vec<u64> {
        let (mut frames, sp) = self.unwind_from(registers, innermost, code, &mut word);
        if registers.fp != 0 || code.is_whole(&frames) || frames.len() >= FRAMES_MAX {
            return frames;
        }
        let candidates = (sp..sp.saturating_add(RECORD_SEARCH_BYTES)).step_by(8);
        let callers = candidates.map_while(|at| Some((at, word(at)?))).collect::<Vec<_>>();
        for pair in callers.windows(2) {
            let [(at, fp), (_, pc)] = [pair[0], pair[1]];
            if !self.is_after_call(pc) || (fp != 0 && fp <= at) {
                continue;
            }
            let rbx = RegisterValue::Unknown;
            let registers = Registers { pc, sp: at + 16, fp, lr: pc, rbx };
            let (rest, _) = self.unwind_from(registers, Innermost::Call, code, &mut word);
            if code.is_whole(&rest) {
                frames.extend(rest);
                break;
            }
        }
        frames
    }

    /// Returns whether `pc` is the address of the instruction after a call.
    fn is_after_call(&self, pc: u64) -> bool {
        let module = self.modules.iter().find(|m| m.range.contains(&pc));
        let Some(before) = module.and_then(|m| m.code_before(pc)) else { return false };
        let last = |n: usize| before.len().checked_sub(n).map(|at| before[at]);
        match self.tables.cpu() {
            // call rel32; or call with a register or memory: ff /2, with up to 5 bytes more.
            Cpu::X86_64 => {
                let is_indirect =
                    |n| last(n) == Some(0xff) && last(n - 1).is_some_and(|b| b >> 3 & 7 == 2);
                last(5) == Some(0xe8) || (2..=7).any(is_indirect)
            }
            // bl; or blr.
            Cpu::Aarch64 => before.last_chunk().is_some_and(|&bytes| {
                let instruction = u32::from_le_bytes(bytes);
                instruction >> 26 == 0b10_0101 || instruction & 0xffff_fc1f == 0xd63f_0000
            }),
        }
    }

    /// Unwinds with all registers. Also returns the stack pointer of the last frame.
    fn unwind_from(
        &mut self,
        mut registers: Registers,
        innermost: Innermost,
        code: &SpecialCode,
        word: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> (Vec<u64>, u64) {
        let mut next = match innermost {
            Innermost::Call => CodeAddress::of_return(registers.pc),
            Innermost::Instruction => Some(CodeAddress::of_instruction(registers.pc)),
        };
        let mut frames = Vec::new();
        while let Some(at) = next
            && frames.len() < FRAMES_MAX
        {
            frames.push(at.to_look_up());
            let in_trampoline = code.trampoline.code.contains(&at.address());
            let stopped = if in_trampoline {
                code.trampoline.stopped_registers(&registers, word)
            } else {
                None
            };
            next = match stopped {
                Some(stopped) => {
                    registers = stopped;
                    // A goroutine that was stopped by a signal continues at this instruction,
                    // which may be the first of a function.
                    Some(CodeAddress::of_instruction(stopped.pc))
                }
                None => self.tables.caller(at, &mut registers, word).ok().flatten(),
            };
        }
        (frames, registers.sp)
    }

    /// Returns the frames at `addresses`, innermost first, without those of the runtime at both
    /// ends.
    pub(super) fn frames(&mut self, addresses: &[u64]) -> Vec<Arc<Frame>> {
        for &address in addresses {
            if !self.resolved.contains_key(&address) {
                let frames = self.resolve(address);
                self.resolved.insert(address, frames);
            }
        }
        shown(addresses.iter().flat_map(|address| &self.resolved[address]))
    }

    fn resolve(&mut self, address: u64) -> Vec<Resolved> {
        let module = self.modules.iter_mut().find(|m| m.range.contains(&address));
        let mut frames = module.map(|m| m.resolve(address)).unwrap_or_default();
        if frames.is_empty() {
            frames.push(Frame::nameless(format!("{address:#x}")));
        }
        frames.into_iter().map(Frame::resolved).collect()
    }
}

impl SpecialCode {
    /// Returns whether the calls lead to the end of a goroutine's stack.
    fn is_whole(&self, frames: &[u64]) -> bool {
        let entry = self.entry..self.entry.saturating_add(ENTRY_BYTES);
        frames.last().is_some_and(|last| entry.contains(last))
    }
}

impl Trampoline {
    /// Returns the registers of the goroutine whose trampoline has these. None if the unwind tables
    /// describe it.
    fn stopped_registers(
        &self,
        registers: &Registers,
        word: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Option<Registers> {
        let saved = registers.sp.wrapping_add(self.registers?);
        let mut register = |number: u64| word(saved.wrapping_add(8 * number));
        let [fp, lr, sp, pc] = [29, 30, 31, 32].map(&mut register);
        Some(Registers { pc: pc?, sp: sp?, fp: fp?, lr: lr?, rbx: RegisterValue::Unknown })
    }
}

impl Module {
    /// Returns its code up to an address, which lies in it.
    fn code_before(&self, address: u64) -> Option<&'static [u8]> {
        let (start, text) = self.text?;
        let len = address.checked_sub(self.bias)?.checked_sub(start)?;
        text.get(..usize::try_from(len).ok()?)
    }

    /// Returns the calls at an address: several if functions were inlined.
    fn resolve(&mut self, address: u64) -> Vec<Frame> {
        let probe = address.wrapping_sub(self.bias);
        if self.symbols.is_none() {
            // A file of another process may name any file: no other is opened.
            self.symbols = SymbolFile::new(self.bytes);
        }
        let mut frames = Vec::new();
        let mut function = None;
        if let Some(symbols) = &mut self.symbols {
            symbols.calls(probe, &mut |call| {
                frames.push(Frame {
                    name: call.name.map(demangle).unwrap_or_default(),
                    file: call.file.to_owned(),
                    line: call.line,
                });
            });
            function = symbols.function(probe).map(demangle);
        }
        // The symbol has the full path, which line tables alone do not have.
        match (frames.last_mut(), function) {
            (Some(outermost), Some(name)) => outermost.name = name,
            // A symbol alone is a frame already.
            (None, Some(_)) | (Some(_), None) => {}
            (None, None) => {
                let file = self.path.file_name().unwrap_or_default().display().to_string();
                let name = format!("{address:#x} in {file}");
                frames.push(Frame::nameless(name));
            }
        }
        frames.retain(|frame| !frame.name.is_empty());
        frames
    }
}
