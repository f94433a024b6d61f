//! Runs a CPU profile: the signal handler, the timers, the collector.

use super::collector::{self, CpuSettings};
use crate::observe::pprof::Profile;
use crate::sched::sample::{self, CPU_SIGNAL, TimerError};
use crate::sys::clock::Nanos;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

/// Why no CPU profile was started.
pub(crate) enum CpuError {
    AlreadyRunning,
    SignalInUse,
    SignalBlocked,
    Kernel(io::Error),
}

/// While a CPU profile runs: the action of the signal before it.
static RUNNING: Mutex<Option<libc::sigaction>> = Mutex::new(None);

/// Starts a CPU profile of the process.
pub(crate) fn start(hz: u32, by_id: bool) -> Result<(), CpuError> {
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    if running.is_some() {
        return Err(CpuError::AlreadyRunning);
    }
    let before = action().map_err(CpuError::Kernel)?;
    if before.sa_sigaction > libc::SIG_IGN {
        return Err(CpuError::SignalInUse);
    }
    let session = sample::next_session();
    let period = 1_000_000_000 / Nanos::from(hz);
    collector::begin_cpu(CpuSettings { session, period, by_id }).map_err(CpuError::Kernel)?;
    let started = install().map_err(TimerError::Kernel);
    if let Err(e) = started.and_then(|()| sample::start_timers(session, period)) {
        uninstall(&before);
        collector::end_cpu();
        return Err(match e {
            TimerError::SignalBlocked => CpuError::SignalBlocked,
            TimerError::Kernel(e) => CpuError::Kernel(e),
        });
    }
    *running = Some(before);
    Ok(())
}

/// Ends the CPU profile. Returns None if none runs.
pub(crate) fn stop() -> Option<Profile> {
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let before = running.take()?;
    sample::stop_timers();
    uninstall(&before);
    collector::end_cpu()
}

/// Returns the action of the signal.
fn action() -> io::Result<libc::sigaction> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: libc writes the action.
    unsafe {
        if libc::sigaction(CPU_SIGNAL, std::ptr::null(), action.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(action.assume_init())
    }
}

/// The handler, as the kernel stores it.
fn handler() -> libc::sighandler_t {
    sample::on_cpu_signal as *const () as libc::sighandler_t
}

fn install() -> io::Result<()> {
    // SAFETY: a handler of the right type for SA_SIGINFO.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler();
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigfillset(&raw mut action.sa_mask);
        if libc::sigaction(CPU_SIGNAL, &raw const action, null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Restores the action that the signal had, unless the program has installed another one meanwhile.
fn uninstall(before: &libc::sigaction) {
    if action().is_ok_and(|now| now.sa_sigaction != handler()) {
        return;
    }
    // The default action ends the process. A signal that has been sent and not been handled yet is
    // discarded if it is ignored for a moment.
    // SAFETY: actions without a handler, or what the kernel returned.
    unsafe {
        let mut ignore: libc::sigaction = std::mem::zeroed();
        ignore.sa_sigaction = libc::SIG_IGN;
        libc::sigaction(CPU_SIGNAL, &raw const ignore, null_mut());
        libc::sigaction(CPU_SIGNAL, before, null_mut());
    }
}
