//! Finds the callers on a stack, and the names and lines of code addresses, from the files of the
//! process.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use framehop::aarch64::{CacheAarch64, UnwindRegsAarch64, UnwinderAarch64};
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, FrameAddress, Unwinder as _};
use trefoil::observer::{Elf, FrameKind, SymbolFile, demangle, frame_kind, is_own_source};

use super::memory::{Cpu, Process, Registers, read_elf};

/// Frames that are followed at most, the runtime's own included.
const FRAMES_MAX: usize = 256;
/// How far above a frame its frame record is searched for, if no register tells.
const RECORD_SEARCH_BYTES: u64 = 16 << 10;
/// The bytes of the code that calls a goroutine's first function.
const ENTRY_BYTES: u64 = 16;
/// Frames of a stack that are shown at most.
const SHOWN_MAX: usize = 64;

/// The unwind tables of all files of a process.
pub(super) struct Unwinder {
    tables: Tables,
    modules: Vec<Module>,
    resolved: HashMap<u64, Vec<(FrameKind, Arc<Frame>)>>,
}

/// The unwind tables, as the process's CPU needs them.
enum Tables {
    X86_64(UnwinderX86_64<&'static [u8]>, CacheX86_64),
    Aarch64(UnwinderAarch64<&'static [u8]>, CacheAarch64),
}

/// A file that is loaded: the program or a library.
struct Module {
    start: u64,
    end: u64,
    /// What is added to an address of the file.
    bias: u64,
    path: PathBuf,
    bytes: &'static [u8],
    /// Its code, and the address in the file where that begins.
    text: Option<(u64, &'static [u8])>,
    /// Read when a first address is looked up.
    symbols: Option<SymbolFile>,
}

/// One call.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Frame {
    /// The demangled name, or the address if there is no name.
    pub(super) name: String,
    /// Empty if unknown.
    pub(super) file: String,
    /// 0 if unknown.
    pub(super) line: u32,
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

impl Frame {
    /// Returns whether it is code of std or of trefoil: the program called it, and its caller says
    /// more.
    pub(super) fn is_library(&self) -> bool {
        let name = self.name.trim_start_matches('<');
        let parts = ["trefoil::", "std::", "core::", "alloc::"];
        parts.iter().any(|part| name.starts_with(part))
            || self.file.contains("/library/std/src/")
            || self.file.contains("/library/core/src/")
            || self.file.contains("/library/alloc/src/")
            || is_own_source(&self.file, "")
    }
}

impl Unwinder {
    pub(super) fn new(process: &Process) -> Unwinder {
        let mut ranges: BTreeMap<&Path, (u64, u64)> = BTreeMap::new();
        for mapping in &process.mappings {
            let base = mapping.start.saturating_sub(mapping.offset);
            let range = ranges.entry(&mapping.path).or_insert((base, mapping.end));
            *range = (range.0.min(base), range.1.max(mapping.end));
        }
        let mut this = Unwinder {
            tables: match process.cpu {
                Cpu::X86_64 => Tables::X86_64(UnwinderX86_64::new(), CacheX86_64::new()),
                Cpu::Aarch64 => Tables::Aarch64(UnwinderAarch64::new(), CacheAarch64::new()),
            },
            modules: Vec::new(),
            resolved: HashMap::new(),
        };
        for (path, (start, end)) in ranges {
            // A file that is gone, or is data, has no frames.
            this.add(path, start, end);
        }
        this
    }

    fn add(&mut self, path: &Path, start: u64, end: u64) -> Option<()> {
        // Kept until the command ends.
        let bytes: &'static [u8] = read_elf(path)?.leak();
        let elf = Elf::parse(bytes)?;
        let loads = elf.segments().filter(|s| s.kind == libc::PT_LOAD);
        let first = loads.map(|s| s.address & !0xfff).min()?;
        let bias = start.wrapping_sub(first);
        let section = |name: &str| {
            let section = elf.section(name)?;
            let range = section.address..section.address.saturating_add(section.size);
            Some((range, section.bytes))
        };
        let (eh_frame_svma, eh_frame) = section(".eh_frame").unzip();
        let (eh_frame_hdr_svma, eh_frame_hdr) = section(".eh_frame_hdr").unzip();
        let (text_svma, text) = section(".text").unzip();
        let module = framehop::Module::new(
            path.display().to_string(),
            start..end,
            bias,
            ExplicitModuleSectionInfo {
                base_svma: 0,
                text_svma: text_svma.clone(),
                text,
                eh_frame_svma,
                eh_frame,
                eh_frame_hdr_svma,
                eh_frame_hdr,
                ..Default::default()
            },
        );
        match &mut self.tables {
            Tables::X86_64(unwinder, _) => unwinder.add_module(module),
            Tables::Aarch64(unwinder, _) => unwinder.add_module(module),
        }
        let text = text_svma.zip(text).map(|(range, text)| (range.start, text));
        let path = path.into();
        self.modules.push(Module { start, end, bias, path, bytes, text, symbols: None });
        Some(())
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
            let registers = Registers { pc, sp: at + 16, fp, lr: pc };
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
        let module = self.modules.iter().find(|m| (m.start..m.end).contains(&pc));
        let Some(before) = module.and_then(|m| m.code_before(pc)) else { return false };
        let last = |n: usize| before.len().checked_sub(n).map(|at| before[at]);
        match self.tables {
            // call rel32; or call with a register or memory: ff /2, with up to 5 bytes more.
            Tables::X86_64(..) => {
                let is_indirect =
                    |n| last(n) == Some(0xff) && last(n - 1).is_some_and(|b| b >> 3 & 7 == 2);
                last(5) == Some(0xe8) || (2..=7).any(is_indirect)
            }
            // bl; or blr.
            Tables::Aarch64(..) => before.last_chunk().is_some_and(|&bytes| {
                let instruction = u32::from_le_bytes(bytes);
                instruction >> 26 == 0b10_0101 || instruction & 0xffff_fc1f == 0xd63f_0000
            }),
        }
    }

    /// Unwinds with all registers. Also returns the stack pointer of the last frame.
    fn unwind_from(
        &mut self,
        registers: Registers,
        innermost: Innermost,
        code: &SpecialCode,
        word: Word<'_>,
    ) -> (Vec<u64>, u64) {
        let trampoline = &code.trampoline;
        let Registers { pc, sp, fp, lr } = registers;
        let first = match innermost {
            Innermost::Call => FrameAddress::from_return_address(pc),
            Innermost::Instruction => Some(FrameAddress::from_instruction_pointer(pc)),
        };
        match &mut self.tables {
            Tables::X86_64(unwinder, cache) => {
                let mut registers = UnwindRegsX86_64::new(pc, sp, fp);
                let stopped = |_: &_, _: Word<'_>| None;
                let frames =
                    callers(unwinder, cache, &mut registers, first, trampoline, word, stopped);
                (frames, registers.sp())
            }
            Tables::Aarch64(unwinder, cache) => {
                let mut registers = UnwindRegsAarch64::new(lr, sp, fp);
                let stopped = |registers: &UnwindRegsAarch64, word: Word<'_>| {
                    let saved = registers.sp().wrapping_add(trampoline.registers?);
                    let mut register = |number: u64| word(saved.wrapping_add(8 * number));
                    let [fp, lr, sp, pc] = [29, 30, 31, 32].map(&mut register);
                    Some((UnwindRegsAarch64::new(lr?, sp?, fp?), pc?))
                };
                let frames =
                    callers(unwinder, cache, &mut registers, first, trampoline, word, stopped);
                (frames, registers.sp())
            }
        }
    }

    /// Returns the frames at `addresses`, innermost first, without those of the runtime at both
    /// ends.
    pub(super) fn frames(&mut self, addresses: &[u64]) -> Vec<Arc<Frame>> {
        let mut inner = true;
        let mut shown = Vec::new();
        for &address in addresses {
            if !self.resolved.contains_key(&address) {
                let frames = self.resolve(address);
                self.resolved.insert(address, frames);
            }
            for (kind, frame) in &self.resolved[&address] {
                inner &= *kind == FrameKind::Runtime;
                if !inner && *kind == FrameKind::User && shown.len() < SHOWN_MAX {
                    shown.push(frame.clone());
                }
            }
        }
        shown
    }

    fn resolve(&mut self, address: u64) -> Vec<(FrameKind, Arc<Frame>)> {
        let module = self.modules.iter_mut().find(|m| (m.start..m.end).contains(&address));
        let mut frames = module.map(|m| m.resolve(address)).unwrap_or_default();
        if frames.is_empty() {
            frames.push(Frame { name: format!("{address:#x}"), file: String::new(), line: 0 });
        }
        let with_kind = |frame: Frame| (frame_kind(&frame.name, &frame.file), Arc::new(frame));
        frames.into_iter().map(with_kind).collect()
    }
}

impl SpecialCode {
    /// Returns whether the calls lead to the end of a goroutine's stack.
    fn is_whole(&self, frames: &[u64]) -> bool {
        let entry = self.entry..self.entry.saturating_add(ENTRY_BYTES);
        frames.last().is_some_and(|last| entry.contains(last))
    }
}

/// Reads a word of a stack.
type Word<'a> = &'a mut dyn FnMut(u64) -> Option<u64>;

/// Returns the code addresses of the calls on a stack; see [`Unwinder::unwind`]. `stopped` returns
/// the registers and the code address of the goroutine whose trampoline has these registers, or
/// None if the unwind tables describe it.
fn callers<U: framehop::Unwinder>(
    unwinder: &U,
    cache: &mut U::Cache,
    registers: &mut U::UnwindRegs,
    first: Option<FrameAddress>,
    trampoline: &Trampoline,
    word: Word<'_>,
    stopped: impl Fn(&U::UnwindRegs, Word<'_>) -> Option<(U::UnwindRegs, u64)>,
) -> Vec<u64> {
    let mut frames = Vec::new();
    let mut next = first;
    while let Some(address) = next
        && frames.len() < FRAMES_MAX
    {
        frames.push(address.address_for_lookup());
        let in_trampoline = trampoline.code.contains(&address.address());
        let goroutine = if in_trampoline { stopped(registers, word) } else { None };
        let caller = match goroutine {
            Some((its_registers, pc)) => {
                *registers = its_registers;
                pc
            }
            None => {
                let mut read = |address| word(address).ok_or(());
                match unwinder.unwind_frame(address, registers, cache, &mut read) {
                    Ok(Some(caller)) => caller,
                    _ => break,
                }
            }
        };
        // A goroutine that was stopped by a signal continues at this instruction, which may be the
        // first of a function.
        next = if in_trampoline {
            Some(FrameAddress::from_instruction_pointer(caller))
        } else {
            FrameAddress::from_return_address(caller)
        };
    }
    frames
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
                frames.push(Frame { name, file: String::new(), line: 0 });
            }
        }
        frames.retain(|frame| !frame.name.is_empty());
        frames
    }
}
