//! Goroutines and tasks that share one channel: a thousand tasks and two goroutines send, one task
//! and one goroutine receive.
//!
//! `cargo run --release --example goroutines_and_tasks`
//!
//! A sensor that mostly waits is a task: it has no stack. A sensor whose driver is straight-line,
//! blocking code is a goroutine. The receivers do not know which of the two has sent a reading.

use std::time::Duration;
use trefoil::chan::{self, Receiver, Sender};
use trefoil::{go, task, time};

const TASKS: u64 = 1000;
const GOROUTINES: u64 = 2;
const READINGS_PER_GOROUTINE: u64 = 10;

#[derive(Default)]
struct Total {
    readings: u64,
    sum: u64,
}

impl Total {
    fn add(&mut self, reading: u64) {
        self.readings += 1;
        self.sum += reading;
    }
}

/// A sensor with an async driver.
async fn sense_async(id: u64, readings: Sender<u64>) {
    time::sleep_async(Duration::from_millis(id % 20)).await;
    if id.is_multiple_of(100) {
        // Blocking is allowed in a task, too: the other tasks continue.
        std::thread::sleep(Duration::from_millis(20));
    }
    readings.send_async(id).await.expect("the receivers outlive the sensors");
}

/// A sensor with a blocking driver.
fn sense(readings: &Sender<u64>) {
    for reading in 1..=READINGS_PER_GOROUTINE {
        time::sleep(Duration::from_millis(2));
        readings.send(reading).expect("the receivers outlive the sensors");
    }
}

async fn receive_async(readings: Receiver<u64>) -> Total {
    let mut total = Total::default();
    while let Ok(reading) = readings.recv_async().await {
        total.add(reading);
    }
    total
}

fn receive(readings: &Receiver<u64>) -> Total {
    let mut total = Total::default();
    for reading in readings.iter() {
        total.add(reading);
    }
    total
}

#[trefoil::main]
fn main() {
    let (tx, rx) = chan::bounded(64);
    let goroutine = go({
        let rx = rx.clone();
        move || receive(&rx)
    });
    let task = task::spawn(receive_async(rx));
    for id in 1..=TASKS {
        task::spawn(sense_async(id, tx.clone()));
    }
    for _ in 0..GOROUTINES {
        let tx = tx.clone();
        go(move || sense(&tx));
    }
    // Without this sender the readings end when the last sensor drops its own.
    drop(tx);

    // A task awaits the goroutine, and this goroutine joins the task.
    let both = task::spawn(async move { (goroutine.await.unwrap(), task.await.unwrap()) });
    let (a, b) = both.join().unwrap();
    println!("{} readings by the goroutine, {} readings by the task", a.readings, b.readings);
    println!("{} readings, sum {}", a.readings + b.readings, a.sum + b.sum);
}
