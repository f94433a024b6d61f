//! `ErrGroup`: Go's `errgroup`, and the worker pool.
//!
//! There is no pool with workers that wait for tasks: they would save the start of a thread, but
//! starting a goroutine is as cheap as sending it a task. What remains is a limit on how many tasks
//! run at once: [`ErrGroup::set_limit`], as in Go.

use super::mutex::Mutex;
use super::semaphore::{OwnedSemaphorePermit, Semaphore};
use super::waitgroup::{DoneGuard, WaitGroup};
use crate::context::{Cancel, CancelCause, Context, ContextError};
use crate::goroutine::go;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// Waits for goroutines of which each may fail, and returns the first error.
///
/// It is Go's `errgroup`. With [`set_limit`](ErrGroup::set_limit) it is a worker pool. Clones are
/// handles of the same group.
///
/// # Drop
/// Dropping a group does not wait for its goroutines; they continue, and their errors are dropped.
///
/// # Examples
/// ```
/// use trefoil::sync::ErrGroup;
/// trefoil::run(|| {
///     let group = ErrGroup::new();
///     for n in ["1", "2", "three"] {
///         group.go(move || n.parse::<i32>().map(drop));
///     }
///     assert!(group.wait().is_err());
/// });
/// ```
///
/// A worker pool:
/// ```
/// use trefoil::sync::ErrGroup;
/// trefoil::run(|| {
///     let pool = ErrGroup::<String>::new();
///     pool.set_limit(4);
///     for page in 0..100 {
///         pool.go(move || {
///             println!("at most four at once: page {page}");
///             Ok(())
///         });
///     }
///     pool.wait().unwrap();
/// });
/// ```
pub struct ErrGroup<E> {
    state: Arc<GroupState<E>>,
}

struct GroupState<E> {
    running: WaitGroup,
    /// None if there is no limit.
    limit: Mutex<Option<Arc<Semaphore>>>,
    /// The first failure of a goroutine.
    first: Mutex<Option<Failure<E>>>,
    context: GroupContext<E>,
}

/// The context that a group cancels.
enum GroupContext<E> {
    None,
    WithCancel(Cancel),
    WithCause {
        cancel: CancelCause,
        /// Makes the cause of the first error. None after its only call, and when a `wait` has
        /// cancelled the context.
        make_cause: Mutex<Option<MakeCause<E>>>,
    },
}

type MakeCause<E> = Box<dyn FnOnce(&E) -> Box<dyn Error + Send + Sync> + Send>;

enum Failure<E> {
    Error(E),
    Panic,
}

