//! What a scene prints with: headings, facts, promises, bars.
//!
//! A fact is only shown; a promise is measured, and the tour fails if it was not kept. Both go to standard output. Progress bars are drawn on standard error by an OS thread of their
//! own which only reads a counter, so that watching does not disturb what is watched.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::curtain;
use crate::ledger::Ledger;

/// Time from one drawing of a progress bar to the next.
const REDRAW: Duration = Duration::from_millis(80);

/// Characters of a full bar.
const BAR_WIDTH: usize = 32;

/// How a scene is to be shown.
pub(crate) struct Stage {
    plain: bool,
    goroutines: u64,
    ledger: Mutex<Ledger>,
}

/// A line on standard output. Not `println!`, which panics when nobody reads any more.
pub(crate) fn say(line: impl Display) {
    if let Err(error) = writeln!(io::stdout(), "{line}") {
        curtain::unheard(&error);
    }
}

/// How far a part has come. The scene counts, the stage draws.
#[derive(Clone, Default)]
pub(crate) struct Progress(Arc<AtomicU64>);

impl Progress {
    pub(crate) fn add(&self, n: u64) {
        // Relaxed: a number to look at; nothing else is published with it.
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Stage {
    pub(crate) fn new(plain: bool, goroutines: u64) -> Stage {
        Stage { plain, goroutines, ledger: Mutex::default() }
    }

    /// How many goroutines the user asked for.
    pub(crate) fn goroutines(&self) -> u64 {
        self.goroutines
    }

    /// Opens a scene.
    pub(crate) fn title(&self, name: &'static str, line: &str) {
        self.ledger().open(name);
        say(format_args!("{}  {line}", self.style("1;32", name)));
    }

    /// Opens a part of a scene.
    pub(crate) fn part(&self, text: impl Display) {
        say(format_args!("\n{}", self.style("1", &text.to_string())));
    }

    /// One result: a label and its value.
    pub(crate) fn fact(&self, label: &str, value: impl Display) {
        say(format_args!("  {label:<24} {value}"));
    }

    /// One result beside what was promised, and whether the two agree.
    pub(crate) fn promise(
        &self,
        label: &str,
        measured: impl Display,
        promised: impl Display,
        ok: bool,
    ) {
        let mark = if ok { self.style("32", "✓") } else { self.style("1;31", "✗") };
        let measured = measured.to_string();
        say(format_args!("{mark} {label:<24} {measured:<28} promised: {promised}"));
        if ok {
            self.ledger().kept();
        } else {
            self.ledger().broken(format_args!("{label}: {measured}, promised: {promised}"));
        }
    }

    /// The scene could not be played to its end.
    pub(crate) fn failed(&self, why: impl Display) {
        say(format_args!("{} {why}", self.style("1;31", "✗")));
        self.ledger().broken(why);
    }

    /// Lines of others, indented.
    pub(crate) fn quote(&self, text: &str) {
        for line in text.trim_end().lines() {
            say(format_args!("    {line}"));
        }
    }

    /// Closes the tour; whether every promise was kept.
    pub(crate) fn sum_up(&self) -> bool {
        let ledger = self.ledger();
        let code = if ledger.all_kept() { "1;32" } else { "1;31" };
        say(format_args!("\n{}", self.style(code, &ledger.to_string())));
        ledger.all_kept()
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One row of a chart; `share` from 0 to 1.
    pub(crate) fn bar(&self, label: &str, share: f64, value: impl Display) {
        let full = (share.clamp(0.0, 1.0) * BAR_WIDTH as f64).round() as usize;
        let (on, off) = if self.plain { ("#", ".") } else { ("█", "░") };
        let bar = format!("{}{}", on.repeat(full), off.repeat(BAR_WIDTH - full));
        say(format_args!("  {label:<24} {} {value}", self.style("32", &bar)));
    }

    /// Does the work while a bar shows how far `progress` has come to `total`.
    pub(crate) fn watch<T>(&self, progress: &Progress, total: u64, work: impl FnOnce() -> T) -> T {
        if self.plain {
            return work();
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let drawer = scope.spawn(|| draw(progress, total, &done));
            // Also when the work panics: the scope waits for the drawer.
            let _end = OnDrop(|| {
                done.store(true, Ordering::Relaxed);
                drawer.thread().unpark();
            });
            work()
        })
    }

    fn style(&self, code: &str, text: &str) -> String {
        if self.plain { text.to_owned() } else { format!("\x1b[{code}m{text}\x1b[0m") }
    }
}

fn draw(progress: &Progress, total: u64, done: &AtomicBool) {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = "  {wide_bar:.green} {human_pos}/{human_len}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    while !done.load(Ordering::Relaxed) {
        bar.set_position(progress.get());
        std::thread::park_timeout(REDRAW);
    }
    bar.finish_and_clear();
}

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `total / n`, with the unit that suits it.
pub(crate) fn each(total: Duration, n: u64) -> String {
    let ns = total.as_nanos() as f64 / n.max(1) as f64;
    match ns {
        _ if ns < 1e3 => format!("{ns:.0} ns each"),
        _ if ns < 1e6 => format!("{:.2} µs each", ns / 1e3),
        _ => format!("{:.2} ms each", ns / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(n), text);
        }
        assert_eq!(each(Duration::from_millis(500), 1_000_000), "500 ns each");
        assert_eq!(each(Duration::from_millis(1500), 1_000_000), "1.50 µs each");
        assert_eq!(each(Duration::ZERO, 0), "0 ns each");
    }

    #[test]
    fn the_drawer_ends_with_the_work() {
        let stage = Stage::new(false, 1);
        assert_eq!(stage.watch(&Progress::default(), 1, || 7), 7);
        let panic = std::panic::catch_unwind(|| {
            stage
                .watch(&Progress::default(), 1, || -> () { std::panic::resume_unwind(Box::new(0)) })
        });
        assert!(panic.is_err());
    }
}
