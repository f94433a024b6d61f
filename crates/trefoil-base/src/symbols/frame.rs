//! Frames of a stack, with names and lines, and which of them are shown.

use std::path::Path;
use std::sync::Arc;

/// Frames of a stack that are shown at most.
pub const FRAMES_SHOWN_MAX: usize = 64;

/// One call.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Frame {
    /// The demangled name, or the address if there is no name.
    pub name: String,
    /// Empty if unknown.
    pub file: String,
    /// 0 if unknown.
    pub line: u32,
}

impl Frame {
    /// Returns a frame of which only this is known.
    pub fn nameless(name: String) -> Frame {
        Frame { name, file: String::new(), line: 0 }
    }

    /// Returns the name. If it has no path, as in a program with line tables only, the file and
    /// line follow.
    pub fn title(&self) -> String {
        let has_path = self.name.starts_with('<')
            || self.name.split('<').next().is_some_and(|path| path.contains("::"));
        match Path::new(&self.file).file_name() {
            Some(file) if !has_path => {
                format!("{} ({}:{})", self.name, file.display(), self.line)
            }
            _ => self.name.clone(),
        }
    }

    /// Returns it with its kind.
    pub fn resolved(self) -> Resolved {
        (frame_kind(&self.name, &self.file), Arc::new(self))
    }

    /// Returns whether it is code of std or of trefoil: the program called it, and its caller says
    /// more.
    pub fn is_library(&self) -> bool {
        let name = self.name.trim_start_matches('<');
        let parts = ["trefoil::", "trefoil_base::", "std::", "core::", "alloc::"];
        parts.iter().any(|part| name.starts_with(part))
            || self.file.contains("/library/std/src/")
            || self.file.contains("/library/core/src/")
            || self.file.contains("/library/alloc/src/")
            || is_own_source(&self.file, "")
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

/// A frame, and which code it belongs to.
pub type Resolved = (FrameKind, Arc<Frame>);

/// Returns the frames of a stack that are shown, of all its frames, innermost first: those of the
/// runtime at both ends are left out.
pub fn shown<'a>(frames: impl Iterator<Item = &'a Resolved>) -> Vec<Arc<Frame>> {
    let is_inner = |(kind, _): &&Resolved| *kind == FrameKind::Runtime;
    let is_user = |(kind, _): &&Resolved| *kind == FrameKind::User;
    let outside = frames.skip_while(is_inner).filter(is_user);
    outside.take(FRAMES_SHOWN_MAX).map(|(_, frame)| frame.clone()).collect()
}

/// Returns whether a file is a source of the crates `trefoil` and `trefoil-base`, in a folder that
/// begins with `folder`. The path may be that of another build: only its end is compared.
pub fn is_own_source(file: &str, folder: &str) -> bool {
    file.match_indices("/src/").any(|(at, src)| {
        let package = file[..at].rsplit('/').next().unwrap_or_default();
        let is_version = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
        let is_own = ["trefoil", "trefoil-base"].iter().any(|name| {
            let rest = package.strip_prefix(name);
            rest.is_some_and(|rest| {
                rest.is_empty() || rest.strip_prefix('-').is_some_and(is_version)
            })
        });
        is_own && file[at + src.len()..].starts_with(folder)
    })
}

/// Decides by the name and the file. Without full debug information only the file has a path.
pub fn frame_kind(name: &str, file: &str) -> FrameKind {
    let name = name.trim_start_matches('<');
    let is_runtime = ["sched/", "arch/", "observe/"].iter().any(|part| is_own_source(file, part))
        || ["trefoil::sched::", "trefoil_base::arch::", "trefoil::observe::"]
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

#[cfg(test)]
mod tests {
    use super::*;
    use FrameKind::{Bottom, Runtime, User};

    #[test]
    fn frames_of_the_runtime_are_told_apart_from_those_of_the_program() {
        for (name, file, kind) in [
            ("trefoil::sched::switch::park", "", Runtime),
            ("<trefoil::sched::m::Rt>::leave", "", Runtime),
            ("park", "/a/trefoil/src/sched/switch.rs", Runtime),
            ("park", "/r/trefoil-0.1.0/src/sched/switch.rs", Runtime),
            ("park", "/r/trefoil-1.2.3/src/sched/switch.rs", Runtime),
            ("switch", "/r/trefoil-base-0.1.0/src/arch/x86_64/mod.rs", Runtime),
            ("switch", "/a/trefoil-base/src/arch/x86_64/mod.rs", Runtime),
            ("trefoil_base::arch::x86_64::switch", "", Runtime),
            ("trefoil_base::sys::futex::futex_wait", "", User),
            ("park", "/r/trefoil-cli/src/sched/switch.rs", User),
            ("park", "/home/me/scheduler/src/sched/switch.rs", User),
            ("trefoil::time::sleep", "/a/trefoil/src/time/mod.rs", User),
            ("std::panicking::catch_unwind", "", Bottom),
        ] {
            assert_eq!(frame_kind(name, file), kind, "{name} {file}");
        }
    }

    #[test]
    fn the_runtimes_frames_at_both_ends_are_not_shown() {
        let frames =
            [(Runtime, "park"), (Bottom, "panic"), (User, "a"), (Runtime, "sched"), (User, "b")];
        let frames = frames.map(|(kind, name)| (kind, Arc::new(Frame::nameless(name.into()))));
        let names: Vec<_> = shown(frames.iter()).iter().map(|frame| frame.name.clone()).collect();
        assert_eq!(names, ["a", "b"]);
        let long = vec![(User, Arc::new(Frame::nameless("deep".into()))); 2 * FRAMES_SHOWN_MAX];
        assert_eq!(shown(long.iter()).len(), FRAMES_SHOWN_MAX);
    }
}
