//! The examples, end to end: each is started, on a free loopback port if it is a server, used, and
//! stopped. The parts of some have tests of their own, in virtual time.

mod common;
#[allow(dead_code)]
#[path = "../examples/rate_limiter.rs"]
mod rate_limiter;
#[allow(dead_code)]
#[path = "../examples/timeouts.rs"]
mod timeouts;

use common::{Example, program};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Reads one HTTP answer. Returns its status line and its body.
fn answer(reader: &mut impl BufRead) -> (String, Vec<u8>) {
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    };
    let status = line();
    let (mut length, mut chunked) = (0, false);
    loop {
        let header = line().to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        if let Some(value) = header.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
        chunked |= header == "transfer-encoding: chunked";
    }
    let mut body = Vec::new();
    loop {
        let mut size = length;
        if chunked {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            size = usize::from_str_radix(line.trim_end(), 16).unwrap();
        }
        let mut part = vec![0; size + if chunked { 2 } else { 0 }];
        reader.read_exact(&mut part).unwrap();
        body.extend_from_slice(&part[..size]);
        if !chunked || size == 0 {
            return (status, body);
        }
    }
}

/// Sends a request on a connection of its own and returns the answer.
fn ask(example: &Example, request: &[u8]) -> (String, Vec<u8>) {
    let mut stream = example.connect();
    stream.write_all(request).unwrap();
    answer(&mut BufReader::new(stream))
}

#[test]
fn http_server_answers_requests_enforces_limits_and_shuts_down() {
    let server = Example::start("http_server", &[]);
    // One connection that is kept alive; requests are pipelined and sent in pieces.
    let mut stream = server.connect();
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let requests = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n\
        POST /echo HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello\
        POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nT: t\r\n\r\n\
        GET /stream HTTP/1.1\r\n\r\nGET /nothing HTTP/1.1\r\n\r\nHEAD / HTTP/1.0\r\n\r\n";
    for piece in requests.chunks(37) {
        stream.write_all(piece).unwrap();
        stream.flush().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    let ok = "HTTP/1.1 200 OK".to_owned();
    assert_eq!(answer(&mut reader), (ok.clone(), b"hello from a goroutine\n".to_vec()));
    assert_eq!(answer(&mut reader), (ok.clone(), b"hello".to_vec()));
    assert_eq!(answer(&mut reader), (ok.clone(), b"abcdefg".to_vec()));
    let lines: String = (0..10).map(|i| format!("line {i}\n")).collect();
    assert_eq!(answer(&mut reader), (ok.clone(), lines.into_bytes()));
    assert_eq!(answer(&mut reader).0, "HTTP/1.1 404 Not Found");
    let mut rest = String::new();
    reader.read_to_string(&mut rest).unwrap();
    assert!(rest.starts_with(&ok) && rest.ends_with("Connection: close\r\n\r\n"), "{rest:?}");

    // Requests that are too large or invalid.
    let long = [b"GET / HTTP/1.1\r\nX: ".to_vec(), vec![b'x'; 20 << 10]].concat();
    assert_eq!(ask(&server, &long).0, "HTTP/1.1 431 Request Header Fields Too Large");
    let large = b"POST /echo HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n";
    assert_eq!(ask(&server, large).0, "HTTP/1.1 413 Content Too Large");
    let large = b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n";
    assert_eq!(ask(&server, large).0, "HTTP/1.1 413 Content Too Large");
    let two =
        b"POST /echo HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    assert_eq!(ask(&server, two).0, "HTTP/1.1 400 Bad Request");
    assert_eq!(ask(&server, b"what is this\r\n\r\n").0, "HTTP/1.1 400 Bad Request");
    assert_eq!(ask(&server, b"PUT / HTTP/1.1\r\n\r\n").0, "HTTP/1.1 405 Method Not Allowed");

    // Many slow requests at once.
    let many: Vec<_> = (0..50)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(b"GET /slow HTTP/1.1\r\n\r\n").unwrap();
            BufReader::new(stream)
        })
        .collect();
    for mut reader in many {
        assert_eq!(answer(&mut reader), (ok.clone(), b"a slow answer\n".to_vec()));
    }
    let url = format!("http://{}/echo", server.addr);
    match Command::new("curl").args(["-sS", "-m", "20", "-d", "from curl", &url]).output() {
        Ok(out) => assert_eq!(out.stdout, b"from curl", "{out:?}"),
        Err(_) => {
            // Past libtest's capture.
            let _ = writeln!(std::io::stderr(), "skipped: curl is not installed");
        }
    }

    // Ctrl-C: open requests are answered, idle connections are closed.
    let mut idle = server.connect();
    idle.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut idle = BufReader::new(idle);
    answer(&mut idle);
    let mut busy = BufReader::new(server.connect());
    let head = b"POST /echo HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n";
    busy.get_mut().write_all(head).unwrap();
    // The server has begun with the request, and waits for the body.
    assert_eq!(answer(&mut busy).0, "HTTP/1.1 100 Continue");
    server.interrupt();
    assert_eq!(idle.read(&mut [0; 8]).unwrap(), 0);
    busy.get_mut().write_all(b"hello").unwrap();
    assert_eq!(answer(&mut busy), (ok, b"hello".to_vec()));
    assert_eq!(busy.read(&mut [0; 8]).unwrap(), 0);
    let mut server = server;
    assert!(server.child.wait().unwrap().success());
    let mut printed = String::new();
    server.out.read_to_string(&mut printed).unwrap();
    assert_eq!(printed, "shutting down\nall done\n");
}

