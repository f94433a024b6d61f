//! From names to addresses.

use crate::blocking::blocking;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};

/// Returns the addresses of a name. The lookup blocks its thread, so it runs without a P.
pub(super) fn resolve(addr: impl ToSocketAddrs) -> io::Result<Vec<SocketAddr>> {
    blocking(|| addr.to_socket_addrs().map(Iterator::collect))
}

/// The error of a name that has no address, as in std.
pub(super) fn no_address() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "could not resolve to any addresses")
}
