//! The files that a process has loaded: its program and its libraries.
//!
//! A core file, or a process of another user, may name any file any number of times. So each file is
//! read once, however its path is spelled, all together up to a limit of bytes, and only what is
//! loaded stays in memory.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use trefoil_base::symbols::Elf;

use super::images::{Image, images};
use super::memory::{Mapping, Process, read_elf};

/// Bytes of all programs and libraries of a process that are read at most.
const FILES_BYTES_MAX: u64 = 8 << 30;

/// The files that a process has loaded.
#[derive(Default)]
pub(super) struct LoadedFiles {
    pub(super) files: Vec<LoadedFile>,
    /// Those that do not exist any more.
    pub(super) gone: Vec<PathBuf>,
    /// Those that were not read because of [`FILES_BYTES_MAX`].
    pub(super) too_large: Vec<PathBuf>,
    /// The bytes of all files that are loaded, or were at an update before.
    kept: HashMap<FileVersion, &'static [u8]>,
}

/// A file that is loaded: the program or a library.
pub(super) struct LoadedFile {
    pub(super) path: PathBuf,
    /// Kept until the command ends.
    pub(super) bytes: &'static [u8],
    pub(super) elf: Elf<'static>,
    /// Where it is loaded: at least one.
    pub(super) images: Vec<Image>,
}

/// A file at a moment: the same for all of its paths, until the file changes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct FileVersion {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds of the last change.
    changed: (i64, i64),
}

/// A file with its mappings, in the order of addresses.
struct MappedFile<'a> {
    path: &'a Path,
    version: FileVersion,
    mappings: Vec<&'a Mapping>,
}

impl LoadedFiles {
    pub(super) fn read(process: &Process) -> LoadedFiles {
        let mut this = LoadedFiles::default();
        this.update(process);
        this
    }

    /// Finds the files that the process has loaded now. Reads those that are new or have changed.
    pub(super) fn update(&mut self, process: &Process) {
        self.update_up_to(process, FILES_BYTES_MAX);
    }

    /// As `update`, with files of up to `bytes_max` bytes in all.
    fn update_up_to(&mut self, process: &Process, bytes_max: u64) {
        let kept_bytes: usize = self.kept.values().map(|bytes| bytes.len()).sum();
        let mut bytes_left = bytes_max.saturating_sub(kept_bytes as u64);
        self.files.clear();
        self.gone.clear();
        self.too_large.clear();
        let mut mapped = mapped_files(process, &mut self.gone);
        // A file without executable mappings is hardly a program.
        mapped.sort_by_key(|file| !file.mappings.iter().any(|mapping| mapping.is_executable));
        for MappedFile { path, version, mappings } in mapped {
            if let Some(&bytes) = self.kept.get(&version) {
                self.files.extend(LoadedFile::new(path, bytes, &mappings));
                continue;
            }
            match read_elf(path, bytes_left) {
                Ok(bytes) => {
                    bytes_left -= bytes.len() as u64;
                    if !is_loaded(&bytes, &mappings) {
                        continue;
                    }
                    let bytes: &'static [u8] = bytes.leak();
                    self.kept.insert(version, bytes);
                    self.files.extend(LoadedFile::new(path, bytes, &mappings));
                }
                Err(error) if error.kind() == ErrorKind::FileTooLarge => {
                    self.too_large.push(path.into());
                }
                // It is data, or cannot be read.
                Err(_) => {}
            }
        }
    }
}

impl LoadedFile {
    /// Returns None if the file is no program or library, or is not loaded.
    fn new(path: &Path, bytes: &'static [u8], mappings: &[&Mapping]) -> Option<LoadedFile> {
        let elf = Elf::parse(bytes)?;
        let images = images(&elf, mappings);
        (!images.is_empty()).then(|| LoadedFile { path: path.into(), bytes, elf, images })
    }
}

