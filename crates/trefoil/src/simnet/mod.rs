//! The network and the disks of a simulation.
//!
//! In a simulation an Internet socket is a Unix socket whose other end the *network* holds. So the
//! kernel does for simulated sockets what it does for others: buffers, `poll` and `epoll`, `dup`,
//! blocking and non-blocking calls, timeouts. The network moves the bytes from end to end, when the
//! simulated time has come:
//!
//! ```text
//!   client ──▶ end ──(latency, loss, partition)──▶ end ──▶ server
//!       Unix socket pair        segments        Unix socket pair
//! ```
//!
//! | file | content |
//! |---|---|
//! | `name.rs` | addresses as names of Unix sockets |
//! | `links.rs` | hosts, and the links between them: latency, bandwidth, loss, partition |
//! | `connections.rs` | streams: connect, segments, end and reset |
//! | `datagrams.rs` | datagrams |
//! | `sockets.rs` | the calls of the program: `socket`, `bind`, `connect`, addresses, options |
//! | `disk.rs` | what is on a host's disk after a crash |
//! | `retired.rs` | descriptors of goroutines that never run again |
//! | `children.rs` | child processes, which have the descriptors of their parent at first |
//!
//! # When it runs
//! The driver of the simulation calls [`Network::advance`] when all goroutines wait, before the
//! time jumps. That is early enough: the time stands still while a goroutine runs, and what it
//! sends arrives at the earliest one latency later.
//!
//! Invariants:
//! 1. One thread at a time uses a network: goroutines of a runtime with one P. No code here enters
//!    the runtime or makes an interposed call while it holds the lock.
//! 2. Nothing here depends on addresses of memory, on numbers of descriptors, or on hash maps with
//!    random keys: the same seed leads to the same run.
//! 3. No call here touches a descriptor of another simulation. A system call holds the open file
//!    while it runs: if the owner closed the descriptor in that moment, the file would stay open a
//!    little longer, and the other simulation would not be repeatable. A new child process holds
//!    all files for a moment (`children.rs`).
//!
//! # Rejected
//! - Sockets without descriptors of the kernel: `poll`, `epoll`, `dup`, `fcntl` and the event loops
//!   of other crates would have to be imitated, too.
//! - A goroutine per connection that copies: its switches would be decisions of the schedule.

pub(crate) mod children;
mod connections;
mod datagrams;
pub(crate) mod disk;
pub(crate) mod links;
mod name;
pub(crate) mod retired;
pub(crate) mod sockets;

use crate::sched::simulation::{self, Simulation, World};
use crate::sys::clock::{self, NEVER, Nanos};
use crate::sys::raw::syscall;
use crate::sys::rng::Rng;
use crate::sys::sorted_map::SortedMap;
use connections::End;
use datagrams::{Datagram, Puppet};
use links::{Host, Link};
use name::{Name, NameKind};
use sockets::Socket;
use std::any::Any;
use std::cmp::Ordering as Order;
use std::collections::BinaryHeap;
use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The first of the ports that sockets without one get, and their number.
const FIRST_PORT: u16 = 49152;
const PORTS: u16 = u16::MAX - FIRST_PORT;
/// The most events of the kernel that are taken at once.
const EVENTS: usize = 64;

/// Numbers the networks of the process.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// The network of one run. See the head of the file.
pub(crate) struct Network(Mutex<State>);

struct State {
    number: u32,
    rng: Rng,
    /// For the network's sockets. None before the first one.
    epoll: Option<NetworkFd>,
    hosts: Vec<Host>,
    /// The hosts of the incarnations (`sched/simulation/`).
    incarnations: Vec<u16>,
    /// Links that were used or changed, by their hosts (from, to). A link between two hosts begins
    /// as a copy of `default_link`.
    links: SortedMap<(u16, u16), Link>,
    default_link: Link,
    /// The program's sockets, by their numbers.
    sockets: SortedMap<u64, Box<Socket>>,
    /// The numbers of the sockets, by descriptor. Several descriptors may refer to one socket.
    descriptors: SortedMap<RawFd, u64>,
    /// The incarnations that own epoll instances and eventfds, by descriptor.
    event_descriptors: SortedMap<RawFd, u32>,
    ends: SortedMap<u64, Box<End>>,
    puppets: SortedMap<u64, Puppet>,
    puppet_of: SortedMap<(u16, SocketAddr), u64>,
    /// What happens when.
    events: BinaryHeap<Scheduled>,
    /// The last number that a socket, an end, a puppet or an event got.
    last_number: u64,
    last_port: u16,
    disks: disk::Disks,
    /// Descriptors of this run in `retired.rs`.
    retired: Vec<RawFd>,
}

