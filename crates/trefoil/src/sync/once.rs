//! `Once`, `OnceLock` and `LazyLock`: those of std, parking goroutines; Go's `OnceFunc`; and an
//! initializer for async code.
//!
//! The state is in one word (`once_word.rs`). Goroutines, threads and tasks that wait for an
//! initializer are in a queue that is found by the address (`wait/table.rs`), and are woken all at
//! once.

use super::mutex::Mutex;
use super::once_word::{Begin, InitResult, OnPoison, OnceWord, WaitFor, WordState};
use crate::runtime::task_waiter;
use crate::sched::wait::holder::{self, Holder, ONCE_TAG};
use crate::sched::wait::inside;
use crate::sched::wait::list::{Node, WaitResult};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::table;
use crate::sched::wait::task_node::TaskNode;
use crate::sys::clock::NEVER;
use std::cell::UnsafeCell;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::AtomicU32;
use std::task::{Context, Poll};

/// Runs a closure once, however many goroutines call it. The method names are those of
/// [`std::sync::Once`].
///
/// Use it for initialization without a value; for a value use [`OnceLock`].
///
/// As in std, **a panic of the closure poisons the `Once`**: later calls panic, too, except
/// [`call_once_force`](Once::call_once_force). In Go a panic counts as done; [`once_fn`] is Go's
/// `sync.OnceFunc`.
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
#[repr(C)]
pub struct Once {
    /// The goroutine that runs the closure; not known for a future.
    runner: Holder,
    word: OnceWord,
}

const _: () = assert!(std::mem::offset_of!(Once, runner) == 0);

/// The state of a [`Once`]: what [`Once::state`] returns, and what the closure of
/// [`Once::call_once_force`] is called with.
///
/// It has the variants of parking_lot's `OnceState` and the method of
/// [`std::sync::OnceState`].
///
/// # Examples
/// ```
/// use trefoil::sync::{Once, OnceState};
/// let once = Once::new();
/// assert_eq!(once.state(), OnceState::New);
/// once.call_once_force(|before| {
///     assert!(!before.is_poisoned());
///     assert_eq!(once.state(), OnceState::InProgress);
/// });
/// assert_eq!(once.state(), OnceState::Done);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum OnceState {
    /// No closure has begun.
    New,
    /// The last closure has panicked.
    Poisoned,
    /// A closure runs.
    InProgress,
    /// A closure has returned.
    Done,
}

impl OnceState {
    /// Returns true if the last closure has panicked.
    ///
    /// # Examples
    /// ```
    /// use std::panic::{AssertUnwindSafe, catch_unwind};
    /// use trefoil::sync::Once;
    /// let once = Once::new();
    /// let failed = catch_unwind(AssertUnwindSafe(|| once.call_once(|| panic!("no luck"))));
    /// assert!(failed.is_err());
    /// assert!(once.state().is_poisoned());
    /// ```
    pub fn is_poisoned(&self) -> bool {
        *self == OnceState::Poisoned
    }
}

impl Once {
    /// Creates a `Once` whose closure has not run yet.
    pub const fn new() -> Once {
        Once { runner: Holder::NEW, word: OnceWord(AtomicU32::new(0)) }
    }

