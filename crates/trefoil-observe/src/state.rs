//! `/api/state`: what the page and terminal viewers show, in JSON.
//!
//! Goroutines are in it as groups, so its size does not depend on their number.

use crate::json::Json;
use std::time::{Duration, Instant};
use trefoil::debug::{self, Histogram, Metrics};
use trefoil::observer::{self, Group, RuntimeRef};

/// The version of the format. It changes when a member changes its meaning or is removed.
const VERSION: u64 = 1;
/// Groups that are sent at most, unless the client asks for another number.
pub(crate) const GROUPS_MAX: usize = 500;

/// Returns the state of `runtime`, with at most `groups_max` groups. `profiles` are the names that
/// the client may ask for.
pub(crate) fn state(
    runtime: &RuntimeRef,
    groups_max: usize,
    profiles: impl Iterator<Item = &'static str>,
) -> String {
    let start = Instant::now();
    let mut json = Json::default();
    json.object(|json| {
        json.name("version").number(VERSION);
        json.name("pid").number(std::process::id());
        json.name("program").string(&program());
        json.name("runtime").number(runtime.number());
        json.name("runtimes").list(|json| {
            observer::runtimes().iter().for_each(|runtime| json.number(runtime.number()));
        });
        json.name("profiles").list(|json| profiles.for_each(|name| json.string(name)));
        runtime.observe(|| {
            write_metrics(json, &debug::metrics());
            json.name("recording").bool(observer::is_recording());
            write_groups(json, &observer::groups(), groups_max);
            write_waits(json);
        });
        json.name("took_us").number(start.elapsed().as_micros() as u64);
    });
    json.into_text()
}

/// Returns the file name of the program.
pub(crate) fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn write_metrics(json: &mut Json, metrics: &Metrics) {
    let stats = &metrics.stats;
    json.name("uptime_ms").number(metrics.uptime.as_millis() as u64);
    json.name("goroutines").number(stats.goroutines as u64);
    json.name("tasks").number(stats.tasks as u64);
    json.name("carriers").number(stats.carriers as u64);
    json.name("io_waiters").number(stats.io_waiters as u64);
    json.name("global_queue").number(stats.global_queue as u64);
    json.name("threads").object(|json| {
        json.name("total").number(stats.threads as u64);
        json.name("idle").number(metrics.idle_threads as u64);
        json.name("spinning").number(metrics.spinning_threads as u64);
        json.name("without_p").number(stats.threads_without_p as u64);
    });
    json.name("stacks").object(|json| {
        json.name("live").number(stats.stacks_live as u64);
        json.name("pooled").number(stats.stacks_pooled as u64);
        json.name("mapped_bytes").number(stats.stack_bytes_mapped as u64);
    });
    json.name("counters").object(|json| {
        json.name("preemptions").number(stats.preemptions);
        json.name("preempt_signals").number(stats.preempt_signals);
        json.name("retakes").number(stats.retakes);
        json.name("carriers_started").number(stats.carriers_started);
    });
    let threads = observer::threads_of_ps();
    json.name("ps").list(|json| {
        for (id, p) in stats.procs.iter().enumerate() {
            let (m, tid) = threads.get(id).copied().flatten().unzip();
            json.object(|json| {
                json.name("id").number(id as u64);
                json.name("status").string(p.status);
                json.name("m").optional(m);
                json.name("tid").optional(tid);
                json.name("queue").number(p.queue as u64);
                json.name("ticks").number(p.ticks);
                json.name("spawned").number(p.spawned);
                json.name("ended").number(p.ended);
                json.name("steals").number(p.steals);
                json.name("stolen").number(p.stolen);
                json.name("overflows").number(p.overflows);
            });
        }
    });
    json.name("latency").object(|json| {
        for (name, histogram) in histograms(metrics) {
            json.name(name).object(|json| {
                json.name("buckets").list(|json| {
                    histogram.buckets().iter().for_each(|&count| json.number(count));
                });
                json.name("sum_ns").number(histogram.sum().as_nanos() as u64);
            });
        }
    });
}

/// Returns the histograms with their names.
pub(crate) fn histograms(metrics: &Metrics) -> [(&'static str, &Histogram); 4] {
    [
        ("scheduling", &metrics.scheduling),
        ("timers", &metrics.timers),
        ("poll", &metrics.poll),
        ("kernel", &metrics.kernel),
    ]
}

fn write_groups(json: &mut Json, groups: &[Group], groups_max: usize) {
    json.name("groups_total").number(groups.len() as u64);
    json.name("groups").list(|json| {
        for group in groups.iter().take(groups_max) {
            json.object(|json| {
                json.name("kind").string(if group.is_task { "task" } else { "goroutine" });
                let function = group.function;
                let function = function.strip_suffix("::{{closure}}").unwrap_or(function);
                json.name("function").string(function);
                let place = group.created_at;
                json.name("place").string(&format!("{}:{}", place.file(), place.line()));
                json.name("state").string(group.state);
                json.name("count").number(group.count);
                json.name("oldest_ms").optional(group.oldest.map(millis));
                let mean = group.oldest.map(|_| millis(group.waited) / group.count.max(1));
                json.name("mean_ms").optional(mean);
                json.name("example").number(group.example);
            });
        }
    });
}

/// Writes the wait-for graph: a list of `{from, to, what, where, certainty}`; or null if this
/// version does not know it.
fn write_waits(json: &mut Json) {
    json.name("waits").null();
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}
