//! std just works: its locks, its sleep, its sockets and its pipes, used by goroutines as if they were threads,
//! and together with threads.
#![cfg(feature = "std")]

mod common;

use common::{Child, MS, TOO_LONG, in_child, join_all, runtime, tasks, watchdog};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Barrier, Condvar, LazyLock, Mutex, Once, OnceLock, RwLock};
use std::thread;
use std::time::{Duration, Instant};
use trefoil::JoinHandle;

/// Fewer where everything is slower.
const fn size(release: usize, debug: usize) -> usize {
    if cfg!(debug_assertions) { debug } else { release }
}

/// Runs `f` as a goroutine beside 1, 2 and 8 Ps.
fn everywhere(f: impl Fn() + Send + Sync + Copy + 'static) {
    for n in [1, 2, 8] {
        runtime(n).run(f);
    }
}

/// Who does a part of a test.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Who {
    Goroutine,
    Thread,
}

enum Started<T> {
    Goroutine(JoinHandle<T>),
    Thread(thread::JoinHandle<T>),
}

impl Who {
    fn start<T: Send + 'static>(self, f: impl FnOnce() -> T + Send + 'static) -> Started<T> {
        match self {
            Who::Goroutine => Started::Goroutine(trefoil::go(f)),
            Who::Thread => Started::Thread(thread::spawn(f)),
        }
    }
}

impl<T> Started<T> {
    fn result(self) -> thread::Result<T> {
        match self {
            Started::Goroutine(h) => h.join(),
            Started::Thread(h) => trefoil::blocking(|| h.join()),
        }
    }

    fn join(self) -> T {
        self.result().unwrap()
    }
}

/// Goroutines with goroutines, and with threads in both directions.
fn pairs(f: impl Fn(Who, Who) + Send + Sync + Copy + 'static) {
    everywhere(move || {
        f(Who::Goroutine, Who::Goroutine);
        f(Who::Goroutine, Who::Thread);
        f(Who::Thread, Who::Goroutine);
    });
}

/// Waits until `done`, by std's means.
#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TOO_LONG / 2, "waited too long for {what}");
        thread::sleep(MS / 4);
    }
}

// --- std::sync -----------------------------------------------------------------------------------

#[test]
fn mutex() {
    let _w = watchdog();
    pairs(|a, b| {
        let n = Arc::new(Mutex::new(0u64));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .map(|who| {
                let n = n.clone();
                who.start(move || {
                    for i in 0..300 {
                        let mut n = n.lock().unwrap();
                        let was = *n;
                        if i % 16 == 0 {
                            thread::yield_now(); // held across a yield
                        }
                        *n = was + 1;
                    }
                })
            })
            .collect();
        all.into_iter().for_each(Started::join);
        assert_eq!(*n.lock().unwrap(), 1200);
    });
}

#[test]
fn a_thread_gets_its_turn_among_goroutines() {
    let _w = watchdog();
    runtime(2).run(|| {
        let (lock, stop) = (Arc::new(Mutex::new(())), Arc::new(AtomicBool::new(false)));
        let hogs: Vec<_> = (0..8)
            .map(|_| {
                let (lock, stop) = (lock.clone(), stop.clone());
                trefoil::go(move || {
                    while !stop.load(SeqCst) {
                        let _held = lock.lock().unwrap();
                        trefoil::yield_now();
                    }
                })
            })
            .collect();
        let (l, s) = (lock.clone(), stop.clone());
        let thread = Who::Thread.start(move || {
            let start = Instant::now();
            let mut turns = 0;
            while turns < 20 && start.elapsed() < TOO_LONG / 4 {
                drop(l.lock().unwrap());
                turns += 1;
            }
            s.store(true, SeqCst);
            turns
        });
        until("the thread's turns", || stop.load(SeqCst));
        join_all(hogs);
        assert_eq!(thread.join(), 20);
    });
}

#[test]
fn rwlock() {
    let _w = watchdog();
    pairs(|a, b| {
        let lock = Arc::new(RwLock::new((0u64, 0u64)));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .enumerate()
            .map(|(k, who)| {
                let lock = lock.clone();
                who.start(move || {
                    for i in 0..300 {
                        if (i + k) % 4 == 0 {
                            let mut both = lock.write().unwrap();
                            both.0 += 1;
                            if i % 32 == 0 {
                                thread::yield_now();
                            }
                            both.1 += 1;
                        } else {
                            let both = lock.read().unwrap();
                            assert_eq!(both.0, both.1);
                        }
                    }
                })
            })
            .collect();
        all.into_iter().for_each(Started::join);
        assert_eq!(*lock.read().unwrap(), (300, 300));
    });
}

#[test]
fn condvar() {
    let _w = watchdog();
    pairs(|a, b| {
        let both = Arc::new((Mutex::new(0u32), Condvar::new()));
        let turns = |mine: u32, both: Arc<(Mutex<u32>, Condvar)>| {
            move || {
                let (n, changed) = &*both;
                for _ in 0..100 {
                    let mut n = changed.wait_while(n.lock().unwrap(), |n| *n % 2 != mine).unwrap();
                    *n += 1;
                    changed.notify_all();
                }
            }
        };
        let first = a.start(turns(0, both.clone()));
        let second = b.start(turns(1, both.clone()));
        first.join();
        second.join();
        assert_eq!(*both.0.lock().unwrap(), 200);
    });
}

#[test]
fn condvar_timeouts() {
    let _w = watchdog();
    everywhere(|| {
        let (m, c) = (Mutex::new(()), Condvar::new());
        let start = Instant::now();
        let (guard, out) = c.wait_timeout(m.lock().unwrap(), 20 * MS).unwrap();
        assert!(out.timed_out() && start.elapsed() >= 20 * MS);
        let (guard, out) = c.wait_timeout(guard, Duration::ZERO).unwrap();
        assert!(out.timed_out());
        drop(guard);
        // A time that no clock will see.
        for far in [Duration::MAX, Duration::from_secs(1 << 61), Duration::from_secs(1 << 34)] {
            let both = Arc::new((Mutex::new(false), Condvar::new()));
            let (b, waits) = (both.clone(), Arc::new(AtomicBool::new(false)));
            let w = waits.clone();
            let waiter = trefoil::go(move || {
                let guard = b.0.lock().unwrap();
                w.store(true, SeqCst);
                let (set, out) = b.1.wait_timeout_while(guard, far, |set| !*set).unwrap();
                *set && !out.timed_out()
            });
            until("the waiter", || waits.load(SeqCst));
            thread::sleep(2 * MS);
            *both.0.lock().unwrap() = true;
            both.1.notify_one();
            assert!(waiter.join().unwrap(), "{far:?}");
        }
    });
}

