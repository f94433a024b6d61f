//! `Once` and `OnceLock`: those of std, parking goroutines; and an initializer for async code.
//!
//! The state is in one word (`once_word.rs`). Goroutines, threads and tasks that wait for an
//! initializer are in a queue that is found by the address (`wait/table.rs`), and are woken all at
//! once.

use super::once_word::{Begin, InitResult, OnceWord};
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
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::pin::Pin;
use std::sync::atomic::AtomicU32;
use std::task::{Context, Poll};

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
#[repr(C)]
pub struct Once {
    /// The goroutine that runs the closure; not known for a future.
    runner: Holder,
    word: OnceWord,
}

const _: () = assert!(std::mem::offset_of!(Once, runner) == 0);

impl Once {
    /// Creates a `Once` whose closure has not run yet.
    pub const fn new() -> Once {
        Once { runner: Holder::NEW, word: OnceWord(AtomicU32::new(0)) }
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
                Begin::Run => {
                    self.runner.set();
                    return true;
                }
                Begin::Done => return false,
                Begin::Wait => self.wait_slow(),
            }
        }
    }

    #[cold]
    fn wait_slow(&self) {
        let node = Node::new(0);
        holder::note_held_object(std::ptr::from_ref(self) as usize, NEVER);
        // Without a deadline there is no withdrawal.
        let result = node.sleep(WaitReason::Once, NEVER, |_| self.enqueue(&node), |_| ());
        debug_assert_ne!(result, WaitResult::TimedOut);
    }

    /// The key of the queue.
    fn key(&self) -> usize {
        holder::tagged_key(self, ONCE_TAG)
    }

    /// Puts a waiter into the queue. Returns false if no initializer runs.
    fn enqueue(&self, node: &Node) -> bool {
        table::with_queue(self.key(), |queue| {
            let waits = self.word.queue_waiter();
            if waits {
                queue.push_back(node);
            }
            waits
        })
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
        let waits = unsafe { this.node.begin(context, REASON, |node, _| once.enqueue(node)) };
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
        if self.once.begin_or_wait() {
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
    /// Only one initializer runs at a time, be it a closure or a future. A task that comes meanwhile
    /// waits for it, and blocks no thread. The initializer must not use the same `OnceLock`: it
    /// would wait for itself forever.
    ///
    /// # Cancel
    /// Dropping the future loses nothing. If its initializer was running, the initializer is dropped
    /// too, the `OnceLock` stays empty, and the next caller runs its own; so do those that wait. An
    /// initializer that is neither polled nor dropped lets them wait.
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
            match self.once.word.begin() {
                Begin::Done => break,
                Begin::Wait => {
                    InitEnd { once: &self.once, node: TaskNode::new(0, task_waiter()) }.await;
                }
                Begin::Run => {
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
