//! Continues a text, or replies to a message, by a model from a folder:
//! `cargo run --release --bin generate -- --model DIR --prompt TEXT`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use mpmd_job::{JobArgs, at_least, say};
use mpmd_models::Folder;
use mpmd_models::generate::{self, GenerateArgs};

/// Continue a text by a model from a folder of a model hub, as a pipeline
#[derive(Parser)]
struct Args {
    /// Folder with config.json, tokenizer.json and the weights as safetensors
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Number of stages over which the layers are divided
    #[arg(long, default_value_t = 1, value_parser = at_least(1))]
    stages: usize,
    #[command(flatten)]
    generation: GenerateArgs,
    #[command(flatten)]
    job: JobArgs,
}

fn main() -> ExitCode {
    let Args { model, stages, generation, job } = Args::parse();
    let run = || generate::run(&Folder::open(model)?, &generation, stages, &job);
    run().unwrap_or_else(|error: anyhow::Error| {
        say(&format!("error: {error:#}"));
        ExitCode::FAILURE
    })
}