#[test]
fn once_once_lock_lazy_lock() {
    let _w = watchdog();
    pairs(|a, b| {
        let (once, cell, ran) =
            (Arc::new(Once::new()), Arc::new(OnceLock::new()), Arc::new(AtomicUsize::new(0)));
        let lazy: Arc<LazyLock<u64>> = Arc::new(LazyLock::new(|| {
            thread::sleep(2 * MS);
            7
        }));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .map(|who| {
                let (once, cell, ran, lazy) =
                    (once.clone(), cell.clone(), ran.clone(), lazy.clone());
                who.start(move || {
                    once.call_once(|| {
                        thread::sleep(2 * MS);
                        ran.fetch_add(1, SeqCst);
                    });
                    let seven = *cell.get_or_init(|| {
                        thread::yield_now();
                        ran.fetch_add(1, SeqCst);
                        7u64
                    });
                    once.wait();
                    seven + **lazy
                })
            })
            .collect();
        assert!(all.into_iter().all(|s| s.join() == 14));
        assert_eq!(ran.load(SeqCst), 2);
    });
}

#[test]
fn barrier() {
    let _w = watchdog();
    pairs(|a, b| {
        let (barrier, at) = (Arc::new(Barrier::new(4)), Arc::new(AtomicUsize::new(0)));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .map(|who| {
                let (barrier, at) = (barrier.clone(), at.clone());
                who.start(move || {
                    let mut led = 0;
                    for round in 1..=20 {
                        at.fetch_add(1, SeqCst);
                        led += usize::from(barrier.wait().is_leader());
                        assert!(at.load(SeqCst) >= 4 * round);
                        barrier.wait();
                    }
                    led
                })
            })
            .collect();
        assert_eq!(all.into_iter().map(Started::join).sum::<usize>(), 20);
    });
}

#[test]
fn mpsc() {
    let _w = watchdog();
    pairs(|a, b| {
        // Unbounded, a rendezvous, a buffer.
        let (tx, rx) = channel();
        let sender = a.start(move || (0..300).for_each(|i| tx.send(i).unwrap()));
        let receiver = b.start(move || rx.iter().sum::<u32>());
        sender.join();
        assert_eq!(receiver.join(), 300 * 299 / 2);
        for room in [0, 1, 16] {
            let (tx, rx) = sync_channel(room);
            let sender = a.start(move || (0..150).for_each(|i| tx.send(i).unwrap()));
            let receiver = b.start(move || {
                for i in 0..150 {
                    assert_eq!(rx.recv().unwrap(), i);
                }
                rx.recv().unwrap_err();
            });
            sender.join();
            receiver.join();
        }
        // There and back.
        let (tx, rx) = sync_channel::<u32>(0);
        let (back, results) = channel();
        let echo = b.start(move || rx.iter().for_each(|i| back.send(i + 1).unwrap()));
        let asker = a.start(move || {
            for i in 0..100 {
                tx.send(i).unwrap();
                assert_eq!(results.recv().unwrap(), i + 1);
            }
        });
        asker.join();
        echo.join();
        // Times.
        let (tx, rx) = channel::<()>();
        let (late, now) = channel::<()>();
        let waiter = b.start(move || {
            let start = Instant::now();
            assert_eq!(rx.recv_timeout(10 * MS), Err(RecvTimeoutError::Timeout));
            assert!(start.elapsed() >= 10 * MS);
            assert_eq!(rx.try_recv(), Err(TryRecvError::Empty));
            late.send(()).unwrap();
            rx.recv_timeout(TOO_LONG).unwrap();
            assert_eq!(rx.recv_timeout(TOO_LONG), Err(RecvTimeoutError::Disconnected));
        });
        let sender = a.start(move || {
            now.recv().unwrap();
            thread::sleep(2 * MS);
            tx.send(()).unwrap();
        });
        sender.join();
        waiter.join();
    });
}

#[test]
fn park_and_unpark() {
    let _w = watchdog();
    pairs(|a, b| {
        let (tx, rx) = channel();
        let turn = Arc::new(AtomicUsize::new(0));
        let t = turn.clone();
        let parker = a.start(move || {
            tx.send(thread::current()).unwrap();
            for i in 1..=100 {
                while t.load(SeqCst) < i {
                    thread::park();
                }
            }
            let start = Instant::now();
            thread::park(); // a token that was left before
            thread::park_timeout(5 * MS);
            // For no reason it may come back early.
            if start.elapsed() < 5 * MS {
                thread::park_timeout(5 * MS);
            }
            thread::park_timeout(Duration::ZERO);
        });
        let waker = b.start(move || {
            let thread = rx.recv().unwrap();
            for _ in 0..100 {
                turn.fetch_add(1, SeqCst);
                thread.unpark();
            }
            thread.unpark();
            thread
        });
        let handle = waker.join();
        // Whatever token it took where: it comes to its end.
        let done = Arc::new(AtomicBool::new(false));
        let d = done.clone();
        let pusher = trefoil::go(move || {
            while !d.load(SeqCst) {
                handle.unpark();
                thread::sleep(MS);
            }
        });
        parker.join();
        done.store(true, SeqCst);
        pusher.join().unwrap();
    });
}

#[test]
fn thread_scope() {
    let _w = watchdog();
    everywhere(|| {
        let mut parts = [0u64; 4];
        let gate = Barrier::new(5);
        thread::scope(|s| {
            for (i, part) in parts.iter_mut().enumerate() {
                let gate = &gate;
                s.spawn(move || {
                    gate.wait();
                    *part = i as u64 + 1;
                });
            }
            gate.wait(); // on the goroutine
        });
        assert_eq!(parts, [1, 2, 3, 4]);
        let mut sum = 0;
        trefoil::scope(|s| {
            s.go(|| sum = thread::scope(|s| s.spawn(|| parts.iter().sum::<u64>()).join().unwrap()));
        });
        assert_eq!(sum, 10);
    });
}

#[test]
fn sleep_and_yield() {
    let _w = watchdog();
    everywhere(|| {
        let start = Instant::now();
        join_all((0..200).map(|_| trefoil::go(|| thread::sleep(20 * MS))));
        assert!(start.elapsed() >= 20 * MS);
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        thread::sleep(Duration::ZERO);
        // SAFETY: plain calls.
        unsafe {
            assert_eq!(libc::usleep(100), 0);
            assert_eq!(libc::sleep(0), 0);
            let bad = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000_000 };
            assert_eq!(libc::nanosleep(&raw const bad, std::ptr::null_mut()), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            let past = libc::timespec { tv_sec: 1, tv_nsec: 0 };
            let (clock, absolute) = (libc::CLOCK_MONOTONIC, libc::TIMER_ABSTIME);
            let none = std::ptr::null_mut();
            assert_eq!(libc::clock_nanosleep(clock, absolute, &raw const past, none), 0);
        }
    });
    // yield_now of std lets the other goroutine of the only P run.
    runtime(1).run(|| {
        let flag = Arc::new(AtomicBool::new(false));
        let f = flag.clone();
        let other = trefoil::go(move || f.store(true, SeqCst));
        while !flag.load(SeqCst) {
            thread::yield_now();
        }
        other.join().unwrap();
    });
}

