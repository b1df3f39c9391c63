//! mpmd core
pub mod launch;
