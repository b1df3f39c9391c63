//! Training of tiny pipelines, by simulated and real processes.

// `#[derive(Tree)]` names this crate from outside.
extern crate mpmd_core as mpmd;

mod chain;
mod checkpoints;
mod damage;
mod data;
mod kills;
mod metrics;
mod model_files;
mod optimizers;
mod recovery;
mod reports;
mod runs;
mod signals;
mod stages;
