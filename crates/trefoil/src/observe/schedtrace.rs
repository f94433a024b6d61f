//! `TREFOIL_DEBUG=schedtrace=1000[,scheddetail=1]`: the scheduler's state on stderr. The summary is Go's
//! line (`needspinning` is always 0: there is none here). The detail is not quite Go's: Ps and goroutines with the
//! states and counters that we have, and no Ms.

use crate::sched::g::{self, Status};
use crate::sched::p::PStatus;
use crate::sched::{Sched, p::P};
use std::fmt::Write;
use std::sync::atomic::Ordering;

/// Prints one trace.
pub(crate) fn print(sched: &Sched) {
    let mut text = String::new();
    let _ = summary(sched, &mut text);
    if sched.config.scheddetail {
        let _ = detail(sched, &mut text);
    }
    crate::sys::stderr::write_all_stderr(text.as_bytes());
}

fn live_ps(sched: &Sched) -> impl Iterator<Item = &'static P> + '_ {
    sched.all_ps().filter(|p| p.status() != PStatus::Retired)
}

fn summary(sched: &Sched, out: &mut String) -> std::fmt::Result {
    let idle_threads = sched.central.lock().idle_m_count();
    write!(
        out,
        "SCHED {}ms: gomaxprocs={} idleprocs={} threads={} spinningthreads={} needspinning=0 \
         idlethreads={} runqueue={} [",
        sched.started.elapsed().as_millis(),
        sched.procs(),
        sched.idle.idle_ps(),
        sched.threads() + 2, // sysmon and the helper thread are among them
        sched.idle.spinning(),
        idle_threads,
        sched.global_len.load(Ordering::Relaxed),
    )?;
    for p in live_ps(sched) {
        write!(out, " {}", p.queued())?;
    }
    write!(out, " ] schedticks=[")?;
    for p in live_ps(sched) {
        write!(out, " {}", p.tick.load(Ordering::Relaxed))?;
    }
    writeln!(out, " ]")
}

fn detail(sched: &Sched, out: &mut String) -> std::fmt::Result {
    for p in sched.all_ps() {
        let m = match p.holder() {
            Some(m) => m.id.load(Ordering::Relaxed).to_string(),
            None => "nil".to_string(),
        };
        writeln!(
            out,
            "  P{}: status={} schedtick={} m={m} runqsize={} timers={} spawned={} ended={} steals={} \
             stolen={} overflows={}",
            p.id,
            match p.status() {
                PStatus::Idle => "idle",
                PStatus::Running => "running",
                PStatus::Retired => "retired",
            },
            p.tick.load(Ordering::Relaxed),
            p.queued(),
            p.timers.len(),
            p.counters.spawned.load(Ordering::Relaxed),
            p.counters.ended.load(Ordering::Relaxed),
            p.counters.steals.load(Ordering::Relaxed),
            p.counters.stolen.load(Ordering::Relaxed),
            p.counters.overflows.load(Ordering::Relaxed),
        )?;
    }
    let mut result = Ok(());
    g::for_each(&mut |g| {
        // A look in passing: a G may change lives between two reads.
        let status = match g.status() {
            Status::Dead => return,
            Status::Runnable => "runnable",
            Status::Running => "running",
            Status::Waiting(reason) => reason.text(),
        };
        if result.is_ok() {
            result = writeln!(out, "  G{}: status={status} parent={}", g.id(), g.parent());
        }
    });
    result
}
