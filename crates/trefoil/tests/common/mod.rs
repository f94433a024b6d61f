//! What the integration tests share: a watchdog, child processes, and measurements of the process.
//!
//! Rules that keep the tests reliable on two busy cores:
//! - Every wait has a distant deadline: a hang fails with a name, a slow machine does not fail.
//! - A goroutine that must keep its P waits with [`pause`], which the runtime does not notice.
//! - A test that measures the whole process (threads, memory, stderr, exit code) does so in a
//!   child process, see [`child_test`].

// Every test file compiles its own copy and uses its own part of it.
#![allow(dead_code, unused_imports, unused_macros)]

pub(crate) mod crowd;
pub(crate) mod raw;

use std::collections::BTreeSet;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

/// After this time a test counts as hung. No test needs a tenth of it. (For aarch64 the tests run
/// in an emulator, which takes ten times as long or more.)
pub(crate) const TOO_LONG: Duration =
    Duration::from_secs(if cfg!(target_arch = "aarch64") { 300 } else { 60 });

/// Set in a child: the name of the test that it runs.
const CHILD: &str = "TREFOIL_TEST_CHILD";
/// Set by CI: loops run as often in debug builds as in release builds, see [`rounds`].
const LONG: &str = "TREFOIL_TEST_LONG";
/// Set by hand: a test that hangs prints the stacks of all threads before it aborts.
const GDB: &str = "TREFOIL_TEST_GDB";

/// Aborts the process unless it is dropped within its limit.
#[must_use]
pub(crate) struct Watchdog {
    _alive: Sender<()>,
}

/// Watches the test that calls it, for [`TOO_LONG`].
pub(crate) fn watchdog() -> Watchdog {
    watchdog_for(TOO_LONG)
}

/// As [`watchdog`], with another limit.
pub(crate) fn watchdog_for(limit: Duration) -> Watchdog {
    let name = match std::env::var(CHILD) {
        Ok(name) => format!("{name} (child)"),
        Err(_) => std::thread::current().name().unwrap_or("a test").to_owned(),
    };
    let (alive, gone) = channel::<()>();
    std::thread::Builder::new()
        .name("watchdog".into())
        .spawn(move || {
            if gone.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                report_hang(&name, limit);
            }
        })
        .expect("a thread for the watchdog");
    Watchdog { _alive: alive }
}

/// Prints the threads of this process and aborts.
fn report_hang(name: &str, limit: Duration) -> ! {
    // `mark`, because this thread inherited libtest's capture of output, which an abort discards.
    mark(&format!("\nHANG: {name} did not end within {limit:?}. Threads:"));
    for (tid, comm) in tasks() {
        let wchan = std::fs::read_to_string(format!("/proc/self/task/{tid}/wchan"));
        let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat"));
        let state = stat.as_deref().unwrap_or("").rsplit(')').next().unwrap_or("").trim();
        let state = state.get(..1).unwrap_or("?");
        mark(&format!("  {tid} {comm} {state} {}", wchan.as_deref().unwrap_or("")));
    }
    if std::env::var_os(GDB).is_some() {
        let pid = std::process::id().to_string();
        let _ = Command::new("gdb")
            .args(["-batch", "-p", &pid, "-ex", "thread apply all bt 30"])
            .stdin(Stdio::null())
            .status();
    } else {
        mark(&format!("Run it again with {GDB}=1 to see their stacks (needs gdb)."));
    }
    std::process::abort();
}

/// Pins the calling thread, and the threads that it starts, to the first CPU that it may use.
pub(crate) fn run_on_one_cpu() {
    // SAFETY: plain old data; the mask of this thread.
    unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&allowed), &raw mut allowed);
        let first = (0..libc::CPU_SETSIZE as usize).find(|&cpu| libc::CPU_ISSET(cpu, &allowed));
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(first.unwrap(), &mut one);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&one), &raw const one), 0);
    }
}

/// Processes that compute until they are dropped, or this process ends. They inherit the caller's
/// CPUs.
pub(crate) struct BusyProcesses(Vec<libc::pid_t>);

impl BusyProcesses {
    pub(crate) fn start(count: usize) -> Self {
        let start = |_| {
            // SAFETY: the child touches nothing.
            match unsafe { libc::fork() } {
                0 => {
                    // SAFETY: as above.
                    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                    loop {
                        std::hint::spin_loop();
                    }
                }
                pid => pid,
            }
        };
        BusyProcesses((0..count).map(start).collect())
    }
}

