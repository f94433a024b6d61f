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
//! | item | purpose | with a time limit | async |
//! |---|---|---|---|
//! | [`Mutex`] | data behind a lock | `try_lock_for`, … | [`MutexExt`] |
//! | [`RwLock`] | data for many readers or one writer | `try_read_for`, … | [`RwLockExt`] |
//! | [`Condvar`] | waits for a change of the data in a [`Mutex`] | `wait_for`, … | no |
//! | [`Notify`] | waits for an event without data | no | `notified` |
//! | [`Once`] | runs a closure once | no | no |
//! | [`OnceLock`] | holds a value that is made once | no | `get_or_init_async` |
//! | [`LazyLock`], [`once_fn`] | a value that its first use makes | no | no |
//! | [`Pool`] | keeps unused objects for the next user | no | no |
//! | [`WaitGroup`] | waits for a number of goroutines | no | `wait_async` |
//! | [`ErrGroup`] | waits for goroutines that may fail; a worker pool | no | no |
//! | [`Semaphore`] | limits how many do something at once | `acquire_timeout` | `acquire_async` |
//! | [`Barrier`] | lets goroutines wait for each other | no | `wait_async` |
//!
//! The guards of `Mutex` and `RwLock` are those of the crate `lock_api`, and there is no poisoning.
//! The types whose names begin with `Raw` are for that crate. Guards and permits are `Send`, so
//! async code may hold them across an `await`.
//!
//! Every primitive except `ErrGroup` has a `const` constructor and works in a `static`. All of them
//! may be shared by goroutines and tasks of several runtimes, and plain threads. A goroutine that
//! waits is parked; a thread that waits is blocked. A wait without a time limit cannot be ended
//! early from outside.
//!
//! A task may call the blocking methods, too: then its carrier parks ([`task`](crate::task)). The
//! methods whose names end with `async` return futures: a task that awaits one needs no stack
//! meanwhile. Goroutines, tasks and threads wait in one queue, and are served by the same rules. A
//! future may be dropped at any time: what it was given is passed on to the next that waits.

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
mod notify;
mod once;
mod once_word;
mod pool;
mod rwlock;
mod rwlock_word;
mod semaphore;
mod spin;
mod waitgroup;

pub use barrier::{Barrier, BarrierFuture, BarrierWaitResult};
pub use condvar::{Condvar, WaitTimeoutResult};
pub use errgroup::ErrGroup;
pub use mutex::{LockFuture, MappedMutexGuard, Mutex, MutexExt, MutexGuard, RawMutex};
pub use notify::{Notified, Notify};
pub use once::{LazyLock, Once, OnceLock, OnceState, once_fn};
pub use pool::{Pool, PoolGuard};
pub use rwlock::{
    MappedRwLockReadGuard, MappedRwLockWriteGuard, RawRwLock, ReadFuture, RwLock, RwLockExt,
    RwLockReadGuard, RwLockUpgradableReadGuard, RwLockWriteGuard, WriteFuture,
};
pub use semaphore::{AcquireFuture, OwnedSemaphorePermit, Semaphore, SemaphorePermit};
pub use waitgroup::{WaitGroup, WaitGroupFuture};
