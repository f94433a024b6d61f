//! Reads the sections, segments and functions of an ELF file: 64 bits, little-endian.
//!
//! The bytes may be those of any file: cut off, damaged, or made to confuse. Invariants:
//!
//! 1. Every read goes through [`bytes_at`] or `get`, which check the range. Nothing here panics.
//! 2. Every loop ends with the table that it reads, and a table is never longer than the file.
//! 3. A compressed section is inflated only if it claims no more bytes than the caller allows, so a
//!    damaged header does not make the program allocate more.
//! 4. A name is not longer than [`NAME_BYTES_MAX`], so that names without an end do not cost the
//!    square of the size of the file.
//!
//! Sections may be compressed as the ELF standard says, by zlib (`SHF_COMPRESSED`). Left out: zstd,
//! whose decoder is large, and the older form that names its sections `.zdebug_*`, which no current
//! linker writes unless it is told to.

use miniz_oxide::inflate::decompress_slice_iter_to_slice;
use std::ffi::CStr;

/// How long the name of a section or symbol may be. A longer one is taken as missing.
const NAME_BYTES_MAX: usize = 1 << 18;

const SECTION_HEADER_BYTES: usize = 64;
const SEGMENT_HEADER_BYTES: usize = 56;
const SYMBOL_BYTES: usize = 24;
const COMPRESSION_HEADER_BYTES: usize = 24;

const SHT_SYMTAB: u32 = 2;
const SHT_NOBITS: u32 = 8;
const SHT_DYNSYM: u32 = 11;
const SHF_COMPRESSED: u64 = 1 << 11;
const ELFCOMPRESS_ZLIB: u32 = 1;
const SHN_XINDEX: u16 = 0xffff;
const STT_FUNC: u8 = 2;
const STT_GNU_IFUNC: u8 = 10;
const NT_GNU_BUILD_ID: u32 = 3;

/// An ELF file in memory.
#[derive(Clone, Copy)]
pub struct Elf<'a> {
    bytes: &'a [u8],
    /// The table of sections. Empty if the file has none.
    sections: &'a [u8],
    /// The names of the sections.
    names: &'a [u8],
    /// The table of segments.
    segments: &'a [u8],
}

/// A section of an ELF file.
#[derive(Clone, Copy)]
pub struct Section<'a> {
    /// Where it is loaded, before relocation.
    pub address: u64,
    /// How many bytes it has in memory.
    pub size: u64,
    /// Its bytes as they are in the file. Empty if the file leaves them out.
    pub bytes: &'a [u8],
    name: u32,
    kind: u32,
    flags: u64,
    link: u32,
}

/// A part of an ELF file that is loaded (`PT_LOAD`), or that describes it.
#[derive(Clone, Copy)]
pub struct Segment<'a> {
    /// What it is: `PT_LOAD`, `PT_NOTE` and others.
    pub kind: u32,
    /// Whether it may be executed.
    pub is_executable: bool,
    /// Where it begins in the file.
    pub offset: u64,
    /// Where it is loaded, before relocation.
    pub address: u64,
    /// How many bytes it has in the file, as its header says.
    pub file_size: u64,
    /// How many bytes it has in memory.
    pub size: u64,
    /// Its bytes in the file. Empty if they are beyond its end.
    pub bytes: &'a [u8],
}

/// A symbol that has an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Symbol<'a> {
    /// Its address, before relocation.
    pub address: u64,
    /// 0 if unknown.
    pub size: u64,
    /// Its name, as the linker knows it.
    pub name: &'a [u8],
    /// Whether it is a function.
    pub is_function: bool,
}

