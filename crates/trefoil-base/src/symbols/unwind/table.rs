//! `Table`: the unwind table of a file. Finds the entry of an address by the sorted table in
//! `.eh_frame_hdr`, which the linker makes, or else by an index that is made when it is first needed.

use super::entry::{Head, cie_at_offset, entry, entry_at, head};
use super::reader::{Encoding, Reader};
use super::row::{Row, row_at};
use super::{Bytes, Cpu, Module, Part};
use std::ops::Range;

/// How the caller of the function at an address is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Recipe {
    /// By the frame pointer: no usable table has the address.
    FramePointer,
    /// Its file has a table, but not of this address. So the code was written by hand. Where it is
    /// stopped it probably has no frame yet; where it has called, it probably has a frame pointer.
    NoFrameYet,
    /// By a row of a table.
    Row(Row),
}

impl Recipe {
    /// Returns whether the caller was interrupted by a signal.
    #[inline]
    pub(super) fn is_signal_frame(&self) -> bool {
        matches!(self, Recipe::Row(Row { is_signal_frame: true, .. }))
    }
}

pub(super) struct Table {
    range: Range<u64>,
    bias: u64,
    /// The address of `.eh_frame`, before relocation.
    address: u64,
    eh_frame: Bytes,
    index: Index,
}

/// Where the entries are, sorted by address.
enum Index {
    /// In the file.
    Header(Header),
    /// The file has none.
    Wanted,
    /// Addresses of functions, and the offsets of their entries.
    Made(Vec<(u64, usize)>),
}

/// A usable section `.eh_frame_hdr`.
struct Header {
    address: u64,
    bytes: Bytes,
    /// The offset of its table.
    at: usize,
    /// How many entries the table has: at least 1.
    len: usize,
    encoding: Encoding,
    pointer_size: usize,
}

impl Table {
    pub(super) fn new(module: Module) -> Table {
        let Module { range, bias, eh_frame, eh_frame_hdr } = module;
        let (addresses, eh_frame) = eh_frame.unwrap_or_default();
        let header = eh_frame_hdr.and_then(Header::new);
        let index = header.map_or(Index::Wanted, Index::Header);
        Table { range, bias, address: addresses.start, eh_frame, index }
    }

    pub(super) fn start(&self) -> u64 {
        self.range.start
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        self.range.contains(&address)
    }

    /// Returns the section whose expressions the rows name.
    pub(super) fn eh_frame(&self) -> &[u8] {
        &self.eh_frame
    }

    /// Returns how the caller of the function at an address is found.
    pub(super) fn recipe(&mut self, address: u64, cpu: Cpu) -> Recipe {
        let address = address.wrapping_sub(self.bias);
        if let Index::Wanted = self.index {
            self.index = Index::Made(made_index(&self.eh_frame, self.address));
        }
        let Some(at) = self.index.find(address, self.address) else { return Recipe::FramePointer };
        match entry_at(&self.eh_frame, self.address, at) {
            None => Recipe::FramePointer,
            Some(entry) if !(entry.start..entry.end).contains(&address) => Recipe::NoFrameYet,
            // The return address is in a register that is not known.
            Some(entry) if entry.cie.return_address != cpu.numbers().return_address => {
                Recipe::FramePointer
            }
            Some(entry) => match row_at(&entry, cpu, self.address, address) {
                Some(row) => Recipe::Row(row),
                None => Recipe::NoFrameYet,
            },
        }
    }
}

impl Index {
    /// Returns the offset of the entry whose function has the address, or is the last one before
    /// it. If there is none before it, returns the first entry. `eh_frame` is the address of the
    /// section.
    fn find(&self, address: u64, eh_frame: u64) -> Option<usize> {
        match self {
            Index::Header(header) => {
                let entry = header.find(address)?;
                usize::try_from(entry.checked_sub(eh_frame)?).ok()
            }
            Index::Wanted => None,
            Index::Made(index) => {
                let after = index.partition_point(|&(start, _)| start <= address);
                index.get(after.saturating_sub(1)).map(|&(_, at)| at)
            }
        }
    }
}

