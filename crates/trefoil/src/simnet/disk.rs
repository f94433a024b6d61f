//! Disks: what is left of a host's files after a crash.
//!
//! A host's disk is a folder of the real file system, and its files are real files. The simulation
//! learns of `fsync` and `fdatasync`, and keeps what was durable then. After a crash the folder
//! holds that, and of everything newer what the seed chooses:
//!
//! | change since the last `fsync` | after the crash |
//! |---|---|
//! | bytes of a file | kept, lost, or torn: kept in some sectors and lost in others |
//! | names in a folder: created, renamed, removed | all kept, or all lost |
//!
//! `fsync` of a file makes its bytes durable, `fsync` of a folder the names in it. POSIX promises
//! no more.
//!
//! Not modelled: folders are never lost, and lose the durable names in them if they are renamed;
//! symbolic links, pipes and sockets are left as they are; `O_SYNC`, `msync` and `sync_file_range`
//! make nothing durable.

use super::sockets::{descriptor_limit, path_of_other};
use super::{Network, status};
use crate::sys::rng::Rng;
use crate::sys::sort::sort_by_key;
use crate::sys::sorted_map::SortedMap;
use std::fs;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The unit that a disk writes as a whole.
const SECTOR: usize = 512;

/// The disks of all hosts.
pub(super) struct Disks {
    /// The folder that holds them. None before the first one.
    root: Option<PathBuf>,
    by_host: SortedMap<u16, Disk>,
}

#[derive(Default)]
struct Disk {
    folder: PathBuf,
    /// Durable bytes, by inode.
    contents: SortedMap<u64, Vec<u8>>,
    /// Durable names of files, with their inodes, by folder.
    names: SortedMap<PathBuf, Names>,
}

/// The files in a folder with their inodes, in the order of their paths.
type Names = Vec<(PathBuf, u64)>;

/// A file as the program sees it.
struct LiveFile {
    path: PathBuf,
    inode: u64,
    bytes: Vec<u8>,
}

impl Disks {
    pub(super) fn new() -> Disks {
        Disks { root: None, by_host: SortedMap::new() }
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        if let Some(root) = &self.root {
            // What cannot be removed is left to the system's cleaner of temporary files.
            _ = fs::remove_dir_all(root);
        }
    }
}

impl Network {
    /// Returns the folder with the files of a host. Makes it if need be.
    pub(crate) fn disk(&self, incarnation: u32) -> io::Result<PathBuf> {
        let mut state = self.lock();
        let host = state.incarnations.get(incarnation as usize).copied().unwrap_or(0);
        if let Some(disk) = state.disks.by_host.get(&host) {
            return Ok(disk.folder.clone());
        }
        let number = state.number;
        let name = state.hosts[host as usize].name.replace('/', "_");
        let root = state.disks.root.get_or_insert_with(|| {
            let memory = Path::new("/dev/shm");
            let base = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
            base.join(format!("trefoil-sim-{}-{number}", std::process::id()))
        });
        let folder = root.join(format!("{host}-{name}"));
        fs::create_dir_all(&folder)?;
        let disk = Disk { folder: folder.clone(), ..Disk::default() };
        state.disks.by_host.insert(host, disk);
        Ok(folder)
    }

    /// The program calls `fsync`: keeps what is durable from now on. Returns whether the file is on
    /// a simulated disk.
    pub(crate) fn sync(&self, fd: RawFd) -> bool {
        if !self.lock().disks.has_any() {
            return false;
        }
        let Ok(path) = fs::read_link(format!("/proc/thread-self/fd/{fd}")) else { return false };
        let Some(stat) = status(fd) else { return false };
        // The files are read without the lock.
        let names = (stat.st_mode & libc::S_IFMT == libc::S_IFDIR).then(|| names_in(&path));
        let bytes = fs::read(format!("/proc/thread-self/fd/{fd}"));
        let mut state = self.lock();
        let mut disks = state.disks.by_host.iter_mut().map(|(_, disk)| disk);
        let Some(disk) = disks.find(|disk| path.starts_with(&disk.folder)) else { return false };
        match (names, bytes) {
            (Some(names), _) => disk.names.insert(path, names),
            (None, Ok(bytes)) => disk.contents.insert(stat.st_ino, bytes),
            (None, Err(_)) => {}
        }
        true
    }

    /// Closes the files in a folder, whose goroutines never run again.
    fn close_files_in(&self, folder: &Path) {
        for fd in 0..descriptor_limit() {
            if path_of_other(fd).is_some_and(|path| path.starts_with(folder)) {
                self.retire(fd);
            }
        }
    }

    /// The run has ended: closes the files of all hosts except the test's, and removes all disks.
    /// The test closes its own files.
    pub(super) fn close_disks(&self) {
        let disks = std::mem::replace(&mut self.lock().disks, Disks::new());
        for (_, disk) in disks.by_host.entries().iter().filter(|(host, _)| *host != 0) {
            self.close_files_in(&disk.folder);
        }
        drop(disks);
    }

