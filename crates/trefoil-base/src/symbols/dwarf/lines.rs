//! The line table of a unit: which line of which file each address is of.
//!
//! The table is a program for a small machine, which makes one row after another. A row takes a
//! byte or more of the program, so there are never more rows than bytes.

use super::constants::*;
use super::ranges::{AddressRange, add, is_tombstone};
use super::reader::Reader;
use super::spans::{Span, find_last, sort};
use super::tables::WorkLeft;
use super::unit::Unit;
use super::value::{Encoding, Value};

/// How long a path can be. Longer ones are taken as unknown: a file could have many, all of the same
/// text.
const PATH_BYTES_MAX: usize = 4096;

/// The index of no file.
pub(super) const NO_FILE: u32 = u32::MAX;

/// The lines and files of a unit.
pub(super) struct Lines {
    rows: Vec<Row>,
    /// The sequences: rows whose addresses follow each other. The owner is an index into `starts`.
    sequences: Vec<Span>,
    /// The first row of each sequence. The last entry is the number of rows.
    starts: Vec<u32>,
    version: u16,
    folders: Vec<Value>,
    files: Vec<SourceFile>,
}

/// The addresses from this one to that of the next row.
#[derive(Clone, Copy)]
struct Row {
    address: u64,
    file: u32,
    line: u32,
}

struct SourceFile {
    name: Value,
    /// An index into [`Lines::folders`].
    folder: u64,
    /// Its path, if a lookup has found this file.
    path: Option<Box<str>>,
    /// The unit that it was made for, whose folder it may begin with.
    unit: usize,
}

impl SourceFile {
    fn new(name: Value, folder: u64) -> SourceFile {
        SourceFile { name, folder, path: None, unit: 0 }
    }
}

/// What the program of a line table starts with.
struct Header {
    encoding: Encoding,
    instruction_bytes: u64,
    /// 1 except on machines whose instructions are bundles of operations.
    operations_per_instruction: u64,
    line_base: i8,
    line_range: u8,
    /// The first of the opcodes that move both the address and the line.
    first_special: u8,
    /// How many operands each opcode before that has.
    operand_counts: &'static [u8],
}

/// The registers of the machine.
struct Machine {
    address: u64,
    operation: u64,
    file: u64,
    line: u64,
    /// Whether the address is that of code that the linker has left out.
    is_left_out: bool,
}

impl Machine {
    fn new() -> Machine {
        Machine { address: 0, operation: 0, file: 1, line: 1, is_left_out: false }
    }

    fn advance_line(&mut self, by: i64) {
        self.line = match by {
            0.. => self.line.wrapping_add(by.unsigned_abs()),
            _ => self.line.saturating_sub(by.unsigned_abs()),
        };
    }

    fn advance_address(&mut self, header: &Header, operations: u64) -> Option<()> {
        if self.is_left_out {
            return Some(());
        }
        let mut instructions = operations;
        if header.operations_per_instruction != 1 {
            let sum = self.operation.wrapping_add(operations);
            self.operation = sum % header.operations_per_instruction;
            instructions = sum / header.operations_per_instruction;
        }
        let bytes = instructions.wrapping_mul(header.instruction_bytes);
        self.address = self.address.checked_add(bytes)?;
        Some(())
    }
}

impl Lines {
    /// Reads the line table of a unit. If it is damaged, the sequences before that are used. Returns
    /// None if there is not enough work left for all of it.
    pub(super) fn read(unit: &Unit, left: &mut WorkLeft) -> Option<Lines> {
        let mut reader = Reader::at(unit.sections.line, unit.lines_at?)?;
        let (length, is_64) = reader.unit_length()?;
        let mut reader = Reader::new(reader.take(length)?);
        left.take(reader.len())?;
        let version = reader.u16()?;
        if !(2..=5).contains(&version) {
            return None;
        }
        let encoding = Encoding { version, is_64 };
        if version == 5 {
            let (address_bytes, segment_bytes) = (reader.u8()?, reader.u8()?);
            if address_bytes != 8 || segment_bytes != 0 {
                return None;
            }
        }
        let header_length = reader.offset(is_64)?;
        let mut head = Reader::new(reader.take(header_length)?);
        let instruction_bytes = head.u8()?.into();
        let operations_per_instruction = if version >= 4 { head.u8()?.into() } else { 1 };
        let _is_statement = head.u8()?;
        let line_base = head.u8()?.cast_signed();
        let line_range = head.u8()?;
        let first_special = head.u8()?;
        if operations_per_instruction == 0 || line_range == 0 || first_special == 0 {
            return None;
        }
        let operand_counts = head.take(u64::from(first_special) - 1)?;
        let header = Header {
            encoding,
            instruction_bytes,
            operations_per_instruction,
            line_base,
            line_range,
            first_special,
            operand_counts,
        };
        let mut lines = Lines {
            rows: Vec::new(),
            sequences: Vec::new(),
            starts: Vec::new(),
            version,
            folders: Vec::new(),
            files: Vec::new(),
        };
        match version {
            5 => lines.read_files(&mut head, encoding, left)?,
            _ => lines.read_old_files(&mut head)?,
        }
        let _ = lines.run(&header, &mut reader);
        sort(&mut lines.sequences);
        lines.rows.shrink_to_fit();
        Some(lines)
    }

