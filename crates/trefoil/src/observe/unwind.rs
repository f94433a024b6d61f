//! Finds the frames of a suspended goroutine by its saved registers and its stack, and those of a
//! sample that has copied both.
//!
//! The goroutine may be resumed at any moment, and then the words that are read from its stack are
//! meaningless. So they are copied first, twice. They are those of one moment if both copies are
//! equal, and the goroutine was suspended before and after, at the same place. It may have run
//! meanwhile and be suspended there again: no counter of a goroutine's switches tells, because each
//! switch would pay for it. But then the copies differ, unless its stack is what it was before.
//! Reads stay inside the stack. Return addresses come from the unwind tables of the loaded objects;
//! `symbols/` resolves them. The tables of libraries are copied, so that a `dlclose` meanwhile
//! does no harm.
//!
//! The caller's own stack is unwound by the unwinder that std uses for panics ([`own_stack`]).

use crate::arch::preempt::{in_trampoline, trampoline_caller};
use crate::arch::{Registers, SUSPENDED_BYTES};
use crate::sched::g::{G, Status};
use crate::sys::objects::{self, Version};
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use trefoil_base::symbols::{
    self as symbols, Bytes, CodeAddress, Cpu, Module, RegisterValue, UnwindTables,
};

/// Frames that are followed at most. More than are shown, because the runtime's own are included.
const FRAMES_MAX: usize = 256;

/// How much of a stack is copied at most. Frames above are not found.
const COPY_MAX: usize = 1 << 20;

/// The registers as the unwinder takes them.
fn for_unwinder(Registers { pc, sp, fp, lr, rbx }: Registers) -> symbols::Registers {
    symbols::Registers { pc, sp, fp, lr, rbx: RegisterValue::Known(rbx) }
}

/// Bytes of the frame of `arch::call_on` above its frame pointer.
const CALL_ON_BYTES: u64 = if cfg!(target_arch = "x86_64") { 16 } else { 32 };
/// How far below its frame pointer it saves rbx of x86_64.
const CALL_ON_RBX_BELOW: u64 = 8;

/// The unwind tables of all objects that were loaded at one moment.
pub(super) struct Tables {
    tables: UnwindTables,
    version: Version,
}

impl Tables {
    pub(super) fn load() -> Tables {
        let mut tables = UnwindTables::new(Cpu::OWN);
        let mut version = Version::NONE;
        objects::for_each(|info, headers| {
            version = Version::of(info);
            add_object(&mut tables, info, headers);
        });
        Tables { tables, version }
    }

    /// Returns whether no object was loaded or unloaded since.
    pub(super) fn are_current(&self) -> bool {
        self.version == Version::now()
    }

