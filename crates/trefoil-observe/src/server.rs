//! The server: a listener, a goroutine for each connection, and their end.

use crate::access::{Access, Token, Transport};
use crate::connection::Connection;
use crate::http::{self, Limits, Request, Response};
use crate::{TOKEN_VARIABLE, routes, socket};
use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::mem::ManuallyDrop;
use std::net::{SocketAddr, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trefoil::net::{TcpListener, UnixListener};
use trefoil::{Builder, PanicMode, Runtime, observer};

/// The address if none is set: Go's custom.
const DEFAULT_ADDRESS: &str = "127.0.0.1:6060";
/// The pause after the kernel has refused a connection, because there are too many descriptors.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);
/// The pause between two checks whether all goroutines have ended.
const PAUSE_AT_STOP: Duration = Duration::from_millis(1);
/// How long a client that finds too many connections may take to read the answer.
const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// How often, and after which pauses, it is checked whether a connection that was closed in favour
/// of a new one has ended.
const ROOM_ATTEMPTS: u32 = 100;
const ROOM_PAUSE: Duration = Duration::from_millis(1);
/// Symbols are resolved on these stacks.
const STACK_BYTES: usize = 1 << 20;

/// A server that runs. If it is dropped, it goes on, until the process ends.
///
/// ```
/// use trefoil_observe::Server;
///
/// let server = Server::builder().address("127.0.0.1:0").start()?;
/// println!("see {}", server.url());
/// server.stop();
/// # std::io::Result::Ok(())
/// ```
pub struct Server {
    shared: Arc<Shared>,
    /// Dropped by [`Server::stop`] alone.
    runtime: ManuallyDrop<Runtime>,
    place: Place,
}

/// Where a server listens.
enum Place {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// The settings of a [`Server`].
///
/// ```
/// use std::time::Duration;
/// use trefoil_observe::Server;
///
/// let server = Server::builder()
///     .address("0.0.0.0:0")
///     .token("correct horse battery staple")
///     .max_connections(16)
///     .request_time(Duration::from_secs(5))
///     .start()?;
/// server.stop();
/// # std::io::Result::Ok(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a ServerBuilder does nothing until `start`"]
pub struct ServerBuilder {
    address: String,
    access: Access,
    limits: Limits,
    /// The variable has a token that is not UTF-8, so that no request can carry it.
    is_token_invalid: bool,
}

/// What the goroutines of a server share.
struct Shared {
    access: Access,
    limits: Limits,
    kept: routes::Kept,
    listener: Listener,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Server {
    /// Returns the default settings: the address `127.0.0.1:6060`, and the token of
    /// `TREFOIL_OBSERVE_TOKEN` if that is set.
    pub fn builder() -> ServerBuilder {
        let token = std::env::var_os(TOKEN_VARIABLE).filter(|token| !token.is_empty());
        let (token, is_token_invalid) = match token.map(OsString::into_string) {
            None => (None, false),
            Some(Ok(token)) => (Some(Token(token)), false),
            Some(Err(_)) => (None, true),
        };
        ServerBuilder {
            address: DEFAULT_ADDRESS.to_owned(),
            access: Access { token, address: None },
            limits: Limits::DEFAULT,
            is_token_invalid,
        }
    }

    /// Returns where it listens: `http://127.0.0.1:6060/`, or `unix:` and the path of its socket.
    pub fn url(&self) -> String {
        match &self.place {
            Place::Tcp(address) => format!("http://{address}/"),
            Place::Unix(path) => format!("unix:{}", path.display()),
        }
    }

    /// Returns its address; None if it has a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match &self.place {
            Place::Tcp(address) => Some(*address),
            Place::Unix(_) => None,
        }
    }

    /// Returns the path of its Unix socket.
    pub fn socket_path(&self) -> Option<&Path> {
        match &self.place {
            Place::Tcp(_) => None,
            Place::Unix(path) => Some(path),
        }
    }

    /// Closes the listener and all connections, waits for the requests that are being answered, and
    /// ends its threads.
    pub fn stop(self) {
        let shared = &self.shared;
        shared.kept.is_stopping.store(true, Ordering::SeqCst);
        // Before the listener is closed: another server of this process would take over the path of
        // one that does not answer.
        if let Place::Unix(path) = &self.place {
            _ = std::fs::remove_file(path);
        }
        shared.listener.close();
        for connection in shared.connections().values() {
            connection.close();
        }
        // A runtime that is dropped leaks what its goroutines own. One more runs this.
        self.runtime.run(|| {
            while trefoil::num_goroutines() > 1 {
                trefoil::time::sleep(PAUSE_AT_STOP);
            }
        });
        drop(ManuallyDrop::into_inner(self.runtime));
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("url", &self.url()).finish()
    }
}

impl ServerBuilder {
    /// Sets where it listens: an address with a port, or `unix` for a socket of this user in
    /// `$XDG_RUNTIME_DIR/trefoil` or `/tmp/trefoil-UID`.
    pub fn address(mut self, address: &str) -> ServerBuilder {
        self.address = address.to_owned();
        self
    }

    /// Sets the token that every request over TCP, and every request that changes something, must
    /// carry. With a token the address need not be a loopback address.
    pub fn token(mut self, token: &str) -> ServerBuilder {
        self.access.token = Some(Token(token.to_owned()));
        self.is_token_invalid = false;
        self
    }

    /// Sets how many connections may be open at the same time. Defaults to 64. Before one more is
    /// refused, a connection without a request, or one whose client reads slowly, is closed.
    pub fn max_connections(mut self, n: usize) -> ServerBuilder {
        self.limits.connections = n;
        self
    }

    /// Sets how long a client may take to send a request. Defaults to 10 s.
    pub fn request_time(mut self, time: Duration) -> ServerBuilder {
        self.limits.request_time = time;
        self
    }

    /// Sets how long a client may take to read an answer. Defaults to 60 s.
    pub fn response_time(mut self, time: Duration) -> ServerBuilder {
        self.limits.response_time = time;
        self
    }

    /// Starts the server.
    ///
    /// # Errors
    /// As [`start`](crate::start).
    pub fn start(mut self) -> io::Result<Server> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        if self.is_token_invalid {
            return Err(invalid(format!("{TOKEN_VARIABLE} is not UTF-8")));
        }
        if let Some(Token(token)) = &self.access.token {
            if token.is_empty() {
                return Err(invalid("the token is empty".to_owned()));
            }
            if token.trim() != token || token.contains(char::is_control) {
                let text = "the token begins or ends with white space, or has control characters";
                return Err(invalid(text.to_owned()));
            }
        }
        let addresses = if self.address == "unix" { None } else { Some(self.tcp_addresses()?) };
        let runtime = observer::system_runtime()?;
        let (listener, place) = runtime.run(|| match addresses {
            None => {
                let (listener, path) = socket::bind()?;
                io::Result::Ok((Listener::Unix(listener), Place::Unix(path)))
            }
            Some(addresses) => {
                let listener = TcpListener::bind(&addresses[..])?;
                let address = listener.local_addr()?;
                Ok((Listener::Tcp(listener), Place::Tcp(address)))
            }
        })?;
        if let Place::Tcp(address) = place {
            self.access.address = Some(address.ip());
        }
        let shared = Arc::new(Shared {
            access: self.access,
            limits: self.limits,
            kept: routes::Kept::default(),
            listener,
            connections: Mutex::default(),
        });
        let accepting = shared.clone();
        runtime.go(move || accepting.accept_all())?;
        Ok(Server { shared, runtime: ManuallyDrop::new(runtime), place })
    }

    /// Returns the addresses that the text stands for, if they are allowed.
    fn tcp_addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
        let expected = "expected unix, or an address with a port such as 127.0.0.1:6060";
        // In Go an address without a host means all interfaces. Here the user must name them.
        let port = self.address.strip_prefix(':').unwrap_or(&self.address);
        if let Ok(port) = port.parse::<u16>() {
            return Err(invalid(format!("the address has no host: write 127.0.0.1:{port}")));
        }
        let found = self.address.to_socket_addrs().map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput => invalid(expected.to_owned()),
            // The name server may know the name at another time.
            _ => e,
        });
        let found: Vec<SocketAddr> = found?.collect();
        if found.is_empty() {
            return Err(invalid(expected.to_owned()));
        }
        if self.access.token.is_none()
            && let Some(open) =
                found.iter().find(|address| !address.ip().to_canonical().is_loopback())
        {
            return Err(invalid(format!(
                "{open} can be reached from other machines: set a token ({TOKEN_VARIABLE}), or use a \
                 loopback address"
            )));
        }
        Ok(found)
    }
}

