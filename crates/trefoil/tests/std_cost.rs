//! What std's calls cost on goroutines, compared with the runtime's own and with threads. In
//! release builds only; the bounds are wide, the figures are printed (`--nocapture`).
#![cfg(all(feature = "std", not(debug_assertions)))]

mod common;

use common::{once_in_five, runtime, watchdog};
use std::ffi::{CStr, c_void};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

/// Returns the shortest of five runs.
fn best(mut f: impl FnMut() -> Duration) -> Duration {
    (0..5).map(|_| f()).min().unwrap()
}

/// Calls two functions by turns, in batches. Returns the nanoseconds per call in the fastest batch
/// of each: on a busy machine most batches are disturbed.
fn nanos_per_call(n: u32, mut one: impl FnMut(), mut other: impl FnMut()) -> [f64; 2] {
    const BATCH: u32 = 500;
    fn batch(f: &mut impl FnMut()) -> Duration {
        let start = Instant::now();
        (0..BATCH).for_each(|_| f());
        start.elapsed()
    }
    let least = (0..n / BATCH)
        .fold([Duration::MAX; 2], |[a, b], _| [a.min(batch(&mut one)), b.min(batch(&mut other))]);
    least.map(|time| time.as_nanos() as f64 / f64::from(BATCH))
}

/// Returns libc's own function behind the interposed one.
fn libc_function(name: &CStr) -> *mut c_void {
    // SAFETY: a C string and a pseudo handle.
    let at = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    assert!(!at.is_null());
    at
}

/// On a plain thread an interposed function costs a check and a jump.
#[test]
fn interposed_functions_cost_less_than_40_ns_on_a_plain_thread() {
    type Syscall = unsafe extern "C" fn(i64, ...) -> i64;
    type Recv = unsafe extern "C" fn(RawFd, *mut c_void, usize, i32) -> isize;
    const N: u32 = 200_000;
    let _w = watchdog();
    runtime(1).run(|| ()); // interposed functions are active from now on
    // SAFETY: the functions have these types.
    let (syscall, recv) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Syscall>(libc_function(c"syscall")),
            std::mem::transmute::<*mut c_void, Recv>(libc_function(c"recv")),
        )
    };
    // SAFETY: no arguments.
    let [bare, interposed] = unsafe {
        let number = libc::SYS_getppid;
        nanos_per_call(N, || _ = syscall(number), || _ = libc::syscall(number))
    };
    println!("getppid: {bare:.1} ns bare, {interposed:.1} ns interposed");
    assert!(interposed < bare + 40.0);
    let (socket, _other) = UnixDatagram::pair().unwrap();
    let (fd, mut buf) = (socket.as_raw_fd(), [0u8; 8]);
    let at = buf.as_mut_ptr().cast();
    let flag = libc::MSG_DONTWAIT;
    // SAFETY: a local buffer.
    let [bare, interposed] = unsafe {
        nanos_per_call(N, || _ = recv(fd, at, 8, flag), || _ = libc::recv(fd, at, 8, flag))
    };
    println!("recv: {bare:.1} ns bare, {interposed:.1} ns interposed");
    assert!(interposed < bare + 40.0);
}

#[test]
fn a_contended_std_mutex_takes_less_than_20_times_as_long_as_trefoils() {
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
fn channels_of_std_and_crossbeam_take_at_most_twice_as_long_as_on_threads() {
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
        ($name:literal, $make:ident, $max_ratio:expr) => {{
            once_in_five(|| {
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
                    "{} round trip: goroutines {:?}, threads {:?}, {ratio:.3}",
                    $name,
                    goroutines / N,
                    threads / N
                );
                if ratio < $max_ratio { Ok(()) } else { Err(format!("{}: {ratio:.3}", $name)) }
            });
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
fn tcp_echo_with_std_sockets_reaches_a_fifth_of_trefoils_rate() {
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
