//! Hosts, the network between them, and their disks: what a test does to them.

use crate::chan::{self, Receiver, Sender};
use crate::goroutine::go;
use crate::join_handle::JoinHandle;
use crate::sched::simulation::{self, Simulation, Undecided};
use crate::simnet::links::Change;
use crate::simnet::{self, Network};
use crate::sys::lock::Lock;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const MILLION: f64 = 1e6;

/// Returns the simulation and the network of the caller.
#[track_caller]
fn here(what: &str) -> (&'static Simulation, Arc<Network>) {
    let Some(simulation) = simulation::here() else {
        panic!("{what}: the caller is not in a simulation (sim::run)");
    };
    match simnet::of(simulation) {
        Some(network) => (simulation, network),
        None => panic!("{what}: sim::Builder::wait_outside leaves the network to the real one"),
    }
}

/// Adds a host with this name to the simulated network, and runs `main` on it, as a goroutine.
///
/// The goroutines that `main` starts are on the same host. Sockets of `std::net` and of
/// [`trefoil::net`](crate::net) on a host have its address, and reach other hosts by their names or
/// addresses. The goroutines of the test itself are on the host `test`.
///
/// When the test's function returns, all hosts lose their power: a server need not end.
///
/// ```
/// use std::io::{Read, Write};
/// use std::net::{TcpListener, TcpStream};
/// use trefoil::sim;
///
/// sim::run(|| {
///     sim::host("server", || {
///         let listener = TcpListener::bind("0.0.0.0:80").unwrap();
///         for stream in listener.incoming() {
///             stream.unwrap().write_all(b"hello").unwrap();
///         }
///     });
///     sim::settle(); // The server listens.
///     let mut answer = String::new();
///     TcpStream::connect("server:80").unwrap().read_to_string(&mut answer).unwrap();
///     assert_eq!(answer, "hello");
/// });
/// ```
///
/// # Panics
/// Panics outside a simulation, in one that [waits outside](super::Builder::wait_outside), and if
/// there is a host with this name.
#[track_caller]
pub fn host(name: &str, main: impl Fn() + Send + Sync + 'static) -> Host {
    let (_, network) = here("sim::host");
    assert!(network.address_of(name).is_none(), "sim::host: there is a host {name:?} already");
    let number = network.add_host(name);
    let shared = Shared {
        name: name.into(),
        number,
        network,
        main: Box::new(main),
        life: Lock::new(Life { incarnation: None, has_returned: false, ended: None, wait: None }),
    };
    let host = Host(Arc::new(shared));
    host.start();
    host
}

/// A host of a simulation; see [`host`]. Clones mean the same host.
///
/// ```
/// use trefoil::sim;
///
/// let name = sim::run(|| sim::host("worker", || ()).name().to_owned());
/// assert_eq!(name, "worker");
/// ```
#[derive(Clone)]
pub struct Host(Arc<Shared>);

struct Shared {
    name: Box<str>,
    number: u16,
    network: Arc<Network>,
    main: Box<dyn Fn() + Send + Sync>,
    /// A lock of the runtime: a goroutine that holds it is not preempted, so no crash leaves it
    /// locked.
    life: Lock<Life>,
}

struct Life {
    /// None while the host is down.
    incarnation: Option<u32>,
    /// `main` has returned.
    has_returned: bool,
    /// Dropped when `main` has returned, or the host has crashed.
    ended: Option<Sender<()>>,
    /// Closed then.
    wait: Option<Receiver<()>>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("name", &self.0.name)
            .field("address", &self.address())
            .field("is_up", &self.is_up())
            .finish()
    }
}

