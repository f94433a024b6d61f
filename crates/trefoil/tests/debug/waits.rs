//! The wait-for graph: what dumps say about waits, certain and probable deadlocks, the report that
//! comes by itself, and groups.

use crate::common::{self, child_test, runtime, watchdog, watchdog_for, yield_until};
use std::future::Future as _;
use std::io::Read as _;
use std::pin::pin;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};
use trefoil::chan::bounded;
use trefoil::debug::{self, Deadlock};
use trefoil::sync::{Condvar, Mutex, MutexExt as _, Once, OnceLock, RwLock};
use trefoil::time::sleep;
use trefoil::{Builder, JoinHandle, Runtime, go, scope, task};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Runs `f` on a runtime of its own, with a watchdog. Goroutines that are stuck at the end are left
/// behind.
fn on_own_runtime(f: impl FnOnce() + Send) {
    let _w = watchdog();
    runtime(2).run(f);
}

fn named(name: &str, f: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    Builder::new().name(name).go(f).unwrap()
}

/// Waits for a deadlock.
fn deadlock() -> Deadlock {
    let mut found = None;
    yield_until("a deadlock", || {
        found = debug::deadlocks().pop();
        found.is_some()
    });
    found.unwrap()
}

/// Waits for a deadlock of these goroutines, which is certain.
fn certain_deadlock(members: &[&str]) -> Deadlock {
    let deadlock = deadlock();
    assert!(deadlock.certain, "{deadlock}");
    assert_eq!(names(&deadlock), members);
    deadlock
}

/// Waits for a deadlock of these goroutines, which is probable.
fn probable_deadlock(members: &[&str]) -> Deadlock {
    let deadlock = deadlock();
    assert!(!deadlock.certain, "{deadlock}");
    assert_eq!(names(&deadlock), members);
    deadlock
}

/// Fails unless the text of the deadlock contains all these parts.
fn assert_says(deadlock: &Deadlock, parts: &[&str]) {
    let text = deadlock.to_string();
    parts.iter().for_each(|part| assert!(text.contains(part), "{part}: {text}"));
}

fn names(deadlock: &Deadlock) -> Vec<String> {
    let mut names: Vec<_> = deadlock
        .members
        .iter()
        .map(|member| member.goroutine.who.name.clone().unwrap_or_default())
        .collect();
    names.sort();
    names
}

/// Where goroutines wait until all have come.
struct YieldBarrier {
    size: u64,
    come: AtomicU64,
}

impl YieldBarrier {
    const fn of(size: u64) -> YieldBarrier {
        YieldBarrier { size, come: AtomicU64::new(0) }
    }

    fn come(&self) {
        self.come.fetch_add(1, Ordering::SeqCst);
    }

    fn is_complete(&self) -> bool {
        self.come.load(Ordering::SeqCst) == self.size
    }

    /// Comes, and waits for the others.
    fn meet(&self) {
        self.come();
        yield_until("the others", || self.is_complete());
    }
}

/// Starts goroutines that lock a mutex each, meet, and then lock that of the next one.
fn lock_in_a_circle(count: usize) {
    let mutexes: Arc<Vec<Mutex<()>>> = Arc::new((0..count).map(|_| Mutex::new(())).collect());
    let locked = Arc::new(YieldBarrier::of(count as u64));
    for i in 0..count {
        let (mutexes, locked) = (mutexes.clone(), locked.clone());
        named(&format!("circle {i}"), move || {
            let _own = mutexes[i].lock();
            locked.meet();
            waits_in_a_circle(&mutexes[(i + 1) % count]);
        });
    }
}

#[inline(never)]
fn waits_in_a_circle(mutex: &Mutex<()>) {
    drop(mutex.lock());
}

