//! System calls on sockets. None of them raises SIGPIPE.

use super::descriptors::owned;
use super::{Result, call};
use socket2::{SockAddr, SockAddrStorage};
use std::ffi::c_int;
use std::io::IoSlice;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// Sends bytes to the connected address. Returns how many the kernel has taken.
#[inline]
pub fn send(fd: BorrowedFd<'_>, buf: &[u8]) -> Result<usize> {
    let flags = libc::MSG_NOSIGNAL as usize;
    let args = [fd.as_raw_fd() as usize, buf.as_ptr() as usize, buf.len(), flags, 0, 0];
    // SAFETY: the kernel reads the borrowed buffer only.
    unsafe { call(libc::SYS_sendto, args) }
}

/// Sends a datagram to an address. Returns its length.
#[inline]
pub fn sendto(fd: BorrowedFd<'_>, buf: &[u8], addr: &SockAddr) -> Result<usize> {
    let flags = libc::MSG_NOSIGNAL as usize;
    let (at, len) = (addr.as_ptr() as usize, addr.len() as usize);
    let args = [fd.as_raw_fd() as usize, buf.as_ptr() as usize, buf.len(), flags, at, len];
    // SAFETY: the kernel reads the borrowed buffer and the address only.
    unsafe { call(libc::SYS_sendto, args) }
}

/// Sends several buffers, at most `UIO_MAXIOV`, to the connected address. Returns how many bytes
/// the kernel has taken.
#[inline]
pub fn send_vectored(fd: BorrowedFd<'_>, bufs: &[IoSlice<'_>]) -> Result<usize> {
    // SAFETY: all zeros is a value of the structure: no address and no control messages.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = bufs.as_ptr().cast_mut().cast();
    message.msg_iovlen = bufs.len();
    // SAFETY: `IoSlice` is an `iovec`, and the kernel only reads the buffers.
    unsafe { sendmsg(fd, &message, libc::MSG_NOSIGNAL) }
}

/// Sends a message with an address or control messages. Returns how many bytes the kernel has
/// taken.
///
/// # Safety
/// The pointers and lengths in the message are valid.
#[inline]
pub unsafe fn sendmsg(fd: BorrowedFd<'_>, message: &libc::msghdr, flags: c_int) -> Result<usize> {
    let args = [fd.as_raw_fd() as usize, &raw const *message as usize, flags as usize];
    // SAFETY: the caller's contract; the kernel only reads.
    unsafe { call(libc::SYS_sendmsg, args) }
}

/// Receives into `buf`. Returns how many bytes were received.
#[inline]
pub fn recv(fd: BorrowedFd<'_>, buf: &mut [u8], flags: c_int) -> Result<usize> {
    let (at, len) = (buf.as_mut_ptr() as usize, buf.len());
    let args = [fd.as_raw_fd() as usize, at, len, flags as usize, 0, 0];
    // SAFETY: the kernel writes to the borrowed buffer, at most its length.
    unsafe { call(libc::SYS_recvfrom, args) }
}

/// Receives into `buf`. Returns how many bytes were received, and the sender's address: one without
/// a family (`AF_UNSPEC`) if there is none.
#[inline]
pub fn recvfrom(fd: BorrowedFd<'_>, buf: &mut [u8], flags: c_int) -> Result<(usize, SockAddr)> {
    let mut from = SockAddrStorage::zeroed();
    let mut from_len = from.size_of();
    let (at, len) = (buf.as_mut_ptr() as usize, buf.len());
    let (from_at, from_len_at) = (&raw mut from as usize, &raw mut from_len as usize);
    let args = [fd.as_raw_fd() as usize, at, len, flags as usize, from_at, from_len_at];
    // SAFETY: the kernel writes to the borrowed buffer and to the storage, at most their lengths,
    // and stores how much of the storage it has filled.
    unsafe {
        let n = call(libc::SYS_recvfrom, args)?;
        Ok((n, SockAddr::new(from, from_len)))
    }
}

