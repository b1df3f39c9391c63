//! Programs with models from the folders of model hubs: `finetune`, `generate`, `serve` and
//! `train_and_serve`.
//!
//! They read arguments, print, and name options in their errors. The libraries below them,
//! `mpmd-models` and `mpmd-serve`, do none of that. Each program is a binary of this crate, and a
//! command of `mpmd`.

#![forbid(unsafe_code)]

mod chat;
mod division;
pub mod finetune;
mod front;
pub mod generate;
mod inputs;
mod model;
pub mod serve;
mod token_type;
pub mod train_and_serve;
mod weight_type;
mod weights;

use std::process::ExitCode;

use mpmd::job::say;

/// Returns the exit code of a program's result. Prints an error to stderr.
pub fn exit_code(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}
