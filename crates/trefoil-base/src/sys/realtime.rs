//! Real-time policies: a thread with SCHED_FIFO or SCHED_RR runs until it blocks, and no thread of
//! its own priority can preempt it.
//!
//! A thread inherits policy and priority. So in a real-time process on one CPU, sysmon would wait
//! for the goroutine that it has to preempt. Therefore sysmon and the helper thread run one
//! priority above the Ms, and an M yields its CPU to the other Ms at the end of a time slice.

use super::raw::syscall;

/// Policy and priority of a real-time thread.
#[derive(Clone, Copy)]
pub struct Realtime {
    policy: i32,
    priority: i32,
}

/// Gives the calling thread the policy of most threads: what it does must not keep others waiting.
pub fn leave() {
    if Realtime::of_this_thread().is_some() {
        Realtime { policy: libc::SCHED_OTHER, priority: 0 }.apply();
    }
}

impl Realtime {
    /// Returns policy and priority of the calling thread; None if it is not a real-time thread.
    pub fn of_this_thread() -> Option<Realtime> {
        let mut param = libc::sched_param { sched_priority: 0 };
        // SAFETY: asks about this thread; writes one structure.
        let policy = unsafe {
            libc::sched_getparam(0, &raw mut param);
            libc::sched_getscheduler(0)
        };
        let is_realtime = policy == libc::SCHED_FIFO || policy == libc::SCHED_RR;
        is_realtime.then_some(Realtime { policy, priority: param.sched_priority })
    }

    /// Returns the next higher priority.
    pub fn above(self) -> Realtime {
        Realtime { priority: self.priority + 1, ..self }
    }

    /// Lets other threads of the same priority run: otherwise a thread with SCHED_FIFO keeps its
    /// CPU.
    #[cold]
    pub fn let_others_run(self) {
        // SAFETY: no arguments, touches no memory.
        unsafe { syscall(libc::SYS_sched_yield, []) };
    }

    /// Gives the calling thread this policy and priority. Does nothing without the permission to.
    pub fn apply(self) {
        let param = libc::sched_param { sched_priority: self.priority };
        // SAFETY: changes this thread; reads one structure.
        unsafe { libc::sched_setscheduler(0, self.policy, &raw const param) };
    }
}