    /// A host has lost its power: leaves on its disk what was durable, and what the seed chooses.
    pub(crate) fn lose_unsynced(&self, host: u16) {
        let mut state = self.lock();
        let Some(mut disk) = state.disks.by_host.remove(&host) else { return };
        let mut rng = Rng::from_seed(state.rng.next());
        // The files are changed without the lock.
        drop(state);
        self.close_files_in(&disk.folder);
        let folder = disk.folder.clone();
        // A failure leaves the files as they are, as if all had been written.
        _ = disk.crash(&folder, &mut rng);
        self.lock().disks.by_host.insert(host, disk);
    }
}

impl Disks {
    fn has_any(&self) -> bool {
        !self.by_host.is_empty()
    }
}

impl Disk {
    /// Leaves what survives in `folder`, and in the folders in it.
    fn crash(&mut self, folder: &Path, rng: &mut Rng) -> io::Result<()> {
        let mut live = Vec::new();
        let mut folders = Vec::new();
        for entry in sorted(folder)? {
            let path = entry.path();
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                let inode = entry.metadata()?.ino();
                live.push(LiveFile { inode, bytes: fs::read(&path)?, path });
            }
        }
        let live_names: Names = live.iter().map(|file| (file.path.clone(), file.inode)).collect();
        let durable_names = self.names.get(&folder.to_owned()).cloned().unwrap_or_default();
        let names = if live_names == durable_names || rng.next() & 1 == 0 {
            live_names
        } else {
            durable_names
        };
        let mut by_inode = SortedMap::new();
        live.iter().for_each(|file| by_inode.insert(file.inode, &file.bytes));
        let mut kept = Vec::new();
        for (path, inode) in names {
            let durable = self.contents.get(&inode).map_or(&[][..], Vec::as_slice);
            let bytes = match by_inode.get(&inode) {
                Some(live) => survivors(durable, live, rng),
                None => durable.to_vec(),
            };
            kept.push((path, bytes));
        }
        live.iter().try_for_each(|file| fs::remove_file(&file.path))?;
        let mut durable_names = Names::new();
        for (path, bytes) in kept {
            fs::write(&path, &bytes)?;
            // After the restart, what is there is durable.
            let inode = fs::metadata(&path)?.ino();
            self.contents.insert(inode, bytes);
            durable_names.push((path, inode));
        }
        self.names.insert(folder.to_owned(), durable_names);
        folders.iter().try_for_each(|folder| self.crash(folder, rng))
    }
}

/// Returns the bytes of a file after a crash.
fn survivors(durable: &[u8], live: &[u8], rng: &mut Rng) -> Vec<u8> {
    if durable == live {
        return live.to_vec();
    }
    match rng.next() % 3 {
        0 => durable.to_vec(),
        1 => live.to_vec(),
        _ => {
            let len = if rng.next() & 1 == 0 { durable.len() } else { live.len() };
            let mut torn = Vec::with_capacity(len);
            while torn.len() < len {
                let from = if rng.next() & 1 == 0 { durable } else { live };
                let end = (torn.len() + SECTOR).min(len);
                // A sector that was never written is zero.
                torn.extend((torn.len()..end).map(|i| from.get(i).copied().unwrap_or(0)));
            }
            torn
        }
    }
}

/// Returns the names of the files in a folder, with their inodes.
fn names_in(folder: &Path) -> Names {
    let Ok(entries) = sorted(folder) else { return Names::new() };
    let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    let files = entries.into_iter().filter(is_file);
    files.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.ino()))).collect()
}

/// Returns the entries of a folder in the order of their names.
fn sorted(folder: &Path) -> io::Result<Vec<fs::DirEntry>> {
    let mut entries = fs::read_dir(folder)?.collect::<io::Result<Vec<_>>>()?;
    sort_by_key(&mut entries, fs::DirEntry::file_name);
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_after_a_crash_are_the_old_ones_the_new_ones_or_torn() {
        let (old, new) = (vec![1; 3 * SECTOR], vec![2; 4 * SECTOR]);
        let mut rng = Rng::from_seed(1);
        let (mut was_old, mut was_new, mut was_torn) = (0, 0, 0);
        for _ in 0..300 {
            match survivors(&old, &new, &mut rng) {
                bytes if bytes == old => was_old += 1,
                bytes if bytes == new => was_new += 1,
                bytes => {
                    assert!(bytes.len() == old.len() || bytes.len() == new.len());
                    assert!(
                        bytes.chunks(SECTOR).all(|sector| sector.iter().all(|b| *b == sector[0]))
                    );
                    was_torn += 1;
                }
            }
        }
        assert!(was_old > 50 && was_new > 50 && was_torn > 30, "{was_old} {was_new} {was_torn}");
        assert_eq!(survivors(&old, &old, &mut rng), old);
    }
}
