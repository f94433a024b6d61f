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

/// Blocks the thread: no door.
fn block(ms: u64) {
    // SAFETY: no memory involved.
    unsafe { libc::syscall(libc::SYS_poll, 0, 0, ms) };
}

/// A keeper sleeps in the shards there are; another is opened while every P is busy, and then they become idle: one of
/// them by `last`. With `threads` nobody has to be the idle poller who would rather work.
fn open_another(threads: bool, last: fn()) {
    let _watchdog = watchdog();
    let plain = Plain::bind("127.0.0.1:0").unwrap();
    for _ in 0..10 {
        let rt = Runtime::builder().procs(2).build().unwrap();
        let got = Arc::new(AtomicUsize::new(0));
        let first = one_datagram(&rt, &got, || {});
        std::thread::sleep(Duration::from_millis(10));
        if threads {
            (0..4).for_each(|_| drop(rt.go(|| block(10)).unwrap()));
            std::thread::sleep(Duration::from_millis(30));
        }
        let busy = Arc::new(AtomicUsize::new(0));
        let meet = |busy: &AtomicUsize| {
            busy.fetch_add(1, SeqCst);
            while busy.load(SeqCst) < 2 {
                std::hint::spin_loop();
            }
        };
        let here = busy.clone();
        let second = one_datagram(&rt, &got, move || meet(&here));
        rt.go(move || {
            meet(&busy);
            last();
        })
        .unwrap();
        std::thread::sleep(Duration::from_millis(30));
        plain.send_to(b"x", second).unwrap();
        hold_until("the second one is told", || got.load(SeqCst) == 1);
        plain.send_to(b"x", first).unwrap();
        hold_until("the first one too", || got.load(SeqCst) == 2);
    }
}

/// Nobody told the idle poller of the new one.
#[test]
fn a_shard_that_is_opened_while_the_keeper_sleeps_is_watched() {
    open_another(true, || spin(Duration::from_millis(10)));
}

#[test]
fn a_shard_is_watched_when_the_last_thread_blocks() {
    open_another(false, || block(200));
}
