//! Guides: first steps, async code, what to do with a program that is slow or stuck, several
//! processes, trefoil for Go and tokio programmers, names that differ elsewhere, trefoil beside
//! other runtimes, why it is sound, and its limits.

#[doc = include_str!("../docs/start.md")]
pub mod start {}

#[doc = include_str!("../docs/async.md")]
pub mod async_on_trefoil {}

#[doc = include_str!("../docs/find_out_why.md")]
pub mod find_out_why {}

#[doc = include_str!("../docs/beyond_one_machine.md")]
pub mod beyond_one_machine {}

#[doc = include_str!("../docs/simulation.md")]
pub mod simulation {}

#[doc = include_str!("../docs/for_go.md")]
pub mod for_go_programmers {}

#[doc = include_str!("../docs/for_tokio.md")]
pub mod for_tokio_programmers {}

#[doc = include_str!("../docs/beside_others.md")]
pub mod beside_others {}

#[doc = include_str!("../docs/names.md")]
pub mod other_names {}

#[doc = include_str!("../docs/soundness.md")]
pub mod is_it_sound {}

#[doc = include_str!("../docs/limits.md")]
pub mod limits {}
