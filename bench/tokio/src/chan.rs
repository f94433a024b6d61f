//! Channels, select and locks. A channel has at least one slot in tokio: that is what stands for
//! an unbuffered one.

use std::sync::Arc;

use bench_common::{Args, Meter, Report, size};
use tokio::select;
use tokio::sync::{Mutex, mpsc};
use tokio::task::{JoinHandle, spawn};

/// An echo on the other side of two channels.
pub async fn ping_pong(args: &Args) -> Report {
    let (ping, mut pinged) = mpsc::channel::<u64>(1);
    let (pong, mut ponged) = mpsc::channel::<u64>(1);
    let echo = spawn(async move {
        while let Some(value) = pinged.recv().await {
            pong.send(value + 1).await.unwrap();
        }
    });
    let mut meter = Meter::new(args, size::TRIPS as usize);
    while meter.another_round() {
        for i in 0..size::TRIPS {
            ping.send(i).await.unwrap();
            assert_eq!(ponged.recv().await, Some(i + 1));
        }
    }
    let report = meter.report();
    drop(ping);
    echo.await.unwrap();
    report
}

/// Sends its share of the items.
fn sender(channel: mpsc::Sender<u64>, first: usize, senders: usize) -> JoinHandle<()> {
    spawn(async move {
        for i in (first as u64..size::ITEMS).step_by(senders) {
            channel.send(i).await.unwrap();
        }
    })
}

pub async fn spsc(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::ITEMS as usize);
    while meter.another_round() {
        let (send, mut receive) = mpsc::channel(size::SLOTS);
        sender(send, 0, 1);
        let mut sum = 0;
        while let Some(value) = receive.recv().await {
            sum += value;
        }
        assert_eq!(sum, size::ITEMS_SUM);
    }
    meter.report()
}

/// Takes from four channels, each with a sender of its own.
pub async fn selects(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::ITEMS as usize);
    while meter.another_round() {
        let mut channels: Vec<_> = (0..size::PARTIES)
            .map(|first| {
                let (send, receive) = mpsc::channel(size::SLOTS);
                sender(send.clone(), first, size::PARTIES);
                (send, receive)
            })
            .collect();
        // Each keeps its sender here: a closed channel could always go on.
        let [(_, c0), (_, c1), (_, c2), (_, c3)] = &mut channels[..] else { unreachable!() };
        let mut sum = 0;
        for _ in 0..size::ITEMS {
            sum += select! {
                value = c0.recv() => value.unwrap(),
                value = c1.recv() => value.unwrap(),
                value = c2.recv() => value.unwrap(),
                value = c3.recv() => value.unwrap(),
            };
        }
        assert_eq!(sum, size::ITEMS_SUM);
    }
    meter.report()
}

/// One token goes round: each node takes one off it and passes it on.
pub async fn ring(args: &Args) -> Report {
    let nodes = args.number("n", size::RING_NODES);
    let (done, mut ended) = mpsc::channel(1);
    let (first, mut input) = mpsc::channel::<usize>(1);
    for i in 0..nodes {
        let (output, next) = mpsc::channel(1);
        let output = if i == nodes - 1 { first.clone() } else { output };
        let mut receive = std::mem::replace(&mut input, next);
        let done = done.clone();
        spawn(async move {
            while let Some(left) = receive.recv().await {
                match left {
                    0 => done.send(()).await.unwrap(),
                    _ => output.send(left - 1).await.unwrap(),
                }
            }
        });
    }
    let hops = size::RING_HOPS.next_multiple_of(nodes);
    let mut meter = Meter::new(args, hops);
    while meter.another_round() {
        first.send(hops).await.unwrap();
        ended.recv().await.unwrap();
    }
    meter.report()
}

pub async fn mutexes(args: &Args) -> Report {
    const LOCKS: usize = size::LOCKERS * size::LOCKS_EACH;
    let count = Arc::new(Mutex::new(0));
    let mut meter = Meter::new(args, LOCKS);
    let mut rounds = 0;
    while meter.another_round() {
        let handles: [_; size::LOCKERS] = std::array::from_fn(|_| {
            let count = count.clone();
            spawn(async move {
                for _ in 0..size::LOCKS_EACH {
                    *count.lock().await += 1;
                }
            })
        });
        for handle in handles {
            handle.await.unwrap();
        }
        rounds += 1;
        assert_eq!(*count.lock().await, rounds * LOCKS);
    }
    meter.report()
}
