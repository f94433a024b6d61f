//! Programs of many goroutines, of plain threads, and of two runtimes.

use crate::common::watchdog;
use crate::{at_all_procs, size, start_on_thread_if};
use trefoil::chan::{Receiver, Sender, bounded, unbounded};
use trefoil::{go, yield_now};

/// Go: TestMultiConsumer.
#[test]
fn many_workers_pass_every_item_on_once() {
    const WORKERS: usize = 23;
    const PRIMES: [usize; 8] = [2, 3, 7, 11, 13, 17, 19, 23];
    let _dog = watchdog();
    at_all_procs(|| {
        let items = size(271_828, 20_000);
        let (queue, work) = bounded(WORKERS * 3);
        let (results, done) = bounded(WORKERS * 3);
        for w in 0..WORKERS {
            let (work, results) = (work.clone(), results.clone());
            go(move || {
                for v in work {
                    // Changes the order, deterministically.
                    if PRIMES[w % PRIMES.len()] == v {
                        yield_now();
                    }
                    results.send(v).unwrap();
                }
            });
        }
        drop((work, results));
        let feeder = go(move || {
            let mut sum = 0;
            for i in 0..items {
                let v = PRIMES[i % PRIMES.len()];
                sum += v;
                queue.send(v).unwrap();
            }
            sum
        });
        let (mut n, mut sum) = (0, 0);
        for v in done {
            n += 1;
            sum += v;
        }
        assert_eq!((n, sum), (items, feeder.join().unwrap()));
    });
}

#[test]
fn a_value_passes_a_chain_of_ten_thousand_goroutines() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (leftmost, mut right) = bounded::<u32>(0);
        for _ in 0..10_000 {
            let (tx, rx) = bounded(0);
            let from = std::mem::replace(&mut right, rx);
            go(move || tx.send(from.recv().unwrap() + 1).unwrap());
        }
        go(move || leftmost.send(0).unwrap());
        assert_eq!(right.recv(), Ok(10_000));
    });
}

#[test]
fn a_chain_of_filters_sieves_the_primes() {
    let _dog = watchdog();
    at_all_procs(|| {
        let (tx, mut numbers) = bounded(0);
        go(move || (2..).take_while(|&n| tx.send(n).is_ok()).count());
        let mut primes = Vec::new();
        for _ in 0..100 {
            let prime: u64 = numbers.recv().unwrap();
            primes.push(prime);
            let (tx, rx) = bounded(0);
            let from = std::mem::replace(&mut numbers, rx);
            go(move || from.iter().filter(|n| n % prime != 0).all(|n| tx.send(n).is_ok()));
        }
        assert_eq!((primes[0], primes[24], primes[99]), (2, 97, 541));
    });
}

/// A small version of Go's test/chan/powser1.go.
#[test]
fn lazy_power_series_multiply_coefficient_by_coefficient() {
    fn series(f: impl FnOnce(Sender<i64>) + Send + 'static) -> Receiver<i64> {
        let (tx, rx) = bounded(0);
        go(move || f(tx));
        rx
    }
    fn ones() -> Receiver<i64> {
        series(|tx| while tx.send(1).is_ok() {})
    }
    fn split(from: Receiver<i64>) -> (Receiver<i64>, Receiver<i64>) {
        let ((ta, ra), (tb, rb)) = (unbounded(), bounded(0));
        go(move || {
            for v in from {
                let _ = ta.send(v);
                if tb.send(v).is_err() {
                    break;
                }
            }
        });
        (ra, rb)
    }
    fn mul(f: Receiver<i64>, g: Receiver<i64>) -> Receiver<i64> {
        series(move |tx| {
            let (mut fs, mut gs) = (Vec::new(), Vec::new());
            loop {
                fs.push(f.recv().unwrap());
                gs.push(g.recv().unwrap());
                let coefficient = fs.iter().zip(gs.iter().rev()).map(|(a, b)| a * b).sum();
                if tx.send(coefficient).is_err() {
                    break;
                }
            }
        })
    }
    let _dog = watchdog();
    at_all_procs(|| {
        // 1/(1-x)² = Σ (n+1) xⁿ; its square Σ C(n+3, 3) xⁿ.
        let (a, b) = split(mul(ones(), ones()));
        let fourth = mul(a, b);
        let got: Vec<i64> = fourth.iter().take(12).collect();
        let expected: Vec<i64> = (0..12).map(|n| (n + 1) * (n + 2) * (n + 3) / 6).collect();
        assert_eq!(got, expected);
    });
}

#[test]
fn threads_and_goroutines_exchange_values_in_every_combination() {
    let _dog = watchdog();
    at_all_procs(|| {
        for cap in [0, 1, 64] {
            for kinds in 0..4 {
                let (tx, rx) = bounded(cap);
                let (back, echoed) = bounded(cap);
                let echo = start_on_thread_if(kinds & 1 != 0, move || {
                    for v in rx {
                        back.send(v).unwrap();
                    }
                });
                let sender = start_on_thread_if(kinds & 2 != 0, move || {
                    for i in 0..300 {
                        tx.send(i).unwrap();
                        assert_eq!(echoed.recv(), Ok(i));
                    }
                });
                sender.join();
                echo.join();
            }
        }
    });
}

#[test]
fn goroutines_of_two_runtimes_exchange_values() {
    let _dog = watchdog();
    let (tx, rx) = bounded(0);
    let (back, echoed) = bounded(0);
    let other = std::thread::spawn(move || {
        let runtime = trefoil::Runtime::builder().procs(2).build().unwrap();
        runtime.run(move || rx.iter().for_each(|v: u32| back.send(v + 1).unwrap()));
    });
    let runtime = trefoil::Runtime::builder().procs(2).build().unwrap();
    runtime.run(move || {
        for i in 0..2000 {
            tx.send(i).unwrap();
            assert_eq!(echoed.recv(), Ok(i + 1));
        }
    });
    other.join().unwrap();
}
