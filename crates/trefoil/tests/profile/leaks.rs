//! `profile::leaks`: goroutines that wait for ever are found, and no others.

use crate::common::{runtime, watchdog, yield_until};
use std::collections::HashMap;
use std::io::Read;
use std::time::{Duration, Instant};
use trefoil::chan::{Sender, bounded};
use trefoil::sync::Mutex;
use trefoil::time::sleep;
use trefoil::{go, profile};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[test]
fn goroutines_that_wait_for_each_other_over_channels_are_leaks() {
    let _w = watchdog();
    runtime(2).run(|| {
        for _ in 0..3 {
            let (to_a, of_a) = bounded::<u8>(0);
            let (to_b, of_b) = bounded::<u8>(0);
            go(move || to_b.send(of_a.recv().unwrap()).unwrap());
            go(move || to_a.send(of_b.recv().unwrap()).unwrap());
        }
        yield_until("six leaks", || profile::leaks().goroutines() == 6);
    });
}

/// Each goroutine waits for longer than the second after which a wait may be a leak. Some had the
/// sender on their stack, and may still have copies of its bytes there.
#[test]
fn waits_that_will_end_are_no_leaks() {
    /// A request with the way back.
    struct Request(Sender<u8>);
    static SENDERS: Mutex<Option<HashMap<u8, Sender<u8>>>> = Mutex::new(None);
    let _w = watchdog();
    runtime(2).run(|| {
        *SENDERS.lock() = Some(HashMap::new());
        let mut waiting = Vec::new();
        // The request is in a queue, in the heap.
        let (requests, queue) = bounded::<Request>(8);
        for _ in 0..4 {
            let requests = requests.clone();
            waiting.push(go(move || {
                let (reply, answer) = bounded(1);
                requests.send(Request(reply)).unwrap();
                answer.recv().unwrap()
            }));
        }
        let server = go(move || {
            sleep(ms(2500));
            queue.iter().for_each(|Request(reply)| reply.send(1).unwrap());
        });
        drop(requests);
        // The sender is in a map.
        for id in 0..4 {
            waiting.push(go(move || {
                let (tx, rx) = bounded(0);
                SENDERS.lock().as_mut().unwrap().insert(id, tx);
                rx.recv().unwrap()
            }));
        }
        // Only the receiver was ever here; the sender is in a Vec of this goroutine.
        let mut senders = Vec::new();
        for _ in 0..4 {
            let (tx, rx) = bounded(0);
            senders.push(tx);
            waiting.push(go(move || rx.recv().unwrap()));
        }
        // The sender is with a goroutine that waits for a timer, or for a socket.
        let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        let (tx, rx) = bounded(0);
        waiting.push(go(move || rx.recv().unwrap()));
        let sleeper = go(move || {
            sleep(ms(2500));
            tx.send(1).unwrap();
        });
        let (tx, rx) = bounded(0);
        waiting.push(go(move || rx.recv().unwrap()));
        let reader = go(move || {
            let _ = far.read(&mut [0]);
            tx.send(1).unwrap();
        });
        let begun = Instant::now();
        while begun.elapsed() < ms(2000) {
            let found = profile::leaks();
            assert_eq!(found.goroutines(), 0, "{}", found.text());
            sleep(ms(100));
        }
        drop(near);
        for tx in SENDERS.lock().take().unwrap().into_values().chain(senders) {
            tx.send(1).unwrap();
        }
        waiting.into_iter().for_each(|goroutine| assert_eq!(goroutine.join().unwrap(), 1));
        [server, sleeper, reader].into_iter().for_each(|goroutine| goroutine.join().unwrap());
    });
}

/// `leaks` cannot tell these from goroutines that have sent the sender away. The documentation
/// names what shows them.
#[test]
fn receivers_that_hold_the_only_sender_are_in_the_profile_of_waits_and_in_a_group() {
    let _w = watchdog();
    runtime(2).run(|| {
        for _ in 0..36 {
            go(|| {
                let (tx, rx) = bounded::<u8>(0);
                let _ = rx.recv();
                drop(tx);
            });
        }
        yield_until("36 waits", || profile::waits().goroutines() == 36);
        let groups = trefoil::debug::groups();
        assert!(groups.iter().any(|group| group.count == 36), "{groups:?}");
    });
}
