//! Deadlines by `Context`: a request asks three backends. A backend that is too slow is cancelled,
//! and all goroutines of the request end with it.
//!
//! `cargo run --release --example timeouts`

use std::time::Duration;
use trefoil::chan;
use trefoil::context::{Context, ContextError};

/// Answers after `takes`, or fails when the context is done.
fn backend(ctx: &Context, name: &str, takes: Duration) -> Result<String, ContextError> {
    trefoil::select! {
        recv(ctx.done()) -> _ => Err(ctx.err().expect("the context is done")),
        after(takes) => Ok(format!("{name}: answer")),
    }
}

fn request(ctx: &Context) -> Vec<String> {
    let (ctx, _cancel) = ctx.with_timeout(Duration::from_millis(50));
    let (tx, rx) = chan::unbounded();
    for (name, takes) in [("near", 5), ("far", 20), ("asleep", 60_000)] {
        let (ctx, tx) = (ctx.clone(), tx.clone());
        trefoil::go(move || {
            let answer = backend(&ctx, name, Duration::from_millis(takes));
            let _ = tx.send(answer.unwrap_or_else(|e| format!("{name}: {e}")));
        });
    }
    drop(tx);
    rx.iter().collect()
}

#[trefoil::main]
fn main() {
    for answer in request(&Context::background()) {
        println!("{answer}");
    }
    while trefoil::num_goroutines() > 1 {
        trefoil::yield_now();
    }
    println!("no goroutine is left");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[trefoil::test(virtual_time)]
    fn a_request_ends_at_its_deadline_with_the_answers_in_time() {
        let start = Instant::now();
        let answers = request(&Context::background());
        assert_eq!(start.elapsed(), Duration::from_millis(50));
        let expected = ["near: answer", "far: answer", "asleep: context deadline exceeded"];
        assert_eq!(answers, expected);
    }
}
