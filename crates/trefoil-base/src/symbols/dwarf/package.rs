//! A `.dwp` file: the `.dwo` files of a program in one, with an index.
//!
//! The index is a table of rows, one for each unit, with a column for each section. A row says
//! which part of each section is of the unit. A hash table finds the row by the unit's number.

use super::constants::*;
use super::reader::Reader;
use super::sections::DebugSections;

/// The sections of a `.dwp` file, and its index.
pub(crate) struct Package {
    sections: DebugSections,
    version: u16,
    columns: u32,
    rows: u32,
    /// A power of two.
    slots: u32,
    slot_ids: &'static [u8],
    slot_rows: &'static [u8],
    column_sections: &'static [u8],
    offsets: &'static [u8],
    sizes: &'static [u8],
}

impl Package {
    /// Reads the index. Returns None if there is none, or if it is damaged.
    pub(crate) fn read(section: &mut dyn FnMut(&str) -> &'static [u8]) -> Option<Package> {
        let mut reader = Reader::new(section(".debug_cu_index"));
        // In version 2 the number has 32 bits. In version 5 it has 16, and zeroes follow.
        let version = match reader.u32()? {
            2 => 2,
            5 => 5,
            _ => return None,
        };
        let (columns, rows, slots) = (reader.u32()?, reader.u32()?, reader.u32()?);
        if !slots.is_power_of_two() {
            return None;
        }
        let slot_ids = reader.take(u64::from(slots) * 8)?;
        let slot_rows = reader.take(u64::from(slots) * 4)?;
        let column_sections = reader.take(u64::from(columns) * 4)?;
        let cells = u64::from(columns).checked_mul(rows.into())?.checked_mul(4)?;
        let (offsets, sizes) = (reader.take(cells)?, reader.take(cells)?);
        Some(Package {
            sections: DebugSections::of_split_file(section),
            version,
            columns,
            rows,
            slots,
            slot_ids,
            slot_rows,
            column_sections,
            offsets,
            sizes,
        })
    }

    /// Returns the part of each section that is of the unit `id`.
    pub(crate) fn find(&self, id: u64) -> Option<DebugSections> {
        let row = u64::from(self.row(id)?.checked_sub(1)?);
        if row >= self.rows.into() {
            return None;
        }
        let DebugSections { str, file_start, file_bytes, .. } = self.sections;
        let mut sections =
            DebugSections { str, file_start, file_bytes, ..DebugSections::default() };
        for column in 0..self.columns.into() {
            let cell = row * u64::from(self.columns) + column;
            let offset = entry(self.offsets, cell)?;
            let size = entry(self.sizes, cell)?;
            let (part, whole) = match entry(self.column_sections, column)? {
                DW_SECT_INFO => (&mut sections.info, self.sections.info),
                DW_SECT_ABBREV => (&mut sections.abbrev, self.sections.abbrev),
                DW_SECT_STR_OFFSETS => (&mut sections.str_offsets, self.sections.str_offsets),
                DW_SECT_RNGLISTS if self.version == 5 => {
                    (&mut sections.rnglists, self.sections.rnglists)
                }
                _ => continue,
            };
            *part = Reader::at(whole, offset.into())?.take(size.into())?;
        }
        Some(sections)
    }

    fn row(&self, id: u64) -> Option<u32> {
        let mask = u64::from(self.slots - 1);
        let mut slot = id & mask;
        let step = (id >> 32 & mask) | 1;
        for _ in 0..self.slots {
            match Reader::at_entry(self.slot_ids, 0, slot, 8)?.u64()? {
                found if found == id => return entry(self.slot_rows, slot),
                0 => return None,
                _ => slot = (slot + step) & mask,
            }
        }
        None
    }
}

fn entry(table: &'static [u8], index: u64) -> Option<u32> {
    Reader::at_entry(table, 0, index, 4)?.u32()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An index with two units in four slots: the second collides with the first.
    fn index(version: u32) -> Vec<u8> {
        let ids: [u64; 4] = [0, 0x1_0000_0001, 5, 0];
        let slot_rows = [0, 1, 2, 0];
        let columns = [DW_SECT_INFO, DW_SECT_RNGLISTS];
        let (offsets, sizes) = ([0, 0, 4, 1], [4, 1, 3, 2]);
        let mut index = Vec::new();
        for number in [version, 2, 2, 4] {
            index.extend(number.to_le_bytes());
        }
        for id in ids {
            index.extend(id.to_le_bytes());
        }
        for numbers in [&slot_rows[..], &columns, &offsets, &sizes] {
            for number in numbers {
                index.extend(u32::to_le_bytes(*number));
            }
        }
        index
    }

    fn read(index: Vec<u8>) -> Option<Package> {
        let index: &'static [u8] = index.leak();
        Package::read(&mut |name| match name {
            ".debug_cu_index" => index,
            ".debug_info.dwo" => b"unitTWO",
            ".debug_rnglists.dwo" => b"rRR",
            ".debug_str.dwo" => b"text",
            _ => &[],
        })
    }

    #[test]
    fn a_unit_is_found_by_its_number() {
        let package = read(index(5)).unwrap();
        let first = package.find(0x1_0000_0001).unwrap();
        assert_eq!(
            (first.info, first.rnglists, first.str),
            (&b"unit"[..], &b"r"[..], &b"text"[..])
        );
        let second = package.find(5).unwrap();
        assert_eq!((second.info, second.rnglists), (&b"TWO"[..], &b"RR"[..]));
        for id in [1, 2, 4, u64::MAX] {
            assert!(package.find(id).is_none(), "{id}");
        }
        // There the last column is another section.
        assert_eq!(read(index(2)).unwrap().find(5).unwrap().rnglists, b"");
    }

    #[test]
    fn a_damaged_index_is_refused_or_finds_less() {
        assert!(read(index(3)).is_none());
        assert!(read(Vec::new()).is_none());
        let whole = index(5);
        for len in 0..whole.len() {
            assert!(read(whole[..len].to_vec()).is_none(), "{len}");
        }
        for at in 0..whole.len() {
            for byte in [0, 1, 0x80, 0xff] {
                let mut damaged = whole.clone();
                damaged[at] = byte;
                if let Some(package) = read(damaged) {
                    for id in [0, 5, 0x1_0000_0001, u64::MAX] {
                        let _ = package.find(id);
                    }
                }
            }
        }
    }
}
