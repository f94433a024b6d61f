//! The poller's shards: a descriptor is watched wherever it is at home, and whoever sleeps.

mod common;

use common::{hold_until, spin, watchdog};
use std::net::UdpSocket as Plain;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil::Runtime;
use trefoil::net::UdpSocket;

/// A goroutine that waits for one datagram and counts it; where to send it.
fn one_datagram(
    rt: &Runtime,
    got: &Arc<AtomicUsize>,
    first: impl FnOnce() + Send + 'static,
) -> std::net::SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let got = got.clone();
    rt.go(move || {
        first();
        socket.recv(&mut [0; 8]).unwrap();
        got.fetch_add(1, SeqCst);
    })
    .unwrap();
    address
}

/// The keeper slept in the shards there were; another was opened while every P was busy, and nobody told him when they
/// became idle.
#[test]
fn a_shard_that_is_opened_while_the_keeper_sleeps_is_watched() {
    let _watchdog = watchdog();
    let plain = Plain::bind("127.0.0.1:0").unwrap();
    for _ in 0..10 {
        let rt = Runtime::builder().procs(2).build().unwrap();
        let got = Arc::new(AtomicUsize::new(0));
        let first = one_datagram(&rt, &got, || {});
        std::thread::sleep(Duration::from_millis(10));
        // Threads enough: nobody has to be the keeper who would rather work.
        for _ in 0..4 {
            // SAFETY: no memory involved. Not a door: the thread blocks.
            rt.go(|| unsafe { libc::syscall(libc::SYS_poll, 0, 0, 10) }).unwrap();
        }
        std::thread::sleep(Duration::from_millis(30));
        let busy = Arc::new(AtomicUsize::new(0));
        let meet = move |busy: &AtomicUsize| {
            busy.fetch_add(1, SeqCst);
            while busy.load(SeqCst) < 2 {
                std::hint::spin_loop();
            }
        };
        let here = busy.clone();
        let second = one_datagram(&rt, &got, move || meet(&here));
        rt.go(move || {
            meet(&busy);
            spin(Duration::from_millis(10));
        })
        .unwrap();
        std::thread::sleep(Duration::from_millis(30));
        plain.send_to(b"x", second).unwrap();
        hold_until("the second one is told", || got.load(SeqCst) == 1);
        plain.send_to(b"x", first).unwrap();
        hold_until("the first one too", || got.load(SeqCst) == 2);
    }
}

/// The same, but the last P becomes idle because its thread blocks.
#[test]
fn a_shard_is_watched_when_the_last_thread_blocks() {
    let _watchdog = watchdog();
    let plain = Plain::bind("127.0.0.1:0").unwrap();
    for _ in 0..10 {
        let rt = Runtime::builder().procs(2).build().unwrap();
        let got = Arc::new(AtomicUsize::new(0));
        let first = one_datagram(&rt, &got, || {});
        std::thread::sleep(Duration::from_millis(10));
        let busy = Arc::new(AtomicUsize::new(0));
        let meet = move |busy: &AtomicUsize| {
            busy.fetch_add(1, SeqCst);
            while busy.load(SeqCst) < 2 {
                std::hint::spin_loop();
            }
        };
        let here = busy.clone();
        let second = one_datagram(&rt, &got, move || meet(&here));
        rt.go(move || {
            meet(&busy);
            // SAFETY: no memory involved. Not a door: the thread blocks.
            unsafe { libc::syscall(libc::SYS_poll, 0, 0, 200) };
        })
        .unwrap();
        std::thread::sleep(Duration::from_millis(30));
        plain.send_to(b"x", second).unwrap();
        hold_until("the second one is told", || got.load(SeqCst) == 1);
        plain.send_to(b"x", first).unwrap();
        hold_until("the first one too", || got.load(SeqCst) == 2);
    }
}
