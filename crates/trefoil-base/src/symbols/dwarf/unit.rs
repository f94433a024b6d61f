//! A unit: what the compiler has made of one source file, or of a part of a crate.
//!
//! Here are its header and its first entry (the root), which says where the tables of the unit are.
//! Entries are named by their offset from the start of the unit, as references are.

use super::ROOT_BYTES_FACTOR;
use super::abbreviations::{RootAbbreviations, RootAttributes};
use super::constants::*;
use super::ranges::CodePlace;
use super::reader::Reader;
use super::sections::DebugSections;
use super::value::{Encoding, Value};

/// How long a name or a part of a path can be. Longer ones are taken as missing: entries may share
/// a text, and each of them reads it to its end.
const TEXT_BYTES_MAX: usize = 1 << 18;

/// Which units have code.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum UnitKind {
    /// It may have code. So may its other half in another file, if it is a skeleton.
    Code,
    /// It is the other half of a skeleton. Before version 5 it is as any other unit with code.
    Split,
    /// Other units refer to its entries: a part that several units share, or a type.
    NoCode,
    /// Of an unknown version or kind.
    Unused,
}

/// The header of a unit.
pub(super) struct UnitHeader {
    /// As far as the header says it: before version 5 only the first entry does.
    pub(super) kind: UnitKind,
    pub(super) start: usize,
    pub(super) end: usize,
    encoding: Encoding,
    abbreviations_at: u64,
    id: Option<u64>,
    /// Where the entries start.
    entries_start: usize,
}

impl UnitHeader {
    /// Reads the header at `start` of `.debug_info`. Returns None at the end of the section.
    pub(super) fn read(info: &'static [u8], start: usize) -> Option<UnitHeader> {
        let mut reader = Reader::at(info, start as u64)?;
        let (length, is_64) = reader.unit_length()?;
        let length_end = info.len() - reader.len();
        let mut reader = Reader::new(reader.take(length)?);
        let end = length_end + reader.len();
        let mut header = UnitHeader {
            kind: UnitKind::Unused,
            start,
            end,
            encoding: Encoding { version: 0, is_64 },
            abbreviations_at: 0,
            id: None,
            entries_start: end,
        };
        if let Some(kind) = header.read_rest(&mut reader) {
            header.kind = kind;
            header.entries_start = end - reader.len();
        }
        Some(header)
    }

    /// Finds the attributes of the first entry.
    pub(super) fn find_root(
        &self,
        sections: &DebugSections,
        roots: &mut RootAbbreviations,
    ) -> Option<RootAttributes> {
        let code = Reader::new(sections.info.get(self.entries_start..self.end)?).uleb()?;
        roots.find(self.abbreviations_at, code)
    }

    fn read_rest(&mut self, reader: &mut Reader) -> Option<UnitKind> {
        self.encoding.version = reader.u16()?;
        let is_64 = self.encoding.is_64;
        let (kind, address_bytes);
        match self.encoding.version {
            2..=4 => {
                kind = DW_UT_COMPILE;
                self.abbreviations_at = reader.offset(is_64)?;
                address_bytes = reader.u8()?;
            }
            5 => {
                kind = reader.u8()?;
                address_bytes = reader.u8()?;
                self.abbreviations_at = reader.offset(is_64)?;
            }
            _ => return None,
        }
        if address_bytes != 8 {
            return None;
        }
        match kind {
            DW_UT_COMPILE => Some(UnitKind::Code),
            DW_UT_PARTIAL => Some(UnitKind::NoCode),
            DW_UT_TYPE => {
                let (_signature, _type) = (reader.u64()?, reader.offset(is_64)?);
                Some(UnitKind::NoCode)
            }
            DW_UT_SKELETON => {
                self.id = Some(reader.u64()?);
                Some(UnitKind::Code)
            }
            DW_UT_SPLIT_COMPILE => {
                self.id = Some(reader.u64()?);
                Some(UnitKind::Split)
            }
            _ => None,
        }
    }
}

/// The header and the root of a unit.
pub(super) struct Unit {
    pub(super) sections: DebugSections,
    pub(super) header: UnitHeader,
    pub(super) encoding: Encoding,
    /// Whether it is in a `.dwo` or `.dwp` file.
    pub(super) is_split: bool,
    /// The code of the whole unit.
    pub(super) code: CodePlace,
    /// What relative addresses are added to.
    pub(super) base_address: u64,
    pub(super) address_table: u64,
    pub(super) list_table: u64,
    string_table: u64,
    pub(super) name: Value,
    pub(super) folder: Value,
    /// Where its line table is in `.debug_line`.
    pub(super) lines_at: Option<u64>,
    /// The number by which its other half, in another file, is found.
    pub(super) id: Option<u64>,
    /// The file with the other half.
    pub(super) split_file: Value,
}

impl Unit {
    /// Reads the root of a unit of the program.
    pub(super) fn read(
        sections: &DebugSections,
        header: UnitHeader,
        root: RootAttributes,
    ) -> Option<Unit> {
        let mut unit = Unit::new(*sections, header);
        unit.read_root(root)?;
        unit.base_address = unit.address(unit.code.low).unwrap_or(0);
        Some(unit)
    }

