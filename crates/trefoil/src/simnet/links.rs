//! Hosts, and the links between them.
//!
//! Every pair of hosts has a link in each direction. What is sent over it arrives after a latency,
//! which the seed chooses from a range, and after the time that the bandwidth demands. A lost or
//! cut segment of a stream is sent again, as TCP does; a lost datagram is lost.

use super::{Network, State};
use crate::sys::clock::Nanos;
use crate::sys::rng::Rng;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

/// The host of the test's own goroutines.
pub(crate) const TEST_HOST: &str = "test";
/// The latency between two hosts, at least and at most.
const LATENCY: (Nanos, Nanos) = (500_000, 1_500_000);
/// The latency inside a host.
const LOCAL_LATENCY: Nanos = 10_000;
/// The most hosts: their numbers are a part of their addresses.
const MAX_HOSTS: usize = 60_000;
const MILLION: u64 = 1_000_000;

/// A machine of the simulation.
pub(super) struct Host {
    pub(super) name: Box<str>,
    pub(super) ip: Ipv4Addr,
    /// It has not crashed, or was started again.
    pub(super) is_up: bool,
}

/// One direction between two hosts.
#[derive(Clone)]
pub(super) struct Link {
    /// At least and at most.
    latency: (Nanos, Nanos),
    /// Bytes per second.
    bandwidth: Option<u64>,
    /// How many of a million segments or datagrams are lost.
    loss: u64,
    pub(super) is_cut: bool,
    /// When the last byte that was sent has left.
    busy_until: Nanos,
}

/// What happens to something that is sent over a link.
pub(super) enum Passage {
    Arrives(Nanos),
    Lost,
}

impl Link {
    pub(super) fn new() -> Link {
        Link { latency: LATENCY, bandwidth: None, loss: 0, is_cut: false, busy_until: 0 }
    }

    /// Sends `len` bytes.
    fn send(&mut self, rng: &mut Rng, len: usize, now: Nanos) -> Passage {
        let mut sent = now;
        if let Some(bandwidth) = self.bandwidth {
            let nanos = (len as u128 * 1_000_000_000 / u128::from(bandwidth.max(1))) as Nanos;
            sent = self.busy_until.max(now).saturating_add(nanos);
            self.busy_until = sent;
        }
        let (least, most) = self.latency;
        let span = most.saturating_sub(least);
        let latency = least + if span == 0 { 0 } else { rng.next() % (span + 1) };
        if self.loss != 0 && rng.next() % MILLION < self.loss {
            return Passage::Lost;
        }
        Passage::Arrives(sent.saturating_add(latency))
    }
}

impl State {
    /// Adds a host, or returns the one with this name.
    pub(super) fn add_host(&mut self, name: &str) -> u16 {
        if let Some(host) = self.host_named(name) {
            return host;
        }
        let number = self.hosts.len();
        assert!(number < MAX_HOSTS, "a simulation has at most {MAX_HOSTS} hosts");
        let [high, low] = (number as u16 + 1).to_be_bytes();
        let ip = Ipv4Addr::new(10, 0, high, low);
        self.hosts.push(Host { name: name.into(), ip, is_up: true });
        number as u16
    }

    pub(super) fn host_named(&self, name: &str) -> Option<u16> {
        self.hosts.iter().position(|host| *host.name == *name).map(|i| i as u16)
    }

    /// Returns the host at an address, as the host `from` sees it.
    pub(super) fn host_at(&self, ip: IpAddr, from: u16) -> Option<u16> {
        if ip.is_loopback() || ip.is_unspecified() {
            return Some(from);
        }
        self.hosts.iter().position(|host| IpAddr::V4(host.ip) == ip).map(|i| i as u16)
    }

    /// Returns the address of `host` that a socket uses to talk to `other`.
    pub(super) fn ip_towards(&self, host: u16, other: IpAddr) -> IpAddr {
        match other {
            IpAddr::V4(ip) if ip.is_loopback() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_loopback() => ip.into(),
            _ => self.hosts[host as usize].ip.into(),
        }
    }

    fn link(&mut self, from: u16, to: u16) -> &mut Link {
        let default = &self.default_link;
        self.links.get_or_insert_with((from, to), || {
            let mut link = default.clone();
            if from == to {
                link = Link { latency: (LOCAL_LATENCY, LOCAL_LATENCY), ..Link::new() };
            }
            link
        })
    }

    /// Returns whether what is sent from one host to another can arrive.
    pub(super) fn is_connected(&mut self, from: u16, to: u16) -> bool {
        self.hosts[to as usize].is_up && !self.link(from, to).is_cut
    }

    /// Sends `len` bytes over a link.
    pub(super) fn send_over(&mut self, from: u16, to: u16, len: usize, now: Nanos) -> Passage {
        self.link(from, to);
        let Some(link) = self.links.get_mut(&(from, to)) else { return Passage::Lost };
        link.send(&mut self.rng, len, now)
    }
}

/// What a test may change about the links.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// At least and at most.
    Latency(Duration, Duration),
    /// Bytes per second.
    Bandwidth(Option<u64>),
    /// How many of a million are lost.
    Loss(u64),
    Cut(bool),
}

impl Link {
    fn apply(&mut self, change: Change) {
        match change {
            Change::Latency(least, most) => {
                let nanos = |d: Duration| d.as_nanos().min(u128::from(u64::MAX / 4)) as Nanos;
                self.latency = (nanos(least), nanos(most.max(least)));
            }
            Change::Bandwidth(bandwidth) => self.bandwidth = bandwidth,
            Change::Loss(loss) => self.loss = loss,
            Change::Cut(is_cut) => self.is_cut = is_cut,
        }
    }
}

impl Network {
    /// Adds a host, or finds the one with this name. Returns its number.
    pub(crate) fn add_host(&self, name: &str) -> u16 {
        self.lock().add_host(name)
    }

    /// Returns the address of the host with this name.
    pub(crate) fn address_of(&self, name: &str) -> Option<Ipv4Addr> {
        let state = self.lock();
        state.host_named(name).map(|host| state.hosts[host as usize].ip)
    }

    /// Changes the link from one host to another.
    ///
    /// # Errors
    /// The first of the two names that no host has.
    pub(crate) fn change_link<'a>(
        &self,
        from: &'a str,
        to: &'a str,
        change: Change,
    ) -> Result<(), &'a str> {
        let mut state = self.lock();
        let from = state.host_named(from).ok_or(from)?;
        let to = state.host_named(to).ok_or(to)?;
        state.link(from, to).apply(change);
        Ok(())
    }

    /// Changes all links between different hosts, also of hosts that are added later.
    pub(crate) fn change_all_links(&self, change: Change) {
        let mut state = self.lock();
        state.default_link.apply(change);
        for (_, link) in state.links.iter_mut().filter(|((from, to), _)| from != to) {
            link.apply(change);
        }
    }

    /// Notes that an incarnation of a host begins: it is up.
    pub(crate) fn begin_incarnation(&self, host: u16, incarnation: u32) {
        let mut state = self.lock();
        let index = incarnation as usize;
        if state.incarnations.len() <= index {
            state.incarnations.resize(index + 1, 0);
        }
        state.incarnations[index] = host;
        state.hosts[host as usize].is_up = true;
    }
}
