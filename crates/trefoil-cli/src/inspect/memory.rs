//! The memory, the threads and the files of a process, from outside: a live process or a core file.
//!
//! A live process is read by `process_vm_readv`, which neither stops it nor needs anything from it.
//! In a core file, the kernel leaves out what is unchanged since it was mapped from a file: that is
//! read from the file.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use trefoil_base::symbols::{Cpu, RegisterValue, Registers};

/// Bytes of a text that are read at most.
const TEXT_BYTES_MAX: usize = 4096;
/// Bytes of notes in a core file that are read at most: they have the registers of each thread.
const NOTE_BYTES_MAX: u64 = 1 << 30;

/// The process that a command inspects.
pub(super) struct Process {
    pub(super) cpu: Cpu,
    source: Source,
    /// What is mapped from files, in the order of addresses.
    pub(super) mappings: Vec<Mapping>,
}

enum Source {
    Live {
        pid: i32,
    },
    /// The segments are in the order of addresses.
    Core {
        file: File,
        segments: Vec<Segment>,
        threads: Vec<Thread>,
    },
    /// This process, with some bits of each read changed.
    #[cfg(test)]
    Damaged {
        pid: i32,
        random: std::cell::Cell<u64>,
        rarity: u64,
    },
}

/// A part of a file in the memory of the process.
#[derive(PartialEq)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Where it begins in the file.
    pub(super) offset: u64,
    pub(super) is_executable: bool,
    pub(super) path: PathBuf,
}

/// A part of the memory that the core file contains.
struct Segment {
    address: u64,
    is_executable: bool,
    /// What is beyond this size in the memory is not in the core file.
    file_bytes: u64,
    file_offset: u64,
}

/// A thread as far as it can be seen without stopping it.
#[derive(Clone)]
pub(super) struct Thread {
    pub(super) cpu: Cpu,
    pub(super) tid: u32,
    /// None if it runs just now.
    pub(super) registers: Option<Registers>,
    /// The number of the system call that it is in.
    pub(super) system_call: Option<u64>,
}

impl Process {
    /// Opens a process by its number, or a core file by its path.
    pub(super) fn open(target: &str) -> Result<Process, String> {
        match target.parse::<i32>() {
            Ok(pid) if !Path::new(target).is_file() => Process::live(pid),
            _ => Process::core(Path::new(target)).map_err(|e| format!("{target}: {e}")),
        }
    }

