//! `/metrics`: the counters and histograms as OpenMetrics text (version 1.0.0), which Prometheus
//! and others read.
//!
//! Every sample has the label `runtime`: a program may have several.

use crate::state::{histograms, kind_text};
use std::collections::BTreeMap;
use std::fmt::Write;
use trefoil::debug::{self, Histogram, Metrics, ProcStats};
use trefoil::observer::RuntimeRef;

pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What one runtime has.
struct Sample {
    runtime: u64,
    metrics: Metrics,
    /// Goroutines and tasks by kind and state.
    states: BTreeMap<(&'static str, &'static str), u64>,
}

/// The kind of a metric.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gauge,
    /// Its samples have the suffix `_total`.
    Counter,
}

/// The name, kind and description of a metric, and how it is read.
type Family = (&'static str, Kind, &'static str, fn(&Metrics) -> u64);

const FAMILIES: [Family; 13] = [
    ("goroutines", Kind::Gauge, "Goroutines that are alive.", |m| m.stats.goroutines as u64),
    ("tasks", Kind::Gauge, "Tasks that are alive.", |m| m.stats.tasks as u64),
    ("carriers", Kind::Gauge, "Goroutines that poll tasks.", |m| m.stats.carriers as u64),
    ("io_waiters", Kind::Gauge, "Goroutines and tasks that wait for a descriptor.", |m| {
        m.stats.io_waiters as u64
    }),
    ("global_queue_length", Kind::Gauge, "Runnable goroutines in no queue of a P.", |m| {
        m.stats.global_queue as u64
    }),
    ("threads", Kind::Gauge, "Threads that run goroutines, idle ones included.", |m| {
        m.stats.threads as u64
    }),
    ("threads_idle", Kind::Gauge, "Threads that wait for work.", |m| m.idle_threads as u64),
    ("threads_without_p", Kind::Gauge, "Threads whose goroutine is in a call that blocks.", |m| {
        m.stats.threads_without_p as u64
    }),
    ("stacks", Kind::Gauge, "Stacks in use in this process.", |m| m.stats.stacks_live as u64),
    ("preemptions", Kind::Counter, "Goroutines that a signal has stopped.", |m| {
        m.stats.preemptions
    }),
    ("preempt_signals", Kind::Counter, "Signals that were sent to stop a goroutine.", |m| {
        m.stats.preempt_signals
    }),
    ("retakes", Kind::Counter, "Ps that were taken from a thread that blocked.", |m| {
        m.stats.retakes
    }),
    ("carriers_started", Kind::Counter, "Carriers that were started.", |m| {
        m.stats.carriers_started
    }),
];

/// The same for each P, with the label `p`.
type PFamily = (&'static str, Kind, &'static str, fn(&ProcStats) -> u64);

const P_FAMILIES: [PFamily; 8] = [
    ("p_running", Kind::Gauge, "Whether a thread owns the P.", |p| {
        u64::from(p.status == "running")
    }),
    ("p_queue_length", Kind::Gauge, "Runnable goroutines in the queue of the P.", |p| {
        p.queue as u64
    }),
    ("p_slices", Kind::Counter, "Time slices that began on the P.", |p| p.ticks),
    ("p_goroutines_started", Kind::Counter, "Goroutines that were started on the P.", |p| {
        p.spawned
    }),
    ("p_goroutines_ended", Kind::Counter, "Goroutines that ended on the P.", |p| p.ended),
    ("p_steals", Kind::Counter, "How many times the P stole from another one.", |p| p.steals),
    ("p_goroutines_stolen", Kind::Counter, "Goroutines that the P stole.", |p| p.stolen),
    ("p_overflows", Kind::Counter, "How many times the queue of the P was full.", |p| p.overflows),
];

const HISTOGRAM_HELP: [(&str, &str); 4] = [
    ("scheduling", "From the start or wake-up of a goroutine until it runs, sampled."),
    ("timers", "How long after its time a timer has fired."),
    ("poll", "How long ready descriptors may have gone unnoticed."),
    ("kernel", "How long threads were without a P, in calls that block."),
];

