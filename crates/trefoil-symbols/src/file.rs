//! `SymbolFile`: the functions and lines of one ELF file, before relocation.
//!
//! Lines and inlined calls come from the debug information (addr2line), names from it or from the
//! table of symbols. Debug information may be in other files:
//!
//! - in a file of its own, found by the build id below `/usr/lib/debug`, or by the name in
//!   `.gnu_debuglink`, beside the program and in the usual folders; its build id must be the same;
//! - in `.dwo` files, whose paths the program contains (`split-debuginfo = "unpacked"`), or in a
//!   `.dwp` file beside the program (`"packed"`).
//!
//! A file that is missing or damaged costs lines or names, never more. Left out: what `dwz` has
//! moved to a third file (`.gnu_debugaltlink`).
//!
//! The bytes are mapped and stay in the file: what is resident is what lookups have touched, and
//! the kernel may drop it. On the heap are inflated sections, `.dwo` and `.dwp` files, and what
//! addr2line has parsed: an entry per unit of the program, and the lines and functions of each unit
//! that was looked up.
//!
//! Invariant: what borrows from [`Backing`] is in fields before it, and no method returns a part of
//! it for longer than a call. So nothing refers to memory that was unmapped or freed.

use crate::elf::{Elf, Symbol};
use addr2line::gimli::{Dwarf, DwarfPackage, EndianSlice, Error, LittleEndian, SectionId};
use addr2line::{Context, LookupContinuation, LookupResult, SplitDwarfLoad};
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;

/// Where distributions put debug information.
const DEBUG_FOLDER: &str = "/usr/lib/debug";

type Bytes = EndianSlice<'static, LittleEndian>;

/// The functions and lines of an ELF file.
pub struct SymbolFile {
    elf: Elf<'static>,
    /// None if there is no debug information, or if it is damaged.
    lines: Option<Context<Bytes>>,
    package: Option<DwarfPackage<Bytes>>,
    /// By address. None until a first name is looked up here.
    functions: Option<Vec<Function>>,
    /// The last field: it is dropped after all that borrows from it.
    backing: Backing,
}

struct Function {
    start: u64,
    /// 0 if unknown, as that of some hand-written code.
    size: u64,
    name: &'static [u8],
}

/// A call at an address.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    /// The name of the function, mangled.
    pub name: Option<&'a [u8]>,
    /// Empty if unknown.
    pub file: &'a str,
    /// 0 if unknown.
    pub line: u32,
}

impl SymbolFile {
    /// Reads the ELF file `bytes`, and no other file. Returns None if it is no ELF file.
    pub fn new(bytes: &'static [u8]) -> Option<SymbolFile> {
        Some(SymbolFile::of_elf(Elf::parse(bytes)?, Path::new(""), Backing::new(OtherFiles::Never)))
    }

