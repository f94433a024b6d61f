//! Computes DWARF expressions: the way in which unwind tables describe frames of signal handlers
//! and of the procedure linkage table.
//!
//! An expression may be damaged. It ends after [`STEPS_MAX`] operations, and its stack has a fixed
//! size.

use super::reader::Reader;
use super::row::Machine;

const STEPS_MAX: usize = 1000;
const STACK_MAX: usize = 16;

/// The stack of an expression.
struct Stack {
    values: [u64; STACK_MAX],
    len: usize,
}

impl Stack {
    fn push(&mut self, value: u64) -> Option<()> {
        *self.values.get_mut(self.len)? = value;
        self.len += 1;
        Some(())
    }

    fn pop(&mut self) -> Option<u64> {
        self.len = self.len.checked_sub(1)?;
        self.values.get(self.len).copied()
    }

    /// Returns a value by its distance from the top.
    fn below_top(&self, depth: usize) -> Option<u64> {
        let at = self.len.checked_sub(depth)?.checked_sub(1)?;
        self.values.get(at).copied()
    }

    /// Exchanges the value at a distance from the top and the one below it.
    fn swap(&mut self, depth: usize) -> Option<()> {
        let upper = self.len.checked_sub(depth)?.checked_sub(1)?;
        let lower = upper.checked_sub(1)?;
        self.values.swap(upper, lower);
        Some(())
    }
}

/// Returns the value of the expression whose length and bytes are at `at` in a section. `first` is
/// on its stack before it begins. Returns None if it needs what is unknown.
pub(super) fn evaluate(
    section: &[u8],
    at: u32,
    first: Option<u64>,
    machine: &Machine<'_>,
    word: &mut dyn FnMut(u64) -> Option<u64>,
) -> Option<u64> {
    let mut reader = Reader::new(section, at as usize);
    let size = reader.uleb()?;
    let start = reader.at();
    let mut reader = reader.split(size)?;
    let mut stack = Stack { values: [0; STACK_MAX], len: 0 };
    if let Some(first) = first {
        stack.push(first)?;
    }
    for _ in 0..STEPS_MAX {
        if reader.is_at_end() {
            return stack.pop();
        }
        let operation = reader.u8()?;
        let value = match operation {
            // An address, and constants of 1, 2, 4 and 8 bytes and of seven bits per byte.
            0x03 | 0x0e | 0x0f => reader.u64()?,
            0x08 => reader.u8()?.into(),
            0x09 => reader.u8()? as i8 as u64,
            0x0a => reader.u16()?.into(),
            0x0b => reader.u16()? as i16 as u64,
            0x0c => reader.u32()?.into(),
            0x0d => reader.u32()? as i32 as u64,
            0x10 => reader.uleb()?,
            0x11 => reader.sleb()? as u64,
            0x30..=0x4f => (operation - 0x30).into(),
            // A register and an offset.
            0x70..=0x8f | 0x92 => {
                let number = match operation {
                    0x92 => reader.register()?,
                    _ => (operation - 0x70).into(),
                };
                machine.register(number, word)?.wrapping_add_signed(reader.sleb()?)
            }
            // dup, over, pick
            0x12 => stack.below_top(0)?,
            0x14 => stack.below_top(1)?,
            0x15 => stack.below_top(reader.u8()?.into())?,
            // drop
            0x13 => {
                stack.pop()?;
                continue;
            }
            // swap, and rot: the top becomes the third.
            0x16 | 0x17 => {
                stack.swap(0)?;
                if operation == 0x17 {
                    stack.swap(1)?;
                }
                continue;
            }
            // bra, skip
            0x28 | 0x2f => {
                let by = reader.u16()? as i16;
                if operation == 0x2f || stack.pop()? != 0 {
                    reader.jump(by.into())?;
                    if reader.at() < start {
                        return None;
                    }
                }
                continue;
            }
            // nop
            0x96 => continue,
            // deref, abs, neg, not, plus_uconst
            0x06 => word(stack.pop()?)?,
            0x19 => (stack.pop()? as i64).unsigned_abs(),
            0x1f => stack.pop()?.wrapping_neg(),
            0x20 => !stack.pop()?,
            0x23 => stack.pop()?.wrapping_add(reader.uleb()?),
            _ => {
                let right = stack.pop()?;
                binary(operation, stack.pop()?, right)?
            }
        };
        stack.push(value)?;
    }
    None
}

/// Returns the result of an operation with two operands. Comparisons are those of signed numbers.
fn binary(operation: u8, left: u64, right: u64) -> Option<u64> {
    let (signed_left, signed_right) = (left as i64, right as i64);
    let shift = u32::try_from(right).unwrap_or(u32::MAX);
    Some(match operation {
        0x1a => left & right,
        0x1b => signed_left.checked_div(signed_right)? as u64,
        0x1c => left.wrapping_sub(right),
        0x1d => left.checked_rem(right)?,
        0x1e => left.wrapping_mul(right),
        0x21 => left | right,
        0x22 => left.wrapping_add(right),
        0x24 => left.checked_shl(shift).unwrap_or(0),
        0x25 => left.checked_shr(shift).unwrap_or(0),
        0x26 => (signed_left >> shift.min(63)) as u64,
        0x27 => left ^ right,
        0x29 => (signed_left == signed_right).into(),
        0x2a => (signed_left >= signed_right).into(),
        0x2b => (signed_left > signed_right).into(),
        0x2c => (signed_left <= signed_right).into(),
        0x2d => (signed_left < signed_right).into(),
        0x2e => (signed_left != signed_right).into(),
        _ => return None,
    })
}
