//! `SymbolFile`: the functions and lines of one ELF file, before relocation.
//!
//! Lines and inlined calls come from the debug information (`dwarf/`), names from it or from the
//! table of symbols. Debug information may be in other files:
//!
//! - in a file of its own, found by the build id below `/usr/lib/debug`, or by the name in
//!   `.gnu_debuglink`, beside the program and in the usual folders; its build id must be the same,
//!   or the checksum in `.gnu_debuglink` must be its own if one of the two has no build id;
//! - in `.dwo` files, whose paths the program contains (`split-debuginfo = "unpacked"`), or in a
//!   `.dwp` file beside the program (`"packed"`).
//!
//! A file that is missing, damaged or of another build costs lines or names, never more. A `.dwo`
//! file is read once, even if it has the other halves of many units. Left out: what `dwz` has
//! moved to a third file (`.gnu_debugaltlink`).
//!
//! The bytes are mapped and stay in the file: what is resident is what lookups have touched, and
//! the kernel may drop it. On the heap are inflated sections, `.dwo` and `.dwp` files, and what
//! lookups have read: an entry per unit of the program, and the lines and functions of each unit
//! that was looked up.
//!
//! Invariant: what borrows from [`Backing`] is in fields before it, and no method returns a part of
//! it for longer than a call. A file that is refused is freed before anything but the check that
//! refuses it has seen it. So nothing refers to memory that was unmapped or freed.

use crate::symbols::dwarf::{DebugInfo, DebugSections, Package, Span, SplitUnit, find_last, sort};
use crate::symbols::elf::Elf;
use crate::sys::map::Map;
use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

/// How many bytes compressed sections may have after they are inflated, per byte of the file. Debug
/// information is compressed to a fifth; zlib can compress to a thousandth, so a small file could
/// claim all memory.
const INFLATION_MAX: usize = 64;

/// How long a demangled name can be. Names of futures in futures have some hundred bytes; those that
/// refer to parts of themselves can be made to have a million.
const NAME_BYTES_SHOWN_MAX: usize = 4096;

/// What an ELF file starts with.
const ELF_MAGIC: &[u8] = b"\x7fELF";

/// Where distributions put debug information.
const DEBUG_FOLDER: &str = "/usr/lib/debug";

/// The functions and lines of an ELF file.
pub struct SymbolFile {
    elf: Elf<'static>,
    /// None if there is no debug information.
    lines: Option<DebugInfo>,
    package: Option<Package>,
    /// None until a first name is looked up here.
    functions: Option<Functions>,
    /// The last field: it is dropped after all that borrows from it.
    backing: Backing,
}

