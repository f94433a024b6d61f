//! A live view of a [trefoil] program, over HTTP: goroutines by place and state, Ps and threads
//! over time, latencies, metrics for Prometheus, and the profiles of Go's `net/http/pprof`.
//!
//! Start it in the program:
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! let server = trefoil_observe::start("127.0.0.1:6060")?;
//! println!("see {}", server.url());
//! # Ok(())
//! # }
//! ```
//!
//! or link the crate, and let the environment decide when the program starts:
//!
//! ```
//! use trefoil_observe as _;
//!
//! # fn serve() {}
//! fn main() {
//!     trefoil::run(|| serve());
//! }
//! ```
//!
//! ```text
//! TREFOIL_OBSERVE=127.0.0.1:6060 ./program
//! TREFOIL_OBSERVE=unix ./program        # /run/user/1000/trefoil/PID.sock
//! ```
//!
//! Without either there is no server: no thread, no goroutine, no descriptor.
//!
//! | path | |
//! |---|---|
//! | `/` | the page; it needs nothing from any other server |
//! | `/metrics` | OpenMetrics |
//! | `/debug/pprof/` | `go tool pprof http://127.0.0.1:6060/debug/pprof/profile?seconds=3`; also `goroutine`, `goroutineleak`, `waits`, `block`, `mutex`, `trace` |
//! | `/snapshot` | the flight recorder's content, for Perfetto; `?seconds=3` records for that time |
//! | `/api/state` | what the page shows, as JSON; with `?waits=1` who waits for whom; `/api/stack?id=7` |
//! | `/api/rate` | `POST ?profile=block&nanos=10000`: counts waits for the profiles `block` and `mutex` |
//!
//! A program with several runtimes: `?runtime=N` names one, and the page offers them.
//!
//! # The server does not disturb
//! It has a runtime of its own, with one P, and its goroutines are in no count, dump or profile of
//! the program's. So it answers while all Ps of the program are stuck, a deadlock of the program is
//! still found and reported, and it does not keep the program from ending. The price is four
//! threads, which sleep between requests.
//!
//! # Who may ask
//! Without a token the server listens on a loopback address only, or on a Unix socket that only the
//! same user (or root) may open. With a token ([`ServerBuilder::token`] or
//! `TREFOIL_OBSERVE_TOKEN`) any address is possible, and each request over TCP needs the token:
//! as `Authorization: Bearer TOKEN`, or as the password of basic authentication, with any user name
//! (`go tool pprof http://x:TOKEN@host:6060/debug/pprof/goroutine`). What changes the program
//! (`POST`) always needs a token. There is no encryption: over a network use a tunnel.
//!
//! Any local user can open a loopback address. If that is too many, use the Unix socket:
//! `curl --unix-socket /run/user/1000/trefoil/PID.sock http://localhost/metrics`.
//!
//! `Host` and `Origin` are checked, so that pages of other sites in a browser on the same machine
//! can read nothing. Requests are limited in size, time and number. A client that does nothing,
//! sends slowly or does not read keeps no other client out: its connection is closed when a new one
//! needs its place. A recording or a profile ends when the client that asked for it closes its side
//! of the connection, as with Go.

mod access;
mod connection;
mod http;
mod json;
mod large_answer;
mod openmetrics;
mod routes;
mod server;
mod socket;
mod state;

pub use server::{Server, ServerBuilder};

use std::io::{self, Write};

/// Starts a server at an address, such as `127.0.0.1:6060`, or `unix` for a Unix socket.
///
/// It runs until the process ends, or until [`Server::stop`]. The port 0 stands for any free port;
/// [`Server::url`] has it.
///
/// ```
/// let server = trefoil_observe::start("127.0.0.1:0")?;
/// assert!(server.url().starts_with("http://127.0.0.1:"));
/// server.stop();
/// # std::io::Result::Ok(())
/// ```
///
/// # Errors
/// - [`InvalidInput`](io::ErrorKind::InvalidInput): the address is not valid, or it is not a
///   loopback address and there is no token.
/// - Others: the kernel refused the address, a thread or memory; for example
///   [`AddrInUse`](io::ErrorKind::AddrInUse).
pub fn start(address: &str) -> io::Result<Server> {
    Server::builder().address(address).start()
}

/// The variables that start a server.
const VARIABLE: &str = "TREFOIL_OBSERVE";
const TOKEN_VARIABLE: &str = "TREFOIL_OBSERVE_TOKEN";

/// Runs before `main`, in each program that links this crate: the loader calls the functions in
/// this section.
#[used]
#[unsafe(link_section = ".init_array")]
static REGISTER: extern "C" fn() = register;

extern "C" fn register() {
    trefoil::observer::on_first_start(start_by_environment);
}

/// Starts a server if the environment says so. A value that is not valid is an error, as for the
/// other variables of the runtime. If the address is in use, for example because a child process
/// has inherited the variable, the program runs without a server.
fn start_by_environment() -> io::Result<()> {
    let Some(address) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else {
        return Ok(());
    };
    match Server::builder().address(&address.to_string_lossy()).start() {
        Ok(server) => {
            _ = writeln!(std::io::stderr(), "trefoil: observe at {}", server.url());
            Ok(())
        }
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
            let text = format!("{VARIABLE}={}: {e}", address.to_string_lossy().escape_debug());
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
        Err(e) => {
            _ = writeln!(
                std::io::stderr(),
                "trefoil: {VARIABLE}={}: {e}",
                address.to_string_lossy().escape_debug()
            );
            Ok(())
        }
    }
}
