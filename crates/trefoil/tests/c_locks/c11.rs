//! `mtx_*` and `cnd_*`.

use super::mutex::normal;
use super::*;
use libc::{pthread_cond_t, pthread_mutex_t};

const SUCCESS: c_int = 0;
const BUSY: c_int = 1;
const ERROR: c_int = 2;
const TIMED_OUT: c_int = 4;

unsafe extern "C" {
    fn mtx_lock(m: *mut pthread_mutex_t) -> c_int;
    fn mtx_trylock(m: *mut pthread_mutex_t) -> c_int;
    fn mtx_timedlock(m: *mut pthread_mutex_t, at: *const timespec) -> c_int;
    fn mtx_unlock(m: *mut pthread_mutex_t) -> c_int;
    fn cnd_wait(c: *mut pthread_cond_t, m: *mut pthread_mutex_t) -> c_int;
    fn cnd_timedwait(c: *mut pthread_cond_t, m: *mut pthread_mutex_t, at: *const timespec)
    -> c_int;
    fn cnd_signal(c: *mut pthread_cond_t) -> c_int;
    fn cnd_broadcast(c: *mut pthread_cond_t) -> c_int;
}

#[test]
fn c11_mutexes_and_conditions_return_c11_results() {
    simulated_and_every_pair(|a, b| {
        let (mutex, cond, turn) = (normal(), super::cond::cond(), Object::new(0u32));
        // SAFETY: never freed; `turn` is under the mutex.
        unsafe {
            assert_eq!(mtx_lock(mutex.at()), SUCCESS);
            let other = a.start(move || {
                assert_eq!(mtx_trylock(mutex.at()), BUSY);
                assert_eq!(
                    takes(libc::CLOCK_REALTIME, 5, |soon| mtx_timedlock(mutex.at(), soon)),
                    TIMED_OUT
                );
                assert_eq!(mtx_timedlock(mutex.at(), &BAD_TIME), ERROR);
            });
            other.join();
            let rc =
                takes(libc::CLOCK_REALTIME, 5, |soon| cnd_timedwait(cond.at(), mutex.at(), soon));
            assert_eq!(rc, TIMED_OUT);
            assert_eq!(mtx_unlock(mutex.at()), SUCCESS);
            let side = move |me| {
                move || {
                    for i in 0..100 {
                        assert_eq!(mtx_lock(mutex.at()), SUCCESS);
                        while *turn.at() % 2 != me {
                            assert_eq!(cnd_wait(cond.at(), mutex.at()), SUCCESS);
                        }
                        *turn.at() += 1;
                        let rc = if i % 2 == 0 {
                            cnd_signal(cond.at())
                        } else {
                            cnd_broadcast(cond.at())
                        };
                        assert_eq!(rc, SUCCESS);
                        assert_eq!(mtx_unlock(mutex.at()), SUCCESS);
                    }
                }
            };
            let (one, other) = (a.start(side(0)), b.start(side(1)));
            one.join();
            other.join();
        }
    });
}
