//! What selects, limits and timers leave behind: nothing. (Go: `test/chan/select2.go`, and what
//! became of its timers.)
//!
//! A binary of its own, with one test: its allocator counts, and nobody else allocates.

mod common;

use common::{rss, watchdog_for};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use trefoil::chan::{Receiver, Select, Sender, bounded, never};
use trefoil::time::{Ticker, Timer, after_func};
use trefoil::{Runtime, go, select, yield_now};

/// Far away: nothing here ends by its limit.
const HOUR: Duration = Duration::from_secs(3600);

/// Rounds of each kind, of which each is a select or more.
const ROUNDS: usize = if cfg!(debug_assertions) { 100_000 } else { 1_000_000 };
/// Rounds before the counting begins: caches fill.
const WARM_UP: usize = 5_000;
/// Memory from malloc that may be in use more than before, in bytes: a thread that the runtime has
/// started in the meantime, what a channel keeps in reserve.
const MAY_KEEP: u64 = 32 << 10;
/// Memory of the process that may be in use more than before, in bytes. A leak of eight bytes a
/// round would be eight times as much in a release build.
const MAY_GROW: u64 = 1 << 20;

struct Counting;

static MADE: AtomicU64 = AtomicU64::new(0);
static MADE_BYTES: AtomicU64 = AtomicU64::new(0);
static FREED_BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: all of it is the system's allocator; the counting touches nothing else.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MADE.fetch_add(1, Ordering::Relaxed);
        MADE_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        FREED_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Bytes in use.
fn in_use() -> u64 {
    let freed = FREED_BYTES.load(Ordering::Relaxed);
    MADE_BYTES.load(Ordering::Relaxed).saturating_sub(freed)
}

/// What a kind of round may allocate on its way.
#[derive(Clone, Copy, PartialEq)]
enum Allocates {
    Nothing,
    /// And frees it.
    Something,
}

fn measure(name: &str, allocates: Allocates, rounds: impl Fn(usize)) {
    rounds(WARM_UP);
    let (made, used, resident) = (MADE.load(Ordering::Relaxed), in_use(), rss());
    rounds(ROUNDS);
    let made = MADE.load(Ordering::Relaxed) - made;
    let kept = in_use().saturating_sub(used);
    let grown = rss().saturating_sub(resident);
    eprintln!("{name}: {made} allocations, {kept} bytes kept, {} KiB resident", grown >> 10);
    if allocates == Allocates::Nothing {
        assert!(made < ROUNDS as u64 / 100, "{name}: {made} allocations in {ROUNDS} rounds");
    }
    assert!(kept < MAY_KEEP, "{name}: {kept} bytes of the heap kept after {ROUNDS} rounds");
    assert!(grown < MAY_GROW, "{name}: {grown} bytes resident more after {ROUNDS} rounds");
}

fn nobody_waits(channels: &[&Receiver<usize>]) {
    for rx in channels {
        assert_eq!(rx.waiters(), (0, 0), "somebody is left in a channel's list");
    }
}

/// Two goroutines, of which one selects among a channel that the other one sends to and a silent
/// one: most of them wait, and leave the silent channel's list each time.
fn beside_a_silent_channel(n: usize, f: impl Fn(&Receiver<usize>, &Receiver<usize>) -> usize) {
    let ((tx, rx), (_silent, quiet)) = (bounded(0), bounded(0));
    let sender = go(move || (0..n).for_each(|i| tx.send(i).unwrap()));
    for i in 0..n {
        assert_eq!(f(&rx, &quiet), i);
    }
    sender.join().unwrap();
    nobody_waits(&[&rx, &quiet]);
}

/// Two selects that meet each other, on two channels in opposite orders.
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
    nobody_waits(&[&receivers[0], &receivers[1]]);
}

#[test]
fn a_million_selects_leave_nothing_behind() {
    use Allocates::{Nothing, Something};
    let _dog = watchdog_for(Duration::from_secs(180));
    // One P: the same thread does it all, and no other thread's start disturbs the counting.
    for procs in [1, 2] {
        Runtime::builder().procs(procs).build().unwrap().run(|| {
            // The runtime's threads allocate when they begin.
            trefoil::time::sleep(Duration::from_millis(200));
            measure("select! that waits", Nothing, |n| {
                beside_a_silent_channel(n, |rx, quiet| {
                    select! {
                        recv(rx) -> v => v.unwrap(),
                        recv(quiet) -> v => v.unwrap(),
                    }
                });
            });
            measure("select! with a limit", Nothing, |n| {
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
                nobody_waits(&[&rx, &quiet]);
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
