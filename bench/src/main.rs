//! The benchmark's driver: builds the workers, launches them in turn, and reports how trefoil
//! compares with Go and others. See README.md.
//!
//! | file | job |
//! |---|---|
//! | `workloads.rs` | the table of what is measured: a new workload is a row there and a function in each worker |
//! | `peers.rs`, `golang.rs` | the runtimes, and how a worker of each is built |
//! | `sample.rs` | one launch of one worker |
//! | `gobench.rs` | the second table: Go's own benchmarks |
//! | `stats.rs` | all samples of a run, medians and ratios |
//! | `machine.rs`, `report.rs`, `plot.rs` | where it ran; tables, RESULTS.md, its picture, history.jsonl |

mod gobench;
mod golang;
mod machine;
mod peers;
mod plot;
mod report;
mod sample;
mod stats;
mod workloads;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use clap::builder::PossibleValuesParser;
use indicatif::{ProgressBar, ProgressStyle};

use crate::machine::Machine;
use crate::peers::{PEERS, Worker, Workshop};
use crate::report::Run;
use crate::stats::Results;
use crate::workloads::{WORKLOADS, Workload};

/// Runs the same workloads in trefoil, Go and others, and compares them.
#[derive(Parser)]
#[command(name = "trefoil-bench")]
struct Options {
    /// Run only these workloads
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = workload_names())]
    only: Vec<String>,

    /// Run only these runtimes
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = peer_names())]
    peers: Vec<String>,

    /// Samples of each workload in each runtime [default: 7, with --quick 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    repeats: Option<u32>,

    /// Short samples, small sizes: shows that all works, not how fast
    #[arg(long)]
    quick: bool,

    /// Before each sample, wait up to this many seconds until the machine is idle
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    wait_idle: u64,

    /// List the workloads and exit
    #[arg(long)]
    list: bool,

    /// Write the Markdown report here [default: RESULTS.md beside the manifest, for a whole run]
    #[arg(long, value_name = "PATH")]
    markdown: Option<PathBuf>,

    /// A note on this run, kept in the report and in history.jsonl
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
}

fn workload_names() -> PossibleValuesParser {
    let rows = WORKLOADS.iter().map(|workload| workload.name);
    rows.chain([gobench::NAME]).collect::<Vec<_>>().into()
}

fn peer_names() -> PossibleValuesParser {
    PEERS.iter().map(|peer| peer.name).collect::<Vec<_>>().into()
}

impl Options {
    /// A part of the benchmark never overwrites the report of the whole.
    fn is_whole(&self) -> bool {
        self.only.is_empty() && self.peers.is_empty() && !self.quick
    }

    fn repeats(&self) -> usize {
        self.repeats.map_or(if self.quick { 3 } else { 7 }, |n| n as usize)
    }

    fn wants(chosen: &[String], name: &str) -> bool {
        chosen.is_empty() || chosen.iter().any(|one| one == name)
    }
}

fn main() -> Result<()> {
    bench_common::conns::run_client_if_asked();
    let options = Options::parse();
    if options.list {
        println!("{}", report::list());
        return Ok(());
    }
    let home = home();
    let machine = Machine::read()?;
    let mut notes = Vec::new();

    let workshop = Workshop::open(&home)?;
    let workers = build(&options, &workshop, &mut notes);
    let workloads = choose(&options, &machine, &mut notes);
    let results = measure(&options, &workshop, &workloads, &workers, &mut notes)?;
    let gobench = measure_gobench(&options, &workshop, &workers, &mut notes)?;
    if results.is_empty() && gobench.lines.is_empty() {
        bail!("nothing was measured: {}", notes.join("; "));
    }

    let run = Run {
        date: jiff::Zoned::now(),
        quick: options.quick,
        repeats: options.repeats(),
        note: options.note.clone(),
        rustc: workshop.rustc.clone(),
        machine,
        workers,
        workloads,
        results,
        gobench,
        notes,
    };
    println!("{}", run.for_terminal());
    run.append_history(&home.join("history.jsonl"))?;
    let markdown = match &options.markdown {
        Some(path) => Some(path.clone()),
        None => options.is_whole().then(|| home.join("RESULTS.md")),
    };
    if let Some(path) = markdown {
        std::fs::write(&path, run.for_markdown())
            .with_context(|| format!("cannot write {}", path.display()))?;
        let picture = path.with_file_name("ratios.svg");
        std::fs::write(&picture, run.picture())
            .with_context(|| format!("cannot write {}", picture.display()))?;
        println!("written: {}, {}", path.display(), picture.display());
    }
    Ok(())
}

/// The folder of this package: at run time where cargo says so, so that a moved copy works.
fn home() -> PathBuf {
    match std::env::var_os("CARGO_MANIFEST_DIR") {
        Some(dir) => dir.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).to_owned(),
    }
}

fn build(options: &Options, workshop: &Workshop, notes: &mut Vec<String>) -> Vec<Worker> {
    let mut workers = Vec::new();
    for peer in PEERS.iter().filter(|peer| Options::wants(&options.peers, peer.name)) {
        eprintln!("building {}", peer.name);
        match workshop.build(peer) {
            Ok((worker, remark)) => {
                notes.extend(remark);
                workers.push(worker);
            }
            Err(error) => {
                let note = format!("{} is left out: {error:#}", peer.name);
                eprintln!("{note}");
                notes.push(note);
            }
        }
    }
    workers
}

