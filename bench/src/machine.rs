//! The machine that the run happens on: its description, and how busy it is.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// The kernel counts CPU time in ticks of 1/100 s (USER_HZ, fixed on x86_64).
const TICK: Duration = Duration::from_millis(10);

pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub kernel: String,
    pub memory_gib: u64,
    pub free_gib: u64,
}

impl Machine {
    pub fn read() -> Result<Machine> {
        let cpus = fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
        let cpu = cpus.lines().find_map(|line| line.strip_prefix("model name"));
        let cpu = cpu.map_or("unknown CPU", |rest| rest.trim_start_matches([' ', '\t', ':']));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("osrelease")?;
        let memory = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
        let gib = |name: &str| -> Option<u64> {
            let line = memory.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
            Some(kib >> 20)
        };
        Ok(Machine {
            cpu: cpu.to_owned(),
            cores: cores(),
            kernel: kernel.trim().to_owned(),
            memory_gib: gib("MemTotal:").context("MemTotal")?,
            free_gib: gib("MemAvailable:").context("MemAvailable")?,
        })
    }
}

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

pub fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(name).is_file())
}

/// CPU time that the whole machine has spent on anything since it started, time stolen by the
/// hypervisor included.
pub fn busy() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/stat").context("/proc/stat")?;
    let line = stat.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<u32> = line.split_whitespace().skip(1).flat_map(str::parse).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal: all but the two idle ones.
    let busy = [0, 1, 2, 5, 6, 7].iter().filter_map(|&i| ticks.get(i)).sum::<u32>();
    Ok(TICK * busy)
}

/// Waits until the machine has been idle for a moment, for at most `limit`.
pub fn wait_until_idle(limit: Duration) -> Result<()> {
    const MOMENT: Duration = Duration::from_millis(300);
    /// Ticks of one core that count as idle in that moment.
    const IDLE: Duration = Duration::from_millis(30);
    let start = Instant::now();
    while start.elapsed() < limit {
        let before = busy()?;
        sleep(MOMENT);
        if busy()?.saturating_sub(before) <= IDLE {
            break;
        }
    }
    Ok(())
}
