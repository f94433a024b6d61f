//! Addresses of simulated sockets, as names of Unix sockets.
//!
//! The kernel keeps the address of a simulated socket for us: as its name in the abstract
//! namespace, which is freed when the socket is closed. So the kernel reports addresses that are
//! in use, and `accept` and `recvfrom` return the other side's address with the connection or the
//! datagram.
//!
//! ```text
//!   "\0trefoil" | process | network | kind | host | number | address | other address
//! ```

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The beginning of every name; the zero byte makes it abstract.
const MAGIC: &[u8; 8] = b"\0trefoil";
/// The length of an encoded address: the family, 16 bytes, and the port.
const ADDR_BYTES: usize = 19;
const NAME_BYTES: usize = MAGIC.len() + 4 + 4 + 1 + 2 + 8 + 2 * ADDR_BYTES;

/// What a name belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum NameKind {
    /// A stream socket of the program.
    Stream = b's',
    /// A datagram socket of the program.
    Datagram = b'd',
    /// The network's end of a connection.
    End = b'e',
    /// The network's socket for datagrams to and from an address.
    Puppet = b'u',
}

/// The name of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Name {
    pub(super) network: u32,
    pub(super) kind: NameKind,
    /// The host, if the address means another socket on each host.
    pub(super) host: u16,
    /// Tells ends of connections apart; 0 for others.
    pub(super) number: u64,
    /// For the program's sockets their address. For the network's, the address of the other side,
    /// as the program sees it.
    pub(super) addr: SocketAddr,
    /// For ends of connections, the address of the program's socket.
    pub(super) local: SocketAddr,
}

/// The address with all bits zero.
pub(super) const UNSPECIFIED: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

impl Name {
    /// Returns the name as the kernel takes it, with its length.
    pub(super) fn encode(&self) -> (libc::sockaddr_un, usize) {
        let mut bytes = [0; NAME_BYTES];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        put(MAGIC);
        put(&std::process::id().to_ne_bytes());
        put(&self.network.to_ne_bytes());
        put(&[self.kind as u8]);
        put(&self.host.to_ne_bytes());
        put(&self.number.to_ne_bytes());
        put(&encode_addr(self.addr));
        put(&encode_addr(self.local));
        // SAFETY: zeros are an address without a name.
        let mut name: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        name.sun_family = libc::AF_UNIX as u16;
        for (to, from) in name.sun_path.iter_mut().zip(bytes) {
            *to = from as libc::c_char;
        }
        (name, size_of::<libc::sa_family_t>() + NAME_BYTES)
    }

    /// Returns the name in an address of `len` bytes that the kernel has written. None if it is not
    /// the address of a simulated socket.
    pub(super) fn decode(raw: &libc::sockaddr_un, len: usize) -> Option<Name> {
        if raw.sun_family != libc::AF_UNIX as u16
            || len != size_of::<libc::sa_family_t>() + NAME_BYTES
        {
            return None;
        }
        #[allow(clippy::unnecessary_cast, reason = "c_char is u8 on aarch64")]
        let bytes: [u8; NAME_BYTES] = std::array::from_fn(|i| raw.sun_path[i] as u8);
        Name::decode_abstract(&bytes[1..])
    }

    /// As [`Name::decode`], for the bytes after the zero byte that makes a name abstract.
    pub(super) fn decode_abstract(bytes: &[u8]) -> Option<Name> {
        let mut rest = bytes.strip_prefix(&MAGIC[1..])?;
        if bytes.len() != NAME_BYTES - 1 {
            return None;
        }
        let mut take = |n: usize| {
            let (part, after) = rest.split_at(n);
            rest = after;
            part
        };
        let _process = take(4);
        let network = u32::from_ne_bytes(take(4).try_into().ok()?);
        let kind = match take(1)[0] {
            b's' => NameKind::Stream,
            b'd' => NameKind::Datagram,
            b'e' => NameKind::End,
            b'u' => NameKind::Puppet,
            _ => return None,
        };
        let host = u16::from_ne_bytes(take(2).try_into().ok()?);
        let number = u64::from_ne_bytes(take(8).try_into().ok()?);
        let addr = decode_addr(take(ADDR_BYTES))?;
        let local = decode_addr(take(ADDR_BYTES))?;
        Some(Name { network, kind, host, number, addr, local })
    }
}

fn encode_addr(addr: SocketAddr) -> [u8; ADDR_BYTES] {
    let mut bytes = [0; ADDR_BYTES];
    match addr.ip() {
        IpAddr::V4(ip) => {
            bytes[0] = 4;
            bytes[1..5].copy_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            bytes[0] = 6;
            bytes[1..17].copy_from_slice(&ip.octets());
        }
    }
    bytes[17..].copy_from_slice(&addr.port().to_ne_bytes());
    bytes
}

