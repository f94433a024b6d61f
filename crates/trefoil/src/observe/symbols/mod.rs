//! Resolves code addresses to names and source lines, without the frames of the runtime.
//!
//! An address may stand for several frames, because functions were inlined there. Each address is
//! resolved once and cached: many goroutines wait at the same place, and a lookup in the debug
//! information takes microseconds (the first lookup reads it, which may take seconds).
//!
//! `loaded.rs` finds the file of an address. `trefoil_base::symbols` reads it.

mod loaded;
#[cfg(test)]
mod tests;

pub(super) use loaded::{Resolver, own_file};

use crate::sys::map::Map;
use std::sync::Arc;
use trefoil_base::symbols::{FRAMES_SHOWN_MAX, Frame, FrameKind, Resolved, demangle, shown};

/// A cache of resolved addresses.
#[derive(Default)]
pub(super) struct SymbolCache(Map<u64, Vec<Resolved>>);

impl SymbolCache {
    /// Returns the frames at `addresses`, innermost first, without those of the runtime at both
    /// ends.
    pub(super) fn frames(&mut self, addresses: &[u64]) -> Vec<Arc<Frame>> {
        shown(self.resolve_all(addresses).into_iter())
    }

    /// Returns the frames of code that runs, innermost first: without those that start a goroutine,
    /// but with those of the runtime that it has called.
    pub(super) fn frames_of_running(&mut self, addresses: &[u64]) -> Vec<Arc<Frame>> {
        let mut all = self.resolve_all(addresses);
        // If the program's code is not involved, everything is shown.
        let is_user = |(kind, _): &&Resolved| *kind == FrameKind::User;
        if let Some(outermost) = all.iter().rposition(is_user) {
            all.truncate(outermost + 1);
            all.retain(|(kind, _)| *kind != FrameKind::Bottom);
        }
        all.truncate(FRAMES_SHOWN_MAX);
        all.iter().map(|(_, frame)| frame.clone()).collect()
    }

    /// Returns the innermost frame that belongs to the program: not to the runtime, to std or, if
    /// there is any other, to a crate from a registry. Those outside of it are not resolved.
    pub(super) fn frame_of_program(&mut self, addresses: &[u64]) -> Option<Arc<Frame>> {
        let mut first = None;
        for address in addresses {
            for (kind, frame) in self.resolve_all(&[*address]) {
                let is_unknown = frame.file.is_empty() && frame.name.starts_with("0x");
                if *kind != FrameKind::User || frame.is_library() || is_unknown {
                    continue;
                }
                if !frame.file.contains("/registry/src/") {
                    return Some(frame.clone());
                }
                first.get_or_insert_with(|| frame.clone());
            }
        }
        first
    }

    /// Returns the frames of all `addresses`, in their order.
    fn resolve_all(&mut self, addresses: &[u64]) -> Vec<&Resolved> {
        for &address in addresses {
            self.0.get_or_insert_with(address, || resolve(address));
        }
        let mut all = Vec::new();
        for address in addresses {
            all.extend(&self.0[address]);
        }
        all
    }
}

fn resolve(address: u64) -> Vec<Resolved> {
    let mut frames = Vec::new();
    Resolver::lock().calls(address, &mut |call| {
        let name = call.name.map_or_else(|| format!("{address:#x}"), demangle);
        frames.push(Frame { name, file: call.file.to_owned(), line: call.line }.resolved());
    });
    if frames.is_empty() {
        frames.push(Frame::nameless(format!("{address:#x}")).resolved());
    }
    frames
}