#[test]
fn three_mutexes_in_a_circle_are_certain_while_others_run() {
    on_own_runtime(|| {
        let stop = Arc::new(AtomicBool::new(false));
        let stops = stop.clone();
        let busy = go(move || {
            while !stops.load(Ordering::Relaxed) {
                trefoil::yield_now();
            }
        });
        lock_in_a_circle(3);
        let deadlock = certain_deadlock(&["circle 0", "circle 1", "circle 2"]);
        for (i, member) in deadlock.members.iter().enumerate() {
            let waits_for = member.goroutine.waits_for.as_ref().expect("a wait");
            let next = &deadlock.members[(i + 1) % 3].goroutine;
            assert_eq!((waits_for.what, &waits_for.holders[0]), ("Mutex", &next.who));
            let place = member.waits_at.as_ref().expect("a place");
            assert!(place.file.ends_with("tests/debug/waits.rs"), "{deadlock}");
            assert!(place.function.contains("waits_in_a_circle"), "{deadlock}");
        }
        let text = deadlock.to_string();
        assert!(
            text.starts_with("deadlock (certain): 3 goroutines wait for each other\n"),
            "{text}"
        );
        // A dump begins with it.
        let dump = debug::dump();
        assert!(dump.starts_with("deadlock (certain): 3 goroutines"), "{dump}");
        stop.store(true, Ordering::Relaxed);
        busy.join().unwrap();
    });
}

#[test]
fn a_goroutine_that_locks_twice_waits_for_itself() {
    on_own_runtime(|| {
        named("twice", || {
            let m = Mutex::new(());
            let _first = m.lock();
            drop(m.lock());
        });
        let deadlock = certain_deadlock(&["twice"]);
        assert_says(&deadlock, &["a goroutine waits for itself"]);
    });
}

#[test]
fn writers_and_a_reader_in_a_circle_are_certain() {
    static A: RwLock<()> = RwLock::new(());
    static B: RwLock<()> = RwLock::new(());
    static LOCKED: YieldBarrier = YieldBarrier::of(2);
    on_own_runtime(|| {
        named("reads b", move || {
            let _a = A.write();
            LOCKED.meet();
            drop(B.read());
        });
        named("writes a", move || {
            let _b = B.write();
            LOCKED.meet();
            drop(A.write());
        });
        let deadlock = certain_deadlock(&["reads b", "writes a"]);
        assert_says(&deadlock, &["waits for RwLock (read) 0x", "waits for RwLock (write) 0x"]);
    });
}

#[test]
fn initializers_that_need_each_other_are_certain() {
    static A: Once = Once::new();
    static B: OnceLock<()> = OnceLock::new();
    static BEGUN: YieldBarrier = YieldBarrier::of(2);
    on_own_runtime(|| {
        named("a", move || {
            A.call_once(|| {
                BEGUN.meet();
                B.get_or_init(|| ());
            });
        });
        named("b", move || {
            B.get_or_init(|| {
                BEGUN.meet();
                A.call_once(|| ());
            });
        });
        let deadlock = certain_deadlock(&["a", "b"]);
        assert_says(&deadlock, &["waits for Once 0x"]);
    });
}

#[test]
fn goroutines_that_join_each_other_are_certain() {
    on_own_runtime(|| {
        let (to_a, of_b) = bounded::<JoinHandle<()>>(1);
        let (to_b, of_a) = bounded::<JoinHandle<()>>(1);
        let a = named("a", move || of_b.recv().unwrap().join().unwrap());
        let b = named("b", move || of_a.recv().unwrap().join().unwrap());
        let (a_id, b_id) = (a.id(), b.id());
        to_a.send(b).unwrap();
        to_b.send(a).unwrap();
        let deadlock = certain_deadlock(&["a", "b"]);
        assert_says(&deadlock, &[&format!("goroutine {a_id} \"a\" joins goroutine {b_id} \"b\"")]);
    });
}

#[test]
fn a_scope_whose_goroutine_needs_a_lock_of_its_owner_is_certain() {
    on_own_runtime(|| {
        named("owner", || {
            let m = Mutex::new(());
            let _guard = m.lock();
            scope(|s| {
                s.go(|| drop(m.lock()));
                s.go(|| sleep(Duration::MAX));
            });
        });
        let deadlock = deadlock();
        assert!(deadlock.certain && deadlock.members.len() == 2, "{deadlock}");
        assert_says(&deadlock, &["\"owner\" waits for 2 goroutines of its scope: goroutine "]);
    });
}

/// Returns how many goroutines of the runtime are in this state.
fn count_in_state(state: &str) -> usize {
    debug::goroutines().filter(|g| g.state == state).count()
}

