//! The abbreviations of a unit: the attributes of each kind of entries, and their forms.

use super::constants::DW_FORM_IMPLICIT_CONST;
use super::reader::Reader;
use super::spans::{Span, find_last, sort};
use super::tables::WorkLeft;
use super::value::{Encoding, Value, fixed_bytes};

/// How many attributes an abbreviation may have. Those of some forms take no bytes of an entry, so
/// without a limit a small file could take very long.
const ATTRIBUTES_MAX: usize = 256;

/// Marks a size that is not the same for all values.
const VARIES: u32 = u32::MAX;

/// All abbreviations of a unit.
pub(super) struct Abbreviations {
    encoding: Encoding,
    /// In their order in the section. Compilers number them from 1 without a gap.
    all: Vec<Abbreviation>,
    /// By code. Empty if each code is the number of its abbreviation.
    by_code: Vec<Span>,
    attributes: Vec<Attribute>,
}

/// One kind of entries.
#[derive(Clone, Copy)]
pub(super) struct Abbreviation {
    code: u64,
    pub(super) tag: u16,
    pub(super) has_children: bool,
    /// The size of the attributes, or [`VARIES`].
    bytes: u32,
    /// Its part of [`Abbreviations::attributes`].
    attributes_start: usize,
    attributes_end: usize,
}

/// An attribute, and how its value is written.
#[derive(Clone, Copy)]
pub(super) struct Attribute {
    pub(super) name: u16,
    form: u16,
    /// The size of the value, or [`VARIES`].
    bytes: u32,
    constant: i64,
}

impl Attribute {
    /// Takes an attribute of an abbreviation: `Some(None)` after the last one, and None if it is
    /// damaged.
    fn read(reader: &mut Reader, encoding: Encoding) -> Option<Option<Attribute>> {
        let (name, form) = (reader.uleb_u16()?, reader.uleb_u16()?);
        if name == 0 && form == 0 {
            return Some(None);
        }
        let constant = if form == DW_FORM_IMPLICIT_CONST { reader.sleb()? } else { 0 };
        let bytes = fixed_bytes(form, encoding).map_or(VARIES, u32::from);
        Some(Some(Attribute { name, form, bytes, constant }))
    }

    /// Takes the value of the attribute.
    pub(super) fn value(&self, reader: &mut Reader, encoding: Encoding) -> Option<Value> {
        Value::read(reader, self.form, self.constant, encoding)
    }

    /// Leaves the value out.
    pub(super) fn skip(&self, reader: &mut Reader, encoding: Encoding) -> Option<()> {
        if self.bytes != VARIES {
            return reader.skip(self.bytes as usize);
        }
        Value::read(reader, self.form, self.constant, encoding).map(drop)
    }
}

impl Abbreviations {
    /// Reads a table: all abbreviations before the first that is damaged, or for which no work is
    /// left.
    pub(super) fn read(
        table: Option<Reader>,
        encoding: Encoding,
        left: &mut WorkLeft,
    ) -> Abbreviations {
        let (all, by_code, attributes) = (Vec::new(), Vec::new(), Vec::new());
        let mut abbreviations = Abbreviations { encoding, all, by_code, attributes };
        if let Some(mut reader) = table {
            let mut before = reader.len();
            while abbreviations.read_one(&mut reader).is_some()
                && left.take(before - reader.len()).is_some()
            {
                before = reader.len();
            }
        }
        abbreviations.sort();
        abbreviations.all.shrink_to_fit();
        abbreviations.attributes.shrink_to_fit();
        abbreviations
    }

    /// Sorts the codes, unless each is the number of its abbreviation.
    fn sort(&mut self) {
        let mut is_numbered = true;
        for (index, abbreviation) in self.all.iter().enumerate() {
            is_numbered &= abbreviation.code == index as u64 + 1;
        }
        if is_numbered {
            return;
        }
        for (index, abbreviation) in self.all.iter().enumerate() {
            let Ok(owner) = u32::try_from(index) else { break };
            self.by_code.push(Span { depth: 0, key: abbreviation.code, end: 0, owner });
        }
        sort(&mut self.by_code);
    }

