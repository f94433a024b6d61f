//! Reads debug information (DWARF, versions 2 to 5): the functions and the line of an address.
//!
//! | file | reads |
//! |---|---|
//! | `reader.rs` | numbers and texts |
//! | `sections.rs` | the sections by their names |
//! | `value.rs`, `abbreviations.rs` | the attributes of entries |
//! | `unit.rs` | the header and the first entry of units |
//! | `ranges.rs`, `aranges.rs` | the addresses of units, functions and inlined calls |
//! | `subprograms.rs` | functions and inlined calls |
//! | `lines.rs` | lines and files |
//! | `package.rs` | the index of `.dwp` files |
//!
//! `spans.rs` has the type of all tables that are sorted, `tables.rs` those that units share.
//!
//! Only what lookups need is read. The first lookup reads the header and the first entry of each
//! unit. The first lookup in a unit reads its lines and finds its functions. The first lookup in a
//! function finds what was inlined there. All this is kept.
//!
//! The bytes may be damaged, or made to confuse. Invariants:
//!
//! 1. Every read goes through [`Reader`](reader::Reader), which checks the range, and sums of
//!    numbers from the file are checked or wrap. Nothing here panics.
//! 2. Nothing recurses. Each loop takes bytes of a section or has a bound ([`REFERENCES_MAX`],
//!    `ATTRIBUTES_MAX`).
//! 3. What the first pass over the units reads, and what all lookups read and keep, is at most
//!    proportional to the sections, even if units share their tables or halves
//!    (`RootAbbreviations`, `WorkLeft`).
//! 4. What one lookup reads again is bounded: [`UNITS_PER_LOOKUP_MAX`] units and
//!    [`NAME_BYTES_PER_LOOKUP_MAX`] bytes.
//!
//! What is damaged costs lines or names. Left out: types that are referred to by their
//! signature, and machines with addresses of another size than 8 bytes.

mod abbreviations;
mod aranges;
mod constants;
mod lines;
mod package;
mod ranges;
mod reader;
mod sections;
mod spans;
mod subprograms;
mod tables;
#[cfg(test)]
pub(crate) mod tests;
mod unit;
mod value;

pub(crate) use package::Package;
pub(crate) use sections::DebugSections;
pub(crate) use spans::{Span, find_last, sort};

use abbreviations::{RootAbbreviations, RootAttributes, RootPlace};
use aranges::AddressSets;
use lines::{Lines, NO_FILE};
use spans::count_up_to;
use subprograms::{FoundEntry, Name, NameStep, Subprograms, UnitEntries};
use tables::{Tables, WorkLeft};
use unit::{Unit, UnitHeader, UnitKind};
use value::Value;

/// How many entries are read for a name: each refers to the next.
const REFERENCES_MAX: usize = 16;

/// How many bytes of entries are read for the names of the calls at an address. Names that were read
/// before need none.
const NAME_BYTES_PER_LOOKUP_MAX: usize = 1 << 22;

/// In how many units an address is looked up. Several units may say that it is theirs, of which the
/// first that knows more is right.
const UNITS_PER_LOOKUP_MAX: usize = 64;

/// How many bytes are read to find the first entries of units, for each byte of `.debug_info` and
/// `.debug_abbrev`. In a `.dwo` file, for each byte of its abbreviations.
const ROOT_BYTES_FACTOR: usize = 16;

/// The debug information of a program or library.
pub(crate) struct DebugInfo {
    sections: DebugSections,
    /// None until the first lookup.
    index: Option<Index>,
}

/// Which units there are.
struct Index {
    /// By start in `.debug_info`.
    units: Vec<IndexedUnit>,
    /// The key is the end of a range, and `end` is its start. The owners are indices into `units`.
    ranges: Vec<Span>,
    /// The least start of each range and all after it.
    start_mins: Vec<u64>,
    /// What units share, and what lookups may still read.
    tables: Tables,
}