#[test]
fn port_forwarder_copies_both_directions_and_half_closes() {
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = target.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in target.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut all = Vec::new();
                stream.read_to_end(&mut all).unwrap();
                all.reverse();
                stream.write_all(&all).unwrap();
            });
        }
    });
    let forwarder = Example::start("port_forwarder", &[&addr]);
    let clients: Vec<_> = [0, 10, 2_000_000]
        .map(|size: usize| {
            let mut stream = forwarder.connect();
            std::thread::spawn(move || {
                let bytes: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
                stream.write_all(&bytes).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut back = Vec::new();
                stream.read_to_end(&mut back).unwrap();
                back.reverse();
                assert!(back == bytes);
            })
        })
        .into();
    clients.into_iter().for_each(|c| c.join().unwrap());
}

/// Runs an example that ends by itself. Returns the lines that it prints.
fn output(name: &str) -> Vec<String> {
    let output = Command::new(program(name)).stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(str::to_owned).collect()
}

/// Returns the number after `before` in a line.
fn number(line: &str, before: &str) -> u64 {
    let rest = line.split_once(before).unwrap_or_else(|| panic!("{before:?} in {line:?}")).1;
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("a number after {before:?} in {line:?}"))
}

/// Runs an example up to five times, until `is_expected` holds for the lines that it prints: one
/// stall of a thread can change their order. Prints the lines of each run that fails.
fn expect_in_five_runs(name: &str, is_expected: impl Fn(&[String]) -> bool) {
    for run in 1..=5 {
        let lines = output(name);
        if is_expected(&lines) {
            return;
        }
        // Past libtest's capture.
        let _ = writeln!(std::io::stderr(), "{name}: run {run} of 5: {lines:?}");
    }
    panic!("{name}: none of five runs printed what is expected");
}

#[test]
fn two_printers_print_by_turns() {
    // The first printer sleeps for 80 ms between its first line and its last. If the kernel does
    // not run the second one's thread meanwhile, the first prints all its lines before it.
    expect_in_five_runs("two_printers", |lines| {
        assert_eq!(lines.len(), 10);
        assert_both_count(lines, ["first:", "second:"], 5);
        take_turns(lines, ["first:", "second:"], 5)
    });
}

/// Asserts that each of two goroutines prints its lines in order.
fn assert_both_count(lines: &[String], names: [&str; 2], to: usize) {
    for name in names {
        let own: Vec<&String> = lines.iter().filter(|line| line.starts_with(name)).collect();
        let expected: Vec<String> = (1..=to).map(|i| format!("{name} {i}")).collect();
        assert_eq!(own, expected.iter().collect::<Vec<_>>());
    }
}

/// Returns whether each of two goroutines prints a line before the other has printed all. (Not
/// whether they alternate: on a busy machine a thread may block in printing for a moment, and then
/// the other goroutine runs first.)
fn take_turns(lines: &[String], names: [&str; 2], to: usize) -> bool {
    !names.iter().any(|name| lines[..to].iter().all(|line| line.starts_with(name)))
}

#[test]
fn yielding_lets_the_other_goroutine_run_first() {
    let lines = output("yielding");
    assert_eq!(lines[0], "goroutine: 1", "main must have yielded before it printed");
    assert_both_count(&lines, ["goroutine:", "main:"], 3);
    assert!(take_turns(&lines, ["goroutine:", "main:"], 3), "{lines:?}");
}

#[test]
fn endless_printer_ends_with_main() {
    let lines = output("endless_printer");
    // The printer may print more lines before the program ends.
    let printed = lines.iter().take_while(|line| *line == "still here").count();
    let took = number(&lines[printed], "main: done after ");
    // One line per 10 ms, one at the start, and one if the printer runs before main takes the time.
    let most = took / 10 + 2;
    assert!(took >= 100 && (1..=most).contains(&(printed as u64)), "{lines:?}");
}

