//! Continues a text, or replies to a message, by a model from a folder:
//! `cargo run --release --bin generate -- --model DIR --prompt TEXT`.

use std::process::ExitCode;

use clap::Parser as _;
use mpmd_programs::{exit_code, generate};

fn main() -> ExitCode {
    exit_code(generate::generate(&generate::Generate::parse()))
}
