//! From names to addresses.

use crate::blocking::blocking;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

/// Returns the addresses of a name.
///
/// A lookup blocks its thread, so the goroutine gives up its P for it. With the feature `std` the
/// interposed `getaddrinfo` does that, and addresses that need no lookup cost nothing.
pub(super) fn resolve(addr: impl ToSocketAddrs) -> io::Result<Vec<SocketAddr>> {
    let resolve = || addr.to_socket_addrs().map(Iterator::collect);
    if cfg!(feature = "std") { resolve() } else { blocking(resolve) }
}

/// Returns the error for a name that has no address, as in std.
pub(super) fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "could not resolve to any addresses")
}