impl Host {
    /// Returns the name of the host.
    ///
    /// ```
    /// use trefoil::sim;
    /// sim::run(|| assert_eq!(sim::host("a", || ()).name(), "a"));
    /// ```
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the address of the host.
    ///
    /// ```
    /// use std::net::ToSocketAddrs;
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     let host = sim::host("a", || ());
    ///     let found = "a:80".to_socket_addrs().unwrap().next().unwrap();
    ///     assert_eq!(found.ip(), host.address());
    /// });
    /// ```
    pub fn address(&self) -> IpAddr {
        self.0.network.address_of(&self.0.name).unwrap_or(Ipv4Addr::UNSPECIFIED).into()
    }

    /// Returns whether the host has its power.
    ///
    /// ```
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     let host = sim::host("a", || ());
    ///     assert!(host.is_up());
    ///     host.crash();
    ///     assert!(!host.is_up());
    /// });
    /// ```
    pub fn is_up(&self) -> bool {
        self.0.life.lock().incarnation.is_some()
    }

    /// Cuts the power of the host. Does nothing if it is down.
    ///
    /// Its goroutines never run again: they are not unwound, and what they own is leaked. Other
    /// hosts notice nothing until they wait too long for an answer, or the host is up again and
    /// resets the connections that it does not know. On its [`disk`] is what it had written
    /// durably, and perhaps more.
    ///
    /// A goroutine may crash its own host; then this does not return.
    ///
    /// # Panics
    /// Panics outside the run in which the host was made.
    ///
    /// ```
    /// use std::net::TcpListener;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    /// use trefoil::{sim, time};
    /// use std::time::Duration;
    ///
    /// sim::run(|| {
    ///     let ticks = Arc::new(AtomicU32::new(0));
    ///     let counted = ticks.clone();
    ///     let host = sim::host("clock", move || loop {
    ///         time::sleep(Duration::from_secs(1));
    ///         counted.fetch_add(1, SeqCst);
    ///     });
    ///     time::sleep(Duration::from_millis(2500));
    ///     host.crash();
    ///     time::sleep(Duration::from_secs(60));
    ///     assert_eq!(ticks.load(SeqCst), 2);
    /// });
    /// ```
    pub fn crash(&self) {
        let (simulation, shared) = (self.simulation(), &*self.0);
        let (incarnation, ended) = {
            let mut life = shared.life.lock();
            (life.incarnation.take(), life.ended.take())
        };
        let Some(incarnation) = incarnation else { return };
        {
            // No other goroutine sees a host that has lost a part of what it loses.
            let _undecided = Undecided::begin();
            simulation::kill(simulation, incarnation);
            shared.network.lose_power(shared.number, incarnation);
            shared.network.lose_unsynced(shared.number);
            drop(ended);
        }
        simulation::stop_if_dead(simulation);
    }