fn choose(options: &Options, machine: &Machine, notes: &mut Vec<String>) -> Vec<&'static Workload> {
    let mut chosen = Vec::new();
    for workload in WORKLOADS.iter().filter(|row| Options::wants(&options.only, row.name)) {
        if !options.quick && machine.free_gib < workload.needs_gib {
            let (name, needs, has) = (workload.name, workload.needs_gib, machine.free_gib);
            notes.push(format!(
                "{name} is left out: it needs {needs} GiB of memory, {has} are free"
            ));
            continue;
        }
        let program = workload.needs_program;
        if !program.is_empty() && !machine::has_program(program) {
            notes.push(format!("{} is left out: {program} is not installed", workload.name));
            continue;
        }
        for (peer, why) in workload.absent {
            if Options::wants(&options.peers, peer) {
                notes.push(format!("{}: without {peer}: {why}", workload.name));
            }
        }
        chosen.push(workload);
    }
    chosen
}

/// One launch of every worker for every workload, and that again for each repeat: a drift of
/// the machine (clock speed, neighbours) affects all runtimes alike. The order rotates.
fn measure(
    options: &Options,
    workshop: &Workshop,
    workloads: &[&'static Workload],
    workers: &[Worker],
    notes: &mut Vec<String>,
) -> Result<Results> {
    let repeats = options.repeats();
    let mut cells: Vec<(&Workload, &Worker)> = Vec::new();
    for workload in workloads {
        let able = workers.iter().filter(|worker| workload.peers.contains(&worker.peer));
        cells.extend(able.map(|worker| (*workload, worker)));
    }
    let progress = Progress::new(cells.len() * repeats);
    let mut results = Results::default();
    let mut failed = Vec::new();
    for repeat in 0..repeats {
        for workload in workloads {
            let mut turn: Vec<_> =
                cells.iter().filter(|cell| cell.0.name == workload.name).collect();
            let first = repeat % turn.len().max(1);
            turn.rotate_left(first);
            for &&(workload, worker) in &turn {
                let what = format!("{} {} {}/{repeats}", workload.name, worker.peer, repeat + 1);
                let cell = (workload.name, worker.peer);
                if failed.contains(&cell) {
                    progress.step(&format!("{what}: skipped, it failed before"));
                    continue;
                }
                progress.start(&what);
                machine::wait_until_idle(Duration::from_secs(options.wait_idle))?;
                match sample::take(workload, worker, options.quick, &workshop.target) {
                    Ok(sample) => {
                        let shown = sample.show(&workload.metrics[0]);
                        progress.step(&format!("{what}: {shown}"));
                        results.add(workload.name, worker.peer, sample);
                    }
                    Err(error) => {
                        progress.step(&format!("{what}: failed: {error:#}"));
                        notes.push(format!("{}: {} failed: {error:#}", workload.name, worker.peer));
                        failed.push(cell);
                    }
                }
            }
        }
    }
    progress.bar.finish_and_clear();
    Ok(results)
}

/// The same for Go's own benchmarks, which are a program of their own in Go.
fn measure_gobench(
    options: &Options,
    workshop: &Workshop,
    workers: &[Worker],
    notes: &mut Vec<String>,
) -> Result<gobench::Table> {
    let mut table = gobench::Table::default();
    if !Options::wants(&options.only, gobench::NAME) {
        return Ok(table);
    }
    let go = match workers.iter().any(|worker| worker.peer == "go") {
        true => workshop.build_gobench().map_err(|error| {
            notes.push(format!("{}: without go: {error:#}", gobench::NAME));
        }),
        false => Err(()),
    };
    let trefoil = workers.iter().find(|worker| worker.peer == "trefoil");
    let mut turn: Vec<&Worker> = trefoil.into_iter().chain(go.as_ref().ok()).collect();
    let repeats = options.repeats();
    let progress = Progress::new(turn.len() * repeats);
    for repeat in 0..repeats {
        for worker in &turn {
            let what = format!("{} {} {}/{repeats}", gobench::NAME, worker.peer, repeat + 1);
            progress.start(&what);
            machine::wait_until_idle(Duration::from_secs(options.wait_idle))?;
            match table.add(worker, options.quick, &workshop.target) {
                Ok(()) => progress.step(&what),
                Err(error) => {
                    progress.step(&format!("{what}: failed: {error:#}"));
                    notes.push(format!("{what} failed: {error:#}"));
                }
            }
        }
        turn.reverse();
    }
    progress.bar.finish_and_clear();
    Ok(table)
}

/// A bar on a terminal, plain lines elsewhere.
struct Progress {
    bar: ProgressBar,
    plain: bool,
}

impl Progress {
    fn new(samples: usize) -> Progress {
        let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}  {eta} left  {msg}");
        let bar = ProgressBar::new(samples as u64).with_style(style.expect("a fixed template"));
        Progress { bar, plain: !std::io::stderr().is_terminal() }
    }

    fn start(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.tick();
    }

    fn step(&self, what: &str) {
        self.bar.inc(1);
        if self.plain {
            let (done, all) = (self.bar.position(), self.bar.length().unwrap_or_default());
            eprintln!("[{done}/{all}] {what}");
        } else {
            self.bar.println(what);
        }
    }
}
