//! `Once` and `OnceLock`: those of std, parking goroutines.
//!
//! The protocol is in `once_word.rs`. Waiters are chained through their own frames and woken all at
//! once, so there is no queue and no lock.
//!
//! Invariant 1: a waiter in the chain is alive until it is woken; the waker reads its link first.

use super::once_word::{Begin, InitResult, OnceWord};
use crate::sched::Rt;
use crate::sched::wait;
use crate::sched::wait::inside;
use crate::sched::wait::reason::WaitReason;
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::AtomicUsize;

/// A waiter, in its own frame.
#[repr(align(8))]
struct OnceWaiter {
    sleeper: Cell<usize>,
    /// The address of the waiter that came before, or 0.
    previous: Cell<usize>,
}

/// Runs a closure once, however many goroutines call it.
///
/// Use it for initialization without a value; for a value use [`OnceLock`].
///
/// As in Go, **a panic counts as done**: it unwinds out of the `call_once` that ran the closure,
/// and later calls return at once. (With [`std::sync::Once`] each of them would panic.)
///
/// # Examples
/// ```
/// use trefoil::sync::Once;
/// static START: Once = Once::new();
/// trefoil::run(|| {
///     let hello = || START.call_once(|| println!("only once"));
///     trefoil::go(hello).join().unwrap();
///     hello();
///     assert!(START.is_completed());
/// });
/// ```
pub struct Once {
    word: OnceWord,
}

impl Once {
    /// Creates a `Once` whose closure has not run yet.
    pub const fn new() -> Once {
        Once { word: OnceWord(AtomicUsize::new(0)) }
    }

    /// Calls `f` if this is the first call. Otherwise waits until the first call has returned or
    /// panicked.
    ///
    /// When it returns, the closure of the first call has ended, and the caller sees everything
    /// that it wrote. `f` must not call `call_once` of the same `Once`: it would wait for itself
    /// forever.
    ///
    /// # Panics
    /// Panics if `f` is called and panics.
    ///
    /// # Examples
    /// ```
    /// let once = trefoil::sync::Once::new();
    /// let mut n = 0;
    /// once.call_once(|| n += 1);
    /// once.call_once(|| n += 1);
    /// assert_eq!(n, 1);
    /// ```
    #[inline]
    pub fn call_once<F: FnOnce()>(&self, f: F) {
        if !self.word.is_done() {
            self.call_slow(f);
        }
    }

    #[cold]
    fn call_slow<F: FnOnce()>(&self, f: F) {
        if self.begin_or_wait() {
            let _done = FinishOnDrop { once: self, result: InitResult::Done };
            f();
        }
    }

    /// Returns true if the closure of the first call has returned or panicked.
    ///
    /// # Examples
    /// ```
    /// let once = trefoil::sync::Once::new();
    /// assert!(!once.is_completed());
    /// once.call_once(|| ());
    /// assert!(once.is_completed());
    /// ```
    #[inline]
    pub fn is_completed(&self) -> bool {
        self.word.is_done()
    }

    /// Returns true if the caller must run the initializer, then drop a [`FinishOnDrop`]. Otherwise
    /// waits until the initializer is done.
    fn begin_or_wait(&self) -> bool {
        loop {
            match self.word.begin() {
                Begin::Run => return true,
                Begin::Done => return false,
                Begin::Wait => self.wait_slow(),
            }
        }
    }

    #[cold]
    fn wait_slow(&self) {
        let waiter = OnceWaiter { sleeper: Cell::new(0), previous: Cell::new(0) };
        wait::block(WaitReason::Once, |sleeper| {
            waiter.sleeper.set(sleeper);
            self.word.wait(&raw const waiter as usize, |previous| waiter.previous.set(previous))
        });
    }
}

impl Default for Once {
    fn default() -> Once {
        Once::new()
    }
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once").field("completed", &self.is_completed()).finish()
    }
}

/// Ends the run of an initializer, even if it panics.
struct FinishOnDrop<'a> {
    once: &'a Once,
    result: InitResult,
}

impl Drop for FinishOnDrop<'_> {
    fn drop(&mut self) {
        let last = self.once.word.finish(self.result);
        if last != 0 {
            inside(|here| wake_chain(here, last));
        }
    }
}

fn wake_chain(here: Option<Rt>, mut last: usize) {
    while last != 0 {
        // SAFETY: invariant 1. Both fields are read before the wake-up, after which the waiter is
        // gone.
        let (sleeper, previous) = unsafe {
            let waiter = &*(last as *const OnceWaiter);
            (waiter.sleeper.get(), waiter.previous.get())
        };
        wait::wake_here(here, sleeper);
        last = previous;
    }
}

/// Holds a value that is made once. The method names are those of [`std::sync::OnceLock`].
///
/// Use it for a `static` whose value is known only at run time. If an initializer panics, the
/// `OnceLock` stays empty and the next caller runs its own initializer.
///
/// # Examples
/// ```
/// use trefoil::sync::OnceLock;
/// static NAME: OnceLock<String> = OnceLock::new();
/// trefoil::run(|| {
///     let name = || NAME.get_or_init(|| "trefoil".to_string()).len();
///     assert_eq!(trefoil::go(name).join().unwrap() + name(), 14);
///     assert_eq!(NAME.set("another".to_string()), Err("another".to_string()));
/// });
/// ```
pub struct OnceLock<T> {
    once: Once,
    value: UnsafeCell<MaybeUninit<T>>,
    /// Tells the compiler that a drop may drop a T.
    owns: PhantomData<T>,
}