/// Every goroutine of the scope that needs the lock makes a cycle of its own.
#[test]
fn a_deadlock_of_a_scope_with_many_goroutines_is_listed_once_and_certain() {
    const COUNT: usize = 50;
    on_own_runtime(|| {
        named("owner", || {
            let m = Mutex::new(());
            let _guard = m.lock();
            scope(|s| {
                for i in 0..COUNT {
                    let m = &m;
                    s.go(move || match i % 2 {
                        // Not certain, by itself.
                        0 => drop(m.try_lock_for(Duration::from_secs(3600))),
                        _ => drop(m.lock()),
                    });
                }
            });
        });
        yield_until("all to wait", || count_in_state("sync.Mutex.Lock") == COUNT);
        yield_until("the owner to wait", || !debug::deadlocks().is_empty());
        let found = debug::deadlocks();
        assert_eq!(found.len(), 1, "{}", found[1]);
        assert!(found[0].certain, "{}", found[0]);
        assert!(names(&found[0]).contains(&"owner".to_string()), "{}", found[0]);
        let dump = debug::dump();
        assert_eq!(dump.matches("deadlock (").count(), 1, "{dump}");
    });
}

/// `notify_all` moves waiters to the queue of a mutex that is locked.
#[test]
fn a_waiter_that_was_moved_to_the_queue_of_a_mutex_may_be_a_member() {
    static M: Mutex<()> = Mutex::new(());
    static CHANGED: Condvar = Condvar::new();
    on_own_runtime(|| {
        let wait = || CHANGED.wait(&mut M.lock());
        let waiters = [named("waiter 0", wait), named("waiter 1", wait)];
        yield_until("both to wait", || count_in_state("sync.Cond.Wait") == 2);
        assert!(debug::goroutines().all(|g| g.waits_for.is_none()));
        named("notifier", move || {
            let _guard = M.lock();
            CHANGED.notify_all();
            waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        });
        let deadlock = certain_deadlock(&["notifier", "waiter 0"]);
        assert_says(&deadlock, &["\"waiter 0\" waits for Mutex 0x"]);
        let dump = debug::dump();
        assert!(dump.contains("[sync.Cond.Wait]:\n\twaits for Mutex 0x"), "{dump}");
    });
}

#[test]
// The guard may be held across an await: it is `Send`, and waiters park.
#[allow(clippy::await_holding_lock)]
fn a_task_that_blocks_in_its_poll_may_be_a_member() {
    static A: Mutex<()> = Mutex::new(());
    static B: Mutex<()> = Mutex::new(());
    static LOCKED: YieldBarrier = YieldBarrier::of(2);
    on_own_runtime(|| {
        let waiting = task::spawn(async move {
            let _a = A.lock_async().await;
            LOCKED.come();
            while !LOCKED.is_complete() {
                task::yield_now().await;
            }
            drop(B.lock()); // blocks its carrier
        });
        named("goroutine", move || {
            let _b = B.lock();
            LOCKED.meet();
            drop(A.lock());
        });
        let deadlock = deadlock();
        assert!(deadlock.certain, "{deadlock}");
        let held = format!("held by task {}", waiting.id());
        assert_says(&deadlock, &[&held, "\"goroutine\""]);
    });
}

#[test]
fn a_wait_with_a_deadline_is_not_certain() {
    on_own_runtime(|| {
        let m = Arc::new(Mutex::new(()));
        named("limited", move || {
            let _first = m.lock();
            assert!(m.try_lock_for(Duration::from_secs(3600)).is_none());
        });
        let deadlock = probable_deadlock(&["limited"]);
        assert_says(&deadlock, &["with a deadline"]);
    });
}

#[test]
fn channels_in_a_circle_are_probable() {
    on_own_runtime(|| {
        let (to_a, of_a) = bounded::<u8>(0);
        let (to_b, of_b) = bounded::<u8>(0);
        named("a", move || {
            let value = of_a.recv().unwrap();
            to_b.send(value).unwrap();
        });
        named("b", move || {
            let value = of_b.recv().unwrap();
            to_a.send(value).unwrap();
        });
        let deadlock = probable_deadlock(&["a", "b"]);
        let text = deadlock.to_string();
        assert!(
            text.starts_with("deadlock (probable): 2 goroutines wait for each other"),
            "{text}"
        );
        assert!(text.contains("waits for channel (receive) 0x"), "{text}");
        assert!(text.contains("tests/debug/waits.rs"), "{text}");
    });
}

