//! The calls of the program on simulated sockets.
//!
//! A method returns None if the descriptor is not a simulated socket. The caller then calls the
//! kernel as usual. The kernel serves reads, writes, `poll`, `dup`, `shutdown` and `close` of
//! simulated sockets, too.

use super::connections::IN_PROGRESS;
use super::name::{Name, NameKind, UNSPECIFIED, read_inet, write_inet};
use super::{FIRST_PORT, Network, PORTS, State, call_with_name, check, simulation};
use crate::mem::MmapVec;
use crate::sys::clock;
use crate::sys::lock::Lock;
use crate::sys::raw::syscall;
use crate::sys::sorted_map::SortedMap;
use libc::{c_int, c_uint, sockaddr, socklen_t};
use std::ffi::OsStr;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

const EADDRINUSE: isize = -(libc::EADDRINUSE as isize);
const EADDRNOTAVAIL: isize = -(libc::EADDRNOTAVAIL as isize);
const EAFNOSUPPORT: isize = -(libc::EAFNOSUPPORT as isize);
const EALREADY: isize = -(libc::EALREADY as isize);
const EFAULT: isize = -(libc::EFAULT as isize);
const EISCONN: isize = -(libc::EISCONN as isize);
const EINVAL: isize = -(libc::EINVAL as isize);
const ENOTCONN: isize = -(libc::ENOTCONN as isize);

/// What the kernel does not know about a socket of the program.
pub(super) struct Socket {
    family: c_int,
    is_stream: bool,
    host: u16,
    pub(super) incarnation: u32,
    local: SocketAddr,
    peer: Option<SocketAddr>,
    pub(super) is_connecting: bool,
    /// Why the connection failed.
    pub(super) error: c_int,
    /// Options of protocols, which only the program reads.
    options: SortedMap<(c_int, c_int), Vec<u8>>,
}

/// Which address of a socket is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Local,
    Peer,
}

impl Network {
    /// `socket`.
    pub(crate) fn socket(&self, family: c_int, kind: c_int) -> Option<isize> {
        let base = kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
        let is_inet = family == libc::AF_INET || family == libc::AF_INET6;
        if !is_inet || (base != libc::SOCK_STREAM && base != libc::SOCK_DGRAM) {
            return None;
        }
        // SAFETY: passes no pointers.
        let make =
            || unsafe { syscall(libc::SYS_socket, [libc::AF_UNIX as usize, kind as usize, 0]) };
        let fd = make_marked(make);
        if fd >= 0 {
            let incarnation = simulation::incarnation();
            let mut state = self.lock();
            let host = state.host_of(incarnation);
            let socket = Socket::new(family, base == libc::SOCK_STREAM, host, incarnation);
            state.add_socket(fd as RawFd, socket);
        }
        if let Some(simulation) = simulation::here() {
            simulation.set_world_in_motion();
        }
        Some(fd)
    }

    /// `bind`.
    ///
    /// # Safety
    /// `addr` has `len` readable bytes.
    pub(crate) unsafe fn bind(
        &self,
        fd: RawFd,
        addr: *const sockaddr,
        len: socklen_t,
    ) -> Option<isize> {
        let mut state = self.lock();
        let number = state.number_of(fd)?;
        // SAFETY: the caller's contract.
        let Some(addr) = (unsafe { read_inet(addr, len as usize) }) else {
            return Some(EAFNOSUPPORT);
        };
        Some(state.bind(fd, number, addr).map_or_else(|error| error, |()| 0))
    }

    /// Before `listen`: a socket without an address gets one.
    pub(crate) fn before_listen(&self, fd: RawFd) {
        let mut state = self.lock();
        if let Some(number) = state.number_of(fd) {
            // If it fails, so does `listen`.
            _ = state.bind_if_unbound(fd, number, None);
        }
    }

