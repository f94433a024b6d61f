//! HTTP/1.1 by hyper.

use std::convert::Infallible;

use bench_common::http::{ask, body};
use bench_common::{Args, Report};
use http_body_util::Full;
use hyper::Response;
use hyper::body::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::{spawn, spawn_blocking};

pub async fn hello(args: &Args, connections: usize) -> Report {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().unwrap();
    let body = Bytes::from_static(body(args).as_bytes());
    spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let stream = TokioIo::new(stream);
            let body = body.clone();
            let service = service_fn(move |_| answer(body.clone()));
            spawn(http1::Builder::new().serve_connection(stream, service));
        }
    });
    let args = args.clone();
    spawn_blocking(move || ask(&args, address, connections)).await.unwrap()
}

async fn answer(body: Bytes) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(body)))
}