#[test]
fn a_channel_whose_sender_may_still_send_is_no_deadlock() {
    on_own_runtime(|| {
        let (tx, rx) = bounded::<u8>(0);
        let receiver = named("receiver", move || assert_eq!(rx.recv(), Ok(1)));
        // It holds the sender, and sleeps.
        let sender = named("sender", move || {
            sleep(ms(1600));
            tx.send(1).unwrap();
        });
        // Channels are suspects after a second.
        let begun = Instant::now();
        while begun.elapsed() < ms(1400) {
            let found = debug::deadlocks();
            assert!(found.is_empty(), "{}", found[0]);
            sleep(ms(100));
        }
        receiver.join().unwrap();
        sender.join().unwrap();
    });
}

#[test]
fn a_circle_over_a_lock_and_a_channel_is_probable() {
    static M: Mutex<()> = Mutex::new(());
    on_own_runtime(|| {
        let (tx, rx) = bounded::<()>(0);
        named("locks", move || {
            let _guard = M.lock();
            rx.recv().unwrap();
        });
        yield_until("the lock", || M.is_locked());
        named("sends", move || {
            drop(M.lock());
            tx.send(()).unwrap();
        });
        probable_deadlock(&["locks", "sends"]);
    });
}

#[test]
fn std_mutexes_in_a_circle_are_probable() {
    static A: std::sync::Mutex<()> = std::sync::Mutex::new(());
    static B: std::sync::Mutex<()> = std::sync::Mutex::new(());
    static LOCKED: YieldBarrier = YieldBarrier::of(2);
    on_own_runtime(|| {
        named("a", move || {
            let guard = std::hint::black_box(A.lock().unwrap());
            LOCKED.meet();
            drop(B.lock().unwrap());
            drop(guard);
        });
        named("b", move || {
            let guard = std::hint::black_box(B.lock().unwrap());
            LOCKED.meet();
            drop(A.lock().unwrap());
            drop(guard);
        });
        let deadlock = probable_deadlock(&["a", "b"]);
        assert_says(&deadlock, &["waits for std lock 0x", "probably held by goroutine"]);
    });
}

#[test]
fn a_reader_that_reads_again_behind_a_writer_is_probable() {
    static RW: RwLock<()> = RwLock::new(());
    on_own_runtime(|| {
        named("reader", || {
            let first = std::hint::black_box(RW.read());
            yield_until("the writer", || RW.try_read().is_none());
            drop(RW.read());
            drop(first);
        });
        yield_until("the reader", || RW.is_locked());
        named("writer", || drop(RW.write()));
        probable_deadlock(&["reader", "writer"]);
    });
}

#[test]
fn pthread_mutexes_in_a_circle_are_probable_and_dumps_name_the_owner() {
    struct PthreadMutex(std::cell::UnsafeCell<libc::pthread_mutex_t>);
    // SAFETY: a mutex is made to be shared.
    unsafe impl Sync for PthreadMutex {}
    static MUTEXES: [PthreadMutex; 2] =
        [const { PthreadMutex(std::cell::UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER)) }; 2];
    static LOCKED: YieldBarrier = YieldBarrier::of(2);
    // SAFETY: mutexes in a static.
    let lock = |i: usize| unsafe { libc::pthread_mutex_lock(MUTEXES[i].0.get()) };
    on_own_runtime(|| {
        for i in 0..2 {
            named(&format!("c {i}"), move || {
                lock(i);
                LOCKED.meet();
                lock(1 - i);
            });
        }
        probable_deadlock(&["c 0", "c 1"]);
        let dump = debug::dump();
        assert!(dump.contains("[pthread mutex]:\n\twaits for pthread mutex 0x"), "{dump}");
    });
}

/// The future of another executor may go on in another goroutine, and unlock there.
#[test]
fn the_holder_of_a_guard_in_a_future_of_another_executor_is_unknown() {
    static M: Mutex<()> = Mutex::new(());
    on_own_runtime(|| {
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(guard) = pin!(M.lock_async()).poll(&mut context) else {
            panic!("the mutex is free");
        };
        let waiter = go(|| drop(M.lock()));
        let mut waits_for = None;
        yield_until("the waiter", || {
            let found = debug::goroutines().find(|g| g.who.id == waiter.id());
            waits_for = found.and_then(|g| g.waits_for);
            waits_for.is_some()
        });
        let waits_for = waits_for.unwrap();
        assert_eq!((waits_for.what, waits_for.holders.len()), ("Mutex", 0));
        assert!(waits_for.to_string().ends_with("(holder unknown)"), "{waits_for}");
        drop(guard);
        waiter.join().unwrap();
    });
}