struct IndexedUnit {
    start: usize,
    root: RootPlace,
    /// None until a lookup needs this unit.
    unit: Option<Box<LoadedUnit>>,
}

/// A unit that was looked up.
struct LoadedUnit {
    main: UnitEntries,
    split: Split,
    /// None until a lookup finds this unit by an address.
    code: Option<Box<Code>>,
}

/// The half of a unit that is in a `.dwo` or `.dwp` file.
enum Split {
    /// It was not searched for.
    Unread,
    /// The unit has none, or it is missing.
    None,
    Read(Box<UnitEntries>),
}

/// The lines and functions of a unit.
struct Code {
    /// The number of its line table, which other units may have as well.
    lines: Option<u32>,
    subprograms: Subprograms,
}

/// What is known about the file with the other half of a unit.
pub(crate) struct SplitUnit {
    /// The number by which a package has the unit.
    pub(crate) id: u64,
    pub(crate) folder: Option<&'static [u8]>,
    /// Relative to the folder, or absolute.
    pub(crate) file: Option<&'static [u8]>,
}

/// Finds the file with the other half of a unit. Unless it is missing, calls the second argument with
/// its sections, which returns whether they have that half. If so, they must be kept.
pub(crate) type LoadSplit<'a> =
    &'a mut dyn FnMut(SplitUnit, &mut dyn FnMut(&DebugSections) -> bool);

/// The calls at an address.
pub(crate) struct FoundCalls {
    unit: usize,
    /// From the innermost to the outermost. If there is a line but no function, there is one call
    /// without a name.
    pub(crate) calls: Vec<FoundCall>,
}

/// A call at an address.
#[derive(Clone, Copy)]
pub(crate) struct FoundCall {
    pub(crate) name: Option<&'static [u8]>,
    file: u32,
    /// 0 if unknown.
    pub(crate) line: u32,
}

/// An entry of any unit.
struct EntryPlace {
    unit: usize,
    is_split: bool,
    entry: u64,
}

impl DebugInfo {
    pub(crate) fn new(sections: DebugSections) -> DebugInfo {
        DebugInfo { sections, index: None }
    }

    /// Finds the calls at an address.
    pub(crate) fn find(&mut self, address: u64, load: LoadSplit<'_>) -> Option<FoundCalls> {
        let sections = self.sections;
        let index = self.index.get_or_insert_with(|| Index::read(&sections));
        let mut at = count_up_to(&index.ranges, 0, address);
        let mut units_left = UNITS_PER_LOOKUP_MAX;
        while let (Some(candidate), Some(&start_min)) =
            (index.ranges.get(at), index.start_mins.get(at))
            && start_min <= address
        {
            at += 1;
            if candidate.end > address {
                continue;
            }
            units_left = units_left.checked_sub(1)?;
            let unit = candidate.owner as usize;
            if let Some(calls) = index.find_in_unit(&sections, unit, address, load) {
                return Some(FoundCalls { unit, calls });
            }
        }
        None
    }

    /// Returns the path of the file of a call. Empty if unknown.
    pub(crate) fn path(&self, of: &FoundCalls, call: &FoundCall) -> &str {
        let Some(index) = &self.index else { return "" };
        let unit = index.units.get(of.unit).and_then(|unit| unit.unit.as_ref());
        let lines = unit.and_then(|unit| index.tables.lines(unit.code.as_ref()?.lines));
        lines.map_or("", |lines| lines.path(of.unit, call.file))
    }
}

