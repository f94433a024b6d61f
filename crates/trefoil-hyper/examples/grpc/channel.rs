//! A connection of HTTP/2 as a tower service, for tonic's clients. It takes the place of
//! `tonic::transport::Channel`, which needs a tokio runtime.

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use std::error::Error;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::body::Body;
use tower_service::Service;
use trefoil::net::TcpStream;
use trefoil_hyper::{TrefoilExecutor, TrefoilTimer};

/// See the head of the file. Its clones share the connection.
#[derive(Clone)]
pub(crate) struct Channel(SendRequest<Body>);

impl Channel {
    /// Connects, and returns a client for all services of the server.
    pub(crate) async fn connect(
        address: SocketAddr,
    ) -> Result<tonic::client::Grpc<Channel>, Box<dyn Error + Send + Sync>> {
        let stream = TcpStream::connect_async(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) =
            Builder::new(TrefoilExecutor).timer(TrefoilTimer).handshake(stream).await?;
        // It ends when the last clone is dropped.
        drop(trefoil::task::spawn(connection));
        let origin = Uri::try_from(format!("http://{address}"))?;
        Ok(tonic::client::Grpc::with_origin(Channel(sender), origin))
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Response<Incoming>>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}
