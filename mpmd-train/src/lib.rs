//! Training of pipelines: optimisers for arrays of any sharding, learning rates, data, and a
//! trainer.

// `#[derive(Tree)]` names this crate from outside.
extern crate mpmd_core as mpmd;

pub mod data;
pub mod optimizer;
mod rate;
pub mod stop;

pub use rate::Rate;