    /// Calls `f` if this is the first call. Otherwise waits until the closure of the first call has
    /// returned.
    ///
    /// When it returns, the closure of the first call has returned, and the caller sees everything
    /// that it wrote. `f` must not call `call_once` of the same `Once`: it would wait for itself
    /// forever.
    ///
    /// # Panics
    /// Panics if `f` is called and panics, and if the closure of an earlier call has panicked.
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
            self.call_slow(OnPoison::Refuse, |_| f());
        }
    }

    /// As [`call_once`](Once::call_once), and also calls `f` if the closure of an earlier call has
    /// panicked.
    ///
    /// If `f` returns, the `Once` is not poisoned any more.
    ///
    /// # Panics
    /// Panics if `f` is called and panics.
    ///
    /// # Examples
    /// ```
    /// use std::panic::{AssertUnwindSafe, catch_unwind};
    /// let once = trefoil::sync::Once::new();
    /// let fail = || once.call_once(|| panic!("no luck"));
    /// assert!(catch_unwind(AssertUnwindSafe(fail)).is_err());
    /// assert!(catch_unwind(AssertUnwindSafe(|| once.call_once(|| ()))).is_err());
    /// once.call_once_force(|state| assert!(state.is_poisoned()));
    /// once.call_once(|| unreachable!());
    /// ```
    #[inline]
    pub fn call_once_force<F: FnOnce(&OnceState)>(&self, f: F) {
        if !self.word.is_done() {
            self.call_slow(OnPoison::Ignore, f);
        }
    }

    #[cold]
    fn call_slow<F: FnOnce(&OnceState)>(&self, on_poison: OnPoison, f: F) {
        if let Some(before) = self.begin_or_wait(on_poison) {
            let mut finish = FinishOnDrop { once: self, result: InitResult::Poison };
            f(&before);
            finish.result = InitResult::Done;
        }
    }

    /// Returns true if the closure of a call has returned.
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

    /// Returns the state. Other goroutines may change it at any time, except [`OnceState::Done`],
    /// which is the last one.
    ///
    /// The example of [`OnceState`] shows it.
    pub fn state(&self) -> OnceState {
        match self.word.state() {
            WordState::New => OnceState::New,
            WordState::Poisoned => OnceState::Poisoned,
            WordState::Running => OnceState::InProgress,
            WordState::Done => OnceState::Done,
        }
    }

    /// Waits until the closure of a call has returned, and runs none.
    ///
    /// # Panics
    /// Panics if a closure has panicked, or panics while this waits.
    ///
    /// # Examples
    /// ```
    /// use trefoil::sync::Once;
    /// static READY: Once = Once::new();
    /// trefoil::run(|| {
    ///     let waiter = trefoil::go(|| READY.wait());
    ///     READY.call_once(|| ());
    ///     waiter.join().unwrap();
    /// });
    /// ```
    pub fn wait(&self) {
        self.wait_until_done(OnPoison::Refuse);
    }

    /// As [`wait`](Once::wait), and ignores closures that have panicked: it waits for one that
    /// returns.
    ///
    /// # Examples
    /// ```
    /// let once = trefoil::sync::Once::new();
    /// once.call_once(|| ());
    /// once.wait_force();
    /// ```
    pub fn wait_force(&self) {
        self.wait_until_done(OnPoison::Ignore);
    }

    fn wait_until_done(&self, on_poison: OnPoison) {
        while !self.word.is_done() {
            if on_poison == OnPoison::Refuse && self.word.state() == WordState::Poisoned {
                poisoned();
            }
            self.wait_slow(WaitFor::Completion(on_poison));
        }
    }

    /// If the caller must run the initializer, and then drop a [`FinishOnDrop`], returns the state
    /// before. Otherwise waits until the initializer is done, and returns None.
    ///
    /// # Panics
    /// Panics if an earlier initializer has panicked, unless the caller ignores that.
    fn begin_or_wait(&self, on_poison: OnPoison) -> Option<OnceState> {
        loop {
            match self.word.begin(on_poison) {
                Begin::Run { was_poisoned } => {
                    self.runner.set();
                    return Some(if was_poisoned { OnceState::Poisoned } else { OnceState::New });
                }
                Begin::Done => return None,
                Begin::Wait => self.wait_slow(WaitFor::EndOfRun),
                Begin::Poisoned => poisoned(),
            }
        }
    }

    #[cold]
    fn wait_slow(&self, wait_for: WaitFor) {
        let node = Node::new(0);
        holder::note_held_object(std::ptr::from_ref(self) as usize, NEVER);
        // Without a deadline there is no withdrawal.
        let result = node.sleep(WaitReason::Once, NEVER, |_| self.enqueue(&node, wait_for), |_| ());
        debug_assert_ne!(result, WaitResult::TimedOut);
    }

    /// The key of the queue.
    fn key(&self) -> usize {
        holder::tagged_key(self, ONCE_TAG)
    }

    /// Puts a waiter into the queue. Returns false if there is nothing to wait for.
    fn enqueue(&self, node: &Node, wait_for: WaitFor) -> bool {
        table::with_queue(self.key(), |queue| {
            let waits = self.word.queue_waiter(wait_for);
            if waits {
                queue.push_back(node);
            }
            waits
        })
    }
}

