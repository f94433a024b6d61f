//! `Barrier`: that of std, parking goroutines.

use crate::sched::wait::list::{Batch, List, Node};
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::NEVER;
use crate::sys::lock::Lock;
use std::fmt;

/// Lets `n` goroutines or threads wait for each other. The method names are those of
/// [`std::sync::Barrier`].
///
/// Use it to start goroutines together, or to separate the phases of a computation. A barrier can
/// be used any number of times.
///
/// # Examples
/// ```
/// use trefoil::sync::Barrier;
/// static START: Barrier = Barrier::new(4);
/// trefoil::run(|| {
///     let handles: Vec<_> = (0..4).map(|_| trefoil::go(|| START.wait().is_leader())).collect();
///     let leaders = handles.into_iter().map(|h| h.join().unwrap());
///     assert_eq!(leaders.filter(|&leader| leader).count(), 1);
/// });
/// ```
pub struct Barrier {
    n: usize,
    /// The callers that wait: always fewer than `n`.
    waiting: Lock<List>,
}

impl Barrier {
    /// Creates a barrier for `n` goroutines. With 0 or 1 no caller ever waits.
    pub const fn new(n: usize) -> Barrier {
        Barrier { n, waiting: Lock::new(List::new()) }
    }

    /// Waits until `n` goroutines have called it.
    ///
    /// Then all of them continue, and the barrier is ready for the next `n`. The goroutine that
    /// came last is the leader.
    ///
    /// # Cancel
    /// The wait cannot be ended early: it needs `n` callers.
    ///
    /// # Examples
    /// ```
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use trefoil::sync::Barrier;
    /// static ARRIVED: AtomicU32 = AtomicU32::new(0);
    /// static ALL: Barrier = Barrier::new(3);
    /// trefoil::run(|| {
    ///     trefoil::scope(|s| {
    ///         for _ in 0..3 {
    ///             s.go(|| {
    ///                 ARRIVED.fetch_add(1, Ordering::Relaxed);
    ///                 ALL.wait();
    ///                 assert_eq!(ARRIVED.load(Ordering::Relaxed), 3);
    ///             });
    ///         }
    ///     });
    /// });
    /// ```
    pub fn wait(&self) -> BarrierWaitResult {
        let node = Node::new(0);
        let mut leader = false;
        let arrive = |rt| {
            let mut waiting = self.waiting.lock();
            leader = waiting.len() as usize + 1 >= self.n;
            if leader {
                let all: Batch = waiting.take_all();
                drop(waiting);
                all.wake_all(rt, 0);
            } else {
                waiting.push_back(&node);
            }
            !leader
        };
        // Without a deadline there is no withdrawal.
        let _ = node.sleep(WaitReason::Barrier, NEVER, arrive, |_| ());
        BarrierWaitResult(leader)
    }
}

impl fmt::Debug for Barrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Barrier").field("n", &self.n).finish_non_exhaustive()
    }
}

/// Tells whether a caller of [`Barrier::wait`] is the leader of its round.
///
/// # Examples
/// ```
/// let result = trefoil::sync::Barrier::new(1).wait();
/// assert!(result.is_leader());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierWaitResult(bool);

impl BarrierWaitResult {
    /// Returns true for exactly one of the `n` goroutines of a round.
    pub const fn is_leader(&self) -> bool {
        self.0
    }
}
