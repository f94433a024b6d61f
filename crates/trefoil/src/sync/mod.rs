//! Locks and meeting points that park goroutines: std's names and Go's rules.
//!
//! | | |
//! |---|---|
//! | [`Mutex`], [`RwLock`], [`Condvar`] | data behind a lock; guards are `lock_api`'s, there is no poisoning |
//! | [`Once`], [`OnceLock`] | what happens once |
//! | [`WaitGroup`], [`ErrGroup`] | waiting for goroutines; with a limit, a worker pool |
//! | [`Semaphore`], [`Barrier`] | permits; waiting for each other |
//!
//! All of them (but `ErrGroup`) have `const` constructors and work in a `static`. All may be shared
//! by goroutines, goroutines of several runtimes, and plain threads: a goroutine that waits is
//! parked, a thread that waits is blocked.
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
//! # How it is made
//! | file | what |
//! |---|---|
//! | `mutex_word.rs`, `rwlock_word.rs`, `once_word.rs` | protocols made of atomics only, checked by `trefoil-model` |
//! | the others | one primitive each |

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
