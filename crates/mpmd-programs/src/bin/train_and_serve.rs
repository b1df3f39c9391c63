//! Trains a model and serves it, in one program:
//! `cargo run --release --bin train_and_serve -- --model DIR TEXT`.

use std::process::ExitCode;

use clap::Parser as _;
use mpmd_programs::{exit_code, train_and_serve};

fn main() -> ExitCode {
    exit_code(train_and_serve::train_and_serve(
        &train_and_serve::TrainAndServe::parse(),
    ))
}
