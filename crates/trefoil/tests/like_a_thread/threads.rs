//! Calls about times and about the calling thread.

use crate::common::{cpus, runtime, watchdog};
use crate::{check, same_on_both};
use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicU32;

unsafe extern "C" {
    // Not declared by the crate `libc`.
    fn pthread_getcpuclockid(thread: libc::pthread_t, clock: *mut libc::clockid_t) -> c_int;
    fn pthread_tryjoin_np(thread: libc::pthread_t, value: *mut *mut c_void) -> c_int;
    fn pthread_timedjoin_np(
        thread: libc::pthread_t,
        value: *mut *mut c_void,
        until: *const libc::timespec,
    ) -> c_int;
    fn thrd_create(
        thread: *mut libc::pthread_t,
        start: extern "C" fn(*mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn thrd_join(thread: libc::pthread_t, value: *mut c_int) -> c_int;
    fn pthread_rwlock_timedrdlock(
        lock: *mut libc::pthread_rwlock_t,
        at: *const libc::timespec,
    ) -> c_int;
    fn pthread_rwlock_timedwrlock(
        lock: *mut libc::pthread_rwlock_t,
        at: *const libc::timespec,
    ) -> c_int;
}

#[test]
fn invalid_times_are_refused() {
    let _w = watchdog();
    let found = same_on_both(|| {
        use std::ptr::{null, null_mut};
        let mut found = Vec::new();
        for (tv_sec, tv_nsec) in [(0, 1_000_000_000), (0, -1), (1 << 32, 1_000_000_000), (-1, 0)] {
            let bad = libc::timespec { tv_sec, tv_nsec };
            let at = &raw const bad;
            let word = AtomicU32::new(0);
            let futex = |op: c_int, value: u32, bits: u32| {
                let op = op | libc::FUTEX_PRIVATE_FLAG;
                let zero = 0usize;
                // SAFETY: local variables.
                let rc = unsafe {
                    libc::syscall(libc::SYS_futex, word.as_ptr(), op, value, at, zero, bits)
                };
                check(rc as isize)
            };
            found.extend([
                futex(libc::FUTEX_WAIT, 0, 0),
                futex(libc::FUTEX_WAIT, 1, 0),
                futex(libc::FUTEX_WAIT_BITSET, 0, u32::MAX),
                futex(libc::FUTEX_WAIT_BITSET, 1, u32::MAX),
                futex(libc::FUTEX_WAIT_BITSET, 0, 0),
                futex(libc::FUTEX_WAKE_BITSET, 1, 0),
            ]);
            // SAFETY: local variables. Locks that were acquired are not used again.
            unsafe {
                found.extend([
                    check(libc::nanosleep(at, null_mut()) as isize),
                    libc::clock_nanosleep(libc::CLOCK_MONOTONIC, 0, at, null_mut()) as isize,
                    check(libc::ppoll(null_mut(), 0, at, null()) as isize),
                    check(libc::pselect(0, null_mut(), null_mut(), null_mut(), at, null()) as isize),
                ]);
                let mut time = libc::timeval { tv_sec, tv_usec: tv_nsec.min(0) };
                if tv_sec < 1 {
                    let none = null_mut;
                    let n = libc::select(0, none(), none(), none(), &raw mut time);
                    found.push(check(n as isize));
                }
                if tv_sec == -1 {
                    continue; // where the time is absolute, it is valid and in the past
                }
                let clock = libc::CLOCK_REALTIME;
                found.push(
                    libc::clock_nanosleep(clock, libc::TIMER_ABSTIME, at, null_mut()) as isize
                );
                for permits in [0, 1] {
                    let mut sem: libc::sem_t = std::mem::zeroed();
                    libc::sem_init(&raw mut sem, 0, permits);
                    found.push(check(libc::sem_timedwait(&raw mut sem, at) as isize));
                }
                let mut lock = libc::PTHREAD_RWLOCK_INITIALIZER;
                found.push(pthread_rwlock_timedrdlock(&raw mut lock, at) as isize);
                found.push(pthread_rwlock_timedwrlock(&raw mut lock, at) as isize);
                let mut mutex = libc::PTHREAD_MUTEX_INITIALIZER;
                let mut cond = libc::PTHREAD_COND_INITIALIZER;
                found.push(libc::pthread_mutex_timedlock(&raw mut mutex, at) as isize);
                found.push(libc::pthread_mutex_timedlock(&raw mut mutex, at) as isize);
                let (cond, mutex) = (&raw mut cond, &raw mut mutex);
                found.push(libc::pthread_cond_timedwait(cond, mutex, at) as isize);
            }
        }
        found
    });
    assert!(found.iter().filter(|rc| rc.abs() == libc::EINVAL as isize).count() > 30, "{found:?}");
}

#[test]
fn affinity_policy_and_cpu_clock_of_pthread_self_can_be_read() {
    let _w = watchdog();
    let found = same_on_both(|| {
        // SAFETY: local variables.
        unsafe {
            let own = libc::pthread_self();
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            let rc = libc::pthread_getaffinity_np(own, size_of_val(&set), &raw mut set);
            let cpus: Vec<_> = (0..1024).filter(|&cpu| libc::CPU_ISSET(cpu, &set)).collect();
            let small = libc::pthread_getaffinity_np(own, 1, &raw mut set);
            let (mut policy, mut param) = (-1, libc::sched_param { sched_priority: -1 });
            let scheduling = libc::pthread_getschedparam(own, &raw mut policy, &raw mut param);
            let (mut clock, mut time) = (-1, libc::timespec { tv_sec: -1, tv_nsec: -1 });
            let got = pthread_getcpuclockid(own, &raw mut clock);
            let read = libc::clock_gettime(clock, &raw mut time);
            let ran = time.tv_sec >= 0 && time.tv_nsec >= 0;
            ((rc, cpus, small), (scheduling, policy, param.sched_priority), (got, read, ran))
        }
    });
    assert_eq!(found.0.0, 0);
    assert_eq!(found.0.1, cpus());
    assert_eq!(found.1, (0, libc::SCHED_OTHER, 0));
    assert_eq!(found.2, (0, 0, true));
}

#[test]
fn affinity_and_priority_are_set_only_on_a_locked_thread() {
    let _w = watchdog();
    let set_both = || {
        // SAFETY: local variables.
        unsafe {
            let own = libc::pthread_self();
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            assert_eq!(libc::pthread_getaffinity_np(own, size_of_val(&set), &raw mut set), 0);
            // The first of its CPUs.
            let first = (0..1024).find(|&cpu| libc::CPU_ISSET(cpu, &set)).unwrap();
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(first, &mut one);
            let pinned = libc::pthread_setaffinity_np(own, size_of_val(&one), &raw const one);
            let mut after: libc::cpu_set_t = std::mem::zeroed();
            libc::pthread_getaffinity_np(own, size_of_val(&after), &raw mut after);
            let param = libc::sched_param { sched_priority: 0 };
            let batch = libc::pthread_setschedparam(own, libc::SCHED_BATCH, &raw const param);
            let priority = libc::pthread_setschedprio(own, 0);
            let unchanged = libc::CPU_EQUAL(&set, &after);
            let is_pinned = libc::CPU_EQUAL(&one, &after);
            (pinned, batch, priority, unchanged, is_pinned)
        }
    };
    let (refused, allowed) = runtime(2).run(move || {
        let refused = trefoil::go(set_both).join().unwrap();
        // The goroutine ends while it is locked, and its thread with it.
        let locked = trefoil::go(move || {
            std::mem::forget(trefoil::lock_os_thread());
            set_both()
        });
        (refused, locked.join().unwrap())
    });
    let denied = libc::EPERM;
    assert_eq!((refused.0, refused.1, refused.2, refused.3), (denied, denied, denied, true));
    assert_eq!((allowed.0, allowed.1, allowed.2, allowed.4), (0, 0, 0, true));
}

/// Joins of a thread that runs, has ended, was detached, or is the caller.
#[test]
fn os_threads_are_joined_or_refused() {
    let _w = watchdog();
    /// Sleeps for some milliseconds.
    extern "C" fn body(millis: *mut c_void) -> *mut c_void {
        std::thread::sleep(std::time::Duration::from_millis(millis.addr() as u64));
        millis.wrapping_byte_add(1)
    }
    extern "C" fn c11_body(millis: *mut c_void) -> c_int {
        body(millis).addr() as c_int
    }
    fn start(millis: usize) -> libc::pthread_t {
        let mut thread = 0;
        let argument = std::ptr::without_provenance_mut(millis);
        // SAFETY: the attributes are the default, and the function takes any argument.
        assert_eq!(unsafe { libc::pthread_create(&mut thread, null(), body, argument) }, 0);
        thread
    }
    let found = same_on_both(|| {
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let later = libc::timespec { tv_sec: i32::MAX.into(), tv_nsec: 0 };
        let mut values = [null_mut(); 3];
        let [first, second, third] = values.each_mut().map(|value| &raw mut *value);
        let mut c11_value = 0;
        // SAFETY: threads that were started here; each is joined or detached once. The last one
        // runs for longer than the refused join.
        let results = unsafe {
            let (slow, other, detached) = (start(100), start(20), start(2000));
            let mut c11 = 0;
            let created = thrd_create(&mut c11, c11_body, std::ptr::without_provenance_mut(30));
            [
                pthread_tryjoin_np(slow, null_mut()),
                pthread_timedjoin_np(slow, null_mut(), &now),
                libc::pthread_join(slow, first),
                pthread_timedjoin_np(other, second, &later),
                libc::pthread_join(start(0), third),
                libc::pthread_join(libc::pthread_self(), null_mut()),
                pthread_timedjoin_np(libc::pthread_self(), null_mut(), &now),
                libc::pthread_detach(detached),
                libc::pthread_join(detached, null_mut()),
                created,
                thrd_join(c11, &mut c11_value),
            ]
        };
        (results, values.map(|value| value.addr()), c11_value)
    });
    let (busy, late) = (libc::EBUSY, libc::ETIMEDOUT);
    let (deadlock, invalid) = (libc::EDEADLK, libc::EINVAL);
    let results = [busy, late, 0, 0, 0, deadlock, deadlock, 0, invalid, 0, 0];
    assert_eq!(found, (results, [101, 21, 1], 31));
}