#[cold]
fn poisoned() -> ! {
    panic!("the closure of an earlier call has panicked: the Once is poisoned")
}

impl Default for Once {
    fn default() -> Once {
        Once::new()
    }
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once").field("state", &self.state()).finish()
    }
}

/// Ends the run of an initializer, even if it panics.
struct FinishOnDrop<'a> {
    once: &'a Once,
    result: InitResult,
}

impl Drop for FinishOnDrop<'_> {
    fn drop(&mut self) {
        let key = self.once.key();
        self.once.runner.clear();
        if self.once.word.finish(self.result) {
            inside(|here| table::with_queue(key, |queue| queue.take_all()).wake_all(here, 0));
        }
    }
}

/// The end of an initializer's run, which a task awaits.
struct InitEnd<'a> {
    once: &'a Once,
    node: TaskNode,
}

impl Future for InitEnd<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        const REASON: WaitReason = WaitReason::Once;
        // SAFETY: nothing is moved out of the pinned node.
        let this = unsafe { self.get_unchecked_mut() };
        let once = this.once;
        if this.node.waits() {
            let with_lock = |f: &mut dyn FnMut()| table::with_queue(once.key(), |_| f());
            return this.node.poll(context, REASON, with_lock).map(drop);
        }
        // SAFETY: the node is pinned, and `drop` cancels the wait; the `Once` is borrowed.
        let waits = unsafe {
            this.node.begin(context, REASON, |node, _| once.enqueue(node, WaitFor::EndOfRun))
        };
        if waits { Poll::Pending } else { Poll::Ready(()) }
    }
}

impl Drop for InitEnd<'_> {
    fn drop(&mut self) {
        if self.node.waits() {
            let withdraw =
                |node: &Node, _| table::with_queue(self.once.key(), |queue| queue.withdraw(node));
            // All waiters are woken together, so there is nothing to pass on.
            self.node.cancel(withdraw);
        }
    }
}

