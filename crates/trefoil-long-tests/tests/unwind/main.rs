//! The unwinder of trefoil_base::symbols against others.
//!
//! - [`files`] compares it with framehop at many addresses of libraries, also of aarch64 where
//!   those are installed (`libc6-dev-arm64-cross`).
//! - [`stacks`] compares it with the unwinder that std uses for panics, and with framehop, on real
//!   stacks.

mod files;
mod reference;
mod stacks;

use std::ops::Range;
use std::path::Path;
use trefoil_base::symbols::{Bytes, Elf, Module};

type Section = (Range<u64>, &'static [u8]);

/// The unwind tables of a file, and where its code is.
struct File {
    eh_frame: Option<Section>,
    eh_frame_hdr: Option<Section>,
    code: Vec<Range<u64>>,
}

impl File {
    /// Returns None if there is no such file.
    fn read(path: &Path) -> Option<File> {
        // Kept until the tests end.
        let bytes: &'static [u8] = std::fs::read(path).ok()?.leak();
        let elf = Elf::parse(bytes).expect("an ELF file");
        let section = |name: &str| -> Option<Section> {
            let section = elf.section(name)?;
            Some((section.address..section.address + section.size, section.bytes))
        };
        let code = [".init", ".plt", ".plt.got", ".plt.sec", ".text", ".fini"];
        Some(File {
            eh_frame: section(".eh_frame"),
            eh_frame_hdr: section(".eh_frame_hdr"),
            code: code.into_iter().filter_map(|name| Some(section(name)?.0)).collect(),
        })
    }

    /// Returns where the code is if the file is loaded with this bias.
    fn range(&self, bias: u64) -> Range<u64> {
        bias..bias + self.code.iter().map(|range| range.end).max().unwrap_or(0)
    }

    fn module(&self, bias: u64) -> Module {
        let part = |section: &Option<Section>| {
            section.clone().map(|(range, bytes)| (range, Bytes::Static(bytes)))
        };
        let (eh_frame, eh_frame_hdr) = (part(&self.eh_frame), part(&self.eh_frame_hdr));
        Module { range: self.range(bias), bias, eh_frame, eh_frame_hdr }
    }

    fn module_without_header(&self, bias: u64) -> Module {
        Module { eh_frame_hdr: None, ..self.module(bias) }
    }
}
