//! Unix domain sockets.
//!
//! Addresses are std's [`SocketAddr`]. Only std can make one from the kernel's form, so the calls
//! that return addresses go through std's types. None of them waits.

mod ancillary;
mod datagram;
mod listener;
mod stream;

pub use ancillary::{Received, UCred};
pub use datagram::UnixDatagram;
pub use listener::{UnixIncoming, UnixListener};
pub use stream::{UnixReadHalf, UnixStream, UnixWriteHalf};

use super::fd::{Fd, borrow_as_std};
use socket2::{Domain, SockAddr, Socket, Type};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::SocketAddr;
use std::sync::Arc;

/// Calls `f` with std's socket of type `S` on the descriptor. `f` must not wait.
fn with_std<S: FromRawFd, T>(fd: &Fd, f: impl FnOnce(&S) -> io::Result<T>) -> io::Result<T> {
    let call = fd.call()?;
    borrow_as_std(call.fd(), f)
}

/// Returns an unnamed address: std makes one from an empty path.
fn unnamed_addr() -> io::Result<SocketAddr> {
    SocketAddr::from_pathname("")
}

/// Returns the error for an unnamed address.
fn unnamed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "an unnamed socket has no address")
}

/// Converts std's address to socket2's.
fn raw_addr(addr: &SocketAddr) -> io::Result<SockAddr> {
    if let Some(path) = addr.as_pathname() {
        return SockAddr::unix(path);
    }
    let name = addr.as_abstract_name().ok_or_else(unnamed)?;
    // socket2 takes a leading zero for an abstract name.
    SockAddr::unix(OsStr::from_bytes(&[b"\0", name].concat()))
}

fn new_socket(kind: Type) -> io::Result<Socket> {
    Socket::new(Domain::UNIX, kind.nonblocking().cloexec(), None)
}

fn pair(kind: Type) -> io::Result<(Arc<Fd>, Arc<Fd>)> {
    let (one, other) = Socket::pair(Domain::UNIX, kind.nonblocking().cloexec(), None)?;
    let wrap = |socket| Arc::new(Fd::new(OwnedFd::from(socket)));
    Ok((wrap(one), wrap(other)))
}