    fn live(pid: i32) -> Result<Process, String> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).map_err(|e| {
            if e.kind() == io::ErrorKind::NotFound {
                format!("there is no process {pid}")
            } else {
                forbidden(pid, &e)
            }
        })?;
        let mappings: Vec<Mapping> = maps.lines().filter_map(|l| mapping(pid, l)).collect();
        let process = Process { cpu: Cpu::OWN, source: Source::Live { pid }, mappings };
        let Some(first) = process.mappings.first() else {
            return Err(format!(
                "process {pid} has no memory: it has ended, or is a kernel thread"
            ));
        };
        let mut byte = [0];
        match process.read_live(pid, first.start, &mut byte) {
            Ok(()) => Ok(process),
            Err(e) => Err(forbidden(pid, &e)),
        }
    }

    /// Returns whether its memory may change while it is read.
    pub(super) fn is_live(&self) -> bool {
        matches!(self.source, Source::Live { .. })
    }

    /// Reads memory. An address that is not mapped is an error.
    pub(super) fn read(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        match &self.source {
            Source::Live { pid } => self.read_live(*pid, address, into),
            Source::Core { file, segments, .. } => self.read_core(file, segments, address, into),
            #[cfg(test)]
            Source::Damaged { pid, random, rarity } => {
                self.read_live(*pid, address, into)?;
                tests::damage(random, *rarity, into);
                Ok(())
            }
        }
    }

    fn read_live(&self, pid: i32, address: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let local = libc::iovec {
                iov_base: into[done..].as_mut_ptr().cast(),
                iov_len: into.len() - done,
            };
            let at = address.checked_add(done as u64).ok_or(io::ErrorKind::InvalidInput)?;
            let remote = libc::iovec {
                iov_base: std::ptr::without_provenance_mut(at as usize),
                iov_len: into.len() - done,
            };
            // SAFETY: the kernel writes into `into` and nowhere else.
            let n = unsafe {
                libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0)
            };
            match n {
                1.. => done += n as usize,
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }

    fn read_core(
        &self,
        file: &File,
        segments: &[Segment],
        address: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = address.checked_add(done as u64).ok_or(io::ErrorKind::InvalidInput)?;
            let left = (into.len() - done) as u64;
            if let Some((segment, offset)) = find(segments, at) {
                let n = left.min(segment.file_bytes - offset) as usize;
                let from = segment.file_offset.checked_add(offset);
                let from = from.ok_or(io::ErrorKind::InvalidData)?;
                file.read_exact_at(&mut into[done..done + n], from)?;
                done += n;
                continue;
            }
            let Some((mapping, offset)) = find(&self.mappings, at) else {
                return Err(io::ErrorKind::NotFound.into());
            };
            // To the end of the page: the next one may be in the core file.
            let n = left.min(4096 - at % 4096) as usize;
            let from = mapping.offset.checked_add(offset).ok_or(io::ErrorKind::InvalidData)?;
            open_file(&mapping.path)?.read_exact_at(&mut into[done..done + n], from)?;
            done += n;
        }
        Ok(())
    }

    pub(super) fn u64(&self, address: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(super) fn u32(&self, address: u64) -> io::Result<u32> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads a text whose address and length may be wrong. Returns None if it is not a text.
    pub(super) fn text(&self, address: u64, len: u64) -> Option<String> {
        let len = usize::try_from(len).ok().filter(|&len| len <= TEXT_BYTES_MAX)?;
        let mut bytes = vec![0; len];
        self.read(address, &mut bytes).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        (!text.chars().any(char::is_control)).then_some(text)
    }

    /// Returns a thread. Of a live one it returns what /proc shows.
    pub(super) fn thread(&self, tid: u32) -> Option<Thread> {
        match &self.source {
            Source::Live { pid } => {
                let path = format!("/proc/{pid}/task/{tid}/syscall");
                let text = std::fs::read_to_string(path).ok()?;
                Some(live_thread(tid, text.trim()))
            }
            Source::Core { threads, .. } => threads.iter().find(|t| t.tid == tid).cloned(),
            #[cfg(test)]
            Source::Damaged { .. } => Some(live_thread(tid, "0 0x1 0x7ffc10 0x7f20")),
        }
    }

    fn core(path: &Path) -> io::Result<Process> {
        let file = open_file(path)?;
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text.to_owned());
        let mut header = [0; 64];
        let whole = file.read_exact_at(&mut header, 0);
        const ELF64_LITTLE_ENDIAN: &[u8] = b"\x7fELF\x02\x01";
        const ET_CORE: u16 = 4;
        let is_core = whole.is_ok()
            && header.starts_with(ELF64_LITTLE_ENDIAN)
            && u16_at(&header, 16) == ET_CORE;
        let cpu = Cpu::of_machine(u16_at(&header, 18)).filter(|_| is_core);
        let Some(cpu) = cpu else {
            let text = "neither the number of a process nor a core file of x86_64 or aarch64";
            return Err(invalid(text));
        };
        let (table, count) = (u64_at(&header, 32), u64::from(u16_at(&header, 56)));
        // A core file with more segments has their number elsewhere.
        const PN_XNUM: u64 = 0xffff;
        let count = if count == PN_XNUM {
            let mut section = [0; 64];
            file.read_exact_at(&mut section, u64_at(&header, 40))?;
            u64::from(u32_at(&section, 44))
        } else {
            count
        };
        let mut segments = Vec::new();
        let mut notes = Vec::new();
        let mut note_bytes = 0;
        for i in 0..count {
            let mut entry = [0; 56];
            let at = table.checked_add(56 * i).ok_or(io::ErrorKind::InvalidData)?;
            file.read_exact_at(&mut entry, at)?;
            let (kind, offset, bytes) = (u32_at(&entry, 0), u64_at(&entry, 8), u64_at(&entry, 32));
            match kind {
                libc::PT_LOAD => segments.push(Segment {
                    address: u64_at(&entry, 16),
                    is_executable: u32_at(&entry, 4) & libc::PF_X != 0,
                    file_bytes: bytes,
                    file_offset: offset,
                }),
                libc::PT_NOTE => {
                    let size = file.metadata()?.len();
                    let end = offset.checked_add(bytes).filter(|&end| end <= size);
                    note_bytes += bytes.min(size);
                    if end.is_none() || note_bytes > NOTE_BYTES_MAX {
                        return Err(invalid("the core file is not complete, or damaged"));
                    }
                    let mut note = vec![0; bytes as usize];
                    file.read_exact_at(&mut note, offset)?;
                    notes.push(note);
                }
                _ => {}
            }
        }
        let (mut threads, mut mappings) = (Vec::new(), Vec::new());
        for note in &notes {
            parse_notes(cpu, note, &mut threads, &mut mappings);
        }
        segments.sort_by_key(|segment| segment.address);
        // The kernel writes a segment per mapping, also if it leaves out the bytes.
        for mapping in &mut mappings {
            let at = segments.binary_search_by_key(&mapping.start, |segment| segment.address);
            mapping.is_executable = at.is_ok_and(|at| segments[at].is_executable);
        }
        mappings.sort_by_key(|mapping| mapping.start);
        if mappings.is_empty() {
            return Err(invalid("the core file has no list of mapped files"));
        }
        let process = Process { cpu, source: Source::Core { file, segments, threads }, mappings };
        process.changed_files().iter().for_each(|path| {
            let path = path.display().to_string();
            crate::print_error(format_args!(
                "{} is not the file that the process used: names and lines may be wrong",
                printable(&path)
            ));
        });
        Ok(process)
    }

    /// Returns the programs and libraries that have changed since the core file was written: the
    /// kernel writes their first page into the core file. Not those that never had a name on disk,
    /// as the image by which the runtime takes glibc's TLS surplus.
    fn changed_files(&self) -> Vec<&Path> {
        let Source::Core { file, segments, .. } = &self.source else { return Vec::new() };
        let has_changed = |mapping: &&Mapping| {
            let segment = find(segments, mapping.start)
                .filter(|(segment, offset)| *offset == 0 && segment.file_bytes >= 1024);
            let Some((segment, _)) = segment.filter(|_| mapping.offset == 0) else { return false };
            let (mut then, mut now) = ([0; 1024], [0; 1024]);
            let read = open_file(&mapping.path).and_then(|file| file.read_exact_at(&mut now, 0));
            let is_elf = file.read_exact_at(&mut then, segment.file_offset).is_ok()
                && then.starts_with(b"\x7fELF");
            is_elf && (read.is_err() || then != now)
        };
        let has_name =
            |mapping: &&Mapping| !mapping.path.starts_with("/memfd:trefoil-tls (deleted)");
        self.mappings
            .iter()
            .filter(has_name)
            .filter(has_changed)
            .map(|mapping| &*mapping.path)
            .collect()
    }
}

