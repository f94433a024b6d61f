//! errno, `pthread_self`, the locale and other state that C libraries keep per thread.

use crate::common::crowd::{crowd, joined, on_goroutines, yields};
use crate::{errno, set_errno};
use std::collections::HashSet;
use std::ffi::{CStr, CString, c_int};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use trefoil::{go, yield_now};

#[test]
fn each_goroutine_has_its_own_errno() {
    on_goroutines(|| {
        for _ in 0..3 {
            let handles = crowd(3000, |i| {
                let mine = i as c_int + 1;
                assert_eq!(errno(), 0, "a new goroutine");
                for k in 0..6 {
                    set_errno(mine + k);
                    yields(1 + i % 3);
                    assert_eq!(errno(), mine + k);
                    joined(go(|| set_errno(-1)));
                    assert_eq!(errno(), mine + k, "after a park");
                }
                // SAFETY: fails and changes nothing.
                assert_eq!(unsafe { libc::close(-1) }, -1);
                yield_now();
                assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EBADF));
            });
            handles.into_iter().for_each(joined);
        }
    });
}

#[test]
fn each_goroutine_has_its_own_pthread_self() {
    on_goroutines(|| {
        let come = Arc::new(AtomicUsize::new(0));
        let handles = crowd(2000, move |_| {
            // SAFETY: no arguments, no conditions.
            let me = unsafe { libc::pthread_self() };
            come.fetch_add(1, SeqCst);
            // All goroutines live at the same time.
            while come.load(SeqCst) < 2000 {
                yield_now();
                // SAFETY: as above.
                assert_eq!(unsafe { libc::pthread_self() }, me);
            }
            me
        });
        let all: HashSet<_> = handles.into_iter().map(joined).collect();
        assert_eq!(all.len(), 2000);
    });
}

unsafe extern "C" {
    fn uselocale(locale: libc::locale_t) -> libc::locale_t;
    fn __h_errno_location() -> *mut c_int;
}

#[test]
fn each_goroutine_has_its_own_locale() {
    /// `LC_GLOBAL_LOCALE`: the locale of a new thread.
    const GLOBAL: isize = -1;
    on_goroutines(|| {
        for _ in 0..20 {
            let handles = crowd(100, |i| {
                // SAFETY: the locale is freed after the old one is set again.
                unsafe {
                    assert_eq!(uselocale(null_mut()) as isize, GLOBAL, "a new goroutine");
                    let mine = libc::newlocale(libc::LC_ALL_MASK, c"C".as_ptr(), null_mut());
                    uselocale(mine);
                    yields(4);
                    assert_eq!(uselocale(null_mut()), mine);
                    assert_eq!(libc::toupper(c_int::from(b'q')), c_int::from(b'Q'));
                    // The next goroutines on the other stacks must not see it.
                    if i % 2 == 0 {
                        uselocale(GLOBAL as libc::locale_t);
                        libc::freelocale(mine);
                    }
                }
            });
            handles.into_iter().for_each(joined);
        }
    });
}

#[test]
fn each_goroutine_has_its_own_dlerror() {
    on_goroutines(|| {
        let stale_errors = Arc::new(AtomicUsize::new(0));
        for _ in 0..20 {
            let errors = stale_errors.clone();
            let handles = crowd(100, move |i| {
                // SAFETY: dlopen of a file that does not exist; dlerror's text is copied at once.
                unsafe {
                    if !libc::dlerror().is_null() {
                        errors.fetch_add(1, SeqCst);
                    }
                    let file = CString::new(format!("/no/such/lib{i}.so")).unwrap();
                    assert!(libc::dlopen(file.as_ptr(), libc::RTLD_NOW).is_null());
                    yields(4);
                    let error = CStr::from_ptr(libc::dlerror()).to_string_lossy().into_owned();
                    assert!(error.contains(&format!("/no/such/lib{i}.so:")), "{error}");
                    assert!(libc::dlopen(file.as_ptr(), libc::RTLD_NOW).is_null());
                }
            });
            handles.into_iter().for_each(joined);
        }
        let seen = stale_errors.load(SeqCst);
        assert_eq!(seen, 0, "new goroutines that saw the dlerror of a dead one");
    });
}

