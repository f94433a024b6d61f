//! Unmodified clients of other crates in a simulated network: their sockets, timeouts and clocks
//! are simulated, and a seed repeats a run.

use redis::Commands;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use trefoil::{go, sim, time};

const SECOND: Duration = Duration::from_secs(1);

/// Serves each connection to port 80 of the host by `serve`, in a goroutine of its own.
fn listen(serve: impl Fn(TcpStream) + Send + Sync + 'static) {
    let serve = Arc::new(serve);
    let listener = TcpListener::bind("0.0.0.0:80").unwrap();
    for stream in listener.incoming() {
        let (serve, stream) = (serve.clone(), stream.unwrap());
        go(move || serve(stream));
    }
}

/// Answers HTTP requests with the number of the request, after `delay`.
fn count_http_requests(delay: Duration) -> impl Fn(TcpStream) + Send + Sync + 'static {
    let count = AtomicU32::new(0);
    move |mut stream| {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        loop {
            let mut line = String::new();
            while line != "\r\n" {
                line.clear();
                if reader.read_line(&mut line).is_err() || line.is_empty() {
                    return;
                }
            }
            time::sleep(delay);
            let text = count.fetch_add(1, SeqCst).to_string();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", text.len());
            if stream.write_all((head + &text).as_bytes()).is_err() {
                return;
            }
        }
    }
}

#[test]
fn ureq_gets_answers_and_times_out_in_virtual_time() {
    let begin = Instant::now();
    sim::builder()
        .explore(30, || {
            sim::host("server", || listen(count_http_requests(Duration::ZERO)));
            sim::host("slow", || listen(count_http_requests(100 * SECOND)));
            sim::settle();
            // With a timeout for the whole request, ureq looks names up on a thread.
            let config = ureq::Agent::config_builder().timeout_global(Some(30 * SECOND));
            let agent: ureq::Agent = config.build().into();
            for i in 0..3 {
                let mut answer = agent.get("http://server/").call().unwrap();
                assert_eq!(answer.body_mut().read_to_string().unwrap(), i.to_string());
            }
            let begin = Instant::now();
            let late = agent.get("http://slow/").call().unwrap_err();
            assert!(matches!(late, ureq::Error::Timeout(_)), "{late}");
            assert_eq!(begin.elapsed().as_secs(), 30);
        })
        .unwrap();
    assert!(begin.elapsed() < 60 * SECOND, "fifteen minutes of virtual time took {begin:?}");
}

/// Reads a RESP command: an array of texts.
fn read_command(reader: &mut impl BufRead) -> Option<Vec<String>> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let count: usize = line.trim().strip_prefix('*')?.parse().ok()?;
    let mut words = Vec::new();
    for _ in 0..count {
        line.clear();
        reader.read_line(&mut line).ok()?;
        let len: usize = line.trim().strip_prefix('$')?.parse().ok()?;
        let mut word = vec![0; len + 2];
        reader.read_exact(&mut word).ok()?;
        word.truncate(len);
        words.push(String::from_utf8(word).ok()?);
    }
    Some(words)
}

/// Serves a few commands of Redis on values in memory.
fn serve_redis() -> impl Fn(TcpStream) + Send + Sync + 'static {
    let values = Mutex::new(HashMap::<String, i64>::new());
    move |mut stream| {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        while let Some(command) = read_command(&mut reader) {
            let words: Vec<&str> = command.iter().map(String::as_str).collect();
            let answer = match words[..] {
                ["GET", key] => match values.lock().unwrap().get(key) {
                    Some(value) => format!("${}\r\n{value}\r\n", value.to_string().len()),
                    None => "$-1\r\n".to_owned(),
                },
                ["SET", key, value] => {
                    values.lock().unwrap().insert(key.to_owned(), value.parse().unwrap());
                    "+OK\r\n".to_owned()
                }
                ["INCRBY", key, by] => {
                    let mut values = values.lock().unwrap();
                    let value = values.entry(key.to_owned()).or_default();
                    *value += by.parse::<i64>().unwrap();
                    format!(":{value}\r\n")
                }
                _ => "+OK\r\n".to_owned(),
            };
            if stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    }
}

/// Lets two workers add to a counter, ten times each, and returns it.
fn add_from_two_hosts(add: fn(&mut redis::Connection)) -> i64 {
    sim::host("redis", || listen(serve_redis()));
    sim::settle();
    let work = move || {
        let client = redis::Client::open("redis://redis:80/").unwrap();
        let mut connection = client.get_connection().unwrap();
        (0..10).for_each(|_| add(&mut connection));
    };
    let workers = [sim::host("a", work), sim::host("b", work)];
    workers.iter().for_each(|worker| assert!(worker.wait()));
    let client = redis::Client::open("redis://redis:80/").unwrap();
    client.get_connection().unwrap().get("counter").unwrap()
}

#[test]
fn a_lost_update_of_a_redis_client_is_found_and_repeated() {
    let racy = || {
        let sum = add_from_two_hosts(|redis| {
            let before: Option<i64> = redis.get("counter").unwrap();
            redis.set::<_, _, ()>("counter", before.unwrap_or(0) + 1).unwrap();
        });
        assert_eq!(sum, 20, "an addition was lost");
    };
    let failure = sim::builder().explore(20, racy).unwrap_err();
    assert_eq!(failure.kind, sim::FailureKind::Panic, "{failure}");
    assert!(failure.is_repeatable, "{failure}");
    let atomic = || {
        let sum = add_from_two_hosts(|redis| redis.incr("counter", 1).unwrap());
        assert_eq!(sum, 20);
    };
    sim::builder().explore(20, atomic).unwrap();
}

#[test]
fn a_web_socket_survives_a_short_partition() {
    sim::run(|| {
        sim::host("echo", || {
            listen(|stream| {
                let mut socket = tungstenite::accept(stream).unwrap();
                while let Ok(message) = socket.read() {
                    if socket.send(message).is_err() {
                        return;
                    }
                }
            });
        });
        sim::settle();
        let (mut socket, _) = tungstenite::connect("ws://echo:80/").unwrap();
        sim::net().partition("test", "echo");
        let healer = go(|| {
            time::sleep(3 * SECOND);
            sim::net().heal("test", "echo");
        });
        let begin = Instant::now();
        socket.send("hello".into()).unwrap();
        assert_eq!(socket.read().unwrap().into_text().unwrap(), "hello");
        assert!(begin.elapsed() > 3 * SECOND);
        healer.join().unwrap();
    });
}
