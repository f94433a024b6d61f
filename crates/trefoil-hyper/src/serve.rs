//! `serve`: accepts connections, and serves each in a task.

use crate::executor::TrefoilExecutor;
use crate::preface::PrefaceLimit;
use crate::stop::{Member, Stop};
use crate::timer::TrefoilTimer;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::rt::{Read, Write};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use std::error::Error;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tower_service::Service;
use trefoil::context::Context;
use trefoil::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use trefoil::time::sleep_async;

/// The default of [`Serve::header_read_timeout`].
const HEADER_READ_TIMEOUT: Duration = Duration::from_secs(30);
/// The default of [`Serve::http2_keep_alive`]: the interval, and the time limit for the answer.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(30);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(20);
/// Pauses after an `accept` that failed because descriptors or memory are exhausted: the first, and
/// the longest. They are Go's.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_secs(1);

type BoxError = Box<dyn Error + Send + Sync>;

/// A listener whose connections can be served: [`TcpListener`] or [`UnixListener`].
///
/// # Examples
/// ```
/// use trefoil::net::{TcpListener, TcpStream};
/// use trefoil_hyper::Listener;
///
/// trefoil::run(|| {
///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
///     let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
///     let _stream: TcpStream = trefoil::block_on(Listener::accept(&listener)).unwrap();
/// });
/// ```
pub trait Listener: Send + Sync + 'static {
    /// Its connections.
    type Stream: Read + Write + Send + Unpin + 'static;

    /// Accepts a connection, and sets its options.
    ///
    /// # Errors
    /// If no connection can be accepted now. The server tries again.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    /// Accepts a connection. Small writes are sent at once (`TCP_NODELAY`), as in Go.
    async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = self.accept_async().await?;
        // It fails only if the connection is gone already.
        let _ = stream.set_nodelay(true);
        Ok(stream)
    }
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<UnixStream> {
        Ok(self.accept_async().await?.0)
    }
}

/// Serves HTTP/1 and HTTP/2 requests of all connections of `listener` with `service`, an axum
/// `Router` or any other tower service that can be cloned.
///
/// The result is a builder. [`run`](Serve::run) starts it on a goroutine or a thread, and `.await`
/// in async code. Each connection is a task, and so is each request of HTTP/2.
///
/// # Silent clients
/// A client that sends nothing, or only the beginning of a request, does not keep its connection:
///
/// | the client is silent | it is disconnected after | setting |
/// |---|---|---|
/// | before its first byte, or within the preface of HTTP/2 | 30 s | [`header_read_timeout`](Serve::header_read_timeout) |
/// | within the head of an HTTP/1 request, or between two requests | 30 s | [`header_read_timeout`](Serve::header_read_timeout) |
/// | after the preface of HTTP/2, and does not answer a `PING` | 30 s + 20 s | [`http2_keep_alive`](Serve::http2_keep_alive) |
///
/// The body of a request and the transfer of a response have no time limit here, because only the
/// service knows how long they may take.
///
/// # Examples
/// ```
/// use axum::{Router, routing::get};
/// use std::io::{Read, Write};
/// use trefoil::context::Context;
/// use trefoil::net::{TcpListener, TcpStream};
///
/// trefoil::run(|| {
///     let router = Router::new().route("/", get(|| async { "hello" }));
///     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
///     let address = listener.local_addr().unwrap();
///     let (ctx, cancel) = Context::background().with_cancel();
///     let server =
///         trefoil::go(move || trefoil_hyper::serve(listener, router).shutdown_on(&ctx).run());
///
///     let mut client = TcpStream::connect(address).unwrap();
///     client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
///     let mut answer = String::new();
///     client.read_to_string(&mut answer).unwrap();
///     assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("hello"));
///
///     cancel.cancel();
///     server.join().unwrap().unwrap();
/// });
/// ```
pub fn serve<L: Listener, S>(listener: L, service: S) -> Serve<L, S> {
    let mut builder = auto::Builder::new(TrefoilExecutor);
    builder.http1().timer(TrefoilTimer);
    // WebSockets over HTTP/2 need it.
    builder.http2().timer(TrefoilTimer).enable_connect_protocol();
    Serve { listener, service, builder, header_read_timeout: None, ctx: None }
        .header_read_timeout(HEADER_READ_TIMEOUT)
        .http2_keep_alive(KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT)
}

/// A server that is not started yet. [`serve()`] creates it.
///
/// # Examples
/// ```
/// use axum::Router;
/// use std::time::Duration;
/// use trefoil::net::TcpListener;
/// use trefoil_hyper::{Serve, serve};
///
/// let listener = TcpListener::bind("127.0.0.1:0").unwrap();
/// let server: Serve<_, _> = serve(listener, Router::<()>::new());
/// let server = server.header_read_timeout(Duration::from_secs(5));
/// # drop(server);
/// ```
#[must_use = "a server does nothing unless it is run or awaited"]
pub struct Serve<L, S> {
    listener: L,
    service: S,
    builder: auto::Builder<TrefoilExecutor>,
    header_read_timeout: Option<Duration>,
    ctx: Option<Context>,
}

