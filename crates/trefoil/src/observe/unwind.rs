//! Finds the frames of a suspended goroutine by its saved registers and its stack, and those of a
//! sample that has copied both.
//!
//! The goroutine may be resumed at any moment, and then the words that are read from its stack are
//! meaningless. That does no harm: reads stay inside the stack and their number is limited.
//! Afterwards the frames are discarded unless the goroutine was suspended all the time and its G
//! was not reused. Return addresses come from the unwind tables of the loaded objects;
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
use trefoil_symbols::{self as symbols, Bytes, CodeAddress, Cpu, Module, UnwindTables};

/// Frames that are followed at most. More than are shown, because the runtime's own are included.
const FRAMES_MAX: usize = 256;

/// The registers as the unwinder takes them.
fn for_unwinder(Registers { pc, sp, fp, lr }: Registers) -> symbols::Registers {
    symbols::Registers { pc, sp, fp, lr }
}

/// Bytes of the frame of `arch::call_on` above its frame pointer.
const CALL_ON_BYTES: u64 = if cfg!(target_arch = "x86_64") { 16 } else { 32 };

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
            let is_preempted = in_trampoline(at.address() as usize);
            if is_preempted && let Some(stopped) = trampoline_caller(registers.sp, &mut *word) {
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
                    registers = symbols::Registers { pc, sp: frame + CALL_ON_BYTES, fp, lr: pc };
                    Some(pc)
                }
                Err(_) => break,
            };
            // A goroutine that was stopped by a signal continues at this instruction, which may be
            // the first of a function. Any other address is that of the instruction after a call.
            let next = match next {
                Some(pc) if is_preempted => Some(CodeAddress::of_instruction(pc)),
                Some(pc) => CodeAddress::of_return(pc),
                None => None,
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
        let (start, end) = (sp as u64, high as u64);
        let mut read = |address: u64| {
            let inside = (start..=end - 8).contains(&address) && address.is_multiple_of(8);
            // SAFETY: inside the stack's mapping, which is never unmapped. If the goroutine runs
            // meanwhile, the value may be torn, and the check below discards the frames.
            inside.then(|| unsafe { (address as *const u64).read_volatile() })
        };
        let registers = Registers::suspended(start, &mut read)?;
        let frames = self.unwind(registers, 0..0, &mut read);
        // Acquire: the stack is read before the status is read again.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        (g.status() == status && g.sp_hint() == sp && g.id() == id).then_some(frames)
    }
}

/// Adds the tables of an object, if they have the usual form. The caller is called by the loader, so
/// the object stays loaded meanwhile.
fn add_object(tables: &mut UnwindTables, info: &libc::dl_phdr_info, headers: &[libc::Elf64_Phdr]) {
    let base = info.dlpi_addr;
    let range = |h: &libc::Elf64_Phdr| h.p_vaddr..h.p_vaddr + h.p_memsz;
    let loads = || headers.iter().filter(|h| h.p_type == libc::PT_LOAD);
    let Some(hdr) = headers.iter().find(|h| h.p_type == libc::PT_GNU_EH_FRAME) else { return };
    let (Some(first), Some(last)) = (loads().next(), loads().next_back()) else { return };
    let is_permanent = is_permanent(info);
    let bytes = |part: Range<u64>| {
        // SAFETY: mapped while the object is loaded.
        let bytes: &'static [u8] = unsafe {
            std::slice::from_raw_parts(
                (base + part.start) as *const u8,
                (part.end - part.start) as usize,
            )
        };
        if is_permanent { Bytes::Static(bytes) } else { Bytes::Copied(bytes.to_vec()) }
    };
    let hdr_range = range(hdr);
    let hdr_bytes = bytes(hdr_range.clone());
    // The usual form: version 1, and eh_frame as a 4-byte offset from the field itself.
    if hdr_bytes.len() < 8 || hdr_bytes[..2] != [1, 0x1b] {
        return;
    }
    let offset = i32::from_le_bytes([hdr_bytes[4], hdr_bytes[5], hdr_bytes[6], hdr_bytes[7]]);
    let eh_frame = (hdr_range.start + 4).wrapping_add_signed(offset.into());
    // Its length is not known at run time. It ends with its segment at the latest, and lookups go
    // through the table of the header.
    let Some(segment) = loads().map(range).find(|r| r.contains(&eh_frame)) else { return };
    let eh_range = eh_frame..segment.end;
    tables.add(Module {
        range: base + range(first).start..base + range(last).end,
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
