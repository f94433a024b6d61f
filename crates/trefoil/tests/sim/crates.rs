//! Unmodified crates in simulations: flume, crossbeam-channel and parking_lot wait in virtual time,
//! their schedules come from the seed, and bugs of the code that uses them are found.

use crossbeam_channel as crossbeam;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil::sim::{self, FailureKind};
use trefoil::{JoinHandle, go};

/// How many schedules of a program without a bug are tried.
const RUNS: u64 = 500;
const HOUR: Duration = Duration::from_secs(3600);
const MS: Duration = Duration::from_millis(1);

/// What a run has seen, in order.
type Seen = Vec<u64>;

/// Tries `RUNS` schedules twice. Each has to see the same both times, and they have to differ from
/// each other.
fn check_repeats(program: fn() -> Seen) {
    let explore = || {
        let all = Arc::new(std::sync::Mutex::new(Vec::new()));
        let to = all.clone();
        let run = move || {
            let seen = program();
            to.lock().unwrap().push(seen);
        };
        sim::builder().explore(RUNS, run).unwrap();
        Arc::into_inner(all).unwrap().into_inner().unwrap()
    };
    let (mut first, second): (Vec<Seen>, Vec<Seen>) = (explore(), explore());
    assert_eq!(first.len() as u64, RUNS);
    for (i, (first, second)) in first.iter().zip(&second).enumerate() {
        assert_eq!(first, second, "run {i}");
    }
    first.sort();
    first.dedup();
    assert!(first.len() > 10, "only {} different runs", first.len());
}

/// Checks that a bug is found in `max_runs` schedules, and that its seeds repeat it.
fn check_finds(max_runs: u64, kind: FailureKind, message: &str, program: fn()) {
    for base_seed in 0..3 {
        let found = sim::builder().seed(base_seed).explore(max_runs, program);
        let failure = found.expect_err("the program has a bug");
        assert_eq!(failure.kind, kind, "{failure}");
        assert!(failure.message.contains(message), "{failure}");
        assert!(failure.is_repeatable, "{failure}");
        let shrunk = failure.shrunk.clone().expect("a shorter schedule");
        for seed in [&failure.seed, &shrunk] {
            for _ in 0..5 {
                let again = sim::builder().replay(seed, program).expect_err("it fails again");
                assert_eq!((again.kind, &again.seed), (kind, seed), "{again}");
                assert!(again.is_repeatable, "{again}");
            }
        }
    }
}

/// Fails if what `f` does takes another simulated time than `expected`, or much real time.
fn takes(expected: Duration, f: fn()) {
    let real = Instant::now();
    sim::run(move || {
        let begin = Instant::now();
        f();
        assert_eq!(begin.elapsed(), expected);
    });
    assert!(real.elapsed() < HOUR / 60);
}

fn join_all<T>(handles: impl IntoIterator<Item = JoinHandle<T>>) -> Vec<T> {
    handles.into_iter().map(|handle| handle.join().unwrap()).collect()
}

/// Three producers send to two consumers over a channel of another crate. Returns what was
/// received, in order. `for_each` calls a function for each value until the channel is closed.
fn produce_and_consume<S, R>(
    (tx, rx): (S, R),
    send: fn(&S, u64),
    for_each: fn(&R, &mut dyn FnMut(u64)),
) -> Seen
where
    S: Clone + Send + 'static,
    R: Clone + Send + 'static,
{
    let producers = (0..3u64).map(|i| {
        let tx = tx.clone();
        go(move || (0..4).for_each(|k| send(&tx, 10 * i + k)))
    });
    let producers: Vec<_> = producers.collect();
    drop(tx);
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let consumers = (0..2).map(|_| {
        let (rx, seen) = (rx.clone(), seen.clone());
        go(move || for_each(&rx, &mut |value| seen.lock().unwrap().push(value)))
    });
    let consumers: Vec<_> = consumers.collect();
    join_all(producers.into_iter().chain(consumers));
    let seen = Arc::into_inner(seen).unwrap().into_inner().unwrap();
    assert_eq!(seen.iter().sum::<u64>(), 4 * (10 + 20) + 3 * (1 + 2 + 3));
    seen
}

// flume

#[test]
fn flume_producers_and_consumers_lose_nothing_in_any_schedule() {
    check_repeats(|| {
        produce_and_consume(
            flume::bounded(2),
            |tx, value| tx.send(value).unwrap(),
            |rx, f| rx.iter().for_each(f),
        )
    });
}