    /// `connect`. A stream socket begins to connect: returns `EINPROGRESS`.
    ///
    /// # Safety
    /// `addr` has `len` readable bytes.
    pub(crate) unsafe fn connect(
        &self,
        fd: RawFd,
        addr: *const sockaddr,
        len: socklen_t,
    ) -> Option<isize> {
        let mut state = self.lock();
        let number = state.number_of(fd)?;
        // SAFETY: the caller's contract.
        let Some(mut addr) = (unsafe { read_inet(addr, len as usize) }) else {
            return Some(EAFNOSUPPORT);
        };
        if addr.ip().is_unspecified() {
            addr.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        Some(state.connect(fd, number, addr).unwrap_or_else(|error| error))
    }

    /// Returns the result of a connection that has been established or has failed: 0 or a negative
    /// error.
    pub(crate) fn connect_result(&self, fd: RawFd) -> isize {
        let mut state = self.lock();
        let socket = state.number_of(fd).and_then(|number| state.sockets.get_mut(&number));
        socket.map_or(0, |socket| -(std::mem::take(&mut socket.error) as isize))
    }

    /// `accept` has returned `fd`. Returns the address of the other side.
    pub(crate) fn accepted(&self, fd: RawFd) -> Option<SocketAddr> {
        let peer = kernel_name(libc::SYS_getpeername, fd)?;
        let incarnation = simulation::incarnation();
        let mut state = self.lock();
        if peer.kind != NameKind::End || peer.network != state.number {
            return None;
        }
        let family = if peer.local.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
        let mut socket = Socket::new(family, true, peer.host, incarnation);
        (socket.local, socket.peer) = (peer.local, Some(peer.addr));
        let number = state.add_socket(fd, socket);
        state.note_accepted(peer.number, number);
        Some(peer.addr)
    }

    /// Returns whether the descriptor is a simulated socket.
    pub(crate) fn has_socket(&self, fd: RawFd) -> bool {
        self.lock().number_of(fd).is_some()
    }

    /// `getsockname` or `getpeername`.
    ///
    /// # Safety
    /// `addr` has `*len` writable bytes.
    pub(crate) unsafe fn address(
        &self,
        fd: RawFd,
        side: Side,
        addr: *mut sockaddr,
        len: *mut socklen_t,
    ) -> Option<isize> {
        let state = self.lock();
        let socket = state.socket(fd)?;
        if addr.is_null() || len.is_null() {
            return Some(EFAULT);
        }
        let found = match side {
            Side::Local => Some(socket.local),
            Side::Peer if socket.is_connecting || socket.error != 0 => None,
            Side::Peer => socket.peer,
        };
        let Some(found) = found else { return Some(ENOTCONN) };
        // SAFETY: the caller's contract.
        unsafe { write_inet(found, socket.family, addr, &mut *len) };
        Some(0)
    }

    /// Returns the name to which a datagram for `addr` is sent, with its length.
    ///
    /// # Safety
    /// `addr` has `len` readable bytes.
    pub(crate) unsafe fn target(
        &self,
        fd: RawFd,
        addr: *const sockaddr,
        len: socklen_t,
    ) -> Option<Result<(libc::sockaddr_un, usize), isize>> {
        // SAFETY: the caller's contract.
        let addr = unsafe { read_inet(addr, len as usize)? };
        Some(self.target_of(fd, addr)?.map(|name| name.encode()))
    }

    fn target_of(&self, fd: RawFd, addr: SocketAddr) -> Option<Result<Name, isize>> {
        let mut state = self.lock();
        let number = state.number_of(fd)?;
        let host = state.sockets.get(&number)?.host;
        let bound = state.bind_if_unbound(fd, number, Some(addr.ip()));
        Some(bound.and_then(|()| state.puppet(host, addr)))
    }

    /// Sends a datagram without blocking.
    pub(crate) fn send_to(&self, fd: RawFd, bytes: &[u8], to: SocketAddr) -> Option<isize> {
        let (raw, len) = match self.target_of(fd, to)? {
            Ok(name) => name.encode(),
            Err(error) => return Some(error),
        };
        let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize;
        let (at, name) = (bytes.as_ptr() as usize, &raw const raw as usize);
        let args = [fd as usize, at, bytes.len(), flags, name, len];
        // SAFETY: the kernel reads the bytes and the name.
        Some(unsafe { syscall(libc::SYS_sendto, args) })
    }

    /// `setsockopt` for an option of a protocol: only remembers it.
    ///
    /// # Safety
    /// `value` has `len` readable bytes.
    pub(crate) unsafe fn set_option(
        &self,
        fd: RawFd,
        (level, name): (c_int, c_int),
        value: *const u8,
        len: socklen_t,
    ) -> Option<isize> {
        if level == libc::SOL_SOCKET || value.is_null() {
            return None;
        }
        let mut state = self.lock();
        let number = state.number_of(fd)?;
        // SAFETY: the caller's contract.
        let value = unsafe { std::slice::from_raw_parts(value, len as usize) }.to_vec();
        state.sockets.get_mut(&number)?.options.insert((level, name), value);
        Some(0)
    }

    /// `getsockopt`.
    ///
    /// # Safety
    /// `value` has `*len` writable bytes.
    pub(crate) unsafe fn option(
        &self,
        fd: RawFd,
        (level, name): (c_int, c_int),
        value: *mut u8,
        len: *mut socklen_t,
    ) -> Option<isize> {
        let mut state = self.lock();
        let number = state.number_of(fd)?;
        if value.is_null() || len.is_null() {
            return None;
        }
        let socket = state.sockets.get_mut(&number)?;
        let number = |n: c_int| n.to_ne_bytes().to_vec();
        let found = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) if socket.error != 0 => {
                number(std::mem::take(&mut socket.error))
            }
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => number(socket.family),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => {
                number(if socket.is_stream { libc::IPPROTO_TCP } else { libc::IPPROTO_UDP })
            }
            (libc::SOL_SOCKET, _) => return None,
            _ => socket.options.get(&(level, name)).cloned().unwrap_or_else(|| number(0)),
        };
        // SAFETY: the caller's contract; at most `*len` bytes are written.
        unsafe {
            let n = found.len().min(*len as usize);
            found.as_ptr().copy_to(value, n);
            *len = n as socklen_t;
        }
        Some(0)
    }

    /// Returns the family of a simulated socket.
    pub(crate) fn family(&self, fd: RawFd) -> Option<c_int> {
        self.lock().socket(fd).map(|socket| socket.family)
    }
}