impl Drop for BusyProcesses {
    fn drop(&mut self) {
        for &pid in &self.0 {
            // SAFETY: our own child, not waited for yet.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// Lets the OS run another thread without telling the runtime: the goroutine keeps its P.
pub(crate) fn pause() {
    // A raw system call: the libc function might become a scheduling point.
    // SAFETY: sched_yield has no arguments and touches no memory.
    unsafe { libc::syscall(libc::SYS_sched_yield) };
}

/// Waits for `done` and keeps the P meanwhile. Panics after half of [`TOO_LONG`].
#[track_caller]
pub(crate) fn hold_until(what: &str, mut done: impl FnMut() -> bool) {
    let _guard = trefoil::no_preempt();
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TOO_LONG / 2, "waited too long for {what}");
        pause();
    }
}

/// As [`hold_until`], and keeps the P until the goroutine ends: its time slice has expired, so that
/// otherwise it would be preempted at the end of the wait.
#[track_caller]
pub(crate) fn hold_to_the_end(what: &str, done: impl FnMut() -> bool) {
    std::mem::forget(trefoil::no_preempt());
    hold_until(what, done);
}

/// Waits for `done` and lets other goroutines run meanwhile. Panics after half of [`TOO_LONG`].
#[track_caller]
pub(crate) fn yield_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    let mut turns = 0u32;
    while !done() {
        trefoil::yield_now();
        turns += 1;
        // If no other goroutine is runnable, `yield_now` returns at once: leave the CPU to the
        // other tests, though not in every turn, because on a busy machine that takes long.
        if turns.is_multiple_of(64) {
            assert!(start.elapsed() < TOO_LONG / 2, "waited too long for {what}");
            pause();
        }
    }
}

/// Runs `attempt` up to five times until it succeeds.
///
/// For assertions that one bad moment may disturb: if the OS does not run a thread for 10 ms, its
/// goroutine's time slice has expired. A broken scheduler fails every time. Failed attempts are
/// printed, because a test that often needs a second attempt is about to break.
#[track_caller]
pub(crate) fn once_in_five(mut attempt: impl FnMut() -> Result<(), String>) {
    let place = std::panic::Location::caller();
    let mut errors = Vec::new();
    for n in 1..=5 {
        match attempt() {
            Ok(()) => return,
            Err(e) => {
                mark(&format!("{place}: attempt {n} of 5: {e}"));
                errors.push(e);
            }
        }
    }
    panic!("all five attempts failed:\n{}", errors.join("\n"));
}

/// Returns an error with both values if they differ.
pub(crate) fn same<T: PartialEq + std::fmt::Debug>(found: T, expected: T) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{found:?} instead of {expected:?}")) }
}

/// Computes for about `time`, without a call of the runtime.
pub(crate) fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Computes until `stop` is set, without a call of the runtime.
pub(crate) fn hog(stop: &AtomicBool) {
    while !stop.load(Ordering::SeqCst) {
        std::hint::spin_loop();
    }
}

/// Starts `n` goroutines that run [`hog`].
pub(crate) fn hogs(n: usize, stop: &Arc<AtomicBool>) -> Vec<trefoil::JoinHandle<()>> {
    let one = |_| {
        let stop = stop.clone();
        trefoil::go(move || hog(&stop))
    };
    (0..n).map(one).collect()
}

/// Returns how often a loop runs, or how much it does: `long` in release builds and if [`LONG`] is
/// set, otherwise `brief`.
pub(crate) fn rounds<T>(brief: T, long: T) -> T {
    let is_long = !cfg!(debug_assertions) || std::env::var_os(LONG).is_some();
    if is_long { long } else { brief }
}

/// Returns the median.
pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Sleeps until `n` deadlines, one per millisecond. Returns how late each wake-up was. Afterwards
/// asserts that a ticker of 1 ms ticks 20 times within seconds.
pub(crate) fn wake_up_delays(n: u32) -> Vec<Duration> {
    let start = Instant::now();
    let mut late = Vec::new();
    for i in 1..=n {
        let due = start + i * MS;
        trefoil::time::sleep_until(due);
        late.push(due.elapsed());
    }
    // A ticker drops the ticks that are not received in time.
    let (ticker, start) = (trefoil::time::Ticker::new(MS), Instant::now());
    for _ in 0..20 {
        ticker.chan().recv().unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(5), "20 ticks took {:?}", start.elapsed());
    late
}

