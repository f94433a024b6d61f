//! Clients that are slow, hang, send garbage or come from elsewhere.

mod common;

use common::json::Json;
use common::{WithBody, alone, ask, connect, get, read_answer, settings, until, with_server};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use trefoil::observer;
use trefoil_observe::{Server, start};

/// Reads until the connection ends. Returns the status of the answer, if there was one.
fn read_to_end(stream: &mut TcpStream) -> Option<u16> {
    let mut all = Vec::new();
    match stream.read_to_end(&mut all) {
        Err(e) if e.kind() != ErrorKind::ConnectionReset => {
            panic!("the server does not end it: {e}")
        }
        _ => {}
    }
    let text = String::from_utf8_lossy(&all);
    text.strip_prefix("HTTP/1.1 ").map(|rest| rest[..3].parse().unwrap())
}

fn status_with(address: SocketAddr, headers: &str) -> u16 {
    ask(address, &format!("GET /api/state HTTP/1.1\r\n{headers}\r\n")).status
}

#[test]
fn host_and_origin_are_checked() {
    with_server(settings(), |address| {
        assert_eq!(status_with(address, &format!("Host: {address}\r\n")), 200);
        assert_eq!(status_with(address, "Host: localhost\r\n"), 200);
        assert_eq!(status_with(address, "Host: rebound.example:6060\r\n"), 421);
        assert_eq!(status_with(address, "Host: 0.0.0.0:6060\r\n"), 421);
        assert_eq!(status_with(address, "Host: [::ffff:127.0.0.1]:6060\r\n"), 421);
        assert_eq!(status_with(address, ""), 421);
        let foreign = format!("Host: {address}\r\nOrigin: http://evil.example\r\n");
        assert_eq!(status_with(address, &foreign), 403);
        let own = format!("Host: {address}\r\nOrigin: http://{address}\r\n");
        assert_eq!(status_with(address, &own), 200);
    });
}

#[test]
fn an_open_address_needs_a_token() {
    let _alone = alone();
    let refused = |address: &str| {
        let error = start(address).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{address}: {error}");
        error.to_string()
    };
    assert!(refused("0.0.0.0:0").contains("TREFOIL_OBSERVE_TOKEN"));
    assert!(refused("[::]:0").contains("TREFOIL_OBSERVE_TOKEN"));
    assert!(refused("127.0.0.1").contains("expected"));
    assert!(refused("").contains("expected"));
    assert!(refused(":").contains("expected"));
    assert!(refused(":65536").contains("expected"));
    assert!(refused("[::ffff:8.8.8.8]:0").contains("TREFOIL_OBSERVE_TOKEN"));
    let empty = Server::builder().address("127.0.0.1:0").token("").start();
    assert_eq!(empty.unwrap_err().kind(), ErrorKind::InvalidInput);
    trefoil::run(|| {
        let server = Server::builder().address("0.0.0.0:0").token("abc").start().unwrap();
        let address = server.local_addr().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], address.port()));
        assert_eq!(status_with(address, "Host: any.example\r\n"), 401);
        let with = "Host: any.example\r\nAuthorization: Bearer abc\r\n";
        assert_eq!(status_with(address, with), 200);
        server.stop();
    });
}

/// In Go `:6060` means all interfaces. Here it is refused, also with a token.
#[test]
fn a_port_without_a_host_is_refused_with_a_proposal() {
    let _alone = alone();
    for address in [":6060", "6060"] {
        for builder in [Server::builder(), Server::builder().token("abc")] {
            let error = builder.address(address).start().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{address}: {error}");
            assert!(error.to_string().contains("write 127.0.0.1:6060"), "{address}: {error}");
        }
    }
}

#[test]
fn a_request_that_is_too_long_is_refused() {
    with_server(settings(), |address| {
        let long = format!("GET / HTTP/1.1\r\nHost: {address}\r\nX: {}\r\n\r\n", "x".repeat(9000));
        let mut stream = connect(address);
        // The server may answer and close before all of it is sent.
        _ = stream.write_all(long.as_bytes());
        assert!(matches!(read_to_end(&mut stream), Some(431) | None));
        let many = format!("GET / HTTP/1.1\r\nHost: {address}\r\n{}\r\n", "X: 1\r\n".repeat(65));
        assert_eq!(ask(address, &many).status, 431);
        let body = format!("POST / HTTP/1.1\r\nHost: {address}\r\nContent-Length: 5\r\n\r\nhello");
        assert_eq!(ask(address, &body).status, 413);
        assert_eq!(get(address, "/api/state").status, 200);
    });
}

