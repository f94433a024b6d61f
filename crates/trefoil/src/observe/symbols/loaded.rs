//! `Resolver`: the loaded objects (the program, its libraries, the vdso) and their symbols.
//!
//! The file of an object is read when an address in it is looked up for the first time, and kept
//! while the object is loaded. The list follows `dlopen` and `dlclose`: the loader counts both, and
//! each lookup compares the counts. So memory is bounded by what is loaded ([`SymbolFile`] says
//! what that is per file), and a library that was replaced by another at the same place is not mistaken
//! for it.
//!
//! A file may have been replaced on disk since it was loaded. `/proc/self/exe` still leads to the
//! program that runs. The file of a library is compared with what is in memory, by the table of
//! segments and by the notes, which have the build id. If they differ, its addresses have no names.
//!
//! One lock ([`ProcessLock`]), held while an address is resolved. The handler of a stack overflow
//! must not wait for it, because the goroutine that overflowed may hold it: [`Resolver::try_lock`].

use crate::observe::process_lock::{ProcessGuard, ProcessLock};
use crate::sys::mm;
use crate::sys::objects::{self, Version};
use std::ffi::{CStr, OsStr};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use trefoil_base::symbols::{Call, Elf, SymbolFile};

/// Bytes of notes that are compared at most.
const NOTE_BYTES_MAX: u64 = 1024;

static RESOLVER: ProcessLock<Resolver> =
    ProcessLock::new(Resolver { objects: Vec::new(), version: Version::NONE });

/// Finds the calls at the addresses of this process.
pub(in crate::observe) struct Resolver {
    objects: Vec<Object>,
    /// What [`Resolver::objects`] was listed at.
    version: Version,
}

/// A loaded object.
struct Object {
    /// Where its segments are.
    ranges: Vec<Range<u64>>,
    /// What is added to the addresses in its file.
    bias: u64,
    identity: Identity,
    symbols: Symbols,
}

/// What distinguishes an object from others that were loaded at the same place.
#[derive(PartialEq, Eq)]
struct Identity {
    source: Source,
    segment_table: Vec<u8>,
    notes: Vec<u8>,
}

/// Where the bytes of an object are.
#[derive(PartialEq, Eq)]
enum Source {
    /// In the file of the program.
    Program,
    Library(PathBuf),
    /// In memory, all of it.
    Vdso(&'static [u8]),
}

enum Symbols {
    Unread,
    /// There is no such file, or it is another one.
    Missing,
    Read(Box<SymbolFile>),
}

impl Resolver {
    /// Waits until no other caller resolves addresses.
    pub(in crate::observe) fn lock() -> ProcessGuard<'static, Resolver> {
        // A panic inside leaves the list as it was, or lists and reads less.
        RESOLVER.lock()
    }

    /// As [`Resolver::lock`]. Returns None instead of waiting.
    pub(in crate::observe) fn try_lock() -> Option<ProcessGuard<'static, Resolver>> {
        RESOLVER.try_lock()
    }

    /// Calls `f` for each call at an address, innermost first: several if functions were inlined
    /// there, none if nothing is known.
    pub(in crate::observe) fn calls(&mut self, address: u64, f: &mut dyn FnMut(Call<'_>)) {
        if self.version != Version::now() {
            self.list();
        }
        let contains = |object: &&mut Object| object.ranges.iter().any(|r| r.contains(&address));
        let Some(object) = self.objects.iter_mut().find(contains) else { return };
        if let Symbols::Unread = object.symbols {
            let loaded_at = object.ranges.first().map_or(0, |range| range.start);
            let symbols = object.identity.read(loaded_at);
            object.symbols = symbols.map_or(Symbols::Missing, |file| Symbols::Read(Box::new(file)));
        }
        if let Symbols::Read(file) = &mut object.symbols {
            file.calls(address.wrapping_sub(object.bias), f);
        }
    }

    /// Lists the objects that are loaded now. Those that were listed before keep what was read.
    fn list(&mut self) {
        let mut before = std::mem::take(&mut self.objects);
        objects::for_each(|info, headers| {
            self.version = Version::of(info);
            let mut object = Object::new(info, headers);
            let is_same =
                |other: &Object| other.bias == object.bias && other.identity == object.identity;
            if let Some(at) = before.iter().position(is_same) {
                object = before.swap_remove(at);
            }
            self.objects.push(object);
        });
    }
}

