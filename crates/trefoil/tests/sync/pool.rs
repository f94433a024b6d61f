//! `Pool`.

use super::common::{MS, watchdog, yield_until};
use super::{mixed, on_every, panic_text};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use trefoil::go;
use trefoil::sync::{Mutex, Pool, PoolGuard};
use trefoil::time::sleep;

/// Counts the objects that are alive.
struct Counted(Arc<AtomicUsize>, AtomicBool);

impl Counted {
    fn new(alive: &Arc<AtomicUsize>) -> Counted {
        alive.fetch_add(1, SeqCst);
        Counted(alive.clone(), AtomicBool::new(false))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, SeqCst);
    }
}

/// Go: TestPool.
#[test]
fn an_object_comes_back_and_is_used_again() {
    let _w = watchdog();
    on_every(|| {
        let pool = Pool::new(|| 0);
        assert!(pool.try_get().is_none());
        pool.put(7);
        let mut guard = pool.get();
        assert_eq!(*guard, 7);
        *guard = 8;
        drop(guard);
        assert_eq!(format!("{pool:?}"), "Pool { unused: 1, .. }");
        assert_eq!(PoolGuard::into_inner(pool.get()), 8);
        assert_eq!(*pool.get(), 0, "a new one");
        pool.clear();
        assert!(pool.try_get().is_none());
    });
}

/// Go: TestPoolStress.
#[test]
fn an_object_has_one_user_at_a_time() {
    let _w = watchdog();
    on_every(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let pool = Arc::new(Pool::new({
            let alive = alive.clone();
            move || Counted::new(&alive)
        }));
        mixed(8, {
            let pool = pool.clone();
            move |i| {
                for round in 0..500 {
                    let guards: Vec<_> = (0..1 + (i + round) % 3).map(|_| pool.get()).collect();
                    for guard in &guards {
                        assert!(!guard.1.swap(true, SeqCst), "two users");
                    }
                    if round % 16 == 0 {
                        trefoil::yield_now();
                    }
                    guards.iter().for_each(|guard| guard.1.store(false, SeqCst));
                }
            }
        });
        let unused = alive.load(SeqCst);
        assert_eq!(format!("{pool:?}"), format!("Pool {{ unused: {unused}, .. }}"));
        drop(pool);
        assert_eq!(alive.load(SeqCst), 0, "dropped with the pool");
    });
}

#[test]
fn objects_are_found_wherever_they_were_put() {
    let _w = watchdog();
    on_every(|| {
        const OBJECTS: usize = 300;
        let pool = Arc::new(Pool::new(|| usize::MAX));
        mixed(10, {
            let pool = pool.clone();
            move |i| (0..OBJECTS / 10).for_each(|n| pool.put(i * OBJECTS / 10 + n))
        });
        let found: HashSet<_> = (0..OBJECTS).map(|_| PoolGuard::into_inner(pool.get())).collect();
        assert_eq!(found, (0..OBJECTS).collect());
        assert!(pool.try_get().is_none());
    });
}

#[test]
fn a_full_pool_drops_what_comes_back() {
    let _w = watchdog();
    on_every(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let make = || Counted::new(&alive);
        let pool = Pool::with_limits(make, 3, 60_000 * MS);
        let guards: Vec<_> = (0..5000).map(|_| pool.get()).collect();
        drop(guards);
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap().matches("processor\t").count();
        assert!(alive.load(SeqCst) <= 3 + 16 * cpus.max(1), "{} are left", alive.load(SeqCst));
        assert!(alive.load(SeqCst) > 3);
    });
}

#[test]
fn unused_objects_are_dropped_after_a_time_and_used_ones_stay() {
    let _w = watchdog();
    on_every(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let make = {
            let alive = alive.clone();
            move || Counted::new(&alive)
        };
        let pool = Pool::with_limits(make, 1000, 20 * MS);
        for _ in 0..2 {
            let guards: Vec<_> = (0..100).map(|_| pool.get()).collect();
            assert!(alive.load(SeqCst) >= 100);
            drop(guards);
            // A guard keeps its object, however long it lives.
            let kept = pool.get();
            yield_until("the unused ones to be dropped", || {
                sleep(MS);
                alive.load(SeqCst) == 1
            });
            drop(kept);
            yield_until("the last one to be dropped", || {
                sleep(MS);
                alive.load(SeqCst) == 0
            });
        }
    });
}

#[test]
fn a_panic_drops_the_object_and_a_failed_make_leaves_the_pool_usable() {
    let _w = watchdog();
    on_every(|| {
        let alive = Arc::new(AtomicUsize::new(0));
        let fails = Arc::new(AtomicBool::new(false));
        let pool = Arc::new(Pool::new({
            let (alive, fails) = (alive.clone(), fails.clone());
            move || {
                assert!(!fails.load(SeqCst), "on purpose");
                Counted::new(&alive)
            }
        }));
        let user = go({
            let pool = pool.clone();
            move || {
                let _guard = pool.get();
                panic!("on purpose");
            }
        });
        assert!(user.join().is_err());
        assert_eq!(alive.load(SeqCst), 0);
        fails.store(true, SeqCst);
        assert_eq!(panic_text(|| drop(pool.get())), "on purpose");
        fails.store(false, SeqCst);
        drop(pool.get());
        assert!(pool.try_get().is_some());
    });
}

#[test]
fn a_drop_that_panics_in_the_background_does_not_stop_the_emptying() {
    static DROPPED: AtomicUsize = AtomicUsize::new(0);
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            DROPPED.fetch_add(1, SeqCst);
            panic!("on purpose");
        }
    }
    static POOL: Pool<Panics> = Pool::with_limits(|| Panics, 100, MS);
    let _w = watchdog();
    on_every(|| {
        let before = DROPPED.load(SeqCst);
        for _ in 0..3 {
            POOL.put(Panics);
        }
        yield_until("all to be dropped", || {
            sleep(MS);
            DROPPED.load(SeqCst) == before + 3
        });
    });
}

#[test]
fn a_pool_may_keep_its_objects_for_ever() {
    static POOL: Pool<u32> = Pool::with_limits(|| 1, 10, Duration::MAX);
    on_every(|| drop(POOL.get()));
}

#[test]
fn a_guard_may_be_sent_and_dropped_elsewhere() {
    let _w = watchdog();
    static POOL: Pool<Vec<u8>> = Pool::new(Vec::new);
    static SENT: Mutex<Vec<PoolGuard<'static, Vec<u8>>>> = Mutex::new(Vec::new());
    on_every(|| {
        for _ in 0..10 {
            SENT.lock().push(POOL.get());
        }
        let thread = std::thread::spawn(|| SENT.lock().clear());
        super::join_thread(thread);
        assert!(POOL.try_get().is_some());
    });
}
