//! The durable part of a node: its term, its vote and its log.
//!
//! The journal is a file of lines that only grows:
//!
//! ```text
//! 5f0c… term 3 1           the node is in term 3 and has voted for node 1
//! 77ab… entry 4 3 set x 5  entry 4 is of term 3; entries from 4 on that were there before are gone
//! ```
//!
//! Each line begins with its checksum. A crash may leave a torn end, which was never synced: it is
//! cut off.

use super::Entry;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;

pub(super) struct Journal {
    file: File,
    /// Lines were written since the last sync.
    is_dirty: bool,
}

/// What a journal says.
#[derive(Default)]
pub(super) struct Saved {
    pub(super) term: u64,
    pub(super) vote: Option<usize>,
    pub(super) log: Vec<Entry>,
}

impl Journal {
    /// Opens the journal in a folder, or makes it. Returns what it says.
    pub(super) fn open(folder: &Path) -> io::Result<(Journal, Saved)> {
        let path = folder.join("journal");
        let mut file =
            File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        let bytes = fs::read(&path)?;
        let mut saved = Saved::default();
        let mut valid = 0;
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if saved.take(line).is_none() {
                break;
            }
            valid += line.len();
        }
        file.set_len(valid as u64)?;
        file.seek(SeekFrom::End(0))?;
        file.sync_all()?;
        File::open(folder)?.sync_all()?;
        Ok((Journal { file, is_dirty: false }, saved))
    }

    pub(super) fn write_term(&mut self, term: u64, vote: Option<usize>) {
        let vote = vote.map_or("-".to_owned(), |vote| vote.to_string());
        self.write(&format!("term {term} {vote}"));
    }

    pub(super) fn write_entry(&mut self, index: usize, Entry { term, command }: &Entry) {
        self.write(&format!("entry {index} {term} {command}"));
    }

    /// Makes durable what was written. A node that cannot do that must not go on: it panics.
    pub(super) fn sync(&mut self) {
        if std::mem::take(&mut self.is_dirty) {
            self.file.sync_data().expect("the journal can be synced");
        }
    }

    fn write(&mut self, text: &str) {
        self.is_dirty = true;
        let line = format!("{:016x} {text}\n", checksum(text));
        self.file.write_all(line.as_bytes()).expect("the journal can be written");
    }
}

impl Saved {
    /// Takes over a line. Returns None if it is torn.
    fn take(&mut self, line: &[u8]) -> Option<()> {
        let line = str::from_utf8(line).ok()?.strip_suffix('\n')?;
        let (sum, text) = line.split_once(' ')?;
        if u64::from_str_radix(sum, 16) != Ok(checksum(text)) {
            return None;
        }
        let mut words = text.splitn(4, ' ');
        match words.next()? {
            "term" => {
                self.term = words.next()?.parse().ok()?;
                self.vote = words.next()?.parse().ok();
            }
            _ => {
                let index: usize = words.next()?.parse().ok()?;
                let term = words.next()?.parse().ok()?;
                self.log.truncate(index - 1);
                self.log.push(Entry { term, command: words.next()?.to_owned() });
            }
        }
        Some(())
    }
}

/// FNV-1a.
fn checksum(text: &str) -> u64 {
    let add = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, add)
}
