//! Large answers: those with all goroutines, or with a recording.
//!
//! Each needs a [`Permit`], and there are [`PERMITS`] of them in the process, so that memory is
//! bounded. Requests get them in the order in which they have asked. A permit is kept until the
//! client has read the answer. It is revoked if the client reads less than [`MIN_BYTES`] in
//! [`WINDOW`] while another request waits, so that slow clients keep no other client out.
//!
//! Rejected: a bound on the bytes of all answers. How large an answer is, is known after it was
//! made.

use crate::connection::Connection;
use crate::http::Response;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Large answers that exist at the same time.
const PERMITS: usize = 2;
/// How long a request waits for a permit. A client that stops reading loses its permit after two
/// windows and a [`CHECK_INTERVAL`], at most.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// The pause between two attempts.
const WAIT_PAUSE: Duration = Duration::from_millis(10);
/// A client that reads less than `MIN_BYTES` in `WINDOW` is slow.
const MIN_BYTES: usize = 1 << 20;
const WINDOW: Duration = Duration::from_secs(1);
/// How often a sender checks whether its permit was revoked.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(250);

static QUEUE: Mutex<Queue> =
    Mutex::new(Queue { taken: 0, waiting: VecDeque::new(), next_ticket: 0 });

struct Queue {
    taken: usize,
    /// The tickets of the requests that wait, in the order in which they have asked.
    waiting: VecDeque<u64>,
    next_ticket: u64,
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Permission to make a large answer and to keep it until it was sent.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Permit(());

/// A ticket in the queue. It leaves the queue when it is dropped.
struct Ticket(u64);

impl Ticket {
    fn new() -> Ticket {
        let mut queue = queue();
        let ticket = queue.next_ticket;
        queue.next_ticket += 1;
        queue.waiting.push_back(ticket);
        Ticket(ticket)
    }

    /// Returns a permit if there is one and no other request has asked earlier.
    fn try_take(&self) -> Option<Permit> {
        let mut queue = queue();
        let is_next = queue.taken < PERMITS && queue.waiting.front() == Some(&self.0);
        is_next.then(|| {
            queue.taken += 1;
            Permit(())
        })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        queue().waiting.retain(|ticket| *ticket != self.0);
    }
}

impl Permit {
    /// Waits for a permit. If there is none for [`WAIT_MAX`], or if the client hangs up, returns
    /// what to answer instead.
    pub(crate) fn take(client: &Connection) -> Result<Permit, Response> {
        let ticket = Ticket::new();
        let end = Instant::now() + WAIT_MAX;
        loop {
            if let Some(permit) = ticket.try_take() {
                return Ok(permit);
            }
            if client.has_hung_up() {
                return Err(Response::hung_up());
            }
            if Instant::now() >= end {
                let text = "other large answers are being sent: ask again later";
                return Err(Response::error(503, text).with("Retry-After", "1"));
            }
            trefoil::time::sleep(WAIT_PAUSE);
        }
    }

    /// Returns whether the answer must be given up: the client is slow, and another request waits.
    pub(crate) fn is_revoked(&self, progress: &Progress) -> bool {
        progress.is_slow(Instant::now()) && !queue().waiting.is_empty()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        queue().taken -= 1;
    }
}

/// How fast a client reads.
pub(crate) struct Progress {
    window_start: Instant,
    bytes_in_window: usize,
    /// What the last complete window has shown.
    was_slow: bool,
}

impl Progress {
    pub(crate) fn new() -> Progress {
        Progress { window_start: Instant::now(), bytes_in_window: 0, was_slow: false }
    }

    pub(crate) fn add(&mut self, bytes: usize) {
        self.add_at(bytes, Instant::now());
    }

    fn add_at(&mut self, bytes: usize, now: Instant) {
        self.bytes_in_window += bytes;
        if now - self.window_start >= WINDOW {
            *self = Progress {
                window_start: now,
                bytes_in_window: 0,
                was_slow: self.bytes_in_window < MIN_BYTES,
            };
        }
    }

    fn is_slow(&self, now: Instant) -> bool {
        let is_over = now - self.window_start >= WINDOW;
        if is_over { self.bytes_in_window < MIN_BYTES } else { self.was_slow }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_given_in_the_order_of_the_requests() {
        let tickets = [(); PERMITS + 2].map(|()| Ticket::new());
        let mut permits = Vec::new();
        let mut tickets = Vec::from(tickets);
        assert!(tickets[1].try_take().is_none(), "another one has asked earlier");
        for _ in 0..PERMITS {
            permits.push(tickets[0].try_take().unwrap());
            tickets.remove(0);
        }
        assert!(tickets[0].try_take().is_none(), "all are taken");
        permits.pop();
        assert!(tickets[1].try_take().is_none(), "another one has asked earlier");
        tickets.remove(0);
        let last = tickets[0].try_take().unwrap();
        let slow = Progress { was_slow: true, ..Progress::new() };
        assert!(last.is_revoked(&slow), "a request waits");
        tickets.clear();
        assert!(!last.is_revoked(&slow), "no request waits");
    }

    #[test]
    fn a_client_is_slow_if_it_stops_after_a_fast_start() {
        let mut progress = Progress::new();
        let start = progress.window_start;
        let (soon, first_end, second_end) =
            (start + WINDOW / 4, start + WINDOW, start + 2 * WINDOW);
        assert!(!progress.is_slow(soon));
        progress.add_at(100 * MIN_BYTES, soon);
        progress.add_at(1, first_end);
        assert!(!progress.is_slow(first_end));
        progress.add_at(0, second_end);
        assert!(progress.is_slow(second_end));
        progress.add_at(MIN_BYTES, second_end + WINDOW);
        assert!(!progress.is_slow(second_end + WINDOW));
    }
}
