//! What std's calls cost on goroutines, beside the runtime's own and beside threads. In release builds; the bounds are
//! wide, the figures are printed (`--nocapture`).
#![cfg(all(feature = "std", not(debug_assertions)))]

mod common;

use common::{runtime, watchdog};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};
use trefoil::Runtime;

/// The least of five runs.
fn best(mut f: impl FnMut() -> Duration) -> Duration {
    (0..5).map(|_| f()).min().unwrap()
}

/// The best batch of many: on a busy machine most are disturbed.
fn nanos_each(n: u32, mut f: impl FnMut()) -> f64 {
    const BATCH: u32 = 500;
    let batches = (0..n / BATCH).map(|_| {
        let start = Instant::now();
        (0..BATCH).for_each(|_| f());
        start.elapsed()
    });
    batches.min().unwrap().as_nanos() as f64 / f64::from(BATCH)
}

/// A system call with nobody in between.
fn raw(number: i64, args: [usize; 4]) -> isize {
    let result: isize;
    // SAFETY: the callers' calls read and write nothing but their own buffers.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number as isize => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2], in("r10") args[3],
            in("r8") 0, in("r9") 0, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

#[test]
fn straight_through_on_a_plain_thread() {
    let _w = watchdog();
    const N: u32 = 200_000;
    runtime(1).run(|| ()); // the doors are open
    let bare = nanos_each(N, || _ = raw(libc::SYS_getppid, [0; 4]));
    // SAFETY: no arguments.
    let door = nanos_each(N, || _ = unsafe { libc::syscall(libc::SYS_getppid) });
    println!("getppid: {bare:.1} ns bare, {door:.1} ns through syscall()");
    let (socket, _other) = UnixDatagram::pair().unwrap();
    let (fd, mut buf) = (socket.as_raw_fd(), [0u8; 8]);
    let at = buf.as_mut_ptr();
    let flag = libc::MSG_DONTWAIT;
    let args = [fd as usize, at as usize, 8, flag as usize];
    let bare_recv = nanos_each(N, || _ = raw(libc::SYS_recvfrom, args));
    // SAFETY: our buffer.
    let door_recv = nanos_each(N, || _ = unsafe { libc::recv(fd, at.cast(), 8, flag) });
    println!("recv: {bare_recv:.1} ns bare, {door_recv:.1} ns through recv()");
    assert!(door < bare + 40.0 && door_recv < bare_recv + 60.0);
}

#[test]
fn contended_mutex() {
    let _w = watchdog();
    const EACH: u32 = 50_000;
    fn time<L: Send + Sync + 'static>(
        lock: L,
        with: impl Fn(&L) + Send + Copy + 'static,
    ) -> Duration {
        let lock = Arc::new(lock);
        runtime(2).run(move || {
            best(|| {
                let start = Instant::now();
                let all: Vec<_> = (0..8)
                    .map(|_| {
                        let lock = lock.clone();
                        trefoil::go(move || (0..EACH).for_each(|_| with(&lock)))
                    })
                    .collect();
                all.into_iter().for_each(|h| h.join().unwrap());
                start.elapsed()
            })
        })
    }
    let std = time(std::sync::Mutex::new(0u64), |m| *m.lock().unwrap() += 1);
    let ours = time(trefoil::sync::Mutex::new(0u64), |m| *m.lock() += 1);
    let ratio = std.as_secs_f64() / ours.as_secs_f64();
    println!("mutex, 8 goroutines: std {std:?}, trefoil {ours:?}, {ratio:.2}");
    assert!(ratio < 20.0);
}

#[test]
fn ping_pong() {
    let _w = watchdog();
    const N: u32 = 10_000;
    fn mpsc() -> (impl FnOnce() + Send + 'static, impl FnOnce() + Send + 'static) {
        let ((a, b), (c, d)) = (sync_channel::<u32>(1), sync_channel::<u32>(1));
        let ask = move || {
            for i in 0..N {
                a.send(i).unwrap();
                d.recv().unwrap();
            }
        };
        (ask, move || b.iter().for_each(|i| _ = c.send(i)))
    }
    fn crossbeam() -> (impl FnOnce() + Send + 'static, impl FnOnce() + Send + 'static) {
        let (a, b) = crossbeam_channel::bounded::<u32>(0);
        let (c, d) = crossbeam_channel::bounded::<u32>(0);
        let ask = move || {
            for i in 0..N {
                a.send(i).unwrap();
                d.recv().unwrap();
            }
        };
        (ask, move || b.iter().for_each(|i| _ = c.send(i)))
    }
    macro_rules! measure {
        ($name:literal, $make:ident, $most:expr) => {{
            let goroutines = runtime(2).run(|| {
                best(|| {
                    let (ask, echo) = $make();
                    let start = Instant::now();
                    let echo = trefoil::go(echo);
                    trefoil::go(ask).join().unwrap();
                    echo.join().unwrap();
                    start.elapsed()
                })
            });
            let threads = best(|| {
                let (ask, echo) = $make();
                let start = Instant::now();
                let echo = thread::spawn(echo);
                ask();
                echo.join().unwrap();
                start.elapsed()
            });
            let ratio = goroutines.as_secs_f64() / threads.as_secs_f64();
            println!(
                "{} there and back: goroutines {:?}, threads {:?}, {ratio:.3}",
                $name,
                goroutines / N,
                threads / N
            );
            assert!(ratio < $most);
        }};
    }
    measure!("mpsc", mpsc, 2.0);
    measure!("crossbeam", crossbeam, 2.0);
}

const CONNECTIONS: usize = 500;
const TURNS: usize = 40;

macro_rules! echoes {
    ($listener:ty, $stream:ty) => {{
        let listener = <$listener>::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let server = trefoil::go(move || {
            let all: Vec<_> = (0..CONNECTIONS)
                .map(|_| {
                    let mut s = listener.accept().unwrap().0;
                    trefoil::go(move || {
                        let mut buf = [0; 64];
                        while let n @ 1.. = s.read(&mut buf).unwrap() {
                            s.write_all(&buf[..n]).unwrap();
                        }
                    })
                })
                .collect();
            all.into_iter().for_each(|h| h.join().unwrap());
        });
        let streams: Vec<_> = (0..CONNECTIONS).map(|_| <$stream>::connect(addr).unwrap()).collect();
        let start = Instant::now();
        let all: Vec<_> = streams
            .into_iter()
            .map(|mut s| {
                trefoil::go(move || {
                    let mut buf = [0; 64];
                    for _ in 0..TURNS {
                        s.write_all(&[7; 64]).unwrap();
                        s.read_exact(&mut buf).unwrap();
                    }
                })
            })
            .collect();
        all.into_iter().for_each(|h| h.join().unwrap());
        let took = start.elapsed();
        server.join().unwrap();
        took
    }};
}

#[test]
fn tcp_echo() {
    let _w = watchdog();
    let (mut std, mut ours) = (Duration::MAX, Duration::MAX);
    for _ in 0..4 {
        std = std.min(runtime(2).run(|| echoes!(std::net::TcpListener, std::net::TcpStream)));
        ours = ours
            .min(runtime(2).run(|| echoes!(trefoil::net::TcpListener, trefoil::net::TcpStream)));
    }
    let rate = |took: Duration| (CONNECTIONS * TURNS) as f64 / took.as_secs_f64();
    let ratio = rate(std) / rate(ours);
    println!(
        "echo, {CONNECTIONS} connections: std {:.0}/s, trefoil::net {:.0}/s, {ratio:.2}",
        rate(std),
        rate(ours)
    );
    assert!(ratio > 0.2);
}
