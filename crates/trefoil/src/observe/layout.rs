//! Tells a reader outside the process where to find runtimes, Ms, Ps, goroutines and tasks.
//!
//! [`trefoil_layout`] is a table of names and numbers in the program's data: offsets of fields,
//! numbers of states, addresses of lists. gdb (`goroutines.py`) and `trefoil ps` read it from
//! a live process or a core file, so both work on a process that hangs or is stopped. Each entry
//! comes from `offset_of!` or from the constant that the runtime itself uses, so none of them can
//! be out of date. A reader asks for entries by name: it works with a program of another version
//! as long as the names that it needs are there.
//!
//! ```text
//!   slabs ─▶ Slab { gs: [G; slab.count], next ─▶ Slab … }           all goroutines, dead ones too
//!   chunks ─▶ Chunk { next, block_bytes, …blocks }                   all tasks, free blocks too
//!   G { waits_for ─▶ lock { holder, … } }                           if the reason is one of `reason.*`
//!   ms ─▶ M { next ─▶ M …, tid, current ─▶ G, sched ─▶ Sched { ps } } all threads; 0 as tid: unused
//! ```
//!
//! A reader of a running process sees words that change meanwhile. Lists only grow at their head,
//! and the memory of Gs, Ms, tasks and stacks is never unmapped. So a walk ends, but what it reads
//! of one G may belong to two moments: the reader compares id, state and stack pointer before and
//! after.

use crate::sched::wait::holder;
use crate::sched::wait::reason::WaitReason;
use crate::sched::{self, g, labels, m, p, runnable, task};
use crate::{arch, mem};
use std::panic::Location;
use std::ptr::without_provenance;

/// Finds the table in a program without symbols.
const MAGIC: [u8; 16] = *b"trefoil\0layout\0\x01";
/// Raised when the meaning of an entry changes; a new entry needs no new version.
const VERSION: u32 = 1;
/// Bytes of a name.
const NAME_BYTES: usize = 32;

/// One row of the table.
#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    /// Padded with zeros.
    name: [u8; NAME_BYTES],
    /// A number, or the address of something. A pointer, because only the loader knows addresses.
    value: *const (),
}

/// The table. All fields are at fixed places: magic at 0, version at 16, count at 20, entries at
/// 24.
#[repr(C)]
pub(crate) struct Layout {
    magic: [u8; 16],
    version: u32,
    count: u32,
    entries: [Entry; ENTRIES],
}

// SAFETY: nothing in it is ever written, and the pointers are not dereferenced.
unsafe impl Sync for Layout {}

/// The offsets and numbers.
const NUMBERS: &[&[(&str, usize)]] = &[
    g::LAYOUT,
    runnable::LAYOUT,
    sched::goroutine::state::LAYOUT,
    task::LAYOUT,
    labels::LAYOUT,
    task::state::LAYOUT,
    task::block::LAYOUT,
    task::body::LAYOUT,
    m::LAYOUT,
    p::LAYOUT,
    sched::LAYOUT,
    holder::LAYOUT,
    mem::LAYOUT,
    arch::LAYOUT,
    &[
        ("reasons.count", WaitReason::TEXTS.len()),
        ("location.sample_line", SAMPLE.line() as usize),
        ("location.sample_column", SAMPLE.column() as usize),
    ],
];

/// How many entries are addresses.
const ADDRESSES: usize = 9;

const ENTRIES: usize = {
    let (mut count, mut i) = (ADDRESSES, 0);
    while i < NUMBERS.len() {
        count += NUMBERS[i].len();
        i += 1;
    }
    count
};

/// A place in the source. std does not say where a `Location` has its fields: a reader finds out by
/// comparing the bytes of this one with the entries that have its line and its column.
static SAMPLE_PLACE: &Location<'static> = SAMPLE;
const SAMPLE: &Location<'static> = Location::caller();

/// The texts of wait reasons.
static REASONS: &[&str] = WaitReason::TEXTS;

const fn entry(name: &str, value: *const ()) -> Entry {
    let bytes = name.as_bytes();
    assert!(bytes.len() < NAME_BYTES, "the name of an entry is too long");
    let mut padded = [0; NAME_BYTES];
    let mut i = 0;
    while i < bytes.len() {
        padded[i] = bytes[i];
        i += 1;
    }
    Entry { name: padded, value }
}

/// See the head of the file.
#[used]
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name that debuggers look for")]
pub(crate) static trefoil_layout: Layout = {
    let mut entries = [entry("", without_provenance(0)); ENTRIES];
    entries[0] = entry("slabs", (&raw const g::SLABS).cast());
    entries[1] = entry("chunks", (&raw const task::block::CHUNKS).cast());
    entries[2] = entry("ms", (&raw const m::MS).cast());
    entries[3] = entry("reasons", (&raw const REASONS).cast());
    entries[4] = entry("location.sample", (&raw const SAMPLE_PLACE).cast());
    entries[5] = entry("entry_stub", arch::entry_stub as *const ());
    entries[6] = entry("trampoline", arch::preempt::trampoline as *const ());
    let end = (&raw const arch::preempt::trefoil_trampoline_end).cast();
    entries[7] = entry("trampoline_end", end);
    entries[8] = entry("guards_move", (&raw const holder::GUARDS_MOVE).cast());
    let (mut at, mut group) = (ADDRESSES, 0);
    while group < NUMBERS.len() {
        let mut i = 0;
        while i < NUMBERS[group].len() {
            let (name, number) = NUMBERS[group][i];
            entries[at] = entry(name, without_provenance(number));
            at += 1;
            i += 1;
        }
        group += 1;
    }
    Layout { magic: MAGIC, version: VERSION, count: ENTRIES as u32, entries }
};

