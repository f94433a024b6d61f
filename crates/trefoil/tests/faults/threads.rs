//! When no more threads can be started: the work is done by those that are there.

use crate::case::{LIMIT, case, done, no_core_file, run};
use crate::common::raw::raw_sleep_through;
use crate::common::{child_test, mark, ms};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use trefoil::{Runtime, go, lock_os_thread, yield_now};

/// A thread of the runtime blocks for so long.
const BLOCKED: Duration = Duration::from_secs(60);

/// Ends this process with success, although a thread of the runtime blocks.
fn end_now(begun: Instant) -> ! {
    assert!(begun.elapsed() < BLOCKED / 2, "it waited for the other thread");
    done();
    std::process::exit(0);
}

fn compute_for(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// Prevents this process from starting threads. The limit is per user and does not apply to root,
/// so that root becomes a user without processes.
fn no_more_threads() {
    const UNUSED_UID: u32 = 64_999;
    limit_threads(1);
    // SAFETY: plain system calls.
    unsafe {
        if libc::getuid() == 0 {
            assert_eq!(libc::setuid(UNUSED_UID), 0);
        }
    }
    assert!(thread::Builder::new().spawn(|| ()).is_err(), "the limit has no effect");
}

/// Sets the soft limit of threads, so that it can be raised again.
fn limit_threads(threads: u64) {
    let limit = libc::rlimit { rlim_cur: threads, rlim_max: 1000 };
    // SAFETY: passes a struct by reference.
    let rc = unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) };
    assert_eq!(rc, 0, "setrlimit: {}", std::io::Error::last_os_error());
}

/// The start of a thread was not tried again after a failure: goroutines waited, with idle Ps,
/// until a blocking call returned.
#[test]
fn threads_start_when_the_limit_is_lifted() {
    const BLOCKED: Duration = Duration::from_secs(30);
    const MESSAGE: &str = "goroutines wait until one of";
    static BEGUN: AtomicUsize = AtomicUsize::new(0);
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    static LIFTED: AtomicBool = AtomicBool::new(false);
    child_test!(limit = LIMIT, |child| {
        run(child, "lifted", &[]).succeeded().has(MESSAGE);
    });
    no_core_file();
    let runtime = Runtime::builder().procs(2).build().unwrap();
    runtime.run(|| go(yield_now).join().unwrap());
    let (lift, may_lift) = std::sync::mpsc::channel();
    let lifter = thread::spawn(move || {
        may_lift.recv().unwrap();
        thread::sleep(Duration::from_millis(150));
        LIFTED.store(true, SeqCst);
        limit_threads(1000);
    });
    no_more_threads();
    let stderr = Stderr::divert();
    // More goroutines than threads: they block all of them.
    let block = |_| {
        let body = || {
            BEGUN.fetch_add(1, SeqCst);
            raw_sleep_through(BLOCKED);
            ENDED.fetch_add(1, SeqCst);
        };
        runtime.go(body).unwrap()
    };
    let blocked: Vec<_> = (0..20).map(block).collect();
    // More have begun than there are threads if one was preempted before its call.
    let is_full = || stderr.text().contains(MESSAGE) && BEGUN.load(SeqCst) >= ms().len();
    let start = Instant::now();
    while !is_full() && start.elapsed() < BLOCKED / 2 {
        thread::sleep(Duration::from_millis(1));
    }
    let was_full = is_full();
    stderr.restore();
    assert!(was_full, "{} goroutines block the threads {:?}", BEGUN.load(SeqCst), ms());
    let late = runtime.go(|| {
        let was_lifted = LIFTED.load(SeqCst);
        trefoil::time::sleep(Duration::from_millis(50));
        was_lifted
    });
    lift.send(()).unwrap();
    let was_lifted = late.unwrap().join().unwrap();
    assert!(was_lifted, "the runtime had a free thread before the limit was lifted");
    assert_eq!(ENDED.load(SeqCst), 0, "the goroutine waited until a blocking call returned");
    lifter.join().unwrap();
    drop(blocked);
    done();
}

