//! The number of CPUs that the process may use, and so the default number of Ps.
//!
//! Go's rule since 1.25: `min(affinity CPUs, max(2, ceil(cgroup quota / period)))`. The quota is
//! rounded up, because a P that idles at times is better than an unused part of a CPU. It counts as
//! 2 at least, so that one long time slice does not delay everything else. The affinity mask is
//! exact: on one CPU there is one P.
//!
//! A cgroup's limit also binds the cgroups below it, so every level from the process's own cgroup
//! up to the mount is read, and the smallest limit counts.
//!
//! Where the limit is found:
//!
//! | | line of /proc/self/cgroup | mount | files |
//! |---|---|---|---|
//! | v1 | controllers contain `cpu` | `cgroup` with option `cpu` | `cpu.cfs_{quota,period}_us` |
//! | v2 | `0::PATH` | `cgroup2` | `cpu.max` |
//!
//! A hybrid system has both; a controller belongs to one of the two, so the other has no such file.
//! What cannot be read or parsed is no limit: none of this may stop a program from starting.

use super::syscalls;
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

/// The largest number of Ps.
pub const MAX_PROCS: usize = 1024;

/// A quota counts as this many CPUs at least.
const MIN_QUOTA_CPUS: usize = 2;

/// Returns the number of threads of this process, including those that are not the runtime's;
/// `usize::MAX` if it cannot be found out.
pub fn num_threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(usize::MAX, Iterator::count)
}

/// Returns the number of CPUs that the process may run on: the affinity mask of its first thread.
///
/// Not the calling thread's mask: a thread that pinned itself must not reduce the number of Ps.
pub fn num_cpus() -> usize {
    match syscalls::sched_getaffinity(syscalls::getpid()) {
        Ok(mask) => mask.iter().map(|word| word.count_ones() as usize).sum::<usize>().max(1),
        // The kernel has more CPUs than the mask has bits (1024), or a sandbox forbids the call.
        Err(_) => std::thread::available_parallelism().map_or(1, |n| n.get()),
    }
}

/// Returns the default number of Ps.
///
/// Reads files: for the start of a runtime and for sysmon, not for a hot path.
pub fn default_procs() -> usize {
    procs_for(num_cpus(), cgroup_cpus(Path::new("/")))
}

/// Parses the value of the environment variable `var` as a number of Ps.
pub fn parse_procs(var: &str, value: &str) -> Result<usize, String> {
    match value.parse() {
        Ok(n) if (1..=MAX_PROCS).contains(&n) => Ok(n),
        _ => Err(format!(
            "{var}={}: expected a whole number from 1 to {MAX_PROCS}",
            value.escape_debug()
        )),
    }
}

fn procs_for(affinity: usize, quota: Option<usize>) -> usize {
    let quota = quota.map_or(MAX_PROCS, |cpus| cpus.max(MIN_QUOTA_CPUS));
    affinity.min(quota).clamp(1, MAX_PROCS)
}

/// Returns the smallest CPU limit of the cgroups that this process is in, rounded up to whole CPUs.
///
/// `root` stands for `/`; tests pass a directory with made-up files.
fn cgroup_cpus(root: &Path) -> Option<usize> {
    let cgroups = parse_cgroups(&read(&root.join("proc/self/cgroup"))?);
    let mounts = parse_mounts(&read(&root.join("proc/self/mountinfo"))?);
    let mut least = None;
    for cgroup in &cgroups {
        for mount in mounts.iter().filter(|mount| mount.version == cgroup.version) {
            for dir in levels(root, mount, cgroup) {
                if let Some(cpus) = limit(cgroup.version, &dir) {
                    least = Some(least.map_or(cpus, |least: usize| least.min(cpus)));
                }
            }
        }
    }
    least
}