#[test]
fn blocking_sleeper_does_not_delay_main() {
    // If the sleeper kept the P, main would print after it in every run. On a busy machine sysmon
    // or the thread that gets the P may wait for a CPU for as long as the sleeper sleeps.
    expect_in_five_runs("blocking_sleeper", |lines| {
        let line = |start| lines.iter().position(|line| line.starts_with(start)).unwrap();
        let (main, sleeper) = (line("main: sum 500000500000 "), line("sleeper: woke up "));
        assert!(number(&lines[sleeper], "after ") >= 300, "{lines:?}");
        main < sleeper
    });
}

#[test]
fn procs_prints_cpus_ps_and_goroutines() {
    let lines = output("procs");
    assert!(number(&lines[0], "CPUs: ") >= 1);
    assert!(lines[1].ends_with("4 now"), "{lines:?}");
    assert_eq!(lines[2..], ["goroutines: 11", "goroutines at the end: 1"]);
}

#[test]
fn wait_group_waits_for_both_tasks() {
    let lines = output("wait_group");
    assert_both_count(&lines[..6], ["task A, step", "task B, step"], 3);
    assert!(take_turns(&lines, ["task A, step", "task B, step"], 3), "{lines:?}");
    assert_eq!(lines[6], "both tasks are done");
}

#[test]
fn worker_pool_runs_at_most_four_jobs_at_once() {
    assert_eq!(output("worker_pool"), ["40 results, sum 22140, at most 4 at once"]);
}

#[test]
fn pipeline_stages_end_when_the_last_receiver_is_dropped() {
    let expected = ["[1, 9, 25, 49, 81, 121, 169, 225]", "every stage has ended"];
    assert_eq!(output("pipeline"), expected);
}

#[test]
fn fan_in_receives_from_both_sources() {
    let lines = output("fan_in");
    assert_eq!(lines.last().unwrap(), "9 messages from 2 sources");
    assert_eq!(lines.iter().filter(|line| line.starts_with("quick ")).count(), 6);
    assert_eq!(lines.iter().filter(|line| line.starts_with("slow ")).count(), 3);
}

#[test]
fn goroutines_and_tasks_receive_every_reading_once() {
    let lines = output("goroutines_and_tasks");
    // 1 + … + 1000 from the tasks, 2 × (1 + … + 10) from the goroutines.
    assert_eq!(lines[1], "1020 readings, sum 500610");
    let [goroutine, task] = ["", "goroutine, "].map(|before| number(&lines[0], before));
    assert_eq!(goroutine + task, 1020, "{lines:?}");
}

#[test]
fn rate_limiter_spaces_requests_after_a_burst() {
    let lines = output("rate_limiter");
    let at: Vec<u64> = lines.iter().map(|line| number(line, "at ")).collect();
    assert_eq!(at.len(), 8);
    // Five requests wait for a tick of 10 ms. On a busy machine main may take the time just before
    // the first tick, and one tick may be late. The test in virtual time asserts the exact times.
    assert!(at[7] >= 30, "{at:?}");
}

#[test]
fn timeouts_cancel_the_slow_backend() {
    let mut lines = output("timeouts");
    assert_eq!(lines.pop().unwrap(), "no goroutine is left");
    // In real time a busy machine may delay the others beyond the deadline, too. The test in
    // virtual time asserts their answers and the order.
    lines.sort();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[0], "asleep: context deadline exceeded");
    assert!(lines[1].starts_with("far: ") && lines[2].starts_with("near: "), "{lines:?}");
}

#[test]
fn parallel_sort_sorts_a_million_numbers() {
    assert!(output("parallel_sort")[0].starts_with("1000000 numbers sorted"));
}

#[test]
fn crawler_finds_every_link_on_few_threads() {
    let lines = output("crawler");
    assert_eq!(number(&lines[0], ""), 401, "{lines:?}");
    assert!(number(&lines[0], "on ") <= 16, "{lines:?}");
}

#[test]
fn raft_commits_the_same_commands_on_every_node() {
    let lines = output("raft");
    assert!(lines[0].ends_with(" leads in term 1") || lines.len() > 4, "{lines:?}");
    let logs: Vec<_> = lines.iter().filter_map(|line| line.split_once(": ")).collect();
    assert_eq!(logs.len(), 3, "{lines:?}");
    assert!(logs.iter().all(|(_, log)| *log == "one two three four five"), "{lines:?}");
}

#[test]
fn graceful_shutdown_finishes_the_jobs_that_have_begun() {
    let mut child = Command::new(program("graceful_shutdown"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "working\n");
    std::thread::sleep(Duration::from_millis(300));
    // SAFETY: signals a child process that was not waited for yet.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(rest.starts_with("stopping\n") && rest.contains("all finished: true"), "{rest}");
    assert!(number(&rest, "stopping\n") > 0, "{rest}");
}
