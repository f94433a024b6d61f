//! Go's own benchmarks, the second table: many small figures by Go's names, from one launch of
//! go/own_test.go and one of trefoil's counterpart.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use crate::peers::Worker;
use crate::sample::{self, DISTURBED, Launch};
use crate::stats::Summary;

pub const NAME: &str = "gobench";
pub const WHAT: &str =
    "Go's own benchmarks of channels, goroutines, locks and timers; time per operation";

const PROCS: usize = 2;

/// The two runtimes that take part, in the order of `Line::samples`.
pub const PEERS: [&str; 2] = ["trefoil", "go"];

#[derive(Default)]
pub struct Table {
    pub lines: Vec<Line>,
    pub launches: usize,
    /// Launches that other programs disturbed.
    pub disturbed: usize,
}

pub struct Line {
    pub name: String,
    samples: [Vec<f64>; 2],
}

impl Line {
    pub fn summary(&self, peer: usize) -> Option<Summary> {
        Summary::of(self.samples[peer].clone())
    }

    /// Trefoil's median as a multiple of Go's.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.summary(0)?.median / self.summary(1)?.median)
    }
}

impl Table {
    /// One launch of a worker of trefoil, or of Go's test program.
    pub fn add(&mut self, worker: &Worker, quick: bool, scratch: &Path) -> Result<()> {
        let ms = if quick { 10 } else { 100 };
        let mut command = Command::new(&worker.program);
        let peer = PEERS.iter().position(|peer| *peer == worker.peer).context("not its peer")?;
        let is_go = worker.peer == "go";
        if is_go {
            let time = format!("-test.benchtime={ms}ms");
            let procs = format!("-test.cpu={PROCS}");
            command.args(["-test.run=^$", "-test.bench=.", &time, &procs]);
        } else {
            command.args([NAME, &format!("procs={PROCS}"), &format!("ms={ms}")]);
        }
        let Launch { printed, elsewhere } = sample::launch(&mut command, PROCS, scratch)?;
        let figures = if is_go { of_go(&printed) } else { of_trefoil(&printed)? };
        if figures.is_empty() {
            bail!("no figures: {printed}");
        }
        for (name, figure) in figures {
            self.line(&name).samples[peer].push(figure);
        }
        self.launches += 1;
        self.disturbed += usize::from(elsewhere > DISTURBED);
        Ok(())
    }

    fn line(&mut self, name: &str) -> &mut Line {
        let at = self.lines.iter().position(|line| line.name == name).unwrap_or_else(|| {
            self.lines.push(Line { name: name.to_owned(), samples: Default::default() });
            self.lines.len() - 1
        });
        &mut self.lines[at]
    }
}

fn of_trefoil(printed: &str) -> Result<Vec<(String, f64)>> {
    let figures: Map<String, Value> =
        serde_json::from_str(printed).with_context(|| format!("not figures: {printed}"))?;
    Ok(figures.into_iter().filter_map(|(name, ns)| Some((name, ns.as_f64()?))).collect())
}

/// Lines such as `BenchmarkChanSync-2   58105   237.9 ns/op`.
fn of_go(printed: &str) -> Vec<(String, f64)> {
    let figure = |line: &str| {
        let mut words = line.strip_prefix("Benchmark")?.split_whitespace();
        let (name, _procs) = words.next()?.rsplit_once('-')?;
        let ns = words.nth(1)?.parse().ok()?;
        (words.next()? == "ns/op").then(|| (name.to_owned(), ns))
    };
    printed.lines().filter_map(figure).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn figures_of_go() {
        let printed = "goos: linux\nBenchmarkChanSync-2 \t 58105\t 237.9 ns/op\nPASS\n";
        assert_eq!(super::of_go(printed), [("ChanSync".to_owned(), 237.9)]);
    }
}