/// Reads a file. Paths in it may contain bytes that are not UTF-8: such a level is not found and is
/// skipped.
fn read(path: &Path) -> Option<String> {
    Some(String::from_utf8_lossy(&fs::read(path).ok()?).into_owned())
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Version {
    V1,
    V2,
}

/// A line of /proc/self/cgroup that can limit CPU time.
#[derive(Debug, PartialEq)]
struct Cgroup {
    version: Version,
    /// From the hierarchy's root, or from the root of the cgroup namespace.
    path: PathBuf,
}

/// Parses lines `ID:CONTROLLERS:PATH`; the path is not escaped and may contain colons.
fn parse_cgroups(text: &str) -> Vec<Cgroup> {
    let cgroup = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let version = match (id, controllers) {
            ("0", "") => Version::V2,
            _ if controllers.split(',').any(|c| c == "cpu") => Version::V1,
            _ => return None,
        };
        Some(Cgroup { version, path: path.into() })
    };
    text.lines().filter_map(cgroup).collect()
}

/// A mounted cgroup hierarchy that can limit CPU time.
#[derive(Debug, PartialEq)]
struct Mount {
    version: Version,
    /// The cgroup that is mounted at `point`; not `/` in a container without a cgroup namespace.
    root: PathBuf,
    point: PathBuf,
}

/// Parses lines `ID PARENT DEVICE ROOT POINT OPTIONS [TAG…] - TYPE SOURCE OPTIONS`.
fn parse_mounts(text: &str) -> Vec<Mount> {
    let mount = |line: &str| {
        let mut fields = line.split(' ');
        let (root, point) = (fields.nth(3)?, fields.next()?);
        let mut fields = fields.skip_while(|&field| field != "-");
        let (kind, options) = (fields.nth(1)?, fields.nth(1)?);
        let version = match kind {
            "cgroup2" => Version::V2,
            "cgroup" if options.split(',').any(|o| o == "cpu") => Version::V1,
            _ => return None,
        };
        Some(Mount { version, root: unescape(root), point: unescape(point) })
    };
    text.lines().filter_map(mount).collect()
}

/// Decodes a field of mountinfo, which writes blank, tab, newline, `#` and backslash as a backslash
/// and three octal digits.
fn unescape(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        match bytes[at..] {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                at += 4;
            }
            _ => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    OsString::from_vec(out).into()
}

/// Returns the directories of the cgroup and of its ancestors, up to the mount point of `mount`.
///
/// The list is empty if the mount shows another part of the hierarchy. A directory that does not
/// exist (a container whose paths are the host's, a deleted cgroup) reads as no limit later.
fn levels(root: &Path, mount: &Mount, cgroup: &Cgroup) -> Vec<PathBuf> {
    let Ok(below) = cgroup.path.strip_prefix(&mount.root) else { return Vec::new() };
    // `..` leads out of the cgroup namespace, to a cgroup whose name is not visible here.
    if below.components().any(|part| part == Component::ParentDir) {
        return Vec::new();
    }
    let point = root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
    below.ancestors().map(|level| point.join(level)).collect()
}

/// Returns the limit that the files in this directory set.
fn limit(version: Version, dir: &Path) -> Option<usize> {
    match version {
        Version::V1 => parse_limit(&format!(
            "{} {}",
            read(&dir.join("cpu.cfs_quota_us"))?.trim(),
            read(&dir.join("cpu.cfs_period_us"))?.trim()
        )),
        Version::V2 => parse_limit(&read(&dir.join("cpu.max"))?),
    }
}

