//! UDP: `UdpSocket`.

use super::fd::Fd;
use super::macros::{deadlines, readiness, socket};
use super::resolve::{no_address, resolve};
use super::tcp::std_addr;
use crate::sched::netpoll::pollable::Direction;
#[cfg(feature = "std")]
use crate::simnet;
use crate::sys::syscalls;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use std::ffi::c_int;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A UDP socket, like [`std::net::UdpSocket`].
///
/// Receives park the goroutine until a datagram arrives; sends park it while the kernel's send
/// buffer is full. Any number of goroutines may use one socket at the same time: each datagram is
/// received by one of them. Unlike std's, a socket has deadlines, can be closed by another
/// goroutine, and follows a context.
///
/// # Drop
/// Dropping the socket closes it. Datagrams that were not received are lost.
///
/// # Examples
/// ```
/// use trefoil::net::UdpSocket;
///
/// trefoil::run(|| {
///     let server = UdpSocket::bind("127.0.0.1:0").unwrap();
///     let address = server.local_addr().unwrap();
///     trefoil::go(move || {
///         let mut bytes = [0; 1500];
///         let (n, from) = server.recv_from(&mut bytes).unwrap();
///         server.send_to(&bytes[..n], from).unwrap();
///     });
///     let client = UdpSocket::bind("127.0.0.1:0").unwrap();
///     client.connect(address).unwrap();
///     client.send(b"hello").unwrap();
///     let mut answer = [0; 16];
///     let n = client.recv(&mut answer).unwrap();
///     assert_eq!(&answer[..n], b"hello");
/// });
/// ```
pub struct UdpSocket {
    fd: Arc<Fd>,
}

socket!(UdpSocket, std::net::UdpSocket);
deadlines!(UdpSocket);
readiness!(UdpSocket);

