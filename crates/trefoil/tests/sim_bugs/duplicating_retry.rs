//! A retry that duplicates: a client sends a payment again if no answer comes in time. The server
//! was only slow, and makes both payments.

use crate::{Bug, Version};
use std::collections::HashSet;
use std::time::Duration;
use trefoil::chan::{self, Receiver, Sender};
use trefoil::go;
use trefoil::sim::FailureKind;

pub(crate) const BUG: Bug = Bug {
    name: "duplicating retry",
    program,
    kind: FailureKind::Panic,
    message: "instead of 10",
    // Needed with the base seeds: 5 (median), at most 28.
    max_runs: 150,
    max_deviations: 2,
};

const LIMIT: Duration = Duration::from_millis(50);

#[derive(Clone)]
struct Payment {
    id: u64,
    amount: u64,
    paid: Sender<()>,
}

/// Makes payments, and returns their sum. Each takes up to 55 ms.
fn serve(payments: &Receiver<Payment>, version: Version) -> u64 {
    let (mut sum, mut known) = (0, HashSet::new());
    for Payment { id, amount, paid } in payments.iter() {
        std::thread::sleep(Duration::from_millis(rand::random_range(1..=55)));
        let is_new = known.insert(id);
        if is_new || version == Version::Planted {
            sum += amount;
        }
        // The client may have the answer to an earlier attempt.
        let _ = paid.try_send(());
    }
    sum
}

fn pay(payments: &Sender<Payment>, amount: u64) {
    let (paid, answer) = chan::bounded(1);
    let payment = Payment { id: rand::random(), amount, paid };
    loop {
        payments.send(payment.clone()).unwrap();
        if answer.recv_timeout(LIMIT).is_ok() {
            return;
        }
    }
}

fn program(version: Version) {
    let (tx, payments) = chan::bounded(4);
    let server = go(move || serve(&payments, version));
    pay(&tx, 10);
    drop(tx);
    let sum = server.join().unwrap();
    assert_eq!(sum, 10, "paid {sum} instead of 10");
}

#[test]
fn a_retry_that_duplicates_is_found_and_repeated() {
    BUG.check();
}
