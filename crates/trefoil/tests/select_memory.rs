//! Selects, deadlines and timers leave no memory behind. (Go: `test/chan/select2.go`, extended to
//! timers.)
//!
//! A binary of its own with one test: its allocator counts, and no other test may allocate
//! meanwhile.

mod common;

use common::{rss, watchdog_for};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use trefoil::chan::{Receiver, Select, Sender, bounded, never};
use trefoil::time::{Ticker, Timer, after_func};
use trefoil::{Runtime, go, select, yield_now};

/// A deadline that no wait here reaches.
const HOUR: Duration = Duration::from_secs(3600);

/// Rounds of each kind. A round is one select or more.
const ROUNDS: usize = if cfg!(debug_assertions) { 100_000 } else { 1_000_000 };
/// Rounds before the counting begins, to fill caches.
const WARM_UP: usize = 5_000;
/// By how many bytes the heap may grow: a thread that the runtime has started meanwhile, blocks
/// that a channel keeps in reserve.
const MAX_HEAP_GROWTH_BYTES: u64 = 32 << 10;
/// By how many bytes resident memory may grow. In a release build a leak of eight bytes per round
/// would be eight times as much.
const MAX_RSS_GROWTH_BYTES: u64 = 1 << 20;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static ALLOCATED_BYTES: AtomicU64 = AtomicU64::new(0);
static FREED_BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: passes every call on to the system's allocator; the counters are separate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        ALLOCATED_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's obligations are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        FREED_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's obligations are those of `System`.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the number of heap bytes in use.
fn in_use() -> u64 {
    let freed = FREED_BYTES.load(Ordering::Relaxed);
    ALLOCATED_BYTES.load(Ordering::Relaxed).saturating_sub(freed)
}

/// Whether a kind of round may allocate.
#[derive(Clone, Copy, PartialEq)]
enum Allocates {
    Nothing,
    /// It must free what it allocates.
    Something,
}

fn measure(name: &str, allocates: Allocates, rounds: impl Fn(usize)) {
    rounds(WARM_UP);
    let (made, used, resident) = (ALLOCATIONS.load(Ordering::Relaxed), in_use(), rss());
    rounds(ROUNDS);
    let made = ALLOCATIONS.load(Ordering::Relaxed) - made;
    let kept = in_use().saturating_sub(used);
    let grown = rss().saturating_sub(resident);
    eprintln!("{name}: {made} allocations, {kept} bytes kept, {} KiB resident", grown >> 10);
    if allocates == Allocates::Nothing {
        assert!(made < ROUNDS as u64 / 100, "{name}: {made} allocations in {ROUNDS} rounds");
    }
    assert!(
        kept < MAX_HEAP_GROWTH_BYTES,
        "{name}: {kept} bytes of heap more in use after {ROUNDS} rounds"
    );
    assert!(
        grown < MAX_RSS_GROWTH_BYTES,
        "{name}: {grown} bytes more resident after {ROUNDS} rounds"
    );
}

fn assert_no_waiters(channels: &[&Receiver<usize>]) {
    for rx in channels {
        assert_eq!(rx.waiters(), (0, 0), "a waiter is left in a channel's queue");
    }
}

/// One goroutine sends `n` values; the caller receives each by `f`, which also gets a channel
/// without senders. Most calls wait, and leave the queue of the silent channel each time.
fn beside_a_silent_channel(n: usize, f: impl Fn(&Receiver<usize>, &Receiver<usize>) -> usize) {
    let ((tx, rx), (_silent, quiet)) = (bounded(0), bounded(0));
    let sender = go(move || (0..n).for_each(|i| tx.send(i).unwrap()));
    for i in 0..n {
        assert_eq!(f(&rx, &quiet), i);
    }
    sender.join().unwrap();
    assert_no_waiters(&[&rx, &quiet]);
}

/// Two goroutines select on the same two channels, in opposite orders.
fn select_meets_select(n: usize) {
    let ((t1, r1), (t2, r2)): ((Sender<usize>, _), (Sender<usize>, _)) = (bounded(0), bounded(0));
    let receivers = [r1.clone(), r2.clone()];
    let partner = go(move || {
        for _ in 0..n {
            select! {
                recv(r2) -> v => assert!(v.is_ok()),
                recv(r1) -> v => assert!(v.is_ok()),
            }
        }
    });
    for i in 0..n {
        select! {
            send(t1, i) -> r => r.unwrap(),
            send(t2, i) -> r => r.unwrap(),
        }
    }
    partner.join().unwrap();
    assert_no_waiters(&[&receivers[0], &receivers[1]]);
}

#[test]
#[ignore = "takes long"]
fn selects_deadlines_and_timers_leave_no_memory_behind() {
    use Allocates::{Nothing, Something};
    let _dog = watchdog_for(Duration::from_secs(180));
    // With one P a single thread runs everything, so that no thread is started during the counting.
    for procs in [1, 2] {
        Runtime::builder().procs(procs).build().unwrap().run(|| {
            // The runtime's threads allocate when they start.
            trefoil::time::sleep(Duration::from_millis(200));
            measure("select! that waits", Nothing, |n| {
                beside_a_silent_channel(n, |rx, quiet| {
                    select! {
                        recv(rx) -> v => v.unwrap(),
                        recv(quiet) -> v => v.unwrap(),
                    }
                });
            });
            measure("select! with a deadline", Nothing, |n| {
                beside_a_silent_channel(n, |rx, quiet| {
                    select! {
                        recv(rx) -> v => v.unwrap(),
                        recv(quiet) -> v => v.unwrap(),
                        after(HOUR) => unreachable!(),
                    }
                });
            });
            measure("recv_timeout", Nothing, |n| {
                beside_a_silent_channel(n, |rx, _| rx.recv_timeout(HOUR).unwrap());
            });
            measure("select! with default", Nothing, |n| {
                let ((tx, rx), (_silent, quiet)) = (bounded(1), bounded(1));
                for i in 0..n {
                    let sent = select! {
                        send(tx, i) -> r => r.is_ok(),
                        recv(quiet) -> _ => unreachable!(),
                        default => false,
                    };
                    assert!(sent);
                    let got = select! {
                        recv(rx) -> v => v.ok(),
                        recv(quiet) -> _ => unreachable!(),
                        default => None,
                    };
                    assert_eq!(got, Some(i));
                }
                assert_no_waiters(&[&rx, &quiet]);
            });
            measure("select meets select", Nothing, select_meets_select);
            measure("Select", Something, |n| {
                beside_a_silent_channel(n, |rx, quiet| {
                    let nothing = never::<String>();
                    let mut select = Select::new();
                    select.recv(quiet);
                    select.recv(&nothing);
                    select.recv(rx);
                    let done = select.select();
                    assert_eq!(done.index(), 2);
                    done.recv(rx).unwrap()
                });
            });
            measure("timers that are stopped", Something, |n| {
                for _ in 0..n {
                    let timer = Timer::new(HOUR);
                    assert!(timer.stop());
                }
            });
            measure("a timer that is reset", Nothing, |n| {
                let timer = Timer::new(HOUR);
                for _ in 0..n {
                    assert!(timer.reset(HOUR));
                }
            });
            measure("a ticker that is reset", Nothing, |n| {
                let ticker = Ticker::new(HOUR);
                for _ in 0..n {
                    ticker.reset(HOUR);
                }
            });
            measure("functions that are never called", Something, |n| {
                for i in 0..n {
                    let timer = after_func(HOUR, move || println!("{i}"));
                    assert!(timer.stop());
                }
            });
            yield_now();
        });
    }
}
