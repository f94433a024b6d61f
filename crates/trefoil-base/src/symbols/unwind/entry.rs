//! Reads the entries of the section `.eh_frame`: the instructions of a function (frame description
//! entry, FDE), and what functions share (common information entry, CIE).

use super::reader::{Encoding, Reader};

/// How long the text may be that says which fields a CIE has. Compilers write up to five letters.
const LETTERS_MAX: usize = 16;

/// What functions share.
#[derive(Clone, Copy)]
pub(super) struct Cie<'a> {
    /// What the distances of code addresses are multiplied by.
    pub(super) code_factor: u64,
    /// What offsets on the stack are multiplied by.
    pub(super) data_factor: i64,
    /// The register that has the return address.
    pub(super) return_address: u16,
    /// How its functions' addresses are encoded.
    pub(super) encoding: Encoding,
    /// Whether its functions return to the instruction that a signal has interrupted.
    pub(super) is_signal_frame: bool,
    /// Whether its FDEs have augmentation data.
    has_data: bool,
    /// Run before those of a function.
    pub(super) instructions: Reader<'a>,
}

/// A function.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    pub(super) cie: Cie<'a>,
    /// Its first address, before relocation.
    pub(super) start: u64,
    /// The address after it.
    pub(super) end: u64,
    pub(super) instructions: Reader<'a>,
}

/// The beginning of an entry.
pub(super) enum Head<'a> {
    /// A CIE, without the fields that all entries have.
    Cie(Reader<'a>),
    /// An FDE: the offset of its CIE, and the rest.
    Fde(usize, Reader<'a>),
    /// The end of the section.
    End,
}

/// Reads the beginning of the entry at `reader`, and skips the entry.
pub(super) fn head<'a>(reader: &mut Reader<'a>) -> Option<Head<'a>> {
    const IS_64_BITS: u32 = u32::MAX;
    let size = match reader.u32()? {
        0 => return Some(Head::End),
        IS_64_BITS => reader.u64()?,
        size => size.into(),
    };
    let mut entry = reader.split(size)?;
    let at = entry.at();
    // In .eh_frame, unlike in .debug_frame, it has 4 bytes in entries of both sizes.
    let distance = entry.u32()?;
    if distance == 0 {
        return Some(Head::Cie(entry));
    }
    Some(Head::Fde(at.checked_sub(distance as usize)?, entry))
}

/// Reads the FDE at an offset of a section that has this address.
pub(super) fn entry_at(bytes: &[u8], address: u64, at: usize) -> Option<Entry<'_>> {
    match head(&mut Reader::new(bytes, at))? {
        Head::Fde(cie_at, rest) => entry(rest, cie_at_offset(bytes, cie_at)?, address),
        Head::Cie(_) | Head::End => None,
    }
}

/// Reads the rest of an FDE. `section` is the address of the section.
pub(super) fn entry<'a>(mut reader: Reader<'a>, cie: Cie<'a>, section: u64) -> Option<Entry<'a>> {
    let start = reader.pointer(cie.encoding, section, None)?;
    let size = reader.pointer(cie.encoding.number(), section, None)?;
    if cie.has_data {
        let size = reader.uleb()?;
        reader.skip(size)?;
    }
    Some(Entry { cie, start, end: start.checked_add(size)?, instructions: reader })
}

pub(super) fn cie_at_offset(bytes: &[u8], at: usize) -> Option<Cie<'_>> {
    match head(&mut Reader::new(bytes, at))? {
        Head::Cie(rest) => cie(rest),
        Head::Fde(..) | Head::End => None,
    }
}

/// Reads the rest of a CIE. Returns None if it is of another kind of tables.
fn cie(mut reader: Reader<'_>) -> Option<Cie<'_>> {
    let version = reader.u8()?;
    if !matches!(version, 1 | 3 | 4) {
        return None;
    }
    let mut augmentation = reader;
    let mut letters = 0;
    while reader.u8()? != 0 {
        letters += 1;
        if letters > LETTERS_MAX {
            return None;
        }
    }
    let has_data = match augmentation.u8()? {
        0 => false,
        b'z' => true,
        // An obsolete form: the address of a table for exceptions follows.
        b'e' if augmentation.u8()? == b'h' && augmentation.u8()? == 0 => {
            reader.skip(8)?;
            false
        }
        _ => return None,
    };
    if version == 4 {
        let (address_size, segment_size) = (reader.u8()?, reader.u8()?);
        if (address_size, segment_size) != (8, 0) {
            return None;
        }
    }
    let code_factor = reader.uleb()?;
    let data_factor = reader.sleb()?;
    let return_address = if version == 1 { reader.u8()?.into() } else { reader.register()? };
    let mut said = Augmentation { encoding: Encoding::ABSOLUTE, is_signal_frame: false };
    if has_data {
        let size = reader.uleb()?;
        said = Augmentation::read(augmentation, reader.split(size)?)?;
    }
    let Augmentation { encoding, is_signal_frame } = said;
    let instructions = reader;
    Some(Cie {
        code_factor,
        data_factor,
        return_address,
        encoding,
        is_signal_frame,
        has_data,
        instructions,
    })
}

/// What the letters after `z` say.
struct Augmentation {
    encoding: Encoding,
    is_signal_frame: bool,
}

impl Augmentation {
    /// Reads the letters and the data that belongs to them.
    fn read(mut letters: Reader<'_>, mut data: Reader<'_>) -> Option<Augmentation> {
        let mut said = Augmentation { encoding: Encoding::ABSOLUTE, is_signal_frame: false };
        loop {
            match letters.u8()? {
                b'R' => said.encoding = Encoding(data.u8()?),
                // The encoding of the pointers to tables for exceptions.
                b'L' => drop(data.u8()?),
                // The function that reads those tables.
                b'P' => {
                    let personality = Encoding(data.u8()?);
                    if personality != Encoding::OMITTED {
                        data.pointer(personality.number(), 0, None)?;
                    }
                }
                b'S' => said.is_signal_frame = true,
                // Return addresses that are signed by the second key of aarch64. Tagged memory of
                // aarch64. Neither has data.
                b'B' | b'G' => {}
                // The end, or a letter that has no meaning here: with it, the data after it has
                // none.
                _ => return Some(said),
            }
        }
    }
}
