//! `.debug_aranges`: the addresses of units, in a table of their own.
//!
//! It is needed for units whose code is in several places but whose compiler could not say so:
//! lists of ranges came with DWARF 3.

use super::ranges::{AddressRange, add};
use super::reader::Reader;
use super::spans::{Span, find_last, sort};

/// Where the addresses of each unit are in the section.
pub(super) struct AddressSets {
    section: &'static [u8],
    /// By the start of the unit in `.debug_info`. `end` is the start of the set in the section.
    sets: Vec<Span>,
}

/// The addresses of a unit.
struct AddressSet {
    /// The start of the unit in `.debug_info`.
    unit: u64,
    /// Pairs of an address and a length.
    pairs: Reader,
}

impl AddressSets {
    /// Reads the headers of all sets.
    pub(super) fn read(section: &'static [u8]) -> AddressSets {
        let mut sets = Vec::new();
        let mut rest = Reader::new(section);
        while rest.len() != 0 {
            let start = (section.len() - rest.len()) as u64;
            let Some((set, after)) = AddressSet::read(rest) else { break };
            rest = after;
            if let Some(set) = set {
                sets.push(Span { depth: 0, key: set.unit, end: start, owner: 0 });
            }
        }
        sort(&mut sets);
        AddressSets { section, sets }
    }

    /// Adds the addresses of a unit to `ranges`.
    pub(super) fn add_ranges(&self, unit: usize, ranges: &mut Vec<AddressRange>) {
        let unit = unit as u64;
        let Some(last) = find_last(&self.sets, 0, unit) else { return };
        // A unit has one set, unless its compiler is wrong.
        for found in self.sets[..=last].iter().rev() {
            if found.key != unit {
                return;
            }
            let _ = self.add_set(found.end, ranges);
        }
    }

    /// Adds the addresses of a set. Returns None at its end.
    fn add_set(&self, at: u64, ranges: &mut Vec<AddressRange>) -> Option<()> {
        let (set, _) = AddressSet::read(Reader::at(self.section, at)?)?;
        let mut pairs = set?.pairs;
        loop {
            let (start, length) = (pairs.u64()?, pairs.u64()?);
            add(start, start.wrapping_add(length), ranges);
        }
    }
}

impl AddressSet {
    /// Reads a set. Returns it, unless it is of another version, and what follows it.
    fn read(mut reader: Reader) -> Option<(Option<AddressSet>, Reader)> {
        let before = reader.len();
        let (length, is_64) = reader.unit_length()?;
        let length_bytes = before - reader.len();
        let set = Reader::new(reader.take(length)?);
        Some((AddressSet::read_rest(set, length_bytes, is_64), reader))
    }

    fn read_rest(mut reader: Reader, length_bytes: usize, is_64: bool) -> Option<AddressSet> {
        let before = reader.len();
        let (version, unit) = (reader.u16()?, reader.offset(is_64)?);
        let (address_bytes, segment_bytes) = (reader.u8()?, reader.u8()?);
        if version != 2 || address_bytes != 8 || segment_bytes != 0 {
            return None;
        }
        // The first pair is aligned to the size of a pair, from the start of the set.
        let header_bytes = length_bytes + before - reader.len();
        reader.skip(header_bytes.next_multiple_of(16) - header_bytes)?;
        Some(AddressSet { unit, pairs: reader })
    }
}
