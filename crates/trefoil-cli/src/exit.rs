//! Early exits of the tour: Ctrl-C, a scene that exceeds its time limit, a closed output.
//!
//! They must work when the runtime is stuck, so nothing here needs a thread, a lock or memory.
//! Signal handlers write the message and call `_exit`. (A watchdog thread would also hide deadlocks
//! from the runtime, because a plain thread that runs could wake a goroutine.)

use std::ffi::c_int;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use crate::scenes::SCENES;

/// Clears the line, resets the colours, shows the cursor.
const RESET_TERMINAL: &[u8] = b"\r\x1b[2K\x1b[0m\x1b[?25h";

/// Whether bars and colours are drawn, so that the terminal has to be reset.
static DRAWS: AtomicBool = AtomicBool::new(false);
/// A duplicate of standard error, and /dev/null; -1 while not open.
static STDERR: AtomicI32 = AtomicI32::new(-1);
static DEV_NULL: AtomicI32 = AtomicI32::new(-1);
/// The current scene and its time limit in seconds.
static SCENE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicU32 = AtomicU32::new(0);

/// Installs the signal handlers.
pub(crate) fn install_handlers(draws: bool) {
    DRAWS.store(draws, Ordering::Relaxed);
    // SAFETY: opens two descriptors that are never closed; a failure stores -1.
    unsafe {
        let copy = libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, 3);
        STDERR.store(copy, Ordering::Relaxed);
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        DEV_NULL.store(null, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGALRM] {
        // SAFETY: an action made here, with a handler that does only what handlers may do.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_ONSTACK;
            libc::sigfillset(&raw mut action.sa_mask);
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Starts the time limit of scene number `scene`.
pub(crate) fn start_limit(scene: usize, seconds: u32) {
    SCENE.store(scene, Ordering::Relaxed);
    LIMIT.store(seconds, Ordering::Relaxed);
    // SAFETY: sets a timer; its handler is above.
    unsafe { libc::alarm(seconds) };
}

/// Clears the time limit after the last scene.
pub(crate) fn clear_limit() {
    // SAFETY: stops the timer.
    unsafe { libc::alarm(0) };
}

extern "C" fn on_signal(signal: c_int) {
    if signal != libc::SIGALRM {
        exit_now(128 + signal, &[]);
    }
    let name = SCENES.get(SCENE.load(Ordering::Relaxed)).map_or("?", |scene| scene.name);
    let seconds = LIMIT.load(Ordering::Relaxed);
    let mut line = [0; 120];
    let mut rest = &mut line[..];
    let _ =
        writeln!(rest, "trefoil: {name}: exceeded its limit of {seconds} s; the tour ends here");
    let left = rest.len();
    exit_now(1, &line[..line.len() - left]);
}

/// Ends the tour because its output cannot be written: without a message, as SIGPIPE would, if the
/// reader has closed it.
pub(crate) fn write_failed(error: &std::io::Error) -> ! {
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        exit_now(128 + libc::SIGPIPE, &[]);
    }
    let _ = writeln!(std::io::stderr(), "trefoil: cannot write: {error}");
    exit_now(1, &[])
}

fn exit_now(code: c_int, message: &[u8]) -> ! {
    let reset = if DRAWS.load(Ordering::Relaxed) { RESET_TERMINAL } else { &[] };
    let (stderr, dev_null) = (STDERR.load(Ordering::Relaxed), DEV_NULL.load(Ordering::Relaxed));
    // Another thread must not draw after the reset: from here on its output goes to /dev/null.
    for fd in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: no code closes these descriptors. A raw system call, because this may be a signal
        // handler.
        unsafe { libc::syscall(libc::SYS_dup3, dev_null, fd, 0) };
    }
    for bytes in [reset, message] {
        // SAFETY: reads static or local bytes. A failed write is ignored: the process ends.
        unsafe { libc::write(stderr, bytes.as_ptr().cast(), bytes.len()) };
    }
    // SAFETY: ends the process at once, whatever it holds.
    unsafe { libc::_exit(code) }
}
