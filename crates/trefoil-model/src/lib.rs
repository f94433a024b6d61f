//! Model checks: the runtime's lock-free protocols under every interleaving.
//!
//! The protocol files of `trefoil` name atomics and locks only through `crate::shim`. Here the very
//! same files are compiled against a shim of loom's types and tiny capacities, and loom runs
//! each check once for every order of the threads' steps *and* for every value that the C11 memory
//! model allows a load to return. That is more than x86 allows: an ordering that is missing in the
//! source but supplied by the processor is found too.
//!
//! | module | file under test | what |
//! |---|---|---|
//! | [`runq`] | `sched/runq.rs` | owner, thieves, runnext, overflow |
//! | [`wake`] | `sched/idle.rs` (and `runq.rs`) | nobody sleeps while work waits |
//! | [`keeper`] | `sched/idle.rs`, and the steps of `central.rs` | no timer is forgotten |
//! | [`join`] | `sched/join.rs` | a goroutine's end meets its handle |
//! | [`park`] | `sched/state.rs` | a park meets its wake-up |
//! | [`bed`] | `sys/parker.rs` | a thread's sleep meets its wake-up |
//! | [`depot`] | `mem/stack_pool.rs` | the pool of stacks |
//! | [`mutex`], [`rwlock`], [`once`] | `sync/{mutex,rwlock,once}_word.rs` | locking, handing over; running once |
//! | [`channel`] | `chan/{core,queue,buffer,handle}.rs` | sends, receives, closes, deadlines |
//! | [`select`] | `chan/select/passes.rs` (and those) | exactly one arm wins |
//! | [`timer`] | `time/{slot,timer}.rs` (and those) | a stop or reset meets the firing |
//!
//! Each check is a public function; `tests/models.rs` lists them. A check that ends in
//! `must_fail` runs a broken variant and is there to show that the others have
//! teeth.
//!
//! What loom does not see: a load that returns a value which is stored *later* (load buffering; no
//! x86 does that either). So it cannot tell whether a consumer's Release on `head`, which keeps its
//! reads of the slots before the slots' reuse, is needed. And it never fails a weak exchange.
//!
//! Bounds: where every interleaving is too many, a check says how many preemptions it allows. A
//! preemption is a switch away from a thread that could go on; nearly every known bug needs two.

// The shim gives more than each file uses, and the files more than the checks use.
#![allow(dead_code)]

mod chan;
mod nap;
mod runtime;
mod sched;
mod shim;
mod sys;
mod time;

#[path = "../../trefoil/src/mem/stack_pool.rs"]
mod stack_pool_rs;
#[path = "../../trefoil/src/sched/idle.rs"]
mod idle_rs;
#[path = "../../trefoil/src/sched/join.rs"]
mod join_rs;
#[path = "../../trefoil/src/sync/mutex_word.rs"]
mod mutex_word_rs;
#[path = "../../trefoil/src/sync/once_word.rs"]
mod once_word_rs;
#[path = "../../trefoil/src/sys/parker.rs"]
mod parker_rs;
#[path = "../../trefoil/src/sched/runq.rs"]
mod runq_rs;
#[path = "../../trefoil/src/sync/rwlock_word.rs"]
mod rwlock_word_rs;
#[path = "../../trefoil/src/sched/state.rs"]
mod state_rs;

pub mod bed;
pub mod channel;
pub mod depot;
pub mod explore;
pub mod join;
pub mod keeper;
pub mod mutex;
pub mod once;
pub mod park;
pub mod runq;
pub mod rwlock;
pub mod select;
pub mod timer;
pub mod wake;