#[test]
fn poisoned_by_a_panicking_goroutine() {
    let _w = watchdog();
    pairs(|a, b| {
        let (lock, cond) = (Arc::new((Mutex::new(1), RwLock::new(1))), Arc::new(Once::new()));
        let (l, c) = (lock.clone(), cond.clone());
        let panics = a.start(move || {
            let _first = l.0.lock().unwrap();
            let _second = l.1.write().unwrap();
            thread::yield_now();
            c.call_once(|| std::panic::resume_unwind(Box::new("on purpose")));
        });
        panics.result().unwrap_err();
        let looks = b.start(move || {
            assert_eq!(*lock.0.lock().unwrap_err().into_inner(), 1);
            lock.0.clear_poison();
            drop(lock.0.lock().unwrap());
            assert!(lock.1.read().is_err());
            let mut seen = false;
            cond.call_once_force(|state| seen = state.is_poisoned());
            assert!(seen);
        });
        looks.join();
    });
}

// --- other people's locks ------------------------------------------------------------------------

#[test]
fn parking_lot_locks() {
    let _w = watchdog();
    pairs(|a, b| {
        let n = Arc::new((parking_lot::Mutex::new(0u64), parking_lot::Condvar::new()));
        let rw = Arc::new(parking_lot::RwLock::new((0u64, 0u64)));
        let all: Vec<_> = [a, b, a, b]
            .into_iter()
            .map(|who| {
                let (n, rw) = (n.clone(), rw.clone());
                who.start(move || {
                    for i in 0..200 {
                        let mut n = n.0.lock();
                        let was = *n;
                        if i % 16 == 0 {
                            thread::yield_now();
                        }
                        *n = was + 1;
                        drop(n);
                        if i % 4 == 0 {
                            let mut both = rw.write();
                            both.0 += 1;
                            both.1 += 1;
                        } else {
                            let both = rw.read();
                            assert_eq!(both.0, both.1);
                        }
                    }
                    n.1.notify_all();
                })
            })
            .collect();
        let mut done = n.0.lock();
        while *done < 800 {
            n.1.wait_for(&mut done, 50 * MS);
        }
        drop(done);
        all.into_iter().for_each(Started::join);
        assert_eq!(rw.read().0, 200);
        let start = Instant::now();
        let held = n.0.lock();
        let n = n.clone();
        let late = b.start(move || n.0.try_lock_for(10 * MS).is_none());
        assert!(late.join() && start.elapsed() >= 10 * MS);
        drop(held);
    });
}

#[test]
fn crossbeam_and_flume() {
    let _w = watchdog();
    pairs(|a, b| {
        for room in [0, 1, 16] {
            let (tx, rx) = crossbeam_channel::bounded(room);
            let (back, results) = crossbeam_channel::unbounded();
            let s = a.start(move || (0..150).for_each(|i| tx.send(i).unwrap()));
            let r = b.start(move || {
                let never = crossbeam_channel::never::<u32>();
                loop {
                    crossbeam_channel::select! {
                        recv(rx) -> i => match i { Ok(i) => back.send(i).unwrap(), Err(_) => break },
                        recv(never) -> _ => unreachable!(),
                        default(TOO_LONG) => panic!("nothing came"),
                    }
                }
            });
            s.join();
            r.join();
            assert_eq!(results.iter().sum::<u32>(), 150 * 149 / 2);
            let (tx, rx) = flume::bounded(room);
            let s = a.start(move || (0..150).for_each(|i| tx.send(i).unwrap()));
            let r = b.start(move || rx.iter().sum::<u32>());
            s.join();
            assert_eq!(r.join(), 150 * 149 / 2);
        }
        let (tx, rx) = crossbeam_channel::bounded::<()>(0);
        let (ftx, frx) = flume::bounded::<()>(0);
        let late = b.start(move || {
            let start = Instant::now();
            assert!(rx.recv_timeout(5 * MS).unwrap_err().is_timeout());
            assert_eq!(frx.recv_timeout(5 * MS), Err(flume::RecvTimeoutError::Timeout));
            start.elapsed()
        });
        assert!(late.join() >= 10 * MS);
        drop((tx, ftx));
        let tick = crossbeam_channel::after(5 * MS);
        a.start(move || tick.recv().unwrap()).join();
    });
}

// --- many ----------------------------------------------------------------------------------------

/// The threads that run goroutines.
fn ours() -> Vec<(i32, String)> {
    tasks().into_iter().filter(|(_, name)| name.starts_with("trefoil-m")).collect()
}

/// `procs` and a few more.
#[track_caller]
fn assert_few_threads(procs: usize, more: usize) {
    let all = ours();
    assert!(all.len() <= procs + more, "{} threads: {all:?}", all.len());
}

#[test]
fn a_hundred_thousand_wait_in_std_sync() {
    let _w = watchdog();
    if !in_child() {
        Child::of("a_hundred_thousand_wait_in_std_sync").succeed();
        return;
    }
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
        until("all of them", || begun.load(SeqCst) == n);
        thread::sleep(50 * MS);
        assert_eq!(all.0.lock().unwrap().0, 0);
        assert_few_threads(2, 6);
        drop(held);
        all.0.lock().unwrap().1 = true;
        all.1.notify_all();
        parked.into_iter().for_each(|tell| tell.send(()).unwrap());
        closed.wait();
        join_all(goroutines);
        assert_eq!(all.0.lock().unwrap().0, n);
        assert_few_threads(2, 6);
    });
}

#[test]
fn fifty_thousand_sleep() {
    let _w = watchdog();
    if !in_child() {
        Child::of("fifty_thousand_sleep").succeed();
        return;
    }
    let n = size(50_000, 5_000);
    runtime(2).run(move || {
        let start = Instant::now();
        let all: Vec<_> =
            (0..n).map(|_| trefoil::go(|| thread::sleep(Duration::from_secs(1)))).collect();
        thread::sleep(500 * MS);
        assert_few_threads(2, 6);
        join_all(all);
        let took = start.elapsed();
        println!("{n} sleeps of 1 s took {took:?}");
        assert!(took >= Duration::from_secs(1));
        if !cfg!(debug_assertions) && std::env::var_os("TREFOIL_BUSY").is_none() {
            assert!(took < 2500 * MS, "{took:?}");
        }
    });
}