/// One millisecond.
pub(crate) const MS: Duration = Duration::from_millis(1);

/// Returns a flag that goroutines can share. It is not set.
pub(crate) fn flag() -> Arc<AtomicBool> {
    Arc::default()
}

/// Returns a runtime with `procs` Ps.
pub(crate) fn runtime(procs: usize) -> trefoil::Runtime {
    trefoil::Runtime::builder().procs(procs).build().unwrap()
}

/// Joins all handles and returns the results in the same order.
pub(crate) fn join_all<T>(handles: impl IntoIterator<Item = trefoil::JoinHandle<T>>) -> Vec<T> {
    let handles: Vec<_> = handles.into_iter().collect();
    handles.into_iter().map(|h| h.join().unwrap()).collect()
}

/// Returns the id of the calling thread.
pub(crate) fn tid() -> i32 {
    // SAFETY: no arguments, touches no memory.
    unsafe { libc::gettid() }
}

/// Returns id and name of each thread of this process.
pub(crate) fn tasks() -> Vec<(i32, String)> {
    let Ok(dir) = std::fs::read_dir("/proc/self/task") else { return Vec::new() };
    dir.filter_map(|entry| {
        let tid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let comm = std::fs::read_to_string(format!("/proc/self/task/{tid}/comm")).ok()?;
        Some((tid, comm.trim_end().to_owned()))
    })
    .collect()
}

/// Returns the thread ids of the Ms of all runtimes of the process. For children.
pub(crate) fn ms() -> BTreeSet<i32> {
    tasks().into_iter().filter(|(_, c)| c.starts_with("trefoil-m")).map(|(tid, _)| tid).collect()
}

/// Reads a number from a file of lines `name: number …`, such as /proc/self/status.
pub(crate) fn proc_number(file: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("{file} has no {name}"))
}

/// Returns the bytes in a page of this kernel.
pub(crate) fn page() -> usize {
    // SAFETY: it only reads the auxiliary vector, which always has this entry.
    unsafe { libc::getauxval(libc::AT_PAGESZ) as usize }
}

/// Returns the resident memory of this process in bytes.
pub(crate) fn rss() -> u64 {
    proc_number("/proc/self/status", "VmRSS") << 10
}

/// Raises the soft limit of open descriptors to the hard limit and returns it.
pub(crate) fn raise_fd_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads and writes our own struct.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
    }
    limit.rlim_cur
}

/// Returns the CPU time that this process has used.
pub(crate) fn cpu_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec, ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// Returns the CPUs on which the first thread of this process may run.
pub(crate) fn cpus() -> Vec<usize> {
    // SAFETY: plain bits, all of them written or zero.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let pid = libc::getpid();
        assert_eq!(libc::sched_getaffinity(pid, size_of_val(&set), &mut set), 0);
        (0..8 * size_of_val(&set)).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect()
    }
}

/// Restricts the first thread of this process to these CPUs. For children.
pub(crate) fn run_on(cpus: &[usize]) {
    // SAFETY: plain bits; the numbers come from [`cpus`].
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter().for_each(|&cpu| libc::CPU_SET(cpu, &mut set));
        assert_eq!(libc::sched_setaffinity(libc::getpid(), size_of_val(&set), &set), 0);
    }
}

/// Splits a test into two processes: the test starts this binary again, for itself alone, and the
/// child runs the rest of the function.
///
/// ```text
/// #[test]
/// fn waiting_needs_no_threads() {
///     child_test!();                      // The parent: runs the child, which must succeed.
///     …                                   // The child.
/// }
///
/// #[test]
/// fn a_fatal_error_exits_with_2() {
///     child_test!(|child| {               // The parent: `child` is a `&Child`.
///         let stderr = child.env("TREFOIL_PROCS", "1").fail(2);
///         assert!(stderr.contains("fatal error"));
///     });
///     …                                   // The child.
/// }
/// ```
///
/// It comes before anything that the test does: in the parent it returns from the function. The
/// child runs the function that contains the macro, so that no name has to be given. Both processes
/// are watched: the child for [`TOO_LONG`], or for `limit` in
/// `child_test!(limit = duration, |child| …)`; the parent a little longer for each run of the
/// child, so that it is the child that reports a hang.
macro_rules! child_test {
    () => {
        $crate::common::child_test!(|child| child.succeed())
    };
    (limit = $limit:expr, $parent:expr $(,)?) => {
        let limit: std::time::Duration = $limit;
        if !$crate::common::in_child() {
            let child = $crate::common::Child::of($crate::common::test_name!()).limit(limit);
            $crate::common::run_parent(&child, $parent);
            return;
        }
        let _watchdog = $crate::common::watchdog_for(limit);
    };
    ($parent:expr $(,)?) => {
        $crate::common::child_test!(limit = $crate::common::TOO_LONG, $parent)
    };
}