/// A part of the memory, with its first address and its size.
trait Part {
    fn range(&self) -> (u64, u64);
}

impl Part for Segment {
    fn range(&self) -> (u64, u64) {
        (self.address, self.file_bytes)
    }
}

impl Part for Mapping {
    fn range(&self) -> (u64, u64) {
        (self.start, self.end.saturating_sub(self.start))
    }
}

/// Returns the part that contains an address, and the offset in it. The parts are in the order of
/// addresses.
fn find<T: Part>(parts: &[T], address: u64) -> Option<(&T, u64)> {
    let after = parts.partition_point(|part| part.range().0 <= address);
    let (part, offset) = parts[..after].last().map(|part| (part, address - part.range().0))?;
    (offset < part.range().1).then_some((part, offset))
}

/// Opens a file of which the process or the core file has the name. It may be something else by
/// now: a pipe, for which `open` would wait, or a device.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"))
    }
}

/// Reads a file if it is a program or a library. Other files may be mapped too: large ones,
/// devices. One of more than `bytes_max` bytes is the error [`io::ErrorKind::FileTooLarge`].
pub(super) fn read_elf(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open_file(path)?;
    let mut magic = [0; 4];
    file.read_exact_at(&mut magic, 0)?;
    if magic != *b"\x7fELF" {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let bytes = Some(file.metadata()?.len()).filter(|&bytes| bytes <= bytes_max);
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    let mut contents = vec![0; bytes.ok_or(io::ErrorKind::FileTooLarge)?];
    file.read_exact_at(&mut contents, 0)?;
    Ok(contents)
}

/// Returns a text from the process or its files with control characters replaced: a terminal would
/// obey them.
pub(crate) fn printable(text: &str) -> String {
    let is_harmless = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            c if is_harmless(&c) => out.push(c),
            c => out.extend(c.escape_default()),
        }
    }
    out
}

