//! `axum::serve` and reqwest, unmodified, in one process.

use axum::routing::get;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use trefoil_tokio_tests::{application, load, serve, within};

#[trefoil::test(tokio)]
async fn reqwest_gets_the_answer_of_axum() {
    let address = serve(application()).await;
    let answer = within(reqwest::get(format!("http://{address}/fast"))).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.text().await.unwrap(), "fast");
}

#[trefoil::test(tokio)]
async fn many_clients_get_many_answers() {
    let address = serve(application()).await;
    let end = Instant::now() + Duration::from_millis(200);
    let times = within(load(address, "/fast", 32, end)).await;
    assert!(times.len() >= 32, "{}", times.len());
}

/// Handlers that stay until they are let go.
#[derive(Default)]
struct Gate {
    inside: AtomicUsize,
    is_open: AtomicBool,
}

/// 8 handlers call `wait` until they are let go, and 20 requests to the fast handler are answered
/// meanwhile. On two threads of tokio's neither would happen.
async fn answers_beside(wait: fn()) {
    let gate = Arc::new(Gate::default());
    let of_handler = gate.clone();
    let handler = move || async move {
        of_handler.inside.fetch_add(1, SeqCst);
        let limit = Instant::now() + Duration::from_secs(30);
        while !of_handler.is_open.load(SeqCst) && Instant::now() < limit {
            wait();
        }
        "let go"
    };
    let address = serve(application().route("/stay", get(handler))).await;
    let request = |path: &str| reqwest::get(format!("http://{address}{path}"));
    let staying: Vec<_> = (0..8).map(|_| tokio::spawn(request("/stay"))).collect();
    within(async {
        while gate.inside.load(SeqCst) < 8 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    for _ in 0..20 {
        assert_eq!(within(request("/fast")).await.unwrap().text().await.unwrap(), "fast");
    }
    assert!(staying.iter().all(|task| !task.is_finished()));
    gate.is_open.store(true, SeqCst);
    for task in staying {
        assert_eq!(within(task).await.unwrap().unwrap().text().await.unwrap(), "let go");
    }
}

#[trefoil::test(tokio, procs = 2)]
async fn handlers_that_block_do_not_stall_other_requests() {
    answers_beside(|| std::thread::sleep(Duration::from_millis(50))).await;
}

#[trefoil::test(tokio, procs = 2)]
async fn handlers_that_compute_do_not_stall_other_requests() {
    answers_beside(std::hint::spin_loop).await;
}

#[trefoil::test(tokio)]
async fn one_handler_that_blocks_does_not_stop_the_driver() {
    // The worker that serves the driver runs the only task that is ready, and that task blocks. No
    // other worker is awake.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let blocked = tokio::spawn(async move {
        listener.accept().await.unwrap();
        receiver.recv_timeout(Duration::from_secs(20))
    });
    let _connection = tokio::net::TcpStream::connect(address).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    // Timers and sockets are served meanwhile.
    let begin = Instant::now();
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (mut one, mut other) = tokio::io::duplex(64);
    tokio::spawn(async move { tokio::io::AsyncWriteExt::write_all(&mut one, b"x").await });
    tokio::io::AsyncReadExt::read_u8(&mut other).await.unwrap();
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    assert!(!blocked.is_finished());
    sender.send(()).unwrap();
    within(blocked).await.unwrap().unwrap();
}
