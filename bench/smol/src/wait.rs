//! Channels, a lock, the clock, calls that block, and the network. A channel has at least one slot
//! in smol: that is what stands for an unbuffered one.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bench_common::clock::{BurstSleep, Hogs, Ticks, burst_report, short_time, sleep_time};
use bench_common::echo::Echo;
use bench_common::{Args, Meter, Report, allow_many_files, cpu_time, size};
use smol::channel::{self, Receiver, Sender};
use smol::io::{AsyncReadExt, AsyncWriteExt};
use smol::lock::Mutex;
use smol::net::{TcpListener, TcpStream};
use smol::{Task, Timer, spawn, unblock};

/// An echo on the other side of two channels.
pub async fn ping_pong(args: &Args) -> Report {
    let (ping, pinged) = channel::bounded::<u64>(1);
    let (pong, ponged) = channel::bounded::<u64>(1);
    let echo = spawn(async move {
        while let Ok(value) = pinged.recv().await {
            pong.send(value + 1).await.unwrap();
        }
    });
    let mut meter = Meter::new(args, size::TRIPS as usize);
    while meter.another_round() {
        for i in 0..size::TRIPS {
            ping.send(i).await.unwrap();
            assert_eq!(ponged.recv().await, Ok(i + 1));
        }
    }
    let report = meter.report();
    drop(ping);
    echo.await;
    report
}

/// Sends its share of the items.
async fn share(channel: Sender<u64>, first: usize, senders: usize) {
    for i in (first as u64..size::ITEMS).step_by(senders) {
        channel.send(i).await.unwrap();
    }
}

async fn sum(channel: Receiver<u64>) -> u64 {
    let mut sum = 0;
    while let Ok(value) = channel.recv().await {
        sum += value;
    }
    sum
}

pub async fn spsc(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::ITEMS as usize);
    while meter.another_round() {
        let (send, receive) = channel::bounded(size::SLOTS);
        spawn(share(send, 0, 1)).detach();
        assert_eq!(sum(receive).await, size::ITEMS_SUM);
    }
    meter.report()
}

pub async fn mpmc(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::ITEMS as usize);
    while meter.another_round() {
        let (send, receive) = channel::bounded(size::SLOTS);
        let sums: [Task<u64>; size::PARTIES] = std::array::from_fn(|first| {
            spawn(share(send.clone(), first, size::PARTIES)).detach();
            spawn(sum(receive.clone()))
        });
        drop(send);
        let mut all = 0;
        for sum in sums {
            all += sum.await;
        }
        assert_eq!(all, size::ITEMS_SUM);
    }
    meter.report()
}

/// One token goes round: each node takes one off it and passes it on.
pub async fn ring(args: &Args) -> Report {
    let nodes = args.number("n", size::RING_NODES);
    let (done, ended) = channel::bounded(1);
    let (first, mut input) = channel::bounded::<usize>(1);
    for i in 0..nodes {
        let (output, next) = channel::bounded(1);
        let output = if i == nodes - 1 { first.clone() } else { output };
        let receive = std::mem::replace(&mut input, next);
        let done = done.clone();
        let node = async move {
            while let Ok(left) = receive.recv().await {
                match left {
                    0 => done.send(()).await.unwrap(),
                    _ => output.send(left - 1).await.unwrap(),
                }
            }
        };
        spawn(node).detach();
    }
    let hops = size::RING_HOPS.next_multiple_of(nodes);
    let mut meter = Meter::new(args, hops);
    while meter.another_round() {
        first.send(hops).await.unwrap();
        ended.recv().await.unwrap();
    }
    meter.report()
}

pub async fn mutexes(args: &Args) -> Report {
    const LOCKS: usize = size::LOCKERS * size::LOCKS_EACH;
    let count = Arc::new(Mutex::new(0));
    let mut meter = Meter::new(args, LOCKS);
    let mut rounds = 0;
    while meter.another_round() {
        let tasks: [_; size::LOCKERS] = std::array::from_fn(|_| {
            let count = count.clone();
            spawn(async move {
                for _ in 0..size::LOCKS_EACH {
                    *count.lock().await += 1;
                }
            })
        });
        for task in tasks {
            task.await;
        }
        rounds += 1;
        assert_eq!(*count.lock().await, rounds * LOCKS);
    }
    meter.report()
}

pub async fn sleep_1000(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SLEEPS_EACH, sleep_time).await
}

pub async fn sleep_100k(args: &Args) -> Report {
    let time = |i, k| size::SLEEP_BASE + sleep_time(i, k);
    sleepers(args.number("n", size::SLEEPERS_MANY), 1, time).await
}

pub async fn sleep_burst(args: &Args) -> Report {
    let sleeper = |i| {
        let mut burst = BurstSleep::spawned(i);
        spawn(async move {
            Timer::after(burst.begin()).await;
            burst.woke()
        })
    };
    let n = args.number("n", size::SLEEPERS_MANY);
    let handles: Vec<_> = (0..n).map(sleeper).collect();
    let mut late = Vec::with_capacity(n);
    for handle in handles {
        late.push(handle.await);
    }
    burst_report(&late)
}

pub async fn sleep_short(args: &Args) -> Report {
    sleepers(args.number("n", size::SLEEPERS), size::SHORT_SLEEPS_EACH, short_time).await
}