/// Expands to the name by which libtest knows the function that contains the macro, closures left
/// out: `module::function`.
macro_rules! test_name {
    () => {{
        fn here() {}
        $crate::common::name_of_test(std::any::type_name_of_val(&here))
    }};
}

pub(crate) use {child_test, test_name};

/// Returns `module::function` for the path of [`test_name`]'s inner function,
/// `crate::module::function::here`.
pub(crate) fn name_of_test(path: &'static str) -> &'static str {
    let inner = path.split_once("::{{closure}}").map(|(function, _)| function);
    let function = inner.or_else(|| path.strip_suffix("::here")).expect("the path of `here`");
    function.split_once("::").expect("a path that begins with the crate").1
}

/// Fixes the type of the parent's closure in [`child_test`].
pub(crate) fn run_parent<T>(child: &Child, parent: impl FnOnce(&Child) -> T) {
    parent(child);
}

/// Returns whether this process is a [`Child`].
pub(crate) fn in_child() -> bool {
    let child = std::env::var_os(CHILD).is_some();
    if child && std::env::var("TREFOIL_DEBUG").is_ok_and(|debug| debug.contains("schedtrace")) {
        drop(tracer());
    }
    child
}

/// Set by hand or by CI if this binary runs in an emulator: the emulator's command.
const EMULATED: &str = "TREFOIL_EMULATED";

/// Returns whether this binary runs in an emulator, which translates system calls imperfectly and
/// is slow.
pub(crate) fn is_emulated() -> bool {
    std::env::var_os(EMULATED).is_some()
}

/// Returns from a test that an emulator cannot pass, after a line with the reason.
macro_rules! skip_if_emulated {
    ($reason:literal) => {
        if $crate::common::is_emulated() {
            $crate::common::mark(concat!("skipped: ", $reason));
            return;
        }
    };
}
pub(crate) use skip_if_emulated;

/// Returns a command that runs this test binary once more. If the binary was started through a
/// loader (`tools/glibc/run`), the command uses that loader and its libraries; in an emulator
/// ([`EMULATED`]) the command uses that.
pub(crate) fn this_program() -> Command {
    let program = std::env::current_exe().expect("this test's binary");
    if let Ok(emulator) = std::env::var(EMULATED) {
        let mut words = emulator.split_whitespace();
        let mut command = Command::new(words.next().expect("the emulator's command"));
        command.args(words).arg(program);
        return command;
    }
    let mut command = Command::new(program);
    if let Some(libraries) = std::env::var_os("TREFOIL_TEST_LIBRARIES") {
        let binary =
            std::env::args_os().next().expect("the binary that the loader was called with");
        command.arg("--library-path").arg(libraries).arg(binary);
    }
    command
}

/// A test that runs in a process of its own, see [`child_test`]. It can be run several times.
#[derive(Clone)]
pub(crate) struct Child {
    test: String,
    variables: Vec<(String, String)>,
    limit: Duration,
}

impl Child {
    /// Returns the child of the test `name` (`module::function`, as libtest prints it).
    pub(crate) fn of(name: &str) -> Child {
        Child { test: name.to_owned(), variables: Vec::new(), limit: TOO_LONG }
    }

    /// Returns the same child with an environment variable set.
    pub(crate) fn env(&self, name: &str, value: &str) -> Child {
        let mut child = self.clone();
        child.variables.push((name.to_owned(), value.to_owned()));
        child
    }

    /// Returns the same child with a trace every few milliseconds and without preemption of
    /// loops.
    pub(crate) fn traced(&self) -> Child {
        self.env("TREFOIL_DEBUG", "schedtrace=1,scheddetail=1,asyncpreemptoff=1")
    }

    /// Returns the same child with TLS blocks from `pthread_create`.
    pub(crate) fn tls_from_pthread_create(&self) -> Child {
        self.env("TREFOIL_DEBUG", "tls=pthread")
    }

    /// Returns the same child with another time after which the parent counts it as hung.
    pub(crate) fn limit(&self, limit: Duration) -> Child {
        Child { limit, ..self.clone() }
    }

    /// Returns the command that starts the child: without standard input, and with no settings
    /// of the runtime in the environment except its own variables.
    pub(crate) fn command(&self) -> Command {
        let mut command = this_program();
        command
            .args(["--exact", &self.test, "--nocapture", "--include-ignored", "--test-threads=1"])
            .env(CHILD, &self.test)
            .env_remove("TREFOIL_PROCS")
            .env_remove("GOMAXPROCS")
            .env_remove("TREFOIL_DEBUG")
            .env_remove("TREFOIL_DLOPEN_RESERVE")
            .env_remove("RUST_BACKTRACE")
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null());
        command
    }

    /// Runs the child to its end.
    #[track_caller]
    pub(crate) fn output(&self) -> Output {
        // The child's own watchdog comes first: its report says more.
        let _watchdog = watchdog_for(self.limit + TOO_LONG / 4);
        let out = self.command().output().expect("the child starts");
        // An unknown name would run nothing, and succeed.
        let stdout = String::from_utf8_lossy(&out.stdout);
        let ran = stdout.contains("running 1 test");
        assert!(ran, "the child did not run {}:\n{stdout}", self.test);
        out
    }

    /// Runs the child to its end, which must be a success. Returns what it wrote to stderr.
    #[track_caller]
    pub(crate) fn succeed(&self) -> String {
        let out = self.output();
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        let stdout = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success(), "the child ended with {}:\n{stdout}\n{stderr}", out.status);
        assert!(stdout.contains("1 passed"), "the child did not finish its test:\n{stdout}");
        stderr
    }

    /// Runs the child to its end, which must be exit code `code`. Returns what it wrote to stderr.
    #[track_caller]
    pub(crate) fn fail(&self, code: i32) -> String {
        let out = self.output();
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(code), "the child ended with {}:\n{stderr}", out.status);
        stderr
    }
}