/// What happens at a time in the network.
enum Event {
    /// The request for a connection arrives at the listener's host.
    Request {
        end: u64,
        attempt: u32,
    },
    /// The answer arrives: the connection is established.
    Established {
        end: u64,
        attempt: u32,
    },
    /// The answer arrives: there is no connection.
    Refused {
        end: u64,
        error: c_int,
    },
    /// The next segment arrives at this end.
    Deliver {
        end: u64,
    },
    Datagram(Datagram),
}

/// An event with its time.
struct Scheduled {
    due: Nanos,
    /// Keeps the order of events at the same time.
    number: u64,
    event: Event,
}

/// The event that happens first is the largest: [`BinaryHeap`] returns that one.
impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> Order {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Scheduled) -> bool {
        self.cmp(other) == Order::Equal
    }
}

impl Eq for Scheduled {}

impl World for Network {
    fn contains(&self, fd: RawFd) -> bool {
        let incarnation = simulation::incarnation();
        let mut state = self.lock();
        let state = &mut *state;
        // What wakes an event loop is part of the simulation: its sockets are, and its threads.
        let owner = match state.descriptors.get(&fd) {
            Some(number) => state.sockets.get_mut(number).map(|socket| &mut socket.incarnation),
            None => state.event_descriptors.get_mut(&fd),
        };
        match owner {
            // A host may have received it from the test: the incarnation that waits for it owns it.
            Some(owner) if !simulation::is_of_test(incarnation) => *owner = incarnation,
            Some(_) => {}
            None => return false,
        }
        true
    }

    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

/// Returns the network in which the caller is simulated.
pub(crate) fn here() -> Option<Arc<Network>> {
    if clock::has_simulations() { here_slow() } else { None }
}

#[cold]
fn here_slow() -> Option<Arc<Network>> {
    of(simulation::here()?)
}

/// Returns the network of a simulation.
pub(crate) fn of(simulation: &Simulation) -> Option<Arc<Network>> {
    Network::from_world(simulation.world()?)
}

impl Network {
    /// Returns the network that is the world of a simulation.
    pub(crate) fn from_world(world: Arc<dyn World>) -> Option<Arc<Network>> {
        world.as_any().downcast().ok()
    }

    /// Returns a network without sockets, with one host for the test itself.
    pub(crate) fn new(seed: u64) -> Network {
        children::note_network();
        let mut state = State {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            rng: Rng::from_seed(seed),
            epoll: None,
            hosts: Vec::new(),
            incarnations: Vec::new(),
            links: SortedMap::new(),
            default_link: Link::new(),
            sockets: SortedMap::new(),
            descriptors: SortedMap::new(),
            event_descriptors: SortedMap::new(),
            ends: SortedMap::new(),
            puppets: SortedMap::new(),
            puppet_of: SortedMap::new(),
            events: BinaryHeap::new(),
            last_number: 0,
            last_port: 0,
            disks: disk::Disks::new(),
            retired: Vec::new(),
        };
        state.add_host(links::TEST_HOST);
        state.incarnations.push(0);
        Network(Mutex::new(state))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves everything that can move at the current time. Returns when the next event is due.
    pub(crate) fn advance(&self) -> Nanos {
        let mut state = self.lock();
        let now = clock::now();
        loop {
            let mut moved = state.take_kernel_events(now);
            while state.events.peek().is_some_and(|first| first.due <= now)
                && let Some(first) = state.events.pop()
            {
                state.happen(first.event, now);
                moved = true;
            }
            if !moved {
                return state.events.peek().map_or(NEVER, |first| first.due);
            }
        }
    }
}

impl State {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    fn schedule(&mut self, due: Nanos, event: Event) {
        let number = self.next_number();
        self.events.push(Scheduled { due, number, event });
    }

    fn happen(&mut self, event: Event, now: Nanos) {
        match event {
            Event::Request { end, attempt } => self.request_arrives(end, attempt, now),
            Event::Established { end, attempt } => self.established(end, attempt, now),
            Event::Refused { end, error } => self.refused(end, error),
            Event::Deliver { end } => self.deliver_due(end, now),
            Event::Datagram(datagram) => self.deliver_datagram(datagram, now),
        }
    }

