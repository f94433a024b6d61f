//! Model checks of the runtime's lock-free protocols with loom.
//!
//! The protocol files of `trefoil` name atomics and locks only through `crate::shim`. This crate
//! compiles the same files against a shim of loom's types and tiny capacities. loom then runs each
//! check once for every order of the threads' steps *and* for every value that the C11 memory model
//! allows a load to return. That is more than x86 allows: loom also finds an ordering that is
//! missing in the source but supplied by the processor.
//!
//! | module | file under test | property |
//! |---|---|---|
//! | [`runq`] | `sched/queues/runq.rs` | owner, thieves, runnext, overflow |
//! | [`wake`] | `sched/search/idle.rs`, `sched/queues/runq.rs` (R) | no M sleeps while work waits |
//! | [`idle_poller`] | `sched/search/idle.rs` (R) | an M always waits for the earliest timer |
//! | [`join`] | `sched/goroutine/join.rs` | the end of a goroutine or task meets its handle |
//! | [`task`] | `sched/task/state.rs` | wake-ups, polls and aborts of a task; stale wakers |
//! | [`park`] | `sched/goroutine/state.rs` | a park meets its wake-up |
//! | [`parker`] | `sys/parker.rs` | a thread's sleep meets its wake-up |
//! | [`stack_pool`] | `mem/stack_pool.rs` | the central stack pool |
//! | [`mutex`] | `sync/mutex_word.rs` (R) | mutual exclusion, hand-over |
//! | [`rwlock`] | `sync/rwlock_word.rs` (R) | readers or one writer |
//! | [`once`] | `sync/once_word.rs` (R) | the initialiser runs once |
//! | [`channel`] | `chan/{core,queue,buffer,handle}.rs` | sends, receives, closes, deadlines |
//! | [`select`] | `chan/select/passes.rs`, and those of `channel` | exactly one arm wins |
//! | [`timer`] | `time/{slot,timer}.rs`, and those of `channel` | a stop or reset meets a firing |
//!
//! (R) The module also *restates* steps of other files: copies, made by hand, of code that needs
//! real threads, Ms or epoll and cannot be compiled here. The head of each module names these
//! files. Restated steps show that the protocol is right, not that the runtime follows it: a change
//! of one of those files has to be repeated here. `sched/mod.rs`, `sched/wait/`, `chan/lock.rs` and
//! `queued_waiter.rs` of this crate are restatements as well: they stand for the scheduler below
//! the channels, timers and locks.
//!
//! Each check is a public function; `tests/models.rs` lists them. A *mutation check* (`detects_…`)
//! breaks one ordering or one step and passes only if loom finds the defect: it shows that the
//! other checks can fail.
//!
//! loom does not model a load that returns a value which is stored *later* (load buffering; no x86
//! does that either). So it cannot show whether a consumer's Release on `head`, which keeps its
//! reads of the slots before the slots' reuse, is needed. loom never fails a weak exchange without
//! a reason.
//!
//! Bounds: where the interleavings are too many, a check says how many preemptions it allows. A
//! preemption is a switch away from a thread that could go on; nearly every known bug needs at most
//! two.

// The shim defines more than each file uses, and the files more than the checks use. trefoil-base's
// are public there.
#![allow(dead_code, unreachable_pub)]

mod chan;
mod queued_waiter;
mod runtime;
mod sched;
mod shim;
mod sys;
mod time;

#[path = "../../trefoil/src/sched/search/idle.rs"]
mod idle_rs;
#[path = "../../trefoil/src/sched/goroutine/join.rs"]
mod join_rs;
#[path = "../../trefoil/src/sync/mutex_word.rs"]
mod mutex_word_rs;
#[path = "../../trefoil/src/sync/once_word.rs"]
mod once_word_rs;
#[path = "../../trefoil-base/src/sys/parker.rs"]
mod parker_rs;
#[path = "../../trefoil/src/sched/queues/runq.rs"]
mod runq_rs;
#[path = "../../trefoil/src/sync/rwlock_word.rs"]
mod rwlock_word_rs;
#[path = "../../trefoil-base/src/mem/stack_pool.rs"]
mod stack_pool_rs;
#[path = "../../trefoil/src/sched/goroutine/state.rs"]
mod state_rs;
#[path = "../../trefoil/src/sched/task/state.rs"]
mod task_state_rs;

pub mod channel;
pub mod explore;
pub mod idle_poller;
pub mod join;
pub mod mutex;
pub mod once;
pub mod park;
pub mod parker;
pub mod runq;
pub mod rwlock;
pub mod select;
pub mod stack_pool;
pub mod task;
pub mod timer;
pub mod wake;
