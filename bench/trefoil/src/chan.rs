//! Channels, select and locks.

use std::sync::{Arc, mpsc};

use bench_common::{Args, Meter, Report, size};
use trefoil::chan::{Receiver, Sender, bounded};
use trefoil::sync::Mutex;
use trefoil::{JoinHandle, go, select};

pub fn ping_pong(args: &Args) -> Report {
    with_echo(|trips| {
        let mut meter = Meter::new(args, size::TRIPS as usize);
        while meter.another_round() {
            trips();
        }
        meter.report()
    })
}

/// Calls `f` with an echo on the other side of two unbuffered channels: each call of its argument
/// makes a round of trips, and returns how many.
pub fn with_echo(f: impl FnOnce(&mut dyn FnMut() -> usize) -> Report) -> Report {
    let (ping, pinged) = bounded::<u64>(0);
    let (pong, ponged) = bounded::<u64>(0);
    let echo = go(move || {
        for value in pinged {
            pong.send(value + 1).unwrap();
        }
    });
    let report = f(&mut || {
        for i in 0..size::TRIPS {
            ping.send(i).unwrap();
            assert_eq!(ponged.recv(), Ok(i + 1));
        }
        size::TRIPS as usize
    });
    drop(ping);
    echo.join().unwrap();
    report
}

/// The same by std's channel.
pub fn mpsc_ping_pong(args: &Args) -> Report {
    let (ping, pinged) = mpsc::sync_channel::<u64>(0);
    let (pong, ponged) = mpsc::sync_channel::<u64>(0);
    let echo = go(move || {
        for value in pinged {
            pong.send(value + 1).unwrap();
        }
    });
    let mut meter = Meter::new(args, size::TRIPS as usize);
    while meter.another_round() {
        for i in 0..size::TRIPS {
            ping.send(i).unwrap();
            assert_eq!(ponged.recv(), Ok(i + 1));
        }
    }
    let report = meter.report();
    drop(ping);
    echo.join().unwrap();
    report
}

/// Sends its share of the items.
fn sender(channel: Sender<u64>, first: usize, senders: usize) -> JoinHandle<()> {
    go(move || {
        for i in (first as u64..size::ITEMS).step_by(senders) {
            channel.send(i).unwrap();
        }
    })
}

pub fn spsc(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::ITEMS as usize);
    while meter.another_round() {
        let (send, receive) = bounded(size::SLOTS);
        sender(send, 0, 1);
        assert_eq!(receive.into_iter().sum::<u64>(), size::ITEMS_SUM);
    }
    meter.report()
}

pub fn mpmc(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::ITEMS as usize);
    while meter.another_round() {
        let (send, receive) = bounded(size::SLOTS);
        let sums: [_; size::PARTIES] = std::array::from_fn(|first| {
            sender(send.clone(), first, size::PARTIES);
            let receive = receive.clone();
            go(move || receive.into_iter().sum::<u64>())
        });
        drop(send);
        let sums = sums.into_iter().map(|sum| sum.join().unwrap());
        assert_eq!(sums.sum::<u64>(), size::ITEMS_SUM);
    }
    meter.report()
}

/// Takes from four channels, each with a sender of its own.
pub fn selects(args: &Args, slots: usize) -> Report {
    let mut meter = Meter::new(args, size::ITEMS as usize);
    while meter.another_round() {
        let (ends, channels): (Vec<_>, Vec<_>) = (0..size::PARTIES)
            .map(|first| {
                let (send, receive) = bounded(slots);
                (sender(send.clone(), first, size::PARTIES), (send, receive))
            })
            .unzip();
        // Each keeps its sender here: a closed channel could always go on.
        let [(_, c0), (_, c1), (_, c2), (_, c3)] = &channels[..] else { unreachable!() };
        let mut sum = 0;
        for _ in 0..size::ITEMS {
            sum += select! {
                recv(c0) -> value => value.unwrap(),
                recv(c1) -> value => value.unwrap(),
                recv(c2) -> value => value.unwrap(),
                recv(c3) -> value => value.unwrap(),
            };
        }
        assert_eq!(sum, size::ITEMS_SUM);
        for end in ends {
            end.join().unwrap();
        }
    }
    meter.report()
}

