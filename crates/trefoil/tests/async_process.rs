//! Children and signals in async code: tasks, `block_on`, and an executor of the tests.

mod common;
#[path = "common/executor.rs"]
mod executor;

use common::{MS, watchdog};
use executor::{Parking, at_each_procs};
use std::future::Future;
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Instant;
use trefoil::process::{self, output_async, status_async, wait_async};
use trefoil::signal::{self, SIGUSR1};
use trefoil::time::timeout_async;
use trefoil::{block_on, go, select, task};

/// A child that nobody kills would run for so long.
const FOREVER: &str = "exec sleep 300";

/// Signals go to all tests of the process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn sh(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

/// Awaits the future that `make` makes in a task, in `block_on` on a goroutine and on a thread, and
/// in another executor, at the same time.
fn in_all_ways<F>(make: impl Fn() -> F + Send + Sync + Copy + 'static)
where
    F: Future<Output = ()> + Send + 'static,
{
    at_each_procs(move || {
        let threads = [
            std::thread::spawn(move || block_on(make())),
            std::thread::spawn(move || Parking::block_on(make())),
        ];
        let handles = [task::spawn(make()), go(move || block_on(make()))];
        handles.into_iter().for_each(|h| h.join().unwrap());
        threads.into_iter().for_each(|t| trefoil::blocking(|| t.join()).unwrap());
    });
}

/// Returns whether there is a process with this id, maybe a zombie.
fn exists(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn wait_returns_the_exit_status() {
    let _dog = watchdog();
    in_all_ways(|| async {
        let mut child = sh("sleep 0.02; exit 7").spawn().unwrap();
        assert_eq!(wait_async(&mut child).await.unwrap().code(), Some(7));
        // It is remembered.
        assert_eq!(wait_async(&mut child).await.unwrap().code(), Some(7));
        assert_eq!(process::wait(&mut child).unwrap().code(), Some(7));
    });
}

#[test]
fn wait_closes_the_input_of_the_child() {
    let _dog = watchdog();
    in_all_ways(|| async {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert!(wait_async(&mut child).await.unwrap().success());
    });
}

#[test]
fn a_wait_that_is_dropped_can_be_repeated() {
    let _dog = watchdog();
    in_all_ways(|| async {
        let mut child = sh(FOREVER).spawn().unwrap();
        for _ in 0..3 {
            assert!(timeout_async(2 * MS, wait_async(&mut child)).await.is_err());
        }
        child.kill().unwrap();
        assert_eq!(wait_async(&mut child).await.unwrap().signal(), Some(libc::SIGKILL));
    });
}

#[test]
fn many_tasks_wait_for_children_without_threads() {
    let _dog = watchdog();
    at_each_procs(|| {
        let children: Vec<_> = (0..20)
            .map(|i| {
                let mut child = sh(&format!("sleep 0.1; exit {i}")).spawn().unwrap();
                task::spawn(async move { wait_async(&mut child).await.unwrap().code() })
            })
            .collect();
        assert!(trefoil::debug::stats().threads < 20);
        for (i, child) in children.into_iter().enumerate() {
            assert_eq!(child.join().unwrap(), Some(i as i32));
        }
    });
}

#[test]
fn output_collects_both_streams_however_long_they_are() {
    let _dog = watchdog();
    in_all_ways(|| async {
        // More than a pipe holds, first to one stream and then to the other.
        let script = "head -c 300000 /dev/zero >&2; head -c 200000 /dev/zero; exit 3";
        let out = output_async(&mut sh(script)).await.unwrap();
        assert_eq!((out.stdout.len(), out.stderr.len()), (200_000, 300_000));
        assert_eq!(out.status.code(), Some(3));
        let out = output_async(&mut sh("cat; echo end")).await.unwrap();
        assert_eq!((&out.stdout[..], &out.stderr[..]), (&b"end\n"[..], &b""[..]));
    });
}

#[test]
fn status_returns_the_exit_status_or_the_error_of_the_spawn() {
    let _dog = watchdog();
    in_all_ways(|| async {
        assert_eq!(status_async(&mut sh("exit 4")).await.unwrap().code(), Some(4));
        let mut missing = Command::new("/nonexistent/program");
        assert_eq!(status_async(&mut missing).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(output_async(&mut missing).await.unwrap_err().kind(), ErrorKind::NotFound);
    });
}

#[test]
fn a_dropped_output_kills_its_child() {
    let _dog = watchdog();
    in_all_ways(|| async {
        let name = format!("{:?}", Instant::now()).replace(|c: char| !c.is_ascii_digit(), "");
        let file = std::env::temp_dir().join(format!("trefoil-pid-{}-{name}", std::process::id()));
        let path = file.to_str().unwrap().to_owned();
        let mut command = sh(&format!("echo $$ > {path}; {FOREVER}"));
        let mut output = Box::pin(output_async(&mut command));
        let pid = loop {
            assert!(timeout_async(5 * MS, output.as_mut()).await.is_err());
            match std::fs::read_to_string(&path).unwrap_or_default().trim().parse() {
                Ok(pid) => break pid,
                Err(_) => continue,
            }
        };
        assert!(exists(pid));
        drop(output);
        assert!(!exists(pid), "neither the child nor a zombie is left");
        std::fs::remove_file(file).unwrap();
    });
}

#[test]
fn a_task_that_is_aborted_kills_its_command() {
    let _dog = watchdog();
    at_each_procs(|| {
        let task = task::spawn(async { status_async(&mut sh(FOREVER)).await });
        trefoil::time::sleep(10 * MS);
        let begin = Instant::now();
        task.abort();
        assert!(task.join().is_err());
        assert!(begin.elapsed() < 100_000 * MS);
    });
}

#[test]
fn a_select_waits_for_a_child_beside_a_channel() {
    let _dog = watchdog();
    at_each_procs(|| {
        let (tx, rx) = trefoil::chan::bounded(0);
        let mut child = sh("sleep 0.03; exit 5").spawn().unwrap();
        let sender = go(move || {
            (0..3).for_each(|n| tx.send(n).unwrap());
            tx
        });
        let mut exit = pin!(wait_async(&mut child));
        let mut received = 0;
        let status = loop {
            select! {
                recv(rx) -> v => received += usize::from(v.is_ok()),
                future(exit.as_mut()) -> status => break status.unwrap(),
            }
            if received == 3 {
                break select! { future(exit.as_mut()) -> status => status.unwrap() };
            }
        };
        assert_eq!((status.code(), received), (Some(5), 3));
        drop(sender.join());
    });
}

fn send(signal: i32) {
    // SAFETY: a system call without pointers.
    assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
}

#[test]
fn a_signal_arrives_in_every_kind_of_async_code() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let _dog = watchdog();
    at_each_procs(|| {
        let receivers: Vec<_> = (0..4).map(|_| signal::notify(&[SIGUSR1]).unwrap()).collect();
        let [a, b, c, d] = receivers.try_into().unwrap();
        let threads = [
            std::thread::spawn(move || assert_eq!(block_on(a.recv_async()), Ok(SIGUSR1))),
            std::thread::spawn(move || assert_eq!(Parking::block_on(b.recv_async()), Ok(SIGUSR1))),
        ];
        let handles = [
            task::spawn(async move { assert_eq!(c.recv_async().await, Ok(SIGUSR1)) }),
            go(move || select! { future(d.recv_async()) -> s => assert_eq!(s, Ok(SIGUSR1)) }),
        ];
        send(SIGUSR1);
        handles.into_iter().for_each(|h| h.join().unwrap());
        threads.into_iter().for_each(|t| trefoil::blocking(|| t.join()).unwrap());
    });
}

#[test]
fn a_receive_of_a_signal_that_is_dropped_loses_none() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    let _dog = watchdog();
    at_each_procs(|| {
        let signals = signal::notify(&[SIGUSR1]).unwrap();
        let task = task::spawn(async move {
            for _ in 0..50 {
                {
                    let mut dropped = pin!(signals.recv_async());
                    let polled = std::future::poll_fn(|cx| {
                        std::task::Poll::Ready(dropped.as_mut().poll(cx))
                    });
                    assert!(polled.await.is_pending());
                    send(SIGUSR1);
                    // The wake-up may reach the future before it is dropped.
                    task::yield_now().await;
                }
                assert_eq!(signals.recv_async().await, Ok(SIGUSR1));
            }
        });
        task.join().unwrap();
    });
}
