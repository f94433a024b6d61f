//! What is told about a run: tables for the terminal and for RESULTS.md, a line for history.jsonl.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use crate::gobench;
use crate::machine::Machine;
use crate::peers::Worker;
use crate::plot::{self, Mark, Row};
use crate::sample::DISTURBED;
use crate::stats::Results;
use crate::workloads::{Goal, Metric, WORKLOADS, Workload};

/// Share of disturbed samples above which a run should be repeated: a median bears a few.
const BEARABLE: f64 = 0.1;

pub struct Run {
    pub date: jiff::Zoned,
    pub quick: bool,
    pub repeats: usize,
    pub note: Option<String>,
    pub rustc: String,
    pub machine: Machine,
    pub workers: Vec<Worker>,
    pub workloads: Vec<&'static Workload>,
    pub results: Results,
    pub gobench: gobench::Table,
    pub notes: Vec<String>,
}

impl Run {
    pub fn for_terminal(&self) -> String {
        let mut text = String::new();
        if !self.results.is_empty() {
            text += &format!("\n{}\n", self.medians());
        }
        if !self.results.is_empty() && self.repeats > 1 {
            text += &format!("\n{}\n", self.samples());
        }
        if !self.gobench.lines.is_empty() {
            text += &format!("\n{}\n", self.go_table());
        }
        text += "\n";
        for line in self.facts().into_iter().chain(self.notes.iter().cloned()) {
            text += &format!("- {line}\n");
        }
        text
    }

    pub fn for_markdown(&self) -> String {
        let mut text = String::from("# Benchmark results\n\n");
        text += "Written by the benchmark's driver; README.md says how to read it.\n\n";
        for fact in self.facts() {
            text += &format!("- {fact}\n");
        }
        text += "\nMedians; in brackets the multiple of Go's (less is better, but where the target says ≥).\n\n";
        text += &format!("{}\n\n![every row](ratios.svg)\n", self.medians());
        if !self.gobench.lines.is_empty() {
            text += "\n## Go's own benchmarks\n\n";
            text += "Medians of nanoseconds, 2 procs; the names are Go's.\n\n";
            text += &format!("{}\n", self.go_table());
        }
        text += "\n## What is measured\n\n";
        for workload in self.measured() {
            let (name, what) = (workload.name, workload.what);
            text += &format!("- **{name}** ({} procs): {what}\n", workload.procs);
        }
        text += &format!("\n## Samples\n\n{}\n", self.samples());
        if !self.notes.is_empty() {
            text += "\n## Left out\n\n";
        }
        for note in &self.notes {
            text += &format!("- {note}\n");
        }
        text
    }

    fn facts(&self) -> Vec<String> {
        let date = self.date.strftime("%Y-%m-%d %H:%M %Z");
        let Machine { cpu, cores, kernel, memory_gib, .. } = &self.machine;
        let versions: Vec<_> = self
            .workers
            .iter()
            .filter(|worker| worker.version != self.rustc)
            .map(|worker| format!("{} {}", worker.peer, worker.version))
            .collect();
        let mut facts = vec![
            format!(
                "{date}; {} samples each{}",
                self.repeats,
                if self.quick { ", quick" } else { "" }
            ),
            format!("{cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}"),
            format!("{}; {}", versions.join(", "), self.rustc),
        ];
        let (disturbed, all) = self.disturbed();
        let noisy = disturbed as f64 > BEARABLE * all as f64;
        facts.push(format!(
            "in {disturbed} of {all} samples other programs used more than {} % of the machine{}",
            DISTURBED * 100.0,
            if noisy { ": too noisy, run it again (--wait-idle waits for quiet)" } else { "" },
        ));
        facts.extend(self.targets_met());
        facts.extend(self.note.clone());
        facts
    }

    /// How many targets are met, and which are not; None if no figure has a target.
    fn targets_met(&self) -> Option<String> {
        let mut met = 0;
        let mut missed = Vec::new();
        for workload in self.measured() {
            for metric in workload.metrics {
                for goal in metric.goal.targets() {
                    match self.results.is_met(workload.name, metric, goal) {
                        Some(true) => met += 1,
                        Some(false) => {
                            let (name, unit) = (workload.name, metric.unit);
                            missed.push(format!("{name} ({unit}) {}", target(goal, "").trim_end()));
                        }
                        None => {}
                    }
                }
            }
        }
        let all = met + missed.len();
        let text = match missed.is_empty() {
            true => format!("targets met: {met} of {all}"),
            false => format!("targets met: {met} of {all}; missed: {}", missed.join("; ")),
        };
        (all > 0).then_some(text)
    }

