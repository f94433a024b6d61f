//! One sample: one launch of one worker, alone, with the same environment for all.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use wait_timeout::ChildExt;

use crate::machine;
use crate::peers::{Worker, first_error};
use crate::report::short;
use crate::workloads::{Metric, Workload};

/// Far beyond the slowest sample: what takes longer hangs.
const TIME_LIMIT: Duration = Duration::from_secs(120);

/// Settings of the user's shell that would change what a worker measures.
const FOREIGN_SETTINGS: [&str; 5] =
    ["GOGC", "GODEBUG", "GOMEMLIMIT", "TREFOIL_DEBUG", "MALLOC_ARENA_MAX"];

pub struct Sample {
    pub metrics: BTreeMap<String, f64>,
    /// Share of the machine (0 to 1) that other programs used meanwhile.
    pub elsewhere: f64,
}

/// Share of the machine above which other programs disturb a sample. Below it lie the ticks in
/// which the kernel counts, and the launch itself.
pub const DISTURBED: f64 = 0.05;

impl Sample {
    pub fn is_disturbed(&self) -> bool {
        self.elsewhere > DISTURBED
    }

    pub fn show(&self, metric: &Metric) -> String {
        let value = self.metrics.get(metric.key).copied().unwrap_or(f64::NAN);
        format!("{} {}", short(value), metric.unit)
    }
}

pub fn take(workload: &Workload, worker: &Worker, quick: bool, scratch: &Path) -> Result<Sample> {
    let mut command = Command::new(&worker.program);
    command.arg(workload.asks_for()).arg(format!("procs={}", workload.procs)).args(if quick {
        workload.quick_args
    } else {
        workload.args
    });
    let Launch { printed, elsewhere } = launch(&mut command, workload.procs, scratch)?;
    let metrics: BTreeMap<String, f64> = serde_json::from_str(&printed)
        .with_context(|| format!("not a line of metrics: {printed}"))?;
    if let Some(missing) = workload.metrics.iter().find(|metric| !metrics.contains_key(metric.key))
    {
        bail!("the worker did not report {}", missing.key);
    }
    Ok(Sample { metrics, elsewhere })
}

/// What a worker printed, and the share of the machine that other programs used meanwhile.
pub struct Launch {
    pub printed: String,
    pub elsewhere: f64,
}

pub fn launch(command: &mut Command, procs: usize, scratch: &Path) -> Result<Launch> {
    let stderr_path = scratch.join("last-sample-stderr.txt");
    let procs = procs.to_string();
    command
        .env("TREFOIL_PROCS", &procs)
        .env("GOMAXPROCS", &procs)
        .env("SMOL_THREADS", &procs)
        .env("RUST_BACKTRACE", "0")
        // This program is also the client of `conns_idle_10k`, the same for all workers.
        .env("BENCH_CLIENT", std::env::current_exe().context("no path of this program")?)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(&stderr_path).context("no place for the worker's stderr")?);
    for setting in FOREIGN_SETTINGS {
        command.env_remove(setting);
    }

    let busy_before = machine::busy()?;
    let own_before = children_cpu()?;
    let start = Instant::now();
    let mut child = command.spawn().context("cannot start the worker")?;
    let Some(status) = child.wait_timeout(TIME_LIMIT)? else {
        child.kill()?;
        child.wait()?;
        bail!("no answer in {} s", TIME_LIMIT.as_secs());
    };
    let wall = start.elapsed();
    let busy = machine::busy()?.saturating_sub(busy_before);
    let others = busy.saturating_sub(children_cpu()?.saturating_sub(own_before));

    let mut printed = String::new();
    child.stdout.take().context("no stdout")?.read_to_string(&mut printed)?;
    if !status.success() {
        let stderr = fs::read(&stderr_path).unwrap_or_default();
        let why = first_error(&String::from_utf8_lossy(&stderr)).unwrap_or_default();
        bail!("{status}: {why}");
    }
    let capacity = wall.as_secs_f64() * machine::cores() as f64;
    Ok(Launch { printed, elsewhere: (others.as_secs_f64() / capacity).min(1.0) })
}

/// CPU time of all children that have ended.
fn children_cpu() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Ok(Duration::from_micros(micros as u64))
}
