//! Debuggers and `trefoil ps`, `dump`, `why`: they show the goroutines of another process, live,
//! stopped, and in a core file. perf finds the callers on a goroutine's stack.
//!
//! The process is this program again, with one goroutine in each of the places that a debugger has
//! to show. gdb and perf need not be there, and the machine may forbid to read another process:
//! then tests print a line that says so, and do nothing.

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use trefoil::{Builder, Runtime};

/// Set in the process that is inspected: what it does.
const CHILD: &str = "TREFOIL_DEBUGGERS_CHILD";
/// How long a test waits for something that takes milliseconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(120);

// -------------------------------------------------------------------------------------------------
// The process that is inspected.

static TURNS: AtomicU64 = AtomicU64::new(0);

#[inline(never)]
fn spins_in_here() {
    loop {
        TURNS.fetch_add(black_box(1), Ordering::Relaxed);
    }
}

#[inline(never)]
fn receives_in_here(rx: &trefoil::chan::Receiver<()>) {
    let _ = rx.recv();
    black_box(());
}

#[inline(never)]
fn locks_in_here(mutex: &Mutex<u32>) {
    *mutex.lock().unwrap() += 1;
    black_box(());
}

#[inline(never)]
fn sleeps_in_here() {
    trefoil::time::sleep(Duration::from_secs(3600));
    black_box(());
}

/// Blocks its thread: the call goes past the functions that park a goroutine.
#[inline(never)]
fn reads_in_here(fd: i32) {
    let mut byte = 0u8;
    // SAFETY: reads one byte into a variable of our own.
    unsafe { libc::syscall(libc::SYS_read, fd, &raw mut byte, 1) };
    black_box(());
}

/// Waits for an OS thread. The calls in between are std's, which use the frame pointer.
#[inline(never)]
fn joins_a_thread_in_here() {
    let _ = std::thread::spawn(|| std::thread::sleep(Duration::from_secs(3600))).join();
    black_box(());
}

/// Waits in a function that libc calls.
#[inline(never)]
fn searches_in_here() {
    let key = 0u8;
    let at = (&raw const key).cast::<c_void>();
    // SAFETY: an array of one element, which is the key as well.
    unsafe { libc::bsearch(at, at, 1, 1, Some(waits_in_comparison)) };
    black_box(());
}

#[inline(never)]
unsafe extern "C" fn waits_in_comparison(_: *const c_void, _: *const c_void) -> c_int {
    trefoil::time::sleep(Duration::from_secs(3600));
    black_box(0)
}

/// Not a test: the process that the tests inspect.
#[test]
fn child() {
    let Ok(does) = std::env::var(CHILD) else { return };
    // SAFETY: ends the process with the test, or when it hangs; lets a debugger attach that is not
    // its parent; allows a core file.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::alarm(4 * LIMIT.as_secs() as u32);
        libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0);
        let any = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const any);
    }
    // With one P the ids follow the order of the starts.
    let procs = if matches!(&does[..], "waits" | "dumps itself" | "locks") { 1 } else { 2 };
    let runtime = Runtime::builder().procs(procs).build().unwrap();
    runtime.run(|| {
        match &does[..] {
            "waits" => begin_waits(),
            "dumps itself" => {
                begin_waits();
                Builder::new().name("searcher").go(searches_in_here).unwrap();
                let dump = trefoil::debug::dump;
                let is_complete = || dump().contains("debuggers::waits_in_comparison");
                wait_for("the goroutines", || is_complete().then_some(()).ok_or_else(dump));
            }
            "many" => begin_many(),
            "locks" => begin_locks(),
            "churns" => begin_churn(),
            _ => panic!("unknown: {does}"),
        }
        println!("started");
        std::io::stdout().flush().unwrap();
        trefoil::time::sleep(Duration::from_secs(3600));
    });
}