/// Returns the Internet address in the name that the kernel has written, of `len` bytes: the source
/// of a datagram. None if it is not that of a simulated socket.
pub(crate) fn source(raw: &libc::sockaddr_un, len: usize) -> Option<SocketAddr> {
    Name::decode(raw, len).map(|name| name.addr)
}

/// As [`source`], for the bytes of the name after the zero byte that makes it abstract.
pub(crate) fn source_of_abstract(bytes: &[u8]) -> Option<SocketAddr> {
    Name::decode_abstract(bytes).map(|name| name.addr)
}

/// Writes an address for a socket of `family` to a buffer, as the kernel does.
///
/// # Safety
/// `to` has `*len` writable bytes.
pub(crate) unsafe fn write_address(
    addr: SocketAddr,
    family: c_int,
    to: *mut sockaddr,
    len: &mut socklen_t,
) {
    // SAFETY: the caller's contract.
    unsafe { write_inet(addr, family, to, len) };
}

impl Socket {
    fn new(family: c_int, is_stream: bool, host: u16, incarnation: u32) -> Socket {
        Socket {
            family,
            is_stream,
            host,
            incarnation,
            local: UNSPECIFIED,
            peer: None,
            is_connecting: false,
            error: 0,
            options: SortedMap::new(),
        }
    }
}

impl State {
    fn host_of(&self, incarnation: u32) -> u16 {
        self.incarnations.get(incarnation as usize).copied().unwrap_or(0)
    }

    fn number_of(&self, fd: RawFd) -> Option<u64> {
        self.descriptors.get(&fd).copied()
    }

    fn socket(&self, fd: RawFd) -> Option<&Socket> {
        self.sockets.get(&self.number_of(fd)?).map(Box::as_ref)
    }

    /// Returns a descriptor of a socket.
    pub(super) fn descriptor_of(&self, number: u64) -> Option<RawFd> {
        self.descriptors.entries().iter().find(|(_, of)| *of == number).map(|(fd, _)| *fd)
    }

    /// Adds a socket with its first descriptor. Returns its number.
    fn add_socket(&mut self, fd: RawFd, socket: Socket) -> u64 {
        let number = self.next_number();
        self.sockets.insert(number, Box::new(socket));
        self.add_descriptor(fd, number);
        number
    }

    fn add_descriptor(&mut self, fd: RawFd, number: u64) {
        self.remove_descriptor(fd);
        self.descriptors.insert(fd, number);
        mark(fd, true);
    }

