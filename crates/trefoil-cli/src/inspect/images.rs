//! Where a process has loaded its program and its libraries.
//!
//! The mappings of a file do not say that by themselves. A process that has made a dump of itself
//! has mapped the same files a second time, to read their symbols: anywhere, below or above where
//! they are loaded. `mprotect` splits mappings, and code that was moved to large pages is not mapped
//! from its file any more. So a file counts as loaded where its segments (`PT_LOAD`) are, each at
//! its distance from the others and, if it has code, executable.

use std::collections::HashSet;
use std::ops::Range;

use trefoil_base::symbols::{Elf, Segment};

use super::memory::Mapping;

/// Loaded segments of a file that are read at most. Linkers write about 4.
const LOADS_MAX: usize = 64;
/// Places that are checked at most for whether a file is loaded there.
const BIASES_MAX: usize = 4096;

/// A place where a file is loaded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Image {
    /// What is added to the addresses in the file.
    pub(super) bias: u64,
    /// From its first segment to its last one.
    pub(super) range: Range<u64>,
}

/// Returns the segments of a file that are loaded.
pub(super) fn loads<'a>(elf: &Elf<'a>) -> impl Iterator<Item = Segment<'a>> + use<'a> {
    elf.segments().filter(|segment| segment.kind == libc::PT_LOAD).take(LOADS_MAX)
}

/// Returns where a file is loaded: nowhere if it is only read, and several times if it was loaded
/// into several namespaces. If no place has all segments, returns those that have the most.
///
/// The mappings are in the order of addresses.
pub(super) fn images(elf: &Elf<'_>, mappings: &[&Mapping]) -> Vec<Image> {
    let end = |segment: &Segment<'_>| segment.address.checked_add(segment.size);
    let loads: Vec<_> = loads(elf).filter(|segment| end(segment).is_some()).collect();
    let in_file = || loads.iter().filter(|segment| segment.file_size != 0);
    let (Some(first), Some(start), Some(end)) = (
        in_file().next(),
        loads.iter().map(|segment| segment.address).min(),
        loads.iter().filter_map(end).max(),
    ) else {
        return Vec::new();
    };
    let mut found: Vec<(usize, Image)> = Vec::new();
    let mut biases = HashSet::new();
    for mapping in mappings {
        let bias = mapping
            .start
            .wrapping_sub(mapping.offset)
            .wrapping_add(first.offset)
            .wrapping_sub(first.address);
        let range = bias.wrapping_add(start)..bias.wrapping_add(end);
        if range.is_empty() || !biases.insert(bias) {
            continue;
        }
        if biases.len() > BIASES_MAX {
            break;
        }
        let segments = in_file().filter(|segment| is_mapped(segment, bias, mappings)).count();
        if segments != 0 {
            found.push((segments, Image { bias, range }));
        }
    }
    let most = found.iter().map(|&(segments, _)| segments).max();
    found
        .into_iter()
        .filter(|&(segments, _)| Some(segments) == most)
        .map(|(_, image)| image)
        .collect()
}

