//! An echo server over TLS (rustls), with a self-signed certificate.
//!
//! ```sh
//! cargo run --release --example tls_echo 127.0.0.1:8443 /tmp/certificate.pem
//! openssl s_client -connect 127.0.0.1:8443 -CAfile /tmp/certificate.pem -quiet
//! ```
//! rustls uses the socket like one of std. Where a thread would block, the goroutine parks.

use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use std::error::Error;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};
use trefoil::go;
use trefoil::net::{TcpListener, TcpStream};

fn echo(stream: TcpStream, config: Arc<ServerConfig>) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_deadline(Some(Instant::now() + Duration::from_secs(60)))?;
    let connection = ServerConnection::new(config).map_err(io::Error::other)?;
    let mut tls = StreamOwned::new(connection, stream);
    let mut bytes = [0; 16 << 10];
    loop {
        let n = tls.read(&mut bytes)?;
        if n == 0 {
            return Ok(());
        }
        tls.write_all(&bytes[..n])?;
        tls.flush()?;
    }
}

#[trefoil::main]
fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let mut args = std::env::args().skip(1);
    let addr = args.next().unwrap_or_else(|| "127.0.0.1:8443".into());
    let rcgen::CertifiedKey { cert, signing_key } =
        rcgen::generate_simple_self_signed(["localhost".into(), "127.0.0.1".into()])?;
    if let Some(path) = args.next() {
        std::fs::write(path, cert.pem())?;
    }
    let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)?;
    let config = Arc::new(config);
    let listener = TcpListener::bind(addr)?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        match listener.accept() {
            Ok((stream, from)) => {
                let config = config.clone();
                go(move || {
                    if let Err(e) = echo(stream, config) {
                        println!("{from}: {e}");
                    }
                });
            }
            Err(_) => trefoil::time::sleep(Duration::from_millis(5)),
        }
    }
}
