//! The results of a tour: how many promises there were, and which were broken.

use std::fmt;

#[derive(Default)]
pub(crate) struct Results {
    scene: &'static str,
    scenes: usize,
    promises: usize,
    broken: Vec<String>,
}

impl Results {
    /// Starts the results of a scene.
    pub(crate) fn begin_scene(&mut self, scene: &'static str) {
        self.scene = scene;
        self.scenes += 1;
    }

    pub(crate) fn kept(&mut self) {
        self.promises += 1;
    }

    /// Counts a broken promise, described by `what`.
    pub(crate) fn broken(&mut self, what: impl fmt::Display) {
        self.promises += 1;
        self.broken.push(format!("{}: {what}", self.scene));
    }

    pub(crate) fn all_kept(&self) -> bool {
        self.broken.is_empty()
    }
}

impl fmt::Display for Results {
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
    fn display_counts_and_lists_broken_promises() {
        let mut results = Results::default();
        results.begin_scene("first");
        results.kept();
        assert_eq!(results.to_string(), "1 scene, 1 promise, all kept");
        results.begin_scene("second");
        results.broken("late by 1 s");
        assert!(!results.all_kept());
        let text = "2 scenes, 2 promises, 1 NOT kept:\n  second: late by 1 s";
        assert_eq!(results.to_string(), text);
    }
}
