//! System-call wrappers and what is built on them alone (locks, parking, clocks, the environment);
//! and maps and a sort that compile quickly.
//!
//! Nothing here knows goroutines, except that their thread-local storage may be current.

pub mod altstack;
pub mod clock;
pub mod cpus;
pub mod env;
pub mod epoll;
pub mod fork;
#[cfg(feature = "std")]
pub mod frame_waiter;
pub mod free_list;
pub mod futex;
pub mod lock;
pub mod map;
pub mod mm;
pub mod objects;
pub mod outputs;
pub mod parker;
pub mod probe;
pub mod raw;
pub mod realtime;
pub mod rng;
pub mod signal;
pub mod sort;
#[cfg(feature = "std")]
pub mod sorted_map;
pub mod stderr;
pub mod syscalls;
#[cfg(test)]
pub mod test_child;
pub mod thread;
pub mod vdso;

pub use stderr::fatal;
