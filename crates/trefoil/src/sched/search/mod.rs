//! How an M finds its next goroutine, and what it does if there is none.
//!
//! | file | content |
//! |---|---|
//! | `find.rs` | the order in which an M with a P searches, and the end of a search |
//! | `steal.rs` | taking goroutines from other Ps |
//! | `wait_for_p.rs` | how an M without a P sleeps, and how it gets a P |
//! | `idle.rs` | the counters and barriers that ensure that no wake-up is lost |

pub(crate) mod find;
pub(crate) mod idle;
pub(crate) mod steal;
pub(crate) mod wait_for_p;