    /// Reads the tables of versions 2 to 4. Their first file has the number 1.
    fn read_old_files(&mut self, head: &mut Reader) -> Option<()> {
        loop {
            match head.text()? {
                [] => break,
                folder => self.folders.push(Value::Text(folder)),
            }
        }
        // No file has the number 0. There the name of the unit is used.
        self.files.push(SourceFile::new(Value::Other, 0));
        loop {
            match head.text()? {
                [] => return Some(()),
                name => self.read_old_file(name, head)?,
            }
        }
    }

    fn read_old_file(&mut self, name: &'static [u8], reader: &mut Reader) -> Option<()> {
        let folder = reader.uleb()?;
        let (_time, _size) = (reader.uleb()?, reader.uleb()?);
        self.files.push(SourceFile::new(Value::Text(name), folder));
        Some(())
    }

    /// Reads the tables of version 5, which say themselves how they are written.
    fn read_files(
        &mut self,
        head: &mut Reader,
        encoding: Encoding,
        left: &mut WorkLeft,
    ) -> Option<()> {
        let mut formats = Vec::new();
        for is_folder in [true, false] {
            formats.clear();
            for _ in 0..head.u8()? {
                formats.push((head.uleb()?, head.uleb_u16()?));
            }
            let count = head.uleb()?;
            // Values of some forms take no bytes. Entries of these alone are of no use, but they
            // must not make the loop longer than the header.
            if count > head.len() as u64 {
                return None;
            }
            for _ in 0..count {
                left.take(formats.len())?;
                let mut file = SourceFile::new(Value::Other, 0);
                for &(content, form) in &formats {
                    let value = Value::read(head, form, 0, encoding)?;
                    match (content, value) {
                        (DW_LNCT_PATH, _) => file.name = value,
                        (DW_LNCT_DIRECTORY_INDEX, Value::Number(index)) => file.folder = index,
                        _ => {}
                    }
                }
                match is_folder {
                    true => self.folders.push(file.name),
                    false => self.files.push(file),
                }
            }
        }
        Some(())
    }

    /// Runs the program. Returns None if it is damaged.
    fn run(&mut self, header: &Header, reader: &mut Reader) -> Option<()> {
        let mut machine = Machine::new();
        let mut rows_start = 0;
        while reader.len() != 0 {
            let opcode = reader.u8()?;
            if opcode >= header.first_special {
                let by = opcode - header.first_special;
                let lines = i64::from(header.line_base) + i64::from(by % header.line_range);
                machine.advance_line(lines);
                machine.advance_address(header, (by / header.line_range).into())?;
                self.add_row(&machine, rows_start);
                continue;
            }
            match opcode {
                0 => {
                    let length = reader.uleb()?;
                    let mut operands = Reader::new(reader.take(length)?);
                    match operands.u8()? {
                        DW_LNE_END_SEQUENCE => {
                            self.end_sequence(&machine, rows_start)?;
                            rows_start = self.rows.len();
                            machine = Machine::new();
                        }
                        DW_LNE_SET_ADDRESS => {
                            let address = operands.u64()?;
                            machine.is_left_out =
                                address < machine.address || is_tombstone(address);
                            if !machine.is_left_out {
                                machine.address = address;
                                machine.operation = 0;
                            }
                        }
                        DW_LNE_DEFINE_FILE if header.encoding.version < 5 => {
                            let name = operands.text()?;
                            self.read_old_file(name, &mut operands)?;
                        }
                        _ => {}
                    }
                }
                DW_LNS_COPY => self.add_row(&machine, rows_start),
                DW_LNS_ADVANCE_PC => {
                    let operations = reader.uleb()?;
                    machine.advance_address(header, operations)?;
                }
                DW_LNS_ADVANCE_LINE => machine.advance_line(reader.sleb()?),
                DW_LNS_SET_FILE => machine.file = reader.uleb()?,
                DW_LNS_SET_COLUMN | DW_LNS_SET_ISA => drop(reader.uleb()?),
                DW_LNS_NEGATE_STMT
                | DW_LNS_SET_BASIC_BLOCK
                | DW_LNS_SET_PROLOGUE_END
                | DW_LNS_SET_EPILOGUE_BEGIN => {}
                DW_LNS_CONST_ADD_PC => {
                    let by = (u8::MAX - header.first_special) / header.line_range;
                    machine.advance_address(header, by.into())?;
                }
                DW_LNS_FIXED_ADVANCE_PC => {
                    let bytes = reader.u16()?;
                    if !machine.is_left_out {
                        machine.address = machine.address.checked_add(bytes.into())?;
                        machine.operation = 0;
                    }
                }
                _ => {
                    for _ in 0..*header.operand_counts.get(usize::from(opcode) - 1)? {
                        reader.uleb()?;
                    }
                }
            }
        }
        Some(())
    }

