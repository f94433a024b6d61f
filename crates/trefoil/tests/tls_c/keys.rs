//! pthread keys and C11's `tss_t`.

use crate::common::crowd::{crowd, joined, on_goroutines, yields};
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst};
use trefoil::{go, yield_now};

/// A value of a key, with what its destructor needs to know.
struct Value {
    owner: usize,
    rounds: u32,
    dropped: AtomicU32,
}

static AGAIN: AtomicU32 = AtomicU32::new(u32::MAX);

static MISMATCHES: AtomicUsize = AtomicUsize::new(0);

thread_local!(static KEY_OWNER: Cell<usize> = const { Cell::new(0) });

unsafe extern "C" fn count_drop(value: *mut c_void) {
    // SAFETY: values of this key are leaked `Value`s.
    let value = unsafe { &*value.cast::<Value>() };
    if KEY_OWNER.get() != value.owner {
        MISMATCHES.fetch_add(1, SeqCst);
    }
    yield_now();
    if value.dropped.fetch_add(1, SeqCst) + 1 < value.rounds {
        // A new value asks for another round.
        // SAFETY: a live key.
        unsafe { libc::pthread_setspecific(AGAIN.load(SeqCst), std::ptr::from_ref(value).cast()) };
    }
}

fn new_key(dtor: Option<unsafe extern "C" fn(*mut c_void)>) -> libc::pthread_key_t {
    let mut key = 0;
    // SAFETY: the destructor, if any, takes the values that we set.
    assert_eq!(unsafe { libc::pthread_key_create(&raw mut key, dtor) }, 0);
    key
}

#[test]
fn pthread_keys_belong_to_goroutines_and_run_four_rounds_of_destructors() {
    const N: usize = 1000;
    /// PTHREAD_DESTRUCTOR_ITERATIONS of POSIX.
    const ROUNDS: u32 = 4;
    let values: Vec<&'static Value> = (0..N)
        .map(|i| {
            let rounds = [1, 2, ROUNDS, 100][i % 4];
            &*Box::leak(Box::new(Value { owner: i + 1, rounds, dropped: AtomicU32::new(0) }))
        })
        .collect();
    let all = values.clone();
    on_goroutines(move || {
        let key = new_key(Some(count_drop));
        AGAIN.store(key, SeqCst);
        let plain = new_key(None);
        let v = values.clone();
        let handles = crowd(N, move |i| {
            KEY_OWNER.set(i + 1);
            // SAFETY: live keys; the value lives for ever.
            unsafe {
                assert!(libc::pthread_getspecific(key).is_null());
                assert!(libc::pthread_getspecific(plain).is_null(), "on a recycled stack");
                libc::pthread_setspecific(key, std::ptr::from_ref(v[i]).cast());
                libc::pthread_setspecific(plain, (i + 1) as *const c_void);
                yields(3);
                assert_eq!(libc::pthread_getspecific(key), std::ptr::from_ref(v[i]) as *mut _);
                assert_eq!(libc::pthread_getspecific(plain) as usize, i + 1);
            }
        });
        for (i, handle) in handles.into_iter().enumerate() {
            joined(handle);
            let expected = values[i].rounds.min(ROUNDS);
            assert_eq!(values[i].dropped.load(SeqCst), expected, "goroutine {i}, when joined");
        }
        // New goroutines on all those stacks.
        let handles = crowd(N, move |_| {
            // SAFETY: live keys.
            unsafe {
                assert!(libc::pthread_getspecific(key).is_null(), "the value of a dead goroutine");
                assert!(libc::pthread_getspecific(plain).is_null());
            }
        });
        handles.into_iter().for_each(joined);
        // SAFETY: the keys are no longer used.
        unsafe {
            libc::pthread_key_delete(key);
            libc::pthread_key_delete(plain);
        }
    });
    for (i, value) in all.iter().enumerate() {
        assert_eq!(value.dropped.load(SeqCst), value.rounds.min(ROUNDS), "goroutine {i}");
    }
    assert_eq!(MISMATCHES.load(SeqCst), 0);
}