impl<E: Send + 'static> ErrGroup<E> {
    /// Creates a group without goroutines and without a limit.
    pub fn new() -> ErrGroup<E> {
        ErrGroup::make(GroupContext::None)
    }

    /// Creates a group, and a context below `ctx` for its goroutines.
    ///
    /// The new context is cancelled when the first goroutine fails, or when [`ErrGroup::wait`]
    /// returns. The goroutines should end when their context is done: the group does not stop them.
    ///
    /// # Examples
    /// ```
    /// use trefoil::context::Context;
    /// use trefoil::sync::ErrGroup;
    /// trefoil::run(|| {
    ///     let (group, ctx) = ErrGroup::with_context(&Context::background());
    ///     group.go(|| Err("broken"));
    ///     group.go(move || {
    ///         let _ = ctx.done().recv(); // returns when the other goroutine has failed
    ///         Ok(())
    ///     });
    ///     assert_eq!(group.wait(), Err("broken"));
    /// });
    /// ```
    pub fn with_context(ctx: &Context) -> (ErrGroup<E>, Context) {
        let (ctx, cancel) = ctx.with_cancel();
        (ErrGroup::make(GroupContext::WithCancel(cancel)), ctx)
    }

    /// As [`with_context`](ErrGroup::with_context), and the first error is the cause of the
    /// context's end: `f` makes the cause of it, an error or a text.
    ///
    /// [`Context::cause`] returns the cause, for the new context and the contexts below it. If the
    /// first failure was a panic, or if no goroutine failed, there is no error, so `f` is not called
    /// and the cause is [`ContextError::Canceled`].
    ///
    /// The goroutine that failed calls `f`, at most once, and cancels the context when `f` returns.
    /// If the group is used again after a [`wait`](ErrGroup::wait), `f` is not called: the context
    /// has been cancelled. A panic in `f` counts as a panic of the goroutine.
    ///
    /// # Examples
    /// ```
    /// use std::io;
    /// use trefoil::context::Context;
    /// use trefoil::sync::ErrGroup;
    /// trefoil::run(|| {
    ///     let cause = |e: &io::Error| format!("a worker failed: {e}");
    ///     let (group, ctx) = ErrGroup::with_context_cause(&Context::background(), cause);
    ///     group.go(|| Err(io::Error::other("disk full")));
    ///     group.go(move || {
    ///         let _ = ctx.done().recv(); // returns when the other goroutine has failed
    ///         assert_eq!(ctx.cause().unwrap().to_string(), "a worker failed: disk full");
    ///         Ok(())
    ///     });
    ///     assert_eq!(group.wait().unwrap_err().to_string(), "disk full");
    /// });
    /// ```
    ///
    /// An error that is `Clone` may be the cause itself: `ErrGroup::with_context_cause(&ctx,
    /// MyError::clone)`.
    pub fn with_context_cause<F, C>(ctx: &Context, f: F) -> (ErrGroup<E>, Context)
    where
        F: FnOnce(&E) -> C + Send + 'static,
        C: Into<Box<dyn Error + Send + Sync>>,
    {
        let (ctx, cancel) = ctx.with_cancel_cause();
        let make_cause: MakeCause<E> = Box::new(move |error| f(error).into());
        let make_cause = Mutex::new(Some(make_cause));
        (ErrGroup::make(GroupContext::WithCause { cancel, make_cause }), ctx)
    }

    fn make(context: GroupContext<E>) -> ErrGroup<E> {
        let state = GroupState {
            running: WaitGroup::new(),
            limit: Mutex::new(None),
            first: Mutex::new(None),
            context,
        };
        ErrGroup { state: Arc::new(state) }
    }

    /// Starts `f` as a goroutine of the group. If the limit is reached, waits until a goroutine of
    /// the group ends.
    ///
    /// With a limit of 0 it waits forever.
    ///
    /// # Panics
    /// Panics if no memory is left for another goroutine, or if the group is used again while a
    /// [`wait`](ErrGroup::wait) has not returned.
    ///
    /// # Examples
    /// ```
    /// let group = trefoil::sync::ErrGroup::<&str>::new();
    /// group.go(|| Err("no"));
    /// assert_eq!(group.wait(), Err("no"));
    /// ```
    #[track_caller]
    pub fn go<F>(&self, f: F)
    where
        F: FnOnce() -> Result<(), E> + Send + 'static,
    {
        let limit = self.state.limit.lock().clone();
        self.start(limit.map(Semaphore::acquire_owned), f);
    }

    /// Starts `f` as a goroutine of the group unless the limit is reached. Returns whether it was
    /// started.
    ///
    /// # Panics
    /// Panics if no memory is left for another goroutine, or if the group is used again while a
    /// [`wait`](ErrGroup::wait) has not returned.
    ///
    /// # Examples
    /// ```
    /// let group = trefoil::sync::ErrGroup::<()>::new();
    /// group.set_limit(0);
    /// assert!(!group.try_go(|| Ok(())));
    /// ```
    #[track_caller]
    pub fn try_go<F>(&self, f: F) -> bool
    where
        F: FnOnce() -> Result<(), E> + Send + 'static,
    {
        let limit = self.state.limit.lock().clone();
        let permit = match limit.map(Semaphore::try_acquire_owned) {
            None => None,
            Some(Some(permit)) => Some(permit),
            Some(None) => return false,
        };
        self.start(permit, f);
        true
    }

    #[track_caller]
    fn start<F>(&self, permit: Option<OwnedSemaphorePermit>, f: F)
    where
        F: FnOnce() -> Result<(), E> + Send + 'static,
    {
        let done = self.state.running.done_guard();
        let member = GroupMember { group: self.state.clone(), result: None, permit, done };
        go(move || {
            let mut member = member;
            member.result = Some(f());
        });
    }

    /// Lets at most `n` goroutines of the group run at once. With 0, none can be started.
    ///
    /// # Panics
    /// Panics if goroutines of the group are running.
    ///
    /// # Examples
    /// ```
    /// let group = trefoil::sync::ErrGroup::<()>::new();
    /// group.set_limit(1);
    /// group.go(|| Ok(()));
    /// group.go(|| Ok(())); // waits for the first
    /// group.wait().unwrap();
    /// ```
    #[track_caller]
    pub fn set_limit(&self, n: usize) {
        let mut limit = self.state.limit.lock();
        let running = self.state.running.count();
        assert!(
            running == 0,
            "ErrGroup: the limit was changed while {running} goroutines of the group were running"
        );
        *limit = Some(Arc::new(Semaphore::new(n.min(Semaphore::MAX_PERMITS))));
    }

    /// Waits until all goroutines of the group have ended. After that the group may be used again.
    ///
    /// A group of [`with_context`](ErrGroup::with_context) or
    /// [`with_context_cause`](ErrGroup::with_context_cause) cancels its context before this returns.
    /// The context stays cancelled if the group is used again.
    ///
    /// # Errors
    /// Returns the first error that a goroutine of the group returned. The error is taken out of
    /// the group: a second `wait` does not return it again.
    ///
    /// # Panics
    /// Panics if the first failure was a panic.
    ///
    /// # Cancel
    /// The wait ends only with the goroutines. Cancel the context that was given to
    /// [`with_context`](ErrGroup::with_context) or
    /// [`with_context_cause`](ErrGroup::with_context_cause) to tell them to end.
    ///
    /// # Examples
    /// ```
    /// use trefoil::sync::ErrGroup;
    /// trefoil::run(|| {
    ///     let group = ErrGroup::new();
    ///     group.go(|| "7".parse::<i32>().map(drop));
    ///     group.go(|| "seven".parse::<i32>().map(drop));
    ///     assert!(group.wait().is_err());
    ///     assert!(group.wait().is_ok()); // the error was taken out
    /// });
    /// ```
    #[track_caller]
    pub fn wait(&self) -> Result<(), E> {
        self.state.running.wait();
        self.state.context.cancel();
        let first = self.state.first.lock().take();
        match first {
            None => Ok(()),
            Some(Failure::Error(e)) => Err(e),
            Some(Failure::Panic) => panic!("a goroutine of the group panicked"),
        }
    }
}