/// One node of the skynet: sends the sum of the leaves from `first` on to its parent.
fn node(parent: Sender<u64>, first: u64, leaves: u64) {
    if leaves == 1 {
        return parent.send(first).unwrap();
    }
    let (send, sums) = bounded(0);
    let each = leaves / 10;
    for i in 0..10 {
        let send = send.clone();
        go(move || node(send, first + i * each, each));
    }
    parent.send((0..10).map(|_| sums.recv().unwrap()).sum()).unwrap();
}

pub fn skynet(args: &Args) -> Report {
    let mut meter = Meter::new(args, size::SKYNET_LEAVES as usize);
    while meter.another_round() {
        let (send, sum) = bounded(0);
        go(move || node(send, 0, size::SKYNET_LEAVES));
        assert_eq!(sum.recv(), Ok(size::SKYNET_RESULT));
    }
    meter.report()
}

/// One token goes round: each node takes one off it and passes it on.
pub fn ring(args: &Args) -> Report {
    let nodes = args.number("n", size::RING_NODES);
    let (done, ended) = bounded(0);
    let (first, mut input) = bounded::<usize>(0);
    for i in 0..nodes {
        let (output, next) = match i {
            _ if i == nodes - 1 => (first.clone(), None),
            _ => {
                let (output, next) = bounded(0);
                (output, Some(next))
            }
        };
        let (receive, done) = (input.clone(), done.clone());
        go(move || {
            for left in receive {
                match left {
                    0 => done.send(()).unwrap(),
                    _ => output.send(left - 1).unwrap(),
                }
            }
        });
        input = next.unwrap_or(input);
    }
    let hops = size::RING_HOPS.next_multiple_of(nodes);
    let mut meter = Meter::new(args, hops);
    while meter.another_round() {
        first.send(hops).unwrap();
        ended.recv().unwrap();
    }
    meter.report()
}

/// Passes on what `prime` does not divide.
fn filter(prime: u32, input: Receiver<u32>, output: Sender<u32>) {
    for n in input {
        if n % prime != 0 {
            output.send(n).unwrap();
        }
    }
}

/// Finds primes by a chain of goroutines, one for each prime found.
pub fn sieve(args: &Args) -> Report {
    let mut meter = Meter::new(args, 1);
    while meter.another_round() {
        let (numbers, mut input) = bounded(0);
        go(move || {
            for n in 2..=size::LAST_PRIME {
                numbers.send(n).unwrap();
            }
        });
        let mut primes = Vec::new();
        while let Ok(prime) = input.recv() {
            primes.push(prime);
            let (output, next) = bounded(0);
            let input = std::mem::replace(&mut input, next);
            go(move || filter(prime, input, output));
        }
        assert_eq!((primes.len(), primes.last()), (size::PRIMES, Some(&size::LAST_PRIME)));
    }
    meter.report()
}

pub fn mutexes(args: &Args) -> Report {
    lockers(args, Mutex::new(0), |count, more| {
        let mut count = count.lock();
        *count += more;
        *count
    })
}

/// The same by std's lock.
pub fn std_mutexes(args: &Args) -> Report {
    lockers(args, std::sync::Mutex::new(0), |count, more| {
        let mut count = count.lock().unwrap();
        *count += more;
        *count
    })
}

fn lockers<M: Send + Sync + 'static>(
    args: &Args,
    count: M,
    add: impl Fn(&M, usize) -> usize + Copy + Send + 'static,
) -> Report {
    const LOCKS: usize = size::LOCKERS * size::LOCKS_EACH;
    let count = Arc::new(count);
    let mut meter = Meter::new(args, LOCKS);
    let mut rounds = 0;
    while meter.another_round() {
        let handles: [_; size::LOCKERS] = std::array::from_fn(|_| {
            let count = count.clone();
            go(move || {
                for _ in 0..size::LOCKS_EACH {
                    add(&count, 1);
                }
            })
        });
        for handle in handles {
            handle.join().unwrap();
        }
        rounds += 1;
        assert_eq!(add(&count, 0), rounds * LOCKS);
    }
    meter.report()
}