    /// Returns the code addresses of a stack, innermost first. `word` returns the word at an
    /// address of the stack. If the outer frames are on another stack, `caller` is where that one
    /// is.
    pub(super) fn unwind(
        &mut self,
        registers: Registers,
        caller: Range<u64>,
        word: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Vec<u64> {
        let mut registers = for_unwinder(registers);
        let mut at = CodeAddress::of_instruction(registers.pc);
        let mut frames = vec![at.to_look_up()];
        while frames.len() < FRAMES_MAX {
            let in_trampoline = in_trampoline(at.address() as usize);
            if in_trampoline && let Some(stopped) = trampoline_caller(registers.sp, &mut *word) {
                registers = for_unwinder(stopped);
                at = CodeAddress::of_instruction(registers.pc);
                frames.push(at.to_look_up());
                continue;
            }
            let next = match self.tables.caller(at, &mut registers, word) {
                Ok(next) => next,
                // The tables expect that the stack pointer grows, but `arch::call_on` may have
                // called down to another stack. Its frame is found by the frame pointer.
                Err(_) if caller.contains(&registers.fp) && !caller.contains(&registers.sp) => {
                    let frame = registers.fp;
                    let (Some(fp), Some(pc)) = (word(frame), word(frame + 8)) else { break };
                    let rbx = RegisterValue::SavedAt(frame.wrapping_sub(CALL_ON_RBX_BELOW));
                    let sp = frame + CALL_ON_BYTES;
                    registers = symbols::Registers { pc, sp, fp, lr: pc, rbx };
                    CodeAddress::of_return(pc)
                }
                Err(_) => break,
            };
            let Some(next) = next else { break };
            at = next;
            frames.push(at.to_look_up());
        }
        frames
    }

    /// Returns the return addresses of a suspended goroutine, innermost first. Returns `None` if it
    /// was not suspended all the time, or has no stack yet.
    pub(super) fn frames(&mut self, g: &'static G) -> Option<Vec<u64>> {
        let (id, status) = (g.id(), g.status());
        if !matches!(status, Status::Waiting(_) | Status::Runnable) {
            return None;
        }
        // A runnable goroutine may be new, and the saved stack pointer that of an earlier
        // goroutine.
        if !g.has_stack_hint() {
            return None;
        }
        let (low, high) = g.stack_bounds()?;
        let sp = g.sp_hint();
        if !sp.is_multiple_of(8) || sp < low || sp + SUSPENDED_BYTES > high {
            return None;
        }
        let used = g.stack_depth_hint().min(high - sp).min(COPY_MAX) / 8;
        let word_at = |i: usize| {
            // SAFETY: inside the stack's mapping, which is never unmapped. If the goroutine runs
            // meanwhile, the value may be meaningless, and the checks below discard it.
            unsafe { (sp as *const u64).add(i).read_volatile() }
        };
        let words: Vec<u64> = (0..used).map(word_at).collect();
        // Acquire: the first copy is read before the second one, and that before the status.
        fence(Ordering::Acquire);
        let are_equal = words.iter().enumerate().all(|(i, word)| word_at(i) == *word);
        fence(Ordering::Acquire);
        if !are_equal || g.status() != status || g.sp_hint() != sp || g.id() != id {
            return None;
        }
        let mut read = |address: u64| {
            let offset = address.checked_sub(sp as u64)?;
            if offset.is_multiple_of(8) { words.get(offset as usize / 8).copied() } else { None }
        };
        let registers = Registers::suspended(sp as u64, &mut read)?;
        Some(self.unwind(registers, 0..0, &mut read))
    }
}

/// Adds the tables of an object, if they have the usual form. The caller is called by the loader, so
/// the object stays loaded meanwhile.
///
/// Reads only segments that are loaded and readable: a tool may have left a header behind whose
/// section is gone, and code may be mapped without the right to read it.
fn add_object(tables: &mut UnwindTables, info: &libc::dl_phdr_info, headers: &[libc::Elf64_Phdr]) {
    let base = info.dlpi_addr;
    let in_memory = |h: &libc::Elf64_Phdr| h.p_vaddr..h.p_vaddr.saturating_add(h.p_memsz);
    let loads = || headers.iter().filter(|h| h.p_type == libc::PT_LOAD);
    // Tables are in the file. A segment may be longer in memory.
    let readable = |address: u64| {
        let mut parts = loads()
            .filter(|h| h.p_flags & libc::PF_R != 0)
            .map(|h| h.p_vaddr..h.p_vaddr.saturating_add(h.p_filesz.min(h.p_memsz)));
        parts.find(|part| part.contains(&address))
    };
    let Some(hdr) = headers.iter().find(|h| h.p_type == libc::PT_GNU_EH_FRAME) else { return };
    let Some(hdr_segment) = readable(hdr.p_vaddr) else { return };
    let hdr_range = in_memory(hdr);
    if hdr_range.end > hdr_segment.end {
        return;
    }
    let is_permanent = is_permanent(info);
    let bytes = |part: Range<u64>| {
        let start = base.wrapping_add(part.start) as *const u8;
        let len = (part.end - part.start) as usize;
        // SAFETY: inside a readable segment, which is mapped while the object is loaded.
        let bytes: &'static [u8] = unsafe { std::slice::from_raw_parts(start, len) };
        if is_permanent { Bytes::Static(bytes) } else { Bytes::Copied(bytes.to_vec()) }
    };
    let hdr_bytes = bytes(hdr_range.clone());
    // The usual form: version 1, and eh_frame as a 4-byte offset from the field itself.
    if hdr_bytes.len() < 8 || hdr_bytes[..2] != [1, 0x1b] {
        return;
    }
    let offset = i32::from_le_bytes([hdr_bytes[4], hdr_bytes[5], hdr_bytes[6], hdr_bytes[7]]);
    let eh_frame = (hdr_range.start + 4).wrapping_add_signed(offset.into());
    // Its length is not known at run time. It ends with its segment at the latest, and lookups go
    // through the table of the header.
    let Some(segment) = readable(eh_frame) else { return };
    let eh_range = eh_frame..segment.end;
    let Some(range) = loads().map(in_memory).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
    else {
        return;
    };
    tables.add(Module {
        range: base.wrapping_add(range.start)..base.wrapping_add(range.end),
        bias: base,
        eh_frame: Some((eh_range.clone(), bytes(eh_range))),
        eh_frame_hdr: Some((hdr_range, hdr_bytes)),
    });
}

/// Returns whether an object cannot be unloaded: the program, whose name is empty, and the vdso.
fn is_permanent(info: &libc::dl_phdr_info) -> bool {
    if info.dlpi_name.is_null() {
        return false;
    }
    // SAFETY: the loader's string, which lives as long as the object.
    let name = unsafe { CStr::from_ptr(info.dlpi_name) };
    name.is_empty() || name == c"linux-vdso.so.1"
}

/// A code address on the caller's own stack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OwnAddress {
    /// An address inside the instruction that has called the next inner frame.
    Call(u64),
    /// The instruction at which a signal has interrupted the frame.
    Interrupted(u64),
}