impl<E> GroupContext<E> {
    /// Cancels the context without a cause.
    fn cancel(&self) {
        match self {
            GroupContext::None => {}
            GroupContext::WithCancel(cancel) => cancel.cancel(),
            GroupContext::WithCause { cancel, make_cause } => {
                cancel.cancel(ContextError::Canceled);
                let unused = make_cause.lock().take();
                // The user's `drop` runs without the lock.
                drop(unused);
            }
        }
    }

    /// Cancels the context because of the first error, also if the user's function panics.
    fn cancel_for(&self, error: &E) {
        let _cancel_anyway = CancelAtDrop(self);
        if let GroupContext::WithCause { cancel, make_cause } = self {
            // The user's function runs without the lock.
            let make_cause = make_cause.lock().take();
            if let Some(make_cause) = make_cause {
                cancel.cancel(make_cause(error));
            }
        }
    }
}

/// Cancels the context without a cause, unless it is done already.
struct CancelAtDrop<'a, E>(&'a GroupContext<E>);

impl<E> Drop for CancelAtDrop<'_, E> {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl<E> GroupState<E> {
    /// A goroutine failed: returns whether it is the first. Then its failure is a panic, until it
    /// stores its error: the user's function may panic meanwhile. No `wait` returns before the
    /// goroutine has ended.
    fn claim_first(&self) -> bool {
        let mut first = self.first.lock();
        let is_first = first.is_none();
        if is_first {
            *first = Some(Failure::Panic);
        }
        is_first
    }
}

/// A goroutine of the group, until it ends. The fields are dropped in this order, after `drop`.
struct GroupMember<E> {
    group: Arc<GroupState<E>>,
    /// None if the goroutine panicked.
    result: Option<Result<(), E>>,
    #[expect(dead_code, reason = "dropped at the end")]
    permit: Option<OwnedSemaphorePermit>,
    #[expect(dead_code, reason = "dropped at the end")]
    done: DoneGuard,
}

impl<E> Drop for GroupMember<E> {
    fn drop(&mut self) {
        let error = match self.result.take() {
            Some(Ok(())) => return,
            Some(Err(e)) => Some(e),
            None => None,
        };
        if !self.group.claim_first() {
            return;
        }
        let Some(error) = error else { return self.group.context.cancel() };
        self.group.context.cancel_for(&error);
        *self.group.first.lock() = Some(Failure::Error(error));
    }
}

impl<E> Clone for ErrGroup<E> {
    fn clone(&self) -> ErrGroup<E> {
        ErrGroup { state: self.state.clone() }
    }
}

impl<E: Send + 'static> Default for ErrGroup<E> {
    fn default() -> ErrGroup<E> {
        ErrGroup::new()
    }
}

impl<E> fmt::Debug for ErrGroup<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ErrGroup").field("running", &self.state.running.count()).finish()
    }
}