    /// Serves the network's sockets that have become ready. Returns whether there were any.
    fn take_kernel_events(&mut self, now: Nanos) -> bool {
        let Some(epoll) = &self.epoll else { return false };
        let mut list = [const { libc::epoll_event { events: 0, u64: 0 } }; EVENTS];
        let args = [epoll.as_raw_fd() as usize, list.as_mut_ptr() as usize, EVENTS, 0, 0, 8];
        // SAFETY: the kernel writes at most `EVENTS` events.
        let n = unsafe { syscall(libc::SYS_epoll_pwait, args) };
        for event in &list[..n.max(0) as usize] {
            let (token, events) = (event.u64, event.events);
            if token & 1 == 0 {
                self.end_is_ready(token >> 1, events, now);
            } else {
                self.read_puppet(token >> 1, now);
            }
        }
        n > 0
    }

    /// Adds a socket of the network to its epoll instance. `token` is a number and, in its lowest
    /// bit, whether it is a puppet's.
    fn watch(&mut self, fd: &NetworkFd, token: u64) -> Result<(), isize> {
        if self.epoll.is_none() {
            // SAFETY: passes no pointers.
            let make =
                || unsafe { syscall(libc::SYS_epoll_create1, [libc::EPOLL_CLOEXEC as usize]) };
            self.epoll = Some(owned(make)?);
        }
        let Some(epoll) = &self.epoll else { return Ok(()) };
        let events = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        let add = libc::EPOLL_CTL_ADD as usize;
        let args = [epoll.as_raw_fd() as usize, add, fd.as_raw_fd() as usize];
        // SAFETY: the kernel reads one event.
        check(unsafe {
            let [epoll, add, fd] = args;
            syscall(libc::SYS_epoll_ctl, [epoll, add, fd, &raw mut event as usize])
        })
        .map(|_| ())
    }

    /// Returns a name of this network for one of its own sockets.
    fn name(&self, kind: NameKind, host: u16, number: u64, addr: SocketAddr) -> Name {
        Name { network: self.number, kind, host, number, addr, local: name::UNSPECIFIED }
    }

    /// Returns the names under which a socket of `host` may be reached at `addr`, the most specific
    /// one first.
    fn names_at(&self, kind: NameKind, host: u16, addr: SocketAddr) -> [Name; 3] {
        let any = [IpAddr::from([0u8; 4]), IpAddr::from([0u16; 8])];
        let [v4, v6] = any.map(|ip| self.name(kind, host, 0, SocketAddr::new(ip, addr.port())));
        [self.name(kind, host, 0, addr), v4, v6]
    }
}

/// Makes a Unix socket of the network, which does not block.
fn unix_socket(kind: c_int) -> Result<NetworkFd, isize> {
    let kind = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: passes no pointers.
    owned(|| unsafe { syscall(libc::SYS_socket, [libc::AF_UNIX as usize, kind as usize, 0]) })
}

/// Calls `bind` or `connect` with a name.
fn call_with_name(number: libc::c_long, fd: RawFd, name: &Name) -> isize {
    let (raw, len) = name.encode();
    // SAFETY: the kernel reads the name.
    unsafe { syscall(number, [fd as usize, &raw const raw as usize, len]) }
}

/// Converts a result of the kernel.
///
/// # Errors
/// The negative error number.
fn check(result: isize) -> Result<isize, isize> {
    if result < 0 { Err(result) } else { Ok(result) }
}

/// A descriptor that the network owns. Unlike std's, it is closed without libc: the network is
/// locked then (invariant 1).
struct NetworkFd(RawFd);

impl NetworkFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

impl Drop for NetworkFd {
    fn drop(&mut self) {
        sockets::close_marked(self.0);
    }
}

/// Duplicates a descriptor.
fn duplicate(fd: &NetworkFd) -> Option<OwnedFd> {
    let args = [fd.0 as usize, libc::F_DUPFD_CLOEXEC as usize, 0];
    // SAFETY: passes no pointers.
    let fd = unsafe { syscall(libc::SYS_fcntl, args) };
    // SAFETY: the kernel has just returned it.
    check(fd).ok().map(|fd| unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Takes over the new descriptor that `make` returns.
fn owned(make: impl FnOnce() -> isize) -> Result<NetworkFd, isize> {
    Ok(NetworkFd(check(sockets::make_marked(make))? as RawFd))
}

/// Returns the status of an open file.
fn status(fd: RawFd) -> Option<libc::stat> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills the structure, which has its layout on the 64-bit targets.
    let rc = unsafe { syscall(libc::SYS_fstat, [fd as usize, stat.as_mut_ptr() as usize]) };
    // SAFETY: zeroed, then filled.
    (rc == 0).then(|| unsafe { stat.assume_init() })
}