/// Makes the linker keep the table: the start of a runtime refers to it.
pub(crate) fn keep_in_program() {
    std::hint::black_box(&raw const trefoil_layout);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::g::G;
    use std::collections::HashMap;
    use std::sync::atomic::Ordering;

    /// Reads the table as a debugger does: from its bytes.
    fn entries() -> HashMap<String, usize> {
        let start = (&raw const trefoil_layout).cast::<u8>();
        // SAFETY: inside the table, which has `count` entries of 40 bytes from byte 24 on.
        unsafe {
            assert_eq!(std::slice::from_raw_parts(start, 16), b"trefoil\0layout\0\x01");
            assert_eq!(start.add(16).cast::<u32>().read(), VERSION);
            let count = start.add(20).cast::<u32>().read() as usize;
            assert_eq!(24 + 40 * count, size_of::<Layout>());
            let entry = |i: usize| {
                let at = start.add(24 + 40 * i);
                let name = std::ffi::CStr::from_ptr(at.cast()).to_str().unwrap().to_owned();
                (name, at.add(32).cast::<usize>().read())
            };
            (0..count).map(entry).collect()
        }
    }

    /// Reads a word of type `T` at an address.
    ///
    /// # Safety
    /// The address is that of a `T`.
    unsafe fn at<T>(address: usize) -> T {
        // SAFETY: the caller's contract.
        unsafe { std::ptr::with_exposed_provenance::<T>(address).read_volatile() }
    }

    #[test]
    fn every_name_is_there_once() {
        let entries = entries();
        assert_eq!(entries.len(), ENTRIES);
        assert!(entries.keys().all(|name| !name.is_empty()));
    }

    #[test]
    fn the_table_leads_to_the_running_goroutine_and_its_place() {
        let entries = entries();
        let entry = move |name: &str| entries[name];
        let spawned = crate::goroutine::Builder::new().name("shown").go(move || {
            let g: &'static G = crate::sched::current_g().unwrap();
            let address = std::ptr::from_ref(g).expose_provenance();
            // SAFETY: the fields of a G, an M, a slab and a `Location`, at the offsets that the
            // table names. None of them is ever freed.
            unsafe {
                let mut slab: usize = at(entry("slabs"));
                let mut found = false;
                while slab != 0 {
                    for i in 0..entry("slab.count") {
                        found |= slab + entry("slab.gs") + i * entry("g.size") == address;
                    }
                    slab = at(slab + entry("slab.next"));
                }
                assert!(found);
                assert_eq!(at::<u64>(address + entry("g.id")), g.id());
                assert_eq!(at::<u32>(address + entry("g.state")), entry("state.running") as u32);
                assert_eq!(at::<usize>(address + entry("g.tp")), arch::thread_pointer().addr());
                let name: usize = at(address + entry("g.name"));
                assert_eq!(at::<[u8; 5]>(name), *b"shown");
                assert_eq!(at::<usize>(address + entry("g.name") + 8), 5);
                let local = 0u8;
                let top: usize = at(address + entry("g.stack"));
                let low = at::<usize>(top + entry("stack_top.base")) + entry("stack.guard_bytes");
                let high = top - at::<u32>(top + entry("stack_top.sp_below")) as usize;
                assert!((low..high).contains(&(&raw const local).addr()));
                let mut m: usize = at(entry("ms"));
                let mut running = Vec::new();
                while m != 0 {
                    if at::<usize>(m + entry("m.current")) == address {
                        running.push(at::<u32>(m + entry("m.tid")));
                    }
                    m = at(m + entry("m.next"));
                }
                let here = crate::sys::syscalls::gettid();
                assert!(running.contains(&here), "{running:?} without {here}");
                let waits_for: usize = at(address + entry("g.waits_for"));
                assert_eq!(waits_for, g.waits_for.load(Ordering::Relaxed));
                let scope: usize = at(address + entry("g.scope"));
                assert_eq!(scope, g.scope_hint().addr());
                let place: usize = at(address + entry("g.created_at"));
                assert_eq!(place, std::ptr::from_ref(g.origin().1).addr());
                let reasons: usize = at(entry("reasons"));
                let sleep = WaitReason::Sleep as usize;
                assert_eq!(at::<&str>(reasons + 16 * sleep), WaitReason::Sleep.text());
                let sample: usize = at(entry("location.sample"));
                let words: [u32; 6] = at(sample);
                assert!(words.contains(&(entry("location.sample_line") as u32)));
                assert!(words.contains(&(entry("location.sample_column") as u32)));
            }
            g.status()
        });
        let status = spawned.unwrap().join().unwrap();
        assert_eq!(status, crate::sched::g::Status::Running);
        assert!(!m::MS.load(Ordering::Relaxed).is_null());
    }
}
