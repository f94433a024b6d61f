//! A gRPC service (tonic) that reads files with std's blocking functions, and its client, without a
//! tokio runtime.
//!
//! ```sh
//! cargo run --release -p trefoil-hyper --example grpc serve 127.0.0.1:50051 FOLDER
//! cargo run --release -p trefoil-hyper --example grpc read 127.0.0.1:50051 FILE
//! ```
//! tonic's services are tower services, so [`trefoil_hyper::serve`] serves them. Only
//! `tonic::transport` is bound to tokio.

mod channel;
mod text;

use channel::Channel;
use http::uri::PathAndQuery;
use std::convert::Infallible;
use std::error::Error;
use std::future::{Future, Ready, ready};
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use text::Text;
use tonic::body::Body;
use tonic::{Request, Response, Status};
use trefoil::net::TcpListener;

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

// What tonic's code generator would write.
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

#[trefoil::main]
fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["serve", address, folder] => {
            let listener = TcpListener::bind(address)?;
            println!("listening on {}", listener.local_addr()?);
            let services = tonic::service::Routes::new(Files { folder: folder.into() });
            trefoil_hyper::serve(listener, services.into_axum_router()).run()?;
        }
        ["read", address, file] => trefoil::block_on(async {
            let mut client = Channel::connect(address.parse()?).await?;
            client.ready().await?;
            let path = PathAndQuery::from_static("/example.Files/Read");
            let text = client.unary(Request::new(file.into()), path, Text).await?;
            print!("{}", text.into_inner());
            Ok::<(), Box<dyn Error + Send + Sync>>(())
        })?,
        _ => return Err("usage: grpc serve ADDRESS FOLDER | grpc read ADDRESS FILE".into()),
    }
    Ok(())
}
