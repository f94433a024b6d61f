//! HTTP servers with threads of their own: tiny_http and rouille. The clients, tiny_http's workers
//! and the loop that serves rouille are goroutines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil_compat_more::{MANY, assert_few_threads, go_each, http, run};

#[test]
fn tiny_http_requests_are_answered_by_goroutines() {
    const WORKERS: usize = 20;
    run(|| {
        let server = Arc::new(tiny_http::Server::http("127.0.0.1:0").unwrap());
        let addr = server.server_addr().to_ip().unwrap();
        let answered = Arc::new(AtomicUsize::new(0));
        let work = |server: Arc<tiny_http::Server>, answered: Arc<AtomicUsize>| {
            trefoil::go(move || {
                while let Ok(mut request) = server.recv() {
                    let mut body = String::new();
                    request.as_reader().read_to_string(&mut body).unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                    let text = format!("{} {} {body}", request.method(), request.url());
                    request.respond(tiny_http::Response::from_string(text)).unwrap();
                    answered.fetch_add(1, SeqCst);
                }
            })
        };
        let workers: Vec<_> =
            (0..WORKERS).map(|_| work(server.clone(), answered.clone())).collect();
        go_each(*MANY, move |i| {
            let (status, text) = http(addr, "GET", &format!("/{i}"), "");
            assert_eq!((status, text), (200, format!("GET /{i} ")));
            let (status, text) = http(addr, "POST", "/post", &format!("body {i}"));
            assert_eq!((status, text), (200, format!("POST /post body {i}")));
        });
        assert_few_threads();
        for _ in 0..WORKERS {
            server.unblock();
        }
        for worker in workers {
            worker.join().unwrap();
        }
        assert_eq!(answered.load(SeqCst), 2 * *MANY);
    });
}

#[test]
fn rouille_routes_requests_of_goroutines() {
    run(|| {
        let server = rouille::Server::new("127.0.0.1:0", |request| {
            rouille::router!(request,
                (GET) (/square/{n: u64}) => { rouille::Response::text((n * n).to_string()) },
                (POST) (/echo) => {
                    let text = rouille::try_or_400!(rouille::input::plain_text_body(request));
                    rouille::Response::text(text)
                },
                (GET) (/divide/{n: u64}) => {
                    if n == 0 {
                        // A panic without a message and a backtrace.
                        std::panic::resume_unwind(Box::new("division by zero"));
                    }
                    rouille::Response::text((100 / n).to_string())
                },
                _ => rouille::Response::empty_404()
            )
        });
        let server = server.unwrap().pool_size(8);
        let addr = server.server_addr();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let serving = trefoil::go(move || {
            while !stopped.load(SeqCst) {
                server.poll_timeout(Duration::from_millis(20));
            }
        });
        go_each(*MANY, move |i| {
            let (status, text) = http(addr, "GET", &format!("/square/{i}"), "");
            assert_eq!((status, text), (200, (i * i).to_string()));
            let (status, text) = http(addr, "POST", "/echo", &format!("body {i}"));
            assert_eq!((status, text), (200, format!("body {i}")));
            if i % 20 == 0 {
                assert_eq!(http(addr, "GET", "/nothing", "").0, 404);
                assert_eq!(http(addr, "GET", "/divide/0", "").0, 500);
            }
        });
        assert_few_threads();
        stop.store(true, SeqCst);
        serving.join().unwrap();
    });
}
