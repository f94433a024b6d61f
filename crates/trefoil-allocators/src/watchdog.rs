//! Detects hangs from inside the process, without the allocator.
//!
//! The process may hang in the allocator's locks. So the watchdog neither allocates nor takes a
//! lock: it compares a counter and writes one line. The parent process ([`crate::runner`]) reads
//! that line and collects information about the hang.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The start of the line that tells the parent process about a hang.
pub(crate) const HANG: &str = "HANG: ";
/// A scene hangs if it makes no progress for this long: far more than a busy machine delays a
/// goroutine.
const STALL_LIMIT: Duration = Duration::from_secs(10);
/// How long the parent process may collect information.
const INSPECTION_TIME: Duration = Duration::from_secs(120);

static PROGRESS: AtomicU64 = AtomicU64::new(0);

/// Tells the watchdog that the scene makes progress.
pub(crate) fn progress() {
    PROGRESS.fetch_add(1, Relaxed);
}

/// Starts the watchdog of this process.
pub(crate) fn start() {
    let watch = || {
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let now = PROGRESS.load(Relaxed);
            if now != seen {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() > STALL_LIMIT {
                let mut line = Line::new();
                let _ = writeln!(line, "{HANG}no progress for {} s", STALL_LIMIT.as_secs());
                line.write_to(libc::STDOUT_FILENO);
                std::thread::sleep(INSPECTION_TIME);
                // SAFETY: no arguments.
                unsafe { libc::abort() };
            }
        }
    };
    std::thread::Builder::new().name("watchdog".into()).spawn(watch).expect("a thread");
}

/// Aborts the process because the allocator is wrong. Does not allocate.
pub(crate) fn abort_with(what: &str, address: usize, detail: usize) -> ! {
    let mut line = Line::new();
    let _ = writeln!(line, "CORRUPT: {what} at {address:#x}, {detail:#x}");
    line.write_to(libc::STDERR_FILENO);
    // SAFETY: no arguments.
    unsafe { libc::abort() }
}

/// A line of text on the stack.
struct Line {
    bytes: [u8; 256],
    len: usize,
}

impl Line {
    fn new() -> Line {
        Line { bytes: [0; 256], len: 0 }
    }

    fn write_to(&self, fd: i32) {
        // SAFETY: reads `len` bytes of `bytes`. A raw system call: the interposed `write` may park.
        unsafe { libc::syscall(libc::SYS_write, fd, self.bytes.as_ptr(), self.len) };
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let n = text.len().min(self.bytes.len() - self.len);
        self.bytes[self.len..self.len + n].copy_from_slice(&text.as_bytes()[..n]);
        self.len += n;
        Ok(())
    }
}