    /// Reads the root of the other half of `skeleton`: the first unit in `sections` that has its
    /// number.
    pub(super) fn read_split(sections: &DebugSections, skeleton: &Unit) -> Option<Unit> {
        let mut start = 0;
        let root_bytes = sections.abbrev.len().saturating_mul(ROOT_BYTES_FACTOR);
        let mut roots = RootAbbreviations::new(sections.abbrev, root_bytes);
        loop {
            let header = UnitHeader::read(sections.info, start)?;
            start = header.end;
            let split_kind =
                if header.encoding.version >= 5 { UnitKind::Split } else { UnitKind::Code };
            if header.kind != split_kind {
                continue;
            }
            let mut unit = Unit::new(sections.with_those_of(&skeleton.sections), header);
            unit.is_split = true;
            if unit.encoding.version >= 5 {
                // The tables have a header, and no attribute says where it ends.
                let length_bytes = if unit.encoding.is_64 { 12 } else { 4 };
                unit.string_table = length_bytes + 4;
                unit.list_table = length_bytes + 8;
            }
            unit.read_root(unit.header.find_root(sections, &mut roots)?)?;
            if unit.header.kind != split_kind || unit.id != skeleton.id {
                continue;
            }
            unit.base_address = skeleton.base_address;
            unit.address_table = skeleton.address_table;
            if unit.encoding.version < 5 {
                unit.list_table = skeleton.list_table;
            }
            return Some(unit);
        }
    }

    fn new(sections: DebugSections, header: UnitHeader) -> Unit {
        Unit {
            sections,
            encoding: header.encoding,
            id: header.id,
            header,
            is_split: false,
            code: CodePlace::default(),
            base_address: 0,
            address_table: 0,
            list_table: 0,
            string_table: 0,
            name: Value::Other,
            folder: Value::Other,
            lines_at: None,
            split_file: Value::Other,
        }
    }

    fn read_root(&mut self, mut attributes: RootAttributes) -> Option<()> {
        let mut entry = self.entries();
        let _code = entry.uleb()?;
        if matches!(attributes.tag, DW_TAG_PARTIAL_UNIT | DW_TAG_TYPE_UNIT) {
            self.header.kind = UnitKind::NoCode;
        }
        while let Some((name, value)) = attributes.next(&mut entry, self.encoding) {
            match (name, value) {
                (DW_AT_NAME, _) => self.name = value,
                (DW_AT_COMP_DIR, _) => self.folder = value,
                (DW_AT_GNU_DWO_NAME | DW_AT_DWO_NAME, _) => self.split_file = value,
                (DW_AT_LOW_PC | DW_AT_HIGH_PC | DW_AT_RANGES, _) => self.code.set(name, value),
                // Before DWARF 4 an offset was a number.
                (DW_AT_STMT_LIST, Value::Offset(at) | Value::Number(at)) => {
                    self.lines_at = Some(at);
                }
                (DW_AT_STR_OFFSETS_BASE, Value::Offset(at)) => self.string_table = at,
                (DW_AT_ADDR_BASE | DW_AT_GNU_ADDR_BASE, Value::Offset(at)) => {
                    self.address_table = at;
                }
                (DW_AT_RNGLISTS_BASE | DW_AT_GNU_RANGES_BASE, Value::Offset(at)) => {
                    self.list_table = at;
                }
                (DW_AT_GNU_DWO_ID, Value::Number(id)) => self.id = self.id.or(Some(id)),
                _ => {}
            }
        }
        Some(())
    }

    /// Returns a reader of all entries.
    pub(super) fn entries(&self) -> Reader {
        Reader::new(&self.sections.info[self.header.entries_start..self.header.end])
    }

    /// Returns a reader of the entries from `entry` on.
    pub(super) fn entries_from(&self, entry: u64) -> Option<Reader> {
        let at = usize::try_from(entry).ok()?.checked_add(self.header.start)?;
        if at < self.header.entries_start {
            return None;
        }
        Some(Reader::new(self.sections.info.get(at..self.header.end)?))
    }

    /// Returns the entry that a reader of the entries is at.
    pub(super) fn entry_at(&self, entries: &Reader) -> u64 {
        (self.header.end - entries.len() - self.header.start) as u64
    }

    /// Returns a reader of its abbreviations.
    pub(super) fn abbreviations_reader(&self) -> Option<Reader> {
        Reader::at(self.sections.abbrev, self.header.abbreviations_at)
    }

    /// Returns the text that a value is or refers to. None if it is longer than [`TEXT_BYTES_MAX`].
    pub(super) fn text(&self, value: Value) -> Option<&'static [u8]> {
        let sections = &self.sections;
        let at = match value {
            Value::Text(text) => return (text.len() <= TEXT_BYTES_MAX).then_some(text),
            Value::LineStr(at) => {
                return Reader::at(sections.line_str, at)?.text_up_to(TEXT_BYTES_MAX);
            }
            Value::Str(at) => at,
            Value::StrIndex(index) => {
                let entry_bytes = self.encoding.offset_bytes().into();
                let table = (sections.str_offsets, self.string_table);
                let mut entry = Reader::at_entry(table.0, table.1, index, entry_bytes)?;
                entry.offset(self.encoding.is_64)?
            }
            _ => return None,
        };
        Reader::at(sections.str, at)?.text_up_to(TEXT_BYTES_MAX)
    }

    /// Returns the address that a value is or refers to.
    pub(super) fn address(&self, value: Value) -> Option<u64> {
        match value {
            Value::Address(address) => Some(address),
            Value::AddressIndex(index) => self.address_at(index),
            _ => None,
        }
    }

    /// Returns the address at an index of the table of addresses.
    pub(super) fn address_at(&self, index: u64) -> Option<u64> {
        Reader::at_entry(self.sections.addr, self.address_table, index, 8)?.u64()
    }
}