/// As long as the kernel refused threads, the P ran only goroutines that were stopped in libc, one
/// after the other: no other goroutine, no timer and no descriptor got its turn.
#[test]
fn goroutines_in_libc_leave_turns_to_others_without_new_threads() {
    child_test!(limit = LIMIT, |child| {
        run(child, "in libc", &[]).succeeded();
    });
    no_core_file();
    let runtime = Runtime::builder().procs(1).build().unwrap();
    // Some threads to spare: without one, a goroutine is stopped in libc only after a long time.
    runtime.run(|| {
        let block = || _ = raw_sleep_through(Duration::from_millis(200));
        let blocked: Vec<_> = (0..4).map(|_| go(block)).collect();
        blocked.into_iter().for_each(|g| g.join().unwrap());
    });
    // More than there are spare threads. Touched before: a page fault may cost a thread its P.
    let buffers = [(); 6].map(|()| vec![1u8; 8 << 20]);
    no_more_threads();
    runtime.run(|| sleep_beside(buffers, Duration::ZERO, fill));
    done();
}

/// Fills the buffer, inside libc.
fn fill(buffer: &mut Vec<u8>) {
    // SAFETY: memory of the caller.
    unsafe { libc::memset(buffer.as_mut_ptr().cast(), 1, buffer.len()) };
}

/// Sleeps again and again, beside goroutines that block for `blocked` and then `compute`, one for
/// each buffer.
fn sleep_beside<const N: usize>(
    buffers: [Vec<u8>; N],
    blocked: Duration,
    compute: fn(&mut Vec<u8>),
) {
    static STOP: AtomicBool = AtomicBool::new(false);
    let busy = move |mut buffer: Vec<u8>| {
        if !blocked.is_zero() {
            raw_sleep_through(blocked);
        }
        while !STOP.load(SeqCst) {
            compute(&mut buffer);
        }
    };
    let busy = buffers.map(|buffer| go(move || busy(buffer)));
    // Long enough for the kernel's refusals to count as lasting.
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        trefoil::time::sleep(Duration::from_millis(1));
    }
    STOP.store(true, SeqCst);
    busy.into_iter().for_each(|g| g.join().unwrap());
}

/// All threads ran goroutines without a P, and sysmon, which slept because all Ps were idle, did not
/// preempt them. On a busy machine each of them got the idle P for itself again.
#[test]
fn goroutines_without_a_p_are_preempted_if_no_thread_is_free() {
    child_test!(limit = LIMIT, |child| {
        run(child, "without a P", &[]).succeeded();
    });
    compute_on_all_threads(|_| std::hint::spin_loop());
}

/// No goroutine was stopped in libc without a spare thread, so those that were always there kept
/// all threads for themselves.
#[test]
fn goroutines_in_libc_are_preempted_if_no_thread_is_free() {
    child_test!(limit = LIMIT, |child| {
        run(child, "in libc, without a P", &[]).succeeded();
    });
    compute_on_all_threads(fill);
}

/// Lets more goroutines than there are threads block, so that each thread loses its P, and then
/// `compute`. Another goroutine gets a turn nevertheless.
fn compute_on_all_threads(compute: fn(&mut Vec<u8>)) {
    no_core_file();
    let runtime = Runtime::builder().procs(1).build().unwrap();
    runtime.run(|| go(yield_now).join().unwrap());
    let buffers = [(); 4].map(|()| vec![1u8; 8 << 20]);
    no_more_threads();
    runtime.run(|| sleep_beside(buffers, Duration::from_millis(100), compute));
    done();
}