    /// Adds a row. Of several with the same address the last counts.
    fn add_row(&mut self, machine: &Machine, rows_start: usize) {
        if machine.is_left_out {
            return;
        }
        let row = Row {
            address: machine.address,
            file: u32::try_from(machine.file).unwrap_or(NO_FILE),
            line: machine.line as u32,
        };
        match self.rows[rows_start..].last_mut() {
            Some(last) if last.address == row.address => *last = row,
            _ => self.rows.push(row),
        }
    }

    fn end_sequence(&mut self, machine: &Machine, rows_start: usize) -> Option<()> {
        let Some(first) = self.rows.get(rows_start).map(|row| row.address) else { return Some(()) };
        if machine.is_left_out || first >= machine.address {
            self.rows.truncate(rows_start);
            return Some(());
        }
        let owner = u32::try_from(self.sequences.len()).ok()?;
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        self.starts.push(u32::try_from(self.rows.len()).ok()?);
        self.sequences.push(Span { depth: 0, key: first, end: machine.address, owner });
        Some(())
    }

    /// Returns the file and the line of an address. The line is 0 if the table does not say it.
    pub(super) fn find(&self, address: u64) -> Option<(u32, u32)> {
        let sequence = self.sequences[find_last(&self.sequences, 0, address)?];
        if address >= sequence.end {
            return None;
        }
        let owner = sequence.owner as usize;
        let rows = &self.rows[self.starts[owner] as usize..self.starts[owner + 1] as usize];
        let after = rows.partition_point(|row| row.address <= address);
        let row = rows[..after].last()?;
        Some((row.file, row.line))
    }

    /// Adds the ranges of all rows of a unit to `ranges`.
    pub(super) fn add_ranges_of(unit: &Unit, left: &mut WorkLeft, ranges: &mut Vec<AddressRange>) {
        if let Some(lines) = Lines::read(unit, left) {
            for sequence in &lines.sequences {
                add(sequence.key, sequence.end, ranges);
            }
        }
    }

    /// Returns the path of a file. [`Lines::make_path`] has made it for this unit.
    pub(super) fn path(&self, unit: usize, file: u32) -> &str {
        let file = self.files.get(file as usize).filter(|file| file.unit == unit);
        file.and_then(|file| file.path.as_deref()).unwrap_or_default()
    }

    /// Makes the path of a file for a unit with this number. Several units may have this table.
    pub(super) fn make_path(&mut self, unit: &Unit, unit_index: usize, file: u32) {
        let (index, version) = (file, self.version);
        let Some(file) = self.files.get_mut(index as usize) else { return };
        if file.path.is_some() && file.unit == unit_index {
            return;
        }
        let is_unit_itself = index == 0 && version < 5;
        let name = if is_unit_itself { unit.name } else { file.name };
        let mut path = String::new();
        if let Some(name) = unit.text(name) {
            push_path(&mut path, unit.text(unit.folder).unwrap_or_default());
            // 0 is the folder of the unit. Before version 5 it was not in the table.
            let index = if version >= 5 { file.folder } else { file.folder.wrapping_sub(1) };
            if file.folder != 0
                && let Some(&folder) = self.folders.get(index as usize)
            {
                push_path(&mut path, unit.text(folder).unwrap_or_default());
            }
            push_path(&mut path, name);
        }
        if path.len() > PATH_BYTES_MAX {
            path = String::new();
        }
        file.path = Some(path.into_boxed_str());
        file.unit = unit_index;
    }
}

/// Appends a path, or replaces `path` if it is absolute: on Unix, or on Windows, where the program
/// may have been compiled.
fn push_path(path: &mut String, with: &[u8]) {
    let with = String::from_utf8_lossy(with);
    if is_unix_root(&with) || is_windows_root(&with) {
        path.clear();
    }
    let separator = if is_windows_root(path) { '\\' } else { '/' };
    if !path.is_empty() && !path.ends_with(separator) {
        path.push(separator);
    }
    path.push_str(&with);
}

fn is_unix_root(path: &str) -> bool {
    path.starts_with('/') || path.get(1..3) == Some(":/")
}

fn is_windows_root(path: &str) -> bool {
    path.starts_with('\\') || path.get(1..3) == Some(":\\")
}
