//! An axum application on trefoil. Its handlers may block: no other request waits for them.
//!
//! ```text
//! cargo run -p trefoil-hyper --example axum
//! curl http://127.0.0.1:3000/
//! curl http://127.0.0.1:3000/report     # computes and sleeps; the others are served meanwhile
//! ```
//!
//! Ctrl-C ends the server after the requests that have begun.

use axum::Router;
use axum::extract::State;
use axum::routing::{get, post};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trefoil::context::Context;
use trefoil::net::TcpListener;

/// std's lock: a handler that waits for it does not block a thread.
type Messages = Arc<Mutex<Vec<String>>>;

async fn list(State(messages): State<Messages>) -> String {
    messages.lock().unwrap().join("\n")
}

async fn add(State(messages): State<Messages>, message: String) {
    messages.lock().unwrap().push(message);
}

/// Calls blocking code on purpose: `spawn_blocking` is not needed.
async fn report(State(messages): State<Messages>) -> String {
    std::thread::sleep(Duration::from_millis(200));
    let words = messages.lock().unwrap().iter().flat_map(|m| m.split(' ')).count();
    let file = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!("{words} words, load {file}")
}

#[trefoil::main]
fn main() {
    let router = Router::new()
        .route("/", get(|| async { "hello from a task\n" }))
        .route("/messages", get(list))
        .route("/messages", post(add))
        .route("/report", get(report))
        .with_state(Messages::default());
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(&address).expect("cannot listen");
    println!("listening on http://{}", listener.local_addr().expect("an address"));

    // Interrupt and terminate.
    let signals = trefoil::signal::notify(&[2, 15]).expect("cannot receive signals");
    let (ctx, cancel) = Context::background().with_cancel();
    trefoil::go(move || {
        let _ = signals.recv();
        cancel.cancel();
    });
    trefoil_hyper::serve(listener, router).shutdown_on(&ctx).run().expect("the server failed");
}