/// A goroutine that was locked to its thread was preempted, and no thread was left that could have
/// taken it from its queue again.
#[test]
fn a_locked_goroutine_goes_on_if_no_thread_is_free() {
    child_test!(limit = LIMIT, |child| {
        run(child, "locked", &[]).succeeded();
    });
    no_core_file();
    let runtime = Runtime::builder().procs(1).max_threads(2).build().unwrap();
    let begun = Instant::now();
    let rounds = runtime.go(|| {
        go(|| raw_sleep_through(BLOCKED));
        let _locked = lock_os_thread();
        for _ in 0..30 {
            // Its thread loses the P, and computes without one; then with one, while another
            // goroutine waits.
            raw_sleep_through(Duration::from_millis(15));
            compute_for(Duration::from_millis(20));
            go(|| ());
            yield_now();
            compute_for(Duration::from_millis(20));
        }
    });
    rounds.unwrap().join().unwrap();
    end_now(begun);
}

/// This process writes to a file instead of stderr.
struct Stderr {
    original: OwnedFd,
    file: File,
}

impl Stderr {
    fn divert() -> Stderr {
        // SAFETY: a name with a terminator; new descriptors without another owner.
        unsafe {
            let original = OwnedFd::from_raw_fd(libc::dup(2));
            let file = File::from_raw_fd(libc::memfd_create(c"stderr".as_ptr(), 0));
            assert_eq!(libc::dup2(file.as_raw_fd(), 2), 2);
            Stderr { original, file }
        }
    }

    /// Returns what the process has written since [`Stderr::divert`].
    fn text(&self) -> String {
        let mut bytes = [0; 4096];
        let n = self.file.read_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    }

    /// Diverts it no longer, and writes the text to stderr.
    fn restore(self) {
        // SAFETY: descriptors of this process.
        assert_eq!(unsafe { libc::dup2(self.original.as_raw_fd(), 2) }, 2);
        mark(&self.text());
    }
}

#[test]
fn work_is_done_without_new_threads() {
    child_test!(limit = LIMIT, |child| {
        for case in ["later", "more Ps", "at the start"] {
            run(child, case, &[]).succeeded();
        }
    });
    let case = case();
    if case == "at the start" {
        no_more_threads();
        let text = Runtime::builder().procs(4).build().unwrap_err().to_string();
        assert!(text.contains("thread"), "{text}");
        let payload = catch_unwind(|| drop(go(|| ()))).unwrap_err();
        let text = payload.downcast_ref::<String>().unwrap();
        assert!(text.contains("thread"), "{text}");
        return done();
    }
    let runtime = Runtime::builder().procs(16).build().unwrap();
    runtime.run(|| go(yield_now).join().unwrap());
    no_more_threads();
    // The existing threads do the work.
    let sum: usize = runtime.run(|| {
        if case == "more Ps" {
            trefoil::set_procs(64);
        }
        let handles: Vec<_> = (0..5000usize)
            .map(|i| {
                go(move || {
                    (0..5).for_each(|_| yield_now());
                    go(move || i).join().unwrap()
                })
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).sum()
    });
    assert_eq!(sum, 5000 * 4999 / 2);
    done();
}

/// Both wait in global queues, and the goroutine in libc is preferred there.
#[test]
fn a_new_goroutine_runs_beside_one_in_libc_if_no_thread_is_free() {
    child_test!(limit = LIMIT, |child| {
        run(child, "new beside libc", &[]).succeeded();
    });
    no_core_file();
    let runtime = Runtime::builder().procs(1).max_threads(2).build().unwrap();
    let begun = Instant::now();
    runtime.go(|| raw_sleep_through(BLOCKED)).unwrap();
    let mut buffer = vec![1u8; 8 << 20];
    runtime
        .go(move || -> () {
            loop {
                fill(&mut buffer)
            }
        })
        .unwrap();
    // Long enough for that goroutine to be stopped in libc.
    thread::sleep(Duration::from_secs(2));
    for _ in 0..10 {
        // It is in no local queue, and no timer has woken it.
        runtime.go(|| ()).unwrap().join().unwrap();
    }
    end_now(begun);
}

/// A goroutine that was locked to its thread waited in a queue, its thread slept, and a P was idle:
/// no other thread was left.
#[test]
fn a_locked_goroutine_goes_on_if_the_last_free_thread_blocks() {
    const ROUNDS: u32 = 30;
    child_test!(limit = LIMIT, |child| {
        run(child, "locked, others block", &[]).succeeded();
    });
    no_core_file();
    let runtime = Runtime::builder().procs(1).max_threads(2).build().unwrap();
    let begun = Instant::now();
    let (mut reader, mut writer) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        for _ in 0..ROUNDS {
            thread::sleep(Duration::from_millis(30));
            writer.write_all(&[1]).unwrap();
        }
        thread::sleep(BLOCKED);
    });
    let locked = runtime.go(move || {
        let _locked = lock_os_thread();
        go(|| raw_sleep_through(BLOCKED));
        // Preempted, so that the other goroutine runs.
        compute_for(Duration::from_millis(100));
        for _ in 0..ROUNDS {
            yield_now();
            compute_for(Duration::from_millis(10));
            // Parked, until a timer or a descriptor is due.
            trefoil::time::sleep(Duration::from_millis(10));
            reader.read_exact(&mut [0]).unwrap();
        }
    });
    locked.unwrap().join().unwrap();
    end_now(begun);
}