fn decode_addr(bytes: &[u8]) -> Option<SocketAddr> {
    let ip = match bytes[0] {
        4 => IpAddr::from(<[u8; 4]>::try_from(&bytes[1..5]).ok()?),
        6 => IpAddr::from(<[u8; 16]>::try_from(&bytes[1..17]).ok()?),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_ne_bytes(bytes[17..].try_into().ok()?)))
}

/// Returns the Internet address in an address of `len` bytes. None if it is of another family.
///
/// # Safety
/// `raw` has `len` readable bytes.
pub(super) unsafe fn read_inet(raw: *const libc::sockaddr, len: usize) -> Option<SocketAddr> {
    if raw.is_null() || len < size_of::<libc::sa_family_t>() {
        return None;
    }
    // SAFETY: the lengths are checked; the address may be unaligned.
    unsafe {
        match c_int::from((&raw const (*raw).sa_family).read_unaligned()) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                let inet = raw.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(inet.sin_addr.s_addr));
                Some(SocketAddr::new(ip.into(), u16::from_be(inet.sin_port)))
            }
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
                let inet = raw.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(inet.sin6_addr.s6_addr);
                // A mapped address means the IPv4 address.
                let ip = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
                Some(SocketAddr::new(ip, u16::from_be(inet.sin6_port)))
            }
            _ => None,
        }
    }
}

/// Writes an Internet address to a buffer of `*len` bytes, as the kernel does: what does not fit is
/// cut off, and `*len` becomes the whole length. A socket of the family `AF_INET6` gets IPv4
/// addresses as mapped ones.
///
/// # Safety
/// `to` has `*len` writable bytes.
pub(super) unsafe fn write_inet(
    addr: SocketAddr,
    family: c_int,
    to: *mut libc::sockaddr,
    len: &mut libc::socklen_t,
) {
    let ip = match addr.ip() {
        IpAddr::V4(ip) if family == libc::AF_INET6 && ip.is_unspecified() => {
            IpAddr::V6(Ipv6Addr::UNSPECIFIED)
        }
        IpAddr::V4(ip) if family == libc::AF_INET6 => IpAddr::V6(ip.to_ipv6_mapped()),
        ip => ip,
    };
    let room = *len as usize;
    // SAFETY: zeros are an address; the copy stays inside both buffers.
    unsafe {
        match ip {
            IpAddr::V4(ip) => {
                let mut raw: libc::sockaddr_in = std::mem::zeroed();
                raw.sin_family = libc::AF_INET as u16;
                raw.sin_port = addr.port().to_be();
                raw.sin_addr.s_addr = u32::from(ip).to_be();
                let whole = size_of_val(&raw);
                (&raw const raw).cast::<u8>().copy_to(to.cast(), room.min(whole));
                *len = whole as libc::socklen_t;
            }
            IpAddr::V6(ip) => {
                let mut raw: libc::sockaddr_in6 = std::mem::zeroed();
                raw.sin6_family = libc::AF_INET6 as u16;
                raw.sin6_port = addr.port().to_be();
                raw.sin6_addr.s6_addr = ip.octets();
                let whole = size_of_val(&raw);
                (&raw const raw).cast::<u8>().copy_to(to.cast(), room.min(whole));
                *len = whole as libc::socklen_t;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_survives_the_kernels_form() {
        for addr in ["10.0.0.1:80", "[fe80::1]:65535", "0.0.0.0:0"] {
            let name = Name {
                network: 7,
                kind: NameKind::End,
                host: 3,
                number: u64::MAX - 1,
                addr: addr.parse().unwrap(),
                local: "127.0.0.1:9".parse().unwrap(),
            };
            let (raw, len) = name.encode();
            assert_eq!(Name::decode(&raw, len), Some(name));
            assert_eq!(Name::decode(&raw, len - 1), None);
        }
    }

    #[test]
    fn an_internet_address_is_cut_off_as_by_the_kernel() {
        let addr = "10.0.0.1:80".parse().unwrap();
        let mut buffer = [0xffu8; 32];
        let mut len = 6;
        // SAFETY: the buffer has the bytes.
        unsafe { write_inet(addr, libc::AF_INET, buffer.as_mut_ptr().cast(), &mut len) };
        assert_eq!(len as usize, size_of::<libc::sockaddr_in>());
        assert_eq!(buffer[2..8], [0, 80, 10, 0, 0xff, 0xff]);
        let mut len = 32;
        // SAFETY: as above; then the same address is read.
        let read = unsafe {
            write_inet(addr, libc::AF_INET6, buffer.as_mut_ptr().cast(), &mut len);
            read_inet(buffer.as_ptr().cast(), len as usize)
        };
        assert_eq!(read, Some(addr));
    }
}