#[test]
fn a_client_that_sends_byte_by_byte_is_cut_off() {
    with_server(settings().request_time(Duration::from_millis(500)), |address| {
        // Before the connection exists: the server may measure from then on.
        let start = Instant::now();
        let mut stream = connect(address);
        let status = loop {
            // Never a whole request.
            if stream.write_all(b"G").is_err() {
                break read_to_end(&mut stream);
            }
            std::thread::sleep(Duration::from_millis(50));
            stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
            let mut head = [0; 12];
            match stream.read(&mut head) {
                Ok(0) => break None,
                Ok(_) => break Some(String::from_utf8_lossy(&head)[9..12].parse().unwrap()),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => break None,
            }
            assert!(start.elapsed() < common::LONG);
        };
        // Or 400: so many letters are no method.
        assert!(matches!(status, Some(408 | 400) | None), "{status:?}");
        assert!(start.elapsed() >= Duration::from_millis(400));
    });
}

#[test]
fn clients_that_hang_do_not_keep_others_waiting() {
    with_server(settings().max_connections(40), |address| {
        let hanging: Vec<TcpStream> = (0..30)
            .map(|i| {
                let mut stream = connect(address);
                let text = "GET /api/state HTTP/1.1\r\nHost: x";
                stream.write_all(&text.as_bytes()[..i]).unwrap();
                stream
            })
            .collect();
        for _ in 0..20 {
            assert_eq!(get(address, "/api/state").status, 200);
        }
        drop(hanging);
    });
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    with_server(settings().response_time(Duration::from_millis(300)), |address| {
        let mut stream = connect(address);
        let request = format!("GET / HTTP/1.1\r\nHost: {address}\r\n\r\n");
        let page = get(address, "/").body.len();
        // More answers than the kernel keeps for a client: 20 MB. The last requests are not sent if
        // the server closes the connection before.
        let mut writer = stream.try_clone().unwrap();
        let sending =
            trefoil::go(move || (0..1000).all(|_| writer.write_all(request.as_bytes()).is_ok()));
        // Ends when the server has closed the connection, or when all was received.
        until("the server waits for the client", || observer::has_hung_up(&stream).then_some(()));
        let mut all = Vec::new();
        _ = stream.read_to_end(&mut all);
        assert!(all.len() < 1000 * page, "all was sent");
        _ = sending.join();
    });
}

/// Asks for a recording of two minutes, and waits until it has begun.
fn record_for_two_minutes(address: SocketAddr) -> TcpStream {
    let mut stream = connect(address);
    write!(stream, "GET /snapshot?seconds=120 HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
    until("nothing is recorded", || observer::is_recording().then_some(()));
    stream
}

#[test]
fn connections_above_the_limit_are_refused_if_all_are_busy() {
    with_server(settings().max_connections(1), |address| {
        let busy = record_for_two_minutes(address);
        assert_eq!(read_to_end(&mut connect(address)), Some(503));
        drop(busy);
        until("the place is not free again", || {
            let mut stream = connect(address);
            write!(stream, "GET /nothing HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")
                .ok()?;
            read_to_end(&mut stream).filter(|status| *status == 404)
        });
    });
}

#[test]
fn clients_that_do_nothing_do_not_keep_others_out() {
    with_server(settings().max_connections(3), |address| {
        let mut silent = connect(address);
        let mut kept_alive = connect(address);
        write!(kept_alive, "GET /nothing HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
        assert_eq!(read_answer(&mut kept_alive, WithBody::Yes).unwrap().status, 404);
        let mut incomplete = connect(address);
        incomplete.write_all(b"GET / HT").unwrap();
        // Each of them needs a connection; none keeps it.
        assert_eq!(get(address, "/nothing").status, 404);
        until("it is not closed", || observer::has_hung_up(&silent).then_some(()));
        assert!(!observer::has_hung_up(&kept_alive), "one was enough");
        assert_eq!(read_to_end(&mut silent), None);
        for _ in 0..10 {
            assert_eq!(get(address, "/nothing").status, 404);
        }
    });
}

#[test]
fn a_client_that_has_gone_does_not_collect_any_more() {
    with_server(settings(), |address| {
        let mut recording = record_for_two_minutes(address);
        // Something that is not received before the end is seen.
        recording.write_all(b"GET").unwrap();
        drop(recording);
        until("it still records", || {
            (get(address, "/snapshot?seconds=0").status == 200).then_some(())
        });
        let is_profiling = || {
            let other = trefoil::profile::Cpu::start(100);
            matches!(other, Err(trefoil::profile::Error::AlreadyRunning))
        };
        let profiling = until("it does not profile", || {
            let mut stream = connect(address);
            let path = "/debug/pprof/profile?seconds=120";
            write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
            std::thread::sleep(Duration::from_millis(100));
            // If not, the check before may have been in its way.
            is_profiling().then_some(stream)
        });
        drop(profiling);
        until("it still profiles", || (!is_profiling()).then_some(()));
    });
}

/// A small generator: the same requests in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % n
    }

    fn byte(&mut self) -> u8 {
        self.below(256) as u8
    }
}