#[test]
fn flume_hands_over_without_a_buffer_in_any_schedule() {
    fn program() -> Seen {
        let (tx, rx) = flume::bounded(0);
        let senders: Vec<_> = (0..4u64)
            .map(|i| {
                let tx = tx.clone();
                go(move || {
                    let begin = Instant::now();
                    tx.send(i).unwrap();
                    begin.elapsed().as_millis() as u64
                })
            })
            .collect();
        let mut seen = Vec::new();
        for _ in 0..4 {
            std::thread::sleep(MS);
            seen.push(rx.recv().unwrap());
        }
        let waits = join_all(senders);
        for (i, &sender) in seen.iter().enumerate() {
            assert_eq!(waits[sender as usize], i as u64 + 1, "the sender of message {i}");
        }
        seen
    }
    check_repeats(program);
}

#[test]
fn flume_waits_in_virtual_time() {
    // `recv_timeout` waits again if the time is exactly its deadline; such a wait takes a
    // nanosecond.
    takes(2 * HOUR + Duration::from_nanos(1), || {
        let (_tx, rx) = flume::bounded::<()>(1);
        assert_eq!(rx.recv_timeout(HOUR), Err(flume::RecvTimeoutError::Timeout));
        let (_tx2, rx2) = flume::bounded::<()>(0);
        let selector = flume::Selector::new().recv(&rx, |_| ()).recv(&rx2, |_| ());
        assert!(selector.wait_timeout(HOUR).is_err());
    });
}

#[test]
fn a_flume_consumer_that_stops_at_an_empty_channel_is_found() {
    fn program() {
        let (tx, rx) = flume::bounded(4);
        let producer = go(move || {
            for i in 0..3 {
                tx.send((i, Instant::now())).unwrap();
            }
        });
        let (_, first) = rx.recv().unwrap();
        let mut received = 1;
        // An empty channel need not be at its end.
        while let Ok((_, sent)) = rx.try_recv() {
            assert!(sent >= first);
            received += 1;
        }
        producer.join().unwrap();
        assert_eq!(received, 3, "a message was left");
    }
    check_finds(200, FailureKind::Panic, "a message was left", program);
}

// crossbeam-channel

#[test]
fn crossbeam_producers_and_consumers_lose_nothing_in_any_schedule() {
    check_repeats(|| {
        produce_and_consume(
            crossbeam::bounded(2),
            |tx, value| tx.send(value).unwrap(),
            |rx, f| rx.iter().for_each(f),
        )
    });
}

#[test]
fn crossbeam_hands_over_and_selects_in_any_schedule() {
    fn program() -> Seen {
        let channels: [_; 2] = std::array::from_fn(|_| crossbeam::bounded::<u64>(0));
        let senders: Vec<_> = (0..6u64)
            .map(|i| {
                let tx = channels[i as usize % 2].0.clone();
                go(move || tx.send(i).unwrap())
            })
            .collect();
        let [(_, even), (_, odd)] = &channels;
        let mut seen = Vec::new();
        while seen.len() < 6 {
            crossbeam::select! {
                recv(even) -> value => seen.push(value.unwrap()),
                recv(odd) -> value => seen.push(value.unwrap()),
                default(HOUR) => panic!("no sender came"),
            }
        }
        join_all(senders);
        let mut sorted = seen.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, [0, 1, 2, 3, 4, 5]);
        seen
    }
    check_repeats(program);
}

#[test]
fn crossbeam_waits_in_virtual_time() {
    takes(3 * HOUR, || {
        let (_tx, rx) = crossbeam::bounded::<()>(0);
        assert_eq!(rx.recv_timeout(HOUR), Err(crossbeam::RecvTimeoutError::Timeout));
        crossbeam::select! {
            recv(rx) -> _ => unreachable!(),
            default(HOUR) => {}
        }
        let begin = Instant::now();
        assert_eq!(crossbeam::after(HOUR).recv().unwrap() - begin, HOUR);
    });
}

#[test]
fn a_crossbeam_worker_that_leaves_jobs_when_it_quits_is_found() {
    fn program() {
        let (tx, jobs) = crossbeam::bounded(4);
        let (quit_tx, quit) = crossbeam::bounded::<()>(0);
        let worker = go(move || {
            let mut done = 0;
            loop {
                // Both may be ready: then one of them is taken at random.
                crossbeam::select! {
                    recv(jobs) -> job => {
                        let _: Instant = job.unwrap();
                        done += 1;
                    }
                    recv(quit) -> _ => return done,
                }
            }
        });
        for _ in 0..3 {
            tx.send(Instant::now()).unwrap();
        }
        drop(quit_tx);
        assert_eq!(worker.join().unwrap(), 3, "jobs were left");
        drop(tx);
    }
    check_finds(200, FailureKind::Panic, "jobs were left", program);
}

// parking_lot