    /// Returns the simulation of the host.
    #[track_caller]
    fn simulation(&self) -> &'static Simulation {
        let (simulation, network) = here("sim::Host");
        assert!(
            Arc::ptr_eq(&network, &self.0.network),
            "sim::Host: the host {:?} belongs to another run",
            self.0.name
        );
        simulation
    }

    /// Runs the main function of the host again, after a [crash](Host::crash) if the host is up.
    ///
    /// # Panics
    /// Panics outside the run in which the host was made.
    ///
    /// ```
    /// use std::fs;
    /// use trefoil::{sim, time};
    /// use std::time::Duration;
    ///
    /// sim::run(|| {
    ///     let host = sim::host("counter", || {
    ///         let path = sim::disk().join("starts");
    ///         let starts = fs::read(&path).map_or(0, |bytes| bytes.len());
    ///         fs::write(&path, vec![b'x'; starts + 1]).unwrap();
    ///         fs::File::open(&path).unwrap().sync_all().unwrap();
    ///         fs::File::open(sim::disk()).unwrap().sync_all().unwrap();
    ///     });
    ///     host.wait();
    ///     host.restart();
    ///     host.wait();
    ///     let read = || fs::read(sim::disk().join("starts")).unwrap();
    ///     assert_eq!(host.go(read).join().unwrap(), b"xx");
    /// });
    /// ```
    pub fn restart(&self) {
        self.crash();
        self.start();
    }

    /// Waits until the main function has returned, or the host has crashed. Returns whether it has
    /// returned.
    ///
    /// ```
    /// use trefoil::sim;
    ///
    /// sim::run(|| assert!(sim::host("a", || ()).wait()));
    /// ```
    pub fn wait(&self) -> bool {
        let wait = self.0.life.lock().wait.clone();
        if let Some(wait) = wait {
            // It fails when the sender is dropped; nothing is sent.
            _ = wait.recv();
        }
        self.0.life.lock().has_returned
    }

    /// Starts a goroutine on the host.
    ///
    /// ```
    /// use std::net::TcpListener;
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     let host = sim::host("a", || ());
    ///     let bind = || TcpListener::bind("0.0.0.0:80").unwrap().local_addr().unwrap();
    ///     assert_eq!(host.go(bind).join().unwrap().port(), 80);
    /// });
    /// ```
    ///
    /// # Panics
    /// Panics if the host is down, and outside the run in which the host was made.
    #[track_caller]
    pub fn go<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        let Some(incarnation) = self.0.life.lock().incarnation else {
            panic!("sim::Host::go: the host {:?} is down", self.0.name);
        };
        let simulation = self.simulation();
        go(move || {
            simulation::move_to(simulation, incarnation);
            f()
        })
    }

    fn start(&self) {
        let (simulation, shared) = (self.simulation(), &*self.0);
        let incarnation = simulation::begin_incarnation(simulation);
        shared.network.begin_incarnation(shared.number, incarnation);
        simulation.set_world_in_motion();
        let (ended, wait) = chan::bounded(0);
        let life = Life {
            incarnation: Some(incarnation),
            has_returned: false,
            ended: Some(ended),
            wait: Some(wait),
        };
        let before = {
            let mut place = shared.life.lock();
            std::mem::replace(&mut *place, life)
        };
        drop(before);
        let host = self.clone();
        let main = go(move || {
            simulation::move_to(simulation, incarnation);
            (host.0.main)();
            let ended = {
                let mut life = host.0.life.lock();
                life.has_returned = true;
                life.ended.take()
            };
            drop(ended);
        });
        drop(main);
    }
}

/// Returns the folder with the files of the caller's host. It is empty at first, and lives as long
/// as the run.
///
/// The files in it are real files. When the host [crashes](Host::crash), it keeps what was durable:
/// `fsync` (`File::sync_all`) of a file makes its bytes durable, of a folder the names in it. Of
/// everything newer the seed chooses what is kept: a file may have its old bytes, its new bytes, or
/// some sectors of each.
///
/// ```
/// use std::fs;
/// use trefoil::sim;
///
/// sim::run(|| {
///     fs::write(sim::disk().join("greeting"), "hello").unwrap();
///     assert_eq!(fs::read_dir(sim::disk()).unwrap().count(), 1);
/// });
/// ```
///
/// # Panics
/// Panics outside a simulation, in one that [waits outside](super::Builder::wait_outside), and if
/// the folder cannot be made.
#[track_caller]
pub fn disk() -> PathBuf {
    let (_, network) = here("sim::disk");
    match network.disk(simulation::incarnation()) {
        Ok(folder) => folder,
        Err(e) => panic!("sim::disk: cannot make a folder: {e}"),
    }
}

/// Returns the network of the caller's simulation.
///
/// Between two hosts a byte takes 0.5 to 1.5 ms, as the seed chooses; inside a host, 10 µs. A
/// stream keeps its order, datagrams do not. Nothing is lost unless the test asks for it, with one
/// exception: a datagram is lost if the receiver's queue stays full for 100 ms.
///
/// ```
/// use std::io::ErrorKind;
/// use std::net::TcpStream;
/// use trefoil::sim;
///
/// sim::run(|| {
///     sim::host("a", || ());
///     let refused = TcpStream::connect("a:80").unwrap_err();
///     assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
///     sim::net().partition("test", "a");
///     let lost = TcpStream::connect("a:80").unwrap_err();
///     assert_eq!(lost.kind(), ErrorKind::TimedOut);
/// });
/// ```
///
/// # Panics
/// Panics outside a simulation, and in one that [waits outside](super::Builder::wait_outside).
#[track_caller]
pub fn net() -> Net {
    Net(here("sim::net").1)
}

