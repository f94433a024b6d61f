//! `Reader`: takes numbers and texts from the front of bytes.
//!
//! Every method returns None if the bytes end before the value does, or if the value is too large.

use std::ffi::CStr;

/// The bytes that were not read yet.
#[derive(Clone, Copy)]
pub(super) struct Reader {
    rest: &'static [u8],
}

impl Reader {
    pub(super) fn new(bytes: &'static [u8]) -> Reader {
        Reader { rest: bytes }
    }

    /// Returns a reader of what follows `offset`.
    pub(super) fn at(bytes: &'static [u8], offset: u64) -> Option<Reader> {
        Some(Reader { rest: bytes.get(usize::try_from(offset).ok()?..)? })
    }

    /// Returns a reader of the entry `index` of a table at `base`.
    pub(super) fn at_entry(
        bytes: &'static [u8],
        base: u64,
        index: u64,
        entry_bytes: u64,
    ) -> Option<Reader> {
        Reader::at(bytes, base.checked_add(index.checked_mul(entry_bytes)?)?)
    }

    /// Returns the address in this process of what is left.
    pub(super) fn address(&self) -> usize {
        self.rest.as_ptr() as usize
    }

    /// Returns how many bytes are left.
    pub(super) fn len(&self) -> usize {
        self.rest.len()
    }