/// Writes a line to stderr at once, past libtest's capture: a mark among the traces.
pub(crate) fn mark(text: &str) {
    let line = format!("{text}\n");
    // SAFETY: reads `line.len()` bytes of `line`.
    unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

/// Waits for some whole traces of every runtime and keeps the P meanwhile.
pub(crate) fn let_trace() {
    let passed = traces_passed();
    hold_until("traces", || passed.load(Ordering::SeqCst));
}

/// Returns a flag that is set when every runtime has written some whole traces.
pub(crate) fn traces_passed() -> Arc<AtomicBool> {
    let passed = Arc::new(AtomicBool::new(false));
    tracer().push(passed.clone());
    passed
}

/// Starts a thread that counts the traces, and returns the list of flags that it is to set.
///
/// A thread of its own, because reading files blocks and would release the P. For the same reason
/// [`in_child`] starts it before the first runtime.
fn tracer() -> std::sync::MutexGuard<'static, Vec<Arc<AtomicBool>>> {
    static WANTED: Mutex<Vec<Arc<AtomicBool>>> = Mutex::new(Vec::new());
    static START: Once = Once::new();
    START.call_once(|| {
        std::thread::spawn(|| {
            loop {
                let wanted = std::mem::take(&mut *WANTED.lock().unwrap());
                if !wanted.is_empty() {
                    let_traces_pass();
                    wanted.iter().for_each(|passed| passed.store(true, Ordering::SeqCst));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    });
    WANTED.lock().unwrap()
}

/// Waits until every tracing thread has written some traces. Each trace is followed by a sleep,
/// which the kernel counts.
fn let_traces_pass() {
    const TRACES: u64 = 6;
    let sleeps = |tid: i32| {
        let file = format!("/proc/self/task/{tid}/status");
        proc_number(&file, "voluntary_ctxt_switches")
    };
    let all = || -> Vec<i32> {
        let helpers = tasks().into_iter().filter(|(_, name)| name == "trefoil-helper");
        helpers.map(|(tid, _)| tid).collect()
    };
    // A new thread has its name only once it runs.
    hold_until("the helper thread", || !all().is_empty());
    let mut before: Vec<_> = all().into_iter().map(|tid| (tid, sleeps(tid))).collect();
    while !before.iter().all(|&(tid, n)| sleeps(tid) >= n + TRACES) {
        std::thread::sleep(Duration::from_millis(5));
        // A thread that the helper thread starts has the same name at first.
        let all = all();
        before.retain(|(tid, _)| all.contains(tid));
    }
}

/// One trace: its `SCHED` line and the lines of detail.
pub(crate) struct Trace<'a> {
    pub(crate) summary: &'a str,
    pub(crate) detail: Vec<&'a str>,
}

impl Trace<'_> {
    /// Returns the number after `name=` in the summary.
    #[track_caller]
    pub(crate) fn get(&self, name: &str) -> u64 {
        number(self.summary, name)
    }

    /// Returns the lengths of the local queues.
    pub(crate) fn local(&self) -> Vec<u64> {
        let list = self.summary.split(['[', ']']).nth(1).unwrap_or("");
        list.split_whitespace().map(|n| n.parse().expect("a length")).collect()
    }

    /// Returns the lines of the Ps.
    pub(crate) fn ps(&self) -> impl Iterator<Item = &str> {
        self.detail.iter().copied().filter(|line| line.trim_start().starts_with('P'))
    }

    /// Returns the status of the goroutine with this id, or `None` if it is not alive.
    pub(crate) fn status_of(&self, id: u64) -> Option<&str> {
        let start = format!("G{id}: status=");
        let line = self.detail.iter().find_map(|line| line.trim_start().strip_prefix(&start))?;
        line.split(" parent=").next()
    }
}

/// Returns the number after ` name=` in a line.
#[track_caller]
pub(crate) fn number(line: &str, name: &str) -> u64 {
    line.split_whitespace()
        .find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse().ok())
        .unwrap_or_else(|| panic!("no {name} in {line:?}"))
}

/// Returns the whole traces between the marks `from` and `to`, oldest first, at least one.
#[track_caller]
pub(crate) fn traces<'a>(stderr: &'a str, from: &str, to: &str) -> Vec<Trace<'a>> {
    let after = stderr.split_once(&format!("{from}\n")).expect("the first mark").1;
    let text = after.split_once(&format!("{to}\n")).expect("the second mark").0;
    let mut all: Vec<Trace<'a>> = Vec::new();
    for line in text.lines() {
        if line.starts_with("SCHED ") && line.ends_with(']') {
            all.push(Trace { summary: line, detail: Vec::new() });
        } else if let Some(trace) = all.last_mut() {
            trace.detail.push(line);
        }
    }
    // The first may describe the time before its mark: it is gathered first, written later.
    if !all.is_empty() {
        all.remove(0);
    }
    assert!(!all.is_empty(), "no trace between {from} and {to}:\n{text}");
    all
}

