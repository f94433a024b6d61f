//! Runs the instructions of an unwind table (`DW_CFA_*`) up to an address, which gives the row of
//! that address: how the caller's registers are found.
//!
//! Only the registers by which callers are found have rules here. Those of others are read over.
//! rbx of x86_64 is one of them: functions that align the stack pointer at run time find their frame
//! by it, as `_dl_runtime_resolve` of glibc.

use super::entry::Entry;
use super::reader::Reader;
use super::{Cpu, RegisterValue, Registers};

/// How many rows `DW_CFA_remember_state` can keep.
const REMEMBERED_MAX: usize = 8;

/// Where the caller's stack pointer is found: the canonical frame address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cfa {
    /// The sum of a register and an offset.
    Register(u16, i32),
    /// The value of the expression at this offset of the section.
    Expression(u32),
}

/// How the value that a register has in the caller is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Rule {
    /// The table says nothing.
    Unset,
    /// The value is lost.
    Undefined,
    /// The register has not changed.
    Same,
    /// The value is on the stack, this far from the frame address.
    At(i32),
    /// It is the sum of the frame address and this offset.
    Is(i32),
    /// It is in another register.
    In(u16),
    /// It is on the stack, at the address that the expression at this offset computes.
    AtExpression(u32),
    /// The expression at this offset computes it.
    IsExpression(u32),
}

/// How the caller's registers are found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Row {
    pub(super) cfa: Cfa,
    pub(super) fp: Rule,
    pub(super) return_address: Rule,
    /// Of rbx. Unset on aarch64.
    pub(super) rbx: Rule,
    /// Whether the caller was interrupted by a signal, instead of calling.
    pub(super) is_signal_frame: bool,
}

impl Row {
    /// The row before the first instruction, which no table ends with.
    const NONE: Row = Row {
        cfa: Cfa::Register(u16::MAX, 0),
        fp: Rule::Unset,
        return_address: Rule::Unset,
        rbx: Rule::Unset,
        is_signal_frame: false,
    };

    /// Returns the rule of a register, if it has one here.
    fn rule(&mut self, register: u16, numbers: Numbers) -> Option<&mut Rule> {
        match register {
            _ if register == numbers.fp => Some(&mut self.fp),
            _ if register == numbers.return_address => Some(&mut self.return_address),
            _ if Some(register) == numbers.rbx => Some(&mut self.rbx),
            _ => None,
        }
    }
}

/// The numbers that tables give the registers of a CPU.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    pub(super) sp: u16,
    pub(super) fp: u16,
    pub(super) return_address: u16,
    /// None on aarch64.
    pub(super) rbx: Option<u16>,
}

impl Cpu {
    pub(super) fn numbers(self) -> Numbers {
        match self {
            Cpu::X86_64 => Numbers { sp: 7, fp: 6, return_address: 16, rbx: Some(3) },
            Cpu::Aarch64 => Numbers { sp: 31, fp: 29, return_address: 30, rbx: None },
        }
    }
}

/// A CPU with the registers of a frame.
pub(super) struct Machine<'a> {
    pub(super) cpu: Cpu,
    /// The program counter, also where the registers have another one.
    pub(super) pc: u64,
    pub(super) registers: &'a mut Registers,
}

impl Machine<'_> {
    /// Returns the value of a register by its number, if it is one of those that are known. `word`
    /// reads the one that is on the stack.
    #[inline]
    pub(super) fn register(
        &self,
        number: u16,
        word: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Option<u64> {
        let Registers { sp, fp, lr, rbx, .. } = *self.registers;
        let numbers = self.cpu.numbers();
        match number {
            _ if number == numbers.sp => Some(sp),
            _ if number == numbers.fp => Some(fp),
            _ if number == numbers.return_address => Some(match self.cpu {
                Cpu::X86_64 => self.pc,
                Cpu::Aarch64 => lr,
            }),
            _ if Some(number) == numbers.rbx => match rbx {
                RegisterValue::Unknown => None,
                RegisterValue::Known(value) => Some(value),
                RegisterValue::SavedAt(address) => word(address),
            },
            _ => None,
        }
    }
}

/// Instructions that are being run.
struct Program {
    cpu: Cpu,
    numbers: Numbers,
    /// What offsets are multiplied by.
    factor: i64,
    row: Row,
    /// The row after the instructions that all functions of a CIE share.
    initial: Option<Row>,
    remembered: [Row; REMEMBERED_MAX],
    remembered_len: usize,
}

/// Returns the row of an address that the entry covers. Returns None if an instruction is unknown
/// or damaged.
pub(super) fn row_at(entry: &Entry<'_>, cpu: Cpu, section: u64, address: u64) -> Option<Row> {
    let mut program = Program {
        cpu,
        numbers: cpu.numbers(),
        factor: entry.cie.data_factor,
        row: Row { is_signal_frame: entry.cie.is_signal_frame, ..Row::NONE },
        initial: None,
        remembered: [Row::NONE; REMEMBERED_MAX],
        remembered_len: 0,
    };
    program.run(entry, entry.cie.instructions, section, address)?;
    program.initial = Some(program.row);
    program.run(entry, entry.instructions, section, address)?;
    Some(program.row)
}

