//! The table with which a program says where its goroutines are (`trefoil_layout`).

use std::collections::HashMap;
use std::path::PathBuf;

use trefoil_base::symbols::Elf;

use super::files::{LoadedFile, LoadedFiles};
use super::images::loads;
use super::memory::{Process, u32_at, u64_at};

/// What the table begins with.
const MAGIC: &[u8] = b"trefoil\0layout\0\x01";
/// The version of the table that this command understands.
const VERSION: u32 = 1;
/// Bytes before the entries; bytes of an entry and of its name.
const HEADER_BYTES: usize = 24;
const ENTRY_BYTES: usize = 40;
const NAME_BYTES: usize = 32;
/// More entries are a sign that it is no table.
const ENTRIES_MAX: u32 = 10_000;
/// Tables of a process that are read at most, and places of a file where one may be.
const TABLES_MAX: usize = 64;

/// The entries by name.
#[derive(Clone)]
pub(super) struct Layout(HashMap<String, u64>);

impl Layout {
    /// Finds the table of the process. A process may have several, in shared libraries: the result
    /// has all of them.
    pub(super) fn find_all(process: &Process, loaded: &LoadedFiles) -> Result<Vec<Layout>, String> {
        let found: Vec<u64> =
            loaded.files.iter().flat_map(|file| find_in(process, file)).take(TABLES_MAX).collect();
        if !found.is_empty() {
            return found.into_iter().map(|address| Layout::read(process, address)).collect();
        }
        let listed = |what: &str, paths: &[PathBuf]| {
            let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
            match paths.is_empty() {
                true => String::new(),
                false => format!(" These files are {what}: {}.", paths.join(", ")),
            }
        };
        let gone = listed("gone", &loaded.gone);
        let too_large = listed("too large", &loaded.too_large);
        Err(format!(
            "it does not use trefoil, or an older version without a table.{gone}{too_large}"
        ))
    }

    fn read(process: &Process, address: u64) -> Result<Layout, String> {
        let damaged = |e| format!("the table of trefoil cannot be read: {e}");
        let mut header = [0; HEADER_BYTES];
        process.read(address, &mut header).map_err(damaged)?;
        let (version, count) = (u32_at(&header, 16), u32_at(&header, 20));
        if version != VERSION || count > ENTRIES_MAX {
            return Err(format!(
                "its trefoil has a table of version {version}; this command reads {VERSION}"
            ));
        }
        let mut entries = vec![0; count as usize * ENTRY_BYTES];
        process.read(address.wrapping_add(HEADER_BYTES as u64), &mut entries).map_err(damaged)?;
        let entry = |bytes: &[u8]| {
            let name = bytes[..NAME_BYTES].split(|&b| b == 0).next().unwrap_or_default();
            (String::from_utf8_lossy(name).into_owned(), u64_at(bytes, NAME_BYTES))
        };
        Ok(Layout(entries.chunks_exact(ENTRY_BYTES).map(entry).collect()))
    }

    /// Changes the values of some entries.
    #[cfg(test)]
    pub(super) fn change(&mut self, mut f: impl FnMut(&mut u64)) {
        self.0.values_mut().for_each(&mut f);
    }

    /// Removes an entry, as if the program were older.
    #[cfg(test)]
    pub(super) fn remove(&mut self, name: &str) {
        assert!(self.0.remove(name).is_some());
    }

    /// Returns an entry that this command needs.
    pub(super) fn get(&self, name: &str) -> Result<u64, String> {
        let missing = || format!("its trefoil is of another version: {name} is missing");
        self.0.get(name).copied().ok_or_else(missing)
    }
}

/// Returns the addresses of the tables of a file: at most one per place where it is loaded. A
/// stripped program has no symbols: then the table is found by its first bytes.
fn find_in(process: &Process, file: &LoadedFile) -> Vec<u64> {
    let has_magic = |address: u64| {
        let mut bytes = [0; MAGIC.len()];
        process.read(address, &mut bytes).is_ok() && bytes == MAGIC
    };
    let find = |places: &[u64]| -> Vec<u64> {
        let in_image = |bias: u64| {
            let mut addresses = places.iter().map(|&place| bias.wrapping_add(place));
            addresses.find(|&address| has_magic(address))
        };
        file.images.iter().filter_map(|image| in_image(image.bias)).take(TABLES_MAX).collect()
    };
    let named = file.elf.symbols().filter(|s| s.name == b"trefoil_layout").map(|s| s.address);
    let found = find(&named.take(TABLES_MAX).collect::<Vec<_>>());
    if found.is_empty() { find(&places_of_magic(&file.elf)) } else { found }
}

/// Returns the addresses in the file at which the first bytes of a table are. Segments may overlap:
/// each byte is read once.
fn places_of_magic(elf: &Elf<'_>) -> Vec<u64> {
    let mut loads: Vec<_> = loads(elf).filter(|segment| !segment.bytes.is_empty()).collect();
    loads.sort_by_key(|segment| segment.offset);
    let mut places = Vec::new();
    // The first offset in the file that was not read.
    let mut unread = 0;
    for segment in loads {
        let (bytes, first) = (segment.bytes, unread.max(segment.offset));
        // The table is a static: aligned as its pointers.
        let misaligned = segment.address.wrapping_add(first - segment.offset) % 8;
        let first = first.saturating_add((8 - misaligned) % 8);
        let end = segment
            .offset
            .saturating_add((bytes.len() as u64 + 1).saturating_sub(MAGIC.len() as u64));
        let matching = (first..end)
            .step_by(8)
            .map(|offset| offset - segment.offset)
            .filter(|&at| bytes[at as usize..].starts_with(MAGIC))
            .map(|at| segment.address.wrapping_add(at));
        places.extend(matching.take(TABLES_MAX - places.len()));
        unread = unread.max(end);
    }
    places
}

#[cfg(test)]
mod tests {
    use super::super::images::tests::{Header, R, file};
    use super::*;

    #[test]
    fn a_table_in_segments_that_overlap_is_found_once() {
        const START: usize = 0x1000;
        const TABLE: usize = 0x3008;
        const BYTES: usize = 0x4_0000;
        let places = |headers: &[Header]| {
            let mut bytes = file(headers);
            bytes.resize(BYTES, 0);
            bytes[TABLE..TABLE + MAGIC.len()].copy_from_slice(MAGIC);
            places_of_magic(&Elf::parse(&bytes).unwrap())
        };
        let load = |offset: usize, bytes: usize, address: u64| {
            (R, offset as u64, address, bytes as u64, bytes as u64)
        };
        let many: Vec<Header> = (0..50).map(|i| load(START, BYTES - START, i << 20)).collect();
        assert_eq!(places(&many), [(TABLE - START) as u64]);
        // The table begins where the first segment ends.
        let (first, second) = (load(START, TABLE - START, 0), load(0x2000, 0x4000, 0x7000));
        assert_eq!(places(&[first, second]), [0x7000 + (TABLE - 0x2000) as u64]);
        // It begins in the first segment, and ends in the second one.
        let first = load(START, TABLE + 8 - START, 0);
        assert_eq!(places(&[first, second]), [0x7000 + (TABLE - 0x2000) as u64]);
        // It ends with its segment, at an address that is a multiple of 8 unlike its offset.
        let (at, bytes) = (TABLE - 1, MAGIC.len() + 1);
        assert_eq!(places(&[load(at, bytes, 0x7fff)]), [0x8000]);
        assert_eq!(places(&[load(at, bytes - 1, 0x7fff)]), []);
        assert_eq!(places(&[load(TABLE, MAGIC.len(), u64::MAX - 3)]), []);
    }
}
