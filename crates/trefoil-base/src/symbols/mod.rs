//! From code addresses to callers, names and lines, by what ELF files say.
//!
//! - [`Elf`] reads the sections, segments and functions of a file.
//! - [`SymbolFile`] finds the functions and lines at an address of a file.
//! - [`UnwindTables`] finds the caller of a function, by registers and a stack.
//! - [`FrameKind`] tells the program's frames from those of the runtime.
//!
//! All of it works on the files and memory of any process: what is loaded where, and how a stack is
//! read, is the caller's to say. So the runtime uses it inside a process and the command `trefoil`
//! uses it from outside.
//!
//! No type of the interface is generic, so the readers of debug information are compiled here, and
//! only once.
//!
//! Rejected: the crates `addr2line` and `framehop`. Their readers are generic over the kind of
//! memory, so they are compiled again where they are used: with `gimli` below them they took 10 s of
//! CPU time more to build, and the runtime had to wait for them. Tests of `trefoil-long-tests` compare
//! `dwarf/` and `unwind/` with them.
//!
//! Rejected: the crate `backtrace`. It compiles a reader of the object files of all systems
//! (`object`) and its own version of `gimli`, which together took a fifth of the time to build a
//! program. It lists the loaded objects once, so libraries that are loaded later have no names, and
//! it reads a file again once four others were needed.

mod dwarf;
mod elf;
mod file;
mod frame;
#[cfg(test)]
mod testing;
mod unwind;

pub use elf::{Elf, Section, Segment, Symbol};
pub use file::{Call, SymbolFile, demangle};
pub use frame::{FRAMES_SHOWN_MAX, Frame, FrameKind, Resolved, frame_kind, is_own_source, shown};
pub use unwind::{
    Bytes, CodeAddress, Cpu, Module, NoCaller, Part, RegisterValue, Registers, UnwindTables,
};
