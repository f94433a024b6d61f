//! Reads numbers and pointers of unwind tables, as DWARF and the LSB encode them.

/// Bytes of a number that are read at most. 64 bits need 10; an assembler may write more, without
/// meaning. So many still fit into 128 bits.
const LEB_BYTES_MAX: u32 = 16;

/// How a pointer of an unwind table is encoded (`DW_EH_PE_*`): the low four bits say how its number
/// is stored, and the next three what is added to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Encoding(pub(super) u8);

impl Encoding {
    pub(super) const ABSOLUTE: Encoding = Encoding(0);
    /// There is no pointer.
    pub(super) const OMITTED: Encoding = Encoding(0xff);

    const ADDED: u8 = 0x70;
    const ADD_NOTHING: u8 = 0;
    const ADD_ITS_ADDRESS: u8 = 0x10;
    const ADD_DATA_ADDRESS: u8 = 0x30;
    /// The pointer is the address of the address that is meant.
    const INDIRECT: u8 = 0x80;

    /// Returns the encoding of the number alone.
    pub(super) fn number(self) -> Encoding {
        Encoding(self.0 & 0x0f)
    }

    /// Returns how many bytes a pointer has. None if that differs between pointers.
    pub(super) fn size(self) -> Option<usize> {
        match self.number().0 {
            0x02 | 0x0a => Some(2),
            0x03 | 0x0b => Some(4),
            0x00 | 0x04 | 0x0c => Some(8),
            _ => None,
        }
    }
}