impl<'a> Elf<'a> {
    /// Reads the headers of a file. Returns None if the file is of another kind, or is cut off
    /// before the end of a table.
    pub fn parse(bytes: &'a [u8]) -> Option<Elf<'a>> {
        const CLASS_64_LITTLE_ENDIAN_VERSION_1: &[u8] = b"\x7fELF\x02\x01\x01";
        if !bytes.starts_with(CLASS_64_LITTLE_ENDIAN_VERSION_1) || bytes.len() < 64 {
            return None;
        }
        let (segments_at, sections_at) = (u64_at(bytes, 32)?, u64_at(bytes, 40)?);
        let (segment_bytes, segment_count) = (u16_at(bytes, 54)?, u16_at(bytes, 56)?);
        let (section_bytes, section_count) = (u16_at(bytes, 58)?, u16_at(bytes, 60)?);
        let mut elf = Elf { bytes, sections: &[], names: &[], segments: &[] };
        if segment_count != 0 {
            if usize::from(segment_bytes) != SEGMENT_HEADER_BYTES {
                return None;
            }
            elf.segments = table(bytes, segments_at, segment_count.into(), SEGMENT_HEADER_BYTES)?;
        }
        if sections_at == 0 {
            return Some(elf);
        }
        if usize::from(section_bytes) != SECTION_HEADER_BYTES {
            return None;
        }
        // The first header holds the numbers that do not fit into the file's header.
        let first = elf.section_of(table(bytes, sections_at, 1, SECTION_HEADER_BYTES)?)?;
        let count = if section_count == 0 { first.size } else { section_count.into() };
        elf.sections = table(bytes, sections_at, count, SECTION_HEADER_BYTES)?;
        let names = match u16_at(bytes, 62)? {
            SHN_XINDEX => first.link,
            index => index.into(),
        };
        elf.names = elf.section_at(names).map_or(&[], |section| section.bytes);
        Some(elf)
    }

    /// Returns the section with this name.
    pub fn section(&self, name: &str) -> Option<Section<'a>> {
        self.sections().find(|section| {
            let names = self.names.get(section.name as usize..).unwrap_or_default();
            names.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(&[0]))
        })
    }

    /// Returns the parts that are loaded, and those that describe the file.
    pub fn segments(&self) -> impl Iterator<Item = Segment<'a>> + use<'a> {
        let bytes = self.bytes;
        self.segments.chunks_exact(SEGMENT_HEADER_BYTES).filter_map(move |header| {
            let (offset, file_size) = (u64_at(header, 8)?, u64_at(header, 32)?);
            Some(Segment {
                kind: u32_at(header, 0)?,
                is_executable: u32_at(header, 4)? & libc::PF_X != 0,
                offset,
                address: u64_at(header, 16)?,
                file_size,
                size: u64_at(header, 40)?,
                bytes: bytes_at(bytes, offset, file_size).unwrap_or_default(),
            })
        })
    }

    /// Returns the bytes of the table of segments, which are in memory as well.
    pub fn segment_table(&self) -> &'a [u8] {
        self.segments
    }

    /// Returns the symbols that have an address: all of them, or those that other objects may use
    /// if the others were stripped.
    pub fn symbols(&self) -> impl Iterator<Item = Symbol<'a>> + use<'a> {
        let of = |kind| self.sections().find(|section| section.kind == kind);
        let table = of(SHT_SYMTAB).or_else(|| of(SHT_DYNSYM));
        let names = table.and_then(|table| self.section_at(table.link));
        let names = names.map_or(&[][..], |section| section.bytes);
        let symbols = table.map_or(&[][..], |table| table.bytes);
        symbols.chunks_exact(SYMBOL_BYTES).filter_map(move |symbol| {
            let kind = symbol.get(4)? & 0xf;
            let section = u16_at(symbol, 6)?;
            let address = u64_at(symbol, 8)?;
            // Section 0: another object has it.
            let is_here = section != 0 && address != 0;
            is_here.then_some(Symbol {
                address,
                size: u64_at(symbol, 16)?,
                name: text_at(names, u32_at(symbol, 0)?),
                is_function: matches!(kind, STT_FUNC | STT_GNU_IFUNC),
            })
        })
    }

    /// Returns the build id, a number that the linker has made of the contents.
    pub(crate) fn build_id(&self) -> Option<&'a [u8]> {
        let notes = self.section(".note.gnu.build-id")?.bytes;
        let (name, size) = (u32_at(notes, 0)?, u32_at(notes, 4)?);
        let is_build_id = name == 4 && u32_at(notes, 8)? == NT_GNU_BUILD_ID;
        let id = if is_build_id { bytes_at(notes, 16, size.into()) } else { None };
        id.filter(|id| !id.is_empty())
    }

    /// Returns the name of the file that has the debug information instead of this one, and the
    /// checksum of that file.
    pub(crate) fn debug_link(&self) -> Option<(&'a [u8], u32)> {
        let link = self.section(".gnu_debuglink")?.bytes;
        let name = text_at(link, 0);
        let checksum = u32_at(link, (name.len() + 1).next_multiple_of(4))?;
        // A name alone, no path.
        (!name.is_empty() && !name.contains(&b'/')).then_some((name, checksum))
    }

    /// Returns the checksum of the whole file, by which `.gnu_debuglink` knows it: the CRC of
    /// Ethernet and zlib.
    pub(crate) fn checksum(&self) -> u32 {
        !self.bytes.iter().fold(!0, |crc, &byte| {
            let index = (crc ^ u32::from(byte)) as u8;
            crc >> 8 ^ CRC_OF_BYTES[usize::from(index)]
        })
    }

    fn sections(&self) -> impl Iterator<Item = Section<'a>> + use<'a> {
        let elf = *self;
        let headers = elf.sections.chunks_exact(SECTION_HEADER_BYTES);
        headers.filter_map(move |header| elf.section_of(header))
    }

    fn section_at(&self, index: u32) -> Option<Section<'a>> {
        self.section_of(self.sections.chunks_exact(SECTION_HEADER_BYTES).nth(index as usize)?)
    }

    /// Reads the header of a section. Bytes that are beyond the end of the file are left out.
    fn section_of(&self, header: &[u8]) -> Option<Section<'a>> {
        let kind = u32_at(header, 4)?;
        let size = u64_at(header, 32)?;
        let bytes = match kind {
            SHT_NOBITS => None,
            _ => bytes_at(self.bytes, u64_at(header, 24)?, size),
        };
        Some(Section {
            address: u64_at(header, 16)?,
            size,
            bytes: bytes.unwrap_or_default(),
            name: u32_at(header, 0)?,
            kind,
            flags: u64_at(header, 8)?,
            link: u32_at(header, 40)?,
        })
    }
}

