//! A gRPC service (tonic) that reads files with std's blocking functions, and its client.
//!
//! ```sh
//! cargo run --release -p trefoil-tokio-tests --example grpc serve 127.0.0.1:50051 FOLDER
//! cargo run --release -p trefoil-tokio-tests --example grpc read 127.0.0.1:50051 FILE
//! ```
//! A file may be a named pipe: the call waits until another program writes, and other calls are
//! answered meanwhile. tonic's code generator would write most of this, from a file of protocol
//! buffers.

use bytes::{Buf, BufMut};
use http::uri::PathAndQuery;
use std::convert::Infallible;
use std::error::Error;
use std::future::{Future, Ready, ready};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Request, Response, Status};

/// Messages are UTF-8 text.
#[derive(Default)]
struct Text;

#[rustfmt::skip]
impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Text;
    type Decoder = Text;
    fn encoder(&mut self) -> Text { Text }
    fn decoder(&mut self) -> Text { Text }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;
    fn encode(&mut self, text: String, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;
    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        let text = String::from_utf8(bytes.into()).map_err(|e| Status::internal(e.to_string()))?;
        Ok(Some(text))
    }
}

/// The service: returns the text of a file in `folder`.
#[derive(Clone)]
struct Files {
    folder: PathBuf,
}

impl tonic::server::UnaryService<String> for Files {
    type Response = String;
    type Future = Ready<Result<Response<String>, Status>>;
    fn call(&mut self, request: Request<String>) -> Self::Future {
        let name = request.into_inner();
        if name.contains('/') {
            return ready(Err(Status::invalid_argument("a name of a file has no '/'")));
        }
        // Blocks on purpose: it blocks a goroutine.
        let text = std::fs::read_to_string(self.folder.join(name));
        ready(text.map(Response::new).map_err(Status::from))
    }
}

impl tonic::server::NamedService for Files {
    const NAME: &'static str = "example.Files";
}

impl tower_service::Service<http::Request<Body>> for Files {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let files = self.clone();
        Box::pin(async move { Ok(tonic::server::Grpc::new(Text).unary(files, request).await) })
    }
}

/// The client.
async fn read(addr: &str, name: String) -> Result<String, Box<dyn Error>> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{addr}"))?;
    let mut client = tonic::client::Grpc::new(endpoint.connect().await?);
    client.ready().await?;
    let path = PathAndQuery::from_static("/example.Files/Read");
    Ok(client.unary(Request::new(name), path, Text).await?.into_inner())
}

#[trefoil::main(tokio)]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve", addr, folder] => {
            let listener = tokio::net::TcpListener::bind(addr).await?;
            println!("listening on {}", listener.local_addr()?);
            tonic::transport::Server::builder()
                .add_service(Files { folder: folder.into() })
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await?;
        }
        ["read", addr, file] => print!("{}", read(addr, file.into()).await?),
        _ => return Err("usage: grpc serve ADDRESS FOLDER | grpc read ADDRESS FILE".into()),
    }
    Ok(())
}
