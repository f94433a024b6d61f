//! The block and mutex profiles: who waited how long, and who is to blame.
//!
//! The rates belong to the process, so all tests of the program take turns with these.

use crate::common::{self, runtime, watchdog, yield_until};
use crate::pprof::{Decoded, decode};
use crate::turn;
use std::hint::black_box;
#[cfg(feature = "std")]
use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use trefoil::chan::{Receiver, bounded};
use trefoil::profile::{self, Profile};
use trefoil::time::sleep;
use trefoil::{go, labels};

const EVERY: Duration = Duration::from_nanos(1);
const WAIT: Duration = Duration::from_millis(40);

/// Returns the sums of the samples with that function: waits, and nanoseconds.
fn sums(decoded: &Decoded, function: &str) -> (u64, Duration) {
    let samples = decoded.with(function);
    let sum = |i: usize| samples.iter().map(|s| s.values[i]).sum();
    (sum(0), Duration::from_nanos(sum(1)))
}

/// Waits until a dump shows that the goroutine waits for one of these reasons.
fn until_it_waits(id: u64, reasons: &[&str]) {
    let starts: Vec<_> = reasons.iter().map(|why| format!("goroutine {id} [{why}")).collect();
    yield_until("the goroutine to wait", || {
        let text = trefoil::debug::dump();
        text.lines().any(|line| starts.iter().any(|start| line.starts_with(start)))
    });
}

fn block_profile_of(f: impl FnOnce() + Send + 'static) -> Profile {
    runtime(2).run(move || {
        profile::set_block_rate(EVERY).unwrap();
        f();
        profile::set_block_rate(Duration::ZERO).unwrap();
    });
    profile::block()
}

#[inline(never)]
fn receives_in_here(rx: &Receiver<u8>) {
    let _ = black_box(rx.recv());
}

#[test]
fn the_block_profile_has_the_time_of_each_wait_and_its_labels() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let profile = block_profile_of(|| {
        let (tx, rx) = bounded::<u8>(0);
        let receiver = labels!("who" => "receiver"; || go(move || {
            (0..3).for_each(|_| receives_in_here(&rx))
        }));
        for i in 0..3 {
            until_it_waits(receiver.id(), &["chan receive"]);
            sleep(WAIT);
            tx.send(i).unwrap();
        }
        receiver.join().unwrap();
    });
    let decoded = decode(&profile);
    let (count, time) = sums(&decoded, "receives_in_here");
    assert_eq!(count, 3, "{}", profile.text());
    assert!(time >= 3 * WAIT * 9 / 10, "{time:?}\n{}", profile.text());
    let sample = &decoded.with("receives_in_here")[0];
    let has = |key: &str, value: &str| sample.labels.contains(&(key.to_owned(), value.to_owned()));
    assert!(has("state", "chan receive") && has("who", "receiver"), "{decoded:#?}");
    let types: Vec<_> = decoded.types.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(types, ["contentions", "delay"]);
    assert_eq!(profile.lost(), 0);
    // A sleeper waits for nobody.
    let states = decoded.samples.iter().flat_map(|s| &s.labels).filter(|(key, _)| key == "state");
    assert!(states.clone().count() > 0 && states.clone().all(|(_, state)| state != "sleep"));
}

#[cfg(feature = "std")]
#[inline(never)]
fn reads_in_here(mut socket: std::os::unix::net::UnixStream) {
    let mut buffer = [0];
    black_box(socket.read_exact(&mut buffer)).unwrap();
}

#[cfg(feature = "std")]
#[test]
fn sockets_of_std_are_in_the_block_profile() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let profile = block_profile_of(|| {
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let reader = go(move || reads_in_here(theirs));
        until_it_waits(reader.id(), &["IO wait"]);
        sleep(WAIT);
        ours.write_all(&[1]).unwrap();
        reader.join().unwrap();
    });
    let (count, time) = sums(&decode(&profile), "reads_in_here");
    assert!(count >= 1 && time >= WAIT * 9 / 10, "{count} {time:?}\n{}", profile.text());
}

#[inline(never)]
fn unlocks_in_here<T>(guard: T) {
    drop(guard);
    black_box(());
}

#[inline(never)]
fn waits_in_here<T>(lock: impl FnOnce() -> T) {
    drop(black_box(lock()));
}

