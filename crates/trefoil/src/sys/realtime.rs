//! Real-time threads: a thread of SCHED_FIFO or SCHED_RR runs until it blocks, and no thread of its own priority can stop
//! it.
//!
//! A thread inherits policy and priority. So in a real-time process sysmon would wait, on one CPU, for the goroutine that
//! it is to preempt. The threads that serve a runtime therefore run one step above those that run goroutines, and these
//! give way to each other at the end of a time slice.

use super::raw::syscall;

/// Policy and priority of a real-time thread.
#[derive(Clone, Copy)]
pub(crate) struct Realtime {
    policy: i32,
    priority: i32,
}

impl Realtime {
    /// Those of the calling thread; None if it is an ordinary one.
    pub(crate) fn of_this_thread() -> Option<Realtime> {
        let mut param = libc::sched_param { sched_priority: 0 };
        // SAFETY: of this thread; writes one structure.
        let policy = unsafe {
            libc::sched_getparam(0, &raw mut param);
            libc::sched_getscheduler(0)
        };
        let is_realtime = policy == libc::SCHED_FIFO || policy == libc::SCHED_RR;
        is_realtime.then_some(Realtime { policy, priority: param.sched_priority })
    }

    /// One step more urgent.
    pub(crate) fn above(self) -> Realtime {
        Realtime { priority: self.priority + 1, ..self }
    }

    /// Lets other threads of the same priority run: a thread of SCHED_FIFO keeps its CPU otherwise, whatever it runs.
    #[cold]
    pub(crate) fn let_others_run(self) {
        // SAFETY: no arguments, touches no memory.
        unsafe { syscall(libc::SYS_sched_yield, []) };
    }

    /// Gives the calling thread this policy and priority. Without the right to do so it stays as it is.
    pub(crate) fn apply(self) {
        let param = libc::sched_param { sched_priority: self.priority };
        // SAFETY: of this thread; reads one structure.
        unsafe { libc::sched_setscheduler(0, self.policy, &raw const param) };
    }
}
