//! The output of a scene: headings, facts, promises, bars.
//!
//! A fact is only shown. A promise is measured, and the tour fails if it is broken. Both go to
//! standard output. An OS thread draws progress bars on standard error; it only reads a counter, so
//! it does not disturb the measurement.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::exit;
use crate::results::Results;

/// Time from one drawing of a progress bar to the next.
const REDRAW: Duration = Duration::from_millis(80);

/// Characters of a full bar.
const BAR_WIDTH: usize = 32;

/// Where a scene reports to, and how it is shown.
pub(crate) struct Report {
    plain: bool,
    goroutines: u64,
    results: Mutex<Results>,
}

/// Prints a line to standard output. `println!` would panic if the reader has closed it.
pub(crate) fn print_line(line: impl Display) {
    if let Err(error) = writeln!(io::stdout(), "{line}") {
        exit::write_failed(&error);
    }
}

/// How far a part has come. The scene counts; the report draws.
#[derive(Clone, Default)]
pub(crate) struct Progress(Arc<AtomicU64>);

impl Progress {
    pub(crate) fn add(&self, n: u64) {
        // Relaxed: a number to show; it publishes nothing else.
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Report {
    pub(crate) fn new(plain: bool, goroutines: u64) -> Report {
        Report { plain, goroutines, results: Mutex::default() }
    }

    /// Returns how many goroutines the user asked for.
    pub(crate) fn goroutines(&self) -> u64 {
        self.goroutines
    }

    /// Prints a scene's heading.
    pub(crate) fn title(&self, name: &'static str, line: &str) {
        self.results().begin_scene(name);
        print_line(format_args!("{}  {line}", self.style("1;32", name)));
    }

    /// Prints the heading of a part of a scene.
    pub(crate) fn part(&self, text: impl Display) {
        print_line(format_args!("\n{}", self.style("1", &text.to_string())));
    }

    /// Prints one result: a label and its value.
    pub(crate) fn fact(&self, label: &str, value: impl Display) {
        print_line(format_args!("  {label:<24} {value}"));
    }

    /// Prints one result beside what was promised, and counts whether the promise was kept.
    pub(crate) fn promise(
        &self,
        label: &str,
        measured: impl Display,
        promised: impl Display,
        ok: bool,
    ) {
        let mark = if ok { self.style("32", "✓") } else { self.style("1;31", "✗") };
        let measured = measured.to_string();
        print_line(format_args!("{mark} {label:<24} {measured:<28} promised: {promised}"));
        if ok {
            self.results().kept();
        } else {
            self.results().broken(format_args!("{label}: {measured}, promised: {promised}"));
        }
    }

    /// Reports that the scene could not be completed.
    pub(crate) fn failed(&self, why: impl Display) {
        print_line(format_args!("{} {why}", self.style("1;31", "✗")));
        self.results().broken(why);
    }

    /// Prints the output of another program, indented.
    pub(crate) fn quote(&self, text: &str) {
        for line in text.trim_end().lines() {
            print_line(format_args!("    {line}"));
        }
    }

    /// Prints the summary; returns whether every promise was kept.
    pub(crate) fn sum_up(&self) -> bool {
        let results = self.results();
        let code = if results.all_kept() { "1;32" } else { "1;31" };
        print_line(format_args!("\n{}", self.style(code, &results.to_string())));
        results.all_kept()
    }

    fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints one row of a chart; `share` from 0 to 1.
    pub(crate) fn bar(&self, label: &str, share: f64, value: impl Display) {
        let full = (share.clamp(0.0, 1.0) * BAR_WIDTH as f64).round() as usize;
        let (on, off) = if self.plain { ("#", ".") } else { ("█", "░") };
        let bar = format!("{}{}", on.repeat(full), off.repeat(BAR_WIDTH - full));
        print_line(format_args!("  {label:<24} {} {value}", self.style("32", &bar)));
    }

    /// Runs `work` while a bar shows `progress` out of `total`.
    pub(crate) fn watch<T>(&self, progress: &Progress, total: u64, work: impl FnOnce() -> T) -> T {
        if self.plain {
            return work();
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let drawer = scope.spawn(|| draw(progress, total, &done));
            // Also if `work` panics: the scope waits for the drawing thread.
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

/// Draws the bar on standard error, which is a terminal, until `done`; then clears it.
fn draw(progress: &Progress, total: u64, done: &AtomicBool) {
    const CLEAR_LINE: &str = "\r\x1b[2K";
    while !done.load(Ordering::Relaxed) {
        let now = progress.get().min(total);
        let counts = format!("{}/{}", grouped(now), grouped(total));
        // A line that wraps is not cleared.
        let width = columns().saturating_sub(counts.len() + 4).min(BAR_WIDTH);
        let full = (width as u64 * now / total.max(1)) as usize;
        let (on, off) = ("█".repeat(full), "░".repeat(width - full));
        // In one write, so that the line does not flicker. A failure shows at the next result.
        let line = format!("{CLEAR_LINE}  \x1b[32m{on}{off}\x1b[0m {counts}");
        let _ = io::stderr().write_all(line.as_bytes());
        std::thread::park_timeout(REDRAW);
    }
    let _ = io::stderr().write_all(CLEAR_LINE.as_bytes());
}

/// Returns the width of the terminal.
fn columns() -> usize {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes a `winsize`.
    let result = unsafe { libc::ioctl(libc::STDERR_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    if result == 0 && size.ws_col != 0 { size.ws_col.into() } else { 80 }
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
    fn numbers_are_grouped_and_durations_divided() {
        for (n, text) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(grouped(n), text);
        }
        assert_eq!(each(Duration::from_millis(500), 1_000_000), "500 ns each");
        assert_eq!(each(Duration::from_millis(1500), 1_000_000), "1.50 µs each");
        assert_eq!(each(Duration::ZERO, 0), "0 ns each");
    }

    #[test]
    fn the_drawing_thread_ends_with_the_work() {
        let report = Report::new(false, 1);
        assert_eq!(report.watch(&Progress::default(), 1, || 7), 7);
        let panic = std::panic::catch_unwind(|| {
            report
                .watch(&Progress::default(), 1, || -> () { std::panic::resume_unwind(Box::new(0)) })
        });
        assert!(panic.is_err());
    }
}
