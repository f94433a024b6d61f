//! std just works: its locks, sleeps and sockets park the goroutine; its thread-locals travel with it.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::proc;
use crate::stage::{Stage, each, grouped};

/// `std::sync` and `std::thread::sleep`.
pub(crate) fn locks(stage: &Stage) -> Result<(), String> {
    const SLEEPERS: u64 = 20_000;
    const AT_ONCE: usize = 1_000;
    stage.part(format_args!("{} goroutines in std::thread::sleep(500 ms)", grouped(SLEEPERS)));
    let threads = trefoil::run(|| {
        let start = Instant::now();
        let sleepers: Vec<_> = (0..SLEEPERS)
            .map(|_| trefoil::go(|| std::thread::sleep(Duration::from_millis(500))))
            .collect();
        let threads = proc::status().threads;
        for handle in sleepers {
            handle.join().expect("it only sleeps");
        }
        stage.fact("time", format_args!("{:.2?}", start.elapsed()));
        threads
    });
    stage.fact("threads", threads);
    stage.part(format_args!("{AT_ONCE} goroutines at one std::sync::Barrier, then at one Mutex"));
    let sum = trefoil::run(|| {
        let start = Instant::now();
        let barrier = Arc::new(Barrier::new(AT_ONCE));
        let sum = Arc::new(Mutex::new(0usize));
        let all: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                let (barrier, sum) = (barrier.clone(), sum.clone());
                trefoil::go(move || {
                    barrier.wait();
                    let mut sum = sum.lock().expect("nobody panics");
                    *sum += 1;
                    trefoil::yield_now(); // with the lock held
                })
            })
            .collect();
        for handle in all {
            handle.join().expect("nobody panics");
        }
        stage.fact("time", format_args!("{:.2?}", start.elapsed()));
        Arc::into_inner(sum).and_then(|sum| sum.into_inner().ok()).unwrap_or(0)
    });
    if sum != AT_ONCE || threads > 64 {
        return Err(format!("{sum} of {AT_ONCE} came through, on {threads} threads"));
    }
    Ok(())
}

/// As many connections as the descriptors allow, up to ten thousand; all of them are open before the first is used.
pub(crate) fn connections(stage: &Stage) -> Result<(), String> {
    const ROUNDS: u64 = 3;
    let files = proc::allow_files();
    // Two descriptors for each, and some for the rest.
    let n = (files.saturating_sub(200) / 2).min(10_000);
    stage.part(format_args!(
        "{} connections on loopback, a goroutine at each end, {ROUNDS} round trips each",
        grouped(n)
    ));
    if n < 10_000 {
        stage.fact("descriptors are short", format_args!("{} may be open", grouped(files)));
    }
    let sum = trefoil::run(move || -> std::io::Result<u64> {
        let listener = trefoil::net::TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        trefoil::go(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                trefoil::go(move || {
                    let mut bytes = [0; 8];
                    while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok()
                    {
                    }
                });
            }
        });
        let start = Instant::now();
        // A few at a time: the listener's queue is short.
        let slots = Arc::new(trefoil::sync::Semaphore::new(64));
        let all_open = Arc::new(trefoil::sync::WaitGroup::new());
        all_open.add(n as usize);
        let clients: Vec<_> = (0..n)
            .map(|i| {
                let (slots, all_open) = (slots.clone(), all_open.clone());
                trefoil::go(move || -> std::io::Result<u64> {
                    let connected = {
                        let _slot = slots.acquire();
                        trefoil::net::TcpStream::connect(address)
                    };
                    all_open.done();
                    let mut stream = connected?;
                    all_open.wait();
                    let mut sum = 0;
                    for round in 0..ROUNDS {
                        let mut bytes = (i + round).to_ne_bytes();
                        stream.write_all(&bytes)?;
                        stream.read_exact(&mut bytes)?;
                        sum += u64::from_ne_bytes(bytes);
                    }
                    Ok(sum)
                })
            })
            .collect();
        all_open.wait();
        let opened = start.elapsed();
        stage.fact("all open after", format_args!("{opened:.2?}, {}", each(opened, n)));
        stage.fact("goroutines", grouped(trefoil::num_goroutines() as u64));
        stage.fact("threads", proc::status().threads);
        let mut sum = 0;
        for client in clients {
            sum += client.join().expect("nobody panics")?;
        }
        let used = start.elapsed() - opened;
        stage.fact("used", format_args!("{used:.2?}, {}", each(used, n * ROUNDS)));
        Ok(sum)
    });
    let expected = ROUNDS * n * n.saturating_sub(1) / 2 + n * ROUNDS * (ROUNDS - 1) / 2;
    match sum {
        Ok(sum) if sum == expected => Ok(()),
        Ok(sum) => Err(format!("the answers add up to {sum} instead of {expected}")),
        Err(e) => Err(e.to_string()),
    }
}

