//! Training of pipelines: optimisers for arrays of any sharding, learning rates, data, and a
//! trainer.
//!
//! A [`Trainer`] has a pipeline, a schedule, an optimiser and a learning rate. [`Trainer::run`]
//! trains on [`data`], evaluates and stops on Ctrl-C. All processes run it alike.

// `#[derive(Tree)]` names this crate from outside.
extern crate mpmd_core as mpmd;

pub mod data;
pub mod optimizer;
mod rate;
pub mod stop;
mod trainer;

pub use optimizer::{AdamW, Sgd};
pub use rate::Rate;
pub use trainer::{
    EvaluationHandle, EvaluationReport, Outcome, Run, StepHandle, StepReport, Trainer,
};
