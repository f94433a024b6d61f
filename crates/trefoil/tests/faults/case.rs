//! A case of a test of limits: it runs in a child process, with [`CASE`] set to its name. The parent
//! asserts how the child ended and what it wrote.

use crate::common::{Child, mark};
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

/// Tells the child its case.
pub(crate) const CASE: &str = "TREFOIL_FAULT_CASE";
/// A child that runs longer than this hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
/// What the child writes to stderr when its case has succeeded.
pub(crate) const DONE: &str = "the case is done";

/// How a child ended and what it wrote.
pub(crate) struct Ended {
    case: String,
    code: Option<i32>,
    signal: Option<i32>,
    pub(crate) text: String,
}

impl Ended {
    #[track_caller]
    pub(crate) fn has(&self, part: &str) -> &Self {
        assert!(
            self.text.contains(part),
            "{}: no `{part}` in what it wrote (code {:?}, signal {:?}):\n{}",
            self.case,
            self.code,
            self.signal,
            self.text
        );
        self
    }

    #[track_caller]
    pub(crate) fn has_not(&self, part: &str) -> &Self {
        let Ended { case, text, .. } = self;
        assert!(!text.contains(part), "{case}: `{part}` in what it wrote:\n{text}");
        self
    }

    #[track_caller]
    pub(crate) fn ended_by(&self, signal: i32) -> &Self {
        let Ended { case, code, text, .. } = self;
        assert_eq!(self.signal, Some(signal), "{case}: code {code:?}, it wrote:\n{text}");
        self
    }

    #[track_caller]
    pub(crate) fn succeeded(&self) -> &Self {
        let Ended { case, code, signal, text } = self;
        assert_eq!(*code, Some(0), "{case}: signal {signal:?}, it wrote:\n{text}");
        self.has(DONE)
    }
}

/// Runs `child` for `case`, with these variables set.
#[track_caller]
pub(crate) fn run(child: &Child, case: &str, vars: &[(&str, &str)]) -> Ended {
    let child =
        vars.iter().fold(child.env(CASE, case), |child, (name, value)| child.env(name, value));
    let out = child.output();
    let text = String::from_utf8_lossy(&out.stderr) + String::from_utf8_lossy(&out.stdout);
    Ended {
        case: format!("{case} {vars:?}"),
        code: out.status.code(),
        signal: out.status.signal(),
        text: text.into_owned(),
    }
}

/// In the child: returns the case to run.
pub(crate) fn case() -> String {
    no_core_file();
    std::env::var(CASE).unwrap()
}

pub(crate) fn done() {
    mark(DONE);
}

pub(crate) fn limit(what: u32, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: passes a struct by reference.
    let rc = unsafe { libc::setrlimit(what, &raw const limit) };
    assert_eq!(rc, 0, "setrlimit: {}", std::io::Error::last_os_error());
}

pub(crate) fn no_core_file() {
    limit(libc::RLIMIT_CORE, 0);
}
