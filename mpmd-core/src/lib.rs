//! mpmd core

// So that `#[derive(Tree)]`, which names this crate from outside, also works inside it.
extern crate self as mpmd_core;

pub mod aval;
mod fingerprint;
pub mod random;
pub mod region;
pub mod reshard;
pub mod sharding;
pub mod topology;
pub mod tree;
pub mod backend;