impl Header {
    /// Returns None if the section has no table that can be searched.
    fn new((addresses, bytes): Part) -> Option<Header> {
        const VERSION: u8 = 1;
        let mut reader = Reader::new(&bytes, 0);
        let address = addresses.start;
        let version = reader.u8()?;
        let eh_frame = Encoding(reader.u8()?);
        let count = Encoding(reader.u8()?);
        let encoding = Encoding(reader.u8()?);
        if version != VERSION {
            return None;
        }
        reader.pointer(eh_frame, address, Some(address))?;
        let len = usize::try_from(reader.pointer(count, address, Some(address))?).ok()?;
        let at = reader.at();
        let pointer_size = encoding.size()?;
        let is_whole = len.checked_mul(2 * pointer_size)? <= bytes.len().checked_sub(at)?;
        let is_usable = is_whole && len != 0;
        is_usable.then_some(Header { address, bytes, at, len, encoding, pointer_size })
    }

    /// Returns the address of the entry whose function has the address, or is the last one before
    /// it, or is the first of all.
    fn find(&self, address: u64) -> Option<u64> {
        let (mut low, mut len) = (0, self.len);
        while len > 1 {
            let half = len / 2;
            if self.pointer(2 * (low + half))? <= address {
                low += half;
                len -= half;
            } else {
                len = half;
            }
        }
        self.pointer(2 * low + 1)
    }

    /// Returns a pointer of the table.
    #[inline]
    fn pointer(&self, number: usize) -> Option<u64> {
        let at = self.at + number * self.pointer_size;
        Reader::new(&self.bytes, at).pointer(self.encoding, self.address, Some(self.address))
    }
}

/// Reads all entries. Ends at the first that is damaged: the section may be followed by others.
fn made_index(bytes: &[u8], address: u64) -> Vec<(u64, usize)> {
    let mut index = Vec::new();
    let mut reader = Reader::new(bytes, 0);
    // Of the last entry.
    let mut cie = None;
    loop {
        let at = reader.at();
        match head(&mut reader) {
            Some(Head::Cie(_)) => {}
            Some(Head::Fde(cie_at, rest)) => {
                if cie.is_none_or(|(at, _)| at != cie_at) {
                    cie = cie_at_offset(bytes, cie_at).map(|cie| (cie_at, cie));
                }
                let found = cie.and_then(|(_, cie)| entry(rest, cie, address));
                if let Some(found) = found.filter(|found| found.start < found.end) {
                    index.push((found.start, at));
                }
            }
            Some(Head::End) | None => break,
        }
    }
    sort(&mut index);
    index
}

/// Sorts by a heap. std's sort takes a fifth of the time to compile the unwinder, for a table that
/// hardly any file lacks.
fn sort(index: &mut [(u64, usize)]) {
    let len = index.len();
    for turn in (0..len + len / 2).rev() {
        // First the heap is made, and then its largest entry moved behind it, again and again.
        let (mut at, end) = if turn >= len { (turn - len, len) } else { (0, turn) };
        if turn < len {
            index.swap(0, end);
        }
        loop {
            let mut child = 2 * at + 1;
            if child + 1 < end && index[child] < index[child + 1] {
                child += 1;
            }
            if child >= end || index[at] >= index[child] {
                break;
            }
            index.swap(at, child);
            at = child;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::symbols::testing::random_below;

    #[test]
    fn an_index_of_any_order_is_sorted() {
        let mut random = random_below();
        for len in (0..50).chain([1000]) {
            let mut index: Vec<_> = (0..len).map(|at| (random(len) as u64, at)).collect();
            let mut expected = index.clone();
            expected.sort_unstable();
            sort(&mut index);
            assert_eq!(index, expected);
        }
    }
}