/// Takes a connection out of the list when it is dropped, also after a panic.
struct Listed<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.shared.connections().remove(&self.number);
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts connections until the server stops.
    fn accept_all(self: &Arc<Shared>) {
        let mut number = 0;
        while !self.kept.is_stopping.load(Ordering::SeqCst) {
            match self.listener.accept() {
                Ok(Some(connection)) => {
                    number += 1;
                    self.serve_in_goroutine(number, connection);
                }
                Ok(None) => {}
                Err(_) => trefoil::time::sleep(PAUSE_AFTER_ERROR),
            }
        }
    }

    fn serve_in_goroutine(self: &Arc<Shared>, number: u64, connection: Connection) {
        if !self.make_room() {
            refuse(&connection);
            return;
        }
        let connection = Arc::new(connection);
        {
            let mut connections = self.connections();
            connections.insert(number, connection.clone());
            // `stop` closes the connections that it finds here, after it has set this.
            if self.kept.is_stopping.load(Ordering::SeqCst) {
                connections.remove(&number);
                return;
            }
        }
        let shared = self.clone();
        let serve = move || {
            let _listed = Listed { shared: &shared, number };
            _ = http::serve(&connection, shared.limits, |request| {
                shared.answer(request, &connection)
            });
        };
        let builder = Builder::new().stack_size(STACK_BYTES).panic(PanicMode::Unwind);
        if builder.go(serve).is_err() {
            // No memory: the connection is closed.
            self.connections().remove(&number);
        }
    }

    /// Makes room for one more connection: if there are too many, closes the one that comes first in
    /// [`Connection::closing_order`]. Returns whether there is room.
    fn make_room(&self) -> bool {
        let has_room = || self.connections().len() < self.limits.connections;
        if has_room() {
            return true;
        }
        // The requests that have arrived are received first.
        trefoil::yield_now();
        if has_room() {
            return true;
        }
        let first = {
            let connections = self.connections();
            let ordered = connections.values().filter_map(|it| Some((it.closing_order()?, it)));
            ordered.min_by_key(|(order, _)| *order).map(|(_, connection)| connection.clone())
        };
        if !first.is_some_and(|first| first.close_in_favour()) {
            return has_room();
        }
        // Its goroutine ends, and closes the descriptor.
        for _ in 0..ROOM_ATTEMPTS {
            trefoil::time::sleep(ROOM_PAUSE);
            if has_room() {
                return true;
            }
        }
        false
    }

    fn answer(&self, request: &Request, client: &Connection) -> Response {
        if let Err(refusal) = self.access.check(request, client.transport) {
            return refusal;
        }
        catch_unwind(AssertUnwindSafe(|| routes::answer(request, client, &self.kept)))
            .unwrap_or_else(|_| Response::error(500, "the server has a bug: see stderr"))
    }
}

/// Tells the client that there are too many connections. The caller drops this one.
fn refuse(connection: &Connection) {
    let text =
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    _ = connection.send_all(text, Instant::now() + REFUSAL_TIME);
}

impl Listener {
    /// Returns the next connection; None if it is not allowed.
    fn accept(&self) -> io::Result<Option<Connection>> {
        Ok(match self {
            Listener::Tcp(listener) => Some(Connection::new(listener.accept()?.0, Transport::Tcp)),
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                let is_allowed = socket::is_allowed(&stream);
                is_allowed.then(|| Connection::new(stream, Transport::Unix))
            }
        })
    }

    fn close(&self) {
        _ = match self {
            Listener::Tcp(listener) => listener.close(),
            Listener::Unix(listener) => listener.close(),
        };
    }
}