    fn read_one(&mut self, reader: &mut Reader) -> Option<()> {
        let code = reader.uleb()?;
        if code == 0 {
            return None;
        }
        let tag = reader.uleb_u16()?;
        let has_children = reader.u8()? != 0;
        let attributes_start = self.attributes.len();
        let mut bytes: u32 = 0;
        while let Some(attribute) = Attribute::read(reader, self.encoding)? {
            if self.attributes.len() - attributes_start == ATTRIBUTES_MAX {
                return None;
            }
            bytes = match attribute.bytes {
                VARIES => VARIES,
                size => bytes.saturating_add(size),
            };
            self.attributes.push(attribute);
        }
        let attributes_end = self.attributes.len();
        self.all.push(Abbreviation {
            code,
            tag,
            has_children,
            bytes,
            attributes_start,
            attributes_end,
        });
        Some(())
    }

    /// Returns how many there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns the abbreviation with this code.
    #[inline]
    pub(super) fn get(&self, code: u64) -> Option<&Abbreviation> {
        let index = code.wrapping_sub(1) as usize;
        if let Some(abbreviation) = self.all.get(index)
            && abbreviation.code == code
        {
            return Some(abbreviation);
        }
        let found = self.by_code[find_last(&self.by_code, 0, code)?];
        self.all.get(found.owner as usize).filter(|abbreviation| abbreviation.code == code)
    }

    /// Returns the attributes of an abbreviation.
    pub(super) fn attributes(&self, of: &Abbreviation) -> &[Attribute] {
        &self.attributes[of.attributes_start..of.attributes_end]
    }

    /// Leaves out the attributes of an entry.
    #[inline]
    pub(super) fn skip(&self, abbreviation: &Abbreviation, reader: &mut Reader) -> Option<()> {
        if abbreviation.bytes != VARIES {
            return reader.skip(abbreviation.bytes as usize);
        }
        for attribute in self.attributes(abbreviation) {
            attribute.skip(reader, self.encoding)?;
        }
        Some(())
    }
}

/// Finds the abbreviations of the first entry of units, without reading all others.
///
/// It reads a bounded number of bytes in all, whatever the units refer to.
pub(super) struct RootAbbreviations {
    section: &'static [u8],
    bytes_left: usize,
    /// What was found last: units may share their abbreviations.
    last: Option<Root>,
}

#[derive(Clone, Copy)]
struct Root {
    offset: u64,
    code: u64,
    tag: u16,
    attributes: Reader,
}

impl RootAbbreviations {
    /// Reads at most `bytes` bytes of `.debug_abbrev`.
    pub(super) fn new(section: &'static [u8], bytes: usize) -> RootAbbreviations {
        RootAbbreviations { section, bytes_left: bytes, last: None }
    }

    /// Returns a reader of the attributes of the abbreviation `code`, at `offset` of the section.
    pub(super) fn find(&mut self, offset: u64, code: u64) -> Option<RootAttributes> {
        if let Some(last) = self.last
            && last.offset == offset
            && last.code == code
        {
            return Some(RootAttributes::new(last));
        }
        let encoding = Encoding { version: 5, is_64: false };
        let mut reader = Reader::at(self.section, offset)?;
        loop {
            let before = reader.len();
            let found = reader.uleb()?;
            if found == 0 {
                return None;
            }
            let (tag, _has_children) = (reader.uleb_u16()?, reader.u8()?);
            if found == code {
                let found = Root { offset, code, tag, attributes: reader };
                self.last = Some(found);
                return Some(RootAttributes::new(found));
            }
            while Attribute::read(&mut reader, encoding)?.is_some() {}
            self.bytes_left = self.bytes_left.checked_sub(before - reader.len())?;
        }
    }
}

/// The tag and the attributes of the first entry of a unit.
#[derive(Clone, Copy)]
pub(super) struct RootAttributes {
    pub(super) tag: u16,
    reader: Reader,
    left: usize,
}

