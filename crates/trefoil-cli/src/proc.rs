//! Memory, threads and CPU time of the process, as the kernel counts them.
//!
//! Read from /proc. A figure that cannot be read is 0.
//!
//! The measure of busy threads does not depend on other processes: a thread counts while it is on a
//! CPU *or waits for one*. So two busy threads count as two, also on one CPU.

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
/// Reads the cgroup only where a container sees its own.
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
    // SAFETY: reads and writes one local rlimit.
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

/// CPU time of the process, with that of threads that have ended.
pub(crate) fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one local timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Time of one thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct ThreadTime {
    pub(crate) id: u64,
    pub(crate) cpu: Duration,
    /// Waiting for a CPU.
    pub(crate) queued: Duration,
    /// How often it got a CPU.
    pub(crate) slices: u64,
}

impl ThreadTime {
    /// Returns the mean time that it waited for a CPU.
    pub(crate) fn mean_wait(&self) -> Duration {
        self.queued.div_f64(self.slices.max(1) as f64)
    }
}

/// The times of each thread that is alive, in the order of their ids.
pub(crate) fn thread_times() -> Vec<ThreadTime> {
    let mut times: Vec<_> = each_thread("schedstat").filter_map(parse_time).collect();
    times.sort_by_key(|time| time.id);
    times
}

/// Parses nanoseconds on CPU, nanoseconds waiting, number of slices.
fn parse_time((id, text): (u64, String)) -> Option<ThreadTime> {
    let mut fields = text.split_whitespace().map(|field| field.parse().ok());
    let mut next = || fields.next()?;
    let [cpu, queued] = [next()?, next()?].map(Duration::from_nanos);
    Some(ThreadTime { id, cpu, queued, slices: next()? })
}

/// What each thread used since `before`; threads that used nothing are left out.
pub(crate) fn used_since(before: &[ThreadTime], now: Vec<ThreadTime>) -> Vec<ThreadTime> {
    now.into_iter()
        .filter_map(|time| {
            let Some(old) = before.iter().find(|old| old.id == time.id) else { return Some(time) };
            let cpu = time.cpu.saturating_sub(old.cpu);
            let queued = time.queued.saturating_sub(old.queued);
            let slices = time.slices.saturating_sub(old.slices);
            (!cpu.is_zero()).then_some(ThreadTime { id: time.id, cpu, queued, slices })
        })
        .collect()
}

/// Returns the number of threads on a CPU or waiting for one, without the caller.
pub(crate) fn busy_threads() -> usize {
    // SAFETY: no arguments, touches no memory.
    let own = unsafe { libc::gettid() } as u64;
    each_thread("stat").filter(|(id, stat)| *id != own && is_runnable(stat)).count()
}

fn is_runnable(stat: &str) -> bool {
    state(stat) == Some('R')
}

/// Returns the state in a file `stat`. It follows the name, which may contain blanks and brackets.
pub(crate) fn state(stat: &str) -> Option<char> {
    stat.rsplit(')').next()?.trim_start().chars().next()
}

/// A file of each thread that is alive, with the thread's id.
fn each_thread(file: &str) -> impl Iterator<Item = (u64, String)> {
    let entries = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let id = entry.file_name().to_str()?.parse().ok()?;
        Some((id, fs::read_to_string(entry.path().join(file)).ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_this_process_are_not_zero() {
        let status = status();
        assert!(status.memory > 0 && status.threads > 0);
        assert!(memory_available() > 0);
        assert!(!thread_times().is_empty());
    }

    #[test]
    fn status_lines_are_parsed() {
        let text = "VmRSS:\t    100 kB\nVmPTE:\t 4 kB\nThreads:\t3\n";
        assert_eq!(parse_status(text), Status { memory: 104 * 1024, threads: 3 });
        assert_eq!(parse_status("VmRSS:\nThreads: many\nVm"), Status::default());
    }

    #[test]
    fn thread_files_are_parsed() {
        assert!(is_runnable("7 (a) b) R 1 2 3"));
        assert!(!is_runnable("7 (R) S 1 2 3") && !is_runnable(""));
        let [cpu, queued] = [5, 8].map(Duration::from_nanos);
        let time = ThreadTime { id: 1, cpu, queued, slices: 2 };
        assert_eq!(parse_time((1, "5 8 2".into())), Some(time));
        assert_eq!(time.mean_wait(), Duration::from_nanos(4));
        assert_eq!(parse_time((1, "5".into())), None);
    }

    #[test]
    fn used_since_omits_idle_threads() {
        let time = |id, ms| {
            let cpu = Duration::from_millis(ms);
            ThreadTime { id, cpu, queued: 2 * cpu, slices: 3 * ms }
        };
        let used = used_since(&[time(1, 5), time(2, 5)], vec![time(1, 9), time(2, 5), time(3, 1)]);
        assert_eq!(used, [time(1, 4), time(3, 1)]);
    }
}