/// Some connections, straight code, `std::net`.
pub(crate) fn network(stage: &Stage) -> Result<(), String> {
    const CONNECTIONS: u64 = 400;
    const ROUNDS: u64 = 50;
    stage.part(format_args!(
        "{CONNECTIONS} connections through std::net on loopback, a goroutine at each end, {ROUNDS} round trips each"
    ));
    let echoed = trefoil::run(|| -> std::io::Result<u64> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        trefoil::go(move || {
            for stream in listener.incoming().flatten() {
                trefoil::go(move || {
                    let (mut stream, mut bytes) = (stream, [0; 64]);
                    while stream.read_exact(&mut bytes).is_ok() && stream.write_all(&bytes).is_ok()
                    {
                    }
                });
            }
        });
        let start = Instant::now();
        let clients: Vec<_> = (0..CONNECTIONS)
            .map(|i| {
                trefoil::go(move || -> std::io::Result<u64> {
                    let mut stream = TcpStream::connect(address)?;
                    stream.set_nodelay(true)?;
                    let (sent, mut got) = ([i as u8; 64], [0; 64]);
                    let mut same = 0;
                    for _ in 0..ROUNDS {
                        stream.write_all(&sent)?;
                        stream.read_exact(&mut got)?;
                        same += u64::from(sent == got);
                    }
                    Ok(same)
                })
            })
            .collect();
        let mut echoed = 0;
        for client in clients {
            echoed += client.join().expect("nobody panics")?;
        }
        let time = start.elapsed();
        stage.fact("time", format_args!("{time:.2?}, {}", each(time, CONNECTIONS * ROUNDS)));
        stage.fact("threads", proc::status().threads);
        Ok(echoed)
    });
    match echoed {
        Ok(n) if n == CONNECTIONS * ROUNDS => Ok(()),
        Ok(n) => Err(format!("{n} of {} answers were right", CONNECTIONS * ROUNDS)),
        Err(e) => Err(e.to_string()),
    }
}

/// `thread_local!` belongs to the goroutine, on whatever thread it goes on.
pub(crate) fn locals(stage: &Stage) -> Result<(), String> {
    thread_local!(static NOTES: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) });
    const GOROUTINES: u64 = 1_000;
    const NOTES_EACH: usize = 100;
    stage.part(format_args!(
        "{GOROUTINES} goroutines, each with a thread_local! of its own, held over {NOTES_EACH} yields"
    ));
    let (wrong, moved) = trefoil::run(|| {
        // SAFETY: no arguments, touches no memory.
        let tid = || unsafe { libc::gettid() };
        let all: Vec<_> = (0..GOROUTINES)
            .map(|_| {
                trefoil::go(move || {
                    let (mut moved, mut last) = (0u64, tid());
                    for _ in 0..NOTES_EACH {
                        NOTES.with_borrow_mut(|notes| {
                            notes.push(trefoil::id());
                            trefoil::yield_now(); // with the RefCell borrowed
                        });
                        moved += u64::from(std::mem::replace(&mut last, tid()) != last);
                    }
                    let mine = NOTES.with_borrow(|notes| {
                        notes.len() == NOTES_EACH && notes.iter().all(|&id| id == trefoil::id())
                    });
                    (u64::from(!mine), moved)
                })
            })
            .collect();
        let mut sums = (0, 0);
        for handle in all {
            let (wrong, moved) = handle.join().expect("nobody panics");
            sums = (sums.0 + wrong, sums.1 + moved);
        }
        sums
    });
    stage.fact("moved", format_args!("{} times to another thread", grouped(moved)));
    stage.fact("notes of others", wrong);
    if wrong > 0 {
        Err(format!("{wrong} goroutines saw another one's thread-local"))
    } else {
        Ok(())
    }
}