/// Getters and setters of socket options. The last two names are those of socket2's methods.
macro_rules! options {
    ($(
        $(#[$text:meta])* $get:ident,
        $(#[$set_text:meta])* $set:ident: $t:ty = $get2:ident, $set2:ident;
    )+) => {
        impl UdpSocket {
            $(
                $(#[$text])*
                ///
                /// # Errors
                /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close),
                /// and the OS error `ENOPROTOOPT` or `EOPNOTSUPP` if the option does not exist for
                /// the socket's address family.
                pub fn $get(&self) -> io::Result<$t> {
                    self.fd.with(|s| s.$get2())
                }

                $(#[$set_text])*
                ///
                /// # Errors
                /// [`InvalidInput`](io::ErrorKind::InvalidInput) if the value is out of range,
                /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close),
                /// and the OS error `ENOPROTOOPT` or `EOPNOTSUPP` if the option does not exist for
                /// the socket's address family.
                pub fn $set(&self, value: $t) -> io::Result<()> {
                    self.fd.with(|s| s.$set2(value))
                }
            )+
        }
    };
}

options! {
    /// Returns whether the socket may send to broadcast addresses (`SO_BROADCAST`). The default is
    /// `false`.
    broadcast,
    /// Sets whether the socket may send to broadcast addresses (`SO_BROADCAST`).
    ///
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     assert!(!socket.broadcast().unwrap());
    ///     socket.set_broadcast(true).unwrap();
    ///     assert!(socket.broadcast().unwrap());
    /// });
    /// ```
    set_broadcast: bool = broadcast, set_broadcast;
    /// Returns the time to live of the IPv4 packets that this socket sends (`IP_TTL`).
    ttl,
    /// Sets the time to live of the IPv4 packets that this socket sends (`IP_TTL`), from 1 to 255.
    ///
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     socket.set_ttl(100).unwrap();
    ///     assert_eq!(socket.ttl().unwrap(), 100);
    /// });
    /// ```
    set_ttl: u32 = ttl_v4, set_ttl_v4;
    /// Returns whether this machine receives the IPv4 multicast packets that this socket sends
    /// (`IP_MULTICAST_LOOP`). The default is `true`.
    multicast_loop_v4,
    /// Sets whether this machine receives the IPv4 multicast packets that this socket sends
    /// (`IP_MULTICAST_LOOP`).
    ///
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     socket.set_multicast_loop_v4(false).unwrap();
    ///     assert!(!socket.multicast_loop_v4().unwrap());
    /// });
    /// ```
    set_multicast_loop_v4: bool = multicast_loop_v4, set_multicast_loop_v4;
    /// Returns whether this machine receives the IPv6 multicast packets that this socket sends
    /// (`IPV6_MULTICAST_LOOP`). The default is `true`.
    multicast_loop_v6,
    /// Sets whether this machine receives the IPv6 multicast packets that this socket sends
    /// (`IPV6_MULTICAST_LOOP`). The socket must be an IPv6 socket.
    ///
    /// ```no_run
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("[::1]:0").unwrap();
    ///     socket.set_multicast_loop_v6(false).unwrap();
    ///     assert!(!socket.multicast_loop_v6().unwrap());
    /// });
    /// ```
    set_multicast_loop_v6: bool = multicast_loop_v6, set_multicast_loop_v6;
    /// Returns the time to live of the IPv4 multicast packets that this socket sends
    /// (`IP_MULTICAST_TTL`). The default is 1: they do not leave the local network.
    multicast_ttl_v4,
    /// Sets the time to live of the IPv4 multicast packets that this socket sends
    /// (`IP_MULTICAST_TTL`), from 0 to 255.
    ///
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     socket.set_multicast_ttl_v4(2).unwrap();
    ///     assert_eq!(socket.multicast_ttl_v4().unwrap(), 2);
    /// });
    /// ```
    set_multicast_ttl_v4: u32 = multicast_ttl_v4, set_multicast_ttl_v4;
}

impl UdpSocket {
    /// Makes a socket at an address.
    ///
    /// With port 0 the kernel chooses a free port, which [`local_addr`](UdpSocket::local_addr)
    /// returns. If `addr` has several addresses, the first one that can be bound is used.
    ///
    /// # Errors
    /// If no address can be bound, the error of the last one:
    /// - [`AddrInUse`](io::ErrorKind::AddrInUse) if another socket has the address,
    /// - [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable) if the address is not one of this
    ///   machine,
    /// - [`PermissionDenied`](io::ErrorKind::PermissionDenied) for a privileged port (below 1024),
    /// - the OS error `EMFILE` or `ENFILE` if no descriptor is left.
    ///
    /// If `addr` is a name, the error of [`ToSocketAddrs`] when the lookup fails, and
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) when the name has no address.
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     let address = socket.local_addr().unwrap();
    ///     assert_eq!(UdpSocket::bind(address).unwrap_err().kind(), ErrorKind::AddrInUse);
    /// });
    /// ```
    pub fn bind(addr: impl ToSocketAddrs) -> io::Result<UdpSocket> {
        let mut last = no_address();
        for addr in resolve(addr)? {
            let kind = Type::DGRAM.nonblocking().cloexec();
            let bound = Socket::new(Domain::for_address(addr), kind, Some(Protocol::UDP))
                .and_then(|socket| socket.bind(&addr.into()).map(|()| socket));
            match bound {
                Ok(socket) => {
                    return Ok(UdpSocket { fd: Arc::new(Fd::new(OwnedFd::from(socket))) });
                }
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Sets the address to which [`send`](UdpSocket::send) sends.
    ///
    /// From now on the socket receives datagrams from this address only. No packet is sent, so the
    /// call does not wait, except for the lookup of a name. If `addr` has several addresses, the
    /// first one that the kernel accepts is used.
    ///
    /// # Errors
    /// If the kernel accepts no address, the error of the last one:
    /// [`NetworkUnreachable`](io::ErrorKind::NetworkUnreachable) if there is no route,
    /// [`PermissionDenied`](io::ErrorKind::PermissionDenied) for a broadcast address without
    /// [`set_broadcast`](UdpSocket::set_broadcast), and
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close). If `addr`
    /// is a name, the error of [`ToSocketAddrs`] when the lookup fails, and
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) when the name has no address.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let one = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     one.connect(other.local_addr().unwrap()).unwrap();
    ///     assert_eq!(one.peer_addr().unwrap(), other.local_addr().unwrap());
    /// });
    /// ```
    pub fn connect(&self, addr: impl ToSocketAddrs) -> io::Result<()> {
        let mut last = no_address();
        for addr in resolve(addr)? {
            // No packet is sent, so this never waits.
            match self.fd.with(|s| s.connect(&addr.into())) {
                Ok(()) => return Ok(()),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Sends a datagram to the connected address, and returns its length.
    ///
    /// The datagram is always sent as a whole. The goroutine waits only while the send buffer of
    /// the socket is full.
    ///
    /// # Errors
    /// - the OS error `EDESTADDRREQ` if the socket is not [connected](UdpSocket::connect),
    /// - the OS error `EMSGSIZE` if the datagram is too large,
    /// - [`ConnectionRefused`](io::ErrorKind::ConnectionRefused) if an earlier datagram found no
    ///   socket at the connected address; this one was not sent,
    /// - [`TimedOut`](io::ErrorKind::TimedOut) after the write deadline or timeout,
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close), and the
    ///   error of a done context ([`cancel_on`](UdpSocket::cancel_on)).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let one = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     one.connect(other.local_addr().unwrap()).unwrap();
    ///     assert_eq!(one.send(b"hello").unwrap(), 5);
    ///     assert_eq!(other.recv(&mut [0; 16]).unwrap(), 5);
    /// });
    /// ```
    pub fn send(&self, buf: &[u8]) -> io::Result<usize> {
        self.fd.io(Direction::Write, |fd| syscalls::send(fd, buf))
    }

    /// Sends a datagram to `addr`, and returns its length.
    ///
    /// If `addr` has several addresses, the first one is used. The datagram is always sent as a
    /// whole. The goroutine waits only while the send buffer of the socket is full.
    ///
    /// # Errors
    /// - the OS error `EMSGSIZE` if the datagram is too large,
    /// - [`NetworkUnreachable`](io::ErrorKind::NetworkUnreachable) if there is no route,
    /// - [`PermissionDenied`](io::ErrorKind::PermissionDenied) for a broadcast address without
    ///   [`set_broadcast`](UdpSocket::set_broadcast),
    /// - [`TimedOut`](io::ErrorKind::TimedOut) after the write deadline or timeout,
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close), and the
    ///   error of a done context ([`cancel_on`](UdpSocket::cancel_on)).
    ///
    /// If `addr` is a name, the error of [`ToSocketAddrs`] when the lookup fails, and
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) when the name has no address.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let one = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     let other = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     one.send_to(b"hello", other.local_addr().unwrap()).unwrap();
    ///     let (n, from) = other.recv_from(&mut [0; 16]).unwrap();
    ///     assert_eq!((n, from), (5, one.local_addr().unwrap()));
    /// });
    /// ```
    pub fn send_to(&self, buf: &[u8], addr: impl ToSocketAddrs) -> io::Result<usize> {
        let addr = *resolve(addr)?.first().ok_or_else(no_address)?;
        self.fd.io(Direction::Write, |fd| attempt_send_to(fd, buf, addr))
    }

    /// Waits for a datagram and returns its length.
    ///
    /// A [connected](UdpSocket::connect) socket receives from its address only, any other socket
    /// from every address. The part of a datagram that does not fit into `buf` is lost.
    ///
    /// # Errors
    /// - [`TimedOut`](io::ErrorKind::TimedOut) after the read deadline or timeout,
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close),
    /// - [`ConnectionRefused`](io::ErrorKind::ConnectionRefused) if a datagram sent by this
    ///   connected socket found no socket at its address,
    /// - the error of a done context ([`cancel_on`](UdpSocket::cancel_on)).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use std::time::Duration;
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     socket.send_to(b"to itself", socket.local_addr().unwrap()).unwrap();
    ///     let mut bytes = [0; 2];
    ///     assert_eq!(socket.recv(&mut bytes).unwrap(), 2);
    ///     assert_eq!(&bytes, b"to", "the rest is lost");
    ///
    ///     socket.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
    ///     assert_eq!(socket.recv(&mut bytes).unwrap_err().kind(), ErrorKind::TimedOut);
    /// });
    /// ```
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.receive(buf, 0)
    }

    /// Waits for a datagram as [`recv`](UdpSocket::recv) does, and leaves it for the next receive.
    ///
    /// # Errors
    /// As [`recv`](UdpSocket::recv).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     socket.send_to(b"to itself", socket.local_addr().unwrap()).unwrap();
    ///     assert_eq!(socket.peek(&mut [0; 16]).unwrap(), 9);
    ///     assert_eq!(socket.recv(&mut [0; 16]).unwrap(), 9);
    /// });
    /// ```
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.receive(buf, libc::MSG_PEEK)
    }

    /// Waits for a datagram and returns its length and the address of its sender.
    ///
    /// The part of a datagram that does not fit into `buf` is lost.
    ///
    /// # Errors
    /// As [`recv`](UdpSocket::recv).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     client.send_to(b"hello", server.local_addr().unwrap()).unwrap();
    ///     let mut bytes = [0; 16];
    ///     let (n, from) = server.recv_from(&mut bytes).unwrap();
    ///     assert_eq!(&bytes[..n], b"hello");
    ///     assert_eq!(from, client.local_addr().unwrap());
    /// });
    /// ```
    pub fn recv_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_from(buf, 0)
    }

    /// Waits for a datagram as [`recv_from`](UdpSocket::recv_from) does, and leaves it for the next
    /// receive.
    ///
    /// # Errors
    /// As [`recv`](UdpSocket::recv).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     let address = socket.local_addr().unwrap();
    ///     socket.send_to(b"to itself", address).unwrap();
    ///     assert_eq!(socket.peek_from(&mut [0; 16]).unwrap(), (9, address));
    ///     assert_eq!(socket.recv_from(&mut [0; 16]).unwrap(), (9, address));
    /// });
    /// ```
    pub fn peek_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_from(buf, libc::MSG_PEEK)
    }

    /// Sends a datagram to the connected address, in async code.
    ///
    /// # Errors
    /// As [`send`](UdpSocket::send).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was sent.
    pub async fn send_async(&self, buf: &[u8]) -> io::Result<usize> {
        let send = |fd: BorrowedFd<'_>| syscalls::send(fd, buf);
        self.fd.io_async(Direction::Write, send).await
    }

    /// Sends a datagram to an address, in async code. If `addr` is a name, the poll that looks it
    /// up blocks; other tasks run on meanwhile.
    ///
    /// # Errors
    /// As [`send_to`](UdpSocket::send_to).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was sent.
    pub async fn send_to_async(&self, buf: &[u8], addr: impl ToSocketAddrs) -> io::Result<usize> {
        let addr = *resolve(addr)?.first().ok_or_else(no_address)?;
        let send = |fd: BorrowedFd<'_>| attempt_send_to(fd, buf, addr);
        self.fd.io_async(Direction::Write, send).await
    }

    /// Receives a datagram, in async code.
    ///
    /// # Errors
    /// As [`recv`](UdpSocket::recv).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was received.
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     let address = receiver.local_addr().unwrap();
    ///     let task = trefoil::task::spawn(async move {
    ///         let mut buf = [0; 8];
    ///         let n = receiver.recv_async(&mut buf).await.unwrap();
    ///         buf[..n].to_vec()
    ///     });
    ///     let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     trefoil::block_on(sender.send_to_async(b"hello", address)).unwrap();
    ///     assert_eq!(task.join().unwrap(), b"hello");
    /// });
    /// ```
    pub async fn recv_async(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.receive_async(buf, 0).await
    }

    /// As [`recv_async`](UdpSocket::recv_async), and leaves the datagram for the next call.
    ///
    /// # Errors
    /// As [`peek`](UdpSocket::peek).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was received.
    pub async fn peek_async(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.receive_async(buf, libc::MSG_PEEK).await
    }

    /// Receives a datagram and its sender's address, in async code.
    ///
    /// # Errors
    /// As [`recv_from`](UdpSocket::recv_from).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was received.
    pub async fn recv_from_async(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_from_async(buf, 0).await
    }

    /// As [`recv_from_async`](UdpSocket::recv_from_async), and leaves the datagram for the next
    /// call.
    ///
    /// # Errors
    /// As [`peek_from`](UdpSocket::peek_from).
    ///
    /// # Cancel
    /// If the future is dropped before it is ready, no datagram was received.
    pub async fn peek_from_async(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_from_async(buf, libc::MSG_PEEK).await
    }

    async fn receive_async(&self, buf: &mut [u8], flags: c_int) -> io::Result<usize> {
        let receive = |fd: BorrowedFd<'_>| syscalls::recv(fd, &mut *buf, flags);
        self.fd.io_async(Direction::Read, receive).await
    }

    async fn receive_from_async(
        &self,
        buf: &mut [u8],
        flags: c_int,
    ) -> io::Result<(usize, SocketAddr)> {
        let receive = |fd: BorrowedFd<'_>| syscalls::recvfrom(fd, &mut *buf, flags);
        let (n, from) = self.fd.io_async(Direction::Read, receive).await?;
        Ok((n, sender(from)?))
    }

    fn receive(&self, buf: &mut [u8], flags: c_int) -> io::Result<usize> {
        self.fd.io(Direction::Read, |fd| syscalls::recv(fd, &mut *buf, flags))
    }

    fn receive_from(&self, buf: &mut [u8], flags: c_int) -> io::Result<(usize, SocketAddr)> {
        let (n, from) =
            self.fd.io(Direction::Read, |fd| syscalls::recvfrom(fd, &mut *buf, flags))?;
        Ok((n, sender(from)?))
    }

    /// Returns the address that [`connect`](UdpSocket::connect) has set.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) if the socket is not connected, and after
    /// [`close`](UdpSocket::close).
    ///
    /// # Examples
    /// ```
    /// use std::io::ErrorKind;
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     assert_eq!(socket.peer_addr().unwrap_err().kind(), ErrorKind::NotConnected);
    /// });
    /// ```
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.peer_addr()).and_then(std_addr)
    }

    /// Returns the address of this socket.
    ///
    /// # Errors
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close).
    ///
    /// # Examples
    /// ```
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    ///     assert_ne!(socket.local_addr().unwrap().port(), 0, "the kernel chose one");
    /// });
    /// ```
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.local_addr()).and_then(std_addr)
    }

    /// Joins an IPv4 multicast group on the interface that has the address `interface`.
    ///
    /// With [`Ipv4Addr::UNSPECIFIED`] the kernel chooses the interface.
    ///
    /// # Errors
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput) if `group` is not a multicast address,
    /// - the OS error `ENODEV` if there is no such interface,
    /// - [`AddrInUse`](io::ErrorKind::AddrInUse) if the socket has joined the group already,
    /// - the OS error `ENOBUFS` if the socket has joined too many groups,
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close).
    ///
    /// # Examples
    /// ```
    /// use std::net::Ipv4Addr;
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    ///     let group = Ipv4Addr::new(224, 0, 0, 251);
    ///     socket.join_multicast_v4(&group, &Ipv4Addr::LOCALHOST).unwrap();
    ///     // Receive here.
    ///     socket.leave_multicast_v4(&group, &Ipv4Addr::LOCALHOST).unwrap();
    /// });
    /// ```
    pub fn join_multicast_v4(&self, group: &Ipv4Addr, interface: &Ipv4Addr) -> io::Result<()> {
        self.fd.with(|s| s.join_multicast_v4(group, interface))
    }

    /// Leaves a group that [`join_multicast_v4`](UdpSocket::join_multicast_v4) has joined.
    ///
    /// # Errors
    /// [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable) if the socket is not in the group, the
    /// OS error `ENODEV` if there is no such interface, and
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close).
    pub fn leave_multicast_v4(&self, group: &Ipv4Addr, interface: &Ipv4Addr) -> io::Result<()> {
        self.fd.with(|s| s.leave_multicast_v4(group, interface))
    }

    /// Joins an IPv6 multicast group on the interface with the index `interface`.
    ///
    /// With index 0 the kernel chooses the interface. The socket must be an IPv6 socket.
    ///
    /// # Errors
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput) if `group` is not a multicast address,
    /// - the OS error `ENODEV` if there is no such interface,
    /// - [`AddrInUse`](io::ErrorKind::AddrInUse) if the socket has joined the group already,
    /// - the OS error `ENOPROTOOPT` if it is an IPv4 socket,
    /// - [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close).
    ///
    /// # Examples
    /// ```no_run
    /// use std::net::Ipv6Addr;
    /// use trefoil::net::UdpSocket;
    ///
    /// trefoil::run(|| {
    ///     let socket = UdpSocket::bind("[::]:5353").unwrap();
    ///     let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0xfb);
    ///     socket.join_multicast_v6(&group, 0).unwrap();
    ///     let mut bytes = [0; 1500];
    ///     println!("{:?}", socket.recv_from(&mut bytes));
    ///     socket.leave_multicast_v6(&group, 0).unwrap();
    /// });
    /// ```
    pub fn join_multicast_v6(&self, group: &Ipv6Addr, interface: u32) -> io::Result<()> {
        self.fd.with(|s| s.join_multicast_v6(group, interface))
    }

    /// Leaves a group that [`join_multicast_v6`](UdpSocket::join_multicast_v6) has joined.
    ///
    /// # Errors
    /// [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable) if the socket is not in the group, and
    /// [`NotConnected`](io::ErrorKind::NotConnected) after [`close`](UdpSocket::close).
    pub fn leave_multicast_v6(&self, group: &Ipv6Addr, interface: u32) -> io::Result<()> {
        self.fd.with(|s| s.leave_multicast_v6(group, interface))
    }
}

/// Makes one attempt to send a datagram.
fn attempt_send_to(fd: BorrowedFd<'_>, buf: &[u8], addr: SocketAddr) -> syscalls::Result<usize> {
    #[cfg(feature = "std")]
    if let Some(network) = simnet::here()
        && let Some(sent) = network.send_to(fd.as_raw_fd(), buf, addr)
    {
        return syscalls::checked(sent);
    }
    syscalls::sendto(fd, buf, &SockAddr::from(addr))
}

/// Returns the address of the sender of a datagram.
fn sender(from: SockAddr) -> io::Result<SocketAddr> {
    #[cfg(feature = "std")]
    if let Some(from) = simulated_sender(&from) {
        return Ok(from);
    }
    std_addr(from)
}

/// Returns the address of a sender in a simulated network.
#[cfg(feature = "std")]
fn simulated_sender(from: &SockAddr) -> Option<SocketAddr> {
    simnet::here()?;
    simnet::sockets::source_of_abstract(from.as_abstract_namespace()?)
}