/// Says why a process cannot be read.
fn forbidden(pid: i32, error: &io::Error) -> String {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let hint = match scope.trim() {
        "" | "0" => "it belongs to another user, or has more rights than this command",
        "1" => {
            "the kernel allows it only to root and to the parent of the process \
             (/proc/sys/kernel/yama/ptrace_scope is 1)"
        }
        _ => "the kernel allows it only to root (/proc/sys/kernel/yama/ptrace_scope)",
    };
    format!("the memory of process {pid} cannot be read: {error}; {hint}")
}

/// Parses a line of /proc/PID/maps. Returns None if no file is mapped there.
fn mapping(pid: i32, line: &str) -> Option<Mapping> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let mut fields = rest.splitn(5, ' ');
    let is_executable = fields.next()?.contains('x');
    let offset = fields.next()?;
    let path = fields.nth(2)?.trim_start();
    if !path.starts_with('/') {
        return None;
    }
    let hex = |text| u64::from_str_radix(text, 16).ok();
    // The program may have been replaced since: the link still leads to the one that runs.
    let exe = PathBuf::from(format!("/proc/{pid}/exe"));
    let is_exe = std::fs::read_link(&exe).is_ok_and(|link| link == Path::new(path));
    let inside = PathBuf::from(format!("/proc/{pid}/root{path}"));
    let path = if is_exe { exe } else { inside };
    let (start, end, offset) = (hex(start)?, hex(end)?, hex(offset)?);
    Some(Mapping { start, end, offset, is_executable, path })
}

/// Parses /proc/PID/task/TID/syscall: "running", or a number, six arguments, the stack pointer and
/// the program counter. The number is -1 if the thread is blocked outside a system call.
fn live_thread(tid: u32, text: &str) -> Thread {
    let fields: Vec<&str> = text.split(' ').collect();
    let hex = |text: &&str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let registers = match fields[..] {
        [_, .., sp, pc] => hex(&sp).zip(hex(&pc)),
        _ => None,
    };
    Thread {
        cpu: Cpu::OWN,
        tid,
        // /proc does not show the others. Few functions need them to find their caller.
        registers: registers.map(|(sp, pc)| Registers {
            pc,
            sp,
            fp: 0,
            lr: 0,
            rbx: RegisterValue::Unknown,
        }),
        system_call: fields[0].parse().ok(),
    }
}

/// Reads threads and mapped files from the notes of a core file.
fn parse_notes(cpu: Cpu, notes: &[u8], threads: &mut Vec<Thread>, mappings: &mut Vec<Mapping>) {
    const NT_PRSTATUS: u32 = 1;
    const NT_ARM_SYSTEM_CALL: u32 = 0x404;
    const NT_FILE: u32 = 0x4649_4c45;
    let mut at = 0;
    while at + 12 <= notes.len() {
        let (name, bytes) = (u32_at(notes, at) as usize, u32_at(notes, at + 4) as usize);
        let kind = u32_at(notes, at + 8);
        let start = at + 12 + name.next_multiple_of(4);
        let Some(contents) = notes.get(start..start + bytes) else { return };
        match kind {
            NT_PRSTATUS => threads.extend(core_thread(cpu, contents)),
            // It follows the registers of the same thread.
            NT_ARM_SYSTEM_CALL if cpu == Cpu::Aarch64 && contents.len() >= 4 => {
                if let Some(thread) = threads.last_mut() {
                    thread.system_call = system_call_number(u32_at(contents, 0).into());
                }
            }
            NT_FILE => parse_files(contents, mappings),
            _ => {}
        }
        at = start + bytes.next_multiple_of(4);
    }
}

