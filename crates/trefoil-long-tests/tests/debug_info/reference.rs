//! The same lookups by addr2line.

use crate::Call;
use addr2line::gimli::{Dwarf, DwarfPackage, EndianSlice, Error, LittleEndian, SectionId};
use addr2line::{Context, LookupContinuation, LookupResult, SplitDwarfLoad};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use trefoil_base::symbols::Elf;

type Bytes = EndianSlice<'static, LittleEndian>;

/// A program, as addr2line reads it.
pub(crate) struct Reference {
    context: Option<Context<Bytes>>,
    package: Option<DwarfPackage<Bytes>>,
}

fn section(elf: &Elf<'static>, name: Option<&str>) -> Result<Bytes, Error> {
    let section = name.and_then(|name| elf.section(name));
    Ok(EndianSlice::new(section.map_or(&[], |section| section.bytes), LittleEndian))
}

fn read(path: &Path) -> Option<Elf<'static>> {
    Elf::parse(std::fs::read(path).ok()?.leak())
}

impl Reference {
    pub(crate) fn new(bytes: &'static [u8], path: &Path) -> Reference {
        let elf = Elf::parse(bytes).unwrap();
        let dwarf = Dwarf::load(|id| section(&elf, Some(id.name()))).unwrap();
        let mut name = OsString::from(path);
        name.push(".dwp");
        let package = read(Path::new(&name)).map(|elf| {
            let load = |id: SectionId| section(&elf, id.dwo_name());
            DwarfPackage::load(load, Bytes::default()).unwrap()
        });
        Reference { context: Context::from_dwarf(dwarf).ok(), package }
    }

    fn split_unit(&self, load: SplitDwarfLoad<Bytes>) -> Option<Arc<Dwarf<Bytes>>> {
        if let Some(package) = &self.package
            && let Ok(Some(unit)) = package.find_cu(load.dwo_id, &load.parent)
        {
            return Some(Arc::new(unit));
        }
        let folder = load.comp_dir.as_ref().map_or(&[][..], |folder| folder.slice());
        let path = Path::new(OsStr::from_bytes(folder)).join(OsStr::from_bytes(load.path?.slice()));
        let elf = read(&path)?;
        let mut unit = Dwarf::load(|id| section(&elf, id.dwo_name())).ok()?;
        unit.make_dwo(&load.parent);
        Some(Arc::new(unit))
    }

    /// Returns the calls at an address, innermost first.
    pub(crate) fn calls(&mut self, address: u64) -> Vec<Call> {
        let Some(context) = &self.context else { return Vec::new() };
        let mut lookup = context.find_frames(address);
        let mut frames = loop {
            match lookup {
                LookupResult::Output(found) => break found.unwrap(),
                LookupResult::Load { load, continuation } => {
                    lookup = continuation.resume(self.split_unit(load));
                }
            }
        };
        let mut calls = Vec::new();
        while let Some(frame) = frames.next().unwrap() {
            let place = frame.location;
            let name = frame.function.map(|function| function.raw_name().unwrap().into_owned());
            let file = place.as_ref().and_then(|place| place.file).unwrap_or_default();
            calls.push((name, file.to_owned(), place.and_then(|place| place.line).unwrap_or(0)));
        }
        calls
    }
}