/// The network of a simulation; see [`net`].
///
/// ```
/// trefoil::sim::run(|| drop(trefoil::sim::net()));
/// ```
#[derive(Clone)]
pub struct Net(Arc<Network>);

impl fmt::Debug for Net {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Net").finish_non_exhaustive()
    }
}

impl Net {
    /// Cuts the links between two hosts, in both directions. Streams send again what is lost, as
    /// TCP does, and fail after 15 minutes; datagrams are lost.
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use std::net::{TcpListener, TcpStream};
    /// use std::time::{Duration, Instant};
    /// use trefoil::{go, sim, time};
    ///
    /// sim::run(|| {
    ///     let echo = sim::host("echo", || {
    ///         let (mut stream, _) = TcpListener::bind("0.0.0.0:7").unwrap().accept().unwrap();
    ///         let mut reader = stream.try_clone().unwrap();
    ///         std::io::copy(&mut reader, &mut stream).unwrap();
    ///     });
    ///     sim::settle();
    ///     let mut stream = TcpStream::connect("echo:7").unwrap();
    ///     sim::net().partition("test", "echo");
    ///     let healer = go(|| {
    ///         time::sleep(Duration::from_secs(10));
    ///         sim::net().heal("test", "echo");
    ///     });
    ///     let begin = Instant::now();
    ///     stream.write_all(b"!").unwrap();
    ///     stream.read_exact(&mut [0]).unwrap();
    ///     assert!(begin.elapsed() > Duration::from_secs(10));
    ///     healer.join().unwrap();
    /// });
    /// ```
    ///
    /// # Panics
    /// Panics if there is no such host.
    #[track_caller]
    pub fn partition(&self, a: &str, b: &str) {
        self.link(a, b).cut();
    }

    /// Ends a [partition](Net::partition).
    ///
    /// # Panics
    /// Panics if there is no such host.
    ///
    /// ```
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     sim::host("a", || ());
    ///     sim::net().partition("test", "a");
    ///     sim::net().heal("test", "a");
    /// });
    /// ```
    #[track_caller]
    pub fn heal(&self, a: &str, b: &str) {
        self.link(a, b).heal();
    }

    /// Returns the links between two hosts, in both directions.
    ///
    /// ```
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     sim::host("a", || ());
    ///     sim::net().link("test", "a").set_loss(0.1);
    /// });
    /// ```
    pub fn link(&self, a: &str, b: &str) -> Link {
        let pair = |a: &str, b: &str| (a.into(), b.into());
        Link { network: self.0.clone(), pairs: Some(vec![pair(a, b), pair(b, a)]) }
    }

    /// Returns the link from one host to another, in this direction only.
    ///
    /// ```
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     sim::host("a", || ());
    ///     sim::net().one_way("test", "a").cut();
    /// });
    /// ```
    pub fn one_way(&self, from: &str, to: &str) -> Link {
        Link { network: self.0.clone(), pairs: Some(vec![(from.into(), to.into())]) }
    }

    /// Returns the links between all hosts, also of those that are added later.
    ///
    /// ```
    /// use std::time::Duration;
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     let millisecond = Duration::from_millis(1);
    ///     sim::net().all_links().set_latency(millisecond..=100 * millisecond);
    /// });
    /// ```
    pub fn all_links(&self) -> Link {
        Link { network: self.0.clone(), pairs: None }
    }

