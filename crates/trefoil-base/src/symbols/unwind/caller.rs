//! Finds the registers of a caller: by a row of a table, or by the frame pointer.
//!
//! The words of the stack may be meaningless. Nothing here loops, and the stack pointer grows from
//! frame to frame, so that a stack has an end.

use super::expression::evaluate;
use super::row::{Cfa, Machine, Row, Rule};
use super::table::Recipe;
use super::{Cpu, NoCaller, RegisterValue, Registers};

/// How the frame was left whose caller is wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameState {
    /// It is stopped at any instruction.
    Stopped,
    /// It has called the next inner function.
    Called,
}

/// The stack of a frame, and the section that expressions are read from.
pub(super) struct Memory<'a> {
    pub(super) word: &'a mut dyn FnMut(u64) -> Option<u64>,
    pub(super) eh_frame: &'a dyn Fn() -> &'a [u8],
}

/// What is above a frame whose caller is not unknown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Above {
    Caller,
    /// Nothing: it is the outermost frame.
    End,
}

impl Machine<'_> {
    /// Makes the registers those of the caller, if there is one.
    #[inline]
    pub(super) fn enter_caller(
        &mut self,
        recipe: &Recipe,
        state: FrameState,
        memory: &mut Memory<'_>,
    ) -> Result<Above, NoCaller> {
        match (recipe, state) {
            (Recipe::Row(row), _) => self.enter_caller_by_row(row, state, memory),
            (Recipe::NoFrameYet, FrameState::Stopped) => {
                let Registers { sp, fp, lr, .. } = *self.registers;
                let (return_address, sp) = match self.cpu {
                    Cpu::X86_64 => ((memory.word)(sp), sp.checked_add(8)),
                    Cpu::Aarch64 => (Some(lr), Some(sp)),
                };
                let return_address = return_address.ok_or(NoCaller)?;
                let is_leaf = self.cpu == Cpu::Aarch64;
                self.set(return_address, sp.ok_or(NoCaller)?, fp, is_leaf)
            }
            (Recipe::NoFrameYet | Recipe::FramePointer, _) => {
                self.enter_caller_by_frame_pointer(memory)
            }
        }
    }

    /// On both CPUs a frame pointer is the address of the caller's frame pointer, above which the
    /// return address is.
    fn enter_caller_by_frame_pointer(
        &mut self,
        memory: &mut Memory<'_>,
    ) -> Result<Above, NoCaller> {
        let fp = self.registers.fp;
        if self.is_outermost() {
            return Ok(Above::End);
        }
        let sp = fp.checked_add(16).ok_or(NoCaller)?;
        let return_address = (memory.word)(sp - 8).ok_or(NoCaller)?;
        let caller_fp = (memory.word)(fp).ok_or(NoCaller)?;
        // Code of x86_64 may use the register for anything else, so there the caller's is unchecked.
        if self.cpu == Cpu::Aarch64 {
            if caller_fp == 0 {
                return Ok(Above::End);
            }
            if caller_fp <= fp {
                return Err(NoCaller);
            }
        }
        let above = self.set(return_address, sp, caller_fp, false)?;
        if above == Above::Caller {
            // The function may have saved it anywhere, and used it for anything else.
            self.registers.rbx = RegisterValue::Unknown;
        }
        Ok(above)
    }

    /// Returns whether the frame pointer says that no frame is above. The outermost frame of x86_64
    /// has 0 in that register; on aarch64, the frame record of the outermost frame has it.
    fn is_outermost(&self) -> bool {
        self.cpu == Cpu::X86_64 && self.registers.fp == 0
    }

    #[inline]
    fn enter_caller_by_row(
        &mut self,
        row: &Row,
        state: FrameState,
        memory: &mut Memory<'_>,
    ) -> Result<Above, NoCaller> {
        let Registers { fp, lr, .. } = *self.registers;
        let is_unset = row.return_address == Rule::Unset;
        if row.return_address == Rule::Undefined || (is_unset && self.cpu == Cpu::X86_64) {
            return Ok(Above::End);
        }
        let cfa = match row.cfa {
            Cfa::Register(number, offset) => {
                if number == self.cpu.numbers().fp && self.is_outermost() {
                    return Ok(Above::End);
                }
                // Code that keeps its frame in another register may have left the frame pointer
                // as it was.
                let Some(value) = self.register(number, memory.word) else {
                    return self.enter_caller_by_frame_pointer(memory);
                };
                value.checked_add_signed(offset.into())
            }
            Cfa::Expression(at) => evaluate((memory.eh_frame)(), at, None, self, memory.word),
        };
        let cfa = cfa.ok_or(NoCaller)?;
        // On aarch64 a call puts it into a register, and the next call overwrites that.
        let is_leaf = self.cpu == Cpu::Aarch64
            && state == FrameState::Stopped
            && matches!(row.return_address, Rule::Unset | Rule::Same);
        let return_address = match row.return_address {
            _ if is_leaf => Some(lr),
            rule => self.value(rule, cfa, memory),
        };
        let caller_fp = match row.fp {
            Rule::Unset | Rule::Same | Rule::Undefined => Some(fp),
            rule => match self.value(rule, cfa, memory) {
                // The function may have restored it already. Tables need not say so, but the word
                // is below the stack pointer then, where it may not be readable.
                None if state == FrameState::Stopped => Some(fp),
                // In a register that is unknown. The stack pointer may be all that is needed.
                None if matches!(rule, Rule::In(_)) => Some(fp),
                value => value,
            },
        };
        let return_address = return_address.ok_or(NoCaller)?;
        let caller_fp = caller_fp.ok_or(NoCaller)?;
        let rbx = self.saved_rbx(row.rbx, cfa, memory);
        let above = self.set(return_address, cfa, caller_fp, is_leaf)?;
        if above == Above::End {
            return Ok(above);
        }
        if let Some(rbx) = rbx {
            self.registers.rbx = rbx;
        }
        if row.is_signal_frame {
            // What was in it when the signal came is not in the table.
            self.registers.lr = 0;
        }
        Ok(above)
    }

    /// Returns where the caller's rbx is, or None if this frame has not changed it.
    #[inline]
    fn saved_rbx(&self, rule: Rule, cfa: u64, memory: &mut Memory<'_>) -> Option<RegisterValue> {
        match rule {
            Rule::Unset | Rule::Same => None,
            Rule::At(offset) => {
                let address = cfa.wrapping_add_signed(offset.into());
                // Below the stack pointer: the function has restored it already.
                (address >= self.registers.sp).then_some(RegisterValue::SavedAt(address))
            }
            _ => Some(match self.computed(rule, cfa, memory) {
                None => RegisterValue::Unknown,
                Some(value) => RegisterValue::Known(value),
            }),
        }
    }

    /// Returns the value that a rule gives a register. None if it needs what is unknown.
    #[inline]
    fn value(&self, rule: Rule, cfa: u64, memory: &mut Memory<'_>) -> Option<u64> {
        match rule {
            Rule::At(offset) => (memory.word)(cfa.checked_add_signed(offset.into())?),
            _ => self.computed(rule, cfa, memory),
        }
    }

    /// Does the work of [`Machine::value`] for the rules that are rare.
    #[cold]
    fn computed(&self, rule: Rule, cfa: u64, memory: &mut Memory<'_>) -> Option<u64> {
        let Memory { word, eh_frame } = memory;
        match rule {
            Rule::Is(offset) => cfa.checked_add_signed(offset.into()),
            Rule::In(number) => self.register(number, word),
            Rule::AtExpression(at) => {
                let address = evaluate(eh_frame(), at, Some(cfa), self, word)?;
                word(address)
            }
            Rule::IsExpression(at) => evaluate(eh_frame(), at, Some(cfa), self, word),
            Rule::At(_) | Rule::Unset | Rule::Undefined | Rule::Same => None,
        }
    }

    /// Sets the registers to the caller's, unless the stack ends or its pointer does not grow. It
    /// may stay only if the function is a leaf, which has no frame.
    #[inline]
    fn set(
        &mut self,
        return_address: u64,
        sp: u64,
        fp: u64,
        is_leaf: bool,
    ) -> Result<Above, NoCaller> {
        let pc = match self.cpu {
            Cpu::X86_64 => return_address,
            Cpu::Aarch64 => without_signature(return_address),
        };
        if pc == 0 {
            return Ok(Above::End);
        }
        let old_sp = self.registers.sp;
        if sp < old_sp || (sp == old_sp && !is_leaf) {
            return Err(NoCaller);
        }
        if self.cpu == Cpu::Aarch64 {
            self.registers.lr = pc;
        }
        (self.registers.pc, self.registers.sp, self.registers.fp) = (pc, sp, fp);
        Ok(Above::Caller)
    }
}

/// Returns the address without its signature (pointer authentication), which is in the bits that
/// the addresses of programs do not use. Bit 55 tells them from those of the kernel.
fn without_signature(address: u64) -> u64 {
    const IS_KERNEL: u64 = 1 << 55;
    const ADDRESS_BITS: u32 = 48;
    if address & IS_KERNEL == 0 { address & (u64::MAX >> (64 - ADDRESS_BITS)) } else { address }
}
