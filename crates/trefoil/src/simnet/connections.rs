//! Streams: how a connection is made, carries data, and ends.
//!
//! A connection has two ends. Each end is the network's side of a Unix stream socket whose other
//! side is the program's socket. What the program writes becomes segments, which arrive at the
//! other end in their order:
//!
//! ```text
//!   the program writes ─▶ kernel ─▶ read_end ─▶ incoming of the peer ─▶ arrived ─▶ kernel ─▶ reads
//!                                     transmit          deliver_due       flush
//! ```
//!
//! # Connecting
//! The client's socket is connected to its end at once, and its send buffer filled with bytes that
//! mean nothing (`filler`): so the kernel does not report it as writable. When the connection is
//! established, the network removes them. If it is refused, the end is closed.
//!
//! # Loss
//! A segment that is lost, or whose link is cut, is sent again after 200 ms. Each further pause is
//! twice as long, and at most 120 s. If the link stays cut for 15 minutes, the connection is reset:
//! the sender's calls fail with `ECONNRESET`, where Linux reports `ETIMEDOUT`.

use super::links::Passage;
use super::name::{Name, NameKind};
use super::{Event, Network, NetworkFd, State, call_with_name, check, owned, unix_socket};
use crate::sys::clock::{LATEST, Nanos};
use crate::sys::raw::syscall;
use libc::c_int;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::RawFd;

/// The network reads nothing more from an end while its peer has at least so many bytes in
/// `incoming` and `arrived`.
const WINDOW: usize = 256 << 10;
/// The most bytes of a segment.
const SEGMENT: usize = 64 << 10;
const SECOND: Nanos = 1_000_000_000;
/// The pause before a segment is sent again for the first time, and the longest one.
const FIRST_RETRY: Nanos = SECOND / 5;
const LONGEST_RETRY: Nanos = 120 * SECOND;
/// How long a segment is sent again.
const GIVE_UP_AFTER: Nanos = 924 * SECOND;
/// How often a request for a connection is sent again: for 127 seconds.
const REQUESTS: u32 = 6;

const EAGAIN: isize = -(libc::EAGAIN as isize);
const ECONNREFUSED: isize = -(libc::ECONNREFUSED as isize);
const EINPROGRESS: isize = -(libc::EINPROGRESS as isize);

enum Segment {
    Data(Vec<u8>),
    /// The sender sends no more.
    Fin,
    Reset,
}

impl Segment {
    fn len(&self) -> usize {
        match self {
            Segment::Data(bytes) => bytes.len(),
            Segment::Fin | Segment::Reset => 0,
        }
    }
}

/// The network's side of a socket. See the head of the file.
pub(super) struct End {
    /// None after the host has crashed.
    fd: Option<NetworkFd>,
    /// The program's socket. None before it is accepted.
    socket: Option<u64>,
    host: u16,
    /// The address of the program's socket, and the one that it is connected to.
    local: SocketAddr,
    remote: SocketAddr,
    peer: Option<u64>,
    peer_host: u16,
    /// Bytes that the program has not written.
    filler: usize,
    /// On their way to this end, with the times of their arrival, which ascend.
    incoming: VecDeque<(Nanos, Segment)>,
    /// At this end; the kernel's buffer is full.
    arrived: VecDeque<Segment>,
    /// The bytes in `incoming` and `arrived`.
    queued: usize,
    /// When the last of `incoming` arrives.
    last_due: Nanos,
    /// Since when the first of `incoming` is sent again and again, and the next pause.
    retry: Option<(Nanos, Nanos)>,
    /// The program writes no more.
    has_ended: bool,
    /// The program reads the end of the stream.
    is_finished: bool,
}

impl End {
    fn new(fd: NetworkFd, host: u16, local: SocketAddr, remote: SocketAddr, peer_host: u16) -> End {
        End {
            fd: Some(fd),
            socket: None,
            host,
            local,
            remote,
            peer: None,
            peer_host,
            filler: 0,
            incoming: VecDeque::new(),
            arrived: VecDeque::new(),
            queued: 0,
            last_due: 0,
            retry: None,
            has_ended: false,
            is_finished: false,
        }
    }

    /// Returns the raw descriptor.
    fn raw(&self) -> Option<RawFd> {
        self.fd.as_ref().map(NetworkFd::as_raw_fd)
    }
}