/// Starts one goroutine in each place that a debugger has to show.
fn begin_waits() {
    let named = |name: &str| Builder::new().name(name);
    let (tx, rx) = trefoil::chan::bounded::<()>(0);
    std::mem::forget(tx);
    named("receiver").go(move || receives_in_here(&rx)).unwrap();
    let mutex = Arc::new(Mutex::new(0));
    std::mem::forget(mutex.clone().lock().unwrap());
    named("locker").go(move || locks_in_here(&mutex)).unwrap();
    let sleeper = named("sleeper").go(sleeps_in_here).unwrap();
    named("joiner").go(move || sleeper.join().unwrap()).unwrap();
    let mut pipe = [0; 2];
    // SAFETY: the kernel writes two descriptors.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    named("reader").go(move || reads_in_here(pipe[0])).unwrap();
    named("thread joiner").go(joins_a_thread_in_here).unwrap();
    let (tx, rx) = trefoil::chan::bounded::<()>(0);
    std::mem::forget(tx);
    let future = async move {
        let _ = rx.recv_async().await;
    };
    trefoil::task::Builder::new().name("waiting task").spawn(future).unwrap();
    let spins_in_closure = || {
        black_box(());
        spins_in_here();
    };
    named("spinner a").go(spins_in_closure).unwrap();
    named("spinner b").go(spins_in_closure).unwrap();
}

/// Starts many goroutines that wait at one place.
fn begin_many() {
    for _ in 0..MANY {
        trefoil::go(sleeps_in_here);
    }
}

const MANY: usize = 5000;

static LOCKS: [trefoil::sync::Mutex<()>; 3] = [const { trefoil::sync::Mutex::new(()) }; 3];
static RW_LOCK: trefoil::sync::RwLock<()> = trefoil::sync::RwLock::new(());
static ONCE: trefoil::sync::Once = trefoil::sync::Once::new();

/// Starts goroutines that hold what others wait for. Those of [`LOCKS`] are deadlocked.
fn begin_locks() {
    let named = |name: &str| Builder::new().name(name);
    for i in 0..LOCKS.len() {
        let locks_two = move || {
            let _own = LOCKS[i].lock();
            // The others lock their own meanwhile.
            trefoil::time::sleep(Duration::from_millis(100));
            drop(LOCKS[(i + 1) % LOCKS.len()].lock());
        };
        named(&format!("lock {i}")).go(locks_two).unwrap();
    }
    let writes = || {
        let _written = RW_LOCK.write();
        ONCE.call_once(sleeps_in_here);
    };
    named("writer").go(writes).unwrap();
    // The writer has begun.
    while ONCE.state() != trefoil::sync::OnceState::InProgress {
        trefoil::yield_now();
    }
    named("reader").go(|| drop(RW_LOCK.read())).unwrap();
    named("caller").go(|| ONCE.call_once(|| ())).unwrap();
    let scoped = || {
        trefoil::scope(|s| {
            s.go(|| drop(LOCKS[0].lock()));
        });
    };
    named("scope").go(scoped).unwrap();
}

/// Starts goroutines and tasks that begin, wait, yield and end all the time.
fn begin_churn() {
    for _ in 0..4 {
        trefoil::go(|| {
            loop {
                let name = format!("short {}", TURNS.fetch_add(1, Ordering::Relaxed));
                let short = Builder::new().name(name).go(|| {
                    trefoil::yield_now();
                    std::thread::sleep(Duration::from_micros(50));
                });
                let task = trefoil::task::spawn(async { trefoil::task::yield_now().await });
                short.unwrap().join().unwrap();
                trefoil::block_on(task).unwrap();
            }
        });
    }
}

// -------------------------------------------------------------------------------------------------
// The tests.

/// A process that runs until it is dropped.
struct Program {
    child: Child,
    /// Where it may write a core file.
    folder: PathBuf,
    /// One test at a time: the processes use all the CPU time that they get.
    _alone: MutexGuard<'static, ()>,
}

