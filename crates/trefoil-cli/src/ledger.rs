//! The promises of a tour: how many there were, and which were not kept.

use std::fmt;

#[derive(Default)]
pub(crate) struct Ledger {
    scene: &'static str,
    scenes: usize,
    promises: usize,
    broken: Vec<String>,
}

impl Ledger {
    /// What follows belongs to this scene.
    pub(crate) fn open(&mut self, scene: &'static str) {
        self.scene = scene;
        self.scenes += 1;
    }

    pub(crate) fn kept(&mut self) {
        self.promises += 1;
    }

    /// A promise that was not kept, in words.
    pub(crate) fn broken(&mut self, what: impl fmt::Display) {
        self.promises += 1;
        self.broken.push(format!("{}: {what}", self.scene));
    }

    pub(crate) fn all_kept(&self) -> bool {
        self.broken.is_empty()
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |n, what| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
        write!(f, "{}, {}, ", count(self.scenes, "scene"), count(self.promises, "promise"))?;
        if self.all_kept() {
            return f.write_str("all kept");
        }
        write!(f, "{} NOT kept:", self.broken.len())?;
        self.broken.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_up() {
        let mut ledger = Ledger::default();
        ledger.open("first");
        ledger.kept();
        assert_eq!(ledger.to_string(), "1 scene, 1 promise, all kept");
        ledger.open("second");
        ledger.broken("late by 1 s");
        assert!(!ledger.all_kept());
        let text = "2 scenes, 2 promises, 1 NOT kept:\n  second: late by 1 s";
        assert_eq!(ledger.to_string(), text);
    }
}