#[test]
fn a_thousand_connections_on_few_threads() {
    let _w = watchdog();
    if !in_child() {
        Child::of("a_thousand_connections_on_few_threads").succeed();
        return;
    }
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
                        assert_few_threads(4, 8);
                    }
                })
            })
            .collect();
        join_all(clients);
        server.join().unwrap();
        assert_few_threads(4, 8);
    });
}

// --- sockets -------------------------------------------------------------------------------------

fn blocks(fd: &impl AsRawFd) -> bool {
    // SAFETY: a question.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    assert!(flags >= 0);
    flags & libc::O_NONBLOCK == 0
}

fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    let client = trefoil::go(move || TcpStream::connect(addr).unwrap());
    let server = listener.accept().unwrap().0;
    let client = client.join().unwrap();
    assert!(blocks(&listener) && blocks(&server) && blocks(&client));
    (client, server)
}

#[test]
fn tcp_between_goroutines_and_threads() {
    let _w = watchdog();
    pairs(|a, b| {
        let (mut client, mut server) = tcp();
        let echo = b.start(move || {
            let mut buf = [0; 1000];
            loop {
                match server.read(&mut buf).unwrap() {
                    0 => break assert!(blocks(&server)),
                    n => server.write_all(&buf[..n]).unwrap(),
                }
            }
        });
        let asks = a.start(move || {
            for i in 0..60u8 {
                client.write_all(&[i; 100]).unwrap();
                let mut buf = [0; 100];
                client.read_exact(&mut buf).unwrap();
                assert_eq!(buf, [i; 100]);
            }
            assert!(blocks(&client));
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(client.read(&mut [0]).unwrap(), 0);
        });
        asks.join();
        echo.join();
    });
}

#[test]
fn tcp_to_a_slow_reader() {
    let _w = watchdog();
    pairs(|a, b| {
        const LEN: usize = 6 << 20;
        let (mut client, mut server) = tcp();
        let writer = a.start(move || {
            let data: Vec<u8> = (0..LEN).map(|i| (i / 7) as u8).collect();
            let half = LEN / 2;
            // One call, as a blocking socket takes it.
            assert_eq!(client.write(&data[..half]).unwrap(), half);
            let mut rest = &data[half..];
            while !rest.is_empty() {
                let (one, two) = rest.split_at(rest.len() / 3);
                let n = client.write_vectored(&[IoSlice::new(one), IoSlice::new(two)]).unwrap();
                rest = &rest[n..];
            }
            assert!(blocks(&client));
        });
        let reader = b.start(move || {
            let (mut at, mut one, mut two) = (0, vec![0; 100_000], vec![0; 150_000]);
            loop {
                if at < 1 << 20 {
                    thread::sleep(MS / 2);
                }
                let mut both = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
                let n = server.read_vectored(&mut both).unwrap();
                for byte in one.iter().chain(&two).take(n) {
                    assert_eq!(*byte, (at / 7) as u8);
                    at += 1;
                }
                if n == 0 {
                    break at;
                }
            }
        });
        writer.join();
        assert_eq!(reader.join(), LEN);
    });
}

