//! The sections that hold debug information, by their names.

/// The bytes of the sections. Those that a file does not have are empty.
#[derive(Clone, Copy, Default)]
pub(crate) struct DebugSections {
    pub(super) info: &'static [u8],
    pub(super) abbrev: &'static [u8],
    pub(super) addr: &'static [u8],
    pub(super) aranges: &'static [u8],
    pub(super) line: &'static [u8],
    pub(super) line_str: &'static [u8],
    pub(super) ranges: &'static [u8],
    pub(super) rnglists: &'static [u8],
    pub(super) str: &'static [u8],
    pub(super) str_offsets: &'static [u8],
    /// Of a `.dwo` or `.dwp` file: the address of its entries in this process, by which the file is
    /// known, and the size of its tables. The sections may be parts of these.
    pub(super) file_start: usize,
    pub(super) file_bytes: usize,
}

impl DebugSections {
    /// Returns the sections of a program. `section` returns the bytes of a section by its name.
    pub(crate) fn of_program(section: &mut dyn FnMut(&str) -> &'static [u8]) -> DebugSections {
        DebugSections {
            info: section(".debug_info"),
            abbrev: section(".debug_abbrev"),
            addr: section(".debug_addr"),
            aranges: section(".debug_aranges"),
            line: section(".debug_line"),
            line_str: section(".debug_line_str"),
            ranges: section(".debug_ranges"),
            rnglists: section(".debug_rnglists"),
            str: section(".debug_str"),
            str_offsets: section(".debug_str_offsets"),
            file_start: 0,
            file_bytes: 0,
        }
    }

    /// Returns the sections of a `.dwo` or `.dwp` file.
    pub(crate) fn of_split_file(section: &mut dyn FnMut(&str) -> &'static [u8]) -> DebugSections {
        let mut sections = DebugSections {
            info: section(".debug_info.dwo"),
            abbrev: section(".debug_abbrev.dwo"),
            rnglists: section(".debug_rnglists.dwo"),
            str: section(".debug_str.dwo"),
            str_offsets: section(".debug_str_offsets.dwo"),
            // Those below stay in the program. The line table of such a file has no lines.
            addr: &[],
            aranges: &[],
            line: &[],
            line_str: &[],
            ranges: &[],
            file_start: 0,
            file_bytes: 0,
        };
        sections.file_start = sections.info.as_ptr() as usize;
        sections.file_bytes = sections.bytes_of_tables();
        sections
    }

    /// Returns the size of all that lookups read, except texts, addresses and offsets of texts.
    pub(super) fn bytes_of_tables(&self) -> usize {
        let parts = [self.info, self.abbrev, self.line, self.ranges, self.rnglists];
        parts.iter().fold(0, |sum: usize, part| sum.saturating_add(part.len()))
    }

    /// Adds what a split unit uses of the program.
    pub(super) fn with_those_of(self, program: &DebugSections) -> DebugSections {
        DebugSections { addr: program.addr, ranges: program.ranges, ..self }
    }
}
