//! A forgotten timeout: a client limits the wait for its first answer. If that one is lost, it asks
//! again, and waits for ever if the second answer is lost, too.

use crate::{Bug, Version};
use std::time::Duration;
use trefoil::chan::{self, Receiver, Sender};
use trefoil::go;
use trefoil::sim::FailureKind;

pub(crate) const BUG: Bug = Bug {
    name: "forgotten timeout",
    program,
    kind: FailureKind::Deadlock,
    message: "chan receive",
    // Needed with the base seeds: 20 (median), at most 77.
    max_runs: 400,
    max_deviations: 2,
};

const LIMIT: Duration = Duration::from_millis(100);
/// How often the client asks.
const ATTEMPTS: u32 = 5;

struct Request {
    number: u64,
    answer: Sender<u64>,
}

/// Answers requests with their squares. One answer in eight is lost.
fn serve(requests: &Receiver<Request>) {
    for Request { number, answer } in requests.iter() {
        if !rand::random_bool(0.125) {
            // The client may have given up.
            let _ = answer.try_send(number * number);
        }
    }
}

/// Returns the square of a number; None if no answer came.
fn ask(requests: &Sender<Request>, number: u64, version: Version) -> Option<u64> {
    let (answer, answers) = chan::bounded(ATTEMPTS as usize);
    for attempt in 0..ATTEMPTS {
        let answer = answer.clone();
        requests.send(Request { number, answer }).unwrap();
        if attempt > 0 && version == Version::Planted {
            return answers.recv().ok();
        }
        if let Ok(square) = answers.recv_timeout(LIMIT) {
            return Some(square);
        }
    }
    None
}

fn program(version: Version) {
    let (tx, requests) = chan::bounded(1);
    let server = go(move || serve(&requests));
    for number in 1..=3 {
        let square = ask(&tx, number, version);
        assert!(square.is_none_or(|square| square == number * number));
    }
    drop(tx);
    server.join().unwrap();
}

#[test]
fn a_wait_without_a_timeout_is_found_and_repeated() {
    BUG.check();
}