/// A goroutine that was locked to the last free thread kept its P for ever, while another one
/// waited that was locked as well.
#[test]
fn locked_goroutines_take_turns_if_no_thread_is_free() {
    static ENDS: AtomicBool = AtomicBool::new(false);
    child_test!(limit = LIMIT, |child| {
        run(child, "locked, take turns", &[]).succeeded();
    });
    no_core_file();
    let runtime = Runtime::builder().procs(1).max_threads(2).build().unwrap();
    let begun = Instant::now();
    let locked = runtime.go(|| {
        let _locked = lock_os_thread();
        let other = go(|| {
            let _locked = lock_os_thread();
            // Preempted; and with yields, while others wait behind it.
            for round in 0.. {
                match round % 2 {
                    0 => compute_for(Duration::from_millis(30)),
                    _ => (0..100).for_each(|_| {
                        go(|| ());
                        yield_now();
                    }),
                }
                if ENDS.load(SeqCst) {
                    return;
                }
            }
        });
        for _ in 0..10 {
            // The other thread takes the P.
            raw_sleep_through(Duration::from_millis(30));
            yield_now();
            compute_for(Duration::from_millis(30));
            // Woken while the other one runs.
            trefoil::time::sleep(Duration::from_millis(1));
        }
        ENDS.store(true, SeqCst);
        other.join().unwrap();
    });
    locked.unwrap().join().unwrap();
    end_now(begun);
}

/// Locked goroutines that were preempted, maybe with a lock of libc's, were not resumed after their
/// runtime had been dropped, and their threads stayed for ten seconds.
#[test]
fn locked_goroutines_end_with_their_runtime_if_no_thread_is_free() {
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    child_test!(limit = LIMIT, |child| {
        run(child, "locked, runtime dropped", &[]).succeeded();
    });
    no_core_file();
    let runtime = Runtime::builder().procs(1).max_threads(2).build().unwrap();
    let compute = || {
        let _locked = lock_os_thread();
        RUNNING.fetch_add(1, SeqCst);
        loop {
            std::hint::spin_loop();
        }
    };
    runtime.go(compute).unwrap();
    runtime.go(compute).unwrap();
    while RUNNING.load(SeqCst) < 2 {
        thread::sleep(Duration::from_millis(10));
    }
    // Both have been preempted.
    thread::sleep(Duration::from_millis(100));
    let dropped = Instant::now();
    drop(runtime);
    while !ms().is_empty() {
        assert!(dropped.elapsed() < Duration::from_secs(5), "their threads are left");
        thread::sleep(Duration::from_millis(10));
    }
    done();
}
