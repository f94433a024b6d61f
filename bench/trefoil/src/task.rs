//! Tasks: what tokio's worker does in the same rows, with futures on trefoil's scheduler.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bench_common::clock::{Hogs, Ticks};
use bench_common::http::{ask, body};
use bench_common::{Args, Memory, Meter, Report, SETTLE, live_report, size};
use http_body_util::Full;
use hyper::Response;
use hyper::body::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use trefoil::chan::bounded;
use trefoil::net::TcpListener;
use trefoil::sync::WaitGroup;
use trefoil::task::{spawn, yield_now};
use trefoil::time::{sleep, sleep_until_async};

/// Runs a workload as a task, so that it spawns and awaits from inside a task, as tokio's does.
fn in_task(workload: impl Future<Output = Report> + Send + 'static) -> Report {
    spawn(workload).join().unwrap()
}

pub fn spawn_join(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SPAWN_BATCH);
    in_task(async move {
        while meter.another_round() {
            let handles: Vec<_> = (0..size::SPAWN_BATCH).map(|_| spawn(async {})).collect();
            for handle in handles {
                handle.await.unwrap();
            }
        }
        meter.report()
    })
}

pub fn yields(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::YIELDERS * size::YIELDS_EACH);
    in_task(async move {
        while meter.another_round() {
            let handles: Vec<_> = (0..size::YIELDERS)
                .map(|_| {
                    spawn(async {
                        for _ in 0..size::YIELDS_EACH {
                            yield_now().await;
                        }
                    })
                })
                .collect();
            for handle in handles {
                handle.await.unwrap();
            }
        }
        meter.report()
    })
}

/// A future that awaits itself has to be boxed.
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

fn fib_node(n: u64) -> Boxed<u64> {
    Box::pin(async move {
        if n < 2 {
            return n;
        }
        let left = spawn(fib_node(n - 1));
        let right = fib_node(n - 2).await;
        left.await.unwrap() + right
    })
}

pub fn fib(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::FIB_SPAWNS);
    in_task(async move {
        while meter.another_round() {
            assert_eq!(fib_node(size::FIB_N).await, size::FIB_RESULT);
        }
        meter.report()
    })
}

/// 64 tasks whose polls block in `std::thread::sleep`.
pub fn block_std(args: &Args) -> Report {
    const TASKS: usize = 64;
    let mut meter = Meter::new(args, 1);
    while meter.another_round() {
        let handles: Vec<_> = (0..TASKS)
            .map(|_| spawn(async { std::thread::sleep(Duration::from_millis(20)) }))
            .collect();
        for handle in handles {
            handle.join().unwrap();
        }
    }
    meter.report()
}

/// Tasks that await a channel until it is closed.
pub fn live(args: &Args) -> Report {
    let n = args.number("n", size::LIVE);
    let (release, released) = bounded::<()>(0);
    let [ready, ended] = [WaitGroup::new(), WaitGroup::new()];

    let before = Memory::now();
    let start = Instant::now();
    ready.add(n);
    ended.add(n);
    for _ in 0..n {
        let (released, ready, ended) = (released.clone(), ready.clone(), ended.clone());
        spawn(async move {
            ready.done();
            released.recv_async().await.unwrap_err();
            ended.done();
        });
    }
    ready.wait();
    let create = start.elapsed();
    sleep(SETTLE);
    let full = Memory::now();

    let start = Instant::now();
    release.close();
    ended.wait();
    live_report(n, create, start.elapsed(), before, full)
}

pub fn ping_pong(args: &Args) -> Report {
    let (ping, pinged) = bounded::<u64>(1);
    let (pong, ponged) = bounded::<u64>(1);
    let echo = spawn(async move {
        while let Ok(value) = pinged.recv_async().await {
            pong.send_async(value + 1).await.unwrap();
        }
    });
    let mut meter = Meter::new(args, size::TRIPS as usize);
    in_task(async move {
        while meter.another_round() {
            for i in 0..size::TRIPS {
                ping.send_async(i).await.unwrap();
                assert_eq!(ponged.recv_async().await, Ok(i + 1));
            }
        }
        let report = meter.report();
        drop(ping);
        echo.await.unwrap();
        report
    })
}

/// A tick of every millisecond, awaited by a task, beside tasks that only compute.
pub fn ticker_hogs(args: &Args) -> Report {
    let hogs: Arc<Hogs> = Arc::default();
    let handles: [_; size::HOGS] = std::array::from_fn(|hog| {
        let hogs = hogs.clone();
        spawn(async move { hogs.compute(hog) })
    });
    let start = Instant::now();
    let budget = args.time(size::HOGS_TIME);
    let ticker = spawn(async move {
        let mut ticks = Ticks::new();
        while start.elapsed() < budget {
            sleep_until_async(ticks.next()).await;
            ticks.woke();
        }
        ticks.late()
    });
    let late = ticker.join().unwrap();
    hogs.stop();
    let report = hogs.report(start.elapsed());
    for handle in handles {
        handle.join().unwrap();
    }
    report.with_lateness(late)
}

/// HTTP/1.1 by hyper, without tokio.
pub fn hyper(args: &Args, connections: usize) -> Report {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().unwrap();
    let body = Bytes::from_static(body(args).as_bytes());
    spawn(async move {
        loop {
            let (stream, _) = listener.accept_async().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let body = body.clone();
            let service = service_fn(move |_| answer(body.clone()));
            spawn(http1::Builder::new().serve_connection(stream, service));
        }
    });
    let args = args.clone();
    std::thread::spawn(move || ask(&args, address, connections)).join().unwrap()
}

async fn answer(body: Bytes) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(body)))
}
