//! The poller's shards: a descriptor is polled in whatever shard it is, and whichever threads
//! sleep.

mod common;

use common::{hold_until, spin, watchdog};
use std::net::UdpSocket as Plain;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil::Runtime;
use trefoil::net::UdpSocket;

/// Starts a goroutine that waits for one datagram and counts it. Returns the address to send it to.
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

/// Blocks the thread, without an interposed function.
fn block(ms: u64) {
    // SAFETY: no memory involved.
    unsafe { libc::syscall(libc::SYS_poll, 0, 0, ms) };
}

/// The number of threads when the second shard is opened.
#[derive(PartialEq)]
enum Threads {
    /// So many that the idle poller is not needed for other work.
    Spare,
    Few,
}

/// The idle poller waits in the open shards. Another shard is opened while every P is busy; then
/// both Ps become idle, one of them by `last`. Both descriptors must be polled.
fn open_another(threads: &Threads, last: fn()) {
    let _watchdog = watchdog();
    let plain = Plain::bind("127.0.0.1:0").unwrap();
    for _ in 0..10 {
        let rt = Runtime::builder().procs(2).build().unwrap();
        let got = Arc::new(AtomicUsize::new(0));
        let first = one_datagram(&rt, &got, || {});
        std::thread::sleep(Duration::from_millis(10));
        if *threads == Threads::Spare {
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
        hold_until("the second datagram", || got.load(SeqCst) == 1);
        plain.send_to(b"x", first).unwrap();
        hold_until("the first datagram", || got.load(SeqCst) == 2);
    }
}

/// The idle poller was not told about the new shard.
#[test]
fn a_shard_opened_while_the_idle_poller_waits_is_polled() {
    open_another(&Threads::Spare, || spin(Duration::from_millis(10)));
}

#[test]
fn a_shard_is_polled_when_the_last_thread_blocks() {
    open_another(&Threads::Few, || block(200));
}