/// Checks that a goroutine that locks twice is not certain to wait for itself, after a guard was
/// sent.
fn check_is_only_probable(lock_twice: fn()) {
    named("twice", lock_twice);
    probable_deadlock(&["twice"]);
}

/// In a child, because it changes what the process calls certain.
#[test]
fn a_lock_whose_guard_was_sent_is_not_certain() {
    child_test!();
    static M: Mutex<()> = Mutex::new(());
    on_own_runtime(|| {
        // The goroutine that locks waits for the one that unlocks.
        let guard = M.lock();
        let unlocker = go(move || {
            yield_until("a waiter", || !debug::deadlocks().is_empty());
            drop(guard);
        });
        drop(M.lock());
        unlocker.join().unwrap();
        check_is_only_probable(|| {
            let _first = M.lock();
            drop(M.lock());
        });
    });
}

/// As above. A writer that unlocks wakes readers without its mutex.
#[test]
fn a_write_guard_that_was_sent_is_noticed_if_only_readers_wait() {
    child_test!();
    static RW: RwLock<()> = RwLock::new(());
    on_own_runtime(|| {
        let guard = RW.write();
        let unlocker = go(move || {
            yield_until("a reader", || !debug::deadlocks().is_empty());
            drop(guard);
        });
        drop(RW.read());
        unlocker.join().unwrap();
        check_is_only_probable(|| {
            let _first = RW.write();
            drop(RW.write());
        });
    });
}

/// As above. A wait on a condition variable unlocks, too.
#[test]
fn a_guard_that_was_sent_is_noticed_if_a_wait_on_a_condvar_unlocks_it() {
    child_test!();
    static M: Mutex<()> = Mutex::new(());
    static CHANGED: Condvar = Condvar::new();
    on_own_runtime(|| {
        let mut guard = M.lock();
        let unlocker = go(move || {
            yield_until("a waiter", || !debug::deadlocks().is_empty());
            CHANGED.wait_for(&mut guard, ms(1));
        });
        drop(M.lock());
        unlocker.join().unwrap();
        check_is_only_probable(|| {
            let _first = M.lock();
            drop(M.lock());
        });
    });
}

#[test]
fn a_dump_says_what_goroutines_wait_for() {
    static M: Mutex<()> = Mutex::new(());
    static RW: RwLock<()> = RwLock::new(());
    on_own_runtime(|| {
        let release = Arc::new(AtomicBool::new(false));
        let released = release.clone();
        let holder = named("holder", move || {
            let _guards = (M.lock(), RW.read());
            yield_until("the end", || released.load(Ordering::SeqCst));
        });
        yield_until("the lock", || M.is_locked() && RW.is_locked());
        let waiter = named("waiter", || drop(M.lock()));
        let writer = named("writer", || drop(RW.write()));
        let (holder_id, waiter_id) = (holder.id(), waiter.id());
        let joiner = named("joiner", move || waiter.join().unwrap());
        let mut text = String::new();
        yield_until("the waits", || {
            text = debug::dump();
            let lines = ["\twaits for Mutex 0x", "\twaits for readers of RwLock 0x", "\tjoins "];
            lines.iter().all(|line| text.contains(line))
        });
        assert!(text.starts_with("goroutine 1 \"main\" [running]:"), "{text}");
        let expected = format!("held by goroutine {holder_id} \"holder\", for ");
        assert!(text.contains("[sync.Mutex.Lock]:\n\twaits for Mutex 0x"), "{text}");
        assert!(text.contains(&expected), "{text}");
        assert!(
            text.contains(&format!("\tjoins goroutine {waiter_id} \"waiter\", for ")),
            "{text}"
        );
        release.store(true, Ordering::SeqCst);
        for handle in [holder, writer, joiner] {
            handle.join().unwrap();
        }
    });
}