impl OwnAddress {
    /// Returns the address to look up.
    pub(super) fn address(self) -> u64 {
        match self {
            OwnAddress::Call(address) | OwnAddress::Interrupted(address) => address,
        }
    }
}

/// The unwinder's state at a frame.
#[repr(C)]
struct UnwindContext {
    _opaque: [u8; 0],
}

type UnwindVisitor = unsafe extern "C" fn(*mut UnwindContext, *mut c_void) -> c_int;

// The interface of the C++ ABI's unwinder, which std links: libgcc's or LLVM's.
unsafe extern "C" {
    fn _Unwind_Backtrace(visit: UnwindVisitor, argument: *mut c_void) -> c_int;
    fn _Unwind_GetIPInfo(context: *mut UnwindContext, is_before: *mut c_int) -> usize;
}

const URC_NO_REASON: c_int = 0;
const URC_END_OF_STACK: c_int = 5;

/// Stores the code addresses on the caller's own stack in `addresses`, innermost first, and returns
/// how many there are. The first is in this function. Does not allocate.
#[inline(never)]
pub(super) fn own_stack(addresses: &mut [OwnAddress]) -> usize {
    struct Collected<'a> {
        addresses: &'a mut [OwnAddress],
        len: usize,
    }
    unsafe extern "C" fn visit(context: *mut UnwindContext, argument: *mut c_void) -> c_int {
        // SAFETY: the argument is what is passed below, and the unwinder passes a valid context.
        let (collected, ip, is_before) = unsafe {
            let mut is_before = 0;
            let ip = _Unwind_GetIPInfo(context, &raw mut is_before);
            (&mut *argument.cast::<Collected<'_>>(), ip as u64, is_before != 0)
        };
        let place = collected.addresses.get_mut(collected.len);
        // The caller of a stack's first function is 0.
        let Some(place) = place.filter(|_| ip != 0) else { return URC_END_OF_STACK };
        // A return address is behind the call: the byte before it belongs to the call.
        *place = match is_before {
            true => OwnAddress::Interrupted(ip),
            false => OwnAddress::Call(ip.saturating_sub(1)),
        };
        collected.len += 1;
        URC_NO_REASON
    }
    let mut collected = Collected { addresses, len: 0 };
    // SAFETY: `visit` uses the argument, by its type, only during the call.
    unsafe { _Unwind_Backtrace(visit, (&raw mut collected).cast()) };
    collected.len
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chan::{self, Receiver};
    use crate::observe::symbols::Resolver;
    use crate::sched::current_g;
    use crate::sys::rng::Rng;
    use crate::sys::syscalls;
    use std::collections::HashMap;
    use std::hint::black_box;
    use std::ptr::null_mut;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    const PAGE: u64 = 1 << 16;
    /// Where the made object has its tables, before relocation.
    const HDR: u64 = 0x100;
    const HDR_BYTES: u64 = 20;
    const EH_FRAME: u64 = 0x200;
    /// Its function, in its second segment, which is not mapped readable.
    const CODE: u64 = PAGE;

    /// An object: a page with tables, and a page that cannot be read.
    struct Made {
        base: u64,
        headers: Vec<libc::Elf64_Phdr>,
    }

    fn header(kind: u32, flags: u32, range: Range<u64>) -> libc::Elf64_Phdr {
        let size = range.end - range.start;
        libc::Elf64_Phdr {
            p_type: kind,
            p_flags: flags,
            p_offset: 0,
            p_vaddr: range.start,
            p_paddr: 0,
            p_filesz: size,
            p_memsz: size,
            p_align: 1,
        }
    }

    impl Made {
        fn new() -> Made {
            let (bytes, protection) = (2 * PAGE as usize, libc::PROT_NONE);
            // SAFETY: a new mapping, anywhere.
            let memory = unsafe { syscalls::mmap_anonymous(null_mut(), bytes, protection, 0) };
            let memory = memory.unwrap();
            // SAFETY: the first page of the mapping.
            let writable = unsafe {
                libc::mprotect(memory, PAGE as usize, libc::PROT_READ | libc::PROT_WRITE)
            };
            assert_eq!(writable, 0);
            let headers = vec![
                header(libc::PT_LOAD, libc::PF_R, 0..PAGE),
                header(libc::PT_LOAD, libc::PF_X, PAGE..2 * PAGE),
                header(libc::PT_GNU_EH_FRAME, libc::PF_R, HDR..HDR + HDR_BYTES),
            ];
            let made = Made { base: memory as u64, headers };
            let words = [
                EH_FRAME.wrapping_sub(HDR + 4) as u32,
                1,
                CODE.wrapping_sub(HDR) as u32,
                (EH_FRAME + 24).wrapping_sub(HDR) as u32,
            ];
            made.write(HDR, &[1, 0x1b, 0x03, 0x3b]);
            made.write(HDR + 4, &words.map(u32::to_le_bytes).concat());
            // The return address is 16 bytes above the stack pointer of x86_64, or that of aarch64.
            let cfa: &[u8] = match Cpu::OWN {
                Cpu::X86_64 => b"\x78\x10\x01\x1b\x0c\x07\x18\x90\x01\0",
                Cpu::Aarch64 => b"\x78\x1e\x01\x1b\x0c\x1f\x18\x9e\x01\0",
            };
            made.write(EH_FRAME, &[&[20, 0, 0, 0, 0, 0, 0, 0], &b"\x01zR\0\x01"[..], cfa].concat());
            let pc_relative = CODE.wrapping_sub(EH_FRAME + 32) as u32;
            made.write(
                EH_FRAME + 24,
                &[16, 28, pc_relative, 0x100, 0].map(u32::to_le_bytes).concat(),
            );
            made
        }

        fn write(&self, at: u64, bytes: &[u8]) {
            let to = std::ptr::with_exposed_provenance_mut((self.base + at) as usize);
            assert!(at + bytes.len() as u64 <= PAGE);
            // SAFETY: inside the first page.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        }

        /// Returns the stack pointer of the caller of its function, as far as it is above.
        fn frame_bytes(&self, name: &CStr) -> Option<u64> {
            let info = libc::dl_phdr_info {
                dlpi_addr: self.base,
                dlpi_name: name.as_ptr(),
                dlpi_phdr: self.headers.as_ptr(),
                dlpi_phnum: self.headers.len() as u16,
                dlpi_adds: 0,
                dlpi_subs: 0,
                dlpi_tls_modid: 0,
                dlpi_tls_data: null_mut(),
            };
            let mut tables = UnwindTables::new(Cpu::OWN);
            add_object(&mut tables, &info, &self.headers);
            let at = CodeAddress::of_return(self.base + CODE + 8).unwrap();
            let (sp, rbx) = (0x1000, RegisterValue::Unknown);
            let mut registers = symbols::Registers { pc: at.address(), sp, fp: 0, lr: 0, rbx };
            tables.caller(at, &mut registers, &mut |_| Some(0x1234)).ok()??;
            Some(registers.sp - 0x1000)
        }
    }

    impl Drop for Made {
        fn drop(&mut self) {
            let memory = std::ptr::with_exposed_provenance_mut(self.base as usize);
            // SAFETY: the mapping of `new`.
            unsafe { syscalls::munmap(memory, 2 * PAGE as usize) }.unwrap();
        }
    }

    #[test]
    fn tables_are_read_only_in_readable_segments() {
        for name in [c"", c"/a/library"] {
            let frame = |change: &dyn Fn(&mut Made)| {
                let mut made = Made::new();
                change(&mut made);
                made.frame_bytes(name)
            };
            assert_eq!(frame(&|_| {}), Some(24), "whole");
            assert_eq!(frame(&|made| made.headers[0].p_flags = libc::PF_X), None, "no PF_R");
            assert_eq!(frame(&|made| made.headers[0].p_filesz = 0), None, "not in the file");
            // What the header of the tables says of itself.
            for at in [PAGE, PAGE - 8, 2 * PAGE, 1 << 40, u64::MAX, u64::MAX - 8] {
                assert_eq!(frame(&|made| made.headers[2].p_vaddr = at), None, "{at:#x}");
            }
            for size in [0, 7, PAGE, u64::MAX] {
                assert_eq!(frame(&|made| made.headers[2].p_memsz = size), None, "{size:#x}");
            }
            // Where it says that `.eh_frame` is.
            for to in [PAGE, 2 * PAGE - 1, 2 * PAGE, 1 << 30, 0u64.wrapping_sub(PAGE)] {
                let offset = to.wrapping_sub(HDR + 4) as u32;
                let found = frame(&|made| made.write(HDR + 4, &offset.to_le_bytes()));
                assert_eq!(found, None, "{to:#x}");
            }
            // Where its table says that the entry is, and where the entry says that its CIE is.
            for to in [0, EH_FRAME - 4, PAGE - 2, PAGE, 2 * PAGE, 0x7fff_ffff] {
                let offset = to.wrapping_sub(HDR) as u32;
                let found = frame(&|made| made.write(HDR + 16, &offset.to_le_bytes()));
                assert_eq!(found, None, "{to:#x}");
            }
            for distance in [1, 0x7fff_ffff, u32::MAX] {
                let distance = distance.to_le_bytes();
                assert_eq!(frame(&|made| made.write(EH_FRAME + 28, &distance)), None);
            }
        }
    }

    #[test]
    fn an_object_without_segments_has_no_tables() {
        let mut made = Made::new();
        made.headers.retain(|header| header.p_type != libc::PT_LOAD);
        assert_eq!(made.frame_bytes(c""), None);
        made.headers.clear();
        assert_eq!(made.frame_bytes(c""), None);
    }

    /// The collector's thread unwinds copies of stacks, which may be damaged.
    #[test]
    fn a_damaged_stack_has_a_limited_number_of_frames() {
        const STACK: Range<u64> = 0x1000..0x1000 + 8 * 8192;
        // Behind the first instructions, so that this function has a frame.
        let code = a_damaged_stack_has_a_limited_number_of_frames as *const () as u64 + 128;
        let mut rng = Rng::from_seed(1);
        let mut tables = Tables::load();
        let mut most = 0;
        for _ in 0..2_000 {
            let mut reads = 0;
            let mut word = |address: u64| {
                reads += 1;
                let is_inside = STACK.contains(&address) && address.is_multiple_of(8);
                // Addresses of code, and of words above this one.
                let value = match rng.next() % 3 {
                    0 => code + rng.next() % (1 << 16),
                    1 => address + 8 * (rng.next() % 8),
                    _ => code,
                };
                is_inside.then_some(value)
            };
            let (sp, fp) = (STACK.start, STACK.start + 16);
            let registers = Registers { pc: code, sp, fp, lr: code, rbx: 0 };
            let frames = tables.unwind(registers, STACK, &mut word);
            assert!(frames.len() <= FRAMES_MAX);
            assert!(reads <= 64 * FRAMES_MAX, "{reads} reads for {} frames", frames.len());
            most = most.max(frames.len());
        }
        assert!(most > 2, "at most {most} frames: the test damages nothing");
    }

    /// What the functions below return, at least, if the channel is closed.
    const CLOSED: u32 = 1 << 20;

    // The results differ: otherwise the compiler makes one function of both.
    #[inline(never)]
    fn inner_a(rx: &Receiver<()>) -> u32 {
        black_box(rx.recv().map_or(CLOSED, |()| 1)) + 1
    }

    #[inline(never)]
    fn inner_b(rx: &Receiver<()>) -> u32 {
        black_box(rx.recv().map_or(CLOSED, |()| 1)) + 2
    }

    #[inline(never)]
    fn deep(depth: u32, inner: fn(&Receiver<()>) -> u32, rx: &Receiver<()>) -> u32 {
        if depth == 0 { inner(rx) } else { black_box(deep(depth - 1, inner, rx)) + 1 }
    }

    #[inline(never)]
    fn outer_a(rx: &Receiver<()>) -> u32 {
        black_box(deep(60, inner_a, rx)) + 1
    }

    #[inline(never)]
    fn outer_b(rx: &Receiver<()>) -> u32 {
        black_box(deep(60, inner_b, rx)) + 2
    }

    #[test]
    fn frames_are_those_of_one_wait() {
        const TIME: Duration = Duration::from_secs(1);
        let runtime = crate::Runtime::builder().procs(1).build().unwrap();
        let (tx, rx) = chan::bounded(0);
        let (tell, told) = std::sync::mpsc::channel();
        // After every third wait, the stack below is another one, at the same depth.
        let waits = runtime.go(move || {
            tell.send(current_g().unwrap()).unwrap();
            for outer in [outer_a, outer_a, outer_a, outer_b, outer_b, outer_b].into_iter().cycle()
            {
                if outer(&rx) >= CLOSED {
                    break;
                }
            }
        });
        let is_over = Arc::new(AtomicBool::new(false));
        let is_over_too = is_over.clone();
        let wakes = runtime.go(move || {
            while !is_over_too.load(Ordering::Relaxed) {
                tx.send(()).unwrap();
            }
        });
        let g = told.recv().unwrap();
        let (begin, mut tables) = (Instant::now(), Tables::load());
        let mut of_address = HashMap::new();
        let (mut found, mut mixed) = (0, 0);
        while begin.elapsed() < TIME || found == 0 {
            let Some(frames) = tables.frames(g) else { continue };
            let mut seen = [false; 4];
            for address in frames {
                let functions = of_address.entry(address).or_insert_with(|| {
                    let mut functions = [false; 4];
                    Resolver::lock().calls(address, &mut |call| {
                        let name = symbols::demangle(call.name.unwrap_or_default());
                        for (i, part) in
                            ["inner_a", "outer_b", "inner_b", "outer_a"].iter().enumerate()
                        {
                            functions[i] |= name.contains(part);
                        }
                    });
                    functions
                });
                (0..4).for_each(|i| seen[i] |= functions[i]);
            }
            found += u32::from(seen != [false; 4]);
            mixed += u32::from(seen[0] && seen[1] || seen[2] && seen[3]);
        }
        is_over.store(true, Ordering::Relaxed);
        wakes.unwrap().join().unwrap();
        waits.unwrap().join().unwrap();
        assert_eq!(mixed, 0, "of {found}");
    }
}