    /// Forgets a descriptor, and a socket that has no other. Returns whether it was a simulated
    /// one: then it is marked until it is closed.
    fn remove_descriptor(&mut self, fd: RawFd) -> bool {
        let Some(number) = self.descriptors.remove(&fd) else { return false };
        if self.descriptor_of(number).is_none() {
            self.sockets.remove(&number);
        }
        true
    }

    fn bind(&mut self, fd: RawFd, number: u64, addr: SocketAddr) -> Result<(), isize> {
        let socket = self.sockets.get(&number).ok_or(EINVAL)?;
        let (host, is_stream) = (socket.host, socket.is_stream);
        if socket.local.port() != 0 {
            return Err(EINVAL);
        }
        let own = IpAddr::V4(self.hosts[host as usize].ip);
        if !addr.ip().is_unspecified() && !addr.ip().is_loopback() && addr.ip() != own {
            return Err(EADDRNOTAVAIL);
        }
        let kind = if is_stream { NameKind::Stream } else { NameKind::Datagram };
        let attempts = if addr.port() == 0 { PORTS } else { 1 };
        for _ in 0..attempts {
            let mut addr = addr;
            if addr.port() == 0 {
                self.last_port = (self.last_port + 1) % PORTS;
                addr.set_port(FIRST_PORT + self.last_port);
            }
            let name = self.name(kind, host, 0, addr);
            match check(call_with_name(libc::SYS_bind, fd, &name)) {
                Err(EADDRINUSE) => {}
                Err(error) => return Err(error),
                Ok(_) => {
                    if let Some(socket) = self.sockets.get_mut(&number) {
                        socket.local = addr;
                    }
                    return Ok(());
                }
            }
        }
        Err(EADDRINUSE)
    }

    /// Gives a socket without an address one: any, or the one that it uses to talk to `other`.
    fn bind_if_unbound(
        &mut self,
        fd: RawFd,
        number: u64,
        other: Option<IpAddr>,
    ) -> Result<(), isize> {
        let socket = self.sockets.get(&number).ok_or(EINVAL)?;
        if socket.local.port() != 0 {
            return Ok(());
        }
        let ip = match other {
            Some(other) if socket.is_stream => self.ip_towards(socket.host, other),
            _ => UNSPECIFIED.ip(),
        };
        self.bind(fd, number, SocketAddr::new(ip, 0))
    }

    fn connect(&mut self, fd: RawFd, number: u64, addr: SocketAddr) -> Result<isize, isize> {
        let socket = self.sockets.get(&number).ok_or(EINVAL)?;
        let (host, is_stream) = (socket.host, socket.is_stream);
        if socket.is_connecting {
            return Err(EALREADY);
        }
        if is_stream && socket.peer.is_some() {
            let error = socket.error;
            return Err(if error != 0 { -(error as isize) } else { EISCONN });
        }
        self.bind_if_unbound(fd, number, Some(addr.ip()))?;
        let own_ip = self.ip_towards(host, addr.ip());
        let Some(socket) = self.sockets.get_mut(&number) else { return Err(EINVAL) };
        if socket.local.ip().is_unspecified() {
            socket.local.set_ip(own_ip);
        }
        let local = socket.local;
        socket.peer = Some(addr);
        if !is_stream {
            let name = self.puppet(host, addr)?;
            return check(call_with_name(libc::SYS_connect, fd, &name));
        }
        self.begin_connection(fd, number, host, (local, addr), clock::now())?;
        if let Some(socket) = self.sockets.get_mut(&number) {
            socket.is_connecting = true;
        }
        Ok(IN_PROGRESS)
    }
}

/// Returns the name that `getsockname` or `getpeername` of the kernel reports.
fn kernel_name(number: libc::c_long, fd: RawFd) -> Option<Name> {
    // SAFETY: zeros are an address without a name.
    let mut raw: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&raw) as socklen_t;
    // SAFETY: the kernel writes at most the length of the name.
    let rc =
        unsafe { syscall(number, [fd as usize, &raw mut raw as usize, &raw mut len as usize]) };
    if rc == 0 { Name::decode(&raw, len as usize) } else { None }
}

impl Network {
    /// An incarnation of a host has lost its power: closes its sockets, and drops its connections
    /// without a reset to the other side.
    pub(crate) fn lose_power(&self, host: u16, incarnation: u32) {
        {
            let mut state = self.lock();
            state.hosts[host as usize].is_up = false;
            state.lose_ends(host, clock::now());
        }
        self.close_descriptors(&|_, owner| owner == incarnation);
    }

