//! Programs that run different code on different processes.

pub use mpmd_core::*;
