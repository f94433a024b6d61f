//! How the tour ends before its time: Ctrl-C, a scene that takes too long, a reader that went away.
//!
//! All of it also when the runtime is stuck, so nothing here needs a thread, a lock or memory: signal handlers
//! that write what has to be said and leave by `_exit`. (A thread that watched would also keep the runtime
//! from seeing a deadlock: it could wake somebody.)

use std::ffi::c_int;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};

use crate::scenes::SCENES;

/// Clears the line, resets the colours, shows the cursor.
const PUT_BACK: &[u8] = b"\r\x1b[2K\x1b[0m\x1b[?25h";

/// Whether bars and colours are drawn, so that there is something to put back.
static DRAWS: AtomicBool = AtomicBool::new(false);
/// A standard error of our own, and /dev/null; -1 while there are none.
static STDERR: AtomicI32 = AtomicI32::new(-1);
static NOWHERE: AtomicI32 = AtomicI32::new(-1);
/// The scene that is on, and the seconds it has.
static SCENE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicU32 = AtomicU32::new(0);

/// Puts the handlers in.
pub(crate) fn hang(draws: bool) {
    DRAWS.store(draws, Ordering::Relaxed);
    // SAFETY: two new descriptors, which stay open for ever; if there are none left, -1.
    unsafe {
        let copy = libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, 3);
        STDERR.store(copy, Ordering::Relaxed);
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        NOWHERE.store(null, Ordering::Relaxed);
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

/// Scene number `scene` begins, and has so many seconds.
pub(crate) fn watch(scene: usize, seconds: u32) {
    SCENE.store(scene, Ordering::Relaxed);
    LIMIT.store(seconds, Ordering::Relaxed);
    // SAFETY: sets a timer; its handler is above.
    unsafe { libc::alarm(seconds) };
}

/// The last scene is over.
pub(crate) fn unwatch() {
    // SAFETY: stops the timer.
    unsafe { libc::alarm(0) };
}

extern "C" fn on_signal(signal: c_int) {
    if signal != libc::SIGALRM {
        fall(128 + signal, &[]);
    }
    let name = SCENES.get(SCENE.load(Ordering::Relaxed)).map_or("?", |scene| scene.name);
    let seconds = LIMIT.load(Ordering::Relaxed);
    let mut line = [0; 120];
    let mut rest = &mut line[..];
    let _ = writeln!(rest, "trefoil: {name}: not over after {seconds} s, the tour ends here");
    let left = rest.len();
    fall(1, &line[..line.len() - left]);
}

/// What cannot be printed ends the tour: quietly, as SIGPIPE would, if the reader went away.
pub(crate) fn unheard(error: &std::io::Error) -> ! {
    if error.kind() == std::io::ErrorKind::BrokenPipe {
        fall(128 + libc::SIGPIPE, &[]);
    }
    let _ = writeln!(std::io::stderr(), "trefoil: cannot write: {error}");
    fall(1, &[])
}

fn fall(code: c_int, last_words: &[u8]) -> ! {
    let put_back = if DRAWS.load(Ordering::Relaxed) { PUT_BACK } else { &[] };
    let (stderr, nowhere) = (STDERR.load(Ordering::Relaxed), NOWHERE.load(Ordering::Relaxed));
    // A thread that is about to draw must not do so after us: from here on what others write goes nowhere.
    for theirs in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: descriptors that nobody closes. The system call itself, because this may be a signal handler.
        unsafe { libc::syscall(libc::SYS_dup2, nowhere, theirs) };
    }
    for bytes in [put_back, last_words] {
        // SAFETY: bytes of our own. Whether anybody reads them no longer matters.
        unsafe { libc::write(stderr, bytes.as_ptr().cast(), bytes.len()) };
    }
    // SAFETY: ends the process at once, whatever it holds.
    unsafe { libc::_exit(code) }
}
