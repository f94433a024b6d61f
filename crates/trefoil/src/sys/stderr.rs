//! Writing to stderr when nothing else can be trusted: no allocation, no lock, no errno.

use std::fmt::{self, Write};
use std::os::fd::BorrowedFd;

/// Writes formatted text without allocating.
pub(crate) fn write_stderr(text: fmt::Arguments<'_>) {
    struct Stderr;
    impl Write for Stderr {
        fn write_str(&mut self, s: &str) -> fmt::Result {
            write_all_stderr(s.as_bytes());
            Ok(())
        }
    }
    let _ = Stderr.write_fmt(text);
}

/// Writes bytes to stderr, past std's lock.
pub(crate) fn write_all_stderr(mut bytes: &[u8]) {
    // SAFETY: descriptor 2 is not closed by us; if it is closed the write fails.
    let stderr = unsafe { BorrowedFd::borrow_raw(2) };
    while !bytes.is_empty() {
        match rustix::io::write(stderr, bytes) {
            Ok(n) if n > 0 => bytes = &bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

/// The runtime cannot go on. Says why on stderr and aborts; allocates nothing.
#[cold]
pub(crate) fn fatal(what: fmt::Arguments<'_>) -> ! {
    write_stderr(format_args!("fatal error: {what}\n"));
    std::process::abort();
}
