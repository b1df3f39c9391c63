//! candle functions as kernels, and candle models as stages of a pipeline.

// `#[derive(Tree)]` names this crate from outside.
extern crate mpmd_core as mpmd;

mod matmul;
pub mod nn;
mod pass;