/// The functions in the table of symbols.
struct Functions {
    /// By address. `end` is the size, which is 0 if unknown, as that of some hand-written code. The
    /// longest of several at the same address is the last, which is found.
    spans: Vec<Span>,
    names: Vec<&'static [u8]>,
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
        let mut backing = Backing::new(OtherFiles::Never);
        backing.allow_inflation(bytes);
        Some(SymbolFile::of_elf(Elf::parse(bytes)?, Path::new(""), backing))
    }

    /// Maps the file `from` if `is_wanted` returns true for it. It is known as `path`, beside
    /// which files with its debug information may be.
    pub fn map(
        from: &Path,
        path: &Path,
        is_wanted: impl FnOnce(&Elf<'_>) -> bool,
    ) -> Option<SymbolFile> {
        let mut backing = Backing::new(OtherFiles::IfNeeded);
        let elf = backing.map(from, is_wanted)?;
        Some(SymbolFile::of_elf(elf, path, backing))
    }

    fn of_elf(mut elf: Elf<'static>, path: &Path, mut backing: Backing) -> SymbolFile {
        if !has_lines(&elf)
            && let Some(other) = separate_debug_file(&elf, path, &mut backing)
        {
            elf = other;
        }
        let (mut lines, mut package) = (None, None);
        if has_lines(&elf) {
            let sections = DebugSections::of_program(&mut |name| backing.section(&elf, name));
            lines = Some(DebugInfo::new(sections));
            package = dwarf_package(path, &mut backing);
        }
        SymbolFile { elf, lines, package, functions: None, backing }
    }

    /// Calls `f` for each call at an address, innermost first: several if functions were inlined
    /// there, none if nothing is known.
    pub fn calls(&mut self, address: u64, f: &mut dyn FnMut(Call<'_>)) {
        let SymbolFile { elf, lines, package, functions, backing } = self;
        if let Some(lines) = lines {
            let load = &mut |unit: SplitUnit, is_wanted: &mut dyn FnMut(&DebugSections) -> bool| {
                load_split(package.as_ref(), &unit, backing, is_wanted);
            };
            if let Some(found) = lines.find(address, load) {
                let outermost = found.calls.len() - 1;
                for (index, call) in found.calls.iter().enumerate() {
                    let mut name = call.name;
                    if name.is_none() && index == outermost {
                        name = function_at(elf, functions, address);
                    }
                    f(Call { name, file: lines.path(&found, call), line: call.line });
                }
                return;
            }
        }
        if let Some(name) = function_at(elf, functions, address) {
            f(Call { name: Some(name), file: "", line: 0 });
        }
    }

    /// Returns the mangled name of the function at an address, from the table of symbols.
    pub fn function(&mut self, address: u64) -> Option<&[u8]> {
        function_at(&self.elf, &mut self.functions, address)
    }
}

/// Returns the name of the function at an address.
fn function_at(
    elf: &Elf<'static>,
    known: &mut Option<Functions>,
    address: u64,
) -> Option<&'static [u8]> {
    let functions = known.get_or_insert_with(|| functions(elf));
    let Span { key: start, end: size, owner, .. } =
        functions.spans[find_last(&functions.spans, 0, address)?];
    (size == 0 || address - start < size).then(|| functions.names[owner as usize])
}

/// Returns the functions with a name.
fn functions(elf: &Elf<'static>) -> Functions {
    let mut functions = Functions { spans: Vec::new(), names: Vec::new() };
    for symbol in elf.symbols() {
        if symbol.is_function
            && !symbol.name.is_empty()
            && let Ok(owner) = u32::try_from(functions.names.len())
        {
            let span = Span { depth: 0, key: symbol.address, end: symbol.size, owner };
            functions.spans.push(span);
            functions.names.push(symbol.name);
        }
    }
    functions.names.shrink_to_fit();
    sort(&mut functions.spans);
    functions
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
    let link = elf.debug_link();
    if let (Some((name, _)), Some(folder)) = (link, path.parent()) {
        let name = OsStr::from_bytes(name);
        let below = folder.strip_prefix("/").unwrap_or(folder);
        candidates.push(folder.join(name));
        candidates.push(folder.join(".debug").join(name));
        candidates.push(Path::new(DEBUG_FOLDER).join(below).join(name));
    }
    let is_same_build = |other: &Elf<'_>| match (id, other.build_id()) {
        (Some(id), Some(other)) => id == other,
        _ => link.is_some_and(|(_, checksum)| checksum == other.checksum()),
    };
    candidates.iter().find_map(|candidate| {
        backing.map(candidate, |other| has_lines(other) && is_same_build(other))
    })
}

/// Reads the `.dwp` file beside the program or library at `path`.
fn dwarf_package(path: &Path, backing: &mut Backing) -> Option<Package> {
    let mut name = OsString::from(path);
    name.push(".dwp");
    backing.read_elf(Path::new(&name), &mut |elf, backing| {
        Package::read(&mut |name| backing.section(elf, name))
    })
}

