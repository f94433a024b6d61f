//! Contexts end the calls of a socket: Go's `AfterFunc` with a past deadline.
//!
//! A goroutine waits for the context, or for the end of the guard, whichever comes first. Under the guard's lock
//! it is decided who was first; so a socket whose guard is gone is never cancelled any more.

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
    /// Closed with the guard.
    _gone: Sender<()>,
}

struct Shared {
    fd: Arc<Fd>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The guard is gone.
    over: bool,
    /// What the socket was told.
    fired: Option<ContextError>,
}

impl CancelGuard {
    pub(super) fn new(fd: Arc<Fd>, ctx: &Context) -> CancelGuard {
        let shared = Arc::new(Shared { fd, state: Mutex::default() });
        let (gone, ended) = chan::bounded::<()>(1);
        if let Some(why) = ctx.err() {
            shared.fire(why);
        } else {
            let (ctx, weak) = (ctx.clone(), Arc::downgrade(&shared));
            go(move || {
                select! {
                    recv(ended) -> _ => return,
                    recv(ctx.done()) -> _ => {}
                }
                if let (Some(shared), Some(why)) = (weak.upgrade(), ctx.err()) {
                    shared.fire(why);
                }
            });
        }
        CancelGuard { shared, _gone: gone }
    }
}

impl Shared {
    fn fire(&self, why: ContextError) {
        let mut state = self.state.lock();
        if !state.over {
            state.fired = Some(why);
            self.fd.add_done_context(why);
        }
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.over = true;
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
