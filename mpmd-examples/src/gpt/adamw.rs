//! AdamW, its learning rate over time, and gradient clipping by the global norm.

use mpmd_train::Rate;
pub use mpmd_train::optimizer::{AdamStep, AdamW, clip_factor, square_sum};

/// A learning rate that rises linearly, then falls along half a cosine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WarmupCosine {
    /// The highest rate, reached in step `warmup`.
    pub peak: f64,
    /// The lowest rate, from step `total` on.
    pub floor: f64,
    /// Steps of the rise. With zero, the first step already has nearly the peak's rate.
    pub warmup: u64,
    /// Number of all steps.
    pub total: u64,
}

impl WarmupCosine {
    /// Returns the rate of a step, counted from 1.
    pub fn rate(&self, step: u64) -> f64 {
        let Self { peak, floor, warmup, total } = *self;
        Rate::WarmupCosine { peak, floor, warmup, total }.at(step)
    }
}
