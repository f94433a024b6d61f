//! `scope`: goroutines that borrow.

use crate::goroutine::Join;
use crate::runtime;
use crate::sched::current_g;
use crate::sched::scope::ScopeData;
use crate::sched::spawn::{Place, Spec, spawn};
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Runs `f` with a [`Scope`] in which goroutines may borrow from the caller, and waits for all of them, also
/// when `f` or one of them panics. Like [`std::thread::scope`].
///
/// ```
/// trefoil::run(|| {
///     let mut numbers = vec![3, 1, 2];
///     let longest = trefoil::scope(|s| {
///         let len = s.go(|| numbers.len());
///         len.join().unwrap()
///     });
///     numbers.push(longest);
///     assert_eq!(numbers, [3, 1, 2, 3]);
/// });
/// ```
///
/// # Panics
/// If a goroutine of the scope panicked and nobody joined it.
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

/// Where scoped goroutines are started; see [`scope`].
pub struct Scope<'scope, 'env: 'scope> {
    data: ScopeData,
    // Invariant in both, as in std: neither may be shortened or lengthened.
    scope: PhantomData<&'scope mut &'scope ()>,
    env: PhantomData<&'env mut &'env ()>,
}

impl<'scope, 'env> Scope<'scope, 'env> {
    /// Starts `f` as a goroutine that may borrow what outlives the scope.
    ///
    /// # Panics
    /// When no memory is left for another goroutine.
    #[track_caller]
    pub fn go<F, T>(&'scope self, f: F) -> ScopedJoinHandle<'scope, T>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        match self.start(Spec::plain(), f) {
            Ok(handle) => handle,
            Err(e) => panic!("cannot start a goroutine: {e}"),
        }
    }

    pub(crate) fn start<F, T>(
        &'scope self,
        spec: Spec,
        f: F,
    ) -> io::Result<ScopedJoinHandle<'scope, T>>
    where
        F: FnOnce() -> T + Send + 'scope,
        T: Send + 'scope,
    {
        let spec = Spec { scope: &raw const self.data, ..spec };
        self.data.one_more();
        // SAFETY: F and T are Send; what they borrow outlives 'scope, and `scope` does not return before
        // the count is back at zero.
        let spawned = unsafe {
            if current_g().is_some() {
                spawn(Place::Here, spec, f)
            } else {
                runtime::default_sched().and_then(|sched| spawn(Place::In(sched), spec, f))
            }
        };
        match spawned {
            Ok(g) => Ok(ScopedJoinHandle {
                // SAFETY: just spawned, with result type T.
                inner: Some(unsafe { Join::new(g) }),
                data: &self.data,
            }),
            Err(e) => {
                self.data.one_less();
                Err(e)
            }
        }
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope").finish_non_exhaustive()
    }
}

/// The right to join a scoped goroutine. Dropping it leaves the wait to the end of the scope.
pub struct ScopedJoinHandle<'scope, T> {
    /// None only while it is being dropped.
    inner: Option<Join<T>>,
    data: &'scope ScopeData,
}

impl<T> ScopedJoinHandle<'_, T> {
    /// Waits for the goroutine's end.
    ///
    /// # Errors
    /// The payload, if the goroutine panicked.
    pub fn join(mut self) -> std::thread::Result<T> {
        match self.inner.take() {
            Some(join) => join.join(),
            None => unreachable!("taken only by join and drop"),
        }
    }

    fn g(&self) -> &crate::sched::g::G {
        match &self.inner {
            Some(join) => join.g(),
            None => unreachable!("taken only by join and drop"),
        }
    }

    /// Whether the goroutine has ended.
    pub fn is_finished(&self) -> bool {
        self.g().join.is_done()
    }

    /// The goroutine's id.
    pub fn id(&self) -> u64 {
        self.g().id()
    }

    /// The name given with [`Builder::name`](crate::Builder::name).
    pub fn name(&self) -> Option<&str> {
        self.g().name()
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
