//! The functions of a unit (subprograms), and the calls that were inlined into each.
//!
//! The first lookup in a unit finds all its functions; the first lookup in a function finds the
//! calls in it. Neither recurses: entries are read in their order, and their depth is counted.

use super::abbreviations::Abbreviations;
use super::constants::*;
use super::lines::NO_FILE;
use super::ranges::{AddressRange, CodePlace};
use super::reader::Reader;
use super::spans::{Span, find_last, sort};
use super::tables::{Tables, WorkLeft};
use super::unit::Unit;
use super::value::Value;
use std::sync::Arc;

/// How deep inlined calls may be nested. Those below that are left out.
const INLINED_DEPTH_MAX: usize = 256;

/// A unit, and what is needed to read its entries.
pub(super) struct UnitEntries {
    pub(super) unit: Unit,
    pub(super) abbreviations: Arc<Abbreviations>,
}

/// The functions of a unit.
pub(super) struct Subprograms {
    /// The owners are indices into `all`.
    ranges: Vec<Span>,
    all: Vec<Subprogram>,
}

/// A function.
struct Subprogram {
    entry: u64,
    name: Name,
    /// None until a lookup finds this function.
    inlined: Option<Inlined>,
}

/// The calls that were inlined into a function.
struct Inlined {
    /// The owners are indices into `calls`.
    ranges: Vec<Span>,
    calls: Vec<InlinedCall>,
}

struct InlinedCall {
    entry: u64,
    name: Name,
    /// Where the call is, not what was called.
    file: u32,
    line: u32,
}

/// The name of a function.
#[derive(Clone, Copy)]
pub(super) enum Name {
    /// No lookup has needed it yet.
    Unread,
    Read(Option<&'static [u8]>),
}

/// A function at an address, or a call that was inlined there.
#[derive(Clone, Copy)]
pub(super) struct FoundEntry {
    subprogram: u32,
    /// None for the function itself.
    call: Option<u32>,
    pub(super) entry: u64,
    pub(super) name: Name,
    /// Where the call is, if this is one.
    pub(super) file: u32,
    pub(super) line: u32,
}

/// What an entry says about the name of its function.
pub(super) enum NameStep {
    Found(&'static [u8]),
    /// Another entry says it.
    See(Value),
    Unknown,
}

impl UnitEntries {
    pub(super) fn new(unit: Unit, tables: &mut Tables) -> UnitEntries {
        UnitEntries { abbreviations: tables.abbreviations_of(&unit), unit }
    }

    /// Reads the name of the function `entry`, or where it is. Takes the bytes that were read from
    /// `bytes_left`.
    pub(super) fn name_step(&self, entry: u64, bytes_left: &mut usize) -> NameStep {
        let Some(mut reader) = self.unit.entries_from(entry) else { return NameStep::Unknown };
        let before = reader.len();
        let step = self.try_name_step(&mut reader);
        let mut bytes = before - reader.len();
        if let Some(NameStep::Found(name)) = step {
            bytes = bytes.saturating_add(name.len());
        }
        match (step, bytes_left.checked_sub(bytes)) {
            (Some(step), Some(left)) => {
                *bytes_left = left;
                step
            }
            (_, left) => {
                *bytes_left = left.unwrap_or(0);
                NameStep::Unknown
            }
        }
    }

    fn try_name_step(&self, reader: &mut Reader) -> Option<NameStep> {
        let abbreviation = self.abbreviations.get(reader.uleb()?)?;
        let (mut name, mut other) = (Value::Other, None);
        for attribute in self.abbreviations.attributes(abbreviation) {
            let value = attribute.value(reader, self.unit.encoding)?;
            match (attribute.name, value) {
                // It is in the file that `dwz` has made.
                (DW_AT_LINKAGE_NAME | DW_AT_MIPS_LINKAGE_NAME | DW_AT_NAME, Value::Other) => {}
                (DW_AT_LINKAGE_NAME | DW_AT_MIPS_LINKAGE_NAME, _) => {
                    name = value;
                    break;
                }
                (DW_AT_NAME, _) => name = value,
                (DW_AT_ABSTRACT_ORIGIN | DW_AT_SPECIFICATION, _) => other = Some(value),
                _ => {}
            }
        }
        self.unit.text(name).map(NameStep::Found).or(other.map(NameStep::See))
    }
}

impl Subprograms {
    /// Finds the functions of a unit. If an entry is damaged, those before it.
    pub(super) fn read(entries: &UnitEntries, left: &mut WorkLeft) -> Subprograms {
        let mut subprograms = Subprograms { ranges: Vec::new(), all: Vec::new() };
        let _ = subprograms.read_all(entries, left);
        sort(&mut subprograms.ranges);
        subprograms.all.shrink_to_fit();
        subprograms
    }

