//! Finds the frames of a suspended goroutine by its saved registers and its stack.
//!
//! The goroutine may be resumed at any moment, and then the words that are read from its stack are
//! meaningless. That does no harm: reads stay inside the stack and their number is limited.
//! Afterwards the frames are discarded unless the goroutine was suspended all the time and its G
//! was not reused. Return addresses come from the unwind tables of the loaded objects (framehop);
//! `symbols.rs` resolves them.

use crate::arch::preempt::in_trampoline;
use crate::sched::g::{G, Status};
use crate::sys::objects;
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, FrameAddress, Module, Unwinder};

/// Frames that are followed at most. More than are shown, because the runtime's own are included.
const FRAMES_MAX: usize = 256;

/// Where `arch::switch` saves registers on a suspended stack, in words from the saved stack
/// pointer.
const SAVED_RBP: usize = 6;
const SAVED_RIP: usize = 7;
/// The size of that area. The stack pointer of the suspended code is above it.
const SAVED_BYTES: usize = 64;

/// The unwind tables of all objects that are loaded now.
pub(super) struct Tables {
    unwinder: UnwinderX86_64<&'static [u8]>,
    cache: CacheX86_64,
}

impl Tables {
    pub(super) fn load() -> Tables {
        let mut unwinder = UnwinderX86_64::new();
        objects::for_each(|info, headers| add_object(&mut unwinder, info.dlpi_addr, headers));
        Tables { unwinder, cache: CacheX86_64::new() }
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
        if !sp.is_multiple_of(8) || sp < low || sp + SAVED_BYTES > high {
            return None;
        }
        let (start, end) = (sp as u64, high as u64);
        let mut read = |address: u64| {
            let inside = (start..=end - 8).contains(&address) && address.is_multiple_of(8);
            // SAFETY: inside the stack's mapping, which is never unmapped. If the goroutine runs
            // meanwhile, the value may be torn, and the check below discards the frames.
            if inside { Ok(unsafe { (address as *const u64).read_volatile() }) } else { Err(()) }
        };
        let saved = |word: usize| read(start + 8 * word as u64).ok();
        let (rip, rbp) = (saved(SAVED_RIP)?, saved(SAVED_RBP)?);
        let mut regs = UnwindRegsX86_64::new(rip, start + SAVED_BYTES as u64, rbp);
        let mut frames = Vec::new();
        let mut address = FrameAddress::from_return_address(rip)?;
        while frames.len() < FRAMES_MAX {
            frames.push(address.address_for_lookup());
            let caller = self.unwinder.unwind_frame(address, &mut regs, &mut self.cache, &mut read);
            let Ok(Some(caller)) = caller else { break };
            // A goroutine that was stopped by a signal continues at this instruction, which may be
            // the first of a function. Any other address is that of the instruction after a call.
            let caller = if in_trampoline(address.address() as usize) {
                Some(FrameAddress::from_instruction_pointer(caller))
            } else {
                FrameAddress::from_return_address(caller)
            };
            let Some(caller) = caller else { break };
            address = caller;
        }
        // Acquire: the stack is read before the status is read again.
        std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
        (g.status() == status && g.sp_hint() == sp && g.id() == id).then_some(frames)
    }
}

/// Adds the tables of an object, loaded at `base`, to the unwinder, if they have the usual form.
/// An `svma` (stated virtual memory address) is framehop's name for an address relative to `base`.
fn add_object(
    unwinder: &mut UnwinderX86_64<&'static [u8]>,
    base: u64,
    headers: &[libc::Elf64_Phdr],
) {
    let range = |h: &libc::Elf64_Phdr| h.p_vaddr..h.p_vaddr + h.p_memsz;
    let loads = || headers.iter().filter(|h| h.p_type == libc::PT_LOAD);
    let Some(hdr) = headers.iter().find(|h| h.p_type == libc::PT_GNU_EH_FRAME) else { return };
    let Some(text) = loads().find(|h| h.p_flags & libc::PF_X != 0) else { return };
    let (Some(first), Some(last)) = (loads().next(), loads().next_back()) else { return };
    // SAFETY: mapped while the object is loaded. A `dlclose` during a dump is not supported.
    let bytes = |svma: std::ops::Range<u64>| unsafe {
        std::slice::from_raw_parts(
            (base + svma.start) as *const u8,
            (svma.end - svma.start) as usize,
        )
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
    unwinder.add_module(Module::new(
        String::new(),
        base + range(first).start..base + range(last).end,
        base,
        ExplicitModuleSectionInfo {
            base_svma: 0,
            text_svma: Some(range(text)),
            text: Some(bytes(range(text))),
            eh_frame_svma: Some(eh_range.clone()),
            eh_frame: Some(bytes(eh_range)),
            eh_frame_hdr_svma: Some(hdr_range),
            eh_frame_hdr: Some(hdr_bytes),
            ..Default::default()
        },
    ));
}