/// Parses `QUOTA PERIOD` to whole CPUs, rounded up. A quota of `max` (v2) or `-1` (v1) is no limit.
fn parse_limit(text: &str) -> Option<usize> {
    let mut fields = text.split_whitespace().map(|field| field.parse::<u64>().ok());
    let (quota, period) = (fields.next()??, fields.next()??);
    if quota == 0 || period == 0 {
        return None;
    }
    usize::try_from(quota.div_ceil(period)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A directory that stands for `/`; removed when dropped.
    struct Tree(PathBuf);

    impl Tree {
        fn new(files: &[(&str, &str)]) -> Tree {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let name = format!(
                "trefoil-cpus-{}-{}",
                std::process::id(),
                NEXT.fetch_add(1, Ordering::Relaxed)
            );
            let tree = Tree(std::env::temp_dir().join(name));
            for (path, text) in files {
                let path = tree.0.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            tree
        }

        fn cpus(&self) -> Option<usize> {
            cgroup_cpus(&self.0)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const V2_MOUNT: &str = "\
        22 1 0:5 / / rw shared:1 - ext4 /dev/vda rw\n\
        30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 master:2 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1_MOUNT: &str = "\
        31 22 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        32 22 0:28 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n";

    #[test]
    fn v2_quota_is_rounded_up() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/app\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/app/cpu.max", "250000 100000\n"),
        ]);
        assert_eq!(tree.cpus(), Some(3));
    }

    #[test]
    fn v2_quota_of_max_is_no_limit() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/app\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/app/cpu.max", "max 100000\n"),
        ]);
        assert_eq!(tree.cpus(), None);
    }

    #[test]
    fn the_smallest_limit_of_nested_cgroups_counts() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/a/b/c\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/cpu.max", "900000 100000\n"),
            ("sys/fs/cgroup/a/cpu.max", "400000 100000\n"),
            ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/a/b/c/cpu.max", "700000 100000\n"),
            ("sys/fs/cgroup/a/other/cpu.max", "100000 100000\n"),
        ]);
        assert_eq!(tree.cpus(), Some(4));
    }

    #[test]
    fn v1_quota_is_rounded_up() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "5:cpuset:/set\n4:cpu,cpuacct:/app\n"),
            ("proc/self/mountinfo", V1_MOUNT),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us", "150000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_period_us", "50000\n"),
        ]);
        assert_eq!(tree.cpus(), Some(3));
    }

    #[test]
    fn v1_limit_is_found_in_a_container_without_a_namespace() {
        // No cgroup namespace: the host's path, and a mount that starts at just that cgroup.
        let tree = Tree::new(&[
            ("proc/self/cgroup", "4:cpu,cpuacct:/docker/1f/inner\n"),
            (
                "proc/self/mountinfo",
                "31 22 0:27 /docker/1f /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
            ),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "500000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ]);
        assert_eq!(tree.cpus(), Some(5));
    }

    #[test]
    fn a_mount_of_another_part_of_the_hierarchy_is_skipped() {
        for mount_root in ["/docker/2e", "/docker/1", "/.."] {
            let mounts = format!("31 22 0:27 {mount_root} /cg rw - cgroup2 none rw\n");
            let tree = Tree::new(&[
                ("proc/self/cgroup", "0::/docker/1f\n"),
                ("proc/self/mountinfo", &mounts),
                ("cg/cpu.max", "100000 100000\n"),
            ]);
            assert_eq!(tree.cpus(), None, "{mount_root}");
        }
    }

    #[test]
    fn a_cgroup_outside_of_the_namespace_is_no_limit() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/../sibling\n"),
            ("proc/self/mountinfo", V2_MOUNT),
            ("sys/fs/cgroup/cpu.max", "100000 100000\n"),
            ("sys/fs/sibling/cpu.max", "100000 100000\n"),
        ]);
        assert_eq!(tree.cpus(), None);
    }

    #[test]
    fn hybrid_system_uses_the_hierarchy_with_the_controller() {
        let mounts =
            format!("{V1_MOUNT}40 22 0:40 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
        let tree = Tree::new(&[
            ("proc/self/cgroup", "4:cpu,cpuacct:/one\n1:name=systemd:/x\n0::/two\n"),
            ("proc/self/mountinfo", &mounts),
            ("sys/fs/cgroup/cpu,cpuacct/one/cpu.cfs_quota_us", "610000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/one/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/unified/two/cgroup.procs", "1\n"),
        ]);
        assert_eq!(tree.cpus(), Some(7));
    }

    #[test]
    fn escaped_mount_points_and_colons_in_paths_are_parsed() {
        let tree = Tree::new(&[
            ("proc/self/cgroup", "0::/a:b c (deleted)\n"),
            ("proc/self/mountinfo", "30 22 0:26 / /my\\040cg\\134x rw - cgroup2 cgroup2 rw\n"),
            ("my cg\\x/cpu.max", "800000 100000\n"),
        ]);
        assert_eq!(tree.cpus(), Some(8));
        assert_eq!(parse_cgroups("0::/a:b\n")[0].path, Path::new("/a:b"));
    }

    #[test]
    fn only_octal_escapes_are_decoded() {
        for (from, to) in [
            ("/a\\040b", "/a b"),
            ("/a\\", "/a\\"),
            ("\\04", "\\04"),
            ("\\999", "\\999"),
            ("\\777", "\\777"),
            ("", ""),
        ] {
            assert_eq!(unescape(from), Path::new(to), "{from}");
        }
        assert_eq!(unescape("\\303\\251"), Path::new("é"));
    }

    #[test]
    fn garbage_is_no_limit() {
        let lines = [
            "",
            ":",
            "::",
            ":::",
            "0::",
            "0::relative",
            "0",
            "\0\u{fffd}",
            "a b c d e f - cgroup2",
            "- - - - - - - cgroup2 cgroup2 cpu",
            "1 2 3 / / - cgroup2 x y",
            "1 2 3 \\0 \\ rw - cgroup cgroup cpu",
        ];
        for cgroup in lines {
            for mount in lines {
                let tree =
                    Tree::new(&[("proc/self/cgroup", cgroup), ("proc/self/mountinfo", mount)]);
                assert_eq!(tree.cpus(), None, "{cgroup:?} {mount:?}");
            }
        }
        for text in ["", "max", "5", "-1 100000", "0 100000", "100000 0", "1 x", "1e5 1", "- -"] {
            assert_eq!(parse_limit(text), None, "{text:?}");
        }
        assert_eq!(Tree::new(&[]).cpus(), None);
        assert_eq!(parse_limit(&format!("{} 1", u64::MAX)), Some(usize::MAX));
    }

    #[test]
    fn a_quota_counts_as_two_cpus_at_least() {
        assert_eq!(parse_limit("1 100000"), Some(1));
        assert_eq!(parse_limit("100000 100000"), Some(1));
        assert_eq!(parse_limit("100001 100000"), Some(2));

        assert_eq!(procs_for(8, None), 8);
        assert_eq!(procs_for(8, Some(1)), 2);
        assert_eq!(procs_for(8, Some(3)), 3);
        assert_eq!(procs_for(8, Some(20)), 8);
        assert_eq!(procs_for(1, Some(1)), 1);
        assert_eq!(procs_for(1, None), 1);
        assert_eq!(procs_for(0, None), 1);
        assert_eq!(procs_for(5000, None), MAX_PROCS);
    }

    #[test]
    fn default_procs_is_between_one_and_num_cpus() {
        assert!((1..=num_cpus()).contains(&default_procs()));
    }

    #[test]
    fn parse_procs_accepts_one_to_max_procs() {
        assert_eq!(parse_procs("TREFOIL_PROCS", "1"), Ok(1));
        assert_eq!(parse_procs("TREFOIL_PROCS", "1024"), Ok(1024));
        assert_eq!(
            parse_procs("TREFOIL_PROCS", "abc").unwrap_err(),
            "TREFOIL_PROCS=abc: expected a whole number from 1 to 1024"
        );
        for bad in ["0", "1025", "-1", "", " 4", "4.5", "4\n", "99999999999999999999999"] {
            let error = parse_procs("GOMAXPROCS", bad).unwrap_err();
            assert!(error.starts_with("GOMAXPROCS="), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }
}
