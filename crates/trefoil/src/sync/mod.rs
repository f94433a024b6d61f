//! Locks and other synchronization primitives that park goroutines: std's names and Go's rules.
//!
//! ```
//! use trefoil::sync::{Mutex, WaitGroup};
//! static SEEN: Mutex<Vec<i32>> = Mutex::new(Vec::new());
//! trefoil::run(|| {
//!     let wg = WaitGroup::new();
//!     for i in 0..10 {
//!         wg.go(move || SEEN.lock().push(i));
//!     }
//!     wg.wait();
//!     assert_eq!(SEEN.lock().len(), 10);
//! });
//! ```
//!
//! # What is in this module
//! | item | purpose | a wait with a time limit |
//! |---|---|---|
//! | [`Mutex`] | data behind a lock | `try_lock_for`, `try_lock_until` |
//! | [`RwLock`] | data for many readers or one writer | `try_read_for`, `try_write_for`, … |
//! | [`Condvar`] | waits for a change of the data in a [`Mutex`] | `wait_for`, `wait_until`, … |
//! | [`Once`] | runs a closure once | no |
//! | [`OnceLock`] | holds a value that is made once | no |
//! | [`WaitGroup`] | waits for a number of goroutines | no |
//! | [`ErrGroup`] | waits for goroutines that may fail; with a limit, a worker pool | no |
//! | [`Semaphore`] | limits how many goroutines do something | `acquire_timeout` |
//! | [`Barrier`] | lets goroutines wait for each other | no |
//!
//! The guards of `Mutex` and `RwLock` are those of the crate `lock_api`, and there is no poisoning.
//! The types whose names begin with `Raw` are for that crate.
//!
//! Every primitive except `ErrGroup` has a `const` constructor and works in a `static`. All of them
//! may be shared by goroutines, goroutines of several runtimes, and plain threads. A goroutine that
//! waits is parked; a thread that waits is blocked. A wait without a time limit cannot be ended
//! early from outside.

// # Implementation
// | file | contents |
// |---|---|
// | `*_word.rs` | the protocols, made of one atomic each; `trefoil-model` checks them |
// | `spin.rs` | whether to spin before a wait |
// | the others | one primitive each |
//
// `errgroup.rs` uses `context`, which is above the other files here.

mod barrier;
mod condvar;
mod errgroup;
mod mutex;
mod mutex_word;
mod once;
mod once_word;
mod rwlock;
mod rwlock_word;
mod semaphore;
mod spin;
mod waitgroup;

pub use barrier::{Barrier, BarrierWaitResult};
pub use condvar::{Condvar, RawCondvar, WaitTimeoutResult};
pub use errgroup::ErrGroup;
pub use mutex::{MappedMutexGuard, Mutex, MutexGuard, RawMutex};
pub use once::{Once, OnceLock};
pub use rwlock::{
    MappedRwLockReadGuard, MappedRwLockWriteGuard, RawRwLock, RwLock, RwLockReadGuard,
    RwLockWriteGuard,
};
pub use semaphore::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
pub use waitgroup::WaitGroup;
