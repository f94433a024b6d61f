//! The stack of one goroutine: where it is, and the code addresses on it.
//!
//! The registers of a suspended goroutine are on its stack; those of a running one are its
//! thread's, if the thread is blocked in the kernel or stopped. The memory is copied in parts: most
//! stacks need one read, and a million goroutines are a million reads.

use super::{M, Reader, Stack};
use crate::inspect::memory::{Process, u32_at, u64_at};
use crate::inspect::stacks::{Innermost, SpecialCode, Trampoline, Unwinder};
use trefoil_base::symbols::{RegisterValue, Registers};

/// Bytes of a stack that are read at once; deeper frames are read when they are needed.
const STACK_BYTES: u64 = 2 << 10;
/// How much of that is below the word that is needed: a caller's registers are near its frame.
const STACK_BYTES_BELOW: u64 = 256;
/// Bytes of the header of a stack.
const STACK_TOP_BYTES: usize = 64;

impl Reader<'_> {
    /// Unwinds the stack of a goroutine.
    pub(super) fn stack(&self, g: &[u8], running: Option<&M>, unwinder: &mut Unwinder) -> Stack {
        let at = &self.at;
        let word = |offset: u64| u64_at(g, offset as usize);
        let state = self.state(g);
        let suspended = state == at.state_waiting || state == at.state_runnable;
        if suspended && word(at.g_tp) == 0 {
            return Stack::NotStarted;
        }
        let top = word(at.g_stack);
        let bounds = || {
            let mut header = [0; STACK_TOP_BYTES];
            self.process.read(top, &mut header).ok()?;
            let field = |offset: u64, bytes: u64| {
                let end = offset.checked_add(bytes)?;
                (end <= STACK_TOP_BYTES as u64).then_some(offset as usize)
            };
            let base = u64_at(&header, field(at.stack_base, 8)?);
            let below = u64::from(u32_at(&header, field(at.stack_sp_below, 4)?));
            Some((base.checked_add(at.guard_bytes)?, top.checked_sub(below)?))
        };
        let unreadable = match self.process.is_live() {
            true => Stack::Unknown,
            false => Stack::NotInCore,
        };
        let Some((low, high)) = bounds() else { return unreadable };
        let on_stack = |sp: u64| sp.is_multiple_of(8) && sp >= low && sp < high;
        let mut memory;
        let registers = if suspended {
            let sp = word(at.g_sp);
            if !on_stack(sp) {
                return unreadable;
            }
            memory = StackMemory::new(self.process, sp, high);
            let mut saved = |offset| memory.word(sp.checked_add(offset)?);
            let (Some(pc), Some(fp)) = (saved(at.saved_pc), saved(at.saved_fp)) else {
                return unreadable;
            };
            if pc == at.entry_stub {
                return Stack::NotStarted;
            }
            let rbx = at.saved_rbx.and_then(|offset| sp.checked_add(offset));
            let rbx = rbx.map_or(RegisterValue::Unknown, RegisterValue::SavedAt);
            Registers { pc, sp: sp.wrapping_add(at.saved_bytes), fp, lr: pc, rbx }
        } else {
            match running.and_then(|m| m.thread.registers) {
                Some(registers) if on_stack(registers.sp) => {
                    memory = StackMemory::new(self.process, registers.sp, high);
                    registers
                }
                _ => return Stack::Running,
            }
        };
        let innermost = if suspended { Innermost::Call } else { Innermost::Instruction };
        let code = at.trampoline..at.trampoline_end;
        let trampoline = Trampoline { code, registers: at.trampoline_registers };
        let code = SpecialCode { entry: at.entry_stub, trampoline };
        let addresses =
            unwinder.unwind(registers, innermost, &code, |address| memory.word(address));
        if addresses.is_empty() { unreadable } else { Stack::Addresses(addresses) }
    }
}

/// A stack, of which a part was copied.
struct StackMemory<'a> {
    process: &'a Process,
    start: u64,
    end: u64,
    /// Where the copy begins.
    copied_from: u64,
    bytes: Vec<u8>,
}

impl<'a> StackMemory<'a> {
    fn new(process: &'a Process, start: u64, end: u64) -> StackMemory<'a> {
        StackMemory { process, start, end, copied_from: start, bytes: Vec::new() }
    }

    /// Returns the word at an address, or None if it is not on the stack.
    fn word(&mut self, address: u64) -> Option<u64> {
        let inside = address >= self.start && address.checked_add(8)? <= self.end;
        if !inside || !address.is_multiple_of(8) {
            return None;
        }
        let is_copied = address >= self.copied_from
            && address + 8 - self.copied_from <= self.bytes.len() as u64;
        if !is_copied {
            self.copied_from = address.saturating_sub(STACK_BYTES_BELOW).max(self.start);
            self.bytes.resize(STACK_BYTES.min(self.end - self.copied_from) as usize, 0);
            if self.process.read(self.copied_from, &mut self.bytes).is_err() {
                // The core file may have a part of it.
                self.bytes.clear();
                return self.process.u64(address).ok();
            }
        }
        Some(u64_at(&self.bytes, (address - self.copied_from) as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_is_read_in_parts() {
        let process = Process::open(&std::process::id().to_string()).unwrap();
        let words: Vec<u64> = (0..100_000).collect();
        let start = words.as_ptr() as u64;
        let address = |i: u64| start + 8 * i;
        // As if the stack were as large as the address space.
        let end = !7;
        let mut stack = StackMemory::new(&process, start, end);
        for i in [0, 1, 2047, 2048, 2040, 99_000, 5, 60_000, 59_990] {
            assert_eq!(stack.word(address(i)), Some(i));
            assert!(stack.bytes.len() as u64 <= STACK_BYTES);
        }
        assert_eq!(stack.word(address(1) + 4), None);
        assert_eq!(stack.word(start - 8), None);
        assert_eq!(stack.word(end), None);
        assert_eq!(stack.word(end - 8), None);
        assert!(stack.bytes.len() as u64 <= STACK_BYTES);
    }
}
