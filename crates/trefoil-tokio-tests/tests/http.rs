//! `axum::serve` and reqwest, unmodified, in one process.

use std::time::{Duration, Instant};
use trefoil_tokio_tests::{SLOW, application, load, percentile, serve, within};

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

/// The tests below measure: they take turns.
static MEASURING: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Returns the median time of requests of 4 clients to the fast handler, while 8 clients called the
/// handler at `path` for 600 ms.
async fn fast_beside(path: &'static str) -> Duration {
    let _alone = MEASURING.lock().await;
    let address = serve(application()).await;
    let end = Instant::now() + Duration::from_millis(600);
    let slow = tokio::spawn(load(address, path, 8, end));
    let fast = within(load(address, "/fast", 4, end)).await;
    let slow = within(slow).await.unwrap();
    assert!(slow.len() >= 8, "{path} was called {} times", slow.len());
    println!("{path}: {} fast requests, p99 {:?}", fast.len(), percentile(&fast, 99));
    percentile(&fast, 50)
}

// On two threads of tokio's the median is 200 ms, on goroutines 0.1 ms. The limits leave room for
// debug builds on a busy machine; `examples/http_load.rs` measures.

#[trefoil::test(tokio, procs = 2)]
async fn handlers_that_block_do_not_stall_other_requests() {
    let median = fast_beside("/sleep").await;
    assert!(median < SLOW / 2, "{median:?}");
}

#[trefoil::test(tokio, procs = 2)]
async fn handlers_that_compute_do_not_stall_other_requests() {
    let median = fast_beside("/spin").await;
    assert!(median < 2 * SLOW, "{median:?}");
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