/// Receives a message with its address and its control messages. Returns how many bytes were
/// received.
///
/// # Safety
/// The pointers and lengths in the message are valid, and the memory is the caller's.
#[inline]
pub unsafe fn recvmsg(
    fd: BorrowedFd<'_>,
    message: &mut libc::msghdr,
    flags: c_int,
) -> Result<usize> {
    let args = [fd.as_raw_fd() as usize, &raw mut *message as usize, flags as usize];
    // SAFETY: the caller's contract.
    unsafe { call(libc::SYS_recvmsg, args) }
}

/// What sockets that are made here begin with.
const SOCKET_FLAGS: c_int = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;

/// Accepts a connection, which does not block and has `FD_CLOEXEC`.
#[inline]
pub fn accept4(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    let args = [fd.as_raw_fd() as usize, 0, 0, SOCKET_FLAGS as usize];
    // SAFETY: without an address; the descriptor is new.
    unsafe { call(libc::SYS_accept4, args).map(|fd| owned(fd)) }
}

/// As [`accept4`], and returns the address of the other side.
#[inline]
pub fn accept_from(fd: BorrowedFd<'_>) -> Result<(OwnedFd, SockAddr)> {
    let mut from = SockAddrStorage::zeroed();
    let mut len = from.size_of();
    let (from_at, len_at) = (&raw mut from as usize, &raw mut len as usize);
    let args = [fd.as_raw_fd() as usize, from_at, len_at, SOCKET_FLAGS as usize];
    // SAFETY: the kernel writes to the storage, at most its length, and stores how much it has
    // filled; the descriptor is new.
    unsafe {
        let fd = call(libc::SYS_accept4, args)?;
        Ok((owned(fd), SockAddr::new(from, len)))
    }
}

/// Makes a Unix stream socket, which does not block and has `FD_CLOEXEC`.
pub fn unix_stream_socket() -> Result<OwnedFd> {
    let kind = (libc::SOCK_STREAM | SOCKET_FLAGS) as usize;
    // SAFETY: without a pointer; the descriptor is new.
    unsafe { call(libc::SYS_socket, [libc::AF_UNIX as usize, kind, 0]).map(|fd| owned(fd)) }
}

/// Gives the socket an address.
pub fn bind(fd: BorrowedFd<'_>, addr: &SockAddr) -> Result<()> {
    let args = [fd.as_raw_fd() as usize, addr.as_ptr() as usize, addr.len() as usize];
    // SAFETY: the kernel reads the borrowed address only.
    unsafe { call(libc::SYS_bind, args).map(drop) }
}

/// Connects the socket to an address, or begins to.
pub fn connect(fd: BorrowedFd<'_>, addr: &SockAddr) -> Result<()> {
    let args = [fd.as_raw_fd() as usize, addr.as_ptr() as usize, addr.len() as usize];
    // SAFETY: the kernel reads the borrowed address only.
    unsafe { call(libc::SYS_connect, args).map(drop) }
}

/// Lets the socket accept connections, of which `backlog` may wait.
pub fn listen(fd: BorrowedFd<'_>, backlog: c_int) -> Result<()> {
    // SAFETY: without a pointer.
    unsafe { call(libc::SYS_listen, [fd.as_raw_fd() as usize, backlog as usize]).map(drop) }
}

/// Returns the credentials of the process at the other end of a Unix socket (`SO_PEERCRED`).
pub fn peer_credentials(fd: BorrowedFd<'_>) -> Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of_val(&peer) as libc::socklen_t;
    let (level, name) = (libc::SOL_SOCKET as usize, libc::SO_PEERCRED as usize);
    let (peer_at, len_at) = (&raw mut peer as usize, &raw mut len as usize);
    // SAFETY: both are in this frame, and have the sizes that the kernel is told.
    unsafe {
        call(libc::SYS_getsockopt, [fd.as_raw_fd() as usize, level, name, peer_at, len_at])?;
    }
    Ok(peer)
}