    /// Maps the file `from` if `is_wanted` returns true for it. It is known as `path`, beside
    /// which files with its debug information may be.
    pub fn map(
        from: &Path,
        path: &Path,
        is_wanted: impl FnOnce(&Elf<'_>) -> bool,
    ) -> Option<SymbolFile> {
        let mut backing = Backing::new(OtherFiles::IfNeeded);
        let elf = Elf::parse(backing.map(from)?)?;
        is_wanted(&elf).then(|| SymbolFile::of_elf(elf, path, backing))
    }

    fn of_elf(mut elf: Elf<'static>, path: &Path, mut backing: Backing) -> SymbolFile {
        if !has_lines(&elf)
            && let Some(other) = separate_debug_file(&elf, path, &mut backing)
        {
            elf = other;
        }
        let (mut lines, mut package) = (None, None);
        if has_lines(&elf) {
            let load = |id: SectionId| backing.section(&elf, id.name());
            lines = Dwarf::load(load).and_then(Context::from_dwarf).ok();
            package = dwarf_package(path, &mut backing);
        }
        SymbolFile { elf, lines, package, functions: None, backing }
    }

    /// Calls `f` for each call at an address, innermost first: several if functions were inlined
    /// there, none if nothing is known.
    pub fn calls(&mut self, address: u64, f: &mut dyn FnMut(Call<'_>)) {
        let mut is_found = false;
        // Without a name if only the line is known.
        let mut nameless = None;
        // addr2line adds 1 to the address.
        if let Some(lines) = self.lines.as_ref().filter(|_| address != u64::MAX) {
            let mut lookup = lines.find_frames(address);
            let found = loop {
                match lookup {
                    LookupResult::Output(found) => break found,
                    LookupResult::Load { load, continuation } => {
                        let unit = split_unit(self.package.as_ref(), load, &mut self.backing);
                        lookup = continuation.resume(unit);
                    }
                }
            };
            if let Ok(mut frames) = found {
                while let Ok(Some(frame)) = frames.next() {
                    is_found = true;
                    let place = frame.location;
                    let file = place.as_ref().and_then(|place| place.file).unwrap_or_default();
                    let line = place.as_ref().and_then(|place| place.line).unwrap_or(0);
                    match &frame.function {
                        Some(name) => f(Call { name: Some(name.name.slice()), file, line }),
                        // It is the only one.
                        None => nameless = Some((file.to_owned(), line)),
                    }
                }
            }
        }
        if let Some((file, line)) = nameless {
            f(Call { name: self.function(address), file: &file, line });
        } else if !is_found && let Some(name) = self.function(address) {
            f(Call { name: Some(name), file: "", line: 0 });
        }
    }

    /// Returns the mangled name of the function at an address, from the table of symbols.
    pub fn function(&mut self, address: u64) -> Option<&[u8]> {
        let elf = &self.elf;
        let functions = self.functions.get_or_insert_with(|| functions(elf));
        let after = functions.partition_point(|function| function.start <= address);
        let Function { start, size, name } = *functions[..after].last()?;
        (size == 0 || address - start < size).then_some(name)
    }
}

/// Returns the functions with a name, by address.
fn functions(elf: &Elf<'static>) -> Vec<Function> {
    let symbols = elf.symbols().filter(|symbol| symbol.is_function && !symbol.name.is_empty());
    let function = |symbol: Symbol<'static>| Function {
        start: symbol.address,
        size: symbol.size,
        name: symbol.name,
    };
    let mut all: Vec<Function> = symbols.map(function).collect();
    // The longest of several at the same address is the last, which is found.
    all.sort_unstable_by_key(|function| (function.start, function.size));
    all
}

fn has_lines(elf: &Elf<'_>) -> bool {
    elf.section(".debug_info").is_some_and(|section| !section.bytes.is_empty())
}

/// Finds the file with the debug information of `elf`, which is at `path`.
fn separate_debug_file(elf: &Elf<'_>, path: &Path, backing: &mut Backing) -> Option<Elf<'static>> {
    let id = elf.build_id();
    let mut candidates = Vec::new();
    if let Some([first, rest @ ..]) = id {
        let mut name = format!("{DEBUG_FOLDER}/.build-id/{first:02x}/");
        for byte in rest {
            let _ = write!(name, "{byte:02x}");
        }
        candidates.push(PathBuf::from(name + ".debug"));
    }
    if let (Some(name), Some(folder)) = (elf.debug_link(), path.parent()) {
        let name = OsStr::from_bytes(name);
        let below = folder.strip_prefix("/").unwrap_or(folder);
        candidates.push(folder.join(name));
        candidates.push(folder.join(".debug").join(name));
        candidates.push(Path::new(DEBUG_FOLDER).join(below).join(name));
    }
    candidates.iter().find_map(|candidate| {
        let other = Elf::parse(backing.map(candidate)?)?;
        (has_lines(&other) && other.build_id() == id).then_some(other)
    })
}

/// Reads the `.dwp` file beside the program or library at `path`.
fn dwarf_package(path: &Path, backing: &mut Backing) -> Option<DwarfPackage<Bytes>> {
    let mut name = OsString::from(path);
    name.push(".dwp");
    let elf = Elf::parse(backing.read(Path::new(&name))?)?;
    DwarfPackage::load(|id| backing.split_section(&elf, id), Bytes::default()).ok()
}

/// Returns the debug information of a unit that is not in the program. Returns None if it is
/// missing.
fn split_unit(
    package: Option<&DwarfPackage<Bytes>>,
    load: SplitDwarfLoad<Bytes>,
    backing: &mut Backing,
) -> Option<Arc<Dwarf<Bytes>>> {
    if let Some(package) = package
        && let Ok(Some(unit)) = package.find_cu(load.dwo_id, &load.parent)
    {
        return Some(Arc::new(unit));
    }
    let folder = load.comp_dir.as_ref().map_or(&[][..], |folder| folder.slice());
    let path = Path::new(OsStr::from_bytes(folder)).join(OsStr::from_bytes(load.path?.slice()));
    let elf = Elf::parse(backing.read(&path)?)?;
    let mut unit = Dwarf::load(|id| backing.split_section(&elf, id)).ok()?;
    unit.make_dwo(&load.parent);
    Some(Arc::new(unit))
}

/// Whether files that a file names are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OtherFiles {
    IfNeeded,
    Never,
}

/// The memory that a [`SymbolFile`] borrows from.
struct Backing {
    other_files: OtherFiles,
    maps: Vec<FileMap>,
    /// Inflated sections, and files that were read.
    buffers: Vec<Vec<u8>>,
}

impl Backing {
    fn new(other_files: OtherFiles) -> Backing {
        Backing { other_files, maps: Vec::new(), buffers: Vec::new() }
    }

    /// Maps a file. The result is valid as long as `self`.
    fn map(&mut self, path: &Path) -> Option<&'static [u8]> {
        if self.other_files == OtherFiles::Never {
            return None;
        }
        let map = FileMap::new(path)?;
        let bytes = map.bytes;
        self.maps.push(map);
        Some(bytes)
    }

