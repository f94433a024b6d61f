//! UDP: `UdpSocket`.

use super::fd::Fd;
use super::tcp::std_addr;
use super::{deadlines, no_address, resolve, socket};
use crate::sched::pollable::Side;
use rustix::net::{RecvFlags, SendFlags};
use socket2::{Domain, Protocol, Socket, Type};
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A UDP socket, like [`std::net::UdpSocket`].
///
/// ```
/// use trefoil::net::UdpSocket;
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
///     assert_eq!(client.recv(&mut answer).unwrap(), 5);
/// });
/// ```
pub struct UdpSocket {
    fd: Arc<Fd>,
}

socket!(UdpSocket, std::net::UdpSocket);
deadlines!(UdpSocket);

/// Getters and setters of options, by socket2's names.
macro_rules! options {
    ($($(#[$text:meta])* $get:ident, $(#[$set_text:meta])* $set:ident: $t:ty = $get2:ident, $set2:ident;)+) => {
        impl UdpSocket {
            $(
                $(#[$text])*
                ///
                /// # Errors
                /// The kernel's.
                pub fn $get(&self) -> io::Result<$t> {
                    self.fd.with(|s| s.$get2())
                }

                $(#[$set_text])*
                ///
                /// # Errors
                /// The kernel's.
                pub fn $set(&self, value: $t) -> io::Result<()> {
                    self.fd.with(|s| s.$set2(value))
                }
            )+
        }
    };
}

options! {
    /// Whether it may send to broadcast addresses.
    broadcast,
    /// Allows it to send to broadcast addresses.
    set_broadcast: bool = broadcast, set_broadcast;
    /// The time to live of its packets.
    ttl,
    /// Sets the time to live of its packets.
    set_ttl: u32 = ttl_v4, set_ttl_v4;
    /// Whether it receives its own multicast packets.
    multicast_loop_v4,
    /// Lets it receive its own multicast packets.
    set_multicast_loop_v4: bool = multicast_loop_v4, set_multicast_loop_v4;
    /// Whether it receives its own multicast packets, over IPv6.
    multicast_loop_v6,
    /// Lets it receive its own multicast packets, over IPv6.
    set_multicast_loop_v6: bool = multicast_loop_v6, set_multicast_loop_v6;
    /// The time to live of its multicast packets.
    multicast_ttl_v4,
    /// Sets the time to live of its multicast packets.
    set_multicast_ttl_v4: u32 = multicast_ttl_v4, set_multicast_ttl_v4;
}

impl UdpSocket {
    /// A socket at an address. Port 0 lets the system choose one.
    ///
    /// # Errors
    /// Of the last address tried; or if the name cannot be resolved.
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

    /// From now on it sends to this address, and receives from it alone.
    ///
    /// # Errors
    /// Of the last address tried; or if the name cannot be resolved.
    pub fn connect(&self, addr: impl ToSocketAddrs) -> io::Result<()> {
        let mut last = no_address();
        for addr in resolve(addr)? {
            // Nothing is sent: it never waits.
            match self.fd.with(|s| s.connect(&addr.into())) {
                Ok(()) => return Ok(()),
                Err(e) => last = e,
            }
        }
        Err(last)
    }

    /// Sends a datagram to the address it is connected to.
    ///
    /// # Errors
    /// The kernel's; `ConnectionRefused` if nobody listened there to an earlier one.
    pub fn send(&self, buf: &[u8]) -> io::Result<usize> {
        self.fd.io(Side::Write, |fd| rustix::net::send(fd, buf, SendFlags::NOSIGNAL))
    }

    /// Sends a datagram to `addr` (its first address).
    ///
    /// # Errors
    /// The kernel's; or if the name cannot be resolved.
    pub fn send_to(&self, buf: &[u8], addr: impl ToSocketAddrs) -> io::Result<usize> {
        let addr = *resolve(addr)?.first().ok_or_else(no_address)?;
        self.fd.io(Side::Write, |fd| rustix::net::sendto(fd, buf, SendFlags::NOSIGNAL, &addr))
    }

    /// Receives a datagram from the address it is connected to. What does not fit is lost.
    ///
    /// # Errors
    /// The kernel's.
    pub fn recv(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.receive(buf, RecvFlags::empty())
    }

    /// As [`recv`](UdpSocket::recv), and leaves the datagram there.
    ///
    /// # Errors
    /// The kernel's.
    pub fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.receive(buf, RecvFlags::PEEK)
    }

    /// Receives a datagram, and says from where. What does not fit is lost.
    ///
    /// # Errors
    /// The kernel's.
    pub fn recv_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_from(buf, RecvFlags::empty())
    }

    /// As [`recv_from`](UdpSocket::recv_from), and leaves the datagram there.
    ///
    /// # Errors
    /// The kernel's.
    pub fn peek_from(&self, buf: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        self.receive_from(buf, RecvFlags::PEEK)
    }

    fn receive(&self, buf: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
        self.fd.io(Side::Read, |fd| rustix::net::recv(fd, &mut *buf, flags).map(|(n, _)| n))
    }

    fn receive_from(&self, buf: &mut [u8], flags: RecvFlags) -> io::Result<(usize, SocketAddr)> {
        let (n, from) = self.fd.io(Side::Read, |fd| {
            rustix::net::recvfrom(fd, &mut *buf, flags).map(|(n, _, from)| (n, from))
        })?;
        let from = from.ok_or_else(|| io::Error::other("a datagram without an address"))?;
        Ok((n, from.try_into().map_err(io::Error::from)?))
    }

    /// The address it is connected to.
    ///
    /// # Errors
    /// If it is not connected.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.peer_addr()).and_then(std_addr)
    }

    /// Its own address.
    ///
    /// # Errors
    /// The kernel's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.fd.with(|s| s.local_addr()).and_then(std_addr)
    }

    /// Joins a multicast group.
    ///
    /// # Errors
    /// The kernel's.
    pub fn join_multicast_v4(&self, group: &Ipv4Addr, interface: &Ipv4Addr) -> io::Result<()> {
        self.fd.with(|s| s.join_multicast_v4(group, interface))
    }

    /// Leaves a multicast group.
    ///
    /// # Errors
    /// The kernel's.
    pub fn leave_multicast_v4(&self, group: &Ipv4Addr, interface: &Ipv4Addr) -> io::Result<()> {
        self.fd.with(|s| s.leave_multicast_v4(group, interface))
    }

    /// Joins a multicast group, over IPv6.
    ///
    /// # Errors
    /// The kernel's.
    pub fn join_multicast_v6(&self, group: &Ipv6Addr, interface: u32) -> io::Result<()> {
        self.fd.with(|s| s.join_multicast_v6(group, interface))
    }

    /// Leaves a multicast group, over IPv6.
    ///
    /// # Errors
    /// The kernel's.
    pub fn leave_multicast_v6(&self, group: &Ipv6Addr, interface: u32) -> io::Result<()> {
        self.fd.with(|s| s.leave_multicast_v6(group, interface))
    }
}
