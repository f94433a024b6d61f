//! Waiting for several descriptors at once: `poll`, `select` and `epoll_wait` of user code.
//!
//! The goroutine arms each descriptor ([`Pollable::arm`]) and puts one node into the list of each.
//! The first event ends the wait.
//!
//! Rejected: an epoll instance per wait. The kernel allows at most 500 paths from a file through
//! one epoll instance into another. If more goroutines than that waited for one descriptor, each
//! together with a descriptor of its own, they would block their threads.

use crate::sched::Sched;
use crate::sched::netpoll::pollable::{Direction, Pollable};
use crate::sched::netpoll::poller::Shard;
use crate::sched::simulation::WaitOutside;
use crate::sched::wait::list::{Node, sleep_in_any};
use crate::sched::wait::reason::WaitReason;
use crate::sys::clock::Nanos;
use std::io;
use std::os::fd::RawFd;

/// One direction of one descriptor, of several that a goroutine waits for.
pub(crate) struct Watched {
    pub(crate) pollable: &'static Pollable,
    pub(crate) fd: RawFd,
    pub(crate) direction: Direction,
}

/// Waits until one of `all` may be ready, or until `limit`. As [`Pollable::wait_armed`] it
/// registers each of them, and the kernel reports those that are ready already.
///
/// # Errors
/// Fails if one of them cannot be polled: it is closed, or a regular file, or memory or epoll
/// watches are exhausted.
pub(crate) fn wait_for_any(sched: &Sched, all: &[Watched], limit: Nanos) -> io::Result<()> {
    let _outside = WaitOutside::begin(all.first().map_or(-1, |one| one.fd))?;
    let seen: Vec<u32> = all.iter().map(|one| one.pollable.edges(one.direction)).collect();
    let mut armed = Armed { all, count: 0 };
    let mut shard_bits = 0;
    for one in all {
        let shard = one.pollable.arm(sched, one.fd, one.direction)?;
        armed.count += 1;
        shard_bits |= sched.poller.bit_of(shard);
    }
    let nodes: Vec<Node> = all.iter().map(|_| Node::new(0)).collect();
    sched.poller.shards_of(shard_bits).for_each(|shard| shard.count_waiter(sched));
    sleep_in_any(
        &nodes,
        WaitReason::IoWait,
        limit,
        |i, node| all[i].pollable.enqueue_if_unchanged(all[i].direction, seen[i], node),
        |i, node| all[i].pollable.dequeue(all[i].direction, node),
    );
    sched.poller.shards_of(shard_bits).for_each(Shard::uncount_waiter);
    drop(armed);
    Ok(())
}

/// Disarms the first `count` of `all` when it is dropped.
struct Armed<'a> {
    all: &'a [Watched],
    count: usize,
}

impl Drop for Armed<'_> {
    fn drop(&mut self) {
        self.all[..self.count].iter().for_each(|one| one.pollable.disarm(one.direction));
    }
}
