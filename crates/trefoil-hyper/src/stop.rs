//! How a server tells its connections that it ends, and waits for them.
//!
//! Each connection leaves its waker here once, and checks one flag per poll.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// See the head of the file.
#[derive(Default)]
pub(crate) struct Stop {
    is_stopping: AtomicBool,
    members: Mutex<Members>,
}

#[derive(Default)]
struct Members {
    /// The wakers of the connections, by their number.
    wakers: Vec<Option<Waker>>,
    /// Numbers that are not in use.
    free: Vec<usize>,
    /// The server: it is woken by the stop, and when the last connection has ended.
    server: Option<Waker>,
}

impl Members {
    fn is_empty(&self) -> bool {
        self.free.len() == self.wakers.len()
    }
}

/// A connection, from its accept to its end.
pub(crate) struct Member {
    stop: Arc<Stop>,
    number: usize,
    has_waker: bool,
}

impl Stop {
    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_stopping(&self) -> bool {
        // Acquire: pairs with `stop`. A waker that is left before this is called is woken.
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Wakes the server and all connections: they are to end.
    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        let wakers: Vec<Waker> = {
            let members = self.members();
            let server = members.server.iter();
            server.chain(members.wakers.iter().flatten()).cloned().collect()
        };
        wakers.iter().for_each(Waker::wake_by_ref);
    }

    /// Adds a connection.
    pub(crate) fn join(self: &Arc<Self>) -> Member {
        let mut members = self.members();
        let number = members.free.pop().unwrap_or_else(|| {
            members.wakers.push(None);
            members.wakers.len() - 1
        });
        drop(members);
        Member { stop: self.clone(), number, has_waker: false }
    }

    /// Leaves the waker of the server, and returns whether it is to stop.
    pub(crate) fn poll_stopping(&self, context: &mut Context<'_>) -> bool {
        let mut members = self.members();
        match &mut members.server {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        drop(members);
        self.is_stopping()
    }

    /// Waits for `future`, as the server. Returns `None` if the server is to stop before that.
    pub(crate) async fn unless_stopped<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        poll_fn(|context| {
            if self.poll_stopping(context) {
                return Poll::Ready(None);
            }
            future.as_mut().poll(context).map(Some)
        })
        .await
    }

    /// Waits until all connections have ended.
    pub(crate) async fn wait_for_members(&self) {
        poll_fn(|context| {
            self.poll_stopping(context);
            if self.members().is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl Member {
    /// Returns whether the connection is to end. Otherwise the task is woken when it is.
    pub(crate) fn poll_stopping(&mut self, context: &mut Context<'_>) -> bool {
        if !self.has_waker {
            self.has_waker = true;
            let waker = context.waker().clone();
            self.stop.members().wakers[self.number] = Some(waker);
        }
        self.stop.is_stopping()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut members = self.stop.members();
        let waker = members.wakers[self.number].take();
        members.free.push(self.number);
        let server = if members.is_empty() { members.server.clone() } else { None };
        drop(members);
        drop(waker);
        if let Some(server) = server {
            server.wake();
        }
    }
}
