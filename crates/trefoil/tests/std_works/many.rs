//! Many goroutines that wait in std's calls, on few threads.

use super::common::{MS, child_test, join_all, runtime, tasks};
use super::{size, until};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Barrier, Condvar, Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

/// Returns the threads that run goroutines.
fn runtime_threads() -> Vec<(i32, String)> {
    tasks().into_iter().filter(|(_, name)| name.starts_with("trefoil-m")).collect()
}

/// Asserts that few threads beyond `procs` run goroutines.
#[track_caller]
fn assert_few_threads(procs: usize) {
    // A thread that waits for the kernel's memory map lock for longer than a time slice is
    // replaced. On an idle machine two were seen beyond the Ps, beside four busy processes eleven.
    const MORE: usize = 30;
    let all = runtime_threads();
    assert!(all.len() <= procs + MORE, "{} threads: {all:?}", all.len());
}

#[test]
fn a_hundred_thousand_waits_in_std_sync_need_few_threads() {
    child_test!();
    let n = size(100_000, 8_000);
    runtime(2).run(move || {
        let all = Arc::new((Mutex::new((0usize, false)), Condvar::new(), RwLock::new(())));
        let closed = Arc::new(Barrier::new(n / 4 + 1));
        let held = all.2.write().unwrap();
        let begun = Arc::new(AtomicUsize::new(0));
        let mut parked = Vec::new();
        let goroutines: Vec<_> = (0..n)
            .map(|i| {
                let (all, closed, begun) = (all.clone(), closed.clone(), begun.clone());
                let (tell, told) = sync_channel::<()>(0);
                if i % 4 == 3 {
                    parked.push(tell);
                }
                trefoil::go(move || {
                    begun.fetch_add(1, SeqCst);
                    match i % 4 {
                        0 => {
                            let guard = all.0.lock().unwrap();
                            drop(all.1.wait_while(guard, |s| !s.1).unwrap());
                        }
                        1 => drop(all.2.read().unwrap()),
                        2 => _ = closed.wait(),
                        _ => told.recv().unwrap(),
                    }
                    all.0.lock().unwrap().0 += 1;
                })
            })
            .collect();
        until("all goroutines to begin", || begun.load(SeqCst) == n);
        thread::sleep(50 * MS);
        assert_eq!(all.0.lock().unwrap().0, 0);
        assert_few_threads(2);
        drop(held);
        all.0.lock().unwrap().1 = true;
        all.1.notify_all();
        parked.into_iter().for_each(|tell| tell.send(()).unwrap());
        closed.wait();
        join_all(goroutines);
        assert_eq!(all.0.lock().unwrap().0, n);
        assert_few_threads(2);
    });
}

#[test]
fn fifty_thousand_std_sleeps_need_few_threads() {
    child_test!();
    let n = size(50_000, 5_000);
    runtime(2).run(move || {
        let start = Instant::now();
        let all: Vec<_> =
            (0..n).map(|_| trefoil::go(|| thread::sleep(Duration::from_secs(1)))).collect();
        thread::sleep(500 * MS);
        assert_few_threads(2);
        join_all(all);
        let took = start.elapsed();
        println!("{n} sleeps of 1 s took {took:?}");
        assert!(took >= Duration::from_secs(1));
        // One after another they would take hours.
        assert!(took < Duration::from_secs(30), "{took:?}");
    });
}

#[test]
fn a_thousand_std_connections_need_few_threads() {
    child_test!();
    let n = size(1000, 200);
    runtime(4).run(move || {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let server = trefoil::go(move || {
            let echo = |mut s: TcpStream| {
                move || {
                    let mut buf = [0; 256];
                    loop {
                        match s.read(&mut buf).unwrap() {
                            0 => return,
                            n => s.write_all(&buf[..n]).unwrap(),
                        }
                    }
                }
            };
            let all: Vec<_> =
                (0..n).map(|_| trefoil::go(echo(listener.accept().unwrap().0))).collect();
            join_all(all);
        });
        let connected = Arc::new(Barrier::new(n));
        let clients: Vec<_> = (0..n)
            .map(|i| {
                let connected = connected.clone();
                trefoil::go(move || {
                    let mut s = TcpStream::connect(addr).unwrap();
                    connected.wait();
                    let mut buf = [0; 100];
                    for turn in 0..5u8 {
                        let text = [i as u8 ^ turn; 100];
                        s.write_all(&text).unwrap();
                        s.read_exact(&mut buf).unwrap();
                        assert_eq!(buf, text);
                        thread::sleep(MS);
                    }
                    if i == 0 {
                        assert_few_threads(4);
                    }
                })
            })
            .collect();
        join_all(clients);
        server.join().unwrap();
        assert_few_threads(4);
    });
}
