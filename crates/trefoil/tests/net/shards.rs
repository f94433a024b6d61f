//! The poller's shards: a descriptor is polled in whatever shard it is, and whichever threads
//! sleep.

use crate::common::{self, child_test, hold_until, spin, watchdog};
use std::net::UdpSocket as Plain;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
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
    common::raw::raw_sleep(Duration::from_millis(ms));
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

/// Returns the epoll instances of this process in which `fd` is registered.
fn instances_with(fd: RawFd) -> Vec<RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let has_fd = |instance: &RawFd| {
        // Only an epoll instance has lines with `tfd`. A file may be closed meanwhile.
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{instance}"));
        let targets = |line: &str| {
            let target = line.strip_prefix("tfd:")?.split_whitespace().next()?;
            target.parse::<RawFd>().ok()
        };
        info.is_ok_and(|info| info.lines().filter_map(targets).any(|target| target == fd))
    };
    numbers.filter(has_fd).collect()
}

/// Keeps its P until the flag is set.
fn hold_p(rt: &Runtime, running: &Arc<AtomicUsize>) -> Arc<AtomicBool> {
    let release = Arc::new(AtomicBool::new(false));
    let (running, released) = (running.clone(), release.clone());
    rt.go(move || {
        let _held = trefoil::no_preempt();
        running.fetch_add(1, SeqCst);
        hold_until("the release of the P", || released.load(SeqCst));
    })
    .unwrap();
    release
}

/// The registration moves to the shard of the P on which its reader runs, and no datagram is missed
/// meanwhile.
#[test]
fn a_descriptor_follows_a_reader_that_stays_on_another_p() {
    // Another test's epoll instance could know the descriptor's number from an earlier file.
    child_test!();
    let plain = Plain::bind("127.0.0.1:0").unwrap();
    let rt = Runtime::builder().procs(2).build().unwrap();
    let running = Arc::new(AtomicUsize::new(0));
    let got = Arc::new(AtomicUsize::new(0));
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (address, fd) = (socket.local_addr().unwrap(), socket.as_raw_fd());

    // The reader first waits on the P that this goroutine does not hold.
    let first = hold_p(&rt, &running);
    hold_until("the first P to be held", || running.load(SeqCst) == 1);
    let count = got.clone();
    rt.go(move || {
        loop {
            socket.recv(&mut [0; 8]).unwrap();
            count.fetch_add(1, SeqCst);
        }
    })
    .unwrap();
    let one_datagram = || {
        let before = got.load(SeqCst);
        plain.send_to(b"x", address).unwrap();
        hold_until("a datagram", || got.load(SeqCst) == before + 1);
    };
    one_datagram();
    hold_until("the registration", || !instances_with(fd).is_empty());
    let [home] = instances_with(fd)[..] else { panic!("it is registered once") };
    (0..100).for_each(|_| one_datagram());
    assert_eq!(instances_with(fd), [home], "it stays while its reader does");

    // Now the other P is held, and the reader must run on the first one.
    let second = hold_p(&rt, &running);
    hold_until("the second P to be held", || running.load(SeqCst) == 2);
    first.store(true, SeqCst);
    hold_until("the registration to move", || {
        one_datagram();
        matches!(instances_with(fd)[..], [instance] if instance != home)
    });
    second.store(true, SeqCst);
    (0..100).for_each(|_| one_datagram());
}