// SAFETY: a shared one gives out `&T` (T: Sync), and a value may be made on one thread and dropped,
// or taken, on another (T: Send).
unsafe impl<T: Sync + Send> Sync for OnceLock<T> {}
// SAFETY: it owns a T.
unsafe impl<T: Send> Send for OnceLock<T> {}
impl<T: RefUnwindSafe + UnwindSafe> RefUnwindSafe for OnceLock<T> {}
impl<T: UnwindSafe> UnwindSafe for OnceLock<T> {}

impl<T> OnceLock<T> {
    /// Creates an empty `OnceLock`.
    pub const fn new() -> OnceLock<T> {
        OnceLock {
            once: Once::new(),
            value: UnsafeCell::new(MaybeUninit::uninit()),
            owns: PhantomData,
        }
    }

    /// Returns the value, or `None` if there is none yet. It does not wait, even while an
    /// initializer runs.
    ///
    /// # Examples
    /// ```
    /// assert_eq!(trefoil::sync::OnceLock::<i32>::new().get(), None);
    /// assert_eq!(trefoil::sync::OnceLock::from(1).get(), Some(&1));
    /// ```
    #[inline]
    pub fn get(&self) -> Option<&T> {
        // SAFETY: the value is initialized, and does not change while it is shared.
        self.once.is_completed().then(|| unsafe { (*self.value.get()).assume_init_ref() })
    }

    /// Returns a mutable reference to the value, or `None` if there is none.
    ///
    /// # Examples
    /// ```
    /// let mut place = trefoil::sync::OnceLock::from(1);
    /// *place.get_mut().unwrap() += 1;
    /// assert_eq!(place.into_inner(), Some(2));
    /// ```
    pub fn get_mut(&mut self) -> Option<&mut T> {
        // SAFETY: as in `get`, and `&mut self` is exclusive.
        self.once.is_completed().then(|| unsafe { self.value.get_mut().assume_init_mut() })
    }

    /// Stores `value` if there is no value yet. If an initializer runs, waits for it.
    ///
    /// # Errors
    /// Returns `value` if there is a value already.
    ///
    /// # Examples
    /// ```
    /// let place = trefoil::sync::OnceLock::new();
    /// assert_eq!(place.set(1), Ok(()));
    /// assert_eq!(place.set(2), Err(2));
    /// ```
    pub fn set(&self, value: T) -> Result<(), T> {
        let mut value = Some(value);
        self.get_or_init(|| value.take().expect("called once"));
        value.map_or(Ok(()), Err)
    }

    /// Returns the value. If there is none, calls `f` to make it.
    ///
    /// Only one initializer runs at a time. A caller that comes meanwhile waits for it. `f` must
    /// not use `get_or_init` or `set` of the same `OnceLock`: it would wait for itself forever.
    ///
    /// # Panics
    /// Panics if `f` is called and panics. The `OnceLock` stays empty.
    ///
    /// # Examples
    /// ```
    /// let place = trefoil::sync::OnceLock::new();
    /// assert_eq!(*place.get_or_init(|| 6 * 7), 42);
    /// assert_eq!(*place.get_or_init(|| unreachable!()), 42);
    /// ```
    #[inline]
    pub fn get_or_init<F: FnOnce() -> T>(&self, f: F) -> &T {
        if !self.once.is_completed() {
            self.init_slow(f);
        }
        // SAFETY: as in `get`; the value is initialized now.
        unsafe { (*self.value.get()).assume_init_ref() }
    }

    #[cold]
    fn init_slow<F: FnOnce() -> T>(&self, f: F) {
        if self.once.begin_or_wait() {
            let mut finish = FinishOnDrop { once: &self.once, result: InitResult::Retry };
            let value = f();
            // SAFETY: only the caller that runs the initializer writes, and no other caller reads
            // before `finish`.
            unsafe { (*self.value.get()).write(value) };
            finish.result = InitResult::Done;
        }
    }

    /// Takes the value out, and leaves the `OnceLock` empty.
    ///
    /// # Examples
    /// ```
    /// let mut place = trefoil::sync::OnceLock::from(1);
    /// assert_eq!((place.take(), place.take()), (Some(1), None));
    /// ```
    pub fn take(&mut self) -> Option<T> {
        if !self.once.is_completed() {
            return None;
        }
        self.once = Once::new();
        // SAFETY: the value was initialized, and `once` does not say so any more.
        Some(unsafe { self.value.get_mut().assume_init_read() })
    }

    /// Returns the value, or `None` if there is none.
    ///
    /// # Examples
    /// ```
    /// assert_eq!(trefoil::sync::OnceLock::from("x").into_inner(), Some("x"));
    /// ```
    pub fn into_inner(mut self) -> Option<T> {
        self.take()
    }
}

impl<T> Drop for OnceLock<T> {
    fn drop(&mut self) {
        drop(self.take());
    }
}

impl<T> Default for OnceLock<T> {
    fn default() -> OnceLock<T> {
        OnceLock::new()
    }
}

impl<T> From<T> for OnceLock<T> {
    fn from(value: T) -> OnceLock<T> {
        let place = OnceLock::new();
        let _ = place.set(value);
        place
    }
}

impl<T: fmt::Debug> fmt::Debug for OnceLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get() {
            Some(value) => f.debug_tuple("OnceLock").field(value).finish(),
            None => f.write_str("OnceLock(<empty>)"),
        }
    }
}