/// Where the attributes of the first entry of a unit are in `.debug_abbrev`.
#[derive(Clone, Copy)]
pub(super) struct RootPlace {
    at: usize,
    tag: u16,
}

impl RootAttributes {
    /// Returns attributes that were found before.
    pub(super) fn at(place: RootPlace, section: &'static [u8]) -> Option<RootAttributes> {
        let reader = Reader::at(section, place.at as u64)?;
        Some(RootAttributes { tag: place.tag, reader, left: ATTRIBUTES_MAX })
    }

    /// Returns where they are in `section`.
    pub(super) fn place(&self, section: &'static [u8]) -> RootPlace {
        RootPlace { at: section.len() - self.reader.len(), tag: self.tag }
    }

    fn new(root: Root) -> RootAttributes {
        RootAttributes { tag: root.tag, reader: root.attributes, left: ATTRIBUTES_MAX }
    }

    /// Takes the next attribute and its value, which is the next of `entry`.
    pub(super) fn next(&mut self, entry: &mut Reader, encoding: Encoding) -> Option<(u16, Value)> {
        self.left = self.left.checked_sub(1)?;
        let attribute = Attribute::read(&mut self.reader, encoding)??;
        Some((attribute.name, attribute.value(entry, encoding)?))
    }
}

#[cfg(test)]
mod tests {
    use super::super::constants::*;
    use super::*;

    const ENCODING: Encoding = Encoding { version: 5, is_64: false };

    fn read(section: &'static [u8], at: u64) -> Abbreviations {
        let mut left = WorkLeft::for_bytes(section.len());
        Abbreviations::read(Reader::at(section, at), ENCODING, &mut left)
    }

    #[test]
    fn abbreviations_are_found_in_any_order() {
        static SECTION: [u8; 24] = [
            7,
            0x2e,
            1,
            3,
            8,
            0,
            0, // 7: a subprogram with a name, which varies in size.
            1,
            0x11,
            0,
            3,
            0x0e,
            0x11,
            1,
            0,
            0, // 1: a unit with two values of fixed size.
            300u16 as u8 | 0x80,
            2,
            0x1d,
            0,
            0,
            0, // 300: an entry without attributes.
            0,
            9,
        ];
        let all = read(&SECTION, 0);
        assert_eq!(all.get(1).map(|it| (it.tag, it.has_children)), Some((0x11, false)));
        assert_eq!(all.get(7).map(|it| (it.tag, it.has_children)), Some((0x2e, true)));
        assert_eq!(all.get(300).map(|it| it.tag), Some(0x1d));
        for code in [0, 2, 3, 9, u64::MAX] {
            assert!(all.get(code).is_none(), "{code}");
        }
        let mut reader = Reader::new(b"name\0four_and_8__rest");
        all.skip(all.get(7).unwrap(), &mut reader).unwrap();
        all.skip(all.get(1).unwrap(), &mut reader).unwrap();
        assert_eq!(reader.len(), 4);

        let mut roots = RootAbbreviations::new(&SECTION, 1000);
        for _ in 0..2 {
            let (mut entry, mut names) = (Reader::new(b"four_and_8__"), Vec::new());
            let mut attributes = roots.find(0, 1).unwrap();
            assert_eq!(attributes.tag, 0x11);
            while let Some((name, _)) = attributes.next(&mut entry, ENCODING) {
                names.push(name);
            }
            assert_eq!(names, [DW_AT_NAME, DW_AT_LOW_PC]);
        }
        assert!(roots.find(0, 9).is_none());
        assert!(RootAbbreviations::new(&SECTION, 6).find(0, 1).is_none(), "too many bytes");
    }

    #[test]
    fn abbreviations_that_are_cut_off_end_before_the_first_damaged_one() {
        static SECTION: [u8; 9] = [1, 0x2e, 1, 3, 8, 0, 0, 2, 0x2e];
        let all = read(&SECTION, 0);
        assert!(all.get(1).is_some() && all.get(2).is_none());
        assert!(read(&SECTION, 99).get(1).is_none());
    }
}
