//! The table with which a program says where its goroutines are (`trefoil_layout`).

use std::collections::HashMap;

use trefoil_base::symbols::Elf;

use super::images::{Image, files, images};
use super::memory::{Process, read_elf, u32_at, u64_at};

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

/// The entries by name.
#[derive(Clone)]
pub(super) struct Layout(HashMap<String, u64>);

impl Layout {
    /// Finds the table of the process. A process may have several, in shared libraries: the result
    /// has all of them.
    pub(super) fn find_all(process: &Process) -> Result<Vec<Layout>, String> {
        let mut found = Vec::new();
        let mut gone = Vec::new();
        for (path, mappings) in files(process) {
            match read_elf(path) {
                Some(bytes) => {
                    let Some(elf) = Elf::parse(&bytes) else { continue };
                    let images = images(&elf, &mappings);
                    found.extend(images.iter().filter_map(|image| find_in(process, &elf, image)));
                }
                None if !path.exists() => gone.push(path.display().to_string()),
                None => {}
            }
        }
        if !found.is_empty() {
            return found.into_iter().map(|address| Layout::read(process, address)).collect();
        }
        let missing = match gone.is_empty() {
            true => String::new(),
            false => format!(" These files are gone: {}.", gone.join(", ")),
        };
        Err(format!("it does not use trefoil, or an older version without a table.{missing}"))
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

/// Returns the address of the table of one image, if it has one. A stripped program has no symbols:
/// then the table is found by its first bytes.
fn find_in(process: &Process, elf: &Elf<'_>, image: &Image) -> Option<u64> {
    let mut loads = elf.segments().filter(|s| s.kind == libc::PT_LOAD);
    let loaded = |address: u64| image.bias.wrapping_add(address);
    let has_magic = |address: u64| {
        let mut bytes = [0; 16];
        process.read(address, &mut bytes).is_ok() && bytes == MAGIC
    };
    let named = elf.symbols().filter(|s| s.name == b"trefoil_layout");
    if let Some(address) = named.map(|s| loaded(s.address)).find(|&a| has_magic(a)) {
        return Some(address);
    }
    loads.find_map(|segment| {
        let bytes = segment.bytes;
        // The table is a static: aligned as its pointers.
        let aligned = (segment.address.wrapping_neg() % 8) as usize;
        let at = (aligned..bytes.len().saturating_sub(MAGIC.len()))
            .step_by(8)
            .filter(|&at| bytes[at..].starts_with(MAGIC));
        at.map(|at| loaded(segment.address.wrapping_add(at as u64))).find(|&a| has_magic(a))
    })
}