impl Object {
    /// The caller is called by the loader, so the object stays loaded meanwhile.
    fn new(info: &libc::dl_phdr_info, headers: &[libc::Elf64_Phdr]) -> Object {
        let bias = info.dlpi_addr;
        let range = |header: &libc::Elf64_Phdr| {
            let start = bias.wrapping_add(header.p_vaddr);
            start..start.saturating_add(header.p_memsz)
        };
        let of_kind = |kind| headers.iter().filter(move |h| h.p_type == kind);
        let ranges: Vec<Range<u64>> = of_kind(libc::PT_LOAD).map(range).collect();
        let bytes = |range: Range<u64>| -> &'static [u8] {
            let len = (range.end - range.start) as usize;
            // SAFETY: segments are mapped while the object is loaded. The caller copies the bytes,
            // except those of the vdso, which is never unloaded.
            unsafe { std::slice::from_raw_parts(range.start as *const u8, len) }
        };
        // A header that a tool has left behind may lead anywhere.
        let is_readable = |note: &Range<u64>| {
            of_kind(libc::PT_LOAD).filter(|load| load.p_flags & libc::PF_R != 0).any(|load| {
                let load = range(load);
                load.start <= note.start && note.end <= load.end
            })
        };
        let mut notes = Vec::new();
        for note in of_kind(libc::PT_NOTE).filter(|h| h.p_memsz <= NOTE_BYTES_MAX).map(range) {
            if is_readable(&note) {
                notes.extend_from_slice(bytes(note));
            }
        }
        let name = if info.dlpi_name.is_null() {
            c""
        } else {
            // SAFETY: the loader's string, which lives as long as the object.
            unsafe { CStr::from_ptr(info.dlpi_name) }
        };
        let source = match name.to_bytes() {
            b"" => Source::Program,
            b"linux-vdso.so.1" => {
                let all = ranges.iter().cloned().reduce(|a, b| a.start..b.end);
                let all = all.unwrap_or(0..0);
                // The table of sections follows the segments, on the last page.
                Source::Vdso(bytes(all.start..all.end.next_multiple_of(mm::page() as u64)))
            }
            path => Source::Library(PathBuf::from(OsStr::from_bytes(path))),
        };
        // SAFETY: the headers are words without padding.
        let segment_table = unsafe {
            std::slice::from_raw_parts(headers.as_ptr().cast::<u8>(), size_of_val(headers))
        };
        let identity = Identity { source, segment_table: segment_table.to_vec(), notes };
        Object { ranges, bias, identity, symbols: Symbols::Unread }
    }
}

impl Identity {
    /// Reads the file of the object that is loaded at `loaded_at`, if it is still the same.
    fn read(&self, loaded_at: u64) -> Option<SymbolFile> {
        let is_same = |elf: &Elf<'_>| self.is_that_of(elf);
        match &self.source {
            Source::Vdso(bytes) => SymbolFile::new(bytes),
            Source::Library(path) => SymbolFile::map(path, path, is_same),
            Source::Program => {
                let link = own_file("exe");
                let path = std::fs::read_link(&link).unwrap_or_default();
                // If the loader was called as a program, it is what the link leads to.
                SymbolFile::map(&link, &path, is_same).or_else(|| {
                    let path = mapped_at(loaded_at)?;
                    SymbolFile::map(&path, &path, is_same)
                })
            }
        }
    }

    /// Returns whether a file has the same segments and notes.
    fn is_that_of(&self, elf: &Elf<'_>) -> bool {
        let mut notes = Vec::new();
        for segment in elf.segments().filter(|segment| segment.kind == libc::PT_NOTE) {
            if segment.bytes.len() as u64 <= NOTE_BYTES_MAX {
                notes.extend_from_slice(segment.bytes);
            }
        }
        elf.segment_table() == self.segment_table && notes == self.notes
    }
}

/// Returns the path of a file about this process in `/proc`. If the main thread has ended, that is
/// a file of the calling thread. Otherwise it is not, because emulators know only the first path.
pub(in crate::observe) fn own_file(name: &str) -> PathBuf {
    let main_has_ended = std::fs::read_link("/proc/self/exe").is_err();
    let folder = if main_has_ended { "/proc/thread-self" } else { "/proc/self" };
    Path::new(folder).join(name)
}

/// Returns the path of the file that is mapped at an address.
fn mapped_at(address: u64) -> Option<PathBuf> {
    let maps = std::fs::read_to_string(own_file("maps")).ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let is_there = (hex(start)?..hex(end)?).contains(&address);
        let path = rest.splitn(5, ' ').nth(4)?.trim_start();
        (is_there && path.starts_with('/')).then(|| PathBuf::from(path))
    })
}
