//! Runs a CPU profile: the signal handler, the timers, the collector.

use super::collector::{self, CpuSettings};
use crate::observe::pprof::Profile;
use crate::observe::process_lock::ProcessLock;
use crate::sched::sample::{self, CPU_SIGNAL, TimerError};
use crate::sys::clock::Nanos;
use std::io;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// Why no CPU profile was started.
pub(crate) enum CpuError {
    AlreadyRunning,
    SignalInUse,
    SignalBlocked,
    Kernel(io::Error),
}

/// While a CPU profile runs: the action of the signal before it.
static RUNNING: ProcessLock<Option<libc::sigaction>> = ProcessLock::new(None);

/// Starts a CPU profile of the process.
pub(crate) fn start(hz: u32, by_id: bool) -> Result<(), CpuError> {
    let mut running = RUNNING.lock();
    if running.is_some() {
        return Err(CpuError::AlreadyRunning);
    }
    let before = install()?;
    let session = sample::next_session();
    let period = 1_000_000_000 / Nanos::from(hz);
    if let Err(e) = collector::begin_cpu(CpuSettings { session, period, by_id }) {
        uninstall(&before);
        return Err(CpuError::Kernel(e));
    }
    if let Err(e) = sample::start_timers(session, period) {
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
    let mut running = RUNNING.lock();
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

/// Installs the handler. Returns the action before. A handler of the program stays: then the
/// profile is refused.
fn install() -> Result<libc::sigaction, CpuError> {
    // SAFETY: a handler of the right type for SA_SIGINFO, and what the kernel returned. All bits 0
    // are the default action.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler();
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
        libc::sigfillset(&raw mut action.sa_mask);
        let mut before: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(CPU_SIGNAL, &raw const action, &raw mut before) != 0 {
            return Err(CpuError::Kernel(io::Error::last_os_error()));
        }
        match before.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => Ok(before),
            // The program has installed a handler during an earlier profile, and later restored
            // what it had found.
            before if before == handler() => Ok(std::mem::zeroed()),
            _ => {
                libc::sigaction(CPU_SIGNAL, &raw const before, null_mut());
                Err(CpuError::SignalInUse)
            }
        }
    }
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
