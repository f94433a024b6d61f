//! TCP sockets: streams, listeners, and how a stream connects.
//!
//! | file | content |
//! |---|---|
//! | `stream.rs` | `TcpStream` and its halves |
//! | `connect.rs` | connects a stream: to one address, or to the first of several that accepts |
//! | `listener.rs` | `TcpListener` |

mod connect;
mod listener;
mod stream;

use std::io;
use std::net::SocketAddr;

pub use listener::{Incoming, TcpListener};
pub use stream::{ReadHalf, TcpStream, WriteHalf};

/// Converts socket2's address.
pub(super) fn std_addr(addr: socket2::SockAddr) -> io::Result<SocketAddr> {
    addr.as_socket().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not an IP address"))
}