/// Returns the text for all runtimes of the program.
pub(crate) fn text(runtimes: &[RuntimeRef]) -> String {
    let samples: Vec<Sample> = runtimes.iter().map(sample).collect();
    let mut out = String::new();
    for (name, kind, help, read) in FAMILIES {
        head(&mut out, name, kind, help);
        for sample in &samples {
            line(
                &mut out,
                name,
                kind,
                &format!("runtime=\"{}\"", sample.runtime),
                read(&sample.metrics),
            );
        }
    }
    head(
        &mut out,
        "goroutines_by_state",
        Kind::Gauge,
        "Goroutines and tasks by what they wait for.",
    );
    for sample in &samples {
        for ((kind, state), count) in &sample.states {
            let labels =
                format!("runtime=\"{}\",kind=\"{kind}\",state=\"{state}\"", sample.runtime);
            line(&mut out, "goroutines_by_state", Kind::Gauge, &labels, *count);
        }
    }
    for (name, kind, help, read) in P_FAMILIES {
        head(&mut out, name, kind, help);
        for sample in &samples {
            for (p, stats) in sample.metrics.stats.procs.iter().enumerate() {
                let labels = format!("runtime=\"{}\",p=\"{p}\"", sample.runtime);
                line(&mut out, name, kind, &labels, read(stats));
            }
        }
    }
    // In whole seconds and nanoseconds: a float would lose digits.
    _ = writeln!(out, "# HELP trefoil_uptime_seconds The age of the runtime.");
    _ = writeln!(out, "# TYPE trefoil_uptime_seconds gauge\n# UNIT trefoil_uptime_seconds seconds");
    for sample in &samples {
        let uptime = sample.metrics.uptime.as_secs_f64();
        _ = writeln!(out, "trefoil_uptime_seconds{{runtime=\"{}\"}} {uptime:?}", sample.runtime);
    }
    for (i, (name, help)) in HISTOGRAM_HELP.into_iter().enumerate() {
        let name = format!("trefoil_{name}_latency_seconds");
        _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram\n# UNIT {name} seconds");
        for sample in &samples {
            histogram(&mut out, &name, sample.runtime, histograms(&sample.metrics)[i].1);
        }
    }
    out.push_str("# EOF\n");
    out
}

fn sample(runtime: &RuntimeRef) -> Sample {
    runtime.observe(|| {
        let mut states = BTreeMap::new();
        for group in debug::groups() {
            *states.entry((kind_text(group.kind), group.state)).or_default() += group.count as u64;
        }
        Sample { runtime: runtime.number(), metrics: debug::metrics(), states }
    })
}

fn head(out: &mut String, name: &str, kind: Kind, help: &str) {
    let kind = match kind {
        Kind::Gauge => "gauge",
        Kind::Counter => "counter",
    };
    _ = writeln!(out, "# HELP trefoil_{name} {help}\n# TYPE trefoil_{name} {kind}");
}

fn line(out: &mut String, name: &str, kind: Kind, labels: &str, value: u64) {
    let suffix = if kind == Kind::Counter { "_total" } else { "" };
    _ = writeln!(out, "trefoil_{name}{suffix}{{{labels}}} {value}");
}

fn histogram(out: &mut String, name: &str, runtime: u64, histogram: &Histogram) {
    let mut count = 0;
    for (i, n) in histogram.buckets().iter().enumerate() {
        count += n;
        let bound = Histogram::bound(i)
            .map_or("+Inf".to_owned(), |bound| format!("{:?}", bound.as_nanos() as f64 / 1e9));
        _ = writeln!(out, "{name}_bucket{{runtime=\"{runtime}\",le=\"{bound}\"}} {count}");
    }
    _ = writeln!(out, "{name}_count{{runtime=\"{runtime}\"}} {count}");
    let sum = histogram.sum().as_secs_f64();
    _ = writeln!(out, "{name}_sum{{runtime=\"{runtime}\"}} {sum:?}");
}
