//! Sockets and pipes on loopback: bounded in count and time.

mod close;
#[path = "../common/mod.rs"]
mod common;
mod drained;
mod like_std;
mod shards;
#[path = "../common/sockets.rs"]
mod sockets;
mod tcp;
mod types;
