//! Calls that concern every thread of the process or the stack: setuid, fork, `pthread_getattr_np`.

use crate::common::crowd::{crowd, joined, on_goroutines, yields};
use crate::{Busy, errno, set_errno};
use std::cell::Cell;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;
use trefoil::yield_now;

/// glibc sends a signal to every thread and waits for all of them.
#[test]
fn setuid_and_setgid_return_beside_busy_goroutines() {
    fn set_ids(i: usize) {
        // SAFETY: sets the ids that are set already.
        let rc = unsafe {
            match i % 4 {
                0 => libc::setuid(libc::getuid()),
                1 => libc::setgid(libc::getgid()),
                2 => libc::seteuid(libc::geteuid()),
                _ => libc::setegid(libc::getegid()),
            }
        };
        assert_eq!(rc, 0);
    }
    on_goroutines(|| {
        let busy = Busy::start(16);
        // A plain thread and goroutines call them at the same time.
        let outside = thread::spawn(|| (0..100).for_each(set_ids));
        let inside = crowd(4, |i| {
            for k in 0..25 {
                set_ids(i + k);
                yields(2);
            }
        });
        inside.into_iter().for_each(joined);
        outside.join().unwrap();
        busy.end();
    });
}

/// After a fork on a goroutine, only that goroutine runs in the child.
#[test]
fn a_forked_child_is_its_goroutine_alone() {
    thread_local!(static MINE: Cell<usize> = const { Cell::new(0) });
    on_goroutines(|| {
        let busy = Busy::start(8);
        let handles = crowd(24, |i| {
            MINE.set(i + 1);
            yields(i % 3);
            // SAFETY: the child calls malloc (glibc makes that work after a fork) and _exit.
            unsafe {
                let pid = libc::fork();
                assert!(pid >= 0);
                if pid == 0 {
                    let lists: Vec<Vec<usize>> = (0..200).map(|n| vec![n; n]).collect();
                    let sum: usize = lists.iter().flatten().sum();
                    set_errno(7);
                    let right = sum == 2_646_700 && MINE.get() == i + 1 && errno() == 7;
                    libc::_exit(if right { 0 } else { 1 });
                }
                let mut status = 0;
                while libc::waitpid(pid, &raw mut status, 0) < 0 && errno() == libc::EINTR {}
                assert!(libc::WIFEXITED(status), "the child died of {}", libc::WTERMSIG(status));
                assert_eq!(libc::WEXITSTATUS(status), 0);
            }
            assert_eq!(MINE.get(), i + 1);
        });
        handles.into_iter().for_each(joined);
        busy.end();
    });
}

#[test]
fn pthread_getattr_np_returns_the_goroutines_stack() {
    fn self_bounds() -> Result<(usize, usize), c_int> {
        let mut attr = MaybeUninit::uninit();
        let (mut low, mut size) = (null_mut(), 0);
        // SAFETY: getattr initialises `attr` if it returns 0; destroy ends it.
        unsafe {
            match libc::pthread_getattr_np(libc::pthread_self(), attr.as_mut_ptr()) {
                0 => {}
                error => return Err(error),
            }
            libc::pthread_attr_getstack(attr.as_ptr(), &raw mut low, &raw mut size);
            libc::pthread_attr_destroy(attr.as_mut_ptr());
        }
        Ok((low as usize, low as usize + size))
    }
    /// What a goroutine finds. Its parent checks it, because a failed assertion would overflow the
    /// smallest stacks.
    struct Found {
        here: usize,
        bounds: Result<(usize, usize), c_int>,
        later: Result<(usize, usize), c_int>,
    }
    fn find() -> Found {
        let here = 0u8;
        let here = (&raw const here) as usize;
        let first = self_bounds();
        yield_now();
        if let Ok((low, _)) = first {
            // All of it is writable: the lowest byte is above the guard.
            // SAFETY: the goroutine's own stack, far below its frames.
            unsafe { (low as *mut u8).write_volatile(1) };
        }
        Found { here, bounds: first, later: self_bounds() }
    }
    fn check(found: Found, size: usize) -> (usize, usize) {
        let (low, high) =
            found.bounds.unwrap_or_else(|e| panic!("error {e} on a stack of {} KiB", size >> 10));
        assert!((low..high).contains(&found.here), "{:x} not in {low:x}..{high:x}", found.here);
        assert!(high - low <= size && high - low >= size / 2, "{} of {size}", high - low);
        assert_eq!(found.later, Ok((low, high)));
        (low, high)
    }
    on_goroutines(|| {
        let come = Arc::new(AtomicUsize::new(0));
        let handles = crowd(100, move |_| {
            let found = find();
            come.fetch_add(1, SeqCst);
            while come.load(SeqCst) < 100 {
                yield_now();
            }
            found
        });
        let mut all: Vec<_> = handles.into_iter().map(|h| check(joined(h), 256 << 10)).collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|w| w[0].1 <= w[1].0), "stacks overlap: {all:x?}");
        for size in [16 << 20, 1 << 20, 64 << 10] {
            let found = trefoil::Builder::new().stack_size(size).go(find).unwrap();
            check(joined(found), size);
        }
        check(find(), 8 << 20);
        let plain = thread::spawn(self_bounds).join().unwrap().unwrap();
        assert!(plain.1 - plain.0 >= 1 << 20, "a plain thread's own answer");
    });
}