impl<L, S> Serve<L, S> {
    /// Ends the server when `ctx` is done: it accepts no more connections, finishes the requests
    /// that have begun, closes idle connections, and returns when all have ended.
    pub fn shutdown_on(mut self, ctx: &Context) -> Self {
        self.ctx = Some(ctx.clone());
        self
    }

    /// Sets how long a client may take to send the head of an HTTP/1 request or the preface of an
    /// HTTP/2 connection, counted from the accept or from the end of the previous request. (A
    /// client whose first byte shows that it uses HTTP/1 has the time once more, from then on.)
    /// `None` means without a limit. The default is 30 s.
    pub fn header_read_timeout(mut self, timeout: impl Into<Option<Duration>>) -> Self {
        self.header_read_timeout = timeout.into();
        self.builder.http1().header_read_timeout(self.header_read_timeout);
        self
    }

    /// Sets after how long without a frame the server sends a `PING` over an HTTP/2 connection, and
    /// how long the client may take to answer before it is disconnected. `None` as the interval
    /// means that no `PING` is sent. The defaults are 30 s and 20 s.
    pub fn http2_keep_alive(
        mut self,
        interval: impl Into<Option<Duration>>,
        timeout: Duration,
    ) -> Self {
        self.builder.http2().keep_alive_interval(interval).keep_alive_timeout(timeout);
        self
    }

    /// Changes the settings of HTTP, for all that has no method here.
    ///
    /// ```
    /// use axum::Router;
    /// use trefoil::net::TcpListener;
    ///
    /// let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    /// let server = trefoil_hyper::serve(listener, Router::<()>::new()).configure(|builder| {
    ///     builder.http2().max_concurrent_streams(100);
    /// });
    /// # drop(server);
    /// ```
    pub fn configure(mut self, f: impl FnOnce(&mut auto::Builder<TrefoilExecutor>)) -> Self {
        f(&mut self.builder);
        self
    }
}

impl<L, S, B> Serve<L, S>
where
    L: Listener,
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    /// Serves on this goroutine or thread, until the context of [`shutdown_on`](Self::shutdown_on)
    /// is done and all connections have ended; without one, for ever.
    ///
    /// # Errors
    /// An error of the listener with which it cannot continue, for example after its `close`.
    pub fn run(self) -> io::Result<()> {
        trefoil::block_on(self.serve())
    }

    async fn serve(self) -> io::Result<()> {
        let stop = Arc::new(Stop::default());
        let _watch = self.ctx.as_ref().map(|ctx| watch(ctx, &stop));
        let builder = Arc::new(self.builder);
        let mut pause = PAUSE_MIN;
        loop {
            let accepted = stop.unless_stopped(self.listener.accept()).await;
            match accepted {
                None => break,
                Some(Ok(stream)) => {
                    pause = PAUSE_MIN;
                    let service = TowerToHyperService::new(self.service.clone());
                    let (builder, member) = (builder.clone(), stop.join());
                    let stream = PrefaceLimit::new(stream, self.header_read_timeout);
                    drop(trefoil::task::spawn(connection(builder, stream, service, member)));
                }
                Some(Err(e)) if is_temporary(&e) => {
                    // The next round sees whether the server is to stop.
                    stop.unless_stopped(sleep_async(pause)).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
                Some(Err(e)) => {
                    stop.stop();
                    return Err(e);
                }
            }
        }
        drop(self.listener);
        stop.wait_for_members().await;
        Ok(())
    }
}

impl<L, S, B> IntoFuture for Serve<L, S>
where
    L: Listener,
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    type Output = io::Result<()>;
    type IntoFuture = Pin<Box<dyn Future<Output = io::Result<()>> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.serve())
    }
}

impl<L, S> fmt::Debug for Serve<L, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serve").finish_non_exhaustive()
    }
}

/// Returns whether `accept` may succeed later: descriptors or memory are exhausted, or the
/// connection has failed before it was accepted.
fn is_temporary(e: &io::Error) -> bool {
    // Errors without a code are those of the listener itself: closed, deadline, context.
    e.raw_os_error().is_some()
}

/// Stops the server when `ctx` is done. The drop of the result ends that.
fn watch(ctx: &Context, stop: &Arc<Stop>) -> trefoil::chan::Sender<()> {
    let (guard, dropped) = trefoil::chan::bounded::<()>(0);
    let (ctx, stop) = (ctx.clone(), stop.clone());
    trefoil::go(move || {
        trefoil::select! {
            recv(dropped) -> _ => {}
            recv(ctx.done()) -> _ => stop.stop(),
        }
    });
    guard
}

/// Serves one connection. Its errors (the client is gone, or has sent nonsense) concern no other
/// connection, and the service has no way to hear of them: they are dropped, as in axum.
async fn connection<I, S, B>(
    builder: Arc<auto::Builder<TrefoilExecutor>>,
    stream: I,
    service: TowerToHyperService<S>,
    mut member: Member,
) where
    I: Read + Write + Send + Unpin + 'static,
    S: Service<Request<Incoming>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<BoxError>,
{
    let mut connection = pin!(builder.serve_connection_with_upgrades(stream, service));
    let mut was_told = false;
    let _ = poll_fn(|context| {
        if !was_told && member.poll_stopping(context) {
            was_told = true;
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(context)
    })
    .await;
}
