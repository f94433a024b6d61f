//! From addresses to what a reader wants to see: names and places, without the runtime at either end.
//!
//! An address may stand for several frames: functions that were inlined there. Each is resolved once and kept:
//! goroutines that wait in the same place are many, and a look into the debug information takes microseconds
//! (the first one, which reads it, may take seconds).

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;

/// The most frames of a stack that are shown.
pub(super) const FRAMES_MAX: usize = 64;

/// One call.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Frame {
    /// Demangled; an address if there is none.
    pub(super) name: String,
    /// Empty if unknown.
    pub(super) file: String,
    /// 0 if unknown.
    pub(super) line: u32,
}

impl Frame {
    /// Its name; and its place if the name has no path, as in a program with line tables only.
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

/// Whose code a frame is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    User,
    /// What a goroutine stands in while it waits or is dumped.
    Runtime,
    /// What lies between a closure and the bottom of its stack, besides.
    Bottom,
}

/// What is known of addresses so far.
#[derive(Default)]
pub(super) struct Symbols(HashMap<u64, Vec<(Whose, Arc<Frame>)>>);

impl Symbols {
    /// The frames at `addresses`, innermost first. Those of the runtime at both ends are left out.
    pub(super) fn frames(&mut self, addresses: &[u64]) -> Vec<Arc<Frame>> {
        let mut inner = true;
        let mut shown = Vec::new();
        for &address in addresses {
            for (whose, frame) in self.0.entry(address).or_insert_with(|| resolve(address)) {
                inner &= *whose == Whose::Runtime;
                if !inner && *whose == Whose::User && shown.len() < FRAMES_MAX {
                    shown.push(frame.clone());
                }
            }
        }
        shown
    }
}

fn resolve(address: u64) -> Vec<(Whose, Arc<Frame>)> {
    let mut frames = Vec::new();
    backtrace::resolve(address as *mut c_void, |symbol| {
        let name = symbol.name().map_or_else(|| format!("{address:#x}"), |n| format!("{n:#}"));
        let file = symbol.filename().map(|f| f.display().to_string()).unwrap_or_default();
        let whose = whose(&name, &file);
        frames.push((whose, Arc::new(Frame { name, file, line: symbol.lineno().unwrap_or(0) })));
    });
    if frames.is_empty() {
        let frame = Frame { name: format!("{address:#x}"), file: String::new(), line: 0 };
        frames.push((Whose::User, Arc::new(frame)));
    }
    frames
}

/// Where this crate's sources are, as the compiler knows them.
fn sources() -> &'static str {
    file!().strip_suffix("observe/symbols.rs").unwrap_or("trefoil/src/")
}

/// Without full debug information a name has no path, but the file does.
fn whose(name: &str, file: &str) -> Whose {
    let own = |part: &str| file.contains(&format!("{}{part}/", sources()));
    let is_runtime = own("sched")
        || own("arch")
        || own("observe")
        || file.contains("/backtrace-")
        || ["trefoil::sched::", "trefoil::arch::", "trefoil::observe::", "backtrace::"]
            .iter()
            .any(|part| name.starts_with(part));
    let is_bottom = || {
        file.contains("library/core/src/panic/")
            || ["std::panicking::", "std::panic::", "core::panic::", "__rust_try"]
                .iter()
                .any(|part| name.contains(part))
    };
    if is_runtime {
        Whose::Runtime
    } else if is_bottom() {
        Whose::Bottom
    } else {
        Whose::User
    }
}
