//! `Barrier`: std's, parking goroutines.

use crate::sched::queue::{Batch, List, Node};
use crate::sched::reason::WaitReason;
use crate::sys::clock::NEVER;
use crate::sys::lock::Lock;
use std::fmt;

/// Lets `n` goroutines or threads wait for each other, again and again. The names are those of
/// [`std::sync::Barrier`].
///
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
    /// Those who have come; never `n` of them.
    waiting: Lock<List>,
}

impl Barrier {
    /// A barrier for `n`. With 0 or 1 nobody ever waits.
    pub const fn new(n: usize) -> Barrier {
        Barrier { n, waiting: Lock::new(List::new()) }
    }

    /// Waits until `n` have called it; then all go on, and the next `n` may come. The last to come
    /// is the leader.
    ///
    /// ```
    /// assert!(trefoil::sync::Barrier::new(1).wait().is_leader());
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
        // Without a deadline nobody withdraws.
        let _ = node.sleep(WaitReason::Barrier, NEVER, arrive, |_| ());
        BarrierWaitResult(leader)
    }
}

impl fmt::Debug for Barrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Barrier").field("n", &self.n).finish_non_exhaustive()
    }
}

/// Whether this was the leader of its [`Barrier::wait`].
///
/// ```
/// let result = trefoil::sync::Barrier::new(1).wait();
/// assert!(result.is_leader());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarrierWaitResult(bool);

impl BarrierWaitResult {
    /// One of the `n` is.
    pub const fn is_leader(&self) -> bool {
        self.0
    }
}
