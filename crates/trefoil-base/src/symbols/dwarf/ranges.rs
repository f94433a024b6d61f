//! Which addresses the code of a unit, a function or an inlined call has.

use super::constants::*;
use super::reader::Reader;
use super::tables::WorkLeft;
use super::unit::Unit;
use super::value::Value;

/// Returns whether an address is a tombstone: what linkers write as the address of code that they
/// have left out. GNU ld and lld write 0, or 1 where 0 would end a list; no function is there.
/// Others write the largest number or one less.
pub(super) fn is_tombstone(address: u64) -> bool {
    address <= 1 || address >= u64::MAX - 1
}

/// Addresses from `start` up to `end`, which is not one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct AddressRange {
    pub(super) start: u64,
    pub(super) end: u64,
}

/// The attributes of an entry that say where its code is.
#[derive(Clone, Copy)]
pub(super) struct CodePlace {
    pub(super) low: Value,
    high: Value,
    pub(super) list: Value,
}

impl Default for CodePlace {
    fn default() -> CodePlace {
        CodePlace { low: Value::Other, high: Value::Other, list: Value::Other }
    }
}

impl CodePlace {
    /// Keeps the value of an attribute if it is one of these.
    pub(super) fn set(&mut self, name: u16, value: Value) {
        match name {
            DW_AT_LOW_PC => self.low = value,
            DW_AT_HIGH_PC => self.high = value,
            DW_AT_RANGES => self.list = value,
            _ => {}
        }
    }
}

impl Unit {
    /// Adds the ranges of an entry to `ranges`: none that is empty.
    pub(super) fn add_ranges(
        &self,
        place: &CodePlace,
        left: &mut WorkLeft,
        ranges: &mut Vec<AddressRange>,
    ) {
        if let Some(at) = self.list_offset(place.list) {
            // What precedes the damaged entry of a list is used.
            let _ = match self.encoding.version {
                5.. => self.add_list(at, left, ranges),
                _ => self.add_plain_list(at, left, ranges),
            };
            return;
        }
        let Some(start) = self.address(place.low) else { return };
        let end = match place.high {
            Value::Number(size) => Some(start.wrapping_add(size)),
            high => self.address(high),
        };
        if let Some(end) = end {
            add(start, end, ranges);
        }
    }

    pub(super) fn list_offset(&self, list: Value) -> Option<u64> {
        match list {
            // Before DWARF 4 an offset was a number.
            Value::Offset(at) | Value::Number(at) => {
                // The lists of such units stay in the program, where the table has more units.
                let is_relative = self.is_split && self.encoding.version < 5;
                let table = if is_relative { self.list_table } else { 0 };
                table.checked_add(at)
            }
            Value::ListIndex(index) => {
                let (lists, table) = (self.sections.rnglists, self.list_table);
                let entry_bytes = self.encoding.offset_bytes().into();
                let mut entry = Reader::at_entry(lists, table, index, entry_bytes)?;
                table.checked_add(entry.offset(self.encoding.is_64)?)
            }
            _ => None,
        }
    }

    /// Adds a list of `.debug_ranges`: pairs of addresses, of which the last are zeroes.
    fn add_plain_list(
        &self,
        at: u64,
        left: &mut WorkLeft,
        ranges: &mut Vec<AddressRange>,
    ) -> Option<()> {
        let mut reader = Reader::at(self.sections.ranges, at)?;
        let mut base = self.base_address;
        loop {
            left.take(1)?;
            let (start, end) = (reader.u64()?, reader.u64()?);
            match (start, end) {
                (0, 0) => return Some(()),
                (u64::MAX, _) => base = end,
                // A base of 0 is usual: that of a unit whose functions are anywhere, and of
                // addresses that follow those of another base.
                _ if base == 0 => add(start, end, ranges),
                _ => add_relative(base, start, end, ranges),
            }
        }
    }

    /// Adds a list of `.debug_rnglists`.
    fn add_list(&self, at: u64, left: &mut WorkLeft, ranges: &mut Vec<AddressRange>) -> Option<()> {
        let mut reader = Reader::at(self.sections.rnglists, at)?;
        let mut base = self.base_address;
        loop {
            left.take(1)?;
            let (start, end);
            match reader.u8()? {
                DW_RLE_END_OF_LIST => return Some(()),
                DW_RLE_BASE_ADDRESS => {
                    base = reader.u64()?;
                    continue;
                }
                DW_RLE_BASE_ADDRESSX => {
                    base = self.address_at(reader.uleb()?)?;
                    continue;
                }
                DW_RLE_OFFSET_PAIR => {
                    let (start, end) = (reader.uleb()?, reader.uleb()?);
                    add_relative(base, start, end, ranges);
                    continue;
                }
                DW_RLE_START_END => (start, end) = (reader.u64()?, reader.u64()?),
                DW_RLE_START_LENGTH => {
                    start = reader.u64()?;
                    end = start.wrapping_add(reader.uleb()?);
                }
                DW_RLE_STARTX_ENDX => {
                    start = self.address_at(reader.uleb()?)?;
                    end = self.address_at(reader.uleb()?)?;
                }
                DW_RLE_STARTX_LENGTH => {
                    start = self.address_at(reader.uleb()?)?;
                    end = start.wrapping_add(reader.uleb()?);
                }
                _ => return None,
            }
            add(start, end, ranges);
        }
    }
}

/// Adds a range whose addresses are relative to `base`, unless that is a tombstone.
fn add_relative(base: u64, start: u64, end: u64, ranges: &mut Vec<AddressRange>) {
    if !is_tombstone(base) {
        add(base.wrapping_add(start), base.wrapping_add(end), ranges);
    }
}

/// Adds a range unless it is empty, or of code that the linker has left out.
pub(super) fn add(start: u64, end: u64, ranges: &mut Vec<AddressRange>) {
    if start < end && !is_tombstone(start) {
        ranges.push(AddressRange { start, end });
    }
}