/// Waits until other goroutines have reached their waits: certainly in a simulation, probably
/// elsewhere.
pub(crate) fn let_others_wait() {
    if trefoil::sim::is_simulated() {
        trefoil::sim::settle();
    } else {
        trefoil::time::sleep(Duration::from_micros(300));
    }
}

/// Asserts that `time` has passed since `start`: exactly in a simulation, at least elsewhere.
#[track_caller]
pub(crate) fn assert_passed(start: Instant, time: Duration) {
    let elapsed = start.elapsed();
    let is_right = if trefoil::sim::is_simulated() { elapsed == time } else { elapsed >= time };
    assert!(is_right, "{elapsed:?} have passed instead of {time:?}");
}

/// Runs `waiter` in a goroutine, with a limit for its wait, and `change` after that limit has
/// passed but before the goroutine runs again. Returns what `waiter` returns.
///
/// In a simulation both this goroutine's sleep and the limit end at the same moment. The timer that
/// was set first fires first, and its goroutine runs first.
pub(crate) fn change_after_time_out<T: Send + 'static>(
    waiter: impl FnOnce(Duration) -> T + Send + 'static,
    change: impl FnOnce() + Send + 'static,
) -> T {
    trefoil::sim::run(|| {
        let start = Instant::now();
        let waits = trefoil::go(move || {
            let value = waiter(MS);
            assert_eq!(start.elapsed(), MS);
            value
        });
        trefoil::time::sleep(MS);
        assert!(!waits.is_finished(), "the waiter ran before the change");
        change();
        waits.join().unwrap()
    })
}