/// Reads a thread from a `struct elf_prstatus`: the thread id is at 32, the registers are at 112.
fn core_thread(cpu: Cpu, contents: &[u8]) -> Option<Thread> {
    let count = match cpu {
        Cpu::X86_64 => 27,
        // x0 to x30, sp, pc, pstate.
        Cpu::Aarch64 => 34,
    };
    let bytes = contents.get(112..112 + 8 * count)?;
    let register = |number: usize| u64_at(bytes, 8 * number);
    let (registers, system_call) = match cpu {
        Cpu::X86_64 => {
            let [fp, rbx, orig_rax, pc, sp] = [4, 5, 15, 16, 19].map(register);
            let rbx = RegisterValue::Known(rbx);
            (Registers { pc, sp, fp, lr: 0, rbx }, system_call_number(orig_rax))
        }
        Cpu::Aarch64 => {
            let [fp, lr, sp, pc] = [29, 30, 31, 32].map(register);
            // A note of its own has the system call.
            (Registers { pc, sp, fp, lr, rbx: RegisterValue::Unknown }, None)
        }
    };
    Some(Thread { cpu, tid: u32_at(contents, 32), registers: Some(registers), system_call })
}

/// Returns the number of a system call; None for -1, which is no call.
fn system_call_number(number: u64) -> Option<u64> {
    const NUMBERS: u64 = 1024;
    (number < NUMBERS).then_some(number)
}