async fn sleepers(n: usize, each: usize, time: fn(usize, usize) -> Duration) -> Report {
    let cpu = cpu_time();
    let sleeper = |i| {
        spawn(async move {
            let mut late = Vec::with_capacity(each);
            for k in 0..each {
                let duration = time(i, k);
                let start = Instant::now();
                Timer::after(duration).await;
                late.push(start.elapsed() - duration);
            }
            late
        })
    };
    let tasks: Vec<_> = (0..n).map(sleeper).collect();
    let mut late = Vec::with_capacity(n * each);
    for task in tasks {
        late.extend(task.await);
    }
    Report::new().with("cpu_s", (cpu_time() - cpu).as_secs_f64()).with_lateness(late)
}

/// The ticker is a task as the hogs are: it waits until two of them have ended.
pub async fn ticker_hogs(args: &Args) -> Report {
    let hogs: Arc<Hogs> = Arc::default();
    let start = Instant::now();
    let budget = args.time(size::HOGS_TIME);
    hogs.stop_after(budget);
    let tasks: [_; size::HOGS] = std::array::from_fn(|hog| {
        let hogs = hogs.clone();
        spawn(async move { hogs.compute(hog) })
    });
    let mut ticks = Ticks::new();
    while start.elapsed() < budget {
        Timer::at(ticks.next()).await;
        ticks.woke();
    }
    let took = start.elapsed();
    for task in tasks {
        task.await;
    }
    hogs.report(took).with_lateness(ticks.late())
}

/// A plain thread that was asleep in the kernel sends, while nothing else runs.
pub async fn wake_idle(args: &Args) -> Report {
    let wakes = args.time(size::WAKES_TIME).div_duration_f64(size::IDLE) as usize;
    let (send, receive) = channel::bounded::<Instant>(1);
    let thread = std::thread::spawn(move || {
        for _ in 0..wakes {
            std::thread::sleep(size::IDLE);
            send.send_blocking(Instant::now()).unwrap();
        }
    });
    let mut late = Vec::with_capacity(wakes);
    while let Ok(sent) = receive.recv().await {
        late.push(sent.elapsed());
    }
    thread.join().unwrap();
    Report::new().with_lateness(late)
}

/// What blocks goes to smol's pool of threads for that.
pub async fn block_std(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::BLOCKERS * size::BLOCKS_EACH);
    while meter.another_round() {
        let tasks: [_; size::BLOCKERS] = std::array::from_fn(|_| {
            spawn(async {
                for _ in 0..size::BLOCKS_EACH {
                    unblock(|| std::thread::sleep(size::BLOCK)).await;
                }
            })
        });
        for task in tasks {
            task.await;
        }
    }
    meter.report()
}

pub async fn echo(args: &Args, clients: usize) -> Report {
    static ECHO: Echo = Echo::new();
    allow_many_files();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a listener");
    let address = listener.local_addr().unwrap();
    let server = async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            spawn(serve(stream)).detach();
        }
    };
    spawn(server).detach();
    let clients: Vec<_> = (0..clients).map(|_| spawn(ask(address, &ECHO))).collect();
    Timer::after(size::ECHO_WARM_UP).await;
    let measuring = ECHO.begin();
    Timer::after(args.time(size::ECHO_TIME)).await;
    let report = ECHO.end(measuring);
    let mut took = Vec::new();
    for client in clients {
        took.extend(client.await);
    }
    report(took)
}

async fn serve(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut message = [0; size::ECHO_BYTES];
    while stream.read_exact(&mut message).await.is_ok() {
        stream.write_all(&message).await.unwrap();
    }
}

async fn ask(address: SocketAddr, echo: &Echo) -> Vec<Duration> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let mut message = [0; size::ECHO_BYTES];
    let mut took = Vec::new();
    while let Some(counts) = echo.counts() {
        let start = Instant::now();
        stream.write_all(&message).await.unwrap();
        stream.read_exact(&mut message).await.unwrap();
        if counts {
            took.push(start.elapsed());
        }
    }
    took
}

/// Each pair makes its round trips, then the next round begins.
pub async fn echo_pairs(args: &Args, pairs: usize) -> Report {
    allow_many_files();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a listener");
    let address = listener.local_addr().unwrap();
    let mut streams = Vec::with_capacity(pairs);
    for _ in 0..pairs {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (served, _) = listener.accept().await.unwrap();
        served.set_nodelay(true).unwrap();
        spawn(serve_pair(served)).detach();
        streams.push(stream);
    }
    let trips = size::PAIRS_TRIPS / pairs;
    let mut meter = Meter::new(args, trips * pairs);
    while meter.another_round() {
        let clients: Vec<_> =
            streams.drain(..).map(|stream| spawn(ask_pair(stream, trips))).collect();
        for client in clients {
            streams.push(client.await);
        }
    }
    meter.report()
}

async fn serve_pair(mut stream: TcpStream) {
    let mut bytes = [0; size::PAIRS_BUFFER_BYTES];
    while let Ok(n @ 1..) = stream.read(&mut bytes).await {
        stream.write_all(&bytes[..n]).await.unwrap();
    }
}

async fn ask_pair(mut stream: TcpStream, trips: usize) -> TcpStream {
    for _ in 0..trips {
        let mut message = [1; size::ECHO_BYTES];
        stream.write_all(&message).await.unwrap();
        message.fill(0);
        stream.read_exact(&mut message).await.unwrap();
        assert_eq!(message, [1; size::ECHO_BYTES]);
    }
    stream
}
