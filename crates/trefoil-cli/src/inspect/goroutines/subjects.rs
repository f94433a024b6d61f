//! One goroutine, or one task: its id, its state, what it waits for, and where it was started.
//!
//! A goroutine that changes while it is read is read again, [`TRIES`] times. A carrier, a goroutine
//! that polls tasks, is shown as the task that it polls.

use std::collections::HashMap;

use super::{Goroutine, Kind, M, Place, Reader, Stack};
use crate::inspect::memory::{u32_at, u64_at};
use crate::inspect::stacks::Unwinder;

/// How many times a goroutine that changes while it is read is read again.
const TRIES: u32 = 4;

/// The present time of a runtime's coarse clock.
struct Clock {
    now_ms: u64,
}

/// Results that many goroutines share, by address.
#[derive(Default)]
pub(super) struct Cache {
    places: HashMap<u64, Option<Place>>,
    pub(super) functions: HashMap<u64, Option<String>>,
    clocks: HashMap<u64, Option<Clock>>,
}

impl Reader<'_> {
    pub(super) fn state(&self, g: &[u8]) -> u64 {
        u32_at(g, self.at.g_state as usize).into()
    }

    pub(super) fn head_byte(&self, bytes: &[u8], at: u64) -> u64 {
        bytes[at as usize].into()
    }

    /// Reads a goroutine until it does not change meanwhile. Returns None if it has ended.
    pub(super) fn goroutine(
        &self,
        address: u64,
        first: &[u8],
        ms: &[M],
        cache: &mut Cache,
        unwinder: &mut Unwinder,
    ) -> Option<Goroutine> {
        let at = &self.at;
        let mut bytes = first.to_vec();
        let identity = |bytes: &[u8]| {
            let word = |offset| u64_at(bytes, offset as usize);
            (word(at.g_id), self.state(bytes), word(at.g_sp))
        };
        let mut stack = Stack::Unknown;
        let mut running = None;
        for _ in 0..TRIES {
            if self.state(&bytes) == at.state_dead {
                return None;
            }
            running = self.m_of(address, &bytes, ms);
            stack = self.stack(&bytes, running, unwinder);
            let before = identity(&bytes);
            self.process.read(address, &mut bytes).ok()?;
            if identity(&bytes) == before {
                break;
            }
            stack = Stack::Unknown;
        }
        if self.state(&bytes) == at.state_dead {
            return None;
        }
        let word = |offset: u64| u64_at(&bytes, offset as usize);
        let (sched, state) = (word(at.g_sched), self.state(&bytes));
        let is_waiting = state == at.state_waiting;
        let reason = self.head_byte(&bytes, at.g_head + at.head_reason);
        let since = u32_at(&bytes, (at.g_head + at.head_since) as usize);
        Some(Goroutine {
            kind: Kind::Goroutine,
            id: word(at.g_id),
            name: self.name(word(at.g_name), word(at.g_name + 8)),
            state: match state {
                s if s == at.state_waiting => self.reason(reason),
                s if s == at.state_runnable => "runnable".into(),
                _ => "running".into(),
            },
            is_waiting,
            waited_ms: is_waiting.then(|| self.waited(sched, since, cache)).flatten(),
            parent: word(at.g_parent),
            function: self.function(word(at.g_body), at.body_type_name, cache),
            place: self.place(word(at.g_created_at), cache),
            stack,
            thread: running.map(|m| m.thread.clone()),
            m: running.map(|m| m.id),
            polled_by: None,
            preempted: state == at.state_runnable && bytes[at.g_stopped as usize] != 0,
            address,
            wait: if is_waiting { self.wait(address, &bytes) } else { None },
            sched,
        })
    }

    /// Returns the M that runs the goroutine.
    fn m_of<'m>(&self, address: u64, g: &[u8], ms: &'m [M]) -> Option<&'m M> {
        let state = self.state(g);
        let suspended = state == self.at.state_waiting || state == self.at.state_runnable;
        ms.iter().find(|m| m.current == address && !suspended)
    }

    fn reason(&self, number: u64) -> String {
        self.reasons.get(number as usize).cloned().unwrap_or_else(|| "waiting".into())
    }

    fn name(&self, address: u64, len: u64) -> Option<String> {
        if address == 0 { None } else { self.process.text(address, len) }
    }

    /// Returns how long a goroutine or task has waited.
    fn waited(&self, sched: u64, since: u32, cache: &mut Cache) -> Option<u64> {
        let clock = cache.clocks.entry(sched).or_insert_with(|| {
            let coarse = u64::from(self.half_word(sched, self.at.sched_coarse_ms).ok()?);
            let started = self.word(sched, self.at.sched_started_at).ok()?;
            // A core file does not say when it was written: the runtime's coarse clock does, about.
            let now_ms = match self.process.is_live() {
                true => monotonic_nanos().saturating_sub(started) / 1_000_000,
                false => coarse,
            };
            Some(Clock { now_ms })
        });
        let waited = (clock.as_ref()?.now_ms as u32).wrapping_sub(since);
        // The coarse clock of `since` may be a little ahead.
        Some(if waited > u32::MAX / 2 { 0 } else { waited.into() })
    }

    /// Returns the address of the place where a task was spawned, from its word for that. Bit 0
    /// says that its labels are between.
    fn task_place(&self, origin: u64) -> u64 {
        match origin & 1 {
            0 => origin,
            _ => self.word(origin & !1, self.at.labels_created_at).unwrap_or(0),
        }
    }

    fn place(&self, address: u64, cache: &mut Cache) -> Option<Place> {
        let read = || {
            let file = self.word(address, self.location.file).ok()?;
            let len = self.word(address, self.location.file + 8).ok()?;
            let line = self.half_word(address, self.location.line).ok()?;
            Some(Place { file: self.process.text(file, len)?, line })
        };
        cache.places.entry(address).or_insert_with(read).clone()
    }

    /// Turns a carrier into the task that it polls. Returns false if the task has ended.
    pub(super) fn become_task(&self, g: &mut Goroutine, address: u64, cache: &mut Cache) -> bool {
        let mut bytes = vec![0; self.at.task_contents as usize];
        if self.process.read(address, &mut bytes).is_err() {
            return false;
        }
        let Some(task) = self.task(address, &bytes, cache) else { return false };
        g.kind = Kind::Task;
        g.polled_by = Some(g.id);
        (g.id, g.name, g.function, g.place) = (task.id, task.name, task.function, task.place);
        (g.parent, g.address) = (0, task.address);
        true
    }

    /// Reads a task that is not being polled. Returns None if the block is free.
    pub(super) fn task(&self, address: u64, bytes: &[u8], cache: &mut Cache) -> Option<Goroutine> {
        let at = &self.at;
        let word = |offset: u64| u64_at(bytes, offset as usize);
        let state = word(at.task_state);
        if state & at.task_alive == 0 {
            return None;
        }
        let sched = word(at.task_sched);
        let is_waiting = state & (at.task_scheduled | at.task_running) == 0;
        let reason = self.head_byte(bytes, at.task_head + at.head_reason);
        let since = u32_at(bytes, (at.task_head + at.head_since) as usize);
        let body = word(at.task_body);
        let function = self.function(body, at.task_type_name, cache);
        // A block without a future stands for a waker.
        if function.as_deref() == Some("") {
            return None;
        }
        Some(Goroutine {
            kind: Kind::Task,
            id: word(at.task_id),
            name: self.task_name(address, body),
            state: match is_waiting {
                true => self.reason(reason),
                false if state & at.task_running != 0 => "running".into(),
                false => "runnable".into(),
            },
            is_waiting,
            waited_ms: is_waiting.then(|| self.waited(sched, since, cache)).flatten(),
            parent: 0,
            function,
            place: self.place(self.task_place(word(at.task_origin)), cache),
            stack: Stack::None,
            thread: None,
            m: None,
            polled_by: None,
            preempted: false,
            address,
            wait: None,
            sched,
        })
    }

    fn task_name(&self, task: u64, body: u64) -> Option<String> {
        let offset = self.word(body, self.at.task_name_at).ok()?;
        if offset > 1 << 30 {
            return None;
        }
        let mut contents = task.wrapping_add(self.at.task_contents);
        if self.byte(body, self.at.task_boxed).ok()? != 0 {
            contents = self.process.u64(contents).ok()?;
        }
        let name = contents.checked_add(offset)?;
        self.name(self.process.u64(name).ok()?, self.word(name, 8).ok()?)
    }
}

fn monotonic_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one `timespec`.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
