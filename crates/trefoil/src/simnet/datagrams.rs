//! Datagrams.
//!
//! For every address that a datagram is sent to or comes from, the network has a *puppet*: a Unix
//! datagram socket that stands for that address. The program's sockets send to puppets and receive
//! from them. So the kernel itself rejects datagrams from addresses to which a connected socket is
//! not connected:
//!
//! ```text
//!   a ──▶ puppet of b ──(latency, loss, partition)──▶ puppet of a ──▶ b
//! ```

use super::links::Passage;
use super::name::{Name, NameKind};
use super::{Event, NetworkFd, State, call_with_name, check, unix_socket};
use crate::sys::clock::Nanos;
use crate::sys::raw::syscall;
use std::net::SocketAddr;
use std::os::fd::RawFd;

/// The longest datagram.
const LONGEST: usize = 64 << 10;
/// If the receiver's queue is full, how often a datagram is tried again, and after which pause.
const ATTEMPTS: u32 = 1000;
const PAUSE: Nanos = 100_000;
/// The host of puppets for addresses that mean the same on every host.
const EVERY_HOST: u16 = u16::MAX;

const EAGAIN: isize = -(libc::EAGAIN as isize);
const ECONNREFUSED: isize = -(libc::ECONNREFUSED as isize);

/// The network's socket for an address. See the head of the file.
pub(super) struct Puppet {
    fd: NetworkFd,
    addr: SocketAddr,
}

/// A datagram on its way.
pub(super) struct Datagram {
    from_host: u16,
    from: SocketAddr,
    to_host: u16,
    to: SocketAddr,
    bytes: Vec<u8>,
    attempts: u32,
}

impl State {
    /// Returns the name of the puppet for `addr`, as the host `host` sees it. Makes it if need be.
    pub(super) fn puppet(&mut self, host: u16, addr: SocketAddr) -> Result<Name, isize> {
        let host = if addr.ip().is_loopback() { host } else { EVERY_HOST };
        let name = self.name(NameKind::Puppet, host, 0, addr);
        if !self.puppet_of.contains_key(&(host, addr)) {
            let fd = unix_socket(libc::SOCK_DGRAM)?;
            check(call_with_name(libc::SYS_bind, fd.as_raw_fd(), &name))?;
            let number = self.next_number();
            self.watch(&fd, number << 1 | 1)?;
            self.puppets.insert(number, Puppet { fd, addr });
            self.puppet_of.insert((host, addr), number);
        }
        Ok(name)
    }

    /// Takes the datagrams that were sent to a puppet.
    pub(super) fn read_puppet(&mut self, number: u64, now: Nanos) {
        let mut buffer = vec![0; LONGEST];
        while let Some(puppet) = self.puppets.get(&number) {
            let to = puppet.addr;
            let (n, sender) = receive_from(puppet.fd.as_raw_fd(), &mut buffer);
            if n < 0 {
                return;
            }
            let Some(Name { host: from_host, addr, .. }) = sender else { continue };
            let Some(to_host) = self.host_at(to.ip(), from_host) else { continue };
            let mut from = addr;
            if from.ip().is_unspecified() {
                from.set_ip(self.ip_towards(from_host, to.ip()));
            }
            if let Passage::Arrives(due) = self.send_over(from_host, to_host, n as usize, now) {
                let bytes = buffer[..n as usize].to_vec();
                let datagram = Datagram { from_host, from, to_host, to, bytes, attempts: 0 };
                self.schedule(due, Event::Datagram(datagram));
            }
        }
    }

    /// A datagram arrives.
    pub(super) fn deliver_datagram(&mut self, mut datagram: Datagram, now: Nanos) {
        let Datagram { from_host, from, to_host, to, .. } = datagram;
        if !self.is_connected(from_host, to_host) || self.puppet(to_host, from).is_err() {
            return;
        }
        let host = if from.ip().is_loopback() { to_host } else { EVERY_HOST };
        let Some(puppet) =
            self.puppet_of.get(&(host, from)).and_then(|number| self.puppets.get(number))
        else {
            return;
        };
        for name in self.names_at(NameKind::Datagram, to_host, to) {
            match send_to(puppet.fd.as_raw_fd(), &datagram.bytes, &name) {
                ECONNREFUSED => {} // No socket has this address.
                EAGAIN if datagram.attempts < ATTEMPTS => {
                    datagram.attempts += 1;
                    return self.schedule(now + PAUSE, Event::Datagram(datagram));
                }
                _ => return,
            }
        }
    }
}

/// Receives without blocking. Returns the length or a negative error, and the sender's name.
fn receive_from(fd: RawFd, buffer: &mut [u8]) -> (isize, Option<Name>) {
    // SAFETY: zeros are an address without a name.
    let mut raw: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&raw) as libc::socklen_t;
    let (at, flags) = (buffer.as_mut_ptr() as usize, libc::MSG_DONTWAIT as usize);
    let (name, name_len) = (&raw mut raw as usize, &raw mut len as usize);
    // SAFETY: the kernel writes at most the lengths of the buffer and of the name.
    let n = unsafe {
        syscall(libc::SYS_recvfrom, [fd as usize, at, buffer.len(), flags, name, name_len])
    };
    (n, Name::decode(&raw, len as usize))
}

/// Sends without blocking.
fn send_to(fd: RawFd, bytes: &[u8], to: &Name) -> isize {
    let (raw, len) = to.encode();
    let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize;
    let (at, name) = (bytes.as_ptr() as usize, &raw const raw as usize);
    // SAFETY: the kernel reads the bytes and the name.
    unsafe { syscall(libc::SYS_sendto, [fd as usize, at, bytes.len(), flags, name, len]) }
}