/// Calls `is_wanted` with the debug information of a unit that is not in the program, unless it is
/// missing. If the result is false, it is of another build.
fn load_split(
    package: Option<&Package>,
    unit: &SplitUnit,
    backing: &mut Backing,
    is_wanted: &mut dyn FnMut(&DebugSections) -> bool,
) {
    if let Some(package) = package
        && let Some(sections) = package.find(unit.id)
    {
        is_wanted(&sections);
        return;
    }
    let Some(file) = unit.file else { return };
    let folder = unit.folder.unwrap_or_default();
    if folder.len() + file.len() < libc::PATH_MAX as usize {
        let path = Path::new(OsStr::from_bytes(folder)).join(OsStr::from_bytes(file));
        backing.load_split_file(path, is_wanted);
    }
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
    /// The `.dwo` files that lookups have needed. None if there is none, or if it is of another
    /// build: it is not read again.
    split_files: Map<PathBuf, Option<DebugSections>>,
    /// Inflated sections, and files that were read.
    buffers: Vec<Vec<u8>>,
    /// How many bytes may still be inflated.
    inflation_left: usize,
}

impl Backing {
    fn new(other_files: OtherFiles) -> Backing {
        Backing {
            other_files,
            maps: Vec::new(),
            split_files: Map::new(),
            buffers: Vec::new(),
            inflation_left: 0,
        }
    }

    /// Allows the sections of a file to be inflated.
    fn allow_inflation(&mut self, file: &[u8]) {
        let bytes = file.len().saturating_mul(INFLATION_MAX);
        self.inflation_left = self.inflation_left.saturating_add(bytes);
    }

    /// Maps an ELF file, if `is_wanted` returns true for it. The result is valid as long as `self`.
    fn map(
        &mut self,
        path: &Path,
        is_wanted: impl FnOnce(&Elf<'_>) -> bool,
    ) -> Option<Elf<'static>> {
        if self.other_files == OtherFiles::Never {
            return None;
        }
        let map = FileMap::new(path)?;
        let elf = Elf::parse(map.bytes)?;
        if !is_wanted(&elf) {
            return None;
        }
        self.allow_inflation(map.bytes);
        self.maps.push(map);
        Some(elf)
    }