impl Index {
    /// Reads the header and the first entry of each unit.
    fn read(sections: &DebugSections) -> Index {
        let (units, ranges, start_mins) = (Vec::new(), Vec::new(), Vec::new());
        let mut index = Index { units, ranges, start_mins, tables: Tables::new(sections) };
        let sets = AddressSets::read(sections.aranges);
        let section_bytes = sections.info.len().saturating_add(sections.abbrev.len());
        let root_bytes = section_bytes.saturating_mul(ROOT_BYTES_FACTOR);
        let mut roots = RootAbbreviations::new(sections.abbrev, root_bytes);
        let mut lines_left = WorkLeft::for_bytes(sections.line.len());
        let mut lists_left = WorkLeft::for_lists_of(sections);
        let mut found = Vec::new();
        let mut start = 0;
        while let Some(header) = UnitHeader::read(sections.info, start)
            && let Ok(unit_index) = u32::try_from(index.units.len())
        {
            let unit_start = header.start;
            start = header.end;
            if header.kind == UnitKind::Unused {
                continue;
            }
            let Some(root) = header.find_root(sections, &mut roots) else { continue };
            let Some(unit) = Unit::read(sections, header, root) else { continue };
            let root = root.place(sections.abbrev);
            index.units.push(IndexedUnit { start: unit_start, root, unit: None });
            if unit.header.kind != UnitKind::Code {
                continue;
            }
            if unit.list_offset(unit.code.list).is_none() {
                sets.add_ranges(unit_start, &mut found);
            }
            if found.is_empty() {
                unit.add_ranges(&unit.code, &mut lists_left, &mut found);
            }
            if found.is_empty() {
                Lines::add_ranges_of(&unit, &mut lines_left, &mut found);
            }
            for range in &found {
                let (key, end) = (range.end, range.start);
                index.ranges.push(Span { depth: 0, key, end, owner: unit_index });
            }
            found.clear();
        }
        index.units.shrink_to_fit();
        sort(&mut index.ranges);
        let mut start_min = u64::MAX;
        index.start_mins.resize(index.ranges.len(), 0);
        for (at, range) in index.ranges.iter().enumerate().rev() {
            start_min = start_min.min(range.end);
            index.start_mins[at] = start_min;
        }
        index
    }

    /// Returns a unit, which is read if it was not.
    fn load(&mut self, sections: &DebugSections, unit: usize) -> Option<&mut LoadedUnit> {
        let indexed = self.units.get_mut(unit)?;
        if indexed.unit.is_none() {
            let header = UnitHeader::read(sections.info, indexed.start)?;
            let root = RootAttributes::at(indexed.root, sections.abbrev)?;
            let main = UnitEntries::new(Unit::read(sections, header, root)?, &mut self.tables);
            let split = if main.unit.id.is_some() { Split::Unread } else { Split::None };
            indexed.unit = Some(Box::new(LoadedUnit { main, split, code: None }));
        }
        indexed.unit.as_deref_mut()
    }

    /// Returns the calls at an address in a unit, from the innermost to the outermost. Returns None
    /// if the unit has neither a function nor a line there.
    fn find_in_unit(
        &mut self,
        sections: &DebugSections,
        unit_index: usize,
        address: u64,
        load: LoadSplit<'_>,
    ) -> Option<Vec<FoundCall>> {
        self.load(sections, unit_index)?;
        let loaded = self.units.get_mut(unit_index)?.unit.as_deref_mut()?;
        if let Split::Unread = loaded.split {
            loaded.split = Split::read(&loaded.main.unit, &mut self.tables, load);
        }
        let mut entries = Vec::new();
        let (line, is_split) = loaded.find(address, &mut self.tables, &mut entries);
        if line.is_none() && entries.is_empty() {
            return None;
        }
        let (mut file, mut line) = line.unwrap_or((NO_FILE, 0));
        let mut calls = Vec::with_capacity(entries.len().max(1));
        if entries.is_empty() {
            calls.push(FoundCall { name: None, file, line });
        }
        let mut name_bytes_left = NAME_BYTES_PER_LOOKUP_MAX;
        for entry in entries.iter().rev() {
            let place = EntryPlace { unit: unit_index, is_split, entry: entry.entry };
            let name = self.name_of(sections, entry, place, &mut name_bytes_left);
            calls.push(FoundCall { name, file, line });
            (file, line) = (entry.file, entry.line);
        }
        let loaded = self.units.get(unit_index)?.unit.as_deref()?;
        let lines = loaded.code.as_ref().and_then(|code| code.lines);
        if let Some(lines) = self.tables.lines_mut(lines) {
            for call in &calls {
                lines.make_path(&loaded.main.unit, unit_index, call.file);
            }
        }
        Some(calls)
    }