impl Program {
    /// Runs instructions until they end, or until the next one belongs to a later address.
    fn run(
        &mut self,
        entry: &Entry<'_>,
        mut reader: Reader<'_>,
        section: u64,
        address: u64,
    ) -> Option<()> {
        let mut location = entry.start;
        while !reader.is_at_end() {
            let instruction = reader.u8()?;
            let low = instruction & 0x3f;
            let delta: u64 = match (instruction >> 6, low) {
                (1, _) => low.into(),
                (0, 0x02) => reader.u8()?.into(),
                (0, 0x03) => reader.u16()?.into(),
                (0, 0x04) => reader.u32()?.into(),
                (0, 0x01) => {
                    let next = reader.pointer(entry.cie.encoding, section, None)?;
                    if next > address {
                        return Some(());
                    }
                    location = next;
                    continue;
                }
                (2, _) => {
                    let offset = reader.uleb()? as i64;
                    let rule = self.at(offset);
                    self.set(low.into(), rule?);
                    continue;
                }
                (3, _) => {
                    self.restore(low.into())?;
                    continue;
                }
                _ => {
                    self.set_rule(low, &mut reader)?;
                    continue;
                }
            };
            location = location.checked_add(delta.wrapping_mul(entry.cie.code_factor))?;
            if location > address {
                break;
            }
        }
        Some(())
    }

    /// Runs an instruction that has an operation code of its own and sets a rule.
    fn set_rule(&mut self, instruction: u8, reader: &mut Reader<'_>) -> Option<()> {
        match instruction {
            // nop; GNU_args_size
            0x00 => {}
            0x2e => drop(reader.uleb()?),
            // offset_extended, offset_extended_sf, GNU_negative_offset_extended
            0x05 | 0x11 | 0x2f => {
                let register = reader.register()?;
                let offset = match instruction {
                    0x05 => reader.uleb()? as i64,
                    0x11 => reader.sleb()?,
                    _ => (reader.uleb()? as i64).wrapping_neg(),
                };
                let rule = self.at(offset)?;
                self.set(register, rule);
            }
            // val_offset, val_offset_sf
            0x14 | 0x15 => {
                let register = reader.register()?;
                let offset =
                    if instruction == 0x14 { reader.uleb()? as i64 } else { reader.sleb()? };
                self.set(register, Rule::Is(self.scaled(offset)?));
            }
            // restore_extended, undefined, same_value, register
            0x06 => {
                let register = reader.register()?;
                self.restore(register)?;
            }
            0x07 => self.set(reader.register()?, Rule::Undefined),
            0x08 => self.set(reader.register()?, Rule::Same),
            0x09 => {
                let register = reader.register()?;
                self.set(register, Rule::In(reader.register()?));
            }
            // expression, val_expression
            0x10 | 0x16 => {
                let register = reader.register()?;
                let expression = expression(reader)?;
                self.set(
                    register,
                    match instruction {
                        0x10 => Rule::AtExpression(expression),
                        _ => Rule::IsExpression(expression),
                    },
                );
            }
            // remember_state, restore_state
            0x0a => {
                *self.remembered.get_mut(self.remembered_len)? = self.row;
                self.remembered_len += 1;
            }
            0x0b => {
                self.remembered_len = self.remembered_len.checked_sub(1)?;
                self.row = *self.remembered.get(self.remembered_len)?;
            }
            // AARCH64_negate_ra_state, with and without the address at which it was signed: return
            // addresses of aarch64 lose their signature in any case.
            0x2c | 0x2d if self.cpu == Cpu::Aarch64 => {}
            _ => return self.set_cfa(instruction, reader),
        }
        Some(())
    }

    fn set_cfa(&mut self, instruction: u8, reader: &mut Reader<'_>) -> Option<()> {
        self.row.cfa = match (instruction, self.row.cfa) {
            // def_cfa, def_cfa_sf
            (0x0c, _) => {
                let register = reader.register()?;
                Cfa::Register(register, i32::try_from(reader.uleb()?).ok()?)
            }
            (0x12, _) => {
                let register = reader.register()?;
                Cfa::Register(register, self.scaled(reader.sleb()?)?)
            }
            // def_cfa_register
            (0x0d, Cfa::Register(_, offset)) => Cfa::Register(reader.register()?, offset),
            // def_cfa_offset, def_cfa_offset_sf
            (0x0e, Cfa::Register(register, _)) => {
                Cfa::Register(register, i32::try_from(reader.uleb()?).ok()?)
            }
            (0x13, Cfa::Register(register, _)) => {
                Cfa::Register(register, self.scaled(reader.sleb()?)?)
            }
            // def_cfa_expression
            (0x0f, _) => Cfa::Expression(expression(reader)?),
            _ => return None,
        };
        Some(())
    }

    fn scaled(&self, offset: i64) -> Option<i32> {
        i32::try_from(offset.checked_mul(self.factor)?).ok()
    }

    fn at(&self, offset: i64) -> Option<Rule> {
        self.scaled(offset).map(Rule::At)
    }

    fn set(&mut self, register: u16, rule: Rule) {
        if let Some(now) = self.row.rule(register, self.numbers) {
            *now = rule;
        }
    }

    /// Gives a register the rule that the functions of the CIE begin with.
    fn restore(&mut self, register: u16) -> Option<()> {
        let initial = self.initial?.rule(register, self.numbers).copied();
        if let Some(initial) = initial {
            self.set(register, initial);
        }
        Some(())
    }
}

/// Reads over an expression. Returns its offset in the section.
fn expression(reader: &mut Reader<'_>) -> Option<u32> {
    let at = u32::try_from(reader.at()).ok()?;
    let size = reader.uleb()?;
    reader.skip(size)?;
    Some(at)
}
