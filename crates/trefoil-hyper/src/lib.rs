//! hyper and axum on trefoil.
//!
//! | item | purpose |
//! |---|---|
//! | [`serve()`], [`Serve`] | serves an axum `Router` or another tower service, HTTP/1 and HTTP/2 |
//! | [`TrefoilExecutor`] | spawns hyper's tasks: `hyper::rt::Executor` |
//! | [`TrefoilTimer`], [`TrefoilSleep`] | hyper's time limits: `hyper::rt::Timer`, `hyper::rt::Sleep` |
//!
//! The streams of [`trefoil::net`] implement `hyper::rt::{Read, Write}` themselves, with trefoil's
//! feature `hyper`, which this crate turns on. No tokio runtime is needed.
//!
//! A handler may block: call `std::thread::sleep`, take a lock, read a file, run a query with a
//! blocking client, or compute for long. Its task is then a goroutine like any other, and other
//! requests are served meanwhile.
//!
//! ```
//! use axum::{Router, routing::get};
//! use trefoil::context::Context;
//! use trefoil::net::TcpListener;
//!
//! async fn hello() -> &'static str {
//!     // Blocking code is allowed.
//!     std::thread::sleep(std::time::Duration::from_millis(1));
//!     "hello"
//! }
//!
//! trefoil::run(|| {
//!     let router = Router::new().route("/", get(hello));
//!     let listener = TcpListener::bind("127.0.0.1:0").unwrap();
//!     let (ctx, cancel) = Context::background().with_cancel();
//!     # cancel.cancel();
//!     trefoil_hyper::serve(listener, router).shutdown_on(&ctx).run().unwrap();
//! });
//! ```
//!
//! # gRPC
//! The services and clients of tonic work with this crate, without tonic's feature `server`:
//! `tonic = { default-features = false, features = ["codegen", "router"] }`. The example `grpc` has
//! a server and a client.
//!
//! | tonic | here |
//! |---|---|
//! | `transport::Server` | `serve(listener, tonic::service::Routes::new(service).into_axum_router())` |
//! | `transport::Channel` | a tower service around hyper's `http2::SendRequest`, made with [`TrefoilExecutor`]: 20 lines in the example |
//!
//! `transport::Server` needs a tokio runtime (`#[trefoil::main(tokio)]`): it calls `tokio::spawn`
//! and `tokio::time::sleep`. What else it does is missing here: TLS, and the end of calls after
//! their `grpc-timeout`. `transport::Channel` (feature `channel`) reconnects, and works with
//! `Endpoint::executor(TrefoilExecutor)` and `connect_with_connector`, but not with a time limit
//! or keep-alive: these are tokio's timers.

mod executor;
mod preface;
mod serve;
mod stop;
mod timer;

pub use executor::TrefoilExecutor;
pub use serve::{Listener, Serve, serve};
pub use timer::{TrefoilSleep, TrefoilTimer};