    /// The workloads that at least one runtime has samples of.
    fn measured(&self) -> impl Iterator<Item = &'static Workload> {
        let is_measured = |workload: &&&'static Workload| self.results.has(workload.name);
        self.workloads.iter().filter(is_measured).copied()
    }

    /// The main table: a row a metric, trefoil against Go first, then everyone else.
    fn medians(&self) -> Table {
        let others: Vec<_> = self
            .workers
            .iter()
            .map(|worker| worker.peer)
            .filter(|peer| !["trefoil", "go"].contains(peer))
            .collect();
        let mut table = markdown_table();
        let head = ["workload", "unit", "trefoil", "go", "ours/Go", "target", "met"];
        table.set_header(head.into_iter().chain(others.iter().copied()));
        for workload in self.measured() {
            for metric in workload.metrics {
                let median = |peer| match self.results.summary(workload.name, peer, metric.key) {
                    Some(summary) => short(summary.median),
                    None => "–".to_owned(),
                };
                let ratio = |peer| self.results.ratio(workload.name, peer, metric);
                let met = |target| match self.results.is_met(workload.name, metric, target) {
                    Some(true) => "yes",
                    Some(false) => "no",
                    None => "–",
                };
                let mut row = vec![
                    workload.name.to_owned(),
                    metric.unit.to_owned(),
                    median("trefoil"),
                    median("go"),
                    ratio("trefoil").map(short).unwrap_or_default(),
                    targets(metric),
                    metric.goal.targets().iter().map(met).collect::<Vec<_>>().join(", "),
                ];
                row.extend(others.iter().map(|&peer| match ratio(peer) {
                    Some(ratio) => format!("{} ({})", median(peer), short(ratio)),
                    None => median(peer),
                }));
                table.add_row(row);
            }
        }
        align(&mut table, 2);
        table
    }

    /// The picture: the first metric of every workload that Go has too, and those with a goal of their own.
    pub fn picture(&self) -> String {
        let mut rows = Vec::new();
        for workload in self.measured() {
            let compared = |metric: &&Metric| !matches!(metric.goal, Goal::Context);
            for (i, metric) in workload.metrics.iter().filter(compared).enumerate() {
                if i > 0 && matches!(metric.goal, Goal::Report) {
                    continue;
                }
                let mark = |worker: &Worker| {
                    let ratio = self.results.ratio(workload.name, worker.peer, metric)?;
                    let peer = worker.peer;
                    Some(Mark { peer, ratio: plot::less_is_better(ratio, metric.goal) })
                };
                let marks: Vec<Mark> = self
                    .workers
                    .iter()
                    .filter(|worker| worker.peer != "go")
                    .filter_map(mark)
                    .collect();
                if !marks.is_empty() {
                    rows.push(Row { name: format!("{} ({})", workload.name, metric.unit), marks });
                }
            }
        }
        let date = self.date.strftime("%Y-%m-%d");
        let cores = self.machine.cores;
        plot::draw(&format!("Time or memory as a multiple of Go's; {cores} cores, {date}"), &rows)
    }

    /// The second table: how far the samples of each cell lie apart.
    fn samples(&self) -> Table {
        let mut table = markdown_table();
        table.set_header([
            "workload",
            "unit",
            "runtime",
            "median",
            "min",
            "max",
            "spread",
            "samples",
            "disturbed",
        ]);
        for workload in &self.workloads {
            for metric in workload.metrics {
                for worker in &self.workers {
                    let summary = self.results.summary(workload.name, worker.peer, metric.key);
                    let Some(summary) = summary else { continue };
                    table.add_row([
                        workload.name.to_owned(),
                        metric.unit.to_owned(),
                        worker.peer.to_owned(),
                        short(summary.median),
                        short(summary.min),
                        short(summary.max),
                        format!("{:.0} %", summary.spread() * 100.0),
                        summary.count.to_string(),
                        self.results.disturbed(workload.name, worker.peer).to_string(),
                    ]);
                }
            }
        }
        align(&mut table, 3);
        table
    }

    /// Of all samples: how many were disturbed, and how many there are.
    fn disturbed(&self) -> (usize, usize) {
        let (disturbed, all) = self.results.disturbed_in_all();
        (disturbed + self.gobench.disturbed, all + self.gobench.launches)
    }

    /// Go's own benchmarks.
    fn go_table(&self) -> Table {
        let mut table = markdown_table();
        table.set_header(["benchmark", "trefoil, ns/op", "go, ns/op", "ours/Go"]);
        for line in &self.gobench.lines {
            let median = |peer| line.summary(peer).map_or("–".to_owned(), |s| short(s.median));
            let ratio = line.ratio().map(short).unwrap_or_default();
            table.add_row([line.name.clone(), median(0), median(1), ratio]);
        }
        align(&mut table, 1);
        table
    }

    /// Adds this run to the history: one JSON object on one line.
    pub fn append_history(&self, path: &Path) -> Result<()> {
        let mut results = Map::new();
        for workload in self.measured() {
            let mut peers = Map::new();
            for worker in &self.workers {
                let mut metrics = Map::new();
                for metric in workload.metrics {
                    let summary = self.results.summary(workload.name, worker.peer, metric.key);
                    let Some(s) = summary else { continue };
                    metrics.insert(
                        metric.key.to_owned(),
                        json!({"median": s.median, "min": s.min, "max": s.max, "n": s.count}),
                    );
                }
                if !metrics.is_empty() {
                    peers.insert(worker.peer.to_owned(), metrics.into());
                }
            }
            results.insert(workload.name.to_owned(), peers.into());
        }
        let versions: Map<String, Value> = self
            .workers
            .iter()
            .map(|worker| (worker.peer.to_owned(), worker.version.clone().into()))
            .collect();
        let mut go_benchmarks = Map::new();
        for line in &self.gobench.lines {
            let median = |(i, peer): (usize, &&str)| {
                Some((peer.to_string(), line.summary(i)?.median.into()))
            };
            let medians: Map<_, _> = gobench::PEERS.iter().enumerate().filter_map(median).collect();
            go_benchmarks.insert(line.name.clone(), medians.into());
        }
        let (disturbed, all) = self.disturbed();
        let line = json!({
            "date": self.date.timestamp().to_string(),
            "quick": self.quick,
            "note": self.note,
            "cpu": self.machine.cpu,
            "cores": self.machine.cores,
            "kernel": self.machine.kernel,
            "rustc": self.rustc,
            "versions": versions,
            "disturbed": disturbed as f64 / all.max(1) as f64,
            "results": results,
            gobench::NAME: go_benchmarks,
        });
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .with_context(|| format!("cannot open {}", path.display()))?;
        writeln!(file, "{line}")?;
        Ok(())
    }
}

