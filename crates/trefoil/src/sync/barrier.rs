//! `Barrier`: that of std, parking goroutines.

use crate::runtime::task_waiter;
use crate::sched::Rt;
use crate::sched::wait::list::{Batch, List, Node};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::task_node::TaskNode;
use crate::sys::clock::NEVER;
use crate::sys::lock::Lock;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

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
            leader = self.arrive(&node, rt);
            !leader
        };
        // Without a deadline there is no withdrawal.
        let _ = node.sleep(WaitReason::Barrier, NEVER, arrive, |_| ());
        BarrierWaitResult(leader)
    }

    /// Waits until `n` goroutines or tasks have called it: [`wait`](Barrier::wait) for async code.
    ///
    /// # Cancel
    /// The future may be dropped at any time. If its round is not complete, it does not count any
    /// more.
    ///
    /// # Examples
    /// ```
    /// use trefoil::sync::Barrier;
    /// static START: Barrier = Barrier::new(2);
    /// trefoil::run(|| {
    ///     let task = trefoil::task::spawn(async { START.wait_async().await.is_leader() });
    ///     assert_ne!(START.wait().is_leader(), task.join().unwrap());
    /// });
    /// ```
    pub fn wait_async(&self) -> BarrierFuture<'_> {
        BarrierFuture { barrier: self, node: TaskNode::new(0, task_waiter()) }
    }

    /// Counts an arrival: wakes the others and returns true if it is the last, or else puts the
    /// node into the list.
    fn arrive(&self, node: &Node, rt: Option<Rt>) -> bool {
        let mut waiting = self.waiting.lock();
        let leader = waiting.len() as usize + 1 >= self.n;
        if leader {
            let all: Batch = waiting.take_all();
            drop(waiting);
            all.wake_all(rt, 0);
        } else {
            waiting.push_back(node);
        }
        leader
    }
}

/// The end of a round of a [`Barrier`], which a task awaits: returned by [`Barrier::wait_async`].
///
/// # Examples
/// ```
/// let alone = trefoil::sync::Barrier::new(1);
/// assert!(trefoil::block_on(alone.wait_async()).is_leader());
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct BarrierFuture<'a> {
    barrier: &'a Barrier,
    node: TaskNode,
}

impl Future for BarrierFuture<'_> {
    type Output = BarrierWaitResult;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BarrierWaitResult> {
        // SAFETY: nothing is moved out of the pinned node.
        let this = unsafe { self.get_unchecked_mut() };
        let barrier = this.barrier;
        if this.node.waits() {
            let with_lock = |f: &mut dyn FnMut()| {
                let _waiting = barrier.waiting.lock();
                f();
            };
            let polled = this.node.poll(context, WaitReason::Barrier, with_lock);
            return polled.map(|_| BarrierWaitResult(false));
        }
        // SAFETY: the node is pinned, and `drop` cancels the wait; the barrier is borrowed.
        let waits = unsafe {
            this.node.begin(context, WaitReason::Barrier, |node, rt| !barrier.arrive(node, rt))
        };
        if waits { Poll::Pending } else { Poll::Ready(BarrierWaitResult(true)) }
    }
}

impl Drop for BarrierFuture<'_> {
    fn drop(&mut self) {
        if self.node.waits() {
            self.node.cancel(|node, _| self.barrier.waiting.lock().withdraw(node));
        }
    }
}

impl fmt::Debug for BarrierFuture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BarrierFuture { .. }")
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