/// Reads the note with the mapped files: their number, the page size, start, end and offset (in
/// pages) of each, then the paths.
fn parse_files(contents: &[u8], mappings: &mut Vec<Mapping>) {
    if contents.len() < 16 {
        return;
    }
    let (count, page) = (u64_at(contents, 0) as usize, u64_at(contents, 8));
    let table = count.checked_mul(24).and_then(|bytes| bytes.checked_add(16));
    let Some(paths) = table.and_then(|bytes| contents.get(bytes..)) else { return };
    for (i, path) in paths.split(|&byte| byte == 0).take(count).enumerate() {
        let at = 16 + 24 * i;
        mappings.push(Mapping {
            start: u64_at(contents, at),
            end: u64_at(contents, at + 8),
            offset: u64_at(contents, at + 16).saturating_mul(page),
            // The note does not tell. The segments do.
            is_executable: false,
            path: String::from_utf8_lossy(path).into_owned().into(),
        });
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("two bytes"))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::cell::Cell;

    pub(in super::super) fn random(state: &Cell<u64>) -> u64 {
        let mut x = state.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        state.set(x);
        x >> 8
    }

    /// Changes a bit, or a whole word, of one read in `rarity`.
    pub(super) fn damage(state: &Cell<u64>, rarity: u64, bytes: &mut [u8]) {
        if bytes.is_empty() || !random(state).is_multiple_of(rarity) {
            return;
        }
        let at = random(state) as usize % bytes.len();
        match random(state) % 4 {
            0 => bytes[at] ^= 1 << (random(state) % 8),
            1 => bytes[at] = random(state) as u8,
            2 => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = 0xff),
            _ => bytes[at..].iter_mut().take(8).for_each(|byte| *byte = random(state) as u8),
        }
    }

    impl Process {
        /// Returns this process, as if its memory were damaged.
        pub(in super::super) fn damaged(&mut self, seed: u64, rarity: u64) {
            let pid = std::process::id() as i32;
            self.source = Source::Damaged { pid, random: Cell::new(seed | 1), rarity };
        }
    }

    /// Returns a core file of one thread with a page of memory, and a mapped file.
    fn core_file() -> Vec<u8> {
        let mut notes = Vec::new();
        let mut note = |kind: u32, contents: &[u8]| {
            for word in [5, contents.len() as u32, kind] {
                notes.extend(word.to_le_bytes());
            }
            notes.extend(b"CORE\0\0\0\0");
            notes.extend(contents);
            notes.resize(notes.len().next_multiple_of(4), 0);
        };
        note(1, &[7; 336]);
        let mut files = Vec::new();
        for word in [1u64, 4096, 0x1000, 0x3000, 0] {
            files.extend(word.to_le_bytes());
        }
        files.extend(b"/proc/self/exe\0");
        note(0x4649_4c45, &files);
        let mut out = vec![0; 64];
        out[..6].copy_from_slice(b"\x7fELF\x02\x01");
        out[16..20].copy_from_slice(&[4, 0, 62, 0]);
        out[32..40].copy_from_slice(&64u64.to_le_bytes());
        out[56] = 2;
        let first = 64 + 2 * 56;
        let mut segment = |kind: u32, offset: usize, address: u64, bytes: usize| {
            let start = out.len();
            out.resize(start + 56, 0);
            out[start..start + 4].copy_from_slice(&kind.to_le_bytes());
            out[start + 8..start + 16].copy_from_slice(&(offset as u64).to_le_bytes());
            out[start + 16..start + 24].copy_from_slice(&address.to_le_bytes());
            out[start + 32..start + 40].copy_from_slice(&(bytes as u64).to_le_bytes());
        };
        segment(libc::PT_NOTE, first, 0, notes.len());
        segment(libc::PT_LOAD, first + notes.len(), 0x10_0000, 4096);
        out.extend(notes);
        out.extend([0x5a; 4096]);
        out
    }

    /// Opens `bytes` as a core file.
    fn open_core(bytes: &[u8]) -> io::Result<Process> {
        use std::os::fd::{AsRawFd, FromRawFd};
        // SAFETY: a new descriptor that nothing else owns.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"core".as_ptr(), 0)) };
        file.write_all_at(bytes, 0)?;
        Process::core(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())))
    }

    #[test]
    fn a_damaged_core_file_is_read_or_refused() {
        let whole = core_file();
        let core = open_core(&whole).unwrap();
        assert_eq!(core.u64(0x10_0ff8).unwrap(), 0x5a5a_5a5a_5a5a_5a5a);
        assert_eq!(&core.u32(0x1000).unwrap().to_le_bytes(), b"\x7fELF");
        assert!(core.u64(0x10_0ffc).is_err() && core.u64(0x3000).is_err());
        assert!(core.thread(0x0707_0707).is_some() && core.thread(1).is_none());
        for len in 0..whole.len() - 4096 {
            assert!(open_core(&whole[..len]).is_err(), "{len}");
        }
        let state = Cell::new(0x9e37_79b9_7f4a_7c15);
        let headers = whole.len() - 4096;
        let mut opened = 0;
        for _ in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random(&state) % 4 {
                damage(&state, 1, &mut bytes[..headers]);
            }
            let Ok(core) = open_core(&bytes) else { continue };
            opened += 1;
            for address in [0, 0x1000, 0x2ffc, 0x10_0000, 0x10_0ffc, u64::MAX - 7, u64::MAX] {
                let _ = core.u64(address);
            }
            let _ = core.text(0x10_0000, random(&state));
        }
        assert!(opened > 1000, "only {opened} were read");
    }

    #[test]
    fn the_part_that_contains_an_address_is_found() {
        let segment = |address, file_bytes| {
            let (is_executable, file_offset) = (false, 0);
            Segment { address, is_executable, file_bytes, file_offset }
        };
        let parts = [segment(0x1000, 0x1000), segment(0x2000, 0), segment(0x5000, 1)];
        let found = |address| find(&parts, address).map(|(part, at)| (part.address, at));
        assert_eq!(found(0xfff), None);
        assert_eq!(found(0x1000), Some((0x1000, 0)));
        assert_eq!(found(0x1fff), Some((0x1000, 0xfff)));
        assert_eq!(found(0x2000), None);
        assert_eq!(found(0x5000), Some((0x5000, 0)));
        assert_eq!(found(u64::MAX), None);
        // The end is before the start.
        let mapping = mapping(0, "2000-1000 r-xp 00003000 fe:00 17  /usr/bin/a b").unwrap();
        assert_eq!((mapping.start, mapping.end, mapping.offset), (0x2000, 0x1000, 0x3000));
        assert!(mapping.is_executable && mapping.path.ends_with("usr/bin/a b"));
        assert!(find(&[mapping], 0x2000).is_none());
    }

    #[test]
    fn a_file_that_is_a_pipe_or_a_device_is_not_opened() {
        let path = std::env::temp_dir().join(format!("trefoil-pipe-{}", std::process::id()));
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(open_file(&path).is_err() && read_elf(&path, u64::MAX).is_err());
        assert!(Process::open(path.to_str().unwrap()).is_err());
        std::fs::remove_file(&path).unwrap();
        assert!(open_file(Path::new("/dev/zero")).is_err());
    }

    #[test]
    fn a_terminal_gets_no_control_characters() {
        let text = "a\u{1b}]0;x\u{7}\u{9b}b\tä\n";
        assert_eq!(printable(text), "a\\u{1b}]0;x\\u{7}\\u{9b}b\tä\n");
    }

    #[test]
    fn a_thread_in_a_system_call_has_its_number_and_registers() {
        let thread = live_thread(7, "232 0x4 0x7f 0x80 0x0 0x0 0x0 0x7ffc10 0x7f20");
        assert_eq!((thread.tid, thread.system_call), (7, Some(232)));
        let registers = thread.registers.unwrap();
        assert_eq!((registers.sp, registers.pc), (0x7ffc10, 0x7f20));
    }

    #[test]
    fn a_running_thread_has_no_registers() {
        let thread = live_thread(7, "running");
        assert!(thread.registers.is_none() && thread.system_call.is_none());
        let stopped = live_thread(7, "-1 0x7ffc10 0x7f20");
        assert!(stopped.registers.is_some() && stopped.system_call.is_none());
    }

    #[test]
    fn a_thread_of_an_aarch64_core_file_has_its_registers_and_system_call() {
        let mut status = vec![0; 112];
        status[32..36].copy_from_slice(&7u32.to_le_bytes());
        (0..34u64).for_each(|register| status.extend((100 + register).to_le_bytes()));
        let mut notes = Vec::new();
        for (kind, contents) in [(1u32, &status[..]), (0x404, &98u32.to_le_bytes())] {
            for word in [5, contents.len() as u32, kind] {
                notes.extend(word.to_le_bytes());
            }
            notes.extend(b"CORE\0\0\0\0");
            notes.extend(contents);
        }
        let (mut threads, mut mappings) = (Vec::new(), Vec::new());
        parse_notes(Cpu::Aarch64, &notes, &mut threads, &mut mappings);
        let [thread] = &threads[..] else { panic!("{} threads", threads.len()) };
        assert_eq!((thread.tid, thread.system_call), (7, Some(98)));
        let Registers { pc, sp, fp, lr, .. } = thread.registers.unwrap();
        assert_eq!([fp, lr, sp, pc], [129, 130, 131, 132]);
        assert_eq!(system_call_number(u32::MAX.into()), None);
    }

    #[test]
    fn notes_that_end_early_are_ignored() {
        let (mut threads, mut mappings) = (Vec::new(), Vec::new());
        let mut note = Vec::new();
        for word in [5u32, 4096, 1] {
            note.extend(word.to_le_bytes());
        }
        for cpu in [Cpu::X86_64, Cpu::Aarch64] {
            parse_notes(cpu, &note, &mut threads, &mut mappings);
            assert!(core_thread(cpu, &[7; 320]).is_none());
        }
        for count in [u64::MAX, u64::MAX / 24, 1] {
            parse_files(&count.to_le_bytes().repeat(2), &mut mappings);
        }
        assert!(threads.is_empty() && mappings.is_empty());
    }
}
