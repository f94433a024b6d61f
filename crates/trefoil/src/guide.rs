//! Pages to read: how to begin, how to say it if you come from Go or from tokio, whether it is sound, where it ends.

#[doc = include_str!("../docs/start.md")]
pub mod start {}

#[doc = include_str!("../docs/for_go.md")]
pub mod for_go_programmers {}

#[doc = include_str!("../docs/for_tokio.md")]
pub mod for_tokio_programmers {}

#[doc = include_str!("../docs/soundness.md")]
pub mod is_it_sound {}

#[doc = include_str!("../docs/limits.md")]
pub mod limits {}
