//! Resolves code addresses to names and source lines, without the frames of the runtime.
//!
//! An address may stand for several frames, because functions were inlined there. Each address is
//! resolved once and cached: many goroutines wait at the same place, and a lookup in the debug
//! information takes microseconds (the first lookup reads it, which may take seconds).
//!
//! `elf.rs` reads ELF files, `file.rs` finds the names and lines in one, and `loaded.rs` finds the
//! file of an address.
//!
//! Rejected: the crate `backtrace`. It compiles a reader of the object files of all systems
//! (`object`) and a second version of `gimli` beside the one of framehop, which together took a
//! fifth of the time to build a program. It lists the loaded objects once, so libraries that are
//! loaded later have no names, and it reads a file again once four others were needed.

mod elf;
mod file;
mod loaded;
#[cfg(test)]
mod tests;

pub use elf::{Elf, Section, Segment, Symbol};
pub use file::{Call, SymbolFile, demangle};
pub(super) use loaded::Resolver;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Frames of a stack that are shown at most.
pub(super) const FRAMES_MAX: usize = 64;

/// One call.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Frame {
    /// The demangled name, or the address if there is no name.
    pub(super) name: String,
    /// Empty if unknown.
    pub(super) file: String,
    /// 0 if unknown.
    pub(super) line: u32,
}

impl Frame {
    /// Returns the name. If it has no path, as in a program with line tables only, the file and
    /// line follow.
    pub(super) fn title(&self) -> String {
        let has_path = self.name.starts_with('<')
            || self.name.split('<').next().is_some_and(|path| path.contains("::"));
        match Path::new(&self.file).file_name() {
            Some(file) if !has_path => {
                format!("{} ({}:{})", self.name, file.display(), self.line)
            }
            _ => self.name.clone(),
        }
    }
}

/// Which code a frame belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameKind {
    /// The program, or what it has called.
    User,
    /// Code in which a goroutine waits or is dumped, and code that starts it.
    Runtime,
    /// std's code between the runtime and the closure of the goroutine.
    Bottom,
}

/// A cache of resolved addresses.
#[derive(Default)]
pub(super) struct SymbolCache(HashMap<u64, Vec<(FrameKind, Arc<Frame>)>>);

impl SymbolCache {
    /// Returns the frames at `addresses`, innermost first, without those of the runtime at both
    /// ends.
    pub(super) fn frames(&mut self, addresses: &[u64]) -> Vec<Arc<Frame>> {
        let mut inner = true;
        let mut shown = Vec::new();
        for &address in addresses {
            for (kind, frame) in self.0.entry(address).or_insert_with(|| resolve(address)) {
                inner &= *kind == FrameKind::Runtime;
                if !inner && *kind == FrameKind::User && shown.len() < FRAMES_MAX {
                    shown.push(frame.clone());
                }
            }
        }
        shown
    }
}

impl SymbolCache {
    /// Returns the frames of code that runs, innermost first: without those that start a goroutine,
    /// but with those of the runtime that it has called.
    pub(super) fn frames_of_running(&mut self, addresses: &[u64]) -> Vec<Arc<Frame>> {
        let mut all = Vec::new();
        for &address in addresses {
            all.extend(self.0.entry(address).or_insert_with(|| resolve(address)).iter().cloned());
        }
        // If the program's code is not involved, everything is shown.
        let is_user = |(kind, _): &(FrameKind, Arc<Frame>)| *kind == FrameKind::User;
        if let Some(outermost) = all.iter().rposition(is_user) {
            all.truncate(outermost + 1);
            all.retain(|(kind, _)| *kind != FrameKind::Bottom);
        }
        all.truncate(FRAMES_MAX);
        all.into_iter().map(|(_, frame)| frame).collect()
    }
}

fn resolve(address: u64) -> Vec<(FrameKind, Arc<Frame>)> {
    let mut frames = Vec::new();
    Resolver::lock().calls(address, &mut |call| {
        let name = call.name.map_or_else(|| format!("{address:#x}"), demangle);
        let file = call.file.to_owned();
        let kind = frame_kind(&name, &file);
        frames.push((kind, Arc::new(Frame { name, file, line: call.line })));
    });
    if frames.is_empty() {
        let frame = Frame { name: format!("{address:#x}"), file: String::new(), line: 0 };
        frames.push((FrameKind::User, Arc::new(frame)));
    }
    frames
}

/// Returns whether a file is a source of this crate, in a folder that begins with `folder`. The
/// path may be that of another build: only its end is compared.
pub fn is_own_source(file: &str, folder: &str) -> bool {
    file.match_indices("/src/").any(|(at, src)| {
        let package = file[..at].rsplit('/').next().unwrap_or_default();
        let version = package.strip_prefix("trefoil-").unwrap_or_default();
        (package == "trefoil" || version.starts_with(|c: char| c.is_ascii_digit()))
            && file[at + src.len()..].starts_with(folder)
    })
}

/// Decides by the name and the file. Without full debug information only the file has a path.
pub fn frame_kind(name: &str, file: &str) -> FrameKind {
    let name = name.trim_start_matches('<');
    let is_runtime = ["sched/", "arch/", "observe/"].iter().any(|part| is_own_source(file, part))
        || ["trefoil::sched::", "trefoil::arch::", "trefoil::observe::"]
            .iter()
            .any(|part| name.starts_with(part));
    let is_bottom = || {
        file.contains("library/core/src/panic/")
            || ["std::panicking::", "std::panic::", "core::panic::", "__rust_try"]
                .iter()
                .any(|part| name.contains(part))
    };
    if is_runtime {
        FrameKind::Runtime
    } else if is_bottom() {
        FrameKind::Bottom
    } else {
        FrameKind::User
    }
}