impl Program {
    fn start(does: &str) -> Program {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("trefoil-debuggers-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, does)
            .env_remove("TREFOIL_DEBUG")
            .current_dir(&folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let program = Program { child, folder, _alone: alone };
        // libtest has printed "test child ... " before.
        let started = lines.any(|line| line.unwrap().ends_with("started"));
        assert!(started, "the process ended before it had started its goroutines");
        program
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to a child that was not waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Returns an error unless all its threads are stopped.
    fn is_stopped(&self) -> Result<(), String> {
        for task in std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap() {
            let path = task.unwrap().path().join("stat");
            // A thread may end meanwhile. The state follows the name, which is in parentheses.
            let Ok(stat) = std::fs::read_to_string(path) else { continue };
            if !stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" T")) {
                return Err(stat);
            }
        }
        Ok(())
    }

    /// Ends the process with a core file. Returns None if the machine writes core files elsewhere.
    fn into_core(mut self) -> Option<(Program, PathBuf)> {
        let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
        if pattern.starts_with('|') || pattern.contains('/') {
            skip(&format!("core files go elsewhere: {}", pattern.trim()));
            return None;
        }
        self.signal(libc::SIGABRT);
        let status = self.child.wait().unwrap();
        let core = std::fs::read_dir(&self.folder).unwrap().next();
        let Some(core) = core else {
            skip(&format!("no core file was written: {status}"));
            return None;
        };
        Some((self, core.unwrap().path()))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Says why a test does nothing, past libtest's capture.
fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// Runs the `trefoil` command. Returns whether it succeeded, and its two outputs.
fn run_trefoil(args: &[&str]) -> (bool, String, String) {
    let out = Command::new(env!("CARGO_BIN_EXE_trefoil")).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.success(), text(out.stdout), text(out.stderr))
}

/// Runs the `trefoil` command on a process. Returns None if the machine forbids it.
fn trefoil(args: &[&str]) -> Option<String> {
    let (done, out, error) = run_trefoil(args);
    if error.contains("cannot be read: ") {
        skip(error.trim());
        return None;
    }
    assert!(done, "trefoil {args:?}: {error}");
    Some(out)
}

/// Calls `attempt` until it returns something.
fn wait_for<T>(what: &str, mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(done) => return done,
            Err(seen) if start.elapsed() > LIMIT => panic!("waited for {what}; last:\n{seen}"),
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Returns the paragraph of a dump or of gdb's output that begins with `title`.
fn paragraph<'a>(text: &'a str, title: &str) -> &'a str {
    text.split("\n\n").find(|part| part.starts_with(title)).unwrap_or_default()
}

/// What a list of goroutines has to show: each line with all parts of an entry.
const WAITS: &[&[&str]] = &[
    &["\"main\"", "sleep", "debuggers.rs"],
    &["\"receiver\"", "chan receive", "receives_in_here"],
    &["\"locker\"", "futex wait", "locks_in_here"],
    &["\"sleeper\"", "sleep", "sleeps_in_here"],
    &["\"joiner\"", "join", "debuggers.rs"],
    &["\"reader\"", "running", "reads_in_here"],
    &["\"thread joiner\"", "running", "joins_a_thread_in_here"],
    &["\"spinner", "runnable, preempted", "spins_in_here"],
    &["\"spinner", "running"],
    &["task ", "chan receive", "debuggers.rs"],
];

/// Returns the entry of [`WAITS`] that no line of `text` has.
fn missing(text: &str) -> Option<&'static &'static [&'static str]> {
    let has = |line: &str, parts: &[&str]| parts.iter().all(|part| line.contains(part));
    WAITS.iter().find(|parts| !text.lines().any(|line| has(line, parts)))
}

fn complete(text: String) -> Result<String, String> {
    match missing(&text) {
        None => Ok(text),
        Some(parts) => Err(format!("no line with {parts:?} in:\n{text}")),
    }
}

#[test]
fn ps_lists_where_each_goroutine_waits() {
    let program = Program::start("waits");
    let pid = program.pid();
    if trefoil(&["ps", &pid]).is_none() {
        return;
    }
    let list = || complete(trefoil(&["ps", "--all", &pid]).unwrap());
    let text = wait_for("all goroutines", list);
    assert!(text.starts_with("runtime "), "{text}");
    assert!(text.contains(": goroutines 9, tasks 1, Ps 1 "), "{text}");
    assert!(text.contains("running, in read"), "{text}");
    assert!(text.contains("\"waiting task\""), "{text}");
    let waiting = trefoil(&["ps", "--state", "chan receive", &pid]).unwrap();
    assert!(waiting.contains("receives_in_here") && !waiting.contains("spins_in"), "{waiting}");
    let top = trefoil(&["ps", "--top", "1", &pid]).unwrap();
    assert!(top.contains("… and 9 more in 9 lines"), "{top}");
}

/// A dump of its own makes a process map its files a second time, to read their symbols.
fn check_after_own_dump(target: &str) {
    let list = trefoil(&["ps", "--all", target]).unwrap();
    // Whichever spinner runs.
    for parts in WAITS.iter().filter(|parts| parts[0] != "\"spinner") {
        let has = |line: &str| parts.iter().all(|part| line.contains(part));
        assert!(list.lines().any(has), "no line with {parts:?} in:\n{list}");
    }
    let dump = trefoil(&["dump", target]).unwrap();
    let joiner = dump.split("\n\n").find(|part| part.contains("\"thread joiner\""));
    let frames = ["std::thread::", "joins_a_thread_in_here"];
    has_in_order(joiner.unwrap_or_default(), &frames).unwrap();
    let searcher = dump.split("\n\n").find(|part| part.contains("\"searcher\" [sleep"));
    let frames = ["debuggers::waits_in_comparison", "bsearch", "debuggers::searches_in_here"];
    has_in_order(searcher.unwrap_or(&dump), &frames).unwrap();
}

#[test]
fn a_process_that_has_dumped_itself_is_shown() {
    let program = Program::start("dumps itself");
    let pid = program.pid();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let exe = std::env::current_exe().unwrap();
    let is_beginning =
        |line: &&str| line.contains(" 00000000 ") && line.ends_with(exe.to_str().unwrap());
    assert!(maps.lines().filter(is_beginning).count() > 1, "it is not read:\n{maps}");
    if trefoil(&["ps", &pid]).is_none() {
        return;
    }
    wait_for("all goroutines", || complete(trefoil(&["ps", "--all", &pid]).unwrap()));
    check_after_own_dump(&pid);
    let Some((program, core)) = program.into_core() else { return };
    check_after_own_dump(core.to_str().unwrap());
    drop(program);
}

#[test]
fn ps_counts_goroutines_at_the_same_place() {
    let program = Program::start("many");
    let pid = program.pid();
    if trefoil(&["ps", &pid]).is_none() {
        return;
    }
    wait_for("all goroutines to sleep", || {
        let text = trefoil(&["ps", &pid]).unwrap();
        let is_group = |line: &str| {
            line.starts_with("5,000  sleep") && line.contains("sleeps_in_here (debuggers.rs:")
        };
        if text.lines().any(is_group) { Ok(()) } else { Err(text) }
    });
}

#[test]
fn dump_shows_the_stacks_of_a_stopped_process() {
    let program = Program::start("waits");
    let pid = program.pid();
    if trefoil(&["ps", &pid]).is_none() {
        return;
    }
    wait_for("all goroutines", || complete(trefoil(&["ps", "--all", &pid]).unwrap()));
    // Also of the one that runs: its thread is stopped. It may be stopped in the scheduler, between
    // the spinners: then it goes on for a while.
    let text = wait_for("both stacks", || {
        program.signal(libc::SIGSTOP);
        wait_for("every thread to stop", || program.is_stopped());
        let text = trefoil(&["dump", &pid]).unwrap();
        let spinners = text.split("\n\n").filter(|part| part.contains("\"spinner "));
        let with_stack = spinners.filter(|part| part.contains("spins_in_here")).count();
        if with_stack == 2 {
            return Ok(text);
        }
        program.signal(libc::SIGCONT);
        Err(text)
    });
    let receiver = paragraph(&text, "goroutine 2 \"receiver\" [chan receive");
    assert!(receiver.contains("receives_in_here\n\t"), "{text}");
    assert!(receiver.contains("created by debuggers::begin_waits in goroutine 1\n\t"), "{text}");
    assert!(!receiver.contains("trefoil::sched::"), "{text}");
    let task = text.split("\n\n").find(|part| part.contains("\"waiting task\" [chan receive"));
    assert!(task.unwrap_or_default().contains("created by debuggers::begin_waits"), "{text}");
    program.signal(libc::SIGCONT);
    wait_for("it to run again", || complete(trefoil(&["ps", "--all", &pid]).unwrap()));
}

#[test]
fn why_says_what_a_goroutine_waits_for() {
    let program = Program::start("waits");
    let pid = program.pid();
    if trefoil(&["ps", &pid]).is_none() {
        return;
    }
    wait_for("all goroutines", || complete(trefoil(&["ps", "--all", &pid]).unwrap()));
    let text = trefoil(&["why", &pid, "2"]).unwrap();
    assert!(text.starts_with("goroutine 2 \"receiver\" waits for "), "{text}");
    assert!(text.contains(" s: chan receive\n  at debuggers::receives_in_here"), "{text}");
    let all = trefoil(&["why", &pid]).unwrap();
    assert!(all.contains("\"locker\" waits for ") && all.contains("futex wait"), "{all}");
    let joiner = trefoil(&["why", &pid, "5"]).unwrap();
    let holder = "\n  joins goroutine 4 \"sleeper\"\n  goroutine 4 \"sleeper\" [sleep]\n";
    assert!(joiner.contains(holder), "{joiner}");
    let preempted = wait_for("a preempted spinner", || {
        let one = |id| trefoil(&["why", &pid, id]).unwrap();
        let text = one("8") + &one("9");
        if text.contains("was stopped at the end of its time slice") { Ok(text) } else { Err(text) }
    });
    assert!(preempted.contains("P 0 "), "{preempted}");
    let (done, _, error) = run_trefoil(&["why", &pid, "12345"]);
    assert!(!done && error.contains("there is no goroutine or task 12345"), "{error}");
}

/// Checks what `why` and `dump` print of a process of [`begin_locks`], or of its core file.
fn check_holders(target: &str) -> Result<(), String> {
    let whys = [
        (
            2,
            vec![
                "waits for Mutex 0x",
                "held by goroutine 3 \"lock 1\"\n",
                "  goroutine 3 \"lock 1\" waits for Mutex 0x",
                "held by goroutine 4 \"lock 2\"\n",
                "  goroutine 4 \"lock 2\" waits for Mutex 0x",
                "held by goroutine 2 \"lock 0\"\n",
                "  deadlock (certain): 3 goroutines wait for each other\n",
            ],
        ),
        (
            6,
            vec![
                "waits for RwLock (read) 0x",
                " held by goroutine 5 \"writer\"\n",
                "  goroutine 5 \"writer\" [sleep]\n",
            ],
        ),
        (7, vec!["waits for Once 0x", " run by goroutine 5 \"writer\"\n"]),
        (
            8,
            vec![
                "waits for 1 goroutines of its scope: goroutine 9\n",
                "  goroutine 9 waits for Mutex 0x",
                " held by goroutine 2 \"lock 0\"\n",
                "  deadlock (certain): goroutine 2 \"lock 0\" and 2 more wait for each other\n",
            ],
        ),
    ];
    for (id, parts) in whys {
        let text = trefoil(&["why", target, &id.to_string()]).unwrap();
        has_in_order(&text, &parts)?;
    }
    let dump = trefoil(&["dump", target]).unwrap();
    let waiter = paragraph(&dump, "goroutine 4 \"lock 2\" [sync.Mutex.Lock");
    has_in_order(waiter, &["]:\n\twaits for Mutex 0x", " held by goroutine 2 \"lock 0\", for "])
}

fn has_in_order(text: &str, parts: &[&str]) -> Result<(), String> {
    let mut rest = text;
    for part in parts {
        rest = match rest.split_once(part) {
            Some((_, rest)) => rest,
            None => return Err(format!("no {part:?} in:\n{text}")),
        };
    }
    Ok(())
}

#[test]
fn why_and_dump_name_the_holders() {
    let program = Program::start("locks");
    let pid = program.pid();
    if trefoil(&["ps", &pid]).is_some() {
        wait_for("the holders", || check_holders(&pid));
    }
}

#[test]
#[ignore = "takes long"]
fn a_core_file_has_the_holders() {
    let program = Program::start("locks");
    if trefoil(&["ps", &program.pid()]).is_some() {
        wait_for("the holders", || check_holders(&program.pid()));
    }
    let Some((program, core)) = program.into_core() else { return };
    check_holders(core.to_str().unwrap()).unwrap();
    drop(program);
}

#[test]
#[ignore = "takes long"]
fn goroutines_that_change_while_they_are_read_do_no_harm() {
    let program = Program::start("churns");
    let pid = program.pid();
    if trefoil(&["ps", &pid]).is_none() {
        return;
    }
    for _ in 0..10 {
        let text = trefoil(&["dump", &pid]).unwrap();
        assert!(text.starts_with("goroutine 1 \"main\" "), "{text}");
        // Where a goroutine was started is part of its identity: it is never that of another.
        assert!(!text.contains("created by a closure"), "{text}");
    }
}

#[test]
fn what_cannot_be_inspected_is_an_error() {
    let (done, _, error) = run_trefoil(&["ps", "/proc/self/maps"]);
    assert!(!done && error.contains("neither the number of a process nor a core file"), "{error}");
    let (done, _, error) = run_trefoil(&["dump", "999999999"]);
    assert!(!done && error.contains("there is no process 999999999"), "{error}");
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    // At first it is not `sleep` yet, and has no memory of its own.
    wait_for("the process to be refused", || {
        let (done, _, error) = run_trefoil(&["ps", &other.id().to_string()]);
        let refused = error.contains("it does not use trefoil") || error.contains("cannot be read");
        if !done && refused { Ok(()) } else { Err(error) }
    });
    other.kill().unwrap();
    other.wait().unwrap();
}

// -------------------------------------------------------------------------------------------------
// gdb.

/// Runs gdb without the user's settings, with the script that is in the program. Returns None if
/// there is no gdb with Python, or it may not attach.
fn gdb(target: &[&str], commands: &[&str]) -> Option<String> {
    let mut command = Command::new("gdb");
    command.args(["-batch", "-nx", "-iex", "set auto-load safe-path /"]);
    command.args(["-iex", "set debuginfod enabled off"]).args(target);
    for text in commands {
        command.args(["-ex", text]);
    }
    let Ok(out) = command.stdin(Stdio::null()).output() else {
        skip("there is no gdb");
        return None;
    };
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let error = String::from_utf8_lossy(&out.stderr);
    if error.contains("Python scripting is not supported") {
        skip("gdb has no Python");
        return None;
    }
    if error.contains("Operation not permitted") {
        skip("gdb may not attach");
        return None;
    }
    Some(format!("{text}\n{error}"))
}

/// Checks what gdb prints for these commands.
const GDB_COMMANDS: &[&str] =
    &["python print('has python')", "info goroutines -all", "goroutine all bt", "bt 1"];

fn check_gdb(text: &str) -> Result<(), String> {
    let start = text.find("has python").ok_or_else(|| text.to_owned())?;
    let text = &text[start..];
    complete(text.to_owned())?;
    let locker = paragraph(text, "goroutine 3 \"locker\" [futex wait], created at ");
    let in_order = ["switch", "locks_in_here", "goroutine_main", "entry_stub"];
    let mut at = 0;
    for part in in_order {
        match locker[at..].find(part) {
            Some(found) => at += found,
            None => return Err(format!("no {part} in {locker:?} of\n{text}")),
        }
    }
    // The frames of a goroutine that was stopped by a signal: the interrupted function follows the
    // trampoline.
    let preempted = text.split("\n\n").find(|p| p.contains("[runnable, preempted], created"));
    let preempted = preempted.unwrap_or_default();
    let handler = preempted.find("<signal handler called>");
    let Some(handler) = handler.filter(|&at| preempted[at..].contains("spins_in_here")) else {
        return Err(format!("no interrupted function in {preempted:?} of\n{text}"));
    };
    assert!(preempted[handler..].contains("entry_stub"), "{preempted}");
    assert!(!text.contains("corrupt stack"), "{text}");
    assert!(!text.contains("Python Exception"), "{text}");
    Ok(())
}

#[test]
#[ignore = "takes long"]
fn gdb_lists_goroutines_and_their_stacks() {
    let program = Program::start("waits");
    let pid = program.pid();
    let start = Instant::now();
    loop {
        let Some(text) = gdb(&["-p", &pid], GDB_COMMANDS) else { return };
        match check_gdb(&text) {
            Ok(()) => break,
            Err(seen) => assert!(start.elapsed() < LIMIT, "{seen}"),
        }
    }
    // The process goes on: the spinners take turns.
    if trefoil(&["ps", &pid]).is_some() {
        let running = || {
            let text = trefoil(&["ps", "--all", "--state", "running", &pid]).unwrap();
            let line = text.lines().find(|line| line.contains("\"spinner "));
            line.and_then(|line| line.rsplit_once('"')?.0.chars().next_back()).ok_or(text)
        };
        let first = wait_for("a spinner", running);
        wait_for("the other spinner", || match running() {
            Ok(now) if now != first => Ok(()),
            Ok(now) => Err(now.to_string()),
            Err(text) => Err(text),
        });
    }
}

#[test]
#[ignore = "takes long"]
fn gdb_groups_and_filters() {
    let program = Program::start("many");
    let pid = program.pid();
    let commands = ["info goroutines -at sleeps_in_here -top 3", "info goroutines -state running"];
    let Some(text) = gdb(&["-p", &pid], &commands) else { return };
    let group = text.lines().find(|line| line.contains(" goroutines [sleep, up to "));
    let group = group.unwrap_or_else(|| panic!("{text}"));
    assert!(group.contains("sleeps_in_here (debuggers.rs:"), "{text}");
}

#[test]
#[ignore = "takes long"]
fn a_core_file_has_the_goroutines() {
    let program = Program::start("waits");
    if trefoil(&["ps", &program.pid()]).is_some() {
        let pid = program.pid();
        wait_for("all goroutines", || complete(trefoil(&["ps", "--all", &pid]).unwrap()));
    }
    let Some((program, core)) = program.into_core() else { return };
    let core = core.to_str().unwrap();
    let list = trefoil(&["ps", "--all", core]).unwrap();
    // Whichever spinner ran: the core file was written between two moments of theirs.
    for parts in WAITS.iter().filter(|parts| parts[0] != "\"spinner") {
        let has = |line: &str| parts.iter().all(|part| line.contains(part));
        assert!(list.lines().any(has), "no line with {parts:?} in:\n{list}");
    }
    let dump = trefoil(&["dump", core]).unwrap();
    let receiver = paragraph(&dump, "goroutine 2 \"receiver\" [chan receive");
    assert!(receiver.contains("receives_in_here\n\t"), "{dump}");
    let spinners = dump.split("\n\n").filter(|part| part.contains("\"spinner "));
    assert_ne!(spinners.filter(|part| part.contains("spins_in_here")).count(), 0, "{dump}");
    let why = trefoil(&["why", core, "2"]).unwrap();
    assert!(why.contains("chan receive\n  at debuggers::receives_in_here"), "{why}");
    let exe = std::env::current_exe().unwrap();
    if let Some(text) = gdb(&[exe.to_str().unwrap(), core], GDB_COMMANDS) {
        let found = paragraph(&text, "goroutine 2 \"receiver\" [chan receive], created at ");
        assert!(found.contains("receives_in_here") && found.contains("entry_stub"), "{text}");
        assert!(!text.contains("Python Exception"), "{text}");
        let spins = |part: &&str| part.starts_with("goroutine ") && part.contains("spins_in_here");
        assert_ne!(text.split("\n\n").filter(spins).count(), 0, "{text}");
    }
    drop(program);
}

/// Damages a copy of a core file: cuts it off, or changes bytes in its headers and everywhere.
fn damaged(core: &[u8], round: u64) -> Vec<u8> {
    let mut state = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 8) as usize
    };
    let mut bytes = core.to_vec();
    if round.is_multiple_of(3) {
        bytes.truncate(random() % core.len());
        return bytes;
    }
    for _ in 0..random() % 4 {
        let at = random() % 2000.min(bytes.len());
        bytes[at] = random() as u8;
    }
    for _ in 0..core.len() / [200, 20_000][round as usize % 2] {
        let at = random() % bytes.len();
        bytes[at] ^= 1 << (random() % 8);
    }
    bytes
}