#[test]
fn each_goroutine_has_its_own_h_errno() {
    on_goroutines(|| {
        let stale_values = Arc::new(AtomicUsize::new(0));
        for _ in 0..20 {
            let values = stale_values.clone();
            let handles = crowd(100, move |i| {
                // SAFETY: the address of the caller's h_errno.
                let h_errno = unsafe { &mut *__h_errno_location() };
                values.fetch_add(usize::from(*h_errno != 0), SeqCst);
                *h_errno = i as c_int + 1;
                yields(4);
                assert_eq!(*h_errno, i as c_int + 1);
            });
            handles.into_iter().for_each(joined);
        }
        let seen = stale_values.load(SeqCst);
        assert_eq!(seen, 0, "new goroutines that saw the h_errno of a dead one");
    });
}

#[test]
fn a_recursive_mutex_belongs_to_its_goroutine() {
    struct Recursive(std::cell::UnsafeCell<libc::pthread_mutex_t>);
    // SAFETY: a pthread mutex is for sharing.
    unsafe impl Sync for Recursive {}
    // SAFETY: it is not moved while in use: it stays in its Arc.
    unsafe impl Send for Recursive {}

    on_goroutines(|| {
        let mutex = Arc::new(Recursive(libc::PTHREAD_MUTEX_INITIALIZER.into()));
        // SAFETY: the mutex is initialised before it is shared.
        unsafe {
            let mut attr = MaybeUninit::uninit();
            libc::pthread_mutexattr_init(attr.as_mut_ptr());
            libc::pthread_mutexattr_settype(attr.as_mut_ptr(), libc::PTHREAD_MUTEX_RECURSIVE);
            libc::pthread_mutex_init(mutex.0.get(), attr.as_ptr());
        }
        let inside = Arc::new(AtomicUsize::new(0));
        let handles = crowd(200, move |i| {
            for _ in 0..5 {
                // `trylock` does not block: waiting is not tested here.
                // SAFETY: an initialised mutex that the Arc keeps.
                while unsafe { libc::pthread_mutex_trylock(mutex.0.get()) } != 0 {
                    yield_now();
                }
                assert_eq!(inside.swap(i + 1, SeqCst), 0, "two owners");
                yields(2);
                // SAFETY: as above; taken twice and released twice by its owner.
                unsafe {
                    assert_eq!(libc::pthread_mutex_trylock(mutex.0.get()), 0, "not recursive");
                    yield_now();
                    assert_eq!(libc::pthread_mutex_unlock(mutex.0.get()), 0);
                    yield_now();
                    assert_eq!(inside.swap(0, SeqCst), i + 1);
                    assert_eq!(libc::pthread_mutex_unlock(mutex.0.get()), 0);
                }
                yield_now();
            }
        });
        handles.into_iter().for_each(joined);
    });
}

#[test]
fn signals_that_a_goroutine_sends_to_itself_are_handled() {
    static RAISED: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn note(_: c_int) {
        RAISED.fetch_add(1, SeqCst);
    }
    on_goroutines(|| {
        // SAFETY: the handler only counts.
        unsafe { libc::signal(libc::SIGUSR2, note as *const () as usize) };
        let handles = crowd(200, |_| {
            for _ in 0..3 {
                yield_now();
                // SAFETY: there is a handler, and the calling "thread" lives.
                unsafe {
                    assert_eq!(libc::raise(libc::SIGUSR2), 0);
                    assert_eq!(libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2), 0);
                }
            }
        });
        handles.into_iter().for_each(joined);
        assert_eq!(RAISED.load(SeqCst), 1200);
    });
}