/// Holds a value that is made once. The method names are those of [`std::sync::OnceLock`].
///
/// Use it for a `static` whose value is known only at run time. If an initializer panics, the
/// `OnceLock` stays empty and the next caller runs its own initializer. Tasks use
/// [`get_or_init_async`](OnceLock::get_or_init_async).
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
        if self.once.begin_or_wait(OnPoison::Refuse).is_some() {
            let mut finish = FinishOnDrop { once: &self.once, result: InitResult::Retry };
            let value = f();
            // SAFETY: only the caller that runs the initializer writes, and no other caller reads
            // before `finish`.
            unsafe { (*self.value.get()).write(value) };
            finish.result = InitResult::Done;
        }
    }

    /// Returns the value. If there is none, awaits the future that `f` returns to make it:
    /// [`get_or_init`](OnceLock::get_or_init) in async code.
    ///
    /// Only one initializer runs at a time, be it a closure or a future. A task that comes
    /// meanwhile waits for it, and blocks no thread. The initializer must not use the same
    /// `OnceLock`: it would wait for itself forever.
    ///
    /// # Cancel
    /// Dropping the future loses nothing. If its initializer was running, the initializer is
    /// dropped too, the `OnceLock` stays empty, and the next caller runs its own; so do those that
    /// wait. An initializer that is neither polled nor dropped lets them wait.
    ///
    /// # Panics
    /// Panics if `f` or its future panics. The `OnceLock` stays empty.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    /// use trefoil::sync::OnceLock;
    /// use trefoil::time::sleep_async;
    ///
    /// static CONFIG: OnceLock<String> = OnceLock::new();
    ///
    /// async fn config() -> &'static str {
    ///     let load = || async {
    ///         sleep_async(Duration::from_millis(1)).await;
    ///         "loaded once".to_string()
    ///     };
    ///     CONFIG.get_or_init_async(load).await
    /// }
    ///
    /// trefoil::run(|| {
    ///     let tasks = [(); 3].map(|()| trefoil::task::spawn(config()));
    ///     for task in tasks {
    ///         assert_eq!(task.join().unwrap(), "loaded once");
    ///     }
    /// });
    /// ```
    pub async fn get_or_init_async<F, Init>(&self, f: F) -> &T
    where
        F: FnOnce() -> Init,
        Init: Future<Output = T>,
    {
        loop {
            match self.once.word.begin(OnPoison::Refuse) {
                Begin::Done => break,
                Begin::Poisoned => unreachable!("a OnceLock is never poisoned"),
                Begin::Wait => {
                    InitEnd { once: &self.once, node: TaskNode::new(0, task_waiter()) }.await;
                }
                Begin::Run { .. } => {
                    let mut finish = FinishOnDrop { once: &self.once, result: InitResult::Retry };
                    let value = f().await;
                    // SAFETY: as in `init_slow`.
                    unsafe { (*self.value.get()).write(value) };
                    finish.result = InitResult::Done;
                    break;
                }
            }
        }
        // SAFETY: as in `get`; the value is initialized now.
        unsafe { (*self.value.get()).assume_init_ref() }
    }

    /// Waits until there is a value, and returns it. Runs no initializer.
    ///
    /// # Examples
    /// ```
    /// use trefoil::sync::OnceLock;
    /// static PORT: OnceLock<u16> = OnceLock::new();
    /// trefoil::run(|| {
    ///     let client = trefoil::go(|| *PORT.wait());
    ///     PORT.set(8080).unwrap();
    ///     assert_eq!(client.join().unwrap(), 8080);
    /// });
    /// ```
    pub fn wait(&self) -> &T {
        self.once.wait_force();
        // SAFETY: as in `get`; the value is initialized now.
        unsafe { (*self.value.get()).assume_init_ref() }
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

/// A value that is made by a closure at its first use. The method names are those of
/// [`std::sync::LazyLock`].
///
/// A goroutine that comes while the closure runs parks until the value is there. If the closure
/// panics, the `LazyLock` is poisoned: every later use panics.
///
/// # Examples
/// ```
/// use trefoil::sync::LazyLock;
/// static WORDS: LazyLock<Vec<&str>> = LazyLock::new(|| "one two three".split(' ').collect());
/// trefoil::run(|| {
///     let len = trefoil::go(|| WORDS.len());
///     assert_eq!(len.join().unwrap(), 3);
/// });
/// ```
pub struct LazyLock<T, F = fn() -> T> {
    once: Once,
    /// The closure until `once` has run it, then the value. Neither after a panic.
    data: UnsafeCell<Lazy<T, F>>,
}

enum Lazy<T, F> {
    Closure(F),
    Value(T),
    Panicked,
}

// SAFETY: a shared one gives out `&T` (T: Sync); its closure runs on any thread (F: Send), and the
// value may be dropped on another thread than the thread that made it (T: Send).
unsafe impl<T: Sync + Send, F: Send> Sync for LazyLock<T, F> {}
impl<T: RefUnwindSafe + UnwindSafe, F: UnwindSafe> RefUnwindSafe for LazyLock<T, F> {}
impl<T: UnwindSafe, F: UnwindSafe> UnwindSafe for LazyLock<T, F> {}

impl<T, F: FnOnce() -> T> LazyLock<T, F> {
    /// Creates a `LazyLock` whose value `f` makes.
    pub const fn new(f: F) -> LazyLock<T, F> {
        LazyLock { once: Once::new(), data: UnsafeCell::new(Lazy::Closure(f)) }
    }

    /// Returns the value, and makes it first if this is the first use. A dereference does the same.
    ///
    /// # Panics
    /// Panics if the closure panics, or has panicked before.
    ///
    /// # Examples
    /// ```
    /// use trefoil::sync::LazyLock;
    /// let lazy = LazyLock::new(|| 6 * 7);
    /// assert_eq!(*LazyLock::force(&lazy), 42);
    /// ```
    #[inline]
    pub fn force(this: &LazyLock<T, F>) -> &T {
        this.once.call_once(|| {
            // SAFETY: only this closure accesses the data until `once` is done, and it runs once.
            let data = unsafe { &mut *this.data.get() };
            if let Lazy::Closure(f) = std::mem::replace(data, Lazy::Panicked) {
                *data = Lazy::Value(f());
            }
        });
        // SAFETY: `once` is done, so the data do not change while they are shared.
        match unsafe { &*this.data.get() } {
            Lazy::Value(value) => value,
            _ => unreachable!("a LazyLock without a value is poisoned"),
        }
    }
}

impl<T, F> LazyLock<T, F> {
    /// Returns the value, or `None` if it was not made yet. It does not wait.
    fn get(&self) -> Option<&T> {
        // SAFETY: as in `force`; the data are not accessed before `once` is done.
        match self.once.is_completed().then(|| unsafe { &*self.data.get() }) {
            Some(Lazy::Value(value)) => Some(value),
            _ => None,
        }
    }
}

impl<T, F: FnOnce() -> T> Deref for LazyLock<T, F> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        LazyLock::force(self)
    }
}

