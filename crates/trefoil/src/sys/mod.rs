//! System-call wrappers and what is built on them alone (locks, parking, clocks, the environment);
//! and maps and a sort that compile quickly.
//!
//! Nothing here knows goroutines, except that their thread-local storage may be current.

pub(crate) mod altstack;
pub(crate) mod clock;
pub(crate) mod cpus;
pub(crate) mod env;
pub(crate) mod epoll;
pub(crate) mod fork;
#[cfg(feature = "std")]
pub(crate) mod frame_waiter;
pub(crate) mod free_list;
pub(crate) mod futex;
pub(crate) mod lock;
pub(crate) mod map;
pub(crate) mod mm;
pub(crate) mod objects;
pub(crate) mod outputs;
pub(crate) mod parker;
pub(crate) mod probe;
pub(crate) mod raw;
pub(crate) mod realtime;
pub(crate) mod rng;
pub(crate) mod signal;
pub(crate) mod sort;
#[cfg(feature = "std")]
pub(crate) mod sorted_map;
pub(crate) mod stderr;
pub(crate) mod syscalls;
#[cfg(test)]
pub(crate) mod test_child;
pub(crate) mod thread;
pub(crate) mod vdso;

pub(crate) use stderr::fatal;