    /// Resets all connections between two hosts: calls on both sides fail with `ConnectionReset`.
    ///
    /// # Panics
    /// Panics if there is no such host.
    ///
    /// ```
    /// use std::io::{ErrorKind, Read};
    /// use std::net::{TcpListener, TcpStream};
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     sim::host("a", || {
    ///         let (mut stream, _) = TcpListener::bind("0.0.0.0:1").unwrap().accept().unwrap();
    ///         let _ = stream.read(&mut [0]);
    ///     });
    ///     sim::settle();
    ///     let mut stream = TcpStream::connect("a:1").unwrap();
    ///     sim::net().reset("test", "a");
    ///     assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    /// });
    /// ```
    #[track_caller]
    pub fn reset(&self, a: &str, b: &str) {
        if let Err(name) = self.0.reset_connections(a, b) {
            panic!("sim::Net::reset: there is no host {name:?}");
        }
    }
}

/// Links between hosts; see [`Net::link`].
///
/// ```
/// use trefoil::sim;
///
/// sim::run(|| {
///     sim::host("a", || ());
///     let link = sim::net().link("test", "a");
///     link.set_loss(0.5);
///     link.set_bandwidth(Some(1_000_000));
/// });
/// ```
#[derive(Clone)]
pub struct Link {
    network: Arc<Network>,
    /// From where to where; None means all links.
    pairs: Option<Vec<(Box<str>, Box<str>)>>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("pairs", &self.pairs).finish_non_exhaustive()
    }
}

/// # Panics
/// Every method panics if there is no such host.
impl Link {
    /// Sets how long a byte takes: the seed chooses a time in this range for each segment and
    /// datagram.
    ///
    /// ```
    /// use std::time::Duration;
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     sim::host("far", || ());
    ///     let latency = Duration::from_millis(100)..=Duration::from_millis(150);
    ///     sim::net().link("test", "far").set_latency(latency);
    /// });
    /// ```
    #[track_caller]
    pub fn set_latency(&self, range: RangeInclusive<Duration>) {
        self.change(Change::Latency(*range.start(), *range.end()));
    }

    /// Sets how many bytes pass in a second. None means any number.
    ///
    /// ```
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     sim::host("slow", || ());
    ///     sim::net().link("test", "slow").set_bandwidth(Some(10_000));
    /// });
    /// ```
    #[track_caller]
    pub fn set_bandwidth(&self, bytes_per_second: Option<u64>) {
        self.change(Change::Bandwidth(bytes_per_second));
    }

    /// Sets the probability with which a datagram is lost, from 0 to 1. A segment of a stream is
    /// lost with it, too, and sent again.
    ///
    /// ```
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     sim::host("a", || ());
    ///     sim::net().link("test", "a").set_loss(0.01);
    /// });
    /// ```
    #[track_caller]
    pub fn set_loss(&self, probability: f64) {
        self.change(Change::Loss((probability.clamp(0.0, 1.0) * MILLION) as u64));
    }

    /// Lets nothing pass until [`heal`](Link::heal).
    ///
    /// ```
    /// use trefoil::sim;
    ///
    /// sim::run(|| {
    ///     sim::host("a", || ());
    ///     sim::net().one_way("a", "test").cut();
    /// });
    /// ```
    #[track_caller]
    pub fn cut(&self) {
        self.change(Change::Cut(true));
    }

    /// Lets everything pass again.
    ///
    /// ```
    /// trefoil::sim::run(|| trefoil::sim::net().all_links().heal());
    /// ```
    #[track_caller]
    pub fn heal(&self) {
        self.change(Change::Cut(false));
    }

    #[track_caller]
    fn change(&self, change: Change) {
        let Some(pairs) = &self.pairs else { return self.network.change_all_links(change) };
        for (from, to) in pairs {
            if let Err(name) = self.network.change_link(from, to, change) {
                panic!("sim::Link: there is no host {name:?}");
            }
        }
    }
}