    /// Reads a file that a compiler may write again in place, so that it must not be mapped. The
    /// result is valid as long as `self`.
    fn read(&mut self, path: &Path) -> Option<&'static [u8]> {
        if self.other_files == OtherFiles::Never {
            return None;
        }
        let (mut file, len) = open(path)?;
        let mut bytes = Vec::with_capacity(len);
        file.read_to_end(&mut bytes).ok()?;
        // SAFETY: as in `section`.
        let kept = unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
        self.buffers.push(bytes);
        Some(kept)
    }

    /// Returns the bytes of a section, inflated. They are valid as long as `self`.
    fn section(&mut self, elf: &Elf<'static>, name: &str) -> Result<Bytes, Error> {
        let Some(section) = elf.section(name) else { return Ok(Bytes::default()) };
        let mut bytes = section.bytes;
        if section.is_compressed() {
            let inflated = section.inflate().unwrap_or_default();
            // SAFETY: the heap memory is neither moved nor changed until `self` is dropped, which
            // is after all that borrows from it (the file's invariant).
            bytes = unsafe { std::slice::from_raw_parts(inflated.as_ptr(), inflated.len()) };
            self.buffers.push(inflated);
        }
        Ok(EndianSlice::new(bytes, LittleEndian))
    }

    /// As [`Backing::section`], of a `.dwo` or `.dwp` file.
    fn split_section(&mut self, elf: &Elf<'static>, id: SectionId) -> Result<Bytes, Error> {
        id.dwo_name().map_or_else(|| Ok(Bytes::default()), |name| self.section(elf, name))
    }
}

/// Opens a file that is not empty. Returns it and its length.
fn open(path: &Path) -> Option<(File, usize)> {
    // A pipe would block.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let metadata = file.metadata().ok()?;
    let len = usize::try_from(metadata.len()).ok()?;
    (metadata.is_file() && len != 0).then_some((file, len))
}

/// A file that is mapped.
struct FileMap {
    /// Valid until `self` is dropped.
    bytes: &'static [u8],
}

impl FileMap {
    fn new(path: &Path) -> Option<FileMap> {
        let (file, len) = open(path)?;
        // SAFETY: a new mapping, which only `drop` unmaps. Nothing writes to it. If another process
        // writes to the file, the bytes change, and every reader checks what it reads. If another
        // process shortens it, an access ends this process by SIGBUS; linkers and package managers
        // replace a file instead.
        let bytes = unsafe {
            let fd = file.as_raw_fd();
            let start = libc::mmap(null_mut(), len, libc::PROT_READ, libc::MAP_PRIVATE, fd, 0);
            if start == libc::MAP_FAILED {
                return None;
            }
            std::slice::from_raw_parts(start.cast::<u8>(), len)
        };
        Some(FileMap { bytes })
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, from which nothing borrows any more.
        let _ = unsafe { libc::munmap(self.bytes.as_ptr().cast_mut().cast(), self.bytes.len()) };
    }
}

/// Returns a name without its mangling, and without the hash of Rust's names.
pub fn demangle(name: &[u8]) -> String {
    format!("{:#}", rustc_demangle::demangle(&String::from_utf8_lossy(name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::random_below;
    use std::fs;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;
    use std::time::{Duration, Instant};

    #[test]
    fn a_program_that_is_cut_off_or_damaged_is_read_or_refused() {
        /// How long files are damaged and read.
        const LIMIT: Duration = Duration::from_secs(2);
        let program = fs::read("/proc/self/exe").unwrap();
        // SAFETY: a new descriptor that nothing else owns.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"program".as_ptr(), 0)) };
        file.write_all_at(&program, 0).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let elf = Elf::parse(&program).unwrap();
        let text = elf.section(".text").unwrap();
        let look_up = |address: u64| {
            let mut calls = 0;
            if let Some(mut file) = SymbolFile::map(path.as_ref(), "".as_ref(), |_| true) {
                for address in [address, text.address, text.address + text.size / 2, 0, u64::MAX] {
                    file.calls(address, &mut |_| calls += 1);
                }
            }
            calls
        };
        let is_this = |symbol: &Symbol<'_>| demangle(symbol.name).ends_with("symbols::file::open");
        let function = elf.symbols().find(is_this).expect("a function of this crate").address;
        assert!(look_up(function) > 0);

        let mut random = random_below();
        let damaged = [".debug_info", ".debug_abbrev", ".debug_line", ".debug_ranges", ".symtab"];
        let begin = Instant::now();
        while begin.elapsed() < LIMIT {
            let mut places = Vec::new();
            for section in damaged.iter().filter_map(|name| elf.section(name)) {
                let start = section.bytes.as_ptr() as usize - program.as_ptr() as usize;
                // Units that are looked up are anywhere; abbreviations are at the start.
                for bytes in [64, 4096, section.bytes.len()] {
                    if !section.bytes.is_empty() {
                        places.push(start + random(bytes.min(section.bytes.len())));
                    }
                }
            }
            for &at in &places {
                file.write_all_at(&[random(256) as u8], at as u64).unwrap();
            }
            look_up(function);
            for &at in &places {
                file.write_all_at(&program[at..=at], at as u64).unwrap();
            }
        }
        assert!(look_up(function) > 0, "the file is whole again");

        let mut len = program.len();
        let begin = Instant::now();
        while begin.elapsed() < LIMIT && len > 0 {
            len -= 1 + random(1 + len / 8);
            file.set_len(len as u64).unwrap();
            look_up(function);
        }
    }
}