impl Section<'_> {
    /// Returns whether its bytes have to be inflated before they can be read.
    pub(crate) fn is_compressed(&self) -> bool {
        self.flags & SHF_COMPRESSED != 0
    }

    /// Returns the inflated bytes of a compressed section. None if they are more than `bytes_max`,
    /// damaged, or compressed by another method than zlib.
    pub(crate) fn inflate(&self, bytes_max: usize) -> Option<Vec<u8>> {
        let size = usize::try_from(u64_at(self.bytes, 8)?).ok()?;
        let compressed = self.bytes.get(COMPRESSION_HEADER_BYTES..)?;
        if u32_at(self.bytes, 0)? != ELFCOMPRESS_ZLIB || size > bytes_max {
            return None;
        }
        let mut inflated = Vec::new();
        inflated.try_reserve_exact(size).ok()?;
        inflated.resize(size, 0);
        let zlib_header = true;
        let checksum_unread = false;
        let written = decompress_slice_iter_to_slice(
            &mut inflated,
            std::iter::once(compressed),
            zlib_header,
            checksum_unread,
        );
        (written == Ok(size)).then_some(inflated)
    }
}

/// The checksum of each byte.
const CRC_OF_BYTES: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 0 { crc >> 1 } else { crc >> 1 ^ 0xedb8_8320 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// Returns a table of `count` entries. None if it does not end before the file does.
fn table(bytes: &[u8], at: u64, count: u64, entry_bytes: usize) -> Option<&[u8]> {
    bytes_at(bytes, at, count.checked_mul(entry_bytes as u64)?)
}

/// Returns `size` bytes at `at`, if there are as many.
fn bytes_at(bytes: &[u8], at: u64, size: u64) -> Option<&[u8]> {
    let at = usize::try_from(at).ok()?;
    bytes.get(at..)?.get(..usize::try_from(size).ok()?)
}

/// Returns the text at `at`, which a zero ends. Empty if there is none, or if it is too long.
fn text_at(bytes: &[u8], at: u32) -> &[u8] {
    let text = bytes.get(at as usize..).unwrap_or_default();
    let text = CStr::from_bytes_until_nul(&text[..text.len().min(NAME_BYTES_MAX)]);
    text.map_or(&[], CStr::to_bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::symbols::testing::{random_below, vdso};

    /// Reads all of a file. Returns how many symbols have a name.
    fn read_all(bytes: &[u8]) -> Option<usize> {
        let elf = Elf::parse(bytes)?;
        let names = [".text", ".dynsym", ".debug_info"];
        let sections = names.iter().filter_map(|name| elf.section(name));
        sections.filter(|s| s.is_compressed()).for_each(|s| drop(s.inflate(1 << 20)));
        elf.segments().for_each(|s| drop(std::hint::black_box(s.bytes.to_vec())));
        let _ = std::hint::black_box((elf.build_id(), elf.debug_link()));
        Some(elf.symbols().filter(|symbol| !symbol.name.is_empty()).count())
    }

    #[test]
    fn a_file_that_is_cut_off_or_damaged_is_read_or_refused() {
        let whole = vdso();
        if whole.is_empty() {
            return;
        }
        assert!(read_all(whole).unwrap() > 3, "the vdso has no symbols");
        for len in 0..whole.len() {
            let _ = read_all(&whole[..len]);
        }
        let mut random = random_below();
        let headers = u64_at(whole, 40).unwrap() as usize;
        for _ in 0..10_000 {
            let mut bytes = whole.to_vec();
            for _ in 0..1 + random(4) {
                let at = match random(3) {
                    0 => random(64 + 4 * SEGMENT_HEADER_BYTES),
                    1 => headers + random(bytes.len() - headers),
                    _ => random(bytes.len()),
                };
                match random(3) {
                    0 => bytes[at] ^= 1 << random(8),
                    1 => bytes[at] = random(256) as u8,
                    _ => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff),
                }
            }
            let _ = read_all(&bytes);
        }
    }

    #[test]
    fn a_name_without_an_end_is_empty() {
        let mut names = b"\0name\0".to_vec();
        assert_eq!(text_at(&names, 1), b"name");
        assert_eq!(text_at(&names, 5), b"");
        names.resize(names.len() + NAME_BYTES_MAX - 1, b'n');
        assert_eq!(text_at(&names, 6), b"", "no end");
        names.push(0);
        assert_eq!(text_at(&names, 6).len(), NAME_BYTES_MAX - 1);
        names.insert(6, b'n');
        assert_eq!(text_at(&names, 6), b"", "too long");
        for at in [names.len() as u32, u32::MAX] {
            assert_eq!(text_at(&names, at), b"");
        }
    }

    #[test]
    fn the_checksum_of_a_file_is_that_of_the_standard() {
        let of = |bytes: &[u8]| Elf { bytes, sections: &[], names: &[], segments: &[] }.checksum();
        assert_eq!(of(b"123456789"), 0xcbf4_3926);
        assert_eq!(of(b""), 0);
    }

    #[test]
    fn a_compressed_section_is_inflated_unless_its_header_is_wrong() {
        // zlib: a block that is stored as it is, and its checksum.
        let zlib = b"\x78\x01\x01\x03\x00\xfc\xffabc\x02\x4d\x01\x27";
        let inflated = |kind: u32, size: u64, zlib: &[u8]| {
            let mut bytes = Vec::new();
            bytes.extend(kind.to_le_bytes());
            bytes.extend(0u32.to_le_bytes());
            bytes.extend(size.to_le_bytes());
            bytes.extend(1u64.to_le_bytes());
            bytes.extend(zlib);
            let flags = SHF_COMPRESSED;
            let (address, size) = (0, bytes.len() as u64);
            let section =
                Section { address, size, bytes: &bytes, name: 0, kind: 1, flags, link: 0 };
            assert!(section.is_compressed());
            section.inflate(1 << 20)
        };
        assert_eq!(inflated(ELFCOMPRESS_ZLIB, 3, zlib).unwrap(), b"abc");
        assert!(inflated(2, 3, zlib).is_none(), "zstd");
        for size in [0, 2, 4, 1 << 20, (1 << 20) + 1, 1 << 40, u64::MAX] {
            assert!(inflated(ELFCOMPRESS_ZLIB, size, zlib).is_none(), "{size}");
        }
        for len in 0..zlib.len() {
            assert!(inflated(ELFCOMPRESS_ZLIB, 3, &zlib[..len]).is_none(), "{len}");
        }
    }
}