    fn read_all(&mut self, entries: &UnitEntries, left: &mut WorkLeft) -> Option<()> {
        let UnitEntries { unit, abbreviations } = entries;
        let mut found = Vec::new();
        let mut reader = unit.entries();
        left.take(reader.len())?;
        while reader.len() != 0 {
            let entry = unit.entry_at(&reader);
            let code = reader.uleb()?;
            if code == 0 {
                continue;
            }
            let abbreviation = abbreviations.get(code)?;
            if abbreviation.tag != DW_TAG_SUBPROGRAM {
                abbreviations.skip(abbreviation, &mut reader)?;
                continue;
            }
            let mut place = CodePlace::default();
            for attribute in abbreviations.attributes(abbreviation) {
                match attribute.name {
                    DW_AT_LOW_PC | DW_AT_HIGH_PC | DW_AT_RANGES => {
                        place.set(attribute.name, attribute.value(&mut reader, unit.encoding)?);
                    }
                    _ => attribute.skip(&mut reader, unit.encoding)?,
                }
            }
            unit.add_ranges(&place, left, &mut found);
            if !found.is_empty() {
                let owner = u32::try_from(self.all.len()).ok()?;
                self.all.push(Subprogram { entry, name: Name::Unread, inlined: None });
                add_spans(&mut found, 0, owner, &mut self.ranges);
            }
        }
        Some(())
    }

    /// Adds what is at an address to `found`: the function, and the calls in it from the outermost
    /// to the innermost.
    pub(super) fn find(
        &mut self,
        entries: &UnitEntries,
        address: u64,
        left: &mut WorkLeft,
        found: &mut Vec<FoundEntry>,
    ) {
        let Some((index, _)) = find_span(&self.ranges, 0, address) else { return };
        let Some(subprogram) = self.all.get_mut(index as usize) else { return };
        let inlined = subprogram
            .inlined
            .get_or_insert_with(|| Inlined::read(entries, subprogram.entry, left));
        let (entry, name) = (subprogram.entry, subprogram.name);
        found.push(FoundEntry {
            subprogram: index,
            call: None,
            entry,
            name,
            file: NO_FILE,
            line: 0,
        });
        let mut ranges = &inlined.ranges[..];
        let mut depth = 0;
        while let Some((index_of_call, at)) = find_span(ranges, depth, address) {
            let Some(call) = inlined.calls.get(index_of_call as usize) else { return };
            found.push(FoundEntry {
                subprogram: index,
                call: Some(index_of_call),
                entry: call.entry,
                name: call.name,
                file: call.file,
                line: call.line,
            });
            ranges = &ranges[at + 1..];
            depth += 1;
        }
    }

