//! Debuggers and `trefoil ps`, `dump`, `why`: they show the goroutines of another process, live,
//! stopped, and in a core file. perf finds the callers on a goroutine's stack.
//!
//! The process is this program again, with one goroutine in each of the places that a debugger has
//! to show. gdb and perf need not be there: then their tests print a line and do nothing.

use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use trefoil::{Builder, Runtime};

/// Set in the process that is inspected.
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

/// Not a test: the process that the tests inspect.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // SAFETY: ends the process if the test does not.
    unsafe { libc::alarm(2 * LIMIT.as_secs() as u32) };
    let runtime = Runtime::builder().procs(1).build().unwrap();
    runtime.run(|| {
        let named = |name: &str| Builder::new().name(name);
        let (_tx, rx) = trefoil::chan::bounded::<()>(0);
        named("receiver").go(move || receives_in_here(&rx)).unwrap();
        let mutex = Arc::new(Mutex::new(0));
        let _held = mutex.lock().unwrap();
        let locked = mutex.clone();
        named("locker").go(move || locks_in_here(&locked)).unwrap();
        named("sleeper").go(sleeps_in_here).unwrap();
        let mut pipe = [0; 2];
        // SAFETY: the kernel writes two descriptors.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        named("reader").go(move || reads_in_here(pipe[0])).unwrap();
        let (_keep, task_rx) = trefoil::chan::bounded::<()>(0);
        trefoil::task::spawn(async move {
            let _ = task_rx.recv_async().await;
        });
        named("spinner a").go(|| spins_in_here()).unwrap();
        named("spinner b").go(|| spins_in_here()).unwrap();
        println!("started");
        std::io::stdout().flush().unwrap();
        trefoil::time::sleep(Duration::from_secs(3600));
    });
}
