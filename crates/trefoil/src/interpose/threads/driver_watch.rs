//! Whether a worker of a tokio runtime waits in its driver, which is an epoll instance.
//!
//! tokio's workers take turns in the driver. A worker that leaves it with one task that is ready
//! tells no other worker; if the task blocks, neither sockets nor timers are served until it ends.
//! `tokio.rs` has a goroutine, the *driver monitor*, that notices this and wakes another worker.

use super::{NewThread, wake};
use crate::interpose::park::may_park;
use crate::sched::wait::{self, reason::WaitReason};
use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

thread_local! {
    /// The thread of tokio that the goroutine is about to create, or null. Owned.
    static ANNOUNCED: Cell<*mut NewThread> = const { Cell::new(null_mut()) };
    /// The watch of the tokio runtime that this goroutine is a thread of; null on any other. The
    /// goroutine's `Thread` keeps it alive.
    static WATCH: Cell<*const DriverWatch> = const { Cell::new(null()) };
}

/// Has the next `pthread_create` of the calling goroutine start a goroutine with this name, which
/// reports to `watch`. Does nothing on a plain thread.
pub(crate) fn announce_thread(name: &str, watch: &Arc<DriverWatch>) {
    if may_park() {
        let announced = NewThread { name: name.into(), watch: Some(watch.clone()) };
        take_announced();
        ANNOUNCED.set(Box::into_raw(Box::new(announced)));
    }
}

/// Takes what [`announce_thread`] has left.
pub(super) fn take_announced() -> Option<NewThread> {
    let announced = ANNOUNCED.replace(null_mut());
    // SAFETY: `announce_thread` stored the box of this goroutine, and it is taken once.
    (!announced.is_null()).then(|| *unsafe { Box::from_raw(announced) })
}

/// Sets the watch that the calling goroutine reports to. The caller keeps it alive until it sets
/// another one, or None.
pub(super) fn set_watch(watch: Option<&Arc<DriverWatch>>) {
    WATCH.set(watch.map_or(null(), Arc::as_ptr));
}

/// See the head of the file.
#[derive(Default)]
pub(crate) struct DriverWatch {
    /// The descriptor of the driver plus 1; 0 until a worker has waited for it.
    driver: AtomicI32,
    /// How many workers are in the driver: 0 or 1.
    attending: AtomicU32,
    /// How often a worker has entered the driver.
    polls: AtomicU64,
    /// The monitor, while it sleeps until a worker leaves the driver; 0 otherwise.
    monitor: AtomicUsize,
    /// How many goroutines were started as threads.
    threads: AtomicU64,
}

impl DriverWatch {
    /// Counts a goroutine that was started as a thread.
    pub(super) fn count_thread(&self) {
        self.threads.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many goroutines were started as threads.
    pub(crate) fn threads(&self) -> u64 {
        self.threads.load(Ordering::Relaxed)
    }

    /// Returns how often a worker has entered the driver, or None if one is there now, or none has
    /// been there yet: a runtime without sockets and timers has no driver.
    pub(crate) fn unattended(&self) -> Option<u64> {
        // SeqCst: see `sleep_while_attended`.
        let polls = self.polls.load(Ordering::SeqCst);
        (polls != 0 && self.attending.load(Ordering::SeqCst) == 0).then_some(polls)
    }

    /// The monitor sleeps until a worker leaves the driver, or [`wake_monitor`](Self::wake_monitor)
    /// is called. Returns at once if all workers have left the driver, or `is_over` returns true.
    pub(crate) fn sleep_while_attended(&self, is_over: impl Fn() -> bool) {
        wait::block(WaitReason::Semacquire, |sleeper| {
            // A worker leaves the driver and then reads `monitor`; this thread stores `monitor` and
            // then checks whether a worker is in the driver. SeqCst: at least one sees the other.
            self.monitor.store(sleeper, Ordering::SeqCst);
            if self.unattended().is_none() && !is_over() {
                return true;
            }
            // If a waker has taken the word, its wake-up comes.
            self.monitor.swap(0, Ordering::SeqCst) != sleeper
        });
    }

    /// Wakes the monitor if it sleeps.
    #[inline]
    pub(crate) fn wake_monitor(&self) {
        if self.monitor.load(Ordering::SeqCst) != 0 {
            wake(self.monitor.swap(0, Ordering::SeqCst));
        }
    }
}

/// Proof that a worker is in the driver.
pub(in crate::interpose) struct Attending(&'static DriverWatch);

/// Notes that the calling goroutine, if it is a thread of a tokio runtime, waits in its driver;
/// None if `epoll` is not the driver.
#[inline]
pub(in crate::interpose) fn attend_driver(epoll: c_int) -> Option<Attending> {
    // SAFETY: null, or kept alive by this goroutine's `Thread` while its start routine runs.
    let watch = unsafe { WATCH.get().as_ref() }?;
    // The first wait of a tokio runtime is the driver's: no task has run before.
    let known = watch.driver.compare_exchange(0, epoll + 1, Ordering::Relaxed, Ordering::Relaxed);
    if known.is_err_and(|driver| driver != epoll + 1) {
        return None;
    }
    watch.polls.fetch_add(1, Ordering::SeqCst);
    watch.attending.fetch_add(1, Ordering::SeqCst);
    Some(Attending(watch))
}

impl Drop for Attending {
    fn drop(&mut self) {
        self.0.attending.fetch_sub(1, Ordering::SeqCst);
        self.0.wake_monitor();
    }
}
