//! What all Ms share, behind the scheduler's lock (`Sched::central`).
//!
//! One lock guards the global queues and all lists of idle Ps and Ms, because the decisions in
//! `assign.rs` read and change several of them together. It is taken rarely: a P's own queue serves
//! 60 of 61 scheduling steps.
//!
//! Invariants:
//! 1. `Sched::{global_len, spares, idle_poller_until}` and `Idle::idle_ps` are copies for readers
//!    without the lock. They are written only under it.
//! 2. Functions that choose an M to wake return a [`PendingWakes`](super::assign::PendingWakes),
//!    which the caller delivers after unlocking. Only rare paths wake a thread under the lock: they
//!    wake a sysmon that sleeps deeply or an idle poller that sleeps too long, or they end a failed
//!    start or a runtime.
//! 3. An M is in at most one of `idle_ms`, `locked_ms` and `idle_poller`. A P is in at most one of
//!    `idle_ps` and `ps_wanting_m`.

use super::global::GlobalQueues;
use crate::sched::m::M;
use crate::sched::monitor::handoff::MsWithoutP;
use crate::sched::netpoll::idle_poller::IdlePoller;
use crate::sched::p::P;
use crate::sched::runnable::RunList;

/// See the head of the file.
pub(crate) struct Central {
    pub(crate) global: GlobalQueues,
    /// Shelved carriers of idle Ps (`task/carrier.rs`).
    pub(crate) carriers: RunList,
    /// Ms that run a goroutine although their P was retaken.
    pub(crate) without_p: MsWithoutP,
    pub(crate) idle_poller: IdlePoller,
    /// Threads that the helper thread has started and that have not asked for a P yet.
    pub(crate) starting: u32,
    /// Ps that were assigned while no M was idle, linked through `P::idle_link`. If a claim on
    /// spinning goes with the P, the P is marked (`P::wants_spinning_m`).
    pub(super) ps_wanting_m: Option<&'static P>,
    pub(super) ps_wanting_m_count: u32,
    /// The last claim on spinning was returned while no M was idle. The next M that becomes idle
    /// checks all queues before.
    pub(crate) is_check_due: bool,
    /// Ms that wait for the goroutine that is locked to them, linked through `M::idle_link`.
    pub(super) locked_ms: Option<&'static M>,
    /// Ps without an M and without work, linked through `P::idle_link`.
    pub(super) idle_ps: Option<&'static P>,
    /// Ms without a P and without a goroutine, linked through `M::idle_link`.
    pub(super) idle_ms: Option<&'static M>,
    pub(super) idle_m_count: u32,
}

impl Central {
    pub(crate) const fn new() -> Self {
        Central {
            global: GlobalQueues::new(),
            carriers: RunList::new(),
            without_p: MsWithoutP::new(),
            idle_poller: IdlePoller::new(),
            starting: 0,
            ps_wanting_m: None,
            ps_wanting_m_count: 0,
            is_check_due: false,
            locked_ms: None,
            idle_ps: None,
            idle_ms: None,
            idle_m_count: 0,
        }
    }
}