/// A place in a section, or in the part of it that ends with an entry.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    /// The section from its first byte, so that [`Reader::at`] is an offset in the section.
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize) -> Reader<'a> {
        Reader { bytes, at }
    }

    /// Returns the offset in the section.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn is_at_end(&self) -> bool {
        self.at >= self.bytes.len()
    }

    /// Returns a reader of the next bytes, and skips them.
    pub(super) fn split(&mut self, size: u64) -> Option<Reader<'a>> {
        let start = self.at;
        self.skip(size)?;
        Some(Reader { bytes: self.bytes.get(..self.at)?, at: start })
    }

    /// Skips bytes, or goes back by a negative number of them.
    pub(super) fn jump(&mut self, by: i64) -> Option<()> {
        let at = self.at.checked_add_signed(isize::try_from(by).ok()?)?;
        self.at = if at <= self.bytes.len() { at } else { return None };
        Some(())
    }

    pub(super) fn skip(&mut self, size: u64) -> Option<()> {
        self.jump(i64::try_from(size).ok()?)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        let bytes = self.bytes.get(self.at..)?.first_chunk()?;
        self.at += 2;
        Some(u16::from_le_bytes(*bytes))
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        let bytes = self.bytes.get(self.at..)?.first_chunk()?;
        self.at += 4;
        Some(u32::from_le_bytes(*bytes))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        let bytes = self.bytes.get(self.at..)?.first_chunk()?;
        self.at += 8;
        Some(u64::from_le_bytes(*bytes))
    }

    /// Reads a number of seven bits per byte. None if it is too large.
    #[inline]
    pub(super) fn uleb(&mut self) -> Option<u64> {
        match self.bytes.get(self.at) {
            // Most have one byte.
            Some(&byte @ 0..0x80) => {
                self.at += 1;
                Some(byte.into())
            }
            _ => u64::try_from(self.leb()?.0).ok(),
        }
    }

    /// Reads a signed number of seven bits per byte. None if it is too large or too small.
    pub(super) fn sleb(&mut self) -> Option<i64> {
        let (value, bits) = self.leb()?;
        // The highest of its bits is the sign.
        let unused = u128::BITS - bits;
        i64::try_from(((value << unused) as i128) >> unused).ok()
    }

    /// Returns a number, and how many bits its bytes had.
    fn leb(&mut self) -> Option<(u128, u32)> {
        let mut value = 0;
        for number in 0..LEB_BYTES_MAX {
            let byte = self.u8()?;
            value |= u128::from(byte & 0x7f) << (7 * number);
            if byte & 0x80 == 0 {
                return Some((value, 7 * (number + 1)));
            }
        }
        None
    }

    /// Reads a register's number. A number that no register has stands for all larger ones.
    pub(super) fn register(&mut self) -> Option<u16> {
        Some(u16::try_from(self.uleb()?).unwrap_or(u16::MAX))
    }

    /// Reads a pointer. `section` is the address of the section, and `data` what pointers to data
    /// are relative to.
    pub(super) fn pointer(
        &mut self,
        encoding: Encoding,
        section: u64,
        data: Option<u64>,
    ) -> Option<u64> {
        if encoding == Encoding::OMITTED || encoding.0 & Encoding::INDIRECT != 0 {
            return None;
        }
        let base = match encoding.0 & Encoding::ADDED {
            Encoding::ADD_NOTHING => 0,
            Encoding::ADD_ITS_ADDRESS => section.wrapping_add(self.at as u64),
            Encoding::ADD_DATA_ADDRESS => data?,
            _ => return None,
        };
        let value = match encoding.number().0 {
            0x00 | 0x04 | 0x0c => self.u64()?,
            0x01 => self.uleb()?,
            0x02 => self.u16()?.into(),
            0x03 => self.u32()?.into(),
            0x09 => self.sleb()? as u64,
            0x0a => self.u16()? as i16 as u64,
            0x0b => self.u32()? as i32 as u64,
            _ => return None,
        };
        Some(base.wrapping_add(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_seven_bits_per_byte_have_the_values_that_dwarf_gives() {
        let uleb = |bytes: &[u8]| Reader::new(bytes, 0).uleb();
        let sleb = |bytes: &[u8]| Reader::new(bytes, 0).sleb();
        assert_eq!(uleb(&[2]), Some(2));
        assert_eq!(uleb(&[0x80, 1]), Some(128));
        assert_eq!(uleb(&[0xb9, 0x64]), Some(12857));
        assert_eq!(sleb(&[2]), Some(2));
        assert_eq!(sleb(&[0x7e]), Some(-2));
        assert_eq!(sleb(&[0xff, 0]), Some(127));
        assert_eq!(sleb(&[0x81, 0x7f]), Some(-127));
        assert_eq!(sleb(&[0x80, 1]), Some(128));
        let largest = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];
        assert_eq!(uleb(&largest), Some(u64::MAX));
        assert_eq!(uleb(&[0xff; 9]), None, "cut off");
        assert_eq!((uleb(&[]), sleb(&[])), (None, None), "empty");
        let below = |last: u8| sleb(&[&[0x80; 9][..], &[last]].concat());
        assert_eq!((below(0x7f), below(0)), (Some(i64::MIN), Some(0)));
    }

    #[test]
    fn a_number_of_seven_bits_per_byte_that_is_too_large_is_refused() {
        let uleb = |bytes: &[u8]| Reader::new(bytes, 0).uleb();
        let sleb = |bytes: &[u8]| Reader::new(bytes, 0).sleb();
        let with_last = |before: u8, count: usize, last: u8| {
            let bytes = [&vec![before; count][..], &[last]].concat();
            (uleb(&bytes), sleb(&bytes))
        };
        assert_eq!(with_last(0xff, 9, 2), (None, None), "bit 64");
        assert_eq!(with_last(0xff, 9, 1), (Some(u64::MAX), None), "bit 63");
        assert_eq!(with_last(0x80, 9, 0x7e), (None, None), "below the least");
        assert_eq!(with_last(0x80, 15, 0), (Some(0), Some(0)), "the most bytes");
        assert_eq!(with_last(0xff, 15, 0x7f), (None, Some(-1)), "the most bytes of a negative one");
        assert_eq!(with_last(0x80, 16, 0), (None, None), "too many bytes");
        assert_eq!(with_last(0x80, 1000, 0x7f), (None, None), "far too many bytes");
        for count in 0..40 {
            let bytes = vec![0xff; count];
            assert_eq!((uleb(&bytes), sleb(&bytes)), (None, None), "{count} bytes without an end");
            let mut reader = Reader::new(&bytes, 0);
            let _ = reader.uleb();
            assert!(reader.at() <= LEB_BYTES_MAX as usize);
        }
    }

    #[test]
    fn a_pointer_is_read_in_each_encoding() {
        let bytes = [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, 0];
        let read =
            |encoding, data| Reader::new(&bytes, 0).pointer(Encoding(encoding), 0x1000, data);
        assert_eq!(read(0x00, None), Some(0x7fff_ffff_ffff_fffe));
        assert_eq!(read(0x01, None), Some(0x00ff_ffff_ffff_fffe));
        assert_eq!(read(0x02, None), Some(0xfffe));
        assert_eq!(read(0x03, None), Some(0xffff_fffe));
        assert_eq!(read(0x04, None), Some(0x7fff_ffff_ffff_fffe));
        assert_eq!(read(0x09, None), Some(-2i64 as u64));
        assert_eq!(read(0x0a, None), Some(-2i64 as u64));
        assert_eq!(read(0x0b, None), Some(-2i64 as u64));
        assert_eq!(read(0x0c, None), Some(0x7fff_ffff_ffff_fffe));
        assert_eq!(read(0x1b, None), Some(0xffe));
        assert_eq!(read(0x3b, Some(0x2000)), Some(0x1ffe));
        assert_eq!(read(0x3b, None), None, "no data address");
        for refused in [0x05, 0x0d, 0x20, 0x40, 0x50, 0x9b, 0xff] {
            assert_eq!(read(refused, Some(0)), None, "{refused:#x}");
        }
    }

    #[test]
    fn a_pointer_is_relative_to_its_own_place() {
        let bytes = [0, 0, 0, 0, 8, 0, 0, 0];
        assert_eq!(Reader::new(&bytes, 4).pointer(Encoding(0x1b), 0x1000, None), Some(0x100c));
    }

    #[test]
    fn a_jump_stays_inside_the_section() {
        let mut reader = Reader::new(&[1, 2, 3], 1);
        assert_eq!(reader.jump(-2), None);
        assert_eq!(reader.jump(3), None);
        assert_eq!(reader.jump(i64::MIN), None);
        assert_eq!(reader.skip(u64::MAX), None);
        assert_eq!((reader.jump(1), reader.u8(), reader.u8()), (Some(()), Some(3), None));
        assert!(reader.is_at_end());
    }
}
