//! The processes of this user whose program has trefoil in it.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::server::Address;
use crate::inspect::printable;
use crate::proc;

/// What the table of a program that uses trefoil begins with (`inspect/layout.rs`). It is a static,
/// so the file of the program has it at an aligned place.
const MAGIC: &[u8] = b"trefoil\0layout\0\x01";
const MAGIC_ALIGN: usize = 8;
/// Larger files are not read.
const FILE_BYTES_MAX: u64 = 4 << 30;

pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) program: String,
    pub(super) has_server: bool,
}

impl Process {
    /// Returns its line in the list of processes.
    pub(super) fn line(&self) -> String {
        let server = if self.has_server { "socket" } else { "–" };
        format!("{:>8}  {server:<6}  {}", self.pid, printable(&self.program))
    }
}

/// Returns the processes, without this one.
pub(super) fn list() -> Vec<Process> {
    // SAFETY: reads the id of this process's user.
    let uid = unsafe { libc::geteuid() };
    let mut known: HashMap<(u64, u64), bool> = HashMap::new();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let is_own = entry.metadata().is_ok_and(|folder| folder.uid() == uid);
        if pid == std::process::id() || !is_own {
            continue;
        }
        let exe = entry.path().join("exe");
        let Ok(file) = fs::metadata(&exe) else { continue };
        let key = (file.dev(), file.ino());
        let has_table =
            *known.entry(key).or_insert_with(|| file.len() <= FILE_BYTES_MAX && has_table(&exe));
        if has_table {
            let path = fs::read_link(&exe).unwrap_or_default();
            let program = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            found.push(Process { pid, program, has_server: Address::of_process(pid).is_some() });
        }
    }
    found.sort_by_key(|process| process.pid);
    found
}

/// Returns whether the process is stopped, by a signal or by a debugger.
pub(super) fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    matches!(proc::state(&stat), Some('T' | 't'))
}

fn has_table(exe: &Path) -> bool {
    let Ok(bytes) = fs::read(exe) else { return false };
    bytes.chunks_exact(MAGIC_ALIGN).enumerate().any(|(i, chunk)| {
        chunk == &MAGIC[..MAGIC_ALIGN] && bytes[i * MAGIC_ALIGN..].starts_with(MAGIC)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_no_control_characters_of_programs() {
        let program = "a\u{1b}]0;b\u{7}".to_owned();
        let process = Process { pid: 7, program, has_server: true };
        assert_eq!(process.line(), "       7  socket  a\\u{1b}]0;b\\u{7}");
    }

    #[test]
    fn a_program_with_trefoil_is_told_from_others() {
        // This test links trefoil.
        assert!(has_table(Path::new("/proc/self/exe")));
        assert!(!has_table(Path::new("/bin/true")));
        assert!(!has_table(Path::new("/nonexistent")));
        assert!(list().iter().all(|process| process.pid != std::process::id()));
    }
}
