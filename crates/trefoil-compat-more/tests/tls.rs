//! native-tls: OpenSSL, which is C code with thread-local state, over `std::net` on loopback.

use native_tls::{Certificate, Identity, TlsAcceptor, TlsConnector};
use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::PKey;
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509NameBuilder};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;
use trefoil_compat_more::{LONG, MANY, go_each, run};

/// Returns a self-signed certificate for `localhost`: as the server's identity, and as the client's
/// root.
fn self_signed() -> (Identity, Certificate) {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    let key = PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap();
    let mut name = X509NameBuilder::new().unwrap();
    name.append_entry_by_nid(Nid::COMMONNAME, "localhost").unwrap();
    let name = name.build();
    let mut builder = X509::builder().unwrap();
    builder.set_version(2).unwrap();
    builder.set_serial_number(&BigNum::from_u32(1).unwrap().to_asn1_integer().unwrap()).unwrap();
    builder.set_subject_name(&name).unwrap();
    builder.set_issuer_name(&name).unwrap();
    builder.set_pubkey(&key).unwrap();
    builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(1).unwrap()).unwrap();
    builder.append_extension(BasicConstraints::new().critical().ca().build().unwrap()).unwrap();
    let names =
        SubjectAlternativeName::new().dns("localhost").build(&builder.x509v3_context(None, None));
    builder.append_extension(names.unwrap()).unwrap();
    builder.sign(&key, MessageDigest::sha256()).unwrap();
    let pem = builder.build().to_pem().unwrap();
    let identity = Identity::from_pkcs8(&pem, &key.private_key_to_pem_pkcs8().unwrap()).unwrap();
    (identity, Certificate::from_pem(&pem).unwrap())
}

/// Starts a server that echoes every connection on a goroutine of its own until the runtime is
/// dropped.
fn echo_server(identity: Identity) -> SocketAddr {
    let acceptor = TlsAcceptor::new(identity).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    trefoil::go(move || {
        for stream in listener.incoming() {
            let (acceptor, stream) = (acceptor.clone(), stream.unwrap());
            trefoil::go(move || {
                // A client that does not trust the certificate ends the handshake.
                let Ok(mut stream) = acceptor.accept(stream) else { return };
                let mut buf = [0; 500];
                while let Ok(n @ 1..) = stream.read(&mut buf) {
                    stream.write_all(&buf[..n]).unwrap();
                }
                let _ = stream.shutdown();
            });
        }
    });
    addr
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

#[test]
fn native_tls_echoes_what_each_goroutine_sent() {
    run(|| {
        let (identity, root) = self_signed();
        let addr = echo_server(identity);
        let connector = TlsConnector::builder().add_root_certificate(root).build().unwrap();
        go_each(*MANY, move |i| {
            let mut stream = connector.connect("localhost", connect(addr)).unwrap();
            let mut buf = [0; 300];
            for turn in 0..3 {
                let sent = [(i + turn) as u8; 300];
                stream.write_all(&sent).unwrap();
                stream.read_exact(&mut buf).unwrap();
                assert_eq!(buf, sent);
            }
            stream.shutdown().unwrap();
        });
        // No `assert_few_threads`: when a goroutine ends, as when a thread ends, OpenSSL takes a
        // global lock of libc, and a goroutine that waits for such a lock blocks its thread.
        println!("{} goroutines, {} threads", *MANY, trefoil::debug::stats().threads);
    });
}

/// OpenSSL keeps a queue of errors in thread-local storage.
#[test]
fn native_tls_rejects_an_unknown_certificate_beside_good_connections() {
    run(|| {
        let (identity, root) = self_signed();
        let addr = echo_server(identity);
        let with_root = TlsConnector::builder().add_root_certificate(root).build().unwrap();
        let without_root = TlsConnector::new().unwrap();
        go_each(*MANY / 2, move |i| {
            if i % 2 == 0 {
                let error = without_root.connect("localhost", connect(addr)).unwrap_err();
                assert!(error.to_string().contains("certificate verify failed"), "{error}");
            } else {
                let error = with_root.connect("example.org", connect(addr)).unwrap_err();
                assert!(error.to_string().contains("certificate verify failed"), "{error}");
                let mut stream = with_root.connect("localhost", connect(addr)).unwrap();
                stream.write_all(b"hello").unwrap();
                let mut buf = [0; 5];
                stream.read_exact(&mut buf).unwrap();
                assert_eq!(&buf, b"hello");
            }
        });
    });
}

#[test]
fn native_tls_read_ends_at_the_sockets_timeout() {
    const TIMEOUT: Duration = Duration::from_millis(50);
    run(|| {
        let (identity, root) = self_signed();
        let addr = echo_server(identity);
        let connector = TlsConnector::builder().add_root_certificate(root).build().unwrap();
        go_each(*MANY / 4, move |_| {
            let mut stream = connector.connect("localhost", connect(addr)).unwrap();
            stream.get_ref().set_read_timeout(Some(TIMEOUT)).unwrap();
            let start = std::time::Instant::now();
            let error = stream.read(&mut [0; 10]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            assert!(start.elapsed() >= TIMEOUT);
        });
    });
}
