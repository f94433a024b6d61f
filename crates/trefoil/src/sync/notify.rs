//! `Notify`: wakes tasks and goroutines, without data.
//!
//! A wake-up is a *permit* of which at most one is stored, or a *broadcast* to all that wait.
//!
//! Invariants:
//! 1. If a permit is stored, the list is empty.
//! 2. A waiter is woken with [`ONE`] or with [`ALL`]. A future that was woken with `ONE` and is
//!    dropped passes the permit on.

use crate::runtime::task_waiter;
use crate::sched::wait::inside;
use crate::sched::wait::list::{List, Node};
use crate::sched::wait::reason::WaitReason;
use crate::sched::wait::task_node::TaskNode;
use crate::sys::clock::NEVER;
use crate::sys::lock::Lock;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// The word of [`Notify::notify_one`].
const ONE: u32 = 1;
/// The word of [`Notify::notify_waiters`].
const ALL: u32 = 2;

/// Wakes tasks, goroutines and threads that wait for an event.
///
/// Use it if the data that changed are elsewhere, for example in an atomic. The method names and
/// the rules are those of tokio's `Notify`. For data that are handed over, use a
/// [channel](crate::chan); for a lock and a condition on straight-line code, a
/// [`Condvar`](crate::sync::Condvar).
///
/// [`notify_one`](Notify::notify_one) wakes the first that waits, or stores one permit for the next
/// that would wait. [`notify_waiters`](Notify::notify_waiters) wakes all that wait, and stores
/// nothing.
///
/// # Examples
/// ```
/// use std::sync::atomic::{AtomicBool, Ordering};
/// use trefoil::sync::Notify;
///
/// static READY: AtomicBool = AtomicBool::new(false);
/// static CHANGED: Notify = Notify::new();
/// trefoil::run(|| {
///     let task = trefoil::task::spawn(async {
///         while !READY.load(Ordering::Acquire) {
///             CHANGED.notified().await;
///         }
///     });
///     READY.store(true, Ordering::Release);
///     CHANGED.notify_one();
///     task.join().unwrap();
/// });
/// ```
pub struct Notify {
    state: Lock<NotifyState>,
}

struct NotifyState {
    list: List,
    has_permit: bool,
    /// How often `notify_waiters` was called.
    broadcasts: u64,
}

impl Notify {
    /// Creates a `Notify` without a permit.
    pub const fn new() -> Notify {
        let state = NotifyState { list: List::new(), has_permit: false, broadcasts: 0 };
        Notify { state: Lock::new(state) }
    }

    /// Wakes the task, goroutine or thread that has waited for the longest time. If none waits,
    /// stores a permit, unless there is one: the next wait returns at once.
    ///
    /// # Examples
    /// ```
    /// let notify = trefoil::sync::Notify::new();
    /// notify.notify_one();
    /// notify.notify_one(); // there is a permit already
    /// notify.wait();
    /// ```
    pub fn notify_one(&self) {
        inside(|rt| {
            let mut state = self.state.lock();
            let first = state.list.take_first();
            state.has_permit |= first.is_none();
            drop(state);
            if let Some(first) = first {
                first.wake(rt, ONE);
            }
        });
    }

    /// Wakes all that wait now, and stores no permit. A [`Notified`] that exists waits from the
    /// moment when it was made, even if it was not polled yet.
    ///
    /// # Examples
    /// ```
    /// let notify = trefoil::sync::Notify::new();
    /// let notified = notify.notified();
    /// notify.notify_waiters();
    /// trefoil::block_on(notified);
    /// ```
    pub fn notify_waiters(&self) {
        inside(|rt| {
            let mut state = self.state.lock();
            state.broadcasts += 1;
            let all = state.list.take_all();
            drop(state);
            all.wake_all(rt, ALL);
        });
    }

    /// Returns a future that waits for a wake-up.
    ///
    /// # Cancel
    /// The future may be dropped at any time. If [`notify_one`](Notify::notify_one) has woken it
    /// already, the wake-up is passed on to the next that waits, or stored. It loses its place
    /// among those that wait.
    pub fn notified(&self) -> Notified<'_> {
        let broadcasts = inside(|_| self.state.lock().broadcasts);
        let node = TaskNode::new(0, task_waiter());
        Notified { notify: self, broadcasts, node, ended: false }
    }

    /// Waits for a wake-up: [`notified`](Notify::notified) for goroutines and threads.
    ///
    /// # Cancel
    /// The wait cannot be ended early.
    ///
    /// # Examples
    /// ```
    /// use trefoil::sync::Notify;
    /// static NOTIFY: Notify = Notify::new();
    /// trefoil::run(|| {
    ///     trefoil::go(|| NOTIFY.notify_one());
    ///     NOTIFY.wait();
    /// });
    /// ```
    pub fn wait(&self) {
        let node = Node::new(0);
        // Without a deadline there is no withdrawal.
        let _ = node.sleep(WaitReason::Notify, NEVER, |_| self.enqueue(&node, None), |_| ());
    }

    /// Puts a waiter into the list and returns true. Returns false if it takes the permit, or if
    /// there was a broadcast since `broadcasts`.
    fn enqueue(&self, node: &Node, broadcasts: Option<u64>) -> bool {
        let mut state = self.state.lock();
        if broadcasts.is_some_and(|before| before != state.broadcasts) {
            return false;
        }
        let waits = !std::mem::take(&mut state.has_permit);
        if waits {
            state.list.push_back(node);
        }
        waits
    }
}

impl Default for Notify {
    fn default() -> Notify {
        Notify::new()
    }
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notify { .. }")
    }
}

/// A wake-up that a task awaits, returned by [`Notify::notified`].
///
/// # Examples
/// ```
/// let notify = trefoil::sync::Notify::new();
/// let notified = notify.notified();
/// notify.notify_one();
/// trefoil::block_on(notified);
/// ```
#[must_use = "a future does nothing unless it is awaited"]
pub struct Notified<'a> {
    notify: &'a Notify,
    /// The broadcasts before it was made.
    broadcasts: u64,
    node: TaskNode,
    ended: bool,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        const REASON: WaitReason = WaitReason::Notify;
        // SAFETY: nothing is moved out of the pinned node.
        let this = unsafe { self.get_unchecked_mut() };
        let (notify, before) = (this.notify, Some(this.broadcasts));
        if this.ended {
            return Poll::Ready(());
        }
        if this.node.waits() {
            let with_lock = |f: &mut dyn FnMut()| {
                let _state = notify.state.lock();
                f();
            };
            if this.node.poll(context, REASON, with_lock).is_pending() {
                return Poll::Pending;
            }
        // SAFETY: the node is pinned, and `drop` cancels the wait; the `Notify` is borrowed.
        } else if unsafe {
            this.node.begin(context, REASON, |node, _| notify.enqueue(node, before))
        } {
            return Poll::Pending;
        }
        this.ended = true;
        Poll::Ready(())
    }
}

impl Drop for Notified<'_> {
    fn drop(&mut self) {
        if !self.node.waits() {
            return;
        }
        let word = self.node.cancel(|node, _| self.notify.state.lock().list.withdraw(node));
        if word == Some(ONE) {
            self.notify.notify_one();
        }
    }
}

impl fmt::Debug for Notified<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notified { .. }")
    }
}
