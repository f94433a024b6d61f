//! Children and signals: waiting for them parks the goroutine.

mod common;

use common::{MS, child_test, watchdog, yield_until};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use trefoil::signal::{self, SIGUSR1, SIGUSR2};
use trefoil::{Runtime, go, process};

fn at_each(f: impl Fn() + Sync) {
    let _watchdog = watchdog();
    for procs in [1, 2, 8] {
        Runtime::builder().procs(procs).build().unwrap().run(&f);
    }
}

fn sh(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

fn send(signal: i32) {
    // SAFETY: a system call without pointers.
    assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
}

#[test]
fn waiting_for_children_needs_no_threads() {
    at_each(|| {
        const CHILDREN: usize = 20;
        let (inputs, started) = trefoil::chan::bounded(CHILDREN);
        let children: Vec<_> = (0..CHILDREN)
            .map(|i| {
                let inputs = inputs.clone();
                go(move || {
                    // It runs until its standard input is closed.
                    let mut child =
                        sh(&format!("cat; exit {i}")).stdin(Stdio::piped()).spawn().unwrap();
                    inputs.send(child.stdin.take().unwrap()).unwrap();
                    process::wait(&mut child).unwrap().code()
                })
            })
            .collect();
        let inputs: Vec<_> = (0..CHILDREN).map(|_| started.recv().unwrap()).collect();
        // A thread that has started a child may still be without a P.
        yield_until("all goroutines to wait for a child without a thread", || {
            let stats = trefoil::debug::stats();
            stats.io_waiters == CHILDREN && stats.threads_without_p == 0
        });
        drop(inputs);
        for (i, child) in children.into_iter().enumerate() {
            assert_eq!(child.join().unwrap(), Some(i as i32));
        }
        assert_eq!(trefoil::debug::stats().io_waiters, 0);
    });
}

#[test]
fn wait_timeout_returns_none_while_the_child_runs() {
    at_each(|| {
        let mut child = sh("sleep 30").spawn().unwrap();
        let start = Instant::now();
        assert_eq!(process::wait_timeout(&mut child, 10 * MS).unwrap(), None);
        assert!(start.elapsed() >= 10 * MS);
        child.kill().unwrap();
        assert!(!process::wait(&mut child).unwrap().success());
        // The status is known by now.
        assert!(!process::wait(&mut child).unwrap().success());
    });
}

#[test]
fn wait_closes_the_childs_standard_input() {
    at_each(|| {
        let mut child = sh("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert!(process::wait(&mut child).unwrap().success());
    });
}

#[test]
fn output_collects_more_than_the_pipes_hold() {
    at_each(|| {
        // More than a pipe holds, on both stdout and stderr.
        let script = "i=0; while [ $i -lt 300 ]; do printf %500s x; printf %400s x >&2; \
                      i=$((i+1)); done; exit 3";
        let out = process::output(&mut sh(script)).unwrap();
        assert_eq!((out.stdout.len(), out.stderr.len()), (150_000, 120_000));
        assert_eq!(out.status.code(), Some(3));
        assert_eq!(process::status(&mut sh("exit 4")).unwrap().code(), Some(4));
        assert!(process::output(&mut Command::new("/nowhere/at/all")).is_err());
    });
}

#[test]
fn output_keeps_the_streams_that_the_caller_has_configured() {
    let both = "cat; echo out; echo err >&2";
    at_each(|| {
        let out = process::output(sh(both).stdout(Stdio::null())).unwrap();
        assert_eq!((&out.stdout[..], &out.stderr[..]), (&b""[..], &b"err\n"[..]));

        let (reader, writer) = std::io::pipe().unwrap();
        let input = std::io::pipe().unwrap();
        std::io::Write::write_all(&mut &input.1, b"in\n").unwrap();
        drop(input.1);
        let mut command = sh(both);
        let out = process::output(command.stdin(input.0).stderr(writer)).unwrap();
        assert_eq!((&out.stdout[..], &out.stderr[..]), (&b"in\nout\n"[..], &b""[..]));
        drop(command);
        assert_eq!(std::io::read_to_string(reader).unwrap(), "err\n");
    });
}

#[test]
fn wait_with_output_collects_piped_streams_only() {
    at_each(|| {
        let spawn = |out: Stdio, err: Stdio| {
            sh("cat; echo out; echo err >&2; exit 3")
                .stdin(Stdio::piped())
                .stdout(out)
                .stderr(err)
                .spawn()
                .unwrap()
        };
        for (piped_out, piped_err) in [(true, true), (true, false), (false, true), (false, false)] {
            let stdio = |piped| if piped { Stdio::piped() } else { Stdio::null() };
            let check = |out: std::process::Output| {
                assert_eq!(out.status.code(), Some(3));
                assert_eq!(out.stdout, if piped_out { &b"out\n"[..] } else { b"" });
                assert_eq!(out.stderr, if piped_err { &b"err\n"[..] } else { b"" });
            };
            let child = spawn(stdio(piped_out), stdio(piped_err));
            check(process::wait_with_output(child).unwrap());
            let child = spawn(stdio(piped_out), stdio(piped_err));
            check(trefoil::block_on(process::wait_with_output_async(child)).unwrap());
        }
    });
}

#[test]
fn output_works_on_a_plain_thread() {
    let _watchdog = watchdog();
    let out = process::output(&mut sh("echo hello")).unwrap();
    assert_eq!(out.stdout, b"hello\n");
}

#[test]
fn signals_arrive_through_channels() {
    child_test!();
    assert!(signal::notify(&[libc::SIGKILL]).is_err());
    assert!(signal::notify(&[0]).is_err() && signal::notify(&[libc::SIGSEGV]).is_err());
    at_each(|| {
        let both = signal::notify(&[SIGUSR1, SIGUSR2]).unwrap();
        let one = signal::notify(&[SIGUSR1]).unwrap();
        send(SIGUSR2);
        assert_eq!(both.recv(), Ok(SIGUSR2));
        for _ in 0..20 {
            send(SIGUSR1);
            assert_eq!((both.recv(), one.recv()), (Ok(SIGUSR1), Ok(SIGUSR1)));
        }
        assert!(one.is_empty());
        // While other goroutines compute.
        static STOP: AtomicBool = AtomicBool::new(false);
        STOP.store(false, Ordering::SeqCst);
        let hogs: Vec<_> = (0..2)
            .map(|_| {
                go(|| {
                    while !STOP.load(Ordering::SeqCst) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        for _ in 0..5 {
            send(SIGUSR1);
            assert_eq!(one.recv(), Ok(SIGUSR1));
        }
        STOP.store(true, Ordering::SeqCst);
        hogs.into_iter().for_each(|h| h.join().unwrap());
    });
}

/// Only a signal can wake this program.
#[test]
fn waiting_for_a_signal_is_no_deadlock() {
    child_test!(|child| {
        let _watchdog = watchdog();
        let (stdout, stderr) = (Stdio::null(), Stdio::piped());
        let mut child = child.command().stdout(stdout).stderr(stderr).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        lines.by_ref().find(|line| line.as_ref().unwrap().starts_with("pid ")).unwrap().unwrap();
        std::thread::sleep(300 * MS);
        // SAFETY: a system call without pointers.
        unsafe { libc::kill(child.id() as i32, SIGUSR1) };
        assert!(child.wait().unwrap().success());
    });
    trefoil::run(|| {
        let signals = signal::notify(&[SIGUSR1]).unwrap();
        common::mark(&format!("pid {}", std::process::id()));
        assert_eq!(signals.recv(), Ok(SIGUSR1));
    });
}

#[test]
fn a_signal_without_listeners_has_its_default_action() {
    child_test!(|child| {
        let out = child.output();
        assert_eq!(out.status.signal(), Some(SIGUSR1), "{out:?}");
    });
    trefoil::run(|| {
        drop(signal::notify(&[SIGUSR1]).unwrap());
        send(SIGUSR1);
        loop {
            trefoil::time::sleep(10 * MS);
        }
    });
}
