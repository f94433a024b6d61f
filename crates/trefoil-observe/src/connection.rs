//! The connection of one client: its socket, and what its goroutine does.
//!
//! | phase | closed in favour of a new connection |
//! |---|---|
//! | `Receives` for [`PATIENCE`]: no request has come, or only a part of one | first |
//! | `Waits` for [`PATIENCE`]: for the client to read, or for a permit (`large_answer.rs`) | second |
//! | `Receives`, not so long | third |
//! | `Waits`, not so long; `Answers`: collects, or makes the answer | no |
//! | `Closed` | |
//!
//! Among those alike, the one that has waited for the longest time is closed. So clients that do
//! nothing, send slowly or do not read keep no other client out. A connection that was closed cannot
//! enter `Answers`: no request is carried out whose answer could not be sent.

use crate::access::Transport;
use crate::large_answer::{CHECK_INTERVAL, Permit, Progress};
use std::io::{self, Read, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trefoil::observer;

/// A client that takes longer than this is slow.
const PATIENCE: Duration = Duration::from_secs(2);

/// What is needed of a socket.
pub(crate) trait Stream: Send + Sync {
    fn receive(&self, buffer: &mut [u8]) -> io::Result<usize>;
    /// Sends a part of `bytes`. Returns its length.
    fn send(&self, bytes: &[u8]) -> io::Result<usize>;
    fn set_receive_deadline(&self, deadline: Instant) -> io::Result<()>;
    fn set_send_deadline(&self, deadline: Instant) -> io::Result<()>;
    fn has_hung_up(&self) -> bool;
    /// Makes all calls fail, also those that are under way.
    fn close(&self);
}

macro_rules! impl_stream {
    ($type:ty) => {
        impl Stream for $type {
            fn receive(&self, buffer: &mut [u8]) -> io::Result<usize> {
                (&mut &*self).read(buffer)
            }

            fn send(&self, bytes: &[u8]) -> io::Result<usize> {
                (&mut &*self).write(bytes)
            }

            fn set_receive_deadline(&self, deadline: Instant) -> io::Result<()> {
                self.set_read_deadline(Some(deadline))
            }

            fn set_send_deadline(&self, deadline: Instant) -> io::Result<()> {
                self.set_write_deadline(Some(deadline))
            }

            fn has_hung_up(&self) -> bool {
                observer::has_hung_up(self)
            }

            fn close(&self) {
                _ = <$type>::close(self);
            }
        }
    };
}

impl_stream!(trefoil::net::TcpStream);
impl_stream!(trefoil::net::UnixStream);

pub(crate) struct Connection {
    stream: Box<dyn Stream>,
    pub(crate) transport: Transport,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    /// When the client connected, or when all requests that had been received were answered.
    idle_at: Instant,
    /// When it last entered `Waits`.
    waits_since: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    Receives,
    Answers,
    Waits,
    Closed,
}

impl State {
    /// See [`Connection::closing_order`] and the head of the file.
    fn closing_order(&self) -> Option<(u8, Instant)> {
        match self.phase {
            Phase::Receives if self.idle_at.elapsed() > PATIENCE => Some((0, self.idle_at)),
            Phase::Waits if self.waits_since.elapsed() > PATIENCE => Some((1, self.waits_since)),
            Phase::Receives => Some((2, self.idle_at)),
            Phase::Waits | Phase::Answers | Phase::Closed => None,
        }
    }
}

impl Connection {
    pub(crate) fn new(stream: impl Stream + 'static, transport: Transport) -> Connection {
        let now = Instant::now();
        let state = State { phase: Phase::Receives, idle_at: now, waits_since: now };
        Connection { stream: Box::new(stream), transport, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the phase.
    ///
    /// # Errors
    /// The connection was closed in favour of another one.
    pub(crate) fn enter(&self, phase: Phase) -> io::Result<()> {
        let mut state = self.state();
        if state.phase == Phase::Closed {
            return Err(io::ErrorKind::NotConnected.into());
        }
        state.phase = phase;
        if phase == Phase::Waits {
            state.waits_since = Instant::now();
        }
        Ok(())
    }

    /// Notes that all requests that were received have been answered.
    pub(crate) fn set_idle(&self) {
        self.state().idle_at = Instant::now();
    }

    /// Waits for bytes.
    pub(crate) fn receive(&self, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
        self.stream.set_receive_deadline(deadline)?;
        self.stream.receive(buffer)
    }

    /// Sends all of `bytes` before the deadline.
    pub(crate) fn send_all(&self, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
        self.stream.set_send_deadline(deadline)?;
        while !bytes.is_empty() {
            bytes = &bytes[self.stream.send(bytes)?..];
        }
        Ok(())
    }

    /// As `send_all`. Fails if the client reads slowly and another request needs the permit.
    pub(crate) fn send_large(
        &self,
        mut bytes: &[u8],
        deadline: Instant,
        permit: &Permit,
    ) -> io::Result<()> {
        let mut progress = Progress::new();
        while !bytes.is_empty() {
            if permit.is_revoked(&progress) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_send_deadline(deadline.min(Instant::now() + CHECK_INTERVAL))?;
            let sent = match self.stream.send(bytes) {
                Err(e) if e.kind() == io::ErrorKind::TimedOut && Instant::now() < deadline => 0,
                other => other?,
            };
            progress.add(sent);
            bytes = &bytes[sent..];
        }
        Ok(())
    }

    /// Returns whether the client has closed the connection or its side of it, or the server has.
    pub(crate) fn has_hung_up(&self) -> bool {
        self.stream.has_hung_up()
    }

    /// Returns a key that is smaller for a connection that should be closed earlier; None if it
    /// must not be closed.
    pub(crate) fn closing_order(&self) -> Option<(u8, Instant)> {
        self.state().closing_order()
    }

    /// Closes it, unless it must not be closed. Returns whether it did.
    pub(crate) fn close_in_favour(&self) -> bool {
        let mut state = self.state();
        let closes = state.closing_order().is_some();
        if closes {
            state.phase = Phase::Closed;
            self.stream.close();
        }
        closes
    }

    pub(crate) fn close(&self) {
        self.stream.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state that began `seconds` ago.
    fn state(phase: Phase, seconds: u64) -> State {
        let then = Instant::now() - Duration::from_secs(seconds);
        // The other time must not matter.
        let (idle_at, waits_since) = match phase {
            Phase::Waits => (then - PATIENCE, then),
            _ => (then, then - PATIENCE),
        };
        State { phase, idle_at, waits_since }
    }

    #[test]
    fn slow_clients_are_closed_before_others_and_the_slowest_first() {
        let (patient, slow) = (0, 4);
        let in_order = [
            (Phase::Receives, slow + 2),
            (Phase::Receives, slow),
            (Phase::Waits, slow + 4),
            (Phase::Waits, slow + 2),
            (Phase::Receives, patient + 1),
            (Phase::Receives, patient),
        ];
        let orders: Vec<_> = in_order
            .map(|(phase, seconds)| {
                state(phase, seconds).closing_order().expect("it may be closed")
            })
            .into();
        assert!(orders.is_sorted_by(|a, b| a < b), "{orders:?}");
        let kept = [(Phase::Waits, patient), (Phase::Answers, slow), (Phase::Closed, slow)];
        for (phase, seconds) in kept {
            assert_eq!(state(phase, seconds).closing_order(), None, "{phase:?}");
        }
    }
}
