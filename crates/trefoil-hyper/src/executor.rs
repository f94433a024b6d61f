//! `TrefoilExecutor`.

use std::future::Future;

/// Spawns futures as tasks of the caller's runtime ([`trefoil::task::spawn`]). hyper needs it for
/// HTTP/2.
///
/// # Examples
/// ```
/// use hyper::server::conn::http2;
/// use trefoil_hyper::TrefoilExecutor;
///
/// let builder = http2::Builder::new(TrefoilExecutor);
/// # drop(builder);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct TrefoilExecutor;

impl<F> hyper::rt::Executor<F> for TrefoilExecutor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        drop(trefoil::task::spawn(future));
    }
}
