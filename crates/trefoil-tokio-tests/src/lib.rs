//! What the tests and the examples share: a server of axum's with handlers that block or compute,
//! clients, and programs of the distribution that are started for a test.

pub mod programs;

use axum::Router;
use axum::routing::get;
use std::future::Future;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::net::TcpListener;

/// How long the slow handlers block or compute.
pub const SLOW: Duration = Duration::from_millis(50);

/// Fails if `future` takes longer than 30 seconds.
///
/// # Panics
/// Panics if it does.
pub async fn within<F: Future>(future: F) -> F::Output {
    match tokio::time::timeout(Duration::from_secs(30), future).await {
        Ok(value) => value,
        Err(_) => panic!("it takes more than 30 s"),
    }
}

/// Computes for `time`.
pub fn spin(time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// Returns an application with a handler that answers at once (`/fast`), one that blocks (`/sleep`)
/// and one that computes (`/spin`).
pub fn application() -> Router {
    Router::new()
        .route("/fast", get(|| async { "fast" }))
        .route(
            "/sleep",
            get(|| async {
                std::thread::sleep(SLOW);
                "slept"
            }),
        )
        .route(
            "/spin",
            get(|| async {
                spin(SLOW);
                "spun"
            }),
        )
}

/// Serves the application on a free port of the loopback interface, as a task.
///
/// # Panics
/// Panics if no port is free.
pub async fn serve(application: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    tokio::spawn(async move { axum::serve(listener, application).await });
    address
}

/// Requests `path` in `clients` tasks, one request after the other each, until `end`. Returns how
/// long each request took, sorted.
///
/// # Panics
/// Panics if a request fails.
pub async fn load(address: SocketAddr, path: &str, clients: usize, end: Instant) -> Vec<Duration> {
    let client = reqwest::Client::new();
    let url = format!("http://{address}{path}");
    let tasks: Vec<_> = (0..clients)
        .map(|_| {
            let (client, url) = (client.clone(), url.clone());
            tokio::spawn(async move {
                let mut times = Vec::new();
                while Instant::now() < end {
                    let begin = Instant::now();
                    let response = client.get(&url).send().await.expect("the server answers");
                    response.bytes().await.expect("the answer has a body");
                    times.push(begin.elapsed());
                }
                times
            })
        })
        .collect();
    let mut times = Vec::new();
    for task in tasks {
        times.extend(task.await.expect("no client panics"));
    }
    times.sort_unstable();
    times
}

/// Returns the time that `percent` of the sorted `times` do not exceed.
///
/// # Panics
/// Panics if there is none.
pub fn percentile(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() - 1) * percent / 100]
}