    /// Takes `count` bytes.
    pub(super) fn take(&mut self, count: u64) -> Option<&'static [u8]> {
        let (taken, rest) = self.rest.split_at_checked(usize::try_from(count).ok()?)?;
        self.rest = rest;
        Some(taken)
    }

    #[inline]
    pub(super) fn skip(&mut self, count: usize) -> Option<()> {
        self.rest = self.rest.get(count..)?;
        Some(())
    }

    #[inline]
    pub(super) fn u8(&mut self) -> Option<u8> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    #[inline]
    pub(super) fn u16(&mut self) -> Option<u16> {
        let (first, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(u16::from_le_bytes(*first))
    }

    #[inline]
    pub(super) fn u32(&mut self) -> Option<u32> {
        let (first, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(u32::from_le_bytes(*first))
    }

    #[inline]
    pub(super) fn u64(&mut self) -> Option<u64> {
        let (first, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(u64::from_le_bytes(*first))
    }

    /// Takes a number of `bytes` bytes, of which there are at most 8.
    pub(super) fn number(&mut self, bytes: u8) -> Option<u64> {
        match bytes {
            0 => Some(0),
            1 => self.u8().map(u64::from),
            2 => self.u16().map(u64::from),
            4 => self.u32().map(u64::from),
            8 => self.u64(),
            _ => {
                let mut number = 0;
                for (index, &byte) in self.take(bytes.into())?.iter().take(8).enumerate() {
                    number |= u64::from(byte) << (8 * index);
                }
                Some(number)
            }
        }
    }

    /// Takes an offset: 8 bytes in 64-bit DWARF, 4 in 32-bit DWARF.
    #[inline]
    pub(super) fn offset(&mut self, is_64: bool) -> Option<u64> {
        if is_64 { self.u64() } else { self.u32().map(u64::from) }
    }

    /// Takes the length that precedes a unit. Returns it, and whether the unit is 64-bit DWARF.
    pub(super) fn unit_length(&mut self) -> Option<(u64, bool)> {
        match self.u32()? {
            0xffff_ffff => Some((self.u64()?, true)),
            // Reserved by the standard.
            0xffff_fff0.. => None,
            length => Some((length.into(), false)),
        }
    }

    /// Takes an unsigned number of variable length.
    #[inline]
    pub(super) fn uleb(&mut self) -> Option<u64> {
        let first = self.u8()?;
        if first < 0x80 { Some(first.into()) } else { self.long_uleb(first) }
    }

    fn long_uleb(&mut self, first: u8) -> Option<u64> {
        let mut value = u64::from(first & 0x7f);
        let mut shift = 7;
        loop {
            let byte = self.u8()?;
            // One bit is left. This also ends the loop.
            if shift == 63 && byte > 1 {
                return None;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
            shift += 7;
        }
    }

    /// Takes a signed number of variable length.
    pub(super) fn sleb(&mut self) -> Option<i64> {
        let mut value = 0;
        let mut shift = 0;
        loop {
            let byte = self.u8()?;
            if shift == 63 && byte != 0 && byte != 0x7f {
                return None;
            }
            value |= i64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                let is_negative = byte & 0x40 != 0;
                return Some(if is_negative && shift < 64 { value | -1 << shift } else { value });
            }
        }
    }

    /// Takes a number that names something and never needs more than 16 bits.
    pub(super) fn uleb_u16(&mut self) -> Option<u16> {
        u16::try_from(self.uleb()?).ok()
    }

    /// Takes a text and the zero byte that ends it. Returns the text.
    pub(super) fn text(&mut self) -> Option<&'static [u8]> {
        let text = CStr::from_bytes_until_nul(self.rest).ok()?.to_bytes();
        self.rest = &self.rest[text.len() + 1..];
        Some(text)
    }

    /// Returns the text here. None if it has more than `bytes_max` bytes.
    pub(super) fn text_up_to(&self, bytes_max: usize) -> Option<&'static [u8]> {
        let rest = self.rest.get(..=bytes_max).unwrap_or(self.rest);
        Reader { rest }.text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_variable_length_are_read_up_to_64_bits() {
        let uleb = |bytes| Reader::new(bytes).uleb();
        assert_eq!(uleb(&[0x7f]), Some(0x7f));
        assert_eq!(uleb(&[0xe5, 0x8e, 0x26]), Some(624_485));
        assert_eq!(uleb(&[0x80, 0x80, 0x00]), Some(0), "padded");
        let max = &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        assert_eq!(uleb(max), Some(u64::MAX));
        let more = &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x03];
        assert_eq!(uleb(more), None);
        assert_eq!(uleb(&[0xff; 20]), None);
        assert_eq!(uleb(&[0x80]), None, "cut off");

        let sleb = |bytes| Reader::new(bytes).sleb();
        assert_eq!(sleb(&[0x7f]), Some(-1));
        assert_eq!(sleb(&[0x3f]), Some(63));
        assert_eq!(sleb(&[0x80, 0x7f]), Some(-128));
        assert_eq!(sleb(&[0xff, 0x00]), Some(127));
        let min = &[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x7f];
        assert_eq!(sleb(min), Some(i64::MIN));
        let max = &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x00];
        assert_eq!(sleb(max), Some(i64::MAX));
        assert_eq!(sleb(&[0xff; 20]), None);
    }

    #[test]
    fn nothing_is_read_beyond_the_end() {
        let bytes = b"ab\0c";
        assert_eq!(Reader::new(bytes).text(), Some(&b"ab"[..]));
        assert_eq!(Reader::at(bytes, 3).unwrap().text(), None);
        assert!(Reader::at(bytes, 4).is_some_and(|reader| reader.len() == 0));
        assert!(Reader::at(bytes, 5).is_none());
        assert!(Reader::at_entry(bytes, u64::MAX, 1, 8).is_none());
        assert!(Reader::at_entry(bytes, 0, u64::MAX, 8).is_none());
        assert_eq!(Reader::new(bytes).number(3), Some(0x62_61));
        assert_eq!(Reader::new(bytes).number(5), None);
        assert_eq!(Reader::new(bytes).u64(), None);
        assert_eq!(Reader::new(bytes).take(u64::MAX), None);
        assert_eq!(Reader::new(&[0xf0, 0xff, 0xff, 0xff]).unit_length(), None);
        assert_eq!(Reader::new(&[8, 0, 0, 0]).unit_length(), Some((8, false)));
    }
}
