//! `scope`: goroutines that may borrow from their caller.

use crate::goroutine::Builder;
use crate::join_handle::Join;
use crate::runtime::current_sched;
use crate::sched::goroutine::scope::ScopeData;
use crate::sched::goroutine::spawn::{SpawnOptions, spawn};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};

/// Runs `f` with a [`Scope`] whose goroutines may borrow from the caller, like
/// [`std::thread::scope`].
///
/// It returns the value of `f` after all goroutines of the scope have ended, and waits for them
/// even if `f` or a goroutine panics. Use it to split work over data that the caller owns.
///
/// ```
/// trefoil::run(|| {
///     let numbers = vec![1, 2, 3, 4];
///     let (left, right) = numbers.split_at(2);
///     let sum: i32 = trefoil::scope(|s| {
///         let left = s.go(|| left.iter().sum::<i32>());
///         let right = s.go(|| right.iter().sum::<i32>());
///         left.join().unwrap() + right.join().unwrap()
///     });
///     assert_eq!(sum, 10);
/// });
/// ```
///
/// # Panics
/// Panics with the payload of `f` if `f` panics. Panics if a goroutine of the scope panicked and
/// was not joined.
#[track_caller]
pub fn scope<'env, F, T>(f: F) -> T
where
    F: for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> T,
{
    let scope = Scope { data: ScopeData::new(), scope: PhantomData, env: PhantomData };
    let result = catch_unwind(AssertUnwindSafe(|| f(&scope)));
    scope.data.wait();
    match result {
        Err(payload) => resume_unwind(payload),
        Ok(_) if scope.data.panicked() => panic!("a scoped goroutine panicked"),
        Ok(value) => value,
    }
}

/// Starts goroutines that may borrow. [`scope`] passes it to its closure.
///
/// A goroutine of the scope can use it too, to start more goroutines in the same scope.
///
/// ```
/// let mut squares = [1, 2, 3];
/// trefoil::scope(|s| {
///     for n in &mut squares {
///         s.go(|| *n *= *n);
///     }
/// });
/// assert_eq!(squares, [1, 4, 9]);
/// ```
pub struct Scope<'scope, 'env: 'scope> {
    data: ScopeData,
    // Invariant in both lifetimes, as in std: the compiler may neither shorten nor lengthen them.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// Starts `f` as a goroutine that may borrow everything that outlives the scope.
    ///
    /// The goroutine runs in the caller's runtime, or in the default runtime if the caller is a
    /// plain thread. Use [`Builder::go_scoped`](crate::Builder::go_scoped) for a name or another
    /// stack size.
    ///
    /// ```
    /// let greeting = String::from("hello");
    /// trefoil::scope(|s| {
    ///     s.go(|| {
    ///         let inner = s.go(|| greeting.len()); // A scoped goroutine can start more.
    ///         assert_eq!(inner.join().unwrap(), 5);
    ///     });
    /// });
    /// ```
    ///
    /// # Panics
    /// Panics if there is no memory or address space for another goroutine, and on a plain thread
    /// if the default runtime cannot start.
    #[track_caller]
    pub fn go<F, T>(&'scope self, f: F) -> ScopedJoinHandle<'scope, T>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        match self.start(SpawnOptions::plain(), f) {
            Ok(handle) => handle,
            Err(e) => panic!("cannot start a goroutine: {e}"),
        }
    }

    /// Starts a goroutine of the scope.
    pub(crate) fn start<F, T>(
        &'scope self,
        options: SpawnOptions,
        f: F,
    ) -> io::Result<ScopedJoinHandle<'scope, T>>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        let options = SpawnOptions { scope: &raw const self.data, ..options };
        self.data.add();
        // SAFETY: F and T are Send. What they borrow outlives 'scope, and `scope` does not return
        // before the count of its goroutines is zero.
        let spawned = unsafe { current_sched().and_then(|sched| spawn(sched, options, f)) };
        match spawned {
            Ok(g) => Ok(ScopedJoinHandle {
                // SAFETY: just spawned with result type T, and this is its only handle.
                inner: Some(unsafe { Join::new(g) }),
                data: &self.data,
            }),
            Err(e) => {
                self.data.cancel_add();
                Err(e)
            }
        }
    }
}

impl Builder {
    /// Starts `f` as a goroutine with these settings in a [`scope`](crate::scope()), so that `f`
    /// may borrow.
    ///
    /// ```
    /// let words = ["to", "be"];
    /// let count = trefoil::scope(|s| {
    ///     let counter = trefoil::Builder::new().name("counter");
    ///     let handle = counter.go_scoped(s, || words.len()).unwrap();
    ///     assert_eq!(handle.name(), Some("counter"));
    ///     handle.join().unwrap()
    /// });
    /// assert_eq!(count, 2);
    /// ```
    ///
    /// # Errors
    /// The errors of [`Builder::go`].
    #[track_caller]
    pub fn go_scoped<'scope, 'env, F, T>(
        self,
        scope: &'scope Scope<'scope, 'env>,
        f: F,
    ) -> io::Result<ScopedJoinHandle<'scope, T>>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        scope.start(self.into_options(Location::caller()), f)
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").finish_non_exhaustive()
    }
}

/// The right to wait for a goroutine of a [`scope`] and to take its result.
///
/// [`Scope::go`] returns it. It cannot leave its scope.
///
/// ```
/// let text = String::from("to be or not");
/// let words = trefoil::scope(|s| {
///     let handle = s.go(|| text.split(' ').count());
///     handle.join().unwrap()
/// });
/// assert_eq!(words, 4);
/// ```
///
/// # Drop
/// Dropping the handle does not detach the goroutine: the scope waits for it when it ends. If the
/// goroutine panicked, the scope panics then.
pub struct ScopedJoinHandle<'scope, T> {
    /// None only while it is being dropped.
    inner: Option<Join<T>>,
    data: &'scope ScopeData,
}

impl<T> ScopedJoinHandle<'_, T> {
    /// Waits for the goroutine to end and returns its result.
    ///
    /// A caller that is a goroutine parks; a plain thread blocks.
    ///
    /// # Errors
    /// Returns the payload of the panic if the goroutine panicked. The scope does not panic for a
    /// goroutine that was joined.
    ///
    /// ```
    /// let survived = trefoil::scope(|s| {
    ///     let handle = s.go(|| panic!("no luck"));
    ///     handle.join().is_err()
    /// });
    /// assert!(survived);
    /// ```
    pub fn join(mut self) -> std::thread::Result<T> {
        match self.inner.take() {
            Some(join) => join.join(),
            None => unreachable!("taken only by join and drop"),
        }
    }

    fn inner(&self) -> &Join<T> {
        match &self.inner {
            Some(join) => join,
            None => unreachable!("taken only by join and drop"),
        }
    }

    /// Returns true if the goroutine has ended, so that [`join`](Self::join) returns at once.
    pub fn is_finished(&self) -> bool {
        self.inner().is_finished()
    }

    /// Returns the goroutine's id. A runtime never uses an id twice.
    pub fn id(&self) -> u64 {
        self.inner().id()
    }

    /// Returns the name that [`Builder::name`](crate::Builder::name) has set.
    pub fn name(&self) -> Option<&str> {
        self.inner().name()
    }
}

impl<T> Drop for ScopedJoinHandle<'_, T> {
    fn drop(&mut self) {
        if let Some(join) = self.inner.take()
            && join.detach() == Some(true)
        {
            self.data.note_panic();
        }
    }
}

impl<T> fmt::Debug for ScopedJoinHandle<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScopedJoinHandle").field("id", &self.id()).finish_non_exhaustive()
    }
}
