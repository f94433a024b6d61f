//! `TREFOIL_DEBUG=schedtrace=1000[,scheddetail=1]`: prints the state of the scheduler on stderr.
//!
//! The summary is Go's line; `needspinning` is always 0, because there is no such flag here. The
//! detail differs from Go's: it has Ps, goroutines and tasks with their own states and counters,
//! and no Ms.

use crate::sched::Sched;
use crate::sched::g::{self, Status};
use crate::sched::p_snapshot::PSnapshot;
use crate::sched::task::block;
use crate::sched::task::state::TaskSnapshot;
use std::fmt::Write;
use std::sync::atomic::Ordering;

/// Threads of a runtime that run no goroutines: sysmon and the helper thread.
const OTHER_THREADS: u32 = 2;

/// Prints one trace. The helper thread calls it.
pub(crate) fn print(sched: &Sched) {
    let ps = sched.p_snapshots();
    let mut text = String::new();
    let _ = summary(sched, &ps, &mut text);
    if sched.config.scheddetail {
        let _ = detail(&ps, &mut text);
    }
    crate::sys::stderr::write_all_stderr(text.as_bytes());
}

fn summary(sched: &Sched, ps: &[PSnapshot], out: &mut String) -> std::fmt::Result {
    let idle_threads = sched.central.lock().idle_m_count();
    write!(
        out,
        "SCHED {}ms: gomaxprocs={} idleprocs={} threads={} spinningthreads={} needspinning=0 \
         idlethreads={} runqueue={} [",
        sched.started.elapsed().as_millis(),
        sched.procs(),
        sched.idle.idle_ps(),
        sched.threads() + OTHER_THREADS,
        sched.idle.spinning(),
        idle_threads,
        sched.global_len.load(Ordering::Relaxed),
    )?;
    let live_ps = || ps.iter().filter(|p| !p.is_retired());
    for p in live_ps() {
        write!(out, " {}", p.queued)?;
    }
    write!(out, " ] schedticks=[")?;
    for p in live_ps() {
        write!(out, " {}", p.ticks)?;
    }
    writeln!(out, " ]")
}

fn detail(ps: &[PSnapshot], out: &mut String) -> std::fmt::Result {
    for p in ps {
        let m = p.m.map_or("nil".to_owned(), |id| id.to_string());
        writeln!(
            out,
            "  P{}: status={} schedtick={} m={m} runqsize={} timers={} spawned={} ended={} \
             steals={} stolen={} overflows={}",
            p.id,
            p.status_text(),
            p.ticks,
            p.queued,
            p.timers,
            p.spawned,
            p.ended,
            p.steals,
            p.stolen,
            p.overflows,
        )?;
    }
    let mut result = Ok(());
    g::for_each(&mut |g| {
        if g.is_carrier_hint() && g.task_hint().is_none() {
            return; // It is shelved.
        }
        // The G may be reused for another goroutine between two reads.
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
    block::for_each(&mut |task| {
        let status = match task.state.snapshot().0 {
            TaskSnapshot::Free => return,
            TaskSnapshot::Scheduled => "runnable",
            TaskSnapshot::Running => "running",
            TaskSnapshot::Idle => task.head.reason().text(),
        };
        if result.is_ok() {
            result = writeln!(out, "  T{}: status={status}", task.id());
        }
    });
    result
}