/// A buffer of one value. All callers wait for one condition variable.
#[derive(Default)]
struct Cell {
    value: parking_lot::Mutex<VecDeque<u64>>,
    changed: parking_lot::Condvar,
}

impl Cell {
    /// Calls `f` until it returns a value, and tells others that something has changed.
    fn change<T>(
        &self,
        notify: fn(&parking_lot::Condvar),
        mut f: impl FnMut(&mut VecDeque<u64>) -> Option<T>,
    ) -> T {
        let mut value = self.value.lock();
        loop {
            if let Some(result) = f(&mut value) {
                notify(&self.changed);
                return result;
            }
            self.changed.wait(&mut value);
        }
    }

    fn put(&self, notify: fn(&parking_lot::Condvar), new: u64) {
        self.change(notify, |value| value.is_empty().then(|| value.push_back(new)))
    }

    fn take(&self, notify: fn(&parking_lot::Condvar)) -> u64 {
        self.change(notify, VecDeque::pop_front)
    }
}

/// Three producers and three consumers share a [`Cell`]. Returns what was taken, in order.
fn share_cell(notify: fn(&parking_lot::Condvar)) -> Seen {
    let cell = Arc::new(Cell::default());
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let mut handles = Vec::new();
    for i in 0..3u64 {
        let (to, from, seen) = (cell.clone(), cell.clone(), seen.clone());
        handles.push(go(move || (0..3).for_each(|k| to.put(notify, 10 * i + k))));
        handles.push(go(move || {
            for _ in 0..3 {
                let value = from.take(notify);
                seen.lock().push(value);
            }
        }));
    }
    join_all(handles);
    Arc::into_inner(seen).unwrap().into_inner()
}

/// Has parking_lot make its table large enough for all goroutines of these tests, also for those
/// that are left by runs that fail. It reads the clock whenever the table grows, which would make a
/// run differ from the next.
fn grow_table() {
    const GOROUTINES: usize = 10_000;
    let wait = Arc::new((parking_lot::Mutex::new(0), parking_lot::Condvar::new()));
    trefoil::run(move || {
        let handles: Vec<_> = (0..GOROUTINES)
            .map(|_| {
                let wait = wait.clone();
                go(move || {
                    let (waiting, changed) = &*wait;
                    let mut waiting = waiting.lock();
                    *waiting += 1;
                    if *waiting == GOROUTINES {
                        changed.notify_all();
                    }
                    changed.wait_while(&mut waiting, |waiting| *waiting < GOROUTINES);
                })
            })
            .collect();
        join_all(handles);
    });
}

#[test]
fn parking_lot_mutex_and_condvar_lose_nothing_in_any_schedule() {
    fn program() -> Seen {
        let notify_all = |changed: &parking_lot::Condvar| _ = changed.notify_all();
        let seen = share_cell(notify_all);
        assert_eq!(seen.iter().sum::<u64>(), 3 * (10 + 20) + 3 * (1 + 2));
        seen
    }
    check_repeats(program);
}

#[test]
fn a_parking_lot_condvar_that_wakes_the_wrong_waiter_is_found() {
    fn program() {
        // A producer may wake a producer, and then all wait.
        let notify_one = |changed: &parking_lot::Condvar| _ = changed.notify_one();
        share_cell(notify_one);
    }
    grow_table();
    check_finds(500, FailureKind::Deadlock, "futex wait", program);
}

#[test]
fn parking_lot_waits_in_virtual_time() {
    takes(2 * HOUR, || {
        let (mutex, changed) = (parking_lot::Mutex::new(()), parking_lot::Condvar::new());
        let mut guard = mutex.lock();
        assert!(changed.wait_for(&mut guard, HOUR).timed_out());
        trefoil::scope(|s| {
            s.go(|| assert!(mutex.try_lock_for(HOUR).is_none()));
            std::thread::sleep(HOUR);
        });
    });
}

#[test]
fn a_value_that_is_loaded_twice_behind_a_parking_lot_lock_is_found() {
    type Cache = parking_lot::RwLock<HashMap<u32, Instant>>;
    fn load(cache: &Cache, key: u32) {
        if cache.read().contains_key(&key) {
            return;
        }
        let now = Instant::now();
        // Another caller may have loaded it since.
        let earlier = cache.write().insert(key, now);
        assert!(earlier.is_none(), "{key} was loaded twice");
    }
    fn program() {
        let cache = Arc::new(Cache::default());
        let callers: Vec<_> = (0..2)
            .map(|_| {
                let cache = cache.clone();
                go(move || (0..3).for_each(|key| load(&cache, key)))
            })
            .collect();
        join_all(callers);
    }
    check_finds(200, FailureKind::Panic, "was loaded twice", program);
}
