//! Forwards TCP connections: a goroutine and one `copy` for each direction.
//!
//! ```sh
//! cargo run --release --example port_forwarder 127.0.0.1:8081 127.0.0.1:8080
//! ```

use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;
use trefoil::go;
use trefoil::net::{TcpListener, TcpStream, copy};

fn forward(client: TcpStream, target: &str) -> io::Result<(u64, u64)> {
    let server = TcpStream::connect_timeout(target, Duration::from_secs(10))?;
    let (client, server) = (Arc::new(client), Arc::new(server));
    let one_way = |from: &Arc<TcpStream>, to: &Arc<TcpStream>| {
        let (from, to) = (from.clone(), to.clone());
        go(move || {
            let copied = copy(&*from, &*to);
            // The end of one direction is passed on; after an error both directions end.
            let _ = to.shutdown(if copied.is_ok() { Shutdown::Write } else { Shutdown::Both });
            if copied.is_err() {
                let _ = from.shutdown(Shutdown::Both);
            }
            copied
        })
    };
    let (there, back) = (one_way(&client, &server), one_way(&server, &client));
    let both = (there.join(), back.join());
    let (Ok(there), Ok(back)) = both else { return Err(io::Error::other("a goroutine panicked")) };
    Ok((there?, back?))
}

#[trefoil::main]
fn main() -> io::Result<()> {
    let mut args = std::env::args().skip(1);
    let listen = args.next().unwrap_or_else(|| "127.0.0.1:8081".into());
    let target = args.next().unwrap_or_else(|| "127.0.0.1:8080".into());
    let listener = TcpListener::bind(listen)?;
    println!("listening on {}", listener.local_addr()?);
    loop {
        match listener.accept() {
            Ok((client, from)) => {
                let target = target.clone();
                go(move || match forward(client, &target) {
                    Ok((there, back)) => println!("{from}: {there} bytes there, {back} back"),
                    Err(e) => println!("{from}: {e}"),
                });
            }
            Err(_) => trefoil::time::sleep(Duration::from_millis(5)),
        }
    }
}
