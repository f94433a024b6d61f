//! `/api/state`: what the page and terminal viewers show, in JSON.
//!
//! Goroutines are in it as groups, so its size does not depend on their number.

use crate::json::Json;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use trefoil::debug::{self, Deadlock, Goroutine, GoroutineGroup, Histogram, Kind, Metrics, Usage};
use trefoil::observer::{self, RuntimeRef};

/// The version of the format. It changes when a member changes its meaning or is removed.
const VERSION: u64 = 1;
/// Groups that are sent at most, unless the client asks for another number.
pub(crate) const GROUPS_MAX: usize = 500;

/// Goroutines that are sent at most: those that use the CPUs, and those that wait for others.
const USERS_MAX: usize = 20;
const WAITS_MAX: usize = 200;
/// Deadlocks that are sent at most.
const DEADLOCKS_MAX: usize = 20;
/// With more goroutines, probable deadlocks are not searched for: with a million it takes more than
/// twenty seconds.
const GUESSES_MAX: usize = 10_000;

/// Returns the state of `runtime`, with at most `groups_max` groups, and who waits for whom if
/// `with_waits`: that reads stacks, and takes longer. `profiles` are the names that the client may
/// ask for.
pub(crate) fn state(
    runtime: &RuntimeRef,
    groups_max: usize,
    with_waits: bool,
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
            write_groups(json, &debug::groups(), groups_max);
            write_usage(json, &debug::usage());
            write_waits(json, with_waits);
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

fn write_groups(json: &mut Json, groups: &[GoroutineGroup], groups_max: usize) {
    json.name("groups_total").number(groups.len() as u64);
    json.name("groups").list(|json| {
        for group in groups.iter().take(groups_max) {
            let waits = !matches!(group.state, "running" | "runnable");
            json.object(|json| {
                json.name("kind").string(kind_text(group.kind));
                json.name("function").string(function_name(group.function));
                let place = group.created_at;
                json.name("place").string(&format!("{}:{}", place.file(), place.line()));
                json.name("state").string(group.state);
                json.name("count").number(group.count as u64);
                let waits_at = group.waits_at.as_ref().map(ToString::to_string);
                json.name("waits_at").optional_string(waits_at.as_deref());
                json.name("oldest_ms").optional(waits.then(|| millis(group.oldest)));
                json.name("mean_ms").optional(waits.then(|| millis(group.mean)));
                json.name("example").number(group.oldest_id);
            });
        }
    });
}

pub(crate) fn kind_text(kind: Kind) -> &'static str {
    match kind {
        Kind::Goroutine => "goroutine",
        Kind::Task => "task",
    }
}

/// Returns the function that contains a closure or future.
fn function_name(type_name: &str) -> &str {
    type_name.strip_suffix("::{{closure}}").unwrap_or(type_name)
}

/// Writes who uses the CPUs most. Of those that have ended, only the id is known.
fn write_usage(json: &mut Json, usage: &[Usage]) {
    let most = &usage[..usage.len().min(USERS_MAX)];
    let ids: Vec<u64> = most.iter().map(|used| used.id).collect();
    let alive: HashMap<u64, Goroutine> =
        observer::with_ids(&ids).into_iter().map(|g| (g.who.id, g)).collect();
    json.name("usage").list(|json| {
        for used in most {
            json.object(|json| {
                json.name("id").number(used.id);
                json.name("running_us").number(used.running.as_micros() as u64);
                json.name("runnable_us").number(used.runnable.as_micros() as u64);
                let g = alive.get(&used.id);
                json.name("who").optional_string(g.map(|g| g.who.to_string()).as_deref());
                json.name("state").optional_string(g.map(|g| g.state));
                json.name("function").optional_string(g.map(|g| function_name(g.function)));
                json.name("labels").list(|json| {
                    for (key, value) in g.map_or(&[][..], |g| &g.labels) {
                        json.string(&format!("{key}={value}"));
                    }
                });
            });
        }
    });
}

/// Writes who waits for whom, and who waits for each other; null if it was not asked for.
fn write_waits(json: &mut Json, with_waits: bool) {
    if !with_waits {
        for name in ["waits", "waits_total", "deadlocks", "waits_took_us"] {
            json.name(name).null();
        }
        return;
    }
    let start = Instant::now();
    let (waiting, total) = observer::waiting(WAITS_MAX);
    // A search for probable ones reads the stack of each goroutine.
    let deadlocks = match debug::stats().goroutines {
        ..=GUESSES_MAX => debug::deadlocks(),
        _ => observer::deadlocks_without_guesses(),
    };
    json.name("waits").list(|json| waiting.iter().for_each(|g| write_wait(json, g)));
    json.name("waits_total").number(total as u64);
    let deadlocks = deadlocks.iter().take(DEADLOCKS_MAX);
    json.name("deadlocks").list(|json| deadlocks.for_each(|d| write_deadlock(json, d)));
    json.name("waits_took_us").number(start.elapsed().as_micros() as u64);
}

fn write_wait(json: &mut Json, g: &Goroutine) {
    json.object(|json| {
        json.name("id").number(g.who.id);
        json.name("who").string(&g.who.to_string());
        let text = g.waits_for.as_ref().map_or_else(|| g.state.to_owned(), ToString::to_string);
        json.name("text").string(&text);
        json.name("holders").list(|json| {
            let holders = g.waits_for.iter().flat_map(|waits_for| &waits_for.holders);
            holders.take(WAITS_MAX).for_each(|holder| json.number(holder.id));
        });
        json.name("waited_ms").optional(g.waited.map(millis));
    });
}

fn write_deadlock(json: &mut Json, deadlock: &Deadlock) {
    json.object(|json| {
        json.name("certain").bool(deadlock.certain);
        json.name("text").string(&deadlock.to_string());
        json.name("members").list(|json| {
            let members = deadlock.members.iter().take(WAITS_MAX);
            members.for_each(|member| json.number(member.goroutine.who.id));
        });
    });
}

fn millis(time: Duration) -> u64 {
    time.as_millis() as u64
}