#[test]
fn goroutines_lists_states_names_and_origins() {
    on_own_runtime(|| {
        let sleeper = named("sleeper", || sleep(Duration::MAX));
        let waiting =
            task::Builder::new().name("waiting").spawn(std::future::pending::<()>()).unwrap();
        let line = line!() - 1;
        let find = |id| debug::goroutines().find(|g| g.who.id == id).expect("alive");
        yield_until("both to wait", || {
            find(sleeper.id()).state == "sleep" && find(waiting.id()).state == "future"
        });
        let main = debug::goroutines().next().unwrap();
        assert_eq!((main.who.id, main.state, main.created_by), (1, "running", None));
        let found = find(sleeper.id());
        assert_eq!(found.who.to_string(), format!("goroutine {} \"sleeper\"", sleeper.id()));
        assert_eq!(found.created_by, Some(1));
        assert!(found.waited.is_some());
        let found = find(waiting.id());
        assert_eq!(found.who.to_string(), format!("task {} \"waiting\"", waiting.id()));
        assert_eq!(found.created_at.line(), line);
        assert_eq!(debug::goroutines().count(), 3);
        sleep(ms(300));
        assert!(find(sleeper.id()).waited.unwrap() >= ms(200));
    });
}

/// Prints the CPU time of [`debug::groups`]: `cargo test --release --test debug -- --ignored
/// --nocapture million`.
#[test]
#[ignore = "needs 10 GB of memory"]
fn a_million_goroutines_are_grouped() {
    let _w = watchdog_for(Duration::from_secs(600));
    runtime(2).run(|| {
        const COUNT: usize = 1_000_000;
        for i in 0..COUNT {
            go(move || if i % 3 == 0 { receives_here() } else { sleeps_here() });
        }
        yield_until("all to wait", || debug::groups().len() == 3);
        for _ in 0..5 {
            let before = common::cpu_time();
            let groups = debug::groups();
            let cpu = common::cpu_time() - before;
            assert_eq!(groups.iter().map(|group| group.count).sum::<usize>(), COUNT + 1);
            println!("groups: {cpu:?}");
        }
        let before = common::cpu_time();
        assert!(debug::deadlocks().is_empty());
        println!("deadlocks: {:?}", common::cpu_time() - before);
        let before = common::cpu_time();
        println!("goroutines: {} {:?}", debug::goroutines().count(), common::cpu_time() - before);
    });
}

#[inline(never)]
fn sleeps_here() {
    sleep(Duration::MAX);
}

#[inline(never)]
fn receives_here() {
    let (_tx, rx) = bounded::<()>(0);
    let _ = rx.recv();
}

#[test]
fn groups_are_by_state_and_place() {
    on_own_runtime(|| {
        for i in 0..300 {
            go(move || if i % 3 == 0 { receives_here() } else { sleeps_here() });
        }
        let mut groups = Vec::new();
        yield_until("all to wait", || {
            groups = debug::groups();
            groups.iter().all(|group| group.state != "runnable") && groups.len() == 3
        });
        let text: Vec<_> = groups.iter().map(ToString::to_string).collect();
        assert_eq!((groups[0].count, groups[0].state), (200, "sleep"), "{text:?}");
        assert_eq!((groups[1].count, groups[1].state), (100, "chan receive"), "{text:?}");
        assert_eq!((groups[2].count, groups[2].state), (1, "running"), "{text:?}");
        let function = |i: usize| groups[i].waits_at.as_ref().unwrap().function.clone();
        assert!(function(0).contains("sleeps_here"), "{text:?}");
        assert!(function(1).contains("receives_here"), "{text:?}");
        assert_eq!(groups[0].created_at, groups[1].created_at);
        assert_eq!(groups[0].examples.len(), 5);
    });
}

/// What the child of the two tests below does: a deadlock of three goroutines, while others run and
/// contend for a lock, so that the runtime checks again and again.
fn circle_beside_others() {
    on_own_runtime(|| {
        lock_in_a_circle(3);
        let contended = Arc::new(Mutex::new(()));
        for _ in 0..2 {
            let contended = contended.clone();
            go(move || {
                loop {
                    let _guard = contended.lock();
                    sleep(ms(5));
                }
            });
        }
        sleep(common::TOO_LONG / 2);
    });
}

