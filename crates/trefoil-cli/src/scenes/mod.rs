//! The scenes: one file each, and a row in the table.

mod million;

use crate::stage::Stage;

/// Something that the runtime does, played in a few seconds.
pub(crate) struct Scene {
    /// What the user types.
    pub(crate) name: &'static str,
    /// What is shown, in one line.
    pub(crate) line: &'static str,
    /// Runs on a plain thread. An error says which promise did not hold.
    pub(crate) play: fn(&Stage) -> Result<(), String>,
}

/// All scenes, in the order of the tour.
pub(crate) const SCENES: &[Scene] = &[Scene {
    name: "million",
    line: "a million goroutines: started, alive at once, shared out by stealing",
    play: million::play,
}];