impl State {
    /// Begins a connection of the program's socket `fd`, with the address `local`. Returns the
    /// number of its end.
    pub(super) fn begin_connection(
        &mut self,
        fd: RawFd,
        socket: u64,
        host: u16,
        (local, remote): (SocketAddr, SocketAddr),
        now: Nanos,
    ) -> Result<u64, isize> {
        let number = self.next_number();
        let gate = unix_socket(libc::SOCK_STREAM)?;
        let name = Name { local, ..self.name(NameKind::End, host, number, remote) };
        check(call_with_name(libc::SYS_bind, gate.as_raw_fd(), &name))?;
        // SAFETY: passes no pointers.
        check(unsafe { syscall(libc::SYS_listen, [gate.as_raw_fd() as usize, 1]) })?;
        check(call_with_name(libc::SYS_connect, fd, &name))?;
        let flags = (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as usize;
        // SAFETY: null pointers ask for no address.
        let accept =
            || unsafe { syscall(libc::SYS_accept4, [gate.as_raw_fd() as usize, 0, 0, flags]) };
        let accepted = owned(accept)?;
        drop(gate);
        self.watch(&accepted, number << 1)?;
        let peer_host = self.host_at(remote.ip(), host);
        let mut end = End::new(accepted, host, local, remote, peer_host.unwrap_or(host));
        end.socket = Some(socket);
        end.filler = fill(fd);
        self.ends.insert(number, Box::new(end));
        match peer_host {
            Some(peer_host) => {
                let due = self.arrival(host, peer_host, 0, now);
                self.schedule(due, Event::Request { end: number, attempt: 0 });
            }
            None => {
                let error = libc::EHOSTUNREACH;
                self.schedule(now + FIRST_RETRY, Event::Refused { end: number, error });
            }
        }
        Ok(number)
    }

    /// Returns when something that is sent now arrives: what is lost is sent again.
    fn arrival(&mut self, from: u16, to: u16, len: usize, now: Nanos) -> Nanos {
        let (mut sent, mut pause) = (now, FIRST_RETRY);
        loop {
            match self.send_over(from, to, len, sent) {
                Passage::Arrives(due) => return due,
                Passage::Lost if sent - now > GIVE_UP_AFTER => return LATEST,
                Passage::Lost => {
                    sent += pause;
                    pause = (2 * pause).min(LONGEST_RETRY);
                }
            }
        }
    }

    /// A request for a connection arrives, or would arrive, at the listener's host.
    pub(super) fn request_arrives(&mut self, number: u64, attempt: u32, now: Nanos) {
        let Some(end) = self.ends.get(&number) else { return };
        let (host, peer_host, local, remote) = (end.host, end.peer_host, end.local, end.remote);
        let accepted = if self.is_connected(host, peer_host) {
            self.connect_to_listener(number, (peer_host, remote), (host, local))
        } else {
            Err(EAGAIN)
        };
        match accepted {
            Ok(()) => {
                let due = self.arrival(peer_host, host, 0, now);
                if let Some(end) = self.ends.get_mut(&number) {
                    end.last_due = due;
                }
                self.schedule(due, Event::Established { end: number, attempt: 0 });
            }
            // The link is cut, the host is down, or the listener's queue is full: asks again.
            Err(EAGAIN) if attempt < REQUESTS => {
                let due = now + (SECOND << attempt);
                self.schedule(due, Event::Request { end: number, attempt: attempt + 1 });
            }
            Err(EAGAIN) => {
                let due = now + (SECOND << attempt);
                self.schedule(due, Event::Refused { end: number, error: libc::ETIMEDOUT });
            }
            Err(error) => {
                let due = self.arrival(peer_host, host, 0, now);
                self.schedule(due, Event::Refused { end: number, error: -error as c_int });
            }
        }
    }

    /// Connects a new end to the listener at an address, and makes it the peer of `number`.
    fn connect_to_listener(
        &mut self,
        number: u64,
        (host, local): (u16, SocketAddr),
        (peer_host, remote): (u16, SocketAddr),
    ) -> Result<(), isize> {
        let fd = unix_socket(libc::SOCK_STREAM)?;
        let own = self.next_number();
        // The listener may be bound to every address; the connection has one.
        let name = Name { local, ..self.name(NameKind::End, host, own, remote) };
        check(call_with_name(libc::SYS_bind, fd.as_raw_fd(), &name))?;
        let mut result = Err(ECONNREFUSED);
        for listener in self.names_at(NameKind::Stream, host, local) {
            result = check(call_with_name(libc::SYS_connect, fd.as_raw_fd(), &listener));
            if result != Err(ECONNREFUSED) {
                break;
            }
        }
        result?;
        self.watch(&fd, own << 1)?;
        let mut end = End::new(fd, host, local, remote, peer_host);
        end.peer = Some(number);
        self.ends.insert(own, Box::new(end));
        if let Some(client) = self.ends.get_mut(&number) {
            client.peer = Some(own);
        }
        Ok(())
    }

    /// The client learns that its connection is established.
    pub(super) fn established(&mut self, number: u64, attempt: u32, now: Nanos) {
        let Some(end) = self.ends.get(&number) else { return };
        let (host, peer_host) = (end.host, end.peer_host);
        if !self.is_connected(peer_host, host) {
            // The answer is sent again, as the request would be.
            let due = now + (SECOND << attempt);
            let again = Event::Established { end: number, attempt: attempt + 1 };
            let lost = Event::Refused { end: number, error: libc::ETIMEDOUT };
            return self.schedule(due, if attempt < REQUESTS { again } else { lost });
        }
        let Some(end) = self.ends.get_mut(&number) else { return };
        let Some(fd) = end.raw() else { return };
        let mut buffer = [0; 4096];
        while end.filler > 0 {
            let want = end.filler.min(buffer.len());
            match receive(fd, &mut buffer[..want]) {
                n @ 1.. => end.filler -= n as usize,
                _ => break, // The program has closed its socket.
            }
        }
        end.filler = 0;
        let socket = end.socket.and_then(|socket| self.sockets.get_mut(&socket));
        if let Some(socket) = socket {
            socket.is_connecting = false;
        }
        self.read_end(number, now);
        self.flush(number, now);
    }

    /// The client learns that there is no connection.
    pub(super) fn refused(&mut self, number: u64, error: c_int) {
        if let Some(end) = self.ends.remove(&number)
            && let Some(socket) = end.socket.and_then(|socket| self.sockets.get_mut(&socket))
        {
            (socket.is_connecting, socket.error) = (false, error);
        }
    }

    /// Notes which socket of the program has accepted the connection of an end.
    pub(super) fn note_accepted(&mut self, number: u64, socket: u64) {
        if let Some(end) = self.ends.get_mut(&number) {
            end.socket = Some(socket);
        }
    }

    /// The kernel reports a change of an end.
    pub(super) fn end_is_ready(&mut self, number: u64, events: u32, now: Nanos) {
        let Some(end) = self.ends.get(&number) else { return };
        if end.filler > 0 {
            if events & libc::EPOLLHUP as u32 != 0 {
                // The program has given up; the other side may have accepted already.
                self.transmit(number, Segment::Reset, now);
                self.ends.remove(&number);
            }
            return;
        }
        self.read_end(number, now);
        self.flush(number, now);
    }

    /// Reads what the program has written, and sends it to the peer.
    fn read_end(&mut self, number: u64, now: Nanos) {
        loop {
            let Some(end) = self.ends.get(&number) else { return };
            let Some(fd) = end.raw() else { return };
            let peer = end.peer.and_then(|peer| self.ends.get(&peer));
            if end.has_ended || end.filler > 0 || peer.is_some_and(|peer| peer.queued >= WINDOW) {
                return;
            }
            let mut bytes = vec![0; SEGMENT];
            match receive(fd, &mut bytes) {
                n @ 1.. => {
                    bytes.truncate(n as usize);
                    self.transmit(number, Segment::Data(bytes), now);
                }
                0 => {
                    self.mark_ended(number);
                    self.transmit(number, Segment::Fin, now);
                    self.remove_if_over(number);
                    return;
                }
                EAGAIN => return,
                _ => {
                    // The program has closed its socket without reading everything.
                    self.mark_ended(number);
                    self.transmit(number, Segment::Reset, now);
                    return;
                }
            }
        }
    }

    fn mark_ended(&mut self, number: u64) {
        if let Some(end) = self.ends.get_mut(&number) {
            end.has_ended = true;
        }
    }

    /// Sends a segment from an end to its peer.
    fn transmit(&mut self, number: u64, segment: Segment, now: Nanos) {
        let Some(end) = self.ends.get(&number) else { return };
        let (host, peer_host, peer) = (end.host, end.peer_host, end.peer);
        let due = self.arrival(host, peer_host, segment.len(), now);
        let Some(peer) = peer.filter(|peer| self.ends.contains_key(peer)) else {
            // The other side has no such connection any more.
            if !matches!(segment, Segment::Reset) {
                let back = self.arrival(peer_host, host, 0, due);
                self.push_incoming(number, back, Segment::Reset);
            }
            return;
        };
        self.push_incoming(peer, due, segment);
    }

    /// Puts a segment on its way to an end.
    fn push_incoming(&mut self, number: u64, due: Nanos, segment: Segment) {
        let Some(end) = self.ends.get_mut(&number) else { return };
        let due = due.max(end.last_due);
        end.last_due = due;
        end.queued += segment.len();
        end.incoming.push_back((due, segment));
        self.schedule(due, Event::Deliver { end: number });
    }

    /// Delivers the segments that have arrived at an end.
    pub(super) fn deliver_due(&mut self, number: u64, now: Nanos) {
        loop {
            let Some(end) = self.ends.get(&number) else { return };
            if end.incoming.front().is_none_or(|(due, _)| *due > now) {
                return;
            }
            let (host, peer_host, is_gone) = (end.host, end.peer_host, end.fd.is_none());
            if !self.is_connected(peer_host, host) {
                return self.send_again(number, now);
            }
            if is_gone {
                // The host was started again, and does not know the connection.
                return self.answer_with_reset(number, now);
            }
            let Some(end) = self.ends.get_mut(&number) else { return };
            end.retry = None;
            match end.incoming.pop_front() {
                Some((_, Segment::Reset)) => return self.reset(number),
                Some((_, segment)) => end.arrived.push_back(segment),
                None => return,
            }
            self.flush(number, now);
        }
    }

    /// The first segment on its way to an end cannot arrive: sends it again later.
    fn send_again(&mut self, number: u64, now: Nanos) {
        let Some(end) = self.ends.get_mut(&number) else { return };
        let (since, pause) = end.retry.unwrap_or((now, FIRST_RETRY));
        end.retry = Some((since, (2 * pause).min(LONGEST_RETRY)));
        if now - since > GIVE_UP_AFTER {
            let peer = end.peer;
            end.incoming.clear();
            end.queued = end.arrived.iter().map(Segment::len).sum();
            if let Some(peer) = peer {
                self.reset(peer);
            }
            return;
        }
        let due = now + pause;
        if let Some((first, _)) = end.incoming.front_mut() {
            *first = due;
        }
        end.last_due = end.last_due.max(due);
        self.schedule(due, Event::Deliver { end: number });
    }

    /// An end is gone: its peer learns that by a reset.
    fn answer_with_reset(&mut self, number: u64, now: Nanos) {
        let Some(end) = self.ends.remove(&number) else { return };
        if let Some(peer) = end.peer {
            let due = self.arrival(end.host, end.peer_host, 0, now);
            self.push_incoming(peer, due, Segment::Reset);
        }
    }

    /// Gives the kernel what has arrived at an end.
    fn flush(&mut self, number: u64, now: Nanos) {
        let Some(end) = self.ends.get_mut(&number) else { return };
        let Some(fd) = end.raw() else { return };
        let mut has_room = false;
        while let Some(first) = end.arrived.front_mut() {
            match first {
                Segment::Data(bytes) => match send(fd, bytes) {
                    EAGAIN => break,
                    n @ 0.. => {
                        has_room = true;
                        end.queued -= n as usize;
                        bytes.drain(..n as usize);
                        if !bytes.is_empty() {
                            continue;
                        }
                    }
                    _ => {
                        // The program has closed its socket.
                        self.transmit(number, Segment::Reset, now);
                        self.ends.remove(&number);
                        return;
                    }
                },
                Segment::Fin | Segment::Reset => {
                    let how = libc::SHUT_WR as usize;
                    // SAFETY: passes no pointers.
                    unsafe { syscall(libc::SYS_shutdown, [fd as usize, how]) };
                    end.is_finished = true;
                }
            }
            end.arrived.pop_front();
        }
        let peer = end.peer;
        self.remove_if_over(number);
        if has_room && let Some(peer) = peer {
            self.read_end(peer, now);
        }
    }

    /// Removes a connection that has ended in both directions.
    fn remove_if_over(&mut self, number: u64) {
        let is_over = |end: &End| end.has_ended && end.is_finished;
        let Some(end) = self.ends.get(&number) else { return };
        let peer = end.peer;
        let other = peer.and_then(|peer| self.ends.get(&peer));
        if is_over(end) && other.is_none_or(|other| is_over(other)) {
            self.ends.remove(&number);
            if let Some(peer) = peer {
                self.ends.remove(&peer);
            }
        }
    }

    /// Ends the connection of an end: the program's calls fail with `ECONNRESET`.
    fn reset(&mut self, number: u64) {
        let Some(end) = self.ends.remove(&number) else { return };
        if end.fd.is_some()
            && let Some(fd) = end.socket.and_then(|socket| self.descriptor_of(socket))
        {
            // A Unix socket that is closed with unread data resets the other side.
            send(fd, &[0]);
        }
    }

    /// Resets all connections between two hosts.
    fn reset_between(&mut self, a: u16, b: u16) {
        let is_between = |end: &End| [(a, b), (b, a)].contains(&(end.host, end.peer_host));
        let all = self.ends.entries().iter().filter(|(_, end)| is_between(end));
        let all: Vec<(u64, bool)> = all.map(|(n, end)| (*n, end.filler > 0)).collect();
        for (number, is_connecting) in all {
            if is_connecting {
                self.refused(number, libc::ECONNRESET);
            } else {
                self.reset(number);
            }
        }
    }

    /// A host has lost its power: its ends are gone. Their peers do not learn that.
    pub(super) fn lose_ends(&mut self, host: u16, now: Nanos) {
        let mut peers = Vec::new();
        for (_, end) in self.ends.iter_mut().filter(|(_, end)| end.host == host) {
            end.fd = None;
            end.arrived.clear();
            end.queued = end.incoming.iter().map(|(_, segment)| segment.len()).sum();
            peers.extend(end.peer);
        }
        // Peers that waited for room in the window send now; no host receives it.
        peers.into_iter().for_each(|peer| self.read_end(peer, now));
    }
}

impl Network {
    /// Resets all connections between two hosts.
    ///
    /// # Errors
    /// The first of the two names that no host has.
    pub(crate) fn reset_connections<'a>(&self, a: &'a str, b: &'a str) -> Result<(), &'a str> {
        let mut state = self.lock();
        let a = state.host_named(a).ok_or(a)?;
        let b = state.host_named(b).ok_or(b)?;
        state.reset_between(a, b);
        Ok(())
    }
}

/// The result of a connect that has begun.
pub(super) const IN_PROGRESS: isize = EINPROGRESS;

/// Fills the send buffer of the program's socket until the kernel does not report it as writable.
/// Returns the number of bytes.
fn fill(fd: RawFd) -> usize {
    let zeros = [0; 16 << 10];
    let mut filled = 0;
    loop {
        let mut one = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one entry of our own.
        if unsafe { crate::sys::raw::poll_ms(&raw mut one, 1, 0) } != 1 {
            return filled;
        }
        match send(fd, &zeros) {
            n @ 1.. => filled += n as usize,
            _ => return filled,
        }
    }
}

/// Receives without blocking.
fn receive(fd: RawFd, buffer: &mut [u8]) -> isize {
    let args = [fd as usize, buffer.as_mut_ptr() as usize, buffer.len()];
    let [fd, at, len] = args;
    // SAFETY: the kernel writes at most the buffer's length.
    unsafe { syscall(libc::SYS_recvfrom, [fd, at, len, libc::MSG_DONTWAIT as usize, 0, 0]) }
}

/// Sends without blocking.
fn send(fd: RawFd, bytes: &[u8]) -> isize {
    let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as usize;
    let args = [fd as usize, bytes.as_ptr() as usize, bytes.len(), flags, 0, 0];
    // SAFETY: the kernel reads the bytes.
    unsafe { syscall(libc::SYS_sendto, args) }
}