#[test]
fn timeouts_and_nonblocking() {
    let _w = watchdog();
    everywhere(|| {
        let (mut client, mut server) = tcp();
        let mut buf = [0; 64];
        client.set_read_timeout(Some(20 * MS)).unwrap();
        for _ in 0..2 {
            let start = Instant::now();
            assert_eq!(client.read(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(start.elapsed() >= 19 * MS, "{:?}", start.elapsed());
        }
        assert_eq!(client.peek(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        client.set_read_timeout(Some(Duration::from_secs(10_000_000_000_000_000))).unwrap();
        server.write_all(b"seven b").unwrap();
        assert_eq!(client.peek(&mut buf).unwrap(), 7);
        assert_eq!(client.read(&mut buf).unwrap(), 7);
        client.set_read_timeout(None).unwrap();

        // Waited once without a limit: then limits and flags, set through another descriptor of the same socket.
        let writer = trefoil::go(move || {
            thread::sleep(2 * MS);
            server.write_all(b"x").unwrap();
            server
        });
        assert_eq!(client.read(&mut buf).unwrap(), 1);
        let mut server = writer.join().unwrap();
        let other = client.try_clone().unwrap();
        other.set_read_timeout(Some(5 * MS)).unwrap();
        assert_eq!(client.read(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        other.set_read_timeout(None).unwrap();
        other.set_nonblocking(true).unwrap();
        assert_eq!(client.read(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert_eq!(client.peek(&mut buf).unwrap_err().kind(), ErrorKind::WouldBlock);
        assert!(!blocks(&client));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        other.set_nonblocking(false).unwrap();
        server.write_all(b"y").unwrap();
        assert_eq!(client.read(&mut buf).unwrap(), 1);

        // A write that nobody reads: what fitted is told, then the time is over.
        client.set_write_timeout(Some(20 * MS)).unwrap();
        let (start, big) = (Instant::now(), vec![0; 16 << 20]);
        let n = client.write(&big).unwrap();
        assert!(n > 0 && n < big.len() && start.elapsed() >= 19 * MS);
        // (The other side's buffer may grow meanwhile.)
        let mut fill = || {
            (0..100).find_map(|_| client.write(&big).err()).expect("it is full some time").kind()
        };
        assert_eq!(fill(), ErrorKind::WouldBlock);
        other.set_nonblocking(true).unwrap();
        assert_eq!(fill(), ErrorKind::WouldBlock);
    });
}

#[test]
fn connecting() {
    let _w = watchdog();
    everywhere(|| {
        let gone = {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            listener.local_addr().unwrap()
        };
        assert_eq!(TcpStream::connect(gone).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let refused = TcpStream::connect_timeout(&gone, TOO_LONG).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let addr = listener.local_addr().unwrap();
        let client = TcpStream::connect_timeout(&addr, TOO_LONG).unwrap();
        assert!(blocks(&client));
        drop(listener.accept().unwrap());
        // By name.
        let by_name = ("localhost", addr.port()).to_socket_addrs().unwrap();
        assert!(by_name.into_iter().any(|found| found.ip().is_loopback()));
        // Nobody answers there, or the network says at once that there is no way.
        let start = Instant::now();
        let nowhere = "192.0.2.1:9".parse().unwrap();
        TcpStream::connect_timeout(&nowhere, 20 * MS).unwrap_err();
        assert!(start.elapsed() < TOO_LONG / 4);
    });
}

#[test]
fn accept_from_several() {
    let _w = watchdog();
    everywhere(|| {
        let listener = Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let addr = listener.local_addr().unwrap();
        let taken = Arc::new(AtomicUsize::new(0));
        let accept = |who: Who| {
            let (listener, taken) = (listener.clone(), taken.clone());
            who.start(move || {
                for _ in 0..10 {
                    listener.accept().unwrap().0.write_all(b"!").unwrap();
                    taken.fetch_add(1, SeqCst);
                }
            })
        };
        let all: Vec<_> =
            [Who::Goroutine; 5].into_iter().chain([Who::Thread]).map(accept).collect();
        let clients = (0..60).map(|_| {
            trefoil::go(move || {
                let mut buf = Vec::new();
                TcpStream::connect(addr).unwrap().read_to_end(&mut buf).unwrap();
                assert_eq!(buf, b"!");
            })
        });
        join_all(clients);
        all.into_iter().for_each(Started::join);
        assert_eq!(taken.load(SeqCst), 60);
        assert!(blocks(&*listener));
    });
}

#[test]
fn udp() {
    let _w = watchdog();
    pairs(|a, b| {
        let one = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let two = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (to, from) = (two.local_addr().unwrap(), one.local_addr().unwrap());
        let echo = b.start(move || {
            let mut buf = [0; 100];
            for _ in 0..50 {
                let (n, whence) = two.recv_from(&mut buf).unwrap();
                assert_eq!(two.send_to(&buf[..n], whence).unwrap(), n);
            }
            two
        });
        let asks = a.start(move || {
            one.connect(to).unwrap();
            for i in 0..50u8 {
                assert_eq!(one.send(&[i; 10][..i as usize % 10]).unwrap(), i as usize % 10);
                let mut buf = [0; 100];
                assert_eq!(one.recv(&mut buf).unwrap(), i as usize % 10);
            }
            one.set_read_timeout(Some(5 * MS)).unwrap();
            assert_eq!(one.recv(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(blocks(&one));
            one
        });
        let one = asks.join();
        let two = echo.join();
        two.send_to(b"abc", from).unwrap();
        one.set_read_timeout(None).unwrap();
        assert_eq!(one.peek(&mut [0; 8]).unwrap(), 3);
    });
}

#[test]
fn unix_sockets() {
    let _w = watchdog();
    pairs(|a, b| {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("trefoil-std-{}-{}", std::process::id(), NEXT.fetch_add(1, SeqCst));
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let p = path.clone();
        let server = b.start(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            stream.write_all(text.to_uppercase().as_bytes()).unwrap();
        });
        let client = a.start(move || {
            let mut stream = UnixStream::connect(p).unwrap();
            thread::sleep(MS);
            stream.write_all(b"quietly").unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            assert!(blocks(&stream));
            text
        });
        assert_eq!(client.join(), "QUIETLY");
        server.join();
        std::fs::remove_file(path).unwrap();
        let (x, y) = UnixDatagram::pair().unwrap();
        let reader = b.start(move || y.recv(&mut [0; 9]).unwrap());
        let writer = a.start(move || {
            thread::sleep(MS);
            x.send(b"dgram").unwrap()
        });
        assert_eq!((writer.join(), reader.join()), (5, 5));
    });
}

/// A Unix listener whose backlog is full: nothing is "under way" then.
#[test]
fn unix_connect_waits_for_room() {
    let _w = watchdog();
    runtime(2).run(|| {
        let path = std::env::temp_dir().join(format!("trefoil-room-{}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        // SAFETY: our socket.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let begun = Arc::new(AtomicUsize::new(0));
        let clients: Vec<_> = (0..6)
            .map(|_| {
                let (path, begun) = (path.clone(), begun.clone());
                trefoil::go(move || {
                    begun.fetch_add(1, SeqCst);
                    let mut stream = UnixStream::connect(path).unwrap();
                    stream.write_all(b"?").unwrap();
                    stream.read_exact(&mut [0]).unwrap();
                })
            })
            .collect();
        until("the clients", || begun.load(SeqCst) == 6);
        thread::sleep(5 * MS);
        for _ in 0..6 {
            let mut stream = listener.accept().unwrap().0;
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(b"!").unwrap();
        }
        join_all(clients);
        std::fs::remove_file(path).unwrap();
    });
}

/// One socket, read by goroutines and threads at once.
#[test]
fn one_descriptor_many_readers() {
    let _w = watchdog();
    everywhere(|| {
        const N: usize = 4000;
        let (x, y) = UnixStream::pair().unwrap();
        let y = Arc::new(y);
        let readers: Vec<_> = [Who::Goroutine, Who::Thread, Who::Goroutine, Who::Thread]
            .into_iter()
            .map(|who| {
                let y = y.clone();
                who.start(move || {
                    let (mut n, mut buf) = (0, [0; 3]);
                    loop {
                        match (&*y).read(&mut buf).unwrap() {
                            0 => return n,
                            more => n += more,
                        }
                    }
                })
            })
            .collect();
        let x = Arc::new(x);
        let writers: Vec<_> = [Who::Thread, Who::Goroutine]
            .into_iter()
            .map(|who| {
                let x = x.clone();
                who.start(move || (0..N / 2 / 4).for_each(|_| (&*x).write_all(b"four").unwrap()))
            })
            .collect();
        writers.into_iter().for_each(Started::join);
        x.shutdown(Shutdown::Write).unwrap();
        assert_eq!(readers.into_iter().map(Started::join).sum::<usize>(), N);
        assert!(blocks(&*x) && blocks(&*y));
    });
}

#[test]
fn closed_under_a_waiter() {
    let _w = watchdog();
    everywhere(|| {
        for how in 0..4 {
            for pause in [0, 0, 0, 2] {
                let (x, y) = UnixStream::pair().unwrap();
                let fd = y.into_raw_fd();
                let began = Arc::new(AtomicBool::new(false));
                let b = began.clone();
                let waiter = trefoil::go(move || {
                    let mut buf = [0u8; 4];
                    b.store(true, SeqCst);
                    // SAFETY: our buffer; a list of one entry.
                    unsafe {
                        if how == 3 {
                            let mut one = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                            libc::poll(&raw mut one, 1, -1) as isize - 2
                        } else {
                            libc::read(fd, buf.as_mut_ptr().cast(), 4)
                        }
                    }
                });
                until("the waiter", || began.load(SeqCst));
                thread::sleep(pause * MS);
                // SAFETY: ours; nobody opens another meanwhile that would mind.
                unsafe {
                    match how {
                        0 | 3 => assert_eq!(libc::close(fd), 0),
                        1 => assert_eq!(thread::spawn(move || libc::close(fd)).join().unwrap(), 0),
                        _ => {
                            let (other, keep) = UnixStream::pair().unwrap();
                            assert_eq!(libc::dup2(other.as_raw_fd(), fd), fd);
                            // Who looks again looks at the new one.
                            (&keep).write_all(b"").unwrap();
                            drop((other, keep));
                        }
                    }
                }
                assert!(waiter.join().unwrap() <= 0);
                if how == 2 {
                    // SAFETY: the copy.
                    drop(unsafe { OwnedFd::from_raw_fd(fd) });
                }
                drop(x);
            }
        }
    });
}

#[test]
fn dup_shares() {
    let _w = watchdog();
    everywhere(|| {
        let (mut x, mut y) = UnixStream::pair().unwrap();
        let mut copy = y.try_clone().unwrap();
        let reader = trefoil::go(move || {
            let mut buf = [0; 4];
            copy.read_exact(&mut buf).unwrap();
            drop(copy);
            buf
        });
        thread::sleep(MS);
        x.write_all(b"copy").unwrap();
        assert_eq!(&reader.join().unwrap(), b"copy");
        // The copy is closed, its number is used again, and the first one goes on.
        let (p, mut q) = UnixStream::pair().unwrap();
        let writer = trefoil::go(move || {
            thread::sleep(MS);
            x.write_all(b"orig").unwrap();
            (&p).write_all(b"next").unwrap();
            x
        });
        let mut buf = [0; 4];
        y.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"orig");
        q.read_exact(&mut buf).unwrap();
        assert_eq!(&buf, b"next");
        writer.join().unwrap();
    });
}

// --- poll, epoll, eventfd, pipes -----------------------------------------------------------------

fn poll(list: &mut [(RawFd, i16)], ms: i32) -> (i32, Vec<i16>) {
    let entry = |&(fd, events): &(RawFd, i16)| libc::pollfd { fd, events, revents: 0 };
    let mut all: Vec<_> = list.iter().map(entry).collect();
    // SAFETY: our list.
    let n = unsafe { libc::poll(all.as_mut_ptr(), all.len() as u64, ms) };
    (n, all.iter().map(|e| e.revents).collect())
}

#[test]
fn poll_and_ppoll() {
    let _w = watchdog();
    everywhere(|| {
        const IN: i16 = libc::POLLIN;
        const OUT: i16 = libc::POLLOUT;
        let (a, mut b) = UnixStream::pair().unwrap();
        let (c, mut d) = UnixStream::pair().unwrap();
        let (fa, fc) = (a.as_raw_fd(), c.as_raw_fd());
        // Times.
        for list in
            [&mut [][..], &mut [(fa, IN)], &mut [(fa, IN), (fc, IN)], &mut [(-1, IN), (fa, IN)]]
        {
            let start = Instant::now();
            assert_eq!(poll(list, 10).0, 0);
            assert!(start.elapsed() >= 10 * MS);
            assert_eq!(poll(list, 0).0, 0);
        }
        assert_eq!(poll(&mut [(fa, IN | OUT)], -1), (1, vec![OUT]));
        // One of several; the same one twice, and its second entry is what comes.
        let late = trefoil::go(move || {
            thread::sleep(3 * MS);
            d.write_all(b"d").unwrap();
            thread::sleep(3 * MS);
            b.write_all(b"b").unwrap();
            (b, d)
        });
        assert_eq!(poll(&mut [(fa, IN), (fc, IN)], -1), (1, vec![0, IN]));
        assert_eq!(poll(&mut [(fa, libc::POLLPRI), (fa, IN)], -1), (1, vec![0, IN]));
        assert_eq!(poll(&mut [(fa, IN)], 5_000), (1, vec![IN]));
        let (b, d) = late.join().unwrap();
        // Hang-ups and what is no descriptor.
        drop((b, d));
        assert_eq!(poll(&mut [(fa, 0)], -1), (1, vec![libc::POLLHUP]));
        assert_eq!(poll(&mut [(1 << 28, IN)], -1), (1, vec![libc::POLLNVAL]));
        let (e, _f) = UnixStream::pair().unwrap();
        let mut one = libc::pollfd { fd: e.as_raw_fd(), events: IN, revents: 0 };
        for time in [
            libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 },
            libc::timespec { tv_sec: 0, tv_nsec: 0 },
        ] {
            // SAFETY: our entry and time.
            let n = unsafe { libc::ppoll(&raw mut one, 1, &raw const time, std::ptr::null()) };
            assert_eq!(n, 0);
        }
    });
}

/// `select` over the three sets; how many, which are left in each, and what is left of the time.
fn select(sets: [&[RawFd]; 3], ms: Option<i64>) -> (i32, [Vec<RawFd>; 3], i64) {
    let mut raw = sets.map(|fds| {
        // SAFETY: a set is plain bits, and these descriptors are small.
        unsafe {
            let mut set: libc::fd_set = std::mem::zeroed();
            fds.iter().for_each(|fd| libc::FD_SET(*fd, &raw mut set));
            set
        }
    });
    let mut time =
        libc::timeval { tv_sec: ms.unwrap_or(0) / 1_000, tv_usec: ms.unwrap_or(0) % 1_000 * 1_000 };
    let at = if ms.is_some() { &raw mut time } else { std::ptr::null_mut() };
    let most = sets.iter().flat_map(|fds| fds.iter()).max().map_or(0, |fd| fd + 1);
    let [r, w, e] = &mut raw;
    // SAFETY: our own sets and time.
    let n = unsafe { libc::select(most, r, w, e, at) };
    // SAFETY: as above.
    let is_in = |fd: RawFd, set: &libc::fd_set| unsafe { libc::FD_ISSET(fd, set) };
    let left = std::array::from_fn(|i| {
        sets[i].iter().copied().filter(|fd| n >= 0 && is_in(*fd, &raw[i])).collect()
    });
    (n, left, time.tv_sec * 1_000 + time.tv_usec / 1_000)
}

#[test]
fn select_and_pselect() {
    let _w = watchdog();
    // A set has 1024 bits, and the other tests have many descriptors.
    if !in_child() {
        Child::of("select_and_pselect").succeed();
        return;
    }
    everywhere(|| {
        let (mut a, b) = UnixStream::pair().unwrap();
        let (c, mut d) = UnixStream::pair().unwrap();
        let [fb, fc] = [b.as_raw_fd(), c.as_raw_fd()];
        // Nothing: the time passes, the sets are empty.
        let start = Instant::now();
        let (n, left, time) = select([&[fb, fc], &[], &[fb]], Some(20));
        assert_eq!((n, left, time), (0, [vec![], vec![], vec![]], 0));
        assert!(start.elapsed() >= 20 * MS);
        assert_eq!(select([&[fb], &[], &[]], Some(0)).0, 0);
        // No descriptors: a sleep.
        let start = Instant::now();
        assert_eq!(select([&[], &[], &[]], Some(10)).0, 0);
        assert!(start.elapsed() >= 10 * MS);
        // One of two, by somebody else's write; a P is free meanwhile even if there is one only.
        let writer = trefoil::go(move || {
            thread::sleep(10 * MS);
            d.write_all(b"x").unwrap();
            d
        });
        let (n, left, time) = select([&[fb, fc], &[], &[]], Some(10_000));
        assert_eq!((n, left), (1, [vec![fc], vec![], vec![]]));
        assert!((1_000..10_000).contains(&time), "{time}");
        drop(writer.join().unwrap());
        // Both directions of one: two bits.
        a.write_all(b"y").unwrap();
        assert_eq!(select([&[fb, fc], &[fb], &[]], None).0, 3);
        // Nobody has it.
        let gone = 900;
        assert_eq!(select([&[gone], &[], &[]], None).0, -1);
        assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
        // A hang-up is no exception: the time passes.
        let start = Instant::now();
        let (e, f) = UnixStream::pair().unwrap();
        drop(f);
        assert_eq!(select([&[], &[], &[e.as_raw_fd()]], Some(10)).0, 0);
        assert!(start.elapsed() >= 10 * MS);
        // SAFETY: a null set is no set; the others are ours.
        unsafe {
            let null = std::ptr::null_mut;
            let mut odd = libc::timeval { tv_sec: -1, tv_usec: 0 };
            assert_eq!(libc::select(0, null(), null(), null(), &raw mut odd), -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            let odd = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000_000 };
            let n = libc::ppoll(std::ptr::null_mut(), 0, &raw const odd, std::ptr::null());
            assert_eq!(n, -1);
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            // Asked for more than a set has, the kernel looks only at descriptors that may be there; and the two sets
            // are the same one.
            let mut sets: [libc::fd_set; 2] = std::mem::zeroed();
            libc::FD_SET(fb, &raw mut sets[0]);
            libc::FD_SET(1000, &raw mut sets[1]);
            let mut time = libc::timeval { tv_sec: 0, tv_usec: 0 };
            let all = &raw mut sets[0];
            assert_eq!(libc::select(1 << 16, all, null(), null(), &raw mut time), 1);
            assert_eq!(libc::select(fb + 1, all, all, null(), &raw mut time), 2);
            assert!(libc::FD_ISSET(fb, all) && libc::FD_ISSET(1000, &raw const sets[1]));
            let time = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
            let mut set: libc::fd_set = std::mem::zeroed();
            libc::FD_SET(fb, &raw mut set);
            let mask = std::ptr::null();
            let n = libc::pselect(fb + 1, &raw mut set, null(), null(), &raw const time, mask);
            assert_eq!((n, libc::FD_ISSET(fb, &raw const set)), (1, true));
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut mask);
            let n = libc::pselect(0, null(), null(), null(), &raw const time, &raw const mask);
            assert_eq!(n, 0);
        }
    });
}

#[test]
fn epoll_and_eventfd() {
    let _w = watchdog();
    pairs(|a, b| {
        // SAFETY: makes descriptors.
        let (epoll, event) = unsafe {
            let epoll = OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC));
            (epoll, OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)))
        };
        let mut wanted = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 77 };
        let mut found = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: our descriptors and events.
        unsafe {
            let add = libc::EPOLL_CTL_ADD;
            let (e, f) = (epoll.as_raw_fd(), event.as_raw_fd());
            assert_eq!(libc::epoll_ctl(e, add, f, &raw mut wanted), 0);
            let start = Instant::now();
            assert_eq!(libc::epoll_wait(e, &raw mut found, 1, 10), 0);
            assert!(start.elapsed() >= 10 * MS);
        }
        let event = Arc::new(event);
        let (send, told) = channel();
        let e = event.clone();
        let waiter = a.start(move || {
            let mut found = libc::epoll_event { events: 0, u64: 0 };
            let (mut total, mut buf) = (0, [0u8; 8]);
            while total < 30 {
                // SAFETY: our descriptors, events and eight bytes.
                unsafe {
                    assert_eq!(libc::epoll_wait(epoll.as_raw_fd(), &raw mut found, 1, -1), 1);
                    assert_eq!({ found.u64 }, 77);
                    assert_eq!(libc::read(e.as_raw_fd(), buf.as_mut_ptr().cast(), 8), 8);
                }
                total += u64::from_ne_bytes(buf);
            }
            // And without epoll.
            send.send(()).unwrap();
            // SAFETY: eight bytes.
            assert_eq!(unsafe { libc::read(e.as_raw_fd(), buf.as_mut_ptr().cast(), 8) }, 8);
            assert!(blocks(&*e));
            total
        });
        let writer = b.start(move || {
            let put = |n: u64| {
                // SAFETY: eight bytes.
                assert_eq!(unsafe { libc::write(event.as_raw_fd(), (&raw const n).cast(), 8) }, 8);
            };
            for _ in 0..10 {
                put(3);
                thread::sleep(MS / 4);
            }
            told.recv().unwrap();
            thread::sleep(2 * MS);
            put(1);
        });
        assert_eq!(waiter.join(), 30);
        writer.join();
    });
}

#[test]
fn pipes() {
    let _w = watchdog();
    pairs(|a, b| {
        let (mut reader, mut writer) = io::pipe().unwrap();
        let data: Vec<u8> = (0..1_000_000usize).map(|i| (i % 251) as u8).collect();
        let d = data.clone();
        let w = a.start(move || {
            writer.write_all(&d).unwrap();
            assert!(blocks(&writer));
        });
        let r = b.start(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).unwrap();
            assert!(blocks(&reader));
            all
        });
        w.join();
        assert!(r.join() == data);
    });
}

// --- processes and files -------------------------------------------------------------------------

#[test]
fn processes() {
    let _w = watchdog();
    runtime(4).run(|| {
        let all = (0..size(100, 30)).map(|i| {
            trefoil::go(move || match i % 3 {
                0 => {
                    let out = Command::new("echo").arg(i.to_string()).output().unwrap();
                    assert!(out.status.success());
                    assert_eq!(String::from_utf8(out.stdout).unwrap().trim(), i.to_string());
                }
                1 => assert_eq!(Command::new("false").status().unwrap().code(), Some(1)),
                _ => {
                    let mut cat = Command::new("cat");
                    let mut cat = cat.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
                    let (mut to, mut from) =
                        (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
                    let writer = trefoil::go(move || to.write_all(&[7; 200_000]).unwrap());
                    let mut all = Vec::new();
                    from.read_to_end(&mut all).unwrap();
                    writer.join().unwrap();
                    assert!(all == [7; 200_000]);
                    assert!(cat.wait().unwrap().success());
                }
            })
        });
        join_all(all);
        assert_eq!(Command::new("/no/such/thing").spawn().unwrap_err().kind(), ErrorKind::NotFound);
    });
}

#[test]
fn files() {
    let _w = watchdog();
    runtime(2).run(|| {
        let dir = std::env::temp_dir().join(format!("trefoil-files-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let all = (0..50usize).map(|i| {
            let path = dir.join(i.to_string());
            trefoil::go(move || {
                let data = vec![i as u8; 100_000 + i];
                std::fs::write(&path, &data).unwrap();
                let file = std::fs::File::open(&path).unwrap();
                file.sync_all().unwrap();
                let mut all = Vec::new();
                (&file).read_to_end(&mut all).unwrap();
                assert!(all == data);
            })
        });
        join_all(all);
        std::fs::remove_dir_all(dir).unwrap();
    });
}

// --- misuse --------------------------------------------------------------------------------------

#[test]
fn fork_in_a_goroutine() {
    let _w = watchdog();
    if !in_child() {
        Child::of("fork_in_a_goroutine").succeed();
        return;
    }
    runtime(2).run(|| {
        // Somebody who waits for a descriptor that the child closes, and load on the locks.
        let (x, mut y) = UnixStream::pair().unwrap();
        let waiter = trefoil::go(move || {
            let mut buf = [0; 2];
            y.read_exact(&mut buf).unwrap();
            buf
        });
        let stop = Arc::new(AtomicBool::new(false));
        let s = stop.clone();
        let load = trefoil::go(move || {
            while !s.load(SeqCst) {
                drop(vec![1; 1000]);
                thread::yield_now();
            }
        });
        for _ in 0..10 {
            let (mut reader, writer) = io::pipe().unwrap();
            let fd = writer.as_raw_fd();
            // SAFETY: the child makes only calls that are allowed there.
            unsafe {
                let pid = libc::fork();
                if pid == 0 {
                    for other in 3..200 {
                        if other != fd {
                            libc::close(other);
                        }
                    }
                    libc::usleep(100);
                    libc::sched_yield();
                    libc::write(fd, b"from the child".as_ptr().cast(), 14);
                    libc::_exit(7);
                }
                drop(writer);
                let mut text = String::new();
                reader.read_to_string(&mut text).unwrap();
                assert_eq!(text, "from the child");
                let mut status = 0;
                assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
                assert_eq!(libc::WEXITSTATUS(status), 7);
            }
        }
        stop.store(true, SeqCst);
        load.join().unwrap();
        (&x).write_all(b"ok").unwrap();
        assert_eq!(&waiter.join().unwrap(), b"ok");
    });
}

static HANDLED: AtomicUsize = AtomicUsize::new(0);
static HANDLER_FD: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_usr1(_: i32) {
    HANDLED.fetch_add(1, SeqCst);
    // SAFETY: one byte; errno is put back.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(HANDLER_FD.load(SeqCst), b".".as_ptr().cast(), 1);
        *libc::__errno_location() = errno;
    }
}

#[test]
fn signals_under_load() {
    let _w = watchdog();
    if !in_child() {
        Child::of("signals_under_load").succeed();
        return;
    }
    runtime(2).run(|| {
        // Nobody reads it: a handler finds it full, and must not park. (That would be the end of it in a thread too,
        // but for the reader below.)
        let (mut dots, full) = io::pipe().unwrap();
        HANDLER_FD.store(full.as_raw_fd(), SeqCst);
        // SAFETY: a handler that makes one call.
        unsafe { libc::signal(libc::SIGUSR1, on_usr1 as *const () as libc::sighandler_t) };
        let stop = Arc::new(AtomicBool::new(false));
        let pairs: Vec<_> = (0..20)
            .map(|_| {
                let (mut x, mut y) = UnixStream::pair().unwrap();
                let s = stop.clone();
                let echo = trefoil::go(move || {
                    let mut buf = [0; 10];
                    while y.read_exact(&mut buf).is_ok() {
                        y.write_all(&buf).unwrap();
                    }
                });
                let asks = trefoil::go(move || {
                    let (mut buf, mut n) = ([0; 10], 0u64);
                    while !s.load(SeqCst) {
                        x.write_all(&[n as u8; 10]).unwrap();
                        x.read_exact(&mut buf).unwrap();
                        assert_eq!(buf, [n as u8; 10]);
                        n += 1;
                    }
                    n
                });
                (echo, asks)
            })
            .collect();
        let reader = thread::spawn(move || {
            let mut n = 0;
            let mut buf = [0; 1000];
            loop {
                match dots.read(&mut buf).unwrap() {
                    0 => return n,
                    more => n += more,
                }
            }
        });
        let start = Instant::now();
        let mut sent = 0;
        while start.elapsed() < 300 * MS {
            // SAFETY: a signal to ourselves.
            unsafe { libc::kill(libc::getpid(), libc::SIGUSR1) };
            sent += 1;
            thread::sleep(MS / 4);
        }
        stop.store(true, SeqCst);
        let turns: u64 = pairs
            .into_iter()
            .map(|(echo, asks)| {
                let n = asks.join().unwrap();
                echo.join().unwrap();
                n
            })
            .sum();
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGUSR1, libc::SIG_IGN) };
        drop(full);
        let n = trefoil::blocking(|| reader.join().unwrap());
        assert!(
            n > 0 && n <= sent && HANDLED.load(SeqCst) == n && turns > 100,
            "{n} {sent} {turns}"
        );
    });
}

#[test]
fn everybody_prints() {
    let _w = watchdog();
    if in_child() {
        std::panic::set_hook(Box::new(|info| eprintln!("hook: {info}")));
        runtime(4).run(|| {
            let all: Vec<_> = (0..100)
                .map(|i| {
                    trefoil::go(move || {
                        for j in 0..20 {
                            println!("line {i}.{j} of all");
                        }
                        if i % 10 == 0 {
                            panic!("on purpose {i}");
                        }
                    })
                })
                .collect();
            let panics = all.into_iter().filter_map(|h| h.join().err()).count();
            assert_eq!(panics, 10);
        });
        return;
    }
    let out = Child::of("everybody_prints").output();
    assert!(out.status.success(), "{out:?}");
    let (lines, errors) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let whole = |l: &&str| l.starts_with("line ") && l.ends_with(" of all");
    // The harness's own words may share a line with the first.
    assert!(lines.lines().filter(whole).count() >= 1999, "{lines}");
    assert_eq!(errors.matches("on purpose").count(), 10, "{errors}");
}