    /// Reads an ELF file that a compiler may write again in place, so that it must not be mapped. If
    /// `f` returns None, the file is not kept, and `f` must not have kept a part of it either;
    /// otherwise the file is valid as long as `self`.
    fn read_elf<T>(
        &mut self,
        path: &Path,
        f: &mut dyn FnMut(&Elf<'static>, &mut Backing) -> Option<T>,
    ) -> Option<T> {
        let (buffers, inflation_left) = (self.buffers.len(), self.inflation_left);
        let elf = self.read(path).and_then(Elf::parse);
        let wanted = elf.and_then(|elf| f(&elf, self));
        if wanted.is_none() {
            // Nothing borrows from what was added: `f` has not kept it.
            self.buffers.truncate(buffers);
            self.inflation_left = inflation_left;
        }
        wanted
    }

    /// Reads a file, if it is an ELF file. The result is valid until it is removed from `buffers`.
    fn read(&mut self, path: &Path) -> Option<&'static [u8]> {
        if self.other_files == OtherFiles::Never {
            return None;
        }
        let (file, len) = open(path)?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).ok()?;
        // A text may name any file. What another process appends meanwhile is left out.
        (&file).take(ELF_MAGIC.len() as u64).read_to_end(&mut bytes).ok()?;
        if bytes != ELF_MAGIC {
            return None;
        }
        file.take((len - bytes.len()) as u64).read_to_end(&mut bytes).ok()?;
        self.allow_inflation(&bytes);
        // SAFETY: as in `section`.
        let kept = unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) };
        self.buffers.push(bytes);
        Some(kept)
    }

    /// Calls `is_wanted` with the sections of a `.dwo` file, unless there is none. If the first such
    /// call returns false, the file is not kept.
    fn load_split_file(
        &mut self,
        path: PathBuf,
        is_wanted: &mut dyn FnMut(&DebugSections) -> bool,
    ) {
        if let Some(known) = self.split_files.get(&path) {
            if let Some(sections) = known {
                is_wanted(sections);
            }
            return;
        }
        let sections = self.read_elf(&path, &mut |elf, backing| {
            let mut section = |name: &str| backing.section(elf, name);
            Some(DebugSections::of_split_file(&mut section)).filter(&mut *is_wanted)
        });
        self.split_files.insert(path, sections);
    }

    /// Returns the bytes of a section, inflated. They are valid as long as `self`.
    fn section(&mut self, elf: &Elf<'static>, name: &str) -> &'static [u8] {
        let Some(section) = elf.section(name) else { return &[] };
        let mut bytes = section.bytes;
        if section.is_compressed() {
            let inflated = section.inflate(self.inflation_left).unwrap_or_default();
            self.inflation_left -= inflated.len();
            // SAFETY: the heap memory is neither moved nor changed until `self` is dropped, which
            // is after all that borrows from it (the file's invariant), or until `read_elf` removes
            // it, when nothing borrows from it any more.
            bytes = unsafe { std::slice::from_raw_parts(inflated.as_ptr(), inflated.len()) };
            self.buffers.push(inflated);
        }
        bytes
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

/// Returns a name without its mangling, and without the hash of Rust's names. Of one that is longer
/// than 4096 bytes it returns the start, and `…`.
///
/// A name is cut here and nowhere before: the start of a mangled name could not be demangled.
pub fn demangle(name: &[u8]) -> String {
    let mut shown = ShownName(String::new());
    if write!(shown, "{:#}", rustc_demangle::demangle(&String::from_utf8_lossy(name))).is_err() {
        shown.0.push('…');
    }
    shown.0
}

/// The start of a name. To write more to it fails.
struct ShownName(String);

impl Write for ShownName {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let mut end = text.len().min(NAME_BYTES_SHOWN_MAX - self.0.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.0.push_str(&text[..end]);
        if end < text.len() { Err(std::fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::symbols::dwarf::tests::{CODE, Wrong, split_program};
    use crate::symbols::elf::Symbol;
    use crate::symbols::testing::random_below;
    use std::fs;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::FileExt;
    use std::time::{Duration, Instant};

    #[test]
    fn a_long_name_is_cut_after_it_is_demangled() {
        assert_eq!(demangle(b"_ZN5crate4name17h0123456789abcdefE"), "crate::name");
        // A mangled name that is longer than what is shown, with its hash at the end.
        let part = "n".repeat(2000);
        let mangled = format!("_ZN{}17h0123456789abcdefE", format!("2000{part}").repeat(3));
        let name = demangle(mangled.as_bytes());
        assert_eq!(name, format!("{part}::{part}::{}…", "n".repeat(92)));
        let name = demangle("é".repeat(NAME_BYTES_SHOWN_MAX).as_bytes());
        assert_eq!(name, "é".repeat(NAME_BYTES_SHOWN_MAX / 2) + "…");
        let whole = "n".repeat(NAME_BYTES_SHOWN_MAX);
        assert_eq!(demangle(whole.as_bytes()), whole);
        assert_eq!(demangle(format!("{whole}n").as_bytes()), format!("{whole}…"));
    }

    /// A folder for files, which is removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("trefoil_symbols_{name}_{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Makes an ELF file of sections: their names, flags and bytes.
    fn elf_file(sections: &[(&str, u64, &[u8])]) -> Vec<u8> {
        let (mut names, mut contents, mut headers) = (vec![0], vec![0; 64], vec![0; 64]);
        let mut add = |name: &str, flags: u64, bytes: &[u8], name_at: usize| {
            for number in [name_at as u32, 1] {
                headers.extend(number.to_le_bytes());
            }
            for number in [flags, 0, contents.len() as u64, bytes.len() as u64] {
                headers.extend(number.to_le_bytes());
            }
            headers.extend([0; 24]);
            contents.extend(bytes);
            name.len() + 1
        };
        for &(name, flags, bytes) in sections {
            add(name, flags, bytes, names.len());
            names.extend(name.as_bytes());
            names.push(0);
        }
        add("", 0, &names, 0);
        contents[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        let sections_at = contents.len() as u64;
        contents[40..48].copy_from_slice(&sections_at.to_le_bytes());
        contents[58] = 64;
        contents[60] = sections.len() as u8 + 2;
        contents[62] = sections.len() as u8 + 1;
        contents.extend(headers);
        contents
    }

    /// Returns a compressed section of `1 + 258 * repeats` times the same byte.
    fn compressed(repeats: usize) -> Vec<u8> {
        let size = 1 + 258 * repeats;
        // The last block, with the codes of the standard: a byte, the longest copies, the end.
        let mut bits = vec![1, 1, 0];
        let mut code =
            |code: u16, len: u32| (0..len).rev().for_each(|at| bits.push(code >> at & 1));
        code(0x30 + u16::from(b'a'), 8);
        for _ in 0..repeats {
            code(0b1100_0101, 8);
            code(0, 5);
        }
        code(0, 7);
        let mut section = Vec::new();
        for number in [1, size as u64, 1] {
            section.extend(number.to_le_bytes());
        }
        section.extend([0x78, 1]);
        for byte in bits.chunks(8) {
            section.push(byte.iter().rev().fold(0, |byte, bit| byte << 1 | *bit as u8));
        }
        let (mut a, mut b) = (1, 0);
        for _ in 0..size {
            a = (a + u32::from(b'a')) % 65521;
            b = (b + a) % 65521;
        }
        section.extend((b << 16 | a).to_be_bytes());
        section
    }

    #[test]
    fn a_debug_file_of_another_build_is_not_used() {
        let folder = Folder::new("link");
        let note = |id: &[u8]| {
            let numbers = [4, id.len() as u32, 3].map(u32::to_le_bytes);
            [numbers.as_flattened(), b"GNU\0", id].concat()
        };
        let (this, that) = (note(b"this"), note(b"that"));
        let debug_file = |id: Option<&Vec<u8>>| {
            let mut sections = vec![(".debug_info", 0, &b"info"[..])];
            sections.extend(id.map(|id| (".note.gnu.build-id", 0, &id[..])));
            elf_file(&sections)
        };
        let path = folder.0.join("program");
        let is_used = |program: Option<&Vec<u8>>, debug: Option<&Vec<u8>>, is_damaged: bool| {
            let debug_bytes = debug_file(debug);
            let checksum = Elf::parse(&debug_bytes).unwrap().checksum() ^ u32::from(is_damaged);
            let link = [&b"debug\0\0\0"[..], &checksum.to_le_bytes()].concat();
            let mut sections = vec![(".gnu_debuglink", 0, &link[..])];
            sections.extend(program.map(|id| (".note.gnu.build-id", 0, &id[..])));
            fs::write(&path, elf_file(&sections)).unwrap();
            fs::write(folder.0.join("debug"), debug_bytes).unwrap();
            let file = SymbolFile::map(&path, &path, |_| true).unwrap();
            assert_eq!(file.backing.maps.len(), 1 + usize::from(file.lines.is_some()));
            file.lines.is_some()
        };
        for is_damaged in [false, true] {
            assert!(is_used(Some(&this), Some(&this), is_damaged), "the build ids decide");
            assert!(!is_used(Some(&this), Some(&that), is_damaged));
            for (program, debug) in [(None, None), (Some(&this), None), (None, Some(&that))] {
                assert_eq!(is_used(program, debug, is_damaged), !is_damaged);
            }
        }
    }

    #[test]
    fn a_split_file_of_another_build_is_neither_kept_nor_read_again() {
        let folder = Folder::new("split");
        let other_path = folder.0.join("file.dwo");
        let name = other_path.to_str().unwrap();
        for version in [4, 5] {
            let wanted = split_program(version, name, Wrong::Nothing);
            let [program, right] = wanted.map(|sections| {
                let sections: Vec<_> =
                    sections.iter().map(|&(name, bytes)| (name, 0, bytes)).collect();
                elf_file(&sections)
            });
            let [_, wrong] = split_program(version, name, Wrong::Id);
            let wrong: Vec<_> = wrong.iter().map(|&(name, bytes)| (name, 0, bytes)).collect();
            let path = folder.0.join("program");
            fs::write(&path, program).unwrap();
            let look_up = |file: &mut SymbolFile| {
                let mut found = Vec::new();
                file.calls(CODE, &mut |call| found.push(call.name.map(<[u8]>::to_vec)));
                found
            };
            for (bytes, expected, buffers) in [
                (&right, vec![Some(b"right".to_vec())], 1),
                (&elf_file(&wrong), vec![], 0),
                (&b"no ELF file".to_vec(), vec![], 0),
            ] {
                fs::write(&other_path, bytes).unwrap();
                let mut file = SymbolFile::map(&path, &path, |_| true).unwrap();
                assert_eq!(look_up(&mut file), expected, "version {version}");
                assert_eq!(file.backing.buffers.len(), buffers);
                let [(known, sections)] = file.backing.split_files.entries() else { panic!() };
                assert_eq!((known, sections.is_some()), (&other_path, !expected.is_empty()));
                // It is not read again, even for another unit.
                fs::remove_file(&other_path).unwrap();
                let mut is_found = false;
                let mut is_wanted = |_: &DebugSections| {
                    is_found = true;
                    false
                };
                file.backing.load_split_file(other_path.clone(), &mut is_wanted);
                assert_eq!(is_found, !expected.is_empty());
                assert_eq!(look_up(&mut file), expected, "version {version}");
            }
        }
    }

    #[test]
    fn a_package_without_an_index_is_not_kept() {
        let folder = Folder::new("package");
        let path = folder.0.join("program");
        let [program, _] = split_program(5, "missing", Wrong::Nothing);
        let program: Vec<_> = program.iter().map(|&(name, bytes)| (name, 0, bytes)).collect();
        fs::write(&path, elf_file(&program)).unwrap();
        let mut index = [0; 16 + 12];
        (index[0], index[12]) = (2, 1);
        for (index, is_kept) in [(&[0xff; 28], false), (&index, true)] {
            let package = elf_file(&[(".debug_cu_index", 0, index)]);
            fs::write(folder.0.join("program.dwp"), package).unwrap();
            let file = SymbolFile::map(&path, &path, |_| true).unwrap();
            assert_eq!(file.package.is_some(), is_kept);
            assert_eq!(file.backing.buffers.len(), usize::from(is_kept));
        }
    }

    #[test]
    fn sections_are_inflated_to_a_multiple_of_the_size_of_the_file() {
        const SHF_COMPRESSED: u64 = 1 << 11;
        let section = compressed(400);
        let sections = [(".a", SHF_COMPRESSED, &section[..]), (".b", SHF_COMPRESSED, &section)];
        let one: &'static [u8] = elf_file(&sections).leak();
        let elf = Elf::parse(one).unwrap();
        let mut backing = Backing::new(OtherFiles::Never);
        backing.allow_inflation(one);
        assert_eq!(backing.section(&elf, ".a"), [b'a'; 1 + 258 * 400]);
        assert!(one.len() * INFLATION_MAX < 2 * (1 + 258 * 400));
        assert!(backing.section(&elf, ".b").is_empty(), "too much in all");

        let section = compressed(10_000);
        let large: &'static [u8] = elf_file(&[(".a", SHF_COMPRESSED, &section)]).leak();
        backing.allow_inflation(large);
        assert!(large.len() * INFLATION_MAX < 258 * 10_000);
        assert!(backing.section(&Elf::parse(large).unwrap(), ".a").is_empty());
        let buffers = backing.buffers.iter().map(Vec::len).sum::<usize>();
        assert!(buffers <= (one.len() + large.len()) * INFLATION_MAX);
    }

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