/// Changes a few places of a request, or makes one of random bytes.
fn mutated(random: &mut Random, address: SocketAddr) -> Vec<u8> {
    let seeds = [
        format!(
            "GET /api/state?runtime=1&x=%41 HTTP/1.1\r\nHost: {address}\r\nAccept: */*\r\n\r\n"
        ),
        format!("POST /api/recorder?on=1 HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n\r\n"),
        format!("GET /nothing HTTP/1.1\r\nHost: {address}\r\nAuthorization: Basic eDp5\r\n\r\n"),
        "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".to_owned(),
    ];
    if random.below(10) == 0 {
        let len = random.below(600);
        return (0..len).map(|_| random.byte()).collect();
    }
    let mut bytes = seeds[random.below(seeds.len())].clone().into_bytes();
    for _ in 0..1 + random.below(5) {
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes[at] = random.byte(),
            1 => bytes.truncate(at.max(1)),
            2 => bytes.insert(at, random.byte()),
            3 => _ = bytes.remove(at),
            4 => {
                let part = bytes[at..(at + random.below(40)).min(bytes.len())].to_vec();
                bytes.splice(at..at, part);
            }
            _ => bytes[at] ^= 1 << random.below(8),
        }
        if bytes.is_empty() {
            bytes.push(b'G');
        }
    }
    bytes
}

#[test]
fn garbage_is_answered_or_dropped() {
    let settings = settings().request_time(Duration::from_millis(2000));
    with_server(settings, |address| {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        for round in 0..3000 {
            let request = mutated(&mut random, address);
            let mut stream = connect(address);
            _ = stream.write_all(&request);
            _ = stream.shutdown(Shutdown::Write);
            let mut answer = Vec::new();
            match stream.read_to_end(&mut answer) {
                Err(e) if e.kind() != ErrorKind::ConnectionReset => panic!("{round}: {e}"),
                _ => {}
            }
            let text = String::from_utf8_lossy(&answer);
            assert!(text.is_empty() || text.starts_with("HTTP/1.1 "), "{round}: {text}");
            assert!(!text.starts_with("HTTP/1.1 500"), "{round}: {request:?}");
        }
        assert_eq!(get(address, "/api/state").status, 200);
        assert_eq!(trefoil::num_goroutines(), 1);
    });
}

/// Returns whether this process listens at an address. Another process may take the port as soon as
/// this one has closed it.
fn is_listening(address: SocketAddr) -> bool {
    let [a, b, c, d] = match address.ip() {
        std::net::IpAddr::V4(ip) => ip.octets(),
        std::net::IpAddr::V6(_) => panic!("not needed here"),
    };
    // As the kernel writes it: the address in the order of the machine, and the state 0A:
    // listening.
    let wanted = format!("{:08X}:{:04X}", u32::from_le_bytes([a, b, c, d]), address.port());
    let inodes: Vec<String> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
        .filter_map(|path| Some(path.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.into()))
        .collect();
    std::fs::read_to_string("/proc/self/net/tcp").unwrap().lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(1) == Some(&&wanted[..])
            && fields[3] == "0A"
            && inodes.iter().any(|inode| inode == fields[9])
    })
}

