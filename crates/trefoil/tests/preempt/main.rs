//! Preemption: at calls of the runtime and by signal, and `no_preempt`. Statements 24 to 26 of the
//! table in `mission/main.rs`, and what Go's own tests assert.
//!
//! Blocking calls are made by the bare `syscall` instruction, so that neither an interposed
//! function nor the runtime sees them.

#[path = "../common/mod.rs"]
mod common;
mod loops;
mod safety;
mod signals;

/// Loops for ever without a call.
fn endless() -> ! {
    #[allow(clippy::empty_loop)]
    loop {}
}
