//! Serves a model from a folder: `cargo run --release --bin serve -- --model DIR`. Without a folder
//! it serves the demonstration model of this crate's sources.

use std::process::ExitCode;

use clap::Parser as _;
use mpmd_programs::{exit_code, serve};

fn main() -> ExitCode {
    exit_code(serve::serve(&serve::Serve::parse()))
}