#[test]
fn clients_that_read_slowly_lose_their_place_to_others() {
    // With many goroutines, each in many calls, a dump is larger than what the kernel keeps for a
    // client.
    #[inline(never)]
    fn wait_deep_in_calls(depth: u32, rx: &trefoil::chan::Receiver<()>) {
        match depth {
            0 => _ = rx.recv(),
            _ => wait_deep_in_calls(std::hint::black_box(depth - 1), rx),
        }
        std::hint::black_box(());
    }
    with_server(settings().response_time(Duration::from_secs(600)), |address| {
        let (_keep, rx) = trefoil::chan::bounded::<()>(0);
        for _ in 0..3000 {
            let rx = rx.clone();
            trefoil::go(move || wait_deep_in_calls(60, &rx));
        }
        // Clients that read the beginning only.
        let slow = [(); 2].map(|()| {
            let mut stream = connect(address);
            write!(
                stream,
                "GET /debug/pprof/goroutine?debug=2 HTTP/1.1\r\nHost: {address}\r\n\r\n"
            )
            .unwrap();
            let mut head = [0; 12];
            stream.read_exact(&mut head).unwrap();
            assert_eq!(&head, b"HTTP/1.1 200");
            stream
        });
        assert_eq!(get(address, "/api/state").status, 200, "a small answer");
        // It is refused if the others keep their places until it has waited for 5 s.
        let answer = until("no place is free", || {
            let answer = get(address, "/debug/pprof/goroutine?debug=2");
            match answer.status {
                200 => Some(answer),
                // On a busy machine.
                _ => {
                    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
                    None
                }
            }
        });
        let was_cut_off = |mut stream: TcpStream| {
            let mut rest = Vec::new();
            match stream.read_to_end(&mut rest) {
                Err(e) => e.kind() == ErrorKind::ConnectionReset,
                Ok(_) => rest.len() < answer.body.len(),
            }
        };
        assert!(slow.into_iter().any(was_cut_off), "both got the whole answer");
    });
}

#[test]
fn a_name_that_is_not_known_is_no_wrong_value() {
    let _alone = alone();
    // The domain `invalid` never exists.
    let error = start("no-such-name.invalid:0").unwrap_err();
    assert_ne!(error.kind(), ErrorKind::InvalidInput, "{error}");
}

#[test]
fn a_builder_does_not_print_its_token() {
    let text = format!("{:?}", Server::builder().token("s3cret"));
    assert!(!text.contains("s3cret"), "{text}");
}

#[test]
fn stop_ends_connections_and_closes_descriptors() {
    // Sockets, epoll instances and eventfds. sysmon also opens files in /proc, when it wants.
    let is_ours = |path: std::path::PathBuf| !path.starts_with("/");
    let descriptors = || {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let paths = all.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        paths.filter(|path| is_ours(path.clone())).count()
    };
    let _alone = alone();
    trefoil::run(|| {
        let once = || {
            let server = start("127.0.0.1:0").unwrap();
            let address = server.local_addr().unwrap();
            let mut idle = connect(address);
            assert_eq!(get(address, "/api/state").status, 200);
            // It would take two minutes.
            let mut busy = connect(address);
            write!(busy, "GET /snapshot?seconds=120 HTTP/1.1\r\nHost: {address}\r\n\r\n").unwrap();
            until("nothing is being recorded", || {
                let answer = get(address, "/api/state");
                let state = Json::parse(answer.text());
                (*state.get("recording") == Json::Bool(true)).then_some(())
            });
            server.stop();
            assert_eq!(idle.read(&mut [0]).unwrap_or(0), 0, "the connection was closed");
            assert!(!is_listening(address), "the listener was closed");
        };
        once(); // Opens what stays open, such as the socket that `trefoil::net` keeps.
        let before = descriptors();
        // Ten servers that leave one each would be seen. The program's own poller opens one more
        // for each P, when a goroutine first waits there.
        (0..10).for_each(|_| once());
        let most = before + trefoil::procs().min(8);
        until("descriptors were left open", || (descriptors() <= most).then_some(()));
    });
}

#[test]
fn a_unix_socket_is_for_this_user_only() {
    use std::os::unix::fs::MetadataExt;
    let _alone = alone();
    trefoil::run(|| {
        let server = start("unix").unwrap();
        let path = server.socket_path().unwrap().to_owned();
        assert!(path.ends_with(format!("{}.sock", std::process::id())));
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(std::fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
        assert_eq!(start("unix").unwrap_err().kind(), ErrorKind::AddrInUse);
        let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
        stream.write_all(b"GET /api/state HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(read_answer(&mut stream, WithBody::Yes).unwrap().status, 200);
        stream.write_all(b"POST /api/recorder?on=1 HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(read_answer(&mut stream, WithBody::Yes).unwrap().status, 403);
        server.stop();
        assert!(!path.exists());
    });
}
