//! Trains or scores a model from a folder:
//! `cargo run --release --bin finetune -- --model DIR TEXT`.
//! Trains a new one: `--new CONFIG TEXT --save DIR`.

use std::process::ExitCode;

use clap::Parser as _;
use mpmd_programs::{exit_code, finetune};

fn main() -> ExitCode {
    exit_code(finetune::finetune(&finetune::Finetune::parse()))
}
