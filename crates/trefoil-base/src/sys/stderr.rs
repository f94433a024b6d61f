//! Writes to stderr without allocation, lock or errno: for signal handlers and fatal errors.

use super::syscalls::{self, Errno};
use std::fmt::{self, Write};
use std::os::fd::BorrowedFd;

/// Writes formatted text to stderr without allocating.
pub fn write_stderr(text: fmt::Arguments<'_>) {
    struct Stderr;
    impl Write for Stderr {
        fn write_str(&mut self, s: &str) -> fmt::Result {
            write_all_stderr(s.as_bytes());
            Ok(())
        }
    }
    let _ = Stderr.write_fmt(text);
}

/// Writes bytes to stderr without taking std's lock.
pub fn write_all_stderr(mut bytes: &[u8]) {
    // SAFETY: borrowed for the writes only; if descriptor 2 is closed they fail.
    let stderr = unsafe { BorrowedFd::borrow_raw(2) };
    while !bytes.is_empty() {
        match syscalls::write(stderr, bytes) {
            Ok(n) if n > 0 => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            _ => return,
        }
    }
}

/// Writes a message to stderr and aborts, because the runtime cannot continue. Allocates nothing.
#[cold]
pub fn fatal(what: fmt::Arguments<'_>) -> ! {
    write_stderr(format_args!("fatal error: {what}\n"));
    std::process::abort();
}
