//! HTTP/1.1 by hyper.

use std::convert::Infallible;

use bench_common::http::{HELLO, ask};
use bench_common::{Args, Report};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::{spawn, spawn_blocking};

pub async fn hello(args: &Args, connections: usize) -> Report {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().unwrap();
    spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let stream = TokioIo::new(stream);
            spawn(http1::Builder::new().serve_connection(stream, service_fn(answer)));
        }
    });
    let args = args.clone();
    spawn_blocking(move || ask(&args, address, connections)).await.unwrap()
}

async fn answer(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(HELLO.as_bytes()))))
}
