//! What several units may share: abbreviations and line tables. Each of them is read once.
//!
//! Tables that begin at different places may still have parts in common, and so may the halves of
//! units in a `.dwp` file. [`WorkLeft`] bounds what is read and kept of them in all.

use super::abbreviations::Abbreviations;
use super::lines::Lines;
use super::reader::Reader;
use super::sections::DebugSections;
use super::unit::Unit;
use super::value::Encoding;
use crate::sys::map::Map;
use std::sync::Arc;

/// How many bytes all lookups read, for each byte of the sections. The entries of a unit are read
/// once to find its functions and about once to find inlined calls; all else is read once.
const WORK_FACTOR: usize = 4;

/// How many bytes or entries may still be read. What would be more is taken as missing.
pub(super) struct WorkLeft(usize);

impl WorkLeft {
    /// Returns enough for sections of `bytes` bytes, even if they are read several times.
    pub(super) fn for_bytes(bytes: usize) -> WorkLeft {
        WorkLeft(bytes.saturating_mul(WORK_FACTOR))
    }

    /// Returns enough for each entry of all lists of ranges.
    pub(super) fn for_lists_of(sections: &DebugSections) -> WorkLeft {
        WorkLeft(sections.ranges.len().saturating_add(sections.rnglists.len()))
    }

    /// Takes the work to read `count` bytes or entries. Returns None if there is less left.
    pub(super) fn take(&mut self, count: usize) -> Option<()> {
        self.0 = self.0.checked_sub(count)?;
        Some(())
    }

    /// Takes the work to read `count` bytes, or all that is left: they were read.
    pub(super) fn take_up_to(&mut self, count: usize) {
        self.0 = self.0.saturating_sub(count);
    }

    /// Returns whether nothing may be read any more.
    pub(super) fn is_used_up(&self) -> bool {
        self.0 == 0
    }
}

/// The abbreviations and line tables of all units that were looked up.
pub(super) struct Tables {
    /// Indices into `abbreviations` or `lines`.
    known: Map<u64, u32>,
    abbreviations: Vec<Arc<Abbreviations>>,
    /// None if it is damaged.
    lines: Vec<Option<Lines>>,
    pub(super) work_left: WorkLeft,
}

/// What is known by a key.
enum Kind {
    /// The values of entries are read by this encoding.
    Abbreviations(Encoding),
    Lines,
    /// A `.dwo` or `.dwp` file whose size is part of the work.
    SplitFile,
}

/// Returns what a table is known by: its kind, and the address of its first byte in this process,
/// which has at most 56 bits.
fn key(kind: Kind, address: usize) -> u64 {
    let kind = match kind {
        Kind::Lines => 0,
        Kind::SplitFile => 1,
        Kind::Abbreviations(Encoding { version, is_64 }) => version << 1 | u16::from(is_64),
    };
    (address as u64) << 8 | u64::from(kind)
}

impl Tables {
    pub(super) fn new(sections: &DebugSections) -> Tables {
        Tables {
            known: Map::new(),
            abbreviations: Vec::new(),
            lines: Vec::new(),
            work_left: WorkLeft::for_bytes(sections.bytes_of_tables()),
        }
    }

    /// Allows what is in a `.dwo` or `.dwp` file to be read.
    pub(super) fn allow_split_file(&mut self, sections: &DebugSections) {
        let key = key(Kind::SplitFile, sections.file_start);
        if self.known.insert(key, 0).is_none() {
            let more = WorkLeft::for_bytes(sections.file_bytes);
            self.work_left.0 = self.work_left.0.saturating_add(more.0);
        }
    }

    /// Returns the abbreviations of a unit.
    pub(super) fn abbreviations_of(&mut self, unit: &Unit) -> Arc<Abbreviations> {
        let table = unit.abbreviations_reader();
        let address = table.map_or(0, |table| table.address());
        let key = key(Kind::Abbreviations(unit.encoding), address);
        if let Some(&index) = self.known.get(&key) {
            return self.abbreviations[index as usize].clone();
        }
        let all = Arc::new(Abbreviations::read(table, unit.encoding, &mut self.work_left));
        if let Ok(index) = u32::try_from(self.abbreviations.len()) {
            self.abbreviations.push(all.clone());
            self.known.insert(key, index);
        }
        all
    }

    /// Returns the number of the line table of a unit.
    pub(super) fn lines_of(&mut self, unit: &Unit) -> Option<u32> {
        let key = key(Kind::Lines, Reader::at(unit.sections.line, unit.lines_at?)?.address());
        if let Some(&index) = self.known.get(&key) {
            return Some(index);
        }
        let index = u32::try_from(self.lines.len()).ok()?;
        self.lines.push(Lines::read(unit, &mut self.work_left));
        self.known.insert(key, index);
        Some(index)
    }

    /// Returns the line table with this number.
    pub(super) fn lines(&self, index: Option<u32>) -> Option<&Lines> {
        self.lines.get(index? as usize)?.as_ref()
    }

    pub(super) fn lines_mut(&mut self, index: Option<u32>) -> Option<&mut Lines> {
        self.lines.get_mut(index? as usize)?.as_mut()
    }

    /// Returns how many abbreviations and line tables are kept.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.abbreviations.iter().map(|all| all.len()).sum(), self.lines.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_taken_until_none_is_left() {
        let mut left = WorkLeft::for_bytes(1);
        assert_eq!(left.take(WORK_FACTOR + 1), None);
        assert_eq!(left.take(WORK_FACTOR - 1), Some(()));
        assert!(!left.is_used_up());
        left.take_up_to(usize::MAX);
        assert!(left.is_used_up());
        assert_eq!((left.take(0), left.take(1)), (Some(()), None));
        let mut left = WorkLeft::for_bytes(usize::MAX);
        assert_eq!(left.take(usize::MAX), Some(()));
    }

    #[test]
    fn a_split_file_adds_work_once() {
        let sections = |file_start, file_bytes| DebugSections {
            file_start,
            file_bytes,
            ..DebugSections::default()
        };
        let mut tables = Tables::new(&sections(0, 0));
        assert!(tables.work_left.is_used_up());
        for (start, bytes, left) in [(7, 100, 100), (7, 100, 100), (8, 10, 110), (7, 100, 110)] {
            tables.allow_split_file(&sections(start, bytes));
            assert_eq!(tables.work_left.0, left * WORK_FACTOR);
        }
        tables.allow_split_file(&sections(9, usize::MAX));
        assert_eq!(tables.work_left.0, usize::MAX);
    }
}
