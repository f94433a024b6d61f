//! tonic's services and clients over HTTP/2, without `tonic::transport` and without a tokio
//! runtime.

#[path = "../examples/grpc/channel.rs"]
mod channel;
#[path = "../examples/grpc/text.rs"]
mod text;

use channel::Channel;
use http::uri::PathAndQuery;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Barrier, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;
use text::Text;
use tonic::body::Body;
use tonic::server::{Grpc, NamedService, ServerStreamingService, StreamingService, UnaryService};
use tonic::{Code, Request, Response, Status, Streaming};
use trefoil::chan::{RecvStream, bounded};
use trefoil::context::Context as Ctx;
use trefoil::net::{TcpListener, TcpStream};
use trefoil::task;
use trefoil::time::timeout_async;
use trefoil_hyper::TrefoilExecutor;

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Messages = RecvStream<Result<String, Status>>;

/// How many calls of `Meet` wait for each other.
const TOGETHER: usize = 16;

/// The service of the tests.
#[derive(Clone)]
struct Echo {
    all_are_here: Arc<Barrier>,
}

/// Answers with the text, which must not be empty.
struct Say;

impl UnaryService<String> for Say {
    type Response = String;
    type Future = BoxFuture<Result<Response<String>, Status>>;
    fn call(&mut self, request: Request<String>) -> Self::Future {
        Box::pin(async move {
            match request.into_inner() {
                text if text.is_empty() => Err(Status::invalid_argument("no text")),
                text => Ok(Response::new(text)),
            }
        })
    }
}

/// Blocks until [`TOGETHER`] calls are there.
struct Meet(Arc<Barrier>);

impl UnaryService<String> for Meet {
    type Response = String;
    type Future = BoxFuture<Result<Response<String>, Status>>;
    fn call(&mut self, request: Request<String>) -> Self::Future {
        let all_are_here = self.0.clone();
        Box::pin(async move {
            all_are_here.wait();
            Ok(Response::new(request.into_inner()))
        })
    }
}

/// Answers with the numbers below the one in the request, which a goroutine sends.
struct Count;

impl ServerStreamingService<String> for Count {
    type Response = String;
    type ResponseStream = Messages;
    type Future = BoxFuture<Result<Response<Messages>, Status>>;
    fn call(&mut self, request: Request<String>) -> Self::Future {
        Box::pin(async move {
            let end: u32 = request.into_inner().parse().map_err(|_| Status::internal("number"))?;
            let (sender, receiver) = bounded(4);
            trefoil::go(move || {
                for i in 0..end {
                    // The client may have gone.
                    if sender.send(Ok(i.to_string())).is_err() {
                        break;
                    }
                }
            });
            Ok(Response::new(receiver.stream()))
        })
    }
}

/// Answers each message with the message itself, until the client sends no more.
struct Chat;

impl StreamingService<String> for Chat {
    type Response = String;
    type ResponseStream = Messages;
    type Future = BoxFuture<Result<Response<Messages>, Status>>;
    fn call(&mut self, request: Request<Streaming<String>>) -> Self::Future {
        Box::pin(async move {
            let mut messages = request.into_inner();
            let (sender, receiver) = bounded(0);
            drop(task::spawn(async move {
                while let Some(message) = messages.message().await.transpose() {
                    if sender.send_async(message).await.is_err() {
                        break;
                    }
                }
            }));
            Ok(Response::new(receiver.stream()))
        })
    }
}