impl FileVersion {
    fn new(metadata: &Metadata) -> FileVersion {
        FileVersion {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            changed: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// Returns whether the file is a program or a library that is loaded.
fn is_loaded(bytes: &[u8], mappings: &[&Mapping]) -> bool {
    Elf::parse(bytes).is_some_and(|elf| !images(&elf, mappings).is_empty())
}

/// Returns the files that are mapped, each once, in the order of their first mappings. Adds those
/// that do not exist to `gone`.
fn mapped_files<'a>(process: &'a Process, gone: &mut Vec<PathBuf>) -> Vec<MappedFile<'a>> {
    let mut files: Vec<MappedFile<'a>> = Vec::new();
    let mut of_path: HashMap<&Path, Option<usize>> = HashMap::new();
    let mut of_version: HashMap<FileVersion, usize> = HashMap::new();
    for mapping in &process.mappings {
        let path = &*mapping.path;
        let index = *of_path.entry(path).or_insert_with(|| match path.metadata() {
            Ok(metadata) => {
                let version = FileVersion::new(&metadata);
                let index = *of_version.entry(version).or_insert(files.len());
                if index == files.len() {
                    files.push(MappedFile { path, version, mappings: Vec::new() });
                }
                Some(index)
            }
            Err(_) => {
                gone.push(path.into());
                None
            }
        });
        if let Some(index) = index {
            files[index].mappings.push(mapping);
        }
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// Returns this process, each mapping of its program named by the path that `spell` returns.
    fn own_process(spell: impl Fn(usize) -> PathBuf) -> Process {
        let mut process = Process::open(&std::process::id().to_string()).unwrap();
        process.mappings.retain(|mapping| mapping.path.ends_with("exe"));
        assert!(process.mappings.len() > 2, "the program has few mappings");
        for (i, mapping) in process.mappings.iter_mut().enumerate() {
            mapping.path = spell(i);
        }
        process
    }

    fn read_up_to(process: &Process, bytes_max: u64) -> LoadedFiles {
        let mut loaded = LoadedFiles::default();
        loaded.update_up_to(process, bytes_max);
        loaded
    }

    /// Returns a path at which no file is.
    fn temporary(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("trefoil-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_file_with_two_paths_is_read_once() {
        let link = temporary("link");
        symlink(std::env::current_exe().unwrap(), &link).unwrap();
        let paths = [PathBuf::from("/proc/self/exe"), "/proc/./self/exe".into(), link.clone()];
        let process = own_process(|i| paths[i % paths.len()].clone());
        let bytes = paths[0].metadata().unwrap().len();
        // A second reading would exceed the limit.
        let loaded = read_up_to(&process, bytes);
        std::fs::remove_file(&link).unwrap();
        assert_eq!((loaded.files.len(), loaded.too_large.len()), (1, 0));
        assert_eq!(loaded.files[0].images.len(), 1);
        assert_eq!(loaded.files[0].bytes.len() as u64, bytes);
    }

    #[test]
    fn files_that_exceed_the_limit_together_are_not_read() {
        let copy = temporary("copy");
        std::fs::copy("/proc/self/exe", &copy).unwrap();
        let bytes = copy.metadata().unwrap().len();
        let mut process = own_process(|_| "/proc/self/exe".into());
        let copied = own_process(|_| copy.clone());
        process.mappings.extend(copied.mappings);
        let lengths = |bytes_max| {
            let loaded = read_up_to(&process, bytes_max);
            (loaded.files.len(), loaded.too_large.len())
        };
        let found = [lengths(2 * bytes), lengths(2 * bytes - 1), lengths(bytes - 1)];
        std::fs::remove_file(&copy).unwrap();
        assert_eq!(found, [(2, 0), (1, 1), (0, 2)]);
    }

    #[test]
    fn a_file_that_is_not_loaded_is_not_kept() {
        let mut process = own_process(|_| "/proc/self/exe".into());
        process.mappings.retain(|mapping| !mapping.is_executable);
        process.mappings.iter_mut().for_each(|mapping| mapping.offset += 1 << 40);
        let loaded = LoadedFiles::read(&process);
        assert!(loaded.files.is_empty() && loaded.too_large.is_empty());
    }

    #[test]
    fn a_file_that_has_not_changed_is_read_once() {
        let process = own_process(|_| "/proc/self/exe".into());
        let mut loaded = LoadedFiles::read(&process);
        let bytes = loaded.files[0].bytes.as_ptr();
        loaded.update(&process);
        assert_eq!(loaded.files.len(), 1);
        assert_eq!(loaded.files[0].bytes.as_ptr(), bytes);
    }

    #[test]
    fn a_file_that_does_not_exist_is_gone() {
        let process = own_process(|_| temporary("gone"));
        let loaded = LoadedFiles::read(&process);
        assert!(loaded.files.is_empty());
        assert_eq!(loaded.gone, [temporary("gone")]);
    }
}
