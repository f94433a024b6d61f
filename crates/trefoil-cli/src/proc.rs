//! What the process costs, as the kernel counts it: memory, threads, CPU time.
//!
//! Read from /proc. Where a figure cannot be read it is 0: it is shown, nothing hangs on it.

use std::fs;
use std::path::Path;
use std::time::Duration;

/// The `Name: value` lines of /proc/self/status that scenes show.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Status {
    /// Resident memory in bytes, with the page tables that map it.
    pub(crate) memory: u64,
    /// OS threads.
    pub(crate) threads: u64,
}

/// Reads the status of this process.
pub(crate) fn status() -> Status {
    parse_status(&fs::read_to_string("/proc/self/status").unwrap_or_default())
}

fn parse_status(text: &str) -> Status {
    Status {
        memory: (field(text, "VmRSS") + field(text, "VmPTE")) * 1024,
        threads: field(text, "Threads"),
    }
}

/// The first number of the line `name:`, 0 if there is none.
fn field(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

/// Bytes that the process may still take: what the machine has, or its cgroup if that is less.
///
/// Looks at the cgroup only where a container sees its own, which is where it matters.
pub(crate) fn memory_available() -> u64 {
    let machine = field(&fs::read_to_string("/proc/meminfo").unwrap_or_default(), "MemAvailable");
    let cgroup = [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ]
    .into_iter()
    .filter_map(|(limit, used)| Some(number(limit)?.saturating_sub(number(used)?)));
    cgroup.chain([machine * 1024]).min().unwrap_or(0)
}

fn number(cgroup_file: &str) -> Option<u64> {
    let path = Path::new("/sys/fs/cgroup").join(cgroup_file);
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Raises the limit of open descriptors as far as it goes without root; returns it.
pub(crate) fn allow_files() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads and writes one rlimit of ours.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return 0;
        }
        let before = std::mem::replace(&mut limit.rlim_cur, limit.rlim_max);
        if libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) != 0 {
            return before;
        }
    }
    limit.rlim_cur
}

/// Clock ticks of /proc/self/stat in a second: fixed on x86_64.
const TICKS: u64 = 100;

/// CPU time of the process, with that of threads that have ended.
pub(crate) fn cpu_time() -> Duration {
    parse_cpu_time(&fs::read_to_string("/proc/self/stat").unwrap_or_default())
}

/// User and system time are fields 14 and 15; field 2, the name, may hold blanks and brackets.
fn parse_cpu_time(stat: &str) -> Duration {
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2);
    let sum: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(sum * 1000 / TICKS)
}

/// CPU time of one thread.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ThreadTime {
    pub(crate) id: u64,
    pub(crate) cpu: Duration,
}

/// The CPU time of each thread that is alive, in the order of their ids.
pub(crate) fn thread_times() -> Vec<ThreadTime> {
    let entries = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut times: Vec<_> = entries
        .filter_map(|entry| {
            let id = entry.file_name().to_str()?.parse().ok()?;
            // Nanoseconds on CPU, nanoseconds in the queue, slices.
            let text = fs::read_to_string(entry.path().join("schedstat")).ok()?;
            let ns = text.split_whitespace().next()?.parse().ok()?;
            Some(ThreadTime { id, cpu: Duration::from_nanos(ns) })
        })
        .collect();
    times.sort_by_key(|time| time.id);
    times
}

/// What each thread used since `before`; threads that used nothing are left out.
pub(crate) fn used_since(before: &[ThreadTime], now: Vec<ThreadTime>) -> Vec<ThreadTime> {
    now.into_iter()
        .filter_map(|time| {
            let old = before.iter().find(|old| old.id == time.id).map_or(Duration::ZERO, |o| o.cpu);
            let cpu = time.cpu.saturating_sub(old);
            (!cpu.is_zero()).then_some(ThreadTime { id: time.id, cpu })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_this_process() {
        let status = status();
        assert!(status.memory > 0 && status.threads > 0);
        assert!(memory_available() > 0);
        assert!(!thread_times().is_empty());
    }

    #[test]
    fn parses() {
        let text = "VmRSS:\t    100 kB\nVmPTE:\t 4 kB\nThreads:\t3\n";
        assert_eq!(parse_status(text), Status { memory: 104 * 1024, threads: 3 });
        assert_eq!(parse_status("VmRSS:\nThreads: many\nVm"), Status::default());
    }

    #[test]
    fn parses_cpu_time() {
        let stat = "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0";
        assert_eq!(parse_cpu_time(stat), Duration::from_secs(3));
        assert_eq!(parse_cpu_time(""), Duration::ZERO);
    }

    #[test]
    fn differences() {
        let time = |id, ms| ThreadTime { id, cpu: Duration::from_millis(ms) };
        let used = used_since(&[time(1, 5), time(2, 5)], vec![time(1, 9), time(2, 5), time(3, 1)]);
        assert_eq!(used, [time(1, 4), time(3, 1)]);
    }
}