// What tonic's code generator would write.
impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl tower_service::Service<http::Request<Body>> for Echo {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Result<Self::Response, Infallible>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let meet = Meet(self.all_are_here.clone());
        Box::pin(async move {
            let mut grpc = Grpc::new(Text);
            Ok(match request.uri().path() {
                "/test.Echo/Say" => grpc.unary(Say, request).await,
                "/test.Echo/Meet" => grpc.unary(meet, request).await,
                "/test.Echo/Count" => grpc.server_streaming(Count, request).await,
                "/test.Echo/Chat" => grpc.streaming(Chat, request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

type Client = tonic::client::Grpc<Channel>;

/// Runs `f` with the address of a server, which must end afterwards.
fn with_server<F: Future<Output = ()> + Send>(f: impl FnOnce(SocketAddr) -> F + Send + 'static) {
    trefoil::run(move || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (ctx, cancel) = Ctx::background().with_cancel();
        let server = trefoil_hyper::serve(listener, services()).shutdown_on(&ctx);
        let server = trefoil::go(move || server.run());
        trefoil::block_on(timeout_async(Duration::from_secs(30), f(address)))
            .expect("it takes more than 30 s");
        cancel.cancel();
        server.join().unwrap().unwrap();
    });
}

/// Connects to the host and port of a URI, which must be an address.
#[derive(Clone)]
struct Connector;

impl tower_service::Service<http::Uri> for Connector {
    type Response = TcpStream;
    type Error = std::io::Error;
    type Future = BoxFuture<std::io::Result<TcpStream>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, uri: http::Uri) -> Self::Future {
        let address = uri.authority().map(ToString::to_string).unwrap_or_default();
        Box::pin(async move { TcpStream::connect_async(&*address).await })
    }
}

#[test]
fn a_channel_of_tonic_reconnects_without_a_tokio_runtime() {
    let address = Arc::new(OnceLock::new());
    let channel = Arc::new(OnceLock::new());
    trefoil::run(move || {
        // The second server has the address of the first, which has ended.
        for server_is_new in [false, true] {
            let wanted = *address.get().unwrap_or(&SocketAddr::from(([127, 0, 0, 1], 0)));
            let listener = TcpListener::bind(wanted).unwrap();
            let address = *address.get_or_init(|| listener.local_addr().unwrap());
            let (ctx, cancel) = Ctx::background().with_cancel();
            let server = trefoil_hyper::serve(listener, services()).shutdown_on(&ctx);
            let server = trefoil::go(move || server.run());
            let calls = async {
                let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}"));
                let endpoint = endpoint.unwrap().executor(TrefoilExecutor);
                let channel: &tonic::transport::Channel =
                    channel.get_or_init(|| endpoint.connect_with_connector_lazy(Connector));
                let calls = (0..20).map(|i| {
                    let mut client = tonic::client::Grpc::new(channel.clone());
                    let text = format!("text {i}");
                    task::spawn(async move {
                        let answer = loop {
                            client.ready().await.unwrap();
                            let path = PathAndQuery::from_static("/test.Echo/Say");
                            let request = Request::new(text.clone());
                            match client.unary(request, path, Text).await {
                                // The client has not read the end of the first connection yet.
                                Err(status) if server_is_new && is_of_transport(&status) => (),
                                answer => break answer,
                            }
                        };
                        assert_eq!(answer.unwrap().into_inner(), text);
                    })
                });
                for call in calls.collect::<Vec<_>>() {
                    call.await.unwrap();
                }
            };
            trefoil::block_on(timeout_async(Duration::from_secs(30), calls)).unwrap();
            cancel.cancel();
            server.join().unwrap().unwrap();
        }
    });
}

/// Returns whether the call ended because its connection did. tonic does not repeat such calls.
fn is_of_transport(status: &Status) -> bool {
    std::error::Error::source(status).is_some_and(|e| e.is::<tonic::transport::Error>())
}

fn services() -> axum::Router {
    let echo = Echo { all_are_here: Arc::new(Barrier::new(TOGETHER)) };
    tonic::service::Routes::new(echo).into_axum_router()
}

async fn call(client: &mut Client, method: &'static str, text: &str) -> Result<String, Status> {
    client.ready().await.map_err(|e| Status::unavailable(e.to_string()))?;
    let path = PathAndQuery::from_static(method);
    Ok(client.unary(Request::new(text.to_owned()), path, Text).await?.into_inner())
}

#[test]
fn unary_calls_return_messages_and_errors() {
    with_server(|address| async move {
        let mut client = Channel::connect(address).await.unwrap();
        for i in 0..100 {
            let text = "x".repeat(1 + i * 97);
            assert_eq!(call(&mut client, "/test.Echo/Say", &text).await.unwrap(), text);
        }
        let error = call(&mut client, "/test.Echo/Say", "").await.unwrap_err();
        assert_eq!((error.code(), error.message()), (Code::InvalidArgument, "no text"));
        for path in ["/test.Echo/Nothing", "/test.Other/Say"] {
            let error = call(&mut client, path, "x").await.unwrap_err();
            assert_eq!(error.code(), Code::Unimplemented, "{path}");
        }
    });
}

#[test]
fn calls_of_one_connection_that_block_wait_at_the_same_time() {
    with_server(|address| async move {
        let client = Channel::connect(address).await.unwrap();
        let calls: Vec<_> = (0..TOGETHER)
            .map(|i| {
                let mut client = client.clone();
                let text = i.to_string();
                task::spawn(async move {
                    assert_eq!(call(&mut client, "/test.Echo/Meet", &text).await.unwrap(), text);
                })
            })
            .collect();
        for call in calls {
            call.await.unwrap();
        }
    });
}

#[test]
fn a_server_streams_more_messages_than_the_channel_holds() {
    with_server(|address| async move {
        let mut client = Channel::connect(address).await.unwrap();
        client.ready().await.unwrap();
        let path = PathAndQuery::from_static("/test.Echo/Count");
        let request = Request::new("1000".to_owned());
        let mut numbers = client.server_streaming(request, path, Text).await.unwrap().into_inner();
        for i in 0..1000 {
            assert_eq!(numbers.message().await.unwrap(), Some(i.to_string()));
        }
        assert_eq!(numbers.message().await.unwrap(), None);
        // A stream that is dropped early ends its goroutine, or the server would not end.
        client.ready().await.unwrap();
        let path = PathAndQuery::from_static("/test.Echo/Count");
        let request = Request::new("1000000000".to_owned());
        let mut numbers = client.server_streaming(request, path, Text).await.unwrap().into_inner();
        assert_eq!(numbers.message().await.unwrap(), Some("0".to_owned()));
    });
}

#[test]
fn both_sides_stream_at_the_same_time() {
    with_server(|address| async move {
        let mut client = Channel::connect(address).await.unwrap();
        client.ready().await.unwrap();
        let path = PathAndQuery::from_static("/test.Echo/Chat");
        let (sender, receiver) = bounded(0);
        let request = Request::new(receiver.stream());
        let mut answers = client.streaming(request, path, Text).await.unwrap().into_inner();
        for i in 0..100 {
            sender.send_async(i.to_string()).await.unwrap();
            assert_eq!(answers.message().await.unwrap(), Some(i.to_string()));
        }
        drop(sender);
        assert_eq!(answers.message().await.unwrap(), None);
    });
}
