//! Channels, a lock, the clock and the network. A channel has no bound in may: where one item is
//! under way at a time that makes no difference.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench_common::clock::{Hogs, Ticks, short_time, sleep_time};
use bench_common::echo::{Echo, ask, ask_pair, serve, serve_pair};
use bench_common::{Args, Meter, Report, allow_many_files, cpu_time, size};
use may::coroutine::sleep;
use may::go;
use may::net::{TcpListener, TcpStream};
use may::sync::{Mutex, mpsc};

/// An echo on the other side of two channels.
pub fn ping_pong(args: &Args) -> Report {
    let (ping, pinged) = mpsc::channel::<u64>();
    let (pong, ponged) = mpsc::channel::<u64>();
    let echo = go!(move || {
        for value in pinged {
            pong.send(value + 1).unwrap();
        }
    });
    let mut meter = Meter::new(args, size::TRIPS as usize);
    while meter.another_round() {
        for i in 0..size::TRIPS {
            ping.send(i).unwrap();
            assert_eq!(ponged.recv(), Ok(i + 1));
        }
    }
    let report = meter.report();
    drop(ping);
    echo.join().unwrap();
    report
}

/// One token goes round: each node takes one off it and passes it on.
pub fn ring(args: &Args) -> Report {
    let nodes = args.number("n", size::RING_NODES);
    let (done, ended) = mpsc::channel();
    let (first, mut input) = mpsc::channel::<usize>();
    for i in 0..nodes {
        let (output, next) = mpsc::channel();
        let output = if i == nodes - 1 { first.clone() } else { output };
        let receive = std::mem::replace(&mut input, next);
        let done = done.clone();
        go!(move || {
            for left in receive {
                match left {
                    0 => done.send(()).unwrap(),
                    _ => output.send(left - 1).unwrap(),
                }
            }
        });
    }
    let hops = size::RING_HOPS.next_multiple_of(nodes);
    let mut meter = Meter::new(args, hops);
    while meter.another_round() {
        first.send(hops).unwrap();
        ended.recv().unwrap();
    }
    meter.report()
}

pub fn mutexes(args: &Args) -> Report {
    const LOCKS: usize = size::LOCKERS * size::LOCKS_EACH;
    let count = Arc::new(Mutex::new(0));
    let mut meter = Meter::new(args, LOCKS);
    let mut rounds = 0;
    while meter.another_round() {
        let handles: [_; size::LOCKERS] = std::array::from_fn(|_| {
            let count = count.clone();
            go!(move || {
                for _ in 0..size::LOCKS_EACH {
                    *count.lock().unwrap() += 1;
                }
            })
        });
        for handle in handles {
            handle.join().unwrap();
        }
        rounds += 1;
        assert_eq!(*count.lock().unwrap(), rounds * LOCKS);
    }
    meter.report()
}

pub fn sleep_1000(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SLEEPS_EACH, sleep_time)
}

pub fn sleep_short(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SHORT_SLEEPS_EACH, short_time)
}

fn sleepers(n: usize, each: usize, time: fn(usize, usize) -> Duration) -> Report {
    let cpu = cpu_time();
    let sleeper = |i| {
        go!(move || {
            let mut late = Vec::with_capacity(each);
            for k in 0..each {
                let duration = time(i, k);
                let start = Instant::now();
                sleep(duration);
                late.push(start.elapsed() - duration);
            }
            late
        })
    };
    let handles: Vec<_> = (0..n).map(sleeper).collect();
    let late = handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect();
    Report::new().with("cpu_s", (cpu_time() - cpu).as_secs_f64()).with_lateness(late)
}

/// May resumes a sleeper on the thread of its timers, so the ticker does not wait for the hogs.
pub fn ticker_hogs(args: &Args) -> Report {
    let hogs: Arc<Hogs> = Arc::default();
    let start = Instant::now();
    let budget = args.time(size::HOGS_TIME);
    hogs.stop_after(budget);
    let handles: [_; size::HOGS] = std::array::from_fn(|hog| {
        let hogs = hogs.clone();
        go!(move || hogs.compute(hog))
    });
    let mut ticks = Ticks::new();
    while start.elapsed() < budget {
        sleep(ticks.next().saturating_duration_since(Instant::now()));
        ticks.woke();
    }
    let took = start.elapsed();
    for handle in handles {
        handle.join().unwrap();
    }
    hogs.report(took).with_lateness(ticks.late())
}

/// A plain thread that was asleep in the kernel sends, while nothing else runs.
pub fn wake_idle(args: &Args) -> Report {
    let wakes = args.time(size::WAKES_TIME).div_duration_f64(size::IDLE) as usize;
    let (send, receive) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        for _ in 0..wakes {
            std::thread::sleep(size::IDLE);
            send.send(Instant::now()).unwrap();
        }
    });
    let late: Vec<Duration> = receive.into_iter().map(|sent: Instant| sent.elapsed()).collect();
    thread.join().unwrap();
    Report::new().with_lateness(late)
}

pub fn echo(args: &Args, clients: usize) -> Report {
    static ECHO: Echo = Echo::new();
    allow_many_files();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    let prompt = |stream: TcpStream| {
        stream.set_nodelay(true).unwrap();
        stream
    };
    go!(move || {
        loop {
            let stream = prompt(listener.accept().unwrap().0);
            go!(move || serve(stream));
        }
    });
    let client = move || ask(prompt(TcpStream::connect(address).unwrap()), &ECHO);
    let clients: Vec<_> = (0..clients).map(|_| go!(client)).collect();
    sleep(size::ECHO_WARM_UP);
    let measuring = ECHO.begin();
    sleep(args.time(size::ECHO_TIME));
    let report = ECHO.end(measuring);
    report(clients.into_iter().flat_map(|client| client.join().unwrap()).collect())
}

/// Each pair makes its round trips, then the next round begins.
pub fn echo_pairs(args: &Args, pairs: usize) -> Report {
    allow_many_files();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    let connect = |_| {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        let (served, _) = listener.accept().unwrap();
        served.set_nodelay(true).unwrap();
        go!(move || serve_pair(served));
        stream
    };
    let mut streams: Vec<_> = (0..pairs).map(connect).collect();
    let trips = size::PAIRS_TRIPS / pairs;
    let mut meter = Meter::new(args, trips * pairs);
    while meter.another_round() {
        let client = |mut stream| {
            go!(move || {
                ask_pair(&mut stream, trips);
                stream
            })
        };
        let clients: Vec<_> = streams.into_iter().map(client).collect();
        streams = clients.into_iter().map(|client| client.join().unwrap()).collect();
    }
    meter.report()
}