impl<T: Default> Default for LazyLock<T> {
    fn default() -> LazyLock<T> {
        LazyLock::new(T::default)
    }
}

impl<T: fmt::Debug, F> fmt::Debug for LazyLock<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.get() {
            Some(value) => f.debug_tuple("LazyLock").field(value).finish(),
            None => f.write_str("LazyLock(<uninit>)"),
        }
    }
}

/// Returns a function that calls `f` at its first call, and returns the same result at every call.
///
/// It is Go's `sync.OnceFunc`, `OnceValue` and `OnceValues`. Callers that come while `f` runs wait
/// for it. `T` is cloned for each caller: for a large result use an [`Arc`](std::sync::Arc), or a
/// [`LazyLock`], which lends it.
///
/// # Panics
/// Does not panic itself. If `f` panics, the returned function panics at every call: at the first
/// one with the panic of `f`, later with the same message. (A payload that is not a string has no
/// message; then a later panic says that `f` has panicked.)
///
/// # Examples
/// ```
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use trefoil::sync::once_fn;
///
/// static CALLS: AtomicU32 = AtomicU32::new(0);
/// trefoil::run(|| {
///     let answer = once_fn(|| {
///         CALLS.fetch_add(1, Ordering::Relaxed);
///         6 * 7
///     });
///     trefoil::scope(|s| {
///         for _ in 0..10 {
///             s.go(|| assert_eq!(answer(), 42));
///         }
///     });
///     assert_eq!(CALLS.load(Ordering::Relaxed), 1);
/// });
/// ```
pub fn once_fn<T, F>(f: F) -> impl Fn() -> T + Send + Sync
where
    T: Clone + Send + Sync,
    F: FnOnce() -> T + Send,
{
    // The closure is in a mutex only to be shared: `result` lets one caller in.
    let (f, result) = (Mutex::new(Some(f)), OnceLock::<Result<T, Option<String>>>::new());
    move || {
        let mut first = None;
        let known = result.get_or_init(|| {
            let f = f.lock().take().expect("a OnceLock keeps what its initializer returns");
            match catch_unwind(AssertUnwindSafe(f)) {
                Ok(value) => Ok(value),
                Err(payload) => {
                    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
                    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
                    first = Some(payload);
                    Err(text)
                }
            }
        });
        match (known, first) {
            (Ok(value), _) => value.clone(),
            (Err(_), Some(payload)) => resume_unwind(payload),
            (Err(Some(text)), None) => panic!("{text}"),
            (Err(None), None) => panic!("the closure of once_fn has panicked"),
        }
    }
}