/// Lets a goroutine wait for a lock, and returns the mutex profile.
fn contend<L: Send + Sync + 'static>(
    lock: L,
    hold: impl Fn(&L, &mut dyn FnMut()) + Send + Sync + Copy + 'static,
) -> Profile {
    runtime(2).run(move || {
        profile::set_mutex_rate(EVERY).unwrap();
        let lock = Arc::new(lock);
        let other = lock.clone();
        hold(&lock, &mut || {
            let other = other.clone();
            let waiter = go(move || waits_in_here(|| hold(&other, &mut || ())));
            until_it_waits(waiter.id(), &["sync.Mutex.Lock", "futex wait"]);
            drop(waiter);
            sleep(WAIT);
        });
        // The waiter has ended when the lock can be taken again and no goroutine but main is left.
        yield_until("the waiter to end", || trefoil::num_goroutines() == 1);
        profile::set_mutex_rate(Duration::ZERO).unwrap();
    });
    profile::mutex()
}

#[test]
fn the_mutex_profile_blames_the_goroutine_that_unlocks() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let own = contend(trefoil::sync::Mutex::new(()), |lock, f| {
        let guard = lock.lock();
        f();
        unlocks_in_here(guard);
    });
    let (count, time) = sums(&decode(&own), "unlocks_in_here");
    assert!(count >= 1 && time >= WAIT * 9 / 10, "{count} {time:?}\n{}", own.text());
    assert_eq!(sums(&decode(&own), "waits_in_here").0, 0, "{}", own.text());
}

#[cfg(feature = "std")]
#[test]
fn locks_of_std_are_in_the_mutex_profile() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let std = contend(Mutex::new(()), |lock, f| {
        let guard = lock.lock().unwrap();
        f();
        unlocks_in_here(guard);
    });
    let (count, time) = sums(&decode(&std), "unlocks_in_here");
    assert!(count >= 1 && time >= WAIT * 9 / 10, "{count} {time:?}\n{}", std.text());
}

/// Samples of waits that are shorter than the rate stand for those that were not sampled.
#[test]
fn short_waits_are_sampled_in_proportion_to_their_length() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let rounds = 20_000;
    let (profile, waited) = runtime(1).run(move || {
        profile::set_block_rate(Duration::from_micros(100)).unwrap();
        let (tx, rx) = bounded::<u8>(0);
        let start = std::time::Instant::now();
        let receiver = go(move || (0..rounds).for_each(|_| receives_in_here(&rx)));
        (0..rounds).for_each(|_| tx.send(1).unwrap());
        receiver.join().unwrap();
        let waited = start.elapsed();
        profile::set_block_rate(Duration::ZERO).unwrap();
        (profile::block(), waited)
    });
    let (count, time) = sums(&decode(&profile), "receives_in_here");
    // Some hundred samples. Other programs may make single waits long.
    assert!(count > 0 && time <= 2 * waited, "{count}, {time:?} of {waited:?}");
    assert!(profile.text().starts_with("block profile: total "), "{}", profile.text());
}

#[test]
fn nothing_is_sampled_while_the_rate_is_zero_and_a_new_rate_begins_anew() {
    let (_turn, _watchdog) = (turn(), watchdog());
    let ping = || {
        let (tx, rx) = bounded::<u8>(0);
        let receiver = go(move || receives_in_here(&rx));
        until_it_waits(receiver.id(), &["chan receive"]);
        tx.send(1).unwrap();
        receiver.join().unwrap();
    };
    let first = block_profile_of(ping);
    assert_eq!(sums(&decode(&first), "receives_in_here").0, 1, "{}", first.text());
    runtime(2).run(ping);
    assert_eq!(profile::block().total(), first.total());
    assert_eq!(block_profile_of(|| ()).total(), 0);
}

/// The profiles are read while goroutines park, wake, and start and end in thousands.
#[test]
fn waits_of_many_goroutines_are_sampled_while_profiles_are_taken() {
    let (_turn, _watchdog) = (turn(), watchdog());
    runtime(4).run(|| {
        // Not every wait: without optimization it takes long to unwind thousands of them.
        let rate = Duration::from_millis(1);
        profile::set_block_rate(rate).unwrap();
        profile::set_mutex_rate(rate).unwrap();
        let stop = common::flag();
        let lock = Arc::new((trefoil::sync::Mutex::new(0u64), Mutex::new(0u64)));
        let workers: Vec<_> = (0..16)
            .map(|i| {
                let (stop, lock) = (stop.clone(), lock.clone());
                go(move || {
                    let _labels = labels! { "worker" => i };
                    while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                        *lock.0.lock() += 1;
                        *lock.1.lock().unwrap() += 1;
                        go(trefoil::yield_now).join().unwrap();
                    }
                })
            })
            .collect();
        let is_seen = || {
            black_box(profile::mutex().folded());
            profile::block().by_label("worker").len() > 1
        };
        yield_until("waits to be sampled", is_seen);
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        common::join_all(workers);
        profile::set_block_rate(Duration::ZERO).unwrap();
        profile::set_mutex_rate(Duration::ZERO).unwrap();
    });
}