#[cfg(test)]
mod tests {
    use super::super::Errno;
    use super::*;
    use std::net::{SocketAddr, UdpSocket};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    #[test]
    fn a_datagram_arrives_with_the_senders_address() {
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(one) = UdpSocket::bind(local) else { continue };
            let other = UdpSocket::bind(local).unwrap();
            let to = SockAddr::from(other.local_addr().unwrap());
            assert_eq!(sendto(one.as_fd(), b"hello", &to), Ok(5));
            let mut buf = [0; 16];
            for flags in [libc::MSG_PEEK, 0] {
                let (n, from) = recvfrom(other.as_fd(), &mut buf, flags).unwrap();
                assert_eq!(&buf[..n], b"hello");
                assert_eq!(from.as_socket(), one.local_addr().ok());
            }
            let none = recvfrom(other.as_fd(), &mut buf, libc::MSG_DONTWAIT);
            assert_eq!(none.map(|(n, _)| n), Err(Errno::AGAIN));
        }
    }

    #[test]
    fn a_sender_without_an_address_has_no_family() {
        let (one, other) = UnixDatagram::pair().unwrap();
        assert_eq!(send(one.as_fd(), b"x"), Ok(1));
        let (n, from) = recvfrom(other.as_fd(), &mut [0; 4], 0).unwrap();
        assert_eq!((n, from.as_socket()), (1, None));
        assert_eq!(from.as_abstract_namespace(), None);
    }

    #[test]
    fn an_accepted_connection_has_the_address_of_the_other_side() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        assert_eq!(accept4(listener.as_fd()).map(drop), Err(Errno::AGAIN));
        let connect = || std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (first, _second) = (connect(), connect());
        let (accepted, from): (OwnedFd, SockAddr) = accept_from(listener.as_fd()).unwrap();
        assert_eq!(from.as_socket(), first.local_addr().ok());
        let other = accept4(listener.as_fd()).unwrap();
        for fd in [&accepted, &other] {
            assert_eq!(recv(fd.as_fd(), &mut [0; 4], 0), Err(Errno::AGAIN), "it does not block");
            // SAFETY: asks about a descriptor of this function.
            let bits = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
            assert_eq!(bits, libc::FD_CLOEXEC);
        }
    }

    #[test]
    fn several_buffers_are_sent_in_order() {
        let (one, other) = UnixStream::pair().unwrap();
        let bufs = [IoSlice::new(b"ab"), IoSlice::new(b""), IoSlice::new(b"cde")];
        assert_eq!(send_vectored(one.as_fd(), &bufs), Ok(5));
        let mut got = [0; 8];
        assert_eq!(recv(other.as_fd(), &mut got, libc::MSG_PEEK), Ok(5));
        assert_eq!(recv(other.as_fd(), &mut got, 0), Ok(5));
        assert_eq!(&got[..5], b"abcde");
        drop(other);
        for sent in [send(one.as_fd(), b"x"), send_vectored(one.as_fd(), &bufs)] {
            let error = std::io::Error::from(sent.unwrap_err());
            assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
        }
    }

    #[test]
    fn a_unix_socket_is_bound_connected_and_knows_its_peer() {
        let name = format!("\0trefoil-calls-{}", std::process::id());
        let addr = SockAddr::unix(name).unwrap();
        let (server, client) = (unix_stream_socket().unwrap(), unix_stream_socket().unwrap());
        assert_eq!(connect(client.as_fd(), &addr), Err(Errno::CONNREFUSED));
        bind(server.as_fd(), &addr).unwrap();
        listen(server.as_fd(), 4).unwrap();
        connect(client.as_fd(), &addr).unwrap();
        let accepted = accept4(server.as_fd()).unwrap();
        let peer = peer_credentials(accepted.as_fd()).unwrap();
        assert_eq!(peer.pid as u32, std::process::id());
        assert_eq!(peer.uid, super::super::geteuid());
    }

    #[test]
    fn addresses_are_converted_both_ways() {
        for text in ["1.2.3.4:5", "[1:2::3%7]:99"] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(SockAddr::from(addr).as_socket(), Some(addr));
        }
    }
}
