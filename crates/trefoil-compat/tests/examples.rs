//! The examples of this crate, end to end: each server is started on a free loopback port, used,
//! and stopped.

#[path = "../../trefoil-examples/tests/common/mod.rs"]
mod common;

use common::Example;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use std::io::{Read, Write};
use std::sync::Arc;

#[test]
fn chat_websocket_passes_messages_to_the_other_clients() {
    use tungstenite::{Message, client};
    let server = Example::start("chat_websocket", &[]);
    let url = format!("ws://{}/", server.addr);
    let join = || {
        let mut socket = client(url.as_str(), server.connect()).unwrap().0;
        // After this message the client is in the room and hears of later clients.
        let welcome = socket.read().unwrap();
        assert!(welcome.to_text().unwrap().starts_with("you are"), "{welcome}");
        socket
    };
    let mut clients: Vec<_> = (0..3).map(|_| join()).collect();
    let mut first_hears = |what: &str| {
        loop {
            match clients[0].read().unwrap() {
                Message::Text(text) if text.ends_with(what) => return,
                _ => {}
            }
        }
    };
    first_hears("has joined");
    first_hears("has joined");
    clients[1].send(Message::text("hello, all")).unwrap();
    clients[1].send(Message::text("and again")).unwrap();
    for at in [0, 2] {
        let mut heard = Vec::new();
        while heard.len() < 2 {
            if let Message::Text(text) = clients[at].read().unwrap()
                && !text.ends_with("has joined")
            {
                heard.push(text.split(": ").nth(1).unwrap().to_owned());
            }
        }
        assert_eq!(heard, ["hello, all", "and again"]);
    }
    let mut last = clients.pop().unwrap();
    last.close(None).unwrap();
    while last.read().is_ok() {}
    loop {
        if let Message::Text(text) = clients[0].read().unwrap()
            && text.ends_with("has left")
        {
            break;
        }
    }
}

#[test]
fn tls_echo_returns_what_each_client_sent() {
    let path = std::env::temp_dir().join(format!("trefoil-tls-{}.pem", std::process::id()));
    let server = Example::start("tls_echo", &[path.to_str().unwrap()]);
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let config = Arc::new(config);
    let clients: Vec<_> = (0..8u8)
        .map(|id| {
            let (stream, config) = (server.connect(), config.clone());
            std::thread::spawn(move || {
                let name = ServerName::try_from("localhost").unwrap();
                let connection = rustls::ClientConnection::new(config, name).unwrap();
                let mut tls = rustls::StreamOwned::new(connection, stream);
                for turn in 0..20 {
                    let sent = vec![id ^ turn; 1 + 997 * turn as usize];
                    tls.write_all(&sent).unwrap();
                    let mut got = vec![0; sent.len()];
                    tls.read_exact(&mut got).unwrap();
                    assert!(sent == got);
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|c| c.join().unwrap());
}