    /// Keeps the name of what `find` has found.
    pub(super) fn keep_name(&mut self, of: &FoundEntry, name: Option<&'static [u8]>) {
        let Some(subprogram) = self.all.get_mut(of.subprogram as usize) else { return };
        match (of.call, &mut subprogram.inlined) {
            (None, _) => subprogram.name = Name::Read(name),
            (Some(call), Some(inlined)) => {
                if let Some(call) = inlined.calls.get_mut(call as usize) {
                    call.name = Name::Read(name);
                }
            }
            _ => {}
        }
    }
}

/// Moves the ranges of a function or call from `found` to `spans`.
fn add_spans(found: &mut Vec<AddressRange>, depth: u32, owner: u32, spans: &mut Vec<Span>) {
    for range in found.iter() {
        spans.push(Span { depth, key: range.start, end: range.end, owner });
    }
    found.clear();
}

/// Finds the span at this depth with this address. Returns its owner, and its index.
fn find_span(spans: &[Span], depth: u32, address: u64) -> Option<(u32, usize)> {
    let index = find_last(spans, depth, address)?;
    (address < spans[index].end).then_some((spans[index].owner, index))
}

impl Inlined {
    /// Finds the calls that were inlined into the function `entry`. If an entry is damaged, those
    /// before it.
    fn read(entries: &UnitEntries, entry: u64, left: &mut WorkLeft) -> Inlined {
        let mut inlined = Inlined { ranges: Vec::new(), calls: Vec::new() };
        if let Some(mut reader) = entries.unit.entries_from(entry)
            && !left.is_used_up()
        {
            let before = reader.len();
            let _ = inlined.read_all(entries, &mut reader, left);
            left.take_up_to(before - reader.len());
        }
        sort(&mut inlined.ranges);
        inlined.calls.shrink_to_fit();
        inlined
    }

    fn read_all(
        &mut self,
        entries: &UnitEntries,
        reader: &mut Reader,
        left: &mut WorkLeft,
    ) -> Option<()> {
        let UnitEntries { unit, abbreviations } = entries;
        let function = abbreviations.get(reader.uleb()?)?;
        abbreviations.skip(function, reader)?;
        if !function.has_children {
            return Some(());
        }
        // How many entries enclose the next one: here it is the function alone.
        let mut depth: usize = 1;
        // The depths of the inlined calls that enclose the next entry.
        let mut enclosing: Vec<usize> = Vec::new();
        // Entries at least that deep are in another function, or too deep.
        let mut left_out: usize = usize::MAX;
        let mut found = Vec::new();
        while depth > 0 {
            let entry = unit.entry_at(reader);
            let code = reader.uleb()?;
            if code == 0 {
                depth -= 1;
                if depth < left_out {
                    left_out = usize::MAX;
                }
                if enclosing.last() == Some(&depth) {
                    enclosing.pop();
                }
                continue;
            }
            let abbreviation = abbreviations.get(code)?;
            let is_call = abbreviation.tag == DW_TAG_INLINED_SUBROUTINE && depth < left_out;
            if is_call {
                let mut place = CodePlace::default();
                let mut call = InlinedCall { entry, name: Name::Unread, file: NO_FILE, line: 0 };
                for attribute in abbreviations.attributes(abbreviation) {
                    let value = match attribute.name {
                        DW_AT_LOW_PC | DW_AT_HIGH_PC | DW_AT_RANGES | DW_AT_CALL_FILE
                        | DW_AT_CALL_LINE => attribute.value(reader, unit.encoding)?,
                        _ => {
                            attribute.skip(reader, unit.encoding)?;
                            continue;
                        }
                    };
                    place.set(attribute.name, value);
                    match (attribute.name, value) {
                        // Before version 5 the number 0 was no file.
                        (DW_AT_CALL_FILE, Value::Number(file))
                            if file != 0 || unit.encoding.version >= 5 =>
                        {
                            call.file = u32::try_from(file).unwrap_or(NO_FILE);
                        }
                        (DW_AT_CALL_LINE, Value::Number(line)) => call.line = line as u32,
                        _ => {}
                    }
                }
                unit.add_ranges(&place, left, &mut found);
                let owner = u32::try_from(self.calls.len()).ok()?;
                let depth = enclosing.len() as u32;
                self.calls.push(call);
                add_spans(&mut found, depth, owner, &mut self.ranges);
            } else {
                abbreviations.skip(abbreviation, reader)?;
            }
            if !abbreviation.has_children {
                continue;
            }
            if is_call && enclosing.len() < INLINED_DEPTH_MAX {
                enclosing.push(depth);
            } else if (is_call || abbreviation.tag == DW_TAG_SUBPROGRAM) && depth < left_out {
                left_out = depth + 1;
            }
            depth += 1;
        }
        Some(())
    }
}
