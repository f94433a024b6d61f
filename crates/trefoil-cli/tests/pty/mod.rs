//! A pseudo-terminal that runs a command and turns typed characters into signals.

use std::ffi::CStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

pub(crate) struct Pty {
    ours: File,
    /// The command's side; closed here once the command runs.
    theirs: Option<OwnedFd>,
}

impl Pty {
    pub(crate) fn open() -> Pty {
        // Each descriptor closed on exec from its birth (openpty cannot do that): a command that
        // another test starts meanwhile would keep the terminal open.
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        let mut name = [0; 64];
        let size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: a descriptor that is ours from then on; the calls read `size`, and write a name
        // that fits.
        let (ours, name) = unsafe {
            let ours = libc::posix_openpt(flags);
            assert!(ours >= 0, "no terminal: {}", std::io::Error::last_os_error());
            assert_eq!(libc::grantpt(ours), 0);
            assert_eq!(libc::unlockpt(ours), 0);
            assert_eq!(libc::ptsname_r(ours, name.as_mut_ptr(), name.len()), 0);
            libc::ioctl(ours, libc::TIOCSWINSZ, &raw const size);
            (File::from_raw_fd(ours), CStr::from_ptr(name.as_ptr()))
        };
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_NOCTTY);
        let theirs = options.open(name.to_str().expect("ASCII")).expect("its other side");
        Pty { ours, theirs: Some(theirs.into()) }
    }

    /// Starts the command with this as its controlling terminal.
    pub(crate) fn spawn(&mut self, mut command: Command) -> Child {
        let theirs = self.theirs.take().expect("one command for each terminal");
        command
            .env("TERM", "xterm")
            .stdin(theirs.try_clone().unwrap())
            .stdout(theirs.try_clone().unwrap())
            .stderr(theirs);
        // SAFETY: three system calls between fork and exec. SIGINT may be ignored where tests run
        // in the background.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                libc::ioctl(libc::STDIN_FILENO, libc::TIOCSCTTY, 0);
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        command.spawn().expect("it can be started")
    }

    pub(crate) fn type_in(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).unwrap();
    }

    /// Reads up to these words, and perhaps a little more.
    pub(crate) fn read_until(&mut self, words: &str) -> String {
        let mut shown = String::new();
        while !shown.contains(words) {
            let more = self.read();
            assert!(!more.is_empty(), "it ended without {words:?}: {shown:?}");
            shown.push_str(&more);
        }
        shown
    }

    pub(crate) fn read_to_end(&mut self) -> String {
        std::iter::from_fn(|| Some(self.read()).filter(|more| !more.is_empty())).collect()
    }

    /// Returns an empty string at the end: reading from a terminal that no process has open is an
    /// error.
    fn read(&mut self) -> String {
        let mut bytes = [0; 4096];
        let n = self.ours.read(&mut bytes).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    }
}