    fn name_of(
        &mut self,
        sections: &DebugSections,
        found: &FoundEntry,
        place: EntryPlace,
        bytes_left: &mut usize,
    ) -> Option<&'static [u8]> {
        if let Name::Read(name) = found.name {
            return name;
        }
        let unit = place.unit;
        let name = self.read_name(sections, place, bytes_left);
        if let Some(code) = self.load(sections, unit).and_then(|loaded| loaded.code.as_mut()) {
            code.subprograms.keep_name(found, name);
        }
        name
    }

    /// Reads the name of a function.
    fn read_name(
        &mut self,
        sections: &DebugSections,
        mut place: EntryPlace,
        bytes_left: &mut usize,
    ) -> Option<&'static [u8]> {
        for _ in 0..REFERENCES_MAX {
            let entries = self.load(sections, place.unit)?.entries(place.is_split)?;
            match entries.name_step(place.entry, bytes_left) {
                NameStep::Found(name) => return Some(name),
                NameStep::See(Value::UnitEntry(entry)) => place.entry = entry,
                NameStep::See(Value::InfoEntry(at)) => {
                    let header = &entries.unit.header;
                    let at = usize::try_from(at).ok()?;
                    if place.is_split {
                        // If such a file has several units with code, its compiler makes no
                        // references between them.
                        place.entry = at.checked_sub(header.start)? as u64;
                        continue;
                    }
                    let after = self.units.partition_point(|unit| unit.start <= at);
                    place.unit = after.checked_sub(1)?;
                    place.entry = (at - self.units[place.unit].start) as u64;
                }
                NameStep::See(_) | NameStep::Unknown => return None,
            }
        }
        None
    }
}

impl LoadedUnit {
    /// Returns the entries of one half of the unit.
    fn entries(&self, is_split: bool) -> Option<&UnitEntries> {
        match &self.split {
            _ if !is_split => Some(&self.main),
            Split::Read(split) => Some(split),
            _ => None,
        }
    }

    /// Finds what is at an address. Returns the file and line there, and whether the entries are
    /// of the other half.
    fn find(
        &mut self,
        address: u64,
        tables: &mut Tables,
        entries: &mut Vec<FoundEntry>,
    ) -> (Option<(u32, u32)>, bool) {
        let (unit, is_split) = match &self.split {
            Split::Read(split) => (&**split, true),
            _ => (&self.main, false),
        };
        let code = self.code.get_or_insert_with(|| {
            let lines = tables.lines_of(&self.main.unit);
            let subprograms = Subprograms::read(unit, &mut tables.work_left);
            Box::new(Code { lines, subprograms })
        });
        code.subprograms.find(unit, address, &mut tables.work_left, entries);
        (tables.lines(code.lines).and_then(|lines| lines.find(address)), is_split)
    }
}

impl Split {
    /// Reads the other half of a unit.
    fn read(unit: &Unit, tables: &mut Tables, load: LoadSplit<'_>) -> Split {
        let Some(id) = unit.id else { return Split::None };
        let (folder, file) = (unit.text(unit.folder), unit.text(unit.split_file));
        let mut split = Split::None;
        load(SplitUnit { id, folder, file }, &mut |sections| {
            let found = Unit::read_split(sections, unit);
            let is_found = found.is_some();
            if let Some(found) = found {
                tables.allow_split_file(sections);
                split = Split::Read(Box::new(UnitEntries::new(found, tables)));
            }
            is_found
        });
        split
    }
}
