//! The life of a goroutine: started, parked and made ready, ended, joined.

pub(crate) mod body;
pub(crate) mod join;
pub(crate) mod locked;
pub(crate) mod scope;
pub(crate) mod spawn;
pub(crate) mod state;