/// `--list`.
pub fn list() -> Table {
    let mut table = markdown_table();
    table.set_header(["workload", "what", "target", "runtimes"]);
    for workload in WORKLOADS {
        let targets = workload.metrics.iter().map(targets).filter(|text| !text.is_empty());
        table.add_row([
            workload.name.to_owned(),
            workload.what.to_owned(),
            targets.collect::<Vec<_>>().join(", "),
            workload.peers.join(" "),
        ]);
    }
    table.add_row([gobench::NAME, gobench::WHAT, "", &gobench::PEERS.join(" ")]);
    table
}

/// What the metric's targets say.
fn targets(metric: &Metric) -> String {
    let text = |goal: &Goal| target(goal, metric.unit);
    metric.goal.targets().iter().map(text).collect::<Vec<_>>().join(", ")
}

fn target(goal: &Goal, unit: &str) -> String {
    match *goal {
        Goal::Ratio(most) => format!("≤ {most} × Go"),
        Goal::RatioAtLeast(least) => format!("≥ {least} × Go"),
        Goal::RatioTo(peer, most) => format!("≤ {most} × {peer}"),
        Goal::RatioToAtLeast(peer, least) => format!("≥ {least} × {peer}"),
        Goal::AtMost(most) => format!("≤ {} {unit}", short(most)),
        Goal::All(_) | Goal::Report | Goal::Context => String::new(),
    }
}

fn markdown_table() -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table
}

/// Numbers to the right, from column `first` on.
fn align(table: &mut Table, first: usize) {
    for column in table.column_iter_mut().skip(first) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

/// Three digits that count, thousands in groups.
pub fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => {
            let whole = format!("{value:.0}");
            let (sign, digits) = whole.split_at(usize::from(value < 0.0));
            let groups: Vec<_> =
                digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
            format!("{sign}{}", groups.join(","))
        }
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.0995 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{short, targets};
    use crate::workloads::{Goal, Metric};

    #[test]
    fn every_target_of_a_metric_is_told() {
        let told = |goal| targets(&Metric { key: "", unit: "B resident", goal });
        assert_eq!(told(Goal::AtMost(4_700.0)), "≤ 4,700 B resident");
        let both = Goal::All(&[Goal::RatioAtLeast(1.5), Goal::RatioToAtLeast("may", 1.0)]);
        assert_eq!(told(both), "≥ 1.5 × Go, ≥ 1 × may");
        assert_eq!(told(Goal::Report), "");
    }

    #[test]
    fn three_digits_that_count() {
        let cases = [
            (1_234_567.0, "1,234,567"),
            (8_900.0, "8,900"),
            (-1_000.4, "-1,000"),
            (123.4, "123"),
            (99.96, "100"),
            (12.34, "12.3"),
            (1.234, "1.23"),
            (0.0567, "0.057"),
            (0.0, "0.00"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
    }
}