#[test]
#[ignore = "takes long"]
fn a_damaged_core_file_is_read_or_refused() {
    let Some((program, core)) = Program::start("waits").into_core() else { return };
    let whole = std::fs::read(core).unwrap();
    let path = program.folder.join("damaged");
    let printed = program.folder.join("stderr");
    for round in 0..15 {
        std::fs::write(&path, damaged(&whole, round)).unwrap();
        let command = ["ps", "dump", "why"][round as usize % 3];
        let mut child = Command::new(env!("CARGO_BIN_EXE_trefoil"))
            .args([command, path.to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&printed).unwrap())
            .spawn()
            .unwrap();
        let start = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > LIMIT {
                let _ = child.kill();
                let _ = child.wait();
                panic!("round {round}: {command} does not end");
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let error = std::fs::read_to_string(&printed).unwrap();
        let has_ended = matches!(status.code(), Some(0 | 1));
        assert!(has_ended, "round {round}: {command} ended with {status}: {error}");
    }
}

// -------------------------------------------------------------------------------------------------
// perf.

/// Records a process with perf, by DWARF tables. Returns the text of `perf script`, or None if perf
/// is not there or is not allowed to.
fn perf(program: &Program, out: &Path) -> Option<String> {
    let out = out.to_str().unwrap();
    let record = Command::new("perf")
        .args(["record", "-e", "cpu-clock", "-F", "200", "--call-graph", "dwarf", "-o", out])
        .args(["-p", &program.pid(), "--", "sleep", "2"])
        .output();
    let Ok(record) = record else {
        skip("there is no perf");
        return None;
    };
    if !record.status.success() {
        skip(&format!("perf record: {}", String::from_utf8_lossy(&record.stderr)));
        return None;
    }
    let script = Command::new("perf").args(["script", "-i", out]).output().unwrap();
    Some(String::from_utf8_lossy(&script.stdout).into_owned())
}

#[test]
#[ignore = "takes long"]
fn perf_finds_the_callers_on_a_goroutine_stack() {
    let program = Program::start("waits");
    let Some(text) = perf(&program, &program.folder.join("perf.data")) else { return };
    let samples = text.split("\n\n").filter(|sample| sample.contains("spins_in_here"));
    let (mut whole, mut all) = (0, 0);
    for sample in samples {
        all += 1;
        let order = ["spins_in_here", "closure", "goroutine_main", "entry_stub"];
        let places: Vec<_> = order.iter().filter_map(|part| sample.find(part)).collect();
        whole += usize::from(places.len() == order.len() && places.is_sorted());
    }
    assert!(all > 0, "no sample of a spinner in\n{text}");
    // A sample may be cut short where the kernel could not copy the stack.
    assert!(whole * 10 >= all * 9, "{whole} of {all} samples are whole:\n{text}");
}
