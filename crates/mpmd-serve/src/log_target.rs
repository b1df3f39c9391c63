//! The target of the server's log.

/// The `tracing` target of lines about requests and changes of the server's state.
pub(crate) const LOG_TARGET: &str = "mpmd::serve";