/// Reads what a child prints until `done` returns true for it, and for `more` after that.
fn stderr_of(child: &common::Child, done: impl Fn(&str) -> bool, more: Duration) -> String {
    let mut running = child.command().stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipe = running.stderr.take().unwrap();
    let text = Arc::new(std::sync::Mutex::new(String::new()));
    let read = text.clone();
    let reader = std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = pipe.read(&mut buffer) {
            read.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..n]));
        }
    });
    while !done(&text.lock().unwrap()) && !reader.is_finished() {
        std::thread::sleep(ms(20));
    }
    std::thread::sleep(more);
    running.kill().unwrap();
    running.wait().unwrap();
    reader.join().unwrap();
    Arc::into_inner(text).unwrap().into_inner().unwrap()
}

/// The report comes by itself, once, and names all members and places.
#[test]
#[ignore = "takes long"]
fn a_certain_deadlock_is_reported_within_seconds() {
    child_test!(|child| {
        let is_reported = |text: &str| text.contains("turns this report off");
        // The next checks are 4 seconds apart.
        let stderr = stderr_of(child, is_reported, Duration::from_secs(6));
        let title = "trefoil: deadlock (certain): 3 goroutines wait for each other";
        assert_eq!(stderr.matches(title).count(), 1, "{stderr}");
        for i in 0..3 {
            assert!(stderr.contains(&format!("\"circle {i}\" waits for Mutex 0x")), "{stderr}");
        }
        assert_eq!(stderr.matches("waits_in_a_circle").count(), 3, "{stderr}");
    });
    circle_beside_others();
}

#[test]
#[ignore = "takes long"]
fn the_report_can_be_turned_off() {
    child_test!(|child| {
        let child = child.env("TREFOIL_DEBUG", "deadlockreport=0");
        let stderr = stderr_of(&child, |_| true, Duration::from_secs(9));
        assert!(!stderr.contains("deadlock"), "{stderr}");
    });
    circle_beside_others();
}

/// Makes a deadlock of a goroutine of each runtime.
fn circle_of_two_runtimes(first: &Runtime, second: &Runtime) {
    static A: Mutex<()> = Mutex::new(());
    static B: Mutex<()> = Mutex::new(());
    static LOCKED: YieldBarrier = YieldBarrier::of(2);
    let lock_both = |own: &'static Mutex<()>, other: &'static Mutex<()>| {
        go(move || {
            let _own = own.lock();
            LOCKED.meet();
            drop(other.lock());
        });
        sleep(common::TOO_LONG / 2);
    };
    std::thread::scope(|s| {
        s.spawn(|| first.run(|| lock_both(&A, &B)));
        second.run(|| lock_both(&B, &A));
    });
}

/// Checks that the child reports one certain deadlock.
fn check_reports_one(child: &common::Child) {
    let is_reported = |text: &str| text.contains("turns this report off");
    let stderr = stderr_of(child, is_reported, Duration::from_secs(7));
    assert_eq!(stderr.matches("trefoil: deadlock (certain)").count(), 1, "{stderr}");
}

#[test]
#[ignore = "takes long"]
fn a_deadlock_of_two_runtimes_is_reported_once() {
    child_test!(check_reports_one);
    circle_of_two_runtimes(&runtime(1), &runtime(1));
}

#[test]
#[ignore = "takes long"]
fn a_deadlock_of_two_runtimes_is_reported_if_the_older_one_reports_none() {
    child_test!(check_reports_one);
    let silent = Runtime::builder().procs(1).report_deadlocks(false).build().unwrap();
    circle_of_two_runtimes(&silent, &runtime(1));
}

/// Goroutines that join the deadlock later do not make it another one.
#[test]
#[ignore = "takes long"]
fn a_deadlock_of_a_scope_is_reported_once() {
    child_test!(check_reports_one);
    on_own_runtime(|| {
        named("owner", || {
            let m = Mutex::new(());
            let _guard = m.lock();
            scope(|s| {
                for i in 0..20 {
                    let m = &m;
                    s.go(move || {
                        sleep(if i < 10 { Duration::from_secs(6) } else { Duration::ZERO });
                        drop(m.lock());
                    });
                }
            });
        });
        sleep(common::TOO_LONG / 2);
    });
}

