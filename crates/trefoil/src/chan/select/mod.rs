//! Waiting for the first of several channel operations and futures.
//!
//! | file | contents |
//! |---|---|
//! | `passes.rs` | the algorithm, over arms without types |
//! | `futures.rs` | the waker of the futures among the arms |
//! | `arms.rs` | arms with types, which the macro makes in its frame |
//! | `macros.rs` | `select!` |
//! | `ready.rs` | waits until an operation is ready, and does none |
//! | `dynamic.rs` | [`Select`]: a set of operations that is made at run time |

mod arms;
mod dynamic;
mod futures;
mod macros;
mod passes;
mod ready;

pub use self::arms::{
    AfterSlot, FutureSlot, RecvSlot, SelectRecv, SelectSend, SendSlot, recv_one, recv_within,
    send_one, send_within, try_recv_one, try_send_one,
};
pub use self::dynamic::{
    ReadyTimeoutError, Select, SelectTimeoutError, SelectedOperation, TryReadyError, TrySelectError,
};
pub use self::passes::{
    Arm, Chosen, choose, choose_first, choose_first_or_default, choose_or_default, no_cases,
    unchosen,
};
