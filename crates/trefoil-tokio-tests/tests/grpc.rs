//! tonic's server and client, unmodified, with a codec that is written by hand.

use bytes::{Buf, BufMut};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Barrier;
use std::task::{Context, Poll};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::{NamedService, UnaryService};
use tonic::{Request, Response, Status};
use trefoil_tokio_tests::within;

/// A message is a number of 8 bytes.
#[derive(Clone, Copy, Default)]
struct Numbers;

impl Encoder for Numbers {
    type Item = u64;
    type Error = Status;
    fn encode(&mut self, item: u64, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_u64(item);
        Ok(())
    }
}

impl Decoder for Numbers {
    type Item = u64;
    type Error = Status;
    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<u64>, Status> {
        if buffer.remaining() != 8 {
            return Err(Status::internal("a number has 8 bytes"));
        }
        Ok(Some(buffer.get_u64()))
    }
}

impl Codec for Numbers {
    type Encode = u64;
    type Decode = u64;
    type Encoder = Numbers;
    type Decoder = Numbers;
    fn encoder(&mut self) -> Numbers {
        Numbers
    }
    fn decoder(&mut self) -> Numbers {
        Numbers
    }
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// How many calls wait for each other.
const TOGETHER: u64 = 16;
static ALL_ARE_HERE: Barrier = Barrier::new(TOGETHER as usize);

/// Doubles the number. If it is not 0, the call blocks until [`TOGETHER`] calls are there.
struct Double;

impl UnaryService<u64> for Double {
    type Response = u64;
    type Future = BoxFuture<Result<Response<u64>, Status>>;
    fn call(&mut self, request: Request<u64>) -> Self::Future {
        Box::pin(async move {
            let n = request.into_inner();
            if n == u64::MAX {
                return Err(Status::out_of_range("too large"));
            }
            if n > 0 {
                ALL_ARE_HERE.wait();
            }
            Ok(Response::new(2 * n))
        })
    }
}

/// What tonic's code generator would write.
#[derive(Clone)]
struct DoubleServer;

impl NamedService for DoubleServer {
    const NAME: &'static str = "test.Double";
}

impl tower_service::Service<http::Request<tonic::body::Body>> for DoubleServer {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<Result<Self::Response, Infallible>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        Box::pin(async move { Ok(tonic::server::Grpc::new(Numbers).unary(Double, request).await) })
    }
}

async fn call(channel: &tonic::transport::Channel, n: u64) -> Result<u64, Status> {
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.map_err(|e| Status::unavailable(e.to_string()))?;
    let path = http::uri::PathAndQuery::from_static("/test.Double/Double");
    Ok(client.unary(Request::new(n), path, Numbers).await?.into_inner())
}

#[trefoil::test(tokio)]
async fn calls_that_block_wait_at_the_same_time() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder().add_service(DoubleServer);
    let server = tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let channel = within(endpoint.connect()).await.unwrap();

    assert_eq!(within(call(&channel, 0)).await.unwrap(), 0);
    let error = within(call(&channel, u64::MAX)).await.unwrap_err();
    assert_eq!((error.code(), error.message()), (tonic::Code::OutOfRange, "too large"));

    // A connection of HTTP/2 has a task per call, and each of them blocks its worker.
    let tasks: Vec<_> = (1..=TOGETHER)
        .map(|n| {
            let channel = channel.clone();
            tokio::spawn(async move { call(&channel, n).await.unwrap() })
        })
        .collect();
    for (n, task) in (1..).zip(tasks) {
        assert_eq!(within(task).await.unwrap(), 2 * n);
    }
    server.abort();
}