    /// The run has ended: closes its sockets and disks. Sockets of the test itself stay open,
    /// because the test may have returned them, with two exceptions: all are closed if goroutines
    /// are left, and those in `waited_by_threads` are closed always.
    pub(crate) fn end(&self, has_left_goroutines: bool, waited_by_threads: &[RawFd]) {
        let is_left = |owner| has_left_goroutines || !simulation::is_of_test(owner);
        self.close_descriptors(&|_, owner| is_left(owner));
        self.close_descriptors(&|fd, _| waited_by_threads.contains(&fd));
        self.close_disks();
        let mut state = self.lock();
        state.ends.clear();
        state.puppets.clear();
        state.puppet_of.clear();
        state.events.clear();
        state.epoll = None;
        let rest: Vec<RawFd> = state.descriptors.entries().iter().map(|(fd, _)| *fd).collect();
        for fd in rest {
            state.remove_descriptor(fd);
            mark(fd, false);
        }
    }

    /// Closes the descriptors for which `is_meant` returns true, given the descriptor and its
    /// incarnation. Their goroutines never run again.
    fn close_descriptors(&self, is_meant: &dyn Fn(RawFd, u32) -> bool) {
        let (sockets, event_descriptors): (Vec<RawFd>, Vec<RawFd>) = {
            let mut state = self.lock();
            let owner = |number| state.sockets.get(number).map(|socket| socket.incarnation);
            let sockets = state.descriptors.entries().iter();
            let sockets = sockets.filter(|(fd, n)| owner(n).is_some_and(|of| is_meant(*fd, of)));
            let sockets = sockets.map(|(fd, _)| *fd).collect();
            let event_descriptors = state.event_descriptors.entries().iter();
            let event_descriptors = event_descriptors.filter(|(fd, of)| is_meant(*fd, *of));
            let event_descriptors = event_descriptors.map(|(fd, _)| *fd).collect();
            state.event_descriptors.retain(|&fd, owner| !is_meant(fd, *owner));
            (sockets, event_descriptors)
        };
        for fd in sockets {
            self.lock().remove_descriptor(fd);
            self.retire(fd);
            mark(fd, false);
        }
        event_descriptors.into_iter().for_each(|fd| self.retire(fd));
    }

    /// `fd` is a new epoll instance or eventfd of the caller.
    pub(crate) fn add_event_descriptor(&self, fd: RawFd) {
        let owner = simulation::incarnation();
        self.lock().event_descriptors.insert(fd, owner);
    }

    /// A descriptor is about to be closed. Returns whether [`close_marked`] must do it.
    pub(crate) fn before_close(&self, fd: RawFd) -> bool {
        let mut state = self.lock();
        state.event_descriptors.remove(&fd);
        state.remove_descriptor(fd)
    }

    /// The descriptors from `first` to `last` are about to be closed by [`close_marked_range`].
    pub(crate) fn before_close_range(&self, first: c_uint, last: c_uint) {
        let mut state = self.lock();
        let is_closed = |fd: RawFd| (first..=last).contains(&(fd as c_uint));
        state.event_descriptors.retain(|&fd, _| !is_closed(fd));
        let sockets = state.descriptors.entries().iter().map(|(fd, _)| *fd);
        let closed: Vec<RawFd> = sockets.filter(|fd| is_closed(*fd)).collect();
        closed.into_iter().for_each(|fd| _ = state.remove_descriptor(fd));
    }

    /// `from` was duplicated as `to`.
    pub(crate) fn after_duplicate(&self, from: RawFd, to: RawFd) {
        if to < 0 || from == to {
            return;
        }
        let mut state = self.lock();
        match state.event_descriptors.get(&from).copied() {
            Some(owner) => state.event_descriptors.insert(to, owner),
            None => _ = state.event_descriptors.remove(&to),
        }
        match state.number_of(from) {
            Some(number) => state.add_descriptor(to, number),
            None => {
                if state.remove_descriptor(to) {
                    mark(to, false);
                }
            }
        }
    }
}

/// The descriptors of simulated sockets and of networks, one bit each, of all simulations.
pub(super) static SIMULATED: Lock<MmapVec<u64>> = Lock::new(MmapVec::new());

/// Notes whether a descriptor is a simulated socket or one of a network's own descriptors.
pub(super) fn mark(fd: RawFd, is_simulated: bool) {
    set_mark(&mut SIMULATED.lock(), fd, is_simulated);
}

