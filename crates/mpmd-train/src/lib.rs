//! Training of pipelines: optimisers for arrays of any sharding, learning rates, data, checkpoints,
//! and a trainer.
//!
//! A [`Trainer`] has a pipeline, a schedule, an [`optimizer`] and a learning rate. [`Trainer::run`]
//! trains on [`data`], evaluates, saves [`Checkpoints`], and stops on Ctrl-C. Every process runs
//! the same program, and reads the same figures:
//!
//! ```
//! use mpmd_core::pipeline::{Loss, Pipeline, Schedule, Stage};
//! use mpmd_core::prelude::*;
//! use mpmd_train::data::{TextBytes, Windows};
//! use mpmd_train::optimizer::AdamW;
//! use mpmd_train::{Rate, Run, Trainer};
//!
//! /// Trains two stages to predict the next byte of the files in this folder.
//! fn train<A, B>(p: &mut Program, a: (A, A::Params), b: (B, B::Params)) -> Result<()>
//! where
//!     A: Stage<In = MpmdArray>,
//!     B: Stage<In = A::Out, Out = Loss<MpmdArray>>,
//! {
//!     let text = TextBytes::of(&["."])?;
//!     let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
//!     let pipeline = Pipeline::first(a.0, &meshes[0], a.1)?.then(b.0, &meshes[1], b.1)?;
//!     let data = Windows::new(&text, 64, 8)?;
//!     let schedule = Schedule::one_f_one_b(2, 4)?;
//!     let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
//!     let mut trainer = trainer.rate(Rate::Constant(3e-3)).clip(1.0);
//!     let outcome = trainer.run(p, Run::steps(200).evaluate_every(50), &data)?;
//!     if let (ProcessId(0), Some(loss)) = (p.process(), outcome.evaluation) {
//!         println!("held-out loss after step {}: {loss:.3}", outcome.steps);
//!     }
//!     Ok(())
//! }
//! # use mpmd_core::ProcessId;
//! ```
//!
//! Start the program with `Program::builder().devices(2).run(…)`. Then it also works with one
//! process, which has both devices.

#![forbid(unsafe_code)]

// `#[derive(Tree)]` names this crate from outside.
extern crate mpmd_core as mpmd;

mod agree;
mod best;
pub mod checkpoint;
pub mod data;
pub mod optimizer;
mod rate;
pub mod stop;
pub mod tensors;
mod trainer;

pub use best::BestEvaluation;
pub use checkpoint::Checkpoints;
pub use optimizer::{AdamW, Sgd};
pub use rate::Rate;
pub use trainer::{
    EvaluationHandle, EvaluationReport, ReportAnswer, Run, RunOutcome, StepHandle, StepReport,
    Trainer,
};