#[test]
fn values_of_deleted_pthread_keys_are_never_seen_again() {
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn ended(_: *mut c_void) {
        ENDED.fetch_add(1, SeqCst);
    }
    on_goroutines(|| {
        // glibc keeps keys from 32 on in a second level, which is allocated on demand.
        let keys: Vec<_> = (0..100).map(|_| new_key(Some(ended))).collect();
        let k = keys.clone();
        let handles = crowd(300, move |i| {
            for (n, &key) in k.iter().enumerate() {
                // SAFETY: a live key.
                unsafe {
                    assert!(libc::pthread_getspecific(key).is_null());
                    libc::pthread_setspecific(key, (i * 1000 + n + 1) as *const c_void);
                }
            }
            yields(2);
            for (n, &key) in k.iter().enumerate() {
                // SAFETY: a live key.
                let value = unsafe { libc::pthread_getspecific(key) };
                assert_eq!(value as usize, i * 1000 + n + 1);
            }
        });
        handles.into_iter().for_each(joined);
        assert_eq!(ENDED.load(SeqCst), 300 * 100);
        // The value of a deleted key is gone, also when its number is used again.
        let holder_may_end = Arc::new(AtomicBool::new(false));
        let (first, may_end) = (keys[0], holder_may_end.clone());
        let set = Arc::new(AtomicBool::new(false));
        let s = set.clone();
        let holder = go(move || {
            // SAFETY: a live key; later a deleted one, for which the result is null.
            unsafe {
                libc::pthread_setspecific(first, 5 as *const c_void);
                s.store(true, SeqCst);
                while !may_end.load(SeqCst) {
                    yield_now();
                }
                assert!(libc::pthread_getspecific(first).is_null(), "the value of a deleted key");
            }
        });
        while !set.load(SeqCst) {
            yield_now();
        }
        // SAFETY: the keys are not set from here on.
        keys.iter().for_each(|&key| assert_eq!(unsafe { libc::pthread_key_delete(key) }, 0));
        let new_keys: Vec<_> = (0..100).map(|_| new_key(Some(ended))).collect();
        holder_may_end.store(true, SeqCst);
        joined(holder);
        assert_eq!(
            ENDED.load(SeqCst),
            300 * 100,
            "a destructor ran for the value of a deleted key"
        );
        // SAFETY: as above.
        new_keys.iter().for_each(|&key| assert_eq!(unsafe { libc::pthread_key_delete(key) }, 0));
    });
}

/// Values of C11's `tss_t` are destroyed at a goroutine's end, like those of pthread keys.
#[test]
fn destructors_of_c11_keys_run_at_a_goroutines_end() {
    type Destructor = unsafe extern "C" fn(*mut c_void);
    unsafe extern "C" {
        fn tss_create(key: *mut u32, destructor: Option<Destructor>) -> c_int;
        fn tss_set(key: u32, value: *mut c_void) -> c_int;
        fn tss_get(key: u32) -> *mut c_void;
        fn tss_delete(key: u32);
    }
    static SUM: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn destroy(value: *mut c_void) {
        SUM.fetch_add(value as usize, SeqCst);
    }
    let mut key = 0;
    // SAFETY: the values of this key are numbers.
    assert_eq!(unsafe { tss_create(&raw mut key, Some(destroy)) }, 0);
    trefoil::run(move || {
        for n in 1..=100 {
            // SAFETY: as above.
            let set = move || unsafe {
                assert!(tss_get(key).is_null(), "a value of another goroutine");
                assert_eq!(tss_set(key, n as *mut c_void), 0);
            };
            trefoil::go(set).join().unwrap();
        }
    });
    assert_eq!(SUM.load(SeqCst), 5050);
    // SAFETY: the key is no longer used.
    unsafe { tss_delete(key) };
}
