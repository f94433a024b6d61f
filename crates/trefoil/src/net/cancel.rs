//! `CancelGuard`: ends the calls of a socket when a context is done.
//!
//! A goroutine waits for the context or for the drop of the guard, whichever comes first. The lock
//! of the guard decides which one was first. So a context never affects a socket after the drop of
//! the guard.

use super::fd::Fd;
use crate::chan::{self, Sender};
use crate::context::{Context, ContextError};
use crate::goroutine::go;
use crate::select;
use crate::sync::Mutex;
use std::fmt;
use std::sync::Arc;

/// Ends the calls of a socket when a context is done, for as long as the guard lives.
///
/// The guard comes from [`TcpStream::cancel_on`](super::TcpStream::cancel_on) or the same method of
/// another socket type. A socket may have several guards: the first context that is done ends its
/// calls.
///
/// # Drop
/// After the drop the context has no effect on the socket any more, even if it was done before: the
/// socket can be used again. The guard keeps the descriptor open: a socket that is dropped before
/// its guard is closed together with the guard.
///
/// # Examples
/// ```
/// use std::io::{ErrorKind, Read, Write};
/// use std::time::Duration;
/// use trefoil::context::Context;
/// use trefoil::net::UnixStream;
///
/// trefoil::run(|| {
///     let (mut one, mut other) = UnixStream::pair().unwrap();
///     let (ctx, _cancel) = Context::background().with_timeout(Duration::from_millis(2));
///     let guard = one.cancel_on(&ctx);
///     let error = one.read(&mut [0; 8]).unwrap_err();
///     assert_eq!(error.kind(), ErrorKind::TimedOut);
///
///     drop(guard);
///     other.write_all(b"again").unwrap();
///     assert_eq!(one.read(&mut [0; 8]).unwrap(), 5);
/// });
/// ```
#[must_use = "the socket is independent of the context when the guard is dropped"]
pub struct CancelGuard {
    shared: Arc<Shared>,
    /// Its drop ends the goroutine that waits for the context.
    _dropped: Sender<()>,
}

struct Shared {
    fd: Arc<Fd>,
    state: Mutex<GuardState>,
}

#[derive(Default)]
struct GuardState {
    is_dropped: bool,
    /// The error that calls on the socket get because of this guard.
    fired: Option<ContextError>,
}

impl CancelGuard {
    pub(super) fn new(fd: Arc<Fd>, ctx: &Context) -> CancelGuard {
        let shared = Arc::new(Shared { fd, state: Mutex::default() });
        let (dropped_tx, dropped) = chan::bounded::<()>(1);
        if let Some(why) = ctx.err() {
            shared.fire(why);
        } else {
            let (ctx, weak) = (ctx.clone(), Arc::downgrade(&shared));
            go(move || {
                select! {
                    recv(dropped) -> _ => return,
                    recv(ctx.done()) -> _ => {}
                }
                if let (Some(shared), Some(why)) = (weak.upgrade(), ctx.err()) {
                    shared.fire(why);
                }
            });
        }
        CancelGuard { shared, _dropped: dropped_tx }
    }
}

impl Shared {
    /// Fails the calls of the socket, unless the guard was dropped before.
    fn fire(&self, why: ContextError) {
        let mut state = self.state.lock();
        if !state.is_dropped {
            state.fired = Some(why);
            self.fd.add_done_context(why);
        }
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_dropped = true;
        if let Some(why) = state.fired {
            self.shared.fd.remove_done_context(why);
        }
    }
}

impl fmt::Debug for CancelGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelGuard").finish_non_exhaustive()
    }
}