/// Returns whether the beginning of a segment is mapped where it is if the file is loaded with this
/// bias.
fn is_mapped(segment: &Segment<'_>, bias: u64, mappings: &[&Mapping]) -> bool {
    let address = bias.wrapping_add(segment.address);
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    mappings[..after].last().is_some_and(|mapping| {
        address < mapping.end
            && mapping.offset.checked_add(address - mapping.start) == Some(segment.offset)
            && (mapping.is_executable || !segment.is_executable)
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::path::PathBuf;

    const BASE: u64 = 0x5555_0000_0000;
    const BIAS: u64 = BASE;
    /// Bytes of an entry in the table of segments.
    const HEADER_BYTES: usize = 56;
    /// Bytes of the made file.
    const FILE_BYTES: u64 = 0x5800;

    /// Flags, offset, address, bytes in the file, bytes in memory.
    pub(in super::super) type Header = (u32, u64, u64, u64, u64);

    pub(in super::super) const R: u32 = libc::PF_R;
    const RX: u32 = libc::PF_R | libc::PF_X;
    const RW: u32 = libc::PF_R | libc::PF_W;

    const HEADERS: &[Header] = &[
        (R, 0, 0, 0x1000, 0x1000),
        (RX, 0x1000, 0x1000, 0x2000, 0x2000),
        (R, 0x3000, 0x3000, 0x1000, 0x1000),
        (RW, 0x4800, 0x5800, 0x1000, 0x3000),
    ];

    /// Returns a file with these segments, without their bytes.
    pub(in super::super) fn file(headers: &[Header]) -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
        bytes.resize(64, 0);
        bytes[32] = 64;
        bytes[54] = HEADER_BYTES as u8;
        bytes[56] = headers.len() as u8;
        for &(flags, offset, address, in_file, in_memory) in headers {
            bytes.extend([libc::PT_LOAD, flags].map(u32::to_le_bytes).concat());
            let words = [offset, address, address, in_file, in_memory, 0x1000];
            bytes.extend(words.map(u64::to_le_bytes).concat());
        }
        bytes
    }

    fn mapping(start: u64, end: u64, offset: u64, is_executable: bool) -> Mapping {
        Mapping { start, end, offset, is_executable, path: PathBuf::from("/made") }
    }

    /// Returns the mappings of the made file that is loaded at `base`. The last segment is split by
    /// the loader, which makes a part of it read-only.
    fn loaded(base: u64) -> Vec<Mapping> {
        vec![
            mapping(base, base + 0x1000, 0, false),
            mapping(base + 0x1000, base + 0x3000, 0x1000, true),
            mapping(base + 0x3000, base + 0x4000, 0x3000, false),
            mapping(base + 0x5000, base + 0x6000, 0x4000, false),
            mapping(base + 0x6000, base + 0x7000, 0x5000, false),
        ]
    }

    /// Returns the mapping of a process that reads the file.
    fn read_at(start: u64) -> Mapping {
        mapping(start, start + FILE_BYTES.next_multiple_of(0x1000), 0, false)
    }

    fn found(headers: &[Header], mappings: &[Mapping]) -> Vec<u64> {
        let file = file(headers);
        let mappings: Vec<&Mapping> = mappings.iter().collect();
        let images = images(&Elf::parse(&file).unwrap(), &mappings);
        images.into_iter().map(|image| image.bias).collect()
    }

    #[test]
    fn an_image_reaches_from_its_first_segment_to_its_last() {
        let (file, mappings) = (file(HEADERS), loaded(BASE));
        let mappings: Vec<&Mapping> = mappings.iter().collect();
        let image = Image { bias: BIAS, range: BASE..BASE + 0x8800 };
        assert_eq!(images(&Elf::parse(&file).unwrap(), &mappings), [image]);
    }

    #[test]
    fn a_file_that_is_also_read_is_loaded_where_its_segments_are() {
        // A segment whose distance is that in the file does not tell the two apart.
        for headers in [HEADERS, &HEADERS[..3], &HEADERS[..2]] {
            for other in [0x1_0000, BASE - 0x6000, BASE + 0x10_0000, 0x7fff_0000_0000] {
                let mut mappings = loaded(BASE);
                mappings.push(read_at(other));
                mappings.push(read_at(other + 0x1000_0000));
                mappings.sort_by_key(|mapping| mapping.start);
                assert_eq!(found(headers, &mappings), [BIAS], "{other:#x}");
            }
        }
    }

    #[test]
    fn an_image_is_found_whose_mappings_were_split_or_replaced() {
        let with = |from: usize, to: Vec<Mapping>| {
            let mut mappings = loaded(BASE);
            mappings.splice(from..=from, to);
            mappings.insert(0, read_at(0x1_0000));
            found(HEADERS, &mappings)
        };
        assert_eq!(with(1, vec![]), [BIAS], "anonymous code");
        assert_eq!(with(0, vec![]), [BIAS], "an anonymous beginning");
        let code = |start, end, executable| mapping(BASE + start, BASE + end, start, executable);
        let split = vec![code(0x1000, 0x2000, true), code(0x2000, 0x3000, false)];
        assert_eq!(with(1, split), [BIAS], "code that was split");
        let split = vec![code(0x2000, 0x3000, true)];
        assert_eq!(with(1, split), [BIAS], "code whose beginning is anonymous");
    }

    #[test]
    fn a_program_at_a_fixed_address_is_found() {
        let headers = HEADERS.iter().map(|&(flags, offset, address, in_file, in_memory)| {
            (flags, offset, address + 0x40_0000, in_file, in_memory)
        });
        let headers: Vec<Header> = headers.collect();
        assert_eq!(found(&headers, &loaded(0x40_0000)), [0]);
    }

    #[test]
    fn a_file_that_is_loaded_twice_has_two_images() {
        let mut mappings = loaded(BASE);
        mappings.extend(loaded(BASE + 0x10_0000));
        assert_eq!(found(HEADERS, &mappings), [BIAS, BIAS + 0x10_0000]);
    }

    #[test]
    fn a_damaged_file_or_mapping_has_no_image() {
        assert_eq!(found(&[], &loaded(BASE)), []);
        assert_eq!(found(HEADERS, &[]), []);
        assert_eq!(found(&[(RX, 0, u64::MAX, 1, 1)], &loaded(BASE)), []);
        assert_eq!(found(&[(RX, 0, 0, 0, 0x1000)], &loaded(BASE)), []);
        assert_eq!(found(HEADERS, &[mapping(BASE, BASE - 1, u64::MAX, true)]), []);
        assert_eq!(found(HEADERS, &[mapping(u64::MAX - 1, u64::MAX, 0, false)]), []);
    }

    #[test]
    fn many_mappings_and_segments_are_checked_in_little_time() {
        let mut headers = HEADERS.to_vec();
        headers.extend((0..200u64).map(|i| (R, i << 12, (i + 100) << 12, 0x1000, 0x1000)));
        let file = file(&headers);
        let made = (0..20_000u64).map(|i| {
            let start = 0x1000_0000 + 0x2000 * i;
            mapping(start, start + 0x1000, 0, true)
        });
        let made: Vec<Mapping> = made.collect();
        let mappings: Vec<&Mapping> = made.iter().collect();
        let begin = std::time::Instant::now();
        let images = images(&Elf::parse(&file).unwrap(), &mappings);
        let time = begin.elapsed();
        assert!(time.as_millis() < 1000, "{time:?}");
        assert_eq!(images.len(), BIASES_MAX);
    }

    #[test]
    fn a_file_that_is_mapped_piecewise_counts_once_per_distance() {
        // As many pieces as a process can have, all at the same distance.
        let pieces = (0..60_000u64).map(|i| {
            let at = i * 0x1000;
            mapping(0x1_0000_0000 + at, 0x1_0000_0000 + at + 0x1000, at, false)
        });
        let mut mappings: Vec<Mapping> = pieces.collect();
        mappings.extend(loaded(BASE));
        assert_eq!(found(HEADERS, &mappings), [BIAS]);
    }
}