fn set_mark(bits: &mut MmapVec<u64>, fd: RawFd, is_simulated: bool) {
    let (word, bit) = (fd as usize / 64, 1 << (fd % 64));
    while bits.len() <= word {
        bits.push(0);
    }
    if is_simulated {
        bits[word] |= bit;
    } else {
        bits[word] &= !bit;
    }
}

/// Calls `make`, which returns a new descriptor or a negative error, and marks the descriptor.
pub(crate) fn make_marked(make: impl FnOnce() -> isize) -> isize {
    let mut bits = SIMULATED.lock();
    let fd = make();
    if fd >= 0 {
        set_mark(&mut bits, fd as RawFd, true);
    }
    fd
}

/// Closes a marked descriptor, under the lock: so neither [`path_of_other`] on another thread nor a
/// new child process holds the file meanwhile (invariant 3).
pub(crate) fn close_marked(fd: RawFd) -> isize {
    let mut bits = SIMULATED.lock();
    set_mark(&mut bits, fd, false);
    // SAFETY: the caller owns the descriptor.
    unsafe { syscall(libc::SYS_close, [fd as usize]) }
}

/// Calls `close`, which closes the descriptors from `first` to `last`, as [`close_marked`] does.
pub(crate) fn close_marked_range(
    first: c_uint,
    last: c_uint,
    close: impl FnOnce() -> isize,
) -> isize {
    let mut bits = SIMULATED.lock();
    let end = (last as usize).saturating_add(1).min(bits.len() * u64::BITS as usize);
    for fd in first as usize..end {
        set_mark(&mut bits, fd as RawFd, false);
    }
    close()
}

/// `dup3` that closes a marked descriptor, `to`, as [`close_marked`] does.
pub(crate) fn replace_marked(from: RawFd, to: RawFd, flags: c_int) -> isize {
    let _marks = SIMULATED.lock();
    // SAFETY: the caller owns the descriptor `to`.
    unsafe { syscall(libc::SYS_dup3, [from as usize, to as usize, flags as usize]) }
}

/// Returns the path of an open file, unless its descriptor is [marked](mark) (invariant 3).
///
/// `/proc/self` stands for the main thread, and has no files once that has ended.
pub(super) fn path_of_other(fd: RawFd) -> Option<PathBuf> {
    let link = format!("/proc/thread-self/fd/{fd}\0");
    let mut buffer = [0u8; libc::PATH_MAX as usize];
    let args = [
        libc::AT_FDCWD as usize,
        link.as_ptr() as usize,
        buffer.as_mut_ptr() as usize,
        buffer.len(),
    ];
    let len = {
        let bits = SIMULATED.lock();
        if bits.get(fd as usize / 64).copied().unwrap_or(0) & 1 << (fd % 64) != 0 {
            return None;
        }
        // SAFETY: the kernel reads a path that ends with a zero, and writes at most the buffer's
        // length.
        unsafe { syscall(libc::SYS_readlinkat, args) }
    };
    let path = buffer.get(..usize::try_from(len).ok()?)?;
    Some(PathBuf::from(OsStr::from_bytes(path)))
}

/// Returns a number that is larger than every open descriptor.
///
/// A listing of `/proc/thread-self/fd` would hold each open file for a moment, those of other simulations
/// included (invariant 3).
pub(super) fn descriptor_limit() -> RawFd {
    let mut buffer = [0u8; 4096];
    // SAFETY: the path ends with a zero; the kernel writes at most the buffer's length.
    let len = unsafe {
        let path = c"/proc/thread-self/status".as_ptr() as usize;
        let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as usize;
        let fd = syscall(libc::SYS_openat, [libc::AT_FDCWD as usize, path, flags, 0]);
        if fd < 0 {
            return 0;
        }
        let len =
            syscall(libc::SYS_read, [fd as usize, buffer.as_mut_ptr() as usize, buffer.len()]);
        syscall(libc::SYS_close, [fd as usize]);
        len
    };
    let text = String::from_utf8_lossy(&buffer[..usize::try_from(len).unwrap_or(0)]);
    let size = text.lines().find_map(|line| line.strip_prefix("FDSize:"));
    size.and_then(|size| size.trim().parse().ok()).unwrap_or(0)
}
