//! The values of attributes, by the form in which they are written.

use super::constants::*;
use super::reader::Reader;

/// What the size of a value depends on: the version of a unit, and whether it is 64-bit DWARF.
#[derive(Clone, Copy)]
pub(super) struct Encoding {
    pub(super) version: u16,
    pub(super) is_64: bool,
}

impl Encoding {
    /// Returns the size of an offset.
    pub(super) fn offset_bytes(self) -> u8 {
        if self.is_64 { 8 } else { 4 }
    }
}

/// The value of an attribute.
#[derive(Clone, Copy)]
pub(super) enum Value {
    /// An absent value, or one of a kind that is not used here: a block, a flag, a negative number,
    /// or a reference to another file.
    Other,
    Address(u64),
    /// An index into `.debug_addr`.
    AddressIndex(u64),
    Number(u64),
    /// An offset in a section that the attribute implies.
    Offset(u64),
    /// An index into the table of range lists.
    ListIndex(u64),
    Text(&'static [u8]),
    /// An offset in `.debug_str`.
    Str(u64),
    /// An offset in `.debug_line_str`.
    LineStr(u64),
    /// An index into `.debug_str_offsets`.
    StrIndex(u64),
    /// An offset in the same unit.
    UnitEntry(u64),
    /// An offset in `.debug_info`.
    InfoEntry(u64),
}

impl Value {
    /// Takes a value of the form `form`. `constant` is the value that its abbreviation holds
    /// (`DW_FORM_implicit_const`).
    pub(super) fn read(
        reader: &mut Reader,
        mut form: u16,
        constant: i64,
        encoding: Encoding,
    ) -> Option<Value> {
        // Each round reads a byte or more.
        while form == DW_FORM_INDIRECT {
            form = reader.uleb_u16()?;
            if form == DW_FORM_IMPLICIT_CONST {
                return None;
            }
        }
        let number = match (fixed_bytes(form, encoding), form) {
            (Some(16), _) => return reader.take(16).map(|_| Value::Other),
            (Some(bytes), _) => reader.number(bytes)?,
            (None, DW_FORM_STRING) => return reader.text().map(Value::Text),
            (None, DW_FORM_SDATA) => return Some(not_negative(reader.sleb()?)),
            (None, DW_FORM_BLOCK1) => reader.number(1)?,
            (None, DW_FORM_BLOCK2) => reader.number(2)?,
            (None, DW_FORM_BLOCK4) => reader.number(4)?,
            (None, _) => reader.uleb()?,
        };
        Some(match form {
            DW_FORM_ADDR => Value::Address(number),
            DW_FORM_DATA1 | DW_FORM_DATA2 | DW_FORM_DATA4 | DW_FORM_DATA8 | DW_FORM_UDATA => {
                Value::Number(number)
            }
            DW_FORM_IMPLICIT_CONST => not_negative(constant),
            DW_FORM_SEC_OFFSET => Value::Offset(number),
            DW_FORM_STRP => Value::Str(number),
            DW_FORM_LINE_STRP => Value::LineStr(number),
            DW_FORM_STRX | DW_FORM_STRX1..=DW_FORM_STRX4 | DW_FORM_GNU_STR_INDEX => {
                Value::StrIndex(number)
            }
            DW_FORM_ADDRX | DW_FORM_ADDRX1..=DW_FORM_ADDRX4 | DW_FORM_GNU_ADDR_INDEX => {
                Value::AddressIndex(number)
            }
            DW_FORM_REF1..=DW_FORM_REF_UDATA => Value::UnitEntry(number),
            DW_FORM_REF_ADDR => Value::InfoEntry(number),
            DW_FORM_RNGLISTX => Value::ListIndex(number),
            DW_FORM_BLOCK | DW_FORM_BLOCK1 | DW_FORM_BLOCK2 | DW_FORM_BLOCK4 | DW_FORM_EXPRLOC => {
                reader.take(number)?;
                Value::Other
            }
            DW_FORM_FLAG | DW_FORM_FLAG_PRESENT | DW_FORM_LOCLISTX | DW_FORM_REF_SIG8
            | DW_FORM_REF_SUP4 | DW_FORM_REF_SUP8 | DW_FORM_STRP_SUP | DW_FORM_GNU_REF_ALT
            | DW_FORM_GNU_STRP_ALT => Value::Other,
            _ => return None,
        })
    }
}

fn not_negative(number: i64) -> Value {
    u64::try_from(number).map_or(Value::Other, Value::Number)
}

/// Returns the size of each value of the form `form`. None if values of this form differ in size,
/// or if the form is unknown.
pub(super) fn fixed_bytes(form: u16, encoding: Encoding) -> Option<u8> {
    Some(match form {
        DW_FORM_FLAG_PRESENT | DW_FORM_IMPLICIT_CONST => 0,
        DW_FORM_DATA1 | DW_FORM_FLAG | DW_FORM_REF1 | DW_FORM_STRX1 | DW_FORM_ADDRX1 => 1,
        DW_FORM_DATA2 | DW_FORM_REF2 | DW_FORM_STRX2 | DW_FORM_ADDRX2 => 2,
        DW_FORM_STRX3 | DW_FORM_ADDRX3 => 3,
        DW_FORM_DATA4 | DW_FORM_REF4 | DW_FORM_REF_SUP4 | DW_FORM_STRX4 | DW_FORM_ADDRX4 => 4,
        DW_FORM_ADDR | DW_FORM_DATA8 | DW_FORM_REF8 | DW_FORM_REF_SIG8 | DW_FORM_REF_SUP8 => 8,
        DW_FORM_DATA16 => 16,
        DW_FORM_SEC_OFFSET | DW_FORM_STRP | DW_FORM_LINE_STRP | DW_FORM_STRP_SUP
        | DW_FORM_GNU_REF_ALT | DW_FORM_GNU_STRP_ALT => encoding.offset_bytes(),
        // DWARF 2 said the size of an address.
        DW_FORM_REF_ADDR if encoding.version == 2 => 8,
        DW_FORM_REF_ADDR => encoding.offset_bytes(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_fixed_size_takes_that_size() {
        static ZEROES: [u8; 32] = [0; 32];
        let mut fixed = 0;
        for version in 2..=5 {
            for is_64 in [false, true] {
                let encoding = Encoding { version, is_64 };
                for form in (0..0x100).chain(0x1f00..0x1f30) {
                    let mut reader = Reader::new(&ZEROES);
                    let value = Value::read(&mut reader, form, 0, encoding);
                    let Some(size) = fixed_bytes(form, encoding) else { continue };
                    assert!(value.is_some(), "form {form:#x}");
                    let taken = ZEROES.len() - reader.len();
                    assert_eq!(taken, usize::from(size), "form {form:#x}");
                    fixed += 1;
                }
            }
        }
        assert_eq!(fixed, 8 * 31);
    }

    #[test]
    fn an_unknown_form_and_a_value_that_is_cut_off_are_refused() {
        let encoding = Encoding { version: 5, is_64: false };
        for (form, bytes) in [
            (0, &b"\x01\x02"[..]),
            (0x7777, b"\x01\x02"),
            (DW_FORM_BLOCK, b"\x02\x00"),
            (DW_FORM_STRING, b"abc"),
            (DW_FORM_DATA16, b"abc"),
            // Indirect to itself, then to nothing.
            (DW_FORM_INDIRECT, b"\x16\x16\x16"),
            (DW_FORM_INDIRECT, b"\x21\x00"),
        ] {
            assert!(Value::read(&mut Reader::new(bytes), form, 0, encoding).is_none(), "{form:#x}");
        }
    }
}