/// What the workers of the torture use.
struct Shared {
    mutexes: [Mutex<u64>; 6],
    rwlocks: [RwLock<u64>; 3],
    condition: (Mutex<u64>, Condvar),
    /// Replaced when it is done.
    once: RwLock<Arc<Once>>,
}

/// Returns numbers that look random.
fn random_below(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    }
}

/// Locks, initializes, joins and waits for scopes once each, in an order that makes no cycle.
fn lock_in_order(shared: &Arc<Shared>, next: &mut impl FnMut(u64) -> u64) {
    let Shared { mutexes, rwlocks, .. } = &**shared;
    let (i, k) = (next(6) as usize, next(3) as usize);
    let mut low = mutexes[i].lock();
    *low += 1;
    if next(4) == 0 {
        sleep(Duration::from_micros(next(300)));
    }
    if i + 1 < 6 {
        *mutexes[i + 1 + next(5 - i as u64) as usize].lock() += 1;
    }
    if next(2) == 0 {
        *rwlocks[k].write() += 1;
    } else {
        std::hint::black_box(*rwlocks[k].read());
    }
    if next(8) == 0 {
        scope(|s| {
            s.go(|| std::hint::black_box(*rwlocks[k].read()));
            s.go(|| *rwlocks[k].write() += 1);
            s.go(trefoil::yield_now);
        });
    }
    if next(8) == 0 {
        // The initializer needs locks that come later, and a goroutine.
        let once = shared.once.read().clone();
        once.call_once(|| {
            *rwlocks[k].write() += 1;
            let shared = shared.clone();
            go(move || *shared.rwlocks[k].write() += 1).join().unwrap();
        });
    }
    drop(low);
    if next(16) == 0 {
        *shared.once.write() = Arc::new(Once::new());
    }
    if next(8) == 0 {
        // Joins a goroutine that waits for a lock.
        let (shared, i) = (shared.clone(), next(6) as usize);
        go(move || *shared.mutexes[i].lock() += 1).join().unwrap();
    }
    if next(8) == 0 {
        // Blocks its carrier, which polls another task later.
        let shared = shared.clone();
        task::spawn(async move { *shared.mutexes[5].lock() += 1 }).join().unwrap();
    }
    if next(16) == 0 {
        // Waiters are moved to the queue of the mutex.
        let (count, changed) = &shared.condition;
        *count.lock() += 1;
        changed.notify_all();
    }
}

/// Many goroutines lock in the right order on four Ps, for `TREFOIL_TORTURE_SECONDS`, with sleeps
/// at random. A check every millisecond, a thousand times as often as that of the helper thread,
/// finds no cycle, certain or not.
#[test]
fn no_cycle_is_found_where_there_is_none() {
    let seconds = std::env::var("TREFOIL_TORTURE_SECONDS").map_or(1, |s| s.parse().unwrap());
    let _w = watchdog_for(Duration::from_secs(60 + 2 * seconds));
    runtime(4).run(move || {
        let end = Instant::now() + Duration::from_secs(seconds);
        let shared = Arc::new(Shared {
            mutexes: Default::default(),
            rwlocks: Default::default(),
            condition: Default::default(),
            once: RwLock::new(Arc::new(Once::new())),
        });
        let workers = (0..40u64).map(|n| {
            let shared = shared.clone();
            go(move || {
                let mut next = random_below(n);
                let mut rounds = 0u64;
                while Instant::now() < end {
                    lock_in_order(&shared, &mut next);
                    rounds += 1;
                }
                rounds
            })
        });
        let workers: Vec<_> = workers.collect();
        let waiters = (0..4).map(|_| {
            let shared = shared.clone();
            go(move || {
                let (count, changed) = &shared.condition;
                let mut guard = count.lock();
                while *guard != u64::MAX {
                    changed.wait(&mut guard);
                }
            })
        });
        let waiters: Vec<_> = waiters.collect();
        let mut checks = 0u64;
        while Instant::now() < end {
            let found = debug::deadlocks();
            assert!(found.is_empty(), "{}", found[0]);
            checks += 1;
            sleep(ms(1));
        }
        let rounds: u64 = workers.into_iter().map(|worker| worker.join().unwrap()).sum();
        *shared.condition.0.lock() = u64::MAX;
        shared.condition.1.notify_all();
        waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
        println!("{checks} checks during {rounds} rounds found nothing");
        assert!(checks > 0);
    });
}
